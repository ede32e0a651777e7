"""What the host does, without a call of the driver, to memory that operations use.

Pinned, registered and managed memory is written by plain stores, of which no driver hears. This finds them by
comparing::

    an operation is enqueued:      look at the host memory that it will use, then keep those bytes
    the host waits or asks:        look, before anything runs
    an operation wrote the memory: keep its bytes
    the host waited for its stream: the bytes need not be kept any longer

Bytes that differ at a look, though no operation has written them since they were kept, are the host's: written after
its previous call of the driver that looked there, and before this one. Whether that was too early is for the trace's
reader to say; here nothing is concluded from the order in which the work happens to run.

That the host touches pinned memory which a pending copy is going to fill is found by the pages that it touches, reads
too (:mod:`cudatool.sim.observe.host_pages`).

Not found are other reads, other writes of bytes that were there already, and what the host does while an operation runs
that may use the same memory. When more than :data:`LIMIT` bytes are kept, only a sample of each further range is (4 KiB
of every 64 KiB, at most 4 MiB), so that a look compares at most twice the limit.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np

from cudatool.sim import abi
from cudatool.sim.observe.host_pages import PendingPages, Range

if TYPE_CHECKING:
    from cudatool.sim.allocations import Allocation, Allocations
    from cudatool.sim.queue import Operation

__all__ = ["LIMIT", "HostWatch", "Range", "ReportHostAccess"]

LIMIT: Final = 64 << 20
"""Bytes that are kept whole, of all memory together."""
_SAMPLE: Final = 4 << 10
_STEP: Final = 64 << 10
_SAMPLES: Final = 1024  # of one range
_MOST: Final = 1024  # ranges, the newest ones
_KINDS: Final = ("host", "registered", "managed")  # of memory that the host writes without a call
_UNKNOWN: Final = ("kernel", "host")  # kinds of operations that may write memory that is not named

_libc = ctypes.CDLL(None)
_libc.memcmp.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t]


class ReportHostAccess(Protocol):
    """Receives runs of bytes, ascending, that the host has written and read before the call in progress."""

    def __call__(self, written: list[Range], read: list[Range], /) -> None: ...


@dataclass(slots=True, eq=False)
class _Kept:
    """A range of the host's memory, and what its pieces held."""

    address: int
    size: int
    pieces: list[tuple[int, bytes]]
    known: list[Range] = field(default_factory=list)  # what the program has declared that it wrote since
    streams: dict[Any, int] = field(default_factory=dict)  # of the operations that use it -> the latest one's number

    @property
    def bytes_kept(self) -> int:
        return sum(len(data) for _, data in self.pieces)

    def keep(self) -> None:
        for index, (address, data) in enumerate(self.pieces):
            if _libc.memcmp(address, data, len(data)):  # to compare is cheaper than to copy
                self.pieces[index] = address, ctypes.string_at(address, len(data))
        self.known.clear()

    def changed(self) -> Iterator[Range]:
        """Yield the runs of bytes that are not what was kept, and keep what there is now."""
        for index, (address, data) in enumerate(self.pieces):
            if not _libc.memcmp(address, data, len(data)):
                continue
            now = ctypes.string_at(address, len(data))
            differs = np.frombuffer(data, np.uint8) != np.frombuffer(now, np.uint8)
            for start, size in self.known:
                low, high = max(start - address, 0), max(start + size - address, 0)
                differs[low:high] = False
            places = np.flatnonzero(differs)
            starts = np.flatnonzero(np.diff(places, prepend=-2) > 1)
            lengths = np.diff(starts, append=len(places))
            yield from zip((places[starts] + address).tolist(), lengths.tolist(), strict=True)
            self.pieces[index] = address, now
        self.known.clear()


