"""Where the paper's mathematics fails, by counterexample, and that the corrected form holds, on random instances too.

The numbers in the names of the sections are those of the table in docs/diagnostics.md.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import Parameter

from blockadapt import BlockAdagrad, BlockAdam, BlockRMSprop, SpectrumClip
from blockadapt.diagnostics import SpectrumRecorder, theory
from blockadapt.diagnostics.theory import printed
from blockadapt.moments import average
from support.oracle import Array

few = settings(max_examples=40, deadline=None)
seeds = st.integers(0, 2**32 - 1)
fractions = st.floats(0.0, 0.95)


def function_of(M: Array, function: Callable[[Array], Array]) -> Array:
    """A function of a semidefinite matrix, by its spectrum."""
    λ, U = np.linalg.eigh(M)
    return np.asarray((U * function(np.maximum(λ, 0))) @ U.T)


def root(M: Array) -> Array:
    return function_of(M, np.sqrt)


def spectral(M: Array) -> float:
    return float(np.linalg.norm(M, 2))


def semidefinite(rng: np.random.Generator, d: int, rank: int | None = None) -> Array:
    """A random matrix of this rank whose scales differ by some powers of ten."""
    factor = rng.standard_normal((d, d if rank is None else rank)) * 10.0 ** rng.uniform(-3, 1, (d, 1))
    return np.asarray(factor @ factor.T)


# Descent with any operators -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Path:
    """x₁..x_{T+1}, and at each t the gradient, its noisy version, m, P and ∇f(z)."""

    x: list[Array]
    exact: list[Array]
    g: list[Array]
    m: list[Array]
    P: list[Array]
    at_z: list[Array]

    @property
    def term_a(self) -> list[float]:
        return [float(np.sum((P @ g) ** 2)) for P, g in zip(self.P, self.g, strict=True)]

    @property
    def term_b(self) -> list[float]:
        return [spectral(now - before) for before, now in itertools.pairwise(self.P)]

    @property
    def left_side(self) -> float:
        return float(sum(e @ P @ e for e, P in zip(self.exact, self.P, strict=True)))

    @property
    def gradient_bound(self) -> float:
        return float(max(np.linalg.norm(v) for v in (*self.exact, *self.g, *self.at_z)))

    @property
    def step_bound(self) -> float:
        return float(max(np.linalg.norm(P @ m) for P, m in zip(self.P, self.m, strict=True)))


def descend(H: Array, x: Array, noise: Array, beta1: Sequence[float], operator: Callable[[list[Array]], Array]) -> Path:
    """x ← x − P m on f = ½ xᵀ H x, with P from the gradients so far; β₁ₜ for t = 1..T."""
    path = Path([x], [], [], [], [], [])
    m = np.zeros_like(x)
    for t, (ζ, β) in enumerate(zip(noise, beta1, strict=True)):
        before = path.x[t - 1] if t else x
        path.at_z.append(H @ (x + β / (1 - β) * (x - before)))
        path.exact.append(H @ x)
        path.g.append(path.exact[-1] + ζ)
        m = β * m + (1 - β) * path.g[-1]
        path.m.append(m)
        path.P.append(operator(path.g))
        x = x - path.P[-1] @ m
        path.x.append(x)
    return path


def blockwise(blocks: Sequence[slice], matrix: Callable[[Array], Array]) -> Callable[[list[Array]], Array]:
    """P from the gradients so far, block by block: `matrix` gets those of one block [t, n]."""

    def operator(gradients: list[Array]) -> Array:
        g = np.stack(gradients)
        P = np.zeros((g.shape[1],) * 2)
        for block in blocks:
            P[block, block] = matrix(g[:, block])
        return P

    return operator


def running_mean(beta2: float) -> Callable[[Array], Array]:
    def V(g: Array) -> Array:
        weights = (1 - beta2) * beta2 ** np.arange(len(g) - 1.0, -1.0, -1.0)
        return np.asarray((g.T * weights) @ g)

    return V


# 1: the clipped step is U Σ Uᵀ m -------------------------------------------------------------------------------------


def test_the_clipped_step_turns_into_the_eigenbasis_and_back() -> None:
    """The paper prints Uᵀ Σ U m, which for a basis that is not symmetric is another vector."""
    p = Parameter(torch.zeros(3, dtype=torch.float64))
    clip = SpectrumClip(final_lr=0.5, gamma=1.0)
    optimizer = BlockRMSprop([p], lr=1.0, alpha=0.5, eps=1e-3, grouping="joint", clip=clip)
    V = np.zeros((3, 3))
    for g in np.array([[4.0, 1.0, 0.0], [0.0, 1.0, 0.5], [1.0, 2.0, 3.0]]):
        before = p.detach().clone()
        p.grad = torch.from_numpy(g)
        optimizer.step()
        V = 0.5 * V + 0.5 * np.outer(g, g)
    λ, U = np.linalg.eigh(V)
    s = np.clip(1.0 / (np.sqrt(λ) + 1e-3), *clip.bounds(3))
    step = (before - p.detach()).numpy()
    np.testing.assert_allclose(step, U @ (s * (U.T @ g)), rtol=1e-9)
    for signs in itertools.product([-1.0, 1.0], repeat=3):  # whichever way the eigenvectors point
        basis = U * signs
        assert np.linalg.norm(step - basis.T @ (s * (basis @ g))) > 0.1 * np.linalg.norm(step)


# 2: Theorem 1's constants --------------------------------------------------------------------------------------------


def test_without_the_initial_gap_the_bound_of_theorem_1_is_far_too_small() -> None:
    """V = I, f = x²/200, x₁ = 100, α = 0.01, β₁ = 0: the sum tends to 50, the printed bound to 0.28."""
    T = 100_000
    x = 100.0 * (1 - 1e-4) ** np.arange(T)
    gradients = x / 100
    left = float(np.sum(0.01 * gradients**2))
    term_a, term_b = (0.01 * gradients) ** 2, np.zeros(T - 1)
    facts = {"smoothness": 0.01, "gradient_bound": 1.0, "beta1": 0.0, "step_bound": 0.01, "first_norm": 0.01}
    as_printed = printed.theorem1_bound(printed.theorem1_constants(**facts), term_a, term_b)
    holds = theory.theorem1_bound(theory.theorem1_constants(**facts, initial_gap=50.0), term_a, term_b)
    assert left == pytest.approx(50.0, rel=1e-3)
    assert as_printed == pytest.approx(0.28, abs=0.005)
    assert as_printed < left <= holds


def scalar_lemma_terms(changes: Sequence[float], L: float, beta1: float) -> tuple[float, float]:
    """T₄ (β₁ falls to 0 after the first step) and T₅ of Lemma 2 in one dimension with gₜ = 1 from m₁ = 1 on."""
    b = beta1 / (1 - beta1)
    return 1.5 * L * b**2 * 1.0, 1.5 * L * sum((b * q) ** 2 for q in changes)


def test_the_lemmas_behind_theorem_1_need_the_factor_of_three_halves_l() -> None:
    """Lemmas 5 and 6 bound T₄ and T₅ by b² D² and b² G² Σ Q² where the definitions have 3L/2 in front; L = 2."""
    L, beta1, changes = 2.0, 0.5, [0.5, 0.25, 0.5]
    facts = {"smoothness": L, "gradient_bound": 1.0, "beta1": beta1, "step_bound": 1.0, "first_norm": 0.0}
    t4, t5 = scalar_lemma_terms(changes, L, beta1)
    squares = sum(q * q for q in changes)
    averaged = (L * 1.0 / 0.5) ** 2  # the part of C₃ that comes from elsewhere: L² b²/(1 − β₁)²
    wrong, right = printed.theorem1_constants(**facts), theory.theorem1_constants(**facts, initial_gap=0.0)
    assert (wrong.c3 - averaged) * squares < t5 <= (right.c3 - averaged) * squares
    shared = 2.0  # b (G² + D²)
    assert wrong.c4 - shared < t4 <= right.c4 - shared


def test_the_sum_of_squared_changes_must_run_to_the_last_step() -> None:
    """At T = 2 the printed sum is empty, and T₅ is not."""
    facts = {"smoothness": 1.0, "gradient_bound": 1.0, "beta1": 0.5, "step_bound": 1.0, "first_norm": 0.0}
    constants = theory.theorem1_constants(**facts, initial_gap=0.0)
    _, t5 = scalar_lemma_terms([0.5], L=1.0, beta1=0.5)
    without = theory.theorem1_bound(constants, [], [])
    c2_part = constants.c2 * 0.5
    assert printed.theorem1_bound(constants, [], [0.5]) - without - c2_part == 0.0
    assert 0.0 < t5 <= theory.theorem1_bound(constants, [], [0.5]) - without - c2_part


def test_gradients_at_z_can_exceed_those_at_x() -> None:
    """Momentum carries z beyond all x: ∇f(z) leaves the bound that the paper assumes for ∇f(x) and g."""
    path = descend(np.eye(1), np.ones(1), np.zeros((40, 1)), [0.9] * 40, lambda g: 0.5 * np.eye(1))
    at_x = max(np.abs(v).max() for v in (*path.exact, *path.g))
    assert max(np.abs(v).max() for v in path.at_z) > 1.4 * at_x


@few
@given(seeds, fractions, st.sampled_from([1.0, 0.7]), st.sampled_from(["adagrad", "running", "wild"]))
def test_theorem_1_holds_in_expectation(seed: int, beta1: float, decay: float, kind: str) -> None:
    """Over all 32 outcomes of a two-point noise, with operators that depend on it; blocks of two and of one."""
    rng = np.random.default_rng(seed)
    H, x1 = semidefinite(rng, 3), rng.standard_normal(3)
    noise = rng.standard_normal((5, 3)) * 10 ** rng.uniform(-2, 1)
    betas = [beta1 * decay**t for t in range(5)]
    lr, δ = 10 ** rng.uniform(-3, 0, 2)
    make: dict[str, Callable[[Array], Array]] = {
        "adagrad": lambda g: lr * function_of(g.T @ g, lambda λ: 1 / (np.sqrt(λ) + δ)),
        "running": lambda g: lr * function_of(running_mean(0.9)(g), lambda λ: 1 / (np.sqrt(λ) + δ)),
        "wild": lambda g: lr * function_of(np.outer(g[-1], g[-1]), lambda λ: 1 / (np.sqrt(λ) + δ)),
    }
    operator = blockwise([slice(0, 2), slice(2, 3)], make[kind])
    signs = list(itertools.product([-1.0, 1.0], repeat=5))
    paths = [descend(H, x1, noise * np.array(sign)[:, None], betas, operator) for sign in signs]
    constants = theory.theorem1_constants(
        smoothness=spectral(H),
        gradient_bound=max(path.gradient_bound for path in paths),
        beta1=beta1,
        step_bound=max(path.step_bound for path in paths),
        first_norm=float(np.mean([spectral(path.P[0]) for path in paths])),
        initial_gap=float(x1 @ H @ x1) / 2,
    )
    bound = np.mean([theory.theorem1_bound(constants, path.term_a, path.term_b) for path in paths])
    left = np.mean([path.left_side for path in paths])
    assert left <= bound * (1 + 1e-9)
    smallest = [min(float(np.linalg.eigvalsh(path.P[t])[0]) for path in paths) for t in range(5)]
    least = min(np.mean([np.sum(path.exact[t] ** 2) for path in paths]) for t in range(5))
    assert least <= theory.theorem1_rate(float(bound), smallest) * (1 + 1e-9)


# 3: the norm of the gradient -----------------------------------------------------------------------------------------


def test_theorem_1_fails_with_a_bound_of_the_largest_coordinate() -> None:
    """One step, d independent coordinates, gᵢ = 1 with probability q, else −ε; f = L/2 ‖x − c‖², P₁ = α/|g|.

    The mean step points uphill. With G_∞ the bound grows by less than d for each coordinate, even with f(x₁) − f*.
    """
    d, q, ε, α = 1000, 0.1, 0.01, 0.01
    mean = q - (1 - q) * ε
    L = mean / (math.sqrt(3) * α)  # at which f(x₁) − f* and the part of C₁ with L are smallest together
    left = d * mean**2 * α * (q + (1 - q) / ε)
    facts = {"smoothness": L, "beta1": 0.0, "step_bound": 0.0, "first_norm": α / ε}
    gap = d * mean**2 / (2 * L)
    term_a = [d * α**2]
    wrong = theory.theorem1_constants(**facts, gradient_bound=1.0, initial_gap=gap)
    right = theory.theorem1_constants(**facts, gradient_bound=theory.euclidean_bound(1.0, d), initial_gap=gap)
    assert theory.theorem1_bound(wrong, term_a, []) < 0.7 * left
    assert left <= theory.theorem1_bound(right, term_a, [])


@few
@given(seeds, st.integers(1, 50), fractions)
def test_with_the_euclidean_norm_term_b_gains_nothing_over_the_sum(seed: int, d: int, beta1: float) -> None:
    """C₂ Q with G² = d G_∞² is at least C₂ ‖pₜ − pₜ₋₁‖₁ with G_∞²."""
    change = np.random.default_rng(seed).standard_normal(d)
    facts = {"smoothness": 1.0, "beta1": beta1, "step_bound": 0.0, "first_norm": 0.0, "initial_gap": 0.0}
    block = theory.theorem1_constants(**facts, gradient_bound=theory.euclidean_bound(1.0, d)).c2
    diagonal = theory.theorem1_constants(**facts, gradient_bound=1.0).c2
    assert diagonal * np.abs(change).sum() <= block * np.abs(change).max() * (1 + 1e-12)


# 4, 5, 6: the corollary ----------------------------------------------------------------------------------------------


def accumulated(g: Array, eps: float) -> list[Array]:
    """P₁..P_T = (δ² I + Σ g gᵀ)^{-1/2}."""
    S = eps**2 * np.eye(g.shape[1]) + np.cumsum(np.einsum("ti,tj->tij", g, g), axis=0)
    return [function_of(M, lambda λ: 1 / np.sqrt(λ)) for M in S]


def unit_vectors(seed: int, T: int, d: int) -> Array:
    g = np.random.default_rng(seed).standard_normal((T, d))
    return np.asarray(g / np.linalg.norm(g, axis=1, keepdims=True))


def test_an_outer_product_has_a_zero_eigenvalue() -> None:
    g = np.array([3.0, 4.0])
    assert np.linalg.eigvalsh(np.outer(g, g)) == pytest.approx([0.0, 25.0], abs=1e-12)


def test_the_printed_sums_of_the_corollary_fail_in_ten_dimensions() -> None:
    """500 unit vectors, δ² = 0.01: Σ A = 48 against 7.2, Σ Q = 87.9 against 1; the corrected bounds hold."""
    g = unit_vectors(1, 500, 10)
    P = accumulated(g, eps=0.1)
    term_a = sum(float(np.sum((p @ v) ** 2)) for p, v in zip(P, g, strict=True))
    term_b = [spectral(now - before) for before, now in itertools.pairwise(P)]
    assert term_a == pytest.approx(48.1, abs=0.1)
    assert sum(term_b) == pytest.approx(87.9, abs=0.1)

    assert printed.term_a_sum(500, 1.0, 1.0) == pytest.approx(7.2, abs=0.05)
    assert printed.term_a_sum(500, 1.0, 1.0) < term_a
    exact = theory.term_a_log_det(np.linalg.eigvalsh(g.T @ g), eps=0.1)
    assert term_a <= exact <= theory.term_a_sum(500, 10, 1.0, eps=0.1)

    assert printed.term_b_sum(1.0) < sum(term_b)
    trace = theory.term_b_trace(np.linalg.eigvalsh(P[0]), np.linalg.eigvalsh(P[-1]))
    assert trace == pytest.approx(89.6, abs=0.05)
    assert sum(term_b) <= trace <= theory.term_b_sum(10, eps=0.1)

    squares = sum(q * q for q in term_b)
    assert printed.term_b_square_sum(1.0) < squares <= theory.term_b_square_sum(10, eps=0.1)


def test_the_trace_that_the_paper_takes_for_one_over_the_norm_is_infinite() -> None:
    """tr (δ² I + g gᵀ)^{-1/2} grows as (d − 1)/δ."""
    g = unit_vectors(0, 1, 5)
    for eps in (1e-2, 1e-4, 1e-6):
        trace = np.trace(accumulated(g, eps)[0])
        assert trace == pytest.approx(4 / eps, rel=2 * eps)
        assert trace > printed.term_b_sum(1.0)


def test_the_logarithm_comes_from_term_a() -> None:
    """In one dimension with |g| = 1, Σ A = Σ 1/(δ² + t) grows as log T for ever, Σ Q has a limit."""
    T = np.arange(1.0, 2**20 + 1)
    term_a, p = np.cumsum(1 / (0.01 + T)), 1 / np.sqrt(0.01 + T)
    grown = term_a[2 ** np.arange(11, 21) - 1]
    np.testing.assert_allclose(np.diff(grown), math.log(2), rtol=1e-3)
    assert np.sum(p[:-1] - p[1:]) <= theory.term_b_sum(1, eps=0.1)
    constants = theory.Theorem1Constants(1.0, 0.0, 0.0, 0.0)
    scaled = [
        theory.corollary_bound(constants, steps=t, dimension=3, gradient_bound=1.0, eps=0.1) * math.sqrt(t)
        for t in (10**6, 10**9, 10**12)
    ]
    assert np.diff(scaled) == pytest.approx([1.1 * 3 * math.log(1000)] * 2, rel=1e-3)


@few
@given(seeds, st.integers(1, 6), st.integers(1, 30), st.floats(1e-3, 1.0), st.floats(1e-2, 10.0))
def test_the_sums_of_the_corollary_hold_for_any_gradients(seed: int, d: int, T: int, eps: float, lr: float) -> None:
    """For both forms of P: δ² within the root, and as BlockAdagrad has it."""
    rng = np.random.default_rng(seed)
    g = rng.standard_normal((T, d)) * 10 ** rng.uniform(-3, 1, d)
    G = float(np.linalg.norm(g, axis=1).max())
    S = np.cumsum(np.einsum("ti,tj->tij", g, g), axis=0)
    library = [function_of(M, lambda λ, t=t: 1 / (np.sqrt(λ) + eps * math.sqrt(t))) for t, M in enumerate(S, start=1)]
    for form in (accumulated(g, eps), library):
        P = [lr * p for p in form]
        term_a = sum(float(np.sum((p @ v) ** 2)) for p, v in zip(P, g, strict=True))
        term_b = [spectral(now - before) for before, now in itertools.pairwise(P)]
        within = 1 + 1e-6
        exact = theory.term_a_log_det(np.maximum(np.linalg.eigvalsh(S[-1]), 0), eps, lr)
        assert term_a <= exact * within
        assert exact <= theory.term_a_sum(T, d, G, eps, lr) * within
        trace = theory.term_b_trace(np.linalg.eigvalsh(P[0]), np.linalg.eigvalsh(P[-1]))
        nuclear = sum(float(np.linalg.norm(now - before, "nuc")) for before, now in itertools.pairwise(P))
        assert nuclear == pytest.approx(trace, rel=1e-5, abs=1e-6 * lr / eps)
        assert sum(term_b) <= nuclear * within
        assert trace <= theory.term_b_sum(d, eps, lr) * within
        assert sum(q * q for q in term_b) <= theory.term_b_square_sum(d, eps, lr) * within
        assert np.linalg.eigvalsh(P[-1])[0] >= lr / (math.sqrt(T) * (G + eps)) / within


@few
@given(seeds, st.sampled_from([0.0, 0.5, 0.9]))
def test_the_corollary_holds_for_adagrad_and_adafom(seed: int, beta1: float) -> None:
    rng = np.random.default_rng(seed)
    T, lr, eps = 30, 10 ** rng.uniform(-2, 0), 10 ** rng.uniform(-1, 0)
    H, x1 = semidefinite(rng, 3), rng.standard_normal(3)

    def adagrad(g: Array) -> Array:
        return lr * function_of(g.T @ g, lambda λ: 1 / (np.sqrt(λ) + eps * math.sqrt(len(g))))

    path = descend(H, x1, np.zeros((T, 3)), [beta1] * T, blockwise([slice(0, 3)], adagrad))
    G = path.gradient_bound
    constants = theory.theorem1_constants(
        smoothness=spectral(H),
        gradient_bound=G,
        beta1=beta1,
        step_bound=lr * G / eps,
        first_norm=lr / eps,
        initial_gap=float(x1 @ H @ x1) / 2,
    )
    least = min(float(e @ e) for e in path.exact)
    assert least <= theory.corollary_bound(constants, steps=T, dimension=3, gradient_bound=G, eps=eps, lr=lr)


def test_a_recorded_run_of_block_adagrad_keeps_the_sums_of_the_corollary() -> None:
    """The nuclear Term B of the recorder telescopes to tr P₁ − tr P_T, and Term A stays below its logarithm."""
    torch.manual_seed(0)
    p = Parameter(torch.zeros(12, dtype=torch.float64))
    optimizer = BlockAdagrad([p], lr=0.1, eps=0.05, block_size=4)
    g = torch.randn(40, 12, dtype=torch.float64)
    with SpectrumRecorder(optimizer, every=1) as recorder:
        for value in g:
            p.grad = value.clone()
            optimizer.step()
    rows = [row for row in recorder.history if row["parameter"] == "total"]
    spectra, sums = [], []
    for T in (1, 40):
        blocks = [(g[:T, i : i + 4].T @ g[:T, i : i + 4]).numpy() for i in (0, 4, 8)]
        sums = [np.linalg.eigvalsh(block) for block in blocks]
        spectra.append([0.1 / (math.sqrt(max(λ, 0)) + 0.05 * math.sqrt(T)) for block in sums for λ in block])
    trace = theory.term_b_trace(*spectra)
    assert math.fsum(row["term_b_nuclear"] for row in rows[1:]) == pytest.approx(trace, rel=1e-6)
    assert math.fsum(row["term_b_spectral"] for row in rows[1:]) <= trace <= theory.term_b_sum(12, 0.05, 0.1)
    exact = theory.term_a_log_det([λ for block in sums for λ in block], eps=0.05, lr=0.1)
    assert math.fsum(row["term_a"] for row in rows) <= exact


# 7, 8: lemmas of Theorem 2 -------------------------------------------------------------------------------------------


def test_the_norm_of_a_product_can_exceed_its_trace() -> None:
    """V = diag(100, 0), g = (1, 1), β₂ = 0.5: ‖X Y‖₂ = 1.17 > tr(X Y) = 1. Without the product the bound holds."""
    V, g, beta2 = np.diag([100.0, 0.0]), np.ones(2), 0.5
    after, before = root(beta2 * V + (1 - beta2) * np.outer(g, g)), math.sqrt(beta2) * root(V)
    product = (after - before) @ (after + before)
    assert spectral(product) == pytest.approx(1.17, abs=0.005)
    assert np.trace(product) == pytest.approx(1.0)
    assert spectral(after - before) <= theory.root_change_bound(math.sqrt(2), beta2)


@few
@given(seeds, st.integers(1, 6), st.integers(0, 6), fractions)
def test_the_root_of_v_changes_by_at_most_the_new_gradient(seed: int, d: int, rank: int, beta2: float) -> None:
    """Of any rank. From it follows the bound of the inverses that the proof of Theorem 2 uses."""
    rng = np.random.default_rng(seed)
    V, g = semidefinite(rng, d, rank), rng.standard_normal(d) * 10 ** rng.uniform(-3, 1)
    after, before = root(beta2 * V + (1 - beta2) * np.outer(g, g)), math.sqrt(beta2) * root(V)
    bound = theory.root_change_bound(float(np.linalg.norm(g)), beta2)
    noise = 1e-7 * spectral(after)
    assert spectral(after - before) <= bound + noise
    δ = 10 ** rng.uniform(-2, 0)
    inverses = [np.linalg.inv(M + δ * np.eye(d)) for M in (after, before)]
    assert spectral(inverses[0] - inverses[1]) <= (bound + noise) * spectral(inverses[1]) / δ * (1 + 1e-9)


def test_the_square_of_the_momentum_has_a_cross_term() -> None:
    """m = g = 1, β₁ = 0.9: ‖m‖² = 1, printed 0.82."""
    assert printed.momentum_bound(1.0, 1.0, 0.9) == pytest.approx(0.82)
    assert printed.momentum_bound(1.0, 1.0, 0.9) < 1.0 <= theory.momentum_bound(1.0, 1.0, 0.9) + 1e-12


@few
@given(seeds, st.integers(1, 5), fractions)
def test_the_square_of_the_momentum_is_at_most_the_mean_of_squares(seed: int, d: int, beta1: float) -> None:
    m, g = np.random.default_rng(seed).standard_normal((2, d))
    norms = float(np.linalg.norm(m)), float(np.linalg.norm(g))
    new = float(np.sum((beta1 * m + (1 - beta1) * g) ** 2))
    assert new <= theory.momentum_bound(*norms, beta1) * (1 + 1e-12)


# 9: Theorem 2 --------------------------------------------------------------------------------------------------------


def test_the_printed_remainder_is_less_than_the_sum_it_bounds() -> None:
    """The proof's last sum, Σ_t α β₁ₜ (G²/δ + G³ √(1 − β₂)/δ² + α L G²/(2δ²)), at G = 0.01."""
    facts = {"lr": 0.05, "smoothness": 1.0, "gradient_bound": 0.01, "beta2": 0.9, "eps": 0.1}
    beta1, decay, α, G, δ = 0.9, 0.5, 0.05, 0.01, 0.1
    each = G**2 / δ + G**3 * math.sqrt(0.1) / δ**2 + α * 1.0 * G**2 / (2 * δ**2)
    total = sum(α * beta1 * decay**t * each for t in range(200))
    printed_sum = sum(  # with the paper's own terms, where α β₁ₜ² stands for α² β₁ₜ
        α * β * (G**2 / δ + G**3 * math.sqrt(0.1) / δ**2 + β * G**2 / (2 * δ**2))
        for β in (beta1 * decay**t for t in range(200))
    )
    as_printed = printed.theorem2_remainder(beta1=beta1, beta1_decay=decay, **facts)
    assert as_printed < total <= theory.theorem2_remainder(beta1=beta1, beta1_decay=decay, **facts) * (1 + 1e-12)
    assert as_printed < printed_sum


