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
from dspark.models.decoder import Decoder, new_ends
from dspark.models.ends import Ends
from dspark.models.hub import resolve_model
from dspark.models.target import decodes
from dspark.models.weights import load_config
from dspark.training.build import drafter_config, freeze, spread_layers
from dspark.training.config import TrainSettings
from dspark.training.losses import CHUNK

FLOAT, HALF = 4, 2  # bytes


@dataclass(frozen=True)
class TrainPlan:
    """Counts and bytes of a run; memory is of one training process. None: not known before the cache is built."""

    target_parameters: int  # those that a trainer holds
    whole_target: bool  # whether these are all, or the embedding, the final norm and the LM head
    target_dtype: str
    target_rank_bytes: int | None  # weights in a process that runs the target alone, where there are such
    drafter_parameters: int
    trained_parameters: int
    num_processes: int
    sequences_per_step: int
    anchors_per_step: int
    num_samples: int | None
    num_tokens: int | None
    steps: int | None
    weights_bytes: int  # of the target, the LM head rows of the draft vocabulary, and the drafter
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


def plan(
    settings: TrainSettings, lengths: np.ndarray | None, taps: tuple[int, ...], processes: int, whole: bool
) -> TrainPlan:
    """Work a recipe out without loading weights or reading features.

    `lengths` [n] are the samples' token counts, None before there are any; `taps` the layers they hold, or that the
    recipe names; `processes` those that train; `whole`: they load the target's layers too. Raises ConfigError and
    CheckpointError.
    """
    target, all_parameters = target_shape(settings.target)
    config = target.config
    with torch.device("meta"):
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
    kept, layer = config.hidden_size, 6 * config.hidden_size + 4 * shape.intermediate_size
    layers = shape.num_hidden_layers
    batch += rows * FLOAT * (layers * kept + layer if settings.activation_checkpointing else layers * layer)
    batch += 5 * CHUNK * FLOAT * shape.num_draft_logits
    per_step = settings.batch_size * settings.accumulation
    steps = settings.max_steps
    if steps is None and samples is not None:
        steps = settings.epochs * max(1, samples // per_step)
    target_parameters = all_parameters if whole else sum(p.numel() for p in target.parameters())
    target_size = FLOAT if settings.target_dtype == "float32" else HALF
    names = ("last", "best") if settings.held_out is not None else ("last",)
    return TrainPlan(
        target_parameters=target_parameters,
        whole_target=whole,
        target_dtype=settings.target_dtype,
        target_rank_bytes=all_parameters * target_size if settings.target_ranks else None,
        drafter_parameters=total,
        trained_parameters=trained,
        num_processes=processes,
        sequences_per_step=per_step,
        anchors_per_step=per_step * settings.num_anchors,
        num_samples=samples,
        num_tokens=tokens,
        steps=steps,
        weights_bytes=target_size * (target_parameters + shape.num_draft_logits * config.hidden_size) + FLOAT * total,
        optimizer_bytes=3 * trained * FLOAT // processes,
        batch_bytes=batch,
        state_bytes=(total + 2 * trained) * FLOAT,
        drafter_bytes=total * HALF,
        reads=(*settings.conversations, *settings.cache, *((settings.init_from,) if settings.init_from else ())),
        writes=tuple(settings.out / name for name in names),
    )


def target_shape(name_or_path: str) -> tuple[Ends, int]:
    """The target's ends without values, and how many parameters the whole has. Raises CheckpointError."""
    path = resolve_model(name_or_path)
    with torch.device("meta"):
        if decodes(path):
            config = load_config(path)
            return new_ends(config), sum(p.numel() for p in Decoder(config).parameters())
        from dspark.models.hf_ends import skeleton  # takes seconds

        model = skeleton(path, name_or_path)
        return Ends.of(model), sum(p.numel() for _, p in model.named_parameters())
