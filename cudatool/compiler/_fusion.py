"""Elementwise functions of a traced graph that become one kernel: which, where, and what need not be in memory then.

::

    for each node, in order:
        for each open group:
            if the node is elementwise and takes the group's results, or arrays that it reads, element by element:
                the two become one group
            else if the order of the node and the group matters, or is not known:
                close the group

A group runs where its last member was. The others are thereby moved past nodes that they do not conflict with: a node
that reads what a member writes, or writes what one reads or writes, has closed the group before. An array that members
alone use, and that does not outlive the function, is never in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Final

from cudatool.compiler._accesses import (
    BEFORE,
    MOST_LOADS,
    NodeWork,
    PointwiseCall,
    RowsCall,
    Span,
    View,
    described,
    described_rows,
    dimension_order,
)
from cudatool.compiler._common import Repetition, repetitions, without
from cudatool.compiler._inputs import borrowed
from cudatool.compiler._lifetimes import overwritten, used_buffers
from cudatool.compiler._plan import Buffer, Plan, plan
from cudatool.compiler._recompute import recomputed
from cudatool.compiler._trace import ORDERS, EventCollector, Graph, Node
from cudatool.errors import GraphBreakError
from cudatool.ops._fused import Fused, Head, Load, Number, Operand, Part, Value
from cudatool.ops._pointwise import PointwiseLaunch
from cudatool.ops._rows import RowCall
from cudatool.runtime.array import DeviceArray
from cudatool.runtime.kernel import Kernel, watched
from cudatool.runtime.stream import Stream

__all__ = ["Fusion", "FusionGroup", "Player", "fuse", "planned_fusion"]

_MOST_ARRAYS: Final = 32  # of one kernel, whose parameters have 4 KiB


@dataclass(frozen=True, slots=True)
class FusionGroup:
    """Nodes that become one kernel.

    Attributes
    ----------
    members
        Their numbers in the graph without fusion.
    fused
        What the kernel computes.
    loads
        For each array that it reads, the member and the operand that it is first.
    node
        How it appears in the graph.
    """

    members: tuple[int, ...]
    fused: Fused
    loads: tuple[tuple[int, int], ...]
    node: Node


@dataclass(frozen=True, slots=True)
class Fusion:
    """A graph with groups in place of their members.

    Attributes
    ----------
    buffers, stacks
        Of the allocations that are in memory.
    in_place
        Pairs of buffers of which the second may lie where the first does: see :func:`~cudatool.compiler._plan.plan`.
    absent
        Number and bytes of the allocations that are not.
    trace
        What was fused: without what is computed twice.
    fused_at
        For each node that is a group, where its members were enqueued.
    """

    graph: Graph
    groups: tuple[FusionGroup, ...]
    buffers: tuple[Buffer, ...]
    stacks: tuple[int, ...]
    in_place: frozenset[tuple[int, int]]
    absent: dict[int, int]
    trace: EventCollector
    fused_at: dict[int, tuple[int, ...]]


def planned_fusion(trace: EventCollector, most: int) -> tuple[Fusion, Plan]:
    """Return a traced graph with its groups, and its memory.

    A group needs what it reads until its last member. Where that would raise the peak, kernels that work on rows are
    not fused, or members are not moved past other work; and if it still would, nothing is fused. What is computed twice
    is kept from the first time to the second, where that does not raise the peak.

    Parameters
    ----------
    most
        Members of a group.
    """
    unfused = fuse(trace, 1)
    memory = plan(unfused.buffers, unfused.in_place)
    if most == 1:
        return unfused, memory

    def fits(pairs: list[Repetition], rows: bool, adjacent: bool, again: bool) -> tuple[Fusion, Plan] | None:
        found = fuse(without(trace, pairs), most, rows=rows, adjacent=adjacent, again=again)
        in_less = plan(found.buffers, found.in_place)
        return (found, in_less) if in_less.peak <= memory.peak else None

    for adjacent, rows, again in product((False, True), (True, False), (True, False)):
        if (best := fits([], rows, adjacent, again)) is not None:
            kept: list[Repetition] = []
            waiting = [repetitions(trace)]
            while waiting:  # all at once; if they do not fit, one half after the other
                some = waiting.pop()
                if some and (better := fits([*kept, *some], rows, adjacent, again)) is not None:
                    kept, best = [*kept, *some], better
                elif len(some) > 1:
                    waiting += [some[len(some) // 2 :], some[: len(some) // 2]]
            return best
    return unfused, memory


def fuse(
    trace: EventCollector, most: int, *, rows: bool = False, adjacent: bool = False, again: bool = False
) -> Fusion:
    """Return a traced graph with groups of up to `most` members.

    Parameters
    ----------
    rows
        Kernels that work on rows are members, too.
    adjacent
        No member is moved past other work.
    again
        A node may be a member of several groups: see :mod:`~cudatool.compiler._recompute`.
    """
    nodes, work = trace.graph().nodes, trace.work
    buffers = trace.finished()
    waiting = sorted(_groups(nodes, work, most, rows, adjacent)) if most > 1 else []
    if again and most > 1:
        absent = _absent(trace, buffers, waiting)
        waiting = sorted(recomputed(nodes, work, buffers, waiting, absent, trace.inputs, most))
    while True:
        absent = _absent(trace, buffers, waiting)
        groups = [_group(nodes, work, members, absent) for members in waiting]
        large = [g for g in groups if len(g.loads) + len(g.fused.stores) > _MOST_ARRAYS]
        if not large:
            break
        waiting = [part for g in groups for part in (_halves(g.members) if g in large else [g.members])]
    for group in groups:  # one whose results nothing needs writes its last one all the same
        members = (work[group.members[part]] for part in group.fused.stores)
        absent -= {
            view.buffer for known in members for call in (known.call, known.rows) if call for view in call.writes
        }
    place = _places(len(nodes), groups)
    runs: dict[int, list[int]] = {}
    for group in groups:
        for member in group.members:
            runs.setdefault(member, []).append(group.members[-1])
    used = used_buffers(trace, buffers, runs)
    anchors = {group.members[-1]: group.node for group in groups}
    gone = {member for group in groups for member in group.members[:-1]}
    kept = [index for index in range(len(buffers)) if index not in absent and index not in trace.same]
    number = {index: place for place, index in enumerate(kept)}
    return Fusion(
        Graph(
            tuple(anchors.get(index, node) for index, node in enumerate(nodes) if index not in gone),
            trace.graph().folded,
        ),
        tuple(groups),
        tuple(
            replace(used[index], first=place[used[index].first], last=place[used[index].last + 1] - 1) for index in kept
        ),
        tuple(trace.stacks[index] for index in kept),
        frozenset(
            (number[source], number[target])
            for source, target in overwritten(used, trace, waiting)
            if source in number and target in number
        ),
        {index: buffers[index].size for index in absent},
        trace,
        {place[group.members[-1]]: tuple(work[member].stack for member in group.members) for group in groups},
    )


def _places(count: int, groups: Sequence[FusionGroup]) -> list[int]:
    """Return for each node, and for the end, how many nodes of the graph with groups come before."""
    gone = {member for group in groups for member in group.members[:-1]}
    found = [0]
    for index in range(count):
        found.append(found[-1] + (index not in gone))
    return found


def _halves(members: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    middle = len(members) // 2
    yield members[:middle]
    yield members[middle:]


class _Open:
    """A group that more members may join."""

    def __init__(self, index: int, stream: int, call: PointwiseCall | RowsCall, spans: Sequence[Span]) -> None:
        self.members = [index]
        self.stream = stream
        self.shape, self.device = call.shape, call.device
        self.read: set[View] = set()
        self.written = set(call.writes)
        self.others = 0  # how many nodes that are not elementwise came before its last member
        self.width = 0  # elements of a pack, if one member is a kernel that works on rows
        self.rows: list[Span] = []  # what that one accesses beside its result: of other elements than a thread has
        if isinstance(call, PointwiseCall):
            self.read.update(view for view in call.reads if isinstance(view, View))
        else:
            self.width = call.width
            self.rows = [span for span in spans if span.buffer != call.writes[0].buffer or not span.writes]

    def spans(self) -> Iterator[Span]:
        """Yield the bytes that its members access."""
        yield from (view.span(writes=False) for view in self.read)
        yield from (view.span(writes=True) for view in self.written)
        yield from self.rows

    def conflicts(self, spans: Sequence[Span] | None) -> bool:
        """Return whether the order of the group and of what accesses these bytes matters, or is not known."""
        return spans is None or any(own.meets(other) for own in self.spans() for other in spans)

    def takes(self, call: PointwiseCall, stream: int, others: int) -> bool:
        """Return whether a call can join: the same elements, and each meets what it depends on in its own thread."""
        if (self.shape, self.device, self.stream) != (call.shape, call.device, stream):
            return False
        reads = [view for view in call.reads if isinstance(view, View)]
        pairs = [(view, own) for view in reads for own in self.written]
        pairs += [(view, own) for view in call.writes for own in (*self.read, *self.written)]
        dependent = [(view, own) for view, own in pairs if own.span(writes=True).meets(view.span(writes=True))]
        if any(view != own for view, own in dependent):
            return False
        return bool(dependent) or (self.others == others and not self.read.isdisjoint(reads))

    def fits(self, other: _Open) -> bool:
        """Return whether the members of two groups can be in one kernel.

        A kernel that works on rows goes through contiguous arrays, in packs of its own width.
        """
        width = self.width or other.width
        if self.width and other.width:
            return False
        if not width:
            return True
        rows, elements = (self, other) if self.width else (other, self)
        views = [*self.read, *self.written, *other.read, *other.written]
        beside = [view.span(writes=view in elements.written) for view in (*elements.read, *elements.written)]
        return all(_is_packed(view, self.shape, width) for view in views) and not any(
            own.meets(span) for own in rows.rows for span in beside
        )

    def join(self, other: _Open) -> None:
        """Take the members of another group."""
        self.members = sorted([*self.members, *other.members])
        self.read |= other.read
        self.written |= other.written
        self.width = self.width or other.width
        self.rows += other.rows


def _is_packed(view: View, shape: tuple[int, ...], width: int) -> bool:
    """Return whether elements lie one after the other, from where a pack of so many elements can be loaded."""
    expected, step = [], view.dtype.itemsize
    for extent in reversed(shape):
        expected.append(step if extent > 1 else 0)
        step *= extent
    return view.strides == tuple(reversed(expected)) and not view.start % (width * view.dtype.itemsize)


class _Waiting:
    """The groups that more members may join, found by the memory that they access."""

    def __init__(self) -> None:
        self.groups: dict[_Open, None] = {}  # in their order
        self._readers: dict[int, dict[_Open, None]] = {}  # by allocation
        self._writers: dict[int, dict[_Open, None]] = {}
        self._viewers: dict[View, dict[_Open, None]] = {}

    def add(self, group: _Open) -> None:
        self.groups[group] = None
        for span in group.rows:
            (self._writers if span.writes else self._readers).setdefault(span.buffer, {})[group] = None
        for view in group.read:
            self._readers.setdefault(view.buffer, {})[group] = None
            self._viewers.setdefault(view, {})[group] = None
        for view in group.written:
            self._writers.setdefault(view.buffer, {})[group] = None

    def remove(self, group: _Open) -> None:
        del self.groups[group]
        for span in group.rows:
            (self._writers if span.writes else self._readers)[span.buffer].pop(group, None)
        for view in group.read:
            self._readers[view.buffer].pop(group, None)
            self._viewers[view].pop(group, None)
        for view in group.written:
            self._writers[view.buffer].pop(group, None)

    def near(self, known: NodeWork) -> list[_Open]:
        """Return the groups that a node may conflict with or join; no others do."""
        if known.spans is None:
            return list(self.groups)
        found: dict[_Open, None] = {}
        for span in known.spans:
            found |= self._writers.get(span.buffer, {})
            if span.writes:
                found |= self._readers.get(span.buffer, {})
        if known.call is not None:
            for view in known.call.reads:
                if isinstance(view, View):
                    found |= self._viewers.get(view, {})
        return list(found)


def _groups(
    nodes: Sequence[Node], work: Sequence[NodeWork], most: int, rows: bool, adjacent: bool
) -> Iterator[tuple[int, ...]]:
    """Yield the members of each group of at least two."""
    waiting, others = _Waiting(), 0
    done: list[_Open] = []

    def close(groups: Iterable[_Open]) -> None:
        for group in list(groups):
            waiting.remove(group)
            done.append(group)

    for index, (node, known) in enumerate(zip(nodes, work, strict=True)):
        if known.after_unseen or node.kind in ORDERS:
            close(waiting.groups)
        call = known.call if known.call is not None and known.call.fusible else None
        near = waiting.near(known)
        joined = [] if call is None else [group for group in near if group.takes(call, node.stream, others)]
        close([group for group in near if group not in joined and group.conflicts(known.spans)])
        if call is None:
            others += 1
            if adjacent:
                close(waiting.groups)
            if rows and known.rows is not None and known.spans is not None:
                waiting.add(_Open(index, node.stream, known.rows, known.spans))
            continue
        found = _Open(index, node.stream, call, ())
        found.others = others
        for group in joined:
            many = len(group.members) + len(found.members) > most or len(group.read | found.read) > MOST_LOADS
            if many or not found.fits(group):
                close([group])
                continue
            waiting.remove(group)
            found.join(group)
        waiting.add(found)
    yield from (tuple(group.members) for group in (*done, *waiting.groups) if len(group.members) > 1)


def _absent(trace: EventCollector, buffers: Sequence[Buffer], groups: Sequence[tuple[int, ...]]) -> set[int]:
    """Return the allocations that one group alone uses, element by element, and that nothing needs afterwards."""
    work = trace.work
    of_member: dict[int, set[int]] = {}
    for number, members in enumerate(groups):
        for member in members:
            of_member.setdefault(member, set()).add(number)
    users: dict[int, list[set[int]]] = {}
    makers: dict[int, list[set[int]]] = {}  # those that write
    written: set[View] = set()
    found = {index for index, buffer in enumerate(buffers) if not buffer.kept and index >= trace.inputs}
    for index, known in enumerate(work):
        if known.after_unseen:  # while the buffer existed, between the node before and this one
            found -= {number for number in found if buffers[number].first <= index <= buffers[number].last + 1}
        if known.spans is None:
            found -= {number for number in found if buffers[number].first <= index <= buffers[number].last}
            continue
        result = known.rows.writes[0].buffer if known.rows is not None else None
        for span in known.spans:
            is_element = result is None or span.buffer == result  # what else a kernel on rows uses is in memory
            within = of_member.get(index, set()) if is_element else set()
            users.setdefault(span.buffer, []).append(within)
            if span.writes:
                makers.setdefault(span.buffer, []).append(within)
        if index in of_member and known.rows is not None:
            written.update(known.rows.writes)
        if index in of_member and known.call is not None:
            loaded = {view.buffer for view in known.call.reads if isinstance(view, View) and view not in written}
            found -= loaded  # what it holds was not computed by the group
            written.update(known.call.writes)
    if trace.ends_unseen:
        found -= {number for number in found if buffers[number].last >= len(work) - 1}
    return {
        number
        for number in found
        if number in makers and all(within and within <= set.intersection(*makers[number]) for within in users[number])
    }


def _group(nodes: Sequence[Node], work: Sequence[NodeWork], members: tuple[int, ...], absent: set[int]) -> FusionGroup:
    parts: list[Part | Head] = []
    loads: dict[View, tuple[int, int]] = {}
    latest: dict[View, int] = {}
    for number, member in enumerate(members):
        call, rows = work[member].call, work[member].rows
        if rows is not None:
            parts.append(Head(rows.kernels, rows.instance, rows.width, rows.writes[0].dtype))
            latest[rows.writes[0]] = number
            continue
        assert call is not None  # members are calls
        operands: list[Operand] = []
        for place, view in enumerate(call.reads):
            if not isinstance(view, View):
                operands.append(Number())
            elif view in latest:
                operands.append(Value(latest[view]))
            else:
                loads.setdefault(view, (number, place))
                operands.append(Load(list(loads).index(view)))
        parts.append(Part(call.pointwise, call.types, call.writes[0].dtype, tuple(operands)))
        latest[call.writes[0]] = number
    stores = [number for view, number in latest.items() if view.buffer not in absent] or [len(parts) - 1]
    fused = Fused(tuple(parts), tuple(view.dtype for view in loads), tuple(sorted(stores)))
    inside = tuple(nodes[member] for member in members)
    node = replace(inside[-1], name=fused.name, op="", parts=inside)
    return FusionGroup(members, fused, tuple(loads.values()), node)


class Player:
    """Does the launches of elementwise functions of a run like one that was traced: groups as one kernel each.

    Parameters
    ----------
    address_of
        Returns where an allocation of that run is in this one.
    trace
        Of this run.
    """

    def __init__(
        self,
        expected: EventCollector,
        groups: Sequence[FusionGroup],
        address_of: Callable[[int], int],
        trace: EventCollector,
    ) -> None:
        self._expected, self._repeated = expected.calls, expected.repeated
        self._expected_rows = expected.rows
        self._address_of = address_of
        self._trace = trace
        # Which launch belongs to which groups, and as which of their members.
        self._roles: dict[int, list[tuple[FusionGroup, int]]] = {}
        self._roles_of_rows: dict[int, tuple[FusionGroup, int]] = {}
        launches = {id(call): number for number, call in enumerate(expected.calls)}
        of_rows = {id(call): number for number, call in enumerate(expected.rows)}
        for group in groups:
            for number, member in enumerate(group.members):
                if (rows := expected.work[member].rows) is not None:
                    self._roles_of_rows[of_rows[id(rows)]] = group, number
                else:
                    roles = self._roles.setdefault(launches[id(expected.work[member].call)], [])
                    roles.append((group, number))
        self._seen: dict[int, list[PointwiseLaunch | RowCall]] = {}  # by the last member of a group
        self._next = self._next_rows = 0

    def take(self, call: PointwiseLaunch) -> Any:
        """Do a launch, if it is not done together with a later one."""
        number, self._next = self._next, self._next + 1
        if number >= len(self._expected) or described(call, _nowhere) != self._here(self._expected[number]):
            raise GraphBreakError("the function does something else each time it runs")
        self._trace.note_scalars(call)
        if number in self._repeated:
            return None
        if number not in self._roles:
            with watched(_ignore):  # its numbers are noted
                return call.run()
        order, shape = dimension_order(call), call.outs[0].shape
        outs, operands = (_borrowed(values, shape, order) for values in (call.outs, call.operands))
        for group, member in self._roles[number]:
            seen = self._seen.setdefault(group.members[-1], [])
            seen.append(call._replace(outs=outs, operands=operands))
            if member == len(group.members) - 1:
                with watched(_ignore):
                    self._launch(group, seen, call.stream)
                self._trace.replace_last(group.node)
        return None

    def take_rows(self, call: RowCall) -> None:
        """Do a launch of a kernel that works on rows, if it is not done together with a later one."""
        number, self._next_rows = self._next_rows, self._next_rows + 1
        found = described_rows(call, _nowhere)
        if number >= len(self._expected_rows) or found != self._moved(self._expected_rows[number]):
            raise GraphBreakError("the function does something else each time it runs")
        role = self._roles_of_rows.get(number)
        if role is None:
            call.run()
            return
        self._trace.note_numbers(call.arguments)
        arguments = tuple(
            _borrow(value, value.shape, range(value.ndim)) if isinstance(value, DeviceArray) and value.size else value
            for value in call.arguments
        )
        self._seen.setdefault(role[0].members[-1], []).append(call._replace(arguments=arguments, out=arguments[0]))

    def _launch(self, group: FusionGroup, seen: Sequence[PointwiseLaunch | RowCall], stream: Stream) -> None:
        fused, stores, loads, scalars = group.fused, [], [], []
        for part in fused.stores:
            if isinstance(each := seen[part], PointwiseLaunch):
                stores.append(each.outs[0])
        for part, operand in group.loads:
            if isinstance(each := seen[part], PointwiseLaunch):
                loads.append(each.operands[operand])
        for each in seen:
            if isinstance(each, PointwiseLaunch):
                scalars += each.pointwise.scalars(each)
        if fused.head is None:
            fused.launch(stores, loads, scalars, stream)
        elif isinstance(head := seen[fused.head], RowCall):
            fused.launch_rows(head, stores, loads, scalars)

    def _here(self, call: PointwiseCall) -> PointwiseCall:
        """Return a launch of the traced run as it is in this run: with addresses in the place of allocations."""
        reads = tuple(self._view_here(view) if isinstance(view, View) else view for view in call.reads)
        return replace(call, writes=tuple(map(self._view_here, call.writes)), reads=reads)

    def _moved(self, call: RowsCall) -> RowsCall:
        return replace(call, writes=tuple(map(self._view_here, call.writes)))

    def _view_here(self, view: View) -> View:
        if view.buffer == BEFORE:
            return view
        by = self._address_of(view.buffer)
        return view._replace(buffer=BEFORE, start=view.start + by, low=view.low + by, high=view.high + by)


def _ignore(kernel: Kernel, arguments: tuple[Any, ...]) -> None:
    pass


def _nowhere(address: int) -> tuple[int, int]:
    return BEFORE, address


def _borrowed(values: Sequence[Any], shape: tuple[int, ...], order: Sequence[int]) -> tuple[Any, ...]:
    """Return arrays at the same addresses that do not keep the memory, broadcast to a shape; numbers as they are.

    The function may drop an array before the kernel that reads it is launched; the plan keeps the place for it.

    Parameters
    ----------
    order
        Of their dimensions.
    """
    return tuple(_borrow(value, shape, order) if isinstance(value, DeviceArray) else value for value in values)


def _borrow(array: DeviceArray, shape: tuple[int, ...], order: Sequence[int]) -> DeviceArray:
    if array.shape != shape:
        array = array.broadcast_to(shape)
    array = array.transpose(*order) if order else array
    return borrowed(array)
