"""What was not checked is never called clean: the gaps of a report, its verdict, and what each format makes of them."""

from __future__ import annotations

import json
from typing import Any

import junitparser
import pytest
from report_examples import race
from sanitize_program import Program

from cudatool.errors import UsageError
from cudatool.sanitize import Gap, GapKind, Outcome, Report, ReportContext, check, known
from cudatool.sanitize.coverage import gap_what, gap_why, merged_gaps
from cudatool.sanitize.findings import Known, Process
from cudatool.sanitize.report.baseline import Baseline
from cudatool.sanitize.report.github import render_github, render_summary
from cudatool.sanitize.report.gitlab import render_gitlab
from cudatool.sanitize.report.junit import render_junit
from cudatool.sanitize.report.sarif import render_sarif
from cudatool.sanitize.report.text import render_json, render_text
from cudatool.trace.events import AccessFlag, CopyFlag, Kind, WarningCode, WarningFlag
from cudatool.trace.model import Ending

RACE = ("race",)
RUN = ReportContext("/", ("race", "memcheck"))


def gaps(program: Program, wanted: tuple[str, ...] = RACE, **facts: Any) -> dict[GapKind, Gap]:
    program.header |= facts
    return {gap.kind: gap for gap in check(program.trace(), wanted).gaps}


def working() -> Program:
    program = Program()
    stream = program.stream()
    program.kernel(stream, (4096, 16, 2))
    return program


def test_work_with_known_accesses_leaves_no_gap() -> None:
    report = check(working().trace())
    assert (report.gaps, report.outcome) == ((), Outcome.CLEAN)


def test_program_without_work_was_not_checked_and_its_libraries_say_why() -> None:
    found = gaps(Program(), libraries=["PyTorch"])
    assert found == {GapKind.OPERATIONS: Gap(GapKind.OPERATIONS, 0, ("PyTorch",), whole=True)}
    assert "PyTorch is recorded on a GPU only" in gap_why(found[GapKind.OPERATIONS])
    assert "other" not in gap_why(found[GapKind.OPERATIONS])


@pytest.mark.parametrize(("device", "names"), [("sim", ("CuPy",)), ("cuda", ("CuPy", "numba"))])
def test_library_that_is_recorded_is_not_named_as_one_that_is_not(device: str, names: tuple[str, ...]) -> None:
    found = gaps(Program(), libraries=["CuPy", "numba"], device_kind=device)[GapKind.OPERATIONS]
    assert found.names == names
    assert f"{', '.join(names)} {'is' if len(names) == 1 else 'are'} recorded on a GPU only." in gap_why(found)


def test_allocations_are_something_to_check_for_leaks_and_nothing_for_races() -> None:
    program = Program()
    program.emit(Kind.MEM_ALLOC, address=4096, size=64)
    assert GapKind.OPERATIONS in gaps(program)
    assert GapKind.OPERATIONS not in gaps(program, ("leak",))


def test_trace_recorded_without_accesses_was_not_checked_for_races() -> None:
    program = working()
    found = gaps(program, records_accesses=False, checks=[])
    assert found == {GapKind.ACCESSES: Gap(GapKind.ACCESSES, 1, whole=True)}
    assert check(program.trace(), RACE).outcome is Outcome.NOT_CHECKED
    assert check(program.trace(), ("memcheck",)).outcome is Outcome.NOT_CHECKED  # nor was it recorded under that


def test_check_under_which_the_program_did_not_run_is_a_gap() -> None:
    found = gaps(working(), ("race", "memcheck", "synccheck"), checks=["synccheck"])
    assert found == {GapKind.CHECKS: Gap(GapKind.CHECKS, 1, ("memcheck",))}
    for facts in ({"checks": []}, {}):  # a trace that does not say under which checks it was recorded was under none
        found = gaps(working(), ("memcheck",), **facts)
        assert found == {GapKind.CHECKS: Gap(GapKind.CHECKS, 1, ("memcheck",), whole=True)}


