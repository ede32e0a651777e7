"""What the page shows when it opens, how that follows the user, and the link that leads back there."""

from __future__ import annotations

import json
from pathlib import Path
from urllib.parse import urlencode

import numpy as np
import pytest
from chromium import EXECUTABLE, SETTLE, Page
from pages import HOSTILE, program
from twin import unpack

from cudatool import analyze, viz
from cudatool.collect import torch_snapshot
from cudatool.units import format_share
from cudatool.viz.payload import idle_share, payload

RECORDING = Path(__file__).resolve().parents[1] / "data" / "streams_default.pickle.xz"
in_browser = pytest.mark.skipif(EXECUTABLE is None, reason="no Chromium on this machine")


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ([], 0),
        ([5], 0),
        ([5, 5, 5], 0),
        (list(range(100)), 0),
        ([0, 1, 1, 2, 3], 0),
        ([*range(100), 1000], pytest.approx(901 / 1000)),  # one gap of 901, the mean is 10
        ([*range(100), 99 + 9], 0),  # less than ten times the mean
        ([0, 1000, *range(1001, 1100)], pytest.approx(1000 / 1099)),
    ],
)
def test_idle_is_the_share_of_time_in_long_gaps(times: list[int], expected: float) -> None:
    assert expected == idle_share(np.array(times, np.int64))


def test_the_payload_says_how_much_of_the_time_is_idle() -> None:
    report = analyze.report(torch_snapshot.read(RECORDING))
    (device,) = unpack(payload(report))["devices"]
    assert idle_share(report.timelines[0].time) == device["idle"]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("view") / "page.html"
    viz.write_page(torch_snapshot.read(RECORDING), path)
    return path


@pytest.fixture
def page(opened: Page) -> Page:
    opened.evaluate("memoryView.restore({})")
    opened.evaluate(SETTLE)
    return opened


def heights(page: Page) -> list[float]:
    """Return the lowest and the highest bytes that the timeline shows."""
    low, high = page.read("[-memoryView.timeline.plane.view.y1, -memoryView.timeline.plane.view.y0]")
    return [low, high]


@in_browser
def test_the_height_fits_what_is_live_and_what_is_reserved_on_request(page: Page) -> None:
    (curve,) = analyze.report(torch_snapshot.read(RECORDING)).timelines
    assert [0, pytest.approx(1.06 * curve.active.max())] == heights(page)
    page.evaluate("byId('reserved').click()")
    assert [0, pytest.approx(1.06 * curve.reserved.max())] == heights(page)
    assert page.evaluate("memoryView.map.plane.view.y1 === memoryView.device.extent")
    page.evaluate("byId('reserved').click()")
    assert [0, pytest.approx(1.06 * curve.active.max())] == heights(page)
    assert page.evaluate("memoryView.map.plane.view.y1 === memoryView.device.used")


@in_browser
def test_zooming_time_fits_the_height_to_what_is_shown(page: Page) -> None:
    (curve,) = analyze.report(torch_snapshot.read(RECORDING)).timelines
    page.evaluate("memoryView.setRange(memoryView.x[10], memoryView.x[60])")
    first, last = page.read("memoryView.shownRows()")
    assert [0, pytest.approx(1.06 * curve.active[first : last + 1].max())] == heights(page)


@in_browser
def test_a_height_that_the_user_chose_stays_until_all_is_shown(page: Page) -> None:
    whole = heights(page)
    page.key("]", "#timeline")
    chosen = heights(page)
    assert chosen[1] - chosen[0] == pytest.approx(0.7 * whole[1])
    page.key("+", "#timeline")
    assert chosen == heights(page)
    page.key("0", "#timeline")
    assert whole == heights(page)


@in_browser
def test_dragging_a_fitted_timeline_moves_it_sideways_only(page: Page) -> None:
    page.evaluate("memoryView.setRange(memoryView.x[10], memoryView.x[60])")
    page.evaluate("memoryView.timeline.plane.pan(1, 1e6)")
    assert page.evaluate("memoryView.timeline.isFitted")
    assert 0 == heights(page)[0]


@in_browser
def test_shares_are_written_as_in_the_text(page: Page) -> None:
    shares = [0, 0.0004, 0.125, 0.9994, 0.9996, 1]
    assert [format_share(share) for share in shares] == page.evaluate(f"{shares}.map(formatShare)")


