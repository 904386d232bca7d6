"""`dspark load` on our own server, over a tiny model."""

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from dspark.errors import ConfigError
from dspark.evaluation.load.config import LoadOptions
from dspark.evaluation.load.figures import figures
from dspark.evaluation.load.runner import measure

from .conftest import Served


@pytest.fixture
def make_options(tmp_path: Path) -> Callable[..., LoadOptions]:
    """make_options(server, **changes) -> a small load."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"turns": [f"tell {letter}"]}) + "\n" for letter in "abcd"))

    def make(served: Served, **changes: object) -> LoadOptions:
        ask = {"tasks": [str(prompts)], "max_tokens": 12, "min_tokens": 6, "ignore_eos": True}
        base = {"url": served.base, "requests": 4, "out": tmp_path / "load", "ask": ask, "concurrency": [2]}
        return LoadOptions.from_dict(base | changes, "test")

    return make


def test_modes_are_served_and_told_apart(served: Served, make_options: Callable[..., LoadOptions]) -> None:
    before = served.engine.stats.rounds
    plain, static = measure(make_options(served, modes=["plain", "static"]))
    assert plain.model == static.model == "tiny"
    for row in (plain, static):
        assert all(asked.error is None for asked in row.requests)
        assert {asked.finish_reason for asked in row.requests} == {"length"}
        assert all(6 <= asked.num_tokens <= 12 for asked in row.requests)
        assert all(len(asked.pieces) > 0 for asked in row.requests)
    lengths = [[asked.num_tokens for asked in row.requests] for row in (plain, static)]
    assert lengths[0] == lengths[1]  # the same requests
    told = figures(static)
    assert told.accepted_length is not None
    assert told.accepted_length >= 1
    assert told.verify_budget is not None
    assert 0 < told.verify_budget <= 4
    assert (figures(plain).accepted_length, figures(plain).verify_budget) == (None, None)
    # Its counters, which anyone's requests move, agree where nobody else asks.
    assert static.counters is not None
    assert static.counters["rounds"] == sum(
        asked.speculative["rounds"] for asked in static.requests if asked.speculative
    )
    assert served.engine.stats.rounds > before


def test_drafts_are_bounded_by_the_mode(served: Served, make_options: Callable[..., LoadOptions]) -> None:
    (row,) = measure(make_options(served, modes=["static-2"]))
    told = figures(row)
    assert told.verify_budget is not None
    assert 0 < told.verify_budget <= 2


def test_a_mode_that_the_server_does_not_plan_is_asked_of_another(
    served: Served,
    make_served: Callable[..., AbstractContextManager[Served]],
    make_options: Callable[..., LoadOptions],
    tmp_path: Path,
) -> None:
    with pytest.raises(ConfigError, match=r"modes: adaptive: .*HTTP 400.*mode"):
        measure(make_options(served, modes=["adaptive"]))
    costs = tmp_path / "costs.json"
    costs.write_text(json.dumps({"sample_batch_tokens": [1], "sample_steps_per_sec": [1.0], "max_batch_tokens": 64}))
    with make_served(engine={"planner": "lagged", "costs": str(costs)}) as planned:
        rows = measure(make_options(served, modes=["static", f"adaptive@{planned.base}"]))
    assert [row.series for row in rows] == ["static", "adaptive"]
    assert rows[0].url != rows[1].url
    assert all(asked.error is None for row in rows for asked in row.requests)


def test_refused_requests_are_counted(
    make_served: Callable[..., AbstractContextManager[Served]], make_options: Callable[..., LoadOptions]
) -> None:
    with make_served(engine={"max_batch": 1}, limits={"max_waiting": 0}) as served:
        (row,) = measure(make_options(served, concurrency=[], arrivals=[200.0], requests=8))
    told = figures(row)
    assert 0 < told.failed == told.refused < 8
    assert "429" in next(asked.error for asked in row.requests if asked.error)
