"""Programs that know nothing of cudatool, and what a recording of them on a GPU has."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from cudatool.trace import reader

CUPY = """
import cupy as cp
a = cp.ones((1024, 1024), cp.float32)
stream = cp.cuda.Stream(non_blocking=True)
event = cp.cuda.Event()
with stream:
    b = a @ a
    event.record(stream)
cp.cuda.get_current_stream().wait_event(event)
for _ in range(100):
    b += 1
host = cp.asnumpy(b)
free, total = cp.get_default_memory_pool().free_bytes(), cp.get_default_memory_pool().total_bytes()
print("pool", total)
"""
JAX = """
import os
os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
import jax, jax.numpy as jnp
x = jnp.ones((1024, 1024))
print(float(jax.jit(lambda x: jnp.tanh(x @ x))(x).sum()))
"""


def record(folder: Path, program: str, needs: str = "", *options: str):
    if needs and importlib.util.find_spec(needs) is None:
        pytest.skip(f"{needs} is not installed")
    (folder / "program.py").write_text(program)
    command = [sys.executable, "-m", "cudatool", "run", "--device", "cuda", "-o", "t.ctrace", *options, "program.py"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return reader.read(folder / "t.ctrace"), done
