"""From PTX text to :class:`~cudatool.ptx.model.Module`.

The grammar is that of the PTX ISA, chapters 4 (syntax), 5 (variables), 7 (functions) and 11 (directives). Nothing here
knows what an instruction does.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from dataclasses import replace
from math import prod

from cudatool.ptx.model import (
    Address,
    Function,
    Immediate,
    Instruction,
    Location,
    Module,
    Operand,
    Pair,
    PtxError,
    Register,
    Relocation,
    Symbol,
    Variable,
    VectorOperand,
    register_names,
    type_bytes,
)

__all__ = ["parse"]

_TOKEN = re.compile(
    r"(?P<skip>[ \t\r]+|//[^\n]*)"
    r"|(?P<newline>\n)"
    r"|(?P<comment>/\*.*?\*/)"
    r"|(?P<token>"
    r'"[^"\n]*"'
    r"|0[fFdD][0-9a-fA-F]{8,16}|0[xX][0-9a-fA-F]+U?|0[bB][01]+U?|\d+\.\d*(?:[eE][+-]?\d+)?|\d+[eE][+-]?\d+|\d+U?"
    r"|[A-Za-z_$%][\w$]*(?:(?:\.|::)[\w$]+)*"
    r"|\.[A-Za-z_]\w*(?:::\w+)*"
    r"|<<|>>|[{}()\[\],;:=+\-!|<>@~*/&^?])",
    re.DOTALL,
)
_SPACES = {".global", ".const", ".shared", ".local", ".param"}
_LINKAGE = {".visible", ".extern", ".weak", ".common"}
_TYPE = re.compile(r"\.(?:[usb](?:8|16|32|64|128)|b?f16(?:x2)?|tf32|f32|f64|pred|texref|samplerref|surfref)$")
_VECTOR = {".v2": 2, ".v4": 4, ".v8": 8}
_COLORS = {**{name: name for name in "xyzw"}, **dict(zip("rgba", "xyzw", strict=True))}
_SELECTOR = re.compile(r"b[0-7]{1,4}|h[0-3]{1,2}")
_NO_VALUE = {"noreturn", "explicitcluster", "blocksareclusters"}


def parse(text: str | bytes, *, line: int = 1) -> Module:
    """Parse a PTX module. Its first line is called `line`.

    Raises
    ------
    PtxError
        The text is not PTX; names the line.
    """
    if isinstance(text, bytes):
        text = text.rstrip(b"\0").decode("utf-8", "replace")
    return _Parser(text, line).module()


class _Parser:
    def __init__(self, text: str, line: int) -> None:
        self.text = text
        self.tokens: list[str] = []
        self.lines: list[int] = []
        self.starts: list[int] = []
        self.position = 0
        self._tokenize(line)
        self.result = Module()
        self.hoisted: list[str] = []  # variables of the module that are declared in functions
        self.location: Location | None = None

    def _tokenize(self, line: int) -> None:
        position, text, match = 0, self.text, _TOKEN.match
        while position < len(text):
            found = match(text, position)
            if found is None:
                raise PtxError(f"unexpected character {text[position]!r}", line)
            kind = found.lastgroup
            if kind == "token":
                self.tokens.append(found.group())
                self.lines.append(line)
                self.starts.append(position)
            elif kind == "newline":
                line += 1
            elif kind == "comment":
                line += found.group().count("\n")
            position = found.end()
        self.tokens.append("")  # the end: matches nothing
        self.lines.append(line)
        self.starts.append(len(text))

    # ---- tokens ----

    @property
    def line(self) -> int:
        return self.lines[self.position]

    @property
    def peek(self) -> str:
        return self.tokens[self.position]

    def next(self) -> str:
        token = self.tokens[self.position]
        if not token:
            raise PtxError("the text ends in the middle of a statement", self.line)
        self.position += 1
        return token

    def accept(self, token: str) -> bool:
        if self.tokens[self.position] == token:
            self.position += 1
            return True
        return False

    def expect(self, token: str) -> None:
        if not self.accept(token):
            raise PtxError(f"expected {token!r}, found {self.peek or 'the end'!r}", self.line)

    def integer(self) -> int:
        sign = -1 if self.accept("-") else 1
        token = self.next()
        try:
            return sign * int(token.rstrip("U"), 0)
        except ValueError:
            if re.fullmatch("[0-7]+U?", token):  # 012 is octal, and Python does not read it so
                return sign * int(token.rstrip("U"), 8)
            raise PtxError(f"expected an integer, found {token!r}", self.lines[self.position - 1]) from None

    def skip_block(self) -> None:
        self.expect("{")
        depth = 1
        while depth:
            depth += {"{": 1, "}": -1}.get(self.next(), 0)

    def skip_statement(self) -> None:
        while self.next() != ";":
            pass

    # ---- module scope ----

    def module(self) -> Module:
        outside: list[str] = []
        begin = 0
        while self.peek:
            linkage: set[str] = set()
            start = self.position
            while self.peek in _LINKAGE:
                linkage.add(self.next())
            token = self.next()
            if token in (".entry", ".func"):
                outside.append(self.text[begin : self.starts[start]])
                function = self.function(token == ".entry")
                begin = self.starts[self.position]
                function.text = self.text[self.starts[start] : begin]
                function.linkage = "".join(linkage)[1:]
                known = self.result.functions.get(function.name)
                if known is None or not known.has_body:
                    self.result.functions[function.name] = function
            elif token in _SPACES:
                for variable in self.variables(token, external=".extern" in linkage):
                    variable.linkage = "".join(linkage)[1:]
                    known_variable = self.result.variables.get(variable.name)
                    if known_variable is None or known_variable.external:
                        self.result.variables[variable.name] = variable
            else:
                self.directive(token)
        outside.append(self.text[begin:])
        self.result.preamble = "".join((*outside, *self.hoisted))
        if not self.result.version[0]:
            raise PtxError("no .version directive: not a PTX module")
        return self.result

    def directive(self, token: str) -> None:
        if token == ".version":
            found = re.fullmatch(r"(\d+)(?:\.(\d+))?", self.next())
            if found is None:
                raise PtxError("no version after .version", self.line)
            self.result.version = (int(found[1]), int(found[2] or 0))
        elif token == ".target":
            self.result.target = self.next()
            while self.accept(","):
                self.next()
        elif token == ".address_size":
            if self.integer() != 64:
                raise PtxError("only 64-bit addresses are supported", self.line)
        elif token == ".file":
            number = self.integer()
            self.result.files[number] = _text(self.next())
            while self.accept(","):
                self.next()
        elif token == ".section":
            self.next()
            self.skip_block()
        elif token in (".pragma", ".alias"):
            self.skip_statement()
        elif token != ";":
            raise PtxError(f"unexpected {token!r}", self.lines[self.position - 1])

    # ---- variables ----

    def variables(self, space: str, *, external: bool = False) -> list[Variable]:
        """Parse the rest of a declaration after its state space, to its semicolon."""
        found = [variable := self.variable(space, external=external)]
        while self.accept(","):
            found.append(self.declarator(replace(variable, size=type_bytes(variable.type))))
        self.expect(";")
        return found

    def variable(self, space: str, *, external: bool = False) -> Variable:
        align, count = 0, 1
        type_name, pointer, managed = "", False, False
        while self.peek.startswith("."):
            token = self.next()
            if token == ".align":
                value = self.integer()
                align = align if pointer else value  # after .ptr it is the alignment of what is pointed to
            elif token == ".ptr":
                pointer = True
            elif token == ".attribute":
                managed = "".join(iter(self.next, ")")).endswith(".managed")
            elif token in _VECTOR:
                count = _VECTOR[token]
            elif _TYPE.match(token):
                type_name = token[1:]
            elif token not in _SPACES:
                raise PtxError(f"unexpected {token!r} in a declaration", self.lines[self.position - 1])
        if not type_name:
            raise PtxError("a declaration without a type", self.line)
        size = 8 if type_name.endswith("ref") else type_bytes(type_name)
        variable = Variable(
            "", space[1:], type_name, size * count, align or size * count, external=external, pointer=pointer
        )
        variable.managed = managed
        return self.declarator(variable)

    def declarator(self, variable: Variable) -> Variable:
        """Parse ``name[dimensions] = initializer`` into `variable`."""
        variable.name = self.next()
        dimensions = []
        while self.accept("["):
            dimensions.append(0 if self.peek == "]" else self.integer())
            self.expect("]")
        variable.size *= prod(dimensions)
        if self.accept("="):
            self.initializer(variable, dimensions)
        return variable

    def initializer(self, variable: Variable, dimensions: list[int]) -> None:
        size = type_bytes(variable.type)
        data = bytearray()
        relocations: list[Relocation] = []
        strides = [size * prod(dimensions[level + 1 :]) for level in range(len(dimensions))] or [size]

        def value(offset: int, level: int) -> None:
            if self.accept("{"):
                while not self.accept("}"):
                    value(offset, level + 1)
                    offset += strides[level] if level < len(strides) else size
                    self.accept(",")
                return
            data.extend(bytes(max(offset + size - len(data), 0)))
            number, symbol, mask = self.constant(variable.type)
            if symbol and mask is None:
                relocations.append(Relocation(offset, symbol, int(number)))
            elif symbol:
                raise PtxError("a byte-wise address in an initializer is not supported", self.line)
            else:
                data[offset : offset + size] = _encode(number, variable.type)

        value(0, 0)
        variable.initial, variable.relocations = bytes(data), tuple(relocations)
        if not variable.size and dimensions:
            variable.size = len(data)

    def constant(self, type_name: str) -> tuple[int | float, str, int | None]:
        """Parse one element of an initializer: a number, or a symbol with an addend, and the mask applied to it."""
        number: int | float = 0
        symbol, mask, sign, wrapped = "", None, 1, 0
        while self.peek not in (",", "}", ";"):
            token = self.next()
            if token in "+-":
                sign = -1 if token == "-" else 1
            elif token in ("generic", "mask"):
                pass
            elif token == "(":
                wrapped += 1
            elif token == ")" and wrapped:
                wrapped -= 1
            elif token[0].isdigit():
                literal = _number(token)
                if self.peek == "(":  # 0xFF00(symbol)
                    mask = int(literal.value)
                elif literal.width and not type_name.startswith(("f", "bf")):
                    number = literal.bits
                else:
                    number = sign * literal.value
            else:
                symbol = token
        return number, symbol, mask

    # ---- functions ----

    def parameters(self) -> tuple[Variable, ...]:
        found = []
        self.expect("(")
        while not self.accept(")"):
            space = self.next()
            if space not in (".param", ".reg"):
                raise PtxError(f"expected a parameter, found {space!r}", self.line)
            found.append(self.variable(space))
            self.accept(",")
        return tuple(found)

    def function(self, is_kernel: bool) -> Function:
        line = self.line
        returns = self.parameters() if self.peek == "(" else ()
        name = self.next()
        params = self.parameters() if self.peek == "(" else ()
        function = Function(name, is_kernel, params, returns, line)
        while self.peek.startswith("."):
            directive = self.next()[1:]
            if directive == "pragma":
                self.skip_statement()
            elif directive == "attribute":
                while self.next() != ")":
                    pass
            elif directive in _NO_VALUE:
                function.directives[directive] = ()
            else:
                values = [self.integer()]
                while self.accept(","):
                    values.append(self.integer())
                function.directives[directive] = tuple(values)
        if self.accept(";"):
            function.has_body = False
            return function
        self.location = None
        _Body(self, function).parse()
        return function


class _Body:
    """Parses one function body and resolves its nested scopes to unique names."""

    def __init__(self, parser: _Parser, function: Function) -> None:
        self.parser = parser
        self.function = function
        self.scopes: list[dict[str, str]] = []
        self.vectors: dict[str, tuple[Register, ...]] = {}
        self.opened = 0

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

    def resolve(self, name: str) -> str:
        for scope in reversed(self.scopes):
            if name in scope:
                return scope[name]
        vector, _, element = name.rpartition(".")
        if element in _COLORS and self.resolve(vector) in self.vectors:
            return f"{self.resolve(vector)}.{_COLORS[element]}"
        return name

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
        elif token in _SPACES or token in _LINKAGE:
            external = token == ".extern"
            if token in _LINKAGE:
                token = parser.next()
            for variable in parser.variables(token, external=external):
                if token in (".global", ".const"):
                    self.hoist(variable)
                    continue
                variable.name = self.declare(variable.name)
                self.function.variables[variable.name] = variable
        elif token == ".loc":
            file, line, column = parser.integer(), parser.integer(), parser.integer()
            parser.location = Location(file, line, column) if line else parser.location
            while parser.accept(","):  # function_name $L__info_string0+8, inlined_at 1 10 3
                if parser.next() == "inlined_at":
                    parser.integer(), parser.integer(), parser.integer()
                else:
                    parser.next()
                    if parser.accept("+"):
                        parser.integer()
        elif token == ".pragma":
            parser.skip_statement()
        else:
            raise PtxError(f"unexpected {token!r} in a function", parser.lines[parser.position - 1])

    def hoist(self, variable: Variable) -> None:
        """Enter a variable declared in a function that lives as long as the module."""
        name = f"{self.function.name}.{variable.name}.{len(self.parser.hoisted)}"
        self.scopes[-1][variable.name] = variable.name = name
        self.parser.hoisted.append(f"{name} {variable.space} {variable.size}\n")
        self.parser.result.variables[name] = variable

    def registers(self) -> None:
        parser = self.parser
        count = 1
        if parser.peek in _VECTOR:
            count = _VECTOR[parser.next()]
        type_name = parser.next()
        if not _TYPE.match(type_name):
            raise PtxError(f"unknown register type {type_name!r}", parser.line)
        while True:
            name = parser.next()
            names = [name]
            if parser.accept("<"):
                names = [f"{name}{index}" for index in range(parser.integer())]
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
            while not parser.accept("}"):
                elements.append(self.operand())
                parser.accept(",")
            return VectorOperand(tuple(elements))
        if token == "!":
            return Register(self.resolve(parser.next()), True)
        if token == "-":
            literal = _number(parser.next())
            return replace(literal, value=-literal.value, bits=literal.bits ^ (1 << (literal.width or 64) - 1))
        if token[0].isdigit():
            return _number(token)
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
        while parser.accept(","):
            coordinates.append(self.operand())
        parser.expect("]")
        return Address(base, offset, tuple(coordinates))


def _text(literal: str) -> str:
    """Return what a string literal says: NVRTC writes the bytes of a path that are not ASCII as octal escapes."""
    escaped = re.compile(rb"\\([0-7]{3})")
    data = escaped.sub(lambda found: bytes([int(found[1], 8) & 0xFF]), literal.strip('"').encode())
    return data.decode("utf-8", "replace")


def _number(token: str) -> Immediate:
    prefix = token[:2].lower()
    if prefix == "0f" and len(token) == 10:
        bits = int(token[2:], 16)
        return Immediate(struct.unpack("<f", struct.pack("<I", bits))[0], 32, bits)
    if prefix == "0d" and len(token) == 18:
        bits = int(token[2:], 16)
        return Immediate(struct.unpack("<d", struct.pack("<Q", bits))[0], 64, bits)
    token = token.rstrip("U")
    try:
        if prefix in ("0x", "0b"):
            return Immediate(int(token, 0))
        if not token.isdigit():
            value = float(token)
            return Immediate(value, 64, struct.unpack("<Q", struct.pack("<d", value))[0])
        return Immediate(int(token, 8 if token[0] == "0" else 10))
    except ValueError:
        raise PtxError(f"{token!r} is no number") from None


def _encode(number: int | float, type_name: str) -> bytes:
    if type_name in ("f32", "f64"):
        return struct.pack("<f" if type_name == "f32" else "<d", number)
    size = type_bytes(type_name)
    return (int(number) & ((1 << 8 * size) - 1)).to_bytes(size, "little")
