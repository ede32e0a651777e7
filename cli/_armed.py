"""``cudatool run`` with triggers: the last events are kept, and written when something happens."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from cudatool.cli._text import path_from, say
from cudatool.files import open_standard_files
from cudatool.recording.armed import armed_sources
from cudatool.text import quoted
from cudatool.units import counted, format_bytes

if TYPE_CHECKING:
    from cudatool.recording.armed import ArmOptions
    from cudatool.workload import Workload

__all__ = ["run_armed"]


def run_armed(
    program: Workload, options: ArmOptions, *, device: str | None, with_stacks: bool, accesses: bool, level: str
) -> int:
    """Run a program, name the traces that its triggers wrote, and return its exit status."""
    here = os.getcwd()
    with armed_sources(
        options, device=device, with_stacks=with_stacks, measure_accesses=accesses, level=level
    ) as armed:
        status = program.run()
        open_standard_files()  # a program may close them, and its exit status is the result
    left = [Path(path) for path in armed.written if os.path.exists(path)]
    for path in left:
        say(f"Wrote {path_from(here, str(path))} ({format_bytes(path.stat().st_size)})")
    if gone := len(armed.written) - len(left):
        say(f"Removed {counted(gone, 'older file')}.")
    if not armed.written:
        say(f"Nothing was written: no trigger came in {counted(armed.events, 'event')}.")
        if options.ranges and armed.watch is not None:
            had = ", ".join(map(quoted, armed.watch.other_ranges)) or "no ranges"
            why = f"the last was number {armed.watch.number}" if armed.watch.number else f"the program had {had}"
            say(f"No range of --range {options.ranges} came: {why}")
    return status
