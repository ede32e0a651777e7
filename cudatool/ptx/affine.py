"""Addresses that are sums of a thread's indices times numbers: what one launch accesses where, without running it.

:class:`AffineAddresses` reads a kernel once. For the arguments and the shape of a launch it gives each access a
:class:`Form`: ``constant + sum(coefficient * index)`` over the thread's and the block's coordinates and the rounds of
loops (:mod:`cudatool.ptx.loops`). An address that depends on memory or on anything else that is no such sum has none.

Branches narrow that: what compares forms (``if (i < n)``) bounds the address of an access that only threads come to for
which it holds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from cudatool.ptx.effects import is_read_only, memory_operands
from cudatool.ptx.flow import Flow, reads, writes
from cudatool.ptx.forms import OPPOSITES, RULES, THREAD_INDICES, Form, LaunchValues, integers_of, is_plain
from cudatool.ptx.isa import INTEGERS, STRONG, Control, Mode, opcode_of
from cudatool.ptx.loops import Loops
from cudatool.ptx.model import (
    Address,
    Function,
    Instruction,
    Pair,
    Register,
    Symbol,
    type_bytes,
)
from cudatool.ptx.operands import space_of

__all__ = ["AffineAddresses", "LaunchAddresses", "MemoryInstruction"]

_FACTS = 64  # comparisons that one branch is taken apart into

_Fact = tuple[int, bool]  # a comparison (setp, by index), and whether it holds

_MIRRORED = {"lt": "gt", "gt": "lt", "le": "ge", "ge": "le", "lo": "hi", "hi": "lo", "ls": "hs", "hs": "ls", "ne": "ne"}


@dataclass(frozen=True, slots=True)
class MemoryInstruction:
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


class LaunchAddresses(NamedTuple):
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

    def _find_sites(self) -> tuple[MemoryInstruction, ...] | None:
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
                weak = access.mode is not Mode.ATOMIC and not STRONG.intersection(i.modifiers)
                address = access.address if access.width else None
                place = "global" if space == "const" else space
                found.append(
                    MemoryInstruction(index, i.line, place, access.mode, access.width, weak, is_read_only(i), address)
                )
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
        kinds, target = integers_of(i), writes(i)
        if i.opcode not in RULES or not kinds or len(target) != 1 or not is_plain(i):
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
    ) -> LaunchAddresses:
        """Return the address of each of :attr:`sites` in one launch.

        Parameters
        ----------
        parameter_values
            The packed arguments.
        address_of
            Given a variable: its address, or where it lies in shared memory.
        """
        extents = (*block, *grid, *(1 for _ in self._loops))
        launch = LaunchValues(self._parameters, parameter_values, extents, address_of, self._bits)
        for step in self._steps:
            if isinstance(step, int):
                self._enter(launch, step)
            else:
                launch.values[step[0]] = RULES[step[1].opcode](launch, step[1])
        bounds: dict[_Fact, tuple[Form, int] | None] = {}
        for fact in {fact for facts in self._facts.values() for fact in facts}:
            bounds[fact] = launch.bound(self._code[fact[0]], fact[1])
        found = []
        for site in self.sites or ():
            form = None
            if site.address is not None:
                form = launch.location(site.address, site.width, is_shared=site.space == "shared")
            known = [bound for fact in self._facts[site.index] if (bound := bounds[fact]) is not None]
            known += [launch.limits[number] for number in self._around[site.index] if number in launch.limits]
            found.append(form if form is None else launch.narrowed(form, known))
        return LaunchAddresses(found, launch.extents)

    def _enter(self, launch: LaunchValues, number: int) -> None:
        """Find how many rounds a loop has at most, and the values of its registers in them.

        Its counter grows towards a limit (or falls: then all is negated). Another round follows only below the limit,
        which must lie so far from the end of the type's range that no step leads across it.
        """
        loop = self._loops[number]
        i = self._code[loop.condition]
        relation, kind = i.modifiers
        if kind not in INTEGERS or any(self._bits.get(name, 32) != 8 * type_bytes(kind) for name in reads(i)):
            return
        relation = relation if loop.holds else OPPOSITES.get(relation, "")
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

    def _carry(self, launch: LaunchValues, number: int) -> None:
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
