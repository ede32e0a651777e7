"""The scheduler when threads of a block disagree, as LLVM IR.

``divergent`` runs threads one by one::

    repeat:
        for each warp, as long as one of its suspensions is ready:
            ready: every live lane of its member mask waits there
            combine it for those lanes; run each of them to its next suspension
        for each barrier number that enough threads wait at: run as many to their next suspension
        none: threads that wait for an mbarrier give up waiting and go on
        none: threads that wait for memory to change go on (the fourth time: park the block; others may have to go on)
        none ready: all threads ended, or none can go on (deadlock)
    until all threads agree again

Of several ready suspensions the first in the text is taken, so that lanes meet again after a branch.

A barrier with a thread count (``bar.sync n, count``; PTX ISA, "Parallel Synchronization and Communication Instructions:
bar, barrier") is complete when that many threads have arrived, counted in whole warps: a warp arrives with its last
living lane and counts as 32 threads. Then it starts again. So of more warps that wait the first ones go on, and the
others wait for the next round; a count that no round can reach is a deadlock. Which warps make up a round is not
defined, so that nothing is ordered where there were more than one needs (``_race_order.c``).
"""

from __future__ import annotations

from cudatool.sim.jit.collective import Kind, array_offset
from cudatool.sim.jit.context import EXIT, PASSES, Context, Stop
from cudatool.sim.jit.emit import ENVIRONMENT
from cudatool.sim.jit.instrument import DefectCode
from cudatool.sim.jit.scheduler import DIVERGED, PARKED, VALUES, field

__all__ = ["divergent"]

_MOST_POLLS = 1 << 25  # how often threads gave up waiting while no other could go on; then it is a deadlock


_BLOCK = "i32 %bx, i32 %by, i32 %bz"
_SYNC_CHECK = f"""
define internal void @sync_check(ptr %context, i1 %bad, i32 %kind, i32 %region, {_BLOCK}, i32 %t) noinline {{
  br i1 %bad, label %report, label %end
report:
  %region.x = zext i32 %region to i64
  %line.p = getelementptr i32, ptr @lines, i64 %region.x
  %line = load i32, ptr %line.p
  call void @report(ptr %context, i32 %kind, i32 %line, i64 0, i32 0, i32 0, i32 0, {_BLOCK}, i32 %t)
  br label %end
end:
  ret void
}}
"""


