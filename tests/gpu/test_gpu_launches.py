"""What `sanitize` finds on a GPU in programs of any library: the order of their work, and what launches may touch."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from cudatool._driver import gpu_names

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not gpu_names(), reason="no NVIDIA GPU answers")]

# Each waits for the work of the other stream if it is called with an argument.
CUDA_CORE = """
import sys
import numpy as np
from cuda.core import Device, LaunchConfig, Program, ProgramOptions, launch
device = Device()
device.set_current()
one, two = device.create_stream(), device.create_stream()
source = r'''
extern "C" __global__ void fill(float* x, int n) { int i = blockIdx.x * blockDim.x + threadIdx.x; if (i < n) x[i] = i; }
extern "C" __global__ void sum(const float* x, float* out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) atomicAdd(out, x[i]);
}'''
module = Program(source, "c++", ProgramOptions(arch=f"sm_{device.arch}")).compile("KIND")
fill, total = module.get_kernel("fill"), module.get_kernel("sum")
x, out = device.allocate(1 << 16, stream=one), device.allocate(64, stream=one)
out.fill(np.uint8(0), stream=one)
one.sync()
config = LaunchConfig(grid=64, block=256)
launch(one, config, fill, x, np.int32(1 << 14))
if len(sys.argv) > 1:
    two.wait(one)
launch(two, config, total, x, out, np.int32(1 << 14))
two.sync()
one.sync()
x.close(one)
out.close(one)
one.sync()
"""
CUPY = """
import sys
import cupy as cp
one, two = cp.cuda.Stream(non_blocking=True), cp.cuda.Stream(non_blocking=True)
with one:
    x = cp.arange(1 << 16, dtype=cp.float32)
    x *= 2
if len(sys.argv) > 1:
    two.wait_event(one.record())
with two:
    y = x + 1
    z = y.sum()
two.synchronize()
one.synchronize()
assert float(z) > 0
"""
RAW = """
import sys
import cupy as cp
scale = cp.RawKernel('extern "C" __global__ void scale(float* x) { x[threadIdx.x] *= 2; }', "scale")
one, two = cp.cuda.Stream(non_blocking=True), cp.cuda.Stream(non_blocking=True)
x = cp.ones(256, cp.float32)
other = cp.ones(256, cp.float32)  # beside it in the pool's memory
cp.cuda.Device().synchronize()
with one:
    scale((1,), (256,), (x,))
if len(sys.argv) > 1:
    two.wait_event(one.record())
with two:
    scale((1,), (256,), (x,))
    scale((1,), (256,), (other,))
cp.cuda.Device().synchronize()
"""
NUMBA = """
import sys
import numpy as np
from numba import cuda
@cuda.jit
def double(x):
    i = cuda.grid(1)
    if i < x.size:
        x[i] *= 2
one, two = cuda.stream(), cuda.stream()
x = cuda.to_device(np.ones(100, np.float32))
cuda.synchronize()
double[1, 128, one](x)
if len(sys.argv) > 1:
    event = cuda.event()
    event.record(one)
    event.wait(two)
double[1, 128, two](x)
cuda.synchronize()
"""
# The same beside PyTorch, on its memory and its streams.
BESIDE_CUPY = """
import sys
import cupy as cp
import torch
one, two = torch.cuda.Stream(), cp.cuda.Stream(non_blocking=True)
x = torch.zeros(1 << 16, device="cuda")
view = cp.asarray(x)
torch.cuda.synchronize()
with torch.cuda.stream(one):
    x += 1
if len(sys.argv) > 1:
    event = cp.cuda.Event()
    event.record(cp.cuda.ExternalStream(one.cuda_stream))
    two.wait_event(event)
with two:
    y = view * 2
two.synchronize()
one.synchronize()
"""
BESIDE_TRITON = """
import sys
import torch
import triton
import triton.language as tl
@triton.jit
def double(x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, at < n) * 2, at < n)
one, two = torch.cuda.Stream(), torch.cuda.Stream()
x, out = torch.zeros(1 << 16, device="cuda"), torch.zeros(1 << 16, device="cuda")
torch.cuda.synchronize()
with torch.cuda.stream(one):
    x += 1
