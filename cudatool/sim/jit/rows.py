"""Code for rows of threads that go around loops together, where each goes on by the size of the grid.

As in :mod:`.together`, but all threads of a row do a round before the next begins, so that they access memory side by
side: sixteen of them, round after round, would jump through it. What differs between threads lies in arrays of a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cudatool.ptx import Instruction, Register, space_of
from cudatool.sim.jit.emit import Emitter, storage_type
from cudatool.sim.jit.even import MOST, Part
from cudatool.sim.jit.together import UNROLLED, Together

__all__ = ["ByRow"]

_LINES = 4  # of the host's caches, which it is asked for where a round begins to read


class ByRow(Together):
    """Emits the functions of one region for ``%n`` threads, those of a row."""

    room = MOST
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

    def _metadata(self, loop: int) -> str:
        return f"!{loop} = distinct !{{!{loop}, !6, {UNROLLED if loop in self.unrolled else '!5'}}}"
