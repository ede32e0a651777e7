"""Several PTX modules made one, as nvlink makes one image of several objects.

A linked image is PTX text too: the texts of its modules one after the other (:mod:`.images`). What reads it
(:func:`parse_image`) resolves the symbols. So nothing is lost between linking and loading, and a module that was
compiled once gives the same text wherever it is linked to.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from cudatool.ptx.images import SEPARATOR, split
from cudatool.ptx.model import (
    Function,
    Location,
    Module,
    PtxError,
    Relocation,
    Variable,
)
from cudatool.ptx.operands import renamed
from cudatool.ptx.parser import parse

__all__ = ["SYSTEM_CALLS", "LinkError", "link", "parse_image", "undefined"]

SYSTEM_CALLS = frozenset(("vprintf", "malloc", "free", "__assertfail"))
"""Functions that the driver provides (PTX Writer's Guide to Interoperability, System Calls)."""


class LinkError(PtxError):
    """Modules that do not fit together; names the symbol."""


def parse_image(text: bytes) -> Module:
    """Parse a PTX text or a linked image, whose lines are counted through.

    Raises
    ------
    PtxError
        It is not PTX.
    LinkError
        Its modules do not fit together.
    """
    modules, line = [], 1
    for part in split(text):
        modules.append(parse(part, line=line))
        line += (part + SEPARATOR).count(b"\n")
    module = modules[0] if len(modules) == 1 else link(modules)
    notes = re.findall(rb"^//@ registers (\S+) (\d+)$", text, re.MULTILINE)
    module.register_counts = {name.decode(): int(count) for name, count in notes}
    return module


def link(modules: Sequence[Module]) -> Module:
    """Return one module with the symbols of all, each reference resolved (PTX ISA, 5.1 and 10.2: linking directives).

    A declaration gives way to a definition, a ``.weak`` definition to any other, of several ``.common`` ones the
    largest stays. What only its own module sees gets a new name where another module uses the same.

    Raises
    ------
    LinkError
        Two modules define the same symbol.
    """
    users = Counter(name for module in modules for name in (*module.variables, *module.functions))
    result = Module(max(module.version for module in modules), modules[0].target)
    for number, module in enumerate(modules):
        symbols: list[Variable | Function] = [*module.variables.values(), *module.functions.values()]
        names = {
            symbol.name: f"{symbol.name}${number}"
            for symbol in symbols
            if users[symbol.name] > 1 and not symbol.linkage and not _is_declaration(symbol)
        }
        files = max(result.files, default=0)
        result.files.update({files + index: path for index, path in module.files.items()})
        for variable in module.variables.values():
            _merge(result.variables, _renamed_variable(variable, names))
        for function in module.functions.values():
            _merge(result.functions, _renamed_function(function, names, files))
    result.preamble = "\n".join(module.preamble for module in modules)
    return result


def undefined(module: Module) -> list[str]:
    """Return the functions and variables that a linked module uses without a definition."""
    variables = [v.name for v in module.variables.values() if v.external and v.space != "shared"]
    functions = [f.name for f in module.functions.values() if not f.has_body and f.name not in SYSTEM_CALLS]
    return variables + functions


def _is_declaration(symbol: Variable | Function) -> bool:
    return symbol.external if isinstance(symbol, Variable) else not symbol.has_body


_S = TypeVar("_S", Variable, Function)


def _merge(known: dict[str, _S], symbol: _S) -> None:
    """Enter a symbol, unless what is known under its name stays."""
    other = known.get(symbol.name)
    if other is not None and not _is_declaration(other):
        if _is_declaration(symbol) or symbol.linkage == "weak":
            return
        if isinstance(symbol, Variable) and symbol.linkage == other.linkage == "common":
            if symbol.size <= other.size:
                return
        elif other.linkage != "weak":
            raise LinkError(f"{symbol.name!r} is defined more than once")
    known[symbol.name] = symbol


def _renamed_variable(variable: Variable, names: dict[str, str]) -> Variable:
    relocations = tuple(Relocation(r.offset, names.get(r.symbol, r.symbol), r.addend) for r in variable.relocations)
    return replace(variable, name=names.get(variable.name, variable.name), relocations=relocations)


def _renamed_function(function: Function, names: dict[str, str], files: int) -> Function:
    """Return the function with module-level `names` replaced and its source files counted from `files`."""
    own = {p.name for p in (*function.params, *function.returns)}
    own.update(function.registers, function.variables, function.labels, function.branch_targets)
    seen = {old: new for old, new in names.items() if old not in own}
    name = names.get(function.name, function.name)
    if not seen and not files:
        return function
    instructions = []
    for instruction in function.instructions:
        location = instruction.location
        if files and location is not None:
            callers = tuple((file + files, line) for file, line in location.callers)
            location = Location(location.file + files, location.line, location.column, callers)
        operands = tuple(renamed(operand, seen) for operand in instruction.operands)
        instructions.append(replace(instruction, operands=operands, location=location))
    text = function.text if name == function.name else f"// {name}\n{function.text}"
    return replace(function, name=name, instructions=instructions, text=text)
