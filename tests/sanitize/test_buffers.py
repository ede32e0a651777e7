"""What is kept of allocations: facts of freed ones in few bytes."""

from __future__ import annotations

import tracemalloc
from dataclasses import astuple

import pytest

from cudatool.sanitize.intervals import READ, Access, Operation
from cudatool.sanitize.lifetimes import Buffer, Buffers


def free_at(record: int) -> Operation:
    return Operation(3, 5, (0,) * 6, record)


def test_a_freed_buffer_keeps_what_a_later_access_is_told() -> None:
    buffers = Buffers()
    first, second = Buffer(0x1000, 0x1800, 7, agent=2, of_graphs=True), Buffer(0x2000, 1 << 63, 8)
    for buffer in (first, second):
        assert [] == buffers.add(buffer)
        assert buffer is buffers.find(buffer.start)
        buffers.end(buffer, free_at(9))
    assert astuple(first) == astuple(buffers.find(0x17FF))
    assert (9, 3) == (buffers.find(0x1000).release.record, buffers.find(0x1000).release.agent)
    assert None is buffers.find(0x1800)
    assert astuple(second) == astuple(buffers.find(0x2000))


def test_an_allocation_replaces_freed_ones_at_its_addresses() -> None:
    buffers = Buffers()
    old = [Buffer(start, start + 16, start) for start in (0, 16, 32)]
    for buffer in old:
        buffers.add(buffer)
        buffers.end(buffer, free_at(100))
    new = Buffer(8, 20, 200)
    assert [astuple(one) for one in old[:2]] == [astuple(one) for one in buffers.add(new)]
    assert [new, None] == [buffers.find(address) for address in (19, 20)]
    assert astuple(old[2]) == astuple(buffers.find(47))
    assert [0x8, 0x20] == [one.start for one in buffers.remove(0, 64)]
    assert None is buffers.find(40)
    assert [] == buffers.add(Buffer(0, 8, 300))


@pytest.mark.parametrize("field", ["suspect", "other_streams", "releases"])
def test_what_a_freed_buffer_still_has_to_say_is_kept(field: str) -> None:
    buffers = Buffers()
    values = {
        "suspect": (Access(0, 8, READ), free_at(1)),
        "other_streams": frozenset([4]),
        "releases": (free_at(2),),
    }
    buffer = Buffer(0, 8, 1, **{field: values[field]})
    buffers.add(buffer)
    buffers.end(buffer, free_at(3))
    assert buffer is buffers.find(0)
    assert ([buffer] if field == "suspect" else []) == list(buffers.suspects())


def test_freed_buffers_take_little_memory() -> None:
    buffers, count = Buffers(), 20_000
    tracemalloc.start()
    for number in range(count):
        start = (1 << 40) + 512 * number
        buffers.add(buffer := Buffer(start, start + 512, number))
        buffers.end(buffer, free_at(number + 1))
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert taken < 120 * count
