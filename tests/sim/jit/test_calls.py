"""Calls that are not inlined: recursion, function pointers, virtual functions, memory from the stack."""

from __future__ import annotations

import math

import numpy as np
import pytest
from cuda.bindings import driver

from cudatool.ptx import PtxError
from cudatool.sim import jit

RECURSION = r"""
__device__ __noinline__ unsigned fibonacci(unsigned n) { return n < 2 ? n : fibonacci(n - 1) + fibonacci(n - 2); }
__device__ __noinline__ bool odd(int n);
__device__ __noinline__ bool even(int n) { return n == 0 ? true : odd(n - 1); }
__device__ __noinline__ bool odd(int n) { if (n == 0) return false; int k[4] = {n, n, n, n}; return even(k[n & 3] - 1); }
__device__ __noinline__ int ackermann(int m, int n) {
    if (m == 0) return n + 1;
    if (n == 0) return ackermann(m - 1, 1);
    return ackermann(m - 1, ackermann(m, n - 1));
}
struct Wide { double a; int b[3]; char c; };
__device__ __noinline__ Wide widen(Wide w, int n) {
    if (n == 0) return w;
    w.a += n; w.b[n % 3] += n; w.c ^= n;
    Wide inner = widen(w, n - 1);
    inner.a *= 2;
    return inner;
}
__device__ __noinline__ int barriers(int *shared, int depth) {
    if (depth == 0) return 0;
    shared[threadIdx.x] = depth + threadIdx.x;
    __syncthreads();
    int other = shared[threadIdx.x ^ 1];
    __syncthreads();
    int sum = __shfl_xor_sync(0xffffffff, depth, 1);
    return other + sum + barriers(shared, depth - 1);
}
__device__ __noinline__ void sort(int *a, int low, int high) {
    int i = low, j = high, pivot = a[(low + high) / 2];
    while (i <= j) {
        while (a[i] < pivot) i++;
        while (a[j] > pivot) j--;
        if (i <= j) { int t = a[i]; a[i] = a[j]; a[j] = t; i++; j--; }
    }
    if (low < j) sort(a, low, j);
    if (i < high) sort(a, i, high);
}
__device__ __noinline__ int deep(int n) { volatile int x = n; return n == 0 ? 0 : deep(n - 1) + x; }
extern "C" __global__ void numbers(unsigned *f, int *e, int *a) {
    int t = threadIdx.x;
    f[t] = fibonacci(t % 16);
    e[t] = even(t) * 2 + odd(t);
    a[t] = ackermann(t % 3, t % 4);
}
extern "C" __global__ void structs(double *out) {
    Wide w = {threadIdx.x + 0.5, {1, 2, 3}, 5};
    Wide r = widen(w, 4);
    double *o = out + threadIdx.x * 5;
    o[0] = r.a; o[1] = r.b[0]; o[2] = r.b[1]; o[3] = r.b[2]; o[4] = r.c;
}
extern "C" __global__ void suspended(int *out) {
    __shared__ int shared[64];
    out[threadIdx.x] = barriers(shared, 5);
}
extern "C" __global__ void sorted(int *a, int n) { sort(a + threadIdx.x * n, 0, n - 1); }
extern "C" __global__ void depth(int *out, int n) { *out = deep(n); }
"""


def _ackermann(m: int, n: int) -> int:
    if m == 0:
        return n + 1
    return _ackermann(m - 1, 1) if n == 0 else _ackermann(m - 1, _ackermann(m, n - 1))


@pytest.fixture(name="launch")
def launch_fixture(launch_in_turn):
    return launch_in_turn


@pytest.fixture(scope="module")
def recursive(ptx_of):
    return jit.load(ptx_of(RECURSION)).kernels


