"""What the software device did, kept so that it can be done again in another order.

A :class:`Tape` holds each operation that touched memory, in the order of execution, with all that it needs to run:
kernels with their arguments, copies with the bytes that the host gave them, fills. A
:class:`~cudatool.sim.observe.replay.Replay` runs them.

What the host itself does between calls is on the tape only where the program says so (:meth:`Tape.host_writes`). What
else it wrote to memory that the device reads is found by comparing: bytes that differ from what the device left there
are the host's, and are put there again before the operation that read them. Host functions are not called again.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from cudatool.ptx.kernel_names import kernel_name
from cudatool.sim import abi
from cudatool.sim.allocations import Allocation
from cudatool.sim.arena import ALIGNMENT, SLAB_LIMIT
from cudatool.sim.jit import Instrument
from cudatool.sim.machine import Context
from cudatool.sim.observe.replay import HostRead, Replay
from cudatool.sim.observe.watched import HostBytes, WatchedMemory, bytes_at, view

if TYPE_CHECKING:
    from cudatool.sim.abi import EntryPoint, GivenBack
    from cudatool.sim.launches import Launch
    from cudatool.sim.machine import Machine
    from cudatool.sim.queue import Operation
    from cudatool.sim.results import Result

__all__ = ["CopiedRow", "Tape", "TapeEntry"]

_LIMIT: Final = 1 << 30  # bytes of the host's data that a tape may hold
_CHANGES: Final = 2 | 4  # flags of Operation.footprint: writes, atomic updates
_MANY: Final = 1 << 27  # bytes copied to the host from which on a replay keeps digests only
_PAGE: Final = 4096
_REPEATED: Final = ("kernel", "memcpy", "memset")
_CALLS: Final = ("cuLaunchHostFunc", "cuStreamAddCallback", "host node")


@dataclass(frozen=True, slots=True)
class CopiedRow:
    """A row of a copy.

    Attributes
    ----------
    target_memory, source_memory
        The host's memory that a side is in, None for the device's and for what the driver does not know.
    data
        What a source held that the driver does not know, or that was read before.
    digest
        Of what was copied to the host, empty if nothing was.
    """

    to: int
    source: int
    size: int
    target_memory: WatchedMemory | None
    source_memory: WatchedMemory | None
    to_device: bool
    data: bytes | None
    digest: bytes


@dataclass(slots=True)
class TapeEntry:
    """One operation.

    Attributes
    ----------
    owner
        Who asked for it: the number that :attr:`Tape.owners` had for it, 0 if none.
    node
        Of the graph launch that it is part of, 0 for none.
    kind, name
        As :class:`~cudatool.sim.queue.Operation` has them; or ``"host_write"``, by the host itself.
    """

    owner: int
    node: int
    kind: str
    name: str
    launch: Launch | None = None
    stack_bytes: int = 0
    pieces: list[CopiedRow] = field(default_factory=list)
    rows: list[tuple[int, WatchedMemory | None]] = field(default_factory=list)  # of a fill
    width: int = 0
    pattern: bytes = b""
    given: list[HostBytes] = field(default_factory=list)  # by the host, before it
    function: int = 0  # that it calls, and with what
    argument: int = 0


class _Thread(threading.local):
    function: tuple[int, int] | None = None  # that the call in progress enqueues, and its argument


class Tape:
    """A recording of what a machine does, between :meth:`start` and :meth:`stop`.

    Parameters
    ----------
    limit
        Bytes of the host's data that it may keep.

    Attributes
    ----------
    entries
        The operations, in the order of execution.
    owners
        Operation's sequence number -> who asked for it, set by who knows.
    again
        Functions of the host that can be called again, by their addresses.
    refusal
        Why it cannot be replayed, in a few words; empty if it can.
    regions, images
        Address and size of all device memory that there ever was; address and bytes of what it held in the beginning.
    watched
        The host's memory that there ever was.
    last
        Address, size and digest of memory that was written and is allocated in the end.
    """

    def __init__(self, limit: int = _LIMIT) -> None:
        self.entries: list[TapeEntry] = []
        self.owners: dict[int, int] = {}
        self.again: dict[int, Callable[[int], object]] = {}
        self.refusal = "nothing was recorded: there is no software device"
        self.regions: set[tuple[int, int]] = set()
        self.images: list[tuple[int, bytes]] = []
        self.watched: list[WatchedMemory] = []
        self.last: list[tuple[int, int, bytes]] = []
        self._live: dict[int, WatchedMemory] = {}
        self._used_units: set[int] = set()  # of small allocations
        self._limit = limit
        self._kept = self._copied = 0
        self._pending: list[tuple[TapeEntry, WatchedMemory, int, int]] = []  # what the host is writing
        self._calls: dict[int, tuple[int, int]] = {}  # operation -> function and argument
        self._written: set[tuple[int, int]] = set()  # device memory: first page, and one past the last
        self._in_use: dict[int, list[WatchedMemory]] = {}  # kernel -> what it may write
        self._thread = _Thread()
        self._one_at_a_time = threading.Lock()
        self._machine: Machine

    def start(self, machine: Machine) -> None:
        """Record what `machine` does from now on."""
        self._machine, self.refusal = machine, ""
        for allocation in machine.allocations:
            self.added(allocation)
            if allocation.device >= 0 and allocation.size >= SLAB_LIMIT:
                self.initialized(allocation.address, allocation.size)
        machine.allocations.watchers.append(self)
        machine.scheduler.turn = self._turn
        machine.tape = self
        abi.subscribe(self)

    def stop(self) -> None:
        """Record no more."""
        self._flush()
        abi.unsubscribe(self)
        self._machine.tape = None
        self._machine.scheduler.turn = None
        self._machine.allocations.watchers.remove(self)
        for item in self._machine.objects.values():
            if isinstance(item, Context) and item.error is not None:
                self.refuse(f"the run ended with an error of the device: {item.error}")
        if self.refusal:
            self.entries.clear()
            return
        for first, last in _merged(self._written):
            for allocation in self._machine.allocations.overlapping(first * _PAGE, (last - first) * _PAGE):
                if allocation.kind in ("device", "pool", "graph"):
                    start = max(first * _PAGE, allocation.address)
                    size = min(last * _PAGE, allocation.address + allocation.size) - start
                    self.last.append((start, size, self.digest(view(start, size))))

    def refuse(self, reason: str) -> None:
        """Something happened that cannot be done again. The first reason is kept."""
        self.refusal = self.refusal or reason

    @property
    def copies_much(self) -> bool:
        """Whether so much is copied to the host that a replay keeps digests of it."""
        return self._copied > _MANY

    @staticmethod
    def digest(data: bytes | memoryview) -> bytes:
        """Return 16 bytes that stand for `data`."""
        return hashlib.blake2b(data, digest_size=16).digest()

    # ---- memory (cudatool.sim.allocations.AllocationWatcher) ----

    def added(self, allocation: Allocation) -> None:
        """Memory can be used from now on."""
        if allocation.kind in ("virtual", "ipc"):
            self.refuse("the program maps memory itself, or shares it with other processes")
        elif allocation.device < 0 or allocation.kind == "managed":
            self._live[allocation.address] = WatchedMemory(allocation)
            self.watched.append(self._live[allocation.address])
        if allocation.device >= 0:
            self.regions.add((allocation.address, allocation.size))
            if allocation.size < SLAB_LIMIT:
                self._see_leftovers(allocation)

    def removed(self, allocation: Allocation) -> None:
        """Memory is not used any more."""
        memory = self._live.pop(allocation.address, None)
        if memory is not None and memory.in_place and memory.kind == "host":
            self.refuse("pinned memory that a kernel used in place was freed")

    def initialized(self, address: int, size: int) -> None:
        """Memory begins with what it holds now."""
        if bytes_at(address, size).any() and self._keep(size):
            self.images.append((address, ctypes.string_at(address, size)))

    def _see_leftovers(self, allocation: Allocation) -> None:
        """Small allocations share pages, so that one may hold what an owner before the recording left."""
        start, size = allocation.address, allocation.size
        units = range(start // ALIGNMENT, (start + size - 1) // ALIGNMENT + 1)
        if self._used_units.isdisjoint(units):
            self.initialized(start, size)
        self._used_units.update(units)

    def is_device(self, address: int) -> bool:
        """Whether an address is one of the device's."""
        arena = self._machine.arena
        return arena.base <= address < arena.base + arena.limit

    def _memory(self, address: int) -> WatchedMemory | None:
        """Return the host's memory that holds an address."""
        found = self._machine.allocations.holding(address)
        return self._live.get(found.address) if found is not None else None

    def _keep(self, size: int) -> bool:
        """Whether there is room for `size` bytes more."""
        self._kept += size
        if self._kept > self._limit:
            self.refuse(f"the tape is full: the host gave the device more than {self._limit:,} bytes")
        return not self.refusal

    # ---- the host ----

    def poisoned(self, address: int, size: int, value: int) -> None:
        """The driver is about to fill memory of the host, whose contents are not known."""
        memory = self._memory(address)
        if memory is not None:
            memory.look(address, size)
            memory.written(address, np.full(size, value, np.uint8))

    def host_writes(self, address: int, size: int, stride: int, rows: int, *, is_done: bool = False) -> None:
        """The host writes these rows, just now: what, is seen at the next call, or at once if it is done already."""
        entry = TapeEntry(0, 0, "host_write", "host access")
        self.entries.append(entry)
        for row in range(address, address + rows * stride, stride) if rows > 1 else (address,):
            memory = self._memory(row)
            if memory is not None and row + size <= memory.address + memory.size and self._keep(size):
                memory.look(row, size)
                self._pending.append((entry, memory, row, size))
        if is_done:
            self._flush()  # the call that noticed it may fill the memory itself

    def _flush(self) -> None:
        pending, self._pending = self._pending, []
        for entry, memory, address, size in pending:
            data = bytes_at(address, size)
            entry.given.append(HostBytes(memory, address, data.tobytes()))
            memory.written(address, data)

    # ---- operations, each before it runs ----

    def launching(self, operation: Operation, launch: Launch, stack_bytes: int) -> None:
        """A kernel."""
        entry = self._new(operation)
        entry.launch, entry.stack_bytes = launch, stack_bytes
        if {"malloc", "free"} & launch.kernel.system_calls:
            self.refuse(f"kernel {kernel_name(launch.function.name)} uses the device's heap")
        for memory in self._reachable(launch):
            if memory.kind == "registered":
                self.refuse(f"kernel {kernel_name(launch.function.name)} uses registered memory of the host in place")
            elif self._keep(2 * memory.size):
                memory.in_place = True
                entry.given.append(memory.look(memory.address, memory.size))
                self._in_use.setdefault(operation.sequence, []).append(memory)

    def copying(
        self,
        operation: Operation,
        rows: Iterable[int],
        sources: Iterable[int],
        width: int,
        staged: Sequence[bytes] = (),
    ) -> None:
        """A copy of rows of `width` bytes; `staged` is what they held, if that was read before."""
        entry = self._new(operation)
        for index, (to, source) in enumerate(zip(rows, sources, strict=True)):
            target_memory, source_memory = self._memory(to), self._memory(source)
            to_device = self.is_device(to)
            data = None
            if staged or (source_memory is None and not self.is_device(source)):
                data = staged[index] if staged else ctypes.string_at(source, width)
                source_memory = None
            if (data is not None or source_memory is not None) and not self._keep(width):
                return
            if source_memory is not None:
                entry.given.append(source_memory.look(source, width))
            if target_memory is not None:
                target_memory.look(to, width)
                target_memory.written(to, np.frombuffer(data or view(source, width), np.uint8))
            digest = b""
            if to_device:
                self._writes([(to, width)])
            else:
                digest = self.digest(data or view(source, width))
                self._copied += width
            entry.pieces.append(CopiedRow(to, source, width, target_memory, source_memory, to_device, data, digest))

    def filling(self, operation: Operation, rows: Iterable[int], pattern: bytes, width: int) -> None:
        """A fill of rows of `width` bytes."""
        entry = self._new(operation)
        entry.pattern, entry.width = pattern, width
        for row in rows:
            memory = self._memory(row)
            entry.rows.append((row, memory))
            if memory is None:
                self._writes([(row, width)])
            else:
                memory.look(row, width)
                memory.written(row, np.resize(np.frombuffer(pattern, np.uint8), width))

    @contextmanager
    def _turn(self, operation: Operation) -> Iterator[None]:
        """Let an operation run while no other one does that a replay repeats: the tape is one sequence.

        A function of the program may wait for other operations, so it must not keep them from running.
        """
        function, argument = self._calls.pop(operation.sequence, (0, 0))
        repeats = operation.kind in _REPEATED or function in self.again
        with self._one_at_a_time if repeats else nullcontext():
            if operation.kind == "host" and operation.name in _CALLS:
                entry = self._new(operation)
                entry.function, entry.argument = function, argument
            yield

    def _new(self, operation: Operation) -> TapeEntry:
        self._flush()
        owner = self.owners.get(operation.sequence, 0)
        entry = TapeEntry(owner, operation.node, operation.kind, operation.name)
        self.entries.append(entry)
        return entry

    def _writes(self, ranges: Iterable[tuple[int, int]]) -> None:
        self._written.update((start // _PAGE, (start + size - 1) // _PAGE + 1) for start, size in ranges)

    def _reachable(self, launch: Launch) -> list[WatchedMemory]:
        """Return the host's memory that a kernel's arguments point to."""
        if not self._live:
            return []
        words = np.frombuffer(launch.arguments, np.uint64).tolist()
        found = {memory.address: memory for word in words if (memory := self._memory(word)) is not None}
        return list(found.values())

    # ---- calls and operations (cudatool.sim.Subscriber) ----

    def enter(self, entry: EntryPoint, arguments: tuple[Any, ...], correlation: int) -> None:
        """The host has written what it said; and, of a call that enqueues a function: which."""
        self._flush()
        self._thread.function = (arguments[1], arguments[2]) if entry.name == "cuLaunchHostFunc" else None

    def gives_back(
        self, entry: EntryPoint, arguments: tuple[Any, ...], correlation: int, what: tuple[GivenBack, Any]
    ) -> None:
        """Nothing: what can be used is looked at when it is."""

    def enqueued(self, operation: Operation) -> None:
        """Note what a copy will find in the host's memory, unless the host writes there before the copy runs."""
        address, size = operation.host_source
        memory = self._memory(address) if size else None
        if memory is not None:
            memory.look(address, size)
        if operation.kind == "host" and self._thread.function is not None:
            self._calls[operation.sequence] = self._thread.function

    def executed(self, operation: Operation) -> None:
        """Take note of what a kernel wrote to memory of the host."""
        if operation.kind == "kernel":
            if any(found.check == "memcheck" for found in operation.findings):
                self.refuse(
                    f"memcheck kept kernel {kernel_name(operation.name)} from accesses that a replay would make"
                )
            self._writes((address, size) for address, size, flags in operation.footprint if flags & _CHANGES)
            in_use = self._in_use.pop(operation.sequence, ())
            for memory in in_use:
                memory.see_written()
            used = (self._memory(address) for address, _, _ in operation.footprint if not self.is_device(address))
            if any(memory is not None and memory not in in_use for memory in used):
                self.refuse(f"kernel {kernel_name(operation.name)} finds pinned memory by a pointer in memory")

    def leave(self, entry: EntryPoint, arguments: tuple[Any, ...], correlation: int, result: Result) -> None:
        """Nothing to do."""

    def unlocked(self) -> None:
        """Nothing to do."""

    # ---- to be done again ----

    def can_repeat(self, index: int) -> bool:
        """Whether a replay does an entry again."""
        entry = self.entries[index]
        return entry.kind != "host" or entry.function in self.again

    def prepare(self) -> None:
        """Translate what a replay needs, so that it need not do so itself."""
        launches = [entry.launch for entry in self.entries if entry.launch]
        for kernel, optimized in {(launch.kernel, launch.is_optimized) for launch in launches}:
            kernel.prepare(Instrument.NONE, optimized=optimized)

    @staticmethod
    def host_read(key: Hashable, address: int, size: int) -> HostRead:
        """Return the step of a replay in which the host reads."""
        return HostRead(key, address, size)

    @staticmethod
    def fork() -> int:
        """Fork while no other thread is inside of the driver; return as :func:`os.fork` does."""
        with abi.lock:
            return os.fork()

    def replay(self) -> Replay:
        """Return what runs it again, in a forked process."""
        return Replay(self, self.again)


def _merged(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return ranges that do not touch, for ranges that may overlap."""
    found: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(stop, found[-1][1])
        else:
            found.append((start, stop))
    return found
