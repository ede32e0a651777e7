"""Draws of categories, each with its own probability."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from cudatool.errors import UsageError
from cudatool.random._creation import target
from cudatool.random._fills import exponential_
from cudatool.random._generator import Generator
from cudatool.random._kernels import PHILOX, operation, real_type, run, take
from cudatool.runtime.array import DeviceArray, check_array, empty
from cudatool.runtime.dtypes import require_int
from cudatool.runtime.stream import current_stream

__all__ = ["multinomial"]

_SOURCE: Final = (
    PHILOX
    + r"""
const int THREADS = 256;

// Whether weight a comes before weight b: the larger first, of equal ones the first.
template <typename R>
__device__ bool before(R a, int i, R b, int j) { return a > b || (a == b && i < j); }

// Without replacement: category i has the key weight / e, with e from the exponential distribution. The largest key
// is at i with the probability of i; the largest of the others with that of i among them; and so on.
template <typename T>
__global__ void weigh(const T *weights, T *keys, long long size) {
    typedef typename Real<T>::type R;
    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= size) return;
    R weight = weights[i];
    if (!(weight >= 0) || isinf(weight)) __trap();
    keys[i] = T(weight / R(keys[i]));
}

// Stop if no category of a row has a weight, as what comes first has one otherwise (but for keys rounded to 0).
template <typename T>
__device__ void check_row(const T *weights, int first, int categories) {
    typedef typename Real<T>::type R;
    if (R(weights[first]) > 0) return;
    for (int i = 0; i < categories; ++i) if (R(weights[i]) > 0) return;
    __trap();
}

// One block a row: where its largest key is.
template <typename T>
__global__ void largest(const T *weights, const T *keys, long long *out, int categories) {
    typedef typename Real<T>::type R;
    __shared__ R best[THREADS];
    __shared__ int where[THREADS];
    const T *row = keys + (long long)blockIdx.x * categories;
    int t = threadIdx.x;
    where[t] = -1;
    for (int i = t; i < categories; i += THREADS)
        if (where[t] < 0 || before(R(row[i]), i, best[t], where[t])) {
            best[t] = row[i];
            where[t] = i;
        }
    __syncthreads();
    for (int half = THREADS / 2; half > 0; half /= 2) {
        if (t < half && where[t + half] >= 0 &&
            (where[t] < 0 || before(best[t + half], where[t + half], best[t], where[t]))) {
            best[t] = best[t + half];
            where[t] = where[t + half];
        }
        __syncthreads();
    }
    if (t > 0) return;
    check_row(weights + (long long)blockIdx.x * categories, where[0], categories);
    out[blockIdx.x] = where[0];
}

// A thread for each key: as many keys come before it as its place in the result says.
template <typename T>
__global__ void in_order(const T *weights, const T *keys, long long *out, int categories, int count) {
    typedef typename Real<T>::type R;
    const T *row = keys + (long long)blockIdx.y * categories;
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= categories) return;
    R own = row[i];
    int place = 0;
    for (int j = 0; j < categories; ++j) place += before(R(row[j]), j, own, i);
    if (place == 0) check_row(weights + (long long)blockIdx.y * categories, i, categories);
    if (place < count) out[(long long)blockIdx.y * count + place] = i;
}

// With replacement: one block a row adds the weights up, then a thread for each sample looks where a uniform number
// falls among the sums.
template <typename T>
__global__ void add_up(const T *weights, double *sums, int categories) {
    typedef typename Real<T>::type R;
    __shared__ double shared[THREADS];
    const T *row = weights + (long long)blockIdx.x * categories;
    double *to = sums + (long long)blockIdx.x * categories;
    int t = threadIdx.x;
    double all = 0;
    for (int start = 0; start < categories; start += THREADS) {
        R own = start + t < categories ? R(row[start + t]) : R(0);
        if (!(own >= 0) || isinf(own)) __trap();
        shared[t] = own;
        __syncthreads();
        for (int step = 1; step < THREADS; step *= 2) {
            double left = t >= step ? shared[t - step] : 0;
            __syncthreads();
            shared[t] += left;
            __syncthreads();
        }
        if (start + t < categories) to[start + t] = all + shared[t];
        all += shared[THREADS - 1];
        __syncthreads();
    }
    if (!(all > 0)) __trap();
}

