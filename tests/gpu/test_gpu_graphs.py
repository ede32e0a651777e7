"""CUDA graphs beside PyTorch's, on the same GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cudatool
import cudatool.random

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("torch")]

PROGRAM = Path(__file__).with_name("graph_requests.py")
SEGMENT = ("address", "total_size", "allocated_size", "active_size", "stream", "segment_type", "is_expandable")
SCALE = """
extern "C" __global__ void scale(const float *a, float factor, float *out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = a[i] * factor;
}
"""


def run(seed: int, conf: str, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what the same random program leads to with PyTorch's graphs, and with ours."""
    environment = os.environ | {"PYTORCH_CUDA_ALLOC_CONF": conf}
    environment.pop("CUDATOOL_ALLOC_CONF", None)
    theirs, ours = folder / "torch.json", folder / "cudatool.json"
    for paths in ([theirs], [ours, theirs]):
        command = [sys.executable, str(PROGRAM), str(seed), *map(str, paths)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)
        assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(theirs.read_text()), json.loads(ours.read_text())


def private_segments(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the segments of graphs' pools with their blocks."""
    return [
        {name: segment[name] for name in (*SEGMENT, "segment_pool_id")}
        | {"blocks": [(block["address"], block["size"], block["state"]) for block in segment["blocks"]]}
        for segment in sorted(found["segments"], key=lambda segment: segment["address"])
        if segment["segment_pool_id"] != [0, 0]
    ]


@pytest.mark.whole_device
@pytest.mark.parametrize("conf", ["", "expandable_segments:True", "graph_capture_record_stream_reuse:True"])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_memory_of_captures_has_the_addresses_that_pytorchs_has(seed: int, conf: str, tmp_path: Path) -> None:
    theirs, ours = run(seed, conf, tmp_path)
    assert len(theirs["addresses"]) > 400
    assert theirs["addresses"] == ours["addresses"]
    assert theirs["graphs"] == ours["graphs"]
    assert private_segments(theirs) == private_segments(ours) != []


def test_replays_of_both_libraries_take_turns_on_the_same_memory() -> None:
    import torch

    n = 10_000
    kernel, stream = cudatool.compile(SCALE, "scale"), cudatool.Stream()
    ours = cudatool.asarray(np.linspace(1, 2, n, dtype=np.float32))
    theirs = torch.as_tensor(ours, device="cuda")
    assert theirs.data_ptr() == ours.data_ptr()
    graph, other = cudatool.CUDAGraph(), torch.cuda.CUDAGraph()
    with cudatool.graph(graph):
        doubled = cudatool.empty(n)
        kernel[-(-n // 256), 256](ours, 2.0, doubled, n)
        ours.copy_(doubled)
    with torch.cuda.graph(other):
        theirs.add_(1)
    with cudatool.stream(stream), torch.cuda.stream(torch.cuda.ExternalStream(stream.cuda_stream)):
        for _ in range(3):
            graph.replay()
            other.replay()
    stream.synchronize()
    expected = np.linspace(1, 2, n, dtype=np.float32)
    for _ in range(3):
        expected = expected * np.float32(2) + np.float32(1)
    assert np.array_equal(expected, ours.get())
    assert np.array_equal(expected, theirs.cpu().numpy())


def test_pytorchs_work_is_captured_by_our_graph_and_ours_by_pytorchs() -> None:
    import torch

    n = 1000
    kernel, stream = cudatool.compile(SCALE, "scale"), cudatool.Stream()
    external = torch.cuda.ExternalStream(stream.cuda_stream)
    x = torch.ones(n, device="cuda")
    view = cudatool.asarray(x)
    graph, other = cudatool.CUDAGraph(), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with cudatool.graph(graph, stream=stream), torch.cuda.stream(external):
        x.add_(1)
        kernel[-(-n // 256), 256](view, 3.0, view, n)
    with torch.cuda.graph(other, stream=external), cudatool.stream(stream):
        kernel[-(-n // 256), 256](view, 2.0, view, n)
        x.sub_(1)
    graph.replay()
    torch.cuda.synchronize()
    other.replay()
    torch.cuda.synchronize()
    assert x.eq((1 + 1) * 3 * 2 - 1).all().item()


def test_numbers_that_replays_draw_are_those_of_pytorchs_replays() -> None:
    import torch

    graph, other = cudatool.CUDAGraph(), torch.cuda.CUDAGraph()
    torch.cuda.manual_seed(7)
    cudatool.random.manual_seed(7)
    with torch.cuda.graph(other):
        theirs = [torch.rand(1000, device="cuda"), torch.randn(1000, device="cuda")]
    with cudatool.graph(graph):
        ours = [cudatool.random.rand(1000), cudatool.random.randn(1000)]
    for _ in range(3):
        other.replay()
        graph.replay()
        pairs = [*zip(theirs, ours, strict=True), (torch.rand(10, device="cuda"), cudatool.random.rand(10))]
        for expected, found in pairs:
            assert np.array_equal(expected.cpu().numpy(), found.get())
