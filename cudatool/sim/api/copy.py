"""Driver entry points: copies and fills, the part of "Memory Management" whose names begin with cuMemcpy and cuMemset.

Grouped as in the CUDA driver API reference. :mod:`cudatool.sim.transfers` does the work.
"""

from __future__ import annotations

import bisect
import ctypes
from ctypes import c_int, c_size_t, c_uint64
from typing import Final

from cudatool.sim import profile
from cudatool.sim.abi import entry
from cudatool.sim.boxes import DEVICE, BatchOperation, Memcpy3D, box_of, read_2d, read_3d
from cudatool.sim.machine import context_behind, current_context, stream_of
from cudatool.sim.results import DriverError, Result
from cudatool.sim.transfers import Box, copy, copy_box, fill, need_device

__all__ = ["batch_of", "batch_of_boxes", "check_peers", "reads_now"]


class _CopyAttributes(ctypes.Structure):
    """CUmemcpyAttributes."""

    _fields_ = (
        ("srcAccessOrder", c_int),
        ("srcLocHint", c_int * 2),
        ("dstLocHint", c_int * 2),
        ("flags", ctypes.c_uint),
    )


_ORDER_STREAM, _ORDER_DURING_API_CALL, _ORDER_ANY = 1, 2, 3  # CU_MEMCPY_SRC_ACCESS_ORDER_*


def reads_now(address: int) -> bool:
    """Return whether a copy with the CUmemcpyAttributes at an address reads its source before the call returns."""
    if not address:
        raise DriverError(Result.INVALID_VALUE)
    return _is_now(_CopyAttributes.from_address(address).srcAccessOrder)


def _is_now(order: int) -> bool:
    if order not in (_ORDER_STREAM, _ORDER_DURING_API_CALL, _ORDER_ANY):
        raise DriverError(Result.INVALID_VALUE, f"{order} is not a CUmemcpySrcAccessOrder")
    return order == _ORDER_DURING_API_CALL


# ---- One dimension ----

# Which of the destination and the source are device pointers.
_TO_DEVICE, _FROM_DEVICE, _ON_DEVICE = (True, False), (False, True), (True, True)


@entry("cuMemcpy(CUdeviceptr dst, CUdeviceptr src, size_t ByteCount)")
def cuMemcpy(dst: int, src: int, ByteCount: int) -> None:
    copy(dst, src, ByteCount, None, "cuMemcpy")


@entry("cuMemcpyHtoD(CUdeviceptr dstDevice, const void *srcHost, size_t ByteCount)")
def cuMemcpyHtoD(dstDevice: int, srcHost: int, ByteCount: int) -> None:
    copy(dstDevice, srcHost, ByteCount, None, "cuMemcpyHtoD", known=_TO_DEVICE)


@entry("cuMemcpyDtoH(void *dstHost, CUdeviceptr srcDevice, size_t ByteCount)")
def cuMemcpyDtoH(dstHost: int, srcDevice: int, ByteCount: int) -> None:
    copy(dstHost, srcDevice, ByteCount, None, "cuMemcpyDtoH", known=_FROM_DEVICE)


@entry("cuMemcpyDtoD(CUdeviceptr dstDevice, CUdeviceptr srcDevice, size_t ByteCount)")
def cuMemcpyDtoD(dstDevice: int, srcDevice: int, ByteCount: int) -> None:
    copy(dstDevice, srcDevice, ByteCount, None, "cuMemcpyDtoD", known=_ON_DEVICE)


@entry("cuMemcpyAsync(CUdeviceptr dst, CUdeviceptr src, size_t ByteCount, CUstream hStream)")
def cuMemcpyAsync(dst: int, src: int, ByteCount: int, hStream: int) -> None:
    copy(dst, src, ByteCount, hStream, "cuMemcpyAsync")


@entry("cuMemcpyHtoDAsync(CUdeviceptr dstDevice, const void *srcHost, size_t ByteCount, CUstream hStream)")
def cuMemcpyHtoDAsync(dstDevice: int, srcHost: int, ByteCount: int, hStream: int) -> None:
    copy(dstDevice, srcHost, ByteCount, hStream, "cuMemcpyHtoDAsync", known=_TO_DEVICE)


@entry("cuMemcpyDtoHAsync(void *dstHost, CUdeviceptr srcDevice, size_t ByteCount, CUstream hStream)")
def cuMemcpyDtoHAsync(dstHost: int, srcDevice: int, ByteCount: int, hStream: int) -> None:
    copy(dstHost, srcDevice, ByteCount, hStream, "cuMemcpyDtoHAsync", known=_FROM_DEVICE)


