"""How a run executes the draft layers: which attention, compiled or not, what is kept for backward."""

from __future__ import annotations

import torch

from dspark.drafters.backbone import Execution
from dspark.drafters.base import Drafter
from dspark.drafters.block_attention import AttentionKind
from dspark.errors import ConfigError
from dspark.training.config import TrainSettings

FLEX_CAPABILITY = (8, 0)  # the oldest GPUs whose shared memory holds the kernels that flex attention makes


def execute_as(settings: TrainSettings, drafter: Drafter, device: torch.device) -> None:
    """Have `drafter` train as the settings say: the same results up to rounding, other time and memory.

    Raises ConfigError where the device cannot.
    """
    drafter.backbone.execution = Execution(attention_kind(settings, device), settings.activation_checkpointing)
    if settings.compile is not None:
        for layer in drafter.backbone.layers:
            layer.compile(backend=settings.compile)


def attention_kind(settings: TrainSettings, device: torch.device) -> AttentionKind:
    """The attention that the settings choose, or that suits the device. Raises ConfigError."""
    if settings.attention == "flex" and device.type != "cuda":
        raise ConfigError(f'attention: flex is for CUDA, and this run is on {device.type}: set "matmul" or "auto"')
    if settings.attention != "auto":
        return settings.attention
    return "flex" if device.type == "cuda" and torch.cuda.get_device_capability(device) >= FLEX_CAPABILITY else "matmul"
