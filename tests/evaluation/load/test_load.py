"""Loads on servers that are not ours: what is asked and when, what is measured, what is kept, what is refused."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from dspark.errors import ConfigError, DsparkError
from dspark.evaluation.load.client import read_counters
from dspark.evaluation.load.config import Load, LoadOptions, Mode, RequestOptions
from dspark.evaluation.load.figures import LoadFigures, Spread, figures, pareto, user_speed
from dspark.evaluation.load.report import latency_table, run
from dspark.evaluation.load.rows import Asked, LoadRow
from dspark.evaluation.load.runner import measure
from dspark.evaluation.load.schedule import body, plan, sized
from dspark.evaluation.tasks import Task, load_tasks

from .stream_server import FIRST, GAP, StreamServer, metrics, serve


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"turns": [f"word {letter}", "later"]}) + "\n" for letter in "abcde"))
    return path


@pytest.fixture
def tasks(prompts: Path, tmp_path: Path) -> list[Task]:
    other = tmp_path / "few.jsonl"
    other.write_text(
        json.dumps({"messages": [{"role": "system", "content": "be short"}, {"role": "user", "content": "only"}]})
        + "\n"
    )
    return load_tasks((str(prompts), str(other)), None, 4)


@pytest.fixture
def server() -> Iterator[StreamServer]:
    with serve(StreamServer()) as running:
        yield running


@pytest.fixture
def make_options(prompts: Path, tmp_path: Path) -> Callable[..., LoadOptions]:
    """make_options(server, ask={...}, **changes)."""

    def make(server: StreamServer, ask: dict[str, object] | None = None, **changes: object) -> LoadOptions:
        asked = {"tasks": [str(prompts)], "max_tokens": 3} | (ask or {})
        base = {"url": server.url, "requests": 6, "concurrency": [2], "out": tmp_path / "out", "ask": asked}
        return LoadOptions.from_dict(base | changes, "test")

    return make


def test_modes_are_read_and_bad_ones_named() -> None:
    assert Mode.parse("static-3@http://localhost:1/v1") == ("static-3", "static", 3, "http://localhost:1/v1")
    assert Mode.parse("static-3").speculative == {"mode": "static", "max_draft": 3}
    assert Mode.parse("plain").speculative == {"mode": "off"}
    assert Mode.parse("server").speculative is None
    for bad in ("fast", "plain-3", "static-0", "static@localhost"):
        with pytest.raises(ConfigError, match=f"modes: '{bad}' is no mode"):
            LoadOptions.from_dict({"modes": [bad]}, "test")
    with pytest.raises(ConfigError, match="modes: 'plain' comes twice"):
        LoadOptions.from_dict({"modes": ["plain", "plain@http://h"]}, "test")
    with pytest.raises(ConfigError, match="min_tokens: 9 exceeds max_tokens 8"):
        RequestOptions.from_dict({"min_tokens": 9, "max_tokens": 8}, "test")


def test_requests_follow_from_the_seed(tasks: list[Task]) -> None:
    options = RequestOptions(min_tokens=10, max_tokens=20, seed=4)
    planned = plan(tasks, options, Load(None, 5.0), 400)
    assert planned == plan(tasks, options, Load(None, 5.0), 400)
    assert planned != plan(tasks, options.replace(seed=5), Load(None, 5.0), 400)
    assert [p.prompt.turns[0] for p in planned[:6]] == ["word a", "only", "word b", "word c", "word d", "word a"]
    lengths = {p.max_tokens for p in planned}
    assert (min(lengths), max(lengths)) == (10, 20)
    gaps = np.diff([p.arrival for p in planned])
    assert gaps.mean() == pytest.approx(0.2, rel=0.15)
    assert gaps.std() == pytest.approx(0.2, rel=0.2)  # exponential: as spread as long
    asked = body(planned[1], options.replace(ignore_eos=True), Mode.parse("static"), "m")
    assert [message["role"] for message in asked["messages"]] == ["system", "user"]
    assert asked["ignore_eos"] is True
    assert asked["speculative"] == {"mode": "static"}
    assert not {"ignore_eos", "speculative"} & body(planned[1], options, Mode.parse("server"), "m").keys()


def test_prompts_take_the_length_asked_for() -> None:
    assert sized("a b c", None) == "a b c"
    assert sized("a b c", 5) == "a b c a b"
    assert sized("a b c", 2) == "a b"


def test_a_closed_loop_keeps_its_concurrency(server: StreamServer, make_options: Callable[..., LoadOptions]) -> None:
    (row,) = measure(make_options(server, concurrency=[3], requests=2))
    assert server.most_at_once == 3
    assert len(row.requests) == len(server.measured) == 12  # four for each at a time
    told = figures(row)
    assert (told.failed, told.answer_tokens) == (0, 6)  # by the server's count
    assert 2 < told.active <= 3.001
    assert told.first_token.p50 is not None
    assert told.first_token.p50 >= FIRST
    assert told.between_pieces.p50 is not None
    assert told.between_pieces.p50 == pytest.approx(GAP, rel=0.9)
    assert told.tokens_per_second == pytest.approx(6 * told.requests_per_second)
    assert (told.accepted_length, told.verify_budget) == (None, None)


def test_an_open_loop_sends_when_requests_are_due(
    server: StreamServer, make_options: Callable[..., LoadOptions]
) -> None:
    options = make_options(server, concurrency=[], arrivals=[60.0], requests=24)
    (row,) = measure(options)
    assert server.most_at_once > 1  # whoever is due is sent, whether or not others are done
    told = figures(row)
    assert all(asked.sent >= asked.arrived for asked in row.requests)
    assert told.sent_late.p50 is not None
    assert told.sent_late.p50 < 0.5
    assert (told.load, told.arrivals, told.concurrency) == ("60/s", 60.0, None)


def test_tokens_are_pieces_where_the_server_does_not_count(make_options: Callable[..., LoadOptions]) -> None:
    with serve(StreamServer(counts_usage=False)) as server:
        (row,) = measure(make_options(server))
    assert {asked.num_tokens for asked in row.requests} == {3}


def test_counters_of_other_servers_tell_the_accepted_length(make_options: Callable[..., LoadOptions]) -> None:
    assert read_counters(metrics(4)) == {"rounds": 4, "drafted": 20, "accepted": 12}
    assert read_counters("up 1") is None
    with serve(StreamServer(metrics=True)) as server:
        (row,) = measure(make_options(server))
    told = figures(row)
    assert (told.accepted_length, told.verify_budget) == (4, 5)


def test_failures_are_counted_and_told(
    make_options: Callable[..., LoadOptions], caplog: pytest.LogCaptureFixture
) -> None:
    def fault(body: dict[str, object]) -> str | None:
        text = str(body["messages"])
        return None if body["max_tokens"] == 4 else "429" if "word a" in text else "break" if "word b" in text else None

    with serve(StreamServer(fault=fault)) as server:
        (row,) = measure(make_options(server, requests=10))
    told = figures(row)
    assert (told.failed, told.refused, told.requests) == (4, 2, 10)
    errors = [asked.error for asked in row.requests if asked.error]
    assert any("HTTP 429: fault 429" in error for error in errors)
    assert any("out of memory" in error for error in errors)
    assert "4 requests failed" in caplog.text


def test_what_the_server_refuses_is_said_before_measuring(
    make_options: Callable[..., LoadOptions], monkeypatch: pytest.MonkeyPatch
) -> None:
    with serve(StreamServer(fault=lambda body: "400" if "speculative" in body else None)) as server:
        with pytest.raises(ConfigError, match="modes: adaptive: .*HTTP 400: fault 400"):
            measure(make_options(server, modes=["server", "adaptive"]))
        assert not server.measured
        gone = server.url
    with pytest.raises(ConfigError, match=r"url: .* does not answer .*: start it"):
        measure(make_options(StreamServer(url=gone)))
    with pytest.raises(ConfigError, match="url: ftp://x: give http://HOST:PORT"):
        measure(make_options(StreamServer(url="ftp://x")))
    with serve(StreamServer(api_key="right")) as server:
        with pytest.raises(ConfigError, match="HTTP 401.*api_key_env names"):
            measure(make_options(server))
        with pytest.raises(ConfigError, match="api_key_env: the environment variable NO_KEY is not set"):
            measure(make_options(server, api_key_env="NO_KEY"))
        monkeypatch.setenv("SOME_KEY", "right")
        measure(make_options(server, api_key_env="SOME_KEY"))
        assert "Bearer right" in server.keys


def test_a_load_without_any_answer_is_an_error(make_options: Callable[..., LoadOptions]) -> None:
    with (
        serve(StreamServer(fault=lambda body: None if body["max_tokens"] == 4 else "500")) as server,
        pytest.raises(DsparkError, match="no request was answered: .*HTTP 500"),
    ):
        measure(make_options(server))


def test_a_run_goes_on_where_it_stopped(server: StreamServer, make_options: Callable[..., LoadOptions]) -> None:
    first = measure(make_options(server))
    asked = len(server.bodies)
    assert [row.id for row in first] == ["server/2"]
    assert measure(make_options(server)) == first
    assert len(server.bodies) == asked
    more = measure(make_options(server, concurrency=[2, 1], label="other", modes=["server", "plain"]))
    assert [row.id for row in more] == [
        "server/2",
        *(f"other {mode}/{size}" for size in (2, 1) for mode in ("server", "plain")),
    ]
    with pytest.raises(ConfigError, match="ask: .* was begun with other values"):
        measure(make_options(server, ask={"max_tokens": 5}))


def test_the_command_writes_and_prints(
    server: StreamServer, make_options: Callable[..., LoadOptions], capsys: pytest.CaptureFixture[str]
) -> None:
    options = make_options(server, arrivals=[50.0], modes=["server", "plain"], report={"json_output": True})
    run(options)
    told = json.loads(capsys.readouterr().out)
    assert told == json.loads((options.out / "load.json").read_text())
    assert [(p["series"], p["load"]) for p in told["points"]] == [
        ("server", "2"),
        ("plain", "2"),
        ("server", "50/s"),
        ("plain", "50/s"),
    ]
    assert set(told["pareto"]) <= {"server/2", "plain/2", "server/50/s", "plain/50/s"}
    assert (options.out / "load.html").read_text().count("<svg") == 2
    for name in ("pareto.png", "latency.png"):
        assert (options.out / name).read_bytes().startswith(b"\x89PNG")
    table = latency_table([figures(row) for row in measure(options)])
    assert [row[0].text for row in table.rows] == ["server", "plain"] * 2
    assert table.rows[0][2].text.count("/") == 2


def made(series: str, load: str, total: float, user: float) -> LoadFigures:
    spread = Spread(user, user, user, user)
    return LoadFigures(series, load, 1, None, 1, 0, 0, 1.0, total, 1.0, *[spread] * 5, 1.0, None, None)


def test_the_front_holds_what_nothing_beats() -> None:
    points = [
        made("a", "1", 10, 10),
        made("a", "2", 30, 6),
        made("b", "1", 9, 9),
        made("b", "2", 30, 5),
        made("b", "4", 40, 5),
    ]
    assert [(p.series, p.load) for p in pareto(points)] == [("a", "1"), ("a", "2"), ("b", "4")]


def test_figures_of_known_times() -> None:
    told = {"rounds": 4, "drafted": 12, "accepted_length": 2.5}
    requests = (
        Asked(0, "p", 0.0, 0.5, 3.0, (1.0, 2.0, 3.0), 11, 5, "stop", told),
        Asked(1, "p", 1.0, 1.0, 2.0, (2.0,), 1, 5, "stop", told | {"rounds": 0, "drafted": 0, "accepted_length": None}),
        Asked(2, "p", 1.0, 1.0, 5.0, error="gone"),
    )
    found = figures(LoadRow("m", "3/s", None, 3.0, "u", "m", requests))
    assert user_speed(requests[0]) == 5
    assert user_speed(requests[1]) is None
    assert found.tokens_per_second == pytest.approx(12 / 4.5)
    assert found.active == pytest.approx((2.5 + 1 + 4) / 4.5)
    assert found.first_token.mean == 1  # the wait before it was sent is counted
    assert found.between_pieces.p50 == 1
    assert (found.accepted_length, found.verify_budget) == (2.5, 3)
    row = LoadRow("m", "3/s", None, 3.0, "u", "m", requests)
    assert LoadRow.from_dict(json.loads(json.dumps(row.as_dict())), "test") == row
