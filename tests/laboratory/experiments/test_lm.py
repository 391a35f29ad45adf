"""The language model experiment: steps as documented, continued to the same bits, the test text left alone, claims."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from blockadapt import BlockAdam, plan
from blockadapt_experiments.claims.claim import Verdict
from blockadapt_experiments.contenders.catalogue import make_optimizer
from blockadapt_experiments.core.config import load, plain
from blockadapt_experiments.data.missing import MissingData
from blockadapt_experiments.data.text import Corpus
from blockadapt_experiments.experiments import lm
from blockadapt_experiments.experiments.lm import (
    LanguageTask,
    LmSettings,
    judge_curve,
    judge_ggt,
    judge_lowest,
    make_task,
)
from blockadapt_experiments.experiments.registry import get_experiment
from blockadapt_experiments.files.atomic import read_json
from blockadapt_experiments.models.lstm import perplexity
from blockadapt_experiments.report import write_report
from blockadapt_experiments.report.reading import read
from blockadapt_experiments.results.measurements import RunKey
from blockadapt_experiments.results.summary import Summary
from blockadapt_experiments.running import runner
from blockadapt_experiments.running.runner import Request, run_jobs
from support.laboratory import ignore, stopped_and_gone_on
from support.run_records import rows_of, write_experiment, write_run
from support.texts import write_text

ARMS = [
    "sgd", "paper-adam", "adam", "adabound", "amsbound", "ggt", "soap", "block-adam", "block-adam-clip",
    "block-rmsprop",
]  # fmt: skip
TINY = (
    "vocabulary=20",
    "hidden=6",
    "layers=2",
    "streams=3",
    "unroll=4",
    "epochs=2",
    "train_tokens=100",
    "evaluation_tokens=40",
    "seeds=[0]",
)
"""Three streams of 33 tokens: 8 steps an epoch."""


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Lines of words that follow each other by a rule, with noise, in a folder of their own."""
    folder = tmp_path_factory.mktemp("data")
    random = np.random.default_rng(0)

    def text(lines: int) -> str:
        starts = random.integers(0, 20, (lines, 1))
        words = (starts + np.arange(6) * (1 + random.integers(0, 2, (lines, 1)))) % 20
        return "".join(f" {' '.join(f'w{word}' for word in line)} \n" for line in words)

    write_text(folder / "noise", "noise", text(30), text(10), text(10))
    return folder


def settings_of(*changes: str) -> LmSettings:
    return load(get_experiment("lm-lstm"), "smoke", (*TINY, *changes))


def request(out: Path, data_dir: Path, *changes: str) -> Request:
    return Request("lm-lstm", "smoke", settings_of(*changes), out, data_dir)


def make(data_dir: Path, arm: str = "sgd", *changes: str, lr: float = 0.5, tuning: bool = False) -> LanguageTask:
    return make_task(settings_of(*changes), RunKey(arm, "", 0), lr, data_dir, tuning)


# Settings and sizes ---------------------------------------------------------------------------------------------------


def test_the_paper_scale_is_the_papers() -> None:
    settings = load(get_experiment("lm-lstm"), "paper")
    assert list(settings.optimizers) == ARMS
    assert (settings.layers, settings.hidden, settings.vocabulary) == (3, 500, 10_000)
    assert (settings.streams, settings.unroll, settings.dropout, settings.init) == (20, 35, 0.5, 0.05)
    assert (settings.train_tokens, settings.evaluation_tokens) == (None, None)
    assert (settings.schedule.kind, settings.schedule.factor, settings.lr["sgd"]) == ("dev", 0.5, 5.0)
    assert settings.clip_norm == pytest.approx(5 / 35, rel=2e-3)
    model = get_experiment("lm-lstm").model(settings)
    assert sum(parameter.numel() for parameter in model.parameters()) == 16_022_000


def test_an_epoch_of_penn_treebank_has_1327_steps() -> None:
    settings = load(get_experiment("lm-lstm"), "paper", ["hidden=2", "vocabulary=2"])
    zeros = torch.zeros(929_589, dtype=torch.int64)
    task = LanguageTask(
        settings, Corpus("ptb", ("<eos>", "<unk>"), zeros, zeros[:70_000], zeros[:7_000]), "sgd", 5.0, 0
    )
    assert task.epoch_steps == 1327
    assert task.legs == 39 * 14
    assert task.work == (39 * 1327, 39 * 110)
    gamma = settings.optimizer.clip_progress / task.work.steps
    assert gamma == pytest.approx(1e-3, rel=2e-3)


