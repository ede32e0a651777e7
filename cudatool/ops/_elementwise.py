"""Elementwise operations: one line each, with torch's names and parameters."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from cudatool.errors import UsageError
from cudatool.ops._dispatch import KINDS, Op, op
from cudatool.ops._pointwise import Pointwise, Result
from cudatool.runtime.array import DeviceArray, check_array
from cudatool.runtime.dtypes import category, holds, is_number, result_type

__all__ = [
    "abs",
    "add",
    "addcdiv",
    "addcmul",
    "atan2",
    "bitwise_and",
    "bitwise_left_shift",
    "bitwise_not",
    "bitwise_or",
    "bitwise_right_shift",
    "bitwise_xor",
    "ceil",
    "clamp",
    "conj",
    "copysign",
    "cos",
    "div",
    "elementwise",
    "eq",
    "erf",
    "exp",
    "exp2",
    "expm1",
    "floor",
    "floor_divide",
    "fmod",
    "ge",
    "gt",
    "isfinite",
    "isinf",
    "isnan",
    "le",
    "lerp",
    "log",
    "log10",
    "log1p",
    "log2",
    "logaddexp",
    "logical_and",
    "logical_not",
    "logical_or",
    "logical_xor",
    "lt",
    "masked_fill",
    "maximum",
    "minimum",
    "mul",
    "ne",
    "neg",
    "one_of",
    "pow",
    "reciprocal",
    "remainder",
    "round",
    "rsqrt",
    "sign",
    "sin",
    "sqrt",
    "square",
    "sub",
    "tan",
    "tanh",
    "tril",
    "triu",
    "trunc",
    "where",
]

_ALL: Final = ("bool", "integer", "float", "complex")
_NUMERIC: Final = ("integer", "float", "complex")
_REAL: Final = ("bool", "integer", "float")
_FLOAT: Final = ("float",)
_INEXACT: Final = ("float", "complex")
_WHOLE: Final = ("integer", "float")
_INTEGER: Final = ("bool", "integer")

_FUNCTIONS: Final = r"""
template <typename T> __device__ T absolute(T x) { return x < 0 ? -x : x; }
__device__ float absolute(float x) { return fabsf(x); }
__device__ double absolute(double x) { return fabs(x); }
template <typename T> __device__ T absolute(complex<T> z) { return abs(z); }

// By parts: the distance from zero of a finite complex number may be too large for its type.
template <typename T> __device__ bool infinite(T x) { return absolute(x) == INFINITY; }
template <typename T> __device__ bool infinite(complex<T> z) { return infinite(z.re) || infinite(z.im); }
template <typename T> __device__ bool finite(T x) { return absolute(x) < INFINITY; }
template <typename T> __device__ bool finite(complex<T> z) { return finite(z.re) && finite(z.im); }

template <typename T> __device__ T conjugate(T x) { return x; }
template <typename T> __device__ complex<T> conjugate(complex<T> z) { return {z.re, -z.im}; }

// factor * x; by 1, an infinite complex number stays as it is.
template <typename T> __device__ T times(T factor, T x) { return factor * x; }
template <typename T> __device__ complex<T> times(complex<T> factor, complex<T> x) {
    return factor == complex<T>(1) ? x : factor * x;
}

template <typename T> __device__ T inverted(T x) { return ~x; }
__device__ bool inverted(bool x) { return !x; }

template <typename T> __device__ bool shifts(T bits) { return bits >= 0 && bits < (int)(8 * sizeof(T)); }
template <typename T> __device__ T shifted_left(T x, T bits) { return shifts(bits) ? x << bits : 0; }
template <typename T> __device__ T shifted_right(T x, T bits) { return shifts(bits) ? x >> bits : x < 0 ? -1 : 0; }

// Of a whole number the nearest whole number is itself.
#define WHOLE(NAME, FUNCTION) \
    template <typename T> __device__ T NAME(T x) { return x; } \
    __device__ float NAME(float x) { return FUNCTION(x); } \
    __device__ double NAME(double x) { return FUNCTION(x); }
WHOLE(whole_below, floor)
WHOLE(whole_above, ceil)
WHOLE(whole_nearest, rint)
WHOLE(whole_to_zero, trunc)

template <typename T> __device__ T larger(T a, T b) { return a > b || a != a ? a : b; }  // NaN if either is
template <typename T> __device__ T smaller(T a, T b) { return a < b || a != a ? a : b; }

