"""What the software device did, kept so that it can be done again in another order.

A :class:`Tape` holds each operation that touched memory, in the order of execution, with all that it needs to run:
kernels with their arguments, copies with the bytes that the host gave them, fills. :class:`Replay` runs them on memory
of its own, at the same addresses, in any order. It is for a process that was forked for it: it takes the place of the
device's memory.

What the host itself does between calls is not on the tape. What it wrote to memory that the device reads is found by
comparing: bytes that differ from what the device left there are the host's, and are put there again before the
operation that read them. Host functions are not called again.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from cudatool.sim import abi
from cudatool.sim.jit import Instrument, KernelError
from cudatool.sim.machine import Context
from cudatool.sim.memory import PAGE, Allocation, renew
from cudatool.sim.transfers import fill_row

if TYPE_CHECKING:
    from cudatool.sim.abi import Entry
    from cudatool.sim.api_module import Launch
    from cudatool.sim.machine import Machine
    from cudatool.sim.queue import Operation
    from cudatool.sim.results import Result

__all__ = ["HostRead", "Outcome", "Replay", "Tape", "TapeEntry"]

_Bytes = npt.NDArray[np.uint8]
_LIMIT: Final = 1 << 30  # bytes that a tape may hold
_CALLS: Final = ("cuLaunchHostFunc", "cuStreamAddCallback", "host node")
_TIMEOUT_S: Final = 10.0  # of a kernel in a replay: another order may make it wait for ever


class _HostMemory:
    """What is known of memory that the host can write without a call: pinned, registered or managed.

    `initial` is what it held before the device first touched it, `known` what it held last, and `by_device` says which
    of those bytes the device had put there.
    """

    def __init__(self, allocation: Allocation) -> None:
        self.address = allocation.address
        self.size = allocation.size
        self.is_managed = allocation.device >= 0
        self.initial = np.zeros(allocation.size, np.uint8)
        self.known = np.zeros(allocation.size, np.uint8)
        self.by_device = np.zeros(allocation.size, bool)
        self._touched = np.zeros(allocation.size, bool)

    def look(self, address: int, size: int) -> _HostBytes:
        """Take note of what the host has written until now."""
        part = slice(address - self.address, address - self.address + size)
        now = _bytes_at(address, size)
        fresh = ~self._touched[part]
        self.initial[part][fresh] = now[fresh]
        self._touched[part] = True
        self.by_device[part] &= self.known[part] == now
        self.known[part] = now
        by_device = self.by_device[part]
        return _HostBytes(self, address, now.tobytes(), by_device.copy() if by_device.any() else None)

    def written(self, address: int, data: _Bytes) -> None:
        """The device has put `data` there."""
        part = slice(address - self.address, address - self.address + len(data))
        self.known[part] = data
        self.by_device[part] = True


@dataclass(frozen=True, slots=True)
class _HostBytes:
    """What a part of the host's memory held when an operation began; `by_device` are the bytes not to put there."""

    memory: _HostMemory
    address: int
    data: bytes
    by_device: npt.NDArray[np.bool_] | None


