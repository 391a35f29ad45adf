"""Whether memory is what the kernels take it for. They read and write addresses, so this is asked before a launch.

The tensors of a place are checked once, when their addresses are taken; the gradient, which may be another each time,
at every step. What does not fit is refused in one sentence.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import Parameter

from blockadapt.kernels.contract import Batch, Place
from blockadapt.kernels.reflections import eigenvalues_length, reflections_length
from blockadapt.moments import packed_length
from blockadapt.validation import Described, require

OWNER = "TritonKernel"


def check_place(place: Place, batch: Batch) -> None:
    """Refuse tensors that a kernel would misread, or whose memory is not their own.

    Raises:
        ValueError: One of them is not as `Place` says, in plain memory of the batch's device.
    """
    n, x, (major, minor, k) = batch.n, place.x, place.x.shape
    require(1 <= k <= n, OWNER, "x", f"of shape [major, minor, k] with 1 <= k <= {n}", tuple(x.shape))
    require(place.offset >= 0, OWNER, "offset", "an integer >= 0", place.offset)
    together = (place.basis is None) == (place.eigenvalues is None)
    require(together, OWNER, "basis", "kept together with `eigenvalues`", Described("one of them alone"))
    shapes = {
        "x": (major, minor, k),
        "m": (major, minor, k),
        "second_moment": (major, minor, packed_length(n)),
        "largest": (major, minor, n),
        "basis": (place.num_blocks * reflections_length(n),),
        "eigenvalues": (place.num_blocks * eigenvalues_length(n),),
    }
    for name, shape in shapes.items():
        tensor: Tensor | None = getattr(place, name)
        if tensor is None:
            continue
        strides = Described(f"strides {tensor.stride()} of {tuple(tensor.shape)}")
        require(tuple(tensor.shape) == shape, OWNER, name, f"of shape {shape}", tuple(tensor.shape))
        if name in ("basis", "eigenvalues"):
            require(tensor.is_contiguous(), OWNER, name, "contiguous", strides)
        require(not _may_overlap(tensor), OWNER, name, "without overlap", strides)
        _require_memory(name, tensor, batch, _reach(tensor))


def gradient_address(place: Place, grad: Tensor, batch: Batch) -> int:
    """Where the place's part of a gradient begins.

    Raises:
        ValueError: The gradient is not in plain memory of the batch's device, of its dtype and large enough.
    """
    _require_memory("grad", grad, batch, place.offset + _reach(place.x))
    return grad.data_ptr() + place.offset * grad.itemsize


def _require_memory(name: str, tensor: Tensor, batch: Batch, reach: int) -> None:
    """The numbers that torch sees are those at `data_ptr`, and so many elements from there on are the tensor's own."""
    plain = type(tensor) in (Tensor, Parameter) or type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__
    plain = plain and tensor.layout is torch.strided and not tensor.is_neg() and tensor.device == batch.device
    what = Described(f"{type(tensor).__name__} ({tensor.layout}, {tensor.device})")
    require(plain, OWNER, name, f"a plain strided tensor on {batch.device}", what)
    require(tensor.dtype == batch.dtype, OWNER, name, f"of dtype {batch.dtype}", tensor.dtype)
    held = tensor.untyped_storage().nbytes() // tensor.itemsize - tensor.storage_offset()
    require(reach <= held, OWNER, name, f"in a storage of at least {reach} elements from its first on", held)


def _reach(tensor: Tensor) -> int:
    """Elements from a tensor's first to the one past its last."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _may_overlap(tensor: Tensor) -> bool:
    """Whether two elements might share memory: unless each stride steps over all that the smaller ones reach."""
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += (size - 1) * stride
    return False
