"""What an optimizer needs no longer is let go: matrices when a clip has closed, and the state of a removed group."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from blockadapt import BlockAdam
from support.cases import each_backend
from support.changes import CLOSED, parameter
from support.contract_cases import CLOSING, STEPS_TO_CLOSE, run


@pytest.fixture(autouse=True)
def _only_what_is_new_is_looked_through() -> Iterator[None]:
    """Else each collection goes through all that is imported, which takes half a second."""
    gc.freeze()
    yield
    gc.unfreeze()


@each_backend
def test_a_removed_group_and_its_state_are_let_go(backend: str) -> None:
    kept, removed = parameter(4, 3), parameter(40, 30)
    optimizer = BlockAdam([{"params": [kept]}, {"params": [removed]}], backend=backend)
    run(optimizer, [1, 2])
    watched = [weakref.ref(removed), *(weakref.ref(value) for value in optimizer.state[removed].values())]
    optimizer.state.pop(optimizer.param_groups.pop()["params"][0])
    del removed
    run(optimizer, [3])
    gc.collect()
    assert [ref() for ref in watched] == [None] * len(watched)


@each_backend
@pytest.mark.parametrize(
    "options",
    [{}, {"amsgrad": True}, {"refresh_every": 2}, {"amsgrad": True, "refresh_every": 4}, {"grouping": "joint"}],
    ids=str,
)
@pytest.mark.parametrize("set_later", [False, True], ids=["given", "set later"])
def test_matrices_are_freed_when_the_clip_has_closed(options: dict[str, Any], set_later: bool, backend: str) -> None:
    weight = parameter(20, 10)
    optimizer = BlockAdam([weight], clip=None if set_later else CLOSING, backend=backend, **options)
    run(optimizer, range(1, STEPS_TO_CLOSE))
    blocks = {name: value for name, value in optimizer.state[weight].items() if name not in ("step", "exp_avg")}
    addresses = {value.untyped_storage().data_ptr() for name, value in blocks.items() if name != "cut"}
    assert addresses
    watched = [weakref.ref(value) for value in blocks.values()]
    del blocks
    if set_later:
        optimizer.param_groups[0]["clip"] = CLOSED
    run(optimizer, [STEPS_TO_CLOSE, STEPS_TO_CLOSE + 1])
    gc.collect()
    assert [ref() for ref in watched] == [None] * len(watched)
    tensors = [o for o in gc.get_objects() if type(o) is Tensor and o.layout == torch.strided]
    assert not [t for t in tensors if t.numel() > weight.numel() and t.untyped_storage().data_ptr() in addresses]
    assert {*optimizer.state[weight]} == {"step", "exp_avg"}
