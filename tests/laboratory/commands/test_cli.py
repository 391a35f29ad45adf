"""The commands: what they refuse in one sentence, what they say, and how they end."""

from __future__ import annotations

import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from filelock import FileLock

import blockadapt
from blockadapt_experiments.commands.contents import CONTENTS
from blockadapt_experiments.contenders.catalogue import CONTENDERS
from blockadapt_experiments.core.config import SCALES, keys
from blockadapt_experiments.data.images import load_images
from blockadapt_experiments.experiments.registry import EXPERIMENTS, get_experiment
from blockadapt_experiments.files.atomic import read_json
from blockadapt_experiments.running import runner
from blockadapt_experiments.running.environment import available_cores
from support.commands import Command, in_a_terminal, tiny
from support.disk import full_disk, posix
from support.images import write_images
from support.laboratory import ENVIRONMENT, finished, run_command, wait_until


def test_list_names_every_experiment(command: Command) -> None:
    said = command("list")
    assert said.code == 0
    for name in EXPERIMENTS:
        (line,) = (line for line in said.out.splitlines() if line.split()[:1] == [name])
        assert get_experiment(name).title in line
        assert ", ".join(SCALES) in line


def test_what_list_shows_is_what_the_experiments_say() -> None:
    said = {name: (get_experiment(name).title, get_experiment(name).section) for name in EXPERIMENTS}
    assert said == CONTENTS
    assert list(said) == list(CONTENTS)


def test_list_shows_optimizers_and_settings(command: Command) -> None:
    said = command("list", "--optimizers")
    assert said.code == 0
    for name, contender in CONTENDERS.items():
        (line,) = (line for line in said.out.splitlines() if line.split()[:1] == [name])
        assert contender.label.split()[0] in line
    said = command("list", "--settings", "mnist-lenet300")
    shown = {line.split()[0]: line for line in said.out.splitlines() if line.split()}
    experiment = get_experiment("mnist-lenet300")
    assert {*keys(experiment.config)} - {"lr", "arms"} <= shown.keys()
    assert shown["epochs"].split() == ["epochs", "2", "20", "100"]
    said = command("list", "--settings", "mnist-lenet30")
    assert said == (2, "", "blockadapt: there is no experiment 'mnist-lenet30'; the nearest is 'mnist-lenet300'.\n")


