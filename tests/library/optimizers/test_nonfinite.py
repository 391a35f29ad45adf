"""A step is atomic: a gradient that cannot be used, or a failure midway, leaves no trace."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from blockadapt import (
    BlockAdagrad,
    BlockAdam,
    BlockAdamW,
    BlockRMSprop,
    IndexGroups,
    NonFiniteGradientError,
    SpectrumClip,
    terms,
)
from blockadapt.optimizers import BlockOptimizer, peak
from support.contract_cases import (
    CASES,
    CLASSES,
    CLOSING,
    OPEN,
    STEPS_TO_CLOSE,
    OptimizerCase,
    everything,
    give_gradients_,
    param_bits,
    run,
    state_bits,
    twins,
)

BAD = {"nan": float("nan"), "inf": float("inf"), "-inf": float("-inf"), "overflow": -1e30}

every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
every_class = pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
every_bad = pytest.mark.parametrize("bad", BAD.values(), ids=BAD.keys())


def parameters(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(11)
    return [nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)) for shape in shapes]


def spoil_(param: Tensor, bad: float, count: int = 1) -> None:
    """Put a bad value into the first entries of the gradient."""
    assert param.grad is not None
    param.grad.view(-1)[:count] = bad


# on_nonfinite="raise" ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("good_steps", [0, STEPS_TO_CLOSE])
@every_bad
@every_case
def test_a_bad_gradient_raises_and_the_run_goes_on_as_if_it_had_never_been(
    case: OptimizerCase, bad: float, good_steps: int
) -> None:
    hit, spared = twins()
    optimizers = case.build(hit.parameters()), case.build(spared.parameters())
    for optimizer in optimizers:
        run(optimizer, range(1, good_steps + 1))
    before = everything(optimizers[0])
    give_gradients_(hit.parameters(), 77)
    spoil_(hit.linear.weight, bad)
    with pytest.raises(NonFiniteGradientError):
        optimizers[0].step()
    assert everything(optimizers[0]) == before
    assert len(optimizers[0].state) == (0 if good_steps == 0 else 7)
    for optimizer in optimizers:
        run(optimizer, [good_steps + 1])
    assert everything(optimizers[0]) == everything(optimizers[1])


@every_class
def test_the_error_names_the_parameter_and_counts_its_bad_entries(cls: type[BlockOptimizer]) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 5))
    for params, name in ((model.named_parameters(), "'1.weight'"), (model.parameters(), None)):
        optimizer = cls(params)
        give_gradients_(model.parameters(), 1)
        spoil_(model[1].weight, float("nan"), count=4)
        named = name or "parameter 2 of group 0 (shape (5, 3))"
        message = (
            f"{cls.__name__}: the gradient of {named} has 4 of 15 entries that are not finite or exceed 2.9e+17; "
            "parameters and state are unchanged."
        )
        with pytest.raises(NonFiniteGradientError, match=f"^{re.escape(message)}$"):
            optimizer.step()


def test_the_error_is_a_runtime_error_and_counts_every_kind_of_bad_entry() -> None:
    (param,) = parameters((6,))
    optimizer = BlockAdam([("w", param)])
    param.grad = torch.tensor([1.0, float("nan"), float("inf"), float("-inf"), 1e30, 0.0])
    with pytest.raises(RuntimeError, match="the gradient of 'w' has 4 of 6 entries"):
        optimizer.step()


def test_a_bad_gradient_in_the_last_group_spares_the_first() -> None:
    first, last = parameters((3, 2), (4,))
    optimizer = BlockAdam([{"params": [first]}, {"params": [last]}])
    before = everything(optimizer)
    give_gradients_([first, last], 1)
    spoil_(last, float("inf"))
    with pytest.raises(NonFiniteGradientError, match=r"parameter 0 of group 1 \(shape \(4,\)\)"):
        optimizer.step()
    assert everything(optimizer) == before


@pytest.mark.parametrize(
    ("dtype", "bad"),
    [(torch.float64, 1e200), (torch.float64, BAD["inf"]), (torch.bfloat16, 1e30), (torch.float16, BAD["inf"])],
    ids=str,
)
@every_class
def test_what_is_too_large_depends_on_the_precision_of_the_statistics(
    cls: type[BlockOptimizer], dtype: torch.dtype, bad: float
) -> None:
    params = parameters((4, 3), dtype=dtype)
    optimizer = cls(params)
    before = everything(optimizer)
    give_gradients_(params, 1)
    spoil_(params[0], bad)
    with pytest.raises(NonFiniteGradientError, match="has 1 of 12 entries"):
        optimizer.step()
    assert everything(optimizer) == before


@pytest.mark.parametrize(
    ("dtype", "largest"),
    [(torch.float32, 2.8e17), (torch.float64, 1e30), (torch.bfloat16, 2.8e17), (torch.float16, 65504.0)],
    ids=str,
)
@every_class
def test_the_largest_gradients_let_through_leave_everything_finite(
    cls: type[BlockOptimizer], dtype: torch.dtype, largest: float
) -> None:
    params = parameters((20, 3), (2, 2, 3, 3), (5,), dtype=dtype)
    optimizer = cls(params, grouping="tensor")
    for _ in range(3):
        for param in params:
            param.grad = torch.full_like(param, largest)
        optimizer.step()
    assert all(bool(p.isfinite().all()) for p in params)
    assert all(bool(v.isfinite().all()) for state in optimizer.state.values() for v in state.values())


def test_gradients_count_as_too_large_from_where_the_trace_of_the_largest_block_overflows() -> None:
    """4,096 squares of 2.88e17 sum to the largest float32. There are so many that their norm does not decide."""
    param = nn.Parameter(torch.zeros(8192))
    optimizer = BlockAdam([param])
    param.grad = torch.full_like(param, 2.8e17)
    optimizer.step()
    param.grad = torch.full_like(param, 3.0e17)
    with pytest.raises(NonFiniteGradientError, match="has 8192 of 8192 entries"):
        optimizer.step()


# on_nonfinite="skip" -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("bad", "good_steps"), [(BAD["nan"], 0), (BAD["inf"], 1), (BAD["overflow"], 2)])
@every_case
def test_skip_leaves_out_the_whole_step_and_counts_it(case: OptimizerCase, bad: float, good_steps: int) -> None:
    hit, spared = twins()
    optimizers = [case.build(m.parameters(), on_nonfinite="skip") for m in (hit, spared)]
    for optimizer in optimizers:
        run(optimizer, range(1, good_steps + 1))
    before = param_bits(hit.parameters()), state_bits(optimizers[0])
    give_gradients_(hit.parameters(), 77)
    spoil_(hit.norm.weight, bad)
    assert optimizers[0].step() is None
    assert (param_bits(hit.parameters()), state_bits(optimizers[0])) == before
    assert (optimizers[0].skipped_steps, optimizers[1].skipped_steps) == (1, 0)
    for optimizer in optimizers:
        run(optimizer, [good_steps + 1])
    assert param_bits(hit.parameters()) == param_bits(spared.parameters())
    assert state_bits(optimizers[0]) == state_bits(optimizers[1])
    assert optimizers[0].skipped_steps == 1


@every_class
def test_skip_in_one_group_skips_all_groups(cls: type[BlockOptimizer]) -> None:
    strict, lenient, careless = parameters((3, 2), (4,), (2, 2))
    optimizer = cls(
        [
            {"params": [strict], "on_nonfinite": "raise"},
            {"params": [lenient], "on_nonfinite": "skip"},
            {"params": [careless], "on_nonfinite": "propagate"},
        ]
    )
    params = [strict, lenient, careless]
    before = param_bits(params)
    give_gradients_(params, 1)
    spoil_(lenient, float("nan"))
    optimizer.step()
    assert param_bits(params) == before
    assert not optimizer.state
    assert optimizer.skipped_steps == 1
    spoil_(strict, float("nan"))
    with pytest.raises(NonFiniteGradientError):
        optimizer.step()
    assert optimizer.skipped_steps == 1


@every_class
def test_the_count_of_skipped_steps_survives_a_checkpoint_and_a_late_group(cls: type[BlockOptimizer]) -> None:
    params, fresh = parameters((3,)), parameters((3,))
    optimizer, resumed = cls(params, on_nonfinite="skip"), cls(fresh, on_nonfinite="skip")
    for _ in range(3):
        give_gradients_(params, 1)
        spoil_(params[0], float("inf"))
        optimizer.step()
    resumed.load_state_dict(optimizer.state_dict())
    assert resumed.skipped_steps == 3
    resumed.add_param_group({"params": parameters((2,))})
    assert resumed.skipped_steps == 3


def test_a_skipped_step_still_returns_the_closures_loss() -> None:
    (param,) = parameters((3,))
    optimizer = BlockAdam([param], on_nonfinite="skip")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (param * torch.inf).sum()
        loss.backward()
        return loss

    assert not bool(optimizer.step(closure).isfinite())
    assert optimizer.skipped_steps == 1


# on_nonfinite="propagate" ------------------------------------------------------------------------------------------


def test_propagate_lets_through_what_adam_lets_through() -> None:
    ours, theirs = parameters((4, 3)), parameters((4, 3))
    optimizers = BlockAdam(ours, grouping="diagonal", on_nonfinite="propagate"), torch.optim.Adam(theirs, eps=1e-4)
    for step in (1, 2, 3):
        for params in (ours, theirs):
            give_gradients_(params, step)
            assert params[0].grad is not None
            if step == 2:
                params[0].grad[1, 2] = float("nan")
                params[0].grad[3, 0] = float("inf")
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(ours[0], theirs[0], equal_nan=True)
    assert int(ours[0].isnan().sum()) == 2


@pytest.mark.parametrize("options", [{}, {"refresh_every": 2}, {"clip": OPEN}, {"weight_decay": 0.1}], ids=str)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@every_class
def test_propagate_spoils_the_block_it_hits_and_no_other(
    cls: type[BlockOptimizer], bad: float, options: dict[str, Any]
) -> None:
    hit, spared = parameters((8, 3), (5,)), parameters((8, 3), (5,))
    optimizers = [
        cls(params, grouping="input", block_size=4, on_nonfinite="propagate", **options) for params in (hit, spared)
    ]
    for step in range(1, 9):
        for params in (hit, spared):
            give_gradients_(params, step)
        if step == 6:
            assert hit[0].grad is not None
            hit[0].grad[5, 1] = bad
        for optimizer in optimizers:
            optimizer.step()
    block = torch.zeros(8, 3, dtype=torch.bool)
    block[4:, 1] = True
    assert torch.equal(hit[0].isnan(), block)
    torch.testing.assert_close(hit[0][~block], spared[0][~block])
    torch.testing.assert_close(hit[1], spared[1])


def test_propagate_under_amsgrad_spoils_the_block_it_hits_and_no_other() -> None:
    (param,) = parameters((8, 3))
    optimizer = BlockAdam([param], amsgrad=True, block_size=4, on_nonfinite="propagate")
    give_gradients_([param], 1)
    spoil_(param, float("nan"))
    optimizer.step()
    run(optimizer, [2])
    assert int(param.isnan().sum()) == 4


@every_class
def test_propagate_after_the_clip_has_closed_spoils_one_coordinate(cls: type[BlockOptimizer]) -> None:
    (param,) = parameters((8, 3))
    optimizer = cls([param], clip=CLOSING, on_nonfinite="propagate")
    run(optimizer, range(1, STEPS_TO_CLOSE + 1))
    give_gradients_([param], 9)
    spoil_(param, float("nan"))
    optimizer.step()
    assert int(param.isnan().sum()) == 1


# Failures midway ---------------------------------------------------------------------------------------------------


class Failing:
    """`torch.linalg.eigh` that fails at its n-th call."""

    def __init__(self, at: int, error: BaseException) -> None:
        self.real, self.at, self.error, self.calls = torch.linalg.eigh, at, error, 0

    def __call__(self, matrices: Tensor) -> Any:
        self.calls += 1
        if self.calls == self.at:
            raise self.error
        return self.real(matrices)


@pytest.mark.parametrize("error", [MemoryError("no memory"), RuntimeError("broken"), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("at", [1, 2, 3])
@pytest.mark.parametrize("good_steps", [0, 1])
@every_class
def test_a_failure_within_the_linear_algebra_leaves_no_trace(
    cls: type[BlockOptimizer], good_steps: int, at: int, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes = ((20, 3), (2, 2, 3, 3), (7,), ())
    hit, spared = parameters(*shapes), parameters(*shapes)
    optimizers = [cls(params, backend="eigh", weight_decay=0.1) for params in (hit, spared)]
    for optimizer in optimizers:
        run(optimizer, range(1, good_steps + 1))
    before = everything(optimizers[0])
    failing = Failing(at, error)
    with monkeypatch.context() as patch:
        patch.setattr(torch.linalg, "eigh", failing)
        with pytest.raises(type(error)):
            run(optimizers[0], [good_steps + 1])
    assert failing.calls == at
    assert everything(optimizers[0]) == before
    for optimizer in optimizers:
        run(optimizer, [good_steps + 1])
    assert everything(optimizers[0]) == everything(optimizers[1])


@every_class
def test_a_failure_in_a_large_block_leaves_no_trace_in_the_small_ones(
    cls: type[BlockOptimizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block of 80 goes through eigh under every backend, whatever takes the small ones."""
    optimizer = cls(parameters((4,), (80,), (3, 3)), grouping="tensor")
    run(optimizer, [1])
    before = everything(optimizer)
    monkeypatch.setattr(torch.linalg, "eigh", Failing(1, MemoryError("no memory")))
    with pytest.raises(MemoryError):
        run(optimizer, [2])
    assert everything(optimizer) == before


