"""Native code: what it is kept under between processes, loading it into this one, and calling it.

LLVM's library takes longer to load than all else that a launch needs. Code that was kept needs none of it: an object
file for x86-64 is linked here. LLVM links what this does not know (:func:`.native.load_object`).
"""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import os
import signal
import struct
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, cast

import llvmlite

from cudatool.sim import _calls, signals
from cudatool.sim.host_library import library

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = [
    "MARK",
    "STOP_SIGNAL",
    "Code",
    "NativeCache",
    "cache_key",
    "gather_mitigation",
    "guarded_call",
    "load_object",
]

MARK = "; PTX "
"""Begins the comment that stands before the code of an instruction: its line in the PTX, and what it is."""


class NativeCache(Protocol):
    """Keeps native code between processes. What it returns is whole, and as it was put: nothing checks it again."""

    def get(self, key: str) -> bytes | None:
        """Return what is kept under `key`, or None."""

    def put(self, key: str, data: bytes) -> None:
        """Keep `data`, if it can be kept."""


def cache_key(*parts: str) -> str:
    """Return the name under which native code is kept: depends on `parts`, the host CPU, LLVM and the translator."""
    digest = hashlib.sha256(_source_digest())
    for part in (*parts, _processor(), gather_mitigation(), llvmlite.__version__):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()


@cache
def _source_digest() -> bytes:
    """Return a digest of the translator's own source: native code made by another version is not used."""
    digest = hashlib.sha256()
    here = os.path.dirname(__file__)
    for folder in (here, os.path.join(here, "..", "..", "ptx")):
        for name in sorted(os.listdir(folder)):
            if name.endswith(".py"):
                with open(os.path.join(folder, name), "rb", buffering=0) as file:
                    digest.update(file.read())
    return digest.digest()


_CPUINFO = "/proc/cpuinfo"
# What Linux says of a processor that decides which instructions it has: on x86, and on ARM.
_OF_PROCESSOR: Final = (
    *("vendor_id", "cpu family", "model", "model name", "stepping", "flags"),
    *("CPU implementer", "CPU architecture", "CPU variant", "CPU part", "CPU revision", "Features"),
)
_INSTRUCTIONS: Final = {"flags", "Features"}


@cache
def _processor() -> str:
    """Return what this processor is and can do."""
    found = {}
    try:
        with open(_CPUINFO) as lines:
            for line in lines:
                name, _, value = line.partition(":")
                if name.strip() in _OF_PROCESSOR:
                    found[name.strip()] = value.strip()
                elif not name.strip() and found:
                    break  # all processors of a machine have the same
    except OSError:
        pass
    # Where Linux does not say, LLVM knows.
    return str(found) if _INSTRUCTIONS & found.keys() else str(_llvm().processor())


_GATHER_MITIGATION = "/sys/devices/system/cpu/vulnerabilities/gather_data_sampling"


@cache
def gather_mitigation() -> str:
    """Return what Linux says is done about gathers that leak data, empty where it says nothing.

    Linux's documentation, "GDS - Gather Data Sampling", has the sentences.
    """
    try:
        with open(_GATHER_MITIGATION) as file:
            return file.read().strip()
    except OSError:
        return ""


def _llvm() -> Any:
    return import_module("cudatool.sim.jit.native")  # takes a while to load


class Code:
    """Native code in memory; `entry` is the address of its function ``grid``, `owner` what keeps the memory."""

    def __init__(self, owner: object, entry: int) -> None:
        self.owner = owner
        self.entry = entry


def load_object(data: bytes) -> Code:
    """Link object code into this process."""
    library()  # C code that calls it
    if data.startswith(_X86_64):
        try:
            return _linked(data)
        except _UnknownError:
            pass
    return cast(Code, _llvm().load_object(data))


# ---- object files: "System V Application Binary Interface", and its "AMD64 Architecture Processor Supplement" ----

_X86_64: Final = b"\x7fELF\x02\x01\x01" + bytes(9) + struct.pack("<HH", 1, 62)  # ET_REL, EM_X86_64
_SYMBOL, _RELOCATION = struct.Struct("<IBBHQQ"), struct.Struct("<QQq")
_PROGBITS, _SYMTAB, _RELA, _UNWIND = 1, 2, 4, 0x70000001  # types of sections
_WRITE, _ALLOC, _TLS = 1, 2, 0x400  # flags of sections
_READ_AND_RUN: Final = mmap.PROT_READ | mmap.PROT_EXEC
_PC64, _GOTOFF64, _GOT64, _GOTPC64 = 24, 25, 27, 29  # types of relocations: LLVM's code model is large here


class _UnknownError(Exception):
    """Something in an object file is not known here."""


