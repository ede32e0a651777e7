"""Jupyter and IPython: ``%load_ext cudatool``, then ``%%cudatool run``, ``snapshot`` or ``sanitize`` at a cell's top.

The rest of the cell runs in the notebook's namespace, as it would without the line, and its result, or its exception,
is its own. What the commands of the same names would print is shown below it; the value is an object with the trace.
"""

from __future__ import annotations

import argparse
import ast
import os
import shlex
import tempfile
from collections.abc import Callable
from functools import cached_property, partial
from importlib import import_module
from inspect import CO_COROUTINE
from pathlib import Path
from time import process_time
from typing import TYPE_CHECKING, Any, Final, NoReturn

from cudatool import analyze, sanitize, viz
from cudatool.cli._diff_text import print_diff
from cudatool.cli._oom_text import print_failure
from cudatool.cli._run_text import print_summary
from cudatool.cli._snapshot_text import print_report
from cudatool.cli._sources import read_trace
from cudatool.cli._text import html_of, text_of
from cudatool.config import DEFAULT_CHECKS
from cudatool.errors import CudatoolError, UsageError
from cudatool.recording import record
from cudatool.sanitize import parse_checks, render_text
from cudatool.trace.frames import cell_name
from cudatool.trace.reader import read

if TYPE_CHECKING:
    from rich.console import Console

    from cudatool.analyze import Diff
    from cudatool.trace.model import Trace

__all__ = ["Comparison", "Recording", "diff", "load", "snapshot"]

_WIDTH: Final = 110  # columns of what is shown


class Recording:
    """A trace or a snapshot, shown as ``cudatool snapshot`` prints it; or as ``run`` or ``sanitize`` do.

    Attributes
    ----------
    trace
        The :class:`~cudatool.trace.Trace`.
    findings
        What ``sanitize`` found; None for the others.
    """

    def __init__(self, trace: Trace, how: str = "snapshot", checks: tuple[str, ...] = ()) -> None:
        self.trace = trace
        self._how = how
        self.findings = sanitize.check(trace, checks) if how == "sanitize" else None
        self._checks = checks
        self._folder: Any = None  # goes with this object, if the cell named no file

    @cached_property
    def report(self) -> analyze.MemoryReport:
        """The analysis that is shown."""
        return analyze.report(self.trace)

    @property
    def path(self) -> str:
        """The file of the trace."""
        return self.trace.source

    def page(self, path: str | os.PathLike[str]) -> Path:
        """Write the page that ``--html`` writes, and return its path.

        Raises
        ------
        OutputError
            It cannot be written.
        """
        viz.write_report(self.report, Path(path), self.findings)
        return Path(path)

    def _print(self, console: Console) -> None:
        if self.findings is not None:
            run = sanitize.ReportContext(os.getcwd(), self._checks)
            for line in render_text(self.findings, run, width=_WIDTH).splitlines():
                console.print(line, markup=False, soft_wrap=True)
        elif self._how == "run":
            print_summary(console, self.trace)
        else:
            print_report(console, self.report)
        failure = None if self.findings is not None else analyze.failure(self.trace, enough=_Budget())
        if failure is not None:
            console.print()
            print_failure(console, self.trace, failure)

    def _repr_html_(self) -> str:
        return html_of(self._print, _WIDTH)

    def __repr__(self) -> str:
        return text_of(self._print, _WIDTH)


class _Budget:
    """Is True once a second of processor time has been spent since it was made."""

    def __init__(self) -> None:
        self._ends = process_time() + 1.0

    def __call__(self) -> bool:
        return process_time() >= self._ends


class Comparison:
    """Two peaks, call site by call site, shown as ``cudatool diff`` prints them.

    Attributes
    ----------
    devices
        A :class:`~cudatool.analyze.Diff` for each device that either has.
    """

    def __init__(self, devices: tuple[Diff, ...]) -> None:
        self.devices = devices

    def _print(self, console: Console) -> None:
        print_diff(console, self.devices)

    def _repr_html_(self) -> str:
        return html_of(self._print, _WIDTH)

    def __repr__(self) -> str:
        return text_of(self._print, _WIDTH)


def snapshot(path: str | os.PathLike[str]) -> Recording:
    """Return the trace or snapshot in a file, to be shown.

    Raises
    ------
    UsageError, FileFormatError
        It cannot be read.
    """
    return Recording(_with_names_of_cells(read_trace(Path(path))))


