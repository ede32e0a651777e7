from __future__ import annotations

import itertools
import json
import os
import random
import resource
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import forked
import numpy as np
import pytest
from generated import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from warm_process import run_python

from cudatool.errors import OutputError
from cudatool.trace import Recorder, Trace, hooks, read, stacks, threads
from cudatool.trace.events import RECORD, Event, Kind, WarningFlag
from cudatool.trace.file import CHUNK_MAGIC, Chunk
from cudatool.trace.model import Ending
from cudatool.trace.validate import _LIMITS, MAX_ADDRESS, MAX_MEMORY, MAX_TIME


def emit_numbered(numbers: Sequence[int]) -> None:
    for number in numbers:
        hooks.emit(Kind.MEM_ALLOC, address=number, size=512, name=f"name {number % 7}")


def low_descriptors() -> set[str]:
    """Return the open descriptors with numbers that a program may count on."""
    return {name for name in os.listdir("/proc/self/fd") if int(name) < 512}


def addresses(trace: Trace) -> list[int]:
    found: list[int] = trace.records["address"].tolist()
    return found


def some_stacks() -> list[int]:
    def nested(depth: int) -> int:
        return nested(depth - 1) if depth else stacks.capture()

    return [0, stacks.capture(), *(nested(depth) for depth in range(4))]


def event_of(**fields: Any) -> Event:
    zero = dict.fromkeys(Event._fields, 0)
    return Event(**{**zero, "kind": Kind.MEMCPY, "name": "", **fields})


def unsigned(bits: int) -> st.SearchStrategy[int]:
    return st.integers(0, 2**bits - 1)


def is_possible(event: Event) -> bool:
    """Whether the reader takes an event's numbers for what they are in events of its kind: addresses, sizes."""
    return all(getattr(event, field) < limit for field, limit in _LIMITS.get(event.kind, {}).items())


events = st.builds(
    Event,
    time=st.integers(0, MAX_TIME - 1),
    kind=st.sampled_from(Kind),
    device=st.integers(-1, 127),
    flags=unsigned(16),
    thread=st.integers(1, 5),
    stream=unsigned(32),
    correlation=unsigned(32),
    stack=st.sampled_from(some_stacks()),
    name=st.text(st.characters(exclude_categories=["Cs"]), max_size=200),
    address=st.integers(0, MAX_ADDRESS - 1),
    size=st.integers(0, MAX_MEMORY - 1),
    aux0=st.integers(0, MAX_MEMORY - 1),
    aux1=unsigned(62),
).filter(is_possible)


