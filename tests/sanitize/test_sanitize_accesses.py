"""Which bytes an operation touches, and when two such sets collide."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sanitize_program import ATOMIC, Program, R, W

from cudatool.sanitize import Gap, GapKind, Outcome, check
from cudatool.sanitize.engine import Engine
from cudatool.sanitize.intervals import WRITE, Access, History, Operation, overlap
from cudatool.trace.events import AccessFlag, CopyFlag, Kind

BUFFER = 0x10000


def count(program: Program) -> int:
    return len(check(program.trace()).findings)


@pytest.mark.parametrize(
    ("first", "second", "races"),
    [
        ((W, BUFFER, 512), (W, BUFFER + 512, 512), False),  # disjoint halves
        ((W, BUFFER, 513), (W, BUFFER + 512, 512), True),  # one byte
        ((W, BUFFER + 512, 512), (W, BUFFER, 512), False),
        ((W, BUFFER + 511, 512), (W, BUFFER, 512), True),
        ((W, BUFFER, 1024), (R, BUFFER + 1000, 1), True),
        ((ATOMIC, BUFFER, 4), (ATOMIC, BUFFER, 4), False),
        ((ATOMIC, BUFFER, 4), (R, BUFFER, 4), True),
        ((ATOMIC, BUFFER, 4), (W, BUFFER, 4), True),
        ((R, BUFFER, 4), (ATOMIC, BUFFER, 4), True),
        ((W, BUFFER, 4), (ATOMIC, BUFFER, 4), True),
        ((W, BUFFER, 0), (W, BUFFER, 4), False),
        ((W, BUFFER, 16, 64, 8), (W, BUFFER + 16, 16, 64, 8), False),  # neighbouring columns of a matrix
        ((W, BUFFER, 17, 64, 8), (W, BUFFER + 16, 16, 64, 8), True),
        ((W, BUFFER, 16, 64, 8), (W, BUFFER + 7 * 64 + 15, 1), True),
        ((W, BUFFER, 16, 64, 8), (W, BUFFER + 7 * 64 + 16, 1000), False),
        ((W, BUFFER, 16, 64, 8), (W, BUFFER + 8, 8, 48, 8), True),
        ((W, BUFFER + 7 * 64, 16, -64, 8), (W, BUFFER, 1), True),  # rows in descending order
        ((W, BUFFER, 16, 16, 8), (W, BUFFER + 127, 1), True),
    ],
)
def test_two_streams_race_exactly_where_their_bytes_meet(
    first: tuple[int, ...], second: tuple[int, ...], races: bool
) -> None:
    program = Program()
    program.kernel(program.stream(), first)
    program.kernel(program.stream(), second)
    assert count(program) == int(races)


def masked(program: Program, stream: int, *masks: tuple[int, int, int]) -> None:
    """A kernel that writes elements of 4 bytes: (address, the first 64 bits, 64 more)."""
    program.kernel(stream)
    for address, low, high in masks:
        program.access(W | AccessFlag.MASK, address, 4, low, high)


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ((0x5555, 0), (0xAAAA, 0), None),  # even and odd elements
        ((0x5555, 0), (0xAAAB, 0), (BUFFER, 4)),
        ((0, 1 << 63), (0, 1 << 63), (BUFFER + 4 * 127, 4)),
        ((0b11100, 0), (0b01110, 0), (BUFFER + 8, 8)),
    ],
)
def test_masks_race_where_they_share_a_bit(
    first: tuple[int, int], second: tuple[int, int], expected: tuple[int, int] | None
) -> None:
    program = Program()
    masked(program, program.stream(), (BUFFER, *first))
    masked(program, program.stream(), (BUFFER, *second))
    found = [(finding.start, finding.size) for finding in check(program.trace()).findings]
    assert found == ([expected] if expected else [])


def test_masks_that_follow_each_other_are_one_access() -> None:
    program = Program()
    masked(program, program.stream(), *((BUFFER + 512 * i, 0x5555, 1) for i in range(20)))
    engine = Engine(program.trace())
    engine.run()
    assert len(engine.history) == 1
    program.kernel(program.stream(), (W, BUFFER + 512 * 19 + 256, 1))
    assert count(program) == 1
    program = Program()
    masked(program, program.stream(), *((BUFFER + 512 * i, 0x5555, 1) for i in range(20)))
    program.kernel(program.stream(), (W, BUFFER + 512 * 19 + 260, 100))
    assert count(program) == 0


def test_finding_names_the_overlapping_bytes() -> None:
    program = Program()
    program.kernel(program.stream(), (W, BUFFER, 513))
    program.kernel(program.stream(), (W, BUFFER + 512, 512))
    (finding,) = check(program.trace()).findings
    assert (finding.start, finding.size) == (BUFFER + 512, 1)


def test_accesses_may_come_later_in_the_file_than_their_operation() -> None:
    program = Program()
    a, b = program.stream(), program.stream()
    program.emit(Kind.KERNEL_LAUNCH, stream=a, correlation=7, name="k")
    program.emit(Kind.KERNEL_LAUNCH, stream=b, correlation=8, name="k")
    program.synchronize(device=0)
    for correlation in (7, 8):
        program.emit(Kind.ACCESS, correlation=correlation, flags=W, address=BUFFER, size=4)
    report = check(program.trace())
    assert [finding.kind.value for finding in report.findings] == ["race-waw"]
    assert (report.operations, report.unchecked_launches) == (2, 0)


def test_accesses_without_a_correlation_belong_to_no_operation() -> None:
    program = Program()
    for stream in (program.stream(), program.stream()):
        program.emit(Kind.KERNEL_LAUNCH, stream=stream, name="k")
    program.emit(Kind.ACCESS, flags=W, address=BUFFER, size=4)
    report = check(program.trace())
    assert (report.findings, report.unchecked_launches) == ((), 2)


def test_launch_without_access_records_is_counted_as_unchecked() -> None:
    program = Program()
    program.kernel(program.stream())
    report = check(program.trace())
    assert (report.findings, report.unchecked_launches) == ((), 1)
    assert (report.gaps, report.outcome) == ((Gap(GapKind.LAUNCHES, 1, ("k",), whole=True),), Outcome.NOT_CHECKED)


@pytest.mark.parametrize(("measured", "unchecked"), [(True, 0), (False, 1)])
def test_executed_launch_that_touched_nothing_is_checked_if_accesses_were_measured(
    measured: bool, unchecked: int
) -> None:
    program = Program()
    program.header["accesses"] = measured
    program.kernel(program.stream())
    program.emit(Kind.EXECUTION, stream=1, correlation=1)
    assert check(program.trace()).unchecked_launches == unchecked


def test_executed_copy_touches_its_own_range_even_if_accesses_were_measured() -> None:
    program = Program()
    program.header["accesses"] = True
    a, b = program.stream(), program.stream()
    program.fill(a, BUFFER, 64)
    program.fill(b, BUFFER, 64)
    program.emit(Kind.EXECUTION, stream=a, correlation=1)
    program.emit(Kind.EXECUTION, stream=b, correlation=2)
    assert count(program) == 1


def test_launch_said_to_touch_nothing_is_checked() -> None:
    program = Program()
    program.kernel(program.stream(), (R, BUFFER, 0))
    assert check(program.trace()).unchecked_launches == 0


def test_access_records_of_a_copy_replace_its_own_range() -> None:
    program = Program()
    a, b = program.stream(), program.stream()
    program.fill(a, BUFFER, 64)
    program.emit(Kind.ACCESS, correlation=1, flags=W, address=BUFFER, size=4, aux0=16, aux1=4)
    program.kernel(b, (W, BUFFER + 4, 4))
    assert count(program) == 0


@pytest.mark.parametrize("pageable", [True, False])
def test_pageable_side_of_a_copy_is_ignored_even_if_the_trace_tells_it(pageable: bool) -> None:
    program = Program()
    a, b = program.stream(), program.stream()
    host, flags = 0x900000, CopyFlag.SOURCE_PAGEABLE if pageable else CopyFlag(0)
    program.copy(a, BUFFER, host, 64, CopyFlag.DESTINATION_DEVICE | CopyFlag.ASYNC | flags)
    program.emit(Kind.ACCESS, correlation=1, flags=R, address=host, size=64)
    program.emit(Kind.ACCESS, correlation=1, flags=W, address=BUFFER, size=64)
    program.copy(b, host, BUFFER + 64, 64, CopyFlag.SOURCE_DEVICE | CopyFlag.ASYNC)
    assert count(program) == int(not pageable)


def test_second_record_of_one_correlation_neither_repeats_nor_lacks_its_accesses() -> None:
    program = Program()
    a, b = program.stream(), program.stream()
    program.kernel(a, (W, BUFFER, 4))
    program.emit(Kind.KERNEL_LAUNCH, stream=b, correlation=1, name="second half")
    report = check(program.trace())
    assert (report.findings, report.unchecked_launches, report.operations) == ((), 0, 2)


def test_conservative_range_gives_a_possible_finding_only() -> None:
    program = Program()
    a, b = program.stream(), program.stream()
    program.kernel(a, (W | AccessFlag.INEXACT, BUFFER, 64))
    program.kernel(b, (W, BUFFER, 4))
    report = check(program.trace())
    assert report.findings == ()
    assert [finding.first.exact for finding in report.possible] == [False]


def test_possible_finding_does_not_hide_a_certain_one() -> None:
    program = Program()
    a, b = program.stream(), program.stream()
    program.kernel(a, (W, BUFFER, 64))
    program.kernel(a, (W | AccessFlag.INEXACT, BUFFER + 64, 64))
    program.kernel(b, (R, BUFFER + 64, 4))
    program.kernel(b, (R, BUFFER, 4))
    report = check(program.trace())
    assert (len(report.findings), len(report.possible)) == (1, 1)


def test_pair_that_meets_in_two_places_counts_once() -> None:
    program = Program()
    a, b = program.stream(), program.stream()
    program.kernel(a, (W, BUFFER, 64))
    program.kernel(a, (R, BUFFER, 32))
    program.kernel(b, (W, BUFFER, 64))
    engine = Engine(program.trace())
    engine.run()
    assert [defect.count for defect in engine.defects.values()] == [1, 1]


def test_finding_names_the_latest_of_several_accesses_that_one_wait_would_order() -> None:
    program = Program()
    a, b = program.stream(), program.stream()
    program.kernel(a, (W, BUFFER, 64), name="first")
    program.kernel(a, (R, BUFFER, 64), name="last")
    program.kernel(b, (W, BUFFER, 64))
    assert [finding.first.operation for finding in check(program.trace()).findings] == ["kernel last"]


def test_conservative_write_does_not_hide_the_exact_one_before_it() -> None:
    program = Program()
    a, b = program.stream(), program.stream()
    program.kernel(a, (W, BUFFER, 4))
    program.kernel(a, (W | AccessFlag.INEXACT, BUFFER, 64))
    program.kernel(b, (W, BUFFER, 4))
    assert count(program) == 1


def test_racing_read_of_another_stream_is_remembered_beside_later_reads() -> None:
    program = Program()
    a, b, c = program.stream(), program.stream(), program.stream()
    program.kernel(a, (R, BUFFER, 64))
    program.kernel(b, (R, BUFFER, 64))
    program.order(b, c)
    program.kernel(c, (W, BUFFER, 4))
    (finding,) = check(program.trace()).findings
    assert (finding.kind.value, finding.first.agent) == ("race-war", "stream 1")


def test_engine_forgets_the_accesses_of_freed_memory() -> None:
    program = Program()
    a = program.stream()
    program.alloc(BUFFER, 64)
    program.kernel(a, (W, BUFFER, 64), (W, BUFFER + 64, 64))
    program.free(BUFFER, 64)
    program.emit(Kind.SEGMENT_FREE, address=BUFFER + 64, size=64)
    engine = Engine(program.trace())
    engine.run()
    assert len(engine.history) == 0


def access(start: int, stop: int, row: int = 0, stride: int = 0, *, agent: int = 0, epoch: int = 1) -> Access:
    return Access(start, stop, WRITE, row, stride, operation=Operation(agent, epoch, (0, 0), 0))


def never(old: Access, new: Access, found: tuple[int, int]) -> None:
    raise AssertionError("no conflict was expected")


def test_history_of_one_stream_stays_as_small_as_its_buffers() -> None:
    history = History()
    for epoch in range(1, 100):
        for buffer in range(10):
            history.touch(access(buffer * 100, buffer * 100 + 100, epoch=epoch), never)
    assert len(history) == 10
    assert len(list(history.within(0, 1000))) == 10


def test_write_of_a_whole_buffer_folds_its_pieces() -> None:
    history = History()
    for start in range(0, 1000, 10):
        history.touch(access(start, start + 10), never)
    assert len(history) == 100
    history.touch(access(0, 1000, epoch=2), never)
    assert len(history) == 1


def test_forgetting_the_middle_keeps_both_ends() -> None:
    history = History()
    history.touch(access(0, 100), never)
    history.forget(40, 60)
    assert [len(list(history.within(*span))) for span in ((0, 40), (40, 60), (60, 100), (39, 41))] == [1, 0, 1, 1]


@st.composite
def byte_sets(draw: st.DrawFn) -> Access:
    start, row = draw(st.integers(0, 60)), draw(st.integers(1, 8))
    rows = draw(st.integers(0, 6))
    if rows == 0:
        mask = draw(st.integers(0, 2**12)) * 2 + 1
        masked = access(start, start + mask.bit_length() * row, row)
        masked.mask = mask
        return masked
    if rows == 1:
        return access(start, start + row)
    stride = draw(st.integers(row + 1, row + 8))
    return access(start, start + stride * (rows - 1) + row, row, stride)


def bytes_of(item: Access) -> set[int]:
    if item.mask:
        elements = [item.start + i * item.row for i in range(item.mask.bit_length()) if item.mask >> i & 1]
        return {b for element in elements for b in range(element, element + item.row)}
    if not item.stride:
        return set(range(item.start, item.stop))
    return {b for row in range(item.start, item.stop, item.stride) for b in range(row, row + item.row)}


@settings(deadline=None)
@given(byte_sets(), byte_sets())
def test_overlap_is_that_of_the_byte_sets(first: Access, second: Access) -> None:
    common = bytes_of(first) & bytes_of(second)
    found = overlap(first, second)
    assert (found is None) == (not common)
    if found is not None:
        assert set(range(found[0], found[0] + found[1])) <= common
        assert found[0] == min(common)