# Lets the threads that yield go on, each once.
_YIELDS = f"""yields:
  store i32 0, ptr %yielded
  br label %yield
yield:
  %ypt = phi i32 [ 0, %yields ], [ %ypt.next, %yield.end ]
  %ypt.x = zext i32 %ypt to i64
  %yps.p = getelementptr i32, ptr %slots, i64 %ypt.x
  %yps = load i32, ptr %yps.p, align 4
  %yp.end = icmp eq i32 %yps, {EXIT}
  br i1 %yp.end, label %yield.end, label %yield.live
yield.live:
  %yps.x = zext i32 %yps to i64
  %ypk.p = getelementptr i8, ptr @kinds, i64 %yps.x
  %ypk = load i8, ptr %ypk.p
  %ypk.yield = icmp eq i8 %ypk, {Kind.YIELD}
  br i1 %ypk.yield, label %yield.go, label %yield.end
yield.go:
  store i32 1, ptr %yielded
  call void @resume({VALUES}, i32 %yps, i32 %ypt)
  br label %yield.end
yield.end:
  %ypt.next = add i32 %ypt, 1
  %yielded.all = icmp eq i32 %ypt.next, %n
  br i1 %yielded.all, label %yield.done, label %yield
yield.done:
  %yielded.any = load i32, ptr %yielded
  %none_left = icmp eq i32 %yielded.any, 0
  br i1 %none_left, label %idle, label %yield.count
idle:
  %polled.any = load i1, ptr %polled
  br i1 %polled.any, label %again, label %deadlock
yield.count:
  %pass.0 = load i32, ptr %passes
  %pass = add i32 %pass.0, 1
  store i32 %pass, ptr %passes
  %fourth = and i32 %pass, 3
  %long = icmp eq i32 %fourth, 0
{field("status", "status3", volatile=True)}
  %stopped3 = icmp ne i32 %status3, 0
  %park = xor i1 %stopped3, true
  %park.now = and i1 %park, %long
  br i1 %park.now, label %parking, label %check
parking:
  ret i32 {PARKED}
"""
_ARRIVE = f"""
define internal void @arrive(ptr %slots, i64 %warp, i32 %lanes) noinline {{
entry:
  %numbers = getelementptr i8, ptr %slots, i64 {array_offset("a")}
  %arrived = getelementptr i8, ptr %slots, i64 {array_offset("arrived")}
  %first = shl i64 %warp, 5
  %ended = call i32 @waiting(ptr %slots, i64 %warp, i32 {EXIT})
  %live = xor i32 %ended, -1
  %whole = icmp eq i32 %lanes, %live
  %lacking = call i32 @llvm.ctpop.i32(i32 %ended)
  %rest = select i1 %whole, i32 %lacking, i32 0
  br label %loop
loop:
  %left = phi i32 [ %lanes, %entry ], [ %left.next, %loop ]
  %more = phi i32 [ %rest, %entry ], [ 0, %loop ]
  %lane = call i32 @llvm.cttz.i32(i32 %left, i1 true)
  %lane.x = zext i32 %lane to i64
  %t = add i64 %first, %lane.x
  %id.p = getelementptr i32, ptr %numbers, i64 %t
  %id.0 = load i32, ptr %id.p, align 4
  %id = and i32 %id.0, 15
  %count.p = getelementptr i32, ptr %arrived, i32 %id
  %count = load i32, ptr %count.p, align 4
  %count.0 = add i32 %count, %more
  %count.1 = add i32 %count.0, 1
  store i32 %count.1, ptr %count.p, align 4
  %less = sub i32 %left, 1
  %left.next = and i32 %left, %less
  %done = icmp eq i32 %left.next, 0
  br i1 %done, label %end, label %loop
end:
  ret void
}}
"""
# A thread at a wait is ready by itself.
_WAIT = """phase:
  %wait.t = trunc i64 %lt to i32
  %passed = call i1 @passed(ptr %slots, i32 %wait.t)
  %wait.lane = trunc i64 %lane to i32
  %wait.bit = shl i32 1, %wait.lane
  br i1 %passed, label %ready, label %leader.end
"""
# No barrier opens: look for a wait that another warp has ended meanwhile; else let those that wait give up, but not
# for ever.
_SECOND_CHANCE = f"""second:
  store i1 false, ptr %polled
  br label %waiting
waiting:
  %ut = phi i32 [ 0, %second ], [ %ut.next, %waiting.end ]
  %ut.x = zext i32 %ut to i64
  %us.p = getelementptr i32, ptr %slots, i64 %ut.x
  %us = load i32, ptr %us.p, align 4
  %u.end = icmp eq i32 %us, {EXIT}
  br i1 %u.end, label %waiting.end, label %waiting.live
waiting.live:
  %us.x = zext i32 %us to i64
  %uk.p = getelementptr i8, ptr @kinds, i64 %us.x
  %uk = load i8, ptr %uk.p
  %uk.wait = icmp eq i8 %uk, {Kind.WAIT}
  br i1 %uk.wait, label %waiting.look, label %waiting.end
waiting.look:
  %u.passed = call i1 @passed(ptr %slots, i32 %ut)
  br i1 %u.passed, label %again, label %waiting.end
waiting.end:
  %ut.next = add i32 %ut, 1
  %u.done = icmp eq i32 %ut.next, %n
  br i1 %u.done, label %poll, label %waiting
poll:
  %polls.0 = load i32, ptr %polls
  %enough.polls = icmp ugt i32 %polls.0, {_MOST_POLLS}
  br i1 %enough.polls, label %stuck.waits, label %release.poll
release.poll:
  %pt = phi i32 [ 0, %poll ], [ %pt.next, %poll.end ]
  %pt.x = zext i32 %pt to i64
  %ps.p = getelementptr i32, ptr %slots, i64 %pt.x
  %ps = load i32, ptr %ps.p, align 4
  %p.end = icmp eq i32 %ps, {EXIT}
  br i1 %p.end, label %poll.end, label %poll.live
poll.live:
  %ps.x = zext i32 %ps to i64
  %pk.p = getelementptr i8, ptr @kinds, i64 %ps.x
  %pk = load i8, ptr %pk.p
  %is.poll = icmp eq i8 %pk, {Kind.WAIT}
  br i1 %is.poll, label %poll.go, label %poll.end
poll.go:
  store i1 true, ptr %polled
  %polls.1 = load i32, ptr %polls
  %polls.2 = add i32 %polls.1, 1
  store i32 %polls.2, ptr %polls
  call void @resume({VALUES}, i32 %ps, i32 %pt)
  br label %poll.end
poll.end:
  %pt.next = add i32 %pt, 1
  %p.done = icmp eq i32 %pt.next, %n
  br i1 %p.done, label %stuck.waits, label %release.poll
"""
# Nothing but waits is left: either some gave up, or no thread can go on.
_STUCK_WAITS = """stuck.waits:
  %let.go = load i1, ptr %polled
  br i1 %let.go, label %again, label %deadlock
"""


