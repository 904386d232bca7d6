"""Settings of prompt synthesis and answer regeneration. Imports no torch."""

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from dspark.config import Settings
from dspark.engine.config import EngineSettings

Temperature = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Endpoint = Annotated[str, Field(pattern=r"^https?://[^\s/]+(/\S*)?$")]


class PromptSeed(Settings):
    """One kind of prompt for the target to write: what stands before its words."""

    source: str = Field(min_length=1)
    """Name of the kind; unique, it opens the ids of its rows."""
    count: int = Field(ge=1)
    """Prompts to keep."""
    system: str | None = None
    """System message before the user turn; None: what the chat template puts there by itself."""
    prefixes: tuple[str, ...] = Field(("",), min_length=1)
    """First words of the user turn, taken in turn; the target goes on from them."""
    temperature: Temperature = 1.0
    top_p: float = Field(0.95, gt=0, le=1)
    max_tokens: int = Field(256, ge=1)
    """A prompt that has not ended by then is dropped."""


class SynthesizeSettings(Settings):
    """Prompts written by the target: it is given the beginning of a user turn and goes on as the user."""

    target: str = "smollm2-135m"
    """Built-in name, directory, GGUF file or hub id."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    out: Path
    """JSON-lines file of the prompts; a run that was cut off continues there."""
    seeds: tuple[PromptSeed, ...] = Field(min_length=1)
    seed: int = 0
    exclude: tuple[Path, ...] = ()
    """JSON-lines files whose user turns must not be repeated, evaluation sets above all."""
    min_words: int = Field(4, ge=1)
    max_attempts: int = Field(10, ge=1)
    """Give a kind up after so many attempts for each prompt to keep."""
    engine: EngineSettings = EngineSettings(max_batch=32, max_length=1024)

    @model_validator(mode="after")
    def _sources_are_unique(self) -> Self:
        sources = [seed.source for seed in self.seeds]
        if twice := {source for source in sources if sources.count(source) > 1}:
            raise ValueError(f"seeds: the source {min(twice)!r} is used twice: give each kind its own name")
        return self


class RemoteSettings(Settings):
    """How servers are asked."""

    model: str | None = None
    """Name of the model in requests; None: the one that the servers list."""
    api_key_env: str | None = None
    """Environment variable that holds the API key; None: none is sent."""
    concurrency: int = Field(16, ge=1)
    """Requests at once to each endpoint."""
    timeout: float = Field(600.0, gt=0, allow_inf_nan=False)
    """Seconds for one answer."""
    max_attempts: int = Field(6, ge=1)
    """Requests for one answer; then its prompt is given up on, until the next run."""
    backoff: float = Field(1.0, gt=0, allow_inf_nan=False)
    """Seconds before the second request; doubled for each one after it, and drawn from the upper half of that."""
    max_backoff: float = Field(60.0, gt=0, allow_inf_nan=False)
    """Seconds that are waited at most; a server's Retry-After is kept to where it asks for more than `backoff`."""
    max_failures: int = Field(50, ge=1)
    """Stop after so many prompts given up on one after the other: then it is not the prompts' fault."""


class RegenerateSettings(Settings):
    """Answers to given prompts, turn by turn: of a target loaded here, or of OpenAI-compatible servers."""

    target: str = "smollm2-135m"
    """Built-in name, directory, GGUF file or hub id; not loaded where there are endpoints."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    endpoints: tuple[Endpoint, ...] = ()
    """Servers of the target, such as "http://localhost:8000/v1"; /v1 is added where there is no path."""
    remote: RemoteSettings = RemoteSettings()
    """How the endpoints are asked."""
    prompts: tuple[Path, ...] = Field(min_length=1)
    """JSON-lines files; answers in them are left out."""
    out: Path
    """JSON-lines file of the conversations; a run that was cut off continues there."""
    limit: int | None = Field(None, ge=1)
    """Prompts of each file, drawn by `seed`; None: all. A higher limit adds to the lower one's prompts."""
    seed: int = 0
    """Decides the order of the prompts, and for each its temperature, suffix and random numbers."""
    temperatures: dict[Temperature, Annotated[float, Field(gt=0, allow_inf_nan=False)]] = Field(
        {0.0: 1.0}, min_length=1
    )
    """Temperature -> weight: each prompt draws its own."""
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0)
    max_tokens: int = Field(512, ge=1)
    """Tokens of one answer; a longer one is kept and marked as not finished."""
    suffixes: dict[str, Annotated[tuple[str, ...], Field(min_length=1)]] = Field({})
    """Source -> texts of which one is added to the first turn of each of its prompts; "" leaves it as it is."""
    template_variables: dict[str, Any] = Field({})
    """Given to the chat template, such as enable_thinking = false."""
    skip_bad: bool = False
    """Leave malformed lines out instead of stopping."""
    engine: EngineSettings = EngineSettings(max_batch=32, max_length=2048)

    @model_validator(mode="after")
    def _endpoints_are_unique(self) -> Self:
        if len(set(self.endpoints)) < len(self.endpoints):
            raise ValueError("endpoints: one is named twice: raise remote.concurrency to ask it more at once")
        return self
