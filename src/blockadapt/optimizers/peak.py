"""Remembers the largest lr of a param group so far, by which a clip knows how far a schedule has come down."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from blockadapt.optimizers.unit import Group
from blockadapt.terms import term_of
from blockadapt.validation import is_on_host


def peak_lr(group: Group) -> Any:
    """Find the largest lr of a group so far, its present one included."""
    lr, peak = group["lr"], group["peak_lr"]
    now, before = term_of(lr), term_of(peak)
    if isinstance(now, Tensor) and isinstance(before, Tensor):
        return torch.maximum(now, before.to(now.device))
    if isinstance(now, Tensor):
        return now.clamp(min=before)
    if isinstance(before, Tensor):
        return before.clamp(min=now)
    if now <= before:
        return peak
    return lr.clone() if isinstance(lr, Tensor) else lr


def set_peak_(group: Group, peak: Any) -> None:
    """Remember the largest lr; in place where it lies on a device, so that a captured step does it too."""
    if isinstance(peak, Tensor) and isinstance(group["peak_lr"], Tensor) and not is_on_host(peak):
        group["peak_lr"].copy_(peak)
    else:
        group["peak_lr"] = peak
