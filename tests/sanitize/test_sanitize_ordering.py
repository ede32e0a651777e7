"""Every ordering rule in both directions: with the edge there is no finding, without it there is one."""

from __future__ import annotations

import pytest
from sanitize_program import BUFFER, RW, SIZE, Program, R, W, kinds, read, write

from cudatool.sanitize import FindingKind, Gap, GapKind, Outcome, check
from cudatool.sanitize.report.views import verdict
from cudatool.trace.events import CopyFlag, Kind, LaunchFlag, StreamFlag

PINNED = 0x900000
BLOCKING = StreamFlag(0)
TO_HOST, TO_DEVICE = CopyFlag.SOURCE_DEVICE, CopyFlag.DESTINATION_DEVICE
ON_DEVICE = CopyFlag.SOURCE_DEVICE | CopyFlag.DESTINATION_DEVICE


def test_operations_of_one_stream_are_ordered(program: Program) -> None:
    stream = program.stream()
    for _ in range(3):
        write(program, stream)
        read(program, stream)
    assert kinds(program) == []


def test_two_streams_are_not_ordered(program: Program) -> None:
    write(program, program.stream())
    read(program, program.stream())
    assert kinds(program) == ["race-raw"]


def test_kind_of_race_follows_what_the_two_sides_do(program: Program) -> None:
    a, b = program.stream(), program.stream()
    for index, (first, second) in enumerate([(W, R), (R, W), (W, W), (RW, RW)]):
        program.kernel(a, (first, BUFFER + index, 1))
        program.kernel(b, (second, BUFFER + index, 1))
    assert kinds(program) == ["race-raw", "race-war", "race-waw", "race-raw"]


def test_reads_do_not_race(program: Program) -> None:
    read(program, program.stream())
    read(program, program.stream())
    assert kinds(program) == []


# Events ------------------------------------------------------------------------------------------------------------


def test_event_wait_orders_the_recorded_work_before_later_work(program: Program) -> None:
    a, b, event = program.stream(), program.stream(), program.event()
    write(program, a)
    program.record(event, a)
    program.wait(b, event)
    read(program, b)
    assert kinds(program) == []


def test_event_wait_does_not_order_work_enqueued_after_the_record(program: Program) -> None:
    a, b, event = program.stream(), program.stream(), program.event()
    program.record(event, a)
    write(program, a)
    program.wait(b, event)
    read(program, b)
    assert kinds(program) == ["race-raw"]


def test_event_wait_does_not_order_work_enqueued_before_the_wait(program: Program) -> None:
    a, b, event = program.stream(), program.stream(), program.event()
    write(program, a)
    program.record(event, a)
    read(program, b)
    program.wait(b, event)
    assert kinds(program) == ["race-raw"]


def test_wait_on_unrecorded_event_adds_no_edge(program: Program) -> None:
    a, b, event = program.stream(), program.stream(), program.event()
    write(program, a)
    program.wait(b, event)
    program.record(event, a)
    read(program, b)
    report = check(program.trace())
    assert {finding.kind for finding in report.findings} == {FindingKind.RACE_RAW, FindingKind.WAIT_UNRECORDED}
    assert "1 stream wait did nothing: the event had not been recorded" in report.notes


def test_wait_sees_the_latest_record_at_the_time_of_the_wait(program: Program) -> None:
    a, b, event = program.stream(), program.stream(), program.event()
    program.record(event, a)
    write(program, a)
    program.record(event, a)
    program.wait(b, event)
    read(program, b)
    assert kinds(program) == []


def test_rerecording_an_event_on_another_stream_loses_the_first_record(program: Program) -> None:
    a, b, c, event = program.stream(), program.stream(), program.stream(), program.event()
    write(program, a)
    program.record(event, a)
    program.record(event, c)
    program.wait(b, event)
    read(program, b)
    assert kinds(program) == ["race-raw"]


