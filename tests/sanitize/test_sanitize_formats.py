"""What each format says of each kind of finding, read back by those who read it for a living."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import junitparser
import pytest
from ci_formats import check_code_quality, check_junit
from generated import examples
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from report_examples import LIBRARY, ON_DEVICE, every_kind, on_device, pipeline, race

from cudatool.sanitize import accepted, parse_rules
from cudatool.sanitize.findings import (
    AccessSite,
    BufferSite,
    Finding,
    FindingKind,
    Gap,
    GapKind,
    Known,
    Remark,
    Report,
    SetAside,
)
from cudatool.sanitize.kinds import CHECKS
from cudatool.sanitize.report.github import render_github, render_summary
from cudatool.sanitize.report.gitlab import render_gitlab
from cudatool.sanitize.report.junit import render_junit
from cudatool.sanitize.report.sarif import render_sarif
from cudatool.sanitize.report.text import render_json, render_text
from cudatool.sanitize.report.views import ReportContext
from cudatool.source_text import SourceLine
from cudatool.trace.model import Frame

RENDERERS = [render_text, render_json, render_sarif, render_junit, render_github, render_summary, render_gitlab]


@pytest.fixture
def file(tmp_path: Path) -> str:
    return pipeline(tmp_path)


@pytest.fixture
def run(tmp_path: Path) -> ReportContext:
    return ReportContext(str(tmp_path), CHECKS)


@pytest.fixture
def mixed(file: str) -> Report:
    """One finding of every standing."""
    return Report(
        findings=(race(file), race(file, identity="late")),
        possible=(race(file, exact=False, identity="maybe"),),
        on_device=(on_device(file, FindingKind.LEAK, "leak"),),
        set_aside=(
            SetAside(race(file, identity="a"), "baseline", "both write zeros", "2099-01-31"),
            SetAside(race(file, identity="b"), "rule", "kind=race-*"),
            SetAside(
                on_device(file, FindingKind.MISALIGNED, "memcheck", fingerprint="c"),
                "comment",
                comment=SourceLine(file, 7),
            ),
        ),
        expired=(Known("late", "race-raw", "race", "x", "for the release", "2020-01-31"),),
        stale=(Known("gone", "race-waw", "race", "kernel a in f (b.py)"),),
        remarks=(Remark(file, 5, "ignore[rase]: 'rase' is not a kind of finding or a check"),),
        notes=("the last chunk is missing",),
    )


def sarif(report: Report, run: ReportContext) -> dict[str, Any]:
    (one,) = json.loads(render_sarif(report, run))["runs"]
    return one


@pytest.mark.parametrize("render", RENDERERS, ids=lambda render: render.__name__)
def test_every_kind_of_finding_is_in_every_format(render, file, run):
    text = render(every_kind(file), run)
    assert [] == [kind for kind in FindingKind if kind.value not in text]


@pytest.mark.parametrize("render", RENDERERS, ids=lambda render: render.__name__)
def test_a_report_without_findings_can_be_written(render, run):
    assert "race-raw at" not in render(Report(()), run)


@pytest.mark.parametrize(("render", "accept"), [(render_junit, check_junit), (render_gitlab, check_code_quality)])
class TestAcceptedByItsReaders:
    def test_every_kind_of_finding(self, render, accept, file, run):
        accept(render(every_kind(file), run))

    @pytest.mark.parametrize("whole", [False, True])
    def test_every_kind_of_gap(self, render, accept, file, run, whole):
        gaps = tuple(Gap(kind, 3, ("one", "two"), whole=whole) for kind in GapKind)
        accept(render(replace(every_kind(file), gaps=gaps), replace(run, status=9)))
        accept(render(Report((), gaps=gaps), run))

    def test_findings_of_every_standing(self, render, accept, mixed, run):
        accept(render(mixed, replace(run, status=-9)))

    def test_nothing_found(self, render, accept, run):
        accept(render(Report(()), run))


class TestSarif:
    def test_every_kind_and_standing_is_valid_by_the_published_schema(self, check_schema, file, run, mixed):
        for report in (every_kind(file), mixed, Report(())):
            check_schema("sarif", json.loads(render_sarif(report, run)))

    def test_the_schema_that_is_checked_against_refuses_what_is_not_sarif(self, check_schema, file, run):
        log = json.loads(render_sarif(every_kind(file), run))
        log["runs"][0]["results"][0]["level"] = "fatal"
        with pytest.raises(AssertionError, match="fatal"):
            check_schema("sarif", log)

    def test_each_kind_is_a_rule_with_help_and_each_result_points_to_its_rule(self, file, run, monkeypatch):
        monkeypatch.setenv("CUDATOOL_DOCS", "https://example.org/docs/")
        found = sarif(every_kind(file), run)
        rules = found["tool"]["driver"]["rules"]
        assert list(FindingKind) == [rule["id"] for rule in rules]
        assert "https://example.org/docs/findings.md#race-raw" == rules[0]["helpUri"]
        assert all(rule["fullDescription"]["text"] in rule["help"]["text"] for rule in rules)
        for result in found["results"]:
            assert result["ruleId"] == rules[result["ruleIndex"]]["id"]

    def test_without_an_address_of_the_docs_there_is_no_dead_link(self, file, run, monkeypatch):
        monkeypatch.delenv("CUDATOOL_DOCS", raising=False)
        assert "helpUri" not in sarif(every_kind(file), run)["tool"]["driver"]["rules"][0]

    def test_a_race_is_at_its_second_access_and_links_to_the_first_and_to_the_allocation(self, file, run):
        (result,) = sarif(Report((race(file),)), run)["results"]
        (location,) = result["locations"]
        assert 7 == location["physicalLocation"]["region"]["startLine"]  # the user's line, not the library's
        first, buffer = result["relatedLocations"]
        assert [2, 8] == [one["physicalLocation"]["region"]["startLine"] for one in (first, buffer)]
        links = re.findall(r"(?<!\\)\[((?:\\.|[^\]\\])*)\]\((\d)\)", result["message"]["text"])
        assert [
            (r"write by kernel make\[int, 4\] through out on stream 1", "1"),
            ("in a buffer of 4 KiB, allocated here", "2"),
        ] == [(text[0].lower() + text[1:], number) for text, number in links]
        assert [1, 2] == [first["id"], buffer["id"]]
        assert "Nothing makes stream 2 wait for stream 1. " in result["message"]["text"]
        assert result["message"]["text"].endswith("Repair: Before kernel use, wait: 100 %.")

    def test_the_host_stacks_of_both_accesses_and_of_the_allocation_are_there_innermost_first(self, file, run):
        (result,) = sarif(Report((race(file),)), run)["results"]
        stacks = [
            [frame["location"]["logicalLocations"][0]["fullyQualifiedName"] for frame in stack["frames"]]
            for stack in result["stacks"]
        ]
        assert [["call", "consume"], ["produce", "call"], ["<module>"]] == stacks

    def test_paths_are_relative_to_the_root_and_encoded(self, file, run):
        found = sarif(Report((race(file),)), run)
        (result,) = found["results"]
        artifact = result["locations"][0]["physicalLocation"]["artifactLocation"]
        assert {"uri": "my%20pipeline.py", "uriBaseId": "%SRCROOT%"} == artifact
        base = found["originalUriBaseIds"]["%SRCROOT%"]["uri"]
        assert base.startswith("file:///")
        assert Path(file) == Path(unquote(base.removeprefix("file://"))) / unquote(artifact["uri"])

    def test_a_file_outside_of_the_root_is_absolute(self, run):
        (result,) = sarif(Report((race("/elsewhere/a.py"),)), run)["results"]
        assert {"uri": "file:///elsewhere/a.py"} == result["locations"][0]["physicalLocation"]["artifactLocation"]

    def test_code_that_is_in_no_file_has_a_logical_location_only(self, check_schema, run):
        found = Report((race("<string>"),))
        check_schema("sarif", json.loads(render_sarif(found, run)))
        (result,) = sarif(found, run)["results"]
        assert ["logicalLocations"] == list(result["locations"][0])

    def test_a_line_of_a_cuda_file_that_is_there_is_a_related_location(self, file, run, tmp_path):
        finding = on_device(file, FindingKind.KERNEL_RACE, "racecheck")
        (tmp_path / "scale.cu").write_text("//\n" * 4)
        (result,) = sarif(Report((), on_device=(finding,)), run)["results"]
        lines = [
            (one["physicalLocation"]["artifactLocation"]["uri"], one["physicalLocation"]["region"]["startLine"])
            for one in result["relatedLocations"]
        ]
        assert [("scale.cu", 4), ("scale.cu", 3), ("my%20pipeline.py", 8)] == lines

    def test_what_was_set_aside_is_suppressed_and_the_rest_says_that_it_is_not(self, file, run, mixed):
        results = {one["partialFingerprints"]["cudatool/v1"]: one for one in sarif(mixed, run)["results"]}
        assert {"fp-race-raw", "late", "maybe", "fp-leak"} == {
            key for key, one in results.items() if not one["suppressions"]
        }
        (baseline,), (rule,), (comment,) = (results[key]["suppressions"] for key in "abc")
        assert ("external", "both write zeros (until 2099-01-31)") == (baseline["kind"], baseline["justification"])
        assert ("external", "kind=race-*") == (rule["kind"], rule["justification"])
        assert "inSource" == comment["kind"]
        assert 7 == comment["location"]["physicalLocation"]["region"]["startLine"]

    def test_levels(self, file, run, mixed):
        levels = [(one["partialFingerprints"]["cudatool/v1"], one["level"]) for one in sarif(mixed, run)["results"][:4]]
        assert [("fp-race-raw", "error"), ("late", "error"), ("fp-leak", "error"), ("maybe", "warning")] == levels

    def test_notes_remarks_and_a_failed_workload_are_of_the_invocation(self, run, mixed):
        (invocation,) = sarif(mixed, replace(run, status=9))["invocations"]
        assert invocation["executionSuccessful"] is False
        said = [(one["level"], one["message"]["text"]) for one in invocation["toolExecutionNotifications"]]
        assert ("note", "the last chunk is missing") in said
        assert ("warning", mixed.remarks[0].text) in said
        assert any(text.startswith("Stale in the baseline: gone") for _, text in said)
        assert sarif(mixed, run)["invocations"][0]["executionSuccessful"] is True


class TestJunit:
    def test_a_third_party_reads_failures_errors_and_skipped_tests(self, run, mixed, tmp_path):
        path = tmp_path / "junit.xml"
        path.write_text(render_junit(mixed, replace(run, status=9)))
        xml = junitparser.JUnitXml.fromfile(str(path))
        (suite,) = xml
        assert (3, 1, 3) == (suite.failures, suite.errors, suite.skipped)
        assert len(list(suite)) == suite.tests == xml.tests
        cases = {case.name: case for case in suite}
        (failure,) = cases["race-raw: kernel make[int, 4] in produce (my pipeline.py); kernel use<a|b> in consume "
                           "(my pipeline.py) (fp-race-raw)"].result  # fmt: skip
        assert isinstance(failure, junitparser.Failure)
        assert "race-raw" == failure.type
        assert "Nothing makes stream 2 wait for stream 1." in failure.text
        (error,) = cases["workload"].result
        assert isinstance(error, junitparser.Error)
        assert {"memcheck", "initcheck", "racecheck", "synccheck"} < cases.keys()
        assert not cases["memcheck"].result
        assert "race" not in cases  # it did not pass

    def test_names_stay_when_lines_move(self, file, run):
        def names(report: Report) -> list[str]:
            return re.findall(r'<testcase [^>]*name="([^"]*)"', render_junit(report, run))

        finding = race(file)
        moved = replace(finding, second=replace(finding.second, stack=(Frame(file, "consume", 70),)))
        assert names(Report((finding,))) == names(Report((moved,)))

    def test_a_clean_run_is_one_passed_test_for_each_check(self, run, tmp_path):
        (suite,) = junitparser.JUnitXml.fromstring(render_junit(Report(()), replace(run, checks=("race", "leak"))))
        assert ["race", "leak"] == [case.name for case in suite]
        assert all(case.is_passed for case in suite)

    def test_characters_that_xml_cannot_hold_are_escaped(self, file, run):
        bad = replace(race(file), reason="a \x00 b \x1b[1m \ud800 <&>")
        possible = replace(bad, fingerprint="other")
        (suite,) = junitparser.JUnitXml.fromstring(render_junit(Report((bad,), possible=(possible,)), run))
        first, second, *_ = suite
        (failure,) = first.result
        assert r"a \x00 b \x1b[1m \ud800 <&>" in failure.text
        assert r"a \x00 b \x1b[1m \ud800 <&>" in second.system_out


def unescaped(text: str, more: dict[str, str]) -> str:
    """What GitHub's runner makes of a value: in this order."""
    for code, character in {"%0D": "\r", "%0A": "\n", **more, "%25": "%"}.items():
        text = text.replace(code, character)
    return text