@in_browser
def test_the_axis_is_the_order_of_events_where_most_of_the_time_is_idle(page: Page) -> None:
    idle = page.evaluate("memoryView.device.idle")
    assert idle > 0.5
    assert "event" == page.evaluate("byId('axis').value")
    assert f"Order of events: {format_share(idle)} of the time is idle" == page.evaluate(
        "byId('axis-note').textContent"
    )
    assert "ten times as long as the mean gap" in page.evaluate("byId('help').textContent")


@in_browser
def test_the_other_axis_keeps_what_is_shown(page: Page) -> None:
    page.evaluate("memoryView.setRange(100, 201)")
    page.evaluate("byId('axis').value = 'time'; byId('axis').dispatchEvent(new Event('change'))")
    shown = page.read("memoryView.shownRows()")
    assert shown[0] == pytest.approx(100, abs=1)
    assert shown[1] == pytest.approx(201, abs=2)
    assert "Host time" == page.evaluate("byId('axis-note').textContent")


@in_browser
def test_evenly_spaced_events_are_shown_over_time(tmp_path: Path) -> None:
    viz.write_page(program(), tmp_path / "page.html")
    with Page(tmp_path / "page.html") as even:
        assert "time" == even.evaluate("byId('axis').value")


@in_browser
@pytest.mark.parametrize("colour", ["site", "purpose", "stream", "pool"])
def test_a_click_on_the_legend_hides_what_it_names(page: Page, colour: str) -> None:
    page.evaluate(f"byId('colour').value = '{colour}'; memoryView.rank()")
    box = {"stream": "legend-streams", "pool": "legend-pools"}.get(colour, "legend-colours")
    if page.evaluate(f"byId('{box}').hidden"):
        pytest.skip("the recording has one only")
    all_of_it = page.evaluate("memoryView.device.blocks.count")
    chip = f"document.querySelector('#{box} [aria-pressed]')"
    name = page.evaluate(f"{chip}.textContent")
    page.evaluate(f"{chip}.focus(); {chip}.click()")
    hidden = f"[...document.querySelectorAll('#{box} [aria-pressed=false]')].map((e) => e.textContent)"
    assert [name] == page.read(hidden)
    assert name == page.evaluate("document.activeElement.textContent")
    shown = page.evaluate("memoryView.visible.reduce((sum, one) => sum + one, 0)")
    assert shown < all_of_it
    live = page.evaluate("memoryView.live.reduce((most, bytes) => Math.max(most, bytes), 0)")
    assert [0, pytest.approx(1.06 * max(live, 1))] == heights(page)
    assert page.evaluate("byId('hidden').textContent").startswith("Hidden: 1 ")
    page.evaluate("byId('show-hidden').click()")
    assert [] == page.read(hidden)
    assert page.evaluate("memoryView.visible === null && byId('hidden-box').hidden")


STATE = """[memoryView.row, memoryView.from, memoryView.to, memoryView.pinned, byId('axis').value, byId('colour').value,
  byId('search').value, byId('only').checked, byId('reserved').checked, memoryView.timeline.plane.view,
  Object.values(memoryView.hidden).map((items) => [...items].sort()), byId('selection').hidden]"""


@in_browser
def test_a_link_leads_back_to_what_was_looked_at(page: Page, file: Path) -> None:
    assert "" == page.evaluate("location.hash")
    opening = page.read(STATE)
    page.evaluate(
        """(() => {
          byId("axis").value = "time";
          memoryView.chooseAxis();
          byId("colour").value = "stream";
          byId("search").value = "train & <b>";
          byId("reserved").click();
          memoryView.hidden.sites.add(1).add(0);
          memoryView.find();
          memoryView.setRange(memoryView.x[100], memoryView.x[400]);
          memoryView.moveTo(222);
          memoryView.pin(17);
        })()"""
    )
    page.key("]", "#timeline")
    page.wait_for("location.hash.includes('pin=17')")
    page.evaluate(SETTLE)
    expected, link = page.read(STATE), page.evaluate("location.hash")
    assert opening != expected
    with Page(file, fragment=link) as again:
        again.evaluate(SETTLE)
        assert expected == again.read(STATE)
        assert link == again.evaluate("location.hash")
        again.evaluate("location.hash = '#axis=event'")
        again.wait_for("byId('axis').value === 'event'")
        again.evaluate(SETTLE)
        assert opening == again.read(STATE)
        assert [] == again.errors


