"""Threads that wait for other threads: spin-waits, named barriers, cooperative launches; and what never ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from cuda.bindings import driver

from cudatool.ptx import parse
from cudatool.sim import jit
from cudatool.sim.jit.progress import insert_yields

THREADS = [1, 3]

# ---- spin-waits ----

LOCKS = r"""
extern "C" __global__ void spinlock(int *lock, int *total, int n) {
    for (int i = 0; i < n; i++) {
        while (atomicCAS(lock, 0, 1) != 0) {}
        __threadfence();
        *(volatile int *)total = *(volatile int *)total + 1;
        __threadfence();
        atomicExch(lock, 0);
    }
}
extern "C" __global__ void divergent_lock(int *lock, int *total) {
    bool done = false;
    while (!done) {
        if (atomicExch(lock, 1) == 0) {
            *(volatile int *)total = *(volatile int *)total + 1;
            __threadfence();
            atomicExch(lock, 0);
            done = true;
        }
    }
}
extern "C" __global__ void tickets(unsigned *next, unsigned *serving, int *order) {
    unsigned mine = atomicAdd(next, 1);
    while (atomicAdd(serving, 0) != mine) __nanosleep(20);
    order[mine] = blockIdx.x * blockDim.x + threadIdx.x;
    __threadfence();
    atomicAdd(serving, 1);
}
extern "C" __global__ void held_across_a_barrier(int *lock, int *out) {
    if (threadIdx.x == 0) while (atomicCAS(lock, 0, 1) != 0) {}
    __syncthreads();
    int seen = *(volatile int *)out;
    __syncthreads();
    if (threadIdx.x == 0) { *(volatile int *)out = seen + 1; __threadfence(); atomicExch(lock, 0); }
}
"""


@pytest.fixture(name="launch")
def launch_fixture(launch_in_turn):
    return launch_in_turn


def test_sleeping_for_no_time_suspends_nothing(ptx_of):
    """libcu++ does so after each atomic access to an object in local memory; a kernel may have a hundred."""
    slept = "\n".join(f"if (x[{i}] > {i}) {{ x[{i}] = {i}; __nanosleep(0); }}" for i in range(60))
    source = f'extern "C" __global__ void k(int *x, int n) {{ for (int i = 0; i < n; i++) {{ {slept} x++; }} }}'
    function = parse(ptx_of(source)).functions["k"]
    assert 60 == sum(one.opcode == "nanosleep" for one in function.instructions)
    assert not any(one.opcode == "yield" for one in insert_yields(function).instructions)
    slower = parse(ptx_of(source.replace("__nanosleep(0)", "__nanosleep(20)"))).functions["k"]
    assert 60 == sum(one.opcode == "yield" for one in insert_yields(slower).instructions)


def test_reading_local_memory_again_waits_for_nobody(ptx_of):
    source = """extern "C" __global__ void k(int *x, int n) {
        volatile int own[8];
        for (int i = 0; i < 8; i++) own[i] = x[i];
        while (own[n & 7] < 100) own[n++ & 7] += 3;
        *x = n;
    }"""
    function = parse(ptx_of(source)).functions["k"]
    assert any({"volatile", "local"} <= set(one.modifiers) for one in function.instructions)
    assert not any(one.opcode == "yield" for one in insert_yields(function).instructions)


@pytest.mark.parametrize("threads", THREADS)
def test_locks_admit_one_thread_at_a_time(launch, ptx_of, threads):
    kernels = jit.load(ptx_of(LOCKS)).kernels
    lock, total = np.zeros(1, "i4"), np.zeros(1, "i4")
    launch(kernels["spinlock"], 30, 96, lock, total, np.int32(3), threads=threads)
    assert 30 * 96 * 3 == total[0]
    launch(kernels["divergent_lock"], 30, 96, lock, total, threads=threads)
    assert 30 * 96 * 4 == total[0]
    total[0] = 0
    launch(kernels["held_across_a_barrier"], 40, 64, lock, total, threads=threads)
    assert [40, 0] == [total[0], lock[0]]


@pytest.mark.parametrize("threads", THREADS)
def test_tickets_are_served_in_order(launch, ptx_of, threads):
    next_, serving, order = np.zeros(1, "u4"), np.zeros(1, "u4"), np.full(3000, -1, "i4")
    launch(jit.load(ptx_of(LOCKS)).kernels["tickets"], 30, 100, next_, serving, order, threads=threads)
    assert list(range(3000)) == sorted(order.tolist())


WAITS = r"""
extern "C" __global__ void warp_for_warp(volatile int *flag, int *out) {
    if (threadIdx.x < 32) {
        while (*flag == 0) {}
        __threadfence();
        out[threadIdx.x] = out[32 + threadIdx.x] + 1;
    } else {
        out[threadIdx.x] = threadIdx.x;
        __threadfence();
        __syncwarp();
        if (threadIdx.x == 32) *flag = 1;
    }
}
extern "C" __global__ void lane_for_lane(int *out) {
    __shared__ volatile int turn;
    if (threadIdx.x == 0) turn = 31;
    __syncthreads();
    while (turn != (int)threadIdx.x) {}
    *out = *out * 3 + threadIdx.x;
    turn = threadIdx.x - 1;
}
extern "C" __global__ void later_block_first(volatile int *flags, int *out) {
    int b = blockIdx.x;
    if (b + 1 < gridDim.x) {
        if (threadIdx.x == 0) while (flags[b + 1] == 0) {}
        __syncthreads();
    }
    if (threadIdx.x == 5) out[b] = b + 1 < gridDim.x ? out[b + 1] + b : 1000;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) flags[b] = 1;
}
extern "C" __global__ void ping_pong(unsigned *turn, int rounds, int *out) {
    for (unsigned i = 0; i < rounds; i++) {
        unsigned seen;
        do { asm volatile("ld.acquire.gpu.u32 %0, [%1];" : "=r"(seen) : "l"(turn) : "memory"); }
        while (seen != 2 * i + blockIdx.x);
        out[blockIdx.x]++;
        asm volatile("st.release.gpu.u32 [%0], %1;" :: "l"(turn), "r"(seen + 1) : "memory");
    }
}
extern "C" __global__ void broadcast_poll(volatile int *flag, int *out) {
    __shared__ int seen;
    if (blockIdx.x == 1) { if (threadIdx.x == 0) *flag = 7; return; }
    do {
        if (threadIdx.x == 0) seen = *flag;
        __syncthreads();
        int s = seen;
        __syncthreads();
        if (s) { out[threadIdx.x] = s; break; }
    } while (true);
}
"""


@pytest.mark.parametrize("threads", THREADS)
def test_threads_wait_for_other_warps_lanes_and_blocks(launch, ptx_of, threads):
    kernels = jit.load(ptx_of(WAITS)).kernels
    flag, out = np.zeros(1, "i4"), np.zeros(64, "i4")
    launch(kernels["warp_for_warp"], 1, 64, flag, out, threads=threads)
    assert [*range(33, 65), *range(32, 64)] == out.tolist()

    out = np.zeros(1, "i4")
    launch(kernels["lane_for_lane"], 1, 32, out, threads=threads)
    expected = 0
    for lane in reversed(range(32)):
        expected = (expected * 3 + lane + 2**31) % 2**32 - 2**31
    assert expected == out[0]

    flags, out = np.zeros(200, "i4"), np.zeros(200, "i4")
    launch(kernels["later_block_first"], 200, 64, flags, out, threads=threads)
    assert [1000 + sum(range(b, 199)) for b in range(200)] == out.tolist()

    turn, out = np.zeros(1, "u4"), np.zeros(2, "i4")
    launch(kernels["ping_pong"], 2, 1, turn, np.int32(200), out, threads=threads)
    assert [200, 200, 400] == [*out, turn[0]]

    flag, out = np.zeros(1, "i4"), np.zeros(1024, "i4")
    launch(kernels["broadcast_poll"], 2, 1024, flag, out, threads=threads)
    assert [7] * 1024 == out.tolist()


TAGGED_COUNTERS = r"""
extern "C" __global__ void tagged(unsigned *counts, int n) {
    __shared__ volatile unsigned counters[4];
    if (threadIdx.x < 4) counters[threadIdx.x] = 0;
    __syncthreads();
    for (int i = 0; i < n; i++) {
        unsigned mine, at = (threadIdx.x + i) % 4;
        do {
            mine = ((counters[at] & 0x07ffffff) + 1) | threadIdx.x << 27;
            counters[at] = mine;
        } while (counters[at] != mine);
    }
    __syncthreads();
    if (threadIdx.x < 4) counts[threadIdx.x] = counters[threadIdx.x] & 0x07ffffff;
}
extern "C" __global__ void two_flags(volatile int *first, volatile int *second, int *out) {
    if (threadIdx.x == 0) { *second = 1; *first = 1; return; }
    while (*first == 0 || (threadIdx.x % 2 && *second == 0)) {}
    out[threadIdx.x] = 1;
}
"""


def test_no_lane_stops_between_the_polls_of_one_time_around_a_loop(launch, ptx_of):
    """It would find its own write overwritten, though it was counted, and two that do so never end."""
    kernels = jit.load(ptx_of(TAGGED_COUNTERS)).kernels
    counts = np.zeros(4, "u4")
    launch(kernels["tagged"], 1, 32, counts, np.int32(1000))
    assert [8000] * 4 == counts.tolist()
    for kernel in kernels.values():
        code = kernel.text.function.instructions
        polls = [index for index, one in enumerate(code) if one.opcode == "ld" and "volatile" in one.modifiers]
        assert [polls[0] - 1] == [index for index, one in enumerate(code) if one.opcode == "yield"]


def test_a_lock_free_update_is_no_wait(launch, ptx_of):
    """It always succeeds for somebody, so its loop needs no suspension, and a grid of it is quick."""
    source = r"""extern "C" __global__ void k(unsigned *x) {
        unsigned old = *x, seen;
        do { seen = old; old = atomicCAS(x, seen, seen * 2 + 1); } while (old != seen);
    }"""
    kernel = jit.load(ptx_of(source)).kernels["k"]
    assert "yield" not in [i.opcode for i in kernel.text.function.instructions]
    x = np.zeros(1, "u4")
    launch(kernel, 1, 20, x)
    assert 2**20 - 1 == x[0]


# ---- barriers ----

BARRIERS = r"""
extern "C" __global__ void produce_consume(const int *in, int *out, int rounds) {
    // Two warps produce, two consume: barrier 1 says that the buffer is full, barrier 2 that it is free.
    __shared__ int buffer[64];
    int t = threadIdx.x % 64;
    if (threadIdx.x < 64) {
        for (int i = 0; i < rounds; i++) {
            asm volatile("bar.sync 2, 128;" ::: "memory");
            buffer[t] = in[i * 64 + t] * 2;
            asm volatile("bar.arrive 1, 128;" ::: "memory");
        }
    } else {
        for (int i = 0; i < rounds; i++) {
            asm volatile("bar.arrive 2, 128;" ::: "memory");
            asm volatile("bar.sync 1, 128;" ::: "memory");
            out[i * 64 + t] = buffer[t ^ 1];
        }
    }
}
extern "C" __global__ void halves(int *out) {
    __shared__ int x[128];
    int half = threadIdx.x / 64, t = threadIdx.x;
    for (int i = 0; i <= half; i++) {
        x[t] = t + i;
        asm volatile("bar.sync %0, 64;" :: "r"(half + 3) : "memory");
        out[t] = x[t ^ 63];
        asm volatile("barrier.sync %0, 64;" :: "r"(half + 3) : "memory");
    }
}
extern "C" __global__ void counted(int *out) {
    int t = threadIdx.x;
    int count = __syncthreads_count(t % 3 == 0);
    int all = __syncthreads_and(t < 96), any = __syncthreads_or(t == 95);
    out[t] = count * 4 + all * 2 + any;
}
"""


def test_named_barriers(launch, ptx_of):
    kernels = jit.load(ptx_of(BARRIERS)).kernels
    data = np.arange(640, dtype="i4")
    out = np.zeros(640, "i4")
    launch(kernels["produce_consume"], 1, 128, data, out, np.int32(10))
    assert (2 * (data ^ 1)).tolist() == out.tolist()
    out = np.zeros(128, "i4")
    launch(kernels["halves"], 2, 128, out)
    assert [(t ^ 63) + t // 64 for t in range(128)] == out.tolist()
    out = np.zeros(96, "i4")
    launch(kernels["counted"], 1, 96, out)
    assert [32 * 4 + 3] * 96 == out.tolist()


# ---- groups ----

GROUPS = r"""
#include <cooperative_groups.h>
namespace cg = cooperative_groups;
extern "C" __global__ void sum_of_all(int *partial, int *out, int rounds) {
    cg::grid_group grid = cg::this_grid();
    for (int i = 0; i < rounds; i++) {
        if (threadIdx.x == 0) partial[blockIdx.x] = (i ? partial[(blockIdx.x + 1) % gridDim.x] : 0) * 0 + blockIdx.x + i;
        grid.sync();
        int total = 0;
        for (int b = threadIdx.x; b < gridDim.x; b += blockDim.x) total += *(volatile int *)&partial[b];
        atomicAdd(&out[i], total);
        grid.sync();
    }
    if (grid.thread_rank() == 0) out[rounds] = grid.is_valid() * 1000000 + grid.size();
}
extern "C" __global__ void coalesced(int *out) {
    int t = threadIdx.x;
    out[t] = -1;
    if (t % 3 == 1) {
        cg::coalesced_group active = cg::coalesced_threads();
        int rank = active.thread_rank(), size = active.size();
        int first = active.shfl(t, 0), all = active.all(t % 3 == 1);
        unsigned votes = active.ballot(rank % 2);
        out[t] = rank + 100 * size + 10000 * (first % 32) + 1000000 * all + 10000000 * (votes == 0x2aa);
    }
}
extern "C" __global__ void tiles(int *out) {
    auto tile = cg::tiled_partition<8>(cg::this_thread_block());
    int value = threadIdx.x;
    for (int offset = 4; offset; offset /= 2) value += tile.shfl_down(value, offset);
    if (threadIdx.x % 16 < 8) value = tile.shfl(value, 0) + tile.any(threadIdx.x == 3);
    out[threadIdx.x] = value;
}
"""


def test_grid_synchronization_in_cooperative_launches(program, checked):
    loaded = program(GROUPS, headers=True)
    blocks, rounds = (20, 3) if checked else (300, 5)
    partial, out = loaded.upload(np.zeros(blocks, "i4")), loaded.upload(np.zeros(rounds + 1, "i4"))
    status = loaded.launch("sum_of_all", blocks, 64, partial, out, np.int32(rounds), cooperative=True)
    assert driver.CUresult.CUDA_SUCCESS == status
    assert driver.CUresult.CUDA_SUCCESS == loaded.synchronize()
    expected = [blocks * sum(b + i for b in range(blocks)) for i in range(rounds)]
    assert [*expected, 1000000 + blocks * 64] == loaded.download(out, rounds + 1, "i4").tolist()


HEAP = r"""
extern "C" __global__ void blocks_of_the_heap(int *out, int rounds) {
    int sum = 0, t = blockIdx.x * blockDim.x + threadIdx.x;
    for (int i = 0; i < rounds; i++) {
        int *mine = (int *)malloc(12);  // where another thread's was, as soon as that is free
        mine[0] = t; mine[1] = i; mine[2] = mine[0] + mine[1];
        sum += mine[2];
        free(mine);
    }
    out[t] = sum;
}
extern "C" __global__ void handed_over(int *out) {
    __shared__ int *block;
    if (threadIdx.x == 0) block = (int *)malloc(4 * blockDim.x);
    __syncthreads();
    block[threadIdx.x] = threadIdx.x + blockIdx.x;
    __syncthreads();
    out[blockIdx.x * blockDim.x + threadIdx.x] = block[blockDim.x - 1 - threadIdx.x];
    __syncthreads();
    if (threadIdx.x == 32) free(block);
}
"""


@pytest.mark.usefixtures("checked")
def test_threads_take_and_give_back_memory_of_the_heap(program):
    loaded = program(HEAP)
    blocks, size, rounds = 8, 64, 5
    out = loaded.upload(np.zeros(blocks * size, "i4"))
    assert driver.CUresult.CUDA_SUCCESS == loaded.launch("blocks_of_the_heap", blocks, size, out, np.int32(rounds))
    expected = [rounds * t + sum(range(rounds)) for t in range(blocks * size)]
    assert expected == loaded.download(out, blocks * size, "i4").tolist()
    assert driver.CUresult.CUDA_SUCCESS == loaded.launch("handed_over", blocks, size, out)
    expected = [size - 1 - t + block for block in range(blocks) for t in range(size)]
    assert expected == loaded.download(out, blocks * size, "i4").tolist()


def test_a_cooperative_launch_must_fit(program):
    loaded = program(GROUPS, headers=True)
    _, function = driver.cuModuleGetFunction(loaded.module, b"sum_of_all")
    _, per_processor = driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(function, 1024, 0)
    _, processors = driver.cuDeviceGetAttribute(driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, 0)
    arguments = (loaded.upload(np.zeros(1)), loaded.upload(np.zeros(1)), np.int32(0))
    too_many = per_processor * processors + 1
    status = loaded.launch("sum_of_all", too_many, 1024, *arguments, cooperative=True)
    assert driver.CUresult.CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE == status


def test_coalesced_groups_and_tiles(program):
    loaded = program(GROUPS, headers=True)
    out = loaded.upload(np.zeros(96, "i4"))
    loaded.launch("coalesced", 1, 96, out)
    expected = [-1] * 96
    for warp in range(3):
        members = [t for t in range(32 * warp, 32 * warp + 32) if t % 3 == 1]
        votes = sum(1 << rank for rank in range(len(members)) if rank % 2)
        for rank, t in enumerate(members):
            expected[t] = rank + 100 * len(members) + 10000 * (members[0] % 32) + 1000000 + 10000000 * (votes == 0x2AA)
    assert expected == loaded.download(out, 96, "i4").tolist()
    loaded.launch("tiles", 1, 96, out)
    result = loaded.download(out, 96, "i4").tolist()
    for t in range(96):
        if t % 16 < 8:
            first = t // 8 * 8
            assert sum(range(first, first + 8)) + (first == 0) == result[t]


# ---- what never ends ----


@pytest.fixture
def impatient(monkeypatch):
    from cudatool.sim.jit import launch

    monkeypatch.setattr(launch, "_STALLED_S", 0.2)


def test_a_wait_that_never_ends_is_reported_with_its_threads_and_lines(launch, ptx_of, impatient):
    source = r"""extern "C" __global__ void k(volatile int *flag) {
        if (threadIdx.x < 16)
            while (*flag == 0) {}
        else if (threadIdx.x < 32)
            __syncthreads();
    }"""
    kernel = jit.load(ptx_of(source, "-lineinfo")).kernels["k"]
    with pytest.raises(jit.KernelDeadlock) as caught:
        launch(kernel, 1, 64, np.zeros(1, "i4"))
    text = str(caught.value)
    assert "threads 0-15 in a loop that waits for memory to change (kernel.cu:3)" in text
    assert "threads 16-31 at bar.sync, barrier 0 (kernel.cu:5)" in text.replace("barrier.sync", "bar.sync")


def test_a_loop_of_several_blocks_that_begins_with_its_poll_lets_others_go_on(launch, ptx_of, impatient):
    """What a compiler makes of a flag that is waited for with optimizations off: the value goes through branches."""
    source = r"""extern "C" __global__ void k(int *flag, int never) {
        if (threadIdx.x) { if (!never) atomicExch(flag, 1); return; }
        int value;
        asm volatile("again:\n\t.reg .pred %p;\n\tld.acquire.gpu.s32 %0, [%1];\n\tbra.uni middle;\n"
                     "middle:\n\tsetp.eq.s32 %p, %0, 0;\n\t@%p bra again;" : "=r"(value) : "l"(flag) : "memory");
    }""".replace("%p", "waits")
    kernel = jit.load(ptx_of(source)).kernels["k"]
    launch(kernel, 1, 32, np.zeros(1, "i4"), np.int32(0))
    with pytest.raises(jit.KernelDeadlock, match="thread 0 in a loop that waits for memory to change"):
        launch(kernel, 1, 32, np.zeros(1, "i4"), np.int32(1))


def test_locks_taken_in_opposite_order_are_a_deadlock(launch, ptx_of, impatient):
    source = r"""extern "C" __global__ void k(int *locks) {
        int mine = blockIdx.x;
        while (atomicCAS(&locks[mine], 0, 1)) {}
        while (*(volatile int *)&locks[1 - mine] == 0) {}
        while (atomicCAS(&locks[1 - mine], 0, 1)) {}
    }"""
    kernel = jit.load(ptx_of(source, "-lineinfo")).kernels["k"]
    with pytest.raises(jit.KernelDeadlock) as caught:
        launch(kernel, 2, 1, np.zeros(2, "i4"))
    assert [str(caught.value).count(text) for text in ("block (0, 0, 0)", "block (1, 0, 0)", "kernel.cu:5")] == [
        1,
        1,
        2,
    ]


@pytest.fixture
def hasty(monkeypatch):
    """Each look at blocks that wait asks whether any of them can go on."""
    from cudatool.sim.jit import launch

    monkeypatch.setattr(launch, "_STALLED_S", 0)
    monkeypatch.setattr(launch, "_STALLED_ROUNDS", 0)


def test_a_loop_that_reads_flags_and_follows_links_is_no_deadlock(launch, ptx_of, hasty):
    """Of blocks that move a matrix's columns along the cycles of a permutation, each first asks who has moved one."""
    source = r"""extern "C" __global__ void k(const int *next, int *moved, int *order) {
        __shared__ int seen;
        int at = 0, steps = 0;
        do {
            __syncthreads();
            if (threadIdx.x == 0) seen = atomicExch(&moved[at], 1);
            __syncthreads();
            if (!seen && threadIdx.x == 1) order[at] = steps;
            steps++;
            at = next[at];
        } while (!seen);
    }"""
    links = 500
    order = np.full(links, -1, "i4")
    following = (np.arange(links, dtype="i4") + 7) % links
    launch(jit.load(ptx_of(source)).kernels["k"], 1, 64, following, np.zeros(links, "i4"), order)
    assert [7 * step % links for step in range(links)] == np.argsort(order).tolist()