class OutOfMemory(TorchDispatchMode):
    """Fails at the n-th operation that makes a new tensor."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at, self.made = at, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        new = [t for t in tree_leaves(result) if isinstance(t, Tensor) and t.untyped_storage().data_ptr() not in given]
        self.made += bool(new)
        if new and self.made == self.at:
            raise MemoryError(f"no memory for the result of {func}")
        return result


CLOSED_GROUP = {"clip": CLOSING, "weight_decay": 0.1, "maximize": True}


def step_without_memory(optimizer: BlockOptimizer, at: int) -> str | None:
    """Try to step; say what failed."""
    try:
        with OutOfMemory(at):
            optimizer.step()
    except MemoryError as error:
        return str(error)
    return None


@pytest.mark.parametrize("good_steps", [0, STEPS_TO_CLOSE - 1, STEPS_TO_CLOSE])
@pytest.mark.parametrize(
    "options",
    [
        [{}, CLOSED_GROUP, {**CLOSED_GROUP, "lr": 0.1}],
        [{"amsgrad": True, "refresh_every": 2}, {"grouping": "joint", "weight_decay": 0.1}],
        [{"grouping": IndexGroups([[1, 0, 3], [2, 4], range(5, 12)])}, {"grouping": "joint", "clip": CLOSING}],
        [{"clip": SpectrumClip("auto", 0.05)}, {"clip": SpectrumClip("auto", 80.0), "grouping": "joint"}],
        [{"lr": torch.tensor(0.1)}, {**CLOSED_GROUP, "lr": torch.tensor(0.1)}],
    ],
    ids=["open and closed", "kept bases", "spanning", "measuring", "lr in a tensor"],
)
def test_running_out_of_memory_anywhere_leaves_no_trace(options: list[dict[str, Any]], good_steps: int) -> None:
    run_out_of_memory(BlockAdam, options, good_steps)


@pytest.mark.parametrize("cls", [BlockAdam, BlockAdamW, BlockRMSprop])
def test_running_out_of_memory_leaves_no_trace_where_only_the_device_knows_lr(
    cls: type[BlockOptimizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The CPU stands for the device: nobody reads what lies in its tensors."""
    for module in (terms, peak):
        monkeypatch.setattr(module, "is_on_host", lambda tensor: False)
    given = {"lr": torch.tensor(0.1), "weight_decay": 0.1}
    run_out_of_memory(cls, [{**given, "clip": CLOSING}, {**given, "clip": OPEN}], STEPS_TO_CLOSE)


