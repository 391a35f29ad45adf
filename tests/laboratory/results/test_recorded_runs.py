"""Runs are read back as far as they were written."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("scipy", reason="needs the `experiments` extra")

from blockadapt_experiments.claims.contests import finals
from blockadapt_experiments.report.reading import read
from support.run_records import experiment, rows_of, write_experiment, write_lines, write_run


def test_rows_end_before_a_line_that_is_half_written(tmp_path: Path) -> None:
    write_experiment(tmp_path, optimizers=["adam"], seeds=[0])
    rows = rows_of(loss=[1.25, 1e-7, math.nan], accuracy=[3, 4, 5])
    run = write_run(tmp_path, "adam", "", 0, rows, finished=False)
    whole = (run / "metrics.jsonl").read_bytes()
    for size in range(len(whole) + 1):
        (run / "metrics.jsonl").write_bytes(whole[:size])
        found = read(tmp_path, experiment()).runs[0].rows
        assert len(found) == whole[:size].count(b"\n")
        assert repr(list(found)) == repr(rows[: len(found)])


def test_a_run_that_left_nothing_but_its_description_is_read(tmp_path: Path) -> None:
    write_experiment(tmp_path)
    run = write_run(tmp_path, "adam", "", 0, [], leg=None, finished=False)
    (run / "metrics.jsonl").unlink()
    (tmp_path / "runs" / "adam" / "-" / "seed-1").mkdir()  # killed before it wrote anything
    summary = read(tmp_path, experiment())
    assert [run.key.seed for run in summary.runs] == [0]
    assert summary.metrics == []


@pytest.mark.parametrize(
    ("timing", "expected"),
    [
        ([], [math.nan] * 4),
        ([(1, 2.0, 4)], [0.5, 1.0, 1.5, 2.0]),
        ([(1, 2.0, 1), (2, 3.0, 3)], [2.0, 3.5, 5.0, math.nan]),
        ([(1, 2.0, 1), (2, 9.0, 1), (3, 1.0, 3), (4, 1.0, 4)], [2.0, 11.5, 12.0, 13.0]),  # a leg without a row
        ([(1, 2.0, 2), (2, 9.0, 4), (2, 4.0, 4)], [1.0, 2.0, 4.0, 6.0]),  # a leg that was done again
        ([(1, 2.0, 2), (2, 3.0, 8)], [1.0, 2.0, 2.5, 3.0]),  # rows that are not yet there
    ],
)
def test_seconds_run_up_to_every_row(
    tmp_path: Path, timing: list[tuple[int, float, int]], expected: list[float]
) -> None:
    write_experiment(tmp_path, optimizers=["adam"], seeds=[0])
    run = write_run(tmp_path, "adam", "", 0, rows_of(loss=[4, 3, 2, 1]), finished=False)
    write_lines(run / "timing.jsonl", [{"leg": u, "seconds": s, "last_row": r} for u, s, r in timing])
    np.testing.assert_allclose(read(tmp_path, experiment()).runs[0].seconds, expected)


def test_a_seed_has_diverged_if_it_says_so_or_shows_it(tmp_path: Path) -> None:
    write_experiment(tmp_path, seeds=[0, 1, 2])
    write_run(tmp_path, "adam", "", 0, rows_of(loss=[1, 2]), numbers={"diverged": 0})
    write_run(tmp_path, "adam", "", 1, rows_of(loss=[1, 2]), numbers={"diverged": 1})
    write_run(tmp_path, "adam", "", 2, rows_of(loss=[1, math.nan]))
    write_run(tmp_path, "block-adam", "", 0, rows_of(loss=[1, math.inf]), finished=False)
    write_run(tmp_path, "block-adam", "", 1, rows_of(loss=[1, 2], other=[math.nan, 1]))  # not a metric
    summary = read(tmp_path, experiment())
    assert (summary.diverged("adam"), summary.diverged("block-adam")) == (2, 1)
    np.testing.assert_array_equal(summary.final("adam", "loss"), [2, math.nan, math.nan])
    assert str(finals(summary, "adam", "loss")) == str({0: 2.0, 1: math.nan, 2: math.nan})  # claims say the same
    np.testing.assert_array_equal(summary.best("adam", "loss"), [1, 1, 1])


def test_an_error_is_told_until_the_run_is_finished(tmp_path: Path) -> None:
    write_experiment(tmp_path)
    for finished in (False, True):
        run = write_run(tmp_path, "adam", "", int(finished), [], finished=finished)
        (run / "error.txt").write_text("Traceback\n  File\nOSError: no space left\n")
    told = {run.finished: run.error for run in read(tmp_path, experiment()).runs}
    assert told == {False: "OSError: no space left", True: ""}
