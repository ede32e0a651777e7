"""Instrumented accesses: what the checkers and the recorder of footprints see, as LLVM IR.

Every load, store and atomic passes :func:`observe` first. With no instrument it emits nothing. Checks are made inline
where the answer is usually yes; a defect goes to ``@report``, out of line, which counts it by instruction and keeps
the first of each. A bad access is suppressed: it is made to memory that nobody reads, so that the kernel goes on.

The maps (:mod:`cudatool.sim.jit.shadow`) have a byte for each byte of the device's memory, so that an access of n bytes
is checked by one load of n bytes, and a cell for each four bytes where races are looked for.
"""

from __future__ import annotations

import ctypes
from enum import IntEnum, IntFlag
from typing import TYPE_CHECKING

from cudatool.sim.jit.context import Context

if TYPE_CHECKING:
    from cudatool.sim.jit.emit import Emitter

__all__ = [
    "CELL",
    "FREED_BLOCK",
    "Defect",
    "FoundRecord",
    "Instrument",
    "Mode",
    "acquire",
    "block_freed",
    "block_taken",
    "functions",
    "observe",
    "with_gap",
]


class Instrument(IntFlag):
    """What code is instrumented for."""

    NONE = 0
    FOOTPRINT = 1
    MEMCHECK = 2
    INITCHECK = 4
    RACECHECK = 8
    SYNCCHECK = 16


class Defect(IntEnum):
    """What ``@report`` is told."""

    INVALID = 0
    """No memory there that the kernel may use."""
    MISALIGNED = 1
    UNINITIALIZED = 2
    READ_AFTER_WRITE = 3
    """Races: two threads, nothing between them. Named by what came second."""
    WRITE_AFTER_READ = 4
    WRITE_AFTER_WRITE = 5
    BARRIER_DIVERGED = 6
    """Not all threads that a barrier is for came to it."""
    MASK_WITHOUT_CALLER = 7
    """The member mask of a warp operation lacks a thread that executes it."""


_KINDS = 8


class Mode(IntEnum):
    """Of an access; flags of a cell's entries too."""

    READ = 1
    WRITE = 2
    ATOMIC = 3


class FoundRecord(ctypes.Structure):
    """The first defect of its kind at an instruction. `other_*` are of the earlier access of a race.

    Attributes
    ----------
    line, other_line
        Of the PTX.
    thread, other_thread
        Number in the block.
    other_id
        The moment of the earlier access: tells its block (:attr:`.shadow.Shadow.block_of`).
    space
        What `address` is an offset in: 0 device memory or generic (an address), 1 shared, 2 local.
    """

    _fields_ = (
        ("kind", ctypes.c_uint32),
        ("line", ctypes.c_uint32),
        ("address", ctypes.c_uint64),
        ("size", ctypes.c_uint32),
        ("mode", ctypes.c_uint32),
        ("block", ctypes.c_uint32 * 3),
        ("thread", ctypes.c_uint32),
        ("other_line", ctypes.c_uint32),
        ("other_thread", ctypes.c_uint32),
        ("other_id", ctypes.c_uint32),
        ("space", ctypes.c_uint32),
    )


CELL = 48
"""Bytes of a cell: the last write and two reads, each moment, warp's moment, line, thread | mask << 16 | mode << 24."""

_WHO = "i32 %bx, i32 %by, i32 %bz, i32 %t"


