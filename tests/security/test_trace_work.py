"""A trace of 1 MB whose events make much work: each command ends, or refuses it in one line, in time and memory."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hostile_traces import trace_bytes

from cudatool.blas._workspace import workspace_size
from cudatool.trace.events import RECORD, AccessFlag, Kind
from cudatool.trace.model import Frame

Records = npt.NDArray[np.void]
COUNT = 15_000  # records of 64 bytes
NUMBERS = np.arange(COUNT)
FACTS = {"device_kind": "sim", "accesses": True}
_CODE = """
import resource, sys
resource.setrlimit(resource.RLIMIT_CPU, (10, 10))  # of which importing takes one
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
    frames = [Frame("a.py", f"f{i}", i) for i in range(2)]
    return trace_bytes(made, header=FACTS, frames=frames, stacks=[(), [0, 1] * 110_000])


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
    environment = {**os.environ, "CUDATOOL_DEVICE": "sim"}
    done = subprocess.run(
        [sys.executable, "-c", _CODE, *words],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
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
