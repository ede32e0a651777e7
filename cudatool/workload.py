"""Running a user's program inside this process as ``python`` would run it."""

from __future__ import annotations

import atexit
import os
import re
import shlex
import shutil
import signal
import sys
import textwrap
import threading
import zipimport
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from types import CodeType, ModuleType, TracebackType
from typing import Final

from cudatool.errors import UsageError, did_you_mean
from cudatool.files import near_name
from cudatool.text import quoted

__all__ = ["Start", "Workload", "signals_undone"]

_PYTHON: Final = re.compile(r"python(\d+(\.\d+)?)?")
_LAUNCHERS: Final = {
    # no Python programs, which start the program in other processes -> how cudatool runs in each of those
    "mpirun": "mpirun [OPTIONS] python -m cudatool {command}",
    "mpiexec": "mpiexec [OPTIONS] python -m cudatool {command}",
    "srun": "srun [OPTIONS] python -m cudatool {command}",
    **{
        name: f"{name} run python -m cudatool {{command}}"
        for name in ("conda", "hatch", "mamba", "pdm", "pipenv", "pixi", "poetry", "uv")
    },
}

_TIMERS: Final = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)

_NO_SESSION: Final = "cudatool has no interactive session; name a Python program"

_replaced: list[object] = []  # what programs left as sys.stdout: without a reference it would close what it wraps


class Start(StrEnum):
    """How ``python`` would be given the program."""

    SCRIPT = "script"
    MODULE = "module"
    CODE = "code"
    STDIN = "stdin"


