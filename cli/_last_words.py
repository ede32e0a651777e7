"""Writes a line to stderr if a program ends without the interpreter's shutdown: a signal or ``os._exit``."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from cudatool.runtime import _native

__all__ = ["last_words"]


@contextmanager
def last_words(text: str) -> Iterator[None]:
    """Write `text` to stderr if a signal or :func:`os._exit` ends this process inside the ``with`` block.

    The process ends as it would have, and a program sees no handler in :func:`signal.getsignal`. Nothing is written
    where a program handles the signal itself, or in its children. SIGKILL cannot be caught.
    """
    message, process, exit_at_once = f"{text}\n".encode(errors="replace"), os.getpid(), os._exit

    def leave(status: int) -> None:
        if os.getpid() == process:
            with suppress(OSError):
                os.write(2, message)
        exit_at_once(status)

    os._exit = leave  # type: ignore[assignment]
    _native.last_words(message)
    try:
        yield
    finally:
        _native.last_words(b"")
        if os._exit is leave:
            os._exit = exit_at_once