class HostWatch:
    """Compares the host's memory that operations use. What operations call is called with the driver's lock held.

    Parameters
    ----------
    allocations
        Of the machine: the memory that is the host's to write is found there.
    report
        Called, during the driver call that looks, with what the host has done.
    """

    def __init__(self, allocations: Allocations, report: ReportHostAccess) -> None:
        self.lock = abi.lock
        self.managed = {(one.address, one.size) for one in allocations if one.kind == "managed"}
        """All managed memory."""
        self._allocations = allocations
        self._report = report
        self._kept: dict[Range, _Kept] = {}  # the oldest first
        self._bytes = 0
        self._running: dict[int, Operation] = {}
        self._is_blurred = False  # an operation has run that may have written any of it
        self._pages = PendingPages()
        self._written: list[Range] = []  # noticed, and not reported yet
        self._read: list[Range] = []

    @property
    def sees_reads(self) -> bool:
        """Whether it is noticed that the host reads what a pending copy is going to fill."""
        return self._pages.works

    def close(self) -> None:
        """Look no more."""
        self._pages.close()

    # ---- the host ----

    def look(self, ranges: Iterable[Range] | None = None, *, later: bool = False) -> None:
        """Report what the host has done since the last look, of what is kept in `ranges` (all without them).

        With `later` the next look reports it: this thread makes no call of the program.
        """
        with self.lock:
            self._look(ranges)
            if (self._written or self._read) and not later:
                written, self._written, read, self._read = self._written, [], self._read, []
                self._report(_joined(written), _joined(read))

    def _look(self, ranges: Iterable[Range] | None) -> None:
        self.blur()
        if any(operation.kind in _UNKNOWN for operation in self._running.values()):
            return
        used = [own for operation in self._running.values() for own in _used(operation)]
        self._pages.drop(used)
        read, written = self._pages.touched()
        self._read += read
        self._written += written
        for kept in list(self._kept.values()) if ranges is None else self._overlapping(ranges):
            if not any(_overlap((kept.address, kept.size), own) for own in used):
                self._written += self._changed(kept)
        self._settle()

    def _changed(self, kept: _Kept) -> Iterable[Range]:
        return () if self._pages.is_untouched(kept.address, kept.size) else kept.changed()

    def _settle(self) -> None:
        """Let pages that were only touched here be watched as before."""
        if any(operation.kind in _UNKNOWN for operation in self._running.values()):
            self._pages.drop_touched()
        else:
            self._pages.settle()

    def note(self, address: int, size: int, *, writes: bool) -> None:
        """The program itself says that it writes or reads there: that is not to be reported again."""
        with self.lock:
            self._pages.drop([(address, size)])
            for kept in self._overlapping([(address, size)]) if writes else ():
                kept.known.append((address, size))

    def wrote(self, ranges: list[Range]) -> None:
        """The driver itself has written there since the last look."""
        self._pages.drop(ranges)
        for kept in self._overlapping(ranges):
            kept.keep()
        self._settle()  # what is kept may reach beyond what was written

    def waited(self, operations: Iterable[Operation]) -> None:
        """The host has waited for these: what operations of their streams used before is not compared any more."""
        for operation in operations:
            for key, kept in list(self._kept.items()):
                if kept.streams.get(operation.stream, operation.sequence + 1) <= operation.sequence:
                    del kept.streams[operation.stream]
                    if not kept.streams:
                        self._drop(key)

    def forget(self, address: int, size: int) -> None:
        """The memory has another owner from now on, or none."""
        with self.lock:
            self._pages.drop([(address, size)])
            for kept in self._overlapping([(address, size)]):
                self._drop((kept.address, kept.size))

    # ---- cudatool.sim.allocations.AllocationWatcher ----

    def added(self, allocation: Allocation) -> None:
        """New memory is not used by any operation yet."""
        if allocation.kind == "managed":
            self.managed.add((allocation.address, allocation.size))

    def removed(self, allocation: Allocation) -> None:
        """Memory must not be read any more."""
        self.managed.discard((allocation.address, allocation.size))
        self.forget(allocation.address, allocation.size)

    # ---- operations ----

    def enqueued(self, operation: Operation) -> None:
        """Keep what the memory holds that `operation` will use, having looked at it."""
        self._pages.drop([operation.value[:2]])  # the driver reads there again and again what is waited for
        ranges = [own for own in operation.host_memory if self.is_hosts(own[0])]
        if not ranges and not self._pages:
            return
        self.look(ranges)
        self._pages.drop(ranges)
        for key in ranges:
            kept = self._kept.pop(key, None)
            if kept is None:
                kept = _Kept(*key, [])
                kept.pieces = [(start, ctypes.string_at(start, length)) for start, length in self._pieces(*key)]
                self._bytes += kept.bytes_kept
            self._kept[key] = kept
            kept.streams[operation.stream] = operation.sequence
        for other in self._overlapping(ranges):
            other.keep()  # the driver may have filled the target of a copy
        while len(self._kept) > _MOST or (self._bytes > 2 * LIMIT and len(self._kept) > 1):
            self._drop(next(iter(self._kept)))
        self._settle()
        for address, size in operation.host_target:
            found = self._allocations.holding(address, size)
            # Of a file, the system maps pages beside one that is touched.
            if found is not None and found.kind == "host" and not found.in_file:
                self._pages.watch(operation.sequence, address, size, found)

    def before(self, operation: Operation) -> None:
        """`operation` is about to run, perhaps on another thread: what it uses may be kept from now on."""
        self._running[operation.sequence] = operation

    def after(self, operation: Operation) -> None:
        """`operation` has run."""
        self._running.pop(operation.sequence, None)
        self._pages.done(operation.sequence)
        if operation.kind in _UNKNOWN:
            self._pages.drop_touched()
            self._is_blurred = True
            return
        if not self._kept:
            return
        used = _used(operation)
        self._pages.drop(used)
        for kept in self._overlapping(used):
            kept.keep()
        self._settle()

    def blur(self) -> None:
        """Keep all as it is now, if something has run that may have written any of it."""
        if self._is_blurred:
            self._is_blurred = False
            for kept in self._kept.values():
                for _ in self._changed(kept):
                    pass
            self._settle()

    # ---- helpers ----

    def is_hosts(self, address: int) -> bool:
        """Whether the host can write the memory at an address without a call."""
        found = self._allocations.holding(address)
        return found is not None and found.kind in _KINDS

    def _overlapping(self, ranges: Iterable[Range]) -> list[_Kept]:
        wanted = [one for one in ranges if one[1]]
        return [kept for kept in self._kept.values() if any(_overlap((kept.address, kept.size), one) for one in wanted)]

    def _pieces(self, address: int, size: int) -> Iterator[Range]:
        if self._bytes + size <= LIMIT:
            yield address, size
            return
        step = max(_STEP, -(-size // _SAMPLES // _SAMPLE) * _SAMPLE)
        for offset in range(0, size, step):
            yield address + offset, min(_SAMPLE, size - offset)

    def _drop(self, key: Range) -> None:
        self._bytes -= self._kept.pop(key).bytes_kept


def _used(operation: Operation) -> list[Range]:
    return [*operation.host_memory, operation.value[:2]]


def _overlap(one: Range, other: Range) -> bool:
    return one[0] < other[0] + other[1] and other[0] < one[0] + one[1]


def _joined(runs: list[Range]) -> list[Range]:
    """Return runs in ascending order that do not touch, for runs of several ranges."""
    found: list[Range] = []
    for start, size in sorted(runs):
        if found and start <= found[-1][0] + found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][0] + found[-1][1], start + size) - found[-1][0]
        else:
            found.append((start, size))
    return found
