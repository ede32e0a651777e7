"""Driver entry points: memory management, stream-ordered allocation, copies, memset.

Grouped as in the CUDA driver API reference. What "synchronous" means is in its section "API synchronization
behavior"; each rule stands beside the code that follows it.
"""

from __future__ import annotations

import ctypes
from ctypes import c_size_t, c_uint, c_uint64

from cudatool.sim import abi, profile
from cudatool.sim import machine as state
from cudatool.sim.abi import entry, write
from cudatool.sim.machine import current_context, stream_of
from cudatool.sim.memory import Allocation
from cudatool.sim.pool import DEVICE, Pool
from cudatool.sim.queue import Operation, StreamState
from cudatool.sim.results import DriverError, Result

# ---- Memory management ----


@entry("cuMemGetInfo(size_t *free, size_t *total)")
def cuMemGetInfo(free: int, total: int) -> None:
    memory = current_context().device.memory
    write(free, c_size_t, memory.size - memory.used)
    write(total, c_size_t, memory.size)


@entry("cuMemAlloc(CUdeviceptr *dptr, size_t bytesize)")
def cuMemAlloc(dptr: int, bytesize: int) -> None:
    context = current_context()
    if not bytesize or not dptr:
        raise DriverError(Result.INVALID_VALUE)
    allocation = state.machine.allocate(context.device, bytesize, "device", context=context)
    write(dptr, c_uint64, allocation.address)


