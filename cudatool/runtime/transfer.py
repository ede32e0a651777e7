"""Copies and fills, enqueued on a stream.

Device memory comes as :data:`~cudatool.runtime.allocator.Layout`. Whole ranges are the driver's copies and memsets;
anything with gaps, another order of dimensions or another dtype is one kernel.
"""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from cudatool.errors import ShapeError, UsageError
from cudatool.loading.attached import attached
from cudatool.runtime import calls
from cudatool.runtime._native import address_of
from cudatool.runtime.allocator import Layout, allocate
from cudatool.runtime.calls import check, operation
from cudatool.runtime.capture import beside_captures, is_capturing
from cudatool.runtime.device import device as on_device
from cudatool.runtime.dtypes import NUMBER_TYPES, holds, is_number
from cudatool.runtime.extents import Extent, emit_extents, extents
from cudatool.runtime.pinned import is_pinned_address, note_use
from cudatool.runtime.stream import Stream
from cudatool.trace import hooks
from cudatool.trace.events import AccessFlag, CopyFlag, Kind

__all__ = ["broadcast", "copy_on_device", "copy_to_device", "copy_to_host", "fill"]


def broadcast(source: npt.NDArray[Any], shape: Any) -> npt.NDArray[Any]:
    """Return a view of host memory, or of a layout, in which the elements repeat.

    Raises
    ------
    ShapeError
        The shape does not fit.
    """
    try:
        return np.broadcast_to(source, shape)
    except (TypeError, ValueError):
        raise ShapeError(f"an array of shape {source.shape} is not broadcast to shape {shape}") from None


def copy_to_device(target: Layout, source: npt.NDArray[Any], stream: Stream) -> None:
    """Enqueue a copy of a host array, broadcast to the target's shape and cast to its dtype.

    Memory that is not pinned has been read when this returns; pinned memory is read when the stream gets there.

    Raises
    ------
    ShapeError
        The shapes do not fit.
    UsageError
        The source has no numbers that can be cast.
    """
    broadcast(source, target.shape)
    given = source
    try:
        if given.dtype.hasobject:
            raise TypeError("its elements are Python objects")
        source = np.asarray(given, target.dtype, order="C")
    except (TypeError, ValueError) as error:
        raise UsageError(f"{given.dtype} is not copied into an array of {target.dtype}: {error}") from None
    if hooks.wants_accesses and address_of(source) != address_of(given):
        emit_extents(Kind.HOST_ACCESS, extents(given), AccessFlag.READ)
    if source.shape == target.shape and target.flags.c_contiguous:
        _copy("cuMemcpyHtoDAsync", address_of(target), address_of(source), source.nbytes, stream)
    else:
        staged, _ = allocate(source.shape, source.dtype, stream)
        copy_to_device(staged, source, stream)
        copy_on_device(target, staged, stream)


def copy_to_host(target: npt.NDArray[Any], source: Layout, stream: Stream) -> None:
    """Enqueue a copy to a host array of the same shape and dtype, both in C order."""
    _copy("cuMemcpyDtoHAsync", address_of(target), address_of(source), source.nbytes, stream)


def copy_on_device(target: Layout, source: Layout, stream: Stream) -> None:
    """Enqueue a copy in device memory, broadcast to the target's shape and cast to its dtype.

    Raises
    ------
    ShapeError
        The shapes do not fit.
    UsageError
        The dtypes differ, and the device cannot cast one to the other.
    """
    if source.shape != target.shape:
        source = broadcast(source, target.shape)
    same_place = address_of(target) == address_of(source) and target.strides == source.strides
    if not same_place and np.may_share_memory(target, source):  # by bounds: nothing is read
        apart, _ = allocate(source.shape, source.dtype, stream)
        copy_on_device(apart, source, stream)
        source = apart
    if target.dtype == source.dtype and target.flags.c_contiguous and source.flags.c_contiguous:
        _copy("cuMemcpyDtoDAsync", address_of(target), address_of(source), target.nbytes, stream)
    elif target.size:
        attached("copy")(target, source, stream)  # a kernel


