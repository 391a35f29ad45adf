"""MNIST experiments: the images that a net is given, and verdicts by hand from curves made up for them."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from blockadapt_experiments.claims.claim import Verdict
from blockadapt_experiments.core.config import load
from blockadapt_experiments.data.images import load_images
from blockadapt_experiments.experiments.mnist import judge_early, judge_higher, judge_late, judge_steady
from blockadapt_experiments.experiments.registry import get_experiment
from blockadapt_experiments.report.reading import read
from blockadapt_experiments.results.measurements import RunKey
from blockadapt_experiments.results.summary import Summary
from support.run_records import rows_of, write_experiment, write_run

EPOCHS = 10


@pytest.mark.parametrize(("name", "parameters"), [("mnist-lenet300", 266_610), ("mnist-lenet5", 431_080)])
def test_a_run_has_the_first_images_and_the_papers_net(name: str, parameters: int) -> None:
    experiment = get_experiment(name)
    changes = ("data=digits", "train_examples=50", "test_examples=20")
    settings = load(experiment, "smoke", changes)
    task = experiment.task(settings, RunKey("sgd", "", 0), 0.1, None, False)
    assert sum(weight.numel() for weight in task.model.parameters()) == parameters
    train, test = load_images("digits")
    assert torch.equal(task.sets.train.labels, train.labels[:50])
    assert torch.equal(task.sets.held_out["test"].labels, test.labels[:20])
    pixels = task.prepare(task.sets.train.images)
    assert pixels.shape == (50, 1, 28, 28)
    assert pixels.dtype == torch.float32
    inner = pixels[..., 2:-2, 2:-2]
    for row in range(3):
        for column in range(3):
            assert torch.equal(256 * inner[..., row::3, column::3], train.images[:50].float())
    assert inner.sum() == pixels.sum()


def test_images_of_the_right_size_are_left_alone() -> None:
    from blockadapt_experiments.experiments.mnist import _enlarged

    images = torch.randint(0, 256, (3, 1, 28, 28), dtype=torch.uint8)
    assert torch.equal(_enlarged(images), images)


class Curves:
    """Writes runs of arms whose curves are known."""

    def __init__(self, out: Path, arms: list[str], seeds: int) -> None:
        self.out, self.seeds = out, range(seeds)
        write_experiment(out, "mnist-lenet300", optimizers=arms, seeds=list(self.seeds))

    def add(self, arm: str, loss: float, swing: float, accuracy: float, wobble: float) -> None:
        """Loss halves every epoch but for the last two, which are `swing` apart; accuracies `wobble` apart."""
        for seed in self.seeds:
            factor = 1 + 0.01 * seed
            losses = loss * factor * 0.5 ** np.arange(EPOCHS)
            losses[-2:] = 0.01, 0.01 + swing * factor
            accuracies = np.full(EPOCHS, accuracy + 1e-4 * seed)
            accuracies[-2:] += 0, wobble * factor
            write_run(self.out, arm, "", seed, rows_of(train_loss=losses.tolist(), test_accuracy=accuracies.tolist()))

    def summary(self) -> Summary:
        return read(self.out)


def judged(summary: Summary) -> list[bool | None]:
    return [judge(summary).held for judge in (judge_early, judge_late, judge_steady, judge_higher)]


def test_all_claims_hold_where_they_should(tmp_path: Path) -> None:
    curves = Curves(tmp_path, ["paper-adam", "block-adam", "rmsprop", "block-rmsprop", "ggt"], seeds=3)
    curves.add("paper-adam", 1.0, 0.008, 0.95, 0.010)
    curves.add("rmsprop", 1.0, 0.008, 0.95, 0.010)
    curves.add("ggt", 3.0, 0.008, 0.95, 0.010)
    curves.add("block-adam", 1.2, 0.002, 0.96, 0.002)
    curves.add("block-rmsprop", 1.2, 0.002, 0.96, 0.002)
    summary = curves.summary()
    assert judged(summary) == [True, True, True, True]
    # All seeds have the same ratio: 1.2 early, and 0.002 / 0.008 late.
    assert (
        "Block-Adam against Adam (paper): early training loss ×1.2 (1.2 to 1.2), alike if within ×1.5"
        in judge_early(summary).words
    )
    assert "Block-Adam against Adam (paper): late oscillation of the training loss ×0.25" in judge_late(summary).words
    # Means over ten epochs: 0.96 + wobble/10 against 0.95 + wobble/10, wobbles 0.2 and 1 point, times 1, 1.01, 1.02.
    assert (
        "Block-Adam against Adam (paper): test accuracy, mean over epochs, differs by 0.919 ±"
        in judge_higher(summary).words
    )
    # Sample deviations of two points: their distance over √2.
    expected = -100 * 0.008 * 1.01 / np.sqrt(2)
    assert f"Block-Adam against GGT: late oscillation of the test accuracy differs by −{-expected:.3g} ±" in (
        judge_steady(summary).words
    )
    assert "GGT" not in judge_early(summary).words


def test_adam_as_people_use_it_is_judged_too(tmp_path: Path) -> None:
    curves = Curves(tmp_path, ["adam", "block-adam"], seeds=3)
    curves.add("adam", 1.0, 0.008, 0.95, 0.010)
    curves.add("block-adam", 1.2, 0.002, 0.96, 0.002)
    summary = curves.summary()
    assert judged(summary) == [True, True, True, True]
    assert "Block-Adam against Adam: late oscillation of the training loss ×0.25" in judge_late(summary).words


def test_the_opposite_of_every_claim_is_seen(tmp_path: Path) -> None:
    curves = Curves(tmp_path, ["paper-adam", "block-adam"], seeds=3)
    curves.add("paper-adam", 1.0, 0.002, 0.96, 0.002)
    curves.add("block-adam", 2.0, 0.008, 0.95, 0.010)
    assert judged(curves.summary()) == [False, False, False, False]


def test_one_failed_pair_is_enough(tmp_path: Path) -> None:
    curves = Curves(tmp_path, ["paper-adam", "block-adam", "rmsprop", "block-rmsprop"], seeds=3)
    curves.add("paper-adam", 1.0, 0.008, 0.95, 0.010)
    curves.add("block-adam", 1.0, 0.002, 0.96, 0.002)
    curves.add("rmsprop", 1.0, 0.002, 0.96, 0.002)
    curves.add("block-rmsprop", 2.0, 0.008, 0.95, 0.010)
    assert judged(curves.summary()) == [False, False, False, False]


def test_one_seed_cannot_tell(tmp_path: Path) -> None:
    curves = Curves(tmp_path, ["paper-adam", "block-adam"], seeds=1)
    curves.add("paper-adam", 1.0, 0.008, 0.95, 0.010)
    curves.add("block-adam", 1.0, 0.002, 0.96, 0.002)
    assert judged(curves.summary()) == [None] * 4
    assert "(one seed)" in judge_late(curves.summary()).words


def test_without_a_pair_there_is_nothing_to_judge(tmp_path: Path) -> None:
    curves = Curves(tmp_path, ["sgd", "block-adam"], seeds=3)
    curves.add("sgd", 1.0, 0.008, 0.95, 0.010)
    curves.add("block-adam", 1.0, 0.002, 0.96, 0.002)
    nothing = Verdict(None, "The methods that the paper compares did not run together.")
    assert judge_early(curves.summary()) == judge_higher(curves.summary()) == nothing


@pytest.mark.parametrize("last", [1.0, float("nan")])
def test_a_diverged_run_makes_no_verdict(tmp_path: Path, last: float) -> None:
    """Whether its values show it or only the run itself says so: also about what was measured before."""
    curves = Curves(tmp_path, ["paper-adam", "block-adam"], seeds=2)
    curves.add("block-adam", 2.0, 0.002, 0.96, 0.002)
    for seed in (0, 1):
        values = [1.0] * (EPOCHS - 1) + [last if seed else 1.0]
        rows = rows_of(train_loss=values, test_accuracy=values)
        write_run(tmp_path, "paper-adam", "", seed, rows, numbers={"diverged": seed})
    assert judged(curves.summary()) == [None] * 4
    for judge in (judge_early, judge_late, judge_steady, judge_higher):
        assert re.search(r"differs by an unknown amount|×\? \(not known\)", judge(curves.summary()).words)
