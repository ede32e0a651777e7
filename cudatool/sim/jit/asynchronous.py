"""Asynchronous copies to shared memory (``cp.async``) and ``mbarrier`` objects. Semantics: PTX ISA, 9.7.9 and 9.7.13.

A copy is made as late as the program allows: when its thread waits for it, or must make room in the queue of copies
that it has begun. So a missing wait shows. The queue is a local variable of the thread.

An mbarrier is a 64-bit word: pending arrivals (bits 0 to 19), expected arrivals (20 to 39), bytes that asynchronous
operations have yet to transfer (40 to 61, signed), and the phase (63).
"""

from __future__ import annotations

from cudatool.ptx import Instruction, Operand, Register, space_of
from cudatool.ptx.operands import GENERIC
from cudatool.sim.jit import races
from cudatool.sim.jit.collective import SUSPENSIONS, Kind, Suspension, read_array
from cudatool.sim.jit.emit import ATOMIC, READ, WRITE, Emitter
from cudatool.sim.jit.instrument import Flag
from cudatool.sim.jit.layout import ASYNC_QUEUE
from cudatool.sim.jit.races import Arrival
from cudatool.sim.jit.table import lowers

__all__ = ["begin"]

_SLOTS = 16  # copies that a thread may have begun
_FUNCTIONS = f"""
define internal ptr @async_entry(ptr %queue, i32 %index) {{
  %slot = and i32 %index, {_SLOTS - 1}
  %scaled = mul i32 %slot, 32
  %offset = add i32 %scaled, 16
  %entry = getelementptr i8, ptr %queue, i32 %offset
  ret ptr %entry
}}

define internal void @async_finish(ptr %queue) noinline {{
  %head = load i32, ptr %queue
  %count.p = getelementptr i32, ptr %queue, i32 1
  %count = load i32, ptr %count.p
  %entry = call ptr @async_entry(ptr %queue, i32 %head)
  %to = load ptr, ptr %entry
  %from.p = getelementptr i8, ptr %entry, i32 8
  %from = load ptr, ptr %from.p
  %size.p = getelementptr i8, ptr %entry, i32 16
  %size = load i32, ptr %size.p
  %given.p = getelementptr i8, ptr %entry, i32 20
  %given = load i32, ptr %given.p
  %is.whole = icmp eq i32 %size, %given
  %kind = select i1 %is.whole, i32 %size, i32 0
  switch i32 %kind, label %part [ i32 4, label %four  i32 8, label %eight  i32 16, label %sixteen ]
four:
  %word = load i32, ptr %from, align 1
  store i32 %word, ptr %to, align 1
  br label %done
eight:
  %words = load i64, ptr %from, align 1
  store i64 %words, ptr %to, align 1
  br label %done
sixteen:
  %vector = load <4 x i32>, ptr %from, align 1
  store <4 x i32> %vector, ptr %to, align 1
  br label %done
part:
  %rest = sub i32 %size, %given
  %behind = getelementptr i8, ptr %to, i32 %given
  call void @llvm.memcpy.p0.p0.i32(ptr %to, ptr %from, i32 %given, i1 false)
  call void @llvm.memset.p0.i32(ptr %behind, i8 0, i32 %rest, i1 false)
  br label %done
done:
  %head.next = add i32 %head, 1
  store i32 %head.next, ptr %queue
  %count.next = sub i32 %count, 1
  store i32 %count.next, ptr %count.p
  ret void
}}

define internal void @async_begin(ptr %queue, ptr %to, ptr %from, i32 %size, i32 %given) noinline {{
entry:
  %count.p = getelementptr i32, ptr %queue, i32 1
  %group.p = getelementptr i32, ptr %queue, i32 2
  %count.0 = load i32, ptr %count.p
  %full = icmp eq i32 %count.0, {_SLOTS}
  br i1 %full, label %room, label %put
room:
  call void @async_finish(ptr %queue)
  br label %put
put:
  %head = load i32, ptr %queue
  %count = load i32, ptr %count.p
  %group = load i32, ptr %group.p
  %last = add i32 %head, %count
  %new = call ptr @async_entry(ptr %queue, i32 %last)
  store ptr %to, ptr %new
  %from.p = getelementptr i8, ptr %new, i32 8
  store ptr %from, ptr %from.p
  %size.p = getelementptr i8, ptr %new, i32 16
  store i32 %size, ptr %size.p
  %given.p = getelementptr i8, ptr %new, i32 20
  store i32 %given, ptr %given.p
  %in.p = getelementptr i8, ptr %new, i32 24
  store i32 %group, ptr %in.p
  %more = add i32 %count, 1
  store i32 %more, ptr %count.p
  ret void
}}

define internal void @async_commit(ptr %queue) {{
  %group.p = getelementptr i32, ptr %queue, i32 2
  %group = load i32, ptr %group.p
  %next = add i32 %group, 1
  store i32 %next, ptr %group.p
  ret void
}}

define internal void @async_wait(ptr %queue, i32 %keep) noinline {{
entry:
  %count.p = getelementptr i32, ptr %queue, i32 1
  %group.p = getelementptr i32, ptr %queue, i32 2
  %group = load i32, ptr %group.p
  %limit = sub i32 %group, %keep
  br label %loop
loop:
  %count = load i32, ptr %count.p
  %none = icmp eq i32 %count, 0
  br i1 %none, label %end, label %look
look:
  %head = load i32, ptr %queue
  %oldest = call ptr @async_entry(ptr %queue, i32 %head)
  %in.p = getelementptr i8, ptr %oldest, i32 24
  %in = load i32, ptr %in.p
  %wanted = icmp slt i32 %in, %limit
  br i1 %wanted, label %finish, label %end
finish:
  call void @async_finish(ptr %queue)
  br label %loop
end:
  ret void
}}"""
_MEMCPY = "declare void @llvm.memcpy.p0.p0.i32(ptr, ptr, i32, i1)"
_MEMSET = "declare void @llvm.memset.p0.i32(ptr, i8, i32, i1)"


