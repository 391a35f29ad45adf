"""States Theorem 1 and its corollary as they hold."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from blockadapt.diagnostics.theory._arguments import checked
from blockadapt.validation import require


@checked
def euclidean_bound(coordinate_bound: float, dimension: int) -> float:
    """Return G = √d G_∞, which is what a bound of every coordinate says about the Euclidean norm.

    The paper's G_∞² is therefore d G_∞² wherever its proofs use ‖·‖₂, and Σ_i |p_{t,i} − p_{t−1,i}| ≤ d Q_t: under its
    own assumption Term B gains nothing over the sum that stands in the diagonal theory.
    """
    return math.sqrt(dimension) * coordinate_bound


class Theorem1Constants(NamedTuple):
    """Holds C₁ to C₄ of Theorem 1: what multiplies ΣA, ΣQ and ΣQ², and what is added."""

    c1: float
    c2: float
    c3: float
    c4: float


@checked
def theorem1_constants(
    *,
    smoothness: float,
    gradient_bound: float,
    beta1: float,
    step_bound: float,
    first_norm: float,
    initial_gap: float,
) -> Theorem1Constants:
    """Return the constants with which Theorem 1 holds.

        C₁ = 3L/2 + 1/2 + L² b²/(1 − β₁)²
        C₂ = G² (b + 2)
        C₃ = (3L/2 + L² b²/(1 − β₁)²) b² G²
        C₄ = f(x₁) − f* + b (G² + D²) + (3L/2) b² D² + 2 G² E‖P₁‖₂

    Args:
        smoothness: L.
        gradient_bound: G.
        beta1: β₁; that of the first step where it decays.
        step_bound: D.
        first_norm: E‖P₁‖₂.
        initial_gap: f(x₁) − f*.
    """
    L, G, D, b = smoothness, gradient_bound, step_bound, beta1 / (1 - beta1)
    averaged = (L * b / (1 - beta1)) ** 2
    return Theorem1Constants(
        c1=1.5 * L + 0.5 + averaged,
        c2=G**2 * (b + 2),
        c3=(1.5 * L + averaged) * b**2 * G**2,
        c4=initial_gap + b * (G**2 + D**2) + 1.5 * L * b**2 * D**2 + 2 * G**2 * first_norm,
    )


def theorem1_bound(constants: Theorem1Constants, term_a: Iterable[float], term_b: Iterable[float]) -> float:
    """Bound E Σ_{t≤T} ⟨∇f(x_t), P_t ∇f(x_t)⟩ ≤ C₁ Σ_{t=1}^T A_t + C₂ Σ_{t=2}^T Q_t + C₃ Σ_{t=2}^T Q_t² + C₄.

    Args:
        constants: From `theorem1_constants`.
        term_a: A₁ to A_T, or their expectations.
        term_b: Q₂ to Q_T.
    """
    Q = list(term_b)
    sums = math.fsum(term_a), math.fsum(Q), math.fsum(q * q for q in Q)
    return math.fsum(c * value for c, value in zip(constants[:3], sums, strict=True)) + constants.c4


def theorem1_rate(bound: float, smallest: Iterable[float]) -> float:
    """Bound min_t E‖∇f(x_t)‖² ≤ bound / Σ_t γ_t, γ_t the least λ_min(P_t) over all gradients that may have come."""
    total = math.fsum(smallest)
    require(total > 0, "theorem1_rate", "smallest", "numbers whose sum is > 0", total)
    return bound / total


# The corollary: AdaGrad and AdaFom -----------------------------------------------------------------------------------


@checked
def term_a_log_det(eigenvalues: Iterable[float], eps: float, lr: float = 1.0) -> float:
    """Bound Σ_t A_t ≤ α² log det(I + S_T/δ²) = α² Σ_i log(1 + λ_i/δ²), λ_i the eigenvalues of S_T = Σ_{t≤T} g_t g_tᵀ.

    It holds for P_t = α (δ² I + S_t)^{-1/2}, and for α (S_t^{1/2} + δ √t I)^{-1}, which `BlockAdagrad` applies. Blocks
    add up.
    """
    return lr**2 * math.fsum(math.log1p(value / eps**2) for value in eigenvalues)


@checked
def term_a_sum(steps: int, dimension: int, gradient_bound: float, eps: float, lr: float = 1.0) -> float:
    """Bound Σ_t A_t ≤ α² d log(1 + T G²/(d δ²)): `term_a_log_det` at its worst."""
    return lr**2 * dimension * math.log1p(steps * gradient_bound**2 / (dimension * eps**2))


def term_b_trace(first: Iterable[float], last: Iterable[float]) -> float:
    """Bound Σ_{t=2}^T Q_t ≤ Σ_{t=2}^T ‖P_t − P_{t−1}‖_* = tr P₁ − tr P_T, by the eigenvalues of both: P_t falls."""
    return math.fsum(first) - math.fsum(last)


@checked
def term_b_sum(dimension: int, eps: float, lr: float = 1.0) -> float:
    """Bound Σ_{t≥2} Q_t ≤ tr P₁ ≤ α d/δ."""
    return lr * dimension / eps


@checked
def term_b_square_sum(dimension: int, eps: float, lr: float = 1.0) -> float:
    """Bound Σ_{t≥2} Q_t² ≤ tr P₁² ≤ α² d/δ²."""
    return lr**2 * dimension / eps**2


@checked
def corollary_bound(
    constants: Theorem1Constants, *, steps: int, dimension: int, gradient_bound: float, eps: float, lr: float = 1.0
) -> float:
    """Bound AdaGrad and AdaFom, α_t = α/√t: min_t E‖∇f(x_t)‖² = O(d log T/√T).

        (G + δ)/(α √T) · (C₁ α² d log(1 + T G²/(d δ²)) + C₂ α d/δ + C₃ α² d/δ² + C₄)

    The log T is that of Term A. No bound of Term B can remove it.

    Args:
        constants: From `theorem1_constants`; E‖P₁‖₂ ≤ α/δ and D ≤ α G/δ will do.
        steps: T.
        dimension: d.
        gradient_bound: G.
        eps: δ.
        lr: α.
    """
    c1, c2, c3, c4 = constants
    a = term_a_sum(steps, dimension, gradient_bound, eps, lr)
    bound = c1 * a + c2 * term_b_sum(dimension, eps, lr) + c3 * term_b_square_sum(dimension, eps, lr) + c4
    return (gradient_bound + eps) / (lr * math.sqrt(steps)) * bound