# The lanes of a warp that are suspended at a region.
_WAITING = """\
define internal i32 @waiting(ptr %slots, i64 %warp, i32 %region) #0 {
  %first = shl i64 %warp, 7
  %p = getelementptr i8, ptr %slots, i64 %first
  %v = load <32 x i32>, ptr %p, align 4
  %r0 = insertelement <32 x i32> poison, i32 %region, i32 0
  %r = shufflevector <32 x i32> %r0, <32 x i32> poison, <32 x i32> zeroinitializer
  %same = icmp eq <32 x i32> %v, %r
  %bits = bitcast <32 x i1> %same to i32
  ret i32 %bits
}
"""
# The number of the barrier at which all living lanes of a warp wait, 16 if there is none.
_BARRIER_OF = f"""\
define internal i32 @barrier_of(ptr %slots, ptr %numbers, i64 %warp) noinline #0 {{
entry:
  %first = shl i64 %warp, 5
  br label %loop
loop:
  %lane = phi i64 [ 0, %entry ], [ %lane.next, %next ]
  %at = phi i32 [ 16, %entry ], [ %at.next, %next ]
  %t = add i64 %first, %lane
  %s.p = getelementptr i32, ptr %slots, i64 %t
  %s = load i32, ptr %s.p, align 4
  %ended = icmp eq i32 %s, {EXIT}
  br i1 %ended, label %next, label %look
look:
  %s.x = zext i32 %s to i64
  %k.p = getelementptr i8, ptr @kinds, i64 %s.x
  %k = load i8, ptr %k.p
  %barrier = icmp eq i8 %k, {Kind.BARRIER}
  %reduce = icmp eq i8 %k, {Kind.BARRIER_REDUCE}
  %either = or i1 %barrier, %reduce
  %id.p = getelementptr i32, ptr %numbers, i64 %t
  %id.0 = load i32, ptr %id.p, align 4
  %id = and i32 %id.0, 15
  %none = icmp eq i32 %at, 16
  %same = icmp eq i32 %at, %id
  %fits = or i1 %none, %same
  %good = and i1 %either, %fits
  br i1 %good, label %next, label %apart
next:
  %at.next = phi i32 [ %at, %loop ], [ %id, %look ]
  %lane.next = add nuw nsw i64 %lane, 1
  %done = icmp eq i64 %lane.next, 32
  br i1 %done, label %end, label %loop
end:
  ret i32 %at.next
apart:
  ret i32 16
}}
"""
# What a reduction over the threads that go on from a barrier gives: `let` has the lanes of each warp.
_REDUCE = f"""\
define internal void @reduce({ENVIRONMENT}, i32 %region, ptr %let, ptr %accumulator) noinline #0 {{
entry:
{field("threads", "n")}
  %n31 = add i32 %n, 31
  %warps.i = lshr i32 %n31, 5
  %warps = zext i32 %warps.i to i64
  br label %loop
loop:
  %warp = phi i64 [ 0, %entry ], [ %warp.next, %loop ]
  %there = call i32 @waiting(ptr %slots, i64 %warp, i32 %region)
  %let.p = getelementptr i32, ptr %let, i64 %warp
  %let.w = load i32, ptr %let.p, align 4
  %lanes = and i32 %there, %let.w
  call void @combine({VALUES}, i32 %region, i64 %warp, i32 %lanes, ptr %accumulator)
  %warp.next = add i64 %warp, 1
  %done = icmp eq i64 %warp.next, %warps
  br i1 %done, label %end, label %loop
end:
  %p = getelementptr i8, ptr %slots, i64 {array_offset("result")}
  %total = load i32, ptr %accumulator
  store i32 %total, ptr %p, align 4
  ret void
}}
"""
_ENTRY = f"""\
define internal i32 @divergent({ENVIRONMENT}) noinline #0 {{
entry:
  %best = alloca i32
  %best.lanes = alloca i32
  %unused = alloca i32
  %wait = alloca [16 x i32]
  %need = alloca [16 x i32]
  %whole = alloca [16 x i32]
  %budget = alloca [16 x i32]
  %warp.at = alloca [32 x i32]
  %let = alloca [32 x i32]
  %accumulator = alloca i32
  %alive = alloca i32
  %stuck = alloca i32
  %polls = alloca i32
  store i32 0, ptr %polls
  %site = alloca [16 x i32]
  %mixed = alloca [16 x i32]
  %yielded = alloca i32
  %polled = alloca i1
  store i1 false, ptr %polled
  %arrived = getelementptr i8, ptr %slots, i64 {array_offset("arrived")}
  %passes = getelementptr i8, ptr %slots, i64 {PASSES}
{field("threads", "n")}
  %n31 = add i32 %n, 31
  %warps.i = lshr i32 %n31, 5
  %warps = zext i32 %warps.i to i64
  %masks = getelementptr i8, ptr %slots, i64 {array_offset("mask")}
  %numbers = getelementptr i8, ptr %slots, i64 {array_offset("a")}
  %counts = getelementptr i8, ptr %slots, i64 {array_offset("b")}
  br label %again

"""
# The next warp with a live lane; its first suspension in the text is looked for.
_SEARCH = f"""\
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
"""
# Keeps the first suspension in the text of those that are ready.
_TAKE = """\
take:
  store i32 %s, ptr %best
  store i32 %who, ptr %best.lanes
  %is.least = icmp eq i32 %s, %least
  br i1 %is.least, label %chosen, label %leader.end
leader.end:
  %lane.next = add i64 %lane, 1
  %lanes.done = icmp eq i64 %lane.next, 32
  br i1 %lanes.done, label %chosen, label %leader
"""
# Runs the lanes of the suspension that was chosen, then looks at the same warp again.
_RUN_CHOSEN = f"""\
chosen:
  %region = load i32, ptr %best
  %nothing = icmp eq i32 %region, {EXIT}
  br i1 %nothing, label %warp.end, label %collective
collective:
  %chosen.lanes = load i32, ptr %best.lanes
  call void @combine({VALUES}, i32 %region, i64 %warp, i32 %chosen.lanes, ptr %unused)
  br label %run
run:
  %bits = phi i32 [ %chosen.lanes, %collective ], [ %bits.next, %run ]
  %one = call i32 @llvm.cttz.i32(i32 %bits, i1 true)
  %t0.i = trunc i64 %t0 to i32
  %t = add i32 %t0.i, %one
  call void @resume({VALUES}, i32 %region, i32 %t)
  %bits.1 = sub i32 %bits, 1
  %bits.next = and i32 %bits, %bits.1
  %ran = icmp eq i32 %bits.next, 0
  br i1 %ran, label %warp.again, label %run
warp.again:
{field("status", "status", volatile=True)}
  %stopped = icmp ne i32 %status, 0
  br i1 %stopped, label %quit, label %warp.step
warp.end:
  %warp.next = add i64 %warp, 1
  %warps.done = icmp eq i64 %warp.next, %warps
  br i1 %warps.done, label %barriers, label %warp.start

"""
# For each barrier that has opened, in turn: finds the warps that go on.
_LET = f"""\
open.up:
  br label %number
number:
  %on = phi i64 [ 0, %open.up ], [ %on.next, %number.end ]
  %on.i = trunc i64 %on to i32
  %state.p = getelementptr i32, ptr %wait, i64 %on
  %state = load i32, ptr %state.p
  %is.open = icmp ne i32 %state, 0
  br i1 %is.open, label %number.open, label %number.end
number.open:
  %budget.p = getelementptr i32, ptr %budget, i64 %on
  br label %let.loop
let.loop:
  %lw = phi i64 [ 0, %number.open ], [ %lw.next, %let.loop ]
  %lw.at.p = getelementptr i32, ptr %warp.at, i64 %lw
  %lw.at = load i32, ptr %lw.at.p
  %lw.here = icmp eq i32 %lw.at, %on.i
  %lw.budget = load i32, ptr %budget.p
  %lw.some = icmp sgt i32 %lw.budget, 0
  %lw.go = and i1 %lw.here, %lw.some
  %lw.ended = call i32 @waiting(ptr %slots, i64 %lw, i32 {EXIT})
  %lw.live = xor i32 %lw.ended, -1
  %lw.lanes = select i1 %lw.go, i32 %lw.live, i32 0
  %lw.let.p = getelementptr i32, ptr %let, i64 %lw
  store i32 %lw.lanes, ptr %lw.let.p, align 4
  %lw.cost = select i1 %lw.go, i32 32, i32 0
  %lw.left = sub i32 %lw.budget, %lw.cost
  store i32 %lw.left, ptr %budget.p
  %lw.next = add i64 %lw, 1
  %lw.done = icmp eq i64 %lw.next, %warps
  br i1 %lw.done, label %let.end, label %let.loop
let.end:
  %on.need.p = getelementptr i32, ptr %need, i64 %on
  %on.need = load i32, ptr %on.need.p
  call void @after_barriers(ptr %context, ptr %let, i32 %on.i, i32 %state, i32 %on.need)
  store i32 0, ptr %accumulator
"""
# Runs the threads that go on.
_RELEASE = f"""\
  br label %release
release:
  %rt = phi i32 [ 0, %let.end ], [ %rt.next, %release.end ]
  %rt.x = zext i32 %rt to i64
  %rs.p = getelementptr i32, ptr %slots, i64 %rt.x
  %rs = load i32, ptr %rs.p, align 4
  %rw = lshr i64 %rt.x, 5
  %rl.p = getelementptr i32, ptr %let, i64 %rw
  %rl = load i32, ptr %rl.p, align 4
  %rb = and i32 %rt, 31
  %rl.bit = lshr i32 %rl, %rb
  %rl.go = trunc i32 %rl.bit to i1
  br i1 %rl.go, label %go.on, label %release.end
go.on:
  call void @resume({VALUES}, i32 %rs, i32 %rt)
  br label %release.end
release.end:
  %rt.next = add i32 %rt, 1
  %released = icmp eq i32 %rt.next, %n
  br i1 %released, label %number.end, label %release
number.end:
  %on.next = add i64 %on, 1
  %on.done = icmp eq i64 %on.next, 16
  br i1 %on.done, label %check, label %number
"""
# Goes on until the threads agree again, or stops the block.
_END = f"""\
check:
{field("status", "status2", volatile=True)}
  %stopped2 = icmp ne i32 %status2, 0
  br i1 %stopped2, label %quit, label %compare
compare:
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
  call void @stop(ptr %context, i32 {Stop.DEADLOCK}, i32 %line, i32 %bx, i32 %by, i32 %bz, i32 %st)
  br label %quit
quit:
  ret i32 {EXIT}
}}
"""
_MASK_CHECK = f"""  %lt.i = trunc i64 %lt to i32
  call void @sync_check(ptr %context, i1 %lacks, i32 {int(DefectCode.MASK_WITHOUT_CALLER)}, i32 %s, {_BLOCK}, i32 %lt.i)
"""
_SITE_BEGIN = "  store [16 x i32] zeroinitializer, ptr %site\n  store [16 x i32] zeroinitializer, ptr %mixed"
# Whether all threads at one barrier number come from one line.
_SITE_CHECK = """  %site.p = getelementptr i32, ptr %site, i64 %id.x
  %site.0 = load i32, ptr %site.p
  %site.none = icmp eq i32 %site.0, 0
  %site.1 = select i1 %site.none, i32 %cs, i32 %site.0
  store i32 %site.1, ptr %site.p
  %differs = xor i32 %site.1, %cs
  %mixed.p = getelementptr i32, ptr %mixed, i64 %id.x
  %mixed.0 = load i32, ptr %mixed.p
  %mixed.1 = or i32 %mixed.0, %differs
  store i32 %mixed.1, ptr %mixed.p"""
