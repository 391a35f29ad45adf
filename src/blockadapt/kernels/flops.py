"""Counts the arithmetic of a step for a block: plans tell it, and ranks are given shares by it."""

from __future__ import annotations

from blockadapt.kernels.layout import MAX_TILED


def block_flops(n: int) -> int:
    """Count the floating-point operations of a step for a block of n: an estimate.

    A block that is moved in tiles takes 4n³/3 + 9n² + 213n, which is what the CPU kernel does for float32 if the block
    is conditioned well: 4n³/3 + 5n² operations reduce V to tridiagonal form, 4n² are V itself and the reflections
    backwards, and the rest solves 16 tridiagonal systems. Otherwise some n² rotations of 37 operations come in their
    place. Blocks of up to 3 are solved by rotations or have closed forms. Larger blocks go through LAPACK, which forms
    eigenvectors, and takes about 16n³/3 + 6n².
    """
    if n <= 3:
        return (20, 79, 450)[n - 1]
    return round(4 * n**3 / 3 + 9 * n * n + 213 * n if n <= MAX_TILED else 16 * n**3 / 3 + 6 * n * n)
