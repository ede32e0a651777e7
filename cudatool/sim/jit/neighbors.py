"""Which registers of neighboring threads differ by a number that is known: ``threadIdx.x + k`` does, by 1.

Threads that step together through a loop (:mod:`cudatool.sim.jit.steps`) keep such registers in slots. Read from
there, each is a number like any other, and memory that it is an index into is gathered, element by element. So before a
region runs for a row of threads, one look at the slots tells whether each holds what the first one holds and the
distance times its place. If they do, the region is run in a form that computes them so, and LLVM sees neighboring
accesses, and branches that all threads take alike.

These are guesses that are worth the look: they need not hold.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from cudatool.ptx import Function, Immediate, Instruction, Operand, Register, Symbol, opcode_of
from cudatool.ptx.flow import reads, writes
from cudatool.sim.jit.table import loads_parameter

__all__ = ["Distances", "distances"]

Distances = Mapping[str, int]
"""By how much a register's value grows from one thread to the next in x."""

_OWN = frozenset({"%tid.y", "%tid.z", "%laneid", "%warpid", "%clock", "%clock64", "%globaltimer"})
_ROUNDS = 4  # of the search: what then still changes has no distance
_MOST = 1 << 20


def distances(function: Function) -> Distances:
    """Return the registers whose values seem to be at one distance, and that; others are not in it."""
    code = [(one, writes(one)) for one in function.instructions]
    found: dict[str, int | None] = {}  # None: at none; not in it: not known yet
    for round_number in range(_ROUNDS):
        before = dict(found)
        for instruction, names in code:
            for name in names:
                distance = _of(instruction, found) if len(names) == 1 else None
                if distance is not None and abs(distance) > _MOST:
                    distance = None
                if name in found and found[name] != distance:
                    distance = None
                found[name] = distance
        if found == before:
            return {name: distance for name, distance in found.items() if distance is not None}
        if round_number == 0:
            # A register of a loop may be read above where it is set: what was found without it counts no more.
            found = {name: distance for name, distance in found.items() if distance is not None}
    return {}


def _of(instruction: Instruction, found: Mapping[str, int | None]) -> int | None:
    """Return the distance of what an instruction sets, None if there is none."""
    opcode = instruction.opcode
    if opcode == "ld":
        return 0 if loads_parameter(instruction) else None
    if not opcode_of(opcode).is_pure or any("f" in one[:1] and one[1:].isdigit() for one in instruction.modifiers):
        return 0 if opcode_of(opcode).is_pure and _all_alike(reads(instruction), found) else None
    sources = instruction.operands[1:]
    by = [_distance(one, found) for one in sources]
    if instruction.guard is None and all(one is not None for one in by):
        known = [one for one in by if one is not None]
        if opcode in ("mov", "cvt", "cvta") and len(known) == 1:
            return known[0]
        if opcode in ("add", "sub") and len(known) == 2:
            return known[0] + known[1] if opcode == "add" else known[0] - known[1]
        if opcode in ("mul", "mad") and "hi" not in instruction.modifiers and len(known) in (2, 3):
            product = _product(sources[0], known[0], sources[1], known[1])
            return None if product is None else product + sum(known[2:])
        if opcode == "shl" and isinstance(sources[1], Immediate) and isinstance(sources[1].value, int):
            return known[0] << sources[1].value if sources[1].value < 32 else None
        if opcode == "or" and len(known) == 2 and isinstance(sources[1], Immediate):
            return known[0]  # as NVRTC adds to a number whose low bits are 0
    return 0 if _all_alike(reads(instruction), found) else None


def _product(left: Operand, by_left: int, right: Operand, by_right: int) -> int | None:
    if by_left == by_right == 0:
        return 0
    if isinstance(right, Immediate) and isinstance(right.value, int):
        return by_left * right.value
    if isinstance(left, Immediate) and isinstance(left.value, int):
        return by_right * left.value
    return None


def _distance(operand: Operand, found: Mapping[str, int | None]) -> int | None:
    if isinstance(operand, Immediate | Symbol):
        return 0
    if not isinstance(operand, Register) or operand.name in _OWN:
        return None
    if operand.name == "%tid.x":
        return 1
    if "." in operand.name:  # of the block, or the row
        return 0
    return found.get(operand.name)  # what is set further down in a loop is not known yet


def _all_alike(names: Iterable[str], found: Mapping[str, int | None]) -> bool:
    return all((name not in _OWN and name != "%tid.x" and "." in name) or found.get(name) == 0 for name in names)
