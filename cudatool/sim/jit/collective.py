"""What threads do together: barriers and warp collectives.

A *suspension* is an instruction at which a thread waits for others. Before it, each thread leaves its operands in the
argument arrays (one i32 per thread); when all that take part are there, one function does the operation for a whole
warp with 32-lane vectors and leaves the results in the result arrays, where each thread finds its own when it goes on.

A row of :data:`SUSPENSIONS` says, per instruction, what the threads leave, how a warp combines it, and what a thread
reads back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cudatool.ptx import Immediate, Instruction, Operand, Pair
from cudatool.sim.jit import races
from cudatool.sim.jit.context import ARGUMENT_ARRAYS, ROW, array_offset
from cudatool.sim.jit.emit import Emitter
from cudatool.sim.jit.instrument import DefectCode, Instrument
from cudatool.sim.jit.table import types_of

__all__ = [
    "ARGUMENT_ARRAYS",
    "Kind",
    "ROW",
    "SUSPENSIONS",
    "Suspension",
    "array_offset",
    "check_whole_warp",
    "following_array",
    "read_array",
    "suspension_of",
]


def following_array(name: str) -> str:
    """Return the array that holds the upper half of what `name` holds the lower half of."""
    if name not in ARGUMENT_ARRAYS:
        return f"x{int(name[1:]) + 1}"
    return ARGUMENT_ARRAYS[ARGUMENT_ARRAYS.index(name) + 1]


class Kind:
    """How the scheduler treats a suspension."""

    WARP = 1  # ready when the lanes in its mask are there
    BARRIER = 2  # "a" is the barrier's number, "b" how many threads it waits for (0: all)
    BARRIER_REDUCE = 3  # a barrier whose predicates, in "c", are combined
    PRESENT = 4  # never waits: the lanes that are there take part (activemask)
    WAIT = 5  # each thread by itself: until the top bit of the word at "a" is not that of "c", or no other can go on
    ARRIVE = 6  # never waits, but counts at the barrier whose number is in "a"
    YIELD = 7  # waits for whatever other threads do (see progress.py)


_Combine = Callable[[Emitter, Instruction], None]


@dataclass(frozen=True, slots=True)
class Suspension:
    """A row of the table.

    Attributes
    ----------
    kind
        One of :class:`Kind`.
    leave
        Given the instruction: what goes to which argument array, as (array, operand, type). The upper half of a b64
        goes to the array after the one named. An address is left as a native pointer, which is a b64. Type "phase" is
        the top bit of a b64.
    combine
        Emits the body of the warp function, from ``%warp`` and ``%lanes`` (a bit for each lane that takes part).
    resume
        Emits what a thread does when it goes on.
    extra
        Given the instruction: how many arrays beyond :data:`ARGUMENT_ARRAYS` it uses.
    access
        Given the state space of an address and a native pointer to it: lets the checkers see what will be accessed
        for this thread, and returns the pointer to leave.
    fits
        Whether the row is for this form of the instruction.
    part
        Given the instruction and an address that it leaves: the instruction that `access` is given, another one if
        several were joined.
    """

    kind: int
    leave: Callable[[Instruction], list[tuple[str, Operand, str]]]
    combine: _Combine
    resume: Callable[[Emitter, Instruction], None]
    extra: Callable[[Instruction], int] = lambda i: 0
    access: Callable[[Emitter, Instruction, str, str], str] = lambda e, i, space, pointer: pointer
    fits: Callable[[Instruction], bool] = lambda i: True
    part: Callable[[Instruction, Operand], Instruction] = lambda i, operand: i


# ---- vectors of a warp ----

_V = "<32 x i32>"
_IOTA = "<" + ", ".join(f"i32 {lane}" for lane in range(32)) + ">"


def _row(e: Emitter, name: str) -> str:
    """Return a pointer to this warp's part of an array."""
    first = e.op("shl i64 %warp, 7")
    pointer = e.op(f"getelementptr i8, ptr %slots, i64 {array_offset(name)}")
    return e.op(f"getelementptr i8, ptr {pointer}, i64 {first}")


def _load(e: Emitter, name: str) -> str:
    return e.op(f"load {_V}, ptr {_row(e, name)}, align 4")


def _splat(e: Emitter, value: str) -> str:
    first = e.op(f"insertelement {_V} poison, i32 {value}, i32 0")
    return e.op(f"shufflevector {_V} {first}, {_V} poison, {_V} zeroinitializer")