if len(sys.argv) > 1:
    two.wait_stream(one)
with torch.cuda.stream(two):
    double[(64,)](x, out, 1 << 16, BLOCK=1024)
torch.cuda.synchronize()
"""
BESIDE_CUDA_CORE = """
import sys
import torch
from cuda.core import Device, LaunchConfig, Program, ProgramOptions, launch
x = torch.zeros(1 << 14, device="cuda")
device = Device()
device.set_current()
source = 'extern "C" __global__ void fill(float* x) { x[blockIdx.x * blockDim.x + threadIdx.x] = 1; }'
fill = Program(source, "c++", ProgramOptions(arch=f"sm_{device.arch}")).compile("ptx").get_kernel("fill")
one, two = torch.cuda.Stream(), device.create_stream()
torch.cuda.synchronize()
with torch.cuda.stream(one):
    x += 1
if len(sys.argv) > 1:
    one.synchronize()
launch(two, LaunchConfig(grid=64, block=256), fill, x.data_ptr())
two.sync()
torch.cuda.synchronize()
"""
BESIDE_NUMBA = """
import sys
import torch
from numba import cuda
@cuda.jit
def double(x):
    i = cuda.grid(1)
    if i < x.size:
        x[i] *= 2
one, two = torch.cuda.Stream(), cuda.stream()
x = torch.zeros(100, device="cuda")
torch.cuda.synchronize()
with torch.cuda.stream(one):
    x += 1
if len(sys.argv) > 1:
    one.synchronize()
double[1, 128, two](cuda.as_cuda_array(x, sync=False))
cuda.synchronize()
"""
THREADS = """
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
import cupy as cp
x = cp.zeros(1 << 16, cp.float32)
cp.cuda.Device().synchronize()
def work(stream):
    with stream:
        x.__iadd__(1)
    if len(sys.argv) > 1:
        stream.synchronize()
streams = STREAMS
RUN
cp.cuda.Device().synchronize()
"""
_TWO = "[cp.cuda.Stream(non_blocking=True) for _ in range(2)]"
_STARTED = """
for stream in streams:
    thread = threading.Thread(target=work, args=(stream,))
    thread.start()
    thread.join()
"""
_POOL = """
with ThreadPoolExecutor(1) as pool:
    for stream in streams:
        pool.submit(work, stream).result()
