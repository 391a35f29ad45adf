"""The report: its files against plain NumPy, and what it says of little or odd data."""

from __future__ import annotations

import csv
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("matplotlib", reason="needs the `experiments` extra")
Image = pytest.importorskip("PIL.Image", reason="needs the `experiments` extra")

from blockadapt_experiments.claims.claim import Claim, Verdict  # noqa: E402
from blockadapt_experiments.core.config import load, plain  # noqa: E402
from blockadapt_experiments.core.experiment import Experiment  # noqa: E402
from blockadapt_experiments.experiments.registry import get_experiment  # noqa: E402
from blockadapt_experiments.names import NOT_IN_PAPER  # noqa: E402
from blockadapt_experiments.report import write_report  # noqa: E402
from blockadapt_experiments.report.reading import read  # noqa: E402
from blockadapt_experiments.report.table import results  # noqa: E402
from blockadapt_experiments.results.measurements import Metric  # noqa: E402
from blockadapt_experiments.results.summary import Summary  # noqa: E402
from support.browser import Browser, require_chromium  # noqa: E402
from support.disk import full_disk, posix  # noqa: E402
from support.run_records import (  # noqa: E402
    experiment,
    rows_of,
    write_experiment,
    write_json,
    write_lines,
    write_result,
    write_run,
    write_tuned,
)

Made = tuple[Path, Experiment[Any]]
T4, T3 = 3.182446305284263, 4.302652729911275  # Student's t at 0.975, 3 and 2 degrees of freedom


