"""Parse, call, display. What a command does lives in its own module, which is loaded when it is called."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from blockadapt_experiments.commands import display
from blockadapt_experiments.commands.contents import CONTENTS, require_arms, require_chosen, require_known
from blockadapt_experiments.commands.display import say
from blockadapt_experiments.files.atomic import require_directory, require_no_url, write_json
from blockadapt_experiments.names import SCALES
from blockadapt_experiments.parts import load_file, load_installed

if TYPE_CHECKING:
    from blockadapt_experiments.commands.bench import Row

app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)

ExperimentName = Annotated[str, typer.Argument(metavar="EXPERIMENT", help="One of `blockadapt list`.")]
Scale = Annotated[str, typer.Option(metavar="SCALE", help="smoke, laptop or paper.")]
Changes = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change a setting, such as optimizer.block_size=25."),
]

Load = Annotated[
    list[Path] | None,
    typer.Option("--load", metavar="FILE", help="A Python file that registers parts of your own; can be given again."),
]


def _load(files: list[Path] | None) -> bool:
    """Load parts that are not built in, and tell whether there are any."""
    for file in files or ():
        load_file(file)
    return load_installed() or bool(files)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"blockadapt {version('blockadapt')}")
        sys.exit()


@app.callback()
def root(
    _: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Try block-diagonal adaptive optimizers for PyTorch, in demos and experiments."""


@app.command("list")
def list_experiments(
    optimizers: Annotated[bool, typer.Option("--optimizers", help="Show the optimizers instead.")] = False,
    settings: Annotated[
        str | None,
        typer.Option("--settings", metavar="EXPERIMENT", help="Show the settings of one, as --set takes them."),
    ] = None,
    load: Load = None,
) -> None:
    """Show the experiments, the optimizers, or the settings of an experiment."""
    contents = dict(CONTENTS)
    scales: dict[str, Sequence[str]] = dict.fromkeys(CONTENTS, SCALES)
    with _one_sentence():
        if _load(load):
            from blockadapt_experiments.core.config import scales_of
            from blockadapt_experiments.experiments.registry import OWN

            contents.update({name: (own.title, own.section) for name, own in OWN.items()})
            scales.update({name: scales_of(own) for name, own in OWN.items()})
        if settings is not None:
            require_known(settings, SCALES[0], contents)
            from blockadapt_experiments.core import config
            from blockadapt_experiments.experiments.registry import get_experiment

            experiment = get_experiment(settings)
            values = {
                scale: config.flat(config.plain(config.load(experiment, scale)))
                for scale in config.scales_of(experiment)
            }
            Console().print(display.settings_table(values))
    if optimizers:
        from blockadapt_experiments.contenders.catalogue import CONTENDERS

        Console().print(display.optimizers_table(CONTENDERS.values()))
    elif settings is None:
        Console().print(display.experiments_table(contents, scales))


@app.command("compile")  # for the list of commands: `__main__` does this one, also where there is no typer
def compile_kernels() -> None:
    """Compile the CPU kernels ahead of time, so that no training waits for them."""
    from blockadapt.compile import main

    sys.exit(main([]))


