"""From PTX text to :class:`~cudatool.ptx.model.Module`.

The grammar is that of the PTX ISA, chapters 4 (syntax), 5 (variables), 7 (functions) and 11 (directives). Nothing here
knows what an instruction does.
"""

from __future__ import annotations

import re
import struct
from dataclasses import replace
from math import prod

from cudatool.limits import PARAMETERS, PTX_DECLARED
from cudatool.ptx.body import BodyParser
from cudatool.ptx.model import (
    Function,
    Location,
    Module,
    PtxError,
    Relocation,
    Variable,
    type_bytes,
)
from cudatool.ptx.tokens import LINKAGE, SPACES, TYPE, VECTOR, Tokens, immediate

__all__ = ["Parser", "parse"]

_LARGEST = (1 << 48) - 1  # bytes of a variable: no device has more addresses
_LARGEST_PARAMETER = 1 << 18  # bytes; what copies one is written out
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
    return Parser(text, line).module()


class Parser(Tokens):
    """Parses the module scope: directives, variables, functions."""

    def __init__(self, text: str, line: int) -> None:
        super().__init__(text, line)
        self.result = Module()
        self.hoisted: list[str] = []  # variables of the module that are declared in functions
        self.location: Location | None = None
        # `%r<9>` makes work without end of a few characters, and so does an initializer of a nested array. A text
        # cannot name more registers than it has characters.
        self.unnamed = PTX_DECLARED + len(text)  # registers that may still be declared in numbers
        self.unwritten = PTX_DECLARED + 8 * len(text)  # bytes that may still be initialized

    def module(self) -> Module:
        outside: list[str] = []
        begin = 0
        while self.peek:
            linkage: set[str] = set()
            start = self.position
            while self.peek in LINKAGE:
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
            elif token in SPACES:
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
                value = self.positive(1 << 31)
                if value & (value - 1):
                    raise PtxError(f"an alignment of {value}, which is no power of two", self.line)
                align = align if pointer else value  # after .ptr it is the alignment of what is pointed to
            elif token == ".ptr":
                pointer = True
            elif token == ".attribute":
                managed = "".join(iter(self.next, ")")).endswith(".managed")
            elif token in VECTOR:
                count = VECTOR[token]
            elif TYPE.match(token):
                type_name = token[1:]
            elif token not in SPACES:
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
            dimensions.append(0 if self.peek == "]" else self.positive(_LARGEST))
            self.expect("]")
        variable.size *= prod(dimensions)
        largest = _LARGEST_PARAMETER if variable.space in ("param", "reg") else _LARGEST
        if variable.size > largest:
            raise PtxError(f"{variable.name} has more than {largest} bytes", self.line)
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
                self.enter()
                while not self.accept("}"):
                    value(offset, level + 1)
                    offset += strides[level] if level < len(strides) else size
                    self.accept(",")
                self.leave()
                return
            more = max(offset + size - len(data), 0)
            self.unwritten -= more
            if self.unwritten < 0:
                raise PtxError(f"the initializer of {variable.name} leaves out too much", self.line)
            data.extend(bytes(more))
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
                literal = immediate(token)
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
        if is_kernel and len(params) > PARAMETERS:
            raise PtxError(f"{name} has more than {PARAMETERS:,} parameters", line)
        function = Function(name, is_kernel, params, returns, line)
        while self.peek.startswith("."):
            directive = self.next()[1:]
            if directive == "pragma":
                function.pragmas += (self.next().strip('"'),)
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
        BodyParser(self, function).parse()
        return function


def _encode(number: int | float, type_name: str) -> bytes:
    try:
        if type_name in ("f32", "f64"):
            return struct.pack("<f" if type_name == "f32" else "<d", number)
        size = type_bytes(type_name)
        return (int(number) & ((1 << 8 * size) - 1)).to_bytes(size, "little")
    except (OverflowError, ValueError):  # ValueError: not a number
        raise PtxError(f"{number} is no value of .{type_name}") from None


def _text(literal: str) -> str:
    """Return what a string literal says: NVRTC writes the bytes of a path that are not ASCII as octal escapes."""
    data = re.sub(rb"\\([0-7]{3})", lambda found: bytes([int(found[1], 8) & 0xFF]), literal.strip('"').encode())
    return data.decode("utf-8", "replace")