# Reports barriers that opened without some threads, or for threads at different lines.
_BARRIER_CHECK = f"""  %some.ended = icmp ult i32 %living, %n
  %short = and i1 %all, %some.ended
  %js.p = getelementptr i32, ptr %site, i64 %j
  %js = load i32, ptr %js.p
  %jm.p = getelementptr i32, ptr %mixed, i64 %j
  %jm = load i32, ptr %jm.p
  %apart.sites = icmp ne i32 %jm, 0
  %wrong = or i1 %short, %apart.sites
  %bad = and i1 %open, %wrong
  %waiting.thread = load i32, ptr %stuck
  call void @sync_check(ptr %context, i1 %bad, i32 {int(DefectCode.BARRIER_DIVERGED)}, i32 %js, {_BLOCK},
    i32 %waiting.thread)"""
# At which barrier each warp has arrived as a whole, and 32 times how many warps have at each.
_WARPS_AT = """\
warps.at:
  %cw = phi i64 [ 0, %count.end ], [ %cw.next, %warps.at ]
  %cw.at = call i32 @barrier_of(ptr %slots, ptr %numbers, i64 %cw)
  %cw.at.p = getelementptr i32, ptr %warp.at, i64 %cw
  store i32 %cw.at, ptr %cw.at.p
  %cw.some = icmp ult i32 %cw.at, 16
  %cw.id = and i32 %cw.at, 15
  %cw.whole.p = getelementptr i32, ptr %whole, i32 %cw.id
  %cw.whole = load i32, ptr %cw.whole.p
  %cw.more = select i1 %cw.some, i32 32, i32 0
  %cw.whole.1 = add i32 %cw.whole, %cw.more
  store i32 %cw.whole.1, ptr %cw.whole.p
  %cw.next = add i64 %cw, 1
  %cw.done = icmp eq i64 %cw.next, %warps
  br i1 %cw.done, label %decide, label %warps.at
"""
# What of the arrivals at a barrier is used up by a round of it, beside the warps that wait: at least one does.
_ARRIVALS = """  %ja.p = getelementptr i32, ptr %arrived, i64 %j
  %ja = load i32, ptr %ja.p, align 4
"""
_ARRIVALS_USED = """  %ja.rest = sub i32 %ja, %ja.used
  %goal.some = call i32 @llvm.umax.i32(i32 %goal, i32 1)
  %ja.later = urem i32 %ja.rest, %goal.some
  %ja.left = select i1 %open, i32 %ja.later, i32 %ja
  store i32 %ja.left, ptr %ja.p, align 4
"""


