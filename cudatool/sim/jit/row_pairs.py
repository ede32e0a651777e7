"""Two rows of threads that go through a region side by side, each instruction for both before the next.

A sum of products is a chain: each number waits for the one before, four cycles on the host. A vector of threads has one
such chain, and of the next row's the host sees too little ahead to fill the time. So where a region is one long chain
without branches, its code is written twice in one loop, for a row and for the row after it. What both read at one
address (the tile's column of a product of matrices) is then loaded once, as no store comes between.

No result changes by it: threads take turns as they like until they synchronize.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import replace

from cudatool.ptx import Function, Instruction, opcode_of
from cudatool.ptx.flow import reads, writes
from cudatool.ptx.isa import STRONG
from cudatool.ptx.operands import renamed
from cudatool.sim.jit.special_registers import PLACES
from cudatool.sim.jit.table import types_of

__all__ = ["NEXT_ROW", "indices_of_both", "is_chain", "of_next_row", "written_twice"]

NEXT_ROW = "%tid.y'"
"""The register that holds the place in y of the next row."""

_LONG = 8  # operations that wait for each other
_ALONE = 2  # of so many operations that a thread does, at least one is in the chain
_CHAINED = frozenset({"add", "sub", "mul", "fma", "mad"})
_COMPUTING = _CHAINED | {"abs", "div", "rcp", "sqrt", "rsqrt", "ex2", "lg2", "sin", "cos", "tanh"}


def is_chain(code: Sequence[Instruction], registers: Set[str]) -> bool:
    """Whether `code` of threads, which has no branches, is one chain of operations that wait for each other.

    It also only reads and writes memory, and uses the place in y, and none that depends on the thread otherwise.
    """
    depth: dict[str, int] = {}
    operations = longest = 0
    special: set[str] = set()
    for one in code:
        if one.guard is not None or not _is_simple(one):
            return False
        used = reads(one)
        special.update(name for name in used if name not in registers)
        reached = max((depth.get(name, 0) for name in used), default=0)
        if one.opcode in _CHAINED and any("f" in name for name in types_of(one)):
            operations += 1
            reached += 1
            longest = max(longest, reached)
        depth |= dict.fromkeys(writes(one), reached)
    # All that may differ from row to row is the place in y.
    if not all(name.startswith(PLACES) for name in special) or "%tid.y" not in special:
        return False
    return longest >= _LONG and operations <= _ALONE * longest


def _is_simple(one: Instruction) -> bool:
    if one.opcode in ("ld", "st"):
        return STRONG.isdisjoint(one.modifiers)
    return (one.opcode in _COMPUTING or opcode_of(one.opcode).is_pure) and "cc" not in one.modifiers


def written_twice(function: Function, code: Sequence[Instruction], kept: Iterable[str]) -> Function:
    """Return `function` with `code` alone, each instruction followed by itself for the next row.

    Registers that the code sets, and those that threads have `kept`, have a second one, named by :func:`of_next_row`.
    """
    own = {name for one in code for name in writes(one) if name in function.registers}.union(kept)
    names = {name: of_next_row(name) for name in own} | {"%tid.y": NEXT_ROW}
    registers = function.registers | {of_next_row(name): function.registers[name] for name in own}
    twice = [version for one in code for version in (one, _with(one, names))]
    return replace(function, instructions=twice, registers={**registers, NEXT_ROW: "u32"}, labels={})


def _with(one: Instruction, names: dict[str, str]) -> Instruction:
    return replace(one, operands=tuple(renamed(operand, names) for operand in one.operands))


def of_next_row(register: str) -> str:
    """Return the name of a register of the thread in the next row."""
    return f"{register}'"


def indices_of_both(indices: Mapping[str, str], function: Function) -> dict[str, str]:
    """Return which registers of a `function` that is written twice hold special registers, as `indices` says it."""
    copies = {of_next_row(name): special for name, special in indices.items()}
    return {**indices, **{name: special for name, special in copies.items() if name in function.registers}}