def observe(e: Emitter, space: str, pointer: str, size: int, mode: Mode, *, line: int, align: int, strong: bool) -> str:
    """Emit the checks of an access and what records it; return the pointer to use, elsewhere if it must not be made."""
    kinds = e.instrument
    if space == "entry":
        return pointer
    address = e.op(f"ptrtoint ptr {pointer} to i64")
    if kinds & Instrument.MEMCHECK:
        pointer = _check_memory(e, space, pointer, address, size, mode, line, align)
        address = e.op(f"ptrtoint ptr {pointer} to i64")
    if space == "shared":
        if kinds & Instrument.RACECHECK:
            base = e.op("ptrtoint ptr %shared to i64")
            _check_race(e, "race_shared", e.op(f"sub i64 {address}, {base}"), size, mode, line, 1, strong)
        return pointer
    if space == "local" or not kinds & ~Instrument.MEMCHECK & ~Instrument.SYNCCHECK:
        return pointer
    offset = e.op(f"sub i64 {address}, {e.field('arena_base')}")
    inside = e.op(f"icmp ult i64 {offset}, {e.field('arena_bytes')}")
    device, after = e.new_label(), e.new_label()
    outside = after
    if space == "generic" and kinds & Instrument.RACECHECK:
        outside = e.new_label()
    e.emit(f"br i1 {inside}, label %{device}, label %{outside}")
    if outside != after:
        e.label(outside)
        base = e.op("ptrtoint ptr %shared to i64")
        within = e.op(f"sub i64 {address}, {base}")
        is_shared = e.op(f"icmp ult i64 {within}, {e.field('shared_bytes')}")
        shared = e.new_label()
        e.emit(f"br i1 {is_shared}, label %{shared}, label %{after}")
        e.label(shared)
        _check_race(e, "race_shared", within, size, mode, line, 1, strong)
        e.emit(f"br label %{after}")
    e.label(device)
    if kinds & Instrument.INITCHECK:
        _check_initialized(e, space, address, offset, size, mode, line)
    if kinds & Instrument.RACECHECK:
        _check_race(e, "race_global", offset, size, mode, line, 0, strong)
    if kinds & Instrument.FOOTPRINT:
        _mark(e, space, offset, size, mode)
    e.emit(f"br label %{after}")
    e.label(after)
    return pointer


def acquire(e: Emitter) -> None:
    """Emit what a fence, or an access that orders others, means for races: nothing is looked for across it."""
    if e.instrument & Instrument.RACECHECK:
        e.emit("call void @race_fence(ptr %context)")


# ---- the heap of malloc in kernels: each block is memory of its own ----

FREED_BLOCK = 2
"""What the map of valid bytes (otherwise 0 and 1) holds for a block of the heap that was freed."""
_GAP = 16  # bytes behind each block that nobody may use


def with_gap(e: Emitter, size: str) -> str:
    """Return what to ask the heap for: under memcheck, room behind the block too."""
    return e.op(f"add i64 {size}, {_GAP}") if e.instrument & Instrument.MEMCHECK else size


def block_taken(e: Emitter, block: str, size: str) -> None:
    """Emit that the heap gave out `block`, unless that is null."""
    if e.instrument & (Instrument.MEMCHECK | Instrument.INITCHECK):
        e.define(_BLOCK_BYTES)
        e.define(_BLOCK_TAKEN.format(checked="true" if e.instrument & Instrument.MEMCHECK else "false"))
        e.emit(f"call void @block_taken(ptr %context, i64 {block}, i64 {size})")


def block_freed(e: Emitter, block: str) -> None:
    """Emit that `block` is about to be given back to the heap, if it is a block."""
    if e.instrument & Instrument.MEMCHECK:
        e.define(_BLOCK_BYTES)
        e.define(_BLOCK_FREED)
        e.emit(f"call void @block_freed(ptr %context, i64 {block})")


def _ones(size: int) -> int:
    return int.from_bytes(bytes([1]) * size, "little")


def _shadow(e: Emitter, name: str, offset: str) -> str:
    base = e.op(f"inttoptr i64 {e.field(name)} to ptr")
    return e.op(f"getelementptr i8, ptr {base}, i64 {offset}")


def _report(
    e: Emitter, defect: Defect, line: int, address: str, size: int, mode: Mode, space: int, other: str = ""
) -> None:
    arguments = other or "i32 0, i32 0, i32 0"
    e.emit(
        f"call void @report(ptr %context, i32 {int(defect)}, i32 {line}, i64 {address}, i32 {size}, i32 {int(mode)}, "
        f"i32 {space}, {_WHO}, {arguments})"
    )


