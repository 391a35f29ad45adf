"""Training as the oracle sees it: param groups, and in them units of parameters that share blocks."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch.nn import Parameter

from blockadapt import SpectrumClip
from support.cases import Options, blocks_of
from support.oracle import DenseOracle


@dataclass(eq=False)
class Unit:
    """Parameters that share blocks, and their oracle."""

    params: list[Parameter]
    oracle: DenseOracle
    t: int = 0
    tolerance: float = 0.0
    """The coarsest of all precisions that its state has had."""
    freed: bool = False
    starved: bool = False
    """Whether a gradient of it was zero: a kept basis of the null space is then arbitrary."""


@dataclass(eq=False)
class Group:
    """One param group as the oracle sees it."""

    params: list[Parameter]
    options: Options
    units: list[Unit] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)
    """What a clip has measured, of all units."""

    def closes(self, clip: SpectrumClip | None, t: int) -> bool:
        """Whether a clip has closed at step t. It cannot before it knows on what."""
        return clip is not None and (clip.final_lr != "auto" or bool(self.ratios)) and is_closed(clip, t)


def cut(params: list[Parameter], options: Options) -> list[list[int]]:
    """The blocks of these parameters as lists of coordinates; none where there are no coordinates."""
    blocks, _ = blocks_of(options["grouping"], options["block_size"], [tuple(p.shape) for p in params])
    return [block for block in blocks if block]


def is_closed(clip: SpectrumClip, t: int) -> bool:
    """λᵤ/λₗ = (1 + 1/(γt))² < 1.01."""
    return (1 + 1 / (clip.gamma * t)) ** 2 - 1 < 1e-2
