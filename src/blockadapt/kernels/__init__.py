"""Stage 4: apply a spectral function of V to m, for all blocks at once."""

from __future__ import annotations

from blockadapt._validation import require_choice
from blockadapt.kernels.protocol import Batch, Batches, Descent, Kernel, Segment
from blockadapt.kernels.torch_eigh import EighKernel

__all__ = ["BACKENDS", "Batch", "Batches", "Descent", "Kernel", "Segment", "get_kernel"]

BACKENDS = ("auto", "eigh")


def get_kernel(owner: str, backend: str) -> Kernel:
    """The kernel behind a backend name."""
    require_choice(owner, "backend", backend, BACKENDS)
    return EighKernel()
