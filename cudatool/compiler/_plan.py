"""Memory planned ahead: where each buffer of a graph lies in one reservation, by size and lifetime."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from cudatool.errors import GraphBreakError
from cudatool.runtime.allocator import Memory
from cudatool.runtime.stream import Stream

__all__ = ["ALIGNMENT", "Arena", "Buffer", "Plan", "plan", "rounded"]

ALIGNMENT: Final = 512
"""Bytes: what the caching allocator rounds blocks to, so operations find the alignment that they know."""

_NOWHERE: Final = 1 << 62
"""Address above all that a device has: what is not in memory must not be accessed."""


@dataclass(frozen=True, slots=True)
class Buffer:
    """One allocation of a traced function.

    Attributes
    ----------
    size
        Bytes, a multiple of 512.
    first, last
        Its lifetime: the indices of the first node after its allocation and of the last before it was freed.
    kept
        Whether it outlives the function: an output, or what the function stores.
    stream
        Number of the stream that it was allocated for, in order of appearance.
    shares
        Whether it may lie where another buffer was. Not if another stream uses it (``record_stream``).
    line
        The program's line that allocated it, as ``file.py:12``.
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


def plan(buffers: Sequence[Buffer], lifetimes: Sequence[tuple[int, int]]) -> Plan:
    """Return offsets such that two buffers overlap only if they may share and never exist at the same time.

    The largest buffer goes first, each to the lowest place that is free all its life.

    Parameters
    ----------
    lifetimes
        For each buffer the times of its allocation and its free, on one clock.
    """
    offsets = [0] * len(buffers)
    placed: list[int] = []
    for index in sorted(range(len(buffers)), key=lambda i: (-buffers[i].size, i)):
        taken = sorted(
            (offsets[other], offsets[other] + buffers[other].size)
            for other in placed
            if _conflict(buffers, lifetimes, index, other)
        )
        offset = 0
        for start, end in taken:
            if offset + buffers[index].size <= start:
                break
            offset = max(offset, end)
        offsets[index] = offset
        placed.append(index)
    ends = [offset + buffer.size for offset, buffer in zip(offsets, buffers, strict=True)]
    return Plan(tuple(buffers), tuple(offsets), max(ends, default=0), sum(buffer.size for buffer in buffers))


def _conflict(buffers: Sequence[Buffer], lifetimes: Sequence[tuple[int, int]], a: int, b: int) -> bool:
    one, other = buffers[a], buffers[b]
    if not one.shares or not other.shares or one.stream != other.stream:
        return True  # work on two streams has no order that the lifetimes would show
    return lifetimes[a][0] < lifetimes[b][1] and lifetimes[b][0] < lifetimes[a][1]


class Arena:
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
    """

    def __init__(self, plan: Plan, absent: Mapping[int, int], stream: Stream) -> None:
        self.plan = plan
        self._absent = absent
        self._memory = Memory(plan.peak, stream)
        self.address = self._memory.address
        self.peak = 0
        self._asked = self._served = 0  # how often, and for how much that is in memory
        self._live: dict[int, int] = {}  # start -> end, in bytes from the address
        self._numbers: dict[int, tuple[int, int]] = {}  # address -> number and bytes of what was last there

    def use(self, stream: Stream) -> None:
        """Let the memory rest, once it is given back, until what is on `stream` by then has completed."""
        self._memory.record_stream(stream)

    def malloc(self, size: int, stream: int) -> int:
        """Return the address of the next buffer.

        Raises
        ------
        GraphBreakError
            It is not what was planned, or its place is still in use.
        """
        if not size:
            return 0
        number, index = self._asked, self._served
        planned = self._absent.get(number)
        if planned is None and index < len(self.plan.buffers):
            planned = self.plan.buffers[index].size
        if rounded(size) != planned:
            raise GraphBreakError("the function allocates other memory each time it runs")
        self._asked += 1
        if number in self._absent:
            address = _NOWHERE + sum(bytes for other, bytes in self._absent.items() if other < number)
            self._numbers[address] = number, planned
            return address
        start = self.plan.offsets[index]
        end = start + self.plan.buffers[index].size
        if any(start < used_end and used < end for used, used_end in list(self._live.items())):
            raise GraphBreakError("the function keeps memory longer than when it was traced")
        self._served += 1
        self._live[start] = end
        self._numbers = {
            address: entry
            for address, entry in self._numbers.items()
            if address >= self.address + end or address + entry[1] <= self.address + start
        }
        self._numbers[self.address + start] = number, planned
        self.peak = max(self.peak, end)
        return self.address + start

    @property
    def is_complete(self) -> bool:
        """Whether all that was planned was asked for."""
        return self._asked == len(self.plan.buffers) + len(self._absent)

    def place(self, address: int) -> tuple[int, int]:
        """Return the number of the allocation that an address is in, and how far; -1 and the address if in none."""
        for start, (number, size) in self._numbers.items():
            if start <= address < start + size:
                return number, address - start
        return -1, address

    def free(self, address: int) -> None:
        """Take a buffer back."""
        self._live.pop(address - self.address, None)

    def record_stream(self, address: int, stream: int) -> None:
        """Do nothing: the plan gives a buffer that another stream uses a place of its own."""


def rounded(size: int) -> int:
    """Return the bytes that a buffer of `size` bytes takes."""
    return -(-size // ALIGNMENT) * ALIGNMENT