@entry("cuMemcpyDtoDAsync(CUdeviceptr dstDevice, CUdeviceptr srcDevice, size_t ByteCount, CUstream hStream)")
def cuMemcpyDtoDAsync(dstDevice: int, srcDevice: int, ByteCount: int, hStream: int) -> None:
    copy(dstDevice, srcDevice, ByteCount, hStream, "cuMemcpyDtoDAsync", known=_ON_DEVICE)


@entry(
    "cuMemcpyWithAttributesAsync(CUdeviceptr dst, CUdeviceptr src, size_t size, CUmemcpyAttributes *attr, "
    "CUstream hStream)"
)
def cuMemcpyWithAttributesAsync(dst: int, src: int, size: int, attr: int, hStream: int) -> None:
    copy(dst, src, size, hStream, "cuMemcpyWithAttributesAsync", now=reads_now(attr))


@entry(
    "cuMemcpyPeer(CUdeviceptr dstDevice, CUcontext dstContext, CUdeviceptr srcDevice, CUcontext srcContext, "
    "size_t ByteCount)"
)
def cuMemcpyPeer(dstDevice: int, dstContext: int, srcDevice: int, srcContext: int, ByteCount: int) -> None:
    check_peers(dstDevice, dstContext, srcDevice, srcContext, ByteCount)
    copy(dstDevice, srcDevice, ByteCount, None, "cuMemcpyPeer", peer=True)


@entry(
    "cuMemcpyPeerAsync(CUdeviceptr dstDevice, CUcontext dstContext, CUdeviceptr srcDevice, CUcontext srcContext, "
    "size_t ByteCount, CUstream hStream)"
)
def cuMemcpyPeerAsync(
    dstDevice: int, dstContext: int, srcDevice: int, srcContext: int, ByteCount: int, hStream: int
) -> None:
    check_peers(dstDevice, dstContext, srcDevice, srcContext, ByteCount)
    copy(dstDevice, srcDevice, ByteCount, hStream, "cuMemcpyPeerAsync", peer=True)


def check_peers(dst: int, dst_context: int, src: int, src_context: int, size: int) -> None:
    """Fail as cuMemcpyPeer does for handles of no context and for addresses of no device memory."""
    for address, handle in ((dst, dst_context), (src, src_context)):
        context_behind(handle)
        need_device(address, size)


@entry(
    "cuMemcpyBatchAsync(CUdeviceptr *dsts, CUdeviceptr *srcs, size_t *sizes, size_t count, "
    "CUmemcpyAttributes *attrs, size_t *attrsIdxs, size_t numAttrs, CUstream hStream)"
)
def cuMemcpyBatchAsync(
    dsts: int, srcs: int, sizes: int, count: int, attrs: int, attrsIdxs: int, numAttrs: int, hStream: int
) -> None:
    # The copies of a batch have no order; here they run in theirs.
    for target, source, size, now in batch_of(dsts, srcs, sizes, count, attrs, attrsIdxs, numAttrs, hStream):
        copy(target, source, size, hStream, "cuMemcpyBatchAsync", now=now, footprint=True)


def _check_batch_stream(hStream: int) -> None:
    stream = stream_of(hStream)
    if stream is stream.context.legacy_stream:
        raise DriverError(
            Result.INVALID_VALUE, "batched copies cannot run in the legacy default stream; pass another stream"
        )


def batch_of(
    dsts: int, srcs: int, sizes: int, count: int, attrs: int, attrsIdxs: int, numAttrs: int, hStream: int
) -> list[tuple[int, int, int, bool]]:
    """Return target, source, bytes and :func:`reads_now` of each copy that cuMemcpyBatchAsync was asked for.

    Raises
    ------
    DriverError
        CUDA_ERROR_INVALID_VALUE for the legacy default stream, for copies of nothing, and if not every copy has
        attributes.
    """
    _check_batch_stream(hStream)
    if not count or not numAttrs or numAttrs > count or not all((dsts, srcs, sizes, attrs, attrsIdxs)):
        raise DriverError(Result.INVALID_VALUE)
    starts = list((c_size_t * numAttrs).from_address(attrsIdxs))
    if starts[0] or starts != sorted(set(starts)) or starts[-1] >= count:
        raise DriverError(Result.INVALID_VALUE, "attrsIdxs must begin with 0, ascend, and stay below count")
    orders = [reads_now(attrs + index * ctypes.sizeof(_CopyAttributes)) for index in range(numAttrs)]
    targets, sources = (c_uint64 * count).from_address(dsts), (c_uint64 * count).from_address(srcs)
    lengths = (c_size_t * count).from_address(sizes)
    if not all((*targets, *sources, *lengths)):
        raise DriverError(Result.INVALID_VALUE, "every copy of a batch must have at least one byte")
    now = [orders[bisect.bisect_right(starts, index) - 1] for index in range(count)]
    return list(zip(targets, sources, lengths, now, strict=True))