def divergent(kinds: dict[int, int], lines: dict[int, int], *, checked: bool) -> str:
    """Return ``divergent``: schedules warps, lanes and barriers one by one until the threads of a block agree.

    If `checked`, barriers that not all threads come to and wrong member masks are reported (synccheck).
    """
    found = set(kinds.values())
    waits = Kind.WAIT in found
    yields = Kind.YIELD in found
    stuck = "yields" if yields else "deadlock"
    return "".join(
        [
            "\n",
            _SYNC_CHECK if checked else "",
            "\n" + _tables(kinds, lines),
            "\n" + _resume(kinds),
            "\n" + _combine(kinds),
            "\n" + _WAITING,
            _ARRIVE if Kind.ARRIVE in found else "",
            "\n" + _BARRIER_OF,
            "\n" + _REDUCE,
            "\n" + _ENTRY,
            _choose(waits=waits, checked=checked),
            _RUN_CHOSEN,
            _count_waiting(checked=checked),
            _open_barriers("second" if waits else stuck, arrivals=Kind.ARRIVE in found, checked=checked),
            _SECOND_CHANCE.replace("%stuck.waits", "%yields") if waits and yields else "",
            _SECOND_CHANCE + _STUCK_WAITS if waits and not yields else "",
            _YIELDS if yields else "",
            _release(kinds),
            _END,
        ]
    )


