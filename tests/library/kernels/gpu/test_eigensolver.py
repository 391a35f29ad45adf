"""Each stage of the GPU's eigensolver by itself, against the textbook reference: interpreted, or on a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from blockadapt.kernels.cpu import eigensolver_reference as reference
from support.stages import (
    Array,
    from_rows,
    matrices,
    packed_rows,
    reflections,
    to_rows,
    tolerance,
    tridiagonal_matrix,
    vectors,
)

triton = pytest.importorskip("triton", reason="Triton is not installed")
tl = pytest.importorskip("triton.language")
solver = pytest.importorskip("blockadapt.kernels.gpu.eigensolver")
jacobi = pytest.importorskip("blockadapt.kernels.gpu.jacobi")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KINDS = ["typical", "graded", "gradedup", "rank3", "cond1e8", "zero"]
L = 32
N = 5
"""Rows of which some are coupled and some are not, at a price that the interpreter can pay."""
PADDED = 8
"""The power of two in which `redo` has a matrix of N rows."""

each_real = pytest.mark.parametrize("real", [np.float32, np.float64], ids=["float32", "float64"])
REALS = {np.float32: tl.float32, np.float64: tl.float64}


@triton.jit
def reduce(n, a, u, q, h, d, e, y, LANES: tl.constexpr, REAL: tl.constexpr):
    lane = tl.arange(0, LANES)
    solver.tridiagonalise_(n, a + lane, u + lane, q + lane, h + lane, d + lane, e + lane, y + lane, LANES, REAL)


@triton.jit
def reflect(n, a, h, y, LANES: tl.constexpr):
    lane = tl.arange(0, LANES)
    solver.apply_reflections_(n, a + lane, h + lane, y + lane, LANES)


@triton.jit
def sweep(n, d, e, y, log, found, most, LANES: tl.constexpr, REAL: tl.constexpr):
    lane = tl.arange(0, LANES)
    sweeps, converged = solver.diagonalise_(n, d + lane, e + lane, y + lane, log + lane, most, LANES, REAL)
    tl.store(found + lane, converged.to(tl.int32) * sweeps)


@triton.jit
def rotate_back(n, y, log, sweeps, LANES: tl.constexpr):
    lane = tl.arange(0, LANES)
    solver.apply_rotations_(n, y + lane, log + lane, sweeps, LANES)


@triton.jit
def shift(off, above, here, found, LANES: tl.constexpr):
    lane = tl.arange(0, LANES)
    tl.store(found + lane, solver.wilkinson_shift(tl.load(off + lane), tl.load(above + lane), tl.load(here + lane)))


@triton.jit
def rotation(g, bulge, found, LANES: tl.constexpr, REAL: tl.constexpr):
    lane = tl.arange(0, LANES)
    c, s, r = solver.rotation(tl.load(g + lane), tl.load(bulge + lane), REAL)
    tl.store(found + lane, c)
    tl.store(found + LANES + lane, s)
    tl.store(found + 2 * LANES + lane, r)


@triton.jit
def turn_round(n, d, e, found, LANES: tl.constexpr, REAL: tl.constexpr):
    lane = tl.arange(0, LANES)
    mask = solver.small_end_first(n, d + lane, e + lane, LANES, REAL)
    solver.reverse_(n, d + lane, mask, LANES)
    tl.store(found + lane, mask.to(tl.int32))


@triton.jit
def rotate_pair(a, d, y, log, LANES: tl.constexpr, REAL: tl.constexpr):
    lane = tl.arange(0, LANES)
    solver.diagonalise_2x2_(a + lane, d + lane, y + lane, log + lane, LANES, REAL)


@triton.jit
def decompose(A, U, n, SIZE: tl.constexpr):
    index = tl.arange(0, SIZE)
    i, j = index[:, None], index[None, :]
    at = i * SIZE + j
    diagonal, basis = jacobi.jacobi(tl.load(A + at), index, i, j, n, SIZE)
    tl.store(A + at, diagonal)
    tl.store(U + at, basis)


def launch(kernel: Any, *arguments: Any, **options: Any) -> None:
    """Run a stage on arrays, in place."""
    there = [torch.from_numpy(each).to(DEVICE) if isinstance(each, np.ndarray) else each for each in arguments]
    kernel[(1,)](*there, num_warps=1, **options)
    for array, tensor in zip(arguments, there, strict=True):
        if isinstance(array, np.ndarray):
            array[...] = tensor.cpu().numpy()


def rows(count: int, real: Any) -> Array:
    return np.full(count * L, np.nan, real)


def tridiagonalised(V: Array, m: Array, real: Any) -> dict[str, Array]:
    """All that stage 1 leaves."""
    left = {"a": packed_rows(V, real), **{name: rows(N, real) for name in "uqhde"}, "y": to_rows(m, real)}
    launch(reduce, N, *left.values(), LANES=L, REAL=REALS[real])
    return left


def diagonalised(T: Array, y: Array, real: Any) -> dict[str, Any]:
    """All that stage 2 leaves; there is a row before e's first."""
    most = 2 * N + 6
    d, e = to_rows(T.diagonal(axis1=1, axis2=2), real), rows(N, real)
    e[L:] = to_rows(T.diagonal(1, axis1=1, axis2=2), real)
    left = {
        "d": d,
        "e": e,
        "y": to_rows(y, real),
        "log": rows(most * (2 * N - 1), real),
        "found": np.zeros(L, np.int32),
    }
    there = {name: torch.from_numpy(array).to(DEVICE) for name, array in left.items()}
    sweep[(1,)](
        N, there["d"], there["e"][L:], there["y"], there["log"], there["found"], most,
        LANES=L, REAL=REALS[real], num_warps=1,
    )  # fmt: skip
    return {name: tensor.cpu().numpy() for name, tensor in there.items()}


