"""The one training loop."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dspark.drafters.dspark import Drafter
from dspark.errors import CheckpointError
from dspark.log import get_logger, progress
from dspark.models.decoder import Decoder
from dspark.training.batch import SampleSource, TrainBatch, collate, slot_weights
from dspark.training.checkpoint import load_latest, save_state
from dspark.training.config import TrainSettings
from dspark.training.metrics import MetricLog, MetricSums
from dspark.training.objective import micro_objective
from dspark.training.optim import build_optimizer, learning_rate
from dspark.training.sampler import EpochSampler

_log = get_logger(__name__)


class Trainer:
    """Trains `drafter` on `samples` as `settings` say; `target` lends its final norm, embedding and LM head.

    `export(drafter, directory)` writes a servable checkpoint; it is called beside every training state. A run that
    finds a state under `settings.out` continues it, with the losses the uninterrupted run would have had.
    """

    def __init__(
        self,
        settings: TrainSettings,
        target: Decoder,
        drafter: Drafter,
        samples: SampleSource,
        lengths: np.ndarray,
        export: Callable[[Drafter, Path], None],
    ) -> None:
        self.settings, self.target, self.drafter, self.samples, self.export = settings, target, drafter, samples, export
        self.sampler = EpochSampler(lengths, settings.batch_size, settings.seed)
        self.steps_per_epoch = max(1, self.sampler.batches_per_epoch // settings.accumulation)
        self.total_steps = settings.max_steps or settings.epochs * self.steps_per_epoch
        self.optimizer = build_optimizer(drafter, settings)
        self.draft_index = _draft_index(drafter)
        self.step = 0
        self.stop_requested = False

    def run(self) -> None:
        """Train to the last step, saving on the way, at the end, and when interrupted."""
        self.resume()
        log = MetricLog(self.settings.out, self.step)
        with progress(self.total_steps, "train", "step", initial=self.step) as bar, log:
            try:
                while self.step < self.total_steps and not self.stop_requested:
                    started = time.perf_counter()
                    batches = self.load_step(self.step)
                    waited = time.perf_counter() - started
                    sums = self.train_step(batches)
                    sums.add_time(time.perf_counter() - started, waited)
                    log.add(self.step, sums, flush=self.step % self.settings.log_every == 0)
                    bar.set_postfix_str(log.headline, refresh=False)
                    bar.update(1)
                    if self.step % self.settings.save_every == 0:
                        self.save()
            finally:
                self.save()

    def load_step(self, step: int) -> list[TrainBatch]:
        """The micro-batches of optimizer step `step`: a pure function of the seed and the step."""
        s = self.settings
        batches = []
        for micro in range(s.accumulation):
            index = step * s.accumulation + micro
            rng = np.random.default_rng([s.seed, index, 1])
            samples = [self.samples[int(i)] for i in self.sampler.batch(index)]
            batches.append(collate(samples, s.num_anchors, self.drafter.num_drafts, rng))
        return batches

    def train_step(self, batches: list[TrainBatch]) -> MetricSums:
        """One optimizer step over its micro-batches; each loss term is normalised by the whole step's weights."""
        s = self.settings
        weight_sum = sum(float(slot_weights(b.slot_mask, s.loss.decay).sum()) for b in batches)
        rate = learning_rate(self.step, self.total_steps, s)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        sums = MetricSums()
        for batch in batches:
            if not batch.slot_mask.any():
                continue
            with torch.autocast("cpu", torch.bfloat16, enabled=s.compute_dtype == "bfloat16"):
                objective = micro_objective(self.drafter, self.target, batch, s.loss, self.draft_index)
            (objective.loss / weight_sum).backward()  # type: ignore[no-untyped-call]
            sums.add(objective.metrics, objective.loss, weight_sum, batch)
        norm = torch.nn.utils.clip_grad_norm_(self.drafter.parameters(), s.max_grad_norm)
        if not torch.isfinite(norm):
            raise CheckpointError(
                f"step {self.step}: the gradient is not finite; lower learning_rate or check the cache"
            )
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        sums.set(learning_rate=rate, grad_norm=float(norm))
        self.step += 1
        return sums

    def save(self) -> None:
        """Write the training state and a servable checkpoint."""
        state = {
            "step": self.step,
            "total_steps": self.total_steps,
            "settings": self.settings.identity(),
            "drafter": self.drafter.state_dict(),
            "feature_scale": self.drafter.backbone.feature_scale,
            "token_ids": self.drafter.token_ids,
            "optimizer": self.optimizer.state_dict(),
        }
        save_state(self.settings.out / "states", self.step, state)
        self.export(self.drafter, self.settings.out / "last")

    def resume(self) -> None:
        """Continue from the newest state, if there is one. Raises CheckpointError when its settings differ."""
        state = load_latest(self.settings.out / "states")
        if state is None:
            return
        if state["settings"] != self.settings.identity():
            raise CheckpointError(
                f"{self.settings.out}: holds a run with other settings; choose another output or restore its recipe"
            )
        ours, theirs = self.drafter.token_ids, state["token_ids"]
        if (ours is None) != (theirs is None) or (ours is not None and not torch.equal(ours, theirs)):
            raise CheckpointError(
                f"{self.settings.out}: was trained on another draft vocabulary; has the cache changed? "
                "Restore it, or choose another output and set init_from"
            )
        self.drafter.load_state_dict(state["drafter"])
        self.drafter.backbone.feature_scale.copy_(state["feature_scale"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step = state["step"]
        _log.info("resuming at step %d of %d", self.step, self.total_steps)


def _draft_index(drafter: Drafter) -> Tensor | None:
    """Target id -> draft index, -1 outside the draft vocabulary: [V], or None for a full vocabulary."""
    if drafter.token_ids is None:
        return None
    index = torch.full((drafter.config.vocab_size,), -1)
    index[drafter.token_ids] = torch.arange(len(drafter.token_ids))
    return index
