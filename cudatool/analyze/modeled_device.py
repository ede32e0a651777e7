"""The model of a device that a replay allocates from: how much memory it has, and which addresses it gives out."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from typing import Final

from cudatool.analyze.calls import Change
from cudatool.analyze.requests import Requests
from cudatool.errors import OutOfMemoryError
from cudatool.trace.events import Kind

__all__ = ["ModeledDevice"]

_REGION: Final = 32 * 1024 * 1024
_PAGE: Final = 2 * 1024 * 1024
_HIGHEST: Final = 1 << 46  # where regions begin if a recording does not show it


class _Gaps:
    """Ranges of free addresses: each an address and a size, in order, never touching."""

    def __init__(self) -> None:
        self.ranges: list[tuple[int, int]] = []
        self.looked_at = 0  # ranges that take() has passed

    def add(self, address: int, size: int) -> None:
        """Add a range to the free ranges; parts of it may be free already."""
        end = address + size
        first = bisect_left(self.ranges, (address, 0))
        if first and sum(self.ranges[first - 1]) >= address:
            first -= 1
        last = first
        while last < len(self.ranges) and self.ranges[last][0] <= end:
            last += 1
        if first < last:
            address, end = min(address, self.ranges[first][0]), max(end, sum(self.ranges[last - 1]))
        self.ranges[first:last] = [(address, end - address)]

    def take(self, size: int) -> int | None:
        """Take `size` bytes from the lowest range that is large enough; return their address."""
        for index, (address, room) in enumerate(self.ranges):
            if room >= size:
                self.looked_at += index
                self.ranges[index : index + 1] = [(address + size, room - size)] if room > size else []
                return address
        self.looked_at += len(self.ranges)
        return None

    def take_at(self, address: int, size: int) -> bool:
        """Take certain addresses; return whether they are free."""
        index = bisect_left(self.ranges, (address + 1, 0)) - 1
        if index < 0 or sum(self.ranges[index]) < address + size:
            return False
        start, room = self.ranges.pop(index)
        if start + room > address + size:
            self.ranges.insert(index, (address + size, start + room - address - size))
        if start < address:
            self.ranges.insert(index, (start, address - start))
        return True

    def cut(self, address: int, size: int) -> None:
        """Remove certain addresses from the free ranges; some of them may not be free."""
        end = address + size
        first = bisect_left(self.ranges, (address, 0))
        if first and sum(self.ranges[first - 1]) > address:
            first -= 1
        last = first
        while last < len(self.ranges) and self.ranges[last][0] < end:
            last += 1
        parts = [(start, address - start) for start, _ in self.ranges[first:last] if start < address]
        parts += [(end, start + room - end) for start, room in self.ranges[first:last] if start + room > end]
        self.ranges[first:last] = parts


def _regions(recorded: Requests) -> tuple[_Gaps, int]:
    """Return the free remainders of regions from before the first segment, and the lowest address of these regions.

    A recording shows such regions by segments that are neither in a new region nor in a remainder of one.
    """
    earlier, later = _Gaps(), _Gaps()
    lowest = highest = 0
    for change in recorded.calls.changes():
        address, size = change.address, change.size
        if change.kind is Kind.SEGMENT_FREE:
            later.add(address, size)
        elif change.kind is Kind.SEGMENT_ALLOC and not later.take_at(address, size):
            region = -(-size // _REGION) * _REGION
            if address % _REGION == 0 and address + region <= (lowest or address + region):
                lowest, highest = address, highest or address + region
                if region > size:
                    later.add(address + size, region - size)
            else:
                earlier.add(address, size)
    top = min([highest or _HIGHEST, *(address for address, _ in earlier.ranges)])
    return earlier, top // _REGION * _REGION


class ModeledDevice:
    """A device as a number of bytes and a range of addresses: a segment provider.

    Between free blocks of one size the lowest address decides, so that the order of segments matters a little. This
    model follows the observed behaviour of the driver (CUDA 13.0 on an H200): it allocates regions of multiples of 32
    MiB, each new one below the last; but first the remainders of earlier regions, from the lowest address up.

    Parameters
    ----------
    total
        Bytes of the device.
    recorded
        Requests whose segments show the regions.
    lowest_first
        Whether each segment gets the lowest free address, as a driver other than the observed one might do.

    Attributes
    ----------
    passed
        The streams whose events have completed; a stream is its own event's token.
    recorded_segments
        Addresses of the segments that the current call got in the recording, by size. They are used again if they are
        free, so that only the settings make a difference.
    """

    def __init__(self, total: int, recorded: Requests, *, lowest_first: bool = False) -> None:
        self.total = total
        self.used = 0
        self.passed: set[int] = set()
        self.recorded_segments: dict[int, int] = {}
        self._gaps, self._lowest = _regions(recorded)
        if lowest_first:
            self._gaps.add(_PAGE, self._lowest - _PAGE)
        self._sizes: dict[int, int] = {}  # of segments, by address
        self._starts: list[int] = []  # their addresses, sorted

    @property
    def looked_at(self) -> int:
        """How many gaps between segments were visited, counting repeats."""
        return self._gaps.looked_at

    def allocate(self, size: int, stream: int) -> int:
        self._take(size)
        address = self.recorded_segments.get(size)
        if address is None or not self._take_at(address, size):
            address = self._gaps.take(size)
        if address is None:
            region = -(-size // _REGION) * _REGION
            address = self.reserve(region, stream)
            if region > size:
                self._gaps.add(address + size, region - size)
        self._sizes[address] = size
        insort(self._starts, address)
        return address

    def adopt(self, memory: Iterable[Change]) -> None:
        """Take over segments and pages that the recording began with; pages are mapped afterwards."""
        for change in memory:
            self._lowest = min(self._lowest, change.address // _REGION * _REGION)
            if change.kind is Kind.SEGMENT_ALLOC and self._take_at(change.address, change.size):
                self.used += change.size
                self._sizes[change.address] = change.size
                insort(self._starts, change.address)

    def _take_at(self, address: int, size: int) -> bool:
        """Take certain addresses; return whether they are free."""
        after = bisect_left(self._starts, address)
        if after < len(self._starts) and self._starts[after] < address + size:
            return False
        if after and self._starts[after - 1] + self._sizes[self._starts[after - 1]] > address:
            return False
        self._gaps.cut(address, size)
        self._lowest = min(self._lowest, address // _REGION * _REGION)
        return True

    def free(self, address: int) -> None:
        size = self._sizes.pop(address)
        del self._starts[bisect_left(self._starts, address)]
        self.used -= size
        self._gaps.add(address, size)

    def reserve(self, size: int, stream: int) -> int:
        self._lowest -= size
        return self._lowest

    def unreserve(self, address: int, size: int) -> None:
        pass

    def map(self, address: int, size: int, page_size: int) -> None:
        self._take(size)

    def unmap(self, address: int, size: int, page_size: int) -> None:
        self.used -= size

    def record_event(self, stream: int) -> int:
        return stream

    def event_passed(self, token: int) -> bool:
        return token in self.passed

    def synchronize_event(self, token: int) -> None:
        self.passed.add(token)

    def captured_tail(self, stream: int) -> None:
        return None  # captures are not known here

    def nodes_before(self, node: int) -> tuple[int, ...]:
        return ()

    def memory_info(self) -> tuple[int, int]:
        return self.total - self.used, self.total

    def _take(self, size: int) -> None:
        if self.used + size > self.total:
            raise OutOfMemoryError(f"{size} bytes are more than are left")
        self.used += size
