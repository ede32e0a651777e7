"""Threads that go around loops together compute what each would alone, and no more than that is asked of them."""

from __future__ import annotations

import os
import re

import integer_interpreter
import numpy as np
import pytest
from even_kernels import even_kernel
from random_kernels import WORDS, inputs, module_of

from cudatool.sim import jit
from cudatool.sim.jit import even

FIRST = int(os.environ.get("CUDATOOL_TEST_SEED", "0"))


def runs_together(kernel: jit.JitKernel) -> bool:
    return "call void @together_" in kernel.llvm_ir()


def check(launch, seed: int, **has: object) -> bool:
    threads = (16, 40, 64, 97)[seed % 4]
    text = even_kernel(seed, threads, **has)
    given = inputs(seed, threads)
    out, counters = np.zeros((threads, WORDS), "u4"), np.zeros(WORDS, "u4")
    memory = bytearray(given.tobytes() + out.tobytes() + counters.tobytes())
    places = {"in": 0, "out": given.nbytes, "counters": 2 * given.nbytes}
    integer_interpreter.run(text, places, memory, threads)
    kernel = jit.load(module_of([text]).encode()).kernels["k"]
    launch(kernel, 1, threads, given, out, counters)
    assert memory[given.nbytes :] == bytearray(out.tobytes() + counters.tobytes())
    return runs_together(kernel)


@pytest.mark.some_of("seed", range(FIRST, FIRST + 24), 4)
def test_random_loops_write_what_the_reference_does(launch_in_turn, seed):
    check(launch_in_turn, seed)


@pytest.mark.parametrize("by", ["grid", "block"])
@pytest.mark.some_of("seed", range(FIRST, FIRST + 16), 3)
def test_random_loops_by_the_size_of_the_grid_or_of_a_block_write_what_the_reference_does(launch_in_turn, seed, by):
    check(launch_in_turn, seed, by=by)


@pytest.mark.parametrize("has_loops", [True, False])
@pytest.mark.some_of("seed", range(FIRST, FIRST + 20), 3)
def test_random_detours_write_what_the_reference_does(launch_in_turn, monkeypatch, seed, has_loops):
    monkeypatch.setattr(even, "_DETOUR", 3)
    check(launch_in_turn, seed, has_loops=has_loops, has_detours=True)


@pytest.mark.parametrize("has_loops", [True, False])
def test_the_random_kernels_have_detours(monkeypatch, has_loops):
    monkeypatch.setattr(even, "_DETOUR", 3)
    texts = (even_kernel(seed, 64, has_loops=has_loops, has_detours=True) for seed in range(FIRST, FIRST + 20))
    kernels = (jit.load(module_of([text]).encode()).kernels["k"] for text in texts)
    assert sum("label %detour" in kernel.llvm_ir() for kernel in kernels) >= 5


