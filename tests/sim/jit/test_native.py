"""What LLVM is told of the host's processor, and of a kernel."""

from __future__ import annotations

import re

import pytest

from cudatool.ptx import Flow
from cudatool.sim import jit
from cudatool.sim.jit import native
from cudatool.sim.jit.gathers import gathers_pay
from cudatool.sim.jit.scheduler import UNPEELED
from cudatool.sim.jit.translation import Variant


@pytest.mark.parametrize(
    ("name", "mitigation", "what", "avoids"),
    [
        ("znver4", "Not affected", "gather", True),
        ("znver4", "Not affected", "scatter", True),
        ("icelake-server", "Mitigation: Microcode", "gather", True),
        ("icelake-server", "Mitigation: Microcode (locked)", "gather", True),
        ("icelake-server", "Unknown: Dependent on hypervisor status", "gather", True),
        ("icelake-server", "", "gather", True),  # a kernel from before 2023, on any microcode
        ("icelake-server", "Mitigation: Microcode", "scatter", False),
        ("icelake-server", "Vulnerable: No microcode", "gather", False),
        ("rocketlake", "Not affected", "gather", False),  # a later processor, by a hypervisor's name
        ("sapphirerapids", "", "gather", False),
        ("sapphirerapids", "", "scatter", False),
    ],
)
def test_gathers_and_scatters_are_left_out_where_they_take_longer(monkeypatch, name, mitigation, avoids, what) -> None:
    monkeypatch.setattr(native.llvm, "get_host_cpu_name", lambda: name)
    monkeypatch.setattr(native, "gather_mitigation", lambda: mitigation)
    assert avoids == (f"+prefer-no-{what}" in native._features().split(","))


@pytest.mark.parametrize("name", ["znver4", "icelake-server", "sapphirerapids"])
def test_gathers_are_made_for_kernels_that_they_pay_for(monkeypatch, name: str) -> None:
    monkeypatch.setattr(native.llvm, "get_host_cpu_name", lambda: name)
    assert not {"+prefer-no-gather", "+prefer-no-scatter"} & set(native._features(gathers=True).split(","))


@pytest.mark.parametrize(
    ("features", "wide", "are_widest"),
    [
        ({"avx512f": True, "avx512fp16": True}, True, True),
        ({"avx512f": True, "avx512fp16": True}, False, False),
        ({"avx512f": True, "avx512fp16": False}, True, False),  # Ice Lake and before
        ({"avx2": True}, True, False),
    ],
)
def test_vectors_are_as_wide_as_they_can_be_where_that_slows_no_processor(monkeypatch, features, wide, are_widest):
    monkeypatch.setattr(native.llvm, "get_host_cpu_features", lambda: native.llvm.FeatureMap(features))
    assert are_widest == ("-prefer-256-bit" in native._features(wide=wide).split(","))


CHAINS = """
extern "C" __global__ void tile(const float *a, const float *b, float *c) {
    __shared__ float p[16][16], q[16][16];
    int x = threadIdx.x, y = threadIdx.y;
    p[y][x] = a[y * 16 + x], q[y][x] = b[y * 16 + x];
    __syncthreads();
    float sum = 0;
    for (int k = 0; k < 16; k++) sum += p[y][k] * q[k][x];
    c[y * 16 + x] = sum;
}
extern "C" __global__ void series(const float *x, float *y) {
    float v = x[threadIdx.x];
    y[threadIdx.x] = ((v * v + 1) * v + 2) / (v + 3) + 1 / v;
}
extern "C" __global__ void sums(const float *x, float *y) {
    __shared__ float s[256];
    s[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    y[threadIdx.x] = s[threadIdx.x] + s[255 - threadIdx.x];
}
"""


def test_kernels_that_compute_more_than_they_load_have_the_widest_vectors(ptx_of):
    kernels = jit.load(ptx_of(CHAINS)).kernels
    variant = Variant(jit.Instrument.NONE, optimized=True)
    assert {"tile", "series"} == {name for name, one in kernels.items() if one.translation.generate(variant).wide}


@pytest.mark.parametrize(
    ("result", "pays"),
    [
        ("x[at[t]]", False),
        ("x[at[t]] * x[at[t + 1]] + x[at[t + 2]]", False),
        ("x[at[t]] / x[at[t + 1]] + 3 / (2 + 1 / x[at[t]])", True),
        ("sqrtf(x[at[t]]) / 3 + 1 / x[at[t]]", True),
    ],
)
def test_gathers_pay_where_much_is_computed_for_each_load(ptx_of, result: str, pays: bool) -> None:
    source = f"""extern "C" __global__ void k(const float *x, const int *at, float *out) {{
        int t = threadIdx.x;
        out[t] = {result};
    }}"""
    kernel = jit.load(ptx_of(source)).kernels["k"]
    assert pays == gathers_pay(Flow(kernel.text.plain))


def test_loads_of_which_a_thread_does_one_count_as_one(ptx_of) -> None:
    source = """extern "C" __global__ void k(const float *x, const int *at, float *out) {
        int t = threadIdx.x, where = blockIdx.x;
        float v;
        switch (where) {
            case 0: v = x[at[t]] - x[at[t + 32]]; break;
            case 1: v = x[at[t + 1]] * 3; break;
            case 2: v = x[2 * at[t]] + 3; break;
            case 3: v = x[3 * at[t + 4]] / x[7]; break;
            default: v = x[at[7]];
        }
        out[t] = 1 / (v + 1 / (v + 2 / (v + 3)));
    }"""
    assert gathers_pay(Flow(jit.load(ptx_of(source)).kernels["k"].text.plain))


def test_no_round_of_a_loop_over_threads_is_peeled(ptx_of) -> None:
    source = """extern "C" __global__ void k(const float *x, float *out) {
        __shared__ float s[64];
        s[threadIdx.x] = x[threadIdx.x];
        __syncthreads();
        float before = threadIdx.x == 0 ? 0 : s[threadIdx.x - 1];
        out[threadIdx.x] = sqrtf(before) / s[threadIdx.x];
    }"""
    text = jit.load(ptx_of(source)).kernels["k"].llvm_ir()
    loops = re.findall(r"^!\d+ = distinct !\{(.*)\}$", text, re.MULTILINE)
    rows = [loop for loop in loops if UNPEELED in loop]
    assert 2 == len(rows)
    assert f'{UNPEELED} = !{{!"llvm.loop.peeled.count"' in text
