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


@pytest.fixture(name="launch")
def launch_fixture(launch_in_turn):
    return launch_in_turn


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


# Of each kernel what its threads with a place in x ask of a uniform k: before a barrier, and once more after it.
UNIFORM = {
    "below": ("t < k", lambda t, k: t < k),
    "to": ("t <= k", lambda t, k: t <= k),
    "unsigned_below": ("(unsigned)t < (unsigned)k", lambda t, k: t < k % 2**32),
    "unsigned_to": ("(unsigned)t <= (unsigned)k", lambda t, k: t <= k % 2**32),
    "not_above": ("!(k < t)", lambda t, k: t <= k),
    "above": ("t > k", lambda t, k: t > k),
    "at": ("t == k", lambda t, k: t == k),
    "next": ("t < k + 3", lambda t, k: t < k + 3),
}
KS = (-3, 0, 1, 7, 8, 15, 16, 17, 40, 2**31 - 4, -(2**31))
LOOP = """
#define t ((int)threadIdx.x)
#define KERNEL(name, holds) extern "C" __global__ void name(const int *ks, int *y, int n) { \\
    extern __shared__ int s[]; \\
    int own = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + t, k = n; \\
    s[own] = y[own]; __syncthreads(); \\
    for (int i = 0; i < 2; i++) { \\
        int a = 7; \\
        if (holds) a = s[own] + t; __syncthreads(); if (holds) s[own] = a + k % 100; __syncthreads(); \\
        y[own] += CHANGED; k = k / 2 + 1; \\
    } \\
    y[own] += s[own]; }
#define CHANGED 0
"""
LOOP += "\n".join(f"KERNEL({name}, {text})" for name, (text, _) in UNIFORM.items())
LOOP += "\n#undef CHANGED\n#define CHANGED a\nKERNEL(needed, t < k)"
BOUNDED = {"below", "to", "unsigned_below", "unsigned_to", "not_above", "next"}


@pytest.fixture(scope="module")
def looping(ptx_of):
    return jit.load(ptx_of(LOOP)).kernels


def counts(kernels: dict[str, jit.JitKernel], what: str) -> dict[str, int]:
    return {name: len(re.findall(what, kernel.llvm_ir(), re.M)) for name, kernel in kernels.items()}


def test_it_is_known_when_a_region_begins_how_many_threads_do_anything_in_it(looping):
    found = counts(looping, "^define internal i32 @most_")
    assert BOUNDED | {"needed"} == {name for name, count in found.items() if count}
    assert found["needed"] < found["below"], "what the others have is needed after the barrier"
    assert counts(looping, "call i32 @busy_") == found, "vectors full of them do not ask"


@pytest.mark.parametrize("block", [(64, 1, 1), (16, 4, 1), (20, 3, 1), (3, 2, 2)])
@pytest.mark.parametrize("name", [*UNIFORM, "needed"])
def test_threads_below_a_uniform_number_do_all_and_others_nothing(launch, looping, name, block):
    threads = block[0] * block[1] * block[2]
    t = np.arange(threads) % block[0]
    for first in KS:
        y = np.random.default_rng(2).integers(0, 1000, threads).astype(np.int32)
        holds = UNIFORM[name][1] if name in UNIFORM else UNIFORM["below"][1]
        s, k, expected = y.astype(np.int64), first, y.astype(np.int64)
        for _ in range(2):
            asked = holds(t, k)
            a = np.where(asked, s + t, 7)
            s = np.where(asked, a + int(np.fmod(k, 100)), s)
            expected += a if name == "needed" else 0
            k = int(k / 2) + 1
        launch(looping[name], 1, block, np.zeros(1, np.int32), y, np.int32(first), shared_bytes=4 * threads)
        np.testing.assert_array_equal((expected + s).astype(np.int32), y, f"{name}, k = {first}")


WIDENED = """
.version 8.3
.target sm_90
.address_size 64
.visible .entry k(.param .u64 y) {
    .reg .b32 %t, %again, %v;
    .reg .b64 %wide, %at;
    .reg .pred %p;
    mov.u32 %t, %tid.x;
    cvt.WIDE %wide, %t;
    ld.param.u64 %at, [y];
    mad.wide.u32 %at, %t, 4, %at;
    cvt.NARROW %again, %wide;
    setp.ge.s32 %p, %again, 5;
    bar.sync 0;
    @%p bra $L_end;
    ld.global.u32 %v, [%at];
    add.u32 %v, %v, 1;
    st.global.u32 [%at], %v;
$L_end:
    bar.sync 0;
    ret;
}
"""


@pytest.mark.parametrize(
    ("wide", "narrow", "found"),
    [("s64.s32", "u32.u64", [5]), ("u64.u32", "u32.u64", [5]), ("u64.u32", "s32.s64", [5]), ("s64.s32", "u32.u16", [])],
)
def test_a_place_that_was_widened_and_cut_again_is_the_place(launch, wide, narrow, found):
    kernel = jit.load(WIDENED.replace("WIDE", wide).replace("NARROW", narrow).encode()).kernels["k"]
    assert found == bounds(kernel)
    y = np.zeros(40, np.int32)
    launch(kernel, 1, 40, y)
    np.testing.assert_array_equal(np.arange(40) < 5, y)
