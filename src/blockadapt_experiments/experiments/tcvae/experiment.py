"""Runs `tcvae`: the β-TCVAE's Mutual Information Gap against β, block against diagonal.

The paper takes the code of the β-TCVAE's authors with 3D faces, minibatches of 2048 and nothing but the optimizer
changed, and shows MIG over five seeds. The faces cannot be had freely: here are dSprites, from its file, or images like
it, which are drawn. The networks are those that the authors have for faces.

MIG is measured on all images, the training images, with the factors that they were drawn from; training never sees
these. Learning rates are tuned by the objective that is maximised, β and all, on images held out from the training:
MIG is what is to be judged, so it has no say in it.

At a given seed every optimizer starts from the same weights, sees the same minibatches and draws the same noise, all
from the run's own generators.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from blockadapt.validation import require, require_integer, require_number
from blockadapt_experiments.claims.claim import Claim, Verdict
from blockadapt_experiments.claims.verdicts import BySeed, difference, is_below_zero, mean_words, together
from blockadapt_experiments.contenders.catalogue import LOST
from blockadapt_experiments.contenders.memory import state_bytes_of
from blockadapt_experiments.core.clock import not_counted
from blockadapt_experiments.core.experiment import Experiment
from blockadapt_experiments.core.settings import Settings
from blockadapt_experiments.core.training import Work, best_device, initial
from blockadapt_experiments.data.sprites import FACTORS, SIZES, Sprites, load_sprites
from blockadapt_experiments.experiments.tcvae.drawing import SPAN, draw
from blockadapt_experiments.models.tcvae import ConvVAE, Estimator, Posterior, Terms, information_gaps, objective_terms
from blockadapt_experiments.results.measurements import Metric, Outcome, Row, RunKey
from blockadapt_experiments.results.summary import Summary

JUDGED = FACTORS[1:]
"""The factors that MIG is about: the authors leave out the shape."""

UNKNOWN = torch.full((len(JUDGED),), math.nan, dtype=torch.float64)
"""The gaps of a model that has diverged, or was not measured."""

AT_ONCE = 1000
"""Images encoded at once."""

FIXED_SEED = 0
"""Which images are held out or shown is a part of the data: it does not follow the seed of a run."""

SHOWN = 8
"""Images that reconstructions are shown of."""


@dataclass(frozen=True, kw_only=True)
class TcvaeSettings(Settings):
    """Holds the settings of `tcvae`.

    Attributes:
        data: "dsprites-like", which is drawn, or "dsprites", the published file in `--data-dir`.
        values: How many values of shape, scale, orientation, x and y are kept, evenly spread.
        betas: The values of β, a variant each.
        estimator: How q(z) is estimated from a minibatch.
        latents: Dimensions of z.
        width: What all channel counts of the networks are divided by.
        batch: Images in a minibatch. The end of an epoch that does not fill one is left out.
        steps: Of each run.
        every: Steps between two rows, which hold means over these steps.
        mig_every: Steps between two measurements of MIG; it is also measured at the end.
        mig_samples: z that entropies are averaged over, at most.
        validation_fraction: Share of the images that is held out where learning rates are tuned.
    """

    data: Literal["dsprites-like", "dsprites"] = "dsprites-like"
    values: tuple[int, int, int, int, int] = SIZES
    betas: tuple[float, ...]
    estimator: Estimator = "mws"
    latents: int = 10
    width: int = 1
    batch: int
    steps: int
    every: int
    mig_every: int
    mig_samples: int = 10_000
    validation_fraction: float = 1 / 6

    def __post_init__(self) -> None:
        super().__post_init__()
        owner = "settings"
        for factor, value, size in zip(FACTORS, self.values, SIZES, strict=True):
            require_integer(owner, f"values of {factor}", value, least=2 if factor in JUDGED else 1, most=size)
        ok = 0 < len(set(_variants(self))) == len(self.betas) and all(0 <= beta < math.inf for beta in self.betas)
        require(ok, owner, "betas", "one or more different numbers >= 0", list(self.betas))
        for name in ("steps", "every", "mig_samples"):
            require_integer(owner, name, getattr(self, name), least=1)
        require_integer(owner, "latents", self.latents, least=2)
        ok = self.mig_every >= 1 and self.mig_every % self.every == 0
        require(ok, owner, "mig_every", f"a multiple of `every`, {self.every}", self.mig_every)
        require_number(owner, "validation_fraction", self.validation_fraction, above=0, below=1)
        most = math.prod(self.values) - self.held_out
        require_integer(owner, "batch", self.batch, least=2, most=most)

    @property
    def held_out(self) -> int:
        """Count the images held out for validation."""
        return max(2, round(self.validation_fraction * math.prod(self.values)))


class TcvaeTask:
    """Is one run, `every` steps a leg. A loss or gradient that is not finite ends it: the row says so.

    On a GPU if there is one. Random numbers are drawn on the CPU all the same.
    """

    def __init__(self, settings: TcvaeSettings, key: RunKey, lr: float, sprites: Sprites, tuning: bool) -> None:
        self.legs = math.ceil(settings.steps / settings.every)
        self.settings, self.sprites = settings, sprites
        self.beta = float(key.variant.removeprefix("beta="))
        mixed = torch.randperm(len(sprites), generator=_generator(FIXED_SEED))
        self.shown = mixed[:AT_ONCE]
        self.validation = mixed[: settings.held_out] if tuning else None
        self.train = mixed[settings.held_out :] if tuning else mixed
        weights, order, noise, self.measuring = (int(w) for w in np.random.SeedSequence(key.seed).generate_state(4))
        self.device = best_device()
        self.model = initial(lambda: _model(settings), weights).to(self.device)
        self.optimizer = settings.make_optimizer(key.arm, self.model, lr, settings.steps)
        gaps = math.ceil(settings.steps / settings.mig_every)
        self.work = Work(settings.steps, gaps * len(sprites) / settings.batch)
        self.order, self.noise = _generator(order), _generator(noise)
        self._begin_epoch()
        self.step = self.state_bytes = 0
        self.diverged = False
        self.gaps = UNKNOWN

    def advance(self) -> Sequence[Row]:
        """Take the next steps; measure what is due."""
        if self.diverged:
            return ()
        settings = self.settings
        seen: list[Tensor] = []
        self.model.train()
        for _ in range(min(settings.every, settings.steps - self.step)):
            terms, taken = self._train()
            seen.append(terms)
            self.diverged = not taken
            if self.diverged:
                break
        row: Row = {"step": self.step, **_row(Terms(*torch.stack(seen).mean(0)))}
        if self.validation is not None:
            row["validation_objective"] = math.nan if self.diverged else self._validate(self.validation)
        elif self.diverged or self.step % settings.mig_every == 0 or self.step == settings.steps:
            self.gaps = UNKNOWN if self.diverged else self._measure()
            row["mig"] = self.gaps.mean().item()
        return (row,)

    def outcome(self) -> Outcome:
        """Return what the run took, the gap of each factor, reconstructions and traversals."""
        numbers = {
            "parameters": sum(parameter.numel() for parameter in self.model.parameters()),
            "steps": self.step,
            "state_bytes": self.state_bytes,
            "final_state_bytes": state_bytes_of(self.optimizer),
            "diverged": int(self.diverged),
        }
        gaps = {f"gap_{factor}": gap for factor, gap in zip(JUDGED, self.gaps.tolist(), strict=True)}
        return Outcome({**numbers, **gaps}, {} if self.diverged else self._pictures())

    def state_dict(self) -> dict[str, Any]:
        """Return everything that the next steps depend on."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "order": self.epoch_start,
            "noise": self.noise.get_state(),
            "step": self.step,
            "state_bytes": self.state_bytes,
            "diverged": self.diverged,
            "gaps": self.gaps,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.noise.set_state(state["noise"])
        self.step, self.state_bytes, self.diverged = state["step"], state["state_bytes"], state["diverged"]
        self.gaps = state["gaps"]
        self.order.set_state(state["order"])
        self._begin_epoch()

    def _begin_epoch(self) -> None:
        """Put the images into a new order, and keep what would give the same order again."""
        self.epoch_start = self.order.get_state()
        self.epoch = self.train[torch.randperm(len(self.train), generator=self.order)]

    def _minibatch(self) -> Tensor:
        """Return the images of the next step."""
        place = self.step % (len(self.train) // self.settings.batch)
        if place == 0 and self.step > 0:
            self._begin_epoch()
        return self.epoch[place * self.settings.batch :][: self.settings.batch]

    def _terms(self, rows: Tensor, noise: torch.Generator) -> Terms:
        images = self.sprites.images(rows).to(self.device)
        drawn = torch.randn(len(rows), self.settings.latents, generator=noise).to(self.device)
        posterior, z, logits = self.model(images, drawn)
        return objective_terms(images, logits, z, posterior, len(self.train), self.settings.estimator)

    def _train(self) -> tuple[Tensor, bool]:
        """Take one step unless the loss or a gradient is not finite; return the terms, [4], and whether it did."""
        self.optimizer.zero_grad()
        terms = self._terms(self._minibatch(), self.noise)
        objective = terms.objective(self.beta)
        values = torch.stack(terms).detach().to("cpu", torch.float64)
        if not math.isfinite(objective.item()):
            return values, False
        (-objective).backward()
        try:
            self.optimizer.step()
        except LOST:
            return values, False
        self.step += 1
        if self.step == 1:
            self.state_bytes = state_bytes_of(self.optimizer)
        return values, True

    @not_counted()
    @torch.no_grad()
    def _validate(self, rows: Tensor) -> float:
        """Measure the objective on these images, in minibatches as large as in training; always with the same noise."""
        self.model.eval()
        size = min(self.settings.batch, len(rows))
        noise = _generator(self.measuring)
        whole = rows[: len(rows) // size * size].split(size)
        return math.fsum(self._terms(part, noise).objective(self.beta).item() for part in whole) / len(whole)

    @torch.no_grad()
    def _encode(self, rows: Tensor) -> Posterior:
        """Compute q(z|x) of these images."""
        self.model.eval()
        parts = [self.model.encode(self.sprites.images(part).to(self.device)) for part in rows.split(AT_ONCE)]
        return Posterior(*(torch.cat(each) for each in zip(*parts, strict=True)))

    @not_counted()
    @torch.no_grad()
    def _measure(self) -> Tensor:
        """Measure the information gap of each factor, on all images; always with the same noise and samples."""
        posterior, generator = self._encode(torch.arange(len(self.sprites))), _generator(self.measuring)
        z = posterior.sample(torch.randn(posterior.mean.shape, generator=generator).to(self.device))
        classes = torch.from_numpy(self.sprites.classes[:, -len(JUDGED) :]).to(self.device)
        return information_gaps(z, posterior, classes, self.settings.mig_samples, generator).cpu()

    @torch.no_grad()
    def _pictures(self) -> dict[str, np.ndarray]:
        """Make originals, reconstructions, traversals and, for each latent, the mean KL to the prior over some images.

        A traversal moves one latent of the first original through `SPAN`, all others left where they are.
        """
        posterior = self._encode(self.shown)
        means = posterior.mean[:SHOWN]
        moved = means[0].repeat(self.settings.latents, len(SPAN), 1)
        for latent in range(self.settings.latents):
            moved[latent, :, latent] = torch.tensor(SPAN)
        variance = (2 * posterior.log_std).exp()
        kl = (posterior.mean**2 + variance - 1).div(2).sub(posterior.log_std).mean(0)
        traversals = _grey(self.model.decode(moved.flatten(0, 1)).sigmoid())
        return {
            "originals": _grey(self.sprites.images(self.shown[:SHOWN])),
            "reconstructions": _grey(self.model.decode(means).sigmoid()),
            "traversals": traversals.reshape(*moved.shape[:2], *traversals.shape[1:]),
            "latent_kl": kl.cpu().numpy(),
        }


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _model(settings: TcvaeSettings) -> ConvVAE:
    model = ConvVAE(settings.latents, settings.width)
    # A quarter faster on the CPU, to the same numbers but for rounding.
    return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


def _row(terms: Terms) -> Row:
    return {"elbo": terms.objective(1.0).item(), **{name: value.item() for name, value in terms._asdict().items()}}


def _grey(images: Tensor) -> np.ndarray:
    """Turn [count, 1, height, width] in [0, 1] into bytes [count, height, width]."""
    pixels: np.ndarray = (255 * images).round().to(torch.uint8).squeeze(1).cpu().numpy()
    return pixels


def _variants(settings: TcvaeSettings) -> Sequence[str]:
    return [f"beta={beta:g}" for beta in settings.betas]


def _task(settings: TcvaeSettings, key: RunKey, lr: float, data_dir: Path | None, tuning: bool) -> TcvaeTask:
    return TcvaeTask(settings, key, lr, load_sprites(settings.data, settings.values, data_dir), tuning)


# The paper's claims -------------------------------------------------------------------------------------------------

BLOCK, DIAGONAL = "block-adam", "paper-adam"
EXCEPTED, BEST = "beta=8", "beta=6"


def _mig(summary: Summary, arm: str, variant: str) -> BySeed:
    """Return the MIG at the end of the finished runs, by seed."""
    seeds = [run.key.seed for run in summary.of(arm, variant) if run.finished]
    return dict(zip(seeds, summary.final(arm, "mig", variant).tolist(), strict=True))


def judge_higher(summary: Summary) -> Verdict:
    """Judge whether Block-Adam ends with a higher MIG than Adam, at every β but the one that the paper excepts."""
    parts, words = [], []
    for variant in summary.variants:
        block, diagonal = (_mig(summary, arm, variant) for arm in (BLOCK, DIAGONAL))
        gap = difference(block, diagonal)
        if gap.size:
            note = " (excepted)" if variant == EXCEPTED else ""
            values = f"{mean_words(block.values())} against {mean_words(diagonal.values())}"
            words.append(f"{variant}{note} {values}, difference {mean_words(gap)}")
            parts += [] if variant == EXCEPTED else [is_below_zero(-gap)]
    if not words:
        return Verdict(None, "Block-Adam and Adam did not both run.")
    return Verdict(together(parts), f"MIG of Block-Adam against Adam: {'; '.join(words)}.")


def judge_best(summary: Summary) -> Verdict:
    """Judge whether Block-Adam's MIG is highest at β = 6. That can be seen only with β on both sides of it."""
    found = {variant: _mig(summary, BLOCK, variant) for variant in summary.variants}
    found = {variant: values for variant, values in found.items() if values}
    if BEST not in found or len(found) == 1:
        return Verdict(None, f"Block-Adam did not run with {BEST} and another β.")
    others = {float(variant.removeprefix("beta=")): difference(found[BEST], found[variant]) for variant in found}
    six = float(BEST.removeprefix("beta="))
    parts = [is_below_zero(-gap) for beta, gap in others.items() if beta != six]
    both_sides = min(others) < six < max(others)
    held = together(parts if both_sides else [*parts, None])
    words = ", ".join(f"{variant} {mean_words(values.values())}" for variant, values in found.items())
    return Verdict(held, f"MIG of Block-Adam: {words}." + ("" if both_sides else f" No β on one side of {six:g} ran."))


TCVAE = Experiment(
    name="tcvae",
    title="β-TCVAE: disentanglement against β, block against diagonal",
    section="Section 5, figure 5(c)",
    config=TcvaeSettings,
    axis="step",
    metrics=(
        Metric("mig", "Mutual Information Gap", better="high"),
        Metric("elbo", "ELBO on minibatches, nats an image", better="high"),
        Metric("reconstruction", "log p(x|z) on minibatches, nats an image", better="high"),
        Metric("mutual_information", "mutual information, nats", better=None),
        Metric("total_correlation", "total correlation, nats", better=None),
        Metric("dimension_kl", "dimension-wise KL, nats", better=None),
        Metric("validation_objective", "β-TCVAE objective on validation images, nats an image", better="high"),
    ),
    variants=_variants,
    task=_task,
    model=_model,
    claims=(
        Claim("Section 5: the block version has a higher MIG than the diagonal one, except at β = 8.", judge_higher),
        Claim("Section 5: the best MIG is at β = 6.", judge_best),
    ),
    objective="validation_objective",
    measure="mig",
    draw=draw,
)

EXPERIMENTS = (TCVAE,)
