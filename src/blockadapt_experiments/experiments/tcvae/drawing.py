"""Draws MIG against β, reconstructions and latent traversals as PNG files."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from blockadapt_experiments.data.sprites import NAMES
from blockadapt_experiments.drawing.colours import styles_of
from blockadapt_experiments.drawing.legend import add_legend
from blockadapt_experiments.files.png import write_png
from blockadapt_experiments.results.intervals import interval
from blockadapt_experiments.results.summary import Summary

DODGE = 0.06
"""How far apart, in β, the marks of two optimizers at one β are."""

SPAN = tuple(np.linspace(-2, 2, 7).tolist())
"""Values of a latent in a traversal: two standard deviations of the prior to each side."""

PICTURED = ("beta=1", "beta=6")
"""The variants that pictures are shown of, where they ran: the plain VAE and the β that is recommended."""

ABREAST = 4
"""Traversals side by side."""

FRAME = 110
"""The grey between images."""


def draw(summary: Summary, directory: Path) -> Sequence[Path]:
    """Draw all pictures for which there are finished runs."""
    files = [*_draw_mig(summary, directory)]
    for variant in [each for each in PICTURED if each in summary.variants] or summary.variants[:1]:
        found = dict(_arrays(summary, variant))
        if found:
            files.append(_draw_reconstructions(summary, variant, found, directory))
            path = directory / f"tcvae-traversals-{variant.replace('=', '-')}.png"
            files.append(write_png(traversal_figure(summary, variant, found), path))
    return files


def _draw_mig(summary: Summary, directory: Path) -> Iterator[Path]:
    """Yield a picture of mean and 95% interval over seeds, a line for each optimizer, set apart; none of a single β."""
    betas = np.array([float(variant.removeprefix("beta=")) for variant in summary.variants])
    found = {}
    for arm in summary.arms:
        means = [interval(summary.final(arm, "mig", variant)) for variant in summary.variants]
        if any(math.isfinite(mean) for mean, _ in means):
            found[arm] = np.array(means).T
    if not found or len(betas) < 2:
        return
    figure = Figure(figsize=(7.5, 4.6), dpi=150, layout="constrained")
    seeds = f"{len(summary.seeds)} seeds, mean and 95% interval" if len(summary.seeds) > 1 else "one seed"
    figure.suptitle(f"Mutual Information Gap against β\n{_data(summary)}, {seeds}", fontsize=11)
    panel = figure.subplots()
    order, styles = np.argsort(betas), styles_of(summary.optimizers)
    for number, (arm, (mean, half)) in enumerate(found.items()):
        x = betas[order] + DODGE * (number - (len(found) - 1) / 2)
        style = {**styles[arm].line(), "marker": "o", "markersize": 4, "capsize": 3, "elinewidth": 1}
        panel.errorbar(x, mean[order], half[order], label=summary.label(arm), **style)
    panel.set_xticks(betas)
    panel.set_xlim(betas.min() - 0.5, betas.max() + 0.5)
    panel.set_xlabel("β")
    panel.set_ylabel("MIG")
    panel.grid(axis="y", color="#E0E0E0", linewidth=0.6)
    panel.spines[["top", "right"]].set_visible(False)
    add_legend(figure, [panel])
    yield write_png(figure, directory / "tcvae-mig-against-beta.png")


def _arrays(summary: Summary, variant: str) -> Iterator[tuple[str, dict[str, np.ndarray]]]:
    """Yield the pictures of each optimizer, from its first seed that has any."""
    for arm in summary.arms:
        arrays = (summary.arrays(arm, variant, seed) for seed in summary.seeds)
        first = next((each for each in arrays if each), None)
        if first:
            yield arm, first


def _draw_reconstructions(
    summary: Summary, variant: str, found: dict[str, dict[str, np.ndarray]], directory: Path
) -> Path:
    """Draw the originals in the first row, then a row for each optimizer."""
    rows = [next(iter(found.values()))["originals"], *(arrays["reconstructions"] for arrays in found.values())]
    labels = ["original", *(summary.label(arm) for arm in found)]
    figure = Figure(figsize=(1.6 + 0.75 * len(rows[0]), 0.9 + 0.75 * len(rows)), dpi=150, layout="constrained")
    figure.suptitle(f"Reconstructions, {_beta(variant)}\n{_data(summary)}", fontsize=10)
    panel = figure.subplots()
    _show(panel, np.stack(rows))
    panel.set_yticks(_middles(len(rows), rows[0].shape[-1]), labels, fontsize=8)
    panel.set_xlabel("images", fontsize=8)
    return write_png(figure, directory / f"tcvae-reconstructions-{variant.replace('=', '-')}.png")


def traversal_figure(summary: Summary, variant: str, found: dict[str, dict[str, np.ndarray]]) -> Figure:
    """Make a panel for each optimizer with a row for each latent, those that say most first."""
    columns = min(len(found), ABREAST)
    lines = math.ceil(len(found) / columns)
    latents = len(next(iter(found.values()))["latent_kl"])
    size = (3.9 * columns, 0.8 + lines * (0.9 + 0.41 * latents))
    figure = Figure(figsize=size, dpi=150, layout="constrained")
    head = f"Traversals, {_beta(variant)}: each latent from {SPAN[0]:g} to {SPAN[-1]:g}, with its mean KL in nats"
    figure.suptitle(f"{head}\n{_data(summary)}", fontsize=10)
    panels = figure.subplots(lines, columns, squeeze=False).flatten()
    for panel, (arm, arrays) in zip(panels, found.items(), strict=False):
        order = np.argsort(-arrays["latent_kl"])
        _show(panel, arrays["traversals"][order])
        names = [f"z{latent + 1}  {arrays['latent_kl'][latent]:.2g}" for latent in order]
        panel.set_yticks(_middles(latents, arrays["traversals"].shape[-1]), names, fontsize=7)
        panel.set_xticks(_middles(len(SPAN), arrays["traversals"].shape[-1]), [f"{z:.2g}" for z in SPAN], fontsize=7)
        panel.set_xlabel("value of the latent", fontsize=8)
        panel.set_ylabel("latent, mean KL (nats)", fontsize=8)
        panel.set_title(summary.label(arm), fontsize=9)
    for panel in panels[len(found) :]:
        panel.set_visible(False)
    return figure


def _show(panel: Any, images: np.ndarray) -> None:
    """Show images [rows, columns, side, side] as one, with lines between them."""
    framed = np.pad(images, ((0, 0), (0, 0), (0, 1), (0, 1)), constant_values=FRAME)
    rows, columns, side, _ = framed.shape
    panel.imshow(framed.transpose(0, 2, 1, 3).reshape(rows * side, columns * side), cmap="gray", vmin=0, vmax=255)
    panel.set_xticks([])
    panel.tick_params(length=0)
    panel.spines[:].set_visible(False)


def _middles(rows: int, side: int) -> np.ndarray:
    """Compute where the rows, or columns, of `_show` have their middles."""
    return (np.arange(rows) + 0.5) * (side + 1)


def _beta(variant: str) -> str:
    return f"β = {variant.removeprefix('beta=')}"


def _data(summary: Summary) -> str:
    return f"{NAMES[summary.settings['data']]} images, {summary.scale} scale"
