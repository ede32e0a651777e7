"""Memcheck, initcheck and racecheck inside of kernels: what they report, what they let pass, and that runs go on."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from cudatool.sim import jit
from cudatool.sim.device_runtime import Heap
from cudatool.sim.jit import DefectCode, Instrument

HEAD = """.reg .b64 %a<4>; .reg .b32 %r<8>; .reg .pred %p<3>;
ld.param.u64 %a1, [p];
mov.u32 %r1, %tid.x;
mad.wide.u32 %a2, %r1, 4, %a1;
"""
SHARED = """.shared .align 16 .b32 s[64];
.reg .b32 %s<4>;
mov.u32 %s0, s;
shl.b32 %s1, %r1, 2;
add.u32 %s1, %s1, %s0;
"""

HOST_ROOM = 16 * 4096  # addresses before the memory, for the host's

Check = Callable[..., list[jit.Found]]


@pytest.fixture
def memory() -> np.ndarray:
    """512 KiB that begin at a page, zeroed; the bytes before them are nothing else's."""
    whole = np.zeros(HOST_ROOM + (512 << 10) + 4096, np.uint8)
    first = HOST_ROOM + -whole.ctypes.data % 4096
    return whole[first : first + (512 << 10)]


@pytest.fixture
def check(memory, ptx_kernel, is_optimized) -> Check:
    """Run a body under checkers with `allocated` bytes of memory, of which the first `written` have values.

    It is optimized if this is the test's turn.
    """

    def run(
        kinds: Instrument,
        body: str,
        *,
        grid: int = 1,
        block: int = 64,
        allocated: int = 4096,
        written: int = 4096,
        host: tuple[tuple[int, int], ...] = (),
        address: int | None = None,
        shared_bytes: int = 0,
        **options: Any,
    ) -> list[jit.Found]:
        shadow = jit.Shadow(memory.ctypes.data - HOST_ROOM, HOST_ROOM + memory.nbytes, kinds)
        if allocated:
            shadow.allocated(memory.ctypes.data, allocated)
        shadow.written(memory.ctypes.data, written)
        params = ctypes.c_uint64(memory.ctypes.data if address is None else address)
        kernel = ptx_kernel(".param .u64 p", HEAD + body)
        host_places = jit.HostPlaces(dict(host), range(shadow.base, memory.ctypes.data))
        return kernel.launch(
            jit.LaunchShape((grid, 1, 1), (block, 1, 1), shared_bytes),
            ctypes.addressof(params),
            jit.LaunchOptions(shadow=shadow, host=host_places, optimized=is_optimized, **options),
        )

    return run


# ---- memcheck ----


def test_stores_behind_an_allocation_are_reported_and_not_made(check, memory):
    (found,) = check(Instrument.MEMCHECK, "st.global.u32 [%a2], 7;\nret;", allocated=100)
    assert (DefectCode.INVALID, "write", "global", 4, 25, 39) == (
        found.defect,
        found.mode,
        found.space,
        found.size,
        found.thread,
        found.count,
    )
    assert found.address == memory.ctypes.data + 100
    assert [7] * 25 + [0] * 39 == memory[:256].view(np.uint32).tolist()


def test_suppressed_loads_give_zero(check, memory):
    memory[:] = 1
    body = "ld.global.u32 %r2, [%a2];\nadd.u32 %r2, %r2, 5;\nst.global.u32 [%a1+64], %r2;\nret;"
    found = check(Instrument.MEMCHECK, body, block=1, allocated=0)
    assert ["read", "write"] == [one.mode for one in found]
    body = "ld.global.u32 %r2, [%a1+2048];\nst.global.u32 [%a1], %r2;\nret;"
    (found,) = check(Instrument.MEMCHECK, body, block=1, allocated=1000)
    assert "read" == found.mode
    assert 0 == memory[:4].view(np.uint32)[0]


def test_the_last_bytes_of_an_allocation_may_be_used(check):
    assert [] == check(Instrument.MEMCHECK, "ld.global.u32 %r2, [%a1+96];\nret;", block=1, allocated=100)
    assert 1 == len(check(Instrument.MEMCHECK, "ld.global.u32 %r2, [%a1+100];\nret;", block=1, allocated=100))
    assert 1 == len(check(Instrument.MEMCHECK, "ld.global.u8 %r2, [%a1+100];\nret;", block=1, allocated=100))


@pytest.mark.parametrize("size", [4096, 8192, 10_000, 5])
def test_memory_of_any_size_is_valid_to_its_end(check, size):
    last = f"ld.global.u8 %r2, [%a1+{size - 1}];\nld.global.u8 %r2, [%a1];\nret;"
    assert [] == check(Instrument.MEMCHECK, last, block=1, allocated=size)
    assert 1 == len(check(Instrument.MEMCHECK, f"ld.global.u8 %r2, [%a1+{size}];\nret;", block=1, allocated=size))