def _queue(e: Emitter) -> str:
    for text in (_FUNCTIONS, _MEMCPY, _MEMSET):
        e.define(text)
    return e.op(f"getelementptr i8, ptr %local, i64 {e.layout.local[ASYNC_QUEUE]}")


def begin(e: Emitter) -> None:
    """Emit what a thread of a kernel that copies asynchronously does first: it has begun no copies."""
    e.emit(f"store {{ i32, i32, i32, i32 }} zeroinitializer, ptr {_queue(e)}")


@lowers("cp")
def _cp(e: Emitter, i: Instruction) -> None:
    if i.modifiers[0] != "async" or {"tensor", "reduce"}.intersection(i.modifiers):
        raise e.unsupported()
    if "bulk" in i.modifiers:
        _bulk(e, i)
    elif "mbarrier" in i.modifiers:
        # The copies that the arrival waits for are made now; unless .noinc, the arrival was counted as it came.
        _finish_all(e)
        _update(e, i, i.operands[0], Arrival.COPIES, arrivals="1" if "noinc" in i.modifiers else "0")
    elif "commit_group" in i.modifiers:
        e.emit(f"call void @async_commit(ptr {_queue(e)})")
        races.commit(e)
    elif "wait_group" in i.modifiers:
        keep = e.get(i.operands[0], "u32")
        e.emit(f"call void @async_wait(ptr {_queue(e)}, i32 {keep})")
        races.wait(e, keep)
    elif "wait_all" in i.modifiers:
        _finish_all(e)
        races.wait(e)
    else:
        _copy(e, i)


def _bulk(e: Emitter, i: Instruction) -> None:
    """A bulk copy is made at once: only another thread may wait for it."""
    if "commit_group" in i.modifiers:
        races.commit(e)
        return
    if "wait_group" in i.modifiers:
        races.wait(e, e.get(i.operands[0], "u32"), reads="read" in i.modifiers)
        return
    if "prefetch" in i.modifiers:
        return
    to_space, from_space = (m.partition("::")[0] for m in i.modifiers if m.partition("::")[0] in ("shared", "global"))
    to_space, to = e.pointer(to_space, i.operands[0])
    from_space, source = e.pointer(from_space, i.operands[1])
    size = e.get(i.operands[2], "u32")
    if e.instrument:  # a multiple of 16 bytes: the first and the last 16 stand for all
        last = e.op(f"sub i32 {size}, 16")
        e.guarded(to_space, e.op(f"getelementptr i8, ptr {to}, i32 {last}"), 16, WRITE, i, flags=Flag.APART)
        e.guarded(from_space, e.op(f"getelementptr i8, ptr {source}, i32 {last}"), 16, READ, i, flags=Flag.APART)
        races.range_access(e, i, to_space, to, size, WRITE)
        races.range_access(e, i, from_space, source, size, READ)
    to = e.guarded(to_space, to, 16, WRITE, i, flags=Flag.APART)
    source = e.guarded(from_space, source, 16, READ, i, flags=Flag.APART)
    e.define(_MEMCPY)
    e.emit(f"call void @llvm.memcpy.p0.p0.i32(ptr {to}, ptr {source}, i32 {size}, i1 false)")
    if "mbarrier::complete_tx::bytes" in i.modifiers:
        done = e.op(f"sub i64 0, {e.op(f'zext i32 {size} to i64')}")
        _update(e, i, i.operands[3], Arrival.COPIES, arrivals="0", bytes_=done, space="shared")


