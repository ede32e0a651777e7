"""The page in a real browser: it draws, it answers, it logs no error and loads nothing."""

from __future__ import annotations

import linecache
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chromium import EXECUTABLE, SETTLE, Page
from pages import HOSTILE, layered, planned, program, racy

from cudatool import analyze, sanitize, viz
from cudatool.collect import torch_snapshot
from cudatool.sanitize.findings import DeviceFinding, FindingKind
from cudatool.source_text import SourceLine
from cudatool.trace.events import RECORD, Kind
from cudatool.trace.model import Frame, PinnedMemory, Trace

pytestmark = pytest.mark.skipif(EXECUTABLE is None, reason="no Chromium on this machine")

DATA = Path(__file__).resolve().parents[1] / "data"
RECORDING = DATA / "streams_default.pickle.xz"

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
def pools_page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    path = tmp_path_factory.mktemp("page") / "pools.html"
    viz.write_page(torch_snapshot.read(DATA / "graphs__default.pickle.xz"), path)
    with Page(path) as page:
        yield page
        assert [] == page.errors


@pytest.fixture(scope="module")
def hostile_page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    path = tmp_path_factory.mktemp("page") / "hostile.html"
    viz.write_page(program(HOSTILE), path)
    with Page(path, dark=True) as page:
        yield page
        assert [] == page.errors


@pytest.fixture
def page(snapshot_page: Page) -> Page:
    """The snapshot's page, as it is when it has just been opened."""
    snapshot_page.evaluate(
        """(() => {
          byId("tables").value = "cursor";
          byId("flame-moment").value = "peak";
          memoryView.restore({ axis: "time" });
          window.scrollTo(0, 0);
        })()"""
    )
    snapshot_page.evaluate(SETTLE)
    return snapshot_page


def read(page: Page, expression: str) -> Any:
    """Return what JavaScript says, by way of JSON."""
    return page.read(expression)


def at_share(page: Page, selector: str, x: float, y: float) -> tuple[float, float]:
    """Return the point of the window at shares of an element."""
    box = read(page, f"document.querySelector({selector!r}).getBoundingClientRect()")
    return box["x"] + x * box["width"], box["y"] + y * box["height"]


def drag(page: Page, start: tuple[float, float], end: tuple[float, float], **more: Any) -> None:
    page.mouse("mousePressed", *start, button="left", buttons=1, clickCount=1, **more)
    for share in (0.3, 0.7, 1):
        point = [a + share * (b - a) for a, b in zip(start, end, strict=True)]
        page.mouse("mouseMoved", *point, button="left", buttons=1, **more)
    page.mouse("mouseReleased", *end, button="left", clickCount=1, **more)
    page.evaluate(SETTLE)


def test_every_drawing_shows_something(page: Page) -> None:
    for selector in ("#map", "#timeline", "#segments", "#overview-curve", "#flame"):
        assert page.evaluate(COLOURS.format(selector)) > 3, selector


def test_the_charts_are_drawn_when_they_come_into_view(page: Page) -> None:
    page.evaluate("byId('diagnosis').scrollIntoView()")
    page.wait_for("document.documentElement.dataset.charts === 'true'")
    bars = page.evaluate("document.querySelectorAll('#causes .bars path').length")
    assert bars > 3
    assert page.evaluate("byId('causes-legend').childElementCount") == bars / read(
        page, "memoryView.device.diagnosis.fragmentation.length"
    )
    assert page.evaluate("document.querySelectorAll('#purposes-chart .bars path').length") > 0


def test_the_tiles_say_what_the_analysis_says(page: Page) -> None:
    tiles = page.evaluate("[...document.querySelectorAll('.tile b')].map((b) => b.textContent)")
    assert ["22.5 MiB", "66 MiB", "984"] == [tiles[0], tiles[1], tiles[4]]


def test_the_curves_are_those_of_python(page: Page) -> None:
    (curve,) = analyze.report(torch_snapshot.read(RECORDING)).timelines
    shown = read(page, "['allocated', 'active', 'reserved'].map((name) => [...memoryView.device[name]])")
    assert [curve.allocated.tolist(), curve.active.tolist(), curve.reserved.tolist()] == shown


