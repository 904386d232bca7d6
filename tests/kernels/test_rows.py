"""Triton kernels give PyTorch's bits. Their interpreter needs a process of its own: it is chosen when Triton loads."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dspark.kernels.choice import kernels_for

HERE = Path(__file__).parent


def test_kernels_in_the_interpreter() -> None:
    pytest.importorskip("triton", reason="Triton is not installed: no kernels to test (pip install triton, Linux)")
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", str(HERE / "interpreted.py")]
    done = subprocess.run(
        command, env=os.environ | {"TRITON_INTERPRET": "1"}, cwd=HERE.parents[1], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_cpu_keeps_pytorch() -> None:
    assert kernels_for(torch.empty(0)) is None
