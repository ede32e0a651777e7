"""From a kernel to the text of an LLVM module.

The kernel's code is cut at its suspensions (barriers and warp collectives) into *regions*: region 0 begins at the
top, region k goes on after suspension k. For each region there is

- ``thread_k``: one thread's way through the region; returns the next suspension, or EXIT;
- ``all_k``: a loop of that over the threads of a block, which LLVM vectorizes where it can;
- ``busy_k``: that of a thread which is known to do something there (:mod:`.bounds`);
- ``asks_k``, ``which_k``: whether a thread does anything in the region, and which of many do (:mod:`.questions`);
- ``pair_k``: that of a thread and of the one in the next row, side by side (:mod:`.row_pairs`);
- ``together_k``: the same for threads that go around loops of the region together (:mod:`.together`);
- ``combine_k``, ``warps_k``: the collective operation of suspension k, for a warp and for the block.

``block`` runs regions as long as all threads agree on the next one (:mod:`.scheduler` for when they do not), and
``grid`` takes blocks until there are none. A kernel without suspensions is one region.

``block``, ``in_step``, ``side_by_side`` and ``warps_k`` are each called once at most, and marked ``alwaysinline``. LLVM
would inline them anyway, but only after it had simplified each by itself with all that was inlined into it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from cudatool.ptx import Function, Instruction, PtxError, opcode_of
from cudatool.ptx.flow import writes
from cudatool.ptx.isa import Control
from cudatool.sim.jit import asynchronous, scheduler
from cudatool.sim.jit.bounds import Bound, first_threads
from cudatool.sim.jit.checking import functions
from cudatool.sim.jit.collective import Kind, check_whole_warp, suspension_of
from cudatool.sim.jit.context import EXIT
from cudatool.sim.jit.divergence import divergent
from cudatool.sim.jit.edges import edges
from cudatool.sim.jit.emit import ENVIRONMENT
from cudatool.sim.jit.even import MOST, WIDTH, Even
from cudatool.sim.jit.far import is_far
from cudatool.sim.jit.fetch import emit_fetches, fetch_ahead
from cudatool.sim.jit.gathers import gathers_pay
from cudatool.sim.jit.grid import SIDE_BY_SIDE, block, grid, in_step, side_by_side
from cudatool.sim.jit.instrument import Instrument, Needless
from cudatool.sim.jit.layout import ASYNC_QUEUE, Layout
from cudatool.sim.jit.matrix import EVERYONE
from cudatool.sim.jit.questions import Question, find_question
from cudatool.sim.jit.regions import MANY, touched
from cudatool.sim.jit.row_pairs import NEXT_ROW, indices_of_both, is_chain, of_next_row, written_twice
from cudatool.sim.jit.rows import ByRow
from cudatool.sim.jit.scheduler import Cell
from cudatool.sim.jit.stretches import Stretches
from cudatool.sim.jit.thread_code import POLLS, ThreadCode, whole
from cudatool.sim.jit.thread_loops import (
    ThreadLoop,
    all_threads,
    asked_row,
    bounded_row,
    each_thread,
    in_parts,
    in_vectors,
    pair_of_rows,
    regular_row,
    whole_row,
)
from cudatool.sim.jit.together import THREAD, Together, enter_at_heads, from_the_beginning
from cudatool.sim.jit.uniform import Marching, emit_ahead, emit_most
from cudatool.sim.jit.unsupported import UntranslatedInstruction

__all__ = ["Native", "generate"]


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
    wide
        Whether it computes so much that vectors had better be as wide as there are: for each load, or in chains.
    """

    text: str
    slot_bytes: int
    parks: bool
    counts: bool
    in_step: bool
    gathers: bool
    wide: bool


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


