"""What each module of PyTorch holds: parameters, gradients, activations, optimizer state.

A block is of the module that holds its tensor, that compiled code made it for, or that was being called when it was
allocated; in a backward pass, of the module whose call made the node. What has no module is counted, with the reason.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from typing import Any, Final

import numpy as np

from cudatool.analyze.categories import RULES, Categories, Category
from cudatool.trace.events import Kind
from cudatool.trace.lifetimes import Ints, Lifetimes, Mask
from cudatool.trace.model import Trace, recorded_from
from cudatool.trace.module_tensors import BlockModules
from cudatool.units import counted, format_bytes, format_share

__all__ = ["ModuleMemory", "Modules", "WithoutModule", "WithoutModuleShare", "merged_layers", "modules"]


class WithoutModule(StrEnum):
    """Why a block has no module."""

    OUTSIDE = "outside-of-modules"
    """The code that allocated it is not called by a module."""
    BEFORE = "before-the-recording"
    NO_STACK = "no-stack"
    """Its thread ran no Python code."""
    LIBRARY = "workspace-of-a-library"
    """A library that PyTorch calls, such as cuBLAS, took it from the driver for itself."""
    NOT_PYTORCH = "not-pytorch"
    """The program, or another library, took it from the driver."""

    @property
    def text(self) -> str:
        """The reason in words."""
        return _WHY[self]


_WHY: Final = {
    WithoutModule.OUTSIDE: "allocated outside of all calls of modules",
    WithoutModule.BEFORE: "allocated before the recording began",
    WithoutModule.NO_STACK: "allocated by a thread that ran no Python code",
    WithoutModule.LIBRARY: "workspace that libraries such as cuBLAS took from the driver",
    WithoutModule.NOT_PYTORCH: "not allocated by PyTorch",
}


@dataclass(frozen=True, slots=True)
class WithoutModuleShare:
    """The bytes and blocks that have no module for one reason."""

    reason: WithoutModule
    size: int
    count: int


@dataclass(frozen=True, slots=True)
class ModuleMemory:
    """What one module holds, without the modules inside of it. Bytes.

    Attributes
    ----------
    path
        ``layers.3.self_attn.q_proj``. The outermost module has the name of its class; where several have modules
        inside, paths begin with it.
    modules
        How many modules this is, where equal layers are shown as one.
    size, count
        Bytes and blocks.
    parameters, gradients, activations, optimizer_state, workspace, unknown
        Of these bytes, those of each category.
    """

    path: str
    modules: int
    size: int
    count: int
    parameters: int = 0
    gradients: int = 0
    activations: int = 0
    optimizer_state: int = 0
    workspace: int = 0
    unknown: int = 0


@dataclass(frozen=True, slots=True)
class Modules:
    """The memory of one device at one moment, by module.

    Attributes
    ----------
    size
        All bytes.
    with_module
        Those of blocks whose module is known.
    named
        Those of blocks whose category is known and whose module, or library that took them for itself.
    held
        What each module holds, the largest first.
    without
        Bytes without a module, by reason, the largest first.
    path, paths
        For each block of this device, in the order of the lifetimes, an index into the paths; 0 for no module.
    """

    size: int
    with_module: int
    named: int
    held: tuple[ModuleMemory, ...]
    without: tuple[WithoutModuleShare, ...]
    path: Ints
    paths: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return plain data, without the column."""
        plain = {name: getattr(self, name) for name in ("size", "with_module", "named")}
        rows = {"held": [asdict(row) for row in self.held], "without": [asdict(share) for share in self.without]}
        return plain | rows

    def sentences(self) -> tuple[str, ...]:
        """Return how much has a module, and why the rest has none, in words."""
        whole = max(self.size, 1)
        return (
            f"Of {format_bytes(self.size)}, {format_share(self.with_module / whole)} have a module; "
            f"{format_share(self.named / whole)} have a purpose and a module, or are a library's.",
            *(
                f"Without a module: {format_bytes(own.size)} in {counted(own.count, 'block')}, {own.reason.text}."
                for own in self.without
            ),
        )