def run_out_of_memory(cls: type[BlockOptimizer], options: list[dict[str, Any]], good_steps: int) -> None:
    """After so many steps, and with an lr that has risen since, let each new tensor of a step be the one too many."""
    hit, spared = ([[*parameters((3, 2)), *parameters((6,), dtype=torch.bfloat16)] for _ in options] for _ in range(2))
    optimizers = [
        cls([{"params": p, **o} for p, o in zip(groups, options, strict=True)], block_size=3, backend="eigh")
        for groups in (hit, spared)
    ]
    for optimizer in optimizers:
        run(optimizer, range(1, good_steps + 1))
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * 2
        give_gradients_((p for group in optimizer.param_groups for p in group["params"]), good_steps + 1)
    before = everything(optimizers[0])
    at = 1
    while failure := step_without_memory(optimizers[0], at):
        assert everything(optimizers[0]) == before, f"{failure}, new tensor {at} of the step, left a trace"
        at += 1
    assert at > 10
    optimizers[1].step()
    assert everything(optimizers[0]) == everything(optimizers[1])


class OutOfArrays:
    """Fails at the n-th array that NumPy is asked to make."""

    def __init__(self, at: int, patch: pytest.MonkeyPatch) -> None:
        self.at, self.made = at, 0
        for name in ("zeros", "empty", "ones", "array"):
            patch.setattr(np, name, self.counted(getattr(np, name)))

    def counted(self, make: Callable[..., Any]) -> Callable[..., Any]:
        def made(*args: Any, **kwargs: Any) -> Any:
            self.made += 1
            if self.made == self.at:
                raise MemoryError("no memory for an array")
            return make(*args, **kwargs)

        return made


