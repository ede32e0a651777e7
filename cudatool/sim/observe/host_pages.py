"""Whether the host touches pinned memory that a pending copy is going to fill.

A read leaves no trace in the bytes. It leaves one in the system's page tables: while a copy to it is pending, memory
holds nothing that a program may use, so its pages can be given back to the system, which makes new ones, of zeros, when
something touches them::

    a copy to pinned memory is enqueued:   give its pages back
    the driver is called:                  a page that is there again was touched; it is not watched any more
    the driver itself had to touch pages:  give those back again
    something else may touch the memory, or the copy runs: those pages are not watched any more

The program runs as it would: no page is inaccessible, no signal arises, and calls of the system work on the memory. A
page is only watched if the copy fills all of it that belongs to the allocation: nothing beside it is ever touched by a
program that waits for its copies.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from cudatool.files import KeptDescriptor

if TYPE_CHECKING:
    from cudatool.sim.allocations import Allocation

__all__ = ["PendingPages", "Range"]

Range = tuple[int, int]
"""Address and bytes."""

_PAGE: Final = mmap.PAGESIZE
_TABLE: Final = "/proc/self/pagemap"
_MOST: Final = 256  # ranges of pages, the newest ones
_MADV_DONTNEED: Final = 4
# Bits of an entry of /proc/self/pagemap: in memory, swapped out, mapped by this process alone. A page that was only
# read is one of zeros which all processes share.
_THERE: Final = np.uint64(1 << 63 | 1 << 62)
_OWN: Final = np.uint64(1 << 56)

_libc = ctypes.CDLL(None)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


@dataclass(slots=True, eq=False)
class _Watched:
    """Neighbouring pages that one copy will fill from `start` to `stop`."""

    sequence: int  # of the copy
    start: int
    stop: int
    first: int  # number of the first page
    pages: npt.NDArray[np.bool]  # which of them are watched

    def runs(self, which: npt.NDArray[Any]) -> list[Range]:
        """Return the bytes of some of the pages that the copy fills."""
        edges = np.flatnonzero(np.diff(which.astype(np.int8), prepend=0, append=0))
        places = ((edges + self.first) * _PAGE).clip(self.start, self.stop).tolist()
        return [(low, high - low) for low, high in zip(places[::2], places[1::2], strict=True)]


class PendingPages:
    """The pages that are watched. What is called is called with the driver's lock held."""

    def __init__(self) -> None:
        self._watched: list[_Watched] = []
        self._table = _page_table()

    def __bool__(self) -> bool:
        return bool(self._watched)

    @property
    def works(self) -> bool:
        """Whether this system shows which pages were touched."""
        return self._table is not None

    def close(self) -> None:
        """Watch nothing any more."""
        self._watched.clear()
        if self._table is not None:
            self._table.close()
            self._table = None

    def watch(self, sequence: int, start: int, size: int, allocation: Allocation) -> None:
        """Watch what a copy will fill of an allocation's pages. They hold zeros, which is what is there from now on."""
        if self._table is None:
            return
        end = allocation.address + allocation.size
        stop = start + size
        # The allocation begins with a page, and what is left of its last one has no owner.
        first = -(-start // _PAGE)
        last = stop // _PAGE if stop < end else -(-stop // _PAGE)
        if first >= last or _libc.madvise(first * _PAGE, (last - first) * _PAGE, _MADV_DONTNEED):
            return  # such as pages that the program has locked
        self._watched.append(_Watched(sequence, start, stop, first, np.ones(last - first, np.bool)))
        del self._watched[:-_MOST]

    def touched(self) -> tuple[list[Range], list[Range]]:
        """Return what the host has read and what it has written since; those pages are not watched any more."""
        read: list[Range] = []
        written: list[Range] = []
        for one in self._watched:
            entries = self._entries(one)
            found = one.pages & (entries & _THERE != 0)
            if found.any():
                own = entries & _OWN != 0
                read += one.runs(found & ~own)
                written += one.runs(found & own)
                one.pages &= ~found
        self._tidy()
        return read, written

    def settle(self) -> None:
        """Give back what the driver itself has touched."""
        for one in self._watched:
            for start, size in one.runs(one.pages & (self._entries(one) & _THERE != 0)):
                low = start // _PAGE * _PAGE
                _libc.madvise(low, -(-(start + size) // _PAGE) * _PAGE - low, _MADV_DONTNEED)

    def is_untouched(self, address: int, size: int) -> bool:
        """Return whether all of a range is watched, and so was not touched yet."""
        for one in self._watched:
            if one.start <= address and address + size <= one.stop:
                low, high = address // _PAGE - one.first, -(-(address + size) // _PAGE) - one.first
                return low >= 0 and bool(one.pages[low:high].all())
        return False

    def drop(self, ranges: Iterable[Range]) -> None:
        """Watch no page of these ranges any more."""
        for start, size in ranges:
            for one in self._watched:
                low, high = start // _PAGE - one.first, -(-(start + size) // _PAGE) - one.first
                if size and low < len(one.pages) and high > 0:
                    one.pages[max(low, 0) : high] = False
        self._tidy()

    def drop_touched(self) -> None:
        """Watch no page any more that is there: the host need not have touched it."""
        self.touched()

    def done(self, sequence: int) -> None:
        """The copy has run."""
        self._watched = [one for one in self._watched if one.sequence != sequence]

    def _tidy(self) -> None:
        self._watched = [one for one in self._watched if one.pages.any()]

    def _entries(self, one: _Watched) -> npt.NDArray[np.uint64]:
        assert self._table is not None
        number = self._table.number
        if number is None:  # the program closed it
            self._table = KeptDescriptor(os.open(_TABLE, os.O_RDONLY | os.O_CLOEXEC))
            return self._entries(one)
        data = os.pread(number, 8 * len(one.pages), 8 * one.first)
        return np.frombuffer(data, np.uint64)


def _page_table() -> KeptDescriptor | None:
    """Return a descriptor of this process's page table, None where it does not show which pages were touched."""
    try:
        table = os.open(_TABLE, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    probe = mmap.mmap(-1, 3 * _PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    first = ctypes.addressof(ctypes.c_char.from_buffer(probe)) // _PAGE
    probe[:] = b"\1" * len(probe)
    gone = not _libc.madvise(first * _PAGE, len(probe), _MADV_DONTNEED)
    value = probe[_PAGE]
    probe[2 * _PAGE] = 1
    try:
        entries = np.frombuffer(os.pread(table, 24, 8 * first), np.uint64)
    except OSError:
        entries = np.zeros(0, np.uint64)
    there, own = (entries & _THERE != 0).tolist(), (entries & _OWN != 0).tolist()
    if gone and not value and there == [False, True, True] and own[1:] == [False, True]:
        return KeptDescriptor(table)
    os.close(table)
    return None
