"""The coalesced forms: small arrays travel together, in buckets of one dtype."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import numpy as np

from cudatool.comm._spread import broadcast
from cudatool.comm._sum import reduce_add
from cudatool.errors import UsageError
from cudatool.runtime.array import DeviceArray, empty, list_of_arrays
from cudatool.runtime.device import DeviceLike, device_indices
from cudatool.runtime.traced_calls import traced

__all__ = ["broadcast_coalesced", "reduce_add_coalesced"]

_BUCKET: Final = 10 << 20  # bytes, torch's default


@traced
def broadcast_coalesced(
    tensors: Sequence[DeviceArray], devices: Iterable[DeviceLike], buffer_size: int = _BUCKET
) -> list[list[DeviceArray]]:
    """Copy arrays to several devices, many at a time.

    Parameters
    ----------
    tensors
        Arrays on the first of `devices`.
    devices
        Where copies are wanted.
    buffer_size
        Bytes that travel together, at most, unless one array is larger.

    Returns
    -------
    list of list of DeviceArray
        For each device, the arrays in their order; for the first device, `tensors` themselves.

    Raises
    ------
    UsageError
        An array is not on the first device.
    """
    indices = device_indices(devices)
    if not indices:
        raise UsageError("Expected at least one device to broadcast to")
    tensors = list_of_arrays("broadcast_coalesced", tensors)
    for place, array in enumerate(tensors):
        if array.device != indices[0]:
            raise UsageError(f"all tensors must be on devices[0], which is {indices[0]}; number {place} is {array!r}")
    result = [list(tensors) for _ in indices]  # what is not on the first device is replaced
    for bucket in _buckets(tensors, buffer_size):
        arrays = [tensors[place] for place in bucket]
        flats = broadcast(_flatten(arrays), indices[1:])
        for copies, flat in zip(result[1:], flats, strict=True):
            for place, part in zip(bucket, _unflatten(flat, arrays), strict=True):
                copies[place] = part
    return result


@traced
def reduce_add_coalesced(
    inputs: Sequence[Sequence[DeviceArray]], destination: DeviceLike = None, buffer_size: int = _BUCKET
) -> tuple[DeviceArray, ...]:
    """Return the sums of arrays of several devices, on one of them; many travel at a time.

    Parameters
    ----------
    inputs
        For each device its arrays; the n-th of each device have the same shape and dtype, and are added.
    destination, buffer_size
        As of :func:`reduce_add` and :func:`broadcast_coalesced`.

    Raises
    ------
    UsageError
        As :func:`reduce_add`; or the devices have different numbers of arrays.
    """
    if not isinstance(inputs, Iterable):
        raise UsageError(f"reduce_add_coalesced takes a list of lists of DeviceArrays, not {type(inputs).__name__}")
    inputs = [list_of_arrays("reduce_add_coalesced", arrays) for arrays in inputs]
    if not inputs or len({len(arrays) for arrays in inputs}) != 1:
        raise UsageError(f"every device needs the same number of arrays, not {[len(arrays) for arrays in inputs]}")
    for place, group in enumerate(zip(*inputs, strict=True)):
        if len({(array.shape, array.dtype) for array in group}) != 1:
            raise UsageError(f"the arrays at index {place} differ in shape or dtype: {list(group)}")
    sums: dict[int, DeviceArray] = {}
    for bucket in _buckets(inputs[0], buffer_size):
        flat = reduce_add([_flatten([arrays[place] for place in bucket]) for arrays in inputs], destination)
        sums.update(zip(bucket, _unflatten(flat, [inputs[0][place] for place in bucket]), strict=True))
    return tuple(sums[place] for place in range(len(inputs[0])))


def _buckets(arrays: Sequence[DeviceArray], limit: int) -> Iterator[list[int]]:
    """Yield which arrays travel together: of one dtype, in order, at most `limit` bytes."""
    filling: dict[np.dtype[np.generic], tuple[list[int], int]] = {}  # the bucket of each dtype, and its bytes
    for place, array in enumerate(arrays):
        bucket, size = filling.get(array.dtype, ([], 0))
        if bucket and size + array.nbytes > limit:
            yield bucket
            bucket, size = [], 0
        filling[array.dtype] = [*bucket, place], size + array.nbytes
    yield from (bucket for bucket, _ in filling.values())


def _flatten(arrays: Sequence[DeviceArray]) -> DeviceArray:
    """Return the elements of arrays of one dtype and device one after the other."""
    flat = empty(sum(array.size for array in arrays), arrays[0].dtype, device=arrays[0].device)
    for part, array in zip(_unflatten(flat, arrays), arrays, strict=True):
        part.copy_(array)
    return flat


def _unflatten(flat: DeviceArray, like: Sequence[DeviceArray]) -> Iterator[DeviceArray]:
    """Yield the parts of what :func:`_flatten` returned, in the shapes of `like`."""
    start = 0
    for array in like:
        stop = start + array.size
        yield flat[start:stop].reshape(array.shape)
        start = stop
