"""Reading instructions and their operands, whatever the instruction does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from cudatool.ptx.model import (
    Address,
    Instruction,
    Operand,
    Pair,
    PtxError,
    Register,
    Symbol,
    VectorOperand,
)

__all__ = ["GENERIC", "SPACES", "call_parts", "elements", "renamed", "space_of", "symbols"]

GENERIC: Final = "generic"

SPACES: Final = {
    "global": "global",
    "const": "const",
    "local": "local",
    "shared": "shared",
    "shared::cta": "shared",
    "shared::cluster": "shared",
    "param": "param",
    "param::entry": "param",
    "param::func": "param",
}
"""State space, by the modifier that names it (PTX ISA, 5.1)."""


def space_of(instruction: Instruction) -> str:
    """Return the state space that an instruction names, :data:`GENERIC` if none."""
    return next((SPACES[m] for m in instruction.modifiers if m in SPACES), GENERIC)


def elements(operand: Operand) -> tuple[Operand, ...]:
    """Return the elements of a vector operand; anything else is its only one."""
    return operand.elements if isinstance(operand, VectorOperand) else (operand,)


def symbols(operand: Operand) -> Iterator[str]:
    """Yield the variables, labels and functions that an operand names."""
    if isinstance(operand, Symbol):
        yield operand.name
    elif isinstance(operand, VectorOperand):
        for element in operand.elements:
            yield from symbols(element)
    elif isinstance(operand, Address):
        if isinstance(operand.base, Symbol):
            yield operand.base.name
        for coordinate in operand.coordinates:
            yield from symbols(coordinate)


def renamed(operand: Operand, names: dict[str, str]) -> Operand:
    """Return an operand with registers and symbols named as `names` says."""
    if isinstance(operand, Register | Symbol):
        return replace(operand, name=names[operand.name]) if operand.name in names else operand
    if isinstance(operand, Address):
        base = operand.base and replace(operand.base, name=names.get(operand.base.name, operand.base.name))
        return replace(operand, base=base, coordinates=tuple(renamed(one, names) for one in operand.coordinates))
    if isinstance(operand, VectorOperand):
        return VectorOperand(tuple(renamed(element, names) for element in operand.elements))
    if isinstance(operand, Pair):
        first, second = renamed(operand.first, names), renamed(operand.second, names)
        assert isinstance(first, Register) and isinstance(second, Register)
        return Pair(first, second)
    return operand


def call_parts(call: Instruction) -> tuple[tuple[Operand, ...], Operand, tuple[Operand, ...]]:
    """Return the results, the target (a register for an indirect call) and the arguments of a call.

    Raises
    ------
    PtxError
        It has no target.
    """
    results: tuple[Operand, ...] = ()
    rest = call.operands
    if rest and isinstance(rest[0], VectorOperand):
        results, rest = rest[0].elements, rest[1:]
    if not rest:
        raise PtxError("these are no operands of call", call.line)
    given = rest[1] if len(rest) > 1 else None
    return results, rest[0], given.elements if isinstance(given, VectorOperand) else ()
