"""``cudatool oom``: why memory ran out."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from time import process_time
from typing import TYPE_CHECKING

from cudatool import analyze
from cudatool.analyze.settings_advice import NoAdvice
from cudatool.cli._command import command, option
from cudatool.cli._oom_text import print_failure
from cudatool.cli._options import size_of, source_argument
from cudatool.cli._part import read_family
from cudatool.cli._recording_files import newest
from cudatool.cli._sources import say_notes
from cudatool.cli._text import echo_json, results, say
from cudatool.errors import UsageError
from cudatool.progress import step
from cudatool.trace.family import process_name

if TYPE_CHECKING:
    from cudatool.analyze import Failure
    from cudatool.trace.model import Trace

__all__ = ["oom"]

_LONGEST = 1_000_000  # events of a recording whose settings are replayed within a budget: about 3 s for the first one


@command(
    examples=[
        ("The newest trace in this directory", "cudatool oom"),
        ("A snapshot that PyTorch's out-of-memory observer wrote", "cudatool oom oom.pickle"),
    ],
)
@source_argument()
@option("--json", "as_json", is_flag=True, help='Print JSON ("schema": "cudatool.oom/1"); bytes and ns.')
@option("--memory", metavar="SIZE", help="Memory of the GPU, such as 80GiB, if the file does not have it.")
@option(
    "--budget",
    type=float,
    metavar="SECONDS",
    help="Processor time for trying other allocator settings. Default: until all that matter are tried.",
)
def oom(source: Path | None, as_json: bool, memory: str | None, budget: float | None) -> None:
    """Explain why memory ran out: what was requested, who held the memory, why the free memory did not serve.

    SOURCE is a trace that `cudatool run` wrote, or a pickle from torch.cuda.memory._dump_snapshot(). Default: the
    newest trace in this directory. The first failed allocation of each process is explained, and other allocator
    settings are replayed up to it. `cudatool run` does this by itself when memory runs out.

    Exit status: 0 explained, 1 no allocation failed, 2 the file cannot be read.
    """

    size = size_of(memory, "--memory")
    if budget is not None and budget < 0:
        raise UsageError("--budget must not be negative")
    source = source or newest()
    left = _Budget(budget)
    found: list[tuple[Trace, Failure]] = []
    with step("cudatool oom"):  # progress shows two seconds from here
        for trace in read_family(source, None, None):
            if not as_json:
                say_notes(trace)
            is_long = budget is not None and len(trace.records) > _LONGEST
            explained = analyze.failure(trace, total=size, enough=(lambda: True) if is_long else left.is_spent)
            if explained is not None:
                found.append((trace, explained))
    if as_json:
        rows = [
            {"source": trace.source, "process": process_name(trace), **failure.as_dict()} for trace, failure in found
        ]
        echo_json({"schema": "cudatool.oom/1", "failures": rows})
    else:
        console = results()
        for number, (trace, failure) in enumerate(found):
            if number:
                console.print()
            if len(found) > 1:
                console.rule(process_name(trace), align="left")
            print_failure(console, trace, failure)
        advice = [failure.settings for _, failure in found]
        if not found:
            say(f"No allocation failed in {source}.")
        elif any(tried is not None and (tried.untried or tried.withheld is NoAdvice.TOO_LONG) for tried in advice):
            say(f"Next: cudatool oom {shlex.quote(str(source))}   (tries the other settings, too)")
    if not found:
        sys.exit(1)


class _Budget:
    """Processor time, which is spent once another setting would exceed it if it took as long as the longest so far."""

    def __init__(self, seconds: float | None) -> None:
        self._ends = None if seconds is None else process_time() + seconds
        self._asked: float | None = None  # when it was asked for last
        self._longest = 0.0

    def is_spent(self) -> bool:
        """Return whether not to try another setting; asked before each."""
        if self._ends is None:
            return False
        now = process_time()
        if self._asked is not None:
            self._longest = max(self._longest, now - self._asked)
        self._asked = now
        return now + self._longest >= self._ends
