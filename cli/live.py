"""``cudatool live``: a recording while it runs."""

from __future__ import annotations

import os
import shlex
import sys
import time

import click

from cudatool.cli._command import Files, command, option
from cudatool.cli._live_text import ENDINGS, as_json, as_lines
from cudatool.cli._options import device_option, force_option, workload_arguments
from cudatool.cli._recording_files import newest
from cudatool.cli._text import path_from, say
from cudatool.cli._watched import Started, Watched, start, trace_of_process
from cudatool.errors import UsageError
from cudatool.text import json_text
from cudatool.trace.model import Ending
from cudatool.trace.reader import is_trace

try:
    from cudatool.cli._live_view import LiveView
except ModuleNotFoundError as missing:
    if (missing.name or "").partition(".")[0] != "textual":
        raise
    LiveView = None  # type: ignore[assignment, misc]  # the view is optional

__all__ = ["live"]

_LOOK_S = 0.5
_ROWS = 10  # of each kind, as text


@command(
    context_settings={"allow_interspersed_args": False},
    examples=[
        ("The newest trace in this directory", "cudatool live"),
        ("A running recording, by its process", "cudatool live 4242"),
        ("Start a program and watch it", "cudatool live --device sim train.py --epochs 1"),
        ("Text every 30 seconds, for a screen reader or a log", "cudatool live --plain --every 30 4242"),
    ],
)
@workload_arguments(".py", ".ctrace")
@option("--plain", is_flag=True, group="Output", help="Print text at intervals; also where stdout is no terminal.")
@option(
    "--json",
    "as_lines_of_json",
    is_flag=True,
    group="Output",
    help='Print one line of JSON at intervals ("schema": "cudatool.live/1"); bytes and ns.',
)
@option(
    "--every",
    type=click.FloatRange(min=0.1),
    default=5.0,
    show_default=True,
    metavar="SECONDS",
    group="Output",
    help="The interval of --plain and --json.",
)
@option(
    "-o",
    "--output",
    type=Files(".ctrace"),
    metavar="FILE",
    group="Program",
    help="The trace of WORKLOAD. Default: NAME.PID.ctrace in this directory. What it prints goes beside it, to a .log.",
)
@force_option
@device_option
def live(
    plain: bool,
    as_lines_of_json: bool,
    every: float,
    output: str | None,
    force: bool,
    device: str | None,
    workload: tuple[str, ...],
) -> None:
    """Watch a recording while it runs.

    WORKLOAD is the id of a process that `cudatool run` records, a trace, or a Python program, which is then started and
    recorded. Default: the newest trace in this directory. Shown are the memory of each device now and over the last
    five minutes, the call sites with the most live bytes, kernels and streams. Only the trace is read: the program is
    neither slowed nor stopped, and goes on if you leave.

    Exit status: that of a program that this started and that has ended (128 and the number of a signal that ended it),
    else 0.
    """

    is_text = plain or as_lines_of_json or not all(stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr))
    if not is_text and LiveView is None:
        raise UsageError("the view needs textual: pip install 'cudatool[live]', or add --plain")
    here, started = os.getcwd(), None
    path = _trace_of(workload)
    if path is not None and (output or force):
        raise UsageError("-o and -f go with a program that is started; this recording is there already")
    if path is None:
        started = start(workload, device=device, output=output, force=force)
        path = started.trace
        say(f"Started process {started.process.pid}; what it prints goes to {path_from(here, started.log)}")
        started.wait_for_trace()
    watched = Watched(path)
    try:
        if is_text:
            _print_at_intervals(watched, every, as_lines_of_json)
        else:
            view = LiveView(watched)
            view.run()
            if view.failure is not None:
                raise view.failure
            click.echo("\n".join(as_lines(watched, watched.picture(most=_ROWS))))
    finally:
        _say_end(watched, started, os.path.abspath(path), here)
        watched.close()
    if started is not None and watched.ending is not Ending.GROWING:
        status = started.process.wait()
        sys.exit(status if status >= 0 else 128 - status)  # of a signal, as a shell has it


def _trace_of(words: tuple[str, ...]) -> str | None:
    """Return the trace that the words name, None if they are a program."""
    if not words:
        return str(newest())
    first, *more = words
    is_process = first.isdecimal() and not os.path.lexists(first)
    if not (is_process or first.endswith(".ctrace") or (os.path.isfile(first) and is_trace(first))):
        return None
    if more:
        raise UsageError(f"only a program takes arguments; write options first: cudatool live {' '.join(more)} {first}")
    return trace_of_process(int(first)) if is_process else first


def _print_at_intervals(watched: Watched, every: float, as_lines_of_json: bool) -> None:
    """Print what there is at once, at intervals, and at the end."""
    is_first = True
    while True:
        watched.catch_up()
        ended = watched.ending is not Ending.GROWING
        picture = watched.picture(most=_ROWS)
        if as_lines_of_json:
            click.echo(json_text(as_json(watched, picture), indent=None))
        else:
            click.echo("\n".join([*([] if is_first else [""]), *as_lines(watched, picture)]))
        sys.stdout.flush()
        if ended:
            return
        is_first = False
        watched.state.mark()
        until = time.monotonic() + every
        while watched.ending is Ending.GROWING and (rest := until - time.monotonic()) > 0:
            time.sleep(min(_LOOK_S, rest))
            watched.advance(_LOOK_S)


def _say_end(watched: Watched, started: Started | None, path: str, here: str) -> None:
    shown = path_from(here, path)
    if watched.ending is Ending.GROWING:
        goes_on = f"process {started.process.pid} goes on" if started is not None else "the recording goes on"
        say(f"{goes_on}: {shown}")
        return
    why = f" ({watched.damage})" if watched.damage else ""
    say(f"{ENDINGS[watched.ending]}{why}: {shown}")
    say(f"Next: cudatool snapshot {shlex.quote(shown)}")
