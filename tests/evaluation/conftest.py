"""A tiny pair on disk: a random target and drafters that it accepts now and then, and prompts for it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_chat import TEMPLATE, write_chat_target

from dspark.drafters.base import Drafter
from dspark.drafters.config import DrafterConfig
from dspark.drafters.factory import make_drafter
from dspark.drafters.layouts.deepspec import write_drafter
from dspark.evaluation.config import EvalOptions
from dspark.evaluation.evaluate import measure
from dspark.evaluation.results import Run
from dspark.models.target import Target, load_target
from dspark.training.parallel import join_ranks

THINKING = (
    TEMPLATE.removesuffix("{% endif %}")
    + "{% if enable_thinking is defined and not enable_thinking %}n{% endif %}{% endif %}"
)


@pytest.fixture(scope="session")
def target_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_target(tmp_path_factory.mktemp("target"), num_layers=3, std=0.15, template=THINKING)


@pytest.fixture(scope="session")
def target(target_path: Path) -> Target:
    return load_target(str(target_path), dtype="float32")


@pytest.fixture(scope="session")
def make_pair(target: Target, target_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """make_pair(noise) -> a drafter's directory; noise in its sequential head makes its drafts worse."""

    folder = tmp_path_factory.mktemp("drafters")

    def make(noise: float = 0.0) -> Path:
        path = folder / f"noise-{noise:g}"
        if not path.exists():
            write_drafter(noisy(tiny_drafter(target), noise), path, torch.float32, {"target_digest": target.digest})
        return path

    return make


def tiny_drafter(target: Target) -> Drafter:
    """Three drafts a round, from one layer, with a confidence head."""
    torch.manual_seed(11)
    c = target.config
    fields = {
        "vocab_size": c.vocab_size,
        "hidden_size": c.hidden_size,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "rope": c.rope,
        "max_position_embeddings": c.max_position_embeddings,
        "num_target_layers": c.num_hidden_layers,
        "target_layer_ids": (0, 1),
        "block_size": 3,
        "mask_token_id": 1,
        "markov_rank": 4,
        "enable_confidence_head": True,
    }
    return make_drafter(DrafterConfig.model_validate(fields), target.decoder)


def noisy(drafter: Drafter, noise: float) -> Drafter:
    assert drafter.markov_head is not None
    generator = torch.Generator().manual_seed(1)
    for weight in drafter.markov_head.parameters():
        weight.data = weight.data * 0.1 + noise * torch.randn(weight.shape, generator=generator)
    return drafter


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """gsm8k.jsonl of six prompts, mt-bench.jsonl of two in two turns, and one that is too long."""
    path = tmp_path_factory.mktemp("data")
    math = [[f"{letter} ab"] for letter in "abcdef"]
    chat = [[f"{letter}bc", "de"] for letter in "fg"] + [["a" * 200]]
    for name, turns in (("gsm8k", math), ("mt-bench", chat)):
        (path / f"{name}.jsonl").write_text("".join(json.dumps({"turns": t}) + "\n" for t in turns))
    return path


@pytest.fixture
def make_options(target_path: Path, make_pair: Callable[..., Path], data: Path) -> Callable[..., EvalOptions]:
    """make_options(out, drafter, **changes of the measure) -> options of a small run."""
    return lambda out, drafter=None, **changes: small_run(out, target_path, drafter or make_pair(), data, changes)


def small_run(out: Path, target: Path, drafter: Path, data: Path, changes: dict[str, Any]) -> EvalOptions:
    base = {"tasks": ("gsm8k", "mt-bench"), "data": data, "tokens": 8, "batch": 4, "max_length": 64, "device": "cpu"}
    model = {"target": str(target), "drafter": str(drafter), "dtype": "float32"}
    return EvalOptions.from_dict({"out": out, "measure": base | changes, "model": model}, "test")


@pytest.fixture
def run_alone() -> Callable[[EvalOptions], Run]:
    """Measure in this process."""

    def run(options: EvalOptions) -> Run:
        with join_ranks("cpu") as ranks:
            return measure(options, ranks)

    return run


@pytest.fixture(scope="session")
def whole(
    target_path: Path, make_pair: Callable[..., Path], data: Path, tmp_path_factory: pytest.TempPathFactory
) -> Run:
    """A whole run, which others must equal."""
    with join_ranks("cpu") as ranks:
        return measure(small_run(tmp_path_factory.mktemp("whole"), target_path, make_pair(), data, {}), ranks)
