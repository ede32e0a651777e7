"""Driver entry points: virtual memory management.

Grouped as in the CUDA driver API reference ("Virtual Memory Management"). Sizes are multiples of 2 MiB, the
granularity of a GPU's pages. Memory can be shared with other processes by file descriptor.
"""

from __future__ import annotations

import ctypes
from ctypes import c_int, c_size_t, c_uint64

from cudatool.sim import machine as state
from cudatool.sim.abi import entry, write
from cudatool.sim.arena import PAGE, READ_ONLY, READ_WRITE
from cudatool.sim.machine import Device, current_context
from cudatool.sim.results import DriverError, Result
from cudatool.sim.virtual import Physical

_PINNED = 1  # CU_MEM_ALLOCATION_TYPE_PINNED
_ON_DEVICE = 1  # CU_MEM_LOCATION_TYPE_DEVICE
_FILE_DESCRIPTOR = 1  # CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


class _Location(ctypes.Structure):
    """CUmemLocation."""

    _fields_ = (("type", c_int), ("id", c_int))


class _Properties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", c_int),
        ("requestedHandleTypes", c_int),
        ("location", _Location),
        ("win32HandleMetaData", c_size_t),
        ("allocFlags", c_uint64),
    )


class _Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", _Location), ("flags", c_int))


@entry(
    "cuMemAddressReserve(CUdeviceptr *ptr, size_t size, size_t alignment, CUdeviceptr addr, unsigned long long flags)"
)
def cuMemAddressReserve(ptr: int, size: int, alignment: int, addr: int, flags: int) -> None:
    # `addr` is a hint, which the driver need not follow.
    if not ptr or not size or size % PAGE or flags or alignment & (alignment - 1):
        raise DriverError(Result.INVALID_VALUE, f"a range of {size} bytes: sizes are multiples of 2 MiB")
    write(ptr, c_uint64, state.machine.virtual.reserve(size, alignment))


@entry("cuMemAddressFree(CUdeviceptr ptr, size_t size)")
def cuMemAddressFree(ptr: int, size: int) -> None:
    state.machine.virtual.unreserve(ptr, size)


@entry(
    "cuMemCreate(CUmemGenericAllocationHandle *handle, size_t size, const CUmemAllocationProp *prop, "
    "unsigned long long flags)"
)
def cuMemCreate(handle: int, size: int, prop: int, flags: int) -> None:
    if not handle or not size or size % PAGE or flags:
        raise DriverError(Result.INVALID_VALUE, f"{size} bytes: sizes are multiples of 2 MiB")
    properties = _properties(prop)
    physical = state.machine.virtual.create(_device(properties.location), size, properties.requestedHandleTypes)
    write(handle, c_uint64, physical.handle)


@entry("cuMemRelease(CUmemGenericAllocationHandle handle)")
def cuMemRelease(handle: int) -> None:
    state.machine.virtual.release(_physical(handle))


@entry(
    "cuMemMap(CUdeviceptr ptr, size_t size, size_t offset, CUmemGenericAllocationHandle handle, "
    "unsigned long long flags)"
)
def cuMemMap(ptr: int, size: int, offset: int, handle: int, flags: int) -> None:
    physical = _physical(handle)
    # "offset ... must be zero", and the memory can be mapped as a whole only (cuMemMap).
    if offset or flags or ptr % PAGE or size != physical.size:
        raise DriverError(
            Result.INVALID_VALUE, f"a handle of {physical.size} bytes must be mapped as a whole, at a multiple of 2 MiB"
        )
    state.machine.virtual.map(ptr, physical)


@entry("cuMemUnmap(CUdeviceptr ptr, size_t size)")
def cuMemUnmap(ptr: int, size: int) -> None:
    state.machine.virtual.unmap(ptr, size)


@entry("cuMemSetAccess(CUdeviceptr ptr, size_t size, const CUmemAccessDesc *desc, size_t count)")
def cuMemSetAccess(ptr: int, size: int, desc: int, count: int) -> None:
    if not desc or not count:
        raise DriverError(Result.INVALID_VALUE)
    wanted = [(_device(access.location), access.flags) for access in (_Access * count).from_address(desc)]
    for device, flags in wanted:
        if flags not in (0, READ_ONLY, READ_WRITE):
            raise DriverError(Result.INVALID_VALUE)
        state.machine.virtual.set_access(ptr, size, device, flags)


