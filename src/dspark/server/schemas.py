"""What requests may hold. A field that is not listed, or listed and not honoured, is answered 400."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator

from dspark.engine.request import MAX_LOGPROBS

MAX_DEPTH = 64  # of JSON inside a request: what walks through it may recurse
Text = Annotated[str, Field(min_length=1)]


def _shallow(value: dict[str, Any]) -> dict[str, Any]:
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        level = [
            inner
            for item in level
            if isinstance(item, dict | list)
            for inner in (item.values() if isinstance(item, dict) else item)
        ]
        if not level:
            return value
    raise ValueError(f"nested deeper than {MAX_DEPTH} levels: make it flatter")


Object = Annotated[dict[str, Any], AfterValidator(_shallow)]


def _branch(value: object) -> str:
    """Which branch of a union a value belongs to, so that a fault is told of that branch alone."""
    if isinstance(value, list):
        inner = value[0] if value else ""
        return "[lists]" if isinstance(inner, list) else "[numbers]" if isinstance(inner, int) else "[list]"
    return "[object]" if isinstance(value, dict) else "[text]"


ByKind = Discriminator(_branch)
Stops = Annotated[list[Text], Field(max_length=64)]


class Body(BaseModel):
    """Base of everything that comes in: no unknown field, no conversion of types. A null is as good as nothing."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: object) -> object:
        """Whatever the field: clients send back what answers held, as `"refusal": null`."""
        return {k: v for k, v in given.items() if v is not None} if isinstance(given, dict) else given


class StreamOptions(Body):
    """Of streams alone."""

    include_usage: bool = False  # a last chunk with the counts of tokens


class SpeculativeOptions(Body):
    """How this request is decoded. The law of its answer does not depend on it, nor a greedy answer."""

    # off: plainly; static, adaptive: as the server's engine plans its rounds, which must be of that kind
    mode: Literal["off", "static", "adaptive"] | None = None
    max_draft: int | None = Field(None, ge=0)  # verify at most so many drafts a round; 0 = plainly
    threshold: float | None = Field(None, ge=0, le=1)  # verify drafts while their confidence reaches it
    origins: bool = False  # list each token's text and origin (prefill, accepted, bonus) in the answer


class StructuredOutputs(Body):
    """What the whole answer must be: one of these."""

    json_schema: Object | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[Text] | None = Field(None, min_length=1)
    grammar: str | None = None  # Lark or GBNF


class SamplingFields(Body):
    """What chat and text completions share."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = Field(None, ge=1)
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    stop: Annotated[Annotated[Text, Tag("[text]")] | Annotated[Stops, Tag("[list]")], ByKind] | None = None
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: dict[str, float] | None = None
    user: str | None = Field(None, max_length=512)  # who asks: written to the log
    # Beyond OpenAI's own, by the names that other open servers use.
    top_k: int | None = Field(None, ge=0)
    min_p: float | None = Field(None, ge=0, le=1)
    min_tokens: int | None = Field(None, ge=0)
    repetition_penalty: float | None = Field(None, ge=0.01, le=100)
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    bad_words: list[Text] | None = Field(None, max_length=1024)
    priority: int = Field(0, ge=-1000, le=1000)  # lower ones are served first
    structured_outputs: StructuredOutputs | None = None
    speculative: SpeculativeOptions = SpeculativeOptions()


class CompletionRequest(SamplingFields):
    """Body of `/v1/completions`."""

    prompt: Annotated[
        Annotated[Text, Tag("[text]")]
        | Annotated[list[Text], Tag("[list]")]
        | Annotated[list[int], Tag("[numbers]")]
        | Annotated[list[list[int]], Tag("[lists]")],
        ByKind,
    ]
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)  # list so many of the likeliest tokens beside each token


class TextPart(Body):
    """A piece of a message."""

    type: Literal["text"]
    text: str


class FunctionCall(Body):
    """The function of a call; `arguments` is JSON text."""

    name: Text
    arguments: str


class ToolCallPart(Body):
    """A call that an assistant's message made. `index`, as streams give it, is its place in the list."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None


class ChatMessage(Body):
    """One message of a conversation. An assistant's has what answers have, so that it can be sent back as it came."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[Annotated[str, Tag("[text]")] | Annotated[list[TextPart], Tag("[list]")], ByKind] | None = None
    name: Text | None = None
    tool_calls: list[ToolCallPart] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # the later name of the same
    refusal: str | None = None  # what was said in place of content
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None  # of answers from other servers


class FunctionTool(Body):
    """A function that the model may call; `parameters` is a JSON schema."""

    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")
    description: str | None = None
    parameters: Object | None = None
    strict: bool | None = None


class Tool(Body):
    """A tool."""

    type: Literal["function"]
    function: FunctionTool


class NamedFunction(Body):
    """A function by its name."""

    name: str


class NamedTool(Body):
    """The tool that must be called."""

    type: Literal["function"]
    function: NamedFunction


class JsonSchema(Body):
    """A schema for the answer."""

    name: Text
    description: str | None = None
    json_schema: Object | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """What the answer must be."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class ChatRequest(SamplingFields):
    """Body of `/v1/chat/completions`."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    response_format: ResponseFormat | None = None
    tools: list[Tool] | None = None
    tool_choice: (
        Annotated[
            Annotated[Literal["none", "auto", "required"], Tag("[text]")] | Annotated[NamedTool, Tag("[object]")],
            ByKind,
        ]
        | None
    ) = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: Object | None = None  # variables of the chat template, as enable_thinking


class TokenizeRequest(Body):
    """Body of `/tokenize`: a prompt (and add_special_tokens), or messages (and tools, add_generation_prompt)."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = Field(None, min_length=1)
    tools: list[Tool] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    return_token_strs: bool = False


class DetokenizeRequest(Body):
    """Body of `/detokenize`."""

    model: str | None = None
    tokens: list[int]
