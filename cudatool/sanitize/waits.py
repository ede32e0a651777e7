"""What waits of the host cover while other threads go on.

A call that waits for a stream covers what is in it when the call begins, and is recorded when it ends. Other threads
enqueue work meanwhile, whose records come first: the call does not wait for that. As pseudo-code::

    at the first record after the call's beginning:   covered = the moments at which all work so far is done
    at the call's own record:                         the host is after those, and not after all work so far
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from cudatool.sanitize.clocks import Moment
from cudatool.sanitize.ordering import Agent, Ordering
from cudatool.trace.events import Kind

__all__ = ["Waits"]

_KINDS: Final = (Kind.STREAM_SYNCHRONIZE, Kind.EVENT_SYNCHRONIZE, Kind.DEVICE_SYNCHRONIZE)
_WINDOW: Final = 64  # records that are looked at together; twice as many each time


class _Wait(NamedTuple):
    begin: int  # the first record after its beginning
    record: int
    kind: int
    device: int
    stream: int
    which: int  # the event, or the context


class Waits:
    """The waits of a trace during which another thread has records.

    Attributes
    ----------
    begins
        Those that are yet to begin, in that order.
    """

    def __init__(self, records: npt.NDArray[np.void], streams: Mapping[int, Agent], ordering: Ordering) -> None:
        self._streams, self._ordering = streams, ordering
        self._covered: dict[int, list[Moment]] = {}
        self.begins = deque(sorted(_waits(records)))

    def begin(self, record: int) -> None:
        """Note what the waits cover that begin before a record."""
        while self.begins and self.begins[0].begin <= record:
            wait = self.begins.popleft()
            self._covered[wait.record] = self._position(wait)

    def covered(self, record: int) -> list[Moment] | None:
        """Return what the wait of a record covers; None if that is all that comes before the record."""
        return self._covered.pop(record, None)

    def _position(self, wait: _Wait) -> list[Moment]:
        if wait.kind == Kind.EVENT_SYNCHRONIZE:
            return self._ordering.event_position(wait.which)
        if wait.kind == Kind.DEVICE_SYNCHRONIZE:
            return self._ordering.context_position(wait.device, wait.which)
        stream = self._streams.get(wait.stream)
        return [] if stream is None else self._ordering.position(stream)


def _waits(records: npt.NDArray[np.void]) -> Iterator[_Wait]:
    places = np.flatnonzero(np.isin(records["kind"], _KINDS) & (records["aux1"] != 0))
    waits = records[places]
    columns = (waits[name].tolist() for name in ("kind", "device", "stream", "aux0", "aux1"))
    for record, kind, device, stream, which, began in zip(places.tolist(), *columns, strict=True):
        begin = _first_after(records["time"], record, began)
        if (records["thread"][begin:record] != records["thread"][record]).any():
            yield _Wait(begin, record, kind, device, stream, which)


def _first_after(times: npt.NDArray[np.uint64], wait: int, began: int) -> int:
    """Return the first of the records before `wait` that have come since, all of them later than `began`."""
    high, window = wait, _WINDOW
    while high:
        low = max(high - window, 0)
        earlier = np.flatnonzero(times[low:high] <= began)
        if len(earlier):
            return low + int(earlier[-1]) + 1
        high, window = low, 2 * window
    return 0
