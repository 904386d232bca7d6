"""What the trainer's loss, loader and checkpoints are worth, on synthetic data: nothing is downloaded.

    python benchmarks/train_step.py --json
    python benchmarks/train_step.py --parts step --rounds 5

Part `step`, one optimizer step with 256 anchors of 7 drafts, vocabulary 151,936, hidden size 512, rank 64 and one draft
layer, against the same step with the loss written without chunks (whole [slots, vocabulary] tensors, autograd). Each
loss has a process of its own; they take turns, and the figures are medians over the rounds.
  step_memory_ratio     most bytes resident during a step, above what was before it: chunked / unchunked
  process_memory_ratio  the same with weights, moments and libraries counted
  step_time_ratio       seconds of a step: chunked / unchunked
  step_cpu_ratio        the same in processor time, which other programs on the machine disturb less
Part `cached`, `dspark train` on a cache with rows as wide and long as those of smollm2-135m (576 wide, 5 layers, 300 to
500 tokens; vocabulary 49,152, of which 8,192 are drafted), from a target with random weights.
  data_wait_share       share of the run's time spent waiting for samples, its first five steps left out
  resume_identical      whether a run killed by SIGKILL and started again logs, to the last bit, the next 20 losses of a
                        run that was left alone

The step takes 9 GB of memory in the unchunked form. Threads: OMP_NUM_THREADS. Linux (memory is read from /proc).
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from common import HERE, Samples
from tokenizers import Tokenizer, models
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from dspark.cache.build import build_cache
from dspark.cache.config import CacheSettings
from dspark.log import configure_logging, get_logger
from dspark.models.config import DecoderConfig
from dspark.models.decoder import Decoder
from dspark.models.target import load_target
from dspark.models.weights import save_decoder
from dspark.training import objective
from dspark.training.batch import collate
from dspark.training.build import drafter_config, new_drafter
from dspark.training.config import LossMix, TrainSettings
from dspark.training.losses import HeadWeights, SlotLosses, SlotTargets
from dspark.training.parallel import join_ranks
from dspark.training.trainer import Trainer

ANCHORS, DRAFTS, VOCABULARY, HIDDEN, TOKENS = 256, 7, 151_936, 512, 1024
LOSSES = ("chunked", "unchunked")
NEXT = 20  # losses compared after a resume
_log = get_logger("dspark.benchmarks")


class Sample(NamedTuple):
    """One conversation with its states, in memory."""

    token_ids: Tensor
    loss_mask: Tensor
    features: Tensor
    last_hidden: Tensor
    log_normalizer: Tensor
    sample_id: int = 0
    post_norm: bool = False


def unchunked_losses(
    hidden: Tensor, feature: Tensor | None, head: HeadWeights, targets: SlotTargets, mix: LossMix
) -> SlotLosses:
    """The same losses with every logit of every slot at once, and gradients by autograd."""
    assert feature is not None
    assert head.markov_w2 is not None
    with torch.no_grad():  # a position's law is made once, as in the chunked form
        unique, row = targets.position.unique(return_inverse=True)
        p = (targets.hidden[unique] @ head.lm_head.T).sub_(targets.log_normalizer[unique, None]).exp_()
    log_q = F.log_softmax(hidden @ head.lm_head.T + feature @ head.markov_w2.T, dim=-1)
    ce = F.nll_loss(log_q, targets.label, reduction="none")
    l1 = (log_q.exp() - p[row]).abs().sum(dim=-1)
    total = (targets.weight * (mix.ce * ce + mix.l1 * l1)).sum()
    top1 = (log_q.detach().argmax(dim=-1) == p.argmax(dim=-1)[row]).float()
    return SlotLosses(total, ce.detach(), torch.zeros_like(top1), l1.detach(), top1)


def step_worker(loss: str) -> None:
    """In a process of its own: one optimizer step for each line on stdin, its seconds, bytes and loss on stdout."""
    if loss == "unchunked":
        objective.draft_losses = unchunked_losses
    torch.manual_seed(0)
    target = random_target(VOCABULARY, HIDDEN, num_layers=2)
    settings = TrainSettings.from_dict(
        {
            "cache": ["memory"], "out": "unused", "num_anchors": ANCHORS, "batch_size": 1, "max_steps": 1000,
            "compute_dtype": "float32", "learning_rate": 1e-4,
            "drafter": {"num_hidden_layers": 1, "block_size": DRAFTS, "mask_token_id": 1, "markov_rank": 64},
        },
        "benchmark",
    )  # fmt: skip
    samples = Samples(random_sample(target, length) for length in (16, TOKENS))
    with join_ranks("cpu") as ranks:
        drafter = new_drafter(drafter_config(settings.drafter, target, (-1,)), target, samples, 0)
        trainer = Trainer(settings, target, drafter, samples, lambda drafter, path: None, ranks)
        batches = [collate([s], ANCHORS, DRAFTS, np.random.default_rng(0)) for s in samples]
        trainer.train_step(batches[:1])  # a small step: the optimizer makes its moments
        assert int(batches[1].slot_mask.sum()) == ANCHORS * DRAFTS
        print("ready", flush=True)
        for _ in sys.stdin:
            before = resident("VmRSS")
            Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts anew from here
            started, cpu = time.perf_counter(), time.process_time()
            value, _ = trainer.train_step(batches[1:]).sums["loss"]
            row = {"seconds": time.perf_counter() - started, "cpu": time.process_time() - cpu, "loss": value}
            peak = resident("VmHWM")
            print(json.dumps(row | {"step": peak - before, "process": peak}), flush=True)


def random_target(vocab_size: int, hidden_size: int, num_layers: int) -> Decoder:
    """A small decoder; its logits spread about as a language model's do."""
    config = DecoderConfig(
        architecture="LlamaForCausalLM", vocab_size=vocab_size, hidden_size=hidden_size, intermediate_size=hidden_size,
        num_hidden_layers=num_layers, num_attention_heads=hidden_size // 64, num_key_value_heads=1, head_dim=64,
        max_position_embeddings=2048, layer_types=("full_attention",) * num_layers, tie_word_embeddings=True,
    )  # fmt: skip
    target = Decoder(config).requires_grad_(False).eval()
    target.embed_tokens.weight.normal_(std=3 / hidden_size**0.5)
    return target


