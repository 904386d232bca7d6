"""Rows of local files (JSON lines, Parquet) and of data sets that the `datasets` library loads."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dspark.data.config import FIELD, PromptSet
from dspark.errors import ConfigError, DataError
from dspark.files import read_jsonl

_BATCH = 1024  # rows of a Parquet file in memory at once

Row = tuple[str, dict[str, Any]]  # where it stands, for errors, and its fields


def read_rows(part: PromptSet, skip_bad: bool, bad: list[str]) -> Iterator[Row]:
    """Yield the rows of a set in order; lines that are left out are added to `bad`.

    Raises `DataError` for what cannot be read, and `ConfigError` when a library that it takes is not installed.
    """
    if part.dataset is not None:
        yield from _dataset(part)
    for path in part.files:
        if path.suffix == ".parquet":
            yield from _parquet(path, part.name)
        else:
            skipped: list[str] = []
            yield from ((f"{path}: line {number}", row) for number, row in read_jsonl(path, skip_bad, skipped))
            bad.extend(f"{path}: {problem}" for problem in skipped)


def fill(text: str, row: Mapping[str, Any]) -> str:
    """`text` with each {field} replaced by what the row has there; null counts as empty. Raises `DataError`."""
    return FIELD.sub(lambda found: _field(row, found[1]), text).strip()


def _field(row: Mapping[str, Any], name: str) -> str:
    value: Any = row
    for key in [name] if name in row else name.split("."):
        if not isinstance(value, Mapping) or key not in value:
            raise DataError(f"the field {name!r} is missing (there are {', '.join(row) or 'none'})")
        value = value[key]
    if isinstance(value, dict | list):
        raise DataError(f"{name}: expected a text or number, got {type(value).__name__}")
    return "" if value is None else str(value)


def _dataset(part: PromptSet) -> Iterator[Row]:
    try:
        import datasets
    except ImportError:
        raise _missing(f"sets.{part.name}.dataset", "datasets") from None
    try:
        rows = datasets.load_dataset(
            part.dataset,
            part.subset,
            data_files=list(part.data_files) or None,
            split=part.split,
            revision=part.revision,
            streaming=part.streaming,
        )
        yield from ((f"{part.dataset}: row {number}", row) for number, row in enumerate(rows, start=1))
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise DataError(f"sets.{part.name}.dataset: {part.dataset} cannot be loaded: {error}") from None


def _parquet(path: Path, name: str) -> Iterator[Row]:
    try:
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise _missing(f"sets.{name}.files: {path}", "pyarrow") from None
    number = 0
    try:
        with ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=_BATCH):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path}: row {number}", row
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read as Parquet: {error}") from None


def _missing(where: str, library: str) -> ConfigError:
    return ConfigError(f"{where}: needs the {library} library: pip install {library}")
