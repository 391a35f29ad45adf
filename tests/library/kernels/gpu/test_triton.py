"""The GPU kernel against the reference and the oracle: on a GPU where there is one, else under Triton's interpreter.

The interpreter takes about 50 µs for each operation of a kernel, however many lanes it has. So blocks are small here
and many at once; larger ones, and the rest of the cases, are marked slow.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch
from pytorch_optimizer import AdaBound
from torch import Tensor, nn
from torch.optim import Optimizer

from blockadapt import BlockAdagrad, BlockAdam, BlockAdamW, BlockRMSprop, SpectrumClip
from blockadapt.kernels import Batch, Coefficients, Descent, Kernel, Tally, get_kernel
from blockadapt.kernels import dispatch as dispatch_module
from blockadapt.kernels.cpu.kernel import NumbaKernel
from blockadapt.kernels.eigh import EighKernel
from blockadapt.kernels.gpu import kernel as kernel_module
from blockadapt.kernels.gpu.kernel import TritonKernel
from blockadapt.kernels.reflections import basis_of
from blockadapt.moments import unpack
from blockadapt.spectrum import INVERSE_ROOT, InverseRoot, Spectrum
from support.accuracy import GPU_KINDS, assert_as_accurate, enough_blocks, truth_of
from support.blocks import (
    PATHS,
    TENSORS,
    Case,
    assert_close,
    bits,
    blocks_of,
    close_enough,
    copied,
    generator,
    pack,
    rows_of,
    still,
    take_,
    training,
    with_amsgrad,
    with_basis,
)
from support.blocks import stepped as stepped_on_the_cpu
from support.cases import METHODS, dense, flat, gradients, like_layout, make_oracle, mixed_index_groups, mixture

work = pytest.importorskip("blockadapt.kernels.gpu.work", reason="Triton is not installed")

GPU = torch.cuda.is_available()
EPS64 = torch.finfo(torch.float64).eps

slow = pytest.mark.slow
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])


@pytest.fixture(params=[pytest.param("cuda", marks=pytest.mark.cuda) if GPU else "cpu"])  # where Triton runs
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def on(device: str, case: Case) -> Case:
    """The case with its tensors on the device, strides and all."""
    return replace(case, **{name: t.to(device) for name in TENSORS if (t := getattr(case, name)) is not None})


def stepped(kernel: Kernel, cases: Sequence[Case], device: str) -> list[Case]:
    """Copies of the cases after one step of the kernel on the device, back on the CPU."""
    return [on("cpu", case) for case in stepped_on_the_cpu(kernel, [on(device, case) for case in cases])]


# ------------------------------------------------------------------------------ one step, every path, against the truth


def assert_steps_as_the_reference(case: Case, device: str) -> None:
    (ours,) = stepped(TritonKernel(), [case], device)
    (exact,) = stepped_on_the_cpu(EighKernel(), [case], torch.float64)
    assert_close(ours, exact, close_enough(case.n, case.x.dtype))
    assert ours.grad.equal(case.grad)


@pytest.mark.parametrize(
    ("n", "dtype"),
    [
        (1, torch.float32),
        (2, torch.float32),
        (3, torch.float32),
        *[pytest.param(n, torch.float32, marks=slow) for n in (5, 10)],
        *[pytest.param(n, torch.float64, marks=slow) for n in (1, 2, 3, 7)],
    ],
)
@pytest.mark.parametrize("path", PATHS)
def test_every_path_takes_the_step_of_the_reference(path: str, n: int, dtype: torch.dtype, device: str) -> None:
    assert_steps_as_the_reference(PATHS[path](training(n, 45, dtype)), device)


@pytest.mark.parametrize("path", ["plain", "amsgrad, new basis", "amsgrad, kept basis"])
def test_float64_takes_the_step_of_the_reference(path: str, device: str) -> None:
    assert_steps_as_the_reference(PATHS[path](training(4, 45, torch.float64)), device)


@slow
@pytest.mark.parametrize(
    ("n", "path"), [(25, "amsgrad"), (25, "new basis"), (64, "plain"), (64, "amsgrad, kept basis")]
)
def test_large_blocks_take_the_step_of_the_reference(n: int, path: str, device: str) -> None:
    assert_steps_as_the_reference(PATHS[path](training(n, 40, torch.float32)), device)


@pytest.mark.parametrize(("n", "k"), [(2, 1), (4, 3)])
@pytest.mark.parametrize("path", ["plain", "without m", "amsgrad, new basis", "kept basis"])
def test_a_short_run_moves_as_the_reference_does(n: int, k: int, path: str, device: str) -> None:
    assert_steps_as_the_reference(PATHS[path](training(n, 45, torch.float32, k=k)), device)


@pytest.mark.parametrize("path", ["plain", "amsgrad, new basis", "amsgrad, kept basis"])
def test_no_path_reads_or_writes_beyond_its_segment(path: str, device: str) -> None:
    """Every tensor is the middle of a larger one whose ends are NaN before and after; blocks lie side by side."""
    case = PATHS[path](training(4, 60, torch.float32, k=3, minor=20))
    guarded, views = {}, {}
    for name in TENSORS:
        tensor = getattr(case, name)
        if tensor is not None:
            guarded[name] = torch.full((tensor.numel() + 2 * 64,), torch.nan, device=device)
            turned = name in ("x", "grad", "m")
            views[name] = guarded[name][64:-64].view(tensor.mT.shape).mT if turned else guarded[name][64:-64]
            views[name] = views[name].view(tensor.shape) if not turned else views[name]
            views[name].copy_(tensor)
    inside = replace(case, **views)
    take_(TritonKernel(), {inside.batch: [inside.segment()]})
    (expected,) = stepped(TritonKernel(), [case], device)
    assert bits(on("cpu", inside)) == bits(expected)
    for name, memory in guarded.items():
        assert memory[:64].isnan().all(), name
        assert memory[-64:].isnan().all(), name


@pytest.mark.parametrize("counts", [(1, 1), (5, 40, 3), pytest.param((2100, 1, 64), marks=slow)])
def test_segments_of_one_launch_move_as_each_would_alone(counts: tuple[int, ...], device: str) -> None:
    """To the last bit: no lane depends on its neighbours, nor on how many there are."""
    cases = [
        replace(
            training(3, count, torch.float32, i, k=3 - i % 2),
            descent=Descent(1.0, 0.01 * i, 1.0 - 0.1 * i),
            spectrum=Spectrum(1e-2 * (i + 1), 1.0, 1e-4),
        )
        for i, count in enumerate(counts)
    ]
    for after, case in zip(stepped(TritonKernel(), cases, device), cases, strict=True):
        (alone,) = stepped(TritonKernel(), [case], device)
        assert bits(after) == bits(alone)


def test_segments_of_every_kind_mix_in_one_step(device: str) -> None:
    cases = [make(training(2, 20 + i, torch.float32, i)) for i, make in enumerate(PATHS.values())]
    for after, case in zip(stepped(TritonKernel(), cases, device), cases, strict=True):
        (exact,) = stepped_on_the_cpu(EighKernel(), [case], torch.float64)
        assert_close(after, exact, close_enough(2, torch.float32))


@pytest.mark.parametrize(
    "kernels", [(EighKernel, TritonKernel), (NumbaKernel, TritonKernel), (TritonKernel, EighKernel)]
)
def test_a_basis_that_one_kernel_found_serves_another(kernels: Sequence[Callable[[], Kernel]], device: str) -> None:
    """Segments of one call, none of which fills its tiles."""
    cases = [with_basis(with_amsgrad(training(3, count, torch.float32)), refresh=True) for count in (1, 33, 70)]
    exact = [copied(case, torch.float64) for case in cases]
    for make, refresh in zip(kernels, (True, False), strict=True):
        there = "cpu" if make is NumbaKernel else device
        cases = stepped(make(), [replace(case, refresh=refresh) for case in cases], there)
        exact = stepped_on_the_cpu(EighKernel(), [replace(case, refresh=refresh) for case in exact])
    for ours, theirs in zip(cases, exact, strict=True):
        assert_close(ours, theirs, 3 * close_enough(3, torch.float32), ("x", "m", "second_moment", "largest"))


@pytest.mark.parametrize("path", ["plain", "kept basis"])
def test_a_kernel_that_has_stepped_before_steps_as_a_new_one(path: str, device: str) -> None:
    """The same place with other gradients and coefficients."""
    kernel, case = TritonKernel(), on(device, PATHS[path](training(3, 45, torch.float32)))
    segment = case.segment()
    for step in range(2):
        grad = torch.randn(case.grad.shape).to(device)
        coefficients = segment.coefficients._replace(descent=Descent(1.0, 0.0, 1 - 0.1 * step))
        now = replace(case, grad=grad, **coefficients._asdict())
        (expected,) = stepped_on_the_cpu(TritonKernel(), [now])
        take_(kernel, {case.batch: [segment._replace(grad=grad, coefficients=coefficients)]})
        assert bits(on("cpu", now)) == bits(on("cpu", expected))


def test_preparing_a_step_changes_nothing(device: str) -> None:
    case = on(device, with_basis(with_amsgrad(training(3, 45, torch.float32)), refresh=True))
    before = bits(on("cpu", case))
    change = TritonKernel().prepare(case.batch, [case.segment()])
    assert bits(on("cpu", case)) == before
    change.write_()
    assert bits(on("cpu", case)) != before


def test_a_kernel_keeps_no_memory_of_places_alive(device: str) -> None:
    kernel = TritonKernel()
    segment = on(device, training(2, 40, torch.float32)).segment()
    take_(kernel, {segment.place.batch: [segment]})
    memory = weakref.ref(segment.place.second_moment)
    del segment
    gc.collect()
    assert memory() is None


@pytest.mark.parametrize("path", ["plain", "amsgrad, new basis", "kept basis"])
def test_preparing_a_step_reads_no_number(path: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the host would have to wait for, were the tensors on a GPU; the numbers of the step are there too."""

    def read(tensor: Tensor, *_: object) -> None:
        raise AssertionError(f"a tensor of shape {tuple(tensor.shape)} was read")

    case = on(device, PATHS[path](training(3, 45, torch.float32)))
    segment = case.segment()
    known = [torch.tensor(term, dtype=torch.float64, device=device) for term in segment.coefficients.terms]
    segment = segment._replace(coefficients=Coefficients.of(known))
    for name in ("item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__", "__index__"):
        monkeypatch.setattr(Tensor, name, read)
    TritonKernel().prepare(case.batch, [segment])


