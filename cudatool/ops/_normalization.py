"""Layer normalization and its gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np

from cudatool.errors import UsageError
from cudatool.ops._dispatch import KINDS, op
from cudatool.ops._rows import RowKernels, tile
from cudatool.ops._statistics import sum as sum_
from cudatool.runtime import calls
from cudatool.runtime.array import DeviceArray, empty
from cudatool.runtime.dtypes import c_type, category, compute_dtype, real, require_int

__all__ = ["layer_norm", "native_layer_norm", "native_layer_norm_backward"]

_KERNELS: Final = RowKernels(r"""
template <typename In, typename Weight, typename T, int N>
__global__ void layer_norm(
    In *out, T *means, T *scales, const In *input, const Weight *weight, const Weight *bias, T eps,
    long long rows, long long columns AFTER_PARAMETERS
) {
    THIS_ROW;
    input += row * columns, out += row * columns;
    Sum<T> all = {0}, squares = {0};
    EACH_PACK(p) {
        Pack<In, N> x = pack_at<N>(input, p);
        EACH(j) all.value += convert<T>(x.at[j]);
    }
    T mean = together(all).value / columns;
    EACH_PACK(p) {
        Pack<In, N> x = pack_at<N>(input, p);
        EACH(j) {
            T distance = convert<T>(x.at[j]) - mean;
            squares.value += distance * distance;
        }
    }
    T scale = 1 / sqrt(together(squares).value / columns + eps);
    EACH_PACK(p) {
        Pack<In, N> x = pack_at<N>(input, p), y;
        EACH(j) {
            long long c = p * N + j;
            T value = (convert<T>(x.at[j]) - mean) * scale;
            if (weight) value *= convert<T>(weight[c]);
            if (bias) value += convert<T>(bias[c]);
            y.at[j] = convert<In>(value);
        }
        PUT(out, p, y);
    }
    if (threadIdx.x == 0 && row < rows) means[row] = mean, scales[row] = scale;
}

template <typename T> struct Pair {
    T first, second;
    __device__ void merge(Pair other) { first += other.first, second += other.second; }
};

template <typename In, typename Weight, typename T, int N>
__global__ void layer_norm_backward(
    In *out, const In *grad, const In *input, const T *means, const T *scales, const Weight *weight,
    long long rows, long long columns AFTER_PARAMETERS
) {
    THIS_ROW;
    input += row * columns, out += row * columns, grad += row * columns;
    T mean = row < rows ? means[row] : 0, scale = row < rows ? scales[row] : 0;
    Pair<T> all = {0, 0};
    EACH_PACK(p) {
        Pack<In, N> g = pack_at<N>(grad, p), x = pack_at<N>(input, p);
        EACH(j) {
            T slope = convert<T>(g.at[j]) * (weight ? convert<T>(weight[p * N + j]) : 1);
            all.first += slope;
            all.second += slope * (convert<T>(x.at[j]) - mean) * scale;
        }
    }
    all = together(all);
    EACH_PACK(p) {
        Pack<In, N> g = pack_at<N>(grad, p), x = pack_at<N>(input, p), y;
        EACH(j) {
            T slope = convert<T>(g.at[j]) * (weight ? convert<T>(weight[p * N + j]) : 1);
            T normal = (convert<T>(x.at[j]) - mean) * scale;
            y.at[j] = convert<In>((slope - (all.first + normal * all.second) / columns) * scale);
        }
        PUT(out, p, y);
    }
}

