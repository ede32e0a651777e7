"""Reports the caching allocator's blocks to the software device's checkers.

The driver knows segments; what a program owns are blocks, to the byte. A block's bytes can be used from its allocation
until it is free again. Kernels run later than they are enqueued, so a block that becomes free stays usable until the
work that its stream had then has run.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from cudatool.trace.events import SEGMENT_GAINS, AccessFlag, Event, Kind

if TYPE_CHECKING:
    from cudatool.sim import Operation
    from cudatool.sim.observe.checkers import Checkers, CheckFinding

__all__ = ["BlockWatcher"]

_KINDS: Final = (Kind.BLOCK_ALLOC, Kind.BLOCK_FREE_COMPLETED, *SEGMENT_GAINS, Kind.ACCESS)


class _Thread(threading.local):
    measures = False  # inside of BlockWatcher.measured


@dataclass
class _Renewed:
    """A block that is given to a new owner, who has written nothing to it.

    Until the operations `older` of other streams have run, there may be some from before, up to number `before`, that
    read what the block's former owner wrote: a race, perhaps, but no read of memory never written.
    """

    address: int
    size: int
    before: int
    older: set[int]
    had_values: bool = False


class BlockWatcher:
    """Subscribes to the hooks; :meth:`enqueued` and :meth:`executed` receive the device's operations.

    A thread of the device may run operations while others allocate and enqueue.
    """

    def __init__(self, checkers: Checkers) -> None:
        self._shadow = checkers.shadow
        self._lock = threading.RLock()  # an allocation may collect garbage, and so free a block
        self._functions: dict[int, list[tuple[int, int]]] = {}  # correlation of a host function -> what it will write
        self._last: dict[int, Operation] = {}  # by stream id: its last operation, if that has not run
        self._waiting: dict[int, list[tuple[int, int]]] = {}  # operation -> ranges that are free after it
        self._again: dict[int, list[_Renewed]] = {}  # operation -> blocks that are new after it
        self._renewed: list[_Renewed] = []
        self._newest = 0  # the operation that was enqueued last
        self._thread = _Thread()

    def begin(self, held: Iterable[Event]) -> None:
        """Receive what is live before the first event: `held` lists segments, then blocks (perhaps written)."""
        with self._lock:
            for event in held:
                if event.kind in _KINDS:
                    self._note(event)
                if event.kind is Kind.BLOCK_ALLOC:
                    self._shadow.written(event.address, event.aux0)

    def enqueued(self, operation: Operation, stream: int, correlation: int) -> None:
        """Note the last operation of a stream."""
        with self._lock:
            self._last[stream], self._newest = operation, operation.sequence
            if operation.kind == "host" and operation.launch is None:
                self._functions[correlation] = []

    def executed(self, operation: Operation, stream: int, correlation: int) -> None:
        """Note what an operation wrote from the host, and make unusable the blocks that waited for it."""
        with self._lock:
            if operation.kind == "host":
                for address, size in self._functions.pop(correlation, ()):
                    self._shadow.written(address, size)
            if self._last.get(stream) is operation:
                del self._last[stream]
            if self._renewed:
                self._look_back(operation)
            for block in self._again.pop(operation.sequence, ()):
                self._renew(block)
            for start, stop in self._waiting.pop(operation.sequence, ()):
                self._shadow.freed(start, stop - start)

    def __call__(self, event: Event) -> None:
        """Receive an event of the hooks."""
        if event.kind in _KINDS and not (event.kind is Kind.ACCESS and self._thread.measures):
            with self._lock:
                self._note(event)

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Inside of the ``with`` block, ``ACCESS`` events of this thread tell what the device has measured.

        The checkers saw those writes when they happened. By now, the memory may have another owner.
        """
        self._thread.measures = True
        try:
            yield
        finally:
            self._thread.measures = False

    def _note(self, event: Event) -> None:
        kind = event.kind
        if kind is Kind.BLOCK_ALLOC:
            pending = self._use(event.address, event.address + event.aux0)  # not what rounding adds
            older = {last.sequence for stream, last in self._last.items() if stream != event.stream}
            block = _Renewed(event.address, event.aux0, self._newest, older)
            if older:
                self._renewed.append(block)
            if pending:
                self._shadow.usable(block.address, block.size)
                self._again.setdefault(max(pending), []).append(block)
            else:
                self._renew(block)
        elif kind is Kind.BLOCK_FREE_COMPLETED and event.aux1:
            pass  # in a private pool: each launch of the graph that it was allocated for goes on using it
        elif kind is Kind.BLOCK_FREE_COMPLETED:
            last = self._last.get(event.stream)
            if last is None:
                self._shadow.freed(event.address, event.size)
            else:
                self._waiting.setdefault(last.sequence, []).append((event.address, event.address + event.size))
        elif kind in SEGMENT_GAINS:
            self._shadow.freed(event.address, event.size)  # none of it is allocated yet
        elif kind is Kind.ACCESS and event.flags & AccessFlag.WRITE and not event.flags & AccessFlag.MASK:
            # The replacement of a library's kernel (a matrix product, say) writes from the host when it runs.
            step, rows = (event.aux0, event.aux1) if event.aux1 else (0, 1)
            ranges = [(event.address + row * step, event.size) for row in range(rows)]
            if event.correlation in self._functions:
                self._functions[event.correlation] += ranges
                return
            for address, size in ranges:
                self._shadow.written(address, size)

    def _renew(self, block: _Renewed) -> None:
        """Say that nothing was written to a block: past reads had a value; reads from now on have none."""
        if block.older:
            block.had_values = self._shadow.has_values(block.address, block.address + block.size)
        self._shadow.allocated(block.address, block.size)

    def _look_back(self, operation: Operation) -> None:
        """Take back that an operation read memory never written, if that was written for the block's former owner."""
        if operation.findings:
            operation.findings = [found for found in operation.findings if not self._was_written(found, operation)]
        for block in self._renewed:
            block.older.discard(operation.sequence)
        self._renewed = [block for block in self._renewed if block.older]

    def _was_written(self, found: CheckFinding, operation: Operation) -> bool:
        return found.kind == "uninitialized" and any(
            block.had_values and 0 <= found.address - block.address < block.size and operation.sequence <= block.before
            for block in self._renewed
        )

    def _use(self, start: int, stop: int) -> list[int]:
        """Note that a block is allocated again: it must not become unusable once the earlier work has run.

        Return the last operations of that work.
        """
        pending = []
        for operation, ranges in list(self._waiting.items()):
            if any(low < stop and start < high for low, high in ranges):
                pending.append(operation)
                self._waiting[operation] = [
                    piece
                    for low, high in ranges
                    for piece in ((low, min(high, start)), (max(low, stop), high))
                    if piece[0] < piece[1]
                ]
        return pending
