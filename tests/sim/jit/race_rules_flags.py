"""Flags, locks and counters between threads and blocks: scopes, orders and fences."""

from __future__ import annotations

from itertools import product

from race_rules import Pair, Rule

__all__ = ["PAIRS", "PRELUDE"]

_ORDERS = ("relaxed", "acquire", "release")
_SCOPES = ("cta", "gpu", "sys")

_OPERATIONS = "\n".join(
    [
        f'D int ld_{order}_{scope}(const int *p) {{ int v; asm volatile("ld.{order}.{scope}.s32 %0, [%1];" : "=r"(v) : "l"(p) : "memory"); return v; }}'
        for order, scope in product(("relaxed", "acquire"), _SCOPES)
    ]
    + [
        f'D void st_{order}_{scope}(int *p, int v) {{ asm volatile("st.{order}.{scope}.s32 [%0], %1;" ::"l"(p), "r"(v) : "memory"); }}'
        for order, scope in product(("relaxed", "release"), _SCOPES)
    ]
    + [
        f'D int add_{order}_{scope}(int *p, int v) {{ int o; asm volatile("atom.add.{order}.{scope}.s32 %0, [%1], %2;" : "=r"(o) : "l"(p), "r"(v) : "memory"); return o; }}\n'
        f'D int swap_{order}_{scope}(int *p, int v) {{ int o; asm volatile("atom.exch.{order}.{scope}.b32 %0, [%1], %2;" : "=r"(o) : "l"(p), "r"(v) : "memory"); return o; }}\n'
        f'D int cas_{order}_{scope}(int *p, int e, int v) {{ int o; asm volatile("atom.cas.{order}.{scope}.b32 %0, [%1], %2, %3;" : "=r"(o) : "l"(p), "r"(e), "r"(v) : "memory"); return o; }}'
        for order, scope in product((*_ORDERS, "acq_rel"), _SCOPES)
    ]
)

PRELUDE = (
    """
typedef unsigned long long u64;
#define D __device__ __forceinline__
#define FLAG (g + 12288)
"""
    + _OPERATIONS
    + """
D void fence_cta() { asm volatile("fence.acq_rel.cta;" ::: "memory"); }
D void fence_gpu() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }
D void fence_none() { asm volatile("" ::: "memory"); }
#define spin(condition) while (!(condition)) {}
"""
)

# Data, then a flag; the other thread waits for the flag, then reads the data. Threads of two blocks, or of one.
_MESSAGE = "if (!me) {{ g[0] = 7; {write} }} else if ({reader}) {{ {read} h[me] = g[0]; }}"
_OTHER_BLOCK, _OTHER_WARP = ("b == 1", 1, 2), ("t == 32", 64, 1)


def _message(
    name: str, rule: Rule, write: str, read: str, racy: object, right: object, where: tuple[str, int, int]
) -> Pair:
    reader, block, grid = where
    body = _MESSAGE.format(write=write, read=read, reader=reader)
    return Pair(name, rule, body, racy, right, block=block, grid=grid)  # type: ignore[arg-type]


