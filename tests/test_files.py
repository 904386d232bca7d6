import hashlib
import json
import logging
from pathlib import Path

import pytest

from dspark.errors import DataError
from dspark.files import atomic_path, read_jsonl, sha256_file


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_atomic_path_renames_on_success(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "er" / "file.json"
    with atomic_path(path) as temporary:
        assert temporary.suffix == ".json"
        temporary.write_text("new", encoding="utf-8")
        assert not path.exists()
    assert path.read_text(encoding="utf-8") == "new"
    assert names(path.parent) == ["file.json"]


def write_half(path: Path, error: BaseException) -> None:
    with atomic_path(path) as temporary:
        temporary.write_text("half", encoding="utf-8")
        raise error


@pytest.mark.parametrize("error", [ValueError("broken"), KeyboardInterrupt()])
def test_atomic_path_keeps_the_old_file_on_failure(tmp_path: Path, error: BaseException) -> None:
    path = tmp_path / "file.json"
    path.write_text("old", encoding="utf-8")
    with pytest.raises(type(error)):
        write_half(path, error)
    assert path.read_text(encoding="utf-8") == "old"
    assert names(tmp_path) == ["file.json"]


def test_atomic_path_replaces_a_directory(tmp_path: Path) -> None:
    path = tmp_path / "model"
    for round_number in range(2):
        with atomic_path(path) as temporary:
            temporary.mkdir()
            (temporary / f"weights{round_number}").write_bytes(b"x")
    assert names(path) == ["weights1"]
    assert names(tmp_path) == ["model"]


def test_atomic_path_removes_a_half_written_directory(tmp_path: Path) -> None:
    def write() -> None:
        with atomic_path(tmp_path / "model") as temporary:
            temporary.mkdir()
            (temporary / "weights").write_bytes(b"x")
            raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        write()
    assert names(tmp_path) == []


def test_sha256_file(tmp_path: Path) -> None:
    path = tmp_path / "bytes"
    path.write_bytes(b"speculate" * 100_000)
    assert sha256_file(path) == hashlib.sha256(b"speculate" * 100_000).hexdigest()


def test_read_jsonl_numbers_the_lines_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"a": 1}\r\n\n  \n{"a": "\xc3\xa9\xe2\x80\xa8"}')
    assert list(read_jsonl(path)) == [(1, {"a": 1}), (4, {"a": "é\u2028"})]


BAD_LINES = [
    (b'{"a": 1', "line 2: Expecting ',' delimiter"),
    (b"[1, 2]", "line 2: expected a JSON object, got list"),
    (b'{"a": "\xff"}', "line 2: 'utf-8' codec can't decode byte 0xff"),
    (b"[" * 200_000, "line 2: maximum recursion depth"),
]


@pytest.mark.parametrize(("line", "message"), BAD_LINES)
def test_read_jsonl_names_file_and_line_of_a_bad_row(tmp_path: Path, line: bytes, message: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"{}\n" + line + b"\n{}\n")
    with pytest.raises(DataError) as caught:
        list(read_jsonl(path))
    assert f"rows.jsonl: {message}" in str(caught.value)
    assert "--skip-bad" in str(caught.value)


def test_read_jsonl_skips_bad_rows_and_tells_how_many(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(
        b"".join(line + b"\n" + json.dumps({"i": i}).encode() + b"\n" for i, (line, _) in enumerate(BAD_LINES))
    )
    with caplog.at_level(logging.WARNING, logger="dspark"):
        assert [number for number, _ in read_jsonl(path, skip_bad=True)] == [2, 4, 6, 8]
    assert "skipped 4 bad lines (first: line 1: Expecting ',' delimiter" in caplog.text


def test_read_jsonl_names_a_file_it_cannot_read(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"absent.jsonl: cannot be read \(No such file or directory\)"):
        list(read_jsonl(tmp_path / "absent.jsonl"))
    with pytest.raises(DataError, match="Is a directory"):
        list(read_jsonl(tmp_path))
