"""Reads the input files of commands, of every kind."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from cudatool.cli._beside import with_statistics
from cudatool.cli._recording_files import ENDINGS
from cudatool.cli._text import messages
from cudatool.collect import rmm_log, torch_snapshot
from cudatool.collect.plain_pickle import is_packed
from cudatool.errors import FileFormatError, UsageError
from cudatool.files import near_name
from cudatool.trace import reader
from cudatool.trace.physical import uncounted

if TYPE_CHECKING:
    from cudatool.trace.model import Trace

__all__ = ["read_trace", "say_notes", "with_events"]

_MMAP_THRESHOLD, _LARGE = -3, 1 << 20  # glibc's number of the option (malloc.h), and bytes


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
        if str(source) == "-":
            raise UsageError("a recording is read from a file, not from standard input: give its name") from error
        close = near_name(source, ENDINGS) if isinstance(error, FileNotFoundError) else ""
        raise UsageError(f"cannot read {source}: {error.strerror}{close and '; ' + close}") from error
    if is_packed(source):
        raise FileFormatError(
            str(source), "compressed; only PyTorch's snapshots are read so, as .xz or .gz: unpack it first"
        )
    raise FileFormatError(str(source), "neither a cudatool trace nor a PyTorch memory snapshot, and no log of RMM")


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

    for note in (*trace.notes, *uncounted(trace)):
        messages().print(f"warning: {note}", markup=False)
