"""Following a file that grows: the same events as a whole reading gives, whatever the pieces."""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from generated import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cudatool.errors import TraceFormatError, UsageError
from cudatool.trace import Recorder, hooks, read
from cudatool.trace.events import RECORD, Kind
from cudatool.trace.file import CHUNK_HEADER, CHUNK_MAGIC, ENTRY, FILE_HEADER, Chunk, Table, aligned, sealed_chunk
from cudatool.trace.follow import Follower
from cudatool.trace.model import Ending


def drained(follower: Follower, most: int = 1 << 16) -> list[tuple[int, str, tuple]]:
    """Return all that can be had now, in words."""
    found = []
    while len(records := follower.read(most)):
        for address, name, stack in records[["address", "name", "stack"]].tolist():
            found.append((address, follower.name(name), follower.stack(stack)))
    return found


def in_words(path: Path) -> list[tuple[int, str, tuple]]:
    trace = read(path)
    rows = trace.records[["address", "name", "stack"]].tolist()
    return [(address, trace.names[name], trace.stack(stack)) for address, name, stack in rows]


def emit(first: int, count: int) -> None:
    for number in range(first, first + count):
        hooks.emit(Kind.MEM_ALLOC, address=number, name=f"n{number % 7}")


@given(pieces=st.lists(st.integers(0, 9), max_size=12), most=st.integers(1, 8))
@settings(
    deadline=None,
    max_examples=examples(40),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_each_event_comes_once_and_in_order(tmp_path: Path, small_chunks: None, pieces: list[int], most: int) -> None:
    path, found, number = tmp_path / "t.ctrace", [], 0
    with Recorder(path, header={}, force=True) as recorder, Follower(path) as follower:
        for count in pieces:
            emit(number, count)
            number += count
            found += drained(follower, most)
            assert number == len(found)
            assert follower.ending is Ending.GROWING
        recorder.add_facts({"libraries": ["x"]})
        emit(number, 2)
        recorder.close()
        found += drained(follower, most)
        assert follower.ending is Ending.CLOSED
        assert follower.header["libraries"] == ["x"]
        assert follower.header["end_time"]
    assert in_words(path) == found


def test_what_one_read_gives_is_what_the_whole_file_has(tmp_path: Path) -> None:
    path = tmp_path / "t.ctrace"
    with Recorder(path, header={"argv": ["x"]}):
        emit(0, 10_000)  # several chunks of the size that they have
    with Follower(path) as follower:
        assert in_words(path) == drained(follower)
        assert follower.header == read(path).header
        assert 10_000 == follower.events
        assert Ending.CLOSED is follower.ending


def test_a_writer_that_is_killed_ends_it_and_loses_nothing(tmp_path: Path) -> None:
    program = (
        "import sys, time\nfrom cudatool.trace import Recorder, hooks, Kind\n"
        "with Recorder('t.ctrace', header={}):\n"
        "    for n in range(5000): hooks.emit(Kind.MEM_ALLOC, address=n, name=f'n{n % 3}')\n"
        "    print('ready', flush=True); time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], cwd=tmp_path, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert "ready" == child.stdout.readline().strip()
        with Follower(tmp_path / "t.ctrace") as follower:
            assert 5000 == len(drained(follower))
            assert Ending.GROWING is follower.ending
            child.send_signal(signal.SIGKILL)
            child.wait()
            assert [] == drained(follower)
            assert Ending.KILLED is follower.ending


def test_every_prefix_of_a_file_gives_the_events_that_the_reader_finds(tmp_path: Path, small_chunks: None) -> None:
    path = tmp_path / "t.ctrace"
    with Recorder(path, header={}):
        emit(0, 20)
    whole = path.read_bytes()
    cut = tmp_path / "cut.ctrace"
    for size in range(1, len(whole), 7):
        cut.write_bytes(whole[:size])
        with Follower(cut) as follower:
            found = drained(follower)
            expected = read(cut)
            assert [(a, n) for a, n, _ in in_words(cut)] == [(a, n) for a, n, _ in found], size
            assert expected.ending is follower.ending, size


def test_a_file_that_shrinks_is_cut(tmp_path: Path, small_chunks: None) -> None:
    path = tmp_path / "t.ctrace"
    with Recorder(path, header={}):
        emit(0, 20)
        copy = tmp_path / "copy.ctrace"
        copy.write_bytes(path.read_bytes())
        with Follower(copy) as follower:
            assert 6 == len(follower.read(6))
            os.truncate(copy, 200)
            assert [] == drained(follower)
            assert Ending.CUT is follower.ending


def test_a_recording_that_takes_the_place_of_another_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "t.ctrace"
    with Recorder(path, header={}):
        emit(0, 3)
    with Follower(path) as follower:
        drained(follower)
        assert not follower.is_replaced
        with Recorder(path, header={"argv": ["other"]}, force=True):  # another file of that name
            assert follower.is_replaced
    with Follower(path) as follower:
        drained(follower)
        content = path.read_bytes()
        with Recorder(tmp_path / "other.ctrace", header={"argv": ["a third one"]}):
            pass
        path.write_bytes((tmp_path / "other.ctrace").read_bytes())  # the same file, with other contents
        assert content != path.read_bytes()
        assert follower.is_replaced
        path.unlink()
        assert not follower.is_replaced


def test_a_file_whose_beginning_is_not_written_yet_is_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "t.ctrace"
    with Recorder(path, header={}) as recorder:
        emit(0, 3)
        head = path.read_bytes()[:64]
        os.pwrite(recorder._file(), bytes(64), 0)  # room that the recorder has made
        with Follower(path) as follower:
            assert [] == drained(follower)
            assert Ending.GROWING is follower.ending
            os.pwrite(recorder._file(), head, 0)
            assert 3 == len(drained(follower))


def test_what_is_caught_half_written_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "t.ctrace"
    with Recorder(path, header={}) as recorder, Follower(path) as follower:
        assert [] == drained(follower)
        at = recorder._end
        recorder.add_facts({"libraries": ["x"]})
        payload = os.pread(recorder._file(), 64, at + CHUNK_HEADER.size)
        os.pwrite(recorder._file(), bytes(64), at + CHUNK_HEADER.size)
        assert [] == drained(follower)
        assert Ending.GROWING is follower.ending
        assert "libraries" not in follower.header
        os.pwrite(recorder._file(), payload, at + CHUNK_HEADER.size)
        emit(0, 2)
        assert 2 == len(drained(follower))
        drained(follower)
        assert ["x"] == follower.header["libraries"]


@pytest.mark.parametrize("what", ["payload", "magic", "table", "count", "zeros"])
def test_damage_ends_it_after_what_came_before(tmp_path: Path, small_chunks: None, what: str) -> None:
    path = tmp_path / "t.ctrace"
    with Recorder(path, header={}):
        emit(0, 20)
    content = bytearray(path.read_bytes())
    starts = [at for at in range(0, len(content), 64) if content[at : at + 4] == CHUNK_MAGIC]
    records = [at for at in starts if CHUNK_HEADER.unpack_from(content, at)[1] == Chunk.RECORDS]
    expected = 9  # of three chunks
    if what == "payload":
        content[records[3] + CHUNK_HEADER.size + 70] ^= 1
    elif what == "magic":
        content[records[3]] ^= 1
    elif what == "table":
        tables = next(at for at in starts if at > records[0] and CHUNK_HEADER.unpack_from(content, at)[1] == 2)
        content[tables + CHUNK_HEADER.size : tables + CHUNK_HEADER.size + 1] = b"\x09"
        expected = None
    elif what == "count":
        content[-64] ^= 1
        expected = 20
    else:
        header = CHUNK_HEADER.pack(CHUNK_MAGIC, Chunk.RECORDS, 192, 192, 0, 0, 0)
        content[records[3] : records[3] + CHUNK_HEADER.size + 192] = header + bytes(192)
    path.write_bytes(content)
    with Follower(path) as follower:
        found = drained(follower)
        assert Ending.DAMAGED is follower.ending
        assert follower.damage
        assert list(range(len(found))) == [address for address, *_ in found]
        assert expected in (None, len(found))


def test_what_is_no_trace_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("x" * 100)
    with Follower(tmp_path / "text") as follower, pytest.raises(TraceFormatError, match="not a cudatool trace"):
        follower.read()
    with pytest.raises(UsageError, match="cannot be read"):
        Follower(tmp_path / "missing")
    with Recorder(tmp_path / "t.ctrace", header={}):
        pass
    content = bytearray((tmp_path / "t.ctrace").read_bytes())
    struct.pack_into("<I", content, 8, 99)
    (tmp_path / "newer").write_bytes(content)
    with Follower(tmp_path / "newer") as follower, pytest.raises(TraceFormatError, match="version 99"):
        follower.read()


def test_events_with_impossible_numbers_are_left_out_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "t.ctrace"
    with Recorder(path, header={}):
        emit(0, 3)
        for _ in range(4):
            hooks.emit(Kind.MEM_ALLOC, address=1 << 63, name="wild")
        emit(3, 2)
    for most in (100, 2):
        with Follower(path) as follower:
            assert [0, 1, 2, 3, 4] == [address for address, *_ in drained(follower, most)]
            assert 4 == follower.left_out
            assert Ending.CLOSED is follower.ending


def test_memory_is_that_of_a_piece_and_not_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "t.ctrace"
    rows = np.zeros(400_000, RECORD)
    rows["kind"], rows["address"] = Kind.MEM_ALLOC, np.arange(len(rows))
    with Recorder(path, header={}) as recorder:
        recorder.write_rows(rows, [""])
    assert path.stat().st_size > 24 << 20
    with Follower(path) as follower:
        tracemalloc.start()
        try:
            count = 0
            while len(records := follower.read(10_000)):
                count += len(records)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert 400_000 == count
    assert peak < 4 << 20


def test_any_number_of_small_chunks_takes_bounded_memory(tmp_path: Path) -> None:
    with Recorder(tmp_path / "t.ctrace", header={}):
        pass
    content = (tmp_path / "t.ctrace").read_bytes()
    begin = aligned(FILE_HEADER.size + FILE_HEADER.unpack_from(content)[2])
    path = tmp_path / "many.ctrace"
    path.write_bytes(content[:begin] + sealed_chunk(Chunk.TABLES, b"") * 40_000)
    with Follower(path) as follower:
        tracemalloc.start()
        try:
            assert 0 == len(follower.read())
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert Ending.CUT is follower.ending
    assert peak < 6 << 20  # room for the events that one reading may give, mostly


def test_a_gap_in_a_table_and_an_unknown_table_are_damage(tmp_path: Path) -> None:
    with Recorder(tmp_path / "t.ctrace", header={}):
        pass
    content = (tmp_path / "t.ctrace").read_bytes()
    begin = aligned(FILE_HEADER.size + FILE_HEADER.unpack_from(content)[2])
    for entry in (ENTRY.pack(Table.NAMES, 5, 0), ENTRY.pack(9, 0, 0)):
        path = tmp_path / "bad.ctrace"
        path.write_bytes(content[:begin] + sealed_chunk(Chunk.TABLES, entry))
        with Follower(path) as follower:
            follower.read()
            assert Ending.DAMAGED is follower.ending
            assert read(path).ending is Ending.DAMAGED
