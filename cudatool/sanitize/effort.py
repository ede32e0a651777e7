"""How much work the check of a trace may be: bounded by the number of its events, whatever they say."""

from __future__ import annotations

import math

from cudatool.errors import TraceFormatError
from cudatool.limits import CHECK_EVENT, CHECK_STEPS
from cudatool.trace.model import Trace

__all__ = ["Effort"]


class Effort:
    """What is left of the work that the check of one trace may be.

    Most events take 200 units. A clock has a component for each stream and host thread, bytes that lie on each other
    in many ways are compared pair by pair: a small file can ask for work without end.

    Parameters
    ----------
    trace
        What is checked.
    bounded
        Whether there is a limit. A program that the user runs has none: it may have thousands of streams.

    Attributes
    ----------
    counts
        Whether the units are of interest: what is done for each access need not name any otherwise.
    """

    __slots__ = ("_events", "_left", "_source", "counts")

    def __init__(self, trace: Trace, *, bounded: bool = False) -> None:
        self.counts = bounded
        self._events = len(trace.records)
        self._left: float = CHECK_STEPS + CHECK_EVENT * self._events if bounded else math.inf
        self._source = str(trace.source)

    def spend(self, units: int) -> None:
        """Take units away.

        Raises
        ------
        TraceFormatError
            There are none left.
        """
        self._left -= units
        if self._left < 0:
            raise TraceFormatError(
                self._source,
                f"cannot be checked for races: for {self._events:,} events it has too many streams, host threads or "
                "accesses that overlap; `cudatool sanitize PROGRAM` has no such limit",
            )
