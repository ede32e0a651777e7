"""Blocks beside each other that run row by row: each thread runs once, and knows its own place."""

from __future__ import annotations

import re

import numpy as np
import pytest

from cudatool.sim import jit
from cudatool.sim.jit import launch as jit_launch
from cudatool.sim.jit.even import MOST
from cudatool.sim.jit.far import is_far

SOURCE = """
#define X (blockIdx.x * blockDim.x + threadIdx.x)
#define Y (blockIdx.y * blockDim.y + threadIdx.y)
#define Z (blockIdx.z * blockDim.z + threadIdx.z)
#define I ((Z * gridDim.y * blockDim.y + Y) * gridDim.x * blockDim.x + X)
extern "C" __global__ void flat(int *y) { y[I] += 1000000 * Z + 1000 * Y + X; }
extern "C" __global__ void some(int *y, int n) { int i = I; if (X > 2 && X < n) y[i] += i; }
extern "C" __global__ void own(int *y) { y[I] += 100 * blockIdx.x + threadIdx.x; }
extern "C" __global__ void lanes(int *y) { unsigned n; asm("mov.u32 %0, %%laneid;" : "=r"(n)); y[I] += n; }
extern "C" __global__ void width(int *y) { y[I] += X + blockDim.x * (threadIdx.x + 1); }
extern "C" __global__ void loops(int *y, int n) { int s = 0; for (int k = 0; k < n; k++) s += y[k] % 3; y[I] += s; }
extern "C" __global__ void shares(int *y) { __shared__ int s[512]; s[threadIdx.x] = y[I]; y[I] = s[threadIdx.x ^ 1]; }
extern "C" __global__ void meets(int *y) { __syncthreads(); y[I] += 1; }
extern "C" __global__ void stops(int *y) { if (blockIdx.x == 3) __trap(); y[I] += 1; }
"""
# Of each kernel whether neighbors access memory far apart, and a body in which u and v are its threads' places.
ACCESSES = {
    "near": (False, "y[v * n + u] = v;"),
    "around": (False, "y[v * n + (u + 1) % n] = v;"),
    "clamped": (False, "y[v * n + min(u + 1, n - 1)] = v;"),
    "twelve_bytes_on": (False, "y[3 * u] = v;"),
    "of_an_index": (False, "y[y[u]] = v;"),
    "one_place": (False, "y[u * n - u * n + v * n] = v;"),
    "two_dimensions_of_one": (False, "y[u / n * 4 * n + u % n] = v;"),
    "a_row_apart": (True, "y[u * n + v] = v;"),
    "a_row_apart_before_it_turns": (True, "y[u > v ? (u + 1) * n + v : 0] = v;"),
    "a_row_of_an_index_apart": (True, "y[y[u] * n + v] = v;"),
    "a_line_apart": (True, "y[16 * u + v] = v;"),
    "backwards": (True, "y[n - 16 * u] = v;"),
    "a_power_of_two_apart": (True, "y[(u << n) + v] = v;"),
    "read_only": (True, "y[v] = y[u * n];"),
    "added": (True, "atomicAdd(&y[u * n], v);"),
}
FAR = "#define u (int)(blockIdx.x * blockDim.x + threadIdx.x)\n#define v (int)(blockIdx.y * blockDim.y + threadIdx.y)\n"
FAR += "\n".join(
    f'extern "C" __global__ void {name}(int *y, int n) {{ {body} }}' for name, (_, body) in ACCESSES.items()
)
TURNED = """
extern "C" __global__ void turned(int *y, int h, int d) { y[(X * h + Y) * d + Z] += 1000000 * Z + 1000 * Y + X; }
"""
GRIDS = [((1, 1, 1), (1, 1, 1)), ((5, 4, 3), (7, 3, 2)), ((300, 2, 1), (16, 4, 1)), ((37, 1, 1), (96, 1, 1))]


@pytest.fixture(scope="module")
def kernels(ptx_of):
    return jit.load(ptx_of(SOURCE)).kernels


def flat(text: str) -> bool:
    """Whether the rows of all blocks are one: in a loop over its threads, or cut into stretches."""
    return "icmp eq i32 %tx.next, %all" in text or re.search(r"@stretches_0\(.*, i32 %all\)", text) is not None


