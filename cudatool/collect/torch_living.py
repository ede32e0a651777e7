"""What PyTorch's caching allocator holds when a recording begins in the middle of a program.

The allocator's lock is held for one device's snapshot at a time. PyTorch notes that moment where it notes blocks, so
that the log of :mod:`cudatool.collect.torch_blocks` says which of its rows the snapshot has::

    rows of the log:   alloc  free  SNAPSHOT  alloc  free ...
                       in the snapshot       events of the recording
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from cudatool.memory.living import living as living_events
from cudatool.memory.snapshot import FrameInfo, SegmentInfo
from cudatool.trace import hooks, stacks
from cudatool.trace.events import Event
from cudatool.trace.model import Frame
from cudatool.units import format_bytes

__all__ = ["events_of", "living", "missing"]

_ATTEMPTS: Final = 5


def living(torch: Any, is_whole: Callable[[], bool]) -> tuple[list[Event], list[str]]:
    """Return the events that would have reported what PyTorch holds, and what of it is missing, in words.

    All of it is missing where it changes on one device whenever another one is looked at.

    Parameters
    ----------
    is_whole
        Called after a snapshot: whether no device's memory changed between its own snapshot and the last one's.
    """
    for _ in range(_ATTEMPTS):
        segments = torch.cuda.memory_snapshot()
        if is_whole():
            return events_of(segments), []
    return [], missing(torch)


def missing(torch: Any) -> list[str]:
    """Return in words how much PyTorch holds, where that cannot be listed."""
    held = sum(torch.cuda.memory_reserved(device) for device in range(torch.cuda.device_count()))
    return [f"{format_bytes(held)} that PyTorch held when the recording began"] if held else []


def events_of(segments: Sequence[SegmentInfo]) -> list[Event]:
    """Return the events that would have reported a state of PyTorch's allocator.

    Blocks have stacks where PyTorch kept them (``_record_memory_history``).

    Parameters
    ----------
    segments
        The ``segments`` of a snapshot.
    """
    return living_events(segments, stream_of=_stream, stack_of=_stack, thread=hooks.thread_id())


def _stream(segment: SegmentInfo) -> int:
    return hooks.stream_id(segment["device"], segment["stream"])


def _stack(frames: Sequence[FrameInfo]) -> int:
    return stacks.intern(Frame(frame["filename"], frame["name"], frame["line"]) for frame in frames)
