"""The demo's pictures: there is none of a single point."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("matplotlib", reason="needs the `experiments` extra")

from blockadapt_experiments.commands.demo import DemoRun, Epoch
from blockadapt_experiments.commands.demo_plots import write_plots


@pytest.mark.parametrize(("epochs", "files"), [(1, []), (2, ["training_loss.png", "test_accuracy.png"])])
def test_the_demo_draws_no_single_point(tmp_path: Path, epochs: int, files: list[str]) -> None:
    run = DemoRun("MLP", "Adam", 0.1, (Epoch(1.0, 0.5, 0.1),) * epochs, 1, 1, 1)
    assert [path.name for path in write_plots([run], "one seed", tmp_path)] == files
