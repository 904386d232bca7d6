"""Greedy answers under edits: speculation, plain decoding and, where it knows the edit, transformers agree."""

import numpy as np
import pytest

from dspark.engine.config import EngineSettings
from dspark.engine.edits import TokenCounts
from dspark.engine.engine import Engine
from dspark.engine.grammar import Grammars
from dspark.engine.request import Completion, SamplingParams

from .test_greedy import transformers_answer

FREE = SamplingParams(max_tokens=20, ignore_eos=True)
STOPS = tuple(range(1, 260, 2))
EDITS = {
    "repetition": FREE.replace(repetition_penalty=1.4),
    "presence and frequency": FREE.replace(presence_penalty=1.5, frequency_penalty=0.7),
    "encouraged repetition": FREE.replace(repetition_penalty=0.8, presence_penalty=-0.5),
    "bias": FREE.replace(logit_bias={7: 6.0, 8: 6.5, 9: -100.0, 200: 5.0}),
    "bad words": FREE.replace(
        bad_words=[[t] for t in range(1, 100)] + [[a, b] for a in range(260) for b in (150, 151)]
    ),
    "min_tokens": SamplingParams(max_tokens=20, min_tokens=9, stop_token_ids=STOPS),
    "regex": SamplingParams(max_tokens=20, regex=r"([a-z]{2}[0-9]|-){5}"),
    "all": SamplingParams(
        max_tokens=20,
        repetition_penalty=1.2,
        frequency_penalty=0.5,
        logit_bias={66: 3.0, 70: -4.0},
        bad_words=["ab", "c"],
        min_tokens=12,
        regex=r"[a-g]{3}[0-9a-z]*",
    ),
}
IN_TRANSFORMERS = {
    "repetition": {"repetition_penalty": 1.4, "eos_token_id": None},
    "bias": {"sequence_bias": {(t,): b for t, b in EDITS["bias"].logit_bias.items()}, "eos_token_id": None},
    "bad words": {"bad_words_ids": [list(w) for w in EDITS["bad words"].bad_words], "eos_token_id": None},
    "min_tokens": {"min_new_tokens": 9, "eos_token_id": [0, *STOPS]},
}
SETTINGS = EngineSettings(max_batch=8, max_length=80, block_size=4)


CASES = [(kind, [(7 * i * i + 13 * n) % 255 + 1 for i in range(n)]) for n, kind in enumerate([*EDITS] * 3, start=2)]
PROMPTS = [prompt for _, prompt in CASES]
PARAMS = [EDITS[kind] for kind, _ in CASES]


@pytest.fixture(scope="module")
def plain(target) -> list[Completion]:
    """What plain decoding answers to each case."""
    return Engine(target, None, SETTINGS).generate(PROMPTS, PARAMS)


def test_edits_change_the_answers(plain, target):
    free = Engine(target, None, SETTINGS).generate(PROMPTS, FREE)
    for (kind, _), a, b in zip(CASES, plain, free, strict=True):
        assert a.token_ids != b.token_ids, kind


def test_plain_decoding_and_transformers_agree(plain, make_model):
    _, reference = make_model()
    for (kind, prompt), completion in zip(CASES, plain, strict=True):
        if kind in IN_TRANSFORMERS:
            expected = transformers_answer(reference, prompt, 20, **IN_TRANSFORMERS[kind])
            assert completion.token_ids == expected, kind


def same_answers(target, drafter, plain) -> int:
    """Answer all cases in mixed batches; returns how many drafts were accepted."""
    done = Engine(target, drafter, SETTINGS).generate(PROMPTS, PARAMS)
    for (kind, _), a, b in zip(CASES, done, plain, strict=True):
        assert (a.token_ids, a.text, a.finish_reason) == (b.token_ids, b.text, b.finish_reason), kind
    return sum(completion.origins.count("accepted") for completion in done)


@pytest.mark.parametrize("wrong_every", [0, 3])
def test_drafts_do_not_change_edited_answers(wrong_every, target, plain, make_scripted):
    answers = {tuple(c.prompt_ids): c.token_ids for c in plain}
    accepted = same_answers(target, make_scripted(target.decoder, answers, wrong_every), plain)
    assert accepted > 0.4 * sum(len(c.token_ids) for c in plain)


def test_neither_do_those_of_a_random_drafter(target, plain, make_drafter):
    same_answers(target, make_drafter(target.decoder), plain)


def test_penalties_that_ignore_the_drafts_before_a_row_are_noticed(target, plain, make_scripted, monkeypatch):
    along = TokenCounts.along

    def once_a_round(self, drafts):
        rows, tokens, counts = along(self, [])
        num_rows = len(drafts) + 1
        each = np.tile(np.arange(num_rows), len(rows))
        return each, tokens.repeat(num_rows), counts.repeat(num_rows)

    monkeypatch.setattr(TokenCounts, "along", once_a_round)
    answers = {tuple(c.prompt_ids): c.token_ids for c in plain}
    with pytest.raises(AssertionError, match="repetition|frequency"):
        same_answers(target, make_scripted(target.decoder, answers), plain)


def test_an_unmasked_bonus_row_is_noticed(target, plain, make_scripted, monkeypatch):
    """Planted: where there are drafts, only the rows that judge one follow the grammar."""
    masks = Grammars.masks

    def without_last(self, along):
        bounded, words = masks(self, along)
        for (_, drafts), end in zip(along, np.cumsum([len(drafts) + 1 for _, drafts in along]), strict=True):
            if drafts:
                words[end - 1] = -1
        return bounded, words

    monkeypatch.setattr(Grammars, "masks", without_last)
    answers = {tuple(c.prompt_ids): c.token_ids for c in plain}
    with pytest.raises(AssertionError, match="outside the grammar|regex|all"):
        same_answers(target, make_scripted(target.decoder, answers), plain)
