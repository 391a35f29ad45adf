"""Holds the toy network: 2 → 2 → 2 → 1, ReLU, a sigmoid at the end; its loss with first and second derivatives by hand.

A step of an optimizer on ten numbers takes less time than autograd needs for their gradient; hence NumPy, float64, and
formulas that hold for one vector of weights or for a grid of them (leading dimensions written "…"). With biases, each
layer has a further input that is always 1, so that a bias is a weight like the others:

    a₁ = W₁ x    h₁ = relu(a₁)    a₂ = W₂ h₁    h₂ = relu(a₂)    z = w₃ · h₂    loss = mean(log(1 + eᶻ) − y z)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from blockadapt.validation import require_integer
from blockadapt_experiments.core.settings import Settings

Array = NDArray[np.float64]
Pair = list[int]
"""Two coordinates of the weights; a list, because NumPy indexes by it."""

WIDTH = 2
"""Of the input and of both hidden layers."""


@dataclass(frozen=True, kw_only=True)
class ToySettings(Settings):
    """Says what the toy experiments share; the paper leaves open all but the number of samples.

    Attributes:
        samples: n.
        biases: Whether units have biases: 15 parameters with them, 10 without.
        labels: Drawn with probability p, or p itself. With p itself the loss has its minimum at the true weights.
    """

    samples: int = 10
    biases: bool = False
    labels: Literal["bernoulli", "probability"] = "bernoulli"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_integer("settings", "samples", self.samples, least=2)


class Edge(NamedTuple):
    """Is an edge of the network: in which layer, to which output, from which input."""

    layer: int
    output: int
    input: int

    def __str__(self) -> str:
        return f"W{self.layer + 1}[{self.output},{self.input}]"


class Pass(NamedTuple):
    """Is a forward pass over n samples: d is 1 where a unit is active, e the derivative of z by a."""

    h1: Array  # […, n, inputs]
    h2: Array
    d1: Array  # […, n, WIDTH]
    d2: Array
    e1: Array
    e2: Array
    z: Array  # […, n]


@dataclass(frozen=True)
class Problem:
    """Holds true weights [P], inputs [n, inputs] with the constant where there are biases, and labels [n]."""

    truth: Array
    inputs: Array
    labels: Array

    @cached_property
    def edges(self) -> list[Edge]:
        """List the edge that each coordinate is the weight of."""
        inputs = range(self.inputs.shape[1])
        return [
            Edge(layer, k, j) for layer, outputs in enumerate((WIDTH, WIDTH, 1)) for k in range(outputs) for j in inputs
        ]

    def loss(self, weights: Array) -> Array:
        """Compute the mean binary cross-entropy […] of weights […, P]."""
        z = self._forward(weights, self.inputs).z
        loss: Array = np.mean(np.logaddexp(0, z) - self.labels * z, axis=-1)
        return loss

    def probability(self, weights: Array) -> Array:
        """Compute σ(z) […, n]."""
        return _sigmoid(self._forward(weights, self.inputs).z)

    def gradient(self, weights: Array, rows: NDArray[np.intp] | slice = slice(None)) -> Array:
        """Compute the gradient of the loss over these samples, […, P]."""
        inputs, labels = self.inputs[rows], self.labels[rows]
        at = self._forward(weights, inputs)
        residual = (_sigmoid(at.z) - labels) / len(labels)
        return (residual[..., None, :] @ self._jacobian(at, inputs))[..., 0, :]

    def hessian(self, weights: Array) -> Array:
        """Compute the Hessian of the loss, […, P, P]; the kinks of the ReLUs count for nothing.

        With r = σ(z) − y, J = ∂z/∂w: mean over samples of σ'(z) J Jᵀ + r ∂²z/∂w², where ∂²z/∂w² has entries only
        between layers, because z is linear in the weights of one layer.
        """
        at = self._forward(weights, self.inputs)
        jacobian, p = self._jacobian(at, self.inputs), _sigmoid(at.z)
        hessian: Array = np.swapaxes(jacobian * (p * (1 - p))[..., None], -1, -2) @ jacobian / len(self.labels)
        between = self._between_layers(weights, at, (p - self.labels) / len(self.labels))
        return hessian + between + np.swapaxes(between, -1, -2)

    def alive(self, weights: Array) -> bool:
        """Tell whether every hidden unit is active on some sample."""
        at = self._forward(weights, self.inputs)
        return bool((at.d1.any(axis=-2) & at.d2.any(axis=-2)).all())

    def _layers(self, weights: Array) -> tuple[Array, Array, Array]:
        """Return W₁ […, WIDTH, inputs], W₂ likewise, w₃ […, inputs]."""
        inputs = self.inputs.shape[1]
        W1, W2, w3 = np.split(weights, [WIDTH * inputs, 2 * WIDTH * inputs], axis=-1)
        shape = (*weights.shape[:-1], WIDTH, inputs)
        return W1.reshape(shape), W2.reshape(shape), w3

    def _forward(self, weights: Array, inputs: Array) -> Pass:
        W1, W2, w3 = self._layers(weights)
        a1 = inputs @ np.swapaxes(W1, -1, -2)
        h1 = self._hidden(a1)
        a2 = h1 @ np.swapaxes(W2, -1, -2)
        h2 = self._hidden(a2)
        d1, d2 = (a1 > 0).astype(np.float64), (a2 > 0).astype(np.float64)
        e2 = d2 * w3[..., None, :WIDTH]
        e1 = d1 * (e2 @ W2[..., :WIDTH])
        return Pass(h1, h2, d1, d2, e1, e2, (h2 @ w3[..., None])[..., 0])

    def _hidden(self, a: Array) -> Array:
        h = np.maximum(a, 0)
        return h if self.inputs.shape[1] == WIDTH else np.concatenate([h, np.ones_like(h[..., :1])], axis=-1)

    def _jacobian(self, at: Pass, inputs: Array) -> Array:
        """Compute ∂z/∂w […, n, P]."""
        flat = (*at.z.shape, -1)
        by_W1 = (at.e1[..., :, None] * inputs[:, None, :]).reshape(flat)
        by_W2 = (at.e2[..., :, None] * at.h1[..., None, :]).reshape(flat)
        return np.concatenate([by_W1, by_W2, at.h2], axis=-1)

    def _between_layers(self, weights: Array, at: Pass, residual: Array) -> Array:
        """Compute Σ r ∂²z/∂w², the part above the diagonal, […, P, P]."""
        _, W2, w3 = self._layers(weights)
        inputs = self.inputs.shape[1]
        T = np.einsum("...n,...nk,...nj,nl->...kjl", residual, at.d2, at.d1, self.inputs, optimize=True)
        S = np.einsum("...n,...nk,...nj->...kj", residual, at.d2, at.h1, optimize=True)
        second = np.zeros((*weights.shape, weights.shape[-1]))
        for k in range(WIDTH):
            row, last = (WIDTH + k) * inputs, 2 * WIDTH * inputs + k  # where W₂'s row k begins, where w₃ has k
            second[..., row : row + inputs, last] = S[..., k, :]
            for j in range(WIDTH):
                column = slice(j * inputs, (j + 1) * inputs)  # W₁'s row j
                second[..., column, row + j] = w3[..., k, None] * T[..., k, j, :]
                second[..., column, last] = W2[..., k, j, None] * T[..., k, j, :]
        return second


def draw_problem(random: np.random.Generator, settings: ToySettings) -> Problem:
    """Draw true weights N(0, 1) and inputs N(0, 1), and take labels from the network itself.

    Drawn again while a hidden unit is dead or all labels are equal: a loss without the unit, or without a minimum.
    """
    while True:
        inputs = random.standard_normal((settings.samples, WIDTH))
        if settings.biases:
            inputs = np.concatenate([inputs, np.ones((settings.samples, 1))], axis=1)
        truth = random.standard_normal((2 * WIDTH + 1) * inputs.shape[1])
        p = Problem(truth, inputs, np.zeros(settings.samples)).probability(truth)
        labels = p if settings.labels == "probability" else (random.random(settings.samples) < p).astype(np.float64)
        problem = Problem(truth, inputs, labels)
        if problem.alive(truth) and labels.min() < labels.max():
            return problem


def with_pair(weights: Array, pair: Pair, values: Array) -> Array:
    """Replace two of the weights [P]: […, P] for values […, 2]."""
    changed: Array = np.broadcast_to(weights, (*values.shape[:-1], weights.size)).copy()
    changed[..., pair] = values
    return changed


def pair_hessian(problem: Problem, weights: Array, pair: Pair) -> Array:
    """Return the rows and columns of these two weights, […, 2, 2]."""
    hessian: Array = problem.hessian(weights)[..., pair, :][..., pair]
    return hessian


def square(centre: Array, reach: float, points: int) -> Array:
    """Make a grid of two weights around a centre [2]: [points, points, 2], the first weight along the first axis."""
    offsets = np.linspace(-reach, reach, points)
    return centre + np.stack(np.meshgrid(offsets, offsets, indexing="ij"), axis=-1)


def same_layer_pairs(problem: Problem) -> list[Pair]:
    """List the pairs of weights of one layer from the same input neuron."""
    return _pairs(problem, lambda a, b: a.layer == b.layer and a.input == b.input)


def different_layers_pairs(problem: Problem) -> list[Pair]:
    """List the pairs of weights of different layers."""
    return _pairs(problem, lambda a, b: a.layer != b.layer)


def _pairs(problem: Problem, wanted: Callable[[Edge, Edge], bool]) -> list[Pair]:
    numbered = enumerate(problem.edges)
    return [[i, j] for (i, a), (j, b) in combinations(numbered, 2) if wanted(a, b)]


def _sigmoid(z: Array) -> Array:
    return 0.5 * (1 + np.tanh(0.5 * z))
