"""Driver entry points: memory management, stream-ordered allocation.

Grouped as in the CUDA driver API reference. Copies and fills are in :mod:`cudatool.sim.api.copy`.
"""

from __future__ import annotations

from collections.abc import Callable
from ctypes import c_size_t, c_uint, c_uint64
from typing import Final

from cudatool.sim import abi
from cudatool.sim import machine as state
from cudatool.sim.abi import entry, write
from cudatool.sim.allocations import Allocation
from cudatool.sim.arena import is_mapped
from cudatool.sim.machine import current_context, stream_of
from cudatool.sim.pool import DEVICE, Pool
from cudatool.sim.queue import Operation, StreamState
from cudatool.sim.results import DriverError, Result

_IO_MEMORY: Final = 4  # CU_MEMHOSTREGISTER_IOMEMORY

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
    if allocation is None or allocation.kind not in ("device", "graph", "managed", "pool") or allocation.is_given_back:
        raise DriverError(Result.INVALID_VALUE, f"{dptr:#x} is not the start of a live device allocation")
    if allocation.kind == "graph":
        state.machine.graph_memory.will_free(dptr)
    # "Note that this function may implicitly synchronize"; memory in use is waited for.
    _release_after(allocation, lambda: state.machine.scheduler.wait_device(state.machine.devices[allocation.device]))
    state.machine.scheduler.check(context)


def _release_after(allocation: Allocation, wait: Callable[[], None]) -> None:
    """Give memory back once nothing uses it; other threads may call the driver while this waits, and free it again."""
    allocation.is_given_back = True
    try:
        wait()
        state.machine.will_release(allocation)
    except BaseException:  # Ctrl-C: it is still to be freed
        allocation.is_given_back = False
        raise
    state.machine.release(allocation)


@entry("cuMemGetAddressRange(CUdeviceptr *pbase, size_t *psize, CUdeviceptr dptr)")
def cuMemGetAddressRange(pbase: int, psize: int, dptr: int) -> None:
    current_context()
    allocation = state.machine.virtual.mapping_at(dptr) or state.machine.allocations.holding(dptr)
    if allocation is None:
        raise DriverError(Result.NOT_FOUND, f"{dptr:#x} is not inside an allocation")
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
    if p == 0:
        return  # as NVIDIA's driver does, of which the reference says nothing
    allocation = state.machine.allocations.at(p)
    if allocation is None or allocation.kind != "host" or allocation.is_given_back:
        raise DriverError(Result.INVALID_VALUE, f"{p:#x} is not the start of a live host allocation")
    # A pending copy must not touch unmapped pages.
    _release_after(allocation, lambda: state.machine.scheduler.wait_context(context))


@entry("cuMemHostRegister(void *p, size_t bytesize, unsigned int Flags)")
def cuMemHostRegister(p: int, bytesize: int, Flags: int) -> None:
    context = current_context()
    if not p or not bytesize or Flags > 15:
        raise DriverError(Result.INVALID_VALUE)
    if Flags & _IO_MEMORY:
        raise DriverError(Result.NOT_SUPPORTED, "the software device cannot access memory of other devices")
    machine = state.machine
    overlapping = machine.allocations.overlapping(p, bytesize)
    in_arena = p < machine.arena.base + machine.arena.limit and machine.arena.base < p + bytesize
    if in_arena or not is_mapped(p, bytesize):
        raise DriverError(Result.INVALID_VALUE, f"{bytesize} bytes at {p:#x} are not all host memory")
    if overlapping:
        raise DriverError(Result.HOST_MEMORY_ALREADY_REGISTERED)
    machine.allocations.add(
        Allocation(p, bytesize, "registered", -1, context.handle, machine.new_serial(), flags=Flags)
    )


@entry("cuMemHostUnregister(void *p)")
def cuMemHostUnregister(p: int) -> None:
    context = current_context()
    allocation = state.machine.allocations.holding(p)
    if allocation is None or allocation.kind != "registered" or allocation.is_given_back:
        raise DriverError(Result.HOST_MEMORY_NOT_REGISTERED)
    if allocation.address != p:
        # "The base address must be the same one specified to cuMemHostRegister()."
        raise DriverError(Result.INVALID_VALUE, f"{p:#x} is not the start of registered memory")
    allocation.is_given_back = True
    try:
        state.machine.scheduler.wait_context(context)
    finally:  # after Ctrl-C too: the caller goes on as if it were done, and the memory may be gone
        state.machine.will_release(allocation)
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
    if not dptr:
        raise DriverError(Result.INVALID_VALUE)
    if not bytesize:
        write(dptr, c_uint64, 0)  # zero bytes are not an error here, unlike for cuMemAlloc
        return
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
    if not dptr:
        return
    allocation = state.machine.allocations.at(dptr)
    if allocation is not None and allocation.kind == "graph":
        state.machine.graph_memory.will_free(dptr)
    elif allocation is not None and allocation.kind == "managed" and not allocation.pool:
        raise DriverError(Result.NOT_SUPPORTED, f"{dptr:#x} is managed memory, which cuMemFree frees")
    elif allocation is None or allocation.is_given_back or not (allocation.pool or allocation.kind == "device"):
        raise DriverError(Result.INVALID_VALUE, f"{dptr:#x} is not the start of live device memory")
    else:
        allocation.is_given_back = True
    abi.gives_back("allocation", allocation)
    stream = stream_of(hStream)  # again: other threads may have destroyed it meanwhile
    operation = Operation(stream, "free", "cuMemFreeAsync", abi.call.correlation)

    def run(_: Operation) -> None:
        with abi.lock:
            state.machine.release(allocation)

    operation.run = run
    state.machine.scheduler.enqueue(operation, cost=0)
