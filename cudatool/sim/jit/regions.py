"""A kernel's code cut at its suspensions into regions, what is known of its registers, and how threads run each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import replace
from functools import cached_property

from cudatool.limits import WRITTEN_RATIO, WRITTEN_SIZE
from cudatool.ptx import (
    Flow,
    Function,
    Immediate,
    Instruction,
    PtxError,
    Register,
    Symbol,
    opcode_of,
    type_bytes,
)
from cudatool.ptx.flow import reads, writes
from cudatool.ptx.isa import Control
from cudatool.ptx.observation import has_mixed_accesses
from cudatool.sim.jit.collective import ARGUMENT_ARRAYS, ROW, Kind, Suspension, suspension_of
from cudatool.sim.jit.context import EXIT, SHARED_STEP
from cudatool.sim.jit.emit import storage_type
from cudatool.sim.jit.even import Even, find_even
from cudatool.sim.jit.far import accesses
from cudatool.sim.jit.fetch import NARROW, STEPS, Place, place_of
from cudatool.sim.jit.instrument import Instrument
from cudatool.sim.jit.layout import Layout
from cudatool.sim.jit.neighbors import distances
from cudatool.sim.jit.scheduler import Cell, Regular
from cudatool.sim.jit.special_registers import PLACES, SPECIAL
from cudatool.sim.jit.steps import block_stride_loops, stride_loops
from cudatool.sim.jit.stretches import find_stretches
from cudatool.sim.jit.table import types_of
from cudatool.sim.jit.uniform import Marching, find_marching, find_renewable

__all__ = ["MANY", "REPEATABLE", "Regions", "goes_by_rows", "touched"]

_VOLATILE = frozenset({"%clock", "%clock_hi", "%clock64", "%globaltimer", "%globaltimer_lo", "%globaltimer_hi"})
REPEATABLE = frozenset(SPECIAL) - _VOLATILE
"""Special registers that have the same value whenever a thread reads them."""

MANY = 32
"""Regions from which on each is a function of its own: LLVM takes too long for all of them as one."""

_WIDENING = (["s64", "s32"], ["u64", "u32"])
_NARROWING = (["u32", "u64"], ["s32", "s64"], ["u32", "s64"], ["s32", "u64"])
_MOST_FETCHED = 16  # lines of each row of threads
_LONG_ROW = 64  # threads
_TREE = 3  # levels that a tree has at least
_CELL = 64  # bytes from one cell to the next: slots begin where a line of the host's cache does
_SUSPENSION = 12  # instructions that leaving a region comes to


class Regions:
    """A kernel's code, and what is known of it before any is emitted.

    Parameters
    ----------
    function
        A kernel whose calls are inlined.
    large_grid
        There may be more than 2**31 threads along an axis.
    at
        Holds the instruction that is looked at, for the message if that fails.
    """

    def __init__(
        self, function: Function, layout: Layout, instrument: Instrument, large_grid: bool, *, at: list[Instruction]
    ) -> None:
        # A copy: operands are replaced below, and the condition code becomes a register where it is used.
        self.code = list(function.instructions)
        self.function = replace(function, instructions=self.code, registers=dict(function.registers))
        self.layout = layout
        self.instrument = instrument
        self.definitions = self._single_definitions()
        self.indices = {} if large_grid else self._copies_of_special_registers()
        self.rows: dict[int, Suspension] = {}
        self.at = at  # what is looked at, for the message if that fails
        extra = 0
        for index, instruction in enumerate(self.code):
            at[:] = [instruction]
            row = suspension_of(instruction)
            if row is not None:
                self.rows[index] = row
                self.code[index] = self._with_constants(instruction)
                extra = max(extra, row.extra(self.code[index]))
        at.clear()
        self.region_of = {index: number for number, index in enumerate(self.rows, 1)}
        self.may_end = any(one.opcode in ("trap", "call", "overflow") for one in self.code)
        self.orders_by_flags = any(
            opcode_of(one.opcode).is_fence or {"acquire", "release", "acq_rel"}.intersection(one.modifiers)
            for one in self.code
        ) or (bool(instrument & Instrument.RACECHECK) and has_mixed_accesses(self.function))
        self.counts_arrivals = any(row.kind == Kind.ARRIVE for row in self.rows.values())
        split = frozenset(self.rows) | frozenset(index + 1 for index in self.rows)
        self.flow = Flow(self.function, split)
        self.strides = set() if instrument else stride_loops(self.function, self.flow).keys()
        by_blocks = set() if instrument else block_stride_loops(self.function, self.flow).keys()
        self.rows_go_around = self.strides | by_blocks
        self._known = self._repeatable()
        steps = instrument is Instrument.NONE and bool(self.rows)
        self.distances = distances(self.function) if steps else {}
        self._may_march = steps
        self.slots: dict[str, int] = {}
        self.cells: dict[str, Cell] = {}
        self.slot_bytes = 4 * ROW * (1 + len(ARGUMENT_ARRAYS) + extra)
        self.written = 0  # instructions

    def _single_definitions(self) -> dict[str, int]:
        """Return where each register that one unguarded instruction sets is set."""
        found: dict[str, int] = {}
        several: set[str] = set()
        for index, instruction in enumerate(self.code):
            for name in writes(instruction):
                if name in found or instruction.guard is not None:
                    several.add(name)
                found[name] = index
        return {name: index for name, index in found.items() if name not in several}

    def _copies_of_special_registers(self) -> dict[str, str]:
        """Return the registers that only ever hold a special register, and which."""
        found: dict[str, str] = {}
        widened: dict[str, str] = {}  # those that hold one in 64 bits, whose low half is it again
        for name, index in self.definitions.items():  # in text order: a copy of a copy comes later
            one = self.code[index]
            source = one.operands[-1]
            if not isinstance(source, Register):
                continue
            if one.opcode == "mov" and source.name in SPECIAL:
                found[name] = source.name
            elif one.opcode == "cvt" and source.name in found and types_of(one) in _WIDENING:
                widened[name] = found[source.name]
            elif one.opcode == "cvt" and source.name in widened and types_of(one) in _NARROWING:
                found[name] = widened[source.name]
        return found

    def _with_constants(self, instruction: Instruction) -> Instruction:
        """Return a suspension with the operands replaced that are known to be constants."""
        operands = []
        for position, operand in enumerate(instruction.operands):
            if position and isinstance(operand, Register) and operand.name in self.definitions:
                source = self.code[self.definitions[operand.name]]
                if (
                    source.opcode == "mov"
                    and isinstance(source.operands[1], Immediate)
                    and "pred" not in source.modifiers
                ):
                    operand = source.operands[1]
            operands.append(operand)
        return replace(instruction, operands=tuple(operands))

    def _repeatable(self) -> set[str]:
        """Return the registers that depend on special registers, parameters and constants alone."""
        found: set[str] = set()
        for index, instruction in enumerate(self.code):  # text order: a definition stands before its uses
            names = writes(instruction)
            if len(names) != 1 or self.definitions.get(names[0]) != index:
                continue
            if instruction.opcode == "ld":
                source = instruction.operands[1]
                base = getattr(source, "base", None)
                pure = isinstance(base, Symbol) and base.name in self.layout.param_offsets
            else:
                pure = opcode_of(instruction.opcode).is_pure and "cc" not in instruction.modifiers
            if pure and all(self._is_repeatable(name, found) for name in reads(instruction)):
                found.add(names[0])
        return found

    def _is_repeatable(self, name: str, found: set[str]) -> bool:
        if name in self.function.registers:
            return name in found
        return name in REPEATABLE

    def _repeat(self, names: Iterable[str]) -> list[Instruction]:
        """Return the instructions that compute `names` again, in order."""
        needed: set[int] = set()
        pending = [name for name in names if name in self.repeatable]
        while pending:
            index = self.definitions[pending.pop()]
            if index not in needed:
                needed.add(index)
                pending.extend(name for name in reads(self.code[index]) if name in self.repeatable)
        return [self.code[index] for index in sorted(needed)]

    def kept(self, index: int, among: set[str]) -> list[str]:
        """Return those registers `among` all that must survive the suspension at `index`."""
        names = self._needed_after(index, among)
        return sorted(names - self.marching.registers if self.marching else names)

    def kept_alike(self, index: int, among: set[str]) -> dict[str, Cell]:
        """Return those registers `among` all that must survive the suspension at `index` and lie in a cell."""
        if self.marching is None:
            return {}
        return {name: self._cell(name) for name in sorted(self._needed_after(index, among) & self.marching.registers)}

    def needed_if(self, predicate: str, holds: bool, number: int, names: Iterable[str]) -> list[str]:
        """Return those among `names` that threads for which a predicate `holds`, or not, need from a block on."""
        block = self.flow.blocks[number]
        code = self.code[block.start : block.stop]
        last = code[-1] if code else None
        if last is None or opcode_of(last.opcode).control is not Control.BRANCH or last.guard is None:
            return list(names)
        target = last.operands[0]
        if last.guard.name != predicate or any(predicate in writes(one) for one in code):
            return list(names)
        assert isinstance(target, Symbol)
        goes = self.flow.target(last, target.name) if holds != last.guard.negated else number + 1
        needed = self.flow.blocks[goes].live_in.union(*map(reads, code))
        return [name for name in names if name in needed]

    def _needed_after(self, index: int, among: set[str]) -> set[str]:
        live = self.flow.blocks[self.flow.at[index]].live_out
        live |= frozenset().union(*(self._renewable[name] for name in live & self._renewable.keys()))
        names = (among & live) - set(writes(self.code[index])) - self.repeatable
        return names & self.function.registers.keys()

    def _cell(self, register: str) -> Cell:
        if register not in self.cells:
            self.cells[register] = Cell(storage_type(self.function.registers[register]), self.slot_bytes)
            self.slot_bytes += _CELL
        return self.cells[register]

    def _region(self, first: int) -> list[Instruction]:
        """Return the instructions from block `first` to the suspensions that come next, those included."""
        found: list[Instruction] = []
        done: set[int] = set()
        pending = [first]
        while pending:
            number = pending.pop()
            if number in done:
                continue
            done.add(number)
            block = self.flow.blocks[number]
            code = self.code[block.start : block.stop]
            # What can follow several suspensions is written once for each of them.
            last = block.stop - 1
            self.written += len(code) + (_SUSPENSION if last in self.rows else 0)
            if self.written > WRITTEN_SIZE + WRITTEN_RATIO * len(self.code):
                raise PtxError(f"{self.function.name}: too large with its parts between barriers written out")
            found += code
            if last not in self.rows:
                pending += block.successors
            elif self._conditional(last):
                pending.append(number + 1)
        return found

    def slot(self, register: str) -> tuple[int, str]:
        kind = storage_type(self.function.registers[register])
        if register not in self.slots:
            self.slots[register] = self.slot_bytes
            self.slot_bytes += ROW * type_bytes(self.function.registers[register])
        return self.slots[register], kind

    @cached_property
    def repeatable(self) -> Set[str]:
        """The registers that a region computes again when it begins, rather than that they were kept."""
        return self._known | self._renewable.keys()

    @cached_property
    def _renewable(self) -> Mapping[str, frozenset[str]]:
        """Of the repeatable registers, those that depend on cells, and on which."""
        if self.marching is None:
            return {}
        known = self._known | REPEATABLE
        return find_renewable(self.flow, self.definitions, known, self.marching.registers - known, self.rows)

    @cached_property
    def marching(self) -> Marching | None:
        """How threads march, None if some may have to wait for others that have come elsewhere."""
        if (
            not self._may_march
            or self.may_end
            or any(self._conditional(index) or self._may_wait(index) for index in self.rows)
        ):
            return None
        layout = self.layout
        return find_marching(
            self.flow, self.rows, layout.param_offsets.keys() | layout.shared.keys() | layout.globals.keys()
        )

    def _parts(self) -> dict[int, int | None]:
        """Return the suspension after which each region begins, None for the first, by the region's number."""
        return {0: None, **{number: index for index, number in self.region_of.items()}}

    def gone_around_by_rows(self) -> set[int]:
        """Return where loops begin around which rows of threads go together."""
        found = (self._even(index, self._region(self._first(index))) for index in self._parts().values())
        return {head for even in found if even is not None and even.by_row for head in even.parts}

    def in_order(self, successors: Mapping[int, set[int]], levels: int) -> list[int]:
        """Return the regions in the order in which all threads run them, each once; none if blocks do not run in step.

        They do if barriers are in no loop and no branch, and there is a tree of sums: a number of `levels`, regions of
        which only the first threads do anything. Other kernels became slower.
        """
        if levels < _TREE or self.layout.local_bytes or self.layout.shared_align > SHARED_STEP:
            return []
        if any(row.kind != Kind.BARRIER for row in self.rows.values()):
            return []
        order = [0]
        while len(successors[order[-1]]) == 1:
            (following,) = successors[order[-1]]
            if following == EXIT:
                return order
            if following in order:
                break
            order.append(following)
        return []

    def fetched(self) -> dict[Place, bool]:
        """Return the places whose addresses are known when a block with barriers begins, and which are written.

        They are those of which the block beside it needs the next line.
        """
        found: dict[Place, bool] = {}
        if self.instrument or not self.rows:
            return found
        widths = {name: NARROW for name, special in self.indices.items() if special == "%ntid.x"}
        near = {id(one) for one, step in accesses(self.code, "%ctaid.x", widths) if abs(step) in STEPS}
        for number, block in enumerate(self.flow.blocks):
            for one in self.code[block.start : block.stop]:
                place = place_of(one) if id(one) in near else None
                if place is None or place.register not in self._known or one.guard is not None:
                    continue
                if not self.flow.innermost_loop(number):
                    found[place] = found.get(place, False) or one.opcode == "st"
        return found if len(found) <= _MOST_FETCHED else {}

    def _runs_side_by_side(self, *, by_row: bool) -> bool:
        """Whether blocks beside each other run row by row: code that shares nothing between threads and has no loops.

        A loop reads what it has read in the row before; that would no longer be in the cache. One whose rounds rows do
        together reads on.
        """
        if self.instrument or self.rows or self.may_end or self.layout.shared:
            return False
        if self.flow.natural_loops() and not (by_row and self._is_flat()):
            return False
        return not any("shared" in one.modifiers for one in self.code)

    def has_long_rows(self) -> bool:
        """Whether rows are those of blocks beside each other, at least if threads go around loops together."""
        return self._runs_side_by_side(by_row=True) and self._is_flat()

    def _has_long_blocks(self) -> bool:
        """Whether a block's place in x is multiplied by a large constant: how many threads its rows have, no doubt."""
        for one in self.code:
            used = {self.indices.get(name, name) for name in reads(one)}
            if one.opcode in ("mul", "mad", "shl") and "%ctaid.x" in used:
                numbers = [int(o.value) for o in one.operands[1:3] if isinstance(o, Immediate)]
                if any((1 << number if one.opcode == "shl" else number) >= _LONG_ROW for number in numbers):
                    return True
        return False

    def _is_flat(self) -> bool:
        """Whether threads use their place in x, and their block's, for nothing but their place in the grid."""
        if self.layout.local_bytes:
            return False
        own = {"%tid.x", "%ctaid.x"}
        copies = {name: special for name, special in self.indices.items() if special in (*own, "%ntid.x")}
        for one in self.code:
            used = {copies.get(name, name) for name in reads(one)}
            if used.isdisjoint(own | SPECIAL.keys()) or copies.keys() & set(writes(one)):
                continue
            if any(name in SPECIAL and not name.startswith(PLACES) for name in used):
                return False
            if not used.isdisjoint(own):
                factors = {copies.get(o.name, o.name) for o in one.operands[1:3] if isinstance(o, Register)}
                is_place = one.opcode == "mad" and "lo" in one.modifiers and one.guard is None
                if not is_place or factors != {"%ctaid.x", "%ntid.x"} or used != {*own, "%ntid.x"}:
                    return False
        return True

    def _first(self, index: int | None) -> int:
        """Return the block that follows the suspension at `index`, of None the kernel's first."""
        return 0 if index is None else self.flow.at[index + 1]

    def _even(self, index: int | None, region: list[Instruction]) -> Even | None:
        """Return how threads run a region with loops together, None if each runs it by itself."""
        is_large = len(self.rows) >= MANY
        if is_large and not self._has_nests:
            return None
        region = self._with_suspension(index, region)
        ends = self._ends(region)
        if ends is None:
            return None
        own: dict[str, int | None] = {}
        if index is not None:
            for name in self.kept(index, touched(region)):
                kind = storage_type(self.function.registers[name])
                own[name] = self.distances.get(name) if kind in ("i32", "i64") else None
            own |= dict.fromkeys(self.kept_alike(index, touched(region + self._repeated(index, region))), 0)
            own |= dict.fromkeys(writes(self.code[index]))
        before = self._repeated(index, region)
        around, strides = self.rows_go_around, self.strides
        return find_even(self.flow, self._first(index), ends, before, own, around, strides, nests_alone=is_large)

    @cached_property
    def _has_nests(self) -> bool:
        """Whether there are loops with others inside in which no thread is suspended."""
        loops = self.flow.natural_loops()
        suspended = {self.flow.at[index] for index in self.rows}
        return any(
            suspended.isdisjoint(outer) and any(inner < outer for inner in loops.values()) for outer in loops.values()
        )

    def _stretches(self) -> Even | None:
        """Return how threads run the kernel in stretches, None if rows of them are not cut.

        Short rows, of 8 or 16 threads, would take up to twice as long, and a kernel of many regions three times as long
        to compile. Rows are long if they are those of blocks beside each other, or the blocks seem to be long.
        """
        has_long_rows = self.has_long_rows() or (self._runs_side_by_side(by_row=False) and self._has_long_blocks())
        if not has_long_rows or len(self.rows) >= MANY or self._ends(self.code) is None:
            return None
        return find_stretches(self.flow)

    def _ends(self, region: list[Instruction]) -> frozenset[int] | None:
        """Return the blocks that suspend all threads that come to them, None if those of a `region` run alone."""
        if self.instrument or self.may_end or self.layout.local_bytes:
            return None
        if any(one.opcode in ("yield", "progress") for one in region):
            return None
        ends = frozenset(number for number, block in enumerate(self.flow.blocks) if block.stop - 1 in self.rows)
        return None if any(self._conditional(self.flow.blocks[number].stop - 1) for number in ends) else ends

    def _regular(self, index: int | None, region: list[Instruction]) -> dict[str, Regular]:
        """Return the registers that a `region` reads from slots and that may be regular there, or are known to be."""
        found: dict[str, Regular] = {}
        known = self.marching.distances if self.marching is not None else {}
        if index is None or self.rows[index].kind not in (Kind.PRESENT, Kind.BARRIER):
            return found
        if not self.flow.innermost_loop(self.flow.at[index]):
            return found  # once is not worth the time that it takes to compile
        for register in self.kept(index, touched(region)):
            distance = known.get(register, self.distances.get(register))
            if distance is not None:
                offset, kind = self.slot(register)
                if kind in ("i32", "i64"):
                    found[register] = Regular(kind, offset, distance, is_known=register in known)
        return found

    def _repeated(self, index: int | None, region: list[Instruction]) -> list[Instruction]:
        """Return what a `region` computes once more when it begins."""
        if index is None:
            return []
        return self._repeat(touched(region) & self.flow.blocks[self.flow.at[index]].live_out)

    def _with_suspension(self, index: int | None, region: list[Instruction]) -> list[Instruction]:
        return region + ([] if index is None else [self.code[index]])

    def suspends(self, index: int) -> bool:
        """Whether the instruction at `index` suspends threads."""
        return index in self.rows

    def _yields(self, index: int) -> bool:
        return self.rows[index].kind == Kind.YIELD

    def _conditional(self, index: int) -> bool:
        """Whether a thread may pass the suspension at `index` without waiting."""
        instruction = self.code[index]
        return instruction.guard is not None or (self._yields(index) and "always" not in instruction.modifiers)

    def _may_wait(self, index: int) -> bool:
        """Whether some threads may have to wait at the suspension at `index` though all of the block are there."""
        instruction, row = self.code[index], self.rows[index]
        if row.kind == Kind.WARP:
            mask = next(operand for name, operand, _ in row.leave(instruction) if name == "mask")
            return not (isinstance(mask, Immediate) and int(mask.value) & 0xFFFFFFFF == 0xFFFFFFFF)
        return self._apart(row) or self._counted(instruction, row) or row.kind == Kind.WAIT

    def _apart(self, row: Suspension) -> bool:
        """Whether the scheduler must look at each thread, though all of them are at the same suspension."""
        if row.kind not in (Kind.BARRIER, Kind.BARRIER_REDUCE):
            return row.kind in (Kind.ARRIVE, Kind.YIELD)
        return self.counts_arrivals

    def _counted(self, instruction: Instruction, row: Suspension) -> bool:
        """Whether threads at the same instruction may be at different barriers, or at one for some of them."""
        if row.kind not in (Kind.BARRIER, Kind.BARRIER_REDUCE):
            return False
        number, count = (operand for name, operand, _ in row.leave(instruction) if name in "ab")
        return not (isinstance(number, Immediate) and isinstance(count, Immediate) and not count.value)


def goes_by_rows(function: Function, layout: Layout) -> bool:
    """Whether there are loops that go on by the size of the grid, and rows of threads go around all together."""
    if not stride_loops(function, Flow(function)):
        return False
    try:
        regions = Regions(function, layout, Instrument.NONE, False, at=[])
        return regions.strides <= regions.gone_around_by_rows()
    except Exception:  # what is the matter is said when the kernel is translated
        return False


def touched(region: Iterable[Instruction]) -> set[str]:
    """Return the registers that a region reads or writes."""
    return {name for one in region for names in (reads(one), writes(one)) for name in names}
