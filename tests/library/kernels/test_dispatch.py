"""Which kernel moves which blocks; parts that a user brings; and nothing written before all are ready."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from blockadapt import BlockAdam, BlockRMSprop, Kernel, SpectralFunction, SpectrumClip
from blockadapt.kernels import TERMS, Batch, Change, Coefficients, Descent, Dispatcher, Segment, get_kernel
from blockadapt.kernels.cpu.kernel import _work
from blockadapt.kernels.eigh import EighKernel, solves
from blockadapt.moments import FirstMoment, SecondMoment
from blockadapt.spectrum import INVERSE_ROOT, Spectrum
from support.contract_cases import everything

CPU = torch.device("cpu")


class Selective(EighKernel):
    """Takes blocks of one size only, and remembers what it was asked."""

    name = "selective"

    def __init__(self, n: int) -> None:
        self.n = n
        self.prepared: list[int] = []

    def takes(self, batch: Batch) -> bool:
        return batch.n == self.n

    def prepare(self, batch: Batch, segments: Sequence[Segment]) -> Change:
        assert {segment.place.n for segment in segments} == {batch.n}
        self.prepared.append(batch.n)
        return super().prepare(batch, segments)


class Failing(Selective):
    """Cannot make its step ready."""

    def prepare(self, batch: Batch, segments: Sequence[Segment]) -> Change:
        raise ArithmeticError("cannot")


def network() -> nn.Sequential:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    net(torch.randn(4, 6)).square().sum().backward()
    return net


# The dispatcher ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n", "dtype", "name"),
    [
        (10, torch.float32, "numba"),
        (64, torch.float64, "numba"),
        (65, torch.float32, "eigh"),
        (1, torch.float32, "numba"),
        (10, torch.float16, "eigh"),
    ],
)
def test_the_fast_kernel_takes_blocks_of_up_to_64_and_eigh_the_rest(n: int, dtype: torch.dtype, name: str) -> None:
    assert get_kernel("auto").kernel_for(Batch(n, dtype, CPU, INVERSE_ROOT)).name == name
    assert get_kernel("eigh").kernel_for(Batch(n, dtype, CPU, INVERSE_ROOT)).name == "eigh"


def test_the_fast_kernel_takes_a_function_that_has_a_formula_for_lanes() -> None:
    class Constant(SpectralFunction):
        lanes = staticmethod(lambda eigenvalue, lr, damping: lr)

    for function, name in ((Constant(), "numba"), (SpectralFunction(), "eigh")):
        assert get_kernel("auto").kernel_for(Batch(10, torch.float32, CPU, function)).name == name


def test_without_numba_eigh_takes_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("blockadapt.kernels.cpu.kernel._work", lambda: None)
    assert get_kernel("auto").kernel_for(Batch(10, torch.float32, CPU, INVERSE_ROOT)).name == "eigh"


def test_where_numba_may_not_compile_eigh_takes_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """`NUMBA_DISABLE_JIT` is for debugging one's own code."""
    monkeypatch.setattr("numba.config.DISABLE_JIT", 1)
    _work.cache_clear()
    try:
        assert get_kernel("auto").kernel_for(Batch(10, torch.float32, CPU, INVERSE_ROOT)).name == "eigh"
    finally:
        _work.cache_clear()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_the_default_dtype_of_torch_changes_nothing(dtype: torch.dtype) -> None:
    """There is no `eigh` in half precision, and nobody asks for one."""
    solves.cache_clear()
    torch.set_default_dtype(dtype)
    try:
        assert get_kernel("auto").kernel_for(Batch(65, torch.float32, CPU, INVERSE_ROOT)).name == "eigh"
    finally:
        torch.set_default_dtype(torch.float32)
        solves.cache_clear()


def test_on_another_device_eigh_takes_over() -> None:
    batch = Batch(10, torch.float32, torch.device("meta"), INVERSE_ROOT)
    assert get_kernel("numba").kernel_for(batch).name == "eigh"


def test_a_users_kernel_is_asked_first_and_eigh_takes_what_it_leaves() -> None:
    kernel = Selective(5)
    net, twin = network(), network()
    mine, plain = BlockAdam(net.parameters(), backend=kernel), BlockAdam(twin.parameters(), backend="eigh")
    mine.step()
    plain.step()
    assert kernel.prepared == [5]
    assert plan_sizes(mine) == {3, 5}
    assert all(map(torch.equal, net.parameters(), twin.parameters()))


def plan_sizes(optimizer: BlockAdam) -> set[int]:
    return {n for unit in optimizer.units() for n in unit.cut.sizes}


@pytest.mark.parametrize("again", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))], ids=["deepcopy", "pickle"])
def test_a_copy_keeps_the_users_kernel(again: object) -> None:
    optimizer = again(BlockAdam(network().parameters(), backend=Selective(5)))  # type: ignore[operator]
    assert [kernel.name for kernel in optimizer.kernels.kernels] == ["selective", "eigh", "host"]


