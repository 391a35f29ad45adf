"""Stage 4 applies a spectral function of V to m, for all blocks at once."""

from blockadapt.kernels.contract import TERMS, Batch, Change, Coefficients, Descent, Kernel, Place, Segment, Tally
from blockadapt.kernels.dispatch import BACKENDS, Dispatcher, get_kernel

__all__ = [
    "BACKENDS",
    "TERMS",
    "Batch",
    "Change",
    "Coefficients",
    "Descent",
    "Dispatcher",
    "Kernel",
    "Place",
    "Segment",
    "Tally",
    "get_kernel",
]
