"""States Theorem 2 (RMSprop and Adam) as it holds."""

from __future__ import annotations

import math
from typing import NamedTuple

from blockadapt.diagnostics.theory._arguments import checked


@checked
def condition_bound(gradient_bound: float, beta2: float, eps: float) -> float:
    """Bound κ(√β₂ V^{1/2} + δ I) ≤ 1 + √β₂ G/δ, whatever the gradients."""
    return 1 + math.sqrt(beta2) * gradient_bound / eps


class Theorem2Conditions(NamedTuple):
    """Says which conditions of Theorem 2 hold. It needs both."""

    decay: bool
    step_size: bool


@checked
def theorem2_conditions(
    *, lr: float, smoothness: float, gradient_bound: float, beta2: float, eps: float, condition: float
) -> Theorem2Conditions:
    """Tell whether 1 − β₂ ≤ δ²/(9 G² κ²) and α ≤ 2δ/(3 L κ).

    No full rank is needed. The proof works block by block, so κ may be the largest κ of a single block, which
    `SpectrumRecorder` records.

    Args:
        lr: α, constant.
        smoothness: L.
        gradient_bound: G.
        beta2: β₂.
        eps: δ.
        condition: κ ≥ κ(√β₂ V_t^{1/2} + δ I) for all t; `condition_bound` will always do.
    """
    return Theorem2Conditions(
        decay=gradient_bound * condition <= gradient_limit(beta2, eps),
        step_size=lr <= 2 * eps / (3 * smoothness * condition),
    )


@checked
def gradient_limit(beta2: float, eps: float) -> float:
    """Return the first condition as G κ ≤ δ/(3 √(1 − β₂)). At the paper's δ = 1e-4, β₂ = 0.999 that is 1.05e-3."""
    return eps / (3 * math.sqrt(1 - beta2))


@checked
def root_change_bound(gradient: float, beta2: float) -> float:
    """Bound ‖V_t^{1/2} − √β₂ V_{t−1}^{1/2}‖₂ ≤ √(1 − β₂) ‖g_t‖, of any rank.

    The paper goes through ‖X Y‖₂ ≤ tr(X Y), false where X and Y do not commute, and through λ_min(g gᵀ) = ‖g‖².
    """
    return math.sqrt(1 - beta2) * gradient


@checked
def momentum_bound(momentum: float, gradient: float, beta1: float) -> float:
    """Bound ‖m_t‖² ≤ β₁ ‖m_{t−1}‖² + (1 − β₁) ‖g_t‖² (Lemma 13, corrected)."""
    return beta1 * momentum**2 + (1 - beta1) * gradient**2


@checked
def theorem2_remainder(
    *, lr: float, smoothness: float, gradient_bound: float, beta1: float, beta1_decay: float, beta2: float, eps: float
) -> float:
    """Return C = α β₁ G²/(δ (1 − λ)) · (1 + G √(1 − β₂)/δ + α L/(2δ)), which momentum costs in all, β₁ₜ = β₁ λ^{t−1}.

    It is infinite where β₁ does not decay (λ = 1).
    """
    G, momentum = gradient_bound, momentum_series(beta1, beta1_decay)
    return lr * momentum * G**2 / eps * (1 + root_change_bound(G, beta2) / eps + lr * smoothness / (2 * eps))


def momentum_series(beta1: float, beta1_decay: float) -> float:
    """Return Σ_t β₁ λ^{t−1} = β₁/(1 − λ)."""
    if beta1 == 0:
        return 0.0
    return math.inf if beta1_decay == 1 else beta1 / (1 - beta1_decay)


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
) -> float:
    """Bound RMSprop and Adam without bias correction where `theorem2_conditions` hold: (1/T) Σ_t E‖∇f(x_t)‖² is at most

        3 (√β₂ G + δ)/(1 − β₁) · [(f(x₁) − f*)/(α T) + (σ²/M) (G √(1 − β₂)/δ² + α L/(2δ²)) + C/(α T)]

    with C from `theorem2_remainder`.

    Args:
        steps: T.
        lr: α, constant.
        smoothness: L.
        gradient_bound: G.
        beta1: β₁.
        beta1_decay: λ in β₁ₜ = β₁ λ^{t−1}.
        beta2: β₂.
        eps: δ.
        initial_gap: f(x₁) − f*.
        variance: σ².
        batch_size: M.
    """
    given = {"lr": lr, "smoothness": smoothness, "gradient_bound": gradient_bound, "beta2": beta2, "eps": eps}
    remainder = theorem2_remainder(beta1=beta1, beta1_decay=beta1_decay, **given)
    noise = noise_bound(variance / batch_size, **given)
    factor = 3 * (math.sqrt(beta2) * gradient_bound + eps) / (1 - beta1)
    return factor * ((initial_gap + remainder) / (lr * steps) + noise)


def noise_bound(
    variance: float, *, lr: float, smoothness: float, gradient_bound: float, beta2: float, eps: float
) -> float:
    """Bound the part of the noise by (σ²/M) (G √(1 − β₂)/δ² + α L/(2δ²))."""
    return variance * (root_change_bound(gradient_bound, beta2) + lr * smoothness / 2) / eps**2
