"""When the code of kernels is optimized, and that it gives the same results before and after."""

from __future__ import annotations

import numpy as np

import cudatool as ct
from cudatool.code_cache import CodeCache
from cudatool.sim.jit import native
from cudatool.sim.optimizing import Optimizing

ENOUGH = 1 << 25  # instructions


def test_a_launch_of_much_work_is_optimized_at_once():
    assert not Optimizing(2).pays(ENOUGH // 2, 0)
    assert Optimizing(2).pays(ENOUGH // 2 + 1, 0)


def test_small_launches_are_optimized_when_they_are_much_work_together():
    kernel = Optimizing(2)
    assert [False] * 4 + [True] * 2 == [kernel.launched(ENOUGH // 8, 0) for _ in range(6)]


def test_rounds_of_loops_are_work():
    kernel = Optimizing(2)
    assert [False, False, True] == [kernel.launched(1, rounds) for rounds in (0, ENOUGH // 2 - 2, ENOUGH // 2 - 2)]


def test_asking_is_no_launch():
    kernel = Optimizing(2)
    assert not any(kernel.pays(ENOUGH // 2, 0) for _ in range(9))


SOURCE = """
extern "C" __global__ void spread(const float *in, float *out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i > 0 && i < n - 1) out[i] = in[i] / 3.0f + in[i - 1] * in[i + 1];
}
"""


def test_results_stay_the_same_when_code_is_optimized_between_launches(monkeypatch):
    made = []
    compile_text = native.compile_text

    def compiled(text: str, *, optimized: bool, **options: bool) -> bytes:
        made.append(optimized)
        return compile_text(text, optimized=optimized, **options)

    monkeypatch.setattr(native, "compile_text", compiled)
    monkeypatch.setattr(CodeCache, "get", lambda *_: None)
    kernel = ct.compile(SOURCE, "spread")
    given = np.random.default_rng(1).random(1 << 21, np.float32)
    x, few, many = ct.asarray(given), ct.zeros(given.size, np.float32), ct.zeros(given.size, np.float32)

    def results(blocks, out):
        kernel[(blocks, 128)](x, out, 128 * blocks)
        return out.get()[:1023].tobytes()

    small = results(8, few)
    assert [False] == made
    large = results(given.size // 128, many)
    assert [False, True] == made
    again = results(8, few)
    assert [False, True] == made
    assert small == again == large


def test_a_graph_that_is_launched_again_and_again_comes_to_optimized_code(monkeypatch):
    kernel = ct.compile(SOURCE, "spread")
    x, out = ct.ones(1 << 16, np.float32), ct.zeros(1 << 16, np.float32)
    kernel[(512, 128)](x, out, x.size)
    ct.synchronize()
    counted: list[bool] = []
    launched = Optimizing.launched
    monkeypatch.setattr(Optimizing, "launched", lambda *each: counted.append(launched(*each)))
    graph = ct.CUDAGraph()
    with ct.graph(graph):
        kernel[(512, 128)](x, out, x.size)
    for _ in range(40):
        graph.replay()
    ct.synchronize()
    assert 40 == len(counted)
    assert counted == sorted(counted), "once it is optimized, it stays so"
    assert not counted[0]
    assert counted[-1]
