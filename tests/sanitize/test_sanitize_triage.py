"""What is set aside: by comments in the source, rules, and the baseline; and that fingerprints hold still."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from datetime import date
from pathlib import Path

import pytest
from report_examples import LIBRARY, every_kind, on_device, pipeline, race
from sanitize_program import BUFFER, SIZE, Program, R, W

from cudatool.errors import FileFormatError, OutputError, UsageError
from cudatool.sanitize import Baseline, Outcome, Report, accepted, check, known, parse_rules
from cudatool.sanitize.findings import (
    DeviceFinding,
    Finding,
    FindingKind,
    Known,
    Process,
)
from cudatool.sanitize.fingerprints import fingerprint, functions
from cudatool.sanitize.kinds import CHECKS
from cudatool.sanitize.report import comments
from cudatool.sanitize.report.outputs import Outputs
from cudatool.source_text import SourceLine
from cudatool.trace.events import Kind
from cudatool.trace.model import Frame

TODAY = date(2026, 6, 1)
SIDES = ("first", "second")


@pytest.fixture
def file(tmp_path: Path) -> str:
    return pipeline(tmp_path)


def left(report: Report) -> list[str]:
    return [finding.fingerprint for finding in report.all]


@pytest.mark.parametrize("checked", [Outcome.CLEAN, Outcome.PARTLY_CHECKED])
def test_a_process_has_findings_only_as_long_as_one_of_its_own_counts(file: str, checked: Outcome) -> None:
    ours = replace(race(file, identity="a"), processes=("process 1", "process 2"))
    theirs = replace(on_device(file, FindingKind.LEAK, "leak", fingerprint="b"), processes=("process 2",))
    processes = tuple(Process(name, "a.ctrace", 5, Outcome.FINDINGS, checked) for name in ("process 1", "process 2"))
    report = Report((ours,), on_device=(theirs,), processes=processes)
    outcomes = [
        [process.outcome for process in known(report, Baseline(entries), ("race", "leak"), TODAY).processes]
        for entries in ({}, {"a": Known("a")}, {"b": Known("b")}, {"a": Known("a"), "b": Known("b")})
    ]
    found = Outcome.FINDINGS
    assert [[found, found], [checked, found], [found, found], [checked, checked]] == outcomes


class TestComments:
    """Line 2 to 5 is the first access's statement, line 7 the second access."""

    def put(self, file: str, line: int, comment: str) -> None:
        lines = Path(file).read_text().splitlines()
        lines[line - 1] += f"  {comment}"
        Path(file).write_text("\n".join(lines) + "\n")

    @pytest.mark.parametrize("names", ["", "[race]", "[race-raw]", "[memcheck, race-raw]", "[ race ]"])
    @pytest.mark.parametrize("line", [7, 2])
    def test_a_comment_on_the_line_of_either_access_accepts_the_finding(self, file, names, line):
        self.put(file, line, f"# cudatool: ignore{names}")
        report = accepted(Report((race(file),)))
        assert [] == left(report)
        assert [("comment", SourceLine(file, line))] == [(one.by, one.comment) for one in report.set_aside]

    @pytest.mark.parametrize("names", ["[race-war]", "[memcheck]", "[]"])
    def test_a_comment_for_something_else_does_not(self, file, names):
        self.put(file, 7, f"# cudatool: ignore{names}")
        assert ["fp-race-raw"] == left(accepted(Report((race(file),))))

    def test_any_line_of_the_statement_will_do_and_no_other(self, file):
        self.put(file, 5, "# cudatool: ignore[race]")
        assert [] == left(accepted(Report((race(file),))))

    @pytest.mark.parametrize("line", [1, 6, 8])
    def test_a_comment_on_another_statement_does_not_count(self, file, line):
        self.put(file, line, "# cudatool: ignore")
        assert ["fp-race-raw"] == left(accepted(Report((race(file),))))

    @pytest.mark.parametrize(("line", "accepts"), [(6, False), (7, True), (8, True), (9, False), (10, False)])
    def test_a_decorator_is_like_a_statement(self, file, line, accepts):
        Path(file).write_text("#\n" * 5 + "@other\n@launching(\n    5)\ndef function():\n    pass\n")
        self.put(file, line, "# cudatool: ignore")
        assert accepts == ([] == left(accepted(Report((race(file),)))))

    def test_other_comments_may_stand_before_it(self, file):
        self.put(file, 7, "# noqa: E501  cudatool: ignore[race]  # both write zeros")
        assert [] == left(accepted(Report((race(file),))))

    def test_a_string_is_no_comment(self, file):
        lines = Path(file).read_text().splitlines()
        lines[6] = '    launch(stream, "# cudatool: ignore")'
        Path(file).write_text("\n".join(lines))
        assert ["fp-race-raw"] == left(accepted(Report((race(file),))))

    def test_findings_of_checkers_and_leaks_are_accepted_alike(self, file):
        self.put(file, 7, "# cudatool: ignore[memcheck, leak]")
        report = accepted(every_kind(file))
        assert {"memcheck", "leak"} == {one.finding.check for one in report.set_aside}
        assert {"initcheck", "racecheck", "synccheck"} == {one.check for one in report.on_device}
        assert list(every_kind(file).findings) == list(report.findings)

    @pytest.mark.parametrize("ending", [".cu", ".cuh", ".inl", ".cc"])
    def test_a_comment_in_a_cuda_file_counts_for_the_line_in_the_kernel(self, file, tmp_path, ending):
        kernel = tmp_path / f"scale{ending}"
        kernel.write_text("//\n//\n//\nx[i] = 1;  // cudatool: ignore[memcheck]\n")
        finding = on_device(file, FindingKind.OUT_OF_BOUNDS, "memcheck", source=SourceLine(str(kernel), 4))
        assert [] == left(accepted(Report((), on_device=(finding,))))
        other = replace(finding, source=SourceLine(str(kernel), 3))
        assert ["fp-out-of-bounds"] == left(accepted(Report((), on_device=(other,))))

    def test_a_line_that_is_often_in_the_stack_of_many_findings_is_looked_at_once_for_each(self, file, monkeypatch):
        deep = (Frame(file, "again", 8),) * 1000
        one = race(file)
        findings = [
            replace(one, fingerprint=f"fp{n}", **{side: replace(getattr(one, side), stack=deep) for side in SIDES})
            for n in range(10)
        ]
        looked, at = [], comments._Source.at
        monkeypatch.setattr(comments._Source, "at", lambda *where: looked.append(where) or at(*where))
        assert findings == list(accepted(Report(tuple(findings))).findings)
        assert len(findings) <= len(looked) <= 2 * 2 * len(findings)  # sides; on which others depend, and which count

    def test_an_unknown_name_is_a_remark_and_accepts_nothing(self, file):
        self.put(file, 7, "# cudatool: ignore[rase]")
        report = accepted(Report((race(file),)))
        assert ["fp-race-raw"] == left(report)
        assert [(file, 7)] == [(one.file, one.line) for one in report.remarks]
        assert "'rase'" in report.remarks[0].text

    @pytest.mark.parametrize(
        "comment",
        [
            "cudatool: ignore(race-raw)",
            "cudatool:ignore race-raw",
            "cudatool: ignore: race",
            "cudatool: ingore[race-raw]",
            "cudatool: ignor",
            "cudatool: noqa[race]",
            "cudatool ignore[race-raw]",
            "cudatool: Ignore[race-raw]",
            "cudatool: ignore[race",
        ],
    )
    def test_what_only_looks_like_a_comment_for_cudatool_is_a_remark_and_accepts_nothing(self, file, comment):
        self.put(file, 7, f"# {comment}")
        report = accepted(Report((race(file),)))
        assert ["fp-race-raw"] == left(report)
        assert [(file, 7)] == [(one.file, one.line) for one in report.remarks]

    @pytest.mark.parametrize("comment", ["cudatool: see its docs", "cudatool ignores nothing", "cudatool is a tool"])
    def test_prose_is_no_comment_for_cudatool(self, file, comment):
        self.put(file, 7, f"# {comment}")
        report = accepted(Report((race(file),)))
        assert (["fp-race-raw"], ()) == (left(report), report.remarks)

    @pytest.mark.parametrize("reason", ["", " because both write zeros", ": both write zeros", " (both write zeros)"])
    def test_a_reason_may_follow(self, file, reason):
        self.put(file, 7, f"# cudatool: ignore{reason}")
        assert [] == left(accepted(Report((race(file),))))

    def test_mistakes_are_remarked_on_in_files_without_findings(self, file):
        self.put(file, 7, "# cudatool: ignore[rase]")
        assert () == accepted(Report(())).remarks
        assert [7] == [one.line for one in accepted(Report(()), files=[file]).remarks]

    def test_possible_findings_are_accepted_alike(self, file):
        self.put(file, 7, "# cudatool: ignore[race]")
        assert [] == left(accepted(Report((), possible=(race(file, exact=False),))))

    def test_a_source_that_cannot_be_read_has_no_comments(self):
        assert ["fp-race-raw"] == left(accepted(Report((race("/nowhere/a.py"),))))

    def test_what_is_not_python_any_more_still_has_its_comments(self, file):
        Path(file).write_text("x\n" * 6 + "launch(  # cudatool: ignore\n")
        assert [] == left(accepted(Report((race(file),))))