def test_freed_memory_must_not_be_used(memory, ptx_kernel):
    shadow = jit.Shadow(memory.ctypes.data, memory.nbytes, Instrument.MEMCHECK)
    shadow.allocated(memory.ctypes.data, 16384)
    shadow.freed(memory.ctypes.data + 512, 8192)
    params = ctypes.c_uint64(memory.ctypes.data)
    for offset, expected in ((508, 0), (512, 1), (4096, 1), (8700, 1), (8704, 0), (16380, 0)):
        kernel = ptx_kernel(".param .u64 p", HEAD + f"ld.global.u32 %r2, [%a1+{offset}];\nret;")
        found = kernel.launch(
            jit.LaunchShape((1, 1, 1), (1, 1, 1)), ctypes.addressof(params), jit.LaunchOptions(shadow=shadow)
        )
        assert expected == len(found), offset


@pytest.mark.parametrize("size", [8, 4096, 3 * 4096 + 8])
@pytest.mark.parametrize("body", ["st.b32 [%a2], 7;", "red.add.u32 [%a2], 7;", "st.v2.b32 [%a1], {%r1, %r1};"])
def test_constant_memory_may_be_read_and_not_written(memory, ptx_kernel, body, size):
    memory[:size] = 1
    shadow = jit.Shadow(memory.ctypes.data, memory.nbytes, Instrument.MEMCHECK)
    shadow.allocated(memory.ctypes.data, 5 * 4096)
    shadow.read_only(memory.ctypes.data, size)
    params = ctypes.c_uint64(memory.ctypes.data)

    def run(body: str, block: int) -> list[jit.Found]:
        kernel = ptx_kernel(".param .u64 p", HEAD + body + "\nret;")
        return kernel.launch(
            jit.LaunchShape((1, 1, 1), (block, 1, 1)), ctypes.addressof(params), jit.LaunchOptions(shadow=shadow)
        )

    assert [] == run("ld.b32 %r2, [%a2];\nld.v2.b32 {%r3, %r4}, [%a1];", 64)
    (found,) = run(body, 2)
    assert (DefectCode.INVALID, True) == (found.defect, shadow.is_read_only(found.address, found.size))
    assert 1 == memory[:size].min() == memory[:size].max()
    params.value += size
    assert [] == run(body, 2)  # what follows is a variable
    assert memory[size : size + 8].any()


def test_an_error_that_ends_a_kernel_has_what_was_found(check):
    with pytest.raises(jit.KernelTrap) as caught:
        check(Instrument.MEMCHECK, "ld.global.u32 %r2, [%a1+4096]; trap;", block=1)
    assert [DefectCode.INVALID] == [found.defect for found in caught.value.found]


def test_misaligned_accesses_are_reported(check):
    (found,) = check(Instrument.MEMCHECK, "ld.global.u32 %r2, [%a1+2];\nret;", block=1)
    assert DefectCode.MISALIGNED == found.defect
    (found,) = check(Instrument.MEMCHECK, "ld.global.v4.u32 {%r2, %r3, %r4, %r5}, [%a1+8];\nret;", block=1)
    assert (DefectCode.MISALIGNED, 16) == (found.defect, found.size)
    assert [] == check(Instrument.MEMCHECK, "ld.global.v4.u32 {%r2, %r3, %r4, %r5}, [%a1+16];\nret;", block=1)


def test_atomics_are_checked(check, memory):
    (found,) = check(Instrument.MEMCHECK, "atom.global.add.u32 %r2, [%a1+4096], 1;\nret;")
    assert ("atomic", 64) == (found.mode, found.count)
    assert 0 == memory[4096]


def test_pinned_memory_of_the_host_may_be_used_and_other_memory_not(check):
    host = np.zeros(16, np.uint32)
    body = "ld.global.u32 %r2, [%a2];\nst.global.u32 [%a2], 3;\nret;"
    at = host.ctypes.data
    assert [] == check(Instrument.MEMCHECK, body, block=16, address=at, host=((at, 64),))
    assert [3] * 16 == host.tolist()
    found = check(Instrument.MEMCHECK, body, block=17, address=at, host=((at, 64),))
    assert [1, 1] == [one.count for one in found]
    host[:] = 9
    assert 2 == len(check(Instrument.MEMCHECK, body, block=16, address=at))
    assert [9] * 16 == host.tolist()


