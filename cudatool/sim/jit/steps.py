"""Loops in which all threads of a block step together, so that their memory accesses are made side by side.

In a *grid-stride* loop each thread goes on by a multiple of the grid's size. One thread after the other,
each to its end, would jump through memory; a GPU's threads do one round of the loop together. So a ``step``, a
suspension that waits for nothing (``Kind.PRESENT``), is put where a round follows another. The further rounds become a
region of their own and a loop over the threads, which LLVM vectorizes; what threads keep between them is in the slots.

Where it is known that all threads of a row go around the loop equally often, they do so without that
(:mod:`cudatool.sim.jit.rows`).

Other loops stay in one region: their registers are worth more than neighbors' accesses. So do those that go on by the
size of a block, or by a number as large, whose rounds are near enough to each other for the host's caches, and those
that go on by what the kernel is given, such as down a column of a matrix. But rows of threads go around these together,
too, where that is known: the host fetches ahead what follows in memory, and sixteen threads at a time, round after
round, do not read it in that order. They may be inside of one another.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import replace

from cudatool.ptx import Flow, Function, Immediate, Instruction, Symbol, opcode_of
from cudatool.ptx.flow import reads, writes
from cudatool.ptx.isa import FLOATS
from cudatool.sim.jit.collective import suspension_of
from cudatool.sim.jit.table import loads_parameter, types_of

__all__ = ["block_stride_loops", "insert_steps", "stride_loops"]

_SHARED = ("%ntid", "%nctaid")  # what all threads of a block read the same
_STRIDE = "%nctaid"
_BLOCK_STRIDE = "%ntid"
_LARGE = 256  # as a block; what rounds are this many words apart fills the same few sets of a cache


def insert_steps(function: Function) -> Function:
    """Return `function` with ``step`` between the rounds of its innermost loops that go on by the size of the grid."""
    flow = Flow(function)
    code, labels = list(function.instructions), dict(function.labels)
    for start, blocks in stride_loops(function, flow).items():
        _step(code, labels, flow, start, blocks)
    return replace(function, instructions=code, labels=labels) if len(code) > len(function.instructions) else function


def stride_loops(function: Function, flow: Flow) -> dict[int, frozenset[int]]:
    """Return the innermost loops that go on by the size of the grid and suspend no thread, as natural loops."""
    loops = flow.natural_loops()
    return {start: loop for start, loop in _loops_by(_STRIDE, function, flow).items() if _is_innermost(start, loops)}


def block_stride_loops(function: Function, flow: Flow) -> dict[int, frozenset[int]]:
    """Return the loops that go on by the size of a block, or of the grid, by a large number, or by a parameter."""
    return _loops_by(_BLOCK_STRIDE, function, flow, large=_LARGE)


def _is_innermost(start: int, loops: Mapping[int, frozenset[int]]) -> bool:
    return all(other == start or other not in loops[start] for other in loops)


def _loops_by(size: str, function: Function, flow: Flow, large: int | None = None) -> dict[int, frozenset[int]]:
    """Return the loops that go on by a multiple of the special register `size`.

    If it is said what is `large`, also those that go on by such numbers, or by parameters. They access memory and
    suspend no thread.
    """
    code, loops = function.instructions, flow.natural_loops()
    if not loops:
        return {}
    strides, given = _strides(code, size)
    if not strides and large is None:
        return {}
    found = {}
    for start, blocks in loops.items():
        inside = [code[index] for n in blocks for index in range(flow.blocks[n].start, flow.blocks[n].stop)]
        goes_on = _goes_on_by(inside, strides, large)
        goes_on = goes_on or (large is not None and _advances(inside, flow.blocks[start].live_in, given))
        if goes_on and _accesses(inside) and not any(suspension_of(one) for one in inside):
            found[start] = blocks
    return found


def _step(code: list[Instruction], labels: dict[str, int], flow: Flow, start: int, blocks: frozenset[int]) -> None:
    """Let the branches back to where a loop begins lead through a ``step``, which is put at the end of the code."""
    name = f"$step_{start}"
    back = None
    for number in blocks:
        last = flow.blocks[number].stop - 1
        branch = code[last]
        target = branch.operands[0] if branch.opcode == "bra" else None
        if isinstance(target, Symbol) and labels.get(target.name) == flow.blocks[start].start:
            back = replace(branch, guard=None)
            code[last] = replace(branch, operands=(Symbol(name), *branch.operands[1:]))
    if back is not None:
        labels[name] = len(code)
        code += [replace(back, opcode="step", modifiers=(), operands=()), back]


def _strides(code: list[Instruction], size: str) -> tuple[set[str], set[str]]:
    """Return the registers that hold the special register `size`, or what all threads compute the same from it.

    And those that hold what they compute the same from parameters.
    """
    count: dict[str, int] = {}
    for instruction in code:
        for name in writes(instruction):
            count[name] = count.get(name, 0) + 1
    shared: set[str] = set()
    strides: set[str] = set()
    given: set[str] = set()
    for instruction in code:  # text order: a definition stands before its uses
        names = writes(instruction)
        if len(names) != 1 or count[names[0]] != 1 or instruction.guard is not None:
            continue
        used = reads(instruction)
        if loads_parameter(instruction):
            shared.add(names[0])
            given.add(names[0])
        elif opcode_of(instruction.opcode).is_pure and all(u in shared or u.startswith(_SHARED) for u in used):
            shared.add(names[0])
            if any(u in strides or u.startswith(size) for u in used):
                strides.add(names[0])
            if not given.isdisjoint(used):
                given.add(names[0])
    return strides, given


def _accesses(inside: list[Instruction]) -> bool:
    return any(opcode_of(i.opcode).address is not None and "param" not in i.modifiers for i in inside)


def _goes_on_by(inside: list[Instruction], strides: set[str], large: int | None) -> bool:
    """Whether a loop adds a stride, or a `large` number, to what it has computed before."""
    own = {name for one in inside for name in writes(one)}
    sums = [one for one in inside if one.opcode == "add" and own.intersection(reads(one))]
    return any(strides.intersection(reads(one)) or _adds(one, large) for one in sums)


def _advances(inside: list[Instruction], live: Set[str], given: set[str]) -> bool:
    """Whether something that is `live` when a round begins is that of the round before and a number that is `given`.

    A compiler that has unrolled the loop adds it several times. The sum of an array's address and of an index is none.
    """
    sums = [one for one in inside if one.opcode in ("add", "mov") and FLOATS.isdisjoint(one.modifiers)]
    after: dict[str, set[str]] = {}  # what is computed from each register by such sums
    for one in sums:
        terms = set(reads(one))
        for term in terms if one.opcode == "mov" or terms & given else ():
            if term not in given:
                after.setdefault(term, set()).update(writes(one))
    return any(name in _reached(after, name) for name in live & after.keys())


def _reached(after: Mapping[str, set[str]], start: str) -> set[str]:
    found: set[str] = set()
    pending = [start]
    while pending:
        for name in after.get(pending.pop(), set()) - found:
            found.add(name)
            pending.append(name)
    return found


def _adds(one: Instruction, large: int | None) -> bool:
    """Whether a sum is of an index, not of an address, and a `large` number."""
    if large is None or types_of(one)[-1] not in ("s32", "u32"):
        return False
    return any(isinstance(o, Immediate) and int(o.value) >= large for o in one.operands[1:])
