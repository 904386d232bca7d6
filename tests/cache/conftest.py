"""A tiny random target in float32, whose states a build can be compared with."""

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from dspark.models.config import DecoderConfig
from dspark.models.decoder import Decoder
from dspark.models.target import Target


@pytest.fixture(scope="session")
def target() -> Target:
    config = DecoderConfig(
        architecture="LlamaForCausalLM",
        vocab_size=61,
        hidden_size=24,
        intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        layer_types=("full_attention",) * 4,
        eos_token_ids=(0,),
    )
    torch.manual_seed(5)
    decoder = Decoder(config).requires_grad_(False).eval()
    for weight in decoder.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.3)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="a")))
    digests = {name: name[0] * 16 for name in ("digest", "tokenizer_digest", "chat_template_digest", "ends_digest")}
    return Target("tiny", decoder, tokenizer, **digests)
