"""The contract on every device: what a step does, leaves alone, refuses and keeps, for every case of the table.

Without a GPU only the CPU is asked, which shows that the tests are sound; `pytest -m cuda` asks the GPU.
"""

from __future__ import annotations

import copy
import io

import pytest
import torch

from blockadapt import BlockAdam, NonFiniteGradientError
from blockadapt.optimizers import BlockOptimizer
from support.contract_cases import CASES, OptimizerCase, everything, give_gradients_, grad_bits, run, twins

every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
every_device = pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda",
            marks=[pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")],
        ),
    ],
)


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
