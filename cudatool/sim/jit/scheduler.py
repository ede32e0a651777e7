"""The scheduler, as LLVM IR: how the threads of a block take turns.

As long as all threads wait at the same suspension, ``block`` (:mod:`.grid`) does it for the whole block and runs the
next region for all threads. When they do not, :mod:`.divergence` takes over.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from cudatool.sim.jit.bounds import Bound
from cudatool.sim.jit.collective import Kind, array_offset
from cudatool.sim.jit.context import Context
from cudatool.sim.jit.emit import ENVIRONMENT

__all__ = [
    "AGREED",
    "Cell",
    "DIVERGED",
    "ONE_BARRIER",
    "Regular",
    "PARKED",
    "PASSED",
    "PRELUDE",
    "UNPEELED",
    "VALUES",
    "all_threads",
    "field",
    "first_values",
    "parameters",
    "stop",
    "whole_block",
]

PARKED = -3  # the threads of the block wait for other blocks
DIVERGED = -2  # in the place of a region number: threads do not agree on one
VALUES = ENVIRONMENT  # as a call passes it on: the names are those of the parameters

UNPEELED = f"!{(1 << 20) - 1}"
"""Of a loop over threads: none of its rounds is peeled. Rows are whole vectors of threads; one less leaves a rest."""

PRELUDE = """
declare i32 @llvm.cttz.i32(i32, i1)
declare void @llvm.memset.p0.i64(ptr, i8, i64, i1)
declare i32 @llvm.ctpop.i32(i32)
declare i32 @llvm.umax.i32(i32, i32)
declare i32 @llvm.umin.i32(i32, i32)
declare i64 @llvm.umin.i64(i64, i64)
declare { i32, i1 } @llvm.sadd.with.overflow.i32(i32, i32)
declare { i64, i1 } @llvm.sadd.with.overflow.i64(i64, i64)
declare i32 @llvm.vector.reduce.umin.v32i32(<32 x i32>)
declare i32 @llvm.vector.reduce.and.v32i32(<32 x i32>)
declare void @llvm.masked.store.v32i32.p0(<32 x i32>, ptr, i32, <32 x i1>)
declare <32 x i32> @llvm.masked.gather.v32i32.v32p0(<32 x ptr>, i32, <32 x i1>, <32 x i32>)

define internal i16 @bf16_round(float %x) alwaysinline {
  %bits = bitcast float %x to i32
  %high = lshr i32 %bits, 16
  %odd = and i32 %high, 1
  %bias = add i32 %odd, 32767
  %sum = add i32 %bits, %bias
  %rounded = lshr i32 %sum, 16
  %nan = fcmp uno float %x, 0.0
  %result = select i1 %nan, i32 32767, i32 %rounded
  %short = trunc i32 %result to i16
  ret i16 %short
}

!0 = !{}
!1 = distinct !{}
!2 = !{i32 1, i32 1025}
!5 = !{!"llvm.loop.unroll.runtime.disable"}
!6 = !{!"llvm.loop.parallel_accesses", !1}
!7 = !{!"llvm.loop.unroll.disable"}
!8 = !{!"llvm.loop.vectorize.followup_vectorized", !5}
!9 = distinct !{!9, !7}
attributes #0 = { null_pointer_is_valid nounwind "no-trapping-math"="true" }
attributes #1 = { alwaysinline }
attributes #2 = { noinline }
"""
PRELUDE += f'{UNPEELED} = !{{!"llvm.loop.peeled.count", i32 1000}}\n'


def stop() -> str:
    """Return ``stop``, which notes why a launch ends and where. The first to come is the one that is reported."""
    names = ("site", "at_x", "at_y", "at_z", "at_thread")
    stores = "\n".join(
        f"  %{name}.p = getelementptr i8, ptr %context, i64 {getattr(Context, name).offset}\n"
        f"  store i32 %{name}, ptr %{name}.p"
        for name in names
    )
    return f"""
