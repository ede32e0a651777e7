"""What the next blocks access is fetched ahead where its address is known, and nothing else comes of it."""

from __future__ import annotations

import re

import numpy as np
import pytest

from cudatool.sim import jit

SOURCE = """
#define PLACE int x = blockIdx.x * blockDim.x + threadIdx.x, y = blockIdx.y * blockDim.y + threadIdx.y
extern "C" __global__ void tiles(const float *a, float *b, int n) {
    __shared__ float t[32][161];
    PLACE;
    t[threadIdx.y][threadIdx.x] = a[y * n + x];
    __syncthreads();
    b[y * n + x] += t[threadIdx.y][blockDim.x - 1 - threadIdx.x];
}
extern "C" __global__ void turned(const float *a, float *b, int n) {
    __shared__ float t[32][33];
    PLACE;
    t[threadIdx.y][threadIdx.x] = a[y * n + x] + a[threadIdx.y * 32 + threadIdx.x];
    __syncthreads();
    int to_x = blockIdx.y * blockDim.x + threadIdx.x, to_y = blockIdx.x * blockDim.y + threadIdx.y;
    b[to_y * n + to_x] = t[threadIdx.x][threadIdx.y];
}
extern "C" __global__ void table(const int *at, const float *a, float *b, int n) {
    __shared__ int t[32];
    PLACE;
    for (int i = 0; i < n; i++) t[threadIdx.x] += at[i * 32 + threadIdx.x];
    __syncthreads();
    b[y * n + x] = a[t[31 - threadIdx.x]];
}
extern "C" __global__ void plain(const float *a, float *b, int n) { PLACE; b[y * n + x] = a[y * n + x]; }
"""


@pytest.fixture(scope="module")
def kernels(ptx_of):
    return jit.load(ptx_of(SOURCE)).kernels


def test_only_what_lies_at_known_addresses_is_fetched(kernels):
    """Each place once, also if it is both read and written; none at which the next block is in other rows, or as before."""
    fetched = {
        name: sorted(re.findall(r"call void @llvm.prefetch.p0\(ptr .*?, i32 ([01]), ", kernel.llvm_ir()))
        for name, kernel in kernels.items()
    }
    assert {"tiles": ["0", "1"], "turned": ["0"], "table": ["1"], "plain": []} == fetched
    assert "call void @fetch_ahead" in kernels["tiles"].llvm_ir()


def test_checked_kernels_fetch_nothing(kernels):
    for kind in (jit.Instrument.MEMCHECK, jit.Instrument.RACECHECK, jit.Instrument.FOOTPRINT):
        assert "prefetch" not in kernels["tiles"].llvm_ir(kind)


@pytest.mark.parametrize("width, height", [(16, 16), (32, 8), (5, 3), (32, 1), (160, 2)])
@pytest.mark.parametrize("options", [{}, {"seed": 3, "threads": 2}])
def test_blocks_of_all_shapes_read_what_they_ask_for(launch, kernels, width, height, options):
    across, down = 19, 4  # more than are fetched for at once
    n = across * width
    a = np.random.default_rng(1).random((down * height, n), np.float32)
    b = np.ones_like(a)
    expected = b + a.reshape(-1, across, width)[:, :, ::-1].reshape(a.shape)
    launch(kernels["tiles"], (across, down), (width, height), a, b, np.int32(n), **options)
    np.testing.assert_array_equal(expected, b)
