"""The recorder against dense matrices built from the gradients alone, and its promise to disturb nothing."""

from __future__ import annotations

import csv
import math
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter

from blockadapt import (
    BlockAdaFom,
    BlockAdagrad,
    BlockAdam,
    BlockAdamW,
    BlockRMSprop,
    IndexGroups,
    NonFiniteGradientError,
    SpectralFunction,
    SpectrumClip,
    plan,
)
from blockadapt.diagnostics import SpectrumRecorder
from support.cases import METHODS, Method, blocks_of, dense, each_backend, mixed_index_groups
from support.oracle import Array, Shape

SHAPES: list[Shape] = [(2, 2, 1, 2), (5, 2), (4,)]
"""Kernels of 2; under block size 3 runs of 3 and 2 down a column, and of 3 and 1 in the vector."""

TOTAL = sum(math.prod(shape) for shape in SHAPES)
STEPS = 8
CLIPS = {"unclipped": None, "clipped": SpectrumClip(0.05, 0.3), "closing": SpectrumClip(0.05, 40.0)}  # closes at t = 6
GROUPINGS: dict[str, str | IndexGroups] = {
    name: name for name in ("auto", "input", "output", "chunk", "tensor", "joint", "diagonal")
}
GROUPINGS["explicit"] = mixed_index_groups(TOTAL)
COLUMNS = [
    "step",
    "parameter",
    "term_a",
    "term_b_spectral",
    "term_b_nuclear",
    "smallest_eigenvalue",
    "largest_eigenvalue",
    "condition",
    "rank",
    "coordinates",
    "clipped_low",
    "clipped_high",
    "final_lr",
    "measured_lr",
    "step_norm",
]

Options = dict[str, Any]


# ----------------------------------------------------------------------------------------------------------- the oracle


@dataclass(frozen=True)
class Operators:
    """Block-diagonal matrices of all coordinates at one step. Without V the clip has closed."""

    P: Array
    V: Array | None
    decay: float
    bounds: tuple[float, float] | None
    unclipped: Array | None


def dense_operators(g: Array, blocks: Sequence[Sequence[int]], method: Method, options: Options) -> list[Operators]:
    """P₁..P_T from the gradients g₁..g_T as the moments take them [T, coordinates]; options["lr"] has one lr a step."""
    given = {**method.defaults, **method.options, **options}
    beta1 = given.get("beta1", 0.9) if method.kind in ("adam", "adamw", "adafom") else 0.0
    averages, bias = method.kind in ("adagrad", "adafom"), given["bias_correction"]
    beta2, eps, clip = given.get("alpha", 0.999), given["eps"], given["clip"]
    largest = [np.zeros(len(block)) for block in blocks]
    bases = [np.eye(len(block)) for block in blocks]
    found = []
    for t in range(1, len(g) + 1):
        lr = given["lr"][t - 1]
        bounds = None
        if clip is not None:
            target = clip.final_lr * lr / given["peak_lr"]
            bounds = target * (1 - 1 / (clip.gamma * t + 1)), target * (1 + 1 / (clip.gamma * t))
            if clip.gamma * t > 200.5:
                found.append(Operators(target * np.eye(g.shape[1]), None, math.nan, bounds, None))
                continue
        weights = np.full(t, 1 / t) if averages else (1 - beta2) * beta2 ** np.arange(t - 1.0, -1.0, -1.0)
        step_size = lr / math.sqrt(t) if averages else lr
        step_size /= 1 - beta1**t if bias else 1.0
        P, V, raw = np.zeros((g.shape[1],) * 2), np.zeros((g.shape[1],) * 2), []
        for j, block in enumerate(blocks):
            at = np.ix_(block, block)
            second = (g[:t, block].T * weights) @ g[:t, block]
            if t <= given.get("fresh", 10**9) or (t - 1) % given.get("refresh_every", 1) == 0:
                bases[j] = np.linalg.eigh(second)[1]
            spectrum = np.maximum(np.einsum("ki,kl,li->i", bases[j], second, bases[j]), 0)
            if given.get("amsgrad"):
                order = np.argsort(spectrum)
                largest[j] = np.maximum(largest[j], spectrum[order])
                spectrum[order] = largest[j]
            spectrum = spectrum / (1 - beta2**t if bias and not averages else 1.0)
            s = step_size / (np.sqrt(spectrum) + eps)
            raw += list(s)
            V[at] = (bases[j] * spectrum) @ bases[j].T
            P[at] = (bases[j] * (s if bounds is None else np.clip(s, *bounds))) @ bases[j].T
        found.append(Operators(P, V, 1 - 1 / t if averages else beta2, bounds, np.array(raw)))
    return found


