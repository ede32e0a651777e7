"""The memory of one device in a running recording: what lives, how much it is, and what holds all that is charged."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from cudatool.analyze.live_rows import Tables
from cudatool.overview.ledger import Causes, LedgerLine, lines_by_name
from cudatool.trace import _sweep
from cudatool.trace.lifetimes import Ints
from cudatool.trace.pools import LibraryPools

__all__ = [
    "BORN",
    "CURVE_NS",
    "CURVE_POINTS",
    "ENDED",
    "FREED",
    "STRAIGHT",
    "DriverUse",
    "LiveDeviceMemory",
    "PoolMemory",
]

CURVE_NS: Final = 250_000_000
"""Between two points of a curve."""
CURVE_POINTS: Final = 1200
"""Of a curve: five minutes."""

BORN: Final = 1
"""A row begins a block or segment."""
FREED: Final = 2
"""The program gives it back; streams may still use it."""
ENDED: Final = 4
"""It can be handed out again."""
STRAIGHT: Final = 1
"""Beside a segment's stack: taken from the driver by the program or a library, without an allocator."""


class _Curve:
    """The highest level in each quarter of a second, for five minutes."""

    def __init__(self) -> None:
        self.points: deque[int] = deque(maxlen=CURVE_POINTS)
        self.level = 0
        self._last = 0  # number of the last point

    def add(self, time: Ints, levels: Ints) -> None:
        """Add what the level was right after each of some moments, which are in order."""
        number = time // CURVE_NS
        first = np.flatnonzero(np.diff(number, prepend=number[0] - 1))
        highest = np.maximum.reduceat(levels, first)
        last = levels[np.append(first[1:], len(levels)) - 1]
        for point, high, low in zip(number[first].tolist(), highest.tolist(), last.tolist(), strict=True):
            self.go_on(point * CURVE_NS)
            if self.points:
                self.points[-1] = max(self.points[-1], high)
            else:
                self.points.append(high)
            self.level = low

    def go_on(self, time_ns: int) -> None:
        """Let the level last until a moment."""
        point = time_ns // CURVE_NS
        if self.points:
            self.points.extend([self.level] * min(max(point - self._last, 0), CURVE_POINTS))
        self._last = max(point, self._last)


class _Level:
    """The live blocks of one device, or its segments."""

    def __init__(self) -> None:
        self.live: dict[int, tuple[int, int]] = {}  # address -> size, stack (of segments with STRAIGHT)
        self.pending = np.empty((0, 2), np.int64)  # address and size of what is freed, and a stream may still use
        self.now = self.peak = 0
        self.curve = _Curve()

    def pair(
        self, roles: npt.NDArray[np.uint8], records: npt.NDArray[np.void], stack: Ints, delta: Ints
    ) -> tuple[Ints, Ints, Ints]:
        """Note births and ends in `delta`; return stacks, sizes and numbers of what was added, negative if taken away.

        What was born and has ended inside of the piece is in neither.
        """
        address, size = records["address"], records["size"].astype(np.int64)
        count = len(records)
        # What lived before the piece ends when its address is first named in it, freed or born again.
        named, first = np.unique(address, return_index=True)
        gone = [
            (at, *found)
            for key, at in zip(named.tolist(), first.tolist(), strict=True)
            if (found := self.live.pop(key, None)) is not None
        ]
        freed_now = [(int(address[at]), size) for at, size, _ in gone if roles[at] == FREED]
        pending = np.concatenate([self.pending, np.array(freed_now, np.int64).reshape(-1, 2)])
        if len(pending):
            pending = pending[~np.isin(pending[:, 0], address[roles & (BORN | ENDED) != 0].astype(np.int64))]
        start, freed, end = np.empty((3, int(np.count_nonzero(roles == BORN))), np.int64)
        _sweep.pair(roles, np.ascontiguousarray(address), np.zeros(count, np.int8), start, freed, end)
        np.add.at(delta, start, size[start])
        is_freed = freed < count
        np.subtract.at(delta, freed[is_freed], size[start[is_freed]])
        waits = start[is_freed & (end == count)]
        self.pending = np.concatenate([pending, np.stack([address[waits].astype(np.int64), size[waits]], axis=1)])
        stay = start[~is_freed]
        stacks, sizes = stack[stay], size[stay]
        self.live.update(zip(address[stay].tolist(), zip(sizes.tolist(), stacks.tolist(), strict=True), strict=True))
        if gone:
            at, lost, whose = np.array(gone, np.int64).T
            np.subtract.at(delta, at, lost)
            one, less = np.ones(len(stay), np.int64), np.full(len(gone), -1)
            return np.concatenate([stacks, whose]), np.concatenate([sizes, -lost]), np.concatenate([one, less])
        return stacks, sizes, np.ones(len(stay), np.int64)

    def move(self, time: Ints, delta: Ints) -> None:
        """Let the level change by `delta` at each of some moments."""
        levels = np.cumsum(delta) + self.now
        self.peak = max(self.peak, int(levels.max()))
        self.now = int(levels[-1])
        self.curve.add(time, levels)


