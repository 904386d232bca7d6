"""What is kept of a load: one row a mode and load, with every request in it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Self

from dspark.errors import DataError
from dspark.evaluation.load.client import Reply


@dataclass(frozen=True)
class Asked:
    """One request; times are seconds since the load began."""

    index: int
    prompt: str  # its id
    arrived: float  # when it was due; in a closed loop, when it was sent
    sent: float
    ended: float
    pieces: tuple[float, ...] = ()  # when each piece of text came
    num_tokens: int = 0
    prompt_tokens: int = 0
    finish_reason: str | None = None
    speculative: dict[str, Any] | None = None
    error: str | None = None
    refused: bool = False  # the server said so, with a 4xx

    @classmethod
    def of(cls, index: int, prompt: str, arrived: float, reply: Reply, begun: float) -> Self:
        """An answered request of a load that began at `begun`; `arrived` is measured from there."""
        return cls(
            index,
            prompt,
            round(arrived, 6),
            round(reply.started - begun, 6),
            round(reply.ended - begun, 6),
            tuple(round(piece - begun, 6) for piece in reply.pieces),
            reply.num_tokens,
            reply.prompt_tokens,
            reply.finish_reason,
            reply.speculative,
        )


@dataclass(frozen=True)
class LoadRow:
    """One mode under one load."""

    series: str  # label and mode
    load: str
    concurrency: int | None  # closed loop
    arrivals: float | None  # open loop
    url: str
    model: str
    requests: tuple[Asked, ...]
    counters: dict[str, float] | None = None  # what the server's /metrics counted meanwhile

    @property
    def id(self) -> str:
        """No other row has it."""
        return f"{self.series}/{self.load}"

    def as_dict(self) -> dict[str, Any]:
        """The row of the file."""
        return {"id": self.id} | asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any], where: str) -> Self:
        """What `as_dict` gave, read back. Raises DataError naming `where` for anything else."""
        values = {key: value for key, value in data.items() if key != "id"}
        try:
            requests = (Asked(**one | {"pieces": tuple(one["pieces"])}) for one in values.pop("requests"))
            return cls(requests=tuple(requests), **values)
        except (KeyError, TypeError):
            raise DataError(f"{where}: not a row of `dspark load`: name a directory that it wrote") from None
