"""What a trace says of captured work and of graphs that are launched."""

from __future__ import annotations

import importlib
from pathlib import Path

import numpy as np
import pytest
from warm_process import run_python

from cudatool.collect import sim_graph_calls
from cudatool.overview.execution import kernels, operations
from cudatool.sim.abi import ENTRIES
from cudatool.trace.events import AccessFlag, Kind
from cudatool.trace.reader import read

_PROGRAM = '''
import cudatool as ct
PTX = b"""
.version 8.0
.target sm_90
.address_size 64
.visible .entry one(.param .u64 p)
{
    .reg .b64 %rd<2>;
    ld.param.u64 %rd1, [p];
    st.global.u32 [%rd1], 1;
    ret;
}
"""
with ct.record("t.ctrace", device="sim", measure_accesses=True):
    from cuda.core import Device, GraphMemoryResource, LaunchConfig, ObjectCode, launch
    device = Device()
    device.set_current()
    stream = device.create_stream()
    memory = device.memory_resource.allocate(64, stream=stream)
    copy = device.memory_resource.allocate(64, stream=stream)
    kernel = ObjectCode.from_ptx(PTX).get_kernel("one")
    builder = stream.create_graph_builder().begin_building()
    temporary = GraphMemoryResource(device).allocate(32, stream=builder)
    temporary.close(stream=builder)
    for _ in range(2):
        launch(builder, LaunchConfig(grid=1, block=1), kernel, memory)
    copy.copy_from(memory, stream=builder)
    builder.callback(lambda: None)
    graph = builder.end_building().complete()
    for _ in range(3):
        graph.launch(stream)
    stream.sync()
    print(int(memory.handle), int(copy.handle))
'''


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    folder: Path = tmp_path_factory.mktemp("graph")
    done = run_python(_PROGRAM, folder=folder)
    assert done.returncode == 0, done.stderr
    return read(folder / "t.ctrace"), [int(word) for word in done.stdout.split()]


def test_captured_work_is_no_work_until_its_graph_is_launched(recorded):
    trace, _ = recorded
    for kind in (Kind.KERNEL_LAUNCH, Kind.MEMCPY, Kind.HOST_FUNCTION):
        assert 0 == len(trace.of_kind(kind))
    (begin,), (end,) = trace.of_kind(Kind.GRAPH_CAPTURE_BEGIN), trace.of_kind(Kind.GRAPH_CAPTURE_END)
    assert begin["stream"] == end["stream"] != 0
    assert 0 != end["aux0"]
    assert 0 == len(trace.of_kind(Kind.WARNING))


def test_executions_of_all_nodes_belong_to_their_launch(recorded):
    trace, _ = recorded
    launches, ran = trace.of_kind(Kind.GRAPH_LAUNCH), trace.of_kind(Kind.EXECUTION)
    assert 3 == len(launches) == len(np.unique(launches["correlation"]))
    for launch in launches:
        own = ran[ran["correlation"] == launch["correlation"]]
        assert ["host node", "memcpy node", "one", "one"] == sorted(trace.names[int(name)] for name in own["name"])
        assert {launch["stream"]} == set(own["stream"])


def test_kernels_of_graphs_are_counted_as_launched(recorded):
    trace, _ = recorded
    (kernel,) = kernels(trace, operations(trace))
    assert ("one", 6) == (kernel.name, kernel.launches)
    assert kernel.time is not None and kernel.time > 0


def test_accesses_of_kernels_and_copies_belong_to_their_launch(recorded):
    trace, (memory, copy) = recorded
    touched = trace.of_kind(Kind.ACCESS)
    for launch in trace.of_kind(Kind.GRAPH_LAUNCH):
        own = touched[touched["correlation"] == launch["correlation"]]
        found = [(int(a["address"]), int(a["size"]), int(a["flags"])) for a in own]
        kernel = (memory, 4, int(AccessFlag.WRITE))
        assert sorted(
            [kernel, kernel, (memory, 64, int(AccessFlag.READ)), (copy, 64, int(AccessFlag.WRITE))]
        ) == sorted(found)


def test_memory_of_a_graph_is_allocated_and_freed_at_each_launch(recorded):
    trace, _ = recorded
    records = trace.records
    kinds = {Kind.MEM_ALLOC: "alloc", Kind.GRAPH_LAUNCH: "launch", Kind.MEM_FREE: "free"}
    named = [trace.names[int(record["name"])] for record in records]
    order = [
        (kinds[int(record["kind"])], int(record["size"]))
        for record, name in zip(records, named, strict=True)
        if record["kind"] in kinds and name == "cuGraphLaunch"
    ]
    assert [("alloc", 32), ("launch", 0), ("free", 32)] * 3 == order