@in_browser
@pytest.mark.parametrize(
    "fragment",
    [
        urlencode({"find": HOSTILE, "colour": HOSTILE, "axis": "__proto__", "device": HOSTILE}),
        "shown=1e999,NaN&at=-1&pin=99999999&bytes=5,1&hide-sites=1.5,-1,1e9,x&hide-pools=9",
        "%%%&&&===&shown=&at",
    ],
)
def test_a_link_that_makes_no_sense_opens_the_page(file: Path, fragment: str) -> None:
    with Page(file, fragment=f"#{fragment}") as page:
        page.evaluate(SETTLE)
        assert page.evaluate("memoryView.isWhole() && memoryView.pinned === null && memoryView.timeline.isFitted")
        assert page.evaluate("memoryView.row === memoryView.device.peak.row && window.hacked === undefined")
        assert [0] * 4 == page.read("Object.values(memoryView.hidden).map((items) => items.size)")
        assert [] == page.errors


@in_browser
def test_what_grows_stands_above_the_drawings(page: Page) -> None:
    follows = "Node.DOCUMENT_POSITION_FOLLOWING"
    assert page.evaluate(f"(byId('leaks-card').compareDocumentPosition(byId('timeline')) & {follows}) > 0")
    assert page.evaluate(f"(byId('advice').compareDocumentPosition(byId('leaks-card')) & {follows}) > 0")


MEANINGS = (Path(viz.__file__).parent / "meanings.js").read_text()


@pytest.mark.parametrize("topic", [*analyze.Cause, *analyze.Topic])
def test_every_topic_of_advice_has_a_meaning(topic: str) -> None:
    name = topic.value
    assert f'  "{name}": "' in MEANINGS or f'  {name}: "' in MEANINGS


@in_browser
def test_advice_leads_to_what_it_means(tmp_path: Path) -> None:
    recording = torch_snapshot.read(RECORDING.with_name("prefetch__default.pickle.xz"))
    advice = analyze.report(recording).diagnoses[0].advice
    assert advice
    viz.write_page(recording, tmp_path / "page.html")
    links = "[...document.querySelectorAll('#advice-list button')]"
    with Page(tmp_path / "page.html") as page:
        assert [remedy.text for remedy in advice] == page.read(f"{links}.map((link) => link.textContent)")
        link = page.evaluate("location.hash")
        page.evaluate(f"{links}[0].click()")
        assert advice[0].topic == page.evaluate("document.activeElement.textContent")
        assert page.evaluate("document.activeElement.checkVisibility()")
        assert link == page.evaluate("location.hash")
        assert [] == page.errors


@in_browser
@pytest.mark.parametrize("sites", [0, 1])
def test_the_page_says_so_where_leaks_could_not_be_told(page: Page, sites: int) -> None:
    """A page without a list of leaks reads as one without leaks."""
    grown = {"label": "train.py:3", "why": "It grew too few times.", "growth": 9, "confidence": "low", "stack": 0}
    unclear = {
        "leaks": [],
        "unclear": [grown] * sites,
        "why": None if sites else "No steps.",
        "verdict": "could not tell",
    }
    draw = "DiagnosisView.prototype.drawLeaks.call(memoryView, {})"
    shown = unclear | {"steps": {"count": 0, "source": "no steps", "confidence": "low"}}
    page.evaluate(draw.format(json.dumps(shown)))
    said = page.evaluate("byId('leaks-card').hidden ? '' : byId('leaks-card').innerText")
    page.evaluate(draw.format(json.dumps(shown | {"verdict": "no growth", "unclear": []})))
    assert page.evaluate("byId('leaks-card').hidden")
    assert "Could not tell whether anything leaks" in said
    assert ("train.py:3 could not tell: It grew too few times." if sites else "No steps.") in said


@in_browser
@pytest.mark.parametrize("sites", [0, 1])
def test_code_in_the_reason_why_leaks_could_not_be_told_stands_as_code(page: Page, sites: int) -> None:
    why = str(analyze.Doubt.NOTHING_REPEATS.why)
    grown = {"label": "train.py:3", "why": why, "growth": 9, "confidence": "low", "stack": 0}
    shown = {
        "leaks": [],
        "unclear": [grown] * sites,
        "why": None if sites else why,
        "verdict": "could not tell",
        "steps": {"count": 0, "source": "no steps", "confidence": "low"},
    }
    page.evaluate(f"DiagnosisView.prototype.drawLeaks.call(memoryView, {json.dumps(shown)})")
    assert ['with cudatool.range("step"):'] == page.evaluate(
        "[...document.querySelectorAll('#leaks-card code')].map((code) => code.textContent)"
    )
    assert "`" not in page.evaluate("byId('leaks-card').innerText")