def test_functions_that_call_themselves(launch, recursive):
    f, e, a = np.zeros(64, "u4"), np.zeros(64, "i4"), np.zeros(64, "i4")
    launch(recursive["numbers"], 1, 64, f, e, a, stack_bytes=4096)
    fibonacci = [0, 1]
    while len(fibonacci) < 16:
        fibonacci.append(fibonacci[-1] + fibonacci[-2])
    assert [fibonacci[t % 16] for t in range(64)] == f.tolist()
    assert [1 if t % 2 else 2 for t in range(64)] == e.tolist()
    assert [_ackermann(t % 3, t % 4) for t in range(64)] == a.tolist()


def test_structures_are_passed_and_returned(launch, recursive):
    out = np.zeros((32, 5))
    launch(recursive["structs"], 1, 32, out, stack_bytes=8192)
    expected = []
    for t in range(32):
        a, b, c = t + 0.5, [1, 2, 3], 5
        for n in range(4, 0, -1):
            a, c = a + n, c ^ n
            b[n % 3] += n
        expected.append([a * 16, *b, c])
    assert expected == out.tolist()


def test_barriers_and_collectives_inside_of_recursion(launch, recursive):
    out = np.zeros(64, "i4")
    launch(recursive["suspended"], 2, 64, out, stack_bytes=4096)
    assert [sum(2 * depth + (t ^ 1) for depth in range(1, 6)) for t in range(64)] == out.tolist()


def test_recursive_sort(launch, recursive):
    data = np.random.default_rng(5).integers(-1000, 1000, (20, 100)).astype("i4")
    expected = np.sort(data, axis=1)
    launch(recursive["sorted"], 1, 20, data, np.int32(100), stack_bytes=16384)
    np.testing.assert_array_equal(expected, data)


def test_a_stack_that_is_too_small_is_reported(launch, recursive, program):
    out = np.zeros(1, "i4")
    launch(recursive["depth"], 1, 1, out, np.int32(100), stack_bytes=64 << 10)
    assert 5050 == out[0]
    with pytest.raises(jit.KernelStackOverflow, match="1024 bytes of CU_LIMIT_STACK_SIZE"):
        launch(recursive["depth"], 1, 1, out, np.int32(1000), stack_bytes=1024)
    loaded = program(RECURSION)
    address = loaded.upload(np.zeros(1, "i4"))
    assert driver.cuCtxSetLimit(driver.CUlimit.CU_LIMIT_STACK_SIZE, 128 << 10)[0] == 0
    loaded.launch("depth", 1, 1, address, np.int32(1000))
    assert [500500] == loaded.download(address, 1, "i4").tolist()
    loaded.launch("depth", 1, 1, address, np.int32(100_000))
    assert driver.CUresult.CUDA_ERROR_HARDWARE_STACK_ERROR == loaded.synchronize()


POINTERS = r"""
typedef int (*Operation)(int, int);
__device__ __noinline__ int add(int a, int b) { return a + b; }
__device__ __noinline__ int multiply(int a, int b) { return a * b; }
__device__ __noinline__ int meet(int a, int b) { __syncthreads(); return __shfl_sync(0xffffffff, a, b & 31); }
__device__ Operation table[] = {add, multiply, meet};
__constant__ Operation constants[] = {multiply, add};
struct Shape {
    int size;
    __device__ Shape(int s) : size(s) {}
    __device__ virtual int area() const = 0;
    __device__ virtual ~Shape() {}
};
struct Square : Shape {
    __device__ Square(int s) : Shape(s) {}
    __device__ int area() const override { return size * size; }
};
struct Strip : Shape {
    int width;
    __device__ Strip(int s, int w) : Shape(s), width(w) {}
    __device__ int area() const override { return size * width; }
};
template <class F> __device__ __noinline__ int twice(F f, int x) { return f(f(x)); }
extern "C" __global__ void from_tables(int *out, const int *which) {
    int t = threadIdx.x;
    out[t] = table[which[t]](t, 3) * 1000 + constants[t & 1](t, 2);
}
extern "C" __global__ void together(int *out, int which) { out[threadIdx.x] = table[which](threadIdx.x, 7); }
extern "C" __global__ void take(Operation *where, int which) { *where = which ? add : multiply; }
extern "C" __global__ void use(Operation *where, int *out) { out[threadIdx.x] = (*where)(threadIdx.x, 5); }
extern "C" __global__ void shapes(int *out) {
    int t = threadIdx.x;
    Shape *shape = t % 2 ? (Shape *)new Square(t) : (Shape *)new Strip(t, 3);
    out[t] = shape->area();
    delete shape;
}
extern "C" __global__ void wild(Operation *where, int *out) { *out = ((Operation)0x7777)(1, 2); }
"""