def _tables(kinds: dict[int, int], lines: dict[int, int]) -> str:
    """Return the kind and the line of each suspension."""
    count = max(kinds, default=0) + 1
    table = ", ".join(f"i8 {kinds.get(number, 0)}" for number in range(count))
    places = ", ".join(f"i32 {lines.get(number, 0)}" for number in range(count))
    return f"""\
@kinds = internal constant [{count} x i8] [{table}]
@lines = internal constant [{count} x i32] [{places}]
"""


def _resume(kinds: dict[int, int]) -> str:
    """Return ``resume``: runs one thread to its next suspension."""
    resume = " ".join(f"i32 {number}, label %r{number}" for number in kinds)
    resumes = "\n".join(
        f"r{n}:\n  %x{n} = call i32 @thread_{n}({VALUES}, i32 %tx, i32 %ty, i32 %tz, i32 %t) #2\n"
        f"  store i32 %x{n}, ptr %mine, align 4\n  %e{n} = icmp eq i32 %x{n}, {EXIT}\n"
        f"  br i1 %e{n}, label %ended, label %none"
        for n in kinds
    )
    return f"""\
define internal void @resume({ENVIRONMENT}, i32 %region, i32 %t) noinline #0 {{
{field("block_x", "nx")}
{field("block_y", "ny")}
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
ended:
  %progress.p = getelementptr i8, ptr %context, i64 {Context.progress.offset}
  %progress.0 = load i64, ptr %progress.p
  %progress.1 = add i64 %progress.0, 1
  store i64 %progress.1, ptr %progress.p
  ret void
}}
"""


