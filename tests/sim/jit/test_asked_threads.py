"""Threads that are asked, many at once, whether they do anything in a region write what each would alone."""

from __future__ import annotations

import os
import re

import integer_interpreter
import numpy as np
import pytest
from marching_kernels import marching_kernel
from random_kernels import WORDS, inputs, module_of

from cudatool.sim import jit

FIRST = int(os.environ.get("CUDATOOL_TEST_SEED", "0"))

SOURCE = """
#define NAME(name) extern "C" __global__ void name
struct Node { int child[256]; int key[257]; };
// A tree whose nodes' keys all threads of a block look at, as Rodinia's b+tree.
NAME(looked_up)(const Node *nodes, int height, long *place, long *next, const int *wanted, int *found) {
    int i = threadIdx.x, b = blockIdx.x;
    for (int level = 0; level < height; level++) {
        if (nodes[place[b]].key[i] <= wanted[b] && nodes[place[b]].key[i + 1] > wanted[b])
            next[b] = nodes[next[b]].child[i];
        __syncthreads();
        if (i == 0) place[b] = next[b];
        __syncthreads();
    }
    if (nodes[place[b]].key[i] == wanted[b]) found[b] = nodes[place[b]].child[i];
}
// The front of a graph, as Rodinia's bfs.
NAME(front)(const int *starts, const int *edges, bool *now, bool *later, const bool *seen, int *cost, int n) {
    int i = blockIdx.x * 256 + threadIdx.x;
    if (i < n && now[i]) {
        now[i] = false;
        for (int k = starts[i]; k < starts[i + 1]; k++)
            if (!seen[edges[k]]) { cost[edges[k]] = cost[i] + 1; later[edges[k]] = true; }
    }
}
NAME(none_there)(const int *flags, const int *counts, int *out) {
    int i = blockIdx.x * 128 + threadIdx.x;
    if (flags[i] && counts[i] > 1)
        for (int k = 0; k < counts[i]; k++) out[i] = 3 * out[i] + k;
}
// None of these is asked: each thread does something, does the same, keeps something, or waits for another.
NAME(all)(const int *x, int *out, int n) {
    int sum = 0, i = threadIdx.x;
    for (int k = 0; k < x[i]; k++) sum += x[i] * k;
    out[i] = sum;
}
NAME(flagged)(const int *x, int *out, int n) {
    __shared__ int some;
    if (threadIdx.x == 0) some = 0;
    __syncthreads();
    if (x[threadIdx.x] > n) some = 1;
    __syncthreads();
    out[threadIdx.x] = some;
}
NAME(keeps)(const int *x, int *out, int n) {
    __shared__ int some;
    int own = x[threadIdx.x];
    if (own > n) some = threadIdx.x;
    __syncthreads();
    out[threadIdx.x] = some + own;
}
NAME(waits)(volatile int *x, int *out, int n) {
    if (x[threadIdx.x] > n) for (int k = 0; k < n; k++) out[threadIdx.x] += x[k];
}
NAME(counts)(const int *x, int *out, int n) {
    if (x[threadIdx.x] > n) atomicAdd(out, 1);
}
"""


@pytest.fixture(scope="module")
def kernels(ptx_of):
    return jit.load(ptx_of(SOURCE)).kernels


def asks(kernel: jit.JitKernel) -> set[int]:
    """Return the regions whose threads are asked first."""
    return {int(number) for number in re.findall(r"call i64 @which_(\d+)", kernel.llvm_ir())}


def test_threads_are_asked_where_few_do_anything(kernels):
    found = {name for name, kernel in kernels.items() if asks(kernel)}
    assert found == {"looked_up", "front", "none_there"}


