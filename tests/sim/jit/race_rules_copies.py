"""Asynchronous copies and mbarriers."""

from __future__ import annotations

from race_rules import Pair, Rule

__all__ = ["PAIRS", "PRELUDE"]

PRELUDE = r"""
typedef unsigned long long u64;
#define D __device__ __forceinline__
D unsigned at(const void *p) { return (unsigned)__cvta_generic_to_shared(p); }
template <int N> D void copy(void *to, const void *from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(at(to)), "l"(from), "n"(N) : "memory");
}
D void copy_part(void *to, const void *from, int bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(at(to)), "l"(from), "r"(bytes) : "memory");
}
D void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> D void wait_group() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }
D void wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }
D void copies_arrive(u64 *m) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(at(m)) : "memory");
}
D void init(u64 *m, int n) { asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(at(m)), "r"(n) : "memory"); }
D void inval(u64 *m) { asm volatile("mbarrier.inval.shared.b64 [%0];" ::"r"(at(m)) : "memory"); }
D u64 arrive(u64 *m) {
    u64 state;
    asm volatile("mbarrier.arrive.shared.b64 %0, [%1];" : "=l"(state) : "r"(at(m)) : "memory");
    return state;
}
D u64 arrive_n(u64 *m, int n) {
    u64 state;
    asm volatile("mbarrier.arrive.shared.b64 %0, [%1], %2;" : "=l"(state) : "r"(at(m)), "r"(n) : "memory");
    return state;
}
D void arrive_relaxed(u64 *m) {
    u64 state;
    asm volatile("mbarrier.arrive.relaxed.cta.shared::cta.b64 %0, [%1];" : "=l"(state) : "r"(at(m)) : "memory");
}
D void arrive_drop(u64 *m) {
    u64 state;
    asm volatile("mbarrier.arrive_drop.shared.b64 %0, [%1];" : "=l"(state) : "r"(at(m)) : "memory");
}
D void expect(u64 *m, int bytes) {
    asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(at(m)), "r"(bytes) : "memory");
}
D void arrive_expect(u64 *m, int bytes) {
    u64 state;
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 %0, [%1], %2;" : "=l"(state) : "r"(at(m)), "r"(bytes) : "memory");
}
D bool complete(u64 *m, int parity) {
    int done;
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.b32 %0, 1, 0, p; }"
                 : "=r"(done) : "r"(at(m)), "r"(parity) : "memory");
    return done;
}
D void wait(u64 *m, int parity) { while (!complete(m, parity)) {} }
D void wait_for(u64 *m, u64 state) {
    int done;
    do
        asm volatile("{ .reg .pred p; mbarrier.test_wait.shared.b64 p, [%1], %2; selp.b32 %0, 1, 0, p; }"
                     : "=r"(done) : "r"(at(m)), "l"(state) : "memory");
    while (!done);
}
D void wait_relaxed(u64 *m, int parity) {
    int done;
    do
        asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.relaxed.cta.shared::cta.b64 p, [%1], %2; selp.b32 %0, 1, 0, p; }"
                     : "=r"(done) : "r"(at(m)), "r"(parity) : "memory");
    while (!done);
}
D void bulk_in(void *to, const void *from, int bytes, u64 *m) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(at(to)),
                 "l"(from), "r"(bytes), "r"(at(m)) : "memory");
}
D void proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
D void bulk_out(void *to, const void *from, int bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to),
                 "r"(at(from)), "r"(bytes) : "memory");
}
D void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
template <int N> D void bulk_wait() { asm volatile("cp.async.bulk.wait_group %0;" ::"n"(N) : "memory"); }
template <int N> D void bulk_wait_read() { asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory"); }
D void fence_block() { asm volatile("fence.acq_rel.cta;" ::: "memory"); }
"""

_START = "if (t == 0) init(m, {}); __syncthreads();"
_START_TWO = "if (t == 0) {{ init(m, {}); init(m + 1, {}); }} __syncthreads();"

