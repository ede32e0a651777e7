"""What a recording on a GPU has of programs that know nothing of cudatool: memory, streams, kernels, by CUPTI."""

from __future__ import annotations

import importlib.util
import os
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from gpu_recordings import CUPY, JAX, record

from cudatool._driver import gpu_names
from cudatool.trace import reader
from cudatool.trace.events import Kind
from cudatool.trace.lifetimes import blocks, segments, timeline
from cudatool.trace.model import Ending

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not gpu_names(), reason="no NVIDIA GPU answers")]

ARRAY = """
from cuda.bindings import driver
def ok(result):
    assert int(result[0]) == 0, result
    return result[1] if len(result) == 2 else result[1:]
ok(driver.cuInit(0))
ok(driver.cuCtxSetCurrent(ok(driver.cuDevicePrimaryCtxRetain(0))))
flat, solid = driver.CUDA_ARRAY_DESCRIPTOR(), driver.CUDA_ARRAY3D_DESCRIPTOR()
for kind in (flat, solid):
    kind.Width, kind.Height, kind.NumChannels, kind.Format = 1024, 512, 1, driver.CUarray_format.CU_AD_FORMAT_FLOAT
for array in (ok(driver.cuArrayCreate(flat)), ok(driver.cuArray3DCreate(solid))):
    ok(driver.cuArrayDestroy(array))
ok(driver.cuMipmappedArrayDestroy(ok(driver.cuMipmappedArrayCreate(solid, 2))))
"""
CUDA_CORE = """
import numpy as np
from cuda.core import Device, LaunchConfig, Program, ProgramOptions, launch
device = Device()
device.set_current()
stream = device.create_stream()
source = 'extern "C" __global__ void add(float* x) { x[blockIdx.x * blockDim.x + threadIdx.x] += 1; }'
kernel = Program(source, "c++", ProgramOptions(arch=f"sm_{device.arch}")).compile("cubin").get_kernel("add")
buffer = device.allocate(1 << 20, stream=stream)
for _ in range(7):
    launch(stream, LaunchConfig(grid=1024, block=256), kernel, buffer)
stream.sync()
buffer.close(stream)
stream.sync()
"""
TORCH = """
import torch
x = torch.randn(1024, 1024, device="cuda")
for _ in range(20):
    x = (x @ x).tanh()
torch.cuda.synchronize()
"""
GRAPH = """
import cupy as cp
stream = cp.cuda.Stream(non_blocking=True)
x = cp.zeros(1 << 20, cp.float32)
with stream:
    x += 1
    stream.begin_capture()
    x += 1
    x *= 2
    graph = stream.end_capture()
    for _ in range(5):
        graph.launch()
    stream.synchronize()
"""


def names(trace, kind: Kind) -> list[str]:
    return [trace.names[index] for index in trace.of_kind(kind)["name"].tolist()]


def libraries(trace) -> dict[str, int]:
    """Return the bytes taken from the driver by the innermost frame's function."""
    found: dict[str, int] = {}
    for row in trace.of_kind(Kind.MEM_ALLOC):
        stack = trace.stacks[int(row["stack"])]
        inner = trace.frames[stack[0]].function if len(stack) else ""
        found[inner] = found.get(inner, 0) + int(row["size"])
    return found


def test_cupy_program_has_its_memory_kernels_and_order(tmp_path):
    trace, done = record(tmp_path, CUPY, "cupy")
    assert trace.ending is Ending.CLOSED
    assert sum("add" in name for name in names(trace, Kind.KERNEL_LAUNCH)) == 100
    ran = trace.of_kind(Kind.EXECUTION)
    assert np.all(ran["aux1"] >= ran["aux0"]) and len(ran) >= 101
    assert np.all(np.diff(trace.records["time"]) >= 0)
    assert len(trace.of_kind(Kind.STREAM_WAIT_EVENT)) == len(trace.of_kind(Kind.EVENT_RECORD)) == 1
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("pool ")]
    # CuPy's pool, to the byte: what Python code took.
    pool = sum(size for name, size in libraries(trace).items() if not name.startswith("lib"))
    assert pool == int(line.split()[1])
    assert libraries(trace).get("libcublas.so.13", 0) > 1 << 20
    assert any("program.py" in frame.file for frame in trace.frames)


