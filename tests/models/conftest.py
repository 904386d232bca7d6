"""Tiny random models of each family, made by transformers: the outside reference of the tests here."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

SIZES: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 32}
MSCALE = {"beta_fast": 16.0, "beta_slow": 2.0, "mscale": 1.0, "mscale_all_dim": 0.5, "truncate": False}

MIXED = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
GEMMA = {"head_dim": 16, "sliding_window": 7, "layer_types": MIXED}
GEMMA3 = GEMMA | {"query_pre_attn_scalar": 24}
GEMMA3_ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
    "full_attention": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 8.0},
}
GEMMA4 = GEMMA | {"global_head_dim": 32, "final_logit_softcapping": 30.0}
SHARED = {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
MOE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 16}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama_tied": ("Llama", {"tie_word_embeddings": True, "head_dim": 16}),
    "llama_biases": ("Llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 6}),
    "llama_llama3": ("Llama", {"rope_parameters": LLAMA3}),
    "llama_linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}}),
    "llama_dynamic": ("Llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral_sliding": ("Mistral", {"sliding_window": 7}),
    "qwen2": ("Qwen2", {}),
    "qwen2_mix": ("Qwen2", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 2}),
    "qwen2_yarn": ("Qwen2", {"rope_parameters": YARN, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3_yarn": ("Qwen3", {"head_dim": 16, "rope_parameters": YARN | MSCALE, "attention_bias": True}),
    "qwen3_mix": ("Qwen3", {"head_dim": 8, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "qwen3_moe": ("Qwen3Moe", MOE | {"norm_topk_prob": True}),
    "qwen3_moe_mix": ("Qwen3Moe", MOE | {"decoder_sparse_step": 2, "use_sliding_window": True, "sliding_window": 6}),
    "qwen3_moe_dense": ("Qwen3Moe", MOE | {"mlp_only_layers": [0, 2], "attention_bias": True}),
    "gemma3": ("Gemma3", GEMMA3),
    "gemma3_pattern": (
        "Gemma3",
        {"head_dim": 8, "sliding_window": 5, "sliding_window_pattern": 3, "query_pre_attn_scalar": 8},
    ),
    "gemma3_ropes": ("Gemma3", GEMMA3 | {"rope_parameters": GEMMA3_ROPES, "final_logit_softcapping": 20.0}),
    "gemma4": ("Gemma4", GEMMA4 | {"hidden_size_per_layer_input": 0}),
    "gemma4_unified": ("Gemma4Unified", GEMMA4 | SHARED),
    "gemma4_untied": ("Gemma4Unified", GEMMA4 | SHARED | {"tie_word_embeddings": False, "attention_bias": True}),
}


def make_reference(name: str) -> transformers.PreTrainedModel:
    """Return a random float32 transformers model of a family, with norms and biases that are not trivial."""
    family, changes = FAMILIES[name]
    kind = f"{family}Text" if family.startswith("Gemma") else family
    config = getattr(transformers, f"{kind}Config")(**SIZES | changes)
    torch.manual_seed(0)
    model: transformers.PreTrainedModel = getattr(transformers, f"{family}ForCausalLM")(config).float().eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("bias"):
                parameter.normal_(0, 0.3)
            elif "norm" in parameter_name:
                parameter.uniform_(-0.5, 0.5) if family == "Gemma3" else parameter.uniform_(0.5, 1.5)
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.uniform_(0.7, 1.3)
    return model.requires_grad_(False)


@pytest.fixture
def save_reference(tmp_path: Path) -> Callable[..., tuple[transformers.PreTrainedModel, Path]]:
    """Return a function that makes a reference model and saves it as transformers does."""

    def save(name: str, **options: Any) -> tuple[transformers.PreTrainedModel, Path]:
        model = make_reference(name)
        model.save_pretrained(tmp_path / name, **options)
        return model, tmp_path / name

    return save
