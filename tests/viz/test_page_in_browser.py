"""The page in a real browser: it draws, it answers, it logs no error and loads nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from chromium import EXECUTABLE, Page
from pages import HOSTILE, program

from cudatool import viz
from cudatool.collect import torch_snapshot
from cudatool.trace.events import Kind

pytestmark = pytest.mark.skipif(EXECUTABLE is None, reason="no Chromium on this machine")

RECORDING = Path(__file__).resolve().parents[1] / "data" / "streams_default.pickle.xz"

# How many different colours a canvas shows: 1 means that nothing was drawn.
COLOURS = """(() => {{
  const c = document.querySelector({0!r});
  const copy = new OffscreenCanvas(c.width, c.height).getContext("2d", {{ willReadFrequently: true }});
  copy.drawImage(c, 0, 0);
  return new Set(new Uint32Array(copy.getImageData(0, 0, c.width, c.height).data.buffer)).size;
}})()"""


@pytest.fixture(scope="module")
def snapshot_page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    path = tmp_path_factory.mktemp("page") / "snapshot.html"
    viz.write_page(torch_snapshot.read(RECORDING), path)
    with Page(path) as page:
        yield page
        assert [] == page.errors
        assert [path.as_uri()] == [url for url in page.requests if not url.startswith(("data:", "about:"))]


@pytest.fixture(scope="module")
def hostile_page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    path = tmp_path_factory.mktemp("page") / "hostile.html"
    viz.write_page(program(HOSTILE), path)
    with Page(path, dark=True) as page:
        yield page
        assert [] == page.errors


def test_the_canvases_show_something(snapshot_page: Page) -> None:
    for selector in ("#map", "#segments"):
        assert snapshot_page.evaluate(COLOURS.format(selector)) > 3, selector
    assert snapshot_page.evaluate("document.querySelectorAll('#timeline .scatterlayer path.js-line').length") == 3


def test_the_tiles_say_what_the_analysis_says(snapshot_page: Page) -> None:
    tiles = snapshot_page.evaluate("[...document.querySelectorAll('.tile b')].map((b) => b.textContent)")
    assert ["22.5 MiB", "66 MiB", "984"] == [tiles[0], tiles[1], tiles[4]]


def test_the_curves_are_those_of_python(snapshot_page: Page) -> None:
    from cudatool import analyze

    (curve,) = analyze.report(torch_snapshot.read(RECORDING)).timelines
    shown = """(() => {
      const data = JSON.parse(byId("payload").textContent);
      const device = new DeviceMemory(data.devices[0], new Shared(data));
      return JSON.stringify([[...device.allocated], [...device.active], [...device.reserved]]);
    })()"""
    expected = [curve.allocated.tolist(), curve.active.tolist(), curve.reserved.tolist()]
    assert expected == json.loads(snapshot_page.evaluate(shown))


def test_the_slider_chooses_the_moment(snapshot_page: Page) -> None:
    snapshot_page.evaluate("byId('slider').value = 0; byId('slider').dispatchEvent(new Event('input'))")
    assert "0 B allocated, 2 MiB reserved" in snapshot_page.evaluate("byId('moment-facts').textContent")
    snapshot_page.evaluate("byId('to-peak').click()")
    assert snapshot_page.evaluate("byId('moment-time').textContent").endswith("the peak")


def test_a_row_opens_to_show_the_stack(snapshot_page: Page) -> None:
    snapshot_page.evaluate("byId('to-peak').click(); document.querySelector('#sites details').open = true")
    snapshot_page.wait_for("document.querySelector('#sites li')?.textContent.includes('train.py:')")


def test_keys_zoom_the_map_and_zero_shows_all(snapshot_page: Page) -> None:
    def press(*keys: str) -> int:
        for key in keys:
            snapshot_page.key(key, "#map")
            assert snapshot_page.evaluate("document.activeElement.id") == "map"
        # Other parts of the page may still be moving the map about; look when nothing changes any more.
        counts = [-1, -2]
        while counts[-1] != counts[-2]:
            snapshot_page.evaluate("new Promise((done) => setTimeout(() => requestAnimationFrame(done), 150))")
            counts.append(snapshot_page.evaluate(COLOURS.format("#map")))
        return counts[-1]

    all_of_it = press("0")
    assert press("+", "+", "+") != all_of_it
    assert press("0") == all_of_it


def test_the_pointer_shows_what_lies_under_it(snapshot_page: Page) -> None:
    snapshot_page.evaluate("window.scrollTo(0, 0)")
    box = json.loads(snapshot_page.evaluate("JSON.stringify(byId('map').getBoundingClientRect())"))
    found = set()
    for share in range(1, 20):
        snapshot_page.mouse("mouseMoved", box["x"] + box["width"] * 0.7, box["y"] + (box["height"] - 22) * share / 20)
        found.add(snapshot_page.evaluate("byId('tip').textContent.split('\\n')[0]"))
    assert "unused" in found
    assert any("MiB" in text or "KiB" in text for text in found)


def test_searching_counts_what_matches(snapshot_page: Page) -> None:
    for wanted in ("TRAIN.PY", "nowhere"):
        snapshot_page.evaluate(f"byId('search').value = '{wanted}'; byId('search').dispatchEvent(new Event('input'))")
        count = int(snapshot_page.evaluate("byId('found').textContent").split()[0].replace(",", ""))
        assert (wanted == "TRAIN.PY") == (count > 0)
    snapshot_page.evaluate("byId('search').value = ''; byId('search').dispatchEvent(new Event('input'))")


def test_hostile_names_are_shown_and_not_run(hostile_page: Page) -> None:
    assert hostile_page.evaluate("window.hacked === undefined && document.querySelectorAll('img').length === 0")
    assert "<img src=x" in hostile_page.evaluate("byId('kernels').textContent")
    assert "<img src=x" in hostile_page.evaluate("byId('blocks').textContent")
    assert "<img src=x" in hostile_page.evaluate("byId('notes').textContent")


def test_streams_show_kernels_and_copies(hostile_page: Page) -> None:
    assert hostile_page.evaluate(COLOURS.format("#streams")) > 3
    box = json.loads(
        hostile_page.evaluate(
            "byId('streams').scrollIntoView(), JSON.stringify(byId('streams').getBoundingClientRect())"
        )
    )
    hostile_page.mouse("mouseMoved", box["x"] + 152, box["y"] + 17)
    assert "40 ns" in hostile_page.evaluate("byId('tip').textContent")


def test_each_device_has_its_own_view(tmp_path: Path) -> None:
    trace = program()
    trace.records["device"] = np.where(trace.records["kind"] == Kind.MEM_ALLOC, np.arange(len(trace.records)) % 2, 0)
    viz.write_page(trace, tmp_path / "two.html")
    with Page(tmp_path / "two.html") as page:
        tiles = "[...document.querySelectorAll('.tile')].map((tile) => tile.textContent).join()"
        first = page.evaluate(tiles)
        page.evaluate("byId('device').value = 1; byId('device').dispatchEvent(new Event('change'))")
        assert first != page.evaluate(tiles)
        assert [] == page.errors


def test_an_empty_recording_says_so(tmp_path: Path) -> None:
    viz.write_page(program(repeat=0), tmp_path / "empty.html")
    with Page(tmp_path / "empty.html") as page:
        assert page.evaluate("!byId('nothing').hidden && byId('memory').hidden && byId('work').hidden")
        assert [] == page.errors


def test_dark_mode_is_dark(hostile_page: Page) -> None:
    assert "rgb(17, 21, 28)" == hostile_page.evaluate("getComputedStyle(document.body).backgroundColor")
