"""A tiny random target that writes short prompts and answers: some letters, and an end of turn among them."""

from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_chat import write_chat_target

from dspark.engine.config import EngineSettings
from dspark.engine.engine import Engine
from dspark.models.target import Target, load_target


@pytest.fixture(scope="session")
def target_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="session")
def target(target_path: Path) -> Target:
    return load_target(str(target_path), dtype="float32")


@pytest.fixture
def make_engine(target: Target) -> Callable[[], Engine]:
    return lambda: Engine(target, None, EngineSettings(max_batch=8, max_length=96))
