"""The report: its files against plain NumPy, its page in a real browser."""

from __future__ import annotations

import csv
import json
import math
import re
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("matplotlib", reason="needs the `experiments` extra")
Image = pytest.importorskip("PIL.Image", reason="needs the `experiments` extra")

from blockadapt_experiments.claims.claim import Claim, Verdict  # noqa: E402
from blockadapt_experiments.commands.demo_plots import STYLE_BY_LABEL  # noqa: E402
from blockadapt_experiments.core.config import load, plain  # noqa: E402
from blockadapt_experiments.core.experiment import Experiment  # noqa: E402
from blockadapt_experiments.drawing.colours import COLOURS, styles_of  # noqa: E402
from blockadapt_experiments.experiments.registry import get_experiment  # noqa: E402
from blockadapt_experiments.report import write_report  # noqa: E402
from blockadapt_experiments.report.figures import curve_figure, y_range  # noqa: E402
from blockadapt_experiments.report.reading import read  # noqa: E402
from blockadapt_experiments.report.sensitivity import sensitivity_figure  # noqa: E402
from blockadapt_experiments.report.table import results  # noqa: E402
from blockadapt_experiments.results import formats  # noqa: E402
from blockadapt_experiments.results.measurements import Metric  # noqa: E402
from blockadapt_experiments.results.summary import Band, Summary  # noqa: E402
from support.browser import Browser, chromium, require_chromium  # noqa: E402
from support.disk import full_disk, posix  # noqa: E402
from support.run_records import (  # noqa: E402
    experiment,
    realistic,
    rows_of,
    swept,
    write_experiment,
    write_json,
    write_lines,
    write_run,
)

Made = tuple[Path, Experiment[Any]]
T4, T3 = 3.182446305284263, 4.302652729911275  # Student's t at 0.975, 3 and 2 degrees of freedom


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Five optimizers, four seeds; one run unfinished, one diverged."""
    out = tmp_path_factory.mktemp("made")
    about = realistic(out)
    write_report(out, about)
    return out, about


@pytest.fixture(scope="module")
def panels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two optimizers over three variants, more points than a page keeps."""
    out = tmp_path_factory.mktemp("panels")
    write_report(out, swept(out, steps=1200, seeds=3))
    return out / "report.html"


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """Chromium."""
    program = require_chromium()
    # A short path: Chromium puts sockets below it, whose names have a limit.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile, chromium(program, Path(profile)) as found:
        yield found


def rows_in(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


# The files ------------------------------------------------------------------------------------------------------------


def test_the_report_is_a_page_pictures_tables_and_a_document(made: Made) -> None:
    out, about = made
    written = write_report(out, about)
    names = ["loss.png", "accuracy.png", "drawing.png", "learning-rates.png"]
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
    assert len(links) == 4
    assert all((out / "report" / link).is_file() for link in links)
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


# Curves as pictures ---------------------------------------------------------------------------------------------------


def looks(lines: Iterable[Any]) -> dict[str, tuple[str, list[float]]]:
    """Colour and dash by label of Matplotlib's lines, dashes in widths of the line."""
    found = {}
    for line in lines:
        dashes = line._dash_pattern[1] or []  # Matplotlib has no public word for it
        found[line.get_label()] = (line.get_color(), [part / line.get_linewidth() for part in dashes])
    return found


def test_an_optimizer_has_one_colour_and_dash_in_figures_page_and_demo(tmp_path: Path) -> None:
    arms = ["ggt", "block-adam", "b25", "adam", "block-adam-clip", "sgd"]  # no order of the table
    about = experiment()
    write_experiment(tmp_path, optimizers=arms, seeds=[0])
    for arm in arms:
        write_run(tmp_path, arm, "", 0, rows_of(loss=[2.0, 1.0], accuracy=[1.0, 2.0]))
    write_json(
        tmp_path / "tuned.json",
        {arm: {"": {"lr": 0.1, "value": 1.0, "objective": "loss", "tried": [[0.1, 1.0], [1.0, None]]}} for arm in arms},
    )
    summary = read(tmp_path, about)
    expected = {
        summary.label(arm): (COLOURS[style.colour], pytest.approx(style.strokes()))
        for arm, style in styles_of(arms).items()
    }
    curves = {(arm, ""): summary.curve(arm, "loss") for arm in arms}
    for axes in curve_figure(summary, summary.metrics[0], curves).axes:
        assert looks(axes.lines) == expected
    trials = [line for line in sensitivity_figure(summary).axes[0].lines if not line.get_label().startswith("_")]
    assert looks(trials) == expected
    page = write_report(tmp_path, about)[0].read_text(encoding="utf-8")
    data = json.loads(re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1])  # type: ignore[index]
    assert {arm["label"]: (COLOURS[arm["colour"]], arm["dash"]) for arm in data["arms"]} == expected
    demo = {"SGD", "Adam", "Block-Adam", "Block-Adam + clip"}
    assert {label: look["color"] for label, look in STYLE_BY_LABEL.items() if label in demo} == {
        label: expected[label][0] for label in demo
    }