@pytest.mark.cuda
@pytest.mark.skipif(not GPU, reason="there is no GPU")
def test_nothing_waits_for_the_device() -> None:
    kernel = TritonKernel()
    for path in ("plain", "amsgrad, new basis", "kept basis"):
        case = on("cuda", PATHS[path](training(5, 70, torch.float32)))
        for _ in range(2):  # the first compiles
            torch.cuda.set_sync_debug_mode("error")
            try:
                kernel.prepare(case.batch, [case.segment()]).write_()
            finally:
                torch.cuda.set_sync_debug_mode("default")


# ---------------------------------------------------------------------------------------------- what a step shows of α*


def counted(kernel: Kernel, cases: Sequence[Case], device: str, dtype: torch.dtype | None = None) -> Tensor:
    """pᵀm̂ and m̂ᵀm̂ of all blocks of these cases, of which each kernel call fills one tally."""
    tally = Tally(torch.device(device))
    inside = [on(device, copied(case, dtype)) for case in cases]
    take_(kernel, {inside[0].batch: [case.segment()._replace(tally=tally) for case in inside]})
    return tally.total().cpu()


@pytest.mark.parametrize("path", ["plain", "without m", "clipped", "amsgrad, new basis", "kept basis"])
@pytest.mark.parametrize(
    ("n", "dtype"),
    [(1, torch.float32), (2, torch.float32), (3, torch.float32), pytest.param(7, torch.float64, marks=slow)],
)
def test_a_step_counts_what_the_reference_counts(path: str, n: int, dtype: torch.dtype, device: str) -> None:
    """In tiles that are not full, and of two parameters at once."""
    cases = [PATHS[path](training(n, count, dtype, count)) for count in (45, 3)]
    ours, exact = counted(TritonKernel(), cases, device), counted(EighKernel(), cases, "cpu", torch.float64)
    assert torch.allclose(ours, exact, rtol=close_enough(n, dtype), atol=0)


