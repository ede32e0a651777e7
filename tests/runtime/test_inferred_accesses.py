"""What launches are said to access, from the PTX of their kernels alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import cudatool as ct
from cudatool.trace import Event, hooks
from cudatool.trace.events import AccessFlag, Kind

SOURCE = """
extern "C" __global__ void add(const float *a, const float *b, float *c, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) c[i] = a[i] + b[i];
}
extern "C" __global__ void follow(float **rows) { rows[0][threadIdx.x] = 1; }
extern "C" __global__ void count(unsigned *total) { atomicAdd(total, 1); }
"""


@pytest.fixture
def accesses() -> Iterator[list[Event]]:
    """The inferred accesses of what happens in the test."""
    found: list[Event] = []

    def keep(event: Event) -> None:
        if event.kind is Kind.ACCESS and event.flags & AccessFlag.INEXACT:
            found.append(event)

    hooks.subscribe(keep)
    hooks.wants_accesses = True
    yield found
    hooks.wants_accesses = False
    hooks.unsubscribe(keep)


def launched(accesses: list[Event], name: str, *arguments: Any) -> list[tuple[int, int, AccessFlag]]:
    ct.compile(SOURCE, name)[(1, 32)](*arguments)
    ct.synchronize()
    return [(event.address, event.size, AccessFlag(event.flags) & ~AccessFlag.INEXACT) for event in accesses]


def test_arguments_are_read_written_or_both(accesses):
    a, b, c = (ct.zeros(100, np.float32) for _ in range(3))
    expected = [
        (a.data_ptr(), 400, AccessFlag.READ),
        (b.data_ptr(), 400, AccessFlag.READ),
        (c.data_ptr(), 400, AccessFlag.WRITE),
    ]
    assert sorted(expected) == sorted(launched(accesses, "add", a, b, c, 32))


def test_a_view_stands_for_its_own_elements(accesses):
    a = ct.zeros(100, np.float32)
    half, other = a[:50], a[50:]
    expected = [(half.data_ptr(), 200, AccessFlag.READ), (other.data_ptr(), 200, AccessFlag.WRITE)]
    assert expected == sorted(launched(accesses, "add", half, half, other, 32))


def test_atomics_are_told_apart(accesses):
    total = ct.zeros(1, np.uint32)
    assert [(total.data_ptr(), 4, AccessFlag.ATOMIC)] == launched(accesses, "count", total)


def test_a_launch_has_them_only_when_asked(accesses):
    hooks.wants_accesses = False
    assert [] == launched(accesses, "count", ct.zeros(1, np.uint32))


def test_pointers_in_memory_are_said_not_to_be_followed(accesses):
    row = ct.zeros(32, np.float32)
    rows = ct.asarray(np.array([row.data_ptr()], np.uint64))
    warnings: list[str] = []

    def keep(event: Event) -> None:
        if event.kind is Kind.WARNING:
            warnings.append(event.name)

    hooks.subscribe(keep)
    try:
        assert [(rows.data_ptr(), 8, AccessFlag.READ)] == launched(accesses, "follow", rows)
    finally:
        hooks.unsubscribe(keep)
    assert ["follow may access more than its arguments say: loaded pointer"] == warnings
