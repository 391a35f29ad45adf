"""Write the page: one HTML file that needs nothing beside it. Its charts are our own SVG.

plotly.js comes only whole, 4.8 MB in every report, and knows neither dark colours nor print nor the keyboard. uPlot is
small, but it paints on a canvas: docs/architecture.md weighs it. What is needed here is a few hundred lines.
"""

from __future__ import annotations

import base64
import hashlib
import math
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from blockadapt_experiments.core.config import flat
from blockadapt_experiments.drawing.colours import styles_of
from blockadapt_experiments.files.atomic import atomic_text
from blockadapt_experiments.report.content import Content
from blockadapt_experiments.results.formats import number, setting
from blockadapt_experiments.results.summary import Band, Summary

POINTS, SEED_POINTS = 800, 200
"""The most points that the page keeps of a mean, and of one seed: about what a screen can show."""


def write_page(content: Content, path: Path) -> None:
    """Write the page."""
    environment = Environment(
        loader=PackageLoader("blockadapt_experiments.report", "assets"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(number=number, data_uri=_data_uri, soft_half=_soft_half)
    data, script = _data(content.summary), _asset("chart.js") + _asset("page.js")
    html = environment.get_template("page.html").render(
        content=content,
        settings={key: setting(value) for key, value in flat(content.summary.settings).items()},
        data=data,
        style=Markup(_asset("page.css")),
        script=Markup(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )
    with atomic_text(path) as file:
        file.write(html)


def _data(summary: Summary) -> dict[str, Any]:
    """Collect what the script draws from."""
    series = [
        {"metric": metric.key, "arm": arm, "variant": variant, **_series(summary, name, metric.key, of)}
        for metric in summary.metrics
        for variant, of in enumerate(summary.variants)
        for arm, name in enumerate(summary.arms)
    ]
    drawn = {entry["metric"] for entry in series if len(entry["x"]) > 1}  # one point makes no chart
    series = [entry for entry in series if entry["x"] and entry["metric"] in drawn]
    styles = styles_of(summary.optimizers)
    return {
        "axis": summary.experiment.axis,
        "metrics": [
            {"key": metric.key, "label": metric.label, "better": metric.better, "log": metric.log}
            for metric in summary.metrics
        ],
        "arms": [
            {
                "name": arm,
                "label": summary.label(arm),
                "colour": styles[arm].colour,
                "dash": styles[arm].strokes(),
                "diverged": sum(summary.diverged(arm, v) for v in summary.variants),
            }
            for arm in summary.arms
        ],
        "variants": summary.variants,
        "seeds": len(summary.seeds),
        "series": series,
        "timed": any(value is not None for entry in series for value in entry["seconds"]),
        "thinned": any(entry["thinned"] for entry in series),
    }


def _series(summary: Summary, arm: str, metric: str, variant: str) -> dict[str, Any]:
    curve = summary.curve(arm, metric, variant)
    linear, log = curve.band(), curve.band(log=True)
    at, at_seed = _thinned(curve.x.size, POINTS), _thinned(curve.x.size, SEED_POINTS)
    return {
        "x": _rounded(curve.x[at]),
        "linear": _scaled(linear, linear.high - linear.middle, at),
        "log": _scaled(log, log.high / log.middle, at),
        "seconds": _rounded(curve.mean_seconds()[at]),
        "diverged": summary.diverged(arm, variant) > 0,
        "thinned": at_seed.size < curve.x.size,
        "seed_x": _rounded(curve.x[at_seed]),
        "seeds": [
            {"seed": seed, "y": _rounded(values[at_seed]), "seconds": _rounded(times[at_seed])}
            for seed, values, times in zip(curve.seeds, curve.values, curve.seconds, strict=True)
        ],
    }


def _scaled(band: Band, spread: np.ndarray, at: np.ndarray) -> dict[str, Any]:
    """Put a curve on one scale: middle, the half width or the factor of its interval, and the number of seeds."""
    return {"middle": _rounded(band.middle[at]), "spread": _rounded(spread[at]), "n": band.n[at].tolist()}


def _thinned(size: int, most: int) -> np.ndarray:
    """Choose the places of at most `most` points, evenly apart, the first and the last among them."""
    return np.unique(np.linspace(0, size - 1, min(size, most)).round().astype(int))


def _rounded(values: np.ndarray) -> list[float | None]:
    """Keep six digits, and put None for what is not finite, which JSON has no word for."""
    return [float(f"{value:.6g}") if math.isfinite(value) else None for value in values]


def _soft_half(text: str) -> Markup:
    """Set the half width of an estimate apart."""
    mean, plus_minus, half = text.partition(" ± ")
    return Markup('{}<span class="half"> ± {}</span>').format(mean, half) if plus_minus else Markup.escape(text)


def _asset(name: str) -> str:
    return (files("blockadapt_experiments.report") / "assets" / name).read_text(encoding="utf-8")


def _data_uri(picture: Path) -> str:
    return "data:image/png;base64," + base64.b64encode(picture.read_bytes()).decode()
