"""A step in the midst of another of the same optimizer is refused; steps of several optimizers go on side by side."""

from __future__ import annotations

import copy
import os
import pickle
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import blockadapt
from blockadapt import BlockAdam, SpectrumClip
from blockadapt.kernels import Batch, Change, Segment
from blockadapt.kernels.cpu.kernel import NumbaKernel
from blockadapt.kernels.eigh import EighKernel
from support.blocks import bits, copied, step_, training
from support.contract_cases import everything, give_gradients_, param_bits, run

REFUSED = r"^BlockAdam: `step` must be called again only when the last call has returned, got a call in the midst"


def parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(3)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((6, 4), (5,))]


class Asking(EighKernel):
    """Does something in the midst of a step, once."""

    name = "asking"

    def __init__(self) -> None:
        self.ask: Callable[[], object] = lambda: None

    def prepare(self, batch: Batch, segments: Sequence[Segment]) -> Change:
        ask, self.ask = self.ask, lambda: None
        ask()
        return super().prepare(batch, segments)

    def __deepcopy__(self, memo: object) -> Asking:
        return Asking()

    def __reduce__(self) -> tuple[type[Asking], tuple[()]]:
        return Asking, ()


def test_a_step_of_another_thread_is_refused_and_changes_nothing() -> None:
    kernel, params, twins = Asking(), parameters(), parameters()
    optimizer, alone = BlockAdam(params, backend=kernel), BlockAdam(twins, backend="eigh")
    for each in (optimizer, alone):
        run(each, [1])
    give_gradients_(params, 2)
    inside, refused = Event(), Event()
    kernel.ask = lambda: (inside.set(), refused.wait(60))
    with ThreadPoolExecutor(1) as thread:
        first = thread.submit(optimizer.step)
        assert inside.wait(60)
        with pytest.raises(RuntimeError, match=REFUSED):
            optimizer.step()
        refused.set()
        first.result(timeout=60)
    run(alone, [2])
    assert everything(optimizer) == everything(alone)
    run(optimizer, [3])  # and the way is free again


def test_a_step_that_a_kernel_takes_in_the_midst_of_one_is_refused_with_it() -> None:
    kernel, params = Asking(), parameters()
    optimizer = BlockAdam(params, backend=kernel)
    run(optimizer, [1])
    give_gradients_(params, 2)
    before = everything(optimizer)
    kernel.ask = optimizer.step
    with pytest.raises(RuntimeError, match=REFUSED):
        optimizer.step()
    assert everything(optimizer) == before
    optimizer.step()


@pytest.mark.parametrize("copied_by", [copy.deepcopy, lambda optimizer: pickle.loads(pickle.dumps(optimizer))])
def test_a_copy_that_is_made_in_the_midst_of_a_step_can_step(copied_by: Callable[[BlockAdam], BlockAdam]) -> None:
    kernel, params = Asking(), parameters()
    optimizer = BlockAdam(params, backend=kernel)
    run(optimizer, [1])
    give_gradients_(params, 2)
    copies: list[BlockAdam] = []
    kernel.ask = lambda: copies.append(copied_by(optimizer))
    optimizer.step()
    run(copies[0], [2])
    assert everything(copies[0]) == everything(optimizer)


def test_a_closure_may_step_the_optimizer_that_calls_it() -> None:
    params, twins = parameters(), parameters()
    nested, plain = BlockAdam(params), BlockAdam(twins)

    def closure() -> Tensor:
        run(nested, [1])
        give_gradients_(params, 2)
        return torch.tensor(1.0)

    nested.step(closure)
    run(plain, [1, 2])
    assert everything(nested) == everything(plain)


class Interrupting(EighKernel):
    """Presses Ctrl-C when its blocks are written."""

    name = "interrupting"

    def prepare(self, batch: Batch, segments: Sequence[Segment]) -> Change:
        return Interrupted(super().prepare(batch, segments))


class Interrupted:
    def __init__(self, change: Change) -> None:
        self._change = change

    def write_(self) -> None:
        self._change.write_()
        signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("options", [{}, {"grouping": "joint"}, {"clip": SpectrumClip("auto", 0.1)}], ids=str)
