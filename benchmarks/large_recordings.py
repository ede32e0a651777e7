"""Make recordings of any size: a training loop of a language model whose batches differ in length.

    python benchmarks/large_recordings.py 2100000 large.pickle
    python benchmarks/large_recordings.py 2100000 large.ctrace

Sixteen steps run through the allocator's policy, twice. After each step the same blocks are live as before it, and the
second pass takes no more memory from the driver. So the sixteen steps can be repeated as often as needed: the result is
what the allocator would have done, and `cudatool replay --check` reproduces every address.

A pickle is laid out like PyTorch's: keys, texts and frames once, then references to them; a dict and a tuple for each
event, and a list of some 20 frames for each allocation.
"""

from __future__ import annotations

import json
import pickle
import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO
from zlib import crc32

import numpy as np
import numpy.typing as npt
from bench_allocator import EndlessProvider

from cudatool import analyze
from cudatool.memory import CachingAllocator, Settings
from cudatool.trace import Recorder, Trace, read
from cudatool.trace.events import RECORD, Kind
from cudatool.trace.file import ENTRY, FILE_HEADER, FRAME, MAGIC, RECORD_COUNT, VERSION, Chunk, Table, aligned
from cudatool.trace.file import sealed_chunk as chunk

LAYERS, STEPS, DEPTH = 48, 16, 20
MIB = 1 << 20
STARTED_US = 1_790_000_000_000_000
STEP_NS = 3_000  # between two events
_ACTIONS = {
    Kind.BLOCK_ALLOC: "alloc",
    Kind.BLOCK_FREE_REQUESTED: "free_requested",
    Kind.BLOCK_FREE_COMPLETED: "free_completed",
    Kind.SEGMENT_ALLOC: "segment_alloc",
    Kind.SEGMENT_FREE: "segment_free",
}
_KEYS = ("action", "addr", "size", "stream", "time_us", "compile_context", "user_metadata", "pool_id", "frames")


def pattern() -> tuple[Trace, int]:
    """Return a trace of the beginning and of the steps, and the first record of the steps."""
    allocator = CachingAllocator(EndlessProvider(), device=0, settings=Settings.parse(""))
    chance = random.Random()

    def forward(rows: int, saved: list[int]) -> None:
        for columns in (3 * 1024, 64, 1024, 4 * 1024, 1024):
            saved.append(allocator.malloc(rows * columns * 2, 0))
            allocator.free(allocator.malloc(rows * 4, 0))

    def step() -> None:
        saved: list[int] = []
        rows = 128 * chance.randrange(4, 33)
        for _ in range(LAYERS):
            forward(rows, saved)
        while saved:
            gradient = allocator.malloc(chance.randrange(1, 9) * MIB, 0)
            allocator.free(saved.pop())
            allocator.free(gradient)

    with tempfile.TemporaryDirectory() as folder:
        recorder = Recorder(Path(folder) / "made.ctrace", header={})
        with recorder:
            for _ in range(LAYERS):
                allocator.malloc(24 * MIB, 0)
            for _ in range(2):
                begin = recorder.recorded
                chance.seed(1)
                for _ in range(STEPS):
                    step()
        trace = read(Path(folder) / "made.ctrace")
    return trace, begin


