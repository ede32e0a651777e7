"""Loops over barriers whose rounds begin with a question: each way after the barrier is a region of its own."""

from __future__ import annotations

import re

import numpy as np
import pytest

from cudatool.sim import jit

SOURCE = """
#define t ((int)threadIdx.x)
#define NAME(name) extern "C" __global__ void name(int *y, int rounds) { \\
    __shared__ int s[1024]; int n = blockDim.x; s[t] = y[t]; __syncthreads();
#define END y[t] = s[t]; }
// A tree of sums, as most programs write it.
NAME(tree) for (int k = n / 2; k > 0; k /= 2) { if (t < k) s[t] += s[t + k]; __syncthreads(); } END
// What is computed between the barrier and the branch, of the number before it changes and of each thread's own, which
// leaves all of them something to do.
NAME(between)
    int own = t, sum = 0;
    for (int k = n / 2; k > 0; k /= 2) {
        if (t < k) s[t] += s[t + k] + own;
        __syncthreads();
        own += 3; sum += k;
    }
    s[t] += own + sum;
END
NAME(twice)
    for (int round = 0; round < rounds; round++)
        for (int k = n / 2; k > 0; k /= 2) {
            int a = 0;
            if (t < k) a = s[t + k] * 2;
            __syncthreads();
            if (t < k) s[t] += a;
            __syncthreads();
        }
END
// Not these: all threads do something in each round, the number is each thread's, or some warps wait.
NAME(all) for (int k = 1; k < n; k *= 2) { int a = t >= k ? s[t - k] : 0; __syncthreads(); s[t] += a; __syncthreads(); } END
NAME(own) for (int k = n / 2; k > 0 && s[0] < 1 << 30; k /= 2) { if (t < k) s[t] += s[t + k]; __syncthreads(); } END
NAME(part)
    for (int k = n / 2; k > 0; k /= 2) { if (t < k) s[t] += s[t + k]; __syncthreads(); }
    if (t < 32) asm volatile("bar.sync 1, 32;" ::: "memory");
END
"""


@pytest.fixture(scope="module")
def kernels(ptx_of):
    return jit.load(ptx_of(SOURCE)).kernels


def _count(kernel: jit.JitKernel, what: str, instrument: jit.Instrument = jit.Instrument.NONE) -> int:
    return len(re.findall(f"^define internal i32 @{what}_", kernel.llvm_ir(instrument), re.M))


def test_it_is_known_how_many_threads_do_anything_in_each_round(kernels):
    found = {name: _count(kernel, "most") for name, kernel in kernels.items()}
    assert {"tree": 2, "twice": 2, "between": 0, "all": 0, "own": 0, "part": 0} == found


def test_each_way_is_a_region_but_not_for_checkers(kernels):
    more = {name: _count(one, "all") - _count(one, "all", jit.Instrument.MEMCHECK) for name, one in kernels.items()}
    assert {"tree", "twice", "between"} == {name for name, count in more.items() if count}


def test_a_region_follows_at_once_where_no_other_can_be_next(kernels):
    text = kernels["all"].llvm_ir()
    assert ["do1", "do3"] == re.findall(r"^  br i1 %stopped\d+, label %next, label %(\w+)", text, re.M)


def _expected(name: str, y: np.ndarray) -> np.ndarray:
    s, n = y.copy(), len(y)
    own, total = np.arange(n), 0
    for _ in range(3 if name == "twice" else 1):
        k = n // 2 if name != "all" else 1
        while 0 < k < n:
            if name == "all":
                s[k:] += s[:-k].copy()
                k *= 2
                continue
            s[:k] += s[k : 2 * k] * (2 if name == "twice" else 1) + (own[:k] if name == "between" else 0)
            own, total = own + 3, total + k
            k //= 2
    return s + own + total if name == "between" else s


@pytest.mark.parametrize("threads", [1, 2, 20, 64, 100, 1024])
@pytest.mark.parametrize("name", ["tree", "between", "twice", "all", "own", "part"])
def test_threads_do_what_they_do_without(launch, kernels, name, threads):
    y = np.random.default_rng(3).integers(0, 100, threads).astype(np.int32)
    expected = _expected(name, y)
    launch(kernels[name], 1, threads, y, np.int32(3))
    np.testing.assert_array_equal(expected.astype(np.int32), y)