define internal void @stop(ptr %context, i32 %why, {", ".join(f"i32 %{name}" for name in names)}) noinline {{
{field("status", "status", volatile=True)}
  %again = icmp ne i32 %status, 0
  br i1 %again, label %end, label %first
first:
  store volatile i32 %why, ptr %status.p
{stores}
  br label %end
end:
  ret void
}}
"""


def field(name: str, result: str, *, volatile: bool = False, kind: str = "") -> str:
    """Return code that loads a field of the context into ``%result``."""
    member = getattr(Context, name)
    kind = kind or f"i{8 * member.size}"
    limits = ", !range !2" if name in ("block_x", "block_y", "block_z", "threads") else ""
    invariant = "" if volatile else f", !invariant.load !0{limits}"
    return (
        f"  %{result}.p = getelementptr i8, ptr %context, i64 {member.offset}\n"
        f"  %{result} = load {'volatile ' if volatile else ''}{kind}, ptr %{result}.p{invariant}"
    )


# Notes which suspension a thread has come to.
_KEEP = """  %{of}slot = zext i32 %{of}t to i64
  %{of}mine = getelementptr i32, ptr %slots, i64 %{of}slot
  store i32 %{of}next, ptr %{of}mine, align 4, !llvm.access.group !1
"""
_OF_ROWS = 1 << 20  # added to the number of a loop's metadata, for one of another form
_OF_EDGES = 2 << 20


class Regular(NamedTuple):
    """Slots that may hold what the first of a row holds and a multiple of their place in it.

    Attributes
    ----------
    kind
        Their type.
    offset
        Where they begin.
    distance
        From one to the next.
    is_known
        Whether they do hold that.
    """

    kind: str
    offset: int
    distance: int
    is_known: bool


class Cell(NamedTuple):
    """Where a register that all threads of a block have alike lies between regions (:mod:`.uniform`).

    Attributes
    ----------
    kind
        Its type.
    offset
        Where it lies, from the beginning of the slots.
    """

    kind: str
    offset: int

    @property
    def value(self) -> str:
        """What it holds when a region begins."""
        return f"%uniform.{self.offset}"

    def load(self) -> str:
        """Return code that loads :attr:`value`."""
        stored, narrow = (".stored", f"\n  {self.value} = trunc i8 {self.value}.stored to i1")
        if self.kind != "i1":
            stored = narrow = ""
        return (
            f"  {self.value}.p = getelementptr i8, ptr %slots, i64 {self.offset}\n"
            f"  {self.value}{stored} = load {'i8' if self.kind == 'i1' else self.kind}, ptr {self.value}.p{narrow}"
        )


def parameters(cells: Iterable[Cell]) -> str:
    """Return what a function that is given `cells` has as further parameters; they are passed on under their names."""
    return "".join(f", {cell.kind} {cell.value}" for cell in cells)


def first_values(regular: Iterable[Regular]) -> list[str]:
    """Return what the first thread of a row has in its slots, as arguments."""
    return [f"{one.kind} %first.{one.offset}" for one in regular]


def _look(regular: Sequence[Regular]) -> str:
    """Return code that asks of a row of threads: are all slots `regular`, and none beyond what its type holds?

    It looks at those of which the former is not known.
    """
    before, each = "", ""
    good, sound = "%look.good", "true"
    for kind, at, distance, is_known in regular:
        before += f"""
  %slots.{at} = getelementptr i8, ptr %slots, i64 {at}
  %first.{at}.p = getelementptr {kind}, ptr %slots.{at}, i64 %first.x
  %first.{at} = load {kind}, ptr %first.{at}.p
  %reach.{at} = mul {kind} {"%nx" if kind == "i32" else "%nx.x"}, {distance}
  %end.{at} = call {{ {kind}, i1 }} @llvm.sadd.with.overflow.{kind}({kind} %first.{at}, {kind} %reach.{at})
  %beyond.{at} = extractvalue {{ {kind}, i1 }} %end.{at}, 1
  %within.{at} = xor i1 %beyond.{at}, true
  %sound.{at} = and i1 {sound}, %within.{at}"""
        sound = f"%sound.{at}"
        if is_known:
            continue
        each += f"""
  %look.{at}.p = getelementptr {kind}, ptr %slots.{at}, i64 %look.t
  %look.{at} = load {kind}, ptr %look.{at}.p
  %by.{at} = mul {kind} {"%look" if kind == "i32" else "%look.x"}, {distance}
  %wanted.{at} = add {kind} %first.{at}, %by.{at}
  %same.{at} = icmp eq {kind} %look.{at}, %wanted.{at}
  %good.{at} = and i1 {good}, %same.{at}"""
        good = f"%good.{at}"
    firsts = f"""  %first.x = zext i32 %first to i64
  %nx.x = zext i32 %nx to i64{before}
