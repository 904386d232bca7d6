"""Values taken out of JSON rows, checked: an error names the field. `where` is the field's place in the row."""

import json
from collections.abc import Iterator
from typing import Any

from dspark.errors import DataError


def text(value: Any, where: str) -> str:
    """A string that a tokenizer can read. Raises `DataError`."""
    if not isinstance(value, str):
        raise DataError(f"{where}: expected a string, got {type(value).__name__}")
    if not _encodable(value):
        raise DataError(f"{where}: half of a surrogate pair, which no tokenizer can read")
    return value


def items(value: Any, where: str) -> Iterator[tuple[str, Any]]:
    """Yield (the item's place, the item) of a list. Raises `DataError`."""
    if not isinstance(value, list):
        raise DataError(f"{where}: expected a list, got {type(value).__name__}")
    for index, item in enumerate(value):
        yield f"{where}[{index}]", item


def objects(value: Any, where: str) -> Iterator[dict[str, Any]]:
    """Yield the items of a list of objects. Raises `DataError`."""
    for at, item in items(value, where):
        if not isinstance(item, dict):
            raise DataError(f"{at}: expected an object, got {type(item).__name__}")
        yield item


def json_value(value: Any, where: str) -> Any:
    """The value itself, or what it says where it is JSON text, as data sets with fixed columns keep it."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: not valid JSON: {error}") from None


def _encodable(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
