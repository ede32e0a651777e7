"""Code for rows of threads that go around loops together, where each goes on by the size of the grid or of a block.

As in :mod:`.together`, but all threads of a row do a round before the next begins, so that they access memory side by
side: sixteen of them, round after round, would jump through it. What differs between threads lies in arrays of a row.
So it is where threads go on by the size of a block, too.

A compiler that has unrolled the loop has made one round of several, each a stride after the other. These are
*sections*: all threads come through one before the next begins, so that fewer parts of memory are read at the same
time. Where threads go on by the size of a block, a host that finds four parts of one page read fetches none of them
ahead. Where they go on by the size of the grid, there are sections only if threads keep nothing from one to the next:
then rows may be longer, since they need no arrays, and jumps are rarer.

Where a check fails, a row is cut to the threads of which it holds, found by halving. The others become a row of their
own if threads have done nothing yet that must not be done twice; else they go on one after the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from cudatool.ptx import Instruction, Register, space_of
from cudatool.ptx.flow import reads, writes
from cudatool.sim.jit.emit import Emitter, storage_type
from cudatool.sim.jit.even import ORDERED, PURE, DistanceCheck, Part
from cudatool.sim.jit.grid import SIDE_BY_SIDE
from cudatool.sim.jit.scheduler import UNPEELED
from cudatool.sim.jit.together import UNROLLED, Body, Together, in_pieces

__all__ = ["ByRow"]

_MOST_SECTIONS = 8
_MOST_KEPT = 4  # registers that differ between threads, from one section to the next
_LINES = 4  # of the host's caches, which it is asked for where a round begins to read


class ByRow(Together):
    """Emits the functions of one region for ``%n`` threads, those of a row."""

    room = SIDE_BY_SIDE
    count = "%n"
    more = ", i32 %n"
    name, kind = "piece", "i32"

    def __init__(self, *arguments: Any, notes: bool) -> None:
        super().__init__(*arguments, notes=notes)
        self.cuts = False  # whether the row is cut to the threads of which what is checked next holds
        self.whole = "%n"  # how many threads the row has before that
        self.cut_in = self._cut_in()
        self.entry += [f"  %{cell} = alloca i32\n  store i32 %n, ptr %{cell}" for cell in ("left", "run")]
        self.read_at: list[str] = []  # addresses that a part reads at, of the first thread

    def _reach(self, e: Emitter, distance: int, kind: str) -> str:
        last = e.convert(e.op(f"sub nuw nsw i32 {self.count}, 1"), "i32", kind)
        return e.op(f"mul {kind} {last}, {distance}")

    def generate(self) -> None:
        """Emit the functions into the kernel's parts."""
        super().generate()
        self.kernel.parts.append(in_pieces(f"together_{self.number}", f"piece_{self.number}", self.given.values()))

    def _end(self, e: Emitter) -> None:
        e.emit(f"ret i32 {e.op('load i32, ptr %run')}")

    def _begin(self, e: Emitter, part: Part) -> None:
        self.count = self.whole = e.op("load i32, ptr %left")
        self.cuts = True

    def _go_or_back(
        self, e: Emitter, conditions: list[str], head: int, live: list[str], before: Mapping[str, str]
    ) -> None:
        """Emit what becomes of the threads that are cut off, those from ``count`` on.

        They are a row of their own, or go on one after the other from here while the others go on together.
        """
        if conditions:
            super()._go_or_back(e, conditions, head, live, before)
        elif self.count != self.whole:
            e.emit(f"store i32 {self.count}, ptr %left")
            if head in self.cut_in:
                e.emit(f"store i32 {self.count}, ptr %run")
                return
            e.emit(f"br i1 {e.op(f'icmp eq i32 {self.count}, {self.whole}')}, label %go{head}, label %back{head}")
            e.label(f"back{head}")
            self._one_by_one(e, head, live, before, self.count, self.whole)
            e.emit(f"br label %go{head}")
            e.label(f"go{head}")

    def _cut_in(self) -> set[int]:
        """Return the parts in which threads that are cut off can begin again, as if they had done nothing yet.

        Before such a part there is no loop, and nothing that could not be done twice.
        """
        parts = self.even.parts
        before = {head: [part for part in parts.values() if head in part.after] for head in parts}
        first = next(iter(parts))
        found = {first} - {head for head in parts if before[head] and head == first}
        while more := {
            head
            for head in parts.keys() - found - {first}
            if all(part.head in found and self._is_harmless(part) for part in before[head])
        }:
            found |= more
        return found

    def _is_harmless(self, part: Part) -> bool:
        code = (one for number in part.blocks for one in self._code(number))
        return all(one.opcode in PURE | {"ld", "bra"} and ORDERED.isdisjoint(one.modifiers) for one in code)

    def _checked(self, e: Emitter, one: Instruction, check: DistanceCheck, conditions: list[str]) -> None:
        """Emit a check. Where it does not hold, cut the row to the threads of which it does.

        What holds for some of the first threads holds for fewer, so the most are found by halving.
        """
        if not self.cuts:
            super()._checked(e, one, check, conditions)
            return
        all_, search, probe, halved, found, done = (e.new_label() for _ in range(6))
        least, most, more, fewer = (e.name() for _ in range(4))
        count = self.count
        holds = self._holds(e, one, check)
        e.emit(f"br label %{all_}")
        e.label(all_)
        e.emit(f"br i1 {holds}, label %{done}, label %{search}")
        e.label(search)
        e.emit(f"{least} = phi i32 [ 1, %{all_} ], [ {more}, %{halved} ]")
        e.emit(f"{most} = phi i32 [ {count}, %{all_} ], [ {fewer}, %{halved} ]")
        e.emit(f"br i1 {e.op(f'icmp ult i32 {least}, {most}')}, label %{probe}, label %{found}")
        e.label(probe)
        both = e.op(f"add nuw nsw i32 {e.op(f'add nuw nsw i32 {least}, {most}')}, 1")
        self.count = e.op(f"lshr i32 {both}, 1")
        holds = self._holds(e, one, check)
        e.emit(f"br label %{halved}")
        e.label(halved)
        e.emit(f"{more} = select i1 {holds}, i32 {self.count}, i32 {least}")
        e.emit(f"{fewer} = select i1 {holds}, i32 {most}, i32 {e.op(f'sub nuw nsw i32 {self.count}, 1')}")
        e.emit(f"br label %{search}")
        e.label(found)
        e.emit(f"br label %{done}")
        e.label(done)
        self.count = e.op(f"phi i32 [ {count}, %{all_} ], [ {least}, %{found} ]")

    def _holds(self, e: Emitter, one: Instruction, check: DistanceCheck) -> str:
        conditions: list[str] = []
        super()._checked(e, one, check, conditions)
        holds = conditions[0]
        for condition in conditions[1:]:
            holds = e.op(f"and i1 {holds}, {condition}")
        return holds

    def _look(self, e: Emitter, names: list[str]) -> list[str]:
        if not names:
            return []
        firsts = {}
        for name in names:
            firsts[name] = e.op(f"load {self._stored(name)}, ptr {self._slots(e, name)}")
            e.write(name, firsts[name], self._stored(name))
        place, after = e.name(), e.name()
        differs = {name: (e.name(), e.name()) for name in names}  # the bits in which any has differed, and does so far
        e.emit("br label %before.look")
        e.label("before.look")
        e.emit("br label %look")
        e.label("look")
        e.emit(f"{place} = phi i32 [ 0, %before.look ], [ {after}, %look ]")
        for name, (so_far, now) in differs.items():
            e.emit(f"{so_far} = phi {self._stored(name)} [ 0, %before.look ], [ {now}, %look ]")
        at = e.op(f"zext i32 {place} to i64")
        for name, (so_far, now) in differs.items():
            kind = self._stored(name)
            value = e.op(f"load {kind}, ptr {e.op(f'getelementptr {kind}, ptr {self._slots(e, name)}, i64 {at}')}")
            by = e.op(f"mul {kind} {e.convert(place, 'i32', kind)}, {self.even.distances[name]}")
            bits = e.op(f"xor {kind} {value}, {e.op(f'add {kind} {firsts[name]}, {by}')}")
            e.emit(f"{now} = or {kind} {so_far}, {bits}")
        e.emit(f"{after} = add nuw nsw i32 {place}, 1")
        e.emit(f"br i1 {e.op(f'icmp eq i32 {after}, {self.count}')}, label %looked, label %look")
        e.label("looked")
        return [e.op(f"icmp eq {self._stored(name)} {now}, 0") for name, (_, now) in differs.items()]

    def _keep(self, e: Emitter, live: list[str], before: Mapping[str, str]) -> None:
        pass  # each thread when it goes on

    def _keep_one(self, e: Emitter, place: str, t: str, live: list[str], before: Mapping[str, str]) -> None:
        wide, slot = (e.op(f"zext i32 {number} to i64") for number in (place, t))
        for name in live:
            stored = self._stored(name)
            if name in before:
                value, kind = before[name], storage_type(self.kernel.function.registers[name])
                if distance := self.even.distances[name]:
                    by = e.op(f"mul {kind} {e.convert(place, 'i32', kind)}, {distance}")
                    value = e.op(f"add {kind} {value}, {by}")
                if kind == "i1":
                    value = e.op(f"zext i1 {value} to i8")
            else:
                at = e.op(f"getelementptr {stored}, ptr {self._array(name)}, i64 {wide}")
                value = e.op(f"load {stored}, ptr {at}")
            e.emit(f"store {stored} {value}, ptr {self._slots(e, name, slot)}")

    def _meet(self, e: Emitter, one: Instruction, conditions: list[str]) -> None:
        if one.opcode != "ld" or space_of(one) not in ("global", "generic"):
            return
        base = getattr(one.operands[1], "base", None)
        if isinstance(base, Register) and self.even.distances.get(base.name):
            self.read_at.append(e.get(base, "u64"))

    def _fetch(self, e: Emitter, part: Part) -> None:
        """Let the host fetch where the next round begins to read: it knows what follows, but not how far rounds jump.

        Rounds have gone on so far as from the one before to this one.
        """
        read_at, self.read_at = self.read_at, []
        if part.head not in part.after or part.head not in self.kernel.strides:
            return
        e.define("declare void @llvm.prefetch.p0(ptr, i32, i32, i32)")
        for now in read_at:
            cell = f"%last.{len(self.cells)}"
            self.cells.append(cell)
            last = e.op(f"load i64, ptr {cell}")
            e.emit(f"store i64 {now}, ptr {cell}")
            is_first = e.op(f"icmp eq i64 {last}, 0")
            step = e.op(f"select i1 {is_first}, i64 0, i64 {e.op(f'sub i64 {now}, {last}')}")
            ahead = e.op(f"inttoptr i64 {e.op(f'add i64 {now}, {step}')} to ptr")
            for line in range(_LINES):
                at = e.op(f"getelementptr i8, ptr {ahead}, i64 {64 * line}")
                e.emit(f"call void @llvm.prefetch.p0(ptr {at}, i32 0, i32 3, i32 1)")

    def _run_part(
        self, e: Emitter, part: Part, live: list[str], before: Mapping[str, str], values: Mapping[int, str]
    ) -> None:
        code = self._code(part.head)
        starts = self._sections(part)
        if len(starts) == 1:
            super()._run_part(e, part, live, before, values)
            return
        scalars = dict(before)
        there = set(live)  # what threads have when a section begins
        for start, stop in zip(starts, [*starts[1:], len(code)], strict=True):
            body = Body(self, f"part_{self.number}_{part.head}_{start}")
            for name in sorted(self._of(code[start:stop])):
                if name in scalars:
                    body.scalar(name, scalars[name])
                elif name in there and not self._is_scalar(name):
                    body.load(name)
            if stop < len(code):
                for place in range(start, stop):
                    body.run(code[place], values.get(place))
                body.store(sorted(self._needed(part, stop)))
                body.e.emit("ret i32 0")
            else:
                body.e.emit("br label %begin")
                body.leave(body.block(part, part.head, values, start))
            self._over_threads(e, f"{part.head}.{start}", body, ends=False)
            scalars |= {writes(code[place])[0]: values[place] for place in range(start, stop) if place in values}
            there |= body.set

    def _needed(self, part: Part, place: int) -> set[str]:
        """Return what differs between threads and is needed from the instruction at `place` of a part's loop on."""
        names = self._of(self._code(part.head)[place:]).union(*map(self._live, part.after))
        return {name for name in names if not self._is_scalar(name)}

    def _of(self, code: Iterable[Instruction]) -> set[str]:
        """Return the registers that `code` reads or sets."""
        return {name for one in code for name in (*reads(one), *writes(one))} & self.touched

    def _sections(self, part: Part) -> list[int]:
        """Return at which instructions the sections of a part begin, the first of which is 0.

        One ends before a load that is a stride after another access of it.
        """
        code = self._code(part.head)
        is_near = part.head not in self.kernel.strides
        if not (is_near or self.kernel.has_long_rows()) or part.blocks != {part.head} or part.head not in part.after:
            return [0]
        starts = [0]
        accessed: set[str] = set()
        sums: dict[str, set[str]] = {}  # what the registers are sums of that the part computes
        for place, one in enumerate(code):
            if one.opcode == "add":
                terms = reads(one)
                sums[writes(one)[0]] = {*terms, *(term for name in terms for term in sums.get(name, ()))}
            elif one.opcode in ("ld", "st"):
                base = getattr(one.operands[one.opcode == "ld"], "base", None)
                if not isinstance(base, Register) or not self.even.distances.get(base.name):
                    continue
                if one.opcode == "ld" and not accessed.isdisjoint(sums.get(base.name, ())):
                    starts.append(place)
                    accessed = set()
                accessed.add(base.name)
        if len(starts) > _MOST_SECTIONS:
            return [0]
        given = ({name for one in code[:start] for name in writes(one)} for start in starts[1:])
        kept = [self._needed(part, start) & names for start, names in zip(starts[1:], given, strict=True)]
        if not is_near:
            kept.append(self._needed(part, len(code)))
        return starts if all(len(names) <= (_MOST_KEPT if is_near else 0) for names in kept) else [0]

    def _metadata(self, loop: int) -> str:
        return f"!{loop} = distinct !{{!{loop}, !6, {UNROLLED if loop in self.unrolled else '!5'}, {UNPEELED}}}"
