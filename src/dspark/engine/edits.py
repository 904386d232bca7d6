"""What a request's parameters change in its rows: the state behind it, and the edits of one round.

The state is a function of prompt and committed answer, and catches up with them when the next rows are asked for:
drafts never enter it, so nothing is rolled back. Row i of a round has the answer and the first i drafts before it.

Shapes: B requests, T rows a request, V vocabulary, n places (see spec/edits.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dspark.engine.grammar import Grammars
from dspark.engine.request import Request, SamplingParams
from dspark.errors import RequestError
from dspark.models.target import Target
from dspark.spec.edits import LogitEdits, Places, apply_edits
from dspark.spec.types import DraftBlock, VerifyPlan

if TYPE_CHECKING:
    from llguidance import LLMatcher

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]


class RowEdits(NamedTuple):
    """Edits of one request's rows as columns: row, token, then values; None where there are none of that kind."""

    bias: tuple[Ints, Ints, Floats] | None
    penalties: tuple[Ints, Ints, Floats, Floats] | None
    banned: tuple[Ints, Ints] | None


class TokenCounts:
    """The tokens that penalties bear on, and how often each occurs in the answer."""

    def __init__(self, prompt_ids: Iterable[int]) -> None:
        self._place = {token: i for i, token in enumerate(dict.fromkeys(prompt_ids))}
        self._tokens: Ints = np.array(list(self._place), dtype=np.int64)
        self._counts: Ints = np.zeros_like(self._tokens)

    def advance(self, answer: Sequence[int]) -> None:
        """Count tokens of the answer."""
        for token in answer:
            self._place.setdefault(token, len(self._place))
        if new := len(self._place) - len(self._tokens):
            self._tokens = np.concatenate((self._tokens, np.array(list(self._place)[-new:], dtype=np.int64)))
            self._counts = np.concatenate((self._counts, np.zeros(new, dtype=np.int64)))
        for token in answer:
            self._counts[self._place[token]] += 1

    def along(self, drafts: Sequence[int]) -> tuple[Ints, Ints, Ints]:
        """Row, token and count of every token that occurred before each row."""
        known = len(self._tokens)
        if not drafts:
            return np.zeros(known, dtype=np.int64), self._tokens, self._counts
        new = [token for token in dict.fromkeys(drafts) if token not in self._place]
        tokens = np.concatenate((self._tokens, np.array(new, dtype=np.int64)))
        counts = np.zeros((len(drafts) + 1, len(tokens)), dtype=np.int64)
        np.cumsum(np.array(drafts)[:, None] == tokens, axis=0, out=counts[1:])  # of the drafts before each row
        occurred = counts > 0
        occurred[:, :known] = True
        counts[:, :known] += self._counts
        rows, at = occurred.nonzero()
        return rows, tokens[at], counts[rows, at]


class BadWords:
    """Token sequences that may not be completed, found by the token before their last."""

    def __init__(self, words: Iterable[tuple[int, ...]]) -> None:
        words = list(dict.fromkeys(words))
        self.single = [word[0] for word in words if len(word) == 1]
        self.longest = max((len(word) for word in words), default=0)
        self._by_last: dict[int, list[tuple[int, ...]]] = {}
        for word in words:
            if len(word) > 1:
                self._by_last.setdefault(word[-2], []).append(word)

    def banned(self, history: list[int]) -> list[int]:
        """The tokens that would complete a sequence after the history, whose last `longest` tokens are enough."""
        found = [
            word[-1]
            for word in self._by_last.get(history[-1], ())
            if tuple(history[len(history) - len(word) + 1 :]) == word[:-1]
        ]
        return self.single + found


class RequestEdits:
    """All edits of one request. `words`: token ids of its bad words; `stops`: token ids that end its answer."""

    def __init__(
        self,
        params: SamplingParams,
        prompt_ids: list[int],
        words: list[tuple[int, ...]],
        stops: list[int],
        matcher: LLMatcher | None,
    ) -> None:
        self.matcher = matcher
        self._params = params
        self._bias_tokens: Ints = np.array(list(params.logit_bias), dtype=np.int64)
        self._bias_values: Floats = np.array(list(params.logit_bias.values()), dtype=np.float32)
        self._counts: TokenCounts | None = None
        if penalises(params):
            self._counts = TokenCounts(prompt_ids if params.repetition_penalty != 1 else ())
        self._words = BadWords(words)
        self._prompt_tail = prompt_ids[-self._words.longest :] if words else []
        self._stops = stops
        self._num_seen = 0  # tokens of the answer that the state knows

    def rows(self, answer: list[int], drafts: list[int]) -> RowEdits:
        """The edits of the rows after the answer and after each prefix of the drafts; the state takes in the answer."""
        fresh = answer[self._num_seen :]
        self._num_seen = len(answer)
        if self.matcher is not None and fresh:
            consumed = self.matcher.consume_tokens(fresh)
            assert consumed or self.matcher.is_error(), "a token outside the grammar was put out"
        if self._counts is not None:
            self._counts.advance(fresh)
        return RowEdits(self._bias(len(drafts) + 1), self._penalties(drafts), self._banned(answer, drafts))

    def _bias(self, num_rows: int) -> tuple[Ints, Ints, Floats] | None:
        if not len(self._bias_tokens):
            return None
        rows = np.arange(num_rows).repeat(len(self._bias_tokens))
        return rows, np.tile(self._bias_tokens, num_rows), np.tile(self._bias_values, num_rows)

    def _penalties(self, drafts: list[int]) -> tuple[Ints, Ints, Floats, Floats] | None:
        if self._counts is None:
            return None
        rows, tokens, counts = self._counts.along(drafts)
        factor = np.full(len(rows), self._params.repetition_penalty, dtype=np.float32)
        subtracted = self._params.frequency_penalty * counts + self._params.presence_penalty * (counts > 0)
        return rows, tokens, factor, subtracted.astype(np.float32)

    def _banned(self, answer: list[int], drafts: list[int]) -> tuple[Ints, Ints] | None:
        longest, early = self._words.longest, self._params.min_tokens - len(answer)
        if not longest and early <= 0:
            return None
        history = (self._prompt_tail + answer[-longest:])[-longest:] + drafts if longest else []
        rows: list[int] = []
        tokens: list[int] = []
        for row in range(len(drafts) + 1):
            banned = self._words.banned(history[: len(history) - len(drafts) + row]) if longest else []
            if row < early:
                banned = banned + self._stops
            rows += [row] * len(banned)
            tokens += banned
        return np.array(rows, dtype=np.int64), np.array(tokens, dtype=np.int64)