@app.command()
def run(
    experiment: ExperimentName,
    scale: Scale = "laptop",
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where the records go; runs/EXPERIMENT-SCALE if not given.")
    ] = None,
    seed: Annotated[
        list[str] | None, typer.Option(metavar="S", help="A seed, or several with commas; can be given again.")
    ] = None,
    optimizers: Annotated[str | None, typer.Option(metavar="A,B", help="Only these optimizers.")] = None,
    arm: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=OPTIMIZER,KEY=VALUE",
            help="Compare an optimizer with settings of its own too, such as b25=block-adam,block_size=25.",
        ),
    ] = None,
    data_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where data sets or texts lie; the hub if not given.")
    ] = None,
    changes: Changes = None,
    jobs: Annotated[int, typer.Option(metavar="N", min=1, help="Runs at once, at most one a core or a GPU.")] = 1,
    cluster: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Do runs on the workers of this Dask scheduler, which see DIR too.")
    ] = "",
    tune: Annotated[bool, typer.Option("--tune", help="Find learning rates first, on validation data.")] = False,
    tune_over: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=LOW:HIGH[:N]", help="Tune another setting too, such as weight_decay=1e-4:1e-2."),
    ] = None,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Write TensorBoard's logs too.")] = False,
    load: Load = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be done.")] = False,
    storage: Annotated[str | None, typer.Option(hidden=True)] = None,
) -> None:
    """Run an experiment.

    Whatever stops it, the same command goes on where it stopped and ends with the same numbers. Finished runs are kept,
    also by a command that asks for more seeds, optimizers or arms in the same directory.
    """
    with _one_sentence():
        _require_no_storage(storage)
        if not _load(load):
            require_known(experiment, scale)
            require_arms(arm or ())
            if optimizers is not None and not any(change.startswith("arms") for change in changes or ()):
                require_chosen(experiment, scale, _names(optimizers), arm or ())
    from blockadapt_experiments.commands.session import carry_out, make_session
    from blockadapt_experiments.core import config
    from blockadapt_experiments.experiments.registry import get_experiment
    from blockadapt_experiments.running.runner import Request

    command = shlex.join(["blockadapt", *sys.argv[1:]])
    out = out or Path("runs") / f"{experiment}-{scale}"
    with _one_sentence():
        chosen = [*(changes or ()), *_selection(seed, optimizers), *config.arm_changes(arm or ())]
        settings = config.load(get_experiment(experiment), scale, chosen)
        request = Request(experiment, scale, settings, out, data_dir, tensorboard=tensorboard)
        session = make_session(
            request, command, Console(), jobs=jobs, cluster=cluster, tune=tune, tune_over=tune_over or ()
        )
        if dry_run:
            session.show(tune)
            return
        try:
            complete = carry_out(session, tune)
        except KeyboardInterrupt:
            typer.echo(f"Interrupted; `{command}` goes on where this stopped.", err=True)
            sys.exit(130)
    sys.exit(0 if complete else 1)


def _require_no_storage(storage: str | None) -> None:
    """Tell who knows this option from other tools what there is instead.

    Raises:
        ValueError: It is given. Its value is not told, for it may hold a password.
    """
    if storage is not None:
        raise ValueError("run: `storage` must be left out: the folder of --out is the study, without a database.")


def _selection(seeds: list[str] | None, optimizers: str | None) -> Iterator[str]:
    """Turn `--seed` and `--optimizers` into changes of settings.

    Yields:
        A change, `key=value`.

    Raises:
        ValueError: A seed is no integer >= 0.
    """
    if seeds:
        words = [word.strip() for text in seeds for word in text.split(",")]
        if not all(word.isdecimal() for word in words):
            raise ValueError(f"run: `seed` must be integers >= 0 with commas between, got {','.join(seeds)!r}.")
        yield f"seeds={[int(word) for word in words]}"
    if optimizers is not None:
        yield f"optimizers={json.dumps(_names(optimizers))}"


def _names(optimizers: str) -> list[str]:
    return [name.strip() for name in optimizers.split(",")]


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Where `blockadapt run` has written to.")],
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where the report goes; beside the runs if not given.")
    ] = None,
    against: Annotated[
        str | None, typer.Option(metavar="NAME", help="The arm or variant to compare with; the first if not given.")
    ] = None,
    overview: Annotated[
        bool, typer.Option("--overview", help="Write one table of what all these experiments end with instead.")
    ] = False,
    load: Load = None,
) -> None:
    """Write a report of an experiment: one page that works offline, with curves and tables, and figures.

    Several directories of the same experiment make one report. Names that more than one has are told apart. With
    --overview directories of any experiments make one table: a row for each, a column for each optimizer.
    """
    from blockadapt_experiments.report import write_overview, write_report

    with _one_sentence():
        _load(load)
        into = _place_of_report(runs, out)
        if overview:
            _require_no_reference(against)
            files = write_overview(runs, into)
        else:
            files = write_report(runs[0], others=runs[1:], into=into, against=against)
    say(Console(), f"Wrote {', '.join(str(file.relative_to(into)) for file in files)} to {into}.")


def _place_of_report(runs: list[Path], out: Path | None) -> Path:
    """Tell where a report goes: beside the runs, where they are in one directory, or where the user says.

    Raises:
        ValueError: There are several directories, and the user does not say; or says a URL.
    """
    if len(runs) > 1 and out is None:
        raise ValueError("report: `out` must be given where several directories make one report.")
    if out is not None:
        require_no_url("report", out)
    return out or runs[0]


def _require_no_reference(against: str | None) -> None:
    """Refuse a reference for an overview.

    Raises:
        ValueError: There is one.
    """
    if against is not None:
        raise ValueError("report: `against` must be left out with --overview, which compares all with all.")


