"""The samples on a GPU and on the software device: the same results, the same allocator addresses."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from cudatool._driver import gpu_names
from cudatool.blas._workspace import workspace_size
from cudatool.trace.events import Kind
from cudatool.trace.reader import read

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not gpu_names(), reason="no NVIDIA GPU answers")]

_WORKSPACE = workspace_size(os.environ.get("CUBLAS_WORKSPACE_CONFIG"), 9)  # bytes; no sample has such an array
_SAMPLES = Path(__file__).parents[2] / "samples"


def _run(sample: str, device: str, folder: Path):
    """Return what the sample printed and its trace."""
    path = folder / f"{device}.ctrace"
    command = [sys.executable, "-m", "cudatool", "run", "--device", device, "-o", path, _SAMPLES / sample]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=folder, env=dict(os.environ))
    assert done.returncode == 0, done.stderr
    return done.stdout, read(path)


def _numbers(text: str) -> list[float]:
    return [float(word) for word in re.findall(r"-?\d+\.?\d*(?:e-?\d+)?", text.split(" on ")[0])]


def _layout(trace) -> list[tuple[int, int, int]]:
    """Each allocation of the run but cuBLAS's workspace: in the how manieth segment, where in it, how large."""
    segments: dict[int, int] = {}
    numbers: dict[int, int] = {}
    count, rows = 0, []
    for record in trace.of_kind(Kind.SEGMENT_ALLOC, Kind.SEGMENT_FREE, Kind.BLOCK_ALLOC):
        address, size = int(record["address"]), int(record["size"])
        if record["kind"] == Kind.SEGMENT_ALLOC:
            segments[address] = size
        elif record["kind"] == Kind.SEGMENT_FREE:
            del segments[address]
            numbers.pop(address, None)
        elif size != _WORKSPACE:
            base = max(start for start in segments if start <= address)
            assert address + size <= base + segments[base]
            if base not in numbers:
                numbers[base] = count
                count += 1
            rows.append((numbers[base], address - base, size))
    return rows


@pytest.mark.parametrize("sample", ["vector_add.py", "pipeline_fixed.py", "mlp.py", "leak.py", "fragmentation.py"])
def test_sample_gives_the_same_on_both_devices(sample, tmp_path):
    printed, gpu = _run(sample, "cuda", tmp_path)
    expected, software = _run(sample, "sim", tmp_path)
    # Sums are taken in another order on a GPU, and training steps carry the difference on.
    np.testing.assert_allclose(_numbers(printed), _numbers(expected), rtol=2e-3, atol=2e-4)
    layout = _layout(gpu)
    assert len(layout) > 0
    assert layout == _layout(software)