def test_ctrl_c_in_the_midst_of_a_write_is_raised_when_the_step_is_whole(options: dict[str, Any]) -> None:
    params, twins = parameters(), parameters()
    optimizer, plain = BlockAdam(params, backend=Interrupting(), **options), BlockAdam(twins, backend="eigh", **options)
    for step in (1, 2):
        with pytest.raises(KeyboardInterrupt):
            run(optimizer, [step])
        run(plain, [step])
        assert everything(optimizer) == everything(plain)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_handler_of_ones_own_hears_of_ctrl_c_once_and_where_nobody_listens_nothing_changes() -> None:
    heard: list[int] = []
    optimizer = BlockAdam([nn.Parameter(torch.ones(3))], backend=Interrupting())
    try:
        for handler in (lambda number, frame: heard.append(number), signal.SIG_IGN):
            signal.signal(signal.SIGINT, handler)
            run(optimizer, [1])
            assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    assert heard == [signal.SIGINT]


def test_a_step_of_another_thread_leaves_ctrl_c_alone() -> None:
    with ThreadPoolExecutor(1) as thread:
        thread.submit(run, BlockAdam(parameters()), [1]).result(timeout=60)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_failed_step_leaves_the_way_free() -> None:
    params = parameters()
    optimizer = BlockAdam(params)
    give_gradients_(params, 1)
    params[0].grad[0, 0] = torch.nan
    for _ in range(2):
        with pytest.raises(blockadapt.NonFiniteGradientError):
            optimizer.step()
    run(optimizer, [1])


def test_a_compiled_step_keeps_others_out_too() -> None:
    kernel, params = Asking(), parameters()
    optimizer = BlockAdam(params, backend=kernel)
    run(optimizer, [1])
    before = param_bits(params)
    give_gradients_(params, 2)
    kernel.ask = optimizer.step
    compiled = torch.compile(optimizer.step, backend="aot_eager")
    with pytest.raises(RuntimeError, match=REFUSED[1:]):
        compiled()
    assert param_bits(params) == before
    compiled()
    assert int(optimizer.state[params[0]]["step"]) == 2


# The memory of the CPU kernel ---------------------------------------------------------------------------------------

THREADS = """
import threading, torch
from blockadapt import BlockAdam

torch.set_num_threads(1)
params = [torch.nn.Parameter(torch.randn(200, 300)) for _ in range(4)]
twins = [torch.nn.Parameter(param.detach().clone()) for param in params]
for param, twin in zip(params, twins):
    param.grad = twin.grad = torch.randn(200, 300)
optimizer, alone = BlockAdam(params), BlockAdam(twins)
optimizer.step()
taken, refused = [], []

def step():
    for _ in range(50):
        try:
            taken.append(optimizer.step())
        except RuntimeError as error:
            refused.append(str(error))

threads = [threading.Thread(target=step) for _ in range(3)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
for _ in range(1 + len(taken)):
    alone.step()
assert all(map(torch.equal, params, twins))
print(len(taken) + len(refused), *{*refused}, sep="\\n")
"""


def test_threads_that_step_one_optimizer_touch_no_memory_but_its_own() -> None:
    """It may die of what it does. What is not refused is a whole step."""
    environment = {**os.environ, "PYTHONPATH": str(Path(blockadapt.__file__).parents[1])}
    script = textwrap.dedent(THREADS)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    total, *sentences = done.stdout.splitlines()
    assert int(total) == 150
    assert all(sentence.startswith("BlockAdam: `step` must be called again only when") for sentence in sentences)


def test_optimizers_that_share_a_kernel_step_side_by_side() -> None:
    kernel, clip = NumbaKernel(), SpectrumClip("auto", gamma=0.05)
    groups = [[nn.Parameter(param.detach().repeat(8, 8)[: 40 + i]) for param in parameters()[:1]] for i in range(3)]
    twins = [[nn.Parameter(param.detach().clone()) for param in params] for params in groups]
    shared = [BlockAdam(params, backend=kernel, clip=clip) for params in groups]
    alone = [BlockAdam(params, backend="numba", clip=clip) for params in twins]
    with ThreadPoolExecutor(3) as threads:
        list(threads.map(lambda optimizer: run(optimizer, range(1, 40)), shared))
    for one, other in zip(shared, alone, strict=True):
        run(other, range(1, 40))
        assert everything(one) == everything(other)


def test_only_the_last_change_of_the_cpu_kernel_can_be_written_and_only_once() -> None:
    """Its scratch and its gradients' addresses are those of the last step that was made ready."""
    kernel, case = NumbaKernel(), training(5, 70, torch.float32)
    expected = copied(case)
    step_(NumbaKernel(), [expected])
    segment = case.segment()
    first, last = (kernel.prepare(case.batch, [segment]) for _ in range(2))
    with pytest.raises(RuntimeError, match=r"^NumbaKernel: `change` must be written once, before another"):
        first.write_()
    last.write_()
    with pytest.raises(RuntimeError, match=r"^NumbaKernel: `change` must be written once, before another"):
        last.write_()
    assert bits(case) == bits(expected)
