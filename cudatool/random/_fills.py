"""Distributions that fill an array in place, as torch.Tensor's methods with an underscore do."""

from __future__ import annotations

import functools
import math
from typing import Any, Final, SupportsIndex

import numpy as np

from cudatool.errors import UsageError
from cudatool.random._generator import Generator
from cudatool.random._kernels import REALS, fill, operation, real_type, word_type
from cudatool.runtime.array import DeviceArray, check_array
from cudatool.runtime.dtypes import real, require_int

__all__ = [
    "cauchy_",
    "exponential_",
    "float_range",
    "geometric_",
    "log_normal_",
    "normal_",
    "random_",
    "uniform_",
]

_INT64: Final = np.iinfo(np.int64)


@functools.cache
def float_range(dtype: np.dtype[Any]) -> tuple[float, int]:
    """Return the largest number of a floating-point dtype, and the bits of its significand."""
    return {
        "float16": (65504.0, 11),
        "bfloat16": ((2 - 2**-7) * 2.0**127, 8),
        "float32": ((2 - 2**-23) * 2.0**127, 24),
        "float64": (math.nextafter(math.inf, 0), 53),
    }[dtype.name]


def _unroll(dtype: np.dtype[Any]) -> int:
    return 2 if dtype.itemsize == 8 else 4


def _parts(array: DeviceArray) -> DeviceArray:
    """Return the real and imaginary parts of a complex array, in a last dimension of 2."""
    real = np.dtype(f"f{array.dtype.itemsize // 2}")
    return DeviceArray(array.layout[..., None].view(real), array._memory, array.device)


@operation
def uniform_(
    array: DeviceArray, low: float = 0.0, high: float = 1.0, *, generator: Generator | None = None
) -> DeviceArray:
    """Fill an array of floating-point or complex numbers with numbers from [`low`, `high`), and return it.

    Raises
    ------
    UsageError
        `low` is above `high`, or they or their difference are beyond the dtype; the dtype is another one.
    """
    check_array("uniform_", array)
    low, high = real("uniform_: low", low), real("uniform_: high", high)
    if array.dtype.kind == "c":
        uniform_(_parts(array), low, high, generator=generator)
        return array
    name = real_type(array.dtype, "uniform_")
    largest, _ = float_range(array.dtype)
    if not (-largest <= low <= high <= largest and high - low <= largest):
        raise UsageError(f"uniform_ expects low <= high, both and high - low finite in {array.dtype}: {low}, {high}")
    return fill(array, f"Uniform<{name}>", _unroll(array.dtype), float(low), float(high), generator)


@operation
def normal_(
    array: DeviceArray, mean: float = 0.0, std: float = 1.0, *, generator: Generator | None = None
) -> DeviceArray:
    """Fill an array with normally distributed numbers, and return it.

    Complex numbers have `std` as their own deviation, so that each part's is smaller by the square root of 2.

    Raises
    ------
    UsageError
        `std` is negative, or the dtype is neither floating-point nor complex.
    """
    check_array("normal_", array)
    mean, std = real("normal_: mean", mean), real("normal_: std", std)
    if not std >= 0:
        raise UsageError(f"normal_ expects std >= 0, not {std}")
    if array.dtype.kind == "c":
        normal_(_parts(array), mean, std / math.sqrt(2), generator=generator)
        return array
    name = real_type(array.dtype, "normal_")
    return fill(array, f"Normal<{name}>", _unroll(array.dtype), float(mean), float(std), generator)


@operation
def exponential_(array: DeviceArray, lambd: float = 1.0, *, generator: Generator | None = None) -> DeviceArray:
    """Fill an array with exponentially distributed numbers of rate `lambd`, never 0, and return it.

    Raises
    ------
    UsageError
        `lambd` is not positive, or the dtype is no floating-point one.
    """
    check_array("exponential_", array)
    if not real("exponential_: lambd", lambd) > 0:
        raise UsageError(f"exponential_ expects lambd > 0, not {lambd}")
    name = real_type(array.dtype, "exponential_")
    return fill(array, f"Exponential<{name}>", _unroll(array.dtype), float(lambd), 0.0, generator)


@operation
def log_normal_(
    array: DeviceArray, mean: float = 1.0, std: float = 2.0, *, generator: Generator | None = None
) -> DeviceArray:
    """Fill an array with numbers whose logarithms have this mean and deviation, and return it.

    Raises
    ------
    UsageError
        `std` is not positive, or the dtype is no floating-point one.
    """
    check_array("log_normal_", array)
    mean, std = real("log_normal_: mean", mean), real("log_normal_: std", std)
    if not std > 0:
        raise UsageError(f"log_normal_ expects std > 0, not {std}")
    name = real_type(array.dtype, "log_normal_")
    return fill(array, f"LogNormal<{name}>", _unroll(array.dtype), float(mean), float(std), generator)


