"""What processes do in the tests of many processes. Each function is called in every process."""

from __future__ import annotations

import contextlib
import copy
import io
import os
import signal
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numba
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from blockadapt import BlockAdam, IndexGroups, SpectrumClip, plan
from blockadapt.diagnostics.operators import units_with_coordinates
from blockadapt.kernels.cpu.compilation import CacheWarning
from blockadapt.optimizers import BlockOptimizer
from blockadapt.optimizers.ranks import messages
from support.contract_cases import case, param_bits, run, twins

Options = dict[str, Any]


class Wide(nn.Module):
    """Where `rows` is 24, shards on 1, 2 and 3 ranks begin where blocks of 4 begin.

    `scale` and `shift` have one grain each, which the first and the second rank get where blocks are shared out.
    """

    def __init__(self, rows: int = 24) -> None:
        super().__init__()
        self.first = nn.Linear(10, rows)
        self.second = nn.Linear(rows, rows)
        self.scale, self.shift = nn.Parameter(torch.ones(1, rows)), nn.Parameter(torch.ones(1, rows))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x))) * self.scale + self.shift


def built(kind: str, options: Options, rows: int = 24, seed: int = 5, **how: Any) -> tuple[nn.Module, BlockAdam]:
    """A model and its optimizer: "one" as in one process, "fsdp" sharded, "shared" with a `process_group`."""
    torch.manual_seed(seed)
    net = Wide(rows)
    if kind == "fsdp":
        for layer in (net.first, net.second, net):
            fully_shard(layer, **how)
    group = dist.group.WORLD if kind == "shared" else None
    return net, BlockAdam(net.named_parameters(), **options, process_group=group)


def train(net: nn.Module, optimizer: BlockOptimizer, steps: Iterable[int]) -> None:
    """All processes see the same minibatch, so averaged gradients are those of one process."""
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(12, 10, generator=generator)
        optimizer.zero_grad()
        net(x).sub(torch.randn(12, 1, generator=generator)).square().mean().backward()
        optimizer.step()


def whole(params: Iterable[Any]) -> list[Tensor]:
    """The parameters, gathered if they are sharded."""
    return [(p.full_tensor() if isinstance(p, DTensor) else p).detach().clone() for p in params]


def trained(kind: str, options: Sequence[Options], steps: int, rows: int = 24) -> list[list[Tensor]]:
    """Parameters after so many steps, for each of the options."""
    results = []
    for each in options:
        net, optimizer = built(kind, each, rows)
        train(net, optimizer, range(steps))
        results.append(whole(net.parameters()))
    return results


def measured(kind: str, options: Options, steps: int) -> tuple[Any, list[Tensor]]:
    """The estimate of α* and the parameters after so many steps."""
    net, optimizer = built(kind, options)
    train(net, optimizer, range(steps))
    return optimizer.state_dict()["param_groups"][0]["estimate"], whole(net.parameters())


def measured_in_groups(kind: str, steps: int) -> list[Any]:
    """The estimates of α* of groups of one parameter each.

    One process looks at all of them anew in each step, one after another; the others find them as they were.
    """
    net, _ = built(kind, {})
    groups = [{"params": [param]} for param in net.parameters()]
    shared = dist.group.WORLD if kind == "shared" else None
    optimizer = BlockAdam(groups, block_size=4, clip=SpectrumClip("auto", 0.05), process_group=shared)
    for step in range(steps):
        if kind != "one" and dist.get_rank() == 1:
            optimizer._preparation.standing.clear()
        train(net, optimizer, range(step, step + 1))
    return [group["estimate"] for group in optimizer.state_dict()["param_groups"]]


def measured_beside_a_scalar(kind: str, block_size: int, steps: int) -> Any:
    """The estimate of α* of a group in which every process moves one parameter, and its rows of another."""
    params = plain = [nn.Parameter(torch.ones(())), nn.Parameter(torch.ones(4, 2))]
    if kind == "fsdp":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        params = [plain[0], nn.Parameter(distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)]))]
    group = dist.group.WORLD if kind == "shared" else None
    optimizer = BlockAdam(params, block_size=block_size, clip=SpectrumClip("auto", 0.05), process_group=group)
    for step in range(1, steps + 1):
        generator = torch.Generator().manual_seed(step)
        for param, like in zip(params, plain, strict=True):
            grad = torch.randn(like.shape, generator=generator)
            param.grad = distribute_tensor(grad, mesh, [Shard(0)]) if isinstance(param, DTensor) else grad
        optimizer.step()
    return optimizer.state_dict()["param_groups"][0]["estimate"]


