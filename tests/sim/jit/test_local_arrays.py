"""Small arrays of a thread's own are registers where nothing but their words is asked for; results do not change."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from cudatool.sim import jit
from cudatool.sim.jit import Instrument

# Of each kernel whether its array becomes registers, and a body in which v is the thread's word of the input.
BODIES = {
    "chosen": (True, "int a[5] = {v, v + 1, v * 2, v ^ 3, 7}; r = a[(unsigned)v % 5];"),
    "stored": (
        True,
        "int a[4] = {1, 2, 3, 4}; a[v & 3] = v; a[v >> 2 & 3] += 5; r = a[0] ^ 3 * a[1] ^ 5 * a[2] ^ 7 * a[3];",
    ),
    "some_store": (True, "int a[4] = {1, 2, 3, 4}; if (v & 8) a[v & 3] = v; r = a[v >> 1 & 3] + a[3];"),
    "wide": (True, "long long a[3] = {v, 3LL * v, -1}; a[v % 3u] += 1LL << 40; r = a[(v + 1) % 3u] >> 8;"),
    "floats": (True, "float a[4] = {v * 0.5f, 2, -0.0f, 1e30f}; a[v & 3] += 1; r = __float_as_int(a[v >> 1 & 3]);"),
    "backwards": (True, "int a[6] = {v, 1, 2, 3, 4, v}; r = a[5 - v % 6u] - a[(v + 2) % 5u + 1];"),
    "looping": (
        True,
        "int a[4] = {0, 0, 0, 1}; for (int k = 0; k < v % 9; k++) a[v + k & 3] += a[v * k & 3] + k; r = a[v & 3];",
    ),
    "narrow": (False, "short a[4] = {(short)v, 1, 2, 3}; r = a[v & 3];"),
    "large": (False, "int a[32]; for (int k = 0; k < 32; k++) a[k] = v * k; r = a[v & 31];"),
    "passed_on": (
        False,
        "int a[4] = {v, 1, 2, 3}, b[4] = {4, 5, 6, v}; int *p = v & 1 ? a : b; p[v >> 1 & 3]++; r = a[v & 3] + b[v & 3];",
    ),
    "seen": (False, 'int a[4] = {v, 1, 2, 3}; asm volatile("" :: "l"(a) : "memory"); r = a[v & 3];'),
}
HEAD = """
#define KERNEL(name, kind, ...) extern "C" __global__ void name(const kind *x, int *y) { \\
    int i = blockIdx.x * blockDim.x + threadIdx.x, r; kind v = x[i]; __VA_ARGS__ y[i] = r; }
"""
SOURCE = HEAD + "\n".join(f"KERNEL({name}, int, {body})" for name, (_, body) in BODIES.items())
WAVES = ("sinf", "cosf", "tanf")
SOURCE += "\n".join(f"\nKERNEL({name}s, float, r = __float_as_int({name}(v) * 2.0f);)" for name in WAVES)
N = 256


@pytest.fixture(scope="module")
def kernels(ptx_of):
    return jit.load(ptx_of(SOURCE)).kernels


def test_arrays_of_which_only_words_are_asked_for_are_registers(kernels):
    in_registers = {name for name in BODIES if not kernels[name].text.plain_layout.local_bytes}
    assert {name for name, (is_so, _) in BODIES.items() if is_so} == in_registers
    assert all(kernels[name].local_bytes for name in BODIES), "checkers see all of them"


@pytest.mark.parametrize("name", WAVES)
def test_threads_skip_together_what_is_done_for_large_numbers(kernels, name):
    assert "label %detour" in kernels[f"{name}s"].llvm_ir()
    assert "label %detour" not in kernels["chosen"].llvm_ir()


def both(kernel: jit.JitKernel, x: np.ndarray, *, optimized: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return what a kernel writes, without checkers and under one, for which arrays lie in memory."""
    whole = np.zeros(4 * 4096, np.uint8)
    memory = whole[-whole.ctypes.data % 4096 :][: 2 * 4096]
    memory[: x.nbytes] = x.view(np.uint8)
    params = (ctypes.c_uint64 * 2)(memory.ctypes.data, memory[4096:].ctypes.data)
    found = []
    for kinds in (Instrument.NONE, Instrument.MEMCHECK):
        shadow = jit.Shadow(memory.ctypes.data, memory.nbytes, kinds)
        shadow.allocated(memory.ctypes.data, memory.nbytes)
        kernel.launch(
            jit.LaunchShape((len(x) // 64, 1, 1), (64, 1, 1)),
            ctypes.addressof(params),
            jit.LaunchOptions(shadow=shadow if kinds else None, optimized=optimized),
        )
        found.append(memory[4096:].view(np.int32)[: len(x)].copy())
        memory[4096:] = 0
    return found[0], found[1]


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize("optimized", [True, False], ids=["optimized", "not optimized"])
def test_words_are_what_they_are_in_memory(kernels, name, optimized):
    plain, checked = both(kernels[name], np.arange(N, dtype=np.int32), optimized=optimized)
    np.testing.assert_array_equal(checked, plain)
    assert len(set(plain.tolist())) > 3


@pytest.mark.parametrize("name", WAVES)
@pytest.mark.parametrize("values", ["small", "large", "mixed", "edges"])
def test_waves_of_small_and_large_numbers_are_the_same_bits(kernels, name, values):
    random = np.random.default_rng(3)
    small, large = random.uniform(-9, 9, N), random.uniform(-1, 1, N) * 10.0 ** random.integers(5, 38, N)
    x = {"small": small, "large": large, "mixed": np.where(np.arange(N) % 37, small, large)}.get(values, small)
    x = x.astype(np.float32)
    if values == "edges":
        x[:8] = [0.0, -0.0, np.inf, -np.inf, np.nan, 105615.0, 105614.99, -105615.0]
        x[8:] = random.integers(0, 2**32, N - 8, dtype=np.uint32).view(np.float32)
    plain, checked = both(kernels[f"{name}s"], x, optimized=True)
    np.testing.assert_array_equal(checked, plain)
    with np.errstate(invalid="ignore"):
        expected = 2 * getattr(np, name[:-1])(x.astype(np.float64))
    kept = np.abs(expected) < 1e3
    np.testing.assert_allclose(plain.view(np.float32)[kept], expected[kept], rtol=1e-5, atol=1e-5)
