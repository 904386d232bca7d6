"""Options of `dspark load`. Imports no torch."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, NamedTuple, Self

import tyro
from pydantic import Field, field_validator, model_validator

from dspark.config import Settings
from dspark.evaluation.config import ReportOptions

_MODE = re.compile(r"(server|plain|static|adaptive)(?:-([1-9]\d*))?(?:@(https?://\S+))?")


class Mode(NamedTuple):
    """How requests ask to be decoded, and of whom."""

    name: str  # as given, without the address
    kind: str  # server: nothing is asked
    max_draft: int | None
    url: str | None  # None = the command's

    @classmethod
    def parse(cls, text: str) -> Mode:
        """From KIND[-DRAFTS][@URL]. Raises ValueError."""
        found = _MODE.fullmatch(text)
        if found is None or (found[1] in ("server", "plain") and found[2]):
            raise ValueError(
                f"{text!r} is no mode: server, plain, static or adaptive; static-3; static@http://HOST:PORT"
            )
        kind, drafts, url = found.groups()
        return cls(text.partition("@")[0], kind, int(drafts) if drafts else None, url)

    @property
    def speculative(self) -> dict[str, object] | None:
        """The request's `speculative` object; None where nothing is asked."""
        if self.kind == "server":
            return None
        asked: dict[str, object] = {"mode": "off" if self.kind == "plain" else self.kind}
        return asked if self.max_draft is None else asked | {"max_draft": self.max_draft}


class RequestOptions(Settings):
    """What is asked."""

    tasks: tuple[str, ...] = Field(("mt-bench",), min_length=1)
    """Built-in names as of `dspark eval`, JSON-lines files of prompts, or CATEGORY=FILE. First turns are asked, the
    tasks' in turn, again from the start when they are used up."""
    data: Path | None = None
    """Directory of NAME.jsonl for the built-in tasks; by default they are fetched from their public homes once."""
    prompts: int = Field(80, ge=1)
    """Prompts of each task: its first ones."""
    prompt_words: int | None = Field(None, ge=1)
    """Make every prompt so many words long, by repeating or cutting it; by default they stay as they are."""
    max_tokens: int = Field(128, ge=1)
    """New tokens of an answer at most."""
    min_tokens: int | None = Field(None, ge=1)
    """Draw the longest length of each answer between this and max_tokens; by default all have max_tokens."""
    ignore_eos: bool = False
    """Let answers go on to their longest length; for servers that know the field of this name."""
    temperature: float = Field(0.0, ge=0, le=2)
    """Sampling temperature; 0 is greedy."""
    seed: int = Field(0, ge=0, lt=2**31)
    """Decides lengths, arrivals and the seed of each request."""

    @model_validator(mode="after")
    def _lengths_are_ordered(self) -> Self:
        if self.min_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens: {self.min_tokens} exceeds max_tokens {self.max_tokens}")
        return self


class LoadOptions(Settings):
    """Put load on an OpenAI-compatible server, and measure what users see: speeds, latencies, and what speculation did.

    Example: dspark load http://127.0.0.1:8000 --modes plain static --concurrency 1 4 16 --out load
    """

    url: Annotated[str, tyro.conf.Positional] = "http://127.0.0.1:8000"
    """Address of the server; /v1 is added where there is no path."""
    modes: tuple[str, ...] = Field(("server",), min_length=1)
    """What is compared: "server" asks nothing, for any server; "plain", "static", "adaptive" and "static-3" (at most so
    many drafts) are asked of a dspark server in `speculative`. MODE@URL asks another server."""
    concurrency: tuple[Annotated[int, Field(ge=1)], ...] = ()
    """Closed loop: so many requests under way at any time; without this and arrivals: 1 4 8."""
    arrivals: tuple[Annotated[float, Field(gt=0)], ...] = ()
    """Open loop: requests a second that come at random (Poisson), however many are under way."""
    requests: int = Field(32, ge=1)
    """Requests of each mode and load; four times the concurrency where that is more."""
    out: Path = Path("load")
    """Directory of rows.jsonl, load.json, load.html, pareto.png and latency.png. A run that was cut off goes on there,
    and other modes and loads are added."""
    label: Annotated[str, Field(pattern=r"^[^/]*$")] = ""
    """Stands before the modes' names, to tell servers apart that are measured into one directory."""
    model: str | None = None
    """Its name on the server; by default the first that the server lists."""
    api_key_env: str | None = None
    """Name of the environment variable that holds the API key."""
    timeout: float = Field(600.0, gt=0)
    """Seconds until a request counts as failed."""
    ask: RequestOptions = RequestOptions()
    report: ReportOptions = ReportOptions()

    @field_validator("modes")
    @classmethod
    def _modes_are_known(cls, values: tuple[str, ...]) -> tuple[str, ...]:
        names = [Mode.parse(value).name for value in values]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"{twice!r} comes twice: measure one of the servers in a run of its own, with --label")
        return values

    @property
    def loads(self) -> tuple[Load, ...]:
        """The loads, closed ones first."""
        closed = self.concurrency if self.concurrency or self.arrivals else (1, 4, 8)
        return (*(Load(size, None) for size in closed), *(Load(None, rate) for rate in self.arrivals))


class Load(NamedTuple):
    """One of the two."""

    concurrency: int | None  # requests under way at any time
    arrivals: float | None  # requests that come a second

    @property
    def name(self) -> str:
        """For ids and tables."""
        return f"{self.concurrency}" if self.concurrency is not None else f"{self.arrivals:g}/s"

    def num_requests(self, least: int) -> int:
        """Requests to measure: few at a high concurrency would be mostly beginning and end."""
        return max(least, 4 * (self.concurrency or 0))
