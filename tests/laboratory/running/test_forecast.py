"""What a run will take: sizes as they will be, and time from steps that really were taken."""

from __future__ import annotations

import io
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from blockadapt import plan
from blockadapt_experiments.commands.display import duration, forecasts_table
from blockadapt_experiments.contenders.catalogue import OptimizerSettings, make_optimizer
from blockadapt_experiments.contenders.memory import state_bytes_of
from blockadapt_experiments.core.training import Classification
from blockadapt_experiments.results.measurements import RunKey
from blockadapt_experiments.running import forecast
from blockadapt_experiments.running.forecast import Forecast, Trained, dry_run, total_seconds
from support.laboratory import request


def test_sizes_are_those_of_the_run(tmp_path: Path) -> None:
    asked = request(tmp_path / "out", "optimizers=['sgd', 'block-adam']")
    found = {each.arm: each for each in dry_run(asked)}
    assert [*found] == ["sgd", "block-adam"]
    for arm, each in found.items():
        task = asked.task(RunKey(arm, "", 0), asked.lr(arm))
        assert isinstance(task, Classification)
        for _ in range(task.legs):
            task.advance()
        numbers = task.outcome().numbers
        assert (each.parameters, each.steps) == (266_610, 6)
        assert (each.steps, each.state_bytes) == (numbers["steps"], numbers["state_bytes"])
    assert found["sgd"].sizes == {}
    assert found["block-adam"].sizes == plan(task.optimizer).sizes  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()


class Slow:
    """Makes every step and every answer of a task take at least so long."""

    def __init__(self, task: Trained, step: float, answer: float) -> None:
        self.steps = 0

        def after_step(*_: Any) -> None:
            self.steps += 1
            time.sleep(step)

        task.optimizer.register_step_post_hook(after_step)
        task.model.register_forward_hook(lambda model, *_: None if model.training else time.sleep(answer))


def test_time_is_that_of_steps_and_of_measuring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = request(tmp_path, "optimizers=['sgd']", "train_examples=960", "epochs=7")
    task = asked.task(asked.runs()[0], 0.01)
    assert isinstance(task, Classification)
    slow = Slow(task, step=0.02, answer=0.05)
    found = forecast._forecast(task, "sgd", "")
    assert slow.steps == forecast.MOST_STEPS  # of 20 in an epoch
    assert 0.02 <= found.step_seconds < 0.2
    assert 0.05 <= found.measure_seconds < 0.5
    # 7 epochs of 20 steps, and of 40 training and 40 test images in minibatches of 48.
    assert task.work == (140, pytest.approx(7 * 80 / 48))
    assert found.seconds == pytest.approx(140 * found.step_seconds + 7 * 80 / 48 * found.measure_seconds)


def test_slow_steps_are_taken_few(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forecast, "PATIENCE", 0.0)
    asked = request(tmp_path, "optimizers=['sgd']", "train_examples=960")
    task = asked.task(asked.runs()[0], 0.01)
    assert isinstance(task, Classification)
    slow = Slow(task, step=0.0, answer=0.0)
    forecast._forecast(task, "sgd", "")
    assert slow.steps == forecast.LEAST_STEPS


def test_a_unit_of_one_step_has_a_forecast(tmp_path: Path) -> None:
    (found,) = dry_run(request(tmp_path, "optimizers=['sgd']", "batch.size=96"))
    assert found.steps == 3
    assert 0 < found.step_seconds < 60


def test_what_trains_no_model_has_no_forecast(tmp_path: Path) -> None:
    from blockadapt_experiments.core.config import load
    from blockadapt_experiments.experiments.registry import get_experiment
    from blockadapt_experiments.running.runner import Request

    settings = load(get_experiment("toy-landscape"), "smoke")
    assert list(dry_run(Request("toy-landscape", "smoke", settings, tmp_path))) == []


ONE = Forecast("block-adam", "", 1_234_567, 4000, {9: 12, 10: 3456}, 7_654_321, 0.0123, 0.004, 90.0)


def test_the_total_is_over_seeds_and_trials_and_workers(tmp_path: Path) -> None:
    asked = request(tmp_path, "seeds=[0, 1, 2]", "tune.trials=5", "tune.seeds=[8, 9]")
    both = [ONE, replace(ONE, arm="sgd", seconds=10.0)]
    assert total_seconds(both, asked, workers=1, points=0) == 300
    assert total_seconds(both, asked, workers=2, points=5) == 100 * (3 + 10) / 2


def test_the_table_says_it_all() -> None:
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(forecasts_table([ONE, replace(ONE, arm="sgd", variant="M=1", sizes={}, seconds=9000.0)]))
    lines = [line.split() for line in console.export_text().splitlines()]
    assert ["block-adam", "1,234,567", "4,000", "12", "×", "9,", "3,456", "×", "10", "7.7", "12.3", "90", "s"] in lines
    assert ["sgd,", "M=1", "1,234,567", "4,000", "–", "7.7", "12.3", "2.5", "h"] in lines


@pytest.mark.parametrize(
    ("seconds", "words"), [(0.4, "0 s"), (119, "119 s"), (600, "10 min"), (9000, "2.5 h"), (900_000, "10.4 days")]
)
def test_durations_are_in_the_unit_that_fits(seconds: float, words: str) -> None:
    assert duration(seconds) == words


def test_a_forecast_leaves_no_hook_behind(tmp_path: Path) -> None:
    asked = request(tmp_path, "optimizers=['sgd']", "train_examples=960")
    task = asked.task(asked.runs()[0], 0.01)
    assert isinstance(task, Classification)
    forecast._forecast(task, "sgd", "")
    (row,) = task.advance()
    assert row["step"] > forecast.MOST_STEPS
    assert torch.get_num_threads() == 1


def test_the_memory_of_an_optimizer_counts_tensors_in_lists() -> None:
    weight = torch.nn.Parameter(torch.zeros(6, 4))
    optimizer = make_optimizer("soap", torch.nn.ParameterList([weight]), 1e-3, OptimizerSettings(), 10)
    for _ in range(2):
        weight.grad = torch.ones(6, 4)
        optimizer.step()
    kept = 4 * (2 * 6 * 4 + 2 * (6 * 6 + 4 * 4))  # m and v, and each factor with its basis
    assert kept <= state_bytes_of(optimizer) < kept + 64
