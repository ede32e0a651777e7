"""The scheduler, as LLVM IR: how the threads of a block take turns, and the blocks of a grid.

Uniform case, in ``block``: all threads wait at the same suspension; do it for the whole block, run the next region for
all threads. Divergent case, in ``divergent``::

    repeat:
        for each warp, as long as one of its suspensions is ready:
            ready: every live lane of its member mask waits there
            combine it for those lanes; run each of them to its next suspension
        for each barrier number that enough threads wait at: run those threads to their next suspension
        none ready: everyone ended, or nobody can go on (deadlock)
    until all threads agree again
"""

from __future__ import annotations

from cudatool.sim.jit.collective import Kind, array_offset
from cudatool.sim.jit.context import EXIT, Context, Stop
from cudatool.sim.jit.emit import ENVIRONMENT

__all__ = ["AGREED", "GRID", "OWN", "PRELUDE", "all_threads", "block", "divergent", "whole_block"]

DIVERGED = -2
_VALUES = "ptr %context, ptr %zero, ptr %shared, ptr %params, ptr %slots, ptr %locals, i32 %bx, i32 %by, i32 %bz"

PRELUDE = """
declare i32 @llvm.cttz.i32(i32, i1)
declare i32 @llvm.ctpop.i32(i32)
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
attributes #0 = { null_pointer_is_valid nounwind "no-trapping-math"="true" }
attributes #1 = { alwaysinline }
attributes #2 = { noinline }
"""

# What emitters must not declare again.
OWN = frozenset({*PRELUDE.splitlines(), "declare i16 @bf16_round(float)"})


def _field(name: str, result: str, *, volatile: bool = False, kind: str = "") -> str:
    member = getattr(Context, name)
    kind = kind or f"i{8 * member.size}"
    limits = ", !range !2" if name in ("block_x", "block_y", "block_z", "threads") else ""
    invariant = "" if volatile else f", !invariant.load !0{limits}"
    return (
        f"  %{result}.p = getelementptr i8, ptr %context, i64 {member.offset}\n"
        f"  %{result} = load {'volatile ' if volatile else ''}{kind}, ptr %{result}.p{invariant}"
    )


def all_threads(number: int, only: int | None) -> str:
    """Return ``all_<number>``: the region for every thread of the block.

    `only` is the suspension that all threads reach, if there is just one.
    """
    keep = after = ""
    if only is None:
        keep = f"""  %slot = zext i32 %t to i64
  %mine = getelementptr i32, ptr %slots, i64 %slot
  store i32 %next, ptr %mine, align 4, !llvm.access.group !1
"""
        after = "  %agreed = call i32 @agreed(ptr %context, ptr %slots)\n"
    loop = 10 + 2 * number
    return f"""
define internal i32 @all_{number}({ENVIRONMENT}) #0 {{
entry:
{_field("block_x", "nx")}
{_field("block_y", "ny")}
{_field("block_z", "nz")}
  br label %z
z:
  %tz = phi i32 [ 0, %entry ], [ %tz.next, %z.end ]
  br label %y
y:
  %ty = phi i32 [ 0, %z ], [ %ty.next, %y.end ]
  %row = mul nuw nsw i32 %tz, %ny
  %column = add nuw nsw i32 %row, %ty
  %first = mul nuw nsw i32 %column, %nx
  br label %x
x:
  %tx = phi i32 [ 0, %y ], [ %tx.next, %x ]
  %t = add nuw nsw i32 %first, %tx
  %next = call i32 @thread_{number}({_VALUES}, i32 %tx, i32 %ty, i32 %tz, i32 %t) #1
{keep}  %tx.next = add nuw nsw i32 %tx, 1
  %x.done = icmp eq i32 %tx.next, %nx
  br i1 %x.done, label %y.end, label %x, !llvm.loop !{loop}
y.end:
  %ty.next = add nuw nsw i32 %ty, 1
  %y.done = icmp eq i32 %ty.next, %ny
  br i1 %y.done, label %z.end, label %y
z.end:
  %tz.next = add nuw nsw i32 %tz, 1
  %z.done = icmp eq i32 %tz.next, %nz
  br i1 %z.done, label %end, label %z
end:
{after}  ret i32 {"%agreed" if only is None else only}
}}
!{loop} = distinct !{{!{loop}, !{loop + 1}}}
!{loop + 1} = !{{!"llvm.loop.parallel_accesses", !1}}
"""


