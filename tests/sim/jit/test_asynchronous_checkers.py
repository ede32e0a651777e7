"""What checkers see of asynchronous copies, mbarriers and matrix loads."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from cudatool.sim import jit
from cudatool.sim.jit import Defect, Instrument

HEAD = """.reg .b64 %p, %q, %o, %state; .reg .b32 %t, %x, %y, %s, %d; .reg .pred %go; .shared .align 16 .b8 s[1024];
.shared .align 8 .b64 bar; ld.param.u64 %p, [p]; mov.u32 %t, %tid.x; mov.u32 %s, s; mov.u32 %d, bar;
"""


@pytest.fixture
def check(ptx_kernel):
    """Run a body under checkers; the first `allocated` bytes at %p are memory, and have values."""
    whole = np.zeros(3 * 4096, np.uint8)
    memory = whole[-whole.ctypes.data % 4096 :][:8192]

    def run(kinds, body, block, allocated=4096):
        shadow = jit.Shadow(memory.ctypes.data, memory.nbytes, kinds)
        shadow.allocated(memory.ctypes.data, allocated)
        shadow.written(memory.ctypes.data, allocated)
        params = ctypes.c_uint64(memory.ctypes.data)
        return ptx_kernel(".param .u64 p", HEAD + body).launch(
            grid=(1, 1, 1), block=(block, 1, 1), shared_bytes=0, params=ctypes.addressof(params), shadow=shadow
        )

    return run


def test_copy_from_behind_an_allocation_is_reported(check):
    body = "cp.async.cg.shared.global [%s], [%p+96], 16; cp.async.wait_all; ret;"
    (found,) = check(Instrument.MEMCHECK, body, 1, allocated=100)
    assert (Defect.INVALID, "read", "global", 16) == (found.defect, found.mode, found.space, found.size)
    assert [] == check(Instrument.MEMCHECK, body, 1, allocated=112)


def test_only_the_bytes_that_are_given_are_read(check):
    body = "mov.u32 %x, {given}; cp.async.cg.shared.global [%s], [%p+96], 16, %x; cp.async.wait_all; ret;"
    assert [] == check(Instrument.MEMCHECK, body.format(given=4), 1, allocated=100)
    assert [] == check(Instrument.MEMCHECK, body.format(given=0), 1, allocated=96)
    (found,) = check(Instrument.MEMCHECK, body.format(given=5), 1, allocated=100)
    assert (Defect.INVALID, 1) == (found.defect, found.size)


def test_matrix_row_outside_of_shared_memory_is_reported(check):
    body = """.reg .b32 %r<4>; mad.lo.u32 %x, %t, 16, %s; add.u32 %x, %x, 1024;
    ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%r0, %r1}, [%x]; ret;"""
    (found,) = check(Instrument.MEMCHECK, body, 32)
    assert (Defect.INVALID, "read", "shared", 16, 15) == (
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
    assert (Defect.INVALID, 15, before.line + 1) == (first.defect, first.count, first.line)


EXCHANGE = """setp.eq.u32 %go, %t, 0; @%go mbarrier.init.shared.b64 [%d], 64; bar.sync 0;
mad.lo.u32 %x, %t, 4, %s; st.shared.u32 [%x], %t; {meet}
xor.b32 %y, %t, 63; mad.lo.u32 %x, %y, 4, %s; ld.shared.u32 %y, [%x]; ret;"""


@pytest.mark.parametrize("kinds", [Instrument.RACECHECK, Instrument.MEMCHECK | Instrument.RACECHECK])
@pytest.mark.parametrize("space, address", [(".shared", "%d"), ("", "%o")])
def test_mbarrier_orders_what_it_separates(check, kinds, space, address):
    meet = f"""mov.u64 %o, bar; cvta.shared.u64 %o, %o; mbarrier.arrive{space}.b64 %state, [{address}];
    again: mbarrier.try_wait{space}.b64 %go, [{address}], %state; @!%go bra again;"""
    assert [] == check(kinds, EXCHANGE.format(meet=meet), 64)
    assert Defect.READ_AFTER_WRITE in {
        found.defect for found in check(Instrument.RACECHECK, EXCHANGE.format(meet=""), 64)
    }
