"""What the compilers make of the kernels, for GPUs that need not be there, and what the documents say of it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import support

pytest.importorskip("triton", reason="Triton is not installed")

ROOT = Path(__file__).parents[4]


def made(*arguments: str) -> list[list[str]]:
    """The cells of a table that `gpu_figures` makes."""
    script = Path(next(iter(support.__path__)), "gpu_figures.py")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run([sys.executable, script, *arguments], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return [line.strip("| ").split(" | ") for line in done.stdout.splitlines()[2:]]


@pytest.fixture(scope="module")
def table() -> list[list[str]]:
    """The rows of the table in docs/gpu.md, made anew."""
    return made("compiled")


@pytest.fixture(scope="module")
def further() -> list[list[str]]:
    """The same for steps that the document does not tell of."""
    return made("compiled", "further")


def figures(cell: str) -> dict[str, int]:
    return dict(zip(("registers", "spilt", "shared", "instructions"), map(int, cell.split(" · ")), strict=True))


@pytest.mark.slow
def test_every_kernel_builds_for_every_gpu(table: list[list[str]], further: list[list[str]]) -> None:
    for rows in (table, further):
        assert {row[0] for row in rows} == {"`advance`", "`turn`", "`redo`"}
    for row in table + further:
        assert all(figures(cell)["instructions"] > 100 for cell in row[5:]), row


@pytest.mark.slow
def test_nothing_is_spilt_for_blocks_of_up_to_16_nor_ever_by_advance(
    table: list[list[str]], further: list[list[str]]
) -> None:
    assert len(table[0][5:]) == 4
    for row in table + further:
        if int(row[1]) <= 16 or row[0] == "`advance`":
            assert [figures(cell)["spilt"] for cell in row[5:]] == [0] * 4, row


def in_the_docs(mark: str) -> list[list[str]]:
    """The rows of docs/gpu.md that have this mark in their last cell."""
    lines = (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8").splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")]
    return [row for row in rows if mark in row[-1]]


@pytest.mark.slow
def test_the_docs_have_the_table_that_the_compilers_give(table: list[list[str]]) -> None:
    triton = pytest.importorskip("triton")
    if f"Triton {triton.__version__}" not in (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8"):
        pytest.skip("the docs tell of another version of Triton")
    assert in_the_docs(" · ") == table


@pytest.mark.slow
def test_the_docs_have_the_counts_that_the_interpreter_gives() -> None:
    assert in_the_docs(" – ") == made("counted")


@pytest.mark.slow
def test_errors_are_what_the_docs_say() -> None:
    """A tenth more may be: the other side is LAPACK, which rounds otherwise on each kind of processor."""
    told, found = in_the_docs(" ×"), made("accurate")
    assert [row[:2] for row in found] == [row[:2] for row in told]
    for theirs, ours in zip(told, found, strict=True):
        for limit, ratio in zip(theirs[2:], ours[2:], strict=True):
            assert float(ratio.rstrip(" ×")) <= 1.1 * float(limit.rstrip(" ×"))
