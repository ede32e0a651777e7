"""What makes an armed process write its last events: a condition on memory, a clock, a signal, a range, a call."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from time import monotonic_ns
from typing import Final

from cudatool.errors import ConfigError, UsageError
from cudatool.text import quoted
from cudatool.trace import pools
from cudatool.trace.events import BY_SIZE, Event, Kind
from cudatool.units import parse_bytes

__all__ = ["Metric", "RangeOf", "Reason", "TriggerCondition", "Watch"]


class Reason(StrEnum):
    """Why a part of a recording was written: the fact ``trigger`` in its header."""

    CONDITION = "condition"
    INTERVAL = "interval"
    SIGNAL = "signal"
    RANGE = "range"
    CALL = "call"
    OOM = "out-of-memory"


class Metric(StrEnum):
    """What a condition looks at, in bytes of one device."""

    ALLOCATED = "allocated"
    """In blocks that the program holds, of the caching allocator and of libraries' pools, and what others took from the
    driver."""
    RESERVED = "reserved"
    """What the caching allocator, and others, took from the driver."""


_CONDITION: Final = re.compile(r"\s*(\w+)\s*(>=?)\s*([\d.]+)\s*(%|[KMGT]?i?B)\s*", re.ASCII)
_RANGE: Final = re.compile(r"(.+):(\d{1,18})(?:-(\d{1,18}))?", re.DOTALL | re.ASCII)
_NUMBERED: Final = re.compile(r"[\s#:_/=-]*(\d{1,18})", re.ASCII)  # what follows the name, as in "step 10", "Step#10"
_MOST_NAMES: Final = 5
_PAUSE_NS: Final = 60 * 10**9
_BLOCKS: Final = {Kind.BLOCK_ALLOC: 1, Kind.BLOCK_FREE_COMPLETED: -1}
_SIGNS: Final[dict[Metric, Mapping[Kind, int]]] = {Metric.ALLOCATED: _BLOCKS, Metric.RESERVED: BY_SIZE}


@dataclass(frozen=True, slots=True)
class TriggerCondition:
    """``allocated > 90%`` or ``reserved >= 20GiB``: a metric, and a share of the device's memory or bytes.

    Attributes
    ----------
    text
        As it was given.
    metric, includes
        What is compared, and whether the limit itself fulfils it.
    share, size
        The limit: a share from 0 to 1 if `size` is None, else bytes.
    """

    text: str
    metric: Metric
    includes: bool
    share: float
    size: int | None

    @staticmethod
    def parse(text: str) -> TriggerCondition:
        """Return the condition in a text.

        Raises
        ------
        UsageError
            It is none.
        """
        found = _CONDITION.fullmatch(text)
        if found is None or found[1] not in list(Metric):
            names = " or ".join(Metric)
            raise UsageError(
                f"{quoted(text)} is no condition; write {names}, > or >=, and a share or a size: 'allocated > 90%'"
            )
        metric, sign, number, unit = found.groups()
        try:
            share = float(number) / 100 if unit == "%" else 0.0
            size = None if unit == "%" else parse_bytes(number + unit)
        except (ConfigError, ValueError):
            raise UsageError(f"{quoted(text)}: {quoted(number + unit)} is neither a share nor a size") from None
        if share > 1:
            raise UsageError(f"{quoted(text)} cannot be: a share of a device's memory is at most 100%")
        return TriggerCondition(text.strip(), Metric(metric), sign == ">=", share, size)

    def is_met(self, level: int, total: int | None) -> bool:
        """Return whether it holds for so many bytes on a device of `total` bytes; never if that is not known."""
        if self.size is None and not total:
            return False
        limit = self.size if self.size is not None else self.share * (total or 0)
        return level >= limit if self.includes else level > limit


@dataclass(frozen=True, slots=True)
class RangeOf:
    """``step:10-20``: from the tenth range of that name to the end of the twentieth, counted from 1.

    Ranges that the program itself numbers (``step 10``, ``ProfilerStep#10``) have these numbers.
    """

    name: str
    first: int
    last: int

    @staticmethod
    def parse(text: str) -> RangeOf:
        """Return the ranges in a text.

        Raises
        ------
        UsageError
            It names none.
        """
        found = _RANGE.fullmatch(text)
        if found is None or int(found[2]) > int(found[3] or found[2]):
            raise UsageError(f"{quoted(text)} names no ranges; write a name and numbers, such as step:10-20")
        return RangeOf(found[1], int(found[2]), int(found[3] or found[2]))

    @property
    def text(self) -> str:
        """As it was given."""
        return f"{self.name}:{self.first}-{self.last}"

    def number_of(self, name: str, before: int) -> int | None:
        """Return the number of a range with this name, None if it is not meant.

        Parameters
        ----------
        before
            The number of the range before it; 0 for none.
        """
        if name == self.name:
            return before + 1
        own = _NUMBERED.fullmatch(name.removeprefix(self.name)) if name.startswith(self.name) else None
        return None if own is None else int(own[1])


class _Driver:
    """Bytes in use of the driver's memory: all of an allocation or, once a library's blocks are seen in it, these."""

    def __init__(self) -> None:
        self._pools = pools.LibraryPools()
        self._whole: dict[tuple[int, int], int] = {}  # device and address -> bytes of allocations without such blocks

    def growth(self, event: Event) -> int:
        """Return by how many bytes an event of :data:`cudatool.trace.pools.KINDS` changes them."""
        kind, device, address, size = event.kind, event.device, event.address, event.size
        ended, opened = self._pools.change(kind, device, address, size, 0, 1)
        growth = -sum(block.size for block in ended)
        if kind in (Kind.MEM_ALLOC, Kind.MEM_FREE):
            growth -= self._whole.pop((device, address), 0)
        if kind in (Kind.MEM_ALLOC, Kind.POOL_ALLOC):
            growth += size
        if kind == Kind.MEM_ALLOC:
            self._whole[device, address] = size
        if opened is not None:
            growth -= self._whole.pop((device, opened.address), 0)
        return growth


class Watch:
    """A subscriber that calls `met` when a condition becomes true, or the last range ends.

    A condition is met again only after it was not, and a minute after the last time, by the clock of events: a program
    that swings around its limit does not write without end. It sees events alone: memory from before counts if the
    events of a recording's start report it. What a library takes from the driver is looked at with the thread's
    next event: that may show that only a block of it is in use.

    Parameters
    ----------
    total_of
        Returns a device's memory in bytes, None if it is not known; asked once where the condition is a share of it.
    began
        Called when the first of the ranges begins.
    """

    def __init__(
        self,
        condition: TriggerCondition | None,
        ranges: RangeOf | None,
        *,
        total_of: Callable[[int], int | None],
        met: Callable[[Reason, str], None],
        began: Callable[[], None],
    ) -> None:
        self._condition, self._ranges = condition, ranges
        self._signs = _SIGNS[condition.metric] if condition is not None else {}
        self._total_of, self._met, self._began = total_of, met, began
        self._driver = _Driver() if condition is not None and condition.metric is Metric.ALLOCATED else None
        self._unsure: dict[int, int] = {}  # thread -> device of memory that it took from the driver with its last event
        self._totals: dict[int, int | None] = {}
        self._levels: defaultdict[int, int] = defaultdict(int)
        self._is_met: set[int] = set()  # devices
        self._last_ns: int | None = None  # when it was met last
        self._open: dict[int, list[bool]] = {}  # by thread, innermost last: whether it is one of the ranges
        self.number = 0
        """Of the range that began last, among those that are meant; 0 for none."""
        self.is_inside = False
        """Whether the first of the ranges has begun, and the last has not ended."""
        self._is_past = False
        self.other_ranges: dict[str, None] = {}
        """Names of the first ranges that were not meant, until one was."""

    def __call__(self, event: Event) -> None:
        """Look at one event."""
        kind, device = event.kind, event.device
        sign = self._signs.get(kind)
        if sign is not None:
            self._levels[device] += sign * event.size
            self._look(device, event.time)
        elif self._driver is not None and kind in pools.KINDS:
            self._levels[device] += self._driver.growth(event)
            if kind == Kind.MEM_ALLOC:
                self._unsure[event.thread] = device
                return
            self._look(device, event.time)
        elif self._ranges is not None and kind in (Kind.RANGE_PUSH, Kind.RANGE_POP):
            self._range(self._ranges, event)
        if self._unsure and kind != Kind.DEVICE_USE and event.thread in self._unsure:
            self._look(self._unsure.pop(event.thread), event.time)

    def settle(self) -> None:
        """Look at what would have waited for the next event, of which there is none."""
        while self._unsure:
            self._look(self._unsure.popitem()[1], monotonic_ns())

    def _look(self, device: int, time_ns: int) -> None:
        level, condition = self._levels[device], self._condition
        assert condition is not None
        if condition.size is None and device not in self._totals:
            self._totals[device] = self._total_of(device)
        if not condition.is_met(level, self._totals.get(device)):
            self._is_met.discard(device)
        elif device not in self._is_met:
            self._is_met.add(device)
            if self._last_ns is None or time_ns - self._last_ns >= _PAUSE_NS:
                self._last_ns = time_ns
                self._met(Reason.CONDITION, condition.text)

    def _range(self, ranges: RangeOf, event: Event) -> None:
        inside = self._open.setdefault(event.thread, [])
        if event.kind == Kind.RANGE_PUSH:
            number = ranges.number_of(event.name, self.number)
            inside.append(number is not None)
            if number is not None:
                self._begin(ranges, number)
            elif not self.number and len(self.other_ranges) < _MOST_NAMES:
                self.other_ranges[event.name] = None
        elif inside and inside.pop() and self.number == ranges.last and not any(map(any, self._open.values())):
            self._end(ranges)

    def _begin(self, ranges: RangeOf, number: int) -> None:
        self.number = number
        if number > ranges.last:
            self._end(ranges)  # the last was left out
        elif number >= ranges.first and not self.is_inside and not self._is_past:
            self.is_inside = True
            self._began()

    def _end(self, ranges: RangeOf) -> None:
        if self.is_inside:
            self.is_inside, self._is_past = False, True
            self._met(Reason.RANGE, ranges.text)
