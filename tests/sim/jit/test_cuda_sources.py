"""CUDA C++ through NVRTC: what the compiler really emits."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import pytest

from cudatool.sim import jit

BENCHMARKS = Path(__file__).parents[3] / "benchmarks" / "kernels.cu"


@pytest.mark.parametrize("threads", [1, 2])
def test_benchmark_kernels(launch, threads, ptx_of):
    kernels = jit.load(ptx_of(BENCHMARKS.read_text())).kernels
    random = np.random.default_rng(3)
    n = 100_003
    a, b, c = (random.random(n, np.float32) for _ in range(3))
    launch(kernels["vecadd"], -(-n // 256), 256, a, b, c, np.int32(n), threads=threads)
    np.testing.assert_array_equal(a + b, c)
    p, q, r = (random.random((64, 64), np.float32) for _ in range(3))
    launch(kernels["matmul"], (4, 4), (16, 16), p, q, r, np.int32(64), threads=threads)
    np.testing.assert_allclose(p @ q, r, rtol=1e-5)
    total = np.zeros(1, np.float32)
    launch(kernels["reduce"], 16, 256, a, total, np.int32(n), threads=threads)
    np.testing.assert_allclose(a.sum(), total[0], rtol=1e-5)
    values, counts = random.integers(0, 256, n, np.uint8), np.zeros(256, np.uint32)
    launch(kernels["histogram"], 16, 256, values, counts, np.int32(n), threads=threads)
    np.testing.assert_array_equal(np.bincount(values, minlength=256), counts)


MATH = {
    "sinf": np.sin,
    "cosf": np.cos,
    "tanf": np.tan,
    "expf": np.exp,
    "logf": np.log,
    "log2f": np.log2,
    "sqrtf": np.sqrt,
    "cbrtf": np.cbrt,
    "tanhf": np.tanh,
    "asinf": np.arcsin,
    "atanf": np.arctan,
    "floorf": np.floor,
    "rintf": np.rint,
    "__expf": np.exp,
    "__logf": np.log,
    "sin": np.sin,
    "exp": np.exp,
    "log": np.log,
    "tanh": np.tanh,
    "sqrt": np.sqrt,
    "rcbrt": lambda x: 1 / np.cbrt(x),
}


def test_math_functions(launch, place_variables, ptx_of):
    """libdevice arrives as plain PTX: exponentials, range reduction with local arrays, doubles."""
    body = "".join(
        f'extern "C" __global__ void k_{name}(const {kind} *x, {kind} *y) {{ y[threadIdx.x] = {name}(x[threadIdx.x]); }}\n'
        for name in MATH
        for kind in ["float" if name.endswith("f") or name.startswith("__") else "double"]
    )
    module = jit.load(ptx_of(body))
    place_variables(module)
    kernels = module.kernels
    for name, reference in MATH.items():
        dtype = np.float32 if name.endswith("f") or name.startswith("__") else np.float64
        x = np.array([0.01, 0.5, 0.9, 1.0, 0.3333, 0.7071], dtype)
        if name in ("sinf", "cosf", "sin", "tanf"):
            x = np.concatenate([x, np.array([100.0, 1e5, 3e7, -2e9], dtype)])
        y = np.zeros_like(x)
        launch(kernels[f"k_{name}"], 1, len(x), x, y)
        expected = reference(x.astype(np.float64))
        np.testing.assert_allclose(expected, y, rtol=2e-6 if dtype == np.float32 else 1e-14, atol=1e-7, err_msg=name)


def test_powers_and_remainders(launch, place_variables, ptx_of):
    source = """extern "C" __global__ void k(const double *x, const double *y, double *p, double *r, float *f) {
        int i = threadIdx.x; p[i] = pow(x[i], y[i]); r[i] = fmod(x[i], y[i]); f[i] = powf(x[i], y[i]); }"""
    x, y = np.array([2.0, 10.0, 0.5, 7.25, 1e10]), np.array([0.5, -3.0, 20.0, 2.5, 3.0])
    p, r, f = np.zeros(5), np.zeros(5), np.zeros(5, np.float32)
    module = jit.load(ptx_of(source))
    place_variables(module)
    launch(module.kernels["k"], 1, 5, x, y, p, r, f)
    np.testing.assert_allclose(x**y, p, rtol=1e-14)
    np.testing.assert_array_equal(np.fmod(x, y), r)
    np.testing.assert_allclose(x**y, f, rtol=1e-6)


KITCHEN_SINK = """
__constant__ float weights[4] = {1, 2, 3, 4};
__device__ int counter;
__device__ int *where = &counter;
struct Pair { int a; double b; };
__device__ __noinline__ float helper(float x, Pair s) { return x * s.b + s.a; }
template <int N> __device__ float scan(float v) {
    for (int o = 1; o < N; o *= 2) { float u = __shfl_up_sync(~0u, v, o, N); if ((threadIdx.x & (N - 1)) >= o) v += u; }
    return v;
}
extern "C" __global__ void __launch_bounds__(128) k(const float *in, float *out, int n, Pair s) {
    extern __shared__ float buffer[];
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    int local[8];
    for (int j = 0; j < 8; j++) local[j] = i * j;
    buffer[threadIdx.x] = i < n ? in[i] : 0;
    __syncthreads();
    float v = scan<32>(buffer[threadIdx.x]) + helper(1, s) + weights[threadIdx.x & 3] + local[threadIdx.x & 7];
    if (i < n) { out[i] = v; atomicAdd(&counter, 1); atomicAdd(where, 2); }
}
"""


def test_a_bit_of_everything(place_variables, ptx_of):
    module = jit.load(ptx_of(KITCHEN_SINK, "-lineinfo"))
    memory = place_variables(module)
    kernel = module.kernels["k"]
    assert (128, 4) == (kernel.max_threads, len(kernel.params))
    first = next(filter(None, map(kernel.text.where, kernel.text.declared.instructions)))
    assert first.file.endswith("kernel.cu")
    n = 300
    x, out = np.ones(n, np.float32), np.zeros(n, np.float32)
    pair = np.zeros((), np.dtype([("a", "i4"), ("b", "f8")], align=True))
    pair["a"], pair["b"] = 100, 0.5
    buffer = np.concatenate(
        [
            np.array([x.ctypes.data, out.ctypes.data], "u8").view("u1"),
            np.array([n, 0], "i4").view("u1"),
            np.frombuffer(pair.tobytes(), "u1"),
        ]
    )
    kernel.launch(jit.LaunchShape((3, 1, 1), (128, 1, 1), 512), buffer.ctypes.data)
    i = np.arange(n)
    t = i % 128
    scanned = np.minimum(t % 32 + 1, n - (i - t % 32))
    np.testing.assert_allclose(scanned + 100.5 + (t % 4 + 1) + i * (t % 8), out)
    assert 3 * n == ctypes.c_int.from_buffer(memory[next(m for m in memory if "counter" in m)]).value


def test_a_failed_assert_says_what_and_where(launch, place_variables, ptx_of):
    source = """extern "C" __device__ void __assertfail(const char *, const char *, unsigned, const char *, size_t);
    extern "C" __global__ void k(const int *x) {
        if (x[threadIdx.x] < 0) __assertfail("x >= 0", "kernel.cu", 7, "k", 1);
    }"""
    module = jit.load(ptx_of(source))
    place_variables(module)
    launch(module.kernels["k"], 1, 4, np.array([1, 2, 3, 4], "i4"))
    with pytest.raises(
        jit.KernelAssert, match=r"kernel\.cu:7: k: block: \[0,0,0\], thread: \[2,0,0\] Assertion `x >= 0` failed"
    ):
        launch(module.kernels["k"], 1, 4, np.array([1, 2, -3, 4], "i4"))


def test_a_library_s_inlined_code_is_named_by_the_line_that_calls_it(ptx_of):
    source = """