def _check_memory(
    e: Emitter, space: str, pointer: str, address: str, size: int, mode: Mode, line: int, align: int
) -> str:
    number = {"shared": 1, "local": 2}.get(space, 0)
    shown = address
    if space in ("shared", "local"):
        base = e.op(f"ptrtoint ptr %{space} to i64")
        shown = e.op(f"sub i64 {address}, {base}")
        total = e.field("shared_bytes") if space == "shared" else str(e.layout.local_bytes)
        limit = e.op(f"sub i64 {total}, {size - 1}")
        below = e.op(f"icmp slt i64 {shown}, {limit}")
        valid = e.op(f"and i1 {below}, {e.op(f'icmp sge i64 {shown}, 0')}")
    else:
        base = e.op("ptrtoint ptr %local to i64")
        valid = e.op(
            f"call i1 @valid{size}(ptr %context, i64 {address}, ptr %shared, i64 {base}, i64 {e.layout.local_bytes})"
        )
        e.validated.add(size)
    if align > 1:
        low = e.op(f"and i64 {shown}, {align - 1}")
        aligned = e.op(f"icmp eq i64 {low}, 0")
        good = e.op(f"and i1 {valid}, {aligned}")
        kind = e.op(f"select i1 {valid}, i32 {int(Defect.MISALIGNED)}, i32 {int(Defect.INVALID)}")
    else:
        good, kind = valid, str(int(Defect.INVALID))
    before, bad, after = e.new_label(), e.new_label(), e.new_label()
    e.emit(f"br label %{before}")
    e.label(before)
    e.emit(f"br i1 {good}, label %{after}, label %{bad}, !prof !4")
    e.label(bad)
    e.emit(
        f"call void @report(ptr %context, i32 {kind}, i32 {line}, i64 {shown}, i32 {size}, i32 {int(mode)}, "
        f"i32 {number}, {_WHO}, i32 0, i32 0, i32 0)"
    )
    nowhere = e.op(f"inttoptr i64 {e.field('nowhere_read' if mode is Mode.READ else 'nowhere')} to ptr")
    e.emit(f"br label %{after}")
    e.label(after)
    return e.op(f"phi ptr [ {pointer}, %{before} ], [ {nowhere}, %{bad} ]")


def _check_initialized(e: Emitter, space: str, address: str, offset: str, size: int, mode: Mode, line: int) -> None:
    cell = _shadow(e, "shadow_init", offset)
    width = f"i{8 * size}"
    if mode is not Mode.WRITE:
        state = e.op(f"load {width}, ptr {cell}, align 1")
        known = e.op(f"icmp eq {width} {state}, {_ones(size)}")
        bad, after = e.new_label(), e.new_label()
        e.emit(f"br i1 {known}, label %{after}, label %{bad}, !prof !4")
        e.label(bad)
        _report(e, Defect.UNINITIALIZED, line, address, size, mode, 0)
        e.emit(f"br label %{after}")
        e.label(after)
    if mode is not Mode.READ:
        e.emit(f"store {width} {_ones(size)}, ptr {cell}, align 1{e.group(space)}")


def _check_race(
    e: Emitter, cells: str, offset: str, size: int, mode: Mode, line: int, space: int, strong: bool
) -> None:
    """Look at each word that the access has a part of. An access that is not aligned is taken for one that is."""
    flags = int(mode) | (4 if strong or mode is Mode.ATOMIC else 0)
    for first in range(0, size, 4):
        at = e.op(f"add i64 {offset}, {first}") if first else offset
        if size < 4:
            shift = e.op(f"trunc i64 {e.op(f'and i64 {at}, 3')} to i32")
            mask = e.op(f"and i32 {e.op(f'shl i32 {(1 << size) - 1}, {shift}')}, 15")
        else:
            mask = "15"
        quick = "read" if mode is Mode.READ else "write"
        e.emit(
            f"call void @race_{quick}(ptr %context, i64 {e.field(cells)}, i64 {at}, i32 {mask}, i32 {flags}, "
            f"i32 {line}, i32 {space}, i32 {min(size, 4)}, {_WHO})"
        )


_MAPS = {Mode.READ: "shadow_read", Mode.WRITE: "shadow_write", Mode.ATOMIC: "shadow_atomic"}


def _mark(e: Emitter, space: str, offset: str, size: int, mode: Mode) -> None:
    """Set a byte of the footprint per byte, and mark the page."""
    group = e.group(space)
    cell = _shadow(e, _MAPS[mode], offset)
    e.emit(f"store i{8 * size} {_ones(size)}, ptr {cell}, align 1{group}")
    page = e.op(f"lshr i64 {offset}, 12")
    e.emit(f"store i8 1, ptr {_shadow(e, 'shadow_pages', page)}{group}")


# ---- functions that instrumented code calls ----


def _load(name: str, result: str, kind: str = "") -> str:
    """Return code that loads a field of the context that changes during a launch."""
    member = getattr(Context, name)
    kind = kind or f"i{8 * member.size}"
    pointer = f"%{result}.p"
    return (
        f"  {pointer} = getelementptr i8, ptr %context, i64 {member.offset}\n  %{result} = load {kind}, ptr {pointer}"
    )


def _put(name: str, value: str, temporary: str) -> str:
    member = getattr(Context, name)
    return (
        f"  %{temporary} = getelementptr i8, ptr %context, i64 {member.offset}\n"
        f"  store i{8 * member.size} {value}, ptr %{temporary}"
    )


