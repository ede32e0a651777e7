"""A barrier on each way that all threads of a block go together after a barrier.

``for (k = n / 2; k > 0; k /= 2) { if (threadIdx.x < k) ...; __syncthreads(); }``: the region after the barrier goes two
ways, around the loop or past it. So nothing is known of how it begins, such as how many threads do anything in the next
round (:mod:`.bounds`): all of them ask, in all rounds. Where such a question follows, each way gets a second barrier
and is a region of its own. What lies between the two barriers, all threads compute alike.

All threads wait for each other once more, which nothing depends on.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import replace

from cudatool.ptx import Flow, Function, Immediate, Instruction, Symbol, opcode_of
from cudatool.ptx.flow import reads, writes
from cudatool.ptx.isa import Control
from cudatool.sim.jit.bounds import asks_first_threads
from cudatool.sim.jit.collective import Kind, suspension_of
from cudatool.sim.jit.uniform import find_marching

__all__ = ["barriers_on_each_way"]

_MOST = 8  # branches


def barriers_on_each_way(function: Function, shared: Set[str], repeatable: Set[str]) -> Function:
    """Return `function` with such barriers.

    Parameters
    ----------
    shared
        Parameters and variables that are the same for all threads.
    repeatable
        Special registers that have the same value whenever a thread reads them.
    """
    code, end = function.instructions, len(function.instructions)
    rows = [index for index, one in enumerate(code) if suspension_of(one) is not None]
    labelled = set(function.labels.values())
    if not rows or not all(_waits_for_all(code[at]) for at in rows) or end in labelled or not _leads_away(code[-1]):
        return function
    branches = {at: to for at in rows if (to := _find_branch(function, at, labelled, repeatable)) is not None}
    target = {at: _target(function, code[to]) for at, to in branches.items()}
    if not any(head < at for at, head in target.items()):
        return function
    marching = find_marching(Flow(function, frozenset(rows) | frozenset(at + 1 for at in rows)), rows, shared)
    if marching is None:
        return function
    # Loops of which each round begins with a question which threads do anything.
    heads = {head for at, head in target.items() if head < at and _asks(function, head, marching.registers)}
    parted = {
        at: to for at, to in branches.items() if heads & {to + 1, target[at]} and _guard(code[to]) in marching.registers
    }
    return _parted(function, parted) if 0 < len(parted) <= _MOST else function


def _asks(function: Function, head: int, alike: Set[str]) -> bool:
    """Whether a round that begins at `head` does something for the first threads of a row only, of a uniform number."""
    code = function.instructions
    copies = (one for one in code if one.opcode == "mov" and reads(one) == ["%tid.x"])
    indices = {name: "%tid.x" for one in copies for name in writes(one)}
    comparisons: dict[str, Instruction] = {}
    for one in code[head:]:
        if one.opcode == "bra":
            asked = comparisons.get(_guard(one))
            return asked is not None and asks_first_threads(
                asked, indices, alike, holds=one.guard is not None and one.guard.negated
            )
        if one.opcode == "setp":
            comparisons |= dict.fromkeys(writes(one), one)
        if not opcode_of(one.opcode).is_pure:
            return False
    return False


def _waits_for_all(one: Instruction) -> bool:
    """Whether a suspension is ``__syncthreads()`` or an operation of a warp; others may count who has come to them."""
    row = suspension_of(one)
    if row is None or one.guard is not None:
        return False
    return row.kind in (Kind.WARP, Kind.PRESENT) or _is_barrier(one)


def _is_barrier(one: Instruction) -> bool:
    row = suspension_of(one)
    is_for_all = len(one.operands) == 1 and isinstance(one.operands[0], Immediate)
    return row is not None and row.kind == Kind.BARRIER and is_for_all


def _leads_away(one: Instruction) -> bool:
    return one.guard is None and opcode_of(one.opcode).control in (Control.BRANCH, Control.END)


def _target(function: Function, branch: Instruction) -> int:
    """Return where a branch leads; the end if its label is missing, which is reported elsewhere."""
    label = branch.operands[0]
    return (
        function.labels.get(label.name, len(function.instructions))
        if isinstance(label, Symbol)
        else len(function.instructions)
    )


def _guard(one: Instruction) -> str:
    return one.guard.name if one.guard is not None else ""


def _find_branch(function: Function, barrier: int, labelled: Set[int], repeatable: Set[str]) -> int | None:
    """Return where the branch is that follows a barrier and what only computes, None if there is none."""
    if not _is_barrier(function.instructions[barrier]):
        return None
    code = function.instructions
    for at in range(barrier + 1, len(code)):
        one = code[at]
        if at in labelled:
            return None
        if one.opcode == "bra" and one.guard is not None:
            return at
        is_pure = opcode_of(one.opcode).is_pure and one.guard is None and "cc" not in one.modifiers
        if not is_pure or not all(name in function.registers or name in repeatable for name in reads(one)):
            return None
    return None


def _decides(code: list[Instruction], guard: str) -> list[bool]:
    """Return for each of some instructions whether it comes before the branch: what the guard is computed from.

    The others come after the second barrier. None of them reads or sets what those set further down.
    """
    needed, found = {guard}, [False] * len(code)
    moved: set[str] = set()  # registers that such instructions set further down
    for at in reversed(range(len(code))):
        one = code[at]
        own = set(writes(one))
        if own & needed or moved & (own | set(reads(one))):
            found[at] = True
            needed = (needed - own) | set(reads(one))
            moved |= own
    return found


def _parted(function: Function, branches: dict[int, int]) -> Function:
    """Return the function with a second barrier on both ways of some branches, by the barriers before them."""
    code: list[Instruction] = []
    after: list[Instruction] = []  # what one of the ways begins with, at the end of the code
    starts: dict[str, int] = {}
    place: list[int] = []  # where each instruction is now
    ends = {to: at for at, to in branches.items()}
    for index, one in enumerate(function.instructions):
        place.append(len(code))
        if index not in ends:
            code.append(one)
            continue
        barrier = ends[index]
        between = function.instructions[barrier + 1 : index]
        first = _decides(between, _guard(one))
        rest = [other for other, comes_first in zip(between, first, strict=True) if not comes_first]
        name = f"$way_{index}"
        starts[name] = len(after)
        after += [replace(function.instructions[barrier]), *map(replace, rest), replace(one, guard=None)]
        del code[place[barrier] + 1 :]
        code += [other for other, comes_first in zip(between, first, strict=True) if comes_first]
        code += [replace(one, operands=(Symbol(name), *one.operands[1:]))]
        code += [replace(function.instructions[barrier]), *rest]
    labels = {name: place[at] for name, at in function.labels.items()}
    labels |= {name: len(code) + at for name, at in starts.items()}
    return replace(function, instructions=code + after, labels=labels)
