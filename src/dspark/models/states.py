"""A target's hidden states for whole rows: what caches store and drafters learn from.

Shapes: B rows, T tokens of the longest, S tokens of one row, N states, m tapped layers, H hidden size, V vocabulary.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from dspark.models.attention import AttentionBatch
from dspark.models.decoder import Decoder
from dspark.models.kv_cache import PagedKVCache

_BLOCK_SIZE = 64  # tokens


class RowStates(NamedTuple):
    """The states of one row, in the model's dtype and on its device."""

    taps: Tensor  # [S, m, H], the residual stream after each tapped layer, in the order asked for
    last_hidden: Tensor  # [S, H], the residual stream before the final norm


class StateSource(Protocol):
    """A target as capture sees it: `DecoderStates`, or a transformers model (`models.hf`)."""

    @property
    def norm(self) -> nn.Module: ...  # the final norm
    @property
    def lm_head_weight(self) -> Tensor: ...  # [V, H]
    @property
    def final_logit_softcapping(self) -> float | None: ...  # c of c * tanh(logits / c); None without
    def __call__(self, rows: Sequence[Sequence[int]], taps: tuple[int, ...]) -> Sequence[RowStates]: ...
    def logits(self, last_hidden: Tensor) -> Tensor: ...  # [N, H] before the final norm -> [N, V], the target's own


class DecoderStates:
    """Our decoder as a source of states: batched prefill with a KV cache of its own, grown to the largest batch."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._cache: PagedKVCache | None = None

    @property
    def norm(self) -> nn.Module:
        """The final norm."""
        return self._decoder.norm

    @property
    def lm_head_weight(self) -> Tensor:
        """The rows [V, H] that turn normed states into logits."""
        return self._decoder.lm_head_weight

    @property
    def final_logit_softcapping(self) -> float | None:
        """The soft cap of the logits."""
        return self._decoder.config.final_logit_softcapping

    def __call__(self, rows: Sequence[Sequence[int]], taps: tuple[int, ...]) -> list[RowStates]:
        """Run rows of token ids together and return their states, in their order, in the decoder's dtype."""
        lengths = [len(row) for row in rows]
        device = self._decoder.embed_tokens.weight.device
        padded = torch.zeros(len(rows), max(lengths), dtype=torch.int64)
        for out, row in zip(padded, rows, strict=True):
            out[: len(row)] = torch.as_tensor(row)
        tables, num_blocks = _block_tables(lengths)
        positions = torch.arange(padded.shape[1], device=device).expand(len(rows), -1)
        batch = AttentionBatch.build(positions, lengths, tables, _BLOCK_SIZE)
        output = self._decoder(padded.to(device), batch, self._room(num_blocks), taps)
        return [RowStates(output.taps[b, :length], output.hidden[b, :length]) for b, length in enumerate(lengths)]

    def logits(self, last_hidden: Tensor) -> Tensor:
        """The target's own logits [N, V] from states [N, H] before the final norm."""
        return self._decoder.logits(last_hidden.to(self._decoder.embed_tokens.weight))

    def _room(self, num_blocks: int) -> PagedKVCache:
        if self._cache is None or self._cache.num_blocks < num_blocks:
            self._cache = None  # free the old one first
            self._cache = self._decoder.new_cache(num_blocks, _BLOCK_SIZE)
        return self._cache


def _block_tables(lengths: list[int]) -> tuple[list[list[int]], int]:
    """Give each row its own run of blocks; returns the tables and how many blocks there must be, block 0 counted."""
    tables: list[list[int]] = []
    used = 1
    for length in lengths:
        count = -(-length // _BLOCK_SIZE)
        tables.append(list(range(used, used + count)))
        used += count
    return tables, used