@pytest.mark.parametrize("sweeps", [pytest.param(0, marks=slow), 2])
def test_redone_blocks_are_counted_once(sweeps: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work, "sweeps_allowed", lambda n: sweeps)
    cases = [training(3, 5, torch.float32)]
    ours, exact = counted(TritonKernel(), cases, device), counted(EighKernel(), cases, "cpu", torch.float64)
    assert torch.allclose(ours, exact, rtol=close_enough(3, torch.float32), atol=0)


def test_a_block_that_is_not_finite_is_seen_in_what_is_counted(device: str) -> None:
    case = training(3, 40, torch.float32)
    case.grad[7] = torch.nan
    assert counted(TritonKernel(), [case], device).isnan().all()


@pytest.mark.parametrize("path", ["plain", "kept basis"])
def test_counting_changes_no_bit_of_a_step(path: str, device: str) -> None:
    case = on(device, PATHS[path](training(3, 45, torch.float32)))
    (expected,) = stepped_on_the_cpu(TritonKernel(), [case])
    take_(TritonKernel(), {case.batch: [case.segment()._replace(tally=Tally(torch.device(device)))]})
    assert bits(on("cpu", case)) == bits(on("cpu", expected))


# ----------------------------------------------------------------------------------------- blocks that do not converge

ONE_OF_EACH = {(torch.float32, "without m, coupled", 0), (torch.float64, "amsgrad, new basis", 2)}
"""Every value once; the full product is slow."""


