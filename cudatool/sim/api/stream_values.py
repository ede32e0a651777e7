"""Driver entry points: streams that write a value to memory, or wait for one ("Stream Memory Operations")."""

from __future__ import annotations

from collections.abc import Iterable

from cudatool.sim import abi
from cudatool.sim import machine as state
from cudatool.sim.abi import entry
from cudatool.sim.machine import stream_of
from cudatool.sim.queue import Operation, StreamState
from cudatool.sim.values import BatchMemOp, batch, batch_op, batch_ops_at


@entry("cuStreamWriteValue32(CUstream hStream, CUdeviceptr addr, cuuint32_t value, unsigned int flags)")
def cuStreamWriteValue32(hStream: int, addr: int, value: int, flags: int) -> None:
    _enqueue(stream_of(hStream), [batch_op(addr, value, flags, 4, waits=False)])


@entry("cuStreamWriteValue64(CUstream hStream, CUdeviceptr addr, cuuint64_t value, unsigned int flags)")
def cuStreamWriteValue64(hStream: int, addr: int, value: int, flags: int) -> None:
    _enqueue(stream_of(hStream), [batch_op(addr, value, flags, 8, waits=False)])


@entry("cuStreamWaitValue32(CUstream hStream, CUdeviceptr addr, cuuint32_t value, unsigned int flags)")
def cuStreamWaitValue32(hStream: int, addr: int, value: int, flags: int) -> None:
    _enqueue(stream_of(hStream), [batch_op(addr, value, flags, 4, waits=True)])


@entry("cuStreamWaitValue64(CUstream hStream, CUdeviceptr addr, cuuint64_t value, unsigned int flags)")
def cuStreamWaitValue64(hStream: int, addr: int, value: int, flags: int) -> None:
    _enqueue(stream_of(hStream), [batch_op(addr, value, flags, 8, waits=True)])


@entry(
    "cuStreamBatchMemOp(CUstream hStream, unsigned int count, CUstreamBatchMemOpParams *paramArray, unsigned int flags)"
)
def cuStreamBatchMemOp(hStream: int, count: int, paramArray: int, flags: int) -> None:
    _enqueue(stream_of(hStream), batch_ops_at(paramArray, count), flags)


def _enqueue(stream: StreamState, operations: Iterable[BatchMemOp], flags: int = 0) -> None:
    for value in batch(operations, flags):  # all of them, or none
        operation = Operation(stream, value.kind, value.name, abi.call.correlation)
        value.assign(operation)
        state.machine.scheduler.enqueue(operation, cost=0)
        value.added(operation)
