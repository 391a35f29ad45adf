"""Stage 4: apply a spectral function of V to m, for all blocks at once."""

from __future__ import annotations

from blockadapt.kernels.contract import Batch, Batches, Coefficients, Descent, Kernel, Place, Segment
from blockadapt.kernels.eigh import EighKernel
from blockadapt.validation import require_choice

__all__ = ["BACKENDS", "Batch", "Batches", "Coefficients", "Descent", "Kernel", "Place", "Segment", "get_kernel"]

BACKENDS = ("auto", "eigh", "numba")


def get_kernel(owner: str, backend: str) -> Kernel:
    """The kernel behind a backend name; `"auto"` is Numba's where Numba can be imported, else `eigh`.

    Raises:
        ImportError: The backend is `"numba"` and Numba cannot be imported.
    """
    require_choice(owner, "backend", backend, BACKENDS)
    if backend == "eigh":
        return EighKernel()
    try:
        from blockadapt.kernels.cpu.kernel import NumbaKernel  # slow to import, and may be missing
    except ImportError as error:
        if backend == "auto":
            return EighKernel()
        raise ImportError(f"{owner}: `backend` 'numba' needs the package numba, which cannot be imported.") from error
    return NumbaKernel()
