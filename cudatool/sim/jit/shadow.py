"""What the checkers know of the device's memory, and what they found: the host's side of :mod:`.instrument`.

The maps are reserved, not allocated: they cost what was touched.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cudatool.sim.jit.context import Context
from cudatool.sim.jit.footprint import MAP_NORESERVE, PAGE
from cudatool.sim.jit.heap_blocks import FREED_BLOCK
from cudatool.sim.jit.host_places import HostPlaces
from cudatool.sim.jit.instrument import CELL, KINDS, WORD, DefectCode, FoundRecord, Instrument
from cudatool.sim.jit.race_engine import HISTORY_LIMIT, Order, RaceReason, RaceRecord, Races
from cudatool.sim.results import AddressSpaceError

__all__ = ["Found", "Launching", "Shadow"]

_CAPACITY = 256  # different defects kept of one launch
_MODES = ("", "read", "write", "atomic")
_NONE, _WHOLE, _PART = 0, 1, 2  # of a page: is its memory valid?
_LOOKED_AT = 64  # pages that are looked at byte by byte at once
_LONGEST_RUN = 1 << 16  # pages before and after an argument that are looked at
_READ_ONLY = 3  # of a byte: as one that may be used (1), and another bit
_RACES = (
    DefectCode.READ_AFTER_WRITE,
    DefectCode.WRITE_AFTER_READ,
    DefectCode.WRITE_AFTER_WRITE,
    DefectCode.STALE_READ,
    DefectCode.IN_STEP,
    DefectCode.CAS_GUESS,
)  # by kind
_versions = itertools.count()  # of all shadows: a number is never given twice
_STAMPS, _LAST_STAMP = 4, 252  # of launches, a byte: the distance from one to the next, and the last one
_EVERYWHERE = range((1 << 64) - PAGE)  # an access that begins before it and ends in it must not wrap around
_LAST_MOMENT = 1 << 27  # a launch that goes beyond 1 << 28 is checked more slowly


@dataclass(frozen=True, slots=True)
class Found:
    """A defect at an instruction, in one launch.

    Attributes
    ----------
    space
        ``"global"``, ``"shared"`` or ``"local"``: what `address` is in. In the latter two it is an offset.
    mode
        Of the access: ``"read"``, ``"write"`` or ``"atomic"``.
    block, thread
        Who met it first; `thread` is a number within the block.
    line
        Of the PTX.
    count
        How often it happened.
    other_line, other_thread, other_block, other_mode
        The earlier access of a race, or the write of what is read; `other_block` is None if it is the same block.
    reason
        Why nothing orders the accesses of a race, or why order does not help; else None.
    """

    defect: DefectCode
    space: str
    address: int
    size: int
    mode: str
    block: tuple[int, int, int]
    thread: int
    line: int
    count: int
    other_line: int = 0
    other_thread: int = 0
    other_block: tuple[int, int, int] | None = None
    other_mode: str = ""
    reason: RaceReason | None = None


class Shadow:
    """The maps over ``[base, base + size)``, for the checkers in `kinds`.

    Parameters
    ----------
    base, size
        All memory that a device can have, and the addresses before it where the host's has places
        (:mod:`.host_places`), bytes; `base` is a multiple of the page size.
    kinds
        What is checked.

    Attributes
    ----------
    history_limit
        See :data:`.race_engine.HISTORY_LIMIT`.
    version
        Another number whenever memory may have become usable, unusable or filled: what holds for a launch
        (:meth:`is_usable`, :meth:`has_values`, :meth:`sound_around`) holds for the next one with the same number.
    """

    history_limit = HISTORY_LIMIT

    def __init__(self, base: int, size: int, kinds: Instrument) -> None:
        self.base, self.size, self.kinds = base, size, kinds
        self._tracked = kinds
        self._maps = [
            _Map(size + PAGE),
            _Map(size // PAGE + 2),
            _Map(size + PAGE),
            _Map(size // PAGE + 2),
        ]
        self._valid, self._pages, self._init, self._filled = self._maps
        self._history = [_Map(size // 4 * width + PAGE) for width in (WORD, WORD, CELL)]
        self._words, self._seconds, self._cells = self._history
        self._reads_of = _Map(size + PAGE)
        self._moment = self._stamp = 0
        self.version = next(_versions)
        self._nowhere = (ctypes.c_uint64 * 16)()

    def reset(self, kinds: Instrument) -> None:
        """Forget everything, and check other things from now on."""
        self.kinds = self._tracked = kinds
        for one in (*self._maps, *self._history, self._reads_of):
            one.clear()
        self._moment = self._stamp = 0
        self.changed()

    def changed(self) -> None:
        """Forget what was learnt about memory (:attr:`version`)."""
        self.version = next(_versions)

    def narrow(self, kinds: Instrument) -> None:
        """Check only these of what is checked, until the next call.

        Reads of memory never written are checked on: kernels that are not, would leave what they write unknown.
        """
        self.kinds = self._tracked & (kinds | Instrument.INITCHECK)
        self.changed()

    # ---- memory ----

    def allocated(self, address: int, size: int) -> None:
        """From now on these bytes may be used, and nothing was written to them."""
        self.usable(address, size)
        if self._tracked & Instrument.INITCHECK:
            self._init.view[address - self.base :][:size] = 0
            self._may_lack_values(address - self.base, size)

    def usable(self, address: int, size: int) -> None:
        """From now on these bytes may be used; those that were written before still are."""
        self._set_valid(address - self.base, size, 1)

    def freed(self, address: int, size: int) -> None:
        """From now on these bytes must not be used."""
        self._set_valid(address - self.base, size, 0)

    @contextmanager
    def hidden(self, address: int, size: int) -> Iterator[None]:
        """Within the ``with`` block these bytes must not be used; after it they are what they were."""
        start, stop = address - self.base, address - self.base + size
        pages = slice(start // PAGE, -(-stop // PAGE))
        states = self._pages.view[pages].copy()
        edges = [slice(page * PAGE, (page + 1) * PAGE) for page in {pages.start, pages.stop - 1}]
        bytes_ = [self._valid.view[edge].copy() for edge in edges]
        self.freed(address, size)
        try:
            yield
        finally:
            for edge, was in zip(edges, bytes_, strict=True):
                self._valid.view[edge] = was
            self._pages.view[pages] = states
            self.changed()

    def heap(self, address: int, size: int, blocks: Sequence[tuple[int, int]] = ()) -> None:
        """This memory belongs to ``malloc`` in kernels, which has given out only `blocks` of it (address and size).

        What was written to those is not known, nor how many of their last bytes were asked for: all of them count.
        """
        start, stop = address - self.base, address - self.base + size
        self._valid.view[start:stop] = 0
        for block, bytes_ in blocks:
            self._valid.view[block - self.base :][:bytes_] = 1
        self._pages.view[start // PAGE : -(-stop // PAGE)] = _PART
        self.changed()
        self._may_lack_values(start, size)
        for block, bytes_ in blocks:
            self.written(block, bytes_)

    def read_only(self, address: int, size: int) -> None:
        """From now on kernels must not write to these bytes, which they may read."""
        start, stop = address - self.base, address - self.base + size
        for page in {start // PAGE, (stop - 1) // PAGE}:
            self._look_at_bytes(page)
        self._pages.view[start // PAGE : -(-stop // PAGE)] = _PART
        self._valid.view[start:stop] = _READ_ONLY
        self.changed()

    def is_read_only(self, address: int, size: int) -> bool:
        """Whether all of these bytes may be read, and some not written."""
        start = address - self.base
        return self.usable_bytes(address, size) == size and bool(
            np.any((self._valid.view[start : start + size] == _READ_ONLY) & (self._pages.view[start // PAGE] == _PART))
        )

    def usable_bytes(self, address: int, size: int) -> int:
        """Return how many of these bytes may be used."""
        start = address - self.base
        if not 0 <= start <= self.size - size:
            return 0
        states = self._pages.view[np.arange(start, start + size) // PAGE]
        bytes_ = self._valid.view[start : start + size]
        return int(np.sum((states == _WHOLE) | ((states == _PART) & (bytes_ & 1 == 1))))

    def usable_before_gap(self, address: int, size: int) -> int:
        """Return how many of these bytes may be used before the first one that must not be."""
        start = address - self.base
        stop = start + size
        if not 0 <= start < stop <= self.size:
            return 0
        first, last = start // PAGE, (stop - 1) // PAGE
        pages = self._pages.view
        # One page is most of what programs copy often, and needs no search.
        parts = [first] if first == last else (np.flatnonzero(pages[first : last + 1] != _WHOLE) + first).tolist()
        for page in parts:
            low = max(start, page * PAGE)
            if pages[page] == _NONE:
                return low - start
            if pages[page] == _PART:
                bytes_ = self._valid.view[low : min(stop, (page + 1) * PAGE)].tobytes()
                gaps = [at for at in (bytes_.find(0), bytes_.find(FREED_BLOCK)) if at >= 0]
                if gaps:
                    return low - start + min(gaps)
        return size

    def in_freed_block(self, address: int) -> bool:
        """Whether an address is in memory that kernels took from the heap and gave back."""
        offset = address - self.base
        return 0 <= offset < len(self._valid.view) and bool(self._valid.view[offset] == FREED_BLOCK)

    def written(self, address: int, size: int) -> None:
        """These bytes have a value now."""
        if Instrument.INITCHECK in self._tracked and self._covers(address):
            self._init.view[address - self.base :][:size] = 1
            self.changed()

    def copied(self, target: int, source: int, size: int) -> tuple[int, int]:
        """What is known of the values of `source` holds for `target`; memory of the host has values.

        Return where a copy to the host reads bytes to which nothing was written: the first one and their number, which
        is 0 if there are none. A copy on the device only hands on what is known of them.
        """
        if Instrument.INITCHECK not in self._tracked:
            return 0, 0
        if not self._covers(target):
            if not self._covers(source):
                return 0, 0
            places = np.flatnonzero(self._init.view[source - self.base :][:size] == 0)
            return (source + int(places[0]), len(places)) if len(places) else (0, 0)
        if self._covers(source):
            at, come = target - self.base, source - self.base
            self._init.view[at : at + size] = self._init.view[come : come + size].copy()
            self._may_lack_values(at, size)
        else:
            self.written(target, size)
        return 0, 0

    def is_usable(self, first: int, stop: int, *, to_write: bool) -> bool:
        """Whether all bytes from address `first` to `stop` may be read, or written, too."""
        start, stop = first - self.base, stop - self.base
        if not 0 <= start < stop <= self.size:
            return False
        pages = self._pages.view[start // PAGE : -(-stop // PAGE)]
        others = np.flatnonzero(pages != _WHOLE)
        if len(others) > _LOOKED_AT or np.any(pages[others] == _NONE):
            return False
        for page in (others + start // PAGE).tolist():
            states = self._valid.view[max(start, page * PAGE) : min(stop, (page + 1) * PAGE)]
            if not np.all(states == 1 if to_write else states & 1):
                return False
        return True

    def has_values(self, first: int, stop: int) -> bool:
        """Whether something was written to all bytes from address `first` to `stop`.

        Full pages are remembered until their memory is allocated or copied to again: nothing else empties them.
        """
        start, stop = first - self.base, stop - self.base
        if not 0 <= start < stop <= self.size:
            return False
        begin = start // PAGE
        unknown = np.flatnonzero(self._filled.view[begin : -(-stop // PAGE)] == 0) + begin
        for some in np.split(unknown, np.flatnonzero(np.diff(unknown) != 1) + 1) if len(unknown) else ():
            for page in range(int(some[0]), int(some[-1]) + 1, _LOOKED_AT):
                end = min(page + _LOOKED_AT, int(some[-1]) + 1)
                if not self._init.view[max(start, page * PAGE) : min(stop, end * PAGE)].min():
                    return False
                whole = slice(-(-max(start, page * PAGE) // PAGE), min(stop, end * PAGE) // PAGE)
                self._filled.view[whole] = self._pages.view[whole] == _WHOLE  # kernels empty parts of the heap
        return True

    def sound_around(self, pointer: int) -> tuple[int, int]:
        """Return from which to which address memory around a pointer may be used, and has values if that is checked.

        Both are multiples of a page, and equal if there is no such page.
        """
        page = (pointer - self.base) // PAGE
        if not 0 <= pointer - self.base < self.size or self._pages.view[page] != _WHOLE:
            return 0, 0
        first, stop = _run_around(self._pages.view, page)
        if self.kinds & Instrument.INITCHECK:
            self.has_values(self.base + page * PAGE, self.base + stop * PAGE)
            if not self._filled.view[page]:
                return 0, 0
            begin, end = _run_around(self._filled.view, page)
            first, stop = max(first, begin), min(stop, end)
        return self.base + first * PAGE, self.base + stop * PAGE

    def _may_lack_values(self, start: int, size: int) -> None:
        self._filled.view[start // PAGE : -(-(start + size) // PAGE)] = 0
        self.changed()

    def _covers(self, address: int) -> bool:
        return self.base <= address < self.base + self.size

    def _set_valid(self, start: int, size: int, value: int) -> None:
        self.changed()
        stop = start + size
        first, last = -(-start // PAGE), stop // PAGE  # pages that lie inside as a whole
        if first < last:
            self._pages.view[first:last] = _WHOLE if value else _NONE
        for page in {start // PAGE, (stop - 1) // PAGE} if size else ():
            if first <= page < last:
                continue
            begin = page * PAGE
            self._look_at_bytes(page)
            self._valid.view[max(start, begin) : min(stop, begin + PAGE)] = value

    def _look_at_bytes(self, page: int) -> None:
        """Let the bytes of a page say which of them are valid."""
        state = self._pages.view[page]
        if state != _PART:
            self._valid.view[page * PAGE : (page + 1) * PAGE] = state == _WHOLE
            self._pages.view[page] = _PART

    # ---- launches ----

    def prepare(
        self,
        contexts: list[Context],
        lines: int,
        host: HostPlaces,
        order: Order,
        written: range | None,
        sound: Sequence[tuple[int, int]] = (),
    ) -> Launching:
        """Fill in the workers' contexts for a launch of code with `lines` lines of PTX.

        Outside of the addresses `written`, if known, the launch writes nothing. `sound` is what :meth:`sound_around`
        says of the arguments that addresses are computed from.
        """
        if self._moment > _LAST_MOMENT:  # moments would begin again: forget what has old ones
            for one in self._history:
                one.clear()
            self._moment = 0
        if self.kinds & Instrument.RACECHECK:
            self._stamp += _STAMPS
        if self._stamp > _LAST_STAMP:
            self._reads_of.clear()
            self._stamp = _STAMPS
        return Launching(self, contexts, lines, host, order, written, sound)


def _run_around(pages: npt.NDArray[np.uint8], page: int) -> tuple[int, int]:
    """Return where the run of pages around `page` that are all 1 begins and stops, at most so far from it."""
    before = np.flatnonzero(pages[max(0, page - _LONGEST_RUN) : page] != 1)
    after = np.flatnonzero(pages[page : page + _LONGEST_RUN] != 1)
    first = max(0, page - _LONGEST_RUN) + int(before[-1]) + 1 if len(before) else max(0, page - _LONGEST_RUN)
    return first, page + int(after[0]) if len(after) else min(page + _LONGEST_RUN, len(pages))


class Launching:
    """One launch under the checkers: its buffers, and afterwards what was found."""

    def __init__(
        self,
        shadow: Shadow,
        contexts: list[Context],
        lines: int,
        host: HostPlaces,
        order: Order,
        written: range | None,
        sound: Sequence[tuple[int, int]],
    ) -> None:
        written = _EVERYWHERE if written is None else written
        self._shadow = shadow
        self._contexts = contexts
        self._counts = (ctypes.c_uint32 * (lines * KINDS))()
        self._records = (ctypes.c_uint8 * (16 + _CAPACITY * ctypes.sizeof(FoundRecord)))()
        self._host = host
        self._races: Races | None = None
        if shadow.kinds & Instrument.RACECHECK:
            first = contexts[0]
            self._races = Races(
                shadow._moment + 1,
                first.blocks,
                first.threads,
                first.block_x,
                first.shared_bytes,
                lines,
                order=order,
                base=shadow.base,
                words=shadow._words.address,
                seconds=shadow._seconds.address,
                cells=shadow._cells.address,
                reads_of=shadow._reads_of.address,
                stamp=shadow._stamp,
                limit=shadow.history_limit,
            )
        for context in contexts:
            context.arena_base = shadow.base  # and of the footprint, which may cover less
            context.arena_bytes = context.arena_bytes or shadow.size
            context.shadow_valid, context.shadow_valid_pages = shadow._valid.address, shadow._pages.address
            context.shadow_init = shadow._init.address
            context.nowhere_read = ctypes.addressof(shadow._nowhere)
            context.nowhere = context.nowhere_read + 64
            context.found_lines, context.found_capacity = lines, _CAPACITY
            context.found_counts = ctypes.addressof(self._counts)
            context.found_records = ctypes.addressof(self._records)
            context.race = self._races.handle if self._races else 0
            for number, (start, stop) in enumerate(sound):
                context.argument_first[number], context.argument_bytes[number] = start, stop - start
            context.written_first, context.written_bytes = written.start - shadow.base, written.stop - written.start

    def found(self) -> list[Found]:
        """Return the defects, in the order in which they were met. To be called once, after the launch."""
        number = min(ctypes.c_uint64.from_buffer(self._records).value, _CAPACITY)
        records = (FoundRecord * number).from_buffer(self._records, 16)
        found = [self._one(record) for record in records]
        if self._races is not None:
            self._shadow._moment, raced, whole = self._races.end()
            found += [self._race(record) for record in raced]
            if not whole:
                found.append(Found(DefectCode.UNCHECKED, "", 0, 0, "", (0, 0, 0), 0, 0, 1))
        return found

    def _one(self, record: FoundRecord) -> Found:
        return Found(
            defect=DefectCode(record.kind),
            space=("global", "shared", "local")[record.space],
            address=record.address,
            size=record.size,
            mode=_MODES[record.mode],
            block=tuple(record.block),
            thread=record.thread,
            line=record.line,
            count=self._counts[record.line * KINDS + record.kind],
        )

    def _race(self, record: RaceRecord) -> Found:
        own, other = self._coordinates(record.block), self._coordinates(record.other_block)
        return Found(
            defect=_RACES[record.kind],
            space=("global", "shared")[record.space],
            address=record.address if record.space else self._host.address_at(record.address),
            size=record.size,
            mode=_MODES[record.mode & 3],
            block=own,
            thread=record.thread,
            line=record.line,
            count=record.count,
            other_line=record.other_line,
            other_thread=record.other_thread,
            other_block=None if other == own else other,
            other_mode=_MODES[record.other_mode & 3],
            reason=RaceReason(record.reason),
        )

    def _coordinates(self, index: int) -> tuple[int, int, int]:
        """Return the block with a number in the order of execution."""
        context = self._contexts[0]
        number = (index * context.order_multiplier + context.order_offset) % context.blocks
        return (
            number % context.grid_x,
            number // context.grid_x % context.grid_y,
            number // context.grid_x // context.grid_y,
        )


class _Map:
    """Zeros that take memory only where they are touched."""

    def __init__(self, size: int) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
        try:
            self._map = mmap.mmap(-1, -(-size // PAGE) * PAGE, flags=flags)
        except OSError:
            raise AddressSpaceError(size) from None
        self.view: npt.NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)
        self.address: int = self.view.ctypes.data

    def clear(self) -> None:
        self._map.madvise(mmap.MADV_DONTNEED)
