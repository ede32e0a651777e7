"""The search for two legal orders of recorded work whose results differ.

::

    replay the order of the run: it must give the bytes of the run
    for each finding (first, second), and other pairs of operations from the same two call sites:
        replay the order of the program                 (twice: it must give the same bytes)
        replay it with second, and what precedes it by the program's favour, moved before first
        replay it with second, and what must precede it, moved before first
        replay it with first, and what must follow it, moved after second
    for each of these pairs again, while there is time:
        replay a legal order by chance, and the same with the two exchanged
    the first two orders of which something can be seen to differ are the witness

What can be seen are the bytes that copies take to the host, those that the host reads in memory of its own, and what
the written memory holds in the end. Bytes are compared, so that a NaN equals itself.

Two orders that agree on which comes first, for every pair of operations that touch the same bytes in no order, give the
same results: the second of them is not replayed.
"""

from __future__ import annotations

import random
import time
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol

import numpy as np

from cudatool.sanitize.callers import Callers
from cudatool.sanitize.findings import Finding, Witness, WitnessStep, location
from cudatool.sanitize.intervals import READ, Access
from cudatool.sanitize.legal import LegalSteps, Order
from cudatool.trace.events import AccessFlag, Kind
from cudatool.trace.model import Frame, Trace
from cudatool.units import counted

__all__ = ["NotReplayableError", "ReplayOutcome", "Replayer", "Search", "Tape"]

_SHOWN_BYTES = 16
# What comes in no order on its own stream.
_MEMBERS = {Kind.COLLECTIVE: "operations of a group", Kind.MEMCPY: "copies of a batch"}
_SHOWN_STEPS = 8
_PAIRS = 8  # of the same call sites
_KERNEL_NODE = 0  # CU_GRAPH_NODE_TYPE_KERNEL
_TRIES = 50  # by chance, for one pair
_SEEN_BYTES = 1 << 28  # of memory that is compared at the end of each replay


class ReplayOutcome(Protocol):
    """What can be seen of a replay: see :class:`cudatool.sim.observe.replay.ReplayOutcome`."""

    copied: dict[tuple[int, int], bytes]
    read: dict[Hashable, bytes]
    memory: dict[int, bytes]
    failure: tuple[int, str] | None


class Replayer(Protocol):
    """Runs recorded operations again: see :class:`cudatool.sim.observe.replay.Replay`."""

    def run(
        self,
        order: Sequence[Any],
        memory: Iterable[tuple[int, int]] = (),
        whole: Collection[tuple[int, int]] = (),
        *,
        as_recorded: bool = False,
    ) -> Any: ...
    def difference(self, outcome: Any) -> str: ...


class Tape(Protocol):
    """Recorded operations: see :class:`cudatool.sim.observe.tape.Tape`."""

    refusal: str

    @property
    def copies_much(self) -> bool: ...
    @property
    def entries(self) -> Sequence[Any]: ...
    def can_repeat(self, index: int) -> bool: ...
    def host_read(self, key: Hashable, address: int, size: int) -> Any: ...
    def prepare(self) -> None: ...
    def fork(self) -> int: ...
    def replay(self) -> Replayer: ...


@dataclass(frozen=True, slots=True)
class _Difference:
    """Something seen to differ: by a step, or in memory at the end; or `failure`, of one order."""

    address: int
    before: bytes
    after: bytes
    step: int | None
    key: tuple[int, int] | None = None  # of the copy, in the outcome
    failure: str = ""


class _OutOfTime(Exception):
    pass


class NotReplayableError(Exception):
    """The tape cannot be replayed, or its replay cannot be trusted."""


