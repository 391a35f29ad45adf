"""Decides which kernel moves which blocks: the first that takes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec

from torch import Tensor

from blockadapt.kernels.contract import Batch, Change, Kernel, Segment
from blockadapt.kernels.cpu.kernel import NumbaKernel
from blockadapt.kernels.eigh import EighKernel
from blockadapt.kernels.gpu.kernel import TritonKernel
from blockadapt.kernels.host import HostKernel
from blockadapt.spectrum import SpectralFunction
from blockadapt.validation import refusal, require

BACKENDS: Mapping[str, tuple[Callable[[], Kernel], ...]] = {
    "auto": (NumbaKernel, partial(TritonKernel, gpus_only=True), EighKernel, HostKernel),
    "eigh": (EighKernel, HostKernel),
    "numba": (NumbaKernel, EighKernel, HostKernel),
    "triton": (TritonKernel, EighKernel, HostKernel),
}
"""Each name stands for these kernels, in the order in which they are asked."""

_NEEDS = {"numba": "numba", "triton": "triton"}
"""A backend that is asked for by name cannot do without this package."""


class Dispatcher:
    """Hands every batch to the first of its kernels that takes it.

    Example:
        >>> [kernel.name for kernel in get_kernel("auto").kernels]
        ['numba', 'triton', 'eigh', 'host']

    Args:
        kernels: They, in the order in which they are asked.
        owner: Who asks, for messages.
    """

    def __init__(self, kernels: Sequence[Kernel], owner: str = "Dispatcher") -> None:
        self.kernels = tuple(kernels)
        self._owner = owner
        self._taken: dict[Batch, Kernel] = {}

    def kernel_for(self, batch: Batch) -> Kernel:
        """Ask for the first kernel that takes this batch, once; the last of all, `host`, takes any."""
        if batch not in self._taken:
            self._taken[batch] = next(kernel for kernel in self.kernels if kernel.takes(batch))
        return self._taken[batch]

    def prepare(self, batches: Mapping[Batch, Sequence[Segment]]) -> list[Change]:
        """Make every batch's change ready, or raise, with nothing changed yet.

        Raises:
            ValueError: A clip is to measure its `final_lr`, and the kernel of some blocks measures nothing.
        """
        chosen = [(self.kernel_for(batch), batch, segments) for batch, segments in batches.items()]
        for kernel, _, segments in chosen:
            if not kernel.measures and any(segment.tally is not None for segment in segments):
                rule = f"one with a number for `final_lr`, because the kernel {kernel.name!r} measures none"
                raise ValueError(refusal(self._owner, "clip", rule, "auto"))
        return [kernel.prepare(batch, segments) for kernel, batch, segments in chosen]

    def decompose(self, packed: Tensor, n: int, function: SpectralFunction) -> tuple[Tensor, Tensor]:
        """See `Kernel.decompose`; the kernel that would move such blocks under this function does it."""
        return self.kernel_for(Batch(n, packed.dtype, packed.device, function)).decompose(packed, n)


def get_kernel(backend: str | Kernel, owner: str = "get_kernel") -> Dispatcher:
    """Make the kernels behind a backend: a name of `BACKENDS`, or a kernel of the user's, which is asked before `eigh`.

    Raises:
        ValueError: There is no such backend.
        ImportError: The backend is asked for by name, and the package behind it is not installed.
    """
    if isinstance(backend, Kernel):
        return Dispatcher([backend, EighKernel(), HostKernel()], owner)
    rule = f"one of {', '.join(map(repr, BACKENDS))}, or a Kernel"
    require(isinstance(backend, str) and backend in BACKENDS, owner, "backend", rule, backend)
    package = _NEEDS.get(backend)
    if package is not None and find_spec(package) is None:
        raise ImportError(refusal(owner, "backend", f"one whose package {package} is installed", backend))
    return Dispatcher([make() for make in BACKENDS[backend]], owner)
