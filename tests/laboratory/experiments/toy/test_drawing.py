"""Pictures of the toy network say what their axes are."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("matplotlib", reason="needs the `experiments` extra")

from blockadapt_experiments.core.config import load, plain
from blockadapt_experiments.experiments.registry import get_experiment
from blockadapt_experiments.experiments.toy.drawing import path_figure
from blockadapt_experiments.report.reading import read
from blockadapt_experiments.results.measurements import RunKey
from support.run_records import write_experiment


def test_paths_are_drawn_over_the_weights_by_name(tmp_path: Path) -> None:
    toy = get_experiment("toy-trajectories")
    settings = load(toy, "smoke")
    task = toy.task(settings, RunKey("rmsprop", "landscape-0", 0), 0.01, None, False)
    task.advance()
    arrays = task.outcome().arrays
    shown = {"landscape-0": {arm: [arrays] for arm in ("rmsprop", "block-rmsprop")}}
    write_experiment(tmp_path, toy.name, "smoke", plain(settings))
    for axes in path_figure(read(tmp_path), shown).axes[:2]:
        assert [axes.get_xlabel(), axes.get_ylabel()] == arrays["edges"].tolist()
        assert axes.get_xlabel().startswith("W")
