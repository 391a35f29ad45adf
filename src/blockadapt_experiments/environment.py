"""What a measurement was made on, and how much memory an optimizer holds."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from blockadapt.kernels import get_kernel


def environment() -> dict[str, Any]:
    """The machine, the versions, the threads and the kernel behind a measurement."""
    packages = ("blockadapt", "torch", "numpy", "numba", "scikit-learn", "pytorch_optimizer")
    return {
        "machine": {"system": platform.platform(), "processor": _processor(), "cores": os.cpu_count()},
        "versions": {"python": platform.python_version(), **{name: version(name) for name in packages}},
        "threads": torch.get_num_threads(),
        "kernel": get_kernel("environment", "auto").name,
    }


def state_bytes_of(optimizer: Optimizer) -> int:
    """Memory of all tensors that an optimizer keeps."""
    entries = (value for state in optimizer.state.values() for value in state.values())
    return sum(value.numel() * value.element_size() for value in entries if isinstance(value, Tensor))


def _processor() -> str:
    """The processor's name as people know it, where the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