SOURCE = """
extern "C" __global__ void product(const float *a, const float *b, float *c, int n) {
    int i = blockIdx.y * blockDim.y + threadIdx.y, j = blockIdx.x * blockDim.x + threadIdx.x;
    float sum = 0;
    for (int k = 0; k < n; k++) sum += a[i * n + k] * b[k * n + j];
    c[i * n + j] = sum;
}
extern "C" __global__ void rows(const float *x, float *y, int n) {
    for (int i = threadIdx.x; i < n; i += blockDim.x) y[blockIdx.x * n + i] = 2 * x[blockIdx.x * n + i];
}
extern "C" __global__ void after_barrier(const int *x, int *y, int n) {
    __shared__ int last;
    if (threadIdx.x == blockDim.x - 1) last = x[threadIdx.x];
    __syncthreads();
    int sum = last;
    for (int k = 0; k < n; k++) sum = 3 * sum + x[(threadIdx.x + k) % blockDim.x];
    y[threadIdx.x] = sum;
}
extern "C" __global__ void kept(const int *x, int *y, int n) {
    __shared__ int s[64];
    int own = 7 * x[threadIdx.x], sum = 0;
    s[threadIdx.x] = own;
    __syncthreads();
    for (int i = threadIdx.x; i < n; i += blockDim.x) sum += x[i];
    __syncthreads();
    y[threadIdx.x] = own + sum + s[63 - threadIdx.x];
}
extern "C" __global__ void exchanged(const int *x, int *y, int n) {
    int sum = __shfl_xor_sync(0xffffffffu, x[threadIdx.x], 1);
    for (int k = 0; k < n; k++) sum = 3 * sum + x[(threadIdx.x + k) % blockDim.x];
    y[threadIdx.x] = sum;
}
extern "C" __global__ void not_all(const int *x, int *y, int n) {
    if (threadIdx.x % 3 == 1) asm volatile("barrier.sync 1, 64;");
    int sum = 0;
    for (int k = 0; k < n; k++) sum = 5 * sum + x[threadIdx.x] + k;
    y[threadIdx.x] = sum;
}
extern "C" __global__ void own_ends(const int *ends, int *y) {
    int sum = 0;
    for (int k = 0; k < ends[threadIdx.x]; k++) sum += k * k;
    y[threadIdx.x] = sum;
}
extern "C" __global__ void searched(const int *x, int *y, int n) {
    unsigned s = x[threadIdx.x];
    int rounds = 0, others = 0;
    while (s != 1 && rounds < n) {
        s = s % 2 ? 3 * s + 1 : s / 2;
        if (s == 5) break;
        rounds++;
    }
    for (; s < 1000; s += 1 + threadIdx.x) others++;
    y[threadIdx.x] = 1000 * rounds + others;
}
extern "C" __global__ void within(const int *x, int *y, int n) {
    int sum = 0;
    for (int i = 0; i < x[threadIdx.x]; i++)
        for (int k = 0; k < i % 5; k++) sum = 3 * sum + k;
    y[threadIdx.x] = sum;
}
extern "C" __global__ void counted(int *total, int n) {
    for (int k = 0; k < n; k++) atomicAdd(total, k);
}
extern "C" __global__ void bits(float *y, int n) {
    float sum = 0;
    for (int k = 0; k < n; k++) {
        sum += __int_as_float(0x3f800000 + threadIdx.x);
        asm volatile("" : "+f"(sum));
    }
    y[threadIdx.x] = sum + __int_as_float(threadIdx.x);
}
extern "C" __global__ void straight(const float *x, float *y) { y[threadIdx.x] = x[threadIdx.x] + 1; }
"""


@pytest.fixture(scope="module")
def kernels(ptx_of):
    return jit.load(ptx_of(SOURCE)).kernels


def test_threads_run_loops_together_that_end_alike_or_only_compute_and_have_no_order(kernels):
    found = {name for name, kernel in kernels.items() if runs_together(kernel)}
    assert {"product", "rows", "after_barrier", "not_all", "bits", "own_ends", "searched", "kept", "exchanged"} == found


def test_checked_kernels_run_each_thread_by_itself(kernels):
    kernel = kernels["product"]
    for kind in (jit.Instrument.MEMCHECK, jit.Instrument.RACECHECK, jit.Instrument.FOOTPRINT):
        assert "call void @together_" not in kernel.llvm_ir(kind)


@pytest.mark.parametrize("block", [(16, 4), (32, 2), (8, 8), (20, 3)])
@pytest.mark.parametrize("rounds", [0, 1, 7, 40])
def test_a_product_in_blocks_of_all_shapes(launch, kernels, block, rounds):
    columns, rows = 2 * block[0], 2 * block[1]
    random = np.random.default_rng(3)
    # Numbers whose sums are exact: the order of the sums does not matter.
    a = random.integers(0, 8, 6400).astype(np.float32)
    b = random.integers(0, 8, 6400).astype(np.float32)
    c = np.full(6400, -1, np.float32)
    launch(kernels["product"], (2, 2), block, a, b, c, np.int32(rounds))
    expected = np.full(6400, -1, np.float32)
    for i in range(rows):
        for j in range(columns):
            expected[i * rounds + j] = sum(a[i * rounds + k] * b[k * rounds + j] for k in range(rounds))
    if rounds >= columns:  # else rows of the result overlap
        np.testing.assert_array_equal(expected, c)
    assert (c[(rows - 1) * rounds + columns :] == -1).all()


