"""The toy network's runs, landscapes, trajectories and claims."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from blockadapt_experiments.core.config import load, plain
from blockadapt_experiments.core.experiment import Experiment, Task
from blockadapt_experiments.experiments.registry import get_experiment
from blockadapt_experiments.experiments.toy import trajectories
from blockadapt_experiments.experiments.toy.adagrad import (
    AdagradTask,
    draw_batches,
    judge_faster,
    judge_lower,
    steps_to_common_level,
)
from blockadapt_experiments.experiments.toy.landscape import (
    DIFFERENT,
    SAME,
    condition,
    couplings,
    judge_change,
    judge_condition,
    judge_coupling,
)
from blockadapt_experiments.experiments.toy.network import (
    different_layers_pairs,
    draw_problem,
    pair_hessian,
    same_layer_pairs,
)
from blockadapt_experiments.experiments.toy.trajectories import (
    Landscape,
    TrajectoryTask,
    draw_landscape,
    judge_fewer_steps,
    judge_straighter,
)
from blockadapt_experiments.report.reading import read
from blockadapt_experiments.results.measurements import Row, RunKey
from blockadapt_experiments.results.summary import Summary
from support.files import through_a_file
from support.laboratory import finish
from support.run_records import write_experiment, write_run
from support.toy import problem, torch_loss, trajectory_settings

Array = NDArray[np.float64]
NAMES = ("toy-adagrad", "toy-landscape", "toy-trajectories")


def test_minibatches_have_no_sample_twice_and_do_not_depend_on_the_arm() -> None:
    batches = draw_batches(np.random.default_rng(0), steps=200, samples=10, size=5)
    assert batches.shape == (200, 5)
    assert all(len(set(batch)) == 5 for batch in batches.tolist())
    counts = np.bincount(batches.ravel(), minlength=10)
    assert counts.min() > 70  # 100 expected, standard deviation 7
    tasks = [AdagradTask(adagrad_settings(), RunKey(arm, "M=5", 4), 0.1) for arm in ("adagrad", "full-adagrad")]
    np.testing.assert_array_equal(tasks[0]._batches, tasks[1]._batches)
    np.testing.assert_array_equal(tasks[0]._descent.x, tasks[1]._descent.x)
    np.testing.assert_array_equal(tasks[0]._problem.inputs, tasks[1]._problem.inputs)


# Runs ---------------------------------------------------------------------------------------------------------------


def adagrad_settings(*changes: str) -> Any:
    return load(get_experiment("toy-adagrad"), "smoke", ["steps=1100", "every=100", *changes])


@pytest.mark.parametrize(
    ("name", "arm", "variant"),
    [
        ("toy-adagrad", "adagrad", "M=1"),
        ("toy-adagrad", "full-adagrad", "M=5"),
        ("toy-landscape", "same-layer", ""),
        ("toy-trajectories", "rmsprop", "landscape-0"),
        ("toy-trajectories", "block-rmsprop", "landscape-0"),
    ],
)
def test_a_run_that_was_stopped_ends_bit_identically(name: str, arm: str, variant: str) -> None:
    experiment = get_experiment(name)
    settings = load(experiment, "smoke", [] if name == "toy-landscape" else ["steps=620", "every=20"])

    def make() -> Task:
        return experiment.task(settings, RunKey(arm, variant, 2), 0.03, None, False)

    rows, outcome = finish(make())
    for stop in range(make().legs + 1):
        first = make()
        before = [row for _ in range(stop) for row in first.advance()]
        second = make()
        second.load_state_dict(through_a_file(first.state_dict()))
        after, end = finish(second, stop)
        assert [*before, *after] == rows
        assert end.numbers == outcome.numbers
        for array in outcome.arrays:
            np.testing.assert_array_equal(end.arrays[array], outcome.arrays[array])


def test_adagrad_rows_hold_the_loss_over_all_samples() -> None:
    task = AdagradTask(adagrad_settings(), RunKey("full-adagrad", "M=1", 0), 0.1)
    rows, outcome = finish(task)
    assert [row["step"] for row in rows] == list(range(0, 1101, 100))
    assert rows[-1]["loss"] == task._problem.loss(task._descent.x) == outcome.numbers["final"]
    losses = [row["loss"] for row in rows]
    assert rows[-1]["mean_loss"] == pytest.approx(np.mean(losses), rel=1e-15)
    assert outcome.numbers["least"] == min(losses)


def test_a_hopeless_learning_rate_does_no_more_than_give_a_high_loss() -> None:
    for arm in ("adagrad", "full-adagrad"):
        rows, _ = finish(AdagradTask(adagrad_settings(), RunKey(arm, "M=1", 0), 1e2))
        assert all(math.isfinite(row["loss"]) for row in rows)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("scale", ["smoke", "laptop", "paper"])
def test_every_scale_has_settings_and_tasks(name: str, scale: str) -> None:
    experiment = get_experiment(name)
    settings = load(experiment, scale)
    for arm in settings.optimizers:
        for variant in experiment.variants(settings):
            assert experiment.task(settings, RunKey(arm, variant, 0), 0.1, None, False).legs >= 1
    if scale != "smoke":
        assert len(settings.seeds) == 20


@pytest.mark.parametrize(
    ("name", "change", "sentence"),
    [
        ("toy-adagrad", "batches=[1, 11]", "settings: `batches` must be one or more different sizes in [1, 10], got"),
        ("toy-adagrad", "samples=1", "settings: `samples` must be an integer >= 2, got 1."),
        (
            "toy-adagrad",
            "labels=noisy",
            "toy-adagrad: `labels` must be one of 'bernoulli', 'probability', got 'noisy'.",
        ),
        (
            "toy-landscape",
            'optimizers=["adam"]',
            "settings: `optimizers` must be one of 'same-layer', 'different-layers'",
        ),
        ("toy-landscape", "points=20", "settings: `points` must be odd, got 20."),
        ("toy-trajectories", "coupling=1.0", "settings: `coupling` must be in [0, 1), got 1.0."),
        ("toy-trajectories", "landscapes=[-1]", "settings: `landscapes` must be one or more different numbers >= 0"),
    ],
)
def test_settings_that_cannot_be_are_refused(name: str, change: str, sentence: str) -> None:
    with pytest.raises(ValueError, match="`") as error:
        load(get_experiment(name), "smoke", [change])
    assert str(error.value).startswith(sentence)


# Landscapes ---------------------------------------------------------------------------------------------------------


def test_coupling_and_condition_of_known_hessians() -> None:
    H = np.array([[[2.0, 1.0], [1.0, 2.0]], [[100.0, 0.0], [0.0, -1.0]], [[1.0, 1.0], [1.0, 1.0]], [[0.0] * 2] * 2])
    coupling, ratio = couplings(H)
    np.testing.assert_allclose(coupling, [1 / 3, 0, 1 / 2, np.nan], rtol=1e-15)
    np.testing.assert_allclose(ratio, [1 / 2, 0, 1, np.nan], rtol=1e-15)
    np.testing.assert_allclose(condition(H), [np.log10(3), 2, 6, np.nan], rtol=1e-12)


def curved(H: Array) -> bool:
    return bool(H[0, 1] or H[0, 0] * H[1, 1])


@pytest.mark.parametrize("arm", [SAME, DIFFERENT])
def test_landscape_numbers_are_means_over_all_pairs_of_autograds_hessian(arm: str) -> None:
    settings = load(get_experiment("toy-landscape"), "smoke", ["points=3", "reach=0.8"])
    task = get_experiment("toy-landscape").task(settings, RunKey(arm, "", 5), 0.0, None, False)
    rows, outcome = finish(task)
    drawn = draw_problem(np.random.default_rng([5, 0]), settings)
    loss = torch_loss(drawn, biases=False)
    coupled, changes, off, at_optimum, far = [], [], [], [], []
    for pair in {SAME: same_layer_pairs, DIFFERENT: different_layers_pairs}[arm](drawn):
        hessians, losses = [], []
        for first in (-0.8, 0.0, 0.8):
            for second in (-0.8, 0.0, 0.8):
                weights = torch.tensor(drawn.truth)
                weights[pair[0]] += first
                weights[pair[1]] += second
                losses.append(loss(weights).item())
                hessians.append(torch.autograd.functional.hessian(loss, weights)[pair][:, pair].numpy())
        here = [abs(H[0, 1]) / (abs(H[0, 1]) + math.sqrt(abs(H[0, 0] * H[1, 1]))) for H in hessians if curved(H)]
        coupled += [np.mean(here)] if here else []
        best = hessians[int(np.argmin(losses))]
        at_optimum.append(abs(best[0, 1]))
        off.append(abs(hessians[4][0, 1]))
        far.append(np.mean([loss for index, loss in enumerate(losses) if index != 4]))
        mean = np.mean(hessians, axis=0)
        changes.append(math.sqrt(np.mean([np.sum((H - mean) ** 2) for H in hessians])))
    numbers = outcome.numbers
    assert numbers["pairs"] == len(changes)
    assert numbers["coupling_grid"] == pytest.approx(np.mean(coupled), rel=1e-9)
    assert numbers["off_diagonal_truth"] == pytest.approx(np.mean(off), rel=1e-9)
    assert numbers["off_diagonal_optimum"] == pytest.approx(np.mean(at_optimum), rel=1e-9)
    assert numbers["change"] == pytest.approx(np.mean(changes), rel=1e-9)
    assert [row["distance"] for row in rows] == [0.0, 0.8]
    assert rows[0]["loss"] == pytest.approx(float(drawn.loss(drawn.truth)), rel=1e-12)
    assert rows[1]["loss"] == pytest.approx(np.mean(far), rel=1e-12)
    assert outcome.arrays["loss"].shape == (3, 3)


# Trajectories -------------------------------------------------------------------------------------------------------


def test_a_landscape_interacts_and_has_its_minimum_at_the_truth() -> None:
    settings = trajectory_settings("coupling=0.8")
    for number in range(4):
        landscape = draw_landscape(number, settings)
        H = pair_hessian(landscape.problem, landscape.problem.truth, landscape.pair)
        assert abs(H[0, 1]) >= 0.8 * math.sqrt(H[0, 0] * H[1, 1])
        assert np.linalg.eigvalsh(H)[0] >= trajectories.LEAST_CURVATURE
        np.testing.assert_allclose(landscape.gradient(landscape.centre), 0, atol=1e-15)
        assert landscape.pair in same_layer_pairs(landscape.problem)


def test_where_units_are_dead_the_gradient_vanishes_and_no_run_arrives() -> None:
    drawn = problem(labels="probability")
    landscape = Landscape(drawn, same_layer_pairs(drawn)[2])  # both weights of the second layer from one neuron
    assert {drawn.edges[i].layer for i in landscape.pair} == {1}
    dead = landscape.centre - 1e3
    np.testing.assert_array_equal(landscape.gradient(dead), 0)
    assert landscape.curvature(dead) == 0
    task = TrajectoryTask(trajectory_settings("steps=20"), RunKey("rmsprop", "landscape-0", 0), 0.01)
    task._landscape = landscape
    task._descent.x[:] = dead
    _, outcome = finish(task)
    assert (outcome.numbers["steps_stationary"], outcome.numbers["arrived"]) == (0, 0)


@pytest.mark.parametrize("arm", ["rmsprop", "block-rmsprop"])
def test_steps_and_detour_are_those_of_the_path(arm: str) -> None:
    settings, arrivals = trajectory_settings(), []
    for seed in range(4):
        task = TrajectoryTask(settings, RunKey(arm, "landscape-0", seed), 0.01)
        rows, outcome = finish(task)
        path, numbers = outcome.arrays["path"], outcome.numbers
        norms = np.linalg.norm(task._landscape.gradient(path), axis=1)
        assert numbers["steps_needed"] == len(path) - 1
        assert (norms[:-1] >= settings.tolerance).all() or numbers["steps_stationary"] < numbers["steps_needed"]
        if numbers["arrived"]:
            assert norms[-1] < settings.tolerance
            assert task._landscape.curvature(path[-1]) > trajectories.FLAT
        moves = [math.dist(a, b) for a, b in pairwise(path)]
        assert numbers["detour"] == pytest.approx(sum(moves) / math.dist(path[0], path[-1]), rel=1e-12)
        assert [row["step"] for row in rows] == list(range(0, 1101, 50))
        assert all(row["steps_needed"] == min(row["step"], numbers["steps_needed"]) for row in rows)
        arrivals.append(numbers["arrived"])
    assert any(arrivals)


@pytest.mark.parametrize("lr", [1e-4, 0.01])
def test_tuning_measures_the_steps_of_a_whole_run(lr: float) -> None:
    settings, key = trajectory_settings(), RunKey("block-rmsprop", "landscape-0", 0)
    _, whole = finish(TrajectoryTask(settings, key, lr))
    rows, _ = finish(TrajectoryTask(settings, key, lr, tuning=True))
    assert {row["steps_needed"] for row in rows} == {whole.numbers["steps_needed"]}
    assert whole.numbers["arrived"] == (lr > 1e-3)


# Claims and drawings ------------------------------------------------------------------------------------------------


def summary_of(
    out: Path, name: str, runs: dict[tuple[str, str, int], tuple[Sequence[Row], dict[str, float]]], **settings: Any
) -> Summary:
    """A summary of runs whose rows and numbers are given."""
    experiment: Experiment[Any] = get_experiment(name)
    arms, seeds = list(dict.fromkeys(arm for arm, _, _ in runs)), list(dict.fromkeys(seed for _, _, seed in runs))
    base = plain(load(experiment, "smoke"))
    write_experiment(out, name, "smoke", **{**base, "optimizers": arms, "seeds": seeds, **settings})
    for (arm, variant, seed), (rows, numbers) in runs.items():
        write_run(out, arm, variant, seed, rows, numbers=numbers)
    return read(out, experiment)


def losses(*values: float) -> list[Row]:
    return [{"step": 10 * index, "loss": value} for index, value in enumerate(values)]


def test_faster_is_judged_where_both_have_been(tmp_path: Path) -> None:
    runs = {}
    for seed in range(4):
        runs["full-adagrad", "M=1", seed] = (losses(1.0, 0.4 + 0.01 * seed, 0.2, 0.1, 0.1), {"final": 0.1})
        runs["adagrad", "M=1", seed] = (losses(1.0, 0.9, 0.8, 0.6, 0.5), {"final": 0.5 + 0.01 * seed})
    summary = summary_of(tmp_path, "toy-adagrad", runs, batches=[1])
    full, diagonal = steps_to_common_level(summary, "M=1")
    assert (set(full.values()), set(diagonal.values())) == ({10.0}, {40.0})
    verdict = judge_faster(summary)
    assert verdict.held is True
    assert "M=1 ×0.25 (0.25 to 0.25)" in verdict.words
    verdict = judge_lower(summary)
    assert verdict.held is True
    assert "M=1 0.1 ± 0 against 0.515 ± 0.021, difference −0.415 ± 0.021" in verdict.words


def test_a_claim_fails_with_one_minibatch_size_and_is_open_with_one_seed(tmp_path: Path) -> None:
    good, bad = losses(1.0, 0.5, 0.1), losses(1.0, 0.7, 0.5)
    runs = {}
    for seed in range(3):
        for variant, (full, diagonal) in {"M=1": (good, bad), "M=5": (bad, good)}.items():
            runs["full-adagrad", variant, seed] = (full, {"final": full[-1]["loss"]})
            runs["adagrad", variant, seed] = (diagonal, {"final": diagonal[-1]["loss"]})
    summary = summary_of(tmp_path / "three", "toy-adagrad", runs, batches=[1, 5])
    assert judge_faster(summary).held is False
    assert judge_lower(summary).held is False
    one = {key: run for key, run in runs.items() if key[2] == 0}
    summary = summary_of(tmp_path / "one", "toy-adagrad", one, batches=[1, 5])
    assert judge_faster(summary).held is judge_lower(summary).held is None


@pytest.mark.parametrize("judge", [judge_coupling, judge_condition, judge_change])
@pytest.mark.parametrize(("same", "held"), [(0.9, True), (0.1, False), (0.5, None)])
def test_landscape_claims_compare_the_same_problems(tmp_path: Path, judge: Any, same: float, held: bool | None) -> None:
    names = [f"{name}_{place}" for name in ("coupling", "condition") for place in ("truth", "optimum", "grid")]
    runs = {}
    for seed in range(3):
        jitter = [-0.02, 0.0, 0.02][seed]
        for arm, value in ((SAME, same + jitter), (DIFFERENT, 0.5 - jitter)):
            numbers = dict.fromkeys([*names, "ratio_truth", "change", "change_share"], value)
            runs[arm, "", seed] = ([{"distance": 0.0, "coupling": value}], numbers)
    verdict = judge(summary_of(tmp_path, "toy-landscape", runs))
    assert verdict.held is held
    assert f"{same:.3g} ± 0.05 against 0.5 ± 0.05, difference" in verdict.words


@pytest.mark.parametrize(("block", "held"), [(50.0, True), (200.0, False), (100.0, None)])
def test_trajectory_claims_average_over_landscapes(tmp_path: Path, block: float, held: bool | None) -> None:
    runs: dict[tuple[str, str, int], Any] = {}
    for variant in ("landscape-0", "landscape-1"):
        for seed in range(3):
            for arm, steps in (("block-rmsprop", block), ("rmsprop", 100.0)):
                numbers = {"steps_needed": steps + seed * (arm == "rmsprop"), "steps_stationary": steps, "arrived": 1.0}
                detour = {"detour": steps / 50 + 0.01 * seed * (arm == "rmsprop")}
                runs[arm, variant, seed] = ([{"step": 0, "loss": 1.0}], {**numbers, **detour})
    summary = summary_of(tmp_path, "toy-trajectories", runs, landscapes=[0, 1])
    verdict = judge_fewer_steps(summary)
    assert verdict.held is held
    assert "Arrived: 6 of 6 and 6 of 6 runs" in verdict.words
    assert judge_straighter(summary).held is held
    if held:
        assert "block over diagonal ×0.495 (0.483 to 0.507); landscape-0 ×0.495" in verdict.words


def test_claims_say_nothing_where_an_arm_is_missing(tmp_path: Path) -> None:
    arms = {
        "toy-adagrad": ("adagrad", "M=1"),
        "toy-landscape": (SAME, ""),
        "toy-trajectories": ("rmsprop", "landscape-0"),
    }
    for name, (arm, variant) in arms.items():
        summary = summary_of(tmp_path / name, name, {(arm, variant, 0): ([{"step": 0, "loss": 1.0}], {})})
        for claim in summary.experiment.claims:
            assert claim.judge(summary).held is None


@pytest.mark.parametrize("name", ["toy-landscape", "toy-trajectories"])
def test_drawings_show_finished_runs(tmp_path: Path, name: str) -> None:
    experiment = get_experiment(name)
    settings = load(experiment, "smoke")
    write_experiment(tmp_path, name, "smoke", **{**plain(settings), "seeds": [0]})
    assert experiment.draw is not None
    assert list(experiment.draw(read(tmp_path, experiment), tmp_path)) == []
    for arm in settings.optimizers:
        for variant in experiment.variants(settings):
            rows, outcome = finish(experiment.task(settings, RunKey(arm, variant, 0), 0.01, None, False))
            write_run(tmp_path, arm, variant, 0, rows, numbers=dict(outcome.numbers), arrays=outcome.arrays)
    files = list(experiment.draw(read(tmp_path, experiment), tmp_path))
    assert [file.name for file in files] == [f"{name}.png"]
    assert files[0].read_bytes().startswith(b"\x89PNG")
