"""Show progress, tables and sentences."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from blockadapt_experiments.results.formats import NONE, number, setting
from blockadapt_experiments.running.jobs import Done, Event, Failed, Job, Leg, Note

if TYPE_CHECKING:
    from blockadapt_experiments.commands.bench import Row as BenchRow
    from blockadapt_experiments.commands.demo import DemoRun, DemoSettings, Epoch
    from blockadapt_experiments.contenders.catalogue import Contender
    from blockadapt_experiments.running.forecast import Forecast
    from blockadapt_experiments.running.runner import RunJob


def say(console: Console, sentence: str) -> None:
    """Print a sentence as it is, without markup, colours or line breaks of our own."""
    console.print(sentence, markup=False, highlight=False, soft_wrap=True)


def on_terminal(console: Console) -> bool:
    """Tell whether somebody looks at it. FORCE_COLOR makes a log interactive, but no terminal."""
    return console.is_interactive and console.file.isatty()


def table_of(headings: Sequence[str], **options: Any) -> Table:
    """Make an empty table in the style of all: names stay in one line, and a narrow window cuts nothing off."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, **options)
    for place, heading in enumerate(headings):
        table.add_column(heading, no_wrap=place == 0, overflow="fold")
    return table


# blockadapt run -----------------------------------------------------------------------------------------------------


def row_words(row: Mapping[str, float], columns: Sequence[str]) -> str:
    """Write those of these columns that a row has, with their names."""
    return ", ".join(f"{column.replace('_', ' ')} {row[column]:.4g}" for column in columns if column in row)


@contextmanager
def job_progress(
    console: Console, what: str, jobs: Sequence[Job], columns: Sequence[str]
) -> Iterator[Callable[[int, Event], None]]:
    """Show a line for each job that has ended; on a terminal also a bar for each at work and one for all.

    Yields:
        What to call with the place of a job and what happened to it.
    """
    if not on_terminal(console):
        yield lambda index, event: _say_event(console, jobs[index], event, columns)
        return
    parts = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=20),
        TextColumn("{task.fields[count]}", markup=False),
        TimeRemainingColumn(),
        TextColumn("{task.fields[row]}", markup=False),
    )
    with Progress(*parts, console=console) as progress:
        yield _Bars(progress, console, what, jobs, columns)


class _Bars:
    """Shows the bars of a terminal. The one for all counts the shares of jobs that are at work."""

    def __init__(
        self, progress: Progress, console: Console, what: str, jobs: Sequence[Job], columns: Sequence[str]
    ) -> None:
        self._progress, self._console, self._jobs, self._columns = progress, console, jobs, columns
        self._bars: dict[int, TaskID] = {}
        self._shares: dict[int, float] = {}
        self._ended = 0
        self._all = progress.add_task(what, total=len(jobs), count=f"0/{len(jobs)}", row="")

    def __call__(self, index: int, event: Event) -> None:
        job = self._jobs[index]
        if isinstance(event, Leg):
            if index not in self._bars:
                self._bars[index] = self._progress.add_task(job.label, total=event.legs, count="", row="")
            count, words = f"{event.done}/{event.legs}", row_words(event.row, self._columns)
            self._progress.update(self._bars[index], completed=event.done, count=count, row=words)
            self._shares[index] = event.done / max(1, event.legs)
        elif isinstance(event, Note):
            _say_event(self._console, job, event, self._columns)
        else:
            if index in self._bars:
                self._progress.remove_task(self._bars.pop(index))
            self._shares[index] = 1.0
            self._ended += 1
            _say_event(self._console, job, event, self._columns)
        count = f"{self._ended}/{len(self._jobs)}"
        self._progress.update(self._all, completed=sum(self._shares.values()), count=count)


def _say_event(console: Console, job: Job, event: Event, columns: Sequence[str]) -> None:
    if isinstance(event, Failed):
        words = ": ".join(part for part in (event.kind, event.words.partition("\n")[0]) if part)
        where = f"; see {job.error}" if job.error.exists() else ""
        say(console, f"{job.label} failed with {words}{where}.")
    elif isinstance(event, Note):
        say(console, f"{job.label}: {event.words}")
    elif isinstance(event, Done) and event.value is not None:
        say(console, f"{job.label}: {row_words(event.value, columns)}")


