"""Stage 2 says how the statistics of a block move, and how they are stored.

First moment, one vector m per parameter; second moment, one symmetric matrix V per block:

    m ← β₁ₜ m + (1 − β₁ₜ) g                β₁ₜ = β₁ λ^{t−1}
    V ← d V + w g gᵀ                       running mean: d = β₂, w = 1 − β₂; average: d = 1 − 1/t, w = 1/t

V is stored packed: the lower triangle by rows, n(n+1)/2 numbers. Statistics are float32, or float64 for float64
parameters, whatever the parameter's dtype.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from blockadapt.terms import Term, power


class FirstMoment(NamedTuple):
    """Says how m moves at one step, and what makes it unbiased: m̂ = m / correction."""

    beta: Term
    correction: Term


class SecondMoment(NamedTuple):
    """Says how V moves at one step, V ← decay V + weight g gᵀ, and what makes it unbiased: V̂ = V / correction."""

    decay: Term
    weight: Term
    correction: Term


def first_moment(beta1: float, beta1_decay: float, step: Term, bias_correction: bool) -> FirstMoment:
    """Compute β₁ₜ = β₁ λ^{t−1}; the weights of g₁..gₜ in m sum to 1 − Π β₁τ = 1 − β₁ᵗ λ^{t(t−1)/2}."""
    beta1, beta1_decay = float(beta1), float(beta1_decay)  # NumPy would go on in half precision
    beta = beta1 * power(beta1_decay, step - 1)
    left = power(beta1, step) * power(beta1_decay, step * (step - 1) / 2) if bias_correction else 0.0
    return FirstMoment(beta, 1 - left)


def running_mean(beta2: float, step: Term, bias_correction: bool) -> SecondMoment:
    """Set V ← β₂ V + (1 − β₂) g gᵀ (RMSprop, Adam)."""
    beta2 = float(beta2)
    return SecondMoment(beta2, 1 - beta2, 1 - power(beta2, step) if bias_correction else 1.0)


def average(step: Term) -> SecondMoment:
    """Set V ← (1 − 1/t) V + g gᵀ / t, the mean of all g gᵀ so far (AdaGrad, AdaFom). It is unbiased as it is."""
    return SecondMoment(1 - 1 / step, 1 / step, 1.0)


def takes_numbers(tensor: Tensor) -> bool:
    """Tell whether a tensor is of a type that a step can move: real numbers of 16 bits or more.

    torch stores numbers of eight bits and computes nothing in them.
    """
    return tensor.is_floating_point() and tensor.dtype.itemsize > 1


def statistics_dtype(param: Tensor) -> torch.dtype:
    """Say which dtype the statistics of a parameter have: float64 for float64, else float32."""
    return torch.float64 if param.dtype == torch.float64 else torch.float32


def packed_length(n: int) -> int:
    """Count the numbers in the lower triangle of an n × n matrix."""
    return n * (n + 1) // 2


def updated_second_moment(packed: Tensor, g: Tensor, decay: Tensor, weight: Tensor) -> Tensor:
    """Compute d V + w g gᵀ for packed V [num_blocks, n(n+1)/2] and g [num_blocks, n]; d and w are [num_blocks, 1]."""
    n = g.shape[1]
    rows, columns = torch.tril_indices(n, n, device=g.device)
    return decay * packed + (weight * g)[:, rows] * g[:, columns]


def unpack(packed: Tensor, n: int) -> Tensor:
    """Make symmetric matrices [num_blocks, n, n] from packed ones [num_blocks, n(n+1)/2]."""
    rows, columns = torch.tril_indices(n, n, device=packed.device)
    dense = packed.new_empty(packed.shape[0], n, n)
    dense[:, rows, columns] = packed
    dense[:, columns, rows] = packed
    return dense
