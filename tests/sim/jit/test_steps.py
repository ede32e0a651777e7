"""Loops that go on by the grid's size: threads step together, and results stay what they are."""

from __future__ import annotations

import numpy as np
import pytest

from cudatool.sim import jit
from cudatool.sim.jit import native
from cudatool.sim.jit.steps import insert_steps

SOURCE = """
extern "C" __global__ void saxpy(float a, const float *x, float *y, int n) {
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) y[i] += a * x[i];
}
extern "C" __global__ void wide(const float *x, double *y, long long n) {
    for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < n; i += gridDim.x * (long long)blockDim.x) {
        if (x[i] < 0) break;
        y[i] = x[i] + i;
    }
}
extern "C" __global__ void total(const int *x, int *result, int *last, int n) {
    __shared__ int part[96];
    int sum = 0, i = blockIdx.x * blockDim.x + threadIdx.x;
    for (; i < n; i += gridDim.x * blockDim.x) {
        if (x[i] == 7) continue;
        sum = sum * 3 + x[i];
    }
    last[blockIdx.x * blockDim.x + threadIdx.x] = i;
    part[threadIdx.x] = sum;
    __syncthreads();
    for (int left = 48; left >= 3; left /= 2) {
        if (threadIdx.x < left) part[threadIdx.x] += part[threadIdx.x + left];
        __syncthreads();
    }
    if (!threadIdx.x) atomicAdd(result, part[0] + part[1] + part[2]);
}
extern "C" __global__ void waits(const int *x, int *y, int n) {
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) y[i] = x[i];
    if (threadIdx.x == 1) asm volatile("barrier.sync 1, 64;");
}
extern "C" __global__ void rows(const float *x, float *y, int n) {
    for (int i = threadIdx.x; i < n; i += blockDim.x) y[i] += x[i];
}
extern "C" __global__ void parts(const float *x, float *y, int n) {
    for (int k = threadIdx.x; k < 512; k += blockDim.x) {
        float sum = 0;
        #pragma unroll 1
        for (int i = k; i < n; i += 512) sum = sum * 3 + x[i];
        y[k] = sum;
    }
}
extern "C" __global__ void dot(const float *x, float *y, int n) {
    float sum = 0;
    for (int i = 0; i < n; i++) sum += x[i] * gridDim.x;
    y[threadIdx.x] = sum;
}
"""


@pytest.fixture(scope="module")
def kernels(ptx_of):
    return jit.load(ptx_of(SOURCE)).kernels


def steps(kernel: jit.JitKernel) -> int:
    return sum(i.opcode == "step" for i in insert_steps(kernel.text.function).instructions)


def test_threads_step_together_only_where_a_loop_goes_on_by_the_grids_size(kernels):
    found = {name: steps(kernel) > 0 for name, kernel in kernels.items()}
    assert {
        "saxpy": True,
        "wide": True,
        "total": True,
        "waits": True,
        "rows": False,
        "parts": False,
        "dot": False,
    } == found


def goes_by_rows(kernel: jit.JitKernel) -> bool:
    return "%first, i32 %nx)" in kernel.llvm_ir()


def test_rows_go_around_together_without_steps_where_they_leave_the_loop_together(kernels):
    found = {name: goes_by_rows(kernel) for name, kernel in kernels.items()}
    assert {
        "saxpy": True,
        "wide": False,
        "total": True,
        "waits": True,
        "rows": True,
        "parts": True,
        "dot": False,
    } == found


@pytest.mark.parametrize("count", [0, 1, 95, 96, 97, 1000, 4097])
def test_a_stride_that_covers_all_of_a_vector(launch, kernels, count):
    random = np.random.default_rng(1)
    x, y = random.random(count + 1, np.float32), random.random(count + 1, np.float32)
    expected = (np.float32(1.5) * x.astype(np.float64) + y).astype(np.float32)
    expected[count] = y[count]
    launch(kernels["saxpy"], 3, 96, np.float32(1.5), x, y, np.int32(count))
    np.testing.assert_allclose(expected, y, rtol=3e-7)
    assert expected[count] == y[count]


@pytest.mark.parametrize("block", [1, 50, 64, 256])
@pytest.mark.parametrize("count", [0, 1, 100, 512, 1000, 3 * 512, 4 * 512 + 1])
def test_rows_go_around_a_loop_in_a_loop(launch, kernels, count, block):
    x = np.random.default_rng(3).integers(0, 4, max(count, 1)).astype(np.float32)
    expected = np.zeros(512, np.float32)
    for i in range(count):
        expected[i % 512] = expected[i % 512] * 3 + x[i]
    y = np.zeros(512, np.float32)
    launch(kernels["parts"], 1, block, x, y, np.int32(count))
    np.testing.assert_array_equal(expected, y)


