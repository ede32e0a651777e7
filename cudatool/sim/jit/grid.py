"""The blocks of a grid, as LLVM IR: the entry point, one block, and blocks side by side that run row by row."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from cudatool.sim.jit.collective import ROW, Kind, array_offset
from cudatool.sim.jit.context import EXIT, IN_STEP, Context
from cudatool.sim.jit.emit import ENVIRONMENT
from cudatool.sim.jit.fetch import FETCH
from cudatool.sim.jit.scheduler import DIVERGED, PARKED, UNPEELED, VALUES, field

__all__ = ["SIDE_BY_SIDE", "block", "grid", "in_step", "side_by_side"]

_LOOP = 1 << 22  # number of the metadata of the loop over a row of threads
SIDE_BY_SIDE = 1024
"""Threads of a row of blocks that run before the next row: what they access fits into a cache."""

_FAR = 8
"""So many where each accesses a cache line of its own, if blocks have several rows: such lines, a row of a matrix from
one to the next, often fall into one set of a cache, which has room for few."""

_LONG_CHUNK = 2  # times as many blocks are taken at once where rows may be longer


def side_by_side(*, is_flat: bool, rows: str) -> str:
    """Return ``side_by_side``: region 0 for the threads of ``%run`` blocks beside each other in x.

    It is for kernels that suspend no thread. The first rows of all blocks come before their second ones, so that
    threads access memory in the order in which it lies there, and not one narrow row far from the last. If the kernel
    `is_flat`, its threads know only their place in the grid: then the rows of all blocks are one, of the first block,
    and longer for the function that `rows` names (:mod:`.rows`, :mod:`.stretches`), if there is one.
    """
    values = VALUES if is_flat else VALUES.replace("%bx", "%bx.now")
    width, blocks = ("%nx", "%run") if not is_flat else ("%all", "1")
    together = f"""  call void @{rows}_0({values}, i32 0, i32 %ty, i32 %tz, i32 %first, i32 {width})
  br label %block.end"""
    each = f"""  br label %x
x:
  %tx = phi i32 [ 0, %block ], [ %tx.next, %x ]
  %t = add nuw nsw i32 %first, %tx
  %next = call i32 @thread_0({values}, i32 %tx, i32 %ty, i32 %tz, i32 %t) #1
  %tx.next = add nuw nsw i32 %tx, 1
  %x.done = icmp eq i32 %tx.next, {width}
  br i1 %x.done, label %block.end, label %x, !llvm.loop !{_LOOP}"""
    return f"""
define internal void @side_by_side({ENVIRONMENT}, i32 %run) alwaysinline #0 {{
entry:
{field("block_x", "nx")}
{field("block_y", "ny")}
{field("block_z", "nz")}
  %all = mul nuw nsw i32 %nx, %run
  %bx.end = add i32 %bx, {blocks}
  br label %z
z:
  %tz = phi i32 [ 0, %entry ], [ %tz.next, %z.end ]
  br label %y
y:
  %ty = phi i32 [ 0, %z ], [ %ty.next, %y.end ]
  %row = mul nuw nsw i32 %tz, %ny
  %column = add nuw nsw i32 %row, %ty
  %first = mul nuw nsw i32 %column, %nx
  br label %block
block:
  %bx.now = phi i32 [ %bx, %y ], [ %bx.next, %block.end ]
{together if rows else each}
block.end:
  %bx.next = add i32 %bx.now, 1
  %block.done = icmp eq i32 %bx.next, %bx.end
  br i1 %block.done, label %y.end, label %block, !llvm.loop !9
y.end:
  %ty.next = add nuw nsw i32 %ty, 1
  %y.done = icmp eq i32 %ty.next, %ny
  br i1 %y.done, label %z.end, label %y, !llvm.loop !9
z.end:
  %tz.next = add nuw nsw i32 %tz, 1
  %z.done = icmp eq i32 %tz.next, %nz
  br i1 %z.done, label %end, label %z, !llvm.loop !9
