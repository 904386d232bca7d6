"""Edits of logits against numpy, and against the processors of transformers."""

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from dspark.spec.edits import LogitEdits, Places, apply_edits
from dspark.spec.sampling import probabilities

from .reference import Params, make_rows


def some_logits(rows: int, vocab: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 2


def all_of(rows: list[int], tokens: list[int]) -> Places:
    """Every pair of these rows and tokens."""
    pairs = torch.cartesian_prod(torch.tensor(rows), torch.tensor(tokens))
    return Places(pairs[:, 0], pairs[:, 1])


def test_nothing_to_do_changes_nothing() -> None:
    logits = some_logits(3, 20)
    before = logits.clone()
    apply_edits(logits, LogitEdits())
    assert torch.equal(logits, before)


@pytest.mark.parametrize("penalty", [0.5, 1.3, 4.0])
def test_repetition_penalty_is_that_of_transformers(penalty: float) -> None:
    logits, history = some_logits(4, 30), torch.tensor([[3, 7, 7, 29], [0, 1, 2, 3], [5, 5, 5, 5], [9, 8, 9, 8]])
    expected = RepetitionPenaltyLogitsProcessor(penalty)(history, logits.clone())
    pairs = sorted({(row, int(token)) for row in range(4) for token in history[row]})
    places = Places(*(torch.tensor(column) for column in zip(*pairs, strict=True)))
    factor, nothing = torch.full((len(pairs),), penalty), torch.zeros(len(pairs))
    apply_edits(logits, LogitEdits(penalties=(places, factor, nothing)))
    assert torch.equal(logits, expected)


def test_the_whole_order_is_that_of_transformers() -> None:
    """Bias, repetition penalty, temperature, min-p, top-k, top-p: one after the other."""
    logits, history = some_logits(2, 60, seed=1), torch.tensor([[4, 9, 11], [4, 4, 50]])
    bias = {4: 1.5, 30: -3.0, 31: 2.0}
    chain = LogitsProcessorList(
        [
            SequenceBiasLogitsProcessor({(token,): value for token, value in bias.items()}),
            RepetitionPenaltyLogitsProcessor(1.7),
            TemperatureLogitsWarper(0.8),
            MinPLogitsWarper(0.02),
            TopKLogitsWarper(25),
            TopPLogitsWarper(0.9),
        ]
    )
    expected = chain(history, logits.clone()).softmax(-1)
    pairs = sorted({(row, int(token)) for row in range(2) for token in history[row]})
    seen = Places(*(torch.tensor(column) for column in zip(*pairs, strict=True)))
    edits = LogitEdits(
        bias=(all_of([0, 1], list(bias)), torch.tensor([*bias.values()] * 2)),
        penalties=(seen, torch.full((len(pairs),), 1.7), torch.zeros(len(pairs))),
    )
    apply_edits(logits, edits)
    law = probabilities(logits[:, None], make_rows([Params(0.8, 25, 0.9, 0.02)] * 2, [0, 0]))[:, 0]
    torch.testing.assert_close(law, expected, rtol=1e-5, atol=1e-7)


def test_presence_and_frequency_are_subtracted_after_the_factor() -> None:
    logits = torch.tensor([[2.0, -2.0, 1.0]])
    places = Places(torch.tensor([0, 0]), torch.tensor([0, 1]))
    apply_edits(logits, LogitEdits(penalties=(places, torch.tensor([2.0, 2.0]), torch.tensor([0.5, 1.5]))))
    assert logits.tolist() == [[0.5, -5.5, 1.0]]


def test_banned_tokens_stay_banned() -> None:
    """Places may repeat, and neither a bias nor a penalty nor a grammar brings a token back."""
    logits = some_logits(3, 10)
    ban = Places(torch.tensor([0, 0, 2]), torch.tensor([4, 4, 1]))
    everywhere = torch.full((3, 1), -1, dtype=torch.int32)
    edits = LogitEdits(
        bias=(all_of([0, 1, 2], [1, 4]), torch.full((6,), 100.0)),
        penalties=(all_of([0], [4]), torch.tensor([0.1]), torch.tensor([-2.0])),
        banned=ban,
        grammar=(torch.arange(3), everywhere),
    )
    apply_edits(logits, edits)
    assert (logits == -torch.inf).nonzero().tolist() == [[0, 4], [2, 1]]


@pytest.mark.parametrize(("vocab", "num_words"), [(64, 2), (70, 3), (61, 2), (40, 4), (100, 2)])
def test_grammar_bits(vocab: int, num_words: int) -> None:
    """The lowest bit first; more bits than tokens are cut, tokens without a bit are not allowed."""
    logits, rows = some_logits(5, vocab), torch.tensor([4, 0, 2])
    bits = torch.randint(-(1 << 31), 1 << 31, (3, num_words), generator=torch.Generator().manual_seed(2)).int()
    allowed = np.unpackbits(bits.numpy().view(np.uint8), axis=1, bitorder="little").astype(bool)
    allowed = np.pad(allowed, ((0, 0), (0, max(0, vocab - allowed.shape[1]))))[:, :vocab]
    expected = logits.clone()
    expected[rows] = torch.where(torch.from_numpy(allowed), logits[rows], -torch.inf)
    apply_edits(logits, LogitEdits(grammar=(rows, bits)))
    assert torch.equal(logits, expected)


def test_a_broken_row_stays_broken() -> None:
    logits = torch.full((1, 40), torch.nan)
    edits = LogitEdits(
        penalties=(all_of([0], [3]), torch.tensor([2.0]), torch.tensor([1.0])),
        grammar=(torch.tensor([0]), torch.full((1, 2), -1, dtype=torch.int32)),
    )
    apply_edits(logits, edits)
    assert logits.isnan().all()
