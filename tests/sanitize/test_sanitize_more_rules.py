"""Rules for copies between devices, values in memory, other processes, host functions and pinned memory, both ways."""

from __future__ import annotations

import pytest
from sanitize_program import BUFFER, SIZE, Program, R, W, kinds, read, write

from cudatool.sanitize import Gap, GapKind, check
from cudatool.sanitize.report.views import which_bytes
from cudatool.trace.events import CopyFlag, Kind, LaunchFlag, StreamFlag

FLAG, PINNED = 0x500000, 0x900000
ON_DEVICE = CopyFlag.SOURCE_DEVICE | CopyFlag.DESTINATION_DEVICE


# Copies ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "flags", "expected"),
    [
        ("cuMemcpyPeer", ON_DEVICE, []),
        ("cuMemcpy3DPeer", ON_DEVICE, []),
        ("cuMemcpyPeerAsync", ON_DEVICE | CopyFlag.ASYNC, ["race-raw"]),
        ("cuMemcpyDtoD", ON_DEVICE, ["race-raw"]),
    ],
)
def test_copy_between_devices_is_serialized_with_their_work_unless_asynchronous(
    program: Program, name: str, flags: int, expected: list[str]
) -> None:
    a, b = program.stream(device=0), program.stream(device=1)
    copier = program.stream(device=0)
    write(program, a)
    program.copy(copier, 0x700000, 0x800000, 4, flags, name=name, devices=0b11)
    read(program, b)
    assert expected == kinds(program)


def test_copy_between_devices_orders_no_third_device(program: Program) -> None:
    a, other = program.stream(device=0), program.stream(device=2)
    write(program, a)
    program.copy(program.stream(device=0), 0x700000, 0x800000, 4, ON_DEVICE, name="cuMemcpyPeer", devices=0b11)
    read(program, other)
    assert ["race-raw"] == kinds(program)


@pytest.mark.parametrize(("flags", "expected"), [(CopyFlag(0), []), (CopyFlag.SOURCE_DEVICE, ["race-raw"])])
def test_asynchronous_copy_on_the_host_blocks_it(program: Program, flags: CopyFlag, expected: list[str]) -> None:
    a, b = program.stream(), program.stream()
    write(program, a)
    program.copy(a, PINNED, PINNED + SIZE, 4, flags | CopyFlag.ASYNC)
    read(program, b)
    assert expected == kinds(program)


# Values in memory, and what comes from elsewhere -------------------------------------------------------------------


def test_wait_for_a_value_comes_after_the_write_that_was_seen(program: Program) -> None:
    a, b = program.stream(), program.stream()
    write(program, a)
    program.emit(Kind.STREAM_WRITE_VALUE, stream=a, address=FLAG, aux0=1, size=4)
    program.emit(Kind.STREAM_WAIT_VALUE, stream=b, address=FLAG, aux0=1, size=4)
    read(program, b)
    assert [] == kinds(program)


def test_write_of_a_value_orders_nothing_that_does_not_wait_for_it(program: Program) -> None:
    a, b = program.stream(), program.stream()
    write(program, a)
    program.emit(Kind.STREAM_WRITE_VALUE, stream=a, address=FLAG, aux0=1, size=4)
    read(program, b)
    assert ["race-raw"] == kinds(program)


def test_of_several_values_that_end_a_wait_the_first_may_be_it(program: Program) -> None:
    a, b = program.stream(), program.stream()
    program.emit(Kind.STREAM_WRITE_VALUE, stream=a, address=FLAG, aux0=1, size=4)
    write(program, a)
    program.emit(Kind.STREAM_WRITE_VALUE, stream=a, address=FLAG, aux0=2, size=4)
    program.emit(Kind.STREAM_WAIT_VALUE, stream=b, address=FLAG, aux0=1, size=4)  # at least 1
    read(program, b)
    assert ["race-raw"] == kinds(program)