end:
  ret void
}}
!{_LOOP} = distinct !{{!{_LOOP}, !6, !5, {UNPEELED}}}
"""


# How many blocks run side by side: no more than a row of the grid has, if each comes after the one beside it. That is
# asked of each, though it is so for all or none: LLVM would make two copies of the kernel of what it knows beforehand.
_RUN = f"""{field("block_x", "nx")}
{{most}}
  %following.a = add i64 %moved, %multiplier
  %following = urem i64 %following.a, %blocks
  %beside.b = add i64 %b, 1
  %in.order = icmp eq i64 %following, %beside.b
  %wide = udiv i32 %most, %nx
  %beside = call i32 @llvm.umax.i32(i32 %wide, i32 1)
  %room = sub i32 %gx, %bx
  %left.l = sub i64 %until, %i
  %left = trunc i64 %left.l to i32
  %run.a = call i32 @llvm.umin.i32(i32 %room, i32 %left)
  %run.b = call i32 @llvm.umin.i32(i32 %run.a, i32 %beside)
  %run = select i1 %in.order, i32 %run.b, i32 1
  call void @side_by_side({VALUES}, i32 %run)
  %run.l = zext i32 %run to i64"""


# Rows of the one length or the other: a block with one row has no others that read its lines once more.
_MOST = f"""{field("block_y", "ny")}
{field("block_z", "nz")}
  %block.rows = mul nuw nsw i32 %ny, %nz
  %has.rows = icmp ne i32 %block.rows, 1
  %most = select i1 %has.rows, i32 {{far}}, i32 {{beside}}"""


_STEP = f"""{field("in_step", "in.step")}
  %left = sub i64 %until, %i
  %run = call i64 @llvm.umin.i64(i64 %left, i64 %in.step)
  call void @in_step({VALUES}, i64 %i, i64 %run)"""


# No thread has arrived at a barrier of a block that begins.
_RESET_ARRIVED = f"""  %arrived = getelementptr i8, ptr %slots, i64 {array_offset("arrived")}
  %fresh = icmp eq i32 %begin, 0
  br i1 %fresh, label %reset, label %entered
reset:
  store [16 x i32] zeroinitializer, ptr %arrived, align 4
  br label %entered
entered:
"""


def block(kinds: dict[int, int], successors: Mapping[int, set[int]], *, diverges: bool, fetches: bool) -> str:
    """Return ``block``: runs regions of one block as long as its threads agree. `kinds` is per suspension.

    A region with one of the `successors` alone goes on to it at once, unless the launch is stopped.

    It begins with region `begin`, and returns whether the block is parked: waits for others, to be continued.
    """
    if not kinds:
        return f"""
define internal i1 @block({ENVIRONMENT}, i32 %begin) alwaysinline #0 {{
  %end = call i32 @all_0({VALUES}) #1
  ret i1 false
}}
"""
    cases, joins, code = ["i32 0, label %run0"], ["[ %begin, %entry ]", "[ %n0, %run0 ]"], []
    if diverges:
        cases.append(f"i32 {DIVERGED}, label %diverged")
        joins.append("[ %nd, %diverged ]")
        code.append(f"diverged:\n  %nd = call i32 @divergent({VALUES})\n  br label %next")
    for number, kind in kinds.items():
        barrier = "\n  call void @after_barrier(ptr %context)" if kind in (Kind.BARRIER, Kind.BARRIER_REDUCE) else ""
        cases.append(f"i32 {number}, label %do{number}")
        joins += [f"[ {DIVERGED}, %do{number} ]", f"[ %n{number}, %run{number} ]"]
        code.append(
            f"""do{number}:
  %ok{number} = call i1 @warps_{number}({VALUES})
  br i1 %ok{number}, label %run{number}, label %next
run{number}:{barrier}
  %n{number} = call i32 @all_{number}({VALUES})
{_go_on(number, successors[number])}"""
        )
    lines = "\n".join(code)
    reset = ""
    if Kind.ARRIVE in kinds.values():
        reset = _RESET_ARRIVED
        joins[0] = "[ %begin, %entered ]"
    return f"""
