"""Number types: NumPy's dtypes, what CUDA C++ calls them, and which one a mixture of them gives.

NumPy has no bfloat16 and no 8-bit floats; ml_dtypes adds them. Kernels hold the types that C++ does not have in
structs of :data:`NUMBERS`, which convert to and from float.
"""

from __future__ import annotations

import functools
import math
import operator
from typing import Any, Final

import ml_dtypes
import numpy as np
import numpy.typing as npt

from cudatool.errors import UsageError

__all__ = [
    "NUMBERS",
    "NUMBER_TYPES",
    "as_dtype",
    "bfloat16",
    "c_type",
    "can_cast",
    "category",
    "compute_dtype",
    "float8_e4m3fn",
    "float8_e5m2",
    "holds",
    "is_number",
    "promote_types",
    "real",
    "real_dtype",
    "result_type",
    "require_handle",
    "require_int",
]

if np.__version__.startswith("1."):  # where another package took NumPy back, names and promotion are others
    raise UsageError(f"cudatool needs NumPy 2.1 or newer, and this is {np.__version__}: pip install 'numpy>=2.1'")

bfloat16 = ml_dtypes.bfloat16
"""A float32 of which the upper half is kept: 8 bits of exponent, 7 of fraction."""
float8_e4m3fn = ml_dtypes.float8_e4m3fn
"""An 8-bit float with 4 bits of exponent, 3 of fraction, largest value 448, and no infinity."""
float8_e5m2 = ml_dtypes.float8_e5m2
"""An 8-bit float with 5 bits of exponent, 2 of fraction, largest value 57344."""

_Dtype = np.dtype[Any]

NUMBER_TYPES: Final[dict[_Dtype, tuple[str, str]]] = {
    # dtype -> in CUDA C++ (with NUMBERS), category
    np.dtype(np.bool): ("bool", "bool"),
    np.dtype(np.uint8): ("unsigned char", "integer"),
    np.dtype(np.int8): ("signed char", "integer"),
    np.dtype(np.int16): ("short", "integer"),
    np.dtype(np.int32): ("int", "integer"),
    np.dtype(np.int64): ("long long", "integer"),
    np.dtype(np.uint16): ("unsigned short", "integer"),
    np.dtype(np.uint32): ("unsigned int", "integer"),
    np.dtype(np.uint64): ("unsigned long long", "integer"),
    np.dtype(float8_e4m3fn): ("float8_e4m3fn", "float8"),
    np.dtype(float8_e5m2): ("float8_e5m2", "float8"),
    np.dtype(np.float16): ("float16", "float"),
    np.dtype(bfloat16): ("bfloat16", "float"),
    np.dtype(np.float32): ("float", "float"),
    np.dtype(np.float64): ("double", "float"),
    np.dtype(np.complex64): ("complex<float>", "complex"),
    np.dtype(np.complex128): ("complex<double>", "complex"),
}
_BOOL: Final[_Dtype] = np.dtype(np.bool)
_FLOAT32: Final[_Dtype] = np.dtype(np.float32)
_FLOAT64: Final[_Dtype] = np.dtype(np.float64)
_COMPLEX64: Final[_Dtype] = np.dtype(np.complex64)
_COMPLEX128: Final[_Dtype] = np.dtype(np.complex128)
_UNSIGNED: Final = tuple(map(np.dtype, (np.uint16, np.uint32, np.uint64)))
_RANKS: Final = ("bool", "integer", "float8", "float", "complex")

