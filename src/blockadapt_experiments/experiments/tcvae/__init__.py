"""Runs `tcvae`: β-TCVAE on sprites."""

from __future__ import annotations

from blockadapt_experiments.experiments.tcvae.experiment import EXPERIMENTS

__all__ = ["EXPERIMENTS"]
