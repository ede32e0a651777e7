"""What of the records before a test is put before its own, and how memory is counted."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cudatool.sanitize import check
from cudatool.testing.allocations import memory_of
from cudatool.testing.past import Past, Records
from cudatool.trace.events import RECORD, AccessFlag, CopyFlag, Kind, StreamFlag
from cudatool.trace.model import Trace

A, B = 1, 2  # streams
X = 0x10000

STREAMS: list[tuple[Kind, dict[str, Any]]] = [
    (Kind.STREAM_CREATE, {"stream": stream, "flags": StreamFlag.NON_BLOCKING, "device": 0}) for stream in (A, B)
]


def records(*events: tuple[Kind, dict[str, Any]]) -> Records:
    made = np.zeros(len(events), RECORD)
    for record, (kind, fields) in zip(made, events, strict=True):
        record["kind"], record["device"] = kind, 0
        for name, value in fields.items():
            record[name] = value
    return made


def fill(stream: int, correlation: int, **fields: Any) -> tuple[Kind, dict[str, Any]]:
    flags = CopyFlag.DESTINATION_DEVICE | CopyFlag.ASYNC
    return Kind.MEMSET, {
        "stream": stream, "correlation": correlation, "address": X, "size": 64, "flags": flags, **fields
    }  # fmt: skip


def past(*parts: tuple[bool, Records]) -> Past:
    made = Past()
    for shared, part in parts:
        made.add(part, np.full(len(part), shared))
    return made


def kinds(part: Records) -> list[Kind]:
    return [Kind(kind) for kind in part["kind"].tolist()]


def races(before: Past, *events: tuple[Kind, dict[str, Any]]) -> int:
    return len(check(Trace(np.concatenate([before.records, records(*events)]))).findings)


CREATED = (True, records(*STREAMS, (Kind.MEM_ALLOC, {"address": X, "size": 64})))


@pytest.mark.parametrize(("shared", "expected"), [(True, 1), (False, 0)])
def test_work_of_fixtures_stays_and_that_of_other_tests_goes(shared: bool, expected: int) -> None:
    assert expected == races(past(CREATED, (shared, records(fill(A, 1)))), fill(B, 2))


@pytest.mark.parametrize(
    ("wait", "expected"),
    [
        ((Kind.DEVICE_SYNCHRONIZE, {}), 0),
        ((Kind.STREAM_SYNCHRONIZE, {"stream": A}), 0),
        ((Kind.STREAM_SYNCHRONIZE, {"stream": B}), 1),
        ((Kind.DEVICE_SYNCHRONIZE, {"device": 1}), 1),
        (fill(A, 9, flags=CopyFlag(0), size=64, address=X + 640), 0),  # blocks the host
    ],
)
def test_what_another_test_waited_for_counts(wait: tuple[Kind, dict[str, Any]], expected: int) -> None:
    assert expected == races(past(CREATED, (True, records(fill(A, 1))), (False, records(wait))), fill(B, 2))


def test_order_that_another_test_made_between_streams_counts() -> None:
    order = records((Kind.EVENT_RECORD, {"stream": A, "aux0": 5}), (Kind.STREAM_WAIT_EVENT, {"stream": B, "aux0": 5}))
    before = past(CREATED, (True, records(fill(A, 1))), (False, order))
    assert 0 == races(before, fill(B, 2))


def test_accesses_told_later_belong_to_their_operation() -> None:
    launch = Kind.KERNEL_LAUNCH, {"stream": A, "correlation": 1}
    access = Kind.ACCESS, {"correlation": 1, "address": X, "size": 4, "flags": AccessFlag.WRITE}
    other = Kind.ACCESS, {"correlation": 7, "address": X, "size": 4, "flags": AccessFlag.WRITE}
    before = past(CREATED, (True, records(launch)), (False, records(access, other)))
    assert 1 == kinds(before.records).count(Kind.ACCESS)
    assert 1 == races(before, fill(B, 2))


def test_only_what_lives_stays_once_all_is_waited_for() -> None:
    before = past(
        CREATED,
        (True, records(fill(A, 1), (Kind.MEM_ALLOC, {"address": X + 4096, "size": 8}))),
        (
            False,
            records(
                (Kind.DEVICE_SYNCHRONIZE, {}),
                (Kind.MEM_FREE, {"address": X + 4096, "size": 8}),
                (Kind.EVENT_RECORD, {"stream": A, "aux0": 5}),
                (Kind.EVENT_RECORD, {"stream": A, "aux0": 6}),
                (Kind.EVENT_DESTROY, {"aux0": 6}),
                (Kind.STREAM_DESTROY, {"stream": B}),
            ),
        ),
    )
    expected = [Kind.STREAM_CREATE, Kind.MEM_ALLOC, Kind.EVENT_RECORD, Kind.DEVICE_SYNCHRONIZE]
    assert expected == kinds(before.records)


def test_graphs_of_fixtures_stay() -> None:
    graph = records((Kind.GRAPH_INSTANTIATE, {"aux0": 1}), (Kind.GRAPH_NODE, {"aux0": 1, "aux1": 1}))
    before = past((True, graph), (False, graph))
    for _ in range(2):
        before.add(graph, np.zeros(len(graph), bool))
        assert [Kind.GRAPH_INSTANTIATE, Kind.GRAPH_NODE, Kind.DEVICE_SYNCHRONIZE] == kinds(before.records)


def test_past_does_not_grow_with_the_number_of_tests() -> None:
    before = past(CREATED, (True, records(fill(A, 1))))  # never waited for
    noise = records(*[(Kind.STREAM_QUERY, {"stream": B})] * 500)
    lengths = []
    for _ in range(100):
        before.add(noise, np.zeros(len(noise), bool))
        lengths.append(len(before))
    assert max(lengths) <= 20_000
    assert lengths[-1] < 100 * 500


def test_stream_ordered_allocation_of_another_test_can_be_used() -> None:
    allocate = Kind.MEM_ALLOC, {"address": X + 4096, "size": 64, "stream": A}
    before = past(CREATED, (False, records(allocate)))
    assert 0 == races(before, fill(B, 2, address=X + 4096))


def block(address: int, size: int) -> tuple[Kind, dict[str, Any]]:
    return Kind.BLOCK_ALLOC, {"address": address, "size": size}


def free(address: int) -> tuple[Kind, dict[str, Any]]:
    return Kind.BLOCK_FREE_REQUESTED, {"address": address}


def test_memory_at_the_peak_and_at_the_end() -> None:
    found = memory_of(records(block(1, 10), block(2, 20), free(1), block(3, 5), block(1, 3), free(2), free(9)))
    assert (30, (0, 1)) == (found.peak, found.at_peak)
    assert (8, (3, 4)) == (found.left_bytes, found.left)


def test_peak_may_be_the_end() -> None:
    found = memory_of(records(block(1, 10), free(1), block(2, 7), block(3, 7)))
    assert (14, (2, 3)) == (found.peak, found.at_peak)


def test_host_memory_and_frees_of_earlier_memory_do_not_count() -> None:
    found = memory_of(records((Kind.HOST_ALLOC, {"address": 1, "size": 99}), free(5), (Kind.MEM_FREE, {"address": 6})))
    assert (0, 0, ()) == (found.peak, found.left_bytes, found.left)
