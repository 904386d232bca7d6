"""What the trainer's loss, loader and checkpoints are worth.

    python benchmarks/train_step.py --json

`step_memory_ratio`, `step_time_ratio`: one optimizer step at a vocabulary of 151,936, 256 anchors of 7 drafts, hidden
size 512, against the same step with the loss written plainly (whole [slots, vocabulary] tensors, autograd). Memory is
the peak resident size of a process that does only that; times are medians of alternating runs.
`data_wait_share`: share of a cached run's time spent waiting for samples. `resume_identical`: whether a run killed with
SIGKILL and started again logs the losses of one that was left alone. Both train the built-in target's drafter on
answers that it writes first.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
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
from common import HERE, open_pair, read_prompts
from torch import Tensor

from dspark.engine.request import SamplingParams
from dspark.models.config import DecoderConfig
from dspark.models.decoder import Decoder
from dspark.training import objective
from dspark.training.build import drafter_config, new_drafter
from dspark.training.config import LossMix, TrainSettings
from dspark.training.losses import HeadWeights, SlotLosses, SlotTargets
from dspark.training.parallel import join_ranks
from dspark.training.trainer import Trainer

VOCABULARY, HIDDEN, ANCHORS, DRAFTS, TAPS = 151_936, 512, 256, 7, (0, 1)
LOSSES = ("chunked", "plain")


class Row(NamedTuple):
    sample_id: int
    token_ids: Tensor
    loss_mask: Tensor
    features: Tensor
    last_hidden: Tensor
    log_normalizer: Tensor | None
    post_norm: bool = False


class Rows(list[Row]):
    """Samples in memory."""

    @property
    def lengths(self) -> np.ndarray:
        return np.array([len(row.token_ids) for row in self])

    def row(self, index: int) -> Row:
        return self[index]

    def load(self, indices: list[int]) -> list[Row]:
        return [self[i] for i in indices]


def plain_losses(
    hidden: Tensor, feature: Tensor | None, head: HeadWeights, targets: SlotTargets, mix: LossMix
) -> SlotLosses:
    """The loss as one would write it first: every logit of every slot at once, gradients by autograd."""
    logits = hidden @ head.lm_head.T
    if feature is not None:
        logits = logits + feature @ head.markov_w2.T
    target_logits = targets.hidden[targets.position] @ head.lm_head.T
    p, log_q = target_logits.float().softmax(-1), logits.float().log_softmax(-1)
    ce = F.nll_loss(log_q, targets.label.clamp(min=0), reduction="none")
    l1 = (log_q.exp() - p).abs().sum(-1)
    total = (targets.weight * (mix.ce * ce + mix.l1 * l1)).sum()
    top1 = (logits.argmax(-1) == target_logits.argmax(-1)).float()
    return SlotLosses(total, ce.detach(), torch.zeros_like(ce), l1.detach(), top1)


def step_once(loss: str, repeats: int) -> None:
    """In a process of its own: time `repeats` optimizer steps and print seconds and the peak resident bytes."""
    torch.set_num_threads(2)
    if loss == "plain":
        objective.draft_losses = plain_losses
    torch.manual_seed(0)
    config = DecoderConfig(
        architecture="LlamaForCausalLM", vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=1024,
        num_hidden_layers=3, num_attention_heads=8, num_key_value_heads=8, head_dim=64, max_position_embeddings=2048,
        layer_types=("full_attention",) * 3, tie_word_embeddings=True,
    )  # fmt: skip
    target = Decoder(config).requires_grad_(False).eval()
    length = ANCHORS + DRAFTS + 1
    ids, mask = torch.randint(VOCABULARY, (length,)), torch.ones(length, dtype=torch.uint8)
    states = torch.randn(length, len(TAPS) + 1, HIDDEN).bfloat16()
    rows = Rows([Row(0, ids.int(), mask, states[:, :-1], states[:, -1], None)] * 4)
    settings = TrainSettings.from_dict(
        {
            "cache": ["memory"], "out": "unused", "num_anchors": ANCHORS, "batch_size": 1, "max_steps": repeats + 1,
            "compute_dtype": "float32",
            "drafter": {"num_hidden_layers": 1, "block_size": DRAFTS, "mask_token_id": 1, "markov_rank": 64},
        },
        "benchmark",
    )  # fmt: skip
    with join_ranks("cpu") as ranks:
        drafter = new_drafter(drafter_config(settings.drafter, target, TAPS), target, rows, 0)
        trainer = Trainer(settings, target, drafter, rows, lambda drafter, path: None, ranks)
        seconds = []
        for step in range(repeats + 1):
            batches = trainer.load_step(step)
            start = time.perf_counter()
            value = trainer.train_step(batches).results()["loss"]
            seconds.append(time.perf_counter() - start)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"seconds": statistics.median(seconds[1:]), "bytes": peak, "loss": value}))


def step_ratios(repeats: int) -> dict[str, float]:
    """Memory and time of the chunked loss over the plain one's, and both losses as a check."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in LOSSES}
    for _ in range(repeats):
        for name in LOSSES:
            command = [sys.executable, __file__, "--step", name]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            found[name].append(json.loads(done.stdout))
    chunked, plain = (
        {key: statistics.median(r[key] for r in found[name]) for key in found[name][0]} for name in LOSSES
    )
    assert abs(chunked["loss"] - plain["loss"]) < 1e-3 * abs(plain["loss"]), (chunked, plain)
    return {
        "step_memory_ratio": round(chunked["bytes"] / plain["bytes"], 3),
        "step_time_ratio": round(chunked["seconds"] / plain["seconds"], 3),
        "chunked_step_gib": round(chunked["bytes"] / 2**30, 2),
        "chunked_step_seconds": round(chunked["seconds"], 2),
    }


