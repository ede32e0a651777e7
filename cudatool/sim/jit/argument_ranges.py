"""Which of a kernel's arguments its accesses are computed from: a hint that makes the checks of memory quick.

Most addresses are an argument plus an index. A launch knows how much memory around each argument can be used, and has
values, so that one comparison shows an access to be right. Where the hint is wrong, or the access lies elsewhere,
everything is checked as without it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from cudatool.ptx import Address, Function, Instruction, Register, elements, space_of, type_bytes
from cudatool.ptx.flow import reads, writes
from cudatool.sim.jit.context import ARGUMENT_RANGES

__all__ = ["ArgumentRanges", "Near", "near_accesses"]

# What computes an address from another one, of 64-bit registers.
_HANDS_ON = frozenset({"mov", "cvta", "add", "sub", "selp"})


@dataclass(frozen=True, slots=True)
class ArgumentRanges:
    """Where pointers come from.

    Attributes
    ----------
    offsets
        Of the arguments that are used as pointers, in the packed arguments.
    of_line
        For lines of the PTX: the one of `offsets`, by number, that its accesses are computed from.
    """

    offsets: tuple[int, ...]
    of_line: Mapping[int, int]

    @classmethod
    def of(cls, function: Function, parameters: Mapping[str, int]) -> ArgumentRanges:
        """Read a kernel's code; `parameters` is where its parameters lie in the packed arguments."""
        sources: dict[str, set[int]] = {}  # of registers: the arguments that they may be computed from
        steps = [i for i in function.instructions if i.opcode in _HANDS_ON and "b32" not in i.modifiers]
        for i in function.instructions:
            address = i.operands[1] if i.opcode == "ld" and len(i.operands) == 2 else None
            if isinstance(address, Address) and "param" in i.modifiers and isinstance(i.operands[0], Register):
                name = getattr(address.base, "name", "")
                if name in parameters and {"u64", "b64", "s64"}.intersection(i.modifiers):
                    sources.setdefault(i.operands[0].name, set()).add(parameters[name] + address.offset)
        changed = True
        while changed:
            changed = False
            for i in steps:
                found = set[int]().union(*(sources.get(name, ()) for name in reads(i)))
                for name in writes(i) if found else ():
                    own = sources.setdefault(name, set())
                    changed |= not found <= own
                    own |= found
        lines: dict[int, set[int]] = {}
        for i in function.instructions:
            for operand in i.operands:
                if isinstance(operand, Address) and isinstance(operand.base, Register):
                    lines.setdefault(i.line, set()).update(sources.get(operand.base.name, ()))
        known = {line: found.pop() for line, found in lines.items() if len(found) == 1}
        offsets = tuple(sorted(set(known.values())))[:ARGUMENT_RANGES]
        return cls(offsets, {line: offsets.index(at) for line, at in known.items() if at in offsets})

    def addresses(self, arguments: bytes) -> list[int]:
        """Return the pointers of a launch with these packed arguments."""
        return [int.from_bytes(arguments[offset : offset + 8], "little") for offset in self.offsets]


_FARTHEST = 2048  # bytes from the first to the end of the last of accesses that are checked at once


@dataclass(slots=True)
class Near:
    """Accesses of one size by straight code, at constant distances from each other: one check may do for all.

    Attributes
    ----------
    first, stop
        Where the first begins and the last ends, from what their register holds, bytes.
    is_sound
        The name of the value that says that none of them can be wrong; empty until it is emitted.
    """

    first: int
    stop: int
    is_sound: str = ""


def near_accesses(block: Iterable[Instruction], of_line: Mapping[int, int]) -> dict[int, tuple[Near, int]]:
    """Return, of a basic block, the loads and stores that are near others, by :func:`id`: with what, and where.

    `of_line` is :attr:`ArgumentRanges.of_line`. An unrolled loop over an array has them, and code that reads several
    members of a structure.
    """
    open_: dict[tuple[str, int, int], list[tuple[Instruction, int]]] = {}
    runs: list[tuple[int, list[tuple[Instruction, int]]]] = []
    for i in block:
        place = i.operands[i.opcode != "st"] if i.opcode in ("ld", "ldu", "st") and len(i.operands) == 2 else None
        if (
            isinstance(place, Address)
            and isinstance(place.base, Register)
            and space_of(i) in ("global", "generic")
            and i.line in of_line
        ):
            values = elements(i.operands[i.opcode == "st"])
            size = type_bytes(i.modifiers[-1]) * len(values)
            open_.setdefault((place.base.name, size, of_line[i.line]), []).append((i, place.offset))
        for name in writes(i):  # an address that it holds now is another one
            for key in [key for key in open_ if key[0] == name]:
                runs.append((key[1], open_.pop(key)))
    runs += [(size, run) for (_, size, _), run in open_.items()]
    found: dict[int, tuple[Near, int]] = {}
    for size, run in runs:
        near = Near(min(offset for _, offset in run), max(offset for _, offset in run) + size)
        if len(run) > 1 and near.stop - near.first <= _FARTHEST:
            found |= {id(i): (near, offset) for i, offset in run}
    return found