class TestRules:
    def matching(self, rule: str, report: Report) -> set[str]:
        return {one.finding.fingerprint for one in accepted(report, parse_rules([rule])).set_aside}

    @pytest.mark.parametrize(
        "rule",
        [
            "kind=race-raw",
            "kind=race-*",
            "kind=race",
            "file='my pipeline.py'",
            "file='* pipeline.py'",
            "function=produce",
            "function=cons*",
            "operation='kernel make*'",
            "operation='use<a|b>'",
            "fingerprint=fp-race-raw",
            "fingerprint=fp-*",
            "kind=race function=consume file=*.py",
        ],
    )
    def test_every_term_finds_its_finding(self, file, rule):
        assert {"fp-race-raw"} == self.matching(rule, Report((race(file),)))

    @pytest.mark.parametrize(
        "rule",
        [
            "kind=race-waw",
            "kind=memcheck",
            "file=pipeline.py",
            "function=prod",
            "operation=mak",
            "fingerprint=fp",
            "kind=race function=other",
            "function=consume file=runner.py",  # not of the same frame
        ],
    )
    def test_a_rule_of_which_one_term_does_not_hold_does_not_count(self, file, rule):
        assert set() == self.matching(rule, Report((race(file),)))

    def test_checks_kinds_and_cuda_files_of_checkers(self, file):
        report = Report((), on_device=(on_device(file, FindingKind.OUT_OF_BOUNDS, "memcheck"),))
        for rule in ("kind=memcheck", "kind=out-*", "file=scale.cu", "operation=scale"):
            assert {"fp-out-of-bounds"} == self.matching(rule, report)

    def test_a_file_has_a_rule_on_each_line_and_comments(self, tmp_path):
        path = tmp_path / "rules.txt"
        path.write_text("# ours\n\nkind=leak   # the pool\nkind=race file='a b.py'\n")
        rules = parse_rules([f"@{path}", "kind=reuse"])
        assert ["kind=leak", "kind=race file=a b.py", "kind=reuse"] == [rule.text for rule in rules]

    @pytest.mark.parametrize(
        ("rule", "message"),
        [
            ("race", "'race' is not a term"),
            ("kinds=race", "'kinds=race' is not a term"),
            ("kind=", "'kind=' is not a term"),
            ("kind=rase*", "no kind of finding is 'rase*'"),
            ("kind=race kind=leak", "kind is given twice"),
            ("file='a", "No closing quotation"),
            ("@/nowhere/rules", "cannot read suppressions from /nowhere/rules"),
        ],
    )
    def test_what_is_no_rule_is_refused(self, rule, message):
        with pytest.raises(UsageError, match=message.replace("*", r"\*")):
            parse_rules([rule])

    def test_a_bad_line_of_a_file_is_named(self, tmp_path):
        path = tmp_path / "rules.txt"
        path.write_text("kind=race\nnonsense\n")
        with pytest.raises(UsageError, match=f"{path}:2: 'nonsense'"):
            parse_rules([f"@{path}"])

    def test_a_file_that_is_no_text_is_refused(self, tmp_path):
        path = tmp_path / "rules.txt"
        path.write_bytes(b"\xff\xfe\x00")
        with pytest.raises(UsageError, match="not UTF-8"):
            parse_rules([f"@{path}"])


