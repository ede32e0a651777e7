"""Which addresses are in use: the driver's live allocations, and other ranges, found by an address inside of them."""

from __future__ import annotations

import bisect
import time
from collections.abc import Callable, Iterator
from typing import Generic, NamedTuple, Protocol, TypeVar

from cudatool.sim.managed import Advised

__all__ = ["AddressRanges", "Allocation", "AllocationWatcher", "Allocations", "ModuleVariable"]


class ModuleVariable(NamedTuple):
    """A variable of a module, `offset` bytes into its memory. Kernels must not write to one that is constant."""

    name: str
    offset: int
    size: int
    is_constant: bool


class Allocation:
    """One live range of memory that the driver handed out.

    Attributes
    ----------
    kind
        ``"device"``, ``"pool"`` (stream-ordered), ``"managed"``, ``"host"`` (pinned), ``"registered"``, ``"module"``,
        ``"virtual"``, ``"ipc"``, ``"graph"`` or ``"array"``.
    device
        -1 for host memory.
    context, pool
        Handles of the context and the memory pool that it belongs to, 0 if none.
    advised
        Of managed memory: what the program said about it.
    gap
        Unused bytes after it.
    is_shared
        Whether other processes can use it.
    in_file
        Whether its pages are those of a file, which other processes can map.
    variables
        Of a module: what may be used of it.
    is_given_back
        Whether cuMemFreeAsync was called for it, and has yet to run.
    """

    __slots__ = (
        *("address", "advised", "context", "device", "flags", "gap", "in_file", "is_given_back", "is_shared", "kind"),
        *("pool", "serial", "size", "variables"),
    )

    def __init__(
        self,
        address: int,
        size: int,
        kind: str,
        device: int,
        context: int,
        serial: int,
        pool: int = 0,
        flags: int = 0,
        *,
        gap: int = 0,
        in_file: bool = False,
        variables: tuple[ModuleVariable, ...] = (),
    ) -> None:
        self.address, self.size, self.kind, self.device, self.context = address, size, kind, device, context
        self.serial, self.pool, self.flags, self.gap, self.in_file = serial, pool, flags, gap, in_file
        self.variables = variables
        self.advised: Advised | None = None
        self.is_shared = self.is_given_back = False


class _Range(Protocol):
    @property
    def address(self) -> int: ...
    @property
    def size(self) -> int: ...


_R = TypeVar("_R", bound=_Range)
_TRIES, _PAUSE = 10_000, 1e-4  # of a lookup during changes; seconds between two
_CHANGING = 1  # the last bit of the number of changes


class AddressRanges(Generic[_R]):
    """Live allocations, or other ranges, by address, so that the one holding an address is found in O(log n)."""

    def __init__(self) -> None:
        self._changes = 0  # odd while one of the lists has changed and the other has not
        self._starts: list[int] = []
        self._items: list[_R] = []

    def __iter__(self) -> Iterator[_R]:
        return iter(list(self._items))

    def __len__(self) -> int:
        return len(self._items)

    def add(self, item: _R) -> None:
        index = bisect.bisect_left(self._starts, item.address)
        self._changes += 1
        self._starts.insert(index, item.address)
        self._items.insert(index, item)
        self._changes += 1

    def remove(self, item: _R) -> None:
        index = bisect.bisect_left(self._starts, item.address)
        self._changes += 1
        del self._starts[index], self._items[index]
        self._changes += 1

    def look_up(self, look: Callable[[int], _R | None], address: int) -> _R | None:
        """Return what `look`, a method of this, finds at an address, without the driver's lock.

        Other threads may add and remove ranges meanwhile. No lock is taken: the garbage collector may run a finalizer
        in here that calls the driver.
        """
        for _ in range(_TRIES):
            before = self._changes
            try:
                found = look(address)
            except IndexError:
                found, before = None, _CHANGING
            if before == self._changes and not before & _CHANGING:
                return found
            time.sleep(_PAUSE)
        return None  # a signal handler's call in the middle of a change of this thread

    def at(self, address: int) -> _R | None:
        """Return the allocation that begins exactly at `address`."""
        index = bisect.bisect_left(self._starts, address)
        if index < len(self._starts) and self._starts[index] == address:
            return self._items[index]
        return None

    def overlapping(self, address: int, size: int) -> list[_R]:
        """Return the allocations that hold a part of the range, by address."""
        first = bisect.bisect_right(self._starts, address) - 1
        if first < 0 or address >= self._starts[first] + self._items[first].size:
            first += 1
        return self._items[first : bisect.bisect_left(self._starts, address + size)]

    def before(self, address: int) -> _R | None:
        """Return the last allocation that begins at or before `address`."""
        index = bisect.bisect_right(self._starts, address) - 1
        return self._items[index] if index >= 0 else None

    def after(self, address: int) -> _R | None:
        """Return the first allocation that begins after `address`."""
        index = bisect.bisect_right(self._starts, address)
        return self._items[index] if index < len(self._items) else None

    def holding(self, address: int, size: int = 1) -> _R | None:
        """Return the allocation that holds the whole range, if one does."""
        index = bisect.bisect_right(self._starts, address) - 1
        if index < 0:
            return None
        item = self._items[index]
        return item if address + size <= item.address + item.size else None


class Allocations(AddressRanges[Allocation]):
    """All live allocations. `watchers` hear of those that come and go."""

    def __init__(self) -> None:
        super().__init__()
        self.watchers: list[AllocationWatcher] = []
        self.on_host: dict[int, int] = {}  # address -> size of those that are memory of the host

    def add(self, item: Allocation) -> None:
        super().add(item)
        if item.device < 0:
            self.on_host[item.address] = item.size
        for watcher in self.watchers:
            watcher.added(item)

    def remove(self, item: Allocation) -> None:
        super().remove(item)
        if item.device < 0:
            del self.on_host[item.address]
        for watcher in self.watchers:
            watcher.removed(item)


class AllocationWatcher(Protocol):
    """Hears of allocations."""

    def added(self, allocation: Allocation) -> None: ...
    def removed(self, allocation: Allocation) -> None: ...
