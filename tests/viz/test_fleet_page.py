"""The page of many ranks: what it is given, and how it shows it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from chromium import EXECUTABLE, SETTLE, Page
from pages import HOSTILE
from twin import payload_of, unpack

from cudatool import viz
from cudatool.fleet.compare import Comparison, Metric, MetricChange, SiteChange
from cudatool.fleet.pace import Collectives, RankWait, StepTime
from cudatool.fleet.pair import MemoryDifference, PairDifference, RankPair
from cudatool.fleet.picture import Picture, SiteBytes, StepMemory
from cudatool.fleet.report import Difference, RankEnd, RankFinding, RankMemory, RunReport
from cudatool.fleet.words import described, described_pair
from cudatool.viz.fleet_page import fleet_page, fleet_payload

in_browser = pytest.mark.skipif(EXECUTABLE is None, reason="no Chromium on this machine")
MIB = 1 << 20
STEPS = 20


def pictured(count: int = 8, *, name: str = "nightly", differs: int | None = 5, start: int = 0) -> Picture:
    """A run whose rank `differs` has a leak and runs out of memory after step 14."""
    ranks = range(start, start + count)
    peak = np.full((count, STEPS), 100 * MIB) + np.arange(STEPS) * MIB
    findings, ends = [], []
    if differs is not None:
        row = differs - start
        peak[row] += np.arange(STEPS) * 9 * MIB
        peak[row, 15:] = -1
        findings = [
            RankFinding(differs, Difference.OOM, value=10**18),
            RankFinding(differs, Difference.LEAK, f"{name}.py:3 (grow)", value=135 * MIB, usual=0),
            RankFinding(
                differs, Difference.SIZE, "a.py:1 (f)", "a.py:1 (f)", value=20 * MIB + 512, usual=20 * MIB, sequence=7
            ),
        ]
        ends = [RankEnd(differs, Difference.OOM, 10**18), RankEnd(start, Difference.ENDED_EARLY, None)]
    memory = [
        RankMemory(
            rank,
            f"{name}{rank // 4}",
            int(one.max()),
            None if rank == 2 else 200 * MIB,
            5,
            int(rank == differs),
            "closed",
        )
        for rank, one in zip(ranks, peak, strict=True)
    ]
    waits = tuple(RankWait(rank, 1000 * rank, -rank, 0, 0) for rank in ranks)
    report = RunReport(
        run=name,
        ranks=tuple(memory),
        missing=(start + count,),
        median_peak=119 * MIB,
        compared=True,
        findings=tuple(findings),
        not_looked_at=("Clocks: none.",),
        ends=tuple(ends),
        steps=tuple(StepTime(i, count, 10**6, 10**6 + i * 1000, start + i % count) for i in range(STEPS)),
        collectives=Collectives(40, 10**8, waits),
    )
    sites = (SiteBytes(differs, "a.py:1 (f)", 90 * MIB, 10 * MIB),) if differs is not None else ()
    return Picture(report, StepMemory(STEPS, 1, peak), sites)


def compared() -> Comparison:
    metrics = (MetricChange(Metric.PEAK, 5 * MIB, 7 * MIB), MetricChange(Metric.RESERVED, None, 7))
    return Comparison("old", metrics, (SiteChange("a.py (f)", 0, 3 * MIB),))


def test_the_payload_holds_what_the_report_says() -> None:
    one, other = pictured(), pictured(3, name="second", differs=None)
    document = unpack(fleet_payload("set", [one, other], compared()))
    run = document["runs"][0]
    assert ["nightly", "second"] == [run["run"] for run in document["runs"]]
    assert list(range(8)) == run["ranks"]["rank"] and [8] == run["missing"]
    assert [rank.peak_active for rank in one.report.ranks] == run["ranks"]["peak"]
    assert [200 * MIB, 200 * MIB, -1] == run["ranks"]["reserved"][:3]
    assert one.memory is not None and one.memory.peak.ravel().tolist() == run["memory"]["peak"]
    assert [(f.rank, f.difference, described(f)) for f in one.report.findings] == [
        (f["rank"], f["in"], f["text"]) for f in run["findings"]
    ]
    assert [(5, 0), (0, None)] == [(end["rank"], end["after"]) for end in run["ends"]]
    assert [step.longest_rank for step in one.report.steps] == run["steps"]["longest_rank"]
    assert [-rank for rank in range(8)] == run["collectives"]["awaited"]
    assert [{"rank": 5, "site": "a.py:1 (f)", "bytes": 90 * MIB, "usual": 10 * MIB}] == run["sites"]
    assert [5 * MIB, None] == [metric["before"] for metric in document["against"]["metrics"]]
    assert [] == document["runs"][1]["findings"] and [] == document["runs"][1]["sites"]


def test_the_payload_of_a_run_that_has_nothing() -> None:
    report = RunReport("none", (), (), 0, False, (), ("0 ranks",), (), (), None)
    document = unpack(fleet_payload("set", [Picture(report, None, ())]))
    assert document["runs"][0]["memory"] is None and document["runs"][0]["collectives"] is None
    assert [] == document["runs"][0]["ranks"]["rank"] and document["against"] is None


def two_ranks() -> Picture:
    found = PairDifference(Difference.SIZE, ("a.py:1 (f)",) * 2, (MIB, 3 * MIB), 7, (2, 2))
    one = pictured(2, differs=None)
    held = (MemoryDifference("site", "a.py:1 (f)", (MIB, 3 * MIB)), MemoryDifference("library", "nccl", (2 * MIB, 0)))
    return replace(one, report=replace(one.report, pair=RankPair((0, 1), (found,), held, (("nccl",), ()))))


def test_the_payload_of_two_ranks_names_both() -> None:
    one = two_ranks()
    document = unpack(fleet_payload("set", [one, pictured(differs=None)]))
    pair = document["runs"][0]["pair"]
    assert one.report.pair is not None and [0, 1] == pair["ranks"] and document["runs"][1]["pair"] is None
    words = "from allocation 7 on (step 2), a.py:1 (f): rank 0 requests 1 MiB, rank 1 3 MiB"
    assert words == described_pair(one.report.pair, one.report.pair.differences[0])
    assert [{"in": "size", "text": words}] == pair["differences"]
    assert [("Call site", "a.py:1 (f)"), ("Library", "nccl")] == [(row["by"], row["name"]) for row in pair["memory"]]
    assert [[MIB, 3 * MIB], [2 * MIB, 0]] == [row["bytes"] for row in pair["memory"]]
    assert [["nccl"], []] == pair["libraries"]


@in_browser
def test_two_ranks_are_shown_side_by_side_and_none_is_accused(tmp_path: Path) -> None:
    same = replace(two_ranks(), report=replace(two_ranks().report, pair=RankPair((0, 1), (), (), ((), ()))))
    viz.write_fleet("set", [same, two_ranks()], None, tmp_path / "fleet.html")
    with Page(tmp_path / "fleet.html") as page:
        assert ["0 and 1", "size"] == rows(page, "findings")[0][:2]
        assert ["0", "2"] == [row[-1] for row in rows(page, "runs")]
        assert "which one is wrong is not known" in page.evaluate("byId('verdict').textContent")
        assert ["Call site", "a.py:1 (f)", "1 MiB", "3 MiB", "rank 1 by 2 MiB"] == rows(page, "pair-memory")[0]
        assert ["Library", "nccl", "2 MiB", "0 B", "rank 0 by 2 MiB"] == rows(page, "pair-memory")[1]
        assert "Rank 1" == page.evaluate("byId('usual').textContent")
        page.evaluate("fleetView.choose(1, 0)")
        assert "Rank 0" == page.evaluate("byId('usual').textContent")
        assert "Loaded by rank 0 only: nccl" == page.evaluate("byId('pair-libraries').textContent")
        page.evaluate("fleetView.show(0)")
        assert page.evaluate("byId('pair-memory-box').hidden") and "" == page.evaluate(
            "byId('pair-libraries').textContent"
        )
        assert "The two ranks do not differ" in page.evaluate("byId('verdict').textContent")
        assert [] == page.errors


def test_groups_of_ranks_are_named_with_the_rank_that_each_waits_for() -> None:
    groups = tuple(
        Collectives(10, 10**9, tuple(RankWait(rank, 1000, late * (rank == last), 0, 0) for rank in ranks))
        for ranks, last, late in (((0, 1, 2, 3), 3, 10**6), ((4, 5, 7), 4, 10**8))
    )
    one = pictured()
    one = replace(one, report=replace(one.report, groups=groups))
    document = unpack(fleet_payload("set", [one]))
    assert [("0-3", 3), ("4-5, 7", 4)] == [(group["ranks"], group["latest"]) for group in document["runs"][0]["groups"]]


@in_browser
def test_groups_of_ranks_are_shown_the_latest_first(tmp_path: Path) -> None:
    groups = tuple(
        Collectives(10, 10**9, tuple(RankWait(rank, 1000, 10**6 * last, 0, 0) for rank in (last, last + 1)))
        for last in range(9)
    )
    one = pictured(10)
    with_groups = replace(one, report=replace(one.report, groups=groups))
    viz.write_fleet("set", [one, with_groups], None, tmp_path / "fleet.html")
    with Page(tmp_path / "fleet.html") as page:
        assert page.evaluate("byId('groups-card').hidden")
        page.evaluate("fleetView.show(1)")
        shown = rows(page, "groups")
        assert ["8-9", "8", "8 ms", "1 us", "10", "1 s"] == shown[0] and 8 == len(shown)
        assert "... and 1 more group" == page.evaluate("byId('groups-rest').textContent")
        assert [] == page.errors


def test_the_payload_of_many_ranks_is_small() -> None:
    assert len(fleet_page("set", [pictured(1024)])) < 200_000


def test_sizes_that_differ_are_not_written_alike() -> None:
    finding = RankFinding(1, Difference.SIZE, "a", "a", value=20 * MIB + 512, usual=20 * MIB, sequence=3)
    assert "requests 20,972,032 B, the others 20,971,520 B" in described(finding)
    assert "requests 24 MiB, the others 20 MiB" in described(replace(finding, value=24 * MIB))


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fleet") / "fleet.html"
    runs = [pictured(3, name="first", differs=None), pictured()]
    viz.write_fleet("some/set", runs, compared(), path)
    return path


@pytest.fixture
def page(opened: Page) -> Page:
    opened.evaluate("fleetView.restore({})")
    opened.evaluate(SETTLE)
    return opened


def rows(page: Page, table: str) -> list[list[str]]:
    found: list[list[str]] = page.read(
        f"[...byId('{table}').tBodies[0].rows].map((row) => [...row.cells].map((cell) => cell.textContent))"
    )
    return found


def colours(page: Page, canvas: str) -> int:
    return int(
        page.evaluate(
            f"""(() => {{
              const c = byId('{canvas}');
              const copy = new OffscreenCanvas(c.width, c.height).getContext("2d", {{ willReadFrequently: true }});
              copy.drawImage(c, 0, 0);
              return new Set(new Uint32Array(copy.getImageData(0, 0, c.width, c.height).data.buffer)).size;
            }})()"""
        )
    )


@in_browser
def test_the_first_run_with_a_difference_is_shown_at_its_rank(page: Page) -> None:
    assert "nightly" == page.evaluate("fleetView.run.run")
    assert "Rank 5" == page.evaluate("byId('rank-title').textContent")
    assert [["5", "out-of-memory"], ["5", "leak"], ["5", "size"]] == [row[:2] for row in rows(page, "findings")]
    assert [["5", "ran out of memory", "0 ns"], ["0", "its recording ended early", "unknown"]] == rows(page, "ends")
    assert [["a.py:1 (f)", "90 MiB", "10 MiB", "+80 MiB"]] == rows(page, "sites")
    assert ["19", "1 ms", "1.02 ms", "3"] == rows(page, "steps")[0]
    assert "0" == rows(page, "waits")[0][0] and "0 of 40" == rows(page, "waits")[0][-1]
    assert ["most: peak", "5 MiB", "7 MiB", "+2 MiB"] == rows(page, "against")[0]
    assert ["first", "3", "119 MiB", "119 MiB", "", "0"] == rows(page, "runs")[0]
    assert "unknown" == next(row for row in rows(page, "ranks") if row[0] == "2")[4]
    assert "no trace of 1 rank: 8" in page.evaluate("byId('tiles').textContent")


@in_browser
def test_what_lies_between_two_ranks_is_called_their_mean(tmp_path: Path) -> None:
    viz.write_fleet(
        "fleet", [pictured(2, name="two", differs=1), pictured(4, name="four", differs=2)], None, tmp_path / "x.html"
    )
    words = "document.querySelector('#one-run').innerText + byId('curves').ariaLabel"
    with Page(tmp_path / "x.html") as page:
        for run, said, other in ((0, "mean", "median"), (1, "median", "mean"), (0, "mean", "median")):
            page.evaluate(f"fleetView.show({run})")
            page.evaluate(SETTLE)
            text = page.evaluate(words).lower()
            assert said in text and other not in text


@in_browser
def test_the_pictures_show_something_in_both_themes(page: Page) -> None:
    for _ in range(2):
        assert colours(page, "heat") > 8 and colours(page, "curves") > 3
        page.evaluate("byId('theme').click()")
        page.evaluate(SETTLE)


@in_browser
def test_cells_are_the_bytes_of_the_report(page: Page) -> None:
    memory = pictured().memory
    assert memory is not None
    cells = page.read("[...fleetView.cells.peak]")
    assert memory.peak.ravel().tolist() == cells
    assert float(np.median(memory.peak[:, 3])) == page.evaluate("fleetView.cells.median[3]")
    known = memory.peak[:, 17][memory.peak[:, 17] >= 0]
    assert [float(known.min()), float(known.max())] == page.read(
        "[fleetView.cells.least[17], fleetView.cells.most[17]]"
    )


@in_browser
def test_keys_choose_a_rank_and_a_step(page: Page) -> None:
    page.key("ArrowUp", "#heat")
    page.key("ArrowLeft", "#heat")
    assert [4, 13] == page.read("[fleetView.row, fleetView.column]")
    assert page.evaluate("byId('moment').textContent").startswith("rank 4 on nightly1, step 13; 113 MiB active")
    page.key("ArrowRight", "#curves")
    assert 14 == page.evaluate("fleetView.column")
    page.key("/", "#heat")
    assert "search" == page.evaluate("document.activeElement.id")


@in_browser
def test_a_finding_leads_to_its_rank(page: Page) -> None:
    page.evaluate("fleetView.choose(0, 0); byId('findings').querySelector('button').click()")
    assert ["Rank 5", 14] == page.read("[byId('rank-title').textContent, fleetView.column]")
    page.evaluate("fleetView.choose(0, 0); byId('next').click()")
    assert "Rank 5" == page.evaluate("byId('rank-title').textContent")


@in_browser
def test_the_order_of_ranks_can_be_chosen(page: Page) -> None:
    assert list(range(8)) == page.read("fleetView.order")
    page.evaluate("byId('order').value = 'different'; byId('order').dispatchEvent(new Event('change'))")
    assert [5, 0, 1] == page.read("fleetView.order.slice(0, 3)")


@in_browser
def test_a_rank_or_a_host_is_found(page: Page) -> None:
    page.evaluate("byId('search').value = 'nightly1'; fleetView.list()")
    assert {"4", "5", "6", "7"} == {row[0] for row in rows(page, "ranks")}
    page.evaluate("byId('search').value = '3'; fleetView.list()")
    assert ["3"] == [row[0] for row in rows(page, "ranks")]


@in_browser
def test_a_link_leads_back(page: Page, file: Path) -> None:
    page.evaluate(
        """(() => {
          byId("order").value = "peak";
          byId("colour").value = "bytes";
          byId("search").value = "nightly0";
          fleetView.show(0);
          fleetView.choose(2, 7);
        })()"""
    )
    page.wait_for("location.hash.includes('column=7')")
    state = "[fleetView.run.run, fleetView.row, fleetView.column, byId('order').value, byId('colour').value, byId('search').value]"
    expected = page.read(state)
    with Page(file, fragment=page.evaluate("location.hash")) as again:
        assert expected == again.read(state)
        assert [] == again.errors


@in_browser
def test_hostile_names_and_links_are_text_only(tmp_path: Path) -> None:
    run = pictured(4, name=HOSTILE, differs=2)
    viz.write_fleet(HOSTILE, [run, run], replace(compared(), against=HOSTILE), tmp_path / "fleet.html")
    assert HOSTILE in str(unpack(payload_of((tmp_path / "fleet.html").read_text())))
    fragment = "#run=9&rank=1e999&column=-5&order=<b>&colour=x&list=y&find=%00"
    with Page(tmp_path / "fleet.html", fragment=fragment, dark=True) as page:
        page.evaluate(SETTLE)
        assert HOSTILE in page.evaluate("document.body.textContent")
        assert page.evaluate("window.hacked === undefined")
        assert [] == page.errors


@in_browser
def test_many_ranks_are_drawn_and_the_one_that_differs_is_seen(tmp_path: Path) -> None:
    viz.write_fleet("set", [pictured(1024, differs=777)], None, tmp_path / "fleet.html")
    with Page(tmp_path / "fleet.html") as page:
        page.evaluate(SETTLE)
        with_it = colours(page, "heat")
        assert with_it > 8 and "Rank 777" == page.evaluate("byId('rank-title').textContent")
        assert page.evaluate("byId('heat').clientHeight") < 700
        assert 500 == len(rows(page, "ranks")) and "1,024 ranks, the first 500" in page.evaluate(
            "byId('count').textContent"
        )
        page.key("+", "#heat")
        page.key("]", "#heat")
        page.evaluate(SETTLE)
        assert [] == page.errors


@in_browser
def test_ranks_without_steps_have_a_table_and_no_picture(tmp_path: Path) -> None:
    viz.write_fleet("set", [replace(pictured(), memory=None), pictured()], None, tmp_path / "fleet.html")
    with Page(tmp_path / "fleet.html") as page:
        assert not page.evaluate("byId('heat').checkVisibility()")
        assert 8 == len(rows(page, "ranks")) and "Rank 5" == page.evaluate("byId('rank-title').textContent")
        page.evaluate("fleetView.show(1); fleetView.show(0); byId('theme').click()")
        page.evaluate(SETTLE)
        assert [] == page.errors


@in_browser
def test_a_data_set_without_ranks_says_so(tmp_path: Path) -> None:
    report = RunReport("none", (), (), 0, False, (), ("0 ranks",), (), (), None)
    viz.write_fleet("set", [Picture(report, None, ())], None, tmp_path / "fleet.html")
    with Page(tmp_path / "fleet.html") as page:
        assert page.evaluate("byId('nothing').checkVisibility() && !byId('one-run').checkVisibility()")
        assert [] == page.errors


@in_browser
@pytest.mark.parametrize("drawing", ["fleetView.heat.plane", "fleetView.plane"])
def test_each_step_of_a_few_has_one_label(tmp_path: Path, drawing: str) -> None:
    one = pictured()
    assert one.memory is not None
    few = replace(one, memory=replace(one.memory, steps=3, peak=one.memory.peak[:, :3].copy()))
    viz.write_fleet("set", [few], None, tmp_path / "fleet.html")
    with Page(tmp_path / "fleet.html") as page:
        labels = page.read(
            f"""(() => {{
              const {{ context }} = {drawing};
              const texts = [];
              context.fillText = (text) => texts.push(text);
              {drawing}.drawNow();
              delete context.fillText;
              return texts.filter((text) => /^[0-9]+$/.test(text));
            }})()"""
        )
    assert ["0", "1", "2", "3"] == labels


@in_browser
def test_a_long_name_of_a_run_leaves_the_page_as_wide_as_the_window(tmp_path: Path) -> None:
    runs = [pictured(name="night" * 60), pictured(3, name="second", differs=None)]
    viz.write_fleet("set", runs, None, tmp_path / "fleet.html")
    with Page(tmp_path / "fleet.html") as page:
        assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
