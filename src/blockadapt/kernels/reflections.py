"""Stores an orthogonal basis as reflections: n(n−1)/2 numbers instead of n².

    U = H₀ H₁ … Hₙ₋₂        H_k = I − τ w wᵀ        w = (0, …, 0, 1, v_k)        τ = 2 / (1 + v_kᵀ v_k)

w has its 1 in place k, so v_k has n − 1 − k numbers. They are kept v₀ first. Every orthogonal matrix is such a product
up to the signs of its columns, and eigenvectors have no sign. A product of reflections is orthogonal however v is
rounded. References: Golub and Van Loan, Matrix Computations, 5.1 and 5.2.
"""

from __future__ import annotations

import torch
from torch import Tensor

from blockadapt.validation import has_numbers


def reflections_length(n: int) -> int:
    """Count the numbers in the reflections of a basis of n."""
    return n * (n - 1) // 2


def eigenvalues_length(n: int) -> int:
    """Count the numbers of diag(Uᵀ V U) that are kept with a basis; none for blocks of 1, where it is V."""
    return n if n > 1 else 0


def reflections_of(basis: Tensor) -> Tensor:
    """Compute v [num_blocks, n(n−1)/2] from U [num_blocks, n, n]. Signs of U's columns are lost."""
    n = basis.shape[-1]
    factors = torch.geqrf(basis)[0] if has_numbers(basis) else basis  # torch cannot do it without numbers
    rows, columns = _below(n, basis.device)
    return factors[:, rows, columns]


def turned(reflections: Tensor, vectors: Tensor, back: bool = False) -> Tensor:
    """Compute Uᵀ times vectors [num_blocks, n, …], or U times them on the way `back`."""
    n = vectors.shape[1]
    rows, columns = _below(n, vectors.device)
    factors = vectors.new_zeros(vectors.shape[0], n, n - 1)
    factors[:, rows, columns] = reflections
    tau = 2 / (1 + factors.square().sum(1))
    return torch.ormqr(factors, tau, vectors, transpose=not back)


def basis_of(reflections: Tensor, n: int) -> Tensor:
    """Compute U [num_blocks, n, n] from its reflections."""
    unit = torch.eye(n, dtype=reflections.dtype, device=reflections.device).expand(reflections.shape[0], n, n)
    return turned(reflections, unit.clone(), back=True) if n > 1 and unit.numel() else unit


def _below(n: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """List rows and columns below the diagonal, column by column."""
    columns, rows = torch.triu_indices(n, n, offset=1, device=device)
    return rows, columns
