"""Infers private pools that a recording does not name.

A snapshot names the pool of every segment that exists at the end, but (before PyTorch 2.12) not of those that were
released earlier: segments of a deleted CUDA graph look as if they were the default pool's. The replay notices this when
the default pool would have served a request from another address. Then the segment is assumed to be a private pool's,
together with those that the same stream got in the same sequence.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final, NamedTuple

from cudatool.analyze.calls import AllocatorCall, Change, call_time, change_time
from cudatool.analyze.requests import Requests
from cudatool.trace.events import Kind, pack_pool

__all__ = ["UnnamedPools"]

_FIRST_ID: Final = 1 << 30  # of the second part of an id; programs count theirs from 1


class _Lifetime(NamedTuple):
    """A segment from its allocation to its release; see :func:`cudatool.analyze.calls.call_time`."""

    address: int
    size: int
    stream: int
    begin: int
    end: int


class UnnamedPools:
    """The segments of one device whose pool is not known, and which of them are assumed to be in private pools.

    Attributes
    ----------
    asked
        The calls, with their assumed pools.
    """

    def __init__(self, asked: Requests) -> None:
        self.asked = asked
        self._unknown = _unknown_segments(asked)
        self._private: dict[_Lifetime, int] = {}
        self._alone: set[_Lifetime] = set()  # those in pools that were made for them

    def __len__(self) -> int:
        """Return how many segments are assumed to be in private pools."""
        return len(self._private)

    def explain(self, address: int, call: AllocatorCall) -> bool:
        """Assume that the segment with `address` is in a private pool at a call; return whether that is new."""
        for segment in self._unknown:
            if _holds(segment, address, call_time(call)):
                if segment in self._alone:
                    return False
                pool = 0 if segment in self._private else self._pool_beside(segment)
                if not pool:
                    self._alone.add(segment)
                    pool = pack_pool((len(self._alone), _FIRST_ID))
                self._private[segment] = pool
                place = range(segment.address, segment.address + segment.size)
                self.asked = replace(
                    self.asked, calls=self.asked.calls.with_pool(pool, place, segment.begin, segment.end)
                )
                return True
        return False

    def _pool_beside(self, segment: _Lifetime) -> int:
        """Return the private pool of the stream's last allocation before this segment or its next elsewhere, or 0."""
        before = 0
        private = set(self._private.values())
        for event, address, number in zip(*self.asked.calls.mallocs_on(segment.stream), strict=True):
            pool, time = number if number in private else 0, 2 * event + 1
            if time < segment.begin:
                before = pool
            elif not _holds(segment, address, time):
                return before or pool
        return before


def _holds(segment: _Lifetime, address: int, time: int) -> bool:
    return segment.begin <= time <= segment.end and segment.address <= address < segment.address + segment.size


def _unknown_segments(asked: Requests) -> list[_Lifetime]:
    """Return the segments that were released and that no event assigns to a private pool."""
    born: dict[int, tuple[Change, int]] = {change.address: (change, -1) for change in asked.prior_memory}
    found = []
    for _, call in asked.calls.with_changes():
        for change in call.changes:
            if change.kind is Kind.SEGMENT_ALLOC:
                born[change.address] = (change, change_time(change, call))
            elif change.kind is Kind.SEGMENT_FREE and change.address in born:
                first, begin = born.pop(change.address)
                if first.pool == 0:
                    found.append(_Lifetime(first.address, first.size, first.stream, begin, change_time(change, call)))
    return found
