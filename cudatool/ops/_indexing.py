"""Rows by their numbers, arrays joined, and sequences."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from cudatool.errors import UsageError
from cudatool.ops._dispatch import KINDS, op
from cudatool.ops._elementwise import eq
from cudatool.ops._layout import linear, offsets, pack_width
from cudatool.ops._pointwise import Pointwise, Types, check_out
from cudatool.ops._reduction import check_array
from cudatool.ops._rows import RowKernels
from cudatool.ops._statistics import amax
from cudatool.runtime import calls
from cudatool.runtime.array import DeviceArray, empty, full
from cudatool.runtime.device import DeviceLike
from cudatool.runtime.dtypes import (
    as_dtype,
    c_type,
    can_cast,
    category,
    compute_dtype,
    is_number,
    promote_types,
    real,
    require_int,
    result_type,
)

__all__ = [
    "arange",
    "cat",
    "embedding",
    "embedding_dense_backward",
    "index_add",
    "index_select",
    "one_hot",
    "stack",
]

_KERNELS: Final = RowKernels(r"""
// Row index[i] of the source as row i; a row has `packs` packs.
template <typename T, int N>
__global__ void index_select(
    T *out, const T *source, const long long *index, long long count, long long rows, long long packs
) {
    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count * packs) return;
    long long row = index[i / packs];
    if (row < 0 || row >= rows) __trap();  // there is no such row
    put_pack(out, i, pack_at<N>(source + row * packs * N, i % packs));
}

