import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import Field, ValidationError, model_validator

from dspark.config import Settings
from dspark.errors import ConfigError


class Optimizer(Settings):
    learning_rate: float = Field(1e-3, gt=0)
    betas: tuple[float, float] = (0.9, 0.95)


class Run(Settings):
    steps: int = Field(ge=1)
    warmup: int = 0
    optimizer: Optimizer = Optimizer()
    output: Path = Path("runs")

    @model_validator(mode="after")
    def _check_warmup(self) -> "Run":
        if self.warmup > self.steps:
            raise ValueError("warmup is longer than steps: lower one or raise the other")
        return self


def test_from_toml_reads_nested_tables(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("steps = 5\n[optimizer]\nlearning_rate = 1\nbetas = [0.8, 0.9]\n", encoding="utf-8")
    assert Run.from_toml(path) == Run(steps=5, optimizer=Optimizer(learning_rate=1.0, betas=(0.8, 0.9)))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({}, "run.toml: steps: missing: give it a value"),
        ({"steps": 0}, "run.toml: steps: Input should be greater than or equal to 1, got 0"),
        (
            {"steps": 1, "optimizer": {"learning_rat": 1}},
            "run.toml: optimizer.learning_rat: unknown setting; did you mean 'learning_rate'?",
        ),
        (
            {"steps": 1, "optimizer": {"x": 1}},
            "run.toml: optimizer.x: unknown setting; known here: learning_rate, betas",
        ),
        ({"steps": 1, "warmup": 2}, "run.toml: warmup is longer than steps: lower one or raise the other"),
        (
            {"steps": "many", "warmup": "long"},
            "run.toml: steps: Input should be a valid integer, unable to parse string as an integer, got 'many' "
            "(and 1 more)",
        ),
    ],
)
def test_a_fault_is_one_line_naming_file_and_field(data: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Run.from_dict(data, where="run.toml")
    assert str(caught.value) == message


def test_unreadable_and_malformed_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent.toml: cannot be read \(No such file or directory\)"):
        Run.from_toml(tmp_path / "absent.toml")
    path = tmp_path / "bad.toml"
    path.write_text("steps = \n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"bad.toml: not valid TOML: .*line 1"):
        Run.from_toml(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="bad.toml: not valid TOML"):
        Run.from_toml(path)


def test_settings_are_frozen_and_replaced_with_checks() -> None:
    run = Run(steps=5)
    with pytest.raises(ValidationError):
        run.steps = 6  # type: ignore[misc]
    assert run.replace(steps=6, warmup=6) == Run(steps=6, warmup=6)
    with pytest.raises(ConfigError, match="Run: stepz: unknown setting; did you mean 'steps'"):
        run.replace(stepz=6)
    with pytest.raises(ConfigError, match="warmup is longer"):
        run.replace(warmup=6)


def test_digest_depends_on_values_alone() -> None:
    run = Run(steps=5)
    assert run.digest() == Run.from_dict({"optimizer": {}, "steps": 5}, where="test").digest()
    assert run.digest() != run.replace(warmup=1).digest()
    assert len(run.digest()) == 16
    assert int(run.digest(), 16) >= 0


def test_digest_is_the_same_in_another_process() -> None:
    code = (
        "from dspark.config import Settings\n"
        "class Run(Settings):\n    names: frozenset[str] = frozenset()\n    rate: float = 0.1\n"
        "print(Run(names=frozenset({'a', 'b', 'c', 'd', 'e'})).digest())\n"
    )
    digests = {
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True, text=True, check=True,
        ).stdout
        for seed in ("1", "2", "3")
    }  # fmt: skip
    assert len(digests) == 1
