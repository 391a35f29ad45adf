"""Pictures of the TC-VAE say what their axes are."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("matplotlib", reason="needs the `experiments` extra")

from blockadapt_experiments.core.config import load, plain
from blockadapt_experiments.experiments.registry import get_experiment
from blockadapt_experiments.experiments.tcvae.drawing import SPAN, traversal_figure
from blockadapt_experiments.report.reading import read
from support.run_records import write_experiment


def test_traversals_are_labelled_with_the_values_of_the_latents(tmp_path: Path) -> None:
    arrays = {"latent_kl": np.array([0.5, 2.0, 1.0]), "traversals": np.zeros((3, len(SPAN), 8, 8))}
    write_experiment(tmp_path, "tcvae", "smoke", plain(load(get_experiment("tcvae"), "smoke")))
    (axes,) = traversal_figure(read(tmp_path), "beta=6", {"adam": arrays}).axes
    assert axes.get_xlabel() == "value of the latent"
    assert [float(label.get_text()) for label in axes.get_xticklabels()] == pytest.approx(SPAN, abs=0.05)
    assert [label.get_text() for label in axes.get_yticklabels()] == ["z2  2", "z3  1", "z1  0.5"]
