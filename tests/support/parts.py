"""Tests that register parts, and leave none behind."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from blockadapt_experiments import parts
from blockadapt_experiments.contenders.catalogue import CONTENDERS
from blockadapt_experiments.data import images
from blockadapt_experiments.experiments import registry


@contextmanager
def nothing_registered() -> Iterator[None]:
    """Forget at the end what was registered meanwhile."""
    tables: tuple[dict[str, Any], ...] = (CONTENDERS, images.OWN, registry.OWN, parts.ORIGINS)
    before = [dict(table) for table in tables]
    try:
        yield
    finally:
        for table, kept in zip(tables, before, strict=True):
            table.clear()
            table.update(kept)
        for name in [name for name in sys.modules if name.startswith(parts.LOADED)]:
            del sys.modules[name]