SLOW_AND_WAITING = r"""extern "C" __global__ void k(volatile int *flag, int rounds, int *out) {
    if (blockIdx.x == 0) {
        int x = threadIdx.x;
        for (int i = 0; i < rounds; i++) x = x * 1664525 + 1013904223 ^ x >> 3;
        out[threadIdx.x] = x;
        __syncthreads();
        if (threadIdx.x == 0 && rounds) *flag = 1;
    } else
        while (*flag == 0) {}
}"""


def test_blocks_that_wait_for_one_that_computes_are_no_deadlock(launch, ptx_of, hasty):
    """The computing block runs on another thread of the host meanwhile, and comes to no suspension."""
    kernel = jit.load(ptx_of(SLOW_AND_WAITING)).kernels["k"]
    flag, out = np.zeros(1, "i4"), np.zeros(1024, "i4")
    launch(kernel, 2, 1024, flag, np.int32(200_000), out, threads=2)
    assert 1 == flag[0]


@pytest.mark.parametrize("threads", THREADS)
def test_threads_that_count_how_often_they_ask_are_a_deadlock_after_a_longer_time(launch, ptx_of, monkeypatch, threads):
    from cudatool.sim.jit import launch as launches

    monkeypatch.setattr(launches, "_STALLED_S", 0.1)
    monkeypatch.setattr(launches, "_CHANGING_S", 1.0)
    source = r"""extern "C" __global__ void k(volatile int *flag, int *out) {
        int asked = 0;
        while (*flag == 0) asked++;
        out[blockIdx.x] = asked;
    }"""
    kernel = jit.load(ptx_of(source)).kernels["k"]
    begin = time.monotonic()
    with pytest.raises(jit.KernelDeadlock, match="in a loop that waits for memory to change"):
        launch(kernel, 4, 32, np.zeros(1, "i4"), np.zeros(4, "i4"), threads=threads)
    assert time.monotonic() - begin >= 1


