"""Ordinary CUDA C++ of many kinds, against NumPy: on the software device, and on a GPU where there is one."""

from __future__ import annotations

import numpy as np
import pytest

import cudatool as ct


def _launch(source, name, grid, block, *arguments, shared=0):
    kernel = ct.compile(source, name)
    kernel[ct.LaunchConfig(grid=grid, block=block, shmem_size=shared)](*arguments)
    ct.synchronize()


@pytest.fixture
def rng():
    return np.random.default_rng(7)


def test_warp_shuffle_and_shared_memory_reduction(device, rng):
    source = """
    extern "C" __global__ void total(const float *x, float *sum, int n) {
        __shared__ float partial[32];
        float s = 0;
        for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) s += x[i];
        for (int d = 16; d; d >>= 1) s += __shfl_down_sync(0xffffffffu, s, d);
        if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = s;
        __syncthreads();
        if (threadIdx.x < 32) {
            s = threadIdx.x < blockDim.x / 32 ? partial[threadIdx.x] : 0.0f;
            for (int d = 16; d; d >>= 1) s += __shfl_xor_sync(0xffffffffu, s, d);
            if (threadIdx.x == 0) atomicAdd(sum, s);
        }
    }"""
    x = rng.random(100_003, np.float32)
    out = ct.zeros(1, np.float32)
    _launch(source, "total", 8, 256, ct.asarray(x), out, x.size)
    assert out.get()[0] == pytest.approx(x.sum(dtype=np.float64), rel=1e-4)


def test_transpose_through_a_padded_tile(device, rng):
    source = """
    template <typename T> __global__ void transpose(const T *in, T *out, int rows, int columns) {
        __shared__ T tile[16][17];
        int x = blockIdx.x * 16 + threadIdx.x, y = blockIdx.y * 16 + threadIdx.y;
        if (x < columns && y < rows) tile[threadIdx.y][threadIdx.x] = in[y * columns + x];
        __syncthreads();
        x = blockIdx.y * 16 + threadIdx.x; y = blockIdx.x * 16 + threadIdx.y;
        if (x < rows && y < columns) out[y * rows + x] = tile[threadIdx.x][threadIdx.y];
    }"""
    a = rng.integers(-(2**62), 2**62, (45, 83))
    out = ct.zeros((83, 45), np.int64)
    _launch(source, "transpose<long long>", (6, 3), (16, 16), ct.asarray(a), out, 45, 83)
    assert np.array_equal(out.get(), a.T)


def test_bitonic_sort_with_barriers_in_nested_loops(device, rng):
    source = """
    extern "C" __global__ void sort(int *data) {
        extern __shared__ int s[];
        int t = threadIdx.x;
        s[t] = data[blockIdx.x * blockDim.x + t];
        __syncthreads();
        for (int k = 2; k <= blockDim.x; k <<= 1)
            for (int j = k >> 1; j > 0; j >>= 1) {
                int other = t ^ j;
                if (other > t) {
                    bool up = (t & k) == 0;
                    if ((s[t] > s[other]) == up) { int x = s[t]; s[t] = s[other]; s[other] = x; }
                }
                __syncthreads();
            }
        data[blockIdx.x * blockDim.x + t] = s[t];
    }"""
    data = rng.integers(-1000, 1000, (4, 512), dtype=np.int32)
    array = ct.asarray(data)
    _launch(source, "sort", 4, 512, array, shared=4 * 512)
    assert np.array_equal(array.get(), np.sort(data, axis=1))


def test_inclusive_scan_with_early_exit_of_whole_blocks(device, rng):
    source = """
    extern "C" __global__ void scan(const unsigned *in, unsigned *out, int blocks) {
        if (blockIdx.x >= blocks) return;
        __shared__ unsigned s[2][128];
        int t = threadIdx.x, from = 0;
        s[0][t] = in[blockIdx.x * 128 + t];
        __syncthreads();
        for (int d = 1; d < 128; d *= 2, from ^= 1) {
            s[from ^ 1][t] = t >= d ? s[from][t] + s[from][t - d] : s[from][t];
            __syncthreads();
        }
        out[blockIdx.x * 128 + t] = s[from][t];
    }"""
    data = rng.integers(0, 2**31, (3, 128), dtype=np.uint32)
    out = ct.zeros((5, 128), np.uint32)
    _launch(source, "scan", 5, 128, ct.asarray(data), out, 3)
    expected = np.zeros((5, 128), np.uint32)
    expected[:3] = np.cumsum(data, axis=1, dtype=np.uint32)
    assert np.array_equal(out.get(), expected)


