"""Private pools that a recording does not name.

A snapshot names the pool of every segment that is there at the end, but (before PyTorch 2.12) not of those that were
given back before: what a deleted CUDA graph had looks as if it had been the default pool's. It shows where the default
pool would have served a request from another place. Then the segment is taken to be a private pool's, together with
those that the same stream got in the same go.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final, NamedTuple

from cudatool.analyze.requests import RELEASES, Call, Calls, Change, Requests, Verb
from cudatool.trace.events import Kind, pack_pool

__all__ = ["UnnamedPools"]

_FIRST_ID: Final = 1 << 30  # of the second part of an id; programs count theirs from 1


class _Lifetime(NamedTuple):
    """A segment from its allocation to its release; see :func:`_time`."""

    address: int
    size: int
    stream: int
    begin: int
    end: int


class UnnamedPools:
    """The segments of one device whose pool is not known, and which of them are taken to be in private pools.

    Attributes
    ----------
    asked
        The calls, with what is taken to be their pools.
    """

    def __init__(self, asked: Requests) -> None:
        self.asked = asked
        self._unknown = _unknown_segments(asked)
        self._private: dict[_Lifetime, int] = {}
        self._alone: set[_Lifetime] = set()  # those in pools that were made for them

    def __len__(self) -> int:
        """Return how many segments are taken to be in private pools."""
        return len(self._private)

    def explain(self, address: int, call: Call) -> bool:
        """Take the segment that holds `address` at a call to be in a private pool; return whether that is new."""
        for segment in self._unknown:
            if _holds(segment, address, _time(call)):
                if segment in self._alone:
                    return False
                pool = 0 if segment in self._private else self._pool_beside(segment)
                if not pool:
                    self._alone.add(segment)
                    pool = pack_pool((len(self._alone), _FIRST_ID))
                self._private[segment] = pool
                self.asked = self._with_pools(self.asked)
                return True
        return False

    def _pool_beside(self, segment: _Lifetime) -> int:
        """Return the private pool of the stream's last allocation before this segment or its next elsewhere, or 0."""
        before = 0
        for call in self.asked.calls:
            if call.verb is Verb.MALLOC and call.stream == segment.stream:
                pool = call.pool if call.pool in self._private.values() else 0
                if _time(call) < segment.begin:
                    before = pool
                elif not _holds(segment, call.address, _time(call)):
                    return before or pool
        return before

    def _with_pools(self, asked: Requests) -> Requests:
        return replace(asked, calls=Calls(map(self._with_pool, asked.calls)))

    def _with_pool(self, call: Call) -> Call:
        pool = self._pool_of(call.address, _time(call)) if call.verb is Verb.MALLOC else 0
        changes = tuple(
            change._replace(pool=self._pool_of(change.address, _time_of(change, call)) or change.pool)
            for change in call.changes
        )
        return call._replace(pool=pool or call.pool, changes=changes)

    def _pool_of(self, address: int, time: int) -> int:
        for segment, pool in self._private.items():
            if _holds(segment, address, time):
                return pool
        return 0


def _time(call: Call) -> int:
    """Return a number that grows from call to call. One that emptied the cache has the event of the call after it."""
    return 2 * call.event + (call.verb is not Verb.EMPTY_CACHE)


def _time_of(change: Change, call: Call) -> int:
    """Return the time of a change: what is released before an allocation is gone by then."""
    return 2 * call.event if change.kind in RELEASES else _time(call)


def _holds(segment: _Lifetime, address: int, time: int) -> bool:
    return segment.begin <= time <= segment.end and segment.address <= address < segment.address + segment.size


def _unknown_segments(asked: Requests) -> list[_Lifetime]:
    """Return the segments that were given back, and that no event says to be in a private pool."""
    born: dict[int, tuple[Change, int]] = {change.address: (change, -1) for change in asked.prior_memory}
    found = []
    for _, call in asked.calls.with_changes():
        for change in call.changes:
            if change.kind is Kind.SEGMENT_ALLOC:
                born[change.address] = (change, _time_of(change, call))
            elif change.kind is Kind.SEGMENT_FREE and change.address in born:
                first, begin = born.pop(change.address)
                if first.pool == 0:
                    found.append(_Lifetime(first.address, first.size, first.stream, begin, _time_of(change, call)))
    return found
