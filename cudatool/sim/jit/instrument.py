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

if TYPE_CHECKING:
    from cudatool.sim.jit.emit import Emitter

__all__ = [
    "CELL",
    "KINDS",
    "WHO",
    "Defect",
    "FoundRecord",
    "Instrument",
    "Mode",
    "acquire",
    "observe",
    "ones",
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


KINDS = len(Defect)


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

WHO = "i32 %bx, i32 %by, i32 %bz, i32 %t"
"""The thread that accesses, as arguments of the functions that instrumented code calls (:mod:`.checking`)."""


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


def ones(size: int) -> int:
    """Return `size` bytes of 1 as an integer: what a map holds where all is well."""
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
        f"i32 {space}, {WHO}, {arguments})"
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
        f"i32 {number}, {WHO}, i32 0, i32 0, i32 0)"
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
        known = e.op(f"icmp eq {width} {state}, {ones(size)}")
        bad, after = e.new_label(), e.new_label()
        e.emit(f"br i1 {known}, label %{after}, label %{bad}, !prof !4")
        e.label(bad)
        _report(e, Defect.UNINITIALIZED, line, address, size, mode, 0)
        e.emit(f"br label %{after}")
        e.label(after)
    if mode is not Mode.READ:
        e.emit(f"store {width} {ones(size)}, ptr {cell}, align 1{e.group(space)}")


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
            f"i32 {line}, i32 {space}, i32 {min(size, 4)}, {WHO})"
        )


_MAPS = {Mode.READ: "shadow_read", Mode.WRITE: "shadow_write", Mode.ATOMIC: "shadow_atomic"}


def _mark(e: Emitter, space: str, offset: str, size: int, mode: Mode) -> None:
    """Set a byte of the footprint per byte, and mark the page."""
    group = e.group(space)
    cell = _shadow(e, _MAPS[mode], offset)
    e.emit(f"store i{8 * size} {ones(size)}, ptr {cell}, align 1{group}")
    page = e.op(f"lshr i64 {offset}, 12")
    e.emit(f"store i8 1, ptr {_shadow(e, 'shadow_pages', page)}{group}")
