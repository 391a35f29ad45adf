"""Compare arms and variants by pairs of seeds: each minus a reference, and the interval of that difference."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from blockadapt_experiments.claims.contests import Side, at_equal_time, finals
from blockadapt_experiments.claims.verdicts import difference
from blockadapt_experiments.names import nearest
from blockadapt_experiments.report.table import Estimate
from blockadapt_experiments.results.intervals import interval
from blockadapt_experiments.results.measurements import Metric
from blockadapt_experiments.results.summary import Summary


class Moment(NamedTuple):
    """Says what is compared: a metric, at the end of both runs or when the faster of the two was done."""

    metric: Metric
    equal_time: bool

    @property
    def heading(self) -> str:
        """Name it for people."""
        return f"{self.metric.label}, {'at equal time' if self.equal_time else 'final'}"

    def apart(self, summary: Summary, side: Side, reference: Side) -> Estimate:
        """Estimate side − reference over the seeds that both have finished; nan where one of them diverged."""
        if self.equal_time:
            then = at_equal_time(summary, side, reference, self.metric.key)
            values = difference(then.first, then.second)
        else:
            values = difference(
                *(finals(summary, each.arm, self.metric.key, each.variant) for each in (side, reference))
            )
        return Estimate(*interval(values), n=int(np.isfinite(values).sum()), of=values.size)


class Pairing(NamedTuple):
    """Holds what one arm in one variant is apart from the reference, an estimate for each moment."""

    label: str
    variant: str
    estimates: Sequence[Estimate]

    @property
    def pairs(self) -> int:
        """Count the seeds that both have finished."""
        return max(estimate.of for estimate in self.estimates)

    @property
    def marked(self) -> list[tuple[Estimate, bool]]:
        """Give each estimate, and whether its interval leaves zero out."""
        return [(estimate, abs(estimate.mean) > estimate.half) for estimate in self.estimates]


@dataclass(frozen=True)
class Comparison:
    """Has a line for each arm, or each variant, but the reference.

    Attributes:
        reference: What is subtracted, in words.
        moments: What is compared: the columns.
        lines: The differences.
    """

    reference: str
    moments: Sequence[Moment]
    lines: Sequence[Pairing]


def compare(summary: Summary, against: str | None = None) -> list[Comparison]:
    """Compare every arm with one arm in the same variant, and every variant with one variant of the same arm.

    Args:
        summary: What was measured.
        against: The arm or the variant to compare with; None for the first of each.

    Raises:
        ValueError: There is no such arm or variant; the sentence names the nearest.
    """
    names = [*summary.arms, *summary.variants]
    if against is not None and against not in names:
        near = nearest(against, names)
        raise ValueError(f"report: there is no arm or variant {against!r} to compare with; the nearest is {near!r}.")
    arm = against if against in summary.arms else summary.arms[0]
    variant = against if against in summary.variants else summary.variants[0]
    sweep = len(summary.variants) > 1
    between_arms = (
        (Side(other, each), Side(arm, each)) for each in summary.variants for other in summary.arms if other != arm
    )
    between_variants = (
        (Side(each, other), Side(each, variant))
        for each in summary.arms
        for other in summary.variants
        if other != variant
    )
    named = {
        f"{summary.label(arm)}{' in the same variant' * sweep}": between_arms,
        f"{variant or 'the settings as they are'} with the same optimizer": between_variants,
    }
    found = [_comparison(summary, reference, sides) for reference, sides in named.items()]
    return [comparison for comparison in found if comparison.lines]


def _comparison(summary: Summary, reference: str, sides: Iterable[tuple[Side, Side]]) -> Comparison:
    """Compare these pairs, without lines and columns that have no number."""
    moments = list(_moments(summary))
    lines = [
        Pairing(summary.label(side.arm), side.variant, [moment.apart(summary, side, other) for moment in moments])
        for side, other in sides
    ]
    lines = [line for line in lines if any(estimate.of for estimate in line.estimates)]
    shown = [place for place in range(len(moments)) if any(line.estimates[place].n for line in lines)]
    kept = [line._replace(estimates=[line.estimates[place] for place in shown]) for line in lines]
    return Comparison(reference, [moments[place] for place in shown], kept if shown else [])


def _moments(summary: Summary) -> Iterator[Moment]:
    """Choose what is compared: the measure and the objective, or all metrics where there is no measure.

    Yields:
        Each at the end, and at equal time.
    """
    design = summary.experiment
    for metric in summary.metrics:
        if metric.better and (design.measure is None or metric.key in (design.measure, design.objective)):
            yield Moment(metric, equal_time=False)
            yield Moment(metric, equal_time=True)
