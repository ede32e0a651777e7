"""What LLVM is told of the host's processor, and of a kernel."""

from __future__ import annotations

import re

import pytest

from cudatool.ptx import Flow
from cudatool.sim import jit
from cudatool.sim.jit import native
from cudatool.sim.jit.gathers import gathers_pay
from cudatool.sim.jit.scheduler import UNPEELED


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
