"""A process whose CuPy is :mod:`fake_cupy`, and whose libcupti is libcupti.c: what a recording of it has."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import fake_cupy
import numpy as np

from cudatool.collect import cupti
from cudatool.collect.cupy_pool import CupyPool
from cudatool.trace import hooks, stacks
from cudatool.trace.events import RECORD, Kind
from cudatool.trace.model import Trace

_MEM_ALLOC, _MEM_FREE = 2, 4  # the numbers of the calls in libcupti.c


class Driver:
    """Gives out memory through calls that libcupti.c tells of."""

    def __init__(self, libcupti: str) -> None:
        self._call = ctypes.CDLL(libcupti).call_driver_at
        self._call.argtypes = [ctypes.c_uint32] * 3 + [ctypes.c_uint64] * 2
        self._next, self.fails = 0x10000, False
        self._numbers = itertools.count(1)

    def malloc(self, size: int) -> int:
        if self.fails:
            raise MemoryError("out of memory")
        address, self._next = self._next, self._next + -(-size // 4096) * 4096
        out = ctypes.c_uint64(address)
        self._both(_MEM_ALLOC, ctypes.addressof(out), size)
        return address

    def free(self, address: int) -> None:
        self._both(_MEM_FREE, address, 0)

    def _both(self, number: int, first: int, second: int) -> None:
        correlation = next(self._numbers)
        for site in (0, 1):
            self._call(site, correlation, number, first, second)


def prepare(libcupti: str) -> tuple[Any, Driver]:
    """Return the module ``cupy.cuda`` and the driver."""
    cupti.find_library = lambda: libcupti
    driver = Driver(libcupti)
    return fake_cupy.install(driver), driver


@contextmanager
def recorded() -> Iterator[list[Any]]:
    """Record what happens inside of the ``with`` block; at its end the value has the events."""
    events: list[Any] = []
    collector = cupti.CuptiCollector(lambda: False)
    hooks.subscribe(events.append)
    pool = CupyPool()
    try:
        yield events
    finally:
        pool.stop()
        collector.flush()
        hooks.unsubscribe(events.append)
        collector.stop()


def trace_of(events: list[Any]) -> Trace:
    """Return the events as a trace, with the library's name as name 1."""
    records = np.zeros(len(events), RECORD)
    for row, event in zip(records, events, strict=True):
        for field in ("time", "kind", "device", "address", "size", "aux0"):
            row[field] = getattr(event, field)
        row["name"] = event.name == "CuPy"
    return Trace(records, names=["", "CuPy"])


def lines(event: Any, file: str) -> list[int]:
    """Return the lines of a file in an event's stack."""
    return [frame.line for frame in stacks.frames(event.stack) if frame.file == file]


ALLOC, FREE = Kind.POOL_ALLOC, Kind.POOL_FREE