def penalises(params: SamplingParams) -> bool:
    """Whether any of the penalties is on."""
    return params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0


def make_edits(
    params: SamplingParams, prompt_ids: list[int], stops: Iterable[int], target: Target, grammars: Grammars
) -> RequestEdits | None:
    """The edits that a request asks for, or None. Raises RequestError for what does not fit the target."""
    vocab_size = target.config.vocab_size
    words = bad_word_ids(params, target)
    for field, ids in (("logit_bias", params.logit_bias), ("bad_words", [token for word in words for token in word])):
        if (highest := max(ids, default=0)) >= vocab_size:
            raise RequestError(f"{field}: token id {highest} is outside 0..{vocab_size - 1}: use the target's own ids")
    matcher = grammars.compile(params)
    if not (params.logit_bias or words or params.min_tokens or penalises(params) or matcher):
        return None
    return RequestEdits(params, prompt_ids, words, sorted(t for t in stops if 0 <= t < vocab_size), matcher)


def bad_word_ids(params: SamplingParams, target: Target) -> list[tuple[int, ...]]:
    """Each bad word as token ids; a text at the start of a line and after a blank, which may be other ids."""
    words: list[tuple[int, ...]] = []
    for word in params.bad_words:
        if isinstance(word, tuple):
            words.append(word)
            continue
        texts = (word, f" {word.lstrip()}")
        words += [tuple(target.tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts]
    return words


def edit_logits(
    requests: list[Request], block: DraftBlock, plan: VerifyPlan, logits: Tensor, grammars: Grammars
) -> Tensor:
    """The rows [B, T, V] with every request's edits: the same tensor, changed or not, or a copy.

    A copy, in float32, where the rows are of another dtype, or where a request wants the log probabilities of the rows
    as they were. Batches without edits return at once.
    """
    edited = [(b, request.edits) for b, request in enumerate(requests) if request.edits is not None]
    if not edited:
        return logits
    lens, drafts = plan.verify_lens.tolist(), block.tokens.tolist()
    firsts = [b * logits.shape[1] for b, _ in edited]
    before = [drafts[b][: lens[b] - 1] for b, _ in edited]
    each = [edits.rows(requests[b].token_ids, some) for (b, edits), some in zip(edited, before, strict=True)]
    device = logits.device
    bias, penalties, banned = (_columns(firsts, kind, device) for kind in zip(*each, strict=True))
    found = LogitEdits(
        bias=(Places(*bias[:2]), bias[2]) if bias else None,
        penalties=(Places(*penalties[:2]), penalties[2], penalties[3]) if penalties else None,
        banned=Places(*banned) if banned else None,
        grammar=_masks([edits.matcher for _, edits in edited], before, firsts, grammars, device),
    )
    raw = any(request.params.logprobs is not None and request.params.logprobs_mode == "raw" for request in requests)
    logits = logits.to(torch.float32, copy=raw)
    apply_edits(logits.view(-1, logits.shape[-1]), found)
    return logits


def _masks(
    matchers: list[LLMatcher | None],
    before: list[list[int]],
    firsts: list[int],
    grammars: Grammars,
    device: torch.device,
) -> tuple[Tensor, Tensor] | None:
    """The rows that grammars bound, and their bits; `before`: the drafts of each request, whose rows begin at `firsts`.

    None where no request has a grammar.
    """
    rows_of = zip(matchers, before, firsts, strict=True)
    some = [(matcher, drafts, first) for matcher, drafts, first in rows_of if matcher is not None]
    if not some:
        return None
    bounded, words = grammars.masks([(matcher, drafts) for matcher, drafts, _ in some])
    rows = np.concatenate([first + np.arange(len(drafts) + 1) for _, drafts, first in some])
    return torch.from_numpy(rows[bounded]).to(device), torch.from_numpy(words[bounded]).to(device)


def _columns(
    firsts: list[int], each: Iterable[tuple[NDArray[Any], ...] | None], device: torch.device
) -> list[Tensor] | None:
    """Join one kind of edits of all requests, whose rows begin at `firsts`; None where there are none."""
    some = [(columns[0] + first, *columns[1:]) for first, columns in zip(firsts, each, strict=True) if columns]
    if not some:
        return None
    return [torch.from_numpy(np.concatenate(column)).to(device) for column in zip(*some, strict=True)]
