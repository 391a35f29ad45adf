"""Long runs: float32 stays with the float64 oracle, and memory stays where it is."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from support.cases import METHODS, each_backend, make_oracle

STEPS = 100_000

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "adam": ("adam", {"lr": 1e-3, "eps": 1e-3}),
    "adagrad": ("adagrad", {"lr": 1e-1, "eps": 1e-3}),
    "amsgrad with refresh": ("amsgrad", {"lr": 1e-3, "eps": 1e-3, "refresh_every": 10}),
}

DRIFT = 1e-3
"""Largest deviation allowed anywhere, in units of the largest coordinate: see docs/reliability.md for what is seen."""


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.slow
@each_backend
@pytest.mark.parametrize("case", CASES)
def test_a_hundred_thousand_steps_stay_with_float64_and_in_memory(case: str, backend: str) -> None:
    """A noisy quadratic, each side with gradients at its own point, as in training."""
    method, options = CASES[case]
    rng = np.random.default_rng(0)
    A = rng.standard_normal((12, 12)) / 4
    H = A @ A.T + 0.1 * np.eye(12)
    weight = nn.Parameter(torch.from_numpy(rng.standard_normal((4, 3))).float())
    optimizer = METHODS[method].cls([weight], **METHODS[method].options, **options, backend=backend)
    oracle = make_oracle(METHODS[method], options, [weight])
    size, drift, early = float(np.abs(oracle.x).max()), 0.0, 0
    for step in range(1, STEPS + 1):
        noise = rng.standard_normal(12)
        x = weight.detach().numpy().reshape(-1).astype(np.float64)
        weight.grad = torch.from_numpy((H @ x + noise).reshape(4, 3)).float()
        optimizer.step()
        oracle.step(H @ oracle.x + noise)
        if step % 100 == 0:
            drift = max(drift, float(np.abs(weight.detach().numpy().reshape(-1) - oracle.x).max()) / size)
        if step == 5_000 and sys.platform == "linux":
            early = resident_bytes()
    grown = resident_bytes() - early if sys.platform == "linux" else 0
    print(f"{case}, {backend}: drift {drift:.1e} of |x|, {grown / 1e6:+.1f} MB")
    assert drift < DRIFT
    assert grown < 4e6
