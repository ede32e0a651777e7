"""``cudatool sanitize``: unsynchronized accesses, in a program or a trace."""

from __future__ import annotations

import math
import os
import sys
from functools import partial
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from cudatool.cli._acceptance import Acceptance, acceptance_options
from cudatool.cli._command import Listed, command, option
from cudatool.cli._options import device_option, no_children_option, page_option, workload_arguments
from cudatool.cli._pages import open_page
from cudatool.cli._proof import Proof, proof_options
from cudatool.cli._recorded import checked, trace_of
from cudatool.cli._recording_files import beside
from cudatool.cli._schedules import explored
from cudatool.cli._supervised import leave
from cudatool.cli._text import in_colour, path_from, prose_width, say
from cudatool.config import DEFAULT_CHECKS
from cudatool.errors import UsageError
from cudatool.sanitize import Outcome, Outputs, ReportContext, joined_processes, of_process, parse_checks, render_text
from cudatool.sanitize.coverage import ended
from cudatool.sanitize.kinds import CHECKS
from cudatool.sanitize.places import project_root, recorded_at
from cudatool.sanitize.report.outputs import FORMATS
from cudatool.trace.events import Kind, ProcessFlag
from cudatool.trace.frames import user_files
from cudatool.trace.model import Ending
from cudatool.workload import Workload

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from cudatool.sanitize import Report
    from cudatool.trace.model import Trace

__all__ = ["sanitize"]

_INTERRUPTED = 130  # Ctrl-C, which the workload receives too


def _checks() -> list[str]:
    return [*CHECKS, "all"]


def _formats() -> list[str]:
    return list(FORMATS)


@command(
    context_settings={"allow_interspersed_args": False},
    examples=[
        ("A program, on the software device, with proof", "cudatool sanitize --device sim --witness train.py"),
        ("A recorded trace", "cudatool sanitize run.ctrace"),
        ("Tests in a CI job", "cudatool sanitize --device sim --format junit=cuda.xml -m pytest tests"),
    ],
)
@workload_arguments(".py", ".ctrace")
@device_option
@option(
    "--format",
    "formats",
    multiple=True,
    group="Output",
    setting="format",
    type=Listed(_formats),
    metavar="FORMAT[=FILE]",
    help="text, json, sarif, junit, github or gitlab; several times for several. Without =FILE it goes to stdout, and "
    "the text report does if nothing else does.",
)
@option("--json", "as_json", is_flag=True, group="Output", help="Short for --format json.")
@page_option("Also write a page with the findings on the stream timeline.")
@option(
    "--checks",
    setting="checks",
    type=Listed(_checks, separator=","),
    group="Checks",
    default=DEFAULT_CHECKS,
    show_default=True,
    metavar="LIST",
    help="What to look for, separated by commas: race, memcheck, initcheck, racecheck, synccheck, leak, or all.",
)
@option(
    "--error-exitcode",
    type=click.IntRange(0, 255),
    default=1,
    show_default=True,
    group="Output",
    help="Exit status for findings.",
)
@option(
    "--allow-empty",
    is_flag=True,
    group="Output",
    help="Exit with status 0, not 2, though nothing was checked: no work on a device, or a trace without accesses.",
)
@option(
    "--strict", is_flag=True, group="Output", help="Exit with status 2 also if only a part of the work was not checked."
)
@no_children_option
@acceptance_options
@proof_options
def sanitize(
    device: str | None,
    formats: tuple[str, ...],
    as_json: bool,
    html: str | None,
    opens: bool,
    checks: str,
    error_exitcode: int,
    allow_empty: bool,
    strict: bool,
    no_children: bool,
    acceptance: Acceptance,
    proof: Proof,
    workload: tuple[str, ...],
) -> None:
    """Find unsynchronized accesses and memory errors in a program or a recorded trace.

    Two accesses to the same bytes, at least one of them a write, are reported with both stacks if CUDA's rules do not
    order them, in whatever order they happened to run. On the software device the bytes that kernels touch are
    measured. On a GPU those of cudatool's kernels are inferred from their PTX, and those of PyTorch's operators follow
    from their schemas and tensors; the report says what was not checked.

    The software device also has memcheck (accesses out of bounds, misaligned or after a free, wrong frees and copies),
    initcheck (reads of memory never written), racecheck (threads of one kernel that race), synccheck (barriers that
    not all threads reach), leak (memory never freed). The default is the checks that cost little.

    A comment `# cudatool: ignore[race]` on the line of either access accepts a finding there; in brackets stand checks
    or kinds of finding, without brackets it accepts all.

    What the program prints goes to stderr: stdout has the report alone. Files are written whole or not at all.

    The last line of the report is the verdict. It also says what was not checked: launches whose accesses are not
    known, child processes that could not be recorded, checks that the device cannot make.

    Exit status: 0 nothing found in what was checked, 1 findings (or --error-exitcode), 2 it could not be done, nothing
    was checked, or the recording is incomplete, 3 the workload itself failed,
    130 interrupted (Ctrl-C).
    """

    # Report every error in the options before the workload runs, which may change directory.
    if html and html.endswith(".py"):
        raise UsageError(f"--html names the page to write, and {html} is a program: --html findings.html {html}")
    wanted = parse_checks(checks)
    if as_json:
        source = click.get_current_context().get_parameter_source("formats")
        formats = (*(formats if source is ParameterSource.COMMANDLINE else ()), "json")
    inputs = [*Workload.parse(workload, "sanitize").files, *acceptance.read]
    outputs = Outputs.parse(formats, html, acceptance.written, inputs=inputs)
    html, root, here = html and os.path.abspath(html), project_root(), os.getcwd()

    if html and proof.schedules is not None:
        raise UsageError("--html shows one run: leave out --explore")
    how, trace = "", None
    traces: list[Trace] = []
    reports: list[Report] = []
    files: list[str] = []
    if proof.schedules is not None:
        report, status = explored(proof, device, checks, workload, children=not no_children)
    else:
        traces, status, was_there = trace_of(workload, device, wanted, proof, children=not no_children)
        trace = traces[0]
        accepts = partial(acceptance.accepts_races, checks=wanted)
        reports = checked(traces, wanted, proof, accepts, bounded=was_there)
        report = joined_processes(traces, reports)
        if was_there:
            how = _how_it_failed(trace)
        else:  # of someone else's trace, only the sources that findings point to
            files = list(dict.fromkeys(file for one in traces for file in user_files(one)))
    how = ended(status) if status else how
    if how:
        report = report.of_failed(how)
    complete = not how and report.outcome not in (Outcome.NOT_CHECKED, Outcome.INCOMPLETE)
    report = acceptance.applied(report, wanted, complete=complete, files=files)
    run = ReportContext(root, wanted, status, math.inf if trace is None else recorded_at(trace))
    written: list[str] = []
    try:
        written += outputs.write(report, run, _echo, partial(render_text, color=in_colour(), width=prose_width()))
    finally:  # the page is written even if the reader of stdout has closed it
        if html and trace is not None:
            written += _write_pages(html, traces, reports, report)
        for path in written:
            say(f"Wrote {path_from(here, path)}")
        if html and opens and trace is not None:
            open_page(html)
    if report.unchecked_launches and trace is not None and trace.header.get("device_kind") == "cuda":
        say("Next: the same with --device sim, which measures what kernels access")
    if status:
        say(f"cudatool: the workload itself {ended(status)}")
        leave(_INTERRUPTED if status == _INTERRUPTED else 3)
    leave(_exit_status(report.outcome, error_exitcode, allow_empty=allow_empty, strict=strict))


