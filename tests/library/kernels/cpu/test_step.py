"""The step as plain Python, blocks that QR sweeps do not solve, and spectral functions of the user's."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from blockadapt.kernels import Segment, thresholds
from blockadapt.kernels.cpu import step, work
from blockadapt.kernels.cpu.kernel import NumbaKernel
from blockadapt.kernels.cpu.scratch import LINE
from blockadapt.kernels.cpu.simd import LANES, reciprocal_sqrt, sqrt
from blockadapt.kernels.cpu.spectral import INVERSE_ROOT
from blockadapt.kernels.cpu.tables import ENTRY
from blockadapt.kernels.eigh import EighKernel
from blockadapt.kernels.flops import block_flops
from blockadapt.spectrum import SpectralFunction
from support.accuracy import NEVER_REACHED
from support.blocks import (
    PATHS,
    Case,
    assert_close,
    bits,
    close_enough,
    copied,
    exact_eigh,
    pack,
    step_,
    stepped,
    training,
)
from support.counting import Counted, counted  # noqa: F401
from support.uncompiled import uncompiled  # noqa: F401

each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
each_path = pytest.mark.parametrize("path", PATHS)


# -------------------------------------------------------------------------------------------------------- uncompiled


def carried_out(segment: Case) -> tuple[Case, int]:
    """A copy of the segment after the step as plain Python, and how many blocks Jacobi's method has solved."""
    segment = copied(segment)
    place = segment.segment().place
    work_list: Any = work.NumbaWorkList(place.batch, [place], segment.refresh)
    work_list.fill_in_([segment.segment()])
    work_list._scratch[:] = 0xFF  # NaN: nothing may be read before it is written
    step.carry_out(work_list._entries, work_list._coefficients, INVERSE_ROOT)
    return segment, work_list.by_jacobi


@pytest.mark.usefixtures("uncompiled")
@each_dtype
@pytest.mark.parametrize("n", [1, 2, 3, 6])
@pytest.mark.parametrize(
    "path", ["plain", "without m", "clipped", "amsgrad", "amsgrad, new basis", "amsgrad, kept basis"]
)
def test_uncompiled_the_algorithm_is_the_same(n: int, path: str, dtype: torch.dtype) -> None:
    segment = PATHS[path](training(n, 19, dtype))
    plain, by_jacobi = carried_out(segment)
    (compiled,) = stepped(NumbaKernel(), [segment])
    assert by_jacobi == 0
    assert_close(plain, compiled, 16 * (n + 4) * torch.finfo(dtype).eps)


@each_dtype
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_the_scratch_of_all_threads_is_memory_of_the_work_list(
    threads: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    segment = training(3, 40 * LANES, dtype).segment()
    work_list: Any = work.NumbaWorkList(segment.place.batch, [segment.place], segment.refresh)
    work_list.fill_in_([segment])
    begin, scratch = int(work_list._entries[ENTRY.scratch_at]), work_list._scratch
    end = begin + work_list._workers * int(work_list._entries[ENTRY.scratch_bytes])
    assert work_list._workers == threads
    assert begin % LINE == 0
    assert scratch.ctypes.data <= begin < end <= scratch.ctypes.data + scratch.nbytes


@pytest.mark.usefixtures("uncompiled")
@each_dtype
def test_uncompiled_a_block_that_does_not_converge_is_solved_by_jacobi(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(thresholds, "CPU_SWEEPS", 0)
    segment = PATHS["amsgrad, new basis"](training(4, 19, dtype))
    after, by_jacobi = carried_out(segment)
    (exact,) = stepped(EighKernel(), [segment], torch.float64)
    assert by_jacobi == 19
    assert_close(after, exact, close_enough(4, dtype))


@pytest.mark.usefixtures("counted")
@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 10, 16, 25, 64])
def test_the_arithmetic_of_a_step_is_what_block_flops_tells(n: int) -> None:
    """One tile of blocks that are conditioned well: what is done to a row of lanes is done once for each block."""
    segment = training(n, LANES, torch.float32)
    segment.second_moment[:] = pack(torch.eye(n) + 0.1)
    carried_out(segment)
    assert block_flops(n) == pytest.approx(Counted.operations, rel=1 / 6 if n <= 3 else 1 / 50)


# ------------------------------------------------------------------------------------- blocks that do not converge


