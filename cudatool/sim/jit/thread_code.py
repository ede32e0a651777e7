"""One thread's code in a region: its registers, its instructions, what it leaves at a suspension and takes after it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

from cudatool.ptx import Address, Function, Immediate, Instruction, Symbol, opcode_of, space_of
from cudatool.ptx.guesses import guessing_loads
from cudatool.ptx.isa import Control
from cudatool.sim.jit import (
    arithmetic,
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
from cudatool.sim.jit.code import MARK
from cudatool.sim.jit.collective import array_offset, following_array
from cudatool.sim.jit.context import EXIT, Context
from cudatool.sim.jit.emit import Emitter, storage_type
from cudatool.sim.jit.instrument import Instrument, Needless
from cudatool.sim.jit.layout import Layout
from cudatool.sim.jit.regions import Regions, touched
from cudatool.sim.jit.table import TABLE, Lowering

__all__ = ["POLLS", "ThreadCode", "whole"]

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


POLLS = 32  # how often a thread polls in a loop before it lets others go on
_MAX_STACK = 16384  # local memory beyond this is not put on the host's stack


class ThreadCode(Regions):
    """What emits the code of one thread, and keeps what the kernel's module needs for it."""

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
        self.guesses = guessing_loads(function) if instrument & Instrument.RACECHECK else frozenset[int]()
        escapes = any(i.opcode == "cvta" and "local" in i.modifiers and "to" not in i.modifiers for i in self.code)
        self.parallel_generic = not escapes
        self.constants = self._constant_arrays()
        self.declarations: set[str] = set()
        self.validated: set[int] = set()
        self.parts: list[str] = []
        self.counts = False  # rounds of loops
        self.levels = 0  # regions of which only the first threads of a row do anything
        self.needs_no_arrays = False  # whether rows of the last region that threads run together may be longer

    def emitter(self, function: Function | None = None, indices: dict[str, str] | None = None) -> Emitter:
        """Return an emitter for the kernel, or for a `function` with copies of special registers in `indices`."""
        e = Emitter(
            function or self.function,
            self.layout,
            instrument=self.instrument,
            needless=self.needless,
            ranges=self.ranges,
            parallel_generic=self.parallel_generic,
            indices=self.indices if indices is None else indices,
        )
        e.orders_by_flags, e.guesses = self.orders_by_flags, self.guesses
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
            with whole(e):
                for name, operand, type_name in row.leave(self.code[index]):
                    byte = None
                    if isinstance(operand, Immediate) and type_name == "b32":
                        byte = {0: 0, 0xFFFFFFFF: 0xFF}.get(int(operand.value) & 0xFFFFFFFF)
                    left.setdefault(name, set()).add(byte)
                    if type_name == "b64":
                        left.setdefault(following_array(name), set()).add(None)
        return {name: byte for name, (byte, *others) in left.items() if byte is not None and not others}

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
            *(f"  {slot} = alloca {storage_type(e.function.registers[name])}" for name, slot in e.used.items()),
            "  %accesses = alloca i32\n  store i32 0, ptr %accesses",
            f"  %polls = alloca i32\n  store i32 {polls}, ptr %polls",
        ]

    def resume(self, e: Emitter, index: int) -> None:
        """Emit what a thread does first after the suspension at `index`."""
        e.instruction = self.code[index]
        with whole(e):
            self.rows[index].resume(e, self.code[index])

    def take(self, e: Emitter, register: str, place: str = "%slot", into: str = "") -> None:
        """Emit what loads a register from the slot of the thread at a `place` in the block, `into` another if given."""
        offset, kind = self.slot(register)
        at = self._own_slot(e, offset, kind, place)
        value = e.op(f"load {'i8' if kind == 'i1' else kind}, ptr {at}, !llvm.access.group !1")
        e.write(into or register, e.op(f"trunc i8 {value} to i1") if kind == "i1" else value, kind)

    def keep(self, e: Emitter, register: str, place: str = "%slot", source: str = "") -> None:
        """Emit what stores a register, or what `source` holds, in the slot of the thread at a `place` in the block."""
        offset, kind = self.slot(register)
        value, _ = e.read(source or register)
        if kind == "i1":
            value, kind = e.op(f"zext i1 {value} to i8"), "i8"
        e.emit(f"store {kind} {value}, ptr {self._own_slot(e, offset, kind, place)}, !llvm.access.group !1")

    def _own_slot(self, e: Emitter, offset: int, kind: str, place: str = "%slot") -> str:
        pointer = e.op(f"getelementptr i8, ptr %slots, i64 {offset}")
        return e.op(f"getelementptr {'i8' if kind == 'i1' else kind}, ptr {pointer}, i64 {place}")

    def _block(
        self, e: Emitter, number: int, following: set[int], written: set[str], goes: int | None = None
    ) -> list[int]:
        """Emit a basic block of a region that writes the registers `written`; return the blocks that it leads to.

        All threads go from it to the block that `goes` names, if it names one.
        """
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
                if goes is not None:
                    e.emit(f"br label %b{goes}")
                    return [goes]
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
            _pass_unless(e, e.op(f"icmp uge i32 {polls}, {POLLS}"), number)
        if instruction.guard is not None:
            _pass_unless(e, e.get(instruction.guard, "pred"), number)
        if "cluster" in instruction.modifiers:
            races.cluster(e, races.ClusterBarrier.WAIT)
        with whole(e):
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
            self.keep(e, register)
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


def _pass_unless(e: Emitter, condition: str, number: int) -> None:
    """Emit a branch to what follows block `number`, unless `condition` holds."""
    stay = e.new_label()
    e.emit(f"br i1 {condition}, label %{stay}, label %b{number + 1}")
    e.label(stay)


def _emit(row: Lowering, e: Emitter, instruction: Instruction) -> None:
    with whole(e):
        row(e, instruction)


@contextmanager
def whole(e: Emitter) -> Iterator[None]:
    """Refuse an instruction that lacks a type or an operand, or has one of another kind: rows take what they need."""
    try:
        yield
    except (LookupError, ValueError, StopIteration, AssertionError, AttributeError, TypeError):
        raise e.unsupported("no such form") from None