@pytest.mark.parametrize("count", [0, 1, 15, 16, 17, 63, 64, 65, 300])
def test_rows_end_within_the_threads_that_run_together(launch, kernels, count):
    x = np.random.default_rng(4).random(3 * count + 1, np.float32)
    y = np.full(3 * count + 1, -1, np.float32)
    launch(kernels["rows"], 3, 64, x, y, np.int32(count))
    np.testing.assert_array_equal(2 * x[: 3 * count], y[: 3 * count])
    assert y[3 * count] == -1


def _folded(x: np.ndarray, first: np.ndarray, rounds: int) -> np.ndarray:
    total = first.astype(np.int64)
    for k in range(rounds):
        total = 3 * total + np.roll(x, -k)
    return total.astype(np.uint32).astype(np.int32)


@pytest.mark.parametrize("threads", [16, 33, 96])
def test_loops_after_a_barrier_go_on_from_what_each_thread_has(launch, kernels, threads):
    x = np.random.default_rng(5).integers(0, 1000, threads).astype(np.int32)
    y = np.zeros(threads, np.int32)
    launch(kernels["after_barrier"], 1, threads, x, y, np.int32(9))
    np.testing.assert_array_equal(_folded(x, np.full(threads, x[-1]), 9), y)


@pytest.mark.parametrize("count", [40, 64])
def test_what_a_loop_does_not_touch_is_there_after_it(launch, kernels, count):
    x = np.random.default_rng(7).integers(0, 1000, 64).astype(np.int32)
    y = np.zeros(64, np.int32)
    launch(kernels["kept"], 1, 64, x, y, np.int32(count))
    total = np.where(np.arange(64) < count, x, 0)
    np.testing.assert_array_equal(7 * x + total + 7 * x[::-1], y)


def test_loops_after_a_shuffle_go_on_from_what_it_gives_to_each_thread(launch, kernels):
    x = np.arange(48, dtype=np.int32) * 1001
    y = np.zeros(48, np.int32)
    launch(kernels["exchanged"], 1, 48, x, y, np.int32(5))
    np.testing.assert_array_equal(_folded(x, x[np.arange(48) ^ 1], 5), y)


def test_threads_of_a_block_that_wait_for_some_of_them_loop_one_after_the_other(launch, kernels):
    x = np.arange(192, dtype=np.int32)
    y = np.zeros(192, np.int32)
    launch(kernels["not_all"], 1, 192, x, y, np.int32(6))
    expected = np.zeros(192, np.int64)
    for k in range(6):
        expected = 5 * expected + x + k
    np.testing.assert_array_equal(expected, y)


def test_loops_that_differ_between_threads_end_where_each_ends(launch, kernels):
    ends = np.arange(48, dtype=np.int32) % 11
    y = np.zeros(48, np.int32)
    launch(kernels["own_ends"], 1, 48, ends, y)
    np.testing.assert_array_equal([sum(k * k for k in range(end)) for end in ends], y)


def _searched(s: int, rounds_at_most: int, thread: int) -> int:
    rounds = others = 0
    while s != 1 and rounds < rounds_at_most:
        s = 3 * s + 1 if s % 2 else s // 2
        if s == 5:
            break
        rounds += 1
    while s < 1000:
        s, others = s + 1 + thread, others + 1
    return 1000 * rounds + others


def test_each_thread_leaves_loops_that_only_compute_where_it_is_through(launch, kernels):
    x = np.random.default_rng(6).integers(1, 200, 48).astype(np.int32)
    y = np.zeros(48, np.int32)
    launch(kernels["searched"], 1, 48, x, y, np.int32(60))
    np.testing.assert_array_equal([_searched(int(s), 60, thread) for thread, s in enumerate(x)], y)