#line 100 "/cuda/include/cub/swap.cuh"
__device__ __forceinline__ void detail(float *x) { x[1] = 1; }
__device__ __forceinline__ void swap(float *x) { detail(x); }
#line 1 "/program/kernel.cu"
__device__ __forceinline__ void own(float *x) { x[2] = 2; }
extern "C" __global__ void k(float *x) {
    swap(x);
    own(x);
}"""
    text = jit.load(ptx_of(source, "-lineinfo")).kernels["k"].text
    stores = [text.where(one) for one in text.function.instructions if one.name.startswith("st.global")]
    assert [("/program/kernel.cu", 3), ("/program/kernel.cu", 1)] == stores


def test_deadlock_names_the_cuda_line(launch, ptx_of):
    source = """extern "C" __global__ void k() {
        if (threadIdx.x < 32)
            asm volatile("bar.sync 1, 64;");
        else
            asm volatile("bar.sync 2, 64;");
    }"""
    with pytest.raises(jit.KernelDeadlock, match=r"kernel\.cu:[35]"):
        launch(jit.load(ptx_of(source, "-lineinfo")).kernels["k"], 1, 64)


def test_divergent_loops_around_barriers(launch, ptx_of):
    """Each block leaves the loop after its own number of rounds; the last thread is alone in its warp."""
    source = """extern "C" __global__ void k(int *out) {
        __shared__ int value;
        if (threadIdx.x == 0) value = blockIdx.x;
        __syncthreads();
        int rounds = 0;
        while (true) {
            int v = value;
            __syncthreads();
            if (v == 0) break;
            if (threadIdx.x == 32) value = v - 1;
            rounds++;
            __syncthreads();
        }
        int most = __reduce_max_sync(__activemask(), rounds + (int)threadIdx.x);
        out[blockIdx.x * blockDim.x + threadIdx.x] = most;
    }"""
    out = np.zeros(5 * 33, "i4")
    launch(jit.load(ptx_of(source)).kernels["k"], 5, 33, out)
    assert [[b + 31] * 32 + [b + 32] for b in range(5)] == out.reshape(5, 33).tolist()


def test_threads_that_leave_a_barrier_for_good(program):
    source = """
    #include <cuda/barrier>
    extern "C" __global__ void leave(int *out) {
        __shared__ cuda::barrier<cuda::thread_scope_block> bar;
        if (!threadIdx.x) init(&bar, blockDim.x);
        __syncthreads();
        for (int round = 0; round < threadIdx.x; ++round) bar.arrive_and_wait();
        atomicAdd(out, 1);
        out[1 + threadIdx.x] = *(volatile int *)out;
        bar.arrive_and_drop();
    }"""
    loaded = program(source, headers=True)
    out = loaded.upload(np.zeros(1 + 70, np.int32))
    loaded.launch("leave", 1, 70, out)
    found = loaded.download(out, 1 + 70, np.int32)
    assert [70, *range(1, 71)] == found.tolist()  # thread n comes after all those before it have left


def test_a_kernel_that_launches_a_kernel_is_refused_in_these_words(ptx_of):
    source = """__global__ void child(int *out) { *out = 1; }
    extern "C" __global__ void k(int *out) { child<<<1, 1>>>(out); }"""
    kernel = jit.load(ptx_of(source, "--relocatable-device-code=true")).kernels["k"]
    with pytest.raises(jit.UnsupportedInstruction, match=r"kernel _Z5childPi: kernels cannot launch kernels"):
        kernel.llvm_ir()
