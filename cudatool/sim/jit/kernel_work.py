"""How much a thread of a kernel is taken to do, as its PTX has it: what the cost of a launch is made of."""

from __future__ import annotations

from collections import Counter
from typing import Final

from cudatool.ptx import Flow, Function, Immediate, Operand, Register, opcode_of
from cudatool.ptx.effects import memory_operands
from cudatool.ptx.flow import writes
from cudatool.ptx.isa import Cost
from cudatool.sim.profile import ThreadWork

__all__ = ["work_of_a_thread"]

_LOOP_COUNT: Final = 8


def work_of_a_thread(function: Function) -> ThreadWork:
    """Guess a thread's work from the PTX of its kernel.

    Each loop runs 8 times, what is in more than four loops as often as in four. Sleeps of lengths that the PTX does not
    say count nothing.
    """
    flow = Flow(function)
    around = Counter(number for loop in flow.natural_loops().values() for number in loop)
    code, moved, slept, executed = function.instructions, 0, 0, 0
    for number, block in enumerate(flow.blocks):
        weight = _LOOP_COUNT ** min(around[number], 4)
        executed += weight * (block.stop - block.start)
        for instruction in code[block.start : block.stop]:
            cost = opcode_of(instruction.opcode).cost
            if cost is Cost.TRAFFIC:
                moved += weight * sum(one.width for one in memory_operands(instruction) if one.space == "global")
            elif cost is Cost.SLEEP and instruction.operands:
                slept += weight * _constant(function, instruction.operands[0])
    return ThreadWork(executed, moved, slept)


def _constant(function: Function, operand: Operand) -> int:
    """Return the value of an operand: a number, or a register that is set to one and to nothing else; else 0."""
    if isinstance(operand, Register):
        sets = [one for one in function.instructions if operand.name in writes(one)]
        operand = sets[0].operands[1] if len(sets) == 1 and sets[0].opcode == "mov" else operand
    return int(operand.value) if isinstance(operand, Immediate) else 0
