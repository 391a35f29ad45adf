"""Counts the arithmetic of a step for a block: plans tell it, and ranks are given shares by it."""

from __future__ import annotations

from blockadapt.kernels.layout import MAX_TILED


def block_flops(n: int) -> int:
    """Count the floating-point operations of a step for a block of n: an estimate.

    A block that is moved in tiles takes 4n³/3 + 46n², which is what the CPU kernel does for float32, to a sixth. No
    eigenvectors are formed: 4n³/3 + 5n² operations reduce V to tridiagonal form, some n² rotations of 37 operations
    diagonalise that and carry m there and back, and 4n² are V itself and the reflections backwards. Blocks of 1 and 2
    have closed forms. Larger blocks go through LAPACK, which does form eigenvectors, and takes about 16n³/3 + 6n².
    """
    if n <= 2:
        return 20 if n == 1 else 79
    return round(4 * n**3 / 3 + 46 * n * n if n <= MAX_TILED else 16 * n**3 / 3 + 6 * n * n)