# FSDP2 -------------------------------------------------------------------------------------------------------------


def trained_under_policies(steps: int) -> list[list[Tensor]]:
    """Resharded after forward, not so, in bfloat16, and on a mesh whose first dimension replicates."""
    pairs = init_device_mesh(
        "cpu", (dist.get_world_size() // 2 or 1, min(2, dist.get_world_size())), mesh_dim_names=("copies", "rows")
    )
    policies: list[Options] = [
        {"reshard_after_forward": True},
        {"reshard_after_forward": False},
        {"mesh": pairs},
        {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)},
    ]
    results = []
    for how in policies:
        net, optimizer = built("fsdp", {"block_size": 4}, rows=16, **how)
        train(net, optimizer, range(steps))
        assert all(param.dtype == torch.float32 for param in net.parameters())
        results.append(whole(net.parameters()))
    return results


def torn(rows: int, steps: int) -> tuple[list[Tensor], list[str]]:
    """Parameters whose shards begin within blocks, and what was warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        net, optimizer = built("fsdp", {"block_size": 4}, rows)
        train(net, optimizer, range(steps))
    return whole(net.parameters()), [str(entry.message) for entry in caught if "blocks" in str(entry.message)]


def torn_on_a_mesh_without_rank_zero() -> list[str]:
    """What is warned of in the processes that hold shards; the first process holds none."""
    mesh = DeviceMesh("cpu", range(1, dist.get_world_size()))
    if dist.get_rank() == 0:
        return []
    param = nn.Parameter(distribute_tensor(torch.ones(9, 2), mesh, [Shard(0)]))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        BlockAdam([("shards", param)], block_size=4).units()
    return [str(entry.message) for entry in caught if "blocks" in str(entry.message)]


def planned_before_it_has_memory(steps: int) -> list[list[bytes]]:
    """Shards of a model that was made without memory, and of the same one made as usual, after some steps."""
    with torch.device("meta"):
        late = Wide()
    fully_shard(late)
    optimizer = BlockAdam(late.named_parameters(), block_size=4)
    plan(optimizer)
    late.to_empty(device="cpu")
    net, other = built("fsdp", {"block_size": 4})
    late.load_state_dict(net.state_dict())
    train(late, optimizer, range(steps))
    train(net, other, range(steps))
    return [_local_bits(late), _local_bits(net)]


def message(call: Callable[[], object]) -> str:
    """The type and the words of what is raised."""
    try:
        call()
    except (Exception, KeyboardInterrupt) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def message_in_time(call: Callable[[], object]) -> str:
    """The same of a call that waits for a lost process, in a group whose timeout is `TIMEOUT`."""
    begin = time.monotonic()
    said = message(call)
    assert time.monotonic() - begin < TIMEOUT + 5
    return said


TIMEOUT = 5
"""Seconds until the others give up a process that is lost."""


def refusals() -> dict[str, str]:
    """What is said to DTensors that cannot be stepped."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plane = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("rows", "parts"))
    weight = torch.arange(48.0).view(8, 6)

    def param(*placements: Any, mesh: DeviceMesh = mesh) -> nn.Parameter:
        return nn.Parameter(distribute_tensor(weight, mesh, placements))

    def stepped(grad: Tensor) -> None:
        plain = nn.Parameter(weight.clone())
        plain.grad = grad
        BlockAdam([plain]).step()

    rows, cpu = param(Shard(0)), torch.device("cpu")
    flat = [FullyShardedDataParallel(Wide(), device_id=cpu, use_orig_params=own) for own in (True, False)]
    return {
        "flattened": message(lambda: BlockAdam(flat[0].parameters())),
        "flat": message(lambda: BlockAdam(flat[1].parameters())),
        "joint": message(lambda: BlockAdam([rows], grouping="joint")),
        "explicit": message(lambda: BlockAdam([rows], grouping=IndexGroups([range(48)]))),
        "columns": message(lambda: BlockAdam([("weight", param(Shard(1)))])),
        "columns, no name": message(lambda: BlockAdam([torch.zeros(3), param(Shard(1))])),
        "twice": message(lambda: BlockAdam([("weight", param(Shard(0), Shard(0), mesh=plane))])),
        "shared": message(lambda: BlockAdam([rows], process_group=dist.group.WORLD)),
        "gradient": message(lambda: stepped(distribute_tensor(weight, mesh, [Shard(0)]))),
    }


