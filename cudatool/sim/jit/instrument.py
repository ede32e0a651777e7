"""Instrumented accesses: what the checkers and the recorder of footprints see, as LLVM IR.

Every load, store and atomic passes :func:`observe` first. With no instrument it emits nothing. Checks are made inline
where the answer is usually yes; a defect goes to ``@report``, out of line, which counts it by instruction and keeps
the first of each. A bad access is suppressed: it is made to memory that no thread reads, so that the kernel goes on.

The maps (:mod:`cudatool.sim.jit.shadow`) have a byte for each byte of the device's memory, so that an access of n bytes
is checked by one load of n bytes, and a cell for each four bytes where races are looked for.
"""

from __future__ import annotations

import ctypes
from enum import IntEnum, IntFlag
from typing import TYPE_CHECKING, NamedTuple

from cudatool.sim.jit.context import Context
from cudatool.sim.jit.race_engine import ATOMIC_WORD, PAIR_BIT, RUNS, AccessRun, EngineState, Reads

if TYPE_CHECKING:
    from cudatool.sim.jit.emit import Emitter

__all__ = [
    "CELL",
    "KINDS",
    "WHO",
    "WORD",
    "Checked",
    "DefectCode",
    "Flag",
    "FoundRecord",
    "Instrument",
    "Needless",
    "RaceMode",
    "host_place",
    "observe",
    "ones",
    "race_access",
    "race_call",
    "run_key",
]


class Instrument(IntFlag):
    """What code is instrumented for."""

    NONE = 0
    FOOTPRINT = 1
    MEMCHECK = 2
    INITCHECK = 4
    RACECHECK = 8
    SYNCCHECK = 16


Needless = frozenset[tuple[Instrument, int]]
"""Checks that would find nothing in a launch, and of which lines of the PTX."""


class Checked(NamedTuple):
    """How a launch is checked.

    Attributes
    ----------
    kinds
        What its code looks for.
    left_out
        Those that would find nothing.
    written, sound
        See :meth:`.Shadow.prepare`.
    fills
        Whether memory may have more values after it, which later checks could leave out.
    """

    kinds: Instrument
    left_out: Needless
    written: range | None
    sound: tuple[tuple[int, int], ...]
    fills: bool


class DefectCode(IntEnum):
    """The arguments of ``@report``."""

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
    UNCHECKED = 8
    """No defect: from some moment on, races were not looked for, as the history took too much memory."""
    STALE_READ = 9
    """A read through a cache that does not see what the launch writes, of what it writes."""
    ABSENT_LANE = 10
    """A shuffle that takes the value of a lane that its member mask names, and that has ended or never was."""
    PART_OF_WARP = 11
    """A matrix operation of a warp of which a lane has ended or never was."""
    IN_STEP = 12
    """No defect: lanes of a warp write and read shared memory in no order, both as volatile, or one atomically."""
    CAS_GUESS = 13
    """A race of a plain read with a strong write, whose outcome changes nothing (:mod:`cudatool.ptx.guesses`)."""


KINDS = len(DefectCode)


class RaceMode(IntEnum):
    """Of an access."""

    READ = 1
    WRITE = 2
    ATOMIC = 3


class Flag(IntFlag):
    """What else races depend on, beside :class:`RaceMode`."""

    NONE = 0
    STRONG = 4
    """May meet other threads' strong accesses without a race."""
    WIDE = 8
    """Of a scope that includes other blocks."""
    ASYNC = 16
    """Made at a later time, which the thread must wait for."""
    ACQUIRE = 32
    RELEASE = 64
    BLIND = 128
    """An update whose old value is not read."""
    APART = 256
    """The checkers of memory see a part of the access; races are looked for in all of it (:mod:`.races`)."""
    READ_ONLY = 512
    """Through the read-only cache."""
    TEXTURE = 1024
    """Through the cache of textures and surfaces."""
    VOLATILE = 2048
    GUESS = 4096
    """A plain read whose value an ``atom.cas`` compares before anything depends on it."""


