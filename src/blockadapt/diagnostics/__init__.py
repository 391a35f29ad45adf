"""Looks into a training run: what the optimizer applied, and what the theory says about it."""

from blockadapt.diagnostics import theory
from blockadapt.diagnostics.recorder import SpectrumRecorder

__all__ = ["SpectrumRecorder", "theory"]