def test_checks_that_no_gpu_makes_are_said_to_be_of_the_software_device() -> None:
    wanted = ("race", "memcheck", "synccheck")
    found = gaps(working(), wanted, checks=[], device_kind="cuda")
    gap = Gap(GapKind.DEVICE_CHECKS, 2, ("memcheck", "synccheck"))
    assert found == {GapKind.DEVICE_CHECKS: gap}
    assert gap_what(gap) == "memcheck, synccheck (software device only)"
    assert gap_why(gap) == "On the software device only: memcheck, synccheck."
    assert gaps(working(), wanted[1:], checks=[], device_kind="cuda")[GapKind.DEVICE_CHECKS].whole


def test_one_launch_of_two_without_accesses_is_a_part() -> None:
    program = working()
    program.kernel(program.stream())
    assert gaps(program) == {GapKind.LAUNCHES: Gap(GapKind.LAUNCHES, 1, ("k",))}
    assert check(program.trace()).outcome is Outcome.PARTLY_CHECKED


def test_processes_that_the_program_started_are_named() -> None:
    program = working()
    for name, flags in (("python train.py", 0), ("git", 0), ("git", 0), ("server", 1)):
        program.emit(Kind.CHILD_PROCESS, name=name, flags=flags)
    found = gaps(program)
    assert found[GapKind.CHILD_PROCESSES] == Gap(GapKind.CHILD_PROCESSES, 3, ("python train.py", "git"))
    assert found[GapKind.REPLACED] == Gap(GapKind.REPLACED, 1, ("server",))


@pytest.mark.parametrize("ending", Ending)
def test_recording_from_which_events_are_missing_is_incomplete(ending: Ending) -> None:
    trace = working().trace()
    trace.ending = ending
    expected = Outcome.CLEAN if ending.is_complete else Outcome.INCOMPLETE
    assert check(trace).outcome is expected


def test_dropped_subscriber_makes_the_recording_incomplete_and_a_remark_does_not() -> None:
    program = working()
    program.emit(Kind.WARNING, name="cuFoo returned CUDA_ERROR_INVALID_VALUE")
    assert check(program.trace()).outcome is Outcome.CLEAN
    program.emit(Kind.WARNING, name="a subscriber failed", flags=WarningFlag.LOST, aux0=WarningCode.SUBSCRIBER_FAILED)
    report = check(program.trace())
    assert report.gaps == (Gap(GapKind.RECORDING, 1, ("a subscriber failed",), codes=("subscriber-failed",)),)
    assert report.outcome is Outcome.INCOMPLETE


def test_warning_with_a_flag_of_a_newer_version_leaves_no_report_clean() -> None:
    program = working()
    program.emit(Kind.WARNING, name="what only that version knows", flags=0x4000)
    assert {GapKind.UNSEEN: Gap(GapKind.UNSEEN, 1, ("what only that version knows",), codes=("not-said",))} == gaps(
        program
    )


def test_causes_of_a_gap_are_codes_and_those_of_other_versions_are_not_said() -> None:
    program = working()
    for code, name in enumerate(["of an older version", *"ab"]):
        program.emit(Kind.WARNING, name=name, flags=WarningFlag.UNSEEN, aux0=code)
    program.emit(Kind.WARNING, name="of a newer version", flags=WarningFlag.UNSEEN, aux0=2**63)
    gap = gaps(program, device_kind="cuda", libraries=["CuPy"])[GapKind.UNSEEN]
    assert (5, gap.names[0]) == (gap.count, "of an older version")
    assert ("not-said", "call-failed", "call-not-recorded", "library-not-watched") == gap.codes
    two = merged_gaps([[gap], [Gap(GapKind.UNSEEN, 1, ("c",), codes=("work-after-error",))]], add=True)
    assert (6, (*gap.codes, "work-after-error")) == (two[0].count, two[0].codes)


@pytest.mark.parametrize("library", ["CuPy", "JAX"])
def test_library_that_no_event_tells_of_is_a_gap_on_a_gpu(library: str) -> None:
    assert gaps(working(), device_kind="cuda", libraries=[library])[GapKind.UNSEEN].count == 1
    assert GapKind.UNSEEN not in gaps(working(), device_kind="sim", libraries=[library])


