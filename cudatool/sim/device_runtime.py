"""What kernels' ``printf`` and ``malloc`` need of the host: the buffer that is flushed, and a heap in device memory."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Final

from cudatool.sim import machine as state
from cudatool.sim.host_library import library
from cudatool.sim.jit.context import MAX_STACK
from cudatool.sim.results import DriverError, Result

if TYPE_CHECKING:
    from cudatool.sim.machine import Context

__all__ = [
    "DEFAULT_LIMITS",
    "HEAP_SIZE",
    "Heap",
    "PRINTF_FIFO_SIZE",
    "STACK_SIZE",
    "check_limit",
    "flush_printf",
    "limit_of",
    "prepare_calls",
    "set_limit",
]

STACK_SIZE: Final = 0  # CUlimit
PRINTF_FIFO_SIZE: Final = 1
HEAP_SIZE: Final = 2

DEFAULT_LIMITS: Final[dict[int, int]] = {0: 1024, 1: 1 << 20, 2: 8 << 20, 3: 2, 4: 2048, 5: 64, 6: 0}
"""CUlimit -> default."""
_MAX_LIMIT: Final = 11  # CU_LIMIT_MAX


class Heap:
    """Where ``malloc`` in kernels takes memory from.

    Attributes
    ----------
    address, size
        The memory.
    handle
        What native code knows it by; 0 once it is closed.
    kernels
        Names of those that were launched and may call ``malloc``.
    """

    def __init__(self, address: int, size: int) -> None:
        self.address, self.size = address, size
        self.handle: int = library().cudatool_heap_create(address, size) or 0
        if not self.handle:
            raise DriverError(Result.OUT_OF_MEMORY)
        self.kernels: set[str] = set()
        self._before = self._left = 0  # blocks, when a recording began, and when the heap was closed

    def begin(self) -> None:
        """Count what kernels take from now on."""
        self._before += self.taken()

    def taken(self) -> int:
        """Return the number of blocks that kernels have taken since :meth:`begin`, and not given back."""
        return (int(library().cudatool_heap_blocks(self.handle)) if self.handle else self._left) - self._before

    def blocks(self) -> list[tuple[int, int]]:
        """Return the address and size of each block that kernels have; sizes are multiples of 16."""
        room = library().cudatool_heap_blocks(self.handle)
        found = (ctypes.c_uint64 * (2 * room))()
        count = library().cudatool_heap_list(self.handle, found, room)
        return [(found[2 * i], found[2 * i + 1]) for i in range(count)]

    def close(self) -> None:
        """Forget its blocks, but for their number."""
        self._left = self.taken() + self._before
        library().cudatool_heap_destroy(self.handle)
        self.handle = 0


_printf_bytes = 0  # the size of the buffer, 0 before a kernel needed one


def flush_printf() -> None:
    """Write what kernels have printed to the C library's stdout, as every synchronization does."""
    if _printf_bytes:
        library().cudatool_printf_flush()


def limit_of(context: Context, limit: int) -> int:
    """Return a CUlimit of a context."""
    return context.limits.get(limit, DEFAULT_LIMITS[limit])


def prepare_calls(context: Context, kernel: str, calls: frozenset[str]) -> None:
    """Provide what a kernel needs that makes these system calls.

    Fails with CUDA_ERROR_OUT_OF_MEMORY if the device has no room for the heap (CU_LIMIT_MALLOC_HEAP_SIZE).
    """
    global _printf_bytes
    size = limit_of(context, PRINTF_FIFO_SIZE)
    if "vprintf" in calls and _printf_bytes != size:
        flush_printf()
        if not library().cudatool_printf_resize(max(size, 1)):
            raise DriverError(Result.OUT_OF_MEMORY)
        _printf_bytes = size
    if "malloc" in calls and context.heap is None:
        bytes_ = limit_of(context, HEAP_SIZE)
        block = state.machine.allocate(context.device, bytes_, "module", context=context)
        context.heap = Heap(block.address, bytes_)
        state.machine.heaps.append((context, context.heap))
        if state.machine.checkers is not None:
            state.machine.checkers.shadow.heap(block.address, bytes_)
    if "malloc" in calls:
        assert context.heap is not None
        context.heap.kernels.add(kernel)
    context.called |= calls


def check_limit(limit: int) -> None:
    """Fail with CUDA_ERROR_INVALID_VALUE for what is no CUlimit, with _UNSUPPORTED_LIMIT for one not on this device."""
    if limit not in DEFAULT_LIMITS:
        raise DriverError(Result.UNSUPPORTED_LIMIT if 0 <= limit < _MAX_LIMIT else Result.INVALID_VALUE)


def set_limit(context: Context, limit: int, value: int) -> None:
    """Carry out cuCtxSetLimit: "the driver is free to modify the requested value" (CUDA driver API reference).

    The largest stack is that of the device: cuCtxGetLimit says what a kernel really has.

    Raises
    ------
    DriverError
        Those of :func:`check_limit`; INVALID_VALUE if a kernel that uses printf or malloc was launched already.
    """
    check_limit(limit)
    late = {PRINTF_FIFO_SIZE: {"vprintf"}, HEAP_SIZE: {"malloc", "free"}}.get(limit, set()) & context.called
    if late:
        raise DriverError(Result.INVALID_VALUE, f"a kernel that calls {min(late)} has been launched already")
    context.limits[limit] = min(value, MAX_STACK) if limit == STACK_SIZE else value