class TestBaseline:
    def of(self, *entries: Known) -> Baseline:
        return Baseline({entry.fingerprint: entry for entry in entries})

    def test_a_known_finding_does_not_count(self, file):
        report = known(Report((race(file),)), self.of(Known("fp-race-raw", reason="zeros")), CHECKS, TODAY)
        assert [] == left(report)
        assert [("baseline", "zeros")] == [(one.by, one.reason) for one in report.set_aside]

    @pytest.mark.parametrize(("day", "counts"), [("2026-06-01", False), ("2026-05-31", True), ("", False)])
    def test_an_entry_holds_to_the_end_of_its_last_day(self, file, day, counts):
        entry = Known("fp-race-raw", expires=day)
        report = known(Report((race(file),)), self.of(entry), CHECKS, TODAY)
        assert counts == bool(report.findings)
        assert ((entry,) if counts else ()) == report.expired

    def test_an_entry_without_a_finding_is_stale(self, file):
        gone = Known("gone", "race-waw", "race")
        assert (gone,) == known(Report((race(file),)), self.of(gone), CHECKS, TODAY).stale

    def test_an_entry_of_a_check_that_was_not_made_is_not_stale(self):
        assert () == known(Report(()), self.of(Known("gone", "misaligned", "memcheck")), ("race",), TODAY).stale

    def test_an_entry_whose_finding_a_comment_accepts_is_not_stale(self, file):
        Path(file).write_text(Path(file).read_text().replace("use)", "use)  # cudatool: ignore"))
        report = known(accepted(Report((race(file),))), self.of(Known("fp-race-raw")), CHECKS, TODAY)
        assert () == report.stale

    def test_every_finding_of_every_list_can_be_known(self, file):
        report = replace(every_kind(file), possible=(race(file, identity="maybe", exact=False),))
        report = known(report, Baseline({}).updated(report, CHECKS), CHECKS, TODAY)
        assert ([], len(FindingKind) + 1) == (left(report), len(report.set_aside))

    def test_update_keeps_reasons_and_days_adds_what_is_new_and_drops_what_is_gone(self, file):
        old = self.of(Known("fp-race-raw", reason="zeros", expires="2026-07-01"), Known("gone", "reuse", "race"))
        new = old.updated(Report((race(file), race(file, FindingKind.RACE_WAW))), CHECKS).known
        assert ["fp-race-raw", "fp-race-waw"] == sorted(new)
        assert ("zeros", "2026-07-01") == (new["fp-race-raw"].reason, new["fp-race-raw"].expires)
        assert ("race-waw", "race", "") == (
            new["fp-race-waw"].kind,
            new["fp-race-waw"].check,
            new["fp-race-waw"].reason,
        )

    def test_update_keeps_what_the_baseline_has_set_aside(self, file):
        old = Baseline({}).updated(Report((race(file),)), CHECKS)
        assert old == old.updated(known(Report((race(file),)), old, CHECKS, TODAY), CHECKS)

    def test_update_leaves_the_entries_of_checks_that_were_not_made(self):
        entry = Known("k", "misaligned", "memcheck", reason="old")
        assert {"k": entry} == self.of(entry).updated(Report(()), ("race",)).known

    def test_what_is_written_is_read_back_and_sorted(self, file, tmp_path):
        path = str(tmp_path / "baseline.json")
        written = Baseline({}).updated(every_kind(file), CHECKS)
        written.write(path)
        assert written == Baseline.read(path)
        kinds = [entry["kind"] for entry in json.loads(Path(path).read_text())["findings"]]
        assert sorted(kinds) == kinds

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("{", "is not JSON"),
            ("[]", "its schema is not"),
            ('{"schema": "cudatool.baseline/2", "findings": []}', "its schema is not"),
            ('{"schema": "cudatool.baseline/1", "findings": {}}', '"findings" is not a list'),
            ('{"schema": "cudatool.baseline/1", "findings": [{}]}', "entry 1 has no fingerprint"),
            ('{"schema": "cudatool.baseline/1", "findings": [{"fingerprint": 1}]}', "entry 1 is not an object of"),
            ('{"schema": "cudatool.baseline/1", "findings": [{"fingerprint": "a", "x": ""}]}', "unknown field 'x'"),
            ('{"schema": "cudatool.baseline/1", "findings": [{"fingerprint": "a", "expires": "soon"}]}', "'soon'"),
        ],
    )
    def test_what_is_no_baseline_is_refused(self, tmp_path, text, message):
        path = tmp_path / "baseline.json"
        path.write_text(text)
        with pytest.raises(FileFormatError, match=message):
            Baseline.read(str(path))

    def test_a_missing_baseline_is_an_error_unless_it_is_to_be_written(self, tmp_path):
        path = str(tmp_path / "none.json")
        with pytest.raises(FileFormatError, match="--update-baseline writes it"):
            Baseline.read(path)
        assert Baseline({}) == Baseline.read(path, may_be_new=True)