"""
_PER_THREAD = "[cp.cuda.Stream.ptds] * 2"
PROGRAMS = {
    "cuda.core, cubin": (CUDA_CORE.replace("KIND", "cubin"), "launch(two, config, total"),
    "cuda.core, ptx": (CUDA_CORE.replace("KIND", "ptx"), "launch(two, config, total"),
    "cupy": (CUPY, "y = x + 1"),
    "cupy, RawKernel": (RAW, "scale((1,), (256,), (x,))"),
    "cupy, threads": (THREADS.replace("STREAMS", _TWO).replace("RUN", _STARTED), "x.__iadd__(1)"),
    "cupy, pool of threads": (THREADS.replace("STREAMS", _TWO).replace("RUN", _POOL), "x.__iadd__(1)"),
    "cupy, default streams": (THREADS.replace("STREAMS", _PER_THREAD).replace("RUN", _STARTED), "x.__iadd__(1)"),
    "numba": (NUMBA, "double[1, 128, two](x)"),
    "cupy, beside torch": (BESIDE_CUPY, "y = view * 2"),
    "triton, beside torch": (BESIDE_TRITON, "double[(64,)](x, out"),
    "cuda.core, beside torch": (BESIDE_CUDA_CORE, "launch(two"),
    "numba, beside torch": (BESIDE_NUMBA, "double[1, 128, two]("),
}
LIBRARIES = """
import cupy as cp
a = cp.random.rand(256, 256, dtype=cp.float32)
b = a @ a
c = cp.sort(b.ravel())[::2].copy()
d = cp.where(c > c.mean(), c, 0).sum()
assert float(d) > 0
"""


def sanitized(folder: Path, program: str, *arguments: str) -> tuple[int, dict, str]:
    (folder / "program.py").write_text(program)
    command = [sys.executable, "-m", "cudatool", "sanitize", "--device", "cuda", "--json", "program.py", *arguments]
    environment = os.environ | {"CUDATOOL_CACHE_DIR": str(folder / "cache")}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=250)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout), done.stderr


def needs(program: str, name: str) -> None:
    library = name.partition(",")[0].partition(".")[0]
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    with tempfile.TemporaryDirectory() as folder:  # Triton reads its kernels' source
        path = Path(folder) / "program.py"
        path.write_text(program)
        plain = subprocess.run([sys.executable, path, "wait"], capture_output=True, text=True)
    if plain.returncode:
        pytest.skip(f"{library} does not work here by itself: {plain.stderr.splitlines()[-1]}")


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_missing_wait_is_found_and_a_wait_is_enough(tmp_path, name):
    program, line = PROGRAMS[name]
    needs(program, name)
    number = 1 + next(at for at, text in enumerate(program.splitlines()) if text.strip().startswith(line))
    for _ in range(2):  # the second time with what compilers have kept
        _, report, stderr = sanitized(tmp_path, program)
        races = [one for one in report["possible"] if one["kind"].startswith("race")]
        assert races and not report["findings"], stderr
        stacks = [side["stack"] for one in races for side in (one["first"], one["second"])]
        # The program's innermost line: Triton's launcher lies above it.
        own = [[frame["line"] for frame in stack if frame["file"].endswith("program.py")] for stack in stacks]
        assert number in [lines[0] for lines in own if lines], (number, races)
    status, report, stderr = sanitized(tmp_path, program, "wait")
    assert (0, []) == (status, report["possible"] + report["findings"]), stderr
    assert [] == [gap for gap in report["gaps"] if gap["kind"] == "launches"]


def test_launches_of_libraries_whose_code_does_not_tell_are_counted_by_name(tmp_path):
    needs(LIBRARIES, "cupy")
    status, report, stderr = sanitized(tmp_path, LIBRARIES)
    assert (0, [], "partly-checked") == (status, report["possible"] + report["findings"], report["outcome"]), stderr
    (gap,) = [gap for gap in report["gaps"] if gap["kind"] == "launches"]
    assert 0 < gap["count"] < report["operations"] and any("gemm" in name for name in gap["names"])


GRAPHED = """
import torch
import triton
import triton.language as tl
@triton.jit
def double(x, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + at, tl.load(x + at, at < n) * 2, at < n)
x = torch.ones(1 << 16, device="cuda")
double[(64,)](x, 1 << 16, BLOCK=1024)
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    y = x + 1
    double[(64,)](x, 1 << 16, BLOCK=1024)
for _ in range(3):
    graph.replay()
torch.cuda.synchronize()
"""


def test_a_launch_captured_into_a_graph_of_pytorchs_is_checked(tmp_path):
    needs(GRAPHED, "triton")
    status, report, stderr = sanitized(tmp_path, GRAPHED)
    assert (0, [], "partly-checked") == (status, report["possible"] + report["findings"], report["outcome"]), stderr
    assert not {"unseen", "launches"} & {gap["kind"] for gap in report["gaps"]}, report["gaps"]


CUDNN = """
from cuda.core import Device, Program, ProgramOptions
device = Device()
device.set_current()
Program('extern "C" __global__ void one() {}', "c++", ProgramOptions(arch=f"sm_{device.arch}")).compile("cubin")
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
q = torch.randn(2, 4, 128, 64, device="cuda", dtype=torch.float16, requires_grad=True)
with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
    torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward()
print(bool(q.grad.isfinite().all()))
"""


def test_cudnn_compiles_in_a_program_whose_nvrtc_calls_are_watched(tmp_path):
    needs(CUDNN, "torch")
    status, _, stderr = sanitized(tmp_path, CUDNN)
    assert 0 == status, stderr
