"""Which memory each node of a traced function accesses: what decides which nodes may be moved or put together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np

from cudatool.ops._pointwise import Pointwise, PointwiseLaunch, Types
from cudatool.ops._rows import RowCall, RowKernels
from cudatool.runtime.annotate import annotating
from cudatool.runtime.array import DeviceArray

__all__ = [
    "BEFORE",
    "MOST_LOADS",
    "NodeWork",
    "Places",
    "PointwiseCall",
    "RowsCall",
    "Span",
    "View",
    "described",
    "described_rows",
    "dimension_order",
]

BEFORE: Final = -1
"""Stands for all memory that existed before the function ran: arguments and state."""

MOST_LOADS: Final = 16
"""Arrays that one kernel of several operations reads, at most."""

Places = Callable[[int], tuple[int, int]]
"""Given an address, returns the allocation that it is in, and how far; else `BEFORE`, and the address itself."""


class Span(NamedTuple):
    """Bytes that a node may access: of an allocation from `low` to `high`; addresses if it is `BEFORE`."""

    buffer: int
    low: int
    high: int
    reads: bool
    writes: bool

    def meets(self, other: Span) -> bool:
        """Return whether the order of the two matters: they have bytes in common, and one is written."""
        return (
            (self.writes or other.writes)
            and self.buffer == other.buffer
            and self.low < other.high
            and other.low < self.high
        )


class View(NamedTuple):
    """An array as an elementwise function goes through it: equal for two if each element is at the same bytes."""

    buffer: int
    start: int  # of the first element
    strides: tuple[int, ...]  # 0 where there is one element
    dtype: np.dtype[Any]
    low: int
    high: int

    def span(self, *, writes: bool) -> Span:
        """Return the bytes from its first to its last element."""
        return Span(self.buffer, self.low, self.high, not writes, writes)


@dataclass(frozen=True, slots=True)
class PointwiseCall:
    """A launch of an elementwise function: equal for two runs if they do the same.

    Attributes
    ----------
    reads
        For each operand its view, or the type of a number.
    fusible
        Whether it may become a part of a kernel with others.
    """

    pointwise: Pointwise
    types: Types
    device: int
    shape: tuple[int, ...]
    writes: tuple[View, ...]
    reads: tuple[View | type, ...]
    fusible: bool


@dataclass(frozen=True, slots=True)
class RowsCall:
    """A launch of a kernel that works on rows: equal for two runs if they compute their result in the same place.

    Attributes
    ----------
    writes
        The result, each element of which is written once.
    """

    kernels: RowKernels
    instance: str
    width: int
    device: int
    shape: tuple[int, ...]
    writes: tuple[View, ...]


@dataclass(slots=True)
class NodeWork:
    """What is known of a node beside what it is called.

    Attributes
    ----------
    spans
        What it may access; None if that is not known, so that it may be anything.
    call, rows
        If it is an elementwise function, or a kernel that works on rows.
    after_unseen
        Work without an event was enqueued before it.
    stack
        Where it was enqueued.
    """

    spans: list[Span] | None
    call: PointwiseCall | None = None
    rows: RowsCall | None = None
    after_unseen: bool = False
    stack: int = 0


def described(call: PointwiseLaunch, places: Places) -> PointwiseCall:
    """Return what a launch does, in terms of allocations rather than addresses, and of dimensions in their order."""
    shape, order = call.outs[0].shape, dimension_order(call)

    def view(array: DeviceArray) -> View:
        found = _view(array, shape, places)
        return found._replace(strides=tuple([found.strides[axis] for axis in order]))

    return PointwiseCall(
        call.pointwise,
        call.types,
        call.outs[0].device,
        tuple([shape[axis] for axis in order]),
        tuple(map(view, call.outs)),
        tuple(view(operand) if isinstance(operand, DeviceArray) else type(operand) for operand in call.operands),
        call.pointwise.fusible and not annotating(),  # the program says what one launch accesses
    )


def dimension_order(call: PointwiseLaunch) -> list[int]:
    """Return the dimensions of a launch in the order of its result's memory: in it, transposed arrays are as others."""
    out, axes = call.outs[0], list(range(call.outs[0].ndim))
    if call.pointwise.asks_for_index:  # in the order that the program sees
        return axes
    return sorted(axes, key=lambda axis: -abs(out.strides[axis]) if out.shape[axis] > 1 else 0)


def described_rows(call: RowCall, places: Places) -> RowsCall:
    """Return what a launch of a kernel that works on rows does with its result."""
    shape = call.out.shape
    view = _view(call.out, shape, places)
    return RowsCall(call.kernels, call.name, call.width, call.out.device, shape, (view,))


def _view(array: DeviceArray, shape: tuple[int, ...], places: Places) -> View:
    if array.shape != shape:
        array = array.broadcast_to(shape)
    address = array.data_ptr()
    low, high = np.lib.array_utils.byte_bounds(array.layout)
    buffer, start = places(address)
    strides = tuple(stride if extent > 1 else 0 for extent, stride in zip(shape, array.strides, strict=True))
    return View(buffer, start, strides, array.dtype, start + low - address, start + high - address)
