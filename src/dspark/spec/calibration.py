"""Whether confidences mean what they say, and sequential temperature scaling (STS), which makes them.

Shape legend: N rounds, or confidences of one position; G draft positions; K temperatures of a grid; M bins.
The confidence logit of position k stands for P(draft k accepted | all before it accepted). What is judged is the
SURVIVAL: the product of the confidences up to k, against whether the drafts 1..k were all accepted (DSpark paper
section 4.3). Labels must come from full-width rounds: a trimmed round does not show what its dropped drafts would do.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Float64, Int64
from torch import Tensor

NUM_BINS = 15
GRID = tuple(2.0 ** (i / 16) for i in range(-64, 65))  # 1/16 .. 16, and 1 itself


class Reliability(NamedTuple):
    """Confidences sorted into M bins of equal width over [0, 1]; the means of an empty bin are 0."""

    counts: Float64[Tensor, "*rows M"]
    confidence: Float64[Tensor, "*rows M"]  # mean of the confidences
    outcome: Float64[Tensor, "*rows M"]  # share of true outcomes


def survival(
    logits: Float[Tensor, "*rows G"], temperatures: Sequence[float] | None = None
) -> Float64[Tensor, "*rows G"]:
    """Probability that drafts 1..k are all accepted: the running product of sigmoid(logit_k / T_k)."""
    return conditional(logits, temperatures).cumprod(-1)


def conditional(
    logits: Float[Tensor, "*rows G"], temperatures: Sequence[float] | None = None
) -> Float64[Tensor, "*rows G"]:
    """P(draft k accepted | all before it accepted) = sigmoid(logit_k / T_k); without temperatures, T_k = 1."""
    logits = logits.double()
    if temperatures is not None:
        assert len(temperatures) == logits.shape[-1], "one temperature a position"
        logits = logits / torch.tensor(temperatures, dtype=torch.float64, device=logits.device)
    return logits.sigmoid()


def survived(correct_len: Int64[Tensor, " N"], num_drafts: int) -> Bool[Tensor, "N G"]:
    """Whether drafts 1..k were all accepted, k = 1..num_drafts, from the number accepted in full-width rounds."""
    return torch.arange(num_drafts, device=correct_len.device) < correct_len[:, None]


def reliability(
    confidence: Float64[Tensor, "*rows N"], outcome: Bool[Tensor, " N"], num_bins: int = NUM_BINS
) -> Reliability:
    """Sort confidences into bins [i/M, (i+1)/M), the last one closed, for each row of confidences."""
    rows = confidence.reshape(-1, confidence.shape[-1])
    index = (rows * num_bins).long().clamp_(0, num_bins - 1)
    weights = torch.stack((torch.ones_like(rows), rows, outcome.double().expand_as(rows)))
    sums = rows.new_zeros(3, len(rows), num_bins).scatter_add_(2, index.expand(3, -1, -1), weights)
    count, confident, true = sums.reshape(3, *confidence.shape[:-1], num_bins)
    some = count.clamp_min(1)
    return Reliability(count, confident / some, true / some)


def expected_error(bins: Reliability) -> Float64[Tensor, "*rows"]:
    """Expected calibration error, the mean over confidences of |share of true outcomes - confidence| in their bin.

    Guo et al., arXiv 1706.04599, equation 3. Noise raises it on few rounds: see `noise_error`.
    """
    total = bins.counts.sum(-1)
    return (bins.counts * (bins.outcome - bins.confidence).abs()).sum(-1) / total


def noise_error(bins: Reliability) -> Float64[Tensor, "*rows"]:
    """The calibration error that perfectly calibrated confidences would show on so few rounds, by chance.

    The mean absolute deviation of each bin's share, by the normal approximation to the binomial.
    """
    deviation = (2 / math.pi * bins.counts * bins.confidence * (1 - bins.confidence)).sqrt()
    return deviation.sum(-1) / bins.counts.sum(-1)


def ece(
    confidence: Float64[Tensor, "*rows N"], outcome: Bool[Tensor, " N"], num_bins: int = NUM_BINS
) -> Float64[Tensor, "*rows"]:
    """Expected calibration error of each row of confidences."""
    return expected_error(reliability(confidence, outcome, num_bins))


def brier(confidence: Float64[Tensor, " N"], outcome: Bool[Tensor, " N"]) -> float:
    """Mean squared difference between confidence and outcome: 0 is perfect, and guessing 0.5 gives 0.25."""
    return float((confidence - outcome.double()).square().mean())


def auc(confidence: Float64[Tensor, " N"], outcome: Bool[Tensor, " N"]) -> float | None:
    """Probability that a true outcome has the higher confidence of a true and a false one, ties counted half.

    None where all outcomes are the same.
    """
    true, false = confidence[outcome], confidence[~outcome].sort().values
    if not len(true) or not len(false):
        return None
    below = torch.searchsorted(false, true) + torch.searchsorted(false, true, right=True)  # ties are counted once
    return float(below.double().mean() / (2 * len(false)))


def fit_temperatures(
    logits: Float[Tensor, "N G"], outcome: Bool[Tensor, "N G"], grid: Sequence[float] = GRID
) -> tuple[float, ...]:
    """Sequential temperature scaling (DSpark paper section 4.3): T_1, then T_2 with T_1 fixed, and so on.

    T_k is the first value of `grid` that minimises the 15-bin calibration error of the survival up to k.
    outcome: see `survived`, from full-width rounds.
    """
    assert len(logits), "there is nothing to fit on"
    scales = torch.tensor(grid, dtype=torch.float64, device=logits.device)
    earlier = logits.new_ones(len(logits), dtype=torch.float64)
    chosen = []
    for k in range(logits.shape[1]):
        candidates = earlier * (logits[:, k].double() / scales[:, None]).sigmoid()  # [K, N]
        errors = ece(candidates, outcome[:, k]).tolist()
        best = min(range(len(grid)), key=errors.__getitem__)  # the first of equals
        chosen.append(grid[best])
        earlier = candidates[best]
    return tuple(chosen)