class TestDependentRaces:
    """Line 3 writes what line 4 also writes to, and line 5 reads both on another stream: one wait orders it after both."""

    def report(self) -> Report:
        program = Program()
        producer, consumer = program.stream(), program.stream()
        program.kernel(producer, (W, BUFFER, SIZE), line=3)
        program.kernel(producer, (W, BUFFER + SIZE, SIZE), line=4)
        program.kernel(consumer, (R, BUFFER + SIZE, SIZE), (R, BUFFER, SIZE), line=5)
        return check(program.trace(), accepts=lambda report: True)

    def lines(self, findings: Iterable[Finding | DeviceFinding]) -> list[int]:
        return [one.first.stack[0].line for one in findings if isinstance(one, Finding)]

    def test_a_race_that_the_repair_of_another_one_removes_is_not_reported_beside_it(self):
        report = accepted(self.report(), parse_rules(["kind=race-war"]))
        assert [4] == self.lines(report.all)
        assert [3] == self.lines(report.dependent)

    def test_it_counts_once_the_other_one_is_accepted(self):
        (reported,) = self.report().findings
        left_over = accepted(self.report(), parse_rules([f"fingerprint={reported.fingerprint}"]))
        assert ([3], []) == (self.lines(left_over.all), self.lines(left_over.dependent))
        baseline = Baseline({reported.fingerprint: Known(reported.fingerprint)})
        assert [3] == self.lines(known(self.report(), baseline, CHECKS, TODAY).all)

    def test_it_can_be_accepted_too(self):
        report = accepted(self.report(), parse_rules(["kind=race-raw"]))
        assert [] == left(report)
        assert [4, 3] == self.lines(one.finding for one in report.set_aside)

    def test_an_expired_entry_accepts_nothing(self):
        (reported,) = self.report().findings
        expired = Baseline({reported.fingerprint: Known(reported.fingerprint, expires="2026-05-31")})
        assert [4] == self.lines(known(self.report(), expired, CHECKS, TODAY).all)

    def test_a_baseline_of_all_that_is_found_has_it_and_is_not_stale(self):
        baseline = Baseline({}).updated(self.report(), CHECKS)
        report = known(self.report(), baseline, CHECKS, TODAY)
        assert ([], ()) == (left(report), report.stale)
        assert ["baseline", "baseline"] == [one.by for one in report.set_aside]

    def test_its_entry_is_not_stale_while_the_other_one_counts(self):
        (dependent,) = self.report().dependent
        baseline = Baseline({dependent.fingerprint: Known(dependent.fingerprint)})
        report = known(self.report(), baseline, CHECKS, TODAY)
        assert ([4], ()) == (self.lines(report.all), report.stale)