# ---- Two and three dimensions ----


_MAX_PITCH: Final = profile.ATTRIBUTES[11]
_ANY_PITCH: Final = 1 << 62


def _copy_boxes(
    what: Memcpy3D,
    hStream: int | None,
    name: str,
    *,
    peer: bool = False,
    now: bool = False,
    max_pitch: int = _MAX_PITCH,
) -> None:
    current_context()
    extent = what.extent
    if not extent.size:
        return
    if max(what.src.Pitch, what.dst.Pitch) > max_pitch:
        raise DriverError(Result.INVALID_VALUE, f"the largest pitch is {max_pitch} bytes")
    if peer:
        context_behind(what.src.context)
        context_behind(what.dst.context)
    to, source = box_of(what.dst, extent), box_of(what.src, extent)
    for side, box in ((what.dst, to), (what.src, source)):
        if side.MemoryType == DEVICE:
            need_device(box.address, box.span(extent))
    copy_box(to, source, extent, hStream, name, peer=peer, now=now)


@entry("cuMemcpy2D(const CUDA_MEMCPY2D *pCopy)")
def cuMemcpy2D(pCopy: int) -> None:
    _copy_boxes(read_2d(pCopy), None, "cuMemcpy2D")


@entry("cuMemcpy2DUnaligned(const CUDA_MEMCPY2D *pCopy)")
def cuMemcpy2DUnaligned(pCopy: int) -> None:
    _copy_boxes(read_2d(pCopy), None, "cuMemcpy2DUnaligned", max_pitch=_ANY_PITCH)


@entry("cuMemcpy2DAsync(const CUDA_MEMCPY2D *pCopy, CUstream hStream)")
def cuMemcpy2DAsync(pCopy: int, hStream: int) -> None:
    _copy_boxes(read_2d(pCopy), hStream, "cuMemcpy2DAsync")


@entry("cuMemcpy3D(const CUDA_MEMCPY3D *pCopy)")
def cuMemcpy3D(pCopy: int) -> None:
    _copy_boxes(read_3d(pCopy), None, "cuMemcpy3D")


@entry("cuMemcpy3DAsync(const CUDA_MEMCPY3D *pCopy, CUstream hStream)")
def cuMemcpy3DAsync(pCopy: int, hStream: int) -> None:
    _copy_boxes(read_3d(pCopy), hStream, "cuMemcpy3DAsync")


@entry("cuMemcpy3DPeer(const CUDA_MEMCPY3D_PEER *pCopy)")
def cuMemcpy3DPeer(pCopy: int) -> None:
    _copy_boxes(read_3d(pCopy), None, "cuMemcpy3DPeer", peer=True)


@entry("cuMemcpy3DPeerAsync(const CUDA_MEMCPY3D_PEER *pCopy, CUstream hStream)")
def cuMemcpy3DPeerAsync(pCopy: int, hStream: int) -> None:
    _copy_boxes(read_3d(pCopy), hStream, "cuMemcpy3DPeerAsync", peer=True)


@entry("cuMemcpy3DWithAttributesAsync(CUDA_MEMCPY3D_BATCH_OP *op, unsigned long long flags, CUstream hStream)")
def cuMemcpy3DWithAttributesAsync(op: int, flags: int, hStream: int) -> None:
    for what, now in batch_of_boxes(1, op, flags):
        _copy_boxes(what, hStream, "cuMemcpy3DWithAttributesAsync", now=now)


@entry(
    "cuMemcpy3DBatchAsync(size_t numOps, CUDA_MEMCPY3D_BATCH_OP *opList, unsigned long long flags, CUstream hStream)"
)
def cuMemcpy3DBatchAsync(numOps: int, opList: int, flags: int, hStream: int) -> None:
    _check_batch_stream(hStream)
    for what, now in batch_of_boxes(numOps, opList, flags):
        _copy_boxes(what, hStream, "cuMemcpy3DBatchAsync", now=now)


def batch_of_boxes(count: int, operations: int, flags: int) -> list[tuple[Memcpy3D, bool]]:
    """Return each copy of an array of CUDA_MEMCPY3D_BATCH_OP, and whether its source is read at once."""
    if not count or not operations or flags:
        raise DriverError(Result.INVALID_VALUE)
    given = (BatchOperation * count).from_address(operations)
    return [(one.as_3d(), _is_now(one.srcAccessOrder)) for one in given]


