"""The release layout: read strictly, written whole, and the public files' exact names and shapes load unchanged."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from dspark.drafters.base import Drafter
from dspark.drafters.layouts.deepspec import read_drafter, write_drafter
from dspark.errors import CheckpointError
from dspark.models.decoder import Decoder
from dspark.spec.types import SamplingRows

WEIGHTS = "model.safetensors"


def public_release(path: Path, target: Decoder, head: str = "vanilla") -> dict[str, torch.Tensor]:
    """A synthetic file with the names and (scaled) shapes of deepseek-ai/dspark_qwen3_4b_block7."""
    h, v, r, m, inner, d = 32, 40, 8, 3, 48, 8
    config = {
        "architectures": ["Qwen3DSparkModel"], "model_type": "qwen3", "attention_bias": False, "attention_dropout": 0.0,
        "block_size": 7, "bos_token_id": 1, "confidence_head_with_markov": True, "dtype": "bfloat16",
        "enable_confidence_head": True, "eos_token_id": 2, "head_dim": d, "hidden_act": "silu", "hidden_size": h,
        "initializer_range": 0.02, "intermediate_size": inner, "layer_types": ["full_attention"] * 5,
        "markov_head_type": head, "markov_rank": r, "mask_token_id": 3, "max_position_embeddings": 128,
        "max_window_layers": 4, "num_anchors": 512, "num_attention_heads": 4, "num_hidden_layers": 5,
        "num_key_value_heads": 2, "num_target_layers": 4, "rms_norm_eps": 1e-6, "rope_scaling": None,
        "rope_theta": 1000000, "sliding_window": None, "target_layer_ids": [0, 1, 2], "tie_word_embeddings": False,
        "use_cache": True, "use_sliding_window": False, "vocab_size": v,
    }  # fmt: skip
    shapes = {
        "fc.weight": (h, m * h), "hidden_norm.weight": (h,), "norm.weight": (h,),
        "markov_head.markov_w1.weight": (v, r), "markov_head.markov_w2.weight": (v, r),
        "confidence_head.proj.weight": (1, h + r), "confidence_head.proj.bias": (1,),
    }  # fmt: skip
    if head == "gated":
        shapes |= {"markov_head.gate_proj.weight": (r, h + r), "markov_head.gate_proj.bias": (r,)}
    if head == "rnn":
        shapes |= {"markov_head.joint_proj.weight": (3 * r, 2 * r + h), "markov_head.joint_proj.bias": (3 * r,)}
    for n in range(5):
        at = f"layers.{n}."
        shapes |= {
            at + "input_layernorm.weight": (h,), at + "post_attention_layernorm.weight": (h,),
            at + "self_attn.q_proj.weight": (4 * d, h), at + "self_attn.k_proj.weight": (2 * d, h),
            at + "self_attn.v_proj.weight": (2 * d, h), at + "self_attn.o_proj.weight": (h, 4 * d),
            at + "self_attn.q_norm.weight": (d,), at + "self_attn.k_norm.weight": (d,),
            at + "mlp.gate_proj.weight": (inner, h), at + "mlp.up_proj.weight": (inner, h),
            at + "mlp.down_proj.weight": (h, inner),
        }  # fmt: skip
    torch.manual_seed(5)
    tensors = {name: torch.randn(shape).bfloat16() for name, shape in shapes.items()}
    tensors["embed_tokens.weight"] = target.embed_tokens.weight.bfloat16()
    tensors["lm_head.weight"] = target.lm_head.weight.bfloat16()
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    save_file(tensors, path / WEIGHTS)
    return tensors


@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
def test_public_layout_loads_unchanged(target: Decoder, tmp_path: Path, head: str) -> None:
    tensors = public_release(tmp_path / "release", target, head)
    drafter = read_drafter(tmp_path / "release", target)
    assert drafter.config.num_drafts == 7
    assert drafter.config.sample_from_anchor
    assert drafter.config.block_attention == "bidirectional"
    for name, value in drafter.named_parameters():
        assert torch.equal(value, tensors[name.removeprefix("backbone.")].float()), name


def gemma4_release(path: Path, target: Decoder) -> dict[str, torch.Tensor]:
    """A synthetic file with the names and (scaled) shapes of deepseek-ai/dspark_gemma4_12b_block7."""
    h, v, r, m, inner, d, heads = 32, 40, 8, 5, 48, 16, 4
    config = {
        "architectures": ["Gemma4DSparkModel"], "attention_bias": False, "attention_dropout": 0.0,
        "attention_k_eq_v": True, "block_size": 7, "bos_token_id": 2, "confidence_head_with_markov": True,
        "dtype": "bfloat16", "enable_confidence_head": True, "enable_moe_block": False, "eos_token_id": 1,
        "final_logit_softcapping": 30.0, "global_head_dim": d, "head_dim": 8, "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": h, "hidden_size_per_layer_input": 0, "initializer_range": 0.02, "intermediate_size": inner,
        "layer_types": ["full_attention"] * 5, "markov_head_type": "vanilla", "markov_rank": r, "mask_token_id": 4,
        "max_position_embeddings": 128, "model_type": "gemma4_text", "moe_intermediate_size": None, "num_anchors": 512,
        "num_attention_heads": heads, "num_experts": None, "num_global_key_value_heads": 1, "num_hidden_layers": 5,
        "num_key_value_heads": 2, "num_kv_shared_layers": 0, "num_target_layers": 6, "pad_token_id": 0,
        "rms_norm_eps": 1e-6, "rope_parameters": {
            "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1e6, "rope_type": "proportional"},
            "rope_theta": None, "rope_type": "default",
            "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
        },
        "sliding_window": 1024, "target_layer_ids": [-1, 0, 2, 3, 4], "target_model_type": "gemma4_unified",
        "target_text_model_type": "gemma4_unified_text", "tie_word_embeddings": False, "top_k_experts": None,
        "use_bidirectional_attention": "vision", "use_cache": True, "use_double_wide_mlp": False, "vocab_size": v,
        "vocab_size_per_layer_input": v,
    }  # fmt: skip
    shapes = {
        "fc.weight": (h, m * h), "hidden_norm.weight": (h,), "norm.weight": (h,),
        "markov_head.markov_w1.weight": (v, r), "markov_head.markov_w2.weight": (v, r),
        "confidence_head.proj.weight": (1, h + r), "confidence_head.proj.bias": (1,),
    }  # fmt: skip
    for n in range(5):
        at = f"layers.{n}."
        shapes |= {
            at + "input_layernorm.weight": (h,), at + "post_attention_layernorm.weight": (h,),
            at + "pre_feedforward_layernorm.weight": (h,), at + "post_feedforward_layernorm.weight": (h,),
            at + "layer_scalar": (1,),
            at + "self_attn.q_proj.weight": (heads * d, h), at + "self_attn.k_proj.weight": (d, h),
            at + "self_attn.o_proj.weight": (h, heads * d),
            at + "self_attn.q_norm.weight": (d,), at + "self_attn.k_norm.weight": (d,),
            at + "mlp.gate_proj.weight": (inner, h), at + "mlp.up_proj.weight": (inner, h),
            at + "mlp.down_proj.weight": (h, inner),
        }  # fmt: skip
    torch.manual_seed(5)
    tensors = {name: (torch.randn(shape) * 0.3).bfloat16() for name, shape in shapes.items()}
    tensors["embed_tokens.weight"] = target.embed_tokens.weight.bfloat16()
    tensors["lm_head.weight"] = target.lm_head.weight.bfloat16()
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    save_file(tensors, path / WEIGHTS)
    return tensors


def test_public_gemma4_layout_loads_unchanged(gemma4_target: Decoder, tmp_path: Path) -> None:
    tensors = gemma4_release(tmp_path / "release", gemma4_target)
    drafter = read_drafter(tmp_path / "release", gemma4_target)
    assert drafter.config.layer_style == "gemma4"
    assert (drafter.config.head_dim, drafter.config.num_key_value_heads) == (16, 1)
    assert drafter.config.final_logit_softcapping == 30.0
    own = dict(drafter.named_parameters())
    assert len(own) == len(tensors) - 2  # the copies of the target's embedding and head
    for name, value in own.items():
        assert torch.equal(value, tensors[name.removeprefix("backbone.")].float()), name
    write_drafter(drafter, tmp_path / "copy", torch.float32)
    again = read_drafter(tmp_path / "copy", gemma4_target)
    assert again.config == drafter.config
    assert all(torch.equal(again.state_dict()[name], value) for name, value in drafter.state_dict().items())


def test_gemma4_layers_are_transformers_own(gemma4_target: Decoder, tmp_path: Path) -> None:
    """Causal blocks without context: the draft layers are then a Gemma 4 text model on the scaled embeddings."""
    tensors = gemma4_release(tmp_path / "release", gemma4_target)
    raw = json.loads((tmp_path / "release" / "config.json").read_text())
    (tmp_path / "release" / "config.json").write_text(json.dumps(raw | {"block_attention": "causal"}))
    drafter = read_drafter(tmp_path / "release", gemma4_target).prepare()
    reference = transformers.Gemma4ForCausalLM(transformers.Gemma4TextConfig.from_dict(raw)).float().eval()
    state = {f"model.{name}": t.float() for name, t in tensors.items() if name.startswith(("layers.", "norm."))}
    state |= {"model.embed_tokens.weight": gemma4_target.embed_tokens.weight, "lm_head.weight": drafter.lm_head_weight}
    missing, unexpected = reference.load_state_dict(state, strict=False)
    assert not unexpected
    assert not missing
    ids = torch.tensor([[7, 4, 4, 4, 4, 4, 4]])
    cache = drafter.new_cache(3, 8)
    batch = drafter.draft_batch([0], [[1, 2]], 8)
    with torch.inference_mode():
        wanted = reference(ids).logits
        hidden = drafter.backbone.draft(drafter.embed(ids), batch, cache)
        torch.testing.assert_close(hidden, reference.model(ids).last_hidden_state, rtol=1e-4, atol=1e-4)
        rows = SamplingRows(*(torch.tensor([x]) for x in (0.0, 0, 1.0, 0.0, 1)))
        block = drafter.propose(ids[:, 0], batch, cache, rows, torch.tensor([0]), drafter.num_drafts)
        head = drafter.markov_head
        first = wanted[0, 0] + head.markov_w2(head.markov_w1(ids[0, :1]))[0]
    assert int(block.tokens[0, 0]) == int(first.argmax())


def test_gemma4_drafter_with_sliding_layers_is_refused(gemma4_target: Decoder, tmp_path: Path) -> None:
    gemma4_release(tmp_path / "release", gemma4_target)
    raw = json.loads((tmp_path / "release" / "config.json").read_text())
    raw["layer_types"][0] = "sliding_attention"
    (tmp_path / "release" / "config.json").write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match="layer_types: a Gemma 4 drafter has full_attention layers only"):
        read_drafter(tmp_path / "release", gemma4_target)


@pytest.mark.parametrize(
    "variant",
    [
        {},
        {"draft_vocab_size": 17, "sample_from_anchor": False, "block_attention": "causal"},
        {
            "algorithm": "dflash",
            "markov_rank": 0,
            "enable_confidence_head": False,
            "confidence_head_with_markov": False,
        },
        {"sliding_window": 5, "layer_types": ("sliding_attention", "full_attention"), "markov_head_type": "rnn"},
        {"layer_style": "gemma4", "attention_k_eq_v": True, "num_key_value_heads": 1, "final_logit_softcapping": 9.0},
        {"layer_style": "gemma4"},
        {"final_logit_softcapping": 9.0},
    ],
)
def test_round_trip(
    make_drafter: Callable[..., Drafter], target: Decoder, tmp_path: Path, variant: dict[str, object]
) -> None:
    drafter = make_drafter(**variant)
    write_drafter(drafter, tmp_path / "d", torch.float32, {"target_digest": "abc"})
    again = read_drafter(tmp_path / "d", target, "abc")
    assert again.config == drafter.config.replace(layer_types=again.config.layer_types)
    for name, value in drafter.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name
    if drafter.token_ids is not None:
        assert again.token_ids is not None
        assert torch.equal(again.token_ids, drafter.token_ids)


def test_feature_scale_is_folded_into_fc(make_drafter: Callable[..., Drafter], target: Decoder, tmp_path: Path) -> None:
    drafter = make_drafter()
    drafter.backbone.feature_scale.uniform_(0.1, 3.0)
    write_drafter(drafter, tmp_path / "d", torch.float32)
    features = torch.randn(6, 3, 32)
    torch.testing.assert_close(
        read_drafter(tmp_path / "d", target).backbone.project_context(features),
        drafter.backbone.project_context(features),
    )


def damaged(path: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(path / WEIGHTS)
    change(tensors)
    save_file(tensors, path / WEIGHTS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("norm.weight"), "missing tensor norm.weight"),
        (lambda t: t.update(stray=torch.ones(1)), "unexpected tensor stray"),
        (lambda t: t.update({"norm.weight": torch.ones(5)}), r"norm.weight is \(5,\)"),
        (lambda t: t.pop("d2t"), "d2t is missing"),
        (lambda t: t.update(d2t=torch.zeros_like(t["d2t"]).fill_(99)), "d2t leaves the vocabulary"),
        (lambda t: t.update(t2d=torch.ones_like(t["t2d"])), "t2d and d2t disagree"),
        (lambda t: t.update({"lm_head.weight": torch.ones(17, 32)}), "lm_head.weight is not the target's"),
    ],
)
def test_what_does_not_fit_is_named(
    make_drafter: Callable[..., Drafter], target: Decoder, tmp_path: Path,
    change: Callable[[dict[str, torch.Tensor]], object], message: str,
) -> None:  # fmt: skip
    write_drafter(make_drafter(draft_vocab_size=17), tmp_path / "d")
    damaged(tmp_path / "d", change)
    with pytest.raises(CheckpointError, match=message):
        read_drafter(tmp_path / "d", target)


def test_another_target_truncation_and_absence(
    make_drafter: Callable[..., Drafter], target: Decoder, tmp_path: Path
) -> None:
    write_drafter(make_drafter(), tmp_path / "d", provenance={"target": "some-model", "target_digest": "abc"})
    with pytest.raises(CheckpointError, match="trained for some-model"):
        read_drafter(tmp_path / "d", target, "xyz")
    data = (tmp_path / "d" / WEIGHTS).read_bytes()
    (tmp_path / "d" / WEIGHTS).write_bytes(data[: len(data) // 2])
    with pytest.raises(CheckpointError, match="damaged or truncated"):
        read_drafter(tmp_path / "d", target)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        read_drafter(tmp_path / "nowhere", target)


def test_an_unknown_architecture_lists_the_known(tmp_path: Path, target: Decoder) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["FooDraft"]}))
    with pytest.raises(CheckpointError, match="Qwen3DSparkModel"):
        read_drafter(tmp_path, target)
