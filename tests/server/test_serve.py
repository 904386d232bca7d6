"""`dspark serve` itself: from the command line to an answer and back, and its exit codes."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import openai
import pytest

from dspark import cli
from dspark.errors import ConfigError
from dspark.server import run
from dspark.server.config import ServeSettings


@pytest.fixture(scope="module")
def target_path(target) -> str:
    return target.name


def test_from_start_to_sigterm(target_path: str, tmp_path: Path):
    """A TOML file, an override and a flag; SIGTERM while a stream runs cuts nothing."""
    recipe = tmp_path / "serve.toml"
    recipe.write_text(
        f'log_format = "json"\nserved_name = "small"\n[model]\ntarget = "{target_path}"\ndrafter = "none"\n'
        "threads = 1\n[engine]\nmax_length = 900\n"
    )
    command = [sys.executable, "-m", "dspark", "serve", str(recipe), "limits.max_waiting=5", "--port", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ | {"DSPARK_API_KEY": "k"})
    assert process.stderr is not None
    try:
        lines = []
        while not (found := re.search(r'"url": "(\S+)"', lines[-1] if lines else "")):
            lines.append(process.stderr.readline())
            assert lines[-1], "".join(lines)
        assert [json.loads(line)["message"] for line in lines][-1] == "listening"
        client = openai.OpenAI(base_url=f"{found[1]}/v1", api_key="k", timeout=20)
        stream = client.chat.completions.create(
            model="small",
            messages=[{"role": "user", "content": "ab"}],
            max_tokens=100,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        chunks = [next(stream)]
        process.send_signal(signal.SIGTERM)
        chunks += stream
        client.close()
        assert chunks[-1].choices[0].finish_reason == "length"
        _, rest = process.communicate(timeout=20)
        assert process.returncode == 0
        assert '"message": "draining' in rest
        assert '"completion_tokens": 100' in rest
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def test_an_engine_that_fails_ends_the_process_with_code_1(make_engine, monkeypatch):
    engine = make_engine()
    monkeypatch.setattr(engine, "step", lambda: 1 / 0)
    monkeypatch.setattr(run, "open_engine", lambda *_: engine)
    addresses: list[str] = []

    def announce(_: object, listener: socket.socket) -> None:
        addresses.append(f"http://127.0.0.1:{listener.getsockname()[1]}")
        asking.start()

    monkeypatch.setattr(run, "announce", announce)
    codes: list[int] = []

    def ask() -> None:
        body = {"model": "tiny", "prompt": "a"}
        codes.append(httpx.post(f"{addresses[0]}/v1/completions", json=body, timeout=20).status_code)

    asking = threading.Thread(target=ask)
    settings = ServeSettings.from_dict({"port": 0, "served_name": "tiny", "limits": {"crash_seconds": 0.1}}, "test")
    with pytest.raises(SystemExit) as left:
        run.serve(settings)
    asking.join(20)
    assert (left.value.code, codes) == (1, [503])


def test_an_address_in_use_is_told_before_loading():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port}"):
            run.serve(ServeSettings(port=port))


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["tiny", "limits.max_wait=3"], "max_waiting"),
        (["tiny", "engine.max_waiting=3"], "limits.max_waiting"),
        (["tiny", "api_key="], "api_key"),
        (["tiny", "--port", "70000"], "port"),
        (["nowhere.toml"], "nowhere.toml"),
    ],
)
def test_bad_settings_are_named(arguments, named, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["dspark", "serve", *arguments])
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code == 2
    assert named in capsys.readouterr().err


def test_settings_from_the_environment(monkeypatch):
    monkeypatch.setenv("DSPARK_API_KEY", "from-outside")
    settings = ServeSettings()
    assert settings.api_key is not None
    assert settings.api_key.get_secret_value() == "from-outside"
    assert "from-outside" not in repr(settings)
    assert not settings.is_public
    assert ServeSettings(host="0.0.0.0").is_public
    assert ServeSettings.from_dict({"model": {"target": "models/some-7b"}}, "x").name == "some-7b"
