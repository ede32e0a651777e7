"""matmul: what is multiplied and where the result goes; :data:`_IMPLEMENTATIONS` do it."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Final

import numpy as np

from cudatool import _driver
from cudatool._allocator import Layout
from cudatool._api import traced
from cudatool._array import DeviceArray, empty
from cudatool._cuda import operation
from cudatool._device import device as on_device
from cudatool._stream import Stream, current_stream
from cudatool.errors import UsageError
from cudatool.trace import hooks
from cudatool.trace.events import AccessFlag, Kind, pack_dims

__all__ = ["matmul"]

_Gemm = Callable[[Layout, Layout, Layout, Stream], None]
"""Enqueues ``C = A @ B``: layouts of A, B and C with the same number of dimensions (2, or 3 for a batch); in each
matrix one of the two strides is the item size. C's rows are contiguous."""

_IMPLEMENTATIONS: Final = {
    # kind of device -> module with a function gemm
    "cuda": "cudatool.blas._cublas",
    "sim": "cudatool.blas._host",
}
_ROUTINES: Final = {np.dtype(np.float32): "sgemm", np.dtype(np.float64): "dgemm"}


@traced
def matmul(a: DeviceArray, b: DeviceArray, out: DeviceArray | None = None) -> DeviceArray:
    """Return the matrix product ``a @ b``, computed on the current stream.

    Parameters
    ----------
    a, b
        float32 or float64, the same in both; shapes ``(m, k)`` and ``(k, n)``, or with a batch in front:
        ``(batch, m, k)``, of which one may be 1 or missing.
    out
        Where the result goes; must not overlap `a` or `b`. Default: a new array.

    Raises
    ------
    UsageError
        The shapes, dtypes or devices do not fit each other.
    """
    shape = _result_shape(a, b)
    out = empty(shape, a.dtype, device=a.device) if out is None else out
    if (out.shape, out.dtype, out.device) != (shape, a.dtype, a.device):
        raise UsageError(f"out must have shape {shape} and dtype {a.dtype} on device {a.device}; it is {out!r}")
    if np.may_share_memory(out.layout, a.layout) or np.may_share_memory(out.layout, b.layout):
        raise UsageError("out overlaps an operand; matmul cannot compute in place")
    if not out.size:
        return out
    if not a.size:  # the sum over nothing
        return out.fill_(0)
    result = out if _has_rows(out) else empty(shape, out.dtype, device=out.device)
    batch = shape[:-2]
    operands = [array if _is_blas(array) else array.contiguous() for array in (a, b)]
    left, right = (np.broadcast_to(o.layout, (*batch, *o.shape[-2:])) for o in operands)
    stream = current_stream(a.device)
    gemm: _Gemm = import_module(_IMPLEMENTATIONS[_driver.initialize().kind]).gemm
    with on_device(a.device), operation() as correlation:
        gemm(left, right, result.layout, stream)
    if correlation:
        _emit(correlation, left, right, result.layout, stream)
    return out if result is out else out.copy_(result)


def _result_shape(a: DeviceArray, b: DeviceArray) -> tuple[int, ...]:
    if a.dtype != b.dtype or a.dtype not in _ROUTINES:
        raise UsageError(f"matmul takes two arrays of float32 or two of float64, not {a.dtype} and {b.dtype}")
    if a.device != b.device:
        raise UsageError(f"the operands are on devices {a.device} and {b.device}")
    if not (2 <= a.ndim <= 3 and 2 <= b.ndim <= 3) or a.shape[-1] != b.shape[-2]:
        raise UsageError(f"cannot multiply shapes {a.shape} and {b.shape}: pass (m, k) and (k, n), or batches of them")
    try:
        batch = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    except ValueError:
        raise UsageError(f"the batches of shapes {a.shape} and {b.shape} do not fit each other") from None
    return (*batch, a.shape[-2], b.shape[-1])


def _has_rows(array: DeviceArray) -> bool:
    """Return whether the rows of each matrix are contiguous and do not overlap."""
    rows, columns = array.shape[-2:]
    distance, step = array.strides[-2:]
    itemsize = array.dtype.itemsize
    return (columns == 1 or step == itemsize) and (
        rows == 1 or (distance % itemsize == 0 and distance >= columns * itemsize)
    )


def _is_blas(array: DeviceArray) -> bool:
    """Return whether BLAS can read the array: rows or columns contiguous, batches at a whole, positive distance."""
    return (_has_rows(array) or _has_rows(array.transpose(*range(array.ndim - 2), -1, -2))) and all(
        stride >= 0 and stride % array.dtype.itemsize == 0 for stride in array.strides[:-2]
    )


def _emit(correlation: int, a: Layout, b: Layout, c: Layout, stream: Stream) -> None:
    m, n, k = c.shape[-2], c.shape[-1], a.shape[-1]
    hooks.emit(
        Kind.GEMM,
        device=stream.device_index,
        stream=stream.trace_id(),
        correlation=correlation,
        name=_ROUTINES[c.dtype] + ("" if c.ndim == 2 else "_strided_batched"),
        address=c.ctypes.data,
        size=c.nbytes,
        aux0=pack_dims(m, n, k),
    )
    for layout, flags in ((a, AccessFlag.READ), (b, AccessFlag.READ), (c, AccessFlag.WRITE)):
        matrices = layout[None] if layout.ndim == 2 else layout if layout.strides[0] else layout[:1]
        for matrix in matrices:
            _emit_access(correlation, stream.device_index, matrix, flags)


def _emit_access(correlation: int, device: int, matrix: Layout, flags: AccessFlag) -> None:
    """Emit the bytes of one matrix: a single range if it has no gaps, else its rows or columns."""
    by_rows = matrix if matrix.strides[-1] == matrix.itemsize or matrix.shape[1] == 1 else matrix.T
    rows, columns = by_rows.shape
    size, distance = columns * matrix.itemsize, by_rows.strides[0]
    if rows == 1 or distance == size:
        size, distance, rows = rows * size, 0, 0
    hooks.emit(
        Kind.ACCESS,
        device=device,
        correlation=correlation,
        address=matrix.ctypes.data,
        size=size,
        flags=flags,
        aux0=distance,
        aux1=rows,
    )
