"""What may compute a product: each candidate enqueues it on a stream, and is known by a name that a file can hold."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np

from cudatool import _driver
from cudatool.blas._gemm import Compute, Gemm, default_implementation, perform
from cudatool.runtime import calls
from cudatool.runtime.array import DeviceArray
from cudatool.runtime.device import device as on_device
from cudatool.runtime.kernel import Kernel, compile_own, launch
from cudatool.runtime.stream import Stream
from cudatool.tunable import _triton

__all__ = ["DEFAULT", "Enqueue", "candidate", "candidates"]

Enqueue = Callable[[Gemm, Stream], None]

DEFAULT: Final = "Default"
_LT: Final = "Cublaslt_"  # and the algorithm's 64 bytes, which hold for one version of the library
_KERNEL: Final = "Kernel_16x16"
_MOST_ALGORITHMS: Final = 8
_TILE: Final = 16
_MOST_BATCHES: Final = 65535  # blocks along z


def candidates(gemm: Gemm, stream: Stream) -> Iterator[tuple[str, Enqueue]]:
    """Yield what may compute a product, the default first."""
    yield DEFAULT, _default
    if _driver.initialize().kind == "cuda":
        from cudatool.blas import _cublaslt  # only a GPU has it

        for algorithm in _cublaslt.algorithms(gemm, stream, _MOST_ALGORITHMS):
            yield f"{_LT}{algorithm.hex()}", functools.partial(_by_algorithm, algorithm)
    if _kernel_fits(gemm):
        yield _KERNEL, _by_kernel
    if _triton.fits(gemm):
        for name, tile in _triton.TILES.items():
            yield name, functools.partial(_triton.multiply, tile)


def candidate(name: str, gemm: Gemm) -> Enqueue:
    """Return the candidate of a name; the default, if there is none that can compute this product."""
    if name == _KERNEL and _kernel_fits(gemm):
        return _by_kernel
    if name in _triton.TILES and _triton.fits(gemm):
        return functools.partial(_triton.multiply, _triton.TILES[name])
    if name.startswith(_LT) and _driver.initialize().kind == "cuda":
        try:
            return functools.partial(_by_algorithm, bytes.fromhex(name.removeprefix(_LT)))
        except ValueError:
            pass
    return _default


def _default(gemm: Gemm, stream: Stream) -> None:
    perform(default_implementation(), gemm, stream)


def _by_algorithm(algorithm: bytes, gemm: Gemm, stream: Stream) -> None:
    from cudatool.blas import _cublaslt  # only a GPU has it

    perform(functools.partial(_cublaslt.gemm, algorithm=algorithm), gemm, stream)


# A kernel of our own, which can do better where matrices are small, or long and thin.

_SOURCE: Final = """
struct Matrix { char *data; long long row, column, step; };  // strides in bytes

template <typename T> __device__ T &at(Matrix m, long long row, long long column) {
    return *(T *)(m.data + blockIdx.z * m.step + row * m.row + column * m.column);
}

template <typename T, int Tile>
__global__ void gemm(Matrix a, Matrix b, Matrix out, int rows, int columns, int depth, T alpha, T beta) {
    __shared__ T left[Tile][Tile + 1], right[Tile][Tile + 1];
    const int x = threadIdx.x, y = threadIdx.y;
    const long long row = (long long)blockIdx.x * Tile + y, column = (long long)blockIdx.y * Tile + x;
    T sum = 0;
    for (int start = 0; start < depth; start += Tile) {
        left[y][x] = row < rows && start + x < depth ? at<T>(a, row, start + x) : T(0);
        right[y][x] = start + y < depth && column < columns ? at<T>(b, start + y, column) : T(0);
        __syncthreads();
        #pragma unroll
        for (int i = 0; i < Tile; ++i)
            sum += left[y][i] * right[i][x];
        __syncthreads();
    }
    if (row < rows && column < columns) {
        T &place = at<T>(out, row, column);
        place = beta == T(0) ? alpha * sum : alpha * sum + beta * place;
    }
}
"""
_C_TYPES: Final = {Compute.SINGLE: (np.dtype(np.float32), "float"), Compute.DOUBLE: (np.dtype(np.float64), "double")}
_MATRIX: Final = np.dtype([("data", "<u8"), ("row", "<i8"), ("column", "<i8"), ("step", "<i8")])


def _kernel_fits(gemm: Gemm) -> bool:
    dtype, _ = _C_TYPES.get(gemm.compute, (None, ""))
    return gemm.a.dtype == dtype and not gemm.product.wide and gemm.product.batch <= _MOST_BATCHES


@functools.cache
def _compiled(type_name: str, device: int) -> Kernel:
    with on_device(device):
        return compile_own(_SOURCE, f"gemm<{type_name}, {_TILE}>")


def _by_kernel(gemm: Gemm, stream: Stream) -> None:
    _, type_name = _C_TYPES[gemm.compute]
    rows, columns = gemm.out.shape[-2:]
    grid = (-(-rows // _TILE), -(-columns // _TILE), gemm.product.batch)
    config = calls.core.LaunchConfig(grid=grid, block=(_TILE, _TILE))
    matrices = (_as_struct(array) for array in (gemm.a, gemm.b, gemm.out))
    factors = (gemm.a.dtype.type(factor) for factor in (gemm.alpha, gemm.beta))
    kernel = _compiled(type_name, stream.device_index)
    launch(stream, config, kernel, *matrices, rows, columns, gemm.a.shape[-1], *factors)


def _as_struct(array: DeviceArray) -> Any:
    step = array.strides[0] if array.ndim == 3 else 0
    return np.array((array.data_ptr(), *array.strides[-2:], step), _MATRIX)[()]
