"""Running a user's program inside this process as ``python`` would run it."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from dataclasses import dataclass
from types import CodeType, ModuleType, TracebackType

from cudatool.errors import UsageError

__all__ = ["Workload"]

_replaced: list[object] = []  # what programs left as sys.stdout: without a reference it would close what it wraps


@dataclass(frozen=True, slots=True)
class Workload:
    """A script, or a module as after ``python -m``, with its arguments."""

    target: str
    arguments: tuple[str, ...] = ()
    is_module: bool = False

    @property
    def name(self) -> str:
        """A short name for files made from this run."""
        return self.target.rpartition(".")[2] if self.is_module else os.path.splitext(os.path.basename(self.target))[0]

    def check(self) -> None:
        """Raise :class:`UsageError` if there is nothing to run."""
        if self.is_module:
            import importlib.util

            sys.path.insert(0, os.getcwd())
            try:
                found = importlib.util.find_spec(self.target)
            except (ImportError, ValueError):
                found = None
            finally:
                del sys.path[0]
            if found is None:
                raise UsageError(f"there is no module {self.target!r}")
        elif not os.path.isfile(self.target):
            what = "is a directory" if os.path.isdir(self.target) else "does not exist"
            raise UsageError(f"{self.target} {what}; name a Python program")

    def run(self) -> int:
        """Run the program and return its exit status.

        ``sys.argv``, ``sys.path[0]`` and ``__main__`` are what plain Python would give it, uncaught exceptions are
        reported through ``sys.excepthook`` without our frames, and its other threads and exit handlers have ended
        when this returns. Children that it forks do not return. ``sys.stdout`` and ``sys.stderr`` are
        again what they were, None if the program closed them.
        """
        process, ours = os.getpid(), (sys.stdout, sys.stderr)
        status = 0
        try:
            if self.is_module:
                self._run_module()
            else:
                self._run_script()
        except SystemExit as leaving:
            status = _exit_status(leaving.code)
        except BaseException as error:
            error.__traceback__ = _user_frames(error.__traceback__)
            sys.excepthook(type(error), error, error.__traceback__)
            status = 130 if isinstance(error, KeyboardInterrupt) else 1
        # What the interpreter does at its own end, early enough to be recorded: first it lets the threads of executors
        # go (threading._register_atexit), which would otherwise be waited for for ever.
        for leave in reversed(getattr(threading, "_threading_atexits", [])):
            leave()
        for thread in threading.enumerate():
            if thread is not threading.current_thread() and not thread.daemon:
                thread.join()
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (OSError, ValueError, AttributeError):
                pass  # closed or replaced by the program
        if os.getpid() != process:
            os._exit(status)  # a child that the program forked: what follows is its parent's
        _replaced.extend((sys.stdout, sys.stderr))
        sys.stdout, sys.stderr = (stream if stream and not stream.closed else None for stream in ours)
        return status

    @staticmethod
    def forget() -> None:
        """Drop the program's own variables, as the end of the interpreter does, so that what is left has leaked."""
        import gc

        main = sys.modules.get("__main__")
        if main is not None:
            main.__dict__.clear()
        gc.collect()

    def _run_script(self) -> None:
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

    def _run_module(self) -> None:
        import runpy

        sys.argv = ["-m", *self.arguments]
        sys.path[0] = os.getcwd()
        # What the interpreter itself calls for `python -m`; run_module() would report errors differently.
        runpy._run_module_as_main(self.target)  # type: ignore[attr-defined]


def _exit_status(code: object) -> int:
    """Return the status that the interpreter would exit with for ``SystemExit(code)``."""
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 0xFF
    if sys.stderr is not None:
        sys.stderr.write(f"{code}\n")
    return 1


def _user_frames(traceback: TracebackType | None) -> TracebackType | None:
    """Return the traceback from where our frames end, None if nothing else is left."""
    while traceback is not None and traceback.tb_frame.f_code.co_filename == __file__:
        traceback = traceback.tb_next
    return traceback