def mixed(real: Any) -> Array:
    """[L, N, N] of all kinds, one lane after another."""
    kinds = [matrices(kind, N, L) for kind in KINDS]
    return np.stack([kinds[lane % len(KINDS)][lane] for lane in range(L)])


# ----------------------------------------------------------------------------------------------- stage 1: T = Hᵀ V H


@each_real
def test_tridiagonal_form_is_hvh_and_the_references(real: Any) -> None:
    V, m, close = mixed(real), vectors(N, L), tolerance(real, N)
    left = tridiagonalised(V, m, real)
    T = tridiagonal_matrix(from_rows(left["d"], N), from_rows(left["e"], N)[:, : N - 1])
    H = reflections(left["a"], left["h"], N)
    np.testing.assert_allclose(H.transpose(0, 2, 1) @ H, np.broadcast_to(np.eye(N), H.shape), atol=close)
    np.testing.assert_allclose(H.transpose(0, 2, 1) @ V @ H, T, atol=close)
    np.testing.assert_allclose(from_rows(left["y"], N), (H.transpose(0, 2, 1) @ m[:, :, None])[:, :, 0], atol=close)
    decided = [lane for lane in range(L) if KINDS[lane % len(KINDS)] in ("typical", "graded")]  # not by rounding
    np.testing.assert_allclose(T[decided], [reference.tridiagonalise(V[lane])[0] for lane in decided], atol=close)

    z = vectors(N + 1, L)[:, :N]
    y = to_rows(z, real)
    launch(reflect, N, left["a"], left["h"], y, LANES=L)
    np.testing.assert_allclose(from_rows(y, N), (H @ z[:, :, None])[:, :, 0], atol=close)


# ----------------------------------------------------------------------------------------------- stage 2: Λ = Rᵀ T R


@each_real
def test_rotations_are_orthogonal_and_keep_the_spectrum(real: Any) -> None:
    T = np.stack([reference.tridiagonalise(block)[0] for block in mixed(real)])
    T = tridiagonal_matrix(*(T.diagonal(k, axis1=1, axis2=2).astype(np.float32) for k in (0, 1)))
    z, close = vectors(N, L), tolerance(real, N)
    left = diagonalised(T, z, real)
    assert left["found"].all()  # converged
    assert not from_rows(left["e"][L:], N - 1).any()
    eigenvalues = from_rows(left["d"], N)
    np.testing.assert_allclose(
        np.sort(eigenvalues), [np.sort(reference.diagonalise(block)[0]) for block in T], atol=close
    )
    R, sweeps = np.empty((L, N, N)), int(left["found"][0])
    for j in range(N):  # a column of R is what the way back makes of a unit vector
        y = to_rows(np.broadcast_to(np.eye(N)[j], (L, N)), real)
        launch(rotate_back, N, y, left["log"], sweeps, LANES=L)
        R[:, :, j] = from_rows(y, N)
    np.testing.assert_allclose(R.transpose(0, 2, 1) @ R, np.broadcast_to(np.eye(N), R.shape), atol=close)
    np.testing.assert_allclose(R @ (eigenvalues[:, :, None] * R.transpose(0, 2, 1)), T, atol=close)
    np.testing.assert_allclose(from_rows(left["y"], N), (R.transpose(0, 2, 1) @ z[:, :, None])[:, :, 0], atol=close)