class Search:
    """Replays of one tape. Made in a process of its own: it replaces the device's memory.

    Attributes
    ----------
    steps
        What can be put in other orders.
    """

    def __init__(self, trace: Trace, tape: Tape) -> None:
        self._trace = trace
        self._callers = Callers(trace)
        self._tape = tape
        self.steps = LegalSteps(trace)
        self._replayer = tape.replay()
        self._replays = 0
        self._until = float("inf")
        self._kept: tuple[Order, Any] | None = None
        self._races = self.steps.races()
        self._assign_entries()
        self._memory = self.steps.memory_written()
        if sum(size for _, size in self._memory) > _SEEN_BYTES:
            self._memory = []
        self._is_checked = False

    def _assign_entries(self) -> None:
        """Say for each step what a replay does for it."""
        owned: dict[tuple[int, int], list[int]] = {}
        written: list[int] = []
        for index, entry in enumerate(self._tape.entries):
            if entry.kind == "host_write":
                written.append(index)
            else:
                owned.setdefault((entry.owner, entry.node), []).append(index)
        launches: dict[int, list[int]] = {}  # owner -> numbers of the nodes
        for owner, node in owned:
            launches.setdefault(owner, []).append(node)
        records = self._trace.records
        exact_write = AccessFlag.WRITE | AccessFlag.INEXACT
        by_host = (records["kind"] == Kind.HOST_ACCESS) & (records["flags"] & exact_write == AccessFlag.WRITE)
        writes = dict(zip(np.flatnonzero(by_host).tolist(), written, strict=False))
        self._todo: list[list[Any]] = []
        self._step_of: dict[int, int] = {}
        for index, step in enumerate(self.steps.all):
            todo: list[Any] = []
            for node in [step.node] if step.node else launches.get(step.correlation, []):
                todo += owned.pop((step.correlation, node), [])
            todo.sort()
            by_host = [access for access in step.accesses if access.host >= 0]
            if by_host:  # what a host function does is repeated; it is not called again
                todo = [task for access in by_host for task in self._of_host(access, writes)]
            self._todo.append(todo)
            self._step_of.update((entry, index) for entry in todo if isinstance(entry, int))
        names = {self._tape.entries[entries[0]].name for entries in owned.values()}
        self._refusal = f"the trace does not say when {', '.join(sorted(names))} may run" if names else ""

    def _of_host(self, access: Access, writes: dict[int, int]) -> Iterator[Any]:
        """Yield what a replay does for an access by the host; nothing if it may touch less than is said."""
        if access.exact and access.mode & READ:
            rows = range(access.start, access.stop, access.stride or access.stop - access.start)
            for row in rows:
                yield self._tape.host_read((access.host, row), row, access.row)
        if access.host in writes:
            yield writes[access.host]

    def witness(self, finding: Finding, until: float) -> Witness | str:
        """Return the witness of a finding, or why there is none, by the time `until` (``time.monotonic``)."""
        self._until = until
        pair = self._reported(finding)
        if pair is None:
            return "only the order of operations is replayed, and one side is not an operation"
        first, second = pair
        members = _MEMBERS.get(self.steps.all[second].kind)
        if members and finding.first.agent == finding.second.agent:
            return f"the software device runs the {members} one after the other"
        for index, side in ((first, finding.first), (second, finding.second)):
            if reason := self._cannot_move(index):
                return f"{side.operation} {reason}"
        before = self._replays
        try:
            self.check_itself()
            before = self._replays
            for pair, order, other in self._exchanges(finding, first, second):
                found = self._compare(finding, order, other)
                if found is not None:
                    return self._explain(finding, pair, order, other, found, self._replays - before)
        except NotReplayableError as refusal:
            return str(refusal)
        except _OutOfTime:
            return f"none was found in the time allowed, by {counted(self._replays - before, 'replay')}"
        if self._replays == before:
            return "no legal order exchanges the two: the memory was handed out again between them"
        return f"{counted(self._replays - before, 'replay')} with the two in either order gave the same bytes"

    def _reported(self, finding: Finding) -> tuple[int, int] | None:
        """Return the steps of the two sides, None if one is none."""
        sides = finding.first, finding.second
        start, stop = finding.start, finding.start + finding.size
        found: list[int] = []
        for side in sides:
            steps = [index for index in self.steps.of_record(side.record) if index not in found]
            if any(self.steps.all[index].node for index in steps):  # the node from that line that touches the bytes
                steps = [index for index in steps if self._stack(self.steps.all[index].source) == side.stack]
            found += [index for index in steps if self.steps.all[index].touches(start, stop)][:1] or steps[:1]
        return (found[0], found[1]) if len(found) == len(sides) else None

    def _cannot_move(self, index: int) -> str:
        """Say why a replay cannot run a step at another time; nothing if it can."""
        step, todo = self.steps.all[index], self._todo[index]
        if step.kind is Kind.HOST_ACCESS:
            return "" if todo else "its writes were not recorded: it cannot be replayed"
        if not todo:
            return "was not kept in a form that can be replayed"
        if not all(self._tape.can_repeat(task) for task in todo if isinstance(task, int)):
            return "calls a host function, which a replay must not call again"
        return ""

    def check_itself(self) -> None:
        """See, once, that the order of the run gives the bytes of the run, and that of the program the same twice.

        Raises
        ------
        NotReplayableError
            They do not. The message says where.
        """
        if self._is_checked or self._refusal:
            if self._refusal:
                raise NotReplayableError(self._refusal)
            return
        run = self._replayer.run(range(len(self._tape.entries)), as_recorded=True)
        difference = self._replayer.difference(run)
        if difference:
            self._refusal = f"the replay cannot be trusted: the order of the run {difference}"
            raise NotReplayableError(self._refusal)
        order = self.steps.program_order()
        first = self.replay(order)
        self._kept = None
        if self._difference(order, first, self.replay(order), range(0)) is not None:
            self._refusal = "the kernels' results are not reproducible: one order gives other bytes each time"
            raise NotReplayableError(self._refusal)
        self._is_checked = True

    # ---- orders to compare ----

    def _exchanges(self, finding: Finding, first: int, second: int) -> Iterator[tuple[tuple[int, int], Order, Order]]:
        """Yield pairs of steps, with two legal orders: in the second one they are the other way round."""
        pairs = [pair for pair in self._pairs(finding, first, second) if pair[0] not in self.steps.before(pair[1])]
        seen: set[frozenset[bytes]] = set()
        chosen = chain.from_iterable(self._chosen(*pair) for pair in pairs)
        for pair, order, other in chain(chosen, chain.from_iterable(self._by_chance(*pair) for pair in pairs)):
            kinds = frozenset((self._agreement(order), self._agreement(other)))
            if self._races is None or kinds not in seen:
                seen.add(kinds)
                yield pair, order, other

    def _pairs(self, finding: Finding, first: int, second: int) -> list[tuple[int, int]]:
        """Return the pair that was reported, and some more that touch the same bytes and are from the same lines."""
        pairs = [(first, second)]
        if finding.count > 1 and self._races:
            sites = self._site(first), self._site(second)
            alike = [pair for pair in self._races if (self._site(pair[0]), self._site(pair[1])) == sites]
            pairs += [pair for pair in alike if pair != pairs[0]][: _PAIRS - 1]
        return pairs

    def _chosen(self, first: int, second: int) -> Iterator[tuple[tuple[int, int], Order, Order]]:
        """Yield the program's order and others: first one in which nothing but the two changes places, if it can be."""
        steps, order = self.steps, self.steps.program_order()
        alone = steps.before_but(second, first, self._races or ())
        if first not in alone:
            yield (first, second), order, steps.advanced(order, second, alone)
        yield (first, second), order, steps.advanced(order, second, steps.before(second))
        yield (first, second), order, steps.delayed(order, first, second)

    def _by_chance(self, first: int, second: int) -> Iterator[tuple[tuple[int, int], Order, Order]]:
        choose = random.Random(first)
        for _ in range(_TRIES):
            order = self.steps.any_order(choose)
            earlier, later = sorted((first, second), key=order.index)
            other = self.steps.delayed(order, earlier, later)
            yield (first, second), *((order, other) if earlier == first else (other, order))

    def _agreement(self, order: Order) -> bytes:
        """Return what decides the results of an order: which step comes first, of each two that race."""
        place = {step: position for position, step in enumerate(order)}
        return bytes(place[first] < place[second] for first, second in self._races or ())

    def _site(self, index: int) -> tuple[int, int]:
        record = self._trace.records[self.steps.all[index].source]
        return int(record["name"]), int(record["stack"])

    # ---- replaying and comparing ----

    def replay(self, order: Order, whole: Collection[tuple[int, int]] = ()) -> Any:
        """Return the outcome of an order of the steps; of the copies in `whole`, the bytes at any rate."""
        if self._kept is not None and self._kept[0] == order and not whole:
            return self._kept[1]
        if time.monotonic() > self._until:
            raise _OutOfTime
        self._replays += 1
        return self._replayer.run([task for step in order for task in self._todo[step]], self._memory, whole)

    def _compare(self, finding: Finding, order: Order, other: Order) -> _Difference | None:
        """Return the first difference that can be seen between two orders."""
        one = self.replay(order)
        self._kept = order, one  # the next pair often begins with it again
        preferred = range(finding.start, finding.start + finding.size)
        found = self._difference(order, one, self.replay(other), preferred)
        if found is not None and found.key is not None:
            held, others = (self.replay(o, (found.key,)).copied[found.key] for o in (order, other))
            return _first(found.key[1], held, others, found.step)
        return found

    def _difference(self, order: Order, one: Any, other: Any, preferred: range) -> _Difference | None:
        if one.failure or other.failure:
            if one.failure and other.failure:
                return None
            entry, text = one.failure or other.failure
            return _Difference(preferred.start, b"", b"", self._step_of[entry], failure=text)
        for step in order:
            for task in self._todo[step]:
                if not isinstance(task, int):
                    if one.read[task.key] != other.read[task.key]:
                        return _first(task.address, one.read[task.key], other.read[task.key], step)
                elif self._tape.entries[task].pieces:
                    for piece in self._tape.entries[task].pieces:
                        key = task, piece.source
                        if key in one.copied and one.copied[key] != other.copied[key]:
                            if self._tape.copies_much:  # only digests were kept
                                return _Difference(piece.source, b"", b"", step, key)
                            return _first(piece.source, one.copied[key], other.copied[key], step)
        return self._in_memory(one.memory, other.memory, preferred)

    def _in_memory(self, one: dict[int, bytes], other: dict[int, bytes], preferred: range) -> _Difference | None:
        """Return a difference: in memory that lives, if there is one, and then in `preferred`."""
        found: list[_Difference] = []
        for address, held in one.items():
            if held != other[address]:
                part = slice(max(preferred.start - address, 0), max(preferred.stop - address, 0))
                if held[part] != other[address][part]:
                    found.append(_first(address + part.start, held[part], other[address][part], None))
                found.append(_first(address, held, other[address], None))
        return min(found, key=lambda one: (not self._lives(one.address), one.address not in preferred), default=None)

    def _lives(self, address: int) -> bool:
        owner = self.steps.owner(address)
        return owner is not None and owner[1]

    # ---- telling it ----

    def _explain(
        self, finding: Finding, pair: tuple[int, int], order: Order, other: Order, found: _Difference, replays: int
    ) -> Witness:
        """Put a difference into a witness: of the operations, those that touch the bytes, and who saw it."""
        start, stop = finding.start, finding.start + finding.size
        key = {*pair, *([found.step] if found.step is not None else [])}
        involved = [i for i, step in enumerate(self.steps.all) if step.touches(start, stop) and i not in key]
        near = sorted(involved, key=lambda index: abs(index - sum(pair) / 2))[: _SHOWN_STEPS - len(key)]
        shown = {*key, *near}
        return Witness(
            order_a=tuple(self._step(index, finding) for index in order if index in shown),
            order_b=tuple(self._step(index, finding) for index in other if index in shown),
            steps=len(order),
            address=found.address,
            bytes_a=found.before.hex(" "),
            bytes_b=found.after.hex(" "),
            observed_at=self._observed(finding, found),
            replays=replays,
            also_exchanged=max(self._exchanged(order, other) - 1, 0),
            exchanged=(self.steps.all[pair[0]].source, self.steps.all[pair[1]].source),
        )

    def _exchanged(self, order: Order, other: Order) -> int:
        """Return how many racing pairs are the other way round."""
        places = [{step: position for position, step in enumerate(one)} for one in (order, other)]
        before = ([place[first] < place[second] for first, second in self._races or ()] for place in places)
        return sum(one != another for one, another in zip(*before, strict=True)) if self._races else 1

    def _observed(self, finding: Finding, found: _Difference) -> str:
        if found.failure:
            return f"that only one of them fails: {found.failure}"
        if found.step is None:
            owner = self.steps.owner(found.address)
            memory = "memory"
            if owner is not None:
                memory = f"the memory allocated at {self._callers.line(owner[0], finding.second.record)}"
            freed = "; it was freed by then" if owner is not None and not owner[1] else ""
            return f"what {memory} holds in the end, which nothing copied to the host{freed}"
        step = self._step(found.step, finding)
        if self.steps.all[found.step].kind in (Kind.HOST_ACCESS, Kind.HOST_FUNCTION):
            return f"what the host reads ({step.location})"
        return f"what {step.operation} ({step.location}) copies to the host"

    def _stack(self, record: int) -> tuple[Frame, ...]:
        return self._trace.stack(int(self._trace.records["stack"][record]))

    def _step(self, index: int, finding: Finding) -> WitnessStep:
        step = self.steps.all[index]
        record = self._trace.records[step.source]
        name = self._trace.names[int(record["name"])]
        if step.kind is Kind.KERNEL_LAUNCH or (step.node and record["flags"] == _KERNEL_NODE):
            name = f"kernel {name}"
        if step.node:
            name += " of a graph"
        stack = self._stack(step.source)
        sides = (side for side in (finding.first, finding.second) if side.record == step.operation.record)
        chosen = next((side.place for side in sides if side.place is not None and side.stack == stack), None)
        if chosen is None:
            chosen = self._callers.frame(step.source, finding.second.record)
        return WitnessStep(
            operation=name or step.kind.name.lower().replace("_", " "),
            agent=self.steps.agents[step.operation.agent].label,
            location=location((chosen,) if chosen is not None else stack),
            record=step.source,
        )


def _first(address: int, one: bytes, other: bytes, step: int | None) -> _Difference:
    """Return the first word in which the two differ, and what follows it."""
    at = next(i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b)
    at = max(at - (address + at) % 4, 0)
    part = slice(at, at + _SHOWN_BYTES)
    return _Difference(address + at, one[part], other[part], step)
