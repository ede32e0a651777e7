"""A trace of 1 MB whose events make much work: each command ends, or refuses it in one line, in time and memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hostile_traces import trace_bytes
from warm_process import run_python

from cudatool.blas._workspace import workspace_size
from cudatool.limits import REPORT_FRAMES, STACK_FRAMES
from cudatool.sanitize.checker import check
from cudatool.trace.events import RECORD, AccessFlag, Kind
from cudatool.trace.model import Frame
from cudatool.trace.reader import read

Records = npt.NDArray[np.void]
COUNT = 15_000  # records of 64 bytes
NUMBERS = np.arange(COUNT)
FACTS = {"device_kind": "sim", "accesses": True}
_CODE = """
import resource, sys
resource.setrlimit(resource.RLIMIT_CPU, (10, 10))
sys.argv = ["cudatool", *sys.argv[1:]]
try:
    from cudatool.cli import main
    main()
finally:
    most = next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM"))
    print(most, file=open("memory", "w"))
"""


def records(kind: Kind, count: int = COUNT) -> Records:
    made = np.zeros(count, RECORD)
    made["kind"], made["time"] = kind, np.arange(count)
    return made


def maps_and_unmaps() -> bytes:
    made = records(Kind.SEGMENT_MAP)
    made["address"], made["size"] = (NUMBERS + 1) << 21, 2 << 20
    made["kind"][COUNT // 2 :], made["address"][COUNT // 2 :] = Kind.SEGMENT_UNMAP, 1 << 60
    return trace_bytes(made, header=FACTS)


def blocks_elsewhere() -> bytes:
    made = records(Kind.BLOCK_ALLOC)
    made["address"], made["size"], made["aux0"] = (NUMBERS + 1) << 9, 512, 500
    made["stream"] = NUMBERS + 1
    return trace_bytes(made, header=FACTS)


def streams() -> bytes:
    made = records(Kind.KERNEL_LAUNCH)
    made["stream"] = made["correlation"] = NUMBERS + 1
    made["kind"][::2] = Kind.EVENT_RECORD
    return trace_bytes(made, header=FACTS)


def accesses(**facts: object) -> bytes:
    made = records(Kind.ACCESS)
    made["kind"][::2], made["correlation"], made["stream"] = Kind.KERNEL_LAUNCH, NUMBERS // 2 + 1, NUMBERS // 2 % 50 + 1
    made["flags"] = AccessFlag.WRITE
    for name, value in facts.items():
        made[name] = value
    return trace_bytes(made, header=FACTS)


def overlapping_accesses() -> bytes:
    chance = np.random.default_rng(1)
    places = (1 << 30) + chance.integers(0, 1 << 20, COUNT)
    return accesses(address=places, size=chance.integers(1, 1 << 20, COUNT), flags=1 + NUMBERS // 2 % 2)


def deep_stack() -> bytes:
    made = records(Kind.BLOCK_ALLOC, 1000)
    made["address"], made["size"], made["stack"] = (np.arange(1000) + 1) << 9, 512, 1
    frames = [Frame("a.py", f"f{i}" * 50_000, i) for i in range(2)]
    return trace_bytes(made, header=FACTS, frames=frames, stacks=[(), [0, 1] * 1000])


def long_name() -> bytes:
    made = records(Kind.KERNEL_LAUNCH, 4000)
    made["name"], made["stream"] = 1, 1
    return trace_bytes(made, header=FACTS, names=("", "x" * 500_000))


TO_PERFETTO = ("export", "{}", "--to", "perfetto", "-o", "out.json")


@pytest.mark.parametrize(
    ("make", "command", "status"),
    [
        (maps_and_unmaps, ("snapshot", "{}"), 0),
        (maps_and_unmaps, ("export", "{}", "--to", "sqlite", "-o", "out.sqlite"), 0),
        (blocks_elsewhere, ("replay", "--check", "{}"), 1),
        (streams, ("sanitize", "--allow-empty", "{}"), 0),
        (overlapping_accesses, ("sanitize", "{}"), 1),
        (deep_stack, TO_PERFETTO, 2),
        (long_name, TO_PERFETTO, 2),
    ],
)
def test_work_is_bounded_by_the_size_of_the_trace(
    make: Callable[[], bytes], command: tuple[str, ...], status: int, tmp_path: Path
) -> None:
    content = make()
    assert len(content) < 1 << 20
    (tmp_path / "x.ctrace").write_bytes(content)
    words = [word.replace("{}", "x.ctrace") for word in command]
    done = run_python(_CODE, *words, folder=tmp_path, environment={"CUDATOOL_DEVICE": "sim"}, timeout_s=120)
    assert status == done.returncode, done.stderr[-500:]
    if status == 2:
        assert 1 == done.stderr.count("cudatool: error: ")
        assert not list(tmp_path.glob("out*"))
    assert int((tmp_path / "memory").read_text()) < 512 << 10  # KiB


@pytest.mark.parametrize("config", [":" + "9" * 5000 + ":8", ":8:" + "9" * 5000])
def test_a_workspace_of_thousands_of_digits_is_the_default(config: str) -> None:
    with pytest.warns(UserWarning, match="is not :SIZE:COUNT") as caught:
        assert workspace_size(None, 9) == workspace_size(config, 9)
    assert len(str(caught[0].message)) < 300


def _trace_with_findings(count: int, depth: int) -> bytes:
    """Return a trace in which each launch of an odd number races with the one before it, in one stack."""
    numbers = np.arange(4 * count) // 2
    made = records(Kind.KERNEL_LAUNCH, 4 * count)
    made["kind"][1::2] = Kind.ACCESS
    made["correlation"], made["stream"], made["flags"] = numbers + 1, numbers % 2 + 1, AccessFlag.WRITE
    made["address"], made["size"], made["name"], made["stack"] = (1 << 30) + (numbers // 2 << 12), 4096, numbers + 1, 1
    names = ("", *(f"k{number}" for number in range(2 * count)))
    frames = [*(Frame("/lib/python3.12/library.py", f"f{i}", i + 1) for i in range(depth - 1)), Frame("a.py", "f", 1)]
    return trace_bytes(made, header=FACTS, names=names, frames=frames, stacks=[(), range(depth)])


def test_outer_frames_beyond_the_limit_are_not_read_and_a_note_says_so(tmp_path: Path) -> None:
    path = tmp_path / "deep.ctrace"
    path.write_bytes(_trace_with_findings(1, STACK_FRAMES))
    assert (len(read(path).stack(1)), read(path).notes) == (STACK_FRAMES, [])
    path.write_bytes(_trace_with_findings(1, STACK_FRAMES + 1))
    trace = read(path)
    assert [frame.line for frame in trace.stack(1)] == list(range(1, STACK_FRAMES + 1))
    assert trace.notes == ["Of 1 stack only the innermost 1,024 frames were read."]


def test_stacks_of_a_large_report_are_cut_to_what_fits_and_keep_the_users_line(tmp_path: Path) -> None:
    path = tmp_path / "deep.ctrace"
    path.write_bytes(_trace_with_findings(40, 1000))
    whole, cut = check(read(path)), check(read(path), bounded=True)
    stacks = [side.stack for finding in cut.all for side in (finding.first, finding.second)]
    assert len(stacks) == 80
    assert {len(stack) for stack in stacks} == {REPORT_FRAMES // 80}
    assert {(stack[0].line, stack[-1].file) for stack in stacks} == {(1, "a.py")}
    assert whole.notes == () and "to a depth of 625" in cut.notes[0]
    assert [one.fingerprint for one in whole.all] == [one.fingerprint for one in cut.all]
