"""The writing system of a text, as a rough stand-in for its language: nothing is guessed beyond the letters."""

from __future__ import annotations

import unicodedata
from collections import Counter

MIXED, NONE = "mixed", "no letters"
_SHARE = 0.75  # of the letters, for a text to count as of one script
_KANA = 0.1  # of kana among Chinese characters and kana, for a text to count as Japanese
_NAMES = {"CJK": "chinese", "HIRAGANA": "japanese", "KATAKANA": "japanese", "HANGUL": "korean"}


def script(text: str) -> str:
    """Name of the script that three quarters of the letters belong to, "mixed", or "no letters".

    Scripts of one language only have its name (Chinese, Japanese, Korean); "latin" covers English, code and many more.
    """
    letters = Counter(_script(letter) for letter in text if letter.isalpha())
    if not letters:
        return NONE
    kana, total = letters["japanese"], letters.total()
    if kana and kana >= _KANA * (kana + letters["chinese"]):  # Japanese is written with both
        letters["japanese"] += letters.pop("chinese", 0)
    name, count = letters.most_common(1)[0]
    return name if count >= _SHARE * total else MIXED


def _script(letter: str) -> str:
    first = unicodedata.name(letter, "other").split(" ", 1)[0]
    return _NAMES.get(first, first.lower())
