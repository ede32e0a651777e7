"""The body of a PTX function: its scopes, registers, labels and instructions."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from cudatool.limits import PTX_VECTOR
from cudatool.ptx.model import (
    Address,
    Function,
    Immediate,
    Instruction,
    Location,
    Operand,
    Pair,
    PtxError,
    Register,
    Symbol,
    Variable,
    VectorOperand,
    register_names,
    type_bytes,
)
from cudatool.ptx.tokens import LINKAGE, SPACES, TYPE, VECTOR, immediate

if TYPE_CHECKING:
    from cudatool.ptx.parser import Parser

__all__ = ["BodyParser"]

_COLORS: Final = {**{name: name for name in "xyzw"}, **dict(zip("rgba", "xyzw", strict=True))}
_MOST_CALLERS: Final = 64
_SELECTOR: Final = re.compile(r"b[0-7]{1,4}|h[0-3]{1,2}")


class BodyParser:
    """Parses one function body and resolves its nested scopes to unique names."""

    def __init__(self, parser: Parser, function: Function) -> None:
        self.parser = parser
        self.function = function
        self.scopes: list[dict[str, str]] = []
        self.vectors: dict[str, tuple[Register, ...]] = {}
        self.opened = 0
        self.callers: dict[tuple[int, int, int], tuple[tuple[int, int], ...]] = {}  # of each place's last .loc

    def parse(self) -> None:
        self.block()
        labels = self.function.labels
        for instruction in self.function.instructions:
            if instruction.opcode == "bra":
                target = instruction.operands[0] if instruction.operands else None
                if not isinstance(target, Symbol) or target.name not in labels:
                    raise PtxError(f"branch to an unknown label {getattr(target, 'name', target)!r}", instruction.line)

    def block(self) -> None:
        parser = self.parser
        parser.expect("{")
        parser.enter()
        self.scopes.append({})
        if len(self.scopes) == 1:
            for parameter in (*self.function.returns, *self.function.params):
                if parameter.space == "reg":
                    self.register(parameter.name, parameter.type, len(parameter.registers))
        self.declare_labels()
        while not parser.accept("}"):
            if not parser.peek:
                parser.next()  # says that the text ends here
            self.statement()
        self.scopes.pop()
        parser.leave()

    def declare_labels(self) -> None:
        """Give the labels of the scope just entered unique names, as branches to them may come first."""
        parser = self.parser
        depth, index = 1, parser.position
        outer = len(self.scopes) == 1
        while depth and parser.tokens[index]:
            token = parser.tokens[index]
            if token == "{":
                depth += 1
            elif token == "}":
                depth -= 1
            elif depth == 1 and parser.tokens[index + 1] == ":" and parser.tokens[index - 1] in (";", "{", "}", ":"):
                self.declare(token, unique=outer)
            index += 1

    def declare(self, name: str, *, unique: bool = False) -> str:
        """Enter `name` in the innermost scope and return the name that stands for it in the whole function."""
        if unique or not (self.function_knows(name) or len(self.scopes) > 1):
            full = name
        else:
            self.opened += 1
            full = f"{name}.{self.opened}"
        self.scopes[-1][name] = full
        return full

    def function_knows(self, name: str) -> bool:
        return name in self.function.registers or name in self.function.variables

    def declared(self, name: str) -> str | None:
        """Return the unique name of what is declared as `name` in the scopes here, if anything is."""
        for scope in reversed(self.scopes):
            if name in scope:
                return scope[name]
        return None

    def resolve(self, name: str) -> str:
        """Return the unique name of what is called `name` here: a variable, a label, an element of a vector."""
        found = self.declared(name)
        if found is not None:
            return found
        base, _, element = name.rpartition(".")
        vector = self.declared(base) if element in _COLORS else None
        return f"{vector}.{_COLORS[element]}" if vector in self.vectors else name

    def statement(self) -> None:
        parser = self.parser
        token = parser.peek
        if token == "{":
            self.block()
        elif token == ";":
            parser.next()
        elif token.startswith("."):
            parser.next()
            self.directive(token)
        elif parser.tokens[parser.position + 1] == ":":
            parser.next()
            parser.next()
            if parser.peek == ".branchtargets":
                parser.next()
                names = []
                while not parser.accept(";"):
                    names.append(self.resolve(parser.next()))
                    parser.accept(",")
                self.function.branch_targets[self.resolve(token)] = tuple(names)
            elif parser.peek in (".callprototype", ".calltargets"):
                parser.skip_statement()
            else:
                self.function.labels[self.resolve(token)] = len(self.function.instructions)
        else:
            self.instruction()

    def directive(self, token: str) -> None:
        parser = self.parser
        if token == ".reg":
            self.registers()
        elif token in SPACES or token in LINKAGE:
            external = token == ".extern"
            if token in LINKAGE:
                token = parser.next()
            for variable in parser.variables(token, external=external):
                if token in (".global", ".const"):
                    self.hoist(variable)
                    continue
                variable.name = self.declare(variable.name)
                self.function.variables[variable.name] = variable
        elif token == ".loc":
            self.source_line()
        elif token == ".pragma":
            parser.skip_statement()
        else:
            raise PtxError(f"unexpected {token!r} in a function", parser.lines[parser.position - 1])

    def source_line(self) -> None:
        parser = self.parser
        place = parser.integer(), parser.integer(), parser.integer()
        callers: tuple[tuple[int, int], ...] = ()
        while parser.accept(","):  # function_name $L__info_string0+8, inlined_at 1 10 3
            if parser.next() == "inlined_at":
                # Where the call itself was inlined says the last .loc of its place.
                call = parser.integer(), parser.integer(), parser.integer()
                callers = (call[:2], *self.callers.get(call, ()))[:_MOST_CALLERS]
            else:
                parser.next()
                if parser.accept("+"):
                    parser.integer()
        self.callers[place] = callers
        if place[1]:  # 0 is code of no line
            parser.location = Location(*place, callers)

    def hoist(self, variable: Variable) -> None:
        """Enter a variable declared in a function that lives as long as the module."""
        name = f"{self.function.name}.{variable.name}.{len(self.parser.hoisted)}"
        self.scopes[-1][variable.name] = variable.name = name
        self.parser.hoisted.append(f"{name} {variable.space} {variable.size}\n")
        self.parser.result.variables[name] = variable

    def registers(self) -> None:
        parser = self.parser
        count = 1
        if parser.peek in VECTOR:
            count = VECTOR[parser.next()]
        type_name = parser.next()
        if not TYPE.match(type_name):
            raise PtxError(f"unknown register type {type_name!r}", parser.line)
        while True:
            name = parser.next()
            names = [name]
            if parser.accept("<"):
                names = [f"{name}{index}" for index in range(parser.positive(parser.unnamed // count))]
                parser.unnamed -= len(names) * count
                parser.expect(">")
            for name in names:
                self.register(name, type_name[1:], count)
            if parser.accept(";"):
                return
            parser.expect(",")

    def register(self, name: str, type_name: str, count: int) -> None:
        """Declare a register, or a vector of `count`."""
        full = self.declare(name)
        elements = register_names(full, count)
        self.function.registers.update(dict.fromkeys(elements, type_name))
        if count > 1:
            self.vectors[full] = tuple(Register(element) for element in elements)

    # ---- instructions ----

    def instruction(self) -> None:
        parser = self.parser
        guard = None
        line = parser.line
        if parser.accept("@"):
            negated = parser.accept("!")
            guard = Register(self.resolve(parser.next()), negated)
        opcode, *modifiers = parser.next().split(".")
        if not opcode.isidentifier():
            raise PtxError(f"expected an instruction, found {opcode!r}", line)
        operands: list[Operand] = []
        parse_operand: Callable[[], Operand] = self.call_operand if opcode == "call" else self.operand
        if parser.peek != ";":
            operands.append(parse_operand())
            while parser.accept(","):
                operands.append(parse_operand())
        parser.expect(";")
        instruction = Instruction(opcode, tuple(modifiers), tuple(operands), guard, line, parser.location)
        self.function.instructions.append(instruction)

    def call_operand(self) -> Operand:
        if not self.parser.accept("("):
            return self.operand()
        elements = []
        while not self.parser.accept(")"):
            elements.append(self.operand())
            self.parser.accept(",")
        return VectorOperand(tuple(elements))

    def operand(self) -> Operand:
        parser = self.parser
        token = parser.next()
        if token == "[":
            return self.address()
        if token == "{":
            elements = []
            parser.enter()
            while not parser.accept("}"):
                elements.append(self.operand())
                if len(elements) > PTX_VECTOR:
                    raise PtxError(f"more than {PTX_VECTOR:,} registers in braces", parser.line)
                parser.accept(",")
            parser.leave()
            return VectorOperand(tuple(elements))
        if token == "!":
            return Register(self.resolve(parser.next()), True)
        if token == "-":
            literal = immediate(parser.next())
            return replace(literal, value=-literal.value, bits=literal.bits ^ (1 << (literal.width or 64) - 1))
        if token[0].isdigit():
            return immediate(token)
        name = self.resolve(token)
        if name in self.vectors:
            return VectorOperand(self.vectors[name])
        base, _, selector = token.rpartition(".")
        if name == token and _SELECTOR.fullmatch(selector) and self.resolve(base) in self.function.registers:
            return Register(self.resolve(base), selector=selector)
        if not self.is_register(name):
            offset = 0
            if parser.peek in ("+", "-") and not token.startswith("%"):
                offset = self.offset()
            return Symbol(name, offset)
        register = Register(name)
        if parser.accept("|"):
            return Pair(register, Register(self.resolve(parser.next())))
        if parser.peek in ("+", "-"):
            return self.sum(register)
        return register

    def sum(self, register: Register) -> Register:
        """Return a register that holds the sum of one and a constant, which an instruction of its own computes."""
        type_name = self.function.registers.get(register.name, "b32")
        result = Register(f"{register.name}.sum.{len(self.function.instructions)}")
        self.function.registers[result.name] = type_name
        operands = (result, register, Immediate(self.offset()))
        kind = f"u{8 * type_bytes(type_name)}"
        addition = Instruction("add", (kind,), operands, None, self.parser.line, self.parser.location)
        self.function.instructions.append(addition)
        return result

    def is_register(self, name: str) -> bool:
        return name in self.function.registers or name.startswith("%") or name in ("_", "WARP_SZ")

    def offset(self) -> int:
        sign = -1 if self.parser.next() == "-" else 1
        return sign * self.parser.integer()

    def address(self) -> Address:
        parser = self.parser
        base: Register | Symbol | None = None
        offset = 0
        if parser.peek[:1].isdigit() or parser.peek == "-":
            offset = parser.integer()
        else:
            name = self.resolve(parser.next())
            base = Register(name) if self.is_register(name) else Symbol(name)
            while parser.peek in ("+", "-"):
                offset += self.offset()
        coordinates = []
        parser.enter()
        while parser.accept(","):
            coordinates.append(self.operand())
        parser.leave()
        parser.expect("]")
        return Address(base, offset, tuple(coordinates))
