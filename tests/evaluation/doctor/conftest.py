"""A tiny target and a tiny drafter that fit each other."""

import os
from pathlib import Path

import pytest
from filelock import FileLock
from planted_faults import doctor_options
from tiny_pair import make_pair

from dspark.evaluation.doctor.pair import Pair, open_pair


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the pair's files: made once, however many workers run the tests."""
    root = tmp_path_factory.getbasetemp()
    directory = (root.parent if "PYTEST_XDIST_WORKER" in os.environ else root) / "doctor-pair"
    with FileLock(directory.with_suffix(".lock")):
        if not directory.is_dir():
            make_pair(directory)
    return directory


@pytest.fixture
def opened(pair: Path) -> Pair:
    """The pair, loaded."""
    found, _ = open_pair(doctor_options(pair).model)
    assert found is not None
    return found
