"""The host's side of the engine that looks for races: one launch, and what was found (:mod:`.races`, ``_races.c``)."""

from __future__ import annotations

import ctypes
from enum import IntEnum, IntFlag
from typing import NamedTuple

from cudatool.sim.host_library import library

__all__ = [
    "ATOMIC_WORD",
    "HISTORY_LIMIT",
    "PAIR_BIT",
    "RUNS",
    "AccessRun",
    "EngineState",
    "Order",
    "RaceReason",
    "RaceRecord",
    "Races",
    "Reads",
]

RUNS = 2048
"""How many accesses of a thread, between two suspensions, may be joined with those of other threads."""

HISTORY_LIMIT = 1 << 30
"""Bytes that a launch's history may take, beside the maps of :class:`.shadow.Shadow`. Beyond, nothing is checked."""

ATOMIC_WORD = 3
"""The mode that a word of the history has for atomic updates (``M_ATOMIC`` of ``_races.c``), in its bits 32 to 35."""

PAIR_BIT = 4
"""What a word has if two threads did the same at its moment: a third one then adds nothing (``PAIR``)."""


class RaceReason(IntEnum):
    """Why nothing orders two accesses, or why order does not help."""

    NO_BARRIER = 0
    """Two warps of a block, with no barrier between."""
    NO_WARP_SYNC = 1
    """Two lanes of a warp, with neither ``__syncwarp`` of both nor a barrier between."""
    NO_ORDER = 2
    """Two blocks, and no release that the other acquired."""
    NARROW_ATOMIC = 3
    """Two atomic or volatile accesses, one of whose scopes lacks the other's block."""
    NARROW_FENCE = 4
    """The thread read a flag of another block, whose release or whose own read has the scope of a block."""
    NO_FENCE = 5
    """The thread read a flag that the other released, but has had no fence of that scope since."""
    NOT_WAITED = 6
    """The other access is an asynchronous copy that the thread has not waited for."""
    READ_ONLY_CACHE = 7
    """The read is one through the read-only cache, which does not see what the launch writes."""
    TEXTURE_CACHE = 8
    """The read is a texture fetch or one of a surface, whose cache does not see what the launch has written."""


class Reads(IntFlag):
    """What is known of a byte that a launch reads (``_races.h``)."""

    CACHED = 1
    """It was read through the read-only cache, and is remembered."""
    SETTLED = 2
    """Blocks read it, which no order tells from each other: further reads by any block add nothing."""


class RaceRecord(ctypes.Structure):
    """A race: the first of its kind at a line. Blocks are numbers in the order of execution; modes are flags."""

    _fields_ = (
        ("address", ctypes.c_uint64),
        ("block", ctypes.c_uint64),
        ("other_block", ctypes.c_uint64),
        *((name, ctypes.c_uint32) for name in ("kind", "line", "other_line", "size", "mode", "other_mode", "space")),
        *((name, ctypes.c_uint32) for name in ("thread", "other_thread", "reason", "count", "other_size")),
    )


class AccessRun(ctypes.Structure):
    """Accesses of consecutive threads by one instruction (``run_t`` of ``_races.h``)."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("next", "expected", "stride", "first", "row_stride")),
        *((name, ctypes.c_uint32) for name in ("thread", "rows")),
    )


class EngineState(ctypes.Structure):
    """What instrumented code reads of the engine's state (the beginning of ``race_t`` of ``_races.h``).

    `shared_words` is the history of the shared memory, of `shared_bytes`, of the block that runs; `now` its moment.
    The map `reads_of` has a byte for each one of device memory: a byte of `stamp`, a multiple of 4, and :class:`Reads`.
    """

    _fields_ = (
        ("runs", ctypes.c_void_p),
        ("shared_words", ctypes.c_void_p),
        ("shared_bytes", ctypes.c_uint64),
        ("reads_of", ctypes.c_void_p),
        ("stamp", ctypes.c_uint64),
        ("now", ctypes.c_uint32),
    )


class Order(NamedTuple):
    """What orders the threads of a kernel."""

    acquires: bool
    """It has fences or acquiring accesses, so that its blocks may learn of each other."""
    plain: bool
    """Barriers of the whole block alone order the threads of a block."""
    programs: bool
    """A block's accesses are in order whatever its threads do, since its language gives it one thread."""
    observes: bool = False
    """It may access plainly what it has read a strong write of (:mod:`cudatool.ptx.observation`)."""


class Races:
    """The engine for one launch.

    Parameters
    ----------
    now
        The first moment of the launch: later than all of earlier launches that `cells` know of.
    threads, width
        Of a block, and of a row of it: its first dimension.
    order
        What orders its threads.
    base
        Address of device memory.
    words, seconds, cells
        Addresses of the history of device memory.
    reads_of, stamp
        Address of the map of what the launch reads, and what tells its bytes from those of earlier launches: a multiple
        of 4 from 4 to 252.
    limit
        Bytes that the rest of the history may take.
    """

    def __init__(
        self,
        now: int,
        blocks: int,
        threads: int,
        width: int,
        shared_bytes: int,
        lines: int,
        *,
        order: Order,
        base: int,
        words: int,
        seconds: int,
        cells: int,
        reads_of: int,
        stamp: int,
        limit: int = HISTORY_LIMIT,
    ) -> None:
        self._library = library()
        begin = self._library.cudatool_race_begin
        u32, u64 = ctypes.c_uint32, ctypes.c_uint64
        begin.argtypes = [u32, u64, u32, u32, u64, u32, *[ctypes.c_int] * 4, *[u64] * 5, u32, u64]
        begin.restype = ctypes.c_void_p
        shape = now, blocks, threads, width, shared_bytes, lines
        self.handle: int = begin(*shape, *order, base, cells, words, seconds, reads_of, stamp, limit)

    def end(self) -> tuple[int, list[RaceRecord], bool]:
        """Forget all; return the first moment that the next launch may have, the races, and whether all was checked."""
        found, end = self._library.cudatool_race_found, self._library.cudatool_race_end
        found.argtypes = [ctypes.c_void_p, ctypes.POINTER(ctypes.POINTER(RaceRecord)), ctypes.POINTER(ctypes.c_uint32)]
        end.argtypes, end.restype = [ctypes.c_void_p], ctypes.c_uint32
        first = ctypes.POINTER(RaceRecord)()
        ended = ctypes.c_uint32()
        count = found(self.handle, ctypes.byref(first), ctypes.byref(ended))
        records = [RaceRecord.from_buffer_copy(first[i]) for i in range(count)]
        return end(self.handle), records, not ended.value