def _combine(kinds: dict[int, int]) -> str:
    """Return ``combine``: does what the lanes that meet at a suspension do together."""
    combine = " ".join(f"i32 {number}, label %c{number}" for number in kinds)
    combines = "\n".join(
        f"c{n}:\n  call void @combine_{n}({VALUES}, i64 %warp, i32 %lanes, ptr %accumulator) #2\n  ret void"
        for n in kinds
    )
    return f"""\
define internal void @combine({ENVIRONMENT}, i32 %region, i64 %warp, i32 %lanes, ptr %accumulator) noinline #0 {{
  switch i32 %region, label %none [ {combine} ]
{combines}
none:
  ret void
}}
"""


def _choose(*, waits: bool, checked: bool) -> str:
    """Return the search of each warp for its first suspension that is ready, and the lanes that wait there."""
    cases = f"i8 {Kind.WAIT}, label %phase" if waits else ""
    wait_check, wait_who = (_WAIT, ", [ %wait.bit, %phase ]") if waits else ("", "")
    mask_check = _MASK_CHECK if checked else ""
    return (
        _SEARCH
        + f"""\
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
  switch i8 %k, label %leader.end [ i8 {Kind.WARP}, label %masked  i8 {Kind.PRESENT}, label %ready
    i8 {Kind.ARRIVE}, label %ready {cases} ]
{wait_check}masked:
  %m.p = getelementptr i32, ptr %masks, i64 %lt
  %m = load i32, ptr %m.p, align 4
  %lane.i = trunc i64 %lane to i32
  %own.bit = shl i32 1, %lane.i
  %own.in = and i32 %m, %own.bit
  %lacks = icmp eq i32 %own.in, 0
  %m.live = and i32 %m, %live
  %wanted = select i1 %lacks, i32 %own.bit, i32 %m.live
{mask_check}  %missing.a = xor i32 %there, -1
  %missing = and i32 %wanted, %missing.a
  %complete = icmp eq i32 %missing, 0
  %some = icmp ne i32 %wanted, 0
  %go = and i1 %complete, %some
  br i1 %go, label %ready, label %leader.end
ready:
  %who = phi i32 [ %there, %look ], [ %there, %look ], [ %wanted, %masked ]{wait_who}
  %so.far = load i32, ptr %best
  %earlier = icmp ult i32 %s, %so.far
  br i1 %earlier, label %take, label %leader.end
"""
        + _TAKE
    )