"""
    if not each:
        return f"""{firsts}  br label %choose
choose:
  br i1 {sound}, label %row.x, label %x"""
    return f"""{firsts}  br label %looking
looking:
  %look = phi i32 [ 0, %y ], [ %look.next, %looking ]
  %look.good = phi i1 [ {sound}, %y ], [ {good}, %looking ]
  %look.x = zext i32 %look to i64
  %look.t = add nuw nsw i64 %first.x, %look.x{each}
  %look.next = add nuw nsw i32 %look, 1
  %looked = icmp eq i32 %look.next, %nx
  br i1 %looked, label %choose, label %looking
choose:
  br i1 {good}, label %row.x, label %x"""


def _row(number: int, regular: Sequence[Regular], given: str, loop: int, *, keep: str) -> str:
    """Return the loop over a row of threads whose slots are `regular`; `keep` notes where each has come to."""
    values = ", ".join([VALUES, "i32 %row.tx, i32 %ty, i32 %tz, i32 %row.t", *first_values(regular)]) + given
    return f"""row.x:
  %row.tx = phi i32 [ 0, %choose ], [ %row.tx.next, %row.x ]
  %row.t = add nuw nsw i32 %first, %row.tx
  %row.next = call i32 @regular_{number}({values}) #1
{keep}  %row.tx.next = add nuw nsw i32 %row.tx, 1
  %row.x.done = icmp eq i32 %row.tx.next, %nx
  br i1 %row.x.done, label %y.end, label %row.x, !llvm.loop !{_OF_ROWS + loop}
"""


def _of_rows(loop: int, properties: str) -> str:
    """Return the metadata of the other form of a `loop` over a row of threads."""
    return f"!{_OF_ROWS + loop} = distinct !{{!{_OF_ROWS + loop}, {properties}}}\n"


# As many threads of a row as run the region together, and again; then the rest of it, each by itself.
_TOGETHER = """  br label %wide
wide:
  %wide.x = phi i32 [ 0, %y ], [ %wide.next, %wide.run ]
  %wide.next = add nuw nsw i32 %wide.x, {width}
  %wide.fits = icmp ule i32 %wide.next, {count}
  br i1 %wide.fits, label %wide.run, label %narrow
wide.run:
  %wide.t = add nuw nsw i32 %first, %wide.x
  call void @together_{number}({values}, i32 %wide.x, i32 %ty, i32 %tz, i32 %wide.t{given})
  br label %wide
narrow:
  %narrow.some = icmp ult i32 %wide.x, {count}
  br i1 %narrow.some, label %x, label %y.end"""


# All of a row runs the region together, or in stretches.
_BY_ROW = """  %some.x = icmp ne i32 {count}, 0
  br i1 %some.x, label %together, label %none.x
none.x:
  br i1 true, label %y.end, label %x
together:
  call void @{rows}_{number}({values}, i32 0, i32 %ty, i32 %tz, i32 %first, i32 {count}{given})
  br label %y.end"""


# Of rows that have fewer threads than those that do anything, each by itself: LLVM knows how many the others have.
_FEW = """few:
  %few.tx = phi i32 [ {begin}, %{after} ], [ %few.next, %few ]
  %few.t = add nuw nsw i32 %first, %few.tx
  %few.at = call i32 @thread_{number}({values}, i32 %few.tx, i32 %ty, i32 %tz, i32 %few.t{given}) #2
  %few.next = add nuw nsw i32 %few.tx, 1
  %few.done = icmp eq i32 %few.next, %nx
  br i1 %few.done, label %y.end, label %few
"""


# A row with a loop of its own, in which LLVM knows its place in y.
_EDGE = """  %edge{at} = icmp eq i32 %ty, {at}
  br i1 %edge{at}, label %x{at}, label %not{at}