@settings(
    max_examples=examples(60),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(written=st.lists(events, max_size=30))
def test_what_is_recorded_is_read_back(written: list[Event], tmp_path: Path, small_chunks: None) -> None:
    path = tmp_path / "trace.ctrace"
    written = [*written, *(Event(*event) for event in written)]  # once with new names, once with names seen before
    with Recorder(path, header={}, force=True) as recorder:
        for event in written:
            recorder(event)
    trace = read(path)
    plain = [field for field in Event._fields if field not in ("name", "stack", "thread")]
    assert trace.notes == []
    assert [tuple(row) for row in trace.records[plain].tolist()] == [
        tuple(int(getattr(event, field)) for field in plain) for event in written
    ]
    assert [trace.names[i] for i in trace.records["name"]] == [event.name for event in written]
    assert [trace.stack(i) for i in trace.records["stack"]] == [stacks.frames(event.stack) for event in written]
    order = list(dict.fromkeys(event.thread for event in written))
    assert [order[i] for i in trace.records["thread"]] == [event.thread for event in written]


def test_events_cross_chunks_of_the_real_size(tmp_path: Path) -> None:
    with Recorder(tmp_path / "trace.ctrace", header={}):
        for number in range(10_000):
            hooks.emit(Kind.MEM_ALLOC, address=number, name=f"{number}{'.' * 20}", stack=0)
    trace = read(tmp_path / "trace.ctrace")
    assert addresses(trace) == list(range(10_000))
    assert trace.names[trace.records["name"][9_999]] == "9999" + "." * 20


def test_many_rows_at_once_are_few_chunks(tmp_path: Path) -> None:
    """Each chunk takes some ten steps in which the program's threads wait for the interpreter's lock."""
    rows = np.zeros(100_000, RECORD)
    rows["kind"], rows["address"], rows["name"] = Kind.MEM_ALLOC, np.arange(2, 100_002), np.arange(100_000) % 3
    with Recorder(tmp_path / "trace.ctrace", header={}) as recorder:
        emit_numbered([0, 1])
        hooks.forward_rows(rows, ["", "one", "two"])
        emit_numbered([100_002])
        assert recorder.recorded == 100_003
    trace = read(tmp_path / "trace.ctrace")
    assert addresses(trace) == list(range(100_003))
    assert [trace.names[name] for name in trace.records["name"][2:8]] == ["", "one", "two"] * 2
    data = (tmp_path / "trace.ctrace").read_bytes()
    assert (
        sum(data[at : at + 8] == CHUNK_MAGIC + bytes([Chunk.RECORDS, 0, 0, 0]) for at in range(0, len(data), 64)) <= 4
    )


def test_name_larger_than_a_chunk_of_tables_is_kept(tmp_path: Path) -> None:
    with Recorder(tmp_path / "trace.ctrace", header={}):
        hooks.emit(Kind.WARNING, name="w" * 100_000)
        hooks.emit(Kind.WARNING, name="short")
    trace = read(tmp_path / "trace.ctrace")
    assert [trace.names[i] for i in trace.records["name"]] == ["w" * 100_000, "short"]


def test_name_that_is_not_unicode_is_written_readably(tmp_path: Path) -> None:
    with Recorder(tmp_path / "trace.ctrace", header={}):
        hooks.emit(Kind.WARNING, name="bad \udcff byte")
    assert read(tmp_path / "trace.ctrace").names[1] == "bad \\udcff byte"


def test_value_too_wide_for_its_field_is_cut_and_the_event_kept(tmp_path: Path) -> None:
    with Recorder(tmp_path / "trace.ctrace", header={}) as recorder:
        recorder(event_of(kind=Kind.FINDING, address=-1, flags=0x1_0002, device=200, stream=2**32 + 3))
    (record,) = read(tmp_path / "trace.ctrace").records
    assert [record[field].item() for field in ("address", "flags", "device", "stream")] == [2**64 - 1, 2, 200 - 256, 3]


def test_entering_subscribes_and_leaving_unsubscribes(tmp_path: Path) -> None:
    emit_numbered([1])
    with Recorder(tmp_path / "trace.ctrace", header={}) as recorder:
        hooks.subscribe(recorder)  # once is enough, twice is the same
        emit_numbered([2, 3])
        assert (recorder.recorded, recorder.is_closed) == (2, False)
    emit_numbered([4])
    assert recorder.is_closed
    assert not hooks.active
    assert addresses(read(tmp_path / "trace.ctrace")) == [2, 3]


def test_closing_twice_and_events_after_closing_change_nothing(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "trace.ctrace", header={})
    recorder.close()
    before = (tmp_path / "trace.ctrace").read_bytes()
    recorder(event_of())
    recorder.add_facts({"late": True})
    recorder.close()
    assert (tmp_path / "trace.ctrace").read_bytes() == before


def test_header_has_the_given_facts_and_the_recorders_own(tmp_path: Path) -> None:
    with Recorder(tmp_path / "trace.ctrace", header={"argv": ["a.py"], "device": "sim"}):
        pass
    header = read(tmp_path / "trace.ctrace").header
    assert (header["argv"], header["device"], header["pid"]) == (["a.py"], "sim", os.getpid())
    assert {"cudatool", "python", "start_time", "start_time_ns", "start_unix_ns", "end_time"} < header.keys()


def test_added_facts_amend_the_header_and_are_there_at_once(tmp_path: Path) -> None:
    with Recorder(tmp_path / "trace.ctrace", header={"exit_status": None}) as recorder:
        emit_numbered([1])
        recorder.add_facts({"exit_status": 3})
        emit_numbered([2])
        running = read(tmp_path / "trace.ctrace")
        recorder.add_facts({"warnings": ["w"]})
    closed = read(tmp_path / "trace.ctrace")
    assert (running.header["exit_status"], addresses(running)) == (3, [1, 2])
    assert (closed.header["exit_status"], closed.header["warnings"]) == (3, ["w"])


def test_running_recording_can_be_read(tmp_path: Path) -> None:
    with Recorder(tmp_path / "trace.ctrace", header={}):
        emit_numbered(range(5))
        trace = read(tmp_path / "trace.ctrace")
    assert addresses(trace) == list(range(5))
    assert (trace.ending, trace.ending.is_complete) == (Ending.GROWING, True)
    assert trace.notes == ["The program is still running: this is what it has recorded so far."]


def test_short_recording_makes_a_small_file(tmp_path: Path) -> None:
    with Recorder(tmp_path / "trace.ctrace", header={}):
        emit_numbered(range(5))
    assert (tmp_path / "trace.ctrace").stat().st_size < 64 * 1024


def test_room_for_a_chunk_is_there_before_it_is_used(tmp_path: Path) -> None:
    # A write into a mapping of a file without room behind it would kill the program with SIGBUS.
    with Recorder(tmp_path / "trace.ctrace", header={}) as recorder:
        status = os.stat(recorder.path)
        assert status.st_blocks * 512 >= status.st_size > 4096 * RECORD.itemsize


def test_existing_file_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "trace.ctrace"
    path.write_text("precious")
    with pytest.raises(OutputError, match="exists; add -f"):
        Recorder(path, header={})
    assert path.read_text() == "precious"


def test_existing_file_is_replaced_on_request(tmp_path: Path) -> None:
    path = tmp_path / "trace.ctrace"
    path.write_text("worthless")
    with Recorder(path, header={}, force=True):
        emit_numbered([1])
    assert addresses(read(path)) == [1]


def test_what_is_not_a_regular_file_is_never_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (tmp_path, pipe):
        with pytest.raises(OutputError, match="a trace is a regular file"):
            Recorder(path, header={}, force=True)
    assert pipe.is_fifo()


def test_unwritable_place_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="its directory does not exist"):
        Recorder(tmp_path / "missing" / "trace.ctrace", header={})


