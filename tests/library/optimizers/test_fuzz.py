"""Whatever is done between steps, a step follows the oracle or is refused whole, and touches no memory but its own."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import blockadapt
from support.cases import each_backend
from support.fuzzing import fuzz
from support.guards import HAS_PAGES, Canaries

needs_pages = pytest.mark.skipif(not HAS_PAGES, reason="guard pages need mprotect")

TESTS = Path(__file__).parents[2]
PATHS = os.pathsep.join([str(Path(blockadapt.__file__).parents[1]), str(TESTS)])


def child(*arguments: object) -> subprocess.CompletedProcess[str]:
    """A Python process that may die of what it does."""
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, env={**os.environ, "PYTHONPATH": PATHS}, capture_output=True, text=True)


@each_backend
def test_any_sequence_of_actions_follows_the_oracle_or_is_refused(backend: str) -> None:
    fuzz(backend, sequences=150, guard=Canaries)


@pytest.mark.slow
@needs_pages
@pytest.mark.parametrize("seed", range(10))
@each_backend
def test_ten_thousand_sequences_touch_no_memory_but_their_own(backend: str, seed: int, tmp_path: Path) -> None:
    log = tmp_path / "sequence"
    run = child("-m", "support.fuzzing", backend, seed, 500, log)
    assert run.returncode == 0, f"seed {seed}, exit {run.returncode}\n{log.read_text()}\n{run.stdout}\n{run.stderr}"


# The guards themselves ---------------------------------------------------------------------------------------------

TOUCHES = """
import ctypes, os, torch
from support.guards import Pages

def look(at):
    ctypes.c_byte.from_address(at).value

def freed(front, end):
    at = guard.moved(torch.zeros(count)).data_ptr()  # nobody holds the tensor
    look(at)

touches = {
    "inside": lambda front, end: (look(front.data_ptr()), look(end.data_ptr() + end.nbytes - 1)),
    "before": lambda front, end: look(front.data_ptr() - 1),
    "after": lambda front, end: look(end.data_ptr() + end.nbytes),
    "freed": freed,
}
for count in (1, 5, 1024, 3000):
    for name, touch in touches.items():
        child = os.fork()
        if child == 0:
            guard = Pages()
            kept = [guard.moved(torch.zeros(count)) for _ in range(2)]
            touch(*sorted(kept, key=lambda t: t.data_ptr() % 4096))
            os._exit(0)
        print(count, name, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@needs_pages
def test_a_touch_of_a_guard_page_ends_the_process() -> None:
    run = child("-c", TOUCHES)
    assert run.returncode == 0, run.stderr
    lines = run.stdout.splitlines()
    assert len(lines) == 4 * 4, run.stdout
    for line in lines:
        count, name, code = line.split()
        assert (int(code) == 0) == (name == "inside"), f"{count} numbers, {name}: exit {code}"


@pytest.mark.parametrize("offset", [-1, 20])
def test_a_write_beside_a_canary_is_found(offset: int) -> None:
    guard = Canaries()
    tensor = guard.moved(torch.ones(5))
    tensor.zero_()
    guard.check()
    ctypes.c_ubyte.from_address(tensor.data_ptr() + offset).value = 7
    with pytest.raises(AssertionError, match="a write"):
        guard.check()


def test_guarded_tensors_keep_numbers_and_strides() -> None:
    guard = Canaries()
    for tensor in (
        torch.randn(3, 4).t(),
        torch.ones(()).expand(2, 3),
        torch.randn(2, 3, 4, 4)[:, :, ::2],
        torch.tensor(3),
    ):
        moved = guard.moved(tensor)
        assert torch.equal(moved, tensor)
        assert moved.stride() == tensor.stride()
        assert guard.holds(moved)
        assert not guard.holds(tensor)