@pytest.mark.parametrize("space", ["global.", ""], ids=["global", "generic"])
@pytest.mark.parametrize("kind", ["ld", "st", "atom", "red"])
def test_races_in_memory_of_the_host_are_found_where_it_is(check, space, kind):
    host = np.zeros((2, 1024), np.uint32)
    first, second = (one.ctypes.data for one in host)
    ranges = ((first, 4000), (second + 4, 4000))  # whose places must not meet
    access = {
        "ld": f"ld.{space}u32 %r2, [%a1+4];",
        "st": f"st.{space}u32 [%a1+4], 2;",
        "atom": f"atom.{space}add.u32 %r2, [%a1+4], 1;",
        "red": f"red.{space}add.u32 [%a1+4], 1;",
    }[kind]
    body = f"st.{space}u32 [%a2], 1;\n{access}\nret;"
    found = check(Instrument.RACECHECK, body, block=64, address=second + 4, host=ranges)
    assert {second + 8} == {one.address for one in found}
    assert all(one.space == "global" for one in found)
    own = access.replace("[%a1+4]", "[%a2]")  # each thread its own
    body = f"st.{space}u32 [%a2], 1;\n{own}\nret;"
    assert [] == check(Instrument.RACECHECK, body, block=64, address=second + 4, host=ranges)


def test_shared_memory_ends_where_the_launch_says(check):
    body = SHARED + "st.shared.u32 [%s1], 1;\nret;"
    assert [] == check(Instrument.MEMCHECK, body, block=64)
    (found,) = check(Instrument.MEMCHECK, body, block=80)
    assert ("shared", 256, 16) == (found.space, found.address, found.count)


@pytest.mark.parametrize("generic", [False, True])
def test_dynamic_shared_memory_ends_at_a_multiple_of_sixteen_bytes(check, memory, generic):
    """A compiler reads 16 bytes at once where a launch asks for 28 in all."""
    body = """.extern .shared .align 16 .b32 dynamic[];
.reg .b32 %s<8>; .reg .b64 %d;
mov.u32 %s0, dynamic;
cvt.u64.u32 %d, %s0;
cvta.shared.u64 %d, %d;
st.shared.u32 [%s0+24], 5;
{load} {{%s1, %s2, %s3, %s4}}, [{address}+{offset}];
st.global.u32 [%a1], %s3;
ret;"""
    access = {"load": "ld.v4.u32", "address": "%d"} if generic else {"load": "ld.shared.v4.u32", "address": "%s0"}
    assert [] == check(Instrument.MEMCHECK, body.format(offset=16, **access), block=1, shared_bytes=28)
    assert 5 == memory[:4].view(np.uint32)[0]
    (found,) = check(Instrument.MEMCHECK, body.format(offset=32, **access), block=1, shared_bytes=28)
    assert ("read", 16) == (found.mode, found.size)


def test_shared_and_local_memory_may_be_reached_by_generic_addresses(check):
    body = (
        SHARED
        + """.local .align 4 .b32 l[4];
.reg .b64 %g<3>;
cvt.u64.u32 %g0, %s1;
cvta.shared.u64 %g0, %g0;
st.u32 [%g0], 5;
mov.u64 %g1, l;
cvta.local.u64 %g1, %g1;
st.u32 [%g1+12], 6;
st.u32 [%g1+16], 6;
ret;"""
    )
    (found,) = check(Instrument.MEMCHECK, body, block=64)
    assert ("write", 64) == (found.mode, found.count)


def test_local_memory_is_checked(check):
    body = """.local .align 4 .b32 l[4];
.reg .b64 %l<2>;
mov.u64 %l0, l;
mad.wide.u32 %l0, %r1, 4, %l0;
st.local.u32 [%l0], 1;
ret;"""
    assert [] == check(Instrument.MEMCHECK, body, block=4)
    (found,) = check(Instrument.MEMCHECK, body, block=6)
    assert ("local", 16, 2) == (found.space, found.address, found.count)


def test_accesses_that_are_not_executed_are_not_reported(check):
    body = "setp.lt.u32 %p1, %r1, 25;\n@%p1 st.global.u32 [%a2], 7;\nret;"
    assert [] == check(Instrument.MEMCHECK, body, allocated=100)


def test_each_instruction_has_a_finding_of_its_own(check):
    body = "st.global.u32 [%a1+4096], 7;\nst.global.u32 [%a1+8192], 7;\nret;"
    assert [64, 64] == [one.count for one in check(Instrument.MEMCHECK, body)]


@pytest.mark.parametrize("threads", [1, 2])
def test_findings_of_many_blocks_are_counted(check, threads):
    (found,) = check(Instrument.MEMCHECK, "st.global.u32 [%a1+4096], 7;\nret;", grid=100, threads=threads)
    assert 6400 == found.count


