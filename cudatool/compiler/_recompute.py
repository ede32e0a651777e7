"""Elementwise results that each kernel which needs them computes for itself, so that they are never in memory.

The sum of a product and a bias, say, of which the activation is taken now and its gradient much later: the product is
in memory anyway, and reading it and the bias again costs no more than reading the sum, which then need not be written.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from cudatool.compiler._accesses import BEFORE, MOST_LOADS, NodeWork, PointwiseCall, View
from cudatool.compiler._plan import Buffer
from cudatool.compiler._trace import ORDERS, Node

__all__ = ["recomputed"]


def recomputed(
    nodes: Sequence[Node],
    work: Sequence[NodeWork],
    buffers: Sequence[Buffer],
    groups: Sequence[tuple[int, ...]],
    absent: Collection[int],
    first: int,
    most: int,
) -> list[tuple[int, ...]]:
    """Return groups with nodes added that compute again what an earlier group has computed.

    A node is added to each other group, or node, that reads its result, if they then move fewer bytes; and only if none
    else reads it and what it reads has not changed by then.

    Parameters
    ----------
    absent
        Allocations that are in registers only.
    first
        Allocations before this one are arguments.
    most
        Members of a group.
    """
    users: dict[int, list[int]] = {}
    for index, known in enumerate(work):
        for buffer in {span.buffer for span in known.spans or ()}:
            users.setdefault(buffer, []).append(index)
    found = [list(members) for members in groups]
    group_of = {member: members for members in found for member in members}
    gone = set(absent)
    for index, known in enumerate(work):
        call = known.call
        if call is None or not call.fusible or len(call.writes) != 1:
            continue
        (view,) = call.writes
        if view.buffer == BEFORE or view.buffer < first or view.buffer in gone or buffers[view.buffer].kept:
            continue
        readers, own = users[view.buffer], group_of.get(index)
        if readers[0] != index or len(readers) < 2 or (own is not None and own[-1] == index):
            continue
        if any(isinstance(read, View) and read.buffer in gone for read in call.reads):
            continue
        if not all(_reads_as_it_is(work[reader], view) for reader in readers[1:]):
            continue
        others = {id(members): members for r in readers[1:] if (members := group_of.get(r, [r])) is not own}.values()
        targets = list(others)
        if targets and all(_can_join(nodes, work, index, call, members, most) for members in targets):
            gain = view.high - view.low + sum(_saved(call, view, work, members) for members in targets)
            if gain > 0:
                gone.add(view.buffer)
                for members in targets:
                    if members[-1] not in group_of:
                        found.append(members)
                        group_of[members[-1]] = members
                    members.insert(0, index)
                    members.sort()
    return [tuple(members) for members in found]


def _reads_as_it_is(known: NodeWork, view: View) -> bool:
    """Return whether a node reads a result element by element, and does nothing else with its memory."""
    return (
        known.call is not None
        and known.call.fusible
        and view in known.call.reads
        and all(not span.writes for span in known.spans or () if span.buffer == view.buffer)
        and all(read == view for read in known.call.reads if isinstance(read, View) and read.buffer == view.buffer)
    )


def _can_join(
    nodes: Sequence[Node], work: Sequence[NodeWork], index: int, call: PointwiseCall, members: Sequence[int], most: int
) -> bool:
    """Return whether a node can be done once more in a group: the same elements, and nothing that it reads changed."""
    if len(members) >= most or any(nodes[member].stream != nodes[index].stream for member in members):
        return False
    calls = [work[member].call for member in members]
    if any(each is None or (each.shape, each.device) != (call.shape, call.device) for each in calls):
        return False
    if len({read for each in (*calls, call) if each is not None for read in _views(each)}) > MOST_LOADS:
        return False
    reads = [read.span(writes=False) for read in _views(call)]
    for between in range(index + 1, members[-1] + 1):
        spans = work[between].spans
        if work[between].after_unseen or spans is None or nodes[between].kind in ORDERS:
            return False
        if any(span.writes and span.meets(read) for span in spans for read in reads):
            return False
    return True


def _saved(call: PointwiseCall, view: View, work: Sequence[NodeWork], members: Sequence[int]) -> int:
    """Return how many bytes fewer a group reads; less than none if it reads more."""
    read = {each for member in members if (known := work[member].call) is not None for each in _views(known)}
    return view.high - view.low - sum(new.high - new.low for new in {*_views(call)} - read)


def _views(call: PointwiseCall) -> Iterator[View]:
    return (read for read in call.reads if isinstance(read, View))
