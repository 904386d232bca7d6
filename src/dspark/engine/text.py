"""Token ids to text as they arrive: never half a character, never any part of a stop string."""

from collections.abc import Callable, Sequence

_WINDOW = 16  # ids decoded again at each step before the window moves on
_REPLACEMENT = "\ufffd"  # what decoders write for bytes that are no character (yet)
_LONGEST_CHARACTER = 4  # bytes, and so ids


class TextStream:
    """The text of one answer.

    `decode` turns ids into text (special tokens skipped). A tail of unfinished bytes is held back until it becomes a
    character, and dropped if the answer ends first; text that may be the start of a stop string is held back until it
    is known not to be one. `text` is what has been given out so far. None of the first `min_tokens` ids completes a
    stop string.
    """

    def __init__(self, decode: Callable[[list[int]], str], stop: Sequence[str] = (), min_tokens: int = 0) -> None:
        self._decode = decode
        self._stop = tuple(stop)
        self._longest_stop = max((len(s) for s in stop), default=0)
        self._ids: list[int] = []  # the window: ids whose decoding still matters
        self._boundary = 0  # ids of the window up to where its text last ended in a whole character
        self._decoded = 0  # characters of the window's text already in _complete
        self._complete = ""  # whole characters, stop strings included
        self._given = 0
        self._unstoppable = min_tokens  # ids to come that can not complete a stop string
        self.stopped = False  # a stop string was completed

    @property
    def text(self) -> str:
        """Everything given out so far."""
        return self._complete[: self._given]

    def push(self, token_ids: list[int]) -> tuple[int, str]:
        """Take the next ids; return how many of them count, and the text that is new.

        All of them count unless one completes a stop string: that one is the last, and the text ends before the string.
        """
        if not self._stop:
            self._advance(token_ids)
            return len(token_ids), self._give(len(self._complete))
        for count, token_id in enumerate(token_ids, start=1):
            before = len(self._complete)
            self._advance([token_id])
            if self._unstoppable:
                self._unstoppable -= 1
                continue
            # Strings that end in the new text; what ended before it was none, or is allowed.
            starts = ((s, max(0, before - len(s) + 1)) for s in self._stop)
            found = [at for s, start in starts if (at := self._complete.find(s, start)) >= 0]
            if found:
                self.stopped = True
                self._complete = self._complete[: min(found)]
                return count, self._give(len(self._complete))
        return len(token_ids), self._give(len(self._complete) - self._held())

    def finish(self) -> str:
        """The answer is over: return text that was held back as a possible stop string."""
        return self._give(len(self._complete))

    def _give(self, end: int) -> str:
        new = self._complete[self._given : end]
        self._given += len(new)
        return new

    def _held(self) -> int:
        """Length of the longest tail of the text that starts a stop string."""
        tail = self._complete[max(0, len(self._complete) - self._longest_stop + 1) :]
        for length in range(len(tail), 0, -1):
            if any(s.startswith(tail[-length:]) for s in self._stop):
                return length
        return 0

    def _advance(self, token_ids: list[int]) -> None:
        """Decode the window with the new ids and append the whole characters that this yields."""
        text = self._decode(self._ids + token_ids)
        unfinished = text.endswith(_REPLACEMENT)
        if unfinished and len(token_ids) > 1:
            for token_id in token_ids:
                self._advance([token_id])
            return
        self._ids = self._ids + token_ids
        if not unfinished:
            whole = len(text)
        elif len(self._ids) - self._boundary < _LONGEST_CHARACTER:
            whole = len(text.rstrip(_REPLACEMENT))
        else:  # bytes that stayed without meaning for so long are none of a character's
            whole = len(self._decode(self._ids[: 1 - _LONGEST_CHARACTER]))
        self._complete += text[self._decoded : whole]
        self._decoded = max(self._decoded, whole)
        if not unfinished:
            if len(self._ids) > _WINDOW and (kept := self._decode(self._ids[self._boundary :])):
                self._ids, self._decoded = self._ids[self._boundary :], len(kept)
            self._boundary = len(self._ids)