def tree(random: np.random.Generator, height: int) -> tuple[np.ndarray, np.ndarray]:
    """Return nodes of which each but the last ones leads to 256 others, and the numbers in these."""
    counts = [256**level for level in range(height + 1)]
    numbers = np.cumsum(random.integers(1, 4, 256 * counts[-1])).astype(np.int32)
    nodes = np.zeros((sum(counts), 513), np.int32)
    for level, count in enumerate(counts):
        first, below = sum(counts[:level]), sum(counts[: level + 1])
        rows = nodes[first : first + count]
        rows[:, :256] = below + np.arange(256 * count).reshape(-1, 256)
        rows[:, 256:512] = numbers[:: len(numbers) // (256 * count)].reshape(-1, 256)
        rows[:, 512] = [*rows[1:, 256], 2**31 - 1]
    if height:
        nodes[0, 256] = -1  # what is below all others belongs to the first
    nodes[-counts[-1] :, :256] = random.integers(0, 1 << 30, (counts[-1], 256))
    return nodes, numbers


@pytest.mark.parametrize("height", [0, 1])
def test_a_tree_is_searched(launch, kernels, height):
    random = np.random.default_rng(height)
    nodes, numbers = tree(random, height)
    wanted = np.concatenate([numbers[[0, 63, 64, 255, -1]], random.integers(0, numbers[-1] + 5, 45, np.int32)])
    place, following = np.zeros(len(wanted), np.int64), np.zeros(len(wanted), np.int64)
    found = np.full(len(wanted), -1, np.int32)
    launch(kernels["looked_up"], len(wanted), 256, nodes, np.int32(height), place, following, wanted, found)
    leaves = nodes[-(256**height) :, :256].ravel()
    at = np.searchsorted(numbers, wanted)
    is_there = numbers[np.minimum(at, len(numbers) - 1)] == wanted
    np.testing.assert_array_equal(np.where(is_there, leaves[np.minimum(at, len(numbers) - 1)], -1), found)


@pytest.mark.parametrize("share", [0, 0.001, 0.02, 0.5, 1])
@pytest.mark.parametrize("n", [1, 63, 64, 255, 1000])
def test_a_front_goes_on(launch, kernels, n, share):
    random = np.random.default_rng(n)
    starts = np.concatenate([[0], np.cumsum(random.integers(0, 6, n))]).astype(np.int32)
    edges = random.integers(0, n, max(starts[-1], 1)).astype(np.int32)
    now, seen, later = random.random(n) < share, random.random(n) < 0.5, np.zeros(n, bool)
    seen |= now
    cost = np.where(seen, 7, -1).astype(np.int32)  # of one front: all it leads to is as far
    expected, expected_later = cost.copy(), later.copy()
    for i in np.flatnonzero(now):
        new = [one for one in edges[starts[i] : starts[i + 1]] if not seen[one]]
        expected[new] = expected[i] + 1
        expected_later[new] = True
    left = now.copy()
    launch(kernels["front"], -(-n // 256), 256, starts, edges, left, later, seen, cost, np.int32(n))
    assert not left.any()
    np.testing.assert_array_equal(expected, cost)
    np.testing.assert_array_equal(expected_later, later)


def test_what_no_thread_comes_to_is_not_read(launch, kernels):
    """There is none: a read of it would fault."""
    launch(kernels["none_there"], 3, 128, np.zeros(384, np.int32), np.uint64(0), np.uint64(0))


@pytest.mark.parametrize("threads", [1, 40, 64, 127, 128])
def test_each_of_the_threads_that_are_asked_does_its_part(launch, kernels, threads):
    random = np.random.default_rng(threads)
    flags, counts = random.integers(0, 2, 128).astype(np.int32), random.integers(0, 4, 128).astype(np.int32)
    flags[: threads // 2] = 0
    out = np.ones(128, np.int32)
    launch(kernels["none_there"], 1, threads, flags, counts, out)
    expected = np.ones(128, np.int32)
    for i in range(threads):
        if flags[i] and counts[i] > 1:
            for k in range(counts[i]):
                expected[i] = 3 * expected[i] + k
    np.testing.assert_array_equal(expected, out)


def _random(seed: int, threads: int) -> str:
    return marching_kernel(seed, threads, has_questions=True)


@pytest.mark.some_of("seed", range(FIRST, FIRST + 32), 6)
def test_random_questions_write_what_the_reference_does(launch, seed):
    threads = (64, 100, 128, 65)[seed % 4]
    text, given = _random(seed, threads), inputs(seed, threads)
    out, counters = np.zeros((threads, WORDS), "u4"), np.zeros(WORDS, "u4")
    memory = bytearray(given.tobytes() + out.tobytes() + counters.tobytes())
    places = {"in": 0, "out": given.nbytes, "counters": 2 * given.nbytes}
    integer_interpreter.run(text, places, memory, threads)
    kernel = jit.load(module_of([text]).encode()).kernels["k"]
    for optimized in (True, False):
        found, counted = out.copy(), counters.copy()
        launch(kernel, 1, threads, given, found, counted, optimized=optimized)
        assert memory[given.nbytes :] == bytearray(found.tobytes() + counted.tobytes())


def test_many_of_the_random_kernels_ask():
    kernels = (jit.load(module_of([_random(seed, 64)]).encode()).kernels["k"] for seed in range(FIRST, FIRST + 16))
    assert sum(len(asks(kernel)) > 0 for kernel in kernels) >= 6
