"""Traces of the real allocator, made by programs that a test draws."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from itertools import count

import numpy as np

from cudatool.memory import CachingAllocator, Settings
from cudatool.trace import hooks
from cudatool.trace.events import RECORD, Event
from cudatool.trace.model import Trace

__all__ = ["run"]

_FIELDS = ("kind", "device", "flags", "stream", "address", "size", "aux0", "aux1")


class _Endless:
    """Memory without end; the work on a stream is done when `passed` names it."""

    def __init__(self) -> None:
        self.next_address = 1 << 40
        self.tokens: dict[int, int] = {}
        self.numbers = count()
        self.passed: set[int] = set()

    def allocate(self, size: int, stream: int) -> int:
        return self.reserve(size, stream)

    def free(self, address: int) -> None:
        pass

    def reserve(self, size: int, stream: int) -> int:
        address, self.next_address = self.next_address, self.next_address + size + (2 << 20)
        return address

    def unreserve(self, address: int, size: int) -> None:
        pass

    def map(self, address: int, size: int, page_size: int) -> None:
        pass

    def unmap(self, address: int, size: int, page_size: int) -> None:
        pass

    def record_event(self, stream: int) -> int:
        token = next(self.numbers)
        self.tokens[token] = stream
        return token

    def event_passed(self, token: int) -> bool:
        return self.tokens[token] in self.passed

    def synchronize_event(self, token: int) -> None:
        pass

    def memory_info(self) -> tuple[int, int]:
        return 1 << 40, 1 << 40


def run(conf: str, operations: Iterable[tuple[int, int, int]]) -> tuple[Trace, dict[str, int]]:
    """Return the trace and the final statistics of a program.

    Parameters
    ----------
    conf
        The allocator's settings.
    operations
        Rows of (what, size, stream): 0 allocates, 1 and 2 free one of the live blocks, 3 uses one on a stream, 4
        lets a stream finish, 5 gives back cached memory.
    """
    events: list[Event] = []
    provider = _Endless()
    allocator = CachingAllocator(provider, device=0, settings=Settings.parse(conf))
    live: list[int] = []
    collects = gc.isenabled()
    gc.disable()  # another test's objects would report that they are freed
    hooks.subscribe(events.append)
    events.clear()  # the streams that earlier tests made: the numbers here are this program's own
    try:
        for what, size, stream in operations:
            chosen = size % len(live) if live else -1
            if what == 0:
                live.append(allocator.malloc(size, stream))
            elif what in (1, 2) and live:
                allocator.free(live.pop(chosen))
            elif what == 3 and live:
                allocator.record_stream(live[chosen], stream)
            elif what == 4:
                provider.passed ^= {stream}
            elif what == 5:
                allocator.empty_cache()
    finally:
        hooks.unsubscribe(events.append)
        if collects:
            gc.enable()
    records = np.zeros(len(events), RECORD)
    for i, event in enumerate(events):
        records[i]["time"] = 1000 + i
        for field in _FIELDS:
            records[i][field] = getattr(event, field)
    return Trace(records), allocator.stats()