@pytest.mark.parametrize("recording", ["streams_default", "prefetch__default"])
def test_the_flame_graph_is_the_tree_of_python(tmp_path: Path, recording: str) -> None:
    report = analyze.report(torch_snapshot.read(DATA / f"{recording}.pickle.xz"))
    viz.write_report(report, tmp_path / "page.html")
    tree = report.diagnoses[0].tree
    paths: list[tuple[str, ...]] = []
    for row, parent in enumerate(tree.parent.tolist()):
        place = f"{tree.file[row]}:{tree.line[row]}" if tree.file[row] else ""
        paths.append((*paths[parent], tree.name[row], place) if row else ())
    expected = {path: [size, count] for path, size, count in zip(paths, tree.total_size, tree.count, strict=True)}
    with Page(tmp_path / "page.html") as page:
        walk = """(() => {
          const all = [];
          const visit = (node, path) => {
            all.push([path, [node.size, node.count]]);
            for (const child of node.children) visit(child, [...path, child.title, child.place]);
          };
          visit(siteTree(memoryView.shared, memoryView.device, memoryView.device.peak.row), []);
          return all;
        })()"""
        shown = {tuple(path): numbers for path, numbers in read(page, walk)}
    assert expected == shown


def test_the_stack_of_the_timeline_adds_up_to_what_is_allocated(page: Page) -> None:
    stacked, allocated = read(
        page,
        """(() => {
          const { timeline, device } = memoryView;
          const rows = Uint32Array.from([0, 7, 100, device.peak.row, device.rows - 1].sort((a, b) => a - b));
          const sums = timeline.sumsAt(rows);
          const stride = timeline.leaders.length + 1;
          const total = (i) => sums.subarray(i * stride, (i + 1) * stride).reduce((a, b) => a + b, 0);
          return [[...rows].map((_, i) => total(i)), [...rows].map((row) => device.allocated[row])];
        })()""",
    )
    assert allocated == stacked


def test_rows_summed_up_in_buckets_look_as_when_each_is_summed(page: Page) -> None:
    """The moments of all columns, with the rows taken one by one and in buckets of one row each."""
    assert page.evaluate(
        """(() => {
          const { timeline, device } = memoryView;
          timeline.plane.drawNow();
          const direct = [...timeline.moments()];
          const ranges = direct.map((row, column) => [column ? direct[column - 1] : 0, row]);
          const isHighest = ranges.every(([before, row]) => row >= before);
          const buckets = [...timeline.bucketRow];
          const isTop = buckets.every((row, i) => {
            const from = i * BUCKET;
            const to = Math.min(device.rows, from + BUCKET);
            return device.active.subarray(from, to).every((bytes) => bytes <= device.active[row]) && row >= from && row < to;
          });
          return isHighest && isTop;
        })()"""
    )


def test_every_allocation_can_be_hit_in_both_drawings(page: Page) -> None:
    """Zoomed far enough in: at half of its life and height."""
    missed = read(
        page,
        """(() => {
          const { device, map, timeline, x } = memoryView;
          const { blocks } = device;
          const missed = [];
          for (let i = 0; i < blocks.count; i++) {
            const at = (x[blocks.start[i]] + x[Math.min(blocks.start[i] + 1, blocks.end[i])]) / 2;
            map.plane.scaleX = 1e9;
            if (map.blockAt(at, blocks.y[i] + blocks.size[i] / 2) !== i) missed.push(['map', i]);
            const row = memoryView.rowAt(at);
            let below = 0;
            for (const j of timeline.order(row).flat()) {
              if (j === i) break;
              below += blocks.size[j];
            }
            if (timeline.blockAt(row, below + blocks.size[i] / 2) !== i) missed.push(['timeline', i]);
          }
          map.plane.drawNow();
          return missed;
        })()""",
    )
    assert [] == missed


def test_what_shares_its_pixels_is_counted(page: Page) -> None:
    def said() -> list[int]:
        return [
            int(word.replace(",", ""))
            for word in page.evaluate("byId('detail').textContent").split()
            if word[0].isdigit()
        ]

    in_view, hidden = said()
    assert in_view == page.evaluate("memoryView.device.blocks.count")
    assert 0 < hidden < in_view
    page.evaluate("memoryView.setRange(memoryView.x[500], memoryView.x[520])")
    page.evaluate(SETTLE)
    assert said()[0] < in_view


def test_the_slider_chooses_the_moment(page: Page) -> None:
    page.evaluate("byId('slider').value = 0; byId('slider').dispatchEvent(new Event('input'))")
    page.evaluate(SETTLE)
    assert "0 B allocated, 2 MiB reserved" in page.evaluate("byId('moment-facts').textContent")
    page.evaluate("byId('to-peak').click()")
    page.evaluate(SETTLE)
    assert page.evaluate("byId('moment-time').textContent").endswith("the peak")


def test_a_row_opens_to_show_the_stack(page: Page) -> None:
    page.evaluate("document.querySelector('#sites details').open = true")
    page.wait_for("document.querySelector('#sites li')?.textContent.includes('train.py:')")


def test_keys_zoom_and_zero_shows_all(page: Page) -> None:
    def shown() -> list[float]:
        return read(page, "[memoryView.from, memoryView.to]")

    all_of_it = shown()
    for key in "+++":
        page.key(key, "#map")
    begin, end = shown()
    assert end - begin == pytest.approx((all_of_it[1] - all_of_it[0]) * 0.7**3)
    page.key("0", "#timeline")
    assert all_of_it == shown()


