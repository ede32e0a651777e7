"""When the work of CUPTI's log ran on the device, and which call had enqueued it."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic_ns

import numpy as np
import numpy.typing as npt

from cudatool.collect import _log_rows
from cudatool.collect.cupti_rows import ROW, What
from cudatool.trace import hooks
from cudatool.trace.events import RECORD, Event, join_records

__all__ = ["Enqueued", "WorkDone"]

_MOST_LAUNCHED = 1 << 18  # calls whose work may still be reported
_OF_OPERATION = 0
"""What stands for the stream of an operation of our runtime, which reports that itself."""


class Enqueued:
    """The calls that enqueued work, by the number that CUPTI gives to both."""

    def __init__(self) -> None:
        self._sorted = np.empty((0, 3), np.uint32)  # CUPTI's correlation, ours, the stream
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

    def of(self, rows: npt.NDArray[np.void]) -> npt.NDArray[np.uint32]:
        """Return the calls that enqueued what ran: CUPTI's correlation, ours, the stream; zeros where none is known."""
        if self._new or self._new_parts:
            new = np.array(self._new, np.uint32).reshape(-1, 3)
            known = np.concatenate([self._sorted[-_MOST_LAUNCHED:], *self._new_parts, new])
            self._sorted, self._new, self._new_parts = known[np.argsort(known[:, 0], kind="stable")], [], []
        found = np.zeros((len(rows), 3), np.uint32)
        if len(self._sorted):
            at = np.minimum(self._sorted[:, 0].searchsorted(rows["correlation"]), len(self._sorted) - 1)
            is_known = self._sorted[at, 0] == rows["correlation"]
            found[is_known] = self._sorted[at[is_known]]
        return found


class WorkDone:
    """Reports when kernels, copies, fills and graphs ran.

    Parameters
    ----------
    enqueued
        The calls that enqueued the work.
    names
        The log's names, see :class:`~cudatool.collect.cupti_log.Tables`.
    streams_of
        Returns the id of the stream of each row.
    source
        The subscriber that is not to be called for what is reported here.
    """

    def __init__(
        self,
        enqueued: Enqueued,
        names: list[str],
        streams_of: Callable[[npt.NDArray[np.void]], list[int]],
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
        launches = self._enqueued.of(rows)
        is_known = launches[:, 0] != 0
        kept = is_known | (rows["what"] == What.KERNEL)
        is_ours = is_known & (launches[:, 2] == _OF_OPERATION)
        # A kernel may end before the call that launches it does.
        is_early = ~is_known & kept if self.calls_are_noted else np.zeros(len(rows), np.bool_)
        if is_ours.any() or is_early.any() or len(self._to_look_at):
            kept &= self._find_streams(rows, launches, is_ours, is_early)
        if not kept.all():
            rows, launches, is_known = rows[kept], launches[kept], is_known[kept]
        is_launch = ~is_known
        launches[is_launch, 1] = hooks.new_correlations(int(np.count_nonzero(is_launch)))
        launches[is_launch, 2] = self._streams_of(rows if is_launch.all() else rows[is_launch])
        records = np.empty(2 * len(rows), RECORD)
        made = _log_rows.ran(rows, launches, monotonic_ns(), records)  # it is known now
        hooks.forward_rows(records[:made], self._names, source=self._source)

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
