"""Grammars that answers follow: JSON schema, regular expression, choice, Lark or GBNF, by llguidance.

A matcher's state is the committed answer. Masks along drafts are computed from there and leave it where it was.
"""

from __future__ import annotations

import json
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dspark.engine.request import SamplingParams
from dspark.errors import RequestError
from dspark.log import get_logger
from dspark.models.target import Target

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

_KEPT_GRAMMARS = 32
# Blanks between JSON tokens, unless the schema's x-guidance says otherwise: room for indentation, but an end to it, or
# a weak model writes blanks until max_tokens.
_JSON_BLANKS = r"[ \t\n\r]{1,32}"

_log = get_logger(__name__)


class Grammars:
    """Compiles grammars for one target, and masks the rows of a round. Costs nothing before the first grammar."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._compiled: dict[str, LLMatcher] = {}  # matchers at the start, of the grammars used last

    def compile(self, params: SamplingParams) -> LLMatcher | None:
        """The matcher of a request, at the start of its answer; None when it has no grammar.

        Raises RequestError, naming the field, for a grammar that is malformed or not supported, and when llguidance is
        not installed.
        """
        if not params.grammar_fields:
            return None
        (field,) = params.grammar_fields
        key = json.dumps([field, getattr(params, field)])
        matcher = self._compiled.pop(key, None) or self._compile(field, getattr(params, field))
        self._compiled[key] = matcher
        if len(self._compiled) > _KEPT_GRAMMARS:
            del self._compiled[next(iter(self._compiled))]
        return matcher.deep_copy()

    def masks(self, along: list[tuple[LLMatcher, list[int]]]) -> tuple[NDArray[np.bool_], NDArray[np.int32]]:
        """Which tokens may follow each answer, and each prefix of its drafts.

        A matcher with g drafts has g + 1 rows, one after the other; returned are the rows that a grammar bounds [R] and
        a bit per token [R, ceil(V / 32)], the lowest first. Rows after a draft that breaks the grammar are not bounded:
        the draft has probability 0, so they are never reached.
        """
        starts = np.cumsum([0, *(len(drafts) + 1 for _, drafts in along)])
        words = np.full((starts[-1], -(-self._target.config.vocab_size // 32)), -1, dtype=np.int32)
        bounded = np.zeros(len(words), dtype=np.bool_)
        alone: list[tuple[LLMatcher, int]] = []
        drafted: list[tuple[LLMatcher, int, list[int]]] = []
        for (matcher, drafts), start in zip(along, starts, strict=False):
            followed = matcher.validate_tokens(drafts) if drafts else 0
            bounded[start : start + followed + 1] = True
            if followed:
                drafted.append((matcher, int(start), drafts[:followed]))
            else:
                alone.append((matcher, int(start)))
        where = (words.ctypes.data, words.shape[1] * words.itemsize, len(words))
        if alone:
            self._executor.unsafe_compute_mask_ptr(alone, *where)
        if drafted:
            self._executor.unsafe_compute_mask_ptr_with_draft_token(drafted, *where)
        for (matcher, _), start in zip(along, starts, strict=False):
            if matcher.is_error():  # a limit of the parser: no token, so that the request ends with an error
                _log.warning("a grammar can not go on: %s", matcher.get_error().splitlines()[0])
                words[start] = 0
        return bounded, words

    def _compile(self, field: str, value: Any) -> LLMatcher:
        try:
            from llguidance import LLMatcher
        except ImportError:
            raise RequestError(
                f"{field}: grammars need llguidance, which is not installed: pip install llguidance"
            ) from None
        try:
            tokenizer = self._tokenizer
        except ValueError as error:
            raise RequestError(f"{field}: llguidance can not read this target's tokenizer ({error})") from None
        try:
            matcher = LLMatcher(tokenizer, _grammar_text(field, value), log_level=0)
        except ValueError as error:  # GBNF is parsed in Python
            raise RequestError(f"{field}: {error}") from None
        if matcher.is_error():
            raise RequestError(f"{field}: {matcher.get_error()}")
        return matcher

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        from llguidance.hf import from_tokenizer

        tokenizer, vocab_size = self._target.tokenizer, self._target.config.vocab_size
        ends = [token_id for token_id in self._target.eos_token_ids if token_id < len(tokenizer)]
        return from_tokenizer(tokenizer, n_vocab=vocab_size, eos_token=ends)

    @cached_property
    def _executor(self) -> LLExecutor:
        from llguidance import LLExecutor

        return LLExecutor()


def _grammar_text(field: str, value: Any) -> str:
    """A grammar in llguidance's own form. Raises ValueError for GBNF that is malformed."""
    from llguidance import grammar_from

    match field:
        case "json_schema":
            return grammar_from("json_schema", json.dumps({"x-guidance": {"whitespace_pattern": _JSON_BLANKS}} | value))
        case "choice":
            return grammar_from("choice", json.dumps(value))
        case "regex":
            return grammar_from("regex", value)
        case _:
            return grammar_from("grammar", value)
