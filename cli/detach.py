"""``cudatool detach``: end what ``cudatool attach`` began."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import click

from cudatool.cli._command import command
from cudatool.cli._text import path_from, say
from cudatool.cli.attach import method_option, wait_option
from cudatool.recording.inject import ask
from cudatool.recording.target import Target
from cudatool.units import format_bytes

__all__ = ["detach"]


@command(examples=[("End the recording of process 4242", "cudatool detach 4242")])
@click.argument("pid", type=click.IntRange(min=1))
@method_option
@wait_option
def detach(pid: int, method: str, wait: float) -> None:
    """End the recording that `cudatool attach` began. The program goes on.

    PID is its process.
    """
    answer = ask(Target.of(pid), {"what": "end"}, wait_s=wait, method=method)
    path = answer["trace"]
    shown = path_from(os.getcwd(), path)
    say(f"Wrote {shown} ({format_bytes(Path(path).stat().st_size)})")
    say(f"Next: cudatool snapshot {shlex.quote(shown)} --html")
