"""`blockadapt report`: an overview of several experiments, and what reports are compared with."""

from __future__ import annotations

from pathlib import Path

from support.commands import Command
from support.run_records import write_ends, write_experiment

CNN = {"sgd": (31.0, 32.0), "block-adam": (30.0, 31.1)}
GPT = {"adamw": (1.5, 1.6), "soap": (1.6, 1.5)}


def test_an_overview_is_written_or_refused_in_one_sentence(command: Command, tmp_path: Path) -> None:
    outs = [str(write_ends(tmp_path / "cnn", "cifar10-cnn", CNN)), str(write_ends(tmp_path / "gpt", "gpt-char", GPT))]
    both = tmp_path / "both"
    said = command("report", "--overview", *outs, "--out", str(both))
    assert said == (0, f"Wrote overview.md, overview.png to {both}.\n", "")
    assert {path.name for path in both.iterdir()} == {"overview.md", "overview.png"}
    said = command("report", "--overview", *outs)
    assert said == (2, "", "report: `out` must be given where several directories make one report.\n")
    said = command("report", "--overview", outs[0], "--against", "sgd")
    assert said == (2, "", "report: `against` must be left out with --overview, which compares all with all.\n")
    toy = tmp_path / "toy"
    write_experiment(toy, "toy-landscape")
    rule = "directories of experiments that have one measure"
    said = command("report", "--overview", str(toy))
    assert said == (2, "", f"report: `dir` must be {rule}, got toy-landscape in {toy}.\n")


def test_a_place_that_cannot_be_written_to_is_refused_as_what_it_was_given_as(command: Command, tmp_path: Path) -> None:
    out = write_ends(tmp_path / "cnn", "cifar10-cnn", CNN)
    (tmp_path / "file").write_text("in the way")
    for options in ([], ["--overview"]):
        said = command("report", str(out), "--out", str(tmp_path / "file"), *options)
        assert (said.code, said.out) == (2, "")
        assert said.err.startswith("report: `out` must be a directory that can be written to (")


def test_a_reference_that_is_not_there_is_refused_before_anything_is_written(command: Command, tmp_path: Path) -> None:
    out = write_ends(tmp_path / "a", "cifar10-cnn", CNN)
    said = command("report", str(out), "--against", "sdg")
    sentence = "report: there is no arm or variant 'sdg' to compare with; the nearest is 'sgd'.\n"
    assert said == (2, "", sentence)
    assert not (out / "report").exists()
    assert command("report", str(out), "--against", "block-adam").code == 0
    assert "Minus Block-Adam:" in (out / "report" / "summary.md").read_text(encoding="utf-8")