def test_in_a_narrow_window_every_name_can_be_read_and_copied(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    words = command("list", "--optimizers").out.split()
    assert {name for contender in CONTENDERS.values() for name in (contender.name, *contender.types)} <= {*words}
    words = command("list", "--settings", "mnist-lenet300").out.split()
    assert {*keys(get_experiment("mnist-lenet300").config)} - {"lr", "arms"} <= {*words}


LIGHT = """
import sys
from blockadapt_experiments.__main__ import main
sys.argv = ["blockadapt", *sys.argv[1:]]
try:
    main()
finally:
    heavy = [name for name in ("torch", "scipy", "matplotlib", "datasets", "distributed") if name in sys.modules]
    assert not heavy, heavy
"""


@pytest.mark.parametrize(
    ("words", "code", "answer"),
    [
        (("list",), 0, "LeNet-300-100 on MNIST"),
        (("--version",), 0, f"blockadapt {blockadapt.__version__}\n"),
        (("run", "mnist-lenet30"), 2, "blockadapt: there is no experiment 'mnist-lenet30'; the nearest is"),
        (("plan", "tcva"), 2, "blockadapt: there is no experiment 'tcva'; the nearest is 'tcvae'.\n"),
        (
            ("run", "terms", "--scale", "smok"),
            2,
            "terms: `scale` must be one of 'smoke', 'laptop', 'paper', got 'smok'.",
        ),
        (("run", "terms", "--sclae", "smoke"), 2, "No such option"),
        (
            ("run", "terms", "--optimizers", "adam, block-adm"),
            2,
            "terms: `optimizers` has an unknown optimizer 'block-adm'; the nearest is 'block-adam'.\n",
        ),
        (
            ("run", "toy-landscape", "--optimizers", "same-layers"),
            2,
            "toy-landscape: `optimizers` has an unknown optimizer 'same-layers'; the nearest is 'same-layer'.\n",
        ),
        (
            ("run", "lm-lstm", "--optimizers", "paper-clp"),
            2,
            "lm-lstm: `optimizers` has an unknown optimizer 'paper-clp'; the nearest is 'paper-clip'.\n",
        ),
        (
            ("run", "terms", "--optimizers", "b52", "--arm", "b25=block-adam,block_size=25"),
            2,
            "terms: `optimizers` has an unknown optimizer 'b52'; the nearest is 'b25'.\n",
        ),
        (
            ("run", "terms", "--arm", "b25=block-adm,block_size=25"),
            2,
            "arms.b25: there is no optimizer 'block-adm'; the nearest is 'block-adam'.\n",
        ),
    ],
)
def test_what_can_be_said_at_once_loads_nothing_heavy(words: tuple[str, ...], code: int, answer: str) -> None:
    done = finished([sys.executable, "-c", LIGHT, *words])
    assert "AssertionError" not in done.stderr
    assert done.returncode == code
    assert answer in done.stdout + done.stderr


def test_compile_makes_the_kernels_ready(command: Command) -> None:
    said = command("compile")
    assert said.code == 0
    assert [line.split(":")[0] for line in said.out.splitlines()] == ["float32", "float64"]


def test_plan_prints_the_librarys_table(command: Command) -> None:
    said = command("plan", "mnist-lenet300", "--block-size", "25")
    assert said.code == 0
    assert re.search(r"^fc1.weight +300×784 +input +9,408 × 25 ", said.out, re.MULTILINE)
    assert "266,610" in said.out.splitlines()[-1]
    said = command("plan", "mnist-lenet5", "--optimizer", "block-rmsprop", "--set", "optimizer.grouping=diagonal")
    assert re.search(r"^conv1.weight +20×1×5×5 +diagonal +500 × 1 ", said.out, re.MULTILINE)
    assert "431,080" in said.out.splitlines()[-1]


def test_a_run_leaves_records_and_a_report_can_be_made(command: Command, tmp_path: Path) -> None:
    out = tmp_path / "new" / "out"
    arguments = tiny(out, options=["--seed", "0,2", "--seed", "5", "--optimizers", "sgd, adam"])
    said = command(*arguments)
    assert said.code == 0
    assert said.err == ""
    lines = said.out.splitlines()
    assert lines[0] == (f"mnist-lenet300, smoke: 6 runs, 0 finished, 0 begun; 1 at once with 1 thread each, in {out}.")
    pattern = r"(sgd|adam), seed [025]: train loss [\d.e-]+, test accuracy [\d.]+"
    assert all(re.fullmatch(pattern, line) for line in lines[1:7])
    assert re.fullmatch(r"6 of 6 runs are finished, after [\d.]+ min\.", lines[7])
    assert lines[8] == f"`blockadapt report {out}` shows them."
    assert {path.parent.name for path in out.glob("runs/*/*/*/result.json")} == {"seed-0", "seed-2", "seed-5"}
    about = read_json(out / "experiment.json")
    assert shlex.split(about["command"]) == ["blockadapt", *arguments]
    assert (about["experiment"], about["scale"], about["tune"]) == ("mnist-lenet300", "smoke", False)
    assert about["settings"]["seeds"] == [0, 2, 5]
    assert command(*arguments).out.splitlines()[0].startswith("mnist-lenet300, smoke: 6 runs, 6 finished, 0 begun;")
    said = command("report", str(out))
    assert said.code == 0
    assert (out / "report.html").exists()
    assert said.out.startswith("Wrote report.html, ")


def test_what_the_runs_were_made_with_is_what_the_experiment_says(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads too: this process has others than its runs, which is nothing that a report should warn of."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)  # which would give the runs as many
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert command(*tiny(tmp_path, "optimizers=['sgd']", "epochs=1")).code == 0
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    (run,) = tmp_path.glob("runs/*/*/*/run.json")
    assert read_json(tmp_path / "experiment.json")["environment"] == read_json(run)["environment"]
    assert command("report", str(tmp_path)).code == 0
    assert "Different for some of the runs" not in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_a_dry_run_touches_nothing(command: Command, tmp_path: Path) -> None:
    out = tmp_path / "out"
    said = command(*tiny(out, "lr.sgd=0.25", options=["--dry-run"]))
    assert said.code == 0
    assert re.search(r"sgd, seed 0 +0.25 +new", said.out)
    assert re.search(r"block-adam, seed 0 +0.001 +new", said.out)
    assert not out.exists()


SECRET = "s3://me:secret@bucket/there"

REFUSED = [
    (["run", "mnist"], "blockadapt: there is no experiment 'mnist'; the nearest is 'mnist-lenet5'."),
    (["run", "terms", "--scale", "big"], "terms: `scale` must be one of 'smoke', 'laptop', 'paper', got 'big'."),
    (
        ["run", "mnist-lenet5", "--set", "epohcs=3"],
        "mnist-lenet5: there is no setting `epohcs`; the nearest is `epochs`.",
    ),
    (
        ["run", "mnist-lenet5", "--optimizers", "sgd,blok-adam"],
        "mnist-lenet5: `optimizers` has an unknown optimizer 'blok-adam'; the nearest is 'block-adam'.",
    ),
    (["run", "mnist-lenet5", "--seed", "one"], "run: `seed` must be integers >= 0 with commas between, got 'one'."),
    (["run", "mnist-lenet5", "--seed", "-1"], "run: `seed` must be integers >= 0 with commas between, got '-1'."),
    (
        ["run", "mnist-lenet5", "--seed", "1,1"],
        "settings: `seeds` must be one or more different integers in [0, 2⁶³), got [1, 1].",
    ),
    (["run", "mnist-lenet5", "--tune-over", "eps=1e-8:1"], "run: `tune_over` must be given together with --tune."),
    (
        ["run", "mnist-lenet5", "--tune", "--tune-over", "epz=1e-8:1"],
        "run: `tune_over` has no setting 'epz' to tune; the nearest is 'eps'.",
    ),
    (
        ["run", "mnist-lenet5", "--jobs", "2", "--cluster", "tcp://127.0.0.1:1"],
        "run: `jobs` must be left out with --cluster, which does one run on each of its workers.",
    ),
    *(
        (
            ["run", "mnist-lenet5", option, "postgresql://me:secret@host/study"],
            sentence,
        )
        for option, sentence in {
            "--storage": "run: `storage` must be left out: the folder of --out is the study, without a database.",
            "--out": "run: `out` must be a directory that this machine sees, got a URL, postgresql://….",
        }.items()
    ),
    *(
        (words, f"{words[0]}: `{argument}` must be a {what} that this machine sees, got a URL, s3://….")
        for words, argument, what in (
            (["report", "runs", "--out", SECRET], "out", "directory"),
            (["report", "--overview", "runs", "--out", SECRET], "out", "directory"),
            (["report", SECRET], "dir", "directory"),
            (["pack", "runs", "--out", SECRET], "out", "file"),
            (["pack", SECRET, "--out", "runs.tar.xz"], "dir", "directory"),
            (["run", "mnist-lenet5", "--data-dir", SECRET], "data_dir", "directory"),
        )
    ),
    (
        ["list", "--load", SECRET],
        "load: `load` must be a Python file that this machine sees, got a URL, s3://….",
    ),
    (["plan", "toy-landscape"], "plan: toy-landscape has no model to plan."),
    (["plan", "mnist-lenet5", "--optimizer", "sgd"], "plan: `optimizer` must be one of the block methods, got 'sgd'."),
    (["plan", "mnist-lenet5", "--block-size", "0"], "optimizer: `block_size` must be an integer >= 1, got 0."),
]


@pytest.mark.parametrize(("arguments", "sentence"), REFUSED, ids=[" ".join(arguments) for arguments, _ in REFUSED])
def test_what_is_wrong_gets_one_sentence(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], sentence: str
) -> None:
    monkeypatch.chdir(tmp_path)
    said = command(*arguments)
    assert said == (2, "", sentence + "\n")
    assert list(tmp_path.iterdir()) == []


def test_missing_data_get_one_sentence(command: Command, tmp_path: Path) -> None:
    jobs = ["--jobs", "2"] if available_cores() > 1 else []
    said = command(*tiny(tmp_path / "out", "data=mnist", options=["--data-dir", str(tmp_path), *jobs]))
    assert (said.code, said.out) == (2, "")
    assert said.err.startswith(f"data: mnist was not found in {tmp_path}; put its train-*.parquet")
    assert said.err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_an_experiment_without_an_objective_cannot_be_tuned(command: Command, tmp_path: Path) -> None:
    assert get_experiment("toy-landscape").objective is None
    said = command("run", "toy-landscape", "--scale", "smoke", "--out", str(tmp_path / "out"), "--tune")
    sentence = "run: toy-landscape has no learning rate to tune; leave --tune out.\n"
    assert said == (2, "", sentence)


def test_changed_settings_are_refused_by_their_key(command: Command, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert command(*tiny(out, "optimizers=['sgd']")).code == 0
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    for change, sentence in (
        ("batch.size=49", "run: `batch.size` must be 48 as in the runs in {out}, got 49."),
        ("tune.trials=4", "run: `tune.trials` must be 3 as in the runs in {out}, got 4."),
    ):
        said = command(*tiny(out, "optimizers=['sgd']", change))
        assert said == (2, "", sentence.format(out=out) + "\n")
    said = command(*tiny(out, "optimizers=['sgd']", options=["--tune"]))
    assert said.err == f"run: `tune` must be False as in the runs in {out}, got True.\n"
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before


def test_a_run_in_other_hands_is_waited_for_and_taken_over(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "runs" / "sgd" / "-" / "seed-0"
    folder.mkdir(parents=True)
    others = FileLock(folder / ".lock")
    others.acquire()

    def wait(seconds: float) -> None:
        assert {path.name for path in folder.iterdir()} == {".lock"}
        others.release()  # as one does that has died

    monkeypatch.setattr(runner.time, "sleep", wait)
    said = command(*tiny(tmp_path))
    assert said.code == 0
    lines = [line.partition(":")[0] for line in said.out.splitlines()[1:4]]
    assert lines == ["block-adam, seed 0", "Waiting for what other processes have in hand", "sgd, seed 0"]
    assert "in hand: sgd, seed 0.\n" in said.out
    assert "2 of 2 runs are finished" in said.out


def test_a_run_that_fails_leaves_the_others_alone(command: Command, tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "sgd" / "-" / "seed-0"
    folder.mkdir(parents=True)
    (folder / "run.json").write_text("this is no record")
    said = command(*tiny(tmp_path))
    assert said.code == 1
    (line,) = (line for line in said.out.splitlines() if "failed" in line)
    assert re.fullmatch(rf"sgd, seed 0 failed with \w+: .*; see {re.escape(str(folder))}/error.txt\.", line)
    assert "Traceback (most recent call last)" in (folder / "error.txt").read_text()
    assert "1 of 2 runs are finished" in said.out
    assert (tmp_path / "runs" / "block-adam" / "-" / "seed-0" / "result.json").exists()
    (folder / "run.json").unlink()
    assert command(*tiny(tmp_path)).code == 0
    assert not (folder / "error.txt").exists()


def test_damaged_rows_are_told_by_the_report_and_made_again_by_the_run(command: Command, tmp_path: Path) -> None:
    assert command(*tiny(tmp_path)).code == 0
    metrics = tmp_path / "runs" / "sgd" / "-" / "seed-0" / "metrics.jsonl"
    whole = metrics.read_bytes()
    metrics.write_bytes(whole[:-50])
    assert command("report", str(tmp_path)).code == 0
    written = (tmp_path / "report" / "summary.md").read_text()
    assert "1 of 2 runs finished" in written
    assert "sgd, seed 0 does not count: metrics.jsonl is not what the run wrote" in written
    said = command(*tiny(tmp_path))
    assert said.code == 0
    assert "2 runs, 1 finished, 0 begun" in said.out
    assert re.search(r"^sgd, seed 0: metrics.jsonl is not what the run wrote .* It begins again\.$", said.out, re.M)
    assert metrics.read_bytes() == whole
    assert command("report", str(tmp_path)).code == 0
    assert "It begins again." in (tmp_path / "report" / "summary.md").read_text()
    assert "It begins again." in (tmp_path / "report.html").read_text()


def test_a_command_whose_job_failed_does_not_end_well(command: Command, tmp_path: Path) -> None:
    """Also where every run is finished: TensorBoard's logs cannot be written into a file."""
    assert command(*tiny(tmp_path)).code == 0
    (tmp_path / "tensorboard").write_text("in the way")
    said = command(*tiny(tmp_path, options=["--tensorboard"]))
    assert "2 of 2 runs are finished" in said.out
    assert said.code == 1


@posix
def test_on_a_full_disk_runs_fail_in_one_line_each_and_go_on_later(command: Command, tmp_path: Path) -> None:
    load_images("digits")  # whatever an import writes
    with full_disk(20_000):  # room for rows, none for weights
        said = command(*tiny(tmp_path))
    assert said.code == 1
    failed = [line for line in said.out.splitlines() if "failed" in line]
    assert [line.partition(" failed with ")[0] for line in failed] == ["sgd, seed 0", "block-adam, seed 0"]
    assert all("File too large" in line and str(tmp_path) in line for line in failed)
    assert "Traceback" not in said.out + said.err
    assert not list(tmp_path.rglob(".*.part"))
    assert command(*tiny(tmp_path)).code == 0


@posix
def test_a_disk_without_any_room_gets_one_sentence(command: Command, tmp_path: Path) -> None:
    load_images("digits")  # whatever an import writes
    with full_disk(10):
        said = command(*tiny(tmp_path))
    assert said == (1, "", f"blockadapt: File too large ({tmp_path / 'experiment.json'}).\n")
    assert not list(tmp_path.rglob("*.part"))


def test_more_jobs_than_cores_are_cut_to_the_cores(command: Command, tmp_path: Path) -> None:
    said = command(*tiny(tmp_path, options=["--jobs", "1000", "--dry-run"]))
    cores = available_cores()
    assert said.code == 0
    assert f"--jobs 1000 is more than the cores that there are; {cores} at once." in said.out.splitlines()
    assert f"{cores} at once with 1 thread each" in said.out


def test_seeds_of_the_runs_are_not_tuned_with(command: Command, tmp_path: Path) -> None:
    said = command(*tiny(tmp_path / "out", "tune.seeds=[7, 0]", options=["--tune"]))
    assert said == (2, "", "run: `tune.seeds` must be other seeds than those of the runs, [0], got [7, 0].\n")
    assert not (tmp_path / "out").exists()


def test_other_data_in_the_same_directory_are_refused(command: Command, tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (120, 28, 28), dtype=np.uint8)
    for name, images in (("here", pixels), ("other", 255 - pixels)):
        for split in ("train", "test"):
            write_images(tmp_path / name / "mnist", split, images)
    out, options = tmp_path / "out", ["--data-dir", str(tmp_path / "here")]
    assert command(*tiny(out, "data=mnist", options=options)).code == 0
    for path in out.glob("runs/sgd/*/*/result.json"):
        path.unlink()
    said = command(*tiny(out, "data=mnist", options=["--data-dir", str(tmp_path / "other")]))
    assert (said.code, said.out) == (2, "")
    assert re.fullmatch(r"run: `data_sha256.mnist` must be '\w+' as in the runs in .*, got '\w+'\.\n", said.err)
    assert command(*tiny(out, "data=mnist", options=options)).code == 0


@posix
def test_ctrl_c_says_how_to_go_on(tmp_path: Path) -> None:
    arguments = run_command(tmp_path / "out", "epochs=100000", options=["--jobs", "1"])
    with subprocess.Popen(
        arguments, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8"
    ) as process:
        wait_until(lambda: any((tmp_path / "out").glob("runs/*/*/*/checkpoint.pt")), process)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate()
    assert process.returncode == 130
    (line,) = (line for line in errors.splitlines() if not line.startswith("blockadapt: compiling"))
    assert re.fullmatch(r"Interrupted; `blockadapt run mnist-lenet300 .*` goes on where this stopped\.", line)
    assert any((tmp_path / "out").glob("runs/*/*/*/checkpoint.pt"))


@posix
def test_a_terminal_shows_bars_with_the_time_left(tmp_path: Path) -> None:
    command = run_command(tmp_path / "out", "epochs=40", "optimizers=['sgd', 'adam']")
    code, text = in_a_terminal(command, {**ENVIRONMENT, "TERM": "xterm"})
    assert code == 0
    assert re.search(r"sgd, seed 0 +[━╸╺ ]+ +\d+/40 +\d+:\d\d:\d\d +train loss", text)
    assert re.search(r"mnist-lenet300 +[━╸╺ ]+ +[01]/2 +\d+:\d\d:\d\d", text)
    assert re.search(r"adam, seed 0: train loss [\d.e-]+, test accuracy", text)
