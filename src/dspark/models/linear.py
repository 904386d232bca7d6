"""Linear layers at the speed this machine allows.

`F.linear` lays its weight out anew at each call; oneDNN multiplies faster with a weight packed once, and a CPU without
bfloat16 instructions faster still with the same weight in float32. Which is best depends on the machine, the shape and
the number of rows, so it is measured. Every choice multiplies the same weights and sums in float32.

Shapes: N rows (all leading dimensions together), I inputs, O outputs.
"""

import functools
import os
import time
from collections.abc import Callable
from typing import Literal, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Kernel = Callable[[Tensor], Tensor]
KernelName = Literal["plain", "packed", "packed_float32"]
Name = TypeVar("Name", bound=str)

ENV_SWITCH = "DSPARK_LINEAR"  # "plain" keeps F.linear everywhere
_MEASURED_ROWS = (1, 8)  # one row, and several: what wins at 8 wins beyond
_MIN_WEIGHTS = 1 << 16  # smaller layers stay as they are
_MAX_MEASURED_WEIGHTS = 1 << 22
_REPETITIONS = 3
_CACHE_BYTES = 1 << 25
_GAIN = 0.9  # one row gets a kernel, and so a copy of the weight, of its own only if that takes this share of the time


class PackedLinear(nn.Module):
    """A linear layer for inference that calls the kernel chosen for the number of rows."""

    def __init__(self, linear: nn.Linear, choice: tuple[KernelName, KernelName]) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.dtype, self.has_bias = linear.weight.dtype, linear.bias is not None
        kernels = {name: make_kernel(name, linear.weight.detach(), linear.bias) for name in set(choice)}
        self.one_row, self.many_rows = kernels[choice[0]], kernels[choice[1]]

    def forward(self, x: Tensor) -> Tensor:
        """Map x [..., I] to [..., O]."""
        assert not x.requires_grad, "packed layers are for inference: load the model with pack=False to train"
        return self.one_row(x) if x.numel() == self.in_features else self.many_rows(x)

    @property
    def weight(self) -> Tensor:
        """The weight [O, I], unpacked anew: a product with the identity rounds nothing."""
        assert not self.has_bias
        return self.many_rows(torch.eye(self.in_features, dtype=self.dtype)).T.contiguous()


def pack_linears(module: nn.Module) -> None:
    """Replace, in place, every `nn.Linear` inside `module` by the fastest equivalent on this machine.

    For inference on the CPU; layers elsewhere stay as they are. Weights that no kernel uses are freed.
    """
    if os.environ.get(ENV_SWITCH) == "plain":
        return
    for parent in list(module.modules()):
        for name, linear in list(parent.named_children()):
            if type(linear) is not nn.Linear or linear.weight.device.type != "cpu":
                continue
            choice = choose(linear.out_features, linear.in_features, linear.weight.dtype, torch.get_num_threads())
            if set(choice) != {"plain"}:
                setattr(parent, name, PackedLinear(linear, choice))


def multiplies_bfloat16() -> bool:
    """Whether this CPU computes in bfloat16; without it a product of several rows costs what it does in float32."""
    try:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    except AttributeError:  # this build of torch has no oneDNN
        return False


def make_kernel(name: KernelName, weight: Tensor, bias: Tensor | None) -> Kernel:
    """Return the function x [..., I] -> [..., O] that multiplies by weight [O, I]; raises where torch lacks it."""
    if name == "plain":
        return lambda x: F.linear(x, weight, bias)
    reorder, multiply = torch.ops.mkldnn._reorder_linear_weight, torch.ops.mkldnn._linear_pointwise
    if name == "packed":
        packed = reorder(weight, _MEASURED_ROWS[1])
        return lambda x: multiply(x, packed, bias, "none", [], "")
    packed, wide_bias = reorder(weight.float(), _MEASURED_ROWS[1]), None if bias is None else bias.float()
    return lambda x: multiply(x.float(), packed, wide_bias, "none", [], "").to(x.dtype)


@functools.cache
def choose(out_features: int, in_features: int, dtype: torch.dtype, num_threads: int) -> tuple[KernelName, KernelName]:
    """Return the kernels for one row and for several, measured once a process for each shape (some milliseconds).

    `num_threads` is torch's at present; it is an argument because the choice depends on it.
    """
    if out_features * in_features < _MIN_WEIGHTS or dtype not in (torch.float32, torch.bfloat16):
        return "plain", "plain"
    generator = torch.Generator().manual_seed(0)
    outputs = min(out_features, max(64, _MAX_MEASURED_WEIGHTS // in_features))
    weight = torch.randn(outputs, in_features, generator=generator).to(dtype)
    inputs = measured_inputs(in_features, dtype)
    names: list[KernelName] = ["plain", "packed"]
    if dtype == torch.bfloat16:
        names.append("packed_float32")
    return fastest(names, lambda name: make_kernel(name, weight, None), inputs, weight)


def fastest(
    names: list[Name], make: Callable[[Name], Kernel], inputs: list[Tensor], weight: Tensor
) -> tuple[Name, Name]:
    """Return the fastest kernels for one row and for several, of those that are here and multiply by weight [O, I].

    `inputs` are the rows to measure with, few and several; the first name is that of a kernel that always works.
    """
    kernels = {}
    for name in names:
        try:
            kernel = make(name)
            if name == names[0] or all(_agrees(kernel(x), x, weight) for x in inputs):
                kernels[name] = kernel
        except (AttributeError, RuntimeError):  # this build of torch, or this CPU, lacks the kernel
            if name == names[0]:
                raise
    other = torch.ones(_CACHE_BYTES // 4)
    one_row, many_rows = ({name: _seconds(kernel, x, other) for name, kernel in kernels.items()} for x in inputs)
    best_many, best_one = min(many_rows, key=many_rows.__getitem__), min(one_row, key=one_row.__getitem__)
    return best_one if one_row[best_one] < _GAIN * one_row[best_many] else best_many, best_many


def measured_inputs(in_features: int, dtype: torch.dtype) -> list[Tensor]:
    """Rows [1, N, I] to measure kernels with: one, and several."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(1, rows, in_features, generator=generator).to(dtype) for rows in _MEASURED_ROWS]


def _agrees(output: Tensor, x: Tensor, weight: Tensor) -> bool:
    """Whether `output` is the product up to float32 summation order and one rounding to its dtype."""
    exact = F.linear(x.float(), weight.float())
    limit = float(exact.abs().max()) * (1e-5 if output.dtype == torch.float32 else 2**-7)
    return output.dtype == x.dtype and float((output.float() - exact).abs().max()) <= limit


def _seconds(kernel: Kernel, x: Tensor, other: Tensor) -> float:
    """Return the best time of a call after reading `other`, so that the weights are not in the cache."""
    times = []
    for _ in range(_REPETITIONS):
        other.sum()
        start = time.perf_counter()
        kernel(x)
        times.append(time.perf_counter() - start)
    return min(times)
