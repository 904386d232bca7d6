"""Settings of `dspark serve`. Imports no torch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, SecretStr, field_validator, model_validator

from dspark.config import Settings
from dspark.engine.config import EngineSettings, ModelOptions

API_KEY_VARIABLE = "DSPARK_API_KEY"
LOOPBACK = ("127.0.0.1", "localhost", "::1")


class LimitSettings(Settings):
    """What one client, and all of them together, may ask for."""

    max_waiting: int = Field(128, ge=0)
    """Answers that may wait for a place in the batch; one more is answered 429."""
    max_answers: int = Field(128, ge=1)
    """Answers to one request: prompts times n."""
    max_tokens: int | None = Field(None, ge=1)
    """New tokens of one answer at most: who asks for more is refused; by default what the context holds."""
    max_body_bytes: int = Field(4 << 20, ge=1024)
    """Bytes of a request's body; a longer one is answered 413."""
    request_seconds: float | None = Field(None, gt=0)
    """Time for one request, its wait included; then it is aborted. By default there is no limit."""
    drain_seconds: float = Field(30.0, ge=0)
    """After SIGTERM, running requests have so long to finish; then they are aborted."""
    crash_seconds: float = Field(2.0, ge=0)
    """After the engine failed, `/health` says so for so long; then the process exits with code 1."""


class ServeSettings(Settings):
    """The server, the engine behind it and the models in that."""

    model: ModelOptions = ModelOptions()
    engine: EngineSettings = EngineSettings()
    limits: LimitSettings = LimitSettings()
    host: str = "127.0.0.1"
    """Address to listen on; "0.0.0.0" is every interface: give an API key with it."""
    port: int = Field(8000, ge=0, le=65535)
    """0 takes a free one."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the models run; "auto" takes CUDA where there is one."""
    served_name: Annotated[str, Field(min_length=1)] | None = None
    """The name that requests give as `model`; by default the target's, without the directory."""
    api_key: SecretStr | None = Field(default_factory=lambda: _key_of_environment())
    """What clients must send as `Authorization: Bearer KEY`; by default that of the environment, DSPARK_API_KEY."""
    cors_origins: tuple[str, ...] = ()
    """Origins of web pages that may call this server from a browser, or "*"; by default none."""
    log_format: Literal["text", "json"] = "text"
    """"json": one JSON object a line."""
    round_events: int = Field(256, ge=0)
    """Recent rounds kept for `/rounds`; 0 turns that endpoint off."""

    @field_validator("api_key")
    @classmethod
    def _key_has_words(cls, value: SecretStr | None) -> SecretStr | None:
        if value is not None and not value.get_secret_value().strip():
            raise ValueError(f"api_key is empty: give a key, or leave it out and unset {API_KEY_VARIABLE}")
        return value

    @model_validator(mode="after")
    def _engine_fields_have_one_place(self) -> Self:
        for name, instead in (("max_waiting", "limits.max_waiting"), ("num_draft_tokens", "model.num_draft_tokens")):
            if getattr(self.engine, name) is not None:
                raise ValueError(f"engine.{name}: the server takes it from {instead}")
        return self

    @property
    def name(self) -> str:
        """The name of the model as clients give it."""
        return self.served_name or Path(self.model.target).name

    @property
    def engine_settings(self) -> EngineSettings:
        """The engine's settings with what follows from the server's."""
        return self.engine.replace(
            max_waiting=self.limits.max_waiting, record_rounds=self.engine.record_rounds or self.round_events > 0
        )

    @property
    def is_public(self) -> bool:
        """Whether other machines can reach the address."""
        return self.host not in LOOPBACK


def _key_of_environment() -> SecretStr | None:
    key = os.environ.get(API_KEY_VARIABLE)
    return None if key is None else SecretStr(key)