def functions(kinds: Instrument, validated: set[int]) -> str:
    """Return the functions that code instrumented for `kinds` calls. The scheduler calls the first two always."""
    parts = []
    if kinds & Instrument.RACECHECK:
        parts.append(_RACE_MOMENTS)
        parts.append(_race())
    else:
        parts.append(_NO_MOMENTS)
    if kinds & ~Instrument.FOOTPRINT:
        parts.append(_report_function())
    parts += [_valid(size) for size in sorted(validated)]
    parts.append('!4 = !{!"branch_weights", i32 2000, i32 1}')
    return "\n".join(parts)


_NO_MOMENTS = """
define internal void @after_barrier(ptr %context) alwaysinline { ret void }
define internal void @after_collective(ptr %context, i64 %warp) alwaysinline { ret void }
define internal void @begin_block(ptr %context) alwaysinline { ret void }
"""

_BLOCK_BYTES = """declare i64 @cudatool_block_bytes(i64, i64)
declare void @llvm.memset.p0.i64(ptr, i8, i64, i1)"""

_BLOCK_TAKEN = f"""
define internal void @block_taken(ptr %context, i64 %block, i64 %size) noinline {{{{
entry:
{_load("heap", "heap")}
  %none = icmp eq i64 %block, 0
  br i1 %none, label %end, label %taken
taken:
{_load("arena_base", "base")}
{_load("shadow_valid", "valid", "ptr")}
{_load("shadow_init", "init", "ptr")}
  %offset = sub i64 %block, %base
  br i1 {{checked}}, label %mark, label %values
mark:
  %whole = call i64 @cudatool_block_bytes(i64 %heap, i64 %block)
  %bytes = getelementptr i8, ptr %valid, i64 %offset
  call void @llvm.memset.p0.i64(ptr %bytes, i8 0, i64 %whole, i1 false)
  call void @llvm.memset.p0.i64(ptr %bytes, i8 1, i64 %size, i1 false)
  br label %values
values:
  %states = getelementptr i8, ptr %init, i64 %offset
  call void @llvm.memset.p0.i64(ptr %states, i8 0, i64 %size, i1 false)
  br label %end
end:
  ret void
}}}}"""

_BLOCK_FREED = f"""
define internal void @block_freed(ptr %context, i64 %block) noinline {{
entry:
{_load("heap", "heap")}
{_load("arena_base", "base")}
{_load("shadow_valid", "valid", "ptr")}
  %whole = call i64 @cudatool_block_bytes(i64 %heap, i64 %block)
  %offset = sub i64 %block, %base
  %bytes = getelementptr i8, ptr %valid, i64 %offset
  br label %next
next:
  %i = phi i64 [ 0, %entry ], [ %i.next, %mark ]
  %done = icmp uge i64 %i, %whole
  br i1 %done, label %end, label %mark
mark:
  %byte = getelementptr i8, ptr %bytes, i64 %i
  %was = load i8, ptr %byte
  %now = mul i8 %was, {FREED_BLOCK}
  store i8 %now, ptr %byte
  %i.next = add i64 %i, 1
  br label %next
end:
  ret void
}}"""

# A moment is what passes between two barriers of a block; blocks never share one. Warps have moments of their own.
_RACE_MOMENTS = f"""
define internal void @after_barrier(ptr %context) noinline {{
{_load("race_moment", "m")}
  %next = add i32 %m, 1
{_put("race_moment", "%next", "p")}
  ret void
}}

define internal void @after_collective(ptr %context, i64 %warp) alwaysinline {{
{_load("race_warps", "w", "ptr")}
  %mine = getelementptr i32, ptr %w, i64 %warp
  %m = load i32, ptr %mine
  %next = add i32 %m, 1
  store i32 %next, ptr %mine
  ret void
}}

define internal void @begin_block(ptr %context) noinline {{
{_load("race_moment", "m")}
  %next = add i32 %m, 1
{_put("race_moment", "%next", "p1")}
{_put("race_block", "%next", "p2")}
{_load("race_starts", "s", "ptr")}
{_load("race_blocks", "n")}
  %n.x = zext i32 %n to i64
  %start = getelementptr i32, ptr %s, i64 %n.x
  store i32 %next, ptr %start
  %n.1 = add i32 %n, 1
{_put("race_blocks", "%n.1", "p3")}
{_put("race_acquired", "0", "p4")}
  ret void
}}

define internal void @race_fence(ptr %context) noinline {{
  call void @after_barrier(ptr %context)
{_load("race_blocks", "n")}
  %n.x = zext i32 %n to i64
{_load("race_released", "r", "ptr")}
  %mine = getelementptr i32, ptr %r, i64 %n.x
{_load("race_moment", "m")}
  store i32 %m, ptr %mine
{_put("race_acquired", "1", "p")}
  ret void
}}
"""


