"""The functions that instrumented code calls, as LLVM IR: is an address valid, does an access race, what was found."""

from __future__ import annotations

import ctypes

from cudatool.sim.jit.context import Context
from cudatool.sim.jit.instrument import CELL, KINDS, WHO, Defect, FoundRecord, Instrument, Mode, ones

__all__ = ["functions", "load_field", "store_field"]


def load_field(name: str, result: str, kind: str = "") -> str:
    """Return code that loads a field of the context that changes during a launch."""
    member = getattr(Context, name)
    kind = kind or f"i{8 * member.size}"
    pointer = f"%{result}.p"
    return (
        f"  {pointer} = getelementptr i8, ptr %context, i64 {member.offset}\n  %{result} = load {kind}, ptr {pointer}"
    )


def store_field(name: str, value: str, temporary: str) -> str:
    """Return code that stores one."""
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

# A moment is what passes between two barriers of a block; blocks never share one. Warps have moments of their own.
_RACE_MOMENTS = f"""
define internal void @after_barrier(ptr %context) noinline {{
{load_field("race_moment", "m")}
  %next = add i32 %m, 1
{store_field("race_moment", "%next", "p")}
  ret void
}}

define internal void @after_collective(ptr %context, i64 %warp) alwaysinline {{
{load_field("race_warps", "w", "ptr")}
  %mine = getelementptr i32, ptr %w, i64 %warp
  %m = load i32, ptr %mine
  %next = add i32 %m, 1
  store i32 %next, ptr %mine
  ret void
}}

define internal void @begin_block(ptr %context) noinline {{
{load_field("race_moment", "m")}
  %next = add i32 %m, 1
{store_field("race_moment", "%next", "p1")}
{store_field("race_block", "%next", "p2")}
{load_field("race_starts", "s", "ptr")}
{load_field("race_blocks", "n")}
  %n.x = zext i32 %n to i64
  %start = getelementptr i32, ptr %s, i64 %n.x
  store i32 %next, ptr %start
  %n.1 = add i32 %n, 1
{store_field("race_blocks", "%n.1", "p3")}
{store_field("race_acquired", "0", "p4")}
  ret void
}}

define internal void @race_fence(ptr %context) noinline {{
  call void @after_barrier(ptr %context)
{load_field("race_blocks", "n")}
  %n.x = zext i32 %n to i64
{load_field("race_released", "r", "ptr")}
  %mine = getelementptr i32, ptr %r, i64 %n.x
{load_field("race_moment", "m")}
  store i32 %m, ptr %mine
{store_field("race_acquired", "1", "p")}
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
{load_field("race_moment", "moment")}
{load_field("race_launch", "launch.begin")}
  %is.shared = icmp ne i32 %space, 0
  %since = select i1 %is.shared, i32 %moment, i32 %launch.begin
{load_field("race_warps", "warps", "ptr")}
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
{load_field("race_launch", "launch")}
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
{load_field("race_block", "mine")}
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
{load_field("race_acquired", "acquired")}
  %none = icmp eq i32 %acquired, 0
  br i1 %none, label %no, label %search
search:
{load_field("race_starts", "s", "ptr")}
{load_field("race_blocks", "n")}
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
{load_field("race_released", "r", "ptr")}
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
    {WHO})
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
    {WHO})
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
  call void @report_race(ptr %context, i32 %w.kind, i32 %line, i64 %offset, i32 %size, i32 %mode, i32 %space, {WHO},
    <4 x i32> %written)
  br label %check.reads
check.reads:
  br i1 %reads.only, label %enter.read, label %write
write:
{entry("first", 16)}
  br i1 %first.clash, label %after.first, label %second.read
after.first:
  call void @report_race(ptr %context, i32 {int(Defect.WRITE_AFTER_READ)}, i32 %line, i64 %offset, i32 %size,
    i32 %mode, i32 %space, {WHO}, <4 x i32> %first)
  br label %enter.write
second.read:
{entry("second", 32)}
  br i1 %second.clash, label %after.second, label %enter.write
after.second:
  call void @report_race(ptr %context, i32 {int(Defect.WRITE_AFTER_READ)}, i32 %line, i64 %offset, i32 %size,
    i32 %mode, i32 %space, {WHO}, <4 x i32> %second)
  br label %enter.write
enter.write:
  store <4 x i32> %own, ptr %cell, align 16
  ret void
enter.read:
{enter_read}
}}

define internal void @report_race(ptr %context, i32 %kind, i32 %line, i64 %address, i32 %size, i32 %mode, i32 %space,
    {WHO}, <4 x i32> %other) noinline {{
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
    {WHO}, i32 %other.line, i32 %other.thread, i32 %other.id) noinline cold {{
entry:
{load_field("found_lines", "lines")}
  %known = icmp ult i32 %line, %lines
  %row = select i1 %known, i32 %line, i32 0
  %row.x = zext i32 %row to i64
  %kind.x = zext i32 %kind to i64
  %first = mul i64 %row.x, {KINDS}
  %index = add i64 %first, %kind.x
{load_field("found_counts", "counts", "ptr")}
  %count.p = getelementptr i32, ptr %counts, i64 %index
  %count = atomicrmw add ptr %count.p, i32 1 monotonic
  %new = icmp eq i32 %count, 0
  br i1 %new, label %keep, label %end
keep:
{load_field("found_records", "records", "ptr")}
  %number = atomicrmw add ptr %records, i64 1 monotonic
{load_field("found_capacity", "capacity")}
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
{load_field("arena_base", "base")}
{load_field("arena_bytes", "bytes")}
  %offset = sub i64 %address, %base
  %inside = icmp ult i64 %offset, %bytes
  br i1 %inside, label %device, label %elsewhere, !prof !4
device:
{load_field("shadow_valid_pages", "pages", "ptr")}
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
{load_field("shadow_valid", "bytes", "ptr")}
{load_field("shadow_valid_pages", "pages", "ptr")}
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
  %known = icmp eq {width} %states, {ones(size)}
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
{load_field("shared_bytes", "shared.bytes")}
{load_field("params", "params")}
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
{load_field("host_ranges", "ranges", "ptr")}
{load_field("host_count", "count")}
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