def test_recording_again_after_the_wait_changes_nothing(program: Program) -> None:
    a, b, event = program.stream(), program.stream(), program.event()
    write(program, a)
    program.record(event, a)
    program.wait(b, event)
    write(program, a)
    program.record(event, a)
    read(program, b)
    assert kinds(program) == ["race-raw"]


def test_destroying_an_event_keeps_its_edges(program: Program) -> None:
    a, b, event = program.stream(), program.stream(), program.event()
    write(program, a)
    program.record(event, a)
    program.wait(b, event)
    program.emit(Kind.EVENT_DESTROY, aux0=event)
    read(program, b)
    assert kinds(program) == []


def test_event_edges_are_transitive(program: Program) -> None:
    a, b, c = program.stream(), program.stream(), program.stream()
    write(program, a)
    program.order(a, b)
    program.order(b, c)
    read(program, c)
    assert kinds(program) == []


def test_pool_of_events_recorded_again_for_every_iteration_is_clean(program: Program) -> None:
    a, b = program.stream(), program.stream()
    pool = [program.event() for _ in range(3)]
    for iteration in range(12):
        ready, done = pool[iteration % 3], pool[(iteration + 1) % 3]
        write(program, a)
        program.record(ready, a)
        program.wait(b, ready)
        read(program, b)
        program.record(done, b)
        program.wait(a, done)
    assert kinds(program) == []


def test_event_wait_orders_streams_of_two_devices(program: Program) -> None:
    a, b = program.stream(device=0), program.stream(device=1)
    write(program, a)
    program.order(a, b)
    read(program, b)
    assert kinds(program) == []


# The host ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["stream", "event", "device", "stream query", "event query"])
def test_host_that_waited_orders_what_it_enqueues_next(program: Program, how: str) -> None:
    a, b, event = program.stream(), program.stream(), program.event()
    write(program, a)
    program.record(event, a)
    match how:
        case "stream":
            program.synchronize(stream=a)
        case "event":
            program.synchronize(event=event)
        case "device":
            program.synchronize(device=0)
        case "stream query":
            program.query(stream=a)
        case "event query":
            program.query(event=event)
    read(program, b)
    assert kinds(program) == []


@pytest.mark.parametrize("how", ["other stream", "unrecorded event", "other device", "stream query", "event query"])
def test_host_that_waited_for_something_else_orders_nothing(program: Program, how: str) -> None:
    a, b, event = program.stream(), program.stream(), program.event()
    write(program, a)
    match how:
        case "other stream":
            program.synchronize(stream=b)
        case "unrecorded event":
            program.synchronize(event=event)
        case "other device":
            program.stream(device=1)
            program.synchronize(device=1)
        case "stream query":
            program.query(stream=a, done=False)
        case "event query":
            program.record(event, a)
            program.query(event=event, done=False)
    read(program, b)
    assert kinds(program) == ["race-raw"]


def test_synchronize_orders_only_work_enqueued_before_it(program: Program) -> None:
    a, b = program.stream(), program.stream()
    program.synchronize(stream=a)
    write(program, a)
    read(program, b)
    assert kinds(program) == ["race-raw"]


def test_host_access_after_synchronize_is_clean(program: Program) -> None:
    stream = program.stream()
    program.copy(stream, PINNED, BUFFER, SIZE, TO_HOST | CopyFlag.ASYNC)
    program.synchronize(stream=stream)
    program.host(R, PINNED, SIZE)
    assert kinds(program) == []


def test_host_reads_pinned_memory_too_early(program: Program) -> None:
    stream = program.stream()
    program.copy(stream, PINNED, BUFFER, SIZE, TO_HOST | CopyFlag.ASYNC)
    program.host(R, PINNED, SIZE)
    assert kinds(program) == ["race-host"]


def test_host_overwrites_the_pinned_source_of_a_copy_too_early(program: Program) -> None:
    program.copy(program.stream(), BUFFER, PINNED, SIZE, TO_DEVICE | CopyFlag.ASYNC)
    program.host(W, PINNED, 1)
    assert kinds(program) == ["race-host"]


