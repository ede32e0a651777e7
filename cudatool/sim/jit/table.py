"""The instruction table: opcode -> what emits it. A new instruction is a new row."""

from __future__ import annotations

from collections.abc import Callable

from cudatool.ptx import Instruction, Symbol
from cudatool.ptx.isa import TYPE_BYTES
from cudatool.sim.jit.emit import Emitter

__all__ = ["TABLE", "Lowering", "loads_parameter", "lowers", "types_of"]

Lowering = Callable[[Emitter, Instruction], None]

TABLE: dict[str, Lowering] = {}


def lowers(opcodes: str) -> Callable[[Lowering], Lowering]:
    """Enter a function in :data:`TABLE` for each of the opcodes named."""

    def enter(function: Lowering) -> Lowering:
        for opcode in opcodes.split():
            TABLE[opcode] = function
        return function

    return enter


def types_of(instruction: Instruction) -> list[str]:
    """Return the types among an instruction's modifiers, in order."""
    return [modifier for modifier in instruction.modifiers if modifier in TYPE_BYTES]


def loads_parameter(instruction: Instruction) -> bool:
    """Return whether an instruction loads a parameter by its name: the same for all threads, while a kernel runs.

    By an address in a register, each thread may load another one.
    """
    if instruction.opcode != "ld" or "param" not in instruction.modifiers:
        return False
    return isinstance(getattr(instruction.operands[1], "base", None), Symbol)
