"""Lines of memory that the next blocks will read or write, fetched ahead.

The host fetches by itself what follows in memory. But narrow blocks, 16 x 16 threads say, access one line of each of
many rows of a matrix, each far from the last: more rows than the host keeps track of. Between two barriers there is
little else to do until each line has come. So where an address depends on parameters and on the thread's place alone,
every eighth block along x fetches what the rows of the following eight will access, all that lies in one row at once:
then the host sees that it follows, and there are fewer jumps. Places at which those blocks access other rows, as a
transposition does, are left out (:func:`.far.accesses`). No fault comes of it if nothing lies there, and no result
of it if other blocks are next.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from cudatool.ptx import Address, Instruction, Register
from cudatool.sim.jit.emit import ENVIRONMENT, Emitter
from cudatool.sim.jit.scheduler import VALUES, field

__all__ = ["FETCH", "NARROW", "STEPS", "Place", "emit_fetches", "fetch_ahead", "place_of"]

NARROW = 32
"""Threads of a row at most: more of them access lines beside each other."""

_AT_ONCE = 128
"""Threads of a row, of several blocks. With half of it the kernels of Rodinia's srad (v2) take 1.2 times as long, a
block at a time 1.5 times; with twice as many a transposition in tiles of 32 x 32 takes 1.1 times as long."""

STEPS = range(1, 4 * 64 + 1)
"""Bytes from what a block accesses to what the next one does: neither the same, nor in another row."""

FETCH = f"  call void @fetch_ahead({VALUES})\n"


class Place(NamedTuple):
    """A place in device memory: a register's value and so many bytes."""

    register: str
    offset: int


def place_of(one: Instruction) -> Place | None:
    """Return where an instruction reads or writes device memory, None unless a register says that."""
    if one.opcode not in ("ld", "st") or "global" not in one.modifiers:
        return None
    address = one.operands[1 if one.opcode == "ld" else 0]
    if not isinstance(address, Address) or not isinstance(address.base, Register):
        return None
    return Place(address.base.name, address.offset)


def emit_fetches(e: Emitter, places: Mapping[Place, bool]) -> None:
    """Emit what fetches lines, of each whether it is written; what the registers depend on has been computed."""
    e.define("declare void @llvm.prefetch.p0(ptr, i32, i32, i32)")
    for place, is_written in places.items():
        _, pointer = e.pointer("global", Address(Register(place.register), place.offset))
        e.emit(f"call void @llvm.prefetch.p0(ptr {pointer}, i32 {int(is_written)}, i32 3, i32 1)")


def fetch_ahead() -> str:
    """Return ``fetch_ahead``, which calls ``fetch`` for the first thread of each row of the next blocks.

    It does nothing in other blocks than every eighth, and if rows are not narrow.
    """
    return f"""
define internal void @fetch_ahead({ENVIRONMENT}) #0 {{
entry:
{field("block_x", "nx")}
{field("block_y", "ny")}
{field("block_z", "nz")}
  %narrow = call i32 @llvm.umin.i32(i32 %nx, i32 {NARROW})
  %blocks = udiv i32 {_AT_ONCE}, %narrow
  %turn = urem i32 %bx, %blocks
  %is.turn = icmp eq i32 %turn, 0
  %rows = mul nuw nsw i32 %ny, %nz
  %is.narrow = icmp ule i32 %nx, {NARROW}
  %has.rows = icmp ugt i32 %rows, 1
  %is.tile = and i1 %is.narrow, %has.rows
  %pays = and i1 %is.tile, %is.turn
  br i1 %pays, label %z, label %end
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
  %ahead = phi i32 [ 1, %y ], [ %ahead.next, %block ]
  %bx.next = add i32 %bx, %ahead
  %fetched = call i32 @fetch({VALUES.replace("%bx", "%bx.next")}, i32 0, i32 %ty, i32 %tz, i32 %first) #1
  %ahead.next = add nuw nsw i32 %ahead, 1
  %block.done = icmp ugt i32 %ahead.next, %blocks
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
"""
