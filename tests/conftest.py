"""Fixtures that all tests share."""

from __future__ import annotations

import os
import signal

import pytest
import torch

if not torch.cuda.is_available():
    # Without a GPU the Triton kernel is run by Triton's interpreter, which Triton has to know when it is imported.
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_configure() -> None:
    """Undo what a shell does to its background jobs: they ignore Ctrl-C, and so would every process of a test."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)  # tests run in parallel processes; those about threads set their own