def _leave_result(e: Emitter, name: str, value: str) -> None:
    """Store a vector of results for the lanes that take part."""
    lanes = e.op("bitcast i32 %lanes to <32 x i1>")
    e.emit(f"call void @llvm.masked.store.v32i32.p0({_V} {value}, ptr {_row(e, name)}, i32 4, <32 x i1> {lanes})")


def _ballot(e: Emitter, name: str) -> str:
    bits = e.op(f"icmp ne {_V} {_load(e, name)}, zeroinitializer")
    return e.op(f"and i32 {e.op(f'bitcast <32 x i1> {bits} to i32')}, %lanes")


def _operand_vector(e: Emitter, i: Instruction, index: int, name: str) -> str:
    value = e.constant(i.operands[index])
    return f"splat (i32 {value & 0xFFFFFFFF})" if value is not None else _load(e, name)


# ---- what a thread reads back ----


def read_array(e: Emitter, name: str) -> str:
    pointer = e.op(f"getelementptr i8, ptr %slots, i64 {array_offset(name)}")
    own = e.op(f"getelementptr i32, ptr {pointer}, i64 %slot")
    return e.op(f"load i32, ptr {own}, align 4, !llvm.access.group !1")


def _take_value(e: Emitter, i: Instruction) -> None:
    target = i.operands[0]
    if isinstance(target, Pair):
        e.set(target.second, e.op(f"icmp ne i32 {read_array(e, 'predicate')}, 0"), "pred")
        target = target.first
    e.set(target, read_array(e, "result"), "b32")


def _take_predicate(e: Emitter, i: Instruction) -> None:
    e.set(i.operands[0], e.op(f"icmp ne i32 {read_array(e, 'result')}, 0"), "pred")


def _take_vote(e: Emitter, i: Instruction) -> None:
    (_take_value if "ballot" in i.modifiers else _take_predicate)(e, i)


def _take_nothing(e: Emitter, i: Instruction) -> None:
    pass


# ---- rows ----


def _combine_nothing(e: Emitter, i: Instruction) -> None:
    pass


def _mask_last(*arrays: tuple[str, int, str]) -> Callable[[Instruction], list[tuple[str, Operand, str]]]:
    """Leave the operands named by position, and the member mask, which is the last operand."""
    return lambda i: [("mask", i.operands[-1], "b32"), *((name, i.operands[n], t) for name, n, t in arrays)]


def _leave_shuffle(i: Instruction) -> list[tuple[str, Operand, str]]:
    """Leave the value, and of lane and clamp what is not a constant."""
    left = [(name, i.operands[n], "b32") for name, n in (("b", 2), ("c", 3)) if not _is_number(i.operands[n])]
    return [("mask", i.operands[-1], "b32"), ("a", i.operands[1], "b32"), *left]


def _is_number(operand: Operand) -> bool:
    return isinstance(operand, Immediate) and not operand.width


def _mode(i: Instruction) -> str:
    return next(m for m in i.modifiers if m in ("up", "down", "bfly", "idx"))


def _combine_shuffle(e: Emitter, i: Instruction) -> None:
    b, c = (e.constant(operand) for operand in i.operands[2:4])
    if b is not None and c is not None:
        places = [_source(_mode(i), lane, b, c) for lane in range(32)]
        order = ", ".join(f"i32 {place}" for place, _ in places)
        value = e.op(f"shufflevector {_V} {_load(e, 'a')}, {_V} poison, {_V} <{order}>")
        source = f"<{order}>"
        inside = "<" + ", ".join(f"i1 {inside:d}" for _, inside in places) + ">"
    else:
        source, inside = _sources(e, i)
        value = _gathered(e, source)
    if e.instrument & Instrument.SYNCCHECK:
        _check_sources(e, i, source)
    _leave_result(e, "result", value)
    if isinstance(i.operands[0], Pair):
        _leave_result(e, "predicate", e.op(f"zext <32 x i1> {inside} to {_V}"))


def _source(mode: str, lane: int, b: int, c: int) -> tuple[int, bool]:
    """Return the lane whose value a lane gets, and whether it is in range (PTX ISA, 9.7.9: ``shfl.sync``)."""
    b, clamp, segment = b & 31, c & 31, c >> 8 & 31
    lowest = lane & segment
    limit = lowest | clamp & ~segment
    source = {"up": lane - b, "down": lane + b, "bfly": lane ^ b, "idx": lowest | b & ~segment}[mode]
    inside = source >= limit if mode == "up" else source <= limit
    return source if inside else lane, inside


