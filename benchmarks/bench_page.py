"""Compares the page of `cudatool snapshot --html` in headless Chromium with PyTorch's own viewer on the same files.

    python benchmarks/bench_page.py [--memory-viz MemoryViz.js --d3 d3.min.js] [--events N] [SNAPSHOT.pickle ...]

For each file: how long the page takes to build and how large it is; in the browser, the time from the start of the
navigation to the first picture, and the frames while the wheel zooms in and out and the drawing is dragged. In addition
to the given snapshots, one is made: a training loop with N events (default 2,000,000) and Python stacks.

PyTorch's viewer is torch/utils/viz/MemoryViz.js with d3 (d3/dist/d3.min.js). Its imports from a network are replaced by
that file; apart from that it runs unchanged, on a page like those that `torch.cuda._memory_viz trace_plot` writes.
"""

from __future__ import annotations

import argparse
import base64
import json
import lzma
import random
import re
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bench_allocator import EndlessProvider

from cudatool import analyze, viz
from cudatool.collect import torch_snapshot
from cudatool.export import torch_pickle
from cudatool.memory import CachingAllocator, Settings
from cudatool.trace import Recorder, read

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "viz"))
from chromium import Page, close  # noqa: E402  (the driver that the tests have)

RECORDING = ROOT.parent / "shared" / "data" / "torch_snapshots" / "kvcache__round4.pickle.xz"
LAYERS = 48
PATIENCE_S = 240.0
MIB = 1 << 20

# The times between frames while anything happens, in ms.
START_FRAMES = """(() => {
  window.frames_ms = [];
  let before = performance.now();
  const next = (now) => {
    frames_ms.push(now - before);
    before = now;
    window.frame_request = requestAnimationFrame(next);
  };
  window.frame_request = requestAnimationFrame((now) => {
    before = now;
    window.frame_request = requestAnimationFrame(next);
  });
})()"""
STOP_FRAMES = "cancelAnimationFrame(window.frame_request), JSON.stringify(window.frames_ms)"

WHERE = """(() => {{
  const drawing = document.querySelector({0!r});
  drawing.scrollIntoView();
  return JSON.stringify(drawing.getBoundingClientRect());
}})()"""


@dataclass(frozen=True)
class Viewer:
    """One viewer's page: how it is made, and the element to zoom in."""

    name: str
    build: Callable[[Path, Path], None]
    target: str


@dataclass(frozen=True)
class Result:
    """The measurements of one viewer on one file; times in s, sizes in bytes, frames in ms."""

    build: float
    size: int
    picture: float
    frame: float
    errors: tuple[str, ...]


def make_snapshot(path: Path, events: int) -> None:
    """Write a PyTorch snapshot of a training loop whose batches differ in length."""
    allocator = CachingAllocator(EndlessProvider(), device=0, settings=Settings.parse(""))
    chance = random.Random(1)
    kept: list[int] = []

    def linear(rows: int, columns: int, saved: list[int]) -> None:
        saved.append(allocator.malloc(rows * columns * 2, 0))
        allocator.free(allocator.malloc(rows * 4, 0))

    def attention(rows: int, saved: list[int]) -> None:
        linear(rows, 3 * 1024, saved)
        scores = allocator.malloc(rows * 64 * 2, 0)
        saved.append(allocator.malloc(rows * 1024 * 2, 0))
        allocator.free(scores)

    def block(rows: int, saved: list[int]) -> None:
        attention(rows, saved)
        linear(rows, 4 * 1024, saved)
        linear(rows, 1024, saved)

    def backward(saved: list[int]) -> None:
        while saved:
            gradient = allocator.malloc(chance.randrange(1, 9) * MIB, 0)
            allocator.free(saved.pop())
            allocator.free(gradient)

    def step() -> None:
        rows = 128 * chance.randrange(4, 33)
        saved: list[int] = []
        for _ in range(LAYERS):
            block(rows, saved)
        backward(saved)

    with tempfile.TemporaryDirectory() as folder:
        recorder = Recorder(Path(folder) / "made.ctrace", header={})
        with recorder:
            for _ in range(LAYERS):
                kept.append(allocator.malloc(24 * MIB, 0))
            while recorder.recorded < events:
                step()
        trace = read(Path(folder) / "made.ctrace")
        blocks, segments = analyze.blocks(trace), analyze.segments(trace)
        state = analyze.segments_at(blocks, segments, len(trace.records) - 1)
        torch_pickle.write(path, trace, analyze.torch_segments(trace, state))


def our_page(snapshot: Path, page: Path) -> None:
    """Read the file and write cudatool's page."""
    viz.write_page(torch_snapshot.read(snapshot), page)


