"""Threads of a block that take one way through a kernel keep what they have alike once, and look at no one else's."""

from __future__ import annotations

import os
import re

import integer_interpreter
import numpy as np
import pytest
from marching_kernels import marching_kernel
from random_kernels import WORDS, inputs, module_of

from cudatool.sim import jit
from cudatool.sim.jit import Instrument

FIRST = int(os.environ.get("CUDATOOL_TEST_SEED", "0"))
SOURCE = """
#define T ((int)threadIdx.x)
#define SYNC __syncthreads()
#define KERNEL extern "C" __global__ void
#define ALL ((threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x)
KERNEL counted(int *y, int n) {
    __shared__ int s[256];
    s[T] = y[T];
    SYNC;
    for (int k = n; k > 0; k--) { int a = s[(T + 1) % blockDim.x]; SYNC; s[T] = a + k; SYNC; }
    y[T] = s[T];
}
KERNEL halved(int *y, int n) {
    __shared__ int s[256];
    s[T] = y[T];
    for (int h = n; h > 0; h /= 2) { SYNC; if (T < h) s[T] += s[T + h]; }
    SYNC;
    y[T] = s[0] + T;
}
KERNEL over_all(int *y, int n) {  // of blocks with rows above each other
    __shared__ int s[256];
    int t = ALL;
    s[t] = y[t];
    for (int k = 0; k < n; k++) {
        SYNC;
        int a = s[blockDim.x * blockDim.y * blockDim.z - 1 - t];
        SYNC;
        s[t] = 3 * a + k + threadIdx.y;
    }
    y[t] = s[t];
}
KERNEL summed(int *y, int n) {
    int a = y[T];
    for (int k = 1; k < n; k++) a += __shfl_xor_sync(0xffffffff, a, k) * k;
    y[T] = a;
}
KERNEL asked_before(int *y, int n) {  // what is asked before a barrier counts after it, whatever n is then
    __shared__ int s[256];
    s[T] = y[T];
    SYNC;
    while (n > 0) {
        bool is_low = T < n;
        int a = is_low ? s[T + 1] : 0;
        n -= 3;
        SYNC;
        if (is_low) s[T] += a + n;
        SYNC;
    }
    y[T] = s[T];
}
KERNEL asked(int *y, int n) {
    __shared__ int s[256];
    s[T] = y[T];
    SYNC;
    for (; n > 0; n -= 3) { int a = T < n ? s[T + 1] : 0; SYNC; if (T < n) s[T] += a; SYNC; }
    y[T] = s[T];
}
KERNEL sorts(int *y, int n) {  // down is computed in steps, of the stride before it changes, and needed after that
    __shared__ int s[512];
    s[T] = y[T];
    s[T + blockDim.x] = -y[T];
    for (unsigned size = 2; size < n; size *= 2) {
        unsigned down = n ^ ((T & (size / 2)) != 0);
        for (unsigned stride = size / 2; stride > 0; stride /= 2) {
            SYNC;
            int at = 2 * T - (T & (stride - 1)), a = s[at], b = s[at + stride];
            if ((a > b) == (down & 1)) { s[at] = b; s[at + stride] = a; }
        }
    }
    SYNC;
    y[T] = s[T];
}
KERNEL wraps(int *y, int n) {  // at another thread in each round, and in some of none
    int i = (int)((unsigned)n + T);
    long long s = 0;
    #pragma unroll 1
    for (int k = 0; k < 4; k++) { SYNC; s += (3LL * i) >> 16; y[T] = i; i = (int)((unsigned)i + 0x40000000u + k); }
    SYNC;
    y[T] = (int)s + y[T];
}
KERNEL by_row(int *y, int n) { for (int k = 0; k < n + (int)threadIdx.y; k++) { __syncwarp(); y[ALL] += k; } }
KERNEL by_data(int *y, int n) {
    __shared__ int s[256];
    s[T] = y[T];
    for (int k = 0; k < s[0] % 5; k++) { SYNC; y[T] += k; }
}
KERNEL some_end(int *y, int n) { if (T >= n) return; SYNC; y[T] += n; }
KERNEL some_meet(int *y, int n) { if (T < n) { asm volatile("bar.sync 1, 64;"); y[T] += n; } }
KERNEL in_turns(int *y, int n) { for (int k = T; k < n; k += 40) { __syncwarp(1u << T % 32); y[T] += k; } }
KERNEL local(int *y, int n) {
    int own[4];
    int *at = own;
    for (int k = 0; k < n; k++) { at[k & 3] = y[T] + k; SYNC; y[T] = at[k & 3] + own[0]; at = own + (k & 1); SYNC; }
}
"""
MARCHING = ["counted", "halved", "over_all", "summed", "asked", "asked_before", "sorts", "wraps", "local"]