def _sources(e: Emitter, i: Instruction) -> tuple[str, str]:
    """Return which lanes' values a shuffle gives, where that is found when it runs, and the predicates."""
    mode = _mode(i)
    b = e.op(f"and {_V} {_operand_vector(e, i, 2, 'b')}, splat (i32 31)")
    c = _operand_vector(e, i, 3, "c")
    clamp = e.op(f"and {_V} {c}, splat (i32 31)")
    segment = e.op(f"and {_V} {e.op(f'lshr {_V} {c}, splat (i32 8)')}, splat (i32 31)")
    outside = e.op(f"xor {_V} {segment}, splat (i32 -1)")
    lowest = e.op(f"and {_V} {_IOTA}, {segment}")
    limit = e.op(f"or {_V} {lowest}, {e.op(f'and {_V} {clamp}, {outside}')}")
    if mode == "idx":
        source = e.op(f"or {_V} {lowest}, {e.op(f'and {_V} {b}, {outside}')}")
    else:
        source = e.op(f"{ {'up': 'sub', 'down': 'add', 'bfly': 'xor'}[mode] } {_V} {_IOTA}, {b}")
    inside = e.op(f"icmp {'sge' if mode == 'up' else 'sle'} {_V} {source}, {limit}")
    return e.op(f"select <32 x i1> {inside}, {_V} {source}, {_V} {_IOTA}"), inside


def _gathered(e: Emitter, source: str) -> str:
    """Return the values that the lanes `source` left."""
    pointers = e.op(f"getelementptr i32, ptr {_row(e, 'a')}, {_V} {source}")
    lanes = "splat (i1 true)"
    return e.op(
        f"call {_V} @llvm.masked.gather.v32i32.v32p0(<32 x ptr> {pointers}, i32 4, <32 x i1> {lanes}, {_V} poison)"
    )


def _check_sources(e: Emitter, i: Instruction, source: str) -> None:
    """Report a lane that takes the value of a lane that the mask names and that has ended, or that no thread is.

    No others are missing, since the operation waits for them. Only a lane that its own mask lacks does not; that is
    reported as such. A source that the mask does not name may be one on purpose, whose value nothing uses: lanes 8 to
    15 of ``__shfl_down_sync(0xffff, x, 8)`` have such sources.
    """
    masks = _operand_vector(e, i, len(i.operands) - 1, "mask")
    there = _bits_at(e, _splat(e, "%lanes"), source)
    named = e.op(f"and <32 x i1> {_bits_at(e, masks, source)}, {_bits_at(e, masks, _IOTA)}")
    absent = e.op(f"bitcast <32 x i1> {e.op(f'and <32 x i1> {named}, {_not(e, there)}')} to i32")
    lanes = e.op(f"and i32 {absent}, %lanes")
    _report_lanes(e, i, DefectCode.ABSENT_LANE, lanes)


def check_whole_warp(e: Emitter, i: Instruction) -> None:
    """Report an operation of a whole warp of which a lane has ended, or that no thread is."""
    missing = e.op("icmp ne i32 %lanes, -1")
    _report_lanes(e, i, DefectCode.PART_OF_WARP, e.op(f"select i1 {missing}, i32 %lanes, i32 0"))


def _report_lanes(e: Emitter, i: Instruction, defect: DefectCode, lanes: str) -> None:
    """Report a defect of the first of `lanes`, if there are any."""
    bad, after = e.new_label(), e.new_label()
    e.emit(f"br i1 {e.op(f'icmp ne i32 {lanes}, 0')}, label %{bad}, label %{after}")
    e.label(bad)
    lane = e.call("i32", "llvm.cttz.i32", f"i32 {lanes}", "i1 true")
    first = e.op(f"shl i32 {e.op('trunc i64 %warp to i32')}, 5")
    thread = e.op(f"add i32 {first}, {lane}")
    e.emit(
        f"call void @report(ptr %context, i32 {int(defect)}, i32 {i.line}, i64 0, i32 0, i32 0, i32 0, "
        f"i32 %bx, i32 %by, i32 %bz, i32 {thread})"
    )
    e.emit(f"br label %{after}")
    e.label(after)


def _bits_at(e: Emitter, words: str, places: str) -> str:
    """Return bit number `places` of `words`, for each lane."""
    return e.op(f"trunc {_V} {e.op(f'lshr {_V} {words}, {places}')} to <32 x i1>")


def _not(e: Emitter, bits: str) -> str:
    return e.op(f"xor <32 x i1> {bits}, splat (i1 true)")


