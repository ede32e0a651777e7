"""PyTorch's memory snapshots, out: written event by event, however many there are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from cudatool.collect.torch_model import ACTIONS, BLOCK_KINDS, WHOLE_EVENT, MemorySnapshot
from cudatool.errors import OutputError
from cudatool.export.pickle_writer import END, START, PickleWriter, integers
from cudatool.export.pools_as_blocks import pools_as_blocks
from cudatool.files import replacing
from cudatool.progress import Step, step
from cudatool.trace.events import FREE_UNKNOWN, Kind
from cudatool.trace.model import Trace, is_of_kind, recorded_from

__all__ = ["write"]

# Memory that a program took from the driver itself becomes a segment with one block.
_ACTIONS_OF_KIND: Final[dict[Kind, tuple[str, ...]]] = {kind: (action,) for action, kind in ACTIONS.items()} | {
    Kind.MEM_ALLOC: ("segment_alloc", "alloc"),
    Kind.MEM_FREE: ("free_requested", "free_completed", "segment_free"),
}
_OOM, _MARK = int(Kind.OOM), int(Kind.MARK)  # plain: comparing with members takes as long as the rest of a loop
_OF_RECORDS: Final = ("kind", "flags", "stream", "stack", "name", "aux1")
_BATCH: Final = 1000  # events for each write to the file
_MOST_TEMPLATES: Final = 1 << 16  # most programs have a few thousand
_PIECE: Final = 64 * _BATCH  # events whose columns are Python's numbers at a time


def write(
    path: str | Path,
    trace: Trace,
    segments: Sequence[Mapping[str, Any]],
    settings: Mapping[str, Any] | None = None,
) -> None:
    """Write a trace as a PyTorch memory snapshot, which PyTorch's own viewer reads.

    Of a trace that was read from a snapshot, everything that was read is written again: its own final state and
    settings, in place of `segments` and `settings`. What a reader inferred of the time before a recording is left out:
    it stands in the final state, or can be inferred again.

    Parameters
    ----------
    path
        Written whole or not at all; replaced if it exists.
    trace
        Its allocator events become ``device_traces``. Memory that a program took from the driver itself becomes a
        segment with one block, that of a library's own pool a segment with the pool's blocks. Its ranges become
        ``external_annotations``.
    segments
        The final state as :func:`cudatool.analyze.torch_segments` returns it.
    settings
        The allocator's settings as :func:`cudatool.analyze.torch_settings` returns them.

    Raises
    ------
    OutputError
        The file cannot be written.
    """
    handles = _handles(trace)
    pools = [tuple(pool) for pool in trace.header.get("pools", ())]

    def pool_id(number: int) -> tuple[int, int]:
        return pools[number] if 0 <= number < len(pools) else (number, 0)

    spelled: list[Any] = [
        {**s, "stream": handles.get(s["stream"], 0), "segment_pool_id": pool_id(s["segment_pool_id"])} for s in segments
    ]
    annotations: list[Any] = _annotations_of(trace)
    # Requests to other allocators than PyTorch's, and to the driver, look like those to PyTorch's.
    more: dict[str, Any] = {key: trace.header[key] for key in ("requests_to",) if key in trace.header}
    if is_of_kind(trace.records, Kind.MEM_ALLOC, Kind.MEM_FREE).any():
        more["requests_to"] = "driver"
    trace = pools_as_blocks(trace)
    if isinstance(trace, MemorySnapshot):
        spelled, settings, more = trace.segments or spelled, trace.settings, trace.more
        if "window" not in trace.header:
            annotations = more.get("external_annotations", [])
    facts = {**more, "external_annotations": annotations}
    writer = PickleWriter()
    with (
        replacing(path) as name,
        open(name, "wb") as file,
        step(f"writing {path}", len(trace.records)) as shown,
    ):
        try:
            begin = {"segments": spelled, "allocator_settings": dict(settings or {})}
            file.write(START + b"}(" + writer.members(begin) + writer.value("device_traces") + writer.begin_list())
            for ring in _Rings(trace, writer, handles, pool_id).spelled(shown):
                file.write(ring)
            file.write(writer.members(facts) + b"u" + END)
        except RecursionError as error:
            raise OutputError(f"cannot write {path}: its lists are nested too deeply") from error


def _handles(trace: Trace) -> dict[int, int]:
    streams = trace.of_kind(Kind.STREAM_CREATE)
    return dict(zip(streams["stream"].tolist(), streams["address"].tolist(), strict=True))


class _Rings:
    """Each device's events, one after another."""

    def __init__(
        self, trace: Trace, writer: PickleWriter, handles: Mapping[int, int], pool_id: Callable[[int], tuple[int, int]]
    ) -> None:
        own = trace if isinstance(trace, MemorySnapshot) else None
        facts = own.frame_facts if own else {}
        frames = [
            {"filename": frame.file, "name": frame.function, "line": frame.line, **facts.get(i, {})}
            for i, frame in enumerate(trace.frames)
        ]
        self.trace, self.own, self.writer, self.handles, self.pool_id = trace, own, writer, handles, pool_id
        self.stacks = [[frames[i] for i in stack] for stack in trace.stacks]  # shared, so that the file has each once
        self.timed = trace.header.get("time_axis") != "index"
        self.whole = own.facts[WHOLE_EVENT].values if own and WHOLE_EVENT in own.facts else []
        # Of events that differ in their numbers only; all texts and lists in them are references.
        self.templates: dict[tuple[str, tuple[int, ...]], bytes] = {}

    def spelled(self, shown: Step) -> Iterator[bytes]:
        """Yield the items of the list that is ``device_traces``."""
        records = self.trace.records
        chosen = is_of_kind(records, *_ACTIONS_OF_KIND)
        if self.whole:
            chosen |= is_of_kind(records, Kind.MARK)
        done = 0
        # A recorder writes a device below zero where the number does not fit its field.
        for device in range(int(records["device"].max(initial=-1, where=chosen)) + 1):
            begin = recorded_from(self.trace, device)
            own = begin + np.flatnonzero(chosen[begin:] & (records["device"][begin:] == device))
            yield b"(" + self.writer.begin_list()
            for start in range(0, len(own), _PIECE):
                entries = list(self._entries(own[start : start + _PIECE]))
                for first in range(0, len(entries), _BATCH):
                    yield self.writer.appended(entries[first : first + _BATCH])
                done += min(_PIECE, len(own) - start)
                shown.update(done)
            yield b"e"

    def _entries(self, index: npt.NDArray[np.int64]) -> Iterator[bytes]:
        """Yield events: dicts, of which no second use is made."""
        events, templates = self.trace.records[index], self.templates
        what = [events[name].tolist() for name in _OF_RECORDS]
        if self.own:
            what += [
                [fact.number] * len(index) if isinstance(fact.number, int) else fact.number[index].tolist()
                for fact in self.own.facts.values()
            ]
        asked = np.where(is_of_kind(events, *BLOCK_KINDS), events["aux0"], events["size"])
        numbers = [integers(column) for column in (events["address"], asked, events["aux0"], events["time"] // 1000)]
        for key, (address, size, free, time) in zip(zip(*what, strict=True), zip(*numbers, strict=True), strict=True):
            kind = key[0]
            if kind == _MARK:
                numbers_of = dict(zip(self.own.facts, key[len(_OF_RECORDS) :], strict=True)) if self.own else {}
                yield self.writer.value(self.whole[numbers_of[WHOLE_EVENT] - 1])
                continue
            values = (address, size) if kind != _OOM else (size,) if key[1] & FREE_UNKNOWN else (size, free)
            if self.timed:
                values += (time,)
            for action in _ACTIONS_OF_KIND[kind]:
                template = templates.get((action, key))
                if template is None:
                    before = self.writer.known
                    template = self._template(action, key)
                    if before == self.writer.known and len(templates) < _MOST_TEMPLATES:
                        templates[action, key] = template
                yield template % values

    def _template(self, action: str, key: tuple[int, ...]) -> bytes:
        """Return the spelling of an event that has ``%b`` in the place of each of its numbers."""
        kind, flags, stream, stack, name, pool, *numbers = key
        value, trace, own = self.writer.value, self.trace, self.own
        names = ["addr", "size"]
        if kind == _OOM:
            names = ["size"] if flags & FREE_UNKNOWN else ["size", "device_free"]
        if self.timed:
            names.append("time_us")
        keys = [b"}(" + value("action") + value(action), *map(value, names)]
        metadata: Any = trace.names[name] if own or kind in BLOCK_KINDS else ""
        said = {
            "stream": self.handles.get(stream, 0),
            "user_metadata": own.metadata.get(name, metadata) if own else metadata,
            "pool_id": self.pool_id(pool),
            "frames": self.stacks[stack],
        }
        if own:
            values = zip(own.facts.items(), numbers, strict=True)
            said |= {key: fact.values[number - 1] for (key, fact), number in values if number}
        else:
            said["compile_context"] = "N/A"
        head, first, *others = (part.replace(b"%", b"%%") for part in (*keys, self.writer.members(said) + b"u"))
        return b"%b".join([head + first, *others])


def _annotations_of(trace: Trace) -> list[dict[str, Any]]:
    """Return the ranges of a trace as PyTorch's profiler writes its own. Those of the host are on device 0."""
    marks = trace.of_kind(Kind.RANGE_PUSH, Kind.RANGE_POP)
    inside: dict[tuple[int, int], list[str]] = {}
    result = []
    for kind, device, thread, name, time in marks[["kind", "device", "thread", "name", "time"]].tolist():
        names = inside.setdefault((device, thread), [])
        if kind == Kind.RANGE_PUSH:
            names.append(trace.names[name])
        elif not names:
            continue  # its start was not recorded
        stage, text = ("START", names[-1]) if kind == Kind.RANGE_PUSH else ("END", names.pop())
        result.append({"stage": stage, "name": text, "device": max(device, 0), "time_us": time // 1000})
    return result
