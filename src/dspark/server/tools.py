"""Tools in: how a request's functions reach the model, and the grammar where one of them must be called."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from dspark.data.chat import ChatTemplate
from dspark.data.conversation import Message
from dspark.server.errors import bad_request
from dspark.server.schemas import ChatRequest, NamedTool, Tool

Style = Literal["tagged", "bare"]
OPEN, CLOSE = "<tool_call>", "</tool_call>"

_PROMPT = (
    "You can call these functions, one JSON object a line:\n{tools}\nTo call one, write nothing but "
    f'{OPEN}\n{{{{"name": "NAME", "arguments": {{{{"PARAMETER": "VALUE"}}}}}}}}\n{CLOSE}'
)


@dataclass(frozen=True)
class ToolUse:
    """What a request's tools come to.

    `style` is how the model writes a call: tagged, JSON between <tool_call> and </tool_call> (Hermes, Qwen), or bare,
    JSON alone (Llama 3, Mistral). `forced`: the answer is the JSON of one call, after the text `opening`.
    """

    names: tuple[str, ...] = ()
    style: Style = "tagged"
    in_template: tuple[dict[str, Any], ...] = ()  # for the chat template
    in_prompt: str = ""  # for a system message, where the template knows no tools
    forced: bool = False
    opening: str = ""
    schema: dict[str, Any] | None = None  # of the answer, where forced
    single: bool = False  # no more than one call

    @property
    def active(self) -> bool:
        """Whether calls are looked for in the answer."""
        return bool(self.names)

    def told(self, messages: Sequence[Message]) -> list[Message]:
        """The messages with what they must say about the tools."""
        if not self.in_prompt:
            return list(messages)
        if messages and messages[0].role == "system":
            first = messages[0]
            return [first._replace(content=f"{first.content}\n\n{self.in_prompt}"), *messages[1:]]
        return [Message("system", self.in_prompt), *messages]


def tool_use(body: ChatRequest, chat: ChatTemplate) -> ToolUse:
    """Decide how a request's tools are used. Raises ApiError naming the field at fault."""
    tools = body.tools or []
    choice = body.tool_choice or ("auto" if tools else "none")
    if not tools:
        for name in ("tool_choice", "parallel_tool_calls"):
            if getattr(body, name) not in (None, "none"):
                raise bad_request(f"{name}: it goes with tools alone", name)
    use = told_of(tools, chat)
    if choice == "none" or not tools:
        return ToolUse()
    use = replace(use, single=body.parallel_tool_calls is False)
    forced = _forced(body, tools, choice)
    if not forced:
        return use
    arguments = "parameters" if "<|python_tag|>" in _template(chat) else "arguments"
    opening = f"{OPEN}\n" if use.style == "tagged" else ""
    return replace(use, forced=True, opening=opening, schema=_call_schema(forced, arguments))


def told_of(tools: Sequence[Tool], chat: ChatTemplate) -> ToolUse:
    """How the model is told of tools, one of which it may call. Raises ApiError where two have the same name."""
    names = tuple(tool.function.name for tool in tools)
    if len(set(names)) < len(names):
        raise bad_request("tools: two functions have the same name", "tools")
    if not tools:
        return ToolUse()
    template = _template(chat)
    knows = re.search(r"\btools\b", template) is not None
    described = [_described(tool) for tool in tools]
    return ToolUse(
        names=names,
        style="bare" if knows and OPEN not in template else "tagged",
        in_template=tuple(described) if knows else (),
        in_prompt="" if knows else _PROMPT.format(tools="\n".join(json.dumps(d["function"]) for d in described)),
    )


def _forced(body: ChatRequest, tools: Sequence[Tool], choice: str | NamedTool) -> list[Tool]:
    """The tools one of which must be called; none where the model decides."""
    if isinstance(choice, NamedTool):
        forced = [tool for tool in tools if tool.function.name == choice.function.name]
        if not forced:
            raise bad_request(f"tool_choice: {choice.function.name!r} is none of the tools", "tool_choice")
    else:
        forced = list(tools) if choice == "required" else []
    for i, tool in enumerate(tools):
        if tool.function.strict and tool not in forced:
            where = f"tools.{i}.function.strict"
            raise bad_request(f"{where}: a schema binds only where tool_choice is required, or names it", where)
    other = "response_format" if body.response_format is not None and body.response_format.type != "text" else None
    other = "structured_outputs" if body.structured_outputs is not None else other
    if other and forced:
        raise bad_request(f"{other}: with this tool_choice the answer is a call; leave it out", other)
    return forced


def _template(chat: ChatTemplate) -> str:
    return str(chat.tokenizer.chat_template or "")


def _described(tool: Tool) -> dict[str, Any]:
    function = tool.function
    words = {"name": function.name, "description": function.description or "", "parameters": _parameters(tool)}
    return {"type": "function", "function": words}


def _parameters(tool: Tool) -> dict[str, Any]:
    return tool.function.parameters or {"type": "object", "properties": {}}


def _call_schema(tools: Sequence[Tool], arguments: str) -> dict[str, Any]:
    """The JSON of one call of one of the tools."""
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": tool.function.name}, arguments: _parameters(tool)},
            "required": ["name", arguments],
            "additionalProperties": False,
        }
        for tool in tools
    ]
    return calls[0] if len(calls) == 1 else {"anyOf": calls}