class _Kernel(ThreadCode):
    has_chains = False  # regions that rows of threads go through in pairs

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
        fetches = not order and self._fetch_ahead()
        self.parts.append(in_step(order) if order else block(kinds, successors, diverges=diverges, fetches=fetches))
        if diverges:
            self.parts.append(
                divergent(
                    kinds,
                    {number: self.code[index].line for index, number in self.region_of.items()},
                    checked=bool(self.instrument & Instrument.SYNCCHECK),
                )
            )
        self._helpers(kinds)
        is_beside = self._runs_side_by_side(by_row=bool(rows[0])) and (bool(rows[0]) or even[0] is None)
        if is_beside:
            self.parts.append(side_by_side(is_flat=self._is_flat(), rows=rows[0]))
        self.parts.append(
            grid(
                self.layout.param_bytes,
                8 * len(self.layout.globals),
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
        gathers = gathers_pay(self.flow)
        wide = gathers or self.has_chains
        return Native(_declared_once(text), self.slot_bytes, parks, self.counts, bool(order), gathers, wide)

    def _helpers(self, kinds: Mapping[int, int]) -> None:
        """Emit what functions of the scheduler call, of suspensions of these `kinds`."""
        if self.rows and self.marching is None:
            self.parts.append(scheduler.AGREED)
        if any(self._counted(self.code[index], row) for index, row in self.rows.items()):
            self.parts.append(scheduler.ONE_BARRIER)
        if Kind.WAIT in kinds.values():
            self.parts.append(scheduler.PASSED)

    def _fetch_ahead(self) -> bool:
        """Emit ``fetch_ahead`` if there is anything to fetch (:mod:`.fetch`); return whether there is."""
        places = self.fetched()
        if not places:
            return False
        e = self.emitter()
        for one in self._repeat(place.register for place in places):
            self.instruction(e, one)
        emit_fetches(e, places)
        e.emit("ret i32 0")
        self.finish(e)
        header = f"define internal i32 @fetch({ENVIRONMENT}, {THREAD}) #0 {{\nentry:"
        self.parts.append("\n".join([header, *self.header(e), *e.lines, "}", fetch_ahead()]))
        return True

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
        function = ""
        cells = self._cells(index, region)
        only = next(iter(after)) if len(after) == 1 else None if self.rows else EXIT
        ahead = self.marching is not None and self._ahead(self.marching, number, index, region, after, cells)
        loop = ThreadLoop(number, only, list(cells.values()), ahead)
        bound = self._first_threads(index, region) if not loop.notes else None
        if even is not None:
            self._together(ByRow if even.by_row else Together, number, index, region, even, cells, notes=loop.notes)
            self._most(number, index, region, bound, cells)
            function = "together" if even.by_row else ""
            row = whole_row(loop, function, bound) if function else in_vectors(loop, WIDTH, bound)
        elif regular := self._regular(index, region):
            self._thread(number, index, region, regular)
            row = regular_row(loop, list(regular.values()))
        elif bound is not None:
            self.levels += 1
            if self._most(number, index, region, bound, cells):
                self._thread(number, index, region, busy=bound)
            row = bounded_row(loop, bound)
        elif (cut := self._stretches()) is not None:
            self._together(Stretches, number, index, region, cut, cells, notes=loop.notes)
            function = "stretches"
            row = whole_row(loop, function, None)
        elif not apart and (question := self._question(loop, index, region, after)) is not None:
            self._asks(number, index, region, question, cells)
            row = asked_row(loop)
        elif only is not None and self._is_chain(index, region, only):
            self._pair(number, index, region, cells, only)
            row = pair_of_rows(loop)
        elif self.instrument & Instrument.RACECHECK:
            row = in_parts()
        else:
            has_own = not (self.instrument or self.counts_rounds or apart)
            row = each_thread(loop, edges(region, self.indices) if has_own else ())
        self.parts.append(all_threads(loop, row, apart=apart))
        return function

    def _most(
        self, number: int, index: int | None, region: list[Instruction], bound: Bound | None, cells: dict[str, Cell]
    ) -> bool:
        """Emit ``most_<number>`` if a `bound` is not known before the kernel runs; return whether it is there."""
        if bound is None or bound.register is None or self.marching is None:
            return False
        code = self._repeated(index, region) + self._before(bound)
        emit_most(self, self.marching, number, bound, code, cells)
        return True

    def _is_chain(self, index: int | None, region: list[Instruction], only: int) -> bool:
        """Whether two rows of threads go through a `region` side by side.

        All of it is one chain from a barrier, or the kernel's beginning, to a barrier or the end.
        """
        if self.instrument or self.may_end or self.layout.local_bytes or not self.rows:
            return False
        # Before looking at all suspensions, of which there may be thousands.
        if not is_chain(self._repeated(index, region) + _inside(region), self.function.registers.keys()):
            return False
        around = [at for number, at in self._parts().items() if at is not None and (at == index or number == only)]
        for at in around:
            left = {name for name, _, _ in self.rows[at].leave(self.code[at])}
            if self.rows[at].kind != Kind.BARRIER or left - self.constants.keys():
                return False
        return True

    def _pair(
        self, number: int, index: int | None, region: list[Instruction], cells: dict[str, Cell], only: int
    ) -> None:
        """Emit ``pair_<number>``: a thread's way through a `region`, and that of the thread in the next row."""
        self.has_chains = True
        kept = [] if index is None else self.kept(index, touched(region))
        twice = written_twice(self.function, self._repeated(index, region) + _inside(region), kept)
        e = self.emitter(twice, indices_of_both(self.indices, twice))
        e.write(NEXT_ROW, e.op("add nuw nsw i32 %ty, 1"), "i32")
        other = e.op(f"zext i32 {e.op('add nuw nsw i32 %t, %nx')} to i64")
        for register, cell in cells.items():
            e.write(register, cell.value, cell.kind)
            if of_next_row(register) in twice.registers:
                e.write(of_next_row(register), cell.value, cell.kind)
        for register in kept:
            self.take(e, register)
            self.take(e, register, other, of_next_row(register))
        for one in twice.instructions:
            self.instruction(e, one)
        written = {name for one in region for name in writes(one)}
        for at in (at for at, suspension in self.region_of.items() if suspension == only):
            for register in self.kept(at, written):
                self.keep(e, register)
                self.keep(e, register, other, of_next_row(register))
        e.emit(f"ret i32 {only}")
        self.finish(e)
        given = f"{ENVIRONMENT}, {THREAD}, i32 %nx{scheduler.parameters(cells.values())}"
        header = f"define internal i32 @pair_{number}({given}) #0 {{"
        self.parts.append("\n".join([header, "entry:", *self.header(e), *e.lines, "}"]))

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

        def is_uniform(register: str, at: int, blocks: Sequence[int]) -> bool:
            inside = (self.flow.blocks[number] for number in blocks)
            is_known = any(one.start <= at < one.stop for one in inside) or writes(self.code[at])[0] in self.repeatable
            return self.marching is not None and register in self.marching.registers and is_known

        return first_threads(self.flow, self._first(index), self.definitions, self.indices, is_uniform, leaves_nothing)

    def _question(
        self, loop: ThreadLoop, index: int | None, region: list[Instruction], after: set[int]
    ) -> Question | None:
        """Return what threads ask first in a `region` that leads to the suspensions `after` it, None if nothing."""
        if self.counts_rounds or loop.notes or ASYNC_QUEUE in self.layout.local:
            return None
        if self._runs_side_by_side(by_row=False):
            return None  # rows of blocks beside each other do not come here
        if index is not None and self.rows[index].kind != Kind.BARRIER:
            return None
        ends = self._ends(region)
        written = {name for one in self._with_suspension(index, region) for name in writes(one)}
        for at in (at for at, number in self.region_of.items() if number in after):
            left = {name for name, _, _ in self.rows[at].leave(self.code[at])}
            if left - self.constants.keys() or self.kept(at, written):
                return None
        if ends is None or (self.rows and self.marching is None):
            return None
        alike = None if self.marching is None else self.marching.registers
        return find_question(self.flow, self._first(index), ends, alike)

    def _asks(
        self,
        number: int,
        index: int | None,
        region: list[Instruction],
        question: Question,
        cells: dict[str, Cell],
    ) -> None:
        """Emit ``asks_<number>``: whether a thread comes to an effect in a `region`."""
        e = self.emitter()
        if index is not None:
            for register, cell in cells.items():
                e.write(register, cell.value, cell.kind)
            self._take_all(e, index, self._with_suspension(index, region), {})
        e.emit(f"br label %b{question.blocks[0]}")
        leads: set[int] = set()
        for block_number in question.blocks:
            block = self.flow.blocks[block_number]
            leads.update(block.successors)
            e.label(f"b{block_number}")
            for one in self.code[block.start : block.stop]:
                if opcode_of(one.opcode).control is Control.BRANCH:
                    self._begin(e, one)
                    self.branch(e, one, block_number, set())
                    break
                self.instruction(e, one)
            else:
                e.emit(f"br label %b{block_number + 1}")
        for block_number in sorted(leads - set(question.blocks)):
            e.label(f"b{block_number}")
            e.emit(f"ret i1 {'true' if block_number in question.effects else 'false'}")
        self.finish(e)
        header = (
            f"define internal i1 @asks_{number}({ENVIRONMENT}, {THREAD}{scheduler.parameters(cells.values())}) #0 {{"
        )
        self.parts.append("\n".join([header, "entry:", *self.header(e), *e.lines, "}"]))

    def _before(self, bound: Bound) -> list[Instruction]:
        """Return what the region computes before the comparison that tells a `bound`."""
        found: list[Instruction] = []
        for one in (self.flow.blocks[number] for number in bound.blocks):
            if one.start <= bound.at < one.stop:
                return found + self.code[one.start : bound.at]
            found += self.code[one.start : one.stop]
        return []  # it is computed again

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
        busy: Bound | None = None,
    ) -> set[int]:
        """Emit ``thread_<number>``, which has a `region`; return the suspensions (or EXIT) that can come next.

        With `regular` registers it is ``regular_<number>``, which gets what the first thread has in them. With `heads`
        it is ``from_<number>``, which a thread may enter at these blocks, too (:mod:`.together`). It is
        ``busy_<number>`` for the threads that do something by a bound.
        """
        e = self.emitter()
        e.counts_accesses = True
        following: set[int] = set()
        first = self._first(index)
        region = self._with_suspension(index, region)
        written = {name for one in region for name in writes(one)}
        arguments = [ENVIRONMENT, THREAD, *scheduler.first_values(regular.values())]
        cells = self._cells(index, region)
        name = f"{'regular' if regular else 'busy' if busy else 'thread'}_{number}"
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
                goes = busy.goes if busy is not None and block_number == busy.blocks[-1] else None
                pending.extend(self._block(e, block_number, following, written, goes))
        self.finish(e)
        # A thread that goes on after a yield has polled without success: once more is enough.
        polls = POLLS - 2 if index and self._yields(index) else 0
        given = ", ".join(arguments) + scheduler.parameters(cells.values())
        header = f"define internal i32 @{name}({given}) #0 {{\nentry:"
        self.parts.append("\n".join([header, *self.header(e, polls), *e.lines, "}"]))
        if self.may_end:
            following.add(EXIT)
        return following

    def _collective(self, number: int, index: int) -> bool:
        """Emit what combines suspension `number`; return whether some of its threads may have to wait for others."""
        instruction, row = self.code[index], self.rows[index]
        e = self.emitter()
        self._begin(e, instruction)
        with whole(e):
            if self.instrument & Instrument.SYNCCHECK and any(left is EVERYONE for left in row.leave(instruction)):
                check_whole_warp(e, instruction)
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


def _inside(region: Iterable[Instruction]) -> list[Instruction]:
    """Return a `region` without its suspensions and what leads from one of its blocks to the next, or to the end."""
    leads = (Control.BRANCH, Control.END)
    return [
        one
        for one in region
        if suspension_of(one) is None and (one.guard is not None or opcode_of(one.opcode).control not in leads)
    ]


_SYMBOL = re.compile(r"\n(declare|define) [^@\n]*@([\w.$]+)\(.*")  # a search for two letters, not at every character


def _declared_once(text: str) -> str:
    """Return a module without repeated declarations: several parts of a kernel may need the same function."""
    text = f"\n{text}"
    known = {match[2] for match in _SYMBOL.finditer(text) if match[1] == "define"}

    def keep(match: re.Match[str]) -> str:
        if match[1] == "define":
            return match[0]
        repeated = match[2] in known
        known.add(match[2])
        return "\n" if repeated else match[0]

    return _SYMBOL.sub(keep, text)[1:]
