"""``cudatool sanitize``: unsynchronized accesses, in a program or a trace."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import click

from cudatool.cli._options import device_option, split_workload, workload_arguments

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
@click.option("--witness", is_flag=True, help="Prove races: replay legal orders until the results differ.")
@click.option(
    "--witness-budget",
    type=click.FloatRange(0, min_open=True),
    default=60.0,
    show_default=True,
    metavar="SECONDS",
    help="For all replays together.",
)
@workload_arguments
def sanitize(
    device: str | None,
    form: str,
    checks: str,
    error_exitcode: int,
    witness: bool,
    witness_budget: float,
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
    from cudatool.sanitize import check, render_json, render_text, with_witnesses
    from cudatool.trace import reader
    from cudatool.workload import Workload

    wanted = _CHECKS if checks == "all" else tuple(filter(None, checks.split(",")))
    if unknown := [check for check in wanted if check not in _CHECKS]:
        raise UsageError(f"there is no check {unknown[0]!r}; there are {', '.join(_CHECKS)}, and all")
    target, arguments, is_module = split_workload(module, workload)
    status, tape = 0, None
    if witness:
        from cudatool.sim.tape import Tape

        tape = Tape()
    if not is_module and os.path.isfile(target) and reader.is_trace(target):
        if arguments:
            raise UsageError("a trace takes no arguments")
        if witness:
            raise UsageError("--witness needs the program: a trace does not say what kernels compute")
        trace = reader.read(target)
    else:
        if target.endswith(".ctrace"):
            reader.read(target)  # says what is wrong with it
        program = Workload(target, arguments, is_module)
        program.check()
        # Not a TemporaryDirectory: the workload's exit handlers run inside and would remove it.
        folder = tempfile.mkdtemp(prefix="cudatool-")
        try:
            path = os.path.join(folder, "sanitize.ctrace")
            in_kernels = [check for check in wanted if check not in ("race", "leak")]
            measure = "race" in wanted
            with (
                _stdout_for_the_report(),
                record(path, device=device, measure_accesses=measure, checks=in_kernels, tape=tape),
            ):
                status = program.run()
                if "leak" in wanted:
                    program.forget()
            trace = reader.read(path)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    report = check(trace, races="race" in wanted, leaked="leak" in wanted)
    if tape is not None:
        report = with_witnesses(report, trace, tape, budget_s=witness_budget)
    if form == "json":
        click.echo(render_json(report))
    else:
        color = sys.stdout.isatty() and "NO_COLOR" not in os.environ
        width = min(os.get_terminal_size().columns, 120) if sys.stdout.isatty() else 100
        click.echo(render_text(report, color=color, width=width))
    if report.unchecked_launches and trace.header.get("device_kind") == "cuda":
        click.echo("Next: the same with --device sim, which measures what kernels access", err=True)
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