x{at}:
  %x{at}.tx = phi i32 [ 0, %{after} ], [ %x{at}.tx.next, %x{at} ]
  %x{at}.t = add nuw nsw i32 %first, %x{at}.tx
  %x{at}.next = call i32 @thread_{number}({values}, i32 %x{at}.tx, i32 {at}, i32 %tz, i32 %x{at}.t{given}) #1
{keep}  %x{at}.tx.next = add nuw nsw i32 %x{at}.tx, 1
  %x{at}.done = icmp eq i32 %x{at}.tx.next, %nx
  br i1 %x{at}.done, label %y.end, label %x{at}, !llvm.loop !{loop}
not{at}:
"""
# The others are none of these. LLVM makes a switch of the comparisons, which tells it nothing of them. It is said in a
# function: what is known where it stands would be dropped before the code of a thread, which needs it, is inlined.
_INSIDE = "  call void @inside_{number}(i32 %ty) #1\n"
_IS_INSIDE = """
declare void @llvm.assume(i1)
define internal void @inside_{number}(i32 %ty) {{
{assumed}  ret void
}}
"""
_NOT_AT = "  %not{at} = icmp ne i32 %ty, {at}\n  call void @llvm.assume(i1 %not{at})\n"


def _edges(
    number: int, edges: Sequence[int], after: str, given: str, properties: str, *, notes: bool
) -> tuple[str, str, str]:
    """Return the loops over rows at `edges`, what they need outside of functions, and where other rows come from."""
    if not edges:
        return "", "", after
    code = outside = ""
    for i, at in enumerate(edges):
        loop = _OF_EDGES * (1 + i) + 10 + 2 * number
        keep = _KEEP.format(of=f"x{at}.") if notes else ""
        code += _EDGE.format(at=at, after=after, number=number, values=VALUES, given=given, keep=keep, loop=loop)
        outside += f"!{loop} = distinct !{{!{loop}, {properties}}}\n"
        after = f"not{at}"
    assumed = "".join(_NOT_AT.format(at=at) for at in edges)
    outside += _IS_INSIDE.format(number=number, assumed=assumed)
    return code + _INSIDE.format(number=number), outside, after


# Rows of which a number of threads do something that is known when the region begins. Vectors full of these do not ask.
# One more vector asks each of its threads, if the row has room for it.
_WHOLE = """  %full = and i32 %most, -16
  %tail.end = add nuw nsw i32 %full, 16
  %some.full = icmp ne i32 %full, 0
  %some.rest = icmp ne i32 %full, %most
  %fits = icmp ule i32 %tail.end, %nx"""
_BUSY = """  br i1 %some.full, label %busy, label %rest
busy:
  %busy.tx = phi i32 [ 0, %y ], [ %busy.next, %busy ]
  %busy.t = add nuw nsw i32 %first, %busy.tx
  %busy.at = call i32 @busy_{number}({values}, i32 %busy.tx, i32 %ty, i32 %tz, i32 %busy.t{given}) #1
  %busy.next = add nuw nsw i32 %busy.tx, 1
  %busy.done = icmp eq i32 %busy.next, %full
  br i1 %busy.done, label %rest, label %busy, !llvm.loop !{loop}
rest:
  br i1 %some.rest, label %tail, label %y.end
tail:
  br i1 %fits, label %x, label %few"""


# A row and the one after it (:mod:`cudatool.sim.jit.row_pairs`), if there is one.
_PAIR = """  %ty.other = add nuw nsw i32 %ty, 1
  %is.pair = icmp ult i32 %ty.other, %ny
  %rows = select i1 %is.pair, i32 2, i32 1
  br i1 %is.pair, label %pair, label %x
pair:
  %pair.tx = phi i32 [ 0, %y ], [ %pair.next, %pair ]
  %pair.t = add nuw nsw i32 %first, %pair.tx
  %pair.at = call i32 @pair_{number}({values}, i32 %pair.tx, i32 %ty, i32 %tz, i32 %pair.t, i32 %nx{given}) #1
  %pair.next = add nuw nsw i32 %pair.tx, 1
  %pair.done = icmp eq i32 %pair.next, %nx
  br i1 %pair.done, label %y.end, label %pair, !llvm.loop !{loop}"""


# Of each row, the threads of this part. A loop over them without a condition inside can be vectorized.
_FIRST_PART = f"""
{field("first_thread", "rotation")}
  %rotation.t = trunc i64 %rotation to i32
  br label %part
