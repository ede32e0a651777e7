"""How many threads of a row do anything in a region: the first, in ``if (threadIdx.x < 32) ...; __syncthreads();``.

Sums by a tree have such a region for each level, and in all but the first most threads do nothing. In loops over
barriers the number is uniform (:mod:`.uniform`), ``if (threadIdx.x < k)``, and known when the region begins.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from typing import NamedTuple

from cudatool.ptx import Flow, Immediate, Instruction, Register, Symbol, opcode_of
from cudatool.ptx.flow import writes
from cudatool.ptx.isa import Control
from cudatool.sim.jit.table import types_of

__all__ = ["Bound", "asks_first_threads", "first_threads"]

_INVERSE = {"lt": "ge", "le": "gt", "gt": "le", "ge": "lt", "eq": "ne", "ne": "eq"}
_MIRRORED = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le", "lo": "hi", "ls": "hs", "hi": "lo", "hs": "ls", "eq": "eq"}
_INVERSE |= {"lo": "hs", "ls": "hi", "hi": "ls", "hs": "lo"}


class Bound(NamedTuple):
    """How many threads of a row do anything: `number`, and as many more as a `register` holds, if there is one.

    The register is read as a number that `is_signed` or not, and holds it at the comparison, the instruction `at`. All
    these threads go from the last of the `blocks`, with which the region begins, to the block `goes`.
    """

    number: int
    register: str | None
    is_signed: bool
    at: int
    goes: int
    blocks: tuple[int, ...]


def first_threads(
    flow: Flow,
    first: int,
    definitions: Mapping[str, int],
    indices: Mapping[str, str],
    is_uniform: Callable[[str, int, Sequence[int]], bool],
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
        Whether all threads have alike what a register holds at an instruction, and it is known when the region begins,
        which begins with some blocks.
    leaves_nothing
        Whether the instruction with an index ends the region, and a thread that comes to it does nothing else there, if
        a predicate holds for it or does not.
    """
    code = flow.function.instructions
    blocks = _first_blocks(flow, first)
    last = flow.blocks[blocks[-1]]
    branch = code[last.stop - 1] if last.stop > last.start else None
    if branch is None or opcode_of(branch.opcode).control is not Control.BRANCH or branch.guard is None:
        return None
    if not all(map(_has_no_effect, code[last.start : last.stop - 1])) or branch.guard.name not in definitions:
        return None
    target = branch.operands[0]
    assert isinstance(target, Symbol)
    name, at = branch.guard.name, definitions[branch.guard.name]
    there, next_one = flow.target(branch, target.name), blocks[-1] + 1
    for skipped, goes, others_go_there in ((there, next_one, True), (next_one, there, False)):
        holds = branch.guard.negated == others_go_there  # for those that do something
        if _does_nothing(flow, skipped, name, not holds, leaves_nothing):
            found = _bound(code[at], at, indices, lambda name, at: is_uniform(name, at, blocks), holds=holds)
            return found and Bound(*found, at, goes, blocks)
    return None


def _first_blocks(flow: Flow, first: int) -> tuple[int, ...]:
    """Return the blocks through which all threads come first, without effect; the last one is where they may part."""
    code, found = flow.function.instructions, [first]
    while len(flow.blocks[found[-1]].successors) == 1:
        block = flow.blocks[found[-1]]
        (following,) = block.successors
        ends = block.stop - 1 if code[block.stop - 1].opcode == "bra" else block.stop
        if following in found or not all(map(_has_no_effect, code[block.start : ends])):
            break
        found.append(following)
    return tuple(found)


def asks_first_threads(i: Instruction, indices: Mapping[str, str], alike: Set[str], *, holds: bool) -> bool:
    """Whether a comparison is as `holds` says for the first threads of a row: as many as a register among `alike`."""
    found = _bound(i, 0, indices, lambda name, _: name in alike, holds=holds)
    return found is not None and found[1] is not None


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
    indices: Mapping[str, str],
    is_uniform: Callable[[str, int], bool],
    *,
    holds: bool,
) -> tuple[int, str | None, bool] | None:
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
        return more, number.name, is_signed
    if not isinstance(number, Immediate) or number.width or not 0 <= int(number.value) < 1 << 31:
        return None
    value = int(number.value)
    if how == "eq":
        more = 1 if value == 0 else None
    return (value + more, None, False) if more is not None and value + more else None
