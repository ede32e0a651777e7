"""Softmax and its logarithm along a dimension, and their gradients."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from cudatool.errors import UsageError
from cudatool.ops._dispatch import KINDS, op
from cudatool.ops._reduction import dimensions
from cudatool.ops._rows import RowKernels, tile
from cudatool.runtime.array import DeviceArray, empty
from cudatool.runtime.dtypes import as_dtype, c_type, category, compute_dtype, require_int

__all__ = ["log_softmax", "log_softmax_backward", "softmax", "softmax_backward"]

_KERNELS: Final = RowKernels(r"""
template <typename Out, typename In, typename T, int N, bool LOGARITHM>
__device__ void forward(Out *out, const In *input, long long rows, long long columns AFTER_PARAMETERS) {
    THIS_ROW;
    input += row * columns, out += row * columns;
    SoftSum<T> all = {-INFINITY, 0};
    EACH_PACK(p) {
        Pack<In, N> x = pack_at<N>(input, p);
        EACH(j) all.take(convert<T>(x.at[j]));
    }
    all = together(all);
    T scale = LOGARITHM ? log(all.sum) : 1 / all.sum;
    EACH_PACK(p) {
        Pack<In, N> x = pack_at<N>(input, p);
        Pack<Out, N> y;
        EACH(j) {
            T distance = convert<T>(x.at[j]) - all.largest;
            y.at[j] = convert<Out>(LOGARITHM ? distance - scale : exp(distance) * scale);
        }
        PUT(out, p, y);
    }
}

template <typename Out, typename In, typename T, int N>
__global__ void softmax(Out *out, const In *input, long long rows, long long columns AFTER_PARAMETERS) {
    forward<Out, In, T, N, false>(out, input, rows, columns AFTER_ARGUMENTS);
}

template <typename Out, typename In, typename T, int N>
__global__ void log_softmax(Out *out, const In *input, long long rows, long long columns AFTER_PARAMETERS) {
    forward<Out, In, T, N, true>(out, input, rows, columns AFTER_ARGUMENTS);
}

template <typename Out, typename Grad, typename In, typename T, int N, bool LOGARITHM>
__device__ void backward(
    Out *out, const Grad *grad, const In *output, long long rows, long long columns AFTER_PARAMETERS
) {
    THIS_ROW;
    out += row * columns, grad += row * columns, output += row * columns;
    Sum<T> all = {0};
    EACH_PACK(p) {
        Pack<Grad, N> g = pack_at<N>(grad, p);
        Pack<In, N> y = pack_at<N>(output, p);
        EACH(j) all.value += convert<T>(g.at[j]) * (LOGARITHM ? 1 : convert<T>(y.at[j]));
    }
    all = together(all);
    EACH_PACK(p) {
        Pack<Grad, N> g = pack_at<N>(grad, p);
        Pack<In, N> y = pack_at<N>(output, p);
        Pack<Out, N> x;
        EACH(j) {
            T slope = convert<T>(g.at[j]), value = convert<T>(y.at[j]);
            x.at[j] = convert<Out>(LOGARITHM ? slope - exp(value) * all.value : value * (slope - all.value));
        }
        PUT(out, p, x);
    }
}

template <typename Out, typename Grad, typename In, typename T, int N>
__global__ void softmax_backward(
    Out *out, const Grad *grad, const In *output, long long rows, long long columns AFTER_PARAMETERS
) {
    backward<Out, Grad, In, T, N, false>(out, grad, output, rows, columns AFTER_ARGUMENTS);
}

template <typename Out, typename Grad, typename In, typename T, int N>
__global__ void log_softmax_backward(
    Out *out, const Grad *grad, const In *output, long long rows, long long columns AFTER_PARAMETERS
) {
    backward<Out, Grad, In, T, N, true>(out, grad, output, rows, columns AFTER_ARGUMENTS);
}
""")

softmax = op("cudatool.ops.softmax")
log_softmax = op("cudatool.ops.log_softmax")
softmax_backward = op("cudatool.ops.softmax_backward")
log_softmax_backward = op("cudatool.ops.log_softmax_backward")


@softmax.implementation(*KINDS)
def _(input: DeviceArray, dim: int, *, dtype: npt.DTypeLike | None = None) -> DeviceArray:
    """Return exp(input), scaled so that the sum along `dim` is 1.

    Parameters
    ----------
    dtype
        Of the result; default: the array's. It is computed in float32, or float64. Integers need one.
    """
    return _along("softmax", dim, dtype, _whole_as(dtype, input))


@log_softmax.implementation(*KINDS)
def _(input: DeviceArray, dim: int, *, dtype: npt.DTypeLike | None = None) -> DeviceArray:
    """Return the logarithm of :func:`softmax`."""
    return _along("log_softmax", dim, dtype, _whole_as(dtype, input))


@softmax_backward.implementation(*KINDS)
def _(
    grad_output: DeviceArray, output: DeviceArray, dim: int, *, input_dtype: npt.DTypeLike | None = None
) -> DeviceArray:
    """Return the gradient for softmax's input, from the gradient for its output and the output.

    Parameters
    ----------
    input_dtype
        Of the result; default: the gradient's.
    """
    return _along("softmax_backward", dim, input_dtype, grad_output, output)


@log_softmax_backward.implementation(*KINDS)
def _(
    grad_output: DeviceArray, output: DeviceArray, dim: int, *, input_dtype: npt.DTypeLike | None = None
) -> DeviceArray:
    """Return the gradient for log_softmax's input, from the gradient for its output and the output."""
    return _along("log_softmax_backward", dim, input_dtype, grad_output, output)


def _whole_as(dtype: npt.DTypeLike | None, input: DeviceArray) -> DeviceArray:
    """Return integers as the floats that are asked for; any other array is returned itself."""
    if dtype is None or not isinstance(input, DeviceArray) or category(input.dtype) not in ("bool", "integer"):
        return input
    return input.astype(dtype)


def _along(name: str, dim: int, dtype: npt.DTypeLike | None, *inputs: DeviceArray) -> DeviceArray:
    """Run a kernel of `inputs`' shape along a dimension, which becomes the rows."""
    first = inputs[0]
    for array in inputs:
        if not isinstance(array, DeviceArray) or category(array.dtype) != "float":
            raise UsageError(f"{name} takes arrays of floats, not {array!r}")
        if (array.shape, array.device) != (first.shape, first.device):
            raise UsageError(f"{name}: {first!r} and {array!r} have different shapes or devices")
    wanted: np.dtype[Any] = first.dtype if dtype is None else as_dtype(dtype)
    if category(wanted) != "float":
        raise UsageError(f"{name} returns floats, not {wanted}")
    dims = dimensions(name, require_int(f"{name}: dim", dim), first.ndim)
    if dims and dims != (first.ndim - 1,):
        order = [d for d in range(first.ndim) if d not in dims] + list(dims)
        moved = _along(name, -1, wanted, *(array.transpose(order) for array in inputs))
        return moved.transpose([int(d) for d in np.argsort(order)])
    out = empty(first.shape, wanted, device=first.device)
    if out.size:
        columns = first.shape[-1] if first.ndim else 1
        rows = out.size // columns
        sources = [array.contiguous() for array in inputs]
        tiling = tile(rows, columns, [out, *sources])
        compute = np.result_type(*(compute_dtype(array.dtype) for array in inputs))
        types = ", ".join(c_type(dtype) for dtype in (out.dtype, *(s.dtype for s in sources), compute))
        _KERNELS.compute(f"{name}<{types}, {tiling.width}>", out, tiling, *sources, rows, columns)
    return out
