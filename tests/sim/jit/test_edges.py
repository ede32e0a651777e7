"""Rows at the edges of a tile have loops of their own: all threads do what they do without."""

from __future__ import annotations

import re

import numpy as np
import pytest

from cudatool.sim import jit

# How the neighbors of an element are found, as in Rodinia's srad: of those at the edges in arrays of their own.
SOURCE = """
#define NAME(name) extern "C" __global__ void name(const int *in, const int *north, const int *west, int *out)
#define BEGIN \\
    __shared__ int tile[2][17][17]; \\
    int x = threadIdx.x, y = threadIdx.y, z = threadIdx.z; \\
    int at = (z * blockDim.y + y) * blockDim.x + x, n, s, w, e; \\
    tile[z][y + 1][x] = tile[z][y][x + 1] = 0; \\
    __syncthreads(); \\
    tile[z][y][x] = in[at]; \\
    __syncthreads(); \\
    int own = tile[z][y][x];
#define END \\
    for (int i = 0; i < 12; i++) { n = n * 3 + s; s ^= w; w += e * n; e = e * 5 + i; } \\
    __syncthreads(); \\
    out[at] = own + n + 2 * s + 4 * w + 8 * e;
NAME(neighbors) {
    BEGIN
    if (y == 0 && x == 0) { n = north[x]; w = west[y]; s = tile[z][y + 1][x]; e = tile[z][y][x + 1]; }
    else if (y == 0) { n = north[x]; w = tile[z][y][x - 1]; s = tile[z][y + 1][x]; e = own; }
    else if (y == 15 && x == 0) { n = tile[z][y - 1][x]; w = west[y]; s = north[x + 1]; e = tile[z][y][x + 1]; }
    else if (y == 15) { n = tile[z][y - 1][x]; w = tile[z][y][x - 1]; s = north[x]; e = own; }
    else if (x == 0) { n = tile[z][y - 1][x]; w = west[y]; s = tile[z][y + 1][x]; e = tile[z][y][x + 1]; }
    else { n = tile[z][y - 1][x]; w = tile[z][y][x - 1]; s = tile[z][y + 1][x]; e = own; }
    END
}
NAME(some_end) {
    BEGIN
    n = s = w = e = own;
    if (y == 0) {
        n = north[x]; s = west[x]; w = n + s;
        for (int i = 0; i < 12; i++) { n = n * 3 + s; s ^= w; w += e * n; e = e * 5 + i; }
        out[at] = own - n - s - w - e;
        return;
    }
    if (y == 3 && x > 1) w = west[y];
    END
}
NAME(three) {
    BEGIN
    n = s = w = e = own;
    if (y == 0) n = north[x];
    if (y == 7) s = north[x + 1];
    if (y == 15) w = west[y];
    END
}
NAME(brief) {
    int at = threadIdx.y * blockDim.x + threadIdx.x;
    if (threadIdx.y == 0) out[at] = north[threadIdx.x]; else out[at] = in[at];
}
"""


@pytest.fixture(scope="module")
def kernels(ptx_of):
    return jit.load(ptx_of(SOURCE)).kernels


def test_rows_at_two_edges_at_most_and_of_long_regions_have_loops_of_their_own(kernels):
    found = {name: re.findall(r"%edge(\d+) =", kernel.llvm_ir()) for name, kernel in kernels.items()}
    assert {"neighbors": ["0", "15"], "some_end": ["0", "3"], "three": [], "brief": []} == found


def _mixed(own, n, s, w, e):
    for i in range(12):
        n = n * 3 + s
        s = s ^ w
        w = w + e * n
        e = e * 5 + i
    return n, s, w, e


def _expected(name: str, data: np.ndarray, north: np.ndarray, west: np.ndarray) -> np.ndarray:
    tile = np.zeros((2, 17, 17), np.int32)
    depth, height, width = data.shape
    tile[:depth, :height, :width] = data
    out = np.zeros_like(data)
    for z, y, x in np.ndindex(data.shape):
        own = tile[z, y, x]
        n = s = w = e = own
        if name == "neighbors":
            n = north[x] if y == 0 else tile[z, y - 1, x]
            s = north[x + (x == 0)] if y == 15 else tile[z, y + 1, x]
            w = west[y] if x == 0 else tile[z, y, x - 1]
            e = tile[z, y, x + 1] if x == 0 else own
        elif name == "some_end":
            if y == 0:
                n, s = north[x], west[x]
                out[z, y, x] = own - sum(_mixed(own, n, s, n + s, e))
                continue
            w = west[y] if y == 3 and x > 1 else own
        n, s, w, e = _mixed(own, n, s, w, e)
        out[z, y, x] = own + n + 2 * s + 4 * w + 8 * e
    return out


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.parametrize("shape", [(1, 16, 16), (2, 16, 16), (2, 5, 7), (1, 1, 16), (1, 16, 3)])
@pytest.mark.parametrize("name", ["neighbors", "some_end"])
def test_each_thread_does_what_it_does_without(launch, kernels, name, shape):
    draw = np.random.default_rng(4)
    data, north, west = (draw.integers(0, 1000, size).astype(np.int32) for size in (shape, 17, 17))
    out = np.zeros_like(data)
    launch(kernels[name], 1, shape[::-1], data, north, west, out)
    np.testing.assert_array_equal(out, _expected(name, data, north, west))