_WAIT = "spin(ld_acquire_gpu(FLAG));"
_MESSAGES = [
    _message("message_relaxed_store", Rule.RELAXED, "st_@_gpu(FLAG, 1);", _WAIT, "relaxed", "release", _OTHER_BLOCK),
    _message(
        "message_relaxed_load",
        Rule.RELAXED,
        "st_release_gpu(FLAG, 1);",
        "spin(ld_@_gpu(FLAG));",
        "relaxed",
        "acquire",
        _OTHER_BLOCK,
    ),
    _message(
        "message_narrow_store",
        Rule.SCOPE,
        "st_release_@(FLAG, 1);",
        "spin(ld_acquire_gpu(FLAG));",
        "cta",
        "gpu",
        _OTHER_BLOCK,
    ),
    _message(
        "message_narrow_load",
        Rule.SCOPE,
        "st_release_gpu(FLAG, 1);",
        "spin(ld_acquire_@(FLAG));",
        "cta",
        "sys",
        _OTHER_BLOCK,
    ),
    _message(
        "message_narrow_both",
        Rule.SCOPE,
        "st_release_@(FLAG, 1);",
        "spin(ld_acquire_@(FLAG));",
        "cta",
        "sys",
        _OTHER_BLOCK,
    ),
    _message(
        "message_in_a_block",
        Rule.RELAXED,
        "st_@_cta(FLAG, 1);",
        "spin(ld_acquire_cta(FLAG));",
        "relaxed",
        "release",
        _OTHER_WARP,
    ),
    _message(
        "message_in_a_block_wider",
        Rule.RELAXED,
        "st_release_sys(FLAG, 1);",
        "spin(ld_@_cta(FLAG));",
        "relaxed",
        "acquire",
        _OTHER_WARP,
    ),
    _message(
        "message_volatile",
        Rule.RELAXED,
        "@ *(volatile int *)FLAG = 1;",
        "spin(*(volatile int *)FLAG); @",
        "",
        "__threadfence();",
        _OTHER_BLOCK,
    ),
    _message(
        "message_volatile_in_a_block",
        Rule.RELAXED,
        "@ *(volatile int *)FLAG = 1;",
        "spin(*(volatile int *)FLAG); @",
        "",
        "__threadfence_block();",
        _OTHER_WARP,
    ),
    _message(
        "message_plain_flag",
        Rule.RACE,
        "__threadfence(); @ = 1;",
        "spin(ld_relaxed_gpu(FLAG)); __threadfence();",
        "*FLAG",
        "*(volatile int *)FLAG",
        _OTHER_BLOCK,
    ),
    _message(
        "message_fence_of_the_writer",
        Rule.FENCE,
        "fence_@(); st_relaxed_gpu(FLAG, 1);",
        _WAIT,
        "none",
        "gpu",
        _OTHER_BLOCK,
    ),
    _message(
        "message_fence_of_the_reader",
        Rule.FENCE,
        "st_release_gpu(FLAG, 1);",
        "spin(ld_relaxed_gpu(FLAG)); fence_@();",
        "none",
        "gpu",
        _OTHER_BLOCK,
    ),
    _message(
        "message_narrow_fence_of_the_writer",
        Rule.SCOPE,
        "fence_@(); st_relaxed_gpu(FLAG, 1);",
        _WAIT,
        "cta",
        "gpu",
        _OTHER_BLOCK,
    ),
    _message(
        "message_narrow_fence_of_the_reader",
        Rule.SCOPE,
        "st_release_gpu(FLAG, 1);",
        "spin(ld_relaxed_gpu(FLAG)); fence_@();",
        "cta",
        "gpu",
        _OTHER_BLOCK,
    ),
    _message(
        "message_narrow_fences",
        Rule.SCOPE,
        "__threadfence@(); atomicExch(FLAG, 1);",
        "spin(atomicAdd(FLAG, 0)); __threadfence@();",
        "_block",
        "",
        _OTHER_BLOCK,
    ),
    _message(
        "message_fence_after_the_flag",
        Rule.FENCE,
        "@ st_relaxed_gpu(FLAG, 1); @",
        _WAIT,
        ("", "fence_gpu();"),
        ("fence_gpu();", ""),
        _OTHER_BLOCK,
    ),
    _message(
        "message_fence_before_the_wait",
        Rule.FENCE,
        "st_release_gpu(FLAG, 1);",
        "@ spin(ld_relaxed_gpu(FLAG)); @",
        ("fence_gpu();", ""),
        ("", "fence_gpu();"),
        _OTHER_BLOCK,
    ),
    _message(
        "message_narrow_exchange",
        Rule.SCOPE,
        "__threadfence(); atomicExch@(FLAG, 1);",
        "spin(atomicAdd(FLAG, 0)); __threadfence();",
        "_block",
        "_system",
        _OTHER_BLOCK,
    ),
    _message(
        "message_by_update",
        Rule.RELAXED,
        "add_@_gpu(FLAG, 1);",
        "spin(add_acquire_gpu(FLAG, 0));",
        "relaxed",
        "release",
        _OTHER_BLOCK,
    ),
    _message(
        "message_to_an_update",
        Rule.RELAXED,
        "swap_release_gpu(FLAG, 1);",
        "spin(add_@_gpu(FLAG, 0));",
        "release",
        "acq_rel",
        _OTHER_BLOCK,
    ),
    _message(
        "message_by_compare_and_swap",
        Rule.RELAXED,
        "cas_@_sys(FLAG, 0, 1);",
        "spin(cas_acquire_gpu(FLAG, 1, 2));",
        "acquire",
        "release",
        _OTHER_BLOCK,
    ),
    _message(
        "message_order_swapped",
        Rule.FENCE,
        "@ st_release_gpu(FLAG, 1); @",
        _WAIT,
        ("", "g[0] = 8;"),
        ("g[0] = 8;", ""),
        _OTHER_BLOCK,
    ),
    _message(
        "message_data_read_first",
        Rule.FENCE,
        "st_release_gpu(FLAG, 1);",
        "int v = @; spin(ld_acquire_gpu(FLAG)); h[me + 4] = v;",
        "g[0]",
        "0",
        _OTHER_BLOCK,
    ),
    _message(
        "message_other_flag",
        Rule.RACE,
        "st_release_gpu(FLAG + @, 1); st_relaxed_gpu(FLAG + 1, 1);",
        "spin(ld_acquire_gpu(FLAG + 1));",
        "2",
        "1",
        _OTHER_BLOCK,
    ),
]


