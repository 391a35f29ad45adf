"""Checks that memory is what a compiled kernel takes it for: it reads and writes addresses, so this is asked before.

The tensors of a place are checked once, when their addresses are taken; the gradient, which may be another each time,
at every step. What does not fit is refused in one sentence.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter, le

from torch import Tensor, UntypedStorage

from blockadapt.kernels.contract import Batch, Place
from blockadapt.kernels.layout import MAX_TILED
from blockadapt.kernels.reflections import eigenvalues_length, reflections_length
from blockadapt.moments import packed_length
from blockadapt.validation import Described, lies_in_memory, refusal, require


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
        _require_plain(owner, name, tensor, batch)
        require(tuple(tensor.shape) == shape, owner, name, f"of shape {shape}", tuple(tensor.shape))
        strides = tensor.stride()
        if name in ("second_moment", "largest"):
            side_by_side = strides[2] == 1 or shape[2] == 1
            require(side_by_side, owner, name, "contiguous along its last axis", Described(f"strides {strides}"))
        if name in ("basis", "eigenvalues"):
            require(tensor.is_contiguous(), owner, name, "contiguous", Described(f"strides {strides}"))
        require(not may_overlap(tensor), owner, name, "without overlap", Described(f"strides {strides} of {shape}"))
        _require_within(owner, name, tensor, span_bytes(tensor))


def reach_bytes(place: Place) -> int:
    """Count the bytes from a gradient's first element to the end of the place's part of it."""
    return place.offset * place.x.itemsize + span_bytes(place.x)


class GradientAddresses:
    """Says where gradients begin, once they are found in order.

    Gradients of a later step are other tensors, mostly of the same forms at the same addresses. Forms that were in
    order are so again, so they are compared in a few passes that run in C, for there may be many.

    Args:
        owner: Who asks, for messages.
        batch: What the blocks have in common.
        reaches: The bytes from the first element of each gradient to the end of what is read.
    """

    def __init__(self, owner: str, batch: Batch, reaches: Sequence[int]) -> None:
        self._owner, self._batch, self._reaches = owner, batch, reaches
        self._forms: object = None
        self._addresses: list[int] = []
        self._skipped: list[int] = []

    def of(self, grads: Sequence[Tensor]) -> list[int]:
        """Return the address of each; the very list of the last time if nothing has moved.

        Raises:
            ValueError: A gradient is not in plain memory of the batch's device, of its dtype and large enough.
        """
        forms = _forms(grads)
        if forms is None or forms != self._forms:  # addresses are asked of what is known to have one
            self._require_plain(grads)
            self._forms, self._skipped = forms, [int(grad.storage_offset()) * grad.itemsize for grad in grads]
        addresses = [*map(Tensor.data_ptr, grads)]
        if addresses == self._addresses:
            return self._addresses
        if any(map(le, addresses, self._skipped)):  # a storage without memory begins at 0; an empty tensor lies there
            self._require_plain(grads)
        self._addresses = addresses
        return addresses

    def _require_plain(self, grads: Sequence[Tensor]) -> None:
        for grad, reach in zip(grads, self._reaches, strict=True):
            _require_plain(self._owner, "grad", grad, self._batch)
            _require_within(self._owner, "grad", grad, reach)


def _forms(tensors: Sequence[Tensor]) -> tuple[list[object], ...] | None:
    """Tell how each tensor's memory is to be read, and how much there is of it; None where torch does not know."""
    try:
        return (
            [*map(type, tensors)],
            [*map(_form, tensors)],
            [*map(Tensor.is_neg, tensors)],
            [*map(Tensor.storage_offset, tensors)],
            [*map(UntypedStorage.nbytes, map(Tensor.untyped_storage, tensors))],
        )
    except (RuntimeError, NotImplementedError):  # wrapped by a transformation of torch.func
        return None


_form = attrgetter("dtype", "layout", "device")


def span_bytes(tensor: Tensor) -> int:
    """Count from a tensor's first byte to the one past its last."""
    if not tensor.numel():
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.itemsize


def _require_plain(owner: str, name: str, tensor: Tensor, batch: Batch) -> None:
    """Refuse a tensor whose numbers are not of the batch's dtype, or not at its address on the batch's device.

    Raises:
        ValueError: It is such a tensor.
    """
    if not lies_in_memory(tensor, batch.device):
        sign = ", negative bit" if tensor.is_neg() else ""
        what = Described(f"{type(tensor).__name__} ({tensor.layout}, {tensor.device}{sign})")
        where = "CPU tensor" if batch.device.type == "cpu" else f"tensor on {batch.device}"
        raise ValueError(refusal(owner, name, f"a plain strided {where}", what))
    require(tensor.dtype == batch.dtype, owner, name, f"of dtype {batch.dtype}", tensor.dtype)


def _require_within(owner: str, name: str, tensor: Tensor, reach: int) -> None:
    """Refuse a tensor whose storage ends less than `reach` bytes after its first element begins.

    Raises:
        ValueError: It is such a tensor.
    """
    rule = f"in a storage of at least {reach} bytes from its first element on"
    held = _storage_bytes(tensor)
    require(reach <= held, owner, name, rule, held)


def _storage_bytes(tensor: Tensor) -> int:
    """Count bytes from a tensor's first element to the end of its storage; none where it has no memory of its own.

    A tensor without elements has none: its address is 0, whatever its storage holds.
    """
    if not tensor.numel():
        return 0
    try:
        storage = tensor.untyped_storage()
        return int(storage.nbytes() - tensor.storage_offset() * tensor.itemsize) if storage.data_ptr() else 0
    except (RuntimeError, NotImplementedError):  # wrapped by a transformation of torch.func
        return 0


def may_overlap(tensor: Tensor) -> bool:
    """Say whether two elements might share memory: unless each stride steps over all that the smaller ones reach."""
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += (size - 1) * stride
    return False
