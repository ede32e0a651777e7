"""Witnesses of races that the software device recorded: what is found, and what is honestly not."""

from __future__ import annotations

import json
import struct
from typing import Any

import pytest
from warm_process import run_python

# Each case is the body of a function; all run in one process, each with a recording of its own.
CASES = {
    "raw": """
        x, y = new(), new()
        ct.synchronize()
        with ct.stream(a): put[G](x, 2.0)
        with ct.stream(b): add[G](x, y)
        ct.synchronize()
        y.get()
    """,
    "war": """
        x, y = new(), new()
        ct.synchronize()
        with ct.stream(a): add[G](x, y)
        with ct.stream(b): put[G](x, 3.0)
        ct.synchronize()
        y.get()
    """,
    "waw": """
        x = new()
        ct.synchronize()
        with ct.stream(a): put[G](x, 2.0)
        with ct.stream(b): put[G](x, 3.0)
        ct.synchronize()
        x.get()
    """,
    "waw that is never read": """
        x = new()
        ct.synchronize()
        with ct.stream(a): put[G](x, 2.0)
        with ct.stream(b): put[G](x, 3.0)
    """,
    "raw in managed memory": """
        allocated = driver.cuMemAllocManaged
        x, y = (int(allocated(4096, driver.CUmemAttach_flags.CU_MEM_ATTACH_GLOBAL)[1]) for _ in range(2))
        assert x + 4096 == y
        with ct.stream(a): put[1, 1024](np.uint64(x), 2.0)
        with ct.stream(b): add[1, 1024](np.uint64(x), np.uint64(y))
        ct.synchronize()
    """,
    "waw in memory that lives": """
        global kept
        kept, scratch = new(), new()
        ct.synchronize()
        with ct.stream(a): put[G](scratch, 2.0); put[G](kept, 2.0)
        with ct.stream(b): put[G](scratch, 3.0); add[G](scratch, kept)
    """,
    "reuse": """
        y = new()
        ct.synchronize()
        with ct.stream(a):
            x = new()
            put[G](x, 2.0)
        b.wait_stream(a)
        with ct.stream(b): add[G](x, y)
        del x
        with ct.stream(a):
            x = new()
            put[G](x, 5.0)
        ct.synchronize()
        y.get()
    """,
    "same value": """
        x = new()
        ct.synchronize()
        with ct.stream(a): put[G](x, 2.0)
        with ct.stream(b): put[G](x, 2.0)
        ct.synchronize()
        x.get()
    """,
    "overwritten before anybody looks": """
        x = new()
        ct.synchronize()
        with ct.stream(a): put[G](x, 2.0)
        with ct.stream(b): put[G](x, 3.0)
        ct.synchronize()
        put[G](x, 4.0)
        ct.synchronize()
        x.get()
    """,
    "not a number": """
        x = new()
        ct.synchronize()
        with ct.stream(a): put[G](x, float("nan"))
        with ct.stream(b): put[G](x, float("nan"))
        ct.synchronize()
        x.get()
    """,
    "downstream": """
        x, y, z = new(), new(), new()
        ct.synchronize()
        with ct.stream(a): put[G](x, 2.0)
        with ct.stream(b): add[G](x, y)
        ct.synchronize()
        total[G](y, z)
        put[G](x, 0.0)
        put[G](y, 0.0)
        z.get()
    """,
    "copy from the host": """
        x = new()
        ct.synchronize()
        with ct.stream(a): x.copy_(ct.pin_memory(np.full(N, 7, np.float32)), non_blocking=True)
        with ct.stream(b): put[G](x, 3.0)
        ct.synchronize()
        x.get()
    """,
    "two clocks": """
        x, y = new(), new()
        ct.synchronize()
        with ct.stream(a): tick[1, 1](x)
        with ct.stream(b): add[G](x, y)
        ct.synchronize()
        y.get()
    """,
    "matrix product": """
        x, w = ct.zeros((8, 8), np.float32), ct.zeros((8, 8), np.float32)
        w.fill_(1)
        ct.synchronize()
        with ct.stream(a): put[G](x, 2.0)
        with ct.stream(b): y = ct.matmul(x, w)
        ct.synchronize()
        y.get()
    """,
    "host overwrites the source": """
        x, source = new(), ct.empty_pinned(N, np.float32)
        ct.synchronize()
        source[:] = 1
        with ct.stream(a): x.copy_(source, non_blocking=True)
        host(source, WRITE)
        source[:] = 2
        ct.synchronize()
        x.get()
    """,
    "host reads too early": """
        x, target = new(), ct.empty_pinned(N, np.float32)
        target[:] = 9
        put[G](x, 4.0)
        ct.synchronize()
        with ct.stream(a): x.get(out=target, blocking=False)
        host(target, READ)
        ct.synchronize()
    """,
    "host function reads too early": """
        x, target = new(), ct.empty_pinned(N, np.float32)
        target[:] = 9
        put[G](x, 4.0)
        ct.synchronize()
        with ct.stream(a): x.get(out=target, blocking=False)
        call_back(b, lambda: host(target, READ))
        ct.synchronize()
    """,
    "host function writes too late": """
        x, source = new(), ct.empty_pinned(N, np.float32)
        source[:] = 1
        ct.synchronize()
        def prepare():
            host(source, WRITE)
            source[:] = 2
        call_back(a, prepare)
        with ct.stream(b): x.copy_(source, non_blocking=True)
        ct.synchronize()
        x.get()
    """,
    "two sources from the host": """
        x, y, source = new(), new(), ct.empty_pinned(N, np.float32)
        ct.synchronize()
        source[:] = 5
        with ct.stream(a): x.copy_(source, non_blocking=True)
        with ct.stream(b): y.copy_(source, non_blocking=True); put[G](x, 5.0)
        ct.synchronize()
        x.get(), y.get()
    """,
    "between pinned": """
        x, y, pinned = new(), new(), ct.empty_pinned(N, np.float32)
        pinned[:] = 8
        put[G](x, 4.0)
        ct.synchronize()
        with ct.stream(a): x.get(out=pinned, blocking=False)
        with ct.stream(b): y.copy_(pinned, non_blocking=True)
        ct.synchronize()
        y.get()
    """,
    "graph and stream": """
        x, y = new(), new()
        ct.synchronize()
        stream = core.Device().create_stream()
        builder = stream.create_graph_builder().begin_building()
        core.launch(builder, core.LaunchConfig(grid=1, block=N), put.core, np.uint64(x.data_ptr()), np.float32(2))
        builder.end_building().complete().launch(stream)
        with ct.stream(b): add[G](x, y)
        ct.synchronize()
        y.get()
    """,
    "nodes of one graph": """
        x, y = new(), new()
        ct.synchronize()
        config, count = core.LaunchConfig(grid=1, block=N), np.uint64
        stream = core.Device().create_stream()
        left, right = stream.create_graph_builder().begin_building().split(2)
        core.launch(left, config, put.core, count(x.data_ptr()), np.float32(2))
        core.launch(right, config, add.core, count(x.data_ptr()), count(y.data_ptr()))
        graph = left.join(left, right).end_building().complete()
        graph.launch(stream)
        stream.sync()
        y.get()
    """,
    "only the third time": """
        x, y = new(), new()
        ct.synchronize()
        for value in (0.0, 0.0, 3.0):
            with ct.stream(a): put[G](x, value)
            with ct.stream(b): add[G](x, y)
            ct.synchronize()
        y.get()
    """,
    "one order fails": """
        table, y = ct.zeros(1, np.int64), new()
        ct.synchronize()
        with ct.stream(a): table.fill_(y.data_ptr())
        with ct.stream(b): through[1, 1](table)
        ct.synchronize()
        y.get()
    """,
    "function of the host": """
        x = new()
        ct.synchronize()
        with ct.stream(a): put[G](x, 2.0)
        call_back(a)
        with ct.stream(b): put[G](x, 3.0)
        ct.synchronize()
        x.get()
    """,
    "heap": """
        x = new()
        ct.synchronize()
        with ct.stream(a): heap[1, 1](x)
        with ct.stream(b): put[G](x, 3.0)
    """,
    "in place": """
        x, pinned = new(), ct.empty_pinned(N, np.float32)
        pinned[:] = 9
        put[G](x, 4.0)
        ct.synchronize()
        with ct.stream(a): add[G](x, np.uint64(pinned.ctypes.data))
        a.synchronize()
        with ct.stream(a): put[G](x, 5.0)
        with ct.stream(b): add[G](np.uint64(pinned.ctypes.data), x)
        ct.synchronize()
        x.get()
    """,
}
_RUNNER = """
import ctypes, json, sys, tempfile, textwrap
import numpy as np
from cuda import core
from cuda.bindings import driver
import cudatool as ct
from cudatool.runtime import host_function
from cudatool.recording import record
from cudatool.sanitize import check, with_witnesses
from cudatool.sanitize.report.text import render_json
from cudatool.sim.observe.tape import Tape
from cudatool.trace import hooks
from cudatool.trace.events import Kind
from cudatool.trace.reader import read

SOURCE = '''
extern "C" __global__ void put(float *x, float value) { x[threadIdx.x] = value; }
extern "C" __global__ void add(const float *x, float *y) { y[threadIdx.x] += x[threadIdx.x]; }
extern "C" __global__ void total(const float *x, float *y) { atomicAdd(y, x[threadIdx.x]); }
extern "C" __global__ void through(float **x) { **x = 1; }
extern "C" __global__ void heap(float *x) { float *y = (float *)malloc(4); *y = 2; x[0] = *y; free(y); }
extern "C" __global__ void tick(float *x) { *(long long *)x = clock64(); }
'''
N, G = 64, (1, 64)
names = ("put", "add", "total", "tick", "through", "heap")
put, add, total, tick, through, heap = (ct.compile(SOURCE, name) for name in names)
READ, WRITE = 1, 2

def host(array, mode):
    hooks.emit(Kind.HOST_ACCESS, address=array.ctypes.data, size=array.nbytes, flags=mode)

callbacks = []
def call_back(stream, function=lambda: None):
    callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: function())
    callbacks.append(callback)
    address = ctypes.cast(callback, ctypes.c_void_p).value
    driver.cuLaunchHostFunc(stream.cuda_stream, driver.CUhostFn(address), 0)

host_function.repeatable = True
a, b = ct.Stream(), ct.Stream()
new = lambda: ct.zeros(N, np.float32)
results = {}
given = json.loads(sys.argv[1])
for name, body in given["cases"].items():
    tape = Tape(**given["tape"])
    tape.again[host_function.address] = host_function.repeat
    with tempfile.TemporaryDirectory() as folder:
        with record(folder + "/t.ctrace", device="sim", measure_accesses=True, tape=tape):
            scope = {}
            exec("def case():\\n" + textwrap.indent(textwrap.dedent(body), "    "), globals(), scope)
            scope["case"]()
        trace = read(folder + "/t.ctrace")
    results[name] = json.loads(render_json(with_witnesses(check(trace), trace, tape, budget_s=given["budget_s"])))
json.dump(results, sys.stdout)
"""


