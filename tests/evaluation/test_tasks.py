"""Prompts and what is told of them."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from dspark.data.rows import fill
from dspark.errors import DataError
from dspark.evaluation.homes import BUILTIN_TASKS, TASK_NAMES
from dspark.evaluation.script import script
from dspark.evaluation.tasks import fetch, load_tasks

SHARED = Path(__file__).parents[3] / "shared" / "data" / "eval"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("def f(x): return x + 1", "latin"),
        ("Привет, мир", "cyrillic"),
        ("今天天气很好", "chinese"),
        ("今日は天気がいいです", "japanese"),
        ("안녕하세요", "korean"),
        ("مرحبا بالعالم", "arabic"),
        ("नमस्ते दुनिया", "devanagari"),
        ("12 + 3 = ?", "no letters"),
        ("Translate: доброе утро всем", "mixed"),
    ],
)
def test_script(text: str, expected: str) -> None:
    assert script(text) == expected


def test_ids_are_of_the_words(tmp_path: Path) -> None:
    """Rows may move and change their own ids: a run is paired by what was asked."""
    first, second = tmp_path / "a" / "set.jsonl", tmp_path / "b" / "set.jsonl"
    for path in (first, second):
        path.parent.mkdir()
    first.write_text('{"turns": ["x"]}\n{"turns": ["y"], "id": "7"}\n{"turns": ["x"]}\n')
    second.write_text('{"messages": [{"role": "user", "content": "y"}]}\n{"turns": ["x"]}\n')
    (task,), (other,) = (load_tasks((f"chat={path}",), None, 10) for path in (first, second))
    ids = [prompt.id for prompt in task.prompts]
    assert len(set(ids)) == 3
    assert ids[2] == ids[0] + "-2"
    assert [prompt.id for prompt in other.prompts] == [ids[1], ids[0]]
    assert (task.name, task.category) == ("set", "chat")
    assert len(load_tasks((str(first),), None, 2)[0].prompts) == 2


def test_homes_are_worded_like_the_prompts_at_hand() -> None:
    """The wording around a set's fields is that of the prompts which are here."""
    if not SHARED.is_dir():
        pytest.skip("the evaluation prompts are not here")
    assert {path.stem for path in SHARED.glob("*.jsonl")} == set(TASK_NAMES)
    for task in BUILTIN_TASKS:
        row = json.loads((SHARED / f"{task.name}.jsonl").read_text(encoding="utf-8").splitlines()[0])
        if task.home.prompt is None:
            continue
        before, _, after = task.home.prompt.partition("{")
        after = after.partition("}")[2]
        assert row["turns"][0].startswith(before)
        assert row["turns"][0].endswith(after)
        field = task.home.prompt[len(before) + 1 : -len(after) - 1 or None]
        assert "{" not in field


def test_a_fetched_task_is_written_once_and_whole(tmp_path: Path) -> None:
    """Through the datasets library where it is there; otherwise the error says what to do instead."""
    if find_spec("datasets") is None:
        with pytest.raises(DataError, match=r"task gsm8k: .*pip install datasets.*--data"):
            fetch(BUILTIN_TASKS[0], tmp_path / "gsm8k.jsonl")
        assert not list(tmp_path.iterdir())
        return
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"question": "What is 1 + 1?"}\n')
    home = BUILTIN_TASKS[0].home.replace(dataset="json", subset=None, split="train", data_files=(str(rows),))
    fetch(BUILTIN_TASKS[0]._replace(home=home), tmp_path / "gsm8k.jsonl")
    (task,) = load_tasks(("gsm8k",), tmp_path, 5)
    assert task.prompts[0].turns[0].startswith(fill("{question}\nPlease reason", {"question": "What is 1 + 1?"}))