def exchange(program: Program, a: int, b: int) -> None:
    """Stream `a` writes and sets the flag to 1; `b` waits for it and reads."""
    write(program, a)
    program.emit(Kind.STREAM_WRITE_VALUE, stream=a, address=FLAG, aux0=1, size=4)
    program.emit(Kind.STREAM_WAIT_VALUE, stream=b, address=FLAG, aux0=1, size=4)
    read(program, b)


def test_flag_that_goes_to_and_fro_between_two_streams_orders_every_round(program: Program) -> None:
    a, b = program.stream(), program.stream()
    for _ in range(3):
        exchange(program, a, b)
        program.emit(Kind.STREAM_WRITE_VALUE, stream=b, address=FLAG, aux0=0, size=4)
        program.emit(Kind.STREAM_WAIT_VALUE, stream=a, address=FLAG, aux0=0, size=4, flags=1)
    assert [] == kinds(program)


@pytest.mark.parametrize("how", ["fill", "kernel", "value without a barrier"])
@pytest.mark.parametrize("in_order", [True, False])
def test_value_of_an_earlier_round_ends_no_wait_once_it_is_replaced(program: Program, how: str, in_order: bool) -> None:
    a, b, other = program.stream(), program.stream(), program.stream()
    exchange(program, a, b)
    program.synchronize(device=0)
    match how:
        case "fill":
            program.emit(Kind.MEMSET, stream=other, address=FLAG - 64, size=128, flags=CopyFlag.DESTINATION_DEVICE)
        case "kernel":
            program.kernel(other, (W, FLAG, 4))
        case _:
            program.emit(Kind.STREAM_WRITE_VALUE, stream=other, address=FLAG, aux0=0, size=4, flags=1)
    if in_order:
        program.synchronize(device=0)
    exchange(program, a, b)
    assert ([] if in_order else ["race-raw"]) == kinds(program)


def test_write_of_a_part_of_the_flag_replaces_no_value(program: Program) -> None:
    a, b = program.stream(), program.stream()
    exchange(program, a, b)
    program.synchronize(device=0)
    program.kernel(a, (W, FLAG, 2))
    program.synchronize(device=0)
    exchange(program, a, b)
    assert ["race-raw"] == kinds(program)


@pytest.mark.parametrize(
    ("flags", "written", "value", "met"),
    [
        (0, 5, 4, True),
        (0, 3, 4, False),
        (0, 1, 0xFFFFFFFF, True),
        (1, 5, 4, False),
        (1, 4, 4, True),
        (2, 6, 2, True),
        (2, 4, 2, False),
        (3, 0xFFFFFFF0, 0xE, True),
        (3, 0xFFFFFFF0, 0xF, False),
    ],
)
def test_conditions_of_a_wait_for_a_value(program: Program, flags: int, written: int, value: int, met: bool) -> None:
    a, b = program.stream(), program.stream()
    program.emit(Kind.STREAM_WRITE_VALUE, stream=a, address=FLAG, aux0=written, size=4)
    program.emit(Kind.STREAM_WAIT_VALUE, stream=b, address=FLAG, aux0=value, size=4, flags=flags)
    report = check(program.trace())
    assert met == ("wait for a value" in report.edges)
    assert met != any("which the trace does not show" in note or "does not show" in note for note in report.notes)


@pytest.mark.parametrize("how", ["value", "semaphore", "event of another process"])
def test_order_that_the_trace_cannot_show_is_a_note_and_no_finding(program: Program, how: str) -> None:
    a, b, event = program.stream(), program.stream(), program.event()
    write(program, a)
    match how:
        case "value":
            program.emit(Kind.STREAM_WAIT_VALUE, stream=b, address=FLAG, aux0=1, size=4)
        case "semaphore":
            program.emit(Kind.STREAM_WAIT_UNKNOWN, stream=b)
        case _:
            program.emit(Kind.EVENT_CREATE, aux0=event, flags=2)
            program.wait(b, event)
    read(program, b)
    write(program, a)  # which may have come before the read, too
    report = check(program.trace())
    assert () == report.findings
    assert ["1 wait for what the trace does not show, as another process's event"] == list(report.notes)
    assert (Gap(GapKind.WAITS, 2),) == report.gaps


