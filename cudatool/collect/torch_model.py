"""What is read from PyTorch's memory snapshots: a trace, and facts that records have no field for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt

from cudatool.trace.events import Kind
from cudatool.trace.model import PinnedMemory, Trace

__all__ = [
    "ACTIONS",
    "BLOCK_KINDS",
    "MAP_KINDS",
    "MAX_SIZE",
    "OTHER_REQUESTS",
    "SEGMENT_KINDS",
    "EventFact",
    "MemorySnapshot",
    "WHOLE_EVENT",
    "is_live",
]

ACTIONS: Final = {
    "alloc": Kind.BLOCK_ALLOC,
    "free_requested": Kind.BLOCK_FREE_REQUESTED,
    "free_completed": Kind.BLOCK_FREE_COMPLETED,
    "segment_alloc": Kind.SEGMENT_ALLOC,
    "segment_free": Kind.SEGMENT_FREE,
    "segment_map": Kind.SEGMENT_MAP,
    "segment_unmap": Kind.SEGMENT_UNMAP,
    "oom": Kind.OOM,
}
"""What PyTorch calls the kinds of events."""

OTHER_REQUESTS: Final = ("rmm", "driver")
"""What a pickle says under ``requests_to`` if cudatool wrote it from events of other kinds: an RMM log's, whose
allocators follow other rules, or also memory that the program took from the driver itself."""

WHOLE_EVENT: Final = "(whole event)"
"""Key of the facts that are whole events: those that no record has fields for, such as a mark of a dump."""

BLOCK_KINDS: Final = (Kind.BLOCK_ALLOC, Kind.BLOCK_FREE_REQUESTED, Kind.BLOCK_FREE_COMPLETED)
SEGMENT_KINDS: Final = (Kind.SEGMENT_ALLOC, Kind.SEGMENT_FREE)
MAP_KINDS: Final = (Kind.SEGMENT_MAP, Kind.SEGMENT_UNMAP)

_LONGEST: Final = 80  # characters of a name that a report shows

MAX_SIZE: Final = 1 << 48
"""Bytes that are more than any device's address space."""


def is_live(block: Mapping[str, Any]) -> bool:
    """Return whether a block of the final state is in use, or is not yet free for all streams."""
    return bool(block["state"] != "inactive")


@dataclass(frozen=True, slots=True)
class EventFact:
    """The events' values of one key that records have no field for, such as ``compile_context``.

    Attributes
    ----------
    values
        The distinct ones.
    number
        For each record 1 + an index into `values`, 0 where its event does not say it; or one number for all events.
    """

    values: list[Any]
    number: npt.NDArray[np.uint32] | int


@dataclass
class MemorySnapshot(Trace):
    """A trace read from a PyTorch snapshot.

    Attributes
    ----------
    segments
        The final state in PyTorch's own schema: plain dicts, each block with its address.
    settings
        The allocator's settings as the snapshot states them; empty for old files.
    facts
        Other facts of events, by key; under :data:`WHOLE_EVENT` the events that are records of kind MARK.
    frame_facts
        Other facts of frames, by their index: those of ``torch.compile`` name nodes of a graph (``fx_node_name`` ...).
    metadata
        The ``user_metadata`` that are not text, by the index of the name that represents them.
    more
        Other parts of the snapshot, by key: ``external_annotations``, and what newer versions of PyTorch add.
    pinned
        The contents of ``host_segments`` and ``host_traces``, None if the file has none.
    """

    segments: list[dict[str, Any]] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    facts: dict[str, EventFact] = field(default_factory=dict)
    frame_facts: dict[int, dict[str, Any]] = field(default_factory=dict)
    metadata: dict[int, Any] = field(default_factory=dict)
    more: dict[str, Any] = field(default_factory=dict)
    pinned: PinnedMemory | None = None

    def compile_contexts(self, records: npt.NDArray[np.int64]) -> tuple[list[str], npt.NDArray[np.int64]]:
        """As of any trace; PyTorch says "N/A" where nothing was compiled."""
        fact = self.facts.get("compile_context", EventFact([], 0))
        ids = [value[:_LONGEST] if isinstance(value, str) and value != "N/A" else "" for value in fact.values]
        if not any(ids):
            return super().compile_contexts(records)
        named = np.array([0, *(i if text else 0 for i, text in enumerate(ids, 1))], np.int64)
        numbers = fact.number if isinstance(fact.number, int) else fact.number[records]
        return ids, np.broadcast_to(named[numbers], len(records))

    def fx_node(self, frame: int) -> str:
        """As of any trace."""
        name = self.frame_facts.get(frame, {}).get("fx_node_name")
        return name[:_LONGEST] if isinstance(name, str) else ""

    def selecting(self, records: npt.NDArray[np.void], source: npt.NDArray[np.int64]) -> Self:
        """As of any trace. The final state is left out: it is not the state at the end of a part."""
        facts = {
            key: fact if isinstance(fact.number, int) else EventFact(fact.values, fact.number[source])
            for key, fact in self.facts.items()
        }
        return replace(self, records=records, segments=[], facts=facts)
