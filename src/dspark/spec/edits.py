"""What requests change in the target's logits before a token is drawn, in place and only where they change something.

Shape legend: R rows (any order; in a round B * T), V vocabulary, n places, M masked rows, W = ceil(V / 32) words.
A place is one token of one row; the places of one kind of edit are distinct.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float32, Int32, Int64
from torch import Tensor


class Places(NamedTuple):
    """Single logits: token `tokens[i]` in row `rows[i]`."""

    rows: Int64[Tensor, " n"]
    tokens: Int64[Tensor, " n"]


class LogitEdits(NamedTuple):
    """The edits of a batch of rows; None where no row has any of that kind."""

    bias: tuple[Places, Float32[Tensor, " n"]] | None = None
    # Of tokens that occurred before the row: a factor (above 1 makes them less likely) and what is subtracted.
    penalties: tuple[Places, Float32[Tensor, " n"], Float32[Tensor, " n"]] | None = None
    banned: Places | None = None  # min_tokens and bad words; may repeat a place
    grammar: tuple[Int64[Tensor, " M"], Int32[Tensor, "M W"]] | None = None  # rows, and a bit per token: 1 = allowed


def apply_edits(logits: Float32[Tensor, "R V"], edits: LogitEdits) -> None:
    """Edit logits in place: bias, then penalties, then banned tokens, then the grammar.

    The repetition penalty multiplies a negative logit and divides another (CTRL, arXiv 1909.05858, eq. 3.1, as common
    decoders extend it to negative logits); presence and frequency are subtracted after it. A banned token gets -inf,
    which no other edit changes, so min_tokens may come here with the bad words.
    """
    if edits.bias is not None:
        places, value = edits.bias
        logits[places] += value
    if edits.penalties is not None:
        places, factor, subtracted = edits.penalties
        logit = logits[places]
        logits[places] = torch.where(logit < 0, logit * factor, logit / factor) - subtracted
    if edits.banned is not None:
        logits[edits.banned] = -torch.inf
    if edits.grammar is not None:
        rows, words = edits.grammar
        ceiling = _ceilings(words, logits.shape[1])
        # A minimum instead of a masked fill: many times faster on CPU.
        logits.index_copy_(0, rows, torch.minimum(logits.index_select(0, rows), ceiling, out=ceiling))


def _ceilings(words: Int32[Tensor, "M W"], vocab: int) -> Float32[Tensor, "M V"]:
    """The largest logit each token may have, of bits with the lowest first: infinity where it is allowed, or -inf."""
    bits = torch.arange(256, device=words.device).unsqueeze(1) >> torch.arange(8, device=words.device) & 1
    by_octet = torch.where(bits.bool(), torch.inf, -torch.inf)  # [256, 8]
    octets = words.view(torch.uint8).flatten().int()  # little-endian, as every machine that torch runs on
    ceiling = by_octet.index_select(0, octets).view(len(words), -1)
    return torch.nn.functional.pad(ceiling, (0, vocab - ceiling.shape[1]), value=-torch.inf)  # a negative pad cuts
