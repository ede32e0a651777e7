"""From which node to which each buffer of a graph is needed, and which may lie where another one ends.

The program keeps arrays longer than the graph needs them: to the end of a function, in attributes that are replaced
later. What a node may access is known for most nodes, so that a buffer is needed from the first node that uses it to
the last one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from cudatool.compiler._accesses import BEFORE, PointwiseCall, View
from cudatool.compiler._plan import Buffer
from cudatool.compiler._trace import EventCollector

__all__ = ["overwritten", "used_buffers"]


def used_buffers(
    trace: EventCollector, buffers: Sequence[Buffer], anchors: Mapping[int, Sequence[int]]
) -> list[Buffer]:
    """Return the buffers with the nodes that need them.

    A buffer that no node is known to use is needed as long as it exists: it may be what a product works in. So is one
    that another stream than its own uses, since only the program's waits, and the free after them, order the two.

    Parameters
    ----------
    anchors
        For each node that becomes a part of kernels, the nodes where these run.
    """
    users, written, apart = _uses(trace, buffers, anchors)
    last, found = len(trace.work) - 1, []
    for number, (buffer, nodes) in enumerate(zip(buffers, users, strict=True)):
        is_input = number < trace.inputs
        kept = buffer.kept and (not is_input or number in written)
        if not nodes and not kept and not is_input:
            # What a product works in is freed before the event that tells of the product.
            found.append(replace(buffer, last=max(buffer.last, min(buffer.first, last))))
            continue
        if not nodes or number in apart or not buffer.shares:
            nodes |= {min(buffer.first, last), buffer.last}
        nodes |= {last} if kept else set()
        nodes |= {0} if is_input else set()  # the argument is copied to it before the graph begins
        found.append(replace(buffer, first=min(nodes), last=max(nodes), kept=kept))
    return found


def _uses(
    trace: EventCollector, buffers: Sequence[Buffer], anchors: Mapping[int, Sequence[int]]
) -> tuple[list[set[int]], set[int], set[int]]:
    """Return the nodes that use each buffer; which are written; and which another stream than their own uses."""
    users: list[set[int]] = [set() for _ in buffers]
    written: set[int] = set()
    apart: set[int] = set()
    streams = [node.stream for node in trace.graph().nodes]

    def use_all(first: int, last: int) -> None:
        """Let everything that exists between two nodes be used by both, if there are such nodes."""
        for number, buffer in enumerate(buffers):
            if buffer.first <= last and first <= buffer.last:
                users[number] |= {max(first, 0), min(last, len(streams) - 1)}
                written.add(number)

    for index, known in enumerate(trace.work):
        for span in known.spans or ():
            if span.buffer != BEFORE:
                users[span.buffer].update(anchors.get(index, (index,)))
                if span.writes:
                    written.add(span.buffer)
                if streams[index] != buffers[span.buffer].stream:
                    apart.add(span.buffer)
        if known.after_unseen:
            use_all(index - 1, index)
        elif known.spans is None:
            use_all(index, index)
    if trace.ends_unseen:
        use_all(len(streams) - 1, len(streams))
    return users, written, apart


def overwritten(
    buffers: Sequence[Buffer], trace: EventCollector, groups: Iterable[tuple[int, ...]]
) -> Iterator[tuple[int, int]]:
    """Yield pairs of buffers: a kernel reads the first for the last time, and writes the second in the same places.

    Each thread of an elementwise kernel loads its elements before it stores its results.

    Parameters
    ----------
    buffers
        With the nodes that need them.
    groups
        Nodes that become one kernel each, which runs at the last of them.
    """
    members_of: dict[int, tuple[int, ...]] = {
        index: (index,) for index, known in enumerate(trace.work) if known.call is not None
    }
    for members in groups:
        for member in members[:-1]:
            members_of.pop(member, None)
        members_of[members[-1]] = members
    for node, members in members_of.items():
        calls = [call for member in members if (call := trace.work[member].call) is not None and call.fusible]
        if len(calls) < len(members):
            continue
        read, written = _places(calls, "reads"), _places(calls, "writes")
        new_ones = [target for target in written if target >= trace.inputs]  # others hold something from the beginning
        for source, target in ((s, t) for s in read.keys() - written.keys() for t in new_ones):
            old, new = buffers[source], buffers[target]
            begins_before = old.first < node or source < trace.inputs  # which hold something from the beginning
            ends = old.last == node and not old.kept and new.first == node
            share = old.shares and new.shares and old.stream == new.stream
            places = read[source] | written[target] | read.get(target, set())
            if begins_before and ends and share and len(places) == 1:
                yield source, target


def _places(calls: Iterable[PointwiseCall], which: str) -> dict[int, set[tuple[object, ...]]]:
    """Return for each allocation where its elements are that calls read, or write."""
    found: dict[int, set[tuple[object, ...]]] = {}
    for view in (view for call in calls for view in getattr(call, which)):
        if isinstance(view, View) and view.buffer != BEFORE:
            found.setdefault(view.buffer, set()).add((view.start, view.strides, view.dtype.itemsize))
    return found
