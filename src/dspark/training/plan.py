"""What a training run would take, before it starts: sizes, memory, disk and steps, from configs alone.

Estimates count what grows with the models and the recipe: weights, gradients, AdamW's two moments, one micro-batch of
features and its activations. What PyTorch and the allocator keep on top is not in them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from dspark.drafters.factory import make_drafter
from dspark.models.config import DecoderConfig
from dspark.models.decoder import Decoder
from dspark.models.families import config_from_hf
from dspark.models.hub import resolve_model
from dspark.models.weights import load_decoder, read_hf_config
from dspark.training.build import drafter_config, freeze, spread_layers
from dspark.training.config import TrainSettings
from dspark.training.losses import CHUNK

FLOAT, HALF = 4, 2  # bytes


@dataclass(frozen=True)
class TrainPlan:
    """Counts and bytes of a run; memory is of one process. None: not known before the cache is built."""

    target_parameters: int
    drafter_parameters: int
    trained_parameters: int
    num_processes: int
    sequences_per_step: int
    anchors_per_step: int
    num_samples: int | None
    num_tokens: int | None
    steps: int | None
    weights_bytes: int  # the target, the LM head rows of the draft vocabulary, and the drafter
    optimizer_bytes: int  # gradients and moments, this process's share
    batch_bytes: int  # features of one micro-batch, activations of its slots, one chunk of logits
    state_bytes: int  # one training state on disk
    drafter_bytes: int  # one servable checkpoint on disk
    reads: tuple[Path, ...]
    writes: tuple[Path, ...]

    @property
    def memory_bytes(self) -> int:
        """Peak memory of one process."""
        return self.weights_bytes + self.optimizer_bytes + self.batch_bytes

    @property
    def disk_bytes(self) -> int:
        """Two states (a third while it is written) and the servable checkpoints."""
        return 3 * self.state_bytes + len(self.writes) * self.drafter_bytes


def plan(settings: TrainSettings, lengths: np.ndarray | None, taps: tuple[int, ...], processes: int) -> TrainPlan:
    """Work a recipe out without loading weights or reading features.

    `lengths` [n] are the samples' token counts, None before there are any; `taps` the layers they hold, or that the
    recipe names. Raises ConfigError and CheckpointError.
    """
    config = target_config(settings.target)
    with torch.device("meta"):
        target = Decoder(config)
        shape = drafter_config(settings.drafter, target, taps or spread_layers(config.num_hidden_layers))
        drafter = make_drafter(
            shape, target, None if shape.draft_vocab_size is None else torch.arange(shape.draft_vocab_size)
        )
    freeze(drafter, settings.freeze)
    total = sum(p.numel() for p in drafter.parameters())
    trained = sum(p.numel() for p in drafter.parameters() if p.requires_grad)
    samples, tokens = (None, None) if lengths is None else (len(lengths), int(lengths.sum()))
    length = config.max_position_embeddings if lengths is None else int(lengths.max())
    rows = settings.batch_size * settings.num_anchors * shape.query_rows
    width = (len(shape.target_layer_ids) + 1) * config.hidden_size
    batch = settings.batch_size * length * width * HALF
    batch += rows * FLOAT * shape.num_hidden_layers * (6 * config.hidden_size + 4 * shape.intermediate_size)
    batch += 8 * CHUNK * FLOAT * shape.num_draft_logits
    per_step = settings.batch_size * settings.accumulation
    steps = settings.max_steps
    if steps is None and samples is not None:
        steps = settings.epochs * max(1, samples // per_step)
    target_parameters = sum(p.numel() for p in target.parameters())
    names = ("last", "best") if settings.held_out is not None else ("last",)
    return TrainPlan(
        target_parameters=target_parameters,
        drafter_parameters=total,
        trained_parameters=trained,
        num_processes=processes,
        sequences_per_step=per_step,
        anchors_per_step=per_step * settings.num_anchors,
        num_samples=samples,
        num_tokens=tokens,
        steps=steps,
        weights_bytes=FLOAT * (target_parameters + shape.num_draft_logits * config.hidden_size + total),
        optimizer_bytes=3 * trained * FLOAT // processes,
        batch_bytes=batch,
        state_bytes=(total + 2 * trained) * FLOAT,
        drafter_bytes=total * HALF,
        reads=(*settings.cache, *((settings.init_from,) if settings.init_from else ())),
        writes=tuple(settings.out / name for name in names),
    )


def target_config(name_or_path: str) -> DecoderConfig:
    """The target's config, without its weights where the format allows. Raises CheckpointError."""
    path = resolve_model(name_or_path)
    if path.is_dir():
        return config_from_hf(read_hf_config(path), str(path))
    return load_decoder(path).config
