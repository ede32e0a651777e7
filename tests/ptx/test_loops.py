"""Loops whose rounds a launch bounds: how many there are, and what is known of the registers that they change."""

from __future__ import annotations

import struct

import pytest

from cudatool.ptx import parse
from cudatool.ptx.affine import AffineAddresses
from cudatool.ptx.loops import Loops

A = 1 << 32


def addresses(body: str) -> AffineAddresses:
    text = f""".version 7.8
.target sm_80
.address_size 64
.visible .entry k(.param .u64 p, .param .s32 n) {{
.reg .pred %p<9>; .reg .b32 %r<19>; .reg .b64 %d<19>;
ld.param.u64 %d0, [p]; ld.param.s32 %r0, [n]; mov.u32 %r1, %tid.x;
{body}
ret; }}"""
    function = parse(text).kernel("k")
    return AffineAddresses(function, {"p": 0, "n": 8})


def reach(body: str, n: int, threads: int = 4) -> tuple[int, int] | None:
    """Return how far from `p` the one access of a kernel lies at least and at most; None if that is not known."""
    known = addresses(body)
    (form,) = known.forms(struct.pack("<Qi", A, n), (1, 1, 1), (threads, 1, 1), lambda symbol: None).forms
    return None if form is None else (form.low - A, form.high - A)


def loop(first: str, step: str, condition: str, after: str = "") -> str:
    """Return a loop of %r2 that accesses the element of that index; `condition` sets %p1 for another round."""
    return f"""{first} LOOP:
mul.wide.s32 %d1, %r2, 4; add.s64 %d2, %d0, %d1; ld.global.u32 %r9, [%d2]; {step} {condition} @%p1 bra LOOP; {after}"""


UP = "add.s32 %r2, %r2, 1;"


