"""Which tensors share memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from blockadapt.optimizers.overlap import overlap

BASE = torch.zeros(48)
MATRIX = BASE.view(6, 8)

APART: dict[str, list[Tensor]] = {
    "none": [],
    "side by side": [BASE[:12], BASE[12:]],
    "between each other": [BASE[::2], BASE[1::2]],
    "columns": [MATRIX[:, 5:], MATRIX[:, :2], MATRIX[:, 2:5]],
    "steps that pass each other": [BASE.as_strided((2, 3), (3, 2))],
    "no entries": [BASE[3:3], BASE, BASE[5:5]],
    "one entry, a stride of any length": [BASE[:1].as_strided((1, 1), (10**9, 10**9)), BASE[1:]],
    "two types": [BASE[:4].view(torch.bfloat16), BASE[4:8]],
    "no numbers": [torch.zeros(4, device="meta"), torch.zeros(4, device="meta")],
}

TOGETHER: dict[str, tuple[list[Tensor], tuple[int, int]]] = {
    "one place twice": ([torch.zeros(3), BASE, BASE.detach()], (1, 2)),
    "an end": ([BASE[11:30], torch.zeros(3), BASE[:12]], (2, 0)),
    "far behind the begin": ([BASE[::4], BASE[31:34]], (0, 1)),
    "transposed": ([MATRIX[:6, :6], MATRIX[:6, :6].t()], (0, 1)),
    "every third and every other": ([BASE[1::2], BASE[::3]], (1, 0)),
    "in the midst of many": ([BASE[:5], BASE[20:25], BASE[3:20], BASE[25:]], (0, 2)),
    "half an entry": ([BASE.view(torch.bfloat16)[1::2], BASE[::2]], (1, 0)),
    "a window that slides": ([BASE[:7].as_strided((4, 4), (1, 1))], (0, 0)),
    "expanded": ([torch.zeros(2), torch.zeros(1).expand(4)], (1, 1)),
    "expanded beside another": ([BASE[:8].as_strided((2, 4), (0, 2)), BASE[1:8:2]], (0, 0)),
}


@pytest.mark.parametrize("tensors", APART.values(), ids=APART.keys())
def test_what_lies_apart_is_told_from_what_does_not(tensors: list[Tensor]) -> None:
    assert overlap(tensors) is None


@pytest.mark.parametrize(("tensors", "found"), TOGETHER.values(), ids=TOGETHER.keys())
def test_what_shares_memory_is_found(tensors: list[Tensor], found: tuple[int, int]) -> None:
    assert overlap(tensors) == found
