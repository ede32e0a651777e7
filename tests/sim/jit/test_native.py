"""What LLVM is told of the host's processor, and of a kernel."""

from __future__ import annotations

import pytest

from cudatool.sim import jit
from cudatool.sim.jit import native
from cudatool.sim.jit.gathers import gathers_pay


@pytest.mark.parametrize(("name", "avoids"), [("znver4", True), ("sapphirerapids", False)])
def test_gathers_are_left_out_where_they_take_longer_than_loads(monkeypatch, name: str, avoids: bool) -> None:
    monkeypatch.setattr(native.llvm, "get_host_cpu_name", lambda: name)
    assert avoids == ("+prefer-no-gather" in native._features().split(","))


@pytest.mark.parametrize("name", ["znver4", "sapphirerapids"])
def test_gathers_are_made_for_kernels_that_they_pay_for(monkeypatch, name: str) -> None:
    monkeypatch.setattr(native.llvm, "get_host_cpu_name", lambda: name)
    assert "+prefer-no-gather" not in native._features(gathers=True).split(",")


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
    assert pays == gathers_pay(kernel.text.plain.instructions)