part:
  %second = phi i1 [ false, %entry ], [ true, %part.end ]
  %low = select i1 %second, i32 0, i32 %rotation.t
  %high = select i1 %second, i32 %rotation.t, i32 -1"""
_OF_PART = """
  %after.row = add nuw nsw i32 %first, %nx
  %from = call i32 @llvm.umax.i32(i32 %first, i32 %low)
  %to = call i32 @llvm.umin.i32(i32 %after.row, i32 %high)
  %x.first = sub i32 %from, %first
  %x.last = sub i32 %to, %first
  %some = icmp ult i32 %from, %to"""
_NEXT_PART = """
  br label %part.end
part.end:
  %more = icmp ne i32 %rotation.t, 0
  %first.only = xor i1 %second, true
  %again = and i1 %more, %first.only
  br i1 %again, label %part, label %whole
whole:"""


def _count(number: int, bound: Bound, given: str, *, is_clamped: bool) -> str:
    """Return code for how many threads of a row do anything, to whole vectors unless it `is_clamped` to the row."""
    if bound.register is not None:
        most = f"\n  %most = call i32 @most_{number}({VALUES}{given}, i32 %nx)"
        return most if is_clamped else f"{most}\n{_WHOLE}"
    return f"\n  %most = call i32 @llvm.umin.i32(i32 %nx, i32 {bound.number})" if is_clamped else ""


def all_threads(
    number: int,
    only: int | None,
    *,
    rotated: bool,
    apart: bool,
    regular: Sequence[Regular] = (),
    together: int = 0,
    rows: str = "",
    bound: Bound | None = None,
    cells: Sequence[Cell] = (),
    ahead: bool = False,
    edges: Sequence[int] = (),
    pairs: bool = False,
) -> str:
    """Return ``all_<number>``: the region for every thread of the block, a function of its own if `apart`.

    `only` is the suspension that all threads reach, if there is just one. If `rotated`, the threads from
    ``first_thread`` on come before the others: what a kernel does may depend on which warp is first. Rows of threads
    whose slots are `regular` run it in that form (:mod:`cudatool.sim.jit.neighbors`). As many threads as `together`
    says have a form of their own (:mod:`cudatool.sim.jit.together`), or all of a row, in the function that `rows` names
    (:mod:`cudatool.sim.jit.rows`, :mod:`cudatool.sim.jit.stretches`).
    Of each row only so many threads as `bound` says do anything. Threads are given the values of `cells`; an `ahead`
    function, if there is one, says where they come to (:mod:`cudatool.sim.jit.uniform`). The rows at `edges` have loops
    of their own (:mod:`cudatool.sim.jit.edges`). Or rows go through the region in `pairs`.
    """
    given = parameters(cells)
    loads = "".join(f"\n{cell.load()}" for cell in cells)
    keep = after = ""
    begin, bounds, x_begin, x_end, first_part, next_part = "entry", "", "0", "%nx", "", ""
    enter = "  br label %x"
    notes = only is None and not ahead
    if ahead:
        after = f"  %agreed = call i32 @ahead_{number}({VALUES}{given})\n"
    elif notes:
        keep = _KEEP.format(of="")
        after = "  %agreed = call i32 @agreed(ptr %context, ptr %slots)\n"
    if rotated:
        begin, x_begin, x_end = "part", "%x.first", "%x.last"
        enter = "  br i1 %some, label %x, label %y.end"
        first_part, bounds, next_part = _FIRST_PART, _OF_PART, _NEXT_PART
    row, few, unroll, x_from, loop = "", "", "!5", "y", 10 + 2 * number
    if bound is not None:
        loads += _count(number, bound, given, is_clamped=bool(together or rows))
        if together or rows:
            x_end = "%most"
        elif bound.register is not None:
            x_from, x_begin, x_end = "tail", "%full", "%tail.end"
            enter = _BUSY.format(number=number, values=VALUES, given=given, loop=_OF_ROWS + loop)
        else:
            bounds, x_end = f"\n  %most = icmp uge i32 %nx, {bound.number}", str(bound.number)
            enter = "  br i1 %most, label %x, label %few"
        if not (together or rows):
            few = _FEW.format(number=number, values=VALUES, given=given, after=x_from, begin=x_begin)
            unroll = "!7, !8"  # not before it is a loop of vectors
    if regular:
        x_from, enter = "choose", _look(regular)
        row = _row(number, regular, given, loop, keep=_KEEP.format(of="row.") if notes else "")
    if pairs:
        enter = _PAIR.format(number=number, values=VALUES, given=given, loop=_OF_ROWS + loop)
    elif rows:
        x_from = "none.x"
        enter = _BY_ROW.format(rows=rows, number=number, values=VALUES, given=given, count=x_end)
    elif together:
        x_from, x_begin = "narrow", "%wide.x"
        enter = _TOGETHER.format(width=together, number=number, values=VALUES, given=given, count=x_end)
    properties = f"!{loop + 1}, {unroll}, {UNPEELED}"
    of_edges, of_loops, x_from = _edges(number, edges, x_from, given, properties, notes=notes)
    return f"""