def test_arrow_keys_move_the_cursor_and_go_through_allocations(page: Page) -> None:
    before = page.evaluate("memoryView.row")
    page.key("ArrowLeft", "#timeline")
    after = page.evaluate("memoryView.row")
    assert after < before
    pinned = []
    for _ in range(3):
        page.key("ArrowDown", "#map")
        pinned.append(page.evaluate("memoryView.pinned"))
    addresses = read(page, f"{pinned}.map((i) => memoryView.device.blocks.address[i])")
    assert 3 == len(set(addresses))
    assert page.evaluate("!byId('selection').hidden")
    assert page.evaluate("document.querySelectorAll('#selection-stack li').length") > 0
    page.key("Escape", "#map")
    assert page.evaluate("byId('selection').hidden")


def test_slash_goes_to_the_search_and_question_mark_helps(page: Page) -> None:
    page.key("/", "#map")
    assert "search" == page.evaluate("document.activeElement.id")
    page.key("Escape", "#search")
    assert "map" == page.evaluate("document.activeElement.id")
    page.key("?", "#map")
    assert page.evaluate("byId('help').open")
    page.evaluate("byId('help').close()")


def test_the_tab_key_reaches_every_control(page: Page) -> None:
    """In the order of the page; everything has a name."""
    names = page.evaluate(
        """[...document.querySelectorAll('button, input, select, [tabindex="0"]')].filter((e) => e.checkVisibility())
          .filter((e) => !(e.getAttribute('aria-label') || e.textContent.trim() || e.labels?.[0]?.textContent.trim()))
          .map((e) => e.id || e.outerHTML)"""
    )
    assert [] == names
    assert [] == page.evaluate(
        "[...document.querySelectorAll('[tabindex]')].filter((e) => e.tabIndex > 0).map((e) => e.id)"
    )


# What scrolls, and tables; without a name a screen reader cannot say what they are.
NAMELESS = """[...document.querySelectorAll('.scroll, table')]
  .filter((e) => !e.closest('dialog') && !e.querySelector('canvas') && !(e.ariaLabel && (e.tagName === 'TABLE' || (e.tabIndex === 0 && e.role === 'region'))))
  .map((e) => e.id || e.outerHTML.slice(0, 200))"""


def test_lists_that_scroll_can_be_reached_and_have_names(page: Page, tmp_path: Path) -> None:
    assert [] == page.evaluate(NAMELESS)
    viz.write_page(planned(), tmp_path / "x.html")
    with Page(tmp_path / "x.html") as other:
        assert other.evaluate("document.querySelectorAll('#plans .scroll').length")
        assert [] == other.evaluate(NAMELESS)


def test_the_mark_of_advice_of_several_lines_stands_at_its_first(page: Page) -> None:
    """A button that wraps is one box; a word before it stands on the line of the mark."""
    first, height = page.read(
        """(() => {
          const mark = element("span", { style: "display: inline-block; width: 0" }, "x");
          const item = element("li", { style: "width: 300px" }, mark, element("button", { className: "link" }, "advice ".repeat(60)));
          document.body.append(item);
          const [word, button] = [mark.getBoundingClientRect(), item.lastChild.getBoundingClientRect()];
          item.remove();
          return [word.top - button.top, button.height];
        })()"""
    )
    assert height > 40
    assert abs(first) < 8


def test_the_pointer_shows_what_lies_under_it(page: Page) -> None:
    for selector, words in (("#map", {"unused"}), ("#timeline", set())):
        page.evaluate(f"document.querySelector({selector!r}).scrollIntoView({{ block: 'center' }})")
        found = set()
        for share in range(1, 20):
            page.mouse("mouseMoved", *at_share(page, selector, 0.7, 0.94 * share / 20))
            found.add(page.evaluate("byId('tip').textContent.split('\\n')[0]"))
        assert words <= found
        assert any("MiB" in text or "KiB" in text for text in found), found


def test_a_click_pins_an_allocation_and_sets_the_cursor(page: Page) -> None:
    x, y = at_share(page, "#timeline", 0.7, 0.9)
    for kind in ("mousePressed", "mouseReleased"):
        page.mouse(kind, x, y, button="left", clickCount=1)
    page.evaluate(SETTLE)
    live = read(page, "memoryView.device.liveAt(memoryView.row)")
    assert page.evaluate("memoryView.pinned") in live
    assert "requested" in page.evaluate("byId('selection-facts').textContent")