def replicated(steps: int) -> list[list[Tensor]]:
    """A DTensor that every process has whole, and the same as a plain parameter."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(2)
    weight, grads = torch.randn(9, 6), torch.randn(steps, 9, 6)
    spread = nn.Parameter(distribute_tensor(weight, mesh, [Replicate()]))
    plain = nn.Parameter(weight.clone())
    optimizers = [BlockAdam([spread], block_size=4), BlockAdam([plain], block_size=4)]
    for grad in grads:
        spread.grad, plain.grad = distribute_tensor(grad, mesh, [Replicate()]), grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    return [whole([spread]), whole([plain])]


def tensor_parallel(steps: int) -> list[list[Tensor]]:
    """A layer whose outputs the processes share, as `parallelize_module` makes it, and the same in one process."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    results = []
    for is_parallel in (True, False):
        torch.manual_seed(2)
        layer: nn.Module = nn.Linear(10, 24)
        if is_parallel:
            parallelize_module(layer, mesh, ColwiseParallel(output_layouts=Replicate()))
        train(layer, BlockAdam(layer.parameters(), block_size=4), range(steps))
        results.append(whole(layer.parameters()))
    return results


# Shared out --------------------------------------------------------------------------------------------------------


def every_case(ids: Sequence[str], dtype: torch.dtype, steps: int) -> dict[str, list[Tensor]]:
    """The parameters of each case after some steps with a process group."""
    results = {}
    for name in ids:
        (net,) = twins(count=1, dtype=dtype)
        optimizer = case(name).build(net.parameters(), process_group=dist.group.WORLD)
        run(optimizer, range(1, steps + 1))
        results[name] = whole(net.parameters())
    return results


def state_held(options: Options) -> int:
    """Numbers in the state of this process."""
    net, optimizer = built("shared", options)
    train(net, optimizer, range(2))
    return sum(t.numel() for state in optimizer.state.values() for n, t in state.items() if n not in ("step", "cut"))


def shared_state_bytes(options: Options, apart: bool = False) -> int:
    """Bytes of the state of this process, for the model of the contract tests; each parameter in a group of its own?"""
    (net,) = twins(count=1)
    params = [{"params": [param]} for param in net.parameters()] if apart else net.parameters()
    optimizer = BlockAdam(params, **options, process_group=dist.group.WORLD)
    run(optimizer, [1])
    return sum(t.nbytes for state in optimizer.state.values() for t in state.values())


def in_small_buckets(options: Options, steps: int) -> list[Tensor]:
    """Parameters after some steps in which every parameter travels by itself."""
    from blockadapt.optimizers.ranks import shared_out

    shared_out.BUCKET_BYTES = 1
    return trained("shared", [options], steps)[0]


def asked_about_one_by_one(kind: str, options: Options) -> list[str]:
    """The parameters that a sixth step asks about one by one."""
    net, optimizer = built(kind, options)
    train(net, optimizer, range(5))
    asked: list[str] = []
    optimizer._preparation._add = lambda unit, *_: asked.append(unit.name)  # type: ignore[method-assign]
    optimizer.step()
    return asked


