"""Small arrays of a thread's own, in registers rather than in local memory.

``sinf`` of a large number keeps seven words in a local array, of which it reads three at an index that it computes. The
loop over threads cannot be made of vectors with that: they share one such array, one after the other. So each word
becomes a register. What is stored at an index that is computed goes to the word that has it, and what is loaded is
chosen among all of them:

    st.local.u32 [%array+4], %r;        mov.b32 %array$1, %r;
    ld.local.u32 %r, [%at];             mov.b32 %array$chosen, %array$0;
                                        setp.eq.s64 %array$is, %at, 4;
                                        selp.b32 %array$chosen, %array$1, %array$chosen, %array$is;
                                        ...
                                        mov.b32 %r, %array$chosen;

It is done if all that happens to the array's address is that numbers are added to it, and that whole words are loaded
and stored there. Checkers see local memory as it is: they run other code.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from cudatool.ptx import (
    Address,
    Function,
    Immediate,
    Instruction,
    Operand,
    Register,
    Symbol,
    Variable,
    elements,
    opcode_of,
    symbols,
    type_bytes,
)
from cudatool.ptx.flow import reads, writes
from cudatool.sim.jit.table import types_of

__all__ = ["in_registers"]

_MOST_WORDS = 10
_MOST_ACCESSES = 24  # at a computed index: each looks at all words
_ADDS = frozenset({"mov", "add", "sub"})
_PLAIN = {"local", "v2", "v4", "u32", "s32", "b32", "f32", "u64", "s64", "b64", "f64"}


def in_registers(function: Function) -> Function:
    """Return `function` with its small local arrays in registers, where possible."""
    for variable in function.variables.values():
        if variable.space == "local" and 0 < variable.size <= 8 * _MOST_WORDS:
            words = _Words(function, variable)
            if words.find():
                function = words.rewritten()
    return function


class _Words:
    """An array, and whether every word of it can be a register (:meth:`find`).

    Attributes
    ----------
    offsets
        The registers that hold an address in it: how far that is from its beginning, None where that is not known.
    size
        Of a word, bytes; 0 until an access is found.
    """

    def __init__(self, function: Function, variable: Variable) -> None:
        self.function, self.variable = function, variable
        self.offsets: dict[str, int | None] = {}
        self.size = 0
        self._computed = 0  # accesses at a computed index

    def find(self) -> bool:
        """Find its words; return whether they can be registers."""
        code = self.function.instructions
        count = Counter(name for one in code for name in writes(one))
        seen = set()
        for index, one in enumerate(code):  # text order: an address stands before what it is used for
            if self._is_used(one):
                seen.add(index)
                if not (self._is_word(one) if one.opcode in ("ld", "st") else self._is_sum(one, count)):
                    return False
        if not self.size or self.variable.size % self.size or self._count > _MOST_WORDS:
            return False
        if self._computed > _MOST_ACCESSES or any(self._is_split(one) for one in code):
            return False
        return seen == {index for index, one in enumerate(code) if self._is_used(one)}

    def _is_used(self, one: Instruction) -> bool:
        named = any(name == self.variable.name for operand in one.operands for name in symbols(operand))
        return named or not self.offsets.keys().isdisjoint([*reads(one), *writes(one)])

    def _is_sum(self, one: Instruction, count: Mapping[str, int]) -> bool:
        """Whether an instruction sets a register of its own to an address in the array; note it."""
        names = writes(one)
        if one.opcode not in _ADDS or one.guard is not None or len(names) != 1 or count[names[0]] != 1:
            return False
        self.offsets[names[0]] = _sum(one, self.variable, self.offsets)
        return {"u64", "s64", "b64"}.issuperset(one.modifiers)

    def _is_word(self, one: Instruction) -> bool:
        """Whether an instruction accesses whole words of the array, and does nothing else with its address."""
        values = elements(one.operands[one.opcode == "st"])
        if not self._is_access(one) or "local" not in one.modifiers or not _PLAIN.issuperset(one.modifiers):
            return False
        if not all(isinstance(value, Register | Immediate) for value in values):
            return False
        if self.offsets.keys() & {value.name for value in values if isinstance(value, Register)}:
            return False
        size, offset = type_bytes(types_of(one)[-1]), self._offset(one)
        self.size = self.size or size
        if offset is None:
            self._computed += 1
        fits = len(values) == 1 if offset is None else 0 <= offset <= self.variable.size - size * len(values)
        return fits and size == self.size

    def _is_split(self, one: Instruction) -> bool:
        """Whether an access is not of whole words."""
        offset = self._offset(one) if self._is_access(one) else None
        return offset is not None and offset % self.size != 0

    def _is_access(self, one: Instruction) -> bool:
        base = getattr(_address(one), "base", None)
        if isinstance(base, Symbol):
            return base.name == self.variable.name
        return isinstance(base, Register) and base.name in self.offsets

    def _offset(self, one: Instruction) -> int | None:
        """Return where in the array an access is, None if that is not known."""
        address = _address(one)
        assert isinstance(address, Address)
        if isinstance(address.base, Symbol):
            return address.base.offset + address.offset
        assert isinstance(address.base, Register)
        base = self.offsets[address.base.name]
        return None if base is None else base + address.offset

    # ---- the code with registers ----

    def rewritten(self) -> Function:
        """Return the function with them."""
        kind = f"b{8 * self.size}"
        registers = dict(self.function.registers)
        registers |= dict.fromkeys([*map(self._word, range(self._count)), self._name("chosen")], kind)
        registers[self._name("is")] = "pred"
        code: list[Instruction] = []
        moved: list[int] = []
        first = replace(
            self.function.instructions[0], opcode="mov", modifiers=(kind,), guard=None, operands=(), location=None
        )
        # What was never stored is not defined, but the same for all that read it.
        code += [replace(first, operands=(Register(self._word(n)), Immediate(0))) for n in range(self._count)]
        for one in self.function.instructions:
            moved.append(len(code))
            if self._is_access(one):
                code += (self._loaded if one.opcode == "ld" else self._stored)(one, kind)
            else:
                code.append(self._without_symbol(one))
        moved.append(len(code))
        labels = {label: moved[index] for label, index in self.function.labels.items()}
        variables = {name: v for name, v in self.function.variables.items() if name != self.variable.name}
        return replace(self.function, instructions=code, registers=registers, labels=labels, variables=variables)

    @property
    def _count(self) -> int:
        return self.variable.size // self.size

    def _name(self, what: str) -> str:
        return f"%{self.variable.name}${what}"

    def _word(self, number: int) -> str:
        return self._name(str(number))

    def _without_symbol(self, one: Instruction) -> Instruction:
        """Return an instruction with the array's address as a number: it begins at 0."""
        operands = tuple(
            Immediate(operand.offset) if isinstance(operand, Symbol) and operand.name == self.variable.name else operand
            for operand in one.operands
        )
        return replace(one, operands=operands)

    def _asks(self, one: Instruction, number: int) -> Instruction:
        """Return what asks whether an access is of a word."""
        address = _address(one)
        assert isinstance(address, Address) and isinstance(address.base, Register)
        at = Immediate(number * self.size - address.offset)
        return replace(
            one,
            opcode="setp",
            modifiers=("eq", "s64"),
            guard=None,
            operands=(Register(self._name("is")), address.base, at),
        )

    def _loaded(self, one: Instruction, kind: str) -> Sequence[Instruction]:
        if (offset := self._offset(one)) is not None:
            words = [Register(self._word(offset // self.size + n)) for n in range(len(elements(one.operands[0])))]
            moved = zip(elements(one.operands[0]), words, strict=True)
            return [replace(one, opcode="mov", modifiers=(kind,), operands=pair) for pair in moved]
        chosen = Register(self._name("chosen"))
        move = replace(one, opcode="mov", modifiers=(kind,))
        code = [replace(move, guard=None, operands=(chosen, Register(self._word(0))))]
        for number in range(1, self._count):
            which = (chosen, Register(self._word(number)), chosen, Register(self._name("is")))
            code.append(self._asks(one, number))
            code.append(replace(one, opcode="selp", modifiers=(kind,), guard=None, operands=which))
        return [*code, replace(move, operands=(one.operands[0], chosen))]

    def _stored(self, one: Instruction, kind: str) -> Sequence[Instruction]:
        if (offset := self._offset(one)) is not None:
            words = [Register(self._word(offset // self.size + n)) for n in range(len(elements(one.operands[1])))]
            moved = zip(words, elements(one.operands[1]), strict=True)
            return [replace(one, opcode="mov", modifiers=(kind,), operands=pair) for pair in moved]
        code = []
        for number in range(self._count):
            word = Register(self._word(number))
            which = (word, one.operands[1], word, Register(self._name("is")))
            code.append(self._asks(one, number))
            code.append(replace(one, opcode="selp", modifiers=(kind,), operands=which))
        return code


def _address(one: Instruction) -> Operand | None:
    place = opcode_of(one.opcode).address
    return None if place is None or place >= len(one.operands) else one.operands[place]


def _sum(one: Instruction, variable: Variable, offsets: dict[str, int | None]) -> int | None:
    """Return the offset of what is moved or added, None if it is not known."""
    total = 0
    for place, operand in enumerate(one.operands[1:]):
        number: int | None = None
        if isinstance(operand, Immediate) and isinstance(operand.value, int):
            number = operand.value
        elif isinstance(operand, Symbol) and operand.name == variable.name:
            number = operand.offset
        elif isinstance(operand, Register):
            number = offsets.get(operand.name)
        if number is None:
            return None
        total += -number if place and one.opcode == "sub" else number
    return total
