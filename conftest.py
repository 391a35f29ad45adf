"""Names that every docstring example may use."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import blockadapt


@pytest.fixture(autouse=True)
def _example_names(doctest_namespace: dict[str, Any]) -> None:
    doctest_namespace["torch"] = torch
    doctest_namespace.update({name: getattr(blockadapt, name) for name in blockadapt.__all__})
