"""Holds every threshold of the eigensolvers in lanes, with its reason; both compiled kernels read them here.

A block is scaled by a power of two so that the largest entry on its diagonal, and so of all, lies in [1, 2). Thresholds
on entries, couplings and bulges are absolute on that scale.

| | float32 | float64 | why there |
|---|---|---|---|
| `roundoff` | 1.2e-7 | 2.2e-16 | ε, the distance from 1 to the next number: a coupling below ε (d + d') of its neighbours on the diagonal changes no digit of theirs (EISPACK's test) |
| `least_normal` | 1.2e-38 | 2.2e-308 | a block of zeros is scaled by this: its inverse is still finite |
| `entry` | 1e-18 | 1e-150 | a smaller entry is zero: its square would be denormal, and arithmetic on denormal numbers is a hundred times slower. √entry = 1e-9 is far below √ε, which is all that V tells of a direction |
| `column` | 1e-28 | 1e-60 | a column whose squares below the subdiagonal sum to no more is tridiagonal already: 1/h, at most their inverse, has to fit into the block's own type beside numbers of up to 1e10 |
| `coupling` | 4.8e-10 | 8.9e-19 | 4e-3 ε: a coupling below it is zero whatever its neighbours are. Eigenvalues below this are not told apart, so a null space, which is noise, costs no sweeps |
| `bulge` | 1e-36 | 1e-300 | the square of a bulge that is gone: still normal, so that any larger one gives a rotation of full precision |
| `end` | 1e-6 | 1e-6 | an end of T below this is noise beside the largest entry, and says nothing of where the small eigenvalues lie |
| `lopsided` | 4 | 4 | T is reversed where its bottom is more than this many times its top: below that the order does not show in the errors |

What only one kernel needs has its name. Jacobi's method is in float64 in both.

| | | why there |
|---|---|---|
| `CPU_SWEEPS` | 6 | QR sweeps allowed for each eigenvalue; two are used. A block that needs more is solved by Jacobi's method |
| `CPU_JACOBI_SWEEPS` | 60 | more than Jacobi's method ever takes: it converges quadratically, blocks of 64 in ten sweeps |
| `CPU_JACOBI_COUPLING` | 1e-17 | Jacobi's method leaves couplings below this where the largest entry is 1: they move an eigenvalue by their square |
| `FRACTIONS_LEAST` | 2⁻¹⁵ | partial fractions are for blocks whose eigenvalues are above it, where the trace is in [1, 2): rounding moves an eigenvalue by some 1e-6, which is a hundredth of the least |
| `FRACTIONS_SMALLEST` | 8e-6 | the fractions are made for δ² and eigenvalues from here on: a quarter of the least eigenvalue, so that T − δ² is definite for a smaller δ² |
| `FRACTIONS_MOST` | 4 | up to here: twice as much as eigenvalues reach, so that T − δ² is definite for a larger δ² |
| `FRACTIONS_FEWEST` | 4 | smaller blocks take fewer operations by QR |
| `PUT_OFF` | 12 | at most so many lanes of a tile of 32 are put off: as many cost a share of a whole tile later, and more cost less by QR at once |
| `FRACTIONS_RANGE` | 1e30 | blocks whose scale or δ² is above it, or scale below its inverse, go another way: quotients with it might not be normal |
| `GPU_SWEEPS`, `GPU_MORE_SWEEPS` | 2, 6 | the log of QR sweeps has room for 2n + 6: a third more than the most that was seen in any tile |
| `GPU_JACOBI_SWEEPS` | 40 | as on the CPU |
| `GPU_JACOBI_ROUNDOFF` | 1e-16 | below ε/2: a coupling of no more than this times √(d d') of its neighbours on the diagonal changes no digit of theirs |
| `GPU_JACOBI_COUPLING` | 1e-20 | a coupling below it is zero whatever its neighbours are, so that a null space is not rotated for ever |
| `GPU_APART` | 1e3 | more than any coupling of T, whose largest entry is below 2 and whose trace is below 128: what is tested against it counts as zero |
"""  # noqa: E501

from __future__ import annotations

from typing import NamedTuple


class Thresholds(NamedTuple):
    """Holds those of one type; see the first table above."""

    roundoff: float
    least_normal: float
    entry: float
    column: float
    coupling: float
    bulge: float
    end: float = 1e-6
    lopsided: float = 4.0


FLOAT32 = Thresholds(2.0**-23, 2.0**-126, 1e-18, 1e-28, 4e-3 * 2.0**-23, 1e-36)
FLOAT64 = Thresholds(2.0**-52, 2.0**-1022, 1e-150, 1e-60, 4e-3 * 2.0**-52, 1e-300)

CPU_SWEEPS = 6
CPU_JACOBI_SWEEPS = 60
CPU_JACOBI_COUPLING = 1e-17

FRACTIONS_LEAST = 2.0**-15
FRACTIONS_SMALLEST, FRACTIONS_MOST = 8e-6, 4.0
FRACTIONS_FEWEST = 4
FRACTIONS_RANGE = 1e30
PUT_OFF = 12

GPU_SWEEPS, GPU_MORE_SWEEPS = 2, 6
GPU_JACOBI_SWEEPS = 40
GPU_JACOBI_ROUNDOFF = 1e-16
GPU_JACOBI_COUPLING = 1e-20
GPU_APART = 1e3