def run_cases(cases: dict[str, str], device: str = "sim", budget_s: float = 60, **tape: int) -> dict[str, Any]:
    """Return the report on each case, as JSON has it. Other arguments are the tape's."""
    request = json.dumps({"cases": cases, "budget_s": budget_s, "tape": tape})
    done = run_python(_RUNNER, request, environment={"CUDATOOL_DEVICE": device})
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


@pytest.fixture(scope="module")
def reports() -> dict[str, Any]:
    return run_cases(CASES)


@pytest.fixture(scope="module")
def reports_of_lifo() -> dict[str, Any]:
    """The same under a schedule that runs what was enqueued last first, so that the run itself is the other order."""
    cases = ("raw", "waw", "reuse", "downstream", "host overwrites the source", "between pinned")
    return run_cases({name: CASES[name] for name in cases}, "sim:schedule=lifo")


def only_finding(report: dict[str, Any]) -> dict[str, Any]:
    (finding,) = report["findings"]
    return dict(finding)


def floats(finding: dict[str, Any]) -> list[tuple[float, ...]]:
    witness = finding["witness"]
    held = (bytes.fromhex(witness[name]) for name in ("bytes_a", "bytes_b"))
    return [struct.unpack(f"<{len(data) // 4}f", data) for data in held]


def pair(finding: dict[str, Any], order: str) -> list[int]:
    return [s["record"] for s in finding["witness"][order] if s["record"] in finding["witness"]["exchanged"]]


