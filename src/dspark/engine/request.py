"""A request: what was asked for, how far it is, and where it ends. Imports no torch."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, Self

from pydantic import Field, NonNegativeInt, field_validator, model_validator

from dspark.config import Settings
from dspark.engine.stats import RequestFigures
from dspark.engine.text import TextStream

if TYPE_CHECKING:
    from torch import Tensor

    from dspark.engine.edits import RequestEdits

Origin = Literal["prefill", "accepted", "bonus"]
FinishReason = Literal["stop", "length", "abort", "error"]
BadWord = Annotated[str, Field(min_length=1)] | Annotated[tuple[NonNegativeInt, ...], Field(min_length=1)]

MAX_ANSWERS = 128
MAX_LOGPROBS = 20


class SamplingParams(Settings):
    """How one answer is drawn and where it stops.

    The law of each token is edited in this order: logit_bias, min_tokens, penalties and bad words, grammar,
    temperature, min_p, top_k, top_p. Penalties and bad words look at all tokens before the row that they edit, drafts
    among them. An answer ends at a stop token (`stop_token_ids`, and the model's own unless `ignore_eos`), before a
    stop string, or at `max_tokens`. At most one grammar: json_schema, regex, choice or grammar.
    """

    n: int = Field(1, ge=1, le=MAX_ANSWERS)  # answers to one prompt; each has a seed of its own
    max_tokens: int = Field(256, ge=1)
    min_tokens: int = Field(0, ge=0)  # no stop before the answer has so many
    temperature: float = Field(0.0, ge=0, allow_inf_nan=False)  # 0 = greedy
    top_k: int = Field(0, ge=0)  # 0 = off
    top_p: float = Field(1.0, gt=0, le=1)  # 1 = off
    min_p: float = Field(0.0, ge=0, le=1)  # 0 = off
    seed: int | None = None  # None = a new one for each request
    repetition_penalty: float = Field(1.0, ge=0.01, le=100)  # of tokens in prompt and answer; 1 = off
    presence_penalty: float = Field(0.0, ge=-2, le=2)  # of tokens in the answer; 0 = off
    frequency_penalty: float = Field(0.0, ge=-2, le=2)  # of tokens in the answer, each time they occur; 0 = off
    logit_bias: dict[NonNegativeInt, Annotated[float, Field(ge=-100, le=100)]] = {}  # token id -> added to its logit
    bad_words: tuple[BadWord, ...] = ()  # texts, or token ids in sequence, that the answer never contains
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)  # likeliest tokens listed beside each token put out
    logprobs_mode: Literal["raw", "processed"] = "raw"  # of the model's own law, or of the law the token came from
    json_schema: dict[str, Any] | None = None  # the answer is JSON that this schema accepts; {} accepts any JSON
    regex: str | None = None  # the whole answer matches
    choice: tuple[Annotated[str, Field(min_length=1)], ...] | None = Field(None, min_length=1)  # the answer is one
    grammar: str | None = None  # the answer follows this grammar, in Lark's form or in GBNF
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    ignore_eos: bool = False
    speculate: bool = True  # False: plain decoding for this request
    num_draft_tokens: int | None = Field(None, ge=1)  # verify at most so many drafts a round; None = the engine's limit
    # verify none from the first draft on whose confidence (that it is accepted if all before it are) is below this
    draft_threshold: float | None = Field(None, ge=0, le=1)

    @field_validator("stop", "bad_words", mode="before")
    @classmethod
    def _one_string(cls, value: object) -> object:
        """Accept a single string for several."""
        return (value,) if isinstance(value, str) else value

    @field_validator("json_schema", mode="before")
    @classmethod
    def _schema_as_text(cls, value: object) -> object:
        """Accept a schema written as JSON."""
        if not isinstance(value, str):
            return value
        try:
            return json.loads(value)
        except ValueError as error:
            raise ValueError(f"not valid JSON ({error}): give a JSON schema") from None

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens is {self.min_tokens} but max_tokens {self.max_tokens}: lower min_tokens")
        if len(given := self.grammar_fields) > 1:
            raise ValueError(f"{' and '.join(given)} were given together: give one grammar")
        if given and self.ignore_eos:
            raise ValueError(f"ignore_eos goes with no {given[0]}: a grammar ends with the model's end token")
        return self

    @property
    def grammar_fields(self) -> list[str]:
        """The names of the fields that give a grammar: one at most."""
        return [name for name in ("json_schema", "regex", "choice", "grammar") if getattr(self, name) is not None]


class TokenLogprob(NamedTuple):
    """Natural log probabilities at one token of an answer: its own, and of the likeliest tokens there in order."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]]  # (token id, logprob), as many as were asked for and are possible


class RoundRecord(NamedTuple):
    """One round of a request that speculates, kept where the engine's settings say so (`record_rounds`)."""

    position: int  # of the anchor: the length of the context
    verify_len: int  # rows the target ran, the anchor's counted
    num_drafts: int  # drafts proposed; 0 where none were, as for a last token alone
    correct_len: int  # drafts accepted, before any stop
    num_output: int  # tokens put out, after stops
    confidence_logits: tuple[float, ...]  # of each draft, uncalibrated; () without a confidence head

    @property
    def is_full_width(self) -> bool:
        """Whether there were drafts and every one was judged; other rounds hold censored labels."""
        return 0 < self.num_drafts == self.verify_len - 1


@dataclass(frozen=True)
class Completion:
    """A finished answer. Text ends before the stop string; the tokens include the one that completed it."""

    request_id: str
    prompt_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: FinishReason
    origins: list[Origin]  # one a token
    figures: RequestFigures = field(default_factory=RequestFigures)
    round_records: list[RoundRecord] = field(default_factory=list)  # empty unless the engine records them
    index: int = 0  # which of the request's n answers
    logprobs: list[TokenLogprob] | None = None  # one a token, where asked for

    @property
    def tau(self) -> float | None:
        """Accepted length: tokens per speculative round, the bonus counted; None without such a round."""
        return self.figures.accepted_length

    @property
    def rounds(self) -> int:
        """Speculative rounds."""
        return self.figures.rounds

    @property
    def drafted(self) -> int:
        """Drafts verified in them."""
        return self.figures.drafted

    @property
    def accepted_by_position(self) -> list[int]:
        """[i]: rounds whose draft i was put out."""
        return self.figures.accepted_by_position


@dataclass(eq=False)
class Request:
    """One answer to a live request. `token_ids` is the answer so far; its last one is the anchor, which has no KV yet.

    Invariant between steps: seq_len == num_known while decoding; less while the prompt is under way, 0 while waiting.
    Rounds write at positions from seq_len on, and only to those below reserved_len, for which there are blocks.
    """

    request_id: str
    prompt_ids: list[int]
    params: SamplingParams
    seed: int
    limit: int  # tokens of prompt and answer together, at most
    stop_token_ids: frozenset[int]
    stream: TextStream
    speculates: bool
    rank: tuple[int, int] = (0, 0)  # requests are served in this order, lowest first; no two are equal
    submitted_at: float = 0.0  # on the clock of time.perf_counter
    index: int = 0  # which of the n answers that share the request_id
    edits: RequestEdits | None = None
    token_ids: list[int] = field(default_factory=list)
    origins: list[Origin] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)  # one a token, if asked for
    block_table: list[int] = field(default_factory=list)
    seq_len: int = 0  # committed: tokens with valid KV in both caches
    reserved_len: int = 0  # positions that the blocks were taken for
    # Of the last committed rows, those that the drafter's cache lacks: features [N, m, H] and the row in them
    held: list[tuple[Tensor, int]] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)  # of its full blocks, as far as the prefix index has asked
    num_listed: int = 0  # blocks of the table that the prefix index has seen
    finish_reason: FinishReason | None = None
    figures: RequestFigures = field(default_factory=RequestFigures)
    round_records: list[RoundRecord] = field(default_factory=list)

    @property
    def num_known(self) -> int:
        """Tokens that must have KV before a round: the prompt, and after a preemption the answer up to the anchor."""
        return len(self.prompt_ids) + max(len(self.token_ids) - 1, 0)

    @property
    def context_len(self) -> int:
        """Committed tokens whose context the drafter has."""
        return self.seq_len - len(self.held)

    @property
    def is_decoding(self) -> bool:
        """Whether the next thing to run is a round, not rows of the prompt."""
        return bool(self.token_ids) and self.seq_len == self.num_known

    @property
    def num_tokens_left(self) -> int:
        """Tokens that may still be put out."""
        return min(self.params.max_tokens, self.limit - len(self.prompt_ids)) - len(self.token_ids)

    @property
    def max_rows(self) -> int:
        """Verify rows that a round may use, the anchor's counted: tokens still to come, and the request's own limit."""
        limit = self.params.num_draft_tokens
        return self.num_tokens_left if limit is None else min(self.num_tokens_left, limit + 1)

    @property
    def max_positions(self) -> int:
        """Positions the longest possible answer fills."""
        return min(len(self.prompt_ids) + self.params.max_tokens, self.limit)

    def ids(self, begin: int, end: int) -> list[int]:
        """The tokens of prompt and answer at positions begin..end-1."""
        answered = len(self.prompt_ids)
        if begin >= answered:
            return self.token_ids[begin - answered : end - answered]
        return self.prompt_ids[begin:end] + self.token_ids[: max(end - answered, 0)]

    def extend(self, token_ids: list[int], origins: list[Origin]) -> tuple[int, str]:
        """Put out the tokens up to the first stop, and set `finish_reason` there.

        Returns how many tokens were taken and the text that is new.
        """
        taken = token_ids[: self.num_tokens_left]
        if not self.stop_token_ids.isdisjoint(taken):
            taken = taken[: 1 + next(i for i, t in enumerate(taken) if t in self.stop_token_ids)]
        count, text = self.stream.push(taken)
        self.token_ids += taken[:count]
        self.origins += origins[:count]
        if self.stream.stopped or (count and self.token_ids[-1] in self.stop_token_ids):
            self.finish_reason = "stop"
        elif self.num_tokens_left == 0:
            self.finish_reason = "length"
        if self.finish_reason:
            text += self.stream.finish()
        return count, text

    def completion(self) -> Completion:
        """The finished answer."""
        assert self.finish_reason is not None
        return Completion(
            self.request_id,
            self.prompt_ids,
            self.token_ids,
            self.stream.text,
            self.finish_reason,
            self.origins,
            self.figures,
            self.round_records,
            self.index,
            None if self.params.logprobs is None else self.logprobs,
        )
