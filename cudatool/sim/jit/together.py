"""Code for threads that run a region together: each part of it for :data:`~.even.WIDTH` threads before the next begins.

For region k of a kernel there are

- ``enter_k``: takes what a thread has kept from before the region;
- ``part_k_h``: one thread's way through the part that begins at block h;
- ``together_k``: loops of these over the threads of a row, and between them what all threads compute alike, once.

A loop over the threads has a fixed number of rounds and nothing in it that LLVM could not make vectors of. What differs
between threads and lives from one part to the next lies in an array of as many elements, which LLVM keeps in vector
registers once its loops are gone. A scalar register is the value that the first thread has; from it each thread
computes its own.

Where a check fails (:class:`.even.DistanceCheck`), the threads go on one after the other, in ``from_k``, from the head
of the part: they find in their slots what they need.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from cudatool.ptx import Instruction, opcode_of, type_bytes
from cudatool.ptx.flow import reads, writes
from cudatool.ptx.isa import Control
from cudatool.sim.jit.context import EXIT, MAX_THREADS
from cudatool.sim.jit.emit import ENVIRONMENT, Emitter, storage_type
from cudatool.sim.jit.even import MOST, WIDTH, DistanceCheck, Even, Part, check_of, distance_in_line, whole_check
from cudatool.sim.jit.gathers import ONE_VECTOR
from cudatool.sim.jit.scheduler import VALUES, Cell, parameters
from cudatool.sim.jit.texture import first_in_line, take_word

if TYPE_CHECKING:
    from cudatool.sim.jit.thread_code import ThreadCode

__all__ = ["THREAD", "UNROLLED", "Body", "Together", "enter_at_heads", "from_the_beginning", "in_pieces"]

_FIRST_LOOP = 1 << 21  # number of the metadata of loops over the threads of a row
_SHORT = 100  # lines of a body up to which a loop of it is unrolled
UNROLLED = '!{!"llvm.loop.unroll.count", i32 4}'
THREAD = "i32 %tx, i32 %ty, i32 %tz, i32 %t"


def _touched(kernel: ThreadCode, region: list[Instruction]) -> set[str]:
    """Return the registers that a `region` reads or sets; others stay in their slots."""
    found = {name for one in region for names in (reads(one), writes(one)) for name in names}
    return found & kernel.function.registers.keys()


def _live(kernel: ThreadCode, head: int, touched: set[str]) -> list[str]:
    """Return the registers, of those that the region has `touched`, that a part of it needs, or what follows that."""
    return sorted(kernel.flow.blocks[head].live_in & touched)


def enter_at_heads(kernel: ThreadCode, e: Emitter, heads: list[int], region: list[Instruction]) -> None:
    """Emit how a thread finds where to begin: ``%from`` is one more than one of `heads`, 0 where the region begins."""
    cases = " ".join(f"i32 {head + 1}, label %from{head}" for head in heads)
    e.emit(f"switch i32 %from, label %start [ {cases} ]")
    touched = _touched(kernel, region)
    for head in heads:
        e.label(f"from{head}")
        for register in _live(kernel, head, touched):
            kernel.take(e, register)
        e.emit(f"br label %b{head}")
    e.label("start")


def from_the_beginning(number: int, cells: Iterable[Cell]) -> str:
    """Return ``thread_<number>`` of a region that can be entered elsewhere, too, and is given the values of `cells`."""
    given = parameters(cells)
    return f"""
define internal i32 @thread_{number}({ENVIRONMENT}, {THREAD}{given}) #0 {{
  %next = call i32 @from_{number}({VALUES}, {THREAD}, i32 0{given}) #2
  ret i32 %next
}}
"""


def in_pieces(whole: str, piece: str, cells: Iterable[Cell] = ()) -> str:
    """Return the function `whole` for the ``%n`` threads of a row: `piece` returns for how many of them it has run.

    Both are given the values of `cells`.
    """
    given = parameters(cells)
    return f"""
define internal void @{whole}({ENVIRONMENT}, {THREAD}, i32 %n{given}) #0 {{
entry:
  br label %next
next:
  %done = phi i32 [ 0, %entry ], [ %after, %next ]
  %first.tx = add nuw nsw i32 %tx, %done
  %first.t = add nuw nsw i32 %t, %done
  %rest = sub nuw nsw i32 %n, %done
  %some = call i32 @{piece}({VALUES}, i32 %first.tx, i32 %ty, i32 %tz, i32 %first.t, i32 %rest{given})
  %after = add nuw nsw i32 %done, %some
  %all = icmp eq i32 %after, %n
  br i1 %all, label %end, label %next