@pytest.mark.parametrize(("scale", "steps"), [("smoke", 30), ("laptop", 4 * 200)])
def test_smaller_scales_take_as_many_steps_as_they_say(scale: str, steps: int) -> None:
    settings = load(get_experiment("lm-lstm"), scale, ["hidden=2", "layers=1", "vocabulary=2"])
    assert settings.train_tokens is not None
    zeros = torch.zeros(settings.train_tokens, dtype=torch.int64)
    task = LanguageTask(settings, Corpus("t", ("<eos>", "<unk>"), zeros, zeros, zeros), "sgd", 5.0, 0)
    assert task.work.steps == steps


def test_blocks_lie_within_the_vector_of_a_word() -> None:
    settings = load(get_experiment("lm-lstm"), "laptop")
    model = get_experiment("lm-lstm").model(settings)
    optimizer = make_optimizer("block-adam", model, 1e-3, settings.optimizer, steps=10)
    assert isinstance(optimizer, BlockAdam)
    rows = {row.name: row for row in plan(optimizer).rows}
    for words in ("embedding.weight", "output.weight"):
        assert rows[words].grouping == "output"
        assert rows[words].sizes == {10: 2000 * 13}  # 128 numbers a word, so its last block is short
    assert rows["lstm.weight_hh_l2"].grouping == "input"
    assert rows["lstm.bias_ih_l0"].grouping == "chunk"


@pytest.mark.parametrize(
    "change", ["dropout=1.0", "clip_norm=0", "init=-1.0", "vocabulary=1", "train_tokens=0", "unroll=0"]
)
def test_settings_that_cannot_be_are_refused(change: str) -> None:
    with pytest.raises(ValueError, match=f"^settings: `{change.partition('=')[0]}` must be"):
        settings_of(change)


def test_a_text_too_short_for_a_step_is_refused(data_dir: Path) -> None:
    make(data_dir, "sgd", "train_tokens=15")
    with pytest.raises(ValueError, match=r"^lm-lstm: `train_tokens` must be at least 15, a step's, got 14\.$"):
        make(data_dir, "sgd", "train_tokens=14")


def test_missing_data_is_one_sentence(tmp_path: Path) -> None:
    (job,) = run_jobs(request(tmp_path / "out", tmp_path, "optimizers=['sgd']"), {})
    with pytest.raises(MissingData, match=r"^data: no text was found in .*\.$"):
        runner.check([job])
    assert not (tmp_path / "out").exists()


# Steps ----------------------------------------------------------------------------------------------------------------


def reference(task: LanguageTask, lr: float, clip_norm: float) -> list[float]:
    """The losses of an epoch of SGD by hand: windows of each stream in turn, the memory carried on as numbers."""
    model, tokens = copy.deepcopy(task.model), task.corpus.train.tolist()
    length, unroll = len(tokens) // 3, 4
    memory = (torch.zeros(2, 3, 6), torch.zeros(2, 3, 6))
    losses = []
    for start in range(0, length - unroll, unroll):
        words, following = (
            torch.tensor([tokens[s * length + start + move :][:unroll] for s in range(3)]) for move in (0, 1)
        )
        scores, after = model(words, memory)
        memory = tuple(torch.tensor(part.tolist()) for part in after)
        loss = sum(cross_entropy(scores[s], following[s], reduction="sum") for s in range(3)) / (3 * unroll)
        assert isinstance(loss, Tensor)
        gradients = torch.autograd.grad(loss, [*model.parameters()])
        norm = math.sqrt(sum(float(gradient.square().sum()) for gradient in gradients))
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.sub_(lr * min(1.0, clip_norm / norm) * gradient)
        losses.append(float(loss.detach()))
    expected = dict(model.named_parameters())
    task.advance()
    for name, parameter in task.model.named_parameters():
        torch.testing.assert_close(parameter, expected[name], rtol=1e-4, atol=1e-6)
    return losses


@pytest.mark.parametrize("clip_norm", [0.05, 1000.0])
def test_an_epoch_is_that_of_the_definition(data_dir: Path, clip_norm: float) -> None:
    task = make(data_dir, "sgd", "dropout=0.0", "init=0.5", f"clip_norm={clip_norm}", lr=0.3)
    again = make(data_dir, "sgd", "dropout=0.0", "init=0.5", f"clip_norm={clip_norm}", lr=0.3)
    losses = reference(task, 0.3, clip_norm)
    assert len(losses) == task.step == 8
    (row,) = again.advance()
    assert row["train_loss"] == pytest.approx(np.mean(losses), rel=1e-5)
    assert (row["epoch"], row["step"]) == (1, 8)
    corpus = again.corpus
    for name, text in corpus.held_out.items():
        assert row[f"{name}_perplexity"] == perplexity(again.model, text, corpus.end, 4)
    assert again.memory is None  # the next epoch starts afresh