define internal i32 @all_{number}({ENVIRONMENT}) {"noinline " if apart else ""}#0 {{
entry:
{field("block_x", "nx")}
{field("block_y", "ny")}
{field("block_z", "nz")}{loads}{first_part}
  br label %z
z:
  %tz = phi i32 [ 0, %{begin} ], [ %tz.next, %z.end ]
  br label %y
y:
  %ty = phi i32 [ 0, %z ], [ %ty.next, %y.end ]
  %row = mul nuw nsw i32 %tz, %ny
  %column = add nuw nsw i32 %row, %ty
  %first = mul nuw nsw i32 %column, %nx{bounds}
{of_edges}{enter}
{row}{few}x:
  %tx = phi i32 [ {x_begin}, %{x_from} ], [ %tx.next, %x ]
  %t = add nuw nsw i32 %first, %tx
  %next = call i32 @thread_{number}({VALUES}, i32 %tx, i32 %ty, i32 %tz, i32 %t{given}) {"#2" if regular else "#1"}
{keep}  %tx.next = add nuw nsw i32 %tx, 1
  %x.done = icmp eq i32 %tx.next, {x_end}
  br i1 %x.done, label %y.end, label %x, !llvm.loop !{loop}
y.end:
  %ty.next = add nuw nsw i32 %ty, {"%rows" if pairs else "1"}
  %y.done = icmp eq i32 %ty.next, %ny
  br i1 %y.done, label %z.end, label %y, !llvm.loop !9
z.end:
  %tz.next = add nuw nsw i32 %tz, 1
  %z.done = icmp eq i32 %tz.next, %nz
  br i1 %z.done, label %end, label %z, !llvm.loop !9
end:{next_part}
{after}  ret i32 {"%agreed" if after else only}
}}
!{loop} = distinct !{{!{loop}, {properties}}}
!{loop + 1} = !{{!"llvm.loop.parallel_accesses", !1}}
{_of_rows(loop, properties) if regular or pairs or x_from == "tail" else ""}{of_loops}"""


AGREED = f"""
define internal i32 @agreed(ptr %context, ptr %slots) #0 {{
entry:
{field("threads", "n")}
  %first = load i32, ptr %slots, align 4
  %count = zext i32 %n to i64
  br label %loop
loop:
  %t = phi i64 [ 0, %entry ], [ %t.next, %loop ]
  %differs = phi i32 [ 0, %entry ], [ %differs.next, %loop ]
  %p = getelementptr i32, ptr %slots, i64 %t
  %s = load i32, ptr %p, align 4
  %d = xor i32 %s, %first
  %differs.next = or i32 %differs, %d
  %t.next = add nuw nsw i64 %t, 1
  %done = icmp eq i64 %t.next, %count
  br i1 %done, label %end, label %loop
