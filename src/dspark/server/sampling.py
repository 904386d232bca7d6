"""From a request's fields to the engine's parameters. What the engine does not do is refused by name."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from dspark.engine.engine import Engine
from dspark.engine.request import SamplingParams
from dspark.server.config import LimitSettings
from dspark.server.errors import ApiError, bad_request, describe
from dspark.server.schemas import SamplingFields, SpeculativeOptions

_SAME = (
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
_OPENAI_TEMPERATURE = 1.0  # what OpenAI's API takes where a request says nothing


def sampling_params(
    fields: SamplingFields, engine: Engine, limits: LimitSettings, max_tokens: int, **others: Any
) -> SamplingParams:
    """The engine's parameters; `others` are fields of them that the kinds of request have in ways of their own.

    Raises ApiError naming the request's field.
    """
    given = {name: value for name in _SAME if (value := getattr(fields, name)) is not None}
    given["temperature"] = _OPENAI_TEMPERATURE if fields.temperature is None else fields.temperature
    given["max_tokens"] = max_tokens if limits.max_tokens is None else min(max_tokens, limits.max_tokens)
    if fields.logit_bias:
        given["logit_bias"] = _bias(fields.logit_bias)
    if fields.structured_outputs is not None:
        given |= {k: v for k, v in fields.structured_outputs.model_dump().items() if v is not None}
    given |= _speculative(fields.speculative, engine)
    given |= {name: value for name, value in others.items() if value is not None}
    if fields.stream_options is not None and not fields.stream:
        raise bad_request("stream_options: it goes with stream true alone", "stream_options")
    try:
        return SamplingParams.model_validate(given)
    except ValidationError as error:
        raise describe(error.errors()) from None


def _bias(given: dict[str, float]) -> dict[int, float]:
    try:
        return {int(token): bias for token, bias in given.items()}
    except ValueError:
        raise bad_request("logit_bias: its keys are token ids, written as numbers", "logit_bias") from None


def _speculative(asked: SpeculativeOptions, engine: Engine) -> dict[str, Any]:
    """Whether to speculate; refuses what this engine does not do request by request."""
    if asked.max_draft is not None and asked.max_draft > 0:
        raise _not_honoured("max_draft", "drafts are bounded for the whole server (model.num_draft_tokens)")
    if asked.threshold is not None:
        raise _not_honoured("threshold", "no threshold can be set for a request alone")
    if asked.mode in ("static", "adaptive"):
        if engine.drafter is None:
            raise _not_honoured("mode", "this server has no drafter: leave it out, or ask for off")
        if asked.mode == "adaptive":
            raise _not_honoured("mode", "this server plans static rounds")
    return {"speculate": asked.mode != "off" and asked.max_draft != 0}


def _not_honoured(name: str, why: str) -> ApiError:
    return bad_request(f"speculative.{name}: {why}", f"speculative.{name}")
