"""EAGLE-3 files: the DeepSpec release and the originals, by exact names and (scaled) shapes, strict both ways."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dspark.drafters.eagle3 import Eagle3Drafter
from dspark.drafters.layouts.deepspec import read_drafter, write_drafter
from dspark.drafters.layouts.eagle import parse_original
from dspark.errors import CheckpointError
from dspark.models.decoder import Decoder

WEIGHTS = "model.safetensors"
H, V, VD, INNER, D, HEADS, KV = 32, 40, 17, 48, 8, 4, 2


def layer(at: str, qk_norm: bool) -> dict[str, tuple[int, ...]]:
    shapes = {
        "hidden_norm.weight": (H,), "input_layernorm.weight": (H,), "post_attention_layernorm.weight": (H,),
        "self_attn.q_proj.weight": (HEADS * D, 2 * H), "self_attn.k_proj.weight": (KV * D, 2 * H),
        "self_attn.v_proj.weight": (KV * D, 2 * H), "self_attn.o_proj.weight": (H, HEADS * D),
        "mlp.gate_proj.weight": (INNER, H), "mlp.up_proj.weight": (INNER, H), "mlp.down_proj.weight": (H, INNER),
    }  # fmt: skip
    if qk_norm:
        shapes |= {"self_attn.q_norm.weight": (D,), "self_attn.k_norm.weight": (D,)}
    return {at + name: shape for name, shape in shapes.items()}


def write(path: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    save_file(tensors, path / WEIGHTS)
    return tensors


def random(shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    return {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()}


def release(path: Path, target: Decoder) -> dict[str, Tensor]:
    """As deepseek-ai/eagle3_qwen3_4b_ttt7."""
    config = {
        "architectures": ["Qwen3Eagle3Model"], "model_type": "qwen3", "attention_bias": False, "attention_dropout": 0.0,
        "bos_token_id": 1, "dtype": "bfloat16", "eos_token_id": 2, "head_dim": D, "hidden_act": "silu",
        "hidden_size": H, "initializer_range": 0.02, "intermediate_size": INNER, "layer_types": ["full_attention"],
        "max_position_embeddings": 128, "max_window_layers": 4, "num_attention_heads": HEADS, "num_hidden_layers": 1,
        "num_key_value_heads": KV, "num_target_layers": 4, "rms_norm_eps": 1e-6, "rope_scaling": None,
        "rope_theta": 1000000, "sliding_window": None, "step_loss_decay": 0.8, "target_layer_ids": [0, 1, 2],
        "tie_word_embeddings": False, "ttt_length": 7, "use_cache": True, "use_sliding_window": False, "vocab_size": V,
    }  # fmt: skip
    tensors = random({"fc.weight": (H, 3 * H), "norm.weight": (H,)} | layer("layers.0.", qk_norm=True))
    tensors["embed_tokens.weight"] = target.embed_tokens.weight.bfloat16()
    tensors["lm_head.weight"] = target.lm_head.weight.bfloat16()
    return write(path, config, tensors)


def original(path: Path, **changes: Any) -> dict[str, Tensor]:
    """As the published EAGLE-3 files for Llama targets."""
    config = {
        "architectures": ["LlamaForCausalLMEagle3"], "bos_token_id": 1, "draft_vocab_size": VD, "eos_token_id": 2,
        "hidden_act": "silu", "hidden_size": H, "initializer_range": 0.02, "intermediate_size": INNER,
        "max_position_embeddings": 128, "model_type": "llama", "num_attention_heads": HEADS, "num_hidden_layers": 1,
        "num_key_value_heads": KV, "pad_token_id": 0, "pretraining_tp": 1, "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False, "torch_dtype": "float16", "use_cache": True, "vocab_size": V,
    }  # fmt: skip
    shapes = {"fc.weight": (H, 3 * H), "norm.weight": (H,), "lm_head.weight": (VD, H)}
    tensors = random(shapes | layer("midlayer.", qk_norm=False))
    kept = torch.arange(VD) * 2
    tensors["d2t"] = kept - torch.arange(VD)
    tensors["t2d"] = torch.zeros(V, dtype=torch.bool).index_fill_(0, kept, True)
    return write(path, config | changes, tensors)


def test_the_release_loads_unchanged_and_is_written_so(target: Decoder, tmp_path: Path) -> None:
    tensors = release(tmp_path / "release", target)
    drafter = read_drafter(tmp_path / "release", target)
    assert isinstance(drafter, Eagle3Drafter)
    assert (drafter.num_drafts, drafter.config.step_loss_decay, drafter.config.own_lm_head) == (7, 0.8, False)
    assert drafter.lm_head_weight is drafter.target_lm_head_weight
    for name, value in drafter.named_parameters():
        assert torch.equal(value, tensors[name.removeprefix("backbone.")].float()), name
    write_drafter(drafter, tmp_path / "again")
    again = load_file(tmp_path / "again" / WEIGHTS)
    assert again.keys() == tensors.keys() - {"embed_tokens.weight", "lm_head.weight"}
    assert all(torch.equal(again[name], tensors[name]) for name in again)
    theirs, ours = (json.loads((tmp_path / d / "config.json").read_text()) for d in ("release", "again"))
    for name in ("architectures", "ttt_length", "step_loss_decay", "target_layer_ids", "num_hidden_layers"):
        assert ours[name] == theirs[name], name
    assert "mask_token_id" not in ours


@pytest.mark.parametrize("pickled", [False, True])
def test_an_original_loads_with_its_head_and_vocabulary(target: Decoder, tmp_path: Path, pickled: bool) -> None:
    tensors = original(tmp_path)
    if pickled:
        (tmp_path / WEIGHTS).unlink()
        torch.save(tensors, tmp_path / "pytorch_model.bin")
    drafter = read_drafter(tmp_path, target)
    assert isinstance(drafter, Eagle3Drafter)
    assert torch.equal(drafter.lm_head_weight, tensors["lm_head.weight"].float())
    assert drafter.token_ids is not None
    assert drafter.token_ids.tolist() == list(range(0, 2 * VD, 2))
    for name, value in drafter.backbone.named_parameters():
        assert torch.equal(value, tensors[name.replace("layers.0.", "midlayer.")].float()), name


def test_what_an_original_taps() -> None:
    """Inputs of layers 2, n/2 and n - 3, which are the outputs of the ones before."""
    raw = {
        "architectures": ["LlamaForCausalLMEagle3"], "vocab_size": V, "hidden_size": H, "intermediate_size": INNER,
        "num_attention_heads": HEADS, "num_hidden_layers": 1,
    }  # fmt: skip
    assert parse_original(raw, "x", 32).target_layer_ids == (1, 15, 28)
    assert parse_original(raw | {"target_layer_ids": [3, 4, 5]}, "x", 32).target_layer_ids == (3, 4, 5)
    with pytest.raises(CheckpointError, match="eagle_aux_hidden_state_layer_ids: its readers disagree"):
        parse_original(raw | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 5, 9]}}, "x", 32)


@pytest.mark.parametrize("make", ["release", "original"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t, at: t.pop(at + "hidden_norm.weight"), "missing tensor .*hidden_norm.weight"),
        (lambda t, at: t.update({"hidden_norm.weight": torch.ones(H)}), "unexpected tensor hidden_norm.weight"),
        (lambda t, at: t.update({at + "self_attn.q_proj.weight": torch.ones(H, H)}), r"q_proj.weight is \(32, 32\)"),
        (lambda t, at: t.update({"embed_tokens.weight": torch.ones(V, H)}), "embed_tokens.weight is not the target's"),
    ],
)
def test_what_does_not_fit_is_named(
    target: Decoder, tmp_path: Path, make: str, change: Callable[[dict[str, Tensor], str], object], message: str
) -> None:
    tensors = release(tmp_path, target) if make == "release" else original(tmp_path)
    change(tensors, "layers.0." if make == "release" else "midlayer.")
    save_file(tensors, tmp_path / WEIGHTS)
    with pytest.raises(CheckpointError, match=message):
        read_drafter(tmp_path, target)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("lm_head.weight"), "missing tensor lm_head.weight"),
        (lambda t: t.pop("d2t"), "d2t is missing"),
        (lambda t: t.update(t2d=torch.ones(V, dtype=torch.bool)), "t2d and d2t disagree"),
    ],
)
def test_a_part_that_an_original_needs(
    target: Decoder, tmp_path: Path, change: Callable[[dict[str, Tensor]], object], message: str
) -> None:
    tensors = original(tmp_path)
    change(tensors)
    save_file(tensors, tmp_path / WEIGHTS)
    with pytest.raises(CheckpointError, match=message):
        read_drafter(tmp_path, target)


def test_a_pickle_of_more_than_tensors_is_refused(target: Decoder, tmp_path: Path) -> None:
    original(tmp_path)
    (tmp_path / WEIGHTS).unlink()
    torch.save({"fc.weight": Path("x")}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="holds more than tensors"):
        read_drafter(tmp_path, target)


@pytest.mark.parametrize(
    "variant",
    [
        {},
        {"draft_vocab_size": 17, "own_lm_head": True, "qk_norm": False},
        {"step_loss_decay": 1.0},
        {"layer_style": "gemma4", "attention_k_eq_v": True, "num_key_value_heads": 1, "final_logit_softcapping": 9.0},
    ],
)
def test_round_trip(
    make_chain: Callable[..., Eagle3Drafter], target: Decoder, tmp_path: Path, variant: dict[str, object]
) -> None:
    drafter = make_chain(**variant)
    write_drafter(drafter, tmp_path / "d", torch.float32)
    again = read_drafter(tmp_path / "d", target)
    assert again.config == drafter.config.replace(layer_types=again.config.layer_types)
    for name, value in drafter.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name
