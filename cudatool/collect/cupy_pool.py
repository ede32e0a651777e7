"""Records the blocks of CuPy's memory pools on a GPU, in an unmodified program, in addition to what CUPTI reports.

A memory hook of CuPy's writes each block to the log of :mod:`cudatool.collect.cupti`. CuPy keeps its hooks by thread,
and a thread can only add its own, so that::

    when CuPy is imported, or now     this thread adds the hook
    when a thread starts              threading.setprofile() has it add the hook, and undoes itself in that thread
    at the end                        this thread removes the hook; in other threads it stays and does nothing

Threads that ran already then, and those not started by :mod:`threading`, have no hook.
"""

from __future__ import annotations

import logging
import sys
import threading
from contextlib import suppress
from types import FrameType, ModuleType
from typing import Any

from cudatool.collect import _cupti
from cudatool.loading.after_import import AfterImport
from cudatool.trace import hooks
from cudatool.trace.events import Kind, WarningCode, WarningFlag

__all__ = ["CupyPool"]

_log = logging.getLogger("cudatool.collect")
_NAME = "cudatool"


class CupyPool:
    """Watches CuPy's pools, from its import or from now if it is imported already, until :meth:`stop`."""

    def __init__(self) -> None:
        self._hook: Any = None
        self._previous: Any = None  # the program's profile function for new threads
        self._finder = AfterImport({"cupy.cuda": self._watch})
        self._finder.start()

    def stop(self) -> None:
        """Stop watching. Stopping again changes nothing."""
        self._finder.stop()
        hook, self._hook = self._hook, None
        if hook is None:
            return
        if threading.getprofile() == self._first_event:  # else the program has set another one since
            threading.setprofile(self._previous)
        with suppress(KeyError):  # this thread has none
            hook.__exit__()

    def _watch(self, cuda: ModuleType) -> None:
        base = getattr(cuda, "MemoryHook", None)
        if base is None:
            _give_up("this CuPy has no MemoryHook")
            return
        # C functions: they cannot be interrupted by a signal handler of the program, which CuPy calls from destructors.
        # A free is noted before the pool can hand out the block again, to another thread perhaps.
        methods = {"malloc_postprocess": _cupti.pool_alloc, "free_preprocess": _cupti.pool_free}
        self._hook = type("Hook", (base,), {"name": _NAME, **methods})()
        self._register()
        self._previous = threading.getprofile()
        threading.setprofile(self._first_event)

    def _register(self) -> None:
        with suppress(KeyError):  # it has one, of an earlier recording
            self._hook.__enter__()

    def _first_event(self, frame: FrameType, event: str, argument: Any) -> None:
        """Add the hook in a thread that starts, which then has the profile function that it would have had."""
        sys.setprofile(self._previous)
        if self._hook is not None:
            self._register()
        if self._previous is not None:
            self._previous(frame, event, argument)


def _give_up(reason: str) -> None:
    text = f"CuPy's memory is known by what its pool took from the driver: {reason}"
    hooks.emit(Kind.WARNING, name=text, flags=WarningFlag.UNSEEN, aux0=WarningCode.POOL_NOT_WATCHED)
    _log.warning("%s", text)
