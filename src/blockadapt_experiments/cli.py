"""The commands: parse, call, display. What a command does lives in its own module, loaded when it is called."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

if TYPE_CHECKING:
    from blockadapt_experiments.bench import Row
    from blockadapt_experiments.demo import Epoch, Run, Settings

app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.callback()
def root() -> None:
    """Block-diagonal adaptive optimizers for PyTorch: demos and experiments."""


@app.command()
def demo(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where the plots and the numbers go.")] = Path("demo"),
    epochs: Annotated[int, typer.Option(metavar="N", help="Passes over the training images.")] = 40,
    seed: Annotated[int, typer.Option(metavar="S", help="Of the initial weights and the minibatch order.")] = 0,
) -> None:
    """Train two small nets with four optimizers.

    The data are scikit-learn's digits; the optimizers SGD, Adam, Block-Adam and Block-Adam with spectrum clipping.
    Prints a table and writes plots and numbers. Takes about a minute.
    """
    from blockadapt_experiments.demo import Settings, record, run_demo
    from blockadapt_experiments.digits import digits
    from blockadapt_experiments.plots import write_plots

    with _one_sentence():
        settings = Settings(epochs, seed)
        _require_directory("demo", out)
    console = Console()
    data = digits()
    with _demo_progress(console, settings) as on_epoch:
        runs = run_demo(settings, data, on_epoch)
    numbers = out / "demo.json"
    numbers.write_text(json.dumps(record(settings, data, runs), indent=2) + "\n", encoding="utf-8")
    files = [*write_plots(runs, f"{len(data.train):,} training images, seed {seed}", out), numbers]
    console.print(_demo_table(runs, settings, len(data.test)))
    names = ", ".join(file.name for file in files)
    _say(console, f"Wrote {names} to {out}. This is one seed on a tiny data set: a look, not evidence.")


@app.command()
def bench(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where the numbers go.")] = Path("bench"),
    rounds: Annotated[int, typer.Option(metavar="N", min=5, help="Turns that each contender takes.")] = 30,
) -> None:
    """Measure speed and memory, as ratios within this run.

    Prints a table against floors and goals, and writes bench.json and environment.json. Takes a few minutes; leave the
    machine alone meanwhile.
    """
    from blockadapt_experiments.bench import SECTIONS
    from blockadapt_experiments.environment import environment

    with _one_sentence():
        _require_directory("bench", out)
    console = Console()
    rows: list[Row] = []
    with Progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), console=console) as progress:
        task = progress.add_task("measuring", total=len(SECTIONS))
        for name, section in SECTIONS.items():
            progress.update(task, description=name)
            rows += section(rounds)
            progress.advance(task)
    (out / "environment.json").write_text(json.dumps(environment(), indent=2) + "\n", encoding="utf-8")
    (out / "bench.json").write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n", encoding="utf-8")
    console.print(_bench_table(rows))
    _say(console, f"Wrote bench.json and environment.json to {out}.")


def _bench_table(rows: Sequence[Row]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), caption="Median and quartiles over the turns.")
    for heading in ("measure", "value", "quartiles", "floor", "goal", "medians"):
        table.add_column(heading, no_wrap=heading in ("value", "floor", "goal"))
    for row in rows:
        table.add_row(row.name, f"{row.value:.3g}", row.spread, row.floor, row.goal, row.detail)
    return table


@contextmanager
def _one_sentence() -> Iterator[None]:
    """Turn a ValueError about the user's input into its one sentence and exit code 2."""
    try:
        yield
    except ValueError as error:
        typer.echo(error, err=True)
        raise typer.Exit(2) from None


def _require_directory(owner: str, path: Path) -> None:
    """Make the directory, or raise ValueError if that cannot be."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        if not os.access(path, os.W_OK):
            raise PermissionError
    except OSError:
        raise ValueError(f"{owner}: `out` must be a directory that can be written to, got {str(path)!r}.") from None


def _say(console: Console, sentence: str) -> None:
    """Print as it is: no markup, no colours, no line breaks of our own."""
    console.print(sentence, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def _demo_progress(console: Console, settings: Settings) -> Iterator[Callable[[str, str, Epoch], None]]:
    """A bar for each run on a terminal; elsewhere a line for each run that is done."""
    from blockadapt_experiments.demo import MODELS, OPTIMIZERS

    if not (console.is_interactive and console.file.isatty()):  # FORCE_COLOR makes a log interactive, not a terminal
        done: dict[tuple[str, str], int] = {}

        def report(model: str, optimizer: str, epoch: Epoch) -> None:
            done[model, optimizer] = done.get((model, optimizer), 0) + 1
            if done[model, optimizer] == settings.epochs:
                _say(console, f"{model}, {optimizer}: test accuracy {epoch.test_accuracy:.1%}")

        yield report
        return

    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TextColumn("{task.fields[accuracy]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        tasks = {
            (model, optimizer): progress.add_task(f"{model}, {optimizer}", total=settings.epochs, accuracy="")
            for model in MODELS
            for optimizer in OPTIMIZERS
        }

        def advance(model: str, optimizer: str, epoch: Epoch) -> None:
            progress.update(tasks[model, optimizer], advance=1, accuracy=f"test {epoch.test_accuracy:.1%}")

        yield advance


def _demo_table(runs: Sequence[Run], settings: Settings, test_images: int) -> Table:
    """One row for each run. Fits 80 columns."""
    table = Table(
        title=f"scikit-learn's digits, epochs {settings.epochs}, seed {settings.seed}",
        caption=(
            "lr: for each the best of one grid, judged on images held out of the training set. "
            f"Test: one image is {1 / test_images:.1%}, a few of them are noise. "
            "State: after the first step and at the end; the clip frees V once it has closed on SGD."
        ),
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    table.add_column("Model")
    table.add_column("Optimizer", no_wrap=True)
    for heading in ("lr", "Test\nfinal", "Test\nbest", "Train\nloss", "s per\nepoch", "State\nMB", "at\nend"):
        table.add_column(heading, justify="right", no_wrap=True)
    for previous, run in zip([None, *runs], runs, strict=False):
        if previous and previous.model != run.model:
            table.add_section()
        table.add_row(*_cells(run))
    return table


def _cells(run: Run) -> tuple[str, ...]:
    return (
        run.model,
        run.optimizer,
        f"{run.lr:g}",
        f"{run.final_accuracy:.1%}",
        f"{run.best_accuracy:.1%}",
        f"{run.final_loss:.1e}",
        f"{run.seconds_per_epoch:.3f}",
        f"{run.state_bytes / 1e6:.3f}",
        f"{run.final_state_bytes / 1e6:.3f}",
    )
