"""The traces of one run: the program's, and beside it those of the processes that it started."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from cudatool.errors import CudatoolError
from cudatool.trace.events import Kind, ProcessFlag
from cudatool.trace.model import Trace
from cudatool.trace.reader import facts, read

__all__ = ["children_of", "files_of_children", "process_name", "unread_children"]


def children_of(trace: Trace) -> list[Trace]:
    """Return the traces of the processes that a recorded program started, by process id.

    They lie beside its own, begin with its name, and are of the same run, as their headers say. One that cannot be read
    is left out; what it holds is then not said to be recorded.
    """
    found = []
    for path in files_of_children(Path(trace.source), trace.header):
        try:
            found.append(read(path))
        except CudatoolError:
            continue
    return sorted(found, key=lambda child: child.header.get("pid", 0))


def unread_children(trace: Trace, found: Iterable[Trace]) -> list[str]:
    """Return in words the processes that used a device, as the program's trace lists them, of which no trace is found.

    The trace of a program that was killed lists none.
    """
    there = {os.path.basename(child.source) for child in found}
    unread = []
    for row in trace.of_kind(Kind.CHILD_RECORDED):
        process, name = int(row["aux0"]), trace.names[int(row["name"])]
        if row["flags"] & ProcessFlag.UNRECORDED:
            unread.append(f"process {process}, which is not recorded: {name}")
        elif name and name not in there:
            unread.append(f"process {process}, as {name} is missing or cannot be read")
    return unread


def files_of_children(source: Path, header: Mapping[str, Any]) -> list[Path]:
    """Return the files of these traces, given that of the program and its header; sorted by name."""
    run = header.get("run")
    if not run or "parent_trace" in header:
        return []
    found = []
    for path in sorted(source.parent.glob(f"{glob.escape(source.name.removesuffix('.ctrace'))}.*.ctrace")):
        try:
            said = facts(path)
        except CudatoolError:
            continue
        if said.get("run") == run and "parent_trace" in said:
            found.append(path)
    return found


def process_name(trace: Trace) -> str:
    """Return what a process is called: ``"process 1234 (worker.py), rank 1"``, or the program itself."""
    header = trace.header
    if "parent_trace" not in header:
        return f"process {header.get('pid', 0)} (the program itself)"
    argv = [word for word in header.get("argv", ()) if word]
    program = f" ({os.path.basename(argv[0])})" if argv and not argv[0].startswith("-") else ""
    rank = f", rank {header['rank']}" if header.get("rank") else ""
    return f"process {header.get('pid', 0)}{program}{rank}"
