"""What checkers see of asynchronous copies, mbarriers and matrix loads."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from cudatool.sim import jit
from cudatool.sim.jit import DefectCode, Instrument

HEAD = """.reg .b64 %p, %q, %o, %state; .reg .b32 %t, %x, %y, %s, %d; .reg .pred %go; .shared .align 16 .b8 s[1024];
.shared .align 8 .b64 bar; ld.param.u64 %p, [p]; mov.u32 %t, %tid.x; mov.u32 %s, s; mov.u32 %d, bar;
"""


@pytest.fixture
def check(ptx_kernel, is_optimized):
    """Run a body under checkers, optimized in its turn; the first `allocated` bytes at %p are memory, and have values."""
    whole = np.zeros(3 * 4096, np.uint8)
    memory = whole[-whole.ctypes.data % 4096 :][:8192]

    def run(kinds, body, block, allocated=4096):
        shadow = jit.Shadow(memory.ctypes.data, memory.nbytes, kinds)
        shadow.allocated(memory.ctypes.data, allocated)
        shadow.written(memory.ctypes.data, allocated)
        params = ctypes.c_uint64(memory.ctypes.data)
        return ptx_kernel(".param .u64 p", HEAD + body).launch(
            jit.LaunchShape((1, 1, 1), (block, 1, 1)),
            ctypes.addressof(params),
            jit.LaunchOptions(shadow=shadow, optimized=is_optimized),
        )

    return run


def test_copy_from_behind_an_allocation_is_reported(check):
    body = "cp.async.cg.shared.global [%s], [%p+96], 16; cp.async.wait_all; ret;"
    (found,) = check(Instrument.MEMCHECK, body, 1, allocated=100)
    assert (DefectCode.INVALID, "read", "global", 16) == (found.defect, found.mode, found.space, found.size)
    assert [] == check(Instrument.MEMCHECK, body, 1, allocated=112)


def test_only_the_bytes_that_are_given_are_read(check):
    body = "mov.u32 %x, {given}; cp.async.cg.shared.global [%s], [%p+96], 16, %x; cp.async.wait_all; ret;"
    assert [] == check(Instrument.MEMCHECK, body.format(given=4), 1, allocated=100)
    assert [] == check(Instrument.MEMCHECK, body.format(given=0), 1, allocated=96)
    (found,) = check(Instrument.MEMCHECK, body.format(given=5), 1, allocated=100)
    assert (DefectCode.INVALID, 1) == (found.defect, found.size)


@pytest.fixture
def copies(ptx_kernel):
    """A copy whose thread reads `given` of `size` bytes at the start of memory; another one may write to a byte of it."""
    whole = np.zeros(3 * 4096, np.uint8)
    memory = whole[-whole.ctypes.data % 4096 :][:4096]

    def of(size, more=""):
        cache = "cg" if size == 16 else "ca"
        kernel = ptx_kernel(
            ".param .u64 p, .param .u64 given, .param .u64 written",
            HEAD
            + f"""ld.param.u64 %q, [given]; cvt.u32.u64 %x, %q; ld.param.u64 %q, [written]; add.u64 %q, %p, %q;
            setp.eq.u32 %go, %t, 1; @!%go cp.async.{cache}.shared.global [%s], [%p], {size}, %x; {more}
            cp.async.wait_all; ret;""",
        )

        def run(given, written=0, *, block=1, **observers):
            params = (ctypes.c_uint64 * 3)(memory.ctypes.data, given, written)
            address = ctypes.addressof(params)
            return kernel.launch(jit.LaunchShape((1, 1, 1), (block, 1, 1)), address, jit.LaunchOptions(**observers))

        return memory, run

    return of


@pytest.mark.parametrize("size", [4, 8, 16])
def test_of_a_partial_copy_every_byte_that_is_read_races_and_no_other_one(copies, size):
    memory, run = copies(size, "mov.u32 %y, 7; @%go st.global.u8 [%q], %y;")
    shadow = jit.Shadow(memory.ctypes.data, memory.nbytes, Instrument.RACECHECK)
    for given in range(size + 1):
        raced = {byte for byte in range(size + 1) if run(given, byte, block=2, shadow=shadow)}
        assert set(range(given)) == raced


def test_footprint_of_a_partial_copy_is_what_it_reads(copies):
    memory, run = copies(16)
    for given in range(17):
        footprint = jit.Footprint(memory.ctypes.data, memory.nbytes)
        run(given, footprint=footprint)
        assert ([(memory.ctypes.data, given, 1)] if given else []) == footprint.ranges()


def test_every_byte_that_a_partial_copy_reads_must_have_a_value(copies):
    memory, run = copies(16)
    shadow = jit.Shadow(memory.ctypes.data, memory.nbytes, Instrument.INITCHECK)
    for missing in range(16):
        shadow.allocated(memory.ctypes.data, memory.nbytes)
        shadow.written(memory.ctypes.data, missing)
        shadow.written(memory.ctypes.data + missing + 1, 15 - missing)
        assert [given > missing for given in range(17)] == [bool(run(given, shadow=shadow)) for given in range(17)]


def test_all_of_a_partial_copys_target_is_written(copies):
    memory, run = copies(
        16, "cvt.u32.u64 %y, %q; cvt.u32.u64 %x, %p; sub.u32 %y, %y, %x; add.u32 %y, %y, %s;@%go st.shared.u8 [%y], %t;"
    )
    shadow = jit.Shadow(memory.ctypes.data, memory.nbytes, Instrument.RACECHECK)
    assert list(range(16)) == [byte for byte in range(17) if run(4, byte, block=2, shadow=shadow)]


def test_matrix_row_outside_of_shared_memory_is_reported(check):
    body = """.reg .b32 %r<4>; mad.lo.u32 %x, %t, 16, %s; add.u32 %x, %x, 1024;
    ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%r0, %r1}, [%x]; ret;"""
    (found,) = check(Instrument.MEMCHECK, body, 32)
    assert (DefectCode.INVALID, "read", "shared", 16, 15) == (
        *(found.defect, found.mode, found.space, found.size),
        found.count,
    )


def test_matrix_rows_that_are_read_together_are_reported_where_each_is_read(check):
    body = """.reg .b32 %r<4>; mad.lo.u32 %x, %t, 16, %s;
    ldmatrix.sync.aligned.m8n8.x2.shared.b16 {{%r0, %r1}}, [%x];
    ldmatrix.sync.aligned.m8n8.x2.shared.b16 {{%r2, %r3}}, [%x+{offset}]; ret;"""
    assert [] == check(Instrument.MEMCHECK, body.format(offset=16), 32)
    (first,) = check(Instrument.MEMCHECK, body.format(offset=1024), 32)
    swapped = body.replace("[%x]", "[%x+1024]").format(offset=16)
    (before,) = check(Instrument.MEMCHECK, swapped, 32)
    assert (DefectCode.INVALID, 15, before.line + 1) == (first.defect, first.count, first.line)


EXCHANGE = """setp.eq.u32 %go, %t, 0; @%go mbarrier.init.shared.b64 [%d], 64; bar.sync 0;
mad.lo.u32 %x, %t, 4, %s; st.shared.u32 [%x], %t; {meet}
xor.b32 %y, %t, 63; mad.lo.u32 %x, %y, 4, %s; ld.shared.u32 %y, [%x]; ret;"""


@pytest.mark.parametrize("kinds", [Instrument.RACECHECK, Instrument.MEMCHECK | Instrument.RACECHECK])
@pytest.mark.parametrize("space, address", [(".shared", "%d"), ("", "%o")])
def test_mbarrier_orders_what_it_separates(check, kinds, space, address):
    meet = f"""mov.u64 %o, bar; cvta.shared.u64 %o, %o; mbarrier.arrive{space}.b64 %state, [{address}];
    again: mbarrier.try_wait{space}.b64 %go, [{address}], %state; @!%go bra again;"""
    assert [] == check(kinds, EXCHANGE.format(meet=meet), 64)
    assert DefectCode.READ_AFTER_WRITE in {
        found.defect for found in check(Instrument.RACECHECK, EXCHANGE.format(meet=""), 64)
    }
