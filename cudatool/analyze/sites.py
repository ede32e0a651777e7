"""Live bytes by call stack, as a tree: what a flame graph or an icicle draws."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np

from cudatool.trace.distinct import distinct
from cudatool.trace.events import Kind
from cudatool.trace.frames import missing_stack
from cudatool.trace.lifetimes import Ints, Lifetimes
from cudatool.trace.model import Trace
from cudatool.units import exact_bytes

__all__ = ["Grouping", "SiteTree", "range_at", "site_tree"]


class Grouping(StrEnum):
    """What the branches of a :class:`SiteTree` are."""

    STACK = "stack"
    """Python frames, outermost first."""
    ANNOTATION = "annotation"
    """The ranges that were open when a block was allocated, then its size: the trace has no stacks."""
    SIZE = "size"
    """The size that was asked for: the trace has neither stacks nor ranges."""


@dataclass(frozen=True, slots=True)
class SiteTree:
    """Live bytes at one moment, by allocation site. Columns, one row for each node.

    Row 0 is the root. A parent precedes its children, and the largest child comes first.

    Attributes
    ----------
    device, index
        Whose memory, right after which record.
    grouping
        The kind of the nodes.
    parent
        Row of the parent, -1 for the root.
    name, file, line
        Of the frame: its function, file and line. Otherwise `name` is the range or size, and the others "" and 0.
    self_size, total_size
        Bytes allocated in the node itself, and in it or its descendants.
    count
        Blocks allocated in the node or its descendants.
    """

    device: int
    index: int
    grouping: Grouping
    parent: Ints
    name: tuple[str, ...]
    file: tuple[str, ...]
    line: Ints
    self_size: Ints
    total_size: Ints
    count: Ints

    def __len__(self) -> int:
        return len(self.parent)

    def as_dict(self) -> dict[str, Any]:
        """Return plain data: the columns as lists."""
        return {
            "index": self.index,
            "grouping": str(self.grouping),
            "parent": self.parent.tolist(),
            "name": list(self.name),
            "file": list(self.file),
            "line": self.line.tolist(),
            "self_size": self.self_size.tolist(),
            "total_size": self.total_size.tolist(),
            "count": self.count.tolist(),
        }


_Key = tuple[str, str, int]  # name, file, line of a node


class _Node:
    __slots__ = ("children", "count", "self_size", "total_size")

    def __init__(self) -> None:
        self.children: dict[_Key, _Node] = {}
        self.self_size = self.total_size = self.count = 0


def site_tree(trace: Trace, blocks: Lifetimes, device: int, index: int) -> SiteTree:
    """Return the tree of the memory of `blocks` right after record `index`."""
    live = blocks.of_device(device).at(index)
    has_stacks = any(trace.stacks[stack] for stack in distinct(blocks.stack).tolist())
    grouping, open_range = Grouping.STACK, np.zeros(0, np.int64)
    if not has_stacks:
        open_range = range_at(trace, live.start)
        grouping = Grouping.ANNOTATION if open_range.any() else Grouping.SIZE
        keys = np.stack([open_range, live.requested], axis=1)
    else:
        keys = live.stack[:, None]
    unique, inverse, count = np.unique(keys, axis=0, return_inverse=True, return_counts=True)
    size = np.zeros(len(unique), np.int64)
    np.add.at(size, inverse.reshape(-1), live.size)

    root = _Node()
    for key, own, number in zip(unique.tolist(), size.tolist(), count.tolist(), strict=True):
        _add(root, _stack_path(trace, key[0]) if has_stacks else _size_path(trace, *key), own, number)
    return _columns(root, device, index, grouping)


def range_at(trace: Trace, index: Ints) -> Ints:
    """Return the name (an index into the trace's names) of the innermost range open at each record, 0 if none.

    A range is open on the thread, and for the device, that pushed it.
    """
    result = np.zeros(len(index), np.int64)
    marks = np.flatnonzero(np.isin(trace.records["kind"], (Kind.RANGE_PUSH, Kind.RANGE_POP)))
    if not len(marks):
        return result
    marked, asked = trace.records[marks], trace.records[index]
    for thread, device in distinct(marked[["thread", "device"]]).tolist():
        own = (marked["thread"] == thread) & (marked["device"] == device)
        innermost: list[int] = []
        open_names = [0]
        for kind, name in zip(marked["kind"][own].tolist(), marked["name"][own].tolist(), strict=True):
            if kind == Kind.RANGE_PUSH:
                open_names.append(name)
            elif len(open_names) > 1:
                open_names.pop()
            innermost.append(open_names[-1])
        here = asked["thread"] == thread
        if device >= 0:  # PyTorch's profiler names the device of a range; our own ranges are the host's
            here &= asked["device"] == device
        before = np.searchsorted(marks[own], index[here], side="right")
        result[here] = np.array([0, *innermost], np.int64)[before]
    return result


def _stack_path(trace: Trace, stack: int) -> Sequence[_Key]:
    frames = trace.stack(stack)
    return [(f.function, f.file, f.line) for f in reversed(frames)] or [(missing_stack(trace).text, "", 0)]


def _size_path(trace: Trace, open_range: int, requested: int) -> Sequence[_Key]:
    size: _Key = (f"{exact_bytes(requested)} each", "", 0)
    return [(trace.names[open_range], "", 0), size] if open_range else [size]


def _add(node: _Node, path: Sequence[_Key], size: int, count: int) -> None:
    node.total_size += size
    node.count += count
    for key in path:
        node = node.children.setdefault(key, _Node())
        node.total_size += size
        node.count += count
    node.self_size += size


def _columns(root: _Node, device: int, index: int, grouping: Grouping) -> SiteTree:
    rows: list[tuple[int, _Key, _Node]] = []
    waiting: list[tuple[int, _Key, _Node]] = [(-1, ("all", "", 0), root)]
    while waiting:
        parent, key, node = waiting.pop()
        row = len(rows)
        rows.append((parent, key, node))
        waiting.extend((row, k, n) for k, n in sorted(node.children.items(), key=lambda item: item[1].total_size))
    return SiteTree(
        device=device,
        index=index,
        grouping=grouping,
        parent=np.array([parent for parent, _, _ in rows], np.int64),
        name=tuple(key[0] for _, key, _ in rows),
        file=tuple(key[1] for _, key, _ in rows),
        line=np.array([key[2] for _, key, _ in rows], np.int64),
        self_size=np.array([node.self_size for _, _, node in rows], np.int64),
        total_size=np.array([node.total_size for _, _, node in rows], np.int64),
        count=np.array([node.count for _, _, node in rows], np.int64),
    )
