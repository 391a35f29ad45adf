"""One table of several experiments: rows, columns, who is the best, who diverged, and what it stands on."""

from __future__ import annotations

import math
from pathlib import Path

from blockadapt_experiments.core.config import load, plain
from blockadapt_experiments.experiments.registry import EXPERIMENTS, get_experiment
from blockadapt_experiments.report import write_overview
from blockadapt_experiments.report.overview import contests_of
from blockadapt_experiments.report.reading import read
from support.run_records import rows_of, write_ends, write_experiment, write_run

T4 = 2.7764451  # t₀.₉₇₅(4)


def table(page: Path) -> list[dict[str, str]]:
    """The first table of a Markdown page, a dictionary a row."""
    lines = [line for line in page.read_text(encoding="utf-8").split("\n\n")[1].splitlines() if line.startswith("|")]
    heads, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    assert {len(row) for row in rows} == {len(heads)}
    return [dict(zip(heads, row, strict=True)) for row in rows]


CNN = {"sgd": (31.0, 32.0, 33.0, 34.0, 35.0), "block-adam": (30.0, 31.1, 32.0, 33.1, 34.0)}
GPT = {"adamw": (1.5, 1.6, 1.7, 1.8, 1.9), "soap": (1.6, 1.5, 1.8, 1.7, 1.9)}


def test_a_row_is_an_experiment_and_a_column_an_optimizer(tmp_path: Path) -> None:
    outs = [write_ends(tmp_path / "cnn", "cifar10-cnn", CNN), write_ends(tmp_path / "gpt", "gpt-char", GPT)]
    page, picture = write_overview(outs, tmp_path / "out")
    cnn, gpt = table(page)
    assert [*cnn] == ["Task", "Measure", "Seeds", "SGD", "Block-Adam", "AdamW", "SOAP"]
    half = T4 * math.sqrt(2.5 / 5)
    assert cnn == {
        "Task": "cifar10-cnn, laptop scale",
        "Measure": "test error (%), lower is better",
        "Seeds": "5",
        "SGD": f"33.0 ± {half:.1f}",
        "Block-Adam": "**32.0 ± 2.0**",  # its lead is one point on every seed, less than the intervals of both
        "AdamW": "",
        "SOAP": "",
    }
    assert gpt["Measure"] == "test loss (nats per character), lower is better"
    assert (gpt["SGD"], gpt["AdamW"], gpt["SOAP"]) == ("", "1.70 ± 0.20", "1.70 ± 0.20")
    assert picture.read_bytes().startswith(b"\x89PNG")
    text = page.read_text(encoding="utf-8")
    assert "- gpt-char, laptop scale: 10 of 10 runs finished; version 0.1.0, torch 2.13.0, 1 thread." in text


def test_the_best_is_the_highest_where_higher_is_better(tmp_path: Path) -> None:
    accuracies = {"adam": (0.96, 0.97, 0.98), "block-adam": (0.97, 0.98, 0.991)}
    write_overview([write_ends(tmp_path / "a", "mnist-lenet300", accuracies)], tmp_path)
    (row,) = table(tmp_path / "overview.md")
    assert row["Measure"] == "test accuracy, higher is better"
    assert row["Adam"] == "0.970 ± 0.025"
    assert row["Block-Adam"] == "**0.980 ± 0.026**"


def test_runs_that_diverged_or_are_missing_are_named_and_no_best(tmp_path: Path) -> None:
    ends = {"sgd": (31.0, 32.0, 33.0), "adam": (1.0, 1.0, 1.0), "soap": (2.0, 2.1), "muon": (3.0, 3.0, 3.0)}
    lost = [("adam", 1), *(("muon", seed) for seed in range(3))]
    write_overview([write_ends(tmp_path / "a", "cifar10-cnn", ends, lost)], tmp_path)
    (row,) = table(tmp_path / "overview.md")
    assert row["Adam"] == "1 (2 of 3, 1 diverged)"
    assert row["SOAP"].endswith("(2 of 3)")
    assert row["Muon"] == "– (0 of 3, 3 diverged)"
    assert not any("**" in cell for cell in row.values())  # SGD has no rival of as many seeds
    text = (tmp_path / "overview.md").read_text(encoding="utf-8")
    told = "cifar10-cnn, laptop scale: Adam, seed 1; cifar10-cnn, laptop scale: Muon, seed 0, 1, 2"
    assert f"\nDiverged, and in no mean: {told}.\n" in text


