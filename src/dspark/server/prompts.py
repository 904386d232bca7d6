"""From what a request says to token ids."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from dspark.data.chat import ChatTemplate
from dspark.data.conversation import Message, ToolCall
from dspark.errors import DataError
from dspark.models.tokenizer import Tokenizer
from dspark.server.bodies import check_text
from dspark.server.errors import bad_request
from dspark.server.schemas import ChatMessage, ToolCallPart

_ROLES = {"developer": "system"}  # the later name of the same role


def messages_of(given: Sequence[ChatMessage]) -> list[Message]:
    """The messages as chat templates take them. Raises ApiError naming the field at fault."""
    return [_message(message, f"messages.{i}") for i, message in enumerate(given)]


def render(
    chat: ChatTemplate, messages: Sequence[Message], opening: str = "", add_generation_prompt: bool = True
) -> list[int]:
    """Token ids up to where the answer begins; `opening` is text of the answer that is given.

    Raises ApiError where the template refuses the messages.
    """
    try:
        return chat.encode(chat.text(messages, add_generation_prompt) + opening)
    except DataError as error:
        raise bad_request(f"messages: {error}", "messages") from None


def check_names(chat: ChatTemplate, messages: Sequence[Message]) -> None:
    """Raise ApiError for a name that the chat template does not write: it would reach nobody.

    A tool's result may have the name of the call that it answers, which says nothing new.
    """
    called = {call.id: call.name for message in messages for call in message.tool_calls}
    new = {
        i for i, m in enumerate(messages) if m.name and not (m.role == "tool" and called.get(m.tool_call_id) == m.name)
    }
    rendered = _rendered(chat, messages) if new else None
    for role in {messages[i].role: None for i in new}:
        without = [m._replace(name=None) if i in new and m.role == role else m for i, m in enumerate(messages)]
        if rendered is not None and rendered == _rendered(chat, without):
            where = f"messages.{min(i for i in new if messages[i].role == role)}.name"
            raise bad_request(f"{where}: the target's chat template writes no names of this role; leave it out", where)


def text_ids(tokenizer: Tokenizer, text: str, add_special_tokens: bool = True) -> list[int]:
    """Token ids of plain text, by default with what the tokenizer puts before every text."""
    ids: list[int] = tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)["input_ids"]
    return ids


def check_length(prompt_ids: Sequence[int], limit: int, param: str) -> None:
    """Raise ApiError where prompt and one token of an answer are longer than the context."""
    if not prompt_ids:
        raise bad_request(f"{param}: it is empty; give at least one token", param)
    if len(prompt_ids) >= limit:
        raise bad_request(
            f"{param}: it has {len(prompt_ids)} tokens, and prompt and answer together may have {limit}: shorten it",
            param,
            "context_length_exceeded",
        )


def _rendered(chat: ChatTemplate, messages: Sequence[Message]) -> str | None:
    """The messages as text; None where the template refuses them."""
    try:
        return chat.text(messages)
    except DataError:
        return None


def _message(given: ChatMessage, where: str) -> Message:
    if given.role != "assistant":
        for name in ("tool_calls", "reasoning_content", "reasoning", "refusal", "annotations"):
            if getattr(given, name) is not None:
                raise bad_request(f"{where}.{name}: only messages of the assistant have it", f"{where}.{name}")
    if given.role == "tool" and given.tool_call_id is None:
        raise bad_request(f"{where}.tool_call_id: missing; name the call that this answers", f"{where}.tool_call_id")
    if given.role != "tool" and given.tool_call_id is not None:
        raise bad_request(f"{where}.tool_call_id: only messages of a tool have it", f"{where}.tool_call_id")
    calls = tuple(_call(call, i, f"{where}.tool_calls.{i}") for i, call in enumerate(given.tool_calls or []))
    return Message(
        _ROLES.get(given.role, given.role),
        _content(given, where),
        calls,
        given.name,
        given.tool_call_id,
        _thoughts(given, where),
    )


def _content(given: ChatMessage, where: str) -> str:
    """What a message says."""
    if given.refusal is not None and given.content:
        raise bad_request(f"{where}.refusal: it stands in place of content; leave one out", f"{where}.refusal")
    if given.content is None and given.refusal is None and not given.tool_calls:
        raise bad_request(f"{where}.content: missing; say something", f"{where}.content")
    if isinstance(given.content, list):
        return "".join(part.text for part in given.content)
    return given.content or given.refusal or ""


def _thoughts(given: ChatMessage, where: str) -> str | None:
    """What was thought before a message was said, under either of its names."""
    older, later = given.reasoning_content, given.reasoning
    if older is not None and later is not None and older != later:
        raise bad_request(f"{where}.reasoning: it differs from reasoning_content; give one", f"{where}.reasoning")
    return later if older is None else older


def _call(given: ToolCallPart, place: int, where: str) -> ToolCall:
    if given.index not in (None, place):
        raise bad_request(f"{where}.index: it is {given.index}, but the call is number {place}", f"{where}.index")
    param = f"{where}.function.arguments"
    try:
        arguments: Any = json.loads(given.function.arguments or "{}")
    except (ValueError, RecursionError) as error:
        raise bad_request(f"{param}: not valid JSON ({error})", param) from None
    if not isinstance(arguments, dict):
        raise bad_request(f"{param}: expected a JSON object", param)
    check_text(arguments, param)  # escapes inside the text of a text
    return ToolCall(given.function.name, arguments, given.id)
