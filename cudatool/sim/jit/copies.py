"""Registers of their own for values that every thread can compute again.

NVRTC takes one register for several values: ``%r1 = threadIdx.x``, and where a loop begins with that, its index from
there on. Such a register must be kept in a slot from one region to the next, although all that is read of it between
barriers is the index of the thread. So what is set once without need of anything but special registers and parameters
also gets a register that nothing else sets. It is read wherever no other value can have come, and computed again in
each region.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from cudatool.ptx import Flow, Function, Instruction, Register, opcode_of
from cudatool.ptx.flow import reads, writes
from cudatool.ptx.operands import renamed

__all__ = ["separate_copies"]

_MOST = 64  # registers looked at


def separate_copies(function: Function, special: Iterable[str]) -> Function:
    """Return `function` with such registers; what is computed from `special` registers can be computed again."""
    code = function.instructions
    sets: dict[str, list[int]] = {}
    for index, instruction in enumerate(code):
        for name in writes(instruction):
            sets.setdefault(name, []).append(index)
    again = set(special)  # what can be computed anywhere
    found: dict[int, str] = {}  # the instructions that set such registers among others
    for index, instruction in enumerate(code):  # text order: a definition stands before its uses
        names = writes(instruction)
        if len(names) != 1 or instruction.guard is not None or not _is_pure(instruction):
            continue
        if not again.issuperset(reads(instruction)):
            continue
        if len(sets[names[0]]) == 1:
            again.add(names[0])
        elif len(found) < _MOST:
            found[index] = names[0]
    if not found or not any(one.opcode in ("bar", "barrier", "step") for one in code):
        return function
    flow = Flow(function)
    block_of = [number for number, block in enumerate(flow.blocks) for _ in range(block.start, block.stop)]
    everywhere = frozenset(range(len(flow.blocks)))
    code, registers = list(code), dict(function.registers)
    uses = list(map(reads, code))
    added: dict[int, Instruction] = {}
    for index, name in found.items():
        others = [other for other in sets[name] if other != index]
        after = flow.reached({block_of[other] for other in others}, everywhere)
        own = f"{name}$own{index}"
        for place, instruction in enumerate(code):
            if name not in uses[place] or name in writes(instruction) or block_of[place] in after:
                continue
            if any(block_of[other] == block_of[place] and other < place for other in others):
                continue
            guard = instruction.guard and renamed(instruction.guard, {name: own})
            operands = tuple(renamed(operand, {name: own}) for operand in instruction.operands)
            assert guard is None or isinstance(guard, Register)
            code[place] = replace(instruction, operands=operands, guard=guard)
            uses[place] = reads(code[place])
            registers[own] = registers[name]
            added[index] = replace(code[index], operands=(Register(own), *code[index].operands[1:]))
    return _with_added(function, code, registers, added) if added else function


def _is_pure(instruction: Instruction) -> bool:
    return opcode_of(instruction.opcode).is_pure and "cc" not in instruction.modifiers


def _with_added(
    function: Function, code: list[Instruction], registers: dict[str, str], added: dict[int, Instruction]
) -> Function:
    """Return the function with instructions put before those that have the numbers in `added`."""
    result: list[Instruction] = []
    moved: list[int] = []
    for index, instruction in enumerate(code):
        moved.append(len(result))
        if index in added:
            result.append(added[index])
        result.append(instruction)
    moved.append(len(result))
    labels = {label: moved[index] for label, index in function.labels.items()}
    return replace(function, instructions=result, registers=registers, labels=labels)
