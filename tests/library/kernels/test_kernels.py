"""The fast kernel against the reference: accuracy by kind of block, every path through it, and what trouble does."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from blockadapt.kernels import Batch, Descent, Kernel, Place, Segment
from blockadapt.kernels import eigh as eigh_module
from blockadapt.kernels.cpu.kernel import NumbaKernel
from blockadapt.kernels.eigh import EighKernel
from blockadapt.kernels.layout import MAX_TILED
from blockadapt.moments import SecondMoment, unpack
from blockadapt.spectrum import INVERSE_ROOT, UNBOUNDED, Spectrum
from support.accuracy import (
    NEVER_REACHED,
    RESOLUTION,
    ROWS,
    Errors,
    Listed,
    assert_as_accurate,
    compared,
    is_worse,
    listed,
    truth_of,
)
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
    kept_basis,
    pack,
    represented,
    roots,
    step_,
    stepped,
    still,
    take_,
    training,
    with_amsgrad,
    with_basis,
)

EPS64 = torch.finfo(torch.float64).eps
SIZES = [1, 2, 3, 4, 5, 8, 10, 16, 17, 25, 33, 48, 64]
KINDS = [
    "typical", "wide", "graded", "gradedup", "rank1", "rank3", "zero", "huge", "tiny", "cond1e4", "cond1e8", "cond1e12",
    "rising",
]  # fmt: skip
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])


# ------------------------------------------------------------------------------------------------------------ accuracy


@pytest.mark.parametrize("kernel", [EighKernel(), NumbaKernel()], ids=lambda kernel: kernel.name)
def test_eigenvalues_count_as_no_less_than_the_resolution_allows(kernel: Kernel) -> None:
    n, resolution, damping = 6, 0.2, 1e-4
    h = roots("typical", 40, n, generator(n))
    V, m = h @ h.mT / h.shape[2], h[:, :, 0].contiguous()
    segment = still(pack(V), m, damping)
    (after,) = stepped(kernel, [replace(segment, spectrum=segment.spectrum._replace(resolution=resolution))])
    raised = 0
    for x, average, block in zip(after.x[:, 0].numpy(), m.numpy(), V.numpy(), strict=True):
        eigenvalues, U = np.linalg.eigh(block)
        floor = resolution * eigenvalues.max()
        raised += int((eigenvalues < floor).sum())
        s = 1e-3 / (np.sqrt(np.maximum(eigenvalues, floor)) + damping)
        np.testing.assert_allclose(-x, U @ (s * (U.T @ average)), rtol=1e-11, atol=1e-13)
    assert 0 < raised < 40 * n


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_float32_is_as_accurate_as_eigh_in_float32(kind: str, n: int) -> None:
    """To a factor of two in the median and four in the tail: both round every entry of V at each reflection."""
    assert_as_accurate(*compared(kind, n))


@pytest.mark.parametrize("n", [4, 10, 25, 64])
@pytest.mark.parametrize("kind", KINDS)
def test_float32_is_as_accurate_where_eigenvalues_are_asked_for(kind: str, n: int) -> None:
    assert_as_accurate(*compared(kind, n, upper=NEVER_REACHED))


def test_the_table_of_accuracy_has_every_kind_of_block() -> None:
    rows = [(*row, resolution) for row in ROWS for resolution in (RESOLUTION, 0.0)]
    assert [figure[:3] for figure in listed()] == rows


@pytest.mark.parametrize("figure", listed(), ids=lambda figure: "-".join(map(str, figure[:3])))
def test_float32_is_as_accurate_as_the_table_says(figure: Listed) -> None:
    """As `eigh` where the figures are not bold; and everywhere of the magnitude that is listed."""
    errors = compared(*figure[:3])
    seen = Errors.of(errors.ours)
    assert is_worse(seen, Errors.of(errors.theirs)) is figure.is_bold
    if not figure.is_bold:
        assert_as_accurate(*errors)
    assert seen.median <= 3 * figure.numba.median
    assert seen.tail <= 3 * figure.numba.tail


def test_blocks_like_wilkinson_s_are_as_accurate_as_by_lapack_s_qr() -> None:
    """`torch.linalg.eigh` divides and conquers above 25 rows, and that takes them apart almost without rounding."""
    linalg = pytest.importorskip("scipy.linalg", reason="calls LAPACK's ssyev")
    V, m = (t.float() for t in blocks_of("wilkinson", 128, 64))
    truth, ceiling = truth_of(V, m)
    eigenvalues, U = linalg.eigh(unpack(V[:1], 64)[0].numpy(), driver="ev")
    assert U.dtype == np.float32
    by_qr = torch.from_numpy((m.numpy() @ U * (1e-3 / (np.sqrt(eigenvalues) + 1e-4))) @ U.T)
    segment = still(V, m)
    (after,) = stepped(NumbaKernel(), [replace(segment, spectrum=segment.spectrum._replace(upper=NEVER_REACHED))])
    ours, theirs = ((x.double() - truth).norm(dim=1) / truth.norm(dim=1) for x in (-after.x[:, 0], by_qr))
    assert not is_worse(Errors.of(ours.numpy()), Errors.of(theirs.numpy()))
    assert (ours.numpy() <= ceiling).all()


def longdouble_orthogonal(count: int, n: int, rng: np.random.Generator) -> np.ndarray:
    """Products of n random Householder reflections, orthogonal to the last bit of long double."""
    Q = np.broadcast_to(np.eye(n, dtype=np.longdouble), (count, n, n)).copy()
    for _ in range(n):
        u = rng.standard_normal((count, n)).astype(np.longdouble)
        u /= np.sqrt((u * u).sum(-1, keepdims=True))
        Q -= 2 * (Q * u[:, None, :]).sum(-1)[:, :, None] * u[:, None, :]
    return Q


@pytest.mark.parametrize("condition", [1e0, 1e2, 1e4, 1e8])
@pytest.mark.parametrize("n", [1, 2, 3, 5, 10, 17, 25, 40])
def test_float64_is_as_accurate_as_eigh_in_float64(n: int, condition: float) -> None:
    rng = np.random.default_rng((n, int(condition)))
    count = 96 if n <= 17 else 32
    Q = longdouble_orthogonal(count, n, rng)
    eigenvalues = np.asarray(condition, np.longdouble) ** -rng.random((count, n)).astype(np.longdouble)
    V = torch.from_numpy(((Q * eigenvalues[:, None, :])[:, :, None, :] * Q[:, None, :, :]).sum(-1).astype(np.float64))
    m = rng.standard_normal((count, n))
    damping = 1e-4
    s = np.longdouble(1e-3) / (np.sqrt(eigenvalues) + np.longdouble(damping))
    turned = (Q * m.astype(np.longdouble)[:, :, None]).sum(1)
    truth = (Q * (s * turned)[:, None, :]).sum(-1)

    def median(kernel: Kernel) -> float:
        (after,) = stepped(kernel, [still(pack(V), torch.from_numpy(m), damping)])
        x = -after.x[:, 0].numpy().astype(np.longdouble)
        return float(np.median(np.sqrt(((x - truth) ** 2).sum(-1) / (truth**2).sum(-1))))

    assert median(NumbaKernel()) <= 2 * median(EighKernel()) + 8 * EPS64


# -------------------------------------------------------------------------------------------- special blocks, never NaN


def dense(n: int, seed: int = 0) -> Tensor:
    h = torch.randn(n, 2 * n, generator=generator(n, seed), dtype=torch.float64)
    return h @ h.T / (2 * n)


def outer(v: Tensor) -> Tensor:
    return v[:, None] * v[None, :]


def dead_first(n: int) -> Tensor:
    """The first unit is dead and the rest strongly graded."""
    scale = torch.logspace(0, -9, n, dtype=torch.float64)
    V = dense(n) * outer(scale)
    V[0], V[:, 0] = 0, 0
    return V


def decoupled(n: int) -> Tensor:
    V = dense(n)
    V[: n // 2, n // 2 :] = 0
    V[n // 2 :, : n // 2] = 0
    return V


def tridiagonal(n: int) -> Tensor:
    ones = torch.ones(max(n - 1, 0), dtype=torch.float64)
    return 2 * torch.eye(n, dtype=torch.float64) - torch.diag(ones, 1) - torch.diag(ones, -1)


def single(n: int, value: float, at: int = 0) -> Tensor:
    V = dense(n)
    V[at, at] += value
    return V


def ones(n: int) -> Tensor:
    return torch.ones(n, dtype=torch.float64)


def ramp(n: int) -> Tensor:
    return torch.arange(1, n + 1, dtype=torch.float64)


SPECIAL: dict[str, Callable[[int], Tensor]] = {
    "zeros": lambda n: torch.zeros(n, n, dtype=torch.float64),
    "identity": lambda n: torch.eye(n, dtype=torch.float64),
    "identity, tiny": lambda n: 1e-30 * torch.eye(n, dtype=torch.float64),
    "diagonal": lambda n: torch.diag(ramp(n)),
    "diagonal, descending": lambda n: torch.diag(ramp(n).flip(0)),
    "tridiagonal": tridiagonal,
    "decoupled": decoupled,
    "two values": lambda n: torch.eye(n, dtype=torch.float64) + outer(ones(n)),
    "constant": lambda n: outer(ones(n)),
    "constant gradient": lambda n: outer(ramp(n) / n),
    "alternating zeros": lambda n: outer(ramp(n) * (ramp(n) % 2)),
    "dead first": dead_first,
    "dead last": lambda n: dead_first(n).flip(0, 1),
    "graded by 1e-18": lambda n: dense(n) * outer(torch.logspace(0, -9, n, dtype=torch.float64)),
    "one huge entry, first": lambda n: single(n, 1e20),
    "one huge entry, last": lambda n: single(n, 1e20, -1),
    "1e-20 beside 1": lambda n: outer(torch.where(ramp(n) % 2 == 0, 1e-20, 1.0)),
    "denormal": lambda n: 1e-41 * dense(n),
    "least denormal": lambda n: 1.4e-45 * outer(ones(n)),
    "partly denormal": lambda n: dense(n) * outer(torch.logspace(0, -20, n, dtype=torch.float64)),
    "1e37": lambda n: 1e37 * dense(n) / n,
}


WELL_CONDITIONED = {"zeros", "identity", "identity, tiny", "diagonal", "diagonal, descending", "two values", "denormal"}


@each_dtype
@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 10, 25, 64])
@pytest.mark.parametrize("name", SPECIAL)
def test_special_blocks_give_the_right_finite_step(name: str, n: int, dtype: torch.dtype) -> None:
    V = pack(SPECIAL[name](n)).to(dtype).expand(40, -1)
    m = torch.randn(40, n, generator=generator(n), dtype=torch.float64).to(dtype)
    trace = unpack(V[:1].double(), n).diagonal(dim1=1, dim2=2).sum().item()
    (after,) = stepped(NumbaKernel(), [still(V, m, damping=1e-8)])
    assert after.x.isfinite().all()
    assert after.second_moment.equal(V[:, None])

    damping = max(0.1 * trace**0.5, 1e-18)
    (after,) = stepped(NumbaKernel(), [still(V, m, damping)])
    (exact,) = stepped(EighKernel(), [still(V.double(), m.double(), damping)])
    error = (after.x.double() - exact.x).norm(dim=-1) / (1e-3 / damping * m.double().norm(dim=1, keepdim=True))
    eps = torch.finfo(dtype).eps
    # Eigenvalues are known to ε‖V‖ and their roots, where they are near zero, to the root of that.
    unknown = 0 if name in WELL_CONDITIONED else (n * eps * trace) ** 0.5 / damping
    assert error.max() <= unknown + 16 * (n + 4) * eps


@each_dtype
@pytest.mark.parametrize("n", [2, 3, 10, 64])
def test_any_finite_gradient_gives_a_finite_step(n: int, dtype: torch.dtype) -> None:
    """From zeros on, through denormal and very large numbers, the moments and the step stay finite."""
    for scale in (0.0, 1e-45, 1e-39, 1e-30, 1e-19, 1.0, 1e10, 1e17):
        segment = training(n, 33, dtype)
        g = (segment.grad * scale).to(dtype)
        g[::2, :, 0] = 0
        g[1::2, :, -1] = scale * 1e-20
        segment = replace(segment, grad=g, m=torch.zeros_like(g), second_moment=torch.zeros_like(segment.second_moment))
        kernel = NumbaKernel()
        for _ in range(3):
            (segment,) = stepped(kernel, [segment])
            for name in ("x", "m", "second_moment"):
                assert getattr(segment, name).isfinite().all(), (name, scale)


@each_dtype
@pytest.mark.parametrize("n", [2, 5, 10])
def test_a_second_moment_whose_trace_overflows_gives_a_finite_step(n: int, dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max / 1.5
    V = pack(largest * torch.eye(n, dtype=torch.float64)).to(dtype).expand(8, -1)
    assert V.isfinite().all()
    (after,) = stepped(NumbaKernel(), [still(V, torch.ones(8, n, dtype=dtype))])
    assert after.x.isfinite().all()


@each_dtype
@pytest.mark.parametrize("n", [1, 2, 3, 10])
def test_a_block_that_is_not_finite_spoils_no_other(n: int, dtype: torch.dtype) -> None:
    segment = training(n, 70, dtype)
    bad = copied(segment)
    bad.grad[[3, 40]] = torch.tensor([torch.nan, torch.inf], dtype=dtype)[:, None, None]
    (good,), (spoilt,) = stepped(NumbaKernel(), [segment]), stepped(NumbaKernel(), [bad])
    others = [i for i in range(70) if i not in (3, 40)]
    assert spoilt.x[others].equal(good.x[others])
    assert spoilt.second_moment[others].equal(good.second_moment[others])
    assert not spoilt.x[[3, 40]].isfinite().any()


# ------------------------------------------------------------------------------ one step, every path, against the truth


each_path = pytest.mark.parametrize("path", PATHS)


@each_dtype
@each_path
@pytest.mark.parametrize("n", [1, 2, 3, 7, 25])
def test_every_path_takes_the_step_of_the_reference(n: int, path: str, dtype: torch.dtype) -> None:
    segment = PATHS[path](training(n, 45, dtype))
    (ours,) = stepped(NumbaKernel(), [segment])
    (exact,) = stepped(EighKernel(), [segment], torch.float64)
    assert_close(ours, exact, close_enough(n, dtype))
    assert ours.grad.equal(segment.grad)


@each_dtype
@each_path
@pytest.mark.parametrize(("minor", "turned"), [(9, False), (9, True), (45, True), (15, True), (40, True)])
def test_no_path_reads_or_writes_beyond_its_segment(path: str, minor: int, turned: bool, dtype: torch.dtype) -> None:
    """Every tensor of the segment is the middle of a larger one, whose ends are NaN before and after.

    Where blocks lie side by side (`turned`), a tile is read in one piece, in two, or lane by lane.
    """
    segment = PATHS[path](training(5, 3 * minor if turned else 45, dtype, minor=minor))
    guarded, views = {}, {}
    for name in TENSORS:
        tensor = getattr(segment, name)
        if tensor is not None:
            guarded[name] = tensor.new_full((tensor.numel() + 2 * 64,), torch.nan)
            views[name] = guarded[name][64:-64].view(tensor.shape)
            if turned and name in ("x", "grad", "m"):
                views[name] = guarded[name][64:-64].view(tensor.mT.shape).mT
            views[name].copy_(tensor)
    inside = replace(segment, **views)
    step_(NumbaKernel(), [inside])
    (expected,) = stepped(NumbaKernel(), [segment])
    assert bits(inside) == bits(expected)
    for name, memory in guarded.items():
        assert memory[:64].isnan().all(), name
        assert memory[-64:].isnan().all(), name


@each_dtype
@pytest.mark.parametrize("kernels", [(EighKernel, NumbaKernel), (NumbaKernel, EighKernel), (NumbaKernel, NumbaKernel)])
@pytest.mark.parametrize("n", [1, 2, 5])
def test_a_basis_that_one_kernel_found_serves_another(
    n: int, kernels: tuple[Callable[[], Kernel], Callable[[], Kernel]], dtype: torch.dtype
) -> None:
    """Segments of one call, none of which fills its tiles, with coefficients of their own."""
    first, second = kernels[0](), kernels[1]()
    segments = [with_basis(with_amsgrad(training(n, count, dtype)), refresh=True) for count in (1, 33, 70, 31)]
    segments = [replace(s, second=SecondMoment(0.9 + 0.01 * i, 0.1, 0.3)) for i, s in enumerate(segments)]
    exact = [copied(segment, torch.float64) for segment in segments]
    for kernel, refresh in ((first, True), (second, False), (second, False)):
        segments = stepped(kernel, [replace(s, refresh=refresh) for s in segments])
        exact = stepped(EighKernel(), [replace(s, refresh=refresh) for s in exact])
    for ours, theirs in zip(segments, exact, strict=True):
        assert_close(ours, theirs, 3 * close_enough(n, dtype), ("x", "m", "second_moment", "largest"))


@each_dtype
@pytest.mark.parametrize("kernel", [EighKernel, NumbaKernel])
@pytest.mark.parametrize("n", [1, 2, 5])
def test_a_block_that_is_not_finite_stays_so_between_refreshes(
    n: int, kernel: Callable[[], Kernel], dtype: torch.dtype
) -> None:
    segment = with_basis(training(n, 40, dtype), refresh=True)
    segment.second_moment[7] = torch.nan
    for refresh in (True, False, False):
        segment.x[7] = 0  # a number again, so that the step has to say it
        (segment,) = stepped(kernel(), [replace(segment, refresh=refresh)])
        assert segment.x[7].isnan().all()
        assert segment.x.isfinite().all(-1).sum() == 39


@each_dtype
@pytest.mark.parametrize("path", ["plain", "kept basis"])
def test_a_kernel_that_has_stepped_before_steps_as_a_new_one(path: str, dtype: torch.dtype) -> None:
    """The same places with other gradients and coefficients; then other places; then the first again."""
    kernel = NumbaKernel()
    segments = [PATHS[path](training(5, count, dtype, minor=3)) for count in (33, 45)]
    others = [replace(PATHS[path](training(5, 33, dtype, 7)), second=SecondMoment(0.5, 0.5, 1.0))]
    here, elsewhere = ([s.segment() for s in group] for group in (segments, others))
    for step, sequence in enumerate([here, here, elsewhere, here]):
        grads = [torch.randn(s.grad.shape, dtype=dtype).mul_(step + 1) for s in sequence]
        coefficients = sequence[0].coefficients._replace(descent=Descent(1.0, 0.0, 1 - 0.1 * step))
        now = [s._replace(grad=grad, coefficients=coefficients) for s, grad in zip(sequence, grads, strict=True)]
        cases = [
            replace(case, **{name: getattr(s.place, name) for name in TENSORS if name != "grad"}, grad=s.grad,
                    **coefficients._asdict())
            for case, s in zip(segments if sequence is here else others, now, strict=True)
        ]  # fmt: skip
        expected = stepped(NumbaKernel(), cases)
        take_(kernel, {now[0].place.batch: now})
        for case, after in zip(cases, expected, strict=True):
            assert bits(case) == bits(after)


def test_a_work_list_is_not_taken_for_that_of_the_same_places_in_another_order() -> None:
    cases = [training(5, 40, torch.float32, seed) for seed in (1, 2)]
    left, right = ([copied(case).segment() for case in cases] for _ in range(2))
    for kernel, second in ((kept := NumbaKernel(), left), (kept, left[::-1]), *[(NumbaKernel(), right)] * 2):
        take_(kernel, {second[0].place.batch: second})
    for one, other in zip(left, right, strict=True):
        assert torch.equal(one.place.x, other.place.x)


def test_a_work_list_is_not_taken_for_that_of_other_places_that_live() -> None:
    """As many places, of the same size, beside those of the step before."""
    kernel = NumbaKernel()
    pairs = [[training(5, 33, torch.float32, i, j) for j in range(2)] for i in range(2)]
    segments = [[case.segment() for case in pair] for pair in pairs]
    for pair, inputs in zip(pairs, segments, strict=True):
        expected = stepped(NumbaKernel(), pair)
        take_(kernel, {inputs[0].place.batch: inputs})
        for case, after in zip(pair, expected, strict=True):
            assert bits(case) == bits(after)


def test_a_kernel_keeps_no_memory_of_places_alive() -> None:
    kernel = NumbaKernel()
    segment = training(5, 40, torch.float32).segment()
    take_(kernel, {segment.place.batch: [segment]})
    memory = weakref.ref(segment.place.second_moment)
    del segment
    gc.collect()
    assert memory() is None


@each_dtype
@pytest.mark.parametrize(("n", "k"), [(2, 1), (3, 1), (5, 3), (10, 7), (25, 24)])
@pytest.mark.parametrize("path", ["plain", "without m", "amsgrad", "new basis", "kept basis"])
def test_a_short_run_moves_as_the_reference_does(n: int, k: int, path: str, dtype: torch.dtype) -> None:
    segment = PATHS[path](training(n, 45, dtype, k=k))
    (ours,) = stepped(NumbaKernel(), [segment])
    (exact,) = stepped(EighKernel(), [segment], torch.float64)
    assert_close(ours, exact, close_enough(n, dtype))


@each_dtype
@pytest.mark.parametrize("count", [1, 15, 16, 17, 31, 32, 33, 64, 65, 500])
def test_any_number_of_blocks_gives_each_block_its_own_step(count: int, dtype: torch.dtype) -> None:
    """Lanes do not depend on their neighbours, to the last bit."""
    segment = with_amsgrad(training(6, count, dtype))
    (together,) = stepped(NumbaKernel(), [segment])
    for number in {0, count // 2, count - 1}:
        alone = {name: t[number : number + 1] for name in TENSORS if (t := getattr(segment, name)) is not None}
        (after,) = stepped(NumbaKernel(), [replace(segment, **alone)])
        for name in ("x", "m", "second_moment", "largest"):
            assert getattr(after, name)[0].equal(getattr(together, name)[number]), (name, number)


@each_dtype
@pytest.mark.parametrize("counts", [(1, 1), (31, 1), (5, 40, 3), (32, 32), (7, 11, 13, 17, 19), (64, 1, 64)])
def test_segments_that_share_tiles_move_as_each_would_alone(counts: tuple[int, ...], dtype: torch.dtype) -> None:
    segments = [
        replace(
            training(4, count, dtype, i, k=4 - i % 2),
            descent=Descent(1.0, 0.01 * i, 1.0 - 0.1 * i),
            spectrum=Spectrum(1e-2 * (i + 1), 1.0, 1e-4),
        )
        for i, count in enumerate(counts)
    ]
    for after, segment in zip(stepped(NumbaKernel(), segments), segments, strict=True):
        (alone,) = stepped(NumbaKernel(), [segment])
        assert bits(after) == bits(alone)


@each_dtype
def test_segments_of_every_kind_mix_in_one_step(dtype: torch.dtype) -> None:
    segments = [make(training(n, 20 + n, dtype, n, i)) for n in (1, 2, 3, 8) for i, make in enumerate(PATHS.values())]
    for after, segment in zip(stepped(NumbaKernel(), segments), segments, strict=True):
        (alone,) = stepped(NumbaKernel(), [segment])
        assert bits(after) == bits(alone)


def transposed(segment: Case) -> Case:
    """The same blocks with their coordinates strided, so that neighbouring blocks lie side by side in memory."""
    turned = {
        name: t.permute(0, 2, 1).contiguous().permute(0, 2, 1)
        for name in ("x", "grad", "m")
        if (t := getattr(segment, name)) is not None
    }
    return replace(segment, **turned)


@each_dtype
@pytest.mark.parametrize("k", [5, 3])
@pytest.mark.parametrize("minor", [15, 32, 40, 70])
@pytest.mark.parametrize("path", ["plain", "without m", "amsgrad", "kept basis"])
def test_strides_do_not_matter(path: str, minor: int, k: int, dtype: torch.dtype) -> None:
    segment = PATHS[path](training(5, 3 * minor, dtype, k=k, minor=minor))
    strided = transposed(copied(segment))
    assert strided.x.stride(1) == 1
    step_(NumbaKernel(), [strided])
    (expected,) = stepped(NumbaKernel(), [segment])
    assert bits(strided) == bits(expected)


@each_dtype
@pytest.mark.parametrize("n", [2, 3, 10, 33, 64])
@pytest.mark.parametrize("kind", ["typical", "wide", "rank1", "rank3", "cond1e8", "huge", "tiny"])
def test_a_new_basis_is_orthogonal_and_gives_back_v(kind: str, n: int, dtype: torch.dtype) -> None:
    V, m = (t.to(dtype) for t in blocks_of(kind, 40, n))
    (after,) = stepped(NumbaKernel(), [with_basis(still(V, m), refresh=True)])
    U = kept_basis(after)
    eps = torch.finfo(dtype).eps
    assert (U @ U.mT - torch.eye(n, dtype=torch.float64)).norm(dim=(1, 2)).max() <= 4 * n * eps
    dense_V = unpack(V.double(), n)
    error = (represented(after) - dense_V).norm(dim=(1, 2)) / dense_V.norm(dim=(1, 2))
    assert error.max() <= 4 * n * eps


@each_dtype
@pytest.mark.parametrize("n", [1, 2, 3, 10])
def test_amsgrad_maxima_are_kept_ascending_and_never_fall(n: int, dtype: torch.dtype) -> None:
    segment = with_amsgrad(training(n, 50, dtype))
    for i in range(5):
        (after,) = stepped(NumbaKernel(), [replace(segment, grad=training(n, 50, dtype, i).grad)])
        assert (after.largest >= segment.largest).all()
        assert (after.largest.diff(dim=-1) >= 0).all()
        segment = after


@each_dtype
@pytest.mark.parametrize("kernel", [EighKernel(), NumbaKernel()], ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("path", ["amsgrad", "amsgrad, new basis", "amsgrad, kept basis"])
def test_equal_eigenvalues_each_get_a_maximum_of_their_own(path: str, kernel: Kernel, dtype: torch.dtype) -> None:
    """V = 4 I and Σ̂ = (1, 9, 16): the directions get 4, 9 and 16 in some order, none of them twice."""
    V = pack(4 * torch.eye(3, dtype=dtype)).expand(40, -1)
    segment = PATHS[path](still(V, torch.ones(40, 3, dtype=dtype), damping=1e-4))
    largest = torch.tensor([1.0, 9.0, 16.0], dtype=dtype).expand(40, 1, 3).clone()
    (after,) = stepped(kernel, [replace(segment, largest=largest)])
    expected = torch.tensor([4.0, 9.0, 16.0], dtype=dtype)
    assert after.largest.equal(expected.expand(40, 1, 3))
    moves = (1e-3 / (expected.sqrt() + 1e-4)).sort()[0]
    torch.testing.assert_close(-after.x.sort(-1, descending=True)[0], moves.expand(40, 1, 3))


@each_dtype
def test_entries_far_below_the_largest_still_count(dtype: torch.dtype) -> None:
    """λ = (1, 1e-14, 1): s(1e-14) = lr / (1e-7 + δ), where s(0) would be a hundred times that."""
    V = pack(torch.diag(torch.tensor([1.0, 1e-14, 1.0], dtype=torch.float64))).to(dtype).expand(3, -1)
    (after,) = stepped(NumbaKernel(), [still(V, torch.ones(3, 3, dtype=dtype), damping=1e-9)])
    expected = 1e-3 / (torch.tensor([1.0, 1e-14, 1.0], dtype=dtype).sqrt() + 1e-9)
    torch.testing.assert_close(-after.x[:, 0], expected.expand(3, 3))


@pytest.mark.parametrize(("n", "taken"), [(1, True), (MAX_TILED, True), (MAX_TILED + 1, False)])
def test_blocks_of_up_to_64_are_taken(n: int, taken: bool) -> None:
    assert MAX_TILED == 64
    assert NumbaKernel().takes(Batch(n, torch.float32, torch.device("cpu"), INVERSE_ROOT)) == taken


# ---------------------------------------------------------------------------------------------------------- in trouble


@each_dtype
def test_large_blocks_go_through_eigh_beside_small_ones(dtype: torch.dtype) -> None:
    segments = [training(n, 3, dtype) for n in (3, MAX_TILED, MAX_TILED + 1, 80)]
    ours = stepped(NumbaKernel(), segments)
    theirs = stepped(EighKernel(), segments)
    exact = stepped(EighKernel(), segments, torch.float64)
    for a, b, c in zip(ours, theirs, exact, strict=True):
        assert_close(a, c, close_enough(a.n, dtype))
        assert (bits(a) == bits(b)) == (a.n > MAX_TILED)


@pytest.mark.parametrize("kernel", [NumbaKernel, EighKernel])
def test_a_large_block_that_lapack_cannot_solve_leaves_all_blocks_as_they_were(
    kernel: Callable[[], Kernel], monkeypatch: pytest.MonkeyPatch
) -> None:
    segments = [training(n, 3, torch.float32) for n in (3, 70)]
    before = [bits(segment) for segment in segments]
    original = torch.linalg.eigh

    def failing(V: Tensor) -> Any:
        if V.shape[-1] == 70:
            raise torch.linalg.LinAlgError("did not converge")
        return original(V)

    monkeypatch.setattr(eigh_module.torch.linalg, "eigh", failing)
    with pytest.raises(torch.linalg.LinAlgError, match="did not converge"):
        step_(kernel(), segments)
    assert [bits(segment) for segment in segments] == before


@pytest.mark.parametrize("outcome", ["raises", "NaN"])
def test_the_reference_solves_in_float64_what_lapack_cannot_in_float32(
    outcome: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = torch.linalg.eigh

    def failing(V: Tensor) -> Any:
        if V.dtype == torch.float64:
            return original(V)
        if outcome == "raises":
            raise torch.linalg.LinAlgError("did not converge")
        eigenvalues, basis = original(V)
        eigenvalues[2], basis[2] = torch.nan, torch.nan
        return eigenvalues, basis

    monkeypatch.setattr(eigh_module.torch.linalg, "eigh", failing)
    segment = training(6, 5, torch.float32)
    (after,) = stepped(EighKernel(), [segment])
    (exact,) = stepped(EighKernel(), [segment], torch.float64)
    assert_close(after, exact, close_enough(6, torch.float32))


@pytest.fixture
def nan_block() -> Tensor:
    """g gᵀ of a vector with zeros: finite, yet LAPACK's `eigh` in float32 gave NaN for it, without an error."""
    lower = {
        (0, 0): 1.3740416682055112e-13, (1, 0): -1.1604160286751014e-13, (1, 1): 9.80003093107619e-14,
        (3, 0): -3.952621108020693e-13, (3, 1): 3.338096942959168e-13, (3, 3): 1.1370260202120397e-12,
        (8, 0): 4.3221765684726965e-13, (8, 1): -3.650197006634104e-13, (8, 3): -1.2433338863679366e-12,
        (8, 8): 1.3595812843603117e-12, (9, 0): -8.457573833983711e-13, (9, 1): 7.142653439193292e-13,
        (9, 3): 2.4329381825144436e-12, (9, 8): -2.6604094361531994e-12, (9, 9): 5.205850507616905e-12,
    }  # fmt: skip
    V = torch.zeros(10, 10)
    for (row, column), value in lower.items():
        V[row, column] = V[column, row] = value
    return V


