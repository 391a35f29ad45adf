from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from blockadapt import plan
from blockadapt_experiments.contenders.catalogue import make_optimizer
from blockadapt_experiments.core.config import load, plain
from blockadapt_experiments.data.sprites import SIZES, load_sprites
from blockadapt_experiments.experiments.registry import get_experiment
from blockadapt_experiments.experiments.tcvae.drawing import SPAN
from blockadapt_experiments.experiments.tcvae.experiment import (
    TCVAE,
    TcvaeSettings,
    TcvaeTask,
    judge_best,
    judge_higher,
)
from blockadapt_experiments.models.tcvae import Posterior, Terms, information_gaps
from blockadapt_experiments.report.reading import read
from blockadapt_experiments.results.measurements import RunKey
from blockadapt_experiments.results.summary import Summary
from blockadapt_experiments.running.forecast import dry_run
from blockadapt_experiments.running.runner import Request
from support.files import through_a_file
from support.laboratory import finish
from support.run_records import write_experiment, write_run

TINY = ("values=[1, 2, 2, 3, 3]", "width=32", "latents=3", "batch=8", "steps=11", "every=2", "mig_every=4")
"""36 images: an epoch has four minibatches, and four images that fill none."""

CONTENDERS = (
    "sgd", "paper-adam", "adam", "adabound", "amsbound", "ggt", "soap", "block-adam", "block-adam-clip",
    "block-rmsprop",
)  # fmt: skip


def settings(*changes: str) -> TcvaeSettings:
    return load(TCVAE, "smoke", (*TINY, *changes))


def make(
    arm: str = "adam", *changes: str, lr: float = 1e-3, beta: float = 6, seed: int = 0, tuning: bool = False
) -> TcvaeTask:
    chosen = settings(f"betas=[{beta}]", *changes)
    task = TCVAE.task(chosen, RunKey(arm, f"beta={beta:g}", seed), lr, None, tuning)
    assert isinstance(task, TcvaeTask)
    return task


# Runs ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tuning", [False, True])
@pytest.mark.parametrize("arm", ["sgd", "adabound", "block-adam-clip"])
def test_a_run_that_was_stopped_ends_bit_identically(arm: str, tuning: bool) -> None:
    rows, outcome = finish(make(arm, tuning=tuning))
    assert len(rows) == make(arm).legs == 6
    for stop in range(7):
        first = make(arm, tuning=tuning)
        before = [row for _ in range(stop) for row in first.advance()]
        second = make(arm, tuning=tuning)
        second.load_state_dict(through_a_file(first.state_dict()))
        after, end = finish(second, stop)
        assert [*before, *after] == rows
        np.testing.assert_equal(end.numbers, outcome.numbers)
        for name, array in outcome.arrays.items():
            np.testing.assert_array_equal(end.arrays[name], array)


@pytest.mark.parametrize("arm", CONTENDERS)
def test_all_contenders_start_alike_and_move(arm: str) -> None:
    task, other = make(arm, "every=1", "width=8", lr=1e-4), make("sgd", "every=1", "width=8", lr=1e-3)
    before = {name: value.clone() for name, value in task.model.named_parameters()}
    assert all(torch.equal(value, before[name]) for name, value in other.model.named_parameters())
    assert task.advance() == other.advance()  # measured before the first step
    task.advance()  # SOAP's first step only sets its basis
    kernels = [(name, value) for name, value in task.model.named_parameters() if value.dim() == 4]
    assert len(kernels) == 12
    assert not any(torch.equal(value, before[name]) for name, value in kernels)
    assert task.step == 2


def test_rows_hold_the_terms_averaged_over_their_steps() -> None:
    single, _ = finish(make("adam", "every=1"))
    pairs, outcome = finish(make("adam"))
    assert [row["step"] for row in pairs] == [2, 4, 6, 8, 10, 11]
    assert [row["step"] for row in pairs if "mig" in row] == [4, 8, 11]
    names = ("elbo", *Terms._fields)
    for index, row in enumerate(pairs):
        for name in names:
            expected = np.mean([each[name] for each in single[2 * index : 2 * index + 2]])
            assert row[name] == pytest.approx(expected, rel=1e-12)
        parts = row["reconstruction"] - row["mutual_information"] - row["total_correlation"] - row["dimension_kl"]
        assert row["elbo"] == pytest.approx(parts, rel=1e-12)
        assert row.keys() <= {"step", *names, "mig"}
    assert outcome.numbers["steps"] == 11


def test_measuring_changes_nothing() -> None:
    often, _ = finish(make("block-adam", "mig_every=2"))
    once, _ = finish(make("block-adam", "mig_every=100"))
    assert [{k: v for k, v in row.items() if k != "mig"} for row in often[:-1]] == once[:-1]
    assert often[-1] == once[-1]


