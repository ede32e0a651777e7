"""What the engine found: pairs of operations, counted by call sites, and changes of the program that may cure them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from cudatool.sanitize.findings import FindingKind
from cudatool.sanitize.intervals import ATOMIC, READ, WRITE, Access, Operation, common_runs
from cudatool.sanitize.lifetimes import Buffer

__all__ = ["Defect", "Defects", "Key", "Repairs", "Side", "race_of", "side_of"]

Key = tuple[Any, ...]
"""What makes two defects the same: kind, certainty, both call sites and the allocation's."""


class Side:
    """One of the two operations of a defect and what it does to the memory.

    `node` is the record of the node that does it, for a graph launch whose nodes are known, and that of the access, for
    a host function; else -1.
    """

    __slots__ = ("exact", "mode", "name", "node", "operation", "owner")

    def __init__(
        self,
        operation: Operation,
        mode: str,
        name: int = 0,
        exact: bool = True,
        owner: Buffer | None = None,
        node: int = -1,
    ) -> None:
        self.operation = operation
        self.mode = mode
        self.name = name
        self.exact = exact
        self.owner = owner
        self.node = node

    @property
    def record(self) -> int:
        """The trace record of the call that made the work: for a node, the one that captured or added it.

        Of a host function, what it does itself.
        """
        return self.operation.record if self.node < 0 else self.node


@dataclass(slots=True)
class Defect:
    """The first of a series of equal findings.

    Attributes
    ----------
    kind, first, second
        What is wrong, with the two sides in record order.
    start, size
        The bytes.
    buffer
        Their owner when the second side came; None if not seen.
    common
        The epoch of the first side's agent up to which the second side is ordered after it; 0 for none.
    inside
        Whether the two sides are nodes of one graph that no edge orders.
    grouped
        Whether the two sides are collective operations of one group, or copies of one batch.
    wait
        The record of a wait between the two that did nothing, because its event had not been recorded; -1 for none.
    runs, stride
        How many such runs of bytes both sides touch, and how far apart they begin (0 if that differs).
    moved
        The records of a wait between the two, and of those two records of its event of which the second one replaced
        the first, for which the wait was meant; empty if there is none.
    count, last
        Length of the series, and the records of its latest pair.
    agents
        The agents of both sides, of every pair of the series.
    nodes
        The records of both sides, of every pair of nodes.
    """

    kind: FindingKind
    first: Side
    second: Side
    start: int
    size: int
    buffer: Buffer | None
    common: int
    inside: bool = False
    grouped: bool = False
    wait: int = -1
    runs: int = 1
    stride: int = 0
    moved: tuple[int, ...] = ()
    count: int = 0
    last: tuple[int, int] = (-1, -1)
    agents: set[tuple[int, int]] = field(default_factory=set)
    nodes: set[tuple[int, int]] = field(default_factory=set)

    @property
    def is_certain(self) -> bool:
        """Whether the bytes of both sides are known exactly."""
        return self.first.exact and self.second.exact

    @property
    def forgotten(self) -> int | None:
        """The record of the allocation on which record_stream is missing, if that is what is wrong."""
        owner = self.first.owner
        if self.kind is FindingKind.REUSE and owner is not None and owner.agent != self.first.operation.agent:
            return owner.record
        return None

    def add(self, pair: tuple[int, int], agents: tuple[int, int]) -> None:
        """Count a pair of records of the series; the same pair twice in a row is one."""
        if self.last != pair:
            self.count += 1
            self.last = pair
        self.agents.add(agents)

    def as_seen_by(self, other: Defect | None) -> Defect:
        """Return the series with the first pair, and what orders it, that another check of the trace met."""
        if other is None:
            return self
        return replace(other, count=self.count, last=self.last, agents=self.agents, nodes=self.nodes)