def test_curves_over_seconds_stand_beside_those_over_steps(made: Made) -> None:
    summary = read(*made)
    curves = {(arm, ""): summary.curve(arm, "loss") for arm in summary.arms}
    steps, seconds = curve_figure(summary, summary.metrics[0], curves).axes
    assert (steps.get_xlabel(), seconds.get_xlabel()) == ("epoch", "seconds")
    assert steps.lines[0].get_xdata()[-1] == 20
    assert seconds.lines[0].get_xdata()[-1] == pytest.approx(20 * 1.1)
    assert steps.get_ylim() == seconds.get_ylim()


def test_every_learning_rate_is_drawn_and_the_chosen_one_ringed(tmp_path: Path) -> None:
    write_experiment(tmp_path, optimizers=["adam"], seeds=[0])
    tried = [[0.1, None], [0.01, 0.5], [0.001, 0.9]]
    record = {"lr": 0.01, "value": 0.5, "objective": "loss", "tried": tried}
    write_json(tmp_path / "tuned.json", {"adam": {"": record}})
    figure = sensitivity_figure(read(tmp_path, experiment()))
    (axes,) = figure.axes
    curve, ring, lost = axes.lines
    np.testing.assert_array_equal(curve.get_xydata(), [[0.001, 0.9], [0.01, 0.5], [0.1, np.nan]])
    np.testing.assert_array_equal(ring.get_xydata(), [[0.01, 0.5]])
    np.testing.assert_array_equal(lost.get_xydata(), [[0.1, 1.0]])  # at the edge where the loss is worst
    assert (axes.get_xscale(), axes.get_ylabel()) == ("log", "training loss")


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
    assert lines(browser) == ["adam"]
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


def test_no_text_is_taken_for_markup(tmp_path: Path, browser: Browser) -> None:
    write_experiment(tmp_path, optimizers=[EVIL], seeds=[0], note=EVIL)
    directory = tmp_path / "runs" / "a" / "b" / "seed-0"
    about = {"arm": EVIL, "variant": EVIL, "seed": 0, "lr": 0.1, "environment": {EVIL: EVIL}}
    directory.mkdir(parents=True)
    write_json(directory / "run.json", about)
    write_lines(directory / "metrics.jsonl", rows_of(loss=[2.0, 1.0]))
    write_json(directory / "result.json", {"numbers": {EVIL: 1.0}, "seconds": 1.0})
    write_json(
        tmp_path / "tuned.json", {EVIL: {EVIL: {"lr": 0.1, "value": None, "objective": EVIL, "tried": [[0.1, None]]}}}
    )
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


# The page in a browser ------------------------------------------------------------------------------------------------


def click(browser: Browser, selector: str) -> None:
    browser.run(f"document.querySelector({json.dumps(selector)}).click()")


def chosen(browser: Browser) -> str:
    return browser.run("location.hash")


def lines(browser: Browser) -> list[str]:
    return browser.run("[...document.querySelectorAll('.line[data-arm]')].map((line) => line.dataset.arm)")


def ticks(browser: Browser) -> str:
    return browser.run("[...document.querySelectorAll('.panel text')].map((node) => node.textContent).join(' ')")