def test_an_epoch_has_every_image_at_most_once_in_a_new_order() -> None:
    task = make("sgd", "every=1", lr=1e-6)
    seen = []
    for _ in range(8):
        seen.append(task._minibatch())
        task.step += 1
    for epoch in (seen[:4], seen[4:]):
        assert len(torch.cat(epoch).unique()) == 32
    assert not torch.equal(torch.cat(seen[:4]), torch.cat(seen[4:]))
    assert not torch.equal(seen[0], make("sgd", seed=1)._minibatch())


def test_the_gap_is_measured_on_all_images_with_running_statistics() -> None:
    task = make("adam", "mig_samples=20")
    rows, outcome = finish(task)
    sprites = load_sprites("dsprites-like", (1, 2, 2, 3, 3))
    task.model.eval()
    with torch.no_grad():
        posterior = task.model.encode(sprites.images(torch.arange(36)))
        generator = torch.Generator().manual_seed(task.measuring)
        z = posterior.sample(torch.randn(36, 3, generator=generator))
        classes = torch.from_numpy(sprites.classes[:, 1:])
        gaps = information_gaps(z, Posterior(*posterior), classes, 20, generator)
    found = [outcome.numbers[f"gap_{factor}"] for factor in ("scale", "orientation", "x", "y")]
    np.testing.assert_allclose(found, gaps.numpy(), atol=1e-6)
    assert rows[-1]["mig"] == pytest.approx(np.mean(found), rel=1e-12)


def test_tuning_sees_no_gap_and_trains_on_no_validation_image() -> None:
    task = make("adam", tuning=True)
    assert task.validation is not None
    assert len(task.validation) == 6
    assert sorted([*task.validation.tolist(), *task.train.tolist()]) == list(range(36))
    assert torch.equal(task.validation, make("sgd", seed=5, tuning=True).validation)  # type: ignore[arg-type]
    rows, outcome = finish(task)
    assert not any("mig" in row for row in rows)
    assert all(math.isnan(outcome.numbers[f"gap_{factor}"]) for factor in ("scale", "orientation", "x", "y"))
    task.model.eval()
    with torch.no_grad():
        terms = task._terms(task.validation, torch.Generator().manual_seed(task.measuring))
    expected = terms.reconstruction - terms.mutual_information - 6 * terms.total_correlation - terms.dimension_kl
    assert rows[-1]["validation_objective"] == pytest.approx(expected.item(), rel=1e-6)
    assert TCVAE.objective == "validation_objective"


def test_beta_is_the_variants() -> None:
    first, second = (make("sgd", "every=1", lr=1e-4, beta=beta) for beta in (0, 12))
    assert first.advance() == second.advance()
    assert first.advance() != second.advance()
    assert TCVAE.variants(settings("betas=[1, 2.5, 10]")) == ["beta=1", "beta=2.5", "beta=10"]


@pytest.mark.parametrize(("arm", "tuning"), [("sgd", False), ("block-adam", True)])
def test_a_loss_that_is_not_finite_ends_the_run(arm: str, tuning: bool) -> None:
    rows, outcome = finish(make(arm, lr=1e9, tuning=tuning))
    assert outcome.numbers["diverged"] == 1
    assert not outcome.arrays
    assert len(rows) < 6
    assert math.isnan(rows[-1]["validation_objective" if tuning else "mig"])
    assert outcome.numbers["steps"] == rows[-1]["step"] < 11


def test_pictures_are_decoded_from_means_with_one_latent_moved() -> None:
    task = make("adam")
    _, outcome = finish(task)
    arrays = outcome.arrays
    rows = task.shown[:8]
    images = task.sprites.images(rows)
    np.testing.assert_array_equal(arrays["originals"], 255 * images.squeeze(1).numpy())
    task.model.eval()
    with torch.no_grad():
        posterior = task.model.encode(images)
        decoded = 255 * task.model.decode(posterior.mean).sigmoid().squeeze(1).numpy()
        np.testing.assert_allclose(arrays["reconstructions"], decoded, atol=0.51)
        assert arrays["traversals"].shape == (3, len(SPAN), 64, 64)
        z = posterior.mean[:1].clone()
        z[0, 1] = SPAN[5]
        decoded = 255 * task.model.decode(z).sigmoid().squeeze(1).numpy()
        np.testing.assert_allclose(arrays["traversals"][1, 5], decoded[0], atol=0.51)
        posterior = task.model.encode(task.sprites.images(task.shown))
        prior = torch.distributions.Normal(0.0, 1.0)
        kl = torch.distributions.kl_divergence(
            torch.distributions.Normal(posterior.mean, posterior.log_std.exp()), prior
        )
        np.testing.assert_allclose(arrays["latent_kl"], kl.mean(0).numpy(), rtol=1e-4, atol=1e-6)