def test_mandelbrot_with_data_dependent_loops(device):
    source = """
    extern "C" __global__ void mandelbrot(int *out, int w, int h, int limit) {
        int i = blockIdx.x * blockDim.x + threadIdx.x, j = blockIdx.y * blockDim.y + threadIdx.y;
        if (i >= w || j >= h) return;
        double cr = -2.0 + 3.0 * i / w, ci = -1.5 + 3.0 * j / h, zr = 0, zi = 0;
        int n = 0;
        while (n < limit && zr * zr + zi * zi <= 4.0) {
            double t = __dadd_rn(__dsub_rn(__dmul_rn(zr, zr), __dmul_rn(zi, zi)), cr);
            zi = __dadd_rn(__dmul_rn(__dmul_rn(2.0, zr), zi), ci);
            zr = t; ++n;
        }
        out[j * w + i] = n;
    }"""
    w, h, limit = 60, 40, 50
    out = ct.zeros((h, w), np.int32)
    _launch(source, "mandelbrot", (4, 5), (16, 8), out, w, h, limit)
    c = (-2.0 + 3.0 * np.arange(w) / w)[None, :] + 1j * (-1.5 + 3.0 * np.arange(h) / h)[:, None]
    zr, zi, count = np.zeros((h, w)), np.zeros((h, w)), np.zeros((h, w), np.int32)
    for _ in range(limit):
        live = zr * zr + zi * zi <= 4.0
        count += live
        t = zr * zr - zi * zi + c.real
        zi = np.where(live, 2.0 * zr * zi + c.imag, zi)
        zr = np.where(live, t, zr)
    assert np.mean(out.get() != count) < 0.01  # the GPU may contract the test of the loop


def test_structs_by_value_vector_types_and_overloads(device, rng):
    source = """
    struct Affine { float scale; double shift; int reverse; };
    __device__ __forceinline__ float4 apply(float4 v, Affine a) {
        return make_float4(v.x * a.scale + a.shift, v.y * a.scale + a.shift,
                           v.z * a.scale + a.shift, v.w * a.scale + a.shift);
    }
    extern "C" __global__ void affine(const float4 *in, float4 *out, Affine a, int n) {
        int i = blockIdx.x * blockDim.x + threadIdx.x;
        if (i < n) out[a.reverse ? n - 1 - i : i] = apply(in[i], a);
    }"""
    x = rng.random((100, 4), np.float32)
    affine = np.array((2.0, 0.5, 1), np.dtype([("scale", "f4"), ("shift", "f8"), ("reverse", "i4")], align=True))
    out = ct.zeros((100, 4), np.float32)
    _launch(source, "affine", 2, 64, ct.asarray(x), out, affine[()], 100)
    np.testing.assert_allclose(out.get(), (x * 2 + 0.5)[::-1], rtol=1e-6)


def test_constant_tables_local_arrays_and_switch(device, rng):
    source = """
    __constant__ int table[5] = {3, -1, 4, -1, 5};
    __device__ int twice(int x) { return 2 * x; }
    extern "C" __global__ void mix(const int *in, int *out, int n) {
        int i = blockIdx.x * blockDim.x + threadIdx.x;
        if (i >= n) return;
        int local[8];
        for (int k = 0; k < 8; ++k) local[k] = in[i] + k * table[k % 5];
        int r = local[in[i] & 7];
        switch (in[i] % 4) {
            case 0: r += 100; break;
            case 1: r = twice(r);  // falls through
            case 2: r -= 7; break;
            default: r = -r;
        }
        out[i] = r;
    }"""
    x = rng.integers(0, 1000, 300, dtype=np.int32)
    out = ct.zeros(300, np.int32)
    _launch(source, "mix", 3, 128, ct.asarray(x), out, 300)
    table = [3, -1, 4, -1, 5]
    expected = []
    for v in x.tolist():
        k = v & 7
        r = v + k * table[k % 5]
        expected.append([r + 100, 2 * r - 7, r - 7, -r][v % 4])
    assert out.get().tolist() == expected


