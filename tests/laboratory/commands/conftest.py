"""A command of `blockadapt` in this process."""

from __future__ import annotations

import sys

import pytest

from blockadapt_experiments.__main__ import main
from blockadapt_experiments.running.runner import warm_up
from support.commands import Command, Said


@pytest.fixture(scope="module")
def _compiled() -> None:
    warm_up()  # a kernel that is compiled says so, where a test reads what a command says


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, _compiled: None) -> Command:
    """Run a command in this process."""
    monkeypatch.setenv("COLUMNS", "200")

    def call(*arguments: str) -> Said:
        monkeypatch.setattr(sys, "argv", ["blockadapt", *arguments])
        with pytest.raises(SystemExit) as stop:
            main()
        written = capsys.readouterr()
        return Said(int(stop.value.code or 0), written.out, written.err)

    return call
