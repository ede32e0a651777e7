"""Two rows of threads go through a long chain side by side: all threads do what they do without."""

from __future__ import annotations

import re

import numpy as np
import pytest

from cudatool.sim import jit

SOURCE = """
#define NAME(name) extern "C" __global__ void name(const float *left, const float *right, float *out, int rounds)
#define BEGIN \\
    __shared__ float a[2][17][16], b[2][16][33]; \\
    int x = threadIdx.x, y = threadIdx.y, z = threadIdx.z; \\
    int at = (z * blockDim.y + y) * blockDim.x + x; \\
    for (int k = x; k < 16; k += blockDim.x) a[z][y][k] = left[(z * blockDim.y + y) * 16 + k]; \\
    for (int k = y; k < 16; k += blockDim.y) b[z][k][x] = right[k * blockDim.x + x];
#define SUM(n) _Pragma("unroll") for (int k = 0; k < n; k++) sum += a[z][y][k] * b[z][k][x];
// As the inner part of Rodinia's lud.
NAME(product) {
    BEGIN
    __syncthreads();
    float sum = 0;
    SUM(16)
    out[at] -= sum;
}
// What a row has written is read after the barrier only; the number of the round is alike for all.
NAME(rows) {
    BEGIN
    for (int round = 0; round < rounds; round++) {
        __syncthreads();
        float sum = round;
        SUM(16)
        out[at] = sum;
        __syncthreads();
        a[z][y][x & 15] = out[at] - a[z][y][x & 15];
    }
}
// Sums are kept while other rows run; a number that is alike for all changes beside the chain.
NAME(kept) {
    BEGIN
    float sum = 0;
    int scale = 1;
    for (int round = 0; round < rounds; round++) {
        __syncthreads();
        SUM(16)
        sum += scale;
        scale = scale * 3 + 1;
        __syncthreads();
        a[z][y][x & 15] += 1;
    }
    out[at] = sum;
}
NAME(brief) { BEGIN __syncthreads(); float sum = 0; SUM(4) out[at] = sum; }
NAME(two_chains) {
    BEGIN
    __syncthreads();
    float sum = 0, other[4] = {0, 0, 0, 0};
    SUM(16)
    _Pragma("unroll") for (int k = 0; k < 16; k++) for (int i = 0; i < 4; i++) other[i] += a[z][y][k] * (b[z][k][x] + i);
    out[at] = sum * other[0] * other[1] * other[2] * other[3];
}
NAME(lanes) {
    BEGIN
    __syncthreads();
    unsigned lane;
    asm("mov.u32 %0, %%laneid;" : "=r"(lane));
    float sum = lane;
    SUM(16)
    out[at] = sum;
}
NAME(branches) { BEGIN __syncthreads(); float sum = 0; if (x > rounds) return; SUM(16) out[at] = sum; }
NAME(flat) {
    __shared__ float a[64];
    a[threadIdx.x] = left[threadIdx.x];
    __syncthreads();
    float sum = 0;
    _Pragma("unroll") for (int k = 0; k < 16; k++) sum += a[k] * a[threadIdx.x + k];
    out[threadIdx.x] = sum;
}
"""


@pytest.fixture(scope="module")
def kernels(ptx_of):
    return jit.load(ptx_of(SOURCE)).kernels


def test_regions_that_are_one_long_chain_run_two_rows_side_by_side(kernels):
    found = {name: len(re.findall(r"call i32 @pair_", kernel.llvm_ir())) for name, kernel in kernels.items()}
    others = dict.fromkeys(("brief", "two_chains", "lanes", "branches", "flat"), 0)
    assert {"product": 1, "rows": 1, "kept": 1, **others} == found


def _expected(name: str, left: np.ndarray, right: np.ndarray, out: np.ndarray) -> np.ndarray:
    width = out.shape[-1]
    a = left.copy()
    if name == "product":
        return out - a @ right
    own = a[:, :, :width]  # the elements that threads change
    total, scale = np.zeros_like(out), 1
    for number in range(3):
        out = number + a @ right
        total += a @ right + scale
        scale = scale * 3 + 1
        own[:] = out - own if name == "rows" else own + 1
    return out if name == "rows" else total


@pytest.mark.parametrize("shape", [(1, 16, 16), (2, 16, 16), (2, 5, 7), (1, 1, 16), (1, 16, 3), (2, 3, 16)])
@pytest.mark.parametrize("name", ["product", "rows", "kept"])
def test_each_thread_does_what_it_does_without(launch, kernels, name, shape):
    draw = np.random.default_rng(4)
    depth, height, width = shape
    left = draw.integers(0, 3, (depth, height, 16)).astype(np.float32)  # small numbers: sums are exact
    right = draw.integers(0, 3, (16, width)).astype(np.float32)
    out = draw.integers(0, 9, shape).astype(np.float32)
    expected = _expected(name, left, right, out)
    launch(kernels[name], 1, shape[::-1], left, right, out, np.int32(3))
    np.testing.assert_array_equal(out, expected)


def test_checkers_see_one_row_after_the_other(kernels):
    text = kernels["product"].llvm_ir(instrument=jit.Instrument.MEMCHECK)
    assert "@pair_" not in text
