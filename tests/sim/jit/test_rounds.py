"""Code that is not optimized counts the rounds of its loops, in all forms in which threads go around them, and its time."""

from __future__ import annotations

import numpy as np
import pytest

from cudatool.sim import jit
from cudatool.sim.jit import kernel as jit_kernel

FORMS = {
    "each by itself": "while (i < limit[t]) i++;",
    "together": "for (; i < 9; i++) out[t] += in[i];",
    "with a barrier": "for (; i < 9; i++) __syncthreads();",
    "by rows": "for (i = t; i < 640; i += gridDim.x * blockDim.x) out[i] += in[i];",
    "by a jump": "do { switch (in[t] + i) { case 0: i += 1; break; case 7: i += 2; break; default: i++; } } while (i < 9);",
}


@pytest.fixture(params=FORMS)
def looping(request, ptx_of):
    source = f"""extern "C" __global__ void k(int *out, const int *in, const int *limit) {{
        int t = blockIdx.x * blockDim.x + threadIdx.x, i = 0;
        #pragma unroll 1
        {FORMS[request.param]}
        out[t] += i;
    }}"""
    return lambda: jit.load(ptx_of(source)).kernels["k"]


@pytest.mark.parametrize("threads", [1, 2])
def test_rounds_of_all_threads_are_counted(looping, launch, threads):
    kernel = looping()
    arrays = np.zeros(640, "i4"), np.zeros(640, "i4"), np.full(640, 9, "i4")
    launch(kernel, 1, 64, *arrays, optimized=False, threads=threads)
    once = kernel.rounds
    assert 7 * 64 <= once <= 10 * 64
    launch(kernel, 1, 64, *arrays, optimized=False, threads=threads)
    assert 2 * once == kernel.rounds


def test_optimized_code_counts_nothing(looping, launch):
    kernel = looping()
    launch(kernel, 1, 64, np.zeros(640, "i4"), np.zeros(640, "i4"), np.full(640, 9, "i4"), optimized=True)
    assert 0 == kernel.rounds


@pytest.mark.parametrize("options", [{}, {"threads": 2}, {"timeout_s": 60}], ids=["plain", "two threads", "watched"])
def test_the_time_of_code_that_is_not_optimized_is_added_up(looping, launch, options):
    kernel = looping()
    arrays = np.zeros(640, "i4"), np.zeros(640, "i4"), np.full(640, 9, "i4")
    launch(kernel, 2, 64, *arrays, optimized=False, **options)
    once = kernel.spent
    assert once > 0
    launch(kernel, 2, 64, *arrays, optimized=False, **options)
    twice = kernel.spent
    assert twice > once
    launch(kernel, 2, 64, *arrays, optimized=True, **options)
    assert twice == kernel.spent


def test_rounds_under_a_checker_are_counted(looping, launch):
    kernel = looping()
    memory = np.zeros(4096, "i4")
    first = -memory.ctypes.data % 4096 // 4
    arrays = memory[first : first + 640], memory[first + 640 : first + 1280], np.full(640, 9, "i4")
    shadow = jit.Shadow(memory[first:].ctypes.data, 8192, jit.Instrument.RACECHECK)
    launch(kernel, 1, 64, *arrays, optimized=False, shadow=shadow)
    assert 7 * 64 <= kernel.rounds <= 10 * 64


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("blocks", [1, 8])
def test_blocks_that_are_left_after_much_work_run_optimized_code(looping, launch, monkeypatch, threads, blocks):
    monkeypatch.setattr(jit_kernel, "enough", lambda *_, **__: 0)
    kernel, expected, out = looping(), np.zeros(640, "i4"), np.zeros(640, "i4")
    given = np.arange(640, dtype="i4") % 3, np.full(640, 9, "i4")
    launch(looping(), blocks, 64, expected, *given)
    launch(kernel, blocks, 64, out, *given, optimized=False, threads=threads)
    assert np.array_equal(expected, out)
    assert ({False, True} if blocks > 1 else {False}) == {variant.optimized for variant in kernel.translation.variants}
    assert 0 < kernel.rounds <= 10 * 64, "of one block"


def test_blocks_are_begun_in_code_that_is_not_optimized_until_they_were_much_work(looping, launch, monkeypatch):
    monkeypatch.setattr(jit_kernel, "enough", lambda *_, **__: 1 << 40)
    kernel = looping()
    launch(kernel, 8, 64, np.zeros(640, "i4"), np.zeros(640, "i4"), np.full(640, 9, "i4"), optimized=False)
    assert {False} == {variant.optimized for variant in kernel.translation.variants}
