"""Conversations read from JSON-lines files, whichever of the three common row forms they use."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from dspark.errors import DataError
from dspark.files import read_jsonl
from dspark.log import get_logger

_log = get_logger(__name__)

_ROLES = {"human": "user", "gpt": "assistant"}  # names used by the "conversations" form, in ours


class Message(NamedTuple):
    """One turn: `role` is "system", "user", "assistant" or another one that the chat template knows."""

    role: str
    content: str

    def as_dict(self) -> dict[str, str]:
        """The form that chat templates take."""
        return {"role": self.role, "content": self.content}


@dataclass(frozen=True)
class Conversation:
    """Messages in order, with the row's `id` (None if it had none) and `source` (its own, or the file's stem).

    `finished` is False when the last answer was cut by a token limit: then its end of turn is not a fact to train on.
    """

    messages: tuple[Message, ...]
    source: str
    id: str | None = None
    finished: bool = True


def read_conversations(paths: Iterable[str | Path], skip_bad: bool = False) -> Iterator[Conversation]:
    """Yield the conversations of JSON-lines files in order.

    A row holds "messages" ([{role, content}]), "conversations" ([{from, value}]) or "turns" ([user text]).
    Raises `DataError` naming the file and the line of a malformed row; with `skip_bad` such rows are left out, and
    one warning a file tells how many.
    """
    for path in paths:
        bad: list[str] = []
        for number, row in read_jsonl(path, skip_bad):
            try:
                conversation = parse_conversation(row, default_source=Path(path).stem)
            except DataError as error:
                bad.append(f"line {number}: {error}")
                if not skip_bad:
                    raise DataError(f"{path}: {bad[0]}; mend the line or skip such lines (--skip-bad)") from None
            else:
                yield conversation
        if bad:
            _log.warning("%s: skipped %d rows that are no conversation (first: %s)", path, len(bad), bad[0])


def parse_conversation(row: dict[str, Any], default_source: str) -> Conversation:
    """Build a conversation from one row (forms: see `read_conversations`). Raises `DataError` naming the field."""
    messages = tuple(_messages(row))
    if not messages:
        raise DataError("the conversation has no message")
    identity = row.get("id")
    return Conversation(
        messages=messages,
        source=_text(row.get("source", default_source), "source"),
        id=None if identity is None else str(identity),
        finished=row.get("finished", True) is not False,
    )


def _messages(row: dict[str, Any]) -> Iterator[Message]:
    if "messages" in row:
        for where, item in _items(row, "messages"):
            yield _message(item, "role", "content", where)
    elif "conversations" in row:
        for where, item in _items(row, "conversations"):
            yield _message(item, "from", "value", where)
    elif "turns" in row:
        for where, item in _items(row, "turns"):
            yield Message("user", _text(item, where))
    else:
        raise DataError('expected one of the fields "messages", "conversations" and "turns"')


def _items(row: dict[str, Any], field: str) -> Iterator[tuple[str, Any]]:
    """Yield (the item's name for errors, the item) of the list in `field`."""
    items = row[field]
    if not isinstance(items, list):
        raise DataError(f"{field}: expected a list, got {type(items).__name__}")
    for index, item in enumerate(items):
        yield f"{field}[{index}]", item


def _message(item: Any, role_key: str, content_key: str, where: str) -> Message:
    if not isinstance(item, dict):
        raise DataError(f"{where}: expected an object, got {type(item).__name__}")
    for key in (role_key, content_key):
        if key not in item:
            raise DataError(f"{where}: the field {key!r} is missing")
    if item.get("tool_calls"):
        raise DataError(f"{where}.tool_calls: tool calls are not supported")
    role = _text(item[role_key], f"{where}.{role_key}")
    return Message(_ROLES.get(role, role), _content(item[content_key], f"{where}.{content_key}"))


def _content(value: Any, where: str) -> str:
    """The text of a message: a string, or a list of text parts as the OpenAI API has them."""
    if not isinstance(value, list):
        return _text(value, where)
    parts = []
    for index, part in enumerate(value):
        if not isinstance(part, dict) or part.get("type") != "text":
            raise DataError(f"{where}[{index}]: only text parts are supported")
        parts.append(_text(part.get("text"), f"{where}[{index}].text"))
    return "".join(parts)


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise DataError(f"{where}: expected a string, got {type(value).__name__}")
    if not _encodable(value):
        raise DataError(f"{where}: half of a surrogate pair, which no tokenizer can read")
    return value


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
