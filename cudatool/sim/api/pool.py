"""Driver entry points: stream-ordered memory pools.

Grouped as in the CUDA driver API reference ("Stream Ordered Memory Allocator"). The allocations themselves are in
:mod:`cudatool.sim.api.memory`. What a pool has, it gives back to its device when it is freed: it reserves no more than
is used.
"""

from __future__ import annotations

import ctypes
from ctypes import c_int, c_size_t, c_uint64

from cudatool.sim import machine as state
from cudatool.sim.abi import entry, write
from cudatool.sim.arena import READ_ONLY, READ_WRITE
from cudatool.sim.pool import DEVICE, FILE_DESCRIPTOR, MANAGED, PINNED, PointerData, Pool, check_location
from cudatool.sim.results import DriverError, Result


class _PoolProps(ctypes.Structure):
    """CUmemPoolProps."""

    _fields_ = (
        ("allocType", c_int),
        ("handleTypes", c_int),
        ("location", c_int * 2),
        ("win32SecurityAttributes", c_size_t),
        ("maxSize", c_size_t),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 54),
    )


class _AccessDesc(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location_type", c_int), ("location_id", c_int), ("flags", c_int))


def _location(address: int) -> tuple[int, int]:
    """Return type and id of a CUmemLocation."""
    if not address:
        raise DriverError(Result.INVALID_VALUE)
    kind, ordinal = (c_int * 2).from_address(address)
    return kind, ordinal


@entry("cuMemPoolCreate(CUmemoryPool *pool, const CUmemPoolProps *poolProps)")
def cuMemPoolCreate(pool: int, poolProps: int) -> None:
    if not pool or not poolProps:
        raise DriverError(Result.INVALID_VALUE)
    props = _PoolProps.from_address(poolProps)
    location = (props.location[0], props.location[1])
    check_location(state.machine, location, props.allocType)
    if props.handleTypes & ~FILE_DESCRIPTOR:
        raise DriverError(Result.NOT_SUPPORTED, "a pool can only be shared by file descriptor")
    if props.handleTypes and props.allocType == MANAGED:
        raise DriverError(Result.NOT_SUPPORTED, "managed pools cannot be shared between processes")
    new = Pool(state.machine, location, props.allocType, handle_types=props.handleTypes, max_size=props.maxSize)
    write(pool, c_size_t, new.handle)


@entry("cuMemPoolDestroy(CUmemoryPool pool)")
def cuMemPoolDestroy(pool: int) -> None:
    found = state.machine.get(pool, Pool)
    if state.machine.pools.is_default(found):
        raise DriverError(Result.INVALID_VALUE, "a default pool cannot be destroyed")
    found.destroy()


@entry("cuDeviceGetDefaultMemPool(CUmemoryPool *pool_out, CUdevice dev)")
def cuDeviceGetDefaultMemPool(pool_out: int, dev: int) -> None:
    write(pool_out, c_size_t, state.machine.pools.default((DEVICE, dev)).handle)


@entry("cuDeviceGetMemPool(CUmemoryPool *pool, CUdevice dev)")
def cuDeviceGetMemPool(pool: int, dev: int) -> None:
    write(pool, c_size_t, state.machine.pools.current((DEVICE, dev)).handle)


@entry("cuDeviceSetMemPool(CUdevice dev, CUmemoryPool pool)")
def cuDeviceSetMemPool(dev: int, pool: int) -> None:
    state.machine.pools.set_current((DEVICE, dev), PINNED, state.machine.get(pool, Pool))


@entry("cuMemGetDefaultMemPool(CUmemoryPool *pool_out, CUmemLocation *location, CUmemAllocationType type)")
def cuMemGetDefaultMemPool(pool_out: int, location: int, type: int) -> None:
    write(pool_out, c_size_t, state.machine.pools.default(_location(location), type).handle)


@entry("cuMemGetMemPool(CUmemoryPool *pool, CUmemLocation *location, CUmemAllocationType type)")
def cuMemGetMemPool(pool: int, location: int, type: int) -> None:
    write(pool, c_size_t, state.machine.pools.current(_location(location), type).handle)


@entry("cuMemSetMemPool(CUmemLocation *location, CUmemAllocationType type, CUmemoryPool pool)")
def cuMemSetMemPool(location: int, type: int, pool: int) -> None:
    state.machine.pools.set_current(_location(location), type, state.machine.get(pool, Pool))


@entry("cuMemPoolTrimTo(CUmemoryPool pool, size_t minBytesToKeep)")
def cuMemPoolTrimTo(pool: int, minBytesToKeep: int) -> None:
    state.machine.get(pool, Pool)  # freed memory went back at once, so there is nothing to trim


@entry("cuMemPoolGetAttribute(CUmemoryPool pool, CUmemPool_attribute attr, void *value)")
def cuMemPoolGetAttribute(pool: int, attr: int, value: int) -> None:
    found = state.machine.get(pool, Pool)
    sized = {
        4: found.attributes[4],  # RELEASE_THRESHOLD
        5: found.used,  # RESERVED_MEM_CURRENT
        6: found.used_high,  # RESERVED_MEM_HIGH
        7: found.used,  # USED_MEM_CURRENT
        8: found.used_high,  # USED_MEM_HIGH
        13: found.max_size or state.machine.options.memory,  # MAX_POOL_SIZE
    }
    plain = {
        1: found.attributes[1],  # REUSE_FOLLOW_EVENT_DEPENDENCIES
        2: found.attributes[2],  # REUSE_ALLOW_OPPORTUNISTIC
        3: found.attributes[3],  # REUSE_ALLOW_INTERNAL_DEPENDENCIES
        9: found.allocation_type,  # ALLOCATION_TYPE
        10: found.handle_types,  # EXPORT_HANDLE_TYPES
        11: found.location[1],  # LOCATION_ID
        12: found.location[0],  # LOCATION_TYPE
        14: 0,  # HW_DECOMPRESS_ENABLED
    }
    if attr in sized:
        write(value, c_uint64, sized[attr])
    elif attr in plain:
        write(value, c_int, plain[attr])
    else:
        raise DriverError(Result.INVALID_VALUE)


@entry("cuMemPoolSetAttribute(CUmemoryPool pool, CUmemPool_attribute attr, void *value)")
def cuMemPoolSetAttribute(pool: int, attr: int, value: int) -> None:
    found = state.machine.get(pool, Pool)
    if not value:
        raise DriverError(Result.INVALID_VALUE)
    if attr in (1, 2, 3):
        found.attributes[attr] = int(c_int.from_address(value).value != 0)
    elif attr == 4:
        found.attributes[4] = c_uint64.from_address(value).value
    elif attr in (6, 8):
        if c_uint64.from_address(value).value:
            raise DriverError(Result.INVALID_VALUE, "a high-water mark can only be set to zero")
        found.used_high = found.used
    else:
        raise DriverError(Result.INVALID_VALUE)


@entry("cuMemPoolSetAccess(CUmemoryPool pool, const CUmemAccessDesc *map, size_t count)")
def cuMemPoolSetAccess(pool: int, map: int, count: int) -> None:
    found = state.machine.get(pool, Pool)
    if count and not map:
        raise DriverError(Result.INVALID_VALUE)
    wanted = (_AccessDesc * count).from_address(map) if count else ()
    for access in wanted:
        if access.location_type != DEVICE or access.flags not in (0, READ_ONLY, READ_WRITE):
            raise DriverError(Result.INVALID_VALUE)
        state.machine.device(access.location_id)
        if access.location_id == found.device and access.flags != READ_WRITE:
            raise DriverError(Result.INVALID_VALUE)  # it cannot lose access to its own pool; cuda.core always tries
    for access in wanted:
        found.access[access.location_id] = access.flags


@entry("cuMemPoolGetAccess(int *flags, CUmemoryPool memPool, CUmemLocation *location)")
def cuMemPoolGetAccess(flags: int, memPool: int, location: int) -> None:
    found = state.machine.get(memPool, Pool)
    kind, ordinal = _location(location)
    if kind != DEVICE:
        raise DriverError(Result.INVALID_VALUE)
    state.machine.device(ordinal)
    write(flags, c_int, found.access.get(ordinal, 0) if found.device >= 0 else READ_WRITE)


# ---- Between processes ----


@entry(
    "cuMemPoolExportToShareableHandle(void *handle_out, CUmemoryPool pool, CUmemAllocationHandleType handleType, "
    "unsigned long long flags)"
)
def cuMemPoolExportToShareableHandle(handle_out: int, pool: int, handleType: int, flags: int) -> None:
    found = state.machine.get(pool, Pool)
    cannot = not found.handle_types & handleType or found.is_imported
    if not handle_out or handleType != FILE_DESCRIPTOR or flags or cannot:
        raise DriverError(
            Result.INVALID_VALUE,
            "a pool can only be exported as a file descriptor, with flags 0, by the process that created it for that",
        )
    write(handle_out, c_int, found.new_descriptor())


@entry(
    "cuMemPoolImportFromShareableHandle(CUmemoryPool *pool_out, void *handle, CUmemAllocationHandleType handleType, "
    "unsigned long long flags)"
)
def cuMemPoolImportFromShareableHandle(pool_out: int, handle: int, handleType: int, flags: int) -> None:
    if not pool_out or handleType != FILE_DESCRIPTOR or flags:
        raise DriverError(Result.INVALID_VALUE, "a pool can only be imported from a file descriptor, with flags 0")
    write(pool_out, c_size_t, Pool.from_file(state.machine, c_int(handle).value).handle)


@entry("cuMemPoolExportPointer(CUmemPoolPtrExportData *shareData_out, CUdeviceptr ptr)")
def cuMemPoolExportPointer(shareData_out: int, ptr: int) -> None:
    found = state.machine.allocations.at(ptr)
    if not shareData_out or found is None or not found.pool:
        raise DriverError(Result.INVALID_VALUE, f"{ptr:#x} is not the start of live memory from a pool")
    data = state.machine.pools.live[found.pool].export_pointer(found)
    state.machine.share(found)
    ctypes.memset(shareData_out, 0, 64)
    ctypes.memmove(shareData_out, ctypes.addressof(data), ctypes.sizeof(data))


@entry("cuMemPoolImportPointer(CUdeviceptr *ptr_out, CUmemoryPool pool, CUmemPoolPtrExportData *shareData)")
def cuMemPoolImportPointer(ptr_out: int, pool: int, shareData: int) -> None:
    if not ptr_out or not shareData:
        raise DriverError(Result.INVALID_VALUE)
    data = PointerData.from_buffer_copy(ctypes.string_at(shareData, ctypes.sizeof(PointerData)))
    found = state.machine.get(pool, Pool).import_pointer(data)
    write(ptr_out, c_uint64, found.address)
    state.machine.share(found)