@pytest.mark.parametrize(
    ("case", "kind", "first", "second"),
    [
        ("raw", "race-raw", 2.0, 0.0),
        ("war", "race-war", 0.0, 3.0),
        ("waw", "race-waw", 3.0, 2.0),
        ("reuse", "reuse", 2.0, 0.0),
        ("copy from the host", "race-waw", 3.0, 7.0),
    ],
)
def test_race_is_proven_by_two_orders_that_copy_other_bytes_to_the_host(reports, case, kind, first, second):
    finding = only_finding(reports[case])
    assert finding["kind"] == kind
    assert floats(finding) == [(first,) * 4, (second,) * 4]
    assert finding["witness"]["observed_at"].startswith("what cuMemcpyDtoHAsync (")
    assert finding["witness"]["observed_at"].endswith("copies to the host")
    assert finding["no_witness"] == ""


@pytest.mark.parametrize(
    ("case", "first", "second"),
    [
        ("raw", 2.0, 0.0),
        ("waw", 3.0, 2.0),
        ("reuse", 2.0, 0.0),
        ("downstream", 128.0, 0.0),
        ("host overwrites the source", 1.0, 2.0),
        ("between pinned", 4.0, 8.0),
    ],
)
def test_schedule_of_the_run_changes_nothing(reports, reports_of_lifo, case, first, second):
    for report in (reports[case], reports_of_lifo[case]):
        assert [values[0] for values in floats(only_finding(report))] == [first, second]