__global__ void sample(const double *sums, long long *out, int rows, int categories, int count, Word64 seed,
                       Word64 offset, const Word64 *place) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    Philox philox((long long)blockIdx.y * gridDim.x * blockDim.x + i, seed, offset, place);
    for (int row = blockIdx.y; row < rows; row += gridDim.y) {
        const double *own = sums + (long long)row * categories;
        double number = unit(philox.next().x) * own[categories - 1];
        if (i >= count) continue;
        int low = 0, high = categories - 1;  // the first sum that is not below the number
        while (low < high) {
            int middle = (low + high) / 2;
            if (own[middle] < number) low = middle + 1; else high = middle;
        }
        out[(long long)row * count + i] = low;
    }
}
"""
)
_THREADS: Final = 256
_SAMPLE_THREADS: Final = 128
_MOST_ROWS: Final = 65535
_MOST_CATEGORIES: Final = 1 << 24


@operation
def multinomial(
    input: DeviceArray,
    num_samples: int,
    replacement: bool = False,
    *,
    generator: Generator | None = None,
    out: DeviceArray | None = None,
) -> DeviceArray:
    """Return categories drawn from each row of weights, as int64.

    Parameters
    ----------
    input
        Weights, floating-point, not negative, in one dimension or in rows; they need not add up to 1. One that is
        negative, infinite or not a number, or a row without any weight, stops the kernel: the next synchronization
        raises, and the context cannot be used again.
    num_samples
        How many for each row.
    replacement
        Whether a category may come more than once.
    out
        Store in this array instead of a new one.

    Raises
    ------
    UsageError
        Shape, dtype or number of samples are not as above, or there are fewer categories than samples.
    """
    check_array("multinomial", input)
    num_samples = require_int("num_samples", num_samples)
    name = real_type(input.dtype, "multinomial")
    if input.ndim not in (1, 2) or not 0 < input.shape[-1] <= _MOST_CATEGORIES:
        raise UsageError(f"multinomial takes 1 to 2^24 weights in one dimension or in rows, not shape {input.shape}")
    categories = input.shape[-1]
    if num_samples <= 0 or (not replacement and num_samples > categories):
        limit = "" if replacement else f" and at most {categories}, the categories, without replacement"
        raise UsageError(f"multinomial takes num_samples above 0{limit}, not {num_samples}")
    result = target((*input.shape[:-1], num_samples), np.int64, np.int64, input.device, out, None)
    rows = input.shape[0] if input.ndim == 2 else 1
    if not rows:
        return result
    stored = result if result.is_contiguous() else empty(result.shape, np.int64, device=input.device)
    draw = _with_replacement if replacement and num_samples > 1 else _without_replacement
    draw(input.contiguous(), name, stored, rows, categories, num_samples, generator)
    return result if stored is result else result.copy_(stored)


def _without_replacement(
    weights: DeviceArray,
    name: str,
    out: DeviceArray,
    rows: int,
    categories: int,
    count: int,
    generator: Generator | None,
) -> None:
    stream = current_stream(out.device)
    keys = exponential_(empty(weights.shape, weights.dtype, device=out.device), generator=generator)
    grid: Any = -(-keys.size // _THREADS)
    run(_SOURCE, f"weigh<{name}>", grid, _THREADS, stream, weights, keys, keys.size)
    if count == 1:
        run(_SOURCE, f"largest<{name}>", rows, _THREADS, stream, weights, keys, out, categories)
        return
    for start in range(0, rows, _MOST_ROWS):
        part, of = (array.reshape(rows, categories)[start:] for array in (keys, weights))
        to = out.reshape(rows, count)[start:]
        grid = (-(-categories // _THREADS), min(len(part), _MOST_ROWS))
        run(_SOURCE, f"in_order<{name}>", grid, _THREADS, stream, of, part, to, categories, count)


def _with_replacement(
    weights: DeviceArray,
    name: str,
    out: DeviceArray,
    rows: int,
    categories: int,
    count: int,
    generator: Generator | None,
) -> None:
    stream = current_stream(out.device)
    sums = empty((rows, categories), np.float64, device=out.device)
    run(_SOURCE, f"add_up<{name}>", rows, _THREADS, stream, weights, sums, categories)
    grid = (-(-count // _SAMPLE_THREADS), min(rows, _MOST_ROWS))
    drawn = take(generator, 4 * -(-rows // grid[1]), stream)
    run(_SOURCE, "sample", grid, _SAMPLE_THREADS, stream, sums, out, rows, categories, count, *drawn)
