"""GEMM on a GPU: cuBLAS, through nvmath-python's bindings."""

from __future__ import annotations

import threading
from typing import Any, Final

import numpy as np

from cudatool._allocator import Layout
from cudatool._stream import Stream
from cudatool.errors import CudaError, DeviceUnavailableError

__all__ = ["gemm"]

# cudaDataType and cublasComputeType_t
_TYPES: Final = {np.dtype(np.float32): (0, 68), np.dtype(np.float64): (1, 70)}
_DEFAULT_ALGORITHM: Final = -1  # CUBLAS_GEMM_DEFAULT


class _Handles(threading.local):
    """cuBLAS handles of the calling thread by device: a handle's stream must not be changed by another thread."""

    def __init__(self) -> None:
        self.by_device: dict[int, int] = {}


_handles = _Handles()


def _cublas() -> Any:
    try:
        from nvmath.bindings import cublas
    except ImportError as error:
        raise DeviceUnavailableError(f"matmul on a GPU needs cuBLAS: pip install 'cudatool[gpu]' ({error})") from error
    return cublas


def gemm(a: Layout, b: Layout, c: Layout, stream: Stream) -> None:
    """Enqueue ``c = a @ b``."""
    cublas = _cublas()
    # cuBLAS thinks in columns, to which our C in rows looks like its transpose: C' = B' A'.
    m, n, k = c.shape[-2], c.shape[-1], a.shape[-1]
    batch = c.shape[0] if c.ndim == 3 else 1
    one, zero = np.ones(1, c.dtype), np.zeros(1, c.dtype)
    data_type, compute_type = _TYPES[c.dtype]
    (op_a, ld_a, batch_a), (op_b, ld_b, batch_b), (_, ld_c, batch_c) = _describe(a), _describe(b), _describe(c)
    try:
        handle = _handles.by_device.get(stream.device_index)
        if handle is None:
            handle = _handles.by_device[stream.device_index] = cublas.create()
        cublas.set_stream(handle, int(stream.core.handle))
        cublas.gemm_strided_batched_ex(
            handle,
            op_b,
            op_a,
            n,
            m,
            k,
            one.ctypes.data,
            b.ctypes.data,
            data_type,
            ld_b,
            batch_b,
            a.ctypes.data,
            data_type,
            ld_a,
            batch_a,
            zero.ctypes.data,
            c.ctypes.data,
            data_type,
            ld_c,
            batch_c,
            batch,
            compute_type,
            _DEFAULT_ALGORITHM,
        )
    except cublas.cuBLASError as error:
        raise CudaError(f"cuBLAS: {error}", "CUDA_ERROR_UNKNOWN") from error


def _describe(layout: Layout) -> tuple[int, int, int]:
    """Return cublasOperation_t, leading dimension and distance between matrices, the last two in elements."""
    rows, columns = layout.shape[-2:]
    row, column = (stride // layout.itemsize for stride in layout.strides[-2:])
    batch = layout.strides[0] // layout.itemsize if layout.ndim == 3 else 0
    if (columns == 1 or column == 1) and (rows == 1 or row >= columns):
        return 0, row if rows > 1 else columns, batch  # rows are contiguous: CUBLAS_OP_N
    return 1, column if columns > 1 else rows, batch  # columns are: CUBLAS_OP_T
