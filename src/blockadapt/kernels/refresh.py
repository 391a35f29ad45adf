"""A refresh that moves nothing: how a kernel that keeps a basis finds one for whoever only wants to look."""

from __future__ import annotations

from torch import Tensor

from blockadapt.kernels.contract import Coefficients, Descent, Kernel, Place, Segment
from blockadapt.kernels.layout import by_block, tiled_shape
from blockadapt.moments import FirstMoment, SecondMoment
from blockadapt.spectrum import Spectrum

_STILL = Coefficients(
    descent=Descent(sign=1.0, coupled=0.0, shrink=1.0),
    first=FirstMoment(beta=0.0, correction=1.0),
    second=SecondMoment(decay=1.0, weight=0.0, correction=1.0),
    spectrum=Spectrum(lr=0.0, correction=1.0, damping=1.0),
)
"""Changes no V and moves nothing."""


def decomposed(kernel: Kernel, packed: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """See `Kernel.decompose`: Λ and U as this kernel's refresh of a kept basis finds them."""
    num_blocks, still = packed.shape[0], packed.new_zeros(packed.shape[0], 1, n)
    basis = packed.new_empty(tiled_shape(n, num_blocks, n * n))
    eigenvalues = packed.new_empty(tiled_shape(n, num_blocks, n))
    place = Place(n, still.clone(), None, packed.clone().unsqueeze(1), None, basis, eigenvalues)
    if num_blocks:
        kernel.prepare(place.batch, [Segment(place, still, True, _STILL)]).write_()
    return by_block(eigenvalues, num_blocks), by_block(basis, num_blocks).view(num_blocks, n, n)
