"""What `sanitize` says on a GPU of programs whose work it does not see: never that they are clean."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cudatool._driver import gpu_names

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not gpu_names(), reason="no NVIDIA GPU answers")]

PROGRAMS = {
    "cupy": """
import cupy
x = cupy.arange(1000, dtype=cupy.float32)
assert 499500 == float((x * 1).sum())
""",
    "jax": """
import jax.numpy as jnp
assert 499500 == float(jnp.arange(1000, dtype=jnp.float32).sum())
""",
    "numba": """
import numpy as np
from numba import cuda
@cuda.jit
def double(x):
    i = cuda.grid(1)
    if i < x.size:
        x[i] *= 2
x = cuda.to_device(np.ones(100, np.float32))
double[1, 128](x)
assert 200 == x.copy_to_host().sum()
""",
    "cuda.core": """
from cuda.core import Device
device = Device()
device.set_current()
stream = device.create_stream()
buffer = device.memory_resource.allocate(1024, stream=stream)
buffer.fill(b"1", stream=stream)
buffer.close(stream)
stream.sync()
""",
}
WITH_PYTORCH = """
import torch
x = torch.zeros(1000, device="cuda")
import cupy
y = cupy.asarray(x)
y += 1
torch.cuda.synchronize()
x += 1
torch.cuda.synchronize()
"""
WITH_TRITON = """
import torch, triton, triton.language as tl
@triton.jit
def add_one(x, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + i, tl.load(x + i, mask=i < n) + 1, mask=i < n)
x = torch.zeros(1 << 16, device="cuda")
torch.cuda.synchronize()
first, second = torch.cuda.Stream(), torch.cuda.Stream()
with torch.cuda.stream(first):
    add_one[(64,)](x, x.numel(), BLOCK=1024)
second.wait_stream(first)
with torch.cuda.stream(second):
    add_one[(64,)](x, x.numel(), BLOCK=1024)
torch.cuda.synchronize()
assert float(x.sum()) == 2 << 16
"""
# A kernel fails, and the program goes on as if nothing had happened.
FAILING = {
    "cudatool": """
import numpy as np, cudatool as ct
bad = ct.compile('extern "C" __global__ void bad(int* x) { x[0] = 1; __trap(); }', "bad")
x = ct.zeros(4, np.int32)
ct.synchronize()
bad[(1, 1)](x)
try:
    ct.synchronize()
except ct.errors.CudaError:
    pass
""",
    "cupy": """
import cupy as cp
bad = cp.RawKernel('extern "C" __global__ void bad(int* x) { x[1ll << 40] = 1; }', "bad")
x = cp.zeros(4, cp.int32)
cp.cuda.Device().synchronize()
bad((1,), (1,), (x,))
try:
    cp.cuda.Device().synchronize()
except cp.cuda.runtime.CUDARuntimeError:
    pass
""",
    "torch": """
import torch
x = torch.zeros(4, device="cuda")
torch.cuda.synchronize()
bad = torch.tensor([1 << 40], device="cuda")
try:
    print(float(x[bad]))
except Exception:
    pass
""",
}
GREEN_CONTEXT = """
import sys
from cuda.bindings import driver
def ok(result):
    assert int(result[0]) == 0, result
    return result[1] if len(result) == 2 else result[1:]
ok(driver.cuInit(0))
ok(driver.cuCtxSetCurrent(ok(driver.cuDevicePrimaryCtxRetain(0))))
units = ok(driver.cuDeviceGetDevResource(0, driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM))
description = ok(driver.cuDevResourceGenerateDesc([units], 1))
green = ok(driver.cuGreenCtxCreate(description, 0, driver.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM))
stream = ok(driver.cuGreenCtxStreamCreate(green, 1, 0))
memory = ok(driver.cuMemAlloc(1 << 20))
ok(driver.cuMemsetD8Async(memory, 1, 1 << 20, stream))
ok(driver.cuMemsetD8Async(memory, 2, 1 << 20, 0))
ok(driver.cuStreamSynchronize(stream))
ok(driver.cuStreamDestroy(stream))
ok(driver.cuGreenCtxDestroy(green))
ok(driver.cuDevicePrimaryCtxReset(0))
"""
# Each is right if there is an argument.
GRAPHS_OF_OTHERS = {
    "triton": """
import sys
import torch, triton, triton.language as tl
@triton.jit
def add_one(x, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + i, tl.load(x + i, mask=i < n) + 1, mask=i < n)
x, y = torch.zeros(1 << 16, device="cuda"), torch.zeros(1 << 16, device="cuda")
add_one[(64,)](x, x.numel(), BLOCK=1024)
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    y.add_(1)
    add_one[(64,)](x, x.numel(), BLOCK=1024)
torch.cuda.synchronize()
first, second = torch.cuda.Stream(), torch.cuda.Stream()
with torch.cuda.stream(first):
    graph.replay()
if sys.argv[1:]:
    second.wait_stream(first)
with torch.cuda.stream(second):
    add_one[(64,)](x, x.numel(), BLOCK=1024)
torch.cuda.synchronize()
""",
    "cupy": """