def _finish_all(e: Emitter) -> None:
    queue = _queue(e)
    e.emit(f"call void @async_commit(ptr {queue})")
    e.emit(f"call void @async_wait(ptr {queue}, i32 0)")


def _copy(e: Emitter, i: Instruction) -> None:
    size = e.constant(i.operands[2])
    if size not in (4, 8, 16):
        raise e.unsupported("size")
    options = list(i.operands[3:-1] if "L2::cache_hint" in i.modifiers else i.operands[3:])
    given = str(size)
    if options:
        option = options[0]
        if isinstance(option, Register) and e.function.registers.get(option.name) == "pred":  # ignore-src
            given = e.op(f"select i1 {e.get(option, 'pred')}, i32 0, i32 {size}")
        else:
            given = e.call("i32", "llvm.umin.i32", f"i32 {e.get(option, 'u32')}", f"i32 {size}")
    to_space, to = e.pointer("shared", i.operands[0])
    from_space, source = e.pointer("global", i.operands[1])
    to = e.guarded(to_space, to, size, WRITE, i, flags=Flag.ASYNC)
    source = _observe_source(e, i, from_space, source, size, given)
    e.emit(f"call void @async_begin(ptr {_queue(e)}, ptr {to}, ptr {source}, i32 {size}, i32 {given})")


def _observe_source(e: Emitter, i: Instruction, space: str, pointer: str, size: int, given: str) -> str:
    """Let checkers see the `given` bytes that are read; return the pointer to use.

    One access for each bit of their number, the largest first: each is aligned to its size, and none reads more.
    """
    if given == str(size) or not e.instrument:
        return e.guarded(space, pointer, size, READ, i, flags=Flag.ASYNC)
    used, bit = pointer, size
    while bit:
        before, some, last, after = (e.new_label() for _ in range(4))
        e.emit(f"br label %{before}")
        e.label(before)
        is_set = e.op(f"icmp ne i32 {e.op(f'and i32 {given}, {bit}')}, 0")
        e.emit(f"br i1 {is_set}, label %{some}, label %{after}")
        e.label(some)
        offset = e.op(f"and i32 {given}, {-2 * bit}")
        part = e.op(f"getelementptr i8, ptr {pointer}, i32 {offset}")
        seen = e.guarded(space, part, bit, READ, i, flags=Flag.ASYNC)
        e.emit(f"br label %{last}")
        e.label(last)  # if a part must not be read, nothing is
        sound = e.op(f"select i1 {e.op(f'icmp eq ptr {seen}, {part}')}, ptr {used}, ptr {seen}")
        e.emit(f"br label %{after}")
        e.label(after)
        used = e.op(f"phi ptr [ {used}, %{before} ], [ {sound}, %{last} ]")
        bit //= 2
    return used


# ---- mbarrier ----

_UPDATE = """
define internal i64 @mbarrier_update(ptr %barrier, i64 %arrivals, i64 %drops, i64 %bytes) noinline {
  %old = load i64, ptr %barrier
  %pending.0 = and i64 %old, 1048575
  %pending = sub i64 %pending.0, %arrivals
  %expected.s = lshr i64 %old, 20
  %expected.0 = and i64 %expected.s, 1048575
  %expected = sub i64 %expected.0, %drops
  %transfer.s = shl i64 %old, 2
  %transfer.0 = ashr i64 %transfer.s, 42
  %transfer = add i64 %transfer.0, %bytes
  %all = icmp eq i64 %pending, 0
  %idle = icmp eq i64 %transfer, 0
  %complete = and i1 %all, %idle
  %next = select i1 %complete, i64 %expected, i64 %pending
  %flip = select i1 %complete, i64 -9223372036854775808, i64 0
  %phase.0 = and i64 %old, -9223372036854775808
  %phase = xor i64 %phase.0, %flip
  %next.m = and i64 %next, 1048575
  %expected.m = and i64 %expected, 1048575
  %expected.p = shl i64 %expected.m, 20
  %transfer.m = and i64 %transfer, 4194303
  %transfer.p = shl i64 %transfer.m, 40
  %counts = or i64 %next.m, %expected.p
  %rest = or i64 %transfer.p, %phase
  %new = or i64 %counts, %rest
  store i64 %new, ptr %barrier
  ret i64 %old
}"""


def _object(e: Emitter, i: Instruction, address: Operand, space: str = "") -> tuple[str, str]:
    """Return the state space of an mbarrier, shared memory where the address is generic too, and a pointer to it."""
    space, pointer = e.pointer(space or space_of(i), address)
    return "shared" if space == GENERIC else space, pointer


