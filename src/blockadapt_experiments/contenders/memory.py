"""Says how much memory an optimizer holds."""

from __future__ import annotations

from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves


def state_bytes_of(optimizer: Optimizer) -> int:
    """Count the bytes of all tensors that an optimizer keeps, also those in lists."""
    entries = tree_leaves(list(optimizer.state.values()))
    return sum(value.numel() * value.element_size() for value in entries if isinstance(value, Tensor))