// The gradients for weight and bias of some rows: each thread adds up a column.
template <typename In, typename T>
__global__ void layer_norm_parameters(
    T *weights, T *biases, const In *grad, const In *input, const T *means, const T *scales,
    long long rows, long long columns, long long chunk
) {
    long long column = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (column >= columns) return;
    long long begin = blockIdx.y * chunk, end = begin + chunk < rows ? begin + chunk : rows;
    T weight = 0, bias = 0;
    for (long long row = begin; row < end; ++row) {
        T slope = convert<T>(grad[row * columns + column]);
        weight += slope * (convert<T>(input[row * columns + column]) - means[row]) * scales[row];
        bias += slope;
    }
    weights[blockIdx.y * columns + column] = weight;
    biases[blockIdx.y * columns + column] = bias;
}
""")
_COLUMNS: Final = 128  # that a block adds up
_BLOCKS: Final = 512
_LEAST_ROWS: Final = 16

layer_norm = op("cudatool.ops.layer_norm")
native_layer_norm = op("cudatool.ops.native_layer_norm")
native_layer_norm_backward = op("cudatool.ops.native_layer_norm_backward")


@layer_norm.implementation(*KINDS)
def _(
    input: DeviceArray,
    normalized_shape: Sequence[int],
    weight: DeviceArray | None = None,
    bias: DeviceArray | None = None,
    eps: float = 1e-5,
) -> DeviceArray:
    """Return the input with mean 0 and variance 1 over its last dimensions, times weight plus bias.

    Parameters
    ----------
    normalized_shape
        The last dimensions.
    weight, bias
        Of that shape, or None.
    eps
        Added to the variance.
    """
    return _forward(input, normalized_shape, weight, bias, eps)[0]


@native_layer_norm.implementation(*KINDS)
def _(
    input: DeviceArray,
    normalized_shape: Sequence[int],
    weight: DeviceArray | None,
    bias: DeviceArray | None,
    eps: float,
) -> tuple[DeviceArray, DeviceArray, DeviceArray]:
    """Return :func:`layer_norm`'s result, and the mean and 1 / standard deviation that its gradient needs."""
    return _forward(input, normalized_shape, weight, bias, eps)


