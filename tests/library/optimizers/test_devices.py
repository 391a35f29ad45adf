"""What of the contract a device can change: what a step does, leaves alone, refuses and keeps, on every device.

Without a GPU only the CPU is asked, which shows that the tests are sound; with one, `pytest -m cuda` asks it alone.
"""

from __future__ import annotations

import copy
import io

import pytest
import torch

from blockadapt import BlockAdam, NonFiniteGradientError, SpectrumClip
from blockadapt.optimizers import BlockOptimizer
from support.cases import DEVICES
from support.contract_cases import (
    CASES,
    PLAIN,
    OptimizerCase,
    bits,
    everything,
    give_gradients_,
    grad_bits,
    run,
    state_bits,
    twins,
)

every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
every_class = pytest.mark.parametrize("case", PLAIN, ids=lambda case: case.cls.__name__)
every_device = pytest.mark.parametrize("device", DEVICES)


def built(case: OptimizerCase, device: str, dtype: torch.dtype = torch.float32) -> BlockOptimizer:
    (model,) = twins(count=1, dtype=dtype)
    return case.build(model.to(device).parameters())


def parameters(optimizer: BlockOptimizer) -> list[torch.Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


@every_device
@every_case
def test_a_run_is_that_of_eigh_on_the_cpu(case: OptimizerCase, device: str) -> None:
    (model,) = twins(count=1, dtype=torch.float64)
    expected = case.build(model.parameters(), backend="eigh")
    optimizer = built(case, device, torch.float64)
    for one in (optimizer, expected):
        run(one, range(1, 7))
    found = [param.detach().cpu() for param in parameters(optimizer)]
    torch.testing.assert_close(found, [param.detach() for param in parameters(expected)], rtol=1e-8, atol=1e-8)


@every_device
@every_case
def test_a_copy_and_a_loaded_state_continue_bit_for_bit(case: OptimizerCase, device: str) -> None:
    optimizer, loaded = built(case, device), built(case, device)
    run(optimizer, range(1, 6))
    other = copy.deepcopy(optimizer)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    with torch.no_grad():
        for param, value in zip(parameters(loaded), parameters(optimizer), strict=True):
            param.copy_(value)
    loaded.load_state_dict(torch.load(file, map_location="cpu", weights_only=True))
    for one in (optimizer, other, loaded):
        run(one, range(6, 9))
    assert everything(other) == everything(optimizer) == everything(loaded)


@every_device
@every_case
def test_gradients_stay_as_they_are_and_state_lies_with_the_parameter(case: OptimizerCase, device: str) -> None:
    optimizer = built(case, device)
    params = parameters(optimizer)
    give_gradients_(params, 1)
    before = grad_bits(params)
    optimizer.step()
    assert grad_bits(params) == before
    for state in optimizer.state.values():
        assert {t.device.type for name, t in state.items() if name not in ("step", "cut")} <= {device}


@every_device
@every_case
def test_a_gradient_that_is_not_finite_is_refused_with_nothing_changed(case: OptimizerCase, device: str) -> None:
    optimizer = built(case, device)
    run(optimizer, [1])
    before = everything(optimizer)
    give_gradients_(parameters(optimizer), 2)
    grad = parameters(optimizer)[2].grad
    assert grad is not None
    grad.view(-1)[1] = torch.nan
    with pytest.raises(NonFiniteGradientError):
        optimizer.step()
    assert everything(optimizer) == before
    run(optimizer, [2])
    assert everything(optimizer) != before


@every_device
def test_a_parameter_without_gradient_is_untouched(device: str) -> None:
    (model,) = twins(count=1)
    optimizer = BlockAdam(model.to(device).parameters())
    give_gradients_(parameters(optimizer), 1)
    still, *others = parameters(optimizer)
    still.grad = None
    before = [param.detach().clone() for param in parameters(optimizer)]
    optimizer.step()
    assert torch.equal(still, before[0])
    assert still not in optimizer.state
    assert not any(torch.equal(param, old) for param, old in zip(others, before[1:], strict=True))


@every_device
@pytest.mark.parametrize("lr_device", ["cpu", "its own"])
@every_class
def test_a_tensor_lr_updated_in_place_is_the_same_number(case: OptimizerCase, lr_device: str, device: str) -> None:
    by_number, by_tensor = built(case, device), built(case, device)
    lr = torch.full((), 0.05, dtype=torch.float64, device="cpu" if lr_device == "cpu" else device)
    by_tensor.param_groups[0]["lr"] = lr
    for step, value in enumerate((0.05, 0.3), start=1):
        by_number.param_groups[0]["lr"] = value
        lr.fill_(value)
        for optimizer in (by_number, by_tensor):
            run(optimizer, [step])
    torch.testing.assert_close(parameters(by_tensor), parameters(by_number), rtol=1e-6, atol=1e-7)
    assert by_tensor.param_groups[0]["lr"] is lr


@every_device
@every_class
def test_a_grad_scaler_skips_a_step_that_overflows(case: OptimizerCase, device: str) -> None:
    optimizer, expected = built(case, device), built(case, device)
    run(expected, [1, 2])
    scaler = torch.amp.GradScaler(device, init_scale=2.0**10)
    for step in (1, "overflow", 2):
        params = parameters(optimizer)
        give_gradients_(params, 9 if step == "overflow" else int(step))
        scale = scaler.scale(torch.ones((), device=device)) * (torch.inf if step == "overflow" else 1)
        for param in params:
            param.grad *= scale
        before = everything(optimizer)
        scaler.step(optimizer)
        scaler.update()
        assert (everything(optimizer) == before) == (step == "overflow")
    assert everything(optimizer) == everything(expected)


@every_device
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@every_class
def test_a_half_precision_step_is_that_of_float32_rounded(case: OptimizerCase, dtype: torch.dtype, device: str) -> None:
    half = built(case, device, dtype)
    full = case.build([param.detach().float().requires_grad_() for param in parameters(half)])
    give_gradients_(parameters(half), 1)
    for rounded, exact in zip(parameters(half), parameters(full), strict=True):
        exact.grad = rounded.grad.float()
    for optimizer in (half, full):
        optimizer.step()
    assert [bits(param) for param in parameters(half)] == [bits(param.to(dtype)) for param in parameters(full)]
    assert state_bits(half) == state_bits(full)


@every_device
@every_case
def test_the_default_device_of_torch_changes_nothing(case: OptimizerCase, device: str) -> None:
    """As `torch.set_default_device`: what an optimizer makes lies with its parameters or on the host all the same."""
    optimizer, expected = built(case, device), built(case, device)
    run(expected, range(1, 5))
    for step in range(1, 5):
        give_gradients_(parameters(optimizer), step)
        with torch.device("meta"):
            optimizer.step()
            optimizer.load_state_dict(optimizer.state_dict())
    assert everything(optimizer) == everything(expected)


@pytest.mark.parametrize("backend", ["auto", "eigh"])
def test_the_default_device_of_torch_changes_nothing_that_a_clip_measures(backend: str) -> None:
    optimizer, expected = (
        BlockAdam(model.parameters(), backend=backend, clip=SpectrumClip.auto(steps=20)) for model in twins()
    )
    run(expected, range(1, 5))
    for step in range(1, 5):
        give_gradients_(parameters(optimizer), step)
        with torch.device("meta"):
            optimizer.step()
    assert everything(optimizer) == everything(expected)
