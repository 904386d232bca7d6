"""Two processes that share a pair write what one writes; what cannot be shared is refused."""

import io
import json
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import tiny_divided
import torch
from tiny_divided import GREEDY, KINDS, PLANNED, SETTINGS, Kind, answer, make_pair
from tiny_ranks import join as join_processes

from dspark.drafters.sharding import shard_drafter
from dspark.engine.calls import LARGE, Line, _Packer, _Unpacker
from dspark.engine.config import ModelOptions
from dspark.engine.engine import Engine
from dspark.engine.pair import open_engine
from dspark.errors import ConfigError
from dspark.models.sharding import Shards, shard_decoder
from dspark.training.parallel import join_ranks

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
        if name == PLANNED:
            plain = Engine(target, None, SETTINGS).generate([[5, 6, 7]], GREEDY)[0]
            assert json.loads((tmp_path / "planned.json").read_text()) == plain.token_ids


def test_a_call_that_the_others_do_not_know_of_does_not_wait_for_them() -> None:
    shards = Shards(0, 2, torch.device("cpu"))
    with pytest.raises(AssertionError, match="mlp: the other processes do not know of this call"):
        shards.sum(torch.ones(2), "mlp")


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


def test_a_command_that_shares_its_work_otherwise_refuses() -> None:
    with join_ranks("cpu"), pytest.raises(ConfigError, match="here every process has models of its own: set it to 1"):
        open_engine(ModelOptions(tensor_parallel=2), SETTINGS)


def test_a_line_is_closed_once_and_not_after_a_broken_call() -> None:
    """A goodbye to processes that hang in a call would hang, too."""
    with join_ranks("cpu") as ranks:
        shards = Shards(ranks.rank, 1, ranks.device)
        for broken in (False, True):
            line, shards.counts["call"] = Line(shards), 0
            with nullcontext() if not broken else pytest.raises(RuntimeError), line.call("run"):
                if broken:
                    raise RuntimeError("out of memory")
            line.close()
            line.close()
            assert shards.counts["call"] == (1 if broken else 2)


def test_any_tensor_arrives() -> None:
    """Small ones inside the message, large ones behind it, wherever they stand in it."""
    large = torch.randn(LARGE)
    small = [
        torch.tensor(3),
        torch.tensor([[True], [False]]),
        torch.empty(0, 4),
        torch.arange(12).view(3, 4)[:, ::2],
        torch.randn(5).bfloat16(),
        torch.arange(2 * LARGE),
    ]
    packer = _Packer(file := io.BytesIO())
    packer.dump(("run", {"some": small}, large, None))
    unpacker = _Unpacker(io.BytesIO(file.getvalue()), torch.device("cpu"))
    name, nested, empty, nothing = unpacker.load()
    assert (name, nothing) == ("run", None)
    for sent, arrived in zip(small, nested["some"], strict=True):
        assert sent.dtype == arrived.dtype
        assert torch.equal(sent, arrived)
    assert [id(t) for t in packer.large] == [id(large)]
    assert [id(t) for t in unpacker.large] == [id(empty)]
    assert empty.shape == large.shape


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