import sys
import cupy as cp
kernel = cp.RawKernel('extern "C" __global__ void add(int* x, int n) '
                      '{ int i = blockIdx.x * blockDim.x + threadIdx.x; if (i < n) x[i] += 1; }', "add")
x = cp.zeros(1 << 20, cp.int32)
kernel((4096,), (256,), (x, x.size))
cp.cuda.Device().synchronize()
first, second = cp.cuda.Stream(non_blocking=True), cp.cuda.Stream(non_blocking=True)
with first:
    first.begin_capture()
    kernel((4096,), (256,), (x, x.size))
    kernel((4096,), (256,), (x, x.size))
    graph = first.end_capture()
for _ in range(3):
    graph.launch(first)
if sys.argv[1:]:
    second.wait_event(first.record())
with second:
    kernel((4096,), (256,), (x, x.size))
cp.cuda.Device().synchronize()
assert sys.argv[1:] == [] or int(x[5]) == 8
""",
    "cuda.core": """
import sys
from cuda.core import Device, LaunchConfig, Program, ProgramOptions, launch
device = Device()
device.set_current()
source = 'extern "C" __global__ void add(int* x) { x[threadIdx.x] += 1; }'
arch = "".join(map(str, device.compute_capability))
options = ProgramOptions(arch=f"sm_{arch}")
kernel = Program(source, "c++", options=options).compile("ptx").get_kernel("add")
config = LaunchConfig(grid=1, block=64)
first, second = device.create_stream(), device.create_stream()
memory = device.memory_resource.allocate(256, stream=first)
memory.fill(0, stream=first)
launch(first, config, kernel, memory)
device.sync()
builder = device.create_graph_builder().begin_building()
left, right = builder.split(2)
launch(left, config, kernel, memory)
if not sys.argv[1:]:
    launch(right, config, kernel, memory)
builder = type(builder).join(left, right)
if sys.argv[1:]:
    launch(builder, config, kernel, memory)
graph = builder.end_building().complete()
graph.launch(first)
if sys.argv[1:]:
    second.wait(first)
launch(second, config, kernel, memory)
device.sync()
""",
}
RELEASED_GRAPH = """
import torch
first, second, third = (torch.zeros(1 << 16, device="cuda") for _ in range(3))
torch.cuda.synchronize()
def captured(tensor):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tensor.add_(1)
    return graph
one, two = captured(first), captured(second)
del one
three = captured(third)
torch.cuda.synchronize()
with torch.cuda.stream(torch.cuda.Stream()):
    two.replay()
with torch.cuda.stream(torch.cuda.Stream()):
    second.mul_(2)
torch.cuda.synchronize()
"""
COMPILED_TO_GRAPHS = """
import torch
model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.GELU(), torch.nn.Linear(256, 256)).cuda()
compiled = torch.compile(model, mode="reduce-overhead")
x = torch.randn(64, 256, device="cuda")
with torch.no_grad():
    for _ in range(5):
        torch.compiler.cudagraph_mark_step_begin()
        compiled(x)
torch.cuda.synchronize()
"""
# Rows of a matrix of 64 bytes each, which two streams write: the same, or others.
ROWS = """
import sys
from cuda.bindings import driver
def ok(result):
    assert int(result[0]) == 0, result
    return result[1] if len(result) == 2 else result[1:]
