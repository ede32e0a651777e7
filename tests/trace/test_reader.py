from __future__ import annotations

import os
import struct
import subprocess
import sys
import tracemalloc
from pathlib import Path
from zlib import crc32

import pytest
from generated import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cudatool.errors import TraceFormatError, UsageError
from cudatool.files import open_input
from cudatool.trace import Recorder, Trace, hooks, is_trace, newest_trace, read
from cudatool.trace.events import RECORD, Kind
from cudatool.trace.file import (
    CHUNK_HEADER,
    CHUNK_MAGIC,
    ENTRY,
    FILE_HEADER,
    MAGIC,
    RECORD_COUNT,
    VERSION,
    Chunk,
    Table,
    aligned,
    sealed_chunk,
)
from cudatool.trace.model import Ending
from cudatool.trace.reader import _Reader

COUNT = 20


def record_a_few() -> None:
    for number in range(COUNT):
        hooks.emit(Kind.MEM_ALLOC, address=number, name=f"n{number % 5}")


@pytest.fixture
def closed(tmp_path: Path, small_chunks: None) -> bytes:
    """The bytes of a small, complete recording of many chunks."""
    with Recorder(tmp_path / "closed.ctrace", header={"argv": ["x"]}):
        record_a_few()
    return (tmp_path / "closed.ctrace").read_bytes()


@pytest.fixture
def running(tmp_path: Path, small_chunks: None) -> bytes:
    """The bytes of the same recording before it was closed."""
    with Recorder(tmp_path / "running.ctrace", header={"argv": ["x"]}):
        record_a_few()
        return (tmp_path / "running.ctrace").read_bytes()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trace.ctrace"


def file_of(*chunks: bytes, header: bytes = b"{}", version: int = VERSION) -> bytes:
    head = FILE_HEADER.pack(MAGIC, version, len(header), crc32(header)) + header
    return head.ljust(aligned(len(head)), b"\0") + b"".join(chunks)


def entry(table: int, index: int, data: bytes) -> bytes:
    return ENTRY.pack(table, index, len(data)) + data


def assert_is_a_prefix(trace: Trace) -> None:
    """Check that the events are the first so many that were recorded, each as it was or with something noted."""
    assert trace.records["address"].tolist() == list(range(len(trace.records)))
    names = [trace.names[i] for i in trace.records["name"]]
    for number, name in enumerate(names):
        assert name == f"n{number % 5}" or (name == "" and any("The name of" in n for n in trace.notes))
    for index in trace.records["stack"]:
        trace.stack(index)


def test_whole_file_has_every_event_and_no_notes(closed: bytes, path: Path) -> None:
    path.write_bytes(closed)
    trace = read(path)
    assert_is_a_prefix(trace)
    assert (len(trace.records), trace.notes, trace.source) == (COUNT, [], str(path))


@pytest.mark.some_of("first", range(1, 5), 1)
@pytest.mark.parametrize("kind", ["closed", "running"])
def test_every_prefix_opens_and_yields_a_prefix_of_the_events(
    kind: str, first: int, request: pytest.FixtureRequest, path: Path
) -> None:
    whole: bytes = request.getfixturevalue(kind)
    counts = []
    for size in [*range(first, len(whole) - 1, 4), len(whole) - 1]:
        path.write_bytes(whole[:size])
        trace = read(path)
        assert_is_a_prefix(trace)
        assert len(trace.notes) >= 1
        counts.append(len(trace.records))
    assert counts == sorted(counts)
    assert (counts[0], counts[-1]) == (0, COUNT)


def test_prefix_that_ends_between_chunks_is_said_to_be_cut(running: bytes, path: Path) -> None:
    last = running.rindex(CHUNK_MAGIC)
    path.write_bytes(running[:last])
    (note,) = read(path).notes
    assert note == f"The file is cut after {last} bytes: what was recorded later is missing."


@pytest.mark.some_of("first", range(4), 1)
def test_flipped_bits_never_crash_and_what_is_read_is_right(closed: bytes, first: int, path: Path) -> None:
    for position in range(first, len(closed), 4):
        damaged = bytearray(closed)
        damaged[position] ^= 1 << position % 8
        path.write_bytes(damaged)
        try:
            trace = read(path)
        except TraceFormatError:
            assert position < closed.index(CHUNK_MAGIC)  # the file's own header
            continue
        assert_is_a_prefix(trace)
        assert len(trace.records) == COUNT or trace.notes


