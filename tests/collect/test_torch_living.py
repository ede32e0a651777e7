"""What PyTorch holds when a recording begins: from the final states of real recordings, and through a stand-in."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace

from recordings import converted, read
from snapshot_files import segment, stats_of

from cudatool.analyze import report
from cudatool.collect import torch_living
from cudatool.trace import hooks, reader, stacks
from cudatool.trace.events import Kind
from cudatool.trace.frames import MissingStack, missing_stack
from cudatool.trace.recorder import Recorder


@converted()
def test_a_recording_that_begins_there_has_the_bytes_that_pytorch_counted(path: Path, tmp_path: Path) -> None:
    events = torch_living.events_of(read(path).segments)
    with Recorder(
        tmp_path / "t.ctrace", header={"prior_records": dict(Counter(event.device for event in events))}
    ) as recorder:
        for one in events:
            recorder(one)
    trace = reader.read(tmp_path / "t.ctrace")
    (now,) = report(trace).summary.devices
    stats = stats_of(path)
    expected = [stats[f"{name}_bytes.all.current"] for name in ("allocated", "reserved", "active", "requested")]
    alive = [one for one in events if one.kind is Kind.BLOCK_ALLOC]
    assert expected == [
        now.now.allocated, now.now.reserved, sum(one.size for one in alive), sum(one.aux0 for one in alive)
    ]  # fmt: skip


def test_blocks_have_the_stacks_that_pytorch_kept_and_those_without_say_why() -> None:
    frames = [{"filename": "/home/train.py", "name": "load", "line": 7}]
    held = segment(1 << 40, 2 << 20, (512, "active_allocated"), (1024, "active_pending_free"), (1 << 20, "inactive"))
    held["blocks"][0]["frames"] = frames
    events = torch_living.events_of([held])
    assert [
        Kind.SEGMENT_ALLOC,
        Kind.BLOCK_ALLOC,
        Kind.BLOCK_ALLOC,
        Kind.BLOCK_FREE_REQUESTED,
    ] == [one.kind for one in events]
    assert [("load", 7)] == [(frame.function, frame.line) for frame in stacks.frames(events[1].stack)]
    assert 0 == events[2].stack
    trace = SimpleNamespace(header={}, stacks=[(), (0,)])
    assert MissingStack.BEFORE is missing_stack(trace, before=True)


class _Torch:
    """The part of torch that is asked."""

    def __init__(self) -> None:
        self.taken = 0
        self.cuda = SimpleNamespace(
            memory_snapshot=self._snapshot, memory_reserved=lambda device: (1 + device) << 20, device_count=lambda: 2
        )

    def _snapshot(self) -> list[dict[str, object]]:
        self.taken += 1
        return [segment(self.taken << 40, 2 << 20, (512, "active_allocated"))]


def test_a_snapshot_that_changed_while_it_was_taken_is_taken_again() -> None:
    torch, answers = _Torch(), iter((False, False, True))
    events, missing = torch_living.living(torch, lambda: next(answers))
    assert ({3 << 40}, []) == ({one.address for one in events}, missing)


def test_memory_that_changes_all_the_time_is_named_as_missing() -> None:
    events, missing = torch_living.living(_Torch(), lambda: False)
    assert [] == events
    assert ["3 MiB that PyTorch held when the recording began"] == missing


def test_blocks_lie_in_the_streams_of_their_segments() -> None:
    held = segment(1 << 40, 2 << 20, (512, "active_allocated")) | {"stream": 0x5EED}
    try:
        (of_segment, of_block) = torch_living.events_of([held])
        assert of_segment.stream == of_block.stream == hooks.stream_id(0, 0x5EED)
    finally:
        hooks.close_stream(0, 0x5EED)