def test_the_two_sides_change_places_between_the_orders(reports):
    finding = only_finding(reports["raw"])
    sides = [finding["first"]["record"], finding["second"]["record"]]
    assert pair(finding, "order_a") == sides
    assert pair(finding, "order_b") == sides[::-1]


def test_memory_that_is_never_copied_is_compared_at_the_end(reports):
    finding = only_finding(reports["waw that is never read"])
    seen = finding["witness"]["observed_at"]
    assert seen.startswith("what the memory allocated at <string>:")
    assert seen.endswith(" holds in the end, which nothing copied to the host; it was freed by then")
    assert finding["witness"]["address"] == finding["start"]
    assert floats(finding) == [(3.0,) * 4, (2.0,) * 4]


def test_every_allocation_of_memory_side_by_side_is_looked_at(reports):
    finding = only_finding(reports["raw in managed memory"])
    assert floats(finding) == [(2.0,) * 4, (0.0,) * 4]


def test_memory_that_lives_is_looked_at_before_what_was_freed(reports):
    for finding in reports["waw in memory that lives"]["findings"]:
        assert finding["witness"]["observed_at"].endswith("holds in the end, which nothing copied to the host")


def test_a_difference_may_show_only_in_what_later_work_makes_of_it(reports):
    finding = only_finding(reports["downstream"])
    assert [values[0] for values in floats(finding)] == [128.0, 0.0]
    assert finding["witness"]["address"] != finding["start"]


def test_matrix_product_is_computed_again(reports):
    finding = only_finding(reports["matrix product"])
    assert [values[0] for values in floats(finding)] == [16.0, 0.0]


def test_what_the_host_says_that_it_writes_changes_places_too(reports):
    finding = only_finding(reports["host overwrites the source"])
    assert finding["kind"] == "race-host"
    assert floats(finding) == [(1.0,) * 4, (2.0,) * 4]