def box(browser: Browser, selector: str = ".panel svg[tabindex]") -> tuple[float, float, float, float]:
    """Where an element is on the screen, scrolled to first."""
    script = (
        f"(() => {{ const node = document.querySelector({json.dumps(selector)});"
        "node.scrollIntoView({ block: 'center', behavior: 'instant' }); const r = node.getBoundingClientRect();"
        "return [r.x, r.y, r.width, r.height]; })()"
    )
    return tuple(browser.run(script))


def pixel(browser: Browser, x: float) -> float:
    """Where this value of the horizontal axis is on the screen."""
    left, _, width, _ = box(browser)
    inside = f"scales(xDomain(shownCurves()), [1, 2], {{ x: 56, y: 8, width: {width} - 56 - 18, height: 1 }}).toX({x})"
    return left + browser.run(inside)


def test_page_draws_without_complaint_and_asks_for_nothing(made: Made, panels: Path, browser: Browser) -> None:
    for page, curves in ((made[0] / "report.html", 5), (panels, 6)):
        browser.open(page)
        assert browser.problems == []
        assert [request for request in browser.requests if not request.startswith("data:")] == [page.as_uri()]
        assert browser.run("panels.dataset.rendered") == str(curves)
        assert browser.run(
            "[...document.querySelectorAll('.line[data-arm]')].every((line) => line.getTotalLength() > 20)"
        )


def test_page_may_not_ask_for_anything(made: Made, browser: Browser) -> None:
    browser.open(made[0] / "report.html")
    blocked = (
        "new Promise((done) => { addEventListener('securitypolicyviolation', (e) => done(e.effectiveDirective));"
        "document.body.append(Object.assign(new Image(), { src: 'http://127.0.0.1:9/x.png' })); })"
    )
    assert browser.run(blocked) == "img-src"


def test_heading_has_the_scale(made: Made, browser: Browser) -> None:
    browser.open(made[0] / "report.html")
    assert browser.run("document.querySelector('h1').innerText") == "LeNet-300-100 on MNIST laptop scale"
    assert browser.run("document.title") == "LeNet-300-100 on MNIST – laptop scale"
    assert browser.run("[...document.querySelectorAll('.badge')].map((b) => b.innerText)") == [
        "✓ Held",
        "✗ Did not hold",
        "? Cannot tell",
    ]


def test_axes_switch_by_click_and_by_address(made: Made, browser: Browser) -> None:
    page = made[0] / "report.html"
    browser.open(page)
    assert "0.01" in ticks(browser)
    before = browser.run("document.querySelector('.line[data-arm]').getAttribute('d')")
    click(browser, "input[name=y][value=linear]")
    assert chosen(browser) == "#y=linear"
    assert browser.run("document.querySelector('.line[data-arm]').getAttribute('d')") != before
    click(browser, "input[name=x][value=seconds]")
    assert ticks(browser).endswith("seconds")
    shown, state = browser.run("panels.innerHTML"), chosen(browser)
    browser.open(page, state)
    assert browser.run("panels.innerHTML") == shown
    assert browser.run("document.querySelector('input[name=y]:checked').value") == "linear"
    click(browser, "input[name=y][value=log]")
    click(browser, "input[name=x][value=axis]")
    assert browser.run("document.querySelector('.line[data-arm]').getAttribute('d')") == before
    browser.open(page, "#y=cubic&metric=none&x=")  # what it does not know it leaves
    assert browser.run("document.querySelector('.line[data-arm]').getAttribute('d')") == before
    assert browser.problems == []


def test_metric_of_curves_and_table_switch_together(made: Made, browser: Browser) -> None:
    browser.open(made[0] / "report.html", "#metric=accuracy")
    assert browser.run("document.querySelector('#table-metric').value") == "accuracy"
    assert "98.0" in ticks(browser)
    heads = (
        "[...document.querySelectorAll('#results th[scope=col]')].filter((th) => !th.hidden).map((th) => th.innerText)"
    )
    names = ["Optimizer", "lr", "Final", "At equal time", "Best", "Oscillation"]
    assert browser.run(heads) == [*names, "Epochs to target", "Seconds to target", "Seconds", "State MB", "Seeds"]
    browser.run(
        "document.querySelector('#table-metric').value = 'loss';"
        "document.querySelector('#table-metric').dispatchEvent(new Event('change', { bubbles: true }))"
    )
    assert browser.run("document.querySelector('select[name=metric]').value") == "loss"
    assert "98.0" not in ticks(browser)