@dataclass(frozen=True, slots=True)
class Workload:
    """A program and its arguments.

    That is a script, or a directory or zip file with a ``__main__.py``; a module as after ``python -m``; code as after
    ``python -c``; or ``-``, the code that standard input has.
    """

    target: str
    arguments: tuple[str, ...] = ()
    start: Start = Start.SCRIPT

    @staticmethod
    def parse(words: Sequence[str], command: str = "run") -> Workload:
        """Return the program that the words of a command line start.

        They are what stands after ``python``: a script, ``-m MODULE``, ``-c CODE`` or ``-``, and arguments. ``python``
        itself may stand before. The name of a command, such as ``pytest``, stands for the Python script that the shell
        would run. `command` is cudatool's, for messages.

        Raises
        ------
        UsageError
            There is nothing to run here, or it is not Python's; the message says what to type.
        """
        if not words:
            raise UsageError("name a Python program to run, a module with -m, or code with -c")
        first, *rest = words
        if first in ("-m", "-c"):
            if not rest:
                raise UsageError("name a module to run after -m" if first == "-m" else "-c needs code to run")
            return Workload(rest[0], tuple(rest[1:]), Start.MODULE if first == "-m" else Start.CODE)
        if first == "-":
            return Workload(first, tuple(rest), Start.STDIN)
        is_python = _PYTHON.fullmatch(os.path.basename(first)) is not None
        if os.path.dirname(first) or os.path.lexists(first):
            if is_python and os.path.isfile(first) and os.access(first, os.X_OK):
                return _after_python(first, rest, command)
            return Workload(first, tuple(rest))
        if is_python:
            return _after_python(first, rest, command)
        if first in _LAUNCHERS:
            raise _launcher(first, command)
        return Workload(_script_of(first) or first, tuple(rest))

    @property
    def name(self) -> str:
        """A short name for files made from this run."""
        if self.start in (Start.CODE, Start.STDIN):
            return str(self.start)
        if self.start is Start.MODULE:
            return self.target.rpartition(".")[2]
        return os.path.splitext(os.path.basename(os.path.abspath(self.target)))[0]

    @property
    def files(self) -> tuple[str, ...]:
        """The program's own files, those that are known before it runs."""
        if self.start is Start.SCRIPT:
            main = os.path.join(self.target, "__main__.py")
            return (main,) if os.path.isfile(main) else (self.target,)
        origin = self._origin() if self.start is Start.MODULE else None
        if not origin:
            return ()
        main = os.path.join(os.path.dirname(origin), "__main__.py")
        return (origin, main) if os.path.basename(origin) == "__init__.py" else (origin,)

    def check(self) -> None:
        """Raise :class:`UsageError` if there is nothing to run."""
        if self.start is Start.MODULE:
            if self._origin() is None:
                raise UsageError(f"there is no module {quoted(self.target)}")
        elif self.start is Start.STDIN:
            if sys.stdin is None or sys.stdin.isatty():
                raise UsageError(_NO_SESSION)
        elif self.start is Start.SCRIPT and not os.path.isfile(self.target):
            if os.path.isdir(self.target):
                if self._is_on_path():
                    return
                raise UsageError(f"{self.target} is a directory without a __main__.py; name a Python program")
            if os.path.exists(self.target):
                raise UsageError(f"{self.target} is not a file; name a Python program")
            close = near_name(self.target, (".py",)) or _near_command(self.target)
            raise UsageError(f"{self.target} does not exist; {close or 'name a Python program'}")

    def _is_on_path(self) -> bool:
        """Return whether Python imports ``__main__`` from the target, a directory or zip file, in place of reading it.

        A zip file may have a first line for the shell, and any name.
        """
        if os.path.isdir(self.target):
            return os.path.isfile(os.path.join(self.target, "__main__.py"))
        try:
            return zipimport.zipimporter(self.target).find_spec("__main__") is not None
        except zipimport.ZipImportError:
            return False

    def _origin(self) -> str | None:
        """Return the file of the module, an empty string if it has none, None if there is no such module."""
        import importlib.util

        sys.path.insert(0, os.getcwd())
        try:
            found = importlib.util.find_spec(self.target)
        except (ImportError, ValueError):
            found = None
        finally:
            del sys.path[0]
        return None if found is None else found.origin or ""

    def run(self) -> int:
        """Run the program and return its exit status.

        ``sys.argv``, ``sys.path[0]`` and ``__main__`` are what plain Python would give it, uncaught exceptions are
        reported through ``sys.excepthook`` without our frames, and its other threads and exit handlers have ended
        when this returns. Children that it forks do not return. ``sys.path``, ``sys.stdout`` and ``sys.stderr`` are
        again what they were, the latter None if the program closed them.
        """
        process, ours, path = os.getpid(), (sys.stdout, sys.stderr), [*sys.path]
        with signals_undone():
            status = self._run_to_its_end()
        if os.getpid() != process:
            os._exit(status)  # a child that the program forked: what follows is its parent's
        sys.path = path  # what is imported from here on is ours, not what lies beside the program under the same name
        _replaced.extend((sys.stdout, sys.stderr))
        sys.stdout, sys.stderr = (stream if stream and not stream.closed else None for stream in ours)
        return status

    def _run_to_its_end(self) -> int:
        status = 0
        try:
            match self.start:
                case Start.SCRIPT:
                    self._run_script()
                case Start.MODULE:
                    self._run_module()
                case Start.CODE:
                    self._run_code("-c", self.target, "<string>")
                case Start.STDIN:
                    self._run_code("-", sys.stdin.buffer.read(), "<stdin>")
        except SystemExit as leaving:
            status = _exit_status(leaving.code)
        except BaseException as error:
            status = _report(error)
        # What the interpreter does at its own end, early enough to be recorded: first it lets the threads of executors
        # go (threading._register_atexit), which would otherwise be waited for for ever.
        try:
            for leave in reversed(getattr(threading, "_threading_atexits", [])):
                leave()
            for thread in threading.enumerate():
                if thread is not threading.current_thread() and not thread.daemon:
                    thread.join()
            atexit._run_exitfuncs()
        except Exception as error:  # of a signal handler, say
            status = _report(error)
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except Exception:
                pass  # closed or replaced by the program
        return status

    def _run_script(self) -> None:
        if self._is_on_path():
            self._run_from_path()
            return
        file = os.path.abspath(self.target)
        main = ModuleType("__main__")
        main.__dict__.update(__file__=file, __builtins__=__builtins__, __cached__=None)
        sys.modules["__main__"] = main
        sys.argv = [self.target, *self.arguments]
        # As plain Python: the directory of the script, links resolved, in front of the path.
        sys.path[0] = os.path.dirname(os.path.realpath(self.target))
        with open(file, "rb") as source:
            code: CodeType = compile(source.read(), file, "exec", dont_inherit=True)
        exec(code, main.__dict__)

    def _run_from_path(self) -> None:
        import runpy

        sys.modules["__main__"] = ModuleType("__main__")
        sys.argv = [self.target, *self.arguments]
        sys.path[0] = os.path.join(os.getcwd(), self.target)
        runpy._run_module_as_main("__main__", False)  # type: ignore[attr-defined]

    def _run_module(self) -> None:
        import runpy

        sys.argv = ["-m", *self.arguments]
        sys.path[0] = os.getcwd()
        # What the interpreter itself calls for `python -m`; run_module() would report errors differently.
        runpy._run_module_as_main(self.target)  # type: ignore[attr-defined]

    def _run_code(self, name: str, source: str | bytes, file: str) -> None:
        main = ModuleType("__main__")
        main.__dict__["__builtins__"] = __builtins__
        sys.modules["__main__"] = main
        sys.argv = [name, *self.arguments]
        sys.path[0] = ""
        if isinstance(source, bytes):
            main.__dict__.update(__file__=file, __cached__=None)  # as for a file of that name
        else:
            if sys.version_info >= (3, 14):
                source = textwrap.dedent(source)
            if sys.version_info >= (3, 13):  # since then tracebacks show its lines
                import linecache

                linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
        exec(compile(source, file, "exec", dont_inherit=True), main.__dict__)