// Each block has CHUNK rows of the result to itself, and threads with a column each. It reads all indices, and adds
// the rows that belong to it in their order, so the sums are the same on every run.
template <typename Out, typename In, int CHUNK>
__global__ void index_add(
    Out *out, const In *source, const long long *index, Out alpha, long long ignored,
    long long count, long long rows, long long columns
) {
    __shared__ long long wanted[256];
    long long first = (long long)blockIdx.x * CHUNK, column = (long long)blockIdx.y * blockDim.x + threadIdx.x;
    for (long long begin = 0; begin < count; begin += 256) {
        __syncthreads();
        for (int i = threadIdx.x; i < 256; i += blockDim.x) {
            long long row = begin + i < count ? index[begin + i] : -1;
            if (begin + i < count && (row < 0 || row >= rows)) __trap();  // there is no such row
            wanted[i] = row != ignored && row >= first && row < first + CHUNK ? row : -1;
        }
        __syncthreads();
        if (column >= columns) continue;
        for (int i = 0; i < 256; ++i) {
            long long row = wanted[i];
            if (row < 0) continue;
            Out &sum = out[row * columns + column];
            sum = sum + alpha * convert<Out>(source[(begin + i) * columns + column]);
        }
    }
}
""")
_FEW_ROWS: Final = 1024
"""So many rows get a block each: many parts may belong to one, and a block adds one after the other."""
_CHUNK: Final = 32  # of more rows
_INT64: Final = np.dtype(np.int64)
_CATEGORIES: Final = ("bool", "integer", "float8", "float", "complex")
_arange: Final = Pointwise("arange(*, start=0, step=1)", "start + (Compute)index * step", accepts=_CATEGORIES)

arange = op("cudatool.ops.arange")
cat = op("cudatool.ops.cat")
embedding = op("cudatool.ops.embedding")
embedding_dense_backward = op("cudatool.ops.embedding_dense_backward")
index_add = op("cudatool.ops.index_add")
index_select = op("cudatool.ops.index_select")
one_hot = op("cudatool.ops.one_hot")
stack = op("cudatool.ops.stack")


@arange.implementation(*KINDS)
def _(
    start: float,
    end: float | None = None,
    step: float = 1,
    *,
    dtype: npt.DTypeLike | None = None,
    device: DeviceLike = None,
) -> DeviceArray:
    """Return the numbers from start up to, but without, end; ``arange(n)`` is 0, 1, ..., n - 1.

    Parameters
    ----------
    dtype
        Default: int64 if all three are whole numbers, else float32. With int64, they are cut to their whole parts.
    """
    if end is None:
        start, end = 0, start
    for number in (start, end, step):
        if not math.isfinite(real("arange's start, end and step", number)):
            raise UsageError(f"arange takes finite numbers, not {number}")
    wanted = result_type(start, end, step) if dtype is None else as_dtype(dtype)
    if wanted == _INT64:
        start, end, step = int(start), int(end), int(step)
    if step == 0 or (end - start) / step < 0:
        raise UsageError(f"arange from {start} to {end} never ends by steps of {step}")
    out = empty(math.ceil((end - start) / step), wanted, device=device)
    _arange.launch([out], (), {"start": start, "step": step}, Types(wanted, wanted))
    return out


@cat.implementation(*KINDS)
def _(tensors: Sequence[DeviceArray], dim: int = 0, *, out: DeviceArray | None = None) -> DeviceArray:
    """Return arrays one after the other along a dimension; their dtypes are promoted.

    Among others, an array of shape (0,) has no say in the shape.

    Raises
    ------
    UsageError
        The arrays differ in another dimension, or there is none.
    """
    all_of_them = tensors
    if isinstance(tensors, Sequence):
        tensors = [array for array in tensors if getattr(array, "shape", None) != (0,)] or tensors
    first, dim = _alike("cat", tensors, dim, 0)
    rest = {(*array.shape[:dim], *array.shape[dim + 1 :]) for array in tensors}
    if len(rest) > 1 or not first.ndim:
        raise UsageError(f"cat along {dim} needs shapes that differ only there: {[a.shape for a in tensors]}")
    extents = [array.shape[dim] for array in tensors]
    shape = (*first.shape[:dim], sum(extents), *first.shape[dim + 1 :])
    result = _target("cat", all_of_them, shape, out)
    begin = 0
    for array, extent in zip(tensors, extents, strict=True):
        result[(slice(None),) * dim + (slice(begin, begin + extent),)].copy_(array)
        begin += extent
    return result


@stack.implementation(*KINDS)
def _(tensors: Sequence[DeviceArray], dim: int = 0, *, out: DeviceArray | None = None) -> DeviceArray:
    """Return arrays of one shape along a new dimension; their dtypes are promoted.

    Raises
    ------
    UsageError
        The arrays differ in shape, or there is none.
    """
    first, dim = _alike("stack", tensors, dim, 1)
    if {array.shape for array in tensors} != {first.shape}:
        raise UsageError(f"stack needs arrays of one shape: {[array.shape for array in tensors]}")
    result = _target("stack", tensors, (*first.shape[:dim], len(tensors), *first.shape[dim:]), out)
    for k, array in enumerate(tensors):
        result[(slice(None),) * dim + (k,)].copy_(array)
    return result


@index_select.implementation(*KINDS)
def _(input: DeviceArray, dim: int, index: DeviceArray) -> DeviceArray:
    """Return the parts of an array along a dimension that have these indices.

    Parameters
    ----------
    index
        Integers, of one dimension. One that does not exist ends the kernel with an error.
    """
    check_array("index_select", input)
    index = _indices("index_select", index, input.device)
    if index.ndim > 1 or (input.ndim == 0 and index.size != 1):
        raise UsageError(f"index_select from {input.shape} takes indices of one dimension, not of shape {index.shape}")
    dim = _dimension("index_select", dim, input.ndim)
    if not input.ndim:
        return _take(input.reshape(1), index.reshape(1)).reshape(())
    order = [dim, *(d for d in range(input.ndim) if d != dim)]
    index = index.reshape(index.size)
    return _take(input.transpose(order), index).transpose([int(d) for d in np.argsort(order)])


@embedding.implementation(*KINDS)
def _(input: DeviceArray, weight: DeviceArray, padding_idx: int | None = None) -> DeviceArray:
    """Return the row of `weight` for each index of `input`, as ``torch.nn.functional.embedding``.

    Parameters
    ----------
    input
        Integers of any shape. One that does not exist ends the kernel with an error.
    padding_idx
        The row that gets no gradient, which says nothing here (:func:`embedding_dense_backward`).
    """
    check_array("embedding", weight)
    if weight.ndim != 2:
        raise UsageError(f"embedding takes a weight of shape (rows, columns), not {weight.shape}")
    return _take(weight, input)


@embedding_dense_backward.implementation(*KINDS)
def _(
    grad_output: DeviceArray,
    indices: DeviceArray,
    num_weights: int,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
) -> DeviceArray:
    """Return the gradient for embedding's weight, of shape (num_weights, columns), from that for its output.

    Each row is summed in the order of the indices, in float32 or float64.

    Parameters
    ----------
    padding_idx
        The row that gets none.
    """
    if scale_grad_by_freq:
        raise UsageError("embedding_dense_backward does not scale by frequency")
    check_array("embedding_dense_backward", grad_output)
    indices = _indices("embedding_dense_backward", indices, grad_output.device)
    columns = grad_output.shape[-1] if grad_output.ndim else 0
    if grad_output.ndim < 1 or grad_output.shape[:-1] != indices.shape:
        raise UsageError(f"embedding: the gradient {grad_output.shape} does not fit indices {indices.shape}")
    if require_int("num_weights", num_weights) < 0:
        raise UsageError(f"embedding_dense_backward: there cannot be {num_weights} rows")
    sums = full((num_weights, columns), 0, compute_dtype(grad_output.dtype), device=grad_output.device)
    _add(sums, grad_output.reshape(-1, columns), indices, 1, padding_idx)
    return sums.astype(grad_output.dtype)


@index_add.implementation(*KINDS)
def _(input: DeviceArray, dim: int, index: DeviceArray, source: DeviceArray, *, alpha: float = 1) -> DeviceArray:
    """Return the array with each part of `source` along a dimension added where `index` says.

    The parts are added in their order, in float32 or float64 if they are floats.

    Parameters
    ----------
    index
        Integers, of one dimension. One that does not exist ends the kernel with an error.
    alpha
        What `source` is multiplied by.
    """
    for array in (input, source):
        check_array("index_add", array)
    index = _indices("index_add", index, input.device)
    dim = _dimension("index_add", dim, input.ndim)
    if not is_number(alpha) or not can_cast(result_type(alpha), input.dtype):
        raise UsageError(f"index_add: alpha must be a number that {input.dtype} arithmetic can take, not {alpha!r}")
    if source.ndim != input.ndim:
        raise UsageError(f"index_add: source must have as many dimensions as {input.shape}, not {source.shape}")
    if not input.ndim:
        sums: DeviceArray = index_add.redispatch(input.reshape(1), 0, index, source.reshape(1), alpha=alpha)
        return sums.reshape(())
    order = [dim, *(d for d in range(input.ndim) if d != dim)]
    moved, parts = input.transpose(order), source.transpose(order)
    if parts.shape != (index.size, *moved.shape[1:]) or index.ndim > 1:
        raise UsageError(f"index_add along {dim}: {source.shape} and {index.size} indices do not fit {input.shape}")
    sums = moved.to(compute_dtype(input.dtype), copy=True).reshape(moved.shape[0], math.prod(moved.shape[1:]))
    _add(sums, parts.reshape(index.size, sums.shape[1]), index, alpha, -1)
    return sums.astype(input.dtype).reshape(moved.shape).transpose([int(d) for d in np.argsort(order)])


@one_hot.implementation(*KINDS)
def _(input: DeviceArray, num_classes: int = -1) -> DeviceArray:
    """Return an int64 array with one more dimension: 1 at the index that `input` has, 0 elsewhere.

    Parameters
    ----------
    num_classes
        The extent of the new dimension; -1: one more than the largest index, for which the program waits.
    """
    check_array("one_hot", input)
    if category(input.dtype) != "integer":
        raise UsageError(f"one_hot takes integers, not {input.dtype}")
    if require_int("num_classes", num_classes) < -1:
        raise UsageError(f"one_hot: there cannot be {num_classes} classes")
    if num_classes == -1:
        num_classes = amax.redispatch(input).item() + 1
    classes = arange.redispatch(num_classes, device=input.device)
    result: DeviceArray = eq.redispatch(input.reshape(*input.shape, 1), classes)
    return result.astype(_INT64)


def _alike(name: str, tensors: Sequence[DeviceArray], dim: int, more: int) -> tuple[DeviceArray, int]:
    """Return the first array, and the dimension counted from the front."""
    if not isinstance(tensors, Sequence) or not tensors:
        raise UsageError(f"{name} takes a list of arrays, at least one, not {tensors!r}")
    for array in tensors:
        check_array(name, array)
    first = tensors[0]
    if len({(array.ndim, array.device) for array in tensors}) > 1:
        raise UsageError(f"{name} takes arrays of as many dimensions, on one device: {list(tensors)}")
    return first, _dimension(name, dim, first.ndim + more)


def _dimension(name: str, dim: int, ndim: int) -> int:
    dim, extent = require_int("dim", dim), max(ndim, 1)  # one element has a dimension 0, as in torch
    if not -extent <= dim < extent:
        raise UsageError(f"{name}: there is no dimension {dim}, only {ndim} of them")
    return dim % extent


def _target(name: str, tensors: Sequence[DeviceArray], shape: tuple[int, ...], out: DeviceArray | None) -> DeviceArray:
    dtype = functools.reduce(promote_types, (array.dtype for array in tensors))
    if out is None:
        return empty(shape, dtype, device=tensors[0].device)
    check_out(name, out, shape, dtype, tensors[0].device)
    if any(np.may_share_memory(out.layout, array.layout) for array in tensors):
        raise UsageError(f"{name}: out must be apart from the arrays; it is {out!r}")
    return out


def _indices(name: str, index: DeviceArray, device: int) -> DeviceArray:
    if not isinstance(index, DeviceArray) or category(index.dtype) != "integer" or index.device != device:
        raise UsageError(f"{name} takes indices that are integers on device {device}, not {index!r}")
    return index.astype(_INT64).contiguous()


def _take(source: DeviceArray, index: DeviceArray) -> DeviceArray:
    """Return the parts of `source` along its first dimension that have these indices."""
    where = _indices("embedding", index, source.device)
    source = source.contiguous()
    out = empty((*index.shape, *source.shape[1:]), source.dtype, device=source.device)
    if out.size:
        columns = math.prod(source.shape[1:])
        itemsize = source.dtype.itemsize
        rows = [[2, columns * itemsize, columns * itemsize], [columns, itemsize, itemsize]]
        width = pack_width(rows, offsets([out, source]), [itemsize, itemsize])
        packs = columns // width
        config = linear(index.size * packs)
        arguments = out, source, where, index.size, source.shape[0], packs
        _KERNELS(f"index_select<{c_type(source.dtype)}, {width}>", source.device, config, *arguments)
    return out


def _add(sums: DeviceArray, parts: DeviceArray, index: DeviceArray, alpha: Any, ignored: int) -> None:
    """Add rows to the rows of `sums` that have these indices."""
    rows, columns = sums.shape
    if not (parts.size and rows):
        return
    threads = min(256, 32 * math.ceil(columns / 32))
    chunk = 1 if rows <= _FEW_ROWS else _CHUNK
    grid = math.ceil(rows / chunk), math.ceil(columns / threads)
    config = calls.core.LaunchConfig(grid=grid, block=threads)
    kernel = f"index_add<{c_type(sums.dtype)}, {c_type(parts.dtype)}, {chunk}>"
    number = np.asarray(alpha).astype(sums.dtype)[()]
    arguments = sums, parts.contiguous(), index, number, ignored, index.size, rows, columns
    _KERNELS(kernel, sums.device, config, *arguments)
