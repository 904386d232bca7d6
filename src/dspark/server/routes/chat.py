"""`/v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Iterator

from fastapi import APIRouter, Request, Response

from dspark.data.chat import ChatTemplate
from dspark.engine.engine import StepOutput
from dspark.engine.request import Completion
from dspark.server.answers import Job
from dspark.server.prompts import check_length, messages_of, render
from dspark.server.reply import Json
from dspark.server.sampling import sampling_params
from dspark.server.schemas import ChatRequest
from dspark.server.service import Service, check_answers, new_name

router = APIRouter()


@router.post("/v1/chat/completions")
async def chat_completions(request: Request, body: ChatRequest) -> Response:
    """Answer a conversation."""
    service: Service = request.app.state.service
    service.check_model(body.model)
    messages = messages_of(body.messages)
    chat = ChatTemplate(service.tokenizer, body.chat_template_kwargs or {})
    size = sum(len(message.content) for message in messages)
    prompt = await service.tokenise(lambda: render(chat, messages), size)
    check_length(prompt, service.limit, "messages")
    room = service.limit - len(prompt)
    max_tokens = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    params = sampling_params(
        body, service.engine.engine, service.settings.limits, room if max_tokens is None else max_tokens
    )
    check_answers([prompt], params.n, service.settings.limits.max_answers)
    job = Job(new_name("chatcmpl"), [prompt], params, body.priority, bool(body.stream))
    return await service.answer(request, body, job, ChatShape())


class ChatShape:
    """Choices as messages."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __init__(self) -> None:
        self._begun: set[int] = set()

    def choice(self, index: int, completion: Completion) -> Json:
        """A finished message."""
        message = {"role": "assistant", "content": completion.text, "refusal": None}
        return {"index": index, "message": message, "logprobs": None, "finish_reason": completion.finish_reason}

    def pieces(self, index: int, output: StepOutput) -> Iterator[Json]:
        """The role first, then words, and at the end the finish reason alone."""
        if index not in self._begun:
            self._begun.add(index)
            yield self._piece(index, {"role": "assistant", "content": ""})
        if output.text_delta:
            yield self._piece(index, {"content": output.text_delta})
        if output.completion is not None:
            yield self._piece(index, {}, output.completion.finish_reason)

    def _piece(self, index: int, delta: Json, finish_reason: str | None = None) -> Json:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
