"""Driver entry points: managed memory.

Grouped as in the CUDA driver API reference (cuMemAllocManaged of "Memory Management", and the part of "Unified
Addressing" that is about managed memory). Managed memory lies in its device's memory, which the host can reach.
"""

from __future__ import annotations

import ctypes
from ctypes import c_int, c_size_t, c_uint64
from typing import Final

from cudatool.sim import abi
from cudatool.sim import machine as state
from cudatool.sim.abi import entry, write
from cudatool.sim.allocations import Allocation
from cudatool.sim.machine import current_context, stream_of
from cudatool.sim.managed import NOWHERE, Advised, Location, ManagedState, MemoryAdvice
from cudatool.sim.pool import DEVICE, HOST, HOST_NUMA
from cudatool.sim.queue import Operation
from cudatool.sim.results import DriverError, Result

_HOST_PAGE: Final = 4096
_HOST_NUMA_CURRENT: Final = 4
_ATTACH_GLOBAL, _ATTACH_HOST, _ATTACH_SINGLE = 1, 2, 4  # CU_MEM_ATTACH_*


@entry("cuMemAllocManaged(CUdeviceptr *dptr, size_t bytesize, unsigned int flags)")
def cuMemAllocManaged(dptr: int, bytesize: int, flags: int) -> None:
    context = current_context()
    if not dptr or not bytesize or flags not in (_ATTACH_GLOBAL, _ATTACH_HOST):
        raise DriverError(Result.INVALID_VALUE)
    write(dptr, c_uint64, state.machine.allocate(context.device, bytesize, "managed", context=context).address)


@entry("cuStreamAttachMemAsync(CUstream hStream, CUdeviceptr dptr, size_t length, unsigned int flags)")
def cuStreamAttachMemAsync(hStream: int, dptr: int, length: int, flags: int) -> None:
    stream = stream_of(hStream)
    if flags not in (_ATTACH_GLOBAL, _ATTACH_HOST, _ATTACH_SINGLE):
        raise DriverError(Result.INVALID_VALUE)
    found = state.machine.allocations.at(dptr)
    # "length must be zero or the whole allocation" (cuStreamAttachMemAsync).
    if found is None or found.kind != "managed" or length not in (0, found.size):
        raise DriverError(Result.INVALID_VALUE, f"{dptr:#x} is not the start of managed memory of {length} bytes")
    _enqueue(Operation(stream, "host", "cuStreamAttachMemAsync", abi.call.correlation))


def _enqueue(operation: Operation) -> None:
    state.machine.scheduler.enqueue(operation, cost=0)


# ---- Unified addressing: advice and prefetching ----


def _unpack(packed: int) -> Location:
    """Return the CUmemLocation that was passed by value, in one register."""
    kind, ordinal = (c_int * 2).from_buffer_copy(packed.to_bytes(8, "little"))
    return kind, ordinal


def _check_place(location: Location) -> None:
    kind, ordinal = location
    if kind == DEVICE:
        state.machine.device(ordinal)
    elif kind == HOST_NUMA and ordinal:
        raise DriverError(Result.INVALID_VALUE, f"there is no NUMA node {ordinal}; the host counts as one")
    elif kind not in (HOST, HOST_NUMA, _HOST_NUMA_CURRENT):
        raise DriverError(Result.INVALID_VALUE, "the location must be a device, the host or a NUMA node")


