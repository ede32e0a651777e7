"""The page that compares two recordings."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from chromium import EXECUTABLE, SETTLE, Page
from pages import HOSTILE, program
from twin import payload_of, unpack

from cudatool import analyze, viz
from cudatool.collect import torch_snapshot
from cudatool.trace.model import Trace
from cudatool.viz.diff_page import diff_payload

DATA = Path(__file__).resolve().parents[1] / "data"
in_browser = pytest.mark.skipif(EXECUTABLE is None, reason="no Chromium on this machine")


def recordings() -> tuple[Trace, Trace]:
    names = ("graphs__default.pickle.xz", "streams_default.pickle.xz")
    before, after = (torch_snapshot.read(DATA / name) for name in names)
    return before, after


def test_the_payload_holds_what_the_analysis_says() -> None:
    before, after = recordings()
    found = analyze.diff(before, after)
    document = unpack(diff_payload(before, after, found))
    assert ["graphs__default.pickle.xz", "streams_default.pickle.xz"] == [document["before"], document["after"]]
    for one, device in zip(found, document["devices"], strict=True):
        assert {"before": one.before, "after": one.after} == device["active"]
        assert {"before": one.reserved_before, "after": one.reserved_after} == device["reserved"]
        expected = [(row.label, row.before, row.after, row.change) for row in one.rows]
        assert expected == [(row["label"], row["before"], row["after"], row["change"]) for row in device["rows"]]
        assert one.before == max(device["curves"]["before"]["active"])
        assert one.after == max(device["curves"]["after"]["active"])
        assert one.reserved_after == max(device["curves"]["after"]["reserved"])
        assert 0 == min(device["curves"]["after"]["time"])


def test_a_row_has_the_stack_of_each_side() -> None:
    before, after = recordings()
    (found,) = analyze.diff(before, before)
    for row in found.rows:
        assert row.stack_before == row.stack_after
        assert bool(row.stack_before) == ("no stack" not in row.label)
    gone = [row for row in analyze.diff(before, after)[0].rows if not row.count_after]
    assert gone
    assert all(row.stack_after == () for row in gone)


def test_a_device_that_one_has_not_is_shown_beside_nothing() -> None:
    before = program(repeat=0)
    after = program()
    (device,) = unpack(diff_payload(before, after, analyze.diff(before, after)))["devices"]
    assert [] == device["curves"]["before"]["active"]
    assert device["curves"]["after"]["active"]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("diff") / "diff.html"
    before, after = recordings()
    viz.write_diff(before, after, analyze.diff(before, after), path)
    return path


@pytest.fixture
def page(opened: Page) -> Page:
    opened.evaluate("diffView.restore({})")
    return opened


ROWS = "[...byId('rows').tBodies[0].rows].map((row) => [...row.cells].map((cell) => cell.textContent))"


@in_browser
def test_every_differing_call_site_is_a_row_the_largest_change_first(page: Page) -> None:
    before, after = recordings()
    (found,) = analyze.diff(before, after)
    differing = [row for row in found.rows if row.change or row.count_before != row.count_after]
    rows = page.read(ROWS)
    assert len(differing) == len(rows)
    assert f"{differing[0].count_before} → {differing[0].count_after}" == rows[0][-1]
    assert rows[0][0].startswith(differing[0].label)
    page.evaluate("byId('all').click()")
    assert len(found.rows) == len(page.read(ROWS))
    page.evaluate("byId('order').value = 'shrunk'; diffView.list()")
    assert "-" == page.read(ROWS)[0][3][0]


@in_browser
def test_the_height_follows_what_is_shown(page: Page) -> None:
    before, after = (recording for recording in recordings())
    (found,) = analyze.diff(before, after)
    high = "-diffView.plane.view.y0 / 1.06"
    assert page.evaluate(high) == pytest.approx(max(found.before, found.after))
    page.evaluate("byId('reserved').click()")
    assert page.evaluate(high) == pytest.approx(max(found.reserved_before, found.reserved_after))
    page.evaluate("byId('reserved').click(); byId('legend').children[1].click()")
    assert page.evaluate(high) == pytest.approx(found.before)
    assert "false" == page.evaluate("document.activeElement.getAttribute('aria-pressed')")


@in_browser
def test_no_curve_of_reserved_bytes_is_drawn_where_they_are_not_known(page: Page) -> None:
    drawn = page.read(
        """(() => {
          const { reserved } = diffView.device;
          diffView.device.reserved = { before: 1, after: null };
          byId("reserved").checked = true;
          const drawn = [];
          diffView.drawCurve = (side, values) => drawn.push([side, values === diffView.device.curves[side].reserved]);
          diffView.draw();
          delete diffView.drawCurve;
          diffView.device.reserved = reserved;
          return drawn;
        })()"""
    )
    assert [["before", True], ["before", False], ["after", False]] == drawn


@in_browser
def test_keys_move_the_cursor_and_what_it_meets_is_said(page: Page) -> None:
    said = page.evaluate("byId('moment').textContent")
    assert "change: " in said
    page.key("Home", "#curves")
    page.key("ArrowRight", "#curves")
    assert said != page.evaluate("byId('moment').textContent")
    page.key("/", "#curves")
    assert "search" == page.evaluate("document.activeElement.id")


@in_browser
def test_more_call_sites_than_a_call_takes_arguments_are_listed(page: Page) -> None:
    listed = page.read(
        """(() => {
          const { rows } = diffView.device;
          diffView.device.rows = Array(300000).fill(rows[0]);
          diffView.list();
          const listed = [byId("rows").tBodies[0].rows.length, byId("count").textContent];
          diffView.device.rows = rows;
          return listed;
        })()"""
    )
    assert listed[0] == 500
    assert listed[1].startswith("300,000 call sites, the first 500 shown")


@in_browser
def test_a_row_opens_to_show_the_stacks(page: Page) -> None:
    page.evaluate("byId('rows').querySelector('details').open = true")
    page.wait_for("byId('rows').querySelector('details li')?.textContent.includes('.py:')")


@in_browser
def test_a_link_leads_back(page: Page, file: Path) -> None:
    state = """[byId('axis').value, byId('order').value, byId('search').value, diffView.cursor, diffView.plane.view,
      [...diffView.hidden], byId('reserved').checked, byId('all').checked]"""
    page.evaluate(
        """(() => {
          byId("axis").value = "event";
          byId("order").value = "after";
          byId("search").value = "py";
          byId("reserved").checked = byId("all").checked = true;
          diffView.hidden.add("before");
          diffView.show(0);
          diffView.plane.zoom(0.5, false);
          diffView.moveTo(50);
        })()"""
    )
    page.wait_for("location.hash.includes('hide=before')")
    page.evaluate(SETTLE)
    expected = page.read(state)
    with Page(file, fragment=page.evaluate("location.hash")) as again:
        assert expected == again.read(state)
        assert [] == again.errors


@in_browser
def test_hostile_names_and_links_are_text_only(tmp_path: Path) -> None:
    hostile = program(HOSTILE)
    other = replace(program(), source=HOSTILE)
    viz.write_diff(other, hostile, analyze.diff(other, hostile), tmp_path / "diff.html")
    text = (tmp_path / "diff.html").read_text()
    assert HOSTILE in str(unpack(payload_of(text)))
    assert "hacked" not in text.replace(text.split("<title>")[1].split("</title>")[0], "")
    with Page(tmp_path / "diff.html", fragment="#shown=NaN,1&at=1e999&hide=x&device=7&axis=<b>", dark=True) as page:
        page.evaluate(
            "byId('all').click(); document.querySelectorAll('details').forEach((one) => { one.open = true; })"
        )
        page.evaluate(SETTLE)
        assert HOSTILE in page.evaluate("document.body.textContent")
        assert page.evaluate("window.hacked === undefined")
        assert [] == page.errors


@in_browser
def test_two_recordings_without_memory_say_so(tmp_path: Path) -> None:
    empty = program(repeat=0)
    viz.write_diff(empty, empty, analyze.diff(empty, empty), tmp_path / "diff.html")
    with Page(tmp_path / "diff.html") as page:
        assert page.evaluate("byId('nothing').checkVisibility() && !byId('compared').checkVisibility()")
        assert [] == page.errors