@dataclass(slots=True)
class Repairs:
    """Changes of the program, to be tried on the trace.

    Attributes
    ----------
    waits
        (stack, agent) -> agents: before whatever it does at that call site, the agent waits for these.
    record_streams
        Stack of an allocation -> agents: ``record_stream`` is called on such blocks for these.
    edges
        Edges of graphs: the records of two nodes.
    groups
        Stacks of collective operations: another group begins there.
    serialized
        Stacks of kernel launches: they wait for the kernel before them.
    """

    waits: dict[tuple[int, int], set[int]] = field(default_factory=dict)
    record_streams: dict[int, set[int]] = field(default_factory=dict)
    edges: set[tuple[int, int]] = field(default_factory=set)
    groups: set[int] = field(default_factory=set)
    serialized: set[int] = field(default_factory=set)


class Defects:
    """The defects of a trace, by call sites, in order of appearance."""

    def __init__(self, records: npt.NDArray[np.void]) -> None:
        self.found: dict[Key, Defect] = {}
        # Views, not copies: most records are never asked for.
        self._sites = [records[column].data for column in ("kind", "name", "stack")]

    def report(
        self,
        kind: FindingKind,
        first: Side,
        second: Side,
        start: int,
        size: int,
        buffer: Buffer | None,
        *,
        inside: bool = False,
        grouped: bool = False,
        wait: int = -1,
        moved: tuple[int, ...] = (),
        touched: tuple[Access, Access] | None = None,
    ) -> None:
        """Add a defect, or count it if its call sites are known. `touched` are the accesses of both sides."""
        pair = first.operation.record, second.operation.record
        # Of a node the launch counts too, where it is the launch that could wait.
        launches = () if inside or first.mode == "free" else pair
        key = self._key(kind, first.exact and second.exact, first.record, second.record, launches, buffer)
        defect = self.found.get(key)
        if defect is None:
            common = 0 if inside else second.operation.clock[first.operation.agent]
            self.found[key] = defect = Defect(kind, first, second, start, size, buffer, common, inside, grouped, wait)
            defect.moved = moved
            if touched is not None and any(one.stride or one.mask for one in touched):
                defect.runs, defect.stride = common_runs(*touched)
        defect.add(pair, (first.operation.agent, second.operation.agent))
        if inside:
            defect.nodes.add((first.record, second.record))

    def counted(self, kind: FindingKind, old: Access, new: Access, buffer: Buffer | None) -> bool:
        """Count two accesses whose call sites are known to collide, as :meth:`report` would; return whether they are.

        It makes no objects: a program may collide as often as it has operations.
        """
        first, second = old.operation, new.operation
        pair = first.record, second.record
        made = pair if old.node < 0 and new.node < 0 and old.host < 0 and new.host < 0 else (_maker(old), _maker(new))
        defect = self.found.get(self._key(kind, old.exact and new.exact, *made, pair, buffer))
        if defect is None:
            return False
        defect.add(pair, (first.agent, second.agent))
        return True

    def _key(
        self,
        kind: FindingKind,
        exact: bool,
        first: int,
        second: int,
        launches: tuple[int, ...],
        buffer: Buffer | None,
    ) -> Key:
        kinds, names, stacks = self._sites
        stack = stacks[buffer.record] if buffer is not None else 0
        one, other = (kinds[first], names[first], stacks[first]), (kinds[second], names[second], stacks[second])
        key: Key = (kind, exact, stack, one, other)
        if launches and (launches[0] != first or launches[1] != second):
            key += tuple([column[record] for record in launches for column in self._sites])
        return key


def race_of(old: Access, new: Access) -> FindingKind:
    """Return the kind of race of two accesses, of which `new` is the later one in the program."""
    if not old.mode & (WRITE | ATOMIC):
        return FindingKind.RACE_WAR
    return FindingKind.RACE_RAW if new.mode & (READ | ATOMIC) else FindingKind.RACE_WAW


def _maker(access: Access) -> int:
    """Return the record of the call that made an access: as :attr:`Side.record` of its side."""
    node = access.node if access.host < 0 else access.host
    return access.operation.record if node < 0 else node


def side_of(access: Access) -> Side:
    """Return an access as a side of a defect."""
    mode = {READ: "read", WRITE: "write", READ | WRITE: "read and write"}.get(access.mode, "atomic")
    node = access.node if access.host < 0 else access.host
    return Side(access.operation, mode, access.name, access.exact, access.owner, node)
