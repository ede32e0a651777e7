"""Files that commands read, whatever kind they are of."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cudatool.trace.model import Trace

__all__ = ["newest", "read_trace"]


def newest() -> Path:
    """Return the newest trace of ours in this directory.

    Raises
    ------
    UsageError
        There is none.
    """
    from cudatool.errors import UsageError
    from cudatool.trace.reader import newest_trace

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
        It is of none of these kinds, or damaged.
    """
    from cudatool.collect import rmm_log, torch_snapshot
    from cudatool.errors import FileFormatError, UsageError
    from cudatool.trace import reader

    try:
        if reader.is_trace(source):
            return reader.read(source)
        if torch_snapshot.is_snapshot(source):
            return torch_snapshot.read(source)
        if rmm_log.is_rmm_log(source):
            return rmm_log.read(source)
    except OSError as error:
        raise UsageError(f"cannot read {source}: {error.strerror}") from error
    raise FileFormatError(str(source), "neither a cudatool trace nor a PyTorch memory snapshot, and no log of RMM")
