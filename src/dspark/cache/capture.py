"""A target's states for whole rows, as samples.

Shapes: B rows, T tokens of the longest, S tokens of one row, m tapped layers, H hidden size, V vocabulary.
"""

import copy
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dspark.cache.format import Sample
from dspark.models.attention import AttentionBatch
from dspark.models.decoder import Decoder
from dspark.models.kv_cache import PagedKVCache
from dspark.models.layers import softcap

_BLOCK_SIZE = 64  # tokens
_LOGIT_ROWS = 256  # rows of logits over the whole vocabulary that exist at once

NumberedRow = tuple[int, Sequence[int], Sequence[int]]  # sample id, token ids, loss mask


class TappedStates(Protocol):
    """The states of one row."""

    @property
    def taps(self) -> Tensor: ...  # [S, m, H], the outputs of the tapped layers
    @property
    def last_hidden(self) -> Tensor: ...  # [S, H], before the final norm


class StateSource(Protocol):
    """A target as capture sees it: `DecoderStates`, or anything else that runs rows of unequal lengths together."""

    @property
    def norm(self) -> nn.Module: ...  # the final norm
    @property
    def lm_head_weight(self) -> Tensor: ...  # [V, H]
    @property
    def final_logit_softcapping(self) -> float | None: ...  # c of c * tanh(logits / c); None without
    def __call__(self, rows: Sequence[Sequence[int]], taps: tuple[int, ...]) -> Sequence[TappedStates]: ...
    def logits(self, last_hidden: Tensor) -> Tensor: ...  # [N, H] before the final norm -> [N, V], the target's own


class RowStates(NamedTuple):
    """What `DecoderStates` gives for one row."""

    taps: Tensor  # [S, m, H]
    last_hidden: Tensor  # [S, H]


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


class Capture:
    """Runs rows through a target and returns their states as samples, on the CPU unless `device` names another one."""

    def __init__(
        self, source: StateSource, taps: tuple[int, ...], log_normalizer: bool, device: torch.device | str = "cpu"
    ) -> None:
        self._source = source
        self._taps = taps
        self._head = _WideHead(source) if log_normalizer else None
        self._device = device

    @torch.inference_mode()
    def __call__(self, rows: Sequence[NumberedRow]) -> list[Sample]:
        """Return the samples of rows (sample id, token ids, loss mask), in their order."""
        found = self._source([token_ids for _, token_ids, _ in rows], self._taps)
        samples = []
        for (sample_id, token_ids, loss_mask), states in zip(rows, found, strict=True):
            last = states.last_hidden.to(torch.bfloat16)
            mask = torch.as_tensor(loss_mask, dtype=torch.uint8)
            sample = Sample(
                sample_id=sample_id,
                token_ids=torch.as_tensor(token_ids, dtype=torch.int32),
                attention_mask=torch.ones(len(token_ids), dtype=torch.uint8),
                loss_mask=mask,
                features=states.taps.to(self._device, torch.bfloat16),
                last_hidden=last.to(self._device),
                log_normalizer=None if self._head is None else self._head.normalizers(last, mask).to(self._device),
            )
            samples.append(sample)
        return samples

    @torch.inference_mode()
    def logits(self, last_hidden: Tensor) -> Tensor:
        """The target's own logits f32 [N, V] from states [N, H] before the final norm."""
        return self._source.logits(last_hidden).float()

    @torch.inference_mode()
    def normed(self, last_hidden: Tensor) -> Tensor:
        """States [N, H] before the final norm -> after it."""
        weight = self._source.lm_head_weight
        normed: Tensor = self._source.norm(last_hidden.to(weight))
        return normed


def batches(rows: Sequence[NumberedRow], batch_tokens: int) -> Iterator[list[NumberedRow]]:
    """Group rows of about one length, longest first, so that padding included a batch has at most `batch_tokens`."""
    batch: list[NumberedRow] = []
    for row in sorted(rows, key=lambda row: len(row[1]), reverse=True):
        if batch and (len(batch) + 1) * len(batch[0][1]) > batch_tokens:
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch


class _WideHead:
    """The target's final norm and LM head in float32, as the trainer computes them.

    A bfloat16 logit of 30 is off by up to 0.06, and a probability that it normalises by as much.
    """

    def __init__(self, source: StateSource) -> None:
        self._norm = copy.deepcopy(source.norm).float()
        self._weight = source.lm_head_weight.detach().float()  # [V, H]
        self._cap = source.final_logit_softcapping

    def normalizers(self, last_hidden: Tensor, loss_mask: Tensor) -> Tensor:
        """The logsumexp f32 [S] of the logits of states [S, H] where the next token is supervised, NaN elsewhere."""
        found = torch.full((len(loss_mask),), float("nan"))
        positions = supervised_next(loss_mask)
        for start in range(0, len(positions), _LOGIT_ROWS):
            chunk = positions[start : start + _LOGIT_ROWS]
            states = last_hidden[chunk.to(last_hidden.device)].float()
            found[chunk] = softcap(F.linear(self._norm(states), self._weight), self._cap).logsumexp(-1).cpu()
        return found


def supervised_next(loss_mask: Tensor) -> Tensor:
    """Positions i64 [N] whose next token is supervised."""
    return loss_mask[1:].nonzero().squeeze(1)


def _block_tables(lengths: list[int]) -> tuple[list[list[int]], int]:
    """Give each row its own run of blocks; returns the tables and how many blocks there must be, block 0 counted."""
    tables: list[list[int]] = []
    used = 1
    for length in lengths:
        count = -(-length // _BLOCK_SIZE)
        tables.append(list(range(used, used + count)))
        used += count
    return tables, used