@pytest.fixture(scope="module")
def kernels(ptx_of):
    return jit.load(ptx_of(SOURCE)).kernels


def test_threads_march_where_all_of_a_block_come_to_the_same_suspensions(kernels):
    texts = {name: kernel.llvm_ir() for name, kernel in kernels.items()}
    assert set(MARCHING) == {name for name, text in texts.items() if "@ahead_" in text}
    assert set(MARCHING) == {name for name, text in texts.items() if "@divergent(" not in text}
    assert not any("@agreed(" in texts[name] for name in MARCHING)


def test_checked_threads_do_not_march(kernels):
    assert "@ahead_" not in kernels["counted"].llvm_ir(Instrument.RACECHECK)


@pytest.mark.parametrize(
    ("name", "expected"), [("counted", {"i32"}), ("asked", {"i32"}), ("asked_before", {"i32", "i8"})]
)
def test_threads_keep_what_differs_between_them_alone(kernels, name, expected):
    """Not the counter of a loop, and what they ask of it only if it has gone on since then."""
    assert expected == set(re.findall(r"store (\w+) .*, !llvm.access.group", kernels[name].llvm_ir()))


def counted(y, n):
    for k in range(n, 0, -1):
        y = np.roll(y, -1) + k
    return y


def halved(y, n):
    y = y.astype(np.int64)
    while n > 0:
        y[:n] += y[n : 2 * n]
        n //= 2
    return y[0] + np.arange(len(y))


def asked(y, n):
    t = np.arange(len(y))
    for k in range(n, 0, -3):
        y = np.where(t < k, y + np.append(y[1:], 0), y)
    return y


def asked_before(y, n):
    t = np.arange(len(y))
    while n > 0:
        low = t < n
        a = np.where(low, np.append(y[1:], 0), 0)
        n -= 3
        y = np.where(low, y + a + n, y)
    return y