def test_the_brush_chooses_the_range_and_all_tables_refer_to_it(page: Page) -> None:
    page.evaluate("byId('tables').value = 'range'; byId('tables').dispatchEvent(new Event('change'))")
    whole = page.evaluate("byId('block-count').textContent")
    drag(page, at_share(page, "#overview", 0.4, 0.5), at_share(page, "#overview", 0.5, 0.5))
    begin, end, x0, x1 = read(page, "[memoryView.from, memoryView.to, memoryView.x[0], memoryView.x.at(-1)]")
    assert [0.4, 0.5] == pytest.approx([(begin - x0) / (x1 - x0), (end - x0) / (x1 - x0)], abs=0.01)
    part = page.evaluate("byId('block-count').textContent")
    assert int(part.split(",")[0]) < int(whole.split(",")[0])
    assert page.evaluate("[memoryView.map, memoryView.timeline].every((d) => d.plane.view.x0 === memoryView.from)")
    page.key("ArrowRight", "#range-to")
    assert page.evaluate("memoryView.to") > end


def test_dragging_moves_and_with_shift_zooms_into_the_box(page: Page) -> None:
    page.evaluate("memoryView.zoom(0.25)")
    before = read(page, "memoryView.map.plane.view")
    drag(page, at_share(page, "#map", 0.5, 0.5), at_share(page, "#map", 0.4, 0.5))
    moved = read(page, "memoryView.map.plane.view")
    assert moved["x0"] > before["x0"]
    assert moved["x1"] - moved["x0"] == pytest.approx(before["x1"] - before["x0"])
    drag(page, at_share(page, "#map", 0.3, 0.3), at_share(page, "#map", 0.6, 0.6), modifiers=8)
    zoomed = read(page, "memoryView.map.plane.view")
    assert zoomed["x1"] - zoomed["x0"] < 0.5 * (moved["x1"] - moved["x0"])
    assert zoomed["y1"] - zoomed["y0"] < 0.5 * (moved["y1"] - moved["y0"])


def test_searching_counts_what_matches(page: Page) -> None:
    report = analyze.report(torch_snapshot.read(RECORDING))
    trace, blocks = report.trace, report.blocks
    matching = [i for i in range(len(trace.stacks)) if any("train.py" in frame.file for frame in trace.stack(i))]
    count = int(np.isin(blocks.stack, matching).sum())
    page.evaluate("byId('search').value = 'TRAIN.PY'; byId('search').dispatchEvent(new Event('input'))")
    assert page.evaluate("byId('found').textContent").startswith(f"{count:,} allocations, ")
    page.evaluate("byId('search').value = 'nowhere'; byId('search').dispatchEvent(new Event('input'))")
    assert "nothing found" == page.evaluate("byId('found').textContent")


def test_only_what_is_found_leaves_the_rest_out_of_both_drawings(page: Page) -> None:
    page.evaluate("byId('search').value = 'train.py'; byId('only').checked = true; memoryView.find()")
    page.evaluate(SETTLE)
    shown = int(page.evaluate("byId('detail').textContent").split()[0].replace(",", ""))
    assert shown == page.evaluate("memoryView.matched.reduce((sum, one) => sum + one, 0)")
    stacked, found = read(
        page,
        """(() => {
          const { timeline, device, matched, row } = memoryView;
          const live = device.liveAt(row).filter((i) => matched[i]);
          return [timeline.sumsAt([row]).reduce((a, b) => a + b, 0), live.reduce((sum, i) => sum + device.blocks.size[i], 0)];
        })()""",
    )
    assert found == stacked


def test_the_legend_switches_streams_off_and_on(page: Page) -> None:
    count = page.evaluate("memoryView.device.blocks.count")
    other = page.evaluate("memoryView.device.blocks.stream.filter((stream) => stream === 1).length")
    assert 0 < other < count
    for shown in (count - other, count):
        page.evaluate("byId('legend-streams').querySelectorAll('button')[1].click()")
        page.evaluate(SETTLE)
        assert shown == int(page.evaluate("byId('detail').textContent").split()[0].replace(",", ""))


@pytest.mark.parametrize("kind", ["site", "purpose", "size", "stream", "pool"])
def test_colours_can_stand_for_each_kind(page: Page, kind: str) -> None:
    page.evaluate(f"byId('colour').value = '{kind}'; byId('colour').dispatchEvent(new Event('change'))")
    page.evaluate(SETTLE)
    assert page.evaluate(COLOURS.format("#timeline")) > 3
    assert page.evaluate("byId('stacked-by').textContent") in ("call site", "purpose", "size", "stream", "pool")


