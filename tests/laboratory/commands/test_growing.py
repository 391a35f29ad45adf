"""Arms from the command line to the report; folders that grow, keep what is there, and refuse what contradicts it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from blockadapt_experiments.files.checked import write_sealed
from blockadapt_experiments.report.reading import read
from blockadapt_experiments.results.recorded_runs import read_tuned
from support.commands import Command, tiny
from support.laboratory import outcome

B4 = "b4=block-adam,block_size=4,label=Blocks of four"
SGD = "optimizers=['sgd']"


def stamps(out: Path) -> dict[str, int]:
    """When each file of a run was last written."""
    return {str(path.relative_to(out)): path.stat().st_mtime_ns for path in out.glob("runs/**/*.json*")}


def test_an_arm_is_run_recorded_tuned_and_shown_under_its_name(command: Command, tmp_path: Path) -> None:
    tune = ("tune.trials=2", "tune.low=1e-3", "tune.high=1e-2", "epochs=1", SGD)
    assert command(*tiny(tmp_path / "arm", *tune, options=("--tune", "--arm", B4))).code == 0
    assert {*read_tuned(tmp_path / "arm", "test")} == {"sgd", "b4"}
    summary = read(tmp_path / "arm")
    assert summary.arms == ["sgd", "b4"]
    assert [summary.label(arm) for arm in summary.arms] == ["SGD", "Blocks of four"]
    assert [summary.lr_source(arm) for arm in summary.arms] == ["tuned", "tuned"]
    # The same as an experiment that has blocks of four throughout.
    alone = ("epochs=1", "optimizers=['block-adam']", "optimizer.block_size=4", f"lr.block-adam={summary.lr('b4')}")
    assert command(*tiny(tmp_path / "alone", *alone)).code == 0
    name = "runs/{}/-/seed-0/metrics.jsonl"
    found, expected = outcome(tmp_path / "arm"), outcome(tmp_path / "alone")
    assert found[name.format("b4")] == expected[name.format("block-adam")]
    assert command("report", str(tmp_path / "arm")).code == 0
    assert "Blocks of four" in (tmp_path / "arm" / "report.html").read_text(encoding="utf-8")


def test_more_seeds_optimizers_and_arms_join_a_folder(command: Command, tmp_path: Path) -> None:
    grown, whole = tmp_path / "grown", tmp_path / "whole"
    assert command(*tiny(grown, SGD)).code == 0
    before = stamps(grown)
    assert command(*tiny(grown, "optimizers=['adam']", "seeds=[3]", options=("--arm", B4))).code == 0
    assert before.items() <= stamps(grown).items()
    assert (read(grown).planned, read(grown).complete) == (3, True)  # all that was asked for
    said = command(*tiny(grown, "optimizers=['sgd', 'adam', 'b4']", "seeds=[0, 3]", options=("--arm", B4)))
    assert said.code == 0
    assert "6 runs, 3 finished, 0 begun" in said.out
    assert command(*tiny(whole, "optimizers=['sgd', 'adam']", "seeds=[0, 3]", options=("--arm", B4))).code == 0
    assert outcome(grown) == outcome(whole)
    summary = read(grown)
    assert (summary.arms, summary.seeds, summary.complete) == (["sgd", "adam", "b4"], [0, 3], True)
    assert len(summary.command.splitlines()) == 3
    assert command(*tiny(grown, SGD)).code == 0
    assert read(grown).command == summary.command  # it asked for nothing new


REFUSED = {
    "epochs=2": "run: `epochs` must be 3 as in the runs in {}, got 2.",
    "lr.sgd=0.5": "run: `lr.sgd` must be 0.1 as in the runs in {}, got 0.5.",
    "arms.b4.block_size=5": "run: `arms.b4.block_size` must be 4 as in the runs in {}, got 5.",
    "optimizer.eps=1": "run: `optimizer.eps` must be 0.0001 as in the runs in {}, got 1.0.",
    "data=mnist": "run: `data` must be 'digits' as in the runs in {}, got 'mnist'.",
}


def test_what_contradicts_a_folder_is_refused_and_changes_nothing(command: Command, tmp_path: Path) -> None:
    assert command(*tiny(tmp_path, SGD, options=("--arm", B4))).code == 0
    before, record = stamps(tmp_path), (tmp_path / "experiment.json").read_bytes()
    for change, sentence in REFUSED.items():
        arm = "b4=block-adam,block_size=5,label=Blocks of four" if change.startswith("arms") else B4
        changes = [] if change.startswith("arms") else [change]
        said = command(*tiny(tmp_path, SGD, *changes, options=("--arm", arm, "--seed", "0,1")))
        assert said == (2, "", sentence.format(tmp_path) + "\n")
    assert (stamps(tmp_path), (tmp_path / "experiment.json").read_bytes()) == (before, record)


def test_a_folder_that_was_begun_before_a_setting_came_grows_with_its_default(command: Command, tmp_path: Path) -> None:
    assert command(*tiny(tmp_path, SGD)).code == 0
    record = json.loads((tmp_path / "experiment.json").read_text(encoding="utf-8"))
    of_old = {key: entry for key, entry in record.items() if key != "sha256"}
    assert of_old["settings"]["optimizer"].pop("embeddings") == "output"
    write_sealed(tmp_path / "experiment.json", of_old)
    said = command(*tiny(tmp_path, SGD, "optimizer.embeddings=diagonal", options=("--seed", "0,1")))
    sentence = f"run: `optimizer.embeddings` must be 'output' as in the runs in {tmp_path}, got 'diagonal'.\n"
    assert said == (2, "", sentence)
    assert command(*tiny(tmp_path, SGD, options=("--seed", "0,1"))).code == 0
    assert (read(tmp_path).seeds, read(tmp_path).complete) == ([0, 1], True)


def test_seeds_that_a_folder_grows_by_are_no_seeds_of_tuning(command: Command, tmp_path: Path) -> None:
    changes = (SGD, "epochs=1", "tune.trials=2")
    assert command(*tiny(tmp_path, *changes, options=("--tune",))).code == 0
    said = command(*tiny(tmp_path, *changes, options=("--tune", "--seed", "1000")))
    sentence = "run: `tune.seeds` must be other seeds than those of the runs, [0, 1000], got [1000].\n"
    assert said == (2, "", sentence)


def test_changed_records_of_a_folder_are_refused_at_once_and_its_commands_make_them_again(
    command: Command, tmp_path: Path
) -> None:
    """Else more seeds would be run with another learning rate than the first, and a report would show what was not."""
    changes = ("epochs=1", "tune.trials=2", "tune.extensions=0")
    commands = [
        tiny(tmp_path, *changes, SGD, options=("--tune",)),
        tiny(tmp_path, *changes, "optimizers=['sha256']", options=("--tune", "--arm", "sha256=adam,eps=1e-6")),
    ]
    for each in commands:
        assert command(*each).code == 0
    assert {*read_tuned(tmp_path, "test")} == {"sgd", "sha256"}
    for name, key in (("tuned.json", b'"lr": '), ("experiment.json", b'"epochs": ')):
        path = tmp_path / name
        whole = path.read_bytes()
        at = whole.index(key) + len(key)
        before = stamps(tmp_path)
        for damaged in (whole[:at] + b"7" + whole[at + 1 :], whole[:-40], b"[]\n"):
            path.write_bytes(damaged)
            for said in (command(*commands[1], "--seed", "0,1"), command("report", str(tmp_path))):
                assert (said.code, said.out, said.err.count("\n")) == (2, "", 1)
                assert repr(str(path)) in said.err
        path.unlink()
        for each in commands:
            assert command(*each).code == 0
        assert path.read_bytes() == whole
        assert stamps(tmp_path) == before


@pytest.mark.parametrize("size", ["99999999999999999999999", "999999999"])
def test_more_than_there_is_or_can_be_is_refused(command: Command, tmp_path: Path, size: str) -> None:
    for key in ("epochs", "train_examples"):
        said = command(*tiny(tmp_path, f"{key}={size}"))
        assert said.code == 2
        assert f"`{key}` must be" in said.err
        assert not (tmp_path / "experiment.json").exists()
