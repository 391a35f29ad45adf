"""Fixtures that all tests share."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)  # tests run in parallel processes; those about threads set their own
