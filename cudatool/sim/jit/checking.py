"""The functions that instrumented code calls, as LLVM IR: is an address valid, what was found."""

from __future__ import annotations

import ctypes

from cudatool.sim.jit.context import Context
from cudatool.sim.jit.host_places import HOST_PLACE
from cudatool.sim.jit.instrument import KINDS, WHO, FoundRecord, Instrument, ones
from cudatool.sim.jit.races import NO_MOMENTS, moments

__all__ = ["functions", "load_field"]


def load_field(name: str, result: str, kind: str = "") -> str:
    """Return code that loads a field of the context that changes during a launch."""
    member = getattr(Context, name)
    kind = kind or f"i{8 * member.size}"
    pointer = f"%{result}.p"
    return (
        f"  {pointer} = getelementptr i8, ptr %context, i64 {member.offset}\n  %{result} = load {kind}, ptr {pointer}"
    )


def functions(kinds: Instrument, validated: set[int]) -> str:
    """Return the functions that code instrumented for `kinds` calls. The scheduler calls the first always."""
    parts = []
    if kinds & Instrument.RACECHECK:
        parts.append(moments())
    else:
        parts.append(NO_MOMENTS)
    if kinds & ~Instrument.FOOTPRINT:
        parts.append(_report_function())
    parts.append(HOST_PLACE)
    parts += [_valid(size) for size in sorted(validated)]
    parts.append('!4 = !{!"branch_weights", i32 2000, i32 1}')
    return "\n".join(parts)


def _report_function() -> str:
    body = _stores()
    return f"""
define internal void @report(ptr %context, i32 %kind, i32 %line, i64 %address, i32 %size, i32 %mode, i32 %space,
    {WHO}) noinline cold {{
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
  %f.address = getelementptr i8, ptr %record, i64 {FoundRecord.address.offset}
  store i64 %address, ptr %f.address
{body}
  br label %end
end:
  ret void
}}
"""


def _stores() -> str:
    """Return the stores of what was found, but for its address, in its record."""
    offsets = {name: getattr(FoundRecord, name).offset for name, _ in FoundRecord._fields_}
    values = {
        "kind": "%kind",
        "line": "%line",
        "size": "%size",
        "mode": "%mode",
        "thread": "%t",
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
    return "\n".join(stores)


def _valid(size: int) -> str:
    """Return ``@valid<size>``: whether the kernel may read, or write, `size` bytes at a generic address."""
    return f"""
define internal i1 @valid{size}(ptr %context, i64 %address, ptr %shared, i64 %local, i64 %local.bytes,
    i1 %writes) alwaysinline {{
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
  %b = call i1 @valid_bytes{size}(ptr %context, i64 %offset, i1 %writes)
  ret i1 %b
elsewhere:
  %e = call i1 @elsewhere{size}(ptr %context, i64 %address, ptr %shared, i64 %local, i64 %local.bytes)
  ret i1 %e
}}
define internal preserve_mostcc i1 @valid_apart{size}(ptr %context, i64 %address, ptr %shared, i64 %local,
    i64 %local.bytes, i1 %writes) noinline cold {{
  %v = call i1 @valid{size}(ptr %context, i64 %address, ptr %shared, i64 %local, i64 %local.bytes, i1 %writes)
  ret i1 %v
}}
{_valid_bytes(size)}{_elsewhere(size)}"""


def _valid_bytes(size: int) -> str:
    """Return ``@valid_bytes<size>``: the same for device memory whose state is kept byte by byte."""
    width = f"i{8 * size}"
    return f"""
define internal i1 @valid_bytes{size}(ptr %context, i64 %offset, i1 %writes) {{
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
  %lowest = and {width} %states, {ones(size)}
  %asked = select i1 %writes, {width} %states, {width} %lowest
  %known = icmp eq {width} %asked, {ones(size)}
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
"""


def _elsewhere(size: int) -> str:
    """Return ``@elsewhere<size>``: the same for shared, local and host memory, and for parameters."""
    return f"""
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
  %place = call i64 @host_place(ptr %context, i64 %address, i64 {size})
  %in.host = icmp ne i64 %place, -1
  br i1 %in.host, label %yes, label %no
yes:
  ret i1 true
no:
  ret i1 false
}}
"""