def test_integer_division_and_remainder_of_every_width(device, rng):
    source = """
    template <typename T> __global__ void divide(const T *a, const T *b, T *q, T *r, int n) {
        int i = blockIdx.x * blockDim.x + threadIdx.x;
        if (i < n) { q[i] = a[i] / b[i]; r[i] = a[i] % b[i]; }
    }"""
    types = [("signed char", np.int8), ("unsigned short", np.uint16), ("int", np.int32), ("unsigned", np.uint32)]
    for name, dtype in [*types, ("long long", np.int64), ("unsigned long long", np.uint64)]:
        info = np.iinfo(dtype)
        a = rng.integers(info.min, info.max, 500, dtype=dtype, endpoint=True)
        b = rng.integers(info.min, info.max, 500, dtype=dtype, endpoint=True)
        b[b == 0] = 3
        q, r = ct.zeros(500, dtype), ct.zeros(500, dtype)
        _launch(source, f"divide<{name}>", 4, 128, ct.asarray(a), ct.asarray(b), q, r, 500)
        exact = [divmod(abs(int(x)), abs(int(y))) for x, y in zip(a, b, strict=True)]
        signs = [
            (1 if (x < 0) == (y < 0) else -1, -1 if x < 0 else 1) for x, y in zip(a.tolist(), b.tolist(), strict=True)
        ]
        assert q.get().tolist() == [s * v for (v, _), (s, _) in zip(exact, signs, strict=True)]
        assert r.get().tolist() == [s * v for (_, v), (_, s) in zip(exact, signs, strict=True)]


@pytest.mark.parametrize(
    ("function", "reference", "low", "high", "tolerance"),
    [
        ("sin(x)", np.sin, -100, 100, 1e-12),
        ("exp(x)", np.exp, -50, 50, 1e-13),
        ("log(x)", np.log, 1e-3, 1e6, 1e-13),
        ("pow(x, 2.5)", lambda x: x**2.5, 0, 1e3, 1e-13),
        ("tanh(x)", np.tanh, -5, 5, 1e-13),
        ("erf(x)", None, -3, 3, 1e-13),
        ("cbrt(x)", np.cbrt, -1e3, 1e3, 1e-13),
        ("fmod(x, 3.7)", lambda x: np.fmod(x, 3.7), -100, 100, 1e-13),
        ("(double)sinf((float)x)", lambda x: np.sin(x.astype(np.float32)).astype(float), -10, 10, 1e-5),
        ("(double)expf((float)x)", lambda x: np.exp(x.astype(np.float32)).astype(float), -10, 10, 1e-5),
        ("(double)rsqrtf((float)x)", lambda x: 1 / np.sqrt(x), 1e-3, 1e3, 1e-5),
        ("(double)__expf((float)x)", np.exp, -5, 5, 1e-4),
    ],
)
def test_math_functions(device, rng, function, reference, low, high, tolerance):
    source = f"""
    extern "C" __global__ void f(const double *in, double *out, int n) {{
        int i = blockIdx.x * blockDim.x + threadIdx.x;
        if (i < n) {{ double x = in[i]; out[i] = {function}; }}
    }}"""
    x = rng.uniform(low, high, 2000)
    out = ct.zeros(2000, np.float64)
    _launch(source, "f", 16, 128, ct.asarray(x), out, 2000)
    if reference is None:
        import math

        expected = np.array([math.erf(v) for v in x])
    else:
        expected = reference(x)
    np.testing.assert_allclose(out.get(), expected, rtol=tolerance, atol=tolerance)


