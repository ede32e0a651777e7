"""Where the maps of device memory have room for the host's memory: at addresses before it, which nothing uses.

Pinned and registered memory lies anywhere in the process. What is known of each byte that a kernel uses, be it a
footprint or a history of accesses, is kept in maps of device memory's addresses. So each launch gives the host's memory
*places* there: instrumented code looks an address of the host up (``@host_place``) and goes on with its place as if it
were device memory.
"""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from collections.abc import Iterable, Mapping

from cudatool.sim.jit.context import Context
from cudatool.sim.jit.footprint import PAGE

__all__ = ["HOST_PLACE", "HostPlaces"]

_ROW = 3  # words: address, size, place
_NO_ROOM = 1 << 62
_NOT_LOOKED_AT = 1 << 61


class HostPlaces:
    """The host's memory that a launch may use.

    Parameters
    ----------
    ranges
        Sizes by address; they do not overlap.
    room
        The addresses that nothing uses. Places are offsets in it.
    """

    def __init__(self, ranges: Mapping[int, int], room: range = range(0)) -> None:
        self._room = room
        self._rows: list[tuple[int, int, int]] = []  # address, size, place
        end = 0
        self._placed: list[tuple[int, int, int]] = []  # place, size, address
        for address, size in sorted(ranges.items(), key=lambda one: one[1]):  # as many as there is room for
            place = end + address % PAGE  # what is aligned stays so
            if place + size > len(room):
                self._rows.append((address, size, _NO_ROOM))
                continue
            self._rows.append((address, size, place))
            self._placed.append((place, size, address))
            end = ((place + size) // PAGE + 2) * PAGE  # a page between, so that no run of bytes is of two ranges
        self._fill()

    def _fill(self) -> None:
        words = [word for row in sorted(self._rows) for word in row]
        self._table = (ctypes.c_uint64 * (1 + len(words)))(0, *words)
        self.count = len(self._rows)

    def add_unwatched(self, address: int, size: int) -> None:
        """Let the kernel use memory in which it does the driver's business, which is not looked at."""
        self._rows.append((address, size, _NOT_LOOKED_AT))
        self._fill()

    @property
    def address(self) -> int:
        """Of the table that native code reads."""
        return ctypes.addressof(self._table)

    @property
    def had_no_room(self) -> bool:
        """Whether the launch used memory that has no place, of which nothing is known."""
        return bool(self._table[0])

    def address_at(self, place: int) -> int:
        """Return the address of the host's memory that `place` stands for; other addresses stand for themselves."""
        if place not in self._room:
            return place
        start, _, address = self._placed[bisect_right(self._placed, (place - self._room.start, 1 << 64)) - 1]
        return address + place - self._room.start - start

    def footprint(self, ranges: Iterable[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
        """Return what :meth:`.footprint.Footprint.take` returned, with the host's addresses."""
        return [(self.address_at(start), size, flags) for start, size, flags in ranges]


HOST_PLACE = f"""
define internal i64 @host_place(ptr %context, i64 %address, i64 %size) noinline {{
entry:
  %table.p = getelementptr i8, ptr %context, i64 {Context.host_ranges.offset}
  %table = load ptr, ptr %table.p
  %count.p = getelementptr i8, ptr %context, i64 {Context.host_count.offset}
  %count = load i64, ptr %count.p
  %rows = getelementptr i64, ptr %table, i64 1
  br label %search
search:
  %low = phi i64 [ 0, %entry ], [ %low.next, %look ]
  %high = phi i64 [ %count, %entry ], [ %high.next, %look ]
  %more = icmp ult i64 %low, %high
  br i1 %more, label %look, label %found
look:
  %sum = add i64 %low, %high
  %middle = lshr i64 %sum, 1
  %middle.i = mul i64 %middle, {_ROW}
  %middle.p = getelementptr i64, ptr %rows, i64 %middle.i
  %first = load i64, ptr %middle.p
  %right = icmp ule i64 %first, %address
  %after = add i64 %middle, 1
  %low.next = select i1 %right, i64 %after, i64 %low
  %high.next = select i1 %right, i64 %high, i64 %middle
  br label %search
found:
  %none = icmp eq i64 %low, 0
  br i1 %none, label %no, label %check
check:
  %index = sub i64 %low, 1
  %index.i = mul i64 %index, {_ROW}
  %start.p = getelementptr i64, ptr %rows, i64 %index.i
  %start = load i64, ptr %start.p
  %bytes.p = getelementptr i64, ptr %start.p, i64 1
  %bytes = load i64, ptr %bytes.p
  %within = sub i64 %address, %start
  %last = add i64 %within, %size
  %inside = icmp ule i64 %last, %bytes
  br i1 %inside, label %yes, label %no
yes:
  %place.p = getelementptr i64, ptr %start.p, i64 2
  %place = load i64, ptr %place.p
  %result = add i64 %place, %within
  %lacks = icmp uge i64 %place, {_NO_ROOM}
  br i1 %lacks, label %without, label %end
without:
  store i64 1, ptr %table
  br label %end
end:
  ret i64 %result
no:
  ret i64 -1
}}
"""
"""``@host_place`` as LLVM IR: the place of `size` bytes of the host's memory.

It is an offset from the beginning of the maps; -1 if that is no memory that the kernel may use, and beyond all maps if
it has no place.
"""
