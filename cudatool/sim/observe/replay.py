"""Running the operations of a tape again, in any order, on fresh memory at the same addresses."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import numpy as np

from cudatool.sim.arena import PAGE, renew
from cudatool.sim.jit import KernelError, LaunchOptions, LaunchShape
from cudatool.sim.observe.watched import WatchedMemory, bytes_at, view
from cudatool.sim.transfers import fill_row

if TYPE_CHECKING:
    from cudatool.sim.observe.tape import Tape

__all__ = ["HostRead", "Replay", "ReplayOutcome"]

_TIMEOUT_S: Final = 10.0  # of a kernel: another order may make it wait for ever


@dataclass(frozen=True, slots=True)
class HostRead:
    """The host reads memory that the device can reach, as a step of a replay; `key` names it in the outcome."""

    key: Hashable
    address: int
    size: int


@dataclass(slots=True)
class ReplayOutcome:
    """What can be seen of a replay.

    Attributes
    ----------
    copied
        (entry, address of the source) -> bytes that a copy took to the host, or their digest, in order of execution.
    read
        Key of a :class:`HostRead` -> what it saw.
    memory
        Address -> what was there at the end.
    failure
        Entry that failed, and how; None if all went well.
    """

    copied: dict[tuple[int, int], bytes] = field(default_factory=dict)
    read: dict[Hashable, bytes] = field(default_factory=dict)
    memory: dict[int, bytes] = field(default_factory=dict)
    failure: tuple[int, str] | None = None


class Replay:
    """Runs the entries of a tape. It takes the place of this process's device memory: a forked one is made for it.

    Parameters
    ----------
    again
        Functions of the host that can be called again, by their addresses.
    """

    def __init__(self, tape: Tape, again: dict[int, Callable[[int], object]]) -> None:
        self._tape = tape
        self._again = again
        self._stands_for = {one: np.empty(one.size, np.uint8) for one in tape.watched if not one.in_place}
        pages = {page for start, size in tape.regions for page in range(start // PAGE, (start + size - 1) // PAGE + 1)}
        numbers = np.array(sorted(pages), np.int64)
        runs = np.split(numbers, np.flatnonzero(np.diff(numbers) != 1) + 1) if len(numbers) else []
        self._pages = [(int(run[0]) * PAGE, len(run) * PAGE) for run in runs]
        self._pages += [(one.address, one.size) for one in tape.watched if one.in_place and one.kind == "host"]

    def run(
        self,
        order: Sequence[int | HostRead],
        memory: Iterable[tuple[int, int]] = (),
        whole: Collection[tuple[int, int]] = (),
        *,
        as_recorded: bool = False,
    ) -> ReplayOutcome:
        """Run entries, by their index, from the beginning.

        Parameters
        ----------
        memory
            Address and size of what is to be reported at the end.
        whole
            Copies to the host of which the bytes are wanted, where all together are too many to keep.
        as_recorded
            Let memory of the host hold what it held in the run before each entry, also where the entries before it
            have put something else: the driver may have filled it while a copy was pending.
        """
        for start, length in self._pages:
            renew(start, length)
        for address, data in self._tape.images:
            ctypes.memmove(address, data, len(data))
        for watched in self._tape.watched:
            bytes_at(self._place(watched.address, watched), watched.size)[:] = watched.initial
        outcome = ReplayOutcome()
        for step in order:
            if isinstance(step, HostRead):
                outcome.read[step.key] = self._read(step.address, step.size)
                continue
            try:
                self._give(step, as_recorded=as_recorded)
                self._do(step, outcome, whole)
            except KernelError as error:
                outcome.failure = step, f"{self._tape.entries[step].name}: {error}"
                break
        outcome.memory = {address: self._read(address, size) for address, size in memory}
        return outcome

    def difference(self, outcome: ReplayOutcome) -> str:
        """Say how the outcome of the recorded order differs from what was recorded; nothing if it does not."""
        if outcome.failure is not None:
            return f"failed, unlike the run ({outcome.failure[1]})"
        for index, entry in enumerate(self._tape.entries):
            for piece in entry.pieces:
                if piece.digest:
                    copied = outcome.copied[index, piece.source]
                    if piece.digest != (copied if self._tape.copies_much else self._tape.digest(copied)):
                        return f"gave other bytes than the run at {entry.name}"
        for address, size, digest in self._tape.last:
            if self._tape.digest(view(address, size)) != digest:
                return f"left other bytes than the run in the {size:,} bytes at {address:#x}"
        return ""

    def _give(self, index: int, *, as_recorded: bool) -> None:
        """Put what the host had written before an entry where the entry reads it."""
        for given in self._tape.entries[index].given:
            data = np.frombuffer(given.data, np.uint8)
            mine = slice(None) if given.replayed is None or as_recorded else ~given.replayed
            bytes_at(self._place(given.address, given.memory), len(data))[mine] = data[mine]

    def _do(self, index: int, outcome: ReplayOutcome, whole: Collection[tuple[int, int]]) -> None:
        entry = self._tape.entries[index]
        for piece in entry.pieces:
            moved = piece.data
            if moved is None:
                moved = ctypes.string_at(self._place(piece.source, piece.source_memory), piece.size)
            if piece.digest:
                key = index, piece.source
                digest_only = self._tape.copies_much and key not in whole
                outcome.copied[key] = self._tape.digest(moved) if digest_only else moved
            if piece.to_device or piece.target_memory is not None:
                ctypes.memmove(self._place(piece.to, piece.target_memory), moved, piece.size)
        for row, memory in entry.rows:
            fill_row(self._place(row, memory), entry.width, entry.pattern)
        if entry.function in self._again:
            self._again[entry.function](entry.argument)
        if entry.launch is not None:
            launch = entry.launch
            launch.kernel.launch(
                LaunchShape(launch.grid, launch.block, launch.shared, stack_bytes=entry.stack_bytes),
                launch.address,
                LaunchOptions(optimized=launch.is_optimized, cooperative=launch.cooperative, timeout_s=_TIMEOUT_S),
            )

    def _read(self, address: int, size: int) -> bytes:
        """Return what the tape knows of the contents of memory; it may be of several allocations side by side."""
        found = b""
        while len(found) < size:
            at, rest = address + len(found), size - len(found)
            holding = [memory for memory in self._tape.watched if memory.address <= at < memory.address + memory.size]
            if holding:
                memory = holding[-1]
                found += ctypes.string_at(self._place(at, memory), min(rest, memory.address + memory.size - at))
            elif self._tape.is_device(at):
                beyond = [memory.address - at for memory in self._tape.watched if memory.address > at]
                found += ctypes.string_at(at, min([rest, *beyond]))
            else:
                break
        return found

    def _place(self, address: int, memory: WatchedMemory | None) -> int:
        """Return where the bytes at an address of the device, or of `memory`, are in the replay."""
        if memory is None or memory.in_place:
            return address
        return int(self._stands_for[memory].ctypes.data) + address - memory.address
