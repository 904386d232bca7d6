"""Figures of a set of rows: ratios of sums over prompts, with bootstrap intervals.

A prompt gives a vector of sums; resampling prompts is a product with a matrix of counts, and every figure is a ratio of
what comes out. Prompts are resampled within their task: the mix of tasks is chosen, not drawn.

Shapes: N prompts (or resampled sets of them, R of these), G drafts a round.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dspark.engine.request import RoundRecord
from dspark.evaluation.rows import Row

Array = NDArray[np.float64]
RESAMPLES = 2000
LEVEL = 95.0  # per cent


class Estimate(NamedTuple):
    """A figure and its 95 % interval (percentile bootstrap over prompts); None where there is nothing to divide by,
    and no interval from a single prompt."""

    value: float | None
    low: float | None = None
    high: float | None = None


class Sums(NamedTuple):
    """What the figures are ratios of. The leading axis is prompts [N], or resampled sets of them [R]."""

    rounds: Array  # [N], speculative rounds
    output: Array  # [N], tokens that they put out, the bonus counted, after stops
    proposed: Array  # [N], drafts proposed
    verified: Array  # [N], of them the target judged
    accepted: Array  # [N], of them it accepted
    judged: Array  # [N, G], rounds whose draft i was verified
    at_risk: Array  # [N, G], of them those that accepted every draft before i
    survived: Array  # [N, G], of them those that accepted draft i too
    outputs: Array  # [N, G + 2], rounds by number of tokens put out, from 0
    drafted: Array  # [N, 4], tokens and seconds of decode rounds; all tokens, seconds of prefill: with speculation
    paired: Array  # [N, 4], the same, of prompts that were also decoded plainly
    plain: Array  # [N, 4], the same, decoded plainly
    same: Array  # [N, 2], greedy answers that equal plain decoding's; those compared


class Figures(NamedTuple):
    """What is told of a set of rows. Lists go by draft position, from the first."""

    prompts: int
    rounds: int
    tau: Estimate  # tokens a round, the bonus counted
    acceptance_rate: Estimate  # drafts accepted, of those verified
    drafts_per_round: Estimate  # drafts verified
    verify_rate: Estimate  # drafts verified, of those proposed
    conditional: list[Estimate]  # P(draft i accepted | all before it accepted)
    survival: list[Estimate]  # P(draft i and all before it accepted)
    tokens_per_second: Estimate  # of decode rounds, with speculation
    plain_tokens_per_second: Estimate
    speedup: Estimate  # of decode rounds, on the same prompts
    speedup_with_prefill: Estimate
    same_as_plain: Estimate  # greedy answers whose text is plain decoding's
    outputs: list[int]  # rounds that put out 0, 1, 2 … tokens
    prompt_tau: list[float]  # one a prompt


def figures(rows: Sequence[Row], plain: Mapping[tuple[str, Any], Row], keep: Keep | None = None) -> Figures:
    """The figures of drafted rows; `plain` are plain rows by pair, `keep` selects rounds by their position."""
    sums = add_up(rows, plain, keep)
    point = ratios(total(sums, np.ones((1, len(rows)))))
    drawn = ratios(total(sums, resample([row.task for row in rows])))

    def estimate(name: str) -> Estimate:
        return interval(point[name][0], drawn[name], len(rows))

    def by_position(name: str) -> list[Estimate]:
        return [interval(value, drawn[name][:, i], len(rows)) for i, value in enumerate(point[name][0])]

    return Figures(
        prompts=len(rows),
        rounds=int(sums.rounds.sum()),
        conditional=by_position("conditional"),
        survival=by_position("survival"),
        outputs=[int(count) for count in sums.outputs.sum(axis=0)],
        prompt_tau=[float(value) for value in _ratio(sums.output, sums.rounds) if np.isfinite(value)],
        **{name: estimate(name) for name in SCALARS},
    )


SCALARS = (
    "tau", "acceptance_rate", "drafts_per_round", "verify_rate", "tokens_per_second", "plain_tokens_per_second",
    "speedup", "speedup_with_prefill", "same_as_plain",
)  # fmt: skip
Keep = Callable[[NDArray[np.int64]], NDArray[np.bool_]]  # positions of rounds -> which of them count


def ratios(sums: Sums) -> dict[str, Array]:
    """Every figure of each set, [R] or [R, G]; NaN where there is nothing to divide by."""
    speed, plain = _ratio(sums.drafted[:, 0], sums.drafted[:, 1]), _ratio(sums.plain[:, 0], sums.plain[:, 1])
    whole = [_ratio(part[:, 2], part[:, 1] + part[:, 3]) for part in (sums.paired, sums.plain)]
    return {
        "tau": _ratio(sums.output, sums.rounds),
        "acceptance_rate": _ratio(sums.accepted, sums.verified),
        "drafts_per_round": _ratio(sums.verified, sums.rounds),
        "verify_rate": _ratio(sums.verified, sums.proposed),
        "conditional": _ratio(sums.survived, sums.at_risk),
        "survival": _ratio(sums.survived, sums.judged),
        "tokens_per_second": speed,
        "plain_tokens_per_second": plain,
        "speedup": _ratio(_ratio(sums.paired[:, 0], sums.paired[:, 1]), plain),
        "speedup_with_prefill": _ratio(*whole),
        "same_as_plain": _ratio(sums.same[:, 0], sums.same[:, 1]),
    }


def add_up(rows: Sequence[Row], plain: Mapping[tuple[str, Any], Row], keep: Keep | None = None) -> Sums:
    """The sums of each drafted row."""
    width = max((r.num_drafts for row in rows for r in row.rounds), default=0)
    parts = [_sums_of(row, plain.get(row.pair), width, keep) for row in rows]
    return Sums(*(np.stack(column) for column in zip(*parts, strict=True)))


def _sums_of(row: Row, plain: Row | None, width: int, keep: Keep | None) -> Sums:
    table = as_table(row.rounds)
    if keep is not None:
        table = table[keep(table[:, 0])]
    _, verify_len, num_drafts, correct_len, num_output = table.T
    place = np.arange(1, width + 1)
    judged = verify_len[:, None] > place  # [rounds, G]
    at_risk = judged & (correct_len[:, None] >= place - 1)
    survived = judged & (correct_len[:, None] >= place)
    compared = plain is not None and row.setting.temperature == 0
    return Sums(
        rounds=_number(len(table)),
        output=_number(num_output.sum()),
        proposed=_number(num_drafts.sum()),
        verified=_number((verify_len - 1).sum()),
        accepted=_number(correct_len.sum()),
        judged=_number(judged.sum(axis=0)),
        at_risk=_number(at_risk.sum(axis=0)),
        survived=_number(survived.sum(axis=0)),
        outputs=_number(np.bincount(num_output, minlength=width + 2)),
        drafted=_times(row),
        paired=_times(row if plain is not None else None),
        plain=_times(plain),
        same=_number([compared and plain is not None and row.texts == plain.texts, compared]),
    )


def _number(value: ArrayLike) -> Array:
    return np.asarray(value, dtype=np.float64)


def as_table(rounds: Sequence[RoundRecord]) -> NDArray[np.int64]:
    """[rounds, 5]: position, verify_len, num_drafts, correct_len, num_output."""
    return np.array([r[:5] for r in rounds], dtype=np.int64).reshape(-1, 5)


def _times(row: Row | None) -> Array:
    if row is None:
        return np.zeros(4)
    return np.array([row.decoded, row.seconds.decode, row.tokens, row.seconds.prefill])


def total(sums: Sums, weights: Array) -> Sums:
    """The sums of each set of prompts; weights [R, N] say how often a prompt is in a set."""
    return Sums(*(weights @ column for column in sums))


def resample(strata: Sequence[str], count: int = RESAMPLES, seed: int = 0) -> Array:
    """How often each prompt comes in each of `count` resampled sets, drawn with replacement within its stratum."""
    rng = np.random.default_rng(seed)
    names = np.array(strata)
    weights = np.zeros((count, len(names)))
    for name in sorted(set(strata)):
        index = np.flatnonzero(names == name)
        weights[:, index] = rng.multinomial(len(index), np.full(len(index), 1 / len(index)), size=count)
    return weights


def interval(value: float, drawn: Array, num_prompts: int) -> Estimate:
    """The estimate from its value and its resampled ones."""
    if not np.isfinite(value):
        return Estimate(None)
    known = drawn[np.isfinite(drawn)]
    if num_prompts < 2 or not len(known):
        return Estimate(float(value))
    low, high = np.percentile(known, [50 - LEVEL / 2, 50 + LEVEL / 2])
    return Estimate(float(value), float(low), float(high))


def _ratio(above: Array, below: Array) -> Array:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(below > 0, above / below, np.nan)


def to_json(value: Any) -> Any:
    """Figures and what holds them, for JSON: named tuples and dataclasses as objects, four decimals, NaN as null."""
    if isinstance(value, float):
        return round(value, 4) if np.isfinite(value) else None
    if is_dataclass(value) and not isinstance(value, type):
        return to_json(asdict(value))
    if isinstance(value, dict):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        named = getattr(value, "_asdict", None)
        return to_json(named()) if named else [to_json(item) for item in value]
    return value
