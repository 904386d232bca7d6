"""Triton kernels of what a round does beside its networks: ragged rows out and back, and the end of an acceptance.

Each gives bit for bit what the PyTorch code beside its call in `spec.layout` and `spec.accept` gives, which says what
it means. None of them waits for the device.

Shape legend: B requests, G drafts, T = G + 1 verify rows, N real rows, P packed rows, K values a row.
"""

# Kernels take pointers, which have no types in Python.
# mypy: disable-error-code="untyped-decorator,no-untyped-def"

import torch
import triton
import triton.language as tl
from torch import Tensor

_ROW_BLOCK = 128  # rows of one request that a program writes at once
_VALUE_BLOCK = 1024  # values of a row that a program copies
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # rows are copied as integers of their size


@triton.jit
def _pack_kernel(lens, requests, offsets, batch_size, num_rows, BATCH: tl.constexpr, BLOCK: tl.constexpr):
    """Program b writes the rows of request b; the one after the last request writes those that own no request."""
    b = tl.program_id(0)
    index = tl.arange(0, BATCH)
    first = tl.sum(tl.load(lens + index, mask=index < tl.minimum(b, batch_size), other=0))
    owned = b < batch_size
    count = tl.where(owned, tl.load(lens + b, mask=owned, other=0), num_rows - first)
    for start in range(0, count, BLOCK):
        offset = start + tl.arange(0, BLOCK)
        inside = offset < count
        tl.store(requests + first + offset, tl.where(owned, b, 0), mask=inside)
        tl.store(offsets + first + offset, tl.where(owned, offset, 0), mask=inside)


@triton.jit
def _scatter_kernel(packed, sources, out, row_size, BLOCK: tl.constexpr):
    """Program (i, c) writes chunk c of place i: of the row that stands there, or zeros."""
    place = tl.program_id(0).to(tl.int64)
    value = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    source = tl.load(sources + place)
    length = tl.where(source >= 0, row_size, 0)
    row = tl.load(packed + source * row_size + value, mask=value < length, other=0)
    tl.store(out + place * row_size + value, row, mask=value < row_size)


@triton.jit
def _end_kernel(
    passed, verify_lens, candidates, out, num_drafts, PICK: tl.constexpr, LAST: tl.constexpr, BLOCK: tl.constexpr
):
    """Program b ends the run of request b."""
    b = tl.program_id(0).to(tl.int64)
    draft = tl.arange(0, BLOCK)
    went = tl.load(passed + b * num_drafts + draft, mask=draft < num_drafts, other=0) != 0
    if LAST:
        end = tl.max(tl.where(went, draft + 1, 0))
    else:
        end = tl.min(tl.where(went, num_drafts, tl.minimum(draft, num_drafts)))
    correct = tl.minimum(end.to(tl.int64), tl.load(verify_lens + b) - 1)
    tl.store(out + b, correct)
    if PICK:
        tl.store(out + tl.num_programs(0) + b, tl.load(candidates + b * (num_drafts + 1) + correct))


@triton.jit
def _emit_kernel(tokens, correct_len, bonus, out, num_drafts, BLOCK: tl.constexpr):
    """Program b writes the tokens that request b puts out."""
    b = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    correct = tl.load(correct_len + b)
    draft = tl.load(tokens + b * num_drafts + place, mask=place < correct, other=-1)
    token = tl.where(place == correct, tl.load(bonus + b), draft)
    tl.store(out + b * (num_drafts + 1) + place, token, mask=place <= num_drafts)


def pack_rows(lens: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """Requests and offsets i64 [P] of the first `lens[b]` rows of each request; lens i64 [B], `num_rows` is P."""
    requests, offsets = torch.empty(2, num_rows, dtype=torch.long, device=lens.device).unbind()
    batch = len(lens)
    _pack_kernel[(batch + 1,)](
        lens.contiguous(), requests, offsets, batch, num_rows, BATCH=triton.next_power_of_2(batch), BLOCK=_ROW_BLOCK
    )
    return requests, offsets


def scatter_rows(packed: Tensor, places: Tensor, num_places: int) -> Tensor:
    """Row n of `packed` [P, *rest] at place `places[n]`, i64 [N], zeros elsewhere: [num_places, *rest].

    Each value of the result is written once, where zeroing it first would write it twice.
    """
    sources = places.new_full((num_places,), -1)
    sources[places] = torch.arange(len(places), device=places.device)
    out = packed.new_empty(num_places, *packed.shape[1:])
    row_size = out[:1].numel()
    bits = torch.uint8 if packed.dtype == torch.bool else _BITS[packed.element_size()]
    _scatter_kernel[(num_places, triton.cdiv(row_size, _VALUE_BLOCK))](
        packed.contiguous().view(bits), sources, out.view(bits), row_size, BLOCK=_VALUE_BLOCK
    )
    return out


def end_run(
    passed: Tensor, verify_lens: Tensor, candidates: Tensor | None = None, last: bool = False
) -> tuple[Tensor, Tensor]:
    """Drafts accepted i64 [B], given which passed, bool [B, G], and what the candidates i64 [B, T] hold there, i64 [B].

    The run ends at the first draft that did not pass or, with `last`, behind the last one that did. Without candidates
    the second result means nothing.
    """
    batch, num_drafts = passed.shape
    out = torch.empty(2, batch, dtype=torch.long, device=passed.device)
    _end_kernel[(batch,)](
        passed.contiguous().view(torch.uint8), verify_lens.contiguous(),
        out if candidates is None else candidates.contiguous(), out, num_drafts,
        PICK=candidates is not None, LAST=last, BLOCK=triton.next_power_of_2(max(num_drafts, 1)),
    )  # fmt: skip
    return out[0], out[1]


def emit(tokens: Tensor, correct_len: Tensor, bonus: Tensor) -> Tensor:
    """The tokens put out, i64 [B, T]: the accepted ones of `tokens` i64 [B, G], then the bonus, then -1."""
    batch, num_drafts = tokens.shape
    out = tokens.new_empty(batch, num_drafts + 1)
    _emit_kernel[(batch,)](
        tokens.contiguous(), correct_len.contiguous(), bonus.contiguous(), out, num_drafts,
        BLOCK=triton.next_power_of_2(num_drafts + 1),
    )  # fmt: skip
    return out
