"""What a trace says of captured work and of graphs that are launched."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from cudatool.analyze.execution import kernels, operations
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
    done = subprocess.run([sys.executable, "-c", _PROGRAM], cwd=folder, capture_output=True, text=True, timeout=120)
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
