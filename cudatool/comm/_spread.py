"""Broadcast, scatter and gather: copies between devices."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import numpy.typing as npt

from cudatool.errors import UsageError
from cudatool.runtime.array import DeviceArray, empty
from cudatool.runtime.device import DeviceLike, device_indices
from cudatool.runtime.dtypes import require_int
from cudatool.runtime.peer import copy_between
from cudatool.runtime.stream import Stream, StreamContext
from cudatool.runtime.traced_calls import traced

__all__ = ["broadcast", "gather", "scatter"]

_Array = DeviceArray | npt.NDArray[Any]


@traced
def broadcast(
    tensor: _Array, devices: Iterable[DeviceLike] | None = None, *, out: Sequence[DeviceArray] | None = None
) -> tuple[DeviceArray, ...]:
    """Copy an array to several devices.

    Parameters
    ----------
    tensor
        A device array or a NumPy array.
    devices
        Where copies are wanted. For the device that the array is on, the result is the array itself.
    out
        Instead of `devices`: the arrays to copy into, of the same shape. One may be `tensor`.

    Returns
    -------
    tuple of DeviceArray
        One for each device, or `out`.

    Raises
    ------
    UsageError
        Both or none of `devices` and `out` are given, or an array of `out` does not fit.
    """
    if (devices is None) == (out is None):
        raise UsageError(f"Exactly one of 'devices' and 'out' must be specified, but got {devices=} and {out=}")
    source = _source(tensor)
    if devices is not None:
        indices = device_indices(devices)
        result = [
            source
            if isinstance(source, DeviceArray) and source.device == index
            else empty(source.shape, source.dtype, device=index)
            for index in indices
        ]
    else:
        result = _outputs(out)
        for place, array in enumerate(result):
            if array.shape != source.shape:
                raise UsageError(
                    "Expected all output tensors to have same shape as the source tensor "
                    f"{source.shape}, but output tensor at index {place} has shape {array.shape}"
                )
    _copy_all([(target, source) for target in result if target is not source])
    return tuple(result)


@traced
def scatter(
    tensor: _Array,
    devices: Iterable[DeviceLike] | None = None,
    chunk_sizes: Iterable[int] | None = None,
    dim: int = 0,
    streams: Sequence[Stream | None] | None = None,
    *,
    out: Sequence[DeviceArray] | None = None,
) -> tuple[DeviceArray, ...]:
    """Cut an array along a dimension, and copy each chunk to a device.

    Parameters
    ----------
    tensor
        A device array or a NumPy array.
    devices
        One for each chunk. A chunk that is on its device already is a view of `tensor`.
    chunk_sizes
        Extents of the chunks along `dim`, which add up to the array's. Default: equal, the last one may be shorter.
    streams
        For each chunk, a stream of its device to copy on; default, also for None: the device's current stream.
    out
        Instead of `devices` and `chunk_sizes`: the arrays to copy into, whose shapes are those of the chunks.

    Raises
    ------
    UsageError
        What is given does not fit together.
    """
    source = _source(tensor)
    axis = _axis(dim, source.ndim)
    if out is None:
        indices, sizes = _cut_for(devices, chunk_sizes, source.shape[axis], dim)
    else:
        for name, value in (("devices", devices), ("chunk_sizes", chunk_sizes)):
            if value is not None:
                raise UsageError(f"'{name}' must not be specified when 'out' is specified, but got {name}={value!r}")
        out = _outputs(out)
        indices, sizes = [array.device for array in out], _sizes_of(out, source, axis)
    chunks = [source[index] for index in _cuts(axis, sizes)]
    lanes = _lanes(indices, streams or ())
    result: list[Any] = [None] * len(chunks) if out is None else out
    waiting = list(range(len(chunks)))  # there may be fewer chunks than devices
    while waiting:  # once, unless a device is to copy on several streams: it has one current stream
        first = {indices[place]: lanes[place] for place in reversed(waiting)}
        now = [place for place in waiting if lanes[place] == first[indices[place]]]
        with ExitStack() as current:
            for stream in first.values():
                current.enter_context(StreamContext(stream))
            for place in now if out is None else ():
                chunk, index = chunks[place], indices[place]
                is_there = isinstance(chunk, DeviceArray) and chunk.device == index
                result[place] = chunk if is_there else empty(chunk.shape, chunk.dtype, device=index)
            _copy_all([(result[place], chunks[place]) for place in now if result[place] is not chunks[place]])
        waiting = [place for place in waiting if place not in now]
    return tuple(result)


def _lanes(indices: Sequence[int], streams: Sequence[Stream | None]) -> list[Stream | None]:
    """Return the stream that is given for each chunk, None where none is."""
    for place, (index, stream) in enumerate(zip(indices, streams, strict=False)):
        if stream is None:
            continue
        if not isinstance(stream, Stream):
            raise UsageError(f"streams are Streams or None; the one at index {place} is {type(stream).__name__}")
        if stream.device_index != index:
            raise UsageError(
                f"Expected the device associated with the stream at index {place} (was {stream.device_index}) "
                f"to match the device supplied at that index (expected {index})"
            )
    return [*streams, *[None] * (len(indices) - len(streams))]


def _cut_for(
    devices: Iterable[DeviceLike] | None, chunk_sizes: Iterable[int] | None, extent: int, dim: int
) -> tuple[list[int], list[int]]:
    """Return the devices of chunks, and the extents of these along a dimension."""
    indices = device_indices(devices or ())
    if not indices:
        raise UsageError("Expected at least one device to scatter to")
    if chunk_sizes is None:
        return indices, _equal(extent, len(indices))
    sizes = list(chunk_sizes)
    if len(sizes) != len(indices):
        raise UsageError(
            "Expected devices and chunk_sizes to be of same length, but got "
            f"len(devices) = {len(indices)} and len(chunk_sizes) = {len(sizes)}"
        )
    if sum(sizes) != extent or min(sizes) < 0:
        raise UsageError(f"chunk_sizes {sizes} do not add up to {extent}, the extent of dimension {dim}")
    return indices, sizes


@traced
def gather(
    tensors: Iterable[DeviceArray],
    dim: int = 0,
    destination: DeviceLike = None,
    *,
    out: _Array | None = None,
) -> _Array:
    """Return arrays of several devices one after the other along a dimension.

    Parameters
    ----------
    tensors
        Arrays of one dtype, with the same extents except along `dim`.
    destination
        The device that the result is on, by default the current one; ``"cpu"``: a NumPy array, when all is there.
    out
        Instead: the array, on a device or NumPy's, that the result is copied into.

    Raises
    ------
    UsageError
        What is given does not fit together.
    """
    if isinstance(tensors, DeviceArray) or not isinstance(tensors, Iterable):
        raise UsageError(f"gather takes a list of DeviceArrays, not {type(tensors).__name__}")
    parts = list(tensors)
    if out is not None and destination is not None:
        raise UsageError(f"'destination' must not be specified when 'out' is specified, but got {destination=}")
    if not parts:
        raise UsageError("Expected at least one tensor to gather from")
    first = parts[0]
    for place, part in enumerate(parts):
        if not isinstance(part, DeviceArray):
            raise UsageError(
                f"Expected all input tensors to be CUDA tensors, but tensor at index {place} is a {type(part).__name__}"
            )
        if part.ndim != first.ndim:
            raise UsageError(
                "Expected all input tensors to have the same number of dimensions, but tensor at index "
                f"{place} has {part.ndim} dimensions (expected {first.ndim})"
            )
    axis = _axis(dim, first.ndim)
    for place, part in enumerate(parts):
        wanted = (*first.shape[:axis], part.shape[axis], *first.shape[axis + 1 :])
        if part.shape != wanted:
            raise UsageError(f"Input tensor at index {place} has invalid shape {part.shape}, but expected {wanted}")
        if part.dtype != first.dtype:
            raise UsageError(f"Input tensor at index {place} has dtype {part.dtype}, but expected {first.dtype}")
    sizes = [part.shape[axis] for part in parts]
    shape = (*first.shape[:axis], sum(sizes), *first.shape[axis + 1 :])
    result: _Array
    if out is not None:
        if not isinstance(out, DeviceArray | np.ndarray):
            raise UsageError(f"out is a DeviceArray or a NumPy array, not {type(out).__name__}")
        if out.shape != shape:
            raise UsageError(f"Expected out tensor to have shape {shape}, but got {out.shape}")
        result = out
    elif destination == "cpu":
        result = np.empty(shape, first.dtype)
    else:
        result = empty(shape, first.dtype, device=destination)
    cuts = _cuts(axis, sizes)
    if isinstance(result, DeviceArray):
        _copy_all([(result[cut], part) for cut, part in zip(cuts, parts, strict=True)])
    else:
        for cut, part in zip(cuts, parts, strict=True):
            result[cut] = part.get()
    return result


def _source(tensor: Any) -> _Array:
    return tensor if isinstance(tensor, DeviceArray) else np.asarray(tensor)


def _outputs(out: Any) -> list[DeviceArray]:
    if isinstance(out, DeviceArray) or not isinstance(out, Iterable):
        raise UsageError(f"out is a list of DeviceArrays, not {type(out).__name__}")
    found = list(out)
    for place, array in enumerate(found):
        if not isinstance(array, DeviceArray):
            raise UsageError(
                "Expected all output tensors to be CUDA tensors, but output tensor at index "
                f"{place} is a {type(array).__name__}"
            )
    return found


def _axis(dim: int, ndim: int) -> int:
    dim = require_int("dim", dim)
    if not -ndim <= dim < ndim:
        raise UsageError(f"there is no dimension {dim}: the array has {ndim}")
    return dim % ndim


def _equal(extent: int, parts: int) -> list[int]:
    """Return the extents of chunks as torch.chunk makes them: each but the last is as large as they can be equally."""
    size = max(-(-extent // parts), 1)
    return [min(size, extent - start) for start in range(0, extent, size)] or [0]


def _sizes_of(out: Sequence[DeviceArray], source: _Array, axis: int) -> list[int]:
    """Return the extents of the chunks that go into `out`."""
    if not out:
        raise UsageError("Expected at least one output tensor to scatter to")
    for place, array in enumerate(out):
        rest = [extent for d, extent in enumerate(source.shape) if d != axis]
        if array.ndim != source.ndim or rest != [extent for d, extent in enumerate(array.shape) if d != axis]:
            raise UsageError(
                f"Output tensor at index {place} has incorrect shape {array.shape}: the source has {source.shape}, "
                f"and only dimension {axis} may differ"
            )
    sizes = [array.shape[axis] for array in out]
    if sum(sizes) != source.shape[axis]:
        raise UsageError(
            f"Total size for output tensors along scatter dim {axis} does not match source tensor size at dim {axis}: "
            f"{sum(sizes)}, but expected {source.shape[axis]}"
        )
    return sizes


def _cuts(axis: int, sizes: Sequence[int]) -> list[tuple[slice, ...]]:
    """Return the indices of chunks of these extents along a dimension."""
    ends = [0, *itertools.accumulate(sizes)]
    return [(*[slice(None)] * axis, slice(start, stop)) for start, stop in itertools.pairwise(ends)]


def _copy_all(copies: Sequence[tuple[DeviceArray, _Array]]) -> None:
    """Enqueue copies; those between devices run at the same time where they can."""
    between = []
    for target, source in copies:
        if isinstance(source, DeviceArray) and source.device != target.device:
            between.append((target, source))
        else:
            target.copy_(source, non_blocking=True)
    copy_between(between)
