"""Ten programs that use PyTorch, five with a race and their clean twins: who finds what, PyTorch's sanitizer or ours."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytestmark = pytest.mark.gpu

PROGRAMS = Path(__file__).with_name("torch_programs")
EXPECTED = {  # program -> the finding of its racy version, and whether PyTorch's sanitizer finds it too
    "overlapping_views": ("race-raw", False),
    "side_stream_write": ("race-raw", True),
    "allocator_reuse": ("reuse", False),
    "pinned_read_early": ("race-host", False),
    "graph_input": ("race-raw", False),
}


class Outcome(NamedTuple):
    """What the two say of one program."""

    kinds: list[str]
    stacks: list[list[str]]
    ours: subprocess.CompletedProcess[str]
    theirs: subprocess.CompletedProcess[str]

    @property
    def found_by_pytorch(self) -> bool:
        return "CSAN detected" in self.theirs.stderr


def examine(program: str, version: str) -> Outcome:
    command = [str(PROGRAMS / f"{program}.py"), version]
    ours = subprocess.run(
        [sys.executable, "-m", "cudatool", "sanitize", "--device", "cuda", "--format", "json", *command],
        capture_output=True,
        text=True,
        check=False,
    )
    theirs = subprocess.run(
        [sys.executable, *command],
        env=os.environ | {"TORCH_CUDA_SANITIZER": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    report: dict[str, Any] = json.loads(ours.stdout) if ours.stdout else {"findings": []}
    found = report["findings"]
    stacks = [
        [Path(frame["file"]).name for frame in side["stack"]] for f in found for side in (f["first"], f["second"])
    ]
    return Outcome([finding["kind"] for finding in found], stacks, ours, theirs)


@pytest.fixture(scope="module")
def outcomes() -> Iterator[dict[tuple[str, str], Outcome]]:
    """What was found, all programs run at once; prints the table."""
    if find_spec("torch") is None:
        pytest.skip("PyTorch is not installed")
    from cudatool import _driver

    if _driver.initialize().kind != "cuda":
        pytest.skip("this process uses the software device")
    cases = [(program, version) for program in EXPECTED for version in ("racy", "clean")]
    examine("side_stream_write", "clean")  # builds the extension, which the others then find
    with ThreadPoolExecutor(4) as pool:
        found = dict(zip(cases, pool.map(lambda case: examine(*case), cases), strict=True))
    print(f"\n{'program':32}{'cudatool sanitize':28}PyTorch's sanitizer")
    for (program, version), outcome in found.items():
        ours = ", ".join(outcome.kinds) or "nothing"
        theirs = "race" if outcome.found_by_pytorch else "nothing"
        print(f"{program + ' ' + version:32}{ours:28}{theirs}")
    yield found


@pytest.mark.parametrize("program", EXPECTED)
def test_race_is_found_with_both_stacks(outcomes: dict[tuple[str, str], Outcome], program: str) -> None:
    outcome = outcomes[program, "racy"]
    assert outcome.kinds == [EXPECTED[program][0]], outcome.ours.stderr[-2000:]
    assert outcome.ours.returncode == 1
    assert outcome.stacks == [[f"{program}.py"]] * 2


@pytest.mark.parametrize("program", EXPECTED)
def test_clean_twin_has_no_finding(outcomes: dict[tuple[str, str], Outcome], program: str) -> None:
    outcome = outcomes[program, "clean"]
    assert outcome.kinds == [], outcome.ours.stdout
    assert outcome.ours.returncode == 0, outcome.ours.stderr[-2000:]


@pytest.mark.parametrize("program", EXPECTED)
def test_pytorchs_own_sanitizer_finds_only_some(outcomes: dict[tuple[str, str], Outcome], program: str) -> None:
    assert outcomes[program, "racy"].found_by_pytorch == EXPECTED[program][1]
    assert not outcomes[program, "clean"].found_by_pytorch