def _managed(address: int, size: int) -> tuple[Advised, int, int]:
    """Return what is known of a range of managed memory, and the range rounded to pages.

    Raises
    ------
    DriverError
        CUDA_ERROR_INVALID_VALUE if the range is not all managed memory.
    """
    found = state.machine.allocations.holding(address, size) if size else None
    if found is None or found.kind != "managed":
        raise DriverError(Result.INVALID_VALUE, f"{size} bytes at {address:#x} are not managed memory")
    end = -(-(address + size) // _HOST_PAGE) * _HOST_PAGE
    return _advised(found), address // _HOST_PAGE * _HOST_PAGE, end


def _advised(allocation: Allocation) -> Advised:
    if allocation.advised is None:
        start = allocation.address // _HOST_PAGE * _HOST_PAGE
        allocation.advised = Advised(start, -(-(allocation.address + allocation.size) // _HOST_PAGE) * _HOST_PAGE)
    return allocation.advised


@entry("cuMemAdvise(CUdeviceptr devPtr, size_t count, CUmem_advise advice, CUmemLocation location)")
def cuMemAdvise(devPtr: int, count: int, advice: int, location: int) -> None:
    current_context()
    if advice not in MemoryAdvice._value2member_map_:
        raise DriverError(Result.INVALID_VALUE)
    kind, place = MemoryAdvice(advice), _unpack(location)
    if kind in (MemoryAdvice.SET_PREFERRED_LOCATION, MemoryAdvice.SET_ACCESSED_BY, MemoryAdvice.UNSET_ACCESSED_BY):
        _check_place(place)
        # "the host is specified by CU_MEM_LOCATION_TYPE_HOST" for access; NUMA nodes are for preferences only.
        if kind is not MemoryAdvice.SET_PREFERRED_LOCATION and place[0] not in (DEVICE, HOST):
            raise DriverError(Result.INVALID_VALUE, "this call takes no NUMA node")
    advised, start, end = _managed(devPtr, count)
    advised.advise(start, end, kind, (HOST, 0) if place[0] == HOST else place)


def _prefetch(ranges: list[tuple[int, int]], places: list[Location], hStream: int, name: str) -> None:
    stream = stream_of(hStream)
    for (address, size), place in zip(ranges, places, strict=True):
        if place != NOWHERE:
            _check_place(place)
        _managed(address, size)
    for (address, size), place in zip(ranges, places, strict=True):
        advised, start, end = _managed(address, size)
        if place != NOWHERE:
            advised.prefetch(start, end, (HOST, 0) if place[0] == HOST else place)
    _enqueue(Operation(stream, "host", name, abi.call.correlation))


@entry(
    "cuMemPrefetchAsync(CUdeviceptr devPtr, size_t count, CUmemLocation location, unsigned int flags, CUstream hStream)"
)
def cuMemPrefetchAsync(devPtr: int, count: int, location: int, flags: int, hStream: int) -> None:
    if flags:
        raise DriverError(Result.INVALID_VALUE)
    _prefetch([(devPtr, count)], [_unpack(location)], hStream, "cuMemPrefetchAsync")


def _ranges(dptrs: int, sizes: int, count: int, flags: int) -> list[tuple[int, int]]:
    """Return the ranges of a batch, which takes no flags."""
    if not count or not dptrs or not sizes or flags:
        raise DriverError(Result.INVALID_VALUE)
    addresses, lengths = (c_uint64 * count).from_address(dptrs), (c_size_t * count).from_address(sizes)
    return list(zip(addresses, lengths, strict=True))


def _places(locations: int, indices: int, number: int, count: int) -> list[Location]:
    """Return the location of each of `count` ranges; location k is for those from ``indices[k]`` on."""
    if not number or number > count or not locations or not indices:
        raise DriverError(Result.INVALID_VALUE)
    starts = list((c_size_t * number).from_address(indices))
    if starts[0] or starts != sorted(set(starts)) or starts[-1] >= count:
        raise DriverError(
            Result.INVALID_VALUE, "the indices of locations must begin with 0, ascend, and stay below count"
        )
    values = (c_int * (2 * number)).from_address(locations)
    ends = [*starts[1:], count]
    return [(values[2 * k], values[2 * k + 1]) for k in range(number) for _ in range(starts[k], ends[k])]


@entry(
    "cuMemPrefetchBatchAsync(CUdeviceptr *dptrs, size_t *sizes, size_t count, CUmemLocation *prefetchLocs, "
    "size_t *prefetchLocIdxs, size_t numPrefetchLocs, unsigned long long flags, CUstream hStream)"
)
def cuMemPrefetchBatchAsync(
    dptrs: int,
    sizes: int,
    count: int,
    prefetchLocs: int,
    prefetchLocIdxs: int,
    numPrefetchLocs: int,
    flags: int,
    hStream: int,
) -> None:
    places = _places(prefetchLocs, prefetchLocIdxs, numPrefetchLocs, count)
    _prefetch(_ranges(dptrs, sizes, count, flags), places, hStream, "cuMemPrefetchBatchAsync")


@entry(
    "cuMemDiscardBatchAsync(CUdeviceptr *dptrs, size_t *sizes, size_t count, unsigned long long flags, "
    "CUstream hStream)"
)
def cuMemDiscardBatchAsync(dptrs: int, sizes: int, count: int, flags: int, hStream: int) -> None:
    # What is discarded "may" be lost: contents stay here.
    _prefetch(_ranges(dptrs, sizes, count, flags), [NOWHERE] * count, hStream, "cuMemDiscardBatchAsync")


@entry(
    "cuMemDiscardAndPrefetchBatchAsync(CUdeviceptr *dptrs, size_t *sizes, size_t count, CUmemLocation *prefetchLocs, "
    "size_t *prefetchLocIdxs, size_t numPrefetchLocs, unsigned long long flags, CUstream hStream)"
)
def cuMemDiscardAndPrefetchBatchAsync(
    dptrs: int,
    sizes: int,
    count: int,
    prefetchLocs: int,
    prefetchLocIdxs: int,
    numPrefetchLocs: int,
    flags: int,
    hStream: int,
) -> None:
    places = _places(prefetchLocs, prefetchLocIdxs, numPrefetchLocs, count)
    _prefetch(_ranges(dptrs, sizes, count, flags), places, hStream, "cuMemDiscardAndPrefetchBatchAsync")


# ---- Unified addressing: what was said ----

_UNKNOWN_DEVICE, _CPU = -2, -1  # CU_DEVICE_INVALID, CU_DEVICE_CPU


def _ordinal(location: Location) -> int:
    return {DEVICE: location[1], HOST: _CPU}.get(location[0], _UNKNOWN_DEVICE)


def _range_attribute(attribute: int, states: list[ManagedState], room: int) -> list[int]:
    """Return the value of a CUmem_range_attribute, in C ints: what all pages agree on, else "none"."""
    preferred = {state.preferred for state in states}
    prefetched = {state.prefetched for state in states}
    where = preferred.pop() if len(preferred) == 1 else NOWHERE
    last = prefetched.pop() if len(prefetched) == 1 else NOWHERE
    match attribute:
        case 1:  # READ_MOSTLY
            return [int(all(state.read_mostly for state in states))]
        case 2:  # PREFERRED_LOCATION
            return [_ordinal(where)]
        case 3:  # ACCESSED_BY
            common = sorted(_ordinal(place) for place in frozenset.intersection(*(s.accessed_by for s in states)))
            return (common + [_UNKNOWN_DEVICE] * room)[:room]
        case 4:  # LAST_PREFETCH_LOCATION
            return [_ordinal(last)]
        case 5 | 6:  # PREFERRED_LOCATION_TYPE, _ID
            return [where[attribute - 5]]
        case 7 | 8:  # LAST_PREFETCH_LOCATION_TYPE, _ID
            return [last[attribute - 7]]
    raise DriverError(Result.INVALID_VALUE, f"{attribute} is not a CUmem_range_attribute")


@entry(
    "cuMemRangeGetAttribute(void *data, size_t dataSize, CUmem_range_attribute attribute, CUdeviceptr devPtr, "
    "size_t count)"
)
def cuMemRangeGetAttribute(data: int, dataSize: int, attribute: int, devPtr: int, count: int) -> None:
    current_context()
    # All values are 32-bit integers; only ACCESSED_BY has several.
    if not data or not dataSize or dataSize % 4 or (attribute != 3 and dataSize != 4):
        raise DriverError(Result.INVALID_VALUE)
    advised, start, end = _managed(devPtr, count)
    values = _range_attribute(attribute, advised.states(start, end), dataSize // 4)
    ctypes.memmove(data, (c_int * len(values))(*values), 4 * len(values))


@entry(
    "cuMemRangeGetAttributes(void **data, size_t *dataSizes, CUmem_range_attribute *attributes, size_t numAttributes, "
    "CUdeviceptr devPtr, size_t count)"
)
def cuMemRangeGetAttributes(
    data: int, dataSizes: int, attributes: int, numAttributes: int, devPtr: int, count: int
) -> None:
    if not data or not dataSizes or not attributes or not numAttributes:
        raise DriverError(Result.INVALID_VALUE)
    for index in range(numAttributes):
        target = c_size_t.from_address(data + 8 * index).value
        size = c_size_t.from_address(dataSizes + 8 * index).value
        cuMemRangeGetAttribute(target, size, c_int.from_address(attributes + 4 * index).value, devPtr, count)
