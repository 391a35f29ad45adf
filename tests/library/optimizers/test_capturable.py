"""Steps that no host waits for: on tensors without numbers, where nothing can be waited for, and under `capturable`.

A FakeTensor refuses every read: `.item()`, `bool()`, `nonzero` raise. So a step that goes through on a device of fakes
reads nothing; copies to the host, which fakes allow, are counted, and so are copies from it that are waited for. The
device "lazy" stands for a GPU: torch knows it everywhere and it has no numbers of its own here.

A step of fakes looks at everything anew each time. So what a step does that finds all as the last one left it is seen
on the CPU, by a kernel that reads nothing, with every read refused but those of the host's own step counters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from blockadapt import (
    BlockAdaFom,
    BlockAdagrad,
    BlockAdam,
    BlockAdamW,
    BlockRMSprop,
    NonFiniteGradientError,
    SpectrumClip,
)
from blockadapt.kernels import Batch, Change, Kernel, Segment, Tally
from blockadapt.optimizers import BlockOptimizer, gradients, step_state
from blockadapt.optimizers.peak import peak_lr
from blockadapt.optimizers.preparation import Preparation

AWAY = "lazy:0"
SHAPES = ((2, 1, 3, 3), (7, 25), (5,), ())

CASES: dict[str, tuple[type[BlockOptimizer], dict[str, Any]]] = {
    "Adam": (BlockAdam, {}),
    "AdamW": (BlockAdamW, {"weight_decay": 0.1}),
    "RMSprop": (BlockRMSprop, {"weight_decay": 0.1}),
    "Adagrad": (BlockAdagrad, {}),
    "AdaFom, β₁ falls": (BlockAdaFom, {"beta1_decay": 0.9, "bias_correction": True}),
    "amsgrad": (BlockAdam, {"amsgrad": True}),
    "clip": (BlockAdam, {"clip": SpectrumClip(final_lr=0.01, gamma=0.1)}),
    "joint": (BlockAdam, {"grouping": "joint"}),
    "diagonal": (BlockAdam, {"grouping": "diagonal"}),
    "blocks of 70": (BlockAdam, {"grouping": "chunk", "block_size": 70}),
}
HOST_ONLY: dict[str, tuple[type[BlockOptimizer], dict[str, Any]]] = {
    "kept basis": (BlockAdam, {"refresh_every": 3}),
    "closed": (BlockAdam, {"clip": SpectrumClip(final_lr=0.01, gamma=1000.0)}),
}
every_case = pytest.mark.parametrize("name", CASES)


class Waits(TorchDispatchMode):
    """Counts what makes the host wait for the device: numbers that are read, and tensors that come back or are sent."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []
        self.sent: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        before, after = _devices((args, kwargs)), _devices(result)
        reads = function in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default)
        if "lazy" in before and ("cpu" in after or reads):
            self.seen.append(function.name())
        copies = function in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)
        if (
            copies
            and "cpu" in before
            and "lazy" in after
            and not (kwargs or {}).get("non_blocking", args[2:] == (True,))
        ):
            self.sent.append(function.name())
        return result


def _devices(tree: Any) -> set[str]:
    return {leaf.device.type for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)}


def assert_waits_for_nothing(optimizer: BlockOptimizer, params: list[Tensor]) -> None:
    """Four steps, of which the first may send what stays on the device."""
    with Waits() as waits:
        steps(optimizer, params, number=1)
    assert waits.seen == []
    with Waits() as waits:
        steps(optimizer, params, number=3)
    assert waits.seen == waits.sent == []


@pytest.fixture
def capturable_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_state, "CAPTURABLE", ("lazy", "cpu"))


@pytest.fixture
def mode(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeTensorMode]:
    """Fakes whose gradients count as having numbers, as a GPU's have: a check of them would read one."""
    monkeypatch.setattr(gradients, "has_numbers", lambda tensor: True)
    with FakeTensorMode() as fake:
        yield fake


