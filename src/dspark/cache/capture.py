"""A target's states for whole rows, as samples.

Shapes: S tokens of one row, N states, H hidden size, V vocabulary.
"""

import copy
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from dspark.cache.format import Sample
from dspark.models.layers import softcap
from dspark.models.states import StateSource

_LOGIT_ROWS = 256  # rows of logits over the whole vocabulary that exist at once

NumberedRow = tuple[int, Sequence[int], Sequence[int]]  # sample id, token ids, loss mask


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
