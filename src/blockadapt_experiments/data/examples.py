"""Holds images with their labels."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Examples:
    """Holds images [count, channels, height, width] and their labels [count], int64."""

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class Split:
    """Holds examples to train on, and others to test on."""

    train: Examples
    test: Examples