def _exit_status(outcome: Outcome, of_findings: int, *, allow_empty: bool, strict: bool) -> int:
    return {
        Outcome.FINDINGS: of_findings,
        Outcome.CLEAN: 0,
        Outcome.PARTLY_CHECKED: 2 if strict else 0,
        Outcome.NOT_CHECKED: 0 if allow_empty and not strict else 2,
        Outcome.INCOMPLETE: 2,
    }[outcome]


def _write_pages(html: str, traces: Sequence[Trace], reports: Sequence[Report], report: Report) -> Iterator[str]:
    """Write a page for each process, and yield its path when it is there."""
    from cudatool import viz  # only a page needs it

    for index, (one, own) in enumerate(zip(traces, reports, strict=True)):
        page = beside(html, one) if index else html
        viz.write_page(one, page, of_process(report, own) if len(traces) > 1 else report)
        yield page


def _how_it_failed(trace: Trace) -> str:
    """Return how the program of a trace ended before it was through; nothing if it was, or that is not known."""
    if trace.ending is Ending.GROWING:
        return "was still running"
    if trace.ending is Ending.KILLED:
        replaced = trace.of_kind(Kind.CHILD_PROCESS)["flags"] & ProcessFlag.REPLACED
        return "" if replaced.any() else "ended at once, by a signal or os._exit"
    status: int = trace.header.get("exit_status", 0)
    return ended(status) if status else ""


def _echo(text: str) -> None:
    """Print text with any names, even on a terminal that cannot show them."""
    encoding = sys.stdout.encoding or "utf-8"
    click.echo(text.encode(encoding, "backslashreplace").decode(encoding), color=True)  # as the report has it
