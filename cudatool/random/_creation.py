"""New arrays of random numbers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, SupportsIndex

import numpy as np
import numpy.typing as npt

from cudatool.errors import ShapeError, UsageError
from cudatool.random._fills import normal_, random_, uniform_
from cudatool.random._generator import Generator
from cudatool.random._kernels import operation
from cudatool.random._layout import empty_like
from cudatool.runtime.array import DeviceArray, empty
from cudatool.runtime.device import DeviceLike
from cudatool.runtime.dtypes import as_dtype, real

__all__ = ["normal", "rand", "rand_like", "randint", "randint_like", "randn", "randn_like", "target"]


def target(
    shape: tuple[Any, ...],
    dtype: npt.DTypeLike | None,
    default: npt.DTypeLike,
    device: DeviceLike,
    out: DeviceArray | None,
    generator: Generator | None,
) -> DeviceArray:
    """Return `out`, or a new array, for a shape that may be one tuple.

    Raises
    ------
    UsageError
        `out` has another shape or dtype.
    """
    if len(shape) == 1 and not hasattr(shape[0], "__index__"):
        if not isinstance(shape[0], Iterable) or isinstance(shape[0], str):
            raise UsageError(f"a shape is whole numbers, or a tuple of them, not {shape[0]!r}")
        shape = tuple(shape[0])
    if out is None:
        where = generator.device if device is None and isinstance(generator, Generator) else device
        return empty(shape, default if dtype is None else dtype, device=where)
    if not isinstance(out, DeviceArray):
        raise UsageError(f"out must be a DeviceArray, not {type(out).__name__}")
    wanted = out.dtype if dtype is None else as_dtype(dtype)
    if (out.shape, out.dtype) != (shape, wanted):
        raise UsageError(f"out has shape {out.shape} and dtype {out.dtype}, where {shape} and {wanted} were asked for")
    return out


@operation
def rand(
    *size: Any,
    generator: Generator | None = None,
    out: DeviceArray | None = None,
    dtype: npt.DTypeLike | None = None,
    device: DeviceLike = None,
) -> DeviceArray:
    """Return an array of numbers from [0, 1).

    Parameters
    ----------
    size
        Its shape, as numbers or as one tuple.
    generator
        Default: the device's.
    out
        Fill this array instead of a new one.
    dtype
        Floating-point or complex; default: float32.
    device
        Default: the generator's, else the current one.
    """
    made = target(size, dtype, np.float32, device, out, generator)
    uniform_(made, generator=generator)
    return made


@operation
def randn(
    *size: Any,
    generator: Generator | None = None,
    out: DeviceArray | None = None,
    dtype: npt.DTypeLike | None = None,
    device: DeviceLike = None,
) -> DeviceArray:
    """Return an array of normally distributed numbers; see :func:`rand` for the parameters."""
    made = target(size, dtype, np.float32, device, out, generator)
    normal_(made, generator=generator)
    return made


@operation
def randint(
    low: Any = 0,
    high: Any = None,
    size: Any = None,
    *,
    generator: Generator | None = None,
    out: DeviceArray | None = None,
    dtype: npt.DTypeLike | None = None,
    device: DeviceLike = None,
) -> DeviceArray:
    """Return an array of whole numbers from [`low`, `high`).

    ``randint(high, size)`` and ``randint(low, high, size)``; the default dtype is int64, see :func:`rand` for the
    other parameters.

    Raises
    ------
    UsageError
        There is no number in the range, or the dtype cannot hold its ends.
    """
    if size is None:
        low, high, size = 0, low, high
    elif high is None:
        low, high = 0, low
    if size is None:
        raise UsageError("randint takes (high, size) or (low, high, size)")
    made = target((size,), dtype, np.int64, device, out, generator)
    random_(made, low, high, generator=generator)
    return made


@operation
def rand_like(
    input: DeviceArray, *, generator: Generator | None = None, dtype: npt.DTypeLike | None = None
) -> DeviceArray:
    """Return numbers from [0, 1), in the shape, dtype, device and order of dimensions of an array."""
    made = empty_like(input, dtype)
    uniform_(made, generator=generator)
    return made


@operation
def randn_like(
    input: DeviceArray, *, generator: Generator | None = None, dtype: npt.DTypeLike | None = None
) -> DeviceArray:
    """Return normally distributed numbers, in the shape, dtype, device and order of dimensions of an array."""
    made = empty_like(input, dtype)
    normal_(made, generator=generator)
    return made


@operation
def randint_like(
    input: DeviceArray,
    low: SupportsIndex = 0,
    high: SupportsIndex | None = None,
    *,
    generator: Generator | None = None,
    dtype: npt.DTypeLike | None = None,
) -> DeviceArray:
    """Return whole numbers, in the shape, dtype, device and order of dimensions of an array.

    ``randint_like(array, high)`` and ``randint_like(array, low, high)``.
    """
    low, high = (0, low) if high is None else (low, high)
    made = empty_like(input, dtype)
    random_(made, low, high, generator=generator)
    return made


@operation
def normal(
    mean: Any = 0.0,
    std: Any = 1.0,
    size: Any = None,
    *,
    generator: Generator | None = None,
    out: DeviceArray | None = None,
    dtype: npt.DTypeLike | None = None,
    device: DeviceLike = None,
) -> DeviceArray:
    """Return normally distributed numbers.

    Parameters
    ----------
    mean, std
        Numbers, with a `size`; or arrays, one of them or both, which are broadcast: each element has its own.
    size
        The shape, where both are numbers.

    Raises
    ------
    UsageError
        `std` is negative (elements of an array are not looked at), or `size` is missing, or given with arrays.
    """
    arrays = [part for part in (mean, std) if isinstance(part, DeviceArray)]
    if not arrays:
        if size is None:
            raise UsageError("normal takes the size too, where mean and std are numbers")
        made = target((size,), dtype, np.float32, device, out, generator)
        normal_(made, mean, std, generator=generator)
        return made
    if size is not None:
        raise UsageError("normal takes its size from the arrays")
    try:
        shape = np.broadcast_shapes(*(part.shape for part in arrays))
    except ValueError:
        raise ShapeError(f"normal: {arrays[0].shape} and {arrays[1].shape} cannot be broadcast together") from None
    mean, std = (part if isinstance(part, DeviceArray) else real("normal: mean and std", part) for part in (mean, std))
    made = target((shape,), dtype, arrays[0].dtype, arrays[0].device, out, None)
    if isinstance(std, DeviceArray):
        normal_(made, 0.0, 1.0, generator=generator)
        made *= std
    else:
        normal_(made, 0.0, std, generator=generator)
    made += mean
    return made