def their_page(viewer: Path, d3: Path) -> Callable[[Path, Path], None]:
    """Return a function that writes the page of PyTorch's viewer."""
    script = re.sub(r"^import .*$", "", viewer.read_text(), flags=re.MULTILINE)

    def build(snapshot: Path, page: Path) -> None:
        data = snapshot.read_bytes()
        if snapshot.suffix == ".xz":
            data = lzma.decompress(data)
        files = json.dumps([{"name": snapshot.name, "base64": base64.b64encode(data).decode()}])
        page.write_text(
            f"<!DOCTYPE html><meta charset=utf-8><link rel=icon href=data:,><body><script>{d3.read_text()}</script>"
            "<script type=module>const {axisLeft, scaleLinear, zoom, zoomIdentity, brushX} = d3;\n"
            f"{script}\nadd_local_files({files}, 'Active Memory Timeline');\n"
            "requestAnimationFrame(() => setTimeout(() => performance.mark('first picture')));</script>"
        )

    return build


def measure(viewer: Viewer, snapshot: Path, folder: Path) -> Result:
    """Build a viewer's page, open it, zoom and drag."""
    path = folder / "page.html"
    start = time.perf_counter()
    viewer.build(snapshot, path)
    build = time.perf_counter() - start
    size = path.stat().st_size
    picture = "performance.getEntriesByName('first picture')[0]?.startTime"
    try:
        with Page(path, ready=f"{picture} > 0", seconds=PATIENCE_S, settle=2) as page:
            time.sleep(1)  # for work that a page does after its first picture
            shown = page.evaluate(picture) / 1000
            box = json.loads(page.evaluate(WHERE.format(viewer.target)))
            frames = zoom_and_drag(page, box["x"] + box["width"] * 0.63, box["y"] + box["height"] * 0.4)
            return Result(build, size, shown, frames, tuple(page.errors))
    finally:
        close()  # the next page is opened by another browser, which no page before it has warmed


def zoom_and_drag(page: Page, x: float, y: float) -> float:
    """Return the 95th percentile of the times between frames of a zoom in, a drag and a zoom out, in ms."""
    page.evaluate(START_FRAMES)
    for _ in range(80):
        page.mouse("mouseWheel", x, y, deltaX=0, deltaY=-60)
    page.mouse("mousePressed", x, y, button="left", buttons=1, clickCount=1)
    for i in range(80):
        page.mouse("mouseMoved", x + 3 * i, y, button="left", buttons=1)
    page.mouse("mouseReleased", x + 240, y, button="left", clickCount=1)
    for _ in range(80):
        page.mouse("mouseWheel", x, y, deltaX=0, deltaY=60)
    frames = sorted(json.loads(page.evaluate(STOP_FRAMES)))
    return float(frames[int(len(frames) * 0.95)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("snapshots", nargs="*", type=Path)
    parser.add_argument("--memory-viz", type=Path, help="PyTorch's MemoryViz.js")
    parser.add_argument("--d3", type=Path, help="d3.min.js, which it needs")
    parser.add_argument("--events", type=int, default=2_000_000, help="of the snapshot that is made; 0 makes none")
    options = parser.parse_args()
    if (options.memory_viz is None) != (options.d3 is None):
        parser.error("--memory-viz and --d3 are needed together")
    viewers = [Viewer("cudatool", our_page, "#map")]
    if options.memory_viz:
        viewers.append(Viewer("PyTorch", their_page(options.memory_viz, options.d3), "svg"))

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        snapshots = options.snapshots or [RECORDING] * RECORDING.exists()
        if options.events:
            snapshots = [*snapshots, folder / f"made_{options.events}.pickle"]
            make_snapshot(snapshots[-1], options.events)
        for snapshot in snapshots:
            print_table(snapshot, {viewer.name: measure(viewer, snapshot, folder) for viewer in viewers})


def print_table(snapshot: Path, results: dict[str, Result]) -> None:
    """Print the measurements on one file; ratios are to our page."""
    print(f"\n{snapshot.name}")
    print(f"{'':10}{'build':>10}{'page':>12}{'first picture':>16}{'frame, 95 %':>14}  errors")
    for name, result in results.items():
        print(
            f"{name:10}{result.build:>8.2f} s{result.size / MIB:>8.2f} MiB{result.picture:>14.2f} s"
            f"{result.frame:>11.1f} ms  {len(result.errors)}"
        )
        for error in result.errors[:3]:
            print(f"{'':10}{error.splitlines()[0][:100]}")
    if len(results) > 1:
        ours, theirs = results.values()
        ratios = (theirs.build / ours.build, theirs.size / ours.size, theirs.picture / ours.picture)
        print(f"{'ratio':10}{ratios[0]:>10.2f}{ratios[1]:>12.2f}{ratios[2]:>16.2f}{theirs.frame / ours.frame:>14.2f}")


if __name__ == "__main__":
    main()
