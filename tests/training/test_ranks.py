"""Two processes train as one does, and a run goes on with another number of them."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny_training import Samples, losses, make_trainer

from dspark.errors import ConfigError
from dspark.models.decoder import Decoder
from dspark.training.parallel import Ranks

HERE = Path(__file__).parent


def torchrun(*arguments: object) -> int:
    paths = [str(HERE.parent), str(HERE.parents[1] / "src"), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(HERE / "under_torchrun.py"), *map(str, arguments)]
    return subprocess.run(command, env=environment, check=False, capture_output=True, timeout=300).returncode


def test_two_processes_are_one(target: Decoder, rows: Samples, tmp_path: Path, alone: Ranks) -> None:
    """Killed in mid-run; then finished by two processes, and by one. All losses are the uninterrupted run's."""

    def run_alone(name: str) -> dict[str, torch.Tensor]:
        trainer = make_trainer(target, rows, tmp_path / name, alone, {"draft_vocab_size": 30}, {})
        trainer.run()
        return dict(trainer.drafter.named_parameters())

    expected = run_alone("whole")
    assert torchrun(tmp_path / "two", 5) != 0
    assert sorted(p.name for p in (tmp_path / "two" / "states").iterdir()) == ["step-00000003"]
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "whole")[:5], rel=1e-5)
    shutil.copytree(tmp_path / "two", tmp_path / "one")
    finished = {"one": run_alone("one")}
    assert torchrun(tmp_path / "two") == 0
    finished["two"] = torch.load(tmp_path / "two" / "last" / "drafter.pt")
    for name, parameters in finished.items():
        assert losses(tmp_path / name) == pytest.approx(losses(tmp_path / "whole"), rel=1e-5), name
        for key, value in expected.items():
            torch.testing.assert_close(parameters[key], value, rtol=1e-3, atol=1e-4, msg=f"{name} {key}")


def test_processes_share_the_micro_batches_of_one(target: Decoder, rows: Samples, tmp_path: Path, alone: Ranks) -> None:
    """What two processes load in a step is what one loads, each sample once."""

    def seen(ranks: Ranks, step: int) -> list[list[int]]:
        trainer = make_trainer(target, rows, tmp_path, alone, {}, {})
        trainer.ranks = ranks
        return [batch.token_ids.flatten().tolist() for batch in trainer.load_step(step)]

    cpu = torch.device("cpu")
    for step in range(4):
        whole = seen(Ranks(0, 1, cpu), step)
        parts = [seen(Ranks(rank, 2, cpu), step) for rank in range(2)]
        assert [parts[0][0], parts[1][0]] == whole


def test_a_step_that_cannot_be_dealt_out_is_refused(target: Decoder, rows: Samples, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="accumulation 2 is not a multiple of the 3 processes"):
        make_trainer(target, rows, tmp_path, Ranks(0, 3, torch.device("cpu")), {}, {})
