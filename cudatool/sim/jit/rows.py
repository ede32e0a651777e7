"""Code for rows of threads that go around loops together, where each goes on by the size of the grid.

As in :mod:`.together`, but all threads of a row do a round before the next begins, so that they access memory side by
side: sixteen of them, round after round, would jump through it. What differs between threads lies in arrays of a row.
"""

from __future__ import annotations

from collections.abc import Mapping

from cudatool.sim.jit.emit import Emitter, storage_type
from cudatool.sim.jit.even import MOST
from cudatool.sim.jit.together import UNROLLED, Together

__all__ = ["ByRow"]


class ByRow(Together):
    """Emits the functions of one region for ``%n`` threads, those of a row."""

    room = MOST
    count = "%n"
    more = ", i32 %n"

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

    def _metadata(self, loop: int) -> str:
        return f"!{loop} = distinct !{{!{loop}, !6, {UNROLLED if loop in self.unrolled else '!5'}}}"
