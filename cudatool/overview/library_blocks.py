"""Which call sites hold a library's blocks, as the library itself said: JAX, whose pool has no events of its own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from cudatool.overview.moments import site_labels
from cudatool.trace.distinct import distinct
from cudatool.trace.events import Kind
from cudatool.trace.model import Trace

__all__ = ["LibraryBlocks", "LibrarySite", "library_blocks"]


@dataclass(frozen=True, slots=True)
class LibrarySite:
    """What one call site holds.

    Attributes
    ----------
    stack
        Index into the trace's stacks, 0 where none was recorded.
    label
        The call site in words.
    size, count
        Bytes, and the number of blocks.
    """

    stack: int
    label: str
    size: int
    count: int


@dataclass(frozen=True, slots=True)
class LibraryBlocks:
    """A library's blocks on a device, of the moments at which it was asked the first with most bytes.

    Attributes
    ----------
    library, device
        Whose they are, and where.
    index, time
        The record, and its time in ns.
    size
        Bytes in these blocks.
    most
        Bytes that the library had in use at most, at any moment: more than `size` if that was in between, or for what
        is in no block, such as temporary memory of a computation. None if it did not say.
    sites
        The largest first; together they are `size`.
    """

    library: str
    device: int
    index: int
    time: int
    size: int
    most: int | None
    sites: tuple[LibrarySite, ...]


def library_blocks(trace: Trace) -> tuple[LibraryBlocks, ...]:
    """Return what call sites hold of each library and device that said it."""
    return tuple(_most(trace))


def _most(trace: Trace) -> Iterator[LibraryBlocks]:
    records = trace.records
    rows = np.flatnonzero(records["kind"] == Kind.POOL_HELD)
    for name, device in distinct(records[["name", "device"]][rows]).tolist():
        own = rows[(records["name"][rows] == name) & (records["device"][rows] == device)]
        moments, which = np.unique(records["correlation"][own], return_inverse=True)
        sums = np.zeros(len(moments), np.int64)
        np.add.at(sums, which, records["size"][own].astype(np.int64))
        at = own[which == np.argmax(sums)]  # moments have rising numbers: the first one with most
        by_stack: dict[int, tuple[int, int]] = {}
        for stack, size, count in records[["stack", "size", "aux0"]][at].tolist():
            before = by_stack.get(stack, (0, 0))
            by_stack[stack] = before[0] + size, before[1] + count
        keys = np.array([(stack, 0) for stack in by_stack], np.int64).reshape(-1, 2)
        labels = site_labels(trace, keys, np.zeros(len(keys), np.bool_))
        sites = [
            LibrarySite(stack, label, *sizes) for (stack, sizes), label in zip(by_stack.items(), labels, strict=True)
        ]
        said = (records["kind"] == Kind.POOL_USE) & (records["name"] == name) & (records["device"] == device)
        yield LibraryBlocks(
            library=trace.names[name],
            device=device,
            index=int(at[0]),
            time=int(records["time"][at[0]]),
            size=int(sums.max()),
            most=int(records["aux0"][said].max()) if said.any() else None,
            sites=tuple(sorted(sites, key=lambda site: (-site.size, site.label))),
        )
