"""The loops over the threads of a block, as LLVM IR: ``all_<number>``, which runs a region for each of them.

Threads run in rows, those beside each other in x: LLVM makes vectors of them. Every ``all_<number>`` is the same nest
of loops::

    for tz:
        for ty:
            <code of the row's way>
            for tx in the threads that are left:
                thread_<number>(...)

What differs is the way in which a row is run. For each there is a function that returns its :class:`Row`:
:func:`each_thread`, or another if the region lets its threads do the same at the same time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from cudatool.sim.jit.bounds import Bound
from cudatool.sim.jit.emit import ENVIRONMENT
from cudatool.sim.jit.scheduler import UNPEELED, VALUES, Cell, Regular, field, first_values, parameters

__all__ = [
    "Row",
    "ThreadLoop",
    "all_threads",
    "asked_row",
    "bounded_row",
    "each_thread",
    "in_parts",
    "in_vectors",
    "pair_of_rows",
    "regular_row",
    "whole_row",
]

# Numbers of metadata, for loops over a row beside the last one of the region.
_OF_ROWS = 1 << 20
_OF_EDGES = 2 << 20


@dataclass(frozen=True, slots=True)
class ThreadLoop:
    """What an ``all_<number>`` is for.

    Attributes
    ----------
    number
        The region's.
    only
        The suspension that all threads reach, if there is just one.
    cells
        Whose values the threads are given.
    ahead
        Whether ``ahead_<number>`` says which suspension they reach (:mod:`cudatool.sim.jit.uniform`).
    """

    number: int
    only: int | None
    cells: Sequence[Cell]
    ahead: bool

    @property
    def given(self) -> str:
        """What follows the other arguments of a function that runs threads."""
        return parameters(self.cells)

    @property
    def notes(self) -> bool:
        """Whether each thread notes which suspension it has come to."""
        return self.only is None and not self.ahead

    @property
    def metadata(self) -> int:
        """Number of the metadata of the loop over a row."""
        return 10 + 2 * self.number


@dataclass(frozen=True, slots=True)
class Row:
    """How a row of threads is run: the parts of the text that depend on it.

    Attributes
    ----------
    enter
        Code at the beginning of a row; it branches to ``x``, the loop over its threads, or past it to ``y.end``.
    source, first, end
        Of the loop ``x``: the block that it is entered from, the first thread, and the one after the last.
    on_entry
        Code at the beginning of the function.
    bounds
        Code before `enter`.
    others
        The blocks that `enter` branches to, if they come before ``x``.
    properties
        Of the loop ``x``.
    again
        Whether another loop of the row has metadata of its own.
    attributes
        Of the call in ``x``: whether the region is inlined there (``#1``) or not (``#2``).
    is_part
        Whether `bounds` has the threads of one part of the block (:func:`in_parts`).
    step
        Rows that it is for.
    outside
        What it needs outside of functions.
    """

    enter: str = "  br label %x"
    source: str = "y"
    first: str = "0"
    end: str = "%nx"
    on_entry: str = ""
    bounds: str = ""
    others: str = ""
    properties: str = "!5"
    again: bool = False
    attributes: str = "#1"
    is_part: bool = False
    step: str = "1"
    outside: str = ""


# Notes which suspension a thread has come to.
_KEEP = """  %{of}slot = zext i32 %{of}t to i64
  %{of}mine = getelementptr i32, ptr %slots, i64 %{of}slot
  store i32 %{of}next, ptr %{of}mine, align 4, !llvm.access.group !1
"""


def _kept(loop: ThreadLoop, of: str = "") -> str:
    return _KEEP.format(of=of) if loop.notes else ""


def _properties(loop: ThreadLoop, properties: str) -> str:
    """Return all properties of a loop over a row, as the elements of its metadata."""
    return f"!{loop.metadata + 1}, {properties}, {UNPEELED}"


# ---- each thread by itself ----

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


def each_thread(loop: ThreadLoop, edges: Sequence[int] = ()) -> Row:
    """Return rows of threads that run by themselves; those at `edges` have loops of their own (:mod:`.edges`)."""
    row = Row()
    if not edges:
        return row
    code, outside, after = "", "", row.source
    for i, at in enumerate(edges):
        number = _OF_EDGES * (1 + i) + loop.metadata
        keep = _kept(loop, f"x{at}.")
        code += _EDGE.format(
            at=at, after=after, number=loop.number, values=VALUES, given=loop.given, keep=keep, loop=number
        )
        outside += f"!{number} = distinct !{{!{number}, {_properties(loop, row.properties)}}}\n"
        after = f"not{at}"
    assumed = "".join(_NOT_AT.format(at=at) for at in edges)
    outside += _IS_INSIDE.format(number=loop.number, assumed=assumed)
    inside = _INSIDE.format(number=loop.number)
    return replace(row, enter=f"{code}{inside}{row.enter}", source=after, outside=outside)


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


def in_parts() -> Row:
    """Return rows of threads of which those from ``first_thread`` on come before the others.

    That is for the race checker: what a kernel does may depend on which warp is first.
    """
    return Row(
        enter="  br i1 %some, label %x, label %y.end",
        first="%x.first",
        end="%x.last",
        on_entry=_FIRST_PART,
        bounds=_OF_PART,
        is_part=True,
    )


# ---- rows of which the first threads do something ----

# Of rows that have fewer threads than those that do anything, each by itself: LLVM knows how many the others have.
_FEW = """few:
  %few.tx = phi i32 [ {begin}, %{after} ], [ %few.next, %few ]
  %few.t = add nuw nsw i32 %first, %few.tx
  %few.at = call i32 @thread_{number}({values}, i32 %few.tx, i32 %ty, i32 %tz, i32 %few.t{given}) #2
  %few.next = add nuw nsw i32 %few.tx, 1
  %few.done = icmp eq i32 %few.next, %nx
  br i1 %few.done, label %y.end, label %few
"""
# Rows of which a number of threads do something that is known when the region begins. Vectors full of these do not ask.
# One more vector asks each of its threads, if the row has room for it.
_WHOLE = """
  %full = and i32 %most, -16
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
_VECTORS_FIRST = "!7, !8"  # not unrolled before it is a loop of vectors


def bounded_row(loop: ThreadLoop, bound: Bound) -> Row:
    """Return rows of which only so many threads as `bound` says do anything (:mod:`.bounds`)."""
    names = {"number": loop.number, "values": VALUES, "given": loop.given}
    if bound.register is None:
        return Row(
            enter="  br i1 %most, label %x, label %few",
            end=str(bound.number),
            bounds=f"\n  %most = icmp uge i32 %nx, {bound.number}",
            others=_FEW.format(**names, after="y", begin="0"),
            properties=_VECTORS_FIRST,
        )
    return Row(
        enter=_BUSY.format(**names, loop=_OF_ROWS + loop.metadata),
        source="tail",
        first="%full",
        end="%tail.end",
        on_entry=_most(loop, bound) + _WHOLE,
        others=_FEW.format(**names, after="tail", begin="%full"),
        properties=_VECTORS_FIRST,
        again=True,
    )


def _most(loop: ThreadLoop, bound: Bound) -> str:
    """Return code for ``%most``, how many threads of a row do anything."""
    if bound.register is not None:
        return f"\n  %most = call i32 @most_{loop.number}({VALUES}{loop.given}, i32 %nx)"
    return f"\n  %most = call i32 @llvm.umin.i32(i32 %nx, i32 {bound.number})"


# ---- threads that run together ----

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


def in_vectors(loop: ThreadLoop, width: int, bound: Bound | None) -> Row:
    """Return rows of which `width` threads at a time run ``together_<number>`` (:mod:`cudatool.sim.jit.together`)."""
    count = "%nx" if bound is None else "%most"
    enter = _TOGETHER.format(width=width, number=loop.number, values=VALUES, given=loop.given, count=count)
    return Row(enter, "narrow", "%wide.x", count, on_entry="" if bound is None else _most(loop, bound))


def whole_row(loop: ThreadLoop, function: str, bound: Bound | None) -> Row:
    """Return rows whose threads all run in one call of ``<function>_<number>`` (:mod:`.rows`, :mod:`.stretches`)."""
    count = "%nx" if bound is None else "%most"
    enter = _BY_ROW.format(rows=function, number=loop.number, values=VALUES, given=loop.given, count=count)
    return Row(enter, "none.x", end=count, on_entry="" if bound is None else _most(loop, bound))


# ---- threads that are asked first ----

_ASKED = 64  # threads of a row that are asked at once
# So many threads at a time, of which those run the region that do anything in it. What is left of the row is not asked.
_ASK = """  br label %many
many:
  %from = phi i32 [ 0, %y ], [ %to, %asked ]
  %to = add nuw nsw i32 %from, {asked}
  %fits = icmp ule i32 %to, %nx
  br i1 %fits, label %ask, label %rest
ask:
  %ask.t = add nuw nsw i32 %first, %from
  %those = call i64 @which_{number}({values}, i32 %from, i32 %ty, i32 %tz, i32 %ask.t{given}) #1
  br label %asked
asked:
  %left = phi i64 [ %those, %ask ], [ %others, %act ]
  %none = icmp eq i64 %left, 0
  br i1 %none, label %many, label %act
act:
  %place = call i64 @llvm.cttz.i64(i64 %left, i1 true)
  %place.x = trunc i64 %place to i32
  %act.tx = add nuw nsw i32 %from, %place.x
  %act.t = add nuw nsw i32 %first, %act.tx
  %act.next = call i32 @thread_{number}({values}, i32 %act.tx, i32 %ty, i32 %tz, i32 %act.t{given}) #1
  %less = sub i64 %left, 1
  %others = and i64 %left, %less
  br label %asked
rest:
  %is.rest = icmp ult i32 %from, %nx
  br i1 %is.rest, label %x, label %y.end"""
# Which of the threads from one on come to an effect.
_WHICH = """
declare i64 @llvm.cttz.i64(i64, i1)
define internal i64 @which_{number}({environment}, i32 %tx, i32 %ty, i32 %tz, i32 %t{given}) #0 {{
entry:
  %answers = alloca [{asked} x i8], align {asked}
  br label %one
one:
  %i = phi i64 [ 0, %entry ], [ %i.next, %one ]
  %i.x = trunc i64 %i to i32
  %one.tx = add nuw nsw i32 %tx, %i.x
  %one.t = add nuw nsw i32 %t, %i.x
  %does = call i1 @asks_{number}({values}, i32 %one.tx, i32 %ty, i32 %tz, i32 %one.t{given}) #1
  %answer = zext i1 %does to i8
  %answer.p = getelementptr i8, ptr %answers, i64 %i
  store i8 %answer, ptr %answer.p
  %i.next = add nuw nsw i64 %i, 1
  %all = icmp eq i64 %i.next, {asked}
  br i1 %all, label %end, label %one, !llvm.loop !{loop}
end:
  %given.answers = load <{asked} x i8>, ptr %answers, align {asked}
  %acting = icmp ne <{asked} x i8> %given.answers, zeroinitializer
  %those = bitcast <{asked} x i1> %acting to i{asked}
  ret i64 %those
}}
!{loop} = distinct !{{!{loop}, {properties}}}
"""
_NO_VECTORS = '!{!"llvm.loop.vectorize.enable", i1 false}'


def asked_row(loop: ThreadLoop) -> Row:
    """Return rows of which those threads run the region of which ``asks_<number>`` says that they do anything in it.

    See :mod:`cudatool.sim.jit.questions`.
    """
    names = {"number": loop.number, "values": VALUES, "given": loop.given, "asked": _ASKED}
    of_asking = _OF_ROWS + loop.metadata
    which = _WHICH.format(**names, environment=ENVIRONMENT, loop=of_asking, properties=_properties(loop, "!5"))
    return Row(_ASK.format(**names), "rest", "%from", properties=f"!7, {_NO_VECTORS}", outside=which)


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


def pair_of_rows(loop: ThreadLoop) -> Row:
    """Return rows that run the region two at a time, in ``pair_<number>``."""
    enter = _PAIR.format(number=loop.number, values=VALUES, given=loop.given, loop=_OF_ROWS + loop.metadata)
    return Row(enter, step="%rows", again=True)


# ---- rows whose registers are regular ----


def regular_row(loop: ThreadLoop, regular: Sequence[Regular]) -> Row:
    """Return rows that run ``regular_<number>`` if their slots are `regular` (:mod:`cudatool.sim.jit.neighbors`)."""
    values = ", ".join([VALUES, "i32 %row.tx, i32 %ty, i32 %tz, i32 %row.t", *first_values(regular)]) + loop.given
    code = f"""row.x:
  %row.tx = phi i32 [ 0, %choose ], [ %row.tx.next, %row.x ]
  %row.t = add nuw nsw i32 %first, %row.tx
  %row.next = call i32 @regular_{loop.number}({values}) #1
{_kept(loop, "row.")}  %row.tx.next = add nuw nsw i32 %row.tx, 1
  %row.x.done = icmp eq i32 %row.tx.next, %nx
  br i1 %row.x.done, label %y.end, label %row.x, !llvm.loop !{_OF_ROWS + loop.metadata}
"""
    return Row(_look(regular), "choose", others=code, again=True, attributes="#2")


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


# ---- the nest of loops ----


def all_threads(loop: ThreadLoop, row: Row, *, apart: bool) -> str:
    """Return ``all_<number>``: the region for every thread of the block, a function of its own if `apart`."""
    number, metadata = loop.number, loop.metadata
    properties = _properties(loop, row.properties)
    loads = "".join(f"\n{cell.load()}" for cell in loop.cells)
    outside = f"!{metadata} = distinct !{{!{metadata}, {properties}}}\n"
    outside += f'!{metadata + 1} = !{{!"llvm.loop.parallel_accesses", !1}}\n'
    if row.again:
        outside += f"!{_OF_ROWS + metadata} = distinct !{{!{_OF_ROWS + metadata}, {properties}}}\n"
    return f"""
define internal i32 @all_{number}({ENVIRONMENT}) {"noinline " if apart else ""}#0 {{
entry:
{field("block_x", "nx")}
{field("block_y", "ny")}
{field("block_z", "nz")}{loads}{row.on_entry}
  br label %z
z:
  %tz = phi i32 [ 0, %{"part" if row.is_part else "entry"} ], [ %tz.next, %z.end ]
  br label %y
y:
  %ty = phi i32 [ 0, %z ], [ %ty.next, %y.end ]
  %row = mul nuw nsw i32 %tz, %ny
  %column = add nuw nsw i32 %row, %ty
  %first = mul nuw nsw i32 %column, %nx{row.bounds}
{row.enter}
{row.others}x:
  %tx = phi i32 [ {row.first}, %{row.source} ], [ %tx.next, %x ]
  %t = add nuw nsw i32 %first, %tx
  %next = call i32 @thread_{number}({VALUES}, i32 %tx, i32 %ty, i32 %tz, i32 %t{loop.given}) {row.attributes}
{_kept(loop)}  %tx.next = add nuw nsw i32 %tx, 1
  %x.done = icmp eq i32 %tx.next, {row.end}
  br i1 %x.done, label %y.end, label %x, !llvm.loop !{metadata}
y.end:
  %ty.next = add nuw nsw i32 %ty, {row.step}
  %y.done = icmp eq i32 %ty.next, %ny
  br i1 %y.done, label %z.end, label %y, !llvm.loop !9
z.end:
  %tz.next = add nuw nsw i32 %tz, 1
  %z.done = icmp eq i32 %tz.next, %nz
  br i1 %z.done, label %end, label %z, !llvm.loop !9
end:{_NEXT_PART if row.is_part else ""}
{_following(loop)}
}}
{outside}{row.outside}"""


def _following(loop: ThreadLoop) -> str:
    """Return code that returns where all threads have come to."""
    if loop.ahead:
        return f"  %agreed = call i32 @ahead_{loop.number}({VALUES}{loop.given})\n  ret i32 %agreed"
    if loop.notes:
        return "  %agreed = call i32 @agreed(ptr %context, ptr %slots)\n  ret i32 %agreed"
    return f"  ret i32 {loop.only}"
