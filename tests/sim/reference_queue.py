"""What the scheduler's part in C must do, written down in Python (cudatool/sim/_queue.c)."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Any

from cudatool.sim.queue import Schedule
from cudatool.sim.results import DriverError

__all__ = ["ReferenceOperation", "ReferenceScheduler"]


class ReferenceOperation:
    def __init__(self, stream: Any, kind: str, name: str, correlation: int) -> None:
        self.stream, self.kind, self.name, self.correlation = stream, kind, name, correlation
        self.predecessors: list[ReferenceOperation] = []
        self.done = False
        self.sequence = self.start = self.end = 0
        self.run: Callable[[Any], None] | None = None


class ReferenceScheduler:
    """One thread, no values in memory: the rest of the scheduler is Python, and tested beside."""

    def __init__(self, schedule: Schedule, seed: int) -> None:
        self.schedule = schedule
        self.host_time = 0
        self._random = random.Random(seed)
        self._pending: list[ReferenceOperation] = []
        self._count = 0
        self._engines: dict[tuple[int, str], int] = {}

    def enqueue(self, operation: Any, *, cost: int, engine: str = "", after: Iterable[Any] = ()) -> None:
        stream, context = operation.stream, operation.stream.context
        self.host_time += 1000
        before = [stream.last, *after]
        if stream is context.legacy_stream:
            before += [other.last for other in context.streams.values() if other.blocking]
        elif stream.blocking:
            before.append(context.legacy_stream.last)
        self.add(operation, cost=cost, engine=engine, after=before)
        stream.last = operation

    def add(self, operation: Any, *, cost: int, engine: str = "", after: Iterable[Any] = ()) -> None:
        before = [one for one in after if one is not None]
        self._count += 1
        operation.sequence = self._count
        self._pending.append(operation)
        self.order(operation, before)
        operation.start = max([self.host_time, *(one.end for one in before)])
        if engine:
            key = operation.stream.context.device.ordinal, engine
            operation.start = max(operation.start, self._engines.get(key, 0))
            self._engines[key] = operation.start + cost
        operation.end = operation.start + cost

    def order(self, operation: Any, after: Iterable[Any]) -> None:
        operation.predecessors += [one for one in after if not one.done]

    def wait(self, operation: Any) -> None:
        if operation is not None:
            self._finish([operation])
            self.host_time = max(self.host_time, operation.end)

    def query(self, operations: Iterable[Any]) -> bool:
        self.host_time += 200
        unfinished = [one for one in operations if not one.done]
        if not unfinished:
            return True
        end = max(one.end for one in unfinished)
        if end > self.host_time:
            self.host_time += max(1000, (end - self.host_time) // 2)
            return False
        self._finish(unfinished)
        self.host_time = max([self.host_time, *(one.end for one in operations)])
        return True

    def drain(self) -> None:
        targets = list(self._pending)
        self._finish(targets)
        self.host_time = max([self.host_time, *(one.end for one in targets)])

    def _finish(self, targets: list[Any]) -> None:
        unfinished = [one for one in targets if not one.done]
        needed = self._ancestors(unfinished)
        for target in sorted(unfinished, key=lambda one: one.sequence):
            while not target.done:
                self._run(self._choose(target, needed))

    def _choose(self, target: Any, needed: set[int]) -> Any:
        ready = {one.sequence: one for one in self._pending if all(other.done for other in one.predecessors)}
        if self.schedule is Schedule.FIFO:
            return ready[min(ready)]
        if self.schedule is Schedule.LATE:
            return ready[max(needed & ready.keys())]
        return ready[max(ready) if self.schedule is Schedule.LIFO else self._random.choice(sorted(ready))]

    def _ancestors(self, operations: list[Any]) -> set[int]:
        found: set[int] = set()
        stack = list(operations)
        while stack:
            operation = stack.pop()
            if not operation.done and operation.sequence not in found:
                found.add(operation.sequence)
                stack += operation.predecessors
        return found

    def _run(self, operation: Any) -> None:
        context = operation.stream.context
        try:
            if operation.run is not None and context.error is None:
                operation.run(operation)
        except DriverError as error:
            if context.error is None:
                context.error = DriverError(error.result, f"{operation.name}: {error}")
        operation.done = True
        self._pending.remove(operation)
