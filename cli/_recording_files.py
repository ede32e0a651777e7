"""Which files are recordings, by their names and first bytes; what reads them is not imported."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from cudatool.collect.plain_pickle import is_packed, starts_as_pickle
from cudatool.collect.rmm_log import is_rmm_log
from cudatool.errors import UsageError
from cudatool.trace.reader import is_trace, newest_trace

if TYPE_CHECKING:
    from cudatool.trace.model import Trace

__all__ = ["ENDINGS", "beside", "newest", "refuse_recording"]

ENDINGS = (".ctrace", ".pickle", ".pkl", ".xz", ".gz", ".csv")
"""Of files that can be read; others may be."""
_SNAPSHOTS = ENDINGS[1:5]


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


def beside(path: str, trace: Trace) -> str:
    """Return a file name for a process that the program started, next to the program's file `path`."""
    stem, ending = os.path.splitext(path)
    if ending == ".json" and stem.endswith(".perfetto"):  # of an export
        stem, ending = stem.removesuffix(".perfetto"), ".perfetto.json"
    rank = f".rank{trace.header['rank']}" if str(trace.header.get("rank", "")).isdecimal() else ""
    return f"{stem}{rank}.{trace.header.get('pid', 0)}{ending}"


def refuse_recording(target: str) -> None:
    """Raise :class:`UsageError` if the program to run is a trace, a snapshot, or RMM's log.

    Plain Python would only complain about null bytes or about the log's header.
    """

    what = "a trace" if is_trace(target) else ""
    if not what and os.path.isfile(target):
        if target.endswith(_SNAPSHOTS) and starts_as_pickle(target):
            what = "a memory snapshot"
        elif is_packed(target):
            raise UsageError(f"{target} is a compressed file, not a program; unpack it first")
        elif is_rmm_log(target):
            what = "RMM's log of allocations"
    if what:
        raise UsageError(f"{target} is {what}, not a program; try `cudatool snapshot {shlex.quote(target)}`")