def test_checks_are_left_out_once_a_kernel_gave_memory_values(memory, ptx_kernel):
    start = memory.ctypes.data
    shadow = jit.Shadow(start, memory.nbytes, Instrument.INITCHECK)
    shadow.allocated(start, 4096)
    params = ctypes.c_uint64(start)
    kernel = ptx_kernel(".param .u64 p", HEAD + OWN + "st.global.u32 [%a3], 7;\nret;")
    looked_for = []
    for _ in range(2):
        kernel.launch(
            jit.LaunchShape((1, 1, 1), (1024, 1, 1)), ctypes.addressof(params), jit.LaunchOptions(shadow=shadow)
        )
        looked_for.append(list(kernel.checks.found.values())[-1].kinds)
    assert [Instrument.INITCHECK, Instrument.NONE] == looked_for


# ---- initcheck ----

# ---- accesses near each other, launches that are alike ----

NEAR = """mul.wide.u32 %a0, %r1, 64;
add.u64 %a3, %a1, %a0;
ld.global.u32 %r2, [%a3+56];
ld.global.u32 %r3, [%a3];
ld.global.u32 %r4, [%a3+60];
ld.global.u32 %r5, [%a3+64];
st.global.u32 [%a3+52], %r5;
ret;"""


def test_of_accesses_near_each_other_only_the_wrong_one_is_reported(check, memory):
    (found,) = check(Instrument.MEMCHECK, NEAR)  # thread 63 reads what follows the allocation
    assert (DefectCode.INVALID, memory.ctypes.data + 4096, 63, 1) == (
        found.defect,
        found.address,
        found.thread,
        found.count,
    )
    assert [] == check(Instrument.MEMCHECK, NEAR, allocated=8192)
    found = check(Instrument.MEMCHECK, NEAR, address=memory.ctypes.data + 2, block=32)
    assert [(DefectCode.MISALIGNED, 32)] * 5 == [(one.defect, one.count) for one in found]
    (found,) = check(Instrument.INITCHECK, NEAR, allocated=8192)
    assert (DefectCode.UNINITIALIZED, 63) == (found.defect, found.thread)


def test_an_address_that_changes_is_looked_at_anew(check, memory):
    body = NEAR.replace("ld.global.u32 %r4", "add.u64 %a3, %a3, 4096;\nld.global.u32 %r4")
    found = check(Instrument.MEMCHECK, body)
    assert [("read", 64), ("read", 64), ("write", 64)] == [(one.mode, one.count) for one in found]


def test_a_guarded_access_does_not_stand_for_those_near_it(check):
    body = "setp.eq.u32 %p1, %r1, 63;\n" + NEAR.replace("ld.global.u32 %r2", "@%p1 ld.global.u32 %r2")
    (found,) = check(Instrument.MEMCHECK, body)
    assert (63, 1) == (found.thread, found.count)


def test_accesses_near_each_other_need_one_comparison(ptx_kernel):
    kernel = ptx_kernel(".param .u64 p", HEAD + NEAR)
    text = kernel.llvm_ir(Instrument.MEMCHECK)
    assert 1 == text.count("call i64 @llvm.fshr.i64")


@pytest.fixture
def alike(memory, ptx_kernel) -> Callable[..., list[jit.Found]]:
    """Launch one kernel again and again, with the same arguments."""
    kernels: dict[str, jit.JitKernel] = {}
    params = ctypes.c_uint64(memory.ctypes.data)

    def run(shadow: jit.Shadow, body: str) -> list[DefectCode]:
        if body not in kernels:
            kernels[body] = ptx_kernel(".param .u64 p", HEAD + body)
        launch = kernels[body].launch
        found = launch(
            jit.LaunchShape((1, 1, 1), (64, 1, 1)), ctypes.addressof(params), jit.LaunchOptions(shadow=shadow)
        )
        return [one.defect for one in found]

    return run


OWN = "mul.wide.u32 %a0, %r1, 4;\nadd.u64 %a3, %a1, %a0;\n"


# The second one's index comes from memory, so that the arguments do not say where it reads.
@pytest.mark.parametrize("index", ["", "ld.global.u32 %r1, [%a1+8192];\n"])
def test_launches_that_are_alike_are_checked_by_what_memory_is_now(memory, alike, index):
    start = memory.ctypes.data
    shadow = jit.Shadow(start, memory.nbytes, Instrument.MEMCHECK | Instrument.INITCHECK)
    reads, writes = index + OWN + "ld.global.u32 %r2, [%a3];\nret;", OWN + "st.global.u32 [%a3], 7;\nret;"
    shadow.allocated(start, 16384)
    shadow.written(start + 8192, 4096)
    for _ in range(2):
        assert [DefectCode.UNINITIALIZED] == alike(shadow, reads)
    for _ in range(2):
        assert [] == alike(shadow, writes)
        assert [] == alike(shadow, reads)
    shadow.freed(start, 4096)
    assert [DefectCode.INVALID] == alike(shadow, writes)
    assert DefectCode.INVALID in alike(shadow, reads)
    shadow.allocated(start, 4096)
    assert [DefectCode.UNINITIALIZED] == alike(shadow, reads)
    shadow.written(start, 4096)
    assert [] == alike(shadow, reads)
    shadow.read_only(start, 4096)
    assert [DefectCode.INVALID] == alike(shadow, writes)
    shadow.narrow(Instrument.INITCHECK)
    assert [] == alike(shadow, writes)


