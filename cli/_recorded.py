"""Gets the trace for a command: from a file, or by running and recording a workload."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from cudatool.cli._recording_files import refuse_recording
from cudatool.cli._sources import with_events
from cudatool.cli._supervised import Supervised
from cudatool.errors import CudatoolError, UsageError
from cudatool.files import KeptDescriptor
from cudatool.recording import record, variables
from cudatool.sanitize import check
from cudatool.trace import reader
from cudatool.trace.family import children_of
from cudatool.trace.model import Ending
from cudatool.workload import Start, Workload

if TYPE_CHECKING:
    from cudatool.cli._proof import Proof
    from cudatool.sanitize import Report
    from cudatool.trace.model import Trace

__all__ = ["checked", "trace_of"]


def trace_of(
    workload: tuple[str, ...],
    device: str | None,
    checks: Collection[str],
    proof: Proof,
    *,
    children: bool = True,
) -> tuple[list[Trace], int, bool]:
    """Return the trace that `workload` names, or run it under `checks` and return its recording.

    If `children` are wanted, the traces of the processes that it started follow. Also return its exit status, and
    whether the trace already existed.

    `proof` has the tape for the recording. The workload's output goes to stderr.
    """

    program = Workload.parse(workload, "sanitize")
    if program.start is Start.SCRIPT:
        target = program.target
        if os.path.isfile(target) and reader.is_trace(target):
            if program.arguments:
                raise UsageError(f"{target} is a trace, which takes no arguments; options stand before it")
            proof.refuse_trace()
            return _family(with_events(reader.read(target)), children), 0, True
        if target.endswith(".ctrace"):
            reader.read(target)  # raises the error
        refuse_recording(target)
    program.check()
    # Not a TemporaryDirectory: the workload's exit handlers run inside and would remove it.
    folder = tempfile.mkdtemp(prefix="cudatool-")
    maker = os.getpid()
    remove = partial(shutil.rmtree, folder, ignore_errors=True)
    try:
        path = os.path.join(folder, f"{program.name}.ctrace")
        in_kernels = [check for check in checks if check not in ("race", "leak")]
        supervised = Supervised(remove)
        if supervised.status is not None:  # the program exited early
            return _family(_left_behind(path), children), supervised.status, False
        try:
            with (
                _stdout_for_the_report() as stdout,
                record(
                    path,
                    device=device,
                    measure_accesses="race" in checks,
                    checks=in_kernels,
                    tape=proof.tape,
                    children=children,
                    children_forget="leak" in checks,
                ),
            ):
                proof.begin()
                status = program.run()
                if "leak" in checks:
                    variables.drop()
        except BaseException:  # only our own errors reach this
            supervised.came_to_its_end()
            raise
        if stdout.number is None or not supervised.came_to_its_end():
            os._exit(status)  # the program closed the report's stream: the parent still has it
        return _family(reader.read(path), children), status, False
    finally:
        if os.getpid() == maker:  # not the child: the workload may have it killed, or leave it no descriptor
            remove()


def checked(
    traces: Sequence[Trace],
    checks: Collection[str],
    proof: Proof,
    accepts: Callable[[Report], bool],
    *,
    bounded: bool = False,
) -> list[Report]:
    """Return the report of each process of a program, the program's own first; `accepts` is as of :func:`check`."""

    def report(trace: Trace, beside: Collection[int]) -> Report:
        return check(trace, checks, bounded=bounded, beside=beside, accepts=accepts)

    first, *others = traces
    beside = {int(trace.header["pid"]) for trace in others if "pid" in trace.header}
    reports = [proof.proven(report(first, beside), first)]
    closed = first.ending is Ending.CLOSED  # so that it also lists processes that others started
    return reports + [report(trace, () if closed else beside) for trace in others]


def _family(trace: Trace, children: bool) -> list[Trace]:
    return [trace, *(children_of(trace) if children else ())]


def _left_behind(path: str) -> Trace:
    """Return the trace of a program that has ended without a report."""

    if not os.path.exists(path):
        raise CudatoolError("the process of the program ended before it was recorded")
    return reader.read(path)


@contextmanager
def _stdout_for_the_report() -> Iterator[KeptDescriptor]:
    """Redirect the stdout of this process and its children to stderr; yield the real stdout."""
    if sys.stdout is not None:
        sys.stdout.flush()
    saved = KeptDescriptor(os.dup(1))
    os.dup2(2, 1)
    try:
        yield saved
    finally:
        if sys.stdout is not None:
            sys.stdout.flush()
        if (number := saved.number) is not None:
            os.dup2(number, 1)
        if sys.stdout is None:  # the program closed stdout, or there was none
            sys.stdout = os.fdopen(1, "w", closefd=False)
