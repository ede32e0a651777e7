"""Rows of threads cut into stretches, of which all threads go the same way and none needs a condition.

``if (i > 0 && i < n - 1) ...`` asks each thread what is so for the first thread of a row, for those in its middle and
for the last: three answers for a thousand threads. What is compared, ``i``, is *scalar* (:mod:`.even`): neighbors are
at a known distance. So it is known from the first thread for how many the answer stays the same. These are a stretch:

    while threads of the row are left:
        for each comparison, quotient and sum that is widened, on the way that the first thread takes:
            cut what is left to the threads that have the first one's answer and quotient, and of which no sum wraps
        run the code of that way, without its branches, for the threads that are left of the cut
        go on after them

It is for rows of blocks beside each other (:mod:`.grid`), which are long, and for kernels that suspend no thread.
That loses nothing where the distance is short: a stretch of one thread is always right. It is for code without loops,
which would have their own rounds in each stretch. Addresses are computed in 64 bits from a sum that does not wrap, so
LLVM knows how far neighbors' accesses are from each other, also where these are narrow or lie apart.

A matrix's row and column, ``i / n`` and ``i % n``, are known as well: in a stretch the one is the same for all threads,
and the other grows as ``i`` does. What all of them read at one address is read once, if they have written nothing yet.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from cudatool.ptx import Address, Flow, Immediate, Instruction, Register, elements, opcode_of, type_bytes
from cudatool.ptx.isa import INTEGERS, Control
from cudatool.sim.jit.context import EXIT
from cudatool.sim.jit.emit import ENVIRONMENT, Emitter, storage_type
from cudatool.sim.jit.even import (
    MOST,
    MOST_BLOCKS,
    DistanceCheck,
    Even,
    Part,
    Region,
    check_of,
    find_distances,
    find_parts,
    whole_check,
)
from cudatool.sim.jit.scheduler import UNPEELED, VALUES
from cudatool.sim.jit.table import types_of
from cudatool.sim.jit.together import THREAD, UNROLLED, Body, Together, in_pieces

__all__ = ["Stretches", "find_stretches"]

_MOST_WAYS = 8
_MOST_WRITTEN = 800  # instructions of all ways
_LOOP = (1 << 22) + 1  # number of the metadata of the loop over threads that run by themselves
_LONG = 64
"""Threads from which on a stretch pays: where a smaller number divides, each thread runs by itself."""

_TURNS_AT = frozenset({"lt", "ge", "lo", "hs"})  # the answer is the same for what is below, and for the rest
_TURNS_AFTER = frozenset({"le", "gt", "ls", "hi"})  # the same for what is not above, and for the rest
_EQUALS = frozenset({"eq", "ne"})


# All threads that are left run by themselves.
_EACH = f"""each:
  br label %each.x
each.x:
  %each.i = phi i32 [ 0, %each ], [ %each.next, %each.x ]
  %each.tx = add nuw nsw i32 %tx, %each.i
  %each.t = add nuw nsw i32 %t, %each.i
  %each.at = call i32 @thread_0({VALUES}, i32 %each.tx, i32 %ty, i32 %tz, i32 %each.t) #1
  %each.next = add nuw nsw i32 %each.i, 1
  %each.done = icmp eq i32 %each.next, %n
  br i1 %each.done, label %each.end, label %each.x, !llvm.loop !{_LOOP}
