"""Reports to look at, and what to look at them with."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.browser import Browser, chromium, require_chromium


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """Five optimizers, four seeds; one run unfinished, one diverged."""
    from blockadapt_experiments.report import write_report
    from support.run_records import realistic

    out = tmp_path_factory.mktemp("made")
    about = realistic(out)
    write_report(out, about)
    return out, about


@pytest.fixture(scope="session")
def panels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two optimizers over three variants, more points than a page keeps."""
    from blockadapt_experiments.report import write_report
    from support.run_records import swept

    out = tmp_path_factory.mktemp("panels")
    write_report(out, swept(out, steps=1200, seeds=3))
    return out / "report.html"


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """Chromium."""
    program = require_chromium()
    # A short path: Chromium puts sockets below it, whose names have a limit.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile, chromium(program, Path(profile)) as found:
        yield found
