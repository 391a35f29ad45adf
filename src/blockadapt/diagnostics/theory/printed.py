"""Repeats what the paper prints where it is wrong, under the names that the corrected functions have."""

from __future__ import annotations

import math
from collections.abc import Iterable

from blockadapt.diagnostics.theory import theorem1, theorem2
from blockadapt.diagnostics.theory._arguments import checked
from blockadapt.diagnostics.theory.theorem1 import Theorem1Constants


@checked
def theorem1_constants(
    *, smoothness: float, gradient_bound: float, beta1: float, step_bound: float, first_norm: float
) -> Theorem1Constants:
    """Return the constants in the paper's proof of Theorem 1, which leave out f(x₁) − f* and twice the factor 3L/2.

        C₃ = (1 + L² b²/(1 − β₁)²) b² G²
        C₄ = b (G² + D²) + b² D² + 2 G² E‖P₁‖₂

    Args:
        smoothness: L.
        gradient_bound: G_∞ in the paper's reading.
        beta1: β₁.
        step_bound: D.
        first_norm: E‖P₁‖₂.
    """
    L, G, D, b = smoothness, gradient_bound, step_bound, beta1 / (1 - beta1)
    averaged = (L * b / (1 - beta1)) ** 2
    return Theorem1Constants(
        c1=1.5 * L + 0.5 + averaged,
        c2=G**2 * (b + 2),
        c3=(1 + averaged) * b**2 * G**2,
        c4=b * (G**2 + D**2) + b**2 * D**2 + 2 * G**2 * first_norm,
    )


def theorem1_bound(constants: Theorem1Constants, term_a: Iterable[float], term_b: Iterable[float]) -> float:
    """Return the bound as printed: its sum of Q_t² ends at T − 1, although the proof's T₅ has all of them."""
    Q = list(term_b)
    return theorem1.theorem1_bound(constants, term_a, Q) - (constants.c3 * Q[-1] ** 2 if Q else 0.0)


@checked
def term_a_sum(steps: int, gradient_bound: float, first_gradient: float) -> float:
    """Return 1 − 2 log‖g₁‖ + 2 log G + log T, from λ_min(g gᵀ) = ‖g‖²; in two dimensions or more it is 0."""
    return 1 - 2 * math.log(first_gradient) + 2 * math.log(gradient_bound) + math.log(steps)


@checked
def term_b_sum(first_gradient: float) -> float:
    """Return 1/‖g₁‖, taken for the trace of (g₁ g₁ᵀ)^{-1/2}, which is infinite in two dimensions or more."""
    return 1 / first_gradient


@checked
def term_b_square_sum(first_gradient: float) -> float:
    """Return 1/‖g₁‖², by the same trace."""
    return 1 / first_gradient**2


@checked
def corollary_bound(constants: Theorem1Constants, *, steps: int, gradient_bound: float, first_gradient: float) -> float:
    """Return G/√T · (C₁ (1 − 2 log‖g₁‖ + 2 log G + log T) + C₂/‖g₁‖ + C₃/‖g₁‖² + C₄), for α = 1."""
    c1, c2, c3, c4 = constants
    a = term_a_sum(steps, gradient_bound, first_gradient)
    bound = c1 * a + c2 * term_b_sum(first_gradient) + c3 * term_b_square_sum(first_gradient) + c4
    return gradient_bound / math.sqrt(steps) * bound


@checked
def momentum_bound(momentum: float, gradient: float, beta1: float) -> float:
    """Return β₁² ‖m_{t−1}‖² + (1 − β₁)² ‖g_t‖², without the cross term (Lemma 13 as printed)."""
    return (beta1 * momentum) ** 2 + ((1 - beta1) * gradient) ** 2


@checked
def theorem2_remainder(
    *, lr: float, smoothness: float, gradient_bound: float, beta1: float, beta1_decay: float, beta2: float, eps: float
) -> float:
    """Return C = α β₁ G²/(δ (1 − λ)) · (1 + G² √(1 − β₂)/δ + β₁ G L/(δ (1 + λ))).

    Where G < 1/2 it is less than the sum that the proof bounds by it.
    """
    G, momentum = gradient_bound, theorem2.momentum_series(beta1, beta1_decay)
    curvature = beta1 * G * smoothness / (eps * (1 + beta1_decay))
    return lr * momentum * G**2 / eps * (1 + G**2 * math.sqrt(1 - beta2) / eps + curvature)


@checked
def theorem2_bound(
    *,
    steps: int,
    lr: float,
    smoothness: float,
    gradient_bound: float,
    beta1: float,
    beta1_decay: float,
    beta2: float,
    eps: float,
    initial_gap: float,
    variance: float,
    batch_size: float,
    early_gradients: float = 0.0,
) -> float:
    """Return the bound as printed: C/T for C/(α T), f(x_{t₀}) − f* for the gap, and in C also Σ_{t<t₀} ‖∇f(x_t)‖².

    Args:
        steps: T.
        lr: α.
        smoothness: L.
        gradient_bound: G.
        beta1: β₁.
        beta1_decay: λ.
        beta2: β₂.
        eps: δ.
        initial_gap: f(x_{t₀}) − f*, all blocks having full rank from t₀ on.
        variance: σ².
        batch_size: M.
        early_gradients: Σ_{t<t₀} ‖∇f(x_t)‖².
    """
    given = {"lr": lr, "smoothness": smoothness, "gradient_bound": gradient_bound, "beta2": beta2, "eps": eps}
    remainder = theorem2_remainder(beta1=beta1, beta1_decay=beta1_decay, **given) + early_gradients
    noise = theorem2.noise_bound(variance / batch_size, **given)
    factor = 3 * (math.sqrt(beta2) * gradient_bound + eps) / (1 - beta1)
    return factor * (initial_gap / (lr * steps) + noise + remainder / steps)
