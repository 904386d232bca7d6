"""How many rows of a draft block each request has verified, and which requests are worth drafting for.

The survival of draft j of request r, a[r, j] = c[r, 1] * ... * c[r, j], is the probability that it and all before it
are accepted. Verifying it adds a[r, j] expected tokens and one row, so k drafts admitted over R requests make
theta(k) = (R + sum of their survival) / seconds(k) tokens a second (DSpark paper section 5).

What a plan may look at decides whether the output keeps the target's law. A confidence looks at the drafts before its
own, so a plan may use this round's confidences only if it never looks past what it admits: `early_stop_plan` stops at
the first candidate that does not pay, `lagged_plan` admits a number that was fixed before this round's drafts were
drawn. `best_budget` searches all budgets, so the survival it is given must be older than the drafts.

Plans are made on the host, in NumPy: a batch has too few candidates for anything larger to pay.

Shape legend: B = R requests, G drafts a round, T = G + 1 verify rows, N candidates, M = N + 1 budgets, C numbers of
requests to draft for. A verify length counts the anchor's row; a budget counts drafts only.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64, Int64
from numpy import ndarray
from torch import Tensor

from dspark.spec.calibration import survival
from dspark.spec.types import VerifyPlan


@runtime_checkable
class Costs(Protocol):
    """What rounds take."""

    def seconds(
        self, num_requests: int, num_drafting: Int64[ndarray, "*n"], rows: Int64[ndarray, "*n"]
    ) -> Float64[ndarray, "*n"]:
        """Seconds of rounds that draft for `num_drafting` of their requests and verify `rows` rows in all.

        Never less for more rows along the last dimension. `num_drafting` 0 is plain decoding: one row a request.
        """


class Ranking(NamedTuple):
    """The drafts that may be verified: higher survival first, then lower position, then lower request index."""

    survival: Float64[ndarray, " N"]
    requests: Int64[ndarray, " N"]  # whose draft each one is
    num_requests: int


def static_plan(batch_size: int, num_drafts: int, wanted: Int64[Tensor, " B"], room: Int64[Tensor, " B"]) -> VerifyPlan:
    """Verify the whole block, less at the ends of range.

    wanted: tokens the request may still output; no more rows than that are worth running, and one always runs.
    room: positions left in the model, the anchor's counted, at least 1.
    """
    assert wanted.shape == room.shape == (batch_size,), "one entry a request"
    verify_lens = torch.minimum(wanted.clamp_min(1), room).clamp_max(num_drafts + 1)
    return VerifyPlan(verify_lens)


def survival_of(
    confidence_logits: Float[Tensor, "B G"], temperatures: Sequence[float] | None = None
) -> Float64[ndarray, "B G"]:
    """Survival from the confidence head's logits, each divided by its position's temperature; a NaN counts as 0."""
    known: ndarray = survival(confidence_logits, temperatures).nan_to_num(0.0).cpu().numpy()
    return known


def rank(survival: Float64[ndarray, "B G"], max_lens: Int64[ndarray, " B"]) -> Ranking:
    """All drafts within each request's longest verify length, in the order in which they are admitted.

    Survival never rises along a request, so any number of drafts from the front holds the first ones of each request.
    """
    position = np.arange(survival.shape[1])
    # Position-major, so that a stable sort breaks ties as it should.
    positions, requests = (position[:, None] < max_lens - 1).nonzero()
    candidates = survival[requests, positions]
    order = np.argsort(-candidates, kind="stable")
    return Ranking(candidates[order], requests[order], len(max_lens))


def tokens_per_second(ranking: Ranking, seconds: Float64[ndarray, " M"]) -> Float64[ndarray, " M"]:
    """theta(k) for k = 0..N drafts admitted from the front, `seconds[k]` being what such a round takes."""
    theta: ndarray = (_running_sums(ranking.survival) + ranking.num_requests) / seconds
    return theta


def early_stop_budget(ranking: Ranking, seconds: Float64[ndarray, " M"]) -> int:
    """Admit while theta rises strictly; stop at the first draft that does not raise it (paper Algorithm 1)."""
    theta = tokens_per_second(ranking, seconds)
    stops = np.flatnonzero(theta[1:] <= theta[:-1])
    return int(stops[0]) if len(stops) else len(theta) - 1


def best_budget(ranking: Ranking, seconds: Float64[ndarray, " M"]) -> int:
    """The budget of the largest theta, the smallest of equals. Only for survival older than this round's drafts."""
    return int(tokens_per_second(ranking, seconds).argmax())


