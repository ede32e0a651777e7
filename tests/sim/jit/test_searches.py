"""Threads that search a table together find what each would alone, and read no more of it than they do."""

from __future__ import annotations

import os
import re

import numpy as np
import pytest
from even_kernels import even_kernel
from random_kernels import module_of
from test_together import check

from cudatool.sim import jit

FIRST = int(os.environ.get("CUDATOOL_TEST_SEED", "0"))

SOURCE = """
extern "C" __global__ void found(const float *table, const float *own, const int *given, int *out, int n, int threads) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < threads) {
        int at = -1;
        for (int k = 0; k < n; k++) if (table[k] >= own[i]) { at = k; break; }
        if (at == -1) at = n - 1;
        out[i] = given[at];
    }
}
extern "C" __global__ void counted(const int *table, const int *own, int *out, int n) {
    int below = 0, i = threadIdx.x;
    for (int k = 0; k < n; k++) {
        if (table[k] == own[i]) break;
        if (table[k] < own[i]) below = 3 * below + table[k];
    }
    out[i] = below;
}
extern "C" __global__ void some(const int *table, const int *own, int *out, int n) {
    int i = threadIdx.x, at = -1;
    if (own[i] > 0) for (at = 0; at < n; at++) if (table[at] == own[i]) break;
    out[i] = at;
}
extern "C" __global__ void of_its_own(const int *table, const int *own, int *out, int n) {
    int i = threadIdx.x, k = own[i];
    while (k < n && table[k] != own[i]) k++;
    out[i] = k;
}
extern "C" __global__ void watched(const volatile int *table, const int *own, int *out, int n) {
    int k = 0;
    while (k < n && table[k] != own[threadIdx.x]) k++;
    out[threadIdx.x] = k;
}
"""


@pytest.fixture(scope="module")
def kernels(ptx_of):
    return jit.load(ptx_of(SOURCE)).kernels


def loads_once(kernel: jit.JitKernel) -> bool:
    """Whether what threads in a loop have alike is given to them."""
    rounds = re.search(r"^rounds\d+:\n(.*?)\n(?:before|each)round", kernel.llvm_ir(), re.M | re.S)
    return rounds is not None and "load" in rounds[1] and "getelementptr i8, ptr %zero" in rounds[1]


def searches(kernel: jit.JitKernel) -> bool:
    return "call i32 @stay_" in kernel.llvm_ir()


def test_what_threads_read_of_one_table_in_one_order_is_read_once(kernels):
    assert {"found", "counted", "some"} == {name for name, kernel in kernels.items() if loads_once(kernel)}


def test_a_search_keeps_nothing_but_what_is_alike(kernels):
    assert {"found", "some"} == {name for name, kernel in kernels.items() if searches(kernel)}


@pytest.mark.some_of("seed", range(FIRST, FIRST + 24), 8)
def test_random_searches_write_what_the_reference_does(launch_in_turn, seed):
    check(launch_in_turn, seed, has_searches=True)


def test_the_random_kernels_have_searches():
    texts = (even_kernel(seed, 64, has_searches=True) for seed in range(FIRST, FIRST + 24))
    found = [jit.load(module_of([text]).encode()).kernels["k"] for text in texts]
    assert sum(map(searches, found)) >= 3
    assert sum(map(loads_once, found)) > sum(map(searches, found))


@pytest.mark.parametrize("threads", [1, 16, 50, 200])
@pytest.mark.parametrize("n", [1, 7, 300])
def test_each_thread_finds_its_own_place_in_a_table(launch, kernels, n, threads):
    random = np.random.default_rng(n)
    table, own = np.sort(random.random(n, np.float32)), random.random(threads, np.float32)
    given, out = random.integers(0, 1000, n).astype(np.int32), np.full(threads + 1, -1, np.int32)
    launch(kernels["found"], 4, 64, table, own, given, out, np.int32(n), np.int32(threads))
    places = np.minimum(np.searchsorted(table, own), n - 1)
    np.testing.assert_array_equal([*given[places], -1], out)


def test_what_differs_between_threads_is_kept_from_round_to_round(launch, kernels):
    random = np.random.default_rng(1)
    table, own = random.integers(0, 50, 60).astype(np.int32), random.integers(0, 50, 48).astype(np.int32)
    out = np.zeros(48, np.int32)
    launch(kernels["counted"], 1, 48, table, own, out, np.int32(60))
    expected = []
    for mine in own:
        below = 0
        for value in table.tolist():
            if value == mine:
                break
            if value < mine:
                below = (3 * below + value) & 0xFFFFFFFF
        expected.append(below)
    np.testing.assert_array_equal(np.array(expected, np.uint32).view(np.int32), out)


@pytest.mark.parametrize("wanted", [0, 5, 16])
def test_a_table_is_read_only_while_a_thread_searches_it(launch, kernels, wanted):
    """There is none: a read of it would fault."""
    own = np.zeros(48, np.int32)
    out = np.zeros(48, np.int32)
    launch(kernels["some"], 1, 48, np.uint64(0), own, out, np.int32(9))
    assert (out == -1).all()
    table = np.arange(1, 10, dtype=np.int32)
    own[16 : 16 + wanted] = 1 + np.arange(wanted) % 9
    launch(kernels["some"], 1, 48, table, own, out, np.int32(9))
    np.testing.assert_array_equal(own - 1, out)
