"""Progress on a terminal: one line on stderr for work that takes longer than two seconds, gone when it is done.

::

    with progress.step("reading run.pickle", total=size) as step:
        for piece in pieces:
            step.update(done)                 # "reading run.pickle: 42 %", at most ten times a second
            with progress.step("unpacking"):  # takes the line until it ends; its two seconds began with the outermost
                ...

A step writes nothing where stderr is no terminal; :func:`note` writes a line there. A step writes only inside of its
own calls: there is no thread.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from cudatool.config import QUIET

__all__ = ["DELAY_S", "Step", "advance", "announce", "note", "step"]

DELAY_S: Final = 2.0
"""Seconds until the line appears."""

_INTERVAL_S: Final = 0.1
_CLEAR: Final = "\r\x1b[K"


class _Line(threading.local):
    """The line, and since when its outermost step is in progress; each thread has its own."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.began = self.written = 0.0
        self.is_shown = False


_line = _Line()


class Step:
    """A piece of work that :func:`step` began; `total` may be given later."""

    def __init__(self, text: str, total: int) -> None:
        self._text, self.total, self._done = text, total, 0

    def update(self, done: int) -> None:
        """Say how much of `total` is done; costs one reading of the clock."""
        self._done = done
        now = time.monotonic()
        if now - _line.began >= DELAY_S and now - _line.written >= _INTERVAL_S:
            _line.written = now
            _write(self)

    def advance(self) -> None:
        """Say that one more of `total` is done."""
        self.update(self._done + 1)

    def __str__(self) -> str:
        if not self.total:
            return f"{self._text} ..."
        return f"{self._text}: {min(100 * self._done // self.total, 100)} %"


@contextmanager
def step(text: str, total: int = 0, *, before_s: float = 0.0) -> Iterator[Step]:
    """Show `text` on the line while the block runs, with the share of `total` where that is known.

    Parameters
    ----------
    text
        What is being done, as ``"reading run.pickle"``.
    total
        How much there is to do, in any unit; 0 where it is not known.
    before_s
        Seconds that earlier pieces of the same work took: they count for the two seconds.
    """
    if not _line.steps:
        _line.began, _line.written = time.monotonic() - before_s, 0.0
    new = Step(text, total)
    _line.steps.append(new)
    try:
        new.update(0)
        yield new
    finally:
        _line.steps.remove(new)
        if not _line.steps:
            _clear()


def advance() -> None:
    """Say that one more part of the innermost step is done; for parts that no more than a second lies between."""
    if _line.steps:
        _line.steps[-1].advance()


def note(text: str) -> None:
    """Write one line on stderr where there is no terminal to show steps on. For work of many seconds, once."""
    if not _is_terminal():
        announce(text)


def announce(text: str) -> None:
    """Write one line on stderr, such as which device a program uses; nothing where :data:`.QUIET` is set."""
    if sys.stderr is not None and QUIET not in os.environ:  # a program may have been started without stderr
        _put(f"{text}\n")


def _is_terminal() -> bool:
    return sys.stderr is not None and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"


def _write(current: Step) -> None:
    if not _is_terminal():
        return
    text = "".join(c if c.isprintable() else "?" for c in str(current))
    import shutil  # takes a while to load, and few steps are shown

    width = shutil.get_terminal_size().columns - 1  # in the last column some terminals wrap
    _put(f"{_CLEAR}{text[:width]}")
    _line.is_shown = True


def _clear() -> None:
    if _line.is_shown:
        _line.is_shown = False
        _put(_CLEAR)


def _put(text: str) -> None:
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except (OSError, ValueError):  # the terminal has gone, or the program closed it: the line has no reader
        pass
