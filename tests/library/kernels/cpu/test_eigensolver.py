"""Each stage of the eigensolver by itself, uncompiled, against the textbook reference; and the reference itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from blockadapt.kernels.cpu import eigensolver as solver
from blockadapt.kernels.cpu import eigensolver_reference as reference
from blockadapt.kernels.cpu import jacobi, tridiagonal
from blockadapt.kernels.cpu.simd import LANES as L
from blockadapt.moments import unpack
from support.blocks import blocks_of
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
from support.uncompiled import uncompiled  # noqa: F401

KINDS = ["typical", "graded", "gradedup", "rank3", "cond1e8", "zero"]
each_real = pytest.mark.parametrize("real", [np.float32, np.float64], ids=["float32", "float64"])
each_kind = pytest.mark.parametrize("kind", KINDS)
each_size = pytest.mark.parametrize("n", [3, 4, 7, 11])


def tridiagonalised(V: Array, m: Array, real: Any) -> dict[str, Array]:
    """All that stage 1 leaves."""
    n = V.shape[1]
    a = packed_rows(V, real)
    rows = {name: np.full(n * L, np.nan, real) for name in "hdeuq"}
    y = to_rows(m, real)
    tridiagonal.tridiagonalise_(n, a, rows["h"], rows["d"], rows["e"], y, rows["u"], rows["q"], L)
    return {"a": a, "h": rows["h"], "d": rows["d"], "e": rows["e"], "y": y}


# ------------------------------------------------------------------------------------------------------- the reference


@pytest.mark.parametrize("n", [1, 2, 3, 10, 33])
@pytest.mark.parametrize("kind", ["typical", "rank1", "rank3", "zero", "cond1e12"])
def test_the_reference_decomposes_v(kind: str, n: int) -> None:
    for V in unpack(blocks_of(kind, 4, n)[0], n).numpy():
        eigenvalues, U = reference.decompose(V)
        scale = max(1e-300, np.abs(V).max())
        np.testing.assert_allclose(U.T @ U, np.eye(n), atol=tolerance(np.float64, n))
        np.testing.assert_allclose((U * eigenvalues) @ U.T / scale, V / scale, atol=tolerance(np.float64, n))
        np.testing.assert_allclose(np.sort(eigenvalues) / scale, np.linalg.eigvalsh(V) / scale, atol=1e-13)


# ----------------------------------------------------------------------------------------------- stage 1: T = Hᵀ V H


@pytest.mark.usefixtures("uncompiled")
@each_real
@each_kind
@each_size
def test_tridiagonal_form_is_hvh_and_the_references(n: int, kind: str, real: Any) -> None:
    V, m = matrices(kind, n, L), vectors(n, L)
    left = tridiagonalised(V, m, real)
    T = tridiagonal_matrix(from_rows(left["d"], n), from_rows(left["e"], n)[:, : n - 1])
    H = reflections(left["a"], left["h"], n)
    close = tolerance(real, n)
    np.testing.assert_allclose(H.transpose(0, 2, 1) @ H, np.broadcast_to(np.eye(n), H.shape), atol=close)
    np.testing.assert_allclose(H.transpose(0, 2, 1) @ V @ H, T, atol=close)
    np.testing.assert_allclose(from_rows(left["y"], n), (H.transpose(0, 2, 1) @ m[:, :, None])[:, :, 0], atol=close)
    if kind in ("typical", "graded"):  # where no reflection is decided by rounding
        np.testing.assert_allclose(T, [reference.tridiagonalise(block)[0] for block in V], atol=close)


@pytest.mark.usefixtures("uncompiled")
@each_real
@each_size
def test_reflections_are_applied_backwards(n: int, real: Any) -> None:
    left = tridiagonalised(matrices("typical", n, L), vectors(n, L), real)
    H, z = reflections(left["a"], left["h"], n), vectors(n, L)
    y = to_rows(z, real)
    tridiagonal.apply_reflections_(n, left["a"], left["h"], y, L)
    np.testing.assert_allclose(from_rows(y, n), (H @ z[:, :, None])[:, :, 0], atol=tolerance(real, n))
    basis = to_rows(np.broadcast_to(np.eye(n), (L, n, n)), real)
    tridiagonal.reflect_basis_(n, left["a"], left["h"], basis, L)
    np.testing.assert_allclose(from_rows(basis, n, n), H, atol=tolerance(real, n))


@pytest.mark.usefixtures("uncompiled")
def test_a_column_that_is_tridiagonal_already_is_left_alone() -> None:
    n = 5
    V = np.broadcast_to(np.diag(np.arange(2.0, 7.0) / 4) + np.diag([0.25] * 4, 1) + np.diag([0.25] * 4, -1), (L, n, n))
    left = tridiagonalised(V, vectors(n, L), np.float64)
    np.testing.assert_array_equal(tridiagonal_matrix(from_rows(left["d"], n), from_rows(left["e"], n)[:, :4]), V)
    np.testing.assert_array_equal(from_rows(left["y"], n), vectors(n, L))
    np.testing.assert_array_equal(from_rows(left["h"], n)[:, : n - 2], 0)


# ----------------------------------------------------------------------------------------------- stage 2: Λ = Rᵀ T R


def diagonalised(T: Array, y: Array, real: Any) -> dict[str, Any]:
    """All that stage 2 leaves."""
    n, most = T.shape[1], 6 * T.shape[1]
    d = to_rows(T.diagonal(axis1=1, axis2=2), real)
    e = to_rows(np.pad(T.diagonal(1, axis1=1, axis2=2), ((0, 0), (0, 1))), real)
    rows, log, ends = to_rows(y, real), np.full(2 * (n - 1) * most * L, np.nan, real), np.zeros(most, np.int64)
    sweeps = solver.diagonalise_(n, d, e, rows, log, ends, most, np.zeros(0, np.int64), 0, L)
    return {"d": d, "e": e, "y": rows, "log": log, "ends": ends, "sweeps": sweeps}


def tridiagonal_blocks(kind: str, n: int) -> Array:
    """T of each lane's block, exact in float32."""
    T = np.stack([reference.tridiagonalise(block)[0] for block in matrices(kind, n, L)])
    d, e = T.diagonal(axis1=1, axis2=2), T.diagonal(1, axis1=1, axis2=2)
    return tridiagonal_matrix(d.astype(np.float32), e.astype(np.float32))


