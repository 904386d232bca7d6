"""A tiny random target that writes short prompts and answers: twenty letters, and an end of turn among them."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from dspark.engine.config import EngineSettings
from dspark.engine.engine import Engine
from dspark.models.config import DecoderConfig
from dspark.models.decoder import Decoder
from dspark.models.target import Target, load_target
from dspark.models.weights import save_decoder

SPECIALS = ("<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<unk>")
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture(scope="session")
def target_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("target")
    vocab = {token: index for index, token in enumerate((*SPECIALS, *"abcdefghij klmn"))}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    core.decoder = decoders.Fuse()
    core.add_special_tokens([AddedToken(token, special=True) for token in SPECIALS])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|end|>", unk_token="<unk>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(path)
    torch.manual_seed(3)
    config = DecoderConfig(
        architecture="LlamaForCausalLM",
        vocab_size=len(vocab),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=256,
        layer_types=("full_attention",) * 2,
        eos_token_ids=(0,),
    )
    decoder = Decoder(config)
    for weight in decoder.parameters():
        torch.nn.init.normal_(weight, std=0.05)
    save_decoder(decoder, tokenizer, path)
    return path


@pytest.fixture(scope="session")
def target(target_path: Path) -> Target:
    return load_target(str(target_path), dtype="float32")


@pytest.fixture
def make_engine(target: Target) -> Callable[[], Engine]:
    return lambda: Engine(target, None, EngineSettings(max_batch=8, max_length=96))
