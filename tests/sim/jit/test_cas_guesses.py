"""Which plain loads only guess for a loop of atomicCAS: those whose value makes no difference, which is tried."""

from __future__ import annotations

import random

import numpy as np
import pytest

from cudatool.ptx import parse
from cudatool.ptx.guesses import guessing_loads

GUIDE = """
    ld.global.u32 %r1, [%a];
LOOP:
    add.s32 %r2, %r1, 5;
    atom.global.cas.b32 %r3, [%a], %r1, %r2;
    setp.ne.s32 %p, %r1, %r3;
    mov.u32 %r1, %r3;
@%p bra LOOP;
    ret;"""
HEAD = ".reg .b32 %r<12>; .reg .b64 %a, %b; .reg .pred %p, %q;\nld.param.u64 %a, [x]; ld.param.u64 %b, [y];\n"
PARAMS = ".param .u64 x, .param .u64 y"


def lines_of(body: str) -> frozenset[int]:
    text = f".version 8.3\n.target sm_90\n.address_size 64\n.visible .entry k({PARAMS}) {{\n{HEAD}{body}\n}}"
    return guessing_loads(parse(text).kernel("k"))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("", ""),
        ("setp.ne.s32 %p, %r1, %r3;", "setp.eq.b32 %p, %r3, %r1;|@%p bra|@!%p bra"),
        ("    ret;", "    st.global.u32 [%b], %r3; ret;"),
        (
            "LOOP:\n",
            "LOOP:\n mov.u32 %r4, %r1;\n|%r1, %r2;|%r4, %r2;|%p, %r1|%p, %r4|    ret|    st.global.u32 [%b], %r4; ret",
        ),
        ("ld.global.u32 %r1, [%a];", "ld.global.u32 %r5, [%a]; mov.u32 %r1, %r5;"),
        ("add.s32 %r2, %r1, 5;", "setp.lt.s32 %q, %r1, 9; selp.b32 %r2, %r1, 3, %q;"),
    ],
    ids=["guide", "equal", "result", "compared-value-after", "copied", "choice"],
)
def test_a_read_that_only_begins_a_loop_of_atomic_cas_is_a_guess(old, new):
    first, *more = new.split("|")
    body = GUIDE.replace(old, first) if old else GUIDE
    for before, after in zip(more[::2], more[1::2], strict=True):
        body = body.replace(before, after)
    assert 1 == len(lines_of(body))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("LOOP:\n", "\n    st.global.u32 [%b], %r1;\nLOOP:\n"),
        ("LOOP:\n", "\n    setp.gt.s32 %q, %r1, 9;\n@%q ret;\nLOOP:\n"),
        ("    add.s32", "    st.global.u32 [%b], %r1;\n    add.s32"),
        ("add.s32 %r2, %r1, 5;", "add.s32 %r2, %r1, 5;\n    red.global.add.u32 [%b], %r2;"),
        ("add.s32 %r2, %r1, 5;", "cvt.u64.u32 %a, %r1; add.s32 %r2, %r1, 5;"),
        ("    mov.u32 %r1, %r3;\n", ""),
        ("    mov.u32 %r1, %r3;\n", "@%p mov.u32 %r1, %r3;\n"),
        ("    ld.global.u32 %r1, [%a];\nLOOP:\n", "LOOP:\n    ld.global.u32 %r1, [%a];\n"),
        ("@%p bra", "    setp.lt.s32 %p, %r3, 100;\n@%p bra"),
        ("ne.s32 %p, %r1", "ne.s32 %p, %r2"),
        ("ne.s32", "eq.s32"),
        ("LOOP:\n", "\n    mov.u32 %r6, %r1;\nLOOP:\n|    ret|    st.global.u32 [%b], %r6; ret"),
        ("ld.global", "ld.volatile.global"),
        ("ld.global", "ld.global.nc"),
    ],
    ids=[
        *("stored-before", "decides-before", "stored-in-loop", "added-in-loop", "makes-an-address", "result-dropped"),
        *("goes-on-with-the-old", "loads-again", "other-exit", "compares-another", "leaves-if-different"),
        *("first-guess-used-after", "volatile", "read-only-cache"),
    ],
)
def test_a_read_whose_value_is_used_before_it_was_compared_is_no_guess(old, new):
    first, *more = new.split("|")
    body = GUIDE.replace(old, first)
    for before, after in zip(more[::2], more[1::2], strict=True):
        body = body.replace(before, after)
    assert body != GUIDE
    assert not lines_of(body)


