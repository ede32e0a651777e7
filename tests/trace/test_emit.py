"""The parts of the hooks and of the recorder that are C: what they take, keep and give back."""

from __future__ import annotations

import gc
import signal
import sys
import threading
from pathlib import Path
from types import CodeType
from typing import Any

import numpy as np
import pytest

from cudatool.trace import Recorder, hooks, read, stacks
from cudatool.trace._append import Tail
from cudatool.trace._emit import Thread
from cudatool.trace.events import Event, Kind, WarningFlag


def _emits(name: str) -> CodeType:
    """A frame that no stack has had yet, in which an event is emitted.

    Compiled, since ``exec`` of a text out of which KeyboardInterrupt comes lets Python end with SIGINT, caught or not.
    """
    return compile(f"emit(kind, name={name!r})", "<emits>", "exec")


def references(*objects: object) -> list[int]:
    return [sys.getrefcount(each) for each in objects]


class Mistake(Exception):
    pass


def test_event_has_the_fields_given_and_defaults_for_the_others() -> None:
    events: list[Event] = []
    hooks.subscribe(events.append)
    hooks.emit(
        Kind.MEMCPY, device=1, stream=2, correlation=3, name="n", address=4, size=5, flags=6, aux0=7, aux1=8, stack=9
    )
    hooks.emit(kind=Kind.EXECUTION)
    every, none = events
    assert type(every) is Event
    assert every._replace(time=0) == (0, Kind.MEMCPY, 1, 6, hooks.thread_id(), 2, 3, 9, "n", 4, 5, 7, 8)
    assert none._replace(time=0) == (0, Kind.EXECUTION, -1, 0, hooks.thread_id(), 0, 0, 0, "", 0, 0, 0, 0)
    assert hash(every) == hash(tuple(every))
    assert 0 < every.time <= none.time


@pytest.mark.parametrize(
    ("arguments", "keywords", "says"),
    [
        ((), {}, "needs the kind"),
        ((Kind.MARK, 1), {}, "one positional argument"),
        ((Kind.MARK,), {"kind": Kind.MARK}, "unexpected keyword argument 'kind'"),
        ((Kind.MARK,), {"time": 3}, "unexpected keyword argument 'time'"),
    ],
)
def test_arguments_that_do_not_fit_are_type_errors(
    arguments: tuple[Any, ...], keywords: dict[str, Any], says: str
) -> None:
    events: list[Event] = []
    hooks.subscribe(events.append)
    with pytest.raises(TypeError, match=says):
        hooks.emit(*arguments, **keywords)
    assert events == []
    assert not hooks.emitting()


def test_keyword_that_is_not_interned_is_the_same_keyword() -> None:
    events: list[Event] = []
    hooks.subscribe(events.append)
    hooks.emit(Kind.MARK, **{"".join(["add", "ress"]): 7})
    assert events[0].address == 7


def test_nothing_that_emit_is_given_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks._log, "error", lambda *arguments, **keywords: None)  # a log has the traceback
    name, address = "".join(["a", "b"]), 10**12
    kept = name, address
    before = references(*kept)

    def emit() -> None:
        hooks.emit(Kind.MEM_ALLOC, name=name, address=address)

    def fails(event: Event) -> None:
        raise Mistake

    def nested(event: Event) -> None:
        emit()

    for subscriber in (lambda event: None, nested, fails):
        hooks.subscribe(subscriber)
        for _ in range(5):
            emit()
        hooks.unsubscribe(subscriber)
    with pytest.raises(TypeError):
        hooks.emit(Kind.MARK, name=name, address=address, other=address)  # type: ignore[call-arg]
    assert references(*kept) == before


def test_an_event_is_freed_when_its_subscribers_have_let_it_go() -> None:
    class Name(str):
        freed = False

        def __del__(self) -> None:
            Name.freed = True

    hooks.subscribe(lambda event: None)
    hooks.emit(Kind.MARK, name=Name("x"))
    assert Name.freed


def test_recorder_keeps_the_last_event_and_no_other(tmp_path: Path) -> None:
    addresses = [10**12 + n for n in range(50)]
    with Recorder(tmp_path / "trace.ctrace", header={}):
        hooks.emit(Kind.MARK)
        before = references(*addresses)
        for address in addresses:
            hooks.emit(Kind.MARK, address=address, stack=0)
        after = references(*addresses)
    assert [old == new for old, new in zip(before, after, strict=True)] == [True] * 49 + [False]


