"""What a small pickle may make of itself: lists that share and multiply, sizes without end, little packed as much."""

from __future__ import annotations

import gzip
import lzma
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from warm_process import run_python

from cudatool.collect import torch_snapshot
from cudatool.errors import SnapshotFormatError

MOST_MEMORY = 512 << 10  # KiB
_READ = """
import resource, sys
resource.setrlimit(resource.RLIMIT_CPU, (10, 10))
from cudatool.collect import torch_snapshot
from cudatool.errors import SnapshotFormatError
try:
    torch_snapshot.read(sys.argv[1])
except SnapshotFormatError as error:
    print(error)
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


def segment(**facts: Any) -> dict[str, Any]:
    return {"address": 1 << 40, "total_size": 2 << 20, "device": 0, "stream": 0, "blocks": [], **facts}


def event(**facts: Any) -> dict[str, Any]:
    return {"action": "alloc", "addr": 1 << 40, "size": 512, "stream": 0, "time_us": 1, "frames": [], **facts}


def snapshot(segments: list[Any], *rings: list[Any]) -> bytes:
    return pickle.dumps({"segments": segments, "device_traces": list(rings)}, protocol=4)


BLOCK = {"size": 0, "state": "active_allocated", "requested_size": 0, "frames": []}
FRAMES = [{"filename": "a.py", "name": "f", "line": line} for line in range(900)]
MANY_BLOCKS, DEEP_STACK = [BLOCK] * 50_000, FRAMES[:1] * 100_000
BOMBS: dict[str, Callable[[], bytes]] = {
    "a segment of 2^45 bytes": lambda: snapshot([segment(total_size=1 << 45, is_expandable=True)]),
    "128 segments of 2^40 bytes": lambda: snapshot(
        [segment(total_size=1 << 40, is_expandable=True, device=i, address=i << 41) for i in range(128)]
    ),
    "pages of 2^44 bytes": lambda: snapshot([], [event(action="segment_map", size=1 << 44)]),
    "a list of blocks, shared": lambda: snapshot([segment(blocks=MANY_BLOCKS, address=i << 40) for i in range(400)]),
    "a block 20,000 times": lambda: snapshot([segment(blocks=[BLOCK] * 20_000)]),
    "a segment 300,000 times": lambda: snapshot([segment()] * 300_000),
    "a ring 128 times": lambda: snapshot([], *[[event(time_us=i) for i in range(4000)]] * 128),
    "an event of many keys 300,000 times": lambda: snapshot([], [event(**{f"k{i}": i for i in range(50)})] * 300_000),
    "stacks that share their frames": lambda: snapshot(
        [], [event(frames=FRAMES[i % 400 :], time_us=i) for i in range(390)]
    ),
    "a stack of 100,000 frames": lambda: snapshot([], [event(frames=DEEP_STACK, time_us=i) for i in range(9000)]),
}


def assert_bounded(path: Path) -> None:
    done = run_python(_READ, str(path), timeout_s=120)
    assert 0 == done.returncode, done.stderr[-500:]
    assert int(done.stdout.splitlines()[-1]) < MOST_MEMORY


@pytest.mark.parametrize("bomb", BOMBS)
def test_work_is_bounded_by_the_size_of_the_pickle(bomb: str, tmp_path: Path) -> None:
    content = BOMBS[bomb]()
    assert len(content) < 1 << 21
    (tmp_path / "x.pickle").write_bytes(content)
    assert_bounded(tmp_path / "x.pickle")


@pytest.mark.parametrize(
    "unit", [b"N", b"N0", b"(", b"]\x94", b"\x94", b"K\x01", b"}", b"h\x00", b"\x8c\x04abcd", b")"], ids=repr
)
def test_little_that_is_packed_as_much_is_refused(unit: bytes, tmp_path: Path) -> None:
    content = b"\x80\x04]\x94(" + unit * ((48 << 20) // len(unit)) + b"e."
    (tmp_path / "x.pickle").write_bytes(gzip.compress(content, 1))
    assert (tmp_path / "x.pickle").stat().st_size < 1 << 20
    assert_bounded(tmp_path / "x.pickle")


def test_a_packed_file_may_not_hold_much_more_than_snapshots_do(tmp_path: Path) -> None:
    content = b"\x80\x04]\x94" + b"N0" * (100 << 20) + b"."
    (tmp_path / "x.pickle").write_bytes(lzma.compress(content, preset=0))
    with pytest.raises(SnapshotFormatError, match="holds more than"):
        torch_snapshot.read(tmp_path / "x.pickle")


def test_maps_of_a_real_size_are_read(tmp_path: Path) -> None:
    maps = [event(action="segment_map", addr=(1 << 40) + (i << 25), size=1 << 25, time_us=i) for i in range(5000)]
    (tmp_path / "x.pickle").write_bytes(snapshot([segment(total_size=80 << 30, is_expandable=True)], maps))
    assert 5000 < len(torch_snapshot.read(tmp_path / "x.pickle").records)
