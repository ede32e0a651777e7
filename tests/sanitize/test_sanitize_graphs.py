"""Races between graphs and the work beside them."""

from __future__ import annotations

import json

import pytest
from warm_process import COMMAND_LINE, run_python

_PROGRAM = '''
import sys
from cuda.core import Device, LaunchConfig, ObjectCode, launch
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
device = Device()
device.set_current()
first, second = device.create_stream(), device.create_stream()
memory = device.memory_resource.allocate(64, stream=first)
first.sync()
kernel, config = ObjectCode.from_ptx(PTX).get_kernel("one"), LaunchConfig(grid=1, block=1)
builder = device.create_graph_builder().begin_building()
left, right = builder.split(2)
launch(left, config, kernel, memory)
launch(right, config, kernel, int(memory.handle) + 32)
graph = type(builder).join(left, right).end_building().complete()
graph.launch(first)
if sys.argv[1] != "race":
    second.wait(first)
launch(second, config, kernel, int(memory.handle) + 32)
if sys.argv[1] == "beyond":
    builder = device.create_graph_builder().begin_building()
    launch(builder, config, kernel, int(memory.handle) + 64)
    builder.end_building().complete().launch(second)  # here
device.sync()
'''


_LAST = "    builder.end_building().complete().launch(second)  # here"


def sanitize(folder, argument, *options):
    (folder / "program.py").write_text(_PROGRAM)
    words = ["--device", "sim", *options, "--json", "program.py", argument]
    done = run_python(COMMAND_LINE, "sanitize", *words, folder=folder)
    report = json.loads(done.stdout)
    assert done.returncode == bool(report["findings"] + report["on_device"]), done.stderr
    return report


def test_kernel_of_a_graph_that_leaves_its_memory_is_reported_at_the_launch_of_the_graph(tmp_path):
    report = sanitize(tmp_path, "beyond", "--checks", "memcheck")
    (finding,) = report["on_device"]
    line = 1 + _PROGRAM.splitlines().index(_LAST)
    assert ("out-of-bounds", "kernel one of a graph") == (finding["kind"], finding["operation"])
    assert [line] == [frame["line"] for frame in finding["stack"]]


@pytest.mark.parametrize(("argument", "expected"), [("wait", []), ("race", ["race-waw"])])
def test_kernel_beside_a_graph_races_with_its_nodes_unless_it_waits(tmp_path, argument, expected):
    report = sanitize(tmp_path, argument)
    assert expected == [finding["kind"] for finding in report["findings"]]


_SWITCHED = """
import sys
from cuda.bindings import driver
def ok(result):
    assert not result[0], result[0]
    return result[1] if len(result) == 2 else None
from cuda.core import Device
device = Device()
device.set_current()
context = ok(driver.cuCtxGetCurrent())
streams = [ok(driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING)) for _ in range(2)]
memory = ok(driver.cuMemAlloc(64))
graph = ok(driver.cuGraphCreate(0))
fill = driver.CUDA_MEMSET_NODE_PARAMS()
fill.dst, fill.elementSize, fill.width, fill.height = int(memory), 1, 64, 1
node = ok(driver.cuGraphAddMemsetNode(graph, None, 0, fill, context))
executable = ok(driver.cuGraphInstantiate(graph, 0))
for is_on in map(int, sys.argv[1].split(",")):
    ok(driver.cuGraphNodeSetEnabled(executable, node, is_on))
ok(driver.cuGraphLaunch(executable, streams[0]))
ok(driver.cuMemsetD8Async(memory, 1, 64, streams[1]))
ok(driver.cuCtxSynchronize())
"""


@pytest.mark.parametrize(("switches", "expected"), [("0", []), ("0,1", ["race-waw"])])
def test_graph_whose_only_node_is_off_touches_nothing_and_is_checked(tmp_path, switches, expected):
    (tmp_path / "program.py").write_text(_SWITCHED)
    done = run_python(COMMAND_LINE, "sanitize", "--device", "sim", "--json", "program.py", switches, folder=tmp_path)
    report = json.loads(done.stdout)
    assert (expected, []) == ([finding["kind"] for finding in report["findings"]], report["gaps"])