def test_the_printed_bound_of_theorem_2_fails_in_one_dimension() -> None:
    """RMSprop on a Huber function whose slope is G = 0.1 at all 100 steps, t₀ = 100: every condition holds.

    Then f(x_{t₀}) − f* is small, and the sum of the early ‖∇f‖² is divided by T where only α T would do.
    """
    T, α, L, G, δ, beta2 = 100, 0.05, 1.0, 0.1, 0.1, 0.9
    conditions = theory.theorem2_conditions(
        lr=α, smoothness=L, gradient_bound=G, beta2=beta2, eps=δ, condition=1.0
    )  # a number has condition 1
    assert all(conditions)
    steps, v = [], 0.0
    for _ in range(T - 1):
        v = beta2 * v + (1 - beta2) * G**2
        steps.append(α * G / (math.sqrt(v) + δ))
    last = G / L  # x_T: where the slope begins to fall, f(x_T) = G²/(2L)
    facts = {"lr": α, "smoothness": L, "gradient_bound": G, "beta1": 0.0, "beta1_decay": 0.5, "beta2": beta2, "eps": δ}
    noiseless = {"variance": 0.0, "batch_size": 1, "steps": T}
    wrong = printed.theorem2_bound(
        **facts, **noiseless, initial_gap=G * last - G**2 / (2 * L), early_gradients=(T - 1) * G**2
    )
    right = theory.theorem2_bound(**facts, **noiseless, initial_gap=G * (last + sum(steps)) - G**2 / (2 * L))
    smallest = G**2  # min_t ‖∇f(x_t)‖²: it never falls
    assert wrong < 0.7 * smallest
    assert smallest <= right


