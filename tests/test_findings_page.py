"""docs/findings.md says of each kind what the table says, and its examples have what they are examples of."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from cudatool.sanitize.findings import FindingKind
from cudatool.sanitize.kinds import CHECKS, KINDS

PAGE = (Path(__file__).parents[1] / "docs" / "findings.md").read_text()
SECTIONS = dict(re.findall(r"^### ([\w-]+)\n\n(.*?)(?=^##|\Z)", PAGE, re.MULTILINE | re.DOTALL))
START = re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)[1]

# Runs each program of a JSON list in one process, under the check of its kind, and prints the kinds that it found.
_RUNNER = """
import gc, json, os, sys, tempfile
import cudatool as ct
from cudatool.recording import record
from cudatool.sanitize import check
from cudatool.trace import reader

for name, checks, source in json.load(sys.stdin):
    path = os.path.join(tempfile.mkdtemp(dir="."), "t.ctrace")
    inside = [one for one in checks if one not in ("race", "leak")]
    with record(path, device="sim", measure_accesses="race" in checks, checks=inside):
        names = {}
        try:
            exec(compile(source, f"{name}.py", "exec"), names)
        except Exception as error:
            print(json.dumps([name, repr(error)]), file=sys.stderr)
            continue
        ct.synchronize()
        names.clear()
        gc.collect()
    report = check(reader.read(path), checks)
    print(json.dumps([name, sorted({one.kind for one in report.all})]), file=sys.stderr)
    ct.empty_cache()
"""


def checks_of_sections() -> dict[str, str]:
    """Return the check that the heading above each section names."""
    found, check = {}, ""
    for line in PAGE.splitlines():
        if match := re.match(r"## .*`--checks (\w+)`", line):
            check = match[1]
        elif match := re.match(r"### ([\w-]+)", line):
            found[match[1]] = check
    return found


def wrong_and_repaired(kind: str) -> tuple[str, str]:
    (example,) = re.findall(r"```python\n(.*?)```", SECTIONS[kind], re.DOTALL)
    lines = example.splitlines(keepends=True)
    repaired = [re.sub(r"(#|//) repair: ", "", line) for line in lines if not line.endswith(" wrong\n")]
    assert repaired != lines
    return START + example, START + "".join(repaired)


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[str, list[str]]:
    """The kinds found in the example of each kind, as it is and repaired."""
    programs = []
    for kind, check in checks_of_sections().items():
        for name, source in zip((kind, f"{kind} repaired"), wrong_and_repaired(kind), strict=True):
            programs.append((name, [check], source))
    done = subprocess.run(
        [sys.executable, "-c", _RUNNER],
        input=json.dumps(programs),
        cwd=tmp_path_factory.mktemp("examples"),
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert 0 == done.returncode, done.stderr
    return dict(json.loads(line) for line in done.stderr.splitlines() if line.startswith("["))


def test_every_kind_has_a_row_and_a_section():
    assert list(FindingKind) == list(KINDS)
    assert sorted(FindingKind) == sorted(SECTIONS)


def test_every_check_has_a_heading():
    assert set(CHECKS) == set(checks_of_sections().values())


@pytest.mark.parametrize("kind", KINDS)
def test_the_section_begins_with_the_help_of_the_table_and_names_a_rule(kind):
    assert KINDS[kind].help == " ".join(SECTIONS[kind].split("\n\n")[0].split())
    assert "\nRule: " in SECTIONS[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_a_title_is_a_heading_and_the_help_is_sentences(kind):
    text = KINDS[kind]
    assert not text.title.endswith(".")
    assert 70 >= len(text.title)
    assert text.help.endswith(".")


@pytest.mark.parametrize("kind", SECTIONS)
def test_the_example_has_its_finding_and_none_once_repaired(found, kind):
    # A wait that does nothing is told beside the race that it does not prevent.
    expected = ["race-raw", kind] if kind == "wait-unrecorded" else [kind]
    assert (expected, []) == (found[kind], found[f"{kind} repaired"])
