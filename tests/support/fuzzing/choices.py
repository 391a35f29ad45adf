"""What is drawn at random: models, options that are valid and options that are not, and how a tensor lies."""

from __future__ import annotations

import math
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from blockadapt import IndexGroups, SpectrumClip
from support.oracle import Shape

SHAPES: list[Shape] = [
    (),
    (0,),
    (3, 0),
    (1,),
    (7,),
    (5, 3),
    (4, 4),
    (3, 1),
    (2, 2, 3),
    (2, 3, 2, 2),
    (3, 2, 1, 1),
    (9, 8),
    (1, 1, 9, 8),
]

GROUPINGS = ["auto", "input", "output", "filter", "chunk", "tensor", "diagonal", "joint", "explicit"]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
CLIPS = [
    None,
    SpectrumClip(0.05, 0.05),
    SpectrumClip(0.02, 2.0),
    SpectrumClip(0.1, 60.0),
    SpectrumClip("auto", 0.05),
    SpectrumClip("auto", 60.0),
]
"""γ = 60 closes at step 4."""

VALID: dict[str, list[Any]] = {
    "lr": [1e-3, 0.02, 0.1, torch.tensor(0.05)],
    "betas": [(0.9, 0.999), (0.0, 0.9), [0.5, 0.95]],
    "alpha": [0.99, 0.9],
    "beta1": [0.9, 0.0, 0.5],
    "momentum": [None, 0.9, 0.0, 0.5],
    "beta1_decay": [1.0, 0.9],
    "eps": [1e-2, 0.3],
    "weight_decay": [0.0, 0.1],
    "amsgrad": [False, True],
    "bias_correction": [False, True],
    "refresh_every": [1, 2, 5],
    "maximize": [False, True],
    "on_nonfinite": ["raise", "skip", "propagate"],
    "clip": CLIPS,
}
INVALID: dict[str, list[Any]] = {
    "lr": [math.nan, math.inf, -1.0, "fast", None, torch.ones(2)],
    "betas": [(1.5, 2), (0.9,), (0.9, math.nan), 0.9, None],
    "alpha": [1.0, -0.1, math.nan, "x"],
    "beta1": [1.0, -0.1, None],
    "momentum": [1.0, -0.1, "x"],
    "beta1_decay": [0.0, 1.5, math.nan],
    "eps": [0.0, -1e-8, math.nan, None],
    "weight_decay": [-0.1, math.inf, "x"],
    "amsgrad": ["yes", None, 2],
    "bias_correction": [1.5, "no"],
    "refresh_every": [0, -1, 1.5, None],
    "maximize": ["up"],
    "on_nonfinite": ["typo", None],
    "capturable": [True, None, "yes"],
    "skipped_steps": ["x", None, -1],
    "clip": ["tight", 0.1],
    "block_size": [0, -3, 2.5, 5000, None],
    "grouping": ["typo", None, 3, IndexGroups([[0, 1], [1, 2]]), IndexGroups([[10**9]])],
}

index = st.integers(0, 11)
"""Which of a list, counted around it: the lists' lengths change as training goes on."""

models = st.lists(st.tuples(st.sampled_from(SHAPES), st.integers(0, 3)), min_size=1, max_size=3)


def laid_out(values: Tensor, layout: int) -> Tensor:
    """The same numbers: contiguous (0), channels_last (1), dimensions backwards (2), every other of a storage (3)."""
    if layout == 1 and values.ndim == 4:
        return values.contiguous(memory_format=torch.channels_last)
    if layout == 2:
        backwards = list(reversed(range(values.ndim)))
        return values.permute(backwards).contiguous().permute(backwards)
    if layout == 3 and values.ndim:
        return values.repeat_interleave(2, dim=-1)[..., ::2]
    return values.contiguous()