@app.command()
def pack(
    runs: Annotated[Path, typer.Argument(metavar="DIR", help="Where `blockadapt run` has written to.")],
    out: Annotated[Path, typer.Option(metavar="FILE", help="The archive, such as records/cifar10-cnn.tar.xz.")],
) -> None:
    """Pack the records of an experiment into one file, without checkpoints, weights and reports.

    `tar -xf FILE` gives a folder that `blockadapt report` shows as before, and that `blockadapt run` lets grow.
    """
    from blockadapt_experiments.commands.packing import pack

    with _one_sentence():
        packed = pack(runs, out)
    say(Console(), f"Packed {len(packed)} files into {out}, {out.stat().st_size / 1e3:,.0f} kB.")


@app.command()
def plan(
    experiment: ExperimentName,
    optimizer: Annotated[str, typer.Option(metavar="NAME", help="A block method.")] = "block-adam",
    block_size: Annotated[int | None, typer.Option(metavar="N", help="Coordinates in a block.")] = None,
    scale: Scale = "laptop",
    changes: Changes = None,
    load: Load = None,
) -> None:
    """Show how a block method cuts up the model of an experiment, and what that costs. This trains nothing."""
    with _one_sentence():
        if not _load(load):
            require_known(experiment, scale)
    from blockadapt_experiments.commands.planning import plan_experiment

    sizes = [] if block_size is None else [f"optimizer.block_size={block_size}"]
    with _one_sentence():
        typer.echo(plan_experiment(experiment, optimizer, scale, [*(changes or ()), *sizes]))


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
    from blockadapt_experiments.commands.demo import DemoSettings, record, run_demo
    from blockadapt_experiments.commands.demo_plots import write_plots
    from blockadapt_experiments.data.digits import digits

    with _one_sentence():
        settings = DemoSettings(epochs, seed)
        require_directory("demo", out)
    console = Console()
    data = digits()
    with display.demo_progress(console, settings) as on_epoch:
        runs = run_demo(settings, data, on_epoch)
    numbers = out / "demo.json"
    with _one_sentence():
        write_json(numbers, record(settings, data, runs))
        files = [*write_plots(runs, f"{len(data.train):,} training images, seed {seed}", out), numbers]
    console.print(display.demo_table(runs, settings, len(data.test)))
    names = ", ".join(file.name for file in files)
    say(console, f"Wrote {names} to {out}. This is one seed on a tiny data set: a look, not evidence.")


@app.command()
def bench(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where the numbers go.")] = Path("bench"),
    rounds: Annotated[int, typer.Option(metavar="N", min=5, help="Turns that each contender takes.")] = 30,
    device: Annotated[str, typer.Option(metavar="DEVICE", help="With a GPU, such as cuda, its steps alone.")] = "cpu",
) -> None:
    """Measure speed and memory, as ratios within this run.

    Prints a table against floors and goals, and writes bench.json and environment.json. Takes a few minutes; leave the
    machine alone meanwhile. With a GPU it measures the steps of Adam, SOAP and Block-Adam there.
    """
    from blockadapt_experiments.commands.bench import SECTIONS
    from blockadapt_experiments.commands.bench.gpu import contenders, gpu_rows, models, require_device
    from blockadapt_experiments.running.environment import environment

    with _one_sentence():
        there = require_device(device)
        require_directory("bench", out)
    console = Console()
    rows: list[Row] = []
    sections = SECTIONS
    if there.type != "cpu":
        sections = {
            name: lambda rounds, name=name: gpu_rows(there, rounds, contenders(), name)  # type: ignore[misc]
            for name in models()
        }
    with Progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), console=console) as progress:
        task = progress.add_task("measuring", total=len(sections))
        for name, section in sections.items():
            progress.update(task, description=name)
            rows += section(rounds)
            progress.advance(task)
    with _one_sentence():
        write_json(out / "environment.json", environment())
        write_json(out / "bench.json", [asdict(row) for row in rows])
    console.print(display.bench_table(rows))
    say(console, f"Wrote bench.json and environment.json to {out}.")


@contextmanager
def _one_sentence() -> Iterator[None]:
    """Turn a ValueError about the user's input into its one sentence and exit code 2; trouble with a file into 1.

    Yields:
        Nothing; it guards the block.
    """
    try:
        yield
    except ValueError as error:
        typer.echo(error, err=True)
        sys.exit(2)
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        typer.echo(f"blockadapt: {error.strerror or error}{where}.", err=True)
        sys.exit(1)
