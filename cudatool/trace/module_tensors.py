"""Which modules of PyTorch blocks belong to, as the recorder found them: by who allocated, and by what they hold."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cudatool.trace.distinct import distinct
from cudatool.trace.events import OF_MODULE, Kind, TensorRole
from cudatool.trace.lifetimes import Ints, Lifetimes
from cudatool.trace.model import Trace

__all__ = ["BlockModules", "block_modules", "tensors_in"]


@dataclass(frozen=True, slots=True)
class BlockModules:
    """Columns, one row for each block.

    Attributes
    ----------
    path
        Of its module, as an index into `paths`; 0 if it is not known.
    role
        The :class:`~cudatool.trace.events.TensorRole` of the tensor of a module or optimizer that it holds, 0 for none.
    paths
        Paths of modules: ``ResNet.layer1.0.conv1``. The first is empty.
    """

    path: Ints
    role: Ints
    paths: tuple[str, ...]


def block_modules(trace: Trace, blocks: Lifetimes) -> BlockModules:
    """Return the module of each block: the one that holds its tensor, else the one that allocated it."""
    born = trace.records[blocks.start]
    names = np.where((born["kind"] == Kind.BLOCK_ALLOC) & (born["flags"] & OF_MODULE != 0), born["name"], 0)
    used, which = np.unique(names, return_inverse=True)
    paths = {"": 0}
    numbers = [paths.setdefault(trace.names[name], len(paths)) for name in used.tolist()]
    path, role = np.array(numbers, np.int64)[which.reshape(-1)], np.zeros(len(blocks), np.int64)
    held: dict[int, tuple[str, int]] = {}
    for block, record in tensors_in(trace, blocks):
        whole = trace.names[int(trace.records["name"][record])].rpartition(".")[0]
        known = held.get(block)
        held[block] = _common(known[0], whole) if known else whole, int(trace.records["flags"][record])
    known_roles = {int(one) for one in TensorRole}
    for block, (whole, what) in held.items():
        if whole:
            path[block] = paths.setdefault(whole, len(paths))
        role[block] = what if what in known_roles else 0
    return BlockModules(path, role, tuple(paths))


def tensors_in(trace: Trace, blocks: Lifetimes) -> list[tuple[int, int]]:
    """Return the block that each tensor of a module lies in, and the record that says so."""
    tensors = np.flatnonzero(trace.records["kind"] == Kind.MODULE_TENSOR)
    found: list[tuple[int, int]] = []
    never = len(trace.records) + 1
    for device in distinct(trace.records["device"][tensors]).tolist():
        asked = tensors[trace.records["device"][tensors] == device]
        own = np.flatnonzero(blocks.device == device)
        places, rank = np.unique(blocks.address[own], return_inverse=True)
        if not len(places):
            continue
        # One key for place and time: the latest block at the tensor's address that was allocated before.
        moment = rank.reshape(-1) * never + blocks.start[own]
        order = np.argsort(moment)
        address = trace.records["address"][asked].astype(np.int64)
        place = np.minimum(np.searchsorted(places, address), len(places) - 1)
        row = np.searchsorted(moment[order], place * never + asked) - 1
        block = own[order[np.maximum(row, 0)]]
        lies = (row >= 0) & (blocks.address[block] == address) & (blocks.start[block] < asked)
        lies &= asked < blocks.freed[block]
        found += zip(block[lies].tolist(), asked[lies].tolist(), strict=True)
    return found


def _common(first: str, second: str) -> str:
    """Return the path of the module that both are in: one block may hold parameters of several."""
    if first == second:
        return first
    parts = []
    for one, other in zip(first.split("."), second.split("."), strict=False):
        if one != other:
            break
        parts.append(one)
    return ".".join(parts)
