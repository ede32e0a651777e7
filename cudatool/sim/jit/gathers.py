"""Whether threads that read memory in any order are worth to be made vectors of, at the price of a *gather*.

A gather fetches what the threads of a vector want, each at its place. AMD's processors, and Intel's until Ice Lake,
take longer for it than for the same loads one by one, so LLVM is told to do without. Then it makes no vectors of loops
with such loads at all, also where threads compute much with what they have read. There the gathers cost less than
vectors save: the first kernel of Rodinia's srad reads 8 numbers at places that it has read and makes 5 divisions, and
takes 0.6 of the time.

What decides is how much a kernel computes in floating point for each load, on the way through it that has most loads.
Only speed depends on it.
"""

from __future__ import annotations

from collections.abc import Iterable

from cudatool.ptx import Flow, Instruction
from cudatool.sim.jit.table import types_of

__all__ = ["ONE_VECTOR", "gathers_pay"]

ONE_VECTOR = '!{!"llvm.loop.vectorize.width", i32 16}'
"""Makes one vector of a loop over sixteen threads that read in any order, as an element of its metadata.

LLVM by itself makes several, as few addresses fit into one, and keeps what threads have in memory from round to round.
Without gathers, vectors of such loops take longer than one thread after the other (Rodinia's heartwall, three frames,
with each load by itself: 2.7 s rather than 1.5), so this is left out of the text then (:mod:`.native`).
"""

_FAST = frozenset({"add", "sub", "mul", "fma", "mad", "min", "max"})
_SLOW = frozenset({"div", "sqrt", "rsqrt", "rcp", "ex2", "lg2", "sin", "cos", "tanh"})
_COSTS = 4  # of a slow instruction, in fast ones
_ENOUGH = 2.5  # fast ones for each load (hotspot has 2.7 and gains 15 %; srad2 of srad v1 has 0.6 and loses a third)


def gathers_pay(flow: Flow) -> bool:
    """Return whether a kernel computes so much for each load that gathers do not matter."""
    loads, computes = _most_loads(flow)
    return computes > _ENOUGH * loads


def _most_loads(flow: Flow) -> tuple[int, int]:
    """Return the loads on the way that has most of them, each round of a loop once, and what is computed on it."""
    found: dict[int, tuple[int, int]] = {}
    path, seen = [(0, iter(flow.blocks[0].successors))], {0}
    while path:
        number, following = path[-1]
        after = next((one for one in following if one not in seen), None)
        if after is not None:
            seen.add(after)
            path.append((after, iter(flow.blocks[after].successors)))
            continue
        path.pop()
        block = flow.blocks[number]
        # What leads back to the beginning of a loop is not found yet.
        rest = max((found[one] for one in block.successors if one in found), default=(0, 0))
        own = _counted(flow.function.instructions[block.start : block.stop])
        found[number] = (own[0] + rest[0], own[1] + rest[1])
    return found[0]


def _counted(code: Iterable[Instruction]) -> tuple[int, int]:
    """Return the loads of some instructions, and what they compute."""
    loads = computes = 0
    for one in code:
        if one.opcode == "tex" or (one.opcode == "ld" and {"param", "const"}.isdisjoint(one.modifiers)):
            loads += 1
        elif one.opcode in _FAST | _SLOW and any("f" in name for name in types_of(one)):
            computes += _COSTS if one.opcode in _SLOW else 1
    return loads, computes