def diff(before: str | os.PathLike[str] | Recording, after: str | os.PathLike[str] | Recording) -> Comparison:
    """Return what two recordings, or files, hold at their peaks, call site by call site, to be shown.

    Raises
    ------
    UsageError, FileFormatError
        One cannot be read.
    """
    old, new = (one if isinstance(one, Recording) else snapshot(one) for one in (before, after))
    return Comparison(analyze.diff(old.trace, new.trace))


def load(shell: Any) -> None:
    """Give an IPython shell the magic; ``%load_ext cudatool`` calls it."""
    shell.register_magic_function(partial(_magic, shell), "cell", "cudatool")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"%%cudatool: {message}")

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        raise UsageError(f"%%cudatool: {self.format_usage().strip()}")


def _parser() -> _Parser:
    parser = _Parser(prog="%%cudatool", add_help=False, allow_abbrev=False)
    parser.add_argument("command", choices=("run", "snapshot", "sanitize"))
    parser.add_argument("-o", "--output", metavar="FILE")
    parser.add_argument("-f", "--force", action="store_true")
    parser.add_argument("--device")
    parser.add_argument("--checks", default=DEFAULT_CHECKS)
    return parser


def _magic(shell: Any, line: str, cell: str) -> Recording | None:
    """Run the rest of the cell, and show what it did.

    ::

        %%cudatool run|snapshot|sanitize [-o FILE] [-f] [--device DEVICE] [--checks LIST]
    """
    __tracebackhide__ = True  # IPython leaves such frames out
    OneLine = import_module("IPython.core.error").UsageError
    try:
        given = _parser().parse_args(shlex.split(line))
        checks = parse_checks(given.checks) if given.command == "sanitize" else ()
        folder = None if given.output else tempfile.TemporaryDirectory(prefix="cudatool-")
        path = os.path.abspath(given.output) if folder is None else os.path.join(folder.name, "cell.ctrace")
        run = _compiled(shell, cell)
        recording = record(
            path,
            device=given.device,
            force=given.force,
            measure_accesses="race" in checks,
            checks=[check for check in checks if check not in ("race", "leak")],
        )
        recording.__enter__()
    except (CudatoolError, ValueError) as error:
        raise OneLine(str(error)) from None
    failure = ""
    try:
        run()
    except BaseException as error:
        failure = f"raised {type(error).__name__}"
        raise
    finally:
        recording.__exit__(None, None, None)
        shown = Recording(_with_names_of_cells(read(path)), given.command, checks)
        shown._folder = folder
        if failure:  # the exception goes on, and the cell has no value
            if shown.findings is not None:
                shown.findings = shown.findings.of_failed(failure)
            import_module("IPython.display").display(shown)
    return shown


def _compiled(shell: Any, cell: str) -> Callable[[], None]:
    """Return a function that runs a cell in the notebook's namespace, as IPython would.

    A last expression is shown by the shell's own hook.

    Raises
    ------
    UsageError
        The cell awaits: a magic is called while the notebook's event loop runs, and cannot run it.
    """
    source = f"\n{shell.transform_cell(cell)}"  # the line of the magic is the first one that the user sees
    name = shell.compile.cache(source, shell.displayhook.prompt_count, raw_code=f"\n{cell}")
    tree = shell.compile.ast_parse(source, filename=name)
    tree = shell.transform_ast(tree)
    if compile(tree, name, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True).co_flags & CO_COROUTINE:
        raise UsageError(
            "%%cudatool cannot run a cell that awaits; record a part of it: with cudatool.record('cell.ctrace'): ..."
        )
    last: Any = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    code = shell.compile(tree, name, "exec")
    shows = None if last is None else shell.compile(ast.Interactive([last]), name, "single")

    def run() -> None:
        __tracebackhide__ = True
        exec(code, shell.user_ns)
        if shows is not None and not source.rstrip().endswith(";"):
            exec(shows, shell.user_ns)
        elif shows is not None:
            exec(shell.compile(ast.Module([last], []), name, "exec"), shell.user_ns)

    return run


def _with_names_of_cells(trace: Trace) -> Trace:
    """Return a trace whose frames name this notebook's cells as tracebacks do, ``In[3]``, not their temporary files."""
    trace.frames[:] = [frame._replace(file=cell_name(frame.file)) for frame in trace.frames]
    return trace