_RACE = (
    "ptr %context, i64 %cells, i64 %offset, i32 %mask, i32 %flags, i32 %line, i32 %space, i32 %size, "
    "i32 %bx, i32 %by, i32 %bz, i32 %t"
)


def _own_entry() -> str:
    """Return code that makes ``%own``, this access's entry for ``%cell``; entries before ``%since`` do not matter."""
    return f"""  %word = lshr i64 %offset, 2
  %scaled = mul i64 %word, {CELL}
  %address = add i64 %cells, %scaled
  %cell = inttoptr i64 %address to ptr
{_load("race_moment", "moment")}
{_load("race_launch", "launch.begin")}
  %is.shared = icmp ne i32 %space, 0
  %since = select i1 %is.shared, i32 %moment, i32 %launch.begin
{_load("race_warps", "warps", "ptr")}
  %warp = lshr i32 %t, 5
  %warp.x = zext i32 %warp to i64
  %warp.p = getelementptr i32, ptr %warps, i64 %warp.x
  %warp.moment = load i32, ptr %warp.p
  %mask.s = shl i32 %mask, 16
  %flags.s = shl i32 %flags, 24
  %who.a = or i32 %t, %mask.s
  %who = or i32 %who.a, %flags.s
  %own.0 = insertelement <4 x i32> poison, i32 %moment, i32 0
  %own.1 = insertelement <4 x i32> %own.0, i32 %warp.moment, i32 1
  %own.2 = insertelement <4 x i32> %own.1, i32 %line, i32 2
  %own = insertelement <4 x i32> %own.2, i32 %who, i32 3"""


