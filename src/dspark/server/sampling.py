"""From a request's fields to the engine's parameters. What the engine does not do is refused by name."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from dspark.engine.engine import Engine
from dspark.engine.request import SamplingParams
from dspark.server.config import LimitSettings
from dspark.server.errors import ApiError, bad_request, describe, named_field
from dspark.server.schemas import ChatRequest, ResponseFormat, SamplingFields, SpeculativeOptions

_SAME = (  # fields that mean the same to the engine
    "n",
    "top_p",
    "seed",
    "stop",
    "presence_penalty",
    "frequency_penalty",
    "top_k",
    "min_p",
    "min_tokens",
    "repetition_penalty",
    "ignore_eos",
    "stop_token_ids",
    "bad_words",
)
_GRAMMARS = ("json_schema", "regex", "choice", "grammar")
# What OpenAI's API takes where a request says nothing; a chat's answer is as long as it gets.
_OPENAI_TEMPERATURE = 1.0
_OPENAI_TEXT_TOKENS = 16


def sampling_params(
    fields: SamplingFields, engine: Engine, limits: LimitSettings, room: int, **others: Any
) -> SamplingParams:
    """The engine's parameters; `others` are fields of them that the kinds of request have in ways of their own.

    `room` is how many tokens the context holds after the longest prompt. Raises ApiError naming the request's field.
    """
    given = {name: value for name in _SAME if (value := getattr(fields, name)) is not None}
    given["temperature"] = _OPENAI_TEMPERATURE if fields.temperature is None else fields.temperature
    given["max_tokens"] = _max_tokens(fields, limits, room)
    if fields.logit_bias:
        given["logit_bias"] = _bias(fields.logit_bias)
    vocab_size = engine.target.config.vocab_size
    if not all(0 <= token < vocab_size for token in fields.stop_token_ids or ()):
        raise bad_request(f"stop_token_ids: one is outside 0..{vocab_size - 1}", "stop_token_ids")
    if fields.structured_outputs is not None:
        grammars = {k: v for k, v in fields.structured_outputs.model_dump().items() if v is not None}
        if len(grammars) != 1:
            raise bad_request("structured_outputs: give one of json, regex, choice, grammar", "structured_outputs")
        given |= grammars
    given |= _speculative(fields.speculative, engine)
    given |= {name: value for name, value in others.items() if value is not None}
    if fields.stream_options is not None and not fields.stream:
        raise bad_request("stream_options: it goes with stream true alone", "stream_options")
    try:
        return SamplingParams.model_validate(given)
    except ValidationError as error:
        raise renamed(describe(error.errors()), fields) from None


def response_schema(given: ResponseFormat | None) -> dict[str, Any] | None:
    """The JSON schema that a response_format asks for. Raises ApiError where it is incomplete."""
    if given is None:
        return None
    if (given.json_schema is not None) != (given.type == "json_schema"):
        raise bad_request(
            "response_format.json_schema: it goes with type json_schema, and that with it",
            "response_format.json_schema",
        )
    match given.type:
        case "text":
            return None
        case "json_object":
            return {"type": "object"}
    assert given.json_schema is not None
    if given.json_schema.json_schema is None:
        raise bad_request("response_format.json_schema.schema: missing", "response_format.json_schema.schema")
    return given.json_schema.json_schema


def renamed(error: ApiError, fields: SamplingFields) -> ApiError:
    """The same error, its `param` the name that this request has for the engine's field."""
    name = error.param or named_field(error, (*SamplingParams.model_fields, "prompt"))
    if name is None:
        return error
    head, _, rest = name.partition(".")
    chat = isinstance(fields, ChatRequest)
    if head in _GRAMMARS:
        forced = fields.structured_outputs is None
        head = "response_format" if forced else f"structured_outputs.{'json' if head == 'json_schema' else head}"
        rest = ""
    elif head == "prompt" and chat:
        head = "messages"
    elif head == "logprobs" and chat:
        head = "top_logprobs"
    elif head == "max_tokens" and isinstance(fields, ChatRequest) and fields.max_completion_tokens is not None:
        head = "max_completion_tokens"
    param = f"{head}.{rest}" if rest else head
    message = str(error)
    if message.startswith(name) and not message.startswith(param):
        message = param + message.removeprefix(name)
    return ApiError(error.status, message, param, error.code, error.headers)


def _max_tokens(fields: SamplingFields, limits: LimitSettings, room: int) -> int:
    """New tokens of an answer. Raises ApiError where more are asked for than there can be."""
    chat = isinstance(fields, ChatRequest)
    newer = fields.max_completion_tokens if isinstance(fields, ChatRequest) else None
    asked, name = (fields.max_tokens, "max_tokens") if newer is None else (newer, "max_completion_tokens")
    if newer is not None and fields.max_tokens not in (None, newer):
        raise bad_request("max_tokens: it differs from max_completion_tokens; give one of them", "max_tokens")
    most = room if limits.max_tokens is None else min(room, limits.max_tokens)
    if asked is None:
        return most if chat else min(most, _OPENAI_TEXT_TOKENS)
    if asked > most:
        why = "the context holds after the prompt" if most == room else "an answer of this server may have"
        raise bad_request(f"{name}: it is {asked}, more than the {most} that {why}; ask for fewer", name)
    return asked


def _bias(given: dict[str, float]) -> dict[int, float]:
    try:
        return {int(token): bias for token, bias in given.items()}
    except ValueError:
        raise bad_request("logit_bias: its keys are token ids, written as numbers", "logit_bias") from None


def _speculative(asked: SpeculativeOptions, engine: Engine) -> dict[str, Any]:
    """Whether to speculate, and how far; refuses what this engine does not do request by request."""
    if asked.threshold is not None and (why := engine.no_thresholds):
        raise _not_honoured("threshold", why)
    if asked.mode in ("static", "adaptive"):
        if engine.drafter is None:
            raise _not_honoured("mode", "this server has no drafter: leave it out, or ask for off")
        planner = engine.settings.planner
        if (asked.mode == "adaptive") != (planner != "static"):
            raise _not_honoured("mode", f"rounds are planned for the whole batch here, by engine.planner {planner}")
    found: dict[str, Any] = {"speculate": asked.mode != "off" and asked.max_draft != 0}
    found |= {"num_draft_tokens": asked.max_draft} if asked.max_draft else {}
    return found | ({} if asked.threshold is None else {"draft_threshold": asked.threshold})


def _not_honoured(name: str, why: str) -> ApiError:
    return bad_request(f"speculative.{name}: {why}", f"speculative.{name}")
