"""When the code of kernels is optimized, and that it gives the same results before and after."""

from __future__ import annotations

import numpy as np
import pytest

import cudatool as ct
from cudatool.code_cache import CodeCache
from cudatool.sim import jit
from cudatool.sim.jit import kernel as jit_kernel
from cudatool.sim.jit import native
from cudatool.sim.optimizing import ENOUGH_IF_KEPT, LEAST, MANY, NOTED, Optimizing, enough

ENOUGH = 1 << 25  # instructions, in the tests of the rule


def test_a_launch_of_much_work_is_optimized_at_once():
    assert not Optimizing(2).pays(ENOUGH // 2, 0, 0, ENOUGH)
    assert Optimizing(2).pays(ENOUGH // 2 + 1, 0, 0, ENOUGH)


def test_small_launches_are_optimized_when_they_are_much_work_together():
    kernel = Optimizing(2)
    assert [False] * 4 + [True] * 2 == [kernel.launched(ENOUGH // 8, 0, 0, ENOUGH) for _ in range(6)]


def test_rounds_of_loops_are_work():
    kernel = Optimizing(2)
    assert [False, False, True] == [
        kernel.launched(1, rounds, 0, ENOUGH) for rounds in (0, ENOUGH // 2 - 2, ENOUGH // 2 - 2)
    ]


def test_a_launch_of_few_threads_that_took_long_is_work():
    kernel = Optimizing(2)
    assert [False, False, True] == [kernel.launched(1, 0, spent, ENOUGH) for spent in (0, ENOUGH, ENOUGH + 1)]


def test_asking_is_no_launch():
    kernel = Optimizing(2)
    assert not any(kernel.pays(ENOUGH // 2, 0, 0, ENOUGH) for _ in range(9))


@pytest.mark.parametrize(("instructions", "counted"), [(1, LEAST), (LEAST, LEAST), (LEAST + 1, LEAST + 1), (999, 999)])
def test_the_longer_a_kernel_is_the_more_work_is_enough(instructions, counted):
    assert MANY * counted == enough(instructions, is_kept=False)
    assert ENOUGH_IF_KEPT == enough(instructions, is_kept=True)


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
    given = np.random.default_rng(1).random(1 << 23, np.float32)
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


def test_what_an_earlier_process_has_optimized_is_optimized_sooner(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDATOOL_CACHE_DIR", str(tmp_path))
    ptx, cache = ct.compile(SOURCE, "spread")._ptx()[0], CodeCache("native")

    def kernel():
        return jit.load(ptx, cache=cache).kernels["spread"]

    first = kernel()
    first.prepare(optimized=False)
    assert kernel().enough() > ENOUGH_IF_KEPT, "only made without"
    first.prepare(optimized=True)
    assert first.enough() == kernel().enough() == ENOUGH_IF_KEPT
    assert kernel().enough(jit.Instrument.MEMCHECK) > ENOUGH_IF_KEPT, "that is other code"


@pytest.mark.parametrize("how", ["threads", "rounds", "spent"])
def test_launches_that_are_part_of_what_is_enough_are_known(how):
    part = ENOUGH // NOTED
    kernel = Optimizing(2)
    kernel.launched(part // 2 - (how != "threads"), 0, 0, ENOUGH)
    given = {"threads": (0, 0), "rounds": (1, 0), "spent": (0, part)}[how]
    assert not kernel.is_part(*given, ENOUGH)
    kernel.launched(1 if how == "threads" else 0, 0, 0, ENOUGH)
    assert kernel.is_part(given[0] + (how == "rounds"), given[1] + (how == "spent"), ENOUGH)


def test_what_was_much_work_in_an_earlier_process_is_optimized_sooner(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDATOOL_CACHE_DIR", str(tmp_path))
    ptx, cache = ct.compile(SOURCE, "spread")._ptx()[0], CodeCache("native")

    def kernel():
        return jit.load(ptx, cache=cache).kernels["spread"]

    first = kernel()
    assert first.enough() > ENOUGH_IF_KEPT
    first.note_work()
    assert kernel().enough() == ENOUGH_IF_KEPT < first.enough(), "not in this process, whose launches have begun"
    assert kernel().enough(jit.Instrument.MEMCHECK) > ENOUGH_IF_KEPT, "that is other code"


@pytest.mark.parametrize(("blocks", "launches", "is_noted"), [(64, 1, False), (1 << 13, 1, True), (1 << 10, 9, True)])
def test_launches_that_nearly_were_enough_are_noted(monkeypatch, blocks, launches, is_noted):
    noted: list[str] = []
    monkeypatch.setattr(jit_kernel.JitKernel, "note_work", lambda kernel, *_: noted.append(kernel.name))
    monkeypatch.setattr(jit_kernel, "enough", lambda instructions, **_: enough(instructions, is_kept=False))
    name = f"spread{blocks}"
    kernel = ct.compile(SOURCE.replace("spread", name), name)
    x = ct.ones(blocks * 128, np.float32)
    out = ct.zeros(blocks * 128, np.float32)
    for _ in range(launches):
        kernel[(blocks, 128)](x, out, x.size)
    ct.synchronize()
    assert is_noted == (name in noted)


@pytest.mark.parametrize("body", ["*out = n;", "for (int i = 0; i < n; i++) out[i & 1] += i;"], ids=["", "loop"])
def test_launches_of_one_thread_are_optimized_when_they_took_long_together(body, monkeypatch):
    monkeypatch.setattr(jit_kernel, "enough", lambda *_, **__: 20_000)
    begin = Optimizing.__init__
    monkeypatch.setattr(Optimizing, "__init__", lambda new, instructions: begin(new, 0))  # the time alone counts
    counted: list[bool] = []
    launched = Optimizing.launched
    monkeypatch.setattr(Optimizing, "launched", lambda *each: counted.append(launched(*each)))
    kernel = ct.compile(f'extern "C" __global__ void one(int *out, int n) {{ {body} }}', "one")
    out = ct.zeros(2, np.int32)
    for _ in range(1000):  # of 80 ns or more
        kernel[(1, 1)](out, 1)
    ct.synchronize()
    assert not counted[0]
    assert counted[-1]


def test_a_graph_that_is_launched_again_and_again_comes_to_optimized_code(monkeypatch):
    kernel = ct.compile(SOURCE, "spread")
    x, out = ct.ones(1 << 19, np.float32), ct.zeros(1 << 19, np.float32)
    kernel[(4096, 128)](x, out, x.size)
    ct.synchronize()
    counted: list[bool] = []
    launched = Optimizing.launched
    monkeypatch.setattr(Optimizing, "launched", lambda *each: counted.append(launched(*each)))
    graph = ct.CUDAGraph()
    with ct.graph(graph):
        kernel[(4096, 128)](x, out, x.size)
    for _ in range(40):
        graph.replay()
    ct.synchronize()
    assert 40 == len(counted)
    assert counted == sorted(counted), "once it is optimized, it stays so"
    assert not counted[0]
    assert counted[-1]
