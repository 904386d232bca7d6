"""Tools out: calls found in an answer's text as it comes."""

from __future__ import annotations

import json
import secrets
from typing import Any, NamedTuple

from dspark.server.reply import Json
from dspark.server.tools import CLOSE, OPEN, ToolUse


class Read(NamedTuple):
    """What a piece of an answer comes to: words, and whole calls in OpenAI's shape."""

    words: str
    calls: list[Json]


class ToolReader:
    """Reads one answer. Text that may turn out to be a call is held back until it is known to be one or not."""

    def __init__(self, use: ToolUse) -> None:
        self._use = use
        self._held = ""
        self._spoke = False
        self.num_calls = 0

    def push(self, text: str, last: bool) -> Read:
        """The next piece of text; `last` says that no more will come."""
        self._held += text
        if not self._use.active:
            return Read(self._let_go(len(self._held)), [])
        if self._use.forced or self._use.style == "bare":
            return self._push_bare(last)
        return self._push_tagged(last)

    def _push_bare(self, last: bool) -> Read:
        """The whole answer is JSON, or none of it."""
        may_be_call = not self._spoke and (self._use.forced or self._held.lstrip()[:1] in ("", "{", "["))
        if may_be_call and not last:
            return Read("", [])
        if may_be_call and (calls := self._calls(self._held)) is not None:
            self._held = ""
            return Read("", calls)
        self._spoke = True
        return Read(self._let_go(len(self._held)), [])

    def _push_tagged(self, last: bool) -> Read:
        words, calls = "", []
        while True:
            start = self._held.find(OPEN)
            if start < 0:
                break
            end = self._held.find(CLOSE, start)
            if end < 0 and not last:
                break
            inner = self._held[start + len(OPEN) : end if end >= 0 else None]
            found = self._calls(inner)
            if found is not None:
                words += self._let_go(start).rstrip()
                self._held = self._held[len(OPEN) + len(inner) + len(CLOSE) :].lstrip()
                calls += found
            else:  # no call after all
                words += self._let_go(end + len(CLOSE) if end >= 0 else len(self._held))
        if last:
            words += self._let_go(len(self._held))
            return Read(words.rstrip() if self.num_calls else words, calls)
        return Read(words + self._let_go(self._num_sure()), calls)

    def _num_sure(self) -> int:
        """How much of what is held back is words for certain: all before a tag, or the start of one, or blanks."""
        start = self._held.find(OPEN)
        if start < 0:
            tails = (n for n in range(len(OPEN), 0, -1) if self._held.endswith(OPEN[:n]))
            start = len(self._held) - next(tails, 0)
        return len(self._held[:start].rstrip())

    def _let_go(self, count: int) -> str:
        words, self._held = self._held[:count], self._held[count:]
        return words

    def _calls(self, text: str) -> list[Json] | None:
        """The calls that a piece of JSON makes, without those beyond a single one; None if it is anything else."""
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            return None
        values = value if isinstance(value, list) else [value]
        found = [call for item in values if (call := self._call(item)) is not None]
        if len(found) < len(values) or not found:
            return None
        if self._use.single:
            found = found[: max(0, 1 - self.num_calls)]
        for call in found:
            call["index"] = self.num_calls
            self.num_calls += 1
        return found

    def _call(self, value: Any) -> Json | None:
        if not isinstance(value, dict) or value.get("name") not in self._use.names:
            return None
        arguments = value.get("arguments", value.get("parameters", {}))
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        function = {"name": value["name"], "arguments": arguments}
        return {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}
