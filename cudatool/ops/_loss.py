"""Cross entropy of class scores, and its gradient."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from cudatool.errors import UsageError
from cudatool.ops._dispatch import KINDS, op
from cudatool.ops._reduction import Reduction
from cudatool.ops._rows import RowKernels, tile
from cudatool.ops._statistics import sum as sum_
from cudatool.runtime.array import DeviceArray, empty, full
from cudatool.runtime.dtypes import c_type, category, compute_dtype, is_number, real, require_int

__all__ = ["cross_entropy", "cross_entropy_backward"]

# With smoothing s, the wanted probabilities of C classes are s / C, and 1 - s more for the target.
_KERNELS: Final = RowKernels(r"""
// The class of a row, -1 if it is ignored.
__device__ long long target_of(const long long *target, long long row, long long columns, long long ignore_index) {
    long long found = target[row];
    if (found == ignore_index) return -1;
    if (found < 0 || found >= columns) __trap();  // there is no such class
    return found;
}

template <typename In, typename T, int N>
__global__ void cross_entropy(
    T *losses, const In *input, const long long *target, T ignored, long long ignore_index, T smoothing,
    long long rows, long long columns
) {
    THIS_ROW;
    input += row * columns;
    SoftSum<T> all = {-INFINITY, 0};
    Sum<T> scores = {0};
    EACH_PACK(p) {
        Pack<In, N> x = pack_at<N>(input, p);
        EACH(j) {
            all.take(convert<T>(x.at[j]));
            scores.value += convert<T>(x.at[j]);
        }
    }
    all = together(all);
    if (smoothing != 0) scores = together(scores);
    if (threadIdx.x != 0 || row >= rows) return;
    long long wanted = target_of(target, row, columns, ignore_index);
    T loss = ignored;
    if (wanted >= 0) {
        T entropy = all.largest + log(all.sum);
        loss = (1 - smoothing) * (entropy - convert<T>(input[wanted]));
        if (smoothing != 0) loss += smoothing * (entropy - scores.value / columns);
        if (loss < 0) loss = 0;  // by rounding
    }
    losses[row] = loss;
}

