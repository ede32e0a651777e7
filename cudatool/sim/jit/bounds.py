"""How many threads of a row do anything in a region: the first, in ``if (threadIdx.x < 32) ...; __syncthreads();``.

Sums by a tree have such a region for each level, and in all but the first most threads do nothing. In loops over
barriers the number is uniform (:mod:`.uniform`), ``if (threadIdx.x < k)``, and known when the region begins.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from cudatool.ptx import Flow, Immediate, Instruction, Register, Symbol, opcode_of
from cudatool.ptx.flow import writes
from cudatool.ptx.isa import Control
from cudatool.sim.jit.table import types_of

__all__ = ["Bound", "first_threads"]

_INVERSE = {"lt": "ge", "le": "gt", "gt": "le", "ge": "lt", "eq": "ne", "ne": "eq"}
_MIRRORED = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le", "lo": "hi", "ls": "hs", "hi": "lo", "hs": "ls", "eq": "eq"}
_INVERSE |= {"lo": "hs", "ls": "hi", "hi": "ls", "hs": "lo"}


class Bound(NamedTuple):
    """How many threads of a row do anything: `number`, and as many more as a `register` holds, if there is one.

    The register is read as a number that `is_signed` or not, and holds it at the comparison, the instruction `at`. All
    these threads go on to the block `goes`.
    """

    number: int
    register: str | None
    is_signed: bool
    at: int
    goes: int


def first_threads(
    flow: Flow,
    first: int,
    definitions: Mapping[str, int],
    indices: Mapping[str, str],
    is_uniform: Callable[[str, int], bool],
    leaves_nothing: Callable[[int, str, bool], bool],
) -> Bound | None:
    """Return how many threads of a row can do anything in a region, None if that is not known.

    Parameters
    ----------
    first
        The block at which the region begins.
    definitions
        Where registers are set that are set once.
    indices
        Registers that hold special registers.
    is_uniform
        Whether all threads have alike what a register holds at an instruction, and it is known when the region begins.
    leaves_nothing
        Whether the instruction with an index ends the region, and a thread that comes to it does nothing else there, if
        a predicate holds for it or does not.
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
    name, at = branch.guard.name, definitions[branch.guard.name]
    there, next_one = flow.target(branch, target.name), first + 1
    for skipped, goes, others_go_there in ((there, next_one, True), (next_one, there, False)):
        holds = branch.guard.negated == others_go_there  # for those that do something
        if _does_nothing(flow, skipped, name, not holds, leaves_nothing):
            return _bound(code[at], at, goes, indices, is_uniform, holds=holds)
    return None


def _has_no_effect(i: Instruction) -> bool:
    return opcode_of(i.opcode).is_pure or (i.opcode == "ld" and "param" in i.modifiers)


def _does_nothing(
    flow: Flow, number: int, predicate: str, holds: bool, leaves_nothing: Callable[[int, str, bool], bool]
) -> bool:
    """Whether a thread for which a predicate `holds`, or not, and that comes to a block does nothing more there."""
    code, seen = flow.function.instructions, set()
    while number not in seen and number < len(flow.blocks):
        seen.add(number)
        block = flow.blocks[number]
        following = number + 1
        for index in range(block.start, block.stop):
            if leaves_nothing(index, predicate, holds):
                return True
            one = code[index]
            if predicate in writes(one):
                return False
            if opcode_of(one.opcode).control is Control.BRANCH and one.guard is None:
                (following,) = block.successors
            elif opcode_of(one.opcode).control is not Control.NEXT or not _has_no_effect(one):
                return False
        number = following
    return False


def _bound(
    i: Instruction,
    at: int,
    goes: int,
    indices: Mapping[str, str],
    is_uniform: Callable[[str, int], bool],
    *,
    holds: bool,
) -> Bound | None:
    """Return the least index of a thread from which on a comparison never is as `holds` says, None if there is none."""
    if i.opcode != "setp" or len(i.operands) != 3 or len(i.modifiers) != 2 or not isinstance(i.operands[0], Register):
        return None
    how, (_, index, number) = i.modifiers[0], i.operands
    if isinstance(number, Register) and indices.get(number.name, number.name) == "%tid.x":
        how, index, number = _MIRRORED.get(how, ""), number, index
    if types_of(i)[-1] not in ("u32", "s32", "b32") or how not in _INVERSE:
        return None
    if not isinstance(index, Register) or indices.get(index.name, index.name) != "%tid.x":
        return None
    how = how if holds else _INVERSE[how]
    more = {"lt": 0, "lo": 0, "le": 1, "ls": 1}.get(how)
    if isinstance(number, Register):
        is_signed = types_of(i)[-1] == "s32" and how not in ("lo", "ls")
        if more is None or number.negated or not is_uniform(number.name, at):
            return None
        return Bound(more, number.name, is_signed, at, goes)
    if not isinstance(number, Immediate) or number.width or not 0 <= int(number.value) < 1 << 31:
        return None
    value = int(number.value)
    if how == "eq":
        more = 1 if value == 0 else None
    return Bound(value + more, None, False, at, goes) if more is not None and value + more else None
