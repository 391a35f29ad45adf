"""Steps on a device without eigh: the same step through a copy on the CPU, with one warning.

The device is the CPU itself, whose `aten::_linalg_eigh` is replaced in torch's dispatcher by one that is not there.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from blockadapt import BlockAdam, SpectrumClip
from blockadapt.kernels import Kernel, get_kernel, host
from blockadapt.kernels.cpu.kernel import NumbaKernel
from blockadapt.kernels.eigh import EighKernel, solves


def _missing(*arguments: Any) -> Any:
    raise NotImplementedError("The operator 'aten::_linalg_eigh' is not implemented for this device.")


@pytest.fixture
def _no_eigh() -> Iterator[None]:
    for cache in (solves, host._warn_once):
        cache.cache_clear()
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that there was another
        library.impl("_linalg_eigh", _missing, "CPU")
    try:
        yield
    finally:
        library._destroy()
        for cache in (solves, host._warn_once):
            cache.cache_clear()


OPTIONS: list[dict[str, Any]] = [
    {},
    {"amsgrad": True, "refresh_every": 2},
    {"clip": SpectrumClip(final_lr=0.1, gamma=0.1), "weight_decay": 0.1},
    {"clip": SpectrumClip(final_lr="auto", gamma=0.1)},
    {"grouping": "joint"},
]


def trained(backend: str | Kernel, options: dict[str, Any]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((7, 5), (4,), (2, 1, 3, 3))]
    params[0].data = params[0].data.t().contiguous().t()  # a parameter that lies by columns
    optimizer = BlockAdam(params, lr=torch.tensor(0.01), backend=backend, block_size=4, **options)
    for _ in range(5):
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator)
        optimizer.step()
    return [param.detach() for param in params] + [t for s in optimizer.state.values() for t in s.values()]


@pytest.mark.usefixtures("_no_eigh")
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_step_is_that_of_the_cpu_kernel_with_one_warning(options: dict[str, Any]) -> None:
    with pytest.warns(UserWarning, match=r"^blockadapt: the device 'cpu' has no torch\.linalg\.eigh") as caught:
        ours = trained("eigh", options)
    assert len(caught) == 1
    expected = trained("numba", options)
    assert [t.numpy().tobytes() for t in ours] == [t.numpy().tobytes() for t in expected]


@pytest.mark.usefixtures("_no_eigh")
def test_who_looks_at_a_spectrum_gets_it_through_the_cpu_too() -> None:
    packed = torch.tensor([[4.0, 1.0, 3.0]])
    eigenvalues, basis = get_kernel("eigh").decompose(packed, 2, BlockAdam.spectral_function)
    rebuilt = basis @ torch.diag_embed(eigenvalues) @ basis.mT
    torch.testing.assert_close(rebuilt, torch.tensor([[[4.0, 1.0], [1.0, 3.0]]]))


def test_a_device_with_eigh_needs_no_copy() -> None:
    kernels = get_kernel("eigh").kernels
    place = torch.device("cpu")
    batch = host.Batch(3, torch.float32, place, BlockAdam.spectral_function)
    assert [kernel.takes(batch) for kernel in kernels] == [True, True]
    assert isinstance(get_kernel("eigh").kernel_for(batch), EighKernel)
    assert isinstance(get_kernel("auto").kernel_for(batch), NumbaKernel)