each.end:
  ret i32 %n"""


def _cut_check(i: Instruction, by: list[int]) -> DistanceCheck | None:
    """Return what a stretch is cut for, None where most of its neighbors would have other results."""
    if i.opcode in ("div", "rem"):
        divisor = i.operands[2]
        check = whole_check(replace(i, opcode="div"), by)
        if check is None or (isinstance(divisor, Immediate) and int(divisor.value) < _LONG):
            return None
        return replace(check, same=i.opcode == "div")
    if i.opcode == "shr":
        return None
    if i.opcode == "selp" and by[0] != by[1] and not by[2] and INTEGERS.issuperset(types_of(i)):
        place = 0 if by[0] else 1
        register = i.operands[1 + place]
        return (
            DistanceCheck(register.name, by[place], types_of(i)[0], same=False)
            if isinstance(register, Register)
            else None
        )
    if i.opcode == "setp" and _EQUALS.intersection(i.modifiers):
        i = replace(i, modifiers=tuple("lt" if one in _EQUALS else one for one in i.modifiers))
    return whole_check(i, by)


def find_stretches(flow: Flow) -> Even | None:
    """Return how the threads of stretches run a kernel that suspends none, None if it is no gain to cut rows."""
    region = Region(flow, 0, frozenset(), _cut_check, read_first=True)
    if region.has_loop or len(region.blocks) > MOST_BLOCKS:
        return None
    distances, uneven = find_distances(region, (), {})
    parts = None if region.first in uneven else find_parts(region, uneven, distances)
    if parts is None:
        return None
    found = Even(parts, {name: d for name, d in distances.items() if d is not None}, by_row=True)
    ways = list(_ways(parts, region.first))
    written = sum(len(region.instructions(number)) for way in ways for part in way for number in part.blocks)
    if len(ways) > _MOST_WAYS or written > _MOST_WRITTEN:
        return None
    code = [one for number in region.blocks for one in region.instructions(number)]
    asks = {"div", "rem", "setp"} if len(ways) > 1 else {"div", "rem"}
    is_asked = any(one.opcode in asks and check_of(one, found.distances, _cut_check) is not None for one in code)
    return found if is_asked or any(_is_apart(one, found) for one in code) else None


def _ways(parts: Mapping[int, Part], head: int) -> Iterable[list[Part]]:
    """Return the ways from a part to where threads end or suspend; more than the most that are of use need not be."""
    pending: list[list[Part]] = [[parts[head]]]
    for _ in range(MOST_BLOCKS * _MOST_WAYS):
        if not pending:
            return
        way = pending.pop()
        if not way[-1].after:
            yield way
        pending += [[*way, parts[after]] for after in way[-1].after]
    yield from pending


def _is_apart(i: Instruction, found: Even) -> bool:
    """Whether an instruction's neighbors access memory at a known distance that is not the size of what they access."""
    if i.opcode not in ("ld", "st") or "param" in i.modifiers:
        return False
    place = 1 if i.opcode == "ld" else 0
    address = i.operands[place]
    if not isinstance(address, Address) or not isinstance(address.base, Register):
        return False
    size = type_bytes(types_of(i)[-1]) * len(elements(i.operands[1 - place]))
    return found.distances.get(address.base.name, 0) not in (0, size)