@pytest.mark.usefixtures("uncompiled")
@each_real
@each_kind
@each_size
def test_rotations_are_orthogonal_and_keep_the_spectrum(n: int, kind: str, real: Any) -> None:
    T, z = tridiagonal_blocks(kind, n), vectors(n, L)
    left = diagonalised(T, z, real)
    close = tolerance(real, n)
    assert not from_rows(left["e"], n)[:, : n - 1].any()  # converged
    eigenvalues = from_rows(left["d"], n)
    expected = [np.sort(reference.diagonalise(block)[0]) for block in T]
    np.testing.assert_allclose(np.sort(eigenvalues), expected, atol=close)

    R = np.full(n * n * L, np.nan, real)
    solver.form_rotations_(n, R, left["log"], left["ends"], left["sweeps"], L)
    R = from_rows(R, n, n)
    np.testing.assert_allclose(R.transpose(0, 2, 1) @ R, np.broadcast_to(np.eye(n), R.shape), atol=close)
    np.testing.assert_allclose(R @ (eigenvalues[:, :, None] * R.transpose(0, 2, 1)), T, atol=close)
    np.testing.assert_allclose(from_rows(left["y"], n), (R.transpose(0, 2, 1) @ z[:, :, None])[:, :, 0], atol=close)

    solver.apply_rotations_(left["y"], left["log"], left["ends"], left["sweeps"], L)
    np.testing.assert_allclose(from_rows(left["y"], n), z, atol=close)