class FoundRecord(ctypes.Structure):
    """The first defect of its kind at an instruction. Races have a record of their own (:mod:`.race_engine`).

    Attributes
    ----------
    line
        Of the PTX.
    thread
        Number in the block.
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
        ("space", ctypes.c_uint32),
    )


CELL = 64
"""Bytes of the history of four bytes of memory (``cell_t`` of ``_races.h``)."""

WORD = 8
"""Bytes of the summary of a history, of which there are two for each four bytes (``words`` and ``seconds``)."""

"""By how a read is made: the function of the engine that looks whether the launch writes what it reads."""

WHO = "i32 %bx, i32 %by, i32 %bz, i32 %t"
"""The thread that accesses, as arguments of the functions that instrumented code calls (:mod:`.checking`)."""


def observe(
    e: Emitter, space: str, pointer: str, size: int, mode: RaceMode, *, line: int, align: int, flags: Flag
) -> str:
    """Emit the checks of an access and what records it; return the pointer to use, elsewhere if it must not be made."""
    kinds = e.instrument
    for check in (Instrument.MEMCHECK, Instrument.INITCHECK, Instrument.RACECHECK):
        if (check, line) in e.needless:
            kinds &= ~check
    if space == "entry":
        return pointer
    memory = kinds & (Instrument.MEMCHECK | Instrument.INITCHECK)
    if memory and space in ("global", "generic") and line in e.ranges and align == size:
        around, elsewhere = e.new_label(), e.new_label()
        e.emit(f"br label %{around}")
        e.label(around)
        joined, sound = e.new_label(), _is_sound(e, pointer, size, e.ranges[line])
        e.emit(f"br i1 {sound}, label %{joined}, label %{elsewhere}, !prof !4")
        e.label(elsewhere)
        checked, last = (
            _observe(e, memory, space, pointer, size, mode, line=line, align=align, flags=flags),
            e.new_label(),
        )
        e.emit(f"br label %{last}")
        e.label(last)
        e.emit(f"br label %{joined}")
        e.label(joined)
        pointer = e.op(f"phi ptr [ {pointer}, %{around} ], [ {checked}, %{last} ]")
        kinds &= ~memory
    return _observe(e, kinds, space, pointer, size, mode, line=line, align=align, flags=flags)


def _is_sound(e: Emitter, pointer: str, size: int, number: int) -> str:
    """Emit whether nothing can be wrong with an access; of accesses that are near each other, once for all."""
    near, offset = e.near.get(id(e.instruction), (None, 0))
    if near is None:
        return _is_around_argument(e, pointer, size, number)
    if near.is_sound:
        return near.is_sound
    if e.instruction is not None and e.instruction.guard is not None:  # others would not have the value
        return _is_around_argument(e, pointer, size, number)
    if offset != near.first:
        pointer = e.op(f"getelementptr i8, ptr {pointer}, i64 {near.first - offset}")
    near.is_sound = _is_around_argument(e, pointer, size, number, near.stop - near.first)
    return near.is_sound


def _is_around_argument(e: Emitter, pointer: str, size: int, number: int, reach: int = 0) -> str:
    """Emit whether an access lies in the memory around an argument in which nothing can be wrong, and is aligned.

    Rotated by the bits that must be 0, a distance that is not aligned is greater than all. With `reach`, this holds for
    all aligned accesses to that many bytes.
    """
    address = e.op(f"ptrtoint ptr {pointer} to i64")
    bits = size.bit_length() - 1
    distance = e.op(f"sub i64 {address}, {e.field('argument_first', number)}")
    rotated = e.call("i64", "llvm.fshr.i64", f"i64 {distance}", f"i64 {distance}", f"i64 {bits}")
    bytes_ = e.field("argument_bytes", number)
    if reach > size:
        bytes_ = e.call("i64", "llvm.usub.sat.i64", f"i64 {bytes_}", f"i64 {reach - size}")
    return e.op(f"icmp ult i64 {rotated}, {e.op(f'lshr i64 {bytes_}, {bits}')}")


def _observe(
    e: Emitter,
    kinds: Instrument,
    space: str,
    pointer: str,
    size: int,
    mode: RaceMode,
    *,
    line: int,
    align: int,
    flags: Flag,
) -> str:
    """Emit the checks of `kinds` for an access."""
    address = e.op(f"ptrtoint ptr {pointer} to i64")
    if kinds & Instrument.MEMCHECK:
        pointer = _check_memory(e, space, pointer, address, size, mode, line, align)
        address = e.op(f"ptrtoint ptr {pointer} to i64")
    if space == "shared":
        if kinds & Instrument.RACECHECK:
            base = e.op("ptrtoint ptr %shared to i64")
            race_access(e, e.op(f"sub i64 {address}, {base}"), size, mode, line, 1, flags)
        return pointer
    if space == "local" or not kinds & ~Instrument.MEMCHECK & ~Instrument.SYNCCHECK:
        return pointer
    offset = e.op(f"sub i64 {address}, {e.field('arena_base')}")
    inside = e.op(f"icmp ult i64 {offset}, {e.field('arena_bytes')}")
    if not kinds & (Instrument.RACECHECK | Instrument.FOOTPRINT):  # the host's memory has values always
        with e.when(inside):
            _check_initialized(e, space, address, offset, size, mode, line)
        return pointer
    device, outside, after = e.new_label(), e.new_label(), e.new_label()
    e.emit(f"br i1 {inside}, label %{device}, label %{outside}, !prof !4")
    e.label(outside)
    if space == "generic" and kinds & Instrument.RACECHECK:
        _observe_shared(e, address, size, mode, line, flags, after)
    host, placed = e.new_label(), e.new_label()
    e.emit(f"br label %{host}")
    e.label(host)
    place, has_place = host_place(e, address, str(size))
    e.emit(f"br i1 {has_place}, label %{placed}, label %{after}")
    e.label(device)
    if kinds & Instrument.INITCHECK:
        _check_initialized(e, space, address, offset, size, mode, line)
    known = e.new_label()
    e.emit(f"br label %{known}")
    e.label(known)
    e.emit(f"br label %{placed}")
    e.label(placed)
    place = e.op(f"phi i64 [ {place}, %{host} ], [ {offset}, %{known} ]")
    if kinds & Instrument.RACECHECK and mode is RaceMode.READ:
        _race_read_of_written(e, offset, place, size, line, flags)
    elif kinds & Instrument.RACECHECK:
        race_access(e, place, size, mode, line, 0, flags)
    if kinds & Instrument.FOOTPRINT:
        _mark(e, space, place, size, mode)
    e.emit(f"br label %{after}")
    e.label(after)
    return pointer


def _observe_shared(e: Emitter, address: str, size: int, mode: RaceMode, line: int, flags: Flag, after: str) -> None:
    """Emit that a generic access is looked at if it is one of shared memory, and go on at the label `after` then."""
    within = e.op(f"sub i64 {address}, {e.op('ptrtoint ptr %shared to i64')}")
    shared, elsewhere = e.new_label(), e.new_label()
    is_shared = e.op(f"icmp ult i64 {within}, {e.field('shared_bytes')}")
    e.emit(f"br i1 {is_shared}, label %{shared}, label %{elsewhere}")
    e.label(shared)
    race_access(e, within, size, mode, line, 1, flags)
    e.emit(f"br label %{after}")
    e.label(elsewhere)


def host_place(e: Emitter, address: str, size: str) -> tuple[str, str]:
    """Emit the place that host memory has in the maps (:mod:`.host_places`), and whether it has one (i1)."""
    place = e.op(f"call i64 @host_place(ptr %context, i64 {address}, i64 {size})")
    return place, e.op(f"icmp ult i64 {place}, {e.field('arena_bytes')}")


def ones(size: int) -> int:
    """Return `size` bytes of 1 as an integer: what a map holds where all is well."""
    return int.from_bytes(bytes([1]) * size, "little")


def _shadow(e: Emitter, name: str, offset: str) -> str:
    base = e.op(f"inttoptr i64 {e.field(name)} to ptr")
    return e.op(f"getelementptr i8, ptr {base}, i64 {offset}")


def _report(e: Emitter, defect: DefectCode, line: int, address: str, size: int, mode: RaceMode, space: int) -> None:
    e.emit(
        f"call void @report(ptr %context, i32 {int(defect)}, i32 {line}, i64 {address}, i32 {size}, i32 {int(mode)}, "
        f"i32 {space}, {WHO})"
    )


def _check_memory(
    e: Emitter, space: str, pointer: str, address: str, size: int, mode: RaceMode, line: int, align: int
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
        # Where most accesses are known to be right, the others' check is kept out of the loop that it is in.
        function = "preserve_mostcc i1 @valid_apart" if line in e.ranges else "i1 @valid"
        valid = e.op(
            f"call {function}{size}(ptr %context, i64 {address}, ptr %shared, i64 {base}, i64 {e.layout.local_bytes}, "
            f"i1 {str(mode is not RaceMode.READ).lower()})"
        )
        e.validated.add(size)
    if align > 1:
        low = e.op(f"and i64 {shown}, {align - 1}")
        aligned = e.op(f"icmp eq i64 {low}, 0")
        good = e.op(f"and i1 {valid}, {aligned}")
        kind = e.op(f"select i1 {valid}, i32 {int(DefectCode.MISALIGNED)}, i32 {int(DefectCode.INVALID)}")
    else:
        good, kind = valid, str(int(DefectCode.INVALID))
    before, bad, after = e.new_label(), e.new_label(), e.new_label()
    e.emit(f"br label %{before}")
    e.label(before)
    e.emit(f"br i1 {good}, label %{after}, label %{bad}, !prof !4")
    e.label(bad)
    e.emit(
        f"call void @report(ptr %context, i32 {kind}, i32 {line}, i64 {shown}, i32 {size}, i32 {int(mode)}, "
        f"i32 {number}, {WHO})"
    )
    nowhere = e.op(f"inttoptr i64 {e.field('nowhere_read' if mode is RaceMode.READ else 'nowhere')} to ptr")
    e.emit(f"br label %{after}")
    e.label(after)
    return e.op(f"phi ptr [ {pointer}, %{before} ], [ {nowhere}, %{bad} ]")


def _check_initialized(e: Emitter, space: str, address: str, offset: str, size: int, mode: RaceMode, line: int) -> None:
    cell = _shadow(e, "shadow_init", offset)
    width = f"i{8 * size}"
    if mode is not RaceMode.WRITE:
        state = e.op(f"load {width}, ptr {cell}, align 1")
        known = e.op(f"icmp eq {width} {state}, {ones(size)}")
        bad, after = e.new_label(), e.new_label()
        e.emit(f"br i1 {known}, label %{after}, label %{bad}, !prof !4")
        e.label(bad)
        _report(e, DefectCode.UNINITIALIZED, line, address, size, mode, 0)
        e.emit(f"br label %{after}")
        e.label(after)
    if mode is not RaceMode.READ:
        e.emit(f"store {width} {ones(size)}, ptr {cell}, align 1{e.group(space)}")


def race_call(e: Emitter, name: str, *arguments: str) -> None:
    """Emit a call of the engine that looks for races."""
    kinds = ", ".join(argument.split()[0] for argument in arguments)
    e.define(f"declare void @cudatool_race_{name}(ptr, {kinds})")
    e.emit(f"call void @cudatool_race_{name}(ptr {_engine(e)}, {', '.join(arguments)})")


def _race_read_of_written(e: Emitter, offset: str, place: str, size: int, line: int, flags: Flag) -> None:
    """Emit that the engine looks at a read at `offset`, whose history is at `place`, if the launch may write there."""
    first = e.op(f"sub i64 {e.field('written_first')}, {size - 1}")
    reach = e.op(f"add i64 {e.field('written_bytes')}, {size - 1}")
    with e.when(e.op(f"icmp ult i64 {e.op(f'sub i64 {offset}, {first}')}, {reach}")):
        _race_read(e, place, size, line, flags)


def _race_read(e: Emitter, offset: str, size: int, line: int, flags: Flag) -> None:
    """Emit that the engine looks at a read of device memory, unless that would add nothing to what it knows."""
    weak = flags & ~(Flag.READ_ONLY | Flag.TEXTURE)
    arguments = f"i64 {offset}", f"i32 {size}", f"i32 {line}", "i32 %t"
    whole = not size % _WORD_BYTES and not e.orders_by_flags  # else no read is ever settled
    if flags & Flag.READ_ONLY and whole:
        with e.when(_lacks(e, offset, size, Reads.CACHED | Reads.SETTLED)):
            race_access(e, offset, size, RaceMode.READ, line, 0, weak)
            race_call(e, "cached", *arguments)
        return
    if flags is Flag.NONE and whole:
        with e.when(_lacks(e, offset, size, Reads.SETTLED)):
            race_access(e, offset, size, RaceMode.READ, line, 0, weak)
        return
    race_access(e, offset, size, RaceMode.READ, line, 0, weak)
    if flags & Flag.READ_ONLY:
        with e.when(_lacks(e, offset, size, Reads.CACHED)):
            race_call(e, "cached", *arguments)
    if flags & Flag.TEXTURE:
        race_call(e, "fetched", *arguments)


def _lacks(e: Emitter, offset: str, size: int, known: Reads) -> str:
    """Emit whether not all of these is known of some byte of device memory that is read."""
    engine, part = _engine(e), min(size, 8)
    kind, splat = f"i{8 * part}", ones(part)
    reads_of, stamp = (
        e.op(f"load i64, ptr {e.op(f'getelementptr i8, ptr {engine}, i64 {field.offset}')}, !invariant.load !0")
        for field in (EngineState.reads_of, EngineState.stamp)
    )
    stamp = stamp if part == 8 else e.op(f"trunc i64 {stamp} to {kind}")
    expected = e.op(f"or {kind} {stamp}, {splat * known}")
    ignored = (Reads.CACHED | Reads.SETTLED) & ~known
    first = e.op(f"inttoptr i64 {e.op(f'add i64 {reads_of}, {offset}')} to ptr")
    differs = ""
    for at in range(0, size, part):
        place = e.op(f"getelementptr i8, ptr {first}, i64 {at}")
        other = e.op(f"xor {kind} {e.op(f'load {kind}, ptr {place}, align 1')}, {expected}")
        other = e.op(f"and {kind} {other}, {splat * (255 - ignored)}")
        differs = e.op(f"or {kind} {differs}, {other}") if differs else other
    return e.op(f"icmp ne {kind} {differs}, 0")


def _engine(e: Emitter) -> str:
    pointer = e.op(f"getelementptr i8, ptr %context, i64 {Context.race.offset}")
    return e.op(f"load ptr, ptr {pointer}, !invariant.load !0")


def race_access(e: Emitter, offset: str, size: int | str, mode: RaceMode, line: int, space: int, flags: Flag) -> None:
    """Emit that the engine looks at an access to `offset` of device memory (`space` 0) or shared memory (1).

    What lies in the system's part of shared memory is no data of the program: all lanes of a warp may write one value.
    """
    if flags & Flag.APART:
        return
    if space == 1 and e.layout.reserved_shared:
        with e.when(e.op(f"icmp uge i64 {offset}, {e.layout.reserved_shared}")):
            _race_access(e, offset, size, mode, line, space, flags)
        return
    _race_access(e, offset, size, mode, line, space, flags)


def _race_access(e: Emitter, offset: str, size: int | str, mode: RaceMode, line: int, space: int, flags: Flag) -> None:
    if e.counts_accesses and flags is Flag.NONE and isinstance(size, int):
        e.define("declare i32 @llvm.umin.i32(i32, i32)")  # as the kernel's own minimum declares it, too
        e.define(_STEP)
        engine = _engine(e)
        key = run_key(line, size, mode, space) << 32
        e.emit(f"call void @race_step(ptr {engine}, ptr %accesses, i64 {offset}, i64 {key}, i32 %t)")
        return
    arguments = f"i32 {size}", f"i32 {int(mode) | int(flags)}", f"i32 {line}", f"i32 {space}", "i32 %t"
    if space == 1 and size == _WORD_BYTES and mode is RaceMode.ATOMIC and flags == Flag.STRONG | Flag.WIDE:
        e.define(_IS_KNOWN)
        known, more = e.op(f"call i1 @race_is_known(ptr {_engine(e)}, i64 {offset})"), e.new_label()
        after = e.new_label()
        e.emit(f"br i1 {known}, label %{after}, label %{more}")
        e.label(more)
        race_call(e, "access", f"i64 {offset}", *arguments)
        e.emit(f"br label %{after}")
        e.label(after)
        return
    race_call(e, "access", f"i64 {offset}", *arguments)


def run_key(line: int, size: int, mode: RaceMode, space: int) -> int:
    """Return what tells the accesses of a run from others, in 32 bits (``close_run`` of ``_races.c``)."""
    return line << 9 | size << 3 | mode << 1 | space


_WORD_BYTES = 4  # of memory, that a word of the history is of

# Whether an atomic update of four bytes of shared memory adds nothing to the history: two threads made one at the same
# moment (``note`` of _races.c).
_IS_KNOWN = f"""define internal i1 @race_is_known(ptr %race, i64 %offset) alwaysinline {{
  %bytes.p = getelementptr i8, ptr %race, i64 {EngineState.shared_bytes.offset}
  %bytes = load i64, ptr %bytes.p, !invariant.load !0
  %inside = icmp ult i64 %offset, %bytes
  %low = and i64 %offset, {_WORD_BYTES - 1}
  %aligned = icmp eq i64 %low, 0
  %has.word = and i1 %inside, %aligned
  br i1 %has.word, label %look, label %no
look:
  %words.p = getelementptr i8, ptr %race, i64 {EngineState.shared_words.offset}
  %words = load ptr, ptr %words.p
  %place = mul i64 %offset, {WORD // _WORD_BYTES}
  %word.p = getelementptr i8, ptr %words, i64 %place
  %word = load i64, ptr %word.p
  %now.p = getelementptr i8, ptr %race, i64 {EngineState.now.offset}
  %now = load i32, ptr %now.p
  %now.l = zext i32 %now to i64
  %moment = shl i64 %now.l, 4
  %expected = or i64 %moment, {ATOMIC_WORD}
  %head = lshr i64 %word, 32
  %same = icmp eq i64 %head, %expected
  %pair = and i64 %word, {PAIR_BIT}
  %several = icmp ne i64 %pair, 0
  %known = and i1 %same, %several
  ret i1 %known
no:
  ret i1 false
}}"""

# One access of thread %t, the next that it makes: continue the run of the thread before, if that made a like one.
_STEP = f"""declare void @cudatool_race_open(ptr, i32, i64, i64)
define internal void @race_step(ptr %race, ptr %accesses, i64 %offset, i64 %key, i32 %t) alwaysinline {{
  %runs = load ptr, ptr %race, !invariant.load !0
  %number = load i32, ptr %accesses
  %after = add i32 %number, 1
  store i32 %after, ptr %accesses
  %index = call i32 @llvm.umin.i32(i32 %number, i32 {RUNS})
  %index.l = zext i32 %index to i64
  %run = getelementptr [{ctypes.sizeof(AccessRun)} x i8], ptr %runs, i64 %index.l
  %next = load i64, ptr %run
  %expected.p = getelementptr i8, ptr %run, i64 {AccessRun.expected.offset}
  %expected = load i64, ptr %expected.p
  %t.l = zext i32 %t to i64
  %this = or i64 %key, %t.l
  %here = icmp eq i64 %next, %offset
  %alike = icmp eq i64 %expected, %this
  %continues = and i1 %here, %alike
  br i1 %continues, label %extend, label %open, !prof !4
extend:
  %stride.p = getelementptr i8, ptr %run, i64 {AccessRun.stride.offset}
  %stride = load i64, ptr %stride.p
  %next.new = add i64 %next, %stride
  store i64 %next.new, ptr %run
  %expected.new = add i64 %expected, 1
  store i64 %expected.new, ptr %expected.p
  ret void
open:
  call void @cudatool_race_open(ptr %race, i32 %number, i64 %offset, i64 %this)
  ret void
}}"""


_MAPS = {RaceMode.READ: "shadow_read", RaceMode.WRITE: "shadow_write", RaceMode.ATOMIC: "shadow_atomic"}


def _mark(e: Emitter, space: str, offset: str, size: int, mode: RaceMode) -> None:
    """Set a byte of the footprint per byte, and mark the page."""
    group = e.group(space)
    cell = _shadow(e, _MAPS[mode], offset)
    e.emit(f"store i{8 * size} {ones(size)}, ptr {cell}, align 1{group}")
    page = e.op(f"lshr i64 {offset}, 12")
    e.emit(f"store i8 1, ptr {_shadow(e, 'shadow_pages', page)}{group}")