def test_subscriber_removed_by_one_before_it_has_this_event_and_not_the_next() -> None:
    heard: list[str] = []

    def last(event: Event) -> None:
        heard.append(event.name)

    hooks.subscribe(lambda event: hooks.unsubscribe(last))
    hooks.subscribe(last)
    hooks.emit(Kind.MARK, name="a")
    hooks.emit(Kind.MARK, name="b")
    assert heard == ["a"]


def test_every_subscriber_has_each_event_although_others_fail_or_come_meanwhile() -> None:
    heard: list[str] = []

    def joins(event: Event) -> None:
        hooks.subscribe(late)

    def fails(event: Event) -> None:
        raise Mistake

    def also_fails(event: Event) -> None:
        raise Mistake

    def late(event: Event) -> None:
        heard.append(f"late {event.name}")

    for subscriber in (joins, fails, lambda event: heard.append(event.name), also_fails):
        hooks.subscribe(subscriber)
    hooks.emit(Kind.RANGE_PUSH, name="a")
    hooks.emit(Kind.RANGE_PUSH, name="b")
    assert [name for name in heard if "removed" not in name] == ["a", "b", "late b"]


def test_emit_where_python_has_no_room_for_another_frame_raises_and_goes_on_afterwards() -> None:
    events: list[str] = []

    def subscriber(event: Event) -> None:
        events.append(event.name)

    def deeper() -> None:
        hooks.emit(Kind.MARK, name="deep")
        deeper()

    hooks.subscribe(subscriber)
    with pytest.raises(RecursionError):
        deeper()
    assert not hooks.emitting()
    hooks.subscribe(subscriber)  # an error of its own has removed it
    hooks.emit(Kind.MARK, name="after")
    assert events[-1] == "after"


