from __future__ import annotations

import math
from itertools import permutations
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from blockadapt_experiments.models import tcvae
from blockadapt_experiments.models.tcvae import (
    ConvVAE,
    Posterior,
    Terms,
    entropies,
    information_gaps,
    log_weights,
    objective_terms,
)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_posterior(count: int, latents: int, seed: int = 0) -> tuple[Posterior, Tensor]:
    """Posteriors that overlap somewhat, and a sample of each, float64."""
    random = generator(seed)
    mean = torch.randn(count, latents, generator=random, dtype=torch.float64)
    log_std = 0.5 * torch.randn(count, latents, generator=random, dtype=torch.float64) - 0.7
    posterior = Posterior(mean, log_std)
    return posterior, posterior.sample(torch.randn(count, latents, generator=random, dtype=torch.float64))


def density(z: float, mean: float, log_std: float) -> float:
    """N(z; μ, σ²), written out."""
    σ = math.exp(log_std)
    return math.exp(-((z - mean) ** 2) / (2 * σ**2)) / (σ * math.sqrt(2 * math.pi))


# The networks -------------------------------------------------------------------------------------------------------


def count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def test_full_width_has_the_parameters_of_the_authors_networks() -> None:
    model = ConvVAE()
    assert (count(model.encoder), count(model.decoder), count(model)) == (651_860, 646_721, 1_298_581)


@pytest.mark.parametrize("width", [1, 4])
def test_layers_are_those_of_the_authors(width: int) -> None:
    def convolutions(network: nn.Module) -> list[tuple[Any, ...]]:
        layers = [layer for layer in network.modules() if isinstance(layer, (nn.Conv2d, nn.ConvTranspose2d))]
        return [(x.in_channels, x.out_channels, x.kernel_size[0], x.stride[0], x.padding[0]) for x in layers]

    model = ConvVAE(width=width)
    a, b, c = 32 // width, 64 // width, 512 // width
    halving = [(1, a, 4, 2, 1), (a, a, 4, 2, 1), (a, b, 4, 2, 1), (b, b, 4, 2, 1)]
    assert convolutions(model.encoder) == [*halving, (b, c, 4, 1, 0), (c, 20, 1, 1, 0)]
    doubling = [(b, b, 4, 2, 1), (b, a, 4, 2, 1), (a, a, 4, 2, 1), (a, 1, 4, 2, 1)]
    assert convolutions(model.decoder) == [(10, c, 1, 1, 0), (c, b, 4, 1, 0), *doubling]
    kinds = [type(layer).__name__ for layer in model.encoder]
    assert kinds == ["Conv2d", "BatchNorm2d", "ReLU"] * 5 + ["Conv2d"]
    kinds = [type(layer).__name__ for layer in model.decoder]
    assert kinds == ["ConvTranspose2d", "BatchNorm2d", "ReLU"] * 5 + ["ConvTranspose2d"]