def test_legend_hides_shows_and_isolates(made: Made, browser: Browser) -> None:
    browser.open(made[0] / "report.html")
    assert lines(browser) == ["adam", "block-adam", "ggt", "rmsprop", "block-rmsprop"]
    click(browser, "#legend [data-arm=ggt]")
    assert lines(browser) == ["adam", "block-adam", "rmsprop", "block-rmsprop"]
    assert browser.run("document.querySelector('#legend [data-arm=ggt]').getAttribute('aria-pressed')") == "false"
    x, y, width, height = box(browser, "#legend [data-arm=adam]")
    for count in (1, 2):
        for kind in ("Pressed", "Released"):
            browser.mouse(kind, x + width / 2, y + height / 2, button="left", clickCount=count)
    assert lines(browser) == ["adam"]
    assert "1 diverged" in browser.run("document.querySelector('#legend [data-arm=ggt]').innerText")


def test_seeds_are_drawn_when_asked_for(made: Made, browser: Browser) -> None:
    page = made[0] / "report.html"
    browser.open(page)
    assert browser.run("document.querySelectorAll('.seed').length") == 0
    click(browser, "input[name=seeds]")
    assert browser.run("document.querySelectorAll('.seed').length") == 20
    assert chosen(browser) == "#seeds=1"


def test_a_diverged_curve_has_no_band(made: Made, browser: Browser) -> None:
    browser.open(made[0] / "report.html")
    assert browser.run("document.querySelectorAll('.band').length") == 4


def test_on_a_log_axis_curves_are_geometric_means_and_bands_have_a_lower_end(made: Made, browser: Browser) -> None:
    browser.open(made[0] / "report.html", "#off=ggt")
    band = read(*made).curve("rmsprop", "loss").band(log=True)
    drawn = browser.run("shownCurves().find((c) => data.arms[c.series.arm].name === 'rmsprop').points")
    for key, values in (("y", band.middle), ("low", band.low), ("high", band.high)):
        assert [point[key] for point in drawn] == pytest.approx(values, rel=1e-4)
    assert "NaN" not in browser.run("document.querySelector('.band').getAttribute('d')")


def test_pointing_reads_the_numbers_of_the_table(made: Made, browser: Browser) -> None:
    out, about = made
    browser.open(out / "report.html", "#metric=accuracy")
    _, y, _, height = box(browser)
    browser.mouse("Moved", pixel(browser, 7.2), y + height / 2)
    head, *values = browser.run("document.querySelector('.tip').innerText").split("\n")
    assert head == "epoch 7"
    curve = read(out, about).curve("adam", "accuracy")
    column = curve.values[:, 6]
    expected = formats.estimate(column.mean(), T4 * column.std(ddof=1) / 2)
    assert expected in values[values.index("Adam") + 1]
    means = [float(value.split(" ±")[0]) for value in values[1::2]]
    assert means == sorted(means, reverse=True)
    browser.mouse("Moved", pixel(browser, 18), y + height / 2)
    assert "(3 of 4 seeds)" in browser.run("document.querySelector('.tip').innerText")
    browser.mouse("Moved", 5, 5)
    assert browser.run("document.querySelector('.tip').hidden")


def test_seconds_are_read_at_each_curves_own_point(made: Made, browser: Browser) -> None:
    browser.open(made[0] / "report.html", "#x=seconds&off=rmsprop,block-rmsprop,ggt")
    _, y, _, height = box(browser)
    browser.mouse("Moved", pixel(browser, 11.1), y + height / 2)  # an epoch takes 1.1 and 1.6 seconds
    text = browser.run("document.querySelector('.tip').innerText")
    assert re.search(r"Adam\n.* at epoch 10\n", text)
    assert re.search(r"Block-Adam\n.* at epoch 7$", text.strip())


