"""Conversations as training rows: token ids and a loss mask, from the difference between rendered prefixes.

No template is known by name and none needs generation markers. For each assistant message, the rendering of the
messages before it plus the generation prompt shows where its answer begins, and the rendering of the messages up to
and including it shows where the answer ends. The whole text is tokenised once, and character spans become token spans
through the tokenizer's offsets.

Supervised: the answer's words, its tool calls and its end of turn. Not supervised: the separator after the end of turn
(a target never generates it) and an empty thinking block that the template puts in by itself. The row ends with its
last answer.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from dspark.data.chat import ChatTemplate
from dspark.data.conversation import Conversation, Message
from dspark.errors import DataError
from dspark.log import get_logger

_log = get_logger(__name__)

# What a template writes for an answer without thoughts; the opening tag may belong to the generation prompt.
_EMPTY_THOUGHT = re.compile(r"\s*(?:<think(?:ing)?>\s*)?</think(?:ing)?>\s*|\s*(?:\[THINK\]\s*)?\[/THINK\]\s*")

Span = tuple[int, int]  # [start, end), in characters or in tokens


class SkipReason(StrEnum):
    """Why a conversation gives no training row."""

    NO_ANSWER = "no assistant message with content after a message to answer"
    REFUSED = "the chat template refuses the messages"
    NO_DIFFERENCE = "the rendered prefixes do not show where an answer begins and ends"
    CUT = "every answer lies beyond max_length"
    TOO_SHORT = "no two neighbouring supervised tokens"


class RowRefused(DataError):
    """A conversation that gives no training row; `reason` says why."""

    def __init__(self, reason: SkipReason, detail: str = "") -> None:
        super().__init__(detail or str(reason))
        self.reason = reason


@dataclass(frozen=True)
class Rendered:
    """A training row: token ids, a mask of 0 and 1 of the same length, and the supervised token spans in order."""

    token_ids: list[int]
    loss_mask: list[int]
    spans: list[Span]
    source: str
    id: str | None = None


def render_all(
    chat: ChatTemplate, conversations: Iterable[Conversation], max_length: int, skipped: Counter[SkipReason]
) -> Iterator[Rendered]:
    """Yield the row of each conversation that has one; count the others in `skipped` and log the counts at the end."""
    for conversation in conversations:
        try:
            yield render(chat, conversation, max_length)
        except RowRefused as refusal:
            skipped[refusal.reason] += 1
    if skipped:
        _log.warning("skipped %d conversations: %s", skipped.total(), "; ".join(f"{n} {r}" for r, n in skipped.items()))


def render(chat: ChatTemplate, conversation: Conversation, max_length: int) -> Rendered:
    """Render one conversation to at most `max_length` tokens.

    Raises `RowRefused` when nothing in it can be trained on; an answer that the rendered prefixes do not locate is left
    unsupervised, and the row is refused only when no answer remains.
    """
    messages = conversation.messages
    answers = [i for i, message in enumerate(messages) if i > 0 and _says_something(message)]
    if not answers:
        raise RowRefused(SkipReason.NO_ANSWER)
    messages = messages[: answers[-1] + 1]
    chat = chat.with_tools(conversation.tools)
    try:
        text, spans = _supervised_text(chat, messages, answers)
    except DataError as error:
        raise RowRefused(SkipReason.REFUSED, str(error)) from None
    if not spans:
        raise RowRefused(SkipReason.NO_DIFFERENCE)
    if not conversation.finished and spans[-1].index == answers[-1]:
        spans[-1] = spans[-1].without_end_of_turn(chat, text)
    token_ids, offsets = _tokenise(chat, text[: spans[-1].end])
    token_spans = [_token_span(offsets, span.start, span.end) for span in spans]
    return _cut(token_ids, token_spans, max_length, conversation)


def _says_something(message: Message) -> bool:
    return message.role == "assistant" and bool(message.content.strip() or message.tool_calls)


@dataclass(frozen=True)
class _Answer:
    """The characters [start, end) of the rendered text that answer message `index` supervises."""

    index: int
    start: int
    end: int

    def without_end_of_turn(self, chat: ChatTemplate, text: str) -> "_Answer":
        """The answer up to its last word."""
        end = self.end
        while True:
            end = self.start + len(text[self.start : end].rstrip())
            token = chat.special_at_end(text[self.start : end])
            if token is None:
                return _Answer(self.index, self.start, end)
            end -= len(token)


def _supervised_text(chat: ChatTemplate, messages: Sequence[Message], answers: list[int]) -> tuple[str, list[_Answer]]:
    """The rendered text, and what it shows of each answer."""
    text = chat.text(messages)
    text += _marker_after(chat, messages, text)
    located = (_locate(chat, messages, index, text) for index in answers)
    return text, [answer for answer in located if answer is not None and answer.end > answer.start]


def _marker_after(chat: ChatTemplate, messages: Sequence[Message], text: str) -> str:
    """Where a template closes a turn with the next role's marker: what the target generates to end the last answer."""
    if chat.special_at_end(text.rstrip()) is not None:
        return ""
    try:
        longer = chat.text((*messages, Message("tool" if messages[-1].tool_calls else "user", "?")))
    except DataError:
        return ""
    if not longer.startswith(text):
        return ""
    return longer[len(text) : len(text) + _next_marker(chat, longer[len(text) :])]


