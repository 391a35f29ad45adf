"""The GPT on characters or words: steps as documented, continued to the same bits, the test text left alone, claims."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from blockadapt_experiments.core.config import load, plain
from blockadapt_experiments.experiments.gpt import GptSettings, GptTask, judge_seconds, judge_steps, make_task
from blockadapt_experiments.experiments.registry import get_experiment
from blockadapt_experiments.models.gpt import mean_loss
from blockadapt_experiments.report.reading import read
from blockadapt_experiments.results.measurements import RunKey
from blockadapt_experiments.results.summary import Summary
from blockadapt_experiments.running import runner
from blockadapt_experiments.running.runner import Request
from support.laboratory import stopped_and_gone_on
from support.run_records import write_experiment, write_run
from support.texts import write_text

GPT, WORDS = get_experiment("gpt-char"), get_experiment("gpt-words")
ARMS = ["adamw", "muon", "soap", "block-adamw"]
TINY = ("steps=8", "every=3", "batch=3", "context=6", "width=8", "layers=1", "heads=2", "evaluation_characters=30")
TINY_WORDS = (*TINY[:-1], "evaluation_words=12", "vocabulary=5", "train_words=40")


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write_text(
        folder / "rhyme", "rhyme", "one two three four five\n" * 8, "four five one two three\n" * 3, "six two\n" * 6
    )
    return folder


def settings_of(*changes: str) -> GptSettings:
    return load(GPT, "smoke", (*TINY, *changes))


def request(out: Path, data_dir: Path, *changes: str) -> Request:
    return Request("gpt-char", "smoke", settings_of(*changes), out, data_dir)


def make(data_dir: Path, arm: str = "adamw", *changes: str, lr: float = 1e-3, tuning: bool = False) -> GptTask:
    return make_task(settings_of(*changes), RunKey(arm, "", 0), lr, data_dir, tuning)


# Settings -------------------------------------------------------------------------------------------------------------


def test_the_laptop_scale_has_a_million_parameters() -> None:
    settings = load(GPT, "laptop")
    assert list(settings.optimizers) == ARMS
    assert (settings.schedule.kind, settings.schedule.warmup) == ("cosine", 0.1)
    assert settings.optimizer.decoupled_weight_decay > 0
    model = GPT.model(settings)
    assert sum(parameter.numel() for parameter in model.parameters()) == pytest.approx(1e6, rel=0.05)


@pytest.mark.parametrize("change", ["steps=0", "heads=3", "clip_norm=0", "schedule.kind=dev", "train_characters=0"])
def test_settings_that_cannot_be_are_refused(change: str) -> None:
    name = {"heads": "width"}.get(change.partition("=")[0], change.partition("=")[0])
    with pytest.raises(ValueError, match=f"^settings: `{name}` must be"):
        settings_of(change)


def test_a_text_shorter_than_a_window_is_refused(data_dir: Path) -> None:
    with pytest.raises(
        ValueError, match=r"^gpt-char: `context` must be at most 29, the shortest text less one, got 30\.$"
    ):
        make(data_dir, "adamw", "context=30")
    make(data_dir, "adamw", "context=29")


# Words ----------------------------------------------------------------------------------------------------------------


def test_most_parameters_of_the_laptop_scale_on_words_are_in_the_vocabulary() -> None:
    model = WORDS.model(load(WORDS, "laptop"))
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    assert sum(sizes.values()) == pytest.approx(2.1e6, rel=0.05)
    assert (sizes["tokens.weight"] + sizes["output.weight"]) / sum(sizes.values()) > 0.6


@pytest.mark.parametrize("arm", ["adamw", "block-adamw", "diagonal"])
def test_a_run_on_words_reads_as_much_of_them_as_its_settings_say(data_dir: Path, arm: str) -> None:
    task = make_task(load(WORDS, "smoke", TINY_WORDS), RunKey(arm, "", 0), 1e-3, data_dir, tuning=False)
    assert len(task.corpus.vocabulary) == task.model.tokens.num_embeddings == 5
    assert [len(task.corpus.train), *map(len, task.corpus.held_out.values())] == [40, 12, 12]
    rows = [row for _ in range(task.legs) for row in task.advance()]
    assert [row["step"] for row in rows] == [3, 6, 8]
    assert all(math.isfinite(value) for row in rows for value in row.values())
    assert task.numbers()["train_words"] == 40


def test_the_diagonal_arm_has_adams_rule_in_the_vocabulary_and_blocks_elsewhere(data_dir: Path) -> None:
    task = make_task(load(WORDS, "smoke", TINY_WORDS), RunKey("diagonal", "", 0), 1e-3, data_dir, tuning=False)
    names = {parameter: name for name, parameter in task.model.named_parameters()}
    found = {names[p]: group["grouping"] for group in task.optimizer.param_groups for p in group["params"]}
    assert found["tokens.weight"] == found["output.weight"] == "diagonal"
    assert found["layers.0.wide.weight"] == "auto"


@pytest.mark.parametrize("change", ["vocabulary=1", "train_words=0", "evaluation_words=0"])
def test_settings_of_words_that_cannot_be_are_refused(change: str) -> None:
    with pytest.raises(ValueError, match=f"^settings: `{change.partition('=')[0]}` must be"):
        load(WORDS, "smoke", (*TINY_WORDS, change))


# Steps ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clip_norm", [0.05, 1000.0])
def test_a_leg_is_that_of_the_definition(data_dir: Path, clip_norm: float) -> None:
    """AdamW's first leg with torch's own optimizer, and windows drawn by the same generator."""
    task = make(data_dir, "adamw", f"clip_norm={clip_norm}", "schedule.warmup=0.5", lr=0.01)
    model, text = copy.deepcopy(task.model), task.corpus.train.tolist()
    drawn = torch.Generator()
    drawn.set_state(task.windows.get_state())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, betas=(0.9, 0.99), weight_decay=0.1)
    losses = []
    for t in range(1, 4):
        optimizer.param_groups[0]["lr"] = 0.01 * t / 4
        starts = torch.randint(len(text) - 6, (3, 1), generator=drawn).flatten().tolist()
        tokens, following = (
            torch.tensor([text[start + move : start + move + 6] for start in starts]) for move in (0, 1)
        )
        loss = cross_entropy(model(tokens).flatten(0, 1), following.flatten())
        optimizer.zero_grad()
        loss.backward()
        norm = math.sqrt(sum(float(p.grad.square().sum()) for p in model.parameters() if p.grad is not None))
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(min(1.0, clip_norm / norm))
        optimizer.step()
        losses.append(loss.item())
    (row,) = task.advance()
    assert row["step"] == 3
    assert row["train_loss"] == pytest.approx(np.mean(losses), rel=1e-6)
    assert row["valid_loss"] == pytest.approx(mean_loss(model, task.corpus.valid, 6), rel=1e-4)
    for parameter, expected in zip(task.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(parameter, expected, rtol=1e-3, atol=1e-4)


def test_every_optimizer_gets_the_same_start_and_windows(data_dir: Path) -> None:
    tasks = [make(data_dir, arm) for arm in ("adamw", "block-adamw")]
    first, second = (task.model.state_dict() for task in tasks)
    assert all(torch.equal(value, second[name]) for name, value in first.items())
    for task in tasks:
        task.advance()
    assert torch.equal(*(task.windows.get_state() for task in tasks))


@pytest.mark.parametrize("arm", ARMS)
def test_every_contender_takes_a_run(data_dir: Path, arm: str) -> None:
    task = make(data_dir, arm)
    before = [parameter.detach().clone() for parameter in task.model.parameters()]
    rows = [row for _ in range(task.legs) for row in task.advance()]
    assert [row["step"] for row in rows] == [3, 6, 8]
    assert all(math.isfinite(value) for row in rows for value in row.values())
    assert ["test_loss" in row for row in rows] == [False, False, True]  # the final checkpoint only
    assert all(not torch.equal(*pair) for pair in zip(before, task.model.parameters(), strict=True))
    assert task.schedule.lr == [0.0] * len(task.optimizer.param_groups)


def test_it_learns(data_dir: Path) -> None:
    task = make(data_dir, "block-adamw", "steps=60", "every=30", "batch=16", lr=0.01)
    first, last = (row["valid_loss"] for _ in range(2) for row in task.advance())
    assert last < first < math.log(len(task.corpus.vocabulary))


@pytest.mark.parametrize("arm", ["adamw", "block-adamw"])
def test_a_run_that_diverges_says_so(data_dir: Path, arm: str) -> None:
    task = make(data_dir, arm, lr=1e30)
    rows = [row for _ in range(task.legs) for row in task.advance()]
    assert task.outcome().numbers["diverged"] == 1
    assert len(rows) == 1
    assert not math.isfinite(rows[0]["valid_loss"])


# Tuning and resuming --------------------------------------------------------------------------------------------------


def test_tuning_never_reads_the_test_text(tmp_path: Path) -> None:
    files = write_text(tmp_path, "t", "one two three four\n" * 9, "two three one\n" * 3)
    files.test.unlink()
    files.test.mkdir()  # a folder cannot be read as text
    task = make(tmp_path, tuning=True)
    rows = [row for _ in range(task.legs) for row in task.advance()]
    assert all(row.keys() == {"step", "train_loss", "valid_loss"} for row in rows)
    with pytest.raises(ValueError, match=r"t\.test\.txt cannot be read as text"):
        make(tmp_path)


@pytest.mark.parametrize("arm", ARMS)
def test_a_run_that_was_stopped_goes_on_to_the_same_bits(
    tmp_path: Path, data_dir: Path, monkeypatch: pytest.MonkeyPatch, arm: str
) -> None:
    monkeypatch.setattr(runner, "SAVING_SHARE", math.inf)
    changes = (f"optimizers=['{arm}']", "steps=24")
    assert len(stopped_and_gone_on(lambda out: request(out, data_dir, *changes), tmp_path, leg=2)) == 2


def test_a_run_does_not_go_on_with_another_text(tmp_path: Path, data_dir: Path) -> None:
    task = make(data_dir)
    task.advance()
    write_text(tmp_path, "other", "abc def\n" * 20, "a b c d e\n" * 3, "e d c b a\n" * 3)
    with pytest.raises(
        ValueError, match=r"^gpt-char: `data-dir` must be the text that the run was begun with, got other"
    ):
        make(tmp_path).load_state_dict(task.state_dict())


# Claims ---------------------------------------------------------------------------------------------------------------


def summary_of(out: Path, ends: dict[str, Sequence[float]], legs: dict[str, float] | None = None) -> Summary:
    """Runs of three rows that end with these losses, one a seed; a row takes these seconds, 1 if not given."""
    seeds = range(len(next(iter(ends.values()))))
    write_experiment(out, "gpt-char", settings={**plain(load(GPT, "laptop")), "optimizers": [*ends], "seeds": [*seeds]})
    for arm, values in ends.items():
        for seed, end in zip(seeds, values, strict=True):
            rows = [{"step": 100.0 * (k + 1), "valid_loss": end + 1 - k / 2} for k in range(3)]
            rows[-1]["test_loss"] = end + 0.1
            write_run(out, arm, "", seed, rows, leg=(legs or {}).get(arm, 1.0))
    return read(out)


@pytest.mark.parametrize(
    ("adamw", "held"), [((2.0, 2.1, 2.21), True), ((1.0, 1.1, 1.21), False), ((1.0, 1.8, 2.6), None)]
)
def test_the_end_is_judged_over_pairs_of_seeds(tmp_path: Path, adamw: Sequence[float], held: bool | None) -> None:
    ends = {"adamw": adamw, "soap": (3.0, 3.1, 3.21), "block-adamw": (1.7, 1.8, 1.9)}
    assert judge_steps(summary_of(tmp_path, ends)).held is held


def test_an_arm_with_settings_of_its_own_is_no_part_of_a_claim(tmp_path: Path) -> None:
    ends = {"adamw": (2.0, 2.1, 2.21), "block-adamw": (1.7, 1.8, 1.9), "b25": (0.7, 0.8, 0.91)}
    verdict = judge_steps(summary_of(tmp_path, ends))
    assert verdict.held is True
    assert "b25" not in verdict.words


def test_seconds_are_judged_when_the_faster_is_done(tmp_path: Path) -> None:
    ends = {"adamw": (2.0, 2.1, 2.2), "block-adamw": (1.7, 1.8, 1.9)}
    assert judge_seconds(summary_of(tmp_path / "1", ends)).held is True
    verdict = judge_seconds(summary_of(tmp_path / "2", ends, {"block-adamw": 1.5}))
    assert verdict.held is False
    assert "(67% and 100% of the steps done)" in verdict.words
