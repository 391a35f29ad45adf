"""Differences between arms and between variants, paired by seed, against plain NumPy."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import pytest

from blockadapt_experiments.report import write_report
from blockadapt_experiments.report.pairs import Comparison, compare
from blockadapt_experiments.report.reading import read
from support.run_records import experiment, rows_of, write_ends, write_experiment, write_run

SMALL, LARGE = "optimizer.block_size=4", "optimizer.block_size=16"
ENDS = {
    ("adam", SMALL): (33.0, 36.0, 39.0),
    ("adam", LARGE): (33.0, 36.0, 39.0),
    ("b25", SMALL): (31.0, 34.1, 37.0),
    ("b25", LARGE): (30.0, 40.0, 35.0),
}
"""Seeds are further apart than methods are."""

T2 = 4.3026527  # t₀.₉₇₅(2)


@pytest.fixture
def swept(tmp_path: Path) -> Path:
    """An optimizer and an arm with settings of its own, over two variants; the arm takes longer."""
    arms = {"b25": {"optimizer": "block-adam", "block_size": 25, "label": "Blocks of 25"}}
    write_ends(tmp_path, "cifar10-cnn", {"adam": (), "b25": ()}, variants=[SMALL, LARGE], arms=arms, seeds=[0, 1, 2])
    for (arm, variant), values in ENDS.items():
        for seed, end in enumerate(values):
            rows = rows_of(test_error=[90.0, end + 10, end], train_loss=[3.0, 2.0, 1.0])
            write_run(tmp_path, arm, variant, seed, rows, leg=1.5 if arm == "b25" else 1.0)
    return tmp_path


def found(comparison: Comparison) -> dict[tuple[str, str], list[tuple[float, float]]]:
    return {(line.label, line.variant): [(e.mean, e.half) for e in line.estimates] for line in comparison.lines}


def apart(first: tuple[str, str], second: tuple[str, str]) -> tuple[float, float]:
    values = np.subtract(ENDS[first], ENDS[second])
    return pytest.approx((values.mean(), T2 * values.std(ddof=1) / math.sqrt(3)), rel=1e-6)  # type: ignore[return-value]


def test_arms_are_compared_in_a_variant_and_variants_of_an_arm(swept: Path) -> None:
    arms, variants = compare(read(swept))
    assert [moment.heading for moment in arms.moments] == ["test error (%), final", "test error (%), at equal time"]
    assert arms.reference == "Adam in the same variant"
    ends = {key: estimates[0] for key, estimates in found(arms).items()}
    assert ends == {("Blocks of 25", variant): apart(("b25", variant), ("adam", variant)) for variant in (SMALL, LARGE)}
    assert variants.reference == f"{SMALL} with the same optimizer"
    ends = {key: estimates[0] for key, estimates in found(variants).items()}
    assert ends == {
        ("Adam", LARGE): apart(("adam", LARGE), ("adam", SMALL)),
        ("Blocks of 25", LARGE): apart(("b25", LARGE), ("b25", SMALL)),
    }
    assert [line.pairs for line in arms.lines] == [3, 3]


def test_at_equal_time_the_slower_has_what_it_had_by_then(swept: Path) -> None:
    """Adam is done after 3 seconds, where blocks are after two of their three epochs."""
    (arms, variants) = compare(read(swept))
    assert found(arms)["Blocks of 25", SMALL][1][0] == pytest.approx(np.mean([41.0 - 33, 44.1 - 36, 47.0 - 39]))
    ends, timed = found(variants)["Blocks of 25", LARGE]  # both take as long
    assert ends == timed


@pytest.mark.parametrize(
    ("against", "references"),
    [
        ("b25", ["Blocks of 25 in the same variant", f"{SMALL} with the same optimizer"]),
        (LARGE, ["Adam in the same variant", f"{LARGE} with the same optimizer"]),
    ],
)
def test_the_reference_can_be_chosen(swept: Path, against: str, references: list[str]) -> None:
    chosen = compare(read(swept), against)
    assert [comparison.reference for comparison in chosen] == references
    if against == LARGE:
        assert found(chosen[1])["Blocks of 25", SMALL][0] == apart(("b25", SMALL), ("b25", LARGE))
    else:
        assert found(chosen[0])["Adam", SMALL][0] == apart(("adam", SMALL), ("b25", SMALL))


def test_page_and_document_show_them_and_mark_what_is_clear(swept: Path) -> None:
    page = write_report(swept)[0].read_text(encoding="utf-8")
    text = (swept / "report" / "summary.md").read_text(encoding="utf-8")
    section = text.partition("## Differences, paired by seed")[2].partition("\n## ")[0]
    assert "Minus Adam in the same variant:" in section
    assert f"| Blocks of 25 | {SMALL} | **−1.97 ± 0.14** | **8.03 ± 0.14** | 3 |" in section
    assert f"| Blocks of 25 | {LARGE} | −1 ± 11 | 9 ± 11 | 3 |" in section
    assert section.count("Minus ") == 2
    shown = page.partition('<section id="differences"')[2].partition("</section>")[0]
    marked = re.findall(r'<td class="number best">([^<]+)', shown)
    assert marked == ["−1.97", "8.03"]
    assert '<a href="#differences">' in page


def test_one_arm_in_one_variant_is_compared_with_nothing(tmp_path: Path) -> None:
    write_report(write_ends(tmp_path, "cifar10-cnn", {"adam": (30.0, 31.0)}))
    assert "Differences" not in (tmp_path / "report" / "summary.md").read_text(encoding="utf-8")
    assert 'id="differences"' not in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_only_seeds_of_both_count_and_a_diverged_one_leaves_no_number(tmp_path: Path) -> None:
    ends = {"adam": (30.0, 31.0, 32.0), "sgd": (35.0, 35.9), "soap": (20.0, 21.0, 22.0)}
    (comparison,) = compare(read(write_ends(tmp_path, "cifar10-cnn", ends, [("soap", 2)])))
    sgd, soap = comparison.lines
    assert (sgd.pairs, sgd.estimates[0].mean) == (2, pytest.approx(4.95))
    assert (soap.pairs, soap.estimates[0].text) == (3, "–")
    assert not soap.marked[0][1]


def test_without_a_measure_all_that_has_a_direction_is_compared(tmp_path: Path) -> None:
    write_experiment(tmp_path, seeds=[0, 1])
    for arm, accuracy in (("adam", 90.0), ("block-adam", 91.0)):
        for seed in (0, 1):
            write_run(tmp_path, arm, "", seed, rows_of(loss=[1.0, 0.5], accuracy=[80.0, accuracy + seed]), leg=None)
    (comparison,) = compare(read(tmp_path, experiment()))
    assert [moment.heading for moment in comparison.moments] == ["training loss, final", "test accuracy (%), final"]
    (line,) = comparison.lines
    assert [estimate.mean for estimate in line.estimates] == [0.0, 1.0]