@entry("cuMemGetAccess(unsigned long long *flags, const CUmemLocation *location, CUdeviceptr ptr)")
def cuMemGetAccess(flags: int, location: int, ptr: int) -> None:
    mapping = state.machine.virtual.mapping_at(ptr)
    if not flags or not location or mapping is None:
        raise DriverError(Result.INVALID_VALUE, f"nothing is mapped at {ptr:#x}")
    device = _device(_Location.from_address(location))
    write(flags, c_uint64, mapping.access.get(device.ordinal, 0))


@entry(
    "cuMemGetAllocationGranularity(size_t *granularity, const CUmemAllocationProp *prop, "
    "CUmemAllocationGranularity_flags option)"
)
def cuMemGetAllocationGranularity(granularity: int, prop: int, option: int) -> None:
    if not granularity or option not in (0, 1):
        raise DriverError(Result.INVALID_VALUE)
    _device(_properties(prop).location)
    write(granularity, c_size_t, PAGE)


@entry("cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp *prop, CUmemGenericAllocationHandle handle)")
def cuMemGetAllocationPropertiesFromHandle(prop: int, handle: int) -> None:
    physical = _physical(handle)
    if not prop:
        raise DriverError(Result.INVALID_VALUE)
    location = _Location(_ON_DEVICE, physical.device.ordinal)
    value = _Properties(_PINNED, physical.handle_types, location, 0, 0)
    ctypes.memmove(prop, ctypes.addressof(value), ctypes.sizeof(value))


@entry("cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle, void *addr)")
def cuMemRetainAllocationHandle(handle: int, addr: int) -> None:
    mapping = state.machine.virtual.mapping_at(addr)
    if not handle or mapping is None:
        raise DriverError(Result.INVALID_VALUE, f"nothing is mapped at {addr:#x}")
    mapping.physical.references += 1
    state.machine.objects[mapping.physical.handle] = mapping.physical
    write(handle, c_uint64, mapping.physical.handle)


@entry(
    "cuMemExportToShareableHandle(void *shareableHandle, CUmemGenericAllocationHandle handle, "
    "CUmemAllocationHandleType handleType, unsigned long long flags)"
)
def cuMemExportToShareableHandle(shareableHandle: int, handle: int, handleType: int, flags: int) -> None:
    physical = _physical(handle)
    if not shareableHandle or handleType != _FILE_DESCRIPTOR or not physical.handle_types & handleType or flags:
        raise DriverError(
            Result.INVALID_VALUE,
            "memory can only be exported as a file descriptor, with flags 0, if it was created for that",
        )
    write(shareableHandle, c_int, physical.file.copied())
    state.machine.scheduler.share()


@entry(
    "cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle, void *osHandle, "
    "CUmemAllocationHandleType shHandleType)"
)
def cuMemImportFromShareableHandle(handle: int, osHandle: int, shHandleType: int) -> None:
    context = current_context()
    if not handle or shHandleType != _FILE_DESCRIPTOR:
        raise DriverError(Result.INVALID_VALUE, "memory can only be imported from a file descriptor")
    write(handle, c_uint64, state.machine.virtual.adopt(context.device, c_int(osHandle).value).handle)
    state.machine.scheduler.share()


def _physical(handle: int) -> Physical:
    found = state.machine.objects.get(handle)
    if not isinstance(found, Physical) or not found.references:
        raise DriverError(Result.INVALID_VALUE, f"{handle:#x} is not a handle of physical memory")
    return found


def _properties(address: int) -> _Properties:
    if not address:
        raise DriverError(Result.INVALID_VALUE)
    properties = _Properties.from_address(address)
    if properties.type != _PINNED:
        raise DriverError(Result.INVALID_VALUE, "the type of physical memory must be CU_MEM_ALLOCATION_TYPE_PINNED")
    if properties.requestedHandleTypes & ~_FILE_DESCRIPTOR:
        raise DriverError(Result.NOT_SUPPORTED, "physical memory can only be shared by file descriptor")
    return properties


def _device(location: _Location) -> Device:
    if location.type != _ON_DEVICE:
        raise DriverError(Result.NOT_SUPPORTED, "only memory of a device can be mapped")
    return state.machine.device(location.id)
