"""Reductions: sums, extremes, moments, norms, with torch's names and parameters."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from cudatool.errors import UsageError
from cudatool.ops._dispatch import KINDS, op
from cudatool.ops._reduction import Dims, Reduction, check_array, dimensions, listed
from cudatool.runtime.array import DeviceArray
from cudatool.runtime.dtypes import as_dtype, category, compute_dtype, real, real_dtype, require_int

__all__ = [
    "Extreme",
    "all",
    "amax",
    "amin",
    "any",
    "argmax",
    "argmin",
    "count_nonzero",
    "logsumexp",
    "max",
    "mean",
    "min",
    "norm",
    "prod",
    "std",
    "sum",
    "var",
]

_INT64: Final = np.dtype(np.int64)
_BOOL: Final = np.dtype(np.bool)
_ALL: Final = ("bool", "integer", "float", "complex")
_REAL: Final = ("bool", "integer", "float")
_INEXACT: Final = ("float", "complex")


class Extreme(NamedTuple):
    """The largest or smallest elements along a dimension, and where they are."""

    values: DeviceArray
    indices: DeviceArray


def _fold(value: str, start: str, take: str, merge: str, finish: str) -> str:
    """Return a state of one value."""
    return f"""{{
    {value} value;
    __device__ static State start() {{ return {{{start}}}; }}
    __device__ void take(Compute x, long long index, double parameter) {{ {take}; }}
    __device__ void merge(State other) {{ {merge}; }}
    __device__ auto finish(long long size, double parameter) {{ return {finish}; }}
}}"""


def _added(take: str, finish: str = "value") -> str:
    return _fold("Compute", "(Compute)0", take, "value = value + other.value", finish)


def _extreme(sign: str, start: str) -> str:  # NaN wins
    better = f"if (x {sign} value || x != x) value = x"
    return _fold("Compute", start, better, "take(other.value, 0, 0)", "value")


def _place(sign: str, start: str) -> str:  # NaN wins, then the better value, then the lower index
    return f"""{{
    Compute value;
    long long index;
    __device__ static State start() {{ return {{{start}, 0x7fffffffffffffff}}; }}
    __device__ void take(Compute x, long long at, double parameter) {{
        bool none = x != x, none_yet = value != value;
        bool better = none != none_yet ? none : none || x == value ? at < index : x {sign} value;
        if (better) value = x, index = at;
    }}
    __device__ void merge(State other) {{ take(other.value, other.index, 0); }}
    __device__ long long finish(long long size, double parameter) {{ return index; }}
}}"""


def _moments(finish: str) -> str:  # Welford's, and Chan's to merge
    return f"""{{
    using Real = decltype(abs(Compute()));
    Compute mean;
    Real count, squares;
    template <typename T> __device__ static T along(T a, T b) {{ return a * b; }}
    template <typename T> __device__ static T along(complex<T> a, complex<T> b) {{ return a.re * b.re + a.im * b.im; }}
    __device__ static State start() {{ return {{0, 0, 0}}; }}
    __device__ void take(Compute x, long long index, double parameter) {{
        count += 1;
        Compute distance = x - mean;
        mean = mean + distance / count;
        squares += along(distance, x - mean);
    }}
    __device__ void merge(State other) {{
        if (other.count == 0) return;
        Real both = count + other.count;
        Compute distance = other.mean - mean;
        squares += other.squares + along(distance, distance) * (count * other.count / both);
        mean = mean + distance * (other.count / both);
        count = both;
    }}
    __device__ Real finish(long long size, double parameter) {{
        Real freedom = size > parameter ? size - parameter : 0;
        return {finish};
    }}
}}"""


_sum = Reduction("sum", _added("value = value + x"), accepts=_ALL)
_mean = Reduction("mean", _added("value = value + x", "value / (Compute)size"), accepts=_INEXACT)
_prod = Reduction(
    "prod", _fold("Compute", "(Compute)1", "value = value * x", "value = value * other.value", "value"), accepts=_ALL
)
_amax = Reduction("amax", _extreme(">", "lowest<Compute>()"), accepts=_REAL)
_amin = Reduction("amin", _extreme("<", "highest<Compute>()"), accepts=_REAL)
_any = Reduction(
    "any", _fold("bool", "false", "value |= convert<bool>(x)", "value |= other.value", "value"), accepts=_ALL
)
_all = Reduction(
    "all", _fold("bool", "true", "value &= convert<bool>(x)", "value &= other.value", "value"), accepts=_ALL
)
_count = Reduction(
    "count_nonzero", _fold("long long", "0", "value += convert<bool>(x)", "value += other.value", "value"), accepts=_ALL
)
_argmax = Reduction("argmax", _place(">", "lowest<Compute>()"), accepts=_REAL, ordered=True)
_argmin = Reduction("argmin", _place("<", "highest<Compute>()"), accepts=_REAL, ordered=True)
_var = Reduction("var", _moments("squares / freedom"), accepts=_INEXACT)
_std = Reduction("standard_deviation", _moments("sqrt(squares / freedom)"), accepts=_INEXACT)
_size = "auto size = abs(x)"
_norms: Final = {
    2.0: Reduction(
        "norm",
        _fold("decltype(abs(Compute()))", "0", f"{_size}; value += size * size", "value += other.value", "sqrt(value)"),
        accepts=_INEXACT,
    ),
    float("inf"): Reduction(
        "norm_inf",
        _fold(
            "decltype(abs(Compute()))",
            "0",
            f"{_size}; if (size > value || size != size) value = size",
            "if (other.value > value || other.value != other.value) value = other.value",
            "value",
        ),
        accepts=_INEXACT,
    ),
    float("-inf"): Reduction(
        "norm_minus_inf",
        _fold(
            "decltype(abs(Compute()))",
            "INFINITY",
            f"{_size}; if (size < value || size != size) value = size",
            "if (other.value < value || other.value != other.value) value = other.value",
            "value",
        ),
        accepts=_INEXACT,
    ),
}
_norm_p = Reduction(
    "norm_p",
    _fold(
        "decltype(abs(Compute()))",
        "0",
        f"{_size}; value += parameter == 0 ? size != 0 : pow(size, (decltype(size))parameter)",
        "value += other.value",
        "parameter == 0 ? value : pow(value, (decltype(value))(1 / parameter))",
    ),
    accepts=_INEXACT,
)
_logsumexp = Reduction(
    "logsumexp",
    """{
    Compute largest, sum;  // of exp(x - largest)
    __device__ static State start() { return {-INFINITY, 0}; }
    __device__ void take(Compute x, long long index, double parameter) { merge({x, 1}); }
    __device__ void merge(State other) {
        State &low = largest < other.largest ? *this : other, &high = largest < other.largest ? other : *this;
        Compute factor = isinf(high.largest) && low.largest == low.largest  // else NaN would be lost
            ? low.largest == high.largest : exp(low.largest - high.largest);
        *this = {high.largest, high.sum + low.sum * factor};
    }
    __device__ Compute finish(long long size, double parameter) { return largest + log(sum); }
}""",
    accepts=("float",),
)

_logsumexp_complex = Reduction(
    "logsumexp_complex",
    """{
    decltype(abs(Compute())) largest;  // real part
    Compute sum;  // of exp(x - largest)
    __device__ static State start() { return {-INFINITY, 0}; }
    __device__ void take(Compute x, long long index, double parameter) { merge({x.re, exp(Compute(0, x.im))}); }
    __device__ void merge(State other) {
        State &low = largest < other.largest ? *this : other, &high = largest < other.largest ? other : *this;
        auto factor = isinf(high.largest) && low.largest == low.largest  // else NaN would be lost
            ? low.largest == high.largest : exp(low.largest - high.largest);
        *this = {high.largest, high.sum + scaled(low.sum, factor)};
    }
    __device__ Compute finish(long long size, double parameter) { return Compute(largest) + log(sum); }
}""",
    accepts=("complex",),
)

sum = op("cudatool.ops.sum")
mean = op("cudatool.ops.mean")
prod = op("cudatool.ops.prod")
amax = op("cudatool.ops.amax")
amin = op("cudatool.ops.amin")
max = op("cudatool.ops.max")
min = op("cudatool.ops.min")
argmax = op("cudatool.ops.argmax")
argmin = op("cudatool.ops.argmin")
any = op("cudatool.ops.any")
all = op("cudatool.ops.all")
count_nonzero = op("cudatool.ops.count_nonzero")
var = op("cudatool.ops.var")
std = op("cudatool.ops.std")
norm = op("cudatool.ops.norm")
logsumexp = op("cudatool.ops.logsumexp")


def _sum_dtype(name: str, input: DeviceArray, dtype: npt.DTypeLike | None) -> np.dtype[Any]:
    check_array(name, input)
    if dtype is not None:
        return as_dtype(dtype)
    return _INT64 if category(input.dtype) in ("bool", "integer") else input.dtype


@sum.implementation(*KINDS)
def _(
    input: DeviceArray,
    dim: Dims = None,
    keepdim: bool = False,
    *,
    dtype: npt.DTypeLike | None = None,
    out: DeviceArray | None = None,
) -> DeviceArray:
    """Return the sum over some dimensions, by default all.

    Parameters
    ----------
    dtype
        In which it is summed (at least in float32) and returned; default: the array's, int64 for all integers.
    """
    wanted = _sum_dtype("sum", input, dtype)
    return _sum(input, dim, keepdim, compute=wanted, result=wanted, out=out)


@prod.implementation(*KINDS)
def _(
    input: DeviceArray,
    dim: Dims = None,
    keepdim: bool = False,
    *,
    dtype: npt.DTypeLike | None = None,
    out: DeviceArray | None = None,
) -> DeviceArray:
    """Return the product over some dimensions, by default all; dtypes as for :func:`sum`."""
    wanted = _sum_dtype("prod", input, dtype)
    return _prod(input, dim, keepdim, compute=wanted, result=wanted, out=out)


@mean.implementation(*KINDS)
def _(
    input: DeviceArray,
    dim: Dims = None,
    keepdim: bool = False,
    *,
    dtype: npt.DTypeLike | None = None,
    out: DeviceArray | None = None,
) -> DeviceArray:
    """Return the mean over some dimensions, by default all; of integers only with a `dtype`."""
    if dtype is None:
        return _mean(input, dim, keepdim, out=out)
    check_array("mean", input)
    wanted = as_dtype(dtype)
    if category(wanted) not in _INEXACT:
        raise UsageError(f"mean is a float or complex, not {wanted}")
    source = input if category(input.dtype) in _INEXACT else input.astype(wanted)
    return _mean(source, dim, keepdim, compute=wanted, result=wanted, out=out)


@amax.implementation(*KINDS)
def _(input: DeviceArray, dim: Dims = (), keepdim: bool = False, *, out: DeviceArray | None = None) -> DeviceArray:
    """Return the largest element over some dimensions, by default all; NaN if there is one."""
    return _not_empty(_amax, input, dim)(input, dim, keepdim, out=out)


@amin.implementation(*KINDS)
def _(input: DeviceArray, dim: Dims = (), keepdim: bool = False, *, out: DeviceArray | None = None) -> DeviceArray:
    """Return the smallest element over some dimensions, by default all; NaN if there is one."""
    return _not_empty(_amin, input, dim)(input, dim, keepdim, out=out)


@argmax.implementation(*KINDS)
def _(input: DeviceArray, dim: int | None = None, keepdim: bool = False) -> DeviceArray:
    """Return where the largest element is (int64), the first one of several, along `dim` or in the flat array."""
    return _not_empty(_argmax, input, _one(dim))(input, dim, keepdim, result=_INT64)


@argmin.implementation(*KINDS)
def _(input: DeviceArray, dim: int | None = None, keepdim: bool = False) -> DeviceArray:
    """Return where the smallest element is (int64), the first one of several, along `dim` or in the flat array."""
    return _not_empty(_argmin, input, _one(dim))(input, dim, keepdim, result=_INT64)


@max.implementation(*KINDS)
def _(input: DeviceArray, dim: int | None = None, keepdim: bool = False) -> DeviceArray | Extreme:
    """Return the largest element of the array, or along `dim` the largest ones and their indices."""
    if dim is None:
        return _not_empty(_amax, input, None)(input, None, keepdim)
    indices = _not_empty(_argmax, input, _one(dim))(input, dim, keepdim, result=_INT64)
    return Extreme(_amax(input, dim, keepdim), indices)


@min.implementation(*KINDS)
def _(input: DeviceArray, dim: int | None = None, keepdim: bool = False) -> DeviceArray | Extreme:
    """Return the smallest element of the array, or along `dim` the smallest ones and their indices."""
    if dim is None:
        return _not_empty(_amin, input, None)(input, None, keepdim)
    indices = _not_empty(_argmin, input, _one(dim))(input, dim, keepdim, result=_INT64)
    return Extreme(_amin(input, dim, keepdim), indices)


@any.implementation(*KINDS)
def _(input: DeviceArray, dim: Dims = None, keepdim: bool = False, *, out: DeviceArray | None = None) -> DeviceArray:
    """Return whether an element is not zero, over some dimensions; for uint8 a uint8, as in torch.

    Without `dim` these are all; with ``dim=()`` none: the truth of each element.
    """
    return _truth(_any, input, dim, keepdim, out)


@all.implementation(*KINDS)
def _(input: DeviceArray, dim: Dims = None, keepdim: bool = False, *, out: DeviceArray | None = None) -> DeviceArray:
    """Return whether no element is zero, over some dimensions; for uint8 a uint8; `dim` as for :func:`any`."""
    return _truth(_all, input, dim, keepdim, out)


def _truth(kernel: Reduction, input: DeviceArray, dim: Dims, keepdim: bool, out: DeviceArray | None) -> DeviceArray:
    check_array(kernel.name, input)
    result = input.dtype if input.dtype == np.uint8 else _BOOL
    several = listed(dim)
    if several == ():  # each element by itself: along a dimension that has only it
        return kernel(input.reshape(*input.shape, 1), -1, False, result=result, out=out)
    return kernel(input, dim if several is None else several, keepdim, result=result, out=out)


@count_nonzero.implementation(*KINDS)
def _(input: DeviceArray, dim: Dims = None) -> DeviceArray:
    """Return how many elements are not zero (int64), over some dimensions, by default all."""
    return _count(input, dim, False, result=_INT64)


@var.implementation(*KINDS)
def _(
    input: DeviceArray,
    dim: Dims = None,
    *,
    correction: float = 1,
    keepdim: bool = False,
    out: DeviceArray | None = None,
) -> DeviceArray:
    """Return the variance over some dimensions, by default all; of complex numbers, that of both parts together.

    Parameters
    ----------
    correction
        The sum of squares is divided by the number of elements less this.
    """
    check_array("var", input)
    divided = real("correction", correction)
    return _var(input, dim, keepdim, result=real_dtype(input.dtype), out=out, parameter=divided)


@std.implementation(*KINDS)
def _(
    input: DeviceArray,
    dim: Dims = None,
    *,
    correction: float = 1,
    keepdim: bool = False,
    out: DeviceArray | None = None,
) -> DeviceArray:
    """Return the standard deviation over some dimensions, by default all; `correction` as for :func:`var`."""
    check_array("std", input)
    divided = real("correction", correction)
    return _std(input, dim, keepdim, result=real_dtype(input.dtype), out=out, parameter=divided)


@norm.implementation(*KINDS)
def _(
    input: DeviceArray,
    p: float = 2,
    dim: Dims = None,
    keepdim: bool = False,
    *,
    dtype: npt.DTypeLike | None = None,
    out: DeviceArray | None = None,
) -> DeviceArray:
    """Return the vector norm over some dimensions, by default all: ``sum(abs(x)**p)**(1/p)``.

    Parameters
    ----------
    p
        2: the Euclidean norm; inf and -inf: the largest and smallest size; 0: how many are not zero.
    dtype
        In which it is computed (at least in float32) and returned; default: the array's, the real one if complex.
    """
    check_array("norm", input)
    p = float(real("norm: p", p))
    wanted = input.dtype if dtype is None else as_dtype(dtype)
    if (category(wanted) == "complex") != (category(input.dtype) == "complex"):
        raise UsageError(f"norm of {input.dtype}: its dtype must be complex for complex numbers only, not {wanted}")
    kernel = _norms.get(p, _norm_p)
    return kernel(input, dim, keepdim, compute=compute_dtype(wanted), result=real_dtype(wanted), out=out, parameter=p)


@logsumexp.implementation(*KINDS)
def _(input: DeviceArray, dim: Dims, keepdim: bool = False, *, out: DeviceArray | None = None) -> DeviceArray:
    """Return ``log(sum(exp(input)))`` over some dimensions, without overflow; integers give float32."""
    check_array("logsumexp", input)
    kind = category(input.dtype)
    if kind == "complex":
        return _logsumexp_complex(input, dim, keepdim, out=out)
    return _logsumexp(input.astype(np.float32) if kind in ("bool", "integer") else input, dim, keepdim, out=out)


def _one(dim: int | None) -> int | None:
    """Return the one dimension along which there is a place."""
    return None if dim is None else require_int("dim", dim)


def _not_empty(kernel: Reduction, input: DeviceArray, dim: Dims) -> Reduction:
    check_array(kernel.name, input)
    dims = dimensions(kernel.name, dim, input.ndim)
    if 0 in [input.shape[d] for d in dims]:
        raise UsageError(f"{kernel.name} of no elements: shape {input.shape}, dim={dim}")
    return kernel
