"""What all threads of a block have alike, and whether they take one way through a kernel's regions.

``for (int s = 128; s > 0; s /= 2) { ...; __syncthreads(); }`` is a loop over barriers that all threads leave at once:
its counter is *uniform*, and so is the branch on it. That is known from the registers: parameters, constants and the
block's place are uniform, and so is what is computed of them where all threads come through.

If all suspensions of a kernel are where all threads come through, it *marches*: the threads of a block are always at
one suspension. So none looks which one the others have come to, and no code is needed for threads that have come to
different ones. A uniform register that lives across a suspension lies in one cell for the block, not in a slot for each
thread: threads get it as an argument. What the block does next, and what the cells hold then, one function tells for
the region:

- ``ahead_k``: does what region k computes alike and returns the next suspension, or EXIT;
- ``most_k``: how many threads of a row do anything in region k (:mod:`.bounds`), where that is uniform.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import TYPE_CHECKING, NamedTuple

from cudatool.ptx import Flow, Instruction, opcode_of, symbols
from cudatool.ptx.flow import reads, writes
from cudatool.sim.jit.bounds import Bound
from cudatool.sim.jit.context import EXIT
from cudatool.sim.jit.emit import ENVIRONMENT, Emitter, storage_type
from cudatool.sim.jit.even import Region, find_distances
from cudatool.sim.jit.scheduler import Cell, parameters

if TYPE_CHECKING:
    from cudatool.sim.jit.thread_code import ThreadCode

__all__ = ["Marching", "emit_ahead", "emit_most", "find_marching", "find_renewable"]

_MOST_BLOCKS = 500  # of code: to find out takes longer than in proportion to them
_OWN = ("%tid.x", "%tid.y", "%tid.z")


class Marching(NamedTuple):
    """How the threads of a block march: the `registers` that are uniform, and the whole kernel as a `region`.

    Not all threads come through its blocks `uneven`. In a row of threads, what registers hold is at the `distances`.
    """

    registers: frozenset[str]
    distances: Mapping[str, int]
    region: Region
    uneven: frozenset[int]


def find_marching(flow: Flow, suspensions: Iterable[int], shared: Set[str]) -> Marching | None:
    """Return how threads come to the `suspensions`, of which all wait for whole blocks or warps; None if in any way.

    Parameters and variables that are not among the `shared` ones lie elsewhere for each thread.
    """
    if len(flow.blocks) > _MOST_BLOCKS:
        return None
    region = Region(flow, 0, frozenset(), lambda one, by: None)
    apart: dict[str, int | None] = {}
    for one in flow.function.instructions:
        if any(name not in shared for operand in one.operands for name in symbols(operand)):
            apart |= dict.fromkeys(writes(one))
    distances, uneven = find_distances(region, (), apart | dict.fromkeys(_OWN))
    if any(number in uneven for number in region.blocks if flow.blocks[number].stop - 1 in set(suspensions)):
        return None
    registers = flow.function.registers
    alike = frozenset(name for name, distance in distances.items() if distance == 0 and name in registers)
    of_rows, _ = find_distances(region, (), apart)
    known = {name: distance for name, distance in of_rows.items() if distance is not None and name in registers}
    return Marching(alike, known, region, frozenset(uneven))


def find_renewable(
    flow: Flow, definitions: Mapping[str, int], known: Set[str], alike: Set[str], suspensions: Iterable[int]
) -> dict[str, frozenset[str]]:
    """Return the registers that are computed again after a suspension rather than kept, and from which cells.

    They are set once, from registers that are `known` everywhere and others that are `alike` for all threads, and at
    each suspension at which they are needed these are what they were then.
    """
    code = flow.function.instructions
    sources: dict[str, set[str]] = {}
    for name, index in sorted(definitions.items(), key=lambda item: item[1]):
        one = code[index]
        used = set(reads(one)) - known
        is_pure = opcode_of(one.opcode).is_pure and "cc" not in one.modifiers and len(writes(one)) == 1
        if is_pure and name not in known | alike and used <= alike | sources.keys():
            sources[name] = used
    if not sources:
        return {}
    holds = _holding(flow, definitions, sources)
    ends = [(flow.blocks[flow.at[index]].live_out, holds[flow.at[index]]) for index in suspensions]
    lost = {name for live, held in ends for name in (live & sources.keys()) - held}
    while lost:
        for name in lost:
            del sources[name]
        lost = {name for name, used in sources.items() if not used <= alike | sources.keys()}
    found: dict[str, frozenset[str]] = {}
    for name, used in sources.items():  # each after those that it is computed from
        found[name] = frozenset().union(*(found.get(other, {other}) for other in used))
    return found


def _holding(flow: Flow, definitions: Mapping[str, int], sources: Mapping[str, Set[str]]) -> list[set[str]]:
    """Return, by block, which registers are at its end what would be computed there from their `sources`.

    Where one is, so are those of its sources that have sources themselves.
    """
    code = flow.function.instructions
    stale: dict[str, set[str]] = {}  # what does not hold any more when a register is set
    behind: dict[str, set[str]] = {}  # a register's sources, and theirs
    for name, used in sources.items():  # each after those that it is computed from
        behind[name] = set(used).union(*(behind.get(one, ()) for one in used))
        for one in behind[name]:
            stale.setdefault(one, set()).add(name)
    before: list[list[int]] = [[] for _ in flow.blocks]
    for number, block in enumerate(flow.blocks):
        for after in block.successors:
            before[after].append(number)
    held = [set(sources) for _ in flow.blocks]
    pending = deque(range(len(flow.blocks)))
    while pending:
        number = pending.popleft()
        block = flow.blocks[number]
        now = set.intersection(*(held[one] for one in before[number])) if number and before[number] else set()
        for index in range(block.start, block.stop):
            for name in writes(code[index]):
                now -= stale.get(name, set())
                if definitions.get(name) == index and name in sources and sources[name] & sources.keys() <= now:
                    now.add(name)
        if now != held[number]:
            held[number] = now
            pending.extend(block.successors)
    return held


def emit_ahead(
    kernel: ThreadCode,
    marching: Marching,
    number: int,
    first: int,
    before: Sequence[Instruction],
    given: dict[str, Cell],
    left: dict[int, dict[str, Cell]],
) -> None:
    """Emit ``ahead_<number>`` of a region into the kernel's parts.

    Parameters
    ----------
    first
        The block at which the region begins.
    before
        What is computed once more there.
    given
        The cells of which it gets the values.
    left
        For each suspension, by its index, the cells that the region sets before it.
    """
    way = _Way(kernel, marching, first, before, {name for cells in left.values() for name in cells})
    e = kernel.emitter()
    for name, cell in given.items():
        e.write(name, cell.value, cell.kind)
    for one in before:
        if way.is_needed(one):
            kernel.instruction(e, one)
    e.emit(f"br label %b{first}")
    for block_number in way.blocks:
        block = kernel.flow.blocks[block_number]
        e.label(f"b{block_number}")
        for index in range(block.start, block.stop):
            one = kernel.code[index]
            if index in left:
                for name, cell in left[index].items():
                    value, kind = e.read(name)
                    if kind == "i1":
                        value, kind = e.op(f"zext i1 {value} to i8"), "i8"
                    e.emit(f"store {kind} {value}, ptr {e.op(f'getelementptr i8, ptr %slots, i64 {cell.offset}')}")
                e.emit(f"ret i32 {kernel.region_of[index]}")
            elif way.is_needed(one):
                kernel.instruction(e, one)
            elif block_number in way.asked and index == block.stop - 1:
                kernel.branch(e, one, block_number, set())
        if block.stop - 1 not in left and block_number not in way.asked:
            after = way.after[block_number]
            e.emit(f"br label %b{after[0]}" if after else f"ret i32 {EXIT}")
    _finish(kernel, e, f"ahead_{number}", parameters(given.values()))


def emit_most(
    kernel: ThreadCode,
    marching: Marching,
    number: int,
    bound: Bound,
    code: Iterable[Instruction],
    given: Mapping[str, Cell],
) -> None:
    """Emit ``most_<number>`` into the kernel's parts: how many threads of a row do anything in the region.

    `code` comes before the comparison that tells it.
    """
    assert bound.register is not None
    e = kernel.emitter()
    for name, cell in given.items():
        e.write(name, cell.value, cell.kind)
    for one in code:
        if writes(one) and marching.registers.issuperset(writes(one)):
            kernel.instruction(e, one)
    value = e.convert(*e.read(bound.register), "i32")
    wide = e.op(f"{'sext' if bound.is_signed else 'zext'} i32 {value} to i64")
    e.define("declare i64 @llvm.smax.i64(i64, i64)")
    some = e.op(f"call i64 @llvm.smax.i64(i64 {e.op(f'add i64 {wide}, {bound.number}')}, i64 0)")
    width = e.op("zext i32 %nx to i64")
    e.emit(f"ret i32 {e.convert(e.op(f'call i64 @llvm.umin.i64(i64 {some}, i64 {width})'), 'i64', 'i32')}")
    _finish(kernel, e, f"most_{number}", f"{parameters(given.values())}, i32 %nx")


def _finish(kernel: ThreadCode, e: Emitter, name: str, more: str) -> None:
    registers = kernel.function.registers
    lines = [
        f"define internal i32 @{name}({ENVIRONMENT}{more}) #0 {{",
        "entry:",
        *(f"  {cell} = alloca {storage_type(registers[name])}" for name, cell in e.used.items()),
        *e.lines,
        "}",
    ]
    kernel.finish(e)
    kernel.parts.append("\n".join(lines))


class _Way:
    """What of a region tells which suspension is next, and what the registers `wanted` are then.

    Attributes
    ----------
    asked
        The blocks whose branches decide it. Any other leads to where its ways meet.
    after
        Where each block of `blocks` leads, in the order in which they are found.
    """

    def __init__(
        self, kernel: ThreadCode, marching: Marching, first: int, before: Sequence[Instruction], wanted: set[str]
    ) -> None:
        self._kernel, self._marching, self._first = kernel, marching, first
        self._needed = wanted
        self.asked: set[int] = set()
        self.after: dict[int, list[int]] = {}
        region = marching.region
        inside = self._inside()
        while True:
            asked = {number for number in inside if self._decides(number)}
            code = [*before, *(one for number in inside - marching.uneven for one in region.instructions(number))]
            used = [one for one in code if self.is_needed(one)] + [region.last(number) for number in asked]
            needed = self._needed.union(*(reads(one) for one in used if one is not None))
            if asked == self.asked and needed == self._needed:
                break
            self.asked, self._needed = asked, needed
        self._find_blocks()

    @property
    def blocks(self) -> Iterable[int]:
        return self.after

    def is_needed(self, one: Instruction) -> bool:
        """Whether an instruction computes, for all threads, what is needed."""
        names = writes(one)
        alike = self._marching.registers
        return bool(names) and alike.issuperset(names) and not self._needed.isdisjoint(names)

    def _suspends(self, number: int) -> bool:
        block = self._kernel.flow.blocks[number]
        return block.stop > block.start and self._kernel.suspends(block.stop - 1)

    def _inside(self) -> set[int]:
        """Return the blocks of the region."""
        found: set[int] = set()
        pending = [self._first]
        while pending:
            number = pending.pop()
            if number not in found:
                found.add(number)
                pending += [] if self._suspends(number) else self._marching.region.after(number)
        return found

    def _decides(self, number: int) -> bool:
        """Whether something that is needed lies on one of the ways from a block, before they meet."""
        region = self._marching.region
        if number in self._marching.uneven or self._suspends(number) or not region.branches(number):
            return False
        last = region.last(number)
        assert last is not None
        if last.guard is None or last.guard.name not in self._marching.registers:
            return False
        meeting = region.meeting_point(number)
        between = region.reached(region.after(number), without=meeting) - self._marching.uneven
        return any(self._suspends(one) or any(map(self.is_needed, region.instructions(one))) for one in between)

    def _find_blocks(self) -> None:
        region = self._marching.region
        pending = [self._first]
        while pending:
            number = pending.pop()
            if number in self.after:
                continue
            after = list(region.after(number))
            if self._suspends(number):
                after = []
            elif region.branches(number) and number not in self.asked:
                meeting = region.meeting_point(number)
                after = [] if meeting is None else [meeting]
            self.after[number] = after
            pending += after
