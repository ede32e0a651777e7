"""Who is called when any allocator of this process has no memory, right before the error is raised.

::

    request fails -> Kind.OOM -> the allocator's own observers -> these, in the order they were added -> raise

No lock is held. An observer handles its own failures: an exception that leaves it reaches the program, as one that a
signal handler of the program raised in the middle of it has to.
"""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["OutOfMemoryObserver", "add", "notify", "remove"]

OutOfMemoryObserver = Callable[[int, int, int, int], None]
"""Called before an out-of-memory error with device, bytes of the segment asked for, bytes allowed, bytes free."""

_observers: tuple[OutOfMemoryObserver, ...] = ()


def add(observer: OutOfMemoryObserver) -> None:
    """Call `observer` at each failed request from now on. Adding it again changes nothing."""
    global _observers
    if observer not in _observers:
        _observers = (*_observers, observer)


def remove(observer: OutOfMemoryObserver) -> None:
    """Call `observer` no longer. Removing one that is not there changes nothing."""
    global _observers
    _observers = tuple(one for one in _observers if one != observer)


def notify(device: int, wanted: int, allowed: int, free: int) -> None:
    """Call all observers: a request of `wanted` bytes has failed, and its error is about to be raised."""
    for observer in _observers:
        observer(device, wanted, allowed, free)
