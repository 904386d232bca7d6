"""`/v1/chat/completions`."""

from __future__ import annotations

import re

from fastapi import APIRouter, Request, Response

from dspark.data.chat import ChatTemplate
from dspark.server.answers import Job, new_name
from dspark.server.chat_shape import ChatShape
from dspark.server.errors import bad_request
from dspark.server.prompts import check_names, messages_of, render
from dspark.server.run_job import run_job
from dspark.server.sampling import response_schema, sampling_params
from dspark.server.schemas import ChatRequest
from dspark.server.service import Service
from dspark.server.tools import ToolUse, tool_use

router = APIRouter()


@router.post("/v1/chat/completions")
async def chat_completions(request: Request, body: ChatRequest) -> Response:
    """Answer a conversation."""
    service: Service = request.app.state.service
    service.check_model(body.model)
    chat = chat_template(service, body)
    use = tool_use(body, chat)
    prompt = await prompt_ids(service, chat, body, use)
    service.check_prompts([prompt], body.n, "messages")
    params = sampling_params(
        body,
        service.engine.engine,
        service.settings.limits,
        service.limit - len(prompt),
        json_schema=use.schema or response_schema(body.response_format),
        logprobs=_num_logprobs(body),
    )
    job = Job(new_name("chatcmpl"), [prompt], params, body.priority, bool(body.stream))
    shape = ChatShape(service.tokenizer, params, use, service.stop_ids(params), body.speculative.origins)
    return await run_job(request, body, job, shape)


def chat_template(service: Service, body: ChatRequest) -> ChatTemplate:
    """The target's template with the request's variables. Raises ApiError for one that the template does not read."""
    template = str(service.tokenizer.chat_template or "")
    for name in body.chat_template_kwargs or {}:
        if name in ("messages", "tools", "add_generation_prompt") or not re.search(rf"\b{re.escape(name)}\b", template):
            where = f"chat_template_kwargs.{name}"
            raise bad_request(f"{where}: the target's chat template reads no such variable; leave it out", where)
    return ChatTemplate(service.tokenizer, body.chat_template_kwargs or {})


async def prompt_ids(service: Service, chat: ChatTemplate, body: ChatRequest, use: ToolUse) -> list[int]:
    """Token ids of the conversation, up to where the answer begins."""
    given = messages_of(body.messages)
    messages, chat = use.told(given), chat.with_tools(use.in_template)
    size = sum(len(message.content) for message in messages)

    def work() -> list[int]:
        check_names(chat, given)
        return render(chat, messages, use.opening)

    return await service.aside(work, size)


def _num_logprobs(body: ChatRequest) -> int | None:
    if body.top_logprobs is not None and not body.logprobs:
        raise bad_request("top_logprobs: it goes with logprobs true alone", "top_logprobs")
    return (body.top_logprobs or 0) if body.logprobs else None