def test_modules_are_a_table_of_equal_layers_or_of_each(tmp_path: Path) -> None:
    viz.write_page(layered(), tmp_path / "page.html")
    rows = "[...document.querySelectorAll('#modules tbody tr')].map((row) => [...row.cells].map((cell) => cell.textContent))"
    with Page(tmp_path / "page.html") as page:
        assert [["layers.* (2 modules)", "3 KiB", "3 KiB", "6 KiB"]] == page.evaluate(rows)
        page.evaluate("byId('each-module').click()")
        assert [["layers.1", "3 KiB", "2 KiB", "5 KiB"], ["layers.0", "", "1 KiB", "1 KiB"]] == page.evaluate(rows)
        assert "have a module" in page.evaluate("byId('modules-text').textContent")
        assert "module layers.1" in page.evaluate("memoryView.describeBlock(2, memoryView.row)")
        assert [] == page.errors


def test_private_pools_are_hatched_and_named(pools_page: Page) -> None:
    assert "private pool (1, 0)" in pools_page.evaluate("byId('legend-pools').textContent")
    private, hatched = read(
        pools_page,
        """[[...memoryView.device.blocks.pool].map((pool) => memoryView.isPrivate[pool]),
            [...memoryView.hatches].map((hatch) => (hatch & HATCHED.pool) > 0)]""",
    )
    assert private == hatched
    assert any(private)


def test_the_flame_graph_zooms_with_the_keyboard(page: Page) -> None:
    everything = page.evaluate("byId('flame-text').textContent")
    for key in ("ArrowDown", "ArrowDown", "Enter"):
        page.key(key, "#flame")
    inside = page.evaluate("byId('flame-text').textContent")
    assert inside != everything
    page.key("Escape", "#flame")
    assert everything == page.evaluate("byId('flame-text').textContent")


def test_the_flame_graph_follows_the_cursor(page: Page) -> None:
    page.evaluate("byId('flame-moment').value = 'cursor'; byId('flame-moment').dispatchEvent(new Event('change'))")
    page.evaluate("memoryView.moveTo(0)")
    page.evaluate(SETTLE)
    assert page.evaluate("memoryView.flame.root.size") == page.evaluate("memoryView.device.active[0]")


def test_the_theme_can_be_chosen(page: Page) -> None:
    for expected in ("rgb(17, 21, 28)", "rgb(245, 246, 248)"):
        page.evaluate("byId('theme').click()")
        assert expected == page.evaluate("getComputedStyle(document.body).backgroundColor")


def test_dark_mode_follows_the_system(hostile_page: Page) -> None:
    assert "rgb(17, 21, 28)" == hostile_page.evaluate("getComputedStyle(document.body).backgroundColor")


def test_a_dark_page_is_printed_on_white_and_with_whole_lists(hostile_page: Page) -> None:
    hostile_page.evaluate(
        """addEventListener("beforeprint", () => {
          const { canvas, context } = memoryView.timeline.plane;
          window.printed = [theme.name, ...context.getImageData(canvas.width - 1, 0, 1, 1).data];
        }, { once: true })"""
    )
    hostile_page.print()
    assert ["light", 255, 255, 255, 255] == hostile_page.read("window.printed")
    assert "dark" == hostile_page.evaluate("theme.name")
    assert "rgb(17, 21, 28)" == hostile_page.evaluate("getComputedStyle(document.body).backgroundColor")
    styles = "[...document.querySelectorAll('.scroll')].map((list) => getComputedStyle(list).maxHeight)"
    assert "none" not in hostile_page.read(styles)
    hostile_page.use_medium("print")
    assert {"none"} == set(hostile_page.read(styles))
    hostile_page.use_medium("")


@pytest.mark.parametrize("theme", ["LIGHT", "DARK"])
def test_text_is_readable_in_both_themes(page: Page, theme: str) -> None:
    """A contrast of at least 4.5 to 1, as WCAG 2 asks for."""
    contrasts = read(
        page,
        f"""(() => {{
          const light = (hex) => {{
            const [r, g, b] = [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16) / 255)
              .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
            return 0.2126 * r + 0.7152 * g + 0.0722 * b;
          }};
          const contrast = (a, b) => (Math.max(light(a), light(b)) + 0.05) / (Math.min(light(a), light(b)) + 0.05);
          const {{ text, quiet, peak, accent, card, page }} = {theme};
          return [text, quiet, peak, accent].flatMap((colour) => [contrast(colour, card), contrast(colour, page)]);
        }})()""",
    )
    assert min(contrasts) >= 4.5


def test_hostile_names_are_shown_and_not_run(hostile_page: Page) -> None:
    assert hostile_page.evaluate("window.hacked === undefined && document.querySelectorAll('img').length === 0")
    hostile_page.evaluate("memoryView.pin(0)")
    for where in ("kernels", "blocks", "notes", "selection", "legend-colours", "flame-text", "sites"):
        if where == "flame-text":
            hostile_page.key("ArrowDown", "#flame")
            hostile_page.key("ArrowDown", "#flame")
        assert "<img src=x" in hostile_page.evaluate(f"byId({where!r}).textContent"), where
    hostile_page.evaluate("byId('diagnosis').scrollIntoView()")
    hostile_page.wait_for("document.documentElement.dataset.charts === 'true'")
    assert hostile_page.evaluate("window.hacked === undefined && document.querySelectorAll('img').length === 0")