class TestGithub:
    def commands(self, report: Report, run: ReportContext) -> list[tuple[str, dict[str, str], str]]:
        found = []
        for line in render_github(report, run).splitlines():
            if match := re.fullmatch(r"::(\w+) (.*?)::(.*)", line):
                properties = dict(part.split("=", 1) for part in match[2].split(","))
                more = {"%3A": ":", "%2C": ","}
                decoded = {name: unescaped(value, more) for name, value in properties.items()}
                found.append((match[1], decoded, unescaped(match[3], {})))
        return found

    def test_a_finding_is_an_annotation_of_the_line_in_the_repository(self, file, run):
        ((level, properties, message),) = self.commands(Report((race(file),)), run)
        assert "error" == level
        title = "race: a read that may come before the write [race-raw]"
        assert {"file": "my pipeline.py", "line": "7", "title": title} == properties
        assert message.startswith("read by kernel use<a|b> on stream 2; write by kernel make[int, 4]")
        assert "wait: 100 %." in message

    def test_nothing_can_break_out_of_its_place(self, tmp_path, run):
        nasty = race(str(tmp_path / "a,line=1::b%0A.py"))
        nasty = replace(nasty, reason="one\r\n::error::two %0A")
        ((_, properties, message),) = self.commands(Report((nasty,)), run)
        assert "a,line=1::b%0A.py" == properties["file"]
        assert r"one\r\n:\x3aerror::two %0A" in message

    def test_what_fails_what_may_and_what_was_set_aside(self, run, mixed):
        levels = [level for level, _, _ in self.commands(mixed, replace(run, status=9))]
        assert ["error", "error", "error", "warning", "warning", "notice", "error"] == levels

    def test_an_expired_entry_says_so(self, run, mixed):
        message = self.commands(mixed, run)[1][2]
        assert "The baseline knows it (for the release), but only until 2020-01-31." in message

    def test_the_summary_is_a_table_of_all_and_the_text_of_those_that_count(self, run, mixed):
        page = render_summary(mixed, run)
        table = [line for line in page.splitlines() if line.startswith("| ")]
        assert 1 + 7 == len(table)
        assert all(5 == len(re.findall(r"(?<!\\)\|", line)) for line in table)
        assert 4 == page.count("<details>")
        assert "kernel use&lt;a|b&gt;" in page
        assert "<a|b>" not in page

    def test_a_long_summary_says_what_it_leaves_out(self, file, run):
        page = render_summary(Report(tuple(race(file, identity=str(i)) for i in range(60))), run)
        assert 50 == page.count("<details>")
        assert "10 more are in the table only." in page


