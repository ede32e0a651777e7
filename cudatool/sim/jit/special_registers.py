"""Special registers: what reading each of them becomes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from cudatool.ptx import FRAME_SCALE, STACK
from cudatool.sim.jit.layout import RESERVED_SHARED

if TYPE_CHECKING:
    from cudatool.sim.jit.emit import Emitter

__all__ = ["PLACES", "SAME_IN_ROW", "SPECIAL"]

PLACES = ("%tid.", "%ntid.", "%ctaid.", "%nctaid.")
"""Where a thread is: how these begin."""

SAME_IN_ROW = ("%ctaid.", "%ntid.", "%nctaid.", "%tid.y", "%tid.z")
"""What all threads of a row have alike: how these begin."""

SPECIAL: dict[str, Callable[[Emitter], tuple[str, str]]] = {  # PTX name -> (value, LLVM type)
    "%tid": lambda e: ("%tx", "i32"),
    "%tid.x": lambda e: ("%tx", "i32"),
    "%tid.y": lambda e: ("%ty", "i32"),
    "%tid.z": lambda e: ("%tz", "i32"),
    "%ctaid.x": lambda e: ("%bx", "i32"),
    "%ctaid.y": lambda e: ("%by", "i32"),
    "%ctaid.z": lambda e: ("%bz", "i32"),
    "%laneid": lambda e: (e.op("and i32 %t, 31"), "i32"),
    "%warpid": lambda e: (e.op("lshr i32 %t, 5"), "i32"),
    "%nwarpid": lambda e: ("32", "i32"),
    "%smid": lambda e: ("0", "i32"),
    "%nsmid": lambda e: ("1", "i32"),
    "%gridid": lambda e: ("1", "i64"),
    "WARP_SZ": lambda e: ("32", "i32"),
    "%total_smem_size": lambda e: (_total_shared(e), "i64"),
    "%dynamic_smem_size": lambda e: (e.field("dynamic_shared"), "i32"),
    "%clock": lambda e: (e.call("i64", "llvm.readcyclecounter"), "i64"),
    "%clock_hi": lambda e: (e.op(f"lshr i64 {e.call('i64', 'llvm.readcyclecounter')}, 32"), "i64"),
    "%clock64": lambda e: (e.call("i64", "llvm.readcyclecounter"), "i64"),
    "%globaltimer": lambda e: (_nanoseconds(e), "i64"),
    "%globaltimer_lo": lambda e: (_nanoseconds(e), "i64"),
    "%globaltimer_hi": lambda e: (e.op(f"lshr i64 {_nanoseconds(e)}, 32"), "i64"),
    "%lanemask_eq": lambda e: (e.op(f"shl i32 1, {e.op('and i32 %t, 31')}"), "i32"),
    "%lanemask_lt": lambda e: (_below(e), "i32"),
    "%lanemask_ge": lambda e: (e.op(f"xor i32 {_below(e)}, -1"), "i32"),
    "%lanemask_le": lambda e: (_up_to(e), "i32"),
    "%lanemask_gt": lambda e: (e.op(f"xor i32 {_up_to(e)}, -1"), "i32"),
    # Where a cooperative launch's blocks synchronize (cooperative_groups reads it so): an address in two halves.
    "%envreg1": lambda e: (e.op(f"lshr i64 {e.field('workspace')}, 32"), "i64"),
    "%envreg2": lambda e: (e.field("workspace"), "i64"),
    # Where the stack of calls that are not inlined ends (cudatool.ptx.frames).
    "%stack.limit": lambda e: (_stack_limit(e), "i64"),
    "%is_explicit_cluster": lambda e: ("false", "i1"),
    "%cluster_ctarank": lambda e: ("0", "i32"),
    "%cluster_nctarank": lambda e: ("1", "i32"),
}


# What describes a machine that is not there: performance monitors, registers that a driver defines, memory it keeps.
SPECIAL |= {
    name: lambda e: ("0", "i64")
    for name in (
        *(f"%envreg{number}" for number in range(32) if number not in (1, 2)),
        *(f"%pm{number}{suffix}" for number in range(8) for suffix in ("", "_64")),
        "%current_graph_exec",
    )
}


def _number(value: int) -> Callable[[Emitter], tuple[str, str]]:
    return lambda e: (str(value), "i32")


# The system's part of shared memory, which is empty before it begins, and software's part of it.
SPECIAL |= {
    f"%reserved_smem_offset_{which}": _number(offset)
    for which, offset in (("begin", 0), ("end", RESERVED_SHARED), ("cap", RESERVED_SHARED), ("0", 0), ("1", 512))
}
SPECIAL["%aggr_smem_size"] = SPECIAL["%total_smem_size"]


def _total_shared(e: Emitter) -> str:
    return e.op(f"sub i64 {e.field('shared_bytes')}, {e.layout.reserved_shared}")


def _stack_limit(e: Emitter) -> str:
    size = e.op(f"mul i64 {e.field('stack_bytes')}, {FRAME_SCALE}")
    return e.op(f"add i64 {size}, {e.layout.local[STACK]}")


def _nanoseconds(e: Emitter) -> str:
    """Return the host's monotonic clock."""
    e.define("""
declare i32 @clock_gettime(i32, ptr)
define internal i64 @nanoseconds() noinline {
  %time = alloca { i64, i64 }
  %status = call i32 @clock_gettime(i32 1, ptr %time)
  %seconds = load i64, ptr %time
  %rest.p = getelementptr { i64, i64 }, ptr %time, i32 0, i32 1
  %rest = load i64, ptr %rest.p
  %scaled = mul i64 %seconds, 1000000000
  %result = add i64 %scaled, %rest
  ret i64 %result
}""")
    return e.op("call i64 @nanoseconds()")


def _special_field(name: str) -> Callable[[Emitter], tuple[str, str]]:
    return lambda e: (e.field(name), "i32")


for _axis in "xyz":
    SPECIAL[f"%ntid.{_axis}"] = _special_field(f"block_{_axis}")
    SPECIAL[f"%nctaid.{_axis}"] = _special_field(f"grid_{_axis}")
    SPECIAL[f"%nclusterid.{_axis}"] = SPECIAL[f"%nctaid.{_axis}"]
    SPECIAL[f"%clusterid.{_axis}"] = SPECIAL[f"%ctaid.{_axis}"]
    SPECIAL[f"%cluster_ctaid.{_axis}"] = SPECIAL["%cluster_ctarank"]
    SPECIAL[f"%cluster_nctaid.{_axis}"] = SPECIAL["%cluster_nctarank"]


def _below(e: Emitter) -> str:
    bit = e.op(f"shl i32 1, {e.op('and i32 %t, 31')}")
    return e.op(f"sub i32 {bit}, 1")


def _up_to(e: Emitter) -> str:
    bit = e.op(f"shl i32 2, {e.op('and i32 %t, 31')}")
    return e.op(f"sub i32 {bit}, 1")
