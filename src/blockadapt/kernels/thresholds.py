"""Every threshold of the eigensolvers in lanes, with its reason; the CPU kernel and the GPU kernel read them here.

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
| `lopsided` | 4 | 4 | T is reversed where its bottom is so many times its top: below that the order does not show in the errors |
"""  # noqa: E501

from __future__ import annotations

from typing import NamedTuple


class Thresholds(NamedTuple):
    """See the table above."""

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