class Stretches(Together):
    """Emits ``stretches_0``, which runs a kernel for the ``%n`` threads of a row, and ``stretch_0``, for some of them.

    ``stretch_0`` returns how many threads have run. For each way through the kernel there is a function ``way_w`` for
    one thread.
    """

    more = ", i32 %n"
    to_check = staticmethod(_cut_check)

    def __init__(self, *arguments: Any, notes: bool) -> None:
        super().__init__(*arguments, notes=notes)
        self.at = "null"
        self.ways = 0
        self.divides = False

    def generate(self) -> None:
        """Emit the functions into the kernel's parts."""
        e = self.kernel.emitter()
        e.emit("store i32 %n, ptr %left")
        self._walk(e, next(iter(self.even.parts.values())), [])
        self.kernel.finish(e)
        registers = self.kernel.function.registers
        lines = [
            f"define internal i32 @stretch_0({ENVIRONMENT}, {THREAD}{self.more}) #0 {{",
            "entry:",
            "  %left = alloca i32",
            *(f"  {cell} = alloca {storage_type(registers[name])}" for name, cell in e.used.items()),
            *(f"  store {storage_type(registers[name])} zeroinitializer, ptr {cell}" for name, cell in e.used.items()),
            *e.lines,
            *([_EACH] if self.divides else []),
            "}",
            *(self._metadata(loop) for loop in self.loops),
            in_pieces("stretches_0", "stretch_0"),
            *([f"!{_LOOP} = distinct !{{!{_LOOP}, !6, !5, {UNPEELED}}}"] if self.divides else []),
        ]
        self.kernel.parts.append("\n".join(lines))

    def _metadata(self, loop: int) -> str:
        return f"!{loop} = distinct !{{!{loop}, !6, {UNROLLED if loop in self.unrolled else '!5'}, {UNPEELED}}}"

    # ---- where a stretch ends ----

    def _meet(self, e: Emitter, one: Instruction, conditions: list[str]) -> None:
        pass  # stretches end for comparisons and sums only

    def _checked(self, e: Emitter, one: Instruction, check: DistanceCheck, conditions: list[str]) -> None:
        if one.opcode == "selp":
            self._cut_where_it_chooses(e, one, check)
            self.kernel.instruction(e, one)
            return
        kind = f"i{check.type_name[1:]}"
        signed = check.type_name[0] == "s"
        value = e.convert(*e.read(check.register), kind)
        if not _EQUALS.intersection(one.modifiers):
            bits = int(kind[1:])
            if check.distance > 0:
                room = e.op(f"sub {kind} {(1 << bits - signed) - 1}, {value}")
            else:
                room = e.op(f"sub {kind} {value}, {-(1 << bits - 1) if signed else 0}")
            self._cut(e, room, kind, check.distance)
        if one.opcode == "setp":
            self._cut_where_it_turns(e, one, check, value, kind)
        if one.opcode in ("div", "rem"):
            self._cut_where_it_divides(e, one, check, value, kind)
        self.kernel.instruction(e, one)

    def _cut_where_it_turns(self, e: Emitter, one: Instruction, check: DistanceCheck, value: str, kind: str) -> None:
        """Cut the stretch before the first thread for which a comparison has another result, if its numbers grow
        or fall towards the other operand.
        """
        how = next(modifier for modifier in one.modifiers if modifier in _TURNS_AT | _TURNS_AFTER | _EQUALS)
        register, other = one.operands[1:3]
        is_second = not (isinstance(register, Register) and register.name == check.register)
        limit = e.get(register if is_second else other, types_of(one)[-1])
        rises = check.distance > 0
        way = e.op(f"sub {kind} {limit}, {value}" if rises else f"sub {kind} {value}, {limit}")
        if how in _EQUALS:  # at the other operand, the next thread is beyond it
            here = e.op(f"icmp eq {kind} {way}, 0")
            room = e.op(f"select i1 {here}, {kind} 0, {kind} {e.op(f'sub {kind} {way}, 1')}")
            self._cut(e, room, kind, check.distance)
            return
        # "x lt limit" turns from below the limit to it; so does "limit gt x", which is read from the other side.
        at = (how in _TURNS_AT) != is_second
        relation = {(True, True): "lt", (True, False): "le", (False, True): "ge", (False, False): "gt"}[rises, at]
        comes = e.op(f"icmp {check.type_name[0]}{relation} {kind} {value}, {limit}")
        if rises == at:
            way = e.op(f"sub {kind} {way}, 1")
        self._cut(e, e.op(f"select i1 {comes}, {kind} {way}, {kind} -1"), kind, check.distance)

    def _cut_where_it_divides(self, e: Emitter, one: Instruction, check: DistanceCheck, value: str, kind: str) -> None:
        """Cut the stretch where the quotient changes: up to there remainders are at the distance of what is divided.

        Stretches would be short if the divisor is small, and quotients of numbers below zero are rounded towards it:
        then all threads run by themselves.
        """
        divisor = e.get(one.operands[2], types_of(one)[-1])
        long = e.op(f"icmp {check.type_name[0]}ge {kind} {divisor}, {_LONG}")
        if check.type_name[0] == "s":
            long = e.op(f"and i1 {long}, {e.op(f'icmp sge {kind} {value}, 0')}")
        label = e.new_label()
        e.emit(f"br i1 {long}, label %{label}, label %each")
        e.label(label)
        self.divides = True
        room = e.op(f"urem {kind} {value}, {divisor}")
        if check.distance > 0:
            room = e.op(f"sub {kind} {e.op(f'sub {kind} {divisor}, 1')}, {room}")
        self._cut(e, room, kind, check.distance)

    def _cut_where_it_chooses(self, e: Emitter, one: Instruction, check: DistanceCheck) -> None:
        """Cut the stretch to its first thread if it chooses the operand that is at another distance."""
        first = one.operands[1]
        is_first = isinstance(first, Register) and first.name == check.register
        chosen = e.get(one.operands[3], "pred")
        rooms = "i32 -1, i32 0" if is_first else "i32 0, i32 -1"
        self._cut(e, e.op(f"select i1 {chosen}, {rooms}"), "i32", 1)

    def _cut(self, e: Emitter, room: str, kind: str, distance: int) -> None:
        """Cut the stretch to the threads that are not further from the first than a number without sign, `room`."""
        steps = room if abs(distance) == 1 else e.op(f"udiv {kind} {room}, {abs(distance)}")
        e.define(f"declare {kind} @llvm.umin.{kind}({kind}, {kind})")
        short = e.convert(e.op(f"call {kind} @llvm.umin.{kind}({kind} {steps}, {kind} {MOST})"), kind, "i32")
        count = e.op(f"add nuw nsw i32 {short}, 1")
        left = e.op("load i32, ptr %left")
        e.emit(f"store i32 {e.op(f'call i32 @llvm.umin.i32(i32 {left}, i32 {count})')}, ptr %left")

    # ---- what the threads of a stretch do ----

    def _walk(self, e: Emitter, part: Part, way: list[tuple[Part, dict[int, str]]]) -> None:
        """Emit the ways that lead on from the head of a part, to which `way` leads: what each computes alike, first."""
        values, _ = self._computed(e, [one for number in part.chain for one in self._code(number)])
        way = [*way, (part, values)]
        if not part.after:
            self._run(e, way)
            return
        labels = [e.new_label() for _ in part.after]
        guard = self._code(part.chain[-1])[-1].guard if len(labels) == 2 else None
        condition = f"i1 {e.get(guard, 'pred')}, " if guard is not None else ""
        e.emit(f"br {condition}{', '.join(f'label %{label}' for label in labels)}")
        for label, after in zip(labels, part.after, strict=True):
            e.label(label)
            self._walk(e, self.even.parts[after], way)

    def _run(self, e: Emitter, way: list[tuple[Part, dict[int, str]]]) -> None:
        """Emit the loop over the threads of a stretch that go a way."""
        self.ways += 1
        body = Body(self, f"way_{self.ways}")
        body.e.emit(f"br label %b{way[0][0].head}")
        for (part, values), (following, _) in zip(way, [*way[1:], way[-1]], strict=True):
            place = 0
            for number in part.chain:
                here = {at: values.get(place + at) for at in range(len(self._code(number)))}
                place += len(here)
                self._block(body, part, number, here, following.head)
            for number in sorted(part.blocks - set(part.chain)):
                self._block(body, part, number, {}, following.head)
        self.count = e.op("load i32, ptr %left")
        self._over_threads(e, f"way{self.ways}", body, ends=False)
        e.emit(f"ret i32 {self.count}")

    def _block(self, body: Body, part: Part, number: int, values: Mapping[int, str | None], following: int) -> None:
        """Emit a block of a way that goes from `part` to the one that begins at the block `following`."""
        kernel, e = self.kernel, body.e
        block = kernel.flow.blocks[number]
        e.label(f"b{number}")
        if number + 1 == len(kernel.flow.blocks) and block.start == block.stop:
            e.emit(f"ret i32 {EXIT}")
            return
        for place, index in enumerate(range(block.start, block.stop)):
            one = kernel.code[index]
            if opcode_of(one.opcode).control is not Control.NEXT:
                if len(part.after) == 2 and number == part.chain[-1]:
                    e.emit(f"br label %b{following}")
                else:
                    kernel.branch(e, one, number, set())
                return
            body.run(one, values.get(place))
        e.emit(f"br label %b{number + 1}")
