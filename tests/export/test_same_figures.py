"""Every format says the same of one recording: how often and how long kernels ran, and how much memory there was."""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

import cudatool as ct
from cudatool import analyze
from cudatool.analyze.live import LiveState
from cudatool.collect import torch_snapshot
from cudatool.export import perfetto, sqlite, torch_pickle
from cudatool.fleet.tables import Tables
from cudatool.recording import record
from cudatool.trace.model import Trace
from cudatool.trace.reader import read

needs_software_device = pytest.mark.skipif(
    not ct.get_device_name().startswith("cudatool"), reason="a GPU runs other kernels for a product"
)


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    """Kernels, copies and products, on two streams, some of them in a graph that is launched three times."""
    path = tmp_path_factory.mktemp("figures") / "run.ctrace"
    with record(path):
        x, side, graph = ct.asarray(np.ones((8, 8), "f4")), ct.Stream(), ct.graphs.CUDAGraph()
        kept = [ct.full(1000, i, "f4") for i in range(5)]
        ct.matmul(x, x)
        side.wait_stream(ct.current_stream())
        with ct.graphs.graph(graph, stream=side):
            y = ct.matmul(x + 1, x)
            z = y.clone()
        for _ in range(3):
            graph.replay()
        ct.synchronize()
        del kept[2:]
        assert z.get().sum() > 0
    return read(path)


class Names:
    """The tables of a trace, as ``live`` asks for them."""

    def __init__(self, trace: Trace) -> None:
        self.name, self.stack, self.thread = trace.names.__getitem__, trace.stack, trace.threads.__getitem__


def kernels(trace: Trace) -> dict[str, tuple[int, int]]:
    """Return the launches and the time of each kernel and product, as ``snapshot`` says them."""
    found = {row.name: (row.launches, row.time or 0) for row in analyze.report(trace).summary.kernels}
    assert 4 == found["sgemm"][0]
    return found


@needs_software_device
def test_perfetto_has_the_kernels_and_products_of_graphs_by_name(trace: Trace, tmp_path: Path) -> None:
    perfetto.write(tmp_path / "x.json", trace)
    count, time = Counter[str](), Counter[str]()
    for event in json.loads((tmp_path / "x.json").read_text())["traceEvents"]:
        if event.get("cat") == "execution":
            count[event["name"]] += 1
            time[event["name"]] += round(1000 * event["dur"])
    assert kernels(trace) == {name: (count[name], time[name]) for name in kernels(trace)}
    assert "host node" not in count


@needs_software_device
def test_a_data_set_has_the_kernels_and_products_of_graphs_by_name(trace: Trace) -> None:
    table = Tables(trace).kernels
    count, time = Counter[str](), Counter[str]()
    spans: dict[int, list[tuple[int, int]]] = {}
    for event, kind, name, start, end, in_graph in zip(
        *(table[column].tolist() for column in ("event", "kind", "name", "device_start", "device_end", "in_graph")),
        strict=True,
    ):
        if kind != "GRAPH_LAUNCH":
            count[name] += 1
            time[name] += end - start
        spans.setdefault(event, []).append((start, end))
        assert in_graph == (kind != "GRAPH_LAUNCH" and len(spans[event]) > 1)
    assert kernels(trace) == {name: (count[name], time[name]) for name in kernels(trace)}
    launches = [own for own in spans.values() if len(own) > 1]
    assert 3 == len(launches)
    for launch, *ran in launches:
        assert launch == (min(start for start, _ in ran), max(end for _, end in ran))


@needs_software_device
def test_live_counts_the_kernels_and_products_of_graphs_by_name(trace: Trace) -> None:
    state = LiveState()
    state.fold(trace.records)
    found = state.picture(Names(trace)).kernels
    assert kernels(trace) == {row.name: (row.launches, row.time_ns) for row in found}


def test_every_format_has_the_same_memory(trace: Trace, tmp_path: Path) -> None:
    (device,) = analyze.report(trace).summary.devices
    peak, end, count = device.peak_active, device.now.active, device.allocations
    assert 0 < end < peak

    state = LiveState()
    state.fold(trace.records)
    (live,) = state.picture(Names(trace)).devices
    assert (device.peak_allocated, device.peak_reserved) == (live.peak_allocated, live.peak_reserved)

    ranks = Tables(trace).ranks
    assert (peak, end, count) == tuple(int(ranks[name][0]) for name in ("peak_active", "end_active", "allocations"))

    sqlite.write(tmp_path / "x.sqlite", trace)
    with closing(sqlite3.connect(tmp_path / "x.sqlite")) as database:
        query = (
            "SELECT (SELECT sum(size) FROM live_at_peak), (SELECT sum(peak_bytes) FROM by_call_site), count(*), "
            "sum(CASE WHEN free_completed_event IS NULL THEN size END) FROM allocations"
        )
        assert [(peak, peak, count, end)] == database.execute(query).fetchall()

    perfetto.write(tmp_path / "x.json", trace)
    events = json.loads((tmp_path / "x.json").read_text())["traceEvents"]
    levels = [event["args"] for event in events if event["ph"] == "C" and event["name"] == "Memory"]
    assert (peak, device.peak_reserved) == tuple(
        max(level[name] for level in levels) for name in ("active", "reserved")
    )
    assert end == levels[-1]["active"]

    last = analyze.segments_at(analyze.blocks(trace), analyze.segments(trace), len(trace.records) - 1)
    settings = analyze.torch_settings(trace)
    torch_pickle.write(tmp_path / "x.pickle", trace, analyze.torch_segments(trace, last), settings)
    (again,) = analyze.report(torch_snapshot.read(tmp_path / "x.pickle")).summary.devices
    assert (peak, end, count) == (again.peak_active, again.now.active, again.allocations)
    assert device.peak_reserved == again.peak_reserved
