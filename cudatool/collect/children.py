"""Events for the processes that a program starts: they are not recorded, and the trace says so.

While installed, the functions of the standard library that start a process, or let another program take the place of
this one, emit ``CHILD_PROCESS``. What C code starts is not seen.
"""

from __future__ import annotations

import _posixsubprocess
import functools
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any, Final

from cudatool.trace import hooks
from cudatool.trace.events import Kind

__all__ = ["ChildProcesses"]

_REPLACED: Final = 1
_ASK: Final = ("ctypes.util", "platform", "uuid")
_HELPERS: Final = b"multiprocessing.resource_tracker"  # of multiprocessing itself: runs nothing of the program


class _Local(threading.local):
    starting = False  # inside of one of these functions, which call each other


_local = _Local()


def _program(arguments: Any, executable: Any = None) -> str:
    """Return a short name for a command: its program, and the script or module that a Python runs; no more of it."""
    words = [arguments] if isinstance(arguments, str | bytes | os.PathLike) else list(arguments)
    texts = [os.fsdecode(word) for word in words]
    if len(texts) == 1:
        texts = texts[0].split()
    name = os.path.basename(os.fsdecode(executable) if executable else texts[0]) if texts else ""
    if not name.startswith("python"):
        return name
    for index, text in enumerate(texts[1:], 1):
        if text == "-m":
            return " ".join([name, *texts[index : index + 2]])
        if text == "-c" or not text.startswith("-"):
            return f"{name} {os.path.basename(text)}"
    return name


def _popen(self: Any, arguments: Any, executable: Any, *others: Any, **named: Any) -> str:
    return _program(arguments, executable)


def _fork_exec(arguments: Any, *others: Any) -> str:
    return "" if any(_HELPERS in os.fsencode(word) for word in arguments) else "multiprocessing"


def _fork() -> str:
    return "os.fork"


def _path_first(path: Any, arguments: Any = (), *others: Any, **named: Any) -> str:
    return _program(arguments or path, path)


def _starts(describe: Callable[..., str], function: Callable[..., Any]) -> Callable[..., Any]:
    """Emit after the call, in the process that made it; not for one that failed."""

    @functools.wraps(function)
    def started(*arguments: Any, **named: Any) -> Any:
        if _local.starting:
            return function(*arguments, **named)
        _local.starting = True
        try:
            result = function(*arguments, **named)
        finally:
            _local.starting = False
        in_parent = describe is not _fork or (result[0] if isinstance(result, tuple) else result) != 0
        if hooks.active and in_parent and not _is_a_question() and (name := describe(*arguments, **named)):
            hooks.emit(Kind.CHILD_PROCESS, name=name)
        return result

    return started


def _replaces(describe: Callable[..., str], function: Callable[..., Any]) -> Callable[..., Any]:
    """Emit before the call, which does not return; os.execvp calls it for each directory of the PATH."""

    @functools.wraps(function)
    def replaced(path: Any, *arguments: Any) -> Any:
        if hooks.active and (isinstance(path, int) or os.access(path, os.X_OK)):
            name = "another program" if isinstance(path, int) else describe(path, *arguments)
            hooks.emit(Kind.CHILD_PROCESS, name=name, flags=_REPLACED)
        return function(path, *arguments)

    return replaced


def _is_a_question() -> bool:
    """Whether it is not the program that starts the process, but the standard library or cudatool, to find out a fact.

    As ctypes.util asks ldconfig for a library's path, and cudatool a compiler for its part that watches PyTorch.
    """
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_globals.get("__name__") in ("subprocess", __name__):
        frame = frame.f_back
    asking = str(frame.f_globals.get("__name__"))
    return asking in _ASK or asking.startswith("cudatool.collect.")


_FUNCTIONS: Final[tuple[tuple[Any, str, Callable[..., Any], Callable[..., str]], ...]] = (
    (subprocess.Popen, "_execute_child", _starts, _popen),
    (_posixsubprocess, "fork_exec", _starts, _fork_exec),  # what multiprocessing calls
    (os, "fork", _starts, _fork),
    (os, "forkpty", _starts, _fork),
    (os, "posix_spawn", _starts, _path_first),
    (os, "posix_spawnp", _starts, _path_first),
    (os, "system", _starts, _program),
    (os, "execv", _replaces, _path_first),
    (os, "execve", _replaces, _path_first),
)


class ChildProcesses:
    """Puts wrappers around the functions, and takes them away again."""

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, Any]] = []

    def install(self) -> None:
        """Begin to tell."""
        for owner, name, wrap, describe in _FUNCTIONS:
            function = getattr(owner, name)
            self._before.append((owner, name, function))
            setattr(owner, name, wrap(describe, function))

    def remove(self) -> None:
        """Leave the functions as they were."""
        while self._before:
            setattr(*self._before.pop())
