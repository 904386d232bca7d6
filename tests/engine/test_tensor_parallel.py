"""Two processes that share a pair write what one writes; what cannot be shared is refused."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_divided
import torch
from tiny_divided import KINDS, SETTINGS, Kind, answer, make_pair
from tiny_ranks import join as join_processes

from dspark.drafters.sharding import shard_drafter
from dspark.engine.config import ModelOptions
from dspark.engine.engine import Engine
from dspark.engine.pair import open_engine
from dspark.errors import ConfigError
from dspark.models.sharding import Shards, shard_decoder

SECONDS = 240


def test_two_processes_write_what_one_writes(tmp_path: Path) -> None:
    """Greedy and seeded, with prompts in chunks, a prefix that two share and an abort; in float32."""
    assert join_processes(tiny_divided.start(2, tmp_path), SECONDS) == [0, 0]
    lead, other = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    for name, kind in KINDS.items():
        target, drafter = make_pair(kind)
        whole = [sum(p.numel() for p in m.parameters()) for m in (target.decoder.layers, drafter.backbone.layers)]
        expected = answer(Engine(target, drafter.prepare(), SETTINGS))
        assert lead[name]["answers"] == list(expected), name
        assert expected.accepted > 0, f"{name}: no draft was accepted, so little was tested"
        assert lead[name]["counts"] == other[name]["counts"], "the processes meet at the same sites"
        sites = {"call", "states", "attention", "mlp", "logits"}
        assert lead[name]["counts"].keys() == sites | ({"drafts"} if "EAGLE" in name else set())
        for size, shares in zip(whole, zip(lead[name]["sizes"], other[name]["sizes"], strict=True), strict=True):
            assert max(shares) < 0.6 * size, "each process holds about half of the layers"


@pytest.mark.parametrize(
    ("changes", "size", "message"),
    [
        ({"num_key_value_heads": 1}, 2, r"2 does not divide the target's num_key_value_heads \(1\): set it to 1$"),
        ({}, 4, r"4 does not divide the target's num_key_value_heads \(2\): set it to 1 or 2$"),
        ({"intermediate_size": 9}, 2, r"target's intermediate_size \(9\)"),
        (tiny_divided.GEMMA | {"num_global_key_value_heads": 1}, 2, r"target's num_global_key_value_heads \(1\)"),
    ],
)
def test_what_cannot_be_shared_is_named(changes: dict[str, object], size: int, message: str) -> None:
    target, drafter = make_pair(Kind(changes, {"num_key_value_heads": 1}))
    before = {name: p.shape for name, p in target.decoder.named_parameters()}
    with pytest.raises(ConfigError, match=message):
        shard_decoder(target.decoder, Shards(0, size, torch.device("cpu")))
    assert {name: p.shape for name, p in target.decoder.named_parameters()} == before
    with pytest.raises(ConfigError, match="drafter's num_key_value_heads"):
        shard_drafter(drafter, Shards(0, size, torch.device("cpu")))


def test_the_number_of_processes_must_be_the_one_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(ConfigError, match="3 processes were started: run torchrun --nproc-per-node 2 -m dspark"):
        open_engine(ModelOptions(tensor_parallel=2), SETTINGS)


@pytest.mark.slow
def test_the_shipped_pair_under_torchrun(tmp_path: Path) -> None:
    """Three processes, since its target has three key/value heads: the command's answer is that of one."""
    from dspark.models.hub import home

    if not (home() / "models" / "smollm2-135m").is_dir():
        pytest.skip("smollm2-135m has not been fetched on this machine: run `dspark generate` once")
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"]
    ask = ["-m", "dspark", "generate", "Why is the sky blue?", "--max-tokens", "24", "--dtype", "float32", "--json"]

    def run(*arguments: str) -> dict[str, object]:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, *arguments], env=environment, check=False, capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, done.stderr
        answer: dict[str, object] = json.loads(done.stdout)
        return answer

    alone, shared = run(*ask), run(*torchrun, *ask, "--tensor-parallel", "3")
    assert shared["text"] == alone["text"]
    assert shared["accepted_length"] == alone["accepted_length"]