def _block(first: str, second: str, third: str = "") -> str:
    return f"if (b == 0) {{ {first} }} else if (b == 1) {{ {second} }} else {{ {third} }}"


_PAIRS = [
    # ---- more than two threads ----
    Pair(
        "relay",
        Rule.CHAIN,
        _block(
            "g[0] = 7; st_release_gpu(FLAG, 1);",
            "spin(ld_@_gpu(FLAG)); st_release_gpu(FLAG + 1, 1);",
            "spin(ld_acquire_gpu(FLAG + 1)); h[me] = g[0];",
        ),
        "relaxed",
        "acquire",
        block=1,
        grid=3,
    ),
    Pair(
        "relay_second_flag",
        Rule.CHAIN,
        _block(
            "g[0] = 7; st_release_gpu(FLAG, 1);",
            "spin(ld_acquire_gpu(FLAG)); st_@_gpu(FLAG + 1, 1);",
            "spin(ld_acquire_gpu(FLAG + 1)); h[me] = g[0];",
        ),
        "relaxed",
        "release",
        block=1,
        grid=3,
    ),
    Pair(
        "relay_narrow_fence",
        Rule.SCOPE,
        _block(
            "g[0] = 7; __threadfence(); st_relaxed_gpu(FLAG, 1);",
            "spin(ld_relaxed_gpu(FLAG)); __threadfence@(); st_relaxed_gpu(FLAG + 1, 1);",
            "spin(ld_relaxed_gpu(FLAG + 1)); __threadfence(); h[me] = g[0];",
        ),
        "_block",
        "",
        block=1,
        grid=3,
    ),
    Pair(
        "update_between",
        Rule.UPDATE,
        _block(
            "g[0] = 7; st_release_gpu(FLAG, 1);",
            "spin(ld_relaxed_gpu(FLAG)); @(FLAG, 2);",
            "spin(ld_acquire_gpu(FLAG) == 2); h[me] = g[0];",
        ),
        "st_relaxed_gpu",
        "swap_relaxed_gpu",
        block=1,
        grid=3,
    ),
    Pair(
        "update_between_narrow",
        Rule.UPDATE,
        _block(
            "g[0] = 7; st_release_gpu(FLAG, 1);",
            "spin(ld_relaxed_gpu(FLAG)); add_relaxed_@(FLAG, 1);",
            "spin(ld_acquire_gpu(FLAG) == 2); h[me] = g[0];",
        ),
        "cta",
        "gpu",
        block=1,
        grid=3,
    ),
    Pair(
        "barrier_between_fence_and_flag",
        Rule.CHAIN,
        "if (b == 0) { g[t] = t; __threadfence(); @ if (!t) st_relaxed_gpu(FLAG, 1); }"
        " else { if (!t) spin(ld_acquire_gpu(FLAG)); __syncthreads(); h[me] = g[t]; }",
        "",
        "__syncthreads();",
        grid=2,
    ),
    Pair(
        "barrier_before_release",
        Rule.CHAIN,
        "if (b == 0) { g[t] = t; @ if (!t) st_release_gpu(FLAG, 1); }"
        " else { if (!t) spin(ld_acquire_gpu(FLAG)); __syncthreads(); h[me] = g[t]; }",
        "__syncwarp();",
        "__syncthreads();",
        grid=2,
    ),
    Pair(
        "barrier_after_acquire",
        Rule.CHAIN,
        "if (b == 0) { g[t] = t; __syncthreads(); if (!t) st_release_gpu(FLAG, 1); }"
        " else { if (!t) spin(ld_acquire_gpu(FLAG)); @; h[me] = g[t]; }",
        "__syncwarp()",
        "__syncthreads()",
        grid=2,
    ),
    Pair(
        "two_writers_of_one_counter",
        Rule.UPDATE,
        _block(
            "g[0] = 7; add_@_gpu(FLAG, 1);",
            "g[1] = 7; add_@_gpu(FLAG, 1);",
            "spin(ld_acquire_gpu(FLAG) == 2); h[me] = g[0] + g[1];",
        ),
        ("release", "relaxed"),
        "release",
        block=1,
        grid=3,
    ),
    # ---- the last block ----
    Pair(
        "last_block",
        Rule.FENCE,
        "h[me] = t; __threadfence(); @ __shared__ int last; if (!t) last = atomicAdd(FLAG, 1) == 3; __syncthreads();"
        " if (last) { __threadfence(); int v = 0; for (int i = 0; i < 4; i++) v += h[64 * i + t]; g[t] = v; }",
        "",
        "__syncthreads();",
        grid=4,
    ),
    Pair(
        "last_block_without_fence",
        Rule.FENCE,
        "h[me] = t; @ __syncthreads(); __shared__ int last; if (!t) last = atomicAdd(FLAG, 1) == 3; __syncthreads();"
        " if (last) { __threadfence(); int v = 0; for (int i = 0; i < 4; i++) v += h[64 * i + t]; g[t] = v; }",
        "",
        "__threadfence();",
        grid=4,
    ),
    Pair(
        "last_block_without_second_fence",
        Rule.FENCE,
        "h[me] = t; __threadfence(); __syncthreads(); __shared__ int last; if (!t) last = atomicAdd(FLAG, 1) == 3; __syncthreads();"
        " if (last) { @ int v = 0; for (int i = 0; i < 4; i++) v += h[64 * i + t]; g[t] = v; }",
        "",
        "__threadfence();",
        grid=4,
    ),
    Pair(
        "last_block_narrow_counter",
        Rule.SCOPE,
        "h[me] = t; __threadfence(); __syncthreads(); __shared__ int last; if (!t) last = atomicAdd@(FLAG, 1) == 3; __syncthreads();"
        " if (last) { __threadfence(); int v = 0; for (int i = 0; i < 4; i++) v += h[64 * i + t]; g[t] = v; }",
        "_block",
        "",
        grid=4,
    ),
    Pair(
        "all_blocks_meet",
        Rule.FENCE,
        "h[me] = t; @ __syncthreads(); if (!t) { atomicAdd(FLAG, 1); spin(ld_relaxed_gpu(FLAG) == 3); __threadfence(); } __syncthreads();"
        " g[me] = h[(me + 64) % 192];",
        "",
        "__threadfence();",
        grid=3,
    ),
    Pair(
        "all_blocks_meet_by_release",
        Rule.RELAXED,
        "h[me] = t; __syncthreads(); if (!t) { add_@_gpu(FLAG, 1); spin(ld_acquire_gpu(FLAG) == 3); } __syncthreads();"
        " g[me] = h[(me + 64) % 192];",
        "acquire",
        "release",
        grid=3,
    ),
    # ---- locks ----
    Pair(
        "lock",
        Rule.FENCE,
        "spin(atomicCAS(FLAG, 0, 1) == 0); __threadfence(); g[0] += 1; @ atomicExch(FLAG, 0);",
        "",
        "__threadfence();",
        block=1,
        grid=4,
    ),
    Pair(
        "lock_without_first_fence",
        Rule.FENCE,
        "spin(atomicCAS(FLAG, 0, 1) == 0); @ g[0] += 1; __threadfence(); atomicExch(FLAG, 0);",
        "",
        "__threadfence();",
        block=1,
        grid=4,
    ),
    Pair(
        "lock_acquire",
        Rule.RELAXED,
        "spin(cas_@_gpu(FLAG, 0, 1) == 0); g[0] += 1; st_release_gpu(FLAG, 0);",
        "relaxed",
        "acquire",
        block=1,
        grid=4,
    ),
    Pair(
        "lock_release",
        Rule.RELAXED,
        "spin(cas_acquire_gpu(FLAG, 0, 1) == 0); g[0] += 1; st_@_gpu(FLAG, 0);",
        "relaxed",
        "release",
        block=1,
        grid=4,
    ),
    Pair(
        "lock_narrow",
        Rule.SCOPE,
        "spin(cas_acquire_@(FLAG, 0, 1) == 0); g[0] += 1; st_release_@(FLAG, 0);",
        "cta",
        "gpu",
        block=1,
        grid=4,
    ),
    Pair(
        "lock_unlocked_by_plain_store",
        Rule.RACE,
        "spin(atomicCAS(FLAG, 0, 1) == 0); __threadfence(); g[0] += 1; __threadfence(); @ = 0;",
        "*FLAG",
        "*(volatile int *)FLAG",
        block=1,
        grid=4,
    ),
    Pair(
        "lock_of_each_block",
        Rule.RACE,
        "spin(cas_acquire_gpu(FLAG + @, 0, 1) == 0); g[0] += 1; st_release_gpu(FLAG + @, 0);",
        "b",
        "9",
        block=1,
        grid=4,
    ),
    Pair(
        "lock_freed_too_early",
        Rule.RELAXED,
        "spin(cas_acquire_gpu(FLAG, 0, 1) == 0); @ g[0] += 1; @",
        ("st_release_gpu(FLAG, 0);", ""),
        ("", "st_release_gpu(FLAG, 0);"),
        block=1,
        grid=4,
    ),
    Pair(
        "lock_read_outside",
        Rule.RACE,
        "spin(cas_acquire_gpu(FLAG, 0, 1) == 0); g[0] += 1; @ st_release_gpu(FLAG, 0); @",
        ("", "h[me] = g[0];"),
        ("h[me] = g[0];", ""),
        block=1,
        grid=4,
    ),
    Pair(
        "ticket_lock",
        Rule.RELAXED,
        "int mine = add_relaxed_gpu(FLAG, 1); spin(ld_@_gpu(FLAG + 1) == mine); g[0] += 1; st_release_gpu(FLAG + 1, mine + 1);",
        "relaxed",
        "acquire",
        block=1,
        grid=4,
    ),
    Pair(
        "ticket_lock_release",
        Rule.RELAXED,
        "int mine = add_relaxed_gpu(FLAG, 1); spin(ld_acquire_gpu(FLAG + 1) == mine); g[0] += 1; st_@_gpu(FLAG + 1, mine + 1);",
        "relaxed",
        "release",
        block=1,
        grid=4,
    ),
    Pair(
        "ticket_lock_of_warps",
        Rule.SCOPE,
        "if (t % 32 == 0) { int mine = add_relaxed_@(FLAG, 1); spin(ld_acquire_@(FLAG + 1) == mine);"
        " g[0] += 1; st_release_@(FLAG + 1, mine + 1); }",
        "cta",
        "gpu",
        grid=2,
    ),
    Pair(
        "sequence_lock",
        Rule.RACE,
        "if (b == 1) { for (int i = 0; i < 3; i++) { st_relaxed_gpu(FLAG, 2 * i + 1); fence_gpu(); @(g, i); @(g + 1, i); st_release_gpu(FLAG, 2 * i + 2); } }"
        " else { int before, x, y; do { before = ld_acquire_gpu(FLAG); x = @(g); y = @(g + 1); fence_gpu(); }"
        " while (before & 1 || ld_relaxed_gpu(FLAG) != before); h[me] = x + y; }",
        ("put", "put", "get", "get"),
        ("st_relaxed_gpu", "st_relaxed_gpu", "ld_relaxed_gpu", "ld_relaxed_gpu"),
        block=1,
        grid=2,
    ),
    Pair(
        "made_once",
        Rule.RELAXED,
        "if (!ld_@_gpu(FLAG)) { spin(cas_acquire_gpu(FLAG + 1, 0, 1) == 0);"
        " if (!ld_relaxed_gpu(FLAG)) { g[0] = 7; st_release_gpu(FLAG, 1); } st_release_gpu(FLAG + 1, 0); } h[me] = g[0];",
        "relaxed",
        "acquire",
        block=1,
        grid=3,
    ),
    Pair(
        "made_once_released_late",
        Rule.RELAXED,
        "if (!ld_acquire_gpu(FLAG)) { spin(cas_acquire_gpu(FLAG + 1, 0, 1) == 0);"
        " if (!ld_relaxed_gpu(FLAG)) { g[0] = 7; st_@_gpu(FLAG, 1); } st_release_gpu(FLAG + 1, 0); } h[me] = g[0];",
        "relaxed",
        "release",
        block=1,
        grid=3,
    ),
    Pair(
        "queue_of_one",
        Rule.RELAXED,
        "for (int i = 0; i < 3; i++) { if (b == 0) { spin(ld_@_gpu(FLAG + 1) == i); g[0] = i; st_release_gpu(FLAG, i + 1); }"
        " else { spin(ld_acquire_gpu(FLAG) == i + 1); h[me + 4 * i] = g[0]; st_@_gpu(FLAG + 1, i + 1); } }",
        ("acquire", "relaxed"),
        ("acquire", "release"),
        block=1,
        grid=2,
    ),
    Pair(
        "queue_of_one_reused",
        Rule.RELAXED,
        "for (int i = 0; i < 3; i++) { if (b == 0) { spin(ld_@_gpu(FLAG + 1) == i); g[0] = i; st_release_gpu(FLAG, i + 1); }"
        " else { spin(ld_acquire_gpu(FLAG) == i + 1); h[me + 4 * i] = g[0]; st_release_gpu(FLAG + 1, i + 1); } }",
        "relaxed",
        "acquire",
        block=1,
        grid=2,
    ),
    # ---- atomics and data ----
    Pair("update_narrow", Rule.SCOPE, "atomicAdd@(g, 1);", "_block", "", block=1, grid=2),
    Pair("update_narrow_of_shared", Rule.RACE, "if (!t) s[0] = 0; @ atomicAdd_block(s, 1);", "", "__syncthreads();"),
    Pair(
        "minimum_beside_a_plain_read",
        Rule.RACE,
        "if (h[me] <= @) atomicMin(g, -b);",
        "g[0]",
        "ld_relaxed_gpu(g)",
        block=1,
        grid=4,
    ),
    Pair(
        "narrow_read_of_an_update",
        Rule.SCOPE,
        "if (b == 0) atomicAdd(g, 1); else h[me] = ld_relaxed_@(g);",
        "cta",
        "gpu",
        block=1,
        grid=2,
    ),
    Pair(
        "volatile_in_one_block",
        Rule.RACE,
        "if (!t) @ = 1; else if (t == 32) h[me] = *(volatile int *)g;",
        "g[0]",
        "*(volatile int *)g",
    ),
]
PRELUDE += "D void put(int *p, int v) { *p = v; }\nD int get(const int *p) { return *p; }\n"