def test_recording_that_cannot_start_leaves_no_file(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        with pytest.raises(OutputError, match="cannot be written: File too large"):
            Recorder(tmp_path / "trace.ctrace", header={})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []


def test_threads_beyond_what_a_record_can_tell_apart_share_an_entry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cudatool.trace.recorder._MAX_THREAD", 2)
    with Recorder(tmp_path / "trace.ctrace", header={}) as recorder:
        for thread in (11, 12, 13, 14, 11):
            recorder(event_of(thread=thread + 10**9))  # no thread of this process ever had such an id
    trace = read(tmp_path / "trace.ctrace")
    assert trace.records["thread"].tolist() == [0, 1, 2, 2, 0]
    assert trace.threads == ["", "", "other threads"]


def test_threads_emit_at_once_and_no_event_is_lost_or_reordered(tmp_path: Path) -> None:
    def work(first: int) -> None:
        emit_numbered(range(first, first + 3000))

    with Recorder(tmp_path / "trace.ctrace", header={}):
        threads = [threading.Thread(target=work, args=(n * 3000,), name=f"worker {n}") for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    trace = read(tmp_path / "trace.ctrace")
    assert sorted(addresses(trace)) == list(range(12_000))
    assert sorted(trace.threads) == [f"worker {n}" for n in range(4)]
    for index, name in enumerate(trace.threads):
        own = trace.records["address"][trace.records["thread"] == index]
        first = 3000 * int(name.split()[1])
        assert own.tolist() == list(range(first, first + 3000))


def test_forked_child_does_not_write_into_its_parents_file(tmp_path: Path) -> None:
    def in_the_child() -> int:
        emit_numbered(range(100, 5100))
        recorder.close()
        return int(hooks.active)

    with Recorder(tmp_path / "trace.ctrace", header={}) as recorder:
        emit_numbered([1])
        status = forked.status_of(in_the_child)
        assert addresses(read(tmp_path / "trace.ctrace")) == [1]
        emit_numbered([2])
    trace = read(tmp_path / "trace.ctrace")
    assert status == 0
    assert (addresses(trace), trace.notes) == ([1, 2], [])


def test_full_disk_stops_the_recording_and_not_the_program(tmp_path: Path, small_chunks: None) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Recorder(tmp_path / "trace.ctrace", header={}) as recorder:
        resource.setrlimit(resource.RLIMIT_FSIZE, (os.path.getsize(recorder.path) + 8_000, hard))
        try:
            emit_numbered(range(1000))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert not hooks.active
    trace = read(tmp_path / "trace.ctrace")
    assert 3 < len(trace.records) < 1000
    assert addresses(trace) == list(range(len(trace.records)))
    assert trace.notes == ["The recording stopped early: File too large. What happened later is missing."]
    assert (trace.ending, trace.ending.is_complete) == (Ending.STOPPED, False)


EMIT_FOREVER = """
import itertools, os, sys
from cudatool.trace import Kind, Recorder, hooks

with Recorder(sys.argv[1], header={}):
    for number in itertools.count():
        hooks.emit(Kind.MEM_ALLOC, address=number, size=512, name=f"name {number % 1000}")
        os.write(1, b"%d\\n" % number)
"""


@pytest.mark.some_of("attempt", range(10), 3)
def test_killed_process_loses_no_event_that_was_emitted(attempt: int, tmp_path: Path) -> None:
    path = tmp_path / "trace.ctrace"
    until = random.Random(attempt).randrange(1, 15_000)
    with subprocess.Popen([sys.executable, "-c", EMIT_FOREVER, path], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        acknowledged = [int(line) for line in itertools.islice(process.stdout, until)]
        process.kill()
        acknowledged += [int(line) for line in process.stdout if line.endswith(b"\n")]
    trace = read(path)
    assert len(trace.records) >= len(acknowledged) >= until
    assert addresses(trace) == list(range(len(trace.records)))
    names = [trace.names[i] for i in trace.records["name"]]
    assert names == [f"name {number % 1000}" for number in range(len(names))]
    assert [note.split(":")[0] for note in trace.notes] == ["The recording was not closed"]
    assert (trace.ending, trace.ending.is_complete) == (Ending.KILLED, True)


def test_record_layout_is_the_one_documented() -> None:
    assert RECORD.itemsize == 64
    packed = np.zeros(1, RECORD)
    packed["aux1"] = 1
    assert packed.tobytes()[56:] == (1).to_bytes(8, "little")


def test_facts_that_json_cannot_hold_are_written_as_text(tmp_path: Path) -> None:
    with Recorder(tmp_path / "trace.ctrace", header={"output": tmp_path}):
        pass
    assert json.dumps(read(tmp_path / "trace.ctrace").header["output"]) == json.dumps(str(tmp_path))


def test_program_that_closes_all_descriptors_keeps_its_own_files_and_the_trace(
    tmp_path: Path, small_chunks: None
) -> None:
    other = tmp_path / "other.txt"
    with Recorder(tmp_path / "trace.ctrace", header={}) as recorder:
        emit_numbered(range(100))
        number = recorder._file()
        os.close(number)  # as os.closerange(3, 1000) does
        taken = os.dup2(os.open(other, os.O_RDWR | os.O_CREAT), number)  # and gets the number again
        emit_numbered(range(100, 300))
    os.write(taken, b"mine")  # still open
    os.close(taken)
    trace = read(tmp_path / "trace.ctrace")
    assert other.read_bytes() == b"mine"
    assert (addresses(trace), trace.ending, trace.notes) == (list(range(300)), Ending.CLOSED, [])


def test_trace_whose_descriptor_and_file_are_gone_says_that_it_stopped(
    tmp_path: Path, small_chunks: None, caplog: pytest.LogCaptureFixture
) -> None:
    path, kept = tmp_path / "trace.ctrace", tmp_path / "kept"
    with pytest.raises(OutputError, match="cannot be finished"), Recorder(path, header={}) as recorder:
        emit_numbered(range(10))
        os.link(path, kept)
        path.unlink()
        path.write_text("other")
        os.close(recorder._file())
        emit_numbered(range(10, 300))
    assert path.read_text() == "other"
    trace = read(kept)
    assert (addresses(trace), trace.ending) == (list(range(len(trace.records))), Ending.STOPPED)


def test_descriptor_of_a_trace_is_out_of_the_programs_way(tmp_path: Path) -> None:
    with Recorder(tmp_path / "trace.ctrace", header={}) as recorder:
        assert recorder._file() >= 512
        assert not os.get_inheritable(recorder._file())


def test_mapping_of_a_trace_takes_no_low_descriptor_that_it_would_close(tmp_path: Path, small_chunks: None) -> None:
    before = low_descriptors()
    with Recorder(tmp_path / "trace.ctrace", header={}):
        assert low_descriptors() == before
        emit_numbered(range(300))  # chunks come and go
        assert low_descriptors() == before


def test_recorder_that_the_program_removed_says_that_events_are_missing(tmp_path: Path) -> None:
    with Recorder(tmp_path / "trace.ctrace", header={}) as recorder:
        emit_numbered(range(10))
        hooks.unsubscribe(recorder)
        emit_numbered(range(10, 20))
    trace = read(tmp_path / "trace.ctrace")
    assert (addresses(trace), trace.ending) == (list(range(10)), Ending.STOPPED)
    assert "removed the recorder" in trace.notes[0]


def test_recorder_that_failed_says_so_even_if_the_program_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "trace.ctrace"
    code = """
import os, sys
from cudatool.trace import Kind, Recorder, hooks

recorder = Recorder(sys.argv[1], header={})
hooks.subscribe(recorder)
hooks.emit(Kind.MEM_ALLOC, address=1, size=512)
recorder.dropped(OSError(28, "No space left on device"))
os._exit(0)
"""
    assert 0 == run_python(code, str(path)).returncode
    trace = read(path)
    assert (addresses(trace), trace.ending) == ([1], Ending.STOPPED)
    assert trace.notes == ["The recording stopped early: the recorder failed. What happened later is missing."]


INTERRUPTED = """
import signal, sys
from cudatool.trace import Kind, Recorder, hooks

class Interrupted({base}):
    pass

def interrupt(number, frame):
    if "/trace/" in frame.f_code.co_filename:  # in the middle of the hooks or of the recorder
        raise Interrupted

signal.signal(signal.SIGALRM, interrupt)
caught = number = 0
hooks.thread_id()  # a thread's first event takes its name
with Recorder(sys.argv[1], header={{}}):
    signal.setitimer(signal.ITIMER_REAL, 0.0003, 0.0003)
    while caught < 300:
        try:
            number += 1
            hooks.emit(Kind.MEM_ALLOC, address=number, size=512, name=f"name {{number}}")
        except Interrupted:
            caught += 1
    signal.setitimer(signal.ITIMER_REAL, 0)
    assert hooks.active
    print(number)
"""


@pytest.mark.parametrize("base", ["Exception", "OSError", "KeyboardInterrupt"])
def test_exceptions_of_signal_handlers_reach_the_program_and_lose_no_event_silently(tmp_path: Path, base: str) -> None:
    path = tmp_path / "trace.ctrace"
    done = run_python(INTERRUPTED.format(base=base), str(path))
    assert (done.returncode, done.stderr) == (0, "")
    trace = read(path)
    allocated = trace.of_kind(Kind.MEM_ALLOC)["address"].tolist()
    assert (trace.ending, len(allocated)) == (Ending.CLOSED, len(set(allocated)))  # none twice
    missing = set(range(1, int(done.stdout) + 1)).difference(allocated)
    said = trace.of_kind(Kind.WARNING)["flags"].tolist()
    assert len(missing) <= 100  # of the 300 that were interrupted
    assert WarningFlag.LOST in said or not missing


def test_an_event_that_a_signal_handlers_exception_kept_waiting_is_in_the_file_though_none_follows(
    tmp_path: Path,
) -> None:
    with Recorder(tmp_path / "trace.ctrace", header={}):
        emit_numbered(range(3))
        hooks.emit(Kind.MEM_ALLOC, address=3, size=512)
        waiting = threads.local.thread.pending
        waiting.append(Event(hooks.monotonic_ns(), Kind.MEM_ALLOC, 0, 0, hooks.thread_id(), 0, 0, 0, "", 4, 512, 0, 0))
    assert addresses(read(tmp_path / "trace.ctrace")) == [0, 1, 2, 3, 4]
    assert not waiting
