"""A tiny target, and samples that it really produced."""

from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from dspark.models.attention import AttentionBatch
from dspark.models.config import DecoderConfig
from dspark.models.decoder import Decoder

VOCAB, HIDDEN, LAYERS, TAPS = 40, 32, 4, (0, 2)


class Row(NamedTuple):
    sample_id: int
    token_ids: Tensor
    loss_mask: Tensor
    features: Tensor
    last_hidden: Tensor
    log_normalizer: Tensor | None


@pytest.fixture(scope="session")
def target() -> Decoder:
    torch.manual_seed(0)
    config = DecoderConfig(
        architecture="LlamaForCausalLM",
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=128,
        layer_types=("full_attention",) * LAYERS,
        tie_word_embeddings=True,
    )
    decoder = Decoder(config).requires_grad_(False).eval()
    decoder.embed_tokens.weight.mul_(2.0)
    return decoder


@pytest.fixture(scope="session")
def rows(target: Decoder) -> list[Row]:
    """24 sequences of 12-30 random tokens, the later two thirds supervised, with the target's states."""
    rng, made = np.random.default_rng(0), []
    for i in range(24):
        length = int(rng.integers(12, 31))
        ids = torch.from_numpy(rng.integers(0, VOCAB, length))
        batch = AttentionBatch.build(torch.arange(length)[None], [length], [[1, 2, 3, 4]], 8)
        out = target(ids[None], batch, target.new_cache(5, 8), TAPS)
        mask = torch.zeros(length, dtype=torch.uint8)
        mask[length // 3 :] = 1
        normalizer = target.logits(out.hidden[0]).logsumexp(-1)
        made.append(Row(i, ids.int(), mask, out.taps[0].bfloat16(), out.hidden[0].bfloat16(), normalizer))
    return made
