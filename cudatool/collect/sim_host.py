"""Events for host accesses to pinned, registered and managed memory that no call declares.

:class:`~cudatool.sim.observe.host_watch.HostWatch` notices such accesses. Here they become ``HOST_ACCESS`` events.
They come before the call at which they were noticed, so that the trace is in the order of what happened.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic_ns
from typing import TYPE_CHECKING, Final

from cudatool.collect.byte_sets import rows_of
from cudatool.trace import hooks
from cudatool.trace.events import WORK, AccessFlag, Event, Kind

if TYPE_CHECKING:
    from cudatool.sim import Machine

__all__ = ["watched_host_memory"]

_MOST: Final = 256  # records for what was noticed at one call
_WRITE: Final = AccessFlag.WRITE | AccessFlag.NOTICED
_READ: Final = AccessFlag.READ | AccessFlag.NOTICED


@contextmanager
def watched_host_memory(machine: Machine) -> Iterator[None]:
    """Report, while open, the host's accesses to memory that operations use to the subscribers of the hooks."""
    current: list[Event] = []  # events that a call of our runtime emits before it calls the driver

    def report(written: list[tuple[int, int]], read: list[tuple[int, int]]) -> None:
        noticed_rows = [*rows_of(written, int(_WRITE), _MOST), *rows_of(read, int(_READ), _MOST)]
        for address, size, flags, stride, rows in noticed_rows:
            if not current:
                hooks.emit(Kind.HOST_ACCESS, address=address, size=size, flags=flags, aux0=stride, aux1=rows)
                continue
            asked = current[-1]
            noticed = asked._replace(
                time=monotonic_ns(),
                kind=Kind.HOST_ACCESS,
                device=-1,
                flags=flags,
                stream=0,
                correlation=0,
                name="",
                address=address,
                size=size,
                aux0=stride,
                aux1=rows,
            )
            hooks.forward(noticed)

    watch = machine.watch_host(report)

    def hear(event: Event) -> None:
        kind = event.kind
        if kind is Kind.HOST_ACCESS:
            if not event.flags & AccessFlag.NOTICED:
                span = event.size + event.aux0 * max(event.aux1 - 1, 0)
                watch.note(event.address, span, writes=bool(event.flags & AccessFlag.WRITE))
        elif kind in WORK:
            with watch.lock:  # another thread must not report what it notices as seen at this event
                current.append(event)
                try:
                    watch.look([(event.aux0, event.size), (event.address, event.size)] if kind is Kind.MEMCPY else ())
                finally:
                    current.pop()
        elif kind in (Kind.HOST_ALLOC, Kind.HOST_FREE):
            watch.forget(event.address, event.size)

    hooks.subscribe(hear, first=True)
    try:
        yield
    finally:
        hooks.unsubscribe(hear)
        machine.unwatch_host()
