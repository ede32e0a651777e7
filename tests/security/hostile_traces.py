"""Trace files that are sound by their layout and checksums, and say whatever a test wants them to say."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import numpy.typing as npt

from cudatool.trace.events import RECORD, Kind
from cudatool.trace.file import ENTRY, FILE_HEADER, FRAME, MAGIC, VERSION, Chunk, Table, aligned, sealed_chunk
from cudatool.trace.model import Frame, Trace

__all__ = ["ESCAPES", "VALUES", "mutated", "records_of", "trace_bytes"]

# Of each, what a terminal, a CI log, a page or a report could take for something other than text.
ESCAPES = (
    "\x1b[31mred\x1b[0m",
    "\x1b]0;title\x07",
    "\x1b]8;;http://example.org\x1b\\link\x1b]8;;\x1b\\",
    "\x9b31mred",
    "line\nbreak",
    "\n::error file=x::made up",
    "\r::stop-commands::x",
    "##[error]made up",
    "\u202egnp.exe",
    "\u2066isolated\u2069",
    "\u2028separator",
    "nul\0nul",
    "half \ud800 a character",
    "[bold]markup[/bold]",
    "[/]",
    "</script><script>alert(1)</script>",
    "]]>&<!--",
    "a|b`c`*d*",
    "x" * 5000,
)

# Numbers at which fields overflow, wrap or change their sign.
VALUES = (
    0,
    1,
    2,
    127,
    128,
    255,
    511,
    512,
    513,
    1 << 20,
    (1 << 31) - 1,
    1 << 31,
    (1 << 32) - 1,
    1 << 32,
    (1 << 47) + 512,
)
VALUES += (1 << 48, (1 << 53) + 1, 1 << 62, (1 << 63) - 1, 1 << 63, (1 << 63) + 1, (1 << 64) - 512, (1 << 64) - 1)

_DEEP: Any = []
for _ in range(300):
    _DEEP = [_DEEP]
_FACTS: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 7, 1 << 40, 1 << 63, -(1 << 70), 10**400, 0.5, -1.5, 1e308, float("nan"), float("inf")),
    *(
        "",
        "x",
        "0",
        "cuda",
        "sim",
        "index",
        "2024-01-01T00:00:00",
        "expandable_segments:True",
        "max_split_size_mb:" + "9" * 5000,
    ),
    *ESCAPES,
    *([], [0], [[0, 0], [1, 2]], [[0]], [[1, "x"]], [None], ["x", 1], [[1 << 70, 0]], [-1], [1.5], [1 << 70], _DEEP),
    *({}, {"0": 1}, {"0": 10**9}, {"0": -1}, {"0": "x"}, {"x": 1}, {"": {}}, {"0": None}, {"1": [1]}, {"0": 2.5}),
)
_KEYS = (
    *("accesses", "allocator_conf", "argv", "checks", "cudatool", "device", "device_kind", "format", "pid", "pools"),
    *("prior_records", "python", "recording_error", "start_time", "time_axis", "total_memory", "settings", "segments"),
)


def trace_bytes(
    records: npt.NDArray[np.void],
    *,
    header: dict[str, Any],
    names: Sequence[str] = ("",),
    frames: Sequence[Frame] = (),
    stacks: Sequence[Sequence[int]] = ((),),
    threads: Sequence[str] = ("main",),
    closed: bool = True,
) -> bytes:
    """Return a file with these tables and records, its checksums right."""
    known = list(names)
    places = {name: index for index, name in enumerate(known)}

    def place(name: str) -> int:
        if name not in places:
            places[name] = len(known)
            known.append(name)
        return places[name]

    rows = [(place(frame.file), place(frame.function), frame.line % (1 << 32)) for frame in frames]
    entries = [(Table.NAMES, index, _text(name)) for index, name in enumerate(known) if index]
    entries += [(Table.FRAMES, index, FRAME.pack(*row)) for index, row in enumerate(rows)]
    entries += [
        (Table.STACKS, index, struct.pack(f"<{len(stack)}I", *stack)) for index, stack in enumerate(stacks) if index
    ]
    entries += [(Table.THREADS, index, _text(name)) for index, name in enumerate(threads)]
    tables = b"".join(ENTRY.pack(table, index, len(data)) + data for table, index, data in entries)
    facts = json.dumps(header).encode()
    content = (FILE_HEADER.pack(MAGIC, VERSION, len(facts), crc32(facts)) + facts).ljust(
        aligned(FILE_HEADER.size + len(facts)), b"\0"
    )
    content += sealed_chunk(Chunk.TABLES, tables) + sealed_chunk(Chunk.RECORDS, records.tobytes())
    return content + (sealed_chunk(Chunk.END, struct.pack("<Q", len(records))) if closed else b"")


def _text(name: str) -> bytes:
    return name.encode("utf-8", "surrogatepass")


def records_of(*rows: dict[str, Any]) -> npt.NDArray[np.void]:
    """Return records with these fields, the others 0, a microsecond apart."""
    records = np.zeros(len(rows), RECORD)
    records["time"] = np.arange(len(rows)) * 1000
    for record, row in zip(records, rows, strict=True):
        for name, value in row.items():
            record[name] = value
    return records


def mutated(trace: Trace, chance: random.Random) -> bytes:
    """Return the file of a trace of which a few things are other than a recorder would write them."""
    records, header = trace.records.copy(), dict(trace.header)
    names, threads = list(trace.names), list(trace.threads)
    frames, stacks = list(trace.frames), [list(stack) for stack in trace.stacks]
    for _ in range(chance.choice((1, 1, 1, 2, 3, 8))):
        what = chance.randrange(9)
        if what < 3 and len(records):
            _change_records(records, chance)
        elif what == 3:
            records = _moved(records, chance)
        elif what in (4, 5):
            header[chance.choice((*_KEYS, *header, "from a newer version"))] = chance.choice(_FACTS)
        elif what == 6:
            names[chance.randrange(len(names))] = _name(chance, names)
        elif what == 7 and frames:
            frames[chance.randrange(len(frames))] = Frame(
                _name(chance, names), _name(chance, names), chance.choice(VALUES)
            )
        elif what == 8:
            threads[chance.randrange(len(threads))] = _name(chance, names)
            if frames:
                stacks[chance.randrange(len(stacks))] = chance.choices(range(len(frames)), k=chance.choice((0, 1, 300)))
    return trace_bytes(
        records,
        header=header,
        names=names,
        frames=frames,
        stacks=stacks,
        threads=threads,
        closed=chance.random() < 0.9,
    )


def _change_records(records: npt.NDArray[np.void], chance: random.Random) -> None:
    """Set one field of one record, or of many, to another number."""
    names = [name for name in records.dtype.names or () if name != "reserved"]
    name = chance.choice([*names, "address", "size", "aux0", "aux1", "kind", "device"])
    info = np.iinfo(records.dtype[name])
    rows = chance.sample(range(len(records)), min(len(records), chance.choice((1, 1, 2, 10, len(records)))))
    same = chance.random() < 0.5
    value = 0
    for i, row in enumerate(rows):
        if not i or not same:
            others = [*VALUES, int(records[name][chance.randrange(len(records))])]
            value = chance.choice([*map(int, Kind), 0, 255] if name == "kind" else others)
        records[name][row] = (value - info.min) % (int(info.max) - int(info.min) + 1) + info.min


def _moved(records: npt.NDArray[np.void], chance: random.Random) -> npt.NDArray[np.void]:
    """Take records away, say them twice, or put them elsewhere."""
    if not len(records):
        return records
    order = list(range(len(records)))
    begin = chance.randrange(len(order))
    piece = order[begin : begin + chance.choice((1, 1, 5, 40))]
    how = chance.randrange(3)
    if how != 1:
        del order[begin : begin + len(piece)]
    if how:
        at = chance.randrange(len(order) + 1)
        order[at:at] = piece
    return records[order]


def _name(chance: random.Random, names: Sequence[str]) -> str:
    """Return a text that is not what a name should be: hostile, another name, or damaged JSON."""
    how = chance.randrange(4)
    if how == 0:
        return chance.choice(names)
    if how < 3:
        return chance.choice(ESCAPES)
    said = [name for name in names if name.startswith("{")]
    if not said:
        return "{"
    try:
        document = json.loads(chance.choice(said))
    except ValueError:  # it is damaged already
        return "{"
    if isinstance(document, dict) and document:
        document[chance.choice(list(document))] = chance.choice(_FACTS)
    return json.dumps(document)[: chance.choice((5, 10**6, 10**6, 10**6))]


def write(path: Path, content: bytes) -> Path:
    """Write a file and return its path."""
    path.write_bytes(content)
    return path
