"""Read the settings that ship with an experiment, without loading the experiment: that takes seconds."""

from __future__ import annotations

import sys
from importlib.resources import files
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def shipped_tables(experiment: str) -> dict[str, dict[str, Any]]:
    """Read the file of an experiment: its table `defaults`, and one for each scale."""
    file = files("blockadapt_experiments") / "configs" / f"{experiment}.toml"
    tables: dict[str, dict[str, Any]] = tomllib.loads(file.read_text(encoding="utf-8"))
    return tables
