"""Checkpoints that were damaged on their way: a file that cannot be read right is refused, and nothing crashes."""

from __future__ import annotations

import copy
import io
import math
import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import blockadapt
from blockadapt import BlockAdam, BlockAdamW, IndexGroups, SpectrumClip
from blockadapt.optimizers import BlockOptimizer
from support.contract_cases import CLASSES, everything, run

UNREADABLE = (RuntimeError, EOFError, OSError, ValueError, pickle.UnpicklingError)
"""What `torch.load` raises at a file that is not whole."""

SHAPES = [(4, 3), (3,), (2, 2, 3)]


def parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(11)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def saved(cls: type[BlockOptimizer] = BlockAdam, **options: Any) -> dict[str, Any]:
    optimizer = cls(parameters(), block_size=2, **options)
    run(optimizer, [1, 2, 3])
    return copy.deepcopy(optimizer.state_dict())


def as_bytes(content: Any) -> bytes:
    file = io.BytesIO()
    torch.save(content, file)
    return file.getvalue()


# kill −9 -----------------------------------------------------------------------------------------------------------

SAVING = """
import io, os, signal, sys, torch
from blockadapt import BlockAdam
from support.contract_cases import run

class Mortal:
    '''A file whose process dies once so many bytes are written.'''
    def __init__(self, path, life):
        self.file, self.life = open(path, "wb", buffering=0), life
    def write(self, data):
        data = bytes(data)
        self.file.write(data[: self.life])
        self.life -= len(data)
        if self.life <= 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return len(data)
    def flush(self): pass

generator = torch.Generator().manual_seed(11)
weight = torch.nn.Parameter(torch.randn(6, 5, generator=generator))
optimizer = BlockAdam([weight], block_size=3, amsgrad=True, refresh_every=4)
content = lambda: {"weight": weight.detach().clone(), "optimizer": optimizer.state_dict()}
run(optimizer, [1, 2])
before = io.BytesIO()
torch.save(content(), before)
folder, *cases = sys.argv[1:]
for case in cases:
    child = os.fork()
    if child == 0:
        path, (how, life) = f"{folder}/{case}", case.split()
        open(path, "wb").write(before.getbuffer())
        run(optimizer, [3])
        torch.save(content(), Mortal(path + ".part" if how == "beside" else path, int(life)))
        os.replace(path + ".part", path)
        os.kill(os.getpid(), signal.SIGKILL)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
BESIDE, OVER = [f"beside {life}" for life in (1, 700, 3000, 10**9)], [f"over {life}" for life in (1, 700, 3000)]


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What processes left that were killed while they saved: a file for each case. One process forks them all."""
    folder = tmp_path_factory.mktemp("killed")
    paths = os.pathsep.join([str(Path(blockadapt.__file__).parents[1]), str(Path(__file__).parents[2])])
    arguments = [sys.executable, "-c", SAVING, str(folder), *BESIDE, *OVER]
    parent = subprocess.run(arguments, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True)
    assert parent.stdout.split() == [str(-signal.SIGKILL)] * 7, parent.stderr
    return folder


def resumed(path: Path) -> tuple[int, BlockAdam]:
    """The step that the file holds, and the optimizer that goes on from there."""
    content = torch.load(path, weights_only=True)
    weight = nn.Parameter(content["weight"])
    optimizer = BlockAdam([weight], block_size=3, amsgrad=True, refresh_every=4)
    optimizer.load_state_dict(content["optimizer"])
    return int(optimizer.state[weight]["step"]), optimizer


def uninterrupted(steps: int) -> BlockAdam:
    generator = torch.Generator().manual_seed(11)
    weight = nn.Parameter(torch.randn(6, 5, generator=generator))
    optimizer = BlockAdam([weight], block_size=3, amsgrad=True, refresh_every=4)
    run(optimizer, range(1, steps + 1))
    return optimizer


@pytest.mark.skipif(sys.platform == "win32", reason="kill -9")
@pytest.mark.parametrize("case", BESIDE)
def test_a_process_killed_while_it_saves_beside_resumes_from_the_last_whole_file(case: str, killed: Path) -> None:
    step, optimizer = resumed(killed / case)
    assert step == (3 if case == BESIDE[-1] else 2)
    assert everything(optimizer) == everything(uninterrupted(step))
    run(optimizer, range(step + 1, 6))
    assert everything(optimizer) == everything(uninterrupted(5))


@pytest.mark.skipif(sys.platform == "win32", reason="kill -9")
@pytest.mark.parametrize("case", OVER)
def test_a_process_killed_while_it_overwrites_leaves_a_file_that_is_refused(case: str, killed: Path) -> None:
    with pytest.raises(UNREADABLE):
        resumed(killed / case)


# Damaged files -----------------------------------------------------------------------------------------------------


