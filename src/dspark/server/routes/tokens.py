"""`/tokenize` and `/detokenize`."""

from __future__ import annotations

from fastapi import APIRouter, Request

from dspark.data.chat import ChatTemplate
from dspark.server.errors import bad_request
from dspark.server.prompts import check_names, messages_of, render, text_ids
from dspark.server.reply import Json
from dspark.server.schemas import DetokenizeRequest, TokenizeRequest
from dspark.server.service import Service
from dspark.server.tools import told_of

router = APIRouter()

_OF_PROMPT = ("add_special_tokens",)
_OF_MESSAGES = ("tools", "add_generation_prompt")


@router.post("/tokenize")
async def tokenize(request: Request, body: TokenizeRequest) -> Json:
    """Token ids of a text, or of messages as the chat template writes them."""
    service: Service = request.app.state.service
    service.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise bad_request("prompt: give a prompt or messages", "prompt")
    others, kind = (_OF_MESSAGES, "messages") if body.messages is None else (_OF_PROMPT, "a prompt")
    for name in others:
        if name in body.model_fields_set:
            raise bad_request(f"{name}: it goes with {kind} alone", name)
    size = len(body.prompt or "") + sum(len(m.content or "") for m in body.messages or [])
    ids = await service.aside(lambda: _ids(service, body), size)
    found: Json = {"count": len(ids), "max_model_len": service.limit, "tokens": ids}
    if body.return_token_strs:
        found["token_strs"] = service.tokenizer.convert_ids_to_tokens(ids)
    return found


@router.post("/detokenize")
async def detokenize(request: Request, body: DetokenizeRequest) -> Json:
    """The text of token ids, special tokens written out."""
    service: Service = request.app.state.service
    service.check_model(body.model)
    size = service.engine.engine.target.config.vocab_size
    if not all(0 <= token < size for token in body.tokens):
        raise bad_request(f"tokens: one is outside 0..{size - 1}", "tokens")
    decode = service.tokenizer.backend_tokenizer.decode
    return {"prompt": await service.aside(lambda: decode(body.tokens, skip_special_tokens=False), len(body.tokens))}


def _ids(service: Service, body: TokenizeRequest) -> list[int]:
    if body.prompt is not None:
        return text_ids(service.tokenizer, body.prompt, body.add_special_tokens)
    assert body.messages is not None
    chat, given = ChatTemplate(service.tokenizer), messages_of(body.messages)
    use = told_of(body.tools or [], chat)
    chat = chat.with_tools(use.in_template)
    check_names(chat, given)
    return render(chat, use.told(given), add_generation_prompt=body.add_generation_prompt)
