"""The legal orders of recorded work: linear extensions of the happens-before relation.

A step may run as soon as everything has that happens before it. Two more rules order steps, that no clock shows:

* The nodes of a graph launch are steps of one operation; edges of the graph order them.
* What used memory for one owner runs before what uses it for the next one that the driver gives it to.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from cudatool.sanitize.clocks import Clocks
from cudatool.sanitize.effort import Effort
from cudatool.sanitize.engine import Engine
from cudatool.sanitize.intervals import ATOMIC, WRITE, Access, Operation, overlap
from cudatool.sanitize.ordering import Agent, Ordering
from cudatool.sanitize.rows import byte_sets, read_rows
from cudatool.trace.events import ALLOCATIONS, SEGMENT_GAINS, WORK, Kind
from cudatool.trace.model import Trace

__all__ = ["LegalStep", "LegalSteps", "Order"]

Order = list[int]
"""Positions in :attr:`LegalSteps.all`."""
_DRIVER_ALLOCATIONS = (Kind.MEM_ALLOC, *SEGMENT_GAINS)
_FREES = (Kind.BLOCK_FREE_REQUESTED, Kind.MEM_FREE, Kind.HOST_FREE)
_GRAPHS = (Kind.GRAPH_NODE_ADDED, Kind.GRAPH_INSTANTIATE, Kind.GRAPH_NODE, Kind.GRAPH_EDGE, Kind.GRAPH_LAUNCH)
_MANY = 1 << 20  # pairs of accesses to compare


class _Node(NamedTuple):
    """A node of a graph: the record that says where it comes from, and all nodes that come before and after it."""

    number: int
    record: int
    before: frozenset[int]
    later: frozenset[int]


@dataclass(slots=True)
class LegalStep:
    """An operation, a node of a graph launch, or an access by the host.

    Attributes
    ----------
    operation
        Its place in the happens-before relation. The nodes of a launch share one.
    source
        The record that names it: of the operation, or of the call that made the node.
    correlation, node
        Of the operation's record, 0 for the host's; and the number of the node, 0 for none.
    accesses
        What it touches, where that is known.
    before, later
        Steps of the same launch that come before and after it.
    after
        Steps that come before it for the sake of memory that is handed out again.
    """

    operation: Operation
    kind: Kind
    source: int
    correlation: int
    accesses: list[Access]
    node: int = 0
    before: frozenset[int] = frozenset()
    later: frozenset[int] = frozenset()
    after: set[int] = field(default_factory=set)

    def touches(self, start: int, stop: int) -> bool:
        """Whether it may touch a byte of the range."""
        return any(access.start < stop and start < access.stop for access in self.accesses)


class _Positions(Ordering):
    """Remembers where each operation stands."""

    def __init__(self, streams: Sequence[Agent], clocks: Clocks, effort: Effort) -> None:
        super().__init__(streams, clocks, effort, one_host=True)
        self.at: dict[int, Operation] = {}

    def enqueue(self, host: Agent, stream: Agent, record: int) -> None:
        super().enqueue(host, stream, record)
        self.at[record] = Operation(stream.index, stream.count, stream.clock, record)

    def host_step(self, host: Agent, record: int) -> None:
        super().host_step(host, record)
        self.at[record] = Operation(host.index, host.count, host.clock, record)


class LegalSteps:
    """The steps of a trace, in the order of the program."""

    def __init__(self, trace: Trace) -> None:
        engine = Engine(trace)
        engine.ordering = positions = _Positions(engine.ordering.streams, engine.clocks, engine.effort)
        engine.run()
        self.agents = engine.agents
        self.all: list[LegalStep] = []
        self._records = trace.records
        launches = _nodes_of_launches(trace)
        for row in read_rows(trace, (*WORK, Kind.HOST_ACCESS)):
            at = positions.at.get(row.record)
            if at is None:
                continue
            kind, accesses = Kind(row.kind), row.accesses or []
            if kind is Kind.HOST_ACCESS:
                accesses = byte_sets(trace.records[row.record : row.record + 1])
                accesses[0].host = row.record
            correlation = int(trace.records["correlation"][row.record])
            if nodes := launches.get(row.record):
                self.all += self._of_nodes(at, correlation, accesses, nodes)
            else:
                self.all.append(LegalStep(at, kind, row.record, correlation, accesses))
        self._agent = np.array([step.operation.agent for step in self.all], np.int64)
        self._epoch = np.array([step.operation.epoch for step in self.all], np.int64)
        clocks = [tuple(step.operation.clock)[: len(self.agents)] for step in self.all]
        self._clocks = np.array(clocks, np.int64).reshape(len(self.all), len(self.agents))
        self._order_owners()

    def _of_nodes(
        self, at: Operation, correlation: int, accesses: list[Access], nodes: list[_Node]
    ) -> Iterator[LegalStep]:
        """Yield a step for each node of a launch, in an order that the graph's edges allow."""
        place = {node.number: len(self.all) + index for index, node in enumerate(nodes)}
        for node in nodes:
            yield LegalStep(
                at,
                Kind.GRAPH_LAUNCH,
                node.record,
                correlation,
                [access for access in accesses if access.node == node.number],
                node.number,
                frozenset(place[number] for number in node.before),
                frozenset(place[number] for number in node.later),
            )

    def _order_owners(self) -> None:
        """Let the users of memory come before those that use it for a later owner that the driver gave it to."""
        records = self._records
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

    def of_record(self, record: int) -> list[int]:
        """Return the steps of an operation: one, or the nodes of a graph launch."""
        return [index for index, step in enumerate(self.all) if step.operation.record == record]

    # ---- what comes before what ----

    def before(self, index: int) -> set[int]:
        """Return every step that must come before this one."""
        found: set[int] = set()
        waiting = [index]
        while waiting:
            one = waiting.pop()
            agent, epoch = self._agent[one], self._epoch[one]
            mask = self._epoch <= self._clocks[one][self._agent]
            mask[self._agent == agent] = self._epoch[self._agent == agent] < epoch
            after = self.all[one].after
            new = (set(np.flatnonzero(mask).tolist()) | self.all[one].before | after) - found
            found |= new
            # Clocks and graphs are transitive already: only the edges between owners lead further.
            waiting += [x for x in new if self.all[x].after or x in after]
        return found

    def before_but(self, index: int, other: int, races: Collection[tuple[int, int]]) -> set[int]:
        """Return what comes before a step if every race but that with `other` is decided in the program's favour."""
        racing: dict[int, list[int]] = {}
        for first, second in races:
            if (first, second) != (other, index):
                racing.setdefault(second, []).append(first)
        found = self.before(index)
        waiting = [index, *found]
        while waiting:
            for first in racing.get(waiting.pop(), ()):
                if first not in found:
                    new = {first, *self.before(first)} - found
                    found |= new
                    waiting += new
        return found

    def later(self, index: int) -> set[int]:
        """Return every step that must come after this one."""
        found: set[int] = set()
        waiting = [index]
        while waiting:
            one = waiting.pop()
            found.add(one)
            found |= self._follow(one) | self.all[one].later
            waiting += [x for x, step in enumerate(self.all) if x not in found and step.after & found]
        found.discard(index)
        return found

    def _follow(self, one: int) -> set[int]:
        agent, epoch = self._agent[one], self._epoch[one]
        mask = self._clocks[:, agent] >= epoch
        mask[self._agent == agent] = self._epoch[self._agent == agent] > epoch
        return set(np.flatnonzero(mask).tolist())

    def _is_before(self, first: int, second: int) -> bool:
        """Whether a step that the program asked for earlier comes before another one, by one edge alone."""
        one, other = self.all[first].operation, self.all[second].operation
        if one.record == other.record:
            return first in self.all[second].before
        return one.before(other.agent, other.clock) or first in self.all[second].after

    # ---- orders ----

    def program_order(self) -> Order:
        """Return the order in which the program asked for the work."""
        return list(range(len(self.all)))

    @staticmethod
    def advanced(order: Order, step: int, needed: Collection[int]) -> Order:
        """Return `order` with a step, and what is `needed` before it, run first."""
        return [x for x in order if x in needed] + [step] + [x for x in order if x not in needed and x != step]

    def delayed(self, order: Order, step: int, later: int) -> Order:
        """Return `order` with a step, and what must come after it, run right after another one."""
        held = self.later(step) | {step}
        done = order.index(later) + 1
        head = order[:done]
        return [x for x in head if x not in held] + [x for x in head if x in held] + order[done:]

    def any_order(self, choose: random.Random) -> Order:
        """Return a legal order, by chance."""
        queues: list[Order] = [[] for _ in self.agents]
        for index in range(len(self.all)):
            queues[self._agent[index]].append(index)
        order: Order = []
        done: set[int] = set()
        while len(order) < len(self.all):
            heads = [queue[0] for queue in queues if queue]
            ready = [
                index
                for queue in queues
                for index in queue[: self._launched_with(queue)]
                if self._may_run(index, heads, done)
            ]
            order.append(choose.choice(ready))
            queues[self._agent[order[-1]]].remove(order[-1])
            done.add(order[-1])
        return order

    def _launched_with(self, queue: Order) -> int:
        """Return how many steps at the head of a queue are of one operation."""
        count = 0
        while count < len(queue) and self._epoch[queue[count]] == self._epoch[queue[0]]:
            count += 1
        return count

    def _may_run(self, index: int, heads: Order, done: set[int]) -> bool:
        clock, own, step = self._clocks[index], self._agent[index], self.all[index]
        others = (head for head in heads if self._agent[head] != own)
        return (
            all(self._epoch[head] > clock[self._agent[head]] for head in others)
            and step.after <= done
            and step.before <= done
        )

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
                if not plain or index == other or pair in found or self._is_before(*pair):
                    continue
                if overlap(earlier, access):
                    found.add(pair)
            active.append((index, access))
        return sorted(found)

    def owner(self, address: int) -> tuple[int, bool] | None:
        """Return the record of the last allocation that holds an address, and whether it lives in the end."""
        records = self._records
        start = records["address"].astype(np.int64)
        holds = (start <= address) & (address < start + records["size"].astype(np.int64))
        found = np.flatnonzero(holds & np.isin(records["kind"], ALLOCATIONS))
        if not len(found):
            return None
        last = int(found[-1])
        freed = (start[last:] == start[last]) & np.isin(records["kind"][last:], _FREES)
        return last, not freed.any()

    def memory_written(self) -> list[tuple[int, int]]:
        """Return address and size of all runs of bytes that some step writes."""
        runs: list[list[int]] = []
        written = ((a.start, a.stop) for step in self.all for a in step.accesses if a.mode & (WRITE | ATOMIC))
        for start, stop in sorted(written):
            if runs and start <= runs[-1][1]:
                runs[-1][1] = max(runs[-1][1], stop)
            else:
                runs.append([start, stop])
        return [(start, stop - start) for start, stop in runs]