@dataclass(frozen=True, slots=True)
class _Piece:
    """A row of a copy. A side in the host's memory is None if the driver does not know that memory.

    `data` is what such a source held; `digest` is of what was copied to the host, empty if nothing was.
    """

    to: int
    source: int
    size: int
    target_memory: _HostMemory | None
    source_memory: _HostMemory | None
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
    kind, name
        As :class:`~cudatool.sim.queue.Operation` has them. Entries of kind ``"host"`` are not done again.
    """

    owner: int
    kind: str
    name: str
    launch: Launch | None = None
    stack_bytes: int = 0
    pieces: list[_Piece] = field(default_factory=list)
    rows: list[tuple[int, _HostMemory | None]] = field(default_factory=list)
    width: int = 0
    pattern: bytes = b""
    given: list[_HostBytes] = field(default_factory=list)  # by the host, before it

    @property
    def copies_to_host(self) -> bool:
        """Whether the host can see what it did."""
        return any(piece.digest for piece in self.pieces)


@dataclass(frozen=True, slots=True)
class HostRead:
    """The host reads memory that the device can reach, as a step of a replay; `key` names it in the outcome."""

    key: int
    address: int
    size: int


@dataclass(slots=True)
class Outcome:
    """What can be seen of a replay.

    Attributes
    ----------
    copied
        (entry, device address) -> bytes that a copy took to the host, in the order of execution.
    read
        Key of a :class:`HostRead` -> what it saw.
    memory
        Address -> what was there at the end.
    failure
        Entry that failed, and how; None if all went well.
    """

    copied: dict[tuple[int, int], bytes] = field(default_factory=dict)
    read: dict[int, bytes] = field(default_factory=dict)
    memory: dict[int, bytes] = field(default_factory=dict)
    failure: tuple[int, str] | None = None


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
    refusal
        Why it cannot be replayed, in a few words; empty if it can.
    """

    def __init__(self, limit: int = _LIMIT) -> None:
        self.entries: list[TapeEntry] = []
        self.owners: dict[int, int] = {}
        self.refusal = "nothing was recorded: there is no software device"
        self._room = limit
        self._limit = limit
        self._regions: set[tuple[int, int]] = set()  # device memory that was ever allocated
        self._images: list[tuple[int, bytes]] = []  # what it held in the beginning
        self._host: dict[int, _HostMemory] = {}
        self._all_host: list[_HostMemory] = []
        self._last: dict[int, bytes] = {}  # address of an allocation -> digest of its contents in the end
        self._machine: Machine

    def start(self, machine: Machine) -> None:
        """Record what `machine` does from now on."""
        self._machine, self.refusal = machine, ""
        for allocation in machine.allocations:
            self.added(allocation)
            if allocation.device >= 0:
                self.initialized(allocation.address, allocation.size)
        machine.allocations.watchers.append(self)
        machine.tape = self

    def stop(self) -> None:
        """Record no more."""
        self._machine.tape = None
        self._machine.allocations.watchers.remove(self)
        for item in self._machine.objects.values():
            if isinstance(item, Context) and item.error is not None:
                self.refuse(f"the run ended with an error of the device: {item.error}")
        if self.refusal:
            self.entries.clear()
            return
        for allocation in self._machine.allocations:
            if allocation.kind in ("device", "pool", "graph"):
                self._last[allocation.address] = _digest(_view(allocation.address, allocation.size))

    def refuse(self, reason: str) -> None:
        """Something happened that cannot be done again. The first reason is kept."""
        self.refusal = self.refusal or reason

    # ---- memory (cudatool.sim.memory.AllocationWatcher) ----

    def added(self, allocation: Allocation) -> None:
        """Memory can be used from now on."""
        if allocation.kind in ("virtual", "ipc"):
            self.refuse("the program maps memory itself, or shares it with other processes")
        elif allocation.device < 0 or allocation.kind == "managed":
            self._host[allocation.address] = _HostMemory(allocation)
            self._all_host.append(self._host[allocation.address])
        if allocation.device >= 0:
            self._regions.add((allocation.address, allocation.size))

    def removed(self, allocation: Allocation) -> None:
        """Memory is not used any more."""
        self._host.pop(allocation.address, None)

    def initialized(self, address: int, size: int) -> None:
        """Memory begins with what it holds now."""
        if self._keep(size):
            self._images.append((address, ctypes.string_at(address, size)))

    def poisoned(self, address: int, size: int, value: int) -> None:
        """The driver is about to fill memory of the host, of which nobody can say what it holds."""
        memory = self._host_memory(address)
        if memory is not None:
            memory.look(address, size)
            memory.written(address, np.full(size, value, np.uint8))

    def _host_memory(self, address: int) -> _HostMemory | None:
        found = self._machine.allocations.holding(address)
        return self._host.get(found.address) if found is not None else None

    def _keep(self, size: int) -> bool:
        """Whether there is room for `size` bytes more."""
        self._room -= size
        if self._room < 0:
            self.refuse(f"the tape is full: the host gave the device more than {self._limit:,} bytes")
        return not self.refusal

    # ---- operations, each before it runs ----

    def launching(self, operation: Operation, launch: Launch, stack_bytes: int) -> None:
        """A kernel."""
        entry = self._new(operation)
        entry.launch, entry.stack_bytes = launch, stack_bytes
        if {"malloc", "free"} & launch.kernel.system_calls:
            self.refuse(f"kernel {launch.function.name} uses the device's heap")
        for memory in self._reachable(launch):
            if not memory.is_managed:
                self.refuse(f"kernel {launch.function.name} uses memory of the host in place")
            elif self._keep(2 * memory.size):
                entry.given.append(memory.look(memory.address, memory.size))

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
        arena = self._machine.arena
        for index, (to, source) in enumerate(zip(rows, sources, strict=True)):
            target_memory, source_memory = self._host_memory(to), self._host_memory(source)
            data = None
            to_device, from_device = (arena.base <= a < arena.base + arena.limit for a in (to, source))
            if staged or (not from_device and source_memory is None):
                data = staged[index] if staged else ctypes.string_at(source, width)
                source_memory = None
            if (data is not None or source_memory is not None) and not self._keep(width):
                return
            if source_memory is not None:
                entry.given.append(source_memory.look(source, width))
            digest = b""
            if target_memory is not None:
                target_memory.look(to, width)
                target_memory.written(to, _bytes_at(source, width))
            if not to_device:
                digest = _digest(data if data is not None else _view(source, width))
            entry.pieces.append(_Piece(to, source, width, target_memory, source_memory, to_device, data, digest))

    def filling(self, operation: Operation, rows: Iterable[int], pattern: bytes, width: int) -> None:
        """A fill of rows of `width` bytes."""
        entry = self._new(operation)
        entry.pattern, entry.width = pattern, width
        for row in rows:
            memory = self._host_memory(row)
            entry.rows.append((row, memory))
            if memory is not None:
                memory.look(row, width)
                memory.written(row, np.resize(np.frombuffer(pattern, np.uint8), width))

    def _new(self, operation: Operation) -> TapeEntry:
        entry = TapeEntry(self.owners.get(operation.sequence, 0), operation.kind, operation.name)
        self.entries.append(entry)
        return entry

    def _reachable(self, launch: Launch) -> list[_HostMemory]:
        """Return the host's memory that a kernel's arguments point to."""
        if not self._host:
            return []
        size = len(launch.params) // 8 * 8
        words = np.frombuffer(bytes(launch.params)[:size], np.uint64).tolist()
        found = {id(memory): memory for word in words if (memory := self._host_memory(word)) is not None}
        return list(found.values())

    # ---- operations, after they ran (cudatool.sim.Subscriber) ----

    def enter(self, entry: Entry, arguments: tuple[Any, ...], correlation: int) -> None:
        """Nothing to do."""

    def enqueued(self, operation: Operation) -> None:
        """Nothing to do."""

    def leave(self, entry: Entry, arguments: tuple[Any, ...], correlation: int, result: Result) -> None:
        """Nothing to do."""

    def executed(self, operation: Operation) -> None:
        """Take note of what a kernel wrote to managed memory, and of calls of the program's functions."""
        if operation.kind == "host" and operation.name in _CALLS:
            self._new(operation)
        elif operation.kind == "kernel":
            for address, size, flags in operation.footprint:
                memory = self._host_memory(address) if flags & ~1 else None
                if memory is not None:
                    memory.written(address, _bytes_at(address, size))

    # ---- to be done again ----

    def prepare(self) -> None:
        """Translate what a replay needs, so that it need not do so itself."""
        for launch in {entry.launch.kernel: entry.launch for entry in self.entries if entry.launch}.values():
            launch.kernel.prepare(Instrument.NONE)

    @staticmethod
    def host_read(key: int, address: int, size: int) -> HostRead:
        """Return the step of a replay in which the host reads."""
        return HostRead(key, address, size)

    @staticmethod
    def fork() -> int:
        """Fork while no other thread is inside of the driver; return as :func:`os.fork` does."""
        with abi.lock:
            return os.fork()

    def replay(self) -> Replay:
        """Return what runs it again. It replaces this process's device memory: call it in a forked one."""
        return Replay(self._machine, self.entries, self._regions, self._images, self._all_host, self._last)