define internal i1 @block({ENVIRONMENT}, i32 %begin) alwaysinline #0 {{
entry:
{reset}  br label %next
next:
  %s = phi i32 {", ".join(joins)}
{field("status", "status", volatile=True)}
  %stopped = icmp ne i32 %status, 0
  br i1 %stopped, label %end, label %go
go:
  switch i32 %s, label %end [ {" ".join(cases)} ]
run0:
{FETCH if fetches else ""}  %n0 = call i32 @all_0({VALUES})
{_go_on(0, successors[0])}
{lines}
end:
  %parked = icmp eq i32 %s, {PARKED}
  ret i1 %parked
}}
"""


def _go_on(number: int, after: set[int]) -> str:
    """Return what follows a region, which can be one of those `after` it: a choice of the next one, if there is any."""
    if len(after) != 1 or EXIT in after:
        return "  br label %next"
    return f"""{field("status", f"status{number}", volatile=True)}
  %stopped{number} = icmp ne i32 %status{number}, 0
  br i1 %stopped{number}, label %next, label %do{next(iter(after))}"""


# Where each of the blocks is in the grid.
_PLACES = f"""  %places = alloca [{IN_STEP} x [3 x i32]]
{field("grid_x", "gx")}
{field("grid_y", "gy")}
{field("blocks", "blocks")}
{field("order_multiplier", "multiplier")}
{field("order_offset", "offset")}
{field("shared_step", "shared.step")}
{field("slots_step", "slots.step")}
  %gx.l = zext i32 %gx to i64
  %gy.l = zext i32 %gy to i64
  br label %place
place:
  %p = phi i64 [ 0, %entry ], [ %p.next, %place ]
  %p.i = add i64 %i, %p
  %p.scaled = mul i64 %p.i, %multiplier
  %p.moved = add i64 %p.scaled, %offset
  %p.b = urem i64 %p.moved, %blocks
  %p.rows = udiv i64 %p.b, %gx.l
  %p.at = getelementptr [3 x i32], ptr %places, i64 %p
  %p.x = urem i64 %p.b, %gx.l
  %p.x.i = trunc i64 %p.x to i32
  store i32 %p.x.i, ptr %p.at
  %p.y = urem i64 %p.rows, %gy.l
  %p.y.i = trunc i64 %p.y to i32
  %p.y.at = getelementptr i8, ptr %p.at, i64 4
  store i32 %p.y.i, ptr %p.y.at
  %p.z = udiv i64 %p.rows, %gy.l
  %p.z.i = trunc i64 %p.z to i32
  %p.z.at = getelementptr i8, ptr %p.at, i64 8
  store i32 %p.z.i, ptr %p.z.at
  %p.next = add nuw nsw i64 %p, 1
  %p.done = icmp eq i64 %p.next, %run
  br i1 %p.done, label %region0, label %place, !llvm.loop !9
"""


def in_step(order: Sequence[int]) -> str:
    """Return ``in_step``: ``%run`` blocks from number ``%i`` on in execution order, one region after the other.

    It is for kernels with trees of sums, of which all threads run the regions in one `order`, a barrier after each.
    Levels of a tree are short, and each waits for what the one before has just written; those of other blocks do not.
    Each block has shared memory and slots of its own.
    """
    code = [f"define internal void @in_step({ENVIRONMENT}, i64 %i, i64 %run) alwaysinline #0 {{\nentry:\n{_PLACES}"]
    for number, end in zip(order, [*(f"region{number}" for number in order[1:]), "end"], strict=True):
        values = VALUES
        for name in ("shared", "slots", "bx", "by", "bz"):
            values = values.replace(f"%{name}", f"%{name}.{number}")
        code.append(f"""region{number}:
  br label %block{number}
