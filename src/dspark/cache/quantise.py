"""States as int8 with one scale for each token and layer: half the bytes of bfloat16.

Shapes: H hidden size.
"""

import torch
from torch import Tensor

_LEVELS = 127


def quantise(states: Tensor) -> tuple[Tensor, Tensor]:
    """states [..., H] -> int8 [..., H] and f32 scales [...]: the largest value of each row of H becomes +-127."""
    wide = states.float()
    scales = wide.abs().amax(dim=-1) / _LEVELS
    steps = scales.clamp(min=torch.finfo(torch.float32).tiny)[..., None]
    return (wide / steps).round().clamp(-_LEVELS, _LEVELS).to(torch.int8), scales


def dequantise(values: Tensor, scales: Tensor) -> Tensor:
    """int8 [..., H] and scales [...] -> bf16 [..., H]; off by half a scale at most, beside bfloat16's own rounding."""
    return (values.float() * scales[..., None]).bfloat16()
