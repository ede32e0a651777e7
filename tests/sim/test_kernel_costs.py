"""What kernels cost in virtual time."""

from __future__ import annotations

from cudatool.ptx import parse
from cudatool.sim import profile


def work(text: str) -> tuple[int, int]:
    """Return the guessed instructions and bytes of a thread of a kernel."""
    registers = ".reg .pred %p<9>; .reg .b32 %r<9>; .reg .b64 %d<9>;"
    return profile.work_of_a_thread(
        parse(f".version 8.3\n.target sm_90\n.visible .entry k() {{ {registers} {text} }}").kernels["k"]
    )


def test_straight_code_counts_once():
    assert (3, 16 + 2) == work("ld.global.v4.f32 {%r1, %r2, %r3, %r4}, [%d1]; st.global.u16 [%d1], %r1; ret;")


def test_a_loop_counts_eight_times():
    assert (8 * 2 + 1, 8 * 4) == work("L: ld.global.u32 %r1, [%d1]; @%p1 bra L; ret;")


def test_a_loop_with_several_edges_back_counts_once():
    continues = "@%p1 bra L; @%p2 bra L; @%p3 bra L;"
    assert (8 * 4 + 1, 8 * 4) == work(f"L: ld.global.u32 %r1, [%d1]; {continues} ret;")


def test_nested_loops_multiply_up_to_four():
    def nest(depth: int) -> str:
        return (
            f"L{depth}: nanosleep.u32 1; @%p2 bra E{depth}; {nest(depth - 1)} E{depth}: @%p1 bra L{depth};"
            if depth
            else "ld.global.u32 %r1, [%d1];"
        )

    assert [1, 8, 64, 512, 4096, 4096] == [work(nest(depth) + " ret;")[1] // 4 for depth in range(6)]


def test_code_after_a_loop_that_enters_it_no_more_counts_once():
    # Rare cases stand behind the end of a kernel, and come back to what follows the loop.
    rare = "RARE: ld.global.u32 %r1, [%d1]; bra AFTER;"
    assert (1 + 8 * 2 + 1 + 2, 4) == work(f"@%p1 bra RARE; L: nanosleep.u32 1; @%p2 bra L; AFTER: ret; {rare}")