@pytest.mark.parametrize(
    ("dtype", "path", "sweeps"),
    [
        pytest.param(dtype, path, sweeps, marks=() if (dtype, path, sweeps) in ONE_OF_EACH else slow)
        for dtype in (torch.float32, torch.float64)
        for path in ("plain", "without m, coupled", "amsgrad, new basis")
        for sweeps in (0, 2)
    ],
)
def test_blocks_that_do_not_converge_are_redone(
    dtype: torch.dtype, path: str, sweeps: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With room for no sweep at all every block is redone; with room for two, some of them are."""
    monkeypatch.setattr(work, "sweeps_allowed", lambda n: sweeps)
    assert_steps_as_the_reference(PATHS[path](training(3, 5, dtype)), device)


@slow
@pytest.mark.parametrize(("n", "path"), [(5, "amsgrad, new basis"), (8, "plain"), (17, "amsgrad"), (33, "plain")])
def test_redone_blocks_of_any_size_take_the_step_of_the_reference(
    n: int, path: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(work, "sweeps_allowed", lambda n: 0)
    assert_steps_as_the_reference(PATHS[path](training(n, 3, torch.float32)), device)


# ------------------------------------------------------------------------------------------------------------ accuracy


def errors(kernel: Kernel, V: Tensor, m: Tensor, truth: Tensor, device: str) -> np.ndarray:
    """‖x − truth‖ / ‖truth‖ of each block."""
    (after,) = stepped(kernel, [still(V, m)], device)
    return np.asarray((-after.x[:, 0].double() - truth).norm(dim=1) / truth.norm(dim=1))


@pytest.mark.parametrize(
    ("kind", "n"),
    [
        *[(kind, n) for n in (2, 3) for kind in GPU_KINDS],
        *[pytest.param(kind, n, marks=slow) for n in (5, 8, 10, 16, 17) for kind in GPU_KINDS],
        *[pytest.param(kind, n, marks=slow) for n in (25, 33) for kind in ("typical", "graded", "rank3", "tiny")],
    ],
)
def test_float32_is_within_twice_the_error_of_eigh_in_float32(
    kind: str, n: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four times in the 99th percentile. The other side is LAPACK on the CPU, also where a GPU is tested."""
    count = enough_blocks(kind, n)
    if device == "cpu":
        monkeypatch.setattr(work, "lanes_on", lambda device, blocks: count)
    V, m = (t.float() for t in blocks_of(kind, count, n))
    truth, ceiling = truth_of(V, m)
    ours, theirs = errors(TritonKernel(), V, m, truth, device), errors(EighKernel(), V, m, truth, "cpu")
    assert_as_accurate(ours, theirs, ceiling)


@pytest.mark.parametrize("n", [3, pytest.param(10, marks=slow)])
@pytest.mark.parametrize("kind", ["typical", "huge"])
def test_float64_is_far_more_accurate_than_float32(kind: str, n: int, device: str) -> None:
    """Blocks of a condition of about 1e3, of which float64 then leaves twelve digits."""
    V, m = blocks_of(kind, 64, n)
    (exact,) = stepped_on_the_cpu(EighKernel(), [still(V, m)])
    assert np.median(errors(TritonKernel(), V, m, -exact.x[:, 0], device)) < 1e4 * EPS64


@each_dtype
@pytest.mark.parametrize("n", [3, pytest.param(10, marks=slow), pytest.param(25, marks=slow)])
def test_a_decomposition_is_orthogonal_and_gives_back_v(n: int, dtype: torch.dtype, device: str) -> None:
    eps = torch.finfo(dtype).eps
    V = torch.cat([blocks_of(kind, 16, n)[0].to(dtype) for kind in ("typical", "rank1", "cond1e8", "huge", "tiny")])
    eigenvalues, U = (t.cpu().double() for t in TritonKernel().decompose(V.to(device), n))
    assert (U @ U.mT - torch.eye(n)).norm(dim=(1, 2)).max() <= 4 * n * eps
    whole = unpack(V.double(), n)
    error = ((U * eigenvalues.unsqueeze(1)) @ U.mT - whole).norm(dim=(1, 2)) / whole.norm(dim=(1, 2))
    assert error.max() <= 4 * n * eps
    (after,) = stepped(TritonKernel(), [with_basis(still(V, V[:, :n].clone()), refresh=True)], device)
    reflections, kept = rows_of(after, "basis"), rows_of(after, "eigenvalues")
    assert reflections is not None
    assert kept is not None
    assert torch.equal(basis_of(reflections, n).double(), U)
    assert torch.equal(kept.double(), eigenvalues)


# -------------------------------------------------------------------------------------------- special blocks, never NaN


def special_blocks(n: int, dtype: torch.dtype) -> Tensor:
    """Packed V, one of each kind that has broken an eigensolver somewhere."""
    ones = torch.ones(n, dtype=torch.float64)
    eye, ramp = torch.diag(ones), torch.arange(1, n + 1, dtype=torch.float64)
    h = torch.randn(n, 2 * n, generator=generator(n), dtype=torch.float64)
    full = h @ h.T / (2 * n)
    steep = torch.logspace(0, -9, n, dtype=torch.float64)
    apart = full.clone()
    apart[: n // 2, n // 2 :] = apart[n // 2 :, : n // 2] = 0
    tridiagonal = 2 * eye - torch.diag(ones[1:], 1) - torch.diag(ones[1:], -1)
    one_huge = full + 1e20 * torch.outer(ones == 1, torch.arange(n) == n - 1) * eye
    dead = full * torch.outer(steep, steep) * torch.outer(ramp > 1, ramp > 1)
    large = torch.finfo(dtype).max
    blocks = [
        0 * eye, eye, 1e-30 * eye, torch.diag(ramp), torch.diag(ramp.flip(0)), tridiagonal, apart, eye + 1,
        torch.outer(ones, ones), torch.outer(ramp, ramp), torch.outer(ramp % 2, ramp % 2), dead, dead.flip(0, 1),
        full * torch.outer(steep, steep), one_huge, one_huge.flip(0, 1), 1e-41 * full,
        1.4e-45 * torch.outer(ones, ones), full * torch.outer(steep**2, steep**2), 1e37 * full / n, large / 1.5 * eye,
    ]  # fmt: skip
    return pack(torch.stack(blocks)).to(dtype)


@each_dtype
@pytest.mark.parametrize("n", [1, 2, 3, pytest.param(10, marks=slow), pytest.param(25, marks=slow)])
def test_special_blocks_give_the_right_finite_step(n: int, dtype: torch.dtype, device: str) -> None:
    V = special_blocks(n, dtype)
    m = torch.randn(len(V), n, generator=generator(n), dtype=torch.float64).to(dtype)
    (after,) = stepped(TritonKernel(), [still(V, m, damping=1e-8)], device)
    assert after.x.isfinite().all()
    assert after.second_moment.equal(V[:, None])

    (after,) = stepped(TritonKernel(), [still(V, m, damping=1.0)], device)
    (exact,) = stepped_on_the_cpu(EighKernel(), [still(V.double(), m.double(), damping=1.0)])
    eps, trace = torch.finfo(dtype).eps, unpack(V.double(), n).diagonal(dim1=1, dim2=2).sum(1)
    # Eigenvalues are known to ε‖V‖ and their roots, where they are near zero, to the root of that.
    unknown = (n * eps * trace).sqrt() + 16 * (n + 4) * eps
    error = (after.x.double() - exact.x)[:, 0].norm(dim=1) / (1e-3 * m.double().norm(dim=1))
    assert (error <= unknown).all()


@pytest.mark.parametrize("n", [2, 3, pytest.param(10, marks=slow)])
def test_any_finite_gradient_gives_a_finite_step(n: int, device: str) -> None:
    """From zeros on, through denormal and very large numbers: one block for each scale, three steps."""
    scales = torch.tensor([0.0, 1e-45, 1e-39, 1e-30, 1e-19, 1.0, 1e10, 1e17]).repeat_interleave(4)
    case = training(n, len(scales), torch.float32)
    g = case.grad * scales[:, None, None]
    g[::2, :, 0] = 0
    g[1::2, :, -1] = scales[1::2, None] * 1e-20
    case = replace(case, grad=g, m=torch.zeros_like(g), second_moment=torch.zeros_like(case.second_moment))
    for _ in range(3):
        (case,) = stepped(TritonKernel(), [case], device)
        for name in ("x", "m", "second_moment"):
            assert getattr(case, name).isfinite().all(), name


@pytest.mark.parametrize("n", [1, 2, 3])
def test_a_block_that_is_not_finite_spoils_no_other(n: int, device: str) -> None:
    case = with_amsgrad(training(n, 70, torch.float32))
    bad = copied(case)
    bad.grad[[3, 40]] = torch.tensor([torch.nan, torch.inf])[:, None, None]
    (good,), (spoilt,) = stepped(TritonKernel(), [case], device), stepped(TritonKernel(), [bad], device)
    others = [i for i in range(70) if i not in (3, 40)]
    for name in ("x", "m", "second_moment", "largest"):
        assert getattr(spoilt, name)[others].equal(getattr(good, name)[others]), name
    assert not spoilt.x[[3, 40]].isfinite().any()


@pytest.mark.parametrize("n", [1, 3])
def test_a_block_that_is_not_finite_stays_so_between_refreshes(n: int, device: str) -> None:
    case = with_basis(training(n, 40, torch.float32), refresh=True)
    case.second_moment[7] = torch.nan
    for refresh in (True, False):
        case.x[7] = 0  # a number again, so that the step has to say it
        (case,) = stepped(TritonKernel(), [replace(case, refresh=refresh)], device)
        assert case.x[7].isnan().all()
        assert case.x.isfinite().all(-1).sum() == 39


def test_amsgrad_maxima_are_kept_ascending_and_never_fall(device: str) -> None:
    case = with_amsgrad(training(3, 50, torch.float32))
    for i in range(3):
        (after,) = stepped(TritonKernel(), [replace(case, grad=training(3, 50, torch.float32, i).grad)], device)
        assert (after.largest >= case.largest).all()
        assert (after.largest.diff(dim=-1) >= 0).all()
        case = after


@pytest.mark.parametrize("path", ["new", "kept"])
def test_amsgrad_tells_equal_eigenvalues_apart(path: str, device: str) -> None:
    """Multiples of I, whose eigenvalues are equal to the last bit, beside maxima that are not."""
    V = pack(torch.tensor([0.0, 1.0, 2.0])[:, None, None] * torch.eye(3))
    largest = torch.tensor([0.5, 1.0, 1.5]).expand(3, 1, 3).contiguous()
    case = with_basis(replace(still(V, torch.ones(3, 3)), largest=largest), refresh=path == "new")
    (ours,), (exact,) = stepped(TritonKernel(), [case], device), stepped_on_the_cpu(EighKernel(), [case], torch.float64)
    assert ours.largest[:, 0].tolist() == [[0.5, 1.0, 1.5], [1.0, 1.0, 1.5], [2.0, 2.0, 2.0]]
    assert ours.largest.double().equal(exact.largest)
    # Which direction gets which maximum is arbitrary; together they get all of them.
    assert torch.allclose(ours.x.double().sort()[0], exact.x.sort()[0], rtol=1e-6)


# ---------------------------------------------------------------------------------------------- through the optimizers


def deviation(method: str, options: dict[str, object], steps: int, device: str) -> float:
    """The largest distance from the oracle on the way, in units of the largest distance from the start."""
    start = mixture()
    oracle = make_oracle(METHODS[method], options, start)
    params = [nn.Parameter(p.detach().to(device)) for p in start]
    optimizer = METHODS[method].cls(params, **METHODS[method].options, **options, backend="triton")
    origin, errors_, distances = oracle.x.copy(), [], []
    for row in gradients([tuple(p.shape) for p in start], steps):
        grads = [like_layout(np.asarray(values), param) for values, param in zip(row, start, strict=True)]
        oracle.step(flat(grads), np.ones(oracle.x.size, dtype=bool))
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad.to(device)
        optimizer.step()
        errors_.append(np.abs(flat([p.cpu() for p in params]) - oracle.x).max())
        distances.append(np.abs(oracle.x - origin).max())
    return float(max(errors_) / max(distances))


OPEN = SpectrumClip(final_lr=0.05, gamma=0.02)


@pytest.mark.parametrize("method", [pytest.param(name, marks=() if name == "amsgrad" else slow) for name in METHODS])
def test_every_method_follows_the_oracle(method: str, device: str) -> None:
    options = {"block_size": 3, "clip": OPEN, "refresh_every": 4, "weight_decay": 0.05, "lr": 0.05}
    assert deviation(method, options, 6, device) < 1e-8


@slow
@pytest.mark.parametrize("grouping", ["auto", "output", "chunk", "tensor", "diagonal", "joint", "indices"])
@pytest.mark.parametrize("method", METHODS)
def test_every_method_and_grouping_follows_the_oracle(method: str, grouping: str, device: str) -> None:
    cut = mixed_index_groups(18) if grouping == "indices" else grouping
    for refresh_every in (1, 3):
        options = {"grouping": cut, "block_size": 3, "refresh_every": refresh_every, "maximize": True}
        assert deviation(method, options, 20, device) < 1e-8


def test_half_precision_parameters_keep_float32_statistics(device: str) -> None:
    params = [nn.Parameter(dense(5, 2).detach().to(device, torch.bfloat16)) for _ in range(2)]
    for param, backend in zip(params, ("triton", "eigh"), strict=True):
        param.grad = torch.linspace(-1, 1, 10, device=device).view(5, 2).to(torch.bfloat16)
        optimizer = BlockAdam([param], block_size=3, backend=backend, lr=0.1, eps=1e-2)
        optimizer.step()
        assert optimizer.state[param]["second_moment"].dtype == torch.float32
    assert torch.allclose(params[0], params[1], atol=0, rtol=2**-7)


def test_no_block_steps_further_than_exact_arithmetic_allows(device: str) -> None:
    """One gradient a thousand times the others: see test_step_bound. c lr for β₁ = 0.9, β₂ = 0.999, uncorrected."""
    n, blocks, lr = 3, 200, 1e-3
    g = generator(5)
    param = nn.Parameter(torch.zeros(blocks * n, device=device))
    options = {"grouping": "chunk", "block_size": n, "bias_correction": False, "backend": "triton"}
    optimizer = BlockAdam([param], lr=lr, **options)
    for t in range(1, 7):
        before = param.detach().clone()
        param.grad = (torch.randn(blocks * n, generator=g) * (1e3 if t == 3 else 1)).to(device)
        optimizer.step()
        longest = (param.detach() - before).view(-1, n).double().norm(dim=1).max().item()
        weights = [(0.1 * 0.9**age) ** 2 / (1e-3 * 0.999**age) for age in range(t)]
        assert longest <= 2 * lr * sum(weights) ** 0.5, f"step {t}"


# -------------------------------------------------------------- what steps must agree with, as in test_equivalences


def walked(make: Callable[[list[nn.Parameter]], Optimizer], start: list[Tensor], grads: list[list[Tensor]]) -> Tensor:
    """[steps, coordinates] in float64 from `start` on, on the device of its tensors; back on the CPU."""
    params = [nn.Parameter(tensor.clone()) for tensor in start]
    optimizer, path = make(params), []
    for row in grads:
        for param, grad in zip(params, row, strict=True):
            param.grad = grad.clone()
        optimizer.step()
        path.append(torch.cat([param.detach().flatten() for param in params]))
    return torch.stack(path).cpu()


def drawn(shapes: Sequence[tuple[int, ...]], steps: int, device: str) -> tuple[list[Tensor], list[list[Tensor]]]:
    """A start and correlated gradients in float64."""
    rows = [[torch.from_numpy(np.array(g)).to(device) for g in row] for row in gradients(shapes, steps)]
    return [dense(*shape).detach().to(device) for shape in shapes], rows


def assert_same_path(one: Tensor, other: Tensor, tolerance: float) -> None:
    scale = (other - other[0]).abs().max()
    assert scale > 0
    assert (one - other).abs().max() <= tolerance * scale


@pytest.mark.parametrize(
    ("ours", "theirs", "options"),
    [
        (BlockAdam, torch.optim.Adam, {"lr": 0.01, "betas": (0.8, 0.7), "eps": 1e-4, "amsgrad": True}),
        pytest.param(
            BlockAdamW, torch.optim.AdamW, {"lr": 0.01, "eps": 1e-4, "weight_decay": 0.3, "maximize": True}, marks=slow
        ),
        pytest.param(BlockAdam, torch.optim.Adam, {"lr": 0.01, "eps": 1e-8, "weight_decay": 0.1}, marks=slow),
        pytest.param(BlockRMSprop, torch.optim.RMSprop, {"lr": 0.01, "alpha": 0.9, "eps": 1e-4}, marks=slow),
        pytest.param(BlockAdagrad, torch.optim.Adagrad, {"lr": 0.1, "eps": 1e-16, "weight_decay": 0.1}, marks=slow),
    ],
)
def test_unit_blocks_equal_torch(ours: Any, theirs: Any, options: dict[str, Any], device: str) -> None:
    start, grads = drawn([(5, 3), (2, 2, 3), (4,), ()], 6, device)
    found = walked(lambda p: ours(p, **options, grouping="diagonal", backend="triton"), start, grads)
    assert_same_path(found, walked(lambda p: theirs(p, **options), start, grads), 1e-12)


@pytest.mark.parametrize("amsgrad", [False, pytest.param(True, marks=slow)], ids=["adabound", "amsbound"])
def test_unit_blocks_with_a_clip_equal_adabound(amsgrad: bool, device: str) -> None:
    """See test_equivalences for what ε must be."""
    start, grads = drawn([(5, 3), (4,)], 12, device)
    options = {"lr": 0.01, "betas": (0.9, 0.9), "eps": 1e-12, "weight_decay": 0.1}
    bounds = {"final_lr": 0.02, "gamma": 0.05}
    same = {**options, "amsgrad": amsgrad, "grouping": "diagonal", "backend": "triton"}
    expected = walked(
        lambda p: AdaBound(p, **options, **bounds, ams_bound=amsgrad, weight_decouple=False, foreach=False),
        start,
        grads,
    )
    found = walked(lambda p: BlockAdam(p, **same, clip=SpectrumClip(**bounds)), start, grads)
    assert_same_path(found, expected, 1e-8)
    assert (walked(lambda p: BlockAdam(p, **same), start, grads) - expected).abs().max() > 1e-3


@pytest.mark.parametrize("shapes", [[(2,), (1,), ()], pytest.param([(3, 2), (3,), ()], marks=slow)], ids=["4", "10"])
def test_joint_is_one_dense_inverse_root(shapes: list[tuple[int, ...]], device: str) -> None:
    """Against (V̂^{1/2} + δ I)^{-1} m solved as a linear system."""
    eps, lr = 1e-2, 0.01
    start, grads = drawn(shapes, 6, device)
    x = torch.cat([tensor.flatten() for tensor in start]).cpu()
    n = len(x)
    m, V, expected = torch.zeros(n).double(), torch.zeros(n, n).double(), []
    for t, row in enumerate(grads, start=1):
        g = torch.cat([grad.flatten() for grad in row]).cpu()
        m, V = 0.9 * m + 0.1 * g, 0.99 * V + 0.01 * torch.outer(g, g)
        spectrum, basis = torch.linalg.eigh(V / (1 - 0.99**t))
        root = basis @ spectrum.clamp(min=0).sqrt().diag() @ basis.T
        x = x - lr * torch.linalg.solve(root + eps * torch.eye(n).double(), m / (1 - 0.9**t))
        expected.append(x)
    options = {"lr": lr, "betas": (0.9, 0.99), "eps": eps, "grouping": "joint", "backend": "triton"}
    assert_same_path(walked(lambda p: BlockAdam(p, **options), start, grads), torch.stack(expected), 1e-7)


@pytest.mark.parametrize(
    ("n", "options"),
    [
        (2, {"clip": SpectrumClip(final_lr=0.05, gamma=0.02), "weight_decay": 0.1}),
        (2, {"refresh_every": 3, "maximize": True}),
        pytest.param(5, {"clip": SpectrumClip(final_lr=0.05, gamma=0.02), "weight_decay": 0.1}, marks=slow),
        pytest.param(6, {"refresh_every": 3, "maximize": True}, marks=slow),
    ],
)
def test_rotating_a_block_rotates_its_path(n: int, options: dict[str, Any], device: str) -> None:
    Q = torch.linalg.qr(torch.randn(n, n, generator=generator(n), dtype=torch.float64))[0].to(device)
    (x,), grads = drawn([(n,)], 8, device)

    def make(params: list[nn.Parameter]) -> Optimizer:
        return BlockAdam(params, **options, eps=1e-2, grouping="tensor", backend="triton")

    found = walked(make, [Q @ x], [[Q @ g for g in row] for row in grads])
    assert_same_path(found, walked(make, [x], grads) @ Q.T.cpu(), 1e-9)


# ------------------------------------------------------------------------------------------------ which blocks it takes


class OfAnother(InverseRoot):
    """A user's own."""


def test_it_takes_blocks_of_up_to_64_under_the_papers_function_where_triton_launches(device: str) -> None:
    kernel, there = TritonKernel(), torch.device(device)
    for n in (1, 64):
        for dtype in (torch.float32, torch.float64):
            assert kernel.takes(Batch(n, dtype, there, INVERSE_ROOT))
    for batch in (
        Batch(65, torch.float32, there, INVERSE_ROOT),
        Batch(10, torch.float16, there, INVERSE_ROOT),
        Batch(10, torch.float32, there, OfAnother()),
        Batch(10, torch.float32, torch.device("meta"), INVERSE_ROOT),
    ):
        assert not kernel.takes(batch)


def test_auto_gives_gpu_blocks_to_triton_and_cpu_blocks_to_numba(monkeypatch: pytest.MonkeyPatch) -> None:
    for interpreted, there in ((False, "cuda"), (False, "xpu"), (True, "cuda"), (True, "cpu"), (False, "cpu")):
        monkeypatch.setattr(work, "INTERPRETED", interpreted)
        chosen = get_kernel("auto").kernel_for(Batch(10, torch.float32, torch.device(there), INVERSE_ROOT))
        assert chosen.name == ("numba" if there == "cpu" else "eigh" if interpreted else "triton")


def test_auto_gives_gpu_blocks_to_eigh_where_triton_cannot_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """`import triton` raises, whatever is missing."""
    for module in ("work", "step", "eigensolver"):
        monkeypatch.delitem(sys.modules, f"blockadapt.kernels.gpu.{module}")
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.setattr(kernel_module, "_work", lru_cache(kernel_module._work.__wrapped__))
    for there, name in (("cuda", "eigh"), ("xpu", "eigh"), ("cpu", "numba")):
        batch = Batch(10, torch.float32, torch.device(there), INVERSE_ROOT)
        assert get_kernel("auto").kernel_for(batch).name == name


def test_memory_that_is_not_the_tensors_own_is_refused(device: str) -> None:
    case = on(device, with_basis(with_amsgrad(training(3, 40, torch.float32)), refresh=True))
    segment = case.segment()
    place, batch = segment.place, case.batch
    broken = {
        "second_moment": {"second_moment": case.second_moment[:, :, :5]},
        "x": {"x": case.x[:1].expand(case.x.shape)},
        "m": {"m": torch.zeros_like(case.x, dtype=torch.float64)},
        "largest": {"largest": torch.zeros(case.largest.shape, device="meta")},
        "basis": {"basis": case.basis[:1]},
        "eigenvalues": {"eigenvalues": case.eigenvalues.repeat_interleave(2)[::2]},
        "offset": {"offset": -1},
    }
    before = bits(on("cpu", case))
    for name, change in broken.items():
        with pytest.raises(ValueError, match=f"TritonKernel: `{name}` must be"):
            TritonKernel().prepare(batch, [segment._replace(place=replace(place, **change))])
    for grad in (case.grad[:20], case.grad.double(), case.grad.to("meta")):
        with pytest.raises(ValueError, match="TritonKernel: `grad` must be"):
            TritonKernel().prepare(batch, [segment._replace(grad=grad.clone())])
    assert bits(on("cpu", case)) == before


def test_asked_for_by_name_without_the_package_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch_module, "find_spec", lambda package: None)
    with pytest.raises(ImportError, match="must be one whose package triton is installed, got 'triton'"):
        get_kernel("triton")


# ---------------------------------------------------------------------------------------- numbers that the device knows


@pytest.mark.parametrize("path", ["plain", "amsgrad, new basis", "kept basis"])
def test_terms_on_the_device_give_the_bits_of_those_that_the_host_knows(path: str, device: str) -> None:
    cases = [on(device, PATHS[path](training(3, 20 + i, torch.float32, i))) for i in range(2)]
    expected = stepped_on_the_cpu(TritonKernel(), cases)
    segments = [case.segment() for case in cases]
    for i, (segment, case) in enumerate(zip(segments, cases, strict=True)):
        terms = segment.coefficients.terms
        known = Coefficients.of(
            torch.tensor(term, dtype=torch.float64, device=device) if (position + i) % 2 else term
            for position, term in enumerate(terms)
        )
        segments[i] = segment._replace(coefficients=known)
        assert case.batch == cases[0].batch
    take_(TritonKernel(), {cases[0].batch: segments})
    assert [bits(on("cpu", case)) for case in cases] == [bits(on("cpu", case)) for case in expected]


@pytest.mark.cuda
@pytest.mark.skipif(not GPU, reason="there is no GPU")
def test_a_step_is_captured_and_replayed() -> None:
    """Ten steps, of which the last seven are replays of one capture, against ten that are not captured."""
    results = []
    for captured in (False, True):
        torch.manual_seed(0)
        param = nn.Parameter(torch.randn(40, 30, device="cuda"))
        lr = torch.full((), 0.01, device="cuda")
        optimizer = BlockAdam([param], lr=lr, on_nonfinite="propagate", capturable=captured)
        grads = torch.randn(10, 40, 30, device="cuda")
        param.grad = torch.zeros_like(param)
        for grad in grads[:3]:
            param.grad.copy_(grad)
            optimizer.step()
        step = optimizer.step
        if captured:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                optimizer.step()
            step = graph.replay
        for grad in grads[3:]:
            param.grad.copy_(grad)
            lr.mul_(0.9)
            step()
        results.append(param.detach().cpu())
        assert int(optimizer.state[param]["step"]) == 10
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-6)