def by_qr(segment: Case) -> Case:
    """The segment with a clip that clips nothing: its eigenvalues are asked for."""
    spectrum = segment.spectrum
    return replace(segment, spectrum=spectrum._replace(upper=min(spectrum.upper, NEVER_REACHED)))


def solved_by_jacobi(kernel: NumbaKernel) -> int:
    return sum(work_list.by_jacobi for work_list in kernel._work_lists._known.values())


@each_dtype
@each_path
@pytest.mark.parametrize("sweeps", [0, 1])
@pytest.mark.parametrize("n", [2, 3, 10])
def test_a_block_that_does_not_converge_is_solved_in_the_step_and_nothing_is_lost(
    n: int, sweeps: int, path: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    segment = by_qr(PATHS[path](training(n, 35, dtype)))
    kernel = NumbaKernel()
    (normal,) = stepped(kernel, [segment])
    assert solved_by_jacobi(kernel) == 0
    monkeypatch.setattr(torch.linalg, "eigh", exact_eigh)  # Jacobi's method is far nearer to it than QR and eigh are
    (exact,) = stepped(EighKernel(), [segment], torch.float64)

    def refuse(V: Tensor) -> Any:
        raise AssertionError("eigh is not to be called")

    monkeypatch.setattr(torch.linalg, "eigh", refuse)
    monkeypatch.setattr(thresholds, "CPU_SWEEPS", sweeps)
    kernel = NumbaKernel()
    (after,) = stepped(kernel, [segment])
    if sweeps == 0:
        assert solved_by_jacobi(kernel) == (35 if segment.refresh and n > 2 else 0)
    assert after.second_moment.equal(normal.second_moment)
    assert after.m is normal.m or after.m.equal(normal.m)
    assert_close(after, exact, close_enough(n, dtype))


def test_of_a_step_only_the_blocks_that_do_not_converge_are_solved_by_jacobi(monkeypatch: pytest.MonkeyPatch) -> None:
    segment = by_qr(training(4, 40, torch.float32))
    segment = replace(segment, grad=torch.zeros_like(segment.grad))
    diagonal = torch.arange(0, 40, 2)
    segment.second_moment[diagonal] = pack(torch.diag(torch.arange(1.0, 5.0)))
    (normal,) = stepped(NumbaKernel(), [segment])
    monkeypatch.setattr(thresholds, "CPU_SWEEPS", 0)
    kernel = NumbaKernel()
    (after,) = stepped(kernel, [segment])
    assert solved_by_jacobi(kernel) == 20
    assert after.x[diagonal].equal(normal.x[diagonal])
    assert_close(after, normal, close_enough(4, torch.float32))


def test_blocks_that_do_not_converge_are_counted_anew_at_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thresholds, "CPU_SWEEPS", 0)
    kernel, segment = NumbaKernel(), training(3, 40, torch.float32).segment()
    for _ in range(2):
        kernel.prepare(segment.place.batch, [segment]).write_()
        assert solved_by_jacobi(kernel) == 40


@each_dtype
def test_a_block_that_is_not_finite_does_not_go_to_jacobi(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thresholds, "CPU_SWEEPS", 0)
    segment = by_qr(training(5, 40, dtype))
    segment.second_moment[7] = torch.inf
    kernel = NumbaKernel()
    (after,) = stepped(kernel, [segment])
    assert solved_by_jacobi(kernel) == 39
    assert after.x[7].isnan().all()
    assert after.x.isfinite().all(-1).sum() == 39


# --------------------------------------------------------------------------------------------------- spectral functions


def fourth_root(eigenvalue: Any, lr: Any, damping: Any) -> Any:
    return lr / (sqrt(sqrt(eigenvalue)) + damping)


class FourthRoot(SpectralFunction):
    """f(λ) = α / (λ^¼ + δ)."""

    lanes = staticmethod(fourth_root)

    def torch(self, eigenvalues: Tensor, lr: Tensor, damping: Tensor) -> Tensor:
        return lr / (eigenvalues**0.25 + damping)


