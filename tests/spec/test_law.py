"""Whatever the drafter proposes, the output follows the target's law; and the test that says so can tell.

Target and drafter are tables: the target's law depends on the last two tokens, the drafter's on the anchor, the slot
and the token before (its sequential head). Many requests of several kinds run rounds side by side.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest
import torch
from scipy.stats import chi2
from torch import Tensor

import dspark.spec.accept
from dspark.spec.accept import accept
from dspark.spec.sampling import Role, categorical, probabilities, round_seed, uniform
from dspark.spec.types import DraftBlock, SamplingRows, VerifyPlan

from .reference import GREEDY, Params, law_of, make_rows

VOCAB, NUM_DRAFTS, TRIALS = 6, 3, 40_000
START = (1, 4)  # the token before the first anchor, and the anchor
KINDS = {
    "plain": Params(),
    "top_k": Params(top_k=3),
    "top_p": Params(top_p=0.75),
    "min_p": Params(min_p=0.2),
    "all": Params(temperature=0.7, top_k=5, top_p=0.95, min_p=0.02),
    "greedy": GREEDY,
}


class Pair(NamedTuple):
    """A target and a drafter."""

    target: Tensor  # [V, V, V] logits after two tokens
    base: Tensor  # [V, G, Vd] logits by anchor and slot
    head: Tensor  # [V, Vd] what the sequential head adds after a token
    token_ids: Tensor | None = None  # [Vd]


def make_pair(spread: float, likeness: float, draft_vocab: tuple[int, ...] | None = None) -> Pair:
    """spread: how uneven the laws are; likeness 1: the drafter's head says what the target says after token 0."""
    generator = torch.Generator().manual_seed(7)
    target = torch.randn(VOCAB, VOCAB, VOCAB, generator=generator) * spread
    base = torch.randn(VOCAB, NUM_DRAFTS, VOCAB, generator=generator) * spread * (1 - likeness)
    head = target[0] + torch.randn(VOCAB, VOCAB, generator=generator) * spread * (1 - likeness)
    if draft_vocab is None:
        return Pair(target, base, head)
    ids = torch.tensor(draft_vocab)
    return Pair(target, base[..., ids], head[..., ids], ids)


PAIRS = {
    "near": make_pair(1.0, 0.9),
    "far": make_pair(1.5, 0.0),
    "peaked": make_pair(5.0, 0.5),
    "reduced": make_pair(1.2, 0.6, (4, 0, 5, 2)),
    "one word": make_pair(1.0, 0.6, (3,)),
}


class Fault(NamedTuple):
    """A planted bias in what the drafter does and says."""

    claim: Callable[[Tensor, Tensor, SamplingRows], Tensor] | None = None  # (base, biased logits, rows) -> told law
    draft_role: Role = Role.DRAFT
    by_block: bool = False  # no fault: block verification
    seeds_by_round: bool = True  # which needs these


SOUND = Fault()
BY_BLOCK = Fault(by_block=True)


def draft(pair: Pair, anchors: Tensor, rows: SamplingRows, positions: Tensor, fault: Fault) -> DraftBlock:
    """Draw a block, slot after slot, each after the one before."""
    tokens, told, previous = [], [], anchors
    for slot in range(NUM_DRAFTS):
        base = pair.base[anchors, slot].unsqueeze(1)
        logits = base + pair.head[previous].unsqueeze(1)
        law = probabilities(logits, rows)
        index = categorical(law[:, 0], uniform(rows.seed, positions + 1 + slot, fault.draft_role))
        previous = index if pair.token_ids is None else pair.token_ids[index]
        tokens.append(previous)
        told.append(fault.claim(base, logits, rows) if fault.claim else law)
    return DraftBlock(torch.stack(tokens, 1), torch.cat(told, 1), pair.token_ids)


def first_tokens(pair: Pair, rows: SamplingRows, caps: bool, fault: Fault) -> Tensor:
    """The first three output tokens of each request, [B, 3], by as many rounds as it takes."""
    batch_size = len(rows.seed)
    text = torch.zeros(batch_size, 2 + 3 + NUM_DRAFTS, dtype=torch.long)
    text[:, 0], text[:, 1] = START
    length = torch.full((batch_size,), 2)
    caps_noise = torch.Generator().manual_seed(11)
    for _ in range(3):
        todo = (length < 5).nonzero().squeeze(1)
        some, positions = rows.select(todo), length[todo] + 40
        if fault.by_block and fault.seeds_by_round:
            some = some._replace(seed=round_seed(some.seed, positions))
        before, anchors = text[todo, length[todo] - 2], text[todo, length[todo] - 1]
        block = draft(pair, anchors, some, positions, fault)
        prefix = torch.cat([before[:, None], anchors[:, None], block.tokens], 1)
        logits = pair.target[prefix[:, :-1], prefix[:, 1:]]
        verify_lens = torch.full_like(todo, NUM_DRAFTS + 1)
        if caps:
            verify_lens = torch.randint(1, NUM_DRAFTS + 2, todo.shape, generator=caps_noise)
            logits[torch.arange(NUM_DRAFTS + 1) >= verify_lens[:, None]] = 0
        verification = "block" if fault.by_block else "token"
        outcome = accept(block, logits, VerifyPlan(verify_lens), some, positions, verification)
        output = torch.cat([block.tokens, block.tokens[:, :1]], 1)
        output.scatter_(1, outcome.correct_len[:, None], outcome.bonus[:, None])
        for k in range(NUM_DRAFTS + 1):
            kept = (k < outcome.commit_len) & (length[todo] + k < text.shape[1])
            text[todo[kept], length[todo][kept] + k] = output[kept, k]
        length[todo] += outcome.commit_len
    return text[:, 2:5]