AGREED = f"""
define internal i32 @agreed(ptr %context, ptr %slots) #0 {{
entry:
{_field("threads", "n")}
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


def whole_block(number: int, kind: int, *, check_masks: bool) -> str:
    """Return ``warps_<number>``: the collective for all warps; false if member masks split a warp.

    In that case every thread is marked as waiting there, for ``divergent`` to sort out.
    """
    body = check = fill = ""
    if kind == Kind.BARRIER:
        return f"\ndefine internal i1 @warps_{number}({ENVIRONMENT}) #0 {{\n  ret i1 true\n}}\n"
    if check_masks:
        check = f"""
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
        fill = f"""
split:
  %t = phi i64 [ 0, %body ], [ %t.next, %split ]
  %mine = getelementptr i32, ptr %slots, i64 %t
  store i32 {number}, ptr %mine, align 4
  %t.next = add nuw nsw i64 %t, 1
  %filled = icmp eq i64 %t.next, %count
  br i1 %filled, label %no, label %split
no:
  ret i1 false"""
    else:
        check = "\n  br label %combine"
    if kind == Kind.BARRIER_REDUCE:
        body = f"""
  %result.p = getelementptr i8, ptr %slots, i64 {array_offset("result")}
  %total = load i32, ptr %accumulator
  store i32 %total, ptr %result.p, align 4"""
    return f"""
define internal i1 @warps_{number}({ENVIRONMENT}) #0 {{
entry:
  %accumulator = alloca i32
  store i32 0, ptr %accumulator
{_field("threads", "n")}
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
  call void @combine_{number}({_VALUES}, i64 %warp, i32 %lanes, ptr %accumulator) #1
  %warp.next = add nuw nsw i64 %warp, 1
  %reached = shl i64 %warp.next, 5
  %more = icmp ult i64 %reached, %count
  br i1 %more, label %body, label %end
end:{body}
  ret i1 true{fill}
}}
"""


def block(kinds: dict[int, int], *, diverges: bool) -> str:
    """Return ``block``: runs regions of one block as long as its threads agree. `kinds` is per suspension."""
    if not kinds:
        return f"""
define internal void @block({ENVIRONMENT}) #0 {{
  %end = call i32 @all_0({_VALUES}) #1
  ret void
}}
"""
    cases, joins, code = ["i32 0, label %run0"], ["[ 0, %entry ]", "[ %n0, %run0 ]"], []
    if diverges:
        cases.append(f"i32 {DIVERGED}, label %diverged")
        joins.append("[ %nd, %diverged ]")
        code.append(f"diverged:\n  %nd = call i32 @divergent({_VALUES})\n  br label %next")
    for number in kinds:
        cases.append(f"i32 {number}, label %do{number}")
        joins += [f"[ {DIVERGED}, %do{number} ]", f"[ %n{number}, %run{number} ]"]
        code.append(
            f"""do{number}:
  %ok{number} = call i1 @warps_{number}({_VALUES})
  br i1 %ok{number}, label %run{number}, label %next
run{number}:
  %n{number} = call i32 @all_{number}({_VALUES})
  br label %next"""
        )
    lines = "\n".join(code)
    return f"""
define internal void @block({ENVIRONMENT}) #0 {{
entry:
  br label %next
next:
  %s = phi i32 {", ".join(joins)}
{_field("status", "status", volatile=True)}
  %stopped = icmp ne i32 %status, 0
  br i1 %stopped, label %end, label %go
go:
  switch i32 %s, label %end [ {" ".join(cases)} ]
run0:
  %n0 = call i32 @all_0({_VALUES})
  br label %next
{lines}
end:
  ret void
}}
"""


