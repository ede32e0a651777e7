"""The heap of ``malloc`` in kernels under the checkers: each block is memory of its own, followed by a gap."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cudatool.sim.jit.checking import load_field
from cudatool.sim.jit.instrument import Instrument

if TYPE_CHECKING:
    from cudatool.sim.jit.emit import Emitter

__all__ = ["FREED_BLOCK", "block_freed", "block_taken", "with_gap"]

FREED_BLOCK = 2
"""What the map of valid bytes (otherwise 0 and 1) holds for a block of the heap that was freed."""
_GAP = 16  # bytes after each block that no thread may use


def with_gap(e: Emitter, size: str) -> str:
    """Return what to ask the heap for: under memcheck, room after the block too."""
    return e.op(f"add i64 {size}, {_GAP}") if e.instrument & Instrument.MEMCHECK else size


def block_taken(e: Emitter, block: str, size: str) -> None:
    """Emit that the heap gave out `block`, unless that is null."""
    if e.instrument & (Instrument.MEMCHECK | Instrument.INITCHECK):
        e.define(_DECLARATIONS)
        e.define(_TAKEN.format(checked="true" if e.instrument & Instrument.MEMCHECK else "false"))
        e.emit(f"call void @block_taken(ptr %context, i64 {block}, i64 {size})")


def block_freed(e: Emitter, block: str) -> None:
    """Emit that `block` is about to be given back to the heap, if it is a block."""
    if e.instrument & Instrument.MEMCHECK:
        e.define(_DECLARATIONS)
        e.define(_FREED)
        e.emit(f"call void @block_freed(ptr %context, i64 {block})")


_DECLARATIONS = """declare i64 @cudatool_block_bytes(i64, i64)
declare void @llvm.memset.p0.i64(ptr, i8, i64, i1)"""

_TAKEN = f"""
define internal void @block_taken(ptr %context, i64 %block, i64 %size) noinline {{{{
entry:
{load_field("heap", "heap")}
  %none = icmp eq i64 %block, 0
  br i1 %none, label %end, label %taken
taken:
{load_field("arena_base", "base")}
{load_field("shadow_valid", "valid", "ptr")}
{load_field("shadow_init", "init", "ptr")}
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

_FREED = f"""
define internal void @block_freed(ptr %context, i64 %block) noinline {{
entry:
{load_field("heap", "heap")}
{load_field("arena_base", "base")}
{load_field("shadow_valid", "valid", "ptr")}
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
