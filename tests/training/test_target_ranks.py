"""The target on processes of its own: the losses of one process, and an end for everybody, whatever happens."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import tiny_ranks
from tiny_target import save_tiny_target, write_answers
from tiny_training import losses

from dspark import stages
from dspark.errors import ConfigError
from dspark.training.config import TrainSettings
from dspark.training.parallel import Ranks, join_ranks

HYBRID = {"features": "hybrid", "max_cache_bytes": 1 << 20}
SECONDS = 300  # for one that starts at once; a hang would take gloo's half hour


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("target-ranks")
    save_tiny_target(path / "target")
    write_answers(path / "answers.jsonl")
    return path


def settings(place: Path, out: Path, **changes: Any) -> TrainSettings:
    base: dict[str, Any] = {
        "target": str(place / "target"),
        "features": "streamed",
        "conversations": [place / "answers.jsonl"],
        "out": out,
        "batch_size": 2,
        "accumulation": 2,
        "num_anchors": 8,
        "max_steps": 6,
        "save_every": 3,
        "log_every": 1,
        "compute_dtype": "float32",
        "device": "cpu",
        "max_length": 128,
        "drafter": {
            "num_hidden_layers": 1, "block_size": 3, "mask_token_id": 1, "markov_rank": 4,
            "target_layer_ids": [0, 2], "draft_vocab_size": 16,
        },
    }  # fmt: skip
    return TrainSettings.from_dict(base | changes, "test")


def test_two_trainers_and_one_target_are_one_process(place: Path, tmp_path: Path) -> None:
    stages.train(settings(place, tmp_path / "one"))
    apart = settings(place, tmp_path / "apart", target_ranks=1)
    cut = tiny_ranks.start(3, apart, {0: "kill", 1: "kill"})
    assert tiny_ranks.join(cut, SECONDS)[:2] == [-signal.SIGKILL] * 2
    assert losses(tmp_path / "apart") == pytest.approx(losses(tmp_path / "one")[:2], rel=1e-5)
    assert tiny_ranks.join(tiny_ranks.start(3, apart), SECONDS) == [0, 0, 0]
    expected = losses(tmp_path / "one")
    assert len(expected) == 6
    assert losses(tmp_path / "apart") == pytest.approx(expected, rel=1e-5)
    provenance = [
        json.loads((tmp_path / name / "last" / "config.json").read_text())["dspark"] for name in ("one", "apart")
    ]
    assert provenance[0]["target_digest"] == provenance[1]["target_digest"]


def test_states_kept_on_disk(place: Path, tmp_path: Path) -> None:
    stages.train(settings(place, tmp_path / "one"))
    hybrid = settings(place, tmp_path / "hybrid", cache=[tmp_path / "store"], target_ranks=1, **HYBRID)
    processes = tiny_ranks.start(2, hybrid)
    assert tiny_ranks.join(processes, SECONDS) == [0, 0]
    assert losses(tmp_path / "hybrid") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)


@pytest.mark.parametrize(
    ("stopped", "changes"), [([0, 1], {}), ([1], HYBRID)], ids=["both", "the target's alone, all states stored"]
)
def test_a_stop_saves_and_ends_both(stopped: list[int], changes: dict[str, Any], place: Path, tmp_path: Path) -> None:
    endless = {"target_ranks": 1, "max_steps": 10**6, "save_every": 10**6}
    changes = changes | ({"cache": [tmp_path / "store"]} if changes else {})
    processes = tiny_ranks.start(2, settings(place, tmp_path, **endless | changes))
    tiny_ranks.wait_for(tmp_path / "metrics.jsonl", 12 if changes else 1, processes)
    for rank in stopped:
        os.kill(processes[rank].pid or 0, signal.SIGTERM)
    assert tiny_ranks.join(processes, SECONDS) == [0, 0]
    assert len(list((tmp_path / "states").glob("step-*"))) == 1


@pytest.mark.parametrize(
    ("faults", "codes", "messages"),
    [
        ({0: "raise"}, [2, 0], {0: "out of luck"}),
        ({0: "kill"}, [-signal.SIGKILL, 2], {1: "the process of rank 0 is gone"}),
        ({1: "target kill"}, [2, -signal.SIGKILL], {0: "the process of rank 1 is gone"}),
        ({1: "target bad states"}, [2, 2], {0: "features are not finite", 1: "features are not finite"}),
    ],
    ids=["trainer raises", "trainer killed", "target killed", "target fails"],
)
def test_when_one_fails_nobody_waits(
    faults: dict[int, str], codes: list[int], messages: dict[int, str], place: Path, tmp_path: Path
) -> None:
    processes = tiny_ranks.start(2, settings(place, tmp_path, target_ranks=1), faults)
    assert tiny_ranks.join(processes, SECONDS) == codes
    for rank, message in messages.items():
        assert message in (tmp_path / f"error-{rank}").read_text()


def test_who_serves_whom() -> None:
    device = stages.torch.device("cpu")
    assert [Ranks(rank, 5, device, 2).target_rank for rank in range(5)] == [5, 6, 5, 6, 5]
    assert [Ranks(rank, 5, device, 2).trainers for rank in (5, 6)] == [[0, 2, 4], [1, 3]]
    assert [Ranks(rank, 5, device, 2).runs_target for rank in (4, 5)] == [False, True]
    with pytest.raises(ConfigError, match="target_ranks: 1 of 1 processes"), join_ranks("cpu", 1):
        pass