def _update(
    e: Emitter,
    i: Instruction,
    address: Operand,
    what: Arrival,
    *,
    arrivals: str,
    drops: str = "0",
    bytes_: str = "0",
    space: str = "",
) -> str:
    """Change an mbarrier; return what it was, which is the state that waiting for its phase needs."""
    e.define(_UPDATE)
    space, pointer = _object(e, i, address, space)
    pointer = e.guarded(space, pointer, 8, ATOMIC, i, flags=Flag.STRONG | Flag.WIDE)
    state = e.op(f"call i64 @mbarrier_update(ptr {pointer}, i64 {arrivals}, i64 {drops}, i64 {bytes_})")
    races.mbarrier(e, pointer, what)
    return state


@lowers("mbarrier")
def _mbarrier(e: Emitter, i: Instruction) -> None:
    operation = i.modifiers[0]
    if operation == "init":
        space, pointer = _object(e, i, i.operands[0])
        pointer = e.guarded(space, pointer, 8, WRITE, i)
        count = e.op(f"zext i32 {e.get(i.operands[1], 'u32')} to i64")
        both = e.op(f"or i64 {count}, {e.op(f'shl i64 {count}, 20')}")
        e.emit(f"store i64 {both}, ptr {pointer}")
        races.mbarrier(e, pointer, Arrival.INIT)
    elif operation == "inval":
        space, pointer = _object(e, i, i.operands[0])
        pointer = e.guarded(space, pointer, 8, WRITE, i)
        e.emit(f"store i64 0, ptr {pointer}")
    elif operation == "pending_count":
        state = e.get(i.operands[1], "b64")
        e.set(i.operands[0], e.convert(e.op(f"and i64 {state}, 1048575"), "i64", "i32"), "u32")
    elif operation in ("expect_tx", "complete_tx"):
        count = e.op(f"zext i32 {e.get(i.operands[1], 'u32')} to i64")
        if operation == "complete_tx":
            count = e.op(f"sub i64 0, {count}")
        _update(e, i, i.operands[0], Arrival.UPDATE, arrivals="0", bytes_=count)
    elif operation in ("arrive", "arrive_drop"):
        _arrive(e, i)
    else:
        raise e.unsupported()


def _arrive(e: Emitter, i: Instruction) -> None:
    operands = list(i.operands)
    target = operands.pop(0) if isinstance(operands[0], Register) else None
    value = e.op(f"zext i32 {e.get(operands[1], 'u32')} to i64") if len(operands) > 1 else "1"
    arrivals, bytes_ = ("1", value) if "expect_tx" in i.modifiers else (value, "0")
    drops = arrivals if i.modifiers[0] == "arrive_drop" else "0"
    what = Arrival.RELAXED if "relaxed" in i.modifiers else Arrival.ARRIVE
    state = _update(e, i, operands[0], what, arrivals=arrivals, drops=drops, bytes_=bytes_)
    if target is not None:
        e.set(target, state, "b64")


# Waiting is a suspension: the thread is ready when the phase that it waits for is complete. It gives up when no other
# thread of the block can go on: ``try_wait`` has a time limit of the device's choice, ``test_wait`` none to speak of.


def _leave_wait(i: Instruction) -> list[tuple[str, Operand, str]]:
    return [("a", i.operands[1], "b64"), ("c", i.operands[2], "b32" if "parity" in i.modifiers else "phase")]


def _observe_wait(e: Emitter, i: Instruction, space: str, pointer: str) -> str:
    return e.guarded("shared" if space == GENERIC else space, pointer, 8, ATOMIC, i, flags=Flag.STRONG | Flag.WIDE)


def _combine_nothing(e: Emitter, i: Instruction) -> None:
    pass


def _take_wait(e: Emitter, i: Instruction) -> None:
    pointer = e.op(f"inttoptr i64 {e.pack([read_array(e, 'a'), read_array(e, 'b')], 'i32')} to ptr")
    phase = e.op(f"lshr i64 {e.op(f'load i64, ptr {pointer}')}, 63")
    wanted = e.op(f"and i32 {read_array(e, 'c')}, 1")
    complete = e.op(f"icmp ne i32 {e.convert(phase, 'i64', 'i32')}, {wanted}")
    races.passed(e, pointer, complete, relaxed="relaxed" in i.modifiers)
    e.set(i.operands[0], complete, "pred")


SUSPENSIONS += [
    ("mbarrier", operation, Suspension(Kind.WAIT, _leave_wait, _combine_nothing, _take_wait, access=_observe_wait))
    for operation in ("try_wait", "test_wait")
]
