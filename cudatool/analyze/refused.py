"""Failed requests of a recording: how large they were, and how long their blocks would have lived."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace
from functools import cache

from cudatool.analyze.calls import AllocatorCalls, Verb
from cudatool.analyze.requests import Requests
from cudatool.memory.blocks import round_size
from cudatool.memory.settings import Settings

__all__ = ["likely_frees", "with_smallest_sizes"]


def with_smallest_sizes(asked: Requests, recorded: Settings) -> Requests | None:
    """Return the requests with the smallest possible sizes of those that failed: the file has their rounded sizes.

    None if it makes no difference.
    """
    if max(recorded.roundup_power2_divisions) <= 1:
        return None  # to 512 bytes, as under all settings

    failed = asked.calls.of_verb(Verb.FAILED_MALLOC)
    sizes = asked.calls.sizes(Verb.FAILED_MALLOC).tolist()
    smallest = [1 + bisect_left(range(1, size + 1), size, key=lambda n: round_size(n, recorded)) for size in sizes]
    if smallest == sizes:
        return None
    return replace(asked, calls=asked.calls.with_sizes(failed, smallest))


def likely_frees(calls: AllocatorCalls, recorded: Settings) -> dict[int, int]:
    """Return when the program would have freed the blocks of its failed requests, by the event of the request.

    A block is assumed to live for as many events as the nearest block of the same size, or to the end if that one did.
    Those without such a block are not in the result.
    """
    failed = [calls[index] for index in calls.of_verb(Verb.FAILED_MALLOC).tolist()]
    if not failed:
        return {}
    alike: dict[tuple[int, int, int], list[int]] = {}  # events of requests
    for call in failed:
        alike[call.size, call.stream, call.pool] = []
    rounded = cache(lambda size: round_size(size, recorded))
    allocated: dict[int, int] = {}  # block -> event
    freed: dict[int, int] = {}  # event of the request -> event of the free
    for call in calls:
        if call.verb is Verb.MALLOC:
            kind = rounded(call.size), call.stream, call.pool
            if kind in alike:
                alike[kind].append(call.event)
                allocated[call.block] = call.event
        elif call.block in allocated:
            freed[allocated.pop(call.block)] = call.event
    found = {}
    end = calls[-1].event + 1
    for call in failed:
        if events := alike[call.size, call.stream, call.pool]:
            after = bisect_left(events, call.event)
            nearest = min(events[max(after - 1, 0) : after + 1], key=lambda event: abs(event - call.event))
            found[call.event] = call.event + freed[nearest] - nearest if nearest in freed else end
    return found
