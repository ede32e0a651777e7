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
from dataclasses import dataclass, replace

from cudatool.limits import WRITTEN_RATIO, WRITTEN_SIZE
from cudatool.ptx import (
    Address,
    Flow,
    Function,
    Immediate,
    Instruction,
    PtxError,
    Register,
    Symbol,
    opcode_of,
    space_of,
    type_bytes,
)
from cudatool.ptx.flow import reads, writes
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
from cudatool.sim.jit.bounds import first_threads
from cudatool.sim.jit.checking import functions
from cudatool.sim.jit.collective import (
    ARGUMENT_ARRAYS,
    ROW,
    Kind,
    Suspension,
    array_offset,
    following_array,
    suspension_of,
)
from cudatool.sim.jit.context import EXIT
from cudatool.sim.jit.divergence import divergent
from cudatool.sim.jit.emit import (
    ASYNC_QUEUE,
    ENVIRONMENT,
    SPECIAL,
    Emitter,
    Layout,
    UntranslatedInstruction,
    storage_type,
)
from cudatool.sim.jit.even import WIDTH, Even, find_even
from cudatool.sim.jit.grid import block, grid, side_by_side
from cudatool.sim.jit.instrument import Instrument, Needless
from cudatool.sim.jit.neighbors import distances
from cudatool.sim.jit.rows import ByRow
from cudatool.sim.jit.steps import stride_loops
from cudatool.sim.jit.table import TABLE, Lowering
from cudatool.sim.jit.together import THREAD, Together, enter_at_heads, from_the_beginning

__all__ = ["MARK", "REPEATABLE", "Native", "generate", "goes_by_rows"]

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

MARK = "; PTX "
"""Begins the comment that stands before the code of an instruction: its line in the PTX, and what it is."""

_VOLATILE = frozenset({"%clock", "%clock_hi", "%clock64", "%globaltimer", "%globaltimer_lo", "%globaltimer_hi"})
REPEATABLE = frozenset(SPECIAL) - _VOLATILE
"""Special registers that have the same value whenever a thread reads them."""

_PLACES = ("%tid.", "%ntid.", "%ctaid.", "%nctaid.")
_POLLS = 32  # how often a thread polls in a loop before it lets others go on
_MANY = 32  # regions from which on each is a function of its own: LLVM takes too long for all of them as one
_SUSPENSION = 12  # instructions that leaving a region comes to
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
    """

    text: str
    slot_bytes: int
    parks: bool


def generate(
    function: Function,
    layout: Layout,
    *,
    instrument: Instrument,
    large_grid: bool,
    needless: Needless = frozenset(),
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
    marked
        Say in a comment (:data:`MARK`) which instruction each part of the text is for.

    Raises
    ------
    UnsupportedInstruction
        Names the instruction.
    UntranslatedInstruction
        The translator failed at it.
    """
    at: list[Instruction] = []
    try:
        return _Kernel(function, layout, instrument, large_grid, needless, marked=marked, at=at).generate()
    except PtxError:
        raise
    except Exception as error:  # an unforeseen form fails the kernel, not the driver
        what, line = (at[-1].name, at[-1].line) if at else ("the kernel", 0)
        reason = f"{type(error).__name__}: {error}"
        raise UntranslatedInstruction(what, function.name, None, line, reason) from error


def goes_by_rows(function: Function, layout: Layout) -> bool:
    """Whether there are loops that go on by the size of the grid, and rows of threads go around all together."""
    try:
        kernel = _Kernel(function, layout, Instrument.NONE, False, frozenset(), marked=False, at=[])
        return bool(kernel.strides) and kernel.strides <= kernel.gone_around_by_rows()
    except PtxError:  # which is said when it is translated
        return False


