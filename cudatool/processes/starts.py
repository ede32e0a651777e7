"""Notices when the program starts a process, or replaces itself with another program (exec).

While installed, wrappers surround the functions of the standard library that do so. Processes that C code starts are
not seen.
"""

from __future__ import annotations

import _posixsubprocess
import _thread
import os
import sys
from collections.abc import Callable
from typing import Any, Final

__all__ = ["Starts", "named_as"]

_ASK: Final = ("ctypes.util", "platform", "uuid")
_HELPERS: Final = (b"multiprocessing.resource_tracker", b"multiprocessing.forkserver")
"""Of multiprocessing itself: they run nothing of the program. What the server forks is noticed there."""

_Describe = Callable[..., str]


class _Local(_thread._local):
    starting = False  # inside of one of these functions, which call each other


class Starts:
    """Calls `started` with the name of each program that is started, its process id (0: not known), and whether it
    replaces this process.

    It is called after a start, in the process that made it, and not for one that failed; before an exec, which does
    not return.
    """

    def __init__(self, started: Callable[[str, int, bool], None]) -> None:
        self._started = started
        self._local = _Local()
        self._before: list[tuple[Any, str, Any, Any]] = []

    def install(self) -> None:
        """Put the wrappers around the functions."""
        for owner, name, describe, process_of in _STARTING:
            self._put(owner, name, self._starting(describe, process_of, getattr(owner, name)))
        for name in ("execv", "execve"):
            self._put(os, name, self._replacing(getattr(os, name)))
        if (module := sys.modules.get("subprocess")) is not None:  # if imported later, it gets the wrapper of fork_exec
            popen = module.Popen
            self._put(popen, "_execute_child", self._starting(_popen, _popen_process, popen._execute_child))

    def remove(self) -> None:
        """Remove the wrappers, except where the program has wrapped them again."""
        while self._before:
            owner, name, function, own = self._before.pop()
            if getattr(owner, name) is own:
                setattr(owner, name, function)

    def _put(self, owner: Any, name: str, own: Callable[..., Any]) -> None:
        self._before.append((owner, name, getattr(owner, name), own))
        setattr(owner, name, own)

    def _starting(
        self, describe: _Describe, process_of: Callable[..., int], function: Callable[..., Any]
    ) -> Callable[..., Any]:
        def started(*arguments: Any, **named: Any) -> Any:
            if self._local.starting:
                return function(*arguments, **named)
            self._local.starting = True
            try:
                result = function(*arguments, **named)
            finally:
                self._local.starting = False
            process = process_of(result, *arguments)
            is_child = describe is _fork and not process
            if not is_child and not _is_a_question() and (name := describe(*arguments, **named)):
                self._started(name, process, False)
            return result

        return named_as(function, started)

    def _replacing(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """os.execvp calls it for each directory of the PATH."""

        def replaced(path: Any, *arguments: Any) -> Any:
            if isinstance(path, int):
                self._started("another program", os.getpid(), True)
            elif os.access(path, os.X_OK):
                self._started(_path_first(path, *arguments), os.getpid(), True)
            return function(path, *arguments)

        return named_as(function, replaced)


def named_as(function: Callable[..., Any], own: Callable[..., Any]) -> Callable[..., Any]:
    own.__name__, own.__qualname__, own.__doc__ = function.__name__, function.__qualname__, function.__doc__
    own.__module__ = function.__module__
    own.__wrapped__ = function  # type: ignore[attr-defined]  # as functools.wraps, which takes longer to import
    return own


def _program(arguments: Any, executable: Any = None) -> str:
    """Return a short name for a command: its program, and the script or module if it is Python."""
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


def _popen_process(result: Any, popen: Any, *others: Any) -> int:
    return int(popen.pid)


def _fork_exec(arguments: Any, *others: Any) -> str:
    words = [os.fsencode(word) for word in arguments]
    if any(helper in word for word in words for helper in _HELPERS):
        return ""
    return "multiprocessing" if b"--multiprocessing-fork" in words else _program(words)


def _fork() -> str:
    return "os.fork"


def _path_first(path: Any, arguments: Any = (), *others: Any, **named: Any) -> str:
    return _program(arguments or path, path)


def _returned(result: Any, *arguments: Any) -> int:
    return int(result[0] if isinstance(result, tuple) else result)


def _unknown(result: Any, *arguments: Any) -> int:
    return 0


def _is_a_question() -> bool:
    """Whether the standard library or cudatool, not the program, starts the process, to query something.

    For example, ctypes.util runs ldconfig to find a library, and cudatool runs a compiler to watch PyTorch, or explains
    that memory ran out.
    """
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_globals.get("__name__") in ("subprocess", __name__):
        frame = frame.f_back
    asking = str(frame.f_globals.get("__name__"))
    return asking in _ASK or asking.startswith(("cudatool.collect.", "cudatool.recording."))


_STARTING: Final[tuple[tuple[Any, str, _Describe, Callable[..., int]], ...]] = (
    (_posixsubprocess, "fork_exec", _fork_exec, _returned),  # what multiprocessing calls
    (os, "fork", _fork, _returned),
    (os, "forkpty", _fork, _returned),
    (os, "posix_spawn", _path_first, _returned),
    (os, "posix_spawnp", _path_first, _returned),
    (os, "system", _program, _unknown),
)