ok(driver.cuInit(0))
ok(driver.cuCtxSetCurrent(ok(driver.cuDevicePrimaryCtxRetain(0))))
first, second = ok(driver.cuStreamCreate(1)), ok(driver.cuStreamCreate(1))
memory, source = ok(driver.cuMemAlloc(64 * 64)), ok(driver.cuMemAlloc(64 * 64))
ok(driver.cuMemsetD8(memory, 0, 64 * 64))
ok(driver.cuMemsetD8(source, 1, 64 * 64))
ok(driver.cuCtxSynchronize())
copy = driver.CUDA_MEMCPY2D()
copy.srcMemoryType = copy.dstMemoryType = driver.CUmemorytype.CU_MEMORYTYPE_DEVICE
copy.srcDevice, copy.srcPitch, copy.dstDevice, copy.dstPitch = source, 64, memory, 64
copy.WidthInBytes, copy.Height = 32, 64
ok(driver.cuMemcpy2DAsync(copy, first))
ok(driver.cuMemsetD2D32Async(int(memory) + (32 if sys.argv[1:] else 28), 64, 7, 8, 64, second))
box = driver.CUDA_MEMCPY3D()
box.srcMemoryType = box.dstMemoryType = driver.CUmemorytype.CU_MEMORYTYPE_DEVICE
box.srcDevice, box.srcPitch, box.srcHeight = source, 64, 32
box.dstDevice, box.dstPitch, box.dstHeight = memory, 64, 32
box.WidthInBytes, box.Height, box.Depth = 32, 32, 2
ok(driver.cuMemcpy3DAsync(box, first))
ok(driver.cuCtxSynchronize())
"""


# JAX takes three quarters of the card otherwise, which other tests share.
ENVIRONMENT = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}


def sanitized(tmp_path: Path, program: str, *arguments: str) -> tuple[int, dict, str]:
    (tmp_path / "program.py").write_text(program)
    command = [sys.executable, "-m", "cudatool", "sanitize", "--device", "cuda", "--json", "--format", "junit=x.xml"]
    done = subprocess.run(
        [*command, "program.py", *arguments],
        cwd=tmp_path,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout), done.stderr


@pytest.mark.parametrize("library", PROGRAMS)
def test_a_program_of_another_library_is_not_called_clean(tmp_path: Path, library: str) -> None:
    if importlib.util.find_spec(library.partition(".")[0]) is None:
        pytest.skip(f"{library} is not installed")
    plain = subprocess.run(
        [sys.executable, "-c", PROGRAMS[library]], env=ENVIRONMENT, capture_output=True, text=True, check=False
    )
    if plain.returncode:
        pytest.skip(f"{library} does not work here by itself: {plain.stderr.splitlines()[-1]}")
    status, report, stderr = sanitized(tmp_path, PROGRAMS[library])
    assert (0, "partly-checked") == (status, report["outcome"]), stderr
    unknown = [gap for gap in report["gaps"] if gap["kind"] == "launches"]
    assert bool(unknown) == (library == "jax"), report["gaps"]  # XLA's machine code has no PTX
    assert all(gap["names"] for gap in unknown)
    assert "<skipped" in (tmp_path / "x.xml").read_text()


def test_what_another_library_does_beside_pytorch_is_checked(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("cupy")
    status, report, stderr = sanitized(tmp_path, WITH_PYTORCH)
    assert (0, "partly-checked") == (status, report["outcome"]), stderr
    assert ["device-checks"] == [gap["kind"] for gap in report["gaps"]]
    assert not report["findings"] + report["possible"] and report["operations"] >= 3


def test_calls_of_one_thread_are_not_those_of_two_though_two_sources_tell_of_them(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("triton")
    status, report, stderr = sanitized(tmp_path, WITH_TRITON)
    assert (0, "partly-checked") == (status, report["outcome"]), stderr
    assert not report["findings"] + report["possible"] and report["operations"] >= 3
    assert "threads" not in {gap["kind"] for gap in report["gaps"]}


@pytest.mark.parametrize("library", FAILING)
def test_a_kernel_that_failed_is_a_finding_though_the_program_does_not_look(tmp_path: Path, library: str) -> None:
    pytest.importorskip(library)
    status, report, stderr = sanitized(tmp_path, FAILING[library])
    (found,) = report["findings"]
    assert (1, "kernel-error") == (status, found["kind"]), stderr
    if library != "torch":  # which has launched more
        assert "kernel bad" == found["operation"]
    assert any("work after CUDA_ERROR_" in name for gap in report["gaps"] for name in gap["names"])


def test_work_of_a_green_context_does_not_wait_for_the_default_stream_and_a_reset_is_told(tmp_path: Path) -> None:
    status, report, stderr = sanitized(tmp_path, GREEN_CONTEXT)
    assert (1, ["race-waw"]) == (status, [one["kind"] for one in report["findings"]]), stderr
    command = [sys.executable, "-m", "cudatool", "run", "--device", "cuda", "-o", "t.ctrace", "program.py"]
    done = subprocess.run(command, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0 and "device 0 was reset" in done.stderr, done.stderr


@pytest.mark.parametrize("is_right", [False, True])
@pytest.mark.parametrize("library", GRAPHS_OF_OTHERS)
def test_nodes_of_a_graph_that_another_library_captured_are_checked(
    tmp_path: Path, library: str, is_right: bool
) -> None:
    if importlib.util.find_spec(library.partition(".")[0]) is None:
        pytest.skip(f"{library} is not installed")
    status, report, stderr = sanitized(tmp_path, GRAPHS_OF_OTHERS[library], *["right"] * is_right)
    assert (0, "partly-checked") == (status, report["outcome"]), stderr
    assert bool(report["possible"]) != is_right and not report["findings"], stderr
    known = {"device-checks", "child-processes"}  # the latter are compilers
    assert known >= {gap["kind"] for gap in report["gaps"]}, report["gaps"]


def test_a_graph_is_not_taken_for_one_that_was_made_after_another_was_released(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    status, report, stderr = sanitized(tmp_path, RELEASED_GRAPH)
    assert status == 1 and report["findings"], stderr


def test_compiled_code_that_runs_as_graphs_is_right(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    status, report, stderr = sanitized(tmp_path, COMPILED_TO_GRAPHS)
    assert (0, "partly-checked") == (status, report["outcome"]), stderr
    assert not report["findings"] + report["possible"], stderr
    assert "launches" not in {gap["kind"] for gap in report["gaps"]}, report["gaps"]


@pytest.mark.parametrize("is_right", [False, True])
def test_copies_and_fills_of_rows_touch_their_rows(tmp_path: Path, is_right: bool) -> None:
    status, report, stderr = sanitized(tmp_path, ROWS, *["right"] * is_right)
    expected = [] if is_right else ["race-waw"] * 2
    assert (bool(expected), expected) == (status, [one["kind"] for one in report["findings"]]), stderr
    assert ["device-checks"] == [gap["kind"] for gap in report["gaps"]], report["gaps"]
