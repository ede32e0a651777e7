"""Rows of threads that are cut into stretches: each thread does what it would alone, wherever its neighbors differ."""

from __future__ import annotations

import os
import re

import integer_interpreter
import numpy as np
import pytest
from even_kernels import even_kernel
from random_kernels import WORDS, inputs, module_of

from cudatool.sim import jit
from cudatool.sim.jit.regions import Regions

FIRST = int(os.environ.get("CUDATOOL_TEST_SEED", "0"))


def is_cut(kernel: jit.JitKernel) -> bool:
    return "call void @stretches_" in kernel.llvm_ir()


@pytest.mark.some_of("seed", range(FIRST, FIRST + 24), 4)
def test_random_branches_write_what_the_reference_does(launch_in_turn, monkeypatch, seed):
    monkeypatch.setattr(Regions, "has_long_rows", lambda self: True)  # cut also the row of a single block
    threads = (16, 40, 64, 97)[seed % 4]
    text = even_kernel(seed, threads, has_loops=False)
    given = inputs(seed, threads)
    out, counters = np.zeros((threads, WORDS), "u4"), np.zeros(WORDS, "u4")
    memory = bytearray(given.tobytes() + out.tobytes() + counters.tobytes())
    integer_interpreter.run(text, {"in": 0, "out": given.nbytes, "counters": 2 * given.nbytes}, memory, threads)
    launch_in_turn(jit.load(module_of([text]).encode()).kernels["k"], 1, threads, given, out, counters)
    assert memory[given.nbytes :] == bytearray(out.tobytes() + counters.tobytes())


