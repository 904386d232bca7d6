"""The target's states for whole rows: batched prefill with a KV cache of its own.

Shapes: B rows, T tokens of the longest, m tapped layers, H hidden size.
"""

import copy
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from dspark.cache.format import Sample
from dspark.models.attention import AttentionBatch
from dspark.models.decoder import Decoder
from dspark.models.kv_cache import PagedKVCache
from dspark.models.layers import softcap

_BLOCK_SIZE = 64  # tokens
_LOGIT_ROWS = 256  # rows of logits over the whole vocabulary that exist at once


class Capture:
    """Runs rows of unequal lengths through a decoder and returns their states as samples.

    Keeps its KV cache between calls, grown to the largest batch so far.
    """

    def __init__(self, decoder: Decoder, taps: tuple[int, ...], log_normalizer: bool) -> None:
        self._decoder = decoder
        self._taps = taps
        self._head = _WideHead(decoder) if log_normalizer else None
        self._cache: PagedKVCache | None = None

    @torch.inference_mode()
    def __call__(self, rows: Sequence[tuple[int, Sequence[int], Sequence[int]]]) -> list[Sample]:
        """Return the samples of rows (sample id, token ids, loss mask), in their order."""
        lengths = [len(token_ids) for _, token_ids, _ in rows]
        device = self._decoder.embed_tokens.weight.device
        padded = torch.zeros(len(rows), max(lengths), dtype=torch.int64)
        for row, (_, token_ids, _) in zip(padded, rows, strict=True):
            row[: len(token_ids)] = torch.tensor(token_ids)
        tables, num_blocks = _block_tables(lengths)
        positions = torch.arange(padded.shape[1], device=device).expand(len(rows), -1)
        batch = AttentionBatch.build(positions, lengths, tables, _BLOCK_SIZE)
        output = self._decoder(padded.to(device), batch, self._room(num_blocks), self._taps)
        samples = []
        for index, (sample_id, token_ids, loss_mask) in enumerate(rows):
            last = output.hidden[index, : lengths[index]].to(torch.bfloat16)
            mask = torch.tensor(loss_mask, dtype=torch.uint8)
            sample = Sample(
                sample_id=sample_id,
                token_ids=torch.tensor(token_ids, dtype=torch.int32),
                attention_mask=torch.ones(len(token_ids), dtype=torch.uint8),
                loss_mask=mask,
                features=output.taps[index, : lengths[index]].to("cpu", torch.bfloat16),
                last_hidden=last.cpu(),
                log_normalizer=None if self._head is None else self._head.normalizers(last, mask),
            )
            samples.append(sample)
        return samples

    def logits(self, last_hidden: Tensor) -> Tensor:
        """The target's own logits f32 [N, V] from states [N, H] before the final norm."""
        return self._decoder.logits(last_hidden.to(self._decoder.dtype)).float()

    def _room(self, num_blocks: int) -> PagedKVCache:
        if self._cache is None or self._cache.num_blocks < num_blocks:
            self._cache = None  # free the old one first
            self._cache = self._decoder.new_cache(num_blocks, _BLOCK_SIZE)
        return self._cache


class _WideHead:
    """The target's final norm and LM head in float32, as the trainer computes them.

    A bfloat16 logit of 30 is off by up to 0.06, and a probability that it normalises by as much.
    """

    def __init__(self, decoder: Decoder) -> None:
        self._norm = copy.deepcopy(decoder.norm).float()
        self._weight = decoder.lm_head_weight.detach().float()  # [V, H]
        self._cap = decoder.config.final_logit_softcapping

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