def admit(ranking: Ranking, budget: int) -> VerifyPlan:
    """Verify the first `budget` drafts of a ranking."""
    admitted = np.bincount(ranking.requests[:budget], minlength=ranking.num_requests)
    return VerifyPlan(torch.from_numpy(admitted + 1))


def early_stop_plan(
    survival: Float64[ndarray, "B G"], max_lens: Int64[ndarray, " B"], costs: Costs, num_drafting: int
) -> VerifyPlan:
    """Plan by this round's confidences (paper Algorithm 1).

    max_lens: the longest verify length of each request, 1 where it has no drafts. num_drafting: requests drafted for.
    """
    ranking = rank(survival, max_lens)
    return admit(ranking, early_stop_budget(ranking, budget_seconds(ranking, costs, num_drafting)))


def lagged_plan(
    older: Float64[ndarray, "B G"],
    survival: Float64[ndarray, "B G"],
    max_lens: Int64[ndarray, " B"],
    costs: Costs,
    num_drafting: int,
) -> VerifyPlan:
    """Search the budget by survival older than this round's drafts; this round's only ranks (paper section 5.2).

    Arguments as for `early_stop_plan`; a request without older figures has `older` 1.
    """
    before = rank(older, max_lens)
    budget = best_budget(before, budget_seconds(before, costs, num_drafting))
    return admit(rank(survival, max_lens), budget)


def choose_drafting(
    expected: Float64[ndarray, "B G"], max_lens: Int64[ndarray, " B"], costs: Costs, least_gain: float = 0.0
) -> Bool[ndarray, " B"]:
    """Which requests to draft for: those, and as many, as promise the most tokens a second; none is plain decoding.

    expected: survival that earlier rounds let expect of the next drafts. Of the numbers of requests to draft for, 0,
    the powers of two and all are tried, each with its best budget; the smallest of equals is taken. Drafts must promise
    more than 1 + least_gain times the tokens of plain decoding, so that what is uncertain does not decide.
    """
    ranking = rank(expected, max_lens)
    batch_size, num_candidates = len(max_lens), len(ranking.survival)
    gains = np.bincount(ranking.requests, ranking.survival, batch_size)
    place = np.empty(batch_size, dtype=np.int64)
    place[np.argsort(-gains, kind="stable")] = np.arange(batch_size)
    counts = _drafting_counts(int((gains > 0).sum()))  # [C], 0 first
    rows = np.arange(batch_size, batch_size + num_candidates + 1)
    seconds = costs.seconds(batch_size, *(grid.copy() for grid in np.broadcast_arrays(counts[:, None], rows)))  # [C, M]
    # The ranking without the drafts of requests that an option leaves out is that option's ranking.
    inside = place[ranking.requests] < counts[:, None]  # [C, N]
    tokens = _running_sums(inside * ranking.survival) + batch_size
    theta = tokens / np.take_along_axis(seconds, _running_sums(inside), 1)
    best = theta.max(1)
    best[0] *= 1 + least_gain
    chosen: Bool[ndarray, " B"] = place < counts[best.argmax()]
    return chosen


def budget_seconds(ranking: Ranking, costs: Costs, num_drafting: int) -> Float64[ndarray, " M"]:
    """What a round takes with k = 0..N drafts admitted."""
    rows = np.arange(ranking.num_requests, ranking.num_requests + len(ranking.survival) + 1)
    return costs.seconds(ranking.num_requests, np.full_like(rows, num_drafting), rows)


def _running_sums(values: ndarray) -> ndarray:
    """Sums of the first 0, 1, ... values of the last dimension."""
    sums = np.zeros((*values.shape[:-1], values.shape[-1] + 1), dtype=np.result_type(values.dtype, np.int64))
    np.cumsum(values, axis=-1, out=sums[..., 1:])
    return sums


def _drafting_counts(most: int) -> Int64[ndarray, " C"]:
    """0, the powers of two below `most`, and `most`."""
    powers = [1 << power for power in range(most.bit_length()) if 1 << power < most]
    return np.array([0, *powers, *([most] if most else [])])
