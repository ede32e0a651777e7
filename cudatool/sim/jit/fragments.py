"""Which elements of a matrix each lane of a warp holds (PTX ISA, 9.7.14 and 9.7.15: matrix fragments).

``mma`` defines it. For ``wmma`` it is left open; here it is the same distribution, repeated where a fragment has more
room than the matrix has elements.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

__all__ = ["ELEMENT_BITS", "Fragment", "fragment", "quad_pair_fragment"]

ELEMENT_BITS = {
    "f64": 64,
    **dict.fromkeys(["f32", "s32", "tf32"], 32),
    **dict.fromkeys(["f16", "bf16"], 16),
    **dict.fromkeys(["s8", "u8", "e4m3", "e5m2"], 8),
    **dict.fromkeys(["s4", "u4"], 4),
    "b1": 1,
}


@dataclass(frozen=True, slots=True)
class Fragment:
    """A matrix spread over a warp.

    Attributes
    ----------
    name
        Tells fragments that differ apart.
    rows, columns
        The whole matrix.
    registers, per_register
        What a lane holds: registers, and elements in each.
    place
        (lane, register, element of the register) -> (row, column).
    blocks
        Independent matrices that the warp holds; `place` gives rows of all of them, one below the other.
    """

    name: str
    rows: int
    columns: int
    registers: int
    per_register: int
    place: Callable[[int, int, int], tuple[int, int]]
    blocks: int = 1

    def table(self) -> list[int]:
        """Return the position in the dense, row-major matrix of each element: by register, then lane, then element."""
        found = []
        for register in range(self.registers):
            for lane in range(32):
                for element in range(self.per_register):
                    row, column = self.place(lane, register, element)
                    found.append(row * self.columns + column)
        return found


@lru_cache(64)
def fragment(which: str, m: int, n: int, k: int, element: str, registers: int) -> Fragment:
    """Return the fragment ``"a"`` (m x k), ``"b"`` (k x n) or ``"c"`` (m x n) of a multiplication.

    Lanes come in eight groups of four. A group holds a row of A and C and a column of B, and another one eight further
    on, and so on; its lanes hold neighbouring elements: as many as fill a register in A and B, two in C.
    """
    per = max(32 // ELEMENT_BITS[element], 1)
    name = f"{which}_m{m}n{n}k{k}_{registers}x{per}"
    if which == "a":
        above, distinct = m // 8, m * k // (32 * per)

        def place_a(lane: int, register: int, part: int) -> tuple[int, int]:
            register %= distinct
            return lane // 4 + 8 * (register % above), (register // above * 4 + lane % 4) * per + part

        return Fragment(name, m, k, registers, per, place_a)
    if which == "b":
        above, distinct = k // (4 * per), k * n // (32 * per)

        def place_b(lane: int, register: int, part: int) -> tuple[int, int]:
            register %= distinct
            return (register % above * 4 + lane % 4) * per + part, lane // 4 + 8 * (register // above)

        return Fragment(name, k, n, registers, per, place_b)
    above = m // 8

    def place_c(lane: int, register: int, part: int) -> tuple[int, int]:
        index = register * per + part
        pair = index // 2
        return lane // 4 + 8 * (pair % above), pair // above * 8 + lane % 4 * 2 + index % 2

    return Fragment(name, m, n, registers, per, place_c)


@lru_cache(64)
def quad_pair_fragment(which: str, element: str, layout: str) -> Fragment:
    """Return a fragment of ``mma.m8n8k4`` for f16: four products, each of two groups of four lanes."""
    rows, columns = {"a": (8, 4), "b": (4, 8)}.get(which, (8, 8))
    per = 2 if element == "f16" else 1
    registers = rows * columns // (8 * per)

    def place(lane: int, register: int, part: int) -> tuple[int, int]:
        index, quad, upper = register * per + part, lane % 4, 4 * (lane // 16)
        if which == "c" and element == "f32":
            row, column = (lane & 1) + (index & 2) + upper, (index & 4) + (lane & 2) + (index & 1)
        elif which == "c":
            row, column = quad + upper, index
        elif which == "a":
            row, column = (quad + upper, index) if layout == "row" else (index + upper, quad)
        else:
            row, column = (quad, index + upper) if layout == "row" else (index, quad + upper)
        return row + rows * (lane % 16 // 4), column

    return Fragment(f"{which}_quad_pair_{layout}_{per}", rows, columns, registers, per, place, blocks=4)
