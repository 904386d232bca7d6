"""Where answers end: inside an accepted run, across rounds, at max_tokens, at the length limit."""

import pytest

from dspark.engine.config import EngineSettings
from dspark.engine.engine import Engine
from dspark.engine.request import Completion, SamplingParams
from dspark.errors import ConfigError

PROMPT = [66, 20, 35, 80, 41]
FREE = SamplingParams(max_tokens=40, ignore_eos=True)


@pytest.fixture(scope="module")
def answer(target) -> list[int]:
    return Engine(target).generate([PROMPT], FREE)[0].token_ids


@pytest.fixture(params=["plain", "all accepted", "some accepted"])
def engine(request, target, answer, make_scripted) -> Engine:
    """An engine whose drafter knows the answer: stops fall inside accepted runs."""
    drafter = None
    if request.param != "plain":
        wrong_every = 3 if request.param == "some accepted" else 0
        drafter = make_scripted(target.decoder, {tuple(PROMPT): answer}, wrong_every)
    return Engine(target, drafter, EngineSettings(max_batch=2, max_length=90))


def run(engine: Engine, params: SamplingParams, prompt: list[int] = PROMPT) -> Completion:
    """Answer one prompt step by step, checking what streams out against what is returned."""
    engine.submit(prompt, params, "r")
    outputs = []
    while engine.has_work():
        outputs += engine.step()
        engine.check_integrity()
    completion = outputs[-1].completion
    assert completion is not None
    assert sum(out.finished for out in outputs) == 1
    assert [t for out in outputs for t in out.token_ids] == completion.token_ids
    assert [o for out in outputs for o in out.origins] == completion.origins
    assert "".join(out.text_delta for out in outputs) == completion.text
    assert engine._scheduler.allocator.num_free == engine._scheduler.allocator.num_blocks - 1
    if completion.rounds:
        spoken = len(completion.token_ids) - 1
        assert completion.tau == spoken / completion.rounds
        assert sum(completion.accepted_by_position) == completion.origins.count("accepted") <= completion.drafted
    return completion


def test_stop_token(engine, answer):
    for at in range(12):
        expected = answer[: answer.index(answer[at]) + 1]
        done = run(engine, FREE.replace(stop_token_ids=(answer[at], 999)))
        assert (done.token_ids, done.finish_reason) == (expected, "stop")


def test_the_models_own_end_is_a_stop_token_unless_ignored(engine, target, answer, monkeypatch):
    monkeypatch.setattr(engine, "eos_token_ids", (answer[7], 999))
    stopped = run(engine, SamplingParams(max_tokens=40))
    assert stopped.token_ids == answer[: answer.index(answer[7]) + 1]
    assert stopped.finish_reason == "stop"
    assert run(engine, FREE).token_ids == answer


@pytest.mark.parametrize("length", [1, 3, 6])
def test_stop_string(engine, target, answer, length):
    for at in range(1, 14, 3):
        stop = target.tokenizer.decode(answer[at : at + length])
        if "\ufffd" in stop or not stop:
            continue
        whole = target.tokenizer.decode(answer)
        cut = whole.index(stop)
        done = run(engine, FREE.replace(stop=("never", stop)))
        assert (done.text, done.finish_reason) == (whole[:cut], "stop")
        assert stop in target.tokenizer.decode(done.token_ids)
        assert stop not in target.tokenizer.decode(done.token_ids[:-1])
        assert done.token_ids == answer[: len(done.token_ids)]


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 4, 5, 17])
def test_max_tokens(engine, answer, max_tokens):
    done = run(engine, FREE.replace(max_tokens=max_tokens))
    assert (done.token_ids, done.finish_reason) == (answer[:max_tokens], "length")


@pytest.mark.parametrize("room", [1, 2, 3, 4, 7])
def test_length_limit(engine, target, room):
    prompt = [(5 * i) % 250 + 1 for i in range(engine.limit - room)]
    done = run(engine, FREE, prompt)
    assert len(done.token_ids) == room
    assert done.finish_reason == "length"
    assert done.token_ids == Engine(target).generate([prompt], FREE.replace(max_tokens=room))[0].token_ids


def test_the_models_own_limit_holds_too(target, make_drafter):
    engine = Engine(target, make_drafter(target.decoder), EngineSettings(max_batch=1, max_length=10_000))
    assert engine.limit == target.config.max_position_embeddings
    done = run(engine, FREE.replace(max_tokens=1000), [5] * (engine.limit - 6))
    assert len(done.token_ids) == 6
    assert done.finish_reason == "length"


@pytest.mark.parametrize(
    ("field", "value"),
    [("temperature", -1), ("top_p", 0), ("top_k", -1), ("min_p", 2), ("max_tokens", 0), ("stop", [""]), ("n", 0)],
)
def test_parameters_out_of_range_name_the_field(field, value):
    with pytest.raises(ConfigError, match=field):
        SamplingParams.from_dict({field: value}, "request")


def test_one_stop_string_may_come_alone():
    assert SamplingParams.from_dict({"stop": "end"}, "request").stop == ("end",)