// `grad` has one element for each row, or, with step 0, one for all; divided by `*count` if there is one.
template <typename In, typename T, int N>
__global__ void cross_entropy_backward(
    In *out, const T *grad, long long step, const long long *count, const In *input, const long long *target,
    long long ignore_index, T smoothing, long long rows, long long columns
) {
    THIS_ROW;
    input += row * columns, out += row * columns;
    SoftSum<T> all = {-INFINITY, 0};
    EACH_PACK(p) {
        Pack<In, N> x = pack_at<N>(input, p);
        EACH(j) all.take(convert<T>(x.at[j]));
    }
    all = together(all);
    if (row >= rows) return;
    long long wanted = target_of(target, row, columns, ignore_index);
    T factor = wanted < 0 ? 0 : grad[row * step] / (count ? (T)*count : 1);
    EACH_PACK(p) {
        Pack<In, N> x = pack_at<N>(input, p), y;
        EACH(j) {
            T probability = exp(convert<T>(x.at[j]) - all.largest) / all.sum;
            T goal = smoothing / columns + (p * N + j == wanted ? 1 - smoothing : 0);
            y.at[j] = convert<In>(wanted < 0 ? 0 : (probability - goal) * factor);
        }
        put_pack(out, p, y);
    }
}
""")
_IGNORED: Final = -1.0  # no row has a loss below 0
_mean_of_valid: Final = Reduction(
    "mean_of_valid",
    """{
    Compute sum;
    long long count;
    __device__ static State start() { return {0, 0}; }
    __device__ void take(Compute x, long long index, double parameter) {
        if (x < 0) return;  // an ignored row
        sum += x;
        ++count;
    }
    __device__ void merge(State other) { sum += other.sum, count += other.count; }
    __device__ Compute finish(long long size, double parameter) { return sum / count; }
}""",
    accepts=("float",),
)
_count_valid: Final = Reduction(
    "count_valid",
    """{
    long long count;
    __device__ static State start() { return {0}; }
    __device__ void take(Compute x, long long index, double parameter) { count += x != (Compute)parameter; }
    __device__ void merge(State other) { count += other.count; }
    __device__ long long finish(long long size, double parameter) { return count; }
}""",
    accepts=("integer",),
)
_INT64: Final = np.dtype(np.int64)

cross_entropy = op("cudatool.ops.cross_entropy")
cross_entropy_backward = op("cudatool.ops.cross_entropy_backward")


@cross_entropy.implementation(*KINDS)
def _(
    input: DeviceArray,
    target: DeviceArray,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> DeviceArray:
    """Return how badly scores predict classes: -log(softmax(input)[target]).

    Parameters
    ----------
    input
        Scores, of shape (rows, classes).
    target
        A class for each row, of any integer type. One that does not exist ends the kernel with an error.
    ignore_index
        Rows with this target do not count.
    reduction
        ``"mean"`` over the rows that count, ``"sum"``, or ``"none"``: one loss for each row.
    label_smoothing
        Probability that is taken from the target and shared out over all classes.
    """
    source, classes = _check(input, target, ignore_index, reduction, label_smoothing)
    rows, columns = input.shape
    compute = compute_dtype(input.dtype)
    losses = empty(rows, compute, device=input.device)
    if rows:
        width, config = tile(rows, columns, [source])
        ignored = _IGNORED if reduction == "mean" else 0.0
        numbers = compute.type(ignored), ignore_index, compute.type(label_smoothing)
        kernel = f"cross_entropy<{c_type(input.dtype)}, {c_type(compute)}, {width}>"
        _KERNELS(kernel, input.device, config, losses, source, classes, *numbers, rows, columns)
    if reduction == "mean":
        return _mean_of_valid(losses, None, False, result=input.dtype)
    if reduction == "sum":
        result: DeviceArray = sum_.redispatch(losses, dtype=input.dtype)
        return result
    return losses.astype(input.dtype)


@cross_entropy_backward.implementation(*KINDS)
def _(
    grad_output: Any,
    input: DeviceArray,
    target: DeviceArray,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> DeviceArray:
    """Return the gradient for cross_entropy's input, from the gradient for its output and its arguments.

    Parameters
    ----------
    grad_output
        An array like the output, or a number.
    """
    source, classes = _check(input, target, ignore_index, reduction, label_smoothing)
    rows, columns = input.shape
    compute = compute_dtype(input.dtype)
    shape = (rows,) if reduction == "none" else ()
    if is_number(grad_output):
        grad_output = full(shape, grad_output, compute, device=input.device)
    fits = isinstance(grad_output, DeviceArray) and (grad_output.shape, grad_output.device) == (shape, input.device)
    if not fits:
        raise UsageError(f"cross_entropy: the gradient must have shape {shape}; it is {grad_output!r}")
    grad = grad_output.astype(compute).contiguous()
    out = empty(input.shape, input.dtype, device=input.device)
    if out.size:
        count: Any = np.uint64(0)
        if reduction == "mean":
            count = _count_valid(classes, None, False, parameter=float(ignore_index))
        width, config = tile(rows, columns, [out, source])
        numbers = ignore_index, compute.type(label_smoothing)
        kernel = f"cross_entropy_backward<{c_type(input.dtype)}, {c_type(compute)}, {width}>"
        arguments = out, grad, len(shape), count, source, classes, *numbers, rows, columns
        _KERNELS(kernel, input.device, config, *arguments)
    return out


def _check(
    input: DeviceArray, target: DeviceArray, ignore_index: int, reduction: str, label_smoothing: float
) -> tuple[DeviceArray, DeviceArray]:
    """Return the scores contiguous, and the classes also as int64."""
    if not isinstance(input, DeviceArray) or input.ndim != 2 or category(input.dtype) != "float":
        raise UsageError(f"cross_entropy takes floats of shape (rows, classes), not {input!r}; reshape them")
    if input.shape[0] and not input.shape[1]:
        raise UsageError(f"cross_entropy: there are no classes to choose from in scores of shape {input.shape}")
    fits = isinstance(target, DeviceArray) and (target.shape, target.device) == (input.shape[:1], input.device)
    if not fits or category(target.dtype) != "integer":
        raise UsageError(f"cross_entropy: target must be integers of shape {input.shape[:1]}; it is {target!r}")
    if reduction not in ("mean", "sum", "none"):
        raise UsageError(f"reduction must be 'mean', 'sum' or 'none', not {reduction!r}")
    require_int("ignore_index", ignore_index)
    if not 0 <= real("label_smoothing", label_smoothing) <= 1:
        raise UsageError(f"label_smoothing must be between 0 and 1, not {label_smoothing}")
    return input.contiguous(), target.astype(_INT64).contiguous()
