"""A seeded request answers the same alone and in any company."""

import pytest

from dspark.engine.config import EngineSettings
from dspark.engine.engine import Engine
from dspark.engine.request import SamplingParams

REQUESTS = [
    ([5, 9, 120, 33], SamplingParams(max_tokens=20, temperature=1.0, seed=1)),
    ([8, 8, 8], SamplingParams(max_tokens=9, temperature=0.7, top_k=20, seed=2)),
    ([1], SamplingParams(max_tokens=2, temperature=1.0, seed=-(2**70))),
    (list(range(1, 30)), SamplingParams(max_tokens=25, temperature=1.3, top_p=0.8, seed=3)),
    (list(range(40, 59)), SamplingParams(max_tokens=7, temperature=1.0, min_p=0.1, seed=4)),
    ([77, 3], SamplingParams(max_tokens=12)),
    ([200, 100, 50], SamplingParams(max_tokens=16, temperature=1.0, seed=1, stop_token_ids=tuple(range(20, 40)))),
    ([4, 5, 6, 7], SamplingParams(max_tokens=11, temperature=1.0, seed=6, speculate=False)),
]


@pytest.fixture(scope="module")
def smooth(make_model, make_drafter):
    """A target of small weights, whose laws a drafter often meets."""
    target, _ = make_model("qwen3", initializer_range=0.05)
    return target, make_drafter(target.decoder, markov_rank=0, algorithm="dflash")


def test_alone_and_among_seven_others(smooth):
    prompts, params = (list(column) for column in zip(*REQUESTS, strict=True))
    together = Engine(*smooth, EngineSettings(max_batch=8)).generate(prompts, params)
    backwards = Engine(*smooth, EngineSettings(max_batch=8)).generate(prompts[::-1], params[::-1])[::-1]
    narrow = Engine(*smooth, EngineSettings(max_batch=3, block_size=4)).generate(prompts, params)
    for i, (prompt, param) in enumerate(REQUESTS):
        alone = Engine(*smooth, EngineSettings(max_batch=1)).generate([prompt], param)[0]
        assert alone.token_ids == together[i].token_ids == backwards[i].token_ids == narrow[i].token_ids
        assert alone.origins == together[i].origins
    assert sum(sum(c.accepted_by_position) for c in together) > 5, "the drafts were accepted too rarely to tell"
    assert together[7].rounds == 0


def test_without_a_seed_answers_differ(smooth):
    params = SamplingParams(max_tokens=20, temperature=1.0, ignore_eos=True)
    done = Engine(*smooth).generate([[5, 9]] * 6, params)
    assert len({tuple(c.token_ids) for c in done}) == 6