KERNEL = """
.visible .entry k(.param .u64 y, .param .u32 limit, .param .u32 start) {
    .reg .b32 %x, %t, %b, %n, %v, %l, %r, %start;
    .reg .b64 %at;
    .reg .pred %p;
    mov.u32 %t, %tid.x;
    mov.u32 %b, %ctaid.x;
    mov.u32 %n, %ntid.x;
    mad.lo.s32 %x, %b, %n, %t;
    ld.param.u32 %l, [limit];
    ld.param.u64 %at, [y];
    mad.wide.u32 %at, %x, 4, %at;
    ld.param.u32 %start, [start];
    mad.lo.s32 %v, %x, DISTANCE, %start;
    setp.RELATION.TYPE %p, OPERANDS;
    @%p bra $L_below;
    ld.global.u32 %r, [%at];
    add.u32 %r, %r, 1;
    st.global.u32 [%at], %r;
    ret;
$L_below:
    ld.global.u32 %r, [%at];
    add.u32 %r, %r, 100;
    st.global.u32 [%at], %r;
    ret;
}
"""
HEADER = ".version 8.3\n.target sm_90\n.address_size 64\n"
NUMPY = {"lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal}
NUMPY |= {"eq": np.equal, "ne": np.not_equal, "lo": np.less, "ls": np.less_equal, "hi": np.greater}
NUMPY |= {"hs": np.greater_equal}


@pytest.mark.parametrize("distance", [1, -3])
@pytest.mark.parametrize("relation", NUMPY)
def test_a_stretch_ends_where_a_comparison_turns_or_its_numbers_wrap_around(launch_in_turn, relation, distance):
    threads = 70
    for kind in ("u32",) if relation in ("lo", "ls", "hi", "hs") else ("u32", "s32"):
        for operands in ("%v, %l", "%l, %v"):
            names = {"RELATION": relation, "TYPE": kind, "OPERANDS": operands, "DISTANCE": str(distance)}
            text = re.sub("|".join(names), lambda name, names=names: names[name[0]], KERNEL)
            kernel = jit.load((HEADER + text).encode()).kernels["k"]
            assert is_cut(kernel)
            for start in (0, 5, 0x7FFFFFFF - 30, 0x80000000 + 7, 0xFFFFFFFF - 30):
                values = (np.arange(threads) * distance + start) % (1 << 32)
                for limit in (*values[[0, 1, 40, 69]], values[30] + 1, values[30] - 1, 0, 0x7FFFFFFF, 0xFFFFFFFF):
                    numbers = [np.broadcast_to(one, threads).astype(np.uint32) for one in (values, limit)]
                    a, b = (one.view(np.int32) if kind == "s32" else one for one in numbers)
                    holds = NUMPY[relation](*((a, b) if operands == "%v, %l" else (b, a)))
                    found = np.zeros(threads, np.uint32)
                    launch_in_turn(kernel, 1, threads, found, np.uint32(limit % (1 << 32)), np.uint32(start))
                    np.testing.assert_array_equal(np.where(holds, 100, 1), found)


DIVISION = """
.visible .entry k(.param .u64 y, .param .u32 divisor, .param .u32 start) {
    .reg .b32 %x, %t, %b, %n, %v, %l, %q, %r, %start;
    .reg .b64 %at;
    mov.u32 %t, %tid.x;
    mov.u32 %b, %ctaid.x;
    mov.u32 %n, %ntid.x;
    mad.lo.s32 %x, %b, %n, %t;
    ld.param.u32 %l, [divisor];
    ld.param.u64 %at, [y];
    mad.wide.u32 %at, %x, 8, %at;
    ld.param.u32 %start, [start];
    mad.lo.s32 %v, %x, DISTANCE, %start;
    div.TYPE %q, %v, %l;
    rem.TYPE %r, %v, %l;
    st.global.v2.u32 [%at], {%q, %r};
    ret;
}
"""


@pytest.mark.parametrize("kind", ["u32", "s32"])
@pytest.mark.parametrize("distance", [1, -3])
def test_a_stretch_ends_where_a_quotient_changes(launch_in_turn, kind, distance):
    threads = 300
    text = DIVISION.replace("DISTANCE", str(distance)).replace("TYPE", kind)
    kernel = jit.load((HEADER + text).encode()).kernels["k"]
    assert is_cut(kernel)
    for start in (0, 5, 899, 1000, 0x7FFFFFFF - 100, 0x80000000 + 7, 0xFFFFFFFF - 100):
        x = (np.arange(threads) * distance + start).astype(np.uint32)
        for divisor in (0, 1, 5, 63, 64, 65, 100, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0xFFFFFFFF - 99):
            a, b = x.astype(np.int64), int(divisor)
            if kind == "s32":
                a, b = x.view(np.int32).astype(np.int64), b - (b >> 31 << 32)
            q = np.sign(a) * np.sign(b) * (abs(a) // abs(b)) if b else np.full(threads, -1)
            found = np.zeros((threads, 2), np.uint32)
            launch_in_turn(kernel, 1, threads, found, np.uint32(divisor), np.uint32(start))
            np.testing.assert_array_equal(q.astype(np.uint32), found[:, 0], f"{start} / {divisor}")
            np.testing.assert_array_equal((a - q * b).astype(np.uint32), found[:, 1], f"{start} % {divisor}")


SOURCE = """
#define X (int)(blockIdx.x * blockDim.x + threadIdx.x)
extern "C" __global__ void inner(const int *x, int *y, int n) {
    int i = X; if (i > 0 && i < n - 1) y[i] = x[i - 1] + x[i + 1];
}
extern "C" __global__ void pixels(const unsigned char *x, int *y, int n) {
    int i = X; if (i < n) y[i] = x[3 * i] + 256 * x[3 * i + 1] + 65536 * x[3 * i + 2];
}
extern "C" __global__ void both(const int *x, int *y, int n) {
    int i = X; if (i < n) y[i] = x[i]; else y[i] = -i;
}
extern "C" __global__ void own(const int *x, int *y, int n) {
    __shared__ int s[128];
    int i = X, mine = 7 * x[i]; s[threadIdx.x] = mine;
    __syncthreads();
    int v = 1;
    if (threadIdx.x >= 5) v = s[threadIdx.x - 5];
    y[i] = v + mine;
}
extern "C" __global__ void every(const int *x, int *y) { y[X] = x[X]; }
extern "C" __global__ void odd(const int *x, int *y) { if (threadIdx.x & 1) y[X] = x[X]; }
extern "C" __global__ void halves(const int *x, int *y) { if (threadIdx.x / 2 == 3) y[X] = x[X]; }
extern "C" __global__ void columns(const int *x, int *y, int n, int rows) {
    int i = blockIdx.x * 128 + threadIdx.x, row = (i + 1) % rows - 1, column = (i + 1) / rows;
    if ((i + 1) % rows == 0) { row = rows - 1; column--; }
    if (i < n) y[i] = x[row] - 3 * x[column];
}
extern "C" __global__ void after(const int *x, int *y, int *z, int k) { int i = X; y[i] = i + 7; z[3 * i] = y[k]; }
extern "C" __global__ void stops(const int *x, int *y, int n) { if (X >= n) __trap(); y[X] = x[X]; }
"""


@pytest.fixture(scope="module")
def kernels(ptx_of):
    return jit.load(ptx_of(SOURCE)).kernels


def test_rows_are_cut_where_neighbors_compare_what_is_near_or_access_what_is_apart(kernels):
    assert {"inner", "pixels", "both", "columns", "after"} == {
        name for name, kernel in kernels.items() if is_cut(kernel)
    }


def test_checked_kernels_run_each_thread_by_itself(kernels):
    for kind in (jit.Instrument.MEMCHECK, jit.Instrument.RACECHECK, jit.Instrument.FOOTPRINT):
        assert "@stretches_" not in kernels["inner"].llvm_ir(kind)


@pytest.mark.parametrize("block", [1, 3, 96])
@pytest.mark.parametrize("n", [0, 1, 2, 95, 300, 480])
@pytest.mark.parametrize("options", [{}, {"seed": 5, "threads": 2}])
def test_guards_hold_for_the_threads_that_they_are_for(launch, kernels, block, n, options):
    size = 480
    x = np.random.default_rng(n).integers(0, 256, 3 * size).astype(np.int32)
    i = np.arange(size)

    def run(name, given, numbers):
        found = np.zeros(size, np.int32)
        launch(kernels[name], size // block, block, given, found, *numbers, **options)
        return found

    inside = (i > 0) & (i < n - 1)
    expected = np.where(inside, x[(i - 1) % size] + x[i + 1], 0)
    np.testing.assert_array_equal(expected, run("inner", x, [np.int32(n)]))
    pixel = x.astype(np.uint8).reshape(-1, 3) @ np.array([1, 256, 65536])
    np.testing.assert_array_equal(np.where(i < n, pixel, 0), run("pixels", x.astype(np.uint8), [np.int32(n)]))
    np.testing.assert_array_equal(np.where(i < n, x[:size], -i), run("both", x, [np.int32(n)]))
    if block > 1:
        lane = i % block
        kept = np.where(lane >= 5, 7 * x[np.maximum(i - 5, 0)], 1) + 7 * x[:size]
        np.testing.assert_array_equal(kept, run("own", x, [np.int32(n)]))


@pytest.mark.parametrize("rows", [1, 63, 64, 65, 127, 200, 512])
def test_neighbors_in_a_column_of_a_matrix_read_beside_each_other(launch, kernels, rows):
    x = np.random.default_rng(rows).integers(0, 256, 512).astype(np.int32)
    i, found = np.arange(512), np.zeros(512, np.int32)
    launch(kernels["columns"], 4, 128, x, found, np.int32(500), np.int32(rows))
    np.testing.assert_array_equal(np.where(i < 500, x[i % rows] - 3 * x[i // rows], 0), found)


@pytest.mark.parametrize("k", [0, 1, 40, 255])
def test_a_thread_reads_what_it_has_written_itself(launch, kernels, k):
    y, z = np.zeros(256, np.int32), np.zeros(768, np.int32)
    launch(kernels["after"], 2, 128, y, y, z, np.int32(k))
    assert k + 7 == z[3 * k]


@pytest.mark.parametrize("start", [0, 0x7FFFFFF0, 0xFFFFFFF0])
def test_addresses_that_wrap_around_in_a_row_are_those_of_each_thread(launch, ptx_of, start):
    source = 'extern "C" __global__ void k(const unsigned char *x, int *y, int from) { int i = threadIdx.x + from;'
    kernel = jit.load(ptx_of(source + " y[threadIdx.x] = x[(i * 5 + 7) & 1023] + i; }")).kernels["k"]
    narrow = source + " unsigned at = 3u * i; y[threadIdx.x] = x[(long long)(int)at - (long long)(int)(3u * from)]; }"
    wraps = jit.load(ptx_of(narrow)).kernels["k"]
    x = np.random.default_rng(1).integers(0, 256, 1024).astype(np.uint8)
    i = (np.arange(64, dtype=np.int64) + start).astype(np.uint32)
    found = np.zeros(64, np.int32)
    launch(kernel, 1, 64, x, found, np.uint32(start))
    np.testing.assert_array_equal(x[(i * np.uint32(5) + np.uint32(7)) & 1023] + i.view(np.int32), found)
    if start != 0x7FFFFFF0:  # else the address would lie 4 GiB before
        launch(wraps, 1, 64, x, found, np.uint32(start))
        np.testing.assert_array_equal(x[3 * np.arange(64)], found)