def divergent(kinds: dict[int, int], lines: dict[int, int]) -> str:
    """Return ``divergent``: schedules warps, lanes and barriers one by one until the threads of a block agree."""
    count = max(kinds, default=0) + 1
    table = ", ".join(f"i8 {kinds.get(number, 0)}" for number in range(count))
    places = ", ".join(f"i32 {lines.get(number, 0)}" for number in range(count))
    resume = " ".join(f"i32 {number}, label %r{number}" for number in kinds)
    combine = " ".join(f"i32 {number}, label %c{number}" for number in kinds)
    resumes = "\n".join(
        f"r{n}:\n  %x{n} = call i32 @thread_{n}({_VALUES}, i32 %tx, i32 %ty, i32 %tz, i32 %t) #2\n"
        f"  store i32 %x{n}, ptr %mine, align 4\n  ret void"
        for n in kinds
    )
    combines = "\n".join(
        f"c{n}:\n  call void @combine_{n}({_VALUES}, i64 %warp, i32 %lanes, ptr %accumulator) #2\n  ret void"
        for n in kinds
    )
    reducing = "\n".join(
        f"  call void @reduce({_VALUES}, i32 {number})" for number, kind in kinds.items() if kind == Kind.BARRIER_REDUCE
    )
    return f"""
@kinds = internal constant [{count} x i8] [{table}]
@lines = internal constant [{count} x i32] [{places}]

define internal void @resume({ENVIRONMENT}, i32 %region, i32 %t) noinline #0 {{
{_field("block_x", "nx")}
{_field("block_y", "ny")}
  %tx = urem i32 %t, %nx
  %rows = udiv i32 %t, %nx
  %ty = urem i32 %rows, %ny
  %tz = udiv i32 %rows, %ny
  %index = zext i32 %t to i64
  %mine = getelementptr i32, ptr %slots, i64 %index
  switch i32 %region, label %none [ {resume} ]
{resumes}
none:
  ret void
}}

define internal void @combine({ENVIRONMENT}, i32 %region, i64 %warp, i32 %lanes, ptr %accumulator) noinline #0 {{
  switch i32 %region, label %none [ {combine} ]
{combines}
none:
  ret void
}}

define internal i32 @waiting(ptr %slots, i64 %warp, i32 %region) #0 {{
  %first = shl i64 %warp, 7
  %p = getelementptr i8, ptr %slots, i64 %first
  %v = load <32 x i32>, ptr %p, align 4
  %r0 = insertelement <32 x i32> poison, i32 %region, i32 0
  %r = shufflevector <32 x i32> %r0, <32 x i32> poison, <32 x i32> zeroinitializer
  %same = icmp eq <32 x i32> %v, %r
  %bits = bitcast <32 x i1> %same to i32
  ret i32 %bits
}}

define internal void @reduce({ENVIRONMENT}, i32 %region) noinline #0 {{
entry:
  %accumulator = alloca i32
  store i32 0, ptr %accumulator
{_field("threads", "n")}
  %n31 = add i32 %n, 31
  %warps.i = lshr i32 %n31, 5
  %warps = zext i32 %warps.i to i64
  br label %loop
loop:
  %warp = phi i64 [ 0, %entry ], [ %warp.next, %loop ]
  %lanes = call i32 @waiting(ptr %slots, i64 %warp, i32 %region)
  call void @combine({_VALUES}, i32 %region, i64 %warp, i32 %lanes, ptr %accumulator)
  %warp.next = add i64 %warp, 1
  %done = icmp eq i64 %warp.next, %warps
  br i1 %done, label %end, label %loop
end:
  %p = getelementptr i8, ptr %slots, i64 {array_offset("result")}
  %total = load i32, ptr %accumulator
  store i32 %total, ptr %p, align 4
  ret void
}}

define internal i32 @divergent({ENVIRONMENT}) noinline #0 {{
entry:
  %best = alloca i32
  %best.lanes = alloca i32
  %unused = alloca i32
  %wait = alloca [16 x i32]
  %need = alloca [16 x i32]
  %alive = alloca i32
  %stuck = alloca i32
{_field("threads", "n")}
  %n31 = add i32 %n, 31
  %warps.i = lshr i32 %n31, 5
  %warps = zext i32 %warps.i to i64
  %masks = getelementptr i8, ptr %slots, i64 {array_offset("mask")}
  %numbers = getelementptr i8, ptr %slots, i64 {array_offset("a")}
  %counts = getelementptr i8, ptr %slots, i64 {array_offset("b")}
  br label %again

again:
  br label %warp.start
warp.start:
  %warp = phi i64 [ 0, %again ], [ %warp.next, %warp.end ]
  %t0 = shl i64 %warp, 5
  br label %warp.step
warp.step:
  %row = getelementptr i32, ptr %slots, i64 %t0
  %v = load <32 x i32>, ptr %row, align 4
  %ended = call i32 @waiting(ptr %slots, i64 %warp, i32 {EXIT})
  %live = xor i32 %ended, -1
  %none.live = icmp eq i32 %live, 0
  br i1 %none.live, label %warp.end, label %search
search:
  %least = call i32 @llvm.vector.reduce.umin.v32i32(<32 x i32> %v)
  store i32 {EXIT}, ptr %best
  br label %leader
leader:
  %lane = phi i64 [ 0, %search ], [ %lane.next, %leader.end ]
  %lt = add i64 %t0, %lane
  %s.p = getelementptr i32, ptr %slots, i64 %lt
  %s = load i32, ptr %s.p, align 4
  %is.end = icmp eq i32 %s, {EXIT}
  br i1 %is.end, label %leader.end, label %look
look:
  %s.x = zext i32 %s to i64
  %k.p = getelementptr i8, ptr @kinds, i64 %s.x
  %k = load i8, ptr %k.p
  %there = call i32 @waiting(ptr %slots, i64 %warp, i32 %s)
  switch i8 %k, label %leader.end [ i8 {Kind.WARP}, label %masked  i8 {Kind.PRESENT}, label %ready ]
masked:
  %m.p = getelementptr i32, ptr %masks, i64 %lt
  %m = load i32, ptr %m.p, align 4
  %wanted = and i32 %m, %live
  %missing.a = xor i32 %there, -1
  %missing = and i32 %wanted, %missing.a
  %complete = icmp eq i32 %missing, 0
  %some = icmp ne i32 %wanted, 0
  %go = and i1 %complete, %some
  br i1 %go, label %ready, label %leader.end
ready:
  %who = phi i32 [ %there, %look ], [ %wanted, %masked ]
  %so.far = load i32, ptr %best
  %earlier = icmp ult i32 %s, %so.far
  br i1 %earlier, label %take, label %leader.end
take:
  store i32 %s, ptr %best
  store i32 %who, ptr %best.lanes
  %is.least = icmp eq i32 %s, %least
  br i1 %is.least, label %chosen, label %leader.end
leader.end:
  %lane.next = add i64 %lane, 1
  %lanes.done = icmp eq i64 %lane.next, 32
  br i1 %lanes.done, label %chosen, label %leader
chosen:
  %region = load i32, ptr %best
  %nothing = icmp eq i32 %region, {EXIT}
  br i1 %nothing, label %warp.end, label %collective
collective:
  %chosen.lanes = load i32, ptr %best.lanes
  call void @combine({_VALUES}, i32 %region, i64 %warp, i32 %chosen.lanes, ptr %unused)
  br label %run
run:
  %bits = phi i32 [ %chosen.lanes, %collective ], [ %bits.next, %run ]
  %one = call i32 @llvm.cttz.i32(i32 %bits, i1 true)
  %t0.i = trunc i64 %t0 to i32
  %t = add i32 %t0.i, %one
  call void @resume({_VALUES}, i32 %region, i32 %t)
  %bits.1 = sub i32 %bits, 1
  %bits.next = and i32 %bits, %bits.1
  %ran = icmp eq i32 %bits.next, 0
  br i1 %ran, label %warp.again, label %run
warp.again:
{_field("status", "status", volatile=True)}
  %stopped = icmp ne i32 %status, 0
  br i1 %stopped, label %quit, label %warp.step
warp.end:
  %warp.next = add i64 %warp, 1
  %warps.done = icmp eq i64 %warp.next, %warps
  br i1 %warps.done, label %barriers, label %warp.start

barriers:
  store [16 x i32] zeroinitializer, ptr %wait
  store [16 x i32] zeroinitializer, ptr %need
  store i32 0, ptr %alive
  br label %count
count:
  %ct = phi i32 [ 0, %barriers ], [ %ct.next, %count.end ]
  %ct.x = zext i32 %ct to i64
  %cs.p = getelementptr i32, ptr %slots, i64 %ct.x
  %cs = load i32, ptr %cs.p, align 4
  %c.end = icmp eq i32 %cs, {EXIT}
  br i1 %c.end, label %count.end, label %count.live
count.live:
  store i32 %ct, ptr %stuck
  %a0 = load i32, ptr %alive
  %a1 = add i32 %a0, 1
  store i32 %a1, ptr %alive
  %cs.x = zext i32 %cs to i64
  %ck.p = getelementptr i8, ptr @kinds, i64 %cs.x
  %ck = load i8, ptr %ck.p
  switch i8 %ck, label %count.end [ i8 {Kind.BARRIER}, label %at  i8 {Kind.BARRIER_REDUCE}, label %at ]
at:
  %id.p = getelementptr i32, ptr %numbers, i64 %ct.x
  %id.0 = load i32, ptr %id.p, align 4
  %id = and i32 %id.0, 15
  %id.x = zext i32 %id to i64
  %w.p = getelementptr i32, ptr %wait, i64 %id.x
  %w.0 = load i32, ptr %w.p
  %w.1 = add i32 %w.0, 1
  store i32 %w.1, ptr %w.p
  %nd.s = getelementptr i32, ptr %counts, i64 %ct.x
  %nd.0 = load i32, ptr %nd.s, align 4
  %nd.p = getelementptr i32, ptr %need, i64 %id.x
  store i32 %nd.0, ptr %nd.p
  br label %count.end
count.end:
  %ct.next = add i32 %ct, 1
  %counted = icmp eq i32 %ct.next, %n
  br i1 %counted, label %decide, label %count
decide:
  %living = load i32, ptr %alive
  %finished = icmp eq i32 %living, 0
  br i1 %finished, label %quit, label %judge
judge:
  %j = phi i64 [ 0, %decide ], [ %j.next, %judge ]
  %any = phi i32 [ 0, %decide ], [ %any.next, %judge ]
  %jw.p = getelementptr i32, ptr %wait, i64 %j
  %jw = load i32, ptr %jw.p
  %jn.p = getelementptr i32, ptr %need, i64 %j
  %jn = load i32, ptr %jn.p
  %all = icmp eq i32 %jn, 0
  %goal = select i1 %all, i32 %living, i32 %jn
  %enough = icmp uge i32 %jw, %goal
  %used = icmp ne i32 %jw, 0
  %open = and i1 %enough, %used
  %open.i = zext i1 %open to i32
  store i32 %open.i, ptr %jw.p
  %any.next = or i32 %any, %open.i
  %j.next = add i64 %j, 1
  %judged = icmp eq i64 %j.next, 16
  br i1 %judged, label %verdict, label %judge
verdict:
  %progress = icmp ne i32 %any.next, 0
  br i1 %progress, label %open.up, label %deadlock
open.up:
{reducing}
  br label %release
release:
  %rt = phi i32 [ 0, %open.up ], [ %rt.next, %release.end ]
  %rt.x = zext i32 %rt to i64
  %rs.p = getelementptr i32, ptr %slots, i64 %rt.x
  %rs = load i32, ptr %rs.p, align 4
  %r.end = icmp eq i32 %rs, {EXIT}
  br i1 %r.end, label %release.end, label %release.live
release.live:
  %rs.x = zext i32 %rs to i64
  %rk.p = getelementptr i8, ptr @kinds, i64 %rs.x
  %rk = load i8, ptr %rk.p
  switch i8 %rk, label %release.end [ i8 {Kind.BARRIER}, label %open.check  i8 {Kind.BARRIER_REDUCE}, label %open.check ]
open.check:
  %rid.p = getelementptr i32, ptr %numbers, i64 %rt.x
  %rid.0 = load i32, ptr %rid.p, align 4
  %rid = and i32 %rid.0, 15
  %rid.x = zext i32 %rid to i64
  %ro.p = getelementptr i32, ptr %wait, i64 %rid.x
  %ro = load i32, ptr %ro.p
  %is.open = icmp ne i32 %ro, 0
  br i1 %is.open, label %let, label %release.end
let:
  call void @resume({_VALUES}, i32 %rs, i32 %rt)
  br label %release.end
release.end:
  %rt.next = add i32 %rt, 1
  %released = icmp eq i32 %rt.next, %n
  br i1 %released, label %check, label %release
check:
  %agreed = call i32 @agreed(ptr %context, ptr %slots)
  %apart = icmp eq i32 %agreed, {DIVERGED}
  br i1 %apart, label %again, label %together
together:
  ret i32 %agreed
deadlock:
  %st = load i32, ptr %stuck
  %st.x = zext i32 %st to i64
  %ss.p = getelementptr i32, ptr %slots, i64 %st.x
  %ss = load i32, ptr %ss.p, align 4
  %ss.x = zext i32 %ss to i64
  %line.p = getelementptr i32, ptr @lines, i64 %ss.x
  %line = load i32, ptr %line.p
{_put("status", str(Stop.DEADLOCK), "f1")}
{_put("site", "%line", "f2")}
{_put("at_thread", "%st", "f3")}
{_put("at_x", "%bx", "f4")}
{_put("at_y", "%by", "f5")}
{_put("at_z", "%bz", "f6")}
  br label %quit
quit:
  ret i32 {EXIT}
}}
"""