# ---- Fills ----


@entry("cuMemsetD8(CUdeviceptr dstDevice, unsigned char uc, size_t N)")
def cuMemsetD8(dstDevice: int, uc: int, N: int) -> None:
    fill(Box(dstDevice), uc, 1, N, 1, None, "cuMemsetD8")


@entry("cuMemsetD16(CUdeviceptr dstDevice, unsigned short us, size_t N)")
def cuMemsetD16(dstDevice: int, us: int, N: int) -> None:
    fill(Box(dstDevice), us, 2, N, 1, None, "cuMemsetD16")


@entry("cuMemsetD32(CUdeviceptr dstDevice, unsigned int ui, size_t N)")
def cuMemsetD32(dstDevice: int, ui: int, N: int) -> None:
    fill(Box(dstDevice), ui, 4, N, 1, None, "cuMemsetD32")


@entry("cuMemsetD8Async(CUdeviceptr dstDevice, unsigned char uc, size_t N, CUstream hStream)")
def cuMemsetD8Async(dstDevice: int, uc: int, N: int, hStream: int) -> None:
    fill(Box(dstDevice), uc, 1, N, 1, hStream, "cuMemsetD8Async")


@entry("cuMemsetD16Async(CUdeviceptr dstDevice, unsigned short us, size_t N, CUstream hStream)")
def cuMemsetD16Async(dstDevice: int, us: int, N: int, hStream: int) -> None:
    fill(Box(dstDevice), us, 2, N, 1, hStream, "cuMemsetD16Async")


@entry("cuMemsetD32Async(CUdeviceptr dstDevice, unsigned int ui, size_t N, CUstream hStream)")
def cuMemsetD32Async(dstDevice: int, ui: int, N: int, hStream: int) -> None:
    fill(Box(dstDevice), ui, 4, N, 1, hStream, "cuMemsetD32Async")


@entry("cuMemsetD2D8(CUdeviceptr dstDevice, size_t dstPitch, unsigned char uc, size_t Width, size_t Height)")
def cuMemsetD2D8(dstDevice: int, dstPitch: int, uc: int, Width: int, Height: int) -> None:
    fill(Box(dstDevice, dstPitch), uc, 1, Width, Height, None, "cuMemsetD2D8", footprint=True)


@entry(
    "cuMemsetD2D8Async(CUdeviceptr dstDevice, size_t dstPitch, unsigned char uc, size_t Width, size_t Height, "
    "CUstream hStream)"
)
def cuMemsetD2D8Async(dstDevice: int, dstPitch: int, uc: int, Width: int, Height: int, hStream: int) -> None:
    fill(Box(dstDevice, dstPitch), uc, 1, Width, Height, hStream, "cuMemsetD2D8Async", footprint=True)


@entry("cuMemsetD2D16(CUdeviceptr dstDevice, size_t dstPitch, unsigned short us, size_t Width, size_t Height)")
def cuMemsetD2D16(dstDevice: int, dstPitch: int, us: int, Width: int, Height: int) -> None:
    fill(Box(dstDevice, dstPitch), us, 2, Width, Height, None, "cuMemsetD2D16", footprint=True)


@entry(
    "cuMemsetD2D16Async(CUdeviceptr dstDevice, size_t dstPitch, unsigned short us, size_t Width, size_t Height, "
    "CUstream hStream)"
)
def cuMemsetD2D16Async(dstDevice: int, dstPitch: int, us: int, Width: int, Height: int, hStream: int) -> None:
    fill(Box(dstDevice, dstPitch), us, 2, Width, Height, hStream, "cuMemsetD2D16Async", footprint=True)


@entry("cuMemsetD2D32(CUdeviceptr dstDevice, size_t dstPitch, unsigned int ui, size_t Width, size_t Height)")
def cuMemsetD2D32(dstDevice: int, dstPitch: int, ui: int, Width: int, Height: int) -> None:
    fill(Box(dstDevice, dstPitch), ui, 4, Width, Height, None, "cuMemsetD2D32", footprint=True)


@entry(
    "cuMemsetD2D32Async(CUdeviceptr dstDevice, size_t dstPitch, unsigned int ui, size_t Width, size_t Height, "
    "CUstream hStream)"
)
def cuMemsetD2D32Async(dstDevice: int, dstPitch: int, ui: int, Width: int, Height: int, hStream: int) -> None:
    fill(Box(dstDevice, dstPitch), ui, 4, Width, Height, hStream, "cuMemsetD2D32Async", footprint=True)
