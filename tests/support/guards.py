"""Memory in which a touch out of bounds shows: guard pages, which kill the process, or canaries, which are looked at.

    pages      [ no access | tensor ....... | no access ]    a read or a write beyond the tensor is SIGSEGV
    canaries   [ 0xFF ×128 | tensor ....... | 0xFF ×128 ]    a write beyond it is found by `check`, a read gives NaN

Tensors lie flush against the end page and against the front page in turn. Memory whose tensor has died becomes pages
without access too, until the guard is closed: so a stale address is found like one out of bounds.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
import weakref
from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

HAS_PAGES = sys.platform != "win32"
_PAGE = mmap.PAGESIZE
_NO_ACCESS, _READ_WRITE = 0, 3
_MARGIN = 128
"""Bytes of canary on each side: two registers of 512 bits."""


class Guard(Protocol):
    """Where tensors are safe to be watched."""

    def holds(self, tensor: Tensor) -> bool:
        """Whether the tensor lies in memory of this guard."""
        ...

    def moved(self, tensor: Tensor) -> Tensor:
        """A copy in guarded memory, with the same strides."""
        ...

    def check(self) -> None:
        """Raise AssertionError if anything wrote beyond a tensor."""
        ...


class Pages:
    """Tensors between pages that nobody may touch. For a process of its own: a touch ends it."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.mmap.restype = ctypes.c_void_p
        self._libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
        self._libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        self._libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        self._alive: set[int] = set()
        self._dead: list[tuple[int, int]] = []
        self._at_end = self._closed = False

    def holds(self, tensor: Tensor) -> bool:
        """See `Guard.holds`. An empty tensor has no memory to guard."""
        return tensor.numel() == 0 or tensor.untyped_storage().data_ptr() in self._alive

    def moved(self, tensor: Tensor) -> Tensor:
        """See `Guard.moved`."""
        if tensor.numel() == 0:
            return tensor
        size = _extent(tensor) * tensor.element_size()
        inner = -(-size // _PAGE) * _PAGE
        address = self._libc.mmap(None, inner + 2 * _PAGE, _NO_ACCESS, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
        assert address not in (None, ctypes.c_void_p(-1).value), "out of memory"
        assert self._libc.mprotect(address + _PAGE, inner, _READ_WRITE) == 0, "out of mappings"
        self._at_end = not self._at_end
        start = address + _PAGE + (inner - size if self._at_end else 0)
        memory = (ctypes.c_ubyte * size).from_address(start)
        self._alive.add(start)
        weakref.finalize(memory, self._retire, start, address, inner + 2 * _PAGE)
        return _in_buffer(memory, tensor, 0)

    def _retire(self, start: int, address: int, size: int) -> None:
        self._alive.discard(start)
        self._libc.mprotect(address, size, _NO_ACCESS)
        self._dead.append((address, size))
        if self._closed:
            self.close()

    def check(self) -> None:
        """Whoever is alive has touched nothing."""

    def close(self) -> None:
        """Give back the memory of dead tensors, and from now on that of each one as it dies."""
        self._closed = True
        while self._dead:
            self._libc.munmap(*self._dead.pop())


class Canaries:
    """Tensors between bytes of 0xFF, which are NaN in every floating-point format."""

    def __init__(self) -> None:
        self._buffers: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()

    def holds(self, tensor: Tensor) -> bool:
        """See `Guard.holds`."""
        return tensor.untyped_storage().data_ptr() - _MARGIN in self._buffers

    def moved(self, tensor: Tensor) -> Tensor:
        """See `Guard.moved`."""
        if tensor.numel() == 0:
            return tensor
        size = _extent(tensor) * tensor.element_size()
        buffer = (ctypes.c_ubyte * (size + 2 * _MARGIN))()
        ctypes.memset(buffer, 0xFF, size + 2 * _MARGIN)
        self._buffers[ctypes.addressof(buffer)] = buffer
        return _in_buffer(buffer, tensor, _MARGIN)

    def check(self) -> None:
        """See `Guard.check`."""
        for buffer in list(self._buffers.values()):
            content = bytes(buffer)
            for side, margin in (("before", content[:_MARGIN]), ("after", content[-_MARGIN:])):
                assert margin == b"\xff" * _MARGIN, f"a write {side} a tensor of {len(content) - 2 * _MARGIN} bytes"

    def close(self) -> None:
        """The last look."""
        self.check()


def guard_(guard: Guard, params: Iterable[Tensor], optimizer: Optimizer | None = None) -> None:
    """Move parameters, their gradients and the optimizer's state into guarded memory, unless they lie there."""
    for param in params:
        if not guard.holds(param):
            grad, param.grad = param.grad, None
            param.data = guard.moved(param.data)
            param.grad = grad
        if param.grad is not None and not guard.holds(param.grad):
            param.grad = guard.moved(param.grad)
    for state in optimizer.state.values() if optimizer is not None else ():
        for name, value in state.items():
            if isinstance(value, Tensor) and not guard.holds(value):
                state[name] = guard.moved(value)


def _extent(tensor: Tensor) -> int:
    """Elements from the first to the last."""
    return 1 + sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _in_buffer(buffer: Any, tensor: Tensor, offset: int) -> Tensor:
    flat = torch.frombuffer(buffer, dtype=tensor.dtype, count=_extent(tensor), offset=offset)
    placed = flat.as_strided(tensor.shape, tensor.stride())
    source = tensor.detach().resolve_neg()
    # Elements that share memory (an expanded gradient) may not be written one by one.
    flat.copy_(source.as_strided(flat.shape, (1,), source.storage_offset()))
    return placed