class TestFingerprints:
    STACK = (
        Frame("/home/a/proj/train.py", "step", 10),
        Frame("/home/a/proj/train.py", "main.<locals>.<listcomp>", 11),
        Frame("/home/a/.venv/lib/python3.11/site-packages/pytest/runner.py", "call", 3),
        Frame("/usr/lib/python3.11/threading.py", "run", 7),
        Frame("/home/a/proj/train.py", "main", 20),
    )

    def test_the_same_program_elsewhere_under_other_versions_is_the_same(self):
        elsewhere = (
            LIBRARY,
            Frame("/srv/ci/build-7/train.py", "step", 99),
            Frame("/opt/python/lib/python3.13/site-packages/_pytest/other.py", "invoke", 1),
            Frame("/srv/ci/build-7/train.py", "main", 5),
        )
        assert functions(self.STACK) == functions(elsewhere)
        one, two = (replace(race("a.py").first, stack=stack) for stack in (self.STACK, elsewhere))
        kind = FindingKind.RACE_RAW
        assert fingerprint(kind, one, one, None) == fingerprint(kind, two, two, None)

    def test_another_function_is_another(self):
        assert functions(self.STACK) != functions(self.STACK[1:])

    def test_a_stack_of_installed_packages_alone_still_counts(self):
        assert functions(self.STACK[2:3]) != functions(self.STACK[3:4]) != ""

    def found(self, *order: int, mode: str = "write", kind: str = "out-of-bounds") -> dict[int, str]:
        """Launch a kernel on lines 1 and 2, let its findings come in `order`; return fingerprints by line."""
        program = Program()
        stream = program.stream()
        for line in (1, 2):
            program.kernel(stream, line=line)
        said = {"kind": kind, "check": "memcheck", "kernel": "k", "mode": mode, "space": "global", "text": "t"}
        for line in order:
            program.emit(Kind.FINDING, name=json.dumps(said), correlation=line, aux0=1, line=9)
        return {one.stack[0].line: one.fingerprint for one in check(program.trace(), ("memcheck",)).on_device}

    def test_which_launch_ran_first_makes_no_difference(self):
        assert self.found(1, 2) == self.found(2, 1)
        assert 2 == len(set(self.found(1, 2).values()))

    def test_which_of_two_racing_threads_came_second_makes_no_difference(self):
        assert self.found(1, kind="kernel-race") == self.found(1, kind="kernel-race", mode="read")
        assert self.found(1) != self.found(1, mode="read")


