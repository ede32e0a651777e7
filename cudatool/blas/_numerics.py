"""What a tensor core computes, in NumPy: inputs rounded as the switches say, sums in a wider type, epilogues."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from cudatool.blas._gemm import FP8, Compute, Epilogue
from cudatool.blas._threads import threads_for

__all__ = ["RELU_MASK_BITS", "apply_epilogue", "product", "round_to_tf32", "store"]

_Array = npt.NDArray[Any]

RELU_MASK_BITS: Final = 128
"""Rows of a ReLU's mask begin at multiples of this many bits (cuBLASLt's rule)."""

_DROPPED_BITS: Final = 13  # of float32's 23 bits of mantissa, TF32 has the first ten
_SQRT_2_OVER_PI: Final = 0.7978845608028654
_CUBIC: Final = 0.044715
_MOST: Final = dict(zip(FP8, (448.0, 57344.0), strict=True))  # the largest number of 8 bits
_SUMS: Final = {Compute.DOUBLE: np.float64, Compute.INTEGER: np.int32}


def round_to_tf32(values: _Array) -> _Array:
    """Return float32 or complex64 values with ten bits of mantissa: to nearest, ties away, as cvt.rna.tf32 does."""
    parts = np.ascontiguousarray(values).view(np.float32)
    bits = parts.view(np.uint32)
    half = np.uint32(1 << (_DROPPED_BITS - 1))
    rounded = ((bits + half) & ~np.uint32((1 << _DROPPED_BITS) - 1)).view(np.float32)
    result: _Array = np.where(np.isfinite(parts), rounded, parts).view(values.dtype)
    return result


def product(a: _Array, b: _Array, compute: Compute) -> _Array:
    """Return ``a @ b`` as it is before it is rounded to the result's dtype."""
    if compute is Compute.TF32:
        a, b = round_to_tf32(a), round_to_tf32(b)
    elif a.dtype.kind != "c":
        sums = _SUMS.get(compute, np.float32)
        a, b = a.astype(sums, copy=False), b.astype(sums, copy=False)
    with threads_for(a.shape[-2] * a.shape[-1] * b.shape[-1]):
        result: _Array = np.matmul(a, b)
    return result


def store(out: _Array, values: _Array) -> None:
    """Write values, rounded to `out`'s dtype; what is too large becomes infinity, or the largest of 8 bits."""
    if out.dtype in FP8:
        most = _MOST[out.dtype]
        values = np.clip(values, -most, most)
    with np.errstate(over="ignore"):
        out[...] = values


def apply_epilogue(values: _Array, epilogue: Epilogue, bias: _Array | None, aux: _Array | None) -> _Array:
    """Return what is stored for the sums of a product; write to `bias` and `aux` what the epilogue stores there."""
    if epilogue.reads_bias:
        assert bias is not None
        values = values + bias.astype(values.dtype)
    if epilogue.reads_aux:
        assert aux is not None
        values = values * (
            _bits_of(aux, values.shape[-1]) if "relu" in epilogue else _gelu_slope(aux.astype(values.dtype))
        )
    elif "relu" in epilogue:
        if aux is not None:
            aux[...] = _mask_of(values > 0)
        values = np.maximum(values, 0)
    elif "gelu" in epilogue:
        if aux is not None:
            aux[...] = values
        values = 0.5 * values * (1 + _tanh_part(values))
    if epilogue.writes_bias:
        assert bias is not None
        bias[...] = values.sum(axis=0)
    return values


def _mask_of(positive: _Array) -> _Array:
    padded = np.pad(positive, ((0, 0), (0, -positive.shape[1] % RELU_MASK_BITS)))
    return np.packbits(padded, axis=1, bitorder="little")


def _bits_of(mask: _Array, columns: int) -> _Array:
    return np.unpackbits(mask, axis=1, count=columns, bitorder="little")


def _tanh_part(x: _Array) -> _Array:
    result: _Array = np.tanh(_SQRT_2_OVER_PI * (x + _CUBIC * x**3))
    return result


def _gelu_slope(x: _Array) -> _Array:
    tanh = _tanh_part(x)
    inner = _SQRT_2_OVER_PI * (1 + 3 * _CUBIC * x**2)
    slope: _Array = 0.5 * (1 + tanh) + 0.5 * x * (1 - tanh**2) * inner
    return slope
