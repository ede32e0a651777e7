"""Lines of memory that the next blocks will read or write, fetched ahead.

The host fetches by itself what follows in memory. But narrow blocks, 16 x 16 threads say, access one line of each of
many rows of a matrix, each far from the last: more rows than the host keeps track of. Between two barriers there is
little else to do until each line has come. So where an address depends on parameters and on the thread's place alone,
eight blocks along x fetch what the rows of the following eight will access, all that lies in one row at once: then the
host sees that it follows, and there are fewer jumps. Each of the eight fetches some of the rows: the host has room for
few lines that have not come yet, and would wait for them rather than compute. Places at which the blocks access other
rows, as a transposition does, are left out (:func:`.far.accesses`). No fault comes of it if nothing lies there, and no
result of it if other blocks are next.
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
    """Return ``fetch_ahead``, which calls ``fetch`` for the first threads of rows of the blocks after the next ones.

    Of as many blocks as fetch together, each takes the rows that are its ``%turn``, and every so many after that. It
    does nothing if rows are not narrow.
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
  %others = sub i32 %blocks, %turn
  %rows = mul nuw nsw i32 %ny, %nz
  %is.narrow = icmp ule i32 %nx, {NARROW}
  %has.rows = icmp ugt i32 %rows, 1
  %is.tile = and i1 %is.narrow, %has.rows
  %some = icmp ult i32 %turn, %rows
  %pays = and i1 %is.tile, %some
  br i1 %pays, label %y, label %end
y:
  %row = phi i32 [ %turn, %entry ], [ %row.next, %y.end ]
  %ty = urem i32 %row, %ny
  %tz = udiv i32 %row, %ny
  %first = mul nuw nsw i32 %row, %nx
  br label %block
block:
  %ahead = phi i32 [ 0, %y ], [ %ahead.next, %block ]
  %from.here = add i32 %others, %ahead
  %bx.next = add i32 %bx, %from.here
  %fetched = call i32 @fetch({VALUES.replace("%bx", "%bx.next")}, i32 0, i32 %ty, i32 %tz, i32 %first) #1
  %ahead.next = add nuw nsw i32 %ahead, 1
  %block.done = icmp uge i32 %ahead.next, %blocks
  br i1 %block.done, label %y.end, label %block, !llvm.loop !9
y.end:
  %row.next = add nuw nsw i32 %row, %blocks
  %y.done = icmp uge i32 %row.next, %rows
  br i1 %y.done, label %end, label %y, !llvm.loop !9
end:
  ret void
}}
"""
