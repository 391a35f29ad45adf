from __future__ import annotations

import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

from blockadapt_experiments.core.config import load, plain
from blockadapt_experiments.experiments.registry import get_experiment
from blockadapt_experiments.experiments.terms import ARMS, LAYERS, TermsTask, mlp, term_rows
from blockadapt_experiments.report.reading import read
from blockadapt_experiments.results.measurements import Row, RunKey
from blockadapt_experiments.results.summary import Summary
from support.files import through_a_file
from support.run_records import write_experiment, write_run

Array = NDArray[np.float64]
TERMS = get_experiment("terms")
SMALL = ("data=digits", "train_examples=96", "batch.size=24", "epochs=2", "every=1")


def make(arm: str, *changes: str, seed: int = 0) -> TermsTask:
    settings = load(TERMS, "smoke", [*SMALL, *changes])
    task: TermsTask = TERMS.task(settings, RunKey(arm, "", seed), 1e-3, None, False)
    return task


def finish(task: TermsTask, done: int = 0) -> list[Row]:
    return [row for _ in range(done, task.legs) for row in task.advance()]


# The terms against formulas -----------------------------------------------------------------------------------------


def blocks(gradient: Array, n: int) -> Array:
    """The blocks [num_blocks, n]: n consecutive outputs of one input neuron, or n consecutive biases."""
    columns = gradient.T if gradient.ndim == 2 else gradient[np.newaxis]
    return columns.reshape(-1, n)


def operators(V: Array, α: float, δ: float) -> Array:
    """P = α (V^{1/2} + δI)^{-1} for each block."""
    λ, U = np.linalg.eigh(V)
    s = α / (np.sqrt(np.maximum(λ, 0)) + δ)
    return (U * s[:, np.newaxis, :]) @ U.transpose(0, 2, 1)


def expected_rows(gradients: Sequence[dict[str, Array]], n: int, β2: float) -> list[Row]:
    """Term A and both norms of Term B for each layer and all of it, from the gradients of each step alone."""
    moments: dict[str, Array] = {}
    rows = []
    for step, by_name in enumerate(gradients, start=1):
        row: Row = {"step": step}
        for name, gradient in by_name.items():
            g = blocks(gradient, n)
            before = moments.get(name, np.zeros((len(g), n, n)))
            moments[name] = β2 * before + (1 - β2) * g[:, :, np.newaxis] * g[:, np.newaxis, :]
            P = operators(moments[name], 1e-3, 1e-4)
            change = np.linalg.svd(P - operators(before, 1e-3, 1e-4), compute_uv=False)
            for layer in (name.partition(".")[0], "total"):
                row[f"term_a.{layer}"] = row.get(f"term_a.{layer}", 0) + np.sum((P @ g[:, :, np.newaxis]) ** 2)
                if step > 1:
                    spectral, nuclear = (f"term_b_{norm}.{layer}" for norm in ("spectral", "nuclear"))
                    row[spectral] = max(row.get(spectral, 0), change.max())
                    row[nuclear] = row.get(nuclear, 0) + change.sum()
        rows.append(row)
    return rows


@pytest.mark.parametrize("arm", ARMS)
def test_terms_are_those_of_dense_matrices_in_float64(arm: str) -> None:
    task = make(arm)
    training, gradients = task._training, list[dict[str, Array]]()
    prepare = training.prepare
    training.model.double()  # the statistics too: float32's rounding of V would show, see below
    training.prepare = lambda images: prepare(images).double()
    names = dict(training.model.named_parameters())

    def keep(*_: Any) -> None:
        gradients.append({name: p.grad.numpy().copy() for name, p in names.items() if p.grad is not None})

    training.optimizer.register_step_pre_hook(keep)
    rows = finish(task)
    expected = expected_rows(gradients, 1 if ARMS[arm].diagonal else 10, 0.999 if "adam" in arm else 0.99)
    paper = "term_b_nuclear" if ARMS[arm].diagonal else "term_b_spectral"
    assert [row["step"] for row in rows] == [row["step"] for row in expected] == list(range(1, 9))
    for row, truth in zip(rows, expected, strict=True):
        terms = {key: value for key, value in row.items() if key.startswith("term")}
        for layer in (*LAYERS, "total"):
            if row["step"] > 1:
                assert terms.pop(f"term_b_paper.{layer}") == row[f"{paper}.{layer}"]
        assert terms.keys() == truth.keys() - {"step"}
        for key, value in terms.items():
            # V has no full rank yet: its zero eigenvalues are rounding errors up to ε λmax, here 2e-16 · 1e-3, which
            # changes P there by √(ε λmax) / δ = 5e-6 of it. g has no part in these directions, so Term A is exact.
            tolerance = 1e-12 if key.startswith("term_a") else 1e-5
            assert value == pytest.approx(truth[key], rel=tolerance), key


