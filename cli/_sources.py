"""Reads the input files of commands, of every kind."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from cudatool.cli._beside import with_statistics
from cudatool.cli._text import messages
from cudatool.collect import rmm_log, torch_snapshot
from cudatool.collect.plain_pickle import is_packed
from cudatool.errors import FileFormatError, UsageError
from cudatool.files import near_name
from cudatool.trace import reader
from cudatool.trace.reader import newest_trace

if TYPE_CHECKING:
    from cudatool.trace.model import Trace

__all__ = ["ENDINGS", "beside", "newest", "read_trace", "refuse_recording", "say_notes", "with_events"]

ENDINGS = (".ctrace", ".pickle", ".pkl", ".xz", ".gz", ".csv")
"""Of files that can be read; others may be."""
_SNAPSHOTS = ENDINGS[1:5]
_MMAP_THRESHOLD, _LARGE = -3, 1 << 20  # glibc's number of the option (malloc.h), and bytes


def newest() -> Path:
    """Return the newest trace of ours in this directory.

    Raises
    ------
    UsageError
        There is none.
    """

    found = newest_trace(Path())
    if found is None:
        raise UsageError("no trace (*.ctrace) in this directory; make one with `cudatool run WORKLOAD.py`")
    return found


def read_trace(source: Path) -> Trace:
    """Return the trace in a file: one of ours, a PyTorch snapshot, or RMM's allocation log.

    Raises
    ------
    UsageError
        The file cannot be read.
    FileFormatError
        The file is of none of these kinds, or damaged.
    """

    _give_back_what_is_freed()
    try:
        if reader.is_trace(source):
            return with_events(reader.read(source))
        if torch_snapshot.is_snapshot(source):
            return with_statistics(with_events(torch_snapshot.read(source)), source)
        if rmm_log.is_rmm_log(source):
            return rmm_log.read(source)
    except OSError as error:
        close = near_name(source, ENDINGS) if isinstance(error, FileNotFoundError) else ""
        raise UsageError(f"cannot read {source}: {error.strerror}{close and '; ' + close}") from error
    if is_packed(source):
        raise FileFormatError(str(source), "compressed, and no PyTorch memory snapshot; unpack it first")
    raise FileFormatError(str(source), "neither a cudatool trace nor a PyTorch memory snapshot, and no log of RMM")


def beside(path: str, trace: Trace) -> str:
    """Return a file name for a process that the program started, next to the program's file `path`."""
    stem, ending = os.path.splitext(path)
    rank = f".rank{trace.header['rank']}" if str(trace.header.get("rank", "")).isdecimal() else ""
    return f"{stem}{rank}.{trace.header.get('pid', 0)}{ending}"


def _give_back_what_is_freed() -> None:
    """Make the C library return large arrays to the system when they are freed.

    By default glibc caches larger and larger ones, up to 32 MiB each: for a recording with millions of events, every
    temporary column of an analysis.
    """
    import ctypes

    try:
        ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, _LARGE)
    except (AttributeError, OSError):  # another C library, such as musl
        pass


def with_events(trace: Trace) -> Trace:
    """Return a trace; raise an error if none of its events could be read, since that would look like a clean result."""

    if trace.notes and not len(trace.records):
        raise FileFormatError(trace.source, f"holds no events: {trace.notes[0]}")
    return trace


def say_notes(trace: Trace) -> None:
    """Report on stderr what is missing from a trace."""

    for note in trace.notes:
        messages().print(f"warning: {note}", markup=False)


def refuse_recording(target: str) -> None:
    """Raise :class:`UsageError` if the program to run is a trace, a snapshot, or RMM's log.

    Plain Python would only complain about null bytes or about the log's header.
    """

    what = "a trace" if reader.is_trace(target) else ""
    if not what and os.path.isfile(target):
        if target.endswith(_SNAPSHOTS) and torch_snapshot.is_snapshot(target):
            what = "a memory snapshot"
        elif is_packed(target):
            raise UsageError(f"{target} is a compressed file, not a program; unpack it first")
        elif rmm_log.is_rmm_log(target):
            what = "RMM's log of allocations"
    if what:
        raise UsageError(f"{target} is {what}, not a program; try `cudatool snapshot {shlex.quote(target)}`")