def dense_figures(
    now: Operators, before: Operators | None, g: Array, moved: Array, blocks: Sequence[Sequence[int]], eps: float
) -> dict[str, float]:
    """Every column by its definition, with norms of whole matrices."""
    change = np.full(now.P.shape, math.nan) if before is None else now.P - before.P
    unknown = before is None
    figures = {
        "term_a": float(np.sum((now.P @ g) ** 2)),
        "term_b_spectral": math.nan if unknown else float(np.linalg.norm(change, 2)),
        "term_b_nuclear": math.nan if unknown else float(np.linalg.norm(change, "nuc")),
        "coordinates": len(g),
        "step_norm": float(np.linalg.norm(moved)),
    }
    if now.V is None:
        missing = dict.fromkeys(("smallest_eigenvalue", "largest_eigenvalue", "condition", "rank"), math.nan)
        return {**figures, **missing, "clipped_low": 1.0, "clipped_high": 1.0}
    spectrum = np.linalg.eigvalsh(now.V)
    pieces = [now.V[np.ix_(block, block)] for block in blocks]
    tops = [np.linalg.eigvalsh(piece) for piece in pieces]
    roots = [(vectors * np.sqrt(np.maximum(λ, 0))) @ vectors.T for λ, vectors in map(np.linalg.eigh, pieces)]
    low, high = (0.0, math.inf) if now.bounds is None else now.bounds
    assert now.unclipped is not None
    return {
        **figures,
        "smallest_eigenvalue": float(max(spectrum[0], 0)),
        "largest_eigenvalue": float(spectrum[-1]),
        "condition": max(
            float(np.linalg.cond(math.sqrt(now.decay) * root + eps * np.eye(len(root)), 2)) for root in roots
        ),
        "rank": float(sum((λ > len(λ) * np.finfo(np.float64).eps * λ[-1]).sum() for λ in tops)),
        "clipped_low": float(np.mean(now.unclipped <= low)),
        "clipped_high": float(np.mean(now.unclipped >= high)),
    }


def require_close(
    row: dict[str, Any], expected: dict[str, float], now: Operators, before: Operators | None, eps: float
) -> None:
    """Every expected column agrees, as far as float64 knows an eigenvalue that is zero.

    That is up to d ε λ_max, its root up to √(d ε λ_max), and P = α/(√λ + δ) there up to the part √(d ε λ_max)/δ.
    """
    top, d = expected["largest_eigenvalue"], len(now.P)
    noise = 1e-9 + (0.0 if math.isnan(top) else math.sqrt(d * np.finfo(np.float64).eps * top) / eps)
    size = max(np.linalg.norm(operators.P, 2) for operators in (now, before) if operators)
    allowed = {"term_b_spectral": noise * size, "term_b_nuclear": d * noise * size, "smallest_eigenvalue": noise * top}
    for name, value in expected.items():
        equal = math.isclose(row[name], value, rel_tol=noise, abs_tol=allowed.get(name, 0.0))
        assert equal or (math.isnan(row[name]) and math.isnan(value)), (name, row[name], value)


# -------------------------------------------------------------------------------------------------------------- the run


@dataclass
class Run:
    """A recorded run over given gradients: the rows, and every x and g on the way, flat over the group."""

    history: list[dict[str, Any]]
    x: Array
    g: Array
    lrs: list[float]


def drawn(steps: int = STEPS, seed: int = 0) -> Array:
    """Correlated gradients whose scales differ by coordinate."""
    rng = np.random.default_rng(seed)
    mixer = np.eye(TOTAL) + 0.3 * rng.standard_normal((TOTAL, TOTAL))
    g = np.exp(rng.standard_normal(TOTAL)) * (rng.standard_normal((steps, TOTAL)) @ mixer)
    return np.asarray(g / np.linalg.norm(g, axis=1).max())


def run(method: Method, options: Options, *, every: int = 1, backend: str = "numba", steps: int = STEPS) -> Run:
    """Take steps with a falling lr and coupled decay, every one recorded by `every`."""
    params = [dense(*shape) for shape in SHAPES]
    names = [("kernel", params[0]), ("matrix", params[1]), ("vector", params[2])]
    optimizer = method.cls(names, lr=0.02, weight_decay=0.1, backend=backend, **method.options, **options)
    recorder = SpectrumRecorder(optimizer, every)
    result = Run(recorder.history, np.zeros((steps + 1, TOTAL)), drawn(steps), [])
    result.x[0] = flat(params)
    coupled = 0.0 if method.kind == "adamw" else 0.1
    for t in range(steps):
        set_gradients(params, result.g[t])
        result.g[t] = (-1 if options.get("maximize") else 1) * result.g[t] + coupled * result.x[t]
        optimizer.param_groups[0]["lr"] = 0.02 * (1 - 0.05 * t)
        result.lrs.append(0.02 * (1 - 0.05 * t))
        optimizer.step()
        result.x[t + 1] = flat(params)
    return result


def flat(params: Sequence[Tensor]) -> Array:
    return np.concatenate([p.detach().double().reshape(-1).numpy() for p in params])