class Method(SpectralFunction):
    """f(λ) = α / √(λ/2 + δ): with a number, and a formula that is written as a method."""

    def lanes(eigenvalue: Any, lr: Any, damping: Any) -> Any:
        return lr * reciprocal_sqrt(0.5 * eigenvalue + damping)

    def torch(self, eigenvalues: Tensor, lr: Tensor, damping: Tensor) -> Tensor:
        return lr / (eigenvalues / 2 + damping).sqrt()


class TorchOnly(SpectralFunction):
    """f(λ) = α: gradient descent with momentum."""

    def torch(self, eigenvalues: Tensor, lr: Tensor, damping: Tensor) -> Tensor:
        return lr.expand_as(eigenvalues)


FOURTH_ROOT, METHOD = FourthRoot(), Method()


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.float64, marks=pytest.mark.slow)], ids=str)
def test_a_formula_for_lanes_takes_the_step_of_the_one_for_torch(dtype: torch.dtype) -> None:
    """All paths in one test: a process takes ten seconds to compile a formula."""
    paths = ["plain", "clipped", "coarse", "amsgrad, new basis", "amsgrad, kept basis"]
    for path, n in itertools.product(paths, (1, 2, 6)):
        segment = replace(PATHS[path](training(n, 45, dtype)), function=FOURTH_ROOT)
        assert NumbaKernel().takes(segment.batch)
        (ours,) = stepped(NumbaKernel(), [segment])
        (exact,) = stepped(EighKernel(), [segment], torch.float64)
        assert_close(ours, exact, close_enough(n, dtype))
        (other,) = stepped(NumbaKernel(), [PATHS[path](training(n, 45, dtype))])
        assert not other.x.equal(ours.x)


@pytest.mark.slow
def test_a_formula_may_be_a_method_and_use_numbers() -> None:
    segment = replace(training(6, 45, torch.float32), function=METHOD)
    (ours,) = stepped(NumbaKernel(), [segment])
    (exact,) = stepped(EighKernel(), [segment], torch.float64)
    assert_close(ours, exact, close_enough(6, torch.float32))


def test_each_function_gets_a_step_of_its_own_in_one_kernel() -> None:
    kernel = NumbaKernel()
    segments = [training(6, 45, torch.float32), replace(training(6, 45, torch.float32), function=FOURTH_ROOT)]
    for after, segment in zip(stepped(kernel, segments), segments, strict=True):
        (alone,) = stepped(NumbaKernel(), [segment])
        assert bits(after) == bits(alone)


def test_without_a_formula_for_lanes_the_step_goes_through_eigh() -> None:
    segment = replace(training(6, 45, torch.float32), function=TorchOnly())
    assert not NumbaKernel().takes(segment.batch)
    (ours,) = stepped(NumbaKernel(), [segment])
    (theirs,) = stepped(EighKernel(), [segment])
    assert bits(ours) == bits(theirs)


def test_a_formula_that_does_not_compile_is_refused_in_one_sentence() -> None:
    class Broken(SpectralFunction):
        lanes = staticmethod(lambda eigenvalue, lr, damping: np.linalg.eigh(eigenvalue))

    segment = replace(training(3, 5, torch.float32), function=Broken())
    before = bits(segment)
    with pytest.raises(ValueError, match=r"^NumbaKernel: `lanes` must be a function of .*, got <function .*>\.$"):
        step_(NumbaKernel(), [segment])
    assert bits(segment) == before


def test_the_compiled_step_allocates_nothing() -> None:
    """Memory that cannot be had would be an error that nobody sees, after other blocks were written."""
    code = work.worker_for(np.float32, fourth_root).inspect_llvm()
    assert "masked.gather" in code  # it is the whole step
    assert "NRT_Allocate" not in code
    assert "NRT_MemInfo_alloc" not in code


# -------------------------------------------------------------------------------------------------------- edge of range


def test_a_gradient_that_nobody_else_holds_lives_until_the_step_is_written() -> None:
    segment = training(3, 4000, torch.float32)
    (expected,) = stepped(NumbaKernel(), [segment])
    inputs = segment.segment()
    grad = segment.grad.clone()
    kernel = NumbaKernel()
    change = kernel.prepare(inputs.place.batch, [Segment(inputs.place, grad, True, inputs.coefficients)])
    del grad
    waste = [torch.full((4000, 1, 3), torch.nan) for _ in range(8)]  # takes the memory if it is free
    change.write_()
    assert len(waste) == 8
    assert segment.x.equal(expected.x)