def test_what_only_an_unknown_wait_may_order_is_a_gap(program: Program) -> None:
    a, b = program.stream(), program.stream()
    write(program, a)
    program.emit(Kind.STREAM_WAIT_UNKNOWN, stream=b)
    program.synchronize(stream=b)
    read(program, program.stream())  # the host waited for what may have waited for the write
    report = check(program.trace())
    assert () == report.findings
    assert (Gap(GapKind.WAITS, 1),) == report.gaps


def test_unknown_wait_beside_work_that_is_in_order_is_no_gap(program: Program) -> None:
    a, b = program.stream(), program.stream()
    write(program, a)
    program.synchronize(stream=a)
    program.emit(Kind.STREAM_WAIT_UNKNOWN, stream=b)
    read(program, b)
    assert () == check(program.trace()).gaps


def test_streams_that_waited_for_nothing_unknown_race_as_ever(program: Program) -> None:
    a, b, c = program.stream(), program.stream(), program.stream()
    program.emit(Kind.STREAM_WAIT_UNKNOWN, stream=c)
    write(program, a)
    read(program, b)
    assert ["race-raw"] == kinds(program)


def test_host_that_synchronized_knows_what_the_stream_waited_for(program: Program) -> None:
    a, b = program.stream(), program.stream()
    program.emit(Kind.STREAM_WAIT_UNKNOWN, stream=b)
    program.synchronize(stream=b)
    read(program, b)
    write(program, a)
    assert ["race-war"] == kinds(program)


# Waits that did nothing --------------------------------------------------------------------------------------------


def test_empty_wait_that_would_have_ordered_a_race_is_found_with_its_repair(program: Program) -> None:
    a, b, event = program.stream(), program.stream(), program.event()
    write(program, a)
    program.wait(b, event)
    program.record(event, a)
    read(program, b)
    found = {finding.kind.value: finding for finding in check(program.trace()).findings}
    assert {"race-raw", "wait-unrecorded"} == found.keys()
    assert found["race-raw"].reason.endswith("The wait at program.py:5 did nothing: its event had not been recorded.")
    assert "Record the event after kernel write (program.py:4) and before the wait at program.py:5." == (
        found["race-raw"].repair
    )
    assert 5 == found["wait-unrecorded"].first.stack[0].line == found["wait-unrecorded"].second.stack[0].line


@pytest.mark.parametrize("how", ["no race", "another stream's event", "wait before the write", "wait elsewhere"])
def test_empty_wait_that_matters_to_no_race_is_no_finding(program: Program, how: str) -> None:
    a, b, c, event = program.stream(), program.stream(), program.stream(), program.event()
    if how == "wait before the write":
        program.wait(b, event)
    if how != "no race":
        write(program, a)
    if how in ("no race", "another stream's event"):
        program.wait(b, event)
    if how == "wait elsewhere":
        program.wait(c, event)
    if how == "another stream's event":
        program.record(event, c)
    read(program, b)
    assert "wait-unrecorded" not in kinds(program)


def test_empty_synchronize_of_the_host_counts_as_well(program: Program) -> None:
    a, event = program.stream(), program.event()
    program.kernel(a, (W, PINNED, SIZE))
    program.synchronize(event=event)
    program.host(R, PINNED, SIZE)
    assert {"race-host", "wait-unrecorded"} == set(kinds(program))


# Host functions and threads ----------------------------------------------------------------------------------------


def host_function(program: Program, stream: int) -> int:
    program.emit(Kind.HOST_FUNCTION, stream=stream, correlation=1000, name="cuLaunchHostFunc")
    return 1000


@pytest.mark.parametrize(("same", "expected"), [(True, []), (False, ["race-host"])])
def test_what_a_host_function_touches_is_in_its_streams_order(
    program: Program, same: bool, expected: list[str]
) -> None:
    a, b = program.stream(), program.stream()
    program.kernel(a, (W, PINNED, SIZE))
    function = host_function(program, a if same else b)
    program.emit(Kind.HOST_ACCESS, flags=R, address=PINNED, size=4, correlation=function)
    report = check(program.trace())
    assert expected == [finding.kind.value for finding in report.findings]
    for finding in report.findings:
        assert ("host access", 5, 4) == (
            finding.second.operation,
            finding.second.stack[0].line,
            finding.second.launch[0].line,
        )


