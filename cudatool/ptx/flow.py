"""Control flow and liveness of one function."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, reduce
from operator import and_, or_

from cudatool.limits import FLOW_STEPS
from cudatool.ptx.effects import has_result
from cudatool.ptx.isa import JUMPS, WITHOUT_RESULT, Control, opcode_of
from cudatool.ptx.model import (
    Address,
    Function,
    Immediate,
    Instruction,
    Operand,
    Pair,
    PtxError,
    Register,
    Symbol,
    VectorOperand,
)

__all__ = ["BasicBlock", "Flow", "reads", "writes"]

_WORD = 256  # registers whose liveness costs less to look at than a block: they are bits of four words


def _registers(operand: Operand) -> Iterator[str]:
    if isinstance(operand, Register):
        yield operand.name
    elif isinstance(operand, Address):
        if isinstance(operand.base, Register):
            yield operand.base.name
        for coordinate in operand.coordinates:
            yield from _registers(coordinate)
    elif isinstance(operand, VectorOperand):
        for element in operand.elements:
            yield from _registers(element)
    elif isinstance(operand, Pair):
        yield operand.first.name
        yield operand.second.name


def writes(instruction: Instruction) -> list[str]:
    """Return the registers that an instruction sets."""
    operands = instruction.operands
    if not operands or (instruction.opcode in WITHOUT_RESULT and not has_result(instruction)):
        return []
    first = operands[0]
    if isinstance(first, Register):  # most are: the rest takes three times as long
        return [first.name]
    return [] if isinstance(first, Address) else list(_registers(first))


def reads(instruction: Instruction) -> list[str]:
    """Return the registers that an instruction uses, its guard included."""
    operands = instruction.operands
    has_none = instruction.opcode in WITHOUT_RESULT and not has_result(instruction)
    if operands and not has_none and not isinstance(operands[0], Address):
        operands = operands[1:]
    found = []
    for operand in operands:
        if isinstance(operand, Register):
            found.append(operand.name)
        elif not isinstance(operand, Immediate):
            found += _registers(operand)
    if instruction.guard is not None:
        found.append(instruction.guard.name)
    return found


@dataclass(slots=True)
class BasicBlock:
    """A basic block: instructions ``[start, stop)``, and the blocks that may follow, by number.

    `jump` is where its branch goes, `fall` what follows otherwise; None is the end of the function.
    """

    start: int
    stop: int
    successors: list[int] = field(default_factory=list)
    # A number of as many bits as there are registers takes a hundredth of the memory of a set.
    _registers: Sequence[str] = ()
    _live_in: int = 0
    _live_out: int = 0

    @property
    def live_in(self) -> frozenset[str]:
        """The registers whose values the block, or what follows it, needs."""
        return frozenset(_chosen(self._registers, self._live_in))

    @property
    def live_out(self) -> frozenset[str]:
        """The registers whose values what follows the block needs."""
        return frozenset(_chosen(self._registers, self._live_out))


def _chosen(names: Sequence[str], bits: int) -> list[str]:
    """Return the names whose bits are set, from the lowest."""
    return [name for name, bit in zip(names, reversed(f"{bits:b}"), strict=False) if bit == "1"]


class Flow:
    """The control-flow graph of `function`.

    Parameters
    ----------
    split
        Instructions (by index) that begin a block of their own.

    Attributes
    ----------
    blocks
        In text order. A block ends after ``bra``, ``brx``, ``ret`` and ``exit``.
    at
        Number of the block that begins at each instruction index; the end of the function is a block too.
    """

    def __init__(self, function: Function, split: frozenset[int] = frozenset()) -> None:
        self.function = function
        self._work_left = FLOW_STEPS
        # Asked for again and again, of the many barriers in a loop.
        self._components: dict[frozenset[int], dict[int, frozenset[int]]] = {}
        self._ways: dict[frozenset[int], tuple[frozenset[int], list[frozenset[int]]]] = {}
        code = function.instructions
        starts = {0, len(code), *function.labels.values(), *split}
        starts.update(i + 1 for i, one in enumerate(code) if one.opcode in JUMPS)
        ordered = sorted(starts)
        self.blocks = [BasicBlock(a, b) for a, b in zip(ordered, [*ordered[1:], len(code)], strict=True)]
        self.at = {block.start: number for number, block in enumerate(self.blocks)}
        for number, block in enumerate(self.blocks):
            block.successors = self._successors(number, block)
        self._liveness()

    def spend(self, work: int) -> None:
        """Count what is looked at.

        Raises
        ------
        PtxError
            It is too much.
        """
        self._work_left -= work
        if self._work_left < 0:
            raise PtxError(f"{self.function.name}: its blocks lead to each other in too many ways")

    def target(self, instruction: Instruction, label: str) -> int:
        """Return the block at `label`."""
        if label not in self.function.labels:
            raise PtxError(f"branch to an unknown label {label!r}", instruction.line)
        return self.at[self.function.labels[label]]

    def dominators(self) -> list[int]:
        """Return, for each block, the blocks that every way to it comes through, itself included, as bits.

        Of a block that no way leads to, -1.
        """
        before, everything = self._before, frozenset(range(len(self.blocks)))
        live = {0} | self._reached({0}, everything, self._after)
        dominators = [1] + [-1] * (len(self.blocks) - 1)
        changed = True
        while changed:
            changed = False
            self.spend(len(self.blocks) * (1 + len(self.blocks) // 512))  # a set of blocks is a number of as many bits
            for number in sorted(live - {0}):
                common = 1 << number | reduce(and_, (dominators[one] for one in before[number] if one in live))
                changed |= common != dominators[number]
                dominators[number] = common
        return dominators

    def natural_loops(self) -> dict[int, frozenset[int]]:
        """Return the blocks of each natural loop, by the block at which it begins.

        An edge that leads back to a block that every way to it comes through closes a loop. Edges back to the same
        block, such as those of ``continue``, close one loop.
        """
        before, everything = self._before, frozenset(range(len(self.blocks)))
        dominators = self.dominators()
        loops: dict[int, frozenset[int]] = {}
        for latch, block in enumerate(self.blocks):
            for start in block.successors:
                if dominators[latch] >= 0 and dominators[latch] >> start & 1:
                    body = self._reached({latch}, everything - {start}, before) if latch != start else set()
                    loops[start] = loops.get(start, frozenset()) | body | {start, latch}
        return loops

    def innermost_loop(self, number: int) -> frozenset[int]:
        """Return the blocks of the smallest loop around block `number`, none if it is in no loop.

        A loop is a strongly connected part of the graph; what is inside of it is found without its entry. Loops that
        share their entry are distinguished by the edges that lead back to it.
        """
        found: frozenset[int] = frozenset()
        within = self._perhaps_in_loops
        while number in within and (loop := self._component(number, within)):
            entries, bodies = self._ways_around(loop)
            found = min((loop, *(body for body in bodies if number in body)), key=len)
            if not entries:
                break
            within = loop - entries
        return found

    def _ways_around(self, loop: frozenset[int]) -> tuple[frozenset[int], list[frozenset[int]]]:
        """Return where a loop is entered, and for each edge back to there the blocks that lead to that edge."""
        if (known := self._ways.get(loop)) is not None:
            return known
        self.spend(len(self.blocks) + len(loop))
        entries = frozenset(s for n, b in enumerate(self.blocks) if n not in loop for s in b.successors if s in loop)
        bodies = []
        for entry in entries:
            for latch in (n for n in loop if entry in self.blocks[n].successors):
                before = self._reached({latch}, loop - {entry}, self._before) if latch != entry else set()
                bodies.append(frozenset(before | {entry, latch}))
        self._ways[loop] = entries, bodies
        return entries, bodies

    def comes_first(self, number: int, other: int, loop: frozenset[int]) -> bool:
        """Return whether each time around `loop` that comes to block `other` has come to block `number` before."""
        if number == other:
            return True
        return bool(self.dominators()[other] >> number & 1) and not self._component(other, loop - {number})

    def reached(self, start: Iterable[int], within: frozenset[int]) -> set[int]:
        """Return the blocks of `within` that one or more edges from those of `start` lead to, through `within`."""
        return self._reached(set(start), within, self._after)

    @cached_property
    def _after(self) -> list[list[int]]:
        """By block, those that may follow it."""
        return [block.successors for block in self.blocks]

    @cached_property
    def _before(self) -> list[list[int]]:
        """By block, those that it may follow."""
        before: list[list[int]] = [[] for _ in self.blocks]
        for one, block in enumerate(self.blocks):
            for successor in block.successors:
                before[successor].append(one)
        return before

    @cached_property
    def _perhaps_in_loops(self) -> frozenset[int]:
        """Blocks with a loop before them or around them, and one after them or around them: all others are in none."""
        left = set(range(len(self.blocks)))
        for before, after in ((self._before, self._after), (self._after, self._before)):
            edges = [len(own) for own in before]
            ends = [number for number in left if edges[number] == 0]
            while ends:
                left.discard(number := ends.pop())
                for one in after[number]:
                    edges[one] -= 1
                    if edges[one] == 0:
                        ends.append(one)
        return frozenset(left)

    def _component(self, number: int, within: frozenset[int]) -> frozenset[int]:
        """Return the blocks of `within` that `number` leads to and that lead back to it, inside of `within`."""
        known = self._components.setdefault(within, {})
        if number not in known:
            forward = self._reached({number}, within, self._after)
            found = frozenset(forward & self._reached({number}, within, self._before))
            known.update(dict.fromkeys(found | {number}, found))  # all of its blocks lead to each other
        return known[number]

    def _reached(self, start: set[int], within: frozenset[int], edges: list[list[int]]) -> set[int]:
        """Return the blocks of `within` that one or more edges from `start` lead to."""
        found: set[int] = set()
        pending = list(start)
        while pending:
            after = edges[pending.pop()]
            self.spend(1 + len(after))
            for one in after:
                if one in within and one not in found:
                    found.add(one)
                    pending.append(one)
        return found

    def _successors(self, number: int, block: BasicBlock) -> list[int]:
        if block.start == block.stop:
            return [number + 1] if number + 1 < len(self.blocks) else []
        last = self.function.instructions[block.stop - 1]
        control, targets = opcode_of(last.opcode).control, list[int]()
        if control is Control.BRANCH:
            operand = last.operands[0]
            assert isinstance(operand, Symbol)
            targets.append(self.target(last, operand.name))
        elif control is Control.TABLE:
            table = last.operands[1] if len(last.operands) > 1 else None
            if not isinstance(table, Symbol):
                raise PtxError("these are no operands of brx", last.line)
            names = self.function.branch_targets.get(table.name, ())
            self.spend(len(names))
            targets.extend(self.target(last, name) for name in names)
        goes_on = control is Control.NEXT or last.guard is not None
        if goes_on and number + 1 < len(self.blocks):
            targets.append(number + 1)
        return list(dict.fromkeys(targets))

    def _liveness(self) -> None:
        code = self.function.instructions
        bit_of: dict[str, int] = {}

        def bits(names: Iterable[str]) -> int:
            found = 0
            for name in names:
                if name in self.function.registers:
                    found |= 1 << bit_of.setdefault(name, len(bit_of))
            return found

        uses, kills = [], []
        for block in self.blocks:
            used: set[str] = set()
            killed: set[str] = set()
            for instruction in code[block.start : block.stop]:
                for name in reads(instruction):
                    if name not in killed:
                        used.add(name)
                if instruction.guard is None:
                    killed.update(writes(instruction))
                else:
                    # A guarded write keeps the old value where the guard is off: the old value is needed too.
                    used.update(name for name in writes(instruction) if name not in killed)
            uses.append(bits(used))
            kills.append(bits(killed))
            self.spend((len(used) + len(killed)) * len(bit_of) // (_WORD * _WORD))
        live = [0] * len(self.blocks)
        cost = 1 + len(bit_of) // _WORD
        # From the last block on, each block once before any is looked at again: what a loop needs comes round soon.
        pending = deque(reversed(range(len(self.blocks))))
        waiting = set(pending)
        predecessors = self._before
        while pending:
            number = pending.popleft()
            waiting.discard(number)
            block = self.blocks[number]
            self.spend(cost * (1 + len(block.successors)))
            out = reduce(or_, (live[s] for s in block.successors), 0)
            block._live_out = out
            inside = uses[number] | (out & ~kills[number])
            if inside != live[number]:
                live[number] = inside
                more = [one for one in predecessors[number] if one not in waiting]
                pending.extend(more)
                waiting.update(more)
        registers = list(bit_of)
        for number, block in enumerate(self.blocks):
            block._registers, block._live_in = registers, live[number]
            block._live_out = reduce(or_, (live[s] for s in block.successors), 0)
