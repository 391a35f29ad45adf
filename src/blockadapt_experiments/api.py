"""Offers the laboratory from Python: the same runs, records and reports as the commands make."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from blockadapt.validation import require
from blockadapt_experiments.commands.session import carry_out, make_session
from blockadapt_experiments.core.config import load
from blockadapt_experiments.experiments.registry import get_experiment
from blockadapt_experiments.files.atomic import require_no_url
from blockadapt_experiments.parts import ORIGINS, load_installed
from blockadapt_experiments.report import write_report
from blockadapt_experiments.report.reading import read
from blockadapt_experiments.results.summary import Summary
from blockadapt_experiments.running.runner import Request


def run(
    experiment: str,
    scale: str = "laptop",
    *,
    out: str | Path | None = None,
    seeds: Iterable[int] | None = None,
    optimizers: Iterable[str] | None = None,
    arms: Mapping[str, Mapping[str, Any]] | None = None,
    settings: Mapping[str, Any] | None = None,
    data_dir: str | Path | None = None,
    jobs: int = 1,
    cluster: str = "",
    tune: bool = False,
    tune_over: Sequence[str] = (),
    quiet: bool = False,
) -> Summary:
    """Run an experiment, or what is left of it, as `blockadapt run` does; returns all that its directory holds.

    Args:
        experiment: Its name.
        scale: "smoke", "laptop" or "paper".
        out: Where the records go; `runs/EXPERIMENT-SCALE` if not given.
        seeds: One run of each optimizer for each.
        optimizers: Only these.
        arms: Optimizers with settings of their own, such as `{"b25": {"optimizer": "block-adam", "block_size": 25}}`.
        settings: Other settings, such as `{"optimizer.eps": 1e-8}`.
        data_dir: Where data sets or texts lie; the hub if not given.
        jobs: Runs at once.
        cluster: The address of a Dask scheduler whose workers do the runs; they must see the same folders.
        tune: Whether to find learning rates first.
        tune_over: What else to tune, such as `["weight_decay=1e-4:1e-2"]`.
        quiet: Whether to say nothing.

    Raises:
        ValueError: It cannot be; one sentence says why, and nothing was written.
        RuntimeError: A run has failed.
    """
    load_installed()
    chosen = {"seeds": seeds, "optimizers": optimizers}
    _require_forms(chosen, {"arms": arms, "settings": settings})
    selection = {key: list(values) for key, values in chosen.items() if values is not None}
    changes = [*([settings] if settings else []), selection, {"arms": dict(arms or {})}]
    made = load(get_experiment(experiment), scale, changes)
    folder = Path(out) if out is not None else Path("runs") / f"{experiment}-{scale}"
    request = Request(experiment, scale, made, folder, Path(data_dir) if data_dir else None)
    if (jobs > 1 or cluster) and any(ORIGINS[name].module == "__main__" for name in request.code()):
        raise ValueError("run: `jobs` must be 1 for parts that only this process has; put them into a file.")
    given = {
        "out": out and str(out),
        "data_dir": data_dir and str(data_dir),
        **selection,
        "arms": dict(arms or {}),
        "settings": dict(settings or {}),
        "tune": tune,
        "tune_over": list(tune_over),
    }
    command = _command(experiment, scale, given)
    console = Console(quiet=quiet)
    session = make_session(request, command, console, jobs=jobs, cluster=cluster, tune=tune, tune_over=tune_over)
    if not carry_out(session, tune):
        raise RuntimeError(f"run: not all runs are finished; see error.txt below {folder}.")
    return read(folder)


def make_report(*runs: str | Path, out: str | Path | None = None) -> Path:
    """Write the report of the runs in a directory, or in several of one experiment; returns its page.

    Raises:
        ValueError: If these are no such directories, or `out` is missing where there are several, or is a URL.
    """
    load_installed()
    first, *others = map(Path, runs)
    if others and out is None:
        raise ValueError("report: `out` must be given where several directories make one report.")
    into = Path(out) if out is not None else None
    if into is not None:
        require_no_url("report", into)
    return write_report(first, others=others, into=into)[0]


def _require_forms(lists: Mapping[str, Any], tables: Mapping[str, Any]) -> None:
    """Refuse arguments that are no lists or no tables, where they are given; a string is no list of names."""
    for key, values in lists.items():
        listed = isinstance(values, Iterable) and not isinstance(values, str)
        require(values is None or listed, "run", key, "a list", values)
    for key, table in tables.items():
        require(table is None or isinstance(table, Mapping), "run", key, "a table", table)


def _command(experiment: str, scale: str, given: Mapping[str, Any]) -> str:
    """Write the call down as it can be repeated, for the records."""
    words = "".join(f", {key}={value!r}" for key, value in given.items() if value)
    return f"blockadapt_experiments.run({experiment!r}, {scale!r}{words})"
