"""Embedding, final norm and LM head out of files whose layers are not there."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny_target import save_foreign_target
from torch import Tensor

from dspark.errors import CheckpointError
from dspark.models.decoder import Decoder
from dspark.models.ends import Ends, TargetEnds
from dspark.models.hf import HuggingFaceCausalLM
from dspark.models.target import load_target, load_target_ends

OURS = {"Llama": {}, "Qwen3": {"head_dim": 8, "num_key_value_heads": 1, "tie_word_embeddings": True}}
FOREIGN = {"GPTNeoX": {}, "Olmo": {}, "Granite": {"logits_scaling": 4.0}, "Cohere": {}}  # Cohere ties its head


def drop_layers(path: Path) -> None:
    """Delete every shard that holds nothing but layers."""
    weight_map: dict[str, str] = json.loads((path / "model.safetensors.index.json").read_text())["weight_map"]
    kept = {file for name, file in weight_map.items() if ".layers." not in name}
    assert len(set(weight_map.values()) - kept) >= 4
    for file in set(weight_map.values()) - kept:
        (path / file).unlink()


def outputs(ends: TargetEnds) -> tuple[Tensor, Tensor]:
    """What a drafter and its trainer make of the ends: embeddings, and logits of some states."""
    states = torch.randn(5, 16, generator=torch.Generator().manual_seed(1))
    return ends.embed_tokens(torch.arange(9)), ends.norm(states) @ ends.lm_head_weight.T


@pytest.mark.parametrize("family", [*OURS, *FOREIGN])
def test_layers_are_not_read(family: str, tmp_path: Path) -> None:
    save_foreign_target(tmp_path, family, config=(OURS | FOREIGN)[family], max_shard_size="2KB")
    whole = load_target(tmp_path, "float32", pack=False, capture="auto")
    assert isinstance(whole.model, Decoder if family in OURS else HuggingFaceCausalLM)
    drop_layers(tmp_path)
    with pytest.raises(CheckpointError):
        load_target(tmp_path, "float32", capture="auto")
    ends = load_target_ends(tmp_path, "float32", whole.digest)
    assert isinstance(ends.model, Ends)
    assert ends.config == whole.config
    assert (ends.digest, ends.ends_digest) == (whole.digest, whole.ends_digest)
    for found, wanted in zip(outputs(ends.model), outputs(whole.model), strict=True):
        assert torch.equal(found, wanted)
    if family == "Qwen3":
        assert ends.model.lm_head_weight is ends.model.embed_tokens.weight
    narrow = load_target_ends(tmp_path, "bfloat16", whole.digest)
    assert narrow.model.embed_tokens.weight.dtype == torch.bfloat16
    assert narrow.ends_digest == whole.ends_digest


def test_files_without_the_base_models_prefix(tmp_path: Path) -> None:
    """As some public files have them."""
    save_foreign_target(tmp_path, "GPTNeoX")
    whole = load_target(tmp_path, "float32", capture="auto")
    file = tmp_path / "model.safetensors"
    save_file({name.removeprefix("gpt_neox."): tensor for name, tensor in load_file(file).items()}, file)
    assert load_target_ends(tmp_path, "float32", whole.digest).ends_digest == whole.ends_digest


def test_ends_that_files_do_not_hold_plainly(tmp_path: Path) -> None:
    """Gemma 2 keeps the factor on its embeddings in a buffer: the whole model is loaded and its ends are taken."""
    options = {"head_dim": 8, "num_key_value_heads": 1, "final_logit_softcapping": 9.0}
    save_foreign_target(tmp_path, "Gemma2", config=options)
    whole = load_target(tmp_path, "float32", capture="auto")
    ends = load_target_ends(tmp_path, "float32", whole.digest)
    assert ends.config.final_logit_softcapping == 9.0
    for found, wanted in zip(outputs(ends.model), outputs(whole.model), strict=True):
        assert torch.equal(found, wanted)


def test_a_model_we_decode_is_named_alike_whatever_runs_it(tmp_path: Path) -> None:
    save_foreign_target(tmp_path, "Llama")
    ours, theirs = (load_target(tmp_path, "float32", capture=capture) for capture in ("decoder", "transformers"))
    assert isinstance(theirs.model, HuggingFaceCausalLM)
    assert (theirs.digest, theirs.ends_digest, theirs.config) == (ours.digest, ours.ends_digest, ours.config)
    with pytest.raises(CheckpointError, match="LlamaForCausalLM is captured through transformers"):
        _ = theirs.decoder


def test_what_a_drafter_takes_over_of_a_foreign_config(tmp_path: Path) -> None:
    save_foreign_target(tmp_path / "neox", "GPTNeoX", config={"rope_parameters": {"rope_theta": 500.0}})
    config = load_target(tmp_path / "neox", capture="auto").config
    assert (config.architecture, config.hidden_size, config.num_hidden_layers) == ("GPTNeoXForCausalLM", 16, 4)
    assert (config.head_dim, config.num_key_value_heads, config.rope.rope_theta) == (8, 2, 500.0)
    assert (config.rms_norm_eps, config.eos_token_ids, config.max_position_embeddings) == (1e-5, (0,), 256)
    model = transformers.BloomForCausalLM(transformers.BloomConfig(vocab_size=22, hidden_size=16, n_layer=2, n_head=2))
    config = HuggingFaceCausalLM(model, "bloom").config
    assert (config.intermediate_size, config.max_position_embeddings, config.tie_word_embeddings) == (64, 131_072, True)
