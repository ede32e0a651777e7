"""Allocators that a program brings: two functions, in C or in Python.

The C signatures are those of ``torch.cuda.CUDAPluggableAllocator``::

    void *alloc(ssize_t size, int device, cudaStream_t stream);   /* NULL: out of memory */
    void free(void *ptr, ssize_t size, int device, cudaStream_t stream);

Python callables take the same arguments as integers, and return the address.
"""

from __future__ import annotations

import ctypes
import operator
import os
from _ctypes import CFuncPtr  # what every function of ctypes is an instance of
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, Final

from cudatool.errors import CudatoolError, OutOfMemoryError, UsageError
from cudatool.memory import observers
from cudatool.memory.provider import SegmentProvider
from cudatool.trace import hooks
from cudatool.trace.events import FREE_UNKNOWN, Kind
from cudatool.units import format_bytes

__all__ = ["CUDAPluggableAllocator", "Function", "Guard", "PluggableProvider", "UncachedAllocator"]

Function = int | Callable[..., Any]
"""The address of a C function, a function of :mod:`ctypes`, or a Python callable."""

Guard = Callable[[int], AbstractContextManager[Any]]
"""Makes the device with an ordinal current, so that the functions can call the driver."""

_ALLOC: Final = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)
_FREE: Final = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)


class CUDAPluggableAllocator:
    """A program's own allocator, from two C functions of a shared library.

    Its memory serves a :class:`cudatool.MemPool`, or everything after :func:`cudatool.change_current_allocator`.
    The driver calls that the functions make belong to this package's operation in a trace, as its own would.

    Parameters
    ----------
    path_to_so_file
        The library.
    alloc_fn_name, free_fn_name
        Names of its functions.

    Raises
    ------
    UsageError
        There is no such library or function.
    """

    def __init__(self, path_to_so_file: str | os.PathLike[str], alloc_fn_name: str, free_fn_name: str) -> None:
        path = os.fspath(path_to_so_file)
        try:
            library = ctypes.CDLL(path)
        except OSError as error:
            raise UsageError(f"cannot load the allocator's library {path}: {error}") from error
        for name in (alloc_fn_name, free_fn_name):
            if not hasattr(library, name):
                raise UsageError(f'{path} has no function {name}; a C++ function must be declared extern "C"')
        self._set(getattr(library, alloc_fn_name), getattr(library, free_fn_name))

    @classmethod
    def from_functions(cls, alloc_fn: Function, free_fn: Function) -> CUDAPluggableAllocator:
        """Return the allocator that two functions make.

        Raises
        ------
        UsageError
            One of them is no function, or a null pointer.
        """
        self = cls.__new__(cls)
        self._set(alloc_fn, free_fn)
        return self

    def _set(self, alloc_fn: Function, free_fn: Function) -> None:
        self.name: str = getattr(alloc_fn, "__name__", "alloc")
        self.free_name: str = getattr(free_fn, "__name__", "free")
        self._functions = (alloc_fn, free_fn)  # a C function made from a Python one lives as long as its object
        self._alloc = _callable(_ALLOC, alloc_fn)
        self._free = _callable(_FREE, free_fn)
        self._live: dict[int, tuple[int, int, int]] = {}  # address -> size, device, stream

    def allocator(self) -> CUDAPluggableAllocator:
        """Return the allocator itself: torch.cuda wants ``MemPool(own.allocator())``."""
        return self

    def allocate(self, size: int, device: int, stream: int) -> int:
        """Return the address of `size` new bytes.

        Raises
        ------
        OutOfMemoryError
            The function returned null (None or 0), or raised MemoryError or an OutOfMemoryError.
        UsageError
            It raised anything else, returned no address, or one that it gave out before and that was not freed.
        """
        call = f"{self.name}({size}, {device}, {stream:#x})"
        hooks.begin()
        try:
            found = self._alloc(size, device, stream)
        except MemoryError as error:
            raise OutOfMemoryError(f"{call} raised MemoryError: {error}") from error
        except CudatoolError:
            raise
        except Exception as error:  # it may raise anything: it is the program's
            raise UsageError(f"{call} raised {type(error).__name__}: {error}") from error
        finally:
            hooks.end()
        try:
            address = 0 if found is None else operator.index(found)
        except TypeError:
            raise UsageError(f"{call} returned {found!r}, which is not an address") from None
        if not address:
            raise OutOfMemoryError(f"{call} returned no memory for {format_bytes(size)}")
        if address in self._live:
            raise UsageError(f"{call} returned {address:#x}, which is in use already")
        self._live[address] = size, device, stream
        return address

    def free(self, address: int) -> None:
        """Give back what :meth:`allocate` returned.

        Raises
        ------
        UsageError
            It did not return `address`, or that was freed before; or the function raised anything.
        """
        found = self._live.pop(address, None)
        if found is None:
            raise self._unknown(address)
        hooks.begin()
        try:
            self._free(address, *found)
        except CudatoolError:
            raise
        except Exception as error:
            raise UsageError(f"{self.free_name}({address:#x}, ...) raised {type(error).__name__}: {error}") from error
        finally:
            hooks.end()

    def size_of(self, address: int) -> int:
        """Return the size of what :meth:`allocate` returned.

        Raises
        ------
        UsageError
            It did not return `address`, or that was freed.
        """
        if address not in self._live:
            raise self._unknown(address)
        return self._live[address][0]

    def _unknown(self, address: int) -> UsageError:
        return UsageError(f"{address:#x} was not allocated by {self.name}, or was freed before")


