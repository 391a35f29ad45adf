"""Refreshes a basis and moves nothing: so a kernel that keeps one finds it for whoever only wants to look."""

from __future__ import annotations

from torch import Tensor

from blockadapt.kernels.contract import Coefficients, Descent, Kernel, Place, Segment
from blockadapt.kernels.layout import by_block
from blockadapt.kernels.reflections import basis_of, reflections_length
from blockadapt.moments import FirstMoment, SecondMoment
from blockadapt.spectrum import Spectrum

_STILL = Coefficients(
    descent=Descent(sign=1.0, coupled=0.0, shrink=1.0),
    first=FirstMoment(beta=0.0, correction=1.0),
    second=SecondMoment(decay=1.0, weight=0.0, correction=1.0),
    spectrum=Spectrum(lr=0.0, correction=1.0, damping=1.0),
)
"""They change no V and move nothing."""


def decomposed(kernel: Kernel, packed: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """See `Kernel.decompose`: Λ and U are as this kernel's refresh of a kept basis finds them."""
    if n == 1 or not len(packed):
        return packed[:, :n].clone(), packed.new_ones(len(packed), n, n)
    num_blocks, still = packed.shape[0], packed.new_zeros(packed.shape[0], 1, n)
    basis = packed.new_empty(num_blocks * reflections_length(n))
    eigenvalues = packed.new_empty(num_blocks * n)
    place = Place(n, still.clone(), None, packed.clone().unsqueeze(1), None, basis, eigenvalues)
    kernel.prepare(place.batch, [Segment(place, still, True, _STILL)]).write_()
    return by_block(eigenvalues, n, num_blocks), basis_of(by_block(basis, n, num_blocks), n)