def _combine_vote(e: Emitter, i: Instruction) -> None:
    ballot = _ballot(e, "a")
    if "ballot" in i.modifiers:
        result = ballot
    else:
        every = e.op(f"icmp eq i32 {ballot}, %lanes")
        none = e.op(f"icmp eq i32 {ballot}, 0")
        if "all" in i.modifiers:
            flag = every
        elif "any" in i.modifiers:
            flag = e.op(f"xor i1 {none}, true")
        else:
            flag = e.op(f"or i1 {every}, {none}")
        result = e.op(f"zext i1 {flag} to i32")
    _leave_result(e, "result", _splat(e, result))


_IDENTITY = {"add": 0, "or": 0, "xor": 0, "and": -1, "umin": -1, "umax": 0, "smin": 2**31 - 1, "smax": -(2**31)}


def _combine_redux(e: Emitter, i: Instruction) -> None:
    operation = next(m for m in i.modifiers if m in ("add", "min", "max", "and", "or", "xor"))
    t = types_of(i)[-1]
    if t[0] == "f":
        raise e.unsupported()
    if operation in ("min", "max"):
        operation = ("s" if t[0] == "s" else "u") + operation
    lanes = e.op("bitcast i32 %lanes to <32 x i1>")
    value = e.op(f"select <32 x i1> {lanes}, {_V} {_load(e, 'a')}, {_V} splat (i32 {_IDENTITY[operation]})")
    _leave_result(e, "result", _splat(e, e.call("i32", f"llvm.vector.reduce.{operation}.v32i32", f"{_V} {value}")))


def _combine_match(e: Emitter, i: Instruction) -> None:
    low = _load(e, "a")
    high = _load(e, "b") if types_of(i)[-1] == "b64" else None
    leaders = ["0"] * 32
    if "all" in i.modifiers:
        leader = e.call("i32", "llvm.cttz.i32", "i32 %lanes", "i1 true")
        same = _same(e, low, high, leader)
        alike = e.op(f"icmp eq i32 {e.op(f'and i32 {same}, %lanes')}, %lanes")
        _leave_result(e, "result", _splat(e, e.op(f"select i1 {alike}, i32 %lanes, i32 0")))
        _leave_result(e, "predicate", _splat(e, e.op(f"zext i1 {alike} to i32")))
        return
    result = "zeroinitializer"
    for lane in range(len(leaders)):
        same = e.op(f"and i32 {_same(e, low, high, str(lane))}, %lanes")
        result = e.op(f"insertelement {_V} {result}, i32 {same}, i32 {lane}")
    _leave_result(e, "result", result)


def _same(e: Emitter, low: str, high: str | None, lane: str) -> str:
    """Return the lanes whose value is that of `lane`."""
    bits = e.op(f"icmp eq {_V} {low}, {_splat(e, e.op(f'extractelement {_V} {low}, i32 {lane}'))}")
    if high is not None:
        more = e.op(f"icmp eq {_V} {high}, {_splat(e, e.op(f'extractelement {_V} {high}, i32 {lane}'))}")
        bits = e.op(f"and <32 x i1> {bits}, {more}")
    return e.op(f"bitcast <32 x i1> {bits} to i32")


def _combine_present(e: Emitter, i: Instruction) -> None:
    _leave_result(e, "result", _splat(e, "%lanes"))


def _combine_elect(e: Emitter, i: Instruction) -> None:
    leader = e.call("i32", "llvm.cttz.i32", "i32 %lanes", "i1 true")
    _leave_result(e, "result", _splat(e, leader))
    mine = e.op(f"icmp eq {_V} {_IOTA}, {_splat(e, leader)}")
    _leave_result(e, "predicate", e.op(f"zext <32 x i1> {mine} to {_V}"))


def _leave_match(i: Instruction) -> list[tuple[str, Operand, str]]:
    return [("mask", i.operands[-1], "b32"), ("a", i.operands[1], types_of(i)[-1])]


def _leave_barrier(i: Instruction) -> list[tuple[str, Operand, str]]:
    operands = [operand for operand in i.operands if not _is_predicate_position(i, operand)]
    if not operands:
        operands = [Immediate(0)]
    count: Operand = operands[1] if len(operands) > 1 else Immediate(0)
    return [("a", operands[0], "b32"), ("b", count, "b32")]


def _is_predicate_position(i: Instruction, operand: Operand) -> bool:
    """Whether an operand of ``bar.red`` is its destination or its predicate: first and last."""
    return "red" in i.modifiers and (operand is i.operands[0] or operand is i.operands[-1])


def _leave_reducing_barrier(i: Instruction) -> list[tuple[str, Operand, str]]:
    return [*_leave_barrier(i), ("c", i.operands[-1], "pred")]