def test_a_layer_is_its_weights_and_biases() -> None:
    history = [
        {"step": 5, "parameter": name, "term_a": a, "term_b_spectral": s, "term_b_nuclear": n}
        for name, a, s, n in (
            ("fc1.weight", 1.0, 3.0, 10.0),
            ("fc1.bias", 0.5, 4.0, 5.0),
            ("fc2.weight", 0.25, 0.5, 1.0),
            ("total", 1.75, 4.0, 16.0),
        )
    ]
    (row,) = term_rows(history, "term_b_nuclear")
    assert row == {
        "step": 5,
        "term_a.fc1": 1.5,
        "term_b_spectral.fc1": 4.0,
        "term_b_nuclear.fc1": 15.0,
        "term_b_paper.fc1": 15.0,
        "term_a.fc2": 0.25,
        "term_b_spectral.fc2": 0.5,
        "term_b_nuclear.fc2": 1.0,
        "term_b_paper.fc2": 1.0,
        "term_a.total": 1.75,
        "term_b_spectral.total": 4.0,
        "term_b_nuclear.total": 16.0,
        "term_b_paper.total": 16.0,
    }
    assert term_rows(history, "term_b_spectral")[0]["term_b_paper.fc1"] == 4.0


# Runs ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arm", ["paper-adam", "block-rmsprop"])
def test_a_run_that_was_stopped_ends_bit_identically(arm: str) -> None:
    changes = ("epochs=3", "every=3")  # an epoch has 4 steps, so that recorded steps fall anywhere in it
    rows = finish(make(arm, *changes))
    assert [row["step"] for row in rows if "term_a.total" in row] == [3, 6, 9, 12]
    assert [row["step"] for row in rows if "train_loss" in row] == [4, 8, 12]
    for stop in range(4):
        first = make(arm, *changes)
        before = [row for _ in range(stop) for row in first.advance()]
        second = make(arm, *changes)
        second.load_state_dict(through_a_file(first.state_dict()))
        assert [*before, *finish(second, stop)] == rows


def test_all_arms_begin_alike() -> None:
    firsts = [finish(make(arm, "epochs=1", "train_examples=24"))[0] for arm in ("paper-adam", "block-adam")]
    starts = [make(arm)._training.model.state_dict() for arm in ARMS]
    for start in starts[1:]:
        torch.testing.assert_close(start, starts[0], rtol=0, atol=0)
    assert not any(key.startswith("term_b") for first in firsts for key in first)  # there is no P₀


def test_mnist_gives_the_papers_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "mnist").mkdir()
    random = np.random.default_rng(0)
    for split in ("train", "test"):
        images = []
        for _ in range(30):
            file = io.BytesIO()
            Image.fromarray(random.integers(0, 256, (28, 28), dtype=np.uint8)).save(file, "PNG")
            images.append({"bytes": file.getvalue(), "path": None})
        table = pa.table({"image": images, "label": [number % 10 for number in range(30)]})
        pq.write_table(table, tmp_path / "mnist" / f"{split}-0.parquet")
    settings = load(TERMS, "smoke", ["batch.size=10"])
    task = TERMS.task(settings, RunKey("block-adam", "", 0), 1e-3, tmp_path, False)
    assert isinstance(task, TermsTask)
    sizes = [parameter.numel() for parameter in task._training.model.parameters()]
    assert sizes == [78_400, 100, 1_000, 10]
    assert [row["step"] for row in finish(task)] == [3]
    assert task.outcome().numbers["parameters"] == sum(sizes) == 79_510


