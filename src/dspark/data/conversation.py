"""Conversations read from JSON-lines files, whichever of the three common row forms they use."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from dspark.data.fields import items, json_value, objects, text
from dspark.errors import DataError
from dspark.files import read_jsonl
from dspark.log import get_logger

_log = get_logger(__name__)

# Names that data sets use for the four roles, in ours; any other role is passed to the chat template as it is.
_ROLES = {"human": "user", "gpt": "assistant", "function": "tool", "observation": "tool"}
_CALL = "function_call"  # ShareGPT's role of a tool call by itself, and the OpenAI API's field before tool_calls


class ToolCall(NamedTuple):
    """One call of a tool: the arguments by name, and the id that its result refers to (None where there is none)."""

    name: str
    arguments: Mapping[str, Any]
    id: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """The form that chat templates take: the arguments are an object, not JSON text."""
        call: dict[str, Any] = {"type": "function", "function": {"name": self.name, "arguments": self.arguments}}
        return call if self.id is None else {"id": self.id, **call}


class Message(NamedTuple):
    """One turn: `role` is "system", "user", "assistant", "tool" or another one that the chat template knows.

    `tool_calls` and `reasoning_content` (thoughts kept apart from the answer) belong to an assistant's turn, `name` and
    `tool_call_id` to a tool's result.
    """

    role: str
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    name: str | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """The form that chat templates take; what the message lacks is left out."""
        optional = {
            "tool_calls": [call.as_dict() for call in self.tool_calls],
            "name": self.name,
            "tool_call_id": self.tool_call_id,
            "reasoning_content": self.reasoning_content,
        }
        return {"role": self.role, "content": self.content} | {key: value for key, value in optional.items() if value}


@dataclass(frozen=True)
class Conversation:
    """Messages in order, with the row's `id` (None if it had none) and `source` (its own, or the file's stem).

    `finished` is False when the last answer was cut by a token limit: then its end of turn is not a fact to train on.
    `tools` are the descriptions of the tools that the assistant may call, as the chat template takes them.
    """

    messages: tuple[Message, ...]
    source: str
    id: str | None = None
    finished: bool = True
    tools: tuple[Mapping[str, Any], ...] = ()


def read_conversations(
    paths: Iterable[str | Path], skip_bad: bool = False, bad: list[str] | None = None
) -> Iterator[Conversation]:
    """Yield the conversations of JSON-lines files in order.

    A row holds "messages" ([{role, content}]), "conversations" ([{from, value}]) or "turns" ([user text]), and "tools"
    where there are any. Raises `DataError` naming the file and the line of a malformed row; with `skip_bad` such rows
    are left out, and one warning a file tells how many; `bad`, if given, gets "FILE: line N: problem" of each.
    """
    for path in paths:
        skipped: list[str] = []
        for number, row in read_jsonl(path, skip_bad, skipped):
            try:
                conversation = parse_conversation(row, default_source=Path(path).stem)
            except DataError as error:
                skipped.append(f"line {number}: {error}")
                if not skip_bad:
                    raise DataError(f"{path}: {skipped[0]}; mend the line or skip such lines (--skip-bad)") from None
            else:
                yield conversation
        if skipped:
            _log.warning("%s: skipped %d bad lines (first: %s)", path, len(skipped), skipped[0])
        if bad is not None:
            bad.extend(f"{path}: {problem}" for problem in skipped)


def parse_conversation(row: Mapping[str, Any], default_source: str) -> Conversation:
    """Build a conversation from one row (forms: see `read_conversations`). Raises `DataError` naming the field."""
    messages = tuple(_messages(row))
    if not messages:
        raise DataError("the conversation has no message")
    identity = row.get("id")
    return Conversation(
        messages=messages,
        source=text(row.get("source", default_source), "source"),
        id=None if identity is None else str(identity),
        finished=row.get("finished", True) is not False,
        tools=tuple(objects(json_value(row.get("tools") or [], "tools"), "tools")),
    )


def _messages(row: Mapping[str, Any]) -> Iterator[Message]:
    if "messages" in row:
        for where, item in items(row["messages"], "messages"):
            yield _message(item, "role", "content", where)
    elif "conversations" in row:
        for where, item in items(row["conversations"], "conversations"):
            yield _message(item, "from", "value", where)
    elif "turns" in row:
        for where, item in items(row["turns"], "turns"):
            yield Message("user", text(item, where))
    else:
        raise DataError('expected one of the fields "messages", "conversations" and "turns"')


def _message(item: Any, role_key: str, content_key: str, where: str) -> Message:
    if not isinstance(item, dict):
        raise DataError(f"{where}: expected an object, got {type(item).__name__}")
    if role_key not in item:
        raise DataError(f"{where}: the field {role_key!r} is missing")
    role = text(item[role_key], f"{where}.{role_key}")
    calls = tuple(_tool_calls(item, where))
    content = item.get(content_key)
    if role == _CALL:
        calls = tuple(_spoken_calls(content, f"{where}.{content_key}"))
        role, content = "assistant", None
    if content is None and calls:
        content = ""
    elif content_key not in item:
        raise DataError(f"{where}: the field {content_key!r} is missing")
    reasoning = item.get("reasoning_content") or item.get("reasoning")
    return Message(
        role=_ROLES.get(role, role),
        content=_content(content, f"{where}.{content_key}"),
        tool_calls=calls,
        name=_optional(item.get("name"), f"{where}.name"),
        tool_call_id=_optional(item.get("tool_call_id"), f"{where}.tool_call_id"),
        reasoning_content=_optional(reasoning, f"{where}.reasoning_content"),
    )


def _tool_calls(item: Mapping[str, Any], where: str) -> Iterator[ToolCall]:
    """The calls of a message in the OpenAI API's form, today's or the one of a single function_call."""
    for at, call in items(item.get("tool_calls") or [], f"{where}.tool_calls"):
        function = call.get("function", call) if isinstance(call, dict) else call
        yield _tool_call(function, at, _optional(call.get("id"), f"{at}.id") if isinstance(call, dict) else None)
    if item.get(_CALL):
        yield _tool_call(item[_CALL], f"{where}.{_CALL}", None)


def _spoken_calls(value: Any, where: str) -> Iterator[ToolCall]:
    """The calls that a ShareGPT turn of the role function_call holds as JSON: one, or a list."""
    calls = json_value(value, where)
    for at, call in items(calls, where) if isinstance(calls, list) else [(where, calls)]:
        yield _tool_call(call, at, None)


def _tool_call(function: Any, where: str, identity: str | None) -> ToolCall:
    if not isinstance(function, dict) or "name" not in function:
        raise DataError(f"{where}: expected a function's name and arguments")
    arguments = json_value(function.get("arguments") or {}, f"{where}.arguments")
    if not isinstance(arguments, dict):
        raise DataError(f"{where}.arguments: expected an object, got {type(arguments).__name__}")
    return ToolCall(text(function["name"], f"{where}.name"), arguments, identity)


def _content(value: Any, where: str) -> str:
    """The text of a message: a string, or a list of text parts as the OpenAI API has them."""
    if not isinstance(value, list):
        return text(value, where)
    parts = []
    for at, part in items(value, where):
        if not isinstance(part, dict) or part.get("type") != "text":
            raise DataError(f"{at}: only text parts are supported")
        parts.append(text(part.get("text"), f"{at}.text"))
    return "".join(parts)


def _optional(value: Any, where: str) -> str | None:
    return None if value is None else text(value, where)
