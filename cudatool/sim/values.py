"""Work that writes a value to memory, or waits for one there: of streams, and of nodes of graphs."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from ctypes import c_uint32, c_uint64
from typing import Any, Final

from cudatool.loading.late_dataclasses import dataclass
from cudatool.sim import machine as state
from cudatool.sim.allocations import Allocation
from cudatool.sim.queue import Operation
from cudatool.sim.results import DriverError, Result

__all__ = ["BatchMemOp", "Value", "batch", "batch_op", "batch_ops_at"]

_NO_MEMORY_BARRIER: Final = 1  # CU_STREAM_WRITE_VALUE_*; it is a hint
_FLUSH: Final = 1 << 30  # CU_STREAM_WAIT_VALUE_*
_MOST_OPERATIONS: Final = 255  # of one batch
_TYPES: Final[dict[int, Any]] = {4: c_uint32, 8: c_uint64}

# CUstreamBatchMemOpType -> bytes of the value
_WAITS: Final = {1: 4, 4: 8}
_WRITES: Final = {2: 4, 5: 8}
_BARRIER: Final = 6  # there is always one: operations of a batch come one after the other


class BatchMemOp(ctypes.Structure):
    """CUstreamBatchMemOpParams, as waiting and writing lay it out."""

    _fields_ = (
        ("operation", c_uint32),
        ("address", c_uint64),
        ("value", c_uint64),
        ("flags", c_uint32),
        ("rest", c_uint64 * 2),
    )


def batch_op(address: int, value: int, flags: int, size: int, *, waits: bool) -> BatchMemOp:
    """Return the element of a batch that does as a call for one value does."""
    kinds = _WAITS if waits else _WRITES
    return BatchMemOp(next(kind for kind, bytes_ in kinds.items() if bytes_ == size), address, value, flags)


def batch_ops_at(address: int, count: int) -> list[BatchMemOp]:
    """Return the elements of an array, copied; NULL, or too many, is CUDA_ERROR_INVALID_VALUE."""
    if count > _MOST_OPERATIONS or (count and not address):
        raise DriverError(Result.INVALID_VALUE)
    size = ctypes.sizeof(BatchMemOp)
    return [BatchMemOp.from_buffer_copy(ctypes.string_at(address + i * size, size)) for i in range(count)]


@dataclass(frozen=True, eq=False)
class Value:
    """A value to be written, or waited for, of `size` bytes."""

    waits: bool
    address: int
    size: int
    value: int
    flags: int
    allocation: Allocation

    @property
    def kind(self) -> str:
        """Of its operation."""
        return "wait_value" if self.waits else "write_value"

    @property
    def name(self) -> str:
        """Of the call that does this alone."""
        return f"cuStream{'Wait' if self.waits else 'Write'}Value{8 * self.size}"

    def assign(self, operation: Operation) -> None:
        """Let an operation that is not pending yet do this."""
        operation.value = self.address, self.size, self.value, self.flags
        operation.run = self._run
        if self.waits:
            operation.until = self._is_met

    def added(self, operation: Operation) -> None:
        """Note that the operation is pending, so that the host's clock knows what a wait is for, most often."""
        writes = state.machine.scheduler.value_writes
        if not self.waits:
            writes[self.address] = operation
        elif (writer := writes.get(self.address)) is not None and writer.value[2] == self.value:
            operation.end = max(operation.end, writer.end)

    @property
    def _is_alive(self) -> bool:
        return state.machine.allocations.at(self.allocation.address) is self.allocation

    def _is_met(self) -> bool:
        found = _TYPES[self.size].from_address(self.address).value if self._is_alive else 0
        return not self._is_alive or bool(_CONDITIONS[self.flags](found, self.value, (1 << 8 * self.size) - 1))

    def _run(self, operation: Operation) -> None:
        if not self._is_alive:
            raise DriverError(Result.ILLEGAL_ADDRESS, f"{operation.name} accesses memory that was freed before it ran")
        if self.waits:
            return
        _TYPES[self.size].from_address(self.address).value = self.value
        checkers = state.machine.checkers
        if checkers is not None:
            checkers.shadow.written(self.address, self.size)


# Is the wait over? Of what is found, what is waited for, and all bits of a value (CUstreamWaitValue_flags).
_CONDITIONS: Final[tuple[Callable[[int, int, int], object], ...]] = (
    lambda found, value, bits: (found - value) & bits <= bits >> 1,  # GEQ, cyclically
    lambda found, value, bits: found == value,  # EQ
    lambda found, value, bits: found & value,  # AND
    lambda found, value, bits: ~(found | value) & bits,  # NOR
)


def batch(operations: Iterable[BatchMemOp], flags: int) -> list[Value]:
    """Return what a batch does.

    Raises
    ------
    DriverError
        INVALID_VALUE for a place that holds no such value, too many operations, or flags that there are not;
        NOT_SUPPORTED for what this device cannot do. Managed memory is refused, as the driver does.
    """
    operations = list(operations)
    if flags or len(operations) > _MOST_OPERATIONS:
        raise DriverError(Result.INVALID_VALUE)
    if state.machine.tape is not None:
        state.machine.tape.refuse("streams wait for values in memory, or write them")
    found: list[Value] = []
    for one in operations:
        size = _WAITS.get(one.operation) or _WRITES.get(one.operation)
        if size is not None:
            found.append(_checked(one, size, waits=one.operation in _WAITS))
        elif one.operation != _BARRIER:
            raise DriverError(Result.NOT_SUPPORTED, f"stream memory operation {one.operation}")
    return found


def _checked(one: BatchMemOp, size: int, *, waits: bool) -> Value:
    if waits and one.flags & _FLUSH:
        raise DriverError(Result.NOT_SUPPORTED, "no device has CU_DEVICE_ATTRIBUTE_CAN_FLUSH_REMOTE_WRITES")
    if one.flags >= len(_CONDITIONS) if waits else one.flags & ~_NO_MEMORY_BARRIER:
        raise DriverError(Result.INVALID_VALUE)
    found = state.machine.locate(one.address, size, to_write=True)
    if one.address % size or found is None or found.kind == "managed":
        raise DriverError(Result.INVALID_VALUE, f"{one.address:#x} cannot hold a value of {size} bytes")
    return Value(waits, one.address, size, one.value & ((1 << 8 * size) - 1), one.flags, found)
