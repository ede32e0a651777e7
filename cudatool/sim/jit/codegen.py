"""From a kernel to the text of an LLVM module.

The kernel's code is cut at its suspensions (barriers and warp collectives) into *regions*: region 0 begins at the
top, region k goes on after suspension k. For each region there is

- ``thread_k``: one thread's way through the region; returns the next suspension, or EXIT;
- ``all_k``: a loop of that over the threads of a block, which LLVM vectorizes where it can;
- ``together_k``: the same for threads that go around loops of the region together (:mod:`.together`);
- ``combine_k``, ``warps_k``: the collective operation of suspension k, for a warp and for the block.

``block`` runs regions as long as all threads agree on the next one (:mod:`.scheduler` for when they do not), and
``grid`` takes blocks until there are none. A kernel without suspensions is one region.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from cudatool.ptx import (
    Address,
    Function,
    Immediate,
    Instruction,
    PtxError,
    Symbol,
    opcode_of,
    space_of,
)
from cudatool.ptx.flow import writes
from cudatool.ptx.isa import Control
from cudatool.sim.jit import (
    arithmetic,
    asynchronous,
    bits,
    comparison,
    conversion,
    matrix,
    memory_instructions,
    races,
    runs,
    scheduler,
    system,
    texture,
    video,
)
from cudatool.sim.jit.argument_ranges import ArgumentRanges, near_accesses
from cudatool.sim.jit.bounds import Bound, first_threads
from cudatool.sim.jit.checking import functions
from cudatool.sim.jit.collective import (
    Kind,
    array_offset,
    following_array,
)
from cudatool.sim.jit.context import EXIT, Context
from cudatool.sim.jit.divergence import divergent
from cudatool.sim.jit.emit import ENVIRONMENT, Emitter, storage_type
from cudatool.sim.jit.even import MOST, WIDTH, Even
from cudatool.sim.jit.far import is_far
from cudatool.sim.jit.gathers import gathers_pay
from cudatool.sim.jit.grid import SIDE_BY_SIDE, block, grid, in_step, side_by_side
from cudatool.sim.jit.instrument import Instrument, Needless
from cudatool.sim.jit.layout import ASYNC_QUEUE, Layout
from cudatool.sim.jit.native import MARK
from cudatool.sim.jit.regions import MANY, Regions, touched
from cudatool.sim.jit.rows import ByRow
from cudatool.sim.jit.scheduler import Cell
from cudatool.sim.jit.stretches import Stretches
from cudatool.sim.jit.table import TABLE, Lowering
from cudatool.sim.jit.together import THREAD, Together, enter_at_heads, from_the_beginning
from cudatool.sim.jit.uniform import Marching, emit_ahead, emit_most
from cudatool.sim.jit.unsupported import UntranslatedInstruction

__all__ = ["Native", "generate"]

del (
    arithmetic,
    bits,
    comparison,
    conversion,
    matrix,
    memory_instructions,
    runs,
    system,
    texture,
    video,
)  # imported for the rows they enter


_POLLS = 32  # how often a thread polls in a loop before it lets others go on
_MAX_STACK = 16384  # local memory beyond this is not put on the host's stack


@dataclass(slots=True)
class Native:
    """Generated code.

    Attributes
    ----------
    text
        LLVM IR; its entry point is ``grid(ptr context)``.
    slot_bytes
        What a worker must provide at :attr:`Context.slots`.
    parks
        Whether a block may have to wait for other blocks (:attr:`Context.parked`).
    counts
        Whether it counts rounds of loops (:attr:`Context.rounds`).
    in_step
        Whether several blocks may run in step (:attr:`Context.in_step`).
    gathers
        Whether vectors are worth gathers (:func:`.gathers_pay`).
    """

    text: str
    slot_bytes: int
    parks: bool
    counts: bool
    in_step: bool
    gathers: bool


def generate(
    function: Function,
    layout: Layout,
    *,
    instrument: Instrument,
    large_grid: bool,
    needless: Needless = frozenset(),
    counts_rounds: bool = False,
    marked: bool = False,
) -> Native:
    """Translate a kernel whose calls are inlined.

    Parameters
    ----------
    instrument
        What accesses are instrumented for.
    large_grid
        Allow for more than 2**31 threads along an axis, which makes the code slower.
    needless
        The checks that are left out, and of which lines (:mod:`.independent`).
    counts_rounds
        Count the rounds of loops (:attr:`.Context.rounds`).
    marked
        Say in a comment (:data:`.MARK`) which instruction each part of the text is for.

    Raises
    ------
    UnsupportedInstruction
        Names the instruction.
    UntranslatedInstruction
        The translator failed at it.
    """
    at: list[Instruction] = []
    try:
        kernel = _Kernel(
            function, layout, instrument, large_grid, needless, counts_rounds=counts_rounds, marked=marked, at=at
        )
        return kernel.generate()
    except PtxError:
        raise
    except Exception as error:  # an unforeseen form fails the kernel, not the driver
        what, line = (at[-1].name, at[-1].line) if at else ("the kernel", 0)
        reason = f"{type(error).__name__}: {error}"
        raise UntranslatedInstruction(what, function.name, None, line, reason) from error


class _Kernel(Regions):
    def __init__(
        self,
        function: Function,
        layout: Layout,
        instrument: Instrument,
        large_grid: bool,
        needless: Needless,
        *,
        counts_rounds: bool,
        marked: bool,
        at: list[Instruction],
    ) -> None:
        super().__init__(function, layout, instrument, large_grid, at=at)
        self.marked, self.needless, self.counts_rounds = marked, needless, counts_rounds
        checks_memory = instrument & (Instrument.MEMCHECK | Instrument.INITCHECK)
        self.ranges = ArgumentRanges.of(function, layout.param_offsets).of_line if checks_memory else {}
        escapes = any(i.opcode == "cvta" and "local" in i.modifiers and "to" not in i.modifiers for i in self.code)
        self.parallel_generic = not escapes
        self.constants = self._constant_arrays()
        self.declarations: set[str] = set()
        self.validated: set[int] = set()
        self.parts: list[str] = []
        self.counts = False  # rounds of loops
        self.levels = 0  # regions of which only the first threads of a row do anything
        self.needs_no_arrays = False  # whether rows of the last region that threads run together may be longer

    def emitter(self) -> Emitter:
        e = Emitter(
            self.function,
            self.layout,
            instrument=self.instrument,
            needless=self.needless,
            ranges=self.ranges,
            parallel_generic=self.parallel_generic,
            indices=self.indices,
        )
        e.orders_by_flags = self.orders_by_flags
        return e

    def finish(self, e: Emitter) -> None:
        self.declarations |= e.declarations
        self.validated |= e.validated

    def _constant_arrays(self) -> dict[str, int]:
        """Return the argument arrays in which every suspension leaves the same number, 0 or all ones, and its bytes.

        Those of kernels whose only barrier is ``__syncthreads()``, or whose shuffles are of whole warps. They are
        filled when native code is entered, not by each thread at each suspension.
        """
        e = self.emitter()
        left: dict[str, set[int | None]] = {}
        for index, row in self.rows.items():
            e.instruction = self.code[index]
            with _whole(e):
                for name, operand, type_name in row.leave(self.code[index]):
                    byte = None
                    if isinstance(operand, Immediate) and type_name == "b32":
                        byte = {0: 0, 0xFFFFFFFF: 0xFF}.get(int(operand.value) & 0xFFFFFFFF)
                    left.setdefault(name, set()).add(byte)
                    if type_name == "b64":
                        left.setdefault(following_array(name), set()).add(None)
        return {name: byte for name, (byte, *others) in left.items() if byte is not None and not others}

    # ---- the module ----

    def generate(self) -> Native:
        parts = self._parts()
        # All of them before the first is emitted: a kernel that is too large is refused without that work.
        regions = {number: self._region(self._first(index)) for number, index in parts.items()}
        even = {number: self._even(index, regions[number]) for number, index in parts.items()}
        successors = {
            number: self._thread(number, index, regions[number], heads=one.parts if (one := even[number]) else ())
            for number, index in parts.items()
        }
        kinds = {number: self.rows[index].kind for index, number in self.region_of.items()}
        parks = Kind.YIELD in kinds.values()
        diverges = self.marching is None and any(len(after) > 1 for after in successors.values())
        rows = {}
        for number, after in successors.items():
            apart = len(parts) > MANY
            rows[number] = self._all_threads(number, parts[number], regions[number], after, even[number], apart=apart)
        for index, number in self.region_of.items():
            diverges |= self._collective(number, index)
        order = [] if diverges else self.in_order(successors, self.levels)
        self.parts.append(in_step(order) if order else block(kinds, diverges=diverges))
        if diverges:
            self.parts.append(
                divergent(
                    kinds,
                    {number: self.code[index].line for index, number in self.region_of.items()},
                    checked=bool(self.instrument & Instrument.SYNCCHECK),
                )
            )
        if self.rows and self.marching is None:
            self.parts.append(scheduler.AGREED)
        if any(self._counted(self.code[index], row) for index, row in self.rows.items()):
            self.parts.append(scheduler.ONE_BARRIER)
        if Kind.WAIT in kinds.values():
            self.parts.append(scheduler.PASSED)
        is_beside = self._runs_side_by_side(by_row=bool(rows[0])) and (bool(rows[0]) or even[0] is None)
        if is_beside:
            self.parts.append(side_by_side(is_flat=self._is_flat(), rows=rows[0]))
        self.parts.append(
            grid(
                self.layout.param_bytes,
                parks=parks,
                counts=self.counts,
                constants={} if order else self.constants,
                beside=self._beside() if is_beside else 0,
                far=is_beside and is_far(self.code),
                steps=bool(order),
            )
        )
        self.parts.append(functions(self.instrument, self.validated))
        text = "\n".join([*sorted(self.declarations), scheduler.PRELUDE, scheduler.stop(), *self.parts])
        return Native(_declared_once(text), self.slot_bytes, parks, self.counts, bool(order), gathers_pay(self.code))

    def _beside(self) -> int:
        """Return of how many threads rows of blocks beside each other are."""
        return MOST if self.needs_no_arrays and self._is_flat() else SIDE_BY_SIDE

    def _all_threads(
        self,
        number: int,
        index: int | None,
        region: list[Instruction],
        after: set[int],
        even: Even | None,
        *,
        apart: bool,
    ) -> str:
        """Emit ``all_<number>``, and the forms of its `region` that it may use for threads that are alike.

        It leads to the suspensions `after` it, or EXIT.

        Return the name of the one for a row of threads, empty if there is none.
        """
        regular: dict[str, scheduler.Regular] = {}
        rows = ""
        cells = self._cells(index, region)
        only = next(iter(after)) if len(after) == 1 else None if self.rows else EXIT
        ahead = self.marching is not None and self._ahead(self.marching, number, index, region, after, cells)
        notes = only is None and not ahead
        bound = self._first_threads(index, region) if not notes else None
        if even is not None:
            self._together(ByRow if even.by_row else Together, number, index, region, even, cells, notes=notes)
            rows = "together" if even.by_row else ""
        elif regular := self._regular(index, region):
            self._thread(number, index, region, regular)
            bound = None
        elif bound is not None:
            self.levels += 1
        elif (cut := self._stretches()) is not None:
            self._together(Stretches, number, index, region, cut, cells, notes=notes)
            rows = "stretches"
        if bound is not None and bound.register is not None and self.marching is not None:
            code = self._repeated(index, region) + self.code[self.flow.blocks[self._first(index)].start : bound.at]
            emit_most(self, self.marching, number, bound, code, cells)
        self.parts.append(
            scheduler.all_threads(
                number,
                only,
                rotated=bool(self.instrument & Instrument.RACECHECK),
                apart=apart,
                regular=list(regular.values()),
                together=WIDTH if even else 0,
                rows=rows,
                bound=bound,
                cells=list(cells.values()),
                ahead=ahead,
            )
        )
        return rows

    def _cells(self, index: int | None, region: list[Instruction]) -> dict[str, Cell]:
        """Return the cells whose values the threads of a `region` are given."""
        return {} if index is None else self.kept_alike(index, touched(region + self._repeated(index, region)))

    def _ahead(
        self,
        marching: Marching,
        number: int,
        index: int | None,
        region: list[Instruction],
        after: set[int],
        cells: dict[str, Cell],
    ) -> bool:
        """Emit ``ahead_<number>`` if there is something to find out; return whether it is there."""
        written = {name for one in region for name in writes(one)}
        ends = {at: self.kept_alike(at, written) for at, suspension in self.region_of.items() if suspension in after}
        if len(after) == 1 and not any(ends.values()):
            return False
        before = self._repeated(index, region)
        emit_ahead(self, marching, number, self._first(index), before, cells, ends)
        return True

    def _first_threads(self, index: int | None, region: list[Instruction]) -> Bound | None:
        """Return how many threads of a row do anything in a `region` that all threads leave at one place."""
        if self.instrument or self.may_end:
            return None
        written = {name for one in self._with_suspension(index, region) for name in writes(one)}

        def leaves_nothing(at: int, predicate: str, holds: bool) -> bool:
            one = self.code[at]
            if at in self.rows:
                left = {name for name, _, _ in self.rows[at].leave(one)}
                kept = self.needed_if(predicate, holds, self._first(at), self.kept(at, written))
                return not (self._conditional(at) or left - self.constants.keys() or kept)
            return opcode_of(one.opcode).control is Control.END and one.guard is None

        def is_uniform(register: str, at: int) -> bool:
            begins = self.flow.blocks[self._first(index)].start
            is_known = at >= begins or writes(self.code[at])[0] in self.repeatable
            return self.marching is not None and register in self.marching.registers and is_known

        return first_threads(self.flow, self._first(index), self.definitions, self.indices, is_uniform, leaves_nothing)

    def _together(
        self,
        form: type[Together],
        number: int,
        index: int | None,
        region: list[Instruction],
        even: Even,
        cells: dict[str, Cell],
        *,
        notes: bool,
    ) -> None:
        region = self._with_suspension(index, region)
        own = [] if index is None else self.kept(index, touched(region))
        made = form(self, number, index, even, self._repeated(index, region), own, cells, region, notes=notes)
        made.generate()
        self.needs_no_arrays = form is ByRow and not made.arrays

    def _thread(
        self,
        number: int,
        index: int | None,
        region: list[Instruction],
        regular: Mapping[str, scheduler.Regular] = {},
        heads: Iterable[int] = (),
    ) -> set[int]:
        """Emit ``thread_<number>``, which has a `region`; return the suspensions (or EXIT) that can come next.

        With `regular` registers it is ``regular_<number>``, which gets what the first thread has in them. With `heads`
        it is ``from_<number>``, which a thread may enter at these blocks, too (:mod:`.together`).
        """
        e = self.emitter()
        e.counts_accesses = True
        following: set[int] = set()
        first = self._first(index)
        region = self._with_suspension(index, region)
        written = {name for one in region for name in writes(one)}
        arguments = [ENVIRONMENT, THREAD, *scheduler.first_values(regular.values())]
        cells = self._cells(index, region)
        name = f"{'regular' if regular else 'thread'}_{number}"
        heads = list(heads)
        if heads:
            name = f"from_{number}"
            arguments.append("i32 %from")
            enter_at_heads(self, e, heads, region + self._repeated(index, region))
            self.parts.append(from_the_beginning(number, cells.values()))
        if index is not None:
            for register, cell in cells.items():
                e.write(register, cell.value, cell.kind)
            self._take_all(e, index, region, regular)
        elif ASYNC_QUEUE in self.layout.local:
            asynchronous.begin(e)
        e.emit(f"br label %b{first}")
        done: set[int] = set()
        pending = [first]
        while pending:
            block_number = pending.pop()
            if block_number not in done:
                done.add(block_number)
                pending.extend(self._block(e, block_number, following, written))
        self.finish(e)
        # A thread that goes on after a yield has polled without success: once more is enough.
        polls = _POLLS - 2 if index and self._yields(index) else 0
        given = ", ".join(arguments) + scheduler.parameters(cells.values())
        header = f"define internal i32 @{name}({given}) #0 {{\nentry:"
        self.parts.append("\n".join([header, *self.header(e, polls), *e.lines, "}"]))
        if self.may_end:
            following.add(EXIT)
        return following

    def _take_all(
        self, e: Emitter, index: int, region: list[Instruction], regular: Mapping[str, scheduler.Regular]
    ) -> None:
        """Emit what a thread has when it goes on after the suspension at `index`."""
        e.instruction = self.code[index]
        # What the region does not touch stays in its slot; what it does not write is there already when it ends.
        for register in self.kept(index, touched(region)):
            if register in regular:
                kind, offset, distance, _ = regular[register]
                place = "%tx" if kind == "i32" else e.op("zext i32 %tx to i64")
                by = e.op(f"mul nsw {kind} {place}, {distance}")
                e.write(register, e.op(f"add nsw {kind} %first.{offset}, {by}"), kind)
            else:
                self.take(e, register)
        for repeated in self._repeated(index, region):
            self.instruction(e, repeated)
        self.resume(e, index)

    def header(self, e: Emitter, polls: int = 0) -> list[str]:
        """Return what a function for one thread begins with."""
        local = f"alloca [{max(self.layout.local_bytes, 1)} x i8], align {self.layout.local_align}"
        if self.rows or self.layout.local_bytes > _MAX_STACK:
            local = "getelementptr i8, ptr %locals, i64 %local_offset"
        return [
            "  %slot = zext i32 %t to i64",
            f"  %local_offset = mul i64 %slot, {self.layout.local_bytes}",
            f"  %local = {local}",
            *(f"  {slot} = alloca {storage_type(self.function.registers[name])}" for name, slot in e.used.items()),
            "  %accesses = alloca i32\n  store i32 0, ptr %accesses",
            f"  %polls = alloca i32\n  store i32 {polls}, ptr %polls",
        ]

    def resume(self, e: Emitter, index: int) -> None:
        """Emit what a thread does first after the suspension at `index`."""
        e.instruction = self.code[index]
        with _whole(e):
            self.rows[index].resume(e, self.code[index])

    def take(self, e: Emitter, register: str) -> None:
        """Emit what loads a register from this thread's slot."""
        offset, kind = self.slot(register)
        at = self._own_slot(e, offset, kind)
        value = e.op(f"load {'i8' if kind == 'i1' else kind}, ptr {at}, !llvm.access.group !1")
        e.write(register, e.op(f"trunc i8 {value} to i1") if kind == "i1" else value, kind)

    def _own_slot(self, e: Emitter, offset: int, kind: str) -> str:
        pointer = e.op(f"getelementptr i8, ptr %slots, i64 {offset}")
        return e.op(f"getelementptr {'i8' if kind == 'i1' else kind}, ptr {pointer}, i64 %slot")

    def _block(self, e: Emitter, number: int, following: set[int], written: set[str]) -> list[int]:
        """Emit a basic block of a region that writes the registers `written`; return the blocks that it leads to."""
        block = self.flow.blocks[number]
        e.label(f"b{number}")
        if number + 1 == len(self.flow.blocks) and block.start == block.stop:
            following.add(EXIT)
            e.emit(f"ret i32 {EXIT}")
            return []
        leads = list(block.successors)
        e.near = near_accesses(self.code[block.start : block.stop], self.ranges)
        for index in range(block.start, block.stop):
            instruction = self.code[index]
            self._begin(e, instruction)
            if index in self.rows:
                following.add(self.region_of[index])
                self.suspend(e, index, number, written)
                return [number + 1] if self._conditional(index) else []
            if opcode_of(instruction.opcode).control not in (Control.NEXT, Control.STOP):
                self.branch(e, instruction, number, following)
                return leads
            self.instruction(e, instruction)
        e.emit(f"br label %b{number + 1}" if number + 1 in leads else "unreachable")  # after a trap
        return leads

    def _begin(self, e: Emitter, instruction: Instruction) -> None:
        """Let what is emitted next be for `instruction`."""
        e.instruction = instruction
        self.at[:] = [instruction]
        if self.marked:
            e.lines.append(f"{MARK}{instruction.line} {instruction.name}")

    def instruction(self, e: Emitter, instruction: Instruction) -> None:
        self._begin(e, instruction)
        row = TABLE.get(instruction.opcode)
        if row is None:
            raise e.unsupported()
        if instruction.guard is None:
            _emit(row, e, instruction)
            return
        with e.when(e.get(instruction.guard, "pred")):
            _emit(row, e, instruction)

    def branch(self, e: Emitter, instruction: Instruction, number: int, following: set[int]) -> None:
        guard = instruction.guard
        control = opcode_of(instruction.opcode).control
        if control is Control.BRANCH:
            target = instruction.operands[0]
            assert isinstance(target, Symbol)
            to = self.flow.target(instruction, target.name)
            there = f"label %b{to}"
            self.count_round(e, number, [to])
            if guard is None:
                e.emit(f"br {there}")
            else:
                e.emit(f"br i1 {e.get(guard, 'pred')}, {there}, label %b{number + 1}")
            return
        if guard is not None:
            _pass_unless(e, e.get(guard, "pred"), number)
        if control is Control.TABLE:
            index, table = instruction.operands
            assert isinstance(table, Symbol)
            targets = [self.flow.target(instruction, name) for name in self.function.branch_targets[table.name]]
            cases = " ".join(f"i32 {value}, label %b{block}" for value, block in enumerate(targets))
            self.count_round(e, number, targets)
            e.emit(f"switch i32 {e.get(index, 'u32')}, label %b{targets[0]} [ {cases} ]")
        else:
            following.add(EXIT)
            e.emit(f"ret i32 {EXIT}")

    def count_round(self, e: Emitter, number: int, leads: Iterable[int]) -> None:
        """Emit what counts a round of a loop, if block `number`, at its end, may lead back."""
        if self.counts_rounds and any(to <= number for to in leads):
            self.counts = True
            place = e.op(f"getelementptr i8, ptr %context, i64 {Context.rounds.offset}")
            more = e.op(f"add i64 {e.op(f'load i64, ptr {place}')}, 1")
            e.emit(f"store i64 {more}, ptr {place}")

    def suspend(self, e: Emitter, index: int, number: int, written: set[str]) -> None:
        instruction = self.code[index]
        if self._yields(index) and self._conditional(index):
            polls = e.op(f"add i32 {e.op('load i32, ptr %polls')}, 1")
            e.emit(f"store i32 {polls}, ptr %polls")
            _pass_unless(e, e.op(f"icmp uge i32 {polls}, {_POLLS}"), number)
        if instruction.guard is not None:
            _pass_unless(e, e.get(instruction.guard, "pred"), number)
        if "cluster" in instruction.modifiers:
            races.cluster(e, races.Cluster.WAIT)
        with _whole(e):
            leaving = list(self.rows[index].leave(instruction))
        for name, operand, type_name in leaving:
            if name in self.constants:
                continue
            if isinstance(operand, Address):
                part = e.instruction = self.rows[index].part(instruction, operand)
                space, pointer = e.pointer(space_of(part), operand)
                pointer = self.rows[index].access(e, part, space, pointer)
                self._leave(e, name, e.op(f"ptrtoint ptr {pointer} to i64"), type_name)
            else:
                self._leave(e, name, e.get(operand, "b64" if type_name == "phase" else type_name), type_name)
        for register in self.kept(index, written):
            offset, kind = self.slot(register)
            value, _ = e.read(register)
            if kind == "i1":
                value, kind = e.op(f"zext i1 {value} to i8"), "i8"
            e.emit(f"store {kind} {value}, ptr {self._own_slot(e, offset, kind)}, !llvm.access.group !1")
        e.emit(f"ret i32 {self.region_of[index]}")

    def _leave(self, e: Emitter, name: str, value: str, type_name: str) -> None:
        """Store an operand of a suspension in this thread's entry of an argument array."""
        if type_name == "pred":
            value = e.op(f"zext i1 {value} to i32")
        elif type_name == "phase":
            value = e.convert(e.op(f"lshr i64 {value}, 63"), "i64", "i32")
        elif type_name == "b64":
            high = e.op(f"lshr i64 {value}, 32")
            self._store_argument(e, following_array(name), e.convert(high, "i64", "i32"))
            value = e.convert(value, "i64", "i32")
        self._store_argument(e, name, value)

    def _store_argument(self, e: Emitter, name: str, value: str) -> None:
        at = self._own_slot(e, array_offset(name), "i32")
        e.emit(f"store i32 {value}, ptr {at}, align 4, !llvm.access.group !1")

    def _collective(self, number: int, index: int) -> bool:
        """Emit what combines suspension `number`; return whether some of its threads may have to wait for others."""
        instruction, row = self.code[index], self.rows[index]
        e = self.emitter()
        self._begin(e, instruction)
        with _whole(e):
            row.combine(e, instruction)
        self.finish(e)
        self.parts.append(
            "\n".join(
                [
                    f"define internal void @combine_{number}(",
                    f"    {ENVIRONMENT}, i64 %warp, i32 %lanes, ptr %accumulator) #0 {{",
                    "entry:",
                    *e.lines,
                    "  ret void",
                    "}",
                ]
            )
        )
        apart, counted = self._apart(row), self._counted(instruction, row)
        checked = self._may_wait(index)
        self.parts.append(scheduler.whole_block(number, row.kind, check_masks=checked, apart=apart, counted=counted))
        return checked


