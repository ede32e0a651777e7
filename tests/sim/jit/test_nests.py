"""Threads that go together around a loop with others inside compute what each would alone, and read no more."""

from __future__ import annotations

import numpy as np
import pytest

from cudatool.sim import jit
from cudatool.sim.jit import native
from cudatool.sim.jit.gathers import ONE_VECTOR
from cudatool.sim.jit.regions import MANY

SOURCE = """
extern "C" __global__ void convolved(const float *a, const float *b, float *c, int rows, int columns) {
    // The full convolution of two matrices of so many rows and columns: each sum has bounds of its own.
    int out_rows = 2 * rows - 1, elements = out_rows * (2 * columns - 1);
    for (int e = threadIdx.x; e < elements; e += 64) {
        int i = e % out_rows, j = e / out_rows;
        float sum = 0;
        for (int ja = max(0, j - columns + 1); ja <= min(j, columns - 1); ja++)
            for (int ia = max(0, i - rows + 1); ia <= min(i, rows - 1); ia++)
                sum += a[rows * ja + ia] * b[rows * (j - ja) + i - ia];
        c[e] = sum;
    }
}
extern "C" __global__ void left_early(const float *x, const int *counts, float *y, int n) {
    float sum = 0;
    int rounds = 0;
    for (int i = 0; i < counts[threadIdx.x]; i++) {
        if (x[i] < 0) break;
        for (int k = 0; k < counts[threadIdx.x + i]; k++) sum = 0.5f * (sum + x[k]);
        if (sum > n) continue;
        for (int k = 0; k < i % 5; k++) sum += x[k];
        rounds++;
    }
    y[threadIdx.x] = sum + 1000 * rounds;
}
extern "C" __global__ void whole(const int *x, const int *counts, int *y) {
    int sum = 0;
    for (int i = 0; i < counts[threadIdx.x]; i++)
        for (int k = 0; k < counts[threadIdx.x + i]; k++) sum = 3 * sum + x[k];
    y[threadIdx.x] = sum;
}
extern "C" __global__ void watched(const volatile float *x, const int *counts, float *y) {
    float sum = 0;
    for (int i = 0; i < counts[threadIdx.x]; i++)
        for (int k = 0; k < counts[threadIdx.x + i]; k++) sum += x[k];
    y[threadIdx.x] = sum;
}
extern "C" __global__ void stored(const float *x, const int *counts, float *y) {
    float sum = 0;
    for (int i = 0; i < counts[threadIdx.x]; i++)
        for (int k = 0; k < counts[threadIdx.x + i]; k++) y[threadIdx.x] = sum += x[k];
}
extern "C" __global__ void of_each_round(const float *x, const int *counts, float *y) {
    float most = 0;
    for (int i = 0; i < counts[threadIdx.x]; i++) {
        float sum = 0;
        for (int k = 0; k < counts[threadIdx.x + i]; k++) sum += x[k];
        most = fmaxf(most, sum);
    }
    y[threadIdx.x] = most;
}
"""
# With as many barriers as a kernel has whose regions are functions of their own.
MEAN = """
    __syncthreads();
    sum = s[threadIdx.x ^ 1];
    __syncthreads();
    s[threadIdx.x] = (s[threadIdx.x] + sum) * 0.5f;
"""
LARGE = f"""
extern "C" __global__ void large(const float *x, const int *counts, float *y) {{
    __shared__ float s[64];
    float sum = 0;
    for (int i = 0; i < counts[threadIdx.x]; i++)
        for (int k = 0; k < counts[threadIdx.x + i]; k++) sum += x[k];
    s[threadIdx.x] = sum;
    {MEAN * (MANY // 2)}
    y[threadIdx.x] = s[threadIdx.x];
}}
"""


@pytest.fixture(scope="module")
def kernels(ptx_of):
    return {**jit.load(ptx_of(SOURCE)).kernels, **jit.load(ptx_of(LARGE)).kernels}


def goes_together(kernel: jit.JitKernel) -> bool:
    return "label %nest" in kernel.llvm_ir()


