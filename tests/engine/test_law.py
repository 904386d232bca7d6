"""Whatever the drafter proposes, the answers follow the target's law: chi-square over the first three tokens."""

import itertools
from collections import Counter

import numpy as np
import pytest
import torch
from scipy.stats import chi2

import dspark.engine.round
import dspark.spec.accept
from dspark.engine.config import EngineSettings
from dspark.engine.engine import Engine
from dspark.engine.request import SamplingParams
from dspark.spec.sampling import Role, round_seed, uniform

VOCAB = 8
PROMPT = [3, 1, 5]
POSITIONS = 3
PLAIN = SamplingParams(max_tokens=5, temperature=1.0, ignore_eos=True)
FILTERED = {
    "top_k": PLAIN.replace(top_k=4),
    "top_p": PLAIN.replace(top_p=0.7),
    "min_p": PLAIN.replace(min_p=0.2),
    "all": PLAIN.replace(top_k=6, top_p=0.9, min_p=0.05, temperature=0.7),
}
GREEDY = SamplingParams(max_tokens=5, ignore_eos=True)
TRIALS = 40_000


@pytest.fixture(scope="module")
def pair(make_model, make_drafter):
    """A target over eight tokens, and a drafter of three drafts whose laws often, not always, agree with it."""
    small = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
    target, reference = make_model("llama", vocab_size=VOCAB, num_hidden_layers=2, initializer_range=0.2, **small)
    changes = {"target_layer_ids": (0,), "num_hidden_layers": 1, "block_size": 3}
    return target, make_drafter(target.decoder, **changes), reference


@pytest.fixture(scope="module")
def chain_pair(pair, make_chain):
    """The same target, and an EAGLE-3 drafter of three drafts."""
    target, _, reference = pair
    return target, make_chain(target.decoder, target_layer_ids=(0,), ttt_length=3), reference


