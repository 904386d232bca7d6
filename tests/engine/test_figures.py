"""What is measured: by request, and by engine."""

import pytest

from dspark.engine.config import EngineSettings
from dspark.engine.engine import Engine
from dspark.engine.request import SamplingParams

PROMPTS = [[(11 * i * n) % 250 + 1 for i in range(n)] for n in (3, 9, 14, 22, 6)]
ENDLESS = SamplingParams(max_tokens=20, ignore_eos=True)


@pytest.fixture(scope="module")
def served(target, make_scripted):
    """An engine of two places that has answered five prompts, the last one without speculation; and the answers."""
    plain = Engine(target).generate(PROMPTS, ENDLESS)
    drafter = make_scripted(target.decoder, {tuple(c.prompt_ids): c.token_ids for c in plain}, wrong_every=4)
    engine = Engine(target, drafter, EngineSettings(max_batch=2, record_rounds=True))
    return engine, engine.generate(PROMPTS, [ENDLESS] * 4 + [ENDLESS.replace(speculate=False)])


def test_rounds_add_up(served):
    for completion in served[1][:4]:
        figures, records = completion.figures, completion.round_records
        assert figures.rounds == len(records) == sum(figures.committed_lens) == sum(figures.verify_lens)
        assert figures.committed == sum(n * count for n, count in enumerate(figures.committed_lens)) == 19
        assert figures.drafted == sum((n - 1) * count for n, count in enumerate(figures.verify_lens))
        assert figures.proposed == sum(r.num_drafts for r in records) == 4 * sum(r.verify_len > 1 for r in records)
        assert figures.accepted == completion.origins.count("accepted") == sum(figures.accepted_by_position) > 0
        assert figures.verify_lens[5] == sum(r.is_full_width for r in records)
        assert completion.tau == figures.accepted_length == 19 / figures.rounds
    assert served[1][4].figures.rounds == 0
    assert served[1][4].tau is None


def test_times_are_in_order(served):
    for completion in served[1]:
        figures = completion.figures
        assert 0 < figures.queue_seconds < figures.first_token_seconds < figures.total_seconds
    first, *_, last = (completion.figures for completion in served[1])
    assert last.queue_seconds > first.first_token_seconds, "the last one waited for a place"


def test_the_engine_counts_what_its_requests_count(served):
    engine, completions = served
    stats, each = engine.stats, [completion.figures for completion in completions]
    for name in ("rounds", "committed", "proposed", "drafted", "accepted", "preemptions", "cached_tokens"):
        assert getattr(stats, name) == sum(getattr(figures, name) for figures in each), name
    for name in ("committed_lens", "verify_lens", "accepted_by_position"):
        columns = [getattr(figures, name) for figures in each]
        total = [sum(c[i] for c in columns if i < len(c)) for i in range(max(map(len, columns)))]
        assert getattr(stats, name) == total, name
    assert stats.output_tokens == 100
    assert stats.prompt_tokens == sum(map(len, PROMPTS))
    assert (engine.load.running, engine.load.waiting) == (0, 0)


def test_an_aborted_request_has_what_it_came_to(target):
    engine = Engine(target, None, EngineSettings(max_batch=1))
    engine.submit([1, 2], ENDLESS, "runs")
    engine.submit([1, 2], ENDLESS, "waits")
    engine.step()
    runs, waits = engine.abort("runs").figures, engine.abort("waits").figures
    assert runs.first_token_seconds <= runs.total_seconds
    assert waits.queue_seconds is waits.first_token_seconds is None
    assert waits.total_seconds > 0
