"""Notices how processes end that this one waits for: their exit status, or the signal.

While installed, wrappers surround the functions of the standard library that wait. What C code waits for is not seen.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from cudatool.processes.starts import named_as

__all__ = ["Ends", "status_of_zombie"]

_Noted = Callable[[int, int], None]


class Ends:
    """Calls `ended` with the id of each process that was waited for and did not succeed, and with its exit status: if
    negative, the signal that ended it.
    """

    def __init__(self, ended: _Noted) -> None:
        self._ended = ended

    @contextmanager
    def noticed(self) -> Iterator[None]:
        """Notice them inside of the ``with`` block."""
        before = self.install()
        try:
            yield
        finally:
            for owner, name, function, own in before:
                if getattr(owner, name) is own:  # else the program has wrapped it again
                    setattr(owner, name, function)

    def install(self) -> list[tuple[Any, str, Any, Any]]:
        """Put the wrappers around the functions; return owner, name, function and wrapper of each."""
        wrappers = [(os, name, self._waiting(getattr(os, name))) for name in _WAITING]
        if (module := sys.modules.get("subprocess")) is not None:  # it kept the function that it waits with
            wrappers.append((module.Popen, "_handle_exitstatus", self._handling(module.Popen._handle_exitstatus)))
        before = [(owner, name, getattr(owner, name), own) for owner, name, own in wrappers]
        for owner, name, own in wrappers:
            setattr(owner, name, own)
        return before

    def _note(self, process: int, status: int) -> None:
        if process and (os.WIFEXITED(status) or os.WIFSIGNALED(status)) and status:
            self._ended(process, os.waitstatus_to_exitcode(status))

    def _waiting(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def waited(*arguments: Any, **named: Any) -> Any:
            result = function(*arguments, **named)
            self._note(result[0], result[1])
            return result

        return named_as(function, waited)

    def _handling(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def handled(popen: Any, status: int, *arguments: Any, **named: Any) -> Any:
            self._note(popen.pid, status)
            return function(popen, status, *arguments, **named)

        return named_as(function, handled)


def status_of_zombie(process: int) -> int:
    """Return the exit status (if negative, the signal) of a child that was not waited for; 0 if there is none."""
    try:
        found = os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except OSError:
        return 0
    if found is None:
        return 0
    return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status


_WAITING: Final = ("wait", "waitpid", "wait3", "wait4")
"""``waitid`` is left out: the standard library does not use it."""