def test_every_optimizer_gets_the_same_start(data_dir: Path) -> None:
    starts = [make(data_dir, arm).model.state_dict() for arm in ("sgd", "block-adam")]
    assert all(torch.equal(value, starts[1][name]) for name, value in starts[0].items())


@pytest.mark.parametrize("arm", ARMS)
def test_every_optimizer_of_the_paper_takes_an_epoch(data_dir: Path, arm: str) -> None:
    task = make(data_dir, arm, "epochs=1", lr=1e-3)
    before = [parameter.detach().clone() for parameter in task.model.parameters()]
    (row,) = task.advance()
    assert all(math.isfinite(value) for value in row.values())
    assert all(not torch.equal(*pair) for pair in zip(before, task.model.parameters(), strict=True))


def test_an_epoch_is_cut_into_units(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(3)
    whole = [row for task in [make(data_dir)] for _ in range(task.legs) for row in task.advance()]
    monkeypatch.setattr(lm, "LEG_STEPS", 3)
    torch.manual_seed(3)
    task = make(data_dir)
    assert task.legs == 6
    pieces = [task.advance() for _ in range(task.legs)]
    assert [len(rows) for rows in pieces] == [0, 0, 1, 0, 0, 1]
    assert [row for rows in pieces for row in rows] == whole


def test_the_learning_rate_falls_after_epochs_without_a_new_best(data_dir: Path) -> None:
    task = make(data_dir, "sgd", "epochs=8", "clip_norm=100.0", lr=30.0)  # far too large
    best, worse, seen = math.inf, 0, set()
    for _ in range(8):
        (row,) = task.advance()
        better = row["valid_perplexity"] < best
        best, worse = min(best, row["valid_perplexity"]), worse + (not better)
        assert task.schedule.lr == [30.0 * 0.5**worse]
        seen.add(better)
    assert seen == {True, False}


@pytest.mark.parametrize("arm", ["sgd", "adam", "block-adam"])
def test_a_run_that_diverges_says_so(data_dir: Path, arm: str) -> None:
    task = make(data_dir, arm, lr=1e30)
    rows = [row for _ in range(task.legs) for row in task.advance()]
    assert task.outcome().numbers["diverged"] == 1
    assert len(rows) == 1
    assert not math.isfinite(rows[0]["valid_perplexity"])
    assert not math.isfinite(rows[0]["test_perplexity"])


@pytest.mark.parametrize("place", ["output.bias", "lstm.weight_hh_l0"])
def test_a_loss_that_is_no_number_ends_the_run_before_a_step(data_dir: Path, place: str) -> None:
    task = make(data_dir, "block-adam", "dropout=0.0")
    with torch.no_grad():
        task.model.get_parameter(place).view(-1)[0] = math.nan
    before = copy.deepcopy(task.model.state_dict())
    (row,) = task.advance()
    assert math.isnan(row["train_loss"])
    assert (row["step"], task.diverged, task.advance()) == (0, True, ())
    after = task.model.state_dict()
    assert all(torch.equal(value.nan_to_num(), after[name].nan_to_num()) for name, value in before.items())


# Tuning and resuming --------------------------------------------------------------------------------------------------


def test_tuning_never_reads_the_test_text(tmp_path: Path, data_dir: Path) -> None:
    files = write_text(
        tmp_path, "t", *[(data_dir / "noise" / f"noise.{part}.txt").read_text() for part in ("train", "valid")]
    )
    files.test.unlink()
    files.test.mkdir()  # a folder cannot be read as text
    task = make(tmp_path, tuning=True)
    rows = [row for _ in range(task.legs) for row in task.advance()]
    assert all(row.keys() == {"epoch", "step", "train_loss", "valid_perplexity"} for row in rows)
    assert not any("test" in name for name in task.outcome().numbers)
    with pytest.raises(ValueError, match=r"t\.test\.txt cannot be read as text"):
        make(tmp_path)


@pytest.mark.parametrize("arm", ["sgd", "block-adam-clip", "soap"])
@pytest.mark.parametrize("moment", [1, 3, 4])
def test_a_run_that_was_stopped_goes_on_to_the_same_bits(
    tmp_path: Path, data_dir: Path, monkeypatch: pytest.MonkeyPatch, arm: str, moment: int
) -> None:
    monkeypatch.setattr(runner, "SAVING_SHARE", math.inf)
    monkeypatch.setattr(lm, "LEG_STEPS", 3)  # stops in the midst of an epoch, at its end, and in that of the next
    changes = (f"optimizers=['{arm}']", "dropout=0.5")
    assert len(stopped_and_gone_on(lambda out: request(out, data_dir, *changes), tmp_path, moment)) == 2


def test_a_run_does_not_go_on_with_another_text(tmp_path: Path, data_dir: Path) -> None:
    task = make(data_dir)
    task.advance()
    write_text(tmp_path, "other", "a b c d e f g h\n" * 20, "a b\n", "b a\n")
    other = make(tmp_path)
    with pytest.raises(
        ValueError, match=r"^lm-lstm: `data-dir` must be the text that the run was begun with, got other"
    ):
        other.load_state_dict(task.state_dict())


def test_records_name_the_text(tmp_path: Path, data_dir: Path) -> None:
    (job,) = run_jobs(request(tmp_path, data_dir, "optimizers=['sgd']"), {})
    job(ignore)
    numbers = read_json(job.record.folder / "result.json")["numbers"]
    assert (numbers["train_tokens"], numbers["valid_tokens"], numbers["test_tokens"]) == (100, 40, 40)
    assert numbers["vocabulary"] <= 20
    assert 1 < numbers["test_unigram_perplexity"] < 30
    with np.load(job.record.folder / "arrays.npz", allow_pickle=False) as archive:
        assert str(archive["corpus"]) == "noise"


# Claims ---------------------------------------------------------------------------------------------------------------


def summary_of(
    out: Path, ends: dict[str, Sequence[float]], losses: dict[str, float] | None = None, **changes: Any
) -> Summary:
    """Records of runs that end with these test perplexities, one a seed, and have these mean training losses."""
    seeds = range(len(next(iter(ends.values()))))
    told = {**plain(load(get_experiment("lm-lstm"), "laptop")), "optimizers": [*ends], "seeds": [*seeds]}
    write_experiment(out, "lm-lstm", settings=told)
    for arm, values in ends.items():
        for seed, end in zip(seeds, values, strict=True):
            loss = (losses or {}).get(arm, 5.0) + 0.01 * seed
            rows = rows_of(train_loss=[loss + 1, loss - 1], test_perplexity=[400.0, end], valid_perplexity=[400.0, end])
            text = changes.get("texts", {}).get(arm, "novels")
            write_run(out, arm, "", seed, rows, arrays={"corpus": np.array(text)})
    return read(out)


def test_the_learning_curve_is_judged_by_its_mean(tmp_path: Path) -> None:
    ends = dict.fromkeys(("sgd", "adam", "block-adam-clip"), (150, 151, 152))
    verdict = judge_curve(summary_of(tmp_path / "1", ends, {"sgd": 5.2, "adam": 5.5, "block-adam-clip": 5.0}))
    assert verdict.held is True
    assert verdict.words.startswith("On novels, 2,000 words: training loss, mean over epochs, differs from SGD by −0.2")
    assert judge_curve(summary_of(tmp_path / "2", ends, {"sgd": 4.9, "block-adam-clip": 5.0})).held is False


@pytest.mark.parametrize(("ggt", "held"), [((150, 152, 151), True), ((200, 201, 202), False), ((130, 150, 170), None)])
def test_ggt_is_alike_within_five_percent(tmp_path: Path, ggt: Sequence[float], held: bool | None) -> None:
    assert judge_ggt(summary_of(tmp_path, {"ggt": ggt, "block-adam-clip": (150, 151, 152)})).held is held


@pytest.mark.parametrize(
    ("ends", "held"),
    [
        ({"sgd": (160, 161, 162), "ggt": (100, 101, 102), "block-adam-clip": (150, 151, 152)}, True),
        ({"sgd": (140, 141, 142), "adam": (160, 161, 162), "block-adam-clip": (150, 151, 152)}, False),
        ({"sgd": (149, 151, 153), "adam": (160, 161, 162), "block-adam-clip": (150, 151, 152)}, None),
        ({"sgd": (140, 141, 142)}, None),
    ],
)
def test_the_lowest_perplexity_is_judged_against_all_but_ggt(
    tmp_path: Path, ends: dict[str, Sequence[float]], held: bool | None
) -> None:
    assert judge_lowest(summary_of(tmp_path, ends)).held is held


def test_perplexities_of_different_texts_are_not_compared(tmp_path: Path) -> None:
    ends = {"sgd": (160, 161, 162), "block-adam-clip": (150, 151, 152)}
    assert judge_lowest(summary_of(tmp_path, ends, texts={"sgd": "ptb"})) == Verdict(
        None, "The runs are of different texts (novels and ptb), whose perplexities are not comparable."
    )


def test_the_report_names_the_text(tmp_path: Path) -> None:
    summary_of(tmp_path, {"sgd": (160, 161, 162), "block-adam-clip": (150, 151, 152)})
    files = write_report(tmp_path)
    assert tmp_path / "report" / "lm-lstm-perplexity.png" in files
    assert "On novels, 2,000 words" in (tmp_path / "report" / "summary.md").read_text(encoding="utf-8")
