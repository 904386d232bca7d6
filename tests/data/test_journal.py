import json
from pathlib import Path

import pytest

from dspark.data.journal import Journal
from dspark.draws import draw, draw_integer
from dspark.errors import ConfigError


@pytest.mark.parametrize("torn", [b"", b'{"id": "c"', b'{"id": "c", "text": "' + b"x" * 200_000])
def test_a_torn_line_is_cut(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "rows.jsonl"
    with Journal(path, {"seed": 1}) as journal:
        journal.append({"id": "a", "text": "é\n"})
        journal.append({"id": "b"})
    whole = path.read_bytes()
    path.write_bytes(whole + torn)
    with Journal(path, {"seed": 1, "more": 2}) as journal:
        assert journal.ids == {"a", "b"}
        assert journal.rows[0]["text"] == "é\n"
        journal.append({"id": "c"})
    assert path.read_bytes() == whole + b'{"id": "c"}\n'
    assert json.loads((tmp_path / "rows.settings.json").read_text()) == {"seed": 1, "more": 2}


def test_a_file_of_one_torn_line_is_empty(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    with Journal(path, {}):
        pass
    path.write_bytes(b'{"id"')
    with Journal(path, {}) as journal:
        assert not journal.rows
    assert path.read_bytes() == b""


def test_two_processes_do_not_write_one_file(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    with Journal(path, {}) as journal:
        journal.append({"id": "a"})
        with pytest.raises(ConfigError, match="rows.jsonl is written by another process"):
            Journal(path, {})
        journal.append({"id": "b"})
    with Journal(path, {}) as journal:
        assert journal.ids == {"a", "b"}


def test_draws_depend_on_names_alone() -> None:
    numbers = [draw(seed, "x", i) for seed in range(10) for i in range(100)]
    assert numbers == [draw(seed, "x", i) for seed in range(10) for i in range(100)]
    assert len(set(numbers)) == 1000
    assert all(0 <= number < 1 for number in numbers)
    assert abs(sum(numbers) / 1000 - 0.5) < 0.05
    assert draw_integer("a", 1) != draw_integer("a", "1")