@few
@given(seeds, st.sampled_from([0.0, 0.5, 0.9]), st.sampled_from([0.99, 0.999, 0.9999]))
def test_theorem_2_holds_in_expectation_with_the_condition_of_single_blocks(
    seed: int, beta1: float, beta2: float
) -> None:
    """Over all 32 outcomes of a two-point noise; δ and α at the edge of what the conditions allow."""
    rng = np.random.default_rng(seed)
    H, x1 = semidefinite(rng, 3), rng.standard_normal(3)
    noise = rng.standard_normal((5, 3)) * 10 ** rng.uniform(-2, 0) * spectral(H)
    blocks = [slice(0, 2), slice(2, 3)]
    betas = [beta1 * 0.8**t for t in range(5)]
    G = 1.2 * float(np.linalg.norm(H @ x1) + np.linalg.norm(noise, axis=1).max())  # checked below
    δ = next(δ for δ in np.geomspace(1e-3, 1e3, 2000) * G if G * (1 + math.sqrt(beta2) * G / δ) <= δ / limit(beta2))
    V = running_mean(beta2)
    lr = 2 * δ / (3 * spectral(H) * theory.condition_bound(G, beta2, δ))
    operator = blockwise(blocks, lambda g: lr * function_of(V(g), lambda λ: 1 / (np.sqrt(λ) + δ)))
    signs = list(itertools.product([-1.0, 1.0], repeat=5))
    paths = [descend(H, x1, noise * np.array(sign)[:, None], betas, operator) for sign in signs]
    assert max(np.linalg.norm(v) for path in paths for v in (*path.exact, *path.g)) <= G
    worst = max(
        float(np.linalg.cond(math.sqrt(beta2) * root(V(np.stack(path.g[:t])[:, block])) + δ * np.eye(size), 2))
        for path in paths
        for t in range(1, 6)
        for block, size in zip(blocks, (2, 1), strict=True)
    )
    assert worst <= theory.condition_bound(G, beta2, δ) * (1 + 1e-9)
    facts = {"lr": lr, "smoothness": spectral(H), "gradient_bound": G, "beta2": beta2, "eps": δ}
    assert all(theory.theorem2_conditions(**facts, condition=worst))
    bound = theory.theorem2_bound(
        **facts,
        steps=5,
        beta1=beta1,
        beta1_decay=0.8,
        initial_gap=float(x1 @ H @ x1) / 2,
        variance=float(np.sum(noise**2, axis=1).max()),
        batch_size=1,
    )
    assert np.mean([np.sum(np.square(path.exact)) / 5 for path in paths]) <= bound * (1 + 1e-9)