class _Kernel:
    def __init__(
        self,
        function: Function,
        layout: Layout,
        instrument: Instrument,
        large_grid: bool,
        needless: Needless,
        *,
        marked: bool,
        at: list[Instruction],
    ) -> None:
        self.marked = marked
        # A copy: operands are replaced below, and the condition code becomes a register where it is used.
        self.code = list(function.instructions)
        self.function = replace(function, instructions=self.code, registers=dict(function.registers))
        self.layout = layout
        self.instrument, self.needless = instrument, needless
        checks_memory = instrument & (Instrument.MEMCHECK | Instrument.INITCHECK)
        self.ranges = ArgumentRanges.of(function, layout.param_offsets).of_line if checks_memory else {}
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
        )
        self.counts_arrivals = any(row.kind == Kind.ARRIVE for row in self.rows.values())
        split = frozenset(self.rows) | frozenset(index + 1 for index in self.rows)
        self.flow = Flow(self.function, split)
        self.strides = set() if instrument else stride_loops(self.function, self.flow).keys()
        self.repeatable = self._repeatable()
        steps = instrument is Instrument.NONE and bool(self.rows)
        self.distances = distances(self.function) if steps else {}
        self.slots: dict[str, int] = {}
        self.slot_bytes = 4 * ROW * (1 + len(ARGUMENT_ARRAYS) + extra)
        escapes = any(i.opcode == "cvta" and "local" in i.modifiers and "to" not in i.modifiers for i in self.code)
        self.parallel_generic = not escapes
        self.constants = self._constant_arrays()
        self.declarations: set[str] = set()
        self.validated: set[int] = set()
        self.parts: list[str] = []
        self.written = 0  # instructions

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

    # ---- what need not be kept ----

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
        found = {}
        for name, index in self.definitions.items():
            source = self.code[index].operands[-1]
            if self.code[index].opcode == "mov" and isinstance(source, Register) and source.name in SPECIAL:
                found[name] = source.name
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
        block = self.flow.blocks[self.flow.at[index]]
        names = (among & block.live_out) - set(writes(self.code[index])) - self.repeatable
        return sorted(names & self.function.registers.keys())

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

    # ---- the module ----

    def _parts(self) -> dict[int, int | None]:
        """Return the suspension after which each region begins, None for the first, by the region's number."""
        return {0: None, **{number: index for index, number in self.region_of.items()}}

    def gone_around_by_rows(self) -> set[int]:
        """Return where loops begin around which rows of threads go together."""
        found = (self._even(index, self._region(self._first(index))) for index in self._parts().values())
        return {head for even in found if even is not None and even.by_row for head in even.parts}

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
        diverges = any(len(after) > 1 for after in successors.values())
        for number, after in successors.items():
            only = next(iter(after)) if len(after) == 1 else None if self.rows else EXIT
            self._all_threads(number, parts[number], regions[number], only, even[number], apart=len(parts) > _MANY)
        for index, number in self.region_of.items():
            diverges |= self._collective(number, index)
        self.parts.append(block(kinds, diverges=diverges))
        if diverges:
            self.parts.append(
                divergent(
                    kinds,
                    {number: self.code[index].line for index, number in self.region_of.items()},
                    checked=bool(self.instrument & Instrument.SYNCCHECK),
                )
            )
        if self.rows:
            self.parts.append(scheduler.AGREED)
        if any(self._counted(self.code[index], row) for index, row in self.rows.items()):
            self.parts.append(scheduler.ONE_BARRIER)
        if Kind.WAIT in kinds.values():
            self.parts.append(scheduler.PASSED)
        by_row = (one := even[0]) is not None and one.by_row
        beside = self._runs_side_by_side(by_row=by_row)
        if beside:
            self.parts.append(side_by_side(is_flat=self._is_flat(), by_row=by_row))
        self.parts.append(grid(self.layout.param_bytes, parks=parks, constants=self.constants, is_side_by_side=beside))
        self.parts.append(functions(self.instrument, self.validated))
        text = "\n".join([*sorted(self.declarations), scheduler.PRELUDE, scheduler.stop(), *self.parts])
        return Native(_declared_once(text), self.slot_bytes, parks)

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
            if any(name in SPECIAL and not name.startswith(_PLACES) for name in used):
                return False
            if not used.isdisjoint(own):
                factors = {copies.get(o.name, o.name) for o in one.operands[1:3] if isinstance(o, Register)}
                is_place = one.opcode == "mad" and "lo" in one.modifiers and one.guard is None
                if not is_place or factors != {"%ctaid.x", "%ntid.x"} or used != {*own, "%ntid.x"}:
                    return False
        return True

    def _all_threads(
        self,
        number: int,
        index: int | None,
        region: list[Instruction],
        only: int | None,
        even: Even | None,
        *,
        apart: bool,
    ) -> None:
        """Emit ``all_<number>``, and the forms of its `region` that it may use for threads that are alike."""
        regular: dict[str, scheduler.Regular] = {}
        if even is not None:
            self._together(number, index, region, even, only)
        elif regular := self._regular(index, region):
            self._thread(number, index, region, regular)
        self.parts.append(
            scheduler.all_threads(
                number,
                only,
                rotated=bool(self.instrument & Instrument.RACECHECK),
                apart=apart,
                regular=list(regular.values()),
                together=WIDTH if even else 0,
                by_row=even is not None and even.by_row,
                most=None if even or regular or only is None else self._first_threads(index, region),
            )
        )

    def _first_threads(self, index: int | None, region: list[Instruction]) -> int | None:
        """Return how many threads of a row do anything in a `region` that all threads leave at one place."""
        if self.instrument or self.may_end:
            return None
        written = {name for one in self._with_suspension(index, region) for name in writes(one)}

        def leaves_nothing(at: int) -> bool:
            one = self.code[at]
            if at in self.rows:
                left = {name for name, _, _ in self.rows[at].leave(one)}
                return not (self._conditional(at) or left - self.constants.keys() or self.kept(at, written))
            return opcode_of(one.opcode).control is Control.END and one.guard is None

        return first_threads(self.flow, self._first(index), self.definitions, self.indices, leaves_nothing)

    def _first(self, index: int | None) -> int:
        """Return the block that follows the suspension at `index`, of None the kernel's first."""
        return 0 if index is None else self.flow.at[index + 1]

    def _regular(self, index: int | None, region: list[Instruction]) -> dict[str, scheduler.Regular]:
        """Return the registers that a `region` reads from slots, and that may be regular there."""
        found: dict[str, scheduler.Regular] = {}
        if index is None or self.rows[index].kind not in (Kind.PRESENT, Kind.BARRIER):
            return found
        if not self.flow.innermost_loop(self.flow.at[index]):
            return found  # once is not worth the time that it takes to compile
        for register in self.kept(index, _touched(region)):
            if register in self.distances:
                offset, kind = self.slot(register)
                if kind in ("i32", "i64"):
                    found[register] = scheduler.Regular(kind, offset, self.distances[register])
        return found

    def _even(self, index: int | None, region: list[Instruction]) -> Even | None:
        """Return how threads run a region together, None if each runs it by itself."""
        if self.instrument or self.may_end or self.layout.local_bytes or len(self.rows) >= _MANY:
            return None
        first = self._first(index)
        region = self._with_suspension(index, region)
        if any(one.opcode in ("yield", "progress") for one in region):
            return None
        ends = frozenset(number for number, block in enumerate(self.flow.blocks) if block.stop - 1 in self.rows)
        if any(self._conditional(self.flow.blocks[number].stop - 1) for number in ends):
            return None
        own: dict[str, int | None] = {}
        if index is not None:
            for name in self.kept(index, _touched(region)):
                kind = storage_type(self.function.registers[name])
                own[name] = self.distances.get(name) if kind in ("i32", "i64") else None
            own |= dict.fromkeys(writes(self.code[index]))
        return find_even(self.flow, first, ends, self._repeated(index, region), own, self.strides)

    def _repeated(self, index: int | None, region: list[Instruction]) -> list[Instruction]:
        """Return what a `region` computes once more when it begins."""
        if index is None:
            return []
        return self._repeat(_touched(region) & self.flow.blocks[self.flow.at[index]].live_out)

    def _together(
        self, number: int, index: int | None, region: list[Instruction], even: Even, only: int | None
    ) -> None:
        region = self._with_suspension(index, region)
        own = [] if index is None else self.kept(index, _touched(region))
        form = ByRow if even.by_row else Together
        form(self, number, index, even, self._repeated(index, region), own, region, only).generate()

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
        name = f"{'regular' if regular else 'thread'}_{number}"
        heads = list(heads)
        if heads:
            name = f"from_{number}"
            arguments.append("i32 %from")
            enter_at_heads(self, e, heads, region + self._repeated(index, region))
            self.parts.append(from_the_beginning(number))
        if index is not None:
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
        header = f"define internal i32 @{name}({', '.join(arguments)}) #0 {{\nentry:"
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
        for register in self.kept(index, _touched(region)):
            if register in regular:
                kind, offset, distance = regular[register]
                place = "%tx" if kind == "i32" else e.op("zext i32 %tx to i64")
                by = e.op(f"mul nsw {kind} {place}, {distance}")
                e.write(register, e.op(f"add nsw {kind} %first.{offset}, {by}"), kind)
            else:
                self.take(e, register)
        for repeated in self._repeated(index, region):
            self.instruction(e, repeated)
        self.resume(e, index)

    def _with_suspension(self, index: int | None, region: list[Instruction]) -> list[Instruction]:
        return region + ([] if index is None else [self.code[index]])

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

    def suspends(self, index: int) -> bool:
        """Whether the instruction at `index` suspends threads."""
        return index in self.rows

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
            there = f"label %b{self.flow.target(instruction, target.name)}"
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
            e.emit(f"switch i32 {e.get(index, 'u32')}, label %b{targets[0]} [ {cases} ]")
        else:
            following.add(EXIT)
            e.emit(f"ret i32 {EXIT}")

    def _yields(self, index: int) -> bool:
        return self.rows[index].kind == Kind.YIELD

    def _conditional(self, index: int) -> bool:
        """Whether a thread may pass the suspension at `index` without waiting."""
        instruction = self.code[index]
        return instruction.guard is not None or (self._yields(index) and "always" not in instruction.modifiers)

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
        checked = apart or counted or row.kind == Kind.WAIT
        if row.kind == Kind.WARP:
            mask = next(operand for name, operand, _ in row.leave(instruction) if name == "mask")
            checked = not (isinstance(mask, Immediate) and int(mask.value) & 0xFFFFFFFF == 0xFFFFFFFF)
        self.parts.append(scheduler.whole_block(number, row.kind, check_masks=checked, apart=apart, counted=counted))
        return checked

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


def _touched(region: Iterable[Instruction]) -> set[str]:
    """Return the registers that a region reads or writes."""
    return {name for one in region for names in (reads(one), writes(one)) for name in names}