def test_a_truncated_checkpoint_is_refused_at_any_length() -> None:
    whole = as_bytes(saved())
    for length in [*range(0, len(whole), 97), len(whole) - 1]:
        with pytest.raises(UNREADABLE):
            torch.load(io.BytesIO(whole[:length]), weights_only=True)


def test_a_flipped_bit_is_refused_or_changes_numbers_only() -> None:
    """torch does not check sums when it reads, so a number may be another; what it means may not."""
    whole = as_bytes(saved(amsgrad=True, clip=SpectrumClip(), refresh_every=2))
    outcomes = {"torch refuses": 0, "refused": 0, "loaded": 0}
    for position in range(0, 8 * len(whole), 211):
        damaged = bytearray(whole)
        damaged[position // 8] ^= 1 << position % 8
        try:
            content = torch.load(io.BytesIO(bytes(damaged)), weights_only=True)
        except Exception:  # whatever torch's reader raises
            outcomes["torch refuses"] += 1
            continue
        outcomes[attempt(content, Exception)] += 1
    assert outcomes["torch refuses"] > 0
    assert outcomes["loaded"] > 0


OURS = (ValueError, TypeError)


def attempt(content: Any, refusals: type[Exception] | tuple[type[Exception], ...] = OURS) -> str:
    """Load into a fresh optimizer and step; what is refused changes nothing, and is told in our words if so asked."""
    optimizer = BlockAdam(parameters(), block_size=2)
    before = everything(optimizer)
    try:
        optimizer.load_state_dict(content)
    except refusals as error:
        told = str(error)
        assert refusals is not OURS or told.startswith("BlockAdam.load_state_dict: "), told
        assert everything(optimizer) == before
        return "refused"
    try:
        run(optimizer, [4])
    except (ValueError, TypeError, RuntimeError) as error:
        told = str(error)
        assert told.startswith("BlockAdam: "), told
    return "loaded"


JUNK: list[Any] = [
    None,
    -1,
    10**12,
    0.5,
    math.nan,
    "text",
    [],
    [[0, 1], [1, 2]],
    {},
    {"final_lr": -1.0, "gamma": 0.0},
    {"unknown": 1},
    torch.zeros(()),
    torch.full((), math.nan),
    torch.tensor(-5),
    torch.tensor(2**62),
    torch.zeros(3),
    torch.zeros(6, 3, dtype=torch.complex64),
    torch.zeros(4, 3).to_sparse(),
    torch.zeros(0),
]


def branches(content: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) in a nested state."""
    found = []
    items = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for key, value in items:
        found.append((content, key))
        found += branches(value)
    return found


@settings(derandomize=True, deadline=None, max_examples=400)
@given(
    cls=st.sampled_from([BlockAdam, BlockAdamW]),
    where=st.integers(0, 10**6),
    how=st.sampled_from(["replace", "remove", "add", "cast", "turn"]),
    junk=st.integers(0, len(JUNK) - 1),
    options=st.sampled_from(
        [{}, {"amsgrad": True, "refresh_every": 2}, {"clip": SpectrumClip()}, {"grouping": "joint"}]
    ),
)
def test_a_state_damaged_anywhere_is_refused_in_one_sentence_or_can_be_stepped(
    cls: type[BlockOptimizer], where: int, how: str, junk: int, options: dict[str, Any]
) -> None:
    state_dict = saved(cls, **options)
    places = branches(state_dict)
    container, key = places[where % len(places)]
    if how == "replace":
        container[key] = JUNK[junk]
    elif how == "remove":
        del container[key]
    elif how == "add" and isinstance(container, dict):
        container["unheard of"] = JUNK[junk]
    elif isinstance(container[key], torch.Tensor):
        value = container[key]
        container[key] = value.half() if how == "cast" else value.permute(tuple(range(value.ndim)[::-1]))
    attempt(state_dict)


@pytest.mark.parametrize("cls", CLASSES)
def test_a_checkpoint_of_another_cut_is_refused(cls: type[BlockOptimizer]) -> None:
    """The saved options win over the script's, so blocks of another size are loaded with their size."""
    state_dict = saved(cls)
    for change in ({"block_size": 3}, {"grouping": "output"}, {"grouping": [[*range(27)]]}):
        changed = copy.deepcopy(state_dict)
        changed["param_groups"][0].update(change)
        with pytest.raises(ValueError, match=rf"^{cls.__name__}\.load_state_dict: "):
            cls(parameters()).load_state_dict(changed)
    other = cls(parameters(), grouping=IndexGroups([[*range(27)]]))
    other.load_state_dict(state_dict)
    assert other.param_groups[0]["grouping"] == "auto"
    assert other.param_groups[0]["block_size"] == 2
    run(other, [4])
