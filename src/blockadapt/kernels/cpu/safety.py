"""Whether memory is what the compiled step takes it for. It reads and writes addresses, so this is asked before it.

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
from blockadapt.validation import Described, require

OWNER = "NumbaKernel"

_NO_DISPATCH = Tensor.__torch_dispatch__
_dtype, _is_cpu, _is_neg = attrgetter("dtype"), attrgetter("is_cpu"), Tensor.is_neg


def check_place(place: Place, batch: Batch) -> None:
    """Refuse tensors that the compiled step would misread, or whose memory is not their own.

    Raises:
        ValueError: One of them is not as `Place` says, in plain memory of the CPU.
    """
    n, x, major_minor = batch.n, place.x, tuple(place.x.shape[:2])
    require(1 <= n <= MAX_TILED, OWNER, "n", f"in [1, {MAX_TILED}]", n)
    require(place.n == n, OWNER, "n", f"{n} in all places of the batch", place.n)
    fits = x.dim() == 3 and 1 <= x.shape[2] <= n
    require(fits, OWNER, "x", f"of shape [major, minor, k] with 1 <= k <= {n}", tuple(x.shape))
    require(place.offset >= 0, OWNER, "offset", "an integer >= 0", place.offset)
    together = (place.basis is None) == (place.eigenvalues is None)
    require(together, OWNER, "basis", "kept together with `eigenvalues`", Described("one of them alone"))
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
        _require_plain(name, tensor, batch.dtype)
        require(tuple(tensor.shape) == shape, OWNER, name, f"of shape {shape}", tuple(tensor.shape))
        strides = tensor.stride()
        if name in ("second_moment", "largest"):
            side_by_side = strides[2] == 1 or shape[2] == 1
            require(side_by_side, OWNER, name, "contiguous along its last axis", Described(f"strides {strides}"))
        if name in ("basis", "eigenvalues"):
            require(tensor.is_contiguous(), OWNER, name, "contiguous", Described(f"strides {strides}"))
        require(not _may_overlap(tensor), OWNER, name, "without overlap", Described(f"strides {strides} of {shape}"))
        _require_within(name, tensor, span_bytes(tensor))


def gradient_addresses(grads: Sequence[Tensor], dtype: torch.dtype, reaches: np.ndarray) -> np.ndarray:
    """Where each gradient begins. What is read of it ends `reaches` bytes later. Few passes, which run in C.

    Raises:
        ValueError: A gradient is not in plain memory of the CPU, of this dtype and large enough.
    """
    if not _are_plain(grads, dtype) or not (reaches <= _bytes_held(grads)).all():
        for grad, reach in zip(grads, reaches, strict=True):
            _require_plain("grad", grad, dtype)
            _require_within("grad", grad, int(reach))
    return np.fromiter(map(Tensor.data_ptr, grads), np.int64, len(grads))


def _are_plain(tensors: Sequence[Tensor], dtype: torch.dtype) -> bool:
    """`_is_plain` for all of them, of this dtype."""
    kinds: set[type[Tensor]] = {*map(type, tensors)}
    if {*map(_dtype, tensors)} != {dtype} or any(kind.__torch_dispatch__ is not _NO_DISPATCH for kind in kinds):
        return False
    return all(map(_is_cpu, tensors)) and not any(map(_is_neg, tensors))


def _bytes_held(tensors: Sequence[Tensor]) -> np.ndarray:
    """`_storage_bytes` of each."""
    try:
        storages, count = [*map(Tensor.untyped_storage, tensors)], len(tensors)
        held = np.fromiter(map(UntypedStorage.nbytes, storages), np.int64, count)
        held -= tensors[0].itemsize * np.fromiter(map(Tensor.storage_offset, tensors), np.int64, count)
        return np.where(np.fromiter(map(UntypedStorage.data_ptr, storages), np.int64, count) != 0, held, 0)
    except (RuntimeError, NotImplementedError):  # wrapped by a transformation of torch.func
        return np.array([_storage_bytes(tensor) for tensor in tensors])


def span_bytes(tensor: Tensor) -> int:
    """From a tensor's first byte to the one past its last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.itemsize


def _is_plain(tensor: Tensor) -> bool:
    """Whether the numbers that torch sees are those at `data_ptr`: no wrapper, no lazy sign, no other device."""
    return type(tensor).__torch_dispatch__ is _NO_DISPATCH and tensor.is_cpu and not tensor.is_neg()


def _require_plain(name: str, tensor: Tensor, dtype: torch.dtype) -> None:
    plain = _is_plain(tensor) and tensor.layout is torch.strided
    if not plain:
        sign = ", negative bit" if tensor.is_neg() else ""
        what = Described(f"{type(tensor).__name__} ({tensor.layout}, {tensor.device}{sign})")
        require(False, OWNER, name, "a plain strided CPU tensor", what)
    require(tensor.dtype == dtype, OWNER, name, f"of dtype {dtype}", tensor.dtype)


def _storage_bytes(tensor: Tensor) -> int:
    """Bytes from a tensor's first element to the end of its storage; none where it has no memory of its own."""
    try:
        storage = tensor.untyped_storage()
        return int(storage.nbytes() - tensor.storage_offset() * tensor.itemsize) if storage.data_ptr() else 0
    except (RuntimeError, NotImplementedError):  # wrapped by a transformation of torch.func
        return 0


def _is_within(tensor: Tensor, reach: int) -> bool:
    return reach <= _storage_bytes(tensor)


def _require_within(name: str, tensor: Tensor, reach: int) -> None:
    rule = f"in a storage of at least {reach} bytes from its first element on"
    require(_is_within(tensor, reach), OWNER, name, rule, _storage_bytes(tensor))


def _may_overlap(tensor: Tensor) -> bool:
    """Whether two elements might share memory: unless each stride steps over all that the smaller ones reach."""
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += (size - 1) * stride
    return False
