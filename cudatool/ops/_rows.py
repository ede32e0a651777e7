"""Kernels that work on the rows of matrices: softmax, layer normalization, cross entropy.

Some lanes of a block share a row. They read it twice or three times, which the caches serve, and keep nothing of it.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

from cudatool.ops._layout import LOADS, THREADS, offsets, pack_width
from cudatool.runtime import calls
from cudatool.runtime.array import DeviceArray
from cudatool.runtime.device import device as on_device
from cudatool.runtime.dtypes import NUMBERS
from cudatool.runtime.kernel import Kernel, compile_own, launch
from cudatool.runtime.stream import Stream, current_stream
from cudatool.trace import hooks

__all__ = ["ROWS", "RowCall", "RowKernels", "Tiling", "rows_taken_over", "tile"]

ROWS: Final = r"""
// The value of all lanes of a row (threadIdx.y) together, in every lane; merged as a binary tree.
template <typename State> __device__ State together(State state) {
    __shared__ alignas(16) char memory[THREADS * sizeof(State)];
    State *row = (State *)memory + threadIdx.y * blockDim.x;
    __syncthreads();  // what was here before has been read
    row[threadIdx.x] = state;
    #pragma unroll 1
    for (int half = blockDim.x / 2; half; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) row[threadIdx.x].merge(row[threadIdx.x + half]);
    }
    __syncthreads();
    return row[0];
}

template <typename T> struct Sum {
    T value;
    __device__ void merge(Sum other) { value += other.value; }
};

template <typename T> struct SoftSum {  // sum of exp(x - largest)
    T largest, sum;
    __device__ void take(T x) {
        if (x > largest) {
            sum = sum * exp(largest - x) + (x < INFINITY ? 1 : NAN);  // infinity has no share of 1
            largest = x;
        } else {
            sum += x == largest ? 1 : exp(x - largest);  // the first is also for -infinity
        }
    }
    __device__ void merge(SoftSum other) {
        if (other.sum == 0) return;
        if (sum == 0 || largest == other.largest) {
            sum += other.sum;
            largest = other.largest;
        } else if (largest < other.largest) {
            sum = sum * exp(largest - other.largest) + other.sum;
            largest = other.largest;
        } else {
            sum += other.sum * exp(other.largest - largest);
        }
    }
};

// What else is done with the elements of the result, where the compiler of functions has put that into the kernel.
#ifndef PUT
#define AFTER_PARAMETERS
#define AFTER_ARGUMENTS
#define PUT(out, p, pack) put_pack(out, p, pack)
#endif

// for (each pack of this lane of the row)
#define EACH_PACK(p) \
    _Pragma("unroll 1") for (long long p = threadIdx.x; p < (row < rows ? columns / N : 0); p += blockDim.x)
#define EACH(j) _Pragma("unroll") for (int j = 0; j < N; ++j)
#define THIS_ROW long long row = (long long)blockIdx.x * blockDim.y + threadIdx.y

template <int N, typename T> __device__ Pack<T, N> pack_at(const T *row, long long p) {
    return *(const Pack<T, N> *)(row + p * N);
}
template <int N, typename T> __device__ void put_pack(T *row, long long p, const Pack<T, N> &pack) {
    *(Pack<T, N> *)(row + p * N) = pack;
}
"""


class Tiling(NamedTuple):
    """How contiguous matrices of one shape are shared out: elements of a pack, and the grid and block of a launch."""

    width: int
    config: Any


def tile(rows: int, columns: int, arrays: Sequence[DeviceArray]) -> Tiling:
    """Return the tiling of some contiguous matrices."""
    return _tile(rows, columns, offsets(arrays), tuple([array.dtype.itemsize for array in arrays]))


@functools.lru_cache(maxsize=4096)
def _tile(rows: int, columns: int, addresses: tuple[int, ...], itemsizes: tuple[int, ...]) -> Tiling:
    # Two rows stand for all of them: the packs must not cross from one into the next.
    extents = [[2, *(columns * itemsize for itemsize in itemsizes)], [columns, *itemsizes]]
    width = pack_width(extents, addresses, itemsizes)
    lanes = min(THREADS, 1 << max((columns // width).bit_length() - 1, 0))
    per_block = max(1, THREADS // lanes)
    return Tiling(width, calls.core.LaunchConfig(grid=math.ceil(rows / per_block), block=(lanes, per_block)))


class RowCall(NamedTuple):
    """A launch that is about to be done, of a kernel that writes each element of `out` once, in packs of a row.

    Attributes
    ----------
    name
        Of the instance: ``"softmax<float, float, 4>"``.
    width
        Elements of a pack.
    """

    kernels: RowKernels
    name: str
    config: Any
    arguments: tuple[Any, ...]
    out: DeviceArray
    width: int
    stream: Stream

    def run(self) -> None:
        """Launch the kernel."""
        kernel = self.kernels.kernel(self.name, self.out.device)
        launch(self.stream, self.config, kernel, *self.arguments)


class _TakenOver(threading.local):
    by: Callable[[RowCall], None] | None = None


_taken_over = _TakenOver()


@contextmanager
def rows_taken_over(by: Callable[[RowCall], None]) -> Iterator[None]:
    """Let `by` do the launches of the calling thread inside that name their result, in place of ``run()``.

    It applies while there is a subscriber of events, so that it costs nothing where there is none.
    """
    before, _taken_over.by = _taken_over.by, by
    try:
        yield
    finally:
        _taken_over.by = before


class RowKernels:
    """Kernels of one source, compiled when they are first needed."""

    def __init__(self, source: str) -> None:
        self._rows, self._source = ROWS.replace("THREADS", str(THREADS)), source
        self.kernel = functools.cache(self.compile)

    def compile(self, name: str, device: int, before: str = "") -> Kernel:
        """Return an instance, with C++ in front of the kernels that says what else they do with their result."""
        with on_device(device):
            return compile_own(NUMBERS + LOADS + before + self._rows + self._source, name)

    def __call__(self, name: str, device: int, config: Any, *arguments: Any) -> None:
        """Launch an instance, ``"softmax<float, float, 4>"``, on the device's current stream."""
        launch(current_stream(device), config, self.kernel(name, device), *arguments)

    def compute(self, name: str, out: DeviceArray, tiling: Tiling, *arguments: Any) -> None:
        """Launch an instance on the current stream that writes each element of `out` by ``PUT``."""
        call = RowCall(self, name, tiling.config, (out, *arguments), out, tiling.width, current_stream(out.device))
        if hooks.active and _taken_over.by is not None:
            _taken_over.by(call)
        else:
            call.run()