def test_host_may_read_the_pinned_source_of_a_copy(program: Program) -> None:
    program.copy(program.stream(), BUFFER, PINNED, SIZE, TO_DEVICE | CopyFlag.ASYNC)
    program.host(R, PINNED, SIZE)
    assert kinds(program) == []


def test_enqueue_comes_after_what_its_thread_did_before(program: Program) -> None:
    program.host(W, PINNED, SIZE)
    program.copy(program.stream(), BUFFER, PINNED, SIZE, TO_DEVICE | CopyFlag.ASYNC)
    assert kinds(program) == []


@pytest.mark.parametrize("pageable", [CopyFlag.SOURCE_PAGEABLE, CopyFlag.DESTINATION_PAGEABLE])
def test_asynchronous_copy_of_pageable_memory_gives_neither_edge_nor_race(program: Program, pageable: CopyFlag) -> None:
    a, b = program.stream(), program.stream()
    direction = TO_DEVICE if pageable is CopyFlag.SOURCE_PAGEABLE else TO_HOST
    to, source = (BUFFER, PINNED) if direction is TO_DEVICE else (PINNED, BUFFER)
    program.copy(a, to, source, SIZE, direction | pageable | CopyFlag.ASYNC)
    program.host(RW, PINNED, SIZE)
    assert kinds(program) == []  # no race on the staged side
    write(program, b)
    assert kinds(program) == ["race-waw" if direction is TO_DEVICE else "race-war"]  # and no edge


# Synchronous copies ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "blocks"),
    [
        (TO_HOST, True),
        (TO_HOST | CopyFlag.DESTINATION_PAGEABLE, True),
        (TO_DEVICE, True),
        (CopyFlag(0), True),
        (ON_DEVICE, False),
        (TO_HOST | CopyFlag.ASYNC, False),
        (TO_DEVICE | CopyFlag.ASYNC, False),
        (TO_DEVICE | CopyFlag.SOURCE_PAGEABLE, False),
    ],
)
def test_copy_blocks_the_host_as_the_reference_says(program: Program, flags: CopyFlag, blocks: bool) -> None:
    a, b = program.stream(), program.stream()
    program.copy(a, BUFFER, PINNED, SIZE, flags)
    program.kernel(b, (W, BUFFER, SIZE))
    assert kinds(program) == ([] if blocks or flags & CopyFlag.DESTINATION_PAGEABLE else ["race-waw"])


def test_synchronous_pageable_upload_waits_for_earlier_work_of_its_stream(program: Program) -> None:
    a, b = program.stream(), program.stream()
    write(program, a)
    program.copy(a, BUFFER + SIZE, 1, 4, TO_DEVICE | CopyFlag.SOURCE_PAGEABLE)
    read(program, b)
    assert kinds(program) == []


@pytest.mark.parametrize(
    ("flags", "blocks"), [(CopyFlag.DESTINATION_DEVICE, False), (CopyFlag(0), True), (CopyFlag.ASYNC, False)]
)
def test_fill_blocks_the_host_only_for_pinned_memory(program: Program, flags: CopyFlag, blocks: bool) -> None:
    program.fill(program.stream(), PINNED, SIZE, flags)
    program.host(R, PINNED, SIZE)
    assert kinds(program) == ([] if blocks else ["race-host"])


# Default streams ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("legacy_first", [True, False])
@pytest.mark.parametrize(
    ("flags", "expected"),
    [(BLOCKING, []), (StreamFlag.PER_THREAD_DEFAULT, []), (StreamFlag.NON_BLOCKING, ["race-raw"])],
)
def test_legacy_default_stream_is_ordered_with_blocking_streams_only(
    program: Program, flags: StreamFlag, expected: list[str], legacy_first: bool
) -> None:
    legacy, other = program.stream(StreamFlag.LEGACY_DEFAULT), program.stream(flags)
    first, second = (legacy, other) if legacy_first else (other, legacy)
    write(program, first)
    read(program, second)
    assert kinds(program) == expected