def fill(target: Layout, value: Any, stream: Stream) -> None:
    """Enqueue the setting of every element to `value`.

    Raises
    ------
    UsageError
        `value` is an array, or nothing that the dtype holds.
    """
    if not is_number(value) and np.ndim(value):
        raise UsageError(f"fill_ takes one value, not {np.size(value)}; use copy_")
    value = value[()] if isinstance(value, np.ndarray) else value
    if target.dtype in NUMBER_TYPES and not (is_number(value) and holds(target.dtype, value)):
        raise UsageError(f"fill_: {target.dtype} does not hold {value!r}")
    pattern = np.asarray(value).astype(target.dtype).tobytes()
    # As wide as the dtype, whatever the value: a finding's name, by which a baseline knows it, has the call's.
    width = math.gcd(4, target.itemsize)
    if target.flags.c_contiguous and pattern[:width] * (len(pattern) // width) == pattern:
        _memset(8 * width, address_of(target), int.from_bytes(pattern[:width], "little"), target.nbytes, stream)
        return
    # Word by word, into one element: a copy from the host would not be the same in a graph, which does it at replay.
    element, _ = allocate((), target.dtype, stream)
    for at in range(0, target.itemsize, width):
        word = int.from_bytes(pattern[at : at + width], "little")
        _memset(8 * width, address_of(element) + at, word, width, stream)
    copy_on_device(target, element, stream)


_DIRECTIONS: Final = {
    # API -> what is device memory
    "cuMemcpyHtoDAsync": CopyFlag.DESTINATION_DEVICE,
    "cuMemcpyDtoHAsync": CopyFlag.SOURCE_DEVICE,
    "cuMemcpyDtoDAsync": CopyFlag.DESTINATION_DEVICE | CopyFlag.SOURCE_DEVICE,
}


def _copy(name: str, target: int, source: int, size: int, stream: Stream) -> None:
    if not size:
        return
    handle = stream.native
    if name != "cuMemcpyDtoDAsync" and is_capturing(stream):
        _refuse_pageable(target if name == "cuMemcpyDtoHAsync" else source)
    with on_device(stream.device_index), beside_captures(), operation() as correlation:
        if correlation:  # before the call: one to pageable memory returns when the work is done
            _emit_copy(name, target, source, size, stream, correlation)
        check(getattr(calls.driver, name)(target, source, size, handle))
    if name != "cuMemcpyDtoDAsync":
        note_use(target if name == "cuMemcpyDtoHAsync" else source, stream)


def _refuse_pageable(address: int) -> None:
    if not is_pinned_address(address):
        raise UsageError(
            "cannot copy pageable host memory while the stream is captured into a graph: the copy would be done at "
            "each replay, when that memory may be gone; copy before the capture, or use pinned memory (pin_memory, "
            "empty_pinned) without waiting for it (non_blocking=True, blocking=False)"
        )


def _emit_copy(name: str, target: int, source: int, size: int, stream: Stream, correlation: int) -> None:
    flags = CopyFlag.ASYNC | _DIRECTIONS[name]
    if CopyFlag.SOURCE_DEVICE not in flags and not is_pinned_address(source):
        flags |= CopyFlag.SOURCE_PAGEABLE
    if CopyFlag.DESTINATION_DEVICE not in flags and not is_pinned_address(target):
        flags |= CopyFlag.DESTINATION_PAGEABLE
    device = stream.device_index
    hooks.emit(
        Kind.MEMCPY,
        device=device,
        stream=stream.trace_id(),
        correlation=correlation,
        name=name,
        address=target,
        size=size,
        aux0=source,
        flags=flags,
    )
    # Pageable memory is the host's business: it is read or written before the call returns.
    if CopyFlag.SOURCE_PAGEABLE not in flags:
        emit_extents(Kind.ACCESS, [Extent(source, size)], AccessFlag.READ, device=device, correlation=correlation)
    if CopyFlag.DESTINATION_PAGEABLE not in flags:
        emit_extents(Kind.ACCESS, [Extent(target, size)], AccessFlag.WRITE, device=device, correlation=correlation)


def _memset(bits: int, address: int, value: int, size: int, stream: Stream) -> None:
    if not size:
        return
    name, width, handle = f"cuMemsetD{bits}Async", bits // 8, stream.native
    with on_device(stream.device_index), operation() as correlation:
        check(getattr(calls.driver, name)(address, value, size // width, handle))
    if correlation:
        device = stream.device_index
        hooks.emit(
            Kind.MEMSET,
            device=device,
            stream=stream.trace_id(),
            correlation=correlation,
            name=name,
            address=address,
            size=size,
            aux0=value,
            aux1=width,
            flags=CopyFlag.ASYNC | CopyFlag.DESTINATION_DEVICE,
        )
        emit_extents(Kind.ACCESS, [Extent(address, size)], AccessFlag.WRITE, device=device, correlation=correlation)
