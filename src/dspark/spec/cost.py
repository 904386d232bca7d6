"""What a decode round takes: SPS profiles in SGLang's two shapes, and the whole round with its drafting time.

SPS: steps (rounds) a second. A profile tells the seconds of a step by requests and verify rows. All of them are
monotone: more rows never take less time, as a table with noise in it would say.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
from jaxtyping import Float64, Int64
from numpy import ndarray

from dspark.errors import ConfigError


@dataclass(frozen=True)
class DiagonalProfile:
    """Steps a second by rows: the sample at or below a count holds for it, the first and the last beyond the ends."""

    sample_batch_tokens: tuple[int, ...]  # rows, ascending
    sample_steps_per_sec: tuple[float, ...]
    max_batch_tokens: int  # rows beyond it count as so many

    def __post_init__(self) -> None:
        _check_axis("sample_batch_tokens", self.sample_batch_tokens, "sample_steps_per_sec", self.sample_steps_per_sec)
        if min(self.sample_steps_per_sec) <= 0:
            raise ConfigError("sample_steps_per_sec must be above 0: measure again")

    @cached_property
    def _table(self) -> tuple[ndarray, ndarray]:
        steps = np.minimum.accumulate(np.array(self.sample_steps_per_sec, dtype=np.float64))
        return np.array(self.sample_batch_tokens), 1 / steps

    def seconds(self, num_requests: int, rows: Int64[ndarray, "*n"]) -> Float64[ndarray, "*n"]:
        """Seconds of a step that verifies `rows` rows, whoever they are for."""
        samples, seconds = self._table
        below = np.searchsorted(samples, np.minimum(rows, self.max_batch_tokens), side="right") - 1
        found: ndarray = seconds[np.maximum(below, 0)]
        return found

    @property
    def is_flat(self) -> bool:
        """Whether more rows cost nothing, so that nothing would ever be trimmed."""
        return min(self.sample_steps_per_sec) == self.sample_steps_per_sec[0]


@dataclass(frozen=True)
class AdditiveProfile:
    """bias + alpha(requests) + theta(rows), each interpolated; beyond its last two probes a line goes on as it went."""

    bias_seconds: float
    bs_probes: tuple[int, ...]  # requests, ascending
    alpha_seconds: tuple[float, ...]
    m_probes: tuple[int, ...]  # rows, ascending
    theta_seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        _check_axis("bs_probes", self.bs_probes, "alpha_seconds", self.alpha_seconds)
        _check_axis("m_probes", self.m_probes, "theta_seconds", self.theta_seconds)
        least = self.bias_seconds + min(self.alpha_seconds) + min(self.theta_seconds)
        if least <= 0:
            raise ConfigError("bias_seconds + alpha_seconds + theta_seconds must be above 0: measure again")

    @cached_property
    def _lines(self) -> tuple["Lines", "Lines"]:
        return Lines(self.bs_probes, self.alpha_seconds), Lines(self.m_probes, self.theta_seconds)

    def seconds(self, num_requests: int, rows: Int64[ndarray, "*n"]) -> Float64[ndarray, "*n"]:
        """Seconds of a step of `num_requests` requests that verifies `rows` rows."""
        alpha, theta = self._lines
        return theta.at(rows) + (self.bias_seconds + alpha.at(np.array([num_requests])))

    @property
    def is_flat(self) -> bool:
        """Whether more rows cost nothing, so that nothing would ever be trimmed."""
        return max(self.theta_seconds) == self.theta_seconds[0]


Profile = DiagonalProfile | AdditiveProfile


@dataclass(frozen=True)
class Curve:
    """Seconds by number of requests, interpolated as `AdditiveProfile` does."""

    bs_probes: tuple[int, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        _check_axis("bs_probes", self.bs_probes, "seconds", self.seconds)

    @cached_property
    def _line(self) -> "Lines":
        return Lines(self.bs_probes, self.seconds)

    def at(self, num_requests: Int64[ndarray, "*n"]) -> Float64[ndarray, "*n"]:
        """Seconds for so many requests."""
        return self._line.at(num_requests)


@dataclass(frozen=True)
class RoundCosts:
    """A whole round: drafting, and everything after it. `verify` also tells of plain rounds where `plain` is missing.

    A file of either SGLang shape is a `RoundCosts` with `verify` alone: its steps have the drafting in them.
    """

    verify: Profile
    draft: Curve | None = None  # by the requests drafted for
    plain: Curve | None = None  # by all requests
    measured: Mapping[str, Any] = field(default_factory=dict)  # where and how; for the reader

    def seconds(
        self, num_requests: int, num_drafting: Int64[ndarray, "*n"], rows: Int64[ndarray, "*n"]
    ) -> Float64[ndarray, "*n"]:
        """See `planner.Costs`."""
        seconds, drafts = self.verify.seconds(num_requests, rows), num_drafting > 0
        if self.draft is not None:
            seconds = seconds + self.draft.at(num_drafting) * drafts
        if self.plain is not None:
            seconds = np.where(drafts, seconds, self.plain.at(np.array([num_requests])))
        return seconds

    def to_dict(self) -> dict[str, Any]:
        """As JSON objects; `from_dict` reads them."""
        parts: dict[str, Profile | Curve | None] = {"verify": self.verify, "draft": self.draft, "plain": self.plain}
        tables = {name: profile_dict(part) for name, part in parts.items() if part is not None}
        return tables | {"measured": dict(self.measured)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], where: str) -> "RoundCosts":
        """Read `to_dict`'s object, or either SGLang shape alone. Raises ConfigError naming `where` and the field."""
        try:
            if "verify" not in data:
                return cls(read_profile(data))
            unknown = set(data) - {"verify", "draft", "plain", "measured"}
            if unknown:
                raise ConfigError(f"unknown field {min(unknown)!r}: known are verify, draft, plain, measured")
            curves = {name: _read(Curve, data[name]) for name in ("draft", "plain") if data.get(name) is not None}
            return cls(read_profile(data["verify"]), measured=data.get("measured", {}), **curves)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None