def _count_waiting(*, checked: bool) -> str:
    """Return the count of threads that live, and of those that wait at each barrier number."""
    site_begin, site_check = (_SITE_BEGIN, _SITE_CHECK) if checked else ("", "")
    return (
        f"""\
barriers:
  store [16 x i32] zeroinitializer, ptr %wait
  store [16 x i32] zeroinitializer, ptr %need
  store [16 x i32] zeroinitializer, ptr %whole
{site_begin}
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
{site_check}
  br label %count.end
count.end:
  %ct.next = add i32 %ct, 1
  %counted = icmp eq i32 %ct.next, %n
  br i1 %counted, label %warps.at, label %count
"""
        + _WARPS_AT
    )


def _open_barriers(otherwise: str, *, arrivals: bool, checked: bool) -> str:
    """Return what opens each barrier that enough threads wait at; control goes to `otherwise` if there is none."""
    arrived, used = (_ARRIVALS, _ARRIVALS_USED) if arrivals else ("  %ja = add i32 0, 0\n", "")
    barrier_check = _BARRIER_CHECK if checked else ""
    return f"""\
decide:
  %living = load i32, ptr %alive
  %finished = icmp eq i32 %living, 0
  br i1 %finished, label %quit, label %judge
judge:
  %j = phi i64 [ 0, %decide ], [ %j.next, %judge ]
  %any = phi i32 [ 0, %decide ], [ %any.next, %judge ]
  %jw.p = getelementptr i32, ptr %wait, i64 %j
  %jw.0 = load i32, ptr %jw.p
{arrived}  %jn.p = getelementptr i32, ptr %need, i64 %j
  %jn = load i32, ptr %jn.p
  %jf.p = getelementptr i32, ptr %whole, i64 %j
  %jf = load i32, ptr %jf.p
  %all = icmp eq i32 %jn, 0
  %jn.up = add i32 %jn, 31
  %jn.warps = and i32 %jn.up, -32
  %goal = select i1 %all, i32 %living, i32 %jn.warps
  %waits = select i1 %all, i32 %jw.0, i32 %jf
  %jw = add i32 %waits, %ja
  %enough = icmp uge i32 %jw, %goal
  %used = icmp ne i32 %waits, 0
  %open = and i1 %enough, %used
  %spare = icmp ugt i32 %jw, %goal
  %counts.some = xor i1 %all, true
  %any.of = and i1 %spare, %counts.some
  %state.open = select i1 %any.of, i32 2, i32 1
  %open.i = select i1 %open, i32 %state.open, i32 0
  %goal.last = sub i32 %jn.warps, 32
  %ja.used = call i32 @llvm.umin.i32(i32 %ja, i32 %goal.last)
  %budget.c = sub i32 %jn.warps, %ja.used
  %budget.j = select i1 %all, i32 {1 << 30}, i32 %budget.c
  %budget.j.p = getelementptr i32, ptr %budget, i64 %j
  store i32 %budget.j, ptr %budget.j.p
{used}  store i32 %open.i, ptr %jw.p
{barrier_check}
  %any.next = or i32 %any, %open.i
  %j.next = add i64 %j, 1
  %judged = icmp eq i64 %j.next, 16
  br i1 %judged, label %verdict, label %judge
verdict:
  %progress = icmp ne i32 %any.next, 0
  br i1 %progress, label %open.up, label %{otherwise}
"""


def _release(kinds: dict[int, int]) -> str:
    """Return what runs the threads at barriers that have opened, after their reductions."""
    reducing = "\n".join(
        f"  call void @reduce({VALUES}, i32 {number}, ptr %let, ptr %accumulator)"
        for number, kind in kinds.items()
        if kind == Kind.BARRIER_REDUCE
    )
    return f"{_LET}{reducing}\n{_RELEASE}"
