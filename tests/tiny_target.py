"""Tiny targets on disk, with a tokenizer of twenty letters and a chat template: ours, or of any transformers family."""

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from dspark.models.config import DecoderConfig
from dspark.models.decoder import Decoder
from dspark.models.weights import save_decoder

SPECIALS = ("<|end|>", "<|mask|>", "<|user|>", "<|assistant|>", "<unk>")
VOCAB = {token: index for index, token in enumerate((*SPECIALS, *"abcdefghij klmnop"))}
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    core = Tokenizer(models.BPE(vocab=VOCAB, merges=[], unk_token="<unk>"))
    core.decoder = decoders.Fuse()
    core.add_special_tokens([AddedToken(token, special=True) for token in SPECIALS])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|end|>", unk_token="<unk>")
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def save_tiny_target(path: Path, **changes: Any) -> None:
    """Four layers of ours; `changes` to its config."""
    torch.manual_seed(3)
    sizes: dict[str, Any] = {
        "architecture": "LlamaForCausalLM",
        "vocab_size": len(VOCAB),
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "max_position_embeddings": 256,
        "layer_types": ("full_attention",) * 4,
        "eos_token_ids": (0,),
    }
    decoder = Decoder(DecoderConfig(**sizes | changes))
    for weight in decoder.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    save_decoder(decoder, make_tokenizer(), path)


def save_foreign_target(path: Path, family: str, **options: Any) -> transformers.PreTrainedModel:
    """Four random layers of a transformers family, such as "GPTNeoX", as transformers saves them."""
    torch.manual_seed(3)
    config = getattr(transformers, f"{family}Config")(
        vocab_size=len(VOCAB),
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=4,
        num_attention_heads=2,
        max_position_embeddings=256,
        bos_token_id=None,
        pad_token_id=None,
        eos_token_id=0,
        initializer_range=0.3,
        **options.pop("config", {}),
    )
    model: transformers.PreTrainedModel = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():  # norms that do something
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    model.save_pretrained(path, **options)
    make_tokenizer().save_pretrained(str(path))
    return model


def write_answers(path: Path, count: int = 12) -> None:
    """Conversations of one question and one answer, of unequal lengths."""
    letters = "abcdefghij klmnop"
    with path.open("w", encoding="utf-8") as file:
        for i in range(count):
            answer = "".join(letters[(i * 7 + 3 * k) % len(letters)] for k in range(8 + i))
            turns = [{"role": "user", "content": letters[i : i + 3]}, {"role": "assistant", "content": answer}]
            file.write(json.dumps({"messages": turns}) + "\n")