PAIRS = [
    # ---- cp.async ----
    Pair(
        "copy_read_by_neighbour",
        Rule.COPY,
        "copy<4>(s + t, g + t); commit(); wait_group<0>(); @ h[me] = s[t ^ 1];",
        "",
        "__syncthreads();",
    ),
    Pair(
        "copy_barrier_without_wait",
        Rule.COPY,
        "copy<4>(s + t, g + t); commit(); @ __syncthreads(); h[me] = s[t];",
        "",
        "wait_group<0>();",
    ),
    Pair(
        "copy_of_the_last_group",
        Rule.COPY,
        "copy<4>(s + t, g + t); commit(); copy<4>(q + t, g + t + 64); commit(); wait_group<1>(); h[me] = @[t];",
        "q",
        "s",
    ),
    Pair("copy_not_committed", Rule.COPY, "copy<4>(s + t, g + t); @ wait_group<0>(); h[me] = s[t];", "", "commit();"),
    Pair(
        "copy_not_committed_wait_all",
        Rule.COPY,
        "copy<4>(s + t, g + t); @ h[me] = s[t];",
        "wait_group<0>();",
        "wait_all();",
    ),
    Pair(
        "copy_after_the_commit",
        Rule.COPY,
        "copy<4>(s + t, g + t); @ copy<4>(q + t, g + t + 64); @ wait_group<0>(); h[me] = q[t];",
        ("commit();", ""),
        ("", "commit();"),
    ),
    Pair(
        "copy_two_groups_kept",
        Rule.COPY,
        "for (int i = 0; i < 4; i++) { copy<4>(s + 64 * i + t, g + 64 * i + t); commit(); }"
        "wait_group<2>(); h[me] = s[64 * @ + t];",
        "2",
        "1",
    ),
    Pair(
        "copy_source_overwritten",
        Rule.COPY,
        "copy<4>(s + t, g + t); commit(); @ g[t] = 5; wait_all();",
        "",
        "wait_group<0>();",
    ),
    Pair(
        "copy_target_overwritten",
        Rule.COPY,
        "copy<4>(s + t, g + t); commit(); @ s[t] = 5; wait_all();",
        "",
        "wait_group<0>();",
    ),
    Pair(
        "copy_source_overwritten_by_other",
        Rule.COPY,
        "copy<4>(s + t, g + t); commit(); @ __syncthreads(); g[t ^ 32] = 5; wait_all();",
        "",
        "wait_all();",
    ),
    Pair("copy_targets_overlap", Rule.BYTES, "copy<16>(s + 4 * (t @), g + 4 * t); wait_all();", "& ~1", ""),
    Pair(
        "copy_two_of_one_thread",
        Rule.COPY,
        "copy<4>(s + t, g + t); commit(); @ copy<4>(s + t, g + t + 64); commit(); wait_all();",
        "",
        "wait_group<0>();",
    ),
    Pair(
        "copy_stages",
        Rule.COPY,
        """int sum = 0; copy<4>(s + t, g + t); commit();
         for (int i = 0; i < 4; i++) {
             if (i < 3) copy<4>(s + 64 * (i + 1 & 1) + t, g + 64 * i + t);
             commit(); wait_group<1>(); __syncthreads(); sum += s[64 * (i & 1) + (t ^ 32)]; @
         } h[me] = sum;""",
        "",
        "__syncthreads();",
    ),
    Pair(
        "copy_tail_without_commits",
        Rule.COPY,
        """copy<4>(s + t, g + t); commit(); int sum = 0;
         for (int i = 0; i < 4; i++) {
             if (i < 3) { copy<4>(s + 64 * (i + 1) + t, g + 64 * i + t); @ } @ wait_group<1>(); sum += s[64 * i + t];
         } h[me] = sum;""",
        ("commit();", ""),
        ("", "commit();"),
    ),
    Pair("copy_zero_filled", Rule.COPY, "copy_part(s + 4 * t, g, 0); @ h[me] = s[4 * t];", "", "wait_all();"),
    Pair(
        "copy_source_not_read",
        Rule.BYTES,
        "if (t < 32) copy_part(s + 4 * t, g, @); else if (t == 32) g[2] = 7; wait_all();",
        "16",
        "0",
    ),
    Pair(
        "copy_source_partly_read",
        Rule.BYTES,
        "if (t < 32) copy_part(s + 4 * t, g, @); else if (t == 32) g[1] = 7; wait_all();",
        "12",
        "4",
    ),
    Pair(
        "copy_waited_for_by_another",
        Rule.COPY,
        "if (t < 32) copy<4>(s + t, g + t); @ __syncthreads(); h[me] = s[t & 31];",
        "if (t >= 32) wait_all();",
        "if (t < 32) wait_all();",
    ),
    Pair(
        "copy_then_syncwarp",
        Rule.COPY,
        "if (t < 16) { copy<4>(s + t, g + t); @ } __syncwarp(); if (t >= 16) h[me] = s[t - 16]; if (t < 16) wait_all();",
        "",
        "wait_all();",
        block=32,
    ),
    Pair(
        "copy_one_thread_waits_for_more",
        Rule.COPY,
        "copy<4>(s + t, g + t); if (@) wait_all(); __syncthreads(); h[me] = s[t ^ 32];",
        "t < 32",
        "true",
    ),
    Pair(
        "copy_bytes_beside_a_store",
        Rule.BYTES,
        "copy<8>(s + 4 * t, g + 4 * t); s[4 * t + @] = 1; wait_all();",
        "1",
        "2",
    ),
    # ---- copies that arrive at an mbarrier ----
    Pair(
        "copy_arrives",
        Rule.MBARRIER,
        _START.format(64) + "copy<4>(s + t, g + t); @(m); wait(m, 0); h[me] = s[t ^ 32];",
        "arrive",
        "copies_arrive",
    ),
    Pair(
        "copy_after_its_arrival",
        Rule.MBARRIER,
        _START.format(64) + "@ copies_arrive(m); @ wait(m, 0); h[me] = s[t ^ 32]; wait_all();",
        ("", "copy<4>(s + t, g + t);"),
        ("copy<4>(s + t, g + t);", ""),
    ),
    Pair(
        "bulk_in",
        Rule.MBARRIER,
        _START.format(1)
        + "if (t == 0) { arrive_expect(m, 256); bulk_in(s, g, 256, m); } @ __syncthreads(); h[me] = s[t]; wait(m, 0);",
        "",
        "wait(m, 0);",
    ),
    Pair(
        "bulk_in_expected_before",
        Rule.MBARRIER,
        _START.format(1)
        + """if (t == 0) { @ bulk_in(s, g, 256, m); @ }
         wait(m, 0); h[me] = s[t];""",
        ("arrive_n(m, 1);", ""),
        ("expect(m, 256);", "arrive(m);"),
    ),
    Pair(
        "bulk_in_target_still_read",
        Rule.MBARRIER,
        _START.format(1)
        + """s[t] = t; __syncthreads(); int seen = s[t ^ 32]; proxy(); @
         if (t == 0) { arrive_expect(m, 256); bulk_in(s, g, 256, m); } wait(m, 0); h[me] = seen + s[t];""",
        "",
        "__syncthreads();",
    ),
    Pair(
        "bulk_out_source_reused",
        Rule.COPY,
        """s[t] = t; proxy(); __syncthreads();
         if (t == 0) { bulk_out(g, s, 256); bulk_commit(); @ } __syncthreads(); s[t] = 1; if (t == 0) bulk_wait<0>();""",
        "",
        "bulk_wait_read<0>();",
    ),
    Pair(
        "bulk_out_read_too_early",
        Rule.COPY_READS,
        """s[t] = t; proxy(); __syncthreads();
         if (t == 0) { bulk_out(g, s, 256); bulk_commit(); @<0>(); } __syncthreads(); h[me] = g[t]; if (t == 0) bulk_wait<0>();""",
        "bulk_wait_read",
        "bulk_wait",
    ),
    Pair(
        "bulk_out_group_kept",
        Rule.COPY,
        """s[t] = t; q[t] = t; proxy(); __syncthreads();
         if (t == 0) { bulk_out(g, s, 256); bulk_commit(); bulk_out(g + 64, q, 256); bulk_commit(); bulk_wait_read<1>(); }
         __syncthreads(); @[t] = 1; if (t == 0) bulk_wait<0>();""",
        "q",
        "s",
    ),
    # ---- mbarriers ----
    Pair(
        "phase_not_waited_for",
        Rule.MBARRIER,
        _START.format(64) + "s[t] = t; arrive(m); @ h[me] = s[t ^ 32]; wait(m, 0);",
        "",
        "wait(m, 0);",
    ),
    Pair(
        "phase_by_state",
        Rule.MBARRIER,
        _START.format(64)
        + "s[t] = t; u64 one = arrive(m); wait_for(m, one); int seen = s[t ^ 32]; @ s[t] = seen; arrive(m);",
        "",
        "one = arrive(m); wait_for(m, one);",
    ),
    Pair(
        "arrival_before_the_write",
        Rule.MBARRIER,
        _START.format(64) + "@ arrive(m); @ wait(m, 0); h[me] = s[t ^ 32];",
        ("", "s[t] = t;"),
        ("s[t] = t;", ""),
    ),
    Pair(
        "arrival_of_one_lane",
        Rule.MBARRIER,
        _START.format(1) + "if (t < 32) { s[t] = t; @ if (t == 0) arrive(m); } else { wait(m, 0); h[me] = s[t - 32]; }",
        "",
        "__syncwarp();",
    ),
    Pair(
        "arrival_for_the_warp",
        Rule.MBARRIER,
        _START.format(64) + "s[t] = t; @ if (t % 32 == 0) arrive_n(m, 32); wait(m, 0); h[me] = s[t ^ 32];",
        "",
        "__syncwarp();",
    ),
    Pair(
        "arrival_dropped",
        Rule.MBARRIER,
        _START.format(64)
        + """if (t >= 32) { @ arrive_drop(m); @ } else { arrive(m); wait(m, 0); arrive(m); wait(m, 1); h[me] = s[t + 32]; }""",
        ("", "s[t] = t;"),
        ("s[t] = t;", ""),
    ),
    Pair(
        "arrival_relaxed",
        Rule.RELAXED,
        _START.format(64) + "s[t] = t; @ arrive_relaxed(m); wait(m, 0); h[me] = s[t ^ 32];",
        "",
        "fence_block();",
    ),
    Pair(
        "wait_relaxed",
        Rule.RELAXED,
        _START.format(64) + "s[t] = t; arrive(m); wait_relaxed(m, 0); @ h[me] = s[t ^ 32];",
        "",
        "fence_block();",
    ),
    Pair("init_without_barrier", Rule.INIT, "if (t == 0) init(m, 64); @ arrive(m);", "", "__syncthreads();"),
    Pair(
        "waits_at_the_other",
        Rule.MBARRIER,
        _START_TWO.format(32, 32)
        + "if (t < 32) { s[t] = t; arrive(m); } else { q[t] = t; arrive(m + 1); wait(m + @, 0); h[me] = s[t - 32]; wait(m, 0); }",
        "1",
        "0",
    ),
    Pair(
        "slot_filled_again",
        Rule.MBARRIER,
        "if (t == 0) { init(m, 32); init(m + 1, 32); init(m + 2, 32); } __syncthreads();"
        "if (t < 32) { s[t] = 1; arrive(m); @ s[t] = 2; arrive(m + 2); }"
        "else { wait(m, 0); int v = s[t - 32]; arrive(m + 1); wait(m + 2, 0); h[me] = v + s[t - 32]; }",
        "",
        "wait(m + 1, 0);",
    ),
    Pair(
        "slot_freed_before_its_read",
        Rule.MBARRIER,
        _START_TWO.format(32, 32)
        + """for (int i = 0; i < 3; i++) {
             if (t < 32) { if (i) wait(m + 1, i - 1 & 1); s[t] = i; arrive(m); }
             else { wait(m, i & 1); @ h[me + 64 * i] = s[t - 32]; @ }
         }""",
        ("arrive(m + 1);", ""),
        ("", "arrive(m + 1);"),
    ),
    Pair(
        "chain_of_phases",
        Rule.CHAIN,
        _START_TWO.format(32, 32)
        + """if (t < 32) { s[t] = t; arrive(m); }
         else if (t < 64) { @ arrive(m + 1); @ }
         else { wait(m + 1, 0); h[me] = s[t - 64]; }""",
        ("", "wait(m, 0);"),
        ("wait(m, 0);", ""),
        block=96,
    ),
]
