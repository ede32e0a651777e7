"""With how many threads NumPy multiplies: OpenBLAS, which is what its wheels have."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from importlib import import_module
from typing import Final

from cudatool.processors import processors

__all__ = ["threads_for"]

_SMALL: Final = 1 << 27  # multiplications: some milliseconds on one thread
_NAMES: Final = [
    f"{before}openblas_{{}}_num_threads{after}" for before in ("scipy_", "") for after in ("64_", "_64", "")
]

_lock = threading.Lock()
_users = 0
_before = 0  # the number that the first of the users found


def threads_for(multiplications: int) -> AbstractContextManager[None]:
    """Return a context in which NumPy multiplies two matrices with as many threads as they are worth.

    OpenBLAS's threads wait for each other by asking again and again. Where processors have other work, as from other
    tests of a CI job, a product waits for the next turn of a thread: of 256 x 64 times 64 x 192 numbers it took 7 ms of
    processor time on two busy processors, and 0.08 ms on one thread. The number is the process's: what other threads
    multiply in the meantime has one, too.
    """
    found, most = _openblas(), 1 if multiplications < _SMALL else processors()
    return nullcontext() if found is None or found[0]() <= most else _at_most(most, *found)


@contextmanager
def _at_most(number: int, get: Callable[[], int], set_to: Callable[[int], None]) -> Iterator[None]:
    global _users, _before
    with _lock:
        if not _users:
            _before = get()
        set_to(min(number, get()))
        _users += 1
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if not _users:
                set_to(_before)


@cache
def _openblas() -> tuple[Callable[[], int], Callable[[int], None]] | None:
    """Return what gets and what sets the number, None where NumPy has another library.

    threadpoolctl would not do: with it, one thread at a time sets the number, and what others set is ignored.
    """
    linked = ctypes.CDLL(import_module("numpy._core._multiarray_umath").__file__)  # also finds what that is linked with
    for name in _NAMES:
        if hasattr(linked, name.format("set")):
            set_to = linked[name.format("set")]
            set_to.argtypes, set_to.restype = [ctypes.c_int], None
            return linked[name.format("get")], set_to
    return None


def _forked() -> None:
    """In a child: the products of other threads are its parent's."""
    global _lock, _users
    _lock = threading.Lock()
    found = _openblas() if _users else None
    if found is not None:
        found[1](_before)
    _users = 0


os.register_at_fork(after_in_child=_forked)