@pytest.mark.parametrize(("told", "expected"), [(True, []), (False, ["race-host"])])
def test_host_that_a_host_function_told_comes_after_its_streams_work(
    program: Program, told: bool, expected: list[str]
) -> None:
    a = program.stream()
    program.kernel(a, (W, PINNED, SIZE))
    function = host_function(program, a)
    program.emit(Kind.HAND_OVER, aux0=7, correlation=function)
    program.emit(Kind.TAKE_OVER, aux0=7 if told else 8)
    program.host(R, PINNED, 4)
    assert expected == kinds(program)


@pytest.mark.parametrize(("told", "expected"), [(True, []), (False, ["race-host"])])
def test_a_host_function_may_run_before_the_call_that_enqueued_it_is_recorded(
    program: Program, told: bool, expected: list[str]
) -> None:
    a = program.stream()
    program.kernel(a, (W, PINNED, SIZE))
    program.on_thread(1).emit(Kind.HAND_OVER, aux0=7, correlation=99)
    program.on_thread(0).emit(Kind.HOST_FUNCTION, stream=a, correlation=99, name="cuLaunchHostFunc")
    program.emit(Kind.TAKE_OVER, aux0=7 if told else 8)
    program.host(R, PINNED, 4)
    assert expected == kinds(program)


@pytest.mark.parametrize(("taken", "pairs"), [(True, 0), (False, 1)])
def test_hand_over_between_threads_orders_them(program: Program, taken: bool, pairs: int) -> None:
    a, b = program.stream(), program.stream()
    write(program, a)
    program.synchronize(stream=a)
    program.emit(Kind.HAND_OVER, aux0=7)
    program.on_thread(1)
    if taken:
        program.emit(Kind.TAKE_OVER, aux0=7)
    read(program, b)
    assert pairs == sum(gap.count for gap in check(program.trace()).gaps if gap.kind is GapKind.THREADS)


# Pinned memory -----------------------------------------------------------------------------------------------------

BLOCK = 1 | 2  # flags of HOST_ALLOC: of a caching allocator, which tells what it will wait for


@pytest.mark.parametrize(("told", "expected"), [(True, []), (False, ["race-host"])])
def test_pinned_block_handed_out_again_is_safe_if_its_allocator_knew_of_the_copy(
    program: Program, told: bool, expected: list[str]
) -> None:
    a = program.stream()
    program.emit(Kind.HOST_ALLOC, address=PINNED, size=SIZE, flags=BLOCK)
    program.copy(a, BUFFER, PINNED, SIZE, CopyFlag.DESTINATION_DEVICE | CopyFlag.ASYNC)
    if told:
        program.record_stream(PINNED, SIZE, a)
    program.emit(Kind.HOST_FREE, address=PINNED, size=SIZE, flags=BLOCK)
    program.emit(Kind.HOST_ALLOC, address=PINNED, size=SIZE, flags=BLOCK)
    program.host(W, PINNED, SIZE)
    assert expected == kinds(program)


@pytest.mark.parametrize(("waited", "expected"), [(True, []), (False, ["use-after-free"])])
def test_memory_is_unregistered_only_after_its_copies(program: Program, waited: bool, expected: list[str]) -> None:
    a = program.stream()
    program.emit(Kind.HOST_ALLOC, address=PINNED, size=SIZE, name="cuMemHostRegister")
    program.copy(a, BUFFER, PINNED, SIZE, CopyFlag.DESTINATION_DEVICE | CopyFlag.ASYNC)
    if waited:
        program.synchronize(stream=a)
    program.emit(Kind.HOST_FREE, address=PINNED, size=SIZE, name="cuMemHostUnregister")
    assert expected == kinds(program)