def test_gitlab_code_quality_names_the_line_and_leaves_out_what_was_set_aside(run, mixed):
    found = json.loads(render_gitlab(mixed, run))
    assert ["fp-race-raw", "late", "fp-leak", "maybe"] == [one["fingerprint"] for one in found]
    assert {"path": "my pipeline.py", "lines": {"begin": 7}} == found[0]["location"]
    assert ["critical", "critical", "critical", "minor"] == [one["severity"] for one in found]
    assert all(set(one) == {"description", "check_name", "fingerprint", "severity", "location"} for one in found)


def test_gitlab_code_quality_names_a_line_of_the_repository_where_there_is_one_and_else_the_way_to_the_file(run):
    root = Path(run.root).resolve()
    helper = str(root.parent / "lib dir" / "helper.py")
    outside = race(helper)
    library = Frame(str(root / ".venv/lib/python3.11/site-packages/lib/ops.py"), "empty", 3)
    stack = (library, Frame(helper, "consume", 7), Frame(str(root / "main.py"), "<module>", 30))
    caller = replace(outside, second=replace(outside.second, stack=stack), fingerprint="called")
    nowhere = replace(race("<string>"), fingerprint="string")
    text = render_gitlab(Report((outside, caller, nowhere)), run)
    check_code_quality(text)
    found = {one["fingerprint"]: one for one in json.loads(text)}
    assert {"path": "../lib dir/helper.py", "lines": {"begin": 7}} == found["fp-race-raw"]["location"]
    assert {"path": "main.py", "lines": {"begin": 30}} == found["called"]["location"]
    assert {"path": ".", "lines": {"begin": 1}} == found["string"]["location"]
    assert all(f"({helper}:7)" in found[name]["description"] for name in ("fp-race-raw", "called"))