def test_means_and_log_deviations_alternate_in_the_encoders_output() -> None:
    model = ConvVAE(latents=3, width=32)
    last = model.encoder[-1]
    assert isinstance(last, nn.Conv2d)
    assert last.bias is not None
    nn.init.zeros_(last.weight)
    with torch.no_grad():
        last.bias.copy_(torch.arange(6.0))
        posterior = model.encode(torch.rand(2, 1, 64, 64))
        assert model.decode(posterior.mean).shape == (2, 1, 64, 64)
    assert posterior.mean.tolist() == [[0.0, 2.0, 4.0]] * 2
    assert posterior.log_std.tolist() == [[1.0, 3.0, 5.0]] * 2
    noise = torch.tensor([[1.0, 0.0, -1.0]])
    torch.testing.assert_close(posterior.sample(noise)[0], torch.tensor([math.e, 2.0, 4 - math.exp(5)]))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"width": 3}, r"^ConvVAE: `width` must be a divisor of 32, got 3.$"),
        ({"width": 0}, r"^ConvVAE: `width` must be an integer >= 1, got 0.$"),
        ({"latents": 0}, r"^ConvVAE: `latents` must be an integer >= 1, got 0.$"),
    ],
)
def test_networks_that_cannot_be_are_refused(options: dict[str, int], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        ConvVAE(**options)


# The objective ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("batch", "images"), [(2, 2), (2, 50), (7, 7), (8, 100)])
def test_stratified_weights_sum_to_one_with_one_image_in_n_on_the_diagonal(batch: int, images: int) -> None:
    weights = log_weights(batch, images, "mss").exp()
    torch.testing.assert_close(weights.sum(1), torch.ones(batch, dtype=torch.float64), rtol=0, atol=1e-15)
    torch.testing.assert_close(weights.diagonal(), torch.full((batch,), 1 / images, dtype=torch.float64))
    others = batch - 1
    expected = [(images - others) / (images * others), *[1 / others] * (others - 1)]
    for row in range(batch):
        rest = torch.cat([weights[row, :row], weights[row, row + 1 :]])
        assert sorted(rest.tolist()) == pytest.approx(sorted(expected), rel=1e-14)


def test_the_authors_strides_miss_the_diagonal() -> None:
    batch, images = 6, 50
    others = batch - 1
    theirs = torch.full((batch, batch), 1 / others, dtype=torch.float64)
    theirs.view(-1)[:: others + 1] = 1 / images  # a stride of B + 1 would be the diagonal
    theirs.view(-1)[1 :: others + 1] = (images - others) / (images * others)
    theirs[others - 1, 0] = (images - others) / (images * others)
    ours = log_weights(batch, images, "mss").exp()
    assert (theirs[:, 0] == 1 / images).sum() == batch - 1
    assert (theirs.diagonal() == 1 / images).sum() == 1
    assert (ours.diagonal() - theirs.diagonal()).abs().max() > 0.1
    posterior, z = random_posterior(batch, 3)
    pairs = tcvae.log_normal(z.unsqueeze(1), *posterior).sum(2)
    estimates = [(weights.log() + pairs).logsumexp(1) for weights in (ours, theirs)]
    assert (estimates[0] - estimates[1])[1:].abs().min() > 0.1  # the first row has the diagonal in the first column


def test_stratified_estimates_are_right_on_average_over_all_minibatches() -> None:
    images, batch = 6, 4
    densities = np.random.default_rng(0).random(images)
    weights = log_weights(batch, images, "mss").exp().numpy()
    for row in range(batch):
        for own in range(images):
            others = [other for other in range(images) if other != own]
            found = []
            for drawn in permutations(others, batch - 1):
                batch_densities = densities[[*drawn[:row], own, *drawn[row:]]]
                found.append(weights[row] @ batch_densities)
            assert np.mean(found) == pytest.approx(densities.mean(), rel=1e-12)


@pytest.mark.parametrize("estimator", ["mws", "mss"])
def test_terms_are_those_of_a_plain_loop(estimator: Any) -> None:
    batch, latents, images = 5, 3, 40
    posterior, z = random_posterior(batch, latents)
    x = (torch.rand(batch, 1, 2, 3, generator=generator(1)) < 0.5).to(torch.float64)
    logits = 3 * torch.randn(batch, 1, 2, 3, generator=generator(2), dtype=torch.float64)
    sums = np.zeros(4)
    for i in range(batch):
        for pixel, logit in zip(x[i].flatten().tolist(), logits[i].flatten().tolist(), strict=True):
            p = 1 / (1 + math.exp(-logit))
            sums[0] += math.log(p if pixel else 1 - p)
        q = np.array(
            [
                [density(z[i, k], posterior.mean[j, k], posterior.log_std[j, k]) for k in range(latents)]
                for j in range(batch)
            ]
        )
        if estimator == "mws":
            w = np.full(batch, 1 / (batch * images))
        else:
            w = np.full(batch, 1 / (batch - 1))
            w[i] = 1 / images
            w[(i + 1) % batch] = (images - batch + 1) / (images * (batch - 1))
        joint = math.log(w @ q.prod(axis=1))
        product = np.log(w @ q).sum()
        prior = sum(math.log(density(z[i, k], 0.0, 0.0)) for k in range(latents))
        sums[1:] += [math.log(q[i].prod()) - joint, joint - product, product - prior]
    terms = objective_terms(x, logits, z, posterior, images, estimator)
    np.testing.assert_allclose(torch.stack(terms).numpy(), sums / batch, rtol=1e-11)
    β = 6.0
    expected = sums[0] - sums[1] - β * sums[2] - sums[3]
    assert terms.objective(β).item() == pytest.approx(expected / batch, rel=1e-11)


@pytest.mark.parametrize("estimator", ["mws", "mss"])
def test_with_beta_one_it_is_the_elbo_whatever_the_estimator(estimator: Any) -> None:
    posterior, z = random_posterior(6, 4)
    x, logits = torch.zeros(6, 1, 2, 2, dtype=torch.float64), torch.zeros(6, 1, 2, 2, dtype=torch.float64)
    terms = objective_terms(x, logits, z, posterior, 1000, estimator)
    kl = torch.distributions.Normal(posterior.mean, posterior.log_std.exp()).log_prob(z).sum(1)
    kl = kl - torch.distributions.Normal(0.0, 1.0).log_prob(z).sum(1)
    assert terms.objective(1.0).item() == pytest.approx(-4 * math.log(2) - kl.mean().item(), rel=1e-12)


def test_posteriors_that_are_all_the_prior_show_the_bias_of_weighted_sampling() -> None:
    z = torch.randn(8, 3, dtype=torch.float64)
    posterior = Posterior(torch.zeros(8, 3, dtype=torch.float64), torch.zeros(8, 3, dtype=torch.float64))
    nothing = torch.zeros(8, 1, 1, 1, dtype=torch.float64)
    log_n = math.log(500)
    for estimator, expected in (("mws", [log_n, 2 * log_n, -3 * log_n]), ("mss", [0.0, 0.0, 0.0])):
        terms = objective_terms(nothing, nothing, z, posterior, 500, estimator)  # type: ignore[arg-type]
        np.testing.assert_allclose(torch.stack(terms[1:]).numpy(), expected, atol=1e-12)


@pytest.mark.parametrize("estimator", ["mws", "mss"])
def test_gradients_reach_every_posterior_through_the_sample_and_through_q_of_z(estimator: Any) -> None:
    posterior, _ = random_posterior(4, 2)
    noise = torch.randn(4, 2, dtype=torch.float64)
    x = torch.ones(4, 1, 1, 2, dtype=torch.float64)

    def objective(mean: Tensor, log_std: Tensor) -> Tensor:
        drawn = Posterior(mean, log_std)
        z = drawn.sample(noise)
        return objective_terms(x, z.view(4, 1, 1, 2), z, drawn, 30, estimator).objective(6.0)

    inputs = [each.clone().requires_grad_() for each in posterior]
    assert torch.autograd.gradcheck(objective, inputs)


def test_terms_keep_their_names_in_the_order_of_the_objective() -> None:
    terms = Terms(*(torch.tensor(value) for value in (-10.0, 2.0, 0.5, 1.0)))
    assert terms.objective(1.0).item() == -13.5
    assert terms.objective(4.0).item() == -15.0


# Mutual Information Gap ---------------------------------------------------------------------------------------------


def grid_classes(*sizes: int) -> Tensor:
    return torch.cartesian_prod(*(torch.arange(size) for size in sizes))


def saying(values: Tensor) -> tuple[Tensor, Tensor]:
    """A latent that is these values, ten apart, almost exactly: mean and log σ."""
    return 10.0 * values.to(torch.float64), torch.full(values.shape, math.log(1e-3), dtype=torch.float64)


def silent(count: int) -> tuple[Tensor, Tensor]:
    """A latent that says nothing: the prior for every image."""
    return torch.zeros(count, dtype=torch.float64), torch.zeros(count, dtype=torch.float64)


def gaps_of(classes: Tensor, *latents: tuple[Tensor, Tensor], samples: int = 10_000) -> list[float]:
    posterior = Posterior(*(torch.stack(each, dim=1) for each in zip(*latents, strict=True)))
    z = posterior.sample(torch.randn(posterior.mean.shape, generator=generator(3), dtype=torch.float64))
    found: list[float] = information_gaps(z, posterior, classes, samples, generator()).tolist()
    return found


def test_a_latent_that_is_a_factor_has_the_whole_gap_and_a_silent_one_none() -> None:
    classes = grid_classes(8, 5, 6)
    nothing = silent(len(classes))
    gaps = gaps_of(classes, nothing, saying(classes[:, 0]), nothing, saying(classes[:, 1]))
    np.testing.assert_allclose(gaps, [1, 1, 0], atol=1e-12)
    assert gaps_of(classes, nothing, nothing) == pytest.approx([0, 0, 0], abs=1e-12)


def test_a_factor_that_two_latents_know_has_the_gap_between_them() -> None:
    classes = grid_classes(8, 6)
    factor, nothing = classes[:, 0], silent(len(classes))
    assert gaps_of(classes, saying(factor), saying(-factor), nothing)[0] == pytest.approx(0, abs=1e-12)
    half = saying(factor // 2)
    assert gaps_of(classes, nothing, saying(factor), half)[0] == pytest.approx(math.log(2) / math.log(8), rel=1e-10)
    assert gaps_of(classes, half, nothing)[0] == pytest.approx(math.log(4) / math.log(8), rel=1e-10)


def test_a_latent_of_two_factors_tells_each_in_part() -> None:
    classes = grid_classes(4, 4)
    both = saying(classes.sum(1))
    counts = np.array([1, 2, 3, 4, 3, 2, 1]) / 16
    information = -(counts * np.log(counts)).sum() - math.log(4)  # H(a + b) − H(a + b | a)
    share = information / math.log(4)
    np.testing.assert_allclose(gaps_of(classes, both, silent(16)), [share, share], rtol=1e-10)


def test_gaps_are_those_of_a_plain_loop_with_fewer_samples_than_images() -> None:
    classes = grid_classes(3, 4)
    posterior, z = random_posterior(12, 3)
    samples, random = 3, generator(5)

    def entropy(rows: list[int]) -> np.ndarray:
        chosen = [rows[place] for place in torch.randperm(len(rows), generator=random)[:samples].tolist()]
        found = np.zeros(3)
        for k in range(3):
            for row in chosen:
                each = [density(z[row, k], posterior.mean[n, k], posterior.log_std[n, k]) for n in rows]
                found[k] -= math.log(np.mean(each)) / len(chosen)
        return found

    marginal, expected = entropy(list(range(12))), []
    for factor, values in ((0, 3), (1, 4)):
        parts = [entropy(torch.nonzero(classes[:, factor] == value).flatten().tolist()) for value in range(values)]
        information = np.sort(np.maximum(marginal - np.mean(parts, axis=0), 0))[::-1]
        expected.append((information[0] - information[1]) / math.log(values))
    gaps = information_gaps(z, posterior, classes, samples, generator(5))
    assert gaps.dtype == torch.float64
    np.testing.assert_allclose(gaps.numpy(), expected, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_chunks_do_not_matter(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    posterior, z = random_posterior(50, 4)
    posterior, z = Posterior(*(each.to(dtype) for each in posterior)), z.to(dtype)
    whole = entropies(z, posterior, 30, generator())
    for pairs in (1, 120, 151):
        monkeypatch.setattr(tcvae, "PAIRS_AT_ONCE", pairs)
        torch.testing.assert_close(entropies(z, posterior, 30, generator()), whole, rtol=1e-6, atol=1e-7)
    assert whole.dtype == torch.float64


def test_the_entropy_of_one_normal_is_known() -> None:
    images = 20_000
    log_std = torch.full((images, 1), math.log(0.3))
    posterior = Posterior(torch.full((images, 1), 2.0), log_std)
    z = posterior.sample(torch.randn(images, 1, generator=generator(7)))
    exact = 0.5 * math.log(2 * math.pi * math.e) + math.log(0.3)
    # The standard error is √½/√500: 0.03.
    assert entropies(z, posterior, 500, generator()).item() == pytest.approx(exact, abs=0.1)