def test_reads_of_memory_that_was_never_written_are_reported(check, memory):
    body = "ld.global.u32 %r2, [%a2];\nret;"
    assert [] == check(Instrument.INITCHECK, body, block=16, written=64)
    (found,) = check(Instrument.INITCHECK, body, block=20, written=64)
    assert (DefectCode.UNINITIALIZED, 4, memory.ctypes.data + 64) == (found.defect, found.count, found.address)


def test_what_a_kernel_wrote_may_be_read(check, memory):
    body = "st.global.u32 [%a2], 1;\nld.global.u32 %r2, [%a2];\nld.global.u32 %r2, [%a2+4];\nret;"
    (found,) = check(Instrument.INITCHECK, body, block=1, written=0)
    assert memory.ctypes.data + 4 == found.address


def test_a_copy_carries_what_is_known_of_its_source(memory, ptx_kernel):
    shadow = jit.Shadow(memory.ctypes.data, memory.nbytes, Instrument.INITCHECK)
    start = memory.ctypes.data
    shadow.allocated(start, 8192)
    shadow.written(start, 8)
    shadow.copied(start + 4096, start, 16)
    params = ctypes.c_uint64(start)
    for offset, expected in ((4096, 0), (4100, 0), (4104, 1)):
        kernel = ptx_kernel(".param .u64 p", HEAD + f"ld.global.u32 %r2, [%a1+{offset}];\nret;")
        found = kernel.launch(
            jit.LaunchShape((1, 1, 1), (1, 1, 1)), ctypes.addressof(params), jit.LaunchOptions(shadow=shadow)
        )
        assert expected == len(found), offset


# ---- racecheck ----

EXCHANGE = "st.shared.u32 [%s1], %r1;\n{}xor.b32 %s2, %s1, 4;\nld.shared.u32 %r2, [%s2];\nret;"


def test_an_exchange_through_shared_memory_needs_a_barrier(check):
    found = check(Instrument.RACECHECK, SHARED + EXCHANGE.format(""))
    assert {DefectCode.READ_AFTER_WRITE, DefectCode.WRITE_AFTER_READ} == {one.defect for one in found}
    assert {"shared"} == {one.space for one in found}
    for order in ("bar.sync 0;\n", "bar.warp.sync -1;\n", "barrier.sync 0;\n"):
        assert [] == check(Instrument.RACECHECK, SHARED + EXCHANGE.format(order)), order


def test_a_warp_operation_does_not_order_other_warps(check):
    body = SHARED + EXCHANGE.format("bar.warp.sync -1;\n").replace("xor.b32 %s2, %s1, 4", "xor.b32 %s2, %s1, 128")
    found = check(Instrument.RACECHECK, body)
    assert 32 == abs(found[0].thread - found[0].other_thread)


def test_threads_may_write_different_bytes_of_a_word(check):
    assert [] == check(
        Instrument.RACECHECK, "cvt.u64.u32 %a3, %r1;\nadd.u64 %a3, %a3, %a1;\nst.global.u8 [%a3], 1;\nret;"
    )


def test_one_thread_may_do_what_it_likes(check):
    body = "st.global.u32 [%a2], 1;\nld.global.u32 %r2, [%a2];\nst.global.u32 [%a2], 2;\nret;"
    assert [] == check(Instrument.RACECHECK, body, grid=1)


def test_many_readers_do_not_race(check):
    assert [] == check(Instrument.RACECHECK, "ld.global.u32 %r2, [%a1];\nret;", grid=8)


def test_a_write_races_with_an_earlier_read_of_any_other_thread(check):
    body = """setp.eq.u32 %p1, %r1, 63;
ld.global.u32 %r2, [%a1];
@%p1 st.global.u32 [%a1], 1;
ret;"""
    (found,) = check(Instrument.RACECHECK, body)
    assert (DefectCode.WRITE_AFTER_READ, 63) == (found.defect, found.thread)


def test_atomics_race_with_plain_accesses_alone(check):
    assert [] == check(Instrument.RACECHECK, "red.global.add.u32 [%a1], 1;\nret;", grid=4)
    assert [] == check(Instrument.RACECHECK, "red.global.add.u32 [%a1], 1;\nld.volatile.global.u32 %r2, [%a1];\nret;")
    body = "red.global.add.u32 [%a1], 1;\nst.global.u32 [%a1], 0;\nret;"
    assert {"write", "atomic"} >= {one.mode for one in check(Instrument.RACECHECK, body)} != set()


