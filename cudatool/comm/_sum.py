"""reduce_add: copies to one device, and additions there."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any, Final

import numpy as np

from cudatool import _cuda
from cudatool._api import traced
from cudatool._array import DeviceArray, empty
from cudatool._device import DeviceLike, device_index
from cudatool._device import device as on_device
from cudatool._kernel import compile, launch
from cudatool._peer import copy_between
from cudatool._stream import current_stream
from cudatool.errors import UsageError

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
    parts = list(inputs)
    if not parts:
        raise UsageError("reduce_add needs at least one array")
    first = parts[0]
    for place, part in enumerate(parts):
        if not isinstance(part, DeviceArray):
            raise UsageError(f"reduce_add expects all inputs to be on GPUs; input {place} is a {type(part).__name__}")
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
    result = empty(first.shape, first.dtype, device=index)
    _add(parts[root], here[0], result)
    for other in here[1:]:
        _add(result, other, result)
    return result


_SOURCE: Final = """
%s
extern "C" __global__ void add(const T *a, const T *b, T *sum, long long n) {
    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) sum[i] = a[i] + b[i];
}
"""
_TYPES: Final = {
    # name of the dtype -> what is T
    "bool": "typedef bool T;",
    "int8": "typedef signed char T;",
    "uint8": "typedef unsigned char T;",
    "int16": "typedef short T;",
    "uint16": "typedef unsigned short T;",
    "int32": "typedef int T;",
    "uint32": "typedef unsigned int T;",
    "int64": "typedef long long T;",
    "uint64": "typedef unsigned long long T;",
    "float16": "#include <cuda_fp16.h>\ntypedef __half T;",
    "bfloat16": "#include <cuda_bf16.h>\ntypedef __nv_bfloat16 T;",
    "float32": "typedef float T;",
    "float64": "typedef double T;",
}
_THREADS: Final = 256


@functools.cache
def _kernel(dtype: str, device: int) -> Any:
    with on_device(device):
        return compile(_SOURCE % _TYPES[dtype], "add")


def _add(a: DeviceArray, b: DeviceArray, result: DeviceArray) -> None:
    """Enqueue ``result = a + b`` on the current stream of their device."""
    dtype, size = result.dtype, result.size
    if dtype.kind == "c":
        dtype, size = np.empty(0, dtype).real.dtype, 2 * size
    if dtype.name not in _TYPES:
        raise UsageError(f"reduce_add cannot add arrays of {dtype}")
    if size:
        config = _cuda.core.LaunchConfig(grid=-(-size // _THREADS), block=_THREADS)
        arguments = a.contiguous(), b.contiguous(), result, size
        launch(current_stream(result.device), config, _kernel(dtype.name, result.device), *arguments)
