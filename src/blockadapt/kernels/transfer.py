"""Brings the numbers of a step onto a device: nobody waits for it, and a CUDA graph may be captured meanwhile."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from blockadapt.kernels.contract import Coefficients
from blockadapt.terms import Term
from blockadapt.validation import has_numbers


def term_table(coefficients: Sequence[Coefficients], device: torch.device, dtype: torch.dtype) -> Tensor:
    """Bring the terms of these coefficients onto the device, [len(coefficients), TERMS], without waiting for it.

    What the host knows is sent. Where the device knows some of it, or a CUDA graph is captured, which would send what
    lies in the host's memory at every replay, each column is made on the device.
    """
    rows = [one.terms for one in coefficients]
    if not is_capturing(device) and not any(isinstance(term, Tensor) for row in rows for term in row):
        return sent(torch.tensor(rows, dtype=torch.float64, device="cpu").to(dtype), device)
    return torch.stack([_column(terms, device) for terms in zip(*rows, strict=True)], dim=1).to(dtype)


def _column(terms: Iterable[Term], device: torch.device) -> Tensor:
    """Make a column of one term of several coefficients; those that are equal are one fill."""
    pieces = []
    for number, run in groupby(terms, key=lambda term: None if isinstance(term, Tensor) else term):
        members: list[Any] = list(run)
        if isinstance(number, float):
            pieces.append(torch.full((len(members),), number, dtype=torch.float64, device=device))
        else:
            pieces.append(torch.stack([member.to(device) for member in members]))
    return torch.cat(pieces)


def sent(host: Tensor, device: torch.device) -> Tensor:
    """Send a tensor to the device, which nobody waits for. Pinned memory is kept until it has left."""
    if device.type in ("cuda", "xpu") and has_numbers(host):
        host = host.pin_memory()
    return host.to(device, non_blocking=True)


def is_capturing(device: torch.device) -> bool:
    """Say whether what is launched on this device now goes into a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
