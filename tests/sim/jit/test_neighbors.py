"""Threads whose registers are regular run in a form that shows it; results are what they are without it."""

from __future__ import annotations

import re

import numpy as np
import pytest

from cudatool.ptx.flow import reads
from cudatool.sim import jit
from cudatool.sim.jit.copies import separate_copies
from cudatool.sim.jit.neighbors import distances
from cudatool.sim.jit.regions import REPEATABLE

SOURCE = """
extern "C" __global__ void scale(float *y, int n) {
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) y[i] = 2 * y[i] + i;
}
extern "C" __global__ void until(float *y, int n) {
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) {
        if (y[i] < 0) break;
        y[i] = 2 * y[i] + i;
    }
}
extern "C" __global__ void every_third(int *y, int n) {
    for (int i = 3 * (blockIdx.x * blockDim.x + threadIdx.x); i < n; i += 3 * gridDim.x * blockDim.x) y[i] += i;
}
extern "C" __global__ void some_shifted(const int *by, int *y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (by[i]) i += 7;
    for (; i < n; i += gridDim.x * blockDim.x) atomicAdd(&y[i], i);
}
extern "C" __global__ void around(unsigned *y, unsigned first, unsigned n) {
    unsigned i = first + blockIdx.x * blockDim.x + threadIdx.x;
    for (; i - first < n; i += gridDim.x * blockDim.x) y[i - first] = i;
}
extern "C" __global__ void of_rows(int *y, int n) {
    int stride = gridDim.x * blockDim.x;
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += stride) y[threadIdx.y * n + i] += 10 * threadIdx.y + i;
}
extern "C" __global__ void nested(const int *rounds, int *y, int n) {
    int t = blockIdx.x * blockDim.x + threadIdx.x;
    for (int k = 0; k < 3; k++) {
        int stop = n + rounds[(t + k) % 64];
        for (int i = t; i < stop; i += gridDim.x * blockDim.x) atomicAdd(&y[i], k + 1);
    }
}
extern "C" __global__ void tiles(const float *a, const float *b, float *c, int n) {
    __shared__ float p[8][8], q[8][8];
    int row = blockIdx.y * 8 + threadIdx.y, column = blockIdx.x * 8 + threadIdx.x;
    float sum = 0;
    for (int k = 0; k < n; k += 8) {
        p[threadIdx.y][threadIdx.x] = a[row * n + k + threadIdx.x];
        q[threadIdx.y][threadIdx.x] = b[(k + threadIdx.y) * n + column];
        __syncthreads();
        for (int j = 0; j < 8; j++) sum += p[threadIdx.y][j] * q[j][threadIdx.x];
        __syncthreads();
    }
    c[row * n + column] = sum;
}
extern "C" __global__ void centered(const float *x, float *y, int n) {
    __shared__ float part[64];
    float sum = 0;
    for (int i = threadIdx.x; i < n; i += blockDim.x) sum += x[i];
    part[threadIdx.x] = sum;
    __syncthreads();
    for (int s = 32; s > 0; s /= 2) {
        if (threadIdx.x < s) part[threadIdx.x] += part[threadIdx.x + s];
        __syncthreads();
    }
    for (int i = threadIdx.x; i < n; i += blockDim.x) y[i] = x[i] - part[0] / n;
}
extern "C" __global__ void wander(int *y, int rounds) {
    __shared__ int seen[64];
    seen[threadIdx.x] = 0;
    __syncthreads();
    int at = threadIdx.x;
    for (int k = 0; k < rounds; k++) {
        seen[at] += at + k;
        __syncthreads();
        at = (at + 5) % 64;
    }
    y[threadIdx.x] = seen[threadIdx.x] * 100 + at;
}
"""


@pytest.fixture(scope="module")
def kernels(ptx_of):
    return jit.load(ptx_of(SOURCE)).kernels


def forms(kernel: jit.JitKernel) -> int:
    """Return how many regions have a form for regular registers."""
    return len(re.findall(r"^define internal i32 @regular_", kernel.llvm_ir(), re.MULTILINE))


def test_distances_follow_sums_and_products(kernels):
    """The index goes on by 1, an address of float by 4, and the products of both by what they are multiplied with."""
    for name, expected in (("scale", {0, 1, 4}), ("every_third", {0, 1, 3, 12})):
        assert expected == set(distances(kernels[name].text.stepping).values())


def test_a_parameter_that_each_thread_chooses_is_at_no_distance(ptx_kernel):
    body = """.reg .b32 %t, %x; .reg .b64 %a, %b, %c, %d; .reg .pred %q;
    mov.u32 %t, %tid.x; and.b32 %x, %t, 1; setp.eq.u32 %q, %x, 0;
    mov.b64 %a, p; mov.b64 %b, q; selp.b64 %a, %a, %b, %q;
    ld.param.u64 %c, [%a]; ld.param.u64 %d, [p]; st.global.u64 [%c], %d; ret;"""
    found = distances(ptx_kernel(".param .u64 p, .param .u64 q", body).text.stepping)
    assert 0 == found["%d"]
    assert "%c" not in found


