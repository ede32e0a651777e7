"""Which of a kernel's arguments its accesses are computed from: a hint that makes the checks of memory quick.

Most addresses are an argument plus an index. A launch knows how much memory around each argument can be used, and has
values, so that one comparison shows an access to be right. Where the hint is wrong, or the access lies elsewhere,
everything is checked as without it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cudatool.ptx import Address, Function, Register
from cudatool.ptx.flow import reads, writes
from cudatool.sim.jit.context import ARGUMENT_RANGES

__all__ = ["ArgumentRanges"]

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
