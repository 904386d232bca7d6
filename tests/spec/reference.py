"""The round's arithmetic written the slow, obvious way, in float64 and plain loops: what the fast one must equal."""

from typing import NamedTuple

import numpy as np
import torch

from dspark.spec.types import SamplingRows


class Params(NamedTuple):
    """The sampling parameters of one request."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


GREEDY = Params(temperature=0.0)


def make_rows(params: list[Params], seeds: list[int] | torch.Tensor) -> SamplingRows:
    """Sampling parameters as the tensors of a batch."""
    return SamplingRows(
        torch.tensor([p.temperature for p in params], dtype=torch.float32),
        torch.tensor([p.top_k for p in params], dtype=torch.long),
        torch.tensor([p.top_p for p in params], dtype=torch.float32),
        torch.tensor([p.min_p for p in params], dtype=torch.float32),
        torch.as_tensor(seeds, dtype=torch.long),
    )


def law_of(logits: np.ndarray, params: Params) -> np.ndarray:
    """The law of one row, [V]."""
    logits = logits.astype(np.float64)
    if params.temperature == 0:
        return np.eye(len(logits))[logits.argmax()]
    weights = np.exp((logits - logits.max()) / np.float64(np.float32(params.temperature)))
    weights[weights < np.float32(params.min_p) * weights.max()] = 0
    if params.top_k:
        kth = np.sort(weights)[::-1][min(params.top_k, len(weights)) - 1]
        weights[weights < kth] = 0
    if params.top_p < 1:
        goal, mass = np.float32(params.top_p) * weights.sum(), 0.0
        for value in np.sort(weights)[::-1]:
            mass += value
            if mass >= goal:
                break
        weights[weights < value] = 0
    return weights / weights.sum()


def draw(law: np.ndarray, u: float) -> int:
    """The first token at which the cumulative sum passes u."""
    passed, mass = -1, 0.0
    for token, p in enumerate(law):
        mass += p
        if p > 0:
            passed = token
        if mass > u * law.sum():
            break
    return passed


def accept_one(
    drafts: list[int],
    qs: list[np.ndarray],
    logits: np.ndarray,
    verify_len: int,
    params: Params,
    accept_noise: list[float],
    bonus_noise: list[float],
) -> tuple[int, int]:
    """One request: drafts accepted, and the bonus. qs: laws over the target vocabulary; logits [T, V]."""
    greedy = params.temperature == 0
    for i in range(verify_len):
        p = law_of(logits[i], params)
        if i == len(drafts):
            return i, int(p.argmax()) if greedy else draw(p, bonus_noise[i])
        x = drafts[i]
        if greedy and x != int(p.argmax()):
            return i, int(p.argmax())
        if not greedy and not accept_noise[i] * qs[i][x] < p[x]:
            residual = np.maximum(p - qs[i], 0)
            return i, draw(residual if residual.sum() > 0 else p, bonus_noise[i])
        if i == verify_len - 1:
            return i, x
    raise AssertionError("a verify length is at least 1")