def set_gradients(params: Sequence[Tensor], values: Array) -> None:
    for p, piece in zip(params, torch.from_numpy(values).split([p.numel() for p in params]), strict=True):
        p.grad = piece.reshape(p.shape).to(p, copy=True)


def check(result: Run, method: Method, options: Options) -> None:
    """Every row of a run against the oracle."""
    grouping = options["grouping"]
    spans = grouping == "joint" or isinstance(grouping, IndexGroups)
    ends = np.cumsum([0, *map(math.prod, SHAPES)])
    units = {name: slice(ends[i], ends[i + 1]) for i, name in enumerate(("kernel", "matrix", "vector"))}
    units = {**({"kernel … vector": slice(0, TOTAL)} if spans else units), "total": slice(0, TOTAL)}
    blocks, ranks = blocks_of(grouping, options["block_size"], SHAPES)
    given = {**options, "lr": result.lrs, "peak_lr": 0.02}
    if "refresh_every" in options:
        assert len(set(ranks)) == 1
        given["fresh"] = ranks[0]
    operators = dense_operators(result.g, blocks, method, given)
    rows = {(row["step"], row["parameter"]): row for row in result.history}
    assert [*rows] == [(t, name) for t in range(1, STEPS + 1) for name in units]
    for (t, name), row in rows.items():
        here = units[name]
        own = [[i - here.start for i in block] for block in blocks if here.start <= block[0] < here.stop]
        now, before = (restrict(operators[s], here, blocks) if s >= 0 else None for s in (t - 1, t - 2))
        assert now is not None
        moved = (result.x[t] - result.x[t - 1])[here]
        figures = dense_figures(now, before, result.g[t - 1][here], moved, own, options["eps"])
        require_close(row, figures, now, before, options["eps"])


def restrict(whole: Operators, here: slice, blocks: Sequence[Sequence[int]]) -> Operators:
    """The part of the matrices that belongs to some coordinates."""
    inside = np.concatenate([[here.start <= block[0] < here.stop] * len(block) for block in blocks])
    return Operators(
        whole.P[here, here],
        None if whole.V is None else whole.V[here, here],
        whole.decay,
        whole.bounds,
        None if whole.unclipped is None else whole.unclipped[inside],
    )


# ----------------------------------------------------------------------------------------------------- against matrices


def options_for(grouping: str, clip: str = "unclipped", bias_correction: bool = True) -> Options:
    return {
        "grouping": GROUPINGS[grouping],
        "block_size": 3,
        "eps": 0.05,
        "clip": CLIPS[clip],
        "bias_correction": bias_correction,
    }


@pytest.mark.parametrize("bias_correction", [True, False], ids=["corrected", "biased"])
@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("grouping", ["auto", "diagonal"])
@pytest.mark.parametrize("method", METHODS)
def test_every_figure_equals_that_of_dense_matrices(
    method: str, grouping: str, clip: str, bias_correction: bool
) -> None:
    options = options_for(grouping, clip, bias_correction)
    check(run(METHODS[method], options), METHODS[method], options)


@pytest.mark.parametrize("grouping", [name for name in GROUPINGS if name not in ("auto", "diagonal")])
@pytest.mark.parametrize("method", METHODS)
def test_every_figure_equals_that_of_dense_matrices_in_every_grouping(method: str, grouping: str) -> None:
    options = options_for(grouping, "closing")
    check(run(METHODS[method], options), METHODS[method], options)


@each_backend
@pytest.mark.parametrize("method", ["adam", "amsgrad", "adagrad"])
def test_a_kept_basis_is_the_one_that_was_applied(method: str, backend: str) -> None:
    """Refreshed at t = 1..3 and 5, kept at 4 and 6..8."""
    options = {**options_for("chunk"), "refresh_every": 4}
    check(run(METHODS[method], options, backend=backend), METHODS[method], options)


@each_backend
def test_ascent_and_both_backends_give_the_same_figures(backend: str) -> None:
    options = {**options_for("explicit", "clipped"), "maximize": True}
    check(run(METHODS["adam"], options, backend=backend), METHODS["adam"], options)


def test_blocks_in_portions_are_the_blocks_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    options = options_for("chunk", "clipped")
    for size in (1, 20):  # one block at a time; two blocks of three at a time
        monkeypatch.setattr("blockadapt.diagnostics.figures.PORTION", size)
        check(run(METHODS["amsgrad"], options), METHODS["amsgrad"], options)


