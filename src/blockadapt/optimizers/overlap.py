"""Finds tensors that share memory: of two writes to it, one would be lost."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from blockadapt.kernels.safety import may_overlap, span_bytes
from blockadapt.validation import has_numbers


def overlap(tensors: Sequence[Tensor]) -> tuple[int, int] | None:
    """Find the positions of two tensors that share memory, equal ones where entries of one tensor do; None if none do.

    Tensors whose memory may be in common are rare, so only these are looked at entry by entry.
    """
    lying = [i for i, tensor in enumerate(tensors) if tensor.numel() and has_numbers(tensor)]
    close: list[int] = []
    place, reach = -1, 0
    for device, begin, i in sorted((tensors[i].get_device(), tensors[i].data_ptr(), i) for i in lying):
        tensor = tensors[i]
        if device != place or begin >= reach:
            if (found := _common(tensors, close)) is not None:
                return found
            close, place, reach = [], device, begin
        close.append(i)
        reach = max(reach, begin + (tensor.nbytes if tensor.is_contiguous() else span_bytes(tensor)))
    return _common(tensors, close)


def _common(tensors: Sequence[Tensor], close: Sequence[int]) -> tuple[int, int] | None:
    """Do the same for tensors of one device, sorted by address, that reach into each other. It marks their entries."""
    if len(close) < 2 and not any(_may_repeat(tensors[i]) for i in close):
        return None
    start = tensors[close[0]].data_ptr()
    begins = [tensors[i].data_ptr() - start for i in close]
    unit = math.gcd(*begins, *(tensors[i].itemsize for i in close))
    end = max(begin + span_bytes(tensors[i]) for begin, i in zip(begins, close, strict=True))
    owners = torch.full((end // unit,), -1, dtype=torch.int32, device="cpu")
    for begin, i in zip(begins, close, strict=True):
        tensor = tensors[i]
        each = tensor.itemsize // unit
        strides = [stride * each for stride in tensor.stride()]
        entries = owners.as_strided((*tensor.shape, each), (*strides, 1), begin // unit)
        if (other := int(entries.max())) >= 0:
            return other, i
        entries.fill_(i)
        if _may_repeat(tensor) and int((owners == i).sum()) < entries.numel():
            return i, i
    return None


def _may_repeat(tensor: Tensor) -> bool:
    """Say whether two entries might share memory."""
    return not tensor.is_contiguous() and may_overlap(tensor)