def _callable(prototype: Any, function: Function) -> Callable[..., Any]:
    """Return `function` as a callable that takes and returns integers."""
    if isinstance(function, int):
        address: int | None = function
    elif isinstance(function, CFuncPtr):
        address = ctypes.cast(function, ctypes.c_void_p).value  # it may not know its own signature
    elif callable(function):
        return function
    else:
        raise UsageError(f"{function!r} is neither a function nor the address of one")
    if not address:
        raise UsageError("the allocator's function is a null pointer")
    found: Callable[..., Any] = prototype(address)
    return found


class PluggableProvider:
    """Segments from a program's own allocator; for all else, the provider that the device has anyway."""

    def __init__(self, allocator: CUDAPluggableAllocator, device: int, base: SegmentProvider, *, guard: Guard) -> None:
        self._allocator = allocator
        self._device = device
        self._base = base
        self._guard = guard

    def allocate(self, size: int, stream: int) -> int:
        """Return the address of `size` new bytes."""
        with self._guard(self._device):
            return self._allocator.allocate(size, self._device, stream)

    def free(self, address: int) -> None:
        """Give back a segment."""
        with self._guard(self._device):
            self._allocator.free(address)

    def reserve(self, size: int, stream: int) -> int:
        return self._base.reserve(size, stream)

    def unreserve(self, address: int, size: int) -> None:
        self._base.unreserve(address, size)

    def map(self, address: int, size: int, page_size: int) -> None:
        self._base.map(address, size, page_size)

    def unmap(self, address: int, size: int, page_size: int) -> None:
        self._base.unmap(address, size, page_size)

    def record_event(self, stream: int) -> Any:
        return self._base.record_event(stream)

    def event_passed(self, token: Any) -> bool:
        return self._base.event_passed(token)

    def synchronize_event(self, token: Any) -> None:
        self._base.synchronize_event(token)

    def captured_tail(self, stream: int) -> tuple[int, frozenset[int]] | None:
        return self._base.captured_tail(stream)

    def nodes_before(self, node: int) -> Iterable[int]:
        return self._base.nodes_before(node)

    def memory_info(self) -> tuple[int, int]:
        return self._base.memory_info()


class UncachedAllocator:
    """A program's own allocator in the place of the caching one: every request is a call of its functions.

    Allocations are ``MEM_ALLOC`` and ``MEM_FREE`` events, named after the functions.
    """

    def __init__(self, allocator: CUDAPluggableAllocator, device: int, *, guard: Guard) -> None:
        self._allocator = allocator
        self._device = device
        self._guard = guard

    def malloc(self, size: int, stream: int) -> int:
        """Return the address of `size` bytes for use on `stream`. 0 bytes have the address 0.

        Raises
        ------
        OutOfMemoryError, UsageError
            See :meth:`CUDAPluggableAllocator.allocate`; or `size` is negative.
        """
        if size <= 0:
            if size < 0:
                raise UsageError(f"cannot allocate {size} bytes")
            return 0
        try:
            with self._guard(self._device):
                address = self._allocator.allocate(size, self._device, stream)
        except OutOfMemoryError as error:
            if hooks.active:
                hooks.emit(Kind.OOM, device=self._device, size=size, flags=FREE_UNKNOWN)
            observers.notify(self._device, error.wanted or size, error.allowed, error.free)
            raise
        if hooks.active:
            hooks.emit(Kind.MEM_ALLOC, device=self._device, address=address, size=size, name=self._allocator.name)
        return address

    def free(self, address: int) -> None:
        """Give a block back. Freeing address 0 does nothing."""
        if not address:
            return
        size = self._allocator.size_of(address)
        if hooks.active:  # first, because another thread may get the address at once
            hooks.emit(Kind.MEM_FREE, device=self._device, address=address, size=size, name=self._allocator.free_name)
        with self._guard(self._device):
            self._allocator.free(address)

    def record_stream(self, address: int, stream: int) -> None:
        """Do nothing: as in PyTorch, the allocator's free function must see to streams itself."""
