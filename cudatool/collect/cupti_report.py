"""Makes the records of the calls of CUPTI's log, and gives streams their ids: what all that reads calls needs."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from cudatool.collect.cupti_calls import DESCRIBED, PER_THREAD, LoggedCall, plain_name
from cudatool.collect.cupti_log import Tables
from cudatool.collect.cupti_rows import Row
from cudatool.collect.gpu_launches import Launches, Pointed
from cudatool.trace import hooks
from cudatool.trace.events import RECORD, Api, Kind, StreamFlag, WarningCode, WarningFlag

__all__ = ["BLOCKING", "Reporter"]

BLOCKING = StreamFlag(0)
_PER_THREAD_STREAM = 2  # CU_STREAM_PER_THREAD


class Reporter:
    """What is known of the call that is read, and the records that were made so far.

    Parameters
    ----------
    calls
        What is logged, by name.
    tables
        What rows refer to.
    launches
        What infers the accesses of each launch; None to report none.

    Attributes
    ----------
    row, called
        The call, and its stack and library.
    texts
        The index of each name in records.
    pointed
        What arguments of the logged calls pointed at.
    stream_of
        What ``_log_rows.translate`` needs to know of streams.
    """

    def __init__(self, calls: dict[str, LoggedCall], tables: Tables, launches: Launches | None) -> None:
        self.calls, self.tables, self.launches = calls, tables, launches
        self.row = Row(0, 0, 0, 0, 0, 0, 0, 0, ())
        self.called = tables.stacks[0]
        self.texts = {"": 0}
        self.pointed = Pointed()
        self.stream_of: dict[int, int] = {}
        self.reported: list[tuple[int, ...]] = []  # of RECORD; a name is its index in the texts

    def report(
        self,
        kind: Kind,
        *,
        stream: int = 0,
        correlation: int = 0,
        name: str = "",
        address: int = 0,
        size: int = 0,
        flags: int = 0,
        aux0: int = 0,
        aux1: int = 0,
        device: int | None = None,
    ) -> None:
        row, text = self.row, self.texts.setdefault(name, len(self.texts))
        device = row.device if device is None else device
        thread = hooks.native_thread(row.thread) if row.thread else 0
        # fmt: off
        self.reported.append((row.time, kind, device, flags, thread, 0, stream, correlation, self.called.id, text,
                           address, size, aux0, aux1))
        # fmt: on

    def take(self) -> npt.NDArray[np.void] | None:
        """Return the records since the last call, None if there are none."""
        if not self.reported:
            return None
        records = np.array(self.reported, RECORD)
        self.reported = []
        return records

    def stream(self, handle: int, name: str = "") -> int:
        """Return the id of the stream that a call names; its device need not be the current one."""
        return self.stream_on(hooks.device_of_stream(handle, self.row.device), handle, name)

    def stream_on(
        self, device: int, handle: int, name: str = "", flags: StreamFlag = BLOCKING, priority: int = 0
    ) -> int:
        """Return the id of a stream of a device."""
        if handle == 0 and name.endswith(PER_THREAD):
            handle = _PER_THREAD_STREAM
        own = self.row.thread << 8 if handle == _PER_THREAD_STREAM else 0
        found = self.stream_of[handle | own | self.row.device << 56] = hooks.stream_id(
            device,
            handle,
            flags=flags,
            priority=priority,
            thread=hooks.native_thread(self.row.thread),
            api=lambda: Api.UNKNOWN,
            report=self._report_stream,
        )
        return found

    def _report_stream(self, fields: dict[str, Any]) -> None:
        self.report(Kind.STREAM_CREATE, **fields)

    def say_unseen(self, call: str) -> None:
        if self.launches is not None and self.launches.is_first(call):
            text = f"{call} is not recorded on a GPU"
            self.report(Kind.WARNING, name=text, flags=WarningFlag.UNSEEN, aux0=WarningCode.CALL_NOT_RECORDED)

    def structure(self, at: int, name: str) -> bytes:
        """Return the structure that an argument of a call pointed at; empty if it was not noted."""
        letter = next(letter for letter in self.calls[plain_name(name)].arguments if letter in DESCRIBED)
        return self.pointed.find(at, DESCRIBED[letter]) or b""
