"""What kernels cost: in virtual time, and to load."""

from __future__ import annotations

from uuid import uuid4

import numpy as np
import pytest

from cudatool.ptx import Module, linker, parse
from cudatool.sim import profile
from cudatool.sim.jit.kernel_work import work_of_a_thread


def work(text: str) -> profile.ThreadWork:
    """Return the guessed work of a thread of a kernel."""
    registers = ".reg .pred %p<9>; .reg .b32 %r<9>; .reg .b64 %d<9>;"
    return work_of_a_thread(
        parse(f".version 8.3\n.target sm_90\n.visible .entry k() {{ {registers} {text} }}").kernels["k"]
    )


def test_straight_code_counts_once():
    assert (3, 16 + 2, 0) == work("ld.global.v4.f32 {%r1, %r2, %r3, %r4}, [%d1]; st.global.u16 [%d1], %r1; ret;")


def test_the_type_may_stand_anywhere_among_the_modifiers():
    text = "red.global.v2.f32.add [%d1], {%r1, %r2}; red.global.add.noftz.v4.f16 [%d1], {%r1, %r2, %r3, %r4}; ret;"
    assert (3, 8 + 8, 0) == work(text)


def test_copies_to_shared_memory_move_what_they_read_of_global_memory():
    assert (2, 16, 0) == work("cp.async.cg.shared.global [%r1], [%d1], 16; ret;")
    assert (2, 0, 0) == work("cp.async.wait_all; ret;")


def test_a_loop_counts_eight_times():
    assert (8 * 2 + 1, 8 * 4, 0) == work("L: ld.global.u32 %r1, [%d1]; @%p1 bra L; ret;")


def test_a_loop_with_several_edges_back_counts_once():
    continues = "@%p1 bra L; @%p2 bra L; @%p3 bra L;"
    assert (8 * 4 + 1, 8 * 4, 0) == work(f"L: ld.global.u32 %r1, [%d1]; {continues} ret;")


def test_nested_loops_multiply_up_to_four():
    def nest(depth: int) -> str:
        return (
            f"L{depth}: membar.gl; @%p2 bra E{depth}; {nest(depth - 1)} E{depth}: @%p1 bra L{depth};"
            if depth
            else "ld.global.u32 %r1, [%d1];"
        )

    assert [1, 8, 64, 512, 4096, 4096] == [work(nest(depth) + " ret;").moved // 4 for depth in range(6)]


def test_code_after_a_loop_that_enters_it_no_more_counts_once():
    # Rare cases stand behind the end of a kernel, and come back to what follows the loop.
    rare = "RARE: ld.global.u32 %r1, [%d1]; bra AFTER;"
    assert (1 + 8 * 2 + 1 + 2, 4, 0) == work(f"@%p1 bra RARE; L: membar.gl; @%p2 bra L; AFTER: ret; {rare}")


def test_threads_sleep_at_the_same_time():
    sleeping = work("mov.u32 %r1, 1000; nanosleep.u32 %r1; L: nanosleep.u32 50; @%p1 bra L; ret;")
    assert 1000 + 8 * 50 == sleeping.slept
    still = sleeping._replace(slept=0)
    assert [1400, 1400] == [profile.kernel_cost(n, sleeping) - profile.kernel_cost(n, still) for n in (1, 1 << 20)]


def test_a_sleep_of_unknown_length_counts_nothing():
    unknown = "mov.u32 %r1, 1000; add.u32 %r1, %r1, %r2;", "add.u32 %r1, 1000, %r2;", ""
    assert [0, 0, 0] == [work(f"{code} nanosleep.u32 %r1; ret;").slept for code in unknown]
    assert 0 == work("nanosleep.u32 ; ret;").slept


def test_an_image_is_parsed_once_for_all_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parsing takes most of the time to load a program whose native code is kept from an earlier run."""
    import cudatool

    parsed: list[bytes] = []

    def counted(text: bytes, *, line: int) -> Module:
        parsed.append(text)
        return parse(text, line=line)

    monkeypatch.setattr(linker, "parse", counted)
    name = f"scaled_{uuid4().hex}"  # what ran before is not parsed at all
    source = f"""__device__ int scale = 3;
    extern "C" __global__ void {name}(int *x, int add) {{ *x = *x * scale + 1; scale += add; }}"""
    kernel = cudatool.compile(source, name)
    results = []
    for device in range(cudatool.device_count()):
        with cudatool.device(device):
            x = cudatool.full(1, 7, np.int32)
            for add in (10, 100):
                kernel[1, 1](x, add)
            results.append(x.get().tolist())
    assert [[(7 * 3 + 1) * 13 + 1]] * cudatool.device_count() == results
    assert 1 == len(parsed)