class Replay:
    """Runs the entries of a tape."""

    def __init__(
        self,
        machine: Machine,
        entries: list[TapeEntry],
        regions: Iterable[tuple[int, int]],
        images: Iterable[tuple[int, bytes]],
        host: Iterable[_HostMemory],
        last: dict[int, bytes],
    ) -> None:
        self._machine = machine
        self._entries = entries
        self._images = images
        self._last = last
        self._host = {memory: np.empty(memory.size, np.uint8) for memory in host if not memory.is_managed}
        self._managed = [memory for memory in host if memory.is_managed]
        pages = {page for start, size in regions for page in range(start // PAGE, (start + size - 1) // PAGE + 1)}
        numbers = np.array(sorted(pages), np.int64)
        runs = np.split(numbers, np.flatnonzero(np.diff(numbers) != 1) + 1) if len(numbers) else []
        self._pages = [(int(run[0]) * PAGE, len(run) * PAGE) for run in runs]

    def run(self, order: Sequence[int | HostRead], memory: Iterable[tuple[int, int]] = ()) -> Outcome:
        """Run entries, by their index, on fresh memory; report the contents of `memory`, address and size, too."""
        for start, length in self._pages:
            renew(start, length)
        for address, data in self._images:
            ctypes.memmove(address, data, len(data))
        for host, stands in self._host.items():
            stands[:] = host.initial
        for managed in self._managed:
            _bytes_at(managed.address, managed.size)[:] = managed.initial
        outcome = Outcome()
        for step in order:
            if isinstance(step, HostRead):
                held = [m for m in self._host if m.address <= step.address < m.address + m.size]
                at = self._place(step.address, held[-1] if held else None)
                outcome.read[step.key] = ctypes.string_at(at, step.size)
                continue
            try:
                self._do(step, outcome)
            except KernelError as error:
                outcome.failure = step, f"{self._entries[step].name}: {error}"
                break
        outcome.memory = {address: ctypes.string_at(address, size) for address, size in memory}
        return outcome

    def difference(self, outcome: Outcome) -> str:
        """Say how the outcome of the recorded order differs from what was recorded; nothing if it does not."""
        if outcome.failure is not None:
            return f"failed, unlike the run ({outcome.failure[1]})"
        for index, entry in enumerate(self._entries):
            for piece in entry.pieces:
                if piece.digest and piece.digest != _digest(outcome.copied[index, piece.source]):
                    return f"gave other bytes than the run at {entry.name}"
        for address, digest in self._last.items():
            found = self._machine.allocations.at(address)
            if found is not None and _digest(_view(address, found.size)) != digest:
                return f"left other bytes than the run in the {found.size:,} bytes at {address:#x}"
        return ""

    def _do(self, index: int, outcome: Outcome) -> None:
        entry = self._entries[index]
        for given in entry.given:
            data = np.frombuffer(given.data, np.uint8)
            mine = slice(None) if given.by_device is None else ~given.by_device
            _bytes_at(self._place(given.address, given.memory), len(data))[mine] = data[mine]
        for piece in entry.pieces:
            moved = piece.data
            if moved is None:
                moved = ctypes.string_at(self._place(piece.source, piece.source_memory), piece.size)
            if piece.digest:
                outcome.copied[index, piece.source] = moved
            if piece.to_device or piece.target_memory is not None:
                ctypes.memmove(self._place(piece.to, piece.target_memory), moved, piece.size)
        for row, memory in entry.rows:
            fill_row(self._place(row, memory), entry.width, entry.pattern)
        if entry.launch is not None:
            entry.launch.kernel.launch(
                grid=entry.launch.grid,
                block=entry.launch.block,
                shared_bytes=entry.launch.shared,
                params=ctypes.addressof(entry.launch.params),
                threads=1,
                stack_bytes=entry.stack_bytes,
                cooperative=entry.launch.cooperative,
                timeout_s=_TIMEOUT_S,
            )

    def _place(self, address: int, memory: _HostMemory | None) -> int:
        """Return where the bytes at an address of the device, or of `memory`, are in the replay."""
        if memory is None or memory.is_managed:
            return address
        return int(self._host[memory].ctypes.data) + address - memory.address


def _bytes_at(address: int, size: int) -> _Bytes:
    return np.frombuffer(_view(address, size), np.uint8)


def _view(address: int, size: int) -> memoryview:
    return memoryview((ctypes.c_uint8 * size).from_address(address))


def _digest(data: bytes | memoryview) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()