def test_blocks_of_a_launch_are_in_no_order(check):
    (found,) = check(Instrument.RACECHECK, "st.global.u32 [%a2], 1;\nret;", grid=3)
    assert (DefectCode.WRITE_AFTER_WRITE, (1, 0, 0), (0, 0, 0), 128) == (
        found.defect,
        found.block,
        found.other_block,
        found.count,
    )


def test_shared_memory_of_another_block_is_other_memory(check):
    assert [] == check(Instrument.RACECHECK, SHARED + EXCHANGE.format("bar.sync 0;\n"), grid=5)


def test_launches_follow_each_other(memory, ptx_kernel):
    shadow = jit.Shadow(memory.ctypes.data, memory.nbytes, Instrument.RACECHECK)
    params = ctypes.c_uint64(memory.ctypes.data)
    kernel = ptx_kernel(".param .u64 p", HEAD + "ld.global.u32 %r2, [%a2];\nst.global.u32 [%a2], 1;\nret;")
    for _ in range(3):
        found = kernel.launch(
            jit.LaunchShape((1, 1, 1), (64, 1, 1)), ctypes.addressof(params), jit.LaunchOptions(shadow=shadow)
        )
        assert [] == found


def test_a_fence_and_an_atomic_hand_data_to_the_last_block(check, memory):
    """As in NVIDIA's threadFenceReduction: blocks write, fence and count; the last one reads what all wrote."""
    body = """mov.u32 %r2, %ctaid.x;
mad.wide.u32 %a3, %r2, 4, %a1;
st.global.u32 [%a3+256], 1;
{}atom.global.add.u32 %r3, [%a1], 1;
setp.ne.u32 %p1, %r3, 3;
@%p1 ret;
{}ld.global.u32 %r4, [%a1+256];
ld.global.u32 %r5, [%a1+260];
ret;"""
    fence = "membar.gl;\n"
    assert [] == check(Instrument.RACECHECK, body.format(fence, fence), grid=4, block=1)
    memory[:] = 0
    assert 0 < len(check(Instrument.RACECHECK, body.format("", ""), grid=4, block=1))


# ---- the heap of malloc in kernels ----

HEAP_CALLS = """
.extern .func (.param .b64 block) malloc (.param .b64 size);
.extern .func free (.param .b64 block);
"""
TAKE = """.reg .b64 %b<4>; .reg .b32 %v;
{ .param .b64 n; .param .b64 r; st.param.b64 [n], 24; call.uni (r), malloc, (n); ld.param.b64 %b1, [r]; }"""
FREE = "{ .param .b64 q; st.param.b64 [q], %b1; call.uni free, (q); }"


@pytest.fixture
def heap_check(memory, ptx_kernel) -> Iterator[Callable[[Instrument, str], list[tuple[DefectCode, int]]]]:
    """Run a body of 8 threads, each with a block of 24 bytes at ``%b1``; return defects and how often each occurred.

    What is invalid is in a freed block if the body frees it before its last store.
    """
    heap = Heap(memory.ctypes.data, memory.nbytes)
    shadow = jit.Shadow(memory.ctypes.data, memory.nbytes, Instrument.NONE)

    def run(kinds: Instrument, body: str) -> list[tuple[DefectCode, int]]:
        shadow.reset(kinds)
        shadow.heap(memory.ctypes.data, memory.nbytes)
        kernel = ptx_kernel("", TAKE + body, before=HEAP_CALLS)
        found = kernel.launch(
            jit.LaunchShape((1, 1, 1), (8, 1, 1), heap=heap.handle), 0, jit.LaunchOptions(shadow=shadow)
        )
        assert all(
            shadow.in_freed_block(f.address) == ("free" in body.rpartition("st.b32")[0])
            for f in found
            if f.defect is DefectCode.INVALID
        )
        return [(f.defect, f.count) for f in found]

    yield run
    heap.close()


@pytest.mark.parametrize(
    ("body", "bad"),
    [
        ("st.b64 [%b1], %b1; st.b64 [%b1+16], %b1; ret;", 0),
        ("st.b32 [%b1+24], 1; ret;", 8),
        ("st.b32 [%b1+32], 1; ret;", 8),
        ("st.b32 [%b1+-4], 1; ret;", 8),
        (FREE + "st.b32 [%b1+20], 1; ret;", 8),
        ("st.b32 [%b1+24], 1;" + FREE + "ret;", 8),
        (FREE + TAKE.partition(";")[2].partition(";")[2] + "st.b32 [%b1], 1; ret;", 0),
    ],
)
def test_each_block_of_the_heap_is_memory_of_its_own(heap_check, body, bad):
    assert ([(DefectCode.INVALID, bad)] if bad else []) == heap_check(Instrument.MEMCHECK, body)


