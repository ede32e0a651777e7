"""What each call of CUPTI's log becomes in a trace.

Calls about memory are read in :mod:`cudatool.collect.cupti_memory`; both report by the same
:class:`~cudatool.collect.cupti_report.Reporter`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import islice
from time import monotonic_ns
from typing import Any

import numpy as np
import numpy.typing as npt

from cudatool.collect import _cupti, _log_rows
from cudatool.collect.copied_boxes import Rows, copied_box, rows_of_box
from cudatool.collect.cupti_calls import (
    KERNEL_ERRORS,
    PER_THREAD,
    LoggedCall,
    Order,
    fill_item,
    plain_name,
    public_name,
    sides,
)
from cudatool.collect.cupti_graphs import GpuGraphs
from cudatool.collect.cupti_log import Tables
from cudatool.collect.cupti_memory import MemoryCalls
from cudatool.collect.cupti_report import BLOCKING, Reporter
from cudatool.collect.cupti_rows import HOW, LEFT_OUT, WORK, Row, What, joined
from cudatool.collect.cupti_work import Enqueued
from cudatool.collect.gpu_launches import Judged, Launches, LaunchRowFlag
from cudatool.trace import hooks
from cudatool.trace.events import (
    RECORD,
    AccessFlag,
    CopyFlag,
    Event,
    EventFlag,
    Kind,
    StreamFlag,
    WarningCode,
    WarningFlag,
)
from cudatool.trace.libraries import Library
from cudatool.trace.physical import reset_text

__all__ = ["CallEvents"]

_MOST_NUMBERS = 1 << 16  # of calls, and of What
_MOST_JUDGED = 1 << 12
_ROOM = 1 << 12  # records, as many as one launch may have
_FEW_TEXTS = 4096
_UNKNOWN = 1 << 56
"""What stands for the handle of a stream that was made before anything was recorded, with CUPTI's number added."""
_streams: dict[tuple[int, int], int] = {}  # device and CUPTI's number of a stream -> handle, never removed
_SHARES = ("cuIpc", "cuMemExport", "cuMemImport", "cuMemPool")
_OF_MEMORY = ("cuMemAlloc", "cuMemFree", "cuMemMap", "cuMemUnmap", "cuArray", "cuMipmappedArray", *_SHARES)


