"""reduce_add: copies to one device, and additions there."""

from __future__ import annotations

from collections.abc import Iterable

from cudatool import ops
from cudatool.errors import UsageError
from cudatool.runtime.array import DeviceArray, empty, list_of_arrays
from cudatool.runtime.device import DeviceLike, device_index
from cudatool.runtime.peer import copy_between
from cudatool.runtime.traced_calls import traced

__all__ = ["reduce_add"]


@traced
def reduce_add(inputs: Iterable[DeviceArray], destination: DeviceLike = None) -> DeviceArray:
    """Return the sum of arrays of several devices, on one of them.

    Parameters
    ----------
    inputs
        Of one shape and dtype. If there is one, it is the result.
    destination
        The device of the result, which one of the inputs is on; default: the current device.

    Raises
    ------
    UsageError
        The inputs do not fit each other, or none is on `destination`.
    """
    parts = list_of_arrays("reduce_add", inputs)
    if not parts:
        raise UsageError("reduce_add needs at least one array")
    first = parts[0]
    for place, part in enumerate(parts):
        if (part.shape, part.dtype) != (first.shape, first.dtype):
            raise UsageError(
                f"input {place} has invalid size: got {part.dtype} {part.shape}, "
                f"but expected {first.dtype} {first.shape}"
            )
    index = device_index(destination)
    root = next((place for place, part in enumerate(parts) if part.device == index), None)
    if root is None:
        raise UsageError("reduce_add expects destination to be on the same GPU with one of the tensors")
    if len(parts) == 1:
        return first
    # The others arrive at the same time, then are added in their order: the result does not depend on who is first.
    here = [
        part if part.device == index else empty(part.shape, part.dtype, device=index)
        for place, part in enumerate(parts)
        if place != root
    ]
    away = [part for place, part in enumerate(parts) if place != root]
    copy_between([(to, from_) for to, from_ in zip(here, away, strict=True) if to is not from_])
    result: DeviceArray = ops.add(parts[root], here[0])
    for other in here[1:]:
        ops.add(result, other, out=result)
    return result