@pytest.mark.usefixtures("uncompiled")
def test_the_shift_is_the_references() -> None:
    rng = np.random.default_rng(0)
    off, above, here = rng.standard_normal((3, L))
    off[:4] = 0
    shifts = solver.wilkinson_shift((off, above, here), off)
    np.testing.assert_array_equal(shifts[:4], here[:4])
    for shift, a, b, c in zip(shifts[4:], above[4:], off[4:], here[4:], strict=True):
        np.testing.assert_allclose(shift, reference.wilkinson_shift(a, b, c), rtol=1e-14, atol=1e-15)
        assert np.abs(np.linalg.eigvalsh([[a, b], [b, c]]) - shift).min() < 1e-14


@pytest.mark.usefixtures("uncompiled")
@each_real
def test_t_is_reversed_where_its_small_end_is_on_top_and_only_there(real: Any) -> None:
    n = 5
    grades = np.logspace(0, -3, n)
    d = np.where((np.arange(L) % 2 == 0)[:, None], grades, grades[::-1])  # every other lane has its large end on top
    rows, e = to_rows(d, real), np.full(n * L, 1e-3, real)
    mask = solver.small_end_first(n, rows, e, L)
    np.testing.assert_array_equal(mask, np.arange(L) % 2 == 1)
    solver.reverse_(n, rows, mask, 1, L)
    np.testing.assert_allclose(from_rows(rows, n), np.broadcast_to(grades, d.shape), rtol=1e-6)
    noise = to_rows(np.broadcast_to([1e-9, 1.0, 1.0, 1.0, 1e-7], d.shape), real)
    assert not solver.small_end_first(n, noise, e, L).any()  # an end of 1e-7 is noise, whatever the other is


@pytest.mark.usefixtures("uncompiled")
def test_reversing_takes_whole_rows_of_several_columns_round() -> None:
    square = np.random.default_rng(0).standard_normal((L, 3, 3))
    rows, mask = to_rows(square, np.float64), np.arange(L) < 7
    solver.reverse_(3, rows, mask, 3, L)
    np.testing.assert_array_equal(from_rows(rows, 3, 3), np.where(mask[:, None, None], square[:, ::-1], square))


# ------------------------------------------------------------------------------------------------------ other solvers


@pytest.mark.usefixtures("uncompiled")
@each_real
def test_blocks_of_two_are_solved_by_one_rotation(real: Any) -> None:
    V, z = np.concatenate([matrices("typical", 2, L)[: L // 2], matrices("rank1", 2, L)[L // 2 :]]), vectors(2, L)
    V[0] = np.eye(2)
    a, y = packed_rows(V, real), to_rows(z, real)
    d, e, log = (np.full(2 * L, np.nan, real) for _ in range(3))
    solver.diagonalise_2x2_(a, d, e, y, log, L)
    c, s = from_rows(log, 2).T
    R = np.stack([np.stack([c, -s], -1), np.stack([s, c], -1)], 1)
    close = tolerance(real, 2)
    np.testing.assert_allclose(c * c + s * s, 1, atol=close)
    np.testing.assert_allclose(R @ (from_rows(d, 2)[:, :, None] * R.transpose(0, 2, 1)), V, atol=close)
    np.testing.assert_allclose(from_rows(y, 2), (R.transpose(0, 2, 1) @ z[:, :, None])[:, :, 0], atol=close)
    assert not from_rows(e, 2)[:, 0].any()


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("kind", ["typical", "rank1", "rank3", "zero", "cond1e12", "huge", "tiny"])
@pytest.mark.parametrize("n", [1, 2, 3, 10])
def test_jacobi_decomposes_v_in_few_sweeps(kind: str, n: int) -> None:
    for packed in blocks_of(kind, 3, n)[0].numpy():
        V = unpack(torch.from_numpy(packed)[None], n)[0].numpy()
        matrix, U = np.empty((n, n)), np.empty((n, n))
        scale = jacobi.unpack_(n, packed, matrix)
        np.testing.assert_array_equal(matrix * scale, V)
        assert jacobi.jacobi_(n, matrix, U) <= 12
        np.testing.assert_allclose(U.T @ U, np.eye(n), atol=tolerance(np.float64, n))
        np.testing.assert_allclose((U * matrix.diagonal()) @ U.T, V / scale, atol=tolerance(np.float64, n))
