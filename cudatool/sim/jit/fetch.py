"""Lines of memory that the next block will read, fetched when a block begins.

The host fetches by itself what follows in memory. But narrow blocks, 16 x 16 threads say, read one line of each of many
rows of a matrix, each far from the last, and between two barriers there is little else to do until each line has come.
So where a load's address depends on parameters and on the thread's place alone, what the first thread of each row
reads in the block beside this one is fetched ahead. No fault comes of it if nothing lies there, and no result of it if
another block is next.
"""

from __future__ import annotations

from collections.abc import Sequence

from cudatool.ptx import Address, Instruction, Register
from cudatool.sim.jit.emit import ENVIRONMENT, Emitter
from cudatool.sim.jit.scheduler import VALUES, field

__all__ = ["FETCH", "emit_fetches", "fetch_ahead", "is_fetched"]

_NARROW = 32
"""Threads of a row at most: more of them read lines beside each other."""

FETCH = f"  call void @fetch_ahead({VALUES})\n"


def is_fetched(one: Instruction) -> bool:
    """Whether an instruction reads device memory at an address in a register."""
    if one.opcode != "ld" or "global" not in one.modifiers:
        return False
    address = one.operands[1]
    return isinstance(address, Address) and isinstance(address.base, Register)


def emit_fetches(e: Emitter, loads: Sequence[Instruction]) -> None:
    """Emit what fetches the lines of `loads`; what their addresses depend on has been computed."""
    e.define("declare void @llvm.prefetch.p0(ptr, i32, i32, i32)")
    for one in loads:
        _, pointer = e.pointer("global", one.operands[1])
        e.emit(f"call void @llvm.prefetch.p0(ptr {pointer}, i32 0, i32 3, i32 1)")


def fetch_ahead() -> str:
    """Return ``fetch_ahead``, which calls ``fetch`` for the first thread of each row of a block, if rows are narrow."""
    return f"""
define internal void @fetch_ahead({ENVIRONMENT}) #0 {{
entry:
{field("block_x", "nx")}
{field("block_y", "ny")}
{field("block_z", "nz")}
  %bx.next = add i32 %bx, 1
  %rows = mul nuw nsw i32 %ny, %nz
  %is.narrow = icmp ule i32 %nx, {_NARROW}
  %has.rows = icmp ugt i32 %rows, 1
  %pays = and i1 %is.narrow, %has.rows
  br i1 %pays, label %z, label %end
z:
  %tz = phi i32 [ 0, %entry ], [ %tz.next, %z.end ]
  br label %y
y:
  %ty = phi i32 [ 0, %z ], [ %ty.next, %y ]
  %row = mul nuw nsw i32 %tz, %ny
  %column = add nuw nsw i32 %row, %ty
  %first = mul nuw nsw i32 %column, %nx
  %fetched = call i32 @fetch({VALUES.replace("%bx", "%bx.next")}, i32 0, i32 %ty, i32 %tz, i32 %first) #1
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
"""
