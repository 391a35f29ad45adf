"""Solves one block a program by Jacobi's method, if QR sweeps did not: in float64, and it always converges."""

from __future__ import annotations

import triton
import triton.language as tl

from blockadapt.kernels.thresholds import GPU_JACOBI_COUPLING, GPU_JACOBI_ROUNDOFF, GPU_JACOBI_SWEEPS

ROUNDOFF, COUPLING = tl.constexpr(GPU_JACOBI_ROUNDOFF), tl.constexpr(GPU_JACOBI_COUPLING)
SWEEPS = tl.constexpr(GPU_JACOBI_SWEEPS)


@triton.jit
def partner_of(index, round, EVEN):
    """Say which row each row is rotated with in a round, as in a tournament; itself past the last."""
    partner = (2 * round - index + 2 * (EVEN - 1)) % (EVEN - 1)
    partner = tl.where(index == EVEN - 1, round, tl.where(index == round, EVEN - 1, partner))
    return tl.where(index < EVEN, partner, index)


@triton.jit
def rotate(A, U, index, i, j, partner, N: tl.constexpr):
    """Rotate each row's entry with its partner away: A ← Jᵀ A J, U ← U J. Returns also how many were not negligible."""
    first = index < partner
    d = tl.sum(tl.where(i == j, A, 0.0), 1)
    off = tl.sum(tl.where(j == partner[:, None], A, 0.0), 1)
    off = tl.where(first, off, tl.gather(off, partner, 0))  # one angle for both
    d_partner = tl.gather(d, partner, 0)
    done = (tl.abs(off) <= ROUNDOFF * tl.sqrt(tl.abs(d * d_partner)) + COUPLING) | (partner == index)
    rotated = tl.max(1 - done.to(tl.int32), 0)
    slope = tl.where(first, d_partner - d, d - d_partner) * 0.5 / tl.where(done, 1.0, off)
    root = tl.sqrt(slope * slope + 1)
    t = tl.where(done, 0.0, 1 / tl.where(slope < 0, slope - root, slope + root))
    c = 1 / tl.sqrt(t * t + 1)
    t = tl.where(first, -t, t)
    s = c * t
    across = tl.broadcast_to(partner[None, :], (N, N))
    A = c[:, None] * A + s[:, None] * tl.gather(A, tl.broadcast_to(partner[:, None], (N, N)), 0)
    A = c[None, :] * A + s[None, :] * tl.gather(A, across, 1)
    A = tl.where(i == j, (d + t * off)[:, None], A)
    A = tl.where((j == partner[:, None]) & (i != j), tl.where(done, off, 0.0)[:, None], A)
    U = c[None, :] * U + s[None, :] * tl.gather(U, across, 1)
    return A, U, rotated


@triton.jit
def jacobi(A, index, i, j, n, N: tl.constexpr):
    """Make Λ = Uᵀ A U by cyclic Jacobi; returns Λ, a diagonal matrix but for what is negligible, and U."""
    EVEN = n + n % 2
    U = tl.where(i == j, 1.0, 0.0).to(tl.float64)
    sweeps = 0
    rotated = 1
    while (rotated > 0) & (sweeps < SWEEPS):
        sweeps += 1
        rotated = 0
        for round in range(EVEN - 1):
            A, U, more = rotate(A, U, index, i, j, partner_of(index, round, EVEN), N)
            rotated += more
    return A, U