@pytest.mark.parametrize(("grouped", "expected"), [(0, []), (1, ["race-raw"])])
def test_collective_operations_of_one_group_come_in_no_order_on_their_stream(grouped: int, expected: list[str]) -> None:
    program = Program()
    stream = program.stream()
    for correlation, mode, flags, name in ((1, W, 0, "recv"), (2, R, grouped, "send")):
        program.emit(Kind.COLLECTIVE, stream=stream, correlation=correlation, flags=flags, name=name)
        program.emit(Kind.ACCESS, correlation=correlation, flags=mode, address=0x10000, size=64)
    findings = check(program.trace()).findings
    assert expected == [finding.kind.value for finding in findings]
    for finding in findings:
        assert "Both are operations of one group, which come in no order, even on one stream." == finding.reason
        assert "End the group before send at program.py:4, and begin another one." == finding.repair


# Programmatic dependent launch: CUDA Programming Guide, the section of that name; PTX ISA, griddepcontrol.
_EARLY, _WAITS, _TRIGGERS = LaunchFlag.PROGRAMMATIC, LaunchFlag.WAITS, LaunchFlag.TRIGGERS


def _chain(*flags: int, between: bool = False) -> Program:
    """Kernels that write one after the other what the last one reads as well, on one stream."""
    program = Program()
    a = program.stream()
    for index, flag in enumerate(flags):
        if between and index == 1:
            program.fill(a, 0x9000, 4)
        program.kernel(a, (W, 0x1000 * (index + 1), 64), (R, 0x1000, 64), name=f"k{index}", flags=flag)
    return program


@pytest.mark.parametrize(
    ("flags", "found"),
    [
        ((_TRIGGERS, _EARLY), 1),
        ((_TRIGGERS, _EARLY | _WAITS), 0),
        ((_TRIGGERS, 0), 0),
        ((0, _EARLY), 0),
        ((_TRIGGERS, _EARLY | _TRIGGERS, _EARLY), 2),  # the third begins before the first has ended, too
        ((_TRIGGERS, _EARLY | _TRIGGERS, _EARLY | _WAITS), 1),
        ((_TRIGGERS, _EARLY, 0), 1),
        ((_TRIGGERS, _EARLY | _WAITS | _TRIGGERS, _EARLY), 0),  # the second has waited before it triggers
    ],
)
def test_kernel_that_begins_early_comes_in_no_order_with_the_one_before_it(flags, found) -> None:
    program = _chain(*flags)
    report = check(program.trace())
    assert found == len(report.findings)
    assert all("cudaGridDependencySynchronize" in one.repair for one in report.findings)


def test_other_work_between_two_kernels_makes_the_second_one_wait() -> None:
    program = _chain(_TRIGGERS, _EARLY, between=True)
    assert () == check(program.trace()).findings


@pytest.mark.parametrize("how", ["synchronize", "wait", "legacy"])
def test_a_wait_for_the_stream_includes_a_kernel_that_began_early(how: str) -> None:
    program = Program()
    legacy, a, b = program.stream(flags=StreamFlag.LEGACY_DEFAULT), program.stream(flags=0), program.stream()
    program.kernel(a, (W, 0x1000, 64), flags=_TRIGGERS)
    program.synchronize(stream=a)
    program.kernel(a, (W, 0x2000, 64), flags=_TRIGGERS)
    program.kernel(a, (W, 0x3000, 64), flags=_EARLY)
    if how == "synchronize":
        program.synchronize(stream=a)
    elif how == "wait":
        program.order(a, b)
    program.kernel(legacy if how == "legacy" else b, (W, 0x3000, 64), (W, 0x2000, 64))
    assert () == check(program.trace()).findings


# Virtual memory management: one piece of memory at several addresses (cuMemMap).
_FIRST, _SECOND, _THIRD, _MAPPED = 0x100000, 0x200000, 0x300000, 0x1000


def _mapped(program: Program, address: int, elsewhere: int = 0) -> None:
    program.emit(Kind.MEM_MAP, address=address, size=_MAPPED, aux0=elsewhere)