def test_interruption_in_the_capture_of_a_stack_waits_until_subscribers_have_the_event(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A frame that is new is looked up in Python, where a signal handler may run."""
    events: list[Event] = []
    role = stacks._role
    raised: list[int] = []

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    def role_and_signal(file: str) -> int:
        if not raised:
            raised.append(1)
            signal.raise_signal(signal.SIGUSR1)
        return role(file)

    hooks.thread_id()
    hooks.subscribe(events.append)
    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        monkeypatch.setattr(stacks, "_role", role_and_signal)
        with pytest.raises(KeyboardInterrupt):
            exec(_emits("new frame"), {"emit": hooks.emit, "kind": Kind.MEM_ALLOC})
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert [event.name for event in events] == ["new frame"]
    assert stacks.frames(events[0].stack)
    assert not hooks.emitting()


def test_what_a_finalizer_emits_while_a_stack_is_captured_has_the_earlier_time(monkeypatch: pytest.MonkeyPatch) -> None:
    class Late:
        def __init__(self) -> None:
            self.itself = self  # so that the collector finds it

        def __del__(self) -> None:
            hooks.emit(Kind.MARK, name="finalizer")

    events: list[Event] = []
    role = stacks._role

    def role_after_a_collection(file: str) -> int:
        gc.collect()
        return role(file)

    hooks.thread_id()
    gc.collect()
    hooks.subscribe(events.append)
    monkeypatch.setattr(stacks, "_role", role_after_a_collection)
    Late()
    exec(_emits("frame that is new"), {"emit": hooks.emit, "kind": Kind.MEM_ALLOC})
    assert ["finalizer", "frame that is new"] == [event.name for event in events]
    assert events[0].time <= events[1].time


def test_threads_emit_to_one_subscriber_and_none_of_their_events_is_lost() -> None:
    heard: list[tuple[int, int]] = []
    hooks.subscribe(lambda event: heard.append((event.thread, event.address)))

    def work() -> None:
        for number in range(1000):
            hooks.emit(Kind.MARK, address=number)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({thread for thread, _ in heard}) == 4
    for own in {thread for thread, _ in heard}:
        assert [number for thread, number in heard if thread == own] == list(range(1000))


def test_recorder_waits_for_the_thread_that_has_its_lock(tmp_path: Path) -> None:
    with Recorder(tmp_path / "trace.ctrace", header={}) as recorder:
        hooks.emit(Kind.MARK, stack=0)
        (thread_id,) = recorder._threads
        event = Event(1, Kind.MARK, 0, 0, thread_id, 0, 0, 0, "", 0, 0, 0, 0)  # like the one before
        begins = threading.Event()

        def work() -> None:
            begins.set()
            recorder(event)

        thread = threading.Thread(target=work)
        with recorder._lock:
            thread.start()
            begins.wait()
            thread.join(0.1)
            assert (thread.is_alive(), recorder.recorded) == (True, 1)
        thread.join()
        assert recorder.recorded == 2


def test_event_given_again_is_written_once(tmp_path: Path) -> None:
    event = Event(1, Kind.MARK, 0, 0, 1, 0, 0, 0, "", 0, 0, 0, 0)
    with Recorder(tmp_path / "trace.ctrace", header={}) as recorder:
        for each in (event, event, Event(*event), Event(*event)):
            recorder(each)
            recorder(each)
    assert len(read(tmp_path / "trace.ctrace").records) == 3


@pytest.mark.parametrize("seen", [False, True], ids=["new names", "names seen before"])
def test_numbers_of_any_kind_are_recorded(tmp_path: Path, seen: bool) -> None:
    with Recorder(tmp_path / "trace.ctrace", header={}) as recorder:
        if seen:
            recorder(Event(1, Kind.MARK, 0, 0, 1, 0, 0, 0, "", 0, 0, 0, 0))
        recorder(
            Event(2, Kind.WARNING, np.int8(-1), WarningFlag.LOST, 1, True, 0, 0, "", np.uint64(2**64 - 1), 3, 4, 5)
        )  # type: ignore[arg-type]
        recorder(Event(3, Kind.WARNING, -129, 2**16 + 1, 1, 2**32 + 7, -1, 0, "", 2**64 + 1, -1, -2, 2**70))
    last = read(tmp_path / "trace.ctrace").records[-2:]
    fields = ["device", "flags", "stream", "correlation", "address", "size", "aux0", "aux1"]
    assert last[fields].tolist() == [
        (-1, int(WarningFlag.LOST), 1, 0, 2**64 - 1, 3, 4, 5),
        (127, 1, 7, 2**32 - 1, 1, 2**64 - 1, 2**64 - 2, 0),
    ]


def test_recorder_is_called_with_one_event(tmp_path: Path) -> None:
    with Recorder(tmp_path / "trace.ctrace", header={}) as recorder:
        for arguments, keywords in (((), {}), ((1, 2), {}), ((1,), {"other": 1})):
            with pytest.raises(TypeError, match="called with one event"):
                recorder(*arguments, **keywords)
        with pytest.raises((TypeError, ValueError)):
            recorder((1, 2, 3))  # type: ignore[arg-type]
    assert len(read(tmp_path / "trace.ctrace").records) == 0


def test_bytes_are_written_only_where_there_is_room() -> None:
    store = bytearray(64 + 10)
    tail = Tail(memoryview(store), 64)
    tail.append(b"123456")
    assert (tail.used, tail.capacity, bytes(store[64:]), store[16]) == (6, 10, b"123456\0\0\0\0", 6)
    for write in (lambda: tail.append(b"12345"), lambda: tail.filled(5), lambda: tail.filled(-1)):
        with pytest.raises(ValueError, match="no room"):
            write()
    tail.capacity = 1000  # which says nothing of the bytes that there are
    with pytest.raises(ValueError, match="no room"):
        tail.append(b"12345")
    tail.filled(4)
    tail._release()
    tail._release()
    with pytest.raises(ValueError, match="is closed"):
        tail.append(b"")
    store.append(1)  # nothing has the bytes any more
    with pytest.raises(ValueError, match="no room for such a header"):
        Tail(memoryview(bytearray(16)), 64)
    with pytest.raises(BufferError):
        Tail(memoryview(b"x" * 100), 64)


def test_state_of_a_thread_has_the_types_that_c_reads() -> None:
    thread = Thread()
    assert (thread.id, thread.depth, thread.pending, thread.emitting, thread.named) == (0, 0, [], False, False)
    with pytest.raises(AttributeError):
        thread.pending = []  # type: ignore[misc]
    with pytest.raises(TypeError):
        thread.id = "1"  # type: ignore[assignment]