@entry(
    "cuMemAllocPitch(CUdeviceptr *dptr, size_t *pPitch, size_t WidthInBytes, size_t Height, "
    "unsigned int ElementSizeBytes)"
)
def cuMemAllocPitch(dptr: int, pPitch: int, WidthInBytes: int, Height: int, ElementSizeBytes: int) -> None:
    if ElementSizeBytes not in (4, 8, 16) or not WidthInBytes or not Height:
        raise DriverError(Result.INVALID_VALUE)
    pitch = -(-WidthInBytes // 512) * 512
    write(pPitch, c_size_t, pitch)
    cuMemAlloc(dptr, pitch * Height)


@entry("cuMemFree(CUdeviceptr dptr)")
def cuMemFree(dptr: int) -> None:
    context = current_context()
    if not dptr:
        return  # freeing NULL is allowed (cuMemFree)
    allocation = state.machine.allocations.at(dptr)
    if allocation is None or allocation.kind not in ("device", "graph", "managed", "pool"):
        raise DriverError(Result.INVALID_VALUE, f"{dptr:#x} is not the start of a live device allocation")
    if allocation.kind == "graph":
        state.machine.graph_memory.will_free(dptr)
    # "Note that this function may implicitly synchronize"; memory in use is waited for.
    state.machine.scheduler.wait_device(state.machine.devices[allocation.device])
    state.machine.release(allocation)
    state.machine.scheduler.check(context)


@entry("cuMemGetAddressRange(CUdeviceptr *pbase, size_t *psize, CUdeviceptr dptr)")
def cuMemGetAddressRange(pbase: int, psize: int, dptr: int) -> None:
    current_context()
    allocation = state.machine.virtual.mapping_at(dptr) or state.machine.allocations.holding(dptr)
    if allocation is None or allocation.kind in ("host", "registered"):
        raise DriverError(Result.NOT_FOUND)
    if pbase:
        write(pbase, c_uint64, allocation.address)
    if psize:
        write(psize, c_size_t, allocation.size)


@entry("cuMemAllocHost(void **pp, size_t bytesize)")
def cuMemAllocHost(pp: int, bytesize: int) -> None:
    cuMemHostAlloc(pp, bytesize, 0)


@entry("cuMemHostAlloc(void **pp, size_t bytesize, unsigned int Flags)")
def cuMemHostAlloc(pp: int, bytesize: int, Flags: int) -> None:
    context = current_context()
    if not pp or not bytesize or Flags > 7:
        raise DriverError(Result.INVALID_VALUE)
    write(pp, c_size_t, state.machine.allocate_host(bytesize, context=context, flags=Flags).address)


@entry("cuMemFreeHost(void *p)")
def cuMemFreeHost(p: int) -> None:
    context = current_context()
    allocation = state.machine.allocations.at(p)
    if allocation is None or allocation.kind != "host":
        raise DriverError(Result.INVALID_VALUE, f"{p:#x} is not the start of a live host allocation")
    state.machine.scheduler.wait_context(context)  # a pending copy must not touch unmapped pages
    state.machine.release(allocation)


@entry("cuMemHostRegister(void *p, size_t bytesize, unsigned int Flags)")
def cuMemHostRegister(p: int, bytesize: int, Flags: int) -> None:
    context = current_context()
    if not p or not bytesize:
        raise DriverError(Result.INVALID_VALUE)
    machine = state.machine
    if machine.allocations.holding(p):
        raise DriverError(Result.HOST_MEMORY_ALREADY_REGISTERED)
    machine.allocations.add(
        Allocation(p, bytesize, "registered", -1, context.handle, machine.new_serial(), flags=Flags)
    )


@entry("cuMemHostUnregister(void *p)")
def cuMemHostUnregister(p: int) -> None:
    context = current_context()
    allocation = state.machine.allocations.at(p)
    if allocation is None or allocation.kind != "registered":
        raise DriverError(Result.HOST_MEMORY_NOT_REGISTERED)
    state.machine.scheduler.wait_context(context)
    state.machine.release(allocation)


@entry("cuMemHostGetDevicePointer(CUdeviceptr *pdptr, void *p, unsigned int Flags)")
def cuMemHostGetDevicePointer(pdptr: int, p: int, Flags: int) -> None:
    current_context()
    allocation = state.machine.allocations.holding(p)
    if allocation is None or allocation.kind not in ("host", "registered") or Flags:
        raise DriverError(Result.INVALID_VALUE)
    write(pdptr, c_uint64, p)


@entry("cuMemHostGetFlags(unsigned int *pFlags, void *p)")
def cuMemHostGetFlags(pFlags: int, p: int) -> None:
    current_context()
    allocation = state.machine.allocations.holding(p)
    if allocation is None or allocation.kind not in ("host", "registered"):
        raise DriverError(Result.INVALID_VALUE)
    write(pFlags, c_uint, allocation.flags)


# ---- Stream-ordered allocation ----


def _allocate_async(dptr: int, bytesize: int, pool: Pool, stream: StreamState) -> None:
    if not dptr or not bytesize:
        raise DriverError(Result.INVALID_VALUE)
    machine = state.machine
    try:
        allocation = pool.allocate(bytesize, stream.context)
    except DriverError as error:
        if error.result is not Result.OUT_OF_MEMORY or not machine.scheduler.is_busy:
            raise
        # The driver waits for pending frees before it gives up.
        machine.scheduler.wait_device(stream.context.device)
        allocation = pool.allocate(bytesize, stream.context)
    write(dptr, c_uint64, allocation.address)
    operation = Operation(stream, "alloc", "cuMemAllocAsync", abi.call.correlation)
    machine.scheduler.enqueue(operation, cost=0)


@entry("cuMemAllocAsync(CUdeviceptr *dptr, size_t bytesize, CUstream hStream)")
def cuMemAllocAsync(dptr: int, bytesize: int, hStream: int) -> None:
    stream = stream_of(hStream)
    pool = state.machine.pools.current((DEVICE, stream.context.device.ordinal))
    _allocate_async(dptr, bytesize, pool, stream)


@entry("cuMemAllocFromPoolAsync(CUdeviceptr *dptr, size_t bytesize, CUmemoryPool pool, CUstream hStream)")
def cuMemAllocFromPoolAsync(dptr: int, bytesize: int, pool: int, hStream: int) -> None:
    _allocate_async(dptr, bytesize, state.machine.get(pool, Pool), stream_of(hStream))


@entry("cuMemFreeAsync(CUdeviceptr dptr, CUstream hStream)")
def cuMemFreeAsync(dptr: int, hStream: int) -> None:
    stream = stream_of(hStream)
    allocation = state.machine.allocations.at(dptr)
    if allocation is not None and allocation.kind == "graph":
        state.machine.graph_memory.will_free(dptr)
    elif allocation is None or not allocation.pool:
        raise DriverError(Result.INVALID_VALUE, f"{dptr:#x} is not the start of live memory from a pool")
    operation = Operation(stream, "free", "cuMemFreeAsync", abi.call.correlation)

    def run(_: Operation) -> None:
        with abi.lock:
            # Freed twice in stream order: the second finds nothing, as on a GPU the pool ignores it.
            if state.machine.allocations.at(allocation.address) is allocation:
                state.machine.release(allocation)

    operation.run = run
    state.machine.scheduler.enqueue(operation, cost=0)


# ---- Copies ----


def _reach(address: int, size: int, stream: StreamState, *, to_write: bool = False) -> Allocation | None:
    """Return the allocation that holds the range, None if the driver has none there.

    Raises
    ------
    DriverError
        CUDA_ERROR_INVALID_VALUE also if it is of a pool that the stream's device has no access to.
    """
    found = state.machine.locate(address, size, to_write=to_write)
    ordinal = stream.context.device.ordinal
    if found is not None and found.pool and not state.machine.pools.live[found.pool].may_access(ordinal):
        raise DriverError(Result.INVALID_VALUE, f"device {ordinal} has no access to the pool of {address:#x}")
    return found


def copy(dst: int, src: int, size: int, hStream: int | None, name: str) -> None:
    """Enqueue a copy. `hStream` None is a synchronous call on the default stream."""
    machine = state.machine
    stream = stream_of(hStream or 0)
    if not size:
        return
    if not dst or not src:
        raise DriverError(Result.INVALID_VALUE)
    to, source = _reach(dst, size, stream, to_write=True), _reach(src, size, stream)
    to_device = to is not None and to.device >= 0
    from_device = source is not None and source.device >= 0
    operation = Operation(stream, "memcpy", name, abi.call.correlation)
    engine = "" if to_device == from_device else "h2d" if to_device else "d2h"
    staged = b""
    if hStream is not None and source is None:
        # Pageable memory is staged before the call returns: later changes to it are not seen.
        staged = ctypes.string_at(src, size)
    elif hStream is not None and to is not None and from_device and not to_device:
        # Until the copy runs, its destination holds neither the old nor the new bytes; unless an earlier copy is
        # still going to read the old ones, as it may.
        if not machine.scheduler.will_read_host(dst, size):
            ctypes.memset(dst, 0xA5, size)
    elif source is not None and not from_device:
        operation.host_source = src, size

    def run(_: Operation) -> None:
        if (to is not None and machine.allocations.at(to.address) is not to) or (
            source is not None and machine.allocations.at(source.address) is not source
        ):
            raise DriverError(Result.ILLEGAL_ADDRESS, f"{name} touches memory freed before it ran")
        ctypes.memmove(dst, staged or src, size)
        if machine.checkers is not None:
            machine.checkers.shadow.copied(dst, src, size)

    operation.run = run
    machine.scheduler.enqueue(
        operation, cost=profile.copy_cost(size, on_device=to_device and from_device), engine=engine
    )
    # Synchronous calls return when done, except device to device ("Memcpy", synchronous). An asynchronous one to
    # pageable memory waits too, as the driver may, and as this one must: it cannot know how long that memory lives.
    if (hStream is None and not (to_device and from_device)) or to is None:
        machine.scheduler.wait(operation)
        machine.scheduler.check(stream.context)


def _need_device(address: int, size: int) -> None:
    if size:
        found = state.machine.locate(address, size)
        if found is None:
            raise DriverError(Result.INVALID_VALUE, f"{address:#x} is not a device address")


@entry("cuMemcpy(CUdeviceptr dst, CUdeviceptr src, size_t ByteCount)")
def cuMemcpy(dst: int, src: int, ByteCount: int) -> None:
    copy(dst, src, ByteCount, None, "cuMemcpy")


@entry("cuMemcpyHtoD(CUdeviceptr dstDevice, const void *srcHost, size_t ByteCount)")
def cuMemcpyHtoD(dstDevice: int, srcHost: int, ByteCount: int) -> None:
    current_context()
    _need_device(dstDevice, ByteCount)
    copy(dstDevice, srcHost, ByteCount, None, "cuMemcpyHtoD")


@entry("cuMemcpyDtoH(void *dstHost, CUdeviceptr srcDevice, size_t ByteCount)")
def cuMemcpyDtoH(dstHost: int, srcDevice: int, ByteCount: int) -> None:
    current_context()
    _need_device(srcDevice, ByteCount)
    copy(dstHost, srcDevice, ByteCount, None, "cuMemcpyDtoH")


@entry("cuMemcpyDtoD(CUdeviceptr dstDevice, CUdeviceptr srcDevice, size_t ByteCount)")
def cuMemcpyDtoD(dstDevice: int, srcDevice: int, ByteCount: int) -> None:
    current_context()
    _need_device(dstDevice, ByteCount)
    _need_device(srcDevice, ByteCount)
    copy(dstDevice, srcDevice, ByteCount, None, "cuMemcpyDtoD")


@entry("cuMemcpyAsync(CUdeviceptr dst, CUdeviceptr src, size_t ByteCount, CUstream hStream)")
def cuMemcpyAsync(dst: int, src: int, ByteCount: int, hStream: int) -> None:
    copy(dst, src, ByteCount, hStream, "cuMemcpyAsync")


@entry("cuMemcpyHtoDAsync(CUdeviceptr dstDevice, const void *srcHost, size_t ByteCount, CUstream hStream)")
def cuMemcpyHtoDAsync(dstDevice: int, srcHost: int, ByteCount: int, hStream: int) -> None:
    stream_of(hStream)
    _need_device(dstDevice, ByteCount)
    copy(dstDevice, srcHost, ByteCount, hStream, "cuMemcpyHtoDAsync")


@entry("cuMemcpyDtoHAsync(void *dstHost, CUdeviceptr srcDevice, size_t ByteCount, CUstream hStream)")
def cuMemcpyDtoHAsync(dstHost: int, srcDevice: int, ByteCount: int, hStream: int) -> None:
    stream_of(hStream)
    _need_device(srcDevice, ByteCount)
    copy(dstHost, srcDevice, ByteCount, hStream, "cuMemcpyDtoHAsync")


@entry("cuMemcpyDtoDAsync(CUdeviceptr dstDevice, CUdeviceptr srcDevice, size_t ByteCount, CUstream hStream)")
def cuMemcpyDtoDAsync(dstDevice: int, srcDevice: int, ByteCount: int, hStream: int) -> None:
    stream_of(hStream)
    _need_device(dstDevice, ByteCount)
    _need_device(srcDevice, ByteCount)
    copy(dstDevice, srcDevice, ByteCount, hStream, "cuMemcpyDtoDAsync")


@entry(
    "cuMemcpyWithAttributesAsync(CUdeviceptr dst, CUdeviceptr src, size_t size, CUmemcpyAttributes *attr, "
    "CUstream hStream)"
)
def cuMemcpyWithAttributesAsync(dst: int, src: int, size: int, attr: int, hStream: int) -> None:
    copy(dst, src, size, hStream, "cuMemcpyWithAttributesAsync")


# ---- Memset ----


def _set(dst: int, value: int, count: int, width: int, hStream: int | None, name: str) -> None:
    stream = stream_of(hStream or 0)
    size = count * width
    if not size:
        return
    if dst % width:
        raise DriverError(Result.INVALID_VALUE, f"{dst:#x} is not aligned to {width} bytes")
    _need_device(dst, size)
    operation = Operation(stream, "memset", name, abi.call.correlation)
    machine = state.machine
    target = _reach(dst, size, stream, to_write=True)

    def run(_: Operation) -> None:
        if target is not None and machine.allocations.at(target.address) is not target:
            raise DriverError(Result.ILLEGAL_ADDRESS, f"{name} touches memory freed before it ran")
        if machine.checkers is not None:
            machine.checkers.shadow.written(dst, size)
        pattern = value.to_bytes(width, "little")
        if len(set(pattern)) == 1:
            ctypes.memset(dst, pattern[0], size)
            return
        # Fill by doubling: each copy moves what was filled so far.
        ctypes.memmove(dst, pattern, width)
        filled = width
        while filled < size:
            step = min(filled, size - filled)
            ctypes.memmove(dst + filled, dst, step)
            filled += step

    operation.run = run
    # Asynchronous with respect to the host when the target is device memory ("Memset").
    machine.scheduler.enqueue(operation, cost=profile.memset_cost(size))
    if hStream is None and target is not None and target.device < 0:
        machine.scheduler.wait(operation)


@entry("cuMemsetD8(CUdeviceptr dstDevice, unsigned char uc, size_t N)")
def cuMemsetD8(dstDevice: int, uc: int, N: int) -> None:
    _set(dstDevice, uc, N, 1, None, "cuMemsetD8")


@entry("cuMemsetD16(CUdeviceptr dstDevice, unsigned short us, size_t N)")
def cuMemsetD16(dstDevice: int, us: int, N: int) -> None:
    _set(dstDevice, us, N, 2, None, "cuMemsetD16")


@entry("cuMemsetD32(CUdeviceptr dstDevice, unsigned int ui, size_t N)")
def cuMemsetD32(dstDevice: int, ui: int, N: int) -> None:
    _set(dstDevice, ui, N, 4, None, "cuMemsetD32")


@entry("cuMemsetD8Async(CUdeviceptr dstDevice, unsigned char uc, size_t N, CUstream hStream)")
def cuMemsetD8Async(dstDevice: int, uc: int, N: int, hStream: int) -> None:
    _set(dstDevice, uc, N, 1, hStream, "cuMemsetD8Async")


@entry("cuMemsetD16Async(CUdeviceptr dstDevice, unsigned short us, size_t N, CUstream hStream)")
def cuMemsetD16Async(dstDevice: int, us: int, N: int, hStream: int) -> None:
    _set(dstDevice, us, N, 2, hStream, "cuMemsetD16Async")


@entry("cuMemsetD32Async(CUdeviceptr dstDevice, unsigned int ui, size_t N, CUstream hStream)")
def cuMemsetD32Async(dstDevice: int, ui: int, N: int, hStream: int) -> None:
    _set(dstDevice, ui, N, 4, hStream, "cuMemsetD32Async")