def write_answers(path: Path, count: int) -> None:
    """The built-in target's own answers to a few prompts."""
    session = open_pair("smollm2-135m", "auto", "auto", max_batch=8)
    texts = [text for texts in read_prompts(None, ("humaneval", "gsm8k", "mt-bench"), 4).values() for text in texts]
    texts = [texts[i % len(texts)] for i in range(count)]
    ids = [session.prompt_ids([{"role": "user", "content": text}]) for text in texts]
    params = [SamplingParams(max_tokens=64, temperature=1.0, seed=i, speculate=False) for i in range(count)]
    rows = [
        {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": done.text}]}
        for text, done in zip(texts, session.engine.generate(ids, params), strict=True)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def dspark(*arguments: str) -> subprocess.Popen[bytes]:
    """`dspark ARGUMENTS` in a process of its own."""
    command = [sys.executable, "-m", "dspark.cli", *arguments]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=HERE.parent)


def cached_run(directory: Path, steps: int) -> dict[str, object]:
    """Train on a real cache, once left alone and once killed half-way."""
    write_answers(directory / "answers.jsonl", 24)
    answers, features = f'conversations=["{directory}/answers.jsonl"]', directory / "features"
    assert dspark("cache", "recipes/cache.toml", answers, f"out={features}").wait() == 0

    def train(name: str) -> subprocess.Popen[bytes]:
        changes = [
            f'cache=["{features}"]',
            f"out={directory / name}",
            f"max_steps={steps}",
            "save_every=10",
            "log_every=1",
        ]
        return dspark("train", "recipes/train-smollm2-135m.toml", *changes)

    assert train("whole").wait() == 0
    killed = train("killed")
    while len(logged(directory / "killed")) < steps // 2 and killed.poll() is None:
        time.sleep(0.05)
    os.kill(killed.pid, signal.SIGKILL)
    killed.wait()
    cut = len(logged(directory / "killed"))
    assert cut < steps, "the run ended before it was killed"
    assert train("killed").wait() == 0
    whole, resumed = logged(directory / "whole"), logged(directory / "killed")
    waits = [row["data_wait_share"] for row in whole[5:]]
    return {
        "data_wait_share": round(statistics.mean(waits), 4),
        "resume_identical": [r["loss"] for r in whole[:cut + 20]] == [r["loss"] for r in resumed[:cut + 20]],
        "killed_at_step": cut,
    }  # fmt: skip


def logged(out: Path) -> list[dict[str, float]]:
    """What a run logged so far, whole lines only."""
    path = out / "metrics.jsonl"
    lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3, help="processes a loss, and steps in each")
    parser.add_argument("--steps", type=int, default=60, help="of the cached runs")
    parser.add_argument("--json", action="store_true", help="print one object")
    parser.add_argument("--step", choices=LOSSES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.step:
        step_once(args.step, args.repeats)
        return
    with tempfile.TemporaryDirectory() as directory:
        figures = step_ratios(args.repeats) | cached_run(Path(directory), args.steps)
    if args.json:
        print(json.dumps(figures))
    else:
        for name, value in figures.items():
            print(f"{name:22} {value}")


if __name__ == "__main__":
    main()