def test_stream_whose_creation_was_not_seen_is_taken_for_a_blocking_one(program: Program) -> None:
    legacy = program.stream(StreamFlag.LEGACY_DEFAULT)
    write(program, legacy)
    read(program, 99)
    assert kinds(program) == []


def test_legacy_default_stream_of_another_device_orders_nothing(program: Program) -> None:
    legacy, other = program.stream(StreamFlag.LEGACY_DEFAULT, device=1), program.stream(BLOCKING, device=0)
    write(program, legacy)
    read(program, other)
    assert kinds(program) == ["race-raw"]


def test_work_on_the_legacy_stream_orders_two_blocking_streams(program: Program) -> None:
    legacy, a, b = program.stream(StreamFlag.LEGACY_DEFAULT), program.stream(BLOCKING), program.stream(BLOCKING)
    write(program, a)
    program.kernel(legacy)
    read(program, b)
    assert kinds(program) == []


def test_blocking_streams_are_not_ordered_without_legacy_work_between_them(program: Program) -> None:
    legacy, a, b = program.stream(StreamFlag.LEGACY_DEFAULT), program.stream(BLOCKING), program.stream(BLOCKING)
    program.kernel(legacy)
    write(program, a)
    read(program, b)
    assert kinds(program) == ["race-raw"]


def test_synchronizing_the_legacy_stream_covers_blocking_streams(program: Program) -> None:
    legacy, a, b = program.stream(StreamFlag.LEGACY_DEFAULT), program.stream(BLOCKING), program.stream()
    write(program, a)
    program.synchronize(stream=legacy)
    read(program, b)
    assert kinds(program) == []


def test_synchronizing_a_blocking_stream_covers_earlier_legacy_work(program: Program) -> None:
    legacy, a, b = program.stream(StreamFlag.LEGACY_DEFAULT), program.stream(BLOCKING), program.stream()
    write(program, legacy)
    program.synchronize(stream=a)
    read(program, b)
    assert kinds(program) == []


def test_two_per_thread_default_streams_are_not_ordered(program: Program) -> None:
    write(program, program.stream(StreamFlag.PER_THREAD_DEFAULT))
    read(program, program.stream(StreamFlag.PER_THREAD_DEFAULT))
    assert kinds(program) == ["race-raw"]


# Host functions, graphs, threads -----------------------------------------------------------------------------------


def test_host_function_runs_in_stream_order(program: Program) -> None:
    a, b = program.stream(), program.stream()
    write(program, a)
    program.emit(Kind.HOST_FUNCTION, stream=a, correlation=1000)
    program.emit(Kind.ACCESS, correlation=1000, flags=R, address=BUFFER, size=SIZE)
    program.emit(Kind.HOST_FUNCTION, stream=b, correlation=1001)
    program.emit(Kind.ACCESS, correlation=1001, flags=R, address=BUFFER, size=SIZE)
    assert kinds(program) == ["race-raw"]


def test_captured_work_does_not_execute_at_capture(program: Program) -> None:
    a, b = program.stream(), program.stream()
    program.kernel(a, (W, BUFFER, SIZE))
    program.emit(Kind.GRAPH_CAPTURE_BEGIN, stream=b)
    read(program, b)
    program.emit(Kind.GRAPH_CAPTURE_END, stream=b, aux0=1)
    assert kinds(program) == []
    read(program, b)
    assert kinds(program) == ["race-raw"]


def test_stream_that_waits_for_a_captured_event_joins_the_capture(program: Program) -> None:
    a, b, c, event = program.stream(), program.stream(), program.stream(), program.event()
    write(program, a)
    program.emit(Kind.GRAPH_CAPTURE_BEGIN, stream=b)
    program.record(event, b)
    program.wait(c, event)
    read(program, c)
    program.emit(Kind.GRAPH_CAPTURE_END, stream=b, aux0=1)
    assert kinds(program) == []
    read(program, c)
    assert kinds(program) == ["race-raw"]