@pytest.mark.parametrize("kernel", [NumbaKernel, EighKernel])
@pytest.mark.parametrize("damping", [1e-4, 1e-8])
def test_a_block_that_made_float32_lapack_return_nan_is_solved(
    kernel: Callable[[], Kernel], damping: float, nan_block: Tensor
) -> None:
    V = pack(nan_block).expand(3, -1)
    m = nan_block[9].sign() * nan_block.diagonal().sqrt() * torch.tensor([[1.0], [-2.0], [0.5]])  # what g gᵀ comes with
    (after,) = stepped(kernel(), [still(V, m, damping)])
    (exact,) = stepped(EighKernel(), [still(V.double(), m.double(), damping)])
    torch.testing.assert_close(after.x.double(), exact.x, rtol=1e-4, atol=1e-4 * exact.x.abs().max().item())


def test_every_tensor_of_a_segment_is_known_to_these_tests() -> None:
    tensors = {field.name for field in fields(Place) if "Tensor" in str(field.type)}
    assert {*tensors, "grad"} == set(TENSORS)
    assert set(Segment._fields) == {"place", "grad", "refresh", "coefficients", "tally"}


def test_without_clipping_the_largest_step_size_is_finite_in_float32() -> None:
    assert np.isfinite(np.float32(UNBOUNDED))