def rows_in(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


# The files ------------------------------------------------------------------------------------------------------------


def test_the_report_is_a_page_pictures_tables_and_a_document(made: Made) -> None:
    out, about = made
    written = write_report(out, about)
    names = ["loss.png", "accuracy.png", "differences.png", "drawing.png", "learning-rates.png"]
    beside = [out / "report" / f"mnist-lenet300-{name}" for name in names]
    assert written == [
        out / "report.html",
        *beside,
        *(out / "report" / n for n in ("table.csv", "curves.csv", "summary.md")),
    ]
    assert all(path.is_file() for path in written)
    for path in beside:
        with Image.open(path) as image:
            assert image.format == "PNG"
            assert len(image.convert("RGB").getcolors(maxcolors=10**7)) > 20
    assert (out / "report.html").stat().st_size < 300_000


def test_table_has_the_means_and_intervals_of_the_rows(made: Made) -> None:
    out, _ = made
    records: dict[str, dict[int, list[dict[str, float]]]] = {}
    for path in out.glob("runs/*/-/*/metrics.jsonl"):
        if (path.parent / "result.json").exists():
            lines = [json.loads(line) for line in path.read_text().splitlines()]
            records.setdefault(path.parts[-4], {})[int(path.parts[-2][5:])] = lines
    table = {row["optimizer"]: row for row in rows_in(out / "report" / "table.csv")}
    assert list(table) == ["adam", "block-adam", "ggt", "rmsprop", "block-rmsprop"]
    for arm, runs in records.items():
        losses = np.array([[row["loss"] for row in runs[seed]] for seed in sorted(runs)])
        steady = losses[np.isfinite(losses).all(axis=1)]
        t = {4: T4, 3: T3}[len(steady)]
        expected = {
            "loss_final": steady[:, -1],
            "loss_oscillation": steady[:, -4:].std(axis=1, ddof=1),
        }
        for key, values in expected.items():
            assert float(table[arm][key]) == pytest.approx(values.mean(), rel=1e-12)
            assert float(table[arm][f"{key}_half"]) == pytest.approx(
                t * values.std(ddof=1) / math.sqrt(len(values)), rel=1e-9
            )
            assert int(table[arm][f"{key}_n"]) == len(values)
        best = np.nanmin(losses, axis=1)  # a diverged seed had a best value before
        assert float(table[arm]["loss_best"]) == pytest.approx(best.mean(), rel=1e-12)
    seeds = {arm: (row["seeds_planned"], row["seeds_finished"], row["seeds_diverged"]) for arm, row in table.items()}
    assert seeds == {**dict.fromkeys(table, ("4", "4", "0")), "ggt": ("4", "4", "1"), "block-rmsprop": ("4", "3", "0")}
    assert float(table["ggt"]["state_mb"]) == pytest.approx(54)
    assert {(row["lr"], row["lr_source"]) for row in table.values()} >= {("0.001", "tuned"), ("0.0032", "tuned")}


def test_curves_have_every_point_of_every_seed(made: Made) -> None:
    out, about = made
    summary = read(out, about)
    found = [row for row in rows_in(out / "report" / "curves.csv") if row["optimizer"] == "block-rmsprop"]
    losses = [row for row in found if row["metric"] == "loss"]
    assert [float(row["epoch"]) for row in losses] == list(range(1, 21))
    assert [row["n"] for row in losses] == ["4"] * 9 + ["3"] * 11
    for row, column in zip(losses, summary.curve("block-rmsprop", "loss").values.T, strict=True):
        written = [float(row[f"seed_{seed}"] or "nan") for seed in range(4)]
        np.testing.assert_array_equal(written, column)
        assert float(row["mean"]) == pytest.approx(np.nanmean(column), rel=1e-12)


def test_only_a_mean_over_every_seed_can_be_the_best(made: Made) -> None:
    page = (made[0] / "report.html").read_text(encoding="utf-8")
    row = {
        name: re.search(rf'<th scope="row" data-value="{name}">.*?</tr>', page, re.DOTALL) for name in ("GGT", "Adam")
    }
    assert row["GGT"] is not None
    assert row["Adam"] is not None
    assert " best" not in row["GGT"][0]  # its final loss is of three seeds
    assert "(best)" in row["Adam"][0]


@pytest.mark.parametrize(
    ("losses", "marked"),
    [
        ([[0.25], [0.125]], []),  # one seed
        ([[0.25, 0.27, 0.26], [0.125, 0.135, 0.128]], ["block-adam"]),
        ([[0.25, 0.27, 0.26], [0.125, 0.5, 0.128]], []),  # a lower mean in doubt
        ([[0.25, 0.75, 1.25], [0.24, 0.74, 1.239]], ["block-adam"]),  # wide intervals, a steady lead on every seed
        ([[0.5, 0.5], [0.5, 0.5]], []),
        ([[0.5, 0.6], [0.4, math.nan]], []),
    ],
)
def test_the_best_is_marked_where_its_lead_is_beyond_doubt(
    tmp_path: Path, losses: list[list[float]], marked: list[str]
) -> None:
    write_experiment(tmp_path, seeds=list(range(len(losses[0]))))
    for arm, values in zip(("adam", "block-adam"), losses, strict=True):
        for seed, loss in enumerate(values):
            write_run(tmp_path, arm, "", seed, rows_of(loss=[loss]), leg=3.0)
    table = results(read(tmp_path, experiment()))
    final = [column.key for column in table.columns].index("loss_final")
    assert [line.arm for line in table.lines if line.best[final]] == marked


def test_document_says_what_the_page_says_and_links_what_is_there(made: Made) -> None:
    out, _ = made
    text = (out / "report" / "summary.md").read_text(encoding="utf-8")
    assert text.startswith("# LeNet-300-100 on MNIST – laptop scale\n")
    assert "19 of 20 runs finished" in text
    assert "```sh\nblockadapt run mnist-lenet300 --scale laptop" in text
    assert "| **did not hold** |" in text
    assert "commit: 0123456789abcdef" in text
    links = re.findall(r"!\[[^]]+\]\(([^)]+)\)", text)
    assert sorted(links) == sorted(path.name for path in (out / "report").glob("*.png"))
    assert len(links) == 5
    widths = {line.count("|") for line in text.split("### Training loss\n\n")[1].split("\n\n")[0].splitlines()}
    assert widths == {6}


def test_real_settings_are_compared_with_the_papers_scale(tmp_path: Path) -> None:
    mnist = get_experiment("mnist-lenet300")
    settings = plain(load(mnist, "smoke", ['optimizers=["adam", "block-adam"]']))
    write_experiment(tmp_path, mnist.name, "smoke", settings)
    for arm in ("adam", "block-adam"):
        rows = rows_of(
            train_loss=[1.0, 0.5], test_accuracy=[0.9, 0.95], test_loss=[1.0, 0.6], train_accuracy=[0.9, 0.96]
        )
        write_run(tmp_path, arm, "", 0, rows)
    write_report(tmp_path)
    text = (tmp_path / "report" / "summary.md").read_text(encoding="utf-8")
    assert "| epochs | 2 | 100 |" in text
    assert "| train_examples | 6000 | 60000 |" in text
    assert "batch.size" not in text  # is the same
    assert "Validation" not in text  # was not measured
    assert text.count("**cannot tell**") + text.count("**held**") + text.count("**did not hold**") == len(mnist.claims)
    paper = tmp_path / "paper"
    write_experiment(paper, mnist.name, "paper", plain(load(mnist, "paper")))
    write_report(paper)
    assert "Nothing differs" in (paper / "report" / "summary.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("section", ["section 9", NOT_IN_PAPER])
def test_only_what_is_in_the_paper_is_said_to_be_the_papers(tmp_path: Path, section: str) -> None:
    write_experiment(tmp_path, optimizers=["adam"], seeds=[0])
    write_run(tmp_path, "adam", "", 0, rows_of(loss=[2.0, 1.0]))
    claims = (Claim("It is better.", lambda summary: Verdict(True, "It was.")),)
    write_report(tmp_path, experiment(section=section, claims=claims))
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    text = (tmp_path / "report" / "summary.md").read_text(encoding="utf-8")
    facts = "1 optimizer, 1 seed: 1 of 1 run finished."
    if section == NOT_IN_PAPER:
        assert f"\n\n{facts}\n\n## Claims\n\n| The claim | Measured here | Verdict |\n" in text
        assert '<h2 id="claims-title">Claims</h2>' in page
        assert "<h3>The claim</h3>" in page
        assert not any("Yun" in each or NOT_IN_PAPER in each for each in (text, page))
    else:
        cited = f"Yun, Lozano and Yang (2019), section 9. {facts}"
        assert f"\n\n{cited}\n\n## The paper's claims\n\n| The paper | Measured here | Verdict |\n" in text
        assert cited in page
        assert '<h2 id="claims-title">The paper’s claims</h2>' in page
        assert "<h3>The paper</h3>" in page


# Little or odd data ---------------------------------------------------------------------------------------------------


def stumble(summary: Summary) -> Verdict:
    return Verdict(True, str(summary.final("block-adam", "loss")[0]))


def test_nothing_measured_yet_is_said(tmp_path: Path, browser: Browser) -> None:
    write_experiment(tmp_path)
    about = experiment(claims=(Claim("It is better.", stumble),), draw=lambda summary, directory: [][0])
    assert len(write_report(tmp_path, about)) == 4
    browser.open(tmp_path / "report.html")
    assert browser.problems == []
    text = browser.run("document.body.innerText")
    assert "0 of 6 runs finished" in text
    assert "No curve has been measured yet." in text
    assert "Only 0 of 6 runs are finished." in text
    assert "Cannot tell" in text


def test_a_judge_or_a_drawing_that_fails_is_told_and_fails_nothing_else(tmp_path: Path) -> None:
    write_experiment(tmp_path, optimizers=["adam"], seeds=[0])
    write_run(tmp_path, "adam", "", 0, rows_of(loss=[2.0, 1.0]))
    about = experiment(claims=(Claim("It is better.", stumble),), draw=lambda summary, directory: [][0])
    write_report(tmp_path, about)
    text = (tmp_path / "report" / "summary.md").read_text(encoding="utf-8")
    assert "Judging it failed: IndexError" in text
    assert "Drawing failed: IndexError" in text


def test_a_failed_run_is_told(tmp_path: Path) -> None:
    write_experiment(tmp_path)
    run = write_run(tmp_path, "adam", "", 2, [], finished=False)
    (run / "error.txt").write_text("Traceback\nMemoryError: too much\n")
    write_report(tmp_path, experiment())
    assert "adam seed 2 failed: MemoryError: too much" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_one_point_makes_no_chart(tmp_path: Path, browser: Browser) -> None:
    write_experiment(tmp_path, optimizers=["adam"], seeds=[0])
    run = write_run(tmp_path, "adam", "", 0, rows_of(loss=[0.5, 0.4]), leg=None)
    last = {"epoch": 2, "loss": 0.4, "accuracy": 98.0}
    (run / "result.json").unlink()
    write_lines(run / "metrics.jsonl", [{"epoch": 1, "loss": 0.5}, last])
    written = write_report(tmp_path, experiment())
    assert [path.name for path in written if path.suffix == ".png"] == ["pretend-loss.png"]
    browser.open(tmp_path / "report.html", "#metric=accuracy")
    assert "Every run measured this once" in browser.run("panels.innerText")
    write_lines(run / "metrics.jsonl", [last])
    written = write_report(tmp_path, experiment())
    assert not [path for path in written if path.suffix == ".png"]
    browser.open(tmp_path / "report.html")
    assert browser.problems == []
    assert not browser.run("document.querySelectorAll('svg[tabindex]').length")


def test_one_seed_and_no_times(tmp_path: Path, browser: Browser) -> None:
    write_experiment(tmp_path, optimizers=["adam"], seeds=[0])
    write_run(tmp_path, "adam", "", 0, rows_of(loss=[0.5, 0.25]), leg=None)
    write_report(tmp_path, experiment(metrics=(Metric("loss", "loss", better=None),), target=None))
    browser.open(tmp_path / "report.html", "#x=seconds")
    assert browser.problems == []
    assert browser.run("panels.dataset.rendered") == "1"
    assert not browser.run("'x' in document.getElementById('controls').elements")
    assert browser.run("state.x") == "axis"


def test_a_log_axis_without_a_positive_value_says_so(tmp_path: Path, browser: Browser) -> None:
    write_experiment(tmp_path, optimizers=["adam"], seeds=[0])
    write_run(tmp_path, "adam", "", 0, rows_of(loss=[-2.0, -3.0]))
    write_report(tmp_path, experiment())
    browser.open(tmp_path / "report.html")
    assert (
        browser.run("document.querySelector('#panels').innerText") == "No value is above zero, which a log axis needs."
    )
    assert browser.problems == []
    browser.open(tmp_path / "report.html", "#y=linear")
    assert browser.run("panels.dataset.rendered") == "1"


def test_different_environments_are_told(tmp_path: Path) -> None:
    write_experiment(tmp_path, optimizers=["adam"], seeds=[0, 1])
    write_run(tmp_path, "adam", "", 0, rows_of(loss=[1.0]))
    write_run(tmp_path, "adam", "", 1, rows_of(loss=[1.0]), environment={"threads": 8})
    write_report(tmp_path, experiment())
    assert "Different for some of the runs: threads 8." in (tmp_path / "report" / "summary.md").read_text(
        encoding="utf-8"
    )


EVIL = "<script>document.title='owned'</script>\"'&amp;|`*_[x](javascript:alert(1))</td>"


def test_an_arm_that_an_older_version_tuned_had_the_grid_of_all(tmp_path: Path) -> None:
    """Its record does not say it."""
    write_experiment(tmp_path, seeds=[0], tune={"trials": 3, "low": 1e-3, "high": 1e-1, "seeds": [1000]})
    tried = [[lr, 0.4] for lr in (1e-3, 1e-2, 1e-1)]
    older = {"lr": 0.01, "value": 0.4, "objective": "loss", "tried": tried}
    newer = {**older, "grid": {"lr": [1e-3, 1e-1, 3]}}
    write_tuned(tmp_path, {"adam": {"": older}, "block-adam": {"": newer}})
    write_report(tmp_path, experiment())
    summary = (tmp_path / "report" / "summary.md").read_text(encoding="utf-8")
    assert "Every optimizer tried the same grid of 3 points." in summary


def test_the_report_says_what_was_tuned_beside_the_learning_rate(tmp_path: Path) -> None:
    write_experiment(tmp_path, optimizers=["adam"], seeds=[0])
    points = [{"lr": 0.01, "eps": 1e-3, "value": 0.5}, {"lr": 0.01, "eps": 1e-6, "value": 0.4}]
    record = {"lr": 0.01, "value": 0.4, "objective": "loss", "tried": [[0.01, 0.4]], "values": {"eps": 1e-6}}
    write_tuned(tmp_path, {"adam": {"": {**record, "points": points}}})
    page = write_report(tmp_path, experiment())[0].read_text(encoding="utf-8")
    assert "2 trials by" in page
    assert '<tr class="chosen"><td class="number">0.01, eps 1e-6</td><td class="number">0.4</td></tr>' in page
    summary = (tmp_path / "report" / "summary.md").read_text(encoding="utf-8")
    assert "| Adam | 0.01, eps 1e-6 | 0.4 | 2 | 0.01, eps 0.001: 0.5; 0.01, eps 1e-6: 0.4 |" in summary


NINE, COARSE, FINE = {"lr": [1e-3, 1.0, 9]}, {"lr": [1e-3, 1.0, 3], "eps": [1e-8, 1e-4, 3]}, {"lr": [1e-4, 1.0, 9]}


@pytest.mark.parametrize(
    ("grids", "extensions", "sentence", "counts"),
    [
        ([NINE, NINE], [0, 0], "Every optimizer tried the same grid of 9 points. The seeds", ["9", "9"]),
        (
            [NINE, NINE],
            [0, 2],
            "Every optimizer tried the same grid of 9 points. Where the best was at an edge, up to 2 points beyond it "
            "followed. The seeds",
            ["9", "9 + 2 beyond the grid"],
        ),
        (
            [NINE, COARSE],
            [0, 0],
            "Every optimizer tried 9 points: one that lacks a setting tried more learning rates between the same ends. "
            "The seeds",
            ["9", "9"],
        ),
        (
            [COARSE, {"lr": [1e-3, 1.0, 3], "beta2": [0.9, 0.99, 3]}],
            [0, 0],
            "Every optimizer tried 9 points: the same learning rates, with values of other settings that it has. "
            "The seeds",
            ["9", "9"],
        ),
        ([NINE, FINE], [0, 0], "Every optimizer tried 9 points, but not of the same grid. The seeds", ["9", "9"]),
        (
            [{"lr": [1e-3, 1.0, 3]}, COARSE],
            [1, 0],
            "The optimizers tried grids of different sizes: Adam 3, Block-Adam 9 points. Where the best was at an "
            "edge, up to 1 point beyond it followed. The seeds",
            ["3 + 1 beyond the grid", "9"],
        ),
    ],
)
def test_the_report_says_how_many_trials_each_optimizer_had(
    tmp_path: Path, grids: list[dict[str, Any]], extensions: list[int], sentence: str, counts: list[str]
) -> None:
    write_experiment(tmp_path, seeds=[0])
    pairs = zip(("adam", "block-adam"), grids, extensions, strict=True)
    found = {}
    for arm, grid, more in pairs:
        tried = math.prod(points for _, _, points in grid.values()) + more
        points = [{"lr": 0.1, "eps": 1.0 + number, "value": 0.4} for number in range(tried)]
        record = {"lr": 0.1, "value": 0.4, "objective": "loss", "tried": [[0.1, 0.4]], "points": points, "grid": grid}
        found[arm] = {"": {**record, "extensions": more}}
    write_tuned(tmp_path, found)
    page = write_report(tmp_path, experiment())[0].read_text(encoding="utf-8")
    summary = (tmp_path / "report" / "summary.md").read_text(encoding="utf-8")
    for text in (page, summary):
        assert sentence in text
    for label, count in zip(("Adam", "Block-Adam"), counts, strict=True):
        assert f"| {label} | 0.1 | 0.4 | {count} | 0.1, eps 1: 0.4; " in summary
        cells = "".join(f'<td class="number">{cell}</td>' for cell in ("0.1", "0.4", count))
        assert f'<tr><th scope="row">{label}</th>{cells}' in page


def test_no_text_is_taken_for_markup(tmp_path: Path, browser: Browser) -> None:
    write_experiment(tmp_path, optimizers=[EVIL], seeds=[0], note=EVIL)
    directory = tmp_path / "runs" / "a" / "b" / "seed-0"
    about = {"arm": EVIL, "variant": EVIL, "seed": 0, "lr": 0.1, "environment": {EVIL: EVIL}}
    directory.mkdir(parents=True)
    write_json(directory / "run.json", about)
    write_lines(directory / "metrics.jsonl", rows_of(loss=[2.0, 1.0]))
    write_lines(directory / "timing.jsonl", [])
    write_result(directory, numbers={EVIL: 1.0}, seconds=1.0)
    write_tuned(tmp_path, {EVIL: {EVIL: {"lr": 0.1, "value": None, "objective": EVIL, "tried": [[0.1, None]]}}})
    claims = (Claim(EVIL, lambda summary: Verdict(None, EVIL)),)
    metrics = (Metric("loss", EVIL),)
    write_report(tmp_path, experiment(title=EVIL, section=EVIL, claims=claims, metrics=metrics, target=("loss", 1)))
    browser.open(tmp_path / "report.html")
    assert browser.problems == []
    assert browser.run("document.title").startswith("<script>")
    assert browser.run("document.scripts.length") == 2
    assert EVIL in browser.run("document.querySelector('h1').innerText")
    assert browser.run("document.querySelector('.claim p + p, .claim div p').innerText") == EVIL
    assert browser.run("panels.dataset.rendered") == "1"
    assert browser.run("document.querySelector('#legend button').innerText") == EVIL
    rows = [
        line for line in (tmp_path / "report" / "summary.md").read_text().splitlines() if line.startswith("| \\<script")
    ]
    assert rows
    assert not re.search(r"(?<!\\)[<`]", "".join(rows))


def test_what_cannot_be_reported_is_refused_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"\Areport: `dir` must be a directory that `blockadapt run` has written to, got '"
    ):
        write_report(tmp_path)
    write_experiment(tmp_path)
    (tmp_path / "report").write_text("a file")
    with pytest.raises(
        ValueError, match=r"\Areport: `dir` must be a directory that can be written to \(File exists\),"
    ):
        write_report(tmp_path, experiment())
    assert not (tmp_path / "report.html").exists()


@posix
def test_on_a_full_disk_a_report_gets_one_sentence_and_the_old_one_stays(tmp_path: Path) -> None:
    write_experiment(tmp_path)
    write_run(tmp_path, "adam", "", 0, rows_of(loss=[1.0, 2.0], accuracy=[1.0, 2.0]))
    write_report(tmp_path, experiment())
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    sentence = r"^report: `dir` must be a directory that can be written to \(File too large\), got '[^\n]*'\.$"
    for size in (100, 30_000):
        with full_disk(size), pytest.raises(ValueError, match=sentence):
            write_report(tmp_path, experiment())
        found = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
        assert found.keys() == before.keys()
        assert found[tmp_path / "report.html"] == before[tmp_path / "report.html"]


def test_a_missing_browser_skips_a_test_and_fails_it_in_continuous_integration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="Chromium is not in PATH; `make browser` installs it"):
        require_chromium()
    monkeypatch.delenv("CI")
    with pytest.raises(pytest.skip.Exception, match="Chromium is not in PATH; `make browser` installs it"):
        require_chromium()
