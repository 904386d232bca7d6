"""Regeneration through real HTTP servers that fail in every way: no row is lost, doubled or wrong."""

import hashlib
import json
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from itertools import cycle
from pathlib import Path
from threading import Lock
from typing import Any

import pytest

from dspark.data.chat import ChatTemplate
from dspark.data.conversation import Message
from dspark.engine.engine import Engine
from dspark.engine.request import SamplingParams
from dspark.errors import ConfigError, DsparkError
from dspark.generation import regenerate as local
from dspark.generation.answering import RegenerationReport
from dspark.generation.client import backoff
from dspark.generation.config import RegenerateSettings, RemoteSettings
from dspark.generation.remote import regenerate

from .chat_server import Body, ChatServer, serve, words

FAST = {"timeout": 0.35, "backoff": 0.01, "max_backoff": 0.05, "concurrency": 4}


@pytest.fixture(autouse=True)
def prompts(tmp_path: Path) -> list[dict[str, Any]]:
    """Thirty prompts of one turn, ten of two and a system message."""
    rows: list[dict[str, Any]] = [{"id": f"one:{i}", "turns": [f"{'abcdefghij'[i % 10]} {i}"]} for i in range(30)]
    for i in range(10):
        turns = [{"role": "user", "content": f"{i} ab"}, {"role": "user", "content": "more"}]
        rows.append({"id": f"two:{i}", "messages": [{"role": "system", "content": "Be brief."}, *turns]})
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return rows


def settings(
    path: Path, *servers: ChatServer, remote: dict[str, Any] | None = None, **changes: Any
) -> RegenerateSettings:
    base = {
        "prompts": [path / "prompts.jsonl"],
        "out": path / "answers.jsonl",
        "endpoints": [server.url for server in servers],
        "remote": FAST | (remote or {}),
        "temperatures": {"0": 0.5, "1": 0.5},
        "max_tokens": 6,
        "seed": 5,
    }
    return RegenerateSettings.from_dict(base | changes, "test")


def rows(path: Path) -> dict[str, dict[str, Any]]:
    """The rows by id; each id once, each row the server's own answers."""
    lines = [json.loads(line) for line in (path / "answers.jsonl").read_text().splitlines()]
    found = {row["id"]: row for row in lines}
    assert len(found) == len(lines)
    return found


def errors(path: Path) -> dict[str, str]:
    file = path / "answers.errors.jsonl"
    return {row["id"]: row["error"] for row in map(json.loads, file.read_text().splitlines())} if file.exists() else {}


def check_answers(found: dict[str, dict[str, Any]], servers: list[ChatServer]) -> None:
    """Each answer in the rows is what the server says to the messages before it, with the seed that was sent."""
    seeds = {json.dumps(body["messages"]): body for server in servers for body in server.conversations()}
    for row in found.values():
        for index, message in enumerate(row["messages"]):
            if message["role"] == "assistant":
                body = seeds[json.dumps(row["messages"][:index])]
                assert body["temperature"] == row["temperature"]
                text, finished = words(body)
                assert message["content"] == text
                assert finished == (row["finished"] or index + 1 < len(row["messages"]))


def test_every_prompt_is_answered_once(tmp_path: Path) -> None:
    with serve(ChatServer(delay=0.005)) as one, serve(ChatServer(delay=0.005)) as other:
        report = regenerate(settings(tmp_path, one, other))
        found = rows(tmp_path)
        num_tokens = sum(
            len(m["content"].split()) for r in found.values() for m in r["messages"] if m["role"] == "assistant"
        )
        assert report == RegenerationReport(total=40, written=40, num_tokens=num_tokens, refused=0)
        assert not errors(tmp_path)
        check_answers(found, [one, other])
        for server in (one, other):
            assert len(server.conversations()) >= 10, "both work"
            assert 2 <= server.most_at_once <= 4
    assert {row["finished"] for row in found.values()} == {True, False}
    two = next(row for row in found.values() if len(row["messages"]) == 5)
    assert [m["role"] for m in two["messages"]] == ["system", "user", "assistant", "user", "assistant"]
    for body in one.conversations():
        assert body.keys() == {"model", "messages", "max_tokens", "temperature", "top_p", "top_k", "seed"}
        assert (body["model"], body["max_tokens"], body["top_p"], body["top_k"]) == ("tiny", 6, 1.0, -1)
        assert 0 <= body["seed"] < 2**31