def _unmapped(program: Program, address: int) -> None:
    program.emit(Kind.MEM_UNMAP, address=address, size=_MAPPED)


def test_all_mappings_of_a_handle_are_the_same_bytes(program: Program) -> None:
    a, b = program.stream(), program.stream()
    _mapped(program, _FIRST)
    _mapped(program, _SECOND, _FIRST)
    _mapped(program, _THIRD, _SECOND)
    program.kernel(a, (W, _SECOND + 16, 16))
    program.kernel(b, (R, _THIRD, 16))
    assert [] == kinds(program)
    program.kernel(b, (R, _THIRD + 16, 16))
    assert ["race-raw"] == kinds(program)


def test_mappings_stay_the_same_bytes_when_the_first_one_goes(program: Program) -> None:
    a, b = program.stream(), program.stream()
    _mapped(program, _FIRST)
    _mapped(program, _SECOND, _FIRST)
    _mapped(program, _THIRD, _FIRST)
    _unmapped(program, _FIRST)
    _mapped(program, _FIRST)  # other memory
    program.kernel(a, (W, _FIRST, 16), (W, _SECOND, 16))
    program.kernel(b, (W, _THIRD, 16))
    (finding,) = check(program.trace()).findings
    assert _SECOND == finding.start


def test_access_across_two_mappings_is_one_of_each(program: Program) -> None:
    a, b = program.stream(), program.stream()
    _mapped(program, _FIRST)
    _mapped(program, _SECOND)
    _mapped(program, _SECOND + _MAPPED, _FIRST)
    program.kernel(a, (W, _SECOND, 2 * _MAPPED))
    program.kernel(b, (W, _FIRST + 4, 4))
    (finding,) = check(program.trace()).findings
    assert (_FIRST + 4, 4) == (finding.start, finding.size)


def test_finding_counts_the_rows_that_both_sides_touch(program: Program) -> None:
    a, b = program.stream(), program.stream()
    program.kernel(a, (W, BUFFER, 1, 64, 16))
    program.kernel(b, (W, BUFFER + 128, 4, 64, 16))
    (finding,) = check(program.trace()).findings
    assert (BUFFER + 128, 1, 14, 64) == (finding.start, finding.size, finding.runs, finding.stride)
    assert f"14 x 1 B, 64 B apart, at 0x{BUFFER + 128:x} to 0x{BUFFER + 128 + 13 * 64:x}" == which_bytes(finding)


@pytest.mark.parametrize("again", [True, False])
def test_wait_for_an_event_that_another_stream_recorded_since_is_explained(program: Program, again: bool) -> None:
    a, b, c = program.stream(), program.stream(), program.stream()
    event = program.event()
    write(program, a)
    program.record(event, a)  # line 6
    if again:
        program.record(event, c)  # line 7
        program.wait(b, event)  # line 8
    read(program, b)
    (finding,) = check(program.trace()).findings
    said = "The wait at program.py:8 is for the record on stream 3 (program.py:7), which replaced the one on stream 1 "
    assert again is (said + "(program.py:6)." in finding.reason)


def _of_threads(program: Program) -> tuple[int, int]:
    """Make the per-thread default streams of the threads 0 and 1, and go on in the second one."""
    streams = []
    for thread in (0, 1):
        program.on_thread(thread)
        streams.append(program.stream(flags=StreamFlag.PER_THREAD_DEFAULT))
    return streams[0], streams[1]


@pytest.mark.parametrize("side", ["stream", "host"])
def test_repair_for_another_threads_default_stream_is_an_event_of_that_thread(program: Program, side: str) -> None:
    a, b = _of_threads(program)
    program.on_thread(0)
    write(program, a)
    program.on_thread(1)
    read(program, b) if side == "stream" else program.host(R, BUFFER, SIZE)
    (finding,) = check(program.trace()).findings
    assert "the per-thread default stream of thread thread 0" == finding.first.agent
    assert "in thread thread 0, record an event after kernel write (program.py:3)" in finding.repair
    assert "wait_stream" not in finding.repair
    assert "synchronize" not in finding.repair
