"""Commands as documents show them, parsed as the tool parses them and carried out as far as the first thing to do."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from blockadapt_experiments.commands import cli
from blockadapt_experiments.commands.session import make_session
from blockadapt_experiments.core import config
from blockadapt_experiments.core.settings import Settings
from blockadapt_experiments.experiments.registry import get_experiment
from blockadapt_experiments.parts import load_file
from blockadapt_experiments.running.runner import Request, run_jobs

TOOL: Any = typer.main.get_command(cli.app)
COMMANDS = {*TOOL.commands}


def parse(line: str) -> None:
    """Parse a line `blockadapt …`, which may end in a comment, and make what `run` would carry out.

    Raises:
        Exception: typer's, if there is no such command, option or argument.
        ValueError: The laboratory refuses a value; what is loaded from files stays registered.
    """
    name, command, *words = shlex.split(line, comments=True)
    assert name == "blockadapt"
    _, found, rest = TOOL.resolve_command(typer.Context(TOOL), [command, *words])
    asked = found.make_context(command, rest).params
    for file in asked.get("load") or ():
        load_file(file)
    if asked.get("settings"):
        get_experiment(asked["settings"])
    if "experiment" not in asked:
        return
    experiment, changes = get_experiment(asked["experiment"]), [*(asked["changes"] or ())]
    if command != "run":
        config.load(experiment, asked["scale"], changes)
        return
    chosen = [*changes, *cli._selection(asked["seed"], asked["optimizers"]), *config.arm_changes(asked["arm"] or ())]
    settings: Settings = config.load(experiment, asked["scale"], chosen)
    for variant in getattr(settings, "variants", ()):
        config.varied(settings, variant)
    if asked["tune"] and experiment.objective is None:
        raise ValueError(f"{experiment.name} has no learning rate to tune.")
    request = Request(experiment.name, asked["scale"], settings, asked["out"] or Path("runs"))
    session = make_session(
        request,
        line,
        Console(quiet=True),
        cluster=asked["cluster"],
        tune=asked["tune"],
        tune_over=asked["tune_over"] or (),
    )
    assert run_jobs(session.request, {})
