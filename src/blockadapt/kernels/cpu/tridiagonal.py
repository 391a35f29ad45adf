"""Makes blocks tridiagonal by Householder reflections, one in each SIMD lane: T = Hᵀ A H, and H back onto vectors.

A reflection costs two passes over what is left of the packed triangle, q = A u and A ← A − q uᵀ − u qᵀ. Both take four
columns at once: their u and q stay in registers, and an entry is loaded once for its row and its column. The block's
own type is used throughout, as LAPACK does: in float64 the step of float32 blocks of 10 would take a quarter longer.

Letters as in `eigensolver`. Reference: Golub and Van Loan, Matrix Computations, 8.3.1.
"""

from __future__ import annotations

from typing import Any

from blockadapt.kernels.cpu.jit import inlined, jit
from blockadapt.kernels.cpu.simd import broadcast, fma, load, select, sqrt, store
from blockadapt.kernels.cpu.thresholds import thresholds


@jit
def tridiagonalise_(n: int, a: Any, h: Any, d: Any, e: Any, y: Any, u: Any, q: Any, L: int) -> None:
    """Find T = Hᵀ A H and set y ← Hᵀ y. The reflections I − u uᵀ/h stay in a's columns, 1/h in `h`."""
    for k in range(n - 2):
        inverse = reflection_(n, k, a, h, e, u, L)
        multiply_(n, k + 1, a, u, q, L)
        project_(n, k + 1, y, u, q, inverse, L)
        update_(n, k + 1, a, u, q, L)
    for i in range(n):
        store(d, i * L, load(a, (i * (i + 1) // 2 + i) * L))
    if n > 1:
        store(e, (n - 2) * L, load(a, ((n - 1) * n // 2 + n - 2) * L))


@inlined
def reflection_(n: int, k: int, a: Any, h: Any, e: Any, u: Any, L: int) -> Any:
    """Find u and 1/h of the reflection that takes column k of A below its diagonal to (β, 0, …, 0); returns 1/h."""
    f = a.dtype.type
    zero, one = broadcast(f(0)), broadcast(f(1))
    head = ((k + 1) * (k + 2) // 2 + k) * L
    alpha = load(a, head)
    below = zero
    for i in range(k + 2, n):
        entry = load(a, (i * (i + 1) // 2 + k) * L)
        below = fma(entry, entry, below)
    norm = sqrt(fma(alpha, alpha, below))
    tridiagonal = below <= broadcast(f(thresholds(a).column))
    beta = select(tridiagonal, alpha, select(alpha < zero, norm, -norm))
    first = alpha - beta
    inverse = select(tridiagonal, zero, one / select(tridiagonal, one, -(beta * first)))
    store(u, (k + 1) * L, first)
    store(a, head, first)
    for i in range(k + 2, n):
        entry = load(a, (i * (i + 1) // 2 + k) * L)
        store(u, i * L, select(tridiagonal, zero, entry))  # a tiny entry would breed denormal numbers
    store(h, k * L, inverse)
    store(e, k * L, beta)
    return inverse


@inlined
def multiply_(n: int, first: int, a: Any, u: Any, q: Any, L: int) -> None:
    """Compute q = A u for rows and columns from `first` on."""
    zero = broadcast(a.dtype.type(0))
    for i in range(first, n):
        store(q, i * L, zero)
    j = first
    while j + 4 <= n:
        row0, row1, row2, row3 = four_rows(j, L)
        us, (q0, q1, q2, q3) = load_four(u, j * L, L), load_four(q, j * L, L)
        a00, a10, a11 = load(a, row0), load(a, row1), load(a, row1 + L)
        a20, a21, a22 = load(a, row2), load(a, row2 + L), load(a, row2 + 2 * L)
        a30, a31, a32, a33 = load_four(a, row3, L)
        q0 = dot((a00, a10, a20, a30), us, q0)
        q1 = dot((a10, a11, a21, a31), us, q1)
        q2 = dot((a20, a21, a22, a32), us, q2)
        q3 = dot((a30, a31, a32, a33), us, q3)
        row = row3 + (j + 4) * L
        for i in range(j + 4, n):
            entries, u_i = load_four(a, row, L), load(u, i * L)
            store(q, i * L, dot(entries, us, load(q, i * L)))
            q0, q1 = fma(entries[0], u_i, q0), fma(entries[1], u_i, q1)
            q2, q3 = fma(entries[2], u_i, q2), fma(entries[3], u_i, q3)
            row += (i + 1) * L
        store(q, j * L, q0)
        store(q, (j + 1) * L, q1)
        store(q, (j + 2) * L, q2)
        store(q, (j + 3) * L, q3)
        j += 4
    while j < n:  # up to three columns that are left
        row = (j * (j + 1) // 2 + j) * L
        u_j = load(u, j * L)
        q_j = fma(load(a, row), u_j, load(q, j * L))
        for i in range(j + 1, n):
            row += i * L
            entry = load(a, row)
            store(q, i * L, fma(entry, u_j, load(q, i * L)))
            q_j = fma(entry, load(u, i * L), q_j)
        store(q, j * L, q_j)
        j += 1


@inlined
def project_(n: int, first: int, y: Any, u: Any, q: Any, inverse: Any, L: int) -> None:
    """Set q ← q / h − (uᵀ q / 2h²) u and y ← y − (uᵀ y / h) u, from row `first` on."""
    f = u.dtype.type
    zero, half = broadcast(f(0)), broadcast(f(0.5))
    inner, projection = zero, zero
    for i in range(first, n):
        u_i = load(u, i * L)
        inner = fma(load(q, i * L) * inverse, u_i, inner)
        projection = fma(u_i, load(y, i * L), projection)
    inner = -(inner * inverse * half)
    projection = -(projection * inverse)
    for i in range(first, n):
        u_i = load(u, i * L)
        store(q, i * L, fma(inner, u_i, load(q, i * L) * inverse))
        store(y, i * L, fma(projection, u_i, load(y, i * L)))


@inlined
def update_(n: int, first: int, a: Any, u: Any, q: Any, L: int) -> None:
    """Set A ← A − q uᵀ − u qᵀ for rows and columns from `first` on."""
    j = first
    while j + 4 <= n:
        row0, row1, row2, row3 = four_rows(j, L)
        us, qs = load_four(u, j * L, L), load_four(q, j * L, L)
        (u0, u1, u2, u3), (q0, q1, q2, q3) = us, qs
        update_entry_(a, row0, u0, q0, u0, q0)
        update_entry_(a, row1, u1, q1, u0, q0)
        update_entry_(a, row1 + L, u1, q1, u1, q1)
        update_entry_(a, row2, u2, q2, u0, q0)
        update_entry_(a, row2 + L, u2, q2, u1, q1)
        update_entry_(a, row2 + 2 * L, u2, q2, u2, q2)
        update_four_(a, row3, u3, q3, us, qs, L)
        row = row3 + (j + 4) * L
        for i in range(j + 4, n):
            update_four_(a, row, load(u, i * L), load(q, i * L), us, qs, L)
            row += (i + 1) * L
        j += 4
    while j < n:  # up to three columns that are left
        row = (j * (j + 1) // 2 + j) * L
        u_j, q_j = load(u, j * L), load(q, j * L)
        for i in range(j, n):
            update_entry_(a, row, load(u, i * L), load(q, i * L), u_j, q_j)
            row += (i + 1) * L
        j += 1


@inlined
def update_four_(a: Any, row: int, u_i: Any, q_i: Any, us: Any, qs: Any, L: int) -> None:
    """Do what `update_entry_` does for four entries side by side."""
    update_entry_(a, row, u_i, q_i, us[0], qs[0])
    update_entry_(a, row + L, u_i, q_i, us[1], qs[1])
    update_entry_(a, row + 2 * L, u_i, q_i, us[2], qs[2])
    update_entry_(a, row + 3 * L, u_i, q_i, us[3], qs[3])


@inlined
def update_entry_(a: Any, at: int, u_i: Any, q_i: Any, u_j: Any, q_j: Any) -> None:
    """Set a ← a − qᵢ uⱼ − uᵢ qⱼ."""
    store(a, at, fma(-u_i, q_j, fma(-q_i, u_j, load(a, at))))


@inlined
def four_rows(j: int, L: int) -> Any:
    """Say where rows j … j + 3 of the triangle begin, at column j."""
    row0 = (j * (j + 1) // 2 + j) * L
    row1 = row0 + (j + 1) * L
    row2 = row1 + (j + 2) * L
    return row0, row1, row2, row2 + (j + 3) * L


@inlined
def load_four(rows: Any, at: int, L: int) -> Any:
    """Load four rows of lanes that lie one after another."""
    return load(rows, at), load(rows, at + L), load(rows, at + 2 * L), load(rows, at + 3 * L)


@inlined
def dot(entries: Any, us: Any, total: Any) -> Any:
    """Compute total + Σ aⱼ uⱼ over four columns."""
    total = fma(entries[1], us[1], fma(entries[0], us[0], total))
    return fma(entries[3], us[3], fma(entries[2], us[2], total))


# Back -------------------------------------------------------------------------------------------------------------


@jit
def apply_reflections_(n: int, a: Any, h: Any, y: Any, L: int) -> None:
    """Set y ← H y."""
    zero = broadcast(a.dtype.type(0))
    for k in range(n - 3, -1, -1):
        projection = zero
        for i in range(k + 1, n):
            projection = fma(load(a, (i * (i + 1) // 2 + k) * L), load(y, i * L), projection)
        projection = -(projection * load(h, k * L))
        for i in range(k + 1, n):
            store(y, i * L, fma(projection, load(a, (i * (i + 1) // 2 + k) * L), load(y, i * L)))


@jit
def four_columns(first: int, n: int, L: int) -> Any:
    """Say where columns first … first + 3 of a row of n begin; past the last one, that one again."""
    last = n - 1
    return min(first, last) * L, min(first + 1, last) * L, min(first + 2, last) * L, min(first + 3, last) * L


@jit
def reflect_basis_(n: int, a: Any, h: Any, u: Any, L: int) -> None:
    """Set U ← H U, n rows of n columns, four columns at once."""
    zero = broadcast(a.dtype.type(0))
    for k in range(n - 3, -1, -1):
        inverse = -load(h, k * L)
        for first in range(0, n, 4):
            j0, j1, j2, j3 = four_columns(first, n, L)
            p0, p1, p2, p3 = zero, zero, zero, zero
            for i in range(k + 1, n):
                entry, row = load(a, (i * (i + 1) // 2 + k) * L), i * n * L
                p0, p1 = fma(entry, load(u, row + j0), p0), fma(entry, load(u, row + j1), p1)
                p2, p3 = fma(entry, load(u, row + j2), p2), fma(entry, load(u, row + j3), p3)
            p0, p1, p2, p3 = p0 * inverse, p1 * inverse, p2 * inverse, p3 * inverse
            for i in range(k + 1, n):
                entry, row = load(a, (i * (i + 1) // 2 + k) * L), i * n * L
                u0, u1, u2, u3 = load(u, row + j0), load(u, row + j1), load(u, row + j2), load(u, row + j3)
                store(u, row + j0, fma(p0, entry, u0))
                store(u, row + j1, fma(p1, entry, u1))
                store(u, row + j2, fma(p2, entry, u2))
                store(u, row + j3, fma(p3, entry, u3))
