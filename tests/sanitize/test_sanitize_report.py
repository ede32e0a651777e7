"""What a report says, as data, as text and as JSON."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sanitize_program import Program, R, W

import cudatool.sanitize
from cudatool.sanitize import Gap, GapKind, Outcome, Report, ReportContext, callers, check, render_json, render_text
from cudatool.sanitize.callers import Callers
from cudatool.sanitize.kinds import CHECKS
from cudatool.sanitize.report.github import render_summary
from cudatool.sanitize.report.junit import render_junit
from cudatool.trace.events import RECORD, Kind
from cudatool.trace.model import Frame, Trace

BUFFER, SIZE = 0x10000, 1024


def racy(*, first_line: int = 10, iterations: int = 3) -> Trace:
    program = Program()
    a, b = program.stream(), program.stream()
    program.alloc(BUFFER, SIZE)
    for _ in range(iterations):
        program.kernel(a, (W, BUFFER, SIZE), name="scale", line=first_line)
        program.kernel(b, (R, BUFFER + 100, 8), name="sum", line=first_line + 1)
        program.order(b, a)
    return program.trace()


def test_repeated_race_is_one_finding_with_a_count() -> None:
    (finding,) = check(racy()).findings
    assert finding.count == 3


def test_finding_names_both_sides_the_buffer_the_reason_and_the_repair() -> None:
    (finding,) = check(racy(iterations=1)).findings
    assert (finding.first.operation, finding.first.agent, finding.first.mode) == ("kernel scale", "stream 1", "write")
    assert (finding.second.operation, finding.second.agent, finding.second.mode) == ("kernel sum", "stream 2", "read")
    assert finding.first.stack == (Frame("program.py", "main", 10),)
    assert finding.buffer is not None
    assert (finding.buffer.address, finding.buffer.size) == (BUFFER, SIZE)
    assert (finding.start, finding.size) == (BUFFER + 100, 8)
    assert finding.reason == "Nothing makes stream 2 wait for stream 1."
    assert finding.repair == (
        "Before kernel sum at program.py:11, make stream 2 wait for stream 1: `consumer.wait_stream(producer)`, or "
        "`consumer.wait_event(event)` with the event recorded after kernel scale (program.py:10)."
    )


def _with_frames(trace: Trace, frames: dict[int, tuple[tuple[str, int], ...]]) -> Trace:
    """Give the records whose only frame is a line of program.py, by that line, several: functions with their lines."""
    stacks, made = list(trace.stacks), list(trace.frames)
    for index, (frame,) in enumerate(trace.stacks[1:], 1):
        if (path := frames.get(trace.frames[frame].line)) is not None:
            stacks[index] = tuple(range(len(made), len(made) + len(path)))
            made += [Frame("program.py", function, line) for function, line in path]
    return Trace(trace.records, trace.names, stacks, made, trace.threads, trace.header, trace.notes)


@pytest.mark.parametrize(
    ("first", "second", "places"),
    [
        # innermost first, as in traces
        pytest.param((("launch", 5), ("main", 10)), (("launch", 5), ("main", 11)), (10, 11), id="helper"),
        pytest.param((("fill", 6), ("main", 10)), (("copy", 7), ("main", 11)), (10, 11), id="two helpers"),
        pytest.param(
            (("launch", 5), ("step", 30), ("main", 10)),
            (("launch", 5), ("step", 31), ("main", 10)),
            (30, 31),
            id="step",
        ),
        pytest.param((("fill", 6), ("main", 10)), (("copy", 7), ("main", 10)), (6, 7), id="one line calls both"),
        pytest.param((("launch", 5), ("main", 10)), (("launch", 5), ("main", 10)), (5, 5), id="the same"),
    ],
)
def test_repair_is_where_both_calls_were_made(first: Any, second: Any, places: tuple[int, int]) -> None:
    (finding,) = check(_with_frames(racy(iterations=1), {10: first, 11: second})).findings
    assert [str(place) for place in places[::-1]] == re.findall(r"program\.py:(\d+)", finding.repair)


def test_repair_between_two_threads_is_in_the_function_that_they_do_not_share() -> None:
    program = Program()
    a, b = program.stream(), program.stream()
    program.kernel(a, (W, BUFFER, SIZE), line=10)
    program.on_thread(1).kernel(b, (R, BUFFER, SIZE), line=11)
    paths = {10: (("launch", 5), ("produce", 20), ("run", 1)), 11: (("launch", 5), ("consume", 30), ("run", 2))}
    (finding,) = check(_with_frames(program.trace(), paths)).findings
    assert ["30", "20"] == re.findall(r"program\.py:(\d+)", finding.repair)


def test_repair_of_one_line_that_is_executed_for_several_devices_counts_the_pairs_of_streams() -> None:
    program = Program()
    for device in (0, 1):
        backward, side = program.stream(device=device), program.stream(device=device)
        program.kernel(backward, (W, 0x10000 * (device + 1), 64), line=30)
        program.kernel(side, (R, 0x10000 * (device + 1), 64), line=31)
    (finding,) = check(program.trace()).findings
    assert 2 == finding.count
    assert finding.repair.endswith("(program.py:30). The same for 1 more pair of streams at this line.")


def test_reason_names_the_last_common_point() -> None:
    program = Program()
    a, b = program.stream(), program.stream()
    program.kernel(a, (W, BUFFER, SIZE), name="early")
    program.order(a, b)
    program.kernel(a, (W, BUFFER, SIZE), name="late")
    program.kernel(b, (R, BUFFER, SIZE))
    (finding,) = check(program.trace()).findings
    assert finding.reason == "Stream 2 is ordered after stream 1 only up to event record (program.py:5)."


def test_what_follows_from_a_finding_is_not_listed() -> None:
    program = Program()
    a, b = program.stream(), program.stream()
    program.kernel(a, (W, BUFFER, SIZE))
    for _ in range(4):
        program.kernel(b, (R, BUFFER, SIZE))
    report = check(program.trace())
    assert len(report.findings) == 1
    assert () == report.notes


def test_two_missing_waits_are_two_findings() -> None:
    program = Program()
    a, b = program.stream(), program.stream()
    for buffer in (BUFFER, BUFFER + SIZE):
        program.kernel(a, (W, buffer, SIZE))
        program.kernel(b, (R, buffer, SIZE))
    assert len(check(program.trace()).findings) == 2


def test_fingerprint_survives_a_shift_of_lines() -> None:
    (before,), (after,) = check(racy()).findings, check(racy(first_line=70)).findings
    assert before.fingerprint == after.fingerprint


def test_fingerprint_tells_operations_apart() -> None:
    program = Program()
    a, b = program.stream(), program.stream()
    for buffer, name in ((BUFFER, "sum"), (BUFFER + SIZE, "max")):
        program.kernel(a, (W, buffer, SIZE))
        program.kernel(b, (R, buffer, SIZE), name=name)
    first, second = check(program.trace()).findings
    assert first.fingerprint != second.fingerprint


def test_report_states_what_it_rests_on() -> None:
    trace = racy()
    trace.notes.append("the last chunk is missing")
    report = check(trace)
    assert report.device == "sim: cudatool software device"
    assert (report.operations, report.unchecked_launches) == (6, 0)
    assert report.edges == {"event wait": 3}
    assert report.notes == ("the last chunk is missing",)


def test_empty_trace_has_no_findings() -> None:
    report = check(Trace(np.zeros(0, RECORD)))
    assert report == Report(findings=(), gaps=(Gap(GapKind.OPERATIONS, whole=True),))
    assert report.outcome is Outcome.NOT_CHECKED


def test_operation_on_an_unknown_stream_is_not_checked() -> None:
    program = Program()
    program.emit(Kind.KERNEL_LAUNCH, stream=0, correlation=1, name="k")
    report = check(program.trace())
    assert (report.gaps, report.outcome) == ((Gap(GapKind.STREAMS, 1, whole=True),), Outcome.NOT_CHECKED)


@pytest.mark.parametrize("width", [40, 80, 120])
def test_text_fits_the_width(width: int) -> None:
    text = render_text(check(racy()), width=width)
    assert max(map(len, text.splitlines())) <= width


def test_text_quotes_source_lines_that_can_be_read(tmp_path: Path) -> None:
    source = tmp_path / "pipeline.py"
    source.write_text("\n" * 9 + "launch(producer, scale)\nlaunch(consumer, sum)\n")
    trace = racy()
    trace.frames = [frame._replace(file=str(source)) for frame in trace.frames]
    text = render_text(check(trace))
    assert "launch(producer, scale)" in text
    assert "launch(consumer, sum)" in text


def test_colour_adds_nothing_but_colour() -> None:
    report = check(racy())
    assert re.sub(r"\x1b\[[0-9;]*m", "", render_text(report, color=True)) == render_text(report, color=False)


def test_checks_that_were_not_asked_for_are_named() -> None:
    program = Program()
    program.kernel(program.stream(), (W, BUFFER, SIZE))
    report = check(program.trace())
    some, every = ReportContext("/home", ("race", "memcheck")), ReportContext("/home", CHECKS)
    words = "ot asked for: initcheck, racecheck, synccheck, leak (--checks all)"
    for render in (render_text, render_summary, render_junit):
        assert words in " ".join(render(report, some).split())
        assert words not in " ".join(render(report, every).split())


def test_text_of_a_clean_report_says_so() -> None:
    program = Program()
    program.kernel(program.stream(), (W, BUFFER, SIZE))
    assert render_text(check(program.trace())) == (
        "checked: 1 operation on sim: cudatool software device\n"
        "ordering seen: stream order only\n"
        "cudatool sanitize: no findings"
    )


def test_json_carries_the_schema_and_every_fact() -> None:
    payload = json.loads(render_json(check(racy())))
    assert payload["schema"] == "cudatool.sanitize/1"
    assert payload["operations"] == 6
    (finding,) = payload["findings"]
    assert finding["kind"] == "race-raw"
    assert finding["count"] == 3
    assert finding["first"]["stack"] == [{"file": "program.py", "function": "main", "line": 10}]
    assert finding["buffer"]["address"] == BUFFER


def test_exported_names_are_documented() -> None:
    for name in cudatool.sanitize.__all__:
        assert getattr(cudatool.sanitize, name).__doc__


def test_text_of_a_report_has_nothing_that_moves_a_terminal() -> None:
    (finding,) = check(_with_frames(racy(iterations=1), {10: (("make\x1b[31m", 5), ("a\nb", 10))})).findings
    text = render_text(Report((finding,)))
    assert r"program.py:5 in make\x1b[31m" in text
    assert r"program.py:10 in a\nb" in text
    assert all(line.isprintable() for line in text.splitlines())


def test_place_of_an_operation_of_a_library_is_the_line_that_called_the_library() -> None:
    trace = racy(iterations=1)
    library = Frame("/venv/lib/python3.12/site-packages/cuda/core/_launcher.py", "launch", 99)
    frames = [*trace.frames, library]
    stacks = [stack and (len(trace.frames), *stack) for stack in trace.stacks]
    (finding,) = check(
        Trace(trace.records, trace.names, stacks, frames, trace.threads, trace.header, trace.notes)
    ).findings
    assert "_launcher.py" not in finding.repair + finding.reason
    assert ["11", "10"] == re.findall(r"program\.py:(\d+)", finding.repair)


def test_frames_that_two_calls_have_in_common_are_not_compared_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tuple(("again", 5) for _ in range(1000))
    compared: list[Frame] = []
    monkeypatch.setattr(callers, "_function", lambda frame: compared.append(frame))
    trace = _with_frames(racy(iterations=1), {10: deep})
    record = int(np.flatnonzero(trace.records["stack"])[0])
    assert trace.stack(int(trace.records["stack"][record]))[0] == Callers(trace).frame(record, record)
    assert [] == compared
