"""Whether Triton kernels stand in for plain PyTorch."""

import functools
import importlib
import os
from importlib.util import find_spec
from types import ModuleType

from torch import Tensor

ENV_SWITCH = "DSPARK_KERNELS"  # "plain" keeps PyTorch everywhere


def kernels_for(tensor: Tensor) -> ModuleType | None:
    """The module `dspark.kernels.rows` where it can run on this tensor's device, else None.

    On CUDA devices, where Triton is installed (CUDA builds of PyTorch bring it along); on the CPU only in Triton's
    interpreter (TRITON_INTERPRET=1), which is slow and for tests.
    """
    return _kernels() if tensor.is_cuda or (_interprets() and tensor.device.type == "cpu") else None


@functools.cache
def _interprets() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


@functools.cache
def _kernels() -> ModuleType | None:
    if os.environ.get(ENV_SWITCH) == "plain" or find_spec("triton") is None:
        return None
    return importlib.import_module("dspark.kernels.rows")
