"""How many threads of a row do anything in a region: the first, in ``if (threadIdx.x < 32) ...; __syncthreads();``.

Sums by a tree have such a region for each level, and in all but the first most threads do nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from cudatool.ptx import Flow, Immediate, Instruction, Register, Symbol, opcode_of
from cudatool.ptx.isa import Control
from cudatool.sim.jit.table import types_of

__all__ = ["first_threads"]

_INVERSE = {"lt": "ge", "le": "gt", "gt": "le", "ge": "lt", "eq": "ne", "ne": "eq"}
_INVERSE |= {"lo": "hs", "ls": "hi", "hi": "ls", "hs": "lo"}


def first_threads(
    flow: Flow,
    first: int,
    definitions: Mapping[str, int],
    indices: Mapping[str, str],
    leaves_nothing: Callable[[int], bool],
) -> int | None:
    """Return how many threads of a row can do anything in a region, None if that is not known.

    Parameters
    ----------
    first
        The block at which the region begins.
    definitions
        Where registers are set that are set once.
    indices
        Registers that hold special registers.
    leaves_nothing
        Whether the instruction with an index ends the region, and a thread that comes to it does nothing else there.
    """
    code = flow.function.instructions
    block = flow.blocks[first]
    branch = code[block.stop - 1] if block.stop > block.start else None
    if branch is None or opcode_of(branch.opcode).control is not Control.BRANCH or branch.guard is None:
        return None
    if not all(map(_has_no_effect, code[block.start : block.stop - 1])) or branch.guard.name not in definitions:
        return None
    target = branch.operands[0]
    assert isinstance(target, Symbol)
    compares = code[definitions[branch.guard.name]]
    for skipped, others_go_there in ((flow.target(branch, target.name), True), (first + 1, False)):
        if _does_nothing(flow, skipped, leaves_nothing):
            return _bound(compares, indices, holds=branch.guard.negated == others_go_there)
    return None


def _has_no_effect(i: Instruction) -> bool:
    return opcode_of(i.opcode).is_pure or (i.opcode == "ld" and "param" in i.modifiers)


def _does_nothing(flow: Flow, number: int, leaves_nothing: Callable[[int], bool]) -> bool:
    """Whether a thread that comes to a block does nothing until the region ends."""
    code, seen = flow.function.instructions, set()
    while number not in seen and number < len(flow.blocks):
        seen.add(number)
        block = flow.blocks[number]
        following = number + 1
        for index in range(block.start, block.stop):
            if leaves_nothing(index):
                return True
            one = code[index]
            if opcode_of(one.opcode).control is Control.BRANCH and one.guard is None:
                (following,) = block.successors
            elif opcode_of(one.opcode).control is not Control.NEXT or not _has_no_effect(one):
                return False
        number = following
    return False


def _bound(i: Instruction, indices: Mapping[str, str], *, holds: bool) -> int | None:
    """Return the least index of a thread for which a comparison never is as `holds` says, None if there is none."""
    if i.opcode != "setp" or len(i.operands) != 3 or len(i.modifiers) != 2 or not isinstance(i.operands[0], Register):
        return None
    how, (_, index, number) = i.modifiers[0], i.operands
    if types_of(i)[-1] not in ("u32", "s32", "b32") or how not in _INVERSE:
        return None
    if not isinstance(index, Register) or indices.get(index.name, index.name) != "%tid.x":
        return None
    if not isinstance(number, Immediate) or number.width or not 0 <= int(number.value) < 1 << 31:
        return None
    value = int(number.value)
    ends = {"lt": value, "lo": value, "le": value + 1, "ls": value + 1, "eq": 0 if value else 1}
    return ends.get(how if holds else _INVERSE[how]) or None
