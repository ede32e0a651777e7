"""Memory that is freed, handed out again, or not there yet."""

from __future__ import annotations

import pytest
from sanitize_program import BUFFER, SIZE, Program, R, W, kinds

from cudatool.sanitize import Finding, check
from cudatool.trace.events import CopyFlag, Kind


def findings(program: Program) -> tuple[Finding, ...]:
    return check(program.trace()).findings


# The caching allocator ---------------------------------------------------------------------------------------------


def reuse(program: Program, *, record: bool = False, wait: str = "", delayed: bool = True) -> None:
    """A block of stream a is read on stream b, freed, and given out again for stream a."""
    a, b = program.stream(), program.stream()
    program.block(BUFFER, SIZE, a)
    program.kernel(a, (W, BUFFER, SIZE), name="produce")
    program.order(a, b)
    program.kernel(b, (R, BUFFER, SIZE), name="consume")
    if record:
        program.record_stream(BUFFER, SIZE, b)
    if wait == "before free":
        program.order(b, a)
    program.request_free(BUFFER, SIZE, a)
    program.complete_free(BUFFER, SIZE, a)
    if wait == "before alloc":
        program.order(b, a)
    program.block(BUFFER, SIZE, a)
    if wait == "before use":
        program.order(b, a)
    program.kernel(a, (W, BUFFER, SIZE), name="overwrite")


def test_block_reused_while_another_stream_reads_it_is_found(program: Program) -> None:
    reuse(program)
    (finding,) = findings(program)
    assert finding.kind.value == "reuse"
    assert (finding.first.operation, finding.second.operation) == ("kernel consume", "kernel overwrite")
    assert finding.repair == (
        "Before the block allocated at program.py:3 is freed, call `record_stream` on it for stream 2."
    )


@pytest.mark.parametrize("wait", ["before free", "before alloc", "before use"])
def test_block_reused_after_a_wait_is_clean(program: Program, wait: str) -> None:
    reuse(program, wait=wait)
    assert kinds(program) == []


def test_block_reused_after_record_stream_is_clean(program: Program) -> None:
    reuse(program, record=True)
    assert kinds(program) == []


def test_record_stream_does_not_cover_use_after_the_free_request(program: Program) -> None:
    a, b = program.stream(), program.stream()
    program.block(BUFFER, SIZE, a)
    program.record_stream(BUFFER, SIZE, b)
    program.request_free(BUFFER, SIZE, a)
    program.kernel(b, (R, BUFFER, SIZE))
    program.complete_free(BUFFER, SIZE, a)
    assert kinds(program) == ["use-after-free"]


def test_record_stream_for_one_stream_does_not_cover_another(program: Program) -> None:
    a, b, c = program.stream(), program.stream(), program.stream()
    program.block(BUFFER, SIZE, a)
    program.kernel(c, (R, BUFFER, SIZE))
    program.record_stream(BUFFER, SIZE, b)
    program.free_block(BUFFER, SIZE, a)
    program.block(BUFFER, SIZE, a)
    program.kernel(a, (W, BUFFER, SIZE))
    assert kinds(program) == ["reuse"]


def test_block_reused_on_its_own_stream_is_clean(program: Program) -> None:
    a = program.stream()
    for _ in range(3):
        program.block(BUFFER, SIZE, a)
        program.kernel(a, (W, BUFFER, SIZE))
        program.free_block(BUFFER, SIZE, a)
    assert kinds(program) == []


def test_new_owner_on_a_stream_that_does_not_wait_for_the_old_owners_stream(program: Program) -> None:
    a, b = program.stream(), program.stream()
    program.block(BUFFER, SIZE, a)
    program.kernel(a, (W, BUFFER, SIZE))
    program.free_block(BUFFER, SIZE, a)
    program.block(BUFFER, SIZE, a)
    program.kernel(b, (W, BUFFER, SIZE))
    (finding,) = findings(program)
    assert finding.kind.value == "reuse"
    assert "make stream 2 wait for stream 1" in finding.repair


def test_block_handed_out_too_early_and_not_seen_in_use_is_found(program: Program) -> None:
    a, b = program.stream(), program.stream()
    program.block(BUFFER, SIZE, a)
    program.kernel(b, (R, BUFFER, SIZE))
    program.free_block(BUFFER, SIZE, a)
    program.block(BUFFER, SIZE, a)
    (finding,) = findings(program)
    assert (finding.kind.value, finding.second.mode) == ("reuse", "allocate")