def test_rows_are_those_of_the_local_engine(make_engine: Callable[[], Engine], tmp_path: Path) -> None:
    engine, lock = make_engine(), Lock()
    chat = ChatTemplate(engine.target.tokenizer)

    def answer(body: Body) -> tuple[str, bool]:
        ids = chat.prompt_ids([Message(**message) for message in body["messages"]])
        with lock:
            (completion,) = engine.generate([ids], SamplingParams(max_tokens=body["max_tokens"]))
        return completion.text, completion.finish_reason == "stop"

    greedy = {"temperatures": {"0": 1}, "suffixes": {"prompts": ["", " abc"]}, "max_tokens": 12, "limit": 16}
    with serve(ChatServer(answer=answer)) as server:
        regenerate(settings(tmp_path, server, remote={"timeout": 60}, **greedy))
    local.regenerate(make_engine(), settings(tmp_path, out=tmp_path / "local" / "answers.jsonl", **greedy))
    assert rows(tmp_path) == rows(tmp_path / "local")


def test_passing_failures_are_repeated(tmp_path: Path) -> None:
    kinds = ("500", "429", "malformed", "no json", "surrogate", "drop", "hang", "503")
    turn = cycle(kinds)

    def fault(body: Body, attempt: int) -> str | None:
        """The first tries of half of the requests fail, some of them twice; each kind of fault has its turn."""
        number = int(hashlib.sha256(json.dumps(body).encode()).hexdigest(), 16)
        return next(turn) if attempt < number % 4 - 1 else None

    with serve(ChatServer(fault=fault)) as one, serve(ChatServer(fault=fault)) as other:
        report = regenerate(settings(tmp_path, one, other))
        check_answers(rows(tmp_path), [one, other])
        faults = one.faults + other.faults
    assert (report.total, report.written, report.refused) == (40, 40, 0)
    assert not errors(tmp_path)
    assert set(faults) == set(kinds)


def test_what_is_given_up_on_is_listed_and_tried_again(tmp_path: Path) -> None:
    def fault(body: Body, attempt: int) -> str | None:
        text = body["messages"][-1]["content"]
        return {"a": "500", "b": "400"}.get(text[0]) or ("500" if text == "more" else None)

    with serve(ChatServer(fault=fault)) as server:
        report = regenerate(settings(tmp_path, server, remote={"max_attempts": 3}, max_tokens=8))
        left = {f"one:{i}" for i in range(30) if i % 10 < 2} | {f"two:{i}" for i in range(10)}
        assert set(errors(tmp_path)) == left
        assert set(rows(tmp_path)).isdisjoint(left)
        assert (report.total, report.refused) == (40 - len(left), len(left))
        assert "HTTP 500: fault" in errors(tmp_path)["one:0"]
        tries = Counter(body["messages"][-1]["content"] for body in server.conversations())
        assert (tries["a 0"], tries["b 1"], tries["c 2"]) == (3, 1, 1)
        server.fault = lambda body, attempt: None
        again = regenerate(settings(tmp_path, server, max_tokens=8))
        assert (again.total, again.written, again.refused) == (40, len(left), 0)
        assert not errors(tmp_path)
        check_answers(rows(tmp_path), [server])


def test_a_refused_second_turn_leaves_the_first(tmp_path: Path) -> None:
    with serve(ChatServer(fault=lambda body, attempt: "400" if len(body["messages"]) > 2 else None)) as server:
        report = regenerate(settings(tmp_path, server))
    assert report.refused == 0
    assert {len(row["messages"]) for id, row in rows(tmp_path).items() if id.startswith("two")} == {3}


