"""cp.async and mbarrier: copies are late but not lost, phases complete when all have arrived, and deadlocks are seen."""

from __future__ import annotations

import numpy as np
import pytest

from cudatool.sim import jit

HEAD = """.reg .b32 %t, %x, %y, %s, %d; .reg .b64 %p, %q, %o, %state; .reg .pred %go; .shared .align 16 .b8 s[4096];
.shared .align 8 .b64 bar; .shared .align 8 .b64 more;
mov.u32 %t, %tid.x; ld.param.u64 %p, [p]; ld.param.u64 %q, [q]; mov.u32 %s, s; mov.u32 %d, bar;
"""
PARAMS = ".param .u64 p, .param .u64 q"


@pytest.fixture(name="launch")
def launch_fixture(launch_in_turn):
    return launch_in_turn


@pytest.mark.parametrize("size", [4, 8, 16])
@pytest.mark.parametrize("wait", ["cp.async.wait_all;", "cp.async.commit_group; cp.async.wait_group 0;"])
def test_copy_is_there_after_the_wait(ptx_kernel, launch, size, wait):
    data = np.random.default_rng(1).integers(0, 2**32, 64 * size // 4, np.uint32)
    result = np.zeros_like(data)
    loads = "\n".join(
        f"ld.shared.u32 %x, [%s+{offset}]; st.global.u32 [%q+{offset}], %x;" for offset in range(0, size, 4)
    )
    body = f"""{HEAD} mul.wide.u32 %o, %t, {size}; add.u64 %p, %p, %o; add.u64 %q, %q, %o; mad.lo.u32 %s, %t, {size}, %s;
    cp.async.{"cg" if size == 16 else "ca"}.shared.global.L2::128B [%s], [%p], {size}; {wait} {loads} ret;"""
    launch(ptx_kernel(PARAMS, body), 1, 64, data, result)
    assert data.tolist() == result.tolist()


def test_copy_without_a_wait_is_not_there(ptx_kernel, launch):
    data, result = np.full(1, 7, np.uint32), np.zeros(1, np.uint32)
    body = f"""{HEAD} mov.u32 %x, 1; st.shared.u32 [%s], %x; cp.async.ca.shared.global [%s], [%p], 4;
    cp.async.commit_group; bar.sync 0; ld.shared.u32 %x, [%s]; st.global.u32 [%q], %x; ret;"""
    launch(ptx_kernel(PARAMS, body), 1, 1, data, result)
    assert [1] == result.tolist()


def test_wait_group_leaves_the_latest_groups_pending(ptx_kernel, launch):
    data, result = np.arange(10, 14, dtype=np.uint32), np.zeros((4, 4), np.uint32)
    copies = "\n".join(
        f"cp.async.ca.shared.global [%s+{4 * n}], [%p+{4 * n}], 4; cp.async.commit_group;" for n in range(4)
    )
    look = "\n".join(
        f"cp.async.wait_group {3 - n};"
        + "".join(f"ld.shared.u32 %x, [%s+{4 * m}]; st.global.u32 [%q+{16 * n + 4 * m}], %x;" for m in range(4))
        for n in range(4)
    )
    body = f"{HEAD} st.shared.v4.b32 [%s], {{0, 0, 0, 0}}; {copies} {look} ret;"
    launch(ptx_kernel(PARAMS, body), 1, 1, data, result)
    assert [[10, 0, 0, 0], [10, 11, 0, 0], [10, 11, 12, 0], [10, 11, 12, 13]] == result.tolist()


def test_more_copies_than_the_queue_holds(ptx_kernel, launch):
    data, result = np.arange(40, dtype=np.uint32), np.zeros(40, np.uint32)
    copies = "\n".join(f"cp.async.ca.shared.global [%s+{4 * n}], [%p+{4 * n}], 4;" for n in range(40))
    back = "\n".join(f"ld.shared.u32 %x, [%s+{4 * n}]; st.global.u32 [%q+{4 * n}], %x;" for n in range(40))
    launch(ptx_kernel(PARAMS, f"{HEAD} {copies} cp.async.wait_all; {back} ret;"), 1, 1, data, result)
    assert data.tolist() == result.tolist()


@pytest.mark.parametrize("given", range(0, 17, 3))
def test_bytes_that_are_not_given_are_zero(ptx_kernel, launch, given):
    data, result = np.arange(1, 17, dtype=np.uint8), np.full(16, 0xEE, np.uint8)
    body = f""".reg .b32 %v<4>; {HEAD} st.shared.v4.b32 [%s], {{-1, -1, -1, -1}}; mov.u32 %x, {given};
    cp.async.cg.shared.global [%s], [%p], 16, %x; cp.async.wait_all;
    ld.shared.v4.b32 {{%v0, %v1, %v2, %v3}}, [%s]; st.global.v4.b32 [%q], {{%v0, %v1, %v2, %v3}}; ret;"""
    launch(ptx_kernel(PARAMS, body), 1, 1, data, result)
    assert [*range(1, given + 1), *[0] * (16 - given)] == result.tolist()


def test_ignored_source_is_zero(ptx_kernel, launch):
    data, result = np.full(2, 5, np.uint32), np.ones(2, np.uint32)
    body = f"""{HEAD} setp.eq.u32 %go, %t, 0; mul.wide.u32 %o, %t, 4; add.u64 %q, %q, %o; add.u64 %p, %p, %o;
    mad.lo.u32 %s, %t, 4, %s; cp.async.ca.shared.global [%s], [%p], 4, %go; cp.async.wait_all;
    ld.shared.u32 %x, [%s]; st.global.u32 [%q], %x; ret;"""
    launch(ptx_kernel(PARAMS, body), 1, 2, data, result)
    assert [0, 5] == result.tolist()


def test_nothing_is_left_over_for_the_next_block(ptx_kernel, launch):
    data, result = np.arange(8, dtype=np.uint32), np.zeros(8, np.uint32)
    body = f"""{HEAD} mov.u32 %x, %ctaid.x; mul.wide.u32 %o, %x, 4; add.u64 %p, %p, %o; add.u64 %q, %q, %o;
    bar.sync 0; cp.async.ca.shared.global [%s], [%p], 4; and.b32 %y, %x, 1; setp.eq.u32 %go, %y, 0; @%go ret;
    cp.async.wait_all; bar.sync 0; ld.shared.u32 %x, [%s]; st.global.u32 [%q], %x; ret;"""
    launch(ptx_kernel(PARAMS, body), 8, 1, data, result)
    assert [0, 1, 0, 3, 0, 5, 0, 7] == result.tolist()


def test_bulk_copy_completes_the_phase_that_expects_its_bytes(ptx_kernel, launch):
    data, result = np.arange(256, dtype=np.uint32), np.zeros(256, np.uint32)
    body = f"""{HEAD} setp.ne.u32 %go, %t, 0; @!%go mbarrier.init.shared.b64 [%d], 1; bar.sync 0; @%go bra wait;
    mbarrier.arrive.expect_tx.shared.b64 _, [%d], 1024;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%s], [%p], 1024, [%d];
    wait: mbarrier.try_wait.parity.shared.b64 %go, [%d], 0; @!%go bra wait;
    mad.lo.u32 %x, %t, 4, %s; ld.shared.u32 %y, [%x]; add.u32 %y, %y, 1; st.shared.u32 [%x], %y; bar.sync 0;
    setp.ne.u32 %go, %t, 0; @%go ret; cp.async.bulk.global.shared::cta.bulk_group [%q], [%s], 1024;
    cp.async.bulk.commit_group; cp.async.bulk.wait_group.read 0; ret;"""
    launch(ptx_kernel(PARAMS, body), 1, 256, data, result)
    assert (data + 1).tolist() == result.tolist()


# ---- mbarrier ----

INIT = "setp.eq.u32 %go, %t, 0; @%go mbarrier.init.shared.b64 [%d], {count}; bar.sync 0;"
WAIT = "again{n}: mbarrier.{wait}.shared.b64 %go, [%d], {what}; @!%go bra again{n};"


@pytest.mark.parametrize("wait", ["test_wait", "try_wait", "test_wait.parity", "try_wait.parity"])
@pytest.mark.parametrize("threads", [1, 40, 96])
def test_all_threads_meet_at_an_mbarrier(ptx_kernel, launch, threads, wait):
    """Each phase, a thread reads what its neighbour wrote in the phase before."""
    result = np.zeros(threads, np.uint32)
    rounds = []
    for n in range(3):
        parity = "parity" in wait
        rounds.append(
            f"""st.shared.u32 [%s], %x; mbarrier.arrive.shared.b64 %state, [%d];
            {WAIT.format(n=n, wait=wait, what=n % 2 if parity else "%state")}
            ld.shared.u32 %x, [%y]; add.u32 %x, %x, 1; add.u32 %s, %s, 1024; add.u32 %y, %y, 1024;"""
        )
    body = f"""{HEAD} {INIT.format(count=threads)} mul.wide.u32 %o, %t, 4; add.u64 %q, %q, %o;
    add.u32 %x, %t, 1; rem.u32 %x, %x, {threads}; mad.lo.u32 %y, %x, 4, %s; mad.lo.u32 %s, %t, 4, %s; mov.u32 %x, %t;
    {" ".join(rounds)} st.global.u32 [%q], %x; ret;"""
    launch(ptx_kernel(PARAMS, body), 2, threads, result, result)
    assert [(thread + 3) % threads + 3 for thread in range(threads)] == result.tolist()


def test_counts_of_arrivals(ptx_kernel, launch):
    """The state before an arrival tells the pending count; arrive_drop lowers what the next phases expect."""
    result = np.zeros(6, np.uint32)
    body = f"""{HEAD} mbarrier.init.shared.b64 [%d], 5;
    mbarrier.arrive.shared.b64 %state, [%d]; mbarrier.pending_count.b64 %x, %state; st.global.u32 [%q], %x;
    mbarrier.arrive.noComplete.shared.b64 %state, [%d], 2; mbarrier.pending_count.b64 %x, %state; st.global.u32 [%q+4], %x;
    mbarrier.arrive_drop.shared.b64 %state, [%d]; mbarrier.pending_count.b64 %x, %state; st.global.u32 [%q+8], %x;
    mbarrier.test_wait.shared.b64 %go, [%d], %state; selp.u32 %x, 1, 0, %go; st.global.u32 [%q+12], %x;
    mbarrier.arrive.release.cta.shared::cta.b64 %state, [%d]; mbarrier.test_wait.shared.b64 %go, [%d], %state;
    selp.u32 %x, 1, 0, %go; st.global.u32 [%q+16], %x;
    mbarrier.arrive.shared.b64 %state, [%d]; mbarrier.pending_count.b64 %x, %state; st.global.u32 [%q+20], %x;
    mbarrier.inval.shared.b64 [%d]; ret;"""
    launch(ptx_kernel(PARAMS, body), 1, 1, result, result)
    assert [5, 4, 2, 0, 1, 4] == result.tolist()


def test_expected_bytes_hold_the_phase_back(ptx_kernel, launch):
    result = np.zeros(3, np.uint32)
    look = "mbarrier.test_wait.parity.shared.b64 %go, [%d], 0; selp.u32 %x, 1, 0, %go; st.global.u32 [%q+{at}], %x;"
    body = f"""{HEAD} mbarrier.init.shared.b64 [%d], 1;
    mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%d], 64; {look.format(at=0)}
    mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%d], 48; {look.format(at=4)}
    mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%d], 16; {look.format(at=8)} ret;"""
    launch(ptx_kernel(PARAMS, body), 1, 1, result, result)
    assert [0, 0, 1] == result.tolist()


@pytest.mark.parametrize("noinc", ["", ".noinc"])
def test_arrival_when_copies_are_done(ptx_kernel, launch, noinc):
    """With .noinc the copies' arrival is one of those that the phase expects; else it is extra."""
    threads = 64
    data, result = np.arange(threads, dtype=np.uint32), np.zeros(threads, np.uint32)
    own = "" if noinc else "mbarrier.arrive.shared.b64 %state, [%d];"
    body = f"""{HEAD} {INIT.format(count=threads)} mul.wide.u32 %o, %t, 4; add.u64 %p, %p, %o; add.u64 %q, %q, %o;
    xor.b32 %y, %t, 63; mad.lo.u32 %y, %y, 4, %s; mad.lo.u32 %s, %t, 4, %s;
    cp.async.ca.shared.global [%s], [%p], 4; cp.async.mbarrier.arrive{noinc}.shared.b64 [%d]; {own}
    {WAIT.format(n=0, wait="try_wait.parity", what=0)} ld.shared.u32 %x, [%y]; st.global.u32 [%q], %x; ret;"""
    launch(ptx_kernel(PARAMS, body), 1, threads, data, result)
    assert data[::-1].tolist() == result.tolist()


def test_producer_and_consumer_warps(ptx_kernel, launch):
    """One warp fills a buffer and signals; the other waits for it, and signals that it may be filled again."""
    rounds = 4
    result = np.zeros((rounds, 32), np.uint32)
    body = f"""{HEAD} .reg .b32 %n, %e, %w; .reg .pred %producer; mov.u32 %e, more;
    setp.eq.u32 %go, %t, 0; @%go mbarrier.init.shared.b64 [%d], 32; @%go mbarrier.init.shared.b64 [%e], 32; bar.sync 0;
    shr.u32 %w, %t, 5; and.b32 %t, %t, 31; mad.lo.u32 %s, %t, 4, %s; mul.wide.u32 %o, %t, 4; add.u64 %q, %q, %o;
    mov.u32 %n, 0; setp.eq.u32 %producer, %w, 1;
    loop: and.b32 %y, %n, 1; @!%producer bra consume;
    xor.b32 %x, %y, 1;
    empty: mbarrier.try_wait.parity.shared.b64 %go, [%e], %x; @!%go bra empty;
    mad.lo.u32 %x, %n, 100, %t; st.shared.u32 [%s], %x; mbarrier.arrive.shared.b64 _, [%d]; bra next;
    consume: mbarrier.try_wait.parity.shared.b64 %go, [%d], %y; @!%go bra consume;
    ld.shared.u32 %x, [%s]; st.global.u32 [%q], %x; mbarrier.arrive.shared.b64 _, [%e]; add.u64 %q, %q, 128;
    next: add.u32 %n, %n, 1; setp.lt.u32 %go, %n, {rounds}; @%go bra loop; ret;"""
    launch(ptx_kernel(PARAMS, body), 1, 64, result, result)
    assert (100 * np.arange(rounds)[:, None] + np.arange(32)).tolist() == result.tolist()


@pytest.mark.parametrize("wait", ["try_wait", "test_wait"])
def test_missing_arrival_is_a_deadlock(ptx_kernel, launch, wait):
    body = f"""{HEAD} {INIT.format(count=33)} mbarrier.arrive.shared.b64 %state, [%d];
    {WAIT.format(n=0, wait=wait, what="%state")} ret;"""
    kernel = ptx_kernel(PARAMS, body)
    data = np.zeros(1, np.uint32)
    with pytest.raises(jit.KernelDeadlock, match=rf"mbarrier\.{wait}"):
        launch(kernel, 1, 32, data, data)


@pytest.mark.parametrize("wait", ["try_wait.parity", "test_wait.parity"])
@pytest.mark.parametrize("spins", [False, True])
def test_a_wait_that_gives_up_may_be_what_others_wait_for(ptx_kernel, launch, wait, spins):
    """Warp 0 tries the first mbarrier, which it completes itself later, and the second, which warp 1 completes."""
    result = np.zeros(32, np.uint32)
    look = "mbarrier.{wait}.shared.b64 %go, [%d+{at}], 0;"
    spin = "again: ld.volatile.shared.u32 %x, [s]; setp.eq.u32 %go, %x, 0; @%go bra again;" if spins else ""
    body = f"""{HEAD} .shared .align 8 .b64 pair[2]; mov.u32 %d, pair; setp.eq.u32 %go, %t, 0; mov.u32 %x, 0;
    st.shared.u32 [s], %x; @%go mbarrier.init.shared.b64 [%d], 32; @%go mbarrier.init.shared.b64 [%d+8], 32; bar.sync 0;
    mul.wide.u32 %o, %t, 4; add.u64 %q, %q, %o; setp.lt.u32 %go, %t, 32; @!%go bra other;
    {look.format(wait=wait, at=0)} selp.u32 %y, 1, 0, %go; mbarrier.arrive.shared.b64 _, [%d]; st.shared.u32 [s], %t;
    mov.u32 %x, 1; st.volatile.shared.u32 [s], %x;
    poll: {look.format(wait=wait, at=0)} @%go bra both; {look.format(wait=wait, at=8)} bra poll;
    both: {look.format(wait=wait, at=8)} @!%go bra poll; add.u32 %y, %y, 10; st.global.u32 [%q], %y; ret;
    other: {spin} {look.format(wait="try_wait.parity", at=0)} @!%go bra other; mbarrier.arrive.shared.b64 _, [%d+8]; ret;"""
    launch(ptx_kernel(PARAMS, body), 1, 64, result, result)
    assert [10] * 32 == result.tolist()


def test_generic_addresses_of_an_mbarrier(ptx_kernel, launch):
    result = np.zeros(64, np.uint32)
    body = f"""{HEAD} .reg .b64 %b; mov.u64 %b, bar; cvta.shared.u64 %b, %b; setp.eq.u32 %go, %t, 0;
    @%go mbarrier.init.b64 [%b], 64; bar.sync 0; mbarrier.arrive.b64 %state, [%b]; mul.wide.u32 %o, %t, 4;
    add.u64 %q, %q, %o; again: mbarrier.try_wait.b64 %go, [%b], %state; @!%go bra again;
    mbarrier.pending_count.b64 %x, %state; min.u32 %x, %x, 1; st.global.u32 [%q], %x; bar.sync 0;
    setp.eq.u32 %go, %t, 0; @%go mbarrier.inval.b64 [%b]; ret;"""
    launch(ptx_kernel(PARAMS, body), 1, 64, result, result)
    assert [1] * 64 == result.tolist()


def test_arrivals_at_a_barrier_count_for_those_who_wait(ptx_kernel, launch):
    """Warp 0 produces and goes on; warp 1 waits for it. Each of three rounds uses two barriers."""
    result = np.zeros((3, 32), np.uint32)
    body = f"""{HEAD} .reg .b32 %n, %w; .reg .pred %first; shr.u32 %w, %t, 5; and.b32 %t, %t, 31; setp.eq.u32 %first, %w, 0;
    mad.lo.u32 %s, %t, 4, %s; mul.wide.u32 %o, %t, 4; add.u64 %q, %q, %o; mov.u32 %n, 0;
    @%first bra produce; bar.arrive 2, 64; bra consume;
    produce: bar.sync 2, 64; mad.lo.u32 %x, %n, 100, %t; st.shared.u32 [%s], %x; barrier.cta.arrive 1, 64;
    add.u32 %n, %n, 1; setp.lt.u32 %go, %n, 3; @%go bra produce; bra end;
    consume: bar.sync 1, 64; ld.shared.u32 %x, [%s]; st.global.u32 [%q], %x; add.u64 %q, %q, 128;
    add.u32 %n, %n, 1; setp.lt.u32 %go, %n, 3; @!%go bra end; bar.arrive 2, 64; bra consume;
    end: bar.sync 0; ret;"""
    launch(ptx_kernel(PARAMS, body), 2, 64, result, result)
    assert (100 * np.arange(3)[:, None] + np.arange(32)).tolist() == result.tolist()