def test_nodes_edges_and_pointers_are_told_once_when_a_graph_is_instantiated(recorded):
    trace, (memory, copy) = recorded
    (made,) = trace.of_kind(Kind.GRAPH_INSTANTIATE)
    (end,) = trace.of_kind(Kind.GRAPH_CAPTURE_END)
    assert {int(one["aux0"]) for one in trace.of_kind(Kind.GRAPH_LAUNCH)} == {int(made["aux0"])}
    assert int(end["aux0"]) == int(made["aux1"])
    nodes = trace.of_kind(Kind.GRAPH_NODE)
    names = ["mem alloc node", "mem free node", "one", "one", "memcpy node", "host node"]
    assert names == [trace.names[int(node["name"])] for node in nodes]
    assert [1, 2, 3, 4, 5, 6] == nodes["aux1"].tolist()
    edges = trace.of_kind(Kind.GRAPH_EDGE)
    assert [(1, 2), (2, 3), (3, 4), (4, 5), (5, 6)] == list(
        zip(edges["address"].tolist(), edges["aux1"].tolist(), strict=True)
    )
    pointers = trace.of_kind(Kind.GRAPH_POINTER)
    first, second, *others = [(int(one["aux1"]), int(one["address"]), int(one["size"])) for one in pointers]
    assert [(3, memory, 0), (4, memory, 0), (5, memory, 64), (5, copy, 64)] == others
    assert ((1, 32), (2, 32), first[1]) == ((first[0], first[2]), (second[0], second[2]), second[1])


def test_nodes_know_the_calls_that_captured_them(recorded):
    trace, _ = recorded
    added = trace.of_kind(Kind.GRAPH_NODE_ADDED)
    assert added["correlation"].tolist() == trace.of_kind(Kind.GRAPH_NODE)["correlation"].tolist()
    assert {int(trace.of_kind(Kind.GRAPH_CAPTURE_BEGIN)["stream"][0])} == set(added["stream"].tolist())
    first, second = added[2:4]
    assert first["stack"] == second["stack"] != 0
    assert set(added["correlation"].tolist()).isdisjoint(trace.of_kind(Kind.GRAPH_LAUNCH)["correlation"].tolist())


def test_accesses_of_a_launch_name_their_nodes(recorded):
    trace, _ = recorded
    touched = trace.of_kind(Kind.ACCESS)
    assert [3, 4, 5, 5] * 3 == touched["stream"].tolist()


_SHAPES = """
import ctypes
import cudatool as ct
with ct.record("t.ctrace", device="sim"):
    from cuda.bindings import driver
    def call(name, *arguments):
        error, *rest = getattr(driver, name)(*arguments)
        assert error == driver.CUresult.CUDA_SUCCESS, (name, error)
        return rest[0] if rest else None
    call("cuInit", 0)
    context = call("cuDevicePrimaryCtxRetain", call("cuDeviceGet", 0))
    call("cuCtxSetCurrent", context)
    memory = call("cuMemAlloc", 64)
    def fill(graph, value, *after):
        what = driver.CUDA_MEMSET_NODE_PARAMS()
        what.dst, what.value, what.elementSize, what.width, what.height = memory, value, 1, 64, 1
        return call("cuGraphAddMemsetNode", graph, list(after), len(after), what, context)
    inner = call("cuGraphCreate", 0)
    fill(inner, 1), fill(inner, 2)
    outer = call("cuGraphCreate", 0)
    first = fill(outer, 3)
    child = call("cuGraphAddChildGraphNode", outer, [first], 1, inner)
    last = fill(outer, 4, child)
    made = call("cuGraphInstantiate", outer, 0)
    call("cuGraphExecUpdate", made, outer)
"""


def test_edges_lead_into_child_graphs_and_updates_tell_the_nodes_again(tmp_path):
    done = run_python(_SHAPES, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    trace = read(tmp_path / "t.ctrace")
    edges = trace.of_kind(Kind.GRAPH_EDGE)
    # Nodes 1, 2 (the child graph) and its 3 and 4, and 5.
    assert [(1, 2), (1, 3), (1, 4), (2, 5), (3, 2), (4, 2)] == sorted(
        zip(edges["address"].tolist(), edges["aux1"].tolist(), strict=True)
    )
    assert 1 == len(trace.of_kind(Kind.GRAPH_UPDATE))
    assert 2 * [1, 2, 3, 4, 5] == trace.of_kind(Kind.GRAPH_NODE)["aux1"].tolist()
    added = trace.of_kind(Kind.GRAPH_NODE_ADDED)
    assert [0] * 5 == added["stream"].tolist()


_THREADS = """
import queue, threading
from concurrent.futures import ThreadPoolExecutor
import cudatool as ct
with ct.record("t.ctrace", device="sim", measure_accesses=True):
    event, work, seen = threading.Event(), queue.Queue(), []
    def other():
        event.wait()
        work.put(1)
    thread = threading.Thread(target=other)
    thread.start()
    event.set()
    work.get()
    thread.join()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(seen.append, 2).result()
wait = threading.Event.wait
assert "hand_overs" not in wait.__code__.co_filename
"""


def test_threads_that_hand_something_over_are_seen_to_do_so(tmp_path):
    done = run_python(_THREADS, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    trace = read(tmp_path / "t.ctrace")
    given: dict[int, set[int]] = {}
    taken: dict[int, set[int]] = {}
    for record in trace.records:
        if record["kind"] == Kind.HAND_OVER:
            given.setdefault(int(record["aux0"]), set()).add(int(record["thread"]))
        elif record["kind"] == Kind.TAKE_OVER:
            taken.setdefault(int(record["aux0"]), set()).add(int(record["thread"]))
    crossings = [item for item in given if taken.get(item, set()) - given[item] or given[item] - taken.get(item, set())]
    assert 5 <= len(crossings)  # start or join, event, queue, task, future


def test_each_call_that_sets_a_node_of_an_executable_graph_is_reported():
    importlib.import_module("cudatool.sim.api.graph_exec")
    setters = {name for name in ENTRIES if name.startswith("cuGraphExec") and "NodeSet" in name}
    assert setters
    assert setters - sim_graph_calls.REPORTS.keys() == set()
