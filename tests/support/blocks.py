"""Blocks of every kind, segments that a test can change piece by piece, and steps on them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import mpmath
import numpy as np
import torch
from torch import Tensor

from blockadapt.kernels import Batch, Coefficients, Descent, Dispatcher, Kernel, Place, Segment
from blockadapt.kernels.eigh import EighKernel
from blockadapt.kernels.layout import by_block, write_by_block_
from blockadapt.kernels.reflections import basis_of, eigenvalues_length, reflections_length, reflections_of
from blockadapt.moments import FirstMoment, SecondMoment, packed_length, unpack
from blockadapt.spectrum import INVERSE_ROOT, SpectralFunction, Spectrum

TENSORS = ("x", "grad", "m", "second_moment", "largest", "basis", "eigenvalues")
PLAIN = Descent(sign=1.0, coupled=0.0, shrink=1.0)
STILL = SecondMoment(decay=1.0, weight=0.0, correction=1.0)
"""V stays as it is."""


def generator(*seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(int(np.random.default_rng(seed).integers(2**31)))


def roots(kind: str, blocks: int, n: int, g: torch.Generator) -> Tensor:
    """[blocks, n, width] matrices whose h hᵀ / width are second moments of this kind."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    def logspace(first: float, last: float) -> Tensor:
        return torch.logspace(first, last, n, dtype=torch.float64)

    if kind.startswith("cond"):
        orthogonal = torch.linalg.qr(normal(blocks, n, n))[0]
        return orthogonal * logspace(0, -np.log10(float(kind[4:])) / 2)
    return {
        "typical": lambda: normal(blocks, n, 50) * torch.exp(normal(blocks, n, 1)),
        "wide": lambda: normal(blocks, n, 50) * torch.exp(3 * normal(blocks, n, 1)),
        "graded": lambda: normal(blocks, n, 3 * n) * logspace(0, -1.3)[:, None],
        "gradedup": lambda: normal(blocks, n, 3 * n) * logspace(-1.3, 0)[:, None],
        "falling": lambda: normal(blocks, n, 3 * n) * logspace(0, -8)[:, None],
        "rising": lambda: normal(blocks, n, 3 * n) * logspace(-8, 0)[:, None],
        "first1e4": lambda: normal(blocks, n, 50) * torch.tensor([1e4, *[1.0] * (n - 1)], dtype=torch.float64)[:, None],
        "wilkinson": lambda: torch.linalg.cholesky(wilkinson(n)).expand(blocks, n, n) * n**0.5,
        "rank1": lambda: normal(blocks, n, 1),
        "rank3": lambda: normal(blocks, n, 3),
        "zero": lambda: torch.zeros(blocks, n, 1, dtype=torch.float64),
        "huge": lambda: normal(blocks, n, 50) * 1e5,
        "tiny": lambda: normal(blocks, n, 50) * 1e-10,
    }[kind]()


def wilkinson(n: int) -> Tensor:
    """Wilkinson's W⁺, tridiagonal: |i − (n − 1)/2| beside ones, shifted until its smallest eigenvalue is 0.1."""
    ones = torch.ones(max(n - 1, 0), dtype=torch.float64)
    W = torch.diag((torch.arange(n, dtype=torch.float64) - (n - 1) / 2).abs()) + ones.diag(1) + ones.diag(-1)
    return W + (0.1 - torch.linalg.eigvalsh(W)[0]) * torch.eye(n, dtype=torch.float64)


def pack(V: Tensor) -> Tensor:
    rows, columns = torch.tril_indices(V.shape[-1], V.shape[-1])
    return V[..., rows, columns]


def blocks_of(kind: str, count: int, n: int, *seed: int) -> tuple[Tensor, Tensor]:
    """Packed V [count, n(n+1)/2] of this kind, and vectors m [count, n] as the same gradients would give, float64."""
    g = generator(n, count, *map(ord, kind), *seed)
    h = roots(kind, count, n, g)
    if kind == "zero":
        return pack(h @ h.mT), torch.randn(count, n, generator=g, dtype=torch.float64)
    m = h @ torch.randn(count, h.shape[2], 1, generator=g, dtype=torch.float64)
    return pack(h @ h.mT / h.shape[2]), m.squeeze(-1)


@dataclass(frozen=True)
class Case:
    """A segment with all of its place and coefficients side by side, so that a test can replace any of it."""

    n: int
    x: Tensor
    grad: Tensor
    m: Tensor | None
    second_moment: Tensor
    largest: Tensor | None
    basis: Tensor | None
    eigenvalues: Tensor | None
    refresh: bool
    descent: Descent
    first: FirstMoment
    second: SecondMoment
    spectrum: Spectrum
    function: SpectralFunction = INVERSE_ROOT

    @property
    def num_blocks(self) -> int:
        return self.x.shape[0] * self.x.shape[1]

    @property
    def batch(self) -> Batch:
        return self.segment().place.batch

    def segment(self) -> Segment:
        """What a kernel is given: on the same memory."""
        kept = (self.second_moment, self.largest, self.basis, self.eigenvalues)
        coefficients = Coefficients(self.descent, self.first, self.second, self.spectrum)
        return Segment(Place(self.n, self.x, self.m, *kept, self.function), self.grad, self.refresh, coefficients)


