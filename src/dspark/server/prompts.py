"""From what a request says to token ids."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from dspark.data.chat import ChatTemplate
from dspark.data.conversation import Message, ToolCall
from dspark.errors import DataError
from dspark.models.tokenizer import Tokenizer
from dspark.server.errors import bad_request
from dspark.server.schemas import ChatMessage, ToolCallPart

_ROLES = {"developer": "system"}  # the later name of the same role


def messages_of(given: Sequence[ChatMessage]) -> list[Message]:
    """The messages as chat templates take them. Raises ApiError naming the field at fault."""
    return [_message(message, f"messages.{i}") for i, message in enumerate(given)]


def render(chat: ChatTemplate, messages: Sequence[Message], opening: str = "") -> list[int]:
    """Token ids up to where the answer begins; `opening` is text of the answer that is given.

    Raises ApiError where the template refuses the messages.
    """
    try:
        return chat.encode(chat.text(messages, add_generation_prompt=True) + opening)
    except DataError as error:
        raise bad_request(f"messages: {error}", "messages") from None


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


def _message(given: ChatMessage, where: str) -> Message:
    if given.role != "assistant":
        for name in ("tool_calls", "reasoning_content"):
            if getattr(given, name) is not None:
                raise bad_request(f"{where}.{name}: only messages of the assistant have it", f"{where}.{name}")
    if given.role == "tool" and given.tool_call_id is None:
        raise bad_request(f"{where}.tool_call_id: missing; name the call that this answers", f"{where}.tool_call_id")
    if given.role != "tool" and given.tool_call_id is not None:
        raise bad_request(f"{where}.tool_call_id: only messages of a tool have it", f"{where}.tool_call_id")
    if given.content is None and not given.tool_calls:
        raise bad_request(f"{where}.content: missing; say something", f"{where}.content")
    content = given.content
    if isinstance(content, list):
        content = "".join(part.text for part in content)
    calls = tuple(_call(call, f"{where}.tool_calls.{i}") for i, call in enumerate(given.tool_calls or []))
    return Message(
        _ROLES.get(given.role, given.role),
        content or "",
        calls,
        given.name,
        given.tool_call_id,
        given.reasoning_content,
    )


def _call(given: ToolCallPart, where: str) -> ToolCall:
    param = f"{where}.function.arguments"
    try:
        arguments: Any = json.loads(given.function.arguments or "{}")
    except (ValueError, RecursionError) as error:
        raise bad_request(f"{param}: not valid JSON ({error})", param) from None
    if not isinstance(arguments, dict):
        raise bad_request(f"{param}: expected a JSON object", param)
    return ToolCall(given.function.name, arguments, given.id)