class _Section(NamedTuple):
    name: int
    kind: int
    flags: int
    address: int
    offset: int
    size: int
    link: int
    info: int
    alignment: int
    entry_size: int


class _Symbols(NamedTuple):
    """Symbols by their number: where those inside of the object lie, and the functions outside of it."""

    inside: dict[int, int]
    outside: dict[int, int]
    entry: int


def _linked(data: bytes) -> Code:
    """Return the code of an object file in memory.

    Code and constants come to lie one after the other, and after them the table (GOT) of the addresses of functions
    outside. All but this table is the same wherever it lies.
    """
    (at,), (size, count) = struct.unpack_from("<Q", data, 40), struct.unpack_from("<HH", data, 58)
    sections = [_Section(*struct.unpack_from("<IIQQQQIIQQ", data, at + number * size)) for number in range(count)]
    places, end = {}, 0  # of sections, from the beginning of the memory
    for number, one in enumerate(sections):
        if not one.flags & _ALLOC or one.kind == _UNWIND:  # nothing unwinds the stack of a kernel
            continue
        if one.kind != _PROGBITS or one.flags & (_WRITE | _TLS):
            raise _UnknownError
        places[number] = -(-end // one.alignment) * one.alignment
        end = places[number] + one.size
    table = -(-end // 8) * 8
    symbols = _symbols(data, sections, places)
    functions = symbols.outside.values()
    memory = mmap.mmap(-1, table + 8 * len(functions), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for number, place in places.items():
        one = sections[number]
        memory[place : place + one.size] = data[one.offset : one.offset + one.size]
    for one in sections:
        if one.kind == _RELA and one.info in places:
            _relocate(memory, data[one.offset : one.offset + one.size], places[one.info], table, symbols)
    struct.pack_into(f"<{len(functions)}Q", memory, table, *functions)
    begin = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    if ctypes.CDLL(None).mprotect(ctypes.c_size_t(begin), ctypes.c_size_t(len(memory)), _READ_AND_RUN):
        raise _UnknownError  # as where a process may not run what it has written; LLVM then says so
    return Code(memory, begin + symbols.entry)


def _symbols(data: bytes, sections: Sequence[_Section], places: Mapping[int, int]) -> _Symbols:
    inside, outside, entry = {}, {}, None
    table = next(one for one in sections if one.kind == _SYMTAB)
    rows = _SYMBOL.iter_unpack(data[table.offset : table.offset + table.size])
    for number, (at, _, _, section, value, _) in enumerate(rows):
        begin = sections[table.link].offset + at
        name = data[begin : data.index(b"\0", begin)].decode()
        if section in places:
            inside[number] = places[section] + value
            entry = inside[number] if name == "grid" else entry
        elif not section and name not in ("", "_GLOBAL_OFFSET_TABLE_"):
            outside[number] = _address_of(name)
    if entry is None:
        raise _UnknownError
    return _Symbols(inside, outside, entry)


def _relocate(memory: mmap.mmap, relocations: bytes, begin: int, table: int, symbols: _Symbols) -> None:
    """Fill in the distances that a section names, which begins at `begin`."""
    slots = {number: 8 * slot for slot, number in enumerate(symbols.outside)}
    for at, info, addend in _RELOCATION.iter_unpack(relocations):
        number, kind, place = info >> 32, info & 0xFFFF_FFFF, begin + at
        if kind == _GOTPC64:
            value = table - place
        elif kind == _GOT64 and number in slots:
            value = slots[number]
        elif kind in (_PC64, _GOTOFF64) and number in symbols.inside:
            value = symbols.inside[number] - (place if kind == _PC64 else table)
        else:
            raise _UnknownError
        struct.pack_into("<q", memory, place, value + addend)


def _address_of(name: str) -> int:
    """Return the address of a function of ours, or of one of C's that a compiler may call."""
    try:
        function = getattr(library() if name.startswith("cudatool_") else ctypes.CDLL(None), name)
    except AttributeError:
        raise _UnknownError from None
    return ctypes.cast(function, ctypes.c_void_p).value or 0


# ---- calling it ----

STOP_SIGNAL = int(signal.SIGRTMIN) + 12
"""Ends the native code that the thread runs that it is sent to (``cudatool_stop_signal``)."""


def guarded_call(function: int, argument: int, address: int, limit_ns: int = 0) -> int:
    """Run native code; return 0 or the signal that ended it, with the faulting address in the 8 bytes at `address`.

    On the main thread, Ctrl-C ends it if it will end the program. It is ended by STOP_SIGNAL after `limit_ns`, unless
    that is 0.
    """
    return _calls.guarded_call(function, argument, address, signals.interrupts(), limit_ns)