def test_gitlab_code_quality_is_not_empty_after_a_workload_that_failed(run):
    (failed,) = json.loads(render_gitlab(Report(()), replace(run, status=-15)))
    assert ("blocker", "the workload itself was ended by SIGTERM") == (failed["severity"], failed["description"])
    assert [] == json.loads(render_gitlab(Report(()), run))


class TestText:
    def test_the_last_line_counts_every_standing(self, run, mixed):
        assert (
            "cudatool sanitize: 3 findings, 1 possible, 1 known, 1 ignored by comments, 1 suppressed, 1 expired, "
            "1 stale in the baseline"
        ) == " ".join(render_text(mixed, run, width=200).splitlines()[-1].split())

    def test_both_accesses_the_buffer_the_reason_and_the_repair_stand_in_one_column(self, file, run):
        text = render_text(Report((race(file),)), run)
        columns = {
            label: line.index(line.split(":", 1)[1].strip())
            for line in text.splitlines()
            for label in ("first", "second", "bytes", "buffer", "why", "repair")
            if line.strip().startswith(f"{label}:")
        }
        assert {"first", "second", "bytes", "buffer", "why", "repair"} == columns.keys()
        assert 1 == len(set(columns.values()))
        assert "my pipeline.py:7 in consume" in text
        assert "launch(stream, use)" in text  # the source line
        assert "site-packages" not in text

    def test_what_was_set_aside_is_told_in_a_line_each(self, run, mixed):
        text = render_text(mixed, run, width=200)
        assert "known until 2099-01-31: race-raw at my pipeline.py:7 (a): both write zeros" in text
        assert "suppressed: race-raw at my pipeline.py:7 (b): kind=race-*" in text
        assert "ignored: misaligned at my pipeline.py:7 (c): my pipeline.py:7" in text
        assert "stale: gone (kernel a in f (b.py)) did not occur: take it out of the baseline" in text
        assert "warning: my pipeline.py:5: ignore[rase]" in text
        assert "The baseline knows it (for the release), but only until 2020-01-31." in text

    def test_numbers_go_on_over_all_lists(self, run, mixed):
        numbers = re.findall(r"^(\d)\. ", render_text(mixed, run), re.MULTILINE)
        assert ["1", "2", "3", "4"] == numbers

    def test_a_deep_stack_is_cut(self, file, run):
        deep = tuple(Frame(file, f"level{i}", 1) for i in range(20))
        finding = replace(race(file), second=replace(race(file).second, stack=deep))
        text = render_text(Report((finding,)), run)
        assert "level7" in text
        assert "level8" not in text
        assert "... and 12 more" in text


