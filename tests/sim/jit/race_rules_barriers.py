"""Barriers of blocks and warps, shared memory that is used again, and accesses of several sizes."""

from __future__ import annotations

from race_rules import Pair, Rule

__all__ = ["PAIRS", "PRELUDE"]

PRELUDE = r"""
typedef unsigned long long u64;
#define D __device__ __forceinline__
#define ALL 0xffffffffu
D void meet(int id, int n) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(n) : "memory"); }
D void come(int id, int n) { asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(n) : "memory"); }
extern __shared__ int dynamic[];
"""

PAIRS = [
    # ---- named barriers ----
    Pair(
        "named_for_two_warps",
        Rule.BARRIER,
        "s[t] = t; if (t < 64) meet(1, 64); if (t < 32) h[me] = s[t + @];",
        "64",
        "32",
        block=96,
    ),
    Pair("named_count_of_one_warp", Rule.COUNT, "s[t] = t; meet(1, @); h[me] = s[t ^ 32];", "32", "64"),
    Pair(
        "named_across_pairs", Rule.BARRIER, "s[t] = t; meet(1 + t / 64, 64); h[me] = s[t ^ @];", "64", "32", block=128
    ),
    Pair(
        "named_shared_by_pairs", Rule.COUNT, "s[t] = t; meet(@, 64); h[me] = s[t ^ 32];", "1", "1 + t / 64", block=128
    ),
    Pair(
        "named_reused",
        Rule.BARRIER,
        "g[t] = t; meet(1 + t / 64, 64); h[me] = g[t ^ 32]; @ g[t] = 5;",
        "__syncwarp();",
        "meet(1 + t / 64, 64);",
        block=128,
    ),
    Pair(
        "named_other_number",
        Rule.BARRIER,
        "if (t < 32) { s[t] = t; come(1, 64); come(2, 64); } else if (t < 64) { meet(1, 64); h[me] = s[t - 32]; }"
        " else { meet(2, 64); s[@] = 1; }",
        "t - 64",
        "t",
        block=96,
    ),
    Pair(
        "arrive_then_sync",
        Rule.ARRIVE,
        "if (t < 32) { s[t] = t; @(1, 64); } else { @(1, 64); h[me] = s[t - 32]; }",
        ("meet", "come"),
        ("come", "meet"),
    ),
    Pair(
        "arrive_before_the_write",
        Rule.ARRIVE,
        "if (t < 32) { @ come(1, 64); @ } else { meet(1, 64); h[me] = s[t - 32]; }",
        ("", "s[t] = t;"),
        ("s[t] = t;", ""),
    ),
    Pair(
        "arrive_and_read_back",
        Rule.ARRIVE,
        "if (t < 32) { come(1, 64); @ h[me] = s[t + 32]; } else { s[t] = t; meet(1, 64); @ }",
        "",
        "meet(2, 64);",
    ),
    Pair(
        "full_and_empty_without_empty",
        Rule.ARRIVE,
        """for (int i = 0; i < 3; i++)
             if (t < 32) { s[@ t] = i; come(1 + i, 64); } else { meet(1 + i, 64); h[me + 64 * i] = s[@ t - 32]; }""",
        "",
        "32 * i +",
    ),
    Pair(
        "empty_before_the_read",
        Rule.ARRIVE,
        """for (int i = 0; i < 3; i++)
             if (t < 32) { if (i) meet(2, 64); s[t] = i; come(1, 64); }
             else { meet(1, 64); @ h[me + 64 * i] = s[t - 32]; @ }""",
        ("if (i < 2) come(2, 64);", ""),
        ("", "if (i < 2) come(2, 64);"),
    ),
    Pair(
        "chain_of_barriers",
        Rule.CHAIN,
        "if (t < 32) { s[t] = t; come(1, 64); } else if (t < 64) { @ } else { meet(2, 64); h[me] = s[t - 64]; }",
        "come(2, 64); meet(1, 64);",
        "meet(1, 64); come(2, 64);",
        block=96,
    ),
    Pair(
        "two_producers",
        Rule.ARRIVE,
        "if (t < 64) { s[t] = t; come(@); } else { meet(@); h[me] = s[t - 32]; }",
        ("t < 32 ? 1 : 3, 64", "1, 64"),
        "1, 96",
        block=96,
    ),
    Pair(
        "reducing_barrier",
        Rule.INTRINSIC,
        "s[t] = t; int n = @; h[me] = s[t ^ 32] + n;",
        "__popc(__ballot_sync(ALL, t & 1))",
        "__syncthreads_count(t & 1)",
    ),
    Pair(
        "reducing_barrier_and",
        Rule.BARRIER,
        "s[t] = t; int n = __syncthreads_and(t < 99); s[@] = n; h[me] = s[t];",
        "t ^ 32",
        "t",
    ),
    Pair(
        "barrier_only_of_the_first_warps",
        Rule.BARRIER,
        "s[t] = t; if (t < 64) @; __syncwarp(); if (t < 64) h[me] = s[t ^ 32]; __syncthreads();",
        "__syncwarp()",
        "meet(3, 64)",
        block=96,
    ),
    # ---- lanes of a warp ----
    Pair("warp_exchange", Rule.WARP, "s[t] = t; @ h[me] = s[t ^ 1];", "", "__syncwarp();", block=32),
    Pair(
        "warp_half_mask",
        Rule.WARP,
        "s[t] = t; if (t < 16) { __syncwarp(0xffff); h[me] = s[t ^ @]; }",
        "16",
        "8",
        block=32,
    ),
    Pair(
        "warp_two_masks",
        Rule.WARP,
        "s[t] = t; __syncwarp(t < 16 ? 0xffff : 0xffff0000); h[me] = s[t ^ @];",
        "16",
        "1",
        block=32,
    ),
    Pair(
        "warp_pairs_of_lanes", Rule.WARP, "s[t] = t; __syncwarp(3u << (t & 30)); h[me] = s[t ^ @];", "2", "1", block=32
    ),
    Pair(
        "warp_chain_of_masks",
        Rule.CHAIN,
        "if (t == 0) g[0] = 1; @ if (t == 2) h[me] = g[0];",
        "if (t == 1 || t == 2) __syncwarp(6); if (t < 2) __syncwarp(3);",
        "if (t < 2) __syncwarp(3); if (t == 1 || t == 2) __syncwarp(6);",
        block=32,
    ),
    Pair(
        "warp_loop_of_lanes",
        Rule.WARP,
        "for (int i = 0; i < 4; i++) { s[t] = i; __syncwarp(); h[me + 32 * i] = s[t ^ 3]; @ }",
        "",
        "__syncwarp();",
        block=32,
    ),
    Pair("warp_of_other_warp", Rule.WARP, "s[t] = t; @; h[me] = s[t ^ 32];", "__syncwarp()", "__syncthreads()"),
    Pair(
        "warp_shuffle_orders_nothing",
        Rule.INTRINSIC,
        "s[t] = t; int v = __shfl_xor_sync(ALL, t, 1); @ h[me] = s[t ^ 1] + v;",
        "",
        "__syncwarp();",
        block=32,
    ),
    Pair(
        "warp_shuffled_address",
        Rule.INTRINSIC,
        "int i = t ^ 5; s[i] = t; int k = __shfl_sync(ALL, i, t ^ 1); @ h[me] = s[k];",
        "",
        "__syncwarp();",
        block=32,
    ),
    Pair(
        "warp_ballot_orders_nothing",
        Rule.INTRINSIC,
        "s[t] = t; unsigned v = __ballot_sync(ALL, t & 1); @ h[me] = s[t ^ 1] + v;",
        "",
        "__syncwarp();",
        block=32,
    ),
    Pair(
        "warp_all_orders_nothing",
        Rule.INTRINSIC,
        "s[t] = t; if (__all_sync(ALL, t < 50)) { @ h[me] = s[t ^ 2]; }",
        "",
        "__syncwarp();",
        block=32,
    ),
    Pair(
        "warp_match_orders_nothing",
        Rule.INTRINSIC,
        "s[t] = t; unsigned v = __match_any_sync(ALL, t >> 1); @ h[me] = s[t ^ 1] + v;",
        "",
        "__syncwarp();",
        block=32,
    ),
    Pair(
        "warp_reduce_orders_nothing",
        Rule.INTRINSIC,
        "s[t] = t; int v = __reduce_add_sync(ALL, t); @ h[me] = s[t ^ 1] + v;",
        "",
        "__syncwarp();",
        block=32,
    ),
    Pair(
        "warp_active_mask_orders_nothing",
        Rule.INTRINSIC,
        "s[t] = t; unsigned v = __activemask(); @ h[me] = s[t ^ 1] + v;",
        "",
        "__syncwarp();",
        block=32,
    ),
    Pair(
        "warp_tree",
        Rule.WARP,
        "s[t] = t; __syncwarp(); for (int i = 16; i; i >>= 1) { if (t < i) s[t] += s[t + i]; @ } if (!t) h[0] = s[0];",
        "",
        "__syncwarp();",
        block=32,
    ),
    Pair(
        "warp_read_and_write_in_one",
        Rule.WARP,
        "s[t] = t; __syncwarp(); int v = s[t ^ 1]; @ s[t] += v; __syncwarp(); h[me] = s[t];",
        "",
        "__syncwarp();",
        block=32,
    ),
    Pair("warp_leader_tells", Rule.WARP, "if (t % 32 == 0) s[t / 32] = t; @ h[me] = s[t / 32];", "", "__syncwarp();"),
    Pair("warp_global_memory", Rule.WARP, "g[t] = t; @ h[me] = g[t ^ 4];", "", "__syncwarp();", block=32),
    # ---- shared memory that is used again ----
    Pair(
        "tree",
        Rule.BARRIER,
        "s[t] = t; __syncthreads(); for (int i = 64; i; i >>= 1) { if (t < i) s[t] += s[t + i]; @ } if (!t) h[0] = s[0];",
        "",
        "__syncthreads();",
        block=128,
    ),
    Pair(
        "tree_read_by_all",
        Rule.BARRIER,
        "s[t] = t; for (int i = 64; i; i >>= 1) { __syncthreads(); if (t < i) s[t] += s[t + i]; } @ h[me] = s[0];",
        "",
        "__syncthreads();",
        block=128,
    ),
    Pair(
        "tile_loop",
        Rule.BARRIER,
        "int sum = 0; for (int i = 0; i < 4; i++) { s[t] = g[64 * i + t]; __syncthreads(); sum += s[t ^ 33]; @ } h[me] = sum;",
        "",
        "__syncthreads();",
    ),
    Pair(
        "ping_pong",
        Rule.BARRIER,
        "s[t] = t; __syncthreads(); for (int i = 0; i < 4; i++) { int *from = i & 1 ? @ : s, *to = i & 1 ? s : @;"
        " to[t] = from[t ^ 32] + 1; __syncthreads(); } h[me] = s[t];",
        "s",
        "q",
    ),
    Pair(
        "ping_pong_without_barrier",
        Rule.BARRIER,
        "s[t] = t; __syncthreads(); for (int i = 0; i < 4; i++) { int *from = i & 1 ? q : s, *to = i & 1 ? s : q;"
        " to[t] = from[t ^ 32] + 1; @ } h[me] = s[t];",
        "",
        "__syncthreads();",
    ),
    Pair(
        "two_buffers_one_barrier",
        Rule.BARRIER,
        "for (int i = 0; i < 6; i++) { s[64 * (i % @) + t] = i; __syncthreads(); h[me + 64 * i] = s[64 * (i % @) + (t ^ 32)]; }",
        "1",
        "2",
    ),
    Pair(
        "scan_in_place",
        Rule.BARRIER,
        "s[t] = t; __syncthreads(); for (int i = 1; i < 64; i *= 2) { int v = t >= i ? s[t - i] : 0; @ s[t] += v; __syncthreads(); }"
        " h[me] = s[t];",
        "",
        "__syncthreads();",
    ),
    Pair(
        "broadcast_in_a_loop",
        Rule.BARRIER,
        "for (int i = 0; i < 4; i++) { if (!t) s[0] = i; __syncthreads(); h[me + 64 * i] = s[0]; @ }",
        "",
        "__syncthreads();",
    ),
    Pair(
        "broadcast_of_two_words",
        Rule.BARRIER,
        "for (int i = 0; i < 4; i++) { if (!t) s[@] = i; __syncthreads(); h[me + 64 * i] = s[@]; }",
        "0",
        "i & 1",
    ),
    Pair(
        "sums_of_warps_twice",
        Rule.BARRIER,
        "for (int i = 0; i < 2; i++) { int v = __reduce_add_sync(ALL, t + i); if (t % 32 == 0) s[t / 32] = v; __syncthreads();"
        " h[me + 128 * i] = s[0] + s[1] + s[2] + s[3]; @ }",
        "",
        "__syncthreads();",
        block=128,
    ),
    Pair(
        "halo",
        Rule.BARRIER,
        "s[t + 1] = t; if (!t) s[0] = s[129] = 9; @ h[me] = s[t] + s[t + 1] + s[t + 2];",
        "",
        "__syncthreads();",
        block=128,
    ),
    Pair(
        "zeroed_by_others",
        Rule.BARRIER,
        "s[t] = 0; @ atomicAdd(&s[(t * 7) & 127], 1); __syncthreads(); h[me] = s[t];",
        "",
        "__syncthreads();",
        block=128,
    ),
    Pair(
        "histogram",
        Rule.RACE,
        "s[t] = 0; __syncthreads(); int i = t * 7 & 15; @; __syncthreads(); h[me] = s[t];",
        "s[i] = s[i] + 1",
        "atomicAdd(&s[i], 1)",
        block=128,
    ),
    Pair(
        "histogram_read_while_counted",
        Rule.RACE,
        "s[t] = 0; __syncthreads(); atomicAdd(&s[t & 15], 1); @ h[me] = s[t & 15];",
        "",
        "__syncthreads();",
        block=128,
    ),
    Pair(
        "flag_of_any_thread",
        Rule.RACE,
        "if (!t) s[0] = 0; __syncthreads(); if (t & 1) @; __syncthreads(); h[me] = s[0];",
        "s[0] = 1",
        "atomicExch(&s[0], 1)",
    ),
    Pair(
        "arrays_that_overlap",
        Rule.BYTES,
        "int *one = s, *two = s + @; one[t] = t; two[t] = 1; h[me] = one[t] + two[t];",
        "63",
        "64",
    ),
    Pair("blocks_share_an_element", Rule.RACE, "g[b * @ + t] = t;", "63", "64", grid=3),
    Pair("blocks_stencil_in_place", Rule.RACE, "@[me] = g[me] + g[me + 1];", "g", "h", grid=2),
    Pair(
        "block_reads_what_another_writes",
        Rule.BARRIER,
        "g[me] = t; __syncthreads(); h[me] = g[me ^ @];",
        "64",
        "32",
        grid=2,
    ),
    # ---- sizes ----
    Pair(
        "byte_and_half",
        Rule.BYTES,
        "if (t < 32) ((char *)g)[4 * t] = 1; else ((short *)g)[2 * (t - 32) + @] = 2;",
        "0",
        "1",
    ),
    Pair("byte_and_word", Rule.BYTES, "if (t < 32) ((char *)g)[8 * t + @] = 1; else g[2 * (t - 32)] = 2;", "3", "4"),
    Pair(
        "byte_and_vector",
        Rule.BYTES,
        "if (t < 16) ((char *)g)[32 * t + @] = 1; else if (t < 32) ((int4 *)g)[2 * (t - 16)] = make_int4(1, 2, 3, 4);",
        "15",
        "16",
        block=32,
    ),
    Pair(
        "vector_read_of_a_neighbour",
        Rule.BYTES,
        "if (t < 16) { int2 v = *(int2 *)(s + 8 * t + 2); h[me] = v.x + v.y; } else if (t < 32) s[8 * (t - 16) + @] = 1;",
        "3",
        "4",
        block=32,
    ),
    Pair(
        "vectors_of_device_memory",
        Rule.BYTES,
        "((int4 *)g)[2 * t] = make_int4(1, 2, 3, 4); ((char *)g)[32 * (t ^ 1) + @] = 5;",
        "9",
        "25",
        block=32,
    ),
    Pair(
        "double_and_word", Rule.BYTES, "if (t < 32) ((double *)s)[t] = t; else h[me] = s[@ + 2 * (t - 32)];", "1", "128"
    ),
    Pair("bytes_of_three", Rule.BYTES, "char *c = (char *)g; for (int i = 0; i < @; i++) c[3 * t + i] = t;", "4", "3"),
    Pair("bytes_of_one_word", Rule.BYTES, "((char *)g)[t @] = t;", "& ~1", "", block=128),
    Pair("halves_of_one_word", Rule.BYTES, "((short *)g)[t] = t; h[me] = ((short *)g)[t ^ @];", "1", "0"),
    Pair(
        "bit_fields",
        Rule.BYTES,
        "struct F { unsigned a : 4, b : 4; unsigned : 0; unsigned c : 4; }; F *f = (F *)s; if (!t) f->a = 3; if (t == 32) f->@ = 2;",
        "b",
        "c",
    ),
    Pair(
        "atomic_and_byte",
        Rule.BYTES,
        "if (t < 32) atomicAdd(&s[2 * t], 1); else ((char *)s)[8 * (t - 32) + @] = 1;",
        "2",
        "5",
    ),
    Pair(
        "atomic_and_plain_read",
        Rule.RACE,
        "if (t < 32) atomicAdd(&g[0], 1); else h[me] = @;",
        "g[0]",
        "*(volatile int *)g",
    ),
    Pair(
        "atomic_and_plain_write",
        Rule.RACE,
        "if (!t) @; __syncwarp(); atomicAdd(&g[0], 1);",
        "g[0] = 0",
        "atomicExch(&g[0], 0)",
    ),
    Pair(
        "wide_atomic_and_plain_half", Rule.BYTES, "if (t < 32) atomicAdd((u64 *)g, 1ull); else h[me] = g[@];", "1", "2"
    ),
    Pair(
        "cached_read_of_what_is_written",
        Rule.READ_ONLY,
        "g[me] = t; __syncthreads(); h[me] = @;",
        "__ldg(g + (me ^ 1))",
        "g[me ^ 1]",
        stale=True,
    ),
    Pair(
        "cached_read_before_the_write",
        Rule.READ_ONLY,
        "int v = __ldg(g + me); __syncthreads(); @[me ^ 32] = v;",
        "g",
        "h",
        stale=True,
    ),
]