@pytest.mark.parametrize("scale", ["smoke", "laptop", "paper"])
def test_every_scale_compares_at_one_learning_rate(scale: str) -> None:
    settings = load(TERMS, scale)
    assert {settings.lr[arm] for arm in settings.optimizers} == {1e-3}
    assert (settings.optimizer.eps, settings.optimizer.block_size, settings.batch.size) == (1e-4, 10, 128)
    assert TERMS.objective is None
    if scale == "smoke":
        assert settings.steps(settings.train_examples) == [150]
    else:
        assert sum(settings.steps(settings.train_examples)) == 4690


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            'optimizers=["sgd"]',
            "settings: `optimizers` must be one of 'paper-adam', 'block-adam', 'rmsprop'",
        ),
        ("every=0", "settings: `every` must be an integer >= 1, got 0."),
        ("data=cifar10", "terms: `data` must be one of 'mnist', 'digits', got 'cifar10'."),
    ],
)
def test_settings_that_cannot_be_are_refused(change: str, sentence: str) -> None:
    with pytest.raises(ValueError, match="`") as error:
        load(TERMS, "smoke", [change])
    assert str(error.value).startswith(sentence)


def test_the_model_has_a_relu_between_its_layers() -> None:
    model = mlp(6)
    x = torch.randn(4, 1, 2, 3)
    hidden = (x.flatten(1) @ model.fc1.weight.T + model.fc1.bias).clamp(min=0)
    torch.testing.assert_close(model(x), hidden @ model.fc2.weight.T + model.fc2.bias)


# Claims and drawing -------------------------------------------------------------------------------------------------


def summary_of(out: Path, ratio: float, arms: Sequence[str] = tuple(ARMS), seeds: int = 3) -> Summary:
    """Runs in which every term of a block arm is `ratio` times the diagonal's, give or take a little by seed."""
    settings = {**plain(load(TERMS, "smoke")), "optimizers": list(arms), "seeds": list(range(seeds))}
    write_experiment(out, "terms", "smoke", **settings)
    keys = [metric.key for metric in TERMS.metrics if metric.key.startswith("term")]
    for arm in arms:
        for seed in range(seeds):
            factor = ratio * math.exp(0.01 * (seed - 1)) if arm.startswith("block") else 1.0
            rows = [{"step": step, **dict.fromkeys(keys, factor * 5.0 / step)} for step in (10, 20, 30)]
            write_run(out, arm, "", seed, rows)
    return read(out, TERMS)


@pytest.mark.parametrize(
    ("ratio", "similar", "smaller"),
    [(1.0, True, False), (0.5, True, False), (0.05, False, True), (0.1, False, None), (3.0, None, False)],
)
def test_claims_are_judged_by_the_ratio_of_terms(
    tmp_path: Path, ratio: float, similar: bool | None, smaller: bool | None
) -> None:
    verdicts = [claim.judge(summary_of(tmp_path, ratio)) for claim in TERMS.claims[:1]]
    summary = read(tmp_path, TERMS)
    verdicts += [claim.judge(summary) for claim in TERMS.claims[1:]]
    assert [verdict.held for verdict in verdicts] == [similar, smaller, smaller, smaller]
    low, high = ratio * math.exp(-0.02484), ratio * math.exp(0.02484)
    for verdict in verdicts:
        assert (
            f"Adam (paper) fc1 ×{ratio:.3g} ({low:.3g} to {high:.3g}), Adam (paper) fc2 ×{ratio:.3g}" in verdict.words
        )


def test_claims_are_open_with_one_seed_or_one_arm(tmp_path: Path) -> None:
    for name, summary in {
        "seed": summary_of(tmp_path / "seed", 0.01, seeds=1),
        "arm": summary_of(tmp_path / "arm", 0.01, arms=["paper-adam", "rmsprop"]),
    }.items():
        assert [claim.judge(summary).held for claim in TERMS.claims] == [None] * 4, name


def test_the_drawing_has_every_term(tmp_path: Path) -> None:
    assert TERMS.draw is not None
    (file,) = TERMS.draw(summary_of(tmp_path, 0.5), tmp_path)
    assert file == tmp_path / "terms.png"
    assert file.read_bytes().startswith(b"\x89PNG")