def test_event_recorded_again_outside_the_capture_takes_no_stream_into_it(program: Program) -> None:
    a, b, c, event = program.stream(), program.stream(), program.stream(), program.event()
    program.emit(Kind.GRAPH_CAPTURE_BEGIN, stream=b)
    program.record(event, b)
    program.record(event, a)
    program.wait(c, event)
    write(program, a)
    read(program, c)
    assert kinds(program) == ["race-raw"]


def test_graph_launch_is_ordered_with_its_stream(program: Program) -> None:
    a, b = program.stream(), program.stream()
    program.emit(Kind.GRAPH_LAUNCH, stream=a, correlation=1000, aux0=1)
    program.emit(Kind.ACCESS, correlation=1000, flags=W, address=BUFFER, size=SIZE)
    read(program, a)
    assert kinds(program) == []
    read(program, b)
    assert kinds(program) == ["race-raw"]


def test_order_that_only_a_hand_over_between_threads_could_give_is_a_gap(program: Program) -> None:
    a, b = program.stream(), program.stream()
    write(program, a)
    program.synchronize(stream=a)
    program.on_thread(1)
    read(program, b)
    report = check(program.trace())
    assert report.findings == ()
    assert report.gaps == (Gap(GapKind.THREADS, 1, ("program.py:3 and program.py:5",)),)
    assert Outcome.PARTLY_CHECKED is report.outcome
    assert verdict(report).endswith(
        "no findings in what was checked; not checked: 1 possible race between Python threads"
    )


def test_threads_do_not_order_streams_by_enqueuing_one_after_the_other(program: Program) -> None:
    a, b = program.stream(), program.stream()
    write(program, a)
    program.on_thread(1)
    read(program, b)
    assert kinds(program) == ["race-raw"]


@pytest.mark.parametrize("mode", [R, W])
def test_flags_in_memory_may_order_the_host_and_a_kernel_of_system_scope(mode):
    program = Program()
    one, two = program.stream(), program.stream()
    program.kernel(one, (W, 1000, 100), flags=LaunchFlag.SYSTEM_SCOPE)
    program.host(mode, 1000, 100)
    program.kernel(two, (W, 2000, 100))
    program.host(mode, 2000, 100)
    report = check(program.trace())
    assert [2000] == [finding.start for finding in report.findings]
    (gap,) = (gap for gap in report.gaps if gap.kind is GapKind.FLAGS)
    assert (1, ("program.py:3 and program.py:4",)) == (gap.count, gap.names)


@pytest.mark.parametrize(
    ("second", "uses_flags", "expected"),
    [
        ([(R, 2000, 4), (R, 1000, 100)], True, "gap"),  # 2000 is the flag
        ([(R, 2000, 4), (W, 1000, 100)], True, "gap"),
        ([(RW, 2000, 4), (W, 1000, 100)], True, "gap"),
        ([(R, 2004, 4), (W, 1000, 100)], True, "race"),  # beside it
        ([(W, 2000, 4), (W, 1000, 100)], True, "race"),  # neither reads
        ([(R, 2000, 4), (R, 1000, 100)], False, "race"),
    ],
)
def test_flags_in_memory_may_order_two_kernels_of_which_one_reads_what_the_other_writes(second, uses_flags, expected):
    program = Program()
    one, two = program.stream(), program.stream()
    program.kernel(one, (W, 1000, 100), (W, 2000, 4), flags=LaunchFlag.SYSTEM_SCOPE)
    program.kernel(two, *second, flags=LaunchFlag.SYSTEM_SCOPE if uses_flags else LaunchFlag(0))
    report = check(program.trace())
    gaps = [gap for gap in report.gaps if gap.kind is GapKind.FLAGS]
    assert (expected == "race", expected == "gap") == (bool(report.findings), bool(gaps))
    assert not report.possible


def test_flags_in_memory_order_no_two_streams():
    program = Program()
    one, two = program.stream(), program.stream()
    program.kernel(one, (W, 1000, 100), flags=LaunchFlag.SYSTEM_SCOPE)
    program.kernel(two, (W, 1000, 100), flags=LaunchFlag.SYSTEM_SCOPE)
    assert 1 == len(check(program.trace()).findings)