def limit(beta2: float) -> float:
    """3 √(1 − β₂)."""
    return 3 * math.sqrt(1 - beta2)


def test_momentum_that_does_not_decay_has_no_bound() -> None:
    facts = {"lr": 0.1, "smoothness": 1.0, "gradient_bound": 1.0, "beta1_decay": 1.0, "beta2": 0.9, "eps": 1.0}
    assert theory.theorem2_remainder(**facts, beta1=0.9) == math.inf
    assert theory.theorem2_remainder(**facts, beta1=0.0) == 0.0


# 10, 11: its conditions ----------------------------------------------------------------------------------------------


def test_the_papers_experiments_lie_outside_of_theorem_2() -> None:
    """δ = 1e-4 and β₂ = 0.999 ask for G κ ≤ 1.05e-3: gradients of a thousandth, with a perfect condition number."""
    assert theory.gradient_limit(0.999, 1e-4) == pytest.approx(1.05e-3, abs=5e-6)
    facts = {"lr": 1e-3, "smoothness": 1.0, "beta2": 0.999, "eps": 1e-4}
    assert theory.theorem2_conditions(**facts, gradient_bound=1.0, condition=1.0) == (False, False)
    assert theory.theorem2_conditions(**facts, gradient_bound=1e-3, condition=1.0) == (True, False)
    assert theory.theorem2_conditions(**{**facts, "lr": 6e-5}, gradient_bound=1e-3, condition=1.0) == (True, True)
    assert not theory.theorem2_conditions(**facts, gradient_bound=1e-3, condition=1.1).decay


