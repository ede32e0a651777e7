"""Rows of a block that a region treats unlike the others: the first and the last one of a tile, say.

What ``if (threadIdx.y == 0)`` decides is alike for a row of threads. LLVM has a loop over a row for each outcome only
if the loop is short: in others a vector of threads goes each way, masked, and each row pays for the ways of all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cudatool.ptx import Immediate, Instruction, Register, opcode_of
from cudatool.ptx.isa import Control

__all__ = ["edges"]

_MOST = 2  # the first and the last
_SHORT = 50  # instructions; LLVM makes as many loops of shorter ones by itself


def edges(region: Sequence[Instruction], indices: Mapping[str, str]) -> list[int]:
    """Return the places in y of rows that have a loop over their threads of their own; `indices` holds copies of it."""
    if len(region) < _SHORT or not any(opcode_of(one.opcode).control is Control.BRANCH for one in region):
        return []
    found = set()
    for one in region:
        if one.opcode != "setp" or len(one.operands) != 3 or not {"eq", "ne"} & set(one.modifiers):
            continue
        _, place, number = one.operands
        if not isinstance(place, Register) or indices.get(place.name, place.name) != "%tid.y":
            continue
        if isinstance(number, Immediate) and not number.width and 0 <= int(number.value) < 1024:
            found.add(int(number.value))
    return sorted(found) if len(found) <= _MOST else []
