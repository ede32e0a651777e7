"""``cudatool attach``: record a program that is running."""

from __future__ import annotations

import os
import shlex

import click

from cudatool.cli._command import command, option
from cudatool.cli._options import device_option, force_option, no_stacks_option, trace_option
from cudatool.cli._text import path_from, say
from cudatool.collect.levels import Level
from cudatool.recording.inject import METHODS, ask
from cudatool.recording.target import Target
from cudatool.text import printable
from cudatool.trace.reader import facts
from cudatool.units import format_bytes

__all__ = ["attach", "method_option", "wait_option"]

method_option = option(
    "--method",
    type=click.Choice(["auto", *METHODS]),
    default="auto",
    show_default=True,
    group="Process",
    help="How to ask the process: remote-exec is Python's own way, from 3.14 on and between equal versions; "
    "debuggers ask any. cuda-gdb is used only if it is named.",
)
wait_option = option(
    "--wait",
    type=click.FloatRange(min=0.1),
    default=10.0,
    show_default=True,
    metavar="SECONDS",
    group="Process",
    help="How long the program's main thread may take to run Python code; then the request is withdrawn.",
)


@command(examples=[("Record process 4242, which is running", "cudatool attach 4242")])
@click.argument("pid", type=click.IntRange(min=1))
@trace_option
@force_option
@device_option
@no_stacks_option
@option(
    "--level",
    type=click.Choice([str(level) for level in Level]),
    default=str(Level.KERNELS),
    show_default=True,
    group="Recording",
    help="How much to record of what a GPU does, as for `cudatool run`.",
)
@method_option
@wait_option
def attach(
    pid: int,
    output: str | None,
    force: bool,
    device: str | None,
    no_stacks: bool,
    level: str,
    method: str,
    wait: float,
) -> None:
    """Begin to record a Python program that is running.

    PID is its process, which must be able to import cudatool. The recording goes on until `cudatool detach PID`, or the
    end of the program. It begins with what cudatool's and PyTorch's allocators and CuPy's arrays hold at that moment;
    on the software device, with all memory. Processes that the program starts are not recorded.
    """
    target = Target.of(pid)
    here = os.getcwd()
    path = os.path.abspath(output or f"{target.name}.{pid}.ctrace")
    shown = path_from(here, path)
    options = {"device": device, "with_stacks": not no_stacks, "level": level, "force": force}
    answer = ask(target, {"what": "begin", "path": path, "options": options}, wait_s=wait, method=method)
    said = facts(answer["trace"])
    say(f"Recording process {pid} to {shown}")
    if said.get("prior_bytes"):
        say(f"The trace begins with {format_bytes(said['prior_bytes'])} that the program held already")
    for unknown in said.get("unknown_before", ()):
        say(f"Not in the trace: {printable(unknown)}")
    say(f"Next: cudatool live {shlex.quote(shown)}, then cudatool detach {pid}")