@pytest.mark.parametrize("kind", [Kind.BLOCK_ALLOC, Kind.SEGMENT_ALLOC])
def test_block_handed_out_too_early_is_found_when_its_addresses_go_on(program: Program, kind: Kind) -> None:
    a, b = program.stream(), program.stream()
    program.block(BUFFER, SIZE, a)
    program.kernel(b, (R, BUFFER, SIZE))
    program.free_block(BUFFER, SIZE, a)
    program.block(BUFFER, SIZE, a, line=50)
    program.free_block(BUFFER, SIZE, a)
    program.order(b, a)
    program.emit(kind, address=BUFFER, size=SIZE, stream=a)
    assert [finding.second.stack[0].line for finding in findings(program)] == [50]


def test_split_of_a_block_that_the_other_stream_does_not_touch_is_clean(program: Program) -> None:
    a, b = program.stream(), program.stream()
    program.block(BUFFER, SIZE, a)
    program.kernel(b, (R, BUFFER, SIZE // 2))
    program.free_block(BUFFER, SIZE, a)
    program.block(BUFFER + SIZE // 2, SIZE // 2, a)
    program.kernel(a, (W, BUFFER + SIZE // 2, SIZE // 2))
    assert kinds(program) == []


def test_block_used_after_its_free_request_is_found(program: Program) -> None:
    a = program.stream()
    program.block(BUFFER, SIZE, a)
    program.free_block(BUFFER, SIZE, a)
    program.kernel(a, (R, BUFFER + 8, 8))
    (finding,) = findings(program)
    assert (finding.kind.value, finding.first.mode, finding.repair) == ("use-after-free", "free", "")
    assert finding.reason == "The memory was already given back at program.py:3."


@pytest.mark.parametrize("block", [True, False])
def test_memory_allocated_before_the_trace_began_is_found_when_used_after_its_free(
    program: Program, block: bool
) -> None:
    a = program.stream()
    if block:
        program.free_block(BUFFER, SIZE, a)
    else:
        program.free(BUFFER, SIZE)
    program.kernel(a, (R, BUFFER, SIZE))
    assert kinds(program) == ["use-after-free"]


def test_free_of_a_block_inside_a_larger_allocation_frees_the_block_alone(program: Program) -> None:
    a = program.stream()
    program.alloc(BUFFER, 4 * SIZE)
    program.free_block(BUFFER + SIZE, SIZE, a)
    program.kernel(a, (W, BUFFER, SIZE))
    assert kinds(program) == []


def test_fresh_block_used_on_another_stream_is_clean(program: Program) -> None:
    a, b = program.stream(), program.stream()
    program.emit(Kind.SEGMENT_ALLOC, address=BUFFER, size=1 << 21, stream=a)
    program.block(BUFFER, SIZE, a)
    program.kernel(b, (W, BUFFER, SIZE))
    assert kinds(program) == []


def test_segment_given_back_to_the_driver_forgets_its_accesses(program: Program) -> None:
    a, b = program.stream(), program.stream()
    program.block(BUFFER, SIZE, a)
    program.kernel(a, (W, BUFFER, SIZE))
    program.free_block(BUFFER, SIZE, a)
    program.emit(Kind.SEGMENT_FREE, address=BUFFER, size=1 << 21, stream=a)
    program.emit(Kind.SEGMENT_ALLOC, address=BUFFER, size=1 << 21, stream=b)
    program.block(BUFFER, SIZE, b)
    program.kernel(b, (W, BUFFER, SIZE))
    assert kinds(program) == []


# cuMemAlloc and cuMemAllocAsync --------------------------------------------------------------------------------------


def test_freeing_driver_memory_waits_for_its_users(program: Program) -> None:
    a, b = program.stream(), program.stream()
    program.alloc(BUFFER, SIZE)
    program.kernel(a, (W, BUFFER, SIZE), (W, BUFFER + 4 * SIZE, SIZE))
    program.free(BUFFER, SIZE)
    program.kernel(b, (R, BUFFER + 4 * SIZE, SIZE))
    assert kinds(program) == []


def test_freeing_driver_memory_does_not_wait_for_others(program: Program) -> None:
    a, b = program.stream(), program.stream()
    program.alloc(BUFFER, SIZE)
    program.kernel(a, (W, BUFFER + 4 * SIZE, SIZE))
    program.free(BUFFER, SIZE)
    program.kernel(b, (R, BUFFER + 4 * SIZE, SIZE))
    assert kinds(program) == ["race-raw"]


def test_driver_memory_used_after_its_free_is_found(program: Program) -> None:
    a = program.stream()
    program.alloc(BUFFER, SIZE)
    program.free(BUFFER, SIZE)
    program.copy(a, BUFFER, 0x900000, 4, CopyFlag.DESTINATION_DEVICE | CopyFlag.ASYNC)
    assert kinds(program) == ["use-after-free"]


def test_addresses_allocated_again_are_alive(program: Program) -> None:
    a, b = program.stream(), program.stream()
    for stream in (a, b):
        program.alloc(BUFFER, SIZE)
        program.kernel(stream, (W, BUFFER, SIZE))
        program.free(BUFFER, SIZE)
    assert kinds(program) == []


def test_stream_ordered_memory_used_in_order_is_clean(program: Program) -> None:
    a, b = program.stream(), program.stream()
    program.alloc(BUFFER, SIZE, a)
    program.order(a, b)
    program.kernel(b, (W, BUFFER, SIZE))
    program.order(b, a)
    program.free(BUFFER, SIZE, a)
    assert kinds(program) == []


@pytest.mark.parametrize("ordered", [False, True])
def test_a_free_that_may_come_before_the_allocation_is_found(program: Program, ordered: bool) -> None:
    a, b = program.stream(), program.stream()
    program.alloc(BUFFER, SIZE, a)
    if ordered:
        program.order(a, b)
    program.free(BUFFER, SIZE, b)
    found = [(one.kind.value, one.first.mode, one.second.mode, bool(one.repair)) for one in findings(program)]
    assert found == ([] if ordered else [("use-before-alloc", "allocate", "free", True)])


def test_use_before_the_stream_ordered_allocation_is_found(program: Program) -> None:
    a, b = program.stream(), program.stream()
    program.alloc(BUFFER, SIZE, a)
    program.kernel(b, (W, BUFFER, SIZE))
    (finding,) = findings(program)
    assert (finding.kind.value, finding.first.mode) == ("use-before-alloc", "allocate")
    assert "make stream 2 wait for stream 1" in finding.repair


def test_host_synchronization_makes_a_stream_ordered_allocation_usable_everywhere(program: Program) -> None:
    a, b = program.stream(), program.stream()
    program.alloc(BUFFER, SIZE, a)
    program.synchronize(stream=a)
    program.kernel(b, (W, BUFFER, SIZE))
    assert kinds(program) == []


def test_stream_ordered_free_that_another_streams_use_may_outlive_is_found(program: Program) -> None:
    a, b = program.stream(), program.stream()
    program.alloc(BUFFER, SIZE, a)
    program.order(a, b)
    program.kernel(b, (R, BUFFER, SIZE))
    program.free(BUFFER, SIZE, a)
    (finding,) = findings(program)
    assert (finding.kind.value, finding.first.mode, finding.second.mode) == ("use-after-free", "read", "free")
    assert "make stream 1 wait for stream 2" in finding.repair


def test_use_after_a_stream_ordered_free_is_found_even_on_the_same_stream(program: Program) -> None:
    a = program.stream()
    program.alloc(BUFFER, SIZE, a)
    program.free(BUFFER, SIZE, a)
    program.kernel(a, (R, BUFFER, SIZE))
    assert kinds(program) == ["use-after-free"]


def test_plain_free_of_stream_ordered_memory_does_not_wait(program: Program) -> None:
    a = program.stream()
    program.alloc(BUFFER, SIZE, a)
    program.kernel(a, (W, BUFFER, SIZE))
    program.free(BUFFER, SIZE)
    assert kinds(program) == ["use-after-free"]


def test_plain_free_of_stream_ordered_memory_after_synchronize_is_clean(program: Program) -> None:
    a = program.stream()
    program.alloc(BUFFER, SIZE, a)
    program.kernel(a, (W, BUFFER, SIZE))
    program.synchronize(stream=a)
    program.free(BUFFER, SIZE)
    assert kinds(program) == []


def test_pinned_addresses_freed_and_allocated_again_start_afresh(program: Program) -> None:
    a = program.stream()
    program.emit(Kind.HOST_ALLOC, address=BUFFER, size=SIZE)
    program.copy(a, BUFFER, 0x900000, SIZE, CopyFlag.SOURCE_DEVICE | CopyFlag.ASYNC)
    program.emit(Kind.HOST_FREE, address=BUFFER)
    program.emit(Kind.HOST_ALLOC, address=BUFFER, size=SIZE)
    program.host(W, BUFFER, SIZE)
    assert kinds(program) == []
