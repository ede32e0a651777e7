"""Races inside of kernels, by definition: what orders two accesses, and what instrumented code tells the engine.

Two accesses to a byte race if one of them is a write, they are not *morally strong*, and neither *happens before* the
other (PTX ISA, "Memory Consistency Model"). Morally strong are two volatile, relaxed, acquiring, releasing or atomic
accesses of which each one's scope includes the other's thread.

Happens-before is the transitive order of

- a thread's own accesses, but not of its asynchronous copies (``cp.async``): those are after what was before their
  start, and before what follows a wait for their group, or a phase of the mbarrier that they arrive at. After
  ``wait_group.read`` they have read their sources, and may still write;
- barriers (``bar.sync``, ``bar.red``; what a thread did before ``bar.arrive`` is before what those
  do next that wait), for the threads that take part. A thread that has ended counts as one that arrived. If more
  threads wait than a barrier's count, any of them may go on together, so that it orders nothing;
- ``bar.warp.sync`` between the lanes in its mask. Shuffles, votes and the like order nothing (CUDA C++ Programming
  Guide, "Warp Shuffle Functions");
- release and acquire: a fence and a strong write after it, or a releasing access, are before a strong read that finds
  the value (or what atomic updates made of it) and a fence after it, or an acquiring access. All four have a scope
  that includes the other thread. ``__threadfence()`` alone orders nothing. ``grid.sync()`` consists of these. Where the
  model wants fence and flag from one thread, two that met at a barrier between them will do too: all write,
  ``__threadfence()``, ``__syncthreads()``, and one thread sets the flag;
- observation: a strong write is before what follows a strong read that finds its value, or what atomic updates made of
  it. The thread that takes the last ticket may set the counter to zero. It is looked for in kernels that access one
  address in several ways (:mod:`cudatool.ptx.observation`), and the last 8 reads of a flag are remembered;
- mbarriers: what is before an arrival is before what follows a wait that finds the phase complete. So it is with a
  cluster's barrier, between whose arrival and wait nothing is ordered. Relaxed arrivals and waits need fences;
- launches, one of which runs at a time (streams are the business of :mod:`cudatool.sanitize`), and ``malloc`` in
  kernels: what was done with a block's memory before it is given out is over.

The engine also finds reads through caches that do not see what the launch writes, which no order makes right.
What ``ld.global.nc`` reads must be read-only for the entire lifetime of the kernel (CUDA C++ Programming Guide, Compute
Capability 5.x, Global Memory). What a texture fetch or surface read reads must not have been written before in the
launch (the same, "Read/Write Coherency"; PTX ISA, "Memory Hierarchy").

A plain read whose value an ``atom.cas`` compares before anything depends on it (:mod:`cudatool.ptx.guesses`) counts as
a strong one. That it races with strong writes by the model is said apart, once a line (``DefectCode.CAS_GUESS``).

Volatile accesses do not race. A write and a read of shared memory by two lanes of a warp that nothing orders are named
nevertheless, one pair of a launch, and so is a volatile access with an atomic update: not as a race, but as what only
warps in step put in order (``DefectCode.IN_STEP``).

Taken as the software device has it: a cluster is one block, so that scope ``.cluster`` is ``.cta``. Not looked at:
strong accesses of different sizes to the same bytes, which the model calls a race; and that a plain store to a flag
ends what atomic updates hand on of releases before it, which may hide a race beside one on the flag. Which threads met
at a barrier with a count is taken from the run: that others could have come first is seen where they wait at it, too.
Kernels' accesses to the host's memory are looked at (:mod:`.host_places`); those of the host itself are
:mod:`cudatool.sanitize`'s.

**The engine** (``_races.c``, ``_race_order.c``). One host thread runs all threads in some order; the engine decides
from that one run whether *another* order was possible. It keeps

- *moments*: a counter that grows with each synchronization; an access carries the moment when it was made;
- what each thread *knows*: for each thread of the launch the moment before which all its accesses happened before
  (a vector clock). Blocks know by a barrier's moment, warps by a warp's, and only what goes beyond that, by flags,
  partial barriers and masks, is kept per thread: as a tree over grid, blocks, warps and lanes whose parts are shared by
  all who know the same (the compression of Barracuda, PLDI 2017). The tree is lossless;
- for each byte its accesses that still matter: the last weak write, weak reads, strong accesses. An access drops those
  that happened before it and conflict with nothing that it does not conflict with, as FastTrack (PLDI 2009) does: a
  byte on which there is a race is always found, though not every pair of lines that race on it. Where a kernel has
  no fence and no acquiring access, blocks know nothing of each other, and two of other blocks stand for all.

What makes it fast: most accesses cannot race, which the arguments of a launch show before it runs
(:mod:`.independent`); the engine sees the others. The threads of a block run one after the other, and what they access
by one instruction mostly lies at a constant distance. Inlined code joins such accesses (``race_step``,
:mod:`.instrument`), and the engine looks at a whole run of them at the next synchronization: between two of these the
order does not change what races. Most memory needs one or two words of 8 bytes for four bytes, not lists of accesses;
``_races.c`` says what they hold.

The lists, flags and trees of a launch may take :data:`.race_engine.HISTORY_LIMIT`. A launch that needs more is looked
at no further, which its report says (``Defect.UNCHECKED``): with a part of the history, races could be false.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING

from cudatool.sim.jit.context import Context
from cudatool.sim.jit.instrument import Flag, Instrument, RaceMode, host_place, race_access, race_call

if TYPE_CHECKING:
    from cudatool.ptx import Instruction
    from cudatool.sim.jit.emit import Emitter

__all__ = [
    "CALLABLE",
    "NO_MOMENTS",
    "Arrival",
    "ClusterBarrier",
    "arrive",
    "cleared",
    "cluster",
    "commit",
    "fence",
    "is_wide",
    "mbarrier",
    "moments",
    "passed",
    "range_access",
    "strong",
    "wait",
    "warp_sync",
]


class Arrival(IntEnum):
    """What happens to an mbarrier."""

    INIT = 0
    ARRIVE = 1
    COPIES = 2
    """The asynchronous copies that the thread has begun arrive, or their bytes are complete."""
    UPDATE = 3
    """Something that releases nothing."""
    RELAXED = 4
    """It releases what was before the thread's last fence."""