def in_groups_of_their_own(shared: bool, folder: str) -> list[list[bytes]]:
    """Parameters of which each is in a group of its own, and one is cut anew on the way; by themselves and loaded."""
    pairs = []
    for seed in (5, 99):
        torch.manual_seed(seed)
        net = Wide()
        groups = [{"params": [(name, param)]} for name, param in net.named_parameters()]
        options: Options = {"block_size": 4, "process_group": dist.group.WORLD if shared else None}
        pairs.append((net, BlockAdam(groups, **options)))
    (net, optimizer), other = pairs
    train(net, optimizer, range(2))
    for group in optimizer.param_groups[:2]:
        group["block_size"] = 3
        del optimizer.state[group["params"][0]]
    train(net, optimizer, range(2, 4))
    optimizer.load_state_dict(optimizer.state_dict())
    train(net, optimizer, range(4, 6))
    for group in other[1].param_groups[:2]:
        group["block_size"] = 3
    if not shared:
        train(net, optimizer, range(6, 9))
        return [param_bits(net.parameters())] * 2
    return [*_trained_with_a_copy([(net, optimizer), other], range(6, 6), folder)]


def loaded_after_a_cut(shared: bool) -> list[bytes]:
    """Parameters of one grain each, whose state is loaded after each step; one costs less from the second step on.

    Dealt out all at once as they are then, the last one would lie elsewhere.
    """
    params = [nn.Parameter(torch.linspace(1, 2, 24).view(1, 24)) for _ in range(3)]
    groups = [{"params": [param], "block_size": size} for param, size in zip(params, (24, 4, 4), strict=True)]
    optimizer = BlockAdam(groups, grouping="output", process_group=dist.group.WORLD if shared else None)
    for step in range(3):
        for param in params:
            param.grad = torch.cos((step + 1) * param.detach())
        if step == 1:
            optimizer.param_groups[0]["block_size"] = 2
            del optimizer.state[params[0]]
        optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())
    return param_bits(params)


class Allocations(TorchDispatchMode):
    """Counts the bytes of each tensor that is made in new memory, once it is open."""

    def __init__(self) -> None:
        super().__init__()
        self.is_open = False
        self.made: list[int] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        new = [t for t in tree_leaves(result) if isinstance(t, Tensor) and t.untyped_storage().data_ptr() not in given]
        if self.is_open:
            self.made += [t.nbytes for t in new]
        return result


def memory_made_after_the_vote() -> list[int]:
    """Bytes of the tensors that a step makes after all have agreed on it."""
    net, optimizer = built("shared", {"block_size": 4})
    train(net, optimizer, range(2))
    agree = optimizer._ranks.agree

    def agree_and_look(verdict: Any) -> Any:
        agreed = agree(verdict)
        allocations.is_open = True
        return agreed

    optimizer._ranks.agree = agree_and_look  # type: ignore[method-assign]
    with Allocations() as allocations:
        optimizer.step()
    return allocations.made


def under_ddp(steps: int, group: bool) -> list[Tensor]:
    """Every process has data of its own; DDP averages the gradients."""
    torch.manual_seed(5)
    net = DistributedDataParallel(Wide())
    optimizer = BlockAdam(net.parameters(), block_size=4, process_group=dist.group.WORLD if group else None)
    for step in range(steps):
        torch.manual_seed(100 * step + dist.get_rank())
        optimizer.zero_grad()
        net(torch.randn(12, 10)).square().mean().backward()
        optimizer.step()
    return whole(net.parameters())


def compiled(kind: str, steps: int) -> tuple[int, list[bytes]]:
    """The graphs that a compiled step was, and parameters after some of them."""
    from torch._dynamo.testing import CompileCounter  # the compiler takes a second to import

    net, optimizer = built(kind, {"block_size": 4})
    counter = CompileCounter()
    optimizer.step = torch.compile(optimizer.step, backend=counter)  # type: ignore[method-assign]
    train(net, optimizer, range(steps))
    return counter.frame_count, param_bits(whole(net.parameters()))