# The last of four blocks finds the others' updates in the counter, and they are before what it does then.
_COUNTERS = [
    Pair(
        "counter_set_to_zero_by_the_last_block",
        Rule.CHAIN,
        "if (t == 0) { g[b] = 7; __threadfence(); if (atomicAdd(FLAG, 1) == @) { __threadfence(); *FLAG = 0; } }",
        "0",
        "3",
        grid=4,
    ),
    Pair(
        "counter_of_narrow_scope_set_to_zero",
        Rule.SCOPE,
        "if (t == 0) { __threadfence(); if (@(FLAG, 1) == 3) *FLAG = 0; }",
        "atomicAdd_block",
        "atomicAdd",
        grid=4,
    ),
    Pair(
        "counter_set_to_zero_by_another_thread",
        Rule.CHAIN,
        "__shared__ volatile int last; if (t == 0) { __threadfence(); last = atomicAdd(FLAG, 1) == 3; } @ "
        "if (t == 32 && last) *FLAG = 0;",
        "",
        "__syncthreads();",
        grid=4,
    ),
    Pair(
        "counter_stored_to_between_its_updates",
        Rule.UPDATE,
        "if (t == 0) { __threadfence(); if (b == 2) @; else if (atomicAdd(FLAG, 1) == 8) *FLAG = 0; }",
        "*(volatile int *)FLAG = 8",
        "atomicAdd(FLAG, 7)",
        grid=4,
    ),
]

PAIRS = [*_MESSAGES, *_PAIRS, *_COUNTERS]
