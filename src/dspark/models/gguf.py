"""GGUF files (llama.cpp): metadata as a Hugging Face config, tensors dequantised under Hugging Face names."""

import re
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from torch import Tensor

from dspark.errors import CheckpointError

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
}

_TENSORS = {
    "token_embd": "embed_tokens",
    "output_norm": "norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA_TENSORS = _TENSORS | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GEMMA_27B_LAYERS = 62
_FIELDS = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "max_position_embeddings": "context_length",
    "rope_theta": "rope.freq_base",
}


class GgufFile:
    """An open GGUF file of a llama, qwen2, qwen3 or gemma3 model; tensors are memory-mapped until read."""

    def __init__(self, path: str | Path) -> None:
        """Raises `CheckpointError` when the file is missing, damaged, truncated or of another architecture."""
        self.where = str(path)
        if not Path(path).is_file():
            raise CheckpointError(f"{path}: missing")
        try:
            reader = GGUFReader(path)
        except (ValueError, IndexError, KeyError, OverflowError, OSError) as error:
            raise CheckpointError(f"{path}: damaged or truncated GGUF file ({error}); fetch it again") from None
        self._fields = reader.fields
        self._arch = self._field("general.architecture")
        known = _GEMMA_TENSORS if self._arch == "gemma3" else _TENSORS
        self._tensors = {_hugging_face_name(tensor.name, known): tensor for tensor in reader.tensors}
        if self._arch not in ARCHITECTURES or self._field(f"{self._arch}.expert_count"):
            raise CheckpointError(
                f"{path}: unsupported GGUF architecture ({self._arch}); supported, dense: {', '.join(ARCHITECTURES)}"
            )
        if "rope_freqs.weight" in self._tensors:
            raise CheckpointError(f"{path}: rope_freqs (Llama 3 scaling) is not read from GGUF; use the safetensors")

    def hf_config(self) -> dict[str, Any]:
        """Return the metadata as `config_from_hf` reads it."""
        window = self._field(f"{self._arch}.attention.sliding_window")
        hf = {name: self._field(f"{self._arch}.{key}") for name, key in _FIELDS.items()}
        hf = {name: value for name, value in hf.items() if value is not None}
        hf |= {
            "architectures": [ARCHITECTURES[self._arch]],
            "vocab_size": len(self._tensors["embed_tokens.weight"].data)
            if "embed_tokens.weight" in self.names()
            else 0,
            "tie_word_embeddings": "lm_head.weight" not in self._tensors,
            "attention_bias": "layers.0.self_attn.q_proj.bias" in self._tensors,
            "mlp_bias": "layers.0.mlp.up_proj.bias" in self._tensors,
            "eos_token_id": self._field("tokenizer.ggml.eos_token_id"),
            "rope_scaling": self._rope_scaling(),
        }
        if window and self._arch == "llama":  # Mistral's files call themselves llama
            hf |= {"architectures": ["MistralForCausalLM"], "sliding_window": window}
        return hf | self._gemma_config(hf) if self._arch == "gemma3" else hf

    def names(self) -> set[str]:
        """Return the tensors' names as in Hugging Face files, without the leading `model.`."""
        return set(self._tensors)

    def read(self, name: str) -> Tensor:
        """Return a tensor dequantised to float32, in Hugging Face order. Raises `CheckpointError`."""
        stored = self._tensors[name]
        try:
            tensor = torch.tensor(dequantize(stored.data, stored.tensor_type))
        except NotImplementedError:
            raise CheckpointError(f"{self.where}: {name}: {stored.tensor_type.name} cannot be dequantised") from None
        if self._arch == "gemma3" and name.endswith("norm.weight"):
            return tensor - 1  # the converter adds it
        if self._arch != "llama":
            return tensor
        if ".q_proj." in name:
            return _pair_halves(tensor, self._field("llama.attention.head_count"))
        if ".k_proj." in name:
            return _pair_halves(tensor, self._kv_heads())
        return tensor

    def _gemma_config(self, hf: dict[str, Any]) -> dict[str, Any]:
        """Return what Gemma's files add, or leave out because llama.cpp knows it."""
        is_27b = hf["num_hidden_layers"] == _GEMMA_27B_LAYERS
        ends = [hf["eos_token_id"], self._field("tokenizer.ggml.eot_token_id")]
        pattern = self._field("gemma3.attention.sliding_window_pattern")  # of newer files: a period or a flag a layer
        slides = pattern if isinstance(pattern, list) else None
        return {
            "sliding_window": self._field("gemma3.attention.sliding_window"),
            "sliding_window_pattern": pattern if slides is None else None,
            "layer_types": slides and ["sliding_attention" if slid else "full_attention" for slid in slides],
            "query_pre_attn_scalar": hf["hidden_size"] // hf["num_attention_heads"] if is_27b else hf["head_dim"],
            "rope_local_base_freq": self._field("gemma3.rope.freq_base_swa"),
            "final_logit_softcapping": self._field("gemma3.final_logit_softcapping"),
            "eos_token_id": sorted({token for token in ends if token is not None}),
        }

    def _field(self, key: str) -> Any:
        return self._fields[key].contents() if key in self._fields else None

    def _kv_heads(self) -> int:
        return int(self._field("llama.attention.head_count_kv") or self._field("llama.attention.head_count"))

    def _rope_scaling(self) -> dict[str, Any] | None:
        prefix = f"{self._arch}.rope.scaling"
        kind = self._field(f"{prefix}.type")
        if kind in (None, "none"):
            return None
        return {
            "rope_type": kind,
            "factor": self._field(f"{prefix}.factor"),
            "original_max_position_embeddings": self._field(f"{prefix}.original_context_length"),
        }


def _hugging_face_name(name: str, known: dict[str, str]) -> str:
    """Translate `blk.3.attn_q.weight` to `layers.3.self_attn.q_proj.weight`; an unknown name stays as it is."""
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    if match is None or match[2] not in known:
        return name
    layer = f"layers.{match[1]}." if match[1] else ""
    return f"{layer}{known[match[2]]}.{match[3]}"


def _pair_halves(tensor: Tensor, heads: int) -> Tensor:
    """Undo llama.cpp's order of a head's rows: there the two components of a rotated plane stand side by side."""
    return tensor.reshape(heads, -1, 2, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)