def test_straight_code_of_threads_that_share_nothing_runs_so(kernels):
    texts = {name: kernel.llvm_ir() for name, kernel in kernels.items()}
    beside = {name for name, text in texts.items() if "call void @side_by_side(" in text}
    assert {"flat", "some", "own", "lanes", "width"} == beside
    assert {"flat", "some"} == {name for name in beside if flat(texts[name])}


def places(grid, block):
    """Return the places of all threads in the order of memory: in the grid, of the block, and in it."""
    z, y, x = np.meshgrid(*(np.arange(g * b) for g, b in zip(grid[::-1], block[::-1], strict=True)), indexing="ij")
    return x.ravel(), y.ravel(), z.ravel()


@pytest.mark.parametrize(("grid", "block"), GRIDS)
@pytest.mark.parametrize("options", [{}, {"threads": 3}, {"seed": 5, "threads": 2}])
def test_each_thread_runs_once_at_its_place(launch, kernels, grid, block, options):
    x, y, z = places(grid, block)
    thread = (z % block[2] * block[1] + y % block[1]) * block[0] + x % block[0]
    expected = {
        "flat": 1000000 * z + 1000 * y + x,
        "own": 100 * (x // block[0]) + x % block[0],
        "lanes": thread % 32,
        "width": x + block[0] * (x % block[0] + 1),
    }
    for name, values in expected.items():
        found = np.zeros(len(x), np.int32)
        launch(kernels[name], grid, block, found, **options)
        np.testing.assert_array_equal(values, found, name)
    found = np.zeros(len(x), np.int32)
    launch(kernels["some"], grid, block, found, np.int32(9), **options)
    np.testing.assert_array_equal(np.where((x > 2) & (x < 9), np.arange(len(x)), 0), found)


def test_accesses_are_far_if_each_neighbor_needs_a_line_of_its_own(ptx_of):
    kernels = jit.load(ptx_of(FAR)).kernels
    expected = {name for name, (is_so, _) in ACCESSES.items() if is_so}
    assert expected == {name for name, kernel in kernels.items() if is_far(kernel.text.plain.instructions)}
    short = "%most = select i1 %has.rows, i32 8, i32 1024"
    assert expected == {name for name, kernel in kernels.items() if short in kernel.llvm_ir()}


@pytest.mark.parametrize(("grid", "block"), GRIDS)
def test_each_thread_runs_once_in_short_rows(launch, ptx_of, grid, block):
    kernel = jit.load(ptx_of(SOURCE + TURNED)).kernels["turned"]
    x, y, z = places(grid, block)
    width, height, depth = (g * b for g, b in zip(grid, block, strict=True))
    found = np.zeros(len(x), np.int32)
    launch(kernel, grid, block, found, np.int32(height), np.int32(depth), threads=2)
    expected = np.zeros((width, height, depth), np.int32)
    expected[x, y, z] = 1000000 * z + 1000 * y + x
    np.testing.assert_array_equal(expected.ravel(), found)


def test_threads_that_leave_a_long_row_keep_nothing_beyond_the_slots(launch, ptx_of, monkeypatch):
    class Guarded(jit_launch._Memory):
        def __init__(self):
            super().__init__()
            self.slots = jit_launch._Region(1 << 20)  # a fault where anything is written after them

    monkeypatch.setattr(jit_launch, "_Memory", Guarded)
    monkeypatch.setattr(jit_launch, "_workers", [])
    monkeypatch.setattr(jit_launch, "_memories", [])
    kernel = jit.load(
        ptx_of("""extern "C" __global__ void k(const float *x, float *y, int n) {
            for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) y[i] += x[i];
        }""")
    ).kernels["k"]
    assert f"i32 {MOST}" in kernel.llvm_ir(), "rows are longer than there are slots"
    x = np.arange(64 * 256 + 1, dtype=np.float32)
    y = x.copy()
    launch(kernel, 64, 256, x, y, np.int32(len(x)), optimized=True)
    np.testing.assert_array_equal(2 * x, y)
