"""The command line: parse, call the library, print. One file per command.

Exit status: 0 fine, 1 findings, 2 it could not be done or (``sanitize``) nothing was checked, 3 (``sanitize``) the
workload itself failed, 70 an internal error, 130 interrupted. ``run`` exits with the workload's own status.
"""

from __future__ import annotations

import errno
import importlib
import io
import os
import re
import shutil
import sys
import traceback
from typing import Any

import click

from cudatool.cli._text import say
from cudatool.config import COMPLETE, DEBUG
from cudatool.errors import CudatoolError, OutputError, did_you_mean
from cudatool.files import open_standard_files
from cudatool.text import QUOTED, shortened

__all__ = ["group", "main"]

_INTERNAL_ERROR = 70  # EX_SOFTWARE of sysexits.h

_COMMANDS = {
    # name -> first line of its help; the command is the function of that name in cudatool.cli.<name>
    "attach": "Begin to record a Python program that is running.",
    "detach": "End the recording that attach began.",
    "devices": "List the devices that programs can use here.",
    "diff": "Compare what two traces or snapshots hold at their peaks.",
    "export": "Write a trace for other programs: PyTorch's viewer, Perfetto, SQLite, or Parquet.",
    "fleet": "Find the ranks of a run that differ from the others.",
    "leaks": "Find call sites that hold more memory after every step.",
    "live": "Watch a recording while it runs.",
    "oom": "Explain why memory ran out.",
    "ptx": "Show what the kernels of a PTX or CUDA C++ file do.",
    "query": "Ask a data set of many traces a question in SQL.",
    "replay": "Run recorded requests through the allocator again: a check, or a what-if.",
    "run": "Run a Python program and record what it does on the device.",
    "sanitize": "Find unsynchronized accesses in a program or a recorded trace.",
    "schema": "Print the JSON schema of what a command prints with --json.",
    "snapshot": "Show where the memory went.",
}
_EXAMPLES = (
    "cudatool run train.py        # record it: what did it do on the device?",
    "cudatool snapshot --open     # where did the memory go?",
    "cudatool sanitize train.py   # which accesses race?",
)


_LONGEST = 1000  # characters of a line: paths may have about a hundred
_LONG_WORD = re.compile(rf"[^\s/]{{{QUOTED + 1},}}")  # that click quotes in full


class _ReaderGoneError(OutputError):
    """The reader of our output has closed the pipe, as `| head` does: print no error."""


class _LazyGroup(click.Group):
    """Imports a command's module when the command is used, so that help and completion stay quick."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        command = getattr(importlib.import_module(f"cudatool.cli.{cmd_name}"), cmd_name)
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0] if args else ""
        if name and not name.startswith("-") and name not in _COMMANDS and not ctx.resilient_parsing:
            ctx.fail(f"There is no command {name!r}. {_suggestion(name)}".rstrip())
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        # Here, since click takes a broken pipe for status 1, which are findings.
        try:
            return super().invoke(ctx)
        except BrokenPipeError as error:
            raise _ReaderGoneError from error
        except OSError as error:
            # Only os.getcwd names no file where one is missing: the directory that the command runs in is gone.
            nameless = "the current directory" if error.errno == errno.ENOENT else "cannot write the output"
            what = error.filename or nameless
            raise OutputError(f"{what}: {error.strerror or error}") from error

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(_COMMANDS.items()))

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Examples"):
            formatter.write("".join(f"  $ {line}\n" for line in _EXAMPLES))


def _suggestion(name: str) -> str:
    """Return the likely meaning of an unknown command."""
    if name.endswith(".py"):
        return f"Did you mean 'cudatool run {name}'?"
    if name.endswith((".ctrace", ".pickle", ".pkl")):
        return f"Did you mean 'cudatool snapshot {name}'?"
    meant = did_you_mean(name, _COMMANDS).capitalize()
    return meant or (f"Did you mean 'cudatool run {name}'?" if shutil.which(name) else "")


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="cudatool")
def group() -> None:
    """Profiling and memory diagnostics for CUDA programs in Python, with and without a GPU."""


def _say(message: str) -> None:
    """Print a message, perhaps of several lines, such as a compiler's log; its quotes may be untrusted text."""
    for line in message.split("\n"):
        say(shortened(line, _LONGEST))


def main() -> None:
    """Run the command line; the one place where errors are printed."""
    open_standard_files()
    if COMPLETE in os.environ:
        from cudatool.cli._completion import register  # only a shell needs it

        register()
    try:
        status = group.main(prog_name="cudatool", standalone_mode=False)
    except click.ClickException as error:
        message = io.StringIO()
        error.show(message)
        _say(_LONG_WORD.sub(lambda word: shortened(word[0], QUOTED), message.getvalue().rstrip("\n")))
        status = error.exit_code
    except click.Abort:
        _say("cudatool: interrupted")
        status = 130
    except CudatoolError as error:
        status = 2
        if isinstance(error, OutputError):
            # What could not be written to stdout must not be tried again at exit.
            _discard_stdout()
        if not isinstance(error, _ReaderGoneError):
            _say(f"cudatool: error: {error}")
    except KeyboardInterrupt:
        _say("cudatool: interrupted")
        status = 130
    except MemoryError:  # a limit of the machine, or of the program itself
        _say("cudatool: error: out of memory")
        status = 2
    except Exception as error:  # our own bug, not a finding
        status = _INTERNAL_ERROR
        _print_internal_error(error)
    sys.exit(status)


def _discard_stdout() -> None:
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    except OSError:  # no file descriptor is left: Python would print several lines about the failed write
        sys.stdout = None


def _print_internal_error(error: Exception) -> None:
    """Print one line, and the traceback if ``CUDATOOL_DEBUG`` is set."""
    if DEBUG.is_on():
        traceback.print_exception(error)
    at = traceback.extract_tb(error.__traceback__)[-1:]
    place = f" ({os.path.basename(at[0].filename)}:{at[0].lineno})" if at else ""
    text = shortened(" ".join(f"{type(error).__name__}: {error}".split()), 120)
    _say(
        f"cudatool: internal error: {text}{place}; this is a bug in cudatool: please report it to the project's issue "
        "tracker, with what CUDATOOL_DEBUG=1 prints"
    )