NUMBERS: Final = r"""
#define INFINITY __int_as_float(0x7f800000)
#define NAN __int_as_float(0x7fffffff)

struct float16 {
    unsigned short bits;
    float16() = default;
    __device__ float16(float x) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x)); }
    __device__ operator float() const { float x; asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits)); return x; }
};

struct bfloat16 {
    unsigned short bits;
    bfloat16() = default;
    __device__ bfloat16(float x) {
#if __CUDA_ARCH__ >= 800
        asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
#else
        unsigned all = __float_as_uint(x);
        bits = x != x ? 0x7fff : (all + 0x7fff + ((all >> 16) & 1)) >> 16;
#endif
    }
    __device__ operator float() const { return __uint_as_float((unsigned)bits << 16); }
};

// LARGEST is the largest finite number, OVERFLOW what stands for all beyond it.
template <int FRACTION, int BIAS, int LARGEST, int OVERFLOW> struct float8 {
    unsigned char bits;
    float8() = default;
    __device__ float8(float x) {
        unsigned sign = __float_as_uint(x) >> 31 << 7, magnitude = __float_as_uint(x) & 0x7fffffff, found;
        if (magnitude > 0x7f800000) found = 0x7f;
        else if (magnitude < (unsigned)(128 - BIAS) << 23)  // subnormal: a multiple of the smallest number
            found = (unsigned)rintf(__uint_as_float(magnitude) * (float)(1 << (BIAS - 1 + FRACTION)));
        else {
            const int cut = 23 - FRACTION;
            magnitude += (1u << (cut - 1)) - 1 + ((magnitude >> cut) & 1);  // to nearest, ties to even
            found = (magnitude >> cut) - ((127 - BIAS) << FRACTION);
            if (found > LARGEST) found = OVERFLOW;
        }
        bits = sign | found;
    }
    __device__ operator float() const {
        unsigned magnitude = bits & 0x7f, exponent = magnitude >> FRACTION;
        float x = exponent ? __uint_as_float((magnitude << (23 - FRACTION)) + ((unsigned)(127 - BIAS) << 23))
                           : magnitude / (float)(1 << (BIAS - 1 + FRACTION));
        if (magnitude > LARGEST) x = magnitude == OVERFLOW && OVERFLOW != 0x7f ? INFINITY : NAN;
        return bits & 0x80 ? -x : x;
    }
};
using float8_e4m3fn = float8<3, 7, 0x7e, 0x7f>;
using float8_e5m2 = float8<2, 15, 0x7b, 0x7c>;

template <typename T> struct alignas(2 * sizeof(T)) complex {
    T re, im;
    complex() = default;
    __device__ complex(T re, T im = 0) : re(re), im(im) {}
    template <typename U> __device__ explicit complex(complex<U> z) : re(z.re), im(z.im) {}
    __device__ complex operator-() const { return {-re, -im}; }
    __device__ friend complex operator+(complex a, complex b) { return {a.re + b.re, a.im + b.im}; }
    __device__ friend complex operator-(complex a, complex b) { return {a.re - b.re, a.im - b.im}; }
    __device__ friend complex operator*(complex a, complex b) {
        return {a.re * b.re - a.im * b.im, a.re * b.im + a.im * b.re};
    }
    __device__ friend complex operator/(complex a, complex b) {  // Smith: the squares may overflow
        if (b.re == 0 && b.im == 0) return {a.re / abs(b.re), a.im / abs(b.im)};
        if (abs(b.re) >= abs(b.im)) {
            T ratio = b.im / b.re, under = b.re + b.im * ratio;
            return {(a.re + a.im * ratio) / under, (a.im - a.re * ratio) / under};
        }
        T ratio = b.re / b.im, under = b.re * ratio + b.im;
        return {(a.re * ratio + a.im) / under, (a.im * ratio - a.re) / under};
    }
    __device__ friend bool operator==(complex a, complex b) { return a.re == b.re && a.im == b.im; }
    __device__ friend bool operator!=(complex a, complex b) { return !(a == b); }
    __device__ friend T abs(complex z) { return hypot(z.re, z.im); }
};

// A number as another type; of a complex number that becomes real, the real part.
template <typename To, typename From> struct Conversion {
    __device__ static To of(From x) { return (To)x; }
};
template <typename To, typename T> struct Conversion<To, complex<T>> {
    __device__ static To of(complex<T> z) { return (To)z.re; }
};
template <typename T, typename From> struct Conversion<complex<T>, From> {
    __device__ static complex<T> of(From x) { return complex<T>((T)x); }
};
template <typename T> struct Conversion<bool, complex<T>> {
    __device__ static bool of(complex<T> z) { return z.re != 0 || z.im != 0; }
};
template <typename T, typename U> struct Conversion<complex<T>, complex<U>> {
    __device__ static complex<T> of(complex<U> z) { return complex<T>(z); }
};
template <typename To, typename From> __device__ To convert(From x) { return Conversion<To, From>::of(x); }
"""


