"""What the device's checkers saw, explained by the allocations of the trace."""

from __future__ import annotations

import json

import pytest
from sanitize_program import Program

from cudatool.sanitize import check
from cudatool.trace.events import Kind

SAID = {"check": "memcheck", "kind": "out-of-bounds", "text": "", "space": "global", "mode": "read", "kernel": "late"}


def test_memory_freed_after_the_launch_and_before_it_ran_is_used_after_its_free() -> None:
    program = Program()
    stream = program.stream()
    program.block(0x10000, 1024, stream)
    program.kernel(stream, name="late")
    program.request_free(0x10000, 1024, stream)
    freed_at = len(program)
    program.complete_free(0x10000, 1024, stream)
    program.emit(Kind.FINDING, correlation=1, address=0x10010, size=4, aux0=1, name=json.dumps(SAID), stream=stream)
    (found,) = check(program.trace()).on_device
    assert "use-after-free" == found.kind
    assert f"16 bytes into memory freed at program.py:{freed_at} before this ran" == found.text


@pytest.mark.parametrize("moved", [0, 40])
def test_two_defects_of_one_launch_have_their_names_whichever_is_met_first(moved: int) -> None:
    names = []
    for lines in ((7, 12), (12, 7)):
        program = Program()
        stream = program.stream()
        program.kernel(stream, name="late")
        for line in lines:
            said = json.dumps({**SAID, "source": ["k.cu", line + moved]})
            program.emit(Kind.FINDING, correlation=1, address=0x10, size=4, aux0=1, name=said, stream=stream)
        found = check(program.trace()).on_device
        names.append({one.source.line - moved: one.fingerprint for one in found if one.source is not None})
    assert names[0] == names[1]
    assert [7, 12] == sorted(names[0], key=names[0].__getitem__)  # the second has an ordinal


@pytest.mark.parametrize(
    ("address", "text"),
    [(0x10400, "0 bytes after the end of 1 KiB"), (0x10401, "1 byte after the end of 1 KiB")],
)
def test_how_far_an_access_is_from_memory_is_said_in_bytes(address: int, text: str) -> None:
    program = Program()
    stream = program.stream()
    program.block(0x10000, 1024, stream)
    program.kernel(stream, name="late")
    program.emit(Kind.FINDING, correlation=1, address=address, size=1, aux0=1, name=json.dumps(SAID), stream=stream)
    (found,) = check(program.trace()).on_device
    assert text == found.text


def test_access_across_the_end_of_memory_that_is_freed_later_is_out_of_bounds() -> None:
    program = Program()
    stream = program.stream()
    program.block(0x10000, 1024, stream)
    program.kernel(stream, name="late")
    said = json.dumps({**SAID, "usable": 8})  # of 16 bytes: the memory was there when the kernel ran
    program.emit(Kind.FINDING, correlation=1, address=0x103F8, size=16, aux0=1, name=said, stream=stream)
    program.request_free(0x10000, 1024, stream)
    program.complete_free(0x10000, 1024, stream)
    (found,) = check(program.trace()).on_device
    assert ("out-of-bounds", "across the end of 1 KiB") == (found.kind, found.text)


def test_a_kernel_that_a_gpu_says_has_failed_is_one_that_no_wait_has_ended() -> None:
    said = json.dumps({"check": "memcheck", "kind": "kernel-error", "text": "cuStreamSynchronize returned it"})
    for failed, operation, is_launch in (
        ((), "", False),
        (("bad",), "kernel bad", True),
        (("bad", "bad"), "one of 2 launches of bad", False),
        (tuple("abcde"), "one of 5 launches of a, b, c and 2 more", False),
    ):
        program = Program()
        first, second, third = (program.stream() for _ in range(3))
        program.kernel(third, name="earlier")
        program.synchronize()
        program.kernel(first, name="done")
        program.synchronize(stream=first)
        program.synchronize(device=1)  # another device
        for name in failed:
            program.kernel(second, name=name)
        launched_at = len(program)
        program.emit(Kind.FINDING, name=said, aux0=1, line=99)
        (found,) = check(program.trace()).on_device
        assert ("kernel-error", operation) == (found.kind, found.operation)
        assert (launched_at if is_launch else 99) == found.stack[0].line
