"""Pictures say what their axes are, and there is none of a single point."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("matplotlib", reason="needs the `experiments` extra")

from blockadapt_experiments.commands.demo import Epoch, Run
from blockadapt_experiments.commands.demo_plots import write_plots
from blockadapt_experiments.core.config import load, plain
from blockadapt_experiments.experiments.registry import get_experiment
from blockadapt_experiments.experiments.tcvae.drawing import SPAN, traversal_figure
from blockadapt_experiments.experiments.toy.drawing import path_figure
from blockadapt_experiments.report.reading import read
from blockadapt_experiments.results.measurements import RunKey
from blockadapt_experiments.results.summary import Summary
from support.run_records import write_experiment


def summary_of(out: Path, name: str) -> Summary:
    write_experiment(out, name, "smoke", plain(load(get_experiment(name), "smoke")))
    return read(out)


def test_paths_are_drawn_over_the_weights_by_name(tmp_path: Path) -> None:
    toy = get_experiment("toy-trajectories")
    settings = load(toy, "smoke")
    task = toy.task(settings, RunKey("rmsprop", "landscape-0", 0), 0.01, None, False)
    task.advance()
    arrays = task.outcome().arrays
    shown = {"landscape-0": {arm: [arrays] for arm in ("rmsprop", "block-rmsprop")}}
    for axes in path_figure(summary_of(tmp_path, toy.name), shown).axes[:2]:
        assert [axes.get_xlabel(), axes.get_ylabel()] == arrays["edges"].tolist()
        assert axes.get_xlabel().startswith("W")


def test_traversals_are_labelled_with_the_values_of_the_latents(tmp_path: Path) -> None:
    arrays = {"latent_kl": np.array([0.5, 2.0, 1.0]), "traversals": np.zeros((3, len(SPAN), 8, 8))}
    (axes,) = traversal_figure(summary_of(tmp_path, "tcvae"), "beta=6", {"adam": arrays}).axes
    assert axes.get_xlabel() == "value of the latent"
    assert [float(label.get_text()) for label in axes.get_xticklabels()] == pytest.approx(SPAN, abs=0.05)
    assert [label.get_text() for label in axes.get_yticklabels()] == ["z2  2", "z3  1", "z1  0.5"]


@pytest.mark.parametrize(("epochs", "files"), [(1, []), (2, ["training_loss.png", "test_accuracy.png"])])
def test_the_demo_draws_no_single_point(tmp_path: Path, epochs: int, files: list[str]) -> None:
    run = Run("MLP", "Adam", 0.1, (Epoch(1.0, 0.5, 0.1),) * epochs, 1, 1, 1)
    assert [path.name for path in write_plots([run], "one seed", tmp_path)] == files