@pytest.mark.parametrize("threads", THREADS)
def test_blocks_of_several_workers_that_all_wait_are_a_deadlock(launch, ptx_of, impatient, threads):
    """Also where the workers have unequal numbers of blocks, as in most of several launches."""
    kernel = jit.load(ptx_of(SLOW_AND_WAITING)).kernels["k"]
    for _ in range(5):
        with pytest.raises(jit.KernelDeadlock, match="in a loop that waits for memory to change"):
            launch(kernel, 7, 1024, np.zeros(1, "i4"), np.int32(0), np.zeros(1024, "i4"), threads=threads)


def test_a_deadlock_is_a_launch_timeout_of_the_driver(program):
    loaded = program('extern "C" __global__ void k() { if (threadIdx.x < 32) asm volatile("bar.sync 1, 64;"); }')
    loaded.launch("k", 1, 64)
    assert driver.CUresult.CUDA_ERROR_LAUNCH_TIMEOUT == loaded.synchronize()


@contextmanager
def _run(source: str, device: str, **options) -> Iterator[subprocess.Popen[str]]:
    code = textwrap.dedent(source)
    environment = {**os.environ, "CUDATOOL_DEVICE": device}
    with subprocess.Popen(
        [sys.executable, "-c", code],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    ) as process:
        try:
            yield process
        finally:
            process.kill()  # one that does not end by itself would hold up the tests