def still(V: Tensor, m: Tensor, damping: float = 1e-4) -> Case:
    """A segment that leaves packed V [count, …] alone and applies its spectral function to m [count, n]."""
    count, n = m.shape
    return Case(
        n=n, x=torch.zeros(count, 1, n, dtype=V.dtype), grad=m.clone().view(count, 1, n), m=None,
        second_moment=V.clone().view(count, 1, -1), largest=None, basis=None, eigenvalues=None, refresh=True,
        descent=PLAIN, first=FirstMoment(0.0, 1.0), second=STILL, spectrum=Spectrum(1e-3, 1.0, damping),
    )  # fmt: skip


def training(n: int, count: int, dtype: torch.dtype, *seed: int, k: int | None = None, minor: int = 1) -> Case:
    """A segment in the midst of training, every number arbitrary but plausible."""
    g = generator(n, count, *seed)
    k = n if k is None else k
    shape = (count // minor, minor)
    h = torch.randn(count, n, 4 * n, generator=g, dtype=torch.float64)
    h *= torch.exp(torch.randn(count, n, 1, generator=g, dtype=torch.float64))
    V = h @ h.mT / (4 * n)
    V[:, k:] = V[:, :, k:] = 0  # coordinates that do not exist have never had a gradient

    def normal() -> Tensor:
        return torch.randn(*shape, k, generator=g, dtype=torch.float64).to(dtype)

    return Case(
        n=n, x=normal(), grad=normal(), m=normal(), largest=None,
        second_moment=pack(V).to(dtype).view(*shape, packed_length(n)), basis=None, eigenvalues=None, refresh=True,
        descent=Descent(-1.0, 0.0, 0.999), first=FirstMoment(0.9, 0.41),
        second=SecondMoment(0.99, 0.01, 0.3), spectrum=Spectrum(1e-2, 0.3, 1e-4),
    )  # fmt: skip


def with_amsgrad(segment: Case) -> Case:
    """Maxima of which about half are above the eigenvalues that follow."""
    *shape, _ = segment.second_moment.shape
    eigenvalues = torch.linalg.eigvalsh(unpack(segment.second_moment.reshape(-1, packed_length(segment.n)), segment.n))
    factors = 0.5 + torch.rand(eigenvalues.shape, generator=generator(segment.n), dtype=eigenvalues.dtype)
    return replace(segment, largest=(eigenvalues * factors).clamp(min=0).sort(-1)[0].reshape(*shape, segment.n))


def with_basis(segment: Case, refresh: bool) -> Case:
    """A basis kept from an earlier V, or none yet."""
    n, count = segment.n, segment.num_blocks
    basis, eigenvalues = (
        segment.x.new_zeros(count * width) for width in (reflections_length(n), eigenvalues_length(n))
    )
    if not refresh and n > 1:
        older = unpack(segment.second_moment.reshape(count, -1).double(), n)
        found, U = torch.linalg.eigh(older)
        write_by_block_(basis, n, reflections_of(U).to(segment.x.dtype))
        write_by_block_(eigenvalues, n, found.clamp(min=0).to(segment.x.dtype))
    return replace(segment, basis=basis, eigenvalues=eigenvalues, refresh=refresh)


def copied(segment: Case, dtype: torch.dtype | None = None) -> Case:
    """The segment on memory of its own."""
    tensors = {name: t.clone() for name in TENSORS if (t := getattr(segment, name)) is not None}
    return replace(segment, **{name: t.to(dtype or t.dtype) for name, t in tensors.items()})


def stepped(kernel: Kernel, segments: Sequence[Case], dtype: torch.dtype | None = None) -> list[Case]:
    """Copies of the segments after one step of the kernel."""
    segments = [copied(segment, dtype) for segment in segments]
    step_(kernel, segments)
    return segments


def step_(kernel: Kernel, segments: Sequence[Case]) -> None:
    """One step of the kernel, in place."""
    batches: dict[Batch, list[Segment]] = {}
    for segment in segments:
        batches.setdefault(segment.batch, []).append(segment.segment())
    take_(kernel, batches)


def take_(kernel: Kernel, batches: Mapping[Batch, Sequence[Segment]]) -> None:
    """One step as an optimizer takes it; what the kernel does not take goes through `eigh`."""
    for change in Dispatcher([kernel, EighKernel()]).prepare(batches):
        change.write_()


def bits(segment: Case) -> dict[str, bytes]:
    """Every tensor of the segment, to compare exactly; NaN equals itself."""
    return {name: t.contiguous().numpy().tobytes() for name in TENSORS if (t := rows_of(segment, name)) is not None}


def rows_of(segment: Case, name: str) -> Tensor | None:
    """A tensor of the segment by block, [num_blocks, width]."""
    tensor = getattr(segment, name)
    if tensor is None or name not in ("basis", "eigenvalues"):
        return tensor if tensor is None else tensor.reshape(segment.num_blocks, -1)
    return by_block(tensor, segment.n, segment.num_blocks)


def assert_close(a: Case, b: Case, tolerance: float, names: Sequence[str] = TENSORS) -> None:
    """Relative to the norm of each block's tensor; bases by the matrix that they stand for."""
    for name in names:
        left, right = rows_of(a, name), rows_of(b, name)
        assert (left is None) == (right is None), name
        if left is None or (name == "eigenvalues" and a.refresh) or (name == "basis" and a.n == 1):
            continue
        if name == "basis" and a.refresh:
            left, right = represented(a), represented(b)
        left, right = (t.reshape(a.num_blocks, -1).double() for t in (left, right))
        error = (left - right).norm(dim=1) / right.norm(dim=1).clamp(min=1e-300)
        assert error.max() <= tolerance, f"{name}: {error.max():.2e} > {tolerance:.2e}"


def represented(segment: Case) -> Tensor:
    """U Λ Uᵀ of the kept basis."""
    eigenvalues = rows_of(segment, "eigenvalues")
    assert eigenvalues is not None
    U = kept_basis(segment)
    return (U * eigenvalues.unsqueeze(1).double()) @ U.mT


def kept_basis(segment: Case) -> Tensor:
    """U [num_blocks, n, n], in float64."""
    reflections = rows_of(segment, "basis")
    assert reflections is not None
    return basis_of(reflections.double(), segment.n)


PATHS: dict[str, Callable[[Case], Case]] = {
    "plain": lambda s: s,
    "without m": lambda s: replace(s, m=None, first=FirstMoment(0.0, 1.0)),
    "clipped": lambda s: replace(s, spectrum=s.spectrum._replace(lower=3e-3, upper=2e-2)),
    "closed clip": lambda s: replace(s, spectrum=s.spectrum._replace(lower=1e-2, upper=1e-2)),
    "coupled": lambda s: replace(s, descent=Descent(1.0, 0.1, 1.0)),
    "without m, coupled": lambda s: replace(s, m=None, first=FirstMoment(0.0, 1.0), descent=Descent(-1.0, 0.1, 1.0)),
    "shrinking": lambda s: replace(s, descent=Descent(1.0, 0.0, 0.9)),
    "bias corrected": lambda s: replace(s, spectrum=s.spectrum._replace(correction=1e-3, lr=0.1)),
    "average": lambda s: replace(s, second=SecondMoment(0.5, 0.5, 1.0)),
    "coarse": lambda s: replace(s, spectrum=s.spectrum._replace(resolution=0.1)),
    "amsgrad": with_amsgrad,
    "amsgrad, clipped": lambda s: with_amsgrad(replace(s, spectrum=s.spectrum._replace(lower=3e-3, upper=2e-2))),
    "new basis": lambda s: with_basis(s, refresh=True),
    "kept basis": lambda s: with_basis(s, refresh=False),
    "amsgrad, new basis": lambda s: with_basis(with_amsgrad(s), refresh=True),
    "amsgrad, kept basis": lambda s: with_basis(with_amsgrad(s), refresh=False),
    "coarse, amsgrad, kept basis": lambda s: with_basis(with_amsgrad(PATHS["coarse"](s)), refresh=False),
}


def close_enough(n: int, dtype: torch.dtype) -> float:
    return 100 * (n + 4) * torch.finfo(dtype).eps


def exact_eigh(V: Tensor) -> tuple[Tensor, Tensor]:
    """What `torch.linalg.eigh` would give if it rounded only its answer: solved with 40 digits, block by block."""
    solved = [_solved(tuple(map(tuple, block.tolist()))) for block in V.reshape(-1, *V.shape[-2:])]
    eigenvalues, bases = [found for found, _ in solved], [basis for _, basis in solved]
    return torch.tensor(eigenvalues, dtype=V.dtype).view(V.shape[:-1]), torch.tensor(bases, dtype=V.dtype).view_as(V)


@cache  # a block of 10 takes 25 ms, and most paths of a step have the same V
def _solved(block: tuple[tuple[float, ...], ...]) -> tuple[list[float], list[list[float]]]:
    with mpmath.workdps(40):
        eigenvalues, basis = mpmath.eigsy(mpmath.matrix(block))
        return [float(each) for each in eigenvalues], [[float(each) for each in row] for row in basis.tolist()]
