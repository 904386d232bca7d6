"""What a server makes of the fields of a request: found out with a few short ones before a run, and reported."""

from collections.abc import Sequence
from typing import Any

from dspark.data.conversation import Message
from dspark.errors import ConfigError
from dspark.generation.client import Answer, Client, Refused, Unavailable, retry, together
from dspark.generation.config import RegenerateSettings, RemoteSettings
from dspark.log import get_logger

_log = get_logger(__name__)

_OPTIONAL = ("top_k", "chat_template_kwargs", "seed", "top_p")  # the least standard first
_QUESTION = (Message("user", "Tell me a story."),)  # that no target answers in one way only
_NUM_TOKENS = 16
_TOP_K_OFF = -1  # what vLLM, SGLang and llama.cpp agree on


def request_body(
    settings: RegenerateSettings, model: str, messages: Sequence[Message], temperature: float, seed: int
) -> dict[str, Any]:
    """The chat-completions request for the next message.

    What is off is sent all the same: a server may have other defaults of its own. `seed` is in [0, 2**64); servers take
    31 bits.
    """
    body = {
        "model": model,
        "messages": [message.as_dict() for message in messages],
        "max_tokens": settings.max_tokens,
        "temperature": temperature,
        "top_p": settings.top_p,
        "top_k": settings.top_k or _TOP_K_OFF,
        "seed": seed >> 33,
    }
    return body | ({"chat_template_kwargs": settings.template_variables} if settings.template_variables else {})


async def agreed_model(clients: Sequence[Client], remote: RemoteSettings) -> str:
    """The model that all servers list, or the one named in the settings. Raises `ConfigError`."""
    if remote.model is not None:
        return remote.model
    listed: dict[str, list[str]] = {}

    async def ask(client: Client) -> None:
        try:
            listed[client.url] = await retry(remote, client.models)
        except (Unavailable, Refused) as error:
            raise ConfigError(f"endpoints: {error}; start the server, or name the model with remote.model") from None

    await together(ask(client) for client in clients)
    common = [name for name in listed[clients[0].url] if all(name in names for names in listed.values())]
    if not common:
        raise ConfigError(f"endpoints: they serve no model in common ({listed}): name one with remote.model")
    return common[0]


async def probe(client: Client, model: str, settings: RegenerateSettings) -> None:
    """Find what the server refuses or ignores: what it refuses and the recipe does not need is left out from now on.

    Raises `ConfigError` when it does not answer, or refuses what the recipe asks for. Fields are known to be ignored
    by the answers, which may not show it: that is a warning.
    """
    body = request_body(settings, model, _QUESTION, temperature=1.0, seed=1 << 33)
    body["max_tokens"] = min(_NUM_TOKENS, settings.max_tokens)
    try:
        refused = await _refused(client, body)
        for name in refused:
            _report_refusal(client.url, name, settings)
        client.left_out = frozenset(refused)
        for name in await _ignored(client, body, settings):
            _log.warning(
                "%s ignores %s, as far as its answers show: rows will not be as the recipe says", client.url, name
            )
    except (Unavailable, Refused) as error:
        raise ConfigError(f"endpoints: {error}; mend the server or take it out of the recipe") from None


async def _refused(client: Client, body: dict[str, Any]) -> list[str]:
    """The optional fields that the server refuses. Raises `Refused` when it does so without them too."""
    if await _takes(client, body):
        return []
    bare = {name: value for name, value in body.items() if name not in _OPTIONAL}
    await _ask(client, bare)
    return [name for name in _OPTIONAL if name in body and not await _takes(client, bare | {name: body[name]})]


def _report_refusal(url: str, name: str, settings: RegenerateSettings) -> None:
    asked_for = {
        "top_k": settings.top_k > 0,
        "top_p": settings.top_p < 1,
        "chat_template_kwargs": True,
        "seed": False,
    }
    if asked_for[name]:
        setting = "template_variables" if name == "chat_template_kwargs" else name
        raise ConfigError(f"{setting}: {url} refuses the field {name}: take it out of the recipe, or the server")
    effect = "answers cannot be repeated" if name == "seed" else "its own default holds"
    _log.warning("%s refuses the field %s, which is left out: %s", url, name, effect)


async def _ignored(client: Client, body: dict[str, Any], settings: RegenerateSettings) -> list[str]:
    """The fields in use without which the server's answers would be as they are."""
    first = await _ask(client, body)
    ignored = ["max_tokens"] if first.num_tokens > body["max_tokens"] else []
    if "seed" not in client.left_out and (await _ask(client, body)).message != first.message:
        ignored.append("seed")
    greedy = {"temperature": 0.0}  # each of these leaves one token to choose from, whatever the seed
    greedy |= {"top_k": 1} if settings.top_k else {}
    greedy |= {"top_p": 1e-6} if settings.top_p < 1 else {}
    for name, value in greedy.items():
        answers = [await _ask(client, body | {name: value, "seed": seed}) for seed in (1, 2)]
        if answers[0].message != answers[1].message:
            ignored.append(name)
    return ignored


async def _takes(client: Client, body: dict[str, Any]) -> bool:
    try:
        await _ask(client, body)
    except Refused:
        return False
    return True


async def _ask(client: Client, body: dict[str, Any]) -> Answer:
    return await retry(client.remote, lambda: client.complete(body))