def test_damaged_chunk_ends_the_trace_and_is_named(closed: bytes, path: Path) -> None:
    damaged = bytearray(closed)
    position = closed.index(struct.pack("<Q", 10), closed.index(CHUNK_MAGIC))  # in the record of event 10
    damaged[position] ^= 1
    path.write_bytes(damaged)
    trace = read(path)
    assert 0 < len(trace.records) <= 10
    (note,) = trace.notes
    assert note.startswith("The file is damaged at byte ") and "a checksum is wrong" in note


@settings(
    max_examples=examples(200),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    body=st.lists(
        st.one_of(
            st.binary(max_size=200),
            st.builds(sealed_chunk, st.sampled_from(Chunk), st.binary(max_size=100)),
            st.builds(
                lambda kind, capacity, length, sealed, data: (
                    CHUNK_HEADER.pack(CHUNK_MAGIC, kind, capacity, length, 0, sealed, 0) + data
                ),
                st.integers(0, 5),
                st.integers(0, 2**64 - 1) | st.integers(0, 256),
                st.integers(0, 2**64 - 1) | st.integers(0, 256),
                st.integers(0, 1),
                st.binary(max_size=256),
            ),
            st.builds(
                lambda entries: sealed_chunk(Chunk.TABLES, b"".join(entries)),
                st.lists(
                    st.builds(entry, st.integers(0, 5), st.integers(0, 3) | st.just(2**32 - 1), st.binary(max_size=16))
                ),
            ),
        ),
        max_size=6,
    )
)
def test_arbitrary_content_never_crashes_the_reader(body: list[bytes], path: Path) -> None:
    path.write_bytes(file_of(*body))
    trace = read(path)
    assert len(trace.records) <= sum(map(len, body)) // RECORD.itemsize
    for record in trace.records:
        assert trace.names[record["name"]] is not None
        trace.stack(record["stack"])


HUGE = 2**64 - 1
HOSTILE = {
    "length of records": CHUNK_HEADER.pack(CHUNK_MAGIC, Chunk.RECORDS, HUGE, HUGE, 0, 0, 0),
    "length of tables": CHUNK_HEADER.pack(CHUNK_MAGIC, Chunk.TABLES, HUGE, HUGE, 0, 0, 0),
    "capacity": CHUNK_HEADER.pack(CHUNK_MAGIC, Chunk.RECORDS, HUGE, 0, 0, 0, 0),
    "index of a name": sealed_chunk(Chunk.TABLES, entry(Table.NAMES, 2**32 - 1, b"x")),
    "length of a name": sealed_chunk(Chunk.TABLES, ENTRY.pack(Table.NAMES, 1, 2**32 - 1)),
    "name of a frame": sealed_chunk(Chunk.TABLES, entry(Table.FRAMES, 0, b"\xff" * 12)),
    "size of a frame": sealed_chunk(Chunk.TABLES, entry(Table.FRAMES, 0, b"\xff" * 11)),
    "frame of a stack": sealed_chunk(Chunk.TABLES, entry(Table.STACKS, 1, b"\xff" * 4)),
    "size of a stack": sealed_chunk(Chunk.TABLES, entry(Table.STACKS, 1, b"\xff" * 3)),
    "number of records": sealed_chunk(Chunk.END, RECORD_COUNT.pack(HUGE)),
    "size of the end": sealed_chunk(Chunk.END, b""),
    "depth of facts": sealed_chunk(Chunk.FACTS, b"[" * 100_000),
    "type of facts": sealed_chunk(Chunk.FACTS, b"[]"),
    "digits in facts": sealed_chunk(Chunk.FACTS, b'{"x": ' + b"9" * 100_000 + b"}"),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_impossible_content_is_noted_and_takes_no_memory(what: str, path: Path) -> None:
    path.write_bytes(file_of(HOSTILE[what]))
    tracemalloc.start()
    try:
        trace = read(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(trace.notes) == 1
    assert len(trace.records) == 0
    # From Python 3.14 on json.loads() gives up at the end of its stack, later than at the limit of recursion.
    assert peak < (8 if what == "depth of facts" else 2) * 1024 * 1024


def test_what_is_written_after_the_look_at_a_file_is_read(path: Path) -> None:
    """Its names belong to events that it saw. Python reads 8 KiB ahead, from 3.14 on 128, or a block of the file system."""
    with Recorder(path, header={}), open_input(path, buffered=False) as file:
        hooks.emit(Kind.MEM_ALLOC, address=1, name="early-name")
        reader = _Reader(file, str(path))
        assert reader._read_header()
        reader._look(file.tell())
        running = path.read_bytes()
        with open(path, "r+b") as same:
            same.seek(running.index(b"early-name"))
            same.write(b"later-name")
        while reader._read_chunk():
            pass
    assert reader.count == 1 and "later-name" in reader.names


def test_record_that_points_nowhere_is_kept_and_noted(path: Path) -> None:
    record = struct.pack("<qBbHHHIIIIQQQQ", 1, Kind.WARNING, 0, 0, 7, 0, 0, 0, 8, 9, 0, 0, 0, 0)
    path.write_bytes(file_of(sealed_chunk(Chunk.RECORDS, record), sealed_chunk(Chunk.END, RECORD_COUNT.pack(1))))
    trace = read(path)
    assert (trace.names[trace.records["name"][0]], trace.stack(trace.records["stack"][0])) == ("", ())
    assert trace.notes == [f"The {field} of 1 event is missing from the file." for field in ("name", "stack", "thread")]
    assert Ending.DAMAGED is trace.ending  # nothing is clean that depends on what it was, or on which thread


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "is empty"),
        (b"PK\x03\x04 something else", "is not a cudatool trace"),
        (b"\x89PNG\r\n\x1a\n", "is not a cudatool trace"),
        (file_of(version=99), "is a trace of version 99; this cudatool reads version 1"),
        (file_of(header=b"nonsense"), "has a damaged header"),
        (file_of(header=b"[]"), "has a damaged header"),
        (file_of(header=b'{"a": 1}').replace(b'"a"', b'"b"'), "has a damaged header"),
    ],
)
def test_foreign_file_is_refused_with_a_reason(content: bytes, reason: str, path: Path) -> None:
    path.write_bytes(content)
    with pytest.raises(TraceFormatError) as caught:
        read(path)
    assert str(caught.value).startswith(f"{path}: {reason}")