@pytest.mark.parametrize("others", ["numba", "eigh"])
def test_nothing_is_written_if_any_kernel_cannot_make_its_step_ready(others: str) -> None:
    optimizer = BlockAdam(network().parameters(), backend="eigh")
    optimizer.step()
    optimizer.kernels = Dispatcher([Failing(3), *get_kernel(others).kernels])
    before = everything(optimizer)
    with pytest.raises(ArithmeticError, match="cannot"):
        optimizer.step()
    assert everything(optimizer) == before


@pytest.mark.parametrize("backend", ["auto", "eigh", "numba"])
@pytest.mark.parametrize("n", [1, 2, 7])
def test_a_kernel_decomposes_what_it_is_given(backend: str, n: int) -> None:
    roots = torch.randn(40, n, n, dtype=torch.float64)
    V = roots @ roots.mT
    rows, columns = torch.tril_indices(n, n)
    eigenvalues, basis = get_kernel(backend).decompose(V[:, rows, columns], n, INVERSE_ROOT)
    assert eigenvalues.shape == (40, n)
    torch.testing.assert_close((basis * eigenvalues.unsqueeze(1)) @ basis.mT, V)
    torch.testing.assert_close(basis @ basis.mT, torch.eye(n, dtype=torch.float64).expand(40, n, n))


@pytest.mark.parametrize("backend", ["auto", "eigh", "numba"])
def test_no_blocks_decompose_into_none(backend: str) -> None:
    eigenvalues, basis = get_kernel(backend).decompose(torch.empty(0, 6), 3, INVERSE_ROOT)
    assert (eigenvalues.shape, basis.shape) == ((0, 3), (0, 3, 3))


def test_the_contract_cannot_be_left_half_done() -> None:
    with pytest.raises(TypeError, match="abstract"):
        Kernel()  # type: ignore[abstract]


# Coefficients ------------------------------------------------------------------------------------------------------


def test_every_coefficient_has_one_column_by_its_own_name() -> None:
    coefficients = Coefficients(
        Descent(1.0, 2.0, 3.0), FirstMoment(4.0, 5.0), SecondMoment(6.0, 7.0, 8.0), Spectrum(*map(float, range(9, 15)))
    )
    named = dict(zip(TERMS, coefficients.terms, strict=True))
    for stage, terms in coefficients._asdict().items():
        for name, value in terms._asdict().items():
            assert named.pop(f"{stage}.{name}") == value
    assert not named
    assert Coefficients.of(coefficients.terms) == coefficients


# Spectral functions ------------------------------------------------------------------------------------------------


class FourthRoot(SpectralFunction):
    """f(λ) = α / (λ^{1/4} + δ)."""

    def torch(self, eigenvalues: Tensor, lr: Tensor, damping: Tensor) -> Tensor:
        return lr / (eigenvalues**0.25 + damping)


class BlockRMSpropFourthRoot(BlockRMSprop):
    spectral_function = FourthRoot()


@pytest.mark.parametrize("clip", [None, SpectrumClip(final_lr=0.05, gamma=0.1)], ids=["unclipped", "clipped"])
def test_a_users_spectral_function_is_what_is_applied(clip: SpectrumClip | None) -> None:
    """Two steps with one dense block of 4, by hand."""
    weight = nn.Parameter(torch.zeros(4, dtype=torch.float64))
    optimizer = BlockRMSpropFourthRoot([weight], lr=0.1, alpha=0.5, eps=0.01, clip=clip)
    x, V = torch.zeros(4, dtype=torch.float64), torch.zeros(4, 4, dtype=torch.float64)
    for step in (1, 2):
        g = torch.randn(4, dtype=torch.float64)
        weight.grad = g.clone()
        optimizer.step()
        V = 0.5 * V + 0.5 * torch.outer(g, g)
        eigenvalues, U = torch.linalg.eigh(V)
        floor = torch.finfo(torch.float64).eps / 2 * eigenvalues.max()
        s = 0.1 / (eigenvalues.clamp(min=floor) ** 0.25 + 0.01)
        if clip is not None:
            s = s.clamp(*clip.bounds(step))
        x -= U @ (s * (U.T @ g))
        torch.testing.assert_close(weight.detach(), x)


def test_without_a_formula_for_lanes_blocks_go_through_eigh() -> None:
    batch = Batch(4, torch.float32, CPU, FourthRoot())
    assert get_kernel("numba").kernel_for(batch).name == "eigh"


def test_a_subclass_of_the_papers_function_is_not_taken_for_it() -> None:
    class Halved(type(INVERSE_ROOT)):  # type: ignore[misc]
        def torch(self, eigenvalues: Tensor, lr: Tensor, damping: Tensor) -> Tensor:
            return super().torch(eigenvalues, lr, damping) / 2  # type: ignore[no-any-return]

    assert get_kernel("numba").kernel_for(Batch(4, torch.float32, CPU, Halved())).name == "eigh"