# Settings -----------------------------------------------------------------------------------------------------------


def test_the_papers_scale_is_the_papers() -> None:
    paper = load(TCVAE, "paper")
    assert (paper.batch, paper.width, paper.latents, paper.values, len(paper.seeds)) == (2048, 1, 10, SIZES, 5)
    assert paper.steps * paper.batch == 50 * math.prod(SIZES)
    assert paper.betas == tuple(range(1, 11))
    assert paper.estimator == "mws"
    assert set(CONTENDERS) <= set(paper.optimizers)


@pytest.mark.parametrize("scale", ["smoke", "laptop", "paper"])
def test_every_scale_has_settings(scale: str) -> None:
    chosen = load(get_experiment("tcvae"), scale)
    assert {"paper-adam", "adam", "block-adam"} <= set(chosen.optimizers)
    assert "beta=6" in TCVAE.variants(chosen)
    assert math.prod(chosen.values) - chosen.held_out >= chosen.batch


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ("values=[1, 1, 2, 3, 3]", r"`values of scale` must be an integer in \[2, 6\], got 1"),
        ("values=[0, 2, 2, 3, 3]", r"`values of shape` must be an integer in \[1, 3\], got 0"),
        ("values=[1, 2, 41, 3, 3]", r"`values of orientation` must be an integer in \[2, 40\], got 41"),
        ("values=[1, 2]", r"`values` must be a list of 5"),
        ("betas=[]", r"`betas` must be one or more different numbers >= 0"),
        ("betas=[1, 1.0]", r"`betas` must be one or more different numbers >= 0"),
        ("betas=[-1]", r"`betas` must be one or more different numbers >= 0"),
        ("batch=1", r"`batch` must be an integer in \[2, 30\], got 1"),
        ("batch=31", r"`batch` must be an integer in \[2, 30\], got 31"),
        ("mig_every=3", r"`mig_every` must be a multiple of `every`, 2, got 3"),
        ("latents=1", r"`latents` must be an integer >= 2, got 1"),
        ("validation_fraction=1.0", r"`validation_fraction` must be in \(0, 1\), got 1.0"),
        ("data=faces", r"`data` must be one of 'dsprites-like', 'dsprites', got 'faces'"),
        ("estimator=exact", r"`estimator` must be one of 'mws', 'mss'"),
        ("width=5", r"`width` must be a divisor of 32, got 5"),
    ],
)
def test_settings_that_cannot_be_are_refused(change: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        TCVAE.task(settings(change), RunKey("adam", "beta=6", 0), 1e-3, None, False)


def test_blocks_are_spatial_kernels_and_in_the_last_layer_of_the_encoder_outputs_of_one_input() -> None:
    paper = load(TCVAE, "paper")
    model = TCVAE.model(paper)
    assert sum(parameter.numel() for parameter in model.parameters()) == 1_298_581
    rows = {row.name: row for row in plan(make_optimizer("block-adam", model, 1e-3, paper.optimizer, steps=1)).rows}
    spatial = {name: value for name, value in model.named_parameters() if value.shape[2:] == (4, 4)}
    assert len(spatial) == 10
    for name, value in spatial.items():
        assert (rows[name].grouping, rows[name].sizes) == ("filter", {16: value.shape[0] * value.shape[1]})
    assert (rows["encoder.15.weight"].grouping, rows["encoder.15.weight"].sizes) == ("input", {10: 2 * 512})


def test_a_dry_run_can_tell_what_a_run_takes(tmp_path: Path) -> None:
    request = Request("tcvae", "smoke", settings("optimizers=['block-adam']"), tmp_path)
    (forecast,) = dry_run(request)
    assert (forecast.arm, forecast.variant, forecast.steps) == ("block-adam", "beta=6", 11)
    assert forecast.seconds >= 11 * forecast.step_seconds > 0
    assert make().work.measured == 3 * 36 / 8


# Claims and drawings ------------------------------------------------------------------------------------------------

Gaps = Mapping[tuple[str, float], Sequence[float]]


def summary_of(out: Path, gaps: Gaps) -> Summary:
    """A summary of runs that ended with these MIGs, by arm and β, a value a seed."""
    arms, betas = (list(dict.fromkeys(key[part] for key in gaps)) for part in (0, 1))
    seeds = range(max(map(len, gaps.values())))
    changes = {"optimizers": arms, "betas": betas, "seeds": list(seeds)}
    write_experiment(out, "tcvae", "smoke", settings={**plain(load(TCVAE, "smoke")), **changes})
    for (arm, beta), values in gaps.items():
        for seed, value in enumerate(values):
            rows = [{"step": 20, "elbo": -9.0, "mig": 0.01}, {"step": 40, "elbo": -5.0, "mig": value}]
            write_run(out, arm, f"beta={beta:g}", seed, rows)
    return read(out)


HIGH, LOW, MIXED = (0.30, 0.31, 0.32), (0.10, 0.11, 0.12), (0.05, 0.2, 0.6)


@pytest.mark.parametrize(
    ("gaps", "held"),
    [
        ({("paper-adam", 1): LOW, ("block-adam", 1): HIGH, ("paper-adam", 6): LOW, ("block-adam", 6): HIGH}, True),
        ({("paper-adam", 1): LOW, ("block-adam", 1): HIGH, ("paper-adam", 8): HIGH, ("block-adam", 8): LOW}, True),
        ({("paper-adam", 1): LOW, ("block-adam", 1): HIGH, ("paper-adam", 6): HIGH, ("block-adam", 6): LOW}, False),
        ({("paper-adam", 1): LOW, ("block-adam", 1): HIGH, ("paper-adam", 6): LOW, ("block-adam", 6): MIXED}, None),
        ({("paper-adam", 8): LOW, ("block-adam", 8): HIGH}, None),
        ({("paper-adam", 6): LOW[:1], ("block-adam", 6): HIGH[:1]}, None),
        ({("paper-adam", 6): LOW, ("block-adam", 6): (0.3, 0.3, math.nan)}, None),
        ({("paper-adam", 6): LOW, ("sgd", 6): HIGH}, None),
    ],
)
def test_block_above_diagonal_is_judged_at_every_beta_but_eight(tmp_path: Path, gaps: Gaps, held: bool | None) -> None:
    verdict = judge_higher(summary_of(tmp_path, gaps))
    assert verdict.held is held
    if ("block-adam", 8) in gaps:
        assert "beta=8 (excepted)" in verdict.words
    if ("block-adam", 1) in gaps:
        assert "beta=1 0.31 ± 0.025 against 0.11 ± 0.025, difference 0.2 ± " in verdict.words


@pytest.mark.parametrize(
    ("gaps", "held"),
    [
        ({("block-adam", 4): LOW, ("block-adam", 6): HIGH, ("block-adam", 10): LOW}, True),
        ({("block-adam", 4): LOW, ("block-adam", 6): HIGH, ("block-adam", 10): MIXED}, None),
        ({("block-adam", 4): HIGH, ("block-adam", 6): LOW, ("block-adam", 10): LOW}, False),
        ({("block-adam", 1): LOW, ("block-adam", 6): HIGH}, None),
        ({("block-adam", 1): HIGH, ("block-adam", 6): LOW}, False),
        ({("block-adam", 6): HIGH}, None),
        ({("paper-adam", 4): LOW, ("paper-adam", 6): HIGH, ("paper-adam", 10): LOW}, None),
    ],
)
def test_the_best_beta_needs_others_on_both_sides(tmp_path: Path, gaps: Gaps, held: bool | None) -> None:
    verdict = judge_best(summary_of(tmp_path, gaps))
    assert verdict.held is held
    assert ("No β on one side of 6 ran" in verdict.words) is (set(gaps) >= {("block-adam", 1), ("block-adam", 6)})


def test_drawings_show_finished_runs(tmp_path: Path) -> None:
    assert TCVAE.draw is not None
    chosen = settings("betas=[1, 6, 8]", "optimizers=['paper-adam', 'block-adam']", "seeds=[0, 1]")
    write_experiment(tmp_path, "tcvae", "smoke", settings=plain(chosen))
    assert list(TCVAE.draw(read(tmp_path), tmp_path)) == []
    for arm in chosen.optimizers:
        for beta in (1, 6):
            rows, outcome = finish(make(arm, beta=beta))
            write_run(tmp_path, arm, f"beta={beta}", 0, rows, numbers=outcome.numbers, arrays=outcome.arrays)
    files = TCVAE.draw(read(tmp_path), tmp_path)
    pictures = [f"tcvae-{kind}-beta-{beta}.png" for beta in (1, 6) for kind in ("reconstructions", "traversals")]
    assert [file.name for file in files] == ["tcvae-mig-against-beta.png", *pictures]
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in files)


def test_the_data_are_named_for_what_they_are(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^data: dSprites was not found in"):
        TCVAE.task(settings("data=dsprites"), RunKey("adam", "beta=6", 0), 1e-3, tmp_path, False)
    assert make("adam").sprites.name == "dSprites-like"
