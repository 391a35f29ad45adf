"""What the library must agree with: torch's optimizers, AdaBound, SGD, one dense matrix, itself seen another way."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pytorch_optimizer import AdaBound
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LinearLR, LRScheduler

from blockadapt import BlockAdaFom, BlockAdagrad, BlockAdam, BlockAdamW, BlockRMSprop, IndexGroups, SpectrumClip
from support.cases import (
    METHODS,
    PER_PARAMETER_GROUPINGS,
    Gradients,
    Options,
    blocks_of,
    dense,
    each_backend,
    flat,
    gradients,
)
from support.oracle import Array, Shape, explicit_blocks

STEPS = 40
OPEN = SpectrumClip(final_lr=0.05, gamma=0.02)
CLOSED = SpectrumClip(final_lr=0.05, gamma=300.0)
"""Closed from the first step on: γt > 200.5."""
CLOSING = SpectrumClip(final_lr=0.05, gamma=10.0)
"""Closed from step 21 on."""
LAST_OPEN_STEP = 20

Make = Callable[[list[Parameter]], Optimizer]
MakeScheduler = Callable[[Optimizer], LRScheduler]

each_method = pytest.mark.parametrize("method", METHODS)
diagonal_ways = pytest.mark.parametrize(
    "cut",
    [{"grouping": "diagonal"}, *({"grouping": name, "block_size": 1} for name in ("input", "output", "chunk"))],
    ids=lambda cut: "-".join(map(str, cut.values())),
)
SCHEDULERS: dict[str, MakeScheduler] = {
    "drops": lambda optimizer: LambdaLR(optimizer, lambda epoch: 0.3 ** (epoch // 13)),
    "cosine": lambda optimizer: CosineAnnealingLR(optimizer, T_max=STEPS),
    "warmup": lambda optimizer: LinearLR(optimizer, start_factor=0.1, total_iters=STEPS // 2),
}


def trajectory(
    make: Make,
    shapes: Sequence[Shape],
    grads: Gradients,
    make_scheduler: MakeScheduler | None = None,
    start: list[Parameter] | None = None,
) -> Array:
    """[steps, coordinates] from the start that `dense` gives, or from `start`, which moves."""
    params = start or [dense(*shape) for shape in shapes]
    optimizer = make(params)
    scheduler = make_scheduler(optimizer) if make_scheduler else None
    path = []
    for row in grads:
        for param, values in zip(params, row, strict=True):
            param.grad = torch.from_numpy(np.array(values)).to(param.dtype)
        optimizer.step()
        if scheduler:
            scheduler.step()
        path.append(flat(params))
    return np.stack(path)


def assert_same_path(one: Array, other: Array, tolerance: float) -> None:
    """Deviation on the whole way, relative to the longest distance between two points of the path."""
    scale = np.abs(other - other[0]).max()
    assert scale > 0
    assert np.abs(one - other).max() <= tolerance * scale


SHAPES: list[Shape] = [(5, 3), (2, 2, 3), (4,), ()]


# -------------------------------------------------------------------------------------------------------- block size 1

# The same formulas in another order of operations: a few units of 1e-16 a step.
SAME_FORMULA = 1e-12

TORCH_TWINS: dict[str, tuple[Callable[..., Optimizer], Callable[..., Optimizer], Options]] = {
    "adam": (BlockAdam, torch.optim.Adam, {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-4}),
    "adam-weight-decay": (BlockAdam, torch.optim.Adam, {"lr": 0.01, "eps": 1e-8, "weight_decay": 0.1}),
    "adam-maximize": (BlockAdam, torch.optim.Adam, {"lr": 0.01, "eps": 1e-4, "weight_decay": 0.1, "maximize": True}),
    "amsgrad": (BlockAdam, torch.optim.Adam, {"lr": 0.01, "betas": (0.8, 0.7), "eps": 1e-4, "amsgrad": True}),
    "adamw": (BlockAdamW, torch.optim.AdamW, {"lr": 0.01, "eps": 1e-4, "weight_decay": 0.3}),
    "adamw-amsgrad": (
        BlockAdamW,
        torch.optim.AdamW,
        {"lr": 0.01, "betas": (0.8, 0.7), "eps": 1e-4, "weight_decay": 0.3, "amsgrad": True, "maximize": True},
    ),
    "rmsprop": (BlockRMSprop, torch.optim.RMSprop, {"lr": 0.01, "alpha": 0.9, "eps": 1e-4}),
    "rmsprop-weight-decay": (
        BlockRMSprop,
        torch.optim.RMSprop,
        {"lr": 0.01, "eps": 1e-4, "weight_decay": 0.1, "maximize": True},
    ),
    "adagrad": (BlockAdagrad, torch.optim.Adagrad, {"lr": 0.1, "eps": 1e-16}),
    "adagrad-weight-decay": (BlockAdagrad, torch.optim.Adagrad, {"lr": 0.1, "eps": 1e-16, "weight_decay": 0.1}),
}


@each_backend
@diagonal_ways
@pytest.mark.parametrize("twin", TORCH_TWINS)
def test_unit_blocks_equal_torch(twin: str, cut: Options, backend: str) -> None:
    ours, theirs, options = TORCH_TWINS[twin]
    grads = gradients(SHAPES, STEPS)
    expected = trajectory(lambda params: theirs(params, **options), SHAPES, grads)
    found = trajectory(lambda params: ours(params, **options, **cut, backend=backend), SHAPES, grads)
    assert_same_path(found, expected, SAME_FORMULA)


@each_backend
def test_unit_blocks_equal_torch_under_a_schedule(backend: str) -> None:
    grads = gradients(SHAPES, STEPS)
    options = {"lr": 0.01, "eps": 1e-4, "weight_decay": 0.3}
    expected = trajectory(lambda p: torch.optim.AdamW(p, **options), SHAPES, grads, SCHEDULERS["cosine"])
    found = trajectory(
        lambda p: BlockAdamW(p, **options, grouping="diagonal", backend=backend), SHAPES, grads, SCHEDULERS["cosine"]
    )
    assert_same_path(found, expected, SAME_FORMULA)


@each_backend
def test_unit_blocks_equal_torch_in_float32(backend: str) -> None:
    """40 steps, each rounded to 6e-8 of a parameter of order one that travels 0.3 in all: 1e-5."""
    grads = gradients(SHAPES, STEPS)

    def start() -> list[Parameter]:
        return [Parameter(dense(*shape).detach().float()) for shape in SHAPES]

    expected = trajectory(lambda p: torch.optim.Adam(p, lr=0.01, eps=1e-4), SHAPES, grads, start=start())
    found = trajectory(
        lambda p: BlockAdam(p, lr=0.01, grouping="diagonal", backend=backend), SHAPES, grads, start=start()
    )
    assert_same_path(found, expected, 1e-5)


@each_backend
@pytest.mark.parametrize("scheduler", [None, *SCHEDULERS])
@pytest.mark.parametrize(("ours", "decoupled"), [(BlockAdam, False), (BlockAdamW, True)])
@pytest.mark.parametrize("amsgrad", [False, True], ids=["adabound", "amsbound"])
def test_unit_blocks_with_clip_equal_adabound(
    amsgrad: bool, ours: Callable[..., Optimizer], decoupled: bool, scheduler: str | None, backend: str
) -> None:
    """AdaBound has lr √(1 − β₂ᵗ) / (√(v + 1e-15) + ε) before its correction of m, so ε must vanish beside √v.

    Here v ≳ 1e-6, and the 1e-15 is worth 1e-9 at most. A coordinate whose gradient is always zero stays in both.
    """
    grads = gradients(SHAPES, STEPS)
    options = {"lr": 0.01, "betas": (0.9, 0.9), "eps": 1e-12, "weight_decay": 0.1}
    clip = SpectrumClip(final_lr=0.02, gamma=0.05)
    make_scheduler = SCHEDULERS[scheduler] if scheduler else None

    def adabound(params: list[Parameter]) -> Optimizer:
        bounds = {"final_lr": clip.final_lr, "gamma": clip.gamma, "ams_bound": amsgrad}
        return AdaBound(params, **options, **bounds, weight_decouple=decoupled, foreach=False)

    def clipped(params: list[Parameter]) -> Optimizer:
        return ours(params, **options, amsgrad=amsgrad, clip=clip, grouping="diagonal", backend=backend)

    expected = trajectory(adabound, SHAPES, grads, make_scheduler)
    assert_same_path(trajectory(clipped, SHAPES, grads, make_scheduler), expected, 1e-8)
    unclipped = {**options, "amsgrad": amsgrad, "grouping": "diagonal", "backend": backend}
    free = trajectory(lambda params: ours(params, **unclipped), SHAPES, grads, make_scheduler)
    assert np.abs(free - expected).max() > 1e-3, "the bounds were never met"


# --------------------------------------------------------------------------------------------------------- closed clip


def momentum_of(method: str) -> float:
    """β₁ by default."""
    return 0.0 if method in ("rmsprop", "adagrad") else 0.9


@each_backend
@pytest.mark.parametrize("grouping", ["auto", "joint", "diagonal"])
@each_method
def test_a_closed_clip_is_sgd_on_the_averaged_gradient(method: str, grouping: str, backend: str) -> None:
    case = METHODS[method]
    grads = gradients(SHAPES, STEPS)
    beta1, x, m = momentum_of(method), flat([dense(*shape) for shape in SHAPES]), 0.0
    expected = []
    for row in grads:
        m = beta1 * m + (1 - beta1) * np.concatenate([np.ravel(values) for values in row])
        x = x - CLOSED.final_lr * m
        expected.append(x)

    def closed(params: list[Parameter]) -> Optimizer:
        return case.cls(params, **case.options, weight_decay=0.0, clip=CLOSED, grouping=grouping, backend=backend)

    assert_same_path(trajectory(closed, SHAPES, grads), np.stack(expected), SAME_FORMULA)


@each_backend
@pytest.mark.parametrize("scheduler", [None, *SCHEDULERS])
@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize(("method", "beta1"), [("adam", 0.9), ("adam", 0.6), ("rmsprop", 0.0), ("adagrad", 0.0)])
def test_a_closed_clip_is_heavy_ball_sgd(
    method: str, beta1: float, maximize: bool, scheduler: str | None, backend: str
) -> None:
    """The heavy ball keeps m / (1 − β₁), so its lr is α* (1 − β₁). Its buffer holds no lr, so a schedule acts alike."""
    case = METHODS[method]
    grads = gradients(SHAPES, STEPS)
    options: Options = {"betas": (beta1, 0.999)} if method == "adam" else {}
    options |= {"lr": 0.003, "weight_decay": 0.1, "maximize": maximize}
    sgd = {"lr": CLOSED.final_lr * (1 - beta1), "momentum": beta1, "weight_decay": 0.1, "maximize": maximize}
    make_scheduler = SCHEDULERS[scheduler] if scheduler else None
    expected = trajectory(lambda params: torch.optim.SGD(params, **sgd), SHAPES, grads, make_scheduler)
    found = trajectory(
        lambda params: case.cls(params, **options, clip=CLOSED, backend=backend), SHAPES, grads, make_scheduler
    )
    assert_same_path(found, expected, SAME_FORMULA)


@each_backend
def test_a_closed_clip_leaves_decoupled_weight_decay_to_lr(backend: str) -> None:
    """x ← (1 − lr · decay) x − α* m."""
    param = dense(4, 3)
    x, param.grad = param.detach().clone(), torch.ones_like(param)
    BlockAdamW([param], lr=0.01, betas=(0.0, 0.999), weight_decay=0.5, clip=CLOSED, backend=backend).step()
    torch.testing.assert_close(param.detach(), 0.995 * x - CLOSED.final_lr)


@each_backend
@pytest.mark.parametrize("grouping", ["auto", "joint"])
def test_sgd_takes_over_at_the_step_that_closes_the_clip(grouping: str, backend: str) -> None:
    """From there on both walk together, given x and the momentum at that step."""
    grads = gradients(SHAPES, STEPS)
    params = [dense(*shape) for shape in SHAPES]
    clipped = BlockAdam(params, clip=CLOSING, grouping=grouping, backend=backend)
    m = [np.zeros(shape) for shape in SHAPES]
    for row in grads[:LAST_OPEN_STEP]:
        m = [0.9 * old + 0.1 * np.asarray(values) for old, values in zip(m, row, strict=True)]
    head = trajectory(lambda _: clipped, SHAPES, grads[:LAST_OPEN_STEP], start=params)
    twins = [Parameter(param.detach().clone()) for param in params]

    def heavy_ball(params: list[Parameter]) -> Optimizer:
        sgd = torch.optim.SGD(params, lr=CLOSING.final_lr * 0.1, momentum=0.9)
        for param, average in zip(params, m, strict=True):
            sgd.state[param]["momentum_buffer"] = torch.from_numpy(np.asarray(average / 0.1))
        return sgd

    expected = trajectory(heavy_ball, SHAPES, grads[LAST_OPEN_STEP:], start=twins)
    tail = trajectory(lambda _: clipped, SHAPES, grads[LAST_OPEN_STEP:], start=params)
    assert len(head) == LAST_OPEN_STEP
    assert_same_path(tail, expected, 1e-10)


@each_backend
@pytest.mark.parametrize("grouping", ["auto", "joint", "diagonal", "indices"])
@pytest.mark.parametrize("refresh_every", [1, 3])
@each_method
def test_a_closing_clip_frees_the_second_moment(method: str, grouping: str, refresh_every: int, backend: str) -> None:
    """What is left is the step count and, where the method averages gradients, m: SGD's state."""
    case = METHODS[method]
    params = [dense(5, 3), dense(4)]
    cut = IndexGroups([range(10), range(10, 19)]) if grouping == "indices" else grouping
    options = {"clip": CLOSING, "grouping": cut, "refresh_every": refresh_every, "backend": backend}
    optimizer = case.cls(params, **case.options, **options)

    def kept() -> int:
        return sum(value.numel() for state in optimizer.state.values() for value in state.values())

    moments = 0 if momentum_of(method) == 0 else sum(p.numel() for p in params)
    for step, row in enumerate(gradients([(5, 3), (4,)], LAST_OPEN_STEP + 2), start=1):
        for param, values in zip(params, row, strict=True):
            param.grad = torch.from_numpy(np.asarray(values))
        optimizer.step()
        if step <= LAST_OPEN_STEP:
            assert kept() >= moments + sum(p.numel() for p in params) + len(params)
        else:
            assert kept() == moments + len(params)