_PYTHON: Final = (int, float, complex)  # tuples here: an expression with | is made again by each call
_COMPLEX: Final = (complex, np.complexfloating)


def is_number(value: object) -> bool:
    """Return whether it is a number of Python's or NumPy's, which takes the dtype of the arrays it meets."""
    return isinstance(value, _PYTHON) or (isinstance(value, np.generic) and value.dtype in NUMBER_TYPES)


def real(what: str, value: Any) -> Any:
    """Return a real number, which the argument `what` has to be; NaN and infinity are.

    Raises
    ------
    UsageError
        It is something else.
    """
    if not is_number(value) or isinstance(value, _COMPLEX):
        raise UsageError(f"{what} must be a real number, not {value!r}")
    return value


def require_int(what: str, value: Any) -> int:
    """Return a whole number, which the argument `what` has to be.

    Raises
    ------
    UsageError
        It is something else.
    """
    try:
        return operator.index(value)
    except TypeError:
        raise UsageError(f"{what} must be a whole number, not {value!r}") from None


def require_handle(what: str, value: Any) -> int:
    """Return a handle of the driver's, which the argument `what` has to be: a number, or one of cuda.bindings' types.

    Raises
    ------
    UsageError
        It is something else, or no number of 64 bits.
    """
    # CUdeviceptr is no index, as CUstream is.
    handle = int(value) if type(value).__module__.startswith("cuda.bindings.") else require_int(what, value)
    if not 0 <= handle < 1 << 64:
        raise UsageError(f"{what} must be a handle of the driver's, not {value}")
    return handle


def as_dtype(dtype: npt.DTypeLike) -> _Dtype:
    """Return what NumPy takes for a dtype.

    Raises
    ------
    UsageError
        It takes it for none.
    """
    try:
        return np.dtype(dtype)
    except (TypeError, ValueError):
        raise UsageError(f"{dtype!r} is no dtype; pass one of NumPy's, or cudatool.bfloat16") from None


def holds(dtype: _Dtype, value: Any) -> bool:
    """Return whether a number can become one of this dtype.

    It may be rounded, or cut to its whole part; it must not wrap around, become infinite, or lose an imaginary part.
    As in torch, -1 to -max stand for max to 1 of an unsigned type: a subtraction can be an addition.
    """
    kind = category(dtype)
    if kind == "bool":
        return True
    if isinstance(value, _COMPLEX):
        if kind != "complex":
            return not value.imag and holds(dtype, value.real)
        return all(holds(real_dtype(dtype), part) for part in (value.real, value.imag))
    least, most = _limits(dtype)
    if kind == "integer":
        return bool(least <= value <= most)  # NaN is not
    return bool(least <= value <= most) or not math.isfinite(value)


@functools.cache
def _limits(dtype: _Dtype) -> tuple[float, float]:
    if category(dtype) == "integer":
        limits = np.iinfo(dtype)
        return min(limits.min, -limits.max), limits.max
    most = float(ml_dtypes.finfo(real_dtype(dtype)).max)  # type: ignore[no-untyped-call]
    return -most, most


def category(dtype: _Dtype) -> str:
    """Return ``"bool"``, ``"integer"``, ``"float8"``, ``"float"`` or ``"complex"``.

    Raises
    ------
    UsageError
        It is none of the number types.
    """
    try:
        return NUMBER_TYPES[dtype][1]
    except KeyError:
        raise UsageError(f"the device does not compute with {dtype}") from None


def c_type(dtype: npt.DTypeLike) -> str:
    """Return what CUDA C++ calls a dtype, in a source that begins with :data:`NUMBERS`."""
    dtype = np.dtype(dtype)
    category(dtype)
    return NUMBER_TYPES[dtype][0]


def compute_dtype(dtype: _Dtype) -> _Dtype:
    """Return the dtype in which kernels compute: float32 for all smaller floats, else the dtype itself."""
    return _FLOAT32 if category(dtype) in ("float", "float8") and dtype != _FLOAT64 else dtype


