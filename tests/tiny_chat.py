"""A tiny random target with a chat template and some twenty letters, on disk: for every test package that needs one."""

from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from dspark.models.config import DecoderConfig
from dspark.models.decoder import Decoder
from dspark.models.weights import save_decoder

SPECIALS = ("<|end|>", "<|mask|>", "<|system|>", "<|user|>", "<|assistant|>", "<unk>")
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def write_chat_target(path: Path, num_layers: int = 2, std: float = 0.05, template: str = TEMPLATE) -> Path:
    """Write the target; its first token ends a turn, its second is written by nobody. Returns `path`."""
    vocab = {token: index for index, token in enumerate((*SPECIALS, *"abcdefghij klmnop"))}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    core.decoder = decoders.Fuse()
    core.add_special_tokens([AddedToken(token, special=True) for token in SPECIALS])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|end|>", unk_token="<unk>")
    tokenizer.chat_template = template
    torch.manual_seed(3)
    config = DecoderConfig(
        architecture="LlamaForCausalLM",
        vocab_size=len(vocab),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=num_layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=256,
        layer_types=("full_attention",) * num_layers,
        eos_token_ids=(0,),
    )
    decoder = Decoder(config)
    for weight in decoder.parameters():
        torch.nn.init.normal_(weight, std=std)
    save_decoder(decoder, tokenizer, path)
    return path
