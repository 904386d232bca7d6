"""The target's linear layers with 8-bit weights: int8 rows, each times a scale of its own.

Every kernel multiplies by the same weights and sums in float32, and which one runs depends on the number of rows alone
as for other layers (`linear`), so verification and plain decoding follow one law: that of the quantised target.

Shapes: N rows (all leading dimensions together), I inputs, O outputs.
"""

import functools
import hashlib
import os
from typing import Literal

import torch
from torch import Tensor, nn

from dspark.models.linear import ENV_SWITCH, Kernel, KernelName, choose, fastest, make_kernel, measured_inputs
from dspark.models.mlp import SparseMLP

WeightsName = Literal["stored", "int8"]
QuantizedKernelName = KernelName | Literal["int8"]

_LIMIT = 127
_MEASURED_OUTPUTS = 1 << 12  # layers with more of them are measured with so many


class QuantizedLinear(nn.Module):
    """A linear layer for inference on the CPU, its weight rounded to int8; calls the kernel chosen for the rows."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        values, scales = quantize_rows(linear.weight.detach())
        self.dtype = scales.dtype
        self._bias = None if linear.bias is None else linear.bias.detach()
        choice = choose_quantized(self.out_features, self.in_features, scales.dtype, torch.get_num_threads())
        kernels = {name: make_quantized_kernel(name, values, scales) for name in set(choice)}
        self.one_row, self.many_rows = kernels[choice[0]], kernels[choice[1]]

    def forward(self, x: Tensor) -> Tensor:
        """Map x [..., I] to [..., O]."""
        assert not x.requires_grad, "quantised layers are for inference: load the model with stored weights to train"
        out = self.one_row(x) if x.numel() == self.in_features else self.many_rows(x)
        return out if self._bias is None else out + self._bias

    @property
    def weight(self) -> Tensor:
        """The quantised weight [O, I] in the model's dtype, from a product with the identity."""
        assert self._bias is None
        return self.many_rows(torch.eye(self.in_features, dtype=self.dtype)).T.contiguous()


def quantize_linears(module: nn.Module) -> None:
    """Replace, in place, every `nn.Linear` inside `module` by its 8-bit form, but for the routers of experts.

    Embedding tables, norms and stacked experts stay as they are; an LM head tied to the embedding table gets a copy.
    """
    for parent in list(module.modules()):
        for name, linear in list(parent.named_children()):
            if type(linear) is nn.Linear and not isinstance(parent, SparseMLP):
                setattr(parent, name, QuantizedLinear(linear))


def quantize_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return values i8 [O, I] and scales [O], in the weight's dtype: value * scale is the weight, rounded."""
    peak = weight.float().abs().amax(1)
    scales = (peak / _LIMIT).to(weight.dtype)
    scales = torch.where(scales > 0, scales, torch.ones_like(scales))
    values = (weight.float() / scales.float()[:, None]).round_().clamp_(-_LIMIT, _LIMIT)
    return values.to(torch.int8), scales


def make_quantized_kernel(name: QuantizedKernelName, values: Tensor, scales: Tensor) -> Kernel:
    """Return the function x [..., I] -> [..., O] of quantised rows; raises where torch lacks it.

    "int8" reads the bytes; the others multiply by the values in the model's dtype, which holds them exactly, and then
    by the scales.
    """
    if name == "int8":
        return lambda x: torch._weight_int8pack_mm(x.reshape(-1, x.shape[-1]), values, scales).view(
            *x.shape[:-1], len(values)
        )
    kernel = make_kernel(name, values.to(scales.dtype), None)
    return lambda x: kernel(x) * scales


@functools.cache
def choose_quantized(
    out_features: int, in_features: int, dtype: torch.dtype, num_threads: int
) -> tuple[QuantizedKernelName, QuantizedKernelName]:
    """Return the kernels for one row and for several, measured once a process for each shape, as `linear.choose`."""
    if os.environ.get(ENV_SWITCH) == "plain":
        return "plain", "plain"
    names: list[QuantizedKernelName] = list(dict.fromkeys(choose(out_features, in_features, dtype, num_threads)))
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(min(out_features, _MEASURED_OUTPUTS), in_features, generator=generator).to(dtype)
    values, scales = quantize_rows(weight)
    product = values.float() * scales.float()[:, None]
    inputs = measured_inputs(in_features, dtype)
    return fastest([*names, "int8"], lambda name: make_quantized_kernel(name, values, scales), inputs, product)


def quantized_digest(digest: str, weights: WeightsName) -> str:
    """Return 16 hex digits that identify a target with these weights, given those of the stored ones."""
    return hashlib.sha256(f"{digest} {weights}".encode()).hexdigest()[:16]