end:
  %same = icmp eq i32 %differs.next, 0
  %r = select i1 %same, i32 %first, i32 {DIVERGED}
  ret i32 %r
}}
"""


PASSED = f"""
define internal i1 @passed(ptr %slots, i32 %t) {{
  %index = zext i32 %t to i64
  %low.a = getelementptr i8, ptr %slots, i64 {array_offset("a")}
  %low.p = getelementptr i32, ptr %low.a, i64 %index
  %low = load i32, ptr %low.p, align 4
  %high.a = getelementptr i8, ptr %slots, i64 {array_offset("b")}
  %high.p = getelementptr i32, ptr %high.a, i64 %index
  %high = load i32, ptr %high.p, align 4
  %wanted.a = getelementptr i8, ptr %slots, i64 {array_offset("c")}
  %wanted.p = getelementptr i32, ptr %wanted.a, i64 %index
  %wanted = load i32, ptr %wanted.p, align 4
  %low.x = zext i32 %low to i64
  %high.x = zext i32 %high to i64
  %high.s = shl i64 %high.x, 32
  %address = or i64 %low.x, %high.s
  %pointer = inttoptr i64 %address to ptr
  %word = load volatile i64, ptr %pointer
  %phase = lshr i64 %word, 63
  %phase.i = trunc i64 %phase to i32
  %parity = and i32 %wanted, 1
  %result = icmp ne i32 %phase.i, %parity
  ret i1 %result
}}
"""


# Whether all threads of the block are at the same barrier, and it waits for all of them.
ONE_BARRIER = f"""
define internal i1 @one_barrier(ptr %context, ptr %slots) #0 {{
entry:
{field("threads", "n")}
  %count = zext i32 %n to i64
  %up = add i32 %n, 31
  %every = and i32 %up, -32
  %numbers = getelementptr i8, ptr %slots, i64 {array_offset("a")}
  %counts = getelementptr i8, ptr %slots, i64 {array_offset("b")}
  %first = load i32, ptr %numbers, align 4
  br label %loop
loop:
  %t = phi i64 [ 0, %entry ], [ %t.next, %loop ]
  %bad = phi i1 [ false, %entry ], [ %bad.next, %loop ]
  %a.p = getelementptr i32, ptr %numbers, i64 %t
  %a = load i32, ptr %a.p, align 4
  %b.p = getelementptr i32, ptr %counts, i64 %t
  %b = load i32, ptr %b.p, align 4
  %other = icmp ne i32 %a, %first
  %some = icmp ne i32 %b, 0
  %part = icmp ne i32 %b, %every
  %partial = and i1 %some, %part
  %bad.a = or i1 %bad, %other
  %bad.next = or i1 %bad.a, %partial
  %t.next = add nuw nsw i64 %t, 1
  %done = icmp eq i64 %t.next, %count
  br i1 %done, label %end, label %loop
end:
  %good = xor i1 %bad.next, true
  ret i1 %good
}}
"""


# Goes on to the collective if the masks of a warp cover its lanes.
_CHECK_MASKS = f"""
  %masks.p = getelementptr i8, ptr %slots, i64 {array_offset("mask")}
  %first = shl i64 %warp, 7
  %masks.w = getelementptr i8, ptr %masks.p, i64 %first
  %masks = load <32 x i32>, ptr %masks.w, align 4
  %lanes.v = bitcast i32 %lanes to <32 x i1>
  %masks.l = select <32 x i1> %lanes.v, <32 x i32> %masks, <32 x i32> splat (i32 -1)
  %common = call i32 @llvm.vector.reduce.and.v32i32(<32 x i32> %masks.l)
  %covered = and i32 %common, %lanes
  %whole = icmp eq i32 %covered, %lanes
  br i1 %whole, label %combine, label %split"""
# Marks every thread as waiting at suspension `number`.
_SUSPEND_ALL = """
split:
  %t = phi i64 [ 0, %body ], [ %t.next, %split ]
  %mine = getelementptr i32, ptr %slots, i64 %t
  store i32 {number}, ptr %mine, align 4
  %t.next = add nuw nsw i64 %t, 1
  %filled = icmp eq i64 %t.next, %count
  br i1 %filled, label %no, label %split
