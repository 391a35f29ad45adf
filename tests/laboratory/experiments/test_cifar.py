"""CIFAR: images as DenseNet's code changes them, blocks by kind of layer, the paper's schedule, table and claims."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.colors import to_hex
from torch import Tensor

from blockadapt import BlockAdam, plan
from blockadapt_experiments.claims.claim import Verdict
from blockadapt_experiments.contenders.catalogue import CONTENDERS, make_optimizer
from blockadapt_experiments.contenders.schedules import make_schedule
from blockadapt_experiments.core import training
from blockadapt_experiments.core.config import load, plain
from blockadapt_experiments.core.training import best_device
from blockadapt_experiments.data.examples import Examples
from blockadapt_experiments.drawing.bars import bar_figure
from blockadapt_experiments.drawing.colours import COLOURS, STYLES
from blockadapt_experiments.experiments.cifar import (
    DATA,
    TABLE_1,
    Cifar,
    CifarSettings,
    augment,
    judge_clipping,
    judge_early,
    judge_lowest,
    judge_time,
    normalised,
    table_1_panels,
)
from blockadapt_experiments.experiments.registry import get_experiment
from blockadapt_experiments.report import write_report
from blockadapt_experiments.report.reading import read
from blockadapt_experiments.results.summary import Summary
from blockadapt_experiments.running import runner
from blockadapt_experiments.running.runner import Request
from support.laboratory import stopped_and_gone_on
from support.run_records import rows_of, write_experiment, write_run

ARMS = [
    "sgd", "paper-adam", "adam", "adabound", "amsbound", "ggt", "soap", "block-adam", "block-adam-clip",
    "block-rmsprop",
]  # fmt: skip
TINY = (
    "depth=10",
    "growth=4",
    "train_examples=48",
    "test_examples=20",
    "measured_examples=16",
    "batch.size=16",
    "epochs=2",
    "seeds=[0]",
)


def request(out: Path, cifar_dir: Path, *changes: str, experiment: str = "cifar10-densenet") -> Request:
    settings = load(get_experiment(experiment), "smoke", (*TINY, *changes))
    return Request(experiment, "smoke", settings, out, cifar_dir)


def make(cifar_dir: Path, arm: str = "sgd", *changes: str, tuning: bool = False, lr: float = 0.01) -> Cifar:
    asked = request(cifar_dir / "unused", cifar_dir, f"optimizers=['{arm}']", *changes)
    (key,) = asked.runs()
    task = asked.task(key, lr, tuning)
    assert isinstance(task, Cifar)
    return task


# Images ---------------------------------------------------------------------------------------------------------------


def one_by_one(images: Tensor, generator: torch.Generator) -> Tensor:
    """Flip, pad and crop as one would write it down."""
    flips = torch.rand(len(images), generator=generator)
    places = torch.randint(0, 9, (2, len(images), 1), generator=generator)
    changed = []
    for image, flip, top, left in zip(images, flips, *places.squeeze(-1).tolist(), strict=True):
        canvas = torch.zeros(3, 40, 40)
        canvas[:, 4:36, 4:36] = image.flip(2) if flip < 0.5 else image
        changed.append(canvas[:, top : top + 32, left : left + 32])
    return torch.stack(changed)


def test_augmentation_flips_pads_and_crops() -> None:
    images = torch.randn(200, 3, 32, 32)
    changed = augment(images, torch.Generator().manual_seed(7))
    assert torch.equal(changed, one_by_one(images, torch.Generator().manual_seed(7)))


def test_augmentation_takes_every_place_both_ways() -> None:
    image = torch.randn(1, 3, 32, 32)
    changed = augment(image.expand(4000, -1, -1, -1), torch.Generator().manual_seed(0))
    kinds = torch.unique(changed.flatten(1), dim=0)
    assert len(kinds) == 2 * 9 * 9


@pytest.mark.parametrize("name", [*DATA])
def test_pixels_are_normalised_by_channel(name: str) -> None:
    images = torch.randint(0, 256, (6, 3, 32, 32), dtype=torch.uint8)
    found = normalised(Examples(images, torch.arange(6)), 4, DATA[name])
    mean, deviation = {
        "cifar10-densenet": ((125.3, 123.0, 113.9), (63.0, 62.1, 66.7)),
        "cifar100-densenet": ((129.3, 124.1, 112.4), (68.2, 65.4, 70.4)),
    }[name]
    expected = (images[:4].numpy().transpose(0, 2, 3, 1).astype(np.float64) - mean) / deviation
    np.testing.assert_allclose(found.images.numpy(), expected.transpose(0, 3, 1, 2), rtol=1e-6, atol=1e-6)
    assert found.labels.tolist() == [0, 1, 2, 3]
    assert images.dtype == torch.uint8


def test_the_margin_is_of_the_mean_colour(cifar_dir: Path) -> None:
    task = make(cifar_dir)
    seen: list[Tensor] = []
    task.model.register_forward_pre_hook(lambda model, inputs: seen.append(inputs[0]) if model.training else None)
    task.advance()
    pixels = torch.cat(seen)
    outside = (pixels == 0).all(dim=1).double().mean()  # no pixel of an image is: the means are no integers
    # A crop moved by a and b leaves (32 − a)(32 − b) of its pixels inside, and the mean of |a − 4| is 20/9.
    assert 0.09 < outside < 0.18


# Blocks, steps, schedule ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", ["laptop", "paper"])
def test_blocks_follow_the_kind_of_layer(scale: str) -> None:
    settings = load(get_experiment("cifar10-densenet"), scale)
    model = get_experiment("cifar10-densenet").model(settings)
    optimizer = make_optimizer("block-adam", model, 1e-3, settings.optimizer, steps=100)
    assert isinstance(optimizer, BlockAdam)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    rows = {row.name: row for row in plan(optimizer).rows}
    assert rows.keys() == shapes.keys()
    for name, row in rows.items():
        shape = shapes[name]
        if shape[2:] == (3, 3):
            assert (row.grouping, row.sizes) == ("filter", {9: shape[0] * shape[1]}), name
        elif shape[2:] == (1, 1) or name == "output.weight":
            assert (row.grouping, row.sizes) == ("input", {10: math.ceil(shape[0] / 10) * shape[1]}), name
        else:
            assert row.grouping == "chunk", name


@pytest.mark.parametrize("name", [*DATA])
def test_the_paper_scale_is_the_papers(name: str) -> None:
    settings = load(get_experiment(name), "paper")
    assert list(settings.optimizers) == ARMS
    assert (settings.depth, settings.growth, settings.epochs, settings.batch.size) == (100, 12, 300, 64)
    assert (settings.train_examples, settings.test_examples) == (50_000, 10_000)
    optimizer = settings.optimizer
    assert (optimizer.momentum, optimizer.nesterov, optimizer.weight_decay) == (0.9, True, 1e-4)
    assert (optimizer.eps, optimizer.beta1, optimizer.beta2, optimizer.final_lr) == (1e-4, 0.9, 0.999, 0.1)
    steps = settings.steps(50_000)
    assert sum(steps) == 234_600
    model = get_experiment(name).model(settings)
    assert model.output.out_features == DATA[name].classes
    clipped = make_optimizer("block-adam-clip", model, 1e-3, optimizer, sum(steps))
    assert clipped.param_groups[0]["clip"].final_lr == 0.1
    assert clipped.param_groups[0]["clip"].gamma == pytest.approx(1e-3, rel=2e-3)


def test_the_paper_decays_from_epochs_150_and_225_on() -> None:
    settings = load(get_experiment("cifar10-densenet"), "paper")
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    schedule = make_schedule(settings.schedule, optimizer, settings.epochs, steps_per_epoch=2)
    rates = []
    for _ in range(settings.epochs):
        rates.append(schedule.lr[0])
        schedule.after_step()
        assert schedule.lr[0] == rates[-1]  # nothing happens within an epoch
        schedule.after_step()
        schedule.after_epoch()
    expected = [0.1] * 149 + [0.01] * 75 + [0.001] * 76
    assert rates == pytest.approx(expected)


@pytest.mark.parametrize("name", [*DATA])
def test_smaller_scales_are_smaller_and_at_laptop_scale_what_people_use(name: str) -> None:
    paper = load(get_experiment(name), "paper")
    for scale, changed in (("smoke", set()), ("laptop", {"bias_correction", "final_lr", "clip_progress"})):
        settings = load(get_experiment(name), scale)
        assert settings.schedule.at == (0.5, 0.75)
        same = ("growth", "batch", "autocast", "checkpointing")
        assert all(getattr(settings, key) == getattr(paper, key) for key in same)
        ours, theirs = plain(settings.optimizer), plain(paper.optimizer)
        assert {key for key in ours if ours[key] != theirs[key]} == {"ggt_window", *changed}


def test_a_shorter_run_has_a_larger_gamma(cifar_dir: Path) -> None:
    task = make(cifar_dir, "block-adam-clip")
    assert task.work.steps == 6
    assert task.optimizer.param_groups[0]["clip"].gamma == pytest.approx(235 / 6)


@pytest.mark.parametrize("change", ["depth=21", "growth=0", "train_examples=0", "test_examples=-1"])
def test_settings_that_cannot_be_are_refused(change: str) -> None:
    with pytest.raises(ValueError, match=f"^settings: `{change.partition('=')[0]}` must be"):
        load(get_experiment("cifar10-densenet"), "smoke", [change])


# Runs -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arm", ARMS)
def test_every_optimizer_of_the_paper_takes_a_step(cifar_dir: Path, arm: str) -> None:
    task = make(cifar_dir, arm, "epochs=1", lr=1e-4)
    before = [parameter.detach().clone() for parameter in task.model.parameters()]
    (row,) = task.advance()
    assert row["test_error"] == 100 * (1 - row["test_accuracy"])
    assert math.isfinite(row["train_loss"])
    assert not task.diverged
    assert all(not torch.equal(*pair) for pair in zip(before, task.model.parameters(), strict=True))


def test_cifar_100_has_its_labels_and_outputs(cifar_dir: Path) -> None:
    asked = request(cifar_dir / "unused", cifar_dir, "optimizers=['sgd']", experiment="cifar100-densenet")
    task = asked.task(asked.runs()[0], 0.01)
    assert isinstance(task, Cifar)
    assert int(task.sets.train.labels.max()) > 9
    (row,) = task.advance()
    assert row["test_error"] >= 50


def test_tuning_measures_on_training_images_held_out(cifar_dir: Path) -> None:
    task = make(cifar_dir, tuning=True)
    assert len(task.sets.train) == 40
    (row,) = task.advance()
    assert "validation_accuracy" in row
    assert not any(name.startswith("test") for name in row)


def test_a_run_that_was_stopped_goes_on_to_the_same_bits(
    tmp_path: Path, cifar_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "SAVING_SHARE", math.inf)
    changes = ("optimizers=['block-adam-clip', 'soap']", "epochs=3", "checkpointing=true")
    assert len(stopped_and_gone_on(lambda out: request(out, cifar_dir, *changes), tmp_path, leg=2)) == 4


def test_checkpointing_changes_no_number(cifar_dir: Path) -> None:
    rows = [make(cifar_dir, "block-adam", change).advance() for change in ("checkpointing=false", "checkpointing=true")]
    assert rows[0] == rows[1]


def test_autocast_computes_in_bfloat16_and_keeps_all_else_in_float32(cifar_dir: Path) -> None:
    seen: dict[bool, set[torch.dtype]] = {}
    losses = {}
    for autocast in (False, True):
        task = make(cifar_dir, "block-adam", f"autocast={str(autocast).lower()}", lr=1e-4)
        found = seen.setdefault(autocast, set())
        conv = next(module for module in task.model.modules() if isinstance(module, torch.nn.Conv2d))
        conv.register_forward_hook(lambda module, inputs, output, found=found: found.add(output.dtype))  # type: ignore[misc]
        (row,) = task.advance()
        losses[autocast] = row["train_loss"]
        assert task._scores(task.sets.train.images[:2]).dtype == torch.float32  # the loss is computed from these
        assert {parameter.dtype for parameter in task.model.parameters()} == {torch.float32}
        kept = {value.dtype for state in task.optimizer.state.values() for value in state.values()}
        assert {dtype for dtype in kept if dtype.is_floating_point} == {torch.float32}
    assert seen == {False: {torch.float32}, True: {torch.bfloat16}}
    assert losses[True] != losses[False]
    assert losses[True] == pytest.approx(losses[False], rel=0.05)


def test_measuring_does_not_depend_on_how_many_images_at_once(cifar_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (together,) = make(cifar_dir).advance()
    monkeypatch.setattr("blockadapt_experiments.experiments.cifar.EVALUATION_BATCH", 7)
    (apart,) = make(cifar_dir).advance()
    assert apart == pytest.approx(together, rel=1e-5)
    assert apart["train_loss"] != together["train_loss"]  # rounded differently: it was indeed done in pieces


def test_a_gpu_is_taken_if_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for available, device in ((True, "cuda"), (False, "cpu")):
        monkeypatch.setattr(training.torch.cuda, "is_available", lambda available=available: available)
        assert best_device() == torch.device(device)


# Claims ---------------------------------------------------------------------------------------------------------------


def summary_of(
    out: Path, errors: dict[str, Sequence[float]], losses: dict[str, float] | None = None, **changes: Any
) -> Summary:
    """Records of runs that end with these test errors, one a seed, with these early training losses and times."""
    seeds = range(len(next(iter(errors.values()))))
    settings = load(get_experiment("cifar10-densenet"), "laptop")
    told = {**plain(settings), "optimizers": [*errors], "seeds": [*seeds]}
    write_experiment(out, "cifar10-densenet", settings=told)
    for arm, ends in errors.items():
        for seed, end in zip(seeds, ends, strict=True):
            early = (losses or {}).get(arm, 1.0) * (1 + 0.01 * seed)
            accuracy = 1 - end / 100
            rows = rows_of(
                train_loss=[early, 0.5],
                test_accuracy=[0.1, accuracy],
                test_error=[90.0, end],
            )
            numbers = {"diverged": 1.0} if arm in changes.get("diverged", ()) else {}
            leg = changes.get("legs", {}).get(arm, 0.5)
            write_run(out, arm, "", seed, rows, numbers=numbers, leg=leg)
    return read(out)


@pytest.mark.parametrize(
    ("errors", "held"),
    [
        ({"sgd": (52, 53, 54), "paper-adam": (60, 61, 62), "block-adam-clip": (50, 51, 52.1)}, True),
        ({"sgd": (49, 50, 51), "paper-adam": (60, 61, 62), "block-adam-clip": (50, 51.1, 52)}, False),
        ({"sgd": (52, 50, 51), "paper-adam": (60, 61, 62), "block-adam-clip": (50, 51, 52)}, None),
        ({"sgd": (52, 53, 54), "soap": (40, 41, 42), "block-adam-clip": (50, 51, 52.1)}, True),  # no part of the table
        ({"sgd": (52, 53, 54), "paper-adam": (60, 61, 62)}, None),
    ],
)
def test_the_lowest_error_is_judged_against_the_papers_table(
    tmp_path: Path, errors: dict[str, Sequence[float]], held: bool | None
) -> None:
    assert judge_lowest(summary_of(tmp_path, errors)).held is held


def test_words_carry_our_scale_and_the_papers_numbers(tmp_path: Path) -> None:
    errors = {"sgd": (52, 53, 54), "ggt": (60, 61, 62), "block-adam-clip": (50, 51, 52.3)}
    assert judge_lowest(summary_of(tmp_path, errors)) == Verdict(
        True,
        "DenseNet-BC-16-12, 10 epochs, 3,200 images. Test error of Block-Adam + clip: "
        "−1.9 ± 0.43 points against SGD (−0.17 in the paper); −9.9 ± 0.43 points against GGT (−1.99 in the paper).",
    )


def test_what_the_table_does_not_name_is_judged_as_ours(tmp_path: Path) -> None:
    ends = {"sgd": (52, 53, 54), "adamw": (48, 49, 50), "soap": (40, 41, 42), "block-adam": (45, 46.1, 47)}
    ends["block-adam-auto-clip"] = (44, 45, 46)
    summary = summary_of(tmp_path, ends)
    claims = {claim.paper: claim.judge(summary) for claim in get_experiment("cifar10-densenet").claims}
    ours = [verdict for paper, verdict in claims.items() if paper.startswith("Ours: ")]
    assert [verdict.held for verdict in ours] == [True, False, None, True, False]
    assert "points against AdamW" in ours[0].words
    assert "points against SOAP" in ours[1].words
    assert "Block-Adam + auto clip at the end: −8 ± 0 points against SGD" in ours[3].words


def test_a_run_that_diverged_is_no_evidence(tmp_path: Path) -> None:
    errors = {"sgd": (90, 90, 90), "block-adam-clip": (50, 51, 52.1)}
    verdict = judge_lowest(summary_of(tmp_path, errors, diverged=["sgd"]))
    assert verdict.held is None
    assert "an unknown amount against SGD" in verdict.words


def test_clipping_is_judged_against_the_same_method_without(tmp_path: Path) -> None:
    errors = {"sgd": (1, 1, 1), "block-adam": (55, 56, 57), "block-adam-clip": (50, 51, 52.1)}
    assert judge_clipping(summary_of(tmp_path, errors)).held is True


@pytest.mark.parametrize(("ours", "held"), [(1.0, True), (1.4, True), (1.6, False)])
def test_early_speed_is_judged_against_the_fastest(tmp_path: Path, ours: float, held: bool) -> None:
    errors = dict.fromkeys(("sgd", "adam", "block-adam-clip"), (50, 51, 52))
    losses = {"sgd": 3.0, "adam": 1.0, "block-adam-clip": ours}
    verdict = judge_early(summary_of(tmp_path, errors, losses))
    assert verdict.held is held
    assert f"×{ours:g} ({ours:g} to {ours:g}) of that of Adam" in verdict.words


@pytest.mark.parametrize(("seconds", "held"), [(0.9, True), (1.1, False)])
def test_time_is_judged_by_twice_that_of_adam(tmp_path: Path, seconds: float, held: bool) -> None:
    errors = dict.fromkeys(("adam", "block-adam"), (50, 51, 52))
    verdict = judge_time(summary_of(tmp_path, errors, legs={"adam": 0.5, "block-adam": seconds}))
    assert verdict.held is held
    assert f"×{2 * seconds:.3g} the time of Adam" in verdict.words


def test_the_papers_table_stands_beside_ours_under_its_scale(tmp_path: Path) -> None:
    errors = {"sgd": (52, 53, 54), "soap": (50, 51, 52), "block-adam-clip": (50, 51, 52.1)}
    summary = summary_of(tmp_path, errors, diverged=["soap"])
    paper, here = table_1_panels(summary)
    assert "300 epochs, 50,000 images" in paper.heading
    assert "laptop scale: DenseNet-BC-16-12, 10 epochs, 3,200 images" in here.heading
    assert {label: mean for label, (mean, _) in paper.bars.items()} == {
        "SGD": 4.51, "Adam (paper)": 6.07, "AdaBound": 4.78, "AMSBound": 4.77, "GGT": 6.33, "Block-Adam + clip": 4.34,
    }  # fmt: skip
    assert here.bars["SGD"] == pytest.approx((53, 4.3027 / math.sqrt(3)), rel=1e-4)  # t₀.₉₇₅(2) = 4.3027
    left, right = bar_figure("title", "unit", [paper, here]).axes
    shown = [to_hex(bar.get_facecolor()).upper() for bar in right.patches]
    assert shown == [COLOURS[STYLES[arm].colour] for arm in ("sgd", "block-adam-clip")]
    words = [{text.get_text() for text in axes.texts} for axes in (left, right)]
    assert words[0] == {"4.51", "6.07", "4.78", "4.77", "6.33", "4.34", "–"}
    assert words[1] == {"53.0 ± 2.5", "diverged", "51.0 ± 2.6", "–"}
    assert [label.get_text() for label in left.get_yticklabels()][:3] == ["SGD", "SOAP", "Block-Adam + clip"]


def test_the_report_has_the_table(tmp_path: Path) -> None:
    summary_of(tmp_path, {"sgd": (52, 53, 54), "block-adam-clip": (50, 51, 52.1)})
    files = write_report(tmp_path)
    assert tmp_path / "report" / "cifar10-densenet-table-1.png" in files
    assert "cifar10-densenet-table-1.png" in (tmp_path / "report" / "summary.md").read_text(encoding="utf-8")


def test_there_is_no_table_before_the_first_run(tmp_path: Path) -> None:
    settings = load(get_experiment("cifar10-densenet"), "laptop")
    write_experiment(tmp_path, "cifar10-densenet", settings=plain(settings))
    assert table_1_panels(read(tmp_path)) == []


def test_the_papers_table_is_complete() -> None:
    assert {*TABLE_1} == {*DATA}
    assert list(TABLE_1["cifar100-densenet"].values()) == [22.27, 26.51, 22.5, 22.52, 22.17, 21.7]
    assert all(arm in CONTENDERS for table in TABLE_1.values() for arm in table)


def test_the_settings_class_is_that_of_the_experiment() -> None:
    assert isinstance(load(get_experiment("cifar100-densenet"), "laptop"), CifarSettings)