class LiveDeviceMemory:
    """The blocks and segments of one device, and what NVML and libraries say of its memory."""

    def __init__(self) -> None:
        self.blocks, self.segments = _Level(), _Level()
        self.taken: Counter[int] = Counter()  # by stack: bytes that live, straight from the driver
        self.use: DriverUse | None = None  # the last reading
        self.by_size = 0  # bytes that calls took by size, as the ledger counts them
        self.causes = Causes()
        self.said: dict[int, int] = {}  # by the library's name: what it says is in use
        self.ooms = 0

    def take(self, stacks: Ints, sizes: Ints) -> None:
        """Note what was taken straight from the driver, negative if given back."""
        straight = stacks & STRAIGHT != 0
        for stack, size in zip((stacks[straight] >> 1).tolist(), sizes[straight].tolist(), strict=True):
            self.taken[stack] += size
            if not self.taken[stack]:
                del self.taken[stack]

    def read(self, use: DriverUse) -> None:
        """Take what NVML says."""
        if self.use is not None and use.names_process != self.use.names_process:
            self.causes = Causes()  # it did not name processes before: what is charged is something else
        self.use = use
        self.causes.note(use.charged - use.by_size, use.causes)

    def ledger(self, tables: Tables, libraries: Sequence[str], pools: PoolMemory) -> tuple[tuple[LedgerLine, ...], int]:
        """Return the lines, and the bytes that are in none."""
        if self.use is None:
            return (), 0
        reserved = self.segments.now - self.taken.total()
        taken = self.taken - pools.chunks
        active = self.blocks.now + int(self.blocks.pending[:, 1].sum()) - taken.total() - pools.blocks
        held = {tables.name(library): sizes for library, sizes in pools.in_use.items()}
        said = {tables.name(library): size for library, size in self.said.items()}
        lines = [
            *lines_by_name(taken, tables.stack, max(active, 0), reserved, libraries, held, said),
            *self.causes.lines(),
        ]
        lines.sort(key=lambda line: -line.size)
        unknown = self.use.charged + self.by_size - self.use.by_size - sum(line.size for line in lines)
        return tuple(line for line in lines if line.size), unknown


@dataclass(frozen=True, slots=True)
class PoolMemory:
    """Libraries' own pools on one device, in bytes.

    Attributes
    ----------
    chunks
        What they took from the driver, by stack.
    blocks
        In all of their live blocks.
    in_use
        In blocks and in chunks, by the library's name.
    """

    chunks: Counter[int]
    blocks: int
    in_use: dict[int, tuple[int, int]]

    @classmethod
    def of(cls, pools: LibraryPools, device: int) -> PoolMemory:
        chunks: Counter[int] = Counter()
        for chunk in pools.chunks(device):
            chunks[chunk.key] += chunk.size
        return cls(chunks, sum(block.size for block in pools.blocks(device)), pools.in_use(device))


@dataclass(frozen=True, slots=True)
class DriverUse:
    """A reading of NVML, in bytes.

    Attributes
    ----------
    charged
        To this process, or where it names no process the use of the device.
    causes
        What had happened since the reading before.
    by_size
        What calls had taken by size.
    """

    charged: int
    names_process: bool
    total: int
    causes: int
    by_size: int