def test_keyboard_reads_values(made: Made, browser: Browser) -> None:
    browser.open(made[0] / "report.html")
    browser.run("document.querySelector('.panel svg').focus()")
    heads = []
    for key in ("ArrowRight", "ArrowRight", "End", "ArrowLeft", "Home"):
        browser.key(key)
        heads.append(browser.run("document.querySelector('.tip strong').innerText"))
    assert heads == ["epoch 1", "epoch 2", "epoch 20", "epoch 19", "epoch 1"]
    browser.key("Escape")
    assert browser.run("document.querySelector('.tip').hidden")


def test_dragging_enlarges_and_the_whole_comes_back(made: Made, browser: Browser) -> None:
    browser.open(made[0] / "report.html")
    whole = browser.run("panels.innerHTML")
    _, y, _, height = box(browser)
    start, end = pixel(browser, 10), pixel(browser, 15)
    browser.mouse("Moved", start, y + height / 2)
    browser.mouse("Pressed", start, y + height / 2, button="left", clickCount=1)
    browser.mouse("Moved", end, y + height / 2, button="left")
    browser.mouse("Released", end, y + height / 2, button="left", clickCount=1)
    low, high = browser.run("[Number(state.from), Number(state.to)]")
    assert low == pytest.approx(10, abs=0.05)
    assert high == pytest.approx(15, abs=0.05)
    assert browser.run("document.querySelector('input[name=from]').value") == str(low)
    click(browser, "#whole")
    assert browser.run("panels.innerHTML") == whole


def test_headings_sort_and_a_missing_number_comes_last(made: Made, browser: Browser) -> None:
    browser.open(made[0] / "report.html")
    order = "[...document.querySelectorAll('#results tbody th')].map((th) => th.innerText.trim())"
    names = browser.run("[...document.querySelectorAll('#results thead button')].map((button) => button.innerText)")
    column = names.index("Seconds") + 1
    heading, cell = f"#results thead th:nth-child({column})", f"#results tbody tr:first-child :nth-child({column})"
    ends = []
    for _ in ("up", "down"):
        click(browser, f"{heading} button")
        found = browser.run(order)
        ends.append(
            (found[0], found[-1], browser.run(f"document.querySelector('{heading}').getAttribute('aria-sort')"))
        )
    assert ends == [("Adam", "GGT", "ascending"), ("GGT", "Adam", "descending")]
    browser.run(f"document.querySelector('{cell}').dataset.value = 'nan'")
    for _ in ("up", "down"):
        click(browser, f"{heading} button")
        assert browser.run(order)[-1] == "GGT"
    click(browser, "#results thead th button")
    assert browser.run(order) == ["Adam", "Block-Adam", "Block-RMSprop", "GGT", "RMSprop"]


def test_variants_are_panels_on_one_scale(panels: Path, browser: Browser) -> None:
    browser.open(panels)
    titles = "[...document.querySelectorAll('.panel h3')].map((h) => h.innerText)"
    assert browser.run(titles) == ["M=1 training loss", "M=5 training loss", "M=10 training loss"]
    texts = browser.run("[...document.querySelectorAll('.panel')].map((p) => p.querySelector('svg').textContent)")
    assert len(texts) == 3
    assert len(set(texts)) == 1
    browser.open(panels, "#variant=M%3D5")
    assert browser.run(titles) == ["M=5 training loss"]
    assert browser.run("panels.dataset.rendered") == "2"


def test_long_curves_are_thinned_but_keep_their_ends(panels: Path, browser: Browser) -> None:
    browser.open(panels)
    series = browser.run("data.series.map((s) => [s.x.length, s.x[0], s.x.at(-1), s.seed_x.length])")
    assert series == [[800, 1, 1200, 200]] * 6
    assert "some points are left out" in browser.run("document.querySelector('#curves').innerText")


@pytest.mark.parametrize("width", [320, 768, 1280])
def test_page_fits_the_screen(made: Made, panels: Path, browser: Browser, width: int) -> None:
    for page in (made[0] / "report.html", panels):
        browser.open(page, width=width)
        assert browser.run("document.documentElement.scrollWidth") == width
        svg = browser.run("document.querySelector('.panel svg').viewBox.baseVal.width")
        assert box(browser)[2] == pytest.approx(svg, abs=1)  # text is as large as it should be