def test_streams_show_kernels_and_copies_on_the_clock_of_the_device(hostile_page: Page) -> None:
    assert hostile_page.evaluate(COLOURS.format("#streams")) > 3
    assert "Device time" in hostile_page.evaluate("byId('streams').closest('.card').textContent")
    hostile_page.evaluate("byId('streams').scrollIntoView()")
    hostile_page.evaluate(SETTLE)
    box = read(hostile_page, "byId('streams').getBoundingClientRect()")
    hostile_page.mouse("mouseMoved", box["x"] + 152, box["y"] + 17)
    assert "40 ns" in hostile_page.evaluate("byId('tip').textContent")


def test_failed_allocations_are_marked(tmp_path: Path) -> None:
    trace = program()
    trace.records["kind"][-1], trace.records["size"][-1] = Kind.OOM, 5 << 20
    viz.write_page(trace, tmp_path / "oom.html")
    with Page(tmp_path / "oom.html") as page:
        assert [5 << 20] == read(page, "memoryView.device.ooms.map((oom) => oom.size)")
        assert "times out of memory" in page.evaluate("byId('tiles').textContent")
        assert "out of memory" in page.evaluate("byId('legend-colours').textContent")
        assert [] == page.errors


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


def marked_columns(page: Page) -> str:
    """How many columns of the stream timeline show the colour of a mark."""
    return page.evaluate(
        """(() => {
          const c = byId("streams");
          const copy = new OffscreenCanvas(c.width, c.height).getContext("2d", { willReadFrequently: true });
          copy.drawImage(c, 0, 0);
          const pixels = new Uint32Array(copy.getImageData(0, 0, c.width, c.height).data.buffer);
          const red = pixel(theme.peak), columns = new Set();
          pixels.forEach((value, i) => { if (value === red) columns.add(i % c.width); });
          return columns.size;
        })()"""
    )


def ranged() -> Trace:
    """Two steps on the host, of 10 ms each, with a block in each and a range inside of the second."""
    rows: list[tuple[Kind, int, dict[str, Any]]] = []
    for step in (0, 1):
        at, block = 10_000_000 * step, {"address": 1 << 40, "size": 1 << 20, "aux0": 1 << 20}
        rows.append((Kind.RANGE_PUSH, at, {"device": -1, "name": 1 + step}))
        rows.append((Kind.BLOCK_ALLOC, at + 1_000_000, block))
        rows.append((Kind.RANGE_PUSH, at + 2_000_000, {"device": -1, "name": 3}))
        rows.append((Kind.RANGE_POP, at + 4_000_000, {"device": -1}))
        rows.append((Kind.BLOCK_FREE_REQUESTED, at + 5_000_000, block))
        rows.append((Kind.BLOCK_FREE_COMPLETED, at + 5_000_000, block))
        rows.append((Kind.RANGE_POP, at + 9_000_000, {"device": -1}))
    records = np.zeros(len(rows), RECORD)
    for i, (kind, time, fields) in enumerate(rows):
        records[i]["kind"], records[i]["time"] = kind, time
        for field, value in fields.items():
            records[i][field] = value
    return Trace(records, names=["", "step 0", "step 1", "inside"], source="ranged.ctrace")


def test_ranges_stand_above_the_memory_and_a_click_shows_one_alone(tmp_path: Path) -> None:
    viz.write_page(ranged(), tmp_path / "ranged.html")
    with Page(tmp_path / "ranged.html") as page:
        page.evaluate(SETTLE)
        assert page.evaluate(COLOURS.format("#ranges")) > 3
        assert [0, 1] == read(page, "[...new Set(memoryView.ranges.ranges.lane)]")
        assert ["step 1", "9 ms, from 10 ms; a click shows it alone"] == read(
            page, "memoryView.ranges.describe(12e6, 0).split(String.fromCharCode(10))"
        )
        assert page.evaluate("memoryView.ranges.describe(12.5e6, 1).startsWith('inside')")
        assert page.evaluate("memoryView.ranges.describe(9.5e6, 0) === null")
        page.evaluate("memoryView.ranges.pick(12e6, 0)")
        assert [10_000_000, 15_000_000] == [round(x, -6) for x in read(page, "[memoryView.from, memoryView.to]")]
        assert [] == page.errors


def test_without_ranges_there_is_no_band_of_them(page: Page) -> None:
    assert page.evaluate("byId('ranges-box').hidden === (memoryView.device.ranges.name.length === 0)")