def shared_refusals() -> dict[str, str]:
    """What an optimizer with a process group says to what it cannot do."""
    net, optimizer = built("shared", {})
    train(net, optimizer, range(1))
    say = {
        "copied": message(lambda: copy.deepcopy(optimizer)),
        "recorded": message(lambda: units_with_coordinates(optimizer)),
    }
    if dist.get_rank() == 0:
        net.first.weight.grad = None
    say["gradients"] = message(optimizer.step)
    say["cut"] = message(lambda: train(*built("shared", {"block_size": 4 + dist.get_rank()}), range(1)))
    pair = [(name, nn.Parameter(torch.zeros(4, 4))) for name in "ab"]
    for _, param in pair:
        param.grad = torch.ones(4, 4)
    named = BlockAdam(pair[:: 1 - 2 * dist.get_rank()], process_group=dist.group.WORLD)
    say["order"] = message(named.step)
    joint = BlockAdam(net.second.parameters(), grouping="joint", process_group=dist.group.WORLD)
    if dist.get_rank() == 0:
        net.second.bias.grad = None
    say["one of a block"] = message(joint.step)
    other = dist.new_group([0])
    if dist.get_rank() == 1:
        say["outside"] = message(lambda: BlockAdam(net.parameters(), process_group=other))
    return say


# All or none -------------------------------------------------------------------------------------------------------


def with_one_bad_gradient(kind: str, how: str) -> tuple[str, bool, int, list[bytes]]:
    """What is raised when one process has a NaN; whether all is as before; steps skipped; parameters a step later."""
    net, optimizer = built(kind, {"block_size": 4, "on_nonfinite": how})
    train(net, optimizer, range(2))
    before = _everything(net, optimizer)
    if dist.get_rank() == 1:
        grad: Any = net.second.weight.grad
        (grad.to_local() if isinstance(grad, DTensor) else grad).view(-1)[0] = torch.nan
    said = message(optimizer.step)
    unchanged = _everything(net, optimizer) == before
    train(net, optimizer, range(2, 3))
    return said, unchanged, optimizer.skipped_steps, param_bits(whole(net.parameters()))


def with_one_exception(kind: str) -> tuple[str, bool, list[bytes]]:
    """What is raised when one process fails; whether all is as before; parameters a step later."""
    net, optimizer = built(kind, {"block_size": 4})
    train(net, optimizer, range(2))
    before = _everything(net, optimizer)
    if dist.get_rank() == 1:
        optimizer.param_groups[0]["eps"] = -1.0
    said = message(optimizer.step)
    unchanged = _everything(net, optimizer) == before
    optimizer.param_groups[0]["eps"] = 1e-4
    train(net, optimizer, range(2, 3))
    return said, unchanged, param_bits(whole(net.parameters()))


def with_one_hook_that_raises(kind: str) -> tuple[str, bool]:
    """What is raised when a hook of the user's raises in the last process, which then ends."""
    net, optimizer = built(kind, {"block_size": 4})
    train(net, optimizer, range(2))
    before = _everything(net, optimizer)

    def hook(*_: object) -> None:
        raise KeyError("of the user's own")

    if dist.get_rank() == dist.get_world_size() - 1:
        optimizer.register_step_pre_hook(hook)
    return message_in_time(optimizer.step), _everything(net, optimizer) == before


def with_an_interrupt() -> tuple[list[str], bool, list[bytes]]:
    """What is said of a step that a signal ends after the vote, and later; whether parameters are as before.

    At the end all begin anew from what they had saved before it, and take a step.
    """
    net, optimizer = built("shared", {"block_size": 4})
    train(net, optimizer, range(2))
    before = _local_bits(net)
    saved = copy.deepcopy(optimizer.state_dict())

    def interrupt(bucket: int) -> None:
        raise KeyboardInterrupt

    optimizer._ranks.publish = interrupt  # type: ignore[method-assign]
    said = [message(optimizer.step)]
    del optimizer._ranks.publish
    said += [message(optimizer.step), message(optimizer.state_dict)]
    unchanged = _local_bits(net) == before
    optimizer.load_state_dict(saved)
    train(net, optimizer, range(2, 3))
    return said, unchanged, param_bits(net.parameters())