def copying(flags: CopyFlag, **facts: Any) -> Program:
    program = working()
    program.header |= facts
    program.emit(Kind.HOST_ALLOC, address=1 << 20, size=4096, name="cuMemHostAlloc")
    program.emit(Kind.MEMCPY, stream=1, correlation=77, address=1 << 30, aux0=1 << 20, size=4096, flags=flags)
    return program


def test_pinned_memory_of_an_asynchronous_copy_is_a_gap_unless_the_host_is_watched() -> None:
    to_device = CopyFlag.DESTINATION_DEVICE
    assert gaps(copying(to_device | CopyFlag.ASYNC))[GapKind.HOST_MEMORY] == Gap(GapKind.HOST_MEMORY, 4096)
    assert gaps(copying(to_device)) == {}
    assert gaps(copying(to_device | CopyFlag.ASYNC, watches_host_memory=True)) == {}
    for unread in ({"watches_host_memory": True, "watches_host_reads": False}, {"watches_host_memory": True}):
        assert gaps(copying(to_device | CopyFlag.ASYNC, **unread)) == {}, "the host may read what a copy reads"
        filled = copying(to_device | CopyFlag.ASYNC, **unread)
        filled.emit(
            Kind.MEMCPY, stream=1, correlation=78, address=1 << 20, aux0=1 << 30, size=4096, flags=CopyFlag.ASYNC
        )
        assert gaps(filled) == {GapKind.HOST_READS: Gap(GapKind.HOST_READS, 4096)}
    seen = copying(to_device | CopyFlag.ASYNC)
    seen.emit(Kind.HOST_ACCESS, address=(1 << 20) + 8, size=8, flags=1)
    assert GapKind.HOST_MEMORY not in gaps(seen)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (Kind.HOST_ALLOC, "cuMemHostAlloc"),
        (Kind.HOST_ALLOC, "cuMemHostRegister"),
        (Kind.MEM_ALLOC, "cuMemAllocManaged"),
    ],
)
def test_the_hosts_reads_of_memory_that_a_kernel_writes_are_a_gap_unless_it_says_them(kind: Kind, name: str) -> None:
    def launching(mode: AccessFlag, *, to: int = (1 << 20) + 8) -> Program:
        program = working()
        program.header |= {"watches_host_memory": True, "watches_host_reads": True}
        program.emit(kind, address=1 << 20, size=4096, name=name)
        program.emit(Kind.ACCESS, correlation=1, address=to, size=8, flags=mode)
        return program

    unread = {GapKind.HOST_READS: Gap(GapKind.HOST_READS, 4096)}
    assert gaps(launching(AccessFlag.WRITE)) == gaps(launching(AccessFlag.ATOMIC)) == unread
    assert gaps(launching(AccessFlag.READ)) == {}
    assert gaps(launching(AccessFlag.WRITE, to=(1 << 20) + 4096)) == gaps(launching(AccessFlag.WRITE, to=5)) == {}
    assert gaps(launching(AccessFlag.WRITE), ("racecheck",), checks=["racecheck"]) == {}
    said = launching(AccessFlag.WRITE)
    said.emit(Kind.HOST_ACCESS, address=(1 << 20) + 100, size=8, flags=AccessFlag.READ)
    assert gaps(said) == {}
    noticed = launching(AccessFlag.WRITE)
    noticed.emit(Kind.HOST_ACCESS, address=(1 << 20) + 100, size=8, flags=AccessFlag.WRITE | AccessFlag.NOTICED)
    assert gaps(noticed) == unread
    # Such reads of what a copy fills are seen in pinned memory that the driver gave.
    filled = launching(AccessFlag.READ)
    filled.emit(Kind.MEMCPY, stream=1, correlation=78, address=1 << 20, aux0=1 << 30, size=4096, flags=CopyFlag.ASYNC)
    assert gaps(filled) == ({} if name == "cuMemHostAlloc" else unread)


