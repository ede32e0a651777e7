"""Whether a kernel accesses in several ways what it accesses atomically: a counter that its last user sets to zero.

By the PTX ISA (Memory Consistency Model, Causality Order) a write comes before what follows an atomic or other strong
read that found its value, or what updates made of it. For the flag itself no fence is needed.
"""

from __future__ import annotations

from collections import defaultdict

from cudatool.ptx.effects import is_read_only, memory_operands
from cudatool.ptx.guesses import guessing_loads
from cudatool.ptx.isa import STRONG, Mode
from cudatool.ptx.model import Address, Function, Register, Symbol

__all__ = ["has_mixed_accesses"]

_ELSEWHERE = frozenset({"param", "local", "const", "shared"})


def has_mixed_accesses(function: Function) -> bool:
    """Return whether a strong access, and one that is plain or of another scope, have one address in the text.

    They are in order if the thread of the one, or a thread before it, has read the other's value. Reads that only guess
    (:mod:`.guesses`) are no plain ones: they race with no strong access.
    """
    guesses = guessing_loads(function)
    ways: dict[tuple[str, int], set[str]] = defaultdict(set)
    for i in function.instructions:
        for operand in memory_operands(i):
            place = _place(operand.address)
            if place is None or operand.space in _ELSEWHERE or is_read_only(i) or i.line in guesses:
                continue
            strong = operand.mode is Mode.ATOMIC or not STRONG.isdisjoint(i.modifiers)
            narrow = not {"cta", "cluster"}.isdisjoint(i.modifiers)
            ways[place].add("plain" if not strong else "block" if narrow else "device")
    return any(len(found) > 1 for found in ways.values())


def _place(address: Address) -> tuple[str, int] | None:
    base = address.base
    if isinstance(base, Register):
        return base.name, address.offset
    return (base.name, base.offset + address.offset) if isinstance(base, Symbol) else None