@operation
def cauchy_(
    array: DeviceArray, median: float = 0.0, sigma: float = 1.0, *, generator: Generator | None = None
) -> DeviceArray:
    """Fill an array with numbers of Cauchy's distribution, and return it.

    Raises
    ------
    UsageError
        `sigma` is not positive, or the dtype is no floating-point one.
    """
    check_array("cauchy_", array)
    median, sigma = real("cauchy_: median", median), real("cauchy_: sigma", sigma)
    if not sigma > 0:
        raise UsageError(f"cauchy_ expects sigma > 0, not {sigma}")
    name = real_type(array.dtype, "cauchy_")
    return fill(array, f"Cauchy<{name}>", _unroll(array.dtype), float(median), float(sigma), generator)


@operation
def geometric_(array: DeviceArray, p: float, *, generator: Generator | None = None) -> DeviceArray:
    """Fill an array with how many trials it takes until one succeeds, with probability `p` each, and return it.

    Raises
    ------
    UsageError
        `p` is not in (0, 1), or the dtype is complex or bool.
    """
    check_array("geometric_", array)
    if not 0 < real("geometric_: p", p) < 1:
        raise UsageError(f"geometric_ expects p to be in (0, 1), not {p}")
    if array.dtype.kind == "b":
        raise UsageError("geometric_ counts, which bool cannot")
    name = word_type(array.dtype, "geometric_")
    return fill(array, f"Geometric<{name}>", 2 if name == "double" else 4, float(p), 0.0, generator)


@operation
def random_(array: DeviceArray, *bounds: SupportsIndex | None, generator: Generator | None = None) -> DeviceArray:
    """Fill an array with whole numbers, each as likely, and return it.

    ::

        random_(array)              [0, most]
        random_(array, high)        [0, high)
        random_(array, low, high)   [low, high)
        random_(array, low, None)   [low, most]

    where `most` is the largest number of an integer dtype, and 2^bits of the significand of a floating-point one.

    Raises
    ------
    UsageError
        There is no number in the range, or the dtype cannot hold its ends.
    """
    check_array("random_", array)
    name = word_type(array.dtype, "random_")
    if not bounds:
        wide = array.dtype.itemsize == 8
        count = _most(array.dtype) + 1
        low = 0
    else:
        if len(bounds) > 2:
            raise UsageError(f"random_ takes low and high, not {len(bounds)} numbers")
        low, high = (0, bounds[0]) if len(bounds) == 1 else bounds  # type: ignore[assignment]
        low, count = _range(array.dtype, require_int("low", low), None if high is None else require_int("high", high))
        wide = count >= 1 << 28  # a remainder of 32 bits would favour small numbers too much
    unroll, word = (2, "Word64") if wide else (4, "unsigned")
    return fill(array, f"Integer<{name}, {word}>", unroll, count % (1 << 8 * (16 // unroll)), low, generator)


def _most(dtype: np.dtype[Any]) -> int:
    if dtype.kind == "b":
        return 1
    return int(np.iinfo(dtype).max) if dtype.kind in "iu" else 1 << float_range(dtype)[1]


def _range(dtype: np.dtype[Any], low: int, high: int | None) -> tuple[int, int]:
    """Return the first of the numbers to draw from, and how many they are.

    Raises
    ------
    UsageError
        There are none, or the dtype cannot hold the first or the last.
    """
    last = _most(dtype) if high is None else high - 1
    if low > last:
        raise UsageError(f"random_ expects low < high, not [{low}, {last + 1})")
    if dtype.kind in "biu":
        smallest = int(np.iinfo(dtype).min) if dtype.kind == "i" else 0
        fits = smallest <= low and last <= min(_most(dtype), _INT64.max)
    else:
        largest = float_range(dtype)[0]
        fits = -largest <= low and last <= largest and _INT64.min <= low and last <= _INT64.max
    if not fits:
        raise UsageError(f"{dtype} cannot hold all numbers of [{low}, {last + 1})")
    if dtype.name in REALS:
        # The ends move inward to numbers that the dtype has, so that rounding does not lead out of the range.
        bits = float_range(dtype)[1]
        above = _rounded(low + 1, dtype)
        if above < low:
            low = above + (1 << abs(low + 1).bit_length() - bits)
        below = _rounded(last, dtype)
        if high is not None and below > last:
            last = below - (1 << abs(last).bit_length() - bits) - 1
        if low > last:
            raise UsageError(f"random_ finds no number of {dtype} in the range")
    return low, last + 1 - low


def _rounded(number: int, dtype: np.dtype[Any]) -> int:
    exact = np.array(number, np.int64)
    return int(exact.astype(dtype if dtype.name == "float64" else np.float32).astype(dtype).astype(np.float64))
