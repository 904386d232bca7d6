"""From logits to a token: the one path for drafting and for verification.

Shape legend: B requests, N rows a request, V vocabulary; `...` any leading dimensions.
"""

from enum import IntEnum

import torch
from jaxtyping import Float, Float32, Float64, Int64
from torch import Tensor

from dspark.spec.types import SamplingRows

# Ranked candidates that settle most filters, and nearly all of the rest, without sorting the vocabulary.
_CANDIDATES = 128
_MORE_CANDIDATES = 2048
_ARGMAX_CHUNKS = (256, 128, 64)
_ARGMAX_SMALL = 1 << 15

_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)


class Role(IntEnum):
    """What a random number decides. One position never shares a number between two roles."""

    DRAFT = 0  # which token the drafter proposes
    ACCEPT = 1  # whether the target takes it
    BONUS = 2  # which token follows the accepted run


def probabilities(logits: Float[Tensor, "B N V"], rows: SamplingRows) -> Float32[Tensor, "B N V"]:
    """The law of the next token: temperature, then min-p, then top-k, then top-p.

    Filters work on values, so tokens as likely as the last one kept are kept as well. Top-p keeps the likeliest
    tokens, as few as reach its share of the mass that min-p and top-k left. A greedy request gets all mass on its
    argmax. A row whose largest logit is not finite (all -inf, a NaN) comes out as NaN.
    """
    greedy = rows.greedy.nonzero().squeeze(-1)
    if len(greedy) == len(logits):
        return _one_hot_argmax(logits)
    temperature = torch.where(rows.greedy, 1.0, rows.temperature) if len(greedy) else rows.temperature
    peak = logits.amax(-1, keepdim=True).float()
    # The peak comes off first, so that no temperature, however small, overflows.
    probs = (logits.float() - peak).div_(temperature[:, None, None]).softmax(-1)
    floor = _lowest_kept(probs, rows)
    if floor is not None:
        probs.mul_(_at_least(probs, floor))
        total = probs.sum(-1, keepdim=True, dtype=torch.float64).float()
        probs.div_(torch.where(floor > 0, total, 1.0))  # a law without filters is the same in any batch
    if len(greedy):
        probs[greedy] = _one_hot_argmax(logits[greedy])
    return probs


def argmax(logits: Float[Tensor, "*rows V"]) -> Int64[Tensor, "*rows"]:
    """`logits.argmax(-1)`, the first of equals; several times faster on CPU, where a plain maximum vectorises."""
    chunk = next((size for size in _ARGMAX_CHUNKS if logits.shape[-1] % size == 0), 0)
    if not chunk or logits.numel() < _ARGMAX_SMALL:
        return logits.argmax(-1)
    chunks = logits.reshape(*logits.shape[:-1], -1, chunk)
    best = chunks.amax(-1).argmax(-1, keepdim=True)
    inside = chunks.take_along_dim(best.unsqueeze(-1), -2).argmax(-1)
    return (best * chunk + inside).squeeze(-1)


def categorical(probs: Float32[Tensor, "*rows V"], u: Float64[Tensor, "*rows"]) -> Int64[Tensor, "*rows"]:
    """Draw from each law by inverting its cumulative sum at `u` in [0, 1).

    The laws need not sum to one. A token of probability zero is never drawn; a row of zeros or NaN gives -1.
    """
    cumulative = probs.cumsum(-1, dtype=torch.float64)
    total = cumulative[..., -1]
    token = torch.searchsorted(cumulative, (u * total).unsqueeze(-1), right=True).squeeze(-1)
    return torch.where(total > 0, token, -1)


def uniform(seed: Int64[Tensor, "..."], position: Int64[Tensor, "..."], role: Role) -> Float64[Tensor, "..."]:
    """The random number in [0, 1) that decides `role` at `position`, the absolute position of the token drawn.

    Counter based: output number 4 * position + role of SplitMix64 (Steele, Lea and Flood, 2014), started at the mixed
    seed; its top 53 bits. It depends on nothing else, so a request draws the same numbers in any batch. `seed` and
    `position` broadcast.
    """
    return _shift_right(_bits(seed, position * 4 + role), 11).double() * 2.0**-53