def test_blocks_of_one_coordinate_change_by_the_sum_of_absolute_changes() -> None:
    """For diagonal RMSprop p = α/(√v + δ): its Term B in nuclear norm is that of the paper, Σ |pₜ − pₜ₋₁|."""
    g = drawn()
    p = Parameter(torch.zeros(TOTAL, dtype=torch.float64))
    optimizer = BlockRMSprop([p], lr=0.1, alpha=0.9, eps=1e-3, grouping="diagonal")
    recorder = SpectrumRecorder(optimizer, every=1)
    v, before = np.zeros(TOTAL), None
    for t in range(STEPS):
        set_gradients([p], g[t])
        optimizer.step()
        v = 0.9 * v + 0.1 * g[t] ** 2
        after = 0.1 / (np.sqrt(v) + 1e-3)
        if before is not None:
            row = recorder.history[-1]
            assert row["term_b_nuclear"] == pytest.approx(np.abs(after - before).sum(), rel=1e-12)
            assert row["term_b_spectral"] == pytest.approx(np.abs(after - before).max(), rel=1e-12)
            assert row["term_a"] == pytest.approx(np.sum((after * g[t]) ** 2), rel=1e-12)
        before = after


def test_the_total_joins_parameters_as_matrices_join() -> None:
    rows = run(METHODS["adam"], options_for("auto", "clipped")).history[4:8]
    *own, total = rows
    column = {name: [row[name] for row in own] for name in COLUMNS}
    assert total["parameter"] == "total"
    for name in ("term_a", "term_b_nuclear", "rank", "coordinates"):
        assert total[name] == pytest.approx(sum(column[name]), rel=1e-12)
    for name in ("term_b_spectral", "largest_eigenvalue", "condition"):
        assert total[name] == max(column[name])
    assert total["smallest_eigenvalue"] == min(column["smallest_eigenvalue"])
    assert total["step_norm"] == pytest.approx(np.linalg.norm(column["step_norm"]), rel=1e-12)
    for name in ("clipped_low", "clipped_high"):
        assert total[name] == pytest.approx(np.average(column[name], weights=column["coordinates"]), rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_parameters_of_low_precision_have_float32_figures(dtype: torch.dtype) -> None:
    """Under δ = 1 float32 statistics give P to the part √(n ε λ_max)/δ = 7e-4 of itself, where V has no full rank."""
    histories = []
    for kind in (dtype, torch.float64):
        start = torch.linspace(-1, 1, 12).to(dtype).reshape(6, 2)
        p = Parameter(start.to(kind))
        optimizer = BlockAdam([p], lr=0.02, eps=1.0, block_size=4)
        recorder = SpectrumRecorder(optimizer, every=1)
        for t in range(1, 6):
            p.grad = torch.sin(t * torch.arange(12.0)).to(dtype).reshape(6, 2).to(kind)
            optimizer.step()
        histories.append(recorder.history)
    exact = ("term_a", "term_b_spectral", "term_b_nuclear", "largest_eigenvalue", "condition", "rank", "coordinates")
    for low, high in zip(*histories, strict=True):
        for name in exact:
            assert low[name] == pytest.approx(high[name], rel=1e-3, nan_ok=True), name


# -------------------------------------------------------------------------------------------------- what rows there are


def network() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 7), nn.Tanh(), nn.Linear(7, 3))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: Sequence[int] = range(6)) -> None:
    """One step for each number, which seeds its batch; the lr falls from step to step."""
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(5, 1, 4, 4, generator=generator)
        y = torch.randint(0, 3, (5,), generator=generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 / math.sqrt(step + 1)
        optimizer.step()


def steps_and_names(recorder: SpectrumRecorder) -> list[tuple[int, str]]:
    return [(row["step"], row["parameter"]) for row in recorder.history]


def without_nan(history: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows that compare equal where both are NaN."""
    return [{name: "nan" if value != value else value for name, value in row.items()} for row in history]


def test_a_row_has_these_columns_and_types() -> None:
    model = network()
    recorder = SpectrumRecorder(optimizer := BlockAdam(model.parameters()), every=2)
    train(model, optimizer)
    for row in recorder.history:
        assert list(row) == COLUMNS
        kinds = {"step": int, "parameter": str, "coordinates": int}
        assert all(type(value) is kinds.get(name, float) for name, value in row.items())


def test_rows_are_named_by_parameter_or_by_group_and_position() -> None:
    model = network()
    named = SpectrumRecorder(optimizer := BlockAdam(model.named_parameters()), every=6)
    train(model, optimizer)
    names = [name for name, _ in model.named_parameters()]
    assert steps_and_names(named) == [(6, name) for name in [*names, "total"]]

    groups = [{"params": list(model[0].parameters())}, {"params": list(model[3].parameters()), "grouping": "joint"}]
    numbered = SpectrumRecorder(optimizer := BlockAdam([*groups, {"params": list(model[5].parameters())}]), every=6)
    train(model, optimizer)
    expected = ["0.0", "0.1", "1.0 … 1.1", "2.0", "2.1"]
    assert [name for _, name in steps_and_names(numbered)] == [*expected, "total"]
    assert [row.name for row in plan(optimizer).rows] == expected


def test_a_parameter_called_total_is_not_taken_for_the_total() -> None:
    p = Parameter(torch.ones(2))
    recorder = SpectrumRecorder(optimizer := BlockAdam([("total", p)]), every=1)
    p.grad = torch.ones(2)
    optimizer.step()
    assert steps_and_names(recorder) == [(1, "0.0"), (1, "total")]


def test_parameters_without_gradient_or_coordinates_have_no_row() -> None:
    params = [Parameter(torch.ones(3)), Parameter(torch.ones(2)), Parameter(torch.ones(0))]
    recorder = SpectrumRecorder(optimizer := BlockAdam(params), every=1)
    optimizer.step()
    assert recorder.history == []
    params[0].grad = torch.ones(3)
    params[2].grad = torch.ones(0)
    optimizer.step()
    assert steps_and_names(recorder) == [(1, "0.0"), (1, "total")]
    params[1].grad = torch.ones(2)
    optimizer.step()
    assert steps_and_names(recorder)[2:] == [(2, "0.0"), (2, "0.1"), (2, "total")]
    terms = {row["parameter"]: row["term_b_spectral"] for row in recorder.history[2:]}
    assert math.isfinite(terms["0.0"])
    assert math.isnan(terms["0.1"])  # its own first step
    assert math.isnan(terms["total"])


def test_a_missing_gradient_within_spanning_blocks_counts_as_zero() -> None:
    params = [Parameter(torch.ones(2, dtype=torch.float64)), Parameter(torch.ones(1, dtype=torch.float64))]
    optimizer = BlockRMSprop(params, lr=1.0, alpha=0.5, eps=1.0, weight_decay=0.5, grouping="joint")
    recorder = SpectrumRecorder(optimizer, every=1)
    params[0].grad = torch.tensor([2.5, 3.5], dtype=torch.float64)  # with decay g = (3, 4, 0), V = 12.5 u uᵀ
    optimizer.step()
    row = recorder.history[0]
    assert row["parameter"] == "0.0 … 0.1"
    assert row["rank"] == 1
    assert row["largest_eigenvalue"] == pytest.approx(12.5)
    assert row["term_a"] == pytest.approx((5 / (math.sqrt(12.5) + 1)) ** 2)


def test_a_group_added_late_joins_in() -> None:
    first, second = Parameter(torch.ones(3)), Parameter(torch.ones(4))
    recorder = SpectrumRecorder(optimizer := BlockAdam([first]), every=2)
    for t in range(4):
        if t == 2:
            optimizer.add_param_group({"params": [second]})
            second.grad = torch.ones(4)
        first.grad = torch.ones(3)
        optimizer.step()
    assert steps_and_names(recorder) == [(2, "0.0"), (2, "total"), (4, "0.0"), (4, "1.0"), (4, "total")]


def test_a_recorder_attached_late_counts_from_the_state() -> None:
    model = network()
    optimizer = BlockAdam(model.parameters())
    whole = SpectrumRecorder(optimizer, every=2)
    train(model, optimizer, range(3))
    late = SpectrumRecorder(optimizer, every=2)
    train(model, optimizer, range(3, 8))
    assert {row["step"] for row in late.history} == {4, 6, 8}
    # It saw no lr before its first step, and takes the present one for it.
    assert without_nan(late.history[7:]) == without_nan(whole.history[14:])
    for ours, theirs in zip(late.history[:7], whole.history[7:14], strict=True):
        assert ours["term_a"] == theirs["term_a"]


def test_a_recorder_attached_within_a_step_begins_with_the_next() -> None:
    p = Parameter(torch.ones(2))
    optimizer = BlockAdam([p])
    recorders = []

    def closure() -> float:
        p.grad = torch.ones(2)
        recorders.append(SpectrumRecorder(optimizer, every=1))
        return 0.0

    optimizer.step(closure)
    optimizer.step()
    assert steps_and_names(recorders[0]) == [(2, "0.0"), (2, "total")]


def test_a_closure_is_seen() -> None:
    model = network()
    optimizer = BlockAdam(model.parameters())
    recorder = SpectrumRecorder(optimizer, every=1)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(1, 1, 4, 4)).square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() > 0
    assert {row["step"] for row in recorder.history} == {1}
    assert recorder.history[-1]["step_norm"] > 0


# --------------------------------------------------------------------------------------------- when steps do not happen


def test_a_skipped_step_has_no_row_and_is_not_counted() -> None:
    p = Parameter(torch.ones(3))
    recorder = SpectrumRecorder(optimizer := BlockAdam([p], on_nonfinite="skip"), every=2)
    for value in (1.0, math.nan, math.inf, 2.0, math.nan, 3.0, 4.0):
        p.grad = torch.full((3,), value)
        optimizer.step()
    assert optimizer.skipped_steps == 3
    assert [row["step"] for row in recorder.history] == [2, 2, 4, 4]
    assert all(math.isfinite(row["term_b_nuclear"]) for row in recorder.history)


def test_a_step_that_raises_has_no_row_and_is_not_counted() -> None:
    p = Parameter(torch.ones(3))
    recorder = SpectrumRecorder(optimizer := BlockAdam([p]), every=2)
    for value in (1.0, math.nan, 2.0):
        p.grad = torch.full((3,), value)
        if math.isnan(value):
            with pytest.raises(NonFiniteGradientError):
                optimizer.step()
        else:
            optimizer.step()
    assert [row["step"] for row in recorder.history] == [2, 2]


@each_backend
def test_a_gradient_that_is_not_finite_gives_nan_and_stops_nothing(backend: str) -> None:
    p = Parameter(torch.ones(8))
    recorder = SpectrumRecorder(
        optimizer := BlockAdam([p], block_size=4, on_nonfinite="propagate", backend=backend), every=1
    )
    for value in (1.0, math.nan, 2.0):
        p.grad = torch.tensor([1.0] * 4 + [value] * 4)
        optimizer.step()
    assert [math.isnan(row["term_a"]) for row in recorder.history] == [False, False, True, True, True, True]


# --------------------------------------------------------------------------------------------------- disturbing nothing

MAKERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adam": lambda params: BlockAdam(params, block_size=4),
    "amsgrad, kept basis": lambda params: BlockAdam(params, amsgrad=True, refresh_every=3),
    "adamw, closing clip": lambda params: BlockAdamW(params, clip=SpectrumClip(0.01, 60.0)),
    "rmsprop, joint": lambda params: BlockRMSprop(params, grouping="joint"),
    "adagrad, diagonal": lambda params: BlockAdagrad(params, grouping="diagonal"),
    "adafom, output": lambda params: BlockAdaFom(params, grouping="output", weight_decay=0.1),
}


@pytest.mark.parametrize("name", MAKERS)
def test_training_is_bit_for_bit_the_same_with_and_without_a_recorder(name: str) -> None:
    ends = []
    for watched in (False, True):
        torch.manual_seed(3)
        model = network()
        optimizer = MAKERS[name](model.parameters())
        if watched:
            SpectrumRecorder(optimizer, every=1)
        random = torch.get_rng_state()
        train(model, optimizer)
        assert torch.equal(torch.get_rng_state(), random)
        tensors = [tensor for state in optimizer.state.values() for tensor in state.values()]
        ends.append([*model.parameters(), *(p.grad for p in model.parameters()), *tensors])
    for plain, seen in zip(*ends, strict=True):
        assert torch.equal(plain, seen)


def test_after_detach_nothing_is_recorded() -> None:
    model = network()
    optimizer = BlockAdam(model.parameters())
    recorder = SpectrumRecorder(optimizer, every=1)
    train(model, optimizer, range(2))
    recorder.detach()
    recorder.detach()
    before = list(recorder.history)
    train(model, optimizer, range(2, 4))
    assert recorder.history == before
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks


def test_a_with_statement_detaches_also_when_it_raises() -> None:
    model = network()
    optimizer = BlockAdam(model.parameters())
    recorder = SpectrumRecorder(optimizer, every=1)

    def fail() -> None:
        with recorder as entered:
            assert entered is recorder
            train(model, optimizer, range(2))
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    train(model, optimizer, range(2, 4))
    assert {row["step"] for row in recorder.history} == {1, 2}


def test_two_recorders_are_independent() -> None:
    model = network()
    optimizer = BlockAdam(model.parameters())
    often, seldom = SpectrumRecorder(optimizer, every=1), SpectrumRecorder(optimizer, every=3)
    train(model, optimizer)
    assert without_nan([row for row in often.history if row["step"] % 3 == 0]) == without_nan(seldom.history)


@pytest.mark.slow
def test_a_million_parameters_take_little_more_memory() -> None:
    """Blocks are looked at in portions: the peak stays far below one float64 matrix a block (80 MB), ten times."""
    code = """
import resource, torch
from blockadapt import BlockAdam
from blockadapt.diagnostics import SpectrumRecorder
torch.set_num_threads(1)
p = torch.nn.Parameter(torch.zeros(1000, 1000))
optimizer = BlockAdam([p])
recorder = SpectrumRecorder(optimizer, every=2)
peaks = []
for _ in range(2):
    p.grad = torch.randn(1000, 1000)
    optimizer.step()
    peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
assert len(recorder.history) == 2
print((peaks[1] - peaks[0]) * 1024)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    assert int(done.stdout) < 250e6


# ---------------------------------------------------------------------------------------------- leaving and coming back


@pytest.mark.parametrize("name", ["amsgrad, kept basis", "adamw, closing clip", "rmsprop, joint"])
def test_a_resumed_run_continues_the_history_identically(name: str, tmp_path: Path) -> None:
    torch.manual_seed(5)
    model = network()
    recorder = SpectrumRecorder(optimizer := MAKERS[name](model.named_parameters()), every=3)
    for step in range(10):
        torch.save([thing.state_dict() for thing in (model, optimizer, recorder)], tmp_path / f"{step}.pt")
        train(model, optimizer, [step])
    for cut in range(10):
        model = network()
        again = SpectrumRecorder(optimizer := MAKERS[name](model.named_parameters()), every=3)
        states = torch.load(tmp_path / f"{cut}.pt", weights_only=True)
        for thing, state in zip((model, optimizer, again), states, strict=True):
            thing.load_state_dict(state)
        train(model, optimizer, range(cut, 10))
        assert without_nan(again.history) == without_nan(recorder.history)


def test_a_resumed_run_counts_on_where_parameters_take_turns() -> None:
    """No parameter's own step count tells how many steps there were."""
    params = [Parameter(torch.ones(2)), Parameter(torch.ones(2))]
    optimizer = BlockAdam(params)
    recorder = SpectrumRecorder(optimizer, every=1)
    for t in range(1, 5):
        optimizer.zero_grad()
        params[t % 2].grad = torch.ones(2)
        optimizer.step()
    recorder.detach()
    again = SpectrumRecorder(optimizer, every=1)
    again.load_state_dict(recorder.state_dict())
    optimizer.step()
    assert steps_and_names(again)[-4:] == [(4, "0.0"), (4, "total"), (5, "0.0"), (5, "total")]


def test_a_state_is_a_copy() -> None:
    model = network()
    recorder = SpectrumRecorder(optimizer := BlockAdam(model.parameters()), every=1)
    train(model, optimizer, [0])
    state = recorder.state_dict()
    recorder.history[0]["term_a"] = -1.0
    assert state["history"][0]["term_a"] != -1.0
    recorder.load_state_dict(state)
    recorder.history[0]["term_a"] = -1.0
    assert state["history"][0]["term_a"] != -1.0


# ------------------------------------------------------------------------------------------------------------ the files


@pytest.fixture
def recorded() -> SpectrumRecorder:
    """A history with NaN (the first step) and with clipping."""
    model = network()
    recorder = SpectrumRecorder(optimizer := BlockAdam(model.named_parameters(), clip=SpectrumClip(0.01, 0.5)), every=1)
    train(model, optimizer, range(3))
    return recorder


def test_csv_holds_the_history_to_the_last_bit(recorded: SpectrumRecorder, tmp_path: Path) -> None:
    recorded.to_csv(tmp_path / "terms.csv")
    with open(tmp_path / "terms.csv", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    kinds: dict[str, Callable[[str], Any]] = {"step": int, "parameter": str, "coordinates": int}
    read = [{name: kinds.get(name, float)(value) for name, value in row.items()} for row in rows]
    assert without_nan(read) == without_nan(recorded.history)


def test_parquet_holds_the_history_to_the_last_bit(recorded: SpectrumRecorder, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    recorded.to_parquet(tmp_path / "terms.parquet")
    table = parquet.read_table(tmp_path / "terms.parquet")
    assert table.column_names == COLUMNS
    assert without_nan(table.to_pylist()) == without_nan(recorded.history)


def test_an_empty_history_gives_files_with_columns_only(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    recorder = SpectrumRecorder(BlockAdam([Parameter(torch.ones(2))]))
    recorder.to_csv(tmp_path / "terms.csv")
    recorder.to_parquet(tmp_path / "terms.parquet")
    assert (tmp_path / "terms.csv").read_text(encoding="utf-8").strip() == ",".join(COLUMNS)
    assert parquet.read_table(tmp_path / "terms.parquet").num_rows == 0


def test_without_pyarrow_one_sentence_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)  # as where it is not installed: importing it raises
    message = "SpectrumRecorder.to_parquet: pyarrow must be installed, e.g. with `pip install pyarrow`."
    with pytest.raises(ModuleNotFoundError) as error:
        SpectrumRecorder(an_optimizer()).to_parquet(tmp_path / "x.parquet")
    assert str(error.value) == message
    assert not (tmp_path / "x.parquet").exists()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("as_it_goes", [True, False])
def test_tensorboard_shows_every_number(as_it_goes: bool, tmp_path: Path) -> None:
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    model = network()
    with tensorboard.SummaryWriter(tmp_path) as writer:
        optimizer = BlockAdam(model.named_parameters())
        recorder = SpectrumRecorder(optimizer, every=1, writer=writer if as_it_goes else None)
        train(model, optimizer, range(3))
        if not as_it_goes:
            recorder.to_tensorboard(writer)
    events = accumulator.EventAccumulator(str(tmp_path), size_guidance={"scalars": 0})
    events.Reload()
    shown = {(tag, event.step): event.value for tag in events.Tags()["scalars"] for event in events.Scalars(tag)}
    expected = {
        (f"{name}/{row['parameter']}", row["step"]): float(np.float32(row[name]))
        for row in recorder.history
        for name in COLUMNS[2:]
        if not math.isnan(row[name])
    }
    assert shown == expected
    assert ("term_b_nuclear/total", 1) not in shown
    assert ("term_b_nuclear/total", 2) in shown


# -------------------------------------------------------------------------------------------------------- bad arguments


def an_optimizer() -> BlockAdam:
    return BlockAdam([Parameter(torch.ones(2))])


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "foreign optimizer": (
        lambda: SpectrumRecorder(torch.optim.Adam([Parameter(torch.ones(2))])),  # type: ignore[arg-type]
        "SpectrumRecorder: `optimizer` must be an optimizer of blockadapt, got Adam.",
    ),
    "every = 0": (
        lambda: SpectrumRecorder(an_optimizer(), every=0),
        "SpectrumRecorder: `every` must be an integer >= 1, got 0.",
    ),
    "every = 2.5": (
        lambda: SpectrumRecorder(an_optimizer(), every=2.5),  # type: ignore[arg-type]
        "SpectrumRecorder: `every` must be an integer >= 1, got 2.5.",
    ),
    "writer": (
        lambda: SpectrumRecorder(an_optimizer(), writer="runs"),  # type: ignore[arg-type]
        "SpectrumRecorder: `writer` must be a SummaryWriter or None, got 'runs'.",
    ),
    "no writer": (
        lambda: SpectrumRecorder(an_optimizer()).to_tensorboard(None),  # type: ignore[arg-type]
        "SpectrumRecorder.to_tensorboard: `writer` must be a SummaryWriter, got None.",
    ),
    "foreign state": (
        lambda: SpectrumRecorder(an_optimizer()).load_state_dict({"state": {}}),
        "SpectrumRecorder.load_state_dict: `state_dict` must be a recorder's, with 'history', 'spectra' and 'step', "
        "got ['state'].",
    ),
    "no state": (
        lambda: SpectrumRecorder(an_optimizer()).load_state_dict([1]),  # type: ignore[arg-type]
        "SpectrumRecorder.load_state_dict: `state_dict` must be a recorder's, with 'history', 'spectra' and 'step', "
        "got [1].",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_arguments_are_refused_in_one_sentence(case: str) -> None:
    make, message = REFUSED[case]
    with pytest.raises(ValueError) as error:  # noqa: PT011
        make()
    assert str(error.value) == message


# ------------------------------------------------------------------------------------------------------ what clips show


@each_backend
def test_the_recorder_shows_what_an_auto_clip_measures_and_uses(backend: str) -> None:
    """RMSprop moves by g itself, so P g is the step: only with the α* of that step is it as long."""
    torch.manual_seed(0)
    params = [Parameter(torch.randn(7, 4, dtype=torch.float64)), Parameter(torch.randn(5, dtype=torch.float64))]
    optimizer = BlockRMSprop(params, lr=0.02, block_size=3, clip=SpectrumClip("auto", 2.0), backend=backend)
    (group,) = optimizer.param_groups
    recorder = SpectrumRecorder(optimizer, every=1)
    used = []
    for _ in range(6):
        for param in params:
            param.grad = torch.randn_like(param)
        used.append(optimizer.final_lr(group))
        optimizer.step()
    totals = [row for row in recorder.history if row["parameter"] == "total"]
    assert [row["final_lr"] for row in totals][1:] == used[1:]
    assert used[0] is None
    assert math.isnan(totals[0]["final_lr"])
    weights = 0.999 ** np.arange(6)[::-1]
    measured = np.array([row["measured_lr"] for row in totals])
    assert optimizer.final_lr(group) == pytest.approx(weights @ measured / weights.sum(), rel=1e-10)
    for row in recorder.history:
        assert row["step_norm"] == pytest.approx(math.sqrt(row["term_a"]), rel=1e-10)


def test_what_is_clipped_is_the_users_own_spectral_function_above_the_floor() -> None:
    """V has rank one: without the floor, what lies in its null space would count as clipped high."""

    class Linear(SpectralFunction):
        def torch(self, eigenvalues: Tensor, lr: Tensor, damping: Tensor) -> Tensor:
            return lr / (1e6 * eigenvalues + damping)

    class BlockLinear(BlockAdam):
        spectral_function = Linear()

    param = Parameter(torch.zeros(4, 1))
    optimizer = BlockLinear([param], lr=1.0, block_size=4, eps=1e-9, clip=SpectrumClip(1.0, 1e-1))
    recorder = SpectrumRecorder(optimizer, every=1)
    param.grad = torch.tensor([[3.0], [4.0], [0.0], [0.0]])
    optimizer.step()
    # λ = 25 gives 4e-7, below; three eigenvalues at the floor of 25 ε/2 = 1.5e-6 give 6.7, between 0.09 and 11
    row = recorder.history[-1]
    assert (row["clipped_low"], row["clipped_high"]) == (0.25, 0.0)
