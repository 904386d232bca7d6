"""Prompts for the target to answer, and the texts that must not be among them."""

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from dspark.data.conversation import Conversation, read_conversations
from dspark.draws import draw
from dspark.errors import DataError
from dspark.log import get_logger

_log = get_logger(__name__)

_RUN = 13  # words: the window of the GPT-3 paper's contamination check (arXiv 2005.14165, appendix C)
_SHARED = 3  # texts: above this a run is boilerplate


@dataclass(frozen=True)
class Prompt:
    """User turns to be answered one after the other, after `system` if there is one. `id` is unique in a run."""

    id: str
    source: str
    path: Path
    turns: tuple[str, ...]
    system: str | None = None


def read_prompts(paths: Iterable[str | Path], skip_bad: bool = False) -> Iterator[Prompt]:
    """Yield the prompts of JSON-lines files (row forms: see `read_conversations`); answers in them are left out.

    A row without an id is named after its file and its number among the file's rows. Raises `DataError` naming the
    file for a malformed row, and when one id comes twice; rows without a user turn are left out and counted.
    """
    seen: set[str] = set()
    for path in map(Path, paths):
        empty = 0
        for number, conversation in enumerate(read_conversations([path], skip_bad), start=1):
            prompt = _prompt(conversation, path, number)
            if prompt is None:
                empty += 1
                continue
            if prompt.id in seen:
                raise DataError(f"{path}: the id {prompt.id!r} comes twice: ids must be unique over all files")
            seen.add(prompt.id)
            yield prompt
        if empty:
            _log.warning("%s: skipped %d rows without a user turn", path, empty)


def select_prompts(paths: Iterable[Path], limit: int | None, seed: int, skip_bad: bool = False) -> list[Prompt]:
    """Of each file the first `limit` prompts (None: all) in an order that the seed decides, mixed in that order.

    A higher limit adds to the prompts of the lower one. Raises `DataError` as `read_prompts` does.
    """
    by_file: dict[Path, list[Prompt]] = {}
    for prompt in read_prompts(paths, skip_bad):
        by_file.setdefault(prompt.path, []).append(prompt)

    def order(prompt: Prompt) -> float:
        return draw(seed, "order", prompt.id)

    chosen = [prompt for prompts in by_file.values() for prompt in sorted(prompts, key=order)[:limit]]
    return sorted(chosen, key=order)


def asked(conversation: Conversation) -> tuple[tuple[str, ...], str | None]:
    """The user turns of a conversation that are not empty, and the system message that it begins with."""
    turns = tuple(m.content for m in conversation.messages if m.role == "user" and m.content.strip())
    first = conversation.messages[0]
    return turns, first.content if first.role == "system" else None


def _prompt(conversation: Conversation, path: Path, number: int) -> Prompt | None:
    turns, system = asked(conversation)
    if not turns:
        return None
    return Prompt(conversation.id or f"{path.stem}:{number}", conversation.source, path, turns, system)


def normalise(text: str) -> str:
    """Text as prompts are compared: compatibility forms and case folded, punctuation dropped, single blanks."""
    return " ".join(_words(text))


class Exclusions:
    """Texts that a prompt must not repeat, usually evaluation sets: as a whole, or any run of 13 words of them.

    A run that more than three texts share is the set's wording of its task, not its content, and may be repeated.
    """

    def __init__(self, texts: Iterable[str] = ()) -> None:
        self._whole: set[str] = set()
        counts: Counter[tuple[str, ...]] = Counter()
        for text in texts:
            words = _words(text)
            self._whole.add(" ".join(words))
            counts.update(set(_runs(words)))
        self._runs = {run for run, count in counts.items() if count <= _SHARED}

    @classmethod
    def read(cls, paths: Iterable[str | Path]) -> "Exclusions":
        """Collect every user turn of JSON-lines files. Raises `DataError`."""
        return cls(m.content for row in read_conversations(paths) for m in row.messages if m.role == "user")

    def __contains__(self, text: str) -> bool:
        words = _words(text)
        return " ".join(words) in self._whole or any(run in self._runs for run in _runs(words))


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", unicodedata.normalize("NFKC", text).casefold())


def _runs(words: list[str]) -> Iterator[tuple[str, ...]]:
    for start in range(len(words) - _RUN + 1):
        yield tuple(words[start : start + _RUN])