def test_the_shift_is_the_references() -> None:
    off, above, here = np.random.default_rng(0).standard_normal((3, L))
    off[:4] = 0
    shifts = np.empty(L)
    launch(shift, off, above, here, shifts, LANES=L)
    np.testing.assert_array_equal(shifts[:4], here[:4])
    for found, a, b, c in zip(shifts[4:], above[4:], off[4:], here[4:], strict=True):
        np.testing.assert_allclose(found, reference.wilkinson_shift(a, b, c), rtol=1e-14, atol=1e-15)


@each_real
def test_a_rotation_takes_the_bulge_away_and_is_exactly_none_where_there_is_no_bulge(real: Any) -> None:
    g, bulge = np.random.default_rng(1).standard_normal((2, L)).astype(real)
    bulge[:4], g[4] = 0, 0
    found = rows(3, real)
    launch(rotation, g, bulge, found, LANES=L, REAL=REALS[real])
    c, s, r = from_rows(found, 3).T
    np.testing.assert_allclose(c * c + s * s, 1, atol=4 * np.finfo(real).eps)
    np.testing.assert_allclose(c * r, g, atol=8 * np.finfo(real).eps)
    np.testing.assert_allclose(s * r, bulge, atol=8 * np.finfo(real).eps)
    np.testing.assert_array_equal([c[:4], s[:4], r[:4]], [[1] * 4, [0] * 4, g[:4]])


@each_real
def test_t_is_reversed_where_its_small_end_is_on_top_and_only_there(real: Any) -> None:
    grades = np.logspace(0, -3, N)
    d = np.where((np.arange(L) % 2 == 0)[:, None], grades, grades[::-1])  # every other lane has its large end on top
    d[0] = [1e-9, 1, 1, 1, 1e-7]  # an end of 1e-7 is noise, whatever the other is
    turned, e, found = to_rows(d, real), np.full(N * L, 1e-3, real), np.zeros(L, np.int32)
    launch(turn_round, N, turned, e, found, LANES=L, REAL=REALS[real])
    np.testing.assert_array_equal(found, np.arange(L) % 2)
    np.testing.assert_allclose(from_rows(turned, N), [d[0], *[grades] * (L - 1)], rtol=1e-6)


# ------------------------------------------------------------------------------------------------------ other solvers


@each_real
def test_blocks_of_two_are_solved_by_one_rotation(real: Any) -> None:
    V, z = np.concatenate([matrices("typical", 2, L)[: L // 2], matrices("rank1", 2, L)[L // 2 :]]), vectors(2, L)
    V[0] = np.eye(2)
    d, y, log = rows(2, real), to_rows(z, real), rows(3, real)
    launch(rotate_pair, packed_rows(V, real), d, y, log, LANES=L, REAL=REALS[real])
    hi, c, s = from_rows(log, 3).T
    R, close = np.stack([np.stack([c, -s], -1), np.stack([s, c], -1)], 1), tolerance(real, 2)
    assert (hi == 1).all()
    np.testing.assert_allclose(c * c + s * s, 1, atol=close)
    np.testing.assert_allclose(R @ (from_rows(d, 2)[:, :, None] * R.transpose(0, 2, 1)), V, atol=close)
    np.testing.assert_allclose(from_rows(y, 2), (R.transpose(0, 2, 1) @ z[:, :, None])[:, :, 0], atol=close)


@pytest.mark.parametrize("kind", ["typical", "rank3", "cond1e8"])
def test_jacobi_decomposes_v(kind: str) -> None:
    V = np.zeros((PADDED, PADDED))
    V[:N, :N] = matrices(kind, N, 1)[0]
    A, U = V.copy(), np.empty_like(V)
    launch(decompose, A, U, N, SIZE=PADDED)
    close = tolerance(np.float64, N)
    np.testing.assert_allclose(U.T @ U, np.eye(PADDED), atol=close)
    np.testing.assert_allclose(U @ np.diag(A.diagonal()) @ U.T, V, atol=close)
    np.testing.assert_allclose(A, np.diag(A.diagonal()), atol=close)