def runs_table(jobs: Sequence[RunJob]) -> Table:
    """List what there is to do."""
    table = table_of(("run", "lr", "state"))
    for job in jobs:
        state = "finished" if job.record.finished else "begun" if job.record.begun else "new"
        table.add_row(job.label, f"{job.choice.lr:g}", state)
    return table


def forecasts_table(forecasts: Sequence[Forecast]) -> Table:
    """List what a run of each arm will take."""
    table = table_of(("optimizer", "parameters", "steps", "blocks", "state MB", "ms a step", "a run"))
    for forecast in forecasts:
        name = ", ".join(part for part in (forecast.arm, forecast.variant) if part)
        blocks = ", ".join(f"{count:,} × {n}" for n, count in forecast.sizes.items()) or "–"
        numbers = (f"{forecast.parameters:,}", f"{forecast.steps:,}", blocks, f"{forecast.state_bytes / 1e6:,.1f}")
        table.add_row(name, *numbers, number(1e3 * forecast.step_seconds, 3), duration(forecast.seconds))
    return table


def duration(seconds: float) -> str:
    """Write a time for people, in the unit that fits.

    >>> [duration(value) for value in (12.3, 600, 9000, 900000)]
    ['12 s', '10 min', '2.5 h', '10.4 days']
    """
    for size, unit, digits in ((86400, "days", 1), (3600, "h", 1), (60, "min", 0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.{digits}f} {unit}"
    return f"{seconds:.0f} s"


def experiments_table(contents: Mapping[str, tuple[str, str]], scales: Mapping[str, Sequence[str]]) -> Table:
    """List what can be run."""
    table = table_of(("experiment", "what", "scales", "in the paper"))
    for name, (title, section) in contents.items():
        table.add_row(name, title, ", ".join(scales[name]), section)
    return table


def optimizers_table(contenders: Iterable[Contender]) -> Table:
    """List what can be compared."""
    table = table_of(("optimizer", "what", "adapts by", "lr", "settings"))
    table.columns[1].max_width = 13  # in 80 columns there is room then for the longest name of a setting
    for contender in contenders:
        settings = " ".join(contender.types)
        table.add_row(contender.name, contender.label, contender.kind, f"{contender.lr:g}", settings)
    return table


def settings_table(values: Mapping[str, Mapping[str, Any]]) -> Table:
    """List what can be set, and its value at each scale."""
    table = table_of(("setting", *values))
    for key in dict.fromkeys(key for settings in values.values() for key in settings):
        table.add_row(key, *(setting(settings[key]) if key in settings else NONE for settings in values.values()))
    return table


# blockadapt demo and bench --------------------------------------------------------------------------------------------


@contextmanager
def demo_progress(console: Console, settings: DemoSettings) -> Iterator[Callable[[str, str, Epoch], None]]:
    """Show a bar for each run on a terminal; elsewhere a line for each run that is done.

    Yields:
        What to call with the names of a model and an optimizer and the epoch that is done.
    """
    from blockadapt_experiments.commands.demo import MODELS, OPTIMIZERS

    if not on_terminal(console):
        done: dict[tuple[str, str], int] = {}

        def report(model: str, optimizer: str, epoch: Epoch) -> None:
            done[model, optimizer] = done.get((model, optimizer), 0) + 1
            if done[model, optimizer] == settings.epochs:
                say(console, f"{model}, {optimizer}: test accuracy {epoch.test_accuracy:.1%}")

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


def demo_table(runs: Sequence[DemoRun], settings: DemoSettings, test_images: int) -> Table:
    """List the runs, a row each, within 80 columns."""
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


def _cells(run: DemoRun) -> tuple[str, ...]:
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


def bench_table(rows: Sequence[BenchRow]) -> Table:
    """List the measures, a row each."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), caption="Median and quartiles over the turns.")
    for heading in ("measure", "value", "quartiles", "floor", "goal", "reached", "medians"):
        table.add_column(heading, no_wrap=heading in ("value", "floor", "goal", "reached"))
    for row in rows:
        table.add_row(row.name, f"{row.value:.3g}", row.spread, row.floor, row.goal, row.reached, row.detail)
    return table