def test_checks_of_the_examples_are_those_that_exist():
    assert set(ON_DEVICE.values()) | {"race"} == set(CHECKS)


@pytest.fixture
def wait(file: str) -> Report:
    """A finding whose two sides are one call, and about no bytes."""
    side = replace(race(file).second, operation="stream wait event", mode="wait")
    finding = race(file, FindingKind.WAIT_UNRECORDED)
    return Report((replace(finding, first=side, second=side, start=0, size=0, buffer=None),))


@pytest.mark.parametrize("render", [render_text, render_junit, render_github, render_gitlab])
def test_a_call_that_is_both_sides_is_told_once(render, run, wait):
    assert 1 == render(wait, run).count("wait by stream wait event on stream 2")


def test_a_call_that_is_both_sides_has_no_related_location(check_schema, run, wait):
    check_schema("sarif", json.loads(render_sarif(wait, run)))
    (result,) = sarif(wait, run)["results"]
    assert ([], 1) == (result["relatedLocations"], len(result["stacks"]))


def test_a_node_of_a_graph_says_where_the_graph_was_launched(file, run):
    finding = race(file)
    launched = replace(finding.second, launch=(LIBRARY, Frame(file, "main", 5)))
    report = Report((replace(finding, second=launched),))
    (result,) = sarif(report, run)["results"]
    assert ["the graph was launched here"] == [
        one["message"]["text"]
        for one in result["relatedLocations"]
        if 5 == one["physicalLocation"]["region"]["startLine"]
    ]
    text = " ".join(render_text(report, run).split())
    assert "graph: launched my pipeline.py:5 in main" in text