class TestOutputs:
    @pytest.fixture(autouse=True)
    def here(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)

    def parsed(self, *texts: str) -> list[tuple[str, str]]:
        return [(one.format, Path(one.path).name) for one in Outputs.parse(texts).outputs]

    @pytest.mark.parametrize(
        ("texts", "expected"),
        [
            ([], [("text", "")]),
            (["json"], [("json", "")]),
            (["sarif=a.sarif"], [("text", ""), ("sarif", "a.sarif")]),
            (["text", "github", "junit=j.xml"], [("text", ""), ("github", ""), ("junit", "j.xml")]),
            (["json=-"], [("json", "")]),
            (["json", "json"], [("json", "")]),
            (["text=a", "json"], [("text", "a"), ("json", "")]),
        ],
    )
    def test_formats_go_where_they_are_sent(self, texts, expected):
        assert expected == self.parsed(*texts)

    @pytest.mark.parametrize(
        ("texts", "message"),
        [
            (["yaml"], "there is no format 'yaml'; there are text, json, sarif, junit, github, gitlab"),
            (["json="], "names no file"),
            (["json", "sarif"], "only one of json and sarif can go to stdout"),
            (["text", "json"], "only one of text and json can go to stdout"),
            (["json=a", "sarif=./a"], "cannot go to the same file"),
        ],
    )
    def test_what_cannot_be_is_refused(self, texts, message):
        with pytest.raises(UsageError, match=message):
            self.parsed(*texts)

    def test_a_file_that_cannot_be_written_is_refused_before_and_none_is_left_behind(self, tmp_path):
        (tmp_path / "folder").mkdir()
        (tmp_path / "plain").write_text("")
        for path, why in (
            ("nowhere/a.json", "its directory does not exist"),
            ("folder", "it is a directory"),
            ("plain/a.json", "its directory does not exist"),
            ("x" * 300, "File name too long"),
        ):
            with pytest.raises(OutputError, match=why):
                self.parsed(f"json={path}")
        self.parsed("json=good.json")
        assert {"folder", "plain"} == {path.name for path in tmp_path.iterdir()}

    def test_the_job_summary_is_tried_only_for_github(self, monkeypatch):
        monkeypatch.setenv("GITHUB_STEP_SUMMARY", "nowhere/summary.md")
        self.parsed("text")
        with pytest.raises(OutputError, match=r"nowhere/summary.md"):
            self.parsed("github")