def test_threads_go_together_around_nested_sums_of_what_they_load(kernels):
    assert {"convolved", "left_early", "large"} == {name for name, kernel in kernels.items() if goes_together(kernel)}


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (3, 2), (9, 4), (20, 11)])
def test_a_convolution_of_matrices_of_all_shapes(launch, kernels, rows, columns):
    random = np.random.default_rng(rows)
    # Numbers whose sums are exact, in memory with nothing beside.
    a, b = (random.integers(-8, 8, (columns, rows)).astype(np.float32) for _ in range(2))
    shape = (2 * columns - 1, 2 * rows - 1)
    expected = np.zeros(shape, np.float32)
    for ja in range(columns):
        for ia in range(rows):
            expected[ja : ja + columns, ia : ia + rows] += a[ja, ia] * b
    c = np.full(expected.size + 1, -1, np.float32)
    launch(kernels["convolved"], 1, 64, a, b, c, np.int32(rows), np.int32(columns))
    np.testing.assert_array_equal([*expected.ravel(), -1], c)


@pytest.mark.parametrize("threads", [16, 33, 64])
@pytest.mark.parametrize("first_negative", [0, 5, 12])
def test_threads_leave_nested_loops_early_or_begin_the_next_round(launch, kernels, threads, first_negative):
    random = np.random.default_rng(threads)
    x = random.random(12, np.float32)
    x[first_negative:] *= -1
    counts = random.integers(0, 12, threads + 12).astype(np.int32)
    y = np.zeros(threads, np.float32)
    launch(kernels["left_early"], 1, threads, x, counts, y, np.int32(1))
    expected = []
    for thread in range(threads):
        total, rounds = np.float32(0), 0
        for i in range(counts[thread]):
            if x[i] < 0:
                break
            for k in range(counts[thread + i]):
                total = np.float32(0.5) * (total + x[k])
            if total > 1:
                continue
            for k in range(i % 5):
                total += x[k]
            rounds += 1
        expected.append(total + np.float32(1000 * rounds))
    np.testing.assert_array_equal(np.array(expected, np.float32), y)


@pytest.mark.parametrize("name", ["left_early", "large"])
def test_nothing_is_read_for_threads_that_are_in_no_loop(launch, kernels, name):
    """There is nothing to read: it would fault."""
    counts, y = np.zeros(80, np.int32), np.full(64, -1, np.float32)
    more = [np.int32(1)] if name == "left_early" else []
    launch(kernels[name], 1, 64, np.uint64(0), counts, y, *more)
    assert (y == 0).all()


def test_a_kernel_of_many_regions_goes_together_around_nested_sums_alone(launch, kernels):
    random = np.random.default_rng(3)
    x, counts = random.integers(0, 9, 16).astype(np.float32), random.integers(0, 16, 80).astype(np.int32)
    y = np.zeros(64, np.float32)
    launch(kernels["large"], 1, 64, x, counts, y)
    sums = [sum(x[: counts[thread + i]].sum() for i in range(counts[thread])) for thread in range(64)]
    expected = np.array(sums, np.float32)
    for _ in range(MANY // 2):
        expected = (expected + expected[np.arange(64) ^ 1]) * np.float32(0.5)
    np.testing.assert_array_equal(expected, y)
    assert kernels["large"].llvm_ir().count("call void @together_") == 1


@pytest.mark.parametrize("is_slow", [False, True])
def test_loops_are_made_one_vector_of_where_gathers_are_not_slow(kernels, monkeypatch, is_slow):
    text = kernels["convolved"].llvm_ir()
    assert f", {ONE_VECTOR}" in text
    monkeypatch.setattr(native, "_AMD", ("",) if is_slow else ())  # how the names begin of processors that are
    monkeypatch.setattr(native, "_INTEL", ())
    assert is_slow == (ONE_VECTOR not in native._suited(text, gathers=False))
    assert ONE_VECTOR in native._suited(text, gathers=True)
