"""More labelled kernels in pairs (:mod:`race_kernels`): bulk copies, mbarriers, clusters, masks, scopes, accesses by width."""

from __future__ import annotations

from race_kernels import Pair

from cudatool.sim.jit.race_engine import RaceReason

__all__ = ["MORE_HELPERS", "MORE_PAIRS"]

MORE_HELPERS = r"""
__device__ inline void init1(u64 *m, int n) { init(m, n); asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ inline void expect(u64 *m, int bytes) { asm volatile("{ .reg .b64 t; mbarrier.arrive.expect_tx.shared::cta.b64 t, [%0], %1; }" :: "r"(shared_address(m)), "r"(bytes) : "memory"); }
__device__ inline void bulk(void *to, const void *from, int bytes, u64 *m) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" :: "r"(shared_address(to)), "l"(from), "r"(bytes), "r"(shared_address(m)) : "memory"); }
__device__ inline void bulk_out(void *to, void *from, int bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" :: "l"(to), "r"(shared_address(from)), "r"(bytes) : "memory"); }
__device__ inline void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
__device__ inline void bulk_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
__device__ inline void bulk_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
__device__ inline void proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ inline void arrive_relaxed(u64 *m) { asm volatile("{ .reg .b64 t; mbarrier.arrive.relaxed.cta.shared::cta.b64 t, [%0]; }" :: "r"(shared_address(m)) : "memory"); }
__device__ inline bool passed_relaxed(u64 *m, int phase) {
  int v; asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.relaxed.cta.shared::cta.b64 p, [%1], %2; selp.s32 %0, 1, 0, p; }" : "=r"(v) : "r"(shared_address(m)), "r"(phase) : "memory"); return v; }
__device__ inline void cluster_arrive() { asm volatile("barrier.cluster.arrive.aligned;" ::: "memory"); }
__device__ inline void cluster_arrive_relaxed() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
__device__ inline void cluster_wait() { asm volatile("barrier.cluster.wait.aligned;" ::: "memory"); }
"""

_NB, _NW, _NO, _NA = RaceReason.NO_BARRIER, RaceReason.NO_WARP_SYNC, RaceReason.NO_ORDER, RaceReason.NARROW_ATOMIC
_NF, _FENCE, _COPY = RaceReason.NARROW_FENCE, RaceReason.NO_FENCE, RaceReason.NOT_WAITED
_CACHE = RaceReason.READ_ONLY_CACHE

