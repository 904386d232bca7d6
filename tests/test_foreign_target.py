"""Training where the target is not ours, or is not there as a whole: a family that we do not decode, absent layers."""

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from tiny_target import save_foreign_target, write_answers
from tiny_training import losses

from dspark import stages
from dspark.cache.config import CacheSettings
from dspark.drafters.layouts.deepspec import read_drafter
from dspark.errors import CacheError, CheckpointError, ConfigError
from dspark.models.ends import Ends
from dspark.models.target import Target, load_target
from dspark.training.config import TrainSettings

FAMILIES = {"Llama": {"num_key_value_heads": 1}, "GPTNeoX": {}}


def train_settings(path: Path, name: str, **changes: Any) -> TrainSettings:
    base = {
        "target": str(path / "target"),
        "out": path / name,
        "batch_size": 2,
        "num_anchors": 8,
        "max_steps": 3,
        "log_every": 1,
        "compute_dtype": "float32",
        "max_length": 128,
        "drafter": {"num_hidden_layers": 1, "block_size": 3, "mask_token_id": 1, "markov_rank": 4},
    }
    return TrainSettings.from_dict(base | changes, "test")


@pytest.mark.parametrize("family", FAMILIES)
def test_from_cache_to_checkpoint_without_the_layers(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache needs the whole target. A trainer on it does not: the shards of the layers are gone by then."""
    save_foreign_target(tmp_path / "target", family, config=FAMILIES[family], max_shard_size="2KB")
    write_answers(tmp_path / "answers.jsonl")
    answers = [tmp_path / "answers.jsonl"]
    cache: dict[str, Any] = {"target": str(tmp_path / "target"), "conversations": answers, "out": tmp_path / "cache"}
    recipe = CacheSettings.from_dict(cache | {"target_layer_ids": [0, 2], "max_length": 128}, "test")
    assert stages.estimate_cache(recipe).num_samples == 12
    stages.build_cache(recipe)
    layers = {"drafter": train_settings(tmp_path, "x").drafter.model_dump() | {"target_layer_ids": [0, 2]}}
    streamed = train_settings(tmp_path, "streamed", features="streamed", conversations=answers, **layers)
    stages.train(streamed)

    weight_map = json.loads((tmp_path / "target" / "model.safetensors.index.json").read_text())["weight_map"]
    needed = {file for name, file in weight_map.items() if ".layers." not in name}
    for file in set(weight_map.values()) - needed:
        (tmp_path / "target" / file).unlink()
    settings = train_settings(tmp_path, "cached", cache=[tmp_path / "cache"])
    seen: list[Target] = []
    exporter = stages.exporter
    monkeypatch.setattr(stages, "exporter", lambda s, target: seen.append(target) or exporter(s, target))
    report = stages.train(settings)
    assert report is not None
    assert report.step == 3
    assert isinstance(seen[0].model, Ends)
    assert losses(tmp_path / "cached") == pytest.approx(losses(tmp_path / "streamed"), rel=1e-3)
    with safe_open(tmp_path / "cached" / "last" / "model.safetensors", framework="pt") as tensors:
        assert "markov_head.markov_w2.weight" in tensors.keys()  # noqa: SIM118
    assert read_drafter(tmp_path / "cached" / "last", seen[0].model, seen[0].digest).config.hidden_size == 16
    plan = stages.plan_training(settings)
    ends = sum(parameter.numel() for parameter in Ends.of(seen[0].model).parameters())
    assert (plan.target_parameters, plan.whole_target) == (ends, False)
    whole = stages.plan_training(streamed)
    assert whole.target_parameters > 2 * ends
    assert whole.whole_target


def test_a_foreign_target_is_not_served(tmp_path: Path) -> None:
    save_foreign_target(tmp_path / "target", "GPTNeoX")
    with pytest.raises(CheckpointError, match=r"GPTNeoXForCausalLM.*a drafter can be trained.*but not served here"):
        load_target(tmp_path / "target")
    with pytest.raises(CheckpointError, match="unsupported architecture"):
        load_target(tmp_path / "target", capture="decoder")
    captured = load_target(tmp_path / "target", capture="auto")
    with pytest.raises(CheckpointError, match="GPTNeoXForCausalLM is captured through transformers"):
        _ = captured.decoder
    with pytest.raises(ConfigError, match=r"held_out: is measured by the engine"):
        stages.train(train_settings(tmp_path, "run", cache=[tmp_path], held_out={"prompts": [tmp_path / "p"]}))


def test_a_cache_of_other_ends_is_refused(tmp_path: Path) -> None:
    save_foreign_target(tmp_path / "target", "Llama", config=FAMILIES["Llama"])
    write_answers(tmp_path / "answers.jsonl")
    cache = {"target": str(tmp_path / "target"), "conversations": [tmp_path / "answers.jsonl"], "max_length": 128}
    stages.build_cache(CacheSettings.from_dict(cache | {"out": tmp_path / "c", "target_layer_ids": [0]}, "test"))
    save_foreign_target(tmp_path / "target", "Llama", config=FAMILIES["Llama"] | {"tie_word_embeddings": True})
    with pytest.raises(CacheError, match=r"name that one or build the cache again"):
        stages.train(train_settings(tmp_path, "run", cache=[tmp_path / "c"]))


def test_a_cache_of_before_needs_the_whole_target(tmp_path: Path) -> None:
    """Its manifest does not name the ends, so that the whole target's digest is compared."""
    save_foreign_target(tmp_path / "target", "Llama", config=FAMILIES["Llama"])
    write_answers(tmp_path / "answers.jsonl")
    cache = {"target": str(tmp_path / "target"), "conversations": [tmp_path / "answers.jsonl"], "max_length": 128}
    recipe = CacheSettings.from_dict(cache | {"out": tmp_path / "c", "target_layer_ids": [0]}, "test")
    stages.build_cache(recipe)
    for name in ("manifest.json", "build.json"):
        manifest = json.loads((tmp_path / "c" / name).read_text())
        del manifest["ends_digest"]
        (tmp_path / "c" / name).write_text(json.dumps(manifest))
    settings = train_settings(tmp_path, "run", cache=[tmp_path / "c"])
    assert stages.plan_training(settings).whole_target
    report = stages.train(settings)
    assert report is not None
    assert report.step == 3
    stages.build_cache(recipe)
    assert not stages.plan_training(settings).whole_target, "built again, it names them"
