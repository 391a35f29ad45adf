"""Who holds which blocks: the seam between one process and many.

A step asks nothing else about processes. `OneProcess` holds every block; whoever shares blocks out answers otherwise.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from blockadapt.partition import Cut


class Ranks(Protocol):
    """What a step needs to know of the processes that train together."""

    def local(self, tensor: Tensor) -> Tensor:
        """The part of a parameter, gradient or state that lies here."""
        ...

    def zeros(self, param: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """New state for a parameter, spread as the parameter is."""
        ...

    def blocks(self, cut: Cut) -> slice:
        """The blocks that this process moves."""
        ...

    def agree(self, skip: bool) -> bool:
        """Whether all skip this step: they do as soon as one does."""
        ...

    def publish_(self) -> None:
        """Give the others what was moved here. The last thing in a step."""
        ...


class OneProcess:
    """Every block is here."""

    def local(self, tensor: Tensor) -> Tensor:
        """All of it."""
        return tensor

    def zeros(self, param: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Zeros where the parameter is."""
        return torch.zeros(shape, dtype=dtype, device=param.device)

    def blocks(self, cut: Cut) -> slice:
        """All blocks."""
        return slice(0, sum(cut.sizes.values()))

    def agree(self, skip: bool) -> bool:
        """Nobody else has a say."""
        return skip

    def publish_(self) -> None:
        """Nobody else waits for it."""