block{number}:
  %j.{number} = phi i64 [ 0, %region{number} ], [ %j.next.{number}, %block{number} ]
  %shared.by.{number} = mul i64 %j.{number}, %shared.step
  %shared.{number} = getelementptr i8, ptr %shared, i64 %shared.by.{number}
  %slots.by.{number} = mul i64 %j.{number}, %slots.step
  %slots.{number} = getelementptr i8, ptr %slots, i64 %slots.by.{number}
  %bx.at.{number} = getelementptr [3 x i32], ptr %places, i64 %j.{number}
  %by.at.{number} = getelementptr i8, ptr %bx.at.{number}, i64 4
  %bz.at.{number} = getelementptr i8, ptr %bx.at.{number}, i64 8
  %bx.{number} = load i32, ptr %bx.at.{number}
  %by.{number} = load i32, ptr %by.at.{number}
  %bz.{number} = load i32, ptr %bz.at.{number}
  %n.{number} = call i32 @all_{number}({values})
  %j.next.{number} = add nuw nsw i64 %j.{number}, 1
  %j.done.{number} = icmp eq i64 %j.next.{number}, %run
  br i1 %j.done.{number}, label %{end}, label %block{number}, !llvm.loop !9
""")
    return "".join([*code, "end:\n  ret void\n}\n"])


_ENOUGH_ROUNDS = f"""{field("rounds", "rounds", volatile=True)}
{field("most_rounds", "most.rounds")}
  %enough = icmp ugt i64 %rounds, %most.rounds
  br i1 %enough, label %end, label %another
another:
"""


def _filled(constants: Mapping[str, int]) -> str:
    """Return code that fills argument arrays, each with a byte."""
    return "".join(
        f"  %{name}.filled = getelementptr i8, ptr %slots, i64 {array_offset(name)}\n"
        f"  call void @llvm.memset.p0.i64(ptr %{name}.filled, i8 {byte}, i64 {4 * ROW}, i1 false)\n"
        for name, byte in sorted(constants.items())
    )


def _run(beside: int, *, far: bool, steps: bool) -> tuple[str, str]:
    """Return code that runs blocks, and how many."""
    if steps:
        return _STEP, "%run"
    if beside:
        most = _MOST.format(far=_FAR if far else beside, beside=beside)
        return _RUN.format(most=most), "%run.l"
    return f"  %waits = call i1 @block({VALUES}, i32 %begin)", "1"


def _chunk(beside: int) -> str:
    """Return code for how many blocks are taken at once: more where rows may be longer than usual."""
    factor = _LONG_CHUNK if beside > SIDE_BY_SIDE else 1
    return f"{field('chunk', 'share')}\n  %chunk = mul i64 %share, {factor}"


class _Parking(NamedTuple):
    """The parts of ``grid`` that depend on whether blocks can be parked.

    Attributes
    ----------
    resume
        Code that goes to the parked block, or to taking blocks.
    resumed, begin, until
        What the block to continue adds to the choices of its number, its first region, and where the blocks end.
    park
        Code after a block that may have been parked.
    """

    resume: str = "  br label %take"
    resumed: str = ""
    begin: str = ""
    until: str = ""
    park: str = ""


_NEVER_PARKED = _Parking()
_PARKED = _Parking(
    resume=f"""{field("resume", "resume", volatile=True)}
{field("current", "current", volatile=True)}
  %resuming = icmp ne i32 %resume, 0
  %after = add i64 %current, 1
  br i1 %resuming, label %one, label %take""",
    resumed=", [ %current, %entry ]",
    begin=f", [ {DIVERGED}, %entry ]",
    until=", [ %after, %entry ]",
    park="""  br i1 %waits, label %park, label %on
park:
  store volatile i32 1, ptr %parked.p
  br label %end