def exact_law(pair: Pair, params: Params) -> np.ndarray:
    """P of every triple of tokens after START, [V ** 3]."""
    after = np.array([[law_of(row.numpy(), params) for row in rows] for rows in pair.target])
    a, b = START
    return np.einsum("i,ij,ijk->ijk", after[a, b], after[b], after).reshape(-1)


def p_value(counts: np.ndarray, law: np.ndarray) -> float:
    """Chi-square; cells expected fewer than ten times are taken together; 0 if an impossible cell was seen."""
    if counts[law == 0].any():
        return 0.0
    expected = law * counts.sum()
    few = expected < 10
    cells = np.append(expected[~few], expected[few].sum())
    seen = np.append(counts[~few], counts[few].sum())
    cells, seen = cells[cells > 0], seen[cells > 0]
    return float(chi2.sf(((seen - cells) ** 2 / cells).sum(), len(cells) - 1)) if len(cells) > 1 else 1.0


def law_p_values(
    pair: Pair, kinds: dict[str, Params] = KINDS, caps: bool = False, fault: Fault = SOUND, seed: int = 0
) -> dict[str, float]:
    """How well the first three output positions follow the target: a p-value for each kind of request.

    All kinds run in one batch, one after the other, TRIALS requests of each.
    """
    params = list(kinds.values())
    kind_of = torch.arange(TRIALS * len(params)) % len(params)
    rows = make_rows(params, torch.zeros(len(params)))._replace(seed=torch.arange(len(params)))
    rows = rows.select(kind_of)._replace(seed=torch.arange(len(kind_of)) + seed)
    tokens = first_tokens(pair, rows, caps, fault)
    cells = (tokens * torch.tensor([VOCAB**2, VOCAB, 1])).sum(1)
    return {
        name: p_value(torch.bincount(cells[kind_of == i], minlength=VOCAB**3).numpy(), exact_law(pair, params[i]))
        for i, name in enumerate(kinds)
    }


SOME_KINDS = {name: KINDS[name] for name in ("plain", "all", "greedy")}


@pytest.mark.parametrize(
    ("name", "kinds"),
    [("far", KINDS), ("peaked", KINDS), ("reduced", KINDS), ("near", SOME_KINDS), ("one word", SOME_KINDS)],
    ids=lambda value: value if isinstance(value, str) else f"{len(value)} kinds",
)
def test_output_follows_the_target(name: str, kinds: dict[str, Params]) -> None:
    p_values = law_p_values(PAIRS[name], kinds)
    assert min(p_values.values()) > 1e-4, p_values


def test_capped_output_follows_the_target() -> None:
    p_values = law_p_values(PAIRS["reduced"], SOME_KINDS, caps=True)
    assert min(p_values.values()) > 1e-4, p_values


@pytest.mark.parametrize("name", ["far", "peaked", "reduced"])
def test_output_verified_by_block_follows_the_target(name: str) -> None:
    p_values = law_p_values(PAIRS[name], SOME_KINDS, fault=BY_BLOCK)
    assert min(p_values.values()) > 1e-4, p_values


def test_block_verification_falls_back_where_it_is_capped() -> None:
    """Caps here are drawn without a look at the drafts, as they must be."""
    p_values = law_p_values(PAIRS["reduced"], SOME_KINDS, caps=True, fault=BY_BLOCK)
    assert min(p_values.values()) > 1e-4, p_values


@pytest.mark.parametrize("name", ["far", "reduced"])
def test_block_verification_with_the_noise_of_the_round_before_is_caught(name: str) -> None:
    p_values = law_p_values(PAIRS[name], {"plain": Params()}, fault=BY_BLOCK._replace(seeds_by_round=False))
    assert p_values["plain"] < 1e-6, p_values


def before_the_head(base: Tensor, logits: Tensor, rows: SamplingRows) -> Tensor:
    return probabilities(base, rows)


def another_temperature(base: Tensor, logits: Tensor, rows: SamplingRows) -> Tensor:
    return probabilities(logits, rows._replace(temperature=rows.temperature * 1.25))


def without_filters(base: Tensor, logits: Tensor, rows: SamplingRows) -> Tensor:
    return probabilities(logits, make_rows([Params()], [0]).select(torch.zeros_like(rows.seed)))


@pytest.mark.parametrize(
    ("fault", "kinds"),
    [
        (Fault(claim=before_the_head), ("plain", "all")),
        (Fault(claim=another_temperature), ("plain", "all")),
        (Fault(claim=without_filters), ("top_p", "min_p")),
        (Fault(draft_role=Role.ACCEPT), ("plain", "all")),
    ],
    ids=["law before the head", "law at another temperature", "law without filters", "one noise to draft and accept"],
)
@pytest.mark.parametrize("name", ["far", "reduced"])
def test_a_biased_drafter_is_caught(name: str, fault: Fault, kinds: tuple[str, ...]) -> None:
    p_values = law_p_values(PAIRS[name], {kind: KINDS[kind] for kind in (*kinds, "greedy")}, fault=fault)
    del p_values["greedy"]  # takes no part in the bias, only in the batch
    assert max(p_values.values()) < 1e-6, p_values


@pytest.mark.parametrize("name", ["far", "reduced"])
def test_a_bonus_drawn_with_the_acceptance_noise_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dspark.spec.accept, "uniform", lambda seed, at, role: uniform(seed, at, Role.ACCEPT))
    assert law_p_values(PAIRS[name], {"plain": Params()})["plain"] < 1e-6


@pytest.mark.parametrize("name", ["far", "reduced"])
def test_a_bonus_drawn_from_the_target_after_a_rejection_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dspark.spec.accept, "_residual", lambda p, block, requests, draft: p)
    assert law_p_values(PAIRS[name], {"plain": Params()})["plain"] < 1e-6