def _next_marker(chat: ChatTemplate, following: str) -> int:
    """Length of the role marker that `following` begins with, blanks before it included; 0 if there is none."""
    marker = following.lstrip()
    token = chat.special_at_start(marker)
    if token is None or token == chat.tokenizer.bos_token:
        return 0
    return len(following) - len(marker) + len(token)


def _locate(chat: ChatTemplate, messages: Sequence[Message], index: int, text: str) -> _Answer | None:
    """Find what answer `index` supervises in `text`, or None where the prefixes do not tell."""
    through = chat.text(messages[: index + 1])
    content = _body(chat, messages[: index + 1], through)
    start = _answer_start(chat, messages[:index], content, text)
    if start is None:
        return None
    if text.startswith(through):
        end = len(through)
    else:  # the template rewrites earlier turns, or treats the last one differently
        found = _end_by_content(content, through, text, start)
        if found is None:
            return None
        end = found
    thought = _EMPTY_THOUGHT.match(text, start, end)
    if thought:
        start = thought.end()
    trimmed = start + len(text[start:end].rstrip())
    if chat.special_at_end(text[start:trimmed]) is not None:
        end = trimmed
    elif chat.special_at_end(through.rstrip()) is None:
        end += _next_marker(chat, text[end:])
    return _Answer(index, start, end)


def _body(chat: ChatTemplate, messages: Sequence[Message], through: str) -> str:
    """What surely stands in the text of the last of `messages`: its words, or all that the template makes of them.

    The latter where tool calls or thoughts come with the words. `through` is the rendering of `messages`.
    """
    *before, answer = messages
    if not (answer.tool_calls or answer.reasoning_content):
        return answer.content.strip()
    start = _num_shared(chat.text(before, add_generation_prompt=True), through)
    thought = _EMPTY_THOUGHT.match(through, start)
    return through[thought.end() if thought else start :].strip()


def _answer_start(chat: ChatTemplate, before: Sequence[Message], content: str, text: str) -> int | None:
    """Where the answer to the messages `before` begins: after what `text` shares with the generation prompt."""
    prompt = chat.text(before, add_generation_prompt=True)
    if text.startswith(prompt):
        return len(prompt)
    history_end = _num_shared(chat.text(before), prompt)
    start = _num_shared(prompt, text)
    if start < history_end:
        return None
    found = text.find(content, history_end)  # the answer itself may share a few letters with the generation prompt
    return min(start, found) if found >= 0 else start


def _end_by_content(content: str, through: str, text: str, start: int) -> int | None:
    """Where the answer ends: after its content and the closing that both renderings write behind it."""
    found = text.find(content, start)
    gap = text[start:found]
    if found < 0 or (gap.strip() and not _EMPTY_THOUGHT.fullmatch(gap)):
        return None
    end = found + len(content)
    _, known, closing = through.rpartition(content)
    closing = closing.rstrip() if known else ""
    return end + len(closing) if text.startswith(closing, end) else end


def _num_shared(one: str, other: str) -> int:
    """How many characters both texts begin with."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(one), len(other)))


def _tokenise(chat: ChatTemplate, text: str) -> tuple[list[int], list[Span]]:
    """Token ids of `text` and the characters that each covers."""
    if not chat.tokenizer.is_fast:
        raise DataError("the tokenizer gives no character offsets: use a target that has a tokenizer.json")
    encoding = chat.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    return encoding["input_ids"], encoding["offset_mapping"]


def _token_span(offsets: list[Span], start: int, end: int) -> Span:
    """The tokens that share a character with [start, end), and those between them."""
    inside = [i for i, (first, last) in enumerate(offsets) if first < end and last > start]
    return (inside[0], inside[-1] + 1) if inside else (0, 0)


def _cut(token_ids: list[int], spans: list[Span], max_length: int, conversation: Conversation) -> Rendered:
    """Cut a row to `max_length` tokens and mask it; refuse it when nothing is left to train on."""
    kept = [(start, min(end, max_length)) for start, end in spans if start < min(end, max_length)]
    if not kept:
        raise RowRefused(SkipReason.CUT)
    if all(end - start < 2 for start, end in kept):
        raise RowRefused(SkipReason.TOO_SHORT)
    token_ids = token_ids[:max_length]
    mask = [0] * len(token_ids)
    for start, end in kept:
        mask[start:end] = [1] * (end - start)
    return Rendered(token_ids, mask, kept, conversation.source, conversation.id)
