"""What a trace of the software device says of graphs that our runtime captures: the same as of anybody else's."""

from __future__ import annotations

from pathlib import Path

import pytest
from warm_process import run_python

from cudatool.overview.execution import copies, kernels, operations
from cudatool.sanitize import check
from cudatool.trace.events import Kind
from cudatool.trace.model import Trace
from cudatool.trace.reader import read

_PROGRAM = """
import sys, cudatool as ct
n = 100
with ct.record("t.ctrace", device="sim", measure_accesses=True, checks=["memcheck"]):
    increase = ct.compile('''
        extern "C" __global__ void increase(const float *a, float *out, int n) {
            int i = blockIdx.x * blockDim.x + threadIdx.x;
            if (i < n) out[i] = a[i] + 1.0f;
        }''', "increase")
    a, b, out = ct.zeros(n), ct.zeros(n), ct.zeros(n)
    source = ct.zeros(n)
    side, eager, last = ct.Stream(), ct.Stream(), ct.Stream()
    ct.synchronize()
    graph = ct.CUDAGraph()
    with ct.graph(graph):
        main = ct.current_stream()
        increase[1, 128](source, a, n)
        side.wait_stream(main)
        with ct.stream(side):
            temporary = a.clone()
        if "missed" in sys.argv:
            with ct.stream(eager):
                increase[1, 128](a, out, n)
        if "unjoined" in sys.argv:
            increase[1, 128](source, a, n)
        main.wait_stream(side)
        increase[1, 128](temporary, b, n)
    ct.synchronize()
    if "external" in sys.argv:
        event, other = ct.Event(external=True), ct.CUDAGraph()
        with ct.graph(other):
            increase[1, 128](b, out, n)
            event.record()
        other.replay()
        event.wait(last)
        with ct.stream(last):
            increase[1, 128](out, out, n)
        ct.synchronize()
    if "drawing" in sys.argv:
        from cudatool.random import rand
        other = ct.CUDAGraph()
        with ct.graph(other):
            rand(n)
        for stream in (side, eager, side):  # each replay writes the generator's state where the kernel reads it
            with ct.stream(stream):
                other.replay()
        ct.synchronize()
    if "freed" in sys.argv:
        del source
    for _ in range(2):
        graph.replay()
    increase[1, 128](b, out, n)
    ct.synchronize()
"""


def recorded(folder: Path, *arguments: str) -> Trace:
    done = run_python(_PROGRAM, *arguments, folder=folder)
    assert done.returncode == 0, done.stderr
    return read(folder / "t.ctrace")


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    return recorded(tmp_path_factory.mktemp("graph"))


def test_nodes_and_edges_are_told(trace: Trace) -> None:
    (begin,), (end,), (made,) = (
        trace.of_kind(kind) for kind in (Kind.GRAPH_CAPTURE_BEGIN, Kind.GRAPH_CAPTURE_END, Kind.GRAPH_INSTANTIATE)
    )
    assert begin["stream"] == end["stream"] != 0
    assert end["aux0"] == made["aux1"] != 0
    assert [int(made["aux0"])] * 2 == trace.of_kind(Kind.GRAPH_LAUNCH)["aux0"].tolist()
    nodes, edges = trace.of_kind(Kind.GRAPH_NODE), trace.of_kind(Kind.GRAPH_EDGE)
    assert ["increase", "memcpy node", "increase"] == [trace.names[int(node["name"])] for node in nodes]
    assert [(1, 2), (1, 3), (2, 3)] == list(zip(edges["address"].tolist(), edges["aux1"].tolist(), strict=True))


def test_nodes_are_the_calls_that_captured_them(trace: Trace) -> None:
    calls = trace.records[[int(kind) in (Kind.KERNEL_LAUNCH, Kind.MEMCPY) for kind in trace.records["kind"]]]
    added = trace.of_kind(Kind.GRAPH_NODE_ADDED)
    assert added["correlation"].tolist() == trace.of_kind(Kind.GRAPH_NODE)["correlation"].tolist()
    captured = calls[[correlation in added["correlation"] for correlation in calls["correlation"]]]
    assert captured["stack"].tolist() == added["stack"].tolist()
    assert 0 not in added["stack"]


def test_captured_calls_are_not_counted_as_work(trace: Trace) -> None:
    ran = operations(trace)
    (kernel,) = kernels(trace, ran)
    assert ("increase", 2 * 2 + 1) == (kernel.name, kernel.launches)
    assert "device to device" not in [row.direction for row in copies(trace, ran)]


@pytest.mark.parametrize(
    ("defect", "expected"),
    [
        (None, []),
        ("missed", ["capture-missed"]),
        ("unjoined", ["race-war"]),
        ("freed", ["use-after-free"]),
        ("external", []),
        ("drawing", []),
    ],
)
def test_sanitizer_finds_what_is_wrong_with_a_capture(
    defect: str | None, expected: list[str], trace: Trace, tmp_path: Path
) -> None:
    report = check(trace if defect is None else recorded(tmp_path, defect))
    assert expected == [str(finding.kind) for finding in report.findings]
    assert ["use-after-free"] * (defect == "freed") == [finding.kind for finding in report.on_device]


_PRODUCTS = """
import cudatool as ct
a, b, c = ct.ones((64, 64)), ct.ones((64, 64)), ct.zeros((64, 64))
with ct.record("t.ctrace", device="sim"):
    for _ in range(4):
        ct.matmul(a, b, out=c)
    graph = ct.CUDAGraph()
    with ct.graph(graph):
        ct.matmul(a, b, out=c)
        ct.matmul(b, a, out=c)
    for _ in range(10):
        graph.replay()
    ct.synchronize()
"""


def test_products_that_graph_launches_ran_are_counted_with_their_time(tmp_path: Path) -> None:
    run_python(_PRODUCTS, folder=tmp_path).check_returncode()
    trace = read(tmp_path / "t.ctrace")
    (product,) = (kernel for kernel in kernels(trace, operations(trace)) if kernel.name == "sgemm")
    eager = trace.of_kind(Kind.GEMM)[:4]["correlation"].tolist()
    ran = trace.of_kind(Kind.EXECUTION)
    one = [int(row["aux1"]) - int(row["aux0"]) for row in ran if row["correlation"] in eager]
    assert product.launches == 24
    assert product.time == 24 * one[0]
