from pathlib import Path

import pytest

from dspark.generation.config import RegenerateSettings, SynthesizeSettings

RECIPES = Path(__file__).parents[2] / "recipes"


@pytest.mark.parametrize(
    ("name", "kind"), [("synthesize.toml", SynthesizeSettings), ("regenerate.toml", RegenerateSettings)]
)
def test_the_recipe_loads(name: str, kind: type[SynthesizeSettings] | type[RegenerateSettings]) -> None:
    recipe = kind.from_toml(RECIPES / name)
    assert recipe.engine.max_batch >= 32


def test_what_is_written_is_answered() -> None:
    written = SynthesizeSettings.from_toml(RECIPES / "synthesize.toml")
    answered = RegenerateSettings.from_toml(RECIPES / "regenerate.toml")
    assert written.out in answered.prompts
    assert sum(answered.temperatures.values()) == pytest.approx(1)
    assert set(answered.suffixes) <= {seed.source for seed in written.seeds} | {path.stem for path in answered.prompts}
