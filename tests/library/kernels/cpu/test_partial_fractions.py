"""The inverse root without eigenvalues: the fractions, which blocks they are for, and blocks that are put off."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from blockadapt.kernels import thresholds
from blockadapt.kernels.cpu import new_basis, step
from blockadapt.kernels.cpu.kernel import NumbaKernel
from blockadapt.kernels.cpu.partial_fractions import COUNT, fractions
from blockadapt.kernels.cpu.simd import LANES as L
from blockadapt.kernels.cpu.spectral import INVERSE_ROOT
from blockadapt.kernels.cpu.work import NumbaWorkList
from blockadapt.kernels.eigh import EighKernel
from blockadapt.moments import unpack
from blockadapt.spectrum import UNBOUNDED, resolution_of
from support.blocks import PATHS, Case, assert_close, bits, close_enough, copied, pack, stepped, training
from support.uncompiled import uncompiled  # noqa: F401

LEAST, SMALLEST, MOST = thresholds.FRACTIONS_LEAST, thresholds.FRACTIONS_SMALLEST, thresholds.FRACTIONS_MOST
PUT_OFF = thresholds.PUT_OFF

# ------------------------------------------------------------------------------------------------------ the fractions


@pytest.mark.parametrize("most", [1.0, 8.0, 1e6])
@pytest.mark.parametrize("count", [4, 9, 17, 30])
def test_fractions_are_the_inverse_root_to_what_theory_says(count: int, most: float) -> None:
    """Hale, Higham and Trefethen 2008, theorem 4.1, whose rate is 2π²/(log(most/smallest) + 3)."""
    smallest = 1e-6
    weights, shifts = fractions(count, smallest, most)
    eigenvalues = np.geomspace(smallest, most, 1000)
    found = (weights / (eigenvalues[:, None] + shifts)).sum(1) * np.sqrt(eigenvalues)
    error, rate = np.abs(found - 1).max(), 2 * np.pi**2 / (np.log(most / smallest) + 3)
    assert 0.5 * np.exp(-rate * count) < error < 8 * np.exp(-rate * count) + 1e-13
    assert (weights > 0).all()
    assert (shifts > 0).all()


def test_with_any_damping_the_sum_is_nearer_than_float32_knows_the_eigenvalues() -> None:
    """An eigenvalue is known to ε of the largest, and with it its inverse root to ε / 2λ."""
    eigenvalues, eps = np.geomspace(LEAST, 2, 1000), np.finfo(np.float32).eps
    edges = [SMALLEST**0.5 * (1 - 1e-9), SMALLEST**0.5, MOST**0.5, MOST**0.5 * (1 + 1e-9)]
    weights, shifts = fractions(COUNT, SMALLEST, MOST)
    for damping in (0.0, *edges, *np.geomspace(1e-12, 1e12, 500)):
        square = damping**2
        left = damping - (weights * square / (square + shifts)).sum()
        found = (weights * shifts / (square + shifts) / (eigenvalues[:, None] + shifts)).sum(1)
        if not SMALLEST <= square <= MOST:
            found -= left / (eigenvalues - square)
        error = np.abs(found * (np.sqrt(eigenvalues) + damping) - 1)
        assert (error <= eps / (2 * eigenvalues) + 6e-7).all()


@pytest.mark.parametrize("root", [0.0, 1e-9, 1e-4, 2.7e-3, 3e-3, 0.1, 1.9, 2.1, 100.0, 1e9])
def test_with_any_damping_a_step_is_that_of_eigh(root: float) -> None:
    """√V between 0.01 and 1, δ from nothing to all that counts."""
    n = 8
    segment = well(n, 40)
    V = torch.diag(torch.logspace(-4, 0, n)) + 1e-5
    segment.second_moment[:] = pack(V)
    spectrum = segment.spectrum._replace(damping=root, correction=1.0)
    segment = replace(segment, spectrum=spectrum, grad=torch.zeros_like(segment.grad))
    (ours,), (exact,) = stepped(NumbaKernel(), [segment]), stepped(EighKernel(), [segment], torch.float64)
    (theirs,) = stepped(EighKernel(), [segment])

    def errors(after: Case) -> np.ndarray[Any, Any]:
        still = segment.descent.shrink * segment.x.double()
        step, true = after.x.double() - still, exact.x - still
        return ((step - true).norm(dim=-1) / true.norm(dim=-1)).numpy()

    rounding = float((segment.x.double().norm(dim=-1) / (exact.x - segment.x.double()).norm(dim=-1)).median())
    assert np.median(errors(ours)) <= 2 * np.median(errors(theirs)) + 1e-7 * rounding


# -------------------------------------------------------------------------------------------- which blocks they are for


def ways(segment: Case, monkeypatch: pytest.MonkeyPatch) -> tuple[list[int], list[int]]:
    """How many lanes of each tile took the fractions, and how many of each tile QR, in the uncompiled step."""
    by_fractions: list[int] = []
    by_qr: list[int] = []
    inverse_root_, take_apart_ = new_basis.inverse_root_, new_basis.take_apart_

    def noted_(*args: Any) -> Any:
        done, asked = inverse_root_(*args)
        by_fractions.append(int(done.sum()))
        return done, asked

    def taken_apart_(*args: Any) -> Any:
        by_qr.append(int((~args[9]).sum()))
        return take_apart_(*args)

    monkeypatch.setattr(new_basis, "inverse_root_", noted_)
    monkeypatch.setattr(new_basis, "take_apart_", taken_apart_)
    segment = copied(segment)
    place = segment.segment().place
    work_list: Any = NumbaWorkList(place.batch, [place], segment.refresh)
    work_list.fill_in_([segment.segment()])
    step.carry_out(work_list._entries, work_list._coefficients, INVERSE_ROOT)
    return by_fractions, by_qr


def well(n: int, count: int, dtype: torch.dtype = torch.float32) -> Case:
    """Blocks of condition 2 or so."""
    segment = training(n, count, dtype)
    segment.second_moment[:] = pack(torch.eye(n) + 0.1)
    return replace(segment, grad=0.01 * segment.grad)


def badly(segment: Case, lanes: Any) -> Case:
    """The segment with blocks that have an eigenvalue below the least."""
    segment = copied(segment)
    diagonal = torch.ones(segment.n)
    diagonal[1] = 0.9 * LEAST
    segment.second_moment.view(segment.num_blocks, -1)[lanes] = pack(torch.diag(diagonal))
    segment.grad.view(segment.num_blocks, -1)[lanes] *= 1e-5
    return segment


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("path", PATHS)
def test_only_a_step_that_asks_for_nothing_else_takes_them(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = "amsgrad" not in path and "basis" not in path and "clip" not in path and path != "coarse"
    by_fractions, by_qr = ways(PATHS[path](well(5, L)), monkeypatch)
    assert sum(by_fractions) == (L if taken else 0)
    assert by_qr == ([] if taken or "kept" in path else [L])


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize(("n", "dtype"), [(3, torch.float32), (5, torch.float64)], ids=["of three", "float64"])
def test_small_blocks_and_float64_do_not(n: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ways(well(n, L, dtype), monkeypatch) == ([], [L])


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("factor", [0.9, 1.1])
def test_the_least_eigenvalue_decides(factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """diag(1, …, 1, λ) has a trace in [4, 8), so it is scaled by 4."""
    segment = well(5, L)
    segment.second_moment[:] = pack(torch.diag(torch.tensor([1.0, factor * 4 * LEAST, 1, 1, 1])))
    segment = replace(segment, grad=torch.zeros_like(segment.grad), second=segment.second._replace(decay=1.0))
    assert ways(segment, monkeypatch)[0] == [L if factor > 1 else 0]


@pytest.mark.usefixtures("uncompiled")
def test_each_lane_must_be_fit_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    segment = well(4, 8)
    V = segment.second_moment.view(8, -1)
    V[0] *= 1e-10  # the damping, 1e-4, is more than the root
    V[1] *= 1e-33  # beyond the range
    V[2] = 0  # nothing is known of it, and m is not zero
    V[3] = torch.inf
    V[4] *= 1e33  # beyond the range
    V[5] = pack(torch.ones(4, 4))  # singular
    segment = replace(segment, grad=torch.zeros_like(segment.grad))
    by_fractions, by_qr = ways(segment, monkeypatch)
    assert by_fractions == [L - 5]  # lanes without a block take part
    assert by_qr == [L]  # four were put off, and come with lanes without a block


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize(
    ("changes", "count"),
    [
        ({}, L),
        ({"upper": 0.999 * UNBOUNDED}, 0),
        ({"lower": 1e-30}, 0),
        ({"resolution": resolution_of(torch.float32)}, L),
        ({"resolution": LEAST}, 0),
        ({"damping": 0.0}, L),
    ],
    ids=str,
)
def test_a_clip_or_a_coarse_resolution_needs_eigenvalues(
    changes: dict[str, float], count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    segment = well(4, L)
    assert ways(replace(segment, spectrum=segment.spectrum._replace(**changes)), monkeypatch)[0] == [count]


@pytest.mark.parametrize("resolution", [0.0, resolution_of(torch.float32)])
def test_coordinates_that_no_gradient_has_reached_do_not_matter(
    resolution: float, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """A block with some of them moves as the block without them does, and takes the same way."""
    n, lacking = 7, [1, 4, 6]
    segment = well(n, 40)
    segment = replace(segment, spectrum=segment.spectrum._replace(resolution=resolution))
    V = unpack(segment.second_moment.view(40, -1), n)
    V[:, lacking] = V[:, :, lacking] = 0
    segment.second_moment[:] = pack(V).view_as(segment.second_moment)
    assert segment.m is not None
    for tensor in (segment.grad, segment.m):
        tensor.view(40, n)[:, lacking] = 0
    (ours,), (exact,) = stepped(NumbaKernel(), [segment]), stepped(EighKernel(), [segment], torch.float64)
    assert_close(ours, exact, close_enough(n, torch.float32))
    moves = (ours.x - segment.descent.shrink * segment.x).view(40, n).abs()
    assert moves[:, lacking].max() <= 8 * torch.finfo(torch.float32).eps * max(1, moves.max())
    request.getfixturevalue("uncompiled")
    assert ways(segment, monkeypatch) == ([L, L], [])


# ---------------------------------------------------------------------------------------------- blocks that are put off

SHARES = [0, 1, PUT_OFF, PUT_OFF + 1, L - 1, L]


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("count", SHARES)
def test_few_blocks_of_a_tile_are_put_off(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    by_fractions, by_qr = ways(badly(well(4, L), slice(0, count)), monkeypatch)
    assert by_fractions == [L - count]
    assert by_qr == ([] if count == 0 else [L] if count <= PUT_OFF else [count])


@pytest.mark.usefixtures("uncompiled")
def test_those_that_are_put_off_are_solved_as_many_at_a_time_as_there_are_lanes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tiles = 4  # one portion
    lanes = torch.arange(tiles * L).view(tiles, L)[:, :PUT_OFF].reshape(-1)
    by_fractions, by_qr = ways(badly(well(4, tiles * L), lanes), monkeypatch)
    assert by_fractions == [L - PUT_OFF] * tiles
    assert len(by_qr) == -(-tiles * PUT_OFF // L)


@pytest.mark.parametrize("path", ["plain", "without m", "coupled", "without m, coupled", "shrinking", "average"])
@pytest.mark.parametrize("count", SHARES)
@pytest.mark.parametrize("minor", [1, 5 * L], ids=["lines of one block", "one line"])
def test_a_block_gets_the_same_bits_whatever_its_neighbours_are(minor: int, count: int, path: str) -> None:
    """Of a line of several tiles, what was put off comes between two of them."""
    n, tiles = 6, 5
    good = PATHS[path](training(n, tiles * L, torch.float32, minor=minor))
    lanes = torch.arange(tiles * L).view(tiles, L)[:, L - count :].reshape(-1)
    mixed = badly(good, lanes)
    (after,), (alone,) = stepped(NumbaKernel(), [mixed]), stepped(NumbaKernel(), [good])
    (bad,) = stepped(NumbaKernel(), [badly(good, slice(None))])
    is_bad = torch.zeros(tiles * L, dtype=torch.bool)
    is_bad[lanes] = True
    for name, raw in bits(after).items():
        rows, others, worse = (
            np.frombuffer(each, np.float32).reshape(tiles * L, -1) for each in (raw, bits(alone)[name], bits(bad)[name])
        )
        np.testing.assert_array_equal(rows[~is_bad], others[~is_bad])
        np.testing.assert_array_equal(rows[is_bad], worse[is_bad])
    (exact,) = stepped(EighKernel(), [mixed], torch.float64)
    assert_close(after, exact, 0.01)  # float32 knows the root of the least eigenvalue to so much
    assert_close(after, exact, close_enough(n, torch.float32), ["m", "second_moment"])


def test_lanes_without_a_block_are_not_put_off() -> None:
    """They have the coefficients of the last tensor, which asks for eigenvalues."""
    plain, coarse = training(6, 25, torch.float32), training(6, 3, torch.float32)
    coarse = replace(coarse, spectrum=coarse.spectrum._replace(resolution=0.1))
    for after, segment in zip(stepped(NumbaKernel(), [plain, coarse]), (plain, coarse), strict=True):
        (alone,) = stepped(NumbaKernel(), [segment])
        assert bits(after) == bits(alone)


def test_blocks_of_several_tensors_are_put_off_together() -> None:
    """Tiles hold blocks of two tensors and the last one is not full; strides differ."""
    n = 6
    segments = [badly(training(n, 20 * k, torch.float32, k, minor=k), slice(3, None, 7)) for k in (1, 2, 4)]
    together = stepped(NumbaKernel(), segments)
    for after, segment in zip(together, segments, strict=True):
        (alone,) = stepped(NumbaKernel(), [segment])
        assert bits(after) == bits(alone)