@torch.no_grad()
def random_sample(target: Decoder, length: int) -> Sample:
    """Random tokens, supervised from the fourth on, and random states with the law that they have."""
    states = torch.randn(length, 2, target.config.hidden_size).bfloat16()
    mask = torch.ones(length, dtype=torch.uint8)
    mask[:3] = 0
    normalizer = target.logits(states[:, 1].float()).logsumexp(dim=-1)
    ids = torch.randint(target.config.vocab_size, (length,)).int()
    return Sample(ids, mask, states[:, :1], states[:, 1], normalizer)


def resident(field: str) -> int:
    """VmRSS (now) or VmHWM (the most) of this process, in bytes."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))


def step_figures(rounds: int) -> dict[str, float]:
    """Both losses in turn, `rounds` steps each."""
    workers, found = {}, {name: [] for name in LOSSES}
    command = [sys.executable, __file__, "--worker"]
    try:
        for name in LOSSES:
            _log.info("step: preparing the %s loss", name)
            worker = subprocess.Popen([*command, name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            workers[name] = worker
            assert worker.stdout.readline() == "ready\n"
        for number in range(rounds):
            for name, worker in workers.items():
                worker.stdin.write("step\n")
                worker.stdin.flush()
                found[name].append(json.loads(worker.stdout.readline()))
                seconds, cpu, step = (found[name][-1][key] for key in ("seconds", "cpu", "step"))
                text = f"{name}: {seconds:.1f} s, {cpu:.1f} s of processor time, {step / 2**30:.2f} GiB"
                _log.info("step: round %d of %d, %s", number + 1, rounds, text)
    finally:
        for worker in workers.values():
            worker.kill()
            worker.wait()
    for one, other in zip(*found.values(), strict=True):
        assert abs(one["loss"] - other["loss"]) < 1e-4 * abs(other["loss"]), f"not the same losses: {one}, {other}"
    chunked, unchunked = (
        {key: statistics.median(row[key] for row in found[name]) for key in found[name][0]} for name in LOSSES
    )
    return {
        "step_memory_ratio": round(chunked["step"] / unchunked["step"], 3),
        "process_memory_ratio": round(chunked["process"] / unchunked["process"], 3),
        "step_time_ratio": round(chunked["seconds"] / unchunked["seconds"], 3),
        "step_cpu_ratio": round(chunked["cpu"] / unchunked["cpu"], 3),
        "chunked_step_gib": round(chunked["step"] / 2**30, 2),
        "unchunked_step_gib": round(unchunked["step"] / 2**30, 2),
        "chunked_step_seconds": round(chunked["seconds"], 2),
        "unchunked_step_seconds": round(unchunked["seconds"], 2),
    }


class Conversation(NamedTuple):
    """A rendered training row."""

    token_ids: list[int]
    loss_mask: list[int]


def write_target_and_cache(directory: Path) -> None:
    """A target of random weights under `target`, and its states over random conversations under `features`."""
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="a")))
    save_decoder(random_target(49_152, 576, num_layers=7), tokenizer, directory / "target")
    rows = []
    for length in rng.integers(300, 500, 8).tolist():
        ids = rng.zipf(1.2, length).clip(max=49_151).tolist()  # words come as often as they do in a language
        rows.append(Conversation(ids, [0] * 60 + [1] * (length - 60)))
    settings = CacheSettings.from_dict(
        {"conversations": ["random"], "out": directory / "features", "target_layer_ids": range(1, 6)}
        | {"check_samples": 1},
        "benchmark",
    )
    build_cache(load_target(directory / "target", "float32"), rows, settings, len(rows))


def cached_figures(directory: Path, steps: int) -> dict[str, object]:
    """Train on a cache, once left alone and once killed on the way and started again."""
    _log.info("cached: writing a target and a cache of its states")
    write_target_and_cache(directory)
    _log.info("cached: %d steps, left alone", steps)
    finish(train(directory, "whole", steps))
    whole = logged(directory / "whole")
    _log.info("cached: the same run, killed on the way")
    killed = train(directory, "killed", steps)
    while killed.poll() is None and len(logged(directory / "killed")) < steps - NEXT:
        time.sleep(0.02)
    killed.send_signal(signal.SIGKILL)
    assert killed.wait() == -signal.SIGKILL, "the run ended before it was killed: raise --steps"
    cut = len(logged(directory / "killed"))
    states = sorted(path.name for path in (directory / "killed" / "states").glob("step-*"))
    assert states, "the run was killed before its first state was on disk: raise --steps"
    resumed_at = int(states[-1].removeprefix("step-"))
    _log.info("cached: killed after step %d, going on from the state of step %d", cut, resumed_at)
    finish(train(directory, "killed", steps))
    losses, again = ([row["loss"] for row in rows] for rows in (whole, logged(directory / "killed")))
    compared = slice(resumed_at, resumed_at + NEXT)
    assert len(losses[compared]) == len(again[compared]) == NEXT
    shares, seconds = ([row[name] for row in whole[5:]] for name in ("data_wait_share", "step_seconds"))
    return {
        "data_wait_share": round(float(np.average(shares, weights=seconds)), 4),
        "resume_identical": losses[compared] == again[compared],
        "cached_step_seconds": round(statistics.median(seconds), 3),
        "killed_after_step": cut,
        "resumed_at_step": resumed_at,
    }


def train(directory: Path, name: str, steps: int) -> subprocess.Popen[bytes]:
    """`dspark train` on the cache, with output and log in a directory of that name."""
    recipe = directory / "recipe.toml"
    recipe.write_text(
        f'target = "{directory}/target"\ncache = ["{directory}/features"]\nout = "{directory}/unnamed"\n'
        f"num_anchors = 48\nbatch_size = 2\nmax_steps = {steps}\n"
        'learning_rate = 1e-3\ncompute_dtype = "float32"\nsave_every = 5\nlog_every = 1\n'
        "[drafter]\nnum_hidden_layers = 1\nblock_size = 5\nmask_token_id = 16\nmarkov_rank = 64\n"
        "draft_vocab_size = 8192\n",
        encoding="utf-8",
    )
    command = [sys.executable, "-m", "dspark", "train", str(recipe), f"out={directory / name}"]
    with (directory / f"{name}.log").open("ab") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, cwd=HERE.parent)


def finish(run: subprocess.Popen[bytes]) -> None:
    """Wait for a run that must succeed."""
    assert run.wait() == 0, "dspark train failed: run it by hand with --keep and see its log"


def logged(out: Path) -> list[dict[str, float]]:
    """What a run logged so far, whole lines only."""
    path = out / "metrics.jsonl"
    lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of lines")
    parser.add_argument("--parts", nargs="+", choices=("step", "cached"), default=["step", "cached"])
    parser.add_argument("--rounds", type=int, default=3, help="steps of each loss (default 3)")
    parser.add_argument("--steps", type=int, default=36, help="steps of the cached run, over 30 (default 36)")
    parser.add_argument("--keep", type=Path, help="directory for the cached run's files, instead of a temporary one")
    parser.add_argument("--worker", choices=LOSSES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        step_worker(args.worker)
        return
    if not Path("/proc/self/clear_refs").exists():
        parser.error("memory is read from /proc, which Linux alone has: use --parts cached elsewhere")
    configure_logging()
    figures: dict[str, object] = {}
    if "step" in args.parts:
        figures |= step_figures(args.rounds)
    if "cached" in args.parts:
        with tempfile.TemporaryDirectory() as temporary:
            figures |= cached_figures(args.keep or Path(temporary), args.steps)
    if args.json:
        print(json.dumps(figures))
    else:
        for name, value in figures.items():
            print(f"{name:24} {value}")


if __name__ == "__main__":
    main()