def round_seed(seed: Int64[Tensor, " B"], anchors: Int64[Tensor, " B"]) -> Int64[Tensor, " B"]:
    """The seed that one round draws its drafts with, its anchors at the positions `anchors`.

    A position may be drafted in several rounds until it is decided, and what earlier rounds drafted there may have
    shaped the plan of this one (by their confidences, or by what they left to other requests). With numbers that are
    new in every round this round's drafts are independent of all that; with the same numbers they would not be, and
    the output would leave the target's law. Output number 4 * anchor + 3 of the request's own stream, which no role
    uses.
    """
    return _bits(seed, anchors * 4 + len(Role))


def fold_seed(seed: int) -> int:
    """Any integer as the signed 64-bit seed of a request: its low 64 bits."""
    return (seed + (1 << 63)) % (1 << 64) - (1 << 63)


def _one_hot_argmax(logits: Float[Tensor, "B N V"]) -> Float32[Tensor, "B N V"]:
    best = argmax(logits).unsqueeze(-1)
    mass = torch.where(logits.gather(-1, best).isfinite(), 1.0, torch.nan)
    # A broken row is NaN throughout; 0 * mass spreads it.
    return (0.0 * mass).expand(logits.shape).scatter(-1, best, mass)


def _lowest_kept(probs: Float32[Tensor, "B N V"], rows: SamplingRows) -> Float32[Tensor, "B N 1"] | None:
    """The smallest probability that survives each row's filters; None when every filter is off."""
    ranked = ((rows.top_k > 0) | (rows.top_p < 1)).nonzero().squeeze(-1)
    if not len(ranked) and not bool((rows.min_p > 0).any()):
        return None
    floor = probs.amax(-1, keepdim=True) * rows.min_p[:, None, None]
    if len(ranked):
        some = rows.select(ranked)
        num_rows = probs.shape[1]
        floor[ranked] = _lowest_ranked(
            probs[ranked].flatten(0, 1),
            floor[ranked].flatten(0, 1),
            some.top_k.repeat_interleave(num_rows),
            some.top_p.repeat_interleave(num_rows),
        ).reshape(-1, num_rows, 1)
    return floor


def _lowest_ranked(
    probs: Float32[Tensor, "n V"],
    floor: Float32[Tensor, "n 1"],
    top_k: Int64[Tensor, " n"],
    top_p: Float32[Tensor, " n"],
) -> Float32[Tensor, "n 1"]:
    """`floor` raised to what top-k and then top-p keep, from as few ranked candidates as settle it."""
    vocab = probs.shape[1]
    width = min(vocab, max(_CANDIDATES, int(top_k.max())))
    likeliest = probs.topk(width).values
    kth = likeliest.gather(1, (top_k - 1).clamp(0, width - 1).unsqueeze(1))
    floor = torch.where(top_k.unsqueeze(1) > 0, torch.maximum(floor, kth), floor)

    pending = (top_p < 1).nonzero().squeeze(1)
    if not len(pending):
        return floor
    goal = (probs * _at_least(probs, floor)).sum(1, dtype=torch.float64) * top_p
    likeliest = likeliest[pending]
    while True:
        # The first candidate at which the cumulative mass reaches the goal is the last one kept.
        last = (likeliest.cumsum(1, dtype=torch.float64) < goal[pending, None]).sum(1)
        settled = (last < width) | (width == vocab)
        boundary = likeliest.gather(1, last.clamp_max(width - 1).unsqueeze(1))[settled]
        done, pending = pending[settled], pending[~settled]
        floor[done] = torch.maximum(floor[done], boundary)
        if not len(pending):
            return floor
        width = min(vocab, _MORE_CANDIDATES) if width < _MORE_CANDIDATES else vocab
        likeliest = probs[pending].topk(width).values


def _at_least(probs: Float32[Tensor, "*rows V"], floor: Float32[Tensor, "*rows 1"]) -> Float32[Tensor, "*rows V"]:
    """1 where a probability reaches the floor, 0 elsewhere: in place, much faster than a boolean mask on CPU."""
    return probs.clone().ge_(floor)


def _bits(seed: Int64[Tensor, "..."], number: Int64[Tensor, "..."]) -> Int64[Tensor, "..."]:
    """64 random bits: output `number` (from 0) of SplitMix64, started at the mixed seed."""
    return _mix(_mix(seed + _GOLDEN) + (number + 1) * _GOLDEN)


def _mix(x: Int64[Tensor, "..."]) -> Int64[Tensor, "..."]:
    """The finaliser of SplitMix64; int64 products wrap."""
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    return x ^ _shift_right(x, 31)


def _shift_right(x: Int64[Tensor, "..."], bits: int) -> Int64[Tensor, "..."]:
    """Logical shift: `>>` on int64 copies the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
