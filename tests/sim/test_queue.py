"""The scheduler against what it must do, on random programs; and what becomes of operations that fail."""

from __future__ import annotations

import gc
import random
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
from reference_queue import ReferenceOperation, ReferenceScheduler

from cudatool.sim import abi
from cudatool.sim.queue import Operation, Schedule, Scheduler, StreamState
from cudatool.sim.results import DriverError, Result

ENGINES = ("", "", "", "h2d", "d2h")


def new_context(ordinal: int) -> Any:
    context = SimpleNamespace(device=SimpleNamespace(ordinal=ordinal), error=None, streams={})
    context.legacy_stream = StreamState(context, 1, 0, 0, 1)
    for handle in (3, 4, 5):
        context.streams[handle] = StreamState(context, handle, handle % 2, 0, handle)
    return context


def execute(seed: int, scheduler: Any, new_operation: Any) -> list[Any]:
    """Carry out the program of this seed, and return all that can be seen of it."""
    choose = random.Random(seed)
    contexts = [new_context(0), new_context(1)]
    streams = [s for context in contexts for s in (context.legacy_stream, *context.streams.values())]
    operations: list[Any] = []
    seen: list[Any] = []

    def work(operation: Any) -> None:
        seen.append(operation.name)
        if operation.kind == "fails":
            raise DriverError(Result.LAUNCH_FAILED, operation.name)

    for number in range(choose.randrange(20, 120)):
        action = choose.random()
        earlier = choose.sample(operations, min(len(operations), choose.randrange(3)))
        if action < 0.7:
            kind = choose.choices(["kernel", "record", "fails"], [20, 8, 1])[0]
            operation = new_operation(choose.choice(streams), kind, f"operation {number}", number)
            operation.run = None if kind == "record" else work
            cost, engine = choose.choice([0, 1, 700, 2500, 10**6]), choose.choice(ENGINES)
            add = scheduler.enqueue if choose.random() < 0.9 else scheduler.add
            add(operation, cost=cost, engine=engine, after=earlier)
            operations.append(operation)
        elif action < 0.85:
            scheduler.wait(choose.choice(operations) if operations else None)
        elif action < 0.97:
            seen.append(scheduler.query(earlier))
        else:
            scheduler.drain()
        seen.append((scheduler.host_time, [one.done for one in operations]))
    scheduler.drain()
    seen += [(one.sequence, one.start, one.end, one.done) for one in operations]
    seen += [str(context.error) for context in contexts]
    return seen


@pytest.mark.parametrize("schedule", Schedule)
def test_random_programs_run_as_the_reference_says(schedule):
    with abi.lock:
        for seed in range(150):
            expected = execute(seed, ReferenceScheduler(schedule, seed), ReferenceOperation)
            assert expected == execute(seed, Scheduler(schedule, seed), Operation), seed


def test_what_an_operation_raises_that_is_no_error_of_the_driver_comes_out():
    context = new_context(0)
    scheduler = Scheduler(Schedule.FIFO, 0)

    def fail(_: Operation) -> None:
        raise KeyError("a mistake")

    with abi.lock:
        first, second = (Operation(context.legacy_stream, "kernel", "k", 1) for _ in range(2))
        first.run = fail
        for one in (first, second):
            scheduler.enqueue(one, cost=1)
        with pytest.raises(KeyError, match="a mistake"):
            scheduler.wait(second)
        assert first.done and not second.done and scheduler._running == 0
        scheduler.wait(second)
        assert not scheduler.is_busy and context.error is None


@pytest.mark.parametrize("step", ["before", "after"])
def test_an_operation_whose_observer_fails_is_over_all_the_same(step):
    context = new_context(0)
    scheduler = Scheduler(Schedule.FIFO, 0)

    def fail(_: Operation) -> None:
        raise KeyError("a mistake")

    watch = dict.fromkeys(("look", "blur", "enqueued", "before", "after", "waited"), lambda *_: None)
    scheduler.watch = SimpleNamespace(**{**watch, step: fail})
    with abi.lock:
        operation = Operation(context.legacy_stream, "kernel", "k", 1)
        scheduler.enqueue(operation, cost=1)
        with pytest.raises(KeyError, match="a mistake"):
            scheduler.wait(operation)
        assert operation.done and not scheduler.is_busy and scheduler._running == 0


def test_time_beyond_what_can_be_counted_stands_still():
    context = new_context(0)
    scheduler = Scheduler(Schedule.FIFO, 0)
    with abi.lock:
        for _ in range(3):
            scheduler.enqueue(Operation(context.legacy_stream, "kernel", "k", 1), cost=1 << 80)
        scheduler.drain()
        assert context.legacy_stream.last.end == scheduler.host_time == 1 << 62


def test_a_long_chain_of_operations_is_freed():
    context = new_context(0)
    scheduler = Scheduler(Schedule.FIFO, 0)
    with abi.lock:
        for _ in range(50_000):
            scheduler.enqueue(Operation(context.legacy_stream, "kernel", "k", 1), cost=1)
    seen = weakref.ref(scheduler)
    del scheduler
    context.legacy_stream.last = None
    gc.collect()
    assert seen() is None
