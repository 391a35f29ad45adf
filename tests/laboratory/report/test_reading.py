"""What is read back: what was asked for and what was found, or one sentence that says why not."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("scipy", reason="needs the `experiments` extra")

from blockadapt_experiments.core.config import load, plain
from blockadapt_experiments.experiments.registry import get_experiment
from blockadapt_experiments.files.atomic import read_json
from blockadapt_experiments.files.checked import write_sealed
from blockadapt_experiments.report import write_report
from blockadapt_experiments.report.reading import read
from blockadapt_experiments.report.together import together
from support.run_records import experiment, rows_of, write_experiment, write_run

MARKS = ("format", "sha256")


def test_what_was_asked_for_comes_first_and_numbers_in_names_count(tmp_path: Path) -> None:
    write_experiment(tmp_path, optimizers=["ggt", "adam"], seeds=[7, 1])
    for variant in ("M=10", "M=1", "M=2.5"):
        write_run(tmp_path, "adam", variant, 12, [])
        write_run(tmp_path, "sgd", variant, 3, [])
    summary = read(tmp_path, experiment())
    assert summary.arms == ["ggt", "adam", "sgd"]
    assert summary.seeds == [7, 1, 3, 12]
    assert summary.variants == ["M=1", "M=2.5", "M=10"]


def test_variants_that_have_not_begun_are_planned(tmp_path: Path) -> None:
    toy = get_experiment("toy-adagrad")
    settings = plain(load(toy, "smoke", ["batches=[10, 2]", "seeds=[0]"]))
    write_experiment(tmp_path, toy.name, "smoke", settings)
    write_run(tmp_path, "adagrad", "M=2", 0, [{"step": 1, "loss": 0.5}])
    summary = read(tmp_path)
    assert summary.experiment is toy
    assert summary.variants == ["M=10", "M=2"]
    assert summary.planned == 2 * len(settings["optimizers"])


@pytest.mark.parametrize("name", ["mnist-lenet300", "toy-trajectories", "toy-landscape"])
def test_the_plan_of_shipped_settings_is_the_experiments_own(tmp_path: Path, name: str) -> None:
    registered = get_experiment(name)
    settings = load(registered, "laptop")
    write_experiment(tmp_path, name, "laptop", plain(settings))
    assert read(tmp_path).variants == list(registered.variants(settings))


def refusal(out: Path) -> str:
    with pytest.raises(ValueError, match=r"\Areport: ") as refused:
        read(out, experiment())
    return str(refused.value)


def test_what_is_no_directory_of_an_experiment_is_refused_in_one_sentence(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nowhere"):
        rule = "a directory that `blockadapt run` has written to"
        assert refusal(path) == f"report: `dir` must be {rule}, got {str(path)!r}."


@pytest.mark.parametrize("name", ["experiment.json", "run.json"])
def test_a_broken_file_is_named(tmp_path: Path, name: str) -> None:
    write_experiment(tmp_path)
    run = write_run(tmp_path, "adam", "", 0, rows_of(loss=[1.0]))
    path = tmp_path / name if name == "experiment.json" else run / name
    for content in ('{"a": 1}\n{oops\n', '{"a": 1}', "[]", "null"):
        path.write_text(content)
        assert refusal(tmp_path).startswith(f"report: {str(path)!r} ")


@pytest.mark.parametrize("left", ["metrics.jsonl", "timing.jsonl", "result.json"])
def test_a_run_that_has_lost_its_description_is_not_passed_over(tmp_path: Path, left: str) -> None:
    write_experiment(tmp_path)
    run = write_run(tmp_path, "adam", "", 0, rows_of(loss=[1.0]))
    for path in run.iterdir():
        if path.name != left:
            path.unlink()
    assert refusal(tmp_path) == f"report: {str(run / 'run.json')!r} is missing."


@pytest.mark.parametrize("name", ["metrics.jsonl", "timing.jsonl", "result.json", "arrays.npz"])
@pytest.mark.parametrize("content", ['{"epoch": 1}\n{oops\n', "[]\n", "{}\n", "", None])
def test_a_run_whose_record_is_damaged_does_not_count(tmp_path: Path, name: str, content: str | None) -> None:
    write_experiment(tmp_path)
    run = write_run(tmp_path, "adam", "", 0, rows_of(loss=[1.0, 2.0]), arrays={"picture": np.ones(3)})
    write_run(tmp_path, "adam", "", 1, rows_of(loss=[3.0, 4.0]))
    assert read(tmp_path, experiment()).finished == 2
    if content is None:
        (run / name).unlink()
    else:
        (run / name).write_text(content)
    summary = read(tmp_path, experiment())
    assert summary.finished == 1
    assert summary.final("adam", "loss").tolist() == [4.0]
    damages = [found.damage for found in summary.runs]
    assert damages[1] == ""
    if (name, content) != ("result.json", None):  # then it is a run that is not finished
        assert damages[0].startswith(f"{name} ")


def test_settings_of_old_that_nothing_vouches_for_are_told(tmp_path: Path) -> None:
    write_experiment(tmp_path / "new")
    write_experiment(tmp_path / "old")
    path = tmp_path / "old" / "experiment.json"
    path.write_text(json.dumps({key: value for key, value in read_json(path).items() if key not in MARKS}))
    old, new = (read(tmp_path / name, experiment()) for name in ("old", "new"))
    assert (together([new, old]).unsealed, new.unsealed) == ((tmp_path / "old",), ())
    for folder in ("old", "new"):
        write_report(tmp_path / folder, experiment())
        sentence = "old/experiment.json is of an older version and has no digest: nothing shows whether it was changed."
        for page in ("report.html", "report/summary.md"):
            assert (sentence in (tmp_path / folder / page).read_text(encoding="utf-8")) == (folder == "old")


def test_an_unknown_experiment_is_refused(tmp_path: Path) -> None:
    write_experiment(tmp_path, "mnist-lenet30")
    with pytest.raises(ValueError, match="the nearest is 'mnist-lenet300'"):
        read(tmp_path)


def test_an_experiment_whose_file_was_not_loaded_is_said_to_be_that(tmp_path: Path) -> None:
    write_experiment(tmp_path, "my-own")
    path = tmp_path / "experiment.json"
    write_sealed(path, {**read_json(path), "code": {"my-own": "0" * 64}})
    sentence = r"^report: 'my-own' is not built in; load the file that registers it \(--load FILE\)\.$"
    for refused in (read, write_report):
        with pytest.raises(ValueError, match=sentence):
            refused(tmp_path)