def test_calls_through_pointers(program):
    loaded = program(POINTERS)
    out = loaded.upload(np.zeros(64, "i4"))
    which = np.arange(64, dtype="i4") // 5 % 2
    loaded.launch("from_tables", 1, 64, out, loaded.upload(which))
    expected = [(t + 3, t * 3)[which[t]] * 1000 + (t * 2, t + 2)[t & 1] for t in range(64)]
    assert expected == loaded.download(out, 64, "i4").tolist()
    loaded.launch("together", 1, 64, out, np.int32(2))
    assert [7] * 32 + [39] * 32 == loaded.download(out, 64, "i4").tolist()


def test_a_pointer_outlives_the_kernel_that_took_it(program):
    loaded = program(POINTERS)
    where, out = loaded.upload(np.zeros(1, "u8")), loaded.upload(np.zeros(8, "i4"))
    for which, expected in ((1, [t + 5 for t in range(8)]), (0, [t * 5 for t in range(8)])):
        loaded.launch("take", 1, 1, where, np.int32(which))
        loaded.launch("use", 1, 8, where, out)
        assert expected == loaded.download(out, 8, "i4").tolist()


def test_virtual_functions(program):
    loaded = program(POINTERS)
    out = loaded.upload(np.zeros(40, "i4"))
    loaded.launch("shapes", 1, 40, out)
    assert [t * t if t % 2 else 3 * t for t in range(40)] == loaded.download(out, 40, "i4").tolist()


def test_a_pointer_to_no_function_fails_the_launch(program):
    loaded = program(POINTERS)
    out = loaded.upload(np.zeros(1, "i4"))
    loaded.launch("wild", 1, 1, out, out)
    assert driver.CUresult.CUDA_ERROR_LAUNCH_FAILED == loaded.synchronize()


ALLOCA = """
.func (.param .b32 r) sum (.param .b32 n)
{
    .reg .b32 %n, %i, %s, %v, %bytes; .reg .b64 %base, %at; .reg .pred %p;
    ld.param.u32 %n, [n];
    shl.b32 %bytes, %n, 2; add.u32 %bytes, %bytes, 4;
    { .reg .b64 %wide; cvt.u64.u32 %wide, %bytes; alloca.u64 %base, %wide; }
    mov.u32 %i, 0;
FILL: { .reg .b64 %o; mul.wide.u32 %o, %i, 4; add.u64 %at, %base, %o; }
    st.local.u32 [%at], %i; add.u32 %i, %i, 1; setp.le.u32 %p, %i, %n; @%p bra FILL;
    mov.u32 %s, 0; mov.u32 %i, 0;
ADD: { .reg .b64 %o; mul.wide.u32 %o, %i, 4; add.u64 %at, %base, %o; }
    ld.local.u32 %v, [%at]; add.u32 %s, %s, %v; add.u32 %i, %i, 1; setp.le.u32 %p, %i, %n; @%p bra ADD;
    st.param.b32 [r], %s; ret;
}
"""