ENDLESS = """
    import sys
    sys.path.insert(0, {folder!r})
    from conftest import Program, nvrtc_ptx
    from cudatool import _driver
    _driver.initialize()
    loaded = Program(nvrtc_ptx('''extern "C" __global__ void k(int *x) {{
        for (int i = 0; x[i & 1] == 0; i++) asm volatile("" ::: "memory");
    }}'''))
    import numpy as np
    out = loaded.upload(np.zeros(2, "i4"))
    loaded.launch("k", {blocks}, 32, out)
    try:
        print("begins", flush=True)
        print(loaded.synchronize().name)
    except KeyboardInterrupt:
        print("interrupted")
"""


@pytest.mark.parametrize("blocks", [1, 200])
def test_an_endless_loop_ends_after_the_time_allowed(blocks):
    source = ENDLESS.format(folder=os.path.dirname(__file__), blocks=blocks)
    with _run(source, "sim:timeout=1,threads=2") as process:
        out, _ = process.communicate(timeout=60)
    assert ["begins", "CUDA_ERROR_LAUNCH_TIMEOUT"] == out.splitlines()


@pytest.mark.parametrize("blocks", [1, 200])
def test_ctrl_c_ends_an_endless_loop(blocks):
    source = ENDLESS.format(folder=os.path.dirname(__file__), blocks=blocks)
    with _run(source, "sim:threads=2") as process:
        assert process.stdout is not None
        assert "begins\n" == process.stdout.readline()
        time.sleep(0.5)  # by now it is most likely in the loop
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=60)
    assert "interrupted" in out


def test_a_launch_that_was_in_time_leaves_no_timer(launch, ptx_of):
    source = """
    extern "C" __global__ void write(int *out) { *out = 1; }
    extern "C" __global__ void last(int *out) {
        long long begin = clock64();
        while (clock64() - begin < 100000000);
        *out = 1;
    }"""
    kernels, out = jit.load(ptx_of(source)).kernels, np.zeros(2, np.int32)
    launch(kernels["write"], 1, 1, out[:1], timeout_s=0.02)
    launch(kernels["last"], 1, 1, out[1:])  # is not ended by what was to end the other one
    assert [1, 1] == out.tolist()
