"""Answers that follow a grammar, under speculation: they parse, end, and hold nobody else up."""

import json
import random
import re
import sys

import pytest
import torch

from dspark.drafters.dspark import BlockDrafter
from dspark.engine.config import EngineSettings
from dspark.engine.engine import Engine
from dspark.engine.request import SamplingParams
from dspark.errors import RequestError
from dspark.spec.types import DraftBlock

from .conftest import drafter_for

PROMPT = [5, 6, 7]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z]{1,6}$"},
        "size": {"type": "integer", "minimum": 0, "maximum": 999},
        "kind": {"enum": ["red", "green", "blue"]},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["name", "size", "kind", "tags"],
    "additionalProperties": False,
}
LIKELY = '{"name": "abc", "size": 12, "kind": "red", "tags": [true]}'
SETTINGS = EngineSettings(max_batch=8, max_length=96)


class Template(BlockDrafter):
    """Drafts what a likely answer has at the same place, for sure; its law says so, and sampling stays exact."""

    likely: list[int]

    def propose(self, anchors, batch, cache, rows, seq_lens, num_drafts) -> DraftBlock:
        block = super().propose(anchors, batch, cache, rows, seq_lens, num_drafts)
        at = seq_lens[:, None] + 1 - len(PROMPT) + torch.arange(num_drafts)
        tokens = torch.tensor(self.likely)[at % len(self.likely)]
        return block._replace(tokens=tokens, probs=torch.nn.functional.one_hot(tokens, self.config.vocab_size).float())


@pytest.fixture(scope="module")
def engine(target) -> Engine:
    drafter = drafter_for(target.decoder, Template)
    drafter.likely = target.tokenizer(LIKELY)["input_ids"]
    return Engine(target, drafter, SETTINGS)


def check(value: dict) -> None:
    """What the schema says, the long way."""
    assert set(value) == {"name", "size", "kind", "tags"}
    assert re.fullmatch("[a-z]{1,6}", value["name"])
    assert isinstance(value["size"], int)
    assert 0 <= value["size"] <= 999
    assert value["kind"] in ("red", "green", "blue")
    assert len(value["tags"]) <= 3
    assert all(isinstance(tag, bool) for tag in value["tags"])


@pytest.mark.parametrize("blanks", [False, True])
def test_json_always_parses_at_temperature_1(engine, target, blanks):
    schema = SCHEMA if blanks else SCHEMA | {"x-guidance": {"whitespace_flexible": False}}
    params = SamplingParams(max_tokens=90, temperature=1.0, json_schema=schema)
    if blanks:  # a random model likes them too much to get anywhere
        params = params.replace(logit_bias=dict.fromkeys(target.tokenizer(" \t\n\r")["input_ids"], -7.0))
    done = engine.generate([PROMPT] * 12, [params.replace(seed=seed) for seed in range(12)])
    engine.check_integrity()
    finished = [c for c in done if c.finish_reason == "stop"]
    assert len(finished) > 9
    for completion in finished:
        check(json.loads(completion.text))
    assert all(c.finish_reason == "length" for c in done if c not in finished)
    assert sum(c.origins.count("accepted") for c in done) > 50, "too few drafts inside the grammar"


@pytest.mark.parametrize(
    ("fields", "full"),
    [
        ({"regex": "[ab]{2,4}-[0-9]{3}"}, "[ab]{2,4}-[0-9]{3}"),
        ({"choice": ["yes", "no", 'may"be\n(é)']}, re.escape("yes") + "|no|" + re.escape('may"be\n(é)')),
        ({"grammar": 'start: "<" WORD ("," WORD)~0..3 ">"\nWORD: /[a-c]{1,2}/'}, "<[a-c]{1,2}(,[a-c]{1,2}){0,3}>"),
        ({"grammar": 'root ::= "<" word ("," word)? ">"\nword ::= [a-c] [a-c]'}, "<[a-c]{2}(,[a-c]{2})?>"),
        ({"json_schema": {"type": "boolean"}}, "true|false"),
    ],
)
def test_every_kind_of_grammar(engine, fields, full):
    params = SamplingParams.from_dict({"max_tokens": 40, "temperature": 1.0, **fields}, "request")
    done = engine.generate([PROMPT] * 12, [params.replace(seed=seed) for seed in range(12)])
    for completion in done:
        assert completion.finish_reason == "stop"
        assert completion.token_ids[-1] in engine.eos_token_ids, "the end token ends a grammar"
        assert re.fullmatch(full, completion.text), completion.text
    assert len({c.text for c in done}) > 1


def test_a_grammar_that_can_not_go_on_ends_its_request_alone(engine):
    """min_tokens forbids the end where the grammar allows nothing else."""
    stuck = SamplingParams(max_tokens=30, min_tokens=6, temperature=1.0, seed=1, choice=["abc", "bca"])
    free = SamplingParams(max_tokens=12, temperature=1.0, seed=2, ignore_eos=True)
    alone = engine.generate([PROMPT], free)[0]
    done = engine.generate([PROMPT] * 3, [free, stuck, free])
    assert [c.finish_reason for c in done] == ["length", "error", "length"]
    assert done[1].text in ("abc", "bca")
    assert done[0].token_ids == done[2].token_ids == alone.token_ids
    engine.check_integrity()


def test_a_stop_string_and_max_tokens_end_a_grammar_early(engine):
    params = SamplingParams(max_tokens=40, temperature=1.0, seed=3, json_schema=SCHEMA, stop='"name":')
    (done,) = engine.generate([PROMPT], params)
    assert (done.text.strip(), done.finish_reason) == ("{", "stop")
    (done,) = engine.generate([PROMPT], params.replace(stop=(), max_tokens=3))
    assert (len(done.token_ids), done.finish_reason) == (3, "length")


def test_preemption_keeps_the_state(target):
    """A pool that is too small for all: requests give their blocks back mid-grammar and go on later."""
    params = [
        SamplingParams(max_tokens=40, temperature=1.0, seed=i, regex="([a-c]{3}-){4,8}", frequency_penalty=0.3)
        for i in range(6)
    ]
    ample = Engine(target, None, SETTINGS).generate([PROMPT] * 6, params)
    tight = Engine(target, None, EngineSettings(max_batch=6, max_length=60, block_size=4, num_blocks=26))
    done = tight.generate([PROMPT] * 6, params)
    assert tight.stats.prompt_tokens > 6 * len(PROMPT), "nobody was preempted"
    assert [c.token_ids for c in done] == [c.token_ids for c in ample]


def test_compiled_grammars_are_kept_for_the_next_request(engine):
    grammars = engine._grammars
    shuffled = random.Random(0)
    for _ in range(60):
        engine.abort(engine.submit(PROMPT, SamplingParams(regex=f"a{{{shuffled.randint(1, 50)}}}")))
    assert 10 < len(grammars._compiled) <= 32
    newest = list(grammars._compiled)[-1]
    before = grammars._compiled[newest]
    engine.abort(engine.submit(PROMPT, SamplingParams(regex=json.loads(newest)[1])))
    assert grammars._compiled[newest] is before


def test_without_llguidance_grammars_are_refused_with_the_remedy(target, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    engine = Engine(target, None, SETTINGS)
    with pytest.raises(RequestError, match=r"regex: .*pip install llguidance"):
        engine.submit(PROMPT, SamplingParams(regex="a"))
    assert engine.generate([PROMPT], SamplingParams(max_tokens=2))[0].token_ids