@pytest.mark.parametrize("block", [1, 50, 96])
def test_threads_that_leave_the_loop_early(launch, kernels, block):
    x = np.random.default_rng(2).uniform(-0.05, 1, 2000).astype(np.float32)
    expected = np.zeros(2000)
    for first in range(2 * block):
        for i in range(first, 2000, 2 * block):
            if x[i] < 0:
                break
            expected[i] = np.float64(np.float32(x[i] + np.float32(i)))
    y = np.zeros(2000)
    launch(kernels["wide"], 2, block, x, y, np.int64(2000))
    np.testing.assert_array_equal(expected, y)


def test_what_is_kept_from_round_to_round_and_meets_at_a_barrier(launch, kernels):
    x = np.random.default_rng(3).integers(0, 9, 1501).astype(np.int32)
    expected, ends = 0, np.zeros(192, np.int32)
    for first in range(192):
        total = 0
        for i in range(first, 1501, 192):
            total = total if x[i] == 7 else total * 3 + int(x[i])
        expected += total
        ends[first] = first + -(-(1501 - first) // 192) * 192
    result, last = np.zeros(1, np.int32), np.zeros(192, np.int32)
    launch(kernels["total"], 2, 96, x, result, last, np.int32(1501))
    assert expected & 0xFFFFFFFF == int(result[0]) & 0xFFFFFFFF
    assert ends.tolist() == last.tolist()


def test_who_waits_is_named_where_threads_stepped_before(launch, kernels):
    x, y = np.ones(300, np.int32), np.zeros(300, np.int32)
    with pytest.raises(jit.KernelDeadlock, match=r"thread 1 at barrier.sync, barrier 1, 64 threads"):
        launch(kernels["waits"], 1, 32, x, y, np.int32(300))
    assert x.tolist() == y.tolist()


def test_checked_kernels_and_footprints_agree_with_plain_ones(launch, kernels):
    x, y = np.ones(1000, np.float32), np.ones(1000, np.float32)
    base = min(x.ctypes.data, y.ctypes.data) & -4096
    footprint = jit.Footprint(base, max(x.ctypes.data, y.ctypes.data) + 8192 - base)
    launch(kernels["saxpy"], 2, 64, np.float32(2), x, y, np.int32(1000), footprint=footprint)
    assert [3.0] * 1000 == y.tolist()
    assert sum(size for _, size, _ in footprint.take()) == 8000


RACES = """
extern "C" __global__ void pairs(const int *x, int *y, int n, int shared) {
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) y[i / shared] = x[i];
}
extern "C" __global__ void count(const int *x, int *y, int n, int early) {
    __shared__ int bins[8];
    if (threadIdx.x < 8) bins[threadIdx.x] = 0;
    __syncthreads();
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) atomicAdd(&bins[x[i]], 1);
    if (!early) __syncthreads();
    if (threadIdx.x < 8) atomicAdd(&y[threadIdx.x], bins[threadIdx.x]);
}
"""


@pytest.mark.parametrize(
    ("name", "option", "races"), [("pairs", 1, 0), ("pairs", 2, 1), ("count", 0, 0), ("count", 1, 1)]
)
def test_races_of_threads_that_step_together_are_found(ptx_of, name, option, races):
    kernel = jit.load(ptx_of(RACES)).kernels[name]
    whole = np.zeros(3 * 4096, np.uint8)
    memory = whole[-whole.ctypes.data % 4096 :][: 2 * 4096].view(np.int32)
    memory[:1000] = np.random.default_rng(4).integers(0, 8, 1000)
    start = memory.ctypes.data
    arguments = np.array([start, start + 4096, 1000 | option << 32], np.uint64)
    found = kernel.launch(
        jit.LaunchShape((2, 1, 1), (64, 1, 1)),
        arguments.ctypes.data,
        jit.LaunchOptions(shadow=jit.Shadow(start, 2 * 4096, jit.Instrument.RACECHECK)),
    )
    assert races == len({one.line for one in found}), found
    if name == "count" and not races:
        assert np.bincount(memory[:1000], minlength=8).tolist() == memory[1024:1032].tolist()


def test_the_code_of_a_thread_is_there_once_for_all_rows_of_a_block(ptx_kernel):
    """LLVM copies the loop over a row of threads no further: that would take long and make nothing faster."""
    mark = 0x5EED1234
    text = ptx_kernel(".param .u64 p", f".reg .b64 %a; ld.param.u64 %a, [p]; st.volatile.u32 [%a], {mark};").llvm_ir()
    assert 1 == native.compile_text(text).count(mark.to_bytes(4, "little"))