def test_host_function_that_says_nothing_is_a_gap_where_there_is_memory_to_share() -> None:
    def calling(memory: Kind = Kind.HOST_ALLOC, name: str = "cuMemHostAlloc", *, watches: bool = True) -> Program:
        program = working()
        program.header["watches_host_memory"] = watches
        program.emit(memory, address=1 << 20, size=4096, name=name)
        program.emit(Kind.HOST_FUNCTION, line=30, stream=1, correlation=90, name="cuLaunchHostFunc")
        return program

    silent = {GapKind.HOST_FUNCTIONS: Gap(GapKind.HOST_FUNCTIONS, 1, ("program.py:30",))}
    assert gaps(calling()) == silent
    assert gaps(calling(Kind.MEM_ALLOC, "cuMemAllocManaged")) == silent
    assert gaps(calling(Kind.MEM_ALLOC, "cuMemAlloc")) == {}
    assert gaps(calling(), ("memcheck",), checks=["memcheck"]) == {}
    for declares in (Kind.HOST_ACCESS, Kind.ACCESS):
        declared = calling()
        declared.emit(declares, correlation=90, address=1 << 20, size=8, flags=1)
        assert gaps(declared) == {}
    other = calling()
    other.emit(Kind.HOST_ACCESS, correlation=0, address=1 << 20, size=8, flags=1)
    assert gaps(other) == silent


def test_host_node_of_a_graph_that_says_nothing_is_a_gap_at_each_launch() -> None:
    program = working()
    program.header["watches_host_memory"] = True
    program.emit(Kind.HOST_ALLOC, address=1 << 20, size=4096, name="cuMemHostAlloc")
    program.emit(Kind.GRAPH_NODE, aux0=5, aux1=1, flags=3, name="host node")
    program.emit(Kind.GRAPH_LAUNCH, line=31, stream=1, correlation=91, aux0=5)
    program.emit(Kind.GRAPH_LAUNCH, line=32, stream=1, correlation=92, aux0=6)
    # An access of another node of the graph says nothing of the host function's.
    program.emit(Kind.ACCESS, correlation=91, stream=2, address=1 << 21, size=8, flags=1)
    assert gaps(program)[GapKind.HOST_FUNCTIONS].names == ("program.py:31",)


@pytest.mark.parametrize(("types", "known"), [((5,), True), ((4, 5, 6, 7), True), ((4, 0), False), ((13,), False)])
def test_a_launch_of_nodes_that_touch_nothing_is_checked(types: tuple[int, ...], known: bool) -> None:
    program = working()
    program.emit(Kind.GRAPH_INSTANTIATE, aux0=5, aux1=4)
    for number, kind in enumerate(types, 1):
        program.emit(Kind.GRAPH_NODE, aux0=5, aux1=number, flags=kind)
    program.emit(Kind.GRAPH_LAUNCH, stream=1, correlation=91, aux0=5)
    assert known == (GapKind.LAUNCHES not in gaps(program))


def test_findings_come_before_gaps_in_the_verdict(tmp_path: Any) -> None:
    report = Report((race(str(tmp_path / "a.py")),), gaps=(Gap(GapKind.RECORDING),))
    assert report.outcome is Outcome.FINDINGS


def test_gaps_of_several_reports_leave_everything_unchecked_only_together() -> None:
    whole, part = Gap(GapKind.LAUNCHES, 2, whole=True), Gap(GapKind.LAUNCHES, 3)
    assert merged_gaps([[whole], [part]], add=True) == (Gap(GapKind.LAUNCHES, 5),)
    assert merged_gaps([[whole], [whole]], add=False) == (whole,)
    assert merged_gaps([[whole], []], add=True) == (Gap(GapKind.LAUNCHES, 2),)
    assert merged_gaps([], add=True) == ()


def test_entry_of_a_baseline_is_not_stale_where_nothing_was_checked() -> None:
    from datetime import date

    baseline = Baseline({"a": Known("a", check="race")})
    for gap, stale in (
        (Gap(GapKind.OPERATIONS, whole=True), 0),
        (Gap(GapKind.RECORDING), 0),
        (Gap(GapKind.STREAMS), 1),
    ):
        report = known(Report((), gaps=(gap,)), baseline, RACE, date(2026, 1, 1))
        assert len(report.stale) == stale


