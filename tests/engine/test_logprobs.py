"""Log probabilities of every token put out, drafts and bonuses alike, against transformers; and n answers at once."""

import numpy as np
import pytest
import torch

from dspark.engine.config import EngineSettings
from dspark.engine.engine import Engine
from dspark.engine.request import SamplingParams

from .test_law import filtered

PROMPTS = [[66, 20, 35, 80, 41], [9, 8, 7]]
GREEDY = SamplingParams(max_tokens=14, logprobs=3, ignore_eos=True)
SETTINGS = EngineSettings(max_batch=6, max_length=90)


@pytest.fixture(scope="module")
def known(target, make_scripted):
    """A target and a drafter that knows two of three tokens of its greedy answers."""
    done = Engine(target, None, SETTINGS).generate(PROMPTS, GREEDY)
    return target, make_scripted(target.decoder, {tuple(c.prompt_ids): c.token_ids for c in done}, wrong_every=3)


def model_rows(reference, completion) -> np.ndarray:
    """The reference's logits at every token of an answer."""
    ids = torch.tensor([completion.prompt_ids + completion.token_ids])
    with torch.inference_mode():
        logits = reference(ids).logits[0].double().numpy()
    return logits[len(completion.prompt_ids) - 1 : -1]


def check(completion, laws: np.ndarray, num_top: int) -> None:
    """Every token has its own log probability and the likeliest ones, in order."""
    assert [entry.token_id for entry in completion.logprobs] == completion.token_ids
    with np.errstate(divide="ignore"):
        logs = np.log(laws)
    for entry, row in zip(completion.logprobs, logs, strict=True):
        assert entry.logprob == pytest.approx(row[entry.token_id], abs=1e-4)
        likeliest = [i for i in np.argsort(-row)[:num_top] if np.isfinite(row[i])]
        assert [i for i, _ in entry.top] == likeliest
        assert [value for _, value in entry.top] == pytest.approx([row[i] for i in likeliest], abs=1e-4)


def softmax(logits: np.ndarray) -> np.ndarray:
    p = np.exp(logits - logits.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True)


def test_accepted_drafts_and_bonuses_have_the_models_own_log_probabilities(known, make_model):
    done = Engine(*known, SETTINGS).generate(PROMPTS, GREEDY)
    assert sum(c.origins.count("accepted") for c in done) > 5
    for completion in done:
        check(completion, softmax(model_rows(make_model()[1], completion)), 3)


@pytest.mark.parametrize("mode", ["raw", "processed"])
def test_edits_are_left_out_or_counted_in(mode, known, make_model):
    params = GREEDY.replace(
        temperature=0.8, top_k=5, seed=3, logit_bias={4: 8.0, 5: 7.5, 6: 7.5}, logprobs_mode=mode, logprobs=8
    )
    (completion,) = Engine(*known, SETTINGS).generate(PROMPTS[:1], params)
    rows = model_rows(make_model()[1], completion)
    if mode == "raw":
        return check(completion, softmax(rows), 8)
    for token, bias in params.logit_bias.items():
        rows[:, token] += bias
    check(completion, np.array([filtered(row, params) for row in rows]), 8)
    assert all(len(entry.top) == 5 for entry in completion.logprobs)
    return None


def test_processed_log_probabilities_of_greedy_answers_are_not_degenerate(known, make_model):
    params = GREEDY.replace(logprobs_mode="processed", logit_bias={4: 3.0})
    (completion,) = Engine(*known, SETTINGS).generate(PROMPTS[:1], params)
    rows = model_rows(make_model()[1], completion)
    rows[:, 4] += 3.0
    check(completion, softmax(rows), 3)


def test_they_end_where_the_answer_ends_and_stream_with_it(known):
    engine = Engine(*known, SETTINGS)
    stop = engine.generate(PROMPTS[:1], GREEDY)[0].token_ids[6]
    asked = engine.submit(PROMPTS[0], GREEDY.replace(stop_token_ids=(stop,), logprobs=0))
    silent = engine.submit(PROMPTS[0], GREEDY.replace(logprobs=None))
    streamed, completions = {asked: [], silent: []}, {}
    while engine.has_work():
        for out in engine.step():
            streamed[out.request_id].append(out.logprobs)
            completions[out.request_id] = out.completion
    assert completions[asked].finish_reason == "stop"
    assert [entry for entries in streamed[asked] for entry in entries] == completions[asked].logprobs
    assert len(completions[asked].logprobs) == len(completions[asked].token_ids)
    assert all(entry.top == [] for entry in completions[asked].logprobs)
    assert completions[silent].logprobs is None
    assert streamed[silent] == [None] * len(streamed[silent])


def test_n_answers_to_one_prompt(known):
    params = SamplingParams(n=3, max_tokens=10, temperature=1.0, seed=5, ignore_eos=True)
    engine = Engine(*known, SETTINGS)
    done = engine.generate(PROMPTS, [params, params.replace(n=1)])
    assert [(c.request_id, c.index) for c in done] == [
        ("request-0", 0),
        ("request-0", 1),
        ("request-0", 2),
        ("request-1", 0),
    ]
    assert len({tuple(c.token_ids) for c in done[:3]}) == 3
    engine.check_integrity()
    again = Engine(*known, EngineSettings(max_batch=1, max_length=90)).generate(PROMPTS[:1], params)
    assert [c.token_ids for c in again] == [c.token_ids for c in done[:3]], "each answer has a seed of its own"
    (first,) = engine.generate(PROMPTS[:1], params.replace(n=1))
    assert first.token_ids == done[0].token_ids, "the first answer is that of n = 1"
    unseeded = engine.generate(PROMPTS[:1], params.replace(seed=None))
    assert len({tuple(c.token_ids) for c in unseeded}) == 3


def test_n_answers_share_the_prompt(known):
    prompt = [(7 * i) % 250 + 1 for i in range(41)]
    engine = Engine(*known, EngineSettings(max_batch=6, max_length=90, block_size=4))
    done = engine.generate([prompt], SamplingParams(n=4, max_tokens=3, temperature=1.0, seed=1))
    assert [c.figures.cached_tokens for c in done] == [0, 40, 40, 40]
    assert engine.stats.prompt_tokens == 41 + 3


def test_an_abort_drops_all_answers_under_way(known):
    engine = Engine(*known, SETTINGS)
    params = SamplingParams(n=4, max_tokens=12, temperature=1.0, seed=1)
    request_id = engine.submit(PROMPTS[0], params, "r")
    engine.submit(PROMPTS[1], GREEDY, "other")
    outputs = engine.step() + engine.step()
    assert {out.index for out in outputs if out.request_id == "r"} == {0, 1, 2, 3}
    completion = engine.abort(request_id)
    assert (completion.finish_reason, completion.index) == ("abort", 0)
    assert engine.abort(request_id) is None
    engine.check_integrity()
    while engine.has_work():
        assert {out.request_id for out in engine.step()} == {"other"}
