"""Files of at most 1 MB that make as much work as they can, for every command that reads such files.

    python tests/security/worst_inputs.py                      # all of them, as a table
    python tests/security/worst_inputs.py --only ptx           # those with "ptx" in the name or the command
    python tests/security/worst_inputs.py --keep DIR           # also keep the files

A command ends with a result, or refuses the file with one line, in at most MOST_SECONDS of processor time and
MOST_MEMORY bytes, its start included. Time of the processor, as the machine may be busy.
"""

from __future__ import annotations

import argparse
import bz2
import gzip
import json
import lzma
import os
import pickle
import random
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from hostile_traces import records_of, trace_bytes

from cudatool.trace.events import RECORD, AccessFlag, Kind
from cudatool.trace.model import Frame

__all__ = ["INPUTS", "MOST_INPUT", "MOST_MEMORY", "MOST_SECONDS", "Input", "Outcome", "cases", "fault", "run"]

MOST_INPUT = 1_000_000
MOST_SECONDS = 5.0  # on a processor that does a million rounds of an empty loop in
_UNDISTURBED = 0.011
ENDED_AFTER = 20  # seconds: what takes this long has no end
MOST_MEMORY = 512 << 20


@dataclass(frozen=True)
class Input:
    """One file: its name in the folder, what makes it, and the commands that read it."""

    file: str
    make: Callable[[], bytes]
    commands: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Outcome:
    """What a command did: its status (negative: the signal that ended it), what it said, seconds and bytes."""

    status: int
    stderr: str
    seconds: float
    memory: int


# ---- what is run ----

_RECORDED = (
    ("snapshot", "{}"),
    ("snapshot", "{}", "--json"),
    ("snapshot", "{}", "--html", "out.html"),
    ("snapshot", "{}", "--torch", "out.pickle"),
    ("leaks", "{}"),
    ("diff", "{}", "{}"),
    ("diff", "{}", "{}", "--html", "out.html"),
    ("export", "{}", "--to", "perfetto", "-o", "out.json"),
    ("export", "{}", "--to", "sqlite", "-o", "out.sqlite"),
)
_REPLAYED = (
    ("replay", "{}"),
    ("replay", "{}", "--check"),
    ("replay", "{}", "--conf", "expandable_segments:True", "--memory", "8GiB"),
)
_SANITIZED = (
    ("sanitize", "--allow-empty", "{}"),
    ("sanitize", "--checks", "all", "--format", "sarif=out.sarif", "--format", "junit=out.xml", "--html", "out.html", "{}"),
    ("sanitize", "--checks", "all", "--format", "github=out.txt", "--format", "gitlab=out.gl", "--json", "{}"),
)  # fmt: skip
_TRACE = (*_RECORDED, *_REPLAYED, *_SANITIZED)
_PICKLE = (*_RECORDED, *_REPLAYED)
_PTX = (("ptx", "{}"),)
_BASELINE = (("sanitize", "--baseline", "{}", "racy.ctrace"),)
_RULES = (("sanitize", "--suppress", "@{}", "racy.ctrace"),)
_PROJECT = (("snapshot", "racy.ctrace"), ("sanitize", "racy.ctrace"))
_SOURCE = (("sanitize", "--html", "out.html", "source.ctrace"), ("snapshot", "source.ctrace", "--html", "out.html"))
_GIVEN = (  # the text itself, as an argument
    ("replay", "--conf", "{text}", "x.pickle"),
    ("replay", "--recorded-conf", "{text}", "x.pickle"),
    ("replay", "--memory", "{text}", "x.pickle"),
    ("sanitize", "--device", "{text}", "-c", "pass"),
    ("sanitize", "--suppress", "{text}", "racy.ctrace"),
)
_STATS = (("replay", "--check", "x.pickle"), ("replay", "--memory", "8GiB", "x.pickle"))


# ---- traces ----

_FACTS = {"device_kind": "sim", "accesses": True, "records_accesses": True}


def _rows(kind: Kind, count: int = 15_000) -> Any:
    made = np.zeros(count, RECORD)
    made["kind"], made["time"] = kind, np.arange(count)
    return made


def _numbers(count: int = 15_000) -> Any:
    return np.arange(count)


def _trace_of(kind: Kind, **columns: Any) -> bytes:
    made = _rows(kind)
    for name, values in columns.items():
        made[name] = values
    return trace_bytes(made, header=_FACTS)


def racy_trace(file: str = "a.py", line: int = 1) -> bytes:
    """Return a trace with one race, whose accesses are at a line of a file."""
    place = {"correlation": 1, "stack": 1, "name": 1}
    records = records_of(
        {"kind": Kind.STREAM_CREATE, "stream": 1},
        {"kind": Kind.STREAM_CREATE, "stream": 2},
        {"kind": Kind.BLOCK_ALLOC, "address": 1 << 30, "size": 4096, "aux0": 4096, "stream": 1, "stack": 1},
        {"kind": Kind.KERNEL_LAUNCH, "stream": 1, **place},
        {"kind": Kind.ACCESS, "address": 1 << 30, "size": 4096, "flags": AccessFlag.WRITE, "stream": 1, **place},
        {"kind": Kind.KERNEL_LAUNCH, "stream": 2, **place, "correlation": 2},
        {"kind": Kind.ACCESS, "address": 1 << 30, "size": 4096, "flags": AccessFlag.WRITE, "stream": 2, **place, "correlation": 2},
    )  # fmt: skip
    frames = [Frame(file, "work", line)]
    return trace_bytes(records, header=_FACTS, names=("", "kernel"), frames=frames, stacks=[(), [0]])


def _blocks(**columns: Any) -> bytes:
    given = {"address": (_numbers() + 1) << 9, "size": 512, "aux0": 500}
    return _trace_of(Kind.BLOCK_ALLOC, **{**given, **columns})


def _chance_sizes() -> Any:
    return np.random.default_rng(1).integers(1, 1 << 25, 15_000)


def _alternate(kinds: Sequence[Kind], **columns: Any) -> bytes:
    made = _rows(kinds[0])
    for index, kind in enumerate(kinds):
        made["kind"][index :: len(kinds)] = kind
    for name, values in columns.items():
        made[name] = values
    return trace_bytes(made, header=_FACTS)


def _churn() -> bytes:
    """Each block freed at once, and each of another size: no reuse, many segments."""
    half = _numbers() // 2
    return _alternate(
        (Kind.BLOCK_ALLOC, Kind.BLOCK_FREE_COMPLETED), address=(half + 1) << 26, size=(half * 7919 % 65536 + 1) << 9
    )