no:
  ret i1 false"""
_STORE_TOTAL = f"""
  %result.p = getelementptr i8, ptr %slots, i64 {array_offset("result")}
  %total = load i32, ptr %accumulator
  store i32 %total, ptr %result.p, align 4"""


def whole_block(number: int, kind: int, *, check_masks: bool, apart: bool, counted: bool) -> str:
    """Return ``warps_<number>``: the collective for all warps; false if `apart`, masks split a warp or threads wait.

    In that case every thread is marked as waiting there, for ``divergent`` to sort out. So it is if a barrier is
    `counted` and does not wait for all threads.
    """
    if counted and not apart:
        return _counted(number, kind)
    if apart:
        return _all_suspended(number)
    if kind == Kind.BARRIER:
        return f"\ndefine internal i1 @warps_{number}({ENVIRONMENT}) alwaysinline #0 {{\n  ret i1 true\n}}\n"
    if kind == Kind.WAIT:
        return _all_passed(number)
    check = _CHECK_MASKS if check_masks else "\n  br label %combine"
    fill = _SUSPEND_ALL.format(number=number) if check_masks else ""
    body = _STORE_TOTAL if kind == Kind.BARRIER_REDUCE else ""
    return f"""
define internal i1 @warps_{number}({ENVIRONMENT}) alwaysinline #0 {{
entry:
  %accumulator = alloca i32
  store i32 0, ptr %accumulator
{field("threads", "n")}
  %count = zext i32 %n to i64
  br label %body
body:
  %warp = phi i64 [ 0, %entry ], [ %warp.next, %combine ]
  %before = shl i64 %warp, 5
  %left = sub i64 %count, %before
  %full = icmp uge i64 %left, 32
  %left.s = and i64 %left, 31
  %left.i = trunc i64 %left.s to i32
  %bit = shl i32 1, %left.i
  %some = sub i32 %bit, 1
  %lanes = select i1 %full, i32 -1, i32 %some{check}
combine:
  call void @combine_{number}({VALUES}, i64 %warp, i32 %lanes, ptr %accumulator) #1
  %warp.next = add nuw nsw i64 %warp, 1
  %reached = shl i64 %warp.next, 5
  %more = icmp ult i64 %reached, %count
  br i1 %more, label %body, label %end
end:{body}
  ret i1 true{fill}
}}
"""


def _counted(number: int, kind: int) -> str:
    """Return the ``warps_<number>`` of a barrier that may be for a part of the block."""
    whole = whole_block(number, kind, check_masks=False, apart=False, counted=False)
    return f"""{whole.replace(f"@warps_{number}(", f"@whole_{number}(")}
{_all_suspended(number).replace(f"@warps_{number}(", f"@apart_{number}(")}
define internal i1 @warps_{number}({ENVIRONMENT}) alwaysinline #0 {{
  %one = call i1 @one_barrier(ptr %context, ptr %slots)
  br i1 %one, label %whole, label %apart
whole:
  %result = call i1 @whole_{number}({VALUES})
  ret i1 %result
apart:
  %none = call i1 @apart_{number}({VALUES})
  ret i1 %none
}}
"""


def _all_suspended(number: int) -> str:
    """Return the ``warps_<number>`` that marks every thread as waiting there."""
    return f"""
define internal i1 @warps_{number}({ENVIRONMENT}) alwaysinline #0 {{
entry:
{field("threads", "n")}
  br label %split
split:
  %t = phi i32 [ 0, %entry ], [ %t.next, %split ]
  %mine = getelementptr i32, ptr %slots, i32 %t
  store i32 {number}, ptr %mine, align 4
  %t.next = add nuw nsw i32 %t, 1
  %filled = icmp eq i32 %t.next, %n
  br i1 %filled, label %no, label %split
no:
  ret i1 false
}}
"""


def _all_passed(number: int) -> str:
    """Return the ``warps_<number>`` of a wait: whether every thread may go on."""
    return f"""
define internal i1 @warps_{number}({ENVIRONMENT}) alwaysinline #0 {{
entry:
{field("threads", "n")}
  br label %look
look:
  %t = phi i32 [ 0, %entry ], [ %t.next, %look ]
  %every = phi i1 [ true, %entry ], [ %every.next, %look ]
  %ready = call i1 @passed(ptr %slots, i32 %t)
  %every.next = and i1 %every, %ready
  %t.x = zext i32 %t to i64
  %mine = getelementptr i32, ptr %slots, i64 %t.x
  store i32 {number}, ptr %mine, align 4
  %t.next = add i32 %t, 1
  %done = icmp eq i32 %t.next, %n
  br i1 %done, label %end, label %look
end:
  ret i1 %every.next
}}
"""
