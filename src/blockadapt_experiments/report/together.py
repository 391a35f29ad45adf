"""Join the records of several directories of one experiment into one summary."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from blockadapt.validation import Described, refusal
from blockadapt_experiments.core.config import flat, run_settings
from blockadapt_experiments.results.formats import NONE, setting
from blockadapt_experiments.results.summary import Summary


def together(summaries: Sequence[Summary]) -> Summary:
    """Join what several directories of one experiment hold.

    Runs of an arm that is the same in two directories, settings, learning rate and all, count as one arm if their seeds
    differ. Otherwise the later one gets another name, and both say in their labels where they are from. An arm that was
    run with other settings than the first directory has says with which.

    Raises:
        ValueError: They are of different experiments.
    """
    whole, *others = summaries
    home, *places = _places(summaries)
    for other, place in zip(others, places, strict=True):
        if other.experiment.name != whole.experiment.name:
            rule = f"directories of one experiment, {whole.experiment.name} as in {whole.out}"
            raise ValueError(refusal("report", "dir", rule, Described(f"{other.experiment.name} in {other.out}")))
        whole = _joined(whole, other, home, place)
    return whole


def _joined(whole: Summary, other: Summary, home: str, place: str) -> Summary:
    apart = differences(whole, other)
    names, labels = {}, dict(whole.labels)
    for arm in other.arms:
        clash = arm in whole.arms and not _same(whole, other, arm)
        names[arm] = f"{arm}@{place}" if clash else arm
        if clash and arm not in labels:
            labels[arm] = f"{whole.label(arm)} ({home})"
        if clash or apart:
            words = ": ".join(filter(None, (place, ", ".join(apart))))
            labels[names[arm]] = f"{other.label(arm)} ({words})"
        elif arm in other.labels:
            labels.setdefault(arm, other.labels[arm])
    runs = [*whole.runs, *(replace(run, key=run.key._replace(arm=names[run.key.arm])) for run in other.runs)]
    return replace(
        whole,
        settings=_settings(whole, other, names),
        command="\n".join([whole.command, other.command]),
        arms=_once([*whole.arms, *names.values()]),
        variants=_once([*whole.variants, *other.variants]),
        seeds=_once([*whole.seeds, *other.seeds]),
        runs=runs,
        tuned={**whole.tuned, **{names.get(arm, arm): found for arm, found in other.tuned.items()}},
        labels=labels,
        asked=whole.planned + other.planned,
        unsealed=(*whole.unsealed, *other.unsealed),
    )


def _same(whole: Summary, other: Summary, arm: str) -> bool:
    """Tell whether this arm is one and the same in both, so that their seeds can stand side by side."""
    mine, theirs = ({run.key for run in each.runs if run.key.arm == arm} for each in (whole, other))
    rates = [{variant: each.lr(arm, variant) for variant in each.variants} for each in (whole, other)]
    alike = all(rates[0].get(variant, rate) == rate for variant, rate in rates[1].items())
    settings = [run_settings(each.settings, arm) for each in (whole, other)]
    return settings[0] == settings[1] and whole.scale == other.scale and alike and not mine & theirs


def differences(whole: Summary, other: Summary) -> list[str]:
    """List the settings that all arms of a directory share and that differ from the first directory's."""
    ours, theirs = ({"scale": each.scale, **flat(run_settings(each.settings, ""))} for each in (whole, other))
    different = [key for key in dict.fromkeys([*ours, *theirs]) if ours.get(key) != theirs.get(key)]
    return [f"{key} {setting(theirs[key]) if key in theirs else NONE}" for key in different]


def _settings(whole: Summary, other: Summary, names: dict[str, str]) -> dict[str, Any]:
    """Give the first directory's settings, with who is compared and which seeds from both."""
    joined = dict(whole.settings)
    for key in ("arms", "lr"):
        new = {names.get(arm, arm): value for arm, value in other.settings.get(key, {}).items()}
        joined[key] = {**new, **joined.get(key, {})}
    joined["optimizers"] = _once([*whole.arms, *names.values()])
    joined["seeds"] = _once([*whole.seeds, *other.seeds])
    return joined


def _places(summaries: Sequence[Summary]) -> list[str]:
    """Name directories by their last part, or in full where that does not tell them apart."""
    last = [summary.out.name for summary in summaries]
    return last if len(set(last)) == len(last) else [str(summary.out) for summary in summaries]


def _once(values: Iterable[Any]) -> list[Any]:
    return list(dict.fromkeys(values))