def _combine_barrier(e: Emitter, i: Instruction) -> None:
    """_Combine a warp's predicates with those of the warps before it, in the block's accumulator ``%accumulator``."""
    ballot = _ballot(e, "c")
    count = e.call("i32", "llvm.ctpop.i32", f"i32 {ballot}")
    total = e.op("load i32, ptr %accumulator")
    if "and" in i.modifiers:  # counts the predicates that are false
        count = e.op(f"sub i32 {e.call('i32', 'llvm.ctpop.i32', 'i32 %lanes')}, {count}")
    e.emit(f"store i32 {e.op(f'add i32 {total}, {count}')}, ptr %accumulator")


def _take_barrier(e: Emitter, i: Instruction) -> None:
    pointer = e.op(f"getelementptr i8, ptr %slots, i64 {array_offset('result')}")
    total = e.op(f"load i32, ptr {pointer}, align 4, !llvm.access.group !1")
    if "popc" in i.modifiers:
        e.set(i.operands[0], total, "u32")
    else:
        e.set(i.operands[0], e.op(f"icmp {'eq' if 'and' in i.modifiers else 'ne'} i32 {total}, 0"), "pred")


def _combine_arrive(e: Emitter, i: Instruction) -> None:
    """Count the lanes at their barriers: entry n of the array "arrived" is barrier n's."""
    e.emit("call void @arrive(ptr %slots, i64 %warp, i32 %lanes)")
    races.arrive(e, e.op(f"getelementptr i8, ptr %slots, i64 {array_offset('a')}"))


def _combine_warp_sync(e: Emitter, i: Instruction) -> None:
    races.warp_sync(e, e.op(f"getelementptr i8, ptr %slots, i64 {array_offset('mask')}"))


_BARRIER = Suspension(Kind.BARRIER, _leave_barrier, _combine_nothing, _take_nothing)
_VOTE = Suspension(Kind.WARP, _mask_last(("a", 1, "pred")), _combine_vote, _take_vote)

# (opcode, modifier that picks the form, or none) -> row; the first that fits.
SUSPENSIONS: list[tuple[str, str, Suspension]] = [
    (
        "bar",
        "warp",
        Suspension(Kind.WARP, lambda i: [("mask", i.operands[0], "b32")], _combine_warp_sync, _take_nothing),
    ),
    ("bar", "red", Suspension(Kind.BARRIER_REDUCE, _leave_reducing_barrier, _combine_barrier, _take_barrier)),
    ("barrier", "red", Suspension(Kind.BARRIER_REDUCE, _leave_reducing_barrier, _combine_barrier, _take_barrier)),
    ("bar", "sync", _BARRIER),
    ("barrier", "sync", _BARRIER),
    ("barrier", "wait", _BARRIER),  # of a cluster, which is one block
    ("bar", "arrive", Suspension(Kind.ARRIVE, _leave_barrier, _combine_arrive, _take_nothing)),
    ("barrier", "arrive", Suspension(Kind.ARRIVE, _leave_barrier, _combine_arrive, _take_nothing)),
    ("step", "", Suspension(Kind.PRESENT, lambda i: [], _combine_nothing, _take_nothing)),
    ("yield", "", Suspension(Kind.YIELD, lambda i: [], _combine_nothing, _take_nothing)),
    (
        "shfl",
        "sync",
        Suspension(Kind.WARP, _leave_shuffle, _combine_shuffle, _take_value),
    ),
    ("vote", "sync", _VOTE),
    ("vote", "", Suspension(Kind.PRESENT, lambda i: [("a", i.operands[1], "pred")], _combine_vote, _take_vote)),
    ("match", "sync", Suspension(Kind.WARP, _leave_match, _combine_match, _take_value)),
    ("redux", "sync", Suspension(Kind.WARP, _mask_last(("a", 1, "b32")), _combine_redux, _take_value)),
    ("elect", "sync", Suspension(Kind.WARP, _mask_last(), _combine_elect, _take_value)),
    ("activemask", "b32", Suspension(Kind.PRESENT, lambda i: [], _combine_present, _take_value)),
]


def suspension_of(instruction: Instruction) -> Suspension | None:
    """Return the row of an instruction at which a thread waits, else None."""
    if "cluster" in instruction.modifiers and "arrive" in instruction.modifiers:
        return None  # waiting is what counts: the cluster's only block waits as a whole
    for opcode, modifier, row in SUSPENSIONS:
        if instruction.opcode == opcode and modifier in ("", *instruction.modifiers) and row.fits(instruction):
            return row
    return None