def _race() -> str:
    """Return ``@race``: compare an access to a word with the last write and two reads, then enter it.

    Entries are of another launch, or ordered by a barrier, if their moment is not the block's current one; except in
    device memory, where an entry of another block of the launch (moment before the block's first, after the launch's)
    is in no order, unless that block released it by a fence and this one has had a fence since it began.
    """

    def entry(name: str, offset: int) -> str:
        return f"""
  %{name}.p = getelementptr i8, ptr %cell, i64 {offset}
  %{name} = load <4 x i32>, ptr %{name}.p, align 16
  %{name}.clash = call i1 @clash(ptr %context, <4 x i32> %{name}, <4 x i32> %own, i32 %space)"""

    # The two last reads are kept, by different threads: a write that follows meets another thread's among them.
    enter_read = """  %last.p = getelementptr i8, ptr %cell, i64 16
  %last = load <4 x i32>, ptr %last.p, align 16
  %last.who = extractelement <4 x i32> %last, i32 3
  %differs = xor i32 %last.who, %t
  %thread.bits = and i32 %differs, 65535
  %other.thread = icmp ne i32 %thread.bits, 0
  br i1 %other.thread, label %shift, label %enter.last
shift:
  %second.p2 = getelementptr i8, ptr %cell, i64 32
  store <4 x i32> %last, ptr %second.p2, align 16
  br label %enter.last
enter.last:
  store <4 x i32> %own, ptr %last.p, align 16
  ret void"""
    return f"""
define internal i1 @clash(ptr %context, <4 x i32> %old, <4 x i32> %own, i32 %space) alwaysinline {{
entry:
  %moment = extractelement <4 x i32> %old, i32 0
{_load("race_launch", "launch")}
  %recent = icmp uge i32 %moment, %launch
  br i1 %recent, label %look, label %no
look:
  %old.who = extractelement <4 x i32> %old, i32 3
  %own.who = extractelement <4 x i32> %own, i32 3
  %both = and i32 %old.who, %own.who
  %bytes = and i32 %both, 983040
  %overlap = icmp ne i32 %bytes, 0
  %strong = and i32 %both, 67108864
  %weak = icmp eq i32 %strong, 0
  %may = and i1 %overlap, %weak
  br i1 %may, label %order, label %no
order:
  %now = extractelement <4 x i32> %own, i32 0
  %same = icmp eq i32 %moment, %now
  br i1 %same, label %threads, label %blocks
threads:
  %difference = xor i32 %old.who, %own.who
  %apart = and i32 %difference, 65535
  %other = icmp ne i32 %apart, 0
  %warps = and i32 %difference, 65504
  %other.warp = icmp ne i32 %warps, 0
  %old.warp = extractelement <4 x i32> %old, i32 1
  %own.warp = extractelement <4 x i32> %own, i32 1
  %no.collective = icmp eq i32 %old.warp, %own.warp
  %unordered = or i1 %other.warp, %no.collective
  %clash = and i1 %other, %unordered
  ret i1 %clash
blocks:
  %global = icmp eq i32 %space, 0
{_load("race_block", "mine")}
  %theirs = icmp ult i32 %moment, %mine
  %foreign = and i1 %global, %theirs
  br i1 %foreign, label %released, label %no
released:
  %ordered = call i1 @released(ptr %context, i32 %moment)
  %race = xor i1 %ordered, true
  ret i1 %race
no:
  ret i1 false
}}

define internal i1 @released(ptr %context, i32 %moment) noinline {{
entry:
{_load("race_acquired", "acquired")}
  %none = icmp eq i32 %acquired, 0
  br i1 %none, label %no, label %search
search:
{_load("race_starts", "s", "ptr")}
{_load("race_blocks", "n")}
  br label %half
half:
  %low = phi i32 [ 0, %search ], [ %low.next, %half.end ]
  %high = phi i32 [ %n, %search ], [ %high.next, %half.end ]
  %width = sub i32 %high, %low
  %found = icmp ule i32 %width, 1
  br i1 %found, label %answer, label %half.end
half.end:
  %half.width = lshr i32 %width, 1
  %middle = add i32 %low, %half.width
  %middle.x = zext i32 %middle to i64
  %start.p = getelementptr i32, ptr %s, i64 %middle.x
  %start = load i32, ptr %start.p
  %before = icmp ule i32 %start, %moment
  %low.next = select i1 %before, i32 %middle, i32 %low
  %high.next = select i1 %before, i32 %high, i32 %middle
  br label %half
answer:
  %block = add i32 %low, 1
  %block.x = zext i32 %block to i64
{_load("race_released", "r", "ptr")}
  %until.p = getelementptr i32, ptr %r, i64 %block.x
  %until = load i32, ptr %until.p
  %covered = icmp ult i32 %moment, %until
  ret i1 %covered
no:
  ret i1 false
}}

; Most accesses meet entries that are too old to matter. For shared memory that is any other moment than the block's.
define internal void @race_read({_RACE}) alwaysinline {{
entry:
{_own_entry()}
  %written = load <4 x i32>, ptr %cell, align 16
  %when = extractelement <4 x i32> %written, i32 0
  %old = icmp ult i32 %when, %since
  br i1 %old, label %enter, label %slow, !prof !4
enter:
{enter_read}
slow:
  call void @race(ptr %context, i64 %cells, i64 %offset, i32 %mask, i32 %flags, i32 %line, i32 %space, i32 %size,
    {_WHO})
  ret void
}}

define internal void @race_write({_RACE}) alwaysinline {{
entry:
{_own_entry()}
  %a.p = getelementptr i8, ptr %cell, i64 16
  %b.p = getelementptr i8, ptr %cell, i64 32
  %written = load i32, ptr %cell, align 16
  %a = load i32, ptr %a.p, align 16
  %b = load i32, ptr %b.p, align 16
  %written.old = icmp ult i32 %written, %since
  %a.old = icmp ult i32 %a, %since
  %b.old = icmp ult i32 %b, %since
  %reads.old = and i1 %a.old, %b.old
  %all.old = and i1 %written.old, %reads.old
  br i1 %all.old, label %enter, label %slow, !prof !4
enter:
  store <4 x i32> %own, ptr %cell, align 16
  ret void
slow:
  call void @race(ptr %context, i64 %cells, i64 %offset, i32 %mask, i32 %flags, i32 %line, i32 %space, i32 %size,
    {_WHO})
  ret void
}}

define internal void @race({_RACE}) noinline {{
entry:
{_own_entry()}
  %mode = and i32 %flags, 3
  %reads.only = icmp eq i32 %mode, {int(Mode.READ)}
{entry("written", 0)}
  br i1 %written.clash, label %after.write, label %check.reads
after.write:
  %w.kind = select i1 %reads.only, i32 {int(Defect.READ_AFTER_WRITE)}, i32 {int(Defect.WRITE_AFTER_WRITE)}
  call void @report_race(ptr %context, i32 %w.kind, i32 %line, i64 %offset, i32 %size, i32 %mode, i32 %space, {_WHO},
    <4 x i32> %written)
  br label %check.reads
check.reads:
  br i1 %reads.only, label %enter.read, label %write
write:
{entry("first", 16)}
  br i1 %first.clash, label %after.first, label %second.read
after.first:
  call void @report_race(ptr %context, i32 {int(Defect.WRITE_AFTER_READ)}, i32 %line, i64 %offset, i32 %size,
    i32 %mode, i32 %space, {_WHO}, <4 x i32> %first)
  br label %enter.write
second.read:
{entry("second", 32)}
  br i1 %second.clash, label %after.second, label %enter.write
after.second:
  call void @report_race(ptr %context, i32 {int(Defect.WRITE_AFTER_READ)}, i32 %line, i64 %offset, i32 %size,
    i32 %mode, i32 %space, {_WHO}, <4 x i32> %second)
  br label %enter.write
enter.write:
  store <4 x i32> %own, ptr %cell, align 16
  ret void
enter.read:
{enter_read}
}}

define internal void @report_race(ptr %context, i32 %kind, i32 %line, i64 %address, i32 %size, i32 %mode, i32 %space,
    {_WHO}, <4 x i32> %other) noinline {{
  %moment = extractelement <4 x i32> %other, i32 0
  %other.line = extractelement <4 x i32> %other, i32 2
  %other.who = extractelement <4 x i32> %other, i32 3
  %other.thread = and i32 %other.who, 65535
  call void @report(ptr %context, i32 %kind, i32 %line, i64 %address, i32 %size, i32 %mode, i32 %space,
    i32 %bx, i32 %by, i32 %bz, i32 %t, i32 %other.line, i32 %other.thread, i32 %moment)
  ret void
}}
"""


