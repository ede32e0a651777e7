"""Whether neighboring threads access memory far apart, each a cache line of its own: ``a[threadIdx.x * n]`` does.

The threads of a row then need as many lines. Rows above each other often need the same ones, ``a[threadIdx.x * n +
threadIdx.y]``, which are in no cache any more if rows are long. So such kernels run in rows of few threads
(:mod:`.grid`).

These are guesses, mostly right: only speed depends on them. The *step* of a register is by how much it
grows from one thread to the next in x, or from one block to the next. That of ``(x + 1) % n`` is 1, though one thread
goes back, and that of a number read from memory, too, as if it were an index among others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from cudatool.ptx import Address, Immediate, Instruction, Operand, Register, opcode_of
from cudatool.ptx.flow import writes
from cudatool.ptx.isa import FLOATS

__all__ = ["accesses", "is_far"]

_LINE = 64  # bytes of a cache line
_FAR = 1 << 32
"""A step that is not known: a multiple of a number that the kernel is given."""


def is_far(code: Sequence[Instruction]) -> bool:
    """Whether an instruction accesses memory a cache line or more from where its neighbor does.

    `code` is in an order in which, loops aside, what sets a register stands before what reads it.
    """
    return any(abs(step) >= _LINE for _, step in accesses(code, "%tid.x", {}))


def accesses(code: Sequence[Instruction], along: str, numbers: Mapping[str, int]) -> Iterator[tuple[Instruction, int]]:
    """Yield the instructions of `code` that access memory, each with the step of its address.

    The special register `along` has a step of 1; the registers in `numbers` are taken for these.
    """
    steps = {along: 1}
    for one in code:
        place = opcode_of(one.opcode).address
        if place is None:
            rule = _RULES.get(one.opcode)
            step = _of_result(rule, one, steps, numbers) if rule else 0
        else:
            address = one.operands[place]
            by = _step(address.base, steps) if isinstance(address, Address) else 0
            yield one, by
            step = 1 if by else 0
        for name in writes(one):
            steps[name] = max(steps.get(name, 0), step, key=abs)


def _of_result(rule: _Rule, one: Instruction, steps: Mapping[str, int], numbers: Mapping[str, int]) -> int:
    by = [_step(operand, steps) for operand in one.operands[1:]]
    if numbers:
        known = [
            Immediate(numbers[o.name]) if isinstance(o, Register) and o.name in numbers else o for o in one.operands
        ]
        one = replace(one, operands=tuple(known))
    return rule(one, by)


def _step(operand: object, steps: Mapping[str, int]) -> int:
    return steps.get(operand.name, 0) if isinstance(operand, Register) else 0


def _number(operand: Operand) -> int | None:
    return operand.value if isinstance(operand, Immediate) and isinstance(operand.value, int) else None


def _same(i: Instruction, by: list[int]) -> int:
    return 0 if any(one in FLOATS for one in i.modifiers) else max(by, key=abs)


def _sum(i: Instruction, by: list[int]) -> int:
    return sum(by)


def _difference(i: Instruction, by: list[int]) -> int:
    return by[0] - by[1]


def _product(i: Instruction, by: list[int]) -> int:
    """Return the step of a product, and of what is added to it."""
    if "hi" in i.modifiers:  # so compilers divide
        return 0
    left, right, *added = by
    if left and right:
        return _FAR
    factor, step = (i.operands[2], left) if left else (i.operands[1], right)
    number = _number(factor)
    return (step * number if number is not None else _FAR if step else 0) + sum(added)


def _shifted_left(i: Instruction, by: list[int]) -> int:
    amount = _number(i.operands[2])
    return by[0] << (amount & 63) if amount is not None else _FAR if by[0] else 0


def _shifted_right(i: Instruction, by: list[int]) -> int:
    amount = _number(i.operands[2])
    return by[0] >> (amount & 63) if amount is not None else 0


_Rule = Callable[[Instruction, list[int]], int]
_RULES: Mapping[str, _Rule] = {
    **dict.fromkeys(("mov", "cvt", "cvta", "and", "min", "max", "rem", "selp"), _same),
    **dict.fromkeys(("add", "or", "xor"), _sum),
    **dict.fromkeys(("mul", "mad", "mul24", "mad24"), _product),
    "sub": _difference,
    "shl": _shifted_left,
    "shr": _shifted_right,
}
"""By opcode; what is in no row, and a quotient, is as good as alike for neighbors."""
