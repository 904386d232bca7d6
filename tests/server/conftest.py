"""A real server on a free port of this machine, over a tiny target and drafter."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass

import openai
import pytest
import torch
from tiny_tokenizer import EOS, byte_tokenizer

from dspark.drafters.config import DrafterConfig
from dspark.drafters.factory import make_drafter
from dspark.engine.config import EngineSettings
from dspark.engine.engine import Engine
from dspark.models.config import DecoderConfig
from dspark.models.decoder import Decoder
from dspark.models.target import Target, load_target
from dspark.models.weights import save_decoder
from dspark.server.config import ServeSettings
from dspark.server.run import Server, listen
from dspark.server.service import Service


@dataclass
class Served:
    """A server under test."""

    server: Server
    base: str
    clients: ExitStack

    @property
    def service(self) -> Service:
        return self.server.service

    @property
    def engine(self) -> Engine:
        return self.service.engine.engine

    def client(self, api_key: str = "none") -> openai.OpenAI:
        client = openai.OpenAI(base_url=f"{self.base}/v1", api_key=api_key, max_retries=0, timeout=20)
        return self.clients.enter_context(client)


@contextmanager
def serving(engine: Engine, **settings: object) -> Iterator[Served]:
    """A server over an engine, closed at the end."""
    service = Service(ServeSettings.from_dict({"served_name": "tiny"} | settings, "test"), engine)
    server = Server(service)
    with listen("127.0.0.1", 0) as listener:
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            wait_for(lambda: server.started)
            with ExitStack() as clients:
                yield Served(server, f"http://127.0.0.1:{listener.getsockname()[1]}", clients)
        finally:
            server.should_exit = True
            thread.join(20)
            assert not thread.is_alive()


def wait_for(condition: Callable[[], bool], seconds: float = 10) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come true"
        time.sleep(0.01)


TEMPLATE = (  # knows tools, in the form of Hermes, and one variable
    "{% if tools %}tools: {{ tools | tojson }} answer with <tool_call>{{ '\n' }}{% endif %}"
    "{% if enable_thinking is defined and not enable_thinking %}quick{{ '\n' }}{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    """A random target whose tokens are bytes."""
    path = tmp_path_factory.mktemp("models") / "tiny"
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    config = DecoderConfig(
        architecture="LlamaForCausalLM",
        vocab_size=260,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=1024,
        layer_types=("full_attention",) * 2,
        eos_token_ids=(EOS,),
    )
    torch.manual_seed(3)
    decoder = Decoder(config)
    for weight in decoder.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    save_decoder(decoder, tokenizer, path)
    return load_target(path, dtype="float32")


@pytest.fixture(scope="session")
def make_engine(target: Target) -> Callable[..., Engine]:
    """make_engine(**settings) -> an engine with a tiny drafter, four drafts a round."""

    def make(**settings: object) -> Engine:
        torch.manual_seed(11)
        c = target.config
        drafter = DrafterConfig(
            vocab_size=c.vocab_size,
            hidden_size=c.hidden_size,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=8,
            rope=c.rope,
            max_position_embeddings=c.max_position_embeddings,
            num_target_layers=c.num_hidden_layers,
            target_layer_ids=(-1, 0),
            block_size=4,
            mask_token_id=259,
            markov_rank=4,
            enable_confidence_head=True,
        )
        given = EngineSettings.from_dict({"max_length": 600, "record_rounds": True} | settings, "test")
        return Engine(target, make_drafter(drafter, target.decoder).prepare(), given)

    return make


@pytest.fixture(scope="module")
def served(make_engine: Callable[..., Engine]) -> Iterator[Served]:
    with serving(make_engine()) as running:
        yield running
        running.engine.check_integrity()
        assert not running.engine.has_work()


@pytest.fixture
def make_served(make_engine: Callable[..., Engine]) -> Callable[..., AbstractContextManager[Served]]:
    """make_served(engine={...}, **settings) -> a server of its own, as a context."""

    @contextmanager
    def make(engine: dict[str, object] | None = None, **settings: object) -> Iterator[Served]:
        limits = settings.get("limits", {})
        ours = make_engine(**(engine or {}), max_waiting=limits.get("max_waiting", 128))
        with serving(ours, **settings) as running:
            yield running
            ours.check_integrity()

    return make