def interrupted_at_different_places(where: str) -> list[bytes]:
    """Parameters after a step that follows one which was broken off in different places.

    In the last process it ends when all have voted ("vote"), or before it has sent its rows ("publish"). All others
    have sent theirs by then, and nobody has taken them. All begin anew from what they had saved before it.
    """
    net, optimizer = built("shared", {"block_size": 4})
    train(net, optimizer, range(2))
    saved = copy.deepcopy(optimizer.state_dict())
    vote = dist.all_reduce

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    def interrupted_vote(*args: Any, **how: Any) -> None:
        vote(*args, **how)
        raise KeyboardInterrupt

    if dist.get_rank() != dist.get_world_size() - 1:
        optimizer._ranks.finish_ = interrupt  # type: ignore[method-assign]
    elif where == "publish":
        optimizer._ranks.publish = interrupt  # type: ignore[method-assign]
    else:
        dist.all_reduce = interrupted_vote
    with contextlib.suppress(KeyboardInterrupt):
        train(net, optimizer, range(7, 8))
    dist.all_reduce = vote
    optimizer.load_state_dict(saved)
    train(net, optimizer, range(2, 3))
    return param_bits(net.parameters())


def with_new_memory() -> list[bytes]:
    """Parameters after steps of which each finds its parameters elsewhere, as `param.data = …` leaves them."""
    net, optimizer = built("shared", {"block_size": 4})
    for step in range(4):
        for param in net.parameters():
            param.data = param.detach().clone()
        train(net, optimizer, range(step, step + 1))
    return param_bits(net.parameters())


