"""The small network on CIFAR-10: its size, its variants, continued to the same bits, and our claims."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from blockadapt import BlockAdam, IndexGroups, plan
from blockadapt_experiments.contenders.catalogue import make_optimizer
from blockadapt_experiments.core.config import load, plain
from blockadapt_experiments.experiments.cifar import (
    Cifar,
    judge_blocks,
    judge_clipped,
    judge_measured,
    judge_others,
    judge_seconds,
)
from blockadapt_experiments.experiments.cnn import variant_panels
from blockadapt_experiments.experiments.registry import get_experiment
from blockadapt_experiments.report import write_report
from blockadapt_experiments.report.reading import read
from blockadapt_experiments.results.summary import Summary
from blockadapt_experiments.running import runner
from blockadapt_experiments.running.runner import Request
from support.laboratory import stopped_and_gone_on
from support.run_records import rows_of, write_experiment, write_run

CNN = get_experiment("cifar10-cnn")
ARMS = ["sgd", "adam", "adamw", "soap", "muon", "adabound", "block-adam", "block-adam-clip", "block-adam-auto-clip"]
TINY = (
    "width=4",
    "train_examples=48",
    "test_examples=20",
    "measured_examples=16",
    "batch.size=16",
    "epochs=2",
    "seeds=[0]",
)


def request(out: Path, cifar_dir: Path, *changes: str) -> Request:
    return Request("cifar10-cnn", "smoke", load(CNN, "smoke", (*TINY, *changes)), out, cifar_dir)


def make(cifar_dir: Path, arm: str, *changes: str, tuning: bool = False) -> Cifar:
    asked = request(cifar_dir / "unused", cifar_dir, f"optimizers=['{arm}']", *changes)
    task = asked.task(asked.runs()[0], 1e-3, tuning)
    assert isinstance(task, Cifar)
    return task


# The network and its scales -------------------------------------------------------------------------------------------


def test_the_network_has_three_convolutions_and_one_linear_layer() -> None:
    model = CNN.model(load(CNN, "laptop"))
    shapes = [tuple(parameter.shape) for parameter in model.parameters() if parameter.ndim > 1]
    assert shapes == [(32, 3, 3, 3), (64, 32, 3, 3), (64, 64, 3, 3), (10, 1024)]
    assert sum(parameter.numel() for parameter in model.parameters()) == 66_570
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 10)


def test_the_laptop_scale_is_what_a_reviewer_accepts() -> None:
    settings = load(CNN, "laptop")
    assert list(settings.optimizers) == ARMS
    assert settings.train_examples >= 10_000
    assert settings.test_examples == 10_000
    assert sum(settings.steps(settings.train_examples)) >= 2_000
    assert (settings.schedule.kind, settings.schedule.at) == ("step", (0.5, 0.75))
    optimizer = settings.optimizer
    assert (optimizer.momentum, optimizer.nesterov, optimizer.weight_decay) == (0.9, True, 1e-4)
    assert optimizer.final_lr == pytest.approx(settings.lr["sgd"] / (1 - optimizer.momentum))


def test_block_adam_is_the_librarys_default() -> None:
    """But for the weight decay, which every contender has."""
    settings = load(CNN, "laptop")
    model = CNN.model(settings)
    made = make_optimizer("block-adam", model, 1e-3, settings.optimizer, steps=100)
    default = BlockAdam(model.parameters(), weight_decay=settings.optimizer.weight_decay)
    assert made.defaults == default.defaults


def test_tuning_measures_on_training_images_held_out(cifar_dir: Path) -> None:
    (row,) = make(cifar_dir, "muon", tuning=True).advance()
    assert "validation_accuracy" in row
    assert not any(name.startswith("test") for name in row)


# Runs and variants ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arm", ARMS)
def test_every_contender_takes_an_epoch(cifar_dir: Path, arm: str) -> None:
    task = make(cifar_dir, arm, "epochs=1")
    before = [parameter.detach().clone() for parameter in task.model.parameters()]
    (row,) = task.advance()
    assert math.isfinite(row["train_loss"])
    assert all(not torch.equal(*pair) for pair in zip(before, task.model.parameters(), strict=True))


def test_a_run_that_was_stopped_goes_on_to_the_same_bits(
    tmp_path: Path, cifar_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "SAVING_SHARE", math.inf)
    changes = (
        "optimizers=['muon', 'soap', 'block-adam-clip']",
        "variants=['', 'optimizer.grouping=random,optimizer.block_size=9']",
        "epochs=3",
    )
    found = stopped_and_gone_on(lambda out: request(out, cifar_dir, *changes), tmp_path, leg=2)
    assert len(found) == 2 * 3 * 2  # rows and weights


ABLATIONS = {
    "optimizer.eps=1e-8": ("eps", 1e-8),
    "optimizer.beta2=0.99": ("betas", (0.9, 0.99)),
    "optimizer.refresh_every=10": ("refresh_every", 10),
    "optimizer.bias_correction=false": ("bias_correction", False),
    "optimizer.grouping=chunk": ("grouping", "chunk"),
    "optimizer.weight_decay=0.001": ("weight_decay", 0.001),
}


@pytest.mark.parametrize("variant", ABLATIONS)
def test_an_ablation_reaches_the_optimizer(cifar_dir: Path, variant: str) -> None:
    name, value = ABLATIONS[variant]
    task = make(cifar_dir, "block-adam", f"variants=['{variant}']")
    assert all(group[name] == value for group in task.optimizer.param_groups)


@pytest.mark.parametrize("size", [1, 4, 9, 16, 32])
def test_an_ablation_of_block_sizes_cuts_every_weight_so(cifar_dir: Path, size: int) -> None:
    """Under "auto" convolutions would stay in blocks of 9, whatever the size."""
    variant = f"optimizer.grouping=output,optimizer.block_size={size}"
    task = make(cifar_dir, "block-adam", "width=32", f"variants=['{variant}']")
    assert isinstance(task.optimizer, BlockAdam)
    rows = {row.name: row for row in plan(task.optimizer).rows}
    for name, parameter in task.model.named_parameters():
        if parameter.ndim > 1:
            row = parameter[0].numel()  # the weights into one output; the last run of them may be short
            assert rows[name].sizes == {min(size, row): math.ceil(row / size) * len(parameter)}, name


def test_random_blocks_are_as_large_as_filters(cifar_dir: Path) -> None:
    task = make(cifar_dir, "block-adam", "variants=['optimizer.grouping=random,optimizer.block_size=9']")
    assert isinstance(task.optimizer, BlockAdam)
    rows = {row.name: row for row in plan(task.optimizer).rows}
    assert rows["conv2.weight"].sizes == {9: 4 * 8}
    assert all(isinstance(group["grouping"], IndexGroups) for group in task.optimizer.param_groups)


# Claims ---------------------------------------------------------------------------------------------------------------


def summary_of(
    out: Path, errors: dict[str, Sequence[float]], legs: dict[str, float] | None = None, variants: Sequence[str] = ("",)
) -> Summary:
    """Runs of three epochs that end with these test errors, one a seed; epochs take these seconds, 1 if not given."""
    seeds = range(len(next(iter(errors.values()))))
    told = {**plain(load(CNN, "laptop")), "optimizers": [*errors], "seeds": [*seeds], "variants": [*variants]}
    write_experiment(out, "cifar10-cnn", settings=told)
    for arm, ends in errors.items():
        for place, variant in enumerate(variants):
            for seed, end in zip(seeds, ends, strict=True):
                rows = rows_of(test_error=[90.0, end + 10, end + place])
                write_run(out, arm, variant, seed, rows, leg=(legs or {}).get(arm, 1.0))
    return read(out)


def test_blocks_are_judged_against_diagonals_over_pairs_of_seeds(tmp_path: Path) -> None:
    """The seeds differ by more than the methods; paired, the methods differ all the same."""
    errors = {"adam": (33, 36, 39), "adamw": (32, 35.1, 38), "soap": (20, 20, 20), "block-adam": (31, 34, 37)}
    verdict = judge_blocks(summary_of(tmp_path, errors))
    assert verdict.held is True
    assert verdict.words == (
        "Test error of Block-Adam at the end: −2 ± 0 points against Adam; −1.03 ± 0.14 points against AdamW."
    )


@pytest.mark.parametrize(("soap", "held"), [((40, 41.1, 42), True), ((20, 21.1, 22), False), ((20, 32, 45), None)])
def test_the_others_are_judged_each(tmp_path: Path, soap: Sequence[float], held: bool | None) -> None:
    errors = {"sgd": (36, 37, 38.1), "soap": soap, "adam": (1, 1, 1), "block-adam": (31, 32, 33)}
    assert judge_others(summary_of(tmp_path, errors)).held is held


def test_clipping_must_beat_both_of_its_ends(tmp_path: Path) -> None:
    errors = {"sgd": (36, 37, 38.1), "block-adam": (31, 32, 33), "block-adam-clip": (30, 31.1, 32)}
    assert judge_clipped(summary_of(tmp_path / "1", errors)).held is True
    assert judge_clipped(summary_of(tmp_path / "2", {**errors, "sgd": (29, 30, 31)})).held is False


def test_a_measured_end_must_beat_a_given_one_too(tmp_path: Path) -> None:
    errors = {"sgd": (36, 37, 38.1), "block-adam": (31, 32, 33), "block-adam-auto-clip": (30, 31.1, 32)}
    assert judge_measured(summary_of(tmp_path / "1", errors)).held is True
    assert judge_measured(summary_of(tmp_path / "2", {**errors, "block-adam-clip": (29, 30, 31)})).held is False


def test_at_equal_time_a_slow_run_is_judged_by_what_it_had_reached(tmp_path: Path) -> None:
    errors = {"adam": (33, 36, 39), "block-adam": (31, 34, 37)}
    assert judge_seconds(summary_of(tmp_path / "1", errors)).held is True
    verdict = judge_seconds(summary_of(tmp_path / "2", errors, {"block-adam": 1.5}))
    assert verdict.held is False
    assert verdict.words == ("Test error of Block-Adam: 8 ± 0 points against Adam (67% and 100% of the epochs done).")


def test_variants_are_compared_with_the_first_over_pairs_of_seeds(tmp_path: Path) -> None:
    variants = ("optimizer.block_size=10", "optimizer.block_size=1")
    summary = summary_of(tmp_path, {"block-adam": (31, 34, 37)}, variants=variants)
    (panel,) = variant_panels(summary)
    assert [*panel.bars] == ["optimizer.block_size=10", "optimizer.block_size=1 (1 ± 0)"]
    assert [mean for mean, _ in panel.bars.values()] == pytest.approx([34, 35])
    assert tmp_path / "report" / "cifar10-cnn-variants.png" in write_report(tmp_path)


def test_without_variants_there_is_no_picture_of_them(tmp_path: Path) -> None:
    summary_of(tmp_path, {"block-adam": (31, 34, 37)})
    assert not [path for path in write_report(tmp_path) if "variants" in path.name]
