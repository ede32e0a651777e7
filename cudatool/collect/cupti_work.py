"""When the work of CUPTI's log ran on the device, and which call had enqueued it."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic_ns
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cudatool.collect import _log_rows
from cudatool.collect.cupti_rows import ROW, What
from cudatool.trace import hooks
from cudatool.trace.events import RECORD, Event, join_records

__all__ = ["Enqueued", "Found", "WorkDone"]

_MOST_LAUNCHED = 1 << 18  # calls whose work may still be reported
_OF_OPERATION = 0
"""What stands for the stream of an operation of our runtime, which reports that itself."""


class Enqueued:
    """The latest calls that enqueued work, by the number that CUPTI gives to both."""

    def __init__(self) -> None:
        self._known = np.zeros((_MOST_LAUNCHED, 3), np.uint32)  # takes memory as far as there are calls
        self._new: list[tuple[int, int, int]] = []
        self._new_parts: list[npt.NDArray[np.uint32]] = []

    def add(self, called: int, correlation: int, stream: int) -> None:
        """Note a call by CUPTI's correlation, with ours and the id of its stream."""
        self._new.append((called, correlation, stream))

    def add_all(self, calls: npt.NDArray[np.uint32]) -> None:
        """Note several calls, one a row."""
        self._new_parts.append(calls)

    def add_operation(self, called: int, operation: int) -> None:
        """Note a call that our runtime made for an operation, which the runtime reports with its stream."""
        self._new.append((called, operation, _OF_OPERATION))

    def clear(self) -> None:
        """Forget the calls of which nothing was asked yet."""
        self._new.clear()
        self._new_parts.clear()

    def of(self, rows: npt.NDArray[np.void]) -> Found:
        """Return the calls that enqueued what ran."""
        for part in (*self._new_parts, np.array(self._new, np.uint32)):
            _log_rows.remember(self._known, part)
        self.clear()
        calls = np.empty((len(rows), 3), np.uint32)
        unknown, kernels, operations = _log_rows.look_up(self._known, rows, calls)
        return Found(calls, unknown, kernels, operations)


class Found(NamedTuple):
    """The calls that enqueued work.

    Attributes
    ----------
    calls
        CUPTI's correlation, ours, the stream; zeros where none is known.
    unknown, kernels
        The number of rows for which none is known, and of kernels of these.
    operations
        The number of rows that are of an operation of our runtime.
    """

    calls: npt.NDArray[np.uint32]
    unknown: int
    kernels: int
    operations: int


class WorkDone:
    """Reports when kernels, copies, fills and graphs ran.

    Parameters
    ----------
    enqueued
        The calls that enqueued the work.
    names
        The log's names, see :class:`~cudatool.collect.cupti_log.Tables`.
    streams_of
        Returns the ids of streams, given as the device in the upper half of a number, and CUPTI's number.
    source
        The subscriber that is not to be called for what is reported here.
    """

    def __init__(
        self,
        enqueued: Enqueued,
        names: list[str],
        streams_of: Callable[[list[int]], list[int]],
        source: Callable[[Event], None],
    ) -> None:
        self._enqueued, self._names, self._streams_of, self._source = enqueued, names, streams_of, source
        self._streams_of_operations: dict[int, int] = {}  # of our runtime, by correlation
        self._to_look_at = np.empty(0, ROW)  # that ran before what enqueued it was reported
        self.calls_are_noted = False
        """Whether the log has the launches of kernels as calls, so that one that ran belongs to one of them."""

    @property
    def is_waiting(self) -> bool:
        """Whether work ran whose call was not reported yet."""
        return len(self._to_look_at) > 0

    def add_operation(self, correlation: int, stream: int) -> None:
        """Note the stream of an operation that our runtime reported."""
        if len(self._streams_of_operations) > _MOST_LAUNCHED:
            self._streams_of_operations.clear()
        self._streams_of_operations[correlation] = stream

    def report(self, done: list[npt.NDArray[np.void]]) -> None:
        """Report when kernels, copies, fills and graphs ran, and the launches of kernels outside of graphs."""
        parts = [self._to_look_at, *done] if self.is_waiting else done
        rows = parts[0] if len(parts) == 1 else join_records(parts)
        launches, unknown, kernels, operations = self._enqueued.of(rows)
        # A kernel may end before the call that launches it does.
        may_be_early = self.calls_are_noted and kernels > 0
        if may_be_early or operations or unknown > kernels or self.is_waiting:
            rows, launches = self._reported(rows, launches)
            unknown = len(launches) - int(np.count_nonzero(launches[:, 0]))
        first = hooks.new_correlations(unknown).start
        streams = np.frombuffer(_log_rows.streams(rows, launches), np.uint64)
        ids = np.array(self._streams_of(streams.tolist()), np.uint32)
        records = np.empty(len(rows) + unknown, RECORD)
        _log_rows.ran(rows, launches, streams, ids, first, monotonic_ns(), records)  # it is known now
        hooks.forward_rows(records, self._names, source=self._source)

    def _reported(
        self, rows: npt.NDArray[np.void], launches: npt.NDArray[np.uint32]
    ) -> tuple[npt.NDArray[np.void], npt.NDArray[np.uint32]]:
        """Return what is reported now, with the calls that enqueued it."""
        is_known = launches[:, 0] != 0
        kept = is_known | (rows["what"] == What.KERNEL)
        is_ours = is_known & (launches[:, 2] == _OF_OPERATION)
        is_early = ~is_known & kept if self.calls_are_noted else np.zeros(len(rows), np.bool_)
        if is_ours.any() or is_early.any() or self.is_waiting:
            kept &= self._find_streams(rows, launches, is_ours, is_early)
        return rows[kept], launches[kept]

    def _find_streams(
        self,
        rows: npt.NDArray[np.void],
        launches: npt.NDArray[np.uint32],
        is_ours: npt.NDArray[np.bool_],
        is_early: npt.NDArray[np.bool_],
    ) -> npt.NDArray[np.bool_]:
        """Set the streams of our runtime's work in `launches`; return false for what waits until its call is reported.

        That is looked at once more the next time. Our runtime's work that is not reported then failed; a kernel that is
        still early was launched in a way that is not watched.
        """
        streams = self._streams_of_operations
        launches[is_ours, 2] = [streams.get(operation, _OF_OPERATION) for operation in launches[is_ours, 1].tolist()]
        is_unknown: npt.NDArray[np.bool_] = is_ours & (launches[:, 2] == _OF_OPERATION)
        is_new = np.arange(len(rows)) >= len(self._to_look_at)
        self._to_look_at = rows[(is_unknown | is_early) & is_new]
        return np.logical_not(is_unknown | (is_early & is_new))
