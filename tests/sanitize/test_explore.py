"""One report of several schedules: which findings it has, who saw them, and what the program printed."""

from __future__ import annotations

import dataclasses
import json

import pytest
from report_examples import on_device

from cudatool.errors import UsageError
from cudatool.sanitize import render_json
from cudatool.sanitize.explore import ScheduleOutcome, SeededSchedule, device_for, joined, report_from_json, schedules
from cudatool.sanitize.findings import (
    AccessSite,
    BufferSite,
    DeviceFinding,
    Finding,
    FindingKind,
    Report,
    SetAside,
    Witness,
    WitnessStep,
)
from cudatool.source_text import SourceLine
from cudatool.trace.model import Frame

STACK = (Frame("program.py", "main", 3), Frame("program.py", "<module>", 9))


def race(fingerprint: str, **fields: object) -> Finding:
    first, second = (
        AccessSite("kernel k", f"stream {number}", mode, "", STACK, number)
        for number, mode in ((1, "write"), (2, "read"))
    )
    buffer = BufferSite(64, 256, STACK)
    finding = Finding(FindingKind.RACE_RAW, first, second, 64, 4, buffer, "Why.", "Do it.", 1, fingerprint)
    return dataclasses.replace(finding, **fields)


def checked(fingerprint: str) -> DeviceFinding:
    return on_device("program.py", FindingKind.OUT_OF_BOUNDS, "memcheck", fingerprint=fingerprint)


PROOF = Witness(
    (WitnessStep("kernel k", "stream 1", "program.py:3", 1),), (), 2, 64, "00", "01", "what x copies", 2, (1, 2)
)


def run(schedule: str, *output: str, status: int = 0, **fields: object) -> ScheduleOutcome:
    return ScheduleOutcome(schedule, Report(**{"findings": (), **fields}), status, output)


def test_report_survives_json():
    report = Report(
        findings=(race("a", witness=PROOF), race("b", buffer=None, no_witness="none", seen_in=("fifo",))),
        possible=(race("c"),),
        on_device=(checked("d"),),
        edges={"event wait": 3},
        notes=("a note",),
        set_aside=(
            SetAside(race("e"), "comment", comment=SourceLine("program.py", 3)),
            SetAside(checked("f"), "rule", "kind=*"),
        ),
    )
    assert report_from_json(render_json(report)) == report


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"findings": [{"kind": "race-raw"}]}', '{"findings": 1}'])
def test_what_is_no_report_is_refused(text):
    with pytest.raises(ValueError):
        report_from_json(text)


def test_findings_are_joined_by_fingerprint_with_the_schedules_that_saw_them():
    runs = [
        run("fifo", findings=(race("a"),), notes=("one",)),
        run("lifo", findings=(race("b"), race("a")), on_device=(checked("d"),), notes=("one", "two")),
    ]
    report = joined(runs, runs[0])
    assert [(f.fingerprint, f.seen_in) for f in report.findings] == [("a", ("fifo", "lifo")), ("b", ("lifo",))]
    assert [(f.fingerprint, f.seen_in) for f in report.on_device] == [("d", ("lifo",))]
    assert report.notes == ("one", "two")


def test_a_proof_is_kept_under_whichever_schedule_found_it():
    runs = [run("fifo", findings=(race("a", no_witness="none"),)), run("lifo", findings=(race("a", witness=PROOF),))]
    assert joined(runs, runs[0]).findings[0].witness == PROOF


@pytest.mark.parametrize(
    ("first", "again", "other", "difference"),
    [
        (["x"], ["x"], ["x"], ""),
        (["x", "y"], ["x", "y"], ["x", "z"], "line 2 of the output is 'z', under fifo 'y'"),
        (["at 0.1 s", "y"], ["at 0.2 s", "y"], ["at 0.3 s", "y"], ""),
        (["at 0.1 s", "y"], ["at 0.2 s", "y"], ["at 0.3 s", "z"], "line 2 of the output is 'z', under fifo 'y'"),
        (["x"], ["x"], ["x", "more"], "the output goes on, unlike under fifo: line 2 is 'more'"),
        (["x", "end"], ["x", "end"], ["x"], "the output ends before, unlike under fifo: line 2 is 'end'"),
        (["x"], ["x", "y"], ["z"], "the program prints other lines each time: not compared"),
        (["x"], ["x"], ["a" + " b" * 100], "line 1 of the output is 'a" + " b" * 47 + " ...', under fifo 'x'"),
    ],
)
def test_output_is_compared_where_it_does_not_change_by_itself(first, again, other, difference):
    report = joined([run("fifo", *first), run("lifo", *other)], run("fifo", *again))
    assert [one.difference for one in report.schedules] == ["", difference]


def test_status_of_each_run_is_kept():
    report = joined([run("fifo"), run("lifo", status=-11)], run("fifo"))
    assert [(one.schedule, one.status) for one in report.schedules] == [("fifo", 0), ("lifo", -11)]
    assert json.loads(render_json(report))["schedules"][1]["status"] == -11


def test_schedules_are_the_three_and_then_random_ones():
    assert schedules(1) == [SeededSchedule("fifo")]
    assert schedules(5) == [
        SeededSchedule("fifo"),
        SeededSchedule("lifo"),
        SeededSchedule("late"),
        SeededSchedule("random", 1),
        SeededSchedule("random", 2),
    ]


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        (None, "sim:threads=1,schedule=lifo"),
        ("auto", "sim:threads=1,schedule=lifo"),
        ("sim:memory=1GiB,schedule=late,seed=4", "sim:memory=1GiB,threads=1,schedule=lifo"),
        ("sim:threads=2", "sim:threads=2,schedule=lifo"),
    ],
)
def test_device_keeps_all_but_its_schedule(device, expected, monkeypatch):
    monkeypatch.delenv("CUDATOOL_DEVICE", raising=False)
    assert device_for(device, SeededSchedule("lifo")) == expected


def test_gpu_has_no_schedules(monkeypatch):
    monkeypatch.setenv("CUDATOOL_DEVICE", "cuda")
    with pytest.raises(UsageError, match="--explore needs the software device"):
        device_for(None, SeededSchedule("lifo"))
