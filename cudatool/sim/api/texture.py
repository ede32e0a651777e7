"""Driver entry points: arrays, copies to and from them, texture objects, surface objects.

Not here: sparse arrays, resource views that change an array's format, texture references
(removed from CUDA).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_size_t, c_uint64

from cudatool.cuda_arrays import CUBEMAP, LAYERED, array_bytes, level_extents
from cudatool.sim import machine as state
from cudatool.sim import profile
from cudatool.sim.abi import entry, write
from cudatool.sim.machine import current_context
from cudatool.sim.results import DriverError, Result
from cudatool.sim.textures import FORMATS, Array, MipmappedArray, SurfaceObject, TextureObject, TextureRecord, describe
from cudatool.sim.transfers import copy

__all__ = ["array_of"]

_SURFACE_LDST, _GATHER = 2, 8  # CUDA_ARRAY3D_*
_AS_INTEGER, _NORMALIZED, _SRGB = 0x01, 0x02, 0x10  # CU_TRSF_*
_ARRAY, _MIPMAPPED_ARRAY, _LINEAR, _PITCH2D = range(4)  # CUresourcetype
_TEXTURE_ALIGNMENT, _PITCH_ALIGNMENT = 14, 51  # CU_DEVICE_ATTRIBUTE_*
_LINEAR_LIMITS, _PITCH2D_LIMITS = (69,), (70, 71, 72)  # the same, MAXIMUM_TEXTURE1D_LINEAR_WIDTH and the like
_MAX_EXTENT = 131072, 65536, 16384  # CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE1D_WIDTH and the like


class _ArrayDescriptor(ctypes.Structure):
    """CUDA_ARRAY_DESCRIPTOR."""

    _fields_ = (("Width", c_size_t), ("Height", c_size_t), ("Format", ctypes.c_int), ("NumChannels", ctypes.c_uint))


class _Array3DDescriptor(ctypes.Structure):
    """CUDA_ARRAY3D_DESCRIPTOR."""

    _fields_ = (
        ("Width", c_size_t),
        ("Height", c_size_t),
        ("Depth", c_size_t),
        ("Format", ctypes.c_int),
        ("NumChannels", ctypes.c_uint),
        ("Flags", ctypes.c_uint),
    )


class _ResourceDescriptor(ctypes.Structure):
    """CUDA_RESOURCE_DESC; of its union the fields of pitched memory, which the others begin with."""

    _fields_ = (
        ("resType", ctypes.c_int),
        ("pointer", c_uint64),  # or the array's handle
        ("format", ctypes.c_int),
        ("numChannels", ctypes.c_uint),
        ("width", c_size_t),  # of linear memory its size, bytes
        ("height", c_size_t),
        ("pitchInBytes", c_size_t),
        ("reserved", ctypes.c_ubyte * 88),
        ("flags", ctypes.c_uint),
    )


class _TextureDescriptor(ctypes.Structure):
    """CUDA_TEXTURE_DESC."""

    _fields_ = (
        ("addressMode", ctypes.c_int * 3),
        ("filterMode", ctypes.c_int),
        ("flags", ctypes.c_uint),
        ("maxAnisotropy", ctypes.c_uint),
        ("mipmapFilterMode", ctypes.c_int),
        ("mipmapLevelBias", ctypes.c_float),
        ("minMipmapLevelClamp", ctypes.c_float),
        ("maxMipmapLevelClamp", ctypes.c_float),
        ("borderColor", ctypes.c_float * 4),
        ("reserved", ctypes.c_int * 12),
    )


_VIEW_BYTES = 112  # CUDA_RESOURCE_VIEW_DESC


def array_of(handle: int) -> Array:
    """Return the live array of a handle, else fail with CUDA_ERROR_INVALID_HANDLE."""
    return state.machine.get(handle, Array)


# ---- arrays ----


def _check(pHandle: int, wanted: _Array3DDescriptor) -> None:
    if not pHandle or not wanted.Width or wanted.Format not in FORMATS or wanted.NumChannels not in (1, 2, 4):
        raise DriverError(Result.INVALID_VALUE)
    extent = wanted.Width, wanted.Height, wanted.Depth
    if any(size > limit for size, limit in zip(extent, _MAX_EXTENT, strict=True)):
        raise DriverError(Result.INVALID_VALUE, f"an array of {extent}")
    if wanted.Flags & ~(LAYERED | _SURFACE_LDST | CUBEMAP | _GATHER):
        raise DriverError(Result.NOT_SUPPORTED, f"array flags {wanted.Flags:#x}")
    if wanted.Flags & CUBEMAP and (wanted.Width != wanted.Height or wanted.Depth % 6 or not wanted.Depth):
        raise DriverError(
            Result.INVALID_VALUE, "a cubemap needs a width equal to its height, and a depth that is a multiple of 6"
        )
    if wanted.Depth and not wanted.Height and not wanted.Flags & LAYERED:
        raise DriverError(Result.INVALID_VALUE, "an array with depth and no height must be layered")


def _create(wanted: _Array3DDescriptor, levels: int) -> list[Array]:
    """Return registered arrays in one allocation, each half the size of the one before."""
    context = current_context()
    extents = level_extents((wanted.Width, wanted.Height, wanted.Depth), wanted.Flags, levels)
    sizes = [array_bytes(*extent, wanted.NumChannels * FORMATS[wanted.Format][1]) for extent in extents]
    allocation = state.machine.allocate(context.device, sum(sizes), "array", context=context)
    arrays = []
    for number, extent in enumerate(extents):
        handle = state.machine.new_handle()
        array = Array(handle, *extent, wanted.Format, wanted.NumChannels, wanted.Flags, allocation)
        array.offset, array.is_level = sum(sizes[:number]), levels > 0
        state.machine.objects[handle] = array
        arrays.append(array)
    return arrays


@entry("cuArrayCreate(CUarray *pHandle, const CUDA_ARRAY_DESCRIPTOR *pAllocateArray)")
def cuArrayCreate(pHandle: int, pAllocateArray: int) -> None:
    if not pAllocateArray:
        raise DriverError(Result.INVALID_VALUE)
    given = _ArrayDescriptor.from_address(pAllocateArray)
    wanted = _Array3DDescriptor(given.Width, given.Height, 0, given.Format, given.NumChannels, 0)
    cuArray3DCreate(pHandle, ctypes.addressof(wanted))


@entry("cuArray3DCreate(CUarray *pHandle, const CUDA_ARRAY3D_DESCRIPTOR *pAllocateArray)")
def cuArray3DCreate(pHandle: int, pAllocateArray: int) -> None:
    if not pAllocateArray:
        raise DriverError(Result.INVALID_VALUE)
    wanted = _Array3DDescriptor.from_address(pAllocateArray)
    _check(pHandle, wanted)
    write(pHandle, c_uint64, _create(wanted, 0)[0].handle)


@entry("cuArrayDestroy(CUarray hArray)")
def cuArrayDestroy(hArray: int) -> None:
    context = current_context()
    array = array_of(hArray)
    if array.is_level:
        raise DriverError(
            Result.INVALID_HANDLE, "a level of a mipmapped array cannot be destroyed alone; destroy the mipmapped array"
        )
    del state.machine.objects[hArray]  # first: other threads may destroy it again during the wait
    state.machine.scheduler.wait_device(context.device)
    state.machine.will_release(array.allocation)
    state.machine.release(array.allocation)


@entry("cuArrayGetDescriptor(CUDA_ARRAY_DESCRIPTOR *pArrayDescriptor, CUarray hArray)")
def cuArrayGetDescriptor(pArrayDescriptor: int, hArray: int) -> None:
    array = array_of(hArray)
    if not pArrayDescriptor:
        raise DriverError(Result.INVALID_VALUE)
    found = _ArrayDescriptor(array.width, array.height, array.format, array.channels)
    ctypes.memmove(pArrayDescriptor, ctypes.addressof(found), ctypes.sizeof(found))


@entry("cuArray3DGetDescriptor(CUDA_ARRAY3D_DESCRIPTOR *pArrayDescriptor, CUarray hArray)")
def cuArray3DGetDescriptor(pArrayDescriptor: int, hArray: int) -> None:
    array = array_of(hArray)
    if not pArrayDescriptor:
        raise DriverError(Result.INVALID_VALUE)
    found = _Array3DDescriptor(array.width, array.height, array.depth, array.format, array.channels, array.flags)
    ctypes.memmove(pArrayDescriptor, ctypes.addressof(found), ctypes.sizeof(found))


@entry(
    "cuMipmappedArrayCreate(CUmipmappedArray *pHandle, const CUDA_ARRAY3D_DESCRIPTOR *pMipmappedArrayDesc, "
    "unsigned int numMipmapLevels)"
)
def cuMipmappedArrayCreate(pHandle: int, pMipmappedArrayDesc: int, numMipmapLevels: int) -> None:
    if not pMipmappedArrayDesc:
        raise DriverError(Result.INVALID_VALUE)
    wanted = _Array3DDescriptor.from_address(pMipmappedArrayDesc)
    _check(pHandle, wanted)
    # "clamped to the range [1, 1 + floor(log2(max(width, height, depth)))]" (cuMipmappedArrayCreate).
    levels = min(max(numMipmapLevels, 1), max(wanted.Width, wanted.Height, wanted.Depth).bit_length())
    arrays = _create(wanted, levels)
    handle = state.machine.new_handle()
    state.machine.objects[handle] = MipmappedArray(handle, arrays, arrays[0].allocation)
    write(pHandle, c_uint64, handle)


@entry("cuMipmappedArrayGetLevel(CUarray *pLevelArray, CUmipmappedArray hMipmappedArray, unsigned int level)")
def cuMipmappedArrayGetLevel(pLevelArray: int, hMipmappedArray: int, level: int) -> None:
    levels = state.machine.get(hMipmappedArray, MipmappedArray).levels
    if level >= len(levels):
        raise DriverError(Result.INVALID_VALUE, f"the mipmapped array has {len(levels)} levels")
    write(pLevelArray, c_uint64, levels[level].handle)


@entry("cuMipmappedArrayDestroy(CUmipmappedArray hMipmappedArray)")
def cuMipmappedArrayDestroy(hMipmappedArray: int) -> None:
    context = current_context()
    found = state.machine.get(hMipmappedArray, MipmappedArray)
    for handle in (hMipmappedArray, *(array.handle for array in found.levels)):
        del state.machine.objects[handle]
    state.machine.scheduler.wait_device(context.device)
    state.machine.will_release(found.allocation)
    state.machine.release(found.allocation)


def _within(handle: int, offset: int, size: int) -> int:
    """Return the address of a part of an array, which must lie in it."""
    array = array_of(handle)
    if offset + size > array.size:
        raise DriverError(Result.INVALID_VALUE, f"{size} bytes at {offset} of an array of {array.size} bytes")
    return array.address + offset


@entry("cuMemcpyHtoA(CUarray dstArray, size_t dstOffset, const void *srcHost, size_t ByteCount)")
def cuMemcpyHtoA(dstArray: int, dstOffset: int, srcHost: int, ByteCount: int) -> None:
    copy(_within(dstArray, dstOffset, ByteCount), srcHost, ByteCount, None, "cuMemcpyHtoA", footprint=True)


@entry("cuMemcpyAtoH(void *dstHost, CUarray srcArray, size_t srcOffset, size_t ByteCount)")
def cuMemcpyAtoH(dstHost: int, srcArray: int, srcOffset: int, ByteCount: int) -> None:
    copy(dstHost, _within(srcArray, srcOffset, ByteCount), ByteCount, None, "cuMemcpyAtoH", footprint=True)


@entry("cuMemcpyDtoA(CUarray dstArray, size_t dstOffset, CUdeviceptr srcDevice, size_t ByteCount)")
def cuMemcpyDtoA(dstArray: int, dstOffset: int, srcDevice: int, ByteCount: int) -> None:
    copy(_within(dstArray, dstOffset, ByteCount), srcDevice, ByteCount, None, "cuMemcpyDtoA", footprint=True)


@entry("cuMemcpyAtoD(CUdeviceptr dstDevice, CUarray srcArray, size_t srcOffset, size_t ByteCount)")
def cuMemcpyAtoD(dstDevice: int, srcArray: int, srcOffset: int, ByteCount: int) -> None:
    copy(dstDevice, _within(srcArray, srcOffset, ByteCount), ByteCount, None, "cuMemcpyAtoD", footprint=True)


@entry("cuMemcpyAtoA(CUarray dstArray, size_t dstOffset, CUarray srcArray, size_t srcOffset, size_t ByteCount)")
def cuMemcpyAtoA(dstArray: int, dstOffset: int, srcArray: int, srcOffset: int, ByteCount: int) -> None:
    to = _within(dstArray, dstOffset, ByteCount)
    copy(to, _within(srcArray, srcOffset, ByteCount), ByteCount, None, "cuMemcpyAtoA", footprint=True)


@entry("cuMemcpyHtoAAsync(CUarray dstArray, size_t dstOffset, const void *srcHost, size_t ByteCount, CUstream hStream)")
def cuMemcpyHtoAAsync(dstArray: int, dstOffset: int, srcHost: int, ByteCount: int, hStream: int) -> None:
    copy(_within(dstArray, dstOffset, ByteCount), srcHost, ByteCount, hStream, "cuMemcpyHtoAAsync", footprint=True)


@entry("cuMemcpyAtoHAsync(void *dstHost, CUarray srcArray, size_t srcOffset, size_t ByteCount, CUstream hStream)")
def cuMemcpyAtoHAsync(dstHost: int, srcArray: int, srcOffset: int, ByteCount: int, hStream: int) -> None:
    copy(dstHost, _within(srcArray, srcOffset, ByteCount), ByteCount, hStream, "cuMemcpyAtoHAsync", footprint=True)


# ---- texture and surface objects ----


def _resource_record(resource: _ResourceDescriptor) -> TextureRecord:
    if resource.flags:
        raise DriverError(Result.INVALID_VALUE, "flags of a resource descriptor must be zero")
    if resource.resType == _ARRAY:
        return array_of(resource.pointer).record()
    if resource.resType not in (_LINEAR, _PITCH2D):
        raise DriverError(Result.INVALID_VALUE)
    if resource.pointer % profile.ATTRIBUTES[_TEXTURE_ALIGNMENT]:
        raise DriverError(Result.INVALID_VALUE, f"{resource.pointer:#x} is not aligned for a texture")
    if resource.resType == _LINEAR:
        record = describe(resource.pointer, resource.format, resource.numChannels, 0, 1)
        width = resource.width // (record.channels * record.channel_bytes)
        _refuse_beyond(_LINEAR_LIMITS, width)
        record.width = width
    else:
        _refuse_beyond(_PITCH2D_LIMITS, resource.width, resource.height, resource.pitchInBytes)
        record = describe(resource.pointer, resource.format, resource.numChannels, resource.width, resource.height)
        if resource.pitchInBytes < record.row_bytes:
            raise DriverError(Result.INVALID_VALUE, f"a pitch of {resource.pitchInBytes} bytes is less than a row")
        if resource.pitchInBytes % profile.ATTRIBUTES[_PITCH_ALIGNMENT]:
            raise DriverError(Result.INVALID_VALUE, f"a pitch of {resource.pitchInBytes} bytes is not aligned")
        record.row_bytes = resource.pitchInBytes
    # Nothing is said of where it ends: a fetch beyond the allocation is an access as any other.
    if state.machine.locate(resource.pointer, 1) is None:
        raise DriverError(Result.INVALID_VALUE, f"{resource.pointer:#x} is not device memory")
    return record


def _refuse_beyond(attributes: Sequence[int], *sizes: int) -> None:
    """Refuse sizes beyond the device's limits."""
    for attribute, size in zip(attributes, sizes, strict=True):
        if size > profile.ATTRIBUTES[attribute]:
            limit = profile.ATTRIBUTES[attribute]
            raise DriverError(Result.INVALID_VALUE, f"{size:,} is more than the {limit:,} that a texture may have")


