"""Holds segments as columns: places that stay from step to step, their gradients, and the few recipes that they share.

A kernel is given a sequence of segments. With thousands of small tensors that would be thousands of objects a step,
which Python's collector visits. So a segment is made only for whoever asks for it.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from torch import Tensor

from blockadapt.kernels.contract import Coefficients, Place, Segment, Tally


class Recipe(NamedTuple):
    """Holds what a segment has besides its place and its gradient; see `Segment`."""

    refresh: bool
    coefficients: Coefficients
    tally: Tally | None = None

    @property
    def key(self) -> Hashable:
        """Tell what it does: segments of places that keep the same state are alike if it is the same thing."""
        return self.refresh, self.tally and (self.tally, self.coefficients.first.correction)


class Places(list[Place]):
    """Lists places of one batch. It is not changed, so whoever has seen it knows it by its identity."""

    @cached_property
    def are_alike(self) -> bool:
        """Say whether all of them keep the same state, and none is empty."""
        return len({place.keeps for place in self}) <= 1 and all(place.num_blocks for place in self)


class Segments(Sequence[Segment]):
    """Is a sequence of segments that holds them as columns.

    Args:
        places: Where the blocks of each lie.
        grads: The gradient of each.
        recipes: That of each, or one for all.
    """

    def __init__(self, places: Places, grads: Sequence[Tensor], recipes: Sequence[Recipe]) -> None:
        self.places, self.grads, self.recipes = places, grads, recipes

    @classmethod
    def of(cls, segments: Sequence[Segment]) -> Segments:
        """Give the same segments as columns; themselves if they are so already."""
        if isinstance(segments, Segments):
            return segments
        places, grads = Places(segment.place for segment in segments), [segment.grad for segment in segments]
        return cls(places, grads, [Recipe(*segment[2:]) for segment in segments])

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, position: Any) -> Any:
        if isinstance(position, slice):
            return [self[i] for i in range(*position.indices(len(self)))]
        recipe = self.recipes[position if len(self.recipes) > 1 else 0]
        return Segment(self.places[position], self.grads[position], *recipe)

    @property
    def are_alike(self) -> bool:
        """Say whether all of them keep the same state and do the same thing, and none is empty."""
        recipes = {id(recipe): recipe for recipe in self.recipes}.values()
        return self.places.are_alike and len({recipe.key for recipe in recipes}) == 1


def columns(segments: Sequence[Segment]) -> list[Segments]:
    """Sort segments that keep the same state and do the same thing: almost always one list. Empty ones are left out."""
    all_of_them = Segments.of(segments)
    if all_of_them.are_alike:
        return [all_of_them]
    alike: dict[Hashable, list[Segment]] = {}
    for segment in all_of_them:
        if segment.place.num_blocks:
            alike.setdefault((segment.place.keeps, Recipe(*segment[2:]).key), []).append(segment)
    return [*map(Segments.of, alike.values())]