def parameters(device: str, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    if device == "cpu":
        return [nn.Parameter(torch.randn(shape, generator=generator, dtype=dtype)) for shape in SHAPES]
    return [nn.Parameter(torch.empty(shape, device=device, dtype=dtype)) for shape in SHAPES]


def steps(optimizer: BlockOptimizer, params: list[Tensor], number: int = 4, seed: int = 1) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(number):
        for param in params:
            numbers = param.device.type == "cpu" and type(param) is nn.Parameter
            param.grad = torch.randn(param.shape, generator=generator, dtype=param.dtype) if numbers else param.detach()
        optimizer.step()


# ---------------------------------------------------------------------------------------------- tensors without numbers


@pytest.mark.parametrize("policy", ["raise", "skip", "propagate"])
@pytest.mark.parametrize("name", ["Adam", "joint", "closed", "kept basis"])
def test_meta_parameters_are_stepped_as_by_torchs_adam(name: str, policy: str) -> None:
    cls, options = (CASES | HOST_ONLY)[name]
    params = parameters("meta")
    optimizer = cls(params, on_nonfinite=policy, **options)
    steps(optimizer, params)
    assert {int(optimizer.state[param]["step"]) for param in params} == {4}
    assert all(t.is_meta for p in params for n, t in optimizer.state[p].items() if n not in ("step", "cut"))


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("name", [*CASES, *HOST_ONLY])
def test_fake_parameters_are_stepped_inside_their_mode_and_out_of_it(name: str, inside: bool) -> None:
    cls, options = (CASES | HOST_ONLY)[name]
    with FakeTensorMode() as mode:
        params = parameters("cpu" if inside else AWAY)
        optimizer = cls(params, **options)
    with mode if inside else nullcontext():
        steps(optimizer, params)
        assert {state["exp_avg"].device for state in optimizer.state.values() if "exp_avg" in state} <= {
            params[0].device
        }
    # Nothing of it is left where real steps find it.
    real = parameters("cpu")
    optimizer = cls(real, **options)
    steps(optimizer, real)
    assert all(param.isfinite().all() for param in real)


def test_a_gradient_or_a_state_without_numbers_is_refused_where_the_parameter_has_them() -> None:
    param = nn.Parameter(torch.ones(4))
    optimizer = BlockAdam([param])
    fake = FakeTensorMode().from_tensor(torch.ones(4))
    param.grad = torch.ones(4)
    optimizer.step()
    optimizer.state[param]["exp_avg"] = fake
    with pytest.raises(ValueError, match=r"`exp_avg` must be one with numbers"):
        optimizer.step()
    other = nn.Parameter(torch.ones(4))
    other.grad = fake
    with pytest.raises(ValueError, match=r"`grad` must be a plain tensor"):
        BlockAdam([other]).step()


# ------------------------------------------------------------------------------------------------- nobody waits


@pytest.mark.parametrize("name", [*CASES, *HOST_ONLY])
def test_a_step_that_checks_nothing_waits_for_nothing(name: str, mode: FakeTensorMode) -> None:
    cls, options = (CASES | HOST_ONLY)[name]
    params = parameters(AWAY)
    optimizer = cls(params, on_nonfinite="propagate", **options)
    assert_waits_for_nothing(optimizer, params)


@every_case
def test_a_learning_rate_on_the_device_stays_there(name: str, mode: FakeTensorMode) -> None:
    cls, options = CASES[name]
    params = parameters(AWAY)
    optimizer = cls(params, lr=torch.ones((), device=AWAY), on_nonfinite="propagate", **options)
    assert_waits_for_nothing(optimizer, params)


@every_case
@pytest.mark.usefixtures("capturable_anywhere")
def test_a_capturable_step_waits_for_nothing_and_counts_on_the_device(name: str, mode: FakeTensorMode) -> None:
    cls, options = CASES[name]
    params = parameters(AWAY)
    lr = torch.ones((), device=AWAY)
    optimizer = cls(params, lr=lr, on_nonfinite="propagate", capturable=True, **options)
    assert_waits_for_nothing(optimizer, params)
    assert {state["step"].device for state in optimizer.state.values()} == {params[0].device}


@pytest.mark.parametrize("where", ["lr", "peak_lr"])
def test_a_number_beside_one_on_the_device_is_not_sent_there(where: str, mode: FakeTensorMode) -> None:
    params = parameters(AWAY)
    optimizer = BlockAdam(params, lr=0.01, on_nonfinite="propagate", clip=SpectrumClip(final_lr=0.01, gamma=0.1))
    (group,) = optimizer.param_groups
    group[where] = torch.ones((), device=AWAY, dtype=torch.float64)
    with Waits() as waits:
        peak = peak_lr(group)
    assert (waits.seen, waits.sent, peak.device.type) == ([], [], "lazy")
    assert_waits_for_nothing(optimizer, params)


def test_what_a_step_counts_is_added_up_on_the_device(mode: FakeTensorMode) -> None:
    tally = Tally(torch.device(AWAY))
    tally.add(torch.ones(2, 3, dtype=torch.float64, device=AWAY), 0.5)
    with Waits() as waits:
        assert tally.total().device.type == "lazy"
    assert waits.seen == waits.sent == []


class Downhill(Kernel):
    """x ← x − grad, which reads nothing."""

    name = "downhill"
    measures = True

    def takes(self, batch: Batch) -> bool:
        return True

    def prepare(self, batch: Batch, segments: Sequence[Segment]) -> Change:
        return Descended(segments)

    def decompose(self, packed: Tensor, n: int) -> tuple[Tensor, Tensor]:
        raise NotImplementedError


@dataclass
class Descended:
    """Such a step."""

    segments: Sequence[Segment]

    def write_(self) -> None:
        for segment in self.segments:
            segment.place.x.sub_(segment.place.part(segment.grad))
            if segment.tally is not None:
                segment.tally.add(torch.ones(2, 3, dtype=torch.float64), 0.5)


@pytest.mark.parametrize("clip", [None, SpectrumClip(0.01, gamma=1000.0), SpectrumClip("auto")], ids=str)
def test_a_step_that_finds_all_as_it_was_reads_nothing(
    clip: SpectrumClip | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But the two numbers that a clip measures, of the step before."""
    params = parameters("cpu")
    groups = [{"params": params[:2]}, {"params": params[2:], "weight_decay": 0.1}]
    optimizer = BlockAdam(groups, backend=Downhill(), on_nonfinite="propagate", clip=clip, block_size=3)
    steps(optimizer, params, number=1)
    stood, repeated = [], Preparation._repeated
    monkeypatch.setattr(Preparation, "_repeated", lambda *args: stood.append(repeated(*args)) or stood[-1])
    reads: list[tuple[int, ...]] = []

    def refused(name: str) -> Any:
        method = getattr(Tensor, name)

        def read(tensor: Tensor, *args: Any) -> Any:
            if tensor.dtype != torch.int64:  # the host counts the steps, and keeps how blocks were cut
                reads.append(tuple(tensor.shape))
            return method(tensor, *args)

        return read

    for name in ("item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__", "__index__"):
        monkeypatch.setattr(Tensor, name, refused(name))
    steps(optimizer, params, number=2, seed=2)
    assert stood == [True, True]
    assert reads == ([(2,)] * 4 if clip is not None and clip.final_lr == "auto" else [])


def test_the_count_sees_what_waits(mode: FakeTensorMode) -> None:
    away = torch.ones(3, device=AWAY)
    with Waits() as waits, pytest.raises(DataDependentOutputException):
        bool(away.any())
    with waits:
        away.cpu()
    assert waits.seen == ["aten::_to_copy"]
    with waits:
        torch.as_tensor(1.0, device=AWAY)
        torch.empty(3, device=AWAY).copy_(torch.ones(3))
        torch.ones(3).to(AWAY, non_blocking=True)
    assert waits.sent == ["aten::_to_copy", "aten::copy_"]
    params = parameters(AWAY)
    optimizer = BlockAdam(params, on_nonfinite="raise")
    with pytest.raises(DataDependentOutputException):
        steps(optimizer, params)


@pytest.mark.parametrize("policy", ["raise", "skip"])
def test_a_check_of_all_groups_is_one_read(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU, where there are numbers to read, made to take the way of a device."""
    reads = []
    tolist = Tensor.tolist
    monkeypatch.setattr(Tensor, "tolist", lambda tensor: reads.append(tensor.shape) or tolist(tensor))
    params = parameters("cpu")
    groups = [{"params": [param], "weight_decay": 0.1 * i} for i, param in enumerate(params)]
    optimizer = BlockAdam(groups, on_nonfinite=policy)
    for param in params:
        param.grad = torch.ones(param.shape)
    monkeypatch.setattr(Tensor, "is_cpu", property(lambda tensor: False), raising=False)

    def are_usable() -> bool:
        return optimizer._are_usable([gradients.Gradients.of(group) for group in optimizer.param_groups])

    assert are_usable()
    assert reads == [torch.Size([len(params)])]
    params[1].grad[0, 0] = torch.inf
    reads.clear()
    if policy == "skip":
        assert not are_usable()
    else:
        with pytest.raises(NonFiniteGradientError, match="parameter 0 of group 1"):
            are_usable()
    assert reads == [torch.Size([len(params)])]


# ------------------------------------------------------------------------------------------------------- capturable


@every_case
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.usefixtures("capturable_anywhere")
def test_a_capturable_step_is_the_other_to_rounding(name: str, dtype: torch.dtype) -> None:
    """Parameters that begin at different steps, so that counters of one group differ."""
    cls, options = CASES[name]
    results = []
    for capturable in (False, True):
        params = parameters("cpu", dtype)
        lr = torch.tensor(0.01, dtype=torch.float64)
        optimizer = cls(params, lr=lr, on_nonfinite="propagate", backend="eigh", capturable=capturable, **options)
        if options.get("grouping") != "joint":
            steps(optimizer, params[:2], number=3)
            for param in params[:2]:
                param.grad = None
            steps(optimizer, params[2:], number=1)
        lr.fill_(0.02)
        steps(optimizer, params, number=6, seed=2)
        results.append(params)
        counts = [int(optimizer.state[param]["step"]) for param in params]
        assert counts == ([6] * 4 if options.get("grouping") == "joint" else [9, 9, 7, 7])
    close = 1e-6 if dtype == torch.float32 else 1e-14
    torch.testing.assert_close(results[1], results[0], rtol=close, atol=close)


@pytest.mark.usefixtures("capturable_anywhere")
def test_a_clip_never_closes_under_capturable_and_keeps_its_second_moment() -> None:
    moved = []
    for capturable in (False, True):
        params = parameters("cpu")
        clip = SpectrumClip(final_lr=0.01, gamma=1000.0)
        optimizer = BlockAdam(params, clip=clip, on_nonfinite="propagate", backend="eigh", capturable=capturable)
        steps(optimizer, params)
        assert ("second_moment" in optimizer.state[params[0]]) == capturable
        moved.append([param.detach() - start for param, start in zip(params, parameters("cpu"), strict=True)])
    torch.testing.assert_close(moved[1], moved[0], rtol=0.01, atol=1e-4)


@pytest.mark.usefixtures("capturable_anywhere")
def test_capturable_may_be_switched_on_and_off_and_goes_through_a_checkpoint() -> None:
    results = []
    for switches in ((False, False, False), (True, False, True)):
        params = parameters("cpu")
        optimizer = BlockAdam(params, on_nonfinite="propagate", backend="eigh")
        for number, capturable in enumerate(switches):
            optimizer.param_groups[0]["capturable"] = capturable
            steps(optimizer, params, seed=number)
            loaded = BlockAdam(params, on_nonfinite="propagate", backend="eigh")
            loaded.load_state_dict(optimizer.state_dict())
            optimizer = loaded
        results.append([param.detach() for param in params])
    torch.testing.assert_close(results[1], results[0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"refresh_every": 2}, "`refresh_every` must be 1 where `capturable` is True"),
        ({"on_nonfinite": "raise"}, "`on_nonfinite` must be 'propagate' where `capturable` is True"),
        ({"clip": SpectrumClip(final_lr="auto")}, "`clip` must be one with a number for `final_lr` where `capturable`"),
        ({"capturable": 1}, "`capturable` must be True or False, got 1"),
    ],
)
def test_what_cannot_be_captured_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^BlockAdam: {message}"):
        BlockAdam(parameters("cpu"), **{"capturable": True, "on_nonfinite": "propagate", **options})


def test_a_device_that_captures_nothing_is_refused_before_anything_changes() -> None:
    params = parameters("cpu")
    optimizer = BlockAdam(params, capturable=True, on_nonfinite="propagate")
    before = [param.detach().clone() for param in params]
    with pytest.raises(ValueError, match=r"^BlockAdam: `capturable` must be False where parameters are not on one of"):
        steps(optimizer, params)
    assert not optimizer.state
    torch.testing.assert_close(params, before, rtol=0, atol=0)