def real_dtype(dtype: _Dtype) -> _Dtype:
    """Return the dtype of a complex number's parts; any other dtype is returned itself."""
    parts = {_COMPLEX64: _FLOAT32, _COMPLEX128: _FLOAT64}
    return parts.get(dtype, dtype)


@functools.cache
def _promote(a: _Dtype, b: _Dtype) -> _Dtype:
    lower, higher = sorted((a, b), key=lambda dtype: (_RANKS.index(category(dtype)), dtype.itemsize))
    low, high = category(lower), category(higher)
    if a == b:
        return a
    if "float8" in (low, high):
        raise UsageError(f"{a} and {b} have no common type: cast the 8-bit float first")
    if high in ("bool", "integer") and {a, b} & set(_UNSIGNED):
        raise UsageError(f"{a} and {b} have no common type: cast one of them first")
    if high == "complex":
        return _COMPLEX128 if _FLOAT64 in (a, b) else higher
    if low != high:
        return higher
    if high == "float" and lower.itemsize == higher.itemsize:
        return _FLOAT32  # neither of the halves holds the other's values
    if lower.itemsize == higher.itemsize:
        return np.dtype(np.int16)  # int8 and uint8
    return higher


def promote_types(type1: npt.DTypeLike, type2: npt.DTypeLike) -> _Dtype:
    """Return the smallest dtype that an array of the one and an array of the other are both cast to.

    The rules are ``torch.promote_types``'s: a float of any size wins over every integer, complex over every float;
    float16 and bfloat16 meet in float32, int8 and uint8 in int16.

    Raises
    ------
    UsageError
        There is none: for an 8-bit float and anything else, and for an unsigned integer of more than 8 bits and
        another integer.
    """
    return _promote(as_dtype(type1), as_dtype(type2))


def result_type(*operands: Any) -> _Dtype:
    """Return the dtype that an operation on these arrays and numbers computes in.

    The rules are ``torch.result_type``'s. There are three groups: arrays with dimensions, arrays without, numbers.
    Those of a later group count only if they are of a higher category (bool, integer, float, complex) than all
    before; a number then has the dtype bool, int64, float32 or complex64.

    Raises
    ------
    UsageError
        Two dtypes have no common one, or there is no operand.
    """
    if not operands:
        raise UsageError("result_type needs at least one array or number")
    return _result_type(tuple(map(_kind, operands)))


_Kind = tuple[int, _Dtype]  # group of an operand, and its dtype


def _kind(operand: Any) -> _Kind:
    if not is_number(operand):
        return (0 if operand.ndim else 1), operand.dtype
    if isinstance(operand, bool | np.bool):
        return 2, _BOOL
    if isinstance(operand, int | np.integer):
        return 2, np.dtype(np.int64)
    return 2, _COMPLEX64 if isinstance(operand, complex | np.complexfloating) else _FLOAT32


@functools.cache
def _result_type(kinds: tuple[_Kind, ...]) -> _Dtype:
    groups = [
        functools.reduce(_promote, members) for group in range(3) if (members := [d for g, d in kinds if g == group])
    ]
    found = groups.pop()
    while groups:
        found = _combine(groups.pop(), found)
    return found


def _combine(first: _Dtype, later: _Dtype) -> _Dtype:
    """Return the dtype of two groups."""
    one, other = category(first), category(later)
    if _RANKS.index(one) >= _RANKS.index(other):
        return first
    if one == "float8" and other == "float":  # a number, or an array without dimensions: the array stays what it is
        return first
    if one.startswith("float"):  # and the other is complex: the array keeps its precision
        return _COMPLEX128 if first == _FLOAT64 else _COMPLEX64
    return _promote(first, later)


def can_cast(from_: npt.DTypeLike, to: npt.DTypeLike) -> bool:
    """Return whether a result of one dtype may be put into an array of another: never into a lower category.

    The rules are ``torch.can_cast``'s; all sizes of a category may be cast to each other.

    Raises
    ------
    UsageError
        One of them is no dtype.
    """
    return _level(as_dtype(from_)) <= _level(as_dtype(to))


def _level(dtype: _Dtype) -> int:
    return _RANKS.index(category(dtype).replace("float8", "float"))