def test_an_endpoint_that_dies_loses_nothing(tmp_path: Path) -> None:
    with ExitStack() as stack:
        healthy = stack.enter_context(serve(ChatServer(delay=0.01)))
        dying = stack.enter_context(serve(ChatServer()))

        def fault(body: Body, attempt: int) -> str | None:
            return "drop" if len(dying.conversations()) > 5 else None

        dying.fault = fault
        report = regenerate(settings(tmp_path, healthy, dying, remote={"max_backoff": 1.0}))
    assert (report.total, report.refused) == (40, 0)
    assert not errors(tmp_path)
    check_answers(rows(tmp_path), [healthy, dying])
    assert dying.faults["drop"] < 40, "its slots rest"


def test_a_dead_endpoint_does_not_use_up_attempts(tmp_path: Path) -> None:
    """It is free at once, the healthy one busy: what failed on the one waits for the other."""
    with ExitStack() as stack:
        healthy = stack.enter_context(serve(ChatServer(delay=0.05)))
        dying = stack.enter_context(serve(ChatServer()))
        dying.fault = lambda body, attempt: "drop" if len(dying.conversations()) > 1 else None
        remote = {"max_attempts": 3, "backoff": 0.01, "max_backoff": 0.01, "concurrency": 1}
        report = regenerate(settings(tmp_path, healthy, dying, remote=remote))
    assert (report.total, report.refused) == (40, 0)


def test_a_run_without_any_success_stops(tmp_path: Path) -> None:
    def fault(body: Body, attempt: int) -> str | None:
        return None if body["messages"][0]["content"] == "Tell me a story." else "503"

    with serve(ChatServer(fault=fault)) as server:
        changes = {"max_attempts": 2, "max_failures": 5}
        with pytest.raises(DsparkError, match=r"5 prompts in a row had no answer \(the last: .*HTTP 503"):
            regenerate(settings(tmp_path, server, remote=changes))
        assert len(errors(tmp_path)) == 5
        server.fault = lambda body, attempt: None
        assert regenerate(settings(tmp_path, server)).total == 40


def test_endpoints_are_checked_before_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        dead = ChatServer(url=f"http://127.0.0.1:{free.getsockname()[1]}")
    remote = {"max_attempts": 2}
    with (
        serve(ChatServer()) as one,
        serve(ChatServer(models=("other", "tiny"))) as two,
        serve(ChatServer(models=())) as no,
    ):
        assert regenerate(settings(tmp_path, one, two)).total == 40
        assert {body["model"] for body in one.bodies + two.bodies} == {"tiny"}
        with pytest.raises(ConfigError, match=rf"endpoints: {dead.url}: Connect"):
            regenerate(settings(tmp_path, one, dead, remote=remote))
        with pytest.raises(ConfigError, match=r"no model in common .*remote\.model"):
            regenerate(settings(tmp_path, one, no))
        with pytest.raises(ConfigError, match="target: .*answers.jsonl was begun with other values"):
            regenerate(settings(tmp_path, one, remote={"model": "other"}))
        with pytest.raises(ConfigError, match="endpoints: .*HTTP 404"):
            regenerate(settings(tmp_path, ChatServer(url=f"{one.url}/v2")))
        one.api_key = "secret"
        with pytest.raises(ConfigError, match=r"HTTP 401: .*remote\.api_key_env"):
            regenerate(settings(tmp_path, one))
        with pytest.raises(ConfigError, match="environment variable TINY_KEY is not set"):
            regenerate(settings(tmp_path, one, remote={"api_key_env": "TINY_KEY"}))
        monkeypatch.setenv("TINY_KEY", "secret")
        assert regenerate(settings(tmp_path, one, remote={"api_key_env": "TINY_KEY"})).total == 40
    for bad in (["localhost:8000"], ["http://a", "http://a"]):
        with pytest.raises(ConfigError, match="endpoints"):
            settings(tmp_path, endpoints=bad)


