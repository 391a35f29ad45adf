"""Holds the β-TCVAE of Chen et al. (2018): networks, objective and Mutual Information Gap.

With an encoder q(z|x) of independent normals, q(z) its mean over the data and a standard normal prior p(z), it
maximises the mean over a minibatch, with one z drawn for each x, of

    log p(x|z) − [log q(z|x) − log q(z)] − β [log q(z) − Σₖ log q(zₖ)] − [Σₖ log q(zₖ) − log p(z)].

The brackets are mutual information, total correlation and dimension-wise KL. With β = 1 this is the ELBO, in which q(z)
cancels. q(z) itself is a mean over all N images, estimated from the B in the minibatch, in one of two ways:

    mws   log q(zᵢ) ≈ log Σⱼ q(zᵢ|xⱼ)/(BN); too low, by log N where all q(·|xⱼ) are alike, by log B where none overlap
    mss   log q(zᵢ) ≈ log Σⱼ wᵢⱼ q(zᵢ|xⱼ), with weights that leave no bias before the logarithm

So the three terms compare only between runs of one estimator, minibatch size and data set.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from blockadapt.validation import require, require_integer

Estimator = Literal["mws", "mss"]

CHANNELS = (32, 32, 64, 64)
"""Of the convolutions that halve an image, from 64 × 64 to 4 × 4."""

HIDDEN = 512
"""Channels between the convolutions and the latents."""

PAIRS_AT_ONCE = 2**18
"""Densities of one latent that MIG holds in memory at once; with more, they leave the cache."""


class Posterior(NamedTuple):
    """Holds q(z|x) of some images: means and log standard deviations, [images, latents]."""

    mean: Tensor
    log_std: Tensor

    def sample(self, noise: Tensor) -> Tensor:
        """Draw z = μ + σ ε."""
        return self.mean + self.log_std.exp() * noise


class ConvVAE(nn.Module):
    """Holds the convolutional networks of the β-TCVAE's authors, for images of 1 × 64 × 64; torch sets the weights.

    Full width has 1,298,581 parameters, 651,860 of them in the encoder.

    Args:
        latents: Dimensions of z.
        width: What all channel counts are divided by.
    """

    def __init__(self, latents: int = 10, width: int = 1) -> None:
        super().__init__()
        require_integer("ConvVAE", "latents", latents, least=1)
        require_integer("ConvVAE", "width", width, least=1)
        require(CHANNELS[0] % width == 0, "ConvVAE", "width", f"a divisor of {CHANNELS[0]}", width)
        self.latents = latents
        channels, hidden = [count // width for count in CHANNELS], HIDDEN // width
        shrinking = [nn.Conv2d(*pair, 4, 2, 1) for pair in pairwise((1, *channels))]
        growing = [nn.ConvTranspose2d(*pair, 4, 2, 1) for pair in pairwise(reversed(channels))]
        self.encoder = nn.Sequential(
            *_normalised([*shrinking, nn.Conv2d(channels[-1], hidden, 4)]), nn.Conv2d(hidden, 2 * latents, 1)
        )
        opening = [nn.ConvTranspose2d(latents, hidden, 1), nn.ConvTranspose2d(hidden, channels[-1], 4)]
        self.decoder = nn.Sequential(*_normalised([*opening, *growing]), nn.ConvTranspose2d(channels[0], 1, 4, 2, 1))

    def forward(self, images: Tensor, noise: Tensor) -> tuple[Posterior, Tensor, Tensor]:
        """Compute q(z|x) of images [count, 1, 64, 64], a z of each by this noise, and logits of its pixels."""
        posterior = self.encode(images)
        z = posterior.sample(noise)
        return posterior, z, self.decode(z)

    def encode(self, images: Tensor) -> Posterior:
        """Compute q(z|x) of images [count, 1, 64, 64]."""
        parameters = self.encoder(images).view(-1, self.latents, 2)
        return Posterior(parameters[..., 0], parameters[..., 1])

    def decode(self, z: Tensor) -> Tensor:
        """Compute logits of the pixels, [count, 1, 64, 64], for z [count, latents]."""
        logits: Tensor = self.decoder(z.view(-1, self.latents, 1, 1))
        return logits


def _normalised(layers: Sequence[nn.Conv2d | nn.ConvTranspose2d]) -> list[nn.Module]:
    """Put BatchNorm and ReLU after each layer."""
    return [module for layer in layers for module in (layer, nn.BatchNorm2d(layer.out_channels), nn.ReLU())]


# The objective ------------------------------------------------------------------------------------------------------


class Terms(NamedTuple):
    """Holds the terms of the objective, means over a minibatch, in nats an image."""

    reconstruction: Tensor
    mutual_information: Tensor
    total_correlation: Tensor
    dimension_kl: Tensor

    def objective(self, beta: float) -> Tensor:
        """Return what is maximised; it is the ELBO for β = 1."""
        penalties = self.mutual_information + beta * self.total_correlation + self.dimension_kl
        return self.reconstruction - penalties


def log_normal(z: Tensor, mean: Tensor | float, log_std: Tensor | float) -> Tensor:
    """Compute log N(z; μ, σ²), elementwise."""
    log_std = torch.as_tensor(log_std, dtype=z.dtype, device=z.device)
    return -0.5 * ((z - mean) * torch.exp(-log_std)) ** 2 - log_std - 0.5 * math.log(2 * math.pi)


def log_weights(batch: int, count: int, estimator: Estimator) -> Tensor:
    """Compute log w, float64 [batch, batch], such that q(zᵢ) ≈ Σⱼ wᵢⱼ q(zᵢ|xⱼ).

    Minibatch stratified sampling has wᵢᵢ = 1/N, and with M = B − 1 then (N − M)/(NM) for one fixed other j and 1/M for
    the rest; a row sums to 1. (The authors' code fills the first two columns in place of the diagonal and the one
    beside it, which weighs the wrong images.)

    Args:
        batch: B, images in the minibatch.
        count: N, images in the data set.
        estimator: "mws" or "mss".
    """
    if estimator == "mws":
        return torch.full((batch, batch), -math.log(batch * count), dtype=torch.float64)
    others = batch - 1
    weights = torch.full((batch, batch), 1 / others, dtype=torch.float64)
    rows = torch.arange(batch)
    weights[rows, rows] = 1 / count
    weights[rows, (rows + 1) % batch] = (count - others) / (count * others)
    return weights.log()


def objective_terms(
    images: Tensor, logits: Tensor, z: Tensor, posterior: Posterior, count: int, estimator: Estimator
) -> Terms:
    """Compute the terms of the objective.

    Args:
        images: x, pixels in [0, 1], [B, 1, 64, 64].
        logits: Of p(x|z), of the same shape.
        z: One sample from each posterior, [B, latents].
        posterior: q(z|x).
        count: N, images in the data set.
        estimator: How q(z) is estimated.
    """
    reconstruction = -binary_cross_entropy_with_logits(logits, images, reduction="none").flatten(1).sum(1)
    densities = log_normal(z.unsqueeze(1), posterior.mean, posterior.log_std)  # [i, j, k]: log q(zᵢₖ|xⱼ)
    weights = log_weights(len(z), count, estimator).to(z)
    joint = (weights + densities.sum(2)).logsumexp(1)
    product = (weights.unsqueeze(2) + densities).logsumexp(1).sum(1)
    own = log_normal(z, *posterior).sum(1)
    prior = log_normal(z, 0.0, 0.0).sum(1)
    return Terms(reconstruction.mean(), (own - joint).mean(), (joint - product).mean(), (product - prior).mean())


# Mutual Information Gap ---------------------------------------------------------------------------------------------


def information_gaps(
    z: Tensor, posterior: Posterior, classes: Tensor, samples: int, generator: torch.Generator
) -> Tensor:
    """Measure how much more the best latent says about each factor than the second, as a share of the factor's entropy.

    Iₖ = H(zₖ) − mean over values v of H(zₖ | factor = v), in nats, at least 0; the gap is (I₁ − I₂) / log(number of
    values) with I sorted downwards. Their mean over factors is the Mutual Information Gap, MIG.

    Args:
        z: One sample for each image of the data set, [N, latents].
        posterior: q(z|x) of each.
        classes: Which value each factor has, [N, factors]; each has two values or more.
        samples: The most z that entropies are means over.
        generator: Chooses them.

    Returns:
        The gap of each factor, float64 [factors].
    """
    marginal = entropies(z, posterior, samples, generator)
    gaps = []
    for factor in classes.T:
        values = factor.unique()
        conditional = torch.zeros_like(marginal)
        for value in values:
            (rows,) = torch.nonzero(factor == value, as_tuple=True)
            part = Posterior(posterior.mean[rows], posterior.log_std[rows])
            conditional += entropies(z[rows], part, samples, generator) / len(values)
        information = (marginal - conditional).clamp(min=0).sort(descending=True).values
        gaps.append((information[0] - information[1]) / math.log(len(values)))
    return torch.stack(gaps)


def entropies(z: Tensor, posterior: Posterior, samples: int, generator: torch.Generator) -> Tensor:
    """Compute H(zₖ) = −mean over some of the z of log (1/N) Σₙ q(zₖ|xₙ), for each latent, float64 [latents].

    Args:
        z: One sample for each image, [N, latents].
        posterior: q(z|x) of each.
        samples: The most z to average over; they are chosen at random.
        generator: Chooses them; on the CPU.
    """
    count = len(z)
    order = torch.randperm(count, generator=generator)[:samples]
    chosen = z[order.to(z.device)]
    # Latents first, so that sums over images run through memory.
    mean, log_std = (each.T.contiguous().unsqueeze(1) for each in posterior)
    total = torch.zeros(z.shape[1], dtype=torch.float64, device=z.device)
    for part in chosen.split(max(1, PAIRS_AT_ONCE // count)):
        densities = log_normal(part.T.unsqueeze(2), mean, log_std)
        total += densities.logsumexp(2).to(torch.float64).sum(1)
    return math.log(count) - total / len(chosen)
