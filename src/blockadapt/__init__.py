"""Offers block-diagonal adaptive optimizers: partition → moments → spectrum → kernel → update."""

from blockadapt.errors import NonFiniteGradientError
from blockadapt.kernels import Kernel
from blockadapt.optimizers import BlockAdaFom, BlockAdagrad, BlockAdam, BlockAdamW, BlockRMSprop
from blockadapt.parameter_groups import param_groups
from blockadapt.partition import IndexGroups
from blockadapt.planning import Plan, PlanRow, plan
from blockadapt.spectrum import SpectralFunction, SpectrumClip

__version__ = "0.1.0"

__all__ = [
    "BlockAdaFom",
    "BlockAdagrad",
    "BlockAdam",
    "BlockAdamW",
    "BlockRMSprop",
    "IndexGroups",
    "Kernel",
    "NonFiniteGradientError",
    "Plan",
    "PlanRow",
    "SpectralFunction",
    "SpectrumClip",
    "param_groups",
    "plan",
]
