"""PyTorch's memory snapshot, as types, and the allocator's state in that form.

The schema is what ``torch.cuda.memory._snapshot()`` returns and ``_dump_snapshot`` pickles (PyTorch 2.11).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, NotRequired, TypedDict

from cudatool.memory.blocks import ALLOCATED, FREE, UNMAPPED, Block
from cudatool.memory.settings import SIZE_CLASSES, UNLIMITED, Settings

__all__ = [
    "Annotation",
    "BlockInfo",
    "FrameInfo",
    "FrameLookup",
    "SegmentInfo",
    "Snapshot",
    "TraceEntry",
    "allocator_settings",
    "divisions_of",
    "segment",
]


class FrameInfo(TypedDict):
    """One frame of a stack."""

    filename: str
    line: int
    name: str


class BlockInfo(TypedDict):
    """A part of a segment."""

    address: int
    size: int
    requested_size: int
    state: Literal["active_allocated", "active_pending_free", "inactive"]
    frames: NotRequired[list[FrameInfo]]


class SegmentInfo(TypedDict):
    """What the driver gave in one piece."""

    device: int
    address: int
    total_size: int
    allocated_size: int
    active_size: int
    requested_size: int
    stream: int
    segment_type: Literal["small", "large"]
    segment_pool_id: tuple[int, int]
    is_expandable: bool
    blocks: list[BlockInfo]
    frames: NotRequired[list[FrameInfo]]


class TraceEntry(TypedDict):
    """Something that happened. `addr` is absent for ``oom``, which has `device_free` instead."""

    action: str
    addr: NotRequired[int]
    device_free: NotRequired[int]
    size: int
    stream: int
    time_us: NotRequired[int]
    compile_context: NotRequired[str]
    user_metadata: NotRequired[str]
    frames: NotRequired[list[FrameInfo]]


class Annotation(TypedDict):
    """The start or end of a named range."""

    stage: Literal["START", "END"]
    name: str
    device: int
    time_us: int


class Snapshot(TypedDict):
    """The whole file. `device_traces` has one list for each device."""

    segments: list[SegmentInfo]
    device_traces: list[list[TraceEntry]]
    allocator_settings: NotRequired[dict[str, Any]]
    external_annotations: NotRequired[list[Annotation]]


FrameLookup = Callable[[int], list[FrameInfo]]
"""Gives the frames of a stack id, innermost first."""


def segment(head: Block, device: int, stack: int, frames: FrameLookup | None) -> SegmentInfo:
    """Return the segment, or the run of mapped pages, whose first block is `head`, allocated from stack `stack`."""
    blocks: list[BlockInfo] = []
    total_size = allocated_size = active_size = requested_size = 0
    block: Block | None = head
    while block is not None and block.state is not UNMAPPED:
        info: BlockInfo = {
            "address": block.address,
            "size": block.size,
            "requested_size": block.requested_size,
            "state": block.state.value,  # never "unmapped" here
        }
        if frames is not None:
            info["frames"] = [] if block.state is FREE else frames(block.stack)
        blocks.append(info)
        total_size += block.size
        if block.state is ALLOCATED:
            allocated_size += block.size
        if block.state is not FREE:
            active_size += block.size
            requested_size += block.requested_size
        block = block.next
    result: SegmentInfo = {
        "device": device,
        "address": head.address,
        "total_size": total_size,
        "allocated_size": allocated_size,
        "active_size": active_size,
        "requested_size": requested_size,
        "stream": head.stream,
        "segment_type": "small" if head.pool.is_small else "large",
        "segment_pool_id": head.pool.id,
        "is_expandable": head.expandable is not None,
        "blocks": blocks,
    }
    if frames is not None:
        result["frames"] = frames(stack)
    return result


def allocator_settings(settings: Settings) -> dict[str, Any]:
    """Return the ``allocator_settings`` of a snapshot."""
    return {
        "PYTORCH_CUDA_ALLOC_CONF": settings.text,
        "max_split_size": -1 if settings.max_split_size == UNLIMITED else settings.max_split_size,
        "garbage_collection_threshold": settings.garbage_collection_threshold,
        "expandable_segments": settings.expandable_segments,
        "pinned_num_register_threads": settings.pinned_num_register_threads,
        "release_lock_on_cudamalloc": settings.release_lock_on_cudamalloc,
        "pinned_use_cuda_host_register": settings.pinned_use_cuda_host_register,
        "graph_capture_record_stream_reuse": settings.graph_capture_record_stream_reuse,
        "roundup_power2_divisions": {
            str(1 << index): divisions for index, divisions in enumerate(settings.roundup_power2_divisions)
        },
    }


def divisions_of(stated: Mapping[str, Any]) -> tuple[int, ...]:
    """Return ``roundup_power2_divisions`` by size class; a snapshot states them by the MiB where a class begins.

    Raises
    ------
    AttributeError, OverflowError, TypeError, ValueError
        They are no such numbers.
    """
    table = [0] * SIZE_CLASSES
    for mebibytes, divisions in (stated.get("roundup_power2_divisions") or {}).items():
        table[min(max(int(mebibytes).bit_length() - 1, 0), SIZE_CLASSES - 1)] = int(divisions)
    return tuple(table)