def _start(item: tuple[int, int, Access]) -> tuple[int, int]:
    return item[:2]


# ---- graphs ----


def _nodes_of_launches(trace: Trace) -> dict[int, list[_Node]]:
    """Return the nodes of each graph launch whose graph is in the trace, in an order that its edges allow."""
    records = trace.records
    rows = np.flatnonzero(np.isin(records["kind"], _GRAPHS))
    columns = zip(
        rows.tolist(),
        *(records[name][rows].tolist() for name in ("kind", "correlation", "aux0", "aux1", "address")),
        strict=True,
    )
    added: dict[int, int] = {}  # correlation -> record of the call that added the node
    nodes: dict[int, dict[int, int]] = {}  # graph -> number -> record
    edges: dict[int, list[tuple[int, int]]] = {}
    sorted_: dict[int, list[_Node]] = {}
    launches: dict[int, list[_Node]] = {}
    for record, kind, correlation, graph, number, address in columns:
        if kind == Kind.GRAPH_NODE_ADDED:
            added[correlation] = record
        elif kind == Kind.GRAPH_INSTANTIATE:
            nodes[graph], edges[graph] = {}, []
        elif kind == Kind.GRAPH_LAUNCH:
            if graph in nodes:
                if graph not in sorted_:
                    sorted_[graph] = _sorted(nodes[graph], edges[graph])
                launches[record] = sorted_[graph]
        elif graph in nodes:
            sorted_.pop(graph, None)
            if kind == Kind.GRAPH_NODE:
                nodes[graph][number] = added.get(correlation, record)
            else:
                edges[graph].append((address, number))
    return launches


def _sorted(nodes: dict[int, int], edges: list[tuple[int, int]]) -> list[_Node]:
    direct: dict[int, list[int]] = {number: [] for number in nodes}
    for first, second in edges:
        if first in nodes and second in nodes:
            direct[second].append(first)
    before: dict[int, frozenset[int]] = {}
    while len(before) < len(nodes):
        ready = [n for n in nodes if n not in before and all(first in before for first in direct[n])]
        if not ready:
            return []  # a cycle, which has no order
        for number in ready:
            before[number] = frozenset(direct[number]).union(*(before[first] for first in direct[number]))
    later: dict[int, set[int]] = {number: set() for number in nodes}
    for number, earlier in before.items():
        for first in earlier:
            later[first].add(number)
    return [_Node(number, nodes[number], before[number], frozenset(later[number])) for number in before]
