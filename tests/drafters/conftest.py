"""Tiny random targets and drafters."""

from collections.abc import Callable

import pytest
import torch
from tiny_training import HIDDEN, LAYERS, VOCAB, make_decoder

from dspark.drafters.base import Drafter
from dspark.drafters.config import DrafterConfig
from dspark.drafters.eagle3 import Eagle3Drafter
from dspark.drafters.factory import make_drafter as build
from dspark.models.config import DecoderConfig, RopeConfig
from dspark.models.decoder import Decoder


@pytest.fixture
def target() -> Decoder:
    return make_decoder(tied=False)


CHAIN = {
    "algorithm": "eagle3",
    "num_hidden_layers": 1,
    "mask_token_id": None,
    "markov_rank": 0,
    "enable_confidence_head": False,
    "confidence_head_with_markov": False,
    "ttt_length": 4,
    "block_size": 7,
}


@pytest.fixture
def gemma4_target() -> Decoder:
    torch.manual_seed(0)
    kinds = ("sliding_attention", "full_attention") * 3
    config = DecoderConfig(
        architecture="Gemma4UnifiedForCausalLM",
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        global_head_dim=16,
        num_global_key_value_heads=1,
        local_rope=RopeConfig(),
        max_position_embeddings=128,
        layer_types=kinds,
        sliding_window=16,
        scale_embeddings=True,
        final_logit_softcapping=30.0,
    )
    return Decoder(config).requires_grad_(False).eval()


@pytest.fixture
def make_drafter(target: Decoder) -> Callable[..., Drafter]:
    def make(**changes: object) -> Drafter:
        fields: dict[str, object] = {
            "vocab_size": VOCAB,
            "hidden_size": HIDDEN,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "rope": RopeConfig(),
            "max_position_embeddings": 128,
            "num_target_layers": LAYERS,
            "target_layer_ids": (-1, 1, 2),
            "block_size": 4,
            "mask_token_id": 3,
            "markov_rank": 6,
            "enable_confidence_head": True,
            "confidence_head_with_markov": True,
        }
        config = DrafterConfig.from_dict(fields | changes, "test")
        size = config.draft_vocab_size
        token_ids = None if size is None else torch.randperm(VOCAB)[:size].sort().values
        torch.manual_seed(1)
        drafter = build(config, target, token_ids)
        for p in drafter.parameters():
            if p.ndim > 1:
                torch.nn.init.normal_(p, std=0.3)
        return drafter

    return make


@pytest.fixture
def make_chain(make_drafter: Callable[..., Drafter]) -> Callable[..., Eagle3Drafter]:
    def make(**changes: object) -> Eagle3Drafter:
        drafter = make_drafter(**(CHAIN | changes))
        assert isinstance(drafter, Eagle3Drafter)
        return drafter

    return make
