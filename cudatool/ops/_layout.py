"""Where the elements of several arrays of one shape lie: the fewest dimensions, and the widest loads."""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from cudatool.errors import UsageError
from cudatool.runtime import calls
from cudatool.runtime.array import ALIGNMENT, DeviceArray

__all__ = [
    "LOADS",
    "MOST_DIMENSIONS",
    "THREADS",
    "Walk",
    "collapse",
    "linear",
    "lines",
    "offsets",
    "own_pack",
    "pack_width",
    "plan_struct",
    "walk",
]

THREADS: Final = 256
"""Of a block."""

MOST_DIMENSIONS: Final = 8
"""That a kernel walks through, after dimensions that lie one after the other were made one."""

LOADS: Final = r"""
// N elements that are loaded or stored by one instruction.
template <typename T, int N> struct alignas(sizeof(T) * N) Pack { T at[N]; };

template <typename T, int N>
__device__ void load(Pack<T, N> &pack, const char *from, long long step, int count) {
    if (step == 0) {  // one element for all
        T value = *(const T *)from;
        #pragma unroll
        for (int j = 0; j < N; ++j) pack.at[j] = value;
    } else if (count >= N) {
        pack = *(const Pack<T, N> *)from;
    } else {
        #pragma unroll
        for (int j = 0; j < N; ++j)
            if (j < count) pack.at[j] = ((const T *)from)[j];
    }
}

template <typename T, int N> __device__ void store(const Pack<T, N> &pack, char *to, int count) {
    if (count >= N) {
        *(Pack<T, N> *)to = pack;
    } else {
        #pragma unroll
        for (int j = 0; j < N; ++j)
            if (j < count) ((T *)to)[j] = pack.at[j];
    }
}
"""
_WIDEST: Final = ALIGNMENT  # bytes of one load


class Walk(NamedTuple):
    """How a kernel goes through arrays of one shape.

    Attributes
    ----------
    width
        Elements of one pack.
    config
        Of a launch with one thread a pack.
    parameters
        The kernel's struct (:func:`plan_struct`): size, packs, ndim, shape in packs, and the strides of each array in
        bytes a step.
    """

    width: int
    config: Any
    parameters: np.void


def lines(statements: Iterable[str], indent: str = "    ") -> str:
    """Return statements of C++ on lines of their own."""
    return f"\n{indent}".join(statements)


def plan_struct(arrays: int) -> str:
    """Return the C++ of :attr:`Walk.parameters` for so many arrays."""
    n = MOST_DIMENSIONS
    return f"struct Plan {{ long long size, packs, ndim, shape[{n}], strides[{arrays}][{n}]; }};"


def own_pack(names: Sequence[str]) -> str:
    """Return the C++ by which a thread of a :class:`Walk` finds its pack in arrays; one that has none returns.

    `first` is the pack's first element, `count` how many there are from there on, at most N, and ``NAME_at`` where it
    is in each array ``NAME_array``, in the order of the walk.
    """
    starts = lines(f"const char *{name}_at = (const char *){name}_array;" for name in names)
    steps = lines((f"{name}_at += at * plan.strides[{k}][d];" for k, name in enumerate(names)), "        ")
    return f"""long long rest = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (rest >= plan.packs) return;
    long long first = rest * N;
    int count = plan.size - first < N ? plan.size - first : N;
    {starts}
    #pragma unroll 1
    for (int d = plan.ndim - 1; d >= 0; --d) {{
        long long at = rest;
        if (d) {{
            rest /= plan.shape[d];
            at -= rest * plan.shape[d];
        }}
        {steps}
    }}"""


def collapse(shape: Sequence[int], strides: Sequence[Sequence[int]], *, reorder: bool) -> list[list[int]]:
    """Return rows ``[extent, stride of the first array, of the second, ...]``, outermost first, as few as possible.

    Parameters
    ----------
    reorder
        Bring the dimensions into the order of the first array's memory; which elements meet does not change.
    """
    rows = [[n, *steps] for n, *steps in zip(shape, *strides, strict=True) if n != 1]
    if reorder and len(rows) > 1:
        rows.sort(key=lambda row: -abs(row[1]))
    merged: list[list[int]] = []
    for row in rows:
        before = merged[-1] if merged else None
        if before is not None and all(b == row[0] * s for b, s in zip(before[1:], row[1:], strict=True)):
            merged[-1] = [before[0] * row[0], *row[1:]]
        else:
            merged.append(row)
    return merged or [[1] + [0] * len(strides)]


def offsets(arrays: Sequence[DeviceArray]) -> tuple[int, ...]:
    """Return how many bytes each array begins after an address that the widest loads can have."""
    return tuple([array.data_ptr() % _WIDEST for array in arrays])


@functools.lru_cache(maxsize=1024)
def linear(threads: int) -> Any:
    """Return the configuration of a launch with so many threads, or some more, in one dimension."""
    return calls.core.LaunchConfig(grid=-(-threads // THREADS), block=THREADS)


def pack_width(rows: list[list[int]], addresses: Sequence[int], itemsizes: Sequence[int]) -> int:
    """Return how many elements can be loaded at once: as many as 16 bytes hold, or 1.

    That is so if all arrays are contiguous in the innermost dimension, or have one element there; and if every
    address that a pack begins at is a multiple of the pack's bytes.
    """
    width = _WIDEST // max(itemsizes)
    extent, *inner = rows[-1]
    if width < 2 or extent < width or (len(rows) > 1 and extent % width):
        return 1
    for k, (address, itemsize) in enumerate(zip(addresses, itemsizes, strict=True)):
        if inner[k] not in (0, itemsize) or (k == 0 and not inner[k]):
            return 1
        size = width * itemsize
        if inner[k] and (address % size or any(row[k + 1] % size for row in rows[:-1])):
            return 1
    return width


def walk(arrays: Sequence[DeviceArray], *, reorder: bool = True) -> Walk:
    """Return the way through arrays of one shape, of which the first is written.

    Raises
    ------
    UsageError
        They have too many dimensions.
    """
    layouts = [array.layout for array in arrays]
    strides = tuple([layout.strides for layout in layouts])
    itemsizes = tuple([layout.itemsize for layout in layouts])
    return _walk(layouts[0].shape, strides, itemsizes, offsets(arrays), reorder)


@functools.lru_cache(maxsize=4096)  # programs do the same again and again
def _walk(
    shape: tuple[int, ...],
    strides: tuple[tuple[int, ...], ...],
    itemsizes: tuple[int, ...],
    addresses: tuple[int, ...],
    reorder: bool,
) -> Walk:
    rows = collapse(shape, strides, reorder=reorder)
    if len(rows) > MOST_DIMENSIONS:
        raise UsageError(
            f"arrays of shape {shape} have more than {MOST_DIMENSIONS} dimensions that do not lie one after the "
            "other; make them contiguous() first"
        )
    width = pack_width(rows, addresses, itemsizes)
    rows[-1] = [-(-rows[-1][0] // width), *[width * stride for stride in rows[-1][1:]]]
    packs = math.prod(row[0] for row in rows)
    columns = [column + (0,) * (MOST_DIMENSIONS - len(rows)) for column in zip(*rows, strict=True)]
    values = [math.prod(shape), packs, len(rows), *(value for column in columns for value in column)]
    return Walk(width, linear(packs), np.void(struct.pack(f"<{len(values)}q", *values)))