def test_of_two_loops_one_after_the_other_each_read_is_judged_for_itself():
    second = GUIDE.replace("LOOP", "AGAIN").replace("%r1", "%r5")
    body = GUIDE.replace("    ret;", second)
    assert 2 == len(lines_of(body))
    for register in ("%r5", "%r1"):  # the latter is the first loop's, too
        used = body.replace("AGAIN:\n", "\n    st.global.u32 [%b], %r5;\nAGAIN:\n").replace("%r5", register)
        assert lines_of(GUIDE) == lines_of(used)


@pytest.mark.parametrize(
    "code",
    [
        "add.s32 %r2, %r2, %r1;",
        "@%q mov.u32 %r2, 8;",
        "add.s32 %r2, %r2, 1;",
        "red.global.add.u32 [%b], 1; mov.u32 %r2, 3;",
        "nanosleep.u32 40; mov.u32 %r2, 3;",
    ],
    ids=["sum-of-guesses", "kept-choice", "count", "count-in-memory", "sleep"],
)
def test_a_guess_is_none_if_it_matters_how_often_the_loop_goes_round(code):
    body = GUIDE.replace("    ld", "    mov.u32 %r2, 1;\n    ld")
    body = body.replace("add.s32 %r2, %r1, 5;", f"setp.lt.s32 %q, %r1, 5; {code}")
    assert not lines_of(body)


class Program:
    """A random program around a loop of ``atom.cas``; its one plain load may be replaced by any value."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        pick = self.random.choice
        guess, compared = pick((1, 1, 1, 4)), pick((1, 1, 1, 1, 4))
        before = [self.step((1, 4, 6)) for _ in range(pick((0, 0, 0, 1)))]
        loop = [self.step((1, 4, 6, 7)) for _ in range(pick((1, 2, 3)))]
        after = [self.step((1, 3, 4, 6, 7)) for _ in range(pick((0, 1, 2)))]
        copied = pick((False, True))
        self.lines = [
            "mov.u32 %r4, 11; mov.u32 %r5, 2; mov.u32 %r6, 3; mov.u32 %r7, 4;",
            *before,
            "mov.u32 %r5, %r1;" if copied else "",
            "LOOP:",
            *loop,
            f"atom.global.cas.b32 %r3, [%a], %r{guess}, %r{pick((6, 7))};",
            f"setp.ne.s32 %p, %r{compared}, %r3;",
            pick(("mov.u32 %r1, %r3;", "mov.u32 %r1, %r3;", "mov.u32 %r4, %r3;", "mov.u32 %r1, %r6;")),
            "@%p bra LOOP;",
            *after,
            f"st.global.u32 [%b], %r{pick((1, 3, 4, 5, 6, 7))};",
            "ret;",
        ]

    def step(self, sources: tuple[int, ...]) -> str:
        to, one, other = self.random.choice((6, 7)), *(self.random.choice(sources) for _ in range(2))
        return self.random.choice(
            (
                f"add.s32 %r{to}, %r{one}, %r{other};",
                f"xor.b32 %r{to}, %r{one}, 12;",
                f"mov.u32 %r{to}, %r{one};",
                f"setp.lt.s32 %q, %r{one}, 5; selp.b32 %r{to}, %r{one}, %r{other}, %q;",
                f"st.global.u32 [%b+4], %r{one};",
                f"setp.lt.s32 %q, %r{one}, 5; @%q mov.u32 %r{to}, 8;",
            )
        )

    def body(self, load: str) -> str:
        return "\n".join([load, *self.lines])


def test_whatever_a_guess_reads_the_result_is_the_same(ptx_kernel, launch_in_turn):
    """By brute force: the loads of random programs are replaced by numbers, where they are taken for guesses."""
    recognized = 0
    for seed in range(1500):
        program = Program(seed)
        body = program.body("ld.global.u32 %r1, [%a];")
        if not lines_of(body):
            continue
        recognized += 1
        results = set()
        for load in ("ld.global.u32 %r1, [%a];", "mov.u32 %r1, 0;", "mov.u32 %r1, 7;", "mov.u32 %r1, 4294967295;"):
            x, y = np.full(1, 7, "u4"), np.zeros(2, "u4")
            launch_in_turn(ptx_kernel(PARAMS, HEAD + program.body(load)), 1, 1, x, y)
            results.add((int(x[0]), *y.tolist()))
        assert 1 == len(results), body
    assert 20 <= recognized <= 300
