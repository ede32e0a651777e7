"""What a recording that begins in the middle of a program finds."""

from __future__ import annotations

from dataclasses import dataclass, field

from cudatool.trace.events import Event

__all__ = ["Before"]


@dataclass(slots=True)
class Before:
    """What is there, besides what our caching allocator holds.

    Attributes
    ----------
    blocks
        Of PyTorch's caching allocator: its segments, then their blocks.
    allocations
        Memory that the driver gave to others.
    notes
        Events that say more of it: what other processes can use, and the files of generated code.
    unknown
        What is there and cannot be listed, in words.
    """

    blocks: list[Event] = field(default_factory=list)
    allocations: list[Event] = field(default_factory=list)
    notes: list[Event] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
