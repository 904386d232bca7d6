"""The edits of a request's rows along drafts, against transformers on every prefix; what is refused; what it costs."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from dspark.engine.config import EngineSettings
from dspark.engine.edits import RequestEdits, edit_logits, make_edits
from dspark.engine.engine import Engine
from dspark.engine.grammar import Grammars
from dspark.engine.request import Request, SamplingParams
from dspark.engine.text import TextStream
from dspark.errors import ConfigError, RequestError
from dspark.spec.types import DraftBlock, VerifyPlan

VOCAB = 12
STOPS = [2, 9]
WORDS = [(3,), (4, 5), (5, 4, 5), (1, 1), (0, 6, 7, 8), (2, 2)]
TOKENS = st.lists(st.integers(0, VOCAB - 1), max_size=9)


def request_of(params: SamplingParams, prompt: list[int], answer: list[int], edits: RequestEdits | None) -> Request:
    stream = TextStream(lambda ids: "")
    return Request("r", prompt, params, 0, 100, frozenset(), stream, True, edits=edits, token_ids=answer)


def expected_rows(logits: torch.Tensor, params: SamplingParams, prompt, answer, drafts) -> torch.Tensor:
    """Every row edited by transformers' processors, with the drafts before it as part of the text."""
    chain = [SequenceBiasLogitsProcessor({(t,): b for t, b in params.logit_bias.items()})] if params.logit_bias else []
    chain += [
        MinNewTokensLengthLogitsProcessor(len(prompt), params.min_tokens, STOPS),
        RepetitionPenaltyLogitsProcessor(params.repetition_penalty),
    ]
    rows = []
    for i in range(len(drafts) + 1):
        output = answer + drafts[:i]
        row = LogitsProcessorList(chain)(torch.tensor([prompt + output]), logits[i : i + 1].clone())
        counts = torch.bincount(torch.tensor(output, dtype=torch.long), minlength=VOCAB)
        row -= params.frequency_penalty * counts + params.presence_penalty * (counts > 0)
        banned = NoBadWordsLogitsProcessor([list(word) for word in params.bad_words], eos_token_id=None)
        rows.append(banned(torch.tensor([prompt + output]), row))
    return torch.cat(rows)


@settings(derandomize=True, deadline=None, max_examples=60)
@given(TOKENS.filter(len), TOKENS, TOKENS, st.lists(TOKENS, min_size=1, max_size=3), st.integers(0, 12))
def test_rows_along_drafts_equal_those_of_transformers(prompt, answer, more, drafts, min_tokens):
    """One state serves the rounds of one request: what was drafted and dropped leaves no trace."""
    params = SamplingParams(
        repetition_penalty=1.4,
        presence_penalty=0.3,
        frequency_penalty=0.2,
        logit_bias={1: 2.0, 5: -1.0},
        bad_words=WORDS,
        min_tokens=min_tokens,
    )
    edits = RequestEdits(params, prompt, WORDS, STOPS, None)
    for i, committed in enumerate((answer, answer + more, answer + more)):
        block = drafts[i % len(drafts)]
        logits = torch.randn(1, len(block) + 1, VOCAB, generator=torch.Generator().manual_seed(i))
        expected = expected_rows(logits[0], params, prompt, committed, block)
        plan = VerifyPlan(torch.tensor([len(block) + 1]))
        tokens = torch.tensor(block, dtype=torch.long).view(1, -1)
        request = request_of(params, prompt, committed, edits)
        edit_logits([request], DraftBlock(tokens, torch.empty(1, len(block), 0)), plan, logits, None)
        torch.testing.assert_close(logits[0], expected, rtol=1e-5, atol=1e-5)


def test_rows_past_the_verify_length_are_left_alone():
    params = SamplingParams(logit_bias={1: 2.0}, repetition_penalty=2.0)
    edits = RequestEdits(params, [1, 2], [], [], None)
    requests = [request_of(params, [1, 2], [3], edits), request_of(SamplingParams(), [1, 2], [3], None)]
    logits = torch.ones(2, 4, VOCAB)
    block = DraftBlock(torch.tensor([[4, 5, 6]] * 2), torch.empty(2, 3, 0))
    edit_logits(requests, block, VerifyPlan(torch.tensor([2, 4])), logits, None)
    changed = (logits != 1).nonzero()[:, :2].unique(dim=0).tolist()
    assert changed == [[0, 0], [0, 1]]


def test_batches_without_edits_are_not_touched():
    requests = [request_of(SamplingParams(temperature=0.7, logprobs=2), [1], [3], None)] * 2
    logits = torch.ones(2, 1, VOCAB)
    assert edit_logits(requests, DraftBlock.empty(2), VerifyPlan(torch.tensor([1, 1])), logits, None) is logits


def test_half_precision_rows_are_edited_in_full_precision():
    params = SamplingParams(logit_bias={1: 0.001})
    requests = [request_of(params, [1], [3], RequestEdits(params, [1], [], [], None))]
    logits = torch.ones(1, 1, VOCAB, dtype=torch.bfloat16)
    edited = edit_logits(requests, DraftBlock.empty(1), VerifyPlan(torch.tensor([1])), logits, None)
    assert edited[0, 0, 1] == np.float32(1.001)
    assert (logits == 1).all()


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"logit_bias": {260: 1.0}}, r"logit_bias: token id 260 is outside 0\.\.259"),
        ({"bad_words": [[3, 400]]}, "bad_words: token id 400"),
        ({"regex": "["}, "regex: .*unclosed"),
        ({"json_schema": {"type": "nothing"}}, "json_schema: .*nothing"),
        ({"grammar": "start: ("}, "grammar: .*start"),
        ({"grammar": "root ::= ("}, "grammar: .*GBNF"),
    ],
)
def test_what_does_not_fit_the_target_is_refused(target, params, message):
    engine = Engine(target, None, EngineSettings(max_batch=1, max_length=40))
    with pytest.raises(RequestError, match=message):
        engine.submit([1, 2], SamplingParams.from_dict(params, "request"))
    assert not engine.has_work()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"min_tokens": 9, "max_tokens": 3}, "min_tokens is 9 but max_tokens 3"),
        ({"regex": "a", "choice": ["b"]}, "regex and choice were given together"),
        ({"regex": "a", "ignore_eos": True}, "ignore_eos goes with no regex"),
        ({"bad_words": [""]}, "bad_words"),
        ({"bad_words": [[]]}, "bad_words"),
        ({"logit_bias": {"-1": 1.0}}, "logit_bias"),
        ({"logit_bias": {"1": 101.0}}, "logit_bias"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"repetition_penalty": 1e39}, "repetition_penalty"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty"),
        ({"logprobs": 21}, "logprobs"),
        ({"json_schema": "{"}, "json_schema: not valid JSON"),
        ({"choice": []}, "choice"),
        ({"n": 0}, "n: "),
    ],
)
def test_fields_out_of_range_are_named(fields, message):
    with pytest.raises(ConfigError, match=message):
        SamplingParams.from_dict(fields, "request")


def test_texts_become_tokens_at_a_line_start_and_after_a_blank(target):
    params = SamplingParams.from_dict({"bad_words": "hi", "json_schema": '{"type": "object"}'}, "request")
    assert params.json_schema == {"type": "object"}
    edits = make_edits(params, [1], (), target, Grammars(target))
    assert edits is not None
    blank, h, i = target.tokenizer(" hi")["input_ids"]
    assert edits.rows([h], []).banned[1].tolist() == [i]
    assert edits.rows([h, blank, h], []).banned[1].tolist() == [i, i]
    assert edits.rows([h, blank, h, h, 5], []).banned[1].tolist() == []