on:
""",
)

# Where block %i is in the grid: execution order is a permutation of the blocks (:class:`.Context`), and x goes first.
_PLACE = """  %scaled = mul i64 %i, %multiplier
  %moved = add i64 %scaled, %offset
  %b = urem i64 %moved, %blocks
  %gx.l = zext i32 %gx to i64
  %gy.l = zext i32 %gy to i64
  %bx.l = urem i64 %b, %gx.l
  %rows = udiv i64 %b, %gx.l
  %by.l = urem i64 %rows, %gy.l
  %bz.l = udiv i64 %rows, %gy.l
  %bx = trunc i64 %bx.l to i32
  %by = trunc i64 %by.l to i32
  %bz = trunc i64 %bz.l to i32"""


def _context(global_bytes: int, beside: int) -> str:
    """Return code that loads what ``grid`` needs of the context."""
    return f"""{field("zero", "zero", volatile=True, kind="ptr")}
{field("shared", "shared", kind="ptr")}
{field("params", "params", kind="ptr")}, !noundef !0, !dereferenceable !3
{field("globals", "globals", kind="ptr")}, !noundef !0, !align !{{i64 8}}, !dereferenceable !{{i64 {global_bytes}}}
{field("slots", "slots", kind="ptr")}
{field("local", "locals", kind="ptr")}
{field("grid_x", "gx")}
{field("grid_y", "gy")}
{field("blocks", "blocks")}
{_chunk(beside)}
{field("order_multiplier", "multiplier")}
{field("order_offset", "offset")}
{field("next_block", "counter", kind="ptr")}
{field("parked", "parked", volatile=True)}
  %current.at = getelementptr i8, ptr %context, i64 {Context.current.offset}"""


def grid(
    param_bytes: int,
    global_bytes: int,
    *,
    parks: bool,
    counts: bool,
    constants: Mapping[str, int],
    beside: int,
    far: bool,
    steps: bool,
) -> str:
    """Return ``grid``, the entry point: takes blocks until there are none.

    Parameters
    ----------
    param_bytes, global_bytes
        Of the parameters, and of the table of the addresses of global variables. These are declared dereferenceable, so
        that what is loaded from them in a branch of a loop over threads can move out of it; LLVM makes no vectors of
        other loops.
    parks
        Whether blocks can be parked. It returns when one is, and begins with the one that the context says to continue.
    counts
        Whether it counts rounds of loops. It also ends when there were many.
    constants
        The bytes that some argument arrays are filled with.
    beside, far
        Blocks run in rows of up to `beside` threads, unless it is 0; of fewer if neighbors access memory `far` from
        each other.
    steps
        Whether several run in step.
    """
    run, step = _run(beside, far=far, steps=steps)
    parking = _PARKED if parks else _NEVER_PARKED
    return f"""
define void @grid(ptr align 8 dereferenceable({ctypes.sizeof(Context)}) %context) #0 {{
entry:
{_context(max(global_bytes, 1), beside)}
{_filled(constants)}{parking.resume}
take:
{_ENOUGH_ROUNDS if counts else ""}  %first = atomicrmw add ptr %counter, i64 %chunk seq_cst
  %none = icmp uge i64 %first, %blocks
  br i1 %none, label %end, label %some
some:
  %last.a = add i64 %first, %chunk
  %short = icmp ult i64 %blocks, %last.a
  %last = select i1 %short, i64 %blocks, i64 %last.a
  br label %one
one:
  %i = phi i64 [ %first, %some ], [ %i.next, %more ]{parking.resumed}
  %begin = phi i32 [ 0, %some ], [ 0, %more ]{parking.begin}
  %until = phi i64 [ %last, %some ], [ %until, %more ]{parking.until}
{_PLACE}
  store volatile i64 %i, ptr %current.at
  %fresh = icmp eq i32 %begin, 0
  call void @enter_block(ptr %context, i64 %i, i1 %fresh)
{run}
{parking.park}  call void @leave_block(ptr %context)
{field("status", "status", volatile=True)}
  %stopped = icmp ne i32 %status, 0
  br i1 %stopped, label %stop, label %more
more:
  %i.next = add i64 %i, {step}
  %done = icmp eq i64 %i.next, %until
  br i1 %done, label %take, label %one
stop:
  store atomic i64 %blocks, ptr %counter seq_cst, align 8
  br label %end
end:
  ret void
}}
!3 = !{{i64 {max(param_bytes, 1)}}}
"""
