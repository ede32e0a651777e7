"""Regions in which only the first threads of a row do anything run for these alone."""

from __future__ import annotations

import re

import numpy as np
import pytest

from cudatool.sim import jit

SOURCE = """
#define T threadIdx.x
#define KERNEL(name, condition) extern "C" __global__ void name(int *y) { \\
    __shared__ int s[128]; s[T] = y[T]; __syncthreads(); \\
    if (condition) s[T] = 3 * s[T] + T; __syncthreads(); y[T] = s[T]; }
KERNEL(less, T < 5)
KERNEL(at_most, T <= 5)
KERNEL(is_signed, (int)T < 7)
KERNEL(zero, T == 0)
KERNEL(turned, !(T >= 9))
KERNEL(third, T == 3)
KERNEL(others, T > 5)
KERNEL(odd, T & 1)
extern "C" __global__ void kept(int *y) {
    __shared__ int s[128]; s[T] = y[T]; __syncthreads();
    int own = 3 * y[127 - T];
    if (T < 5) { s[T] += 1; own++; }
    __syncthreads();
    y[T] = s[T] + own;
}
extern "C" __global__ void before(int *y) {
    __shared__ int s[128]; s[T] = y[T]; __syncthreads();
    s[T] += 2;
    if (T < 5) s[T] += 1;
    __syncthreads();
    y[T] = s[T];
}
extern "C" __global__ void both(int *y) {
    __shared__ int s[128]; s[T] = y[T]; __syncthreads();
    if (T < 5) s[T] += 1; else s[T] += 2;
    __syncthreads();
    y[T] = s[T];
}
extern "C" __global__ void last(int *y) { if (T < 5) y[T] = 1; }
"""


@pytest.fixture(scope="module")
def kernels(ptx_of):
    return jit.load(ptx_of(SOURCE)).kernels


def bounds(kernel: jit.JitKernel) -> list[int]:
    return [int(number) for number in re.findall(r"%most = icmp uge i32 %nx, (\d+)", kernel.llvm_ir())]


def test_it_is_known_how_many_threads_do_anything(kernels):
    found = {name: bounds(kernel) for name, kernel in kernels.items()}
    some = {"less": [5], "at_most": [6], "is_signed": [7], "zero": [1], "turned": [9], "last": [5]}
    assert some | {name: [] for name in ("third", "others", "odd", "kept", "before", "both")} == found


def expected(name: str, y: np.ndarray) -> np.ndarray:
    t = np.arange(len(y))
    if name == "kept":
        return y + (t < 5) + 3 * y[127 - t] + (t < 5)
    if name == "before":
        return y + 2 + (t < 5)
    if name == "both":
        return y + np.where(t < 5, 1, 2)
    if name == "last":
        return np.where(t < 5, 1, y)
    holds = {"less": t < 5, "at_most": t <= 5, "is_signed": t < 7, "zero": t == 0, "turned": t < 9, "third": t == 3}
    return np.where(holds[name], 3 * y + t, y)


@pytest.mark.parametrize(
    "name", ["less", "at_most", "is_signed", "zero", "turned", "third", "kept", "before", "both", "last"]
)
def test_other_threads_do_nothing_and_those_do_all(launch, kernels, name):
    y = np.random.default_rng(1).integers(0, 1000, 128).astype(np.int32)
    found = y.copy()
    launch(kernels[name], 1, 128, found)
    np.testing.assert_array_equal(expected(name, y), found)


@pytest.mark.parametrize("threads", [1, 3, 5, 6])
def test_rows_of_fewer_threads(launch, kernels, threads):
    y = np.zeros(8, np.int32)
    launch(kernels["last"], 1, threads, y)
    np.testing.assert_array_equal(np.arange(8) < min(threads, 5), y)
