"""Functions of complex numbers, in C++: what a kernel that computes in them has in front of its own functions."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from cudatool.runtime.dtypes import category

__all__ = ["complex_functions"]

# By the parts' functions, in the forms that neither overflow nor cancel where the result is in range.
_FUNCTIONS: Final = r"""
template <typename T> __device__ complex<T> scaled(complex<T> z, T factor) { return {z.re * factor, z.im * factor}; }

template <typename T> __device__ complex<T> exp(complex<T> z) {
    T size = exp(z.re);
    if (z.im == 0) return {size, z.im};
    if (z.re == -INFINITY) return {0, 0};  // whatever the angle
    return {size * cos(z.im), size * sin(z.im)};
}
template <typename T> __device__ complex<T> exp2(complex<T> z) { return exp(scaled(z, (T)0.69314718055994530942)); }
template <typename T> __device__ complex<T> expm1(complex<T> z) {
    T half = sin(z.im / 2);
    return {expm1(z.re) * cos(z.im) - 2 * half * half, exp(z.re) * sin(z.im)};
}
template <typename T> __device__ complex<T> log(complex<T> z) { return {log(abs(z)), atan2(z.im, z.re)}; }
template <typename T> __device__ complex<T> log2(complex<T> z) { return scaled(log(z), (T)1.4426950408889634074); }
template <typename T> __device__ complex<T> log10(complex<T> z) { return scaled(log(z), (T)0.43429448190325182765); }
template <typename T> __device__ complex<T> log1p(complex<T> z) {
    T size = z.re > (T)-0.5 && z.re < (T)0.5 && z.im > (T)-0.5 && z.im < (T)0.5
        ? log1p(z.re * (2 + z.re) + z.im * z.im) / 2 : log(hypot(1 + z.re, z.im));
    return {size, atan2(z.im, 1 + z.re)};
}
template <typename T> __device__ complex<T> sqrt(complex<T> z) {
    if (z.re == 0 && z.im == 0) return {0, z.im};
    if (abs(z.im) == INFINITY) return {abs(z.im), z.im};
    T large = sqrt(abs(z.re) / 2 + abs(z) / 2), small = abs(z.im) / (2 * large);
    return z.re < 0 ? complex<T>(small, copysign(large, z.im)) : complex<T>(large, copysign(small, z.im));
}
template <typename T> __device__ complex<T> rsqrt(complex<T> z) { return complex<T>(1) / sqrt(z); }

template <typename T> __device__ complex<T> sin(complex<T> z) {
    if (z.im == 0) return {sin(z.re), z.im * cos(z.re)};
    return {z.re == 0 ? z.re : sin(z.re) * cosh(z.im), cos(z.re) * sinh(z.im)};
}
template <typename T> __device__ complex<T> cos(complex<T> z) {
    if (z.im == 0) return {cos(z.re), -z.im * sin(z.re)};
    return {cos(z.re) * cosh(z.im), z.re == 0 ? -z.re * z.im : -sin(z.re) * sinh(z.im)};
}
template <typename T> __device__ complex<T> tanh(complex<T> z) {
    if (abs(z.re) > 30) return {copysign((T)1, z.re), copysign((T)0, z.im)};  // the nearest number
    T tangent = tan(z.im), sine = sinh(z.re), cosine = cosh(z.re);
    if (isinf(tangent)) return {cosine / sine, 1 / tangent};
    T beta = 1 + tangent * tangent, under = 1 + beta * sine * sine;
    return {beta * cosine * sine / under, tangent / under};
}
template <typename T> __device__ complex<T> tan(complex<T> z) {  // -i tanh(iz)
    complex<T> turned = tanh(complex<T>(-z.im, z.re));
    return {turned.im, -turned.re};
}
template <typename T> __device__ complex<T> power(complex<T> base, complex<T> exponent) {
    if (exponent == complex<T>(0)) return 1;
    if (exponent == complex<T>(1)) return base;
    if (exponent == complex<T>(2)) return base * base;
    if (base == complex<T>(0)) return exponent.re > 0 ? complex<T>(0) : complex<T>(NAN, NAN);
    return exp(log(base) * exponent);
}
"""


def complex_functions(dtype: np.dtype[Any]) -> str:
    """Return the functions for kernels that compute in this dtype: none for real numbers."""
    return _FUNCTIONS if category(dtype) == "complex" else ""
