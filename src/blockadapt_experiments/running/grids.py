"""Lay out the grid that every arm searches: the learning rate, and other settings of the optimizer where asked.

A span has `points` values from `low` to `high`, evenly spaced on a log scale. The scale of a decay such as β₂ is that
of 1 − β₂, which is one over the steps that it remembers. A point of the grid is a tuple of whole numbers, one for each
span; numbers below 0 or from `points` on lie beyond the grid, at the same spacing.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import product

from blockadapt.validation import require
from blockadapt_experiments.contenders.catalogue import OptimizerSettings
from blockadapt_experiments.core.settings import TuneSettings
from blockadapt_experiments.names import nearest

DECAYS = ("beta1", "beta2", "rms_decay", "momentum", "ggt_beta2")
"""Settings that are spaced by their distance from 1."""

TUNABLE = tuple(field.name for field in fields(OptimizerSettings) if isinstance(field.default, float))
"""Settings that can be tuned beside the learning rate: those that are numbers."""

Point = tuple[int, ...]


@dataclass(frozen=True)
class Span:
    """Says which values of one setting are tried.

    Attributes:
        name: "lr", or the name of a setting of the optimizer.
        low: The smallest value of the grid.
        high: The largest.
        points: How many there are.
    """

    name: str
    low: float
    high: float
    points: int

    def value(self, number: int) -> float | None:
        """Give the value at this place of the span; None where there is none, as of a decay below 0.

        >>> [Span("lr", 1e-3, 1e-1, 3).value(number) for number in (-1, 0, 1, 2, 3)]
        [0.0001, 0.001, 0.01, 0.1, 1.0]
        >>> [Span("beta2", 0.9, 0.999, 3).value(number) for number in (-2, -1, 0, 1, 2, 3)]
        [None, 0.0, 0.9, 0.99, 0.999, 0.9999]
        """
        if number in (0, self.points - 1):
            return self.high if number else self.low
        decay = self.name in DECAYS
        first, last = (1 - self.low, 1 - self.high) if decay else (self.low, self.high)
        found = float(f"{first * (last / first) ** (number / (self.points - 1)):.3g}")
        if 0 < number < self.points - 1:
            found = min(max(found, min(first, last)), max(first, last))  # rounding must not leave a narrow grid
        if not decay:
            return found if 0 < found < math.inf else None
        return round(1 - found, 15) if 0 < found <= 1 else None


def lr_span(tune: TuneSettings) -> Span:
    """Make the span of the learning rate."""
    return Span("lr", tune.low, tune.high, tune.trials)


def parse_spans(texts: Sequence[str]) -> tuple[Span, ...]:
    """Read the spans beside the learning rate.

    Raises:
        ValueError: One is not of the form that it must have, or two are of one setting.
    """
    spans = tuple(parse_span(text) for text in texts)
    names = [span.name for span in spans]
    require(len(names) == len(set(names)), "run", "tune_over", "given once for each setting", list(texts))
    return spans


def parse_span(text: str) -> Span:
    """Read a span as it is typed: `NAME=LOW:HIGH`, or `NAME=LOW:HIGH:POINTS`, 3 if not said.

    Raises:
        ValueError: It is not of this form, or there is no such setting; the sentence names the nearest.
    """
    name, _, words = text.partition("=")
    name, numbers = name.strip().removeprefix("optimizer."), words.split(":")
    if name not in TUNABLE:
        raise ValueError(
            f"run: `tune_over` has no setting {name!r} to tune; the nearest is {nearest(name, TUNABLE)!r}."
        )
    try:
        low, high, points = float(numbers[0]), float(numbers[1]), int(numbers[2]) if numbers[2:] else 3
    except (ValueError, IndexError):
        low, high, points = math.nan, math.nan, 0
    decay = name in DECAYS
    ok = points >= 2 and len(numbers) <= 3 and (0 <= low < high < 1 if decay else 0 < low < high < math.inf)
    limits = "0 <= LOW < HIGH < 1" if decay else "0 < LOW < HIGH"
    require(ok, "run", "tune_over", f"{name}=LOW:HIGH[:POINTS] with {limits} and POINTS >= 2", text)
    return Span(name, low, high, points)


def grid(spans: Sequence[Span]) -> list[Point]:
    """List all points of the grid, the learning rate ascending."""
    return list(product(*(range(span.points) for span in spans)))


def outward(spans: Sequence[Span], tried: Collection[Point], point: Point) -> Iterator[tuple[Span, str, Point]]:
    """Find the points next to this one that lie beyond all that was tried.

    Yields:
        The span that the point is beyond, at which edge, and the point.
    """
    for place, span in enumerate(spans):
        numbers = [other[place] for other in tried]
        for edge, number, outermost in (("lower", -1, min(numbers)), ("upper", 1, max(numbers))):
            if point[place] == outermost and span.value(outermost + number) is not None:
                yield span, edge, (*point[:place], outermost + number, *point[place + 1 :])


def values(spans: Sequence[Span], point: Point) -> Mapping[str, float]:
    """Give the value of each span, by name."""
    found = {span.name: span.value(number) for span, number in zip(spans, point, strict=True)}
    return {name: value for name, value in found.items() if value is not None}