def _add_sampler(record: TextureRecord, kind: int, texture: _TextureDescriptor) -> None:
    """Write into the record of a texture how it is sampled."""
    if kind == _LINEAR:  # addressing and filter are ignored; beyond its end there is zero
        record.mode = (3, 3, 3)
    else:
        record.mode, record.border = texture.addressMode, texture.borderColor
        record.linear = texture.filterMode
        record.normalized = int(bool(texture.flags & _NORMALIZED))
    record.srgb = int(bool(texture.flags & _SRGB))
    record.as_integer = int(record.kind != 2 and (bool(texture.flags & _AS_INTEGER) or record.channel_bytes == 4))
    record.blends, record.bias = texture.mipmapFilterMode, texture.mipmapLevelBias
    record.least, record.most = texture.minMipmapLevelClamp, texture.maxMipmapLevelClamp
    if record.as_integer and (record.linear or (record.levels and record.blends)):
        raise DriverError(Result.INVALID_VALUE, "elements that are read as integers cannot be filtered")


@entry(
    "cuTexObjectCreate(CUtexObject *pTexObject, const CUDA_RESOURCE_DESC *pResDesc, const CUDA_TEXTURE_DESC *pTexDesc, "
    "const CUDA_RESOURCE_VIEW_DESC *pResViewDesc)"
)
def cuTexObjectCreate(pTexObject: int, pResDesc: int, pTexDesc: int, pResViewDesc: int) -> None:
    current_context()
    if not pTexObject or not pResDesc or not pTexDesc:
        raise DriverError(Result.INVALID_VALUE)
    resource, texture = _ResourceDescriptor.from_address(pResDesc), _TextureDescriptor.from_address(pTexDesc)
    if resource.resType == _MIPMAPPED_ARRAY:
        records = list(state.machine.get(resource.pointer, MipmappedArray).records())
        if not texture.flags & _NORMALIZED:
            raise DriverError(Result.INVALID_VALUE, "a mipmapped array needs CU_TRSF_NORMALIZED_COORDINATES")
    else:
        records = [_resource_record(resource)]
    for record in records:
        _add_sampler(record, resource.resType, texture)
    record = records[0]
    view = ctypes.string_at(pResViewDesc, _VIEW_BYTES) if pResViewDesc else b""
    handle = ctypes.addressof(record)
    state.machine.objects[handle] = TextureObject(record, bytes(resource), bytes(texture), view)
    write(pTexObject, c_uint64, handle)