def _put(name: str, value: str, temporary: str) -> str:
    offset = getattr(Context, name).offset
    return (
        f"  %{temporary} = getelementptr i8, ptr %context, i64 {offset}\n  store volatile i32 {value}, ptr %{temporary}"
    )


GRID = f"""
define void @grid(ptr %context) #0 {{
entry:
{_field("zero", "zero", volatile=True, kind="ptr")}
{_field("shared", "shared", kind="ptr")}
{_field("params", "params", kind="ptr")}
{_field("slots", "slots", kind="ptr")}
{_field("local", "locals", kind="ptr")}
{_field("grid_x", "gx")}
{_field("grid_y", "gy")}
{_field("blocks", "blocks")}
{_field("chunk", "chunk")}
{_field("order_multiplier", "multiplier")}
{_field("order_offset", "offset")}
{_field("next_block", "counter", kind="ptr")}
  br label %take
take:
  %first = atomicrmw add ptr %counter, i64 %chunk seq_cst
  %none = icmp uge i64 %first, %blocks
  br i1 %none, label %end, label %some
some:
  %last.a = add i64 %first, %chunk
  %short = icmp ult i64 %blocks, %last.a
  %last = select i1 %short, i64 %blocks, i64 %last.a
  br label %one
one:
  %i = phi i64 [ %first, %some ], [ %i.next, %more ]
  %scaled = mul i64 %i, %multiplier
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
  %bz = trunc i64 %bz.l to i32
  call void @block({_VALUES})
{_field("status", "status", volatile=True)}
  %stopped = icmp ne i32 %status, 0
  br i1 %stopped, label %stop, label %more
more:
  %i.next = add i64 %i, 1
  %done = icmp eq i64 %i.next, %last
  br i1 %done, label %take, label %one
stop:
  store atomic i64 %blocks, ptr %counter seq_cst, align 8
  br label %end
end:
  ret void
}}
"""
