"""What one instruction does: which of its operands it accesses, in which state space and how, and which it sets.

The rules are those of the PTX ISA, chapter 9.7 (instructions). An instruction that is not known here counts as one
that reads and writes wherever its address operands point.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from cudatool.ptx.isa import TYPE_BYTES, Mode, OpcodeAccess, opcode_of
from cudatool.ptx.model import Address, Immediate, Instruction, VectorOperand
from cudatool.ptx.operands import GENERIC, SPACES, space_of

__all__ = ["MemoryOperand", "has_result", "is_asynchronous", "is_read_only", "memory_operands", "value_type"]


@dataclass(frozen=True, slots=True)
class MemoryOperand:
    """An access that an instruction makes.

    Attributes
    ----------
    space
        ``"global"``, ``"const"``, ``"shared"``, ``"local"``, ``"param"`` or :data:`GENERIC`.
    width
        Bytes that a thread accesses, 0 where the instruction alone does not tell.
    """

    address: Address
    space: str
    mode: Mode
    width: int


def value_type(instruction: Instruction) -> str:
    """Return the type of the value that an instruction moves, empty if it names none."""
    return next((m for m in reversed(instruction.modifiers) if m in TYPE_BYTES), "")


def has_result(instruction: Instruction) -> bool:
    """Return whether the first operand of an instruction, if that is no address, is a register that it sets."""
    if instruction.opcode in ("bar", "barrier"):
        return "red" in instruction.modifiers
    return opcode_of(instruction.opcode).has_result


def is_asynchronous(instruction: Instruction) -> bool:
    """Return whether an instruction accesses memory after it was executed."""
    return opcode_of(instruction.opcode).can_be_asynchronous and not _ASYNCHRONOUS.isdisjoint(instruction.modifiers)


def is_read_only(instruction: Instruction) -> bool:
    """Return whether an instruction loads data that nothing may write as long as the kernel runs."""
    return instruction.opcode == "ldu" or (instruction.opcode == "ld" and "nc" in instruction.modifiers)


def _width(instruction: Instruction) -> int:
    size = TYPE_BYTES.get(value_type(instruction), 0)
    vectors = [operand for operand in instruction.operands if isinstance(operand, VectorOperand)]
    return size * max((len(vector.elements) for vector in vectors), default=1)


def memory_operands(instruction: Instruction) -> list[MemoryOperand]:
    """Return the accesses that an instruction makes, in the order of its operands."""
    addresses = [operand for operand in instruction.operands if isinstance(operand, Address)]
    if not addresses:
        return []
    opcode, modifiers, space = instruction.opcode, instruction.modifiers, space_of(instruction)
    access = opcode_of(opcode).access
    if access is OpcodeAccess.NONE:
        return []
    if is_asynchronous(instruction):
        return _asynchronous(instruction, addresses)
    if opcode == "wmma":
        size = TYPE_BYTES.get(value_type(instruction), 0)
        mode = Mode.READ if "load" in modifiers else Mode.WRITE
        return [MemoryOperand(addresses[0], space, mode, size)]
    if access is OpcodeAccess.BY_MODIFIER:
        found = next((mode for modifier, mode in _MODIFIERS.items() if modifier in modifiers), None)
    else:
        found = _MODES.get(access)
    if found is None:
        return [MemoryOperand(address, GENERIC, Mode.READ | Mode.WRITE, 0) for address in addresses]
    return [MemoryOperand(addresses[0], space, found, _width(instruction))]


_ASYNCHRONOUS: Final = frozenset({"async", "bulk"})
_MODES: Final = {OpcodeAccess.READ: Mode.READ, OpcodeAccess.WRITE: Mode.WRITE, OpcodeAccess.ATOMIC: Mode.ATOMIC}
_MODIFIERS: Final = {"ld_reduce": Mode.READ, "st": Mode.WRITE, "red": Mode.ATOMIC}  # of multimem


def _asynchronous(instruction: Instruction, addresses: list[Address]) -> list[MemoryOperand]:
    """Return the accesses of ``cp.async`` with ``bulk`` and ``reduce``, ``st.async``, ``st.bulk``, ``red.async``."""
    modifiers, mode = instruction.modifiers, _MODES.get(opcode_of(instruction.opcode).access)
    if mode is not None:  # st, red: into shared memory, of the cluster or of the block
        return [MemoryOperand(addresses[0], "shared", mode, _width(instruction))]
    spaces = [SPACES[m] for m in modifiers if m in SPACES]
    if len(addresses) < 2 or len(spaces) < 2 or "tensor" in modifiers:
        return []  # a prefetch, a wait; a tensor map alone says where
    sizes = [o.value for o in instruction.operands if isinstance(o, Immediate) and isinstance(o.value, int)]
    width = sizes[0] if sizes and "bulk" not in modifiers else 0
    to_mode = Mode.ATOMIC if "reduce" in modifiers else Mode.WRITE
    return [
        MemoryOperand(addresses[0], spaces[0], to_mode, width),
        MemoryOperand(addresses[1], spaces[1], Mode.READ, width),
    ]
