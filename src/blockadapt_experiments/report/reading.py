"""Read the records of an experiment back from disk."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from blockadapt.validation import refusal
from blockadapt_experiments.contenders.catalogue import arm_label
from blockadapt_experiments.core.config import flat, load
from blockadapt_experiments.core.experiment import Experiment
from blockadapt_experiments.experiments.registry import get_experiment
from blockadapt_experiments.files.atomic import require_no_url
from blockadapt_experiments.files.checked import is_marked
from blockadapt_experiments.results.measurements import runs_asked
from blockadapt_experiments.results.recorded_runs import EXPERIMENT, LEFT, read_experiment, read_run, read_tuned
from blockadapt_experiments.results.summary import Summary

HEAD = {"experiment": str, "scale": str, "settings": dict, "command": str, "environment": dict}
"""What a report needs of `experiment.json`."""


def read(out: str | Path, experiment: Experiment[Any] | None = None) -> Summary:
    """Read the records in a directory.

    Args:
        out: Where `blockadapt run` wrote.
        experiment: Which experiment it was; None finds it by the name in the records.

    Raises:
        ValueError: If that is no directory of an experiment, or a record cannot be read; one sentence says which.
    """
    out = Path(out)
    head = _read_head(out)
    experiment = experiment or _experiment_of(head)
    settings = head["settings"]
    left = [path for name in LEFT for path in out.glob(f"runs/*/*/seed-*/{name}")]
    runs = [read_run(folder) for folder in sorted({path.parent for path in left})]
    return Summary(
        out=out,
        experiment=experiment,
        scale=head["scale"],
        settings=settings,
        command=head["command"],
        environment=head["environment"],
        arms=_in_order(settings["optimizers"], (run.key.arm for run in runs)),
        variants=_in_order(_planned_variants(experiment, head), (run.key.variant for run in runs)) or [""],
        seeds=_in_order(settings["seeds"], (run.key.seed for run in runs)),
        runs=runs,
        tuned=read_tuned(out, "report"),
        unsealed=() if is_marked(head) else (out,),
        asked=len(runs_asked(head["asked"])) if head.get("asked") else None,
        labels={name: arm_label(name, table) for name, table in settings.get("arms", {}).items()},
    )


def recorded_experiment(out: Path) -> Experiment[Any]:
    """Find the experiment that `blockadapt run` wrote into a directory.

    Raises:
        ValueError: If that is no directory of an experiment, or of one that is not known.
    """
    return _experiment_of(_read_head(out))


def _experiment_of(head: Mapping[str, Any]) -> Experiment[Any]:
    """Find the experiment that `experiment.json` names.

    Raises:
        ValueError: It is not known: there is none such, or it is a part whose file was not loaded.
    """
    name = head["experiment"]
    try:
        return get_experiment(name)
    except ValueError:
        if name not in head.get("code", {}):
            raise
    raise ValueError(f"report: {name!r} is not built in; load the file that registers it (--load FILE).")


def recorded_name(out: Path) -> str:
    """Read the name of the experiment in a directory.

    Raises:
        ValueError: If that is no directory of an experiment.
    """
    return str(_read_head(out)["experiment"])


def _read_head(out: Path) -> Any:
    """Read what `experiment.json` says.

    Raises:
        ValueError: It is not there, lacks something, or was changed; or `out` is a URL.
    """
    require_no_url("report", out, "dir")
    if not (out / EXPERIMENT).is_file():
        raise ValueError(refusal("report", "dir", "a directory that `blockadapt run` has written to", str(out)))
    return read_experiment(out, "report", HEAD)


def _planned_variants(experiment: Experiment[Any], head: Mapping[str, Any]) -> Sequence[str]:
    """List the variants that the recorded settings ask for; none if they are not settings of this version."""
    values = {key: "none" if value is None else json.dumps(value) for key, value in flat(head["settings"]).items()}
    try:
        return experiment.variants(load(experiment, head["scale"], [f"{key}={value}" for key, value in values.items()]))
    except (ValueError, OSError):
        return ()


def _in_order(planned: Iterable[Any], found: Iterable[Any]) -> list[Any]:
    """List those planned, in their order, then others that were found, numbers within names by their size."""
    first = list(dict.fromkeys(planned))

    def by_size(value: Any) -> list[tuple[float, str]]:
        parts = re.split(r"(\d+(?:\.\d+)?)", str(value))
        return [(float(part), "") if index % 2 else (math.inf, part) for index, part in enumerate(parts)]

    return [*first, *sorted({*found} - {*first}, key=by_size)]