@entry("cuSurfObjectCreate(CUsurfObject *pSurfObject, const CUDA_RESOURCE_DESC *pResDesc)")
def cuSurfObjectCreate(pSurfObject: int, pResDesc: int) -> None:
    current_context()
    if not pSurfObject or not pResDesc:
        raise DriverError(Result.INVALID_VALUE)
    resource = _ResourceDescriptor.from_address(pResDesc)
    if resource.resType != _ARRAY or not array_of(resource.pointer).flags & _SURFACE_LDST:
        raise DriverError(Result.INVALID_VALUE, "a surface needs an array made with CUDA_ARRAY3D_SURFACE_LDST")
    record = _resource_record(resource)
    handle = ctypes.addressof(record)
    state.machine.objects[handle] = SurfaceObject(record, bytes(resource))
    write(pSurfObject, c_uint64, handle)


_destroyed: list[TextureRecord] = []  # kept, so that their addresses are not used again and stale handles fault


def _destroy(handle: int, kind: type[TextureObject] | type[SurfaceObject]) -> None:
    record, context = state.machine.get(handle, kind).record, current_context()
    del state.machine.objects[handle]  # first: other threads may destroy it again during the wait
    _destroyed.append(record)
    state.machine.scheduler.wait_device(context.device)
    record.data = 0


