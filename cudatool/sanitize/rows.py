"""A trace's records as Python objects, each with the accesses that other records have of it."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Collection, Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cudatool.sanitize.intervals import ATOMIC, READ, WRITE, Access
from cudatool.trace.distinct import distinct
from cudatool.trace.events import WORK, AccessFlag, Kind
from cudatool.trace.model import Trace

__all__ = ["LAUNCHES", "Row", "byte_sets", "read_rows"]

LAUNCHES = tuple(map(int, (Kind.KERNEL_LAUNCH, Kind.GEMM, Kind.GRAPH_LAUNCH, Kind.COLLECTIVE)))
"""The work whose accesses only ACCESS records can tell."""

_MASK_BITS = 1 << 15  # elements of a mask, at most
_CHUNK = 1 << 14  # records turned into Python objects at a time


class Row(NamedTuple):
    """One record. `accesses` is what it touches, None if no ACCESS record tells."""

    record: int
    kind: int
    device: int
    flags: int
    thread: int
    stream: int
    correlation: int
    stack: int
    name: int
    address: int
    size: int
    aux0: int
    aux1: int
    accesses: list[Access] | None


_COLUMNS = (
    "kind",
    "device",
    "flags",
    "thread",
    "stream",
    "correlation",
    "stack",
    "name",
    "address",
    "size",
    "aux0",
    "aux1",
)


_make_row = functools.partial(tuple.__new__, Row)  # as Row._make, which is no function of C


def read_rows(trace: Trace, kinds: Collection[int]) -> Iterator[Row]:
    """Yield the records of these kinds in order, a chunk in memory at a time.

    ACCESS records, and HOST_ACCESS records of host functions, are tied to their operation by correlation, and may stand
    anywhere in the trace.
    """
    return itertools.chain.from_iterable(_read_chunks(trace, kinds))


def _read_chunks(trace: Trace, kinds: Collection[int]) -> Iterator[Iterator[Row]]:
    records = trace.records
    touching = _indices(records, (Kind.ACCESS, Kind.HOST_ACCESS))
    touching = touching[(records["kind"][touching] == Kind.ACCESS) | (records["correlation"][touching] != 0)]
    correlations = records["correlation"][touching]
    if (correlations[1:] < correlations[:-1]).any():
        order = np.argsort(correlations, kind="stable")
        touching, correlations = touching[order], correlations[order]
        del order

    later = _without_accesses(records)

    # Where accesses were measured, a kernel that ran and has none touched nothing.
    measured = bool(trace.header.get("accesses"))
    executed = distinct(records["correlation"][_indices(records, (Kind.EXECUTION,) if measured else ())])

    rows = _indices(records, kinds)
    for begin in range(0, len(rows), _CHUNK):
        index = rows[begin : begin + _CHUNK]
        chunk = records[index]
        wanted = chunk["correlation"]
        # The accesses of a record are `count` of `touching`, from `low` on. Those of all records of the chunk are taken
        # together, one record's after the other's, of which the last ends at `last`.
        low = np.searchsorted(correlations, wanted, "left")
        count = np.searchsorted(correlations, wanted, "right") - low
        count[wanted == 0] = 0
        elsewhere = (count > 0) & later[index]
        count[elsewhere] = 0
        last = np.cumsum(count)
        taken = touching[np.repeat(low - last + count, count) + np.arange(count.sum())]
        accesses = byte_sets(records[taken])
        for place in np.flatnonzero(records["kind"][taken] == Kind.HOST_ACCESS).tolist():
            accesses[place].host = int(taken[place])
        masked = bool((records["flags"][taken] & AccessFlag.MASK).any())

        # None: not known. An empty list: it touched nothing, or its accesses are those of another record.
        ran = np.searchsorted(executed, wanted, "right") > np.searchsorted(executed, wanted, "left")
        idle = (count == 0) & np.isin(chunk["kind"], LAUNCHES) & ran
        accessed = [
            accesses[stop - length : stop] if length else [] if nothing else None
            for stop, length, nothing in zip(last.tolist(), count.tolist(), (elsewhere | idle).tolist(), strict=True)
        ]
        if masked:
            accessed = [one and _with_masks(one) for one in accessed]
        columns = (chunk[name].tolist() if chunk[name].any() else itertools.repeat(0, len(index)) for name in _COLUMNS)
        yield map(_make_row, zip(index.tolist(), *columns, accessed, strict=True))


def _without_accesses(records: npt.NDArray[np.void]) -> npt.NDArray[np.bool_]:
    """Return which records have no accesses of their own: of those that share a correlation, the first has them all."""
    work = _indices(records, WORK)
    correlated = records["correlation"][work]
    found = np.ones(len(records), bool)
    if (correlated[1:] > correlated[:-1]).all():
        found[work] = False
    else:
        found[work[np.unique(correlated, return_index=True)[1]]] = False
    return found


def _indices(records: npt.NDArray[np.void], kinds: Collection[int]) -> npt.NDArray[np.integer]:
    """The indices of the records of these kinds, as small as they may be."""
    wanted = np.zeros(256, bool)
    wanted[list(kinds)] = True
    found = np.flatnonzero(wanted[records["kind"]])
    return found.astype(np.uint32) if len(records) < 1 << 32 else found


def byte_sets(records: npt.NDArray[np.void]) -> list[Access]:
    """Return what ACCESS and HOST_ACCESS records describe, every strided set as ascending rows that do not touch."""
    start, size = records["address"].astype(np.int64), records["size"].astype(np.int64)
    stride, rows = records["aux0"].astype(np.int64), np.maximum(records["aux1"].astype(np.int64), 1)
    flags = records["flags"]
    mask = (flags & AccessFlag.MASK) != 0
    rows, stride = np.where(mask, 1, rows), np.where(mask, 0, stride)
    start = start + np.where(stride < 0, stride * (rows - 1), 0)
    stride = np.abs(stride)
    stop = np.where(size > 0, start + stride * (rows - 1) + size, start)
    stride = np.where((rows > 1) & (stride > size), stride, 0)
    mode = np.where(flags & AccessFlag.ATOMIC, ATOMIC, flags & (READ | WRITE))
    exact = (flags & AccessFlag.INEXACT) == 0
    columns = (start, stop, mode, size, stride, records["name"], exact, records["stream"])
    accesses = list(map(Access, *(column.tolist() for column in columns)))
    for index in np.flatnonzero(mask).tolist():
        accesses[index].mask = int(records["aux0"][index]) | int(records["aux1"][index]) << 64
    return accesses


def _with_masks(accesses: list[Access]) -> list[Access]:
    """Return the accesses of one operation with masks that follow each other put together."""
    joined: list[Access] = []
    last = None  # the mask that the next one may continue
    for access in accesses:
        if not access.mask:
            joined.append(access)
            continue
        if last is None or (last.mode, last.row, last.exact, last.node) != (
            access.mode,
            access.row,
            access.exact,
            access.node,
        ):
            last = None
        offset = (access.start - last.start) // access.row if last is not None else -1
        if last is not None and 0 <= offset < _MASK_BITS and not (access.start - last.start) % access.row:
            last.mask |= access.mask << offset
        else:
            last = access
            joined.append(access)
    for access in joined:
        if access.mask:
            zeros = (access.mask & -access.mask).bit_length() - 1
            access.mask >>= zeros
            access.start += zeros * access.row
            access.stop = access.start + access.mask.bit_length() * access.row
    return joined