@native_layer_norm_backward.implementation(*KINDS)
def _(
    grad_out: DeviceArray,
    input: DeviceArray,
    normalized_shape: Sequence[int],
    mean: DeviceArray,
    rstd: DeviceArray,
    weight: DeviceArray | None = None,
    bias: DeviceArray | None = None,
    output_mask: Sequence[bool] = (True, True, True),
) -> tuple[DeviceArray | None, DeviceArray | None, DeviceArray | None]:
    """Return the gradients for layer_norm's input, weight and bias, from the gradient for its output.

    Parameters
    ----------
    mean, rstd
        As :func:`native_layer_norm` returned them.
    output_mask
        Which of the three are wanted; the others are None.
    """
    rows, columns = _check(input, normalized_shape, weight, bias)
    like = isinstance(grad_out, DeviceArray) and (grad_out.shape, grad_out.device) == (input.shape, input.device)
    if not like:
        raise UsageError(f"layer_norm: the gradient {grad_out!r} is not like the input {input!r}")
    grad, source = grad_out.astype(input.dtype).contiguous(), input.contiguous()
    compute = compute_dtype(input.dtype)
    for name, saved in (("mean", mean), ("rstd", rstd)):
        if not isinstance(saved, DeviceArray) or (saved.dtype, saved.device) != (compute, input.device):
            raise UsageError(
                f"layer_norm: {name} must be {compute} on device {input.device}, as native_layer_norm gave it"
            )
        if saved.size != rows and columns:
            raise UsageError(f"layer_norm: {name} must have one number for each of {rows} rows, not {saved.size}")
    mean, rstd = mean.contiguous(), rstd.contiguous()
    element, number = c_type(input.dtype), c_type(compute)
    gradients: list[DeviceArray | None] = [None, None, None]
    if output_mask[0]:
        out = gradients[0] = empty(input.shape, input.dtype, device=input.device)
        if out.size:
            tiling = tile(rows, columns, [out, grad, source])
            given = _parameter(weight)
            kernel = f"layer_norm_backward<{element}, {_type(input, weight)}, {number}, {tiling.width}>"
            _KERNELS.compute(kernel, out, tiling, grad, source, mean, rstd, given, rows, columns)
    if output_mask[1] or output_mask[2]:
        across = max(1, math.ceil(columns / _COLUMNS))
        blocks = max(1, min(_BLOCKS // across, rows // _LEAST_ROWS))
        sums = empty((2, blocks, columns), compute, device=input.device)
        if columns:
            config = calls.core.LaunchConfig(grid=(across, blocks), block=_COLUMNS)
            chunk = math.ceil(rows / blocks)
            arguments = sums[0], sums[1], grad, source, mean, rstd, rows, columns, chunk
            _KERNELS(f"layer_norm_parameters<{element}, {number}>", input.device, config, *arguments)
        for k, parameter in enumerate((weight, bias)):
            if output_mask[k + 1]:
                dtype = input.dtype if parameter is None else parameter.dtype
                total = sum_.redispatch(sums[k], 0)
                gradients[k + 1] = total.astype(dtype).reshape(tuple(normalized_shape))
    return gradients[0], gradients[1], gradients[2]


def _forward(
    input: DeviceArray,
    normalized_shape: Sequence[int],
    weight: DeviceArray | None,
    bias: DeviceArray | None,
    eps: float,
) -> tuple[DeviceArray, DeviceArray, DeviceArray]:
    rows, columns = _check(input, normalized_shape, weight, bias)
    out = empty(input.shape, input.dtype, device=input.device)
    compute = compute_dtype(input.dtype)
    saved = input.shape[: input.ndim - len(normalized_shape)] + (1,) * len(normalized_shape)
    mean, rstd = (empty(saved, compute, device=input.device) for _ in range(2))
    if out.size:
        source = input.contiguous()
        tiling = tile(rows, columns, [out, source])
        kernel = f"layer_norm<{c_type(input.dtype)}, {_type(input, weight, bias)}, {c_type(compute)}, {tiling.width}>"
        parameters = _parameter(weight), _parameter(bias), compute.type(real("layer_norm: eps", eps))
        _KERNELS.compute(kernel, out, tiling, mean, rstd, source, *parameters, rows, columns)
    return out, mean, rstd


def _check(
    input: DeviceArray, normalized_shape: Sequence[int], weight: DeviceArray | None, bias: DeviceArray | None
) -> tuple[int, int]:
    """Return rows and columns."""
    if not isinstance(normalized_shape, Sequence):
        raise UsageError(f"layer_norm: normalized_shape must be several whole numbers, not {normalized_shape!r}")
    shape = tuple([require_int("layer_norm: normalized_shape", extent) for extent in normalized_shape])
    if not isinstance(input, DeviceArray) or category(input.dtype) != "float":
        raise UsageError(f"layer_norm takes an array of floats, not {input!r}")
    if not shape or input.shape[input.ndim - len(shape) :] != shape:
        raise UsageError(f"layer_norm: {shape} are not the last dimensions of shape {input.shape}")
    for name, parameter in (("weight", weight), ("bias", bias)):
        if parameter is None:
            continue
        if not isinstance(parameter, DeviceArray):
            raise UsageError(f"layer_norm: {name} must be a DeviceArray, not {type(parameter).__name__}")
        if (parameter.shape, parameter.device) != (shape, input.device) or category(parameter.dtype) != "float":
            raise UsageError(f"layer_norm: {name} must be floats of shape {shape} on device {input.device}")
    if weight is not None and bias is not None and weight.dtype != bias.dtype:
        raise UsageError(f"layer_norm: weight is {weight.dtype}, bias {bias.dtype}; they must be alike")
    columns = math.prod(shape)
    return (input.size // columns if columns else 0), columns


def _parameter(parameter: DeviceArray | None) -> DeviceArray | np.uint64:
    return np.uint64(0) if parameter is None else parameter.contiguous()


def _type(input: DeviceArray, *parameters: DeviceArray | None) -> str:
    return c_type(next((parameter.dtype for parameter in parameters if parameter is not None), input.dtype))
