"""Several directories in one report: who is who, what was run with other settings, and what is refused."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from blockadapt_experiments.report import write_report
from blockadapt_experiments.report.reading import read
from blockadapt_experiments.report.together import together
from blockadapt_experiments.results.summary import Summary
from support.run_records import experiment, write_experiment, write_run

ROWS = [{"epoch": 1, "loss": 0.5, "accuracy": 90.0}]


def written(out: Path, rates: dict[str, float], seeds: tuple[int, ...] = (0,), **settings: object) -> Path:
    write_experiment(out, optimizers=[*rates], seeds=[*seeds], **settings)
    for arm, lr in rates.items():
        for seed in seeds:
            write_run(out, arm, "", seed, ROWS, lr=lr)
    return out


def joined(*outs: Path) -> Summary:
    return together([read(out, experiment()) for out in outs])


def test_seeds_of_one_arm_stand_side_by_side(tmp_path: Path) -> None:
    summary = joined(
        written(tmp_path / "a", {"adam": 1e-3}, (0, 1)), written(tmp_path / "b", {"adam": 1e-3, "sgd": 1e-2}, (2,))
    )
    assert (summary.arms, summary.seeds) == (["adam", "sgd"], [0, 1, 2])
    assert [run.key.seed for run in summary.of("adam")] == [0, 1, 2]
    assert [summary.label(arm) for arm in summary.arms] == ["Adam", "SGD"]
    assert summary.complete
    assert len(summary.command.splitlines()) == 2


@pytest.mark.parametrize("change", [{"seeds": (0,)}, {"lr": 0.5}, {"epochs": 30}])
def test_names_that_clash_are_told_apart_by_folder(tmp_path: Path, change: dict[str, object]) -> None:
    first = written(tmp_path / "a", {"adam": 1e-3})
    seeds, lr, epochs = change.get("seeds", (1,)), change.get("lr", 1e-3), change.get("epochs", 20)
    second = written(tmp_path / "b", {"adam": lr}, seeds, epochs=epochs)  # type: ignore[dict-item, arg-type]
    summary = joined(first, second)
    assert summary.arms == ["adam", "adam@b"]
    words = "b: epochs 30" if "epochs" in change else "b"
    assert [summary.label(arm) for arm in summary.arms] == ["Adam (a)", f"Adam ({words})"]
    assert [summary.lr(arm) for arm in summary.arms] == [1e-3, lr]


def test_folders_of_one_name_are_told_apart_in_full(tmp_path: Path) -> None:
    first, second = (written(tmp_path / name / "runs", {"adam": 1e-3}) for name in "xy")
    assert joined(first, second).label(f"adam@{second}") == f"Adam ({second})"


def test_an_arm_with_settings_of_its_own_is_the_same_only_with_the_same(tmp_path: Path) -> None:
    tables = [{"b": {"optimizer": "block-adam", "block_size": size}} for size in (4, 4, 5)]
    outs = [written(tmp_path / str(seed), {"b": 1e-3}, (seed,), arms=table) for seed, table in enumerate(tables)]
    summary = joined(*outs)
    assert summary.arms == ["b", "b@2"]
    assert summary.label("b@2") == "b (Block-Adam, block_size 5) (2)"
    assert len(summary.of("b")) == 2


def test_several_folders_make_one_report(tmp_path: Path) -> None:
    first, second = written(tmp_path / "a", {"adam": 1e-3}), written(tmp_path / "b", {"adam": 1e-2})
    page, *_ = write_report(first, experiment(), into=tmp_path / "c")
    assert page == tmp_path / "c" / "report.html"
    page, *_ = write_report(first, experiment(), [second], tmp_path / "c")
    assert "Adam (b)" in page.read_text(encoding="utf-8")
    with (tmp_path / "c" / "report" / "table.csv").open(encoding="utf-8") as file:
        assert [line["optimizer"] for line in csv.DictReader(file)] == ["adam", "adam@b"]
    assert not (first / "report.html").exists()


def test_other_experiments_are_refused(tmp_path: Path) -> None:
    outs = [written(tmp_path / name, {"adam": 1e-3}) for name in "ab"]
    summaries = [read(out, experiment(name=name)) for out, name in zip(outs, ("x", "y"), strict=True)]
    sentence = rf"^report: `dir` must be directories of one experiment, x as in {outs[0]}, got y in {outs[1]}\.$"
    with pytest.raises(ValueError, match=sentence):
        together(summaries)
