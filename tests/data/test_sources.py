import json
from pathlib import Path
from typing import Any

import pytest

from dspark.data.sources import Exclusions, normalise, read_prompts
from dspark.errors import DataError


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_prompts_have_ids_and_no_answers(tmp_path: Path) -> None:
    messages = [
        {"role": r, "content": c} for r, c in (("system", "s"), ("user", "q"), ("assistant", "a"), ("user", "r"))
    ]
    rows = [{"turns": ["one", "two"], "source": "chat"}, {"id": "x", "messages": messages}, {"turns": [" "]}]
    first, second = read_prompts([write(tmp_path / "file.jsonl", rows)])
    assert (first.id, first.source, first.turns, first.system) == ("file:1", "chat", ("one", "two"), None)
    assert (second.id, second.source, second.turns, second.system) == ("x", "file", ("q", "r"), "s")


def test_one_id_twice_is_an_error(tmp_path: Path) -> None:
    paths = [write(tmp_path / name, [{"id": "x", "turns": ["hi"]}]) for name in ("a.jsonl", "b.jsonl")]
    with pytest.raises(DataError, match=r"b\.jsonl: the id 'x' comes twice"):
        list(read_prompts(paths))


def test_exclusions_know_whole_texts_and_runs_of_words(tmp_path: Path) -> None:
    long = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen"
    path = write(tmp_path / "eval.jsonl", [{"turns": ["How many clips?", long]}])
    exclusions = Exclusions.read([path])
    assert "how   MANY clips" in exclusions
    assert f"Say: {long.upper()}, please." in exclusions
    assert " ".join(long.split()[:12]) not in exclusions
    assert "How many eggs?" not in exclusions
    assert normalise("  Déjà-vu, ＡＢ! ") == "déjà vu ab"


def test_wording_shared_by_many_texts_may_be_repeated() -> None:
    task = "write a solution to the following problem and make sure that it passes the tests"
    exclusions = Exclusions(f"{task} number {n}" for n in range(5))
    assert f"{task} for me" not in exclusions
    assert f"{task} number 3" in exclusions
