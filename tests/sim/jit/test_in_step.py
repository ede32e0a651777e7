"""Blocks with trees of sums run several at a time, region by region, and each computes what it would alone."""

from __future__ import annotations

import re

import numpy as np
import pytest

from cudatool.sim import jit
from cudatool.sim.jit.context import IN_STEP

SOURCE = """
#define BLOCK (blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z))
#define ME (threadIdx.x + blockDim.x * threadIdx.y)
#define ALL (blockDim.x * blockDim.y)
#define TREE for (int left = 64; left; left /= 2) { if (threadIdx.x < left) s[ME] += s[ME + left]; __syncthreads(); }
extern "C" __global__ void summed(const int *x, int *y) {
    __shared__ int s[128];
    s[ME] = x[BLOCK * ALL + ME] + blockIdx.y;
    __syncthreads();
    TREE
    if (!ME) y[BLOCK] = s[0];
}
extern "C" __global__ void given(const int *x, int *y) {
    extern __shared__ int s[];
    s[ME] = x[BLOCK * ALL + ME] + blockIdx.y;
    __syncthreads();
    TREE
    if (!ME) y[BLOCK] = s[0];
}
extern "C" __global__ void kept(const int *x, int *y) {
    __shared__ int s[128];
    int own = x[BLOCK * ALL + ME];
    s[ME] = own;
    __syncthreads();
    TREE
    own = 3 * own + s[0];
    __syncthreads();
    s[ME] = own;
    __syncthreads();
    y[BLOCK * ALL + ME] = own - s[ALL - 1 - ME];
}
extern "C" __global__ void rounds(const int *x, int *y, int n) {
    __shared__ int s[128];
    for (int k = 0; k < n; k++) { s[ME] = x[BLOCK * ALL + ME]; __syncthreads(); TREE }
    if (!ME) y[BLOCK] = s[0];
}
extern "C" __global__ void array(const int *x, int *y, int n) {
    __shared__ int s[128];
    short own[4]; for (int k = 0; k < 4; k++) own[(k * n) % 4] = (short)(x[ME] + k);
    s[ME] = x[BLOCK * ALL + ME];
    __syncthreads();
    TREE
    if (!ME) y[BLOCK] = s[0] + own[n % 4];
}
extern "C" __global__ void narrow(const int *x, int *y) {  // a tree for each row
    __shared__ int s[128];
    s[ME] = x[BLOCK * ALL + ME];
    __syncthreads();
    for (int left = 32; left; left /= 2) { if (threadIdx.x < left) s[ME] += s[ME + left]; __syncthreads(); }
    if (!ME) y[BLOCK] = s[0] + s[blockDim.x];
}
extern "C" __global__ void exchanged(const int *x, int *y) {
    __shared__ int s[128];
    s[ME] = x[BLOCK * ALL + ME];
    __syncthreads();
    y[BLOCK * ALL + ME] = s[ALL - 1 - ME];
}
"""


@pytest.fixture(scope="module")
def kernels(ptx_of):
    return jit.load(ptx_of(SOURCE)).kernels


def test_kernels_with_trees_whose_barriers_are_in_no_loop_run_in_step(kernels):
    found = {name for name, kernel in kernels.items() if "call void @in_step(" in kernel.llvm_ir()}
    assert {"summed", "given", "kept", "narrow"} == found


def test_what_is_called_once_is_inlined_before_it_is_simplified(kernels, ptx_kernel):
    found = set()
    for kernel in (*kernels.values(), ptx_kernel("", "ret;")):
        text = kernel.llvm_ir()
        for name, marked in re.findall(r"^define .*@(block|in_step|side_by_side|warps_\d+)\(.*\)(.*) #0", text, re.M):
            assert " alwaysinline" == marked, name
            assert len(re.findall(rf"call .*@{name}\(", text)) <= 1, name
            found.add(name)
    assert {"block", "in_step", "side_by_side", "warps_1"} <= found


GRIDS = [1, IN_STEP - 1, IN_STEP, 100, (7, 5, 3), 1000]


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("options", [{}, {"seed": 3}, {"threads": 2}])
def test_blocks_in_step_compute_what_each_does(launch, kernels, grid, options):
    blocks = int(np.prod(grid))
    shape = (*grid, 1, 1)[:3] if isinstance(grid, tuple) else (grid, 1, 1)
    row = np.arange(blocks) // shape[0] % shape[1]
    x = np.random.default_rng(blocks).integers(-1000, 1000, (blocks, 128)).astype(np.int32)
    sums, y = x.sum(1), np.zeros(blocks, np.int32)
    launch(kernels["summed"], grid, 128, x, y, **options)
    np.testing.assert_array_equal(sums + 128 * row, y)
    for shared_bytes in (512, 5000, 40_000):  # of one block, of four, and of more than the host's caches hold of
        y[:] = 0
        launch(kernels["given"], grid, 128, x, y, shared_bytes=shared_bytes, **options)
        np.testing.assert_array_equal(sums + 128 * row, y)
    own = 3 * x + sums[:, None]
    y = np.zeros((blocks, 128), np.int32)
    launch(kernels["kept"], grid, 128, x, y, **options)
    np.testing.assert_array_equal(own - own[:, ::-1], y)


def test_a_block_of_several_rows_in_step(launch, kernels):
    x = np.random.default_rng(1).integers(-1000, 1000, (50, 2, 64)).astype(np.int32)
    y = np.zeros((50, 2, 64), np.int32)
    launch(kernels["exchanged"], (10, 5), (64, 2), x, y)
    np.testing.assert_array_equal(x.reshape(50, 128)[:, ::-1], y.reshape(50, 128))
    sums = np.zeros(50, np.int32)
    launch(kernels["narrow"], (10, 5), (64, 2), x, sums)
    assert x.sum((1, 2)).tolist() == sums.tolist()


def test_kernels_that_run_alone_after_others_in_step_find_their_memory(launch, kernels):
    x = np.arange(40 * 128, dtype=np.int32).reshape(40, 128)
    for _ in range(2):
        y = np.zeros(40, np.int32)
        launch(kernels["summed"], 40, 128, x, y)
        assert x.sum(1).tolist() == y.tolist()
        for name, more in (("rounds", np.int32(2)), ("array", np.int32(0))):
            launch(kernels[name], 40, 128, x, y, more)
            own = x[0, 0] + 3 if name == "array" else 0
            assert (x.sum(1) + own).tolist() == y.tolist()
        z = np.zeros_like(x)
        launch(kernels["exchanged"], 40, 128, x, z)
        np.testing.assert_array_equal(x[:, ::-1], z)