@entry("cuTexObjectDestroy(CUtexObject texObject)")
def cuTexObjectDestroy(texObject: int) -> None:
    _destroy(texObject, TextureObject)


@entry("cuSurfObjectDestroy(CUsurfObject surfObject)")
def cuSurfObjectDestroy(surfObject: int) -> None:
    _destroy(surfObject, SurfaceObject)


def _give(address: int, data: bytes) -> None:
    if not address:
        raise DriverError(Result.INVALID_VALUE)
    ctypes.memmove(address, data, len(data))


@entry("cuTexObjectGetResourceDesc(CUDA_RESOURCE_DESC *pResDesc, CUtexObject texObject)")
def cuTexObjectGetResourceDesc(pResDesc: int, texObject: int) -> None:
    _give(pResDesc, state.machine.get(texObject, TextureObject).resource)


@entry("cuTexObjectGetTextureDesc(CUDA_TEXTURE_DESC *pTexDesc, CUtexObject texObject)")
def cuTexObjectGetTextureDesc(pTexDesc: int, texObject: int) -> None:
    _give(pTexDesc, state.machine.get(texObject, TextureObject).texture)


@entry("cuTexObjectGetResourceViewDesc(CUDA_RESOURCE_VIEW_DESC *pResViewDesc, CUtexObject texObject)")
def cuTexObjectGetResourceViewDesc(pResViewDesc: int, texObject: int) -> None:
    view = state.machine.get(texObject, TextureObject).view
    if not view:  # "specified for the texture object", or else it is an error
        raise DriverError(Result.INVALID_VALUE)
    _give(pResViewDesc, view)


@entry("cuSurfObjectGetResourceDesc(CUDA_RESOURCE_DESC *pResDesc, CUsurfObject surfObject)")
def cuSurfObjectGetResourceDesc(pResDesc: int, surfObject: int) -> None:
    _give(pResDesc, state.machine.get(surfObject, SurfaceObject).resource)
