"""Programs that use PyTorch: ten, five with a race and their clean twins, under PyTorch's sanitizer and ours; and many
correct ones, of which nothing may be said."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from cudatool.trace import read
from cudatool.trace.events import Kind

pytestmark = [pytest.mark.gpu, pytest.mark.xdist_group("torch sanitizer")]  # what all need is built once

PROGRAMS = Path(__file__).with_name("torch_programs")
EXPECTED = {  # program -> the finding of its racy version; what PyTorch's sanitizer says of it, and of its clean twin
    "overlapping_views": ("race-raw", False, False),
    "side_stream_write": ("race-raw", True, False),
    "allocator_reuse": ("reuse", False, False),
    "pinned_read_early": ("race-host", False, False),
    "graph_input": ("race-raw", True, True),  # it takes what is captured for executed
}
CORRECT = [
    *(
        ("idioms.py", name)
        for name in (
            "backward_on_two_streams",
            "ring_of_pinned_buffers",
            "results_by_query",
            "loader_with_pinned_memory",
            "mixed_precision",
            "graphed_training",
            "whole_step_as_a_graph",
            "threads_of_their_own",
            "many_kinds_of_operators",
            "compiled",
        )
    ),
    *(
        ("workload.py", name)
        for name in (
            "transformer",
            "transformer_checkpoint",
            "transformer_half",
            "accumulate",
            "convnet",
            "unet",
            "kv_cache",
            "lstm",
            "graph_network",
            "experts",
            "embeddings",
            "inference",
            "prefetch",
            "captured",
        )
    ),
]


class Outcome(NamedTuple):
    """What the two say of one program."""

    kinds: list[str]
    stacks: list[list[str]]
    ours: subprocess.CompletedProcess[str]
    theirs: subprocess.CompletedProcess[str]

    @property
    def found_by_pytorch(self) -> bool:
        return "CSAN detected" in self.theirs.stderr


def sanitize(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "cudatool", "sanitize", "--device", "cuda", "--format", "json", *command],
        capture_output=True,
        text=True,
        check=False,
    )


def examine(program: str, version: str) -> Outcome:
    command = [str(PROGRAMS / f"{program}.py"), version]
    ours = sanitize(*command)
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
def built() -> None:
    """The extension, built once for all programs to find."""
    if find_spec("torch") is None:
        pytest.skip("PyTorch is not installed")
    from cudatool import _driver

    if _driver.initialize().kind != "cuda":
        pytest.skip("this process uses the software device")
    assert sanitize(str(PROGRAMS / "side_stream_write.py"), "clean").returncode == 0


@pytest.fixture(scope="module")
def outcomes(built: None) -> dict[tuple[str, str], Outcome]:
    """What was found, all programs run at once; prints the table."""
    cases = [(program, version) for program in EXPECTED for version in ("racy", "clean")]
    with ThreadPoolExecutor(4) as pool:
        found = dict(zip(cases, pool.map(lambda case: examine(*case), cases), strict=True))
    print(f"\n{'program':32}{'cudatool sanitize':28}PyTorch's sanitizer")
    for (program, version), outcome in found.items():
        ours = ", ".join(outcome.kinds) or "nothing"
        theirs = "race" if outcome.found_by_pytorch else "nothing"
        print(f"{program + ' ' + version:32}{ours:28}{theirs}")
    return found


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
    said = outcomes[program, "racy"].found_by_pytorch, outcomes[program, "clean"].found_by_pytorch
    assert said == EXPECTED[program][1:]


def test_both_sides_and_the_life_of_the_memory_have_their_lines(outcomes: dict[tuple[str, str], Outcome]) -> None:
    (finding,) = json.loads(outcomes["allocator_reuse", "racy"].ours.stdout)["findings"]
    source = (PROGRAMS / "allocator_reuse.py").read_text().splitlines()
    lines = [source[side["stack"][0]["line"] - 1].strip() for side in (finding["first"], finding["second"])]
    assert lines[0] == "total = used.sum()"
    assert lines[1].startswith("other = torch.zeros(")
    freed = source.index("del used") + 1
    assert f"was freed at allocator_reuse.py:{freed}" in finding["reason"]
    assert "record_stream" in finding["repair"]


def test_kernels_of_the_compiler_are_seen_with_what_they_may_touch(built: None, tmp_path: Path) -> None:
    trace = tmp_path / "compiled.ctrace"
    command = ["run", "--accesses", "--device", "cuda", "-o", str(trace), str(PROGRAMS / "idioms.py"), "compiled"]
    done = subprocess.run([sys.executable, "-m", "cudatool", *command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = read(trace)
    launches = found.of_kind(Kind.KERNEL_LAUNCH)
    compiled = [row["correlation"] for row in launches if found.names[int(row["name"])].startswith("triton_")]
    assert len(compiled) > 0
    assert set(compiled) <= set(found.of_kind(Kind.ACCESS)["correlation"])


@pytest.fixture(scope="module")
def reports(built: None) -> Iterator[dict[tuple[str, str], Future[subprocess.CompletedProcess[str]]]]:
    """What is said of correct programs, some run at a time."""
    with ThreadPoolExecutor(6) as pool:
        yield {(file, name): pool.submit(sanitize, str(PROGRAMS / file), name) for file, name in CORRECT}


@pytest.mark.parametrize(("file", "name"), CORRECT)
def test_correct_program_has_no_finding(
    reports: dict[tuple[str, str], Future[subprocess.CompletedProcess[str]]], file: str, name: str
) -> None:
    done = reports[file, name].result()
    assert done.returncode == 0, done.stderr[-2000:]
    report = json.loads(done.stdout)
    assert (report["findings"], report["possible"]) == ([], [])
    assert report["operations"] > 0
