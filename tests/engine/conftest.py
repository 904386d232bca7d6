"""Tiny real targets and drafters, in float32."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tiny_tokenizer import EOS, byte_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from dspark.drafters.base import Drafter
from dspark.drafters.config import DrafterConfig
from dspark.drafters.dspark import BlockDrafter
from dspark.drafters.eagle3 import Eagle3Drafter
from dspark.drafters.factory import make_drafter as build
from dspark.models.decoder import Decoder
from dspark.models.target import Target, load_target
from dspark.spec.types import DraftBlock

SHAPE = {
    "vocab_size": 260,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 96,
    "initializer_range": 0.3,
    "eos_token_id": EOS,
    "bos_token_id": None,
    "pad_token_id": None,
    "dtype": "float32",
}
FAMILIES = {
    "llama": {"tie_word_embeddings": True},
    "mistral": {"sliding_window": 8},
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "gemma3_text": {"sliding_window": 8, "sliding_window_pattern": 2, "query_pre_attn_scalar": 8},
    "gemma4_unified_text": {
        "sliding_window": 8,
        "global_head_dim": 16,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "final_logit_softcapping": 30.0,
    },
}


def random_model(path: Path, family: str, **changes: object) -> PreTrainedModel:
    """A transformers model of a family with random weights, also written to `path` with a tokenizer."""
    torch.manual_seed(len(family))
    config = AutoConfig.for_model(family, **(SHAPE | FAMILIES[family] | changes))
    model = AutoModelForCausalLM.from_config(config).eval()
    model.generation_config.eos_token_id = EOS
    model.save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return model


class Scripted(Drafter):
    """A real drafter whose draws are overwritten by known continuations, so that runs of drafts are accepted.

    `script` maps a position and the anchor there to the drafts that follow. Sampled requests keep their draws.
    """

    script: Callable[[int, int], list[int]]

    def propose(self, anchors, batch, cache, rows, seq_lens, num_drafts) -> DraftBlock:
        block = super().propose(anchors, batch, cache, rows, seq_lens, num_drafts)
        drafts = [self.script(*where)[:num_drafts] for where in zip(seq_lens.tolist(), anchors.tolist(), strict=True)]
        return block._replace(tokens=torch.where(rows.greedy[:, None], torch.tensor(drafts), block.tokens))


class ScriptedBlock(Scripted, BlockDrafter):
    """DSpark, scripted."""


class ScriptedChain(Scripted, Eagle3Drafter):
    """EAGLE-3, scripted."""


CHAIN = {
    "algorithm": "eagle3",
    "num_hidden_layers": 1,
    "mask_token_id": None,
    "markov_rank": 0,
    "ttt_length": 4,
}


def drafter_for(decoder: Decoder, cls: Callable[..., Drafter] = build, **changes: object) -> Drafter:
    """A tiny drafter with random weights, four drafts a round unless changed."""
    torch.manual_seed(11)
    c = decoder.config
    fields = {
        "vocab_size": c.vocab_size,
        "hidden_size": c.hidden_size,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rope": c.rope,
        "max_position_embeddings": c.max_position_embeddings,
        "num_target_layers": c.num_hidden_layers,
        "target_layer_ids": (-1, 1),
        "block_size": 4,
        "mask_token_id": c.vocab_size - 1,
        "markov_rank": 4,
    }
    return cls(DrafterConfig.model_validate(fields | changes), decoder).prepare()


def follow(answers: dict[tuple[int, ...], list[int]], num_drafts: int, wrong_every: int = 0):
    """A script that continues the known answers (prompt -> tokens); each `wrong_every`-th position is drafted wrong."""
    following = {
        (len(prompt) + i, token): [*tokens[i + 1 : i + 1 + num_drafts]]
        for prompt, tokens in answers.items()
        for i, token in enumerate(tokens)
    }

    def script(position: int, anchor: int) -> list[int]:
        drafts = following.get((position, anchor), [])
        drafts = [*drafts, *[1] * (num_drafts - len(drafts))]
        if not wrong_every:
            return drafts
        return [(d + 1) % 256 if (position + 1 + i) % wrong_every == 0 else d for i, d in enumerate(drafts)]

    return script


@pytest.fixture(scope="session")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Target, PreTrainedModel]]:
    """make_model(family, **config changes) -> our target and the transformers model with the same weights."""
    made: dict[str, tuple[Target, PreTrainedModel]] = {}

    def make(family: str = "llama", **changes: object) -> tuple[Target, PreTrainedModel]:
        key = family + json.dumps(changes, sort_keys=True)
        if key not in made:
            path = tmp_path_factory.mktemp(family)
            model = random_model(path, family, **changes)
            made[key] = load_target(str(path), dtype="float32"), model
        return made[key]

    return make


@pytest.fixture(scope="session")
def target(make_model) -> Target:
    return make_model()[0]


@pytest.fixture(scope="session")
def make_drafter() -> Callable[..., Drafter]:
    return drafter_for


@pytest.fixture(scope="session")
def make_chain() -> Callable[..., Drafter]:
    """make_chain(decoder, **config changes) -> an EAGLE-3 drafter, four drafts a round unless changed."""
    return lambda decoder, **changes: drafter_for(decoder, **(CHAIN | changes))


@pytest.fixture(scope="session")
def make_scripted() -> Callable[..., Scripted]:
    """make_scripted(decoder, answers, wrong_every) -> a drafter that knows the answers to these prompts."""

    def make(
        decoder: Decoder, answers: dict[tuple[int, ...], list[int]], wrong_every: int = 0, chain: bool = False
    ) -> Scripted:
        drafter = drafter_for(decoder, ScriptedChain, **CHAIN) if chain else drafter_for(decoder, ScriptedBlock)
        assert isinstance(drafter, Scripted)
        drafter.script = follow(answers, drafter.num_drafts, wrong_every)
        return drafter

    return make
