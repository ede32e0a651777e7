"""The scheduler, as LLVM IR: how the threads of a block take turns.

As long as all threads wait at the same suspension, ``block`` (:mod:`.grid`) does it for the whole block and runs the
next region for all threads (:mod:`.thread_loops`). When they do not, :mod:`.divergence` takes over.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

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