def test_blocks_of_the_heap_have_no_values_at_first(heap_check):
    reads = "ld.b32 %v, [%b1+8]; st.b32 [%b1+12], %v; ld.b32 %v, [%b1+12]; ret;"
    assert [(DefectCode.UNINITIALIZED, 8)] == heap_check(Instrument.INITCHECK, "mov.b32 %v, 0;" + reads)


def test_a_block_that_a_kernel_gave_back_is_not_in_use_for_the_next_launch(memory, ptx_kernel):
    """Kernels change what may be used: a launch like one before is checked anew after that."""
    start, half = memory.ctypes.data, memory.nbytes // 2
    heap = Heap(start, half)
    shadow = jit.Shadow(start, memory.nbytes, Instrument.MEMCHECK)
    shadow.heap(start, half)
    shadow.usable(start + half, half)
    place = memory[half : half + 8].view(np.uint64)

    def launch(kernel: jit.JitKernel, argument: int) -> list[DefectCode]:
        params = ctypes.c_uint64(argument)
        found = kernel.launch(
            jit.LaunchShape((1, 1, 1), (1, 1, 1), heap=heap.handle),
            ctypes.addressof(params),
            jit.LaunchOptions(shadow=shadow),
        )
        return [one.defect for one in found]

    parameter = ".reg .b64 %o; ld.param.u64 %o, [p];\n"
    take = ptx_kernel(".param .u64 p", TAKE + parameter + "st.global.u64 [%o], %b1; ret;", before=HEAP_CALLS)
    free = ptx_kernel(
        ".param .u64 p", parameter + TAKE.partition("{")[0] + "mov.b64 %b1, %o;\n" + FREE + "ret;", before=HEAP_CALLS
    )
    use = ptx_kernel(".param .u64 p", parameter + ".reg .b32 %v; ld.global.u32 %v, [%o]; ret;")
    try:
        assert [] == launch(take, start + half)
        for _ in range(2):
            assert [] == launch(use, int(place[0]))
        assert [] == launch(free, int(place[0]))
        assert [DefectCode.INVALID] == launch(use, int(place[0]))
    finally:
        heap.close()


# ---- the same each time ----


@pytest.mark.parametrize("kinds", [Instrument.NONE, Instrument.MEMCHECK | Instrument.RACECHECK])
def test_on_one_host_thread_bits_and_findings_are_the_same_each_time(check, memory, kinds):
    """The sum depends on the order of its terms, so on that of the blocks and threads; a seed changes it."""
    body = """.reg .b32 %s<8>; .reg .f32 %f<4>; .reg .b64 %o;
    mov.u32 %s1, %ctaid.x; mad.lo.u32 %s2, %s1, 64, %r1; mul.lo.u32 %s3, %s2, 2654435761; shr.u32 %s4, %s3, 8; or.b32 %s4, %s4, 1;
    cvt.rn.f32.u32 %f1, %s4; rcp.rn.f32 %f1, %f1; red.global.add.f32 [%a1], %f1;
    mul.wide.u32 %o, %s4, 1; and.b64 %o, %o, 4092; add.u64 %o, %o, %a1;
    st.global.u32 [%o+64], %s2; bar.sync 0; ld.global.u32 %s5, [%o+128]; ret;"""

    def once(seed: int) -> tuple[bytes, list[jit.Found]]:
        memory[:8192] = 0
        found = check(kinds, body, grid=8, seed=seed, threads=1)
        return memory[:8192].tobytes(), found

    runs = [once(7), once(7), once(8)]
    assert runs[0] == runs[1]
    assert runs[0][0][:4] != runs[2][0][:4]
    assert bool(kinds) == bool(runs[0][1])


def test_bytes_before_the_first_gap_are_those_that_may_be_used_one_by_one():
    page, pages = 4096, 8
    shadow = jit.Shadow(1 << 40, pages * page, Instrument.MEMCHECK)
    base, chance = shadow.base, random.Random(3)
    shadow.usable(base + 100, 6 * page)
    shadow.freed(base + page + 7, 20)
    shadow.read_only(base + 2 * page, 64)
    shadow.freed(base + 4 * page, page)
    usable = [bool(shadow.usable_bytes(base + at, 1)) for at in range(pages * page)]
    for _ in range(300):
        start = chance.randrange(pages * page - 1)
        size = min(chance.choice((5, 300, 2 * page)), pages * page - start)
        gap = next((at for at in range(size) if not usable[start + at]), size)
        assert gap == shadow.usable_before_gap(base + start, size)


# ---- synccheck ----

SHUFFLE = """ld.global.u32 %r2, [%a2+1024];
setp.ne.u32 %p1, %r2, 0;
@%p1 ret;
ld.global.u32 %r3, [%a1];
ld.global.u32 %r4, [%a1+4];
ld.global.u32 %r5, [%a1+8];
"""


