"""The last resort moves blocks of a device that cannot solve them, such as Apple's, on the CPU, through a copy."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from torch import Tensor
from torch import device as Device

from blockadapt.kernels.contract import Batch, Change, Coefficients, Kernel, Segment
from blockadapt.kernels.cpu.kernel import NumbaKernel
from blockadapt.kernels.eigh import EighKernel
from blockadapt.spectrum import INVERSE_ROOT

_HELD = ("x", "m", "second_moment", "largest", "basis", "eigenvalues")


class HostKernel(Kernel):
    """Copies blocks to the CPU, has them moved there by the first kernel that takes them, and copies them back."""

    name = "host"
    measures = True

    def __init__(self) -> None:
        self._kernels = NumbaKernel(), EighKernel()

    def takes(self, batch: Batch) -> bool:
        """Say yes to any blocks: nobody else is left."""
        return True

    def prepare(self, batch: Batch, segments: Sequence[Segment]) -> HostChange:
        """See `Kernel.prepare`. The first time it warns, because a step takes longer than it might."""
        _warn_once(batch.device.type)
        here = batch._replace(device=Device("cpu"))
        copies = [_copied(segment) for segment in segments]
        kernel = next(kernel for kernel in self._kernels if kernel.takes(here))
        return HostChange(kernel.prepare(here, copies), segments, copies)

    def decompose(self, packed: Tensor, n: int) -> tuple[Tensor, Tensor]:
        """See `Kernel.decompose`."""
        batch = Batch(n, packed.dtype, Device("cpu"), INVERSE_ROOT)
        kernel = next(kernel for kernel in self._kernels if kernel.takes(batch))
        eigenvalues, basis = kernel.decompose(packed.cpu(), n)
        return eigenvalues.to(packed.device), basis.to(packed.device)


@dataclass(frozen=True)
class HostChange:
    """Holds a step on copies that is not yet written back."""

    change: Change
    segments: Sequence[Segment]
    copies: Sequence[Segment]

    def write_(self) -> None:
        """See `Change.write_`."""
        self.change.write_()
        for segment, copy in zip(self.segments, self.copies, strict=True):
            for name in _HELD:
                held, moved = getattr(segment.place, name), getattr(copy.place, name)
                if held is not None:
                    held.copy_(moved)


def _copied(segment: Segment) -> Segment:
    """Copy a segment to the CPU; of the gradient only what its blocks need."""
    place = segment.place
    held = {name: tensor.cpu().clone() for name in _HELD if (tensor := getattr(place, name)) is not None}
    held["x"], grad = held["x"].contiguous(), place.part(segment.grad).cpu().contiguous()
    coefficients = Coefficients.of(float(term) for term in segment.coefficients.terms)
    return segment._replace(place=replace(place, **held, offset=0), grad=grad, coefficients=coefficients)


@lru_cache(maxsize=16)
def _warn_once(kind: str) -> None:
    """Warn of such a device, the first time that it is asked."""
    warnings.warn(
        f"blockadapt: the device {kind!r} has no torch.linalg.eigh, so every step copies its blocks to the CPU and "
        f"back.",
        stacklevel=2,
    )
