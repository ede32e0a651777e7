"""Small CUDA C++ kernels in pairs: one that races and the same without, labelled by PTX's memory consistency model.

Each pair says its launch, its racy and its correct body, and why nothing orders the accesses of the racy one. A body
sees ``int *a`` (zeros; ``b`` is the same as bytes, ``d`` as 64-bit numbers), ``i`` (the thread's number in the block), ``n``
(the block's size), ``g`` (the thread's number in the grid), ``k`` (the block's number), and shared memory ``s`` (ints) and
``c`` (bytes), which are apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cudatool.sim.jit.race_engine import RaceReason

__all__ = ["HELPERS", "PAIRS", "Pair", "source"]

HELPERS = r"""
using u64 = unsigned long long;
__device__ inline void arrive(int id, int count) { asm volatile("bar.arrive %0, %1;" :: "r"(id), "r"(count) : "memory"); }
__device__ inline void sync(int id, int count) { asm volatile("bar.sync %0, %1;" :: "r"(id), "r"(count) : "memory"); }
__device__ __noinline__ void fill(int *p, int n) { for (int j = 0; j < n; j++) p[j] = j; }
__device__ inline int shared_address(void *p) { return (int)__cvta_generic_to_shared(p); }
__device__ inline void copy4(int *to, const int *from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" :: "r"(shared_address(to)), "l"(from) : "memory");
}
__device__ inline void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> __device__ inline void wait() { asm volatile("cp.async.wait_group %0;" :: "n"(N) : "memory"); }
__device__ inline int acquire(int *p) { int v; asm volatile("ld.acquire.gpu.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory"); return v; }
__device__ inline int acquire_cta(int *p) { int v; asm volatile("ld.acquire.cta.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory"); return v; }
__device__ inline int relaxed(int *p) { int v; asm volatile("ld.relaxed.gpu.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory"); return v; }
__device__ inline void release(int *p, int v) { asm volatile("st.release.gpu.u32 [%0], %1;" :: "l"(p), "r"(v) : "memory"); }
__device__ inline void release_cta(int *p, int v) { asm volatile("st.release.cta.u32 [%0], %1;" :: "l"(p), "r"(v) : "memory"); }
__device__ inline void relax(int *p, int v) { asm volatile("st.relaxed.gpu.u32 [%0], %1;" :: "l"(p), "r"(v) : "memory"); }
__device__ inline void init(u64 *m, int n) { asm volatile("mbarrier.init.shared.b64 [%0], %1;" :: "r"(shared_address(m)), "r"(n) : "memory"); }
__device__ inline void arrive(u64 *m) { asm volatile("{ .reg .b64 t; mbarrier.arrive.shared.b64 t, [%0]; }" :: "r"(shared_address(m)) : "memory"); }
__device__ inline void arrive_copies(u64 *m) { asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" :: "r"(shared_address(m)) : "memory"); }
__device__ inline bool passed(u64 *m, int phase) {
  int v; asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.s32 %0, 1, 0, p; }" : "=r"(v) : "r"(shared_address(m)), "r"(phase) : "memory");
  return v;
}
"""
_BEGIN = """extern "C" __global__ void {name}(int *a) {{
  __shared__ int s[1024]; __shared__ char c[1024]; __shared__ u64 m[4];
  volatile int *va = a, *vs = s; char *b = (char *)a; u64 *d = (u64 *)a;
  int i = threadIdx.x, n = blockDim.x, k = blockIdx.x, g = k * n + i;
  (void)s; (void)c; (void)m; (void)va; (void)vs; (void)b; (void)d; (void)i; (void)n; (void)k; (void)g;
  {body}
}}
"""


@dataclass(frozen=True)
class Pair:
    """Two kernels; `racy` and `correct` are their bodies, `reason` is why the racy one races."""

    name: str
    grid: int
    block: int
    reason: RaceReason
    racy: str
    correct: str


def source(pairs: Sequence[Pair], more_helpers: str = "") -> str:
    """Return all kernels of `pairs`, named ``racy_NAME`` and ``correct_NAME``."""
    bodies = [(f"{kind}_{pair.name}", getattr(pair, kind)) for pair in pairs for kind in ("racy", "correct")]
    return HELPERS + more_helpers + "".join(_BEGIN.format(name=name, body=body) for name, body in bodies)


# A lock, with fences of the given kinds, taken by one thread of each block.
def _lock(take: str, taken: str, leaving: str, leave: str, work: str = "a[8] += 1;") -> str:
    return f"if (!i) {{ while ({take}) ; {taken} {work} {leaving} {leave} }}"


# The last block to come sums what all have written.
def _last(before: str, after: str, count: str = "atomicAdd(a, 1)") -> str:
    return f"""if (!i) {{ a[64 + k] = k; {before}
    if ({count} == gridDim.x - 1) {{ {after} int t = 0; for (int j = 0; j < gridDim.x; j++) t += a[64 + j]; a[8] = t; }} }}"""


# Block 0 hands a[8] to block 1 by the flag a[0].
def _message(write: str, read: str, more: str = "") -> str:
    return f"if (!i) {{ if (!k) {{ a[8] = 1; {write} }} else {{ {read} a[16] = a[8]; {more} }} }}"


_NB, _NW, _NO, _NA = RaceReason.NO_BARRIER, RaceReason.NO_WARP_SYNC, RaceReason.NO_ORDER, RaceReason.NARROW_ATOMIC
_NF, _FENCE, _COPY = RaceReason.NARROW_FENCE, RaceReason.NO_FENCE, RaceReason.NOT_WAITED

PAIRS = [
    # ---- blocks ----
    Pair("neighbour_block", 4, 64, _NO, "a[g] += a[g + n];", "a[g] += a[g + 4096];"),
    Pair("same_element", 4, 64, _NO, "a[i] = g;", "a[g] = g;"),
    Pair("same_value", 2, 1, _NO, "a[0] = 7;", "if (!g) a[0] = 7;"),
    Pair("block_totals", 4, 64, _NO, "if (!i) a[0] += k;", "if (!i) atomicAdd(a, k);"),
    Pair("plain_reader_of_atomics", 2, 1, _NO, "atomicAdd(a, 1); a[64 + g] = a[0];", "a[64 + g] = atomicAdd(a, 1);"),
    Pair("third_block_reads", 3, 1, _NO, "if (k < 2) a[8 + k] = a[0]; else a[0] = 1;", "a[8 + k] = a[0];"),
    Pair(
        "fence_is_no_barrier_of_blocks",
        2,
        32,
        _NO,
        "a[g] = 1; __threadfence(); a[128 + g] = a[63 - g];",
        "a[g] = 1; __threadfence(); a[128 + g] = a[g];",
    ),
    Pair(
        "chained_scan",
        4,
        1,
        _NO,
        "a[8 + k] = k; __threadfence(); va[k] = 1; if (k) { __threadfence(); a[32 + k] = a[7 + k]; }",
        "a[8 + k] = k; __threadfence(); va[k] = 1; if (k) { while (!va[k - 1]) ; __threadfence(); a[32 + k] = a[7 + k]; }",
    ),
    Pair(
        "chain_of_three",
        3,
        1,
        _FENCE,
        "if (!k) { a[8] = 1; __threadfence(); va[0] = 1; } else { while (!va[k - 1]) ; if (k > 1) a[16] = a[8]; __threadfence(); va[k] = 1; }",
        "if (!k) { a[8] = 1; __threadfence(); va[0] = 1; } else { while (!va[k - 1]) ; __threadfence(); if (k > 1) a[16] = a[8]; va[k] = 1; }",
    ),
    Pair("last_block_without_fence", 4, 32, _NO, _last("", ""), _last("__threadfence();", "__threadfence();")),
    Pair(
        "last_block_without_second_fence",
        4,
        32,
        _FENCE,
        _last("__threadfence();", ""),
        _last("__threadfence();", "__threadfence();"),
    ),
    Pair(
        "last_block_with_block_fence",
        4,
        32,
        _NF,
        _last("__threadfence_block();", "__threadfence();"),
        _last("__threadfence_system();", "__threadfence();"),
    ),
    Pair(
        "last_block_of_many_threads",
        4,
        64,
        _NO,
        "__shared__ int last; a[64 + g] = g; __threadfence(); if (!i) last = atomicAdd(a, 1) == 3; __syncthreads(); if (last) { __threadfence(); a[i + 512] = a[64 + (g ^ 64)]; }",
        "__shared__ int last; a[64 + g] = g; __syncthreads(); if (!i) { __threadfence(); last = atomicAdd(a, 1) == 3; } __syncthreads(); if (last) { __threadfence(); a[i + 512] = a[64 + (g ^ 64)]; }",
    ),
    Pair(
        "fences_before_a_barrier",
        4,
        64,
        _NO,
        "__shared__ int last; a[64 + g] = g; __syncthreads(); if (!i) last = atomicAdd(a, 1) == 3; __threadfence(); __syncthreads(); if (last) { __threadfence(); a[i + 512] = a[64 + (g ^ 64)]; }",
        "__shared__ int last; a[64 + g] = g; __threadfence(); __syncthreads(); if (!i) last = atomicAdd(a, 1) == 3; __syncthreads(); if (last) { __threadfence(); a[i + 512] = a[64 + (g ^ 64)]; }",
    ),
    # ---- barriers with a thread count ----
    Pair(
        "count_below_the_block",
        1,
        128,
        _NB,
        "s[i] = i; sync(1, 64); a[i] = s[i ^ 32];",
        "s[i] = i; sync(1 + i / 64, 64); a[i] = s[i ^ 32];",
    ),
    Pair(
        "count_of_the_block",
        1,
        128,
        _NB,
        "s[i] = i; sync(1 + i / 64, 64); a[i] = s[i ^ 64];",
        "s[i] = i; sync(1, n); a[i] = s[i ^ 64];",
    ),
    Pair(
        "more_arrivals_than_counted",
        1,
        96,
        _NB,
        "if (i < 64) { s[i] = i; arrive(1, 64); } else { sync(1, 64); a[i] = s[i - 64]; }",
        "if (i < 64) { s[i] = i; arrive(1, 96); } else { sync(1, 96); a[i] = s[i - 64]; }",
    ),
    Pair(
        "count_in_rounds",
        1,
        128,
        _NB,
        "for (int j = 0; j < 2; j++) { s[i] = j; sync(1, 64); a[i] = s[i ^ 32]; sync(2, 64); }",
        "for (int j = 0; j < 2; j++) { s[i] = j; sync(1 + i / 64, 64); a[i] = s[i ^ 32]; sync(3 + i / 64, 64); }",
    ),
    # ---- messages by flags ----
    Pair(
        "flag_without_fence",
        2,
        1,
        _NO,
        _message("va[0] = 1;", "while (!va[0]) ;"),
        _message("__threadfence(); va[0] = 1;", "while (!va[0]) ; __threadfence();"),
    ),
    Pair(
        "flag_without_acquire",
        2,
        1,
        _FENCE,
        _message("__threadfence(); va[0] = 1;", "while (!va[0]) ;"),
        _message("release(a, 1);", "while (!acquire(a)) ;"),
    ),
    Pair(
        "flag_relaxed",
        2,
        1,
        _NO,
        _message("relax(a, 1);", "while (!relaxed(a)) ;"),
        _message("__threadfence(); relax(a, 1);", "while (!relaxed(a)) ; __threadfence();"),
    ),
    Pair(
        "flag_acquire_of_block",
        2,
        1,
        _NF,
        _message("release(a, 1);", "while (!acquire_cta(a)) ;"),
        _message("release(a, 1);", "while (!acquire(a)) ;"),
    ),
    Pair(
        "flag_release_of_block",
        2,
        1,
        _NF,
        _message("release_cta(a, 1);", "while (!acquire(a)) ;"),
        _message("__threadfence(); release(a, 1);", "while (!acquire(a)) ;"),
    ),
    Pair(
        "flag_fence_of_block",
        2,
        1,
        _NF,
        _message("__threadfence_block(); va[0] = 1;", "while (!va[0]) ; __threadfence();"),
        _message("__threadfence(); va[0] = 1;", "while (!va[0]) ; __threadfence_system();"),
    ),
    Pair(
        "flag_second_fence_of_block",
        2,
        1,
        _FENCE,
        _message("__threadfence(); va[0] = 1;", "while (!va[0]) ; __threadfence_block();"),
        _message("__threadfence(); va[0] = 1;", "while (!va[0]) ; __threadfence();"),
    ),
    Pair(
        "flag_before_data",
        2,
        1,
        _NO,
        "if (!k) { release(a, 1); a[8] = 1; } else { while (!acquire(a)) ; a[16] = a[8]; }",
        _message("release(a, 1);", "while (!acquire(a)) ;"),
    ),
    Pair(
        "flag_by_exchange",
        2,
        1,
        _NO,
        _message("atomicExch(a, 1);", "while (!atomicAdd(a, 0)) ; __threadfence();"),
        _message("__threadfence(); atomicExch(a, 1);", "while (!atomicAdd(a, 0)) ; __threadfence();"),
    ),
    Pair(
        "flag_of_other_thread",
        2,
        64,
        _NO,
        "if (!k) { a[8 + i] = 1; if (!i) { __threadfence(); va[0] = 1; } } else if (!i) { while (!va[0]) ; __threadfence(); a[200] = a[8 + 40]; }",
        "if (!k) { a[8 + i] = 1; __syncthreads(); if (!i) { __threadfence(); va[0] = 1; } } else if (!i) { while (!va[0]) ; __threadfence(); a[200] = a[8 + 40]; }",
    ),
    Pair(
        "flag_read_by_one_thread",
        2,
        64,
        _NO,
        "if (!k) { if (!i) { a[8] = 1; __threadfence(); va[0] = 1; } } else { if (!i) { while (!va[0]) ; __threadfence(); } if (i == 40) a[200] = a[8]; }",
        "if (!k) { if (!i) { a[8] = 1; __threadfence(); va[0] = 1; } } else { if (!i) { while (!va[0]) ; __threadfence(); } __syncthreads(); if (i == 40) a[200] = a[8]; }",
    ),
    Pair(
        "flag_in_shared_memory",
        1,
        64,
        _NB,
        "if (!i) { s[0] = 0; s[1] = 0; } __syncthreads(); if (!i) { s[1] = 5; vs[0] = 1; } if (i == 32) { while (!vs[0]) ; a[0] = s[1]; }",
        "if (!i) { s[0] = 0; s[1] = 0; } __syncthreads(); if (!i) { s[1] = 5; __threadfence_block(); vs[0] = 1; } if (i == 32) { while (!vs[0]) ; __threadfence_block(); a[0] = s[1]; }",
    ),
    # ---- scopes of atomics ----
    Pair("atomics_of_block", 2, 32, _NA, "atomicAdd_block(a, 1);", "atomicAdd_block(a + k, 1);"),
    Pair(
        "atomics_of_block_and_device",
        2,
        1,
        _NA,
        "if (k) atomicAdd_block(a, 1); else atomicAdd(a, 1);",
        "if (k) atomicAdd_system(a, 1); else atomicAdd(a, 1);",
    ),
    Pair(
        "count_of_block",
        4,
        1,
        _NA,
        _last("__threadfence();", "__threadfence();", "atomicAdd_block(a, 1)"),
        _last("__threadfence();", "__threadfence();", "atomicAdd_system(a, 1)"),
    ),
    Pair("volatile_and_plain", 2, 1, _NO, "if (k) va[0] = 1; else a[0] = 2;", "if (k) va[0] = 1; else va[0] = 2;"),
    # ---- locks ----
    Pair(
        "lock_without_fences",
        3,
        1,
        _NO,
        _lock("atomicCAS(a, 0, 1)", "", "", "atomicExch(a, 0);"),
        _lock("atomicCAS(a, 0, 1)", "__threadfence();", "__threadfence();", "atomicExch(a, 0);"),
    ),
    Pair(
        "lock_without_first_fence",
        3,
        1,
        _FENCE,
        _lock("atomicCAS(a, 0, 1)", "", "__threadfence();", "atomicExch(a, 0);"),
        _lock("atomicExch(a, 1)", "__threadfence();", "__threadfence();", "atomicExch(a, 0);"),
    ),
    Pair(
        "lock_without_last_fence",
        3,
        1,
        _NO,
        _lock("atomicCAS(a, 0, 1)", "__threadfence();", "", "atomicExch(a, 0);"),
        _lock("atomicCAS(a, 0, 1)", "__threadfence();", "__threadfence();", "va[0] = 0;"),
    ),
    Pair(
        "lock_with_fences_of_block",
        3,
        1,
        _NF,
        _lock("atomicCAS(a, 0, 1)", "__threadfence_block();", "__threadfence_block();", "atomicExch(a, 0);"),
        _lock("atomicCAS(a, 0, 1)", "__threadfence();", "__threadfence();", "atomicExch(a, 0);"),
    ),
    Pair(
        "lock_of_block_scope",
        3,
        1,
        _NA,
        _lock("atomicCAS_block(a, 0, 1)", "__threadfence();", "__threadfence();", "atomicExch_block(a, 0);"),
        _lock("atomicCAS_system(a, 0, 1)", "__threadfence();", "__threadfence();", "atomicExch_system(a, 0);"),
    ),
    Pair(
        "unlock_before_store",
        3,
        1,
        _NO,
        _lock("atomicCAS(a, 0, 1)", "__threadfence();", "__threadfence();", "atomicExch(a, 0); a[8] = k;", ""),
        _lock("atomicCAS(a, 0, 1)", "__threadfence();", "__threadfence();", "atomicExch(a, 0);"),
    ),
    Pair(
        "two_locks",
        2,
        1,
        _NO,
        _lock("atomicCAS(a + k, 0, 1)", "__threadfence();", "__threadfence();", "atomicExch(a + k, 0);"),
        _lock(
            "atomicCAS(a + k, 0, 1)", "__threadfence();", "__threadfence();", "atomicExch(a + k, 0);", "a[8 + k] += 1;"
        ),
    ),
    # ---- barriers ----
    Pair("exchange", 1, 64, _NB, "s[i] = i; a[i] = s[63 - i];", "s[i] = i; __syncthreads(); a[i] = s[63 - i];"),
    Pair(
        "second_barrier",
        1,
        64,
        _NB,
        "for (int j = 0; j < 3; j++) { s[i] = i + j; __syncthreads(); a[64 * j + i] = s[63 - i]; }",
        "for (int j = 0; j < 3; j++) { s[i] = i + j; __syncthreads(); a[64 * j + i] = s[63 - i]; __syncthreads(); }",
    ),
    Pair(
        "global_memory_of_a_block",
        1,
        64,
        _NB,
        "a[i] = i; a[64 + i] = a[63 - i];",
        "a[i] = i; __syncthreads(); a[64 + i] = a[63 - i];",
    ),
    Pair(
        "fence_is_no_barrier",
        1,
        64,
        _NB,
        "s[i] = i; __threadfence(); a[i] = s[63 - i];",
        "s[i] = i; __syncthreads(); __threadfence(); a[i] = s[63 - i];",
    ),
    Pair(
        "fence_of_block_is_no_barrier",
        1,
        64,
        _NB,
        "s[i] = i; __threadfence_block(); a[i] = s[63 - i];",
        "s[i] = i; __threadfence_block(); __syncthreads(); a[i] = s[63 - i];",
    ),
    Pair(
        "barrier_that_counts",
        1,
        64,
        _NB,
        "int t = __syncthreads_count(i & 1); s[i] = t; a[i] = s[63 - i];",
        "s[i] = i; int t = __syncthreads_count(i & 1); a[i] = s[63 - i] + t;",
    ),
    Pair(
        "reduction_tree",
        1,
        128,
        _NB,
        "s[i] = i; for (int j = 64; j; j /= 2) { __syncthreads(); if (i < j) s[i] += s[i + j]; } if (i == 100) a[0] = s[0];",
        "s[i] = i; for (int j = 64; j; j /= 2) { __syncthreads(); if (i < j) s[i] += s[i + j]; } __syncthreads(); if (i == 100) a[0] = s[0];",
    ),
    Pair(
        "named_barrier_of_a_part",
        1,
        96,
        _NB,
        "s[i] = i; if (i < 64) { sync(1, 64); a[i] = s[i + 32]; }",
        "s[i] = i; if (i < 64) { sync(1, 64); a[i] = s[63 - i]; }",
    ),
    Pair(
        "two_named_barriers",
        1,
        128,
        _NB,
        "s[i] = i; sync(1 + i / 64, 64); a[i] = s[127 - i];",
        "s[i] = i; sync(1 + i / 64, 64); a[i] = s[i ^ 63];",
    ),
    Pair(
        "named_barriers_in_turn",
        1,
        96,
        _NB,
        "if (i < 64) { if (i < 32) s[i] = i; sync(1, 64); } if (i >= 32) { if (i < 64) c[i] = 1; sync(2, 64); if (i >= 64) a[i] = c[i - 32] + s[i - 64]; else c[i] = 2; }",
        "if (i < 64) { if (i < 32) s[i] = i; sync(1, 64); } if (i >= 32) { if (i < 64) c[i] = 1; sync(2, 64); if (i >= 64) a[i] = c[i - 32] + s[i - 64]; }",
    ),
    Pair(
        "who_arrives_does_not_wait",
        1,
        64,
        _NB,
        "if (i < 32) { s[i] = i; arrive(1, 64); a[i] = s[32 + i]; } else { s[i] = i; sync(1, 64); }",
        "if (i < 32) { s[i] = i; arrive(1, 64); } else { sync(1, 64); a[i] = s[i - 32]; }",
    ),
    Pair(
        "producer_and_consumer",
        1,
        64,
        _NB,
        "if (i < 32) { s[i] = i; arrive(1, 64); s[i] = 2 * i; } else { sync(1, 64); a[i] = s[i - 32]; }",
        "for (int j = 0; j < 2; j++) if (i < 32) { if (j) sync(2, 64); s[i] = j; arrive(1, 64); } else { sync(1, 64); a[64 * j + i] = s[i - 32]; if (!j) arrive(2, 64); }",
    ),
    # ---- warps ----
    Pair("warp_exchange", 1, 32, _NW, "s[i] = i; a[i] = s[31 - i];", "s[i] = i; __syncwarp(); a[i] = s[31 - i];"),
    Pair(
        "warps_of_a_block",
        1,
        64,
        _NB,
        "s[i] = i; __syncwarp(); a[i] = s[63 - i];",
        "s[i] = i; __syncwarp(); a[i] = s[i ^ 31];",
    ),
    Pair(
        "mask_without_a_lane",
        1,
        32,
        _NW,
        "s[i] = i; if (i < 16) { __syncwarp(0xffff); a[i] = s[31 - i]; }",
        "s[i] = i; if (i < 16) { __syncwarp(0xffff); a[i] = s[15 - i]; }",
    ),
    Pair(
        "two_masks",
        1,
        32,
        _NW,
        "s[i] = i; __syncwarp(i < 16 ? 0xffffu : 0xffff0000u); a[i] = s[31 - i];",
        "s[i] = i; __syncwarp(i < 16 ? 0xffffu : 0xffff0000u); a[i] = s[i ^ 15];",
    ),
    Pair(
        "masks_in_turn",
        1,
        32,
        _NW,
        "if (i == 0) s[0] = a[0]; if (i < 2) __syncwarp(3); if (i == 2) a[i] = s[0]; if (i == 1 || i == 2) __syncwarp(6);",
        "if (i == 0) s[0] = a[0]; if (i < 2) __syncwarp(3); if (i == 1 || i == 2) __syncwarp(6); if (i == 2) a[i] = s[0];",
    ),
    Pair(
        "shuffle_orders_no_memory",
        1,
        32,
        _NW,
        "s[i] = i; int t = __shfl_xor_sync(~0u, i, 1); a[i] = s[31 - i] + t;",
        "s[i] = i; int t = __shfl_xor_sync(~0u, i, 1); __syncwarp(); a[i] = s[31 - i] + t;",
    ),
    Pair(
        "vote_orders_no_memory",
        1,
        32,
        _NW,
        "s[i] = i; int t = __any_sync(~0u, i); a[i] = s[31 - i] + t;",
        "s[i] = i; __syncwarp(); int t = __any_sync(~0u, i); a[i] = s[31 - i] + t;",
    ),
    Pair(
        "warp_sum",
        1,
        32,
        _NW,
        "s[i] = i; __syncwarp(); for (int j = 16; j; j /= 2) { if (i < j) s[i] += s[i + j]; } a[i] = s[i];",
        "s[i] = i; __syncwarp(); for (int j = 16; j; j /= 2) { if (i < j) s[i] += s[i + j]; __syncwarp(); } a[i] = s[i];",
    ),
    # ---- bytes, vectors, many readers ----
    Pair("bytes_of_a_word", 1, 64, _NB, "c[i] = 1; a[i] = c[i ^ 32];", "c[i] = 1; a[i] = c[i];"),
    Pair(
        "two_bytes_and_a_word",
        1,
        64,
        _NB,
        "if (i < 2) c[i] = 1; if (i == 32) a[0] = *(int *)c;",
        "if (i < 2) c[i] = 1; __syncthreads(); if (i == 32) a[0] = *(int *)c;",
    ),
    Pair(
        "first_byte_of_three",
        3,
        1,
        _NO,
        "if (k < 2) b[k] = 1; else a[8] = b[0];",
        "if (k < 2) b[k] = 1; else a[8] = b[2];",
    ),
    Pair("wide_store_over_bytes", 2, 1, _NO, "if (k) d[0] = 5; else b[7] = 1;", "if (k) d[0] = 5; else b[8] = 1;"),
    Pair(
        "vectors",
        2,
        1,
        _NO,
        "if (k) *(int4 *)a = make_int4(1, 2, 3, 4); else a[3] = 1;",
        "if (k) *(int4 *)a = make_int4(1, 2, 3, 4); else a[4] = 1;",
    ),
    Pair(
        "vector_reads",
        1,
        64,
        _NW,
        "s[i] = i; if (i < 16) { int4 v = ((int4 *)s)[i]; a[i] = v.x + v.w; }",
        "s[i] = i; __syncthreads(); if (i < 16) { int4 v = ((int4 *)s)[i]; a[i] = v.x + v.w; }",
    ),
    Pair(
        "third_reader",
        1,
        128,
        _NB,
        "s[i] = 0; __syncthreads(); if (i % 32 == 0 && i < 96) a[i] = s[0]; __syncwarp(); if (i == 96) s[0] = 1;",
        "s[i] = 0; __syncthreads(); if (i % 32 == 0 && i < 96) a[i] = s[0]; __syncthreads(); if (i == 96) s[0] = 1;",
    ),
    Pair(
        "first_of_many_readers",
        1,
        128,
        _NB,
        "s[i] = 0; __syncthreads(); if (i < 96) { a[i] = s[0]; if (i >= 32) sync(1, 96); } if (i >= 96) { sync(1, 96); if (i == 96) s[0] = 1; }",
        "s[i] = 0; __syncthreads(); if (i < 96) { a[i] = s[0]; sync(1, 128); } if (i >= 96) { sync(1, 128); if (i == 96) s[0] = 1; }",
    ),
    Pair(
        "lane_among_readers",
        1,
        32,
        _NW,
        "s[i] = 0; __syncwarp(); a[i] = s[0]; if (i) __syncwarp(~1u); if (i == 9) s[0] = 1;",
        "s[i] = 0; __syncwarp(); if (i) { a[i] = s[0]; __syncwarp(~1u); } if (i == 9) s[0] = 1;",
    ),
    Pair(
        "read_before_write",
        1,
        64,
        _NB,
        "s[i] = 0; __syncthreads(); int t = s[(i + 1) % 64]; s[i] = t;",
        "s[i] = 0; __syncthreads(); int t = s[(i + 1) % 64]; __syncthreads(); s[i] = t;",
    ),
    # ---- asynchronous copies ----
    Pair(
        "copy_read_before_wait",
        1,
        32,
        _COPY,
        "copy4(s + i, a + i); commit(); a[64 + i] = s[i];",
        "copy4(s + i, a + i); commit(); wait<0>(); a[64 + i] = s[i];",
    ),
    Pair(
        "copy_without_barrier",
        1,
        64,
        _COPY,
        "copy4(s + i, a + i); commit(); wait<0>(); a[64 + i] = s[63 - i];",
        "copy4(s + i, a + i); commit(); wait<0>(); __syncthreads(); a[64 + i] = s[63 - i];",
    ),
    Pair(
        "barrier_is_no_wait",
        1,
        64,
        _COPY,
        "copy4(s + i, a + i); commit(); __syncthreads(); a[64 + i] = s[63 - i]; wait<0>();",
        "copy4(s + i, a + i); commit(); wait<0>(); __syncthreads(); a[64 + i] = s[63 - i];",
    ),
    Pair(
        "wait_for_another_group",
        1,
        32,
        _COPY,
        "copy4(s + i, a + i); commit(); copy4(s + 64 + i, a + 64 + i); commit(); wait<1>(); a[128 + i] = s[64 + i];",
        "copy4(s + i, a + i); commit(); copy4(s + 64 + i, a + 64 + i); commit(); wait<1>(); a[128 + i] = s[i];",
    ),
    Pair(
        "copy_without_group",
        1,
        32,
        _COPY,
        "commit(); copy4(s + i, a + i); wait<0>(); a[64 + i] = s[i];",
        'copy4(s + i, a + i); asm volatile("cp.async.wait_all;" ::: "memory"); a[64 + i] = s[i];',
    ),
    Pair(
        "source_overwritten",
        1,
        32,
        _COPY,
        "copy4(s + i, a + i); commit(); a[i] = 1; wait<0>();",
        "copy4(s + i, a + i); commit(); wait<0>(); a[i] = 1;",
    ),
    Pair(
        "two_stages",
        1,
        64,
        _COPY,
        "copy4(s + i, a + i); commit(); for (int j = 0; j < 3; j++) { copy4(s + 64 * (~j & 1) + i, a + 64 * (j + 1) + i); commit(); wait<1>(); __syncthreads(); a[512 + i] = s[64 * (j & 1) + (i ^ 40)]; } wait<0>();",
        "copy4(s + i, a + i); commit(); for (int j = 0; j < 3; j++) { copy4(s + 64 * (~j & 1) + i, a + 64 * (j + 1) + i); commit(); wait<1>(); __syncthreads(); a[512 + i] = s[64 * (j & 1) + (i ^ 40)]; __syncthreads(); } wait<0>();",
    ),
    # ---- mbarriers ----
    Pair(
        "mbarrier_not_waited",
        1,
        64,
        _NB,
        "if (!i) init(m, 64); __syncthreads(); s[i] = i; arrive(m); a[i] = s[63 - i];",
        "if (!i) init(m, 64); __syncthreads(); s[i] = i; arrive(m); while (!passed(m, 0)) ; a[i] = s[63 - i];",
    ),
    Pair(
        "mbarrier_not_initialized_for_all",
        1,
        64,
        _NB,
        "if (!i) init(m, 64); __syncwarp(); if (i >= 32) arrive(m + 0); if (i < 32) arrive(m);",
        "if (!i) init(m, 64); __syncthreads(); arrive(m);",
    ),
    Pair(
        "store_after_arrival",
        1,
        64,
        _NB,
        "if (!i) init(m, 64); __syncthreads(); arrive(m); s[i] = i; while (!passed(m, 0)) ; a[i] = s[63 - i];",
        "if (!i) init(m, 64); __syncthreads(); s[i] = i; arrive(m); while (!passed(m, 0)) ; a[i] = s[63 - i];",
    ),
    Pair(
        "phase_before_last",
        1,
        64,
        _NB,
        "if (!i) init(m, 64); __syncthreads(); s[i] = 1; arrive(m); while (!passed(m, 0)) ; s[64 + i] = 2; arrive(m); a[i] = s[127 - i]; while (!passed(m, 1)) ;",
        "if (!i) init(m, 64); __syncthreads(); s[i] = 1; arrive(m); while (!passed(m, 0)) ; s[64 + i] = 2; arrive(m); a[i] = s[63 - i]; while (!passed(m, 1)) ; a[i] += s[127 - i];",
    ),
    Pair(
        "copies_arrive",
        1,
        64,
        _COPY,
        "if (!i) init(m, 64); __syncthreads(); copy4(s + i, a + i); arrive(m); while (!passed(m, 0)) ; a[64 + i] = s[63 - i];",
        "if (!i) init(m, 64); __syncthreads(); copy4(s + i, a + i); arrive_copies(m); while (!passed(m, 0)) ; a[64 + i] = s[63 - i];",
    ),
    Pair(
        "relaxed_link_of_a_chain",
        3,
        32,
        _FENCE,
        "if (!i) { if (k == 0) { a[8] = 1; release(a, 1); } else if (k == 1) { while (!relaxed(a)) ; release(a + 1, 1); } else { while (!acquire(a + 1)) ; while (!relaxed(a)) ; a[9] = a[8]; } }",
        "if (!i) { if (k == 0) { a[8] = 1; release(a, 1); } else if (k == 1) { while (!acquire(a)) ; release(a + 1, 1); } else { while (!acquire(a + 1)) ; a[9] = a[8]; } }",
    ),
    Pair(
        "store_ends_a_release_sequence",
        3,
        32,
        _NO,
        "if (!i) { if (k == 0) { a[8] = 1; release(a, 1); } else if (k == 1) { while (relaxed(a) != 1) ; relax(a, 2); } else { while (acquire(a) != 2) ; a[9] = a[8]; } }",
        "if (!i) { if (k == 0) { a[8] = 1; release(a, 1); } else if (k == 1) { while (relaxed(a) != 1) ; atomicAdd(a, 1); } else { while (acquire(a) != 2) ; a[9] = a[8]; } }",
    ),
    Pair(
        "unlock_by_a_plain_store",
        4,
        32,
        _NO,
        _lock("atomicCAS(a, 0, 1)", "__threadfence();", "__threadfence();", "a[0] = 0;"),
        _lock("atomicCAS(a, 0, 1)", "__threadfence();", "__threadfence();", "va[0] = 0;"),
    ),
    Pair(
        "two_locks_for_one_word",
        4,
        32,
        _NO,
        "if (!i) { int *lock = a + (k & 1); while (atomicCAS(lock, 0, 1)) ; __threadfence(); a[8] += 1; __threadfence(); atomicExch(lock, 0); }",
        "if (!i) { int *lock = a + (k & 1); while (atomicCAS(lock, 0, 1)) ; __threadfence(); a[8 + (k & 1)] += 1; __threadfence(); atomicExch(lock, 0); }",
    ),
    Pair(
        "atomic_on_half_of_a_vector",
        2,
        32,
        _NO,
        "if (!i) { if (k) atomicAdd(a + 1, 1); else *(int2 *)a = make_int2(1, 2); }",
        "if (!i) { if (k) atomicAdd(a + 2, 1); else *(int2 *)a = make_int2(1, 2); }",
    ),
    Pair(
        "wide_atomic_over_a_word",
        2,
        32,
        _NO,
        "if (!i) { if (k) atomicAdd(d, 1ull); else a[1] = 2; }",
        "if (!i) { if (k) atomicAdd(d, 1ull); else a[2] = 2; }",
    ),
    Pair(
        "shorts_over_bytes",
        1,
        32,
        _NW,
        "if (i < 16) ((short *)a)[i] = 1; else b[2 * (i - 16) + 1] = 2;",
        "if (i < 16) ((short *)a)[i] = 1; else b[32 + 2 * (i - 16) + 1] = 2;",
    ),
    Pair(
        "generic_pointer",
        1,
        64,
        _NB,
        "int *p = a[100] ? a : s; p[i] = i; a[200 + i] = p[63 - i];",
        "int *p = a[100] ? a : s; p[i] = i; __syncthreads(); a[200 + i] = p[63 - i];",
    ),
    Pair("array_passed_by_pointer", 1, 64, _NW, "fill(s + 4 * i, 5);", "fill(s + 4 * i, 4);"),
    Pair(
        "some_leave_before_the_barrier",
        1,
        64,
        _NB,
        "s[i] = i; if (i >= 32) return; __syncwarp(); a[i] = s[i + 32];",
        "s[i] = i; if (i >= 32) return; __syncthreads(); a[i] = s[i + 32];",
    ),
    Pair(
        "one_buffer_for_two_rounds",
        1,
        64,
        _NB,
        "for (int r = 0; r < 4; r++) { s[i] = r; __syncthreads(); a[64 * r + i] = s[63 - i]; }",
        "for (int r = 0; r < 4; r++) { int *p = s + 64 * (r & 1); p[i] = r; __syncthreads(); a[64 * r + i] = p[63 - i]; }",
    ),
    Pair(
        "start_of_an_atomic_counter",
        1,
        64,
        _NW,
        "if (!i) s[0] = 0; atomicAdd(s, 1); __syncthreads(); a[i] = s[0];",
        "if (!i) s[0] = 0; __syncthreads(); atomicAdd(s, 1); __syncthreads(); a[i] = s[0];",
    ),
    Pair("places_given_out_by_an_atomic", 2, 64, _NW, "a[8 + atomicAdd(a, 1) / 2] = g;", "a[8 + atomicAdd(a, 1)] = g;"),
]
