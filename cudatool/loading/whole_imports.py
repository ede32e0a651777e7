"""Imports that no signal breaks off, and no search for garbage slows down.

NumPy and NVIDIA's bindings cannot be imported again in a process in which their first import was broken off, by Ctrl-C
or by any handler of a signal that raises. cudatool imports them at first use, in the middle of a program that may go on
after the exception. So handlers wait until the import is over, a second or so, and then run in the program's code.

What an import makes stays, and it makes so many objects that the interpreter looks again and again which of them are
garbage: an eighth of the time that the software device takes to start.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # without the enumerations that signal makes of each number
import gc
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["whole_imports"]

_open = threading.local()  # .depth: blocks that this thread is in


@contextmanager
def whole_imports() -> Iterator[None]:
    """Put off the handlers of signals, and the collection of garbage, to the end of the block.

    The block is imports, and nothing that may take long. Only the main thread runs handlers: another's need not wait.
    """
    depth = getattr(_open, "depth", 0)
    if depth:
        yield
        return
    collects = gc.isenabled()
    try:
        gc.disable()
        if threading.current_thread() is threading.main_thread():
            with _handlers_wait():
                yield
        else:
            yield
    finally:
        if collects:
            gc.enable()


@contextmanager
def _handlers_wait() -> Iterator[None]:
    _open.depth = 1
    came: list[int] = []
    own: dict[int, Any] = {}
    try:
        _replace_handlers(own, came)
        yield
    finally:
        # The mask keeps a handler from raising between two of these; what comes in between runs after them.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, own.keys())
        try:
            for number, handler in own.items():
                signal.signal(number, handler)
            _open.depth = 0
        finally:
            for number in dict.fromkeys(came):
                signal.raise_signal(number)  # pending: the handler runs when the mask is taken off
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _replace_handlers(own: dict[int, Any], came: list[int]) -> None:
    """Let every handler that is a function note its signal in `came`, and keep it in `own`."""
    for number in range(1, signal.NSIG):
        if callable(_signal.getsignal(number)):  # not the default, nor ignored, nor what C installed
            handler = signal.getsignal(number)  # the program's, where sim.signals has put another one before it
            own[number] = handler
            signal.signal(number, lambda received, frame: came.append(received))