@pytest.mark.parametrize("kind", GapKind)
@pytest.mark.parametrize("whole", [True, False])
def test_no_format_shows_a_gap_as_a_pass(kind: GapKind, whole: bool) -> None:
    gap = Gap(kind, 2, ("memcheck",), whole=whole)
    report = Report((), operations=5, gaps=(gap,))
    fails = report.outcome in (Outcome.NOT_CHECKED, Outcome.INCOMPLETE)
    assert fails == (whole or kind is GapKind.RECORDING)
    why = gap_why(gap)
    assert gap_what(gap)
    assert why.endswith((".", "`."))

    text = render_text(report, RUN, width=1000)
    assert f"not checked: {why}" in text
    assert not text.splitlines()[-1].endswith("no findings")

    data = json.loads(render_json(report, RUN))
    assert (data["outcome"], data["gaps"][0]["kind"], data["gaps"][0]["text"]) == (report.outcome, kind, why)

    (invocation,) = json.loads(render_sarif(report, RUN))["runs"][0]["invocations"]
    (notification,) = invocation["toolExecutionNotifications"]
    assert invocation["executionSuccessful"] is not fails
    assert notification["level"] == ("error" if fails else "warning")
    assert notification["message"]["text"].endswith(why)

    (suite,) = junitparser.JUnitXml.fromstring(render_junit(report, RUN).encode())
    assert [case.name for case in suite if case.is_passed] == []
    assert (suite.errors, suite.skipped) == ((1, 2) if fails else (0, 3))

    assert render_github(report, RUN).startswith(
        "::error title=not checked" if fails else "::warning title=not checked"
    )
    assert "- Not checked: " in render_summary(report, RUN)
    (issue,) = json.loads(render_gitlab(report, RUN))
    assert (issue["severity"], issue["check_name"]) == ("blocker" if fails else "info", f"not-checked-{kind}")


def test_clean_report_passes_in_every_format() -> None:
    report = Report((), operations=5)
    assert render_text(report, RUN).endswith("cudatool sanitize: no findings")
    assert json.loads(render_json(report, RUN))["outcome"] == "clean"
    assert json.loads(render_sarif(report, RUN))["runs"][0]["invocations"][0]["executionSuccessful"] is True
    (suite,) = junitparser.JUnitXml.fromstring(render_junit(report, RUN).encode())
    assert [case.name for case in suite if case.is_passed] == ["race", "memcheck"]
    assert json.loads(render_gitlab(report, RUN)) == []


@pytest.mark.parametrize(
    ("operations", "outcome", "words"),
    [
        (0, Outcome.NOT_CHECKED, "no work on a device"),
        (3, Outcome.NOT_CHECKED, "3 operations, nothing was checked"),
        (0, Outcome.INCOMPLETE, "0 operations, no findings in an incomplete recording"),
        (1, Outcome.CLEAN, "1 operation, no findings"),
        (2, Outcome.FINDINGS, "2 operations, findings"),
    ],
)
def test_a_process_that_used_no_device_is_not_said_to_be_unchecked(operations: int, outcome: Outcome, words: str):
    process = Process("process 7 (train.py)", "a.ctrace", operations, outcome, Outcome.CLEAN)
    report = Report((), operations=5, processes=(process,))
    assert f"in process 7 (train.py): {words}\n" in render_text(report, RUN)


def test_workload_that_a_signal_ended_is_said_so() -> None:
    run = ReportContext("/", RACE, -9)
    assert "the workload itself was ended by SIGKILL" in render_text(Report((), operations=1), run)
    assert "the workload itself was ended by SIGKILL" in render_junit(Report((), operations=1), run)


@pytest.mark.parametrize("checks", ["race, leak", ["leak", "race"], ("race", "leak")])
def test_checks_are_named_by_a_text_or_a_list(checks: Any) -> None:
    program = Program()
    assert check(program.trace(), ("race", "leak")) == check(program.trace(), checks)


def test_a_check_whose_name_holds_another_ones_is_not_that_one() -> None:
    assert check(Program().trace(), "racecheck").gaps == check(Program().trace(), ["racecheck"]).gaps


@pytest.mark.parametrize(
    ("checks", "words"),
    [(["rase"], "there is no check 'rase'; did you mean 'race'"), (5, "named by a text"), ([5], "not by")],
)
def test_a_check_that_is_not_there_is_refused(checks: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        check(Program().trace(), checks)