def _report_function() -> str:
    offsets = {name: getattr(FoundRecord, name).offset for name, _ in FoundRecord._fields_}
    values = {
        "kind": "%kind",
        "line": "%line",
        "size": "%size",
        "mode": "%mode",
        "thread": "%t",
        "other_line": "%other.line",
        "other_thread": "%other.thread",
        "other_id": "%other.id",
        "space": "%space",
    }
    stores = [
        f"  %f.{name} = getelementptr i8, ptr %record, i64 {offsets[name]}\n  store i32 {value}, ptr %f.{name}"
        for name, value in values.items()
    ]
    for axis, value in enumerate(("%bx", "%by", "%bz")):
        stores.append(
            f"  %f.block{axis} = getelementptr i8, ptr %record, i64 {offsets['block'] + 4 * axis}\n"
            f"  store i32 {value}, ptr %f.block{axis}"
        )
    body = "\n".join(stores)
    return f"""
define internal void @report(ptr %context, i32 %kind, i32 %line, i64 %address, i32 %size, i32 %mode, i32 %space,
    {_WHO}, i32 %other.line, i32 %other.thread, i32 %other.id) noinline cold {{
entry:
{_load("found_lines", "lines")}
  %known = icmp ult i32 %line, %lines
  %row = select i1 %known, i32 %line, i32 0
  %row.x = zext i32 %row to i64
  %kind.x = zext i32 %kind to i64
  %first = mul i64 %row.x, {_KINDS}
  %index = add i64 %first, %kind.x
{_load("found_counts", "counts", "ptr")}
  %count.p = getelementptr i32, ptr %counts, i64 %index
  %count = atomicrmw add ptr %count.p, i32 1 monotonic
  %new = icmp eq i32 %count, 0
  br i1 %new, label %keep, label %end
keep:
{_load("found_records", "records", "ptr")}
  %number = atomicrmw add ptr %records, i64 1 monotonic
{_load("found_capacity", "capacity")}
  %room = icmp ult i64 %number, %capacity
  br i1 %room, label %write, label %end
write:
  %scaled = mul i64 %number, {ctypes.sizeof(FoundRecord)}
  %at = add i64 %scaled, 16
  %record = getelementptr i8, ptr %records, i64 %at
  %f.address = getelementptr i8, ptr %record, i64 {offsets["address"]}
  store i64 %address, ptr %f.address
{body}
  br label %end
end:
  ret void
}}
"""


