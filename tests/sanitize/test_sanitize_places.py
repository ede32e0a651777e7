"""Which line a report shows, and which comments hold: the user's call, not the helper that both accesses came through."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from sanitize_program import Program, R, W

from cudatool.sanitize import Report, ReportContext, accepted, check, render_json
from cudatool.sanitize.explore import report_from_json
from cudatool.sanitize.report.github import render_github
from cudatool.sanitize.report.gitlab import render_gitlab
from cudatool.sanitize.report.sarif import render_sarif
from cudatool.sanitize.report.views import describe
from cudatool.trace.events import Kind
from cudatool.trace.model import Frame, Trace

_WAIT = Kind.STREAM_WAIT_EVENT

SOURCE = """\
def launch(stream):
    kernel(stream)  # {helper}

def main():
    launch(one)
    launch(two)  # {call}

main()  # {top}
"""


def report_of(path: Path, **comments: str) -> Report:
    """One race: both launches go through a helper, and `comments` stand at the helper, the second call and the top."""
    file = path / "prog.py"
    file.write_text(SOURCE.format_map({"helper": "-", "call": "-", "top": "-", **comments}))
    program = Program()
    one, two = program.stream(), program.stream()
    program.kernel(one, (W, 1000, 100))
    program.kernel(two, (R, 1000, 100))
    trace = program.trace()
    names = ("launch", "main", "<module>")
    frames = [Frame(str(file), name, line) for name in names for line in range(10)]
    stacks = [(), *((2, 10 + call, 28) for call in (5, 6))]
    records = trace.records.copy()
    launches = np.flatnonzero(records["correlation"] != 0)
    records["stack"] = 0
    records["stack"][launches] = 1 + (records["correlation"][launches] == 2)
    return check(Trace(records, trace.names, stacks, frames, trace.threads, trace.header))


def through_helpers(program: Program) -> Trace:
    """Return a trace in which each call is made on a line of its own by a helper: the same line of helper.py for each."""
    trace = program.trace()
    records = trace.records.copy()
    frames = [Frame("helper.py", "call", 3), *(Frame("prog.py", "<module>", 1 + row) for row in range(len(records)))]
    stacks = [(), *((0, 1 + row) for row in range(len(records)))]
    records["stack"] = np.arange(len(records)) + 1
    return Trace(records, trace.names, stacks, frames, trace.threads, trace.header)


def test_no_line_that_a_report_names_is_of_the_helper_that_all_calls_came_through() -> None:
    program = Program()
    one, two, three = (program.stream() for _ in range(3))
    program.kernel(one, (W, 1000, 100))
    program.record(1, one)
    program.kernel(two, (W, 2000, 100))
    program.record(1, two)
    program.wait(three, 1)
    program.kernel(three, (R, 1000, 100))
    (finding,) = check(through_helpers(program)).findings
    at = [1 + row for row, kind in enumerate(program.trace().records["kind"]) if kind in (Kind.EVENT_RECORD, _WAIT)]
    assert (
        f"Nothing makes stream 3 wait for stream 1. The wait at prog.py:{at[2]} is for the record on stream 2 "
        f"(prog.py:{at[1]}), which replaced the one on stream 1 (prog.py:{at[0]})."
    ) == finding.reason
    assert (1, 3) == (finding.first.created_at.line, finding.second.created_at.line)
    assert "stream 3 (created at prog.py:3)" in describe(finding)
    assert "helper.py" not in describe(finding)


def test_a_wait_for_nothing_and_a_reused_block_are_named_by_the_lines_of_the_program() -> None:
    program = Program()
    one, two = program.stream(), program.stream()
    program.kernel(one, (W, 1000, 100))
    program.wait(two, 1)
    program.kernel(two, (R, 1000, 100))
    wait, read = check(through_helpers(program)).findings
    assert {"prog.py"} == {frame.file for frame in (wait.second.place, read.first.place, read.second.place)}
    for finding in (wait, read):
        assert "helper.py" not in describe(finding)


def test_every_format_shows_the_line_that_the_repair_names(tmp_path: Path) -> None:
    report = report_of(tmp_path)
    (finding,) = report.findings
    assert "kernel k at prog.py:6, " in finding.repair
    assert (5, 6) == (finding.first.place.line, finding.second.place.line)
    run = ReportContext(str(tmp_path))
    assert "file=prog.py,line=6," in render_github(report, run)
    assert "(prog.py:5)" in render_github(report, run)
    assert 6 == json.loads(render_gitlab(report, run))[0]["location"]["lines"]["begin"]
    (result,) = json.loads(render_sarif(report, run))["runs"][0]["results"]
    regions = [
        at["physicalLocation"]["region"]["startLine"] for at in (*result["locations"], *result["relatedLocations"])
    ]
    assert [6, 5] == regions[:2]


@pytest.mark.parametrize("place", ["helper", "call", "top"])
def test_comment_holds_at_every_frame_of_the_users(place: str, tmp_path: Path) -> None:
    assert 1 == len(report_of(tmp_path).findings)
    assert () == accepted(report_of(tmp_path, **{place: "cudatool: ignore[race]"})).findings
    assert 1 == len(accepted(report_of(tmp_path, **{place: "cudatool: ignore[leak]"})).findings)


@pytest.mark.parametrize("place", ["helper", "call", "top"])
def test_misspelt_comment_warns_wherever_it_stands(place: str, tmp_path: Path) -> None:
    report = accepted(report_of(tmp_path, **{place: "cudatool: ignore[rase]"}))
    assert 1 == len(report.findings)
    (remark,) = report.remarks
    assert "'rase' is not a kind" in remark.text


def test_misspelt_comment_warns_beside_one_that_holds(tmp_path: Path) -> None:
    report = accepted(report_of(tmp_path, helper="cudatool: ignore[race]", top="cudatool: ignore[rase]"))
    assert () == report.findings
    assert 1 == len(report.remarks)


def test_side_says_where_its_stream_was_created() -> None:
    program = Program()
    one, two = program.stream(), program.stream()
    program.kernel(one, (W, 1000, 100))
    program.kernel(two, (R, 1000, 100))
    report = check(program.trace())
    assert "read by kernel k on stream 2 (created at program.py:2)" in render_github(report, ReportContext("/"))


def test_findings_in_json_are_all_that_fail_the_run(tmp_path: Path) -> None:
    from report_examples import every_kind, pipeline

    report = every_kind(pipeline(tmp_path))
    data = json.loads(render_json(report))
    assert len(report.findings) + len(report.on_device) == len(data["findings"])
    assert data["on_device"] == data["findings"][len(report.findings) :]
    only = json.loads(render_json(replace(report, findings=())))
    assert "findings" == only["outcome"]
    assert only["findings"]


def test_json_report_is_read_back_whole(tmp_path: Path) -> None:
    from report_examples import every_kind, pipeline

    for report in (report_of(tmp_path), every_kind(pipeline(tmp_path))):
        assert report == report_from_json(render_json(report))
