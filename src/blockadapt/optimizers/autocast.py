"""Keeps `torch.autocast` out: matrix products of the statistics would be computed in half precision."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack, nullcontext

import torch


def without_autocast() -> AbstractContextManager[object]:
    """Make a context in which autocast is off, on the CPU and on the accelerator; one that does nothing if it is off.

    Example:
        >>> with torch.autocast("cpu", dtype=torch.bfloat16), without_autocast():
        ...     (torch.ones(2, 2) @ torch.ones(2, 2)).dtype
        torch.float32
    """
    accelerator = torch.accelerator.current_accelerator()
    kinds = {"cpu"} if accelerator is None else {"cpu", accelerator.type}
    if not any(map(torch.is_autocast_enabled, kinds)):
        return nullcontext()
    stack = ExitStack()
    for kind in kinds:
        stack.enter_context(torch.autocast(kind, enabled=False))
    return stack