end:
  ret void
}}"""


class Together:
    """Emits the functions of one region.

    Parameters
    ----------
    number
        Of the region.
    index
        The suspension after which it begins, None for the first region.
    even
        How its threads run it.
    before
        What is computed once more when it begins.
    own
        What threads have kept.
    cells
        Those whose values the region is given.
    region
        Its instructions, and the suspension.
    notes
        Whether threads note which suspension they have come to.
    """

    room = WIDTH  # threads that arrays have room for
    count = str(WIDTH)  # how many threads there are
    more = ""  # what the function is given beside that
    name, kind = "together", "void"  # of the function, and what it returns
    to_check = staticmethod(whole_check)

    def __init__(
        self,
        kernel: ThreadCode,
        number: int,
        index: int | None,
        even: Even,
        before: list[Instruction],
        own: Iterable[str],
        cells: Mapping[str, Cell],
        region: list[Instruction],
        *,
        notes: bool,
    ) -> None:
        self.kernel, self.number, self.index, self.even = kernel, number, index, even
        self.before, self.own, self.given, self.notes = before, sorted(own), cells, notes
        self.touched = _touched(kernel, region + before)
        self.written = {name for one in region for name in writes(one)}
        self.arrays: dict[str, str] = {}
        self.entry: list[str] = []  # lines
        self.cells: list[str] = []  # 64-bit variables of the loop over rounds
        self.loops: list[int] = []
        self.unrolled: set[int] = set()  # of them, those that LLVM makes no vectors of and that are short
        self.at = '%"where threads are"'
        self.all_enter = ""  # whether all threads come to the loop that is next

    def generate(self) -> None:
        """Emit the functions into the kernel's parts."""
        e = self.kernel.emitter()
        first = next(iter(self.even.parts.values()))
        if self.index is not None:
            self._enter(e, first)
        e.emit(f"br label %p{first.head}")
        for part in self.even.parts.values():
            self._part(e, part)
        self.kernel.finish(e)
        registers = self.kernel.function.registers
        given = f"{ENVIRONMENT}, {THREAD}{self.more}{parameters(self.given.values())}"
        lines = [
            f"define internal {self.kind} @{self.name}_{self.number}({given}) #0 {{",
            "entry:",
            "  %t.x = zext i32 %t to i64",
            *self.entry,
            *(f"  {cell} = alloca {storage_type(registers[name])}" for name, cell in e.used.items()),
            *(
                f"  {array} = alloca [{self.room} x {self._stored(name)}], align 64"
                for name, array in self.arrays.items()
            ),
            f"  {self.at} = alloca [{self.room} x i32], align 64",
            *(f"  {cell} = alloca i64\n  store i64 0, ptr {cell}" for cell in self.cells),
            *(f"  store {storage_type(registers[name])} zeroinitializer, ptr {cell}" for name, cell in e.used.items()),
            *e.lines,
            "}",
            *(self._metadata(loop) for loop in self.loops),
        ]
        self.kernel.parts.append("\n".join(lines))

    # ---- registers ----

    def _is_scalar(self, name: str) -> bool:
        return name in self.even.distances

    def _stored(self, name: str) -> str:
        """Return the type in which a register lies in an array, as in its slot."""
        kind = storage_type(self.kernel.function.registers[name])
        return "i8" if kind == "i1" else kind

    def _live(self, head: int) -> list[str]:
        return _live(self.kernel, head, self.touched)

    def _array(self, name: str) -> str:
        return self.arrays.setdefault(name, f'%"array {name}"')

    def _is_alike(self, one: Instruction) -> bool:
        """Whether what an instruction does is computed once for all threads."""
        return bool(writes(one)) and all(map(self._is_scalar, writes(one)))

    # ---- what all threads compute alike ----

    def _computed(self, e: Emitter, code: Iterable[Instruction]) -> tuple[dict[int, str], list[str]]:
        """Emit what `code` computes once; return the results by the places of the instructions, and what must hold."""
        values: dict[int, str] = {}
        conditions: list[str] = []
        for place, one in enumerate(code):
            if self._is_alike(one):
                check = check_of(one, self.even.distances, self.to_check)
                if check is None:
                    self.kernel.instruction(e, one)
                else:
                    self._checked(e, one, check, conditions)
                values[place] = e.read(writes(one)[0])[0]
            elif (found := self._meet(e, one, conditions)) is not None:
                values[place] = found
        return values, conditions

    def _meet(self, e: Emitter, one: Instruction, conditions: list[str]) -> str | None:
        """Look at an instruction that each thread runs, where what is computed once is as it is there.

        Return where the first thread fetches a word from a texture, if neighbors do so at a known distance. Then what
        must hold is added to the `conditions`.
        """
        distance = distance_in_line(one, self.even.distances)
        if distance is None:
            return None
        return first_in_line(e, one, self._reach(e, distance, "i64"), conditions)

    def _checked(self, e: Emitter, one: Instruction, check: DistanceCheck, conditions: list[str]) -> None:
        base, kind = e.read(check.register)
        bits = check.type_name[1:]
        narrow = e.convert(base, kind, f"i{bits}")
        signed = check.type_name[0] == "s"
        which = "sadd" if signed else "uadd" if check.distance > 0 else "usub"
        pair = f"{{ i{bits}, i1 }}"
        operation = f"llvm.{which}.with.overflow.i{bits}"
        e.define(f"declare {pair} @{operation}(i{bits}, i{bits})")
        amount = self._reach(e, check.distance if signed else abs(check.distance), f"i{bits}")
        end = e.op(f"call {pair} @{operation}(i{bits} {narrow}, i{bits} {amount})")
        conditions.append(e.op(f"xor i1 {e.op(f'extractvalue {pair} {end}, 1')}, true"))
        if check.same:
            e.write(check.register, e.op(f"extractvalue {pair} {end}, 0"), f"i{bits}")
            self.kernel.instruction(e, one)
            last, result = e.read(writes(one)[0])
            e.write(check.register, base, kind)
            self.kernel.instruction(e, one)
            first, _ = e.read(writes(one)[0])
            conditions.append(e.op(f"icmp eq {result} {first}, {last}"))
        else:
            self.kernel.instruction(e, one)

    def _reach(self, e: Emitter, distance: int, kind: str) -> str:
        """Return how far the last thread is from the first, at a distance from one to the next."""
        return str((WIDTH - 1) * distance)

    def _look(self, e: Emitter, names: list[str]) -> list[str]:
        """Emit what reads scalar registers from the slots of the first thread; return whether all others fit to it."""
        found = []
        for name in names:
            kind = self._stored(name)
            row = self._slots(e, name)
            value = e.op(f"load {kind}, ptr {row}")
            e.write(name, value, kind)
            vector = f"<{WIDTH} x {kind}>"
            every = e.op(f"load {vector}, ptr {row}, align {type_bytes(self.kernel.function.registers[name])}")
            same = e.op(f"icmp eq {vector} {every}, {self._all(e, name, value)}")
            bits = e.op(f"bitcast <{WIDTH} x i1> {same} to i{WIDTH}")
            found.append(e.op(f"icmp eq i{WIDTH} {bits}, -1"))
        return found

    def _slots(self, e: Emitter, name: str, first: str = "%t.x") -> str:
        """Return a pointer to what the threads from `first` on have of a register in their slots."""
        offset, _ = self.kernel.slot(name)
        row = e.op(f"getelementptr i8, ptr %slots, i64 {offset}")
        return e.op(f"getelementptr {self._stored(name)}, ptr {row}, i64 {first}")

    def _all(self, e: Emitter, name: str, value: str) -> str:
        """Return a vector of what the threads have of a scalar register, of which the first has `value`."""
        kind = self._stored(name)
        vector = f"<{WIDTH} x {kind}>"
        one = e.op(f"insertelement {vector} poison, {kind} {value}, i32 0")
        every = e.op(f"shufflevector {vector} {one}, {vector} poison, <{WIDTH} x i32> zeroinitializer")
        distance = self.even.distances[name]
        if not distance:
            return every
        steps = ", ".join(f"{kind} {place * distance % (1 << int(kind[1:]))}" for place in range(WIDTH))
        return e.op(f"add {vector} {every}, <{steps}>")

    # ---- loops over threads ----

    def _enter(self, e: Emitter, first: Part) -> None:
        for name, cell in self.given.items():
            e.write(name, cell.value, cell.kind)
        looked_at = [name for name in self.own if self._is_scalar(name)]
        regular = self._look(e, looked_at)
        values, conditions = self._computed(e, self.before)
        conditions = regular + conditions
        self._go_or_back(e, conditions, -1, [], {})
        body = Body(self, f"enter_{self.number}")
        for name in self.given:
            body.scalar(name, e.read(name)[0])
        for name in self.own:
            if name in looked_at:
                body.scalar(name, e.read(name)[0])
            else:
                body.load_slot(name)
        for place, one in enumerate(self.before):
            body.run(one, values.get(place))
        assert self.index is not None
        self.kernel.resume(body.e, self.index)
        body.set.update(writes(self.kernel.code[self.index]))  # what a collective gives to each thread
        body.store(self._live(first.head))
        body.e.emit("ret i32 0")
        self._over_threads(e, "enter", body, ends=False)

    def _part(self, e: Emitter, part: Part) -> None:
        head = part.head
        e.label(f"p{head}")
        self._begin(e, part)
        live = self._live(head)
        before = {name: e.read(name)[0] for name in live if self._is_scalar(name)}
        chained = [one for number in part.chain for one in self._code(number)]
        values, conditions = self._computed(e, chained)
        self._go_or_back(e, conditions, head, live, before)
        self._fetch(e, part)
        self._run_part(e, part, live, before, values)
        for loop in part.loops:
            self._nest(e, loop) if loop.loops else self._rounds(e, loop)
        if len(part.after) == 2:
            last = self._code(part.chain[-1])[-1]
            assert last.guard is not None
            guard = e.get(last.guard, "pred")
            e.emit(f"br i1 {guard}, label %p{part.after[0]}, label %p{part.after[1]}")
        elif part.after:
            e.emit(f"br label %p{part.after[0]}")
        else:
            self._end(e)

    def _begin(self, e: Emitter, part: Part) -> None:
        """Emit what a part begins with."""

    def _end(self, e: Emitter) -> None:
        """Emit what ends the function."""
        e.emit("ret void")

    def _run_part(
        self, e: Emitter, part: Part, live: list[str], before: Mapping[str, str], values: Mapping[int, str]
    ) -> None:
        """Emit what the threads do in a part; `before` and `values` are what is computed once."""
        body = Body(self, f"part_{self.number}_{part.head}")
        body.whole(part, live, before, values)
        first = part.loops[0] if part.loops else None
        # What is loaded once for all threads in a loop is not loaded if there are none.
        skipped = first.head if first is not None and (first.is_detour or first.alike) else None
        at = self.at if part.loops else ""
        some, self.all_enter = self._over_threads(e, f"{part.head}", body, ends=not part.after, at=at, stays=skipped)
        if skipped is not None:
            e.emit(f"br i1 {some}, label %detour{skipped}, label %through{skipped}")
            e.label(f"detour{skipped}")

    def _fetch(self, e: Emitter, part: Part) -> None:
        """Emit what lets the host fetch what the next round of a part reads."""

    def _nest(self, e: Emitter, loop: Part) -> None:
        """Emit the rounds of a loop with others inside, until no thread is in it."""
        head = loop.head
        e.emit(f"br label %nest{head}")
        e.label(f"nest{head}")
        for inside in loop.loops[:-1]:
            self._rounds(e, inside)
        some = self._rounds(e, loop.loops[-1], back_to=head)
        e.emit(f"br i1 {some}, label %nest{head}, label %out{head}")
        e.label(f"out{head}")

    def _rounds(self, e: Emitter, loop: Part, back_to: int | None = None) -> str:
        """Emit the rounds of a loop that each thread leaves by itself, until none is in it.

        Return whether some thread is then at the block `back_to`, of a loop of one round.
        """
        head = loop.head
        live = self._live(head)
        before = {name: e.read(name)[0] for name in live if self._is_scalar(name)}
        body = Body(self, f"round_{self.number}_{head}")
        for index in loop.alike.before if loop.alike else ():
            self.kernel.instruction(e, self.kernel.code[index])
        if loop.alike and loop.alike.is_search:
            self._search(e, loop, live, before)
        e.emit(f"br label %rounds{head}")
        e.label(f"rounds{head}")
        alike, values = self._alike(e, loop)
        body.round(loop, live, before, alike, values)
        stays = head if back_to is None else back_to
        some, _ = self._over_threads(e, f"round{head}", body, ends=False, at=self.at, stays=stays)
        e.emit(
            f"br label %through{head}" if loop.is_detour else f"br i1 {some}, label %rounds{head}, label %through{head}"
        )
        e.label(f"through{head}")
        return some

    def _search(self, e: Emitter, loop: Part, live: list[str], before: Mapping[str, str]) -> None:
        """Emit the rounds of a search in which all threads are in the loop, and stay there.

        The round in which one of them leaves is done again, for those that stay and those that leave.
        """
        head = loop.head
        e.emit(f"br i1 {self.all_enter}, label %all{head}, label %not.all{head}")
        e.label(f"all{head}")
        alike, values = self._alike(e, loop)
        body = Body(self, f"stay_{self.number}_{head}")
        body.stay(loop, live, before, alike, values)
        _, every = self._over_threads(e, f"all{head}", body, ends=False, stays=head)
        e.emit(f"br i1 {every}, label %all{head}, label %again{head}")
        e.label(f"again{head}")
        for name, value in alike.items():
            e.write(name, value, storage_type(self.kernel.function.registers[name]))
        e.emit(f"br label %not.all{head}")
        e.label(f"not.all{head}")

    def _alike(self, e: Emitter, loop: Part) -> tuple[dict[str, str], dict[int, str]]:
        """Emit what the threads in a loop compute alike in a round.

        Return what they have alike when it begins, and the results by the places of the instructions.
        """
        if loop.alike is None:
            return {}, {}
        entered = self.kernel.flow.blocks[loop.head].live_in & loop.alike.registers
        begin = {name: e.read(name)[0] for name in sorted(entered)}
        values: dict[int, str] = {}
        for index in loop.alike.code:
            one = self.kernel.code[index]
            self.kernel.instruction(e, one)
            values[index] = e.read(writes(one)[0])[0]
        return begin, values

    def _code(self, number: int) -> list[Instruction]:
        block = self.kernel.flow.blocks[number]
        return self.kernel.code[block.start : block.stop]

    def _over_threads(
        self, e: Emitter, name: str, body: Body, *, ends: bool, at: str = "", stays: int | None = None
    ) -> tuple[str, str]:
        """Emit a loop that calls `body` for each thread.

        Where it leads, each time by one more than a block, is put into the array `at`, if there is one, from which a
        thread learns where it is. Return whether any thread `stays` at a block, and whether all do.
        """
        self.kernel.finish(body.e)
        self.kernel.parts.append(body.text())
        self.loops.append(_FIRST_LOOP + (self.number << 10) + len(self.loops))
        if body.updates and len(body.e.lines) <= _SHORT:
            self.unrolled.add(self.loops[-1])
        before = "before" + name
        e.emit(f"br label %{before}")
        e.label(before)
        e.emit(f"br label %each{name}")
        e.label(f"each{name}")
        place, after, some, more, every, still = (e.name() for _ in range(6))
        e.emit(f"{place} = phi i32 [ 0, %{before} ], [ {after}, %each{name} ]")
        if stays is not None:
            e.emit(f"{some} = phi i1 [ false, %{before} ], [ {more}, %each{name} ]")
            e.emit(f"{every} = phi i1 [ true, %{before} ], [ {still}, %each{name} ]")
        tx, t = (e.op(f"add nuw nsw i32 %{which}, {place}") for which in ("tx", "t"))
        given = "".join(f", {kind} {value}" for kind, value in body.given)
        given += f", ptr {self.at}"
        arrays = "".join(f", ptr {self._array(one)}" for one in body.arrays)
        call = f"{VALUES}, i32 {tx}, i32 %ty, i32 %tz, i32 {t}, i32 {place}{given}{arrays}"
        result = e.op(f"call i32 @{body.name}({call}) #1")
        if ends:
            self._note(e, t, result)
        if at:
            mine = e.op(f"getelementptr i32, ptr {at}, i64 {e.op(f'zext i32 {place} to i64')}")
            e.emit(f"store i32 {result}, ptr {mine}, !llvm.access.group !1")
        if stays is not None:
            is_there = e.op(f"icmp eq i32 {result}, {stays + 1}")
            e.emit(f"{more} = or i1 {some}, {is_there}")
            e.emit(f"{still} = and i1 {every}, {is_there}")
        e.emit(f"{after} = add nuw nsw i32 {place}, 1")
        done = e.op(f"icmp eq i32 {after}, {self.count}")
        e.emit(f"br i1 {done}, label %after{name}, label %each{name}, !llvm.loop !{self.loops[-1]}")
        e.label(f"after{name}")
        return more, still

    def _note(self, e: Emitter, thread: str, suspension: str) -> None:
        """Note which suspension a thread has come to, if it has to."""
        if self.notes:
            at = e.op(f"getelementptr i32, ptr %slots, i64 {e.op(f'zext i32 {thread} to i64')}")
            e.emit(f"store i32 {suspension}, ptr {at}, align 4, !llvm.access.group !1")

    def _go_or_back(
        self, e: Emitter, conditions: list[str], head: int, live: list[str], before: Mapping[str, str]
    ) -> None:
        """Emit the choice between going on together, if `conditions` hold, and each thread by itself from `head`.

        Where the region begins, `head` is -1.
        """
        if conditions:
            holds = conditions[0]
            for condition in conditions[1:]:
                holds = e.op(f"and i1 {holds}, {condition}")
            e.emit(f"br i1 {holds}, label %go{head}, label %back{head}")
            self._back(e, head, live, before)
            e.label(f"go{head}")

    def _back(self, e: Emitter, head: int, live: list[str], before: Mapping[str, str]) -> None:
        """Emit what lets the threads go on by themselves, one after the other, from the head of a part."""
        e.label(f"back{head}")
        self._keep(e, live, before)
        self._one_by_one(e, head, live, before, "0", self.count)
        self._end(e)

    def _one_by_one(
        self, e: Emitter, head: int, live: list[str], before: Mapping[str, str], first: str, count: str
    ) -> None:
        """Emit what lets threads go on by themselves from the head of a part, of `count` those from `first` on."""
        e.emit(f"br label %some{head}")
        e.label(f"some{head}")
        e.emit(f"br label %one{head}")
        e.label(f"one{head}")
        place, after = e.name(), e.name()
        e.emit(f"{place} = phi i32 [ {first}, %some{head} ], [ {after}, %one{head} ]")
        tx, t = (e.op(f"add nuw nsw i32 %{which}, {place}") for which in ("tx", "t"))
        # Rows of blocks beside each other may have more threads than there are slots. Such threads end before the next
        # begins, so that any slot will do.
        t = e.op(f"and i32 {t}, {MAX_THREADS - 1}")
        self._keep_one(e, place, t, live, before)
        mine = f"i32 {tx}, i32 %ty, i32 %tz, i32 {t}, i32 {head + 1}{parameters(self.given.values())}"
        result = e.op(f"call i32 @from_{self.number}({VALUES}, {mine}) #2")
        self._note(e, t, result)
        e.emit(f"{after} = add nuw nsw i32 {place}, 1")
        e.emit(f"br i1 {e.op(f'icmp eq i32 {after}, {count}')}, label %gone{head}, label %one{head}")
        e.label(f"gone{head}")

    def _keep_one(self, e: Emitter, place: str, t: str, live: list[str], before: Mapping[str, str]) -> None:
        """Emit what puts registers of one thread into slot `t`, if :meth:`_keep` has not done it for all."""

    def _keep(self, e: Emitter, live: list[str], before: Mapping[str, str]) -> None:
        """Emit what puts registers into the slots of all threads."""
        for name in live:
            stored = self._stored(name)
            row = self._slots(e, name)
            size = type_bytes(self.kernel.function.registers[name])
            if name not in before:
                e.define("declare void @llvm.memcpy.p0.p0.i64(ptr, ptr, i64, i1)")
                given = f"ptr {row}, ptr {self._array(name)}, i64 {size * WIDTH}, i1 false"
                e.emit(f"call void @llvm.memcpy.p0.p0.i64({given})")
                continue
            is_bit = storage_type(self.kernel.function.registers[name]) == "i1"
            value = e.op(f"zext i1 {before[name]} to i8") if is_bit else before[name]
            vector = f"<{WIDTH} x {stored}>"
            every = self._all(e, name, value)
            e.emit(f"store {vector} {every}, ptr {row}, align {size}")

    def _metadata(self, loop: int) -> str:
        width = f", {ONE_VECTOR}" if self.even.has_nests else ""
        return f"!{loop} = distinct !{{!{loop}, !6, !7, !8{width}}}"


