import json
import sys
from pathlib import Path
from typing import Any

import pytest

from dspark import cli
from dspark.data.config import PrepareSettings
from dspark.data.prepare import prepare
from dspark.data.rows import fill
from dspark.data.sources import read_prompts
from dspark.errors import ConfigError, DataError

LONG = "one two three four five six seven eight nine ten eleven twelve thirteen"


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def settings(path: Path, *sets: dict[str, Any], **changes: Any) -> PrepareSettings:
    return PrepareSettings.from_dict({"out": path / "out", "sets": list(sets)} | changes, "test")


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_fields_are_mapped_and_what_repeats_is_dropped(tmp_path: Path) -> None:
    plain = [
        {"instruction": "Add", "input": "1 and 2", "extra": {"level": 3}},
        {"instruction": "Sing", "input": "", "extra": {"level": 1}},
        {"instruction": "sing!", "input": None, "extra": {"level": 1}},
        {"instruction": "", "input": "", "extra": {"level": 1}},
        {"instruction": "Say", "input": f"{LONG}!", "extra": {"level": 1}},
    ]
    talks = [
        {"talk": [{"from": "human", "value": "add 1 AND 2"}, {"from": "gpt", "value": "3"}]},
        {
            "talk": [
                {"from": "system", "value": "s"},
                {"from": "human", "value": "Add"},
                {"from": "human", "value": "x"},
            ]
        },
    ]
    mapped = {
        "name": "plain",
        "files": [write(tmp_path / "plain.jsonl", plain)],
        "prompt": "{instruction}\n\n{input}",
        "system": "Level {extra.level}",
    }
    talk = {"name": "talk", "files": [write(tmp_path / "talk.jsonl", talks)], "rename": {"talk": "conversations"}}
    exclude = write(tmp_path / "eval.jsonl", [{"turns": [f"Evaluate: {LONG}"]}])
    reports = prepare(settings(tmp_path, mapped, talk, exclude=[exclude]))
    assert rows(tmp_path / "out" / "plain.jsonl") == [
        {
            "id": f"plain:{number}",
            "source": "plain",
            "messages": [{"role": "system", "content": system}, {"role": "user", "content": prompt}],
        }
        for number, system, prompt in ((1, "Level 3", "Add\n\n1 and 2"), (2, "Level 1", "Sing"))
    ]
    system, *turns = [{"role": r, "content": c} for r, c in (("system", "s"), ("user", "Add"), ("user", "x"))]
    assert rows(tmp_path / "out" / "talk.jsonl") == [{"id": "talk:2", "source": "talk", "messages": [system, *turns]}]
    assert reports["plain"].dropped == {"duplicate": 1, "no user turn": 1, "repeats an excluded text": 1}
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["sets"]["talk"] == {"train": 1, "held_out": 0, "dropped": {"duplicate": 1}, "files": ["talk.jsonl"]}
    prompts = list(read_prompts([tmp_path / "out" / "plain.jsonl", tmp_path / "out" / "talk.jsonl"]))
    assert [(p.system, p.turns) for p in prompts][2] == ("s", ("Add", "x"))


def test_the_split_depends_on_the_words_and_the_seed(tmp_path: Path) -> None:
    numbered = [{"q": f"What is {i}?"} for i in range(400)]
    part = {"name": "a", "files": [write(tmp_path / "a.jsonl", numbered)], "prompt": "{q}"}
    reports = prepare(settings(tmp_path, part, held_out=0.25))
    out = tmp_path / "out"
    train, held_out = rows(out / "a.jsonl"), rows(out / "a.held-out.jsonl")
    assert (len(train), len(held_out)) == (reports["a"].train, reports["a"].held_out)
    assert len(train) + len(held_out) == 400
    assert 70 < len(held_out) < 130
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    prepare(settings(tmp_path, part, held_out=0.25))
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    write(tmp_path / "a.jsonl", [{"q": "new"}, *numbered[::-1]])
    prepare(settings(tmp_path, part, held_out=0.25))
    words = {row["turns"][0] for row in held_out}
    assert words == {row["turns"][0] for row in rows(out / "a.held-out.jsonl")} - {"new"}
    prepare(settings(tmp_path, part, held_out=0.25, seed=1))
    assert words != {row["turns"][0] for row in rows(out / "a.held-out.jsonl")}
    assert prepare(settings(tmp_path, part | {"limit": 7}))["a"].train == 7
    assert not (out / "a.held-out.jsonl").exists(), "what was held out is trained on now"


def test_a_failed_run_leaves_the_files_as_they_were(tmp_path: Path) -> None:
    first = {"name": "a", "files": [write(tmp_path / "a.jsonl", [{"turns": ["x"]}])]}
    prepare(settings(tmp_path, first))
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    write(tmp_path / "a.jsonl", [{"turns": ["other"]}])
    second = {"name": "b", "files": [write(tmp_path / "b.jsonl", [{"turns": ["y"]}, {"turns": [3]}])]}
    with pytest.raises(DataError, match=r"b\.jsonl: line 2: turns\[0\]: expected a string.*skip_bad"):
        prepare(settings(tmp_path, first, second))
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before
    (tmp_path / "b.jsonl").write_text((tmp_path / "b.jsonl").read_text() + "{torn\n")
    reports = prepare(settings(tmp_path, first, second, skip_bad=True))
    assert reports["b"].dropped == {"malformed": 2}
    assert rows(tmp_path / "out" / "b.jsonl")[0]["turns"] == ["y"]