@pytest.mark.parametrize(
    ("name", "has_form"),
    [("until", True), ("tiles", False), ("centered", False), ("scale", False)],  # tiles: all is known without a look
)
def test_regions_in_loops_have_a_form_for_regular_registers(kernels, name, has_form):
    assert has_form == (forms(kernels[name]) > 0)


@pytest.mark.parametrize("name", ["scale", "until"])
@pytest.mark.parametrize("block", [1, 7, 64, 100])
@pytest.mark.parametrize("count", [0, 1, 99, 1000])
def test_neighbors_in_a_stride(launch, kernels, name, block, count):
    y = np.arange(count + 1, dtype=np.float32)
    expected = np.append(3 * y[:count], y[count])
    launch(kernels[name], 3, block, y, np.int32(count))
    np.testing.assert_array_equal(expected, y)


def test_neighbors_at_a_distance(launch, kernels):
    y = np.zeros(2000, np.int32)
    launch(kernels["every_third"], 2, 50, y, np.int32(2000))
    index = np.arange(2000)
    np.testing.assert_array_equal(np.where(index % 3, 0, index), y)


@pytest.mark.parametrize("shifted", ["none", "all", "some", "the last"])
def test_registers_that_turn_out_not_to_be_regular(launch, kernels, shifted):
    by = np.zeros(128, np.int32)
    by[{"none": slice(0), "all": slice(None), "some": slice(3, None, 5), "the last": slice(127, None)}[shifted]] = 1
    expected = np.zeros(1000, np.int64)
    for thread in range(128):
        index = np.arange(thread + 7 * int(by[thread]), 1000, 128)
        expected[index] += index
    y = np.zeros(1000, np.int32)
    launch(kernels["some_shifted"], 2, 64, by, y, np.int32(1000))
    np.testing.assert_array_equal(expected, y)


@pytest.mark.parametrize("first", [0, 2**31 - 500, 2**31 - 30, 2**32 - 500, 2**32 - 30])
def test_numbers_that_wrap_around(launch, kernels, first):
    y = np.zeros(1001, np.uint32)
    launch(kernels["around"], 2, 64, y, np.uint32(first), np.uint32(1000))
    np.testing.assert_array_equal((first + np.arange(1000)) % 2**32, y[:1000])
    assert y[1000] == 0


@pytest.mark.parametrize("width", [8, 13])
def test_each_row_of_a_block_for_itself(launch, kernels, width):
    y = np.zeros((5, 300), np.int32)
    launch(kernels["of_rows"], 3, (width, 5), y, np.int32(300))
    np.testing.assert_array_equal(10 * np.arange(5)[:, None] + np.arange(300), y)


def test_threads_in_different_rounds_of_an_outer_loop(launch, kernels):
    rounds = np.random.default_rng(5).integers(0, 400, 64).astype(np.int32)
    expected = np.zeros(1000, np.int32)
    for thread in range(64):
        for k in range(3):
            expected[thread : 300 + rounds[(thread + k) % 64] : 64] += k + 1
    y = np.zeros(1000, np.int32)
    launch(kernels["nested"], 2, 32, rounds, y, np.int32(300))
    np.testing.assert_array_equal(expected, y)


def test_registers_that_live_across_barriers_in_a_loop(launch, kernels):
    random = np.random.default_rng(6)
    a, b = (random.random((40, 40), np.float32) for _ in range(2))
    c = np.zeros((40, 40), np.float32)
    launch(kernels["tiles"], (5, 5), (8, 8), a, b, c, np.int32(40))
    np.testing.assert_allclose(a.astype(np.float64) @ b, c, rtol=1e-5)


def test_the_index_of_a_thread_is_computed_again_although_a_loop_goes_on_from_it(launch, kernels):
    function = kernels["centered"].text.function
    separate = separate_copies(function, REPEATABLE)
    new = separate.registers.keys() - function.registers.keys()
    assert new
    assert new <= {name for one in separate.instructions for name in reads(one)}
    assert len(kernels["centered"].text.stepping.instructions) > len(function.instructions)
    x, y = np.random.default_rng(7).random(500, np.float32), np.zeros(500, np.float32)
    launch(kernels["centered"], 1, 64, x, y, np.int32(500))
    np.testing.assert_allclose(x - x.mean(dtype=np.float64), y, atol=1e-6)


@pytest.mark.parametrize("rounds", [0, 1, 2, 17])
def test_a_value_that_another_may_have_replaced_is_not_computed_again(launch, kernels, rounds):
    seen, at = np.zeros(64, np.int64), np.arange(64)
    for k in range(rounds):
        seen[at] += at + k
        at = (at + 5) % 64
    y = np.zeros(64, np.int32)
    launch(kernels["wander"], 1, 64, y, np.int32(rounds))
    np.testing.assert_array_equal(seen * 100 + at, y)