def test_what_a_host_function_says_that_it_writes_changes_places(reports):
    finding = only_finding(reports["host function writes too late"])
    assert floats(finding) == [(2.0,) * 4, (1.0,) * 4]


@pytest.mark.parametrize("case", ["host reads too early", "host function reads too early"])
def test_what_the_host_reads_is_seen(reports, case):
    finding = only_finding(reports[case])
    assert finding["witness"]["observed_at"].startswith("what the host reads (")
    assert floats(finding) == [(4.0,) * 4, (9.0,) * 4]


def test_what_the_host_wrote_is_there_in_every_order(reports):
    """Two copies from one pinned buffer: an order in which the second one is first finds it filled as well."""
    finding = only_finding(reports["two sources from the host"])
    assert finding["kind"] == "race-waw"
    assert finding["no_witness"] == "2 replays with the two in either order gave the same bytes"


def test_graph_launch_changes_places_as_a_whole(reports):
    finding = only_finding(reports["graph and stream"])
    assert floats(finding) == [(2.0,) * 4, (0.0,) * 4]


def test_nodes_of_a_graph_that_no_edge_orders_change_places(reports):
    finding = only_finding(reports["nodes of one graph"])
    assert floats(finding) == [(2.0,) * 4, (0.0,) * 4]
    names = [[step["operation"] for step in finding["witness"][order]] for order in ("order_a", "order_b")]
    inside = [[name for name in order if name.endswith("of a graph")] for order in names]
    assert inside == [
        ["kernel put of a graph", "kernel add of a graph"],
        ["kernel add of a graph", "kernel put of a graph"],
    ]
    assert pair(finding, "order_b") == pair(finding, "order_a")[::-1]


def test_race_that_matters_only_later_in_a_loop_is_proven_there(reports):
    raw = next(finding for finding in reports["only the third time"]["findings"] if finding["kind"] == "race-raw")
    assert raw["count"] == 3
    assert floats(raw) == [(3.0,) * 4, (0.0,) * 4]
    assert raw["first"]["record"] not in raw["witness"]["exchanged"]


def test_order_that_fails_is_a_difference(reports):
    finding = next(f for f in reports["one order fails"]["findings"] if f["kind"] == "race-raw")
    assert finding["witness"]["observed_at"].startswith("that only one of them fails: through")
    assert (finding["witness"]["bytes_a"], finding["witness"]["bytes_b"]) == ("", "")


def test_kernel_uses_pinned_memory_in_place(reports):
    finding = only_finding(reports["in place"])
    assert floats(finding) == [(18.0,) * 4, (5.0,) * 4]  # 5 + 13, and 5 over 4 + 13


def test_function_of_the_host_between_does_not_prevent_a_witness(reports):
    finding = only_finding(reports["function of the host"])
    assert floats(finding) == [(3.0,) * 4, (2.0,) * 4]


def test_what_cannot_be_replayed_is_named(reports):
    finding = only_finding(reports["heap"])
    assert finding["no_witness"] == "kernel heap uses the device's heap"


@pytest.mark.parametrize("case", ["same value", "overwritten before anybody looks", "not a number"])
def test_race_without_effect_has_no_witness_and_says_so(reports, case):
    finding = only_finding(reports[case])
    assert finding["witness"] is None
    assert finding["no_witness"] == "2 replays with the two in either order gave the same bytes"


def test_results_that_differ_by_themselves_prove_nothing(reports):
    finding = only_finding(reports["two clocks"])
    assert finding["witness"] is None
    assert "cannot be trusted" in finding["no_witness"]


def test_full_tape_is_said_to_be_full():
    case = {"copy": CASES["copy from the host"]}
    finding = only_finding(run_cases(case, limit=100)["copy"])
    assert finding["no_witness"] == "the tape is full: the host gave the device more than 100 bytes"


def test_search_ends_with_its_budget():
    finding = only_finding(run_cases({"raw": CASES["raw"]}, budget_s=1e-9)["raw"])
    assert finding["witness"] is None
    assert finding["no_witness"] == "none was found in the time allowed, by 0 replays"
