from __future__ import annotations

import gc
import logging
import signal
import subprocess
import sys
import threading
import types
from typing import Any

import forked
import numpy as np
import numpy.typing as npt
import pytest

from cudatool.trace import handles, hooks
from cudatool.trace.events import RECORD, Event, Kind, StreamFlag, WarningFlag


def collect_into(events: list[Event]) -> hooks.Subscriber:
    def subscriber(event: Event) -> None:
        events.append(event)

    return subscriber


def instrumented_call() -> None:
    """The shape that the contract asks of an instrumented call."""
    if hooks.active:
        correlation = hooks.begin()
        hooks.end()
        hooks.emit(Kind.RANGE_PUSH, correlation=correlation)


def test_call_without_subscribers_reads_one_attribute_and_never_emits(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []

    class CountingModule(types.ModuleType):
        def __getattribute__(self, name: str) -> Any:
            read.append(name)
            return super().__getattribute__(name)

    monkeypatch.setattr(hooks, "__class__", CountingModule)
    read.clear()
    instrumented_call()
    seen = list(read)
    monkeypatch.undo()
    assert seen == ["active"]


def test_stream_id_without_subscribers_never_emits(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(kind: Kind, **fields: Any) -> None:
        raise AssertionError(f"emitted {kind}")

    def listener(event: Event) -> None:
        raise AssertionError(f"received {event}")

    hooks.subscribe(listener)
    monkeypatch.setattr(handles, "announce", refuse)
    hooks.unsubscribe(listener)
    assert hooks.stream_id(0, 0xABC) == 1


class Source:
    """Passes on events of its own, at these times, before those of others."""

    def __init__(self, times: list[int]) -> None:
        self.times = times

    def __call__(self, event: Event) -> None:
        while self.times and self.times[0] <= event.time:
            record = np.zeros(1, RECORD)
            record["kind"], record["time"] = Kind.MARK, self.times.pop(0)
            hooks.forward_rows(record, [""], source=self)

    def before_rows(self, rows: npt.NDArray[np.void]) -> int:
        self(hooks.own_event(Kind.MARK)._replace(time=int(rows["time"][0])))
        return int(rows["time"].searchsorted(self.times[0])) if self.times else len(rows)


def test_rows_come_after_what_every_source_has_from_before_them() -> None:
    seen: list[Event] = []
    hooks.subscribe(collect_into(seen))
    for times in ([3, 5, 5, 30], [1, 5, 8]):
        hooks.subscribe(Source(times), first=True)
    rows = np.zeros(4, RECORD)
    rows["kind"], rows["time"] = Kind.RANGE_PUSH, [2, 4, 7, 9]
    hooks.forward_rows(rows, [""])
    assert [event.time for event in seen] == [1, 2, 3, 4, 5, 5, 5, 7, 8, 9]


def test_source_that_fails_is_removed_and_the_rows_reach_the_others(caplog: pytest.LogCaptureFixture) -> None:
    def fail(rows: npt.NDArray[np.void]) -> int:
        raise RuntimeError("of the source")

    seen: list[Event] = []
    hooks.subscribe(collect_into(seen))
    source = Source([])
    source.before_rows = fail  # type: ignore[method-assign]
    hooks.subscribe(source)
    rows = np.zeros(2, RECORD)
    rows["kind"] = Kind.MARK
    hooks.forward_rows(rows, [""])
    hooks.emit(Kind.MARK)
    assert [event.kind for event in seen] == [Kind.MARK, Kind.MARK, Kind.WARNING, Kind.MARK]
    assert not hooks.is_subscribed(source) and "of the source" in caplog.text


def test_subscribers_run_in_the_order_they_were_added() -> None:
    order: list[str] = []
    hooks.subscribe(lambda event: order.append("first"))
    hooks.subscribe(lambda event: order.append("second"))
    instrumented_call()
    assert order == ["first", "second"]


def test_subscribing_twice_delivers_once() -> None:
    events: list[Event] = []
    hooks.subscribe(events.append)
    hooks.subscribe(events.append)  # a bound method is a new object each time it is named
    instrumented_call()
    assert len(events) == 1


def test_active_is_true_exactly_while_somebody_subscribes() -> None:
    events: list[Event] = []
    seen = [hooks.active]
    hooks.subscribe(events.append)
    seen.append(hooks.active)
    hooks.unsubscribe(events.append)
    seen.append(hooks.active)
    hooks.unsubscribe(events.append)  # not there any more: nothing happens
    seen.append(hooks.active)
    assert seen == [False, True, False, False]


def test_failing_subscriber_is_dropped_logged_once_and_said_to_the_others(caplog: pytest.LogCaptureFixture) -> None:
    events: list[Event] = []

    def broken(event: Event) -> None:
        raise ValueError("no good")

    hooks.subscribe(broken)
    hooks.subscribe(events.append)
    with caplog.at_level(logging.ERROR, logger="cudatool.trace"):
        instrumented_call()
        instrumented_call()
    assert [event.kind for event in events] == [Kind.RANGE_PUSH, Kind.WARNING, Kind.RANGE_PUSH]
    assert "broken" in events[1].name
    (record,) = caplog.records
    assert "broken" in record.getMessage()


def test_strict_raises_a_subscribers_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(event: Event) -> None:
        raise ValueError("no good")

    monkeypatch.setattr(hooks, "strict", True)
    hooks.subscribe(broken)
    with pytest.raises(ValueError, match="no good"):
        instrumented_call()


def test_events_of_a_subscribers_own_work_are_left_out() -> None:
    events: list[Event] = []

    def busy(event: Event) -> None:
        events.append(event)
        hooks.emit(Kind.WARNING, name="from the subscriber")

    hooks.subscribe(busy)
    hooks.emit(Kind.RANGE_PUSH, name="from the program")
    hooks.emit(Kind.RANGE_POP)
    assert [event.kind for event in events] == [Kind.RANGE_PUSH, Kind.RANGE_POP]


def test_finalizer_run_by_the_collector_inside_a_subscriber_is_part_of_the_program() -> None:
    class Buffer:
        def __init__(self) -> None:
            self.cycle = self

        def __del__(self) -> None:
            hooks.emit(Kind.MEM_FREE, address=0x100)

    events: list[Event] = []

    def subscriber(event: Event) -> None:
        if event.kind == Kind.MEM_ALLOC:
            gc.collect()
        events.append(event)

    hooks.subscribe(subscriber)
    gc.disable()  # it may come at any moment
    try:
        Buffer()
        hooks.emit(Kind.MEM_ALLOC, address=0x200)
    finally:
        gc.enable()
    assert [(event.kind, event.address) for event in events] == [(Kind.MEM_ALLOC, 0x200), (Kind.MEM_FREE, 0x100)]


def test_stack_is_captured_only_for_kinds_that_have_one() -> None:
    events: list[Event] = []
    hooks.subscribe(events.append)
    hooks.emit(Kind.MEM_ALLOC)
    hooks.emit(Kind.ACCESS)
    hooks.emit(Kind.MEM_ALLOC, stack=0)
    assert [event.stack != 0 for event in events] == [True, False, False]


def test_nested_operations_belong_to_the_outermost() -> None:
    outer = hooks.begin()
    inner = hooks.begin()
    during = hooks.current_operation()
    hooks.end()
    still = hooks.current_operation()
    hooks.end()
    assert (inner, during, still, hooks.current_operation()) == (outer, outer, outer, 0)


def test_operation_of_one_thread_is_not_seen_by_another() -> None:
    seen: list[int] = []
    hooks.begin()
    thread = threading.Thread(target=lambda: seen.append(hooks.current_operation()))
    thread.start()
    thread.join()
    hooks.end()
    assert seen == [0]


def test_threads_that_share_a_native_ident_have_different_ids() -> None:
    ids: list[int] = []
    for name in ("one", "two", "three"):  # one after the other, so that the system may reuse the ident
        thread = threading.Thread(target=lambda: ids.append(hooks.thread_id()), name=name)
        thread.start()
        thread.join()
    assert len(set(ids)) == 3
    assert [hooks.thread_name(i) for i in ids] == ["one", "two", "three"]


def test_thread_in_which_a_collection_comes_first_has_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """The collector may run before the thread has told the interpreter who it is."""
    names: list[str] = []
    hooks.subscribe(names.append)  # to hear of collections
    current = threading.current_thread

    def work() -> None:
        monkeypatch.setattr(threading, "current_thread", threading.main_thread)
        gc.collect()
        monkeypatch.setattr(threading, "current_thread", current)
        names.append(hooks.thread_name(hooks.thread_id()))

    thread = threading.Thread(target=work, name="late")
    thread.start()
    thread.join()
    hooks.unsubscribe(names.append)
    assert names[-1:] == ["late"]


def test_the_main_thread_has_its_name_though_it_emits_nothing() -> None:
    code = (
        "import threading\nfrom cudatool.trace import hooks\nhooks.begin()\n"
        "print(hooks.thread_name(hooks.native_thread(threading.get_native_id())))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "MainThread\n"


def test_reused_stream_handle_gets_a_new_id() -> None:
    first = hooks.stream_id(0, 0xABC)
    assert hooks.stream_id(0, 0xABC) == first
    assert hooks.close_stream(0, 0xABC) == first
    assert hooks.stream_id(0, 0xABC) != first
    assert hooks.close_stream(0, 0xDEF) == 0


def test_reused_event_handle_gets_a_new_id() -> None:
    first = hooks.event_id(0xABC)
    assert hooks.event_id(0xABC) == first
    assert hooks.close_event(0xABC) == first
    assert hooks.event_id(0xABC) != first


def test_null_handle_is_the_legacy_default_stream() -> None:
    events: list[Event] = []
    hooks.subscribe(events.append)
    assert hooks.stream_id(0, 0) == hooks.stream_id(0, 1)
    (created,) = events
    assert (created.kind, created.flags) == (Kind.STREAM_CREATE, StreamFlag.LEGACY_DEFAULT)


def test_per_thread_default_stream_differs_between_threads() -> None:
    ids = [hooks.stream_id(0, 2)]
    thread = threading.Thread(target=lambda: ids.append(hooks.stream_id(0, 2)))
    thread.start()
    thread.join()
    assert len(set(ids)) == 2


def test_late_subscriber_learns_of_the_streams_that_exist() -> None:
    kept = hooks.stream_id(0, 0xABC, flags=StreamFlag.NON_BLOCKING, priority=-1)
    hooks.stream_id(0, 0xDEF)
    hooks.close_stream(0, 0xDEF)
    events: list[Event] = []
    hooks.subscribe(events.append)
    (created,) = events
    assert (created.kind, created.stream, created.flags, created.aux0) == (
        Kind.STREAM_CREATE,
        kept,
        StreamFlag.NON_BLOCKING,
        2**64 - 1,
    )


def test_what_was_destroyed_unseen_is_forgotten_and_default_streams_stay() -> None:
    alive, dead, default = (hooks.stream_id(0, handle) for handle in (0xABC, 0xDEF, 2))
    event, gone, without_handle = (hooks.event_id(handle) for handle in (0x123, 0x456, -5))
    hooks.forget_destroyed({0xABC, 0x123}.__contains__)
    events: list[Event] = []
    hooks.subscribe(collect_into(events))
    assert [alive, default] == [event.stream for event in events]
    assert [alive, default] == [hooks.stream_id(0, handle) for handle in (0xABC, 2)]
    assert [event, without_handle] == [hooks.event_id(handle) for handle in (0x123, -5)]
    assert dead != hooks.stream_id(0, 0xDEF)
    assert gone != hooks.event_id(0x456)


def test_emitting_is_true_exactly_while_a_subscriber_runs_on_this_thread() -> None:
    seen = [hooks.emitting()]
    hooks.subscribe(lambda event: seen.append(hooks.emitting()))
    instrumented_call()
    seen.append(hooks.emitting())
    assert seen == [False, True, False]


def test_first_subscriber_hears_of_an_event_before_the_others_and_may_forward_earlier_ones() -> None:
    heard: list[Kind] = []
    earlier = Event(1, Kind.DEVICE_SYNCHRONIZE, 0, 0, 1, 0, 0, 0, "", 0, 0, 0, 0)

    def before(event: Event) -> None:
        if event is not earlier:
            hooks.forward(earlier)

    hooks.subscribe(lambda event: heard.append(event.kind))
    hooks.subscribe(before, first=True)
    hooks.emit(Kind.RANGE_PUSH, name="now")
    assert heard == [Kind.DEVICE_SYNCHRONIZE, Kind.RANGE_PUSH]


def test_dropped_subscriber_is_told_and_the_others_receive_a_warning_that_events_are_lost(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Failing:
        error: BaseException | None = None

        def __call__(self, event: Event) -> None:
            raise OSError("no room")

        def dropped(self, error: BaseException) -> None:
            self.error = error

    failing, events = Failing(), []
    hooks.subscribe(failing)
    hooks.subscribe(events.append)
    hooks.emit(Kind.RANGE_PUSH, name="a")
    assert str(failing.error) == "no room"
    assert [(event.kind, event.flags) for event in events] == [
        (Kind.RANGE_PUSH, 0),
        (Kind.WARNING, WarningFlag.LOST),
    ]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_exception_of_a_signal_handler_reaches_the_program_after_all_subscribers_have_the_event(error: type) -> None:
    def handler(number: int, frame: object) -> None:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        raise error("of the program")

    def interrupted(event: Event) -> None:
        signal.raise_signal(signal.SIGUSR1)
        seen.append(event.name)

    seen: list[str] = []
    events: list[Event] = []
    interrupted.__module__ = "cudatool.trace.recorder"  # one of ours
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        hooks.subscribe(interrupted)
        hooks.subscribe(events.append)
        with pytest.raises(error, match="of the program"):
            hooks.emit(Kind.RANGE_PUSH, name="a")
        hooks.emit(Kind.RANGE_POP, name="b")
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert seen == ["a", "b"]
    assert [event.kind for event in events] == [Kind.RANGE_PUSH, Kind.RANGE_POP]


def test_subscriber_that_always_exits_is_dropped() -> None:
    def leaving(event: Event) -> None:
        raise SystemExit(3)

    hooks.subscribe(leaving)
    with pytest.raises(SystemExit):
        hooks.emit(Kind.RANGE_PUSH, name="a")
    hooks.emit(Kind.RANGE_POP, name="b")
    assert not hooks.active


def test_thread_of_a_forked_child_is_the_one_that_its_driver_calls_name() -> None:
    hooks.thread_id()  # taken in the parent, too
    assert forked.status_of(lambda: hooks.native_thread(threading.get_native_id()) != hooks.thread_id()) == 0


def test_an_event_that_is_interrupted_over_and_over_is_said_to_be_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a signal handler raises in all that could say so at once."""

    class Interrupted(Exception):
        pass

    def raises(*_: object) -> None:
        raise Interrupted

    hooks.thread_id()  # a thread's first event takes its name
    events: list[Event] = []
    hooks.subscribe(events.append)
    before = len(events)
    with monkeypatch.context() as patched:
        patched.setattr(hooks, "_is_of_the_program", raises)
        patched.setattr(hooks, "own_event", raises)
        patched.setattr(hooks, "monotonic_ns", raises)
        hooks.local.thread.named = False  # so that Python makes the event
        with pytest.raises(Interrupted):
            hooks.emit(Kind.MARK, name="interrupted")
    hooks.emit(Kind.MARK, name="later")
    assert [Kind.WARNING, Kind.MARK] == [event.kind for event in events[before:]]
    assert (WarningFlag.LOST, "later") == (events[before].flags, events[-1].name)