def test_memory_from_the_stack_is_given_back(ptx_kernel, launch):
    body = """.reg .b32 %t, %r, %i; .reg .b64 %b, %before, %after, %d; .reg .pred %p;
    mov.u32 %t, %tid.x; mov.u32 %i, 0;
    stacksave.u64 %before;
    AGAIN: { .param .b32 n; .param .b32 r; st.param.b32 [n], %t; call.uni (r), sum, (n); ld.param.b32 %r, [r]; }
    add.u32 %i, %i, 1; setp.lt.u32 %p, %i, 50; @%p bra AGAIN;
    stacksave.u64 %after; sub.u64 %d, %after, %before; cvt.u32.u64 %i, %d; add.u32 %r, %r, %i;
    ld.param.u64 %b, [out]; mad.wide.u32 %b, %t, 4, %b; st.global.u32 [%b], %r; ret;"""
    out = np.zeros(40, "u4")
    launch(ptx_kernel(".param .u64 out", body, before=ALLOCA), 1, 40, out)
    assert [t * (t + 1) // 2 for t in range(40)] == out.tolist()


def test_printf_and_math_inside_of_recursion(program, capfd):
    source = r"""__device__ __noinline__ double f(int n, double x) {
        if (n == 0) return x;
        printf("%d %.1f\n", n, x);
        return sqrt(f(n - 1, x + n));
    }
    extern "C" __global__ void k(double *out) { *out = f(3, 1.5); }"""
    loaded = program(source)
    out = loaded.upload(np.zeros(1))
    loaded.launch("k", 1, 1, out)
    assert math.sqrt(math.sqrt(math.sqrt(7.5))) == loaded.download(out, 1, "f8")[0]
    assert ["3 1.5", "2 4.5", "1 6.5"] == capfd.readouterr().out.splitlines()


REGISTER_PARAMETERS = """
.func (.reg .v2 .b32 both, .reg .pred odd) split (.reg .v2 .b32 pair, .reg .f64 scale, .param .b32 more)
{
    .reg .b32 %t; .reg .f64 %f;
    ld.param.b32 %t, [more];
    cvt.rn.f64.u32 %f, pair.y; mul.f64 %f, %f, scale;
    add.u32 both.x, pair.x, %t; cvt.rzi.u32.f64 both.y, %f;
    and.b32 %t, pair.x, 1; setp.eq.u32 odd, %t, 1;
    ret;
}
"""


def test_parameters_and_results_in_registers(ptx_kernel, launch):
    body = """.reg .b32 %t; .reg .b64 %b; .reg .v2 .b32 %v; .reg .pred %odd, %some;
    mov.u32 %t, %tid.x; ld.param.u64 %b, [out]; mad.wide.u32 %b, %t, 12, %b;
    mov.b32 %v.x, %t; mov.b32 %v.y, 100; setp.ne.u32 %odd, 0, 0; setp.lt.u32 %some, %t, 4;
    @%some call (%v, %odd), split, (%v, 0d3FE0000000000000, 10);
    st.global.u32 [%b], %v.x; st.global.u32 [%b+4], %v.y;
    selp.b32 %t, 1, 0, %odd; st.global.u32 [%b+8], %t; ret;"""
    out = np.zeros((6, 3), "u4")
    launch(ptx_kernel(".param .u64 out", body, before=REGISTER_PARAMETERS), 1, 6, out)
    assert [[t + 10, 50, t % 2] if t < 4 else [t, 100, 0] for t in range(6)] == out.tolist()


def test_what_a_call_passes_must_fit(ptx_kernel, launch):
    before = ".func take (.reg .v2 .b32 pair) { ret; }"
    kernel = ptx_kernel("", ".reg .b32 %a; mov.b32 %a, 0; call take, (%a); ret;", before=before)
    with pytest.raises(PtxError, match="pair has 2 elements, 1 given"):
        launch(kernel, 1, 1)


@pytest.mark.parametrize("code", ["alloca.u64 %d;", "stacksave.u64 ;", "stackrestore.u64 ;"])
def test_an_instruction_without_its_operands_is_refused_by_name(ptx_kernel, code):
    kernel = ptx_kernel("", f".reg .b64 %d; {code} ret;")
    with pytest.raises(jit.UnsupportedInstruction, match=code.split(".")[0]):
        kernel.llvm_ir()
