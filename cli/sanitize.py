"""``cudatool sanitize``: unsynchronized accesses, in a program or a trace."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from cudatool.cli._options import device_option, split_workload, workload_arguments
from cudatool.cli._proof import Proof, proof_options

if TYPE_CHECKING:
    from cudatool.sanitize import Report

__all__ = ["sanitize"]

_CHECKS = ("race", "memcheck", "initcheck", "racecheck", "synccheck", "leak")
_DEFAULT = ("race", "memcheck", "synccheck")


@click.command(context_settings={"allow_interspersed_args": False})
@device_option
@click.option(
    "--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True, help="Of the report."
)
@click.option("--json", "form", flag_value="json", help="Short for --format json.")
@click.option(
    "--checks",
    default=",".join(_DEFAULT),
    show_default=True,
    metavar="LIST",
    help=f"What to look for, separated by commas: {', '.join(_CHECKS)}, or all.",
)
@click.option(
    "--error-exitcode", type=click.IntRange(0, 255), default=1, show_default=True, help="Exit status for findings."
)
@proof_options
@workload_arguments
def sanitize(
    device: str | None,
    form: str,
    checks: str,
    error_exitcode: int,
    proof: Proof,
    module: str | None,
    workload: tuple[str, ...],
) -> None:
    """Find unsynchronized accesses and memory errors in a program or a recorded trace.

    Two accesses to the same bytes, at least one of them a write, that CUDA's rules leave in no order are reported
    with both stacks, whatever order they happened to run in. On the software device the bytes that kernels touch are
    measured. On a GPU those of cudatool's kernels are inferred from their PTX; the report says what was not checked.

    On the software device also: memcheck (accesses out of bounds, misaligned or after a free, wrong frees and copies),
    initcheck (reads of memory never written), racecheck (threads of one kernel that race), synccheck (barriers that
    not all threads come to), leak (memory never given back). The default are those that cost little.

    What the program prints goes to stderr: stdout has the report alone.

    Exit status: 0 clean, 1 findings (or --error-exitcode), 2 usage, 3 the workload itself failed.
    """
    from cudatool.errors import UsageError
    from cudatool.recording import record
    from cudatool.sanitize import check
    from cudatool.trace import reader
    from cudatool.workload import Workload

    wanted = _CHECKS if checks == "all" else tuple(filter(None, checks.split(",")))
    if unknown := [check for check in wanted if check not in _CHECKS]:
        raise UsageError(f"there is no check {unknown[0]!r}; there are {', '.join(_CHECKS)}, and all")
    target, arguments, is_module = split_workload(module, workload)
    status = 0
    if not is_module and os.path.isfile(target) and reader.is_trace(target):
        if arguments:
            raise UsageError("a trace takes no arguments")
        proof.refuse_trace()
        trace = reader.read(target)
    else:
        if target.endswith(".ctrace"):
            reader.read(target)  # says what is wrong with it
        program = Workload(target, arguments, is_module)
        program.check()
        if proof.explores:
            report = proof.explored(device, checks, module, workload)
            failed = next((run.status for run in report.schedules if run.status), 0)
            _finish(report, form, failed, error_exitcode)
            return
        # Not a TemporaryDirectory: the workload's exit handlers run inside and would remove it.
        folder = tempfile.mkdtemp(prefix="cudatool-")
        try:
            path = os.path.join(folder, "sanitize.ctrace")
            in_kernels = [check for check in wanted if check not in ("race", "leak")]
            measure = "race" in wanted
            with (
                _stdout_for_the_report(),
                record(path, device=device, measure_accesses=measure, checks=in_kernels, tape=proof.tape),
            ):
                status = program.run()
                if "leak" in wanted:
                    program.forget()
            trace = reader.read(path)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    report = proof.proven(check(trace, races="race" in wanted, leaked="leak" in wanted), trace)
    if report.unchecked_launches and trace.header.get("device_kind") == "cuda":
        click.echo("Next: the same with --device sim, which measures what kernels access", err=True)
    _finish(report, form, status, error_exitcode)


def _finish(report: Report, form: str, status: int, error_exitcode: int) -> None:
    """Print the report and exit, unless all is well; `status` is the workload's."""
    from cudatool.sanitize import render_json, render_text

    if form == "json":
        click.echo(render_json(report))
    else:
        color = sys.stdout.isatty() and "NO_COLOR" not in os.environ
        width = min(os.get_terminal_size().columns, 120) if sys.stdout.isatty() else 100
        click.echo(render_text(report, color=color, width=width))
    if status:
        click.echo(f"cudatool: the workload itself failed with exit status {status}", err=True)
        sys.exit(3)
    if report.findings or report.on_device:
        sys.exit(error_exitcode)


@contextmanager
def _stdout_for_the_report() -> Iterator[None]:
    """Send to stderr what this process and its children write to stdout."""
    sys.stdout.flush()
    saved = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(saved, 1)
        os.close(saved)
