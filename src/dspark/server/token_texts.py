"""Single tokens as text and bytes, for log probabilities; and an answer's tokens with their origins."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache

from dspark.engine.request import Origin, SamplingParams, TokenLogprob
from dspark.engine.text import TextStream
from dspark.models.tokenizer import Tokenizer
from dspark.server.reply import Json

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")  # how SentencePiece writes a token that is a single byte
_LOWEST = -9999.0  # what OpenAI's API gives for a token that is impossible


@lru_cache(maxsize=1)
def _bytes_of_signs() -> dict[str, int]:
    """The signs by which byte-level BPE (GPT-2) writes bytes: printable ones stand for themselves."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


class TokenTexts:
    """The texts of one tokenizer's tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._core = tokenizer.backend_tokenizer

    def text(self, token_id: int) -> str:
        """What the token adds to a text; bytes that are no character by themselves become U+FFFD."""
        text: str = self._core.decode([token_id], skip_special_tokens=False)
        name = self._core.id_to_token(token_id) or ""
        return " " + text if name.startswith("\u2581") and not text.startswith(" ") else text

    def bytes(self, token_id: int) -> list[int] | None:
        """Its bytes in UTF-8; None where the tokenizer does not tell."""
        text = self.text(token_id)
        if "\ufffd" not in text:
            return list(text.encode())
        name, signs = self._core.id_to_token(token_id) or "", _bytes_of_signs()
        if byte := _BYTE.fullmatch(name):
            return [int(byte[1], 16)]
        return [signs[sign] for sign in name] if all(sign in signs for sign in name) else None

    def chat(self, entries: Iterable[TokenLogprob]) -> Json:
        """Log probabilities as chat completions have them."""
        content = [
            self._entry(entry.token_id, entry.logprob)
            | {"top_logprobs": [self._entry(token_id, logprob) for token_id, logprob in entry.top]}
            for entry in entries
        ]
        return {"content": content, "refusal": None}

    def plain(self, entries: Iterable[TokenLogprob], offset: int) -> Json:
        """Log probabilities as text completions have them; `offset` is how many characters stand before them."""
        found: Json = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for entry in entries:
            text = self.text(entry.token_id)
            found["tokens"].append(text)
            found["token_logprobs"].append(_finite(entry.logprob))
            found["top_logprobs"].append({self.text(token): _finite(logprob) for token, logprob in entry.top})
            found["text_offset"].append(offset)
            offset += len(text)
        return found

    def _entry(self, token_id: int, logprob: float) -> Json:
        return {"token": self.text(token_id), "logprob": _finite(logprob), "bytes": self.bytes(token_id)}


class OriginTexts:
    """The text that each token of one answer adds, with the token's origin."""

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self._stream = TextStream(tokenizer.backend_tokenizer.decode, params.stop, params.min_tokens)

    def push(self, token_ids: list[int], origins: list[Origin], last: bool) -> list[Json]:
        """The next tokens; `last` says that no more will come."""
        listed = [
            {"text": self._stream.push([token_id])[1], "origin": origin}
            for token_id, origin in zip(token_ids, origins, strict=True)
        ]
        if last and listed:
            listed[-1]["text"] += self._stream.finish()
        return listed


def _finite(logprob: float) -> float:
    return max(logprob, _LOWEST)