def test_compare_and_swap_loop_and_other_atomics(device, rng):
    source = """
    __device__ double add(double *address, double value) {
        unsigned long long *p = (unsigned long long *)address, old = *p, seen;
        do {
            seen = old;
            old = atomicCAS(p, seen, __double_as_longlong(value + __longlong_as_double(seen)));
        } while (seen != old);
        return __longlong_as_double(old);
    }
    extern "C" __global__ void many(const int *in, double *sum, int *least, int *most, unsigned *bits, int *count, int n) {
        int i = blockIdx.x * blockDim.x + threadIdx.x;
        if (i >= n) return;
        add(sum, in[i]);
        atomicMin(least, in[i]);
        atomicMax(most, in[i]);
        atomicXor(bits, (unsigned)in[i]);
        atomicInc((unsigned *)count, 99);
    }"""
    x = rng.integers(-1000, 1000, 777, dtype=np.int32)
    total, least, most = ct.zeros(1, np.float64), ct.zeros(1, np.int32), ct.zeros(1, np.int32)
    bits, count = ct.zeros(1, np.uint32), ct.zeros(1, np.int32)
    _launch(source, "many", 7, 128, ct.asarray(x), total, least, most, bits, count, x.size)
    assert total.get()[0] == x.sum()
    assert least.get()[0] == x.min()
    assert most.get()[0] == x.max()
    assert bits.get()[0] == np.bitwise_xor.reduce(x.view(np.uint32))
    assert count.get()[0] == 777 % 100


def test_conversions_saturate_as_the_device_does(device):
    source = """
    extern "C" __global__ void convert(const float *in, int *i, unsigned *u, long long *l, int n) {
        int k = threadIdx.x;
        if (k < n) { i[k] = __float2int_rz(in[k]); u[k] = __float2uint_rn(in[k]); l[k] = __float2ll_rd(in[k]); }
    }"""
    x = np.array([0.5, 1.5, -1.5, 3e9, -3e9, np.nan, np.inf, -np.inf, 2.5, -0.5], np.float32)
    i, u, n = ct.zeros(x.size, np.int32), ct.zeros(x.size, np.uint32), ct.zeros(x.size, np.int64)
    _launch(source, "convert", 1, 32, ct.asarray(x), i, u, n, x.size)
    top, low = 2**31 - 1, -(2**31)
    assert i.get().tolist() == [0, 1, -1, top, low, 0, top, low, 2, 0]
    assert u.get().tolist() == [0, 2, 0, 3_000_000_000, 0, 0, 2**32 - 1, 0, 2, 0]
    assert n.get().tolist()[:5] == [0, 1, -2, 3_000_000_000, -3_000_000_000]
    assert n.get().tolist()[6:] == [2**63 - 1, -(2**63), 2, -1]


def test_half_precision_storage(device, rng):
    source = """
    #include <cuda_fp16.h>
    extern "C" __global__ void scale(const __half *in, __half *out, float by, int n) {
        int i = blockIdx.x * blockDim.x + threadIdx.x;
        if (i < n) out[i] = __float2half(__half2float(in[i]) * by);
    }"""
    x = rng.random(200).astype(np.float16)
    out = ct.zeros(200, np.float16)
    _launch(source, "scale", 2, 128, ct.asarray(x), out, 1.5, 200)
    assert np.array_equal(out.get(), (x.astype(np.float32) * np.float32(1.5)).astype(np.float16))


def test_warp_votes_and_population_counts(device, rng):
    source = """
    extern "C" __global__ void vote(const int *in, unsigned *ballot, int *any, int *all, int *bits) {
        int t = threadIdx.x;
        unsigned b = __ballot_sync(0xffffffffu, in[t] > 0);
        int some = __any_sync(0xffffffffu, in[t] > 8), every = __all_sync(0xffffffffu, in[t] > -9);
        if (t % 32 == 0) { ballot[t / 32] = b; any[t / 32] = some; all[t / 32] = every; }
        bits[t] = __popc(in[t]) + 100 * __clz(in[t]) + 10000 * __ffs(in[t]);
    }"""
    x = rng.integers(-9, 10, 64, dtype=np.int32)
    ballot, bits = ct.zeros(2, np.uint32), ct.zeros(64, np.int32)
    some, every = ct.zeros(2, np.int32), ct.zeros(2, np.int32)
    _launch(source, "vote", 1, 64, ct.asarray(x), ballot, some, every, bits)
    warps = x.reshape(2, 32)
    assert ballot.get().tolist() == [sum(int(v > 0) << k for k, v in enumerate(w.tolist())) for w in warps]
    assert (some.get() != 0).tolist() == (warps > 8).any(axis=1).tolist()
    assert (every.get() != 0).tolist() == (warps > -9).all(axis=1).tolist()
    expected = []
    for v in x.tolist():
        u = v & 0xFFFFFFFF
        expected.append(u.bit_count() + 100 * (32 - u.bit_length()) + 10000 * ((u & -u).bit_length()))
    assert bits.get().tolist() == expected