def test_a_closed_clip_does_no_linear_algebra(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = count_eigh(monkeypatch)
    make = lambda params: BlockAdam(params, clip=CLOSING, backend="eigh")  # noqa: E731
    trajectory(make, SHAPES, gradients(SHAPES, LAST_OPEN_STEP))
    assert len(calls) > 0
    before = len(calls)
    trajectory(make, SHAPES, gradients(SHAPES, STEPS))
    assert len(calls) == 2 * before


# ----------------------------------------------------------------------------------------------------- one full matrix


@each_backend
@pytest.mark.parametrize("bias_correction", [True, False])
def test_joint_is_one_dense_inverse_root(bias_correction: bool, backend: str) -> None:
    """Against (V̂^{1/2} + δ I)^{-1} m solved as a linear system, over a matrix, a vector and a scalar at once."""
    shapes: list[Shape] = [(3, 2), (3,), ()]
    grads = gradients(shapes, STEPS)
    eps, lr, x, m, V = 1e-2, 0.01, flat([dense(*shape) for shape in shapes]), np.zeros(10), np.zeros((10, 10))
    expected = []
    for t, row in enumerate(grads, start=1):
        g = np.concatenate([np.ravel(values) for values in row])
        m, V = 0.9 * m + 0.1 * g, 0.99 * V + 0.01 * np.outer(g, g)
        first, second = (1 - 0.9**t, 1 - 0.99**t) if bias_correction else (1.0, 1.0)
        spectrum, basis = np.linalg.eigh(V / second)
        root = basis @ np.diag(np.sqrt(np.maximum(spectrum, 0))) @ basis.T
        x = x - lr * np.linalg.solve(root + eps * np.eye(10), m / first)
        expected.append(x)
    options = {"lr": lr, "betas": (0.9, 0.99), "eps": eps, "bias_correction": bias_correction}
    found = trajectory(lambda p: BlockAdam(p, **options, grouping="joint", backend=backend), shapes, grads)
    assert_same_path(found, np.stack(expected), 1e-9)


@each_backend
@pytest.mark.parametrize("options", [{}, {"clip": OPEN}, {"refresh_every": 3}], ids=["plain", "clip", "refresh"])
@each_method
def test_tensor_and_joint_and_one_long_run_agree_on_a_single_parameter(
    method: str, options: Options, backend: str
) -> None:
    case = METHODS[method]
    grads = gradients([(3, 4)], STEPS)

    def path(grouping: str | IndexGroups) -> Array:
        def make(params: list[Parameter]) -> Optimizer:
            cut = {"grouping": grouping, "block_size": 12}
            return case.cls(params, **case.options, **options, **cut, backend=backend)

        return trajectory(make, [(3, 4)], grads)

    expected = path("tensor")
    for other in ("joint", "chunk", IndexGroups([range(12)])):
        assert_same_path(path(other), expected, SAME_FORMULA)


# ---------------------------------------------------------------------------------------------------------- symmetries

# V = Q V' Qᵀ is rounded otherwise than V', which the first, rank-deficient steps amplify: see tests/test_oracle.py.
TURNED = 1e-8


def rotation(n: int, seed: int) -> Array:
    return np.linalg.qr(np.random.default_rng(seed).standard_normal((n, n)))[0]


def vector_path(x: Array, grads: Sequence[Array], make: Make) -> Array:
    return trajectory(make, [x.shape], [[g] for g in grads], start=[Parameter(torch.from_numpy(x.copy()))])


ROTATED: list[Options] = [
    {},
    {"clip": OPEN, "weight_decay": 0.1},
    {"refresh_every": 3, "maximize": True},
    {"bias_correction": False, "lr": 0.1},
]


@each_backend
@settings(derandomize=True, deadline=None, max_examples=25)
@given(
    method=st.sampled_from(sorted(METHODS)),
    options=st.sampled_from(ROTATED),
    n=st.integers(2, 9),
    seed=st.integers(0, 1000),
)
def test_rotating_a_block_rotates_its_path(method: str, options: Options, n: int, seed: int, backend: str) -> None:
    case, Q, rng = METHODS[method], rotation(n, seed), np.random.default_rng(seed)
    x, grads = rng.standard_normal(n), [rng.standard_normal(n) * np.arange(1, n + 1) for _ in range(20)]

    def make(params: list[Parameter]) -> Optimizer:
        return case.cls(params, **{**case.options, **options, "grouping": "tensor", "backend": backend})

    found = vector_path(Q @ x, [Q @ g for g in grads], make)
    assert_same_path(found, vector_path(x, grads, make) @ Q.T, TURNED)


def test_a_diagonal_method_does_not_rotate() -> None:
    """The test above can fail: it does for blocks of one."""
    Q, rng = rotation(5, 0), np.random.default_rng(0)
    x, grads = rng.standard_normal(5), [rng.standard_normal(5) for _ in range(20)]
    make = lambda params: BlockAdam(params, grouping="diagonal", backend="eigh")  # noqa: E731
    found, expected = vector_path(Q @ x, [Q @ g for g in grads], make), vector_path(x, grads, make) @ Q.T
    assert np.abs(found - expected).max() > 0.1 * np.abs(expected - expected[0]).max()


@each_backend
@settings(derandomize=True, deadline=None, max_examples=25)
@given(method=st.sampled_from(sorted(METHODS)), options=st.sampled_from(ROTATED), data=st.data())
def test_permuting_coordinates_within_blocks_permutes_the_path(
    method: str, options: Options, data: st.DataObject, backend: str
) -> None:
    """Order within a block and order of the blocks are both free."""
    case = METHODS[method]
    grads = gradients([(3, 4)], 20)
    blocks = [[0, 4, 8], [1, 5], [9, 2, 6, 10], [3], [7, 11]]
    shuffled = data.draw(st.permutations([data.draw(st.permutations(block)) for block in blocks]))

    def path(groups: list[list[int]]) -> Array:
        def make(params: list[Parameter]) -> Optimizer:
            return case.cls(params, **{**case.options, **options, "grouping": IndexGroups(groups), "backend": backend})

        return trajectory(make, [(3, 4)], grads)

    assert_same_path(path(shuffled), path(blocks), TURNED)


@each_backend
@pytest.mark.parametrize("grouping", ["chunk", "tensor"])
@each_method
def test_permuting_a_parameter_permutes_its_path(method: str, grouping: str, backend: str) -> None:
    """A permutation that moves whole blocks of 4 and reorders each."""
    case, rng = METHODS[method], np.random.default_rng(0)
    order = np.concatenate([4 * block + rng.permutation(4) for block in (2, 0, 1)])
    x, grads = rng.standard_normal(12), [rng.standard_normal(12) for _ in range(STEPS)]

    def make(params: list[Parameter]) -> Optimizer:
        return case.cls(params, **case.options, grouping=grouping, block_size=4, eps=1e-2, backend=backend)

    found = vector_path(x[order], [g[order] for g in grads], make)
    assert_same_path(found, vector_path(x, grads, make)[:, order], TURNED)


@each_backend
@each_method
def test_blocks_do_not_feel_each_other(method: str, backend: str) -> None:
    """New gradients in one column leave the other columns of W[out, in] bit for bit as they were."""
    case = METHODS[method]
    grads = gradients([(7, 3)], 20)
    altered = [[np.array(row[0])] for row in grads]
    for row in altered:
        row[0][:, 1] *= -3.0

    def path(rows: Gradients) -> Array:
        def make(params: list[Parameter]) -> Optimizer:
            return case.cls(params, **case.options, grouping="input", block_size=3, clip=OPEN, backend=backend)

        return trajectory(make, [(7, 3)], rows).reshape(-1, 7, 3)

    before, after = path(grads), path(altered)
    assert np.array_equal(before[:, :, [0, 2]], after[:, :, [0, 2]])
    assert not np.allclose(before[:, :, 1], after[:, :, 1])


# ------------------------------------------------------------------------------------------------------------- padding


@each_backend
@pytest.mark.parametrize("refresh_every", [1, 4])
@pytest.mark.parametrize(
    ("shape", "grouping", "block_size"),
    [
        ((7, 3), "input", 3),
        ((3, 7), "output", 4),
        ((11,), "chunk", 4),
        ((3, 2, 5), "chunk", 7),
        ((1, 1, 67), "filter", 8),
        ((5, 2, 1, 1), "auto", 4),
    ],
)
@pytest.mark.parametrize("method", ["amsgrad", "adagrad"])
def test_padding_a_short_run_changes_nothing(
    method: str, shape: Shape, grouping: str, block_size: int, refresh_every: int, backend: str
) -> None:
    """The same coordinates as an IndexGroups, where each block has its own size."""
    case = METHODS[method]
    blocks = explicit_blocks(shape, grouping, block_size)
    assert len({len(block) for block in blocks}) == 2
    grads = gradients([shape], STEPS)

    def path(cut: Options) -> Array:
        def make(params: list[Parameter]) -> Optimizer:
            fixed = {"clip": OPEN, "refresh_every": refresh_every, "eps": 1e-3, "backend": backend}
            return case.cls(params, **case.options, **fixed, **cut)

        return trajectory(make, [shape], grads)

    named = path({"grouping": grouping, "block_size": block_size})
    assert_same_path(named, path({"grouping": IndexGroups(blocks)}), 1e-10)


# -------------------------------------------------------------------------------------------------------- kernel calls


def count_eigh(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes that `torch.linalg.eigh` is called with from here on."""
    calls: list[tuple[int, ...]] = []
    original = torch.linalg.eigh

    def counted(A: Tensor, *args: Any, **kwargs: Any) -> Any:
        calls.append(tuple(A.shape))
        return original(A, *args, **kwargs)

    monkeypatch.setattr(torch.linalg, "eigh", counted)
    return calls


MANY: list[Shape] = [
    *((10 + i, 3) for i in range(12)),
    *((4, i + 1, 3, 3) for i in range(8)),
    *((i + 1, 2, 5) for i in range(8)),
    *((i,) for i in range(1, 25)),
    (),
    (6, 4, 1, 1),
]


def parameters_with_gradients(shapes: Sequence[Shape]) -> list[Parameter]:
    params = [dense(*shape) for shape in shapes]
    for param, values in zip(params, gradients(shapes, 1, seed=1)[0], strict=True):
        param.grad = torch.from_numpy(np.asarray(values))
    return params


@pytest.mark.parametrize("grouping", [*(g for g in PER_PARAMETER_GROUPINGS if g != "filter"), "joint"])
@pytest.mark.parametrize("groups", [1, 3])
def test_one_call_for_each_block_size_whatever_the_number_of_parameters(
    grouping: str, groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of size one there is nothing to decompose. Padded runs count with the size of their parameter's blocks."""
    shapes = MANY[::6] if grouping == "joint" else MANY
    options = {"grouping": grouping, "block_size": 5}
    split = [parameters_with_gradients(shapes[start::groups]) for start in range(groups)]
    optimizer = BlockAdam(
        [{"params": params, "lr": 0.1**i} for i, params in enumerate(split)], **options, backend="eigh"
    )
    sizes = [
        size for params in split for size in blocks_of(grouping, 5, [tuple(p.shape) for p in params])[1] if size > 1
    ]
    calls = count_eigh(monkeypatch)
    for _ in range(2):
        calls.clear()
        optimizer.step()
        assert sorted(calls) == sorted((sizes.count(size), size, size) for size in set(sizes))


def test_a_kept_basis_needs_no_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    params = parameters_with_gradients([(4, 3), (3, 2), (4,)])
    optimizer = BlockAdam(params, block_size=4, refresh_every=10, backend="eigh")
    calls = count_eigh(monkeypatch)
    counts = []
    for _ in range(22):
        calls.clear()
        optimizer.step()
        counts.append(len(calls))
    assert counts == [2, 2, 2, 1, *[0] * 6, 2, *[0] * 9, 2, 0]


def test_kept_and_fresh_bases_of_one_size_share_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only blocks that are due are decomposed, and all of those at once."""
    due = {2: parameters_with_gradients([(3, 2), (3,)]), 3: parameters_with_gradients([(3, 4)])}
    groups = [{"params": params, "refresh_every": every} for every, params in due.items()]
    optimizer = BlockAdam(groups, block_size=3, backend="eigh")
    calls = count_eigh(monkeypatch)
    blocks = []
    for _ in range(9):
        calls.clear()
        optimizer.step()
        assert len(calls) <= 1
        blocks.append(calls[0][0] if calls else 0)
    assert blocks == [7, 7, 7, 4, 3, 0, 7, 0, 3]


# -------------------------------------------------------------------------------------------------------- full AdaGrad


@each_backend
@pytest.mark.parametrize("cls", [BlockAdagrad, BlockAdaFom])
def test_averaged_adagrad_is_the_summed_one_with_growing_damping(cls: Callable[..., Optimizer], backend: str) -> None:
    """α/√t ((S/t)^{1/2} + δ I)^{-1} = α (S^{1/2} + δ√t I)^{-1}."""
    rng = np.random.default_rng(3)
    x, grads = rng.standard_normal(6), [rng.standard_normal(6) for _ in range(STEPS)]
    beta1 = 0.0 if cls is BlockAdagrad else 0.7
    options: Options = {"lr": 0.1, "eps": 1e-2, "grouping": "tensor", "backend": backend}
    if beta1:
        options["beta1"] = beta1
    y, m, total, expected = x, np.zeros(6), np.zeros((6, 6)), []
    for t, g in enumerate(grads, start=1):
        m, total = beta1 * m + (1 - beta1) * g, total + np.outer(g, g)
        spectrum, basis = np.linalg.eigh(total)
        damped = np.sqrt(np.maximum(spectrum, 0)) + 1e-2 * math.sqrt(t)
        y = y - 0.1 * basis @ ((basis.T @ m) / damped)
        expected.append(y)
    found = vector_path(x, grads, lambda params: cls(params, **options))
    assert_same_path(found, np.stack(expected), 1e-10)