def sorts(y, n):
    t, s = np.arange(len(y)), np.concatenate([y, -y])
    for size in (2**k for k in range(1, 9) if 2**k < n):
        for stride in (size >> k for k in range(1, 9) if size >> k):
            at = 2 * t - (t & (stride - 1))
            a, b = s[at], s[at + stride]
            swaps = (a > b) == (n % 2 ^ ((t & (size // 2)) != 0))
            s[at], s[at + stride] = np.where(swaps, b, a), np.where(swaps, a, b)
    return s[: len(y)]


def summed(y, n):
    for k in range(1, n):
        y = y + y[np.arange(len(y)) // 32 * 32 + (np.arange(len(y)) % 32 ^ k)] * k
    return y


@pytest.mark.parametrize("rounds", [0, 1, 2, 7, 16])
@pytest.mark.parametrize("threads", [32, 64, 128])
@pytest.mark.parametrize("reference", [counted, halved, asked, asked_before, sorts, summed], ids=lambda f: f.__name__)
@pytest.mark.parametrize("optimized", [True, False], ids=["optimized", "not optimized"])
def test_marching_threads_do_what_each_does(launch, kernels, reference, threads, rounds, optimized):
    y = np.random.default_rng(rounds).integers(0, 100, threads).astype(np.int32)
    expected = reference(y, rounds)
    launch(kernels[reference.__name__], 1, threads, y, np.int32(rounds), optimized=optimized)
    np.testing.assert_array_equal(expected.astype(np.int32), y)


@pytest.mark.parametrize("block", [(8, 4, 2), (16, 16, 1), (5, 3, 1), (1, 7, 3)])
def test_rows_above_each_other_march(launch, kernels, block):
    threads = block[0] * block[1] * block[2]
    expected = y = np.arange(threads, dtype=np.int32)
    for k in range(5):
        expected = 3 * expected[::-1] + k + np.arange(threads) // block[0] % block[1]
    launch(kernels["over_all"], 1, block, y, np.int32(5))
    np.testing.assert_array_equal(expected, y)


def marching(seed: int, threads: int) -> jit.JitKernel:
    return jit.load(module_of([marching_kernel(seed, threads)]).encode()).kernels["k"]


@pytest.mark.some_of("seed", range(FIRST, FIRST + 24), 4)
def test_random_exchanges_write_what_the_reference_does(launch, seed):
    threads = (32, 64, 24, 40)[seed % 4]
    given = inputs(seed, threads)
    out, counters = np.zeros((threads, WORDS), "u4"), np.zeros(WORDS, "u4")
    memory = bytearray(given.tobytes() + out.tobytes() + counters.tobytes())
    places = {"in": 0, "out": given.nbytes, "counters": 2 * given.nbytes}
    integer_interpreter.run(marching_kernel(seed, threads), places, memory, threads)
    for optimized in (True, False):
        found = out.copy()
        launch(marching(seed, threads), 1, threads, given, found, counters, optimized=optimized)
        assert memory[given.nbytes :] == bytearray(found.tobytes() + counters.tobytes())


def test_most_of_the_random_exchanges_march():
    texts = (marching(seed, 32).llvm_ir() for seed in range(FIRST, FIRST + 12))
    assert sum("@ahead_" in text for text in texts) >= 8


@pytest.mark.parametrize("first", [0, 2**31 - 1, 2**31 - 7, 2**30 - 9, -(2**31), -3])
@pytest.mark.parametrize("threads", [7, 64])
def test_numbers_of_a_row_that_wrap_around_are_what_each_thread_has(launch, kernels, threads, first):
    def wrapped(i):
        return (i + 2**31) % 2**32 - 2**31

    i, s = wrapped(np.arange(threads, dtype=np.int64) + first), 0
    for k in range(4):
        s, last = s + (3 * i >> 16), i
        i = wrapped(i + 0x40000000 + k)
    y = np.zeros(threads, np.int32)
    launch(kernels["wraps"], 1, threads, y, np.int32(first))
    np.testing.assert_array_equal(wrapped(s + last), y)


def test_nothing_is_looked_at_of_which_the_distance_is_known(kernels):
    text = kernels["wraps"].llvm_ir()
    assert "call i32 @regular_" in text and "looking:" not in text


CONSTANT = """__constant__ int rounds[4] = {0, 3, 1, 7};
extern "C" __global__ void k(int *y) {
    __shared__ int s[64];
    int t = threadIdx.x;
    y += blockIdx.x * blockDim.x;
    s[t] = y[t];
    __syncthreads();
    for (int k = rounds[BLOCK]; k > 0; k--) { int a = s[(t + 1) % 64]; __syncthreads(); s[t] = a + k; __syncthreads(); }
    y[t] = s[t];
}"""


def test_a_constant_of_the_block_lets_threads_march(ptx_of, launch, place_variables):
    module = jit.load(ptx_of(CONSTANT.replace("BLOCK", "blockIdx.x")))
    place_variables(module)
    y = np.arange(256, dtype="i4") ** 2
    expected = [counted(row, rounds) for row, rounds in zip(y.reshape(4, 64), (0, 3, 1, 7), strict=True)]
    assert "@ahead_" in module.kernels["k"].llvm_ir()
    launch(module.kernels["k"], 4, 64, y)
    assert np.array_equal(np.concatenate(expected), y)


def test_a_constant_that_threads_choose_does_not(ptx_of):
    text = jit.load(ptx_of(CONSTANT.replace("BLOCK", "threadIdx.x % 4"))).kernels["k"].llvm_ir()
    assert "@ahead_" not in text
