"""Runs are read back as far as they were written."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("scipy", reason="needs the `experiments` extra")

from blockadapt_experiments.claims.contests import finals
from blockadapt_experiments.files.checked import is_marked, write_sealed
from blockadapt_experiments.report.reading import read
from blockadapt_experiments.results.recorded_runs import read_experiment, read_tuned
from support.run_records import (
    experiment,
    rows_of,
    write_experiment,
    write_json,
    write_lines,
    write_run,
    write_tuned,
)


@pytest.mark.parametrize("name", ["experiment.json", "tuned.json"])
def test_no_byte_of_what_an_experiment_says_can_change_unnoticed(tmp_path: Path, name: str) -> None:
    """Not in the keys either, without which a file would look like one of old."""
    arms = {"sha256": {"": {"lr": 0.1}}, "format": {"": {"lr": 3e-3}}}
    write_sealed(tmp_path / "experiment.json", {"experiment": "x", "settings": {"epochs": 3, "seeds": [0, 1]}})
    write_tuned(tmp_path, arms)

    def said() -> Any:
        if name == "tuned.json":
            return read_tuned(tmp_path, "report")
        head = read_experiment(tmp_path, "report", {"settings": dict})
        return (head, is_marked(head))

    path, right = tmp_path / name, said()
    assert right[1] if name == "experiment.json" else right == arms
    whole = path.read_bytes()
    refused = 0
    for place in range(len(whole)):
        changed = bytearray(whole)
        changed[place] ^= 1
        path.write_bytes(changed)
        try:
            assert said() == right  # as where a space has become a tab
        except ValueError:
            refused += 1
    assert refused > len(whole) / 2


@pytest.mark.parametrize(
    "table", [{"adam": {"": {"lr": 0.1}}}, {"arms": {}}, {"format": 2, "arms": {}}, {"sha256": ""}]
)
def test_what_tuning_found_is_believed_with_its_seal_alone(tmp_path: Path, table: dict[str, Any]) -> None:
    write_json(tmp_path / "tuned.json", table)
    with pytest.raises(ValueError, match=r"\Areport: '.*tuned\.json' must be as `blockadapt run` wrote it; "):
        read_tuned(tmp_path, "report")


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