class Body:
    """What one thread does in a part.

    Attributes
    ----------
    given
        Types and values that its function is given, beyond what every thread has.
    arrays
        The registers whose arrays it is given.
    """

    def __init__(self, region: Together, name: str) -> None:
        self.region, self.name = region, name
        self.kernel = region.kernel
        self.e = self.kernel.emitter()
        self.given: list[tuple[str, str]] = []
        self.arrays: list[str] = []
        self.set: set[str] = set()  # what an array does not hold yet
        self.updates = False  # whether it updates memory atomically

    def text(self) -> str:
        given = "".join(f", {kind} %given.{number}" for number, (kind, _) in enumerate(self.given))
        arrays = "".join(f', ptr %"array {name}"' for name in self.arrays)
        header = f"define internal i32 @{self.name}({ENVIRONMENT}, {THREAD}, i32 %place{given}, ptr %at{arrays}) #0 {{"
        lines = [header, "entry:", "  %place.x = zext i32 %place to i64", *self.kernel.header(self.e), *self.e.lines]
        return "\n".join([*lines, "}"])

    def scalar(self, name: str, value: str) -> None:
        """Let a register be what this thread has of a scalar whose value for the first thread is `value`.

        Threads in a loop may have others alike, too.
        """
        e = self.e
        kind = storage_type(self.kernel.function.registers[name])
        mine = f"%given.{len(self.given)}"
        self.given.append((kind, value))
        if distance := self.region.even.distances.get(name, 0):
            nsw = "nsw " if abs(distance) * MOST < 1 << int(kind[1:]) - 1 else ""
            by = e.op(f"mul {nsw}{kind} {e.convert('%place', 'i32', kind)}, {distance}")
            mine = e.op(f"add {kind} {mine}, {by}")
        e.write(name, mine, kind)

    def run(self, one: Instruction, value: str | None) -> None:
        """Emit an instruction, or take what was computed for all threads."""
        self.updates |= one.opcode in ("atom", "red")
        if value is None:
            self.kernel.instruction(self.e, one)
            self.set.update(writes(one))
        elif one.opcode == "tex":
            self._fetch(one, value)
        else:
            self.scalar(writes(one)[0], value)

    def _fetch(self, one: Instruction, value: str) -> None:
        """Emit a fetch of a texture's word: `value` is where the first thread finds its own."""
        distance = distance_in_line(one, self.region.even.distances)
        first = f"%given.{len(self.given)}"
        self.given.append(("ptr", value))
        mine = self.e.op(f"getelementptr i32, ptr {first}, i64 {self.e.op(f'mul nsw i64 %place.x, {distance}')}")
        take_word(self.e, one, mine)
        self.set.update(writes(one))

    def load_slot(self, name: str) -> None:
        offset, kind = self.kernel.slot(name)
        stored = self.region._stored(name)
        row = self.e.op(f"getelementptr i8, ptr %slots, i64 {offset}")
        self._load(name, self.e.op(f"getelementptr {stored}, ptr {row}, i64 %slot"), kind)
        self.set.add(name)

    def load(self, name: str) -> None:
        kind = storage_type(self.kernel.function.registers[name])
        self._load(name, self._at(name), kind)

    def _at(self, name: str) -> str:
        if name not in self.arrays:
            self.arrays.append(name)
        return self.e.op(f'getelementptr {self.region._stored(name)}, ptr %"array {name}", i64 %place.x')

    def _load(self, name: str, at: str, kind: str) -> None:
        value = self.e.op(f"load {self.region._stored(name)}, ptr {at}, !llvm.access.group !1")
        self.e.write(name, self.e.op(f"trunc i8 {value} to i1") if kind == "i1" else value, kind)

    def store(self, live: Iterable[str]) -> None:
        """Store what others need of what has changed."""
        for name in live:
            if name in self.set and not self.region._is_scalar(name):
                value, kind = self.e.read(name)
                if kind == "i1":
                    value, kind = self.e.op(f"zext i1 {value} to i8"), "i8"
                self.e.emit(f"store {kind} {value}, ptr {self._at(name)}, !llvm.access.group !1")

    def whole(self, part: Part, live: list[str], before: Mapping[str, str], values: Mapping[int, str]) -> None:
        """Emit all of a part."""
        region, kernel = self.region, self.kernel
        touched: set[str] = set()
        for number in part.blocks:
            block = kernel.flow.blocks[number]
            for index in range(block.start, block.stop):
                touched.update(reads(kernel.code[index]), writes(kernel.code[index]))
                if kernel.suspends(index):
                    touched.update(kernel.kept(index, region.written))
        self._enter([name for name in live if name in touched], before)
        self.set |= {name for number in part.blocks for one in region._code(number) for name in writes(one)}
        self.e.emit("br label %begin")
        exits: set[int] = set()
        place = 0
        for number in part.chain:
            here = {at: values.get(place + at) for at in range(len(region._code(number)))}
            place += len(here)
            exits |= self.block(part, number, here)
        for number in sorted(part.blocks - set(part.chain)):
            exits |= self.block(part, number, {})
        self.leave(exits)

    def leave(self, exits: Iterable[int]) -> None:
        """Emit how a thread comes to the heads of other parts."""
        for number in sorted(exits):
            self.e.label(f"b{number}")
            self.store(self.region._live(number))
            self.e.emit(f"ret i32 {number + 1}")

    def stay(
        self,
        loop: Part,
        live: list[str],
        before: Mapping[str, str],
        alike: Mapping[str, str],
        values: Mapping[int, str],
    ) -> None:
        """Emit what tells where a round of a loop leads a thread that is at its head, and keeps nothing of it."""
        self._enter(sorted(self._touched(loop) & set(live) - alike.keys()), before)
        for name, value in alike.items():
            self.scalar(name, value)
        self.e.emit("br label %begin")
        for number in sorted(self._blocks(loop, values)):
            self.e.label(f"b{number}")
            self.e.emit(f"ret i32 {number + 1}")

    def _touched(self, loop: Part) -> set[str]:
        code = [one for number in loop.blocks for one in self.region._code(number)]
        return {name for one in code for names in (reads(one), writes(one)) for name in names}

    def _enter(self, names: Iterable[str], before: Mapping[str, str]) -> None:
        """Give registers the values that a thread has: from `before` what all have alike."""
        for name in names:
            if name in before:
                self.scalar(name, before[name])
            else:
                self.load(name)

    def _blocks(self, loop: Part, values: Mapping[int, str]) -> set[int]:
        """Emit the blocks of a loop; return where they lead. Instructions whose `values` are given are not run."""
        exits: set[int] = set()
        for number in sorted(loop.blocks, key=lambda number: number != loop.head):
            start = self.kernel.flow.blocks[number].start
            exits |= self.block(loop, number, {index - start: value for index, value in values.items()})
        return exits

    def round(
        self,
        loop: Part,
        live: list[str],
        before: Mapping[str, str],
        alike: Mapping[str, str],
        values: Mapping[int, str],
    ) -> None:
        """Emit a round of a loop for a thread that is at its head; others only pass by.

        What threads in the loop have `alike` when it begins, and the `values` of instructions, are computed once.

        What is stored is stored by all threads, so that LLVM needs no masks for it.
        """
        region, kernel, e = self.region, self.kernel, self.e
        self.set = {name for number in loop.blocks for one in region._code(number) for name in writes(one)}
        leads = {after for number in loop.blocks for after in kernel.flow.blocks[number].successors}
        kept = {
            name
            for number in leads
            for name in region._live(number)
            if name in self.set and not (number == loop.head and name in alike)
        }
        self._enter(sorted((self._touched(loop) & set(live) - alike.keys()) | kept), before)
        mine = e.op("getelementptr i32, ptr %at, i64 %place.x")
        now = e.op(f"load i32, ptr {mine}, !llvm.access.group !1")
        here = e.op(f"icmp eq i32 {now}, {loop.head + 1}")
        e.emit("br label %entry.end")
        e.label("entry.end")
        e.emit(f"br i1 {here}, label %round, label %pass")
        e.label("round")
        for name, value in alike.items():
            self.scalar(name, value)
        e.emit("br label %begin")
        exits = self._blocks(loop, values)
        for number in sorted(exits):
            e.label(f"b{number}")
            e.emit("br label %pass")
        e.label("pass")
        ways = ", ".join(f"[ {number + 1}, %b{number} ]" for number in sorted(exits))
        result = e.op(f"phi i32 [ {now}, %entry.end ], {ways}")
        self.store(sorted(kept))
        e.emit(f"ret i32 {result}")

    def block(self, part: Part, number: int, values: Mapping[int, str | None], start: int = 0) -> set[int]:
        """Emit a block from its instruction `start` on; return the heads of parts that it leads to."""
        kernel, e = self.kernel, self.e
        block = kernel.flow.blocks[number]
        e.label("begin" if number == part.head else f"b{number}")
        if number + 1 == len(kernel.flow.blocks) and block.start == block.stop:
            e.emit(f"ret i32 {EXIT}")
            return set()
        for index in range(block.start + start, block.stop):
            one = kernel.code[index]
            if kernel.suspends(index):
                kernel.suspend(e, index, number, self.region.written)
                return set()
            if opcode_of(one.opcode).control is not Control.NEXT:
                if len(part.after) == 2 and number == part.chain[-1]:
                    kernel.count_round(e, number, part.after)
                    self.store(sorted({name for head in part.after for name in self.region._live(head)}))
                    e.emit("ret i32 0")
                    return set()
                kernel.branch(e, one, number, set())
                return {after for after in block.successors if after == part.head or after not in part.blocks}
            self.run(one, values.get(index - block.start))
        e.emit(f"br label %b{number + 1}")
        return {after for after in block.successors if after == part.head or after not in part.blocks}
