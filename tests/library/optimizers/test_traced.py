"""Steps under torch.compile: one graph, no breaks of ours, no recompilation, and the bits of the eager step."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from blockadapt import BlockAdagrad, BlockAdam, BlockAdamW, IndexGroups, NonFiniteGradientError, SpectrumClip
from blockadapt.optimizers import BlockOptimizer

with warnings.catch_warnings():  # torch's own import of it warns
    warnings.simplefilter("ignore", DeprecationWarning)
    import torch._inductor.cudagraph_trees  # noqa: F401

Make = Callable[[Any], BlockOptimizer]

INPUTS = torch.randn(5, 6, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()
    counters.clear()


def network() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def loss_of(model: nn.Module, scale: float | Tensor) -> Tensor:
    return model(INPUTS).square().mean() * scale


def graphs() -> int:
    return int(counters["stats"]["unique_graphs"])


def breaks() -> int:
    return sum(counters["graph_break"].values())


def bits(model: nn.Module, optimizer: BlockOptimizer) -> list[bytes]:
    tensors = [*model.parameters(), *(t for state in optimizer.state.values() for t in state.values())]
    return [tensor.detach().numpy().tobytes() for tensor in tensors]


def compare(make: Make, steps: int = 5, backend: str = "aot_eager", change: Any = lambda optimizer, step: None) -> None:
    """A compiled `step` beside an eager one: equal to the last bit, parameters and state, after every step."""
    eager, compiled = network(), network()
    ours, theirs = make(eager.parameters()), make(compiled.parameters())
    step = torch.compile(theirs.step, backend=backend, fullgraph=True)
    for number in range(steps):
        for optimizer in (ours, theirs):
            change(optimizer, number)
        for model, optimizer, call in ((eager, ours, ours.step), (compiled, theirs, step)):
            optimizer.zero_grad()
            loss_of(model, 1.0 + number).backward()
            call()
        assert bits(eager, ours) == bits(compiled, theirs), number
        assert [[*state] for state in ours.state.values()] == [[*state] for state in theirs.state.values()]


OPTIONS: dict[str, Make] = {
    "plain": lambda p: BlockAdam(p, block_size=4),
    "amsgrad": lambda p: BlockAdam(p, block_size=4, amsgrad=True),
    "kept basis": lambda p: BlockAdam(p, block_size=2, refresh_every=2),
    "joint": lambda p: BlockAdam(p, grouping="joint"),
    "eigh": lambda p: BlockAdam(p, block_size=4, backend="eigh"),
    "without m": lambda p: BlockAdagrad(p, block_size=4),
    "two groups": lambda p: BlockAdamW(
        [{"params": [next(p)], "lr": 0.1}, {"params": [*p], "grouping": "diagonal"}], weight_decay=0.1
    ),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_a_compiled_step_is_the_eager_one_and_is_compiled_once(name: str) -> None:
    compare(OPTIONS[name])
    assert (graphs(), breaks()) == (1, 0)


def test_inductor_steps_in_place_to_the_same_bits() -> None:
    compare(OPTIONS["plain"], steps=3, backend="inductor")
    assert (graphs(), breaks()) == (1, 0)


def test_a_clip_that_closes_is_compiled_once_more_and_frees_the_second_moment() -> None:
    compare(lambda p: BlockAdam(p, block_size=4, clip=SpectrumClip(final_lr=0.01, gamma=100.0)), steps=6)
    assert (graphs(), breaks()) == (2, 0)


def test_a_schedule_of_numbers_is_compiled_once_more_as_for_torchs_adam() -> None:
    def schedule(optimizer: BlockOptimizer, step: int) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 0.1 / (step + 1)

    compare(OPTIONS["plain"], steps=6, change=schedule)
    assert (graphs(), breaks()) == (2, 0)


def test_a_schedule_of_a_tensor_is_not_compiled_again() -> None:
    def schedule(optimizer: BlockOptimizer, step: int) -> None:
        for group in optimizer.param_groups:
            group["lr"].fill_(0.1 / (step + 1))

    compare(lambda p: BlockAdam(p, lr=torch.tensor(0.1), block_size=4), steps=6, change=schedule)
    assert (graphs(), breaks()) == (1, 0)


def train(make: Make, compiled: bool) -> tuple[nn.Module, Any, list[float], list[tuple[int, int]]]:
    """Five steps of training; with each step's loss how many graphs and breaks there have been."""
    model = network()
    optimizer = make(model.parameters())

    def step(scale: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, scale)
        loss.backward()
        optimizer.step()
        return loss

    call = torch.compile(step, backend="aot_eager") if compiled else step
    losses, seen = [], []
    for number in range(5):
        losses.append(float(call(torch.tensor(1.0 + number)).detach()))
        seen.append((graphs(), breaks()))
    return model, optimizer, losses, seen


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo asks for it
def test_a_compiled_train_step_breaks_only_where_torch_itself_does() -> None:
    """Twice, at `zero_grad` and at `backward`, which dynamo does not trace. torch's own Adam has more breaks."""
    eager, ours, expected, _ = train(OPTIONS["plain"], compiled=False)
    model, optimizer, losses, seen = train(OPTIONS["plain"], compiled=True)
    assert losses == expected
    assert bits(model, optimizer) == bits(eager, ours)
    assert seen == [(2, 2)] * 5
    torch._dynamo.reset()
    counters.clear()
    adam: Any = lambda params: torch.optim.Adam(params)  # noqa: E731
    assert train(adam, compiled=True)[-1][-1] > seen[-1]


