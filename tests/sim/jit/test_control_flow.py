"""Branches, barriers, warp collectives, shared and local memory, device functions."""

from __future__ import annotations

import numpy as np
import pytest

from cudatool.sim import jit

TID = ".reg .b32 %t, %x, %y, %z, %w; .reg .b64 %a, %b; .reg .pred %p, %q;\nmov.u32 %t, %tid.x;\nld.param.u64 %a, [p];\n"
MINE = "mad.wide.u32 %b, %t, 4, %a;\n"


@pytest.fixture(name="launch")
def launch_fixture(launch_in_turn):
    return launch_in_turn


@pytest.fixture
def run(ptx_kernel, launch):
    """Run a kernel of one array of u32, one element for each thread of one block."""

    def go(body: str, data: np.ndarray, shared_bytes: int = 0, **options) -> np.ndarray:
        result = data.astype("u4")
        kernel = ptx_kernel(".param .u64 p", TID + MINE + body, **options)
        launch(kernel, 1, len(data), result, shared_bytes=shared_bytes)
        return result

    return go


SIZES = [1, 31, 32, 33, 64, 100, 256]


def test_loop_with_a_different_count_for_each_thread(run):
    found = run(
        "mov.u32 %x, 0; mov.u32 %y, 0;\nL: setp.ge.u32 %p, %y, %t; @%p bra E; add.u32 %x, %x, %y;"
        "add.u32 %y, %y, 1; bra L;\nE: st.global.u32 [%b], %x; ret;",
        np.zeros(70),
    )
    assert [t * (t - 1) // 2 for t in range(70)] == found.tolist()


def test_indexed_branch(run):
    body = """and.b32 %x, %t, 3; brx.idx %x, T;
    T: .branchtargets A, B, C, C;
    A: mov.u32 %y, 10; bra E;
    B: mov.u32 %y, 11; bra E;
    C: mov.u32 %y, 12;
    E: st.global.u32 [%b], %y; ret;"""
    assert [10, 11, 12, 12] * 2 == run(body, np.zeros(8)).tolist()


@pytest.mark.parametrize("size", SIZES)
def test_barrier_separates_writes_from_reads(run, size):
    body = f""".shared .align 4 .b8 s[1024];
    mov.u32 %y, s; shl.b32 %x, %t, 2; add.u32 %y, %y, %x; ld.global.u32 %w, [%b]; st.shared.u32 [%y], %w;
    bar.sync 0;
    sub.u32 %x, {size - 1}, %t; shl.b32 %x, %x, 2; mov.u32 %y, s; add.u32 %y, %y, %x;
    ld.shared.u32 %w, [%y]; st.global.u32 [%b], %w; ret;"""
    assert list(range(size))[::-1] == run(body, np.arange(size)).tolist()


def test_barrier_in_a_loop(run):
    """A tree sum with a barrier in each round."""
    body = """.shared .align 4 .b8 s[1024];
    shl.b32 %x, %t, 2; mov.u32 %y, s; add.u32 %x, %x, %y; ld.global.u32 %w, [%b]; st.shared.u32 [%x], %w;
    mov.u32 %y, 128;
    L: bar.sync 0;
    setp.ge.u32 %p, %t, %y; @%p bra S;
    shl.b32 %z, %y, 2; add.u32 %z, %z, %x; ld.shared.u32 %z, [%z]; ld.shared.u32 %w, [%x];
    add.u32 %w, %w, %z; st.shared.u32 [%x], %w;
    S: shr.u32 %y, %y, 1; setp.ne.u32 %p, %y, 0; @%p bra L;
    bar.sync 0; ld.shared.u32 %w, [s]; st.global.u32 [%b], %w; ret;"""
    assert [sum(range(256))] * 256 == run(body, np.arange(256)).tolist()


def test_barriers_in_both_arms_of_a_branch_match(run):
    """Half of the warps wait at one barrier instruction, half at another, with the same number."""
    body = """.shared .align 4 .b8 s[512];
    shl.b32 %x, %t, 2; mov.u32 %y, s; add.u32 %x, %x, %y;
    setp.lt.u32 %p, %t, 64; st.shared.u32 [%x], %t;
    @%p bra A; bar.sync 0; bra E;
    A: bar.sync 0;
    E: xor.b32 %z, %t, 127; shl.b32 %z, %z, 2; add.u32 %z, %z, %y; ld.shared.u32 %w, [%z]; st.global.u32 [%b], %w; ret;"""
    assert [t ^ 127 for t in range(128)] == run(body, np.zeros(128)).tolist()


def test_threads_that_end_early_do_not_hold_up_a_barrier(run):
    body = """.shared .align 4 .b8 s[512];
    setp.ge.u32 %p, %t, 70; @%p ret;
    shl.b32 %x, %t, 2; mov.u32 %y, s; add.u32 %x, %x, %y; st.shared.u32 [%x], %t;
    bar.sync 0;
    ld.shared.u32 %w, [s+276]; st.global.u32 [%b], %w; ret;"""
    assert [69] * 70 + [5] * 30 == run(body, np.full(100, 5)).tolist()


def test_values_survive_a_barrier(run):
    """A predicate, a float, a 64-bit number and one that depends on memory."""
    body = """.reg .f32 %f; .reg .b64 %l; ld.global.u32 %x, [%b]; setp.gt.u32 %p, %x, 3; cvt.rn.f32.u32 %f, %x;
    mul.wide.u32 %l, %x, 3000000000;
    bar.sync 0;
    cvt.rzi.u32.f32 %y, %f; shr.u64 %l, %l, 20; cvt.u32.u64 %z, %l; add.u32 %y, %y, %z;
    selp.u32 %y, %y, 0, %p; st.global.u32 [%b], %y; ret;"""
    expected = [x + (x * 3000000000 >> 20) if x > 3 else 0 for x in range(8)]
    assert expected == run(body, np.arange(8)).tolist()


def test_values_survive_regions_that_do_not_use_them_or_change_them_for_some_threads(run):
    code = """.reg .b32 %keep, %change, %other; .reg .pred %odd, %p3;
    mul.lo.u32 %keep, %t, 3; mov.u32 %change, 100; and.b32 %other, %t, 1; setp.eq.u32 %odd, %other, 1;
    bar.sync 0;
    mov.u32 %other, 7;
    bar.sync 0;
    @%odd add.u32 %change, %change, %t;
    setp.gt.u32 %p3, %t, 20; @%p3 bra SKIP;
    bar.warp.sync 0x1fffff;
    add.u32 %change, %change, 1000;
    SKIP: bar.sync 0;
    add.u32 %x, %keep, %change; add.u32 %x, %x, %other; st.global.u32 [%b], %x; ret;"""
    expected = [3 * t + 100 + (t if t % 2 else 0) + (1000 if t <= 20 else 0) + 7 for t in range(64)]
    assert expected == run(code, np.zeros(64)).tolist()


def test_deadlock_is_reported_with_its_place(run):
    body = "setp.lt.u32 %p, %t, 32;\n@%p bra E;\nbar.sync 0, 64;\nE: bar.sync 1;\nret;"
    with pytest.raises(jit.KernelDeadlock, match=r"bar\.sync.*PTX line \d+"):
        run(body, np.zeros(64))


def test_named_barriers_of_some_warps(run):
    body = """.shared .align 4 .b8 s[256];
    shr.u32 %z, %t, 5; add.u32 %z, %z, 1; shl.b32 %x, %t, 2; mov.u32 %y, s; add.u32 %x, %x, %y;
    setp.lt.u32 %p, %t, 32; @%p bra A;
    st.shared.u32 [%x], %t; bar.sync %z, 32; xor.b32 %w, %x, 4; ld.shared.u32 %w, [%w]; bra E;
    A: mov.u32 %w, 77;
    E: st.global.u32 [%b], %w; ret;"""
    assert [77] * 32 + [t ^ 1 for t in range(32, 64)] == run(body, np.zeros(64)).tolist()


@pytest.mark.parametrize("divergent", [False, True])
@pytest.mark.parametrize(
    ("instruction", "expected"),
    [
        ("bar.red.popc.u32 %w, 0, %p;", lambda n: sum(t % 3 == 0 for t in range(n))),
        ("bar.red.or.pred %q, 0, %p; selp.u32 %w, 1, 0, %q;", lambda n: 1),
        ("bar.red.and.pred %q, 0, %p; selp.u32 %w, 1, 0, %q;", lambda n: 0),
    ],
)
def test_reducing_barrier(run, instruction, expected, divergent):
    body = "rem.u32 %x, %t, 3; setp.eq.u32 %p, %x, 0;"
    if divergent:
        body += "setp.gt.u32 %q, %t, 90; @%q bra E;"
    body += f"{instruction} st.global.u32 [%b], %w; E: ret;"
    found = run(body, np.full(96, 9)).tolist()
    count = 91 if divergent else 96
    assert [expected(count)] * count + [9] * (96 - count) == found


# ---- warp collectives ----

SHUFFLES = {
    "down": lambda lane, d: lane + d if lane + d < 32 else lane,
    "up": lambda lane, d: lane - d if lane >= d else lane,
    "bfly": lambda lane, d: lane ^ d,
    "idx": lambda lane, d: d,
}


@pytest.mark.parametrize("size", [32, 96])
@pytest.mark.parametrize("distance", [0, 1, 5, 16, 31])
@pytest.mark.parametrize("mode", SHUFFLES)
def test_shuffle(run, mode, distance, size):
    clamp = 0 if mode == "up" else 31
    body = (
        f"ld.global.u32 %x, [%b]; shfl.sync.{mode}.b32 %y|%p, %x, {distance}, {clamp}, -1; st.global.u32 [%b], %y; ret;"
    )
    found = run(body, np.arange(size) * 3)
    assert [3 * (t // 32 * 32 + SHUFFLES[mode](t % 32, distance)) for t in range(size)] == found.tolist()


def test_shuffle_predicate_and_segments(run):
    """Down by 3 in segments of 8: c = (32 - 8) << 8 | 31."""
    body = f"shfl.sync.down.b32 %y|%p, %t, 3, {24 << 8 | 31}, -1; selp.u32 %z, 100, 0, %p; add.u32 %y, %y, %z; st.global.u32 [%b], %y; ret;"
    assert [t + 103 if t % 8 < 5 else t for t in range(32)] == run(body, np.zeros(32)).tolist()


def test_shuffle_with_values_that_differ_between_lanes(run):
    body = "not.b32 %x, %t; and.b32 %x, %x, 31; mov.u32 %z, 31; shfl.sync.idx.b32 %y, %t, %x, %z, -1; st.global.u32 [%b], %y; ret;"
    assert [t // 32 * 32 + 31 - t % 32 for t in range(64)] == run(body, np.zeros(64)).tolist()


def test_shuffle_in_a_divergent_branch(run):
    body = """setp.ge.u32 %p, %t, 16; mov.u32 %y, 1000; @%p bra E;
    shfl.sync.down.b32 %y, %t, 1, 31, 0xffff;
    E: st.global.u32 [%b], %y; ret;"""
    found = run(body, np.zeros(32)).tolist()
    assert [*range(1, 16)] == found[:15]
    assert [1000] * 16 == found[16:]


def test_two_groups_of_a_warp_vote_separately(run):
    """The same instruction with two member masks, as tiles of cooperative groups do."""
    body = """setp.lt.u32 %p, %t, 16; selp.b32 %x, 0xffff, 0xffff0000, %p; setp.eq.u32 %q, %t, 3;
    vote.sync.any.pred %q, %q, %x; selp.u32 %y, 1, 0, %q; st.global.u32 [%b], %y; ret;"""
    assert [1] * 16 + [0] * 16 == run(body, np.zeros(32)).tolist()


@pytest.mark.parametrize("size", [32, 40])
def test_votes(run, size):
    body = """setp.lt.u32 %p, %t, 35; vote.sync.all.pred %q, %p, -1; selp.u32 %x, 1, 0, %q;
    vote.sync.any.pred %q, !%p, -1; selp.u32 %y, 2, 0, %q; add.u32 %x, %x, %y;
    vote.sync.uni.pred %q, %p, -1; selp.u32 %y, 4, 0, %q; add.u32 %x, %x, %y; st.global.u32 [%b], %x; ret;"""
    assert [5] * 32 + [2] * (size - 32) == run(body, np.zeros(size)).tolist()


def test_ballot_and_active_mask(run):
    body = """and.b32 %x, %t, 1; setp.eq.u32 %p, %x, 0; vote.sync.ballot.b32 %y, %p, -1;
    activemask.b32 %z; xor.b32 %y, %y, %z; st.global.u32 [%b], %y; ret;"""
    assert [0xAAAAAAAA] * 32 + [0b1010] * 4 == run(body, np.zeros(36)).tolist()


def test_active_mask_in_a_branch(run):
    body = "mov.u32 %z, 0; setp.lt.u32 %p, %t, 5; @!%p bra E; activemask.b32 %z; E: st.global.u32 [%b], %z; ret;"
    assert [31] * 5 + [0] * 27 == run(body, np.zeros(32)).tolist()


@pytest.mark.parametrize(
    ("form", "reference"),
    [
        ("add.s32", lambda v: sum(v) & 0xFFFFFFFF),
        ("min.u32", min),
        ("max.u32", max),
        ("min.s32", lambda v: min(x - (x >> 31 << 32) for x in v) & 0xFFFFFFFF),
        ("max.s32", lambda v: max(x - (x >> 31 << 32) for x in v) & 0xFFFFFFFF),
        ("and.b32", lambda v: int(np.bitwise_and.reduce(np.array(v, "u4")))),
        ("or.b32", lambda v: int(np.bitwise_or.reduce(np.array(v, "u4")))),
        ("xor.b32", lambda v: int(np.bitwise_xor.reduce(np.array(v, "u4")))),
    ],
)
def test_warp_reduction(run, form, reference):
    data = np.random.default_rng(1).integers(0, 2**32, 45, dtype="u4")
    found = run(f"ld.global.u32 %x, [%b]; redux.sync.{form} %y, %x, -1; st.global.u32 [%b], %y; ret;", data)
    assert [reference(data[:32].tolist())] * 32 + [reference(data[32:].tolist())] * 13 == found.tolist()


@pytest.mark.parametrize("bits", [32, 64])
def test_match_any(run, bits):
    body = f"""and.b32 %x, %t, 3; cvt.u64.u32 %a, %x; shl.b64 %a, %a, {bits - 3};
    cvt.u32.u64 %x, %a; match.any.sync.b{bits} %y, {"%x" if bits == 32 else "%a"}, -1; st.global.u32 [%b], %y; ret;"""
    assert [0x11111111 << t % 4 for t in range(32)] == run(body, np.zeros(32)).tolist()


def test_match_all(run):
    body = """shr.u32 %x, %t, 5; setp.eq.u32 %p, %t, 40; @%p mov.u32 %x, 9;
    match.all.sync.b32 %y|%q, %x, -1; selp.u32 %z, 1, 0, %q; sub.u32 %y, %y, %z; st.global.u32 [%b], %y; ret;"""
    assert [0xFFFFFFFE] * 32 + [0] * 32 == run(body, np.zeros(64)).tolist()


def test_elect_names_one_lane(run):
    body = "elect.sync %y|%p, 0xf0; selp.u32 %z, 1, 0, %p; setp.lt.u32 %q, %t, 4; st.global.u32 [%b], %z; ret;"
    prefix = "setp.lt.u32 %q, %t, 4; @%q ret; setp.gt.u32 %q, %t, 7; @%q ret;"
    assert [9, 9, 9, 9, 1, 0, 0, 0, *[9] * 24] == run(prefix + body, np.full(32, 9)).tolist()


def test_warp_barrier_orders_shared_memory(run):
    body = """.shared .align 4 .b8 s[128];
    shl.b32 %x, %t, 2; mov.u32 %y, s; add.u32 %x, %x, %y; st.shared.u32 [%x], %t; bar.warp.sync -1;
    xor.b32 %x, %x, 124; ld.shared.u32 %w, [%x]; st.global.u32 [%b], %w; ret;"""
    assert [t ^ 31 for t in range(32)] == run(body, np.zeros(32)).tolist()


# ---- memory of a thread, of a block ----


def test_dynamic_shared_memory_follows_static(run):
    body = """.shared .align 4 .b8 s[8];
    mov.u32 %x, dyn; mov.u32 %y, s; setp.ne.u32 %p, %t, 0; @%p bra W;
    st.shared.u32 [%y], 1; st.shared.u32 [%y+4], 2; st.shared.u32 [%x], 3; st.shared.u32 [%x+60], 4;
    W: bar.sync 0; ld.shared.u32 %z, [%y+4]; ld.shared.u32 %w, [dyn+60]; shl.b32 %w, %w, 8; or.b32 %z, %z, %w;
    st.global.u32 [%b], %z; ret;"""
    found = run(body, np.zeros(2), shared_bytes=64, before=".extern .shared .align 16 .b8 dyn[];")
    assert [0x402] * 2 == found.tolist()


@pytest.mark.parametrize("barrier", ["", "bar.sync 0;"])
@pytest.mark.parametrize("size", [40, 32768])
def test_local_arrays_belong_to_their_thread(run, barrier, size):
    body = f""".local .align 8 .b8 l[{size}];
    and.b32 %x, %t, 7; shl.b32 %x, %x, 2; mov.u32 %z, 0;
    L: cvt.u64.u32 %a, %z; add.u64 %a, %a, l; add.u32 %y, %t, %z; st.local.u32 [%a], %y; add.u32 %z, %z, 4;
    setp.lt.u32 %p, %z, 32; @%p bra L;
    {barrier}
    cvt.u64.u32 %a, %x; add.u64 %a, %a, l; ld.local.u32 %y, [%a]; st.global.u32 [%b], %y; ret;""".replace(
        "add.u64 %a, %a, l;", "mov.u64 %c, l; add.u64 %a, %a, %c;"
    )
    assert [t + t % 8 * 4 for t in range(40)] == run(".reg .b64 %c;" + body, np.zeros(40)).tolist()


def test_generic_addresses_reach_every_space(run):
    body = """.reg .b64 %c, %d; .shared .align 4 .b8 s[256]; .local .align 4 .b8 l[8];
    mov.u64 %c, s; cvta.shared.u64 %c, %c; mad.wide.u32 %c, %t, 4, %c; st.u32 [%c], %t;
    mov.u64 %d, l; cvta.local.u64 %d, %d; st.u32 [%d+4], %t;
    isspacep.shared %p, %c; selp.u32 %x, 1, 0, %p; isspacep.local %p, %d; @%p or.b32 %x, %x, 2;
    isspacep.global %p, %b; @%p or.b32 %x, %x, 4; isspacep.global %p, %c; @%p or.b32 %x, %x, 8;
    bar.sync 0;
    cvta.to.shared.u64 %c, %c; xor.b64 %c, %c, 4; ld.shared.u32 %y, [%c];
    ld.local.u32 %z, [l+4]; mad.lo.u32 %y, %y, 256, %z; mad.lo.u32 %y, %y, 16, %x; st.u32 [%b], %y; ret;"""
    assert [((t ^ 1) * 256 + t) * 16 + 7 for t in range(64)] == run(body, np.zeros(64)).tolist()


FUNCTIONS = """
.func (.param .b32 r) twice(.param .b32 x) {
    .reg .b32 %v; ld.param.b32 %v, [x]; add.u32 %v, %v, %v; st.param.b32 [r], %v; ret; }
.func (.param .b32 r) clipped(.param .align 4 .b8 s[8]) {
    .reg .b32 %v, %l; .reg .pred %p; ld.param.b32 %v, [s]; ld.param.b32 %l, [s+4]; setp.lt.u32 %p, %v, %l;
    @%p bra L; st.param.b32 [r], %l; ret;
    L: st.param.b32 [r], %v; ret; }
.func (.param .b32 r) meet(.param .b32 x) {
    .reg .b32 %v, %t, %u; .shared .align 4 .b8 box[512]; ld.param.b32 %v, [x];
    mov.u32 %t, %tid.x; shl.b32 %t, %t, 2; mov.u32 %u, box; add.u32 %t, %t, %u; st.shared.u32 [%t], %v;
    bar.sync 0; xor.b32 %t, %t, 4; ld.shared.u32 %v, [%t]; bar.sync 0; st.param.b32 [r], %v; ret; }
"""


def call(function: str, *words: str) -> str:
    stores = "".join(f"st.param.b32 [q+{4 * n}], {word};" for n, word in enumerate(words))
    return f"{{ .param .align 4 .b8 q[{4 * len(words)}]; {stores} .param .b32 o; call.uni (o), {function}, (q); ld.param.b32 %y, [o]; }}"


def test_device_functions(run):
    body = call("twice", "%t") + call("clipped", "%y", "20") + call("twice", "%y") + "st.global.u32 [%b], %y; ret;"
    assert [2 * min(2 * t, 20) for t in range(16)] == run(body, np.zeros(16), before=FUNCTIONS).tolist()


def test_barrier_inside_a_device_function_called_twice(run):
    body = call("meet", "%t") + "add.u32 %x, %y, 100;" + call("meet", "%x") + "st.global.u32 [%b], %y; ret;"
    assert [t + 100 for t in range(64)] == run(body, np.zeros(64), before=FUNCTIONS).tolist()


def test_scopes_may_reuse_names(run):
    body = """{ .reg .b32 v; .reg .pred p; mov.u32 v, 5; setp.gt.u32 p, %t, 3; @p bra L; add.u32 v, v, 1; L: mov.u32 %x, v; }
    { .reg .f32 v; cvt.rn.f32.u32 v, %t; { .reg .b32 v; mov.u32 v, 7; L: add.u32 %x, %x, v; } cvt.rzi.u32.f32 %y, v; }
    add.u32 %x, %x, %y; st.global.u32 [%b], %x; ret;"""
    assert [(5 if t > 3 else 6) + 7 + t for t in range(8)] == run(body, np.zeros(8)).tolist()


def test_blocks_of_three_dimensions(ptx_kernel, launch):
    body = """.reg .b32 %x, %y, %z, %n, %m, %i; .reg .b64 %a;
    mov.u32 %x, %tid.x; mov.u32 %y, %tid.y; mov.u32 %z, %tid.z; mov.u32 %n, %ntid.x; mov.u32 %m, %ntid.y;
    mad.lo.u32 %i, %z, %m, %y; mad.lo.u32 %i, %i, %n, %x;
    mov.u32 %x, %ctaid.x; mov.u32 %y, %ctaid.y; mov.u32 %z, %ctaid.z; mov.u32 %n, %nctaid.x; mov.u32 %m, %nctaid.y;
    mad.lo.u32 %z, %z, %m, %y; mad.lo.u32 %z, %z, %n, %x;
    mad.lo.u32 %i, %z, 30, %i;
    ld.param.u64 %a, [p]; mad.wide.u32 %a, %i, 4, %a; mov.u32 %x, %laneid; mov.u32 %y, %warpid;
    mad.lo.u32 %x, %i, 100, %x; mad.lo.u32 %x, %y, 10000, %x; st.global.u32 [%a], %x; ret;"""
    data = np.zeros(30 * 8, "u4")
    launch(ptx_kernel(".param .u64 p", body), (2, 2, 2), (5, 3, 2), data)
    assert [i * 100 + i % 30 for i in range(240)] == data.tolist()


@pytest.mark.parametrize("seed", [None, 1, 2])
@pytest.mark.parametrize("threads", [1, 3])
def test_every_block_runs_once(ptx_kernel, launch, threads, seed):
    body = TID + "mov.u32 %x, %ctaid.x; mad.wide.u32 %b, %x, 4, %a; atom.global.add.u32 %y, [%b], 1; ret;"
    data = np.zeros(1000, "u4")
    launch(ptx_kernel(".param .u64 p", body), 1000, 3, data, threads=threads, seed=seed)
    assert [3] * 1000 == data.tolist()


def test_seed_permutes_the_order_of_blocks(ptx_kernel, launch):
    body = (
        TID
        + "atom.global.add.u32 %x, [%a], 1; add.u32 %x, %x, 1; mov.u32 %y, %ctaid.x; mad.wide.u32 %b, %x, 4, %a; st.global.u32 [%b], %y; ret;"
    )
    kernel = ptx_kernel(".param .u64 p", body)
    orders = []
    for seed in (None, 5, 5, 6):
        data = np.zeros(65, "u4")
        launch(kernel, 64, 1, data, seed=seed)
        orders.append(data[1:].tolist())
    assert list(range(64)) == orders[0]
    assert orders[1] == orders[2]
    assert orders[1] != orders[0] != orders[3]
    assert sorted(orders[3]) == orders[0]


@pytest.mark.parametrize("name", ["b0", "v1", "l1", "entry", "params", "slots", "zero", "context", "tx", "lanes"])
def test_register_may_have_any_name(run, name):
    found = run(
        f".reg .b32 {name}; mov.u32 {name}, %t; mov.u32 %x, 0;\n"
        f"L: add.u32 %x, %x, {name}; sub.u32 {name}, {name}, 1; setp.gt.s32 %p, {name}, 0; @%p bra L;\n"
        f"vote.sync.ballot.b32 %y, %p, -1; add.u32 {name}, %x, %y; st.global.u32 [%b], {name}; ret;",
        np.zeros(32),
    )
    assert [t * (t + 1) // 2 for t in range(32)] == found.tolist()


def test_vectors_are_moved_as_if_at_once(run):
    found = run(
        ".reg .v2 .b32 v; mov.v2.u32 v, {1, 2}; mov.v2.u32 v, {v.y, v.x}; mov.v2.u32 {%x, %y}, v;"
        "mad.lo.u32 %x, %x, 10, %y; st.global.u32 [%b], %x; ret;",
        np.zeros(1),
    )
    assert [21] == found.tolist()


# ---- barriers with a thread count (PTX ISA, "bar, barrier") ----

COUNTED = """.reg .pred %h; setp.lt.u32 %h, %t, 64; and.b32 %x, %t, 3; setp.eq.u32 %p, %x, 0;
"""


def test_a_count_below_the_block_lets_warps_go_on_in_rounds(run):
    """Two warps are a round: each has a total of its own."""
    body = COUNTED + "and.pred %p, %p, %h; bar.red.popc.u32 %w, 1, 64, %p;\nst.global.u32 [%b], %w; ret;"
    assert [16] * 64 + [0] * 64 == run(body, np.zeros(128)).tolist()


def test_barriers_of_several_numbers_have_totals_of_their_own(run):
    body = COUNTED + "selp.u32 %z, 1, 2, %h; and.pred %p, %p, %h; bar.red.popc.u32 %w, %z, 64, %p; "
    assert [16] * 64 + [0] * 64 == run(body + "st.global.u32 [%b], %w; ret;", np.zeros(128)).tolist()


def test_a_register_may_hold_the_count_of_the_whole_block(run):
    body = "mov.u32 %x, %ntid.x; setp.eq.u32 %p, %t, 5; bar.red.or.pred %q, 1, %x, %p; selp.u32 %w, 1, 0, %q; "
    assert [1] * 96 == run(body + "st.global.u32 [%b], %w; ret;", np.zeros(96)).tolist()


@pytest.mark.parametrize(
    ("threads", "count", "waiting"), [(96, 64, "64-95"), (128, 160, "0-127"), (64, 96, "0-63"), (32, 64, "0-31")]
)
def test_a_count_that_no_round_reaches_is_a_deadlock(run, threads, count, waiting):
    with pytest.raises(jit.KernelDeadlock, match=f"threads? {waiting} at bar.sync, barrier 1, {count} threads"):
        run(f"bar.sync 1, {count};\nret;", np.zeros(threads))


@pytest.mark.parametrize("ends", ["", "setp.ge.u32 %p, %t, 36; @%p ret;\n"])
@pytest.mark.parametrize("waits", ["bar.sync 1, 64;", "@%q bar.sync 1, 64;\n@!%q bar.sync 1, 64;"])
def test_a_warp_that_lacks_lanes_arrives_as_a_whole(run, waits, ends):
    """The count is one of whole warps, whatever threads the last one has, or has left."""
    body = f"setp.lt.u32 %q, %t, 32;\n{ends}{waits}\nst.global.u32 [%b], 1; ret;"
    last = 36 if ends else 40
    assert [1] * last + [0] * (40 - last) == run(body, np.zeros(40)).tolist()


def test_arrivals_count_in_whole_warps(run):
    body = "setp.lt.u32 %q, %t, 32;\n@%q bar.sync 1, 64;\n@!%q bar.arrive 1, 64;\nst.global.u32 [%b], 1; ret;"
    assert [1] * 40 == run(body, np.zeros(40)).tolist()


def test_a_barrier_begins_anew_for_each_round(run):
    """Four warps pass a barrier for two of them, three times."""
    body = "mov.u32 %y, 0;\nL: bar.sync 1, 64;\nadd.u32 %y, %y, 1; setp.lt.u32 %p, %y, 3; @%p bra L;\n"
    assert [3] * 128 == run(body + "st.global.u32 [%b], %y; ret;", np.zeros(128)).tolist()
