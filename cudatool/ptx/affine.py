"""Addresses that are sums of a thread's indices times numbers: what one launch accesses where, without running it.

:class:`AffineAddresses` reads a kernel once. For the arguments and the shape of a launch it gives each access a
:class:`Form`: ``constant + sum(coefficient * index)`` over the thread's and the block's coordinates and the rounds of
loops (:mod:`cudatool.ptx.loops`). An address that depends on memory or on anything else that is no such sum has none.

Branches narrow that: what compares forms (``if (i < n)``) bounds the address of an access that only threads come to for
which it holds.

Registers hold integers modulo a power of two. A form is one of the integers that a register's bits stand for: sums and
products keep that. Where the width grows, the form must be known to lie in the range of the narrower type.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from cudatool.ptx.effects import is_read_only, memory_operands
from cudatool.ptx.flow import Flow, reads, writes
from cudatool.ptx.isa import Control, Mode, opcode_of
from cudatool.ptx.loops import Carried, Loops
from cudatool.ptx.model import (
    Address,
    Function,
    Immediate,
    Instruction,
    Operand,
    Pair,
    Register,
    Symbol,
    VectorOperand,
    type_bytes,
)
from cudatool.ptx.operands import space_of

__all__ = ["THREAD_INDICES", "AffineAddresses", "Form", "OfLaunch", "Site", "may_meet"]

_INDICES = tuple(f"%{name}.{axis}" for name in ("tid", "ctaid") for axis in "xyz")
THREAD_INDICES = len(_INDICES)
"""How many of the indices tell threads apart; those after them count rounds of loops."""

_COUNTS = tuple(f"%{name}.{axis}" for name in ("ntid", "nctaid") for axis in "xyz")
_INTEGERS = frozenset(f"{kind}{bits}" for kind in "usb" for bits in (32, 64))
_STRONG = frozenset({"volatile", "acquire", "release", "relaxed", "mmio"})
_STEPS = 256  # how many combinations of distances are tried before two accesses count as meeting


_FACTS = 64  # comparisons that one branch is taken apart into

_Fact = tuple[int, bool]  # a comparison (setp, by index), and whether it holds

_OPPOSITES = {"lt": "ge", "ge": "lt", "le": "gt", "gt": "le", "lo": "hs", "hs": "lo", "ls": "hi", "hi": "ls"}
_MIRRORED = {"lt": "gt", "gt": "lt", "le": "ge", "ge": "le", "lo": "hi", "hi": "lo", "ls": "hs", "hs": "ls", "ne": "ne"}


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


@dataclass(frozen=True, slots=True)
class Site:
    """An instruction that accesses memory.

    Attributes
    ----------
    index
        Of the instruction.
    space
        ``"global"``, ``"shared"`` or ``"generic"``, which may be either.
    width
        Bytes; 0 if not known.
    weak
        Neither atomic nor volatile nor of another strong kind.
    read_only
        Of data that nothing may write as long as the kernel runs.
    address
        None if its width is not known.
    """

    index: int
    line: int
    space: str
    mode: Mode
    width: int
    weak: bool
    read_only: bool
    address: Address | None


class OfLaunch(NamedTuple):
    """What the accesses of a launch are.

    Attributes
    ----------
    forms
        The address of each site; None where it is no form.
    extents
        How many values each index has, at most.
    """

    forms: list[Form | None]
    extents: tuple[int, ...]


class AffineAddresses:
    """The accesses of a kernel whose calls are inlined.

    Attributes
    ----------
    sites
        All accesses to global and shared memory; None if the kernel has instructions whose accesses are not followed.
    """

    def __init__(self, function: Function, parameters: dict[str, int]) -> None:
        loops = Loops(function)
        self._function, self._code, self._loops = function, loops.code, loops.found
        self._parameters = parameters
        self._bits = {name: 8 * type_bytes(kind) for name, kind in function.registers.items() if kind != "pred"}
        self._bits |= loops.bits
        self._flow = Flow(function)
        self.sites = self._find_sites()
        self._defined = self._single_definitions()
        self._facts = self._find_facts() if self.sites else {}
        self._steps = self._find_steps()

    def _find_sites(self) -> tuple[Site, ...] | None:
        found = []
        for index, i in enumerate(self._code):
            addresses = [operand for operand in i.operands if isinstance(operand, Address)]
            if i.opcode == "call" or {"async", "bulk"}.intersection(i.modifiers):
                return None
            if not addresses or opcode_of(i.opcode).is_hint:
                continue
            if opcode_of(i.opcode).address is None:
                return None
            space = space_of(i)
            base = addresses[0].base
            if space in ("param", "local") or self._is_parameter(base):
                continue
            for access in memory_operands(i):
                weak = access.mode is not Mode.ATOMIC and not _STRONG.intersection(i.modifiers)
                address = access.address if access.width else None
                place = "global" if space == "const" else space
                found.append(Site(index, i.line, place, access.mode, access.width, weak, is_read_only(i), address))
        return tuple(found)

    def _is_parameter(self, base: Register | Symbol | None) -> bool:
        return isinstance(base, Symbol) and base.name in self._parameters

    def _single_definitions(self) -> dict[str, int]:
        """Return where each register that one unguarded instruction sets is set."""
        defined: dict[str, int] = {}
        several: set[str] = set()
        for index, i in enumerate(self._code):
            for name in writes(i):
                if name in defined or i.guard is not None:
                    several.add(name)
                defined[name] = index
        return {name: index for name, index in defined.items() if name not in several}

    def _find_facts(self) -> dict[int, frozenset[_Fact]]:
        """Return what holds for each thread that comes to a site.

        A predicate that one instruction computes from forms has one value for each thread: what held on the way to a
        site still holds there.
        """
        code, flow = self._code, self._flow
        facts: dict[int, frozenset[_Fact]] = {0: frozenset()}
        pending = [0]
        while pending:
            number = pending.pop()
            block, here = flow.blocks[number], facts[number]
            last = code[block.stop - 1] if block.start < block.stop else None
            control = Control.NEXT if last is None else opcode_of(last.opcode).control
            for successor in block.successors:
                known = here
                if (
                    last is not None
                    and last.guard is not None
                    and len(block.successors) == 2
                    and control is Control.BRANCH
                ):
                    known |= self._said_by(last.guard, successor != number + 1)
                elif last is not None and last.guard is not None and control in (Control.END, Control.STOP):
                    known |= self._said_by(last.guard, False)
                flow.spend(1 + len(known))
                old = facts.get(successor)
                if old is None or not old <= known:
                    facts[successor] = known if old is None else old & known
                    pending.append(successor)
        at = {index: number for number, block in enumerate(flow.blocks) for index in range(block.start, block.stop)}
        self._at_loops = [facts.get(loop.block, frozenset()) for loop in self._loops]
        self._around = {
            site.index: [number for number, loop in enumerate(self._loops) if at[site.index] in loop.blocks]
            for site in self.sites or ()
        }
        found = {}
        for site in self.sites or ():
            guard = code[site.index].guard
            own = self._said_by(guard, True) if guard is not None else frozenset()
            found[site.index] = facts.get(at[site.index], frozenset()) | own
        return found

    def _said_by(self, predicate: Register, value: bool) -> frozenset[_Fact]:
        """Return the comparisons whose outcome follows from a predicate's value."""
        found: set[_Fact] = set()
        pending = [(predicate.name, value != predicate.negated)]
        while pending:
            name, holds = pending.pop()
            index = self._defined.get(name, -1)
            i = self._code[index] if index >= 0 else None
            if i is None or any(isinstance(operand, Pair) for operand in i.operands):
                continue
            if i.opcode == "setp" and len(i.modifiers) == 2 and len(i.operands) == 3 and len(found) < _FACTS:
                found.add((index, holds))
            elif i.opcode == ("and" if holds else "or") and "pred" in i.modifiers:
                pending += [(o.name, holds != o.negated) for o in i.operands[1:] if isinstance(o, Register)]
            elif i.opcode == "not" and "pred" in i.modifiers and isinstance(i.operands[1], Register):
                pending.append((i.operands[1].name, holds == i.operands[1].negated))
        return frozenset(found)

    def _find_steps(self) -> list[tuple[str, Instruction] | int]:
        """Return the instructions that compute addresses and what is compared, and the numbers of loops, in order."""
        code = self._code
        bases = (site.address.base for site in self.sites or () if site.address is not None)
        pending = [base.name for base in bases if isinstance(base, Register)]
        for index in {index for facts in self._facts.values() for index, _ in facts}:
            pending += reads(code[index])
        changed_by = {one.before: (number, one) for number, loop in enumerate(self._loops) for one in loop.carried}
        needed: set[int] = set()
        seen: set[str] = set()
        loops: set[int] = set()
        while pending:
            name = pending.pop()
            index = self._defined.get(name, -1)
            if name in changed_by and name not in seen:
                number, carried = changed_by[name]
                seen.add(name)
                pending.append(carried.first)
                pending += [carried.step.name] if isinstance(carried.step, Register) else []
                if number not in loops:
                    loops.add(number)
                    loop = self._loops[number]
                    pending += [loop.counter.before, *reads(code[loop.condition])]
                    for fact, _ in self._at_loops[number]:
                        pending += reads(code[fact])
            elif index >= 0 and index not in needed and self._is_followed(code[index]):
                needed.add(index)
                pending.extend(reads(code[index]))
        steps: list[tuple[int, tuple[str, Instruction] | int]] = [
            (index, (writes(code[index])[0], code[index])) for index in needed
        ]
        steps += [(self._flow.blocks[self._loops[number].block].start - 1, number) for number in loops]
        return [step for _, step in sorted(steps, key=lambda one: one[0])]

    def _is_followed(self, i: Instruction) -> bool:
        """Whether an instruction has a rule, and all its registers have the width that its types say."""
        kinds, target = _integers(i), writes(i)
        if i.opcode not in _RULES or not kinds or len(target) != 1 or not _is_plain(i):
            return False
        sources = [operand.name for operand in i.operands[1:] if isinstance(operand, Register)]
        bits = 8 * type_bytes(kinds[-1])
        # The last operand of mad.wide is as wide as its result.
        wide = sources[2:] if "wide" in i.modifiers and all(isinstance(o, Register) for o in i.operands) else []
        if i.opcode == "shl":
            sources = sources[:1]
        grown = 2 * bits if "wide" in i.modifiers else 8 * type_bytes(kinds[0])
        narrow = sources[: len(sources) - len(wide)]
        return (
            self._bits.get(target[0]) == grown
            and all(self._bits.get(name, 32) == bits for name in narrow)
            and all(self._bits.get(name, 32) == grown for name in wide)
        )

    def forms(
        self,
        parameter_values: bytes,
        grid: Sequence[int],
        block: Sequence[int],
        address_of: Callable[[Symbol], int | None],
    ) -> OfLaunch:
        """Return the address of each of :attr:`sites` in one launch.

        Parameters
        ----------
        parameter_values
            The packed arguments.
        address_of
            Given a variable: its address, or where it lies in shared memory.
        """
        extents = (*block, *grid, *(1 for _ in self._loops))
        launch = _Launch(self._parameters, parameter_values, extents, address_of, self._bits)
        for step in self._steps:
            if isinstance(step, int):
                self._enter(launch, step)
            else:
                launch.values[step[0]] = _RULES[step[1].opcode](launch, step[1])
        bounds: dict[_Fact, tuple[Form, int] | None] = {}
        for fact in {fact for facts in self._facts.values() for fact in facts}:
            bounds[fact] = launch.bound(self._code[fact[0]], fact[1])
        found = []
        for site in self.sites or ():
            form = launch.location(site)
            known = [bound for fact in self._facts[site.index] if (bound := bounds[fact]) is not None]
            known += [launch.limits[number] for number in self._around[site.index] if number in launch.limits]
            found.append(form if form is None else launch.narrowed(form, known))
        return OfLaunch(found, launch.extents)

    def _enter(self, launch: _Launch, number: int) -> None:
        """Find how many rounds a loop has at most, and the values of its registers in them.

        Its counter grows towards a limit (or falls: then all is negated). Another round follows only below the limit,
        which must lie so far from the end of the type's range that no step leads across it.
        """
        loop = self._loops[number]
        i = self._code[loop.condition]
        relation, kind = i.modifiers
        if kind not in _INTEGERS or any(self._bits.get(name, 32) != 8 * type_bytes(kind) for name in reads(i)):
            return
        relation = relation if loop.holds else _OPPOSITES.get(relation, "")
        relation = relation if loop.place == 1 else _MIRRORED.get(relation, "")
        bits, signed = 8 * type_bytes(kind), kind[0] != "u"
        first = launch.within(launch.value(Register(loop.counter.first)), bits, signed)
        limit = launch.within(launch.value(i.operands[3 - loop.place]), bits, signed)
        step = launch.step(loop.counter, bits)
        if first is None or limit is None or not step:
            return
        sign = 1 if step > 0 else -1
        step = abs(step)
        facts = [bound for one in self._at_loops[number] if (bound := launch.bound(self._code[one[0]], one[1]))]
        facts += [launch.limits[one] for one in self._inside_of(number) if one in launch.limits]
        rest = launch.scaled(launch.sum(limit, first, -1), sign)  # what the counter still has before it
        if relation == "ne":
            least = launch.narrowed(rest, facts).low
            whole = not rest.constant % step and not any(one % step for one in rest.coefficients)
            if not whole or least < (step if loop.tested_after else 0):
                return
        elif relation == ("le", "ge")[sign < 0] or relation == ("ls", "hs")[sign < 0]:
            rest, limit = (launch.sum(one, launch.form(times)) for one, times in ((rest, 1), (limit, sign)))
        elif relation not in (("lt", "lo"), ("gt", "hi"))[sign < 0]:
            return
        lowest, highest = (-(1 << bits - 1), (1 << bits - 1) - 1) if signed else (0, (1 << bits) - 1)
        furthest = max(first.high, limit.high - 1) + step if sign > 0 else min(first.low, limit.low + 1) - step
        if not lowest <= furthest <= highest:
            return
        last = max(0, (rest.high - 1) // step + (0 if loop.tested_after else 1))
        launch.extents = (
            *launch.extents[: THREAD_INDICES + number],
            last + 1,
            *launch.extents[THREAD_INDICES + number + 1 :],
        )
        self._carry(launch, number)
        counter = launch.values.get(loop.counter.before)
        if counter is not None:
            # Of the first round it is what held before; of the others, what the condition said.
            passed = -1 if loop.tested_after else step - 1
            over = launch.scaled(launch.sum(first, limit, -1), sign)
            times = [0] * len(launch.extents)
            times[THREAD_INDICES + number] = step
            launch.limits[number] = (
                launch.sum(over, launch.form(0, times)),
                max(passed, launch.narrowed(over, facts).high),
            )

    def _carry(self, launch: _Launch, number: int) -> None:
        """Find the values that the registers of a loop have in its rounds, where they grow by the same each round."""
        for one in self._loops[number].carried:
            begin = launch.value(Register(one.first))
            grows = launch.step(one, self._bits.get(one.before, 32))
            if begin is not None and grows is not None:
                times = [0] * len(launch.extents)
                times[THREAD_INDICES + number] = grows
                launch.values[one.before] = launch.sum(begin, launch.form(0, times))

    def _inside_of(self, number: int) -> list[int]:
        """Return the loops around a loop."""
        block = self._loops[number].block
        return [one for one, loop in enumerate(self._loops) if one != number and block in loop.blocks]


class _Launch:
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

    def location(self, site: Site) -> Form | None:
        """Return where a site accesses memory, as the number that its address is."""
        if site.address is None:
            return None
        base = site.address.base
        value = self.form(0) if base is None else self.value(base)
        if isinstance(base, Register):
            bits = self.bits.get(base.name, 32)
            value = self.within(value, bits, signed=site.space == "shared" and bits == 32)
        if value is None:
            return None
        found = self.sum(value, self.form(site.address.offset))
        return found if found.low >= 0 and found.high + site.width <= 1 << 64 else None

    def bound(self, i: Instruction, holds: bool) -> tuple[Form, int] | None:
        """Return a form and its greatest value, for the threads for which a comparison has an outcome."""
        relation, kind = i.modifiers
        if kind not in _INTEGERS or relation not in _OPPOSITES:
            return None
        bits = 8 * type_bytes(kind)
        registers = [operand.name for operand in i.operands[1:] if isinstance(operand, Register)]
        if any(self.bits.get(name, 32) != bits for name in registers):
            return None
        a, b = (self.within(self.value(operand), bits, kind[0] == "s") for operand in i.operands[1:])
        if a is None or b is None:
            return None
        relation = relation if holds else _OPPOSITES[relation]
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


def _integers(i: Instruction) -> list[str]:
    return [modifier for modifier in i.modifiers if modifier in _INTEGERS]


def _is_plain(i: Instruction) -> bool:
    """Whether all types are integers of 32 or 64 bits, and nothing but the sum modulo these is computed."""
    return all(m in _INTEGERS or m in ("lo", "wide", "to", "global", "param") for m in i.modifiers)


def _move(launch: _Launch, i: Instruction) -> Form | None:
    return launch.value(i.operands[1])


def _load(launch: _Launch, i: Instruction) -> Form | None:
    address, kinds = i.operands[1], _integers(i)
    base = address.base if isinstance(address, Address) else None
    if not isinstance(base, Symbol) or base.name not in launch.parameters or isinstance(i.operands[0], VectorOperand):
        return None
    assert isinstance(address, Address)
    start = launch.parameters[base.name] + base.offset + address.offset
    stop = start + type_bytes(kinds[-1])
    if start < 0 or stop > len(launch.arguments):
        return None
    return launch.form(int.from_bytes(launch.arguments[start:stop], "little", signed=kinds[-1][1:] == "32"))


def _convert(launch: _Launch, i: Instruction) -> Form | None:
    """Grow, or keep the low bits."""
    kinds = _integers(i)
    if len(kinds) != 2:
        return None
    value = launch.value(i.operands[1])
    if type_bytes(kinds[0]) > type_bytes(kinds[1]):
        return launch.within(value, 32, kinds[1][0] == "s")
    return value


def _sum(launch: _Launch, i: Instruction) -> Form | None:
    a, b = launch.value(i.operands[1]), launch.value(i.operands[2])
    if a is None or b is None:
        return None
    return launch.sum(a, b, -1 if i.opcode == "sub" else 1)


def _product(launch: _Launch, i: Instruction) -> Form | None:
    a, b = launch.value(i.operands[1]), launch.value(i.operands[2])
    if not {"lo", "wide"}.intersection(i.modifiers):
        return None
    if "wide" in i.modifiers:
        kind = _integers(i)[-1]
        a, b = (launch.within(one, 8 * type_bytes(kind), kind[0] == "s") for one in (a, b))
    return launch.product(a, b)


def _product_and_sum(launch: _Launch, i: Instruction) -> Form | None:
    product, more = _product(launch, i), launch.value(i.operands[3])
    return None if product is None or more is None else launch.sum(product, more)


def _shift(launch: _Launch, i: Instruction) -> Form | None:
    by, kinds = i.operands[2], _integers(i)
    if not isinstance(by, Immediate) or not 0 <= by.value < 8 * type_bytes(kinds[-1]):
        return None
    return launch.product(launch.value(i.operands[1]), launch.form(1 << int(by.value)))


def _or(launch: _Launch, i: Instruction) -> Form | None:
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


_RULES: dict[str, Callable[[_Launch, Instruction], Form | None]] = {
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
