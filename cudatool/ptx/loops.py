"""Loops whose rounds a launch bounds before it runs, and the registers that grow by the same number in each round.

A register that is set once before a loop and once in each round has, in a round, one value before that and another one
after it. :class:`Loops` gives these values names of their own, so that each name has one definition: ``%r5@in`` is what
``%r5`` has when the loop begins, ``%r5@0`` what it has in a round of loop 0 until it is set, and ``%r5@0+`` what it has
in the round from then on. A name that nothing defines is a value that is not known.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from cudatool.ptx.flow import Flow, reads, writes
from cudatool.ptx.isa import INTEGERS
from cudatool.ptx.model import Address, Function, Instruction, Operand, PtxError, Register, type_bytes

__all__ = ["Carried", "Loop", "Loops"]


@dataclass(frozen=True, slots=True)
class Carried:
    """A register that each round of a loop changes by a step.

    Attributes
    ----------
    before, after, first
        Its names: in a round until it is set, from then on, and when the loop begins.
    step, sign
        What is added to it, if `sign` is 1, or taken from it, if -1.
    """

    before: str
    after: str
    first: str
    step: Operand
    sign: int


@dataclass(frozen=True, slots=True)
class Loop:
    """A loop that ends when a register that it changes reaches a limit.

    Attributes
    ----------
    block
        At which it begins.
    blocks
        All of its blocks.
    carried
        The registers that it changes by steps.
    counter, tested_after
        The one that the condition compares, and whether it does after the step.
    condition
        Index of the comparison (``setp``) that decides whether another round follows.
    holds
        What it must say for another round.
    place
        Which operand of the comparison the counter is, 1 or 2.
    """

    block: int
    blocks: frozenset[int]
    carried: tuple[Carried, ...]
    counter: Carried
    tested_after: bool
    condition: int
    holds: bool
    place: int


class Loops:
    """The loops of a function, in the order of the text.

    Attributes
    ----------
    code
        The instructions, with the names of the module's docstring.
    found
        Without loops whose rounds cannot be bounded.
    bits
        Of the registers with such names.
    """

    def __init__(self, function: Function) -> None:
        self.code: list[Instruction] = list(function.instructions)
        self.found: list[Loop] = []
        self.bits: dict[str, int] = {}
        try:
            self._flow = Flow(function)
            loops = self._flow.natural_loops()
            self._dominators = self._flow.dominators() if loops else []
        except PtxError:  # too much to follow
            return
        if not loops:
            return
        self._at = [number for number, block in enumerate(self._flow.blocks) for _ in range(block.start, block.stop)]
        self._setters: dict[str, list[int]] = {}
        for index, i in enumerate(self.code):
            for name in writes(i):
                self._setters.setdefault(name, []).append(index)
        names: dict[int, dict[str, str]] = {}  # of an instruction: the registers that it reads
        for block, blocks in sorted(loops.items()):
            self._find(block, blocks, names)
        if self.found:
            self._forget_outside(names)
            for index, new in names.items():
                self.code[index] = _renamed(self.code[index], new)

    # ---- order ----

    def _is_before(self, first: int, then: int) -> bool:
        """Whether every way to instruction `then` comes through instruction `first`."""
        a, b = self._at[first], self._at[then]
        return first < then if a == b else self._dominators[b] >= 0 and bool(self._dominators[b] >> a & 1)

    def _once_a_round(self, index: int, start: int, latch: int, blocks: frozenset[int]) -> bool:
        """Whether an instruction is executed once, by all threads, in each round that is followed by another."""
        block, i = self._at[index], self.code[index]
        return (
            i.guard is None
            and bool(self._dominators[latch] >> block & 1)
            and block not in self._flow.reached([block], blocks - {start})
        )

    # ---- finding loops ----

    def _find(self, start: int, blocks: frozenset[int], names: dict[int, dict[str, str]]) -> None:
        flow = self._flow
        latches = [number for number in blocks if start in flow.blocks[number].successors]
        if len(latches) != 1 or self._dominators[latches[0]] < 0:
            return
        latch = latches[0]
        branch = self.code[flow.blocks[latch].stop - 1]
        if branch.opcode != "bra" or branch.guard is None or len(flow.blocks[latch].successors) != 2:
            return
        setters = self._setters.get(branch.guard.name, [])
        if len(setters) != 1 or not self._is_before(setters[0], flow.blocks[latch].stop - 1):
            return
        condition, number = setters[0], len(self.found)
        if not self._once_a_round(condition, start, latch, blocks) or self._at[condition] not in blocks:
            return
        inside: dict[str, tuple[int, int]] = {}  # where registers are set before the loop, and in it
        for name, where in self._setters.items():
            if len(where) == 2 and sum(self._at[index] in blocks for index in where) == 1:
                first, update = sorted(where, key=lambda index: self._at[index] in blocks)
                plain = all(isinstance(self.code[index].operands[0], Register) for index in where)
                if (
                    plain
                    and self._is_set_anew(first, start, blocks)
                    and self._once_a_round(update, start, latch, blocks)
                ):
                    inside[name] = first, update
        carried = {}
        for name, (_, update) in inside.items():
            if (step := self._step(name, update, blocks)) is not None:
                carried[name] = Carried(f"{name}@{number}", f"{name}@{number}+", f"{name}@in", *step)
        i = self.code[condition]
        holds = (branch.guard.negated) == (self._target(branch) != start)
        for place in (1, 2) if i.opcode == "setp" and len(i.operands) == 3 and len(i.modifiers) == 2 else ():
            counted = self._counter(i.operands[place], condition, {name: inside[name] for name in carried})
            if counted is not None:
                counter, after = carried[counted[0]], counted[1]
                loop = Loop(start, blocks, tuple(carried.values()), counter, after, condition, holds, place)
                self.found.append(loop)
                for name, own in carried.items():
                    self._name(name, *inside[name], own, start, blocks, names)
                return

    def _target(self, branch: Instruction) -> int:
        operand = branch.operands[0]
        return self._flow.target(branch, getattr(operand, "name", ""))

    def _is_set_anew(self, first: int, start: int, blocks: frozenset[int]) -> bool:
        """Whether instruction `first` sets its register each time that the loop is come to from elsewhere."""
        block = self._at[first]
        if self.code[first].guard is not None or not self._dominators[start] >> block & 1:
            return False
        return start not in self._left_from(blocks, block)

    def _left_from(self, blocks: frozenset[int], first: int) -> set[int]:
        """Return the blocks that a loop leads to when it ends, without coming through block `first`."""
        everything = frozenset(range(len(self._flow.blocks)))
        exits = {one for number in blocks for one in self._flow.blocks[number].successors} - blocks - {first}
        return exits | self._flow.reached(exits, everything - {first})

    def _step(self, name: str, update: int, blocks: frozenset[int]) -> tuple[Operand, int] | None:
        """Return what instruction `update` adds to a register, or takes from it."""
        index = update
        while (i := self.code[index]).opcode == "mov" and i.guard is None and isinstance(i.operands[1], Register):
            setters = self._setters.get(i.operands[1].name, [])
            if len(setters) != 1 or self._at[setters[0]] not in blocks or not self._is_before(setters[0], index):
                return None
            index = setters[0]
        if i.opcode not in ("add", "sub") or i.guard is not None or len(i.operands) != 3:
            return None
        if len(i.modifiers) != 1 or i.modifiers[0] not in INTEGERS:
            return None
        kinds = {self._flow.function.registers.get(one, "pred") for one in (name, *writes(i))}
        if "pred" in kinds or {_bits_of(kind) for kind in kinds} != {_bits_of(i.modifiers[0])}:
            return None
        _, a, b = i.operands
        if isinstance(a, Register) and a.name == name:
            return b, 1 if i.opcode == "add" else -1
        if isinstance(b, Register) and b.name == name and i.opcode == "add":
            return a, 1
        return None

    def _counter(self, operand: Operand, at: int, inside: dict[str, tuple[int, int]]) -> tuple[str, bool] | None:
        """Return the register whose value an operand has, and whether it is the value after the step."""
        if not isinstance(operand, Register):
            return None
        for name, (_, update) in inside.items():
            if operand.name == name:
                if self._is_before(update, at):
                    return name, True
                return (name, False) if self._is_before(at, update) else None
            source, setters = self.code[update], self._setters.get(operand.name, [])
            if source.opcode == "mov" and source.operands[1] == operand and len(setters) == 1:
                return (name, True) if self._is_before(setters[0], at) else None  # what the register becomes
        return None

    # ---- names ----

    def _name(
        self,
        name: str,
        first: int,
        update: int,
        own: Carried,
        start: int,
        blocks: frozenset[int],
        names: dict[int, dict[str, str]],
    ) -> None:
        """Give the values of a register their names, where it is certain which one an instruction reads."""
        stale = self._left_from(blocks, self._at[first])
        changed = self._flow.reached([self._at[update]], blocks - {start})  # later in a round than its own block
        for index, i in enumerate(self.code):
            if name not in reads(i):
                continue
            block, new = self._at[index], ""
            if block in blocks:
                if self._is_before(update, index):
                    new = own.after
                elif block not in changed and (block != self._at[update] or index <= update):
                    new = own.before
            elif block not in stale and self._is_before(first, index):
                new = own.first
            if new:
                names.setdefault(index, {})[name] = new
        for index, new in ((first, own.first), (update, own.after)):
            self.code[index] = _with_target(self.code[index], new)
        declared = self._flow.function.registers.get(name)
        if declared is not None and declared != "pred":
            self.bits |= dict.fromkeys((own.before, own.after, own.first), _bits_of(declared))

    def _forget_outside(self, names: dict[int, dict[str, str]]) -> None:
        """Give names that nothing defines to what a round computed, where it may be read in another one, or later."""
        changing = {name for loop in self.found for one in loop.carried for name in (one.before, one.after)}
        size = -1
        while size != len(changing):
            size = len(changing)
            for index, i in enumerate(self.code):
                new = names.get(index, {})
                if any(new.get(name, name) in changing for name in reads(i)):
                    changing.update(writes(i))
        setters = {name: index for index, i in enumerate(self.code) for name in writes(i)}
        several = {name for name, where in self._setters.items() if len(where) > 1}
        for index, i in enumerate(self.code):
            for name in reads(i):
                known_as = names.get(index, {}).get(name, name)
                if known_as not in changing or known_as in several or known_as not in setters:
                    continue
                setter = setters[known_as]
                left = any(self._at[setter] in one.blocks and self._at[index] not in one.blocks for one in self.found)
                if left or not self._is_before(setter, index):
                    names.setdefault(index, {})[name] = f"{name}@lost"


def _bits_of(kind: str) -> int:
    return 8 * type_bytes(kind)


def _with_target(i: Instruction, name: str) -> Instruction:
    return replace(i, operands=(Register(name), *i.operands[1:]))


def _renamed(i: Instruction, names: dict[str, str]) -> Instruction:
    """Return an instruction that reads registers by other names."""

    def one(operand: Operand) -> Operand:
        if isinstance(operand, Register):
            return replace(operand, name=names.get(operand.name, operand.name))
        if isinstance(operand, Address) and isinstance(operand.base, Register):
            name = operand.base.name
            return replace(operand, base=replace(operand.base, name=names.get(name, name)))
        return operand

    start = 0 if not writes(i) else 1
    operands = (*i.operands[:start], *(one(operand) for operand in i.operands[start:]))
    guard = i.guard and replace(i.guard, name=names.get(i.guard.name, i.guard.name))
    return replace(i, operands=operands, guard=guard)
