"""Checks that memory is what a compiled kernel takes it for: it reads and writes addresses, so this is asked before.

The tensors of a place are checked once, when their addresses are taken; the gradient, which may be another each time,
at every step. What does not fit is refused in one sentence.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

import numpy as np
import torch
from torch import Tensor, UntypedStorage

from blockadapt.kernels.contract import Batch, Place
from blockadapt.kernels.layout import MAX_TILED
from blockadapt.kernels.reflections import eigenvalues_length, reflections_length
from blockadapt.moments import packed_length
from blockadapt.validation import Described, lies_in_memory, require

_device, _dtype, _layout = attrgetter("device"), attrgetter("dtype"), attrgetter("layout")


def check_place(owner: str, place: Place, batch: Batch) -> None:
    """Refuse tensors that a compiled step would misread, or whose memory is not their own.

    Raises:
        ValueError: One of them is not as `Place` says, in plain memory of the batch's device.
    """
    n, x, major_minor = batch.n, place.x, tuple(place.x.shape[:2])
    require(1 <= n <= MAX_TILED, owner, "n", f"in [1, {MAX_TILED}]", n)
    require(place.n == n, owner, "n", f"{n} in all places of the batch", place.n)
    fits = x.dim() == 3 and 1 <= x.shape[2] <= n
    require(fits, owner, "x", f"of shape [major, minor, k] with 1 <= k <= {n}", tuple(x.shape))
    require(place.offset >= 0, owner, "offset", "an integer >= 0", place.offset)
    together = (place.basis is None) == (place.eigenvalues is None)
    require(together, owner, "basis", "kept together with `eigenvalues`", Described("one of them alone"))
    shapes = {
        "x": tuple(x.shape),
        "m": tuple(x.shape),
        "second_moment": (*major_minor, packed_length(n)),
        "largest": (*major_minor, n),
        "basis": (place.num_blocks * reflections_length(n),),
        "eigenvalues": (place.num_blocks * eigenvalues_length(n),),
    }
    for name, shape in shapes.items():
        tensor: Tensor | None = getattr(place, name)
        if tensor is None:
            continue
        require_plain(owner, name, tensor, batch)
        require(tuple(tensor.shape) == shape, owner, name, f"of shape {shape}", tuple(tensor.shape))
        strides = tensor.stride()
        if name in ("second_moment", "largest"):
            side_by_side = strides[2] == 1 or shape[2] == 1
            require(side_by_side, owner, name, "contiguous along its last axis", Described(f"strides {strides}"))
        if name in ("basis", "eigenvalues"):
            require(tensor.is_contiguous(), owner, name, "contiguous", Described(f"strides {strides}"))
        require(not _may_overlap(tensor), owner, name, "without overlap", Described(f"strides {strides} of {shape}"))
        require_within(owner, name, tensor, span_bytes(tensor))


def reach_bytes(place: Place) -> int:
    """Count the bytes from a gradient's first element to the end of the place's part of it."""
    return place.offset * place.x.itemsize + span_bytes(place.x)


def gradient_addresses(owner: str, grads: Sequence[Tensor], batch: Batch, reaches: np.ndarray) -> np.ndarray:
    """Say where each gradient begins. What is read of it ends `reaches` bytes later. Its few passes run in C.

    Raises:
        ValueError: A gradient is not in plain memory of the batch's device, of its dtype and large enough.
    """
    if not (_lie_in_memory(grads, batch) and (reaches <= _bytes_held(grads)).all()):
        for grad, reach in zip(grads, reaches, strict=True):
            require_plain(owner, "grad", grad, batch)
            require_within(owner, "grad", grad, int(reach))
    return np.fromiter(map(Tensor.data_ptr, grads), np.int64, len(grads))


def _lie_in_memory(tensors: Sequence[Tensor], batch: Batch) -> bool:
    """Say whether `lies_in_memory` holds for all of them, in the batch's dtype."""
    if {*map(_dtype, tensors)} != {batch.dtype} or {*map(_layout, tensors)} != {torch.strided}:
        return False
    kinds: set[type[Tensor]] = {*map(type, tensors)}
    if any(kind.__torch_dispatch__ is not Tensor.__torch_dispatch__ for kind in kinds):
        return False
    return {*map(_device, tensors)} == {batch.device} and not any(map(Tensor.is_neg, tensors))


def _bytes_held(tensors: Sequence[Tensor]) -> np.ndarray:
    """Count the `_storage_bytes` of each."""
    try:
        count = len(tensors)
        held = np.fromiter(map(UntypedStorage.nbytes, map(Tensor.untyped_storage, tensors)), np.int64, count)
        skipped = tensors[0].itemsize * np.fromiter(map(Tensor.storage_offset, tensors), np.int64, count)
        begins = np.fromiter(map(Tensor.data_ptr, tensors), np.int64, count)
        return np.where(begins != skipped, held - skipped, 0)  # a storage without memory begins at 0
    except (RuntimeError, NotImplementedError):  # wrapped by a transformation of torch.func
        return np.array([_storage_bytes(tensor) for tensor in tensors])


def span_bytes(tensor: Tensor) -> int:
    """Count from a tensor's first byte to the one past its last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.itemsize


def require_plain(owner: str, name: str, tensor: Tensor, batch: Batch) -> None:
    """Refuse a tensor whose numbers are not of the batch's dtype, or not at its address on the batch's device.

    Raises:
        ValueError: It is such a tensor.
    """
    if not lies_in_memory(tensor, batch.device):
        sign = ", negative bit" if tensor.is_neg() else ""
        what = Described(f"{type(tensor).__name__} ({tensor.layout}, {tensor.device}{sign})")
        where = "CPU tensor" if batch.device.type == "cpu" else f"tensor on {batch.device}"
        require(False, owner, name, f"a plain strided {where}", what)
    require(tensor.dtype == batch.dtype, owner, name, f"of dtype {batch.dtype}", tensor.dtype)


def require_within(owner: str, name: str, tensor: Tensor, reach: int) -> None:
    """Refuse a tensor whose storage ends before so many bytes from its first element.

    Raises:
        ValueError: It is such a tensor.
    """
    rule = f"in a storage of at least {reach} bytes from its first element on"
    held = _storage_bytes(tensor)
    require(reach <= held, owner, name, rule, held)


def _storage_bytes(tensor: Tensor) -> int:
    """Count bytes from a tensor's first element to the end of its storage; none where it has no memory of its own."""
    try:
        storage = tensor.untyped_storage()
        return int(storage.nbytes() - tensor.storage_offset() * tensor.itemsize) if storage.data_ptr() else 0
    except (RuntimeError, NotImplementedError):  # wrapped by a transformation of torch.func
        return 0


def _may_overlap(tensor: Tensor) -> bool:
    """Say whether two elements might share memory: unless each stride steps over all that the smaller ones reach."""
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += (size - 1) * stride
    return False
