"""Whether memory is what the compiled step takes it for. It reads and writes addresses, so this is asked before it.

The tensors of a place are checked once, when their addresses are taken; the gradient, which may be another each time,
at every step. What does not fit is refused in one sentence.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import Parameter

from blockadapt.kernels.contract import Batch, Place
from blockadapt.kernels.layout import MAX_TILED, tiled_shape
from blockadapt.moments import packed_length
from blockadapt.validation import Described, require

OWNER = "NumbaKernel"

_NO_DISPATCH = Tensor.__torch_dispatch__


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
        "basis": tiled_shape(n, place.num_blocks, n * n),
        "eigenvalues": tiled_shape(n, place.num_blocks, n),
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


def gradient_address(place: Place, grad: Tensor, dtype: torch.dtype, reach: int) -> int:
    """Where the place's part of a gradient begins. Its last byte lies `reach` past the gradient's first.

    Raises:
        ValueError: The gradient is not in plain memory of the CPU, of this dtype and large enough.
    """
    if not (_is_plain(grad) and grad.dtype is dtype and _is_within(grad, reach)):
        _require_plain("grad", grad, dtype)
        _require_within("grad", grad, reach)
    return grad.data_ptr() + place.offset * grad.itemsize


def span_bytes(tensor: Tensor) -> int:
    """From a tensor's first byte to the one past its last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.itemsize


def _is_plain(tensor: Tensor) -> bool:
    """Whether the numbers that torch sees are those at `data_ptr`: no wrapper, no lazy sign, no other device."""
    kind = type(tensor)
    plain = kind is Tensor or kind is Parameter or kind.__torch_dispatch__ is _NO_DISPATCH
    return plain and tensor.is_cpu and not tensor.is_neg()


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
