"""Holds the laboratory: demos and experiments on top of `blockadapt`. The library never imports it.

What parts of your own need can be imported from here, and `run` and `make_report` for notebooks. Each is loaded when
it is asked for: commands that answer at once do not wait for torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_PLACES = {
    "run": "api",
    "make_report": "api",
    "read": "report.reading",
    "load_file": "parts",
    "register_optimizer": "contenders.own",
    "register_images": "data.images",
    "register_classifier": "experiments.classifier",
    "register_experiment": "experiments.registry",
    "Examples": "data.examples",
    "Experiment": "core.experiment",
    "Task": "core.experiment",
    "Settings": "core.settings",
    "TrainingSettings": "core.training",
    "Classification": "core.training",
    "Metric": "results.measurements",
    "Outcome": "results.measurements",
    "Row": "results.measurements",
    "RunKey": "results.measurements",
    "Summary": "results.summary",
    "Claim": "claims.claim",
    "Verdict": "claims.claim",
}

__all__ = [*_PLACES]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)