@pytest.mark.parametrize("timed", [True, False], ids=["timed", "calls only"])
def test_findings_come_first_and_both_accesses_are_marked_on_the_streams(tmp_path: Path, timed: bool) -> None:
    trace, found = racy(timed=timed)
    viz.write_page(trace, tmp_path / "racy.html", found)
    with Page(tmp_path / "racy.html") as page:
        page.evaluate(SETTLE)
        assert "defects" == page.evaluate("document.querySelector('main').firstElementChild.id")
        text = page.evaluate("byId('defects').innerText")
        for words in ("write by kernel kernel on stream 1", "kernel.py:3", "other.py:9", found.findings[0].fingerprint):
            assert words in text
        assert marked_columns(page) > 40
        assert [] == page.errors


def test_a_finding_shows_the_source_of_the_kernel_and_of_its_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "program.py"
    program.write_text("first\n    launch(x)  # <b>here</b>\n")
    monkeypatch.setitem(linecache.cache, "odd.cu", (1, None, ["one\n", "out[i] = in[i + 1];\n"], "odd.cu"))
    trace, _ = racy()
    trace.header["start_time"] = "9999-01-01T00:00:00+00:00"  # lines are those of the recording
    finding = DeviceFinding(
        kind=FindingKind.OUT_OF_BOUNDS,
        check="memcheck",
        operation="kernel k",
        agent="stream 1",
        mode="read",
        space="global",
        address=1 << 40,
        size=4,
        block=(0, 0, 0),
        thread=(1, 0, 0),
        source=SourceLine("/nowhere/odd.cu", 2),
        other_block=(),
        other_thread=(),
        other_source=None,
        text="behind the end",
        stack=(Frame(str(program), "f", 2),),
        record=3,
        buffer=None,
        count=1,
        fingerprint="f",
    )
    viz.write_page(trace, tmp_path / "page.html", sanitize.Report((), on_device=(finding,)))
    with Page(tmp_path / "page.html") as page:
        page.evaluate("document.querySelector('.defect').open = true")
        page.evaluate(SETTLE)
        code = read(page, "[...document.querySelectorAll('#defects .stack li')].map((li) => li.innerText)")
        assert ["odd.cu:2, thread (1, 0, 0) of block (0, 0, 0)\nout[i] = in[i + 1];"] == code[:1]
        assert [f"{program}:2 in f\nlaunch(x)  # <b>here</b>"] == code[1:]
        assert [] == page.errors


def test_a_finding_in_a_hostile_trace_is_text_only(tmp_path: Path) -> None:
    trace, found = racy(HOSTILE)
    viz.write_page(trace, tmp_path / "racy.html", found)
    with Page(tmp_path / "racy.html") as page:
        assert HOSTILE in page.evaluate("byId('defects').textContent")
        assert page.evaluate("window.hacked === undefined")
        assert [] == page.errors


def test_a_clean_check_says_so_on_the_page(tmp_path: Path) -> None:
    trace = program()
    viz.write_page(trace, tmp_path / "clean.html", sanitize.Report(()))
    with Page(tmp_path / "clean.html") as page:
        assert "nothing was found" in page.evaluate("byId('defects').innerText")
        assert [] == page.errors


def test_code_in_what_was_not_checked_stands_in_its_line(tmp_path: Path) -> None:
    gap = sanitize.Gap(sanitize.GapKind.HOST_READS, 1)
    viz.write_page(program(), tmp_path / "gaps.html", sanitize.Report((), gaps=(gap,)))
    with Page(tmp_path / "gaps.html") as page:
        code = "document.querySelector('#defects-gaps code')"
        assert "/proc/self/pagemap" == page.evaluate(f"{code}.textContent")
        assert "inline" == page.evaluate(f"getComputedStyle({code}).display")


def test_pinned_memory_stands_on_the_page_where_it_was_recorded(tmp_path: Path) -> None:
    pinned = PinnedMemory(segments=2, reserved=8 << 20, active=1 << 20, peak_active=3 << 20, events=4)
    viz.write_page(replace(torch_snapshot.read(RECORDING), pinned=pinned), tmp_path / "x.html")
    with Page(tmp_path / "x.html") as page:
        assert page.evaluate("!document.getElementById('pinned').hidden")
        text = page.evaluate("document.getElementById('pinned-tiles').innerText")
        assert [] == page.errors
    assert all(words in text for words in ("1 MiB", "3 MiB", "8 MiB", "2 segments"))


