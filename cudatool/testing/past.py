"""What happened before a test and still matters to it, so that each test can be checked by itself.

Records are *shared* if they were made by a fixture of a wider scope than a function, or outside of any test::

    shared work                          stays until the host has waited for it: a test may race with it
    another test's work                  is dropped: whatever it did wrong is no fault of this test
    what orders work, by whomever        stays while shared work does
    allocations, streams, events         stay as long as they live
    shared graphs                        stay

So a test reports its own races and those with its fixtures, never of another test's. What the tests before it
did wait for counts: nothing is reported that could not happen in this run.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from cudatool.trace.distinct import distinct
from cudatool.trace.events import RECORD, WORK, CopyFlag, Kind

__all__ = ["ALLOCATIONS", "Past", "Records"]

Records = npt.NDArray[np.void]
_Mask = npt.NDArray[np.bool_]

_TOLD_LATER: Final = (Kind.ACCESS, Kind.EXECUTION, Kind.FINDING)  # of work, by its correlation
_ONLY_SHARED: Final = (*WORK, *_TOLD_LATER, Kind.HOST_ACCESS, Kind.WARNING, Kind.OOM, Kind.MODULE_LOAD)
_NEVER: Final = (Kind.RANGE_PUSH, Kind.RANGE_POP, Kind.CALL, Kind.CHILD_PROCESS, Kind.CHILD_RECORDED)

ALLOCATIONS: Final = {
    # how memory is given -> how it is given back
    Kind.BLOCK_ALLOC: Kind.BLOCK_FREE_REQUESTED,
    Kind.MEM_ALLOC: Kind.MEM_FREE,
    Kind.HOST_ALLOC: Kind.HOST_FREE,
}
_FREES: Final = {free: alloc for alloc, free in ALLOCATIONS.items()}
_LIVING: Final = (
    *ALLOCATIONS,
    *_FREES,
    Kind.STREAM_CREATE,
    Kind.STREAM_DESTROY,
    Kind.EVENT_CREATE,
    Kind.EVENT_RECORD,
    Kind.EVENT_DESTROY,
)
_GRAPHS: Final = (
    Kind.GRAPH_NODE_ADDED,
    Kind.GRAPH_INSTANTIATE,
    Kind.GRAPH_UPDATE,
    Kind.GRAPH_NODE,
    Kind.GRAPH_EDGE,
    Kind.GRAPH_POINTER,
)  # what graphs consist of
_MOST: Final = 20_000  # records; more are not worth the time of every later test


class Past:
    """The records to put before those of the next test.

    Attributes
    ----------
    records
        In order; what they say is a program of its own.
    settled
        Number of those, synchronizations of all devices, that no call made: they stand for those that were left out.
    """

    def __init__(self) -> None:
        self.records: Records = np.zeros(0, RECORD)
        self.settled = 0
        self._shared: _Mask = np.zeros(0, bool)

    def __len__(self) -> int:
        return len(self.records)

    def add(self, records: Records, shared: _Mask) -> None:
        """Go on by the records of a test, of which those marked are shared."""
        if not len(records):
            return
        records, shared = np.concatenate([self.records, records]), np.concatenate([self._shared, shared])
        kind = records["kind"]
        own = records["correlation"][shared & np.isin(kind, WORK)]
        shared |= np.isin(kind, _TOLD_LATER) & np.isin(records["correlation"], own[own > 0])
        # Of another test's copies and fills that block the host, that is all that counts.
        blocking = ~shared & np.isin(kind, (Kind.MEMCPY, Kind.MEMSET)) & (records["flags"] & CopyFlag.ASYNC == 0)
        records["size"][blocking] = 0
        kept = (shared | blocking | ~np.isin(kind, _ONLY_SHARED)) & ~np.isin(kind, _NEVER)
        self.records, self._shared = records[kept], shared[kept]
        if len(self.records) > _MOST or not self._in_flight():
            self._settle()

    def _in_flight(self) -> bool:
        """Whether there may be shared work that the host has not waited for."""
        records = self.records
        kind, stream = records["kind"], records["stream"]
        working = np.flatnonzero(self._shared & np.isin(kind, WORK))
        if not len(working):
            return False
        waits = np.flatnonzero(np.isin(kind, (Kind.DEVICE_SYNCHRONIZE, Kind.STREAM_SYNCHRONIZE)))
        for one in distinct(stream[working]):
            last = working[stream[working] == one][-1]
            later = records[waits[waits > last]]
            of_device = (later["kind"] == Kind.DEVICE_SYNCHRONIZE) & (later["device"] == records["device"][last])
            if not (of_device | (later["stream"] == one)).any():
                return True
        return False

    def _settle(self) -> None:
        """Keep what lives, as if the host had waited for everything."""
        living: dict[tuple[int, int], int] = {}
        records = self.records
        rows = np.flatnonzero(np.isin(records["kind"], _LIVING))
        columns = (records[name][rows].tolist() for name in ("kind", "address", "stream", "aux0"))
        for row, kind, address, stream, aux0 in zip(rows.tolist(), *columns, strict=True):
            if kind in ALLOCATIONS:
                living[kind, address] = row
            elif kind in _FREES:
                living.pop((_FREES[kind], address), None)
            elif kind == Kind.STREAM_CREATE:
                living[kind, stream] = row
            elif kind == Kind.STREAM_DESTROY:
                living.pop((Kind.STREAM_CREATE, stream), None)
            elif kind == Kind.EVENT_DESTROY:
                living.pop((Kind.EVENT_CREATE, aux0), None)
                living.pop((Kind.EVENT_RECORD, aux0), None)
            else:
                living[kind, aux0] = row
        graphs = self._shared & np.isin(records["kind"], _GRAPHS)
        kept = sorted([*living.values(), *np.flatnonzero(graphs).tolist()])
        waited = np.zeros(1, RECORD)
        waited["kind"], waited["device"] = Kind.DEVICE_SYNCHRONIZE, -1
        self.records = np.concatenate([records[kept], waited])
        self._shared = np.append(graphs[kept], False)
        self.settled = 1
