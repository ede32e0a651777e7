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


# JAX takes three quarters of the card otherwise, which other tests share.
ENVIRONMENT = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}


def sanitized(tmp_path: Path, program: str) -> tuple[int, dict, str]:
    (tmp_path / "program.py").write_text(program)
    command = [sys.executable, "-m", "cudatool", "sanitize", "--device", "cuda", "--json", "--format", "junit=x.xml"]
    done = subprocess.run(
        [*command, "program.py"],
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
