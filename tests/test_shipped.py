"""What the package ships: recipes that load and a drafter that fits its target."""

import json
from importlib import resources
from pathlib import Path

import pytest
from safetensors import safe_open

from dspark.cache.config import CacheSettings
from dspark.cli import load_recipe
from dspark.config import Settings
from dspark.console.session import SHIPPED_DRAFTERS
from dspark.drafters.layouts.deepspec import parse_config
from dspark.generation.config import RegenerateSettings, SynthesizeSettings
from dspark.training.config import TrainSettings

ROOT = Path(__file__).parents[1]
KINDS: dict[str, type[Settings]] = {
    "synthesize": SynthesizeSettings,
    "regenerate": RegenerateSettings,
    "cache": CacheSettings,
    "train": TrainSettings,
}


@pytest.mark.parametrize("recipe", sorted((ROOT / "recipes").glob("*.toml")), ids=lambda path: path.name)
def test_every_recipe_loads(recipe: Path) -> None:
    load_recipe(KINDS[recipe.stem.split("-")[0]], recipe, ())


def test_cache_and_training_read_the_same_layers() -> None:
    cache = load_recipe(CacheSettings, ROOT / "recipes" / "cache.toml", ())
    train = load_recipe(TrainSettings, ROOT / "recipes" / "train-smollm2-135m.toml", ())
    assert train.drafter.target_layer_ids == cache.target_layer_ids
    assert train.cache == (cache.out,)


@pytest.mark.parametrize("name", SHIPPED_DRAFTERS.values())
def test_shipped_drafter_is_whole_and_small(name: str) -> None:
    directory = Path(str(resources.files("dspark"))) / "assets" / name
    raw = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    config = parse_config(raw, name)
    assert raw["dspark"]["target_digest"], "another target must be refused"
    assert sum(file.stat().st_size for file in directory.iterdir()) <= 25_000_000
    with safe_open(directory / "model.safetensors", framework="pt") as tensors:
        assert tensors.get_slice("d2t").get_shape() == [config.num_draft_logits]
        assert tensors.get_slice("markov_head.markov_w2.weight").get_shape()[0] == config.num_draft_logits
    card = (directory / "README.md").read_text(encoding="utf-8")
    assert "licence" in card.lower()
