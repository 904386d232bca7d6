"""A tiny target, and samples that it really produced."""

from collections.abc import Iterator

import pytest
from tiny_training import Samples, make_rows, make_target

from dspark.models.decoder import Decoder
from dspark.training.parallel import Ranks, join_ranks


@pytest.fixture(scope="session")
def target() -> Decoder:
    return make_target()


@pytest.fixture(scope="session")
def rows(target: Decoder) -> Samples:
    return make_rows(target)


@pytest.fixture(scope="session")
def alone() -> Iterator[Ranks]:
    with join_ranks("cpu") as ranks:
        yield ranks