template <typename T> __device__ T power(T base, T exponent) {  // of integers, by squaring
    if (exponent < 0) return base == 1 ? 1 : base == (T)-1 ? (exponent % 2 ? -1 : 1) : 0;
    T found = 1;
    for (; exponent; exponent >>= 1, base *= base)
        if (exponent & 1) found *= base;
    return found;
}
__device__ float power(float base, float exponent) { return pow(base, exponent); }
__device__ double power(double base, double exponent) { return pow(base, exponent); }

// The remainder has the divisor's sign, as Python's.
template <typename T> __device__ T modulo(T a, T b) {
    T rest = a % b;
    return rest && (rest < 0) != (b < 0) ? rest + b : rest;
}
__device__ float modulo(float a, float b) {
    float rest = fmod(a, b);
    return rest != 0 && (rest < 0) != (b < 0) ? rest + b : rest;
}
__device__ double modulo(double a, double b) {
    double rest = fmod(a, b);
    return rest != 0 && (rest < 0) != (b < 0) ? rest + b : rest;
}
template <typename T> __device__ T floor_quotient(T a, T b) { return a / b - (a % b && (a < 0) != (b < 0)); }
template <typename T> __device__ T floor_quotient_of_floats(T a, T b) {  // floor(a / b), without a / b's rounding
    if (b == 0) return a / b;
    T rest = fmod(a, b), quotient = (a - rest) / b - (rest != 0 && (rest < 0) != (b < 0)), below = floor(quotient);
    return quotient == 0 ? copysign((T)0, a / b) : quotient - below > (T)0.5 ? below + 1 : below;
}
__device__ float floor_quotient(float a, float b) { return floor_quotient_of_floats(a, b); }
__device__ double floor_quotient(double a, double b) { return floor_quotient_of_floats(a, b); }
template <typename T> __device__ T quotient_to_zero(T a, T b) { return a / b; }
__device__ float quotient_to_zero(float a, float b) { return trunc(a / b); }
__device__ double quotient_to_zero(double a, double b) { return trunc(a / b); }
template <typename T> __device__ T remainder_to_zero(T a, T b) { return a % b; }
__device__ float remainder_to_zero(float a, float b) { return fmod(a, b); }
__device__ double remainder_to_zero(double a, double b) { return fmod(a, b); }
"""


def elementwise(
    signature: str,
    expression: str,
    doc: str,
    *,
    result: Result = Result.SAME,
    accepts: Sequence[str] = _REAL,
) -> Op:
    """Return the operation ``cudatool.ops.NAME`` of an expression (:class:`~cudatool.ops._pointwise.Pointwise`)."""
    kernel = Pointwise(signature, expression, result=result, accepts=accepts, functions=_FUNCTIONS)

    parameter = inspect.Parameter
    found = op(f"cudatool.ops.{kernel.name}")
    found.implementation(*KINDS)(kernel.__call__)
    found.__doc__ = doc
    found.__signature__ = inspect.Signature(
        [
            *(parameter(name, parameter.POSITIONAL_OR_KEYWORD) for name in kernel.operands),
            *(parameter(name, parameter.KEYWORD_ONLY, default=kernel.numbers[name]) for name in kernel.numbers),
            parameter("out", parameter.KEYWORD_ONLY, default=None),
        ]
    )
    return found


# Arithmetic.
add = elementwise(
    "add(input, other, *, alpha=1)", "input + times(alpha, other)", "Return input + alpha * other.", accepts=_ALL
)
sub = elementwise(
    "sub(input, other, *, alpha=1)", "input - times(alpha, other)", "Return input - alpha * other.", accepts=_NUMERIC
)
mul = elementwise("mul(input, other)", "input * other", "Return input * other.", accepts=_ALL)
_true_divide = Pointwise("div(input, other)", "input / other", result=Result.FLOAT, accepts=_INEXACT)
floor_divide = elementwise(
    "floor_divide(input, other)",
    "floor_quotient(input, other)",
    "Return the largest whole number not above input / other.",
    accepts=_WHOLE,
)
_trunc_divide = Pointwise(
    "trunc_divide(input, other)", "quotient_to_zero(input, other)", accepts=_WHOLE, functions=_FUNCTIONS
)
remainder = elementwise(
    "remainder(input, other)",
    "modulo(input, other)",
    "Return what is left of a floor division; it has the divisor's sign.",
    accepts=_WHOLE,
)
fmod = elementwise(
    "fmod(input, other)",
    "remainder_to_zero(input, other)",
    "Return what is left of a division rounded towards zero; it has the dividend's sign.",
    accepts=_WHOLE,
)
neg = elementwise("neg(input)", "-input", "Return -input.", accepts=_NUMERIC)
abs = elementwise(
    "abs(input)", "absolute(input)", "Return the distance from zero.", result=Result.REAL, accepts=_NUMERIC
)
sign = elementwise("sign(input)", "(input > 0) - (input < 0)", "Return -1, 0 or 1.")
square = elementwise("square(input)", "input * input", "Return input * input.", result=Result.NUMBER, accepts=_NUMERIC)
reciprocal = elementwise("reciprocal(input)", "1 / input", "Return 1 / input.", result=Result.FLOAT, accepts=_INEXACT)
_pow = Pointwise("pow(input, exponent)", "power(input, exponent)", accepts=_NUMERIC, functions=_FUNCTIONS)
conj = elementwise("conj(input)", "conjugate(input)", "Return the complex conjugate.", accepts=_ALL)
maximum = elementwise("maximum(input, other)", "larger(input, other)", "Return the larger one; NaN if either is.")
minimum = elementwise("minimum(input, other)", "smaller(input, other)", "Return the smaller one; NaN if either is.")
copysign = elementwise(
    "copysign(input, other)",
    "copysign(input, other)",
    "Return input with the sign of other.",
    result=Result.FLOAT,
)
lerp = elementwise(
    "lerp(input, end, weight)",
    "absolute(weight) < 0.5f ? input + weight * (end - input) : end - (end - input) * (1 - weight)",
    "Return input + weight * (end - input).",
    accepts=_INEXACT,
)
addcmul = elementwise(
    "addcmul(input, tensor1, tensor2, *, value=1)",
    "input + times(value, Compute(tensor1 * tensor2))",
    "Return input + value * tensor1 * tensor2.",
    accepts=_NUMERIC,
)
addcdiv = elementwise(
    "addcdiv(input, tensor1, tensor2, *, value=1)",
    "input + times(value, Compute(tensor1 / tensor2))",
    "Return input + value * tensor1 / tensor2.",
    accepts=_INEXACT,
)

# Functions of analysis: integers become float32.
exp = elementwise("exp(input)", "exp(input)", "Return e to the power of input.", result=Result.FLOAT, accepts=_INEXACT)
exp2 = elementwise(
    "exp2(input)", "exp2(input)", "Return 2 to the power of input.", result=Result.FLOAT, accepts=_INEXACT
)
expm1 = elementwise("expm1(input)", "expm1(input)", "Return exp(input) - 1.", result=Result.FLOAT, accepts=_INEXACT)
log = elementwise("log(input)", "log(input)", "Return the natural logarithm.", result=Result.FLOAT, accepts=_INEXACT)
log2 = elementwise(
    "log2(input)", "log2(input)", "Return the logarithm to base 2.", result=Result.FLOAT, accepts=_INEXACT
)
log10 = elementwise(
    "log10(input)", "log10(input)", "Return the logarithm to base 10.", result=Result.FLOAT, accepts=_INEXACT
)
log1p = elementwise("log1p(input)", "log1p(input)", "Return log(1 + input).", result=Result.FLOAT, accepts=_INEXACT)
logaddexp = elementwise(
    "logaddexp(input, other)",
    "input == other && isinf(input) ? input : larger(input, other) + log1p(exp(-fabs(input - other)))",
    "Return log(exp(input) + exp(other)).",
    accepts=_FLOAT,
)
sqrt = elementwise("sqrt(input)", "sqrt(input)", "Return the square root.", result=Result.FLOAT, accepts=_INEXACT)
rsqrt = elementwise("rsqrt(input)", "rsqrt(input)", "Return 1 / sqrt(input).", result=Result.FLOAT, accepts=_INEXACT)
sin = elementwise("sin(input)", "sin(input)", "Return the sine.", result=Result.FLOAT, accepts=_INEXACT)
cos = elementwise("cos(input)", "cos(input)", "Return the cosine.", result=Result.FLOAT, accepts=_INEXACT)
tan = elementwise("tan(input)", "tan(input)", "Return the tangent.", result=Result.FLOAT, accepts=_INEXACT)
tanh = elementwise(
    "tanh(input)", "tanh(input)", "Return the hyperbolic tangent.", result=Result.FLOAT, accepts=_INEXACT
)
atan2 = elementwise(
    "atan2(input, other)", "atan2(input, other)", "Return the angle of (other, input).", result=Result.FLOAT
)
erf = elementwise("erf(input)", "erf(input)", "Return the error function.", result=Result.FLOAT)
floor = elementwise("floor(input)", "whole_below(input)", "Return the largest whole number not above.", accepts=_WHOLE)
ceil = elementwise("ceil(input)", "whole_above(input)", "Return the smallest whole number not below.", accepts=_WHOLE)
round = elementwise(
    "round(input)", "whole_nearest(input)", "Return the nearest whole number, the even one of two.", accepts=_WHOLE
)
trunc = elementwise("trunc(input)", "whole_to_zero(input)", "Return the whole number towards zero.", accepts=_WHOLE)

# Comparisons and logic.
eq = elementwise("eq(input, other)", "input == other", "Return input == other.", result=Result.BOOL, accepts=_ALL)
ne = elementwise("ne(input, other)", "input != other", "Return input != other.", result=Result.BOOL, accepts=_ALL)
lt = elementwise("lt(input, other)", "input < other", "Return input < other.", result=Result.BOOL)
le = elementwise("le(input, other)", "input <= other", "Return input <= other.", result=Result.BOOL)
gt = elementwise("gt(input, other)", "input > other", "Return input > other.", result=Result.BOOL)
ge = elementwise("ge(input, other)", "input >= other", "Return input >= other.", result=Result.BOOL)
isnan = elementwise(
    "isnan(input)", "input != input", "Return where it is not a number.", result=Result.BOOL, accepts=_ALL
)
isinf = elementwise("isinf(input)", "infinite(input)", "Return where it is infinite.", result=Result.BOOL, accepts=_ALL)
isfinite = elementwise(
    "isfinite(input)",
    "finite(input)",
    "Return where it is neither infinite nor NaN.",
    result=Result.BOOL,
    accepts=_ALL,
)
logical_and = elementwise(
    "logical_and(input, other)",
    "convert<bool>(input) && convert<bool>(other)",
    "Return where both are not zero.",
    result=Result.BOOL,
    accepts=_ALL,
)
logical_or = elementwise(
    "logical_or(input, other)",
    "convert<bool>(input) || convert<bool>(other)",
    "Return where one is not zero.",
    result=Result.BOOL,
    accepts=_ALL,
)
logical_xor = elementwise(
    "logical_xor(input, other)",
    "convert<bool>(input) != convert<bool>(other)",
    "Return where just one is not zero.",
    result=Result.BOOL,
    accepts=_ALL,
)
logical_not = elementwise(
    "logical_not(input)", "!convert<bool>(input)", "Return where it is zero.", result=Result.BOOL, accepts=_ALL
)
bitwise_and = elementwise(
    "bitwise_and(input, other)", "input & other", "Return the bits that are set in both.", accepts=_INTEGER
)
bitwise_or = elementwise(
    "bitwise_or(input, other)", "input | other", "Return the bits that are set in one.", accepts=_INTEGER
)
bitwise_xor = elementwise(
    "bitwise_xor(input, other)", "input ^ other", "Return the bits that are set in just one.", accepts=_INTEGER
)
bitwise_not = elementwise(
    "bitwise_not(input)", "inverted(input)", "Return the bits that are not set.", accepts=_INTEGER
)
bitwise_left_shift = elementwise(
    "bitwise_left_shift(input, other)",
    "shifted_left(input, other)",
    "Return input * 2**other; 0 if other is negative, or not less than the number of bits.",
    accepts=("integer",),
)
bitwise_right_shift = elementwise(
    "bitwise_right_shift(input, other)",
    "shifted_right(input, other)",
    "Return input // 2**other; 0 or -1 if other is negative, or not less than the number of bits.",
    accepts=("integer",),
)

# Choice by a mask or by place.
where = elementwise(
    "where(condition: bool, input, other)",
    "condition ? input : other",
    "Return input where condition holds, else other.",
    accepts=_ALL,
)
_masked_fill = Pointwise("masked_fill(input, mask: bool, value: input)", "mask ? value : input", accepts=_ALL)
_clamp = {
    # which bounds there are
    (True, True): Pointwise(
        "clamp(input, min, max)", "smaller(larger(input, min), max)", accepts=_REAL, functions=_FUNCTIONS
    ),
    (True, False): Pointwise("clamp_min(input, min)", "larger(input, min)", accepts=_REAL, functions=_FUNCTIONS),
    (False, True): Pointwise("clamp_max(input, max)", "smaller(input, max)", accepts=_REAL, functions=_FUNCTIONS),
}
_PLACE = "rows: int = 1, columns: int = 1, diagonal: int = 0"
_tril = Pointwise(
    f"tril(input, *, {_PLACE})",
    "index % columns <= index / columns % rows + diagonal ? input : convert<Compute>(0)",
    accepts=_ALL,
)
_triu = Pointwise(
    f"triu(input, *, {_PLACE})",
    "index % columns >= index / columns % rows + diagonal ? input : convert<Compute>(0)",
    accepts=_ALL,
)

clamp = op("cudatool.ops.clamp")
div = op("cudatool.ops.div")
masked_fill = op("cudatool.ops.masked_fill")
pow = op("cudatool.ops.pow")
tril = op("cudatool.ops.tril")
triu = op("cudatool.ops.triu")


@div.implementation(*KINDS)
def _(input: Any, other: Any, *, rounding_mode: str | None = None, out: DeviceArray | None = None) -> DeviceArray:
    """Return input / other.

    Parameters
    ----------
    rounding_mode
        ``"floor"``, ``"trunc"`` (towards zero), or None: do not round; integers then give float32.
    """
    if rounding_mode == "floor":
        result: DeviceArray = floor_divide.redispatch(input, other, out=out)
        return result
    kernel = one_of({None: _true_divide, "trunc": _trunc_divide}, rounding_mode, "rounding_mode", "floor")
    return kernel(input, other, out=out)


@pow.implementation(*KINDS)
def _(input: Any, exponent: Any, *, out: DeviceArray | None = None) -> DeviceArray:
    """Return input to the power of exponent.

    Of integers, it is 0 for the negative ones in an array of exponents, unless input is 1 or -1.

    Raises
    ------
    UsageError
        The exponent is a negative number, and the result would be integers.
    """
    negative = isinstance(exponent, int | np.integer) and exponent < 0
    if negative and category(result_type(input, exponent)) == "integer":
        raise UsageError(f"pow of integers to the power of {exponent} is not whole; cast the array to a float first")
    return _pow(input, exponent, out=out)


@masked_fill.implementation(*KINDS)
def _(input: DeviceArray, mask: Any, value: Any, *, out: DeviceArray | None = None) -> DeviceArray:
    """Return input, or value where mask holds, in the dtype of input.

    Raises
    ------
    UsageError
        The input is no array, or its dtype does not hold the value.
    """
    check_array("masked_fill", input)
    if is_number(value) and not holds(input.dtype, value):
        raise UsageError(f"masked_fill: {input.dtype} does not hold {value}")
    return _masked_fill(input, mask, value, out=out)


@clamp.implementation(*KINDS)
def _(input: Any, min: Any = None, max: Any = None, *, out: DeviceArray | None = None) -> DeviceArray:
    """Return input, but not less than min and not more than max, where they are given; NaN if any of them is."""
    bounds = [bound for bound in (min, max) if bound is not None]
    if not bounds:
        raise UsageError("clamp needs min or max, or both")
    if isinstance(input, DeviceArray) and category(input.dtype) == "integer":
        held = np.iinfo(input.dtype)
        for bound in bounds:
            if isinstance(bound, int) and not held.min <= bound <= held.max:
                raise UsageError(f"clamp: {input.dtype} does not hold the bound {bound}, which would wrap around")
    return _clamp[min is not None, max is not None](input, *bounds, out=out)


@tril.implementation(*KINDS)
def _(input: DeviceArray, diagonal: int = 0, *, out: DeviceArray | None = None) -> DeviceArray:
    """Return the lower triangle of each matrix, and 0 above it.

    Parameters
    ----------
    diagonal
        The last one that is kept: 0 is the main diagonal, 1 the one above it.
    """
    return _triangle(_tril, input, diagonal, out)


@triu.implementation(*KINDS)
def _(input: DeviceArray, diagonal: int = 0, *, out: DeviceArray | None = None) -> DeviceArray:
    """Return the upper triangle of each matrix, and 0 below it.

    Parameters
    ----------
    diagonal
        The first one that is kept: 0 is the main diagonal, 1 the one above it.
    """
    return _triangle(_triu, input, diagonal, out)


def _triangle(kernel: Pointwise, input: Any, diagonal: int, out: DeviceArray | None) -> DeviceArray:
    if not isinstance(input, DeviceArray) or input.ndim < 2:
        raise UsageError(f"{kernel.name} takes matrices, of at least two dimensions")
    rows, columns = input.shape[-2:]
    return kernel(input, out=out, rows=rows, columns=columns, diagonal=diagonal)


def one_of(table: dict[Any, Pointwise], key: Any, parameter: str, *more: str) -> Pointwise:
    """Return the kernel of an option's value; `more` are values that are not in the table.

    Raises
    ------
    UsageError
        There is no such value.
    """
    try:
        return table[key]
    except (KeyError, TypeError):  # or it cannot be a key
        raise UsageError(f"{parameter} must be one of {', '.join(map(repr, [*table, *more]))}, not {key!r}") from None