def whole(trace: Trace, begin: int, events: int) -> npt.NDArray[np.void]:
    """Return this many allocator events: the beginning, then the steps repeatedly, each event with a stack's number."""
    records = trace.records[np.isin(trace.records["kind"], list(_ACTIONS))]
    begin -= len(trace.records) - len(records)
    head, rounds = records[:begin], records[begin:]
    assert (rounds["kind"] < Kind.SEGMENT_ALLOC).all()
    times = -(-max(events - len(head), 0) // len(rounds))
    result = np.concatenate([head, np.tile(rounds, times)])[:events]
    result["time"] = np.arange(len(result)) * STEP_NS
    result["stack"] = np.where(result["kind"] == Kind.BLOCK_ALLOC, 1 + np.arange(len(result)) % 997, 0)
    return result


def stacks() -> list[list[int]]:
    """Return the frames of each stack: the innermost differ, the outermost are shared."""

    def frame(stack: int, depth: int) -> int:
        return (stack * 7 + depth) % 1999 if depth < 8 else 2000 + depth

    return [[], *([frame(stack, depth) for depth in range(DEPTH)] for stack in range(997))]


def write_pickle(path: Path, events: int) -> None:
    """Write a snapshot of this many events, as PyTorch's own pickle.dump() would."""
    trace, begin = pattern()
    records = whole(trace, begin, events)
    made = Trace(records, stacks=[tuple(stack) for stack in stacks()])
    state = analyze.segments_at(analyze.blocks(made), analyze.segments(made), len(records) - 1)
    made.stacks = [()] * len(made.stacks)
    segments = analyze.torch_segments(made, state)
    for segment in segments:
        segment["stream"], segment["segment_pool_id"] = 0, (0, 0)
    frames = [
        {"name": f"layer_{i}", "filename": f"/home/me/model/part_{i % 40}.py", "line": i} for i in range(2000 + DEPTH)
    ]
    texts = [*_KEYS, *_ACTIONS.values(), "N/A", ""]
    head = pickle.dumps({"texts": texts, "frames": frames, "segments": segments, "device_traces": [[]]}, 4)
    data = pickle.loads(head)
    # The memo's numbers of what events refer to, in a pickle that begins with these tables.
    numbers = _Numbers(data)
    with open(path, "wb") as file:
        file.write(head[: head.rindex(b"]\x94a")] + b"]\x94(")  # up to the one device's list of events
        _write_events(file, records, numbers)
        file.write(b"eau.")


class _Numbers:
    """The places of texts and frames in the memo of a pickle of protocol 4, as references to them."""

    def __init__(self, data: dict[str, object]) -> None:
        seen: dict[int, int] = {}

        def visit(value: object) -> None:
            if isinstance(value, int | float | bool) or value is None or value == ():
                return
            if id(value) in seen:
                return
            if isinstance(value, tuple):
                for item in value:
                    visit(item)
                seen.setdefault(id(value), len(seen))
                return
            seen[id(value)] = len(seen)
            if isinstance(value, dict):
                for key, item in value.items():
                    visit(key)
                    visit(item)
            elif isinstance(value, list):
                for item in value:
                    visit(item)

        visit(data)
        texts, frames = data["texts"], data["frames"]
        assert isinstance(texts, list) and isinstance(frames, list)
        self.texts = {text: _get(seen[id(text)]) for text in texts}
        self.frames = [_get(seen[id(frame)]) for frame in frames]


def _get(number: int) -> bytes:
    return b"h" + bytes([number]) if number < 256 else b"j" + number.to_bytes(4, "little")


def _int(value: int) -> bytes:
    return pickle.dumps(value, 4)[2:-1] if value < 1 << 31 else b"\x8a\x07" + value.to_bytes(7, "little")


def _write_events(file: BinaryIO, records: npt.NDArray[np.void], numbers: _Numbers) -> None:
    texts = numbers.texts
    made = [b"]\x94(" + b"".join(numbers.frames[i] for i in stack) + b"e" if stack else b"]\x94" for stack in stacks()]
    tail = (
        texts["compile_context"] + texts["N/A"] + texts["user_metadata"] + texts[""] + texts["pool_id"]
        + b"K\x00K\x00\x86\x94" + texts["frames"]
    )  # fmt: skip
    ends = [tail + stack + b"u" for stack in made]
    cache: dict[tuple[int, int, int], bytes] = {}
    columns = (records[name].tolist() for name in ("kind", "address", "size", "aux0", "time", "stack"))
    batch: list[bytes] = []
    for i, (kind, address, size, requested, time, stack) in enumerate(zip(*columns, strict=True), 1):
        asked = requested if kind < Kind.SEGMENT_ALLOC else size
        key = kind, address, asked
        if (begin := cache.get(key)) is None:
            begin = cache[key] = (
                b"}\x94(" + texts["action"] + texts[_ACTIONS[Kind(kind)]] + texts["addr"] + _int(address)
                + texts["size"] + _int(asked) + texts["stream"] + b"K\x00" + texts["time_us"]
            )  # fmt: skip
        batch.append(begin + _int(STARTED_US + time // 1000) + ends[stack])
        if i % 1000 == 0:
            file.write(b"".join(batch) + (b"e(" if i < len(records) else b""))
            batch = []
    file.write(b"".join(batch))


def write_ctrace(path: Path, events: int) -> None:
    """Write a trace of this many events, as `cudatool run` would."""
    write_records(path, whole(*pattern(), events), ())


def write_records(path: Path, records: npt.NDArray[np.void], names: Sequence[str], **facts: object) -> None:
    """Write a trace of these records, whose stacks are those of :func:`stacks`.

    Parameters
    ----------
    names
        What the records call 1, 2 ...
    facts
        For the header.
    """
    header = json.dumps({"device_kind": "cuda", "argv": ["train.py"], **facts}).encode()
    tables = bytearray()

    def add(table: Table, index: int, data: bytes) -> None:
        tables.extend(ENTRY.pack(table, index, len(data)) + data)

    for number, name in enumerate(names, 1):
        add(Table.NAMES, number, name.encode())
    for i in range(2000 + DEPTH):
        first = len(names) + 2 * i + 1
        add(Table.NAMES, first, f"/home/me/model/part_{i}.py".encode())
        add(Table.NAMES, first + 1, f"layer_{i}".encode())
        add(Table.FRAMES, i, FRAME.pack(first, first + 1, i))
    for i, stack in enumerate(stacks()):
        add(Table.STACKS, i, np.array(stack, "<u4").tobytes())
    add(Table.THREADS, 0, b"main")
    records["thread"] = 0
    with open(path, "wb") as file:
        file.write(FILE_HEADER.pack(MAGIC, VERSION, len(header), crc32(header)) + header)
        file.seek(aligned(file.tell()))
        file.write(chunk(Chunk.TABLES, bytes(tables)))
        for at in range(0, len(records), 4096):
            file.write(chunk(Chunk.RECORDS, records[at : at + 4096].astype(RECORD).tobytes()))
        file.write(chunk(Chunk.END, RECORD_COUNT.pack(len(records))))


def main() -> None:
    events, path = int(sys.argv[1]), Path(sys.argv[2])
    (write_ctrace if path.suffix == ".ctrace" else write_pickle)(path, events)


if __name__ == "__main__":
    main()