def test_refused_fields_are_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with serve(ChatServer(refuses=frozenset({"top_k", "seed"}))) as server:
        with pytest.raises(ConfigError, match=rf"top_k: {server.url} refuses the field top_k"):
            regenerate(settings(tmp_path, server, top_k=20))
        assert regenerate(settings(tmp_path, server)).total == 40
        assert server.conversations()
        assert not any({"top_k", "seed"} & body.keys() for body in server.conversations())
    assert "refuses the field seed, which is left out: answers cannot be repeated" in caplog.text
    assert "refuses the field top_k, which is left out: its own default holds" in caplog.text
    for field, changes, message in (
        (
            "chat_template_kwargs",
            {"template_variables": {"a": 1}},
            "template_variables: .* refuses the field chat_template",
        ),
        ("temperature", {}, "endpoints: .*unknown field temperature"),
    ):
        with serve(ChatServer(refuses=frozenset({field}))) as server, pytest.raises(ConfigError, match=message):
            regenerate(settings(tmp_path, server, **changes))


def test_ignored_fields_are_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    number = iter(range(10**9))

    def careless(body: Body) -> tuple[str, bool]:
        return f"{next(number)} " * 20, True

    with serve(ChatServer(answer=careless)) as server, serve(ChatServer()) as good:
        regenerate(settings(tmp_path, server, good, top_k=5, top_p=0.9))
    ignored = [r.args for r in caplog.records if "ignores" in r.message]
    assert ignored == [(server.url, name) for name in ("max_tokens", "seed", "temperature", "top_k", "top_p")]


def test_waits_grow_and_spread() -> None:
    remote = RemoteSettings(backoff=1, max_backoff=60)
    for failures, most in ((1, 1), (2, 2), (4, 8), (7, 60), (5000, 60)):
        waits = [backoff(remote, failures) for _ in range(200)]
        assert most / 2 <= min(waits) < max(waits) <= most
    assert backoff(remote, 1, retry_after=20) == 20
    assert backoff(remote, 1, retry_after=9999) == 60


KILLED = "import sys; from dspark.cli import main; sys.argv = ['dspark', 'regenerate', sys.argv[1]]; main()"


def test_kill_and_resume(tmp_path: Path) -> None:
    """A real SIGKILL of the command in the middle, twice, and a torn line: nothing is lost or doubled."""
    flaky = {"5": "500", "7": "429", "9": "malformed"}

    def fault(body: Body, attempt: int) -> str | None:
        return flaky.get(body["messages"][-1]["content"][-1]) if attempt == 0 else None

    with serve(ChatServer(fault=fault, delay=0.03)) as server:
        made = settings(tmp_path, server)
        recipe = tmp_path / "recipe.toml"
        recipe.write_text(
            f'endpoints = ["{server.url}"]\nprompts = ["{tmp_path}/prompts.jsonl"]\nout = "{made.out}"\nseed = 5\n'
            "max_tokens = 6\ntemperatures = {0 = 0.5, 1 = 0.5}\n[remote]\nbackoff = 0.01\nconcurrency = 3\n"
        )
        for wanted in (5, 15):
            process = subprocess.Popen([sys.executable, "-c", KILLED, str(recipe)], stderr=subprocess.DEVNULL)
            while process.poll() is None and not (made.out.exists() and made.out.read_bytes().count(b"\n") >= wanted):
                time.sleep(0.002)
            process.send_signal(signal.SIGKILL)
            assert process.wait() == -signal.SIGKILL
            left = made.out.read_bytes()
            assert wanted <= left.count(b"\n") < 35
            made.out.write_bytes(left[: left.rfind(b"\n") + 1] + b'{"id": "one:1", "mess')
        report = regenerate(made)
        assert (report.total, report.written) == (40, 40 - left.count(b"\n"))
        assert made.out.read_bytes().startswith(left[: left.rfind(b"\n") + 1])
        resumed = rows(tmp_path)
        check_answers(resumed, [server])
        regenerate(made.replace(out=tmp_path / "whole" / "answers.jsonl"))
    assert resumed == rows(tmp_path / "whole")
