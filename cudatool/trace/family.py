"""The traces of one run: the program's, and beside it those of the processes that it started."""

from __future__ import annotations

import glob
import os
from pathlib import Path

from cudatool.errors import CudatoolError
from cudatool.trace.model import Trace
from cudatool.trace.reader import facts, read

__all__ = ["children_of", "process_name"]


def children_of(trace: Trace) -> list[Trace]:
    """Return the traces of the processes that a recorded program started, by process id.

    They lie beside its own, begin with its name, and are of the same run, as their headers say. One that cannot be read
    is left out; what it holds is then not said to be recorded.
    """
    run, source = trace.header.get("run"), Path(trace.source)
    if not run or "parent_trace" in trace.header:
        return []
    found = []
    for path in sorted(source.parent.glob(f"{glob.escape(source.name.removesuffix('.ctrace'))}.*.ctrace")):
        try:
            said = facts(path)
            if said.get("run") == run and "parent_trace" in said:
                found.append(read(path))
        except CudatoolError:
            continue
    return sorted(found, key=lambda child: child.header.get("pid", 0))


def process_name(trace: Trace) -> str:
    """Return what a process is called: ``"process 1234 (worker.py), rank 1"``, or the program itself."""
    header = trace.header
    if "parent_trace" not in header:
        return f"process {header.get('pid', 0)} (the program itself)"
    argv = [word for word in header.get("argv", ()) if word]
    program = f" ({os.path.basename(argv[0])})" if argv and not argv[0].startswith("-") else ""
    rank = f", rank {header['rank']}" if header.get("rank") else ""
    return f"process {header.get('pid', 0)}{program}{rank}"