def test_foreign_files_are_not_overwritten(tmp_path: Path) -> None:
    part = {"name": "a", "files": [write(tmp_path / "a.jsonl", [{"turns": ["x"]}])]}
    (tmp_path / "out").mkdir()
    precious = tmp_path / "out" / "a.jsonl"
    precious.write_text("mine")
    with pytest.raises(DataError, match=r"a\.jsonl: is there, and no earlier run wrote it"):
        prepare(settings(tmp_path, part))
    assert precious.read_text() == "mine"
    (tmp_path / "out" / "report.json").write_text("[]")
    with pytest.raises(DataError, match="not the report of prompt files"):
        prepare(settings(tmp_path, part))


@pytest.mark.parametrize(
    ("part", "named"),
    [
        ({"name": "a"}, "give either files or dataset"),
        ({"name": "a", "files": ["x"], "dataset": "y"}, "give either files or dataset"),
        ({"name": "a", "files": ["x"], "subset": "y"}, "subset belongs to dataset"),
        ({"name": "a/b", "files": ["x"]}, "sets.0.name"),
        ({"name": "a", "files": ["x"], "prompt": "question"}, 'write it in braces, "{question}"'),
        ({"name": "a", "files": ["x"], "system": "s"}, "system goes with prompt"),
        ({"name": "a", "files": ["x"], "promt": "{q}"}, "promt: unknown setting"),
    ],
)
def test_bad_settings_name_the_field(tmp_path: Path, part: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError) as error:
        settings(tmp_path, part)
    assert named in str(error.value)


def test_names_are_unique(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'a' is used twice"):
        settings(tmp_path, {"name": "a", "files": ["x"]}, {"name": "a", "files": ["y"]})


def test_fields_in_braces() -> None:
    row = {"a": {"b": 2, "c": None, "d": [1]}, "x.y": "dot", "z": "{a.b}"}
    assert fill(" {a.b}{a.c} {x.y} {z} {} ", row) == "2 dot {a.b} {}"
    for text, message in (
        ("{q}", "'q' is missing .there are a, x.y, z"),
        ("{a.e}", "'a.e'"),
        ("{a.d}", "a.d: expected"),
    ):
        with pytest.raises(DataError, match=message):
            fill(text, row)


def test_parquet(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="Parquet files need pyarrow")
    from pyarrow.parquet import write_table

    messages = [{"role": "user", "content": "hi", "tool_calls": None}, {"role": "assistant", "content": "ho"}]
    write_table(pyarrow.Table.from_pylist([{"messages": messages, "id": 7}]), tmp_path / "a.parquet")
    prepare(settings(tmp_path, {"name": "a", "files": [tmp_path / "a.parquet"]}))
    assert rows(tmp_path / "out" / "a.jsonl") == [{"id": "a:1", "source": "a", "turns": ["hi"]}]
    (tmp_path / "bad.parquet").write_text("no")
    with pytest.raises(DataError, match=r"bad\.parquet: cannot be read as Parquet"):
        prepare(settings(tmp_path, {"name": "a", "files": [tmp_path / "bad.parquet"]}))


@pytest.mark.parametrize("streaming", [False, True])
def test_the_datasets_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, streaming: bool) -> None:
    datasets = pytest.importorskip("datasets", reason="public data sets need datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_OFFLINE", True)
    (tmp_path / "set").mkdir()
    file = write(
        tmp_path / "set" / "train.jsonl", [{"question": "1 + 1?"}, {"question": "2 + 2?"}, {"question": "1+1"}]
    )
    by_format = {"name": "a", "dataset": "json", "data_files": [file], "prompt": "{question}", "streaming": streaming}
    by_directory = {"name": "b", "dataset": str(tmp_path / "set"), "prompt": "Solve {question}", "streaming": streaming}
    reports = prepare(settings(tmp_path, by_format, by_directory))
    assert [row["turns"] for row in rows(tmp_path / "out" / "a.jsonl")] == [["1 + 1?"], ["2 + 2?"]]
    assert [row["id"] for row in rows(tmp_path / "out" / "b.jsonl")] == ["b:1", "b:2"]
    assert reports["a"].dropped == reports["b"].dropped == {"duplicate": 1}
    for wrong in ({"split": "test"}, {"data_files": [str(tmp_path / "none.jsonl")]}):
        with pytest.raises(DataError, match=r"sets\.a\.dataset: json cannot be loaded"):
            prepare(settings(tmp_path, by_format | wrong))
    with pytest.raises(DataError, match=r"json: row 1: the field 'q' is missing .there are question"):
        prepare(settings(tmp_path, by_format | {"prompt": "{q}"}))


@pytest.mark.parametrize(
    ("library", "part"), [("datasets", {"dataset": "json"}), ("pyarrow.parquet", {"files": ["x.parquet"]})]
)
def test_a_missing_library_comes_with_the_command(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    library: str,
    part: dict[str, Any],
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    origin = "\n".join(f"{key} = {json.dumps(value)}" for key, value in part.items())
    (tmp_path / "recipe.toml").write_text(f'out = "{tmp_path}/out"\n[[sets]]\nname = "a"\n{origin}\n')
    monkeypatch.setattr(sys, "argv", ["dspark", "data", "prepare", str(tmp_path / "recipe.toml")])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 2
    assert f"pip install {library.partition('.')[0]}" in capsys.readouterr().err