def test_seeds_of_one_experiment_share_a_row_and_other_settings_have_their_own(tmp_path: Path) -> None:
    first = write_ends(tmp_path / "a", "mnist-lenet300", {"adam": (0.9, 0.91)})
    more = tmp_path / "b"
    write_experiment(more, "mnist-lenet300", settings={**read(first).settings, "seeds": [2]})
    write_run(more, "adam", "", 2, rows_of(test_accuracy=[0.5, 0.92]))
    longer = write_ends(tmp_path / "c", "mnist-lenet300", {"adam": (0.97, 0.98)}, epochs=100)
    write_overview([first, longer, more], tmp_path / "out")
    rows = table(tmp_path / "out" / "overview.md")
    assert [(row["Task"], row["Seeds"]) for row in rows] == [
        ("mnist-lenet300, laptop scale", "3"),
        ("mnist-lenet300, laptop scale, epochs 100", "2"),
    ]
    assert rows[0]["Adam"] == "0.910 ± 0.025"


def test_an_arm_has_a_column_of_its_own(tmp_path: Path) -> None:
    arms = {"b25": {"optimizer": "block-adam", "block_size": 25, "label": "Blocks of 25"}}
    out = write_ends(tmp_path / "a", "mnist-lenet300", {"block-adam": (0.9, 0.9), "b25": (0.91, 0.911)}, arms=arms)
    write_overview([out], tmp_path)
    (row,) = table(tmp_path / "overview.md")
    assert row["Block-Adam"] == "0.9"
    assert row["Blocks of 25"].startswith("**0.9105")


def test_variants_have_rows_only_where_none_is_the_settings_as_they_are(tmp_path: Path) -> None:
    out = write_ends(tmp_path / "a", "cifar10-cnn", {"sgd": (31.0, 32.0)}, variants=["", "optimizer.eps=1e-8"])
    write_run(out, "sgd", "optimizer.eps=1e-8", 0, rows_of(test_error=[90.0, 40.0]))
    (row,) = contests_of(read(out))
    assert row.name == "cifar10-cnn, laptop scale"
    beta = tmp_path / "b"
    told = {**plain(load(get_experiment("tcvae"), "laptop")), "betas": [1, 6], "seeds": [0], "optimizers": ["sgd"]}
    write_experiment(beta, "tcvae", settings=told)
    assert [row.name for row in contests_of(read(beta))] == [
        "tcvae, laptop scale, beta=1",
        "tcvae, laptop scale, beta=6",
    ]


def test_nothing_finished_makes_a_table_and_no_picture(tmp_path: Path) -> None:
    out = tmp_path / "a"
    told = {**plain(load(get_experiment("cifar10-cnn"), "laptop")), "optimizers": ["sgd"], "seeds": [0, 1]}
    write_experiment(out, "cifar10-cnn", settings=told)
    assert write_overview([out], tmp_path) == [tmp_path / "overview.md"]
    (row,) = table(tmp_path / "overview.md")
    assert row["SGD"] == "– (0 of 2)"
    text = (tmp_path / "overview.md").read_text(encoding="utf-8")
    assert text.endswith("\n- cifar10-cnn, laptop scale: 0 of 2 runs finished.\n")


MEASURES = {
    "mnist-lenet300": ("test_accuracy", "high"),
    "mnist-lenet5": ("test_accuracy", "high"),
    "cifar10-densenet": ("test_error", "low"),
    "cifar100-densenet": ("test_error", "low"),
    "lm-lstm": ("test_perplexity", "low"),
    "tcvae": ("mig", "high"),
    "cifar10-cnn": ("test_error", "low"),
    "gpt-char": ("test_loss", "low"),
    "gpt-words": ("test_loss", "low"),
}


def test_experiments_say_which_metric_counts() -> None:
    found = {}
    for name in EXPERIMENTS:
        experiment = get_experiment(name)
        if experiment.measure is not None:
            (metric,) = (metric for metric in experiment.metrics if metric.key == experiment.measure)
            found[name] = (metric.key, metric.better)
    assert found == MEASURES