def _overlapping_accesses() -> bytes:
    chance = np.random.default_rng(1)
    pair = _numbers() // 2
    return _alternate(
        (Kind.KERNEL_LAUNCH, Kind.ACCESS),
        correlation=pair + 1,
        stream=pair % 50 + 1,
        flags=AccessFlag.WRITE,
        address=(1 << 30) + chance.integers(0, 1 << 20, 15_000),
        size=chance.integers(1, 1 << 20, 15_000),
    )


def _many_findings() -> bytes:
    """Each launch races with the launch before it, in bytes of its own, with a name and a stack of its own."""
    pair = _numbers(9000) // 2
    made = _rows(Kind.KERNEL_LAUNCH, 9000)
    made["kind"][1::2] = Kind.ACCESS
    made["correlation"], made["stream"], made["flags"] = pair + 1, pair % 2 + 1, AccessFlag.WRITE
    made["address"], made["size"] = (1 << 30) + (pair // 2 << 12), 4096
    made["name"], made["stack"] = pair % 4000 + 1, pair % 4000 + 1
    frames = [Frame(f"f{i}.py", f"g{i}", i) for i in range(4000)]
    names = ("", *(f"k{i}" for i in range(4000)))
    return trace_bytes(made, header=_FACTS, names=names, frames=frames, stacks=[(), *([i] for i in range(4000))])


def _findings_in_a_deep_stack() -> bytes:
    """Each launch races with the launch before it, with a name of its own, all of them in one stack."""
    made = _rows(Kind.KERNEL_LAUNCH, 9000)
    pair = _numbers(9000) // 2
    made["kind"][1::2] = Kind.ACCESS
    made["correlation"], made["stream"], made["flags"] = pair + 1, pair % 2 + 1, AccessFlag.WRITE
    made["address"], made["size"], made["name"], made["stack"] = (1 << 30) + (pair // 2 << 12), 4096, pair % 4000 + 1, 1
    frames = [Frame(f"f{i}.py", f"g{i}", i) for i in range(9)]
    names = ("", *(f"k{i}" for i in range(4000)))
    return trace_bytes(made, header=_FACTS, names=names, frames=frames, stacks=[(), list(range(9)) * 8000])


def _deep_stacks() -> bytes:
    made = _rows(Kind.BLOCK_ALLOC, 2000)
    made["address"], made["size"], made["stack"] = (_numbers(2000) + 1) << 9, 512, _numbers(2000) % 3 + 1
    frames = [Frame("a.py", f"f{i}", i) for i in range(9)]
    deep = [list(range(9)) * 8000] * 3
    return trace_bytes(made, header=_FACTS, frames=frames, stacks=[(), *deep])


def _ranges_in_ranges() -> bytes:
    made = _rows(Kind.RANGE_PUSH)
    made["name"] = _numbers() % 3 + 1
    made["kind"][10_000:] = Kind.BLOCK_ALLOC
    made["address"][10_000:], made["size"][10_000:] = (_numbers()[10_000:] + 1) << 9, 512
    return trace_bytes(made, header=_FACTS, names=("", "a", "b", "c" * 30_000))


def _header(facts: bytes) -> bytes:
    """Return a trace whose header is this JSON."""
    from zlib import crc32

    from cudatool.trace.file import FILE_HEADER, MAGIC, VERSION, Chunk, aligned, sealed_chunk

    head = (FILE_HEADER.pack(MAGIC, VERSION, len(facts), crc32(facts)) + facts).ljust(
        aligned(FILE_HEADER.size + len(facts)), b"\0"
    )
    records = records_of({"kind": Kind.BLOCK_ALLOC, "address": 512, "size": 512})
    return head + sealed_chunk(Chunk.RECORDS, records.tobytes()) + sealed_chunk(Chunk.END, struct.pack("<Q", 1))


def _long_names() -> bytes:
    made = _rows(Kind.KERNEL_LAUNCH, 4000)
    made["name"], made["stream"], made["correlation"] = 1, 1, _numbers(4000) + 1
    return trace_bytes(made, header=_FACTS, names=("", "_ZN" + "1aI" * 230_000))


_TRACES: dict[str, Callable[[], bytes]] = {
    "blocks that stay": _blocks,
    "blocks of any size": lambda: _blocks(size=_chance_sizes(), address=(_numbers() + 1) << 26),
    "blocks on streams of their own": lambda: _blocks(stream=_numbers() + 1),
    "blocks on devices": lambda: _blocks(device=_numbers() % 128),
    "blocks at one address": lambda: _blocks(address=1 << 30),
    "blocks on each other": lambda: _blocks(address=(1 << 30) + _numbers() * 8, size=1 << 20),
    "blocks of one after the other": _churn,
    "huge blocks": lambda: _blocks(address=(_numbers() + 1) << 40, size=1 << 40),
    "segments": lambda: _trace_of(Kind.SEGMENT_ALLOC, address=(_numbers() + 1) << 21, size=2 << 20),
    "maps and unmaps": lambda: _alternate((Kind.SEGMENT_MAP, Kind.SEGMENT_UNMAP), address=(_numbers() + 1) << 21, size=2 << 20),
    "failed allocations": lambda: _alternate((Kind.BLOCK_ALLOC, Kind.OOM), address=(_numbers() + 1) << 21, size=2 << 20),
    "streams": lambda: _alternate((Kind.EVENT_RECORD, Kind.KERNEL_LAUNCH), stream=_numbers() + 1, correlation=_numbers() + 1),
    "threads": lambda: _trace_of(Kind.KERNEL_LAUNCH, thread=_numbers(), stream=1, correlation=_numbers() + 1),
    "events and waits": lambda: _alternate(
        (Kind.EVENT_RECORD, Kind.STREAM_WAIT_EVENT), stream=_numbers() % 997 + 1, aux0=_numbers() // 2, address=_numbers() // 2
    ),
    "overlapping accesses": _overlapping_accesses,
    "findings": _many_findings,
    "findings in a deep stack": _findings_in_a_deep_stack,
    "deep stacks": _deep_stacks,
    "ranges in ranges": _ranges_in_ranges,
    "long names": _long_names,
    "graph captures": lambda: _alternate(
        (Kind.GRAPH_CAPTURE_BEGIN, Kind.KERNEL_LAUNCH, Kind.GRAPH_CAPTURE_END, Kind.GRAPH_LAUNCH), stream=_numbers() % 9 + 1,
        correlation=_numbers() + 1, aux0=_numbers() % 11,
    ),
    "a header of brackets": lambda: _header(b'{"a":' + b"[" * 900_000),
    "a header of digits": lambda: _header(b'{"a":' + b"9" * 900_000 + b"}"),
    "a header of facts": lambda: _header(json.dumps({f"k{i}": i for i in range(60_000)}).encode()),
    "a header of wrong facts": lambda: _header(b"{" + b",".join(b'"pid":"x"' for _ in range(90_000)) + b"}"),
    "settings": lambda: _header(json.dumps({"allocator_conf": "backend:native," * 60_000}).encode()),
    "settings of one": lambda: _header(json.dumps({"allocator_conf": "x" * 900_000}).encode()),
    "settings of divisions": lambda: _header(
        json.dumps({"allocator_conf": "roundup_power2_divisions:[" + "256:1," * 140_000 + "]"}).encode()
    ),
    "arguments": lambda: _header(json.dumps({"argv": ["x"] * 180_000}).encode()),
    "pools": lambda: _header(json.dumps({"pools": [[0, 1]] * 100_000}).encode()),
}  # fmt: skip


# ---- pickles ----

_FRAMES = [{"filename": "a.py", "name": "f", "line": line} for line in range(900)]
_DEEP = _FRAMES * 60


def _event(index: int, **facts: Any) -> dict[str, Any]:
    return {
        "action": "alloc",
        "addr": (index + 1) << 21,
        "size": 512,
        "stream": 0,
        "time_us": index,
        "frames": [],
        **facts,
    }


def _segment(index: int, **facts: Any) -> dict[str, Any]:
    given = {"address": (index + 1) << 25, "total_size": 2 << 20, "device": 0, "stream": 0, "segment_type": "large"}
    return {**given, "allocated_size": 0, "active_size": 0, "blocks": [], **facts}


def _snapshot(segments: list[Any], *rings: list[Any]) -> bytes:
    return pickle.dumps({"segments": segments, "device_traces": list(rings)}, protocol=4)


_BLOCK = {"size": 512, "state": "active_allocated", "requested_size": 500, "frames": _FRAMES[:3]}


def _compressed(pack: Callable[[bytes], bytes], count: int) -> bytes:
    """Return a sound snapshot that is packed much smaller than it is."""
    return pack(_snapshot([], [_event(i % 500) for i in range(count)]))


_SNAPSHOTS: dict[str, Callable[[], bytes]] = {
    "events": lambda: _snapshot([], [_event(i) for i in range(22_000)]),
    "frees": lambda: _snapshot([], [_event(i // 2, action=("alloc", "free_completed")[i % 2]) for i in range(22_000)]),
    "an event, shared": lambda: _snapshot([], [_event(1)] * 300_000),
    "rings": lambda: _snapshot([], *([_event(i)] for i in range(127))),
    "segments": lambda: _snapshot([_segment(i) for i in range(15_000)], [_event(1)]),
    "blocks": lambda: _snapshot([_segment(0, total_size=512 * 60_000, blocks=[_BLOCK] * 60_000)], [_event(1)]),
    "expandable segments": lambda: _snapshot(
        [_segment(i, is_expandable=True, total_size=1 << 30, address=(i + 1) << 30) for i in range(1000)], [_event(1)]
    ),
    "frames, shared": lambda: _snapshot([], [_event(i, frames=_FRAMES[i % 400 :]) for i in range(275)]),
    "deep frames": lambda: _snapshot([], [_event(i, frames=_DEEP) for i in range(3000)]),
    "streams": lambda: _snapshot([], [_event(i, stream=i) for i in range(20_000)]),
    "any size": lambda: _snapshot([], [_event(i, size=(i * 7919 % 65536 + 1) << 9, addr=i << 26) for i in range(20_000)]),
    "nested lists": lambda: b"\x80\x04" + b"]" * 400_000 + b"a" * 399_999 + b".",
    "nested text": lambda: b"\x80\x04" + b"(" * 900_000 + b".",
    "digits": lambda: b"\x80\x02I" + b"9" * 900_000 + b"\n.",
    "a long integer": lambda: b"\x80\x02\x8b" + struct.pack("<i", 900_000) + b"\x7f" * 900_000 + b".",
    "settings": lambda: pickle.dumps(
        {"segments": [], "device_traces": [[_event(1)]], "allocator_settings": {f"k{i}": i for i in range(50_000)}}
    ),
    "metadata": lambda: pickle.dumps(
        {"segments": [], "device_traces": [[_event(1)]], "user_metadata": "x" * 300_000, "external_annotations": [
            {"name": f"a{i}", "stage": ("START", "END")[i % 2], "time_us": i, "device": 0} for i in range(10_000)
        ]}
    ),
}  # fmt: skip

_PACKED: dict[str, Callable[[], bytes]] = {
    "sound events.pickle.xz": lambda: _compressed(lzma.compress, 300_000),
    "sound events.pickle.gz": lambda: _compressed(gzip.compress, 300_000),
    "zeros.pickle.xz": lambda: lzma.compress(bytes(1 << 30), preset=0),
    "zeros.pickle.gz": lambda: gzip.compress(bytes(1 << 29), 9)[:900_000],
    "a dictionary of 4 GiB.pickle.xz": lambda: _wide_dictionary(),
    "many members.pickle.gz": lambda: gzip.compress(b"", 9) * 45_000,
    "many streams.pickle.xz": lambda: lzma.compress(b"") * 30_000,
    "bz2.pickle": lambda: bz2.compress(bytes(1 << 28)),
    "a log.csv.gz": lambda: gzip.compress(_log((i, 0, "allocate", i, 1, 0) for i in range(30_000))),
}


def _wide_dictionary() -> bytes:
    wide = [{"id": lzma.FILTER_LZMA2, "dict_size": 1 << 26, "preset": 0}]
    return lzma.compress(_snapshot([], [_event(1)]), filters=wide)


# ---- RMM's logs ----


def _log(rows: Iterator[tuple[Any, ...]]) -> bytes:
    lines = ["Thread,Time,Action,Pointer,Size,Stream"]
    lines += [f"{a},{b},{c},0x{d:x},{e},0x{f:x}" for a, b, c, d, e, f in rows]
    text = "\n".join(lines).encode()[:MOST_INPUT]
    return text[: text.rindex(b"\n") + 1]


_HEAD = b"Thread,Time,Action,Pointer,Size,Stream\n"
_LOGS: dict[str, Callable[[], bytes]] = {
    "blocks that stay": lambda: _log((1, i, "allocate", i << 9, 512, 0) for i in range(50_000)),
    "blocks at one address": lambda: _log((1, 1, "allocate", 1, 1, 0) for i in range(50_000)),
    "frees": lambda: _log((1, 1, "free", i, 1, 0) for i in range(50_000)),
    "streams": lambda: _log((1, 1, "allocate", i << 9, 1, i) for i in range(50_000)),
    "threads": lambda: _log((i, 1, "allocate", i << 9, 1, 0) for i in range(50_000)),
    "days": lambda: _log((1, ("23:59:59", "00:00:00")[i % 2], "allocate", i, 1, 0) for i in range(50_000)),
    "failures": lambda: _log((1, 1, "allocate failure", 0, (1 << 64) - 1, 0) for i in range(50_000)),
    "blocks on each other": lambda: _log((1, 1, "allocate", i, 1 << 40, 0) for i in range(50_000)),
    "empty lines": lambda: _HEAD + b"\n" * 900_000,
    "headers": lambda: _HEAD * 25_000,
    "commas": lambda: _HEAD + b"," * 900_000,
    "a long number": lambda: _HEAD + b"1,1,allocate,0x1," + b"9" * 900_000 + b",0x0\n",
}


# ---- PTX and its containers ----

_PTX_HEAD = ".version 8.3\n.target sm_90\n.address_size 64\n"


def _kernel(body: str, *, before: str = "", declared: str = "", name: str = "k") -> str:
    registers = ".reg .pred %p<9>; .reg .b32 %r<99>; .reg .f32 %f<99>; .reg .b64 %d<99>;"
    return (
        f"{before}.visible .entry {name}(.param .u64 a, .param .u32 n) {{\n{registers}{declared}\n"
        f"ld.param.u64 %d1, [a]; ld.param.u32 %r1, [n]; setp.lt.u32 %p1, %r1, 5;\n{body}\nret;\n}}\n"
    )


def _ptx(*kernels: str) -> bytes:
    return (_PTX_HEAD + "".join(kernels)).encode()


def _repeat(line: str, *, room: int = 900_000) -> str:
    """Return `line` as often as there is room, its ``{i}`` counting."""
    return "".join(line.replace("{i}", str(i)).replace("{j}", str(i + 1)) for i in range(room // (len(line) + 4)))


_ADD = "ld.global.f32 %f1, [%d1]; fma.rn.f32 %f2, %f1, %f1, %f2; st.global.f32 [%d1+4], %f2; add.s64 %d1, %d1, 4;\n"
_TEXTS: dict[str, Callable[[], bytes]] = {
    "straight code": lambda: _ptx(_kernel(_repeat(_ADD))),
    "few kernels of straight code": lambda: _ptx(*(_kernel(_repeat(_ADD, room=90_000), name=f"k{i}") for i in range(10))),
    "kernels": lambda: _ptx(*(f".entry k{i}(){{ret;}}\n" for i in range(40_000))),
    "small kernels": lambda: _ptx(*(_kernel("st.global.u32 [%d1], %r1;", name=f"k{i}") for i in range(3000))),
    "kernels of other names": lambda: _ptx(*(f".entry _Z{i}k(.param .u64 a){{ret;}}\n" for i in range(20_000))),
    "declarations": lambda: _ptx(*(f".func f{i};\n" for i in range(60_000)), _kernel("")),
    "functions": lambda: _ptx(*(f".func f{i}(){{ret;}}\n" for i in range(40_000)), _kernel("call f39999;")),
    "functions that call all others": lambda: _ptx(
        *(f".func f{i}(){{" + "".join(f"call f{j};" for j in range(i)) + "ret;}\n" for i in range(400)), _kernel("call f399;")
    ),
    "recursion of all": lambda: _ptx(
        *(f".func f{i};\n" for i in range(250)),
        *(f".func f{i}(){{" + "".join(f"call f{j};" for j in range(250)) + "ret;}\n" for i in range(250)), _kernel("call f0;")
    ),
    "labels": lambda: _ptx(_kernel(_repeat("L{i}:\n"))),
    "branches to the next": lambda: _ptx(_kernel(_repeat("@%p1 bra L{i};\nL{i}:\n"))),
    "diamonds": lambda: _ptx(_kernel(_repeat("@%p1 bra A{i}; add.s32 %r1, %r1, 1; bra B{i}; A{i}: add.s32 %r1, %r1, 2; B{i}:\n"))),
    "diamonds of addresses": lambda: _ptx(
        _kernel(_repeat("@%p1 bra A{i}; add.s64 %d1, %d1, {i}; bra B{i}; A{i}: shl.b64 %d1, %d1, 1; B{i}: st.global.u32 [%d1], 1;\n"))
    ),
    "loops in loops": lambda: _ptx(
        _kernel("".join(f"L{i}: add.s64 %d1, %d1, 4;\n" for i in range(9000)) + "".join(f"@%p1 bra L{i};\n" for i in reversed(range(9000))))
    ),
    "loops one after the other": lambda: _ptx(_kernel(_repeat("L{i}: ld.global.u32 %r2, [%d1]; add.s64 %d1, %d1, 4; @%p1 bra L{i};\n"))),
    "branches anywhere": lambda: _ptx(
        _kernel("".join(f"L{i}: @%p1 bra L{random.Random(i).randrange(20_000)};\n" for i in range(20_000)))
    ),
    "a table of targets": lambda: _ptx(
        _kernel(f"T: .branchtargets {','.join(f'L{i}' for i in range(30_000))};\nbrx.idx %r1, T;\n" + "".join(f"L{i}: ret;\n" for i in range(30_000)))
    ),
    "tables of targets": lambda: _ptx(
        _kernel("".join(f"T{i}: .branchtargets {','.join(f'L{j}' for j in range(300))};\nL{i}: brx.idx %r1, T{i};\n" for i in range(300)))
    ),
    "a shared array": lambda: _ptx(_kernel("", before=".shared .b8 s[281474976710655];\n")),
    "shared arrays": lambda: _ptx(_kernel("st.shared.u32 [s1], 1;", before=_repeat(".shared .align 16 .b8 s{i}[1000000000000];\n"))),
    "arrays": lambda: _ptx(_kernel("", before=_repeat(".global .align 16 .b8 s{i}[1000000000000];\n"))),
    "a large initializer": lambda: _ptx(_kernel("", before=".global .b8 s[] = {" + "1," * 440_000 + "1};\n")),
    "addresses in an initializer": lambda: _ptx(_kernel("", before=".global .b8 q[8]; .global .u64 s[] = {" + "q," * 440_000 + "q};\n")),
    "local arrays": lambda: _ptx(_kernel("", declared=_repeat(".local .align 16 .b8 s{i}[100000];\n"))),
    "registers": lambda: _ptx(_kernel("", declared=_repeat(".reg .b32 %q{i};\n"))),
    "registers by numbers": lambda: _ptx(_kernel("", declared=_repeat(".reg .b64 %q{i}_<9>;\n"))),
    "registers in one": lambda: _ptx(_kernel("", declared=".reg .b32 " + ",".join(f"%q{i}" for i in range(100_000)) + ";\n")),
    "values in a chain": lambda: _ptx(_kernel(_repeat("add.s64 %q{j}, %q{i}, 4;\n"), declared=".reg .b64 %q<60000>;")),
    "values backwards": lambda: _ptx(
        _kernel("".join(f"mov.b64 %q{i + 1}, %q{i};\n" for i in reversed(range(30_000))), declared=".reg .b64 %q<30002>;")
    ),
    "values that double": lambda: _ptx(_kernel(_repeat("add.s64 %q{j}, %q{i}, %q{i};\n"), declared=".reg .b64 %q<60000>;")),
    "selections": lambda: _ptx(_kernel(_repeat("selp.b64 %q{j}, %q{i}, %d1, %p1; st.global.u32 [%q{j}], 1;\n"), declared=".reg .b64 %q<60000>;")),
    "many live values": lambda: _ptx(
        _kernel(
            "".join(f"ld.global.u32 %q{i}, [%d1+{i * 4}];\n" for i in range(12_000))
            + "".join(f"bar.sync 0; st.global.u32 [%d1], %q{i};\n" for i in range(12_000)), declared=".reg .b32 %q<12000>;"
        )
    ),
    "barriers": lambda: _ptx(_kernel(_repeat("bar.sync 0;\n"))),
    "barriers in branches": lambda: _ptx(_kernel(_repeat("@%p1 bra L{i}; bar.sync 0; L{i}:\n"))),
    "shuffles": lambda: _ptx(_kernel(_repeat("shfl.sync.idx.b32 %r2, %r1, 0, 31, -1;\n"))),
    "atomics": lambda: _ptx(_kernel(_repeat("atom.global.add.u32 %r2, [%d1], 1;\n"))),
    "matrices": lambda: _ptx(_kernel(_repeat(
        "wmma.mma.sync.aligned.row.col.m16n16k16.f32.f32 {%f1,%f2,%f3,%f4,%f5,%f6,%f7,%f8}, {%r1,%r2,%r3,%r4,%r5,%r6,%r7,%r8}, "
        "{%r1,%r2,%r3,%r4,%r5,%r6,%r7,%r8}, {%f1,%f2,%f3,%f4,%f5,%f6,%f7,%f8};\n"))),
    "divisions": lambda: _ptx(_kernel(_repeat("div.rn.f32 %f1, %f1, %f2; sqrt.rn.f32 %f1, %f1; sin.approx.f32 %f1, %f1;\n"))),
    "comments": lambda: _ptx("/*x*/ " * 150_000, _kernel("")),
    "comments of lines": lambda: _ptx("//\n" * 300_000, _kernel("")),
    "lines of sources": lambda: _ptx('.file 1 "a.cu"\n', _kernel(_repeat(".loc 1 {i} 1\n"))),
    "inlined lines": lambda: _ptx(
        '.file 1 "a.cu"\n', _kernel(_repeat(".loc 1 {i} 1, function_name $s, inlined_at 1 {i} 1\nadd.s32 %r1, %r1, 1;\n"))
    ),
    "files": lambda: _ptx(_repeat('.file {i} "a.cu"\n'), _kernel("")),
    "sections": lambda: _ptx(_repeat(".section .debug_str { .b8 1 }\n"), _kernel("")),
    "a section": lambda: _ptx(".section .debug_str {" + ".b8 1,2,3\n" * 80_000 + "}\n", _kernel("")),
    "scopes": lambda: _ptx(_kernel("{" * 400_000 + "}" * 400_000)),
    "scopes with registers": lambda: _ptx(_kernel(_repeat("{ .reg .b32 %q; mov.u32 %q, 1; }\n"))),
    "scopes in scopes": lambda: _ptx(_kernel("{ .reg .b32 %q; mov.u32 %q, 1;\n" * 24_000 + "}" * 24_000)),
    "prototypes": lambda: _ptx(_kernel(_repeat("P{i}: .callprototype (.param .b32 _) _ (.param .b64 _);\n"))),
    "calls through pointers": lambda: _ptx(
        ".func g() { ret; }\n", _kernel("P: .callprototype _ ();\n" + _repeat("mov.u64 %d2, g; call %d2, (), P;\n"))
    ),
    "calls": lambda: _ptx(".func g(.param .b64 a) { ret; }\n", _kernel(_repeat("{ .param .b64 q; st.param.b64 [q], %d1; call g, (q); }\n"))),
    "calls of much": lambda: _ptx(
        ".func g() {" + "membar.gl;\n" * 5000 + "ret; }\n", _kernel("call g;\n" * 80_000)
    ),
    "parameters": lambda: _ptx(f".entry k({','.join(f'.param .u64 p{i}' for i in range(50_000))}) {{ ret; }}\n"),
    "parameters of calls": lambda: _ptx(
        f".func g({','.join(f'.param .u64 p{i}' for i in range(20_000))}) {{ ret; }}\n",
        _kernel(f"call g, ({','.join('%d1' for i in range(20_000))});"),
    ),
    "a large vector": lambda: _ptx(_kernel("mov.b64 {" + "%r1," * 220_000 + "%r1}, %d1;")),
    "a long name": lambda: _ptx(_kernel("", name="x" * 900_000)),
    "a mangled name": lambda: _ptx(_kernel("", name="_ZN" + "1aI" * 250_000)),
    "a mangled name that doubles": lambda: _ptx(_kernel("", name="_Z1fI" + "".join(f"1aIS{'_' if not i else chr(48 + i % 10) + '_'}S_E" for i in range(300)) + "Evv")),
    "a number": lambda: _ptx(_kernel("mov.u32 %r1, " + "9" * 900_000 + ";")),
    "an instruction": lambda: _ptx(_kernel("add" + ".x" * 440_000 + " %r1, %r1, %r1;")),
    "unknown instructions": lambda: _ptx(_kernel(_repeat("foo{i}.bar %r1;\n"))),
    "nothing": lambda: b"\n" * 999_000,
    "text": lambda: b"x " * 450_000,
    "brackets": lambda: _ptx(_kernel("ld.global.u32 %r1, " + "[" * 900_000)),
    "a string": lambda: _ptx('.file 1 "' + "\\101" * 220_000 + '"\n', _kernel("")),
    "targets": lambda: b".version 8.3\n.target " + b"sm_90," * 140_000 + b"sm_90\n",
    "printf": lambda: _ptx(
        ".extern .func (.param .b32 r) vprintf (.param .b64 a, .param .b64 b);\n",
        _kernel(_repeat("{ .param .b64 x; .param .b64 y; .param .b32 z; call (z), vprintf, (x, y); }\n")),
    ),
    "asynchronous copies": lambda: _ptx(_kernel(_repeat("cp.async.ca.shared.global [%r1], [%d1], 16; cp.async.commit_group;\n"))),
    "textures": lambda: _ptx(_kernel(_repeat("tex.2d.v4.f32.f32 {%f1,%f2,%f3,%f4}, [%d1, {%f5,%f6}];\n"))),
}  # fmt: skip


def _fatbin(*forms: bytes) -> bytes:
    content = b"".join(forms)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(content)) + content


def _form(text: bytes, *, size: int | None = None, packed: int = 0, flags: int = 0, original: int = 0) -> bytes:
    entry = struct.pack(
        "<HHIQIIHHIIIQQQ", 1, 0x101, 72, len(text) if size is None else size, packed, 64, 3, 8, 90, 64, 0, flags, 0, original
    )  # fmt: skip
    return entry.ljust(72, b"\0") + text


_TINY = _ptx(".entry k(){ret;}\n")


def _lz4_of(text: bytes) -> bytes:
    """Return LZ4 of a repeated line: as it is, then a reference of 4 bytes each, as slow to read as can be."""
    piece = text[:64].ljust(64)
    return bytes((0xF0, 64 - 15)) + piece + bytes((64, 0)) + bytes((0x00, 64, 0)) * 290_000


def _overlapping_forms() -> bytes:
    """Return units whose compressed texts are all the bytes that follow, each the other's too."""
    heads = [_fatbin(_form(b"", size=0, packed=900_000, flags=0x2000, original=1_400_000)) for _ in range(60)]
    return b"".join(heads) + _lz4_of(_TINY)


def _elf(sections: int, names: bytes = b"\0") -> bytes:
    header = b"\x7fELF\x02\x01\x01".ljust(16, b"\0")
    header += struct.pack("<HHIQQQIHHHHHH", 1, 62, 1, 0, 0, 64, 0, 64, 0, 0, 64, sections, 0)
    section = struct.pack("<IIQQQQ", 0, 1, 0, 0, 64, len(names)).ljust(64, b"\0")
    return header + section * sections + names


def _archive(members: Iterator[bytes]) -> bytes:
    return b"!<arch>\n" + b"".join(
        b"x".ljust(48) + str(len(one)).encode().ljust(10) + b"`\n" + one + b"\n" * (len(one) % 2) for one in members
    )


_CONTAINERS: dict[str, Callable[[], bytes]] = {
    "units.fatbin": lambda: _fatbin(_form(_TINY.ljust(72))) * 6000,
    "empty units.fatbin": lambda: _fatbin() * 60_000,
    "forms.fatbin": lambda: _fatbin(*[_form(b"", size=0)] * 13_000),
    "one form of much.fatbin": lambda: _fatbin(_form(_ptx(_kernel(_repeat(_ADD))))),
    "LZ4 of much.fatbin": lambda: _fatbin(_packed_form(_lz4_of(_TINY), 64 + 4 * 290_001)),
    "LZ4 of much more.fatbin": lambda: _fatbin(_packed_form(b"\x1f \x01\0" + b"\xff" * 230_000 + b"\0", 14 << 20)),
    "LZ4 of others.fatbin": _overlapping_forms,
    "LZ4 in units.fatbin": lambda: _fatbin(_packed_form(b"\x1f \x01\0" + b"\xff" * 3000 + b"\0", 700_000)) * 280,
    "zeros.fatbin": lambda: struct.pack("<IHHQ", 0xBA55ED50, 1, 16, 0) + bytes(950_000),
    "nothing but magic.fatbin": lambda: struct.pack("<I", 0xBA55ED50) + b"\1" * 900_000,
    "sections.o": lambda: _elf(15_000),
    "sections of long names.o": lambda: _elf(5000, b".nv_fatbi" * 60_000 + b"\0"),
    "members.a": lambda: _archive(_elf(3) for _ in range(2500)),
    "small members.a": lambda: _archive(b"" for _ in range(15_000)),
    "machine code.cubin": lambda: _elf(3)[:18] + struct.pack("<H", 190) + _elf(3)[20:] + bytes(900_000),
}


def _packed_form(packed: bytes, original: int) -> bytes:
    return _form(packed, packed=len(packed), flags=0x2000, original=original)


# ---- baselines, rules, projects, sources ----


def _baseline(entries: Sequence[Any]) -> bytes:
    return json.dumps({"schema": "cudatool.baseline/1", "findings": entries}, separators=(",", ":")).encode()


_BASELINES: dict[str, Callable[[], bytes]] = {
    "brackets": lambda: b"[" * 990_000,
    "objects": lambda: b'{"a":' * 190_000,
    "digits": lambda: b"9" * 990_000,
    "findings in findings": lambda: b'{"schema":"cudatool.baseline/1","findings":' + b"[" * 900_000,
    "entries": lambda: _baseline([{"fingerprint": f"{i:x}"} for i in range(40_000)]),
    "an entry of many keys": lambda: _baseline([{f"k{i}": "" for i in range(60_000)}]),
    "a long fingerprint": lambda: _baseline([{"fingerprint": "f" * 900_000}]),
    "a long date": lambda: _baseline([{"fingerprint": "f", "expires": "9" * 900_000}]),
    "dates": lambda: _baseline([{"fingerprint": f"{i:x}", "expires": "2001-01-01"} for i in range(20_000)]),
    "escapes": lambda: b'{"schema":"' + b"\\ud800" * 150_000 + b'"}',
    "numbers": lambda: b"[" + b"1e308," * 150_000 + b"1]",
}
_RULES_TEXTS: dict[str, Callable[[], bytes]] = {
    "rules": lambda: b"kind=race\n" * 90_000,
    "other rules": lambda: "".join(f"file=a{i}*\n" for i in range(70_000)).encode(),
    "rules of patterns": lambda: "".join(f"kind=[rR]*{i}*|?ace*\n" for i in range(40_000)).encode(),
    "brackets": lambda: b"kind=" + b"[" * 900_000,
    "brackets of a file": lambda: b"file=" + b"[" * 900_000,
    "ranges": lambda: b"file=[" + b"a-z" * 300_000 + b"]",
    "stars": lambda: b"file=" + b"*a" * 450_000,
    "stars of rules": lambda: (b"operation=" + b"*k*e*r*n*" * 100 + b"x\n") * 1000,
    "questions": lambda: b"file=" + b"?" * 900_000,
    "a term": lambda: b"x" * 990_000,
    "quotes": lambda: b'"' * 990_000,
    "an open quote": lambda: b'kind="' + b"x" * 900_000,
    "backslashes": lambda: b"\\" * 990_000,
    "spaces": lambda: b" " * 990_000,
    "comments": lambda: b"#" * 990_000,
    "lines": lambda: b"\n" * 990_000,
    "separators": lambda: "\u2028".encode() * 330_000,
    "terms": lambda: b"kind=race " * 90_000,
}
_PROJECTS: dict[str, Callable[[], bytes]] = {
    "brackets": lambda: b"[tool.cudatool]\nchecks = " + b"[" * 900_000,
    "tables": lambda: b"[tool.cudatool]\n" + b"".join(b"[a%d]\n" % i for i in range(100_000)),
    "tables in tables": lambda: b"[tool.cudatool]\n[" + b"a." * 450_000 + b"a]\n",
    "keys in keys": lambda: b"[tool.cudatool]\n" + b"a." * 450_000 + b"a = 1\n",
    "long tables": lambda: b"[tool.cudatool]\n" + b"".join(b"[" + b"a." * 200 + b"b%d]\n" % i for i in range(2000)),
    "dotted keys": lambda: b"[tool.cudatool]\n[x]\n" + b"".join(b"a." * 300 + b"b%d = 1\n" % i for i in range(1500)),
    "inline tables": lambda: b"[tool.cudatool]\na = " + b"{a=" * 300_000,
    "digits": lambda: b"[tool.cudatool]\na = " + b"9" * 900_000 + b"\n",
    "a long string": lambda: b'[tool.cudatool]\ndevice = "' + b"x" * 900_000 + b'"\n',
    "memory of a device": lambda: b'[tool.cudatool]\ndevice = "sim:memory=' + b"9" * 900_000 + b'"\n',
    "checks": lambda: b"[tool.cudatool]\nchecks = [" + b'"race",' * 120_000 + b"]\n",
    "formats": lambda: b"[tool.cudatool]\nformat = [" + b'"json=a",' * 90_000 + b"]\n",
    "suppressions": lambda: b"[tool.cudatool]\nsuppress = [" + b'"kind=race",' * 70_000 + b"]\n",
    "a suppression of brackets": lambda: b'[tool.cudatool]\nsuppress = "file=' + b"[" * 900_000 + b'"\n',
    "suppressions of the file": lambda: b"[tool.cudatool]\nsuppress = [" + b'"@pyproject.toml",' * 50_000 + b"]\n",
    "dates": lambda: b"[tool.cudatool]\na = " + b"1979-05-27T07:32:00Z" * 40_000 + b"\n",
    "comments": lambda: b"[tool.cudatool]\n" + b"#\n" * 400_000,
}
_SOURCES: dict[str, Callable[[], bytes]] = {
    "minus signs": lambda: b"a = " + b"-" * 900_000 + b"1  # cudatool: ignore[race]\n",
    "brackets": lambda: b"a = " + b"(" * 900_000 + b"\n# cudatool: ignore[race]\n",
    "a comment": lambda: b"a = 1  " + b"#" * 900_000 + b" cudatool:\n",
    "comments in a statement": lambda: b"a = [\n" + b"# cudatool: ignore\n" * 45_000 + b"]\n",
    "names": lambda: b"a = 1  # cudatool: ignore[" + b"a," * 440_000 + b"]\n",
    "a line": lambda: b"a = 1; " * 130_000 + b"# cudatool: ignore[x]\n",
    "attributes": lambda: b"a" + b".a" * 450_000 + b"  # cudatool: ignore[x]\n",
    "sums": lambda: b"a = 1" + b"+1" * 440_000 + b"  # cudatool: ignore[x]\n",
    "nested blocks": lambda: (
        b"".join(b" " * i + b"if 1:\n" for i in range(90)) + b" " * 90 + b"x = 1 # cudatool: ignore[x]\n" * 9
    ),
    "open strings": lambda: b'"""' * 300_001 + b"# cudatool: ignore[x]\n",
    "formatted strings": lambda: b'f"' + b"{" * 900_000 + b"# cudatool: ignore[x]\n",
    "no newlines": lambda: b"\r" * 900_000 + b"# cudatool: ignore[x]",
    "zeros": lambda: bytes(900_000) + b"# cudatool: ignore[x]",
    "functions": lambda: b"".join(b"def f%d(): pass\n" % i for i in range(50_000)) + b"# cudatool: ignore[x]\n",
}
_STATISTICS: dict[str, Callable[[], bytes]] = {
    "brackets": lambda: b"[" * 990_000,
    "digits": lambda: b'{"memory_fraction":' + b"9" * 900_000 + b"}",
    "facts": lambda: json.dumps({"stats": {f"k{i}": i for i in range(50_000)}}).encode(),
    "devices": lambda: json.dumps({"device_total_bytes": [1] * 200_000}).encode(),
}

_STRINGS: dict[str, Callable[[], bytes]] = {
    "settings": lambda: b"backend:native," * 7000,
    "divisions": lambda: b"roundup_power2_divisions:[" + b",".join([b"256:1"] * 19_000) + b"]",
    "brackets": lambda: b"roundup_power2_divisions:" + b"[" * 100_000,
    "digits": lambda: b"9" * 120_000,
    "digits of a size": lambda: b"9" * 120_000 + b"GiB",
    "digits of a device's memory": lambda: b"sim:memory=" + b"9" * 120_000,
    "options of a device": lambda: b"sim:" + b"seed=1," * 17_000,
    "an exponent": lambda: b"1e" + b"9" * 100_000,
    "words": lambda: b"a " * 60_000,
    "a word": lambda: b"kind=" + b"x" * 120_000,
}

_FORMATS: tuple[tuple[str, str, dict[str, Callable[[], bytes]], tuple[tuple[str, ...], ...]], ...] = (
    ("trace", "x.ctrace", _TRACES, _TRACE),
    ("snapshot", "x.pickle", _SNAPSHOTS, _PICKLE),
    ("RMM log", "x.csv", _LOGS, _RECORDED),
    ("ptx", "x.ptx", _TEXTS, _PTX),
    ("baseline", "x.json", _BASELINES, _BASELINE),
    ("rules", "x.txt", _RULES_TEXTS, _RULES),
    ("project", "pyproject.toml", _PROJECTS, _PROJECT),
    ("source", "source.py", _SOURCES, _SOURCE),
    ("statistics", "x.stats.json", _STATISTICS, _STATS),
    ("text", "x.txt", _STRINGS, _GIVEN),
)
INPUTS: dict[str, Input] = {
    f"{format_}: {name}": Input(file, make, commands)
    for format_, file, table, commands in _FORMATS
    for name, make in table.items()
}
INPUTS |= {f"packed: {name}": Input("x." + name.partition(".")[2], make, _PICKLE) for name, make in _PACKED.items()}
INPUTS |= {
    f"container: {name}": Input("x." + name.rpartition(".")[2], make, _PTX) for name, make in _CONTAINERS.items()
}


# ---- running them ----


def slowness() -> float:
    """Return how much longer the processor takes for the same work now than when no one else uses its core."""
    begin = time.process_time()
    for _ in range(1_000_000):
        pass
    return max((time.process_time() - begin) / _UNDISTURBED, 1.0)


# A small process between this one and the command: what a process that starts another has in memory counts for it.
_MEASURE = """
import os, resource, sys
child = os.fork()
if not child:
    os.dup2(os.open("stdout", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
    os.dup2(os.open("stderr", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
    seconds = int(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.execv(sys.argv[2], sys.argv[2:])
_, status, used = os.wait4(child, 0)
print(os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime, used.ru_maxrss << 10)
"""


def prepare(name: str, folder: Path) -> None:
    """Write the file of an input, and those that its commands read beside it."""
    one = INPUTS[name]
    content = one.make()
    assert len(content) <= MOST_INPUT, (name, len(content))
    (folder / one.file).write_bytes(content)
    (folder / "racy.ctrace").write_bytes(racy_trace())
    if one.file == "source.py":
        os.utime(folder / one.file, (1, 1))  # older than the recording, or it would not be quoted
        (folder / "source.ctrace").write_bytes(racy_trace(str(folder / one.file)))
    if one.file in ("x.stats.json", "x.txt"):
        (folder / "x.pickle").write_bytes(_snapshot([], [_event(1)]))


def run(command: Sequence[str], file: str, folder: Path) -> Outcome:
    """Run a command of an input; it is ended after ENDED_AFTER seconds of processor time."""
    for old in folder.glob("out*"):
        old.unlink()
    text = (folder / file).read_text() if "{text}" in command else ""
    words = [word.replace("{}", file).replace("{text}", text) for word in command]
    environment = {**os.environ, "CUDATOOL_DEVICE": "sim", "CUDATOOL_CACHE_DIR": str(folder / "cache")}
    slow = slowness()
    measured = [sys.executable, "-ISc", _MEASURE, str(ENDED_AFTER)]
    done = subprocess.run(
        [*measured, sys.executable, "-m", "cudatool", *words], cwd=folder, env=environment, capture_output=True, text=True, check=True
    )  # fmt: skip
    status, seconds, memory = done.stdout.split()
    stderr = (folder / "stderr").read_text(errors="replace")
    return Outcome(int(status), stderr, float(seconds) / max(slow, slowness()), int(memory))


def fault(outcome: Outcome, *, most_seconds: float = MOST_SECONDS) -> str:
    """Return what is wrong with what a command did, an empty string if nothing is."""
    if outcome.status < 0:
        return f"ended by signal {-outcome.status} after {outcome.seconds:.1f} s"
    if outcome.status not in (0, 1, 2, 4) or "Traceback" in outcome.stderr:
        return f"status {outcome.status}: {outcome.stderr[-300:]}"
    if outcome.status == 2 and "cudatool: error: " in outcome.stderr:
        lines = [line for line in outcome.stderr.splitlines() if line.startswith("cudatool: error: ")]
        if len(lines) != 1 or len(lines[0]) > 600:
            return f"not one line: {outcome.stderr[:300]}"
    if outcome.memory > MOST_MEMORY:
        return f"{outcome.memory >> 20} MiB"
    if outcome.seconds > most_seconds:
        return f"{outcome.seconds:.1f} s"
    return ""


def cases(only: str = "") -> list[tuple[str, tuple[str, ...]]]:
    """Return each input with each command that reads it; of those in which `only` stands."""
    every = [(name, command) for name, one in INPUTS.items() for command in one.commands]
    return [(name, command) for name, command in every if only in f"{name} {' '.join(command)}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="TEXT")
    parser.add_argument("--keep", type=Path, metavar="DIR")
    given = parser.parse_args()
    worst_time = worst_memory = 0.0
    chosen, faults, before = cases(given.only), 0, ""
    with tempfile.TemporaryDirectory(prefix="cudatool-worst-") as temporary:
        for name, command in chosen:
            folder = Path(temporary) / str(list(INPUTS).index(name))
            if name != before:
                folder.mkdir()
                prepare(name, folder)
                if given.keep is not None:
                    given.keep.mkdir(exist_ok=True)
                    (given.keep / f"{name.replace(' ', '_')}-{INPUTS[name].file}").write_bytes(
                        (folder / INPUTS[name].file).read_bytes()
                    )
            before = name
            outcome = run(command, INPUTS[name].file, folder)
            wrong = fault(outcome)
            faults += bool(wrong)
            worst_time, worst_memory = max(worst_time, outcome.seconds), max(worst_memory, outcome.memory)
            figures = f"{outcome.seconds:5.1f} s {outcome.memory >> 20:5} MiB  status {outcome.status:3}"
            print(f"{figures}  {name}: {' '.join(command)}{'  FAULT: ' + wrong if wrong else ''}", flush=True)
    print(f"{len(chosen)} commands, at most {worst_time:.1f} s and {int(worst_memory) >> 20} MiB; {faults} faults")
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
