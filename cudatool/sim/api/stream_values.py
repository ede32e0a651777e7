"""Driver entry points: streams that write a value to memory, or wait for one ("Stream Memory Operations")."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import c_uint32, c_uint64
from typing import Any, Final

from cudatool.sim import abi
from cudatool.sim import machine as state
from cudatool.sim.abi import entry
from cudatool.sim.arena import Allocation
from cudatool.sim.machine import stream_of
from cudatool.sim.queue import Operation, StreamState
from cudatool.sim.results import DriverError, Result

_NO_MEMORY_BARRIER: Final = 1  # CU_STREAM_WRITE_VALUE_*; it is a hint
_FLUSH: Final = 1 << 30  # CU_STREAM_WAIT_VALUE_*
_MOST_OPERATIONS: Final = 255  # of one cuStreamBatchMemOp
_TYPES: Final[dict[int, Any]] = {4: c_uint32, 8: c_uint64}


@entry("cuStreamWriteValue32(CUstream hStream, CUdeviceptr addr, cuuint32_t value, unsigned int flags)")
def cuStreamWriteValue32(hStream: int, addr: int, value: int, flags: int) -> None:
    _enqueue(_write(stream_of(hStream), addr, value, flags, 4))


@entry("cuStreamWriteValue64(CUstream hStream, CUdeviceptr addr, cuuint64_t value, unsigned int flags)")
def cuStreamWriteValue64(hStream: int, addr: int, value: int, flags: int) -> None:
    _enqueue(_write(stream_of(hStream), addr, value, flags, 8))


@entry("cuStreamWaitValue32(CUstream hStream, CUdeviceptr addr, cuuint32_t value, unsigned int flags)")
def cuStreamWaitValue32(hStream: int, addr: int, value: int, flags: int) -> None:
    _enqueue(_wait(stream_of(hStream), addr, value, flags, 4))


@entry("cuStreamWaitValue64(CUstream hStream, CUdeviceptr addr, cuuint64_t value, unsigned int flags)")
def cuStreamWaitValue64(hStream: int, addr: int, value: int, flags: int) -> None:
    _enqueue(_wait(stream_of(hStream), addr, value, flags, 8))


class _BatchMemOp(ctypes.Structure):
    """CUstreamBatchMemOpParams, as waiting and writing lay it out."""

    _fields_ = (
        ("operation", c_uint32),
        ("address", c_uint64),
        ("value", c_uint64),
        ("flags", c_uint32),
        ("rest", c_uint64 * 2),
    )


# CUstreamBatchMemOpType -> bytes of the value
_WAITS: Final = {1: 4, 4: 8}
_WRITES: Final = {2: 4, 5: 8}
_BARRIER: Final = 6  # there is always one: operations of a stream come one after the other


@entry(
    "cuStreamBatchMemOp(CUstream hStream, unsigned int count, CUstreamBatchMemOpParams *paramArray, unsigned int flags)"
)
def cuStreamBatchMemOp(hStream: int, count: int, paramArray: int, flags: int) -> None:
    stream = stream_of(hStream)
    if flags or count > _MOST_OPERATIONS or (count and not paramArray):
        raise DriverError(Result.INVALID_VALUE)
    operations: list[Operation] = []
    for one in (_BatchMemOp * count).from_address(paramArray) if count else ():
        size = _WAITS.get(one.operation) or _WRITES.get(one.operation)
        if size is not None:
            make = _wait if one.operation in _WAITS else _write
            operations.append(make(stream, one.address, one.value & ((1 << 8 * size) - 1), one.flags, size))
        elif one.operation != _BARRIER:
            raise DriverError(Result.NOT_SUPPORTED, f"stream memory operation {one.operation}")
    for operation in operations:  # all of them, or none
        _enqueue(operation)


def _write(stream: StreamState, address: int, value: int, flags: int, size: int) -> Operation:
    if flags & ~_NO_MEMORY_BARRIER:
        raise DriverError(Result.INVALID_VALUE)
    allocation = _memory(address, size)
    operation = Operation(stream, "write_value", f"cuStreamWriteValue{8 * size}", abi.call.correlation)
    operation.value = address, size, value, flags
    checkers = state.machine.checkers

    def run(_: Operation) -> None:
        _check_alive(allocation, operation)
        _TYPES[size].from_address(address).value = value
        if checkers is not None:
            checkers.shadow.written(address, size)

    operation.run = run
    return operation


def _wait(stream: StreamState, address: int, value: int, flags: int, size: int) -> Operation:
    if flags & _FLUSH:
        raise DriverError(Result.NOT_SUPPORTED, "no device has CU_DEVICE_ATTRIBUTE_CAN_FLUSH_REMOTE_WRITES")
    if flags >= len(_CONDITIONS):
        raise DriverError(Result.INVALID_VALUE)
    is_met, bits = _CONDITIONS[flags], (1 << 8 * size) - 1
    allocation = _memory(address, size)
    operation = Operation(stream, "wait_value", f"cuStreamWaitValue{8 * size}", abi.call.correlation)
    operation.value = address, size, value, flags
    operation.run = lambda _: _check_alive(allocation, operation)
    operation.until = lambda: (
        not _is_alive(allocation) or bool(is_met(_TYPES[size].from_address(address).value, value, bits))
    )
    return operation


# Is the wait over? Of what is found, what is waited for, and all bits of a value (CUstreamWaitValue_flags).
_CONDITIONS: Final[tuple[Callable[[int, int, int], object], ...]] = (
    lambda found, value, bits: (found - value) & bits <= bits >> 1,  # GEQ, cyclically
    lambda found, value, bits: found == value,  # EQ
    lambda found, value, bits: found & value,  # AND
    lambda found, value, bits: ~(found | value) & bits,  # NOR
)


def _memory(address: int, size: int) -> Allocation:
    """Return the memory that holds a value: the device's, or pinned; managed memory is refused, as the driver does."""
    found = state.machine.locate(address, size, to_write=True)
    if address % size or found is None or found.kind == "managed":
        raise DriverError(Result.INVALID_VALUE, f"{address:#x} is no place for a value of {size} bytes")
    return found


def _is_alive(allocation: Allocation) -> bool:
    return state.machine.allocations.at(allocation.address) is allocation


def _check_alive(allocation: Allocation, operation: Operation) -> None:
    if not _is_alive(allocation):
        raise DriverError(Result.ILLEGAL_ADDRESS, f"{operation.name} touches memory freed before it ran")


def _enqueue(operation: Operation) -> None:
    machine = state.machine
    if machine.tape is not None:
        machine.tape.refuse("streams wait for values in memory, or write them")
    scheduler = machine.scheduler
    scheduler.enqueue(operation, cost=0)
    address, _, value, _ = operation.value
    if operation.kind == "write_value":
        scheduler.value_writes[address] = operation
    elif (writer := scheduler.value_writes.get(address)) is not None and writer.value[2] == value:
        operation.end = max(operation.end, writer.end)  # most often the one that it waits for