def test_loops_in_loops_of_each_threads_own(launch, kernels):
    x = np.arange(48, dtype=np.int32) % 13
    y = np.zeros(48, np.int32)
    launch(kernels["within"], 1, 48, x, y, np.int32(0))
    expected = []
    for end in x:
        total = 0
        for i in range(end):
            for k in range(i % 5):
                total = (3 * total + k) & 0xFFFFFFFF
        expected.append(total)
    np.testing.assert_array_equal(np.array(expected, np.uint32).view(np.int32), y)


def test_the_bits_of_an_index_are_no_number_to_count_with(launch, kernels):
    y = np.zeros(32, np.float32)
    launch(kernels["bits"], 1, 32, y, np.int32(4))
    index = np.arange(32, dtype=np.int32)
    expected = np.zeros(32, np.float32)
    for _ in range(4):
        expected += (index + 0x3F800000).view(np.float32)
    np.testing.assert_array_equal(expected + index.view(np.float32), y)


def goes_by_rows(kernel: jit.JitKernel) -> bool:
    return re.search(r"%first, i32 %(nx|most)[,)]", kernel.llvm_ir()) is not None


STRIDES = """
#define EACH for (int i = blockIdx.x * blockDim.x + threadIdx.x, span = gridDim.x * blockDim.x; i < n; i += span)
extern "C" __global__ void scaled(const int *x, int *y, int n) { EACH y[i] = 3 * x[i] + y[i]; }
extern "C" __global__ void summed(const int *x, int *y, int n) {
    int sum = 0; EACH sum = 3 * sum + x[i];
    y[blockIdx.x * blockDim.x + threadIdx.x] += sum;
}
extern "C" __global__ void last(const int *x, int *y, int n) {
    int last = 0, at = 0; EACH { last = x[i]; y[i] += 7; at = i; }
    if (at) y[at] += last;
}
extern "C" __global__ void own(const int *x, int *y, int n) { EACH y[i] += x[i] * (int)threadIdx.x; }
"""


@pytest.fixture(scope="module")
def strides(ptx_of):
    return jit.load(ptx_of(STRIDES)).kernels


def has_sections(kernel: jit.JitKernel) -> bool:
    return bool(re.search(r"@part_\d+_\d+_\d+\(", kernel.llvm_ir()))


def test_rounds_that_a_compiler_has_joined_run_one_after_the_other_if_threads_keep_nothing(strides):
    assert {"scaled"} == {name for name, kernel in strides.items() if has_sections(kernel)}


BLOCK_STRIDES = """
#define ONE(what) { what; i += s; }
#define EACH(from, what) int i = from, s = blockDim.x; \\
    while (i < n - 3 * s) { ONE(what) ONE(what) ONE(what) ONE(what) } while (i < n) ONE(what)
extern "C" __global__ void summed(const int *x, int *y, int n) {  // what threads keep goes from round to round
    int sum = 0, most = -5; EACH(threadIdx.x, sum = 3 * sum + x[i]; most = max(most, x[i]))
    y[threadIdx.x] = sum; y[blockDim.x + threadIdx.x] = most;
}
extern "C" __global__ void carried(int *x, int *y, int n) {  // by memory
    EACH(threadIdx.x, y[i + s] += 3 * y[i] + x[i])
}
extern "C" __global__ void again(const int *x, int *y, int n) {  // from an index that threads have kept
    __shared__ int part[1024];
    int first = threadIdx.x;
    while (first < 700 && x[first] % 4) first += blockDim.x;
    part[threadIdx.x] = first;
    __syncthreads();
    int sum = part[blockDim.x - 1 - threadIdx.x]; EACH(first, sum = 3 * sum + x[i])
    y[threadIdx.x] = sum;
}
extern "C" __global__ void same(const int *x, int *y, int n) {  // from one that is what it seems to be
    __shared__ int part[1024];
    int first = threadIdx.x;
    while (first < n / 3 / (int)blockDim.x * (int)blockDim.x) first += blockDim.x;
    part[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    int sum = part[blockDim.x - 1 - threadIdx.x]; EACH(first, sum = 3 * sum + x[i])
    y[threadIdx.x] = sum;
}
"""


