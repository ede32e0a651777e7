"""Code for rows of threads that go around loops together, where each goes on by the size of the grid.

As in :mod:`.together`, but all threads of a row do a round before the next begins, so that they access memory side by
side: sixteen of them, round after round, would jump through it. What differs between threads lies in arrays of a row.

A compiler that has unrolled the loop has made one round of several, each a stride after the other. Where threads keep
nothing from one to the next, these are *sections*: all threads come through one before the next begins, and rows may be
longer, since they need no arrays. Jumps are rarer then, and fewer parts of memory are read at the same time.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any

from cudatool.ptx import Instruction, Register, space_of
from cudatool.ptx.flow import reads, writes
from cudatool.sim.jit.emit import Emitter, storage_type
from cudatool.sim.jit.even import Part
from cudatool.sim.jit.grid import SIDE_BY_SIDE
from cudatool.sim.jit.together import UNROLLED, Body, Together

__all__ = ["ByRow"]

_MOST_SECTIONS = 8
_LINES = 4  # of the host's caches, which it is asked for where a round begins to read


class ByRow(Together):
    """Emits the functions of one region for ``%n`` threads, those of a row."""

    room = SIDE_BY_SIDE
    count = "%n"
    more = ", i32 %n"

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.read_at: list[str] = []  # addresses that a part reads at, of the first thread

    def _reach(self, e: Emitter, distance: int, kind: str) -> str:
        last = e.convert(e.op("sub nuw nsw i32 %n, 1"), "i32", kind)
        return e.op(f"mul {kind} {last}, {distance}")

    def _keep(self, e: Emitter, live: list[str], before: Mapping[str, str]) -> None:
        pass  # each thread when it goes on

    def _keep_one(self, e: Emitter, place: str, live: list[str], before: Mapping[str, str]) -> None:
        wide = e.op(f"zext i32 {place} to i64")
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
            e.emit(
                f"store {stored} {value}, ptr {e.op(f'getelementptr {stored}, ptr {self._slots(e, name)}, i64 {wide}')}"
            )

    def _meet(self, e: Emitter, one: Instruction) -> None:
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
        if part.head not in part.after:
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
        for start, stop in zip(starts, [*starts[1:], len(code)], strict=True):
            body = Body(self, f"part_{self.number}_{part.head}_{start}")
            for name in sorted({name for one in code[start:stop] for name in (*reads(one), *writes(one))}):
                if name in scalars:
                    body.scalar(name, scalars[name])
            if stop < len(code):
                for place in range(start, stop):
                    body.run(code[place], values.get(place))
                body.e.emit("ret i32 0")
            else:
                body.e.emit("br label %begin")
                body.leave(body.block(part, part.head, values, start))
            self._over_threads(e, f"{part.head}.{start}", body, ends=False)
            scalars |= {writes(code[place])[0]: values[place] for place in range(start, stop) if place in values}

    def _sections(self, part: Part) -> list[int]:
        """Return at which instructions the sections of a part begin, the first of which is 0.

        One ends before a load that is a stride after another access of it. There is one alone where threads keep what
        differs between them.
        """
        code = self._code(part.head)
        if not self.kernel.has_long_rows() or part.blocks != {part.head} or part.head not in part.after:
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
        if len(starts) > _MOST_SECTIONS or not all(map(self._is_scalar, {*chain(*map(self._live, part.after))})):
            return [0]
        for start in starts:
            given = {name for one in code[:start] for name in writes(one) if not self._is_scalar(name)}
            if not given.isdisjoint(name for one in code[start:] for name in reads(one)):
                return [0]
        return starts

    def _metadata(self, loop: int) -> str:
        return f"!{loop} = distinct !{{!{loop}, !6, {UNROLLED if loop in self.unrolled else '!5'}}}"