def test_arrays_of_textures_are_memory(tmp_path):
    trace, _ = record(tmp_path, ARRAY)
    made = [row for row in trace.of_kind(Kind.MEM_ALLOC) if "Array" in trace.names[int(row["name"])]]
    whole = 1024 * 512 * 4
    assert [whole, whole, whole + whole // 4] == [int(row["size"]) for row in made]
    freed = [row for row in trace.of_kind(Kind.MEM_FREE) if "Array" in trace.names[int(row["name"])]]
    assert [int(row["address"]) for row in made] == [int(row["address"]) for row in freed]


def test_launches_have_the_stack_of_their_call_on_request(tmp_path):
    trace, _ = record(tmp_path, CUDA_CORE, "", "--level", "launches")
    launches, ran = trace.of_kind(Kind.KERNEL_LAUNCH), trace.of_kind(Kind.EXECUTION)
    assert names(trace, Kind.KERNEL_LAUNCH) == ["add"] * 7
    assert sorted(launches["correlation"].tolist()) == sorted(ran["correlation"].tolist())
    frames = [trace.frames[trace.stacks[int(row["stack"])][0]] for row in launches]
    assert {"program.py"} == {os.path.basename(frame.file) for frame in frames}
    assert len({frame.line for frame in frames}) == 1


def test_jax_program_has_memory_that_is_mapped(tmp_path):
    trace, _ = record(tmp_path, JAX, "jax")
    assert "cuMemMap" in names(trace, Kind.MEM_ALLOC)
    assert len(trace.of_kind(Kind.KERNEL_LAUNCH)) > 2
    assert timeline(trace, blocks(trace), segments(trace)).reserved.max() >= 4 << 20


def test_cuda_core_program_is_recorded_to_the_launch(tmp_path):
    trace, _ = record(tmp_path, CUDA_CORE)
    assert names(trace, Kind.KERNEL_LAUNCH) == ["add"] * 7
    assert [int(size) for size in trace.of_kind(Kind.MEM_ALLOC)["size"]] == [1 << 20]
    launches, ran = trace.of_kind(Kind.KERNEL_LAUNCH), trace.of_kind(Kind.EXECUTION)
    assert sorted(launches["correlation"].tolist()) == sorted(ran["correlation"].tolist())
    (created,) = [row for row in trace.of_kind(Kind.STREAM_CREATE) if row["address"] > 2]
    assert set(launches["stream"].tolist()) == {int(created["stream"])}


@pytest.mark.parametrize(("level", "of_a_launch"), [("memory", 0), ("kernels", 1), ("graph-nodes", 2)])
def test_what_graph_launches_ran_as_the_level_says(tmp_path, level, of_a_launch):
    trace, _ = record(tmp_path, GRAPH, "cupy", "--level", level)
    launches = trace.of_kind(Kind.GRAPH_LAUNCH)["correlation"].tolist()
    ran = trace.of_kind(Kind.EXECUTION)
    assert len(launches) == 5
    assert [int(np.count_nonzero(ran["correlation"] == one)) for one in launches] == [of_a_launch] * 5
    assert (len(trace.of_kind(Kind.KERNEL_LAUNCH)) > 0) == (level != "memory")


OURS = """
import numpy as np
import cudatool as ct
x = ct.asarray(np.ones((512, 512), np.float32))
y = (x @ x) * 2 + 1
side = ct.Stream()
with ct.stream(side):
    side.wait_stream(ct.default_stream())
    z = y * 3
    graph = ct.CUDAGraph()
    with ct.graph(graph):
        w = (x @ x) * 2
for _ in range(5):
    graph.replay()
ct.synchronize()
print(float(z.get()[0, 0]))
"""


@pytest.mark.parametrize(("level", "of_a_replay"), [("kernels", 1), ("graph-nodes", 2)])
def test_work_of_our_runtime_has_the_times_at_which_it_ran(tmp_path, level, of_a_replay):
    trace, _ = record(tmp_path, OURS, "", "--level", level)
    ran = trace.of_kind(Kind.EXECUTION)
    assert np.all(ran["aux1"] >= ran["aux0"])
    for kind, captured in ((Kind.KERNEL_LAUNCH, 1), (Kind.GEMM, 1), (Kind.MEMCPY, 0)):
        calls = trace.of_kind(kind)
        own = [ran[ran["correlation"] == call["correlation"]] for call in calls]
        assert [len(executed) for executed in own].count(0) == captured
        assert all(set(e["stream"].tolist()) <= {int(call["stream"])} for e, call in zip(own, calls, strict=True))
    replays = trace.of_kind(Kind.GRAPH_LAUNCH)["correlation"].tolist()
    assert len(replays) == 5
    assert all(np.count_nonzero(ran["correlation"] == one) >= of_a_replay for one in replays)
    calls = {int(row["correlation"]) for kind in (Kind.KERNEL_LAUNCH, Kind.GEMM) for row in trace.of_kind(kind)}
    assert len(calls) == len(trace.of_kind(Kind.KERNEL_LAUNCH)) + len(trace.of_kind(Kind.GEMM))  # none is told twice


GRAPHS_FROM_BEFORE = """
import sys, cudatool, torch
level = sys.argv[1]
x = torch.zeros(1000, device="cuda")
torch.cuda.synchronize()

def captured():
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        graph.y = x * 2 + 1
    return graph

def recorded(name, *graphs):
    with cudatool.record(f"{name}.ctrace", device="cuda", level=level):
        for graph in graphs:
            graph.replay()
        torch.cuda.synchronize()

unlaunched, launched = captured(), captured()
launched.replay()
recorded("first", unlaunched, launched)
between = captured()
between.replay()
recorded("second", between, unlaunched)
"""


@pytest.mark.parametrize(("level", "of_a_launch"), [("memory", 0), ("kernels", 2), ("graph-nodes", 2), ("launches", 2)])
def test_graphs_that_exist_before_a_recording_can_be_launched_in_it(tmp_path, level, of_a_launch):
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed")
    (tmp_path / "program.py").write_text(GRAPHS_FROM_BEFORE)
    done = subprocess.run(
        [sys.executable, "program.py", level], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    for name in ("first", "second"):
        trace = reader.read(tmp_path / f"{name}.ctrace")
        launches = trace.of_kind(Kind.GRAPH_LAUNCH)["correlation"].tolist()
        ran = trace.of_kind(Kind.EXECUTION)
        assert [int(np.count_nonzero(ran["correlation"] == one)) for one in launches] == [of_a_launch] * 2
        assert trace.header["level"] == ("graph-nodes" if level == "kernels" else level)


def test_beside_pytorch_cublas_memory_is_named_and_segments_count_once(tmp_path):
    trace, _ = record(tmp_path, TORCH, "torch")
    segments = int(trace.of_kind(Kind.SEGMENT_ALLOC)["size"].sum())
    assert segments > 0
    taken = libraries(trace)
    assert not any("c10_cuda" in name for name in taken), taken
    assert len(trace.of_kind(Kind.KERNEL_LAUNCH)) >= 40


def test_a_second_recording_of_a_process_has_its_stacks_too(tmp_path):
    if importlib.util.find_spec("cupy") is None:
        pytest.skip("cupy is not installed")
    (tmp_path / "twice.py").write_text(
        "import cudatool, cupy as cp\n"
        "for name in 'ab':\n"
        "    with cudatool.record(f'{name}.ctrace', device='cuda'):\n"
        "        memory = cp.cuda.Memory(1 << 26)\n"
        "        cp.zeros(10).sum()\n"
    )
    subprocess.run([sys.executable, "twice.py"], cwd=tmp_path, check=True, timeout=120)
    for name in "ab":
        trace = reader.read(tmp_path / f"{name}.ctrace")
        taken = trace.of_kind(Kind.MEM_ALLOC)
        (big,) = [row for row in taken if row["size"] == 1 << 26 and not row["flags"]]
        assert [frame.line for frame in trace.stack(int(big["stack"])) if frame.file.endswith("twice.py")] == [4]
        assert len(trace.of_kind(Kind.KERNEL_LAUNCH)) >= 1


ALLOCATES = """
import time
from cuda.bindings import driver
driver.cuInit(0)
driver.cuCtxSetCurrent(driver.cuDevicePrimaryCtxRetain(0)[1])
for number in range(1, 1 << 20):
    assert driver.cuMemAlloc(4096 + number)[0] == 0
    print(number, time.monotonic_ns(), flush=True)
    time.sleep(0.002)
"""


@pytest.mark.parametrize("seed", range(20))
def test_after_a_kill_at_any_moment_the_trace_has_what_happened_until_shortly_before(tmp_path, seed):
    (tmp_path / "program.py").write_text(ALLOCATES)
    command = [sys.executable, "-m", "cudatool", "run", "--device", "cuda", "-o", "t.ctrace", "program.py"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        made = [process.stdout.readline()]
        time.sleep(random.Random(seed).uniform(0, 2))
        killed = time.monotonic_ns()
        os.kill(process.pid, signal.SIGKILL)
        made += process.stdout.read().splitlines()
    trace = reader.read(tmp_path / "t.ctrace")
    assert trace.ending is Ending.KILLED
    found = set(trace.of_kind(Kind.MEM_ALLOC)["size"].tolist())
    # The log is read ten times a second; sixteen processes may share the machine.
    due = [
        number for number, moment in (map(int, line.split()) for line in made[:-1]) if moment < killed - 1_000_000_000
    ]
    assert all(4096 + number in found for number in due), (len(due), len(found))


def test_without_libcupti_the_reason_is_said(tmp_path):
    (tmp_path / "hidden.py").write_text(
        "import sys\nimport cudatool.collect.cupti as cupti\ncupti.loaded = cupti._can_load = lambda _: False\n"
        "from cudatool.__main__ import main\nsys.argv = ['cudatool', 'run', '-o', 'u.ctrace', '-c', 'pass']\nmain()\n"
    )
    command = [sys.executable, "hidden.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert "is recorded: there is no libcupti.so: pip install nvidia-cuda-cupti" in done.stderr
    assert "pip install nvidia-cuda-cupti" in reader.read(tmp_path / "u.ctrace").header["cupti_error"]