@pytest.mark.parametrize(
    ("first", "step", "condition", "n", "expected"),
    [
        ("mov.b32 %r2, 0;", UP, "setp.lt.s32 %p1, %r2, %r0;", 10, (0, 9)),
        ("mov.b32 %r2, 0;", UP, "setp.lt.s32 %p1, %r2, %r0;", -5, (0, 0)),  # one round in any case
        ("mov.b32 %r2, 3;", UP, "setp.le.s32 %p1, %r2, %r0;", 10, (3, 10)),
        ("mov.b32 %r2, 0;", UP, "setp.gt.s32 %p1, %r0, %r2;", 10, (0, 9)),
        ("mov.b32 %r2, 0;", UP, "setp.ne.s32 %p1, %r2, %r0;", 10, (0, 9)),
        ("mov.b32 %r2, 0;", "add.s32 %r2, %r2, 3;", "setp.lt.s32 %p1, %r2, %r0;", 10, (0, 9)),
        ("mov.b32 %r2, 0;", "add.s32 %r2, %r2, 3;", "setp.lt.s32 %p1, %r2, %r0;", 11, (0, 9)),
        ("mov.b32 %r2, 0;", "add.s32 %r2, %r2, 3;", "setp.ne.s32 %p1, %r2, %r0;", 9, (0, 6)),
        ("mov.b32 %r2, %r0;", "sub.s32 %r2, %r2, 1;", "setp.ge.s32 %p1, %r2, 0;", 10, (0, 10)),
        ("mov.b32 %r2, %r0;", "add.s32 %r2, %r2, -2;", "setp.gt.s32 %p1, %r2, 0;", 10, (2, 10)),
        ("mov.b32 %r2, %r1;", "add.s32 %r2, %r2, 4;", "setp.lt.s32 %p1, %r2, %r0;", 9, (0, 8)),
        ("mov.b32 %r2, 0;", "add.s32 %r3, %r2, 1; mov.b32 %r2, %r3;", "setp.lt.s32 %p1, %r3, %r0;", 10, (0, 9)),
        ("mov.b32 %r2, 0;", UP, "setp.ge.s32 %p0, %r2, %r0; not.pred %p1, %p0;", 10, None),  # not followed
        ("mov.b32 %r2, 0;", "add.s32 %r2, %r2, 3;", "setp.ne.s32 %p1, %r2, %r0;", 10, None),  # steps over its limit
        ("mov.b32 %r2, 5;", UP, "setp.ne.s32 %p1, %r2, %r0;", 5, None),  # first after a round, so all integers
        ("mov.b32 %r2, 0;", "add.s32 %r2, %r2, 2;", "setp.lt.s32 %p1, %r2, %r0;", 2**31 - 1, None),  # wraps around
        ("mov.b32 %r2, 0;", "add.s32 %r2, %r2, -1;", "setp.lt.s32 %p1, %r2, %r0;", 10, None),  # the other way
        ("mov.b32 %r2, 0;", "add.s32 %r2, %r2, %r1;", "setp.lt.s32 %p1, %r2, %r0;", 10, None),  # threads differ
        ("mov.b32 %r2, 0;", "@%p2 add.s32 %r2, %r2, 1;", "setp.lt.s32 %p1, %r2, %r0;", 10, None),
        ("mov.b32 %r2, 0;", f"{UP} {UP}", "setp.lt.s32 %p1, %r2, %r0;", 10, None),
    ],
)
def test_where_a_loop_reaches(first, step, condition, n, expected):
    found = reach(loop(first, step, condition), n)
    assert expected == (found if found is None else (found[0] // 4, found[1] // 4))


def test_what_is_read_after_the_step_is_a_round_ahead():
    body = """mov.b32 %r2, 0; LOOP: add.s32 %r2, %r2, 1;
mul.wide.s32 %d1, %r2, 4; add.s64 %d2, %d0, %d1; ld.global.u32 %r9, [%d2];
setp.lt.s32 %p1, %r2, %r0; @%p1 bra LOOP;"""
    assert (4, 40) == reach(body, 10)


def test_a_pointer_that_a_loop_moves_reaches_as_far_as_its_counter_lets_it():
    body = """mov.b64 %d2, %d0; mov.b32 %r2, 0; LOOP: ld.global.u32 %r9, [%d2]; add.s64 %d2, %d2, 16;
add.s32 %r2, %r2, 1; setp.lt.s32 %p1, %r2, %r0; @%p1 bra LOOP;"""
    assert (0, 144) == reach(body, 10)


def test_a_loop_in_a_loop_reaches_as_far_as_both_let_it():
    body = """mov.b32 %r3, 0; OUTER: mul.lo.s32 %r2, %r3, 100; mov.b32 %r4, 0;
LOOP: add.s32 %r5, %r2, %r4; mul.wide.s32 %d1, %r5, 4; add.s64 %d2, %d0, %d1; ld.global.u32 %r9, [%d2];
add.s32 %r4, %r4, 1; setp.lt.s32 %p1, %r4, %r0; @%p1 bra LOOP;
add.s32 %r3, %r3, 1; setp.lt.s32 %p2, %r3, 3; @%p2 bra OUTER;"""
    assert (0, 4 * 209) == reach(body, 10)


@pytest.mark.parametrize(
    "body",
    [
        # The counter goes on from where it was when the loop is entered again.
        """mov.b32 %r2, 0; mov.b32 %r3, 0; OUTER: LOOP: mul.wide.s32 %d1, %r2, 4; add.s64 %d2, %d0, %d1;
ld.global.u32 %r9, [%d2]; add.s32 %r2, %r2, 1; setp.lt.s32 %p1, %r9, %r0; @%p1 bra LOOP;
add.s32 %r3, %r3, 1; setp.lt.s32 %p2, %r3, 3; @%p2 bra OUTER;""",
        """mov.b32 %r2, 0; mov.b32 %r3, 0; OUTER: mov.b32 %r9, 0; LOOP: mul.wide.s32 %d1, %r2, 4; add.s64 %d2, %d0, %d1;
ld.global.u32 %r9, [%d2]; add.s32 %r2, %r2, 1; setp.lt.s32 %p1, %r2, %r0; @%p1 bra LOOP;
add.s32 %r3, %r3, 1; setp.lt.s32 %p2, %r3, 3; @%p2 bra OUTER;""",
        # What a round computed is read after the loop.
        loop("mov.b32 %r2, 0;", UP, "setp.lt.s32 %p1, %r2, %r0;").replace("ld.global.u32 %r9, [%d2];", "")
        + "ld.global.u32 %r9, [%d2];",
        loop("mov.b32 %r2, 0;", UP, "setp.lt.s32 %p1, %r2, %r0;").replace("ld.global.u32 %r9, [%d2];", "")
        + "mul.wide.s32 %d3, %r2, 4; add.s64 %d4, %d0, %d3; ld.global.u32 %r9, [%d4];",
    ],
)
def test_where_the_round_is_not_certain_nothing_is_said(body):
    assert reach(body, 10) is None


def test_a_branch_in_the_loop_bounds_the_access():
    body = """mov.b32 %r2, 0; LOOP: setp.ge.s32 %p2, %r2, 5; @%p2 bra SKIP;
mul.wide.s32 %d1, %r2, 4; add.s64 %d2, %d0, %d1; ld.global.u32 %r9, [%d2];
SKIP: add.s32 %r2, %r2, 1; setp.lt.s32 %p1, %r2, %r0; @%p1 bra LOOP;"""
    assert (0, 16) == reach(body, 10)


def test_code_without_loops_keeps_its_names():
    function = addresses("ld.global.u32 %r9, [%d0];")._function
    assert function.instructions == Loops(function).code