class ClusterBarrier(IntEnum):
    """What a thread does at the barrier of a cluster."""

    ARRIVE = 0
    ARRIVE_RELAXED = 1
    WAIT = 2


# ---- what instrumented code calls ----

_LOAD = f"""  %race.p = getelementptr i8, ptr %context, i64 {Context.race.offset}
  %race = load ptr, ptr %race.p"""
_SHARED = f"""  %base.p = getelementptr i8, ptr %context, i64 {Context.shared.offset}
  %base = load i64, ptr %base.p"""


NO_MOMENTS = """
define internal void @after_barrier(ptr %context) alwaysinline { ret void }
define internal void @after_barriers(ptr %context, ptr %let, i32 %number, i32 %state, i32 %count) alwaysinline {
  ret void
}
define internal void @enter_block(ptr %context, i64 %index, i1 %fresh) alwaysinline { ret void }
define internal void @leave_block(ptr %context) alwaysinline { ret void }
"""


def moments() -> str:
    """Return what the scheduler calls."""
    return f"""
declare void @cudatool_race_barrier(ptr)
declare void @cudatool_race_barriers(ptr, ptr, i32, i32, i32)
declare void @cudatool_race_enter(ptr, i64, i64, i32)
declare void @cudatool_race_leave(ptr)
define internal void @after_barrier(ptr %context) alwaysinline {{
{_LOAD}
  call void @cudatool_race_barrier(ptr %race)
  ret void
}}
define internal void @after_barriers(ptr %context, ptr %let, i32 %number, i32 %state, i32 %count) alwaysinline {{
{_LOAD}
  call void @cudatool_race_barriers(ptr %race, ptr %let, i32 %number, i32 %state, i32 %count)
  ret void
}}
define internal void @enter_block(ptr %context, i64 %index, i1 %fresh) alwaysinline {{
{_LOAD}
{_SHARED}
  %fresh.i = zext i1 %fresh to i32
  call void @cudatool_race_enter(ptr %race, i64 %index, i64 %base, i32 %fresh.i)
  ret void
}}
define internal void @leave_block(ptr %context) alwaysinline {{
{_LOAD}
  call void @cudatool_race_leave(ptr %race)
  ret void
}}
"""


def _call(e: Emitter, name: str, *arguments: str) -> None:
    """Emit a call of the engine, if races are looked for."""
    if e.instrument & Instrument.RACECHECK:
        race_call(e, name, *arguments)


def is_wide(i: Instruction) -> bool:
    """Whether the scope of a strong access or a fence includes other blocks."""
    return not {"cta", "cluster"}.intersection(i.modifiers)


