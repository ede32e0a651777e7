"""How a report of compute-sanitizer is read, and a run goes on without kernels that hang or fail: with stand-ins."""

from __future__ import annotations

import stat
import sys
import time
from pathlib import Path

import pytest
import race_rules_beside as beside
from race_rules import Pair, Rule

LOG = """\
========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at one_racy(int *, int *)+0x90
=========     and Read access at one_racy(int *, int *)+0xa0 [2048 hazards]
=========
========= Warning: Potential WAR hazard detected at __shared__ 0x0 in block (0,0,0) :
=========     Write Thread (0,0,0) at two_right+0x50
=========
========= Info: Race reported between Write access at one_racy(int *, int *)+0x90
=========     and Write access at one_racy(int *, int *)+0x90 [3 hazards]
=========
========= Warning: Maximum number of hazards reached.
=========
========= Error: Invalid __shared__ write in two_racy
========= RACECHECK SUMMARY: 3 hazards displayed (2 errors, 1 warning)
"""

# Runs its argument's kernels as compute-sanitizer would: the second hangs, the third fails.
RUNNER = """\
import sys, time
log, left_out = sys.argv[sys.argv.index("--log-file") + 1], [int(i) for i in sys.argv[sys.argv.index("--log-file") + 3:]]
text = ""
for i in range(6):
    if i in left_out:
        continue
    print("start", i, flush=True)
    if i == 1:
        time.sleep(60)
    if i == 0:
        text = "========= Error: Race reported between a write at one_racy+0x10\\n"
    print("done", i, "cudaErrorIllegalAddress" if i == 2 else "cudaSuccess", flush=True)
    if i == 2:
        sys.exit(3)
open(log, "w").write(text)
"""


def _pair(name: str) -> Pair:
    return Pair(name, Rule.BARRIER, "s[t] = t; @ h[me] = s[t ^ 1];", "", "__syncthreads();")


def test_hazards_are_counted_for_the_kernel_that_their_lines_name() -> None:
    severities, other = beside.reported(LOG, ["one_racy", "one_right", "two_racy", "two_right"])
    assert severities == {"one_racy": {"error", "info"}, "two_right": {"warning"}}
    assert other == ["Warning: Maximum number of hazards reached.", "Error: Invalid __shared__ write in two_racy"]


def _program(path: Path, text: str) -> str:
    path.write_text(f"#!{sys.executable}\n{text}")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_kernels_that_hang_or_fail_do_not_stop_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beside, "_SILENCE_S", 3)
    tool, compiler = _program(tmp_path / "tool", RUNNER), _program(tmp_path / "compiler", "")
    module = beside.Module("barriers", [_pair("one"), _pair("two"), _pair("three")])
    found = beside.theirs(module, [tool], [compiler], tmp_path, time.monotonic() + 60)
    assert found.failed == {"one_right": "no progress", "two_racy": "cudaErrorIllegalAddress"}
    assert found.severities == {"one_racy": ["error"]}


def test_what_does_not_compile_was_not_run(tmp_path: Path) -> None:
    compiler = _program(tmp_path / "compiler", "raise SystemExit('no such option')")
    module = beside.Module("barriers", [_pair("one")])
    found = beside.theirs(module, ["false"], [compiler], tmp_path, time.monotonic() + 60)
    assert found.failed == {"one_racy": "did not compile", "one_right": "did not compile"}
    assert ["no such option\n"] == found.other


def test_a_kernel_that_did_not_run_counts_as_nothing() -> None:
    ours = {"one_racy": ["shared"], "one_right": []}
    rows, sums = beside.table([_pair("one")], ours, beside.Theirs({}, {"one_racy": "no progress"}))
    assert "| one | racy | race | no progress |" in rows
    assert "theirs: found 0, missed 0, false 0, rightly silent 1, not run 1" in sums
