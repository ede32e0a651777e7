"""``cudatool run``: record a program."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from cudatool.cli._armed import run_armed
from cudatool.cli._command import command, option
from cudatool.cli._last_words import last_words
from cudatool.cli._options import (
    BESIDE,
    device_option,
    force_option,
    html_option,
    is_page,
    no_children_option,
    no_stacks_option,
    trace_option,
    workload_arguments,
)
from cudatool.cli._pages import open_page
from cudatool.cli._recording_files import beside, refuse_recording
from cudatool.cli._run_text import print_summary
from cudatool.cli._text import messages, path_from, say
from cudatool.collect.levels import Level
from cudatool.errors import OutputError, UsageError
from cudatool.files import check_outputs, open_standard_files
from cudatool.recording import record
from cudatool.recording.armed import ArmOptions
from cudatool.recording.on_oom import REPORT
from cudatool.text import printable
from cudatool.trace.family import children_of, process_name
from cudatool.trace.libraries import unrecorded_libraries, why_unrecorded
from cudatool.trace.model import Ending
from cudatool.trace.reader import read
from cudatool.units import counted, format_bytes
from cudatool.workload import Start, Workload

if TYPE_CHECKING:
    from cudatool.trace.model import Trace

__all__ = ["run"]

_MOST = 5  # rows of each part of the table
_MOST_CHILDREN = 16  # traces that are listed
_NOTHING = (
    "No CUDA activity was recorded. Recorded are:",
    "- the calls of cudatool's runtime",
    "- on a GPU, what PyTorch does, and through CUPTI what any library asks of the driver",
    "- on the software device, the driver calls of cuda.core, cuda.bindings, numba and Triton",
)


@command(
    context_settings={"allow_interspersed_args": False},
    examples=[
        ("A program with its arguments", "cudatool run train.py --epochs 1"),
        (
            "Tests, on the software device, and the page of what they did",
            "cudatool run --device sim --open -m pytest tests",
        ),
    ],
)
@workload_arguments(".py")
@trace_option
@force_option
@device_option
@html_option("the trace")
@option(
    "--on-oom/--no-on-oom",
    default=True,
    show_default=True,
    group="Output",
    help="When memory runs out for the first time in a process, write next to its trace why: NAME.oom.txt.",
)
@no_stacks_option
@option(
    "--accesses",
    is_flag=True,
    group="Recording",
    help="Also record which bytes the operations access, so that `cudatool sanitize TRACE` can look for races. Kernels "
    "run slower on the software device.",
)
@no_children_option
@option(
    "--when",
    default="",
    metavar="CONDITION",
    group="Triggers",
    help='Keep only the last events, and write them when this becomes true: "allocated > 90%", "reserved >= 20GiB".',
)
@option("--every", default="", metavar="TIME", group="Triggers", help="The same every so often, such as 30s or 1h.")
@option(
    "--range",
    "ranges",
    default="",
    metavar="NAME:A-B",
    group="Triggers",
    help="The same for the A-th to the B-th range of a name, such as step:10-20.",
)
@option(
    "--keep",
    default="",
    metavar="SIZE|TIME",
    group="Triggers",
    help="How many events to keep, such as 64MiB, 10min or 10min,256MiB; alone, the triggers are SIGUSR2 and "
    "cudatool.trigger(). Default: 64MiB.",
)
@option(
    "--level",
    type=click.Choice([str(level) for level in Level]),
    default=str(Level.KERNELS),
    show_default=True,
    group="Recording",
    help="How much to record of what a GPU does: memory (and streams), kernels (and when they and copies ran), "
    "graph-nodes (also each kernel of a graph's launch), launches (kernels with the Python stack of their launch). "
    "More detail takes more time.",
)
def run(
    output: str | None,
    force: bool,
    device: str | None,
    html: str | None,
    opens: bool,
    on_oom: bool,
    no_stacks: bool,
    accesses: bool,
    no_children: bool,
    when: str,
    every: str,
    ranges: str,
    keep: str,
    level: str,
    workload: tuple[str, ...],
) -> None:
    """Run a Python program and record what it does on the device.

    The program runs as `python` would run it: arguments, __main__, exit status and tracebacks are its own. cudatool
    records the operations of its own runtime. On a GPU it also records any library's calls of the driver, the kernels
    that ran, and PyTorch's blocks of memory; on the software device, the driver calls of any cuda.core or cuda.bindings
    program. Python processes that the program starts are recorded, too: each that uses a device gets a trace next to
    the program's, with its process id in the name.
    """

    if html and workload[:1] not in (("-m",), ("-c",), ("-",)) and not is_page(html):
        html, workload = BESIDE, (html, *workload)  # `cudatool run --html WORKLOAD`: the option took the program
    program = Workload.parse(workload)
    program.check()
    if program.start is Start.SCRIPT:
        refuse_recording(program.target)
    if when or every or ranges or keep:
        if html:
            raise UsageError("--html and --open do not go with triggers; make a page of a trace with cudatool snapshot")
        options = ArmOptions(*_place(output, program), keep or "64MiB", when, every, ranges, on_oom=on_oom)
        stacks = not no_stacks
        sys.exit(run_armed(program, options, device=device, with_stacks=stacks, accesses=accesses, level=level))
    here, process = os.getcwd(), os.getpid()  # the program may change directory, and remove this one; or fork
    path = os.path.abspath(output or f"{program.name}.{os.getpid()}.ctrace")
    page = None if html is None else path.removesuffix(".ctrace") + ".html" if html == BESIDE else os.path.abspath(html)
    shown = path_from(here, path)
    _check_outputs(path, page, program, here, force=force, on_oom=on_oom)
    survives = f"cudatool: the program ended at once; its trace is {shown} (cudatool snapshot {shlex.quote(shown)})"
    with (
        record(
            path,
            device=device,
            with_stacks=not no_stacks,
            measure_accesses=accesses,
            level=level,
            force=force,
            children=not no_children,
            on_oom=on_oom,
        ) as recorder,
        last_words(printable(survives)),
    ):
        status = program.run()
        open_standard_files()  # a program may close them, and its exit status is the result
        recorder.add_facts({"exit_status": status})

    _show(_own_trace(path, here, process), here, page, opens, status)
    sys.exit(status)


def _own_trace(path: str, here: str, process: int) -> Trace:
    """Return the trace that this command has written, unless another run has overwritten it meanwhile."""
    trace = read(path)
    writer = trace.header.get("pid")
    if writer != process:
        raise OutputError(
            f"the recording is lost: {path_from(here, path)} was overwritten by process {writer}, which records to the "
            "same file; name another one with -o"
        )
    return trace


def _show(trace: Trace, here: str, page: str | None, opens: bool, status: int) -> None:
    """Say what was recorded and written, and what to do next."""
    path = trace.source
    children = children_of(trace)
    print_summary(messages(), trace, status)
    _wrote(path, here)
    _say_children(children, here)
    _say_reports([trace, *children], here)
    if reason := trace.header.get("cupti_error"):
        say(f"Not all of what the program's libraries do on the GPU is recorded: {printable(reason)}")
    if tool := trace.header.get("nvtx_tool"):
        say(f"NVTX_INJECTION64_PATH names {printable(tool)}, so ranges that libraries give to NVTX are not recorded")
    libraries = why_unrecorded(unrecorded_libraries(trace))
    if not (len(trace.records) or children) and (libraries or not status):  # what failed may have its reason here
        for line in (*_NOTHING, *libraries):
            say(line)
    if page:
        _write_pages([trace, *children], page, here)
        if opens:
            open_page(page)
    elif len(trace.records) or children:
        say(f"Next: cudatool snapshot {shlex.quote(path_from(here, path))} --html")


def _place(output: str | None, program: Workload) -> tuple[str, str]:
    """Return the directory and the name of traces that triggers write."""
    folder, name = os.path.split(output or "")
    return folder, name.removesuffix(".ctrace") or program.name


def _check_outputs(path: str, page: str | None, program: Workload, here: str, *, force: bool, on_oom: bool) -> None:
    """Refuse to overwrite files; remove the report of an earlier run, since this one's memory may last."""
    report = path.removesuffix(".ctrace") + REPORT
    outputs = [path, *([page] if page else []), *([report] if on_oom else [])]
    check_outputs([path_from(here, one) for one in outputs], program.files, force=force)
    if on_oom and os.path.lexists(report):
        os.unlink(report)


def _write_pages(traces: list[Trace], page: str, here: str) -> None:
    from cudatool import viz  # only a page needs it

    for index, trace in enumerate(traces):
        path = beside(page, trace) if index else page
        viz.write_page(trace, path)
        _wrote(path, here)


def _wrote(path: str, here: str) -> None:
    say(f"Wrote {path_from(here, path)} ({format_bytes(Path(path).stat().st_size)})")


def _say_children(children: list[Trace], here: str) -> None:
    for child in children[:_MOST_CHILDREN]:
        running = "; it is still running" if child.ending is Ending.GROWING else ""
        say(f"Wrote {path_from(here, child.source)} ({printable(process_name(child))}{running})")
    if len(children) > _MOST_CHILDREN:
        more = counted(len(children) - _MOST_CHILDREN, "more trace of a process", "more traces of processes")
        say(f"and {more} beside it")


def _say_reports(traces: list[Trace], here: str) -> None:
    """Name what was written when memory ran out."""
    reports = [trace.source.removesuffix(".ctrace") + REPORT for trace in traces]
    for report in [path for path in reports if os.path.exists(path)][:_MOST_CHILDREN]:
        _wrote(report, here)
