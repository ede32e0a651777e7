"""Traces for https://ui.perfetto.dev and ``chrome://tracing``, in Chrome's JSON trace format.

::

    trace's process   a thread for each thread of the program: what it enqueued and waited for, its ranges and marks
    Device N          counters "Memory" (allocated, active, reserved bytes), failed allocations,
                      a span for each block from allocation to free, named by its call site,
                      and a thread for each stream: what ran on it

An arrow leads from a call to what the device executed for it. A recording knows when a call was made, not how long it
took: calls are drawn 1 us long, or up to the thread's next event.

Times are microseconds since ``baseTimeNanoseconds``, a moment of the Unix clock. It is the one that the profiler of
PyTorch takes (Kineto's ChromeTraceBaseTime: a multiple of 7,889,238 s), so that both files can be laid over each
other as they are. PyTorch's snapshots have Unix times, and cudatool's traces say when their clock showed what. Where a
recording has no such clock (RMM's logs), times count from its first event.

The device has a clock of its own. Where an operation would begin before the call that enqueued it, all that ran on the
device is moved by one constant, the smallest with which nothing does. Traces without times (old snapshots) have an
event every microsecond.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from cudatool.errors import OutputError
from cudatool.export.ascii import Letters, decimals, fractions, hexadecimals, texts
from cudatool.export.pieces import pieces, rows
from cudatool.files import replacing
from cudatool.limits import PERFETTO_BYTES, PERFETTO_EVENT, PERFETTO_STACKS
from cudatool.progress import step
from cudatool.trace.captured import as_called
from cudatool.trace.distinct import distinct
from cudatool.trace.events import FAILED_REQUESTS, FREE_UNKNOWN, WORK, CopyFlag, Kind, unpack_dims, unpack_product
from cudatool.trace.frames import call_sites
from cudatool.trace.lifetimes import Ints, blocks, segments, timeline
from cudatool.trace.model import Frame, Trace, is_of_kind
from cudatool.trace.streams import stream_names, thread_names

__all__ = ["write"]

_CALLS: Final = (
    *WORK,
    *(Kind.STREAM_WAIT_EVENT, Kind.STREAM_SYNCHRONIZE, Kind.EVENT_RECORD, Kind.EVENT_SYNCHRONIZE),
    *(Kind.DEVICE_SYNCHRONIZE, Kind.MODULE_LOAD),
)
_COLUMNS: Final = ("kind", "device", "flags", "thread", "stream", "name", "address", "size", "aux0", "aux1", "stack")
_HOST: Final = 1
_DEVICE: Final = 1000  # a device's process is this and its number
_CALL_LENGTH: Final = 1000  # ns
_LATEST: Final = np.uint64((1 << 62) - 1)  # the year 2116: no difference of two times overflows, whatever a file says
_BASE_PERIOD: Final = 7_889_238 * 10**9  # ns, some three months
_LANES: Final = 64
_BATCH: Final = 4096  # events for each write to the file, unless they are
_LARGE: Final = 1 << 18  # bytes together; a larger piece of memory comes from the system, page by page, each time
_FRAME: Final = 256  # bytes that a frame of a stack may become


def write(path: str | Path, trace: Trace) -> int | None:
    """Write a trace as Chrome's JSON, which Perfetto reads.

    Every block has its call site and its stack; where the stacks would make a file that Perfetto cannot open, only
    their innermost frames. Return how many, None if there are all.

    Parameters
    ----------
    path
        Written whole or not at all; replaced if it exists.
    trace
        Any trace.

    Raises
    ------
    OutputError
        The file cannot be written, or would be huge.
    """
    with replacing(path) as name, open(name, "wb") as file, step(f"writing {path}"):
        writer = _Writer(trace, f"writing {path}")
        base = f'"baseTimeNanoseconds":{writer.base},' if writer.base is not None else ""
        file.write(f'{{"displayTimeUnit":"ns",{base}"traceEvents":[\n'.encode())
        separator = b""
        for batch in _batches(writer.events(), PERFETTO_BYTES + PERFETTO_EVENT * len(trace.records)):
            file.write(separator)
            file.write(b",\n".join(batch))
            separator = b",\n"
        file.write(b"\n]}\n")
    return writer.frames


def _batches(events: Iterator[bytes], room: int) -> Iterator[list[bytes]]:
    """Yield the events, several at a time; refuse what its names and stacks make larger than `room`."""
    batch: list[bytes] = []
    size = 0
    for event in events:
        batch.append(event)
        size += len(event)
        if len(batch) == _BATCH or size > _LARGE:
            room -= size
            if room < 0:
                raise _too_large()
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _too_large() -> OutputError:
    return OutputError("the names and stacks of this trace are too long to be written with each event")


class _Writer:
    """One trace on its way into JSON; each event is a piece of text. `what` is shown while it is made."""

    def __init__(self, trace: Trace, what: str) -> None:
        self.trace, self.what = trace, what
        self.records = trace.records
        time = np.clip(self.records["time"].astype(np.int64), -int(_LATEST), int(_LATEST))
        if trace.header.get("time_axis") == "index":
            time = np.arange(len(time), dtype=np.int64) * 1000
        self.origin = int(time.min()) if len(time) else 0
        self.base = None
        ahead = _unix_clock(trace)
        if ahead is not None and 0 <= self.origin + ahead < int(_LATEST):
            self.base = (self.origin + ahead) // _BASE_PERIOD * _BASE_PERIOD
            self.origin = self.base - ahead
        self.time: npt.NDArray[np.int64] = time - self.origin
        self.text = [json.dumps(name) for name in trace.names]
        self.streams, self.threads = stream_names(trace), thread_names(trace)
        self.blocks = blocks(trace)
        self.lanes: dict[tuple[int, str], int] = {}  # (process, name) -> number of the thread
        self.frames: int | None = None  # innermost ones that the stack of a block has, if not all

    def events(self) -> Iterator[bytes]:
        yield from self._memory()
        yield from self._blocks()
        for some in (self._failures, self._ranges, self._marks, self._calls, self._executions, self._names):
            for event in some():
                yield event.encode("ascii")

    def _lane(self, process: int, name: str) -> int:
        return self.lanes.setdefault((process, name), len(self.lanes) + 1)

    def _thread(self, index: int) -> int:
        return self._lane(_HOST, self.threads[index])

    def _memory(self) -> Iterator[bytes]:
        """Yield the counters: all three at each event that changed one."""
        reserved = segments(self.trace)
        for device in distinct(self.blocks.device, reserved.device).tolist():
            curve = timeline(self.trace, self.blocks.of_device(device), reserved.of_device(device))
            begin = f'{{"ph":"C","name":"Memory","pid":{_DEVICE + device},"ts":'.encode()
            for own in pieces(len(curve.index), f"{self.what}: counters"):
                levels: list[bytes | Letters] = [b',"args":{"allocated":', decimals(curve.allocated[own])]
                levels += [b',"active":', decimals(curve.active[own])]
                if curve.knows_reserved:
                    levels += [b',"reserved":', decimals(curve.reserved[own])]
                times = self.time[curve.index[own]]
                yield from texts(len(times), begin, *_us(times), *levels, b"}}")

    def _blocks(self) -> Iterator[bytes]:
        """Yield a span for each block, from its allocation to the request to free it, or to the trace's end."""
        blocks = self.blocks
        begins, ends = self._ends_of_spans()
        last = int(self.time.max(initial=0))
        for piece in pieces(len(blocks), f"{self.what}: allocations"):
            own = blocks[piece]
            count = len(own)
            began = self.time[own.start]
            freed = np.maximum(self.time.take(own.freed, mode="clip"), began)
            ended = np.where(own.freed < len(self.time), freed, last)
            number = decimals(np.arange(piece.start, piece.stop) + 1)
            place: list[bytes | Letters] = [
                b'"cat":"allocation","id":',
                number,
                b',"pid":',
                decimals(own.device + _DEVICE),
                b',"tid":0,"ts":',
            ]
            args: list[bytes | Letters] = [
                b',"args":{"address":',
                hexadecimals(own.address.view(np.uint64)),
                b',"bytes":',
                decimals(own.size),
            ]
            args += [b',"requested":', decimals(own.requested), b',"stream":', decimals(own.stream)]
            args += [b',"pool":', decimals(own.pool.view(np.uint64))]
            begin = texts(count, b'{"ph":"b",', *place, *_us(began), *args)
            of_pools = zip(self._torch_says(own.start), own.library.tolist(), strict=True)
            says = [f'{said},"library":{self.text[i]}'.encode() if i else said.encode() for said, i in of_pools]
            end = texts(count, b'{"ph":"e",', *place, *_us(ended))
            stacks = own.stack.tolist()
            for i, stack in enumerate(stacks):
                yield b"".join((begin[i], says[i], begins[stack], end[i], ends[stack]))

    def _ends_of_spans(self) -> tuple[dict[int, bytes], dict[int, bytes]]:
        """Return what stands after the numbers at the begin and at the end of a block, by its stack."""
        stacks, blocks = np.unique(self.blocks.stack, return_counts=True)
        used = stacks.tolist()
        frames = [self.trace.stack(stack) for stack in used]
        self.frames = _frames_that_fit(frames, blocks.tolist())
        room = PERFETTO_BYTES + _FRAME * sum(map(len, frames))
        begins, ends = {}, {}
        for stack, label in zip(used, call_sites(frames), strict=True):
            members = json.dumps(self._stack(stack, self.frames))[1:-1]
            ends[stack] = f',"name":{json.dumps(label)}}}'.encode()
            begins[stack] = (members and f",{members}").encode() + b"}" + ends[stack] + b",\n"
            room -= len(members)
            if room < 0:
                raise _too_large()
        return begins, ends

    def _failures(self) -> Iterator[str]:
        for i in np.flatnonzero(is_of_kind(self.records, *FAILED_REQUESTS)).tolist():
            record = self.records[i]
            args: dict[str, Any] = {"size": int(record["size"])}
            if not record["flags"] & FREE_UNKNOWN:
                args["device_free"] = int(record["aux0"])
            args |= self._stack(int(record["stack"]))
            yield (
                f'{{"ph":"i","s":"p","name":"out of memory","cat":"memory","pid":{_DEVICE + int(record["device"])},'
                f'"tid":{self._stream(int(record["device"]), int(record["stream"]))},"ts":{int(self.time[i]) / 1000},'
                f'"args":{json.dumps(args)[:-1]}{self._torch_says(np.array([i]))[0]}}}}}'
            )

    def _stack(self, stack: int, most: int | None = None) -> dict[str, Any]:
        """Return the members of ``args`` that say where a call came from, with so many frames at most."""
        frames = self.trace.stack(stack)
        left_out = {} if most is None or len(frames) <= most else {"frames_left_out": len(frames) - most}
        frames = frames[:most]
        if sum(len(f.function) + len(f.file) for f in frames) > PERFETTO_BYTES:
            raise _too_large()
        node = next((node for i in self.trace.stacks[stack] if (node := self.trace.fx_node(i))), "")
        fx_node = {"fx_node": node} if node else {}
        return {"stack": [_said(frame) for frame in frames], **left_out, **fx_node} if frames else {}

    def _torch_says(self, index: Ints) -> list[str]:
        """Return members of ``args``: what a PyTorch snapshot says of some allocations, under its own names."""
        ids, number = self.trace.compile_contexts(index)
        contexts = ["", *(f',"compile_context":{json.dumps(id)}' for id in ids)]
        said = [contexts[i] for i in number.tolist()] if ids else [""] * len(index)
        if self.trace.header.get("format") == "pytorch-snapshot" and (names := self.records["name"][index]).any():
            said = [
                f'{text},"user_metadata":{self.text[name]}' if name else text
                for text, name in zip(said, names.tolist(), strict=True)
            ]
        return said

    def _ranges(self) -> Iterator[str]:
        """Yield begin and end of each range. One never closed ends with the trace, one never begun is left out."""
        index = np.flatnonzero(np.isin(self.records["kind"], (Kind.RANGE_PUSH, Kind.RANGE_POP)))
        depth: dict[tuple[int, int], int] = {}
        for time, kind, device, thread, name in self._rows("ranges", index, "kind", "device", "thread", "name"):
            # PyTorch's profiler says of which device it speaks; our own ranges are the host's.
            process = _HOST if device < 0 else _DEVICE + device
            lane = process, self._thread(thread) if device < 0 else self._lane(process, "ranges")
            if kind == Kind.RANGE_PUSH:
                depth[lane] = depth.get(lane, 0) + 1
                yield (
                    f'{{"ph":"B","name":{self.text[name]},"cat":"range","pid":{lane[0]},"tid":{lane[1]},'
                    f'"ts":{time / 1000}}}'
                )
            elif depth.get(lane, 0):
                depth[lane] -= 1
                yield f'{{"ph":"E","pid":{lane[0]},"tid":{lane[1]},"ts":{time / 1000}}}'
        end = int(self.time.max(initial=0)) / 1000
        for (process, thread), count in depth.items():
            for _ in range(count):
                yield f'{{"ph":"E","pid":{process},"tid":{thread},"ts":{end}}}'

    def _marks(self) -> Iterator[str]:
        """Yield marks, and ranges that are inside of no others, of which each gets a lane.

        One never closed ends with the trace, one never begun is left out.
        """
        kinds = (Kind.MARK, Kind.RANGE_START, Kind.RANGE_END)
        index = np.flatnonzero(np.isin(self.records["kind"], kinds))
        running: dict[int, str] = {}  # how the end of each begins
        for time, kind, thread, name, number in self._rows("marks", index, "kind", "thread", "name", "aux0"):
            where = f'"pid":{_HOST},"tid":{self._thread(thread)},"ts":{time / 1000}'
            if kind == Kind.MARK:
                yield f'{{"ph":"i","s":"t","name":{self.text[name]},"cat":"range",{where}}}'
            elif kind == Kind.RANGE_START:
                event = f'"name":{self.text[name]},"cat":"range","id":{number}'
                yield f'{{"ph":"b",{event},{where}}}'
                running[number] = event
            elif number in running:
                yield f'{{"ph":"e",{running.pop(number)},{where}}}'
        end = int(self.time.max(initial=0)) / 1000
        for event in running.values():
            yield f'{{"ph":"e",{event},"pid":{_HOST},"tid":0,"ts":{end}}}'

    def _calls(self) -> Iterator[str]:
        index = np.flatnonzero(np.isin(self.records["kind"], _CALLS))
        lengths = iter(self._lengths()[index])
        for time, *fields in self._rows("calls", index, *_COLUMNS):
            kind, _, _, thread, _, name, *_ = fields
            length = int(next(lengths))
            yield (
                f'{{"ph":"X","name":{self.text[name] if name else _title(kind)},"cat":"call","pid":{_HOST},'
                f'"tid":{self._thread(thread)},"ts":{time / 1000},"dur":{length / 1000},'
                f'"args":{{{_arguments(*fields)}}}}}'
            )

    def _lengths(self) -> npt.NDArray[np.int64]:
        """Return how long (ns) each event is drawn: not into the next one of its thread."""
        length = np.full(len(self.records), _CALL_LENGTH, np.int64)
        for thread in distinct(self.records["thread"]).tolist():
            own = np.flatnonzero(self.records["thread"] == thread)
            length[own[:-1]] = np.clip(np.diff(self.time[own]), 0, _CALL_LENGTH)
        return length

    def _executions(self) -> Iterator[str]:
        """Yield what ran on the device, each with an arrow from its call."""
        ran = as_called(self.trace.of_kind(Kind.EXECUTION), self.records)
        ran = ran[np.argsort(ran["aux0"], kind="stable")]
        works = np.flatnonzero(np.isin(self.records["kind"], WORK) & (self.records["correlation"] > 0))
        call = _matching(ran["correlation"], self.records["correlation"][works], works)
        start, end = self._on_host_clock(ran, call)
        busy: dict[tuple[int, int], list[int]] = {}  # until when the lanes of a stream are
        for flow, (at, begin, stop, device, stream, name) in enumerate(self._ran(ran, call, start, end), 1):
            lane = _free_lane(busy.setdefault((device, stream), []), begin, stop)
            place = f'"pid":{_DEVICE + device},"tid":{self._stream(device, stream, lane)},"ts":{begin / 1000}'
            arguments = ""
            if at >= 0:
                fields = [int(self.records[at][column]) for column in _COLUMNS]
                kind, thread = fields[0], fields[3]
                # What a graph's launch ran has names of its own, and the call those of the program's otherwise.
                name = name or fields[5] if kind == Kind.GRAPH_LAUNCH else fields[5] or name
                title = self.text[name] if name else _title(kind)
                arguments = _arguments(*fields)
                arrow = f'"name":"enqueued","cat":"enqueued","id":{flow}'
                yield (
                    f'{{"ph":"s",{arrow},"pid":{_HOST},"tid":{self._thread(thread)},"ts":{int(self.time[at]) / 1000}}}'
                )
                yield f'{{"ph":"f","bp":"e",{arrow},{place}}}'
            else:
                title = self.text[name] if name else '"operation"'
            yield (
                f'{{"ph":"X","name":{title},"cat":"execution",{place},"dur":{(stop - begin) / 1000},'
                f'"args":{{{arguments}}}}}'
            )

    def _ran(self, ran: npt.NDArray[np.void], *columns: Ints) -> Iterator[tuple[Any, ...]]:
        for piece in pieces(len(ran), f"{self.what}: operations"):
            fields = (ran[name][piece] for name in ("device", "stream", "name"))
            yield from rows(*(column[piece] for column in columns), *fields)

    def _rows(self, what: str, index: Ints, *names: str) -> Iterator[tuple[Any, ...]]:
        """Yield the time and fields of records."""
        for piece in pieces(len(index), f"{self.what}: {what}"):
            own = index[piece]
            yield from rows(self.time[own], *(self.records[name][own] for name in names))

    def _on_host_clock(
        self, ran: npt.NDArray[np.void], call: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return starts and ends, moved so that nothing starts before its call."""
        start = np.minimum(ran["aux0"], _LATEST).astype(np.int64) - self.origin
        end = np.maximum(np.minimum(ran["aux1"], _LATEST).astype(np.int64) - self.origin, start)
        known = call >= 0
        if known.any():
            shift = int((self.time[call[known]] - start[known]).max())
        else:  # not before the first event
            shift = int(self.time.min(initial=int(_LATEST))) - int(start.min(initial=int(_LATEST)))
        shift = max(shift, 0)
        return start + shift, end + shift

    def _stream(self, device: int, stream: int, lane: int = 0) -> int:
        return self._lane(_DEVICE + device, self.streams[stream] + (f" and at once {lane}" if lane else ""))

    def _names(self) -> Iterator[str]:
        argv = self.trace.header.get("argv")
        program = " ".join(map(str, argv)) if isinstance(argv, list) and argv else "program"
        processes = sorted({process for process, _ in self.lanes} | {_DEVICE + d for d in self._devices()} | {_HOST})
        for process in processes:
            clock = " (simulated time)" if self.trace.header.get("device_kind") == "sim" else ""
            name = program if process == _HOST else f"Device {process - _DEVICE}{clock}"
            yield _metadata("process_name", process, 0, {"name": name})
            yield _metadata("process_sort_index", process, 0, {"sort_index": process})
        for (process, name), thread in self.lanes.items():
            yield _metadata("thread_name", process, thread, {"name": name})
            yield _metadata("thread_sort_index", process, thread, {"sort_index": thread})

    def _devices(self) -> list[int]:
        devices: list[int] = distinct(self.records["device"]).tolist()
        return [device for device in devices if device >= 0]


def _said(frame: Frame) -> str:
    return f"{frame.function} ({frame.file}:{frame.line})"


def _frames_that_fit(stacks: Sequence[Sequence[Frame]], counts: Sequence[int]) -> int | None:
    """Return how many frames of each stack may be written so many times; None if they all may."""
    sizes = [0] * max(map(len, stacks), default=0)
    for stack, count in zip(stacks, counts, strict=True):
        for depth, frame in enumerate(stack):
            sizes[depth] += count * len(_said(frame))
    fitting = bisect_right(list(accumulate(sizes)), PERFETTO_STACKS)
    return max(fitting, 1) if fitting < len(sizes) else None


def _us(time: Ints) -> tuple[Letters, Letters]:
    """Return times as microseconds and their fractions, of which one after the other is JSON."""
    whole, rest = np.divmod(time, 1000)
    return decimals(whole), fractions(rest)


def _matching(wanted: npt.NDArray[Any], keys: npt.NDArray[Any], values: Ints) -> Ints:
    """Return for each of `wanted` the last value with that key, -1 where there is none."""
    order = np.argsort(keys, kind="stable")
    place = np.searchsorted(keys[order], wanted, side="right") - 1
    if not len(keys):
        return np.full(len(wanted), -1, np.int64)
    found = order[place]
    return np.where((place >= 0) & (keys[found] == wanted), values[found], -1)


def _unix_clock(trace: Trace) -> int | None:
    """Return how many ns the Unix clock is ahead of the trace's, None where that is not known."""
    header = trace.header
    if header.get("time_axis") == "index" or header.get("format") == "rmm-log":
        return None
    if header.get("format") == "pytorch-snapshot":
        return 0
    if "start_unix_ns" in header and "start_time_ns" in header:
        return int(header["start_unix_ns"]) - int(header["start_time_ns"])
    return None


def _metadata(what: str, process: int, thread: int, args: dict[str, Any]) -> str:
    return f'{{"ph":"M","name":"{what}","pid":{process},"tid":{thread},"args":{json.dumps(args)}}}'


def _title(kind: int) -> str:
    return json.dumps(Kind(kind).name.lower().replace("_", " "))


def _arguments(
    kind: int, device: int, flags: int, _thread: int, stream: int, _name: int, _address: int, size: int, *rest: int
) -> str:
    """Return the members of an event's ``args``."""
    aux0, aux1, _ = rest
    text = f'"device":{device},"stream":{stream}'
    if kind == Kind.KERNEL_LAUNCH:
        grid, block = list(unpack_dims(aux0)), list(unpack_dims(aux1))
        return f'{text},"grid":{grid},"block":{block},"shared_bytes":{size}'
    if kind in (Kind.MEMCPY, Kind.MEMSET):
        text += f',"bytes":{size},"asynchronous":{"true" if flags & CopyFlag.ASYNC else "false"}'
        return f'{text},"direction":"{_direction(flags)}"' if kind == Kind.MEMCPY else text
    if kind == Kind.COLLECTIVE:
        rank, ranks, _ = unpack_dims(aux1)
        return f'{text},"bytes":{size},"communicator":{aux0},"rank":{rank},"ranks":{ranks}'
    if kind == Kind.GEMM:
        return f'{text},"mnk":{list(unpack_product(aux0, aux1))}'
    return text


def _direction(flags: int) -> str:
    sides = (flags & CopyFlag.SOURCE_DEVICE, flags & CopyFlag.DESTINATION_DEVICE)
    return " to ".join("device" if side else "host" for side in sides)


def _free_lane(busy: list[int], begin: int, end: int) -> int:
    """Return the first lane that is free from `begin` on (the last, if none is), and take it until `end`."""
    for lane, until in enumerate(busy):
        if until <= begin:
            busy[lane] = end
            return lane
    if len(busy) == _LANES:
        return _LANES - 1
    busy.append(end)
    return len(busy) - 1
