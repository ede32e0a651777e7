"""From what a kernel may access to what one launch may access."""

from __future__ import annotations

import struct

import pytest

from cudatool.ptx import AccessDoubt, AccessRange, Mode, PtxError, accesses_of_launch, infer_accesses, parse

R, W, A = Mode.READ, Mode.WRITE, Mode.ATOMIC
HIGH = 1 << 40
BLOCKS = ((HIGH + 0x7000, 0x1000), (HIGH + 0x9000, 0x200), (HIGH + 0xA000, 0x80))


def find(address: int) -> tuple[int, int] | None:
    return next((block for block in BLOCKS if block[0] <= address < block[0] + block[1]), None)


def launch(params: str, body: str, *values: int, before: str = ""):
    registers = ".reg .b64 %d<9>; .reg .b32 %r<9>; .reg .pred %p;"
    text = f".version 8.3\n.target sm_90\n.address_size 64\n{before}.visible .entry k({params}) {{ {registers} {body} ret; }}"
    return accesses_of_launch(infer_accesses(parse(text), "k"), struct.pack(f"<{len(values)}Q", *values), find)


PQ = ".param .u64 p, .param .u64 q"
LOAD = "ld.param.u64 %d1, [p]; ld.param.u64 %d2, [q];"
COPY = LOAD + "ld.global.u32 %r1, [%d1]; st.global.u32 [%d2], %r1;"


def test_whole_allocations_by_address():
    found = launch(PQ, COPY, HIGH + 0x9010, HIGH + 0x7FFF)
    assert (AccessRange(HIGH + 0x7000, 0x1000, W), AccessRange(HIGH + 0x9000, 0x200, R)) == found.ranges
    assert (False, frozenset()) == (found.unknown, found.doubts)


def test_two_arguments_in_one_allocation():
    assert (AccessRange(HIGH + 0x7000, 0x1000, R | W),) == launch(PQ, COPY, HIGH + 0x7000, HIGH + 0x7800).ranges


@pytest.mark.parametrize("number", [0, 1000, 0xFFFFFFFF])
def test_numbers_are_not_accessed(number):
    found = launch(PQ, COPY, HIGH + 0x9000, number)
    assert ((AccessRange(HIGH + 0x9000, 0x200, R),), False) == (found.ranges, found.unknown)


def test_pointer_to_no_known_allocation_makes_the_launch_unknown():
    found = launch(PQ, COPY, HIGH + 0x9000, HIGH + 0x8000)
    assert (AccessRange(HIGH + 0x9000, 0x200, R),) == found.ranges
    assert (True, frozenset({AccessDoubt.UNKNOWN_ADDRESS})) == (found.unknown, found.doubts)


def test_index_that_could_be_a_pointer_is_settled_by_its_value():
    body = LOAD + "add.s64 %d3, %d1, %d2; st.global.u8 [%d3], 0;"
    for pair in ((HIGH + 0x9000, 24), (24, HIGH + 0x9000)):
        found = launch(PQ, body, *pair)
        assert ((AccessRange(HIGH + 0x9000, 0x200, W),), False) == (found.ranges, found.unknown)
    assert launch(PQ, body, HIGH, 32).unknown


def test_choice_of_two_needs_both():
    body = LOAD + "setp.eq.u64 %p, %d1, 0; selp.b64 %d3, %d1, %d2, %p; st.global.u8 [%d3], 0;"
    assert [HIGH + 0x9000, HIGH + 0xA000] == [
        one.address for one in launch(PQ, body, HIGH + 0xA000, HIGH + 0x9000).ranges
    ]
    half = launch(PQ, body, HIGH + 0x9000, HIGH + 0x8000)
    assert ([HIGH + 0x9000], True) == ([one.address for one in half.ranges], half.unknown)


def test_pointer_read_from_memory_is_not_followed():
    found = launch(PQ, LOAD + "ld.global.u64 %d3, [%d1]; st.global.u8 [%d3], 0;", HIGH + 0x9000, HIGH + 0x7000)
    assert (AccessRange(HIGH + 0x9000, 0x200, R),) == found.ranges
    assert frozenset({AccessDoubt.LOADED_POINTER}) == found.doubts


def test_offset_read_from_memory_is_settled_by_the_pointer():
    found = launch(
        PQ,
        LOAD + "ld.global.u64 %d3, [%d1]; add.s64 %d4, %d2, %d3; st.global.u8 [%d4], 0;",
        HIGH + 0x9000,
        HIGH + 0x7000,
    )
    assert (AccessRange(HIGH + 0x7000, 0x1000, W), AccessRange(HIGH + 0x9000, 0x200, R)) == found.ranges
    assert not found.unknown


def test_fields_of_a_struct():
    body = """ld.param.u64 %d1, [s+16]; st.global.u8 [%d1], 0; mov.b64 %d2, t; ld.param.u32 %r1, [n];
        mad.wide.u32 %d3, %r1, 8, %d2; ld.param.u64 %d4, [%d3]; ld.global.u8 %r2, [%d4];"""
    params = ".param .u32 n, .param .align 8 .b8 s[24], .param .align 8 .b8 t[16]"
    found = launch(params, body, 1, 0, 0, HIGH + 0x7000, HIGH + 0x9000, HIGH + 0xA000)
    assert (
        AccessRange(HIGH + 0x7000, 0x1000, W),
        AccessRange(HIGH + 0x9000, 0x200, R),
        AccessRange(HIGH + 0xA000, 0x80, R),
    ) == found.ranges
    assert not found.unknown


def test_variables_are_named():
    found = launch("", "red.global.add.u32 [counter], 1;", before=".global .u32 counter;")
    assert ((), (("counter", A),), False) == (found.ranges, found.variables, found.unknown)


def test_doubts_about_the_code_remain():
    body = LOAD + "{ .param .b64 a; st.param.b64 [a], %d1; call elsewhere, (a); }"
    found = launch(PQ, body, HIGH + 0x9000, 0, before=".extern .func elsewhere(.param .b64 a);")
    assert frozenset({AccessDoubt.EXTERNAL_CALL}) == found.doubts
    assert launch(PQ, "ld.global.u8 %r1, [%d7];", 0, 0).doubts == {AccessDoubt.UNKNOWN_ADDRESS}


def test_too_few_argument_bytes():
    with pytest.raises(PtxError, match="takes 16 bytes of arguments, 8 given"):
        launch(PQ, COPY, HIGH + 0x9000)
