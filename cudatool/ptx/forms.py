"""Sums of a thread's indices times numbers, as values of registers in one launch; see :mod:`cudatool.ptx.affine`.

Registers hold integers modulo a power of two. A form is one of the integers that a register's bits stand for: sums and
products keep that. Where the width grows, the form must be known to lie in the range of the narrower type.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from cudatool.ptx.isa import INTEGERS
from cudatool.ptx.loops import Carried
from cudatool.ptx.model import (
    Address,
    Immediate,
    Instruction,
    Operand,
    Register,
    Symbol,
    VectorOperand,
    type_bytes,
)

__all__ = [
    "OPPOSITES",
    "RULES",
    "THREAD_INDICES",
    "Form",
    "LaunchValues",
    "integers_of",
    "is_plain",
    "may_meet",
]

_INDICES = tuple(f"%{name}.{axis}" for name in ("tid", "ctaid") for axis in "xyz")
THREAD_INDICES = len(_INDICES)
"""How many of the indices tell threads apart; those after them count rounds of loops."""

_COUNTS = tuple(f"%{name}.{axis}" for name in ("ntid", "nctaid") for axis in "xyz")
_STEPS = 256  # how many combinations of distances are tried before two accesses count as meeting
OPPOSITES = {"lt": "ge", "ge": "lt", "le": "gt", "gt": "le", "lo": "hs", "hs": "lo", "ls": "hi", "hi": "ls"}


@dataclass(frozen=True, slots=True)
class Form:
    """``constant + sum(coefficients[i] * index[i])``.

    The indices are the thread's x, y, z, the block's x, y, z, and for each loop which round it is, from 0.

    `low` and `high` are the least and the greatest value in the launch, or bounds of these.
    """

    constant: int
    coefficients: tuple[int, ...]
    low: int
    high: int


class LaunchValues:
    """The values of registers in one launch."""

    def __init__(
        self,
        parameters: dict[str, int],
        arguments: bytes,
        extents: tuple[int, ...],
        address_of: Callable[[Symbol], int | None],
        bits: dict[str, int],
    ) -> None:
        self.parameters, self.arguments, self.extents, self.address_of = parameters, arguments, extents, address_of
        self.bits = bits
        self.values: dict[str, Form | None] = {}
        self.limits: dict[int, tuple[Form, int]] = {}  # of loops: a form, and its greatest value in any round

    def form(self, constant: int, coefficients: Iterable[int] = ()) -> Form:
        own = tuple(coefficients) or (0,) * len(self.extents)
        reach = [coefficient * (extent - 1) for coefficient, extent in zip(own, self.extents, strict=True)]
        low = constant + sum(one for one in reach if one < 0)
        return Form(constant, own, low, constant + sum(one for one in reach if one > 0))

    def value(self, operand: Operand) -> Form | None:
        if isinstance(operand, Immediate):
            return self.form(operand.value) if isinstance(operand.value, int) and not operand.width else None
        if isinstance(operand, Symbol):
            address = self.address_of(operand)
            return None if address is None else self.form(address)
        if not isinstance(operand, Register) or operand.selector:
            return None
        if operand.name in _INDICES:
            own = _INDICES.index(operand.name)
            return self.form(0, (int(index == own) for index in range(len(self.extents))))
        if operand.name in _COUNTS:
            return self.form(self.extents[_COUNTS.index(operand.name)])
        return self.values.get(operand.name)

    def location(self, address: Address, width: int, *, is_shared: bool) -> Form | None:
        """Return where so many bytes are, as the number that their address is."""
        base = address.base
        value = self.form(0) if base is None else self.value(base)
        if isinstance(base, Register):
            bits = self.bits.get(base.name, 32)
            value = self.within(value, bits, signed=is_shared and bits == 32)
        if value is None:
            return None
        found = self.sum(value, self.form(address.offset))
        return found if found.low >= 0 and found.high + width <= 1 << 64 else None

    def bound(self, i: Instruction, holds: bool) -> tuple[Form, int] | None:
        """Return a form and its greatest value, for the threads for which a comparison has an outcome."""
        relation, kind = i.modifiers
        if kind not in INTEGERS or relation not in OPPOSITES:
            return None
        bits = 8 * type_bytes(kind)
        registers = [operand.name for operand in i.operands[1:] if isinstance(operand, Register)]
        if any(self.bits.get(name, 32) != bits for name in registers):
            return None
        a, b = (self.within(self.value(operand), bits, kind[0] == "s") for operand in i.operands[1:])
        if a is None or b is None:
            return None
        relation = relation if holds else OPPOSITES[relation]
        if relation in ("gt", "ge", "hi", "hs"):
            a, b = b, a
        return self.sum(a, b, -1), -1 if relation in ("lt", "gt", "lo", "hi") else 0

    def narrowed(self, form: Form, bounds: list[tuple[Form, int]]) -> Form:
        """Return `form` with closer limits, for the threads for which `bounds` hold."""
        limits: dict[tuple[int, ...], list[int]] = {}  # of sums of indices
        for one, most in bounds:
            first = next((coefficient for coefficient in one.coefficients if coefficient), 0)
            if not first:
                continue
            sign = 1 if first > 0 else -1
            key = tuple(sign * coefficient for coefficient in one.coefficients)
            free = self.form(0, key)
            limit = limits.setdefault(key, [free.low, free.high])
            if sign > 0:
                limit[1] = min(limit[1], most - one.constant)
            else:
                limit[0] = max(limit[0], one.constant - most)
        low, high, rest = form.constant, form.constant, list(form.coefficients)
        for key, (least, greatest) in sorted(limits.items(), key=lambda item: -sum(map(bool, item[0]))):
            own = [index for index, coefficient in enumerate(key) if coefficient]
            times, left = divmod(rest[own[0]], key[own[0]])
            if times and not left and least <= greatest and all(rest[index] == times * key[index] for index in own):
                low += times * (least if times > 0 else greatest)
                high += times * (greatest if times > 0 else least)
                for index in own:
                    rest[index] = 0
        others = self.form(0, rest)
        return replace(form, low=max(form.low, low + others.low), high=min(form.high, high + others.high))

    def sum(self, a: Form, b: Form, times: int = 1) -> Form:
        return self.form(
            a.constant + times * b.constant,
            (x + times * y for x, y in zip(a.coefficients, b.coefficients, strict=True)),
        )

    def scaled(self, a: Form, times: int) -> Form:
        return self.form(times * a.constant, (times * one for one in a.coefficients))

    def step(self, carried: Carried, bits: int) -> int | None:
        """Return by how much a round changes a register, as a signed number; None if rounds may differ in that."""
        value = self.value(carried.step)
        if value is None or any(value.coefficients):
            return None
        half = 1 << bits - 1
        return (carried.sign * value.constant + half) % (2 * half) - half

    def product(self, a: Form | None, b: Form | None) -> Form | None:
        if a is None or b is None:
            return None
        if any(a.coefficients):
            a, b = b, a
        if any(a.coefficients):
            return None
        return self.form(a.constant * b.constant, (a.constant * one for one in b.coefficients))

    def within(self, a: Form | None, bits: int, signed: bool) -> Form | None:
        """Return the form of the same bits that lies in the range of a type, if one does."""
        if a is None:
            return None
        least = -(1 << bits - 1) if signed else 0
        around = (a.low - least) >> bits << bits
        if a.high - around >= least + (1 << bits):
            return None
        return self.sum(a, self.form(-around)) if around else a


# ---- what instructions compute ----


def integers_of(i: Instruction) -> list[str]:
    return [modifier for modifier in i.modifiers if modifier in INTEGERS]


def is_plain(i: Instruction) -> bool:
    """Whether all types are integers of 32 or 64 bits, and nothing but the sum modulo these is computed."""
    return all(m in INTEGERS or m in ("lo", "wide", "to", "global", "param") for m in i.modifiers)


def _move(launch: LaunchValues, i: Instruction) -> Form | None:
    return launch.value(i.operands[1])


def _load(launch: LaunchValues, i: Instruction) -> Form | None:
    address, kinds = i.operands[1], integers_of(i)
    base = address.base if isinstance(address, Address) else None
    if not isinstance(base, Symbol) or base.name not in launch.parameters or isinstance(i.operands[0], VectorOperand):
        return None
    assert isinstance(address, Address)
    start = launch.parameters[base.name] + base.offset + address.offset
    stop = start + type_bytes(kinds[-1])
    if start < 0 or stop > len(launch.arguments):
        return None
    return launch.form(int.from_bytes(launch.arguments[start:stop], "little", signed=kinds[-1][1:] == "32"))


def _convert(launch: LaunchValues, i: Instruction) -> Form | None:
    """Grow, or keep the low bits."""
    kinds = integers_of(i)
    if len(kinds) != 2:
        return None
    value = launch.value(i.operands[1])
    if type_bytes(kinds[0]) > type_bytes(kinds[1]):
        return launch.within(value, 32, kinds[1][0] == "s")
    return value


def _sum(launch: LaunchValues, i: Instruction) -> Form | None:
    a, b = launch.value(i.operands[1]), launch.value(i.operands[2])
    if a is None or b is None:
        return None
    return launch.sum(a, b, -1 if i.opcode == "sub" else 1)


def _product(launch: LaunchValues, i: Instruction) -> Form | None:
    a, b = launch.value(i.operands[1]), launch.value(i.operands[2])
    if not {"lo", "wide"}.intersection(i.modifiers):
        return None
    if "wide" in i.modifiers:
        kind = integers_of(i)[-1]
        a, b = (launch.within(one, 8 * type_bytes(kind), kind[0] == "s") for one in (a, b))
    return launch.product(a, b)


def _product_and_sum(launch: LaunchValues, i: Instruction) -> Form | None:
    product, more = _product(launch, i), launch.value(i.operands[3])
    return None if product is None or more is None else launch.sum(product, more)


def _shift(launch: LaunchValues, i: Instruction) -> Form | None:
    by, kinds = i.operands[2], integers_of(i)
    if not isinstance(by, Immediate) or not 0 <= by.value < 8 * type_bytes(kinds[-1]):
        return None
    return launch.product(launch.value(i.operands[1]), launch.form(1 << int(by.value)))


def _or(launch: LaunchValues, i: Instruction) -> Form | None:
    """A sum, where one operand has only bits below those of the other."""
    a, b = launch.value(i.operands[1]), launch.value(i.operands[2])
    if a is None or b is None:
        return None
    for high, low in ((a, b), (b, a)):
        bits = 0
        for one in (high.constant, *high.coefficients):
            bits |= one
        if low.low >= 0 and (not bits or low.high < bits & -bits):
            return launch.sum(a, b)
    return None


RULES: dict[str, Callable[[LaunchValues, Instruction], Form | None]] = {
    "mov": _move,
    "cvta": _move,
    "ld": _load,
    "cvt": _convert,
    "add": _sum,
    "sub": _sum,
    "mul": _product,
    "mad": _product_and_sum,
    "shl": _shift,
    "or": _or,
}


# ---- do two accesses meet? ----


def may_meet(a: Form, a_width: int, b: Form, b_width: int, extents: Sequence[int]) -> bool:
    """Whether two different threads may access a common byte, one at `a` and the other at `b`.

    Parameters
    ----------
    extents
        How many values each index has, among the threads that are asked about; an index of which there is one value
        is the same for both threads. Both may be in any round of a loop.
    """
    if a.high + a_width <= b.low or b.high + b_width <= a.low:
        return False
    if a.coefficients != b.coefficients:
        return True
    free = False  # may threads differ and have the same address?
    steps = []
    for index, (coefficient, extent) in enumerate(zip(a.coefficients, extents, strict=True)):
        if extent > 1 and coefficient:
            steps.append((abs(coefficient), extent - 1, index < THREAD_INDICES))
        free |= extent > 1 and not coefficient and index < THREAD_INDICES
    steps.sort(reverse=True)
    tried = 0

    def reaches(number: int, distance: int, differs: bool) -> bool:
        """Whether distances along the steps from `number` on can bring the accesses together."""
        nonlocal tried
        tried += 1
        if tried > _STEPS:
            return True
        if number == len(steps):
            return differs and -a_width < distance < b_width
        step, most, tells_apart = steps[number]
        rest = sum(one * count for one, count, _ in steps[number + 1 :])
        first = max(-most, -((distance + rest + a_width - 1) // step))
        last = min(most, (rest + b_width - 1 - distance) // step)
        if last - first > _STEPS:
            return True
        return any(
            reaches(number + 1, distance + n * step, differs or (tells_apart and bool(n)))
            for n in range(first, last + 1)
        )

    return reaches(0, a.constant - b.constant, free)
