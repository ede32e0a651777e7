"""What each launch on a GPU may access: its arguments, as CUPTI shows them, applied to what its PTX says.

Of memory that an argument points to, all of the allocation counts as accessed (docs/design/access-inference.md).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import IntFlag

from cudatool.collect.live_memory import LiveMemory
from cudatool.collect.loaded_code import LoadedCode
from cudatool.ptx import Mode, PtxError, accesses_of_launch
from cudatool.trace.events import AccessFlag, LaunchFlag, launch_flags

__all__ = ["Judged", "LaunchRowFlag", "Launches", "Pointed"]

_FLAGS = {Mode.READ: AccessFlag.READ, Mode.WRITE: AccessFlag.WRITE, Mode.ATOMIC: AccessFlag.ATOMIC}


class LaunchRowFlag(IntFlag):
    """What :file:`_cupti_launches.h` says of a launch."""

    COOPERATIVE = 1
    PROGRAMMATIC = 2
    ARGUMENTS_UNKNOWN = 4
    PER_THREAD = 8
    """Its default stream is that of the calling thread."""
    CAPTURED = 16
    """It is a node of a graph, and did not run."""


@dataclass(frozen=True, slots=True)
class Judged:
    """What is known of one launch.

    Attributes
    ----------
    flags
        Those of its event.
    accesses
        Address, size and :class:`AccessFlag` of each allocation that it may touch; empty if nothing is known.
    doubts
        Why it may touch more, in words; empty if it may not, or if nothing is known.
    """

    flags: LaunchFlag
    accesses: Sequence[tuple[int, int, AccessFlag]] = ()
    doubts: str = ""

    @classmethod
    def of(cls, row_flags: int, orders: tuple[bool, bool, bool] = (False, False, False)) -> Judged:
        """Return what the log's flags of a launch say, and :attr:`KernelCode.orders`."""
        flags = launch_flags(bool(row_flags & LaunchRowFlag.PROGRAMMATIC), *orders)
        flags |= LaunchFlag.CAPTURED if row_flags & LaunchRowFlag.CAPTURED else LaunchFlag(0)
        return cls(flags)


class Launches:
    """Judges launches.

    Parameters
    ----------
    ptx_of
        As :class:`LoadedCode` takes it.
    """

    def __init__(self, ptx_of: Callable[[int], bytes | None]) -> None:
        self.code = LoadedCode(ptx_of)
        self.blocks = LiveMemory()
        """What pools of libraries have handed out: parts of the driver's allocations."""
        self._said: set[str] = set()

    def is_first(self, text: str) -> bool:
        """Return whether something is said for the first time."""
        is_new = text not in self._said
        self._said.add(text)
        return is_new

    def judge(
        self, function: int, name: str, row_flags: int, arguments: bytes | None, memory: Sequence[LiveMemory]
    ) -> Judged:
        """Return what a launch of `function` may access of these pieces of memory and of the pools' blocks."""
        code = self.code.kernel(function, name)
        if code is None or arguments is None or row_flags & LaunchRowFlag.ARGUMENTS_UNKNOWN:
            return Judged.of(row_flags)

        def find(address: int) -> tuple[int, int] | None:
            for one in (self.blocks, *memory):
                if piece := one.find(address):
                    return piece
            return None

        try:
            found = accesses_of_launch(code.accesses, arguments, find)
        except PtxError:  # not the arguments of this kernel
            return Judged.of(row_flags, code.orders)
        doubts = ", ".join(sorted(found.doubts)) if found.unknown else ""
        accesses = [(touched.address, touched.size, _access_flags(touched.mode)) for touched in found.ranges]
        return replace(Judged.of(row_flags, code.orders), accesses=accesses, doubts=doubts)


def _access_flags(mode: Mode) -> AccessFlag:
    flags = AccessFlag.INEXACT
    for one in mode:
        flags |= _FLAGS[one]
    return flags


class Pointed:
    """The bytes that rows of the log point to, by their offsets from its beginning, which only grow."""

    def __init__(self) -> None:
        self._parts: deque[tuple[int, bytes]] = deque()

    def add(self, at: int, data: bytes) -> None:
        """Append what begins at an offset."""
        if data:
            self._parts.append((at, data))

    def find(self, offset: int, length: int) -> bytes | None:
        """Return `length` bytes from an offset on, and forget the parts before; None if they were not noted."""
        at, data = self.part(offset)
        if data:
            return data[offset - at : offset - at + length]
        return b"" if not length and offset <= self._end() else None

    def part(self, offset: int) -> tuple[int, bytes]:
        """Return where the part with an offset begins, and the part, empty if there is none; forget the ones before."""
        while self._parts and self._parts[0][0] + len(self._parts[0][1]) <= offset < self._end():
            self._parts.popleft()
        for at, data in self._parts:
            if at <= offset < at + len(data):
                return at, data
        return offset, b""

    def _end(self) -> int:
        return self._parts[-1][0] + len(self._parts[-1][1]) if self._parts else 0