@contextmanager
def signals_undone() -> Iterator[None]:
    """Undo a program's handlers of signals and its timers, which would interrupt what comes after it."""
    timers = [timer for timer in _TIMERS if not any(signal.getitimer(timer))]
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():  # no other can set any
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, handlers)
            try:
                for timer in timers:
                    signal.setitimer(timer, 0)
                for number, handler in handlers.items():
                    if handler is not None and signal.getsignal(number) != handler:
                        signal.signal(number, signal.SIG_IGN)  # what came meanwhile is forgotten
                        signal.signal(number, handler)
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _report(error: BaseException) -> int:
    """Report an uncaught exception as the interpreter does, and return the exit status of it."""
    error.__traceback__ = _user_frames(error.__traceback__)
    try:
        sys.excepthook(type(error), error, error.__traceback__)
    except SystemExit as leaving:
        return _exit_status(leaving.code)
    except BaseException as failure:  # the hook is the program's
        failure.__traceback__ = _user_frames(failure.__traceback__)
        failure.__context__ = None
        for line, one in (("Error in sys.excepthook:", failure), ("\nOriginal exception was:", error)):
            if sys.stderr is not None:
                sys.stderr.write(f"{line}\n")
            sys.__excepthook__(type(one), one, one.__traceback__)
    return 130 if isinstance(error, KeyboardInterrupt) else 1


def _launcher(name: str, command: str) -> UsageError:
    there = _LAUNCHERS[name].format(command=f"{command} PROGRAM.py")
    return UsageError(f"{name} starts the program in other processes; cudatool has to run inside of them: {there}")


def _after_python(python: str, words: Sequence[str], command: str) -> Workload:
    """Return the program of ``python WORDS``, which runs in this interpreter."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    wanted = os.path.basename(python).removeprefix("python")
    is_ours = not os.path.dirname(python) or _is_ours(python)
    if wanted not in ("", str(sys.version_info.major), version) or not is_ours:
        raise UsageError(
            f"cudatool runs programs in its own Python {version} ({sys.executable}), not in {python}; install it there"
        )
    if not words:
        raise UsageError(_NO_SESSION)
    if words[0].startswith("-") and words[0] not in ("-m", "-c", "-"):
        line = f"python {words[0]} -m cudatool {command} {shlex.join(words[1:])}".rstrip()
        raise UsageError(f"put options of python before cudatool: {line}")
    return Workload.parse(words, command)


def _script_of(name: str) -> str | None:
    """Return the Python script that the shell would run for a command; None if there is no such command.

    Raises
    ------
    UsageError
        The command is not Python's, or of another Python than this one.
    """
    beside = os.path.join(os.path.dirname(sys.executable), name)  # a virtual environment need not be activated
    found = beside if os.path.isfile(beside) and os.access(beside, os.X_OK) else shutil.which(name)
    if found is None:
        return None
    with open(found, "rb") as file:
        head = file.read(512).decode("latin-1")
    # The first line is "#!/path/bin/python"; for a long path it is "#!/bin/sh", and the second one runs Python.
    words = re.findall(r"[^\s\"'!]+", "".join(head.splitlines(keepends=True)[:2]))
    python = next((word for word in words if _PYTHON.fullmatch(os.path.basename(word))), None)
    if not head.startswith("#!") or python is None:
        raise UsageError(f"{name} ({found}) is not a Python program; cudatool runs only those")
    if os.path.dirname(python) and not _is_ours(python):
        raise UsageError(f"{found} belongs to {python}, and cudatool to {sys.executable}; install both in one of them")
    return found


def _near_command(name: str) -> str:
    """Return ``did you mean 'pytest'?`` for a word that is like a command beside this interpreter, else nothing."""
    folder = os.path.dirname(sys.executable)
    return "" if os.path.dirname(name) else did_you_mean(name, os.listdir(folder) if os.path.isdir(folder) else ())


def _is_ours(python: str) -> bool:
    """Return whether a path is that of this interpreter: in its own directory, since environments share a binary."""
    return os.path.realpath(os.path.dirname(python)) == os.path.realpath(os.path.dirname(sys.executable))


def _exit_status(code: object) -> int:
    """Return the status that the interpreter would exit with for ``SystemExit(code)``."""
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 0xFF
    try:
        sys.stderr.write(f"{code}\n")
    except Exception:
        pass  # the program's own text, or its own stderr
    return 1


def _user_frames(traceback: TracebackType | None) -> TracebackType | None:
    """Return the traceback from where our frames end, None if nothing else is left."""
    while traceback is not None and traceback.tb_frame.f_code.co_filename == __file__:
        traceback = traceback.tb_next
    return traceback