def profile_dict(table: Profile | Curve) -> dict[str, Any]:
    """The fields of a profile: of `DiagonalProfile` and `AdditiveProfile` exactly those of SGLang's SPS table file."""
    values = {name: getattr(table, name) for name in table.__dataclass_fields__}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def read_profile(data: Mapping[str, Any]) -> Profile:
    """An SPS table of either shape. Raises ConfigError."""
    if not isinstance(data, Mapping):
        raise ConfigError("an SPS table is a JSON object")
    kind: type[Profile] = DiagonalProfile if "sample_batch_tokens" in data else AdditiveProfile
    profile: Profile = _read(kind, data)
    return profile


class Lines:
    """Piecewise linear through probes, monotone; flat before the first, beyond the last as steep as just before it."""

    def __init__(self, probes: Sequence[int], values: Sequence[float]) -> None:
        self.x = np.array(probes, dtype=np.float64)
        self.y = np.maximum.accumulate(np.array(values, dtype=np.float64))
        self.slope = np.diff(self.y) / np.diff(self.x) if len(self.x) > 1 else np.zeros(1)

    def at(self, x: Int64[ndarray, "*n"]) -> Float64[ndarray, "*n"]:
        """The value at each x."""
        left = np.minimum(np.maximum(np.searchsorted(self.x, x, side="right") - 1, 0), len(self.slope) - 1)
        value: ndarray = self.y[left] + self.slope[left] * np.maximum(x - self.x[left], 0.0)
        return value


def _read(kind: type[Any], data: Any) -> Any:
    """A table from its JSON object, the fields checked."""
    names = list(kind.__dataclass_fields__)
    if not isinstance(data, Mapping) or set(data) != set(names):
        raise ConfigError(f"expected the fields {', '.join(names)}: measure one with `dspark profile`")
    values: dict[str, Any] = {}
    for name, value in data.items():
        numbers = value if isinstance(value, list) else [value]
        if not numbers or not all(isinstance(n, int | float) and not isinstance(n, bool) for n in numbers):
            raise ConfigError(f"{name}: expected {'numbers' if isinstance(value, list) else 'a number'}")
        values[name] = tuple(value) if isinstance(value, list) else value
    return kind(**values)


def _check_axis(axis: str, probes: Sequence[int], name: str, values: Sequence[float]) -> None:
    if not isinstance(probes, tuple) or not isinstance(values, tuple) or len(probes) != len(values) or not probes:
        raise ConfigError(f"{name} and {axis} must be lists of one length")
    if any(a >= b for a, b in pairwise(probes)):
        raise ConfigError(f"{axis} must rise")
    if not np.isfinite(values).all():
        raise ConfigError(f"{name} has a value that is not finite: measure again")
