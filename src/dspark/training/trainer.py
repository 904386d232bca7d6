"""The one training loop."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from dspark.drafters.base import Drafter
from dspark.errors import CheckpointError
from dspark.log import get_logger
from dspark.models.ends import TargetEnds
from dspark.training.batch import SampleSource, TrainBatch, collate, slot_weights
from dspark.training.checkpoint import StateWriter, latest_state, load_tensors
from dspark.training.config import TrainSettings
from dspark.training.execution import execute_as
from dspark.training.metrics import MetricLog, MetricSums
from dspark.training.objective import TrainStep, Weighting
from dspark.training.optim import build_optimizer, learning_rate
from dspark.training.parallel import Ranks, peak_memory, whole_tensor
from dspark.training.sampler import EpochSampler
from dspark.training.selection import Best, keep

_log = get_logger(__name__)


@dataclass(frozen=True)
class TrainReport:
    """How a run stands when it returns: the figures last logged, the best measurement, where things are."""

    step: int
    total_steps: int
    seconds: float
    figures: dict[str, float]
    best: Best
    out: Path


class Trainer:
    """Trains `drafter` on `samples` as `settings` say; `target` lends its final norm, embedding and LM head.

    `export(drafter, directory)` writes a servable checkpoint; it is called beside every training state.
    `measure(directory)` gives the accepted length of such a checkpoint on held-out prompts. A run that finds a state
    under `settings.out` continues it, with the losses the uninterrupted run would have had.
    """

    def __init__(
        self,
        settings: TrainSettings,
        target: TargetEnds,
        drafter: Drafter,
        samples: SampleSource,
        export: Callable[[Drafter, Path], None],
        ranks: Ranks,
        measure: Callable[[Path], float] | None = None,
    ) -> None:
        self.settings, self.target, self.drafter, self.samples, self.export = settings, target, drafter, samples, export
        self.ranks, self.measure, self.best = ranks, measure, Best()
        ranks.check(settings.accumulation)
        self.sampler = EpochSampler(samples.lengths, settings.batch_size, settings.seed)
        self.steps_per_epoch = max(1, self.sampler.batches_per_epoch // settings.accumulation)
        self.total_steps = settings.max_steps or settings.epochs * self.steps_per_epoch
        execute_as(settings, drafter, ranks.device)
        self.module = TrainStep(drafter)
        ranks.shard(self.module)
        self.optimizer = build_optimizer(self.module, settings)
        self.weighting = Weighting(settings.loss, settings.slot_decay, _draft_index(drafter))
        self.states = StateWriter(settings.out / "states", ranks)
        self.step = 0
        self.exported: int | None = None  # the step that `last` holds
        self.stop_requested = False

    def run(self) -> TrainReport:
        """Train to the last step, saving on the way, at the end, and when interrupted."""
        self.resume()
        began = time.perf_counter()
        log = MetricLog(self.settings, self.step, self.total_steps) if self.ranks.is_main else None
        pending = MetricSums()
        with log or nullcontext():
            try:
                while self.step < self.total_steps and not self.ended():
                    started = time.perf_counter()
                    batches = self.load_step(self.step)
                    waited = time.perf_counter() - started
                    sums = self.train_step(batches)
                    sums.add_time(time.perf_counter() - started, waited)
                    self.select(sums)
                    pending.merge(sums)
                    if log is not None:
                        log.line.advance()
                    if self.step % self.settings.log_every == 0:
                        pending.reduce(self.ranks)
                        if log is not None:
                            log.add(self.step, pending)
                        pending = MetricSums()
                    self.states.poll()
                    if self.step % self.settings.save_every == 0 and self.step < self.total_steps:
                        self.save()
            except BaseException:
                if self.ranks.world_size == 1:  # others may be anywhere: waiting for them could take for ever
                    self.save_last()
                raise
            self.save_last()
        figures = {} if log is None else log.latest
        seconds = time.perf_counter() - began
        return TrainReport(self.step, self.total_steps, seconds, figures, self.best, self.settings.out)

    def ended(self) -> bool:
        """Whether the run is to stop before its last step: it was asked to, or nothing gets better."""
        held_out = self.settings.held_out
        exhausted = held_out is not None and self.best.exhausted(held_out.patience)
        if exhausted:
            _log.info("no better checkpoint since step %d: stopping at step %d", self.best.step, self.step)
        return bool(self.ranks.total(self.stop_requested or exhausted))

    def select(self, sums: MetricSums) -> None:
        """Where a measurement is due, measure the present drafter on held-out prompts; keep it if it is the best."""
        held_out = self.settings.held_out
        if held_out is None or self.measure is None:
            return
        if self.step % held_out.every and self.step != self.total_steps:
            return
        self.export_last()
        last, accepted_length = self.settings.out / "last", 0.0
        if self.ranks.is_main:
            accepted_length = self.measure(last)
        accepted_length = self.ranks.total(accepted_length)
        if self.best.record(self.step, accepted_length) and self.ranks.is_main:
            keep(last, self.settings.out / "best")
        sums.set(accepted_length=accepted_length, best_accepted_length=self.best.accepted_length)

    def load_step(self, step: int) -> list[TrainBatch]:
        """This process's micro-batches of optimizer step `step`: a pure function of the seed and the step."""
        s = self.settings
        batches = []
        for micro in self.ranks.share(s.accumulation):
            index = step * s.accumulation + micro
            rng = np.random.default_rng([s.seed, index, 1])
            samples = self.samples.load(self.sampler.batch(index).tolist())
            batches.append(collate(samples, s.num_anchors, self.drafter.num_drafts, rng, s.tokens_per_row))
        return batches

    def train_step(self, batches: list[TrainBatch]) -> MetricSums:
        """One optimizer step over its micro-batches; each loss term is normalised by the whole step's weights.

        A micro-batch with nothing to train runs like any other, so that the processes stay in step.
        """
        s, device = self.settings, self.ranks.device
        weight_sum = sum(float(slot_weights(b.slot_mask, s.slot_decay).sum()) for b in batches)
        weight_sum = max(self.ranks.total(weight_sum), 1e-9)
        rate = learning_rate(self.step, self.total_steps, s)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        sums = MetricSums()
        for i, batch in enumerate(batches):
            self.ranks.sync_gradients(self.module, last=i == len(batches) - 1)
            with torch.autocast(device.type, torch.bfloat16, enabled=s.compute_dtype == "bfloat16"):
                objective = self.module(self.target, batch.to(device), self.weighting)
            (objective.loss / weight_sum).backward()
            sums.add(objective.metrics, objective.loss, weight_sum, batch)
        norm = whole_tensor(torch.nn.utils.clip_grad_norm_(self.module.parameters(), s.max_grad_norm))
        if not torch.isfinite(norm):
            raise CheckpointError(
                f"step {self.step}: the gradient is not finite; lower learning_rate or check the cache"
            )
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        sums.set(learning_rate=rate, grad_norm=float(norm), memory_gib=peak_memory(device) / 2**30)
        self.step += 1
        return sums

    def save(self) -> None:
        """Start to write the training state, and write a servable checkpoint."""
        run = {
            "step": self.step,
            "total_steps": self.total_steps,
            "settings": self.settings.identity(),
            "draft_vocabulary": _vocabulary_digest(self.drafter.token_ids),
            "samples": _digest(self.samples.lengths),
            "best": self.best.as_dict(),
        }
        self.states.save(self.step, self._tensors(), run)
        self.export_last()

    def save_last(self) -> None:
        """Write the training state and wait until it is on disk."""
        self.save()
        self.states.finish()

    def export_last(self) -> None:
        """Write the present drafter as a servable checkpoint, once a step."""
        if self.exported == self.step:
            return
        with self.ranks.whole(self.module):
            if self.ranks.is_main:
                self.export(self.drafter, self.settings.out / "last")
        self.ranks.wait()
        self.exported = self.step

    def resume(self) -> None:
        """Continue from the newest state, if there is one. Raises CheckpointError when its settings differ."""
        found = latest_state(self.settings.out / "states")
        if found is None:
            return
        path, run = found
        if run["settings"] != self.settings.identity():
            raise CheckpointError(
                f"{self.settings.out}: holds a run with other settings; choose another output or restore its recipe"
            )
        if run["samples"] != _digest(self.samples.lengths):
            raise CheckpointError(
                f"{self.settings.out}: was trained on other samples; restore the cache or the conversations, or choose "
                "another output and set init_from"
            )
        if run["draft_vocabulary"] != _vocabulary_digest(self.drafter.token_ids):
            raise CheckpointError(
                f"{self.settings.out}: was trained on another draft vocabulary; has the cache changed? "
                "Restore it, or choose another output and set init_from"
            )
        tensors = self._tensors()
        load_tensors(path, tensors, self.ranks)
        set_state_dict(
            self.module,
            self.optimizer,
            model_state_dict=tensors["model"],
            optim_state_dict=tensors["optimizer"],
        )
        self.drafter.backbone.feature_scale.copy_(tensors["feature_scale"])
        self.step, self.best = run["step"], Best(**run["best"])
        _log.info("resuming at step %d of %d", self.step, self.total_steps)

    def _tensors(self) -> dict[str, Any]:
        """All that changes from step to step, by name; sharded where the parameters are."""
        model, optimizer = get_state_dict(self.module, self.optimizer)
        return {"model": model, "optimizer": optimizer, "feature_scale": self.drafter.backbone.feature_scale}


def _digest(values: np.ndarray) -> str:
    """Names an array's contents."""
    return hashlib.sha256(values.tobytes()).hexdigest()[:16]


def _vocabulary_digest(token_ids: Tensor | None) -> str | None:
    """Names a draft vocabulary."""
    return None if token_ids is None else _digest(token_ids.cpu().numpy())


def _draft_index(drafter: Drafter) -> Tensor | None:
    """Target id -> draft index, -1 outside the draft vocabulary: [V], or None for a full vocabulary."""
    if drafter.token_ids is None:
        return None
    index = torch.full((drafter.config.vocab_size,), -1, device=drafter.token_ids.device)
    index[drafter.token_ids] = torch.arange(len(drafter.token_ids), device=index.device)
    return index
