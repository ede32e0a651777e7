"""What CI systems accept of two formats for which no package holds a schema, as rules that a report can break.

JUnit XML: the elements and attributes that the schema of Jenkins' xUnit plugin (junit-10.xsd), which refuses a file
with others, and those that Jenkins' own reader and GitLab's share. Code Quality: GitLab's documentation, "Code Quality
report format".
"""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from pathlib import PurePosixPath
from typing import Final, NamedTuple

__all__ = ["check_code_quality", "check_junit"]


class _Element(NamedTuple):
    required: frozenset[str]
    optional: frozenset[str]
    children: frozenset[str]


def _element(required: str, optional: str, children: str = "") -> _Element:
    return _Element(*(frozenset(names.split()) for names in (required, optional, children)))


_RESULT: Final = _element("", "type message")
_JUNIT: Final = {
    "testsuites": _element("", "name time tests failures errors", "testsuite"),
    "testsuite": _element(
        "name tests failures errors",
        "group time skipped timestamp hostname id package file log url",
        "testsuite properties testcase system-out system-err",
    ),
    "testcase": _element("name", "time classname group", "skipped error failure system-out system-err"),
    "skipped": _RESULT,
    "error": _RESULT,
    "failure": _RESULT,
    "system-out": _element("", ""),
    "system-err": _element("", ""),
}
_COUNTS: Final = {"failures": "failure", "errors": "error", "skipped": "skipped"}
_SEVERITIES: Final = {"info", "minor", "major", "critical", "blocker"}


def check_junit(text: str) -> None:
    """Fail if `text` is no JUnit XML that the readers named above accept, or one whose counts are wrong."""
    root = ET.fromstring(text.encode())
    assert "testsuites" == root.tag
    for element in root.iter():
        rule = _JUNIT[element.tag]
        names = set(element.keys())
        assert rule.required <= names, (element.tag, rule.required - names)
        assert names <= rule.required | rule.optional, (element.tag, names - rule.required - rule.optional)
        assert {child.tag for child in element} <= rule.children, element.tag
        assert rule.children <= {"testsuite"} or not (element.tail or "").strip()
        if time := element.get("time"):
            assert re.fullmatch(r"\d{1,3}(,?\d{3})*(\.\d*)?", time), time
    for suite in root.iter("testsuite"):
        assert str(len(suite.findall("testcase"))) == suite.get("tests")
        for attribute, tag in _COUNTS.items():
            assert str(len(suite.findall(f"testcase/{tag}"))) == suite.get(attribute), attribute
        cases = [(case.get("classname"), case.get("name")) for case in suite.iter("testcase")]
        assert len(set(cases)) == len(cases), "a reader takes two tests of one name for one"
        for case in suite.iter("testcase"):
            assert sum(child.tag in _COUNTS.values() for child in case) <= 1, case.get("name")


def check_code_quality(text: str) -> None:
    """Fail if `text` is no Code Quality report of GitLab's: a JSON array of which each entry has these fields."""
    entries = json.loads(text)
    assert isinstance(entries, list)
    for entry in entries:
        texts = [entry[name] for name in ("description", "check_name", "fingerprint")]
        assert all(isinstance(one, str) and one for one in texts), entry
        assert entry["severity"] in _SEVERITIES
        path, line = entry["location"]["path"], entry["location"]["lines"]["begin"]
        assert isinstance(path, str)
        assert path
        assert not path.startswith(("./", "/")), "relative to the repository"
        parts = PurePosixPath(path).parts
        assert ".." not in parts[parts.count("..") :], "out of the repository at most at its beginning"
        assert isinstance(line, int)
        assert line >= 1
    fingerprints = [entry["fingerprint"] for entry in entries]
    assert len(set(fingerprints)) == len(fingerprints), "of two entries with one fingerprint GitLab shows one"