def source_lane(mode: str, lane: int, b: int, c: int) -> int:
    """Return the lane whose value a lane gets (PTX ISA, ``shfl.sync``, Semantics)."""
    clamp, segment = c & 31, c >> 8 & 31
    highest = (lane & segment) | (clamp & ~segment)
    wanted = {"up": lane - b, "down": lane + b, "bfly": lane ^ b, "idx": (lane & segment) | (b & ~segment)}[mode]
    return wanted if (wanted >= highest if mode == "up" else wanted <= highest) else lane


@pytest.mark.parametrize("constant", [False, True])
@pytest.mark.parametrize("mode", ["up", "down", "bfly", "idx"])
def test_the_value_of_a_lane_that_the_mask_names_and_that_is_gone_is_reported(check, memory, mode, constant):
    draw = random.Random(mode)
    numbers = memory[:4096].view(np.uint32)
    outcomes = set()
    b, width = 1, 32
    for turn in range(4 if constant else 40):
        if not constant or not turn:
            b, width = draw.choice((1, 2, 8, 16, 31)), draw.choice((4, 16, 32))
        c = (32 - width) << 8 | (0 if mode == "up" else 31)
        gone = [draw.random() < draw.choice((0, 0.03, 0.5)) for _ in range(48)]
        here = {lane for lane in range(32) if not gone[lane]} if turn % 2 else set()
        gone = [lane not in here if lane < 32 else gone[lane] for lane in range(48)]
        # All lanes there, and some of those that have ended or, in the second warp of 16, never were.
        lanes = [
            [lane for lane in range(32) if 32 * warp + lane < 48 and not gone[32 * warp + lane]] for warp in (0, 1)
        ]
        mask = sum(1 << lane for lane in {*lanes[0], *lanes[1], *draw.sample(range(32), draw.choice((0, 8, 32)))})
        numbers[:3], numbers[256:304] = (b, c, mask), gone
        operands = f"{b}, {c}" if constant else "%r3, %r4"
        body = f"{SHUFFLE}shfl.sync.{mode}.b32 %r6, %r1, {operands}, %r5;\nst.global.u32 [%a2+2048], %r6;\nret;"
        found = check(Instrument.SYNCCHECK, body, block=48)
        bad = []
        for warp, there in enumerate(lanes):
            sources = {lane: source_lane(mode, lane, b, c) for lane in there}
            bad += [32 * warp + lane for lane, of in sources.items() if of not in there and mask >> of & 1][:1]
        assert [(DefectCode.ABSENT_LANE, thread) for thread in bad[:1]] == [(one.defect, one.thread) for one in found]
        assert len(bad) == sum(one.count for one in found)
        outcomes.add(bool(bad))
    assert constant or {True, False} == outcomes


def test_a_lane_outside_of_the_mask_may_be_a_source_whose_value_is_not_used(check, memory):
    # As a reduction of 16 lanes has them: __shfl_down_sync(0xffff, x, 8).
    body = "setp.gt.u32 %p1, %r1, 15;\n@%p1 ret;\nshfl.sync.down.b32 %r2, %r1, 8, 31, 65535;\nret;"
    assert [] == check(Instrument.SYNCCHECK, body, block=32)
    body = body.replace("65535", "-1")
    (found,) = check(Instrument.SYNCCHECK, body, block=32)
    assert (DefectCode.ABSENT_LANE, 8) == (found.defect, found.thread)


@pytest.mark.parametrize(
    "operation",
    [
        "movmatrix.sync.aligned.m8n8.trans.b16 %r2, %r1;",
        "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r2}, [m];",
        "stmatrix.sync.aligned.m8n8.x1.shared.b16 [m], {%r1};",
        "mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%r2, %r3}, {%r1}, {%r1}, {%r4, %r5};",
        "wmma.load.a.sync.aligned.row.m8n8k32.shared.s4 {%r2}, [m];",
    ],
)
def test_a_matrix_operation_of_a_part_of_a_warp_is_reported(check, operation):
    body = ".shared .align 16 .b8 m[1024];\nmov.b32 %r4, 0; mov.b32 %r5, 0;\n"
    body += "setp.eq.u32 %p1, %r1, 31;\n@%p1 mov.b32 %r5, %r4;\n"
    assert [] == check(Instrument.SYNCCHECK, f"{body}{operation}\nret;", block=64)
    outcomes = [
        check(Instrument.SYNCCHECK, f"{body}@%p1 ret;\n{operation}\nret;", block=64),  # one has ended
        check(Instrument.SYNCCHECK, f"{body}{operation}\nret;", block=63),  # one never was
    ]
    assert [[(DefectCode.PART_OF_WARP, first, 1)] for first in (0, 32)] == [
        [(one.defect, one.thread, one.count) for one in found] for found in outcomes
    ]