def test_a_closure_is_traced_with_the_step() -> None:
    model, twin = network(), network()
    ours, theirs = (BlockAdam(m.parameters(), block_size=4) for m in (model, twin))

    def closure_of(model: nn.Module) -> Callable[[], Tensor]:
        return lambda: loss_of(model, 1.0).detach()

    for m in (model, twin):
        loss_of(m, 1.0).backward()
    step = torch.compile(lambda: theirs.step(closure_of(twin)), backend="aot_eager", fullgraph=True)
    assert torch.equal(ours.step(closure_of(model)), step())
    assert bits(model, ours) == bits(twin, theirs)


def test_numbers_that_the_graph_itself_has_changed_are_those_of_the_step() -> None:
    """A parameter, a gradient and an lr that wait for the graph's end to be written back."""
    model, twin = network(), network()
    ours, theirs = (BlockAdam(m.parameters(), lr=torch.tensor(0.1), block_size=4) for m in (model, twin))

    def step(model: nn.Sequential, optimizer: BlockOptimizer) -> Tensor:
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(0.5)
                param.grad.mul_(3.0)  # type: ignore[union-attr]
            before = model[0].weight * 2
            optimizer.param_groups[0]["lr"].mul_(0.5)
            optimizer.step()
            return before + model[0].weight

    compiled = torch.compile(lambda: step(twin, theirs), backend="aot_eager")
    for number in range(3):
        for m in (model, twin):
            m.zero_grad()
            loss_of(m, 1.0 + number).backward()
        assert torch.equal(step(model, ours), compiled())
    assert bits(model, ours) == bits(twin, theirs)


def test_what_is_not_finite_raises_or_is_skipped_and_counted_as_in_eager_mode() -> None:
    for policy in ("raise", "skip"):
        model = network()
        optimizer = BlockAdam(model.named_parameters(), block_size=4, on_nonfinite=policy)
        step = torch.compile(optimizer.step, backend="aot_eager", fullgraph=True)
        loss_of(model, 1.0).backward()
        step()
        before = bits(model, optimizer)
        model[2].bias.grad[1] = torch.nan
        if policy == "raise":
            with pytest.raises(NonFiniteGradientError, match=r"gradient of '2\.bias' has 1 of 3 entries"):
                step()
        else:
            step()
        assert bits(model, optimizer) == before
        assert optimizer.skipped_steps == (policy == "skip")


def test_eager_and_compiled_steps_take_turns_on_one_state() -> None:
    eager, turns = network(), network()
    ours, theirs = OPTIONS["amsgrad"](eager.parameters()), OPTIONS["amsgrad"](turns.parameters())
    step = torch.compile(theirs.step, backend="inductor", fullgraph=True)
    for number in range(6):
        for model, optimizer in ((eager, ours), (turns, theirs)):
            optimizer.zero_grad()
            loss_of(model, 1.0).backward()
        ours.step()
        (step if number % 3 == 0 else theirs.step)()
        if number == 3:
            theirs.load_state_dict(theirs.state_dict())
    assert bits(eager, ours) == bits(turns, theirs)


def test_a_parameter_without_a_gradient_stays_and_shares_its_blocks() -> None:
    blocks = IndexGroups([[0, 9], *([i] for i in range(1, 9)), [10, 11]])
    for grouping in (blocks, "auto"):
        results = []
        for compiled in (False, True):
            params = [nn.Parameter(torch.arange(6.0)), nn.Parameter(torch.ones(6))]
            optimizer = BlockAdam(params, grouping=grouping)
            step = torch.compile(optimizer.step, backend="aot_eager", fullgraph=True) if compiled else optimizer.step
            for _ in range(3):
                params[1].grad = torch.arange(6.0)
                step()
            results.append([p.detach().clone() for p in params])
        assert torch.equal(results[0][0], torch.arange(6.0))
        torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)


def test_memory_that_is_read_in_another_order_is_stepped_in_that_order() -> None:
    """Address and shape stay: only the strides tell. The backend hands over no copies, which lie elsewhere."""
    results = []
    for compiled in (False, True):
        param = nn.Parameter(torch.arange(16.0).view(4, 4))
        optimizer = BlockAdam([param], lr=0.1, block_size=2)
        step = torch.compile(optimizer.step, backend="eager", fullgraph=True) if compiled else optimizer.step
        for number in range(4):
            if number == 2:
                param.grad, param.data = None, param.data.t()
            param.grad = torch.randn(4, 4, generator=torch.Generator().manual_seed(number))
            step()
        results.append(param.detach().clone())
    assert torch.equal(*results)


@pytest.mark.parametrize("how", ["added", "moved", "in another list"])
def test_param_groups_that_change_between_steps_count_as_they_are(how: str) -> None:
    results = []
    for compiled in (False, True):
        a, b, late = (nn.Parameter(torch.ones(4)) for _ in range(3))
        optimizer = BlockAdam([{"params": [a], "lr": 0.1}, {"params": [b], "lr": 0.2}])
        step = torch.compile(optimizer.step, backend="eager", fullgraph=True) if compiled else optimizer.step
        a.grad, b.grad = torch.arange(4.0), torch.arange(4.0)
        for number in range(4):
            if number == 2 and how == "added":
                optimizer.add_param_group({"params": [late]})
            if number == 2 and how == "moved":
                first, second = optimizer.param_groups
                first["params"].append(second["params"].pop())
            if number == 2 and how == "in another list":
                optimizer.param_groups = [{**group, "lr": 1.0} for group in optimizer.param_groups]
            step()
        results.append(torch.stack([a.detach(), b.detach()]))
    assert torch.equal(*results)


def test_the_operation_says_what_it_changes() -> None:
    schema = torch.ops.blockadapt.step_.default._schema
    changed = [argument.name for argument in schema.arguments if argument.alias_info and argument.alias_info.is_write]
    assert changed == ["params", "kept"]