def strong(
    e: Emitter, i: Instruction, pointer: str, mode: RaceMode, *, wrote: str = "true", blind: bool = False
) -> None:
    """Emit that a strong access was made. `wrote` says whether (i1); `blind` that nothing of it is read."""
    if not e.instrument & Instrument.RACECHECK or not e.orders_by_flags:
        return
    flags = int(mode) | Flag.STRONG
    flags |= Flag.WIDE if is_wide(i) else 0
    flags |= Flag.ACQUIRE if {"acquire", "acq_rel"}.intersection(i.modifiers) else 0
    flags |= Flag.RELEASE if {"release", "acq_rel"}.intersection(i.modifiers) else 0
    flags |= Flag.BLIND if blind else 0
    address = e.op(f"ptrtoint ptr {pointer} to i64")
    _call(e, "strong", f"i64 {address}", f"i32 {int(flags)}", f"i32 {e.op(f'zext i1 {wrote} to i32')}", "i32 %t")


def range_access(e: Emitter, i: Instruction, space: str, pointer: str, size: str, mode: RaceMode) -> None:
    """Emit that an asynchronous copy accesses `size` bytes of shared or device memory."""
    if not e.instrument & Instrument.RACECHECK:
        return
    address = e.op(f"ptrtoint ptr {pointer} to i64")
    if space == "shared":
        offset = e.op(f"sub i64 {address}, {e.op('ptrtoint ptr %shared to i64')}")
        race_access(e, offset, size, mode, i.line, 1, Flag.ASYNC)
        return
    offset = e.op(f"sub i64 {address}, {e.field('arena_base')}")
    inside = e.op(f"icmp ult i64 {offset}, {e.field('arena_bytes')}")
    place, has_place = host_place(e, address, e.op(f"zext i32 {size} to i64"))
    with e.when(e.op(f"or i1 {inside}, {has_place}")):
        race_access(e, e.op(f"select i1 {inside}, i64 {offset}, i64 {place}"), size, mode, i.line, 0, Flag.ASYNC)


def fence(e: Emitter, i: Instruction) -> None:
    """Emit a fence of all memory. One of a proxy orders accesses of another kind than those that are looked at."""
    if "proxy" not in i.modifiers and "mbarrier_init" not in i.modifiers:
        _call(e, "fence", f"i32 {int(is_wide(i))}", "i32 %t")


def warp_sync(e: Emitter, masks: str) -> None:
    """Emit, in a warp function, that ``%lanes`` synchronize, whose member masks are at `masks`."""
    _call(e, "warp", "i64 %warp", "i32 %lanes", "ptr %slots", f"ptr {masks}")


def arrive(e: Emitter, numbers: str) -> None:
    """Emit, in a warp function, that ``%lanes`` arrive at the barriers whose numbers are at `numbers`."""
    _call(e, "arrive", "i64 %warp", "i32 %lanes", f"ptr {numbers}")


def commit(e: Emitter) -> None:
    """Emit that a group of asynchronous copies is complete as a group: others may follow."""
    _call(e, "commit", "i32 %t")


def wait(e: Emitter, keep: str = "-1", *, reads: bool = False) -> None:
    """Emit that the thread waited for all groups but the last `keep`, or for every copy; or for what they read."""
    _call(e, "wait", f"i32 {keep}", f"i32 {int(reads)}", "i32 %t")


def cluster(e: Emitter, what: ClusterBarrier) -> None:
    """Emit what the thread does at the barrier of its cluster."""
    _call(e, "cluster", f"i32 {int(what)}", "i32 %t")


def mbarrier(e: Emitter, pointer: str, what: Arrival) -> None:
    """Emit what was done to an mbarrier."""
    _call(e, "mbarrier", f"ptr {pointer}", f"i32 {int(what)}", "i32 %t")


def passed(e: Emitter, pointer: str, complete: str, *, relaxed: bool) -> None:
    """Emit that the thread looked whether a phase is complete (i1)."""
    if e.instrument & Instrument.RACECHECK:
        is_complete = e.op(f"zext i1 {complete} to i32")
        _call(e, "passed", f"ptr {pointer}", f"i32 {is_complete}", f"i32 {int(relaxed)}", "i32 %t")


def cleared(e: Emitter, address: str, size: str) -> None:
    """Emit that the heap gives out memory, unless its address is 0."""
    if e.instrument & Instrument.RACECHECK:
        with e.when(e.op(f"icmp ne i64 {address}, 0")):
            offset = e.op(f"sub i64 {address}, {e.field('arena_base')}")
            _call(e, "clear", f"i64 {offset}", f"i64 {size}")


CALLABLE = tuple(
    f"cudatool_race_{name}"
    for name in (
        *(
            "access",
            "arrive",
            "barrier",
            "barriers",
            "cached",
            "clear",
            "cluster",
            "commit",
            "enter",
            "fence",
            "fetched",
            "leave",
            "mbarrier",
            "open",
        ),
        *("passed", "strong", "wait", "warp"),
    )
)
"""The functions of the engine that native code calls."""
