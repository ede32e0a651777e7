"""The transformer of samples/ on this process's device, recorded: it learns, and the trace says how."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections import Counter
from pathlib import Path

from cudatool.trace.events import Kind
from cudatool.trace.reader import read

SAMPLE = Path(__file__).parents[2] / "samples" / "transformer.py"


def test_transformer_learns_by_replays_of_one_graph(device, tmp_path):
    page = ["--html", "t.html"] if importlib.util.find_spec("plotly") else []  # not on each machine with a GPU
    command = [sys.executable, "-m", "cudatool", "run", "--device", device, "-o", "t.ctrace", *page, SAMPLE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, cwd=tmp_path)
    assert (0, "") == (done.returncode, done.stderr if done.returncode else "")  # 1 if the loss does not go down
    assert ["step  50", "step 100", "step 150"] == [line[:8] for line in done.stdout.splitlines()[:3]]

    trace = read(tmp_path / "t.ctrace")
    calls = Counter(trace.names[int(name)] for name in trace.of_kind(Kind.CALL)["name"])
    assert 147 == calls["cudatool.graphs.CUDAGraph.replay"] == len(trace.of_kind(Kind.GRAPH_LAUNCH))
    assert 1 == len(trace.of_kind(Kind.GRAPH_CAPTURE_END))
    steps = 3 + 1  # those that Python saw: before the graph, and its capture
    assert (2 * steps, 2 * steps) == (calls["cudatool.ops.softmax_backward"], calls["cudatool.ops.gelu_backward"])
    assert steps == calls["cudatool.optim.Optimizer.step"]
    assert not page or (tmp_path / "t.html").stat().st_size > 100_000