@pytest.fixture(scope="module")
def block_strides(ptx_of):
    return jit.load(ptx_of(BLOCK_STRIDES)).kernels


def test_rounds_by_the_size_of_a_block_run_one_after_the_other_with_what_threads_keep(block_strides):
    found = {name for name, kernel in block_strides.items() if has_sections(kernel)}
    assert {"summed", "carried", "again", "same"} == found


@pytest.mark.parametrize("n", [0, 1, 100, 256, 999])
@pytest.mark.parametrize("block", [1, 16, 50, 256])
def test_rounds_by_the_size_of_a_block_do_what_each_thread_does(launch, block_strides, block, n):
    random = np.random.default_rng(n)
    x, y = (random.integers(-1000, 1000, 2000).astype(np.int32) for _ in range(2))
    expected = {name: y.copy() for name in block_strides}
    with np.errstate(over="ignore"):
        for t in range(block):
            total, most = np.int32(0), np.int32(-5)
            for i in range(t, n, block):
                total, most = 3 * total + x[i], max(most, x[i])
                expected["carried"][i + block] += 3 * expected["carried"][i] + x[i]
            expected["summed"][[t, block + t]] = total, most
            firsts = []
            for thread in (t, block - 1 - t):
                firsts.append(thread)
                while firsts[-1] < 700 and np.fmod(x[firsts[-1]], 4):
                    firsts[-1] += block
            total = np.int32(firsts[1])
            for i in range(firsts[0], n, block):
                total = 3 * total + x[i]
            expected["again"][t] = total
            total = x[block - 1 - t]
            for i in range(t + n // 3 // block * block, n, block):
                total = 3 * total + x[i]
            expected["same"][t] = total
    for name, values in expected.items():
        found = y.copy()
        launch(block_strides[name], 1, block, x, found, np.int32(n))
        np.testing.assert_array_equal(values, found, name)


COLUMNS = """
extern "C" __global__ void apart(const int *x, int *y, int n, int rows, int other) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) {
        int sum = 0;
        for (int k = 0; k < rows; k++) sum = 3 * sum + x[k * n + i] - x[k * n + other];
        y[i] = sum;
    }
}
extern "C" __global__ void product(const int *a, const int *b, int *c, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x, sum = 0;
    for (int k = 0; k < n; k++) sum += a[k] * b[k * n + i];
    c[i] = sum;
}
extern "C" __global__ void nearby(const int *x, float *y, int n, float by) {
    float sum = 0;
    for (int k = 0; k < n; k++) sum = sum + by, y[k * 32 + threadIdx.x] = sum + x[k * 32 + threadIdx.x];
}
"""


@pytest.fixture(scope="module")
def columns(ptx_of):
    return jit.load(ptx_of(COLUMNS)).kernels


def test_rows_of_threads_go_down_columns_whose_rows_are_as_long_as_a_parameter_says(columns):
    assert {"apart", "product"} == {name for name, kernel in columns.items() if goes_by_rows(kernel)}


@pytest.mark.parametrize("rows", [0, 1, 4, 23])
@pytest.mark.parametrize(("n", "block"), [(1, 16), (50, 64), (300, 64), (1000, 256)])
def test_columns_are_summed_up_as_each_thread_does(launch, columns, n, block, rows):
    x = np.random.default_rng(n).integers(-1000, 1000, (rows + 1, n)).astype(np.int32)
    y, expected = np.full(1100, 7, np.int32), np.full(1100, 7, np.int32)
    sums = np.zeros(n, np.int64)
    for row in x[:rows].astype(np.int64):
        sums = 3 * sums + row - row[n // 2]
    expected[:n] = sums.astype(np.uint64).astype(np.uint32).view(np.int32)
    launch(columns["apart"], -(-n // block), block, x, y, np.int32(n), np.int32(rows), np.int32(n // 2))
    np.testing.assert_array_equal(expected, y)


def test_a_row_times_a_matrix_is_the_product_of_each_of_its_columns(launch, columns):
    random = np.random.default_rng(8)
    a, b = (random.integers(-1000, 1000, shape).astype(np.int32) for shape in (96, (96, 96)))
    c = np.zeros(96, np.int32)
    launch(columns["product"], 2, 48, a, b, c, np.int32(96))
    np.testing.assert_array_equal(a @ b, c)


@pytest.mark.parametrize("grid", [1, 5, 37, 200])
@pytest.mark.parametrize("n", [0, 1, 100, 2368, 4 * 2368, 9999])
@pytest.mark.parametrize("options", [{}, {"seed": 5, "threads": 2}])
def test_rounds_that_a_compiler_has_joined_do_what_each_does(launch, strides, grid, n, options):
    random = np.random.default_rng(n)
    x, y = (random.integers(-1000, 1000, 13000).astype(np.int32) for _ in range(2))
    block = 64
    threads, i = grid * block, np.arange(len(y))
    below = i < n
    first = i[: min(threads, n)]
    at = first + (n - 1 - first) // threads * threads  # where each thread that has any round has its last one
    sums = np.zeros(len(y), np.int64)
    for start in range(0, n, threads):
        stop = min(start + threads, n)
        sums[: stop - start] = 3 * sums[: stop - start] + x[start:stop]
    last = y + 7 * below
    at = at[at > 0]
    last[at] += x[at]
    expected = {
        "scaled": np.where(below, 3 * x + y, y),
        "summed": y + sums.astype(np.int32),
        "last": last,
        "own": np.where(below, y + x * (i % threads % block), y),
    }
    for name, values in expected.items():
        found = y.copy()
        launch(strides[name], grid, block, x, found, np.int32(n), **options)
        np.testing.assert_array_equal(values, found, name)


def test_a_row_is_cut_where_its_threads_go_around_a_loop_another_number_of_times(launch, ptx_of):
    """The others are a row of their own, or go on alone from there. Once all of the row went on alone."""
    source = """
    extern "C" __global__ void k(const int *x, int *y, int n) {
        __shared__ int s[256];
        s[threadIdx.x] = 0;
        __syncthreads();
        for (int i = threadIdx.x; i < n; i += blockDim.x) s[threadIdx.x] += x[i];
        __syncthreads();
        y[threadIdx.x] = s[threadIdx.x];
    }
    """
    (kernel,) = jit.load(ptx_of(source)).kernels.values()
    assert goes_by_rows(kernel) and "call i32 @piece_1(" in kernel.llvm_ir()
    x = np.random.default_rng(4).integers(-1000, 1000, 1500).astype(np.int32)
    for n in (0, 1, 100, 255, 256, 257, 1000, 1024, 1500):
        y = np.zeros(256, np.int32)
        launch(kernel, 1, 256, x, y, np.int32(n))
        assert [x[:n][t::256].sum() for t in range(256)] == y.tolist()


def test_rounds_of_rows_let_the_host_fetch_what_the_next_one_reads_from_memory(ptx_of):
    source = """
    extern "C" __global__ void k(const int *x, int *y, int n) {
        __shared__ int s[1024];
        s[threadIdx.x] = threadIdx.x;
        #pragma unroll 1
        for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) y[i] = READS;
    }
    """

    def fetched(reads: str) -> bool:
        (kernel,) = jit.load(ptx_of(source.replace("READS", reads))).kernels.values()
        assert runs_together(kernel)
        return "call void @llvm.prefetch" in kernel.llvm_ir()

    assert fetched("x[i]")
    assert not fetched("s[threadIdx.x]")
    assert not fetched("x[0]")


def test_loops_of_rows_with_atomic_updates_are_unrolled_and_others_left_to_become_vectors(ptx_of):
    source = """
    #define EACH for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
    extern "C" __global__ void counted(const unsigned char *x, int *y, int n) { EACH atomicAdd(&y[x[i]], 1); }
    extern "C" __global__ void scaled(const unsigned char *x, int *y, int n) { EACH y[i] = 3 * x[i]; }
    """
    kernels = jit.load(ptx_of(source)).kernels
    assert {"counted"} == {name for name, kernel in kernels.items() if "llvm.loop.unroll.count" in kernel.llvm_ir()}


@pytest.mark.parametrize("by", ["grid", "block"])
def test_the_random_kernels_have_loops_that_rows_run_together(by):
    texts = (module_of([even_kernel(seed, 64, by=by)]).encode() for seed in range(FIRST, FIRST + 12))
    kernels = [jit.load(text).kernels["k"] for text in texts]
    assert sum(map(goes_by_rows, kernels)) >= 4
    assert (by == "block") == any(map(has_sections, kernels))


def test_the_random_kernels_have_loops_that_threads_run_together():
    texts = (module_of([even_kernel(seed, 64)]).encode() for seed in range(FIRST, FIRST + 12))
    assert sum(runs_together(jit.load(text).kernels["k"]) for text in texts) >= 6


def test_where_branches_meet_is_looked_up_once_for_each(monkeypatch):
    """Most of the time to translate a kernel with many branches once went into that."""
    looks = []
    reached = even.Region.reached
    monkeypatch.setattr(
        even.Region, "reached", lambda self, *words, **known: looks.append(1) or reached(self, *words, **known)
    )
    branches = "".join(
        f"@p bra A{k}; add.u32 sum, sum, {k}; A{k}: shr.u32 x, x, 1; setp.ne.u32 p, x, 0;\n" for k in range(20)
    )
    text = f"""
.version 8.0
.target sm_80
.address_size 64
.visible .entry k(.param .u64 out) {{
    .reg .pred p, q; .reg .b32 x, sum, left; .reg .b64 address, offset;
    ld.param.u64 address, [out];
    mov.u32 x, %tid.x; mov.u32 sum, 0; mov.u32 left, 4; setp.ne.u32 p, x, 0;
LOOP:
    {branches}
    sub.u32 left, left, 1; setp.ne.u32 q, left, 0; @q bra LOOP;
    mul.wide.u32 offset, %tid.x, 4; add.u64 address, address, offset; st.global.u32 [address], sum;
    ret;
}}"""
    assert runs_together(jit.load(text.encode()).kernels["k"])
    assert 0 < len(looks) < 100  # 62: one for each block, and one for each branch


FETCHES = """extern "C" __global__ void k(cudaTextureObject_t lines, float *out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    float sum = 0;
    for (int j = 0; j < n; j++) sum += tex1Dfetch<float>(lines, %s);
    out[i] = sum;
}"""


@pytest.mark.parametrize(
    ("place", "together"), [("i + j * n", True), ("j", True), ("3 * i - j", True), ("i * i + j", False)]
)
def test_fetches_at_places_that_are_a_known_distance_apart_are_made_together(ptx_of, place, together):
    assert together == runs_together(jit.load(ptx_of(FETCHES % place)).kernels["k"])


CONSTANTS = """__constant__ int ends[8];
extern "C" __global__ void k(const float *in, float *out) {
    float sum = 0;
    for (int j = 0; j < ends[blockIdx.x]; j++) sum += in[j * 64 + threadIdx.x];
    out[threadIdx.x] = sum;
}"""


def test_a_loop_goes_on_alike_as_long_as_a_constant_says(ptx_of):
    assert runs_together(jit.load(ptx_of(CONSTANTS)).kernels["k"])


def test_a_loop_that_the_thread_chooses_a_constant_for_does_not(ptx_of):
    source = CONSTANTS.replace("ends[blockIdx.x]", "ends[threadIdx.x]")
    assert not runs_together(jit.load(ptx_of(source)).kernels["k"])
