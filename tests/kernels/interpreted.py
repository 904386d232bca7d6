"""Kernels against PyTorch, bit for bit. Not collected by itself: `test_rows.py` runs it in Triton's interpreter."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dspark.kernels import choice, rows
from dspark.spec import accept, layout
from dspark.spec.types import Acceptance, DraftBlock, SamplingRows, VerifyPlan

RAGGED = [[1], [3, 1, 4, 2], [1] * 9]


@pytest.fixture
def both(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[object, object]]:
    """both(function, *args) -> what it gives with kernels, which must have run, and without."""

    def call(function: Callable[..., object], *args: object) -> tuple[object, object]:
        assert choice.kernels_for(torch.empty(0)) is rows
        with_kernels = function(*args)
        with monkeypatch.context() as patch:
            for module in (layout, accept):
                patch.setattr(module, "kernels_for", lambda tensor: None)
            return with_kernels, function(*args)

    return call


def same_bits(a: Tensor, b: Tensor) -> bool:
    return (a.dtype, a.shape) == (b.dtype, b.shape) and a.numpy(force=True).tobytes() == b.numpy(force=True).tobytes()


@pytest.mark.parametrize("lens", [*RAGGED, [130, 1, 257]])
@pytest.mark.parametrize("padding", [0, 3])
def test_pack(lens: list[int], padding: int, both: Callable[..., tuple]) -> None:
    ours, plain = both(layout.pack, torch.tensor(lens), sum(lens) + padding)
    assert same_bits(ours.requests, plain.requests)
    assert same_bits(ours.offsets, plain.offsets)
    assert ours.num_real == plain.num_real


@pytest.mark.parametrize("lens", RAGGED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.bool])
@pytest.mark.parametrize("rest", [(), (2, 600)])
def test_scatter(lens: list[int], dtype: torch.dtype, rest: tuple[int, ...], both: Callable[..., tuple]) -> None:
    packed_rows = layout.pack(torch.tensor(lens), sum(lens) + 2)
    packed = torch.randn(packed_rows.num_rows, *rest, generator=torch.Generator().manual_seed(0)).to(dtype)
    if dtype.is_floating_point:
        packed[0] = torch.nan
        packed[-3] = -0.0
    assert same_bits(*both(layout.scatter, packed, packed_rows, len(lens), max(lens) + 1))


def test_scatter_of_bfloat16_from_strided_rows(both: Callable[..., tuple]) -> None:
    packed_rows = layout.pack(torch.tensor([2, 4]))
    packed = torch.randn(5, 6, generator=torch.Generator().manual_seed(1)).bfloat16().T
    ours, plain = both(layout.scatter, packed, packed_rows, 2, 4)
    assert same_bits(ours.view(torch.int16), plain.view(torch.int16))


@pytest.mark.parametrize("num_drafts", [0, 1, 5, 8])
def test_greedy_acceptance(num_drafts: int, both: Callable[..., tuple]) -> None:
    generator = torch.Generator().manual_seed(num_drafts)
    batch, vocab = 24, 3
    logits = torch.randn(batch, num_drafts + 1, vocab, generator=generator)
    logits[::7, num_drafts // 2] = torch.nan
    best = logits.argmax(-1)[:, :-1]
    noise = torch.rand(best.shape, generator=generator) < 0.2
    block = DraftBlock(torch.where(noise, 2, best), torch.empty(batch, num_drafts, 0))
    lens = torch.randint(1, num_drafts + 2, (batch,), generator=generator)
    zeros = torch.zeros(batch)
    sampling = SamplingRows(zeros, zeros.long(), torch.ones(batch), zeros, zeros.long())
    ours, plain = both(accept.accept, block, logits, VerifyPlan(lens), sampling, zeros.long())
    assert same_bits(ours.correct_len, plain.correct_len)
    assert same_bits(ours.bonus, plain.bonus)
    assert same_bits(*both(accept.emitted, block.tokens, ours))
    assert len(ours.correct_len.unique()) > min(num_drafts, 2)


@pytest.mark.parametrize("num_drafts", [1, 7])
def test_block_acceptance(num_drafts: int, both: Callable[..., tuple]) -> None:
    generator = torch.Generator().manual_seed(num_drafts)
    batch, vocab = 24, 5
    logits = torch.randn(batch, num_drafts + 1, vocab, generator=generator)
    probs = (logits[:, :-1] + 0.5 * torch.randn(batch, num_drafts, vocab, generator=generator)).softmax(-1)
    tokens = torch.multinomial(probs.flatten(0, 1), 1, generator=generator).view(batch, num_drafts)
    ones = torch.ones(batch)
    sampling = SamplingRows(ones, ones.long() * 0, ones, ones * 0, torch.arange(batch))
    plan = VerifyPlan(torch.full((batch,), num_drafts + 1))
    ours, plain = both(accept.accept, DraftBlock(tokens, probs), logits, plan, sampling, torch.arange(batch), "block")
    assert same_bits(ours.correct_len, plain.correct_len)
    assert same_bits(ours.bonus, plain.bonus)
    assert len(ours.correct_len.unique()) > 1


def test_emitted_with_a_failed_request(both: Callable[..., tuple]) -> None:
    tokens = torch.tensor([[5, 6, 7], [8, 9, 10], [1, 2, 3]])
    acceptance = Acceptance(torch.tensor([0, 2, 3]), torch.tensor([-1, 4, 11]))
    ours, plain = both(accept.emitted, tokens, acceptance)
    assert same_bits(ours, plain)
    assert ours.tolist() == [[-1, -1, -1, -1], [8, 9, 4, -1], [1, 2, 3, 11]]