def _valid(size: int) -> str:
    """Return ``@valid<size>``: whether a generic address is memory that the kernel may use, for `size` bytes."""
    width = f"i{8 * size}"
    return f"""
define internal i1 @valid{size}(ptr %context, i64 %address, ptr %shared, i64 %local, i64 %local.bytes) alwaysinline {{
entry:
{_load("arena_base", "base")}
{_load("arena_bytes", "bytes")}
  %offset = sub i64 %address, %base
  %inside = icmp ult i64 %offset, %bytes
  br i1 %inside, label %device, label %elsewhere, !prof !4
device:
{_load("shadow_valid_pages", "pages", "ptr")}
  %page = lshr i64 %offset, 12
  %page.p = getelementptr i8, ptr %pages, i64 %page
  %state = load i8, ptr %page.p
  %whole = icmp eq i8 %state, 1
  %in.page = and i64 %offset, 4095
  %fits = icmp ule i64 %in.page, {4096 - size}
  %yes = and i1 %whole, %fits
  br i1 %yes, label %good, label %bytewise
good:
  ret i1 true
bytewise:
  %b = call i1 @valid_bytes{size}(ptr %context, i64 %offset)
  ret i1 %b
elsewhere:
  %e = call i1 @elsewhere{size}(ptr %context, i64 %address, ptr %shared, i64 %local, i64 %local.bytes)
  ret i1 %e
}}

define internal i1 @valid_bytes{size}(ptr %context, i64 %offset) {{
entry:
{_load("shadow_valid", "bytes", "ptr")}
{_load("shadow_valid_pages", "pages", "ptr")}
  %last = add i64 %offset, {size - 1}
  %page.a = lshr i64 %offset, 12
  %page.b = lshr i64 %last, 12
  %a.p = getelementptr i8, ptr %pages, i64 %page.a
  %b.p = getelementptr i8, ptr %pages, i64 %page.b
  %a = load i8, ptr %a.p
  %b = load i8, ptr %b.p
  %both = or i8 %a, %b
  %none = icmp eq i8 %both, 0
  br i1 %none, label %no, label %look
look:
  %states.p = getelementptr i8, ptr %bytes, i64 %offset
  %states = load {width}, ptr %states.p, align 1
  %known = icmp eq {width} %states, {_ones(size)}
  br i1 %known, label %yes, label %whole
whole:
  %pages.whole.a = icmp eq i8 %a, 1
  %pages.whole.b = icmp eq i8 %b, 1
  %all = and i1 %pages.whole.a, %pages.whole.b
  ret i1 %all
yes:
  ret i1 true
no:
  ret i1 false
}}

define internal i1 @elsewhere{size}(ptr %context, i64 %address, ptr %shared, i64 %local, i64 %local.bytes) noinline {{
entry:
  %shared.i = ptrtoint ptr %shared to i64
{_load("shared_bytes", "shared.bytes")}
{_load("params", "params")}
  %s = sub i64 %address, %shared.i
  %s.last = add i64 %s, {size}
  %s.low = icmp ult i64 %s, %shared.bytes
  %s.high = icmp ule i64 %s.last, %shared.bytes
  %in.shared = and i1 %s.low, %s.high
  %l = sub i64 %address, %local
  %l.last = add i64 %l, {size}
  %l.low = icmp ult i64 %l, %local.bytes
  %l.high = icmp ule i64 %l.last, %local.bytes
  %in.local = and i1 %l.low, %l.high
  %p = sub i64 %address, %params
  %in.params = icmp ult i64 %p, 32768
  %some.a = or i1 %in.shared, %in.local
  %some = or i1 %some.a, %in.params
  br i1 %some, label %yes, label %host
host:
{_load("host_ranges", "ranges", "ptr")}
{_load("host_count", "count")}
  br label %next
next:
  %i = phi i64 [ 0, %host ], [ %i.next, %try ]
  %done = icmp uge i64 %i, %count
  br i1 %done, label %no, label %try
try:
  %i.2 = shl i64 %i, 1
  %start.p = getelementptr i64, ptr %ranges, i64 %i.2
  %start = load i64, ptr %start.p
  %i.21 = or i64 %i.2, 1
  %size.p = getelementptr i64, ptr %ranges, i64 %i.21
  %bytes = load i64, ptr %size.p
  %h = sub i64 %address, %start
  %h.last = add i64 %h, {size}
  %h.low = icmp ult i64 %h, %bytes
  %h.high = icmp ule i64 %h.last, %bytes
  %in.host = and i1 %h.low, %h.high
  %i.next = add i64 %i, 1
  br i1 %in.host, label %yes, label %next
yes:
  ret i1 true
no:
  ret i1 false
}}
"""
