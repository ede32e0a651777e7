"""Which of the user's frames a report shows for a call: the one to change, and not a helper that other calls share."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from cudatool.sanitize.findings import location
from cudatool.trace.events import Kind, StreamFlag
from cudatool.trace.frames import user_frames
from cudatool.trace.model import Frame, Trace

__all__ = ["Callers"]


class Callers:
    """Chooses frames of the stacks of a trace."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace

    def frame(self, record: int, other: int) -> Frame | None:
        """Return the frame at which to change what led to `record`, so that it comes after `other`.

        That is in the function that made both calls, if one did, or inside of it in the one that made the stream. Else
        it is the innermost of the functions that only `record` came through: a helper that both came through is called
        for other work, too.
        """
        records, stack, others = self._trace.records, self._user_stack(record), self._user_stack(other)
        if stack is others:
            return next(iter(stack), None)  # nothing parts them, and a long one is not to be searched for that
        if records["thread"][record] == records["thread"][other]:
            depth = _parting(stack, others)
            if depth >= 0:
                made = self.made.get(int(records["stream"][record]))
                inside = _parting(stack, self._user_stack(made)) if made is not None else -1
                return stack[-1 - max(depth, inside)]
        apart = (mine for mine, its in zip(stack, others, strict=False) if _function(mine) != _function(its))
        return next(apart, None) or next(iter(stack), None)

    def line(self, record: int, other: int) -> str:
        """Return the line of :meth:`frame`."""
        frame = self.frame(record, other)
        return location((frame,) if frame is not None else ())

    @functools.cached_property
    def made(self) -> dict[int, int]:
        """The record that made each stream; no program makes the default ones."""
        records = self._trace.records
        own = records["flags"] & (StreamFlag.LEGACY_DEFAULT | StreamFlag.PER_THREAD_DEFAULT) == 0
        made = np.flatnonzero((records["kind"] == Kind.STREAM_CREATE) & own)
        return {int(records["stream"][record]): int(record) for record in made}

    def _user_stack(self, record: int) -> tuple[Frame, ...]:
        return user_frames(self._trace.stack(int(self._trace.records["stack"][record])))


def _function(frame: Frame) -> tuple[str, str]:
    return frame.file, frame.function


def _parting(stack: Sequence[Frame], others: Sequence[Frame]) -> int:
    """Return how many calls lead to the function that made two calls, of which these are the stacks; -1 if none did."""
    for depth, (mine, its) in enumerate(zip(reversed(stack), reversed(others), strict=False)):
        if mine != its:
            return depth if _function(mine) == _function(its) else -1
    return -1
