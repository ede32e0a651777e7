"""A Python process that a recorded program started: recording begins in it when it first uses a device.

:func:`start` runs as Python starts, before the program. It notes that the process exists, and waits for the first
import of a library that uses CUDA. Before that import, :mod:`cudatool.recording.children` begins to record.
"""

from __future__ import annotations

import _thread
import atexit
import os
import sys
from _frozen_importlib import ModuleSpec
from collections.abc import Callable
from types import ModuleType
from typing import Any, Final

from cudatool.config import CHILD
from cudatool.loading.attached import attached
from cudatool.processes.ends import Ends
from cudatool.processes.journal import BEGAN, ENDED, REPLACED, STARTED, UNRECORDED, ProcessJournal
from cudatool.processes.shells import shell_of_this_alone
from cudatool.processes.starts import Starts

__all__ = ["journal", "leave_by", "noticed_in", "start", "stop"]

_USERS: Final = frozenset(
    (
        *("cuda", "cudatool._driver", "cudf", "cupy", "cupy_backends", "jax", "jaxlib", "numba", "pycuda", "rmm"),
        *("tensorflow", "torch", "triton", "warp"),
    )
)
"""Modules that use CUDA, or through which a program does."""

_journal: ProcessJournal | None = None
_settings = ""
_starts: Starts | None = None
_waits: _BeforeImport | None = None
_leave: Callable[[bool], None] | None = None
_process = 0  # the one that Python started in, 0 if that is not known: forks of it have other ids


def start() -> None:
    """Begin, in a process whose environment has :data:`.CHILD`."""
    global _process, _settings, _waits
    # In a virtual environment, Python reads the line twice; and once more in each interpreter that a program makes.
    if _waits is not None or not _is_main_interpreter():
        return
    place, identity, _settings = os.environ[CHILD].split("\n", 2)
    _process = os.getpid()
    if place:
        noticed_in(ProcessJournal(place, identity))
    _waits = _BeforeImport()
    sys.meta_path.insert(0, _waits)


def _is_main_interpreter() -> bool:
    """Tell a process's first interpreter from others, at whose end an exit handler of ours cannot open a file."""
    if hasattr(_thread, "_is_main_interpreter"):
        return bool(_thread._is_main_interpreter())
    import _xxsubinterpreters as interpreters  # type: ignore[import-not-found]  # of Python 3.11

    return bool(interpreters.get_current() == interpreters.get_main())


def stop() -> None:
    """Do not record this process: a cudatool command that runs in it does so."""
    if _waits is not None and _waits in sys.meta_path:
        sys.meta_path.remove(_waits)
        if _journal is not None:
            _journal.note(UNRECORDED, os.getpid(), "recorded by a command of cudatool of its own")


def journal() -> ProcessJournal | None:
    """Return the journal for this process's notes, None if no recorded process started it."""
    return _journal


def noticed_in(where: ProcessJournal, *, began: bool = True) -> None:
    """Note in a journal from now on how this process ends and which others it starts.

    Without `began`, it may use a device unrecorded.
    """
    global _journal, _starts
    is_first, _journal = _journal is None, where
    if is_first:
        _starts = Starts(_started)
        _starts.install()
        Ends(_ended).install()
        os.register_at_fork(after_in_child=_forked)
        atexit.register(_leaving)
        os._exit = _leaving_by(os._exit)  # type: ignore[assignment]
    if began:
        where.note(BEGAN, os.getpid())
        if shell := shell_of_this_alone():
            where.note(BEGAN, shell)  # what it does is recorded


def leave_by(function: Callable[[bool], None] | None) -> None:
    """Call a function when this process ends, other than by a signal: with whether that is by ``os._exit``.

    A forked process ends normally by ``os._exit``: for one it does not count.
    """
    global _leave
    _leave = function


def _started(name: str, process: int, replaces: bool) -> None:
    if _journal is not None:
        _journal.note(REPLACED if replaces else STARTED, process, name)


def _ended(process: int, status: int) -> None:
    if _journal is not None:
        _journal.note(ENDED, process, str(status))


def _forked() -> None:
    if _journal is not None and _leave is None:  # else recording has begun, and continues in the child
        _journal.note(BEGAN, os.getpid())


def _leaving_by(exit_at_once: Callable[[int], Any]) -> Callable[[int], Any]:
    def leave(status: int) -> Any:
        _leaving(at_once=os.getpid() == _process)
        return exit_at_once(status)

    return leave


def _leaving(*, at_once: bool = False) -> None:
    """End the recording; if there is none, note whether NVIDIA's driver was loaded without an import seen here."""
    global _leave
    leave, _leave = _leave, None
    if leave is not None:
        leave(at_once)
    elif _waits in sys.meta_path and _journal is not None and _has_driver():
        _journal.note(UNRECORDED, os.getpid(), "it loaded NVIDIA's driver by itself")


def _has_driver() -> bool:
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as file:
            return any("/libcuda.so" in line for line in file)
    except OSError:
        return True


class _BeforeImport:
    """Begins to record before one of the modules that use CUDA is imported."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Find only these modules: what the other finders find, or the module that beginning to record has imported."""
        if name not in _USERS:
            return None
        if "cudatool.cli" in sys.modules:  # `cudatool run`, which records by itself
            stop()
            return None
        sys.meta_path.remove(self)
        from importlib.util import find_spec  # no earlier: it takes time at the start of every process

        attached("record_child")(_settings)
        module = sys.modules.pop(name, None)  # importlib puts it there again; else it would make another one
        if module is not None:
            return ModuleSpec(name, _Imported(module))  # type: ignore[arg-type]
        return find_spec(name)  # ask all finders again: the recorder may wait for this import, too


class _Imported:
    """A loader of a module that is imported already."""

    def __init__(self, module: ModuleType) -> None:
        self._module, self._spec = module, module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the module."""
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        """Leave the module as it is."""
        module.__spec__ = self._spec
