"""Training a classifier: the same start and minibatches for all, measured right, continued to the same bits."""

from __future__ import annotations

import copy
import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from blockadapt_experiments.contenders.catalogue import OptimizerSettings, make_optimizer
from blockadapt_experiments.contenders.schedules import BatchSettings, ScheduleSettings
from blockadapt_experiments.core.config import load
from blockadapt_experiments.core.training import Classification, Sets, TrainingSettings, hold_out
from blockadapt_experiments.data.examples import Examples
from blockadapt_experiments.experiments.registry import get_experiment
from blockadapt_experiments.results.measurements import RunKey
from support.files import through_a_file

CLASSES, COUNT, SIDE = 3, 50, 4


def examples(count: int, seed: int) -> Examples:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 256, (count, 1, SIDE, SIDE), generator=generator, dtype=torch.uint8)
    return Examples(images, torch.randint(0, CLASSES, (count,), generator=generator))


TRAIN, TEST = examples(COUNT, 1), examples(20, 2)


def scaled(images: Tensor) -> Tensor:
    return images.to(torch.float32) / 256


def jitter(images: Tensor, generator: torch.Generator) -> Tensor:
    return images + torch.randint(0, 2, images.shape, generator=generator, dtype=torch.uint8)


class Recorder(nn.Module):
    """A net with dropout that keeps every minibatch it is trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Flatten(), nn.Linear(SIDE**2, 6), nn.ReLU(), nn.Dropout(0.2), nn.Linear(6, CLASSES)
        )
        self.seen: list[Tensor] = []

    def forward(self, images: Tensor) -> Tensor:
        if self.training:
            self.seen.append(images.clone())
        output: Tensor = self.layers(images)
        return output


def make(
    arm: str = "sgd", seed: int = 0, sets: Sets | None = None, augment: Any = None, **settings: Any
) -> Classification:
    options: dict[str, Any] = {"epochs": 4, "batch": BatchSettings(size=16), "measured_examples": 30, **settings}
    chosen = TrainingSettings(**options)
    return Classification(
        model=Recorder,
        sets=sets or hold_out(TRAIN, TEST, chosen, tuning=False),
        settings=chosen,
        optimizer=partial(make_optimizer, arm, lr=0.01, settings=OptimizerSettings()),
        seed=seed,
        prepare=scaled,
        augment=augment,
    )


def seen(task: Classification) -> list[Tensor]:
    assert isinstance(task.model, Recorder)
    return task.model.seen


def test_every_optimizer_gets_the_same_start_and_the_same_minibatches() -> None:
    tasks = [make(arm, augment=jitter) for arm in ("sgd", "adam", "block-adam", "ggt")]
    start = copy.deepcopy(tasks[0].model.state_dict())
    for task in tasks:
        assert all(torch.equal(weight, start[name]) for name, weight in task.model.state_dict().items())
        task.advance()
        task.advance()
        assert len(seen(task)) == 8
        assert all(torch.equal(*pair) for pair in zip(seen(task), seen(tasks[0]), strict=True))
    other = make(seed=1, augment=jitter)
    assert not torch.equal(other.model.state_dict()["layers.1.weight"], start["layers.1.weight"])


def test_an_epoch_is_every_image_once_in_another_order() -> None:
    task = make()
    task.advance()
    task.advance()
    batches = seen(task)
    assert [len(batch) for batch in batches] == [16, 16, 16, 2] * 2
    for epoch in (batches[:4], batches[4:]):
        rows = sorted(image.flatten().tolist() for image in torch.cat(epoch))
        assert rows == sorted(image.flatten().tolist() for image in scaled(TRAIN.images))
    assert not torch.equal(torch.cat(batches[:4]), torch.cat(batches[4:]))


def test_augmentation_leaves_the_order_alone() -> None:
    plain, changed = make(), make(augment=jitter)
    plain.advance()
    changed.advance()
    differences = torch.cat(seen(changed)) - torch.cat(seen(plain))
    steps = torch.unique((256 * differences).round())
    assert {*steps.tolist()} <= {0.0, 1.0, -255.0}
    assert len(steps) >= 2


def test_rows_hold_loss_and_accuracy_by_hand() -> None:
    task = make()
    (row,) = task.advance()
    assert list(row) == ["epoch", "step", "train_loss", "train_accuracy", "test_loss", "test_accuracy"]
    assert (row["epoch"], row["step"]) == (1, 4)
    model = copy.deepcopy(task.model).double().eval()
    for name, part in (("train", Examples(TRAIN.images[:30], TRAIN.labels[:30])), ("test", TEST)):
        with torch.no_grad():
            scores = model(scaled(part.images).double()).numpy()
        log_sum = np.log(np.exp(scores).sum(axis=1))
        losses = log_sum - scores[np.arange(len(scores)), part.labels.numpy()]
        assert row[f"{name}_loss"] == pytest.approx(losses.mean(), rel=1e-5)
        assert row[f"{name}_accuracy"] == (scores.argmax(axis=1) == part.labels.numpy()).mean()


def test_measuring_in_pieces_is_measuring_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)  # of the dropout
    (whole,) = make().advance()
    monkeypatch.setattr("blockadapt_experiments.core.training.EVALUATION_BATCH", 7)
    torch.manual_seed(0)
    (pieces,) = make().advance()
    assert pieces == pytest.approx(whole, rel=1e-6)


def test_tuning_never_touches_the_test_set() -> None:
    settings = TrainingSettings(epochs=1, validation_fraction=0.2)
    poison = Examples(torch.full_like(TEST.images, 255), torch.full_like(TEST.labels, -99))  # no loss has such a class
    sets = hold_out(TRAIN, poison, settings, tuning=True)
    assert sets.held_out.keys() == {"validation"}
    assert torch.equal(sets.train.images, TRAIN.images[:40])
    assert torch.equal(sets.held_out["validation"].labels, TRAIN.labels[40:])
    (row,) = make(sets=sets, epochs=1).advance()
    assert list(row)[2:] == ["train_loss", "train_accuracy", "validation_loss", "validation_accuracy"]


def test_dev_decay_watches_validation_images_and_not_the_test_set() -> None:
    chosen = {"epochs": 3, "schedule": ScheduleSettings(kind="dev", factor=0.5), "validation_fraction": 0.2}
    task = make(**chosen)
    assert [len(part) for part in (task.sets.train, *task.sets.held_out.values())] == [40, 20, 10]
    losses, rates = [math.inf], [0.01]
    for _ in range(3):
        (row,) = task.advance()
        rates.append(rates[-1] * (1.0 if row["validation_loss"] < min(losses) else 0.5))
        losses.append(row["validation_loss"])
        assert task.schedule.lr == pytest.approx([rates[-1]])
        assert "test_loss" in row


def test_more_images_than_there_are_are_refused() -> None:
    mnist = get_experiment("mnist-lenet300")
    for change, sentence in (
        ("train_examples=1348", "training: `train_examples` must be at most 1347, as many as there are, got 1348."),
        ("test_examples=999999", "training: `test_examples` must be at most 450, as many as there are, got 999999."),
    ):
        changes = ("data=digits", "train_examples=1347", "test_examples=450", change)
        with pytest.raises(ValueError, match=r"^training: ") as refused:
            mnist.task(load(mnist, "smoke", changes), RunKey("sgd", "", 0), 0.1, None, False)
        assert str(refused.value) == sentence


def test_too_few_images_to_hold_some_out_are_refused() -> None:
    settings = TrainingSettings(epochs=1)
    with pytest.raises(ValueError, match="more than are held out for validation, got 1"):
        hold_out(Examples(TRAIN.images[:1], TRAIN.labels[:1]), TEST, settings, tuning=True)


CASES: dict[str, dict[str, Any]] = {
    "sgd": {},
    "block-adam": {"augment": jitter},
    "block-adam-clip": {"schedule": ScheduleSettings(kind="step")},
    "adabound": {"schedule": ScheduleSettings(kind="sqrt")},
    "ggt": {"batch": BatchSettings(size=8, growth="geometric", rate=2.0)},
    "rmsprop": {"schedule": ScheduleSettings(kind="dev")},
}


@pytest.mark.parametrize("arm", CASES)
def test_a_run_continued_from_a_file_ends_on_the_same_bits(arm: str) -> None:
    torch.manual_seed(3)
    whole = make(arm, **CASES[arm])
    rows = [row for _ in range(4) for row in whole.advance()]

    torch.manual_seed(3)
    first = make(arm, **CASES[arm])
    early = [row for _ in range(2) for row in first.advance()]
    state = through_a_file({"task": first.state_dict(), "generator": torch.get_rng_state()})
    torch.rand(5)
    second = make(arm, **CASES[arm])
    second.load_state_dict(state["task"])
    torch.set_rng_state(state["generator"])
    late = [row for _ in range(2) for row in second.advance()]
    assert early + late == rows
    assert second.outcome().numbers == whole.outcome().numbers
    np.testing.assert_array_equal(second.outcome().arrays["weights"], whole.outcome().arrays["weights"])


def test_minibatches_grow_and_steps_are_counted() -> None:
    task = make(batch=BatchSettings(size=10, growth="linear", rate=1.0), epochs=3)
    rows = [row for _ in range(3) for row in task.advance()]
    assert [row["step"] for row in rows] == [5, 5 + 3, 5 + 3 + 2]
    assert sum(task.settings.steps(COUNT)) == 10


def test_after_divergence_nothing_more_happens() -> None:
    task = make()
    with torch.no_grad():
        for weight in task.model.parameters():
            weight.fill_(math.nan)
    (row,) = task.advance()
    assert math.isnan(row["train_loss"])
    assert (row["epoch"], row["step"]) == (1, 0)
    assert task.advance() == ()
    assert task.outcome().numbers["diverged"] == 1
    resumed = make()
    resumed.load_state_dict(task.state_dict())
    assert resumed.advance() == ()


def test_an_optimizer_that_cannot_factor_what_it_keeps_has_diverged(monkeypatch: pytest.MonkeyPatch) -> None:
    task = make()

    def fail() -> None:
        torch.linalg.cholesky(-torch.eye(2))

    monkeypatch.setattr(task.optimizer, "step", fail)
    (row,) = task.advance()
    assert (row["epoch"], row["step"]) == (1, 0)
    assert task.outcome().numbers["diverged"] == 1