MORE_PAIRS = (
    Pair(
        "bulk_read_before_wait",
        1,
        32,
        _COPY,
        "if (!i) { init1(m, 1); expect(m, 128); bulk(s, a, 128, m); } __syncthreads(); a[64 + i] = s[i];",
        "if (!i) { init1(m, 1); expect(m, 128); bulk(s, a, 128, m); } __syncthreads(); while (!passed(m, 0)) ; a[64 + i] = s[i];",
    ),
    Pair(
        "bulk_source_overwritten",
        1,
        32,
        _COPY,
        "if (!i) { bulk_out(a, s, 128); bulk_commit(); s[0] = 7; }",
        "if (!i) { bulk_out(a, s, 128); bulk_commit(); bulk_wait_read(); s[0] = 7; }",
    ),
    Pair(
        "bulk_result_read_too_early",
        1,
        32,
        _COPY,
        "if (!i) { bulk_out(a, s, 128); bulk_commit(); bulk_wait_read(); a[64] = a[0]; }",
        "if (!i) { bulk_out(a, s, 128); bulk_commit(); bulk_wait(); a[64] = a[0]; }",
    ),
    Pair(
        "bulk_overwritten_by_neighbour",
        1,
        64,
        _COPY,
        "if (!i) { init1(m, 1); expect(m, 128); bulk(s, a, 128, m); } __syncthreads(); if (i == 40) s[3] = 1; while (!passed(m, 0)) ;",
        "if (!i) { init1(m, 1); expect(m, 128); bulk(s, a, 128, m); } __syncthreads(); if (i == 40) s[40] = 1; while (!passed(m, 0)) ;",
    ),
    Pair(
        "bulk_store_without_barrier",
        1,
        64,
        _COPY,
        "s[i] = i; proxy(); if (!i) { bulk_out(a, s, 256); bulk_commit(); bulk_wait(); }",
        "s[i] = i; proxy(); __syncthreads(); if (!i) { bulk_out(a, s, 256); bulk_commit(); bulk_wait(); }",
    ),
    Pair(
        "bulk_of_another_barrier",
        1,
        32,
        _COPY,
        "if (!i) { init1(m, 1); init1(m + 1, 1); arrive(m + 1); expect(m, 128); bulk(s, a, 128, m); } __syncthreads(); while (!passed(m + 1, 0)) ; a[64 + i] = s[i];",
        "if (!i) { init1(m, 1); init1(m + 1, 1); arrive(m + 1); expect(m, 128); bulk(s, a, 128, m); } __syncthreads(); while (!passed(m, 0)) ; a[64 + i] = s[i];",
    ),
    Pair(
        "wrong_parity",
        1,
        64,
        _NB,
        "if (!i) init(m, 65); __syncthreads(); s[i] = i; arrive(m); while (!passed(m, 1)) ; a[i] = s[i ^ 32];",
        "if (!i) init(m, 64); __syncthreads(); s[i] = i; arrive(m); while (!passed(m, 0)) ; a[i] = s[i ^ 32];",
    ),
    Pair(
        "too_few_expected",
        1,
        64,
        _NB,
        "if (!i) init(m, 32); __syncthreads(); s[i] = i; if (i < 32) arrive(m); while (!passed(m, 0)) ; a[i] = s[i ^ 32];",
        "if (!i) init(m, 32); __syncthreads(); s[i] = i; if (i < 32) arrive(m); while (!passed(m, 0)) ; a[i] = s[i & 31];",
    ),
    Pair(
        "arrive_relaxed",
        1,
        64,
        _NB,
        "if (!i) init(m, 64); __syncthreads(); s[i] = i; arrive_relaxed(m); while (!passed(m, 0)) ; a[i] = s[i ^ 32];",
        "if (!i) init(m, 64); __syncthreads(); s[i] = i; __threadfence_block(); arrive_relaxed(m); while (!passed(m, 0)) ; a[i] = s[i ^ 32];",
    ),
    Pair(
        "wait_relaxed",
        1,
        64,
        _FENCE,
        "if (!i) init(m, 64); __syncthreads(); s[i] = i; arrive(m); while (!passed_relaxed(m, 0)) ; a[i] = s[i ^ 32];",
        "if (!i) init(m, 64); __syncthreads(); s[i] = i; arrive(m); while (!passed_relaxed(m, 0)) ; __threadfence_block(); a[i] = s[i ^ 32];",
    ),
    Pair(
        "cluster_relaxed",
        1,
        64,
        _NB,
        "s[i] = i; cluster_arrive_relaxed(); cluster_wait(); a[i] = s[i ^ 32];",
        "s[i] = i; cluster_arrive(); cluster_wait(); a[i] = s[i ^ 32];",
    ),
    Pair(
        "cluster_work_between",
        1,
        64,
        _NB,
        "cluster_arrive(); s[i] = i; cluster_wait(); a[i] = s[i ^ 32];",
        "s[i] = i; cluster_arrive(); a[64 + i] = i; cluster_wait(); a[i] = s[i ^ 32];",
    ),
    Pair(
        "masks_chained",
        1,
        32,
        _NW,
        "if (i < 24) { if (i < 1) a[0] = 1; if (i >= 8) __syncwarp(0xffff00); if (i < 16) __syncwarp(0xffff); if (i == 20) a[8] = a[0]; }",
        "if (i < 24) { if (i < 1) a[0] = 1; if (i < 16) __syncwarp(0xffff); if (i >= 8) __syncwarp(0xffff00); if (i == 20) a[8] = a[0]; }",
    ),
    Pair(
        "bulk_source_after_a_barrier",
        1,
        64,
        _COPY,
        "if (!i) { bulk_out(a, s, 128); bulk_commit(); } __syncthreads(); s[i] = 7;",
        "if (!i) { bulk_out(a, s, 128); bulk_commit(); bulk_wait_read(); } __syncthreads(); s[i] = 7;",
    ),
    Pair(
        "bulk_target_after_a_barrier",
        1,
        64,
        _COPY,
        "if (!i) { bulk_out(a, s, 128); bulk_commit(); bulk_wait_read(); } __syncthreads(); a[i] = 7;",
        "if (!i) { bulk_out(a, s, 128); bulk_commit(); bulk_wait(); } __syncthreads(); a[i] = 7;",
    ),
    Pair(
        "cluster_relaxed_with_fence",
        1,
        64,
        _NB,
        "s[i] = i; cluster_arrive_relaxed(); __threadfence(); cluster_wait(); a[i] = s[i ^ 32];",
        "s[i] = i; __threadfence(); cluster_arrive_relaxed(); cluster_wait(); a[i] = s[i ^ 32];",
    ),
    Pair(
        "cluster_twice",
        1,
        64,
        _NB,
        "for (int j = 0; j < 2; j++) { s[i] = j; cluster_arrive(); cluster_wait(); a[i] = s[i ^ 32]; }",
        "for (int j = 0; j < 2; j++) { s[i] = j; cluster_arrive(); cluster_wait(); a[i] = s[i ^ 32]; cluster_arrive(); cluster_wait(); }",
    ),
    Pair(
        "mask_of_the_lower_half",
        1,
        32,
        _NW,
        "s[i] = i; if (i < 16) __syncwarp(0xffff); else __syncwarp(0xffff0000); a[i] = s[i ^ 16];",
        "s[i] = i; if (i < 16) __syncwarp(0xffff); else __syncwarp(0xffff0000); a[i] = s[i ^ 8];",
    ),
    Pair(
        "mask_some_ended",
        1,
        32,
        _NW,
        "if (i > 20) return; s[i] = i; if (i) __syncwarp(0x1ffffe); a[i] = s[i ? i - 1 : 20];",
        "if (i > 20) return; s[i] = i; __syncwarp(); a[i] = s[i ? i - 1 : 20];",
    ),
    Pair(
        "reduce_orders_nothing",
        1,
        32,
        _NW,
        "s[i] = i; a[64 + i] = __reduce_add_sync(~0u, i); a[i] = s[31 - i];",
        "s[i] = i; a[64 + i] = __reduce_add_sync(~0u, i); __syncwarp(); a[i] = s[31 - i];",
    ),
    Pair(
        "match_orders_nothing",
        1,
        32,
        _NW,
        "s[i] = i; a[64 + i] = __match_any_sync(~0u, i & 3); a[i] = s[31 - i];",
        "s[i] = i; a[64 + i] = __match_any_sync(~0u, i & 3); __syncwarp(); a[i] = s[31 - i];",
    ),
    Pair(
        "cas_of_block_as_a_lock",
        2,
        1,
        _NF,
        "while (atomicCAS_block(a, 0, 1)) ; __threadfence(); a[8] += 1; __threadfence(); atomicExch(a, 0);",
        "while (atomicCAS(a, 0, 1)) ; __threadfence(); a[8] += 1; __threadfence(); atomicExch(a, 0);",
    ),
    Pair("max_of_block", 4, 32, _NA, "atomicMax_block(a, g);", "atomicMax(a, g);"),
    Pair(
        "load_of_block_scope",
        2,
        1,
        _NA,
        'if (!k) atomicAdd(a, 1); else { int v; asm volatile("ld.relaxed.cta.u32 %0, [%1];" : "=r"(v) : "l"(a) : "memory"); a[8] = v; }',
        "if (!k) atomicAdd(a, 1); else a[8] = relaxed(a);",
    ),
    Pair(
        "system_and_block",
        2,
        1,
        _NA,
        "if (!k) atomicAdd_system(a, 1); else atomicAdd_block(a, 1);",
        "if (!k) atomicAdd_system(a, 1); else atomicAdd(a, 1);",
    ),
    Pair("wide_block_atomic", 2, 32, _NA, "atomicAdd_block((u64 *)a, 1ull);", "atomicAdd((u64 *)a, 1ull);"),
    Pair(
        "byte_in_a_vector",
        2,
        32,
        _NO,
        "((int4 *)a)[g] = make_int4(1, 2, 3, 4); b[(16 * g + 17) % 1024] = 1;",
        "((int4 *)a)[g] = make_int4(1, 2, 3, 4); b[16 * g + 3] = 1;",
    ),
    Pair("word_in_a_wide_word", 2, 32, _NO, "d[g] = 1; a[(2 * g + 2) % 128] = 1;", "d[g] = 1; a[2 * g + 1] = 1;"),
    Pair(
        "half_of_a_word",
        2,
        32,
        _NW,
        "((short *)a)[g] = 1; if (g == 5) a[64] = a[0];",
        "((short *)a)[g] = 1; if (g == 5) a[64] = ((short *)a)[5];",
    ),
    Pair("flags_in_one_byte", 1, 32, _NW, "b[0] |= 1 << (i & 7);", "b[i] |= 1 << (i & 7);"),
    Pair(
        "cas_of_two_bytes",
        2,
        1,
        _NO,
        "unsigned short *h = (unsigned short *)a; if (!k) atomicCAS(h, (unsigned short)0, (unsigned short)1); else h[0] = 2;",
        "unsigned short *h = (unsigned short *)a; if (!k) atomicCAS(h, (unsigned short)0, (unsigned short)1); else h[1] = 2;",
    ),
    Pair(
        "vector_of_shared",
        1,
        64,
        _NW,
        "if (i < 16) ((int4 *)s)[i] = make_int4(i, i, i, i); c[0] = 0; a[i] = s[i];",
        "if (i < 16) ((int4 *)s)[i] = make_int4(i, i, i, i); __syncthreads(); a[i] = s[i];",
    ),
    Pair(
        "structure_of_three_words",
        2,
        16,
        _NW,
        "struct T { int x, y, z; }; T *p = (T *)a; p[g] = T{1, 2, 3}; if (g == 3) p[4].x = 5;",
        "struct T { int x, y, z; }; T *p = (T *)a; p[g] = T{1, 2, 3}; if (g == 4) p[4].x = 5;",
    ),
    Pair(
        "zero_fill_beyond_the_source",
        1,
        2,
        _COPY,
        'if (!i) { asm volatile("cp.async.cg.shared.global [%0], [%1], 16, 4;" :: "r"(shared_address(s)), "l"(a) : "memory"); asm volatile("cp.async.wait_all;" ::: "memory"); } else s[2] = 1;',
        'if (!i) { asm volatile("cp.async.cg.shared.global [%0], [%1], 16, 4;" :: "r"(shared_address(s)), "l"(a) : "memory"); asm volatile("cp.async.wait_all;" ::: "memory"); } else s[4] = 1;',
    ),
    Pair(
        "popc_barrier",
        1,
        64,
        _NB,
        "s[i] = i; a[64 + i] = __any_sync(~0u, i); a[i] = s[i ^ 32];",
        "s[i] = i; a[64 + i] = __syncthreads_count(i & 1); a[i] = s[i ^ 32];",
    ),
    # ---- the read-only cache: what it holds is to be read-only as long as the kernel runs ----
    Pair(
        "read_only_after_a_barrier",
        1,
        64,
        _CACHE,
        "a[i] = i; __syncthreads(); a[64 + i] = __ldg(a + (i ^ 32));",
        "a[i] = i; __syncthreads(); a[64 + i] = a[i ^ 32];",
    ),
    Pair("read_only_in_place", 2, 32, _CACHE, "a[g] = __ldg(a + g) + 1;", "a[g] = __ldg(a + 64 + g) + 1;"),
    Pair(
        "read_only_of_a_message",
        2,
        1,
        _CACHE,
        "if (!k) { a[8] = 1; __threadfence(); va[0] = 1; } else { while (!va[0]) ; __threadfence(); a[16] = __ldg(a + 8); }",
        "if (!k) { a[8] = 1; __threadfence(); va[0] = 1; } else { while (!va[0]) ; __threadfence(); a[16] = a[8]; }",
    ),
    Pair(
        "read_only_bytes_between_others",
        2,
        32,
        _CACHE,
        "char v = __ldg(b + 2 * g); b[2 * g] = 1; b[512 + g] = v;",
        "char v = __ldg(b + 2 * g + 1); b[2 * g] = 1; b[512 + g] = v;",
    ),
    Pair(
        "read_only_vectors",
        2,
        8,
        _CACHE,
        "int4 v = __ldg((int4 *)a + g); a[4 * g + 3] = v.x;",
        "int4 v = __ldg((int4 *)a + 16 + g); a[4 * g + 3] = v.x;",
    ),
    Pair(
        "read_only_of_a_counter",
        1,
        1,
        _CACHE,
        "int before = __ldg(a); atomicAdd(a, 1); a[8] = before;",
        "int before = __ldg(a + 1); atomicAdd(a, 1); a[8] = before;",
    ),
    Pair(
        "read_only_at_an_index_from_memory",
        1,
        32,
        _CACHE,
        "int j = va[512 + i] + i; a[j] = 1; a[64 + i] = __ldg(a + i);",
        "int j = va[512 + i] + i; a[j] = 1; a[64 + i] = __ldg(a + 128 + i);",
    ),
)
