"""Events for the processes that a program starts, and for the programs that replace this one by exec."""

from __future__ import annotations

from cudatool.processes.starts import Starts
from cudatool.trace import hooks
from cudatool.trace.events import Kind, ProcessFlag

__all__ = ["child_processes"]


def child_processes() -> Starts:
    """Return what emits ``CHILD_PROCESS`` while it is installed."""

    def started(name: str, process: int, replaces: bool) -> None:
        if hooks.active:
            flags = ProcessFlag.REPLACED if replaces else 0
            hooks.emit(Kind.CHILD_PROCESS, name=name, flags=flags, aux0=process)

    return Starts(started)