class CallEvents:
    """Turns the calls of the log into events, and passes them on when asked to.

    C makes most records by itself (``_log_rows.translate``); what needs to know or to change the state of streams,
    memory or code goes through a method, which :mod:`cudatool.collect.cupti_calls` names: here or of `memory`.

    Parameters
    ----------
    calls, numbers
        What is logged, by name, and the names by the numbers that rows have.
    tables
        What rows refer to.
    enqueued
        Where calls that enqueue work are noted.
    launches
        What infers the accesses of each launch; None to report none.
    pytorch_is_watched, blocks_are_watched
        As in :class:`~cudatool.collect.cupti.CuptiCollector`.
    source
        The subscriber that is not to be called for what is reported here.
    """

    def __init__(
        self,
        calls: dict[str, LoggedCall],
        numbers: dict[int, str],
        tables: Tables,
        enqueued: Enqueued,
        launches: Launches | None,
        *,
        pytorch_is_watched: Callable[[], bool],
        blocks_are_watched: Callable[[], bool],
        source: Callable[[Event], None],
    ) -> None:
        self._source = source
        self._tables, self._enqueued = tables, enqueued
        self._reporter = Reporter(calls, tables, launches)
        self._report, self._stream = self._reporter.report, self._reporter.stream
        self.pointed = self._reporter.pointed
        self._graphs = GpuGraphs()
        self.memory = MemoryCalls(
            self._reporter,
            self._graphs,
            pytorch_is_watched=pytorch_is_watched,
            blocks_are_watched=blocks_are_watched,
        )
        self._looks_for_errors = launches is not None  # also where launches are left to another source
        # The index in the texts of the tables' paths, and of their kernels, as far as they were needed.
        self._module_texts: list[int] = []
        self._kernel_texts: list[int] = []
        self._names_of_calls: dict[int, str] = {}
        self._readers: dict[int, Callable[[Row, str], None]] = {}
        self._how = np.zeros(_MOST_NUMBERS, HOW)
        self._how["stream"] = self._how["event"] = self._how["flags"] = -1
        self._out: list[npt.NDArray[np.void]] = []  # what goes to the subscribers
        # The records of launches by what they depend on (`_log_rows.translate`): loops launch the same again and again.
        self._judged_before: dict[bytes, bytes] = {}
        self._choose_readers(numbers)
        self._lasting_texts = len(self._reporter.texts)  # that C refers to

    def _choose_readers(self, numbers: dict[int, str]) -> None:
        """Choose by the name of each call who makes its record: C, by a row of :data:`HOW`, or a method."""
        for number, name in numbers.items():
            self._names_of_calls[number] = name
            read = self._reporter.calls[plain_name(name)].read
            if read is not None:
                self._readers[number] = self._report_order if isinstance(read, Order) else self._reader(read)
            self._how[number] = self._translation(name)
        memory = self.memory
        others = {What.USE: memory.use, What.BLOCK: memory.block, What.LAUNCH: self._launch, What.RANGE: self._range}
        others[What.FAILURE] = self._failure
        for number, reader in others.items():
            self._names_of_calls[number], self._readers[number] = "", reader
        self._how[What.BLOCK]["kind"], self._how[What.BLOCK]["stream"] = Kind.BLOCK_ALLOC, 3
        self._how[What.RANGE]["kind"] = Kind.RANGE_PUSH  # or another one, as the row says
        for number, kind in ((What.POOL_ALLOC, Kind.POOL_ALLOC), (What.POOL_FREE, Kind.POOL_FREE)):
            self._names_of_calls[number], self._readers[number] = "", memory.pooled
            self._how[number]["kind"] = kind
            self._how[number]["name"] = self._reporter.texts.setdefault(Library.CUPY, len(self._reporter.texts))
        self._nothing_by_itself = np.zeros(1, HOW)
        self._is_work = (self._how["is_copy"] | self._how["item"] | self._how["is_graph"]) != 0
        self.asks = np.ascontiguousarray(self._how["asks"])
        self.asks[[number for number, name in numbers.items() if plain_name(name) == "cuStreamEndCapture"]] = 1
        self.always_reported = np.zeros(_MOST_NUMBERS, np.uint8)
        self.always_reported[[What.RANGE, What.FAILURE]] = 1
        of_memory = [number for number, name in numbers.items() if name.startswith(_OF_MEMORY)]
        if self.launches is None:
            self.always_reported[[*of_memory, What.USE, What.BLOCK, What.POOL_ALLOC, What.POOL_FREE]] = 1

    def _reader(self, read: str) -> Callable[[Row, str], None]:
        """Return the method that a row of the calls names, here or of :class:`MemoryCalls`."""
        found: Callable[[Row, str], None] = getattr(self, f"_{read}", None) or getattr(self.memory, read)
        return found

    def _translation(self, name: str) -> tuple[int, ...]:
        """Return how C turns a call into a record, as a row of :data:`HOW`."""
        plain = plain_name(name)
        order, per_thread = self._reporter.calls[plain].read, name.endswith(PER_THREAD)
        if isinstance(order, Order):
            return order.kind, order.stream, order.event, order.flags, order.asks, per_thread, 0, 0, 0, 0, 0
        text = self._reporter.texts.setdefault(plain, len(self._reporter.texts))
        is_async = CopyFlag.ASYNC if "Async" in plain else CopyFlag(0)
        if order == "copy" and "to" in plain and is_async:
            return Kind.MEMCPY, 3, -1, -1, 0, per_thread, 1, 0, 0, is_async | sides(plain), text
        if order == "fill" and is_async:
            flags = is_async | CopyFlag.DESTINATION_DEVICE
            return Kind.MEMSET, 3, -1, -1, 0, per_thread, 0, fill_item(plain), 0, flags, text
        if order == "graph_launch" and self.launches is None:
            return Kind.GRAPH_LAUNCH, 1, -1, -1, 0, per_thread, 0, 0, 1, 0, text
        return 0, -1, -1, -1, 0, 0, 0, 0, 0, 0, 0

    @property
    def launches(self) -> Launches | None:
        """What infers the accesses of each launch, None if there are none to be reported."""
        return self._reporter.launches

    def leave_out_accesses(self) -> None:
        """Report no accesses of launches from now on: another source does."""
        self._reporter.launches = None

    def read(self, calls: npt.NDArray[np.void]) -> None:
        """Report calls: most in C, others through their reader, which may change what is known of streams."""
        self._reporter.stream_of.clear()
        ids, _, modules = self._tables.columns()
        module_names = self._texts_of(self._tables.paths, self._module_texts)[modules]
        works, launched, ranges = _log_rows.count(calls, self._is_work)
        kernel_names = np.empty(0, np.uint32)
        if self.launches is None and launched:
            kernel_names = self._texts_of(self._tables.names[len(WORK) :], self._kernel_texts)
        points, pointed_at = self._pointing(calls, launched, ranges)
        numbers = hooks.new_correlations(works)
        correlations = np.arange(numbers.start, numbers.stop, dtype=np.uint32)
        enqueued = np.empty((works, 3), np.uint32)
        records, filled, at = np.empty(0, RECORD), 0, 0
        while at < len(calls):
            waiting = len(self._reporter.reported)  # records that come before those that C makes now
            if len(records) - filled - waiting < _ROOM:  # that of one launch
                if filled:
                    self._out.append(records[:filled])
                records, filled = np.empty(len(calls) - at + waiting + _ROOM, RECORD), 0
            next_ = points.searchsorted(at)
            begins, pointed = self.pointed.part(int(pointed_at[next_])) if next_ < len(points) else (0, b"")
            how, kernels = self._how, kernel_names
            if self._graphs.captures:  # nothing is C's: what is captured does not run
                how, kernels = self._nothing_by_itself, kernel_names[:0]
            # fmt: off
            at, made, works, is_pythons, key = _log_rows.translate(
                calls, at, how, ids, module_names, kernels, correlations, begins, pointed, self._reporter.texts,
                self._reporter.stream_of, hooks.event_ids(), hooks.native_threads(), self.memory.of_graphs,
                self._judged_launches(), records[filled + waiting :], enqueued,
            )
            # fmt: on
            if made:
                if (earlier := self._reporter.take()) is not None:
                    records[filled : filled + waiting] = earlier
                filled += waiting + made
                if works:
                    self._enqueued.add_all(enqueued[:works])
                correlations, enqueued = correlations[works:], enqueued[works:]
            if is_pythons:
                self._read_row(calls[at], key)
                at += 1
        if filled:
            self._out.append(records[:filled])
        self._reporter.called = self._tables.stacks[0]

    def _pointing(
        self, calls: npt.NDArray[np.void], launched: int, ranges: int
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint64]]:
        """Return the numbers of the rows that point to bytes that are needed, and to which; given how many may."""
        if not ranges and (not launched or self.launches is None):
            return np.empty(0, np.int64), np.empty(0, np.uint64)
        is_launch, is_range = calls["what"] == What.LAUNCH, calls["what"] == What.RANGE
        points = np.flatnonzero(is_range if self.launches is None else is_range | is_launch)
        return points, np.where(is_launch[points], calls["words"][points, 5], calls["words"][points, 1])

    def _read_row(self, call: Any, key: bytes | None) -> None:
        """Report a call through its reader; `key` is that of a launch whose records are to be kept."""
        first_reported = len(self._reporter.reported)
        *head, words = call.tolist()
        row = self._reporter.row = Row._make((*head, tuple(words.tolist())))
        self._reporter.called = self._tables.stacks[row.stack]
        self._readers[row.what](row, self._names_of_calls[row.what])
        if key is not None:
            self._keep_launch(key, self._reporter.reported[first_reported:])

    def _texts_of(self, names: Sequence[str], known: list[int]) -> npt.NDArray[np.uint32]:
        """Return the index in the texts of each name, of which the first are `known`, and note the others there."""
        for name in names[len(known) :]:
            known.append(self._reporter.texts.setdefault(name, len(self._reporter.texts)))
        return np.array(known, np.uint32)

    def _judged_launches(self) -> tuple[Any, ...] | None:
        """Return what C needs to repeat the records of launches, None where each is to be looked at."""
        if self.launches is None or self._graphs.captures:
            return None
        blocks = self.launches.blocks
        kinds = blocks, self.memory.device, self.memory.host
        memory = tuple(part for kind in kinds for part in (kind.starts, kind.sizes))
        return memory, blocks.add, blocks.remove, self.launches.code.plans, self._judged_before

    def _keep_launch(self, key: bytes, reported: list[tuple[int, ...]]) -> None:
        """Keep the records of a launch; those with a warning are not the same the next time."""
        kinds = [Kind(one[1]) for one in reported]
        if kinds[:1] == [Kind.KERNEL_LAUNCH] and {*kinds[1:]} <= {Kind.ACCESS} and len(kinds) <= _ROOM:
            if len(self._judged_before) >= _MOST_JUDGED:
                self._judged_before.clear()
            self._judged_before[key] = np.array(reported, RECORD).tobytes()

    def warn_of_lost(self, rows: int) -> None:
        """Report that rows of the log are missing."""
        text = f"{rows:,} records of CUPTI were lost: there was no memory for them"
        self._reporter.row = self._reporter.row._replace(time=monotonic_ns(), thread=0)
        self._report(Kind.WARNING, name=text, flags=WarningFlag.LOST, aux0=WarningCode.CUPTI_RECORDS_LOST)

    def pass_on(self) -> None:
        """Pass on the reported records."""
        self._send()
        if self._out:
            out, self._out = self._out, []
            texts = list(self._reporter.texts)
            for rows in joined(out):
                hooks.forward_rows(rows, texts, source=self._source)
            if len(self._reporter.texts) > _FEW_TEXTS:  # numbered ranges
                self._reporter.texts = dict(islice(self._reporter.texts.items(), self._lasting_texts))
                self._module_texts, self._kernel_texts = [], []
                self._judged_before.clear()

    def _send(self) -> None:
        """Append the reported records to those that will be passed on."""
        if (records := self._reporter.take()) is not None:
            self._out.append(records)

    def _range(self, row: Row, name: str) -> None:
        """A range or mark that a library gives to NVTX."""
        kind, offset, length, number, *_ = row.words
        text = (self.pointed.find(offset, length) or b"").decode("utf-8", "replace")
        self._reporter.row = row._replace(device=-1)
        self._report(Kind(kind), name=text, aux0=number)

    # ---- what orders work ----

    def _report_order(self, row: Row, name: str) -> None:
        order = self._reporter.calls[plain_name(name)].read
        assert isinstance(order, Order)
        handle = row.words[order.event] if order.event >= 0 else 0
        stream = self._stream(row.words[order.stream], name) if order.stream >= 0 else 0
        is_external = order.flags >= 0 and row.words[order.flags] & 1
        if order.kind == Kind.STREAM_WAIT_EVENT and not is_external:
            self._graphs.event_waited(stream, handle)
        elif order.kind == Kind.EVENT_RECORD and not is_external:
            self._graphs.event_recorded(stream, handle)
        self._report(
            order.kind,
            stream=stream,
            aux0=hooks.event_id(handle) if order.event >= 0 else 0,
            aux1=int(order.asks and row.result == 0),
            flags=EventFlag.EXTERNAL if is_external else EventFlag(0),
        )

    # ---- streams ----

    def add_context(self, device: int, number: int) -> None:
        """Note CUPTI's number of the default stream of a context."""
        _streams[device, number] = 0

    def _stream_create(self, row: Row, name: str) -> None:
        self._stream_created(row, *row.words[1:3])

    def _green_stream_create(self, row: Row, name: str) -> None:
        self._stream_created(row, *row.words[2:4])

    def _stream_created(self, row: Row, flags: int, priority: int) -> None:
        _streams[row.device, row.words[7]] = row.words[0]
        priority = priority - (1 << 32) if priority >> 31 else priority
        how = StreamFlag.NON_BLOCKING if flags & 1 else StreamFlag(0)
        self._reporter.stream_on(row.device, row.words[0], "", how, priority)

    def _stream_destroy(self, row: Row, name: str) -> None:
        self._reporter.stream_of.clear()
        handle = row.words[0]
        if stream := hooks.close_stream(hooks.device_of_stream(handle, row.device), handle):
            self._report(Kind.STREAM_DESTROY, stream=stream)

    def _event_create(self, row: Row, name: str) -> None:
        handle, flags, *_ = row.words
        timed, shared = not flags & 2, flags & 4
        bits = int(timed) | (2 if shared else 0)
        self._report(Kind.EVENT_CREATE, aux0=hooks.event_id(handle), address=handle, flags=bits)

    def _event_destroy(self, row: Row, name: str) -> None:
        self._graphs.event_destroyed(row.words[0])
        if event := hooks.close_event(row.words[0]):
            self._report(Kind.EVENT_DESTROY, aux0=event)

    def _reset(self, row: Row, name: str) -> None:
        self._report(Kind.WARNING, name=reset_text(row.words[0]), aux0=WarningCode.DEVICE_RESET)

    # ---- graphs ----

    def _capture_begin(self, row: Row, name: str) -> None:
        self._capture_begun(row, name, adds=False)

    def _capture_to_graph(self, row: Row, name: str) -> None:
        self._capture_begun(row, name, adds=True)

    def _capture_begun(self, row: Row, name: str, *, adds: bool) -> None:
        stream = self._stream(row.words[0], name)
        self._graphs.begin(stream, adds=adds)
        self._report(Kind.GRAPH_CAPTURE_BEGIN, stream=stream)

    def _capture_end(self, row: Row, name: str) -> None:
        stream = self._stream(row.words[0], name)
        graph = self._graphs.end(stream, 0 if row.result else row.words[1])
        self._report(Kind.GRAPH_CAPTURE_END, stream=stream, aux0=graph)

    def _graph_created(self, row: Row, name: str) -> None:
        self._graphs.changed(row.words[0])

    def _graph_cloned(self, row: Row, name: str) -> None:
        self._graphs.cloned(*row.words[:2])

    def _graph_changed(self, row: Row, name: str) -> None:
        self._graphs.changed(row.words[0])

    def _node_added(self, row: Row, name: str) -> None:
        self._graphs.changed(row.words[1])

    def _node_changed(self, row: Row, name: str) -> None:
        self._graphs.changed(None)

    def _graph_instantiated(self, row: Row, name: str) -> None:
        executable, graph = self._graphs.instantiated(*row.words[:2])
        self._report(Kind.GRAPH_INSTANTIATE, aux0=executable, aux1=graph)

    def _executable_updated(self, row: Row, name: str) -> None:
        executable, graph = self._graphs.updated(*row.words[:2])
        self._report(Kind.GRAPH_UPDATE, aux0=executable, aux1=graph)

    def _executable_changed(self, row: Row, name: str) -> None:
        executable, graph = self._graphs.updated(row.words[0], None)
        self._report(Kind.GRAPH_UPDATE, aux0=executable, aux1=graph)

    def _graph_launch(self, row: Row, name: str) -> None:
        if (work := self._work(row, row.words[1], name)) is not None:
            executable = self._graphs.executable(row.words[0])
            self._report(Kind.GRAPH_LAUNCH, stream=work[0], correlation=work[1], aux0=executable, name=plain_name(name))

    # ---- work ----

    def _copy(self, row: Row, name: str) -> None:
        target, source, size, stream, *_ = row.words
        flags = sides(plain_name(name))
        if "to" not in name:
            flags |= CopyFlag.SOURCE_DEVICE if self.memory.device.find(source) else CopyFlag(0)
            flags |= CopyFlag.DESTINATION_DEVICE if self.memory.device.find(target) else CopyFlag(0)
        self._copied(row, name, target, source, size, stream, flags)

    def _copy_peer(self, row: Row, name: str) -> None:
        target, _, source, _, size, stream, *_ = row.words
        self._copied(row, name, target, source, size, stream, sides("DtoD"))

    def _copied(
        self, row: Row, name: str, target: int, source: int, size: int, stream: int, flags: CopyFlag
    ) -> tuple[int, int] | None:
        """Report a copy. Returns the id of its stream, and its correlation; None if it is not reported."""
        plain = plain_name(name)
        is_async = "Async" in plain
        work = self._work(row, stream if is_async else 0, name)
        if work is None:
            return None
        flags |= CopyFlag.ASYNC if is_async else CopyFlag(0)
        what: dict[str, Any] = {"stream": work[0], "correlation": work[1], "flags": flags, "name": plain}
        self._report(Kind.MEMCPY, address=target, size=size, aux0=source, **what)
        return work

    def _copy_box(self, row: Row, name: str) -> None:
        """A copy of rows: what it touches is in records of its own."""
        at, stream, *_ = row.words
        found = copied_box(self._reporter.structure(at, name))
        if found is None or not found[2]:
            return
        *sides_, size = found
        (read, reads), (written, writes) = (self.memory.touched(side) for side in sides_)
        flags = CopyFlag.SOURCE_DEVICE if self.memory.is_on_device(sides_[0]) else CopyFlag(0)
        flags |= CopyFlag.DESTINATION_DEVICE if self.memory.is_on_device(sides_[1]) else CopyFlag(0)
        first_read, first_written = (rows[0].address if rows else 0 for rows in (read, written))
        work = self._copied(row, name, first_written, first_read, size, stream, flags)
        if work is not None:
            self._report_rows(work, read, reads | AccessFlag.READ, "source")
            self._report_rows(work, written, writes | AccessFlag.WRITE, "destination")

    def _fill(self, row: Row, name: str) -> None:
        target, value, count, stream, *_ = row.words
        self._filled(row, name, target, value, count * fill_item(plain_name(name)), stream)

    def _fill_rows(self, row: Row, name: str) -> None:
        target, pitch, value, width, height, stream, *_ = row.words
        rows = rows_of_box(target, (width * fill_item(plain_name(name)), height, 1), pitch, 0)
        if rows and (work := self._filled(row, name, target, value, rows[0].size * max(rows[0].number, 1), stream)):
            self._report_rows(work, rows, AccessFlag.WRITE, "destination")

    def _filled(self, row: Row, name: str, target: int, value: int, size: int, stream: int) -> tuple[int, int] | None:
        """Report a fill. Returns what :meth:`_copied` does."""
        plain = plain_name(name)
        is_async = "Async" in plain
        work = self._work(row, stream if is_async else 0, name)
        if work is not None:
            flags = CopyFlag.DESTINATION_DEVICE | (CopyFlag.ASYNC if is_async else CopyFlag(0))
            what: dict[str, Any] = {"stream": work[0], "correlation": work[1], "flags": flags, "name": plain}
            self._report(Kind.MEMSET, address=target, size=size, aux0=value, aux1=fill_item(plain), **what)
        return work

    def _report_rows(self, work: tuple[int, int], rows: Sequence[Rows], flags: AccessFlag, name: str) -> None:
        if self.launches is None:
            return
        for address, size, stride, number in rows:
            what: dict[str, Any] = {"stream": work[0], "correlation": work[1], "flags": flags, "name": name}
            self._report(Kind.ACCESS, address=address, size=size, aux0=stride, aux1=number, **what)

    # ---- launches, and the code that they run ----

    def _code(self, row: Row, name: str) -> None:
        module, what, digest, offset, *_ = row.words
        if self.launches is not None:
            kind, length = what & 0xFF, what >> 8
            self.launches.code.loaded(module, kind, digest, self.pointed.find(offset, length))

    def _code_file(self, row: Row, name: str) -> None:
        if self.launches is not None:
            self.launches.code.loaded_from(row.words[0], self._tables.native_names[row.words[1]], _cupti.digest)

    def _function(self, row: Row, name: str) -> None:
        if self.launches is not None:
            self.launches.code.found(row.words[0], row.words[1], self._tables.native_names[row.words[2]])

    def _same_code(self, row: Row, name: str) -> None:
        if self.launches is not None:
            self.launches.code.same(row.words[0], row.words[1])

    def _code_unloaded(self, row: Row, name: str) -> None:
        if self.launches is not None:
            self.launches.code.unloaded(row.words[0])

    def _unseen(self, row: Row, name: str) -> None:
        """A call that moves or orders data in ways that no event describes."""
        self._reporter.say_unseen(public_name(name))
        self._how[row.what]["kind"] = LEFT_OUT  # that is said once

    def _failure(self, row: Row, name: str) -> None:
        """The first call that says that a kernel failed."""
        error = KERNEL_ERRORS[row.words[0]]
        text = f"work after {error}"
        self._report(Kind.WARNING, name=text, flags=WarningFlag.UNSEEN, aux0=WarningCode.WORK_AFTER_ERROR)
        if self._looks_for_errors:
            call = public_name(self._names_of_calls[row.words[1]])
            said = {"check": "memcheck", "kind": "kernel-error", "text": f"{call} returned {error}"}
            self._report(Kind.FINDING, name=json.dumps(said), aux0=1)

    def _launch(self, row: Row, name: str) -> None:
        _, stream, grid, block, shared, _, _, number = row.words
        per_thread = PER_THREAD[0] if shared >> 32 & LaunchRowFlag.PER_THREAD else ""
        # Also in streams whose capture another source reports, PyTorch's.
        is_captured = bool(shared >> 32 & LaunchRowFlag.CAPTURED)
        work = self._work(row, stream, per_thread, is_captured=is_captured)
        if work is None:
            return
        found = self._judged(row)
        id_, correlation = work
        what: dict[str, Any] = {"aux0": grid, "aux1": block, "size": shared & 0xFFFFFFFF, "flags": found.flags}
        kernel = self._tables.kernel(number)
        self._report(Kind.KERNEL_LAUNCH, stream=id_, correlation=correlation, name=kernel, **what)
        self._warn_of_accesses(kernel, found.doubts)
        self._reporter.called = self._tables.stacks[0]  # an access has the stack of its launch
        for address, size, flags in found.accesses:
            self._report(Kind.ACCESS, stream=id_, correlation=correlation, address=address, size=size, flags=flags)

    def _warn_of_accesses(self, kernel: str, doubts: str) -> None:
        plain = kernel.partition("<")[0]
        if doubts and self.launches is not None and self.launches.is_first(plain + doubts):
            text = f"{plain} may access more than its arguments say: {doubts}"
            self._report(Kind.WARNING, name=text, flags=WarningFlag.UNSEEN, aux0=WarningCode.ACCESSES_NOT_KNOWN)

    def _judged(self, row: Row) -> Judged:
        function, _, _, _, shared, offset, length, number = row.words
        if self.launches is None:
            return Judged.of(shared >> 32)
        memory = self.memory.device, self.memory.host
        return self.launches.judge(
            function, self._tables.native_names[number], shared >> 32, self.pointed.find(offset, length), memory
        )

    def _work(self, row: Row, stream: int, name: str, *, is_captured: bool = False) -> tuple[int, int] | None:
        """Return the stream's id and a correlation for what the call enqueues.

        What is captured becomes a node, and does not run: None where nothing is inferred of nodes.
        """
        id_ = self._stream(stream, name)
        is_captured = is_captured or self._graphs.is_captured(id_)
        if is_captured and self.launches is None:
            return None
        correlation = hooks.new_correlation()
        if not is_captured:
            self._enqueued.add(row.correlation, correlation, id_)
        return id_, correlation

    def streams_of(self, numbers: list[int]) -> list[int]:
        """Return the ids of streams by the numbers that CUPTI gives them, with the device in the upper half."""
        ids = []
        for device, number in ((number >> 32, number & 0xFFFFFFFF) for number in numbers):
            self._reporter.row = self._reporter.row._replace(device=device, time=monotonic_ns(), thread=0)
            handle = _streams.get((device, number))
            flags = StreamFlag.NON_BLOCKING if handle is None else BLOCKING  # do not invent an order
            own = _UNKNOWN + number if handle is None else handle
            ids.append(self._reporter.stream_on(device, own, "", flags))
        self.pass_on()
        return ids
