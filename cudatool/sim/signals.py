"""Signals that arrive while a program is inside of the driver.

Python runs a program's signal handlers between any two bytecodes of the main thread, those of the driver too. A handler
that raises there would leave the driver's state half changed, and its exception would end in C; one that calls the
driver would find that state. So a handler runs when the call returns to its caller, as it does with NVIDIA's driver,
which is not Python::

    the handler is called:      inside of the driver? note the signal, and return
    the outermost call returns: raise what was noted again; Python calls the handler in the program's own code

Nor does it run in functions whose exceptions Python ignores (finalizers and callbacks of the garbage collector), where
a KeyboardInterrupt would be lost, and in others that are named (:func:`keep_out_of`, :func:`keep_out_while`): there it
comes a moment later.

Ctrl-C need not wait for that if it will end the program: where the handler is Python's own, what the driver waits for
is given up (:class:`Interrupted`).
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # what signal is made of has no stubs
import _thread
import ctypes
import functools
import signal
import threading
import time
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

from cudatool.sim._handler import Handler

__all__ = [
    "Interrupted",
    "check",
    "install",
    "interruption",
    "interrupts",
    "is_interrupted",
    "keep_out_of",
    "keep_out_while",
    "shielded",
]

_get_handler = _signal.getsignal  # without the enumerations that signal.getsignal makes: it is asked for each launch
_Handler = Callable[[int, FrameType | None], Any]
_Function = ctypes.CFUNCTYPE(None)


class Interrupted(BaseException):
    """Ctrl-C ends what the driver waits for. The program gets its KeyboardInterrupt when the call has returned."""


class _State:
    """Of the process: the main thread alone runs handlers."""

    def __init__(self) -> None:
        self.library: ctypes.CDLL | None = None
        self.is_interrupted = False
        self.kept_out_of: set[CodeType] = set()
        self.kept_out_while: set[Callable[[], bool]] = set()


interruption = _State()
"""Of the process: `is_interrupted` says whether Ctrl-C came while the main thread was inside of the driver."""


def _puts_off(handler: _Handler, number: int, frame: FrameType | None) -> bool:
    """Return whether a handler of the program is not to run now, and let the signal come again."""
    assert interruption.library is not None
    if interruption.library.cudatool_defer(number):
        if handler is signal.default_int_handler:
            interruption.is_interrupted = True
        return True
    if _is_kept_out(frame):
        _thread.start_new_thread(_come_again, (number,))
        return True
    interruption.is_interrupted = False
    return False


def install(library: ctypes.CDLL) -> None:
    """Let handlers wait for the driver: those that there are, and those that programs install from now on.

    ``signal.signal`` and ``signal.getsignal`` go on to take and return the program's own handlers.
    """
    if interruption.library is not None:
        return
    interruption.library = library
    set_handler, get_handler = signal.signal, signal.getsignal

    @functools.wraps(set_handler)
    def set_deferred(signalnum: Any, handler: Any) -> Any:
        return _own(set_handler(signalnum, Handler(handler, _puts_off) if callable(handler) else handler))

    @functools.wraps(get_handler)
    def get_own(signalnum: Any) -> Any:
        return _own(get_handler(signalnum))

    signal.signal, signal.getsignal = set_deferred, get_own
    if threading.current_thread() is threading.main_thread():  # another thread must not set handlers
        for number in signal.valid_signals():
            handler = get_handler(number)
            if callable(handler):
                set_handler(number, Handler(handler, _puts_off))


def keep_out_of(*functions: Any) -> None:
    """Let no handler run in these functions of Python, nor in what they call."""
    interruption.kept_out_of.update(function.__code__ for function in functions if hasattr(function, "__code__"))


def keep_out_while(inside: Callable[[], bool]) -> None:
    """Let no handler run while this returns true: for code that is compiled, whose frames are not seen."""
    interruption.kept_out_while.add(inside)


def _is_kept_out(frame: FrameType | None) -> bool:
    if any(inside() for inside in interruption.kept_out_while):
        return True
    while frame is not None:
        if frame.f_code in interruption.kept_out_of or frame.f_code.co_name == "__del__":
            return True
        frame = frame.f_back
    return False


def _come_again(number: int) -> None:
    time.sleep(0.001)
    _thread.interrupt_main(number)  # type: ignore[arg-type]  # real-time signals have no name


def _own(handler: Any) -> Any:
    return handler.own if isinstance(handler, Handler) else handler


def shielded(function: Callable[[], None]) -> None:
    """Call `function`, which does what a call of the driver does, as one."""
    assert interruption.library is not None
    failed: list[BaseException] = []

    def run() -> None:
        try:
            function()
        except Interrupted:
            pass  # the KeyboardInterrupt follows
        except BaseException as error:
            failed.append(error)

    interruption.library.cudatool_shielded(_Function(run))
    if failed:
        raise failed[0]


def interrupts() -> bool:
    """Return whether Ctrl-C would end what this thread waits for: on the main thread, with Python's own handler."""
    if threading.get_ident() != threading.main_thread().ident:
        return False
    return _own(_get_handler(signal.SIGINT)) is signal.default_int_handler


def is_interrupted() -> bool:
    """Return whether Ctrl-C has come while the main thread was inside of the driver."""
    return interruption.is_interrupted and threading.get_ident() == threading.main_thread().ident


def check() -> None:
    """Raise :class:`Interrupted` if Ctrl-C has come since the call of the driver in progress began."""
    if is_interrupted():
        raise Interrupted