def with_one_lost_before_alpha_is_known() -> list[Any]:
    """What is said of the step in which the last process ends without its counts, and of what follows.

    Also whether each call left parameters and state as they were.
    """
    net, optimizer = built("fsdp", {"block_size": 4, "clip": SpectrumClip("auto", 0.05)})
    train(net, optimizer, range(2))

    def die(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if dist.get_rank() == dist.get_world_size() - 1:
        optimizer._estimates.note = die  # type: ignore[method-assign]
    answers: list[Any] = []
    for call in (optimizer.step, optimizer.step, optimizer.state_dict, optimizer.step):
        before = _everything(net, optimizer)
        answers.append((message_in_time(call), _everything(net, optimizer) == before))
    return answers


def with_one_that_leaves_and_does_not_read_alpha() -> tuple[str, int]:
    """What the first process, a slow one, is told where the last is gone after its step, and steps in its estimate."""
    net, optimizer = built("fsdp", {"block_size": 4, "clip": SpectrumClip("auto", 0.05)})
    train(net, optimizer, range(2))
    note, is_last = optimizer._estimates.note, dist.get_rank() == dist.get_world_size() - 1

    def noted(groups: Any) -> None:
        time.sleep(0.1 if is_last else 0.5)
        note(groups)

    optimizer._estimates.note = noted  # type: ignore[method-assign]
    optimizer.step()
    if is_last:
        os._exit(0)
    return message_in_time(optimizer.state_dict), optimizer.param_groups[0]["estimate"][-1]


def with_no_memory_for_alpha() -> list[str]:
    """What each process hears of the steps after one in which the last process could not add up its counts."""
    net, optimizer = built("fsdp", {"block_size": 4, "clip": SpectrumClip("auto", 0.05)})
    train(net, optimizer, range(2))
    stack = torch.stack

    def stacked(*args: Any) -> Tensor:
        raise MemoryError

    expect, is_last = optimizer._estimates.expect, dist.get_rank() == dist.get_world_size() - 1

    def expected() -> None:
        expect()
        torch.stack = stacked if is_last else stack

    optimizer._estimates.expect = expected  # type: ignore[method-assign]
    said = [message(optimizer.step)]
    torch.stack = stack
    return [*said, message_in_time(optimizer.step), message_in_time(optimizer.state_dict)]


def gathered_by_gloo(options: Options, steps: int) -> tuple[Any, list[bytes]]:
    """The estimate of α* and the parameters after some steps in which rows go as they do between GPUs."""
    messages.go_straight = lambda rows: False
    net, optimizer = built("shared", options)
    train(net, optimizer, range(steps))
    return optimizer.state_dict()["param_groups"][0]["estimate"], param_bits(net.parameters())


def with_one_lost_when_rows_are_expected() -> list[Any]:
    """What is said where another process is found to be gone before anything is written; whether all is as before."""
    net, optimizer = built("shared", {"block_size": 4})
    train(net, optimizer, range(2))
    before = _everything(net, optimizer)

    def gone(*_: object) -> None:
        raise RuntimeError("Connection closed by peer")

    dist.irecv, receive = gone, dist.irecv
    said = [message(optimizer.step), _everything(net, optimizer) == before]
    dist.irecv = receive
    return [*said, message(optimizer.step)]


def with_a_closure_that_raises(kind: str) -> str:
    """What is said where the closure of the very first step raises in the last process."""
    _, optimizer = built(kind, {"block_size": 4})

    def closure() -> float:
        if dist.get_rank() == dist.get_world_size() - 1:
            raise KeyError("of the user's own")
        return 0.0

    return message(lambda: optimizer.step(closure))


def where_a_first_step_votes() -> list[str]:
    """The devices that the vote lies on where the closure of the very first step raises. No gloo reduces it there."""
    devices = []
    optimizer = BlockAdam([nn.Parameter(torch.empty(8, 3, device="meta"))], process_group=dist.group.WORLD)

    def closure() -> float:
        raise KeyError("of the user's own")

    def noted(vote: Tensor, *_: object, **__: object) -> None:
        devices.append(vote.device.type)

    dist.all_reduce = noted
    message(lambda: optimizer.step(closure))
    return devices


def with_one_killed(kind: str, when: str) -> tuple[str, str, str, bool]:
    """The last process ends before the step, or between agreement and publication."""
    net, optimizer = built(kind, {"block_size": 4})
    train(net, optimizer, range(2))
    before = _local_bits(net)

    def die(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if dist.get_rank() == dist.get_world_size() - 1:
        if when == "before":
            die()
        optimizer._ranks.publish = die  # type: ignore[method-assign]
    first, second = message_in_time(optimizer.step), message_in_time(optimizer.step)
    return first, second, message_in_time(optimizer.state_dict), _local_bits(net) == before


def _local_bits(net: nn.Module) -> list[bytes]:
    return param_bits(p.to_local() if isinstance(p, DTensor) else p for p in net.parameters())


def _everything(net: nn.Module, optimizer: BlockOptimizer) -> Any:
    states = [{n: t.tolist() for n, t in state.items()} for state in optimizer.state.values()]
    return _local_bits(net), states


# Checkpoints -------------------------------------------------------------------------------------------------------


FLAT = {"fsdp": True, "shared": False}
"""Which kind of run writes its checkpoint with `flatten_optimizer_state_dict`."""


def save(options: Options, steps: int, folder: str) -> None:
    """Train both kinds, and write a checkpoint of each."""
    for kind, flat in FLAT.items():
        net, optimizer = built(kind, options)
        train(net, optimizer, range(steps))
        how = StateDictOptions(flatten_optimizer_state_dict=flat)
        model_state, state = get_state_dict(net, optimizer, options=how)
        dcp.save({"model": model_state, "optimizer": state}, checkpoint_id=f"{folder}/{kind}")


def resume(kinds: Sequence[str], options: Options, steps: range, folder: str) -> dict[tuple[str, str], list[Tensor]]:
    """Read each checkpoint into each kind of another model, and train on."""
    return {(saved, kind): _resumed(saved, kind, options, steps, folder) for saved in FLAT for kind in kinds}


def resumed_after_a_clip_has_closed(options: Options, folder: str) -> list[Tensor]:
    """Save a run that has no V any more, load it into another model, and train on."""
    save(options, 7, folder)
    planner = dcp.DefaultLoadPlanner(allow_partial_load=True)
    return _resumed("shared", "fsdp", options, range(7, 12), folder, planner)


def _resumed(saved: str, kind: str, options: Options, steps: range, folder: str, planner: Any = None) -> list[Tensor]:
    net, optimizer = built(kind, options, seed=99)
    how = StateDictOptions(flatten_optimizer_state_dict=FLAT[saved])
    model_state, state = get_state_dict(net, optimizer, options=how)
    states = {"model": model_state, "optimizer": state}
    dcp.load(states, checkpoint_id=f"{folder}/{saved}", planner=planner)
    set_state_dict(net, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"], options=how)
    train(net, optimizer, steps)
    return whole(net.parameters())


def torn_and_saved(plain: dict[str, Any], folder: str) -> tuple[bool, str]:
    """Whether shards that cut blocks are resumed exactly; what they say to a state whose blocks are whole."""
    warnings.simplefilter("ignore")
    nets = [built("fsdp", {"block_size": 4, "refresh_every": 3}, rows=9, seed=seed) for seed in (5, 99)]
    first, second = _trained_with_a_copy(nets, range(6), folder)
    return first == second, message(lambda: nets[0][1].load_state_dict(plain))


def copies_saved(options: Options, folder: str) -> tuple[list[bytes], list[bytes]]:
    """A model on a mesh whose first dimension replicates, and another one that read its checkpoint; both train on."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "rows"))
    nets = [built("fsdp", options, rows=16, seed=seed, mesh=mesh) for seed in (5, 99)]
    return _trained_with_a_copy(nets, range(4), folder)


def _trained_with_a_copy(
    nets: Sequence[tuple[nn.Module, BlockAdam]], steps: range, folder: str
) -> tuple[list[bytes], list[bytes]]:
    """Train the first net, let the second read its checkpoint, train both three steps on, and return their bits."""
    train(*nets[0], steps)
    dcp.save({"model": (states := get_state_dict(*nets[0]))[0], "optimizer": states[1]}, checkpoint_id=folder)
    model_state, state = get_state_dict(*nets[1])
    loaded = {"model": model_state, "optimizer": state}
    dcp.load(loaded, checkpoint_id=folder)
    set_state_dict(*nets[1], model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
    for net, optimizer in nets:
        train(net, optimizer, range(steps.stop, steps.stop + 3))
    first, second = (param_bits(whole(net.parameters())) for net, _ in nets)
    return first, second


def gathered(kind: str, options: Options) -> tuple[dict[str, Any], list[bytes], list[bytes]]:
    """A whole state dict, gathered by torch; the model it is of, and another one that loads it. Both train on."""
    pairs = []
    for seed in (5, 99):
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(10, 24), nn.Linear(24, 24))
        if kind == "fsdp":
            fully_shard(net)
        group = dist.group.WORLD if kind == "shared" else None
        pairs.append((net, BlockAdam(net.named_parameters(), **options, process_group=group)))
    train(*pairs[0], range(4))
    how = StateDictOptions(full_state_dict=True)
    model_state, state = get_state_dict(*pairs[0], options=how)
    shapes = {key: {n: tuple(t.shape) for n, t in entries.items()} for key, entries in state["state"].items()}
    set_state_dict(*pairs[1], model_state_dict=model_state, optim_state_dict=state, options=how)
    for net, optimizer in pairs:
        train(net, optimizer, range(4, 7))
    first, second = (param_bits(whole(net.parameters())) for net, _ in pairs)
    return shapes, first, second


# Starting together -------------------------------------------------------------------------------------------------


def trained_with_an_empty_cache(caches: Sequence[str], steps: int) -> tuple[list[str], list[str], list[bytes]]:
    """What a process tells and warns of that keeps kernels in a folder of these, and its parameters."""
    numba.config.CACHE_DIR = ""
    os.environ["XDG_CACHE_HOME"] = caches[dist.get_rank()]
    told = io.StringIO()
    with contextlib.redirect_stderr(told), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", CacheWarning)
        net, optimizer = built("shared", {"block_size": 4})
        train(net, optimizer, range(steps))
    warned = [str(entry.message) for entry in caught if entry.category is CacheWarning]
    return told.getvalue().splitlines(), warned, param_bits(net.parameters())


def for_each(errand: Callable[..., Any], calls: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Several calls in one start."""
    return [errand(*args) for args in calls]


def from_a_plain_state(kind: str, state_dict: dict[str, Any], params: list[Tensor], steps: range) -> list[Tensor]:
    """Load what one process saved with `torch.save`, and train on."""
    net, optimizer = built("one" if kind == "fsdp" else kind, {})
    with torch.no_grad():
        for param, saved in zip(net.parameters(), params, strict=True):
            param.copy_(saved)
    if kind == "fsdp":
        fully_shard(net)
        optimizer = BlockAdam(net.named_parameters())
    optimizer.load_state_dict(state_dict)
    train(net, optimizer, steps)
    return whole(net.parameters())
