from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from blockadapt_experiments.claims.verdicts import (
    difference,
    is_below_zero,
    log_ratio,
    mean_words,
    numbers,
    ratio_words,
    together,
)
from blockadapt_experiments.report.reading import read
from support.run_records import experiment, write_experiment, write_run


def test_values_are_paired_by_seed_not_by_position() -> None:
    first, second = {3: 5.0, 1: 2.0, 7: 9.0}, {1: 1.0, 3: 10.0}
    assert difference(first, second).tolist() == [-5.0, 1.0]
    np.testing.assert_allclose(log_ratio(first, second), [math.log(0.5), math.log(2)], rtol=1e-15)


def test_numbers_are_those_of_finished_runs(tmp_path: Path) -> None:
    write_experiment(tmp_path)
    write_run(tmp_path, "adam", "", 0, [{"epoch": 1}], finished=False)
    write_run(tmp_path, "adam", "", 2, [{"epoch": 1}], numbers={"cost": 4.0})
    assert numbers(read(tmp_path, experiment()), "adam", "cost") == {2: 4.0}


@pytest.mark.parametrize(
    ("values", "below"),
    [
        # Two values a and b: mean ± t₀.₉₇₅(1) |a − b| / 2, where t₀.₉₇₅(1) = 12.706.
        ([-1.0, -0.9], True),
        ([1.0, 0.9], False),
        ([-1.0, -0.8], None),
        ([-1.0], None),
        ([], None),
        ([-1.0, math.nan], None),
    ],
)
def test_an_interval_decides_only_if_it_lies_on_one_side_of_zero(values: list[float], below: bool | None) -> None:
    assert is_below_zero(np.array(values)) is below


@pytest.mark.parametrize(
    ("parts", "whole"),
    [([True, True], True), ([True, None], None), ([None, False], False), ([], None)],
)
def test_a_claim_of_several_parts(parts: list[bool | None], whole: bool | None) -> None:
    assert together(parts) is whole


def test_words_carry_mean_and_interval() -> None:
    assert mean_words([1.0, 1.1]) == "1.05 ± 0.64"
    assert mean_words([0.25]) == "0.25 (one seed)"
    assert mean_words([-1.0, -1.1]) == "−1.05 ± 0.64"  # the sign that tables have too
    assert mean_words([1.0, 1.1], "points") == "1.05 ± 0.64 points"
    assert mean_words([0.25], "points") == "0.25 points (one seed)"
    assert mean_words([], "points") == "an unknown amount"
    assert ratio_words(np.log([2.0, 2.0])) == "×2 (2 to 2)"
    assert ratio_words(np.log([0.5])) == "×0.5 (one seed)"
    assert ratio_words(np.array([math.nan, 1.0])) == "×? (not known)"
