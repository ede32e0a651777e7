"""Elementwise operations that a function computes twice from the same numbers: the second result is the first.

Under autocast each product casts its operands, so a backward pass casts weights and activations that the forward pass
has cast before.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from cudatool.compiler._accesses import BEFORE, NodeWork, PointwiseCall, Span, View
from cudatool.compiler._plan import Buffer
from cudatool.compiler._trace import EventCollector

__all__ = ["Repetition", "repetitions", "without"]

Repetition = tuple[int, int]
"""A node, and one after it that computes the same."""


def repetitions(trace: EventCollector) -> list[Repetition]:
    """Return the nodes that compute again what an earlier one did, those first that keep the least memory for it."""
    nodes, work, buffers = trace.graph().nodes, trace.work, trace.finished()
    writers: dict[int, list[int]] = {}
    for index, known in enumerate(work):
        for span in known.spans or ():
            if span.writes:
                writers.setdefault(span.buffer, []).append(index)
    latest: dict[object, int] = {}
    found: list[tuple[int, Repetition]] = []
    for index, known in enumerate(work):
        call = known.call
        if call is None or (key := _key(call, nodes[index].stream)) is None:
            continue
        first = latest.setdefault(key, index)
        if first == index:
            continue
        earlier = work[first].call
        assert earlier is not None  # it has a key
        one, other = earlier.writes[0].buffer, call.writes[0].buffer
        if not _may_be_one(buffers, one, other, nodes[index].stream) or (writers[one], writers[other]) != (
            [first],
            [index],
        ):
            latest[key] = index
            continue
        last = max(buffers[one].last, buffers[other].last)
        if _is_undisturbed(work, call, first, index, last):
            found.append((buffers[one].size * (index - first), (first, index)))
        else:
            latest[key] = index
    return [pair for _, pair in sorted(found)]


def _key(call: PointwiseCall, stream: int) -> object:
    """Return what two calls have in common that compute the same, None if numbers say what is computed."""
    if not call.fusible or call.pointwise.numbers or len(call.writes) != 1:
        return None
    if not all(isinstance(view, View) for view in call.reads) or call.writes[0].buffer == BEFORE:
        return None
    return call.pointwise, call.types, call.device, call.shape, call.reads, call.writes[0]._replace(buffer=0), stream


def _may_be_one(buffers: Sequence[Buffer], one: int, other: int, stream: int) -> bool:
    a, b = buffers[one], buffers[other]
    return one != other and a.size == b.size and a.shares and b.shares and not b.kept and a.stream == b.stream == stream


def _is_undisturbed(work: Sequence[NodeWork], call: PointwiseCall, first: int, second: int, last: int) -> bool:
    """Return whether what a call reads is the same at two nodes, and all that is done until `last` is known."""
    read = [view.span(writes=False) for view in call.reads if isinstance(view, View)]

    def writes(spans: Sequence[Span]) -> bool:
        return any(span.writes and span.meets(own) for span in spans for own in read)

    for index in range(first + 1, min(last + 2, len(work))):
        spans = work[index].spans
        if work[index].after_unseen or spans is None or (index < second and writes(spans)):
            return False
    return not writes(work[first].spans or ())  # in place


def without(trace: EventCollector, pairs: Collection[Repetition]) -> EventCollector:
    """Return a trace as if the second node of each pair were not there, and its result were the first one's."""
    if not pairs:
        return trace
    same = {_result(trace, second): _result(trace, first) for first, second in pairs}
    gone = {second for _, second in pairs}
    place = [0]
    for index in range(len(trace.work)):
        place.append(place[-1] + (index not in gone))
    found = copy.copy(trace)
    renamed = {id(call): _renamed(call, same) for call in trace.calls}
    found.calls = [renamed[id(call)] for call in trace.calls]
    found.repeated = frozenset(
        number for number, call in enumerate(trace.calls) if id(call) in {id(trace.work[index].call) for index in gone}
    )
    found.same = same
    found.keep([index for index in range(len(trace.work)) if index not in gone])
    found.work = [
        replace(
            known,
            spans=None
            if known.spans is None
            else [span._replace(buffer=same.get(span.buffer, span.buffer)) for span in known.spans],
            call=None if known.call is None else renamed[id(known.call)],
        )
        for index, known in enumerate(trace.work)
        if index not in gone
    ]
    buffers = trace.finished()
    for other, one in same.items():
        first, second = buffers[one], buffers[other]
        buffers[one] = replace(first, last=max(first.last, second.last))
    found.buffers = [
        replace(buffer, first=place[buffer.first], last=place[min(buffer.last + 1, len(place) - 1)] - 1)
        for buffer in buffers
    ]
    return found


def _result(trace: EventCollector, node: int) -> int:
    call = trace.work[node].call
    assert call is not None  # a node of a repetition has one
    return call.writes[0].buffer


def _renamed(call: PointwiseCall, same: dict[int, int]) -> PointwiseCall:
    def renamed(views: Sequence[View | type]) -> Iterator[View | type]:
        for view in views:
            yield view._replace(buffer=same.get(view.buffer, view.buffer)) if isinstance(view, View) else view

    writes = tuple(view for view in renamed(call.writes) if isinstance(view, View))
    return replace(call, writes=writes, reads=tuple(renamed(call.reads)))
