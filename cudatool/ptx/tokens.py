"""The words of PTX: a text cut into tokens, and the place up to which they were read."""

from __future__ import annotations

import re
import struct
from typing import Final

from cudatool.limits import PTX_DEPTH
from cudatool.ptx.model import Immediate, PtxError

__all__ = ["LINKAGE", "SPACES", "TYPE", "VECTOR", "Tokens", "immediate"]

_TOKEN: Final = re.compile(
    r"[ \t\r]*(?:"
    r"(?P<newline>\n)"
    r"|(?P<token>"
    r'"[^"\n]*"'
    r"|0[fFdD][0-9a-fA-F]{8,16}|0[xX][0-9a-fA-F]+U?|0[bB][01]+U?|\d+\.\d*(?:[eE][+-]?\d+)?|\d+[eE][+-]?\d+|\d+U?"
    r"|[A-Za-z_$%][\w$]*(?:(?:\.|::)[\w$]+)*"
    r"|\.[A-Za-z_]\w*(?:::\w+)*"
    r"|<<|>>|[{}()\[\],;:=+\-!|<>@~*&^?]|/(?![/*]))"
    r"|(?P<end>\Z|//[^\n]*)"
    r"|(?P<comment>/\*.*?\*/)"
    r"|(?P<unclosed>/\*)"
    r"|(?P<other>.))",
    re.DOTALL,
)
SPACES: Final = {".global", ".const", ".shared", ".local", ".param"}
LINKAGE: Final = {".visible", ".extern", ".weak", ".common"}
TYPE: Final = re.compile(r"\.(?:[usb](?:8|16|32|64|128)|b?f16(?:x2)?|tf32|f32|f64|pred|texref|samplerref|surfref)$")
VECTOR: Final = {".v2": 2, ".v4": 4, ".v8": 8}
_LARGEST: Final = (1 << 64) - 1  # an integer constant has 64 bits (PTX ISA, "Integer Constants")


class Tokens:
    """A text's tokens, and the next one to be read. Its first line is called `line`.

    Raises
    ------
    PtxError
        There is a character that PTX does not have; also from the methods: what comes next is something else.
    """

    def __init__(self, text: str, line: int) -> None:
        self.text = text
        self.tokens: list[str] = []
        self.lines: list[int] = []
        self.starts: list[int] = []
        self.position = 0
        self.depth = 0
        self._tokenize(line)

    def _tokenize(self, line: int) -> None:
        tokens, lines, starts = self.tokens, self.lines, self.starts
        for found in _TOKEN.finditer(self.text):
            kind = found.lastgroup
            if kind == "token":
                tokens.append(found["token"])
                lines.append(line)
                starts.append(found.start("token"))
            elif kind == "newline":
                line += 1
            elif kind == "comment":
                line += found["comment"].count("\n")
            elif kind == "unclosed":
                raise PtxError("a comment without an end", line)
            elif kind == "other":
                raise PtxError(f"unexpected character {found['other']!r}", line)
        tokens.append("")  # the end: matches nothing
        lines.append(line)
        starts.append(len(self.text))

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

    def enter(self) -> None:
        """Go one level deeper into braces or brackets. What reads them calls itself, and the stack has an end."""
        self.depth += 1
        if self.depth > PTX_DEPTH:
            raise PtxError(f"nested deeper than {PTX_DEPTH} levels", self.line)

    def leave(self) -> None:
        """Come back out of what was entered."""
        self.depth -= 1

    def integer(self) -> int:
        sign = -1 if self.accept("-") else 1
        token = self.next()
        if token[0].isdigit():
            try:
                value = immediate(token).value
            except PtxError as error:
                raise PtxError(error.args[0], self.lines[self.position - 1]) from None
            if isinstance(value, int):
                return sign * value
        raise PtxError(f"expected an integer, found {token!r}", self.lines[self.position - 1])

    def positive(self, largest: int) -> int:
        """Return an integer from 0 to `largest`."""
        value = self.integer()
        if not 0 <= value <= largest:
            raise PtxError(f"expected a number from 0 to {largest}, found {value}", self.lines[self.position - 1])
        return value

    def skip_block(self) -> None:
        self.expect("{")
        depth = 1
        while depth:
            depth += {"{": 1, "}": -1}.get(self.next(), 0)

    def skip_statement(self) -> None:
        while self.next() != ";":
            pass


def immediate(token: str) -> Immediate:
    """Return the number that a token stands for."""
    prefix = token[:2].lower()
    if prefix == "0f" and len(token) == 10:
        bits = int(token[2:], 16)
        return Immediate(struct.unpack("<f", struct.pack("<I", bits))[0], 32, bits)
    if prefix == "0d" and len(token) == 18:
        bits = int(token[2:], 16)
        return Immediate(struct.unpack("<d", struct.pack("<Q", bits))[0], 64, bits)
    token = token.rstrip("U")
    try:
        if prefix not in ("0x", "0b") and not token.isdigit():
            real = float(token)
            return Immediate(real, 64, struct.unpack("<Q", struct.pack("<d", real))[0])
        value = int(token, 0 if prefix in ("0x", "0b") else 8 if token[0] == "0" else 10)
    except ValueError:  # also for more digits than Python reads
        raise PtxError(f"{token!r} is no number") from None
    if value > _LARGEST:
        raise PtxError(f"{token} has more than 64 bits")
    return Immediate(value)
