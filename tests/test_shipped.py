"""What the package ships: recipes that load and a drafter that fits its target."""

import json
from importlib import resources
from pathlib import Path

import pytest
from safetensors import safe_open

from dspark.cache.config import CacheSettings
from dspark.cli import load_recipe
from dspark.config import Settings
from dspark.console.session import Session
from dspark.data.config import PrepareSettings
from dspark.drafters.layouts.deepspec import parse_config, read_drafter
from dspark.engine.config import EngineSettings, ModelOptions
from dspark.engine.engine import Engine
from dspark.engine.pair import SHIPPED_DRAFTERS, drafter_path
from dspark.engine.request import SamplingParams
from dspark.generation.config import RegenerateSettings, SynthesizeSettings
from dspark.models.hub import home
from dspark.models.target import load_target
from dspark.training.config import TrainSettings

ROOT = Path(__file__).parents[1]
EVALUATION = ROOT.parent / "shared" / "data" / "eval"
KINDS: dict[str, type[Settings]] = {
    "synthesize": SynthesizeSettings,
    "prepare": PrepareSettings,
    "regenerate": RegenerateSettings,
    "cache": CacheSettings,
    "train": TrainSettings,
}


@pytest.mark.parametrize("recipe", sorted((ROOT / "recipes").rglob("*.toml")), ids=lambda path: path.name)
def test_every_recipe_loads(recipe: Path) -> None:
    load_recipe(KINDS[recipe.stem.split("-")[0]], recipe, ())


@pytest.mark.parametrize(
    ("recipe", "algorithm"),
    [
        ("train-smollm2-135m.toml", "dspark"),
        ("compare/train-dspark.toml", "dspark"),
        ("compare/train-dflash.toml", "dflash"),
        ("compare/train-eagle3.toml", "eagle3"),
    ],
)
def test_cache_and_training_read_the_same_layers(recipe: str, algorithm: str) -> None:
    cache = load_recipe(CacheSettings, ROOT / "recipes" / "cache.toml", ())
    train = load_recipe(TrainSettings, ROOT / "recipes" / recipe, ())
    assert train.drafter.algorithm == algorithm
    assert train.drafter.target_layer_ids == cache.target_layer_ids
    assert train.cache == (cache.out,)


def test_drafters_to_compare_are_trained_alike() -> None:
    recipes = [load_recipe(TrainSettings, file, ()) for file in (ROOT / "recipes" / "compare").glob("*.toml")]
    assert len(recipes) == 3
    own = {"drafter", "loss", "out", "recent_heads"}  # the drafter, how it begins, and what it is taught
    alike = [{k: v for k, v in recipe.model_dump().items() if k not in own} for recipe in recipes]
    assert alike[0] == alike[1] == alike[2]
    assert len({recipe.drafter.draft_vocab_size for recipe in recipes}) == 1


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


@pytest.mark.slow
def test_float32_greedy_text_is_the_same_with_the_shipped_drafter() -> None:
    """64 prompts x 64 tokens of the real pair, token for token."""
    if not (home() / "models" / "smollm2-135m").is_dir():
        pytest.skip("smollm2-135m has not been fetched on this machine: run `dspark generate` once")
    if not EVALUATION.is_dir():
        pytest.skip("the evaluation prompts are not here")
    target = load_target("smollm2-135m", "float32")
    path = drafter_path(ModelOptions())
    assert path is not None
    drafter = read_drafter(path, target.decoder, target.digest).prepare()
    engine = Engine(target, drafter, EngineSettings(max_batch=8, max_length=1024))
    session = Session(target, engine)
    prompts = []
    for name in ("gsm8k", "humaneval", "mbpp", "mt-bench"):
        rows = (EVALUATION / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()[:16]
        prompts += [session.prompt_ids([{"role": "user", "content": json.loads(row)["turns"][0]}]) for row in rows]
    params = SamplingParams(max_tokens=64)
    plain = engine.generate(prompts, params.replace(speculate=False))
    drafted = engine.generate(prompts, params)
    assert len(prompts) == 64
    assert [c.token_ids for c in drafted] == [c.token_ids for c in plain]
    assert [c.text for c in drafted] == [c.text for c in plain]
    assert all(c.rounds > 0 for c in drafted if len(c.token_ids) > 1)
