"""Model directories in every shape they come in, and what is said about broken ones."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from dspark.errors import CheckpointError
from dspark.models.attention import AttentionBatch
from dspark.models.decoder import Decoder
from dspark.models.weights import load_decoder, save_decoder, weights_digest

from .conftest import FAMILIES, make_reference

Save = Callable[..., tuple[transformers.PreTrainedModel, Path]]


def logits_of(decoder: Decoder) -> torch.Tensor:
    ids = torch.arange(3, 17)[None]
    batch = AttentionBatch.build(torch.arange(14)[None], [14], [[1, 2]], 8)
    with torch.inference_mode():
        return decoder.logits(decoder(ids, batch, decoder.new_cache(3, 8)).hidden)


@pytest.mark.parametrize("name", FAMILIES)
def test_saved_directory_is_read_by_us_and_by_transformers(name: str, save_reference: Save, tmp_path: Path) -> None:
    _, path = save_reference(name)
    decoder = load_decoder(path)
    save_decoder(decoder, None, tmp_path / "copy")
    copy = load_decoder(tmp_path / "copy")
    assert copy.config == decoder.config
    assert weights_digest(copy) == weights_digest(decoder)
    assert torch.equal(logits_of(copy), logits_of(decoder))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "copy").eval()
    with torch.inference_mode():
        assert torch.allclose(theirs(torch.arange(3, 17)[None]).logits, logits_of(decoder), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["gemma3", "gemma4", "gemma4_unified"])
@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_text_part_of_a_multi_modal_directory(name: str, prefix: str, save_reference: Save) -> None:
    """As the hub has them: the text model's config and tensors inside another's, eos ids beside it."""
    _, path = save_reference(name)
    alone = load_decoder(path)
    text = json.loads((path / "config.json").read_text())
    wrapper = text["architectures"][0].replace("ForCausalLM", "ForConditionalGeneration")
    outer = {"architectures": [wrapper], "model_type": "outer", "dtype": "float32", "eos_token_id": [1, 106]}
    inner = text | {"architectures": None, "dtype": None, "eos_token_id": 1}
    (path / "config.json").write_text(json.dumps(outer | {"text_config": inner, "vision_config": {}}))
    (path / "generation_config.json").unlink()
    tensors = load_file(path / "model.safetensors")
    renamed = {name.replace("model.", prefix, 1): tensor for name, tensor in tensors.items()}
    save_file(renamed | {"vision_tower.norm.weight": torch.ones(3)}, path / "model.safetensors")
    decoder = load_decoder(path)
    assert decoder.config == alone.config.replace(eos_token_ids=(1, 106))
    assert torch.equal(logits_of(decoder), logits_of(alone))


def test_multi_modal_directory_as_transformers_saves_it(tmp_path: Path) -> None:
    text = make_reference("gemma3")
    vision = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = transformers.Gemma3Config(
        text_config=text.config.to_dict(), vision_config=vision | {"image_size": 8, "patch_size": 4}
    )
    model = transformers.Gemma3ForConditionalGeneration(config).eval()
    model.model.language_model.load_state_dict(text.model.state_dict())
    model.save_pretrained(tmp_path)
    with torch.inference_mode():
        wanted = text(torch.arange(3, 17)[None]).logits
    assert torch.allclose(logits_of(load_decoder(tmp_path)), wanted, rtol=1e-4, atol=1e-4)


def test_norms_that_are_stored_less_one_keep_their_digits(save_reference: Save, tmp_path: Path) -> None:
    """In bfloat16 1 + w would lose digits of w: it is kept in float32 and written back as it was."""
    model, path = save_reference("gemma3")
    decoder = load_decoder(path, torch.bfloat16)
    stored = model.model.norm.weight.bfloat16()
    exact = load_decoder(path).norm.weight
    assert decoder.norm.weight.dtype == torch.float32
    assert torch.equal(decoder.norm.weight, exact)
    save_decoder(decoder, None, tmp_path / "copy")
    written = load_file(tmp_path / "copy" / "model.safetensors")["model.norm.weight"]
    assert torch.equal(written, stored)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_digest_of_a_config_ignores_fields_that_came_later(name: str, save_reference: Save) -> None:
    """Caches and drafters name digests made before a field existed: at its default it must not count."""
    config = load_decoder(save_reference(name)[1]).config
    later = {"sandwich_norms", "local_rope", "moe", "v_norm"}
    assert later.isdisjoint(config.model_dump()) == (name == "llama")
    assert config.digest() != config.replace(v_norm=True).digest()


def test_sharded_and_single_files_are_one_model(save_reference: Save, tmp_path: Path) -> None:
    model, path = save_reference("llama_tied")
    model.save_pretrained(tmp_path / "shards", max_shard_size="40KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    assert weights_digest(load_decoder(tmp_path / "shards")) == weights_digest(load_decoder(path))


def test_digest_tells_models_apart_and_ignores_dtype(save_reference: Save) -> None:
    _, path = save_reference("llama")
    digest = weights_digest(load_decoder(path))
    assert digest == weights_digest(load_decoder(path, torch.bfloat16))
    decoder = load_decoder(path)
    decoder.norm.weight.mul_(1.1)
    assert digest != weights_digest(decoder)


def test_settings_of_older_files(save_reference: Save) -> None:
    """Before transformers 5: rope_theta and rope_scaling apart, torch_dtype, and no architectures in some files."""
    _, path = save_reference("llama_llama3")
    config = load_decoder(path).config
    hf = json.loads((path / "config.json").read_text())
    rope = hf.pop("rope_parameters")
    hf |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope | {"type": rope.pop("rope_type")}}
    hf["torch_dtype"] = hf.pop("dtype")
    del hf["architectures"], hf["head_dim"]
    (path / "config.json").write_text(json.dumps(hf))
    assert load_decoder(path).config == config


def test_eos_ids_of_both_configs(save_reference: Save) -> None:
    _, path = save_reference("llama")
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 50]}))
    assert load_decoder(path).config.eos_token_ids == (2, 50)


def change_tensors(path: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors")


def test_missing_extra_and_misshapen_tensors_are_named(save_reference: Save) -> None:
    _, path = save_reference("llama")
    change_tensors(path, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}))
    load_decoder(path)  # known to be left over in old files
    change_tensors(path, lambda t: t.update(extra=torch.zeros(1)))
    with pytest.raises(CheckpointError, match="unexpected extra;"):
        load_decoder(path)
    change_tensors(path, lambda t: t.pop("extra"))
    change_tensors(path, lambda t: t.update({"model.norm.weight": torch.zeros(5)}))
    with pytest.raises(CheckpointError, match=r"norm\.weight has shape \(5,\), the config asks \(48,\)"):
        load_decoder(path)
    change_tensors(path, lambda t: t.pop("model.layers.2.self_attn.k_proj.weight"))
    with pytest.raises(CheckpointError, match=r"missing layers\.2\.self_attn\.k_proj\.weight;"):
        load_decoder(path)


def test_untied_model_without_head(save_reference: Save) -> None:
    _, path = save_reference("llama")
    change_tensors(path, lambda t: t.pop("lm_head.weight"))
    with pytest.raises(CheckpointError, match=r"missing lm_head\.weight"):
        load_decoder(path)


def test_damaged_and_missing_files(save_reference: Save, tmp_path: Path) -> None:
    model, path = save_reference("llama")
    file = path / "model.safetensors"
    whole = file.read_bytes()
    for damage in (whole[:-100], whole[:5], b"\xff" * 200, b""):
        file.write_bytes(damage)
        with pytest.raises(CheckpointError, match=r"model\.safetensors: damaged or truncated"):
            load_decoder(path)
    file.unlink()
    with pytest.raises(CheckpointError, match="holds neither"):
        load_decoder(path)
    with pytest.raises(CheckpointError, match=r"config\.json: missing"):
        load_decoder(tmp_path)
    (path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json: not valid JSON"):
        load_decoder(path)
    model.save_pretrained(tmp_path / "shards", max_shard_size="40KB")
    next(iter(sorted((tmp_path / "shards").glob("*.safetensors")))).unlink()
    with pytest.raises(CheckpointError, match=r"model-00001-of-.*: missing"):
        load_decoder(tmp_path / "shards")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["FalconForCausalLM"]}, r"\(FalconForCausalLM\); supported: LlamaForCausalLM, Mistral"),
        ({"architectures": None, "model_type": "falcon"}, r"\(falcon\); supported: LlamaForCausalLM"),
        ({"hidden_size": None}, "hidden_size: expected an integer, got None"),
        ({"hidden_act": "relu"}, "hidden_act"),
        ({"quantization_config": {"bits": 4}}, "quantization_config: quantised weights are not supported"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope_type"),
        ({"rope_parameters": {"rope_type": "linear"}}, "rope_type 'linear' needs 'factor'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor: 0.5 is not supported"),
        ({"num_key_value_heads": 4}, "not a multiple of num_key_value_heads"),
        ({"name": "gemma3", "attn_logit_softcapping": 50.0}, "attn_logit_softcapping: 50.0 is not supported"),
        ({"name": "gemma4", "hidden_size_per_layer_input": 8}, "hidden_size_per_layer_input: 8 is not supported"),
        ({"name": "gemma4_unified", "num_kv_shared_layers": 2}, "num_kv_shared_layers: 2 is not supported"),
        ({"name": "qwen3_moe", "num_experts_per_tok": 7}, r"num_experts_per_tok \(7\) is above num_experts"),
        ({"name": "qwen3_moe", "moe_intermediate_size": None}, "moe_intermediate_size"),
    ],
)
def test_configs_that_are_refused(change: dict[str, object], message: str, save_reference: Save) -> None:
    _, path = save_reference(str(change.pop("name", "llama")))
    hf = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(hf | change))
    with pytest.raises(CheckpointError, match=message) as caught:
        load_decoder(path)
    assert "config.json" in str(caught.value)
    assert "\n" not in str(caught.value)