def step_without_arrays(optimizer: BlockOptimizer, at: int, patch: pytest.MonkeyPatch) -> str | None:
    """Try to step; say what failed."""
    try:
        with patch.context() as context:
            OutOfArrays(at, context)
            optimizer.step()
    except MemoryError as error:
        return str(error)
    return None


def test_running_out_of_memory_between_the_batches_of_the_numba_kernel_leaves_no_trace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("numba")
    params = [*parameters((4, 3), (2, 2, 3, 3), ()), *parameters((7,), dtype=torch.float64)]
    optimizer = BlockAdam(params, backend="numba")
    run(optimizer, [1])
    give_gradients_(params, 2)
    before = everything(optimizer)
    at = 1
    while failure := step_without_arrays(optimizer, at, monkeypatch):
        assert everything(optimizer) == before, f"{failure}, array {at} of the step, left a trace"
        at += 1


# eigh that does not converge ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", [BlockAdam, BlockRMSprop, BlockAdagrad])
def test_what_float32_eigh_cannot_solve_is_solved_in_float64(
    cls: type[BlockOptimizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    hit, spared = parameters((20, 3), (7,)), parameters((20, 3), (7,))
    real, solved = torch.linalg.eigh, []

    def single_fails(matrices: Tensor) -> Any:
        if matrices.dtype == torch.float32:
            raise torch.linalg.LinAlgError("did not converge")
        solved.append(matrices.dtype)
        return real(matrices)

    optimizers = [cls(params, backend="eigh", eps=1e-2) for params in (hit, spared)]
    for step in (1, 2):
        with monkeypatch.context() as patch:
            patch.setattr(torch.linalg, "eigh", single_fails)
            run(optimizers[0], [step])
        run(optimizers[1], [step])
    assert solved == [torch.float64] * 4
    assert [p.dtype for p in hit] == [torch.float32] * 2
    torch.testing.assert_close(hit, spared, rtol=1e-3, atol=1e-5)


def test_what_float64_eigh_cannot_solve_either_raises_and_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = BlockAdam(parameters((20, 3), (7,)), backend="eigh")
    run(optimizer, [1])
    before = everything(optimizer)

    def fails(matrices: Tensor) -> Any:
        raise torch.linalg.LinAlgError("did not converge")

    monkeypatch.setattr(torch.linalg, "eigh", fails)
    with pytest.raises(torch.linalg.LinAlgError, match="did not converge"):
        run(optimizer, [2])
    assert everything(optimizer) == before