@few
@given(seeds, st.integers(1, 6), st.integers(1, 20), fractions, st.floats(1e-4, 10.0))
def test_the_condition_number_is_bounded_for_any_gradients(seed: int, d: int, T: int, beta2: float, eps: float) -> None:
    rng = np.random.default_rng(seed)
    g = rng.standard_normal((T, d)) * 10 ** rng.uniform(-3, 1, d)
    G = float(np.linalg.norm(g, axis=1).max())
    κ = float(np.linalg.cond(math.sqrt(beta2) * root(running_mean(beta2)(g)) + eps * np.eye(d), 2))
    assert κ <= theory.condition_bound(G, beta2, eps) * (1 + 1e-6)


def test_an_input_that_is_always_zero_never_gives_full_rank() -> None:
    """As the border pixels of MNIST: their blocks stay zero, and Theorem 2 as printed never applies."""
    torch.manual_seed(0)
    model = torch.nn.Linear(5, 4)
    optimizer = BlockAdam(model.named_parameters())
    recorder = SpectrumRecorder(optimizer, every=10)
    for _ in range(50):
        x = torch.randn(8, 5)
        x[:, 2] = 0
        optimizer.zero_grad()
        (model(x) - torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
    rows = [row for row in recorder.history if row["parameter"] == "weight"]
    assert [(row["rank"], row["coordinates"]) for row in rows] == [(16, 20)] * 5
    assert {row["smallest_eigenvalue"] for row in rows} == {0.0}


# 12: the tables ------------------------------------------------------------------------------------------------------


def test_adagrads_average_is_over_the_past_and_not_over_all_steps() -> None:
    """The tables print Σ up to T, with 1/t or 1/T in front; V at t can hold no later gradient."""
    values, V = np.arange(1.0, 8.0), 0.0
    for t, value in enumerate(values, start=1):
        moment = average(t)
        V = moment.decay * V + moment.weight * value
        assert math.isclose(V, values[:t].mean())
        assert t == 7 or abs(V - values.mean()) > 0.4


def test_matrix_amsgrad_forgets_a_direction() -> None:
    """V = diag(1, 0), then diag(0, 1): Σ̂ keeps the sizes, U moves, and V̂ is not monotone: P grows along e₁."""
    p = Parameter(torch.zeros(2, dtype=torch.float64))
    optimizer = BlockAdam([p], lr=1.0, betas=(0.0, 0.0), eps=0.1, amsgrad=True, grouping="joint", bias_correction=False)
    recorder = SpectrumRecorder(optimizer, every=1)
    for value in ([1.0, 0.0], [0.0, 1.0]):
        p.grad = torch.tensor(value, dtype=torch.float64)
        optimizer.step()
    first, second = recorder.history[0], recorder.history[2]
    assert first["largest_eigenvalue"] == second["largest_eigenvalue"] == 1.0
    assert second["rank"] == 1.0  # a monotone V̂ would be the identity by now
    assert second["term_b_spectral"] == pytest.approx(1 / 0.1 - 1 / 1.1)  # along e₁ from 1/1.1 up to 1/0.1
    change_of_monotone = 1 / 0.1 - 1 / 1.1  # along e₂ alone, down
    assert second["term_b_nuclear"] == pytest.approx(2 * change_of_monotone)


# 13: lemmas of Theorem 1 ---------------------------------------------------------------------------------------------


def test_lemma_6_needs_the_square() -> None:
    """b² G² Q as in its statement is too small where Q > 1; b² G² Q² as in its proof holds."""
    b, G, Q = 1.0, 1.0, 3.0
    left = (b * Q * G) ** 2
    assert b**2 * G**2 * Q < left <= b**2 * G**2 * Q**2


@few
@given(st.lists(st.floats(-10, 10), min_size=2, max_size=30), fractions)
def test_lemma_8_holds_for_every_sign(a: list[float], beta: float) -> None:
    """It is stated for aᵢ ≤ 0 and used for aᵢ = Qᵢ ≥ 0; neither matters."""
    b = [sum(beta ** (i - k) * sum(a[k + 1 : i + 1]) for k in range(i + 1)) for i in range(len(a))]
    bound = (1 / (1 - beta)) ** 2 * (beta / (1 - beta)) ** 2 * sum(value**2 for value in a[1:])
    assert sum(value**2 for value in b) <= bound * (1 + 1e-9) + 1e-12


# Arguments -----------------------------------------------------------------------------------------------------------

GOOD: dict[str, Any] = {
    "constants": theory.Theorem1Constants(1.0, 1.0, 1.0, 1.0),
    "steps": 10,
    "dimension": 3,
    "beta1": 0.5,
    "beta2": 0.5,
    "beta1_decay": 0.5,
    "condition": 2.0,
    "term_a": [1.0],
    "term_b": [1.0],
    "smallest": [1.0],
    "eigenvalues": [1.0],
    "first": [1.0],
    "last": [1.0],
}
BAD: dict[str, tuple[Any, str]] = {
    "steps": (0, "an integer >= 1, got 0"),
    "dimension": (1.5, "an integer >= 1, got 1.5"),
    "beta1": (1.0, "in [0, 1), got 1.0"),
    "beta2": (-0.1, "in [0, 1), got -0.1"),
    "beta1_decay": (0.0, "in (0, 1], got 0.0"),
    "condition": (0.5, "a finite number in [1, inf), got 0.5"),
    "smoothness": (0.0, "a finite number > 0, got 0.0"),
    "eps": (math.nan, "a finite number > 0, got nan"),
    "lr": ("fast", "a finite number > 0, got 'fast'"),
    "initial_gap": (-1.0, "a finite number >= 0, got -1.0"),
}
FUNCTIONS = {
    f"{place}{name}": function
    for place, module in (("", theory), ("printed.", printed))
    for name, function in vars(module).items()
    if inspect.isfunction(function) and name != "checked"
}


def test_every_printed_form_has_a_corrected_one() -> None:
    assert {name for name in FUNCTIONS if name.startswith("printed.")} <= {f"printed.{name}" for name in theory.__all__}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_bad_arguments_are_refused_in_one_sentence(name: str) -> None:
    function = FUNCTIONS[name]
    good = {argument: GOOD.get(argument, 1.0) for argument in inspect.signature(function).parameters}
    assert function(**good) is not None
    for argument in good.keys() & BAD.keys():
        value, rule = BAD[argument]
        with pytest.raises(ValueError) as error:  # noqa: PT011
            function(**{**good, argument: value})
        assert str(error.value) == f"{function.__name__}: `{argument}` must be {rule}."


def test_a_rate_needs_something_to_divide_by() -> None:
    message = "theorem1_rate: `smallest` must be numbers whose sum is > 0, got 0.0."
    with pytest.raises(ValueError) as error:  # noqa: PT011
        theory.theorem1_rate(1.0, [])
    assert str(error.value) == message
