"""A trace in memory: columns, not objects. What every analysis takes, wherever the events came from."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from cudatool.trace.events import LIVED, GeneratedFlag, Kind

__all__ = [
    "Ending",
    "Frame",
    "GeneratedCode",
    "GeneratedLine",
    "PackageFrame",
    "PinnedMemory",
    "Trace",
    "is_of_kind",
    "recorded_from",
]

_OF_ALLOCATOR = (np.arange(256) >= Kind.BLOCK_ALLOC) & (np.arange(256) <= Kind.OOM)  # by kind


class Frame(NamedTuple):
    """One Python frame of a stack."""

    file: str
    function: str
    line: int


class PackageFrame(Frame):
    """A frame of an installed package whose path does not tell that it is one. It equals the same :class:`Frame`."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class GeneratedLine:
    """A statement that allocates.

    Attributes
    ----------
    first, last
        Its lines in the generated file.
    buffer
        The name of the buffer, as the compiler calls it; empty for temporary memory of a kernel.
    nodes
        The nodes of the graph that it was made from; the last one makes it.
    module
        The path of the module whose code that is, empty where it is not known.
    reused_by
        The buffers that take over its memory, in that order.
    stack
        The lines of the program that it was made from: an index into the trace's stacks, 0 where none is known.
    """

    first: int
    last: int
    buffer: str
    nodes: tuple[str, ...]
    module: str
    reused_by: tuple[str, ...]
    stack: int


@dataclass(frozen=True, slots=True)
class GeneratedCode:
    """The generated files of a recording, by path: how their lines are known, and the lines by their first.

    Attributes
    ----------
    flags
        Of each file that the recording describes.
    lines
        Of each file, by each line that a statement spans.
    at
        For the number of each stack with a frame of such code: the frame, and the line if it is known.
    """

    flags: dict[str, GeneratedFlag] = field(default_factory=dict)
    lines: dict[str, dict[int, GeneratedLine]] = field(default_factory=dict)
    at: dict[int, tuple[Frame, GeneratedLine | None]] = field(default_factory=dict)


class Ending(StrEnum):
    """How a recording ended, and so whether events are missing."""

    CLOSED = "closed"
    """The recording was closed. Every event is there."""
    GROWING = "growing"
    """The program still writes it. Every event up to the moment of reading is there."""
    KILLED = "killed"
    """The program ended without closing it (SIGKILL, os._exit). Every event up to that is there."""
    STOPPED = "stopped"
    """The recorder had to give up, for example because the disk was full. Later events are missing."""
    CUT = "cut"
    """The file ends early, as a copy of a part of it. Later events are missing."""
    DAMAGED = "damaged"
    """The file has wrong contents somewhere. What comes after that was not read."""

    @property
    def is_complete(self) -> bool:
        """Whether all events are there that were emitted before the recording ended, or was read."""
        return self in (Ending.CLOSED, Ending.GROWING, Ending.KILLED)


@dataclass(frozen=True, slots=True)
class PinnedMemory:
    """What a recording says of pinned host memory.

    Attributes
    ----------
    segments, reserved
        At the end: how many pieces the allocator had from the driver, and their bytes.
    active, peak_active
        Bytes in use at the end, and at most while events were recorded.
    events
        How many were recorded.
    """

    segments: int
    reserved: int
    active: int
    peak_active: int
    events: int


@dataclass
class Trace:
    """Events with the tables that their indices point into.

    Attributes
    ----------
    records
        Structured array of dtype :data:`cudatool.trace.events.RECORD`, in the order of emission.
    names
        Index 0 is the empty string.
    stacks
        Tuples of indices into `frames`, innermost frame first; index 0 is the empty stack.
    frames, threads
        Tables that stacks and records point into; a thread's entry is its name.
    header
        Facts about the recording: ``device`` ("cuda"/"sim" and its description), ``argv``, ``start_time`` ...
    notes
        What the reader has to say about completeness, one sentence each. Empty for a complete trace.
    source
        Where it was read from, for messages.
    ending
        How the recording ended.
    generated
        What it says of code that PyTorch's compiler generated.
    """

    records: npt.NDArray[np.void]
    names: list[str] = field(default_factory=lambda: [""])
    stacks: list[tuple[int, ...]] = field(default_factory=lambda: [()])
    frames: list[Frame] = field(default_factory=list)
    threads: list[str] = field(default_factory=lambda: ["main"])
    header: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    source: str = ""
    ending: Ending = Ending.CLOSED
    generated: GeneratedCode = field(default_factory=GeneratedCode)
    _found: dict[int, tuple[Frame, ...]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def stack(self, index: int) -> tuple[Frame, ...]:
        """Return the frames of stack `index`, innermost first: the same object every time."""
        found = self._found.get(index)
        if found is None:
            found = self._found[index] = tuple(self.frames[i] for i in self.stacks[index])
        return found

    def selecting(self, records: npt.NDArray[np.void], source: npt.NDArray[np.int64]) -> Self:
        """Return this trace with other records, each of which is made from the record of the number in `source`."""
        return replace(self, records=records)

    def compile_contexts(self, records: npt.NDArray[np.int64]) -> tuple[list[str], npt.NDArray[np.int64]]:
        """Return ids of torch.compile's compilations, and for each of `records` 1 + an index of them, 0 for none.

        Only PyTorch's snapshots name them.
        """
        return [], np.zeros(len(records), np.int64)

    def fx_node(self, frame: int) -> str:
        """Return the node of an FX graph that a frame's code was made from, empty where the recording names none."""
        return ""

    def of_kind(self, *kinds: Kind) -> npt.NDArray[np.void]:
        """Return the records of these kinds, in order."""
        chosen: npt.NDArray[np.void] = self.records[is_of_kind(self.records, *kinds)]
        return chosen

    @cached_property
    def duration(self) -> int:
        """Nanoseconds between the first and the last event."""
        time = self.records["time"]
        return int(time.max()) - int(time.min()) if len(time) else 0


def is_of_kind(records: npt.NDArray[np.void], *kinds: Kind) -> npt.NDArray[np.bool_]:
    """Return for each record whether it is of one of these kinds; np.isin() would take 16 bytes for each."""
    wanted = np.zeros(256, np.bool_)
    wanted[list(kinds)] = True
    result: npt.NDArray[np.bool_] = wanted[records["kind"]]
    return result


def recorded_from(trace: Trace, device: int) -> int:
    """Return the first record of a device that was recorded; those before it tell what was there already.

    A PyTorch snapshot's ring, or a recording, may begin in the middle of a program. What was there then comes in front,
    as if it had just been allocated. That is true of what is there, not of the order it came in.
    """
    prior = trace.header.get("prior_records", {}).get(device, 0)
    records, begin = trace.records, 0
    if trace.header.get("prior_allocations"):
        lived = is_of_kind(records, Kind.MEM_ALLOC, Kind.POOL_ALLOC) & (records["flags"] & LIVED != 0)
        lived &= records["device"] == device
        begin = int(np.flatnonzero(lived).max(initial=-1)) + 1
    if prior:
        own = np.flatnonzero((records["device"] == device) & _OF_ALLOCATOR[records["kind"]])
        begin = max(begin, int(own[prior]) if prior < len(own) else len(records))
    return begin
