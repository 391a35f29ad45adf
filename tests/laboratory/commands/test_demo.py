"""The demo, run as a user runs it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytest.importorskip("typer", reason="needs the `experiments` extra")
Image = pytest.importorskip("PIL.Image", reason="needs the `experiments` extra")

from blockadapt_experiments.__main__ import main  # noqa: E402
from support.commands import in_a_terminal  # noqa: E402
from support.laboratory import COMMAND  # noqa: E402

# FORCE_COLOR, as CI services set it, must not bring animations into a log.
ENVIRONMENT = {**os.environ, "COLUMNS": "80", "PYTHONIOENCODING": "utf-8", "FORCE_COLOR": "1", "TERM": "xterm"}
PLOTS = ("training_loss.png", "test_accuracy.png")
OPTIMIZERS = ("SGD", "Adam", "Block-Adam", "Block-Adam + clip")
RUNS = [(model, optimizer) for model in ("MLP", "CNN") for optimizer in OPTIMIZERS]


class Outcome(NamedTuple):
    code: int
    stdout: str
    stderr: str
    out: Path

    @property
    def numbers(self) -> dict[str, Any]:
        return json.loads((self.out / "demo.json").read_text(encoding="utf-8"))


def plain(text: str) -> str:
    """Without colours."""
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, encoding="utf-8", env=ENVIRONMENT, check=False)


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    out = tmp_path_factory.mktemp("demo") / "new" / "folder"
    done = python(*COMMAND[1:], "demo", "--epochs", "2", "--out", str(out))
    return Outcome(done.returncode, plain(done.stdout), done.stderr, out)


def test_demo_succeeds_and_says_where_its_files_are(demo: Outcome) -> None:
    assert demo.code == 0, demo.stderr
    assert [line for line in demo.stderr.splitlines() if not line.startswith("blockadapt: compiling")] == []
    assert demo.stdout.splitlines()[-1] == (
        f"Wrote training_loss.png, test_accuracy.png, demo.json to {demo.out}. "
        "This is one seed on a tiny data set: a look, not evidence."
    )
    assert {path.name for path in demo.out.iterdir()} == {*PLOTS, "demo.json"}


def test_table_shows_the_numbers_of_every_run(demo: Outcome) -> None:
    rows = [re.split(r"\s{2,}", line.strip()) for line in demo.stdout.splitlines() if line.startswith((" MLP", " CNN"))]
    # Two spaces part the columns but for narrow ones, so split the numbers by any space.
    cells = [[row[0], row[1], *" ".join(row[2:]).split()] for row in rows]
    expected = [
        [
            run["model"],
            run["optimizer"],
            f"{run['lr']:g}",
            f"{run['final_accuracy']:.1%}",
            f"{run['best_accuracy']:.1%}",
            f"{run['final_loss']:.1e}",
            f"{run['seconds_per_epoch']:.3f}",
            f"{run['state_bytes'] / 1e6:.3f}",
            f"{run['final_state_bytes'] / 1e6:.3f}",
        ]
        for run in demo.numbers["runs"]
    ]
    assert cells == expected
    assert [(row[0], row[1]) for row in cells] == RUNS


def test_output_to_a_pipe_is_plain_lines_of_80_columns(demo: Outcome) -> None:
    lines = demo.stdout.splitlines()
    for (model, optimizer), line in zip(RUNS, lines, strict=False):
        assert re.fullmatch(rf"{model}, {re.escape(optimizer)}: test accuracy \d+\.\d%", line)
    assert max(map(len, lines[:-1])) <= 80
    assert "\x1b" not in demo.stdout
    assert "\r" not in demo.stdout


@pytest.mark.parametrize("name", PLOTS)
def test_plots_are_images_with_something_on_them(demo: Outcome, name: str) -> None:
    with Image.open(demo.out / name) as image:
        assert image.format == "PNG"
        width, height = image.size
        colours = len(image.convert("RGB").getcolors(maxcolors=width * height))
    assert 1000 <= width <= 2000
    assert 500 <= height <= 1000
    assert colours > 20


def test_numbers_carry_what_they_were_measured_on(demo: Outcome) -> None:
    numbers = demo.numbers
    assert numbers["settings"] == {"epochs": 2, "seed": 0}
    assert numbers["data"] == {"name": "scikit-learn digits", "train": 1347, "test": 450}
    assert {run["threads"] for run in numbers["runs"]} == {1}
    machine, versions = numbers["environment"]["machine"], numbers["environment"]["versions"]
    assert machine["cores"] == os.cpu_count()
    assert numbers["environment"]["kernel"] in ("numba", "eigh")
    assert machine["system"]
    assert machine["processor"]
    assert {"python", "blockadapt", "torch", "numpy", "numba", "scikit-learn", "pytorch_optimizer"} == {*versions}


def test_numbers_are_sane(demo: Outcome) -> None:
    runs = {(run["model"], run["optimizer"]): run for run in demo.numbers["runs"]}
    assert list(runs) == RUNS
    for run in runs.values():
        assert len(run["epochs"]) == 2
        assert 0.1 < run["final_accuracy"] <= run["best_accuracy"] <= 1
        assert 0 < run["final_loss"] < 2.5
        assert run["seconds_per_epoch"] > 0
    for model, parameters in (("MLP", 6040), ("CNN", 1898)):
        sgd, adam, block, clipped = (runs[model, optimizer] for optimizer in OPTIMIZERS)
        assert sgd["state_bytes"] == 4 * parameters
        assert adam["state_bytes"] > 2 * sgd["state_bytes"]
        assert block["state_bytes"] == clipped["state_bytes"] > adam["state_bytes"]
        assert clipped["final_state_bytes"] < adam["state_bytes"]  # V has been freed


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_same_seed_gives_same_curves_and_a_terminal_gets_bars(demo: Outcome, tmp_path: Path) -> None:
    code, screen = in_a_terminal([*COMMAND, "demo", "--epochs", "2", "--out", str(tmp_path)], ENVIRONMENT)
    assert code == 0, screen
    for model, optimizer in RUNS:
        assert re.search(rf"{model}, {re.escape(optimizer)} +━+ +2/2 +test \d+\.\d%", screen)

    again = json.loads((tmp_path / "demo.json").read_text(encoding="utf-8"))
    assert curves(again) == curves(demo.numbers)


def curves(numbers: dict[str, Any]) -> list[list[tuple[float, float]]]:
    return [[(epoch["train_loss"], epoch["test_accuracy"]) for epoch in run["epochs"]] for run in numbers["runs"]]


def refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str) -> str:
    """What the command says when it refuses these arguments with exit code 2."""
    monkeypatch.setattr(sys, "argv", ["blockadapt", *arguments])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    written = capsys.readouterr()
    assert written.out == ""
    return written.err


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--epochs", "-3"], "demo: `epochs` must be an integer >= 1, got -3."),
        (["--epochs", "0"], "demo: `epochs` must be an integer >= 1, got 0."),
        (["--seed", "-1"], "demo: `seed` must be an integer in [0, 9223372036854775807], got -1."),
    ],
)
def test_bad_numbers_get_one_sentence(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    arguments: list[str],
    sentence: str,
) -> None:
    out = tmp_path / "out"
    assert refused(capsys, monkeypatch, "demo", "--out", str(out), *arguments) == sentence + "\n"
    assert not out.exists()


@pytest.mark.parametrize("below", [".", "below"])
def test_a_file_as_directory_gets_one_sentence(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, below: str
) -> None:
    file = tmp_path / "file"
    file.write_text("kept")
    out = file / below
    sentence = f"demo: `out` must be a directory that can be written to, got {str(out)!r}.\n"
    assert refused(capsys, monkeypatch, "demo", "--out", str(out)) == sentence
    assert file.read_text() == "kept"


@pytest.mark.parametrize("module", ["typer", "matplotlib"])
def test_missing_extra_is_named_in_one_sentence(tmp_path: Path, module: str) -> None:
    program = (
        f"import sys; sys.modules['{module}'] = None; sys.argv[1:] = ['demo', '--out', {str(tmp_path / 'out')!r}]; "
        "from blockadapt_experiments.__main__ import main; main()"
    )
    done = python("-c", program)
    sentence = f'blockadapt: this command needs {module}; install it with pip install "blockadapt[experiments]".\n'
    assert (done.returncode, done.stdout, done.stderr) == (2, "", sentence)


def test_blockadapt_is_the_entry_point() -> None:
    (script,) = entry_points(group="console_scripts", name="blockadapt")
    assert script.load() is main