def filtered(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """The law of one row, written down the long way."""
    p = np.exp((logits - logits.max()) / params.temperature)
    p /= p.sum()
    p = np.where(p >= params.min_p * p.max(), p, 0)
    if params.top_k:
        p = np.where(p >= np.sort(p)[-params.top_k], p, 0)
    p /= p.sum()
    order = np.argsort(-p, kind="stable")
    kept = np.cumsum(p[order]) - p[order] < params.top_p
    p[order[~kept]] = 0
    return p / p.sum()


def exact_law(reference, params: SamplingParams) -> np.ndarray:
    """P of every triple of first tokens, [V ** 3], from the transformers model."""
    prefixes = torch.tensor([[*PROMPT, *pair] for pair in itertools.product(range(VOCAB), repeat=2)])
    with torch.inference_mode():
        logits = reference(prefixes).logits.double().numpy()  # [V * V, 5, V]
    law = np.zeros((VOCAB, VOCAB, VOCAB))
    for (a, b), rows in zip(itertools.product(range(VOCAB), repeat=2), logits, strict=True):
        first, second, third = (filtered(rows[i], params) for i in (2, 3, 4))
        law[a, b] = first[a] * second[b] * third
    return law.reshape(-1)


def p_value(counts: np.ndarray, law: np.ndarray) -> float:
    """Chi-square, with the cells that are expected fewer than five times taken together."""
    assert counts[law == 0].sum() == 0, "a token came out that the filters exclude"
    expected = law * counts.sum()
    small = (expected < 5) & (law > 0)
    cells, seen = expected[expected >= 5], counts[expected >= 5]
    if expected[small].sum() > 1:
        cells, seen = np.append(cells, expected[small].sum()), np.append(seen, counts[small].sum())
    return float(chi2.sf(((seen - cells) ** 2 / cells).sum(), len(cells) - 1))


def first_tokens(engine: Engine, params: list[SamplingParams]) -> list[tuple[int, ...]]:
    """The first tokens of each request; aborted as soon as it has them."""
    index = {engine.submit(PROMPT, param): i for i, param in enumerate(params)}
    tokens: list[list[int]] = [[] for _ in params]
    while engine.has_work():
        for out in engine.step():
            answer = tokens[index[out.request_id]]
            answer += out.token_ids
            if len(answer) >= POSITIONS:
                engine.abort(out.request_id)
    engine.check_integrity()
    return [tuple(answer[:POSITIONS]) for answer in tokens]


def draw(
    pair, kinds: list[SamplingParams], trials: int, least_accepted: float = 1.4, verification: str = "token"
) -> list[np.ndarray]:
    """How often each triple came first, [V ** 3] for each kind: `trials` of all kinds together, with greedy rows."""
    target, drafter, _ = pair
    settings = EngineSettings(max_batch=512, max_length=16, block_size=4, step_tokens=4096, verification=verification)
    engine = Engine(target, drafter, settings)
    order = np.random.default_rng(0)
    counts = [Counter() for _ in kinds]
    for begin in range(0, trials, 4096):
        seeds = range(begin, min(begin + 4096, trials))
        params = [kinds[seed % len(kinds)].replace(seed=seed) for seed in seeds] + [GREEDY] * 64
        shuffled = order.permutation(len(params))
        found = dict(zip(shuffled, first_tokens(engine, [params[i] for i in shuffled]), strict=True))
        for i, seed in enumerate(seeds):
            counts[seed % len(kinds)][found[i]] += 1
        assert len({found[i] for i in range(len(seeds), len(params))}) == 1, "greedy rows differ"
    assert least_accepted < engine.stats.accepted_length < 3, "too few drafts are judged both ways"
    triples = list(itertools.product(range(VOCAB), repeat=POSITIONS))
    return [np.array([count[triple] for triple in triples]) for count in counts]


def test_first_three_tokens_follow_the_target(pair):
    (counts,) = draw(pair, [PLAIN], TRIALS)
    assert p_value(counts, exact_law(pair[2], PLAIN)) > 1e-3


def test_chain_drafts_follow_the_target(chain_pair):
    (counts,) = draw(chain_pair, [PLAIN], TRIALS // 2)
    assert p_value(counts, exact_law(chain_pair[2], PLAIN)) > 1e-3


def test_block_verification_follows_the_target(pair):
    kinds = [PLAIN, FILTERED["all"]]
    for counts, params in zip(draw(pair, kinds, TRIALS // 2, verification="block"), kinds, strict=True):
        assert p_value(counts, exact_law(pair[2], params)) > 1e-3, params


def test_block_verification_draws_each_round_from_a_seed_of_its_own(pair, monkeypatch):
    """Else a round repeats noise that decided the one before it; tests/spec/test_law.py shows what that does."""
    accept, seeds = dspark.engine.round.accept, []

    def watched(block, logits, plan, rows, positions, *rest):
        if block.num_drafts:
            assert torch.equal(rows.seed, round_seed(torch.tensor([7]), positions))
            seeds.append(int(rows.seed))
        return accept(block, logits, plan, rows, positions, *rest)

    monkeypatch.setattr(dspark.engine.round, "accept", watched)
    longer = PLAIN.replace(seed=7, max_tokens=10)
    Engine(*pair[:2], EngineSettings(max_length=16, verification="block")).generate([PROMPT], longer)
    assert len(set(seeds)) == len(seeds) > 1


def test_filters_follow_the_target(pair):
    kinds = list(FILTERED.values())
    for counts, params in zip(draw(pair, kinds, TRIALS // 2), kinds, strict=True):
        assert p_value(counts, exact_law(pair[2], params)) > 1e-3, params


def test_a_wrong_q_is_noticed(pair, monkeypatch):
    """Planted: the drafts were drawn from another law than acceptance is told (a temperature of 1.5 on q)."""
    accept = dspark.engine.round.accept

    def biased(block, *rest):
        q = block.probs.sqrt()
        return accept(block._replace(probs=q / q.sum(-1, keepdim=True)), *rest)

    monkeypatch.setattr(dspark.engine.round, "accept", biased)
    (counts,) = draw(pair, [PLAIN], TRIALS // 8)
    assert p_value(counts, exact_law(pair[2], PLAIN)) < 1e-9


def test_shared_noise_is_noticed(pair, monkeypatch):
    """Planted: acceptance reads the number that drew the draft."""

    def shared(seed, position, role):
        if role == Role.ACCEPT and position.shape[1]:
            return uniform(round_seed(seed[:, 0], position[:, 0] - 1)[:, None], position, Role.DRAFT)
        return uniform(seed, position, role)

    monkeypatch.setattr(dspark.spec.accept, "uniform", shared)
    (counts,) = draw(pair, [PLAIN], TRIALS // 8)
    assert p_value(counts, exact_law(pair[2], PLAIN)) < 1e-9