def test_a_reading_stays_on_a_narrow_screen(made: Made, browser: Browser) -> None:
    browser.open(made[0] / "report.html", "#metric=accuracy", width=390, height=844)
    _, y, _, height = box(browser)
    for epoch in (2, 10, 19):
        browser.mouse("Moved", pixel(browser, epoch), y + height / 2)
        left, _, width, _ = box(browser, ".tip:not([hidden])")
        assert left >= 0
        assert left + width <= 390


def contrast(first: str, second: str) -> float:
    """As WCAG 2 has it, of two colours like "rgb(1, 2, 3)"."""

    def light(colour: str) -> float:
        parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
        linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((light(first), light(second)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_text_can_be_read_in_both_schemes(made: Made, browser: Browser, dark: bool) -> None:
    browser.open(made[0] / "report.html", dark=dark)
    paper = browser.run("getComputedStyle(document.body).backgroundColor")
    assert contrast(paper, "rgb(0, 0, 0)") < 2 if dark else contrast(paper, "rgb(255, 255, 255)") < 2
    for selector in (
        "body",
        ".lead",
        ".note",
        "a",
        ".held .badge",
        ".did-not-hold .badge",
        ".cannot-tell .badge",
        ".warn",
    ):
        ink = browser.run(f"getComputedStyle(document.querySelector('{selector}')).color")
        assert contrast(ink, paper) >= 4.5, selector
    for selector in (".notice", "td.best", "td.best .half"):
        style = f"getComputedStyle(document.querySelector('{selector}'))"
        behind = f"getComputedStyle(document.querySelector('{selector.split()[0]}')).backgroundColor"
        assert contrast(browser.run(f"{style}.color"), browser.run(behind)) >= 4.5, selector


def test_every_control_has_a_name(made: Made, panels: Path, browser: Browser) -> None:
    for page in (made[0] / "report.html", panels):
        browser.open(page)
        nodes = browser.call("Accessibility.getFullAXTree")["nodes"]
        roles = ("button", "checkbox", "combobox", "radio", "spinbutton", "link", "image", "region", "navigation")
        found = [node for node in nodes if node.get("role", {}).get("value") in roles and not node.get("ignored")]
        assert len(found) > 20
        assert [node for node in found if not node.get("name", {}).get("value")] == []


def test_page_prints_with_everything_opened(made: Made, browser: Browser) -> None:
    browser.open(made[0] / "report.html", dark=True)
    browser.run(
        "const count = () => document.querySelectorAll('details[open]').length;"
        "addEventListener('beforeprint', () => { window.printed = count(); })"
    )
    assert browser.pdf().startswith(b"%PDF-")
    assert browser.run("window.printed") == browser.run("document.querySelectorAll('details').length")
    assert browser.run("document.querySelectorAll('details[open]').length") == 0
    assert browser.problems == []


# Small things ---------------------------------------------------------------------------------------------------------


def band(*values: float, half: float = 0.0) -> tuple[np.ndarray, Band]:
    mean = np.array(values)
    return np.arange(1.0, mean.size + 1), Band(mean, mean - half, mean + half, np.full(mean.size, 3))


def test_an_axis_shows_all_means_and_as_much_of_the_bands_as_does_not_flatten_them() -> None:
    assert y_range([], False) is None
    assert y_range([band(math.nan, math.nan)], False) is None
    assert y_range([band(-1.0, 0.0)], True) is None
    low, high = y_range([band(1.0, 2.0, half=0.2), band(3.0, 2.5, half=0.2)], False) or (0, 0)
    assert (low, high) == pytest.approx((0.8, 3.2))
    low, high = y_range([band(1.0, 3.0, half=100.0)], False) or (0, 0)
    assert (low, high) == pytest.approx((1 - 0.8, 3 + 0.8))
    low, high = y_range([band(100.0, *[1.0, 2.0] * 10)], False) or (0, 0)
    assert high < 3  # the start would flatten the rest
    low, high = y_range([band(1e-4, 1.0, half=1e-5)], True) or (0, 0)
    assert low < 1e-4
    assert 1 < high < 10
