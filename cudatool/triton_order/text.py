"""TTGIR, as Triton prints it, as operations in blocks."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

__all__ = ["LOCATION", "LOOPS", "VALUE", "Block", "Operation", "Parser", "walk"]

VALUE: Final = r"%[\w$.-]+@\d+(?:#\d+)?"
_PRINTED: Final = r"%[\w$.-]+(?:#\d+)?(?!@)\b"
LOCATION: Final = re.compile(r"\s+loc\((?:#\w+|unknown)\)$")
_ARGUMENT_LOCATION: Final = re.compile(r" loc\(\"[^\"]*\"\(#\w+\)\)| loc\(#\w+\)| loc\(unknown\)")
LOOPS: Final = ("scf.for", "scf.while")


@dataclass(eq=False, slots=True)
class Operation:
    """One operation, with the blocks of its regions.

    Attributes
    ----------
    line
        Where it begins, from 0.
    text
        What stands in that line and in its last, without what it returns and without locations.
    """

    line: int
    name: str
    text: str
    results: tuple[str, ...]
    loops: frozenset[int]
    regions: list[list[Block]] = field(default_factory=list)

    @property
    def operands(self) -> list[str]:
        return re.findall(VALUE, self.text)

    @property
    def types(self) -> str:
        return self.text.rpartition(" : ")[2]

    @property
    def gives_scalars(self) -> bool:
        """Whether no result is a tensor, as far as is known."""
        if self.name == "tt.reduce":
            return "tensor<" not in self.types.rpartition(" -> ")[2]
        return "tensor<" not in (self.text if self.regions else self.types) and self.name not in LOOPS


@dataclass(eq=False, slots=True)
class Block:
    label: str
    arguments: tuple[str, ...]
    operations: list[Operation] = field(default_factory=list)


class Parser:
    """Reads a module; names each value once, as Triton uses names again in regions beside each other."""

    def __init__(self) -> None:
        self.functions: list[Operation] = []
        self._open: list[Operation] = []
        self._scopes: list[dict[str, str]] = [{}]

    def read(self, number: int, raw: str) -> None:
        """Read the next line."""
        line = _ARGUMENT_LOCATION.sub("", LOCATION.sub("", raw.strip()))
        if not line or line[0] in "#/{":
            return
        if line[0] == "}":
            self._close(line)
        elif line[0] == "^":
            self._begin_block(number, line)
        else:
            operation = self._operation(number, line)
            if self._open:
                self._open[-1].regions[-1][-1].operations.append(operation)
            elif operation.name == "tt.func":
                self.functions.append(operation)
            if line.endswith("{") and operation.name != "module":
                self._open.append(operation)
                self._begin_region()

    def _begin_region(self) -> None:
        self._open[-1].regions.append([Block("", ())])
        self._scopes.append({})

    def _close(self, line: str) -> None:
        if not self._open:
            return  # the module's
        self._scopes.pop()
        if line.endswith("{"):  # "} else {", "} do {", "}, {"
            self._begin_region()
        else:
            self._open.pop().text += line  # with the types of a reduction

    def _begin_block(self, number: int, line: str) -> None:
        label, _, rest = line[1:].partition("(")
        block = Block(label.partition(":")[0], tuple(re.findall(rf"({VALUE}):", self._define(rest, number, ":"))))
        region = self._open[-1].regions[-1]
        if region[-1].operations:
            region.append(block)
        else:
            region[-1] = block

    def _operation(self, number: int, line: str) -> Operation:
        head, equals, rest = line.partition(" = ")
        if not equals or not head.startswith("%"):
            head, rest = "", line
        name = re.match(r"\"?([\w.]+)", rest)
        kind = name[1] if name else ""
        # What a loop or function defines in its first line is first looked up, then defined: no value has its own name.
        rest = self._define(rest, number, " =" if kind in LOOPS else ":" if kind == "tt.func" else "")
        rest = re.sub(_PRINTED, lambda found: self._known(found[0]), rest)
        results: list[str] = []
        for printed, count in re.findall(r"(%[\w$.-]+)(?::(\d+))?", head):
            own = self._new(printed, number)
            results += [f"{own}#{one}" for one in range(int(count))] if count else [own]
        loops = frozenset(one.line for one in self._open if one.name in LOOPS)
        return Operation(number, kind, rest, tuple(results), loops)

    def _define(self, text: str, number: int, mark: str) -> str:
        """Return a text with names of their own for the values that it defines, those before a `mark`."""
        if not mark:
            return text
        return re.sub(rf"{_PRINTED}(?={mark})", lambda found: self._new(found[0], number), text)

    def _new(self, printed: str, number: int) -> str:
        self._scopes[-1][printed] = f"{printed}@{number}"
        return f"{printed}@{number}"

    def _known(self, printed: str) -> str:
        name, mark, result = printed.partition("#")
        known = next((scope[name] for scope in reversed(self._scopes) if name in scope), name)
        return known + mark + result


def walk(operation: Operation) -> Iterator[Operation]:
    for region in operation.regions:
        for block in region:
            for one in block.operations:
                yield one
                yield from walk(one)