def test_what_is_not_a_regular_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, what in ((tmp_path / "pipe", "a pipe"), (tmp_path, "a directory")):
        with pytest.raises(UsageError, match=f"it is {what}"):
            read(path)


def test_missing_file_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file or directory"):
        read(tmp_path / "missing.ctrace")


def test_is_trace_looks_at_the_content(closed: bytes, tmp_path: Path) -> None:
    (tmp_path / "foreign.ctrace").write_bytes(b"foreign")
    (tmp_path / "other name").write_bytes(closed)
    found = [is_trace(tmp_path / name) for name in ("foreign.ctrace", "other name", "missing", ".")]
    assert found == [False, True, False, False]


def test_newest_trace_is_the_one_written_last(closed: bytes, tmp_path: Path) -> None:
    for age, name in enumerate(("c.ctrace", "a.ctrace", "closed.ctrace")):
        (tmp_path / name).write_bytes(closed)
        os.utime(tmp_path / name, (1000 - age, 1000 - age))
    (tmp_path / "foreign.ctrace").write_bytes(b"foreign, and newer")
    assert newest_trace(tmp_path) == tmp_path / "c.ctrace"


def test_directory_without_traces_has_no_newest(tmp_path: Path) -> None:
    assert newest_trace(tmp_path) is None


GROW = """
import select, sys, time
from cudatool.trace import Kind, Recorder, hooks

number, told = 0, False
with Recorder(sys.argv[1], header={}):
    print(flush=True)
    while not told:
        hooks.emit(Kind.MEM_ALLOC, address=number, size=512, name=f"name {number}")
        number += 1
        if not number % 64:  # no faster, or each read takes so much longer than the one before
            time.sleep(0.001)
            told = bool(select.select([sys.stdin], [], [], 0)[0])
"""


def test_every_read_of_a_file_that_is_being_written_gives_a_consistent_prefix(path: Path) -> None:
    endings, longest = [], 0
    with subprocess.Popen([sys.executable, "-c", GROW, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdout.readline()
        while process.poll() is None:
            trace = read(path)
            assert trace.records["address"].tolist() == list(range(len(trace.records)))
            assert [trace.names[name] for name in trace.records["name"]] == [
                f"name {number}" for number in range(len(trace.records))
            ]
            assert len(trace.records) >= longest
            longest = len(trace.records)
            endings.append((trace.ending, len(trace.notes)))
            if len(endings) >= 30 and longest > 10_000:
                process.stdin.close()  # it has grown enough: by several chunks
    assert process.returncode == 0
    assert set(endings) <= {(Ending.GROWING, 1), (Ending.CLOSED, 0)}
    assert endings[0] == (Ending.GROWING, 1)
    assert read(path).ending is Ending.CLOSED
