"""Memory planned ahead: where each buffer of a graph lies in one reservation, by size and lifetime."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from cudatool.errors import GraphBreakError
from cudatool.runtime.allocator import Memory
from cudatool.runtime.stream import Stream

__all__ = ["ALIGNMENT", "Buffer", "Plan", "PlanArena", "plan", "rounded"]

ALIGNMENT: Final = 512
"""Bytes: what the caching allocator rounds blocks to, so operations find the alignment that they know."""

_NOWHERE: Final = 1 << 62
"""Address above all that a device has: what is not in memory must not be accessed."""


@dataclass(frozen=True, slots=True)
class Buffer:
    """One allocation of a traced function, or the graph's copy of an argument.

    Attributes
    ----------
    size
        Bytes, a multiple of 512.
    first, last
        Its lifetime: the indices of the first node and of the last that need it. These are the nodes that use it, where
        that is known; else those between its allocation and its free. A node that reads it, and writes its results in
        its place, is no longer a part of it.
    kept
        Whether it outlives the function: an output, what the function stores, or an argument that it changes.
    stream
        Number of the stream that it was allocated for, in order of appearance.
    shares
        Whether it may lie where another buffer was. Not if another stream uses it (``record_stream``).
    line
        The program's line that allocated it, as ``file.py:12``; of an argument, which one.
    """

    size: int
    first: int
    last: int
    kept: bool
    stream: int
    shares: bool
    line: str


@dataclass(frozen=True, slots=True)
class Plan:
    """Where the buffers lie.

    Attributes
    ----------
    buffers
        In the order of their allocation.
    offsets
        Bytes from the start of the reservation, one for each buffer.
    peak
        Bytes of the reservation.
    unshared
        Bytes that the buffers would take if none lay where another was.
    """

    buffers: tuple[Buffer, ...]
    offsets: tuple[int, ...]
    peak: int
    unshared: int


def plan(buffers: Sequence[Buffer], in_place: Collection[tuple[int, int]] = ()) -> Plan:
    """Return offsets such that two buffers overlap only if they may share and no node needs both.

    The largest buffer goes first, each to the lowest place that is free all its life.

    Parameters
    ----------
    in_place
        Pairs of buffers of which one node reads the first for the last time and writes the second for the first time,
        element by element: the second may lie exactly where the first does.
    """
    offsets = [0] * len(buffers)
    placed: list[int] = []
    partners: dict[int, set[int]] = {}
    for source, target in in_place:
        partners.setdefault(source, set()).add(target)
        partners.setdefault(target, set()).add(source)

    def place(index: int) -> tuple[int, int]:
        return offsets[index], offsets[index] + buffers[index].size

    for index in sorted(range(len(buffers)), key=lambda i: (-buffers[i].size, i)):
        size, of_this = buffers[index].size, partners.get(index, set())
        taken = [other for other in placed if _conflict(buffers[index], buffers[other])]
        beside = sorted(place(other) for other in taken if other in of_this)
        others = sorted(place(other) for other in taken if other not in of_this)
        for start, _ in beside:
            elsewhere = [span for span in beside if span[0] != start]
            if _first_free(size, sorted([*others, *elsewhere]), start) == start:
                offsets[index] = start
                break
        else:
            offsets[index] = _first_free(size, sorted([*others, *beside]))
        placed.append(index)
    found = list(buffers)
    for source, target in in_place:
        if offsets[source] == offsets[target]:
            found[source] = replace(found[source], last=buffers[target].first - 1)
    ends = [offset + buffer.size for offset, buffer in zip(offsets, buffers, strict=True)]
    return Plan(tuple(found), tuple(offsets), max(ends, default=0), sum(buffer.size for buffer in buffers))


def _first_free(size: int, taken: Sequence[tuple[int, int]], offset: int = 0) -> int:
    """Return the lowest offset from `offset` on where `size` bytes are free of what is taken, in ascending order."""
    for start, end in taken:
        if offset + size <= start:
            break
        offset = max(offset, end)
    return offset


def _conflict(one: Buffer, other: Buffer) -> bool:
    if not one.shares or not other.shares or one.stream != other.stream:
        return True  # work on two streams has no order that the lifetimes would show
    return one.first <= other.last and other.first <= one.last


class PlanArena:
    """The reservation of a plan, which hands its buffers out in the planned order.

    It keeps its memory as long as any array lies in it.

    Attributes
    ----------
    peak
        Bytes up to the end of the highest buffer that was handed out: what ran, beside what was planned.

    Parameters
    ----------
    absent
        Number and bytes of the allocations that are not in memory. They are given addresses where no memory is.
    same
        Numbers of the allocations that are where an earlier one is.
    """

    def __init__(self, plan: Plan, absent: Mapping[int, int], same: Mapping[int, int], stream: Stream) -> None:
        self.plan = plan
        self._memory = Memory(plan.peak, stream)
        self.address = self._memory.address
        self.peak = 0
        self._places: list[tuple[int, int]] = []  # address and size of each allocation
        offsets, nowhere = iter(zip(plan.offsets, plan.buffers, strict=True)), _NOWHERE
        for number in range(len(plan.buffers) + len(absent) + len(same)):
            if number in same:
                self._places.append(self._places[same[number]])
            elif number in absent:
                self._places.append((nowhere, absent[number]))
                nowhere += absent[number]
            else:
                offset, buffer = next(offsets)
                self._places.append((self.address + offset, buffer.size))
        self._asked = 0  # how often
        self._live: Counter[int] = Counter()  # arrays at an address

    def use(self, stream: Stream) -> None:
        """Let the memory rest, once it is given back, until what is on `stream` by then has completed."""
        self._memory.record_stream(stream)

    def address_of(self, number: int) -> int:
        """Return where an allocation is, by its number."""
        return self._places[number][0]

    def malloc(self, size: int, stream: int) -> int:
        """Return the address of the next buffer.

        Raises
        ------
        GraphBreakError
            It is not what was planned.
        """
        if not size:
            return 0
        if self._asked == len(self._places) or self._places[self._asked][1] != rounded(size):
            raise GraphBreakError("the function allocates other memory each time it runs")
        address, planned = self._places[self._asked]
        self._asked += 1
        self._live[address] += 1
        if address < _NOWHERE:
            self.peak = max(self.peak, address + planned - self.address)
        return address

    def check(self, inputs: int) -> None:
        """Check that the function has ended as planned; `inputs` allocations are arguments, which last.

        Raises
        ------
        GraphBreakError
            Not all was asked for, or other memory than planned is kept.
        """
        if self._asked < len(self._places):
            raise GraphBreakError("the function allocates other memory each time it runs")
        offsets = [
            o for o, buffer in list(zip(self.plan.offsets, self.plan.buffers, strict=True))[inputs:] if buffer.kept
        ]
        kept = Counter(self.address + offset for offset in offsets)
        kept.update(address for address, _ in self._places[:inputs])
        if self._live != kept:
            raise GraphBreakError("the function keeps memory longer than when it was traced")

    def free(self, address: int) -> None:
        """Take a buffer back."""
        if not address:
            return  # an array without elements
        self._live[address] -= 1
        if not self._live[address]:
            del self._live[address]

    def record_stream(self, address: int, stream: int) -> None:
        """Do nothing: the plan gives a buffer that another stream uses a place of its own."""


def rounded(size: int) -> int:
    """Return the bytes that a buffer of `size` bytes takes."""
    return -(-size // ALIGNMENT) * ALIGNMENT