def modules(trace: Trace, blocks: Lifetimes, known: BlockModules, categories: Categories, index: int) -> Modules | None:
    """Return what each module holds right after record `index`; None if the recording knows no module.

    Parameters
    ----------
    blocks
        Of one device; `known` and `categories` are of the same.
    """
    path_of, paths = _paths(trace, blocks, known)
    if len(paths) == 1:
        return None
    live = np.flatnonzero((blocks.start <= index) & (index < blocks.end))
    path, size = path_of[live], blocks.size[live]
    category_of = np.array([list(Category).index(rule.category) for rule in RULES], np.int64)
    category = category_of[categories.rule[live]]
    sizes = np.zeros((len(paths), len(Category)), np.int64)
    np.add.at(sizes, (path, category), size)
    count = np.bincount(path, minlength=len(paths)).tolist()
    purposes = [category.replace(" ", "_") for category in Category]
    rows = [
        ModuleMemory(text, 1, sum(own), number, **dict(zip(purposes, own, strict=True)))
        for text, own, number in zip(paths, sizes.tolist(), count, strict=True)
        if text and number
    ]
    has_module = path != 0
    of_library = _of_libraries(trace, blocks, category_of[categories.rule])
    is_named = (has_module & (category != list(Category).index(Category.UNKNOWN))) | of_library[live]
    return Modules(
        size=int(size.sum()),
        with_module=int(size[has_module].sum()),
        named=int(size[is_named].sum()),
        held=tuple(sorted(rows, key=lambda row: (-row.size, row.path))),
        without=_without(trace, blocks[live[~has_module]], of_library[live[~has_module]]),
        path=path_of,
        paths=tuple(paths),
    )


def _paths(trace: Trace, blocks: Lifetimes, known: BlockModules) -> tuple[Ints, list[str]]:
    """Return the path of each block's module as an index, and the paths as they are shown; the first is empty."""
    roots = {path.partition(".")[0] for path in known.paths if "." in path}
    only = f"{roots.pop()}." if len(roots) == 1 else ""
    numbers = {"": 0}
    shown = [numbers.setdefault(path.removeprefix(only) if only else path, len(numbers)) for path in known.paths]
    result = np.array(shown, np.int64)[known.path]
    compiled = {
        stack: line.module for stack, (_, line) in trace.generated.at.items() if line is not None and line.module
    }
    if compiled:  # what compiled code made it for says more than the module that called the code
        of_stack = np.zeros(len(trace.stacks), np.int64)
        for stack, path in compiled.items():
            of_stack[stack] = numbers.setdefault(path, len(numbers))
        found = np.where(known.role == 0, of_stack[blocks.stack], 0)
        result = np.where(found != 0, found, result)
    return result, list(numbers)


def _of_libraries(trace: Trace, blocks: Lifetimes, category: Ints) -> Mask:
    """Return which blocks a library took from the driver for itself."""
    taken = trace.records["kind"][blocks.start] == Kind.MEM_ALLOC
    result: Mask = taken & (category == list(Category).index(Category.WORKSPACE))
    return result


def _without(trace: Trace, blocks: Lifetimes, of_library: Mask) -> tuple[WithoutModuleShare, ...]:
    if not len(blocks):
        return ()
    begin = recorded_from(trace, int(blocks.device[0]))
    has_stack = np.array([bool(stack) for stack in trace.stacks])[blocks.stack]
    is_pytorchs = (trace.records["kind"][blocks.start] == Kind.BLOCK_ALLOC) & (blocks.library == 0)
    order = list(WithoutModule)
    applies = {
        WithoutModule.LIBRARY: of_library,
        WithoutModule.NOT_PYTORCH: ~is_pytorchs,
        WithoutModule.BEFORE: blocks.start < begin,
        WithoutModule.NO_STACK: ~has_stack,
    }
    first = [order.index(reason) for reason in applies]
    reasons = np.select(list(applies.values()), first, order.index(WithoutModule.OUTSIDE))
    shares = [
        WithoutModuleShare(reason, int(blocks.size[reasons == i].sum()), int(np.count_nonzero(reasons == i)))
        for i, reason in enumerate(WithoutModule)
    ]
    return tuple(sorted((share for share in shares if share.count), key=lambda share: -share.size))


_NUMBER: Final = re.compile(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)")


def merged_layers(held: Sequence[ModuleMemory]) -> tuple[ModuleMemory, ...]:
    """Return the same with layers that differ in their number alone as one, ``layers.*.mlp``, the largest first."""
    groups: dict[str, list[ModuleMemory]] = {}
    for row in held:
        groups.setdefault(_NUMBER.sub("*", row.path), []).append(row)
    merged = []
    for path, rows in groups.items():
        sums: dict[str, Any] = {
            own.name: sum(getattr(row, own.name) for row in rows) for own in fields(ModuleMemory) if own.name != "path"
        }
        merged.append(ModuleMemory(rows[0].path if len(rows) == 1 else path, **sums))
    return tuple(sorted(merged, key=lambda row: (-row.size, row.path)))