def test_the_directory_of_a_source_that_is_no_file_is_left_out(file, run, tmp_path):
    finding = on_device(
        file, FindingKind.OUT_OF_BOUNDS, "memcheck", source=SourceLine("/of/another/process/scale.cu", 4)
    )
    report = Report((), on_device=(finding,))
    assert "of block (0, 0, 0) at scale.cu:4" in render_text(report, run)
    (tmp_path / "scale.cu").write_text("")
    there = Report((), on_device=(replace(finding, source=SourceLine(f"{tmp_path}/scale.cu", 4)),))
    assert f"{tmp_path}/scale.cu:4" in " ".join(render_text(there, run, width=300).split())


# What a trace from elsewhere may hold: anything that a string can, whatever a file system or an encoding allows.
ANY_TEXT = st.text(st.characters(), max_size=12) | st.sampled_from(
    [
        "",
        ".",
        "/",
        "..",
        "a\0b",
        "<string>",
        "\udc80",
        "\ud800",
        "a\nb\r\n::error::c",
        "%0A",
        "]]>",
        "[a](1)",
    ]
)
ANY_STACK = st.lists(st.builds(Frame, ANY_TEXT, ANY_TEXT, st.integers(-1, 1 << 40)), max_size=3).map(tuple)
ANY_SIDE = st.builds(
    AccessSite, ANY_TEXT, ANY_TEXT, ANY_TEXT, ANY_TEXT, ANY_STACK, st.just(1), st.booleans(), launch=ANY_STACK
)
ANY_RACE = st.builds(
    Finding,
    st.sampled_from(FindingKind),
    ANY_SIDE,
    ANY_SIDE,
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**64 - 1),
    st.none() | st.builds(BufferSite, st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1), ANY_STACK),
    ANY_TEXT,
    ANY_TEXT,
    st.integers(1, 3),
    st.just("fingerprint"),
)
ANY_REPORT = st.builds(
    Report,
    st.tuples(ANY_RACE),
    on_device=st.tuples(
        st.builds(
            lambda kind, stack, text, source: on_device(
                "",
                kind,
                ON_DEVICE[kind],
                stack=stack,
                text=text,
                source=source,
                operation=text,
                fingerprint="on-device",
            ),
            st.sampled_from(list(ON_DEVICE)),
            ANY_STACK,
            ANY_TEXT,
            st.builds(SourceLine, ANY_TEXT, st.integers(0, 1 << 40)),
        )
    ),
    device=ANY_TEXT,
    notes=st.tuples(ANY_TEXT),
)


@settings(
    max_examples=examples(60),
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(report=ANY_REPORT)
def test_no_text_in_a_trace_breaks_a_format(check_schema, report):
    run = ReportContext("/home/me", CHECKS)
    report = accepted(report, parse_rules(["file=a"]))
    texts = {render: render(report, run) for render in RENDERERS}
    for text in texts.values():
        text.encode("utf-8", errors="backslashreplace")
    json.loads(texts[render_json])
    check_code_quality(texts[render_gitlab])
    check_junit(texts[render_junit])
    check_schema("sarif", json.loads(texts[render_sarif]))
    (suite,) = junitparser.JUnitXml.fromstring(texts[render_junit].encode())
    failing = 2 - len(report.set_aside)  # a file may have the name that is accepted
    assert failing == suite.failures
    lines = texts[render_github].split("\n")
    assert [*[True] * failing, False] == [line.startswith("::error ") for line in lines]
