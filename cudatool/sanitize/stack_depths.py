"""Reports of traces that strangers may have made: how deep their stacks are shown."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any, TypeGuard

from cudatool.sanitize.findings import AccessSite, BufferSite, DeviceFinding, Finding, Report
from cudatool.trace.frames import user_frame
from cudatool.trace.model import Frame

__all__ = ["within"]


def within(report: Report, most: int) -> Report:
    """Return the report with at most about `most` frames in all its stacks: of deep ones the innermost, and the user's.

    A note says so if any are left out.
    """
    depths = sorted(_depths(report))
    if sum(depths) <= most:
        return report
    # The largest depth with which they fit, found by giving each as much of the rest as the next one can take.
    left, depth = most, 0
    for index, one in enumerate(depths):
        depth = left // (len(depths) - index)
        if one > depth:
            break
        left -= one
    depth = max(depth, 1)
    cut: Report = _cut(report, depth)
    return replace(cut, notes=(*cut.notes, f"Stacks are shown to a depth of {depth:,}: the report would be too large."))


def _depths(value: object) -> Iterator[int]:
    if _is_stack(value):
        yield len(value)
    elif isinstance(value, tuple) and not isinstance(value, Frame):
        for one in value:
            yield from _depths(one)
    elif isinstance(value, Report | Finding | DeviceFinding | AccessSite | BufferSite):
        for about in fields(value):
            yield from _depths(getattr(value, about.name))


def _cut(value: Any, depth: int) -> Any:
    if _is_stack(value):
        kept = value[:depth]
        own = user_frame(value)
        return kept if own is None or own in kept else (*kept[:-1], own)
    if isinstance(value, tuple) and not isinstance(value, Frame):
        return tuple(_cut(one, depth) for one in value)
    if isinstance(value, Report | Finding | DeviceFinding | AccessSite | BufferSite):
        return replace(value, **{about.name: _cut(getattr(value, about.name), depth) for about in fields(value)})
    return value


def _is_stack(value: object) -> TypeGuard[tuple[Frame, ...]]:
    return isinstance(value, tuple) and bool(value) and isinstance(value[0], Frame)