_SYMBOL = re.compile(r"^(declare|define) [^@\n]*@([\w.$]+)\(.*$", re.MULTILINE)


def _declared_once(text: str) -> str:
    """Return a module without repeated declarations: several parts of a kernel may need the same function."""
    known = {match[2] for match in _SYMBOL.finditer(text) if match[1] == "define"}

    def keep(match: re.Match[str]) -> str:
        if match[1] == "define":
            return match[0]
        repeated = match[2] in known
        known.add(match[2])
        return "" if repeated else match[0]

    return _SYMBOL.sub(keep, text)


def _pass_unless(e: Emitter, condition: str, number: int) -> None:
    """Emit a branch to what follows block `number`, unless `condition` holds."""
    stay = e.new_label()
    e.emit(f"br i1 {condition}, label %{stay}, label %b{number + 1}")
    e.label(stay)


def _emit(row: Lowering, e: Emitter, instruction: Instruction) -> None:
    with _whole(e):
        row(e, instruction)


@contextmanager
def _whole(e: Emitter) -> Iterator[None]:
    """Refuse an instruction that lacks a type or an operand, or has one of another kind: rows take what they need."""
    try:
        yield
    except (LookupError, ValueError, StopIteration, AssertionError, AttributeError, TypeError):
        raise e.unsupported("no such form") from None
