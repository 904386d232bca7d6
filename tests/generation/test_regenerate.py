import json
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dspark.data.chat import ChatTemplate
from dspark.data.conversation import Message, read_conversations
from dspark.data.sources import select_prompts
from dspark.draws import draw_integer
from dspark.engine.engine import Engine
from dspark.engine.request import SamplingParams
from dspark.errors import ConfigError, DataError
from dspark.files import read_jsonl
from dspark.generation.config import RegenerateSettings
from dspark.generation.regenerate import regenerate

MakeEngine = Callable[[], Engine]


def write_prompts(path: Path) -> Path:
    """Twenty prompts of one turn, ten of two."""
    prompts = [{"turns": [f"{'abcdefgh'[i % 8]} {'hij'[i // 8]}"]} for i in range(20)]
    prompts += [{"turns": ["ab", f"{'abcdefghij'[i]} c"], "source": "two"} for i in range(10)]
    file = path / "prompts.jsonl"
    file.write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    return file


def settings(path: Path, **changes: Any) -> RegenerateSettings:
    base = {
        "prompts": [path / "prompts.jsonl"],
        "out": path / "answers.jsonl",
        "temperatures": {"0": 0.5, "0.7": 0.2, "1": 0.3},
        "max_tokens": 16,
        "seed": 5,
    }
    return RegenerateSettings.from_dict(base | changes, "test")


def rows(path: Path) -> dict[str, dict[str, Any]]:
    """The rows by id; each id once."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    found = {row["id"]: row for row in lines}
    assert len(found) == len(lines)
    return found


def test_every_prompt_is_answered(make_engine: MakeEngine, tmp_path: Path) -> None:
    write_prompts(tmp_path)
    engine = make_engine()
    report = regenerate(engine, settings(tmp_path))
    found = rows(tmp_path / "answers.jsonl")
    assert report.total == report.written == len(found) == 30
    assert report.refused == 0
    assert not engine.has_work()
    engine.check_integrity()
    assert {row["finished"] for row in found.values()} == {True, False}
    temperatures = Counter(row["temperature"] for row in found.values())
    assert set(temperatures) == {0.0, 0.7, 1.0}
    assert temperatures[0.0] > temperatures[0.7]
    for row in found.values():
        roles = [message["role"] for message in row["messages"]]
        turns = 1 if row["source"] == "prompts" or len(roles) == 2 else 2
        assert roles == ["user", "assistant"] * turns
        assert turns == 2 or row["source"] == "prompts" or not row["finished"]  # a cut answer ends the conversation
    conversations = list(read_conversations([tmp_path / "answers.jsonl"]))
    assert [c.finished for c in conversations] == [row["finished"] for row in found.values()]


def test_answers_are_the_engines_own_turn_by_turn(make_engine: MakeEngine, tmp_path: Path) -> None:
    write_prompts(tmp_path)
    regenerate(make_engine(), settings(tmp_path, temperatures={"1": 1}))
    row = next(row for row in rows(tmp_path / "answers.jsonl").values() if len(row["messages"]) == 4)
    engine = make_engine()
    chat = ChatTemplate(engine.target.tokenizer)
    messages = [Message(**message) for message in row["messages"]]
    for turn in (0, 1):
        params = SamplingParams(max_tokens=16, temperature=1, seed=draw_integer(5, "answer", row["id"], turn))
        (completion,) = engine.generate([chat.prompt_ids(messages[: 2 * turn + 1])], params)
        assert completion.text == messages[2 * turn + 1].content


def test_suffixes_and_limit(make_engine: MakeEngine, tmp_path: Path) -> None:
    write_prompts(tmp_path)
    changed = settings(tmp_path, suffixes={"prompts": ["", "\nijk"]}, limit=10)
    regenerate(make_engine(), changed)
    found = rows(tmp_path / "answers.jsonl")
    assert len(found) == 10
    single = [row["messages"][0]["content"] for row in found.values() if row["source"] == "prompts"]
    assert 0 < sum(text.endswith("\nijk") for text in single) < len(single)
    assert not any(row["messages"][0]["content"].endswith("ijk") for row in found.values() if row["source"] == "two")
    more = select_prompts(changed.prompts, 20, changed.seed)
    assert found.keys() < {prompt.id for prompt in more}
    assert [p.id for p in more] != [p.id for p in select_prompts(changed.prompts, 20, 6)]


def test_a_prompt_too_long_is_left_out(
    make_engine: MakeEngine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prompts = [{"turns": ["a" * 200]}, {"turns": ["b"]}, {"turns": ["c", "a" * 200]}]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    report = regenerate(make_engine(), settings(tmp_path, max_tokens=60))
    found = rows(tmp_path / "answers.jsonl")
    assert (report.refused, set(found)) == (1, {"prompts:2", "prompts:3"})
    assert len(found["prompts:3"]["messages"]) == 2  # the second turn did not fit
    assert "prompts:1: left out: prompt has" in caplog.text
    (left_out,) = read_jsonl(tmp_path / "answers.errors.jsonl")
    assert left_out[1]["id"] == "prompts:1"
    assert left_out[1]["error"].startswith("prompt has")


def test_other_settings_and_bad_lines(make_engine: MakeEngine, tmp_path: Path) -> None:
    file = write_prompts(tmp_path)
    regenerate(make_engine(), settings(tmp_path, limit=3))
    with pytest.raises(ConfigError, match="temperatures: "):
        regenerate(make_engine(), settings(tmp_path, temperatures={"0": 1}))
    with file.open("a") as lines:
        lines.write('{"turns": [\n')
    with pytest.raises(DataError, match=r"prompts\.jsonl: line 31"):
        regenerate(make_engine(), settings(tmp_path))
    assert regenerate(make_engine(), settings(tmp_path, skip_bad=True)).total == 30


KILLED = """
import sys
from pathlib import Path
from dspark.engine.config import EngineSettings
from dspark.draws import draw_integer
from dspark.engine.engine import Engine
from dspark.data.sources import select_prompts
from dspark.generation.config import RegenerateSettings
from dspark.generation.regenerate import regenerate
from dspark.models.target import load_target

target = load_target(sys.argv[1], dtype="float32")
settings = RegenerateSettings.from_dict(eval(sys.argv[2]), "test")
regenerate(Engine(target, None, EngineSettings(max_batch=1, max_length=96)), settings)
"""


def test_kill_and_resume(make_engine: MakeEngine, target_path: Path, tmp_path: Path) -> None:
    """A real SIGKILL in the middle, and a torn last line: the resumed run loses and doubles nothing."""
    write_prompts(tmp_path)
    fields = settings(tmp_path).model_dump(mode="json", exclude={"engine"})
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(target_path), repr(fields)])
    out = tmp_path / "answers.jsonl"
    while process.poll() is None and not (out.exists() and out.read_bytes().count(b"\n") >= 5):
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    left = out.read_bytes()
    kept = left.count(b"\n")
    assert 5 <= kept < 30
    out.write_bytes(left[: left.rfind(b"\n") + 1] + b'{"id": "prompts:1", "mess')
    report = regenerate(make_engine(), settings(tmp_path))
    assert (report.total, report.written) == (30, 30 - kept)
    assert out.read_bytes().startswith(left[: left.rfind(b"\n") + 1])
    resumed = rows(out)
    whole = tmp_path / "whole"
    whole.mkdir()
    write_prompts(whole)
    regenerate(make_engine(), settings(whole))
    assert resumed == rows(whole / "answers.jsonl")
