"""A slow optimizer written from the formulas alone: plain NumPy, float64, one dense matrix per block.

It shares no code with the library. Everything is per block, so that a block reads as one small full-matrix problem:

    m ← β₁ₜ m + (1 − β₁ₜ) g
    V ← H(V, g gᵀ) = U Λ Uᵀ
    s = (αₜ / (1 − Πβ₁)) / (√(Λ / (1 − β₂ᵗ)) + δ), clipped
    x ← x − U diag(s) Uᵀ m

A clip to "auto" measures: with p the step as it would be unclipped and m̂ = m / (1 − Πβ₁), over all blocks of the group,
rₜ = pᵀm̂ / (lr m̂ᵀm̂), and α*/lr is the mean of all rₜ before this step, weighted 0.999 to the power of their age.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Shape = tuple[int, ...]
Kind = Literal["adam", "adamw", "rmsprop", "adagrad", "adafom"]

CLOSED = 1e-2
LARGEST_KERNEL = 64


# ---------------------------------------------------------------------------------------------------------- the blocks


def runs(coordinates: Sequence[int], block_size: int) -> list[list[int]]:
    """Consecutive runs of `block_size`, the last one possibly shorter."""
    blocks: list[list[int]] = []
    for position, coordinate in enumerate(coordinates):
        if position % block_size == 0:
            blocks.append([])
        blocks[-1].append(coordinate)
    return blocks


def flat_index(index: Sequence[int], shape: Shape) -> int:
    """Position of an index in row-major order."""
    flat = 0
    for i, length in zip(index, shape, strict=True):
        flat = flat * length + i
    return flat


def input_blocks(shape: Shape, block_size: int) -> list[list[int]]:
    """Runs down each column of W[out, in]."""
    outputs, inputs = shape[0], math.prod(shape[1:])
    blocks = []
    for column in range(inputs):
        blocks += runs([flat_index((row, column), (outputs, inputs)) for row in range(outputs)], block_size)
    return blocks


def output_blocks(shape: Shape, block_size: int) -> list[list[int]]:
    """Runs along each row of W[out, in]."""
    outputs, inputs = shape[0], math.prod(shape[1:])
    blocks = []
    for row in range(outputs):
        blocks += runs([flat_index((row, column), (outputs, inputs)) for column in range(inputs)], block_size)
    return blocks


def filter_blocks(shape: Shape, block_size: int) -> list[list[int]]:
    """One block for each spatial kernel W[i, j, ...], cut into runs when it has more than 64 coordinates."""
    if len(shape) < 3:
        raise ValueError(f"a weight of shape {shape} has no spatial kernel")
    blocks = []
    for i in range(shape[0]):
        for j in range(shape[1]):
            kernel = [flat_index((i, j, *position), shape) for position in np.ndindex(*shape[2:])]
            blocks += runs(kernel, block_size if len(kernel) > LARGEST_KERNEL else len(kernel))
    return blocks


def explicit_blocks(shape: Shape, grouping: str, block_size: int) -> list[list[int]]:
    """The blocks of one parameter as lists of its own flat coordinates. `"joint"` belongs to a whole group."""
    everything = list(range(math.prod(shape)))
    if not everything:
        return []
    if grouping == "auto":
        if len(shape) >= 3 and math.prod(shape[2:]) > 1:
            grouping = "filter"
        elif len(shape) >= 2:
            grouping = "input"
        elif len(shape) == 1:
            grouping = "chunk"
        else:
            grouping = "diagonal"
    if grouping == "tensor":
        return [everything]
    if grouping == "diagonal" or len(shape) == 0:
        return [[coordinate] for coordinate in everything]
    if grouping == "chunk" or len(shape) == 1:
        return runs(everything, block_size)
    if grouping == "input":
        return input_blocks(shape, block_size)
    if grouping == "output":
        return output_blocks(shape, block_size)
    if grouping == "filter":
        return filter_blocks(shape, block_size)
    raise ValueError(f"no grouping {grouping!r} for a single parameter")


# ------------------------------------------------------------------------------------------------------- the optimizer


@dataclass
class Block:
    """One block: which coordinates, and all it remembers.

    `rank` is the number of steps before which V counts as rank-deficient, so that its eigenbasis is always fresh.
    """

    coordinates: list[int]
    rank: int
    m: Array
    accumulator: Array
    basis: Array | None
    largest: Array
    t: int = 0


class DenseOracle:
    """One param group, one dense matrix per block.

    Every option but the blocks may be assigned between steps and counts from the next step on. What a step has no use
    for under its options is forgotten: Σ̂ without AMSGrad, U without `refresh_every`. Oracles that make up one group
    share `ratios`, and have `measures` off: whoever steps them calls `measure` once for all.

    Args:
        x: Start, flat over the whole group.
        blocks: Coordinate lists that together name each coordinate once.
        kind: Which method.
        lr: α; assign `oracle.lr` to follow a schedule.
        betas: β₁ and β₂, as far as the method has them.
        eps: δ.
        weight_decay: Decoupled for "adamw", otherwise added to the gradient.
        amsgrad: Keep the largest sorted spectrum, before any correction.
        clip: (final_lr, γ) or None; final_lr may be "auto".
        bias_correction: Divide by 1 − Πβ₁ and 1 − β₂ᵗ.
        beta1_decay: λ in β₁ₜ = β₁ λ^{t−1}.
        refresh_every: k; the basis is recomputed when t ≤ rank or (t − 1) mod k = 0.
        maximize: Ascend.
        ranks: See `Block`; the block sizes unless given.
        together: Blocks span parameters, so that all of them take every step, whichever coordinates have a gradient.
    """

    def __init__(
        self,
        x: Array,
        blocks: Sequence[Sequence[int]],
        kind: Kind,
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-4,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        clip: tuple[float | str, float] | None = None,
        bias_correction: bool = True,
        beta1_decay: float = 1.0,
        refresh_every: int = 1,
        maximize: bool = False,
        ranks: Sequence[int] | None = None,
        together: bool = False,
    ) -> None:
        self.x: Array = np.array(x, dtype=np.float64)
        self.kind = kind
        self.lr = lr
        self.initial_lr = self.peak_lr = lr
        self.ratios: list[float] = []
        self.measures = True
        self.beta1 = 0.0 if kind in ("rmsprop", "adagrad") else betas[0]
        self.beta2 = betas[1]
        self.averages = kind in ("adagrad", "adafom")
        self.eps = eps
        self.weight_decay = weight_decay
        self.amsgrad = amsgrad
        self.clip = clip
        self.bias_correction = bias_correction
        self.beta1_decay = beta1_decay
        self.refresh_every = refresh_every
        self.maximize = maximize
        self.together = together
        named = sorted(coordinate for block in blocks for coordinate in block)
        assert named == list(range(self.x.size)), "the blocks are not a partition"
        if ranks is None:
            ranks = [len(block) for block in blocks]
        self.blocks = [
            Block(
                list(block),
                rank,
                np.zeros(len(block)),
                np.zeros((len(block),) * 2),
                None,
                np.zeros(len(block)),
            )
            for block, rank in zip(blocks, ranks, strict=True)
        ]

    def step(self, grad: Array, present: NDArray[np.bool_] | None = None) -> None:
        """Step each block that has a gradient.

        In a block that has one only in part, the missing gradient counts as zero and its coordinates do not move.
        """
        everywhere = present is None or bool(present.all())
        self.peak_lr = max(self.peak_lr, self.lr)
        self.along, self.square = 0.0, 0.0
        for block in self.blocks:
            here = None if everywhere else present[block.coordinates]
            if here is not None and not here.any() and not self.together:
                continue
            x, g = self.x[block.coordinates], grad[block.coordinates]
            if self.maximize:
                g = -g
            if self.weight_decay and self.kind != "adamw":
                g = g + self.weight_decay * x
            if here is None:
                self.x[block.coordinates] = self._step_block(block, x, g)
            else:
                self.x[block.coordinates] = np.where(here, self._step_block(block, x, np.where(here, g, 0.0)), x)
        if self.measures:
            self.measure(self.along, self.square)

    def measure(self, along: float, square: float) -> None:
        """Take in what all blocks of a group have shown of α* in a step."""
        if self.clip is None or self.clip[0] != "auto" or not along > 0:
            return
        if not (self.ratios and self._closes(len(self.ratios) + 1)):
            self.ratios.append(along / square / self.lr)

    @property
    def target(self) -> float | None:
        """α*; None if it is to be measured and has not been yet."""
        assert self.clip is not None
        final_lr = self.clip[0]
        if not isinstance(final_lr, str):
            return final_lr * self.lr / self.peak_lr
        return self.measured * self.lr if self.ratios else None

    @property
    def measured(self) -> float:
        """α*/lr as it was measured."""
        weights = 0.999 ** np.arange(len(self.ratios))[::-1]
        return float(weights @ self.ratios / weights.sum())

    def _closes(self, t: int) -> bool:
        """Whether all of the interval is within 1% at step t: λu/λl − 1."""
        assert self.clip is not None
        progress = self.clip[1] * t
        return (1 + 1 / progress) / (1 - 1 / (progress + 1)) - 1 < CLOSED

    def bounds(self, t: int) -> tuple[float, float, float]:
        """λl, λu and α*."""
        assert self.clip is not None
        if self.target is None:
            return 0.0, math.inf, math.nan
        target, progress = self.target, self.clip[1] * t
        return target * (1 - 1 / (progress + 1)), target * (1 + 1 / progress), target

    def _step_block(self, block: Block, x: Array, g: Array) -> Array:
        block.t += 1
        if self.kind == "adamw":
            x = x - self.lr * self.weight_decay * x
        beta1 = self.beta1 * self.beta1_decay ** (block.t - 1)
        block.m = beta1 * block.m + (1 - beta1) * g
        if self.clip is not None and self.target is not None and self._closes(block.t):
            return x - self.target * block.m
        basis, spectrum = self._decompose(block, self._second_moment(block, g))
        if self.amsgrad:
            block.largest = np.maximum(block.largest, spectrum)
            spectrum = block.largest
        else:
            block.largest = np.zeros(len(block.coordinates))
        s = self._spectrum(block, spectrum)
        averaged = block.m / self._first_correction(block)
        self.along += float((basis @ (s * (basis.T @ block.m))) @ averaged)
        self.square += float(averaged @ averaged)
        if self.clip is not None:
            lower, upper, _ = self.bounds(block.t)
            s = np.minimum(np.maximum(s, lower), upper)
        return x - basis @ (s * (basis.T @ block.m))

    def _second_moment(self, block: Block, g: Array) -> Array:
        outer = np.outer(g, g)
        if self.averages:
            block.accumulator = block.accumulator + outer
            return block.accumulator / block.t
        block.accumulator = self.beta2 * block.accumulator + (1 - self.beta2) * outer
        return block.accumulator

    def _decompose(self, block: Block, V: Array) -> tuple[Array, Array]:
        """Basis and spectrum, the spectrum ascending."""
        basis = block.basis
        if basis is None or block.t <= block.rank or (block.t - 1) % self.refresh_every == 0:
            spectrum, basis = np.linalg.eigh(V)
        else:
            spectrum = np.diag(basis.T @ V @ basis)
        block.basis = basis if self.refresh_every > 1 else None
        order = np.argsort(spectrum, kind="stable")
        return basis[:, order], np.maximum(spectrum[order], 0.0)

    def _first_correction(self, block: Block) -> float:
        if not self.bias_correction:
            return 1.0
        return float(1 - self.beta1**block.t * self.beta1_decay ** (block.t * (block.t - 1) / 2))

    def _spectrum(self, block: Block, spectrum: Array) -> Array:
        """s before it is clipped."""
        alpha = self.lr / math.sqrt(block.t) if self.averages else self.lr
        alpha /= self._first_correction(block)
        if self.bias_correction and not self.averages:
            spectrum = spectrum / (1 - self.beta2**block.t)
        return alpha / (np.sqrt(spectrum) + self.eps)
