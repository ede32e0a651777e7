"""The legal orders of recorded work: linear extensions of the happens-before relation.

An operation may run as soon as everything has that happens before it. Memory that the driver hands out again adds
edges: what used it for the old owner runs before what uses it for the new one.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from cudatool.sanitize.engine import Engine
from cudatool.sanitize.intervals import ATOMIC, READ, WRITE, Access, Operation, overlap
from cudatool.sanitize.ordering import Agent, Ordering
from cudatool.sanitize.rows import WORK, read_rows
from cudatool.trace.events import AccessFlag, Kind
from cudatool.trace.model import Trace

__all__ = ["Order", "Step", "Steps"]

Order = list[int]
"""Positions in :attr:`Steps.all`."""
_DRIVER_ALLOCATIONS = (Kind.MEM_ALLOC, Kind.SEGMENT_ALLOC, Kind.SEGMENT_MAP)


_ALLOCATIONS = (Kind.BLOCK_ALLOC, Kind.MEM_ALLOC, Kind.HOST_ALLOC)  # made for the program
_MANY = 1 << 20  # pairs of accesses to compare


def _start(item: tuple[int, int, Access]) -> tuple[int, int]:
    return item[:2]


@dataclass(slots=True)
class Step:
    """An operation, or an access by the host.

    Attributes
    ----------
    operation
        Its place in the happens-before relation.
    correlation
        Of its record; 0 for the host's.
    accesses
        What it touches, as far as that is known.
    after
        Steps that come before it for the sake of memory that is handed out again.
    """

    operation: Operation
    kind: Kind
    correlation: int
    accesses: list[Access]
    after: set[int] = field(default_factory=set)

    def touches(self, start: int, stop: int) -> bool:
        """Whether it may touch a byte of the range."""
        return any(access.start < stop and start < access.stop for access in self.accesses)

    @property
    def written(self) -> list[tuple[int, int]]:
        """First byte and one past the last of what it writes."""
        return [(access.start, access.stop) for access in self.accesses if access.mode & (WRITE | ATOMIC)]


class _Positions(Ordering):
    """Remembers where each operation stands."""

    def __init__(self, streams: Sequence[Agent]) -> None:
        super().__init__(streams)
        self.at: dict[int, Operation] = {}

    def enqueue(self, host: Agent, stream: Agent, record: int) -> None:
        super().enqueue(host, stream, record)
        self.at[record] = Operation(stream.index, stream.count, stream.clock, record)

    def host_step(self, host: Agent, record: int) -> None:
        super().host_step(host, record)
        self.at[record] = Operation(host.index, host.count, host.clock, record)


class Steps:
    """The steps of a trace, in the order of the program."""

    def __init__(self, trace: Trace) -> None:
        engine = Engine(trace)
        engine.ordering = positions = _Positions(engine.ordering.streams)
        engine.run()
        self.agents = engine.agents
        self.all: list[Step] = []
        self._records = trace.records
        for row in read_rows(trace, (*WORK, Kind.HOST_ACCESS)):
            at = positions.at.get(row.record)
            if at is None:
                continue
            kind, accesses = Kind(row.kind), row.accesses or []
            if kind is Kind.HOST_ACCESS and not accesses:
                exact = not row.flags & AccessFlag.INEXACT
                accesses = [Access(row.address, row.address + row.size, row.flags & (READ | WRITE), exact=exact)]
            correlation = int(trace.records["correlation"][row.record])
            self.all.append(Step(at, kind, correlation, accesses))
        self._agent = np.array([step.operation.agent for step in self.all], np.int64)
        self._epoch = np.array([step.operation.epoch for step in self.all], np.int64)
        clocks = [step.operation.clock for step in self.all]
        self._clocks = np.array(clocks, np.int64).reshape(len(self.all), len(self.agents))
        self.of_record = {step.operation.record: index for index, step in enumerate(self.all)}
        self._order_owners(trace)

    def _order_owners(self, trace: Trace) -> None:
        """Let the users of memory come before those that use it for a later owner that the driver gave it to."""
        records = trace.records
        owners = np.flatnonzero(np.isin(records["kind"], _DRIVER_ALLOCATIONS))
        flat = [(i, a.start, a.stop) for i, step in enumerate(self.all) for a in step.accesses]
        step, start, stop = np.array(flat, np.int64).reshape(-1, 3).T
        at = np.array([self.all[i].operation.record for i in step.tolist()], np.int64)
        low = records["address"][owners].astype(np.int64)
        high = low + records["size"][owners].astype(np.int64)
        for index, owner in enumerate(owners.tolist()):
            others = np.flatnonzero((low < high[index]) & (low[index] < high))
            if len(others) == 1:
                continue
            overlapping = (start < high[index]) & (low[index] < stop)
            later = owners[others[others > index]]
            until = int(later[0]) if len(later) else len(records)
            before = set(step[overlapping & (at < owner)].tolist())
            for user in set(step[overlapping & (at > owner) & (at < until)].tolist()):
                self.all[user].after |= before

    # ---- what comes before what ----

    def before(self, index: int) -> set[int]:
        """Return every step that must come before this one."""
        found: set[int] = set()
        waiting = [index]
        while waiting:
            one = waiting.pop()
            agent, epoch = self._agent[one], self._epoch[one]
            mask = self._epoch <= self._clocks[one][self._agent]
            mask |= (self._agent == agent) & (self._epoch < epoch)
            mask[one] = False
            new = (set(np.flatnonzero(mask).tolist()) | self.all[one].after) - found
            found |= new
            # Happening before is transitive already: only the other edges lead further.
            waiting += [x for x in new if self.all[x].after or x in self.all[one].after]
        return found

    def behind(self, index: int) -> set[int]:
        """Return every step that must come after this one."""
        found: set[int] = set()
        waiting = [index]
        while waiting:
            one = waiting.pop()
            found.add(one)
            found |= self._follow(one)
            waiting += [x for x, step in enumerate(self.all) if x not in found and step.after & found]
        found.discard(index)
        return found

    def _follow(self, one: int) -> set[int]:
        agent, epoch = self._agent[one], self._epoch[one]
        mask = self._clocks[:, agent] >= epoch
        mask[self._agent == agent] = self._epoch[self._agent == agent] > epoch
        return set(np.flatnonzero(mask).tolist())

    # ---- orders ----

    def program_order(self) -> Order:
        """Return the order in which the program asked for the work."""
        return list(range(len(self.all)))

    def advanced(self, order: Order, step: int) -> Order:
        """Return `order` with a step, and what must come before it, run first."""
        needed = self.before(step)
        return [x for x in order if x in needed] + [step] + [x for x in order if x not in needed and x != step]

    def delayed(self, order: Order, step: int, behind: int) -> Order:
        """Return `order` with a step, and what must come after it, run right after another one."""
        held = self.behind(step) | {step}
        done = order.index(behind) + 1
        head = order[:done]
        return [x for x in head if x not in held] + [x for x in head if x in held] + order[done:]

    def any_order(self, choose: random.Random) -> Order:
        """Return a legal order, by chance."""
        queues: list[Order] = [[] for _ in self.agents]
        for index in reversed(range(len(self.all))):
            queues[self._agent[index]].append(index)
        order: Order = []
        done: set[int] = set()
        while len(order) < len(self.all):
            ready = [queue for queue in queues if queue and self._may_run(queue[-1], queues, done)]
            order.append(choose.choice(ready).pop())
            done.add(order[-1])
        return order

    def _may_run(self, index: int, queues: list[Order], done: set[int]) -> bool:
        clock = self._clocks[index]
        own = self._agent[index]
        heads = (queue[-1] for agent, queue in enumerate(queues) if queue and agent != own)
        return all(self._epoch[head] > clock[self._agent[head]] for head in heads) and self.all[index].after <= done

    # ---- what they do to memory ----

    def races(self) -> list[tuple[int, int]] | None:
        """Return the pairs of steps that touch the same bytes, one of them writing, in no order; None if too many."""
        found: set[tuple[int, int]] = set()
        active: list[tuple[int, Access]] = []
        compared = 0
        flat = sorted(((a.start, i, a) for i, step in enumerate(self.all) for a in step.accesses), key=_start)
        for start, index, access in flat:
            active = [(i, a) for i, a in active if a.stop > start]
            compared += len(active)
            if compared > _MANY:
                return None
            for other, earlier in active:
                plain = (access.mode | earlier.mode) & WRITE or (access.mode ^ earlier.mode) & ATOMIC
                pair = min(index, other), max(index, other)
                if plain and pair not in found and not self._is_before(*pair) and overlap(earlier, access):
                    found.add(pair)
            active.append((index, access))
        return sorted(found)

    def _is_before(self, first: int, second: int) -> bool:
        one, other = self.all[first].operation, self.all[second].operation
        return one.before(other.agent, other.clock) or first in self.all[second].after

    def owner(self, address: int) -> int | None:
        """Return the record of the last allocation that holds an address."""
        records = self._records
        start = records["address"].astype(np.int64)
        holds = (start <= address) & (address < start + records["size"].astype(np.int64))
        found = np.flatnonzero(holds & np.isin(records["kind"], _ALLOCATIONS))
        return int(found[-1]) if len(found) else None

    def memory_written(self) -> list[tuple[int, int]]:
        """Return address and size of all runs of bytes that some step writes."""
        runs: list[list[int]] = []
        for start, stop in sorted(run for step in self.all for run in step.written):
            if runs and start <= runs[-1][1]:
                runs[-1][1] = max(runs[-1][1], stop)
            else:
                runs.append([start, stop])
        return [(start, stop - start) for start, stop in runs]