def test_those_who_hold_pinned_memory_are_a_table(tmp_path: Path) -> None:
    records = np.zeros(2, RECORD)
    records["kind"], records["size"], records["name"] = Kind.HOST_ALLOC, 3 << 20, 1
    records["address"], records["stack"] = (1 << 40, 1 << 41), (1, 0)
    trace = Trace(records, ["", "cuMemHostAlloc"], [(), (0,)], [Frame("<b>load.py", "load", 7)])
    viz.write_page(trace, tmp_path / "x.html")
    with Page(tmp_path / "x.html") as page:
        assert page.evaluate("!document.getElementById('pinned').hidden")
        assert "6 MiB" in page.evaluate("document.getElementById('pinned-tiles').innerText")
        rows = page.evaluate("[...document.querySelectorAll('#pinned-sites .row')].map((row) => row.innerText)")
        assert "<b>load.py:7 (load) the program itself, taken from the driver, 1 piece" in rows[1].replace("\n", " ")
        assert 2 == len(rows)
        assert [] == page.errors


def test_arrays_of_a_library_are_a_table(tmp_path: Path) -> None:
    records = np.zeros(2, RECORD)
    records["kind"], records["size"], records["name"], records["aux0"] = Kind.POOL_HELD, 3 << 20, 1, 2
    records["stack"] = 1, 0
    trace = Trace(records, ["", "<b>JAX"], [(), (0,)], [Frame("<b>load.py", "load", 7)])
    viz.write_page(trace, tmp_path / "x.html")
    with Page(tmp_path / "x.html") as page:
        text = page.evaluate("document.getElementById('library-blocks').innerText")
        assert "Arrays of <b>JAX on device 0" in text and "6 MiB together" in text
        rows = page.evaluate("[...document.querySelectorAll('#library-blocks .row')].map((row) => row.innerText)")
        assert 2 == len(rows) and "<b>load.py:7 (load) 2 arrays" in rows[1].replace("\n", " ")
        assert [] == page.errors


def test_without_pinned_memory_no_word_of_it_is_shown(snapshot_page: Page) -> None:
    assert snapshot_page.evaluate("document.getElementById('pinned').hidden")


def test_planned_memory_is_drawn_where_its_buffers_lie(tmp_path: Path) -> None:
    viz.write_page(planned(HOSTILE), tmp_path / "x.html")
    with Page(tmp_path / "x.html") as page:
        text = page.evaluate("byId('plans').innerText")
        of_one = "(r) => ['x', 'y', 'width', 'height'].map((a) => Number(r.getAttribute(a)).toFixed(1)).join(' ')"
        boxes = page.evaluate(f"[...document.querySelectorAll('.plan rect')].map({of_one})")
        assert page.evaluate("window.hacked === undefined")
        assert [] == page.errors
    assert all(words in text for words in (HOSTILE, "3 KiB", "4 KiB", "nodes 2 to 3, kept", "2 KiB at byte 1,024"))
    assert 2 == text.count(f"{HOSTILE} in {HOSTILE}")
    assert ["250.0 66.7 750.0 133.3", "0.0 0.0 500.0 66.7", "500.0 0.0 500.0 66.7"] == boxes


def test_without_planned_memory_no_word_of_it_is_shown(snapshot_page: Page) -> None:
    assert snapshot_page.evaluate("document.getElementById('plans').hidden")


@pytest.mark.parametrize(("column", "bars"), [("time", 1), ("stream", 2), ("pool", 2), ("small", 2)])
def test_parts_of_an_expandable_segment_are_one_bar_within_a_stream_and_a_pool(
    page: Page, column: str, bars: int
) -> None:
    found = read(
        page,
        f"""(() => {{
          const segments = {{ start: [0, 0], end: [9, 9], address: [4096, 4106], size: [10, 10], expandable: [1, 1] }};
          for (const column of ["time", "stream", "pool", "small"]) segments[column] = [0, 0];
          segments.{column}[1] = 1;
          const blocks = {{ address: [4110], size: [5] }};
          const memory = {{ where: () => "", isPrivate: [false, false] }};
          const view = {{ row: 1, memory, device: {{ blocks, segments, liveAt: () => [0] }} }};
          MomentView.prototype.collect.call(view);
          return view.bars.map((bar) => [bar.address, bar.size, bar.used]);
        }})()""",
    )
    if bars == 1:
        assert [[4096, 20, 5]] == found
    else:
        assert [[4096, 10, 0], [4106, 10, 5]] == found


def test_each_event_of_a_few_has_one_label(page: Page) -> None:
    labels = read(
        page,
        """(() => {
          byId("axis").value = "event";
          byId("axis").dispatchEvent(new Event("change"));
          const { plane } = memoryView.timeline;
          plane.setView({ ...plane.view, x0: 0, x1: 3 });
          const { context } = plane;
          const texts = [];
          context.fillText = (text) => texts.push(text);
          plane.drawNow();
          delete context.fillText;
          return texts.filter((text) => /^[0-9]+$/.test(text));
        })()""",
    )
    assert ["0", "1", "2", "3"] == labels
