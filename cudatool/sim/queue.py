"""Streams, events and the scheduler: enqueuing only records, observing executes.

Two orders are kept apart on purpose:

* **Virtual time** is computed when an operation is enqueued, from its dependencies, a cost and the host's clock. It
  depends on nothing else, so timelines are identical on every run, whatever the schedule.
* **Execution** happens when the program observes a result, in an order that the dependencies allow and a seeded
  :class:`Schedule` chooses. A dependency that the program forgot is one the scheduler does not know either, so the
  program can see the wrong result that it could see on a GPU.
"""

from __future__ import annotations

import _thread
import random
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from cudatool.ptx.kernel_names import kernel_name
from cudatool.sim import _calls, _queue, abi, signals
from cudatool.sim.abi import lock, log_message
from cudatool.sim.results import DriverError, Result

if TYPE_CHECKING:
    from cudatool.sim.graph.capture import CapturedEvent
    from cudatool.sim.ipc import SharedEvent
    from cudatool.sim.launches import Launch
    from cudatool.sim.observe.host_watch import HostWatch

__all__ = ["DISABLE_TIMING", "INTERPROCESS", "EventState", "Operation", "Schedule", "Scheduler", "StreamState"]


DISABLE_TIMING, INTERPROCESS = 2, 4  # CU_EVENT_*
_SOON_S = 0.2
_PATIENCE_S = 0.2  # after which a thread that waits for another one looks whether Ctrl-C has come
# For how long nothing may run before what waits for a value in memory is believed to wait for ever: where only the
# thread that waits could write it; where another one, or another process, may have yet to do so.
_STALLED_S, _STALLED_BESIDE_OTHERS_S = 10.0, 300.0


class Schedule(StrEnum):
    """Which of the operations that may run next is chosen."""

    FIFO = "fifo"
    """In the order of enqueuing, everything that was enqueued before what is waited for."""
    LIFO = "lifo"
    """The one enqueued last."""
    LATE = "late"
    """As late as possible: only what the observed operation depends on, and nothing else."""
    RANDOM = "random"
    """Any, by the seed; the blocks of each kernel, too."""


class Operation(_queue.Operation):
    """One piece of work on a stream.

    Attributes
    ----------
    correlation
        Of the driver call that enqueued it.
    kind, name
        ``"kernel"``, ``"memcpy"``, ``"memset"``, ``"host"``, ``"alloc"``, ``"free"``, ``"record"``, ``"wait"``,
        ``"write_value"``, ``"wait_value"``,
        ``"graph"`` (what only orders a graph's nodes), ``"graph_end"`` (the last one of a graph launch); and the
        kernel's or API's name.
    start, end
        Virtual time in ns on the device's clock.
    done
        Whether it has run.
    predecessors, dependents
        What it waits for that was not done when it was enqueued, and what waits for it.
    missing
        Predecessors that are not done.
    sequence
        Its number in the order of enqueuing.
    run
        Does the work; None for pure ordering. An error it raises becomes the context's.
    until
        Tells whether it may run yet, if that depends on a value in memory.
    value
        Address, bytes, value and flags, of what waits for a value in memory or writes it.
    footprint
        ``(address, size, flags)`` ranges: what a kernel touched, where that was measured; what a node of a graph
        copies or sets; and, with flags 0, what a graph allocates or frees.
    findings
        What the checkers found when it ran.
    programmatic
        Of a kernel: whether it was launched with programmatic stream serialization, whether it waits for the kernels
        before it, lets the next one begin before its end, and may use flags in memory. Operations of a stream run one
        after the other here all the same.
    host_source
        Address and size of the pinned memory that a copy will read when it runs.
    host_target
        Address and size of each range of pinned memory that a copy will fill when it runs, and that nothing which is
        pending needs before: until then it holds nothing.
    host_memory
        Address and size of each range that it will read or write when it runs, where the host can write it without a
        call (:mod:`cudatool.sim.observe.host_watch`). Other ranges may stand there too. Of a launch that was
        enqueued while nothing watched it is computed when it is asked for.
    launch, node
        The beginning of the graph launch that it is part of, None outside of graphs; and the number of its node in the
        executable graph.
    """

    __slots__ = ()


def _memory_of(operation: Operation) -> Sequence[tuple[int, int]]:
    """Return the `host_memory` of an operation, of a launch also where nothing watched when it was enqueued."""
    if not isinstance(operation.run, _queue.Launch):
        return operation.host_memory
    launch: Launch = operation.run  # type: ignore[assignment]  # there is one class of them
    return launch.host_memory()


class StreamState:
    """A stream of one context, and of a green context if it was made in one: its last operation orders the next."""

    def __init__(
        self, context: Any, handle: int, flags: int, priority: int, serial: int, green: Any | None = None
    ) -> None:
        self.context = context
        self.handle = handle
        self.flags = flags
        self.priority = priority
        self.serial = serial
        self.green = green
        self.attributes: dict[int, bytes] = {}  # CUlaunchAttributeValue by CUlaunchAttributeID, but for the priority
        self.last: Operation | None = None

    @property
    def blocking(self) -> bool:
        """Whether it synchronizes with the legacy default stream (CU_STREAM_NON_BLOCKING not given)."""
        return not self.flags & 1


class EventState:
    """An event: the operation that its latest record enqueued, None before the first.

    `captured` is what its latest record captured instead, if that was in a capturing stream. `shared` is what other
    processes know of it, if they can.
    """

    def __init__(self, context: Any, handle: int, flags: int) -> None:
        self.context = context
        self.handle = handle
        self.flags = flags
        self.recorded: Operation | None = None
        self.captured: CapturedEvent | None = None
        self.shared: SharedEvent | None = None

    @property
    def timed(self) -> bool:
        """Whether it records times (CU_EVENT_DISABLE_TIMING not given)."""
        return not self.flags & DISABLE_TIMING

    def close(self) -> None:
        """Give back what it shares with other processes."""
        if self.shared is not None:
            self.shared.close()


class Scheduler(_queue.Queue):
    """Everything that is enqueued and not yet executed, on all devices of the machine."""

    def __init__(self, schedule: Schedule, seed: int) -> None:
        super().__init__()
        self.schedule = schedule
        self.synchronized: Callable[[], None] = lambda: None
        """Called whenever the host has waited for work."""
        self.value_writes: dict[int, Operation] = {}
        """By address, what writes a value there and was enqueued last."""
        self.timeout_s = 0
        """For how long a wait for a value in memory may stall, 0 if that is not said."""
        self._random = random.Random(seed)
        self._soon: list[Operation] = []
        self._has_runner = False
        # What pending operations read of pinned memory, None where anything, by sequence number; and the latest of the
        # operations that were looked at for it. So each is looked at once, however many copies to the host follow.
        self._host_reads: dict[int, list[tuple[int, int]] | None] = {}
        self._looked_at = 0

    @property
    def schedule(self) -> Schedule:
        """Which of the operations that may run next is chosen."""
        return self._schedule

    @schedule.setter
    def schedule(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._in_order = schedule is Schedule.FIFO

    def blocking_streams_last(self, context: Any) -> list[Operation | None]:
        """Return the last operations of the streams that the legacy default stream of a context waits for."""
        return [stream.last for stream in context.streams.values() if stream.blocking]

    # ---- observing ----

    @property
    def pending(self) -> tuple[Operation, ...]:
        """What is enqueued and has not completed."""
        return tuple(self._pending.values())

    @property
    def is_busy(self) -> bool:
        """Whether anything is pending or runs."""
        return bool(self._pending)

    def wait(self, operation: Operation | None, *, promised: bool = True) -> None:
        """Execute until `operation` is done, and let the host's clock wait for it.

        Not `promised` is a wait that the driver's reference allows and does not require.
        """
        self.wait_all([operation], promised=promised)

    def wait_all(self, operations: Iterable[Operation | None], *, promised: bool = True) -> None:
        """Execute until all of `operations` are done, and let the host's clock wait for them."""
        targets = [o for o in operations if o is not None]
        if self.watch is not None:
            self.watch.look()
        self._finish(targets)
        if self.watch is not None:
            self.watch.blur()
            if promised:
                self.watch.waited(targets)
        for target in targets:
            self.host_time = max(self.host_time, target.end)
        self.synchronized()

    def _finish(self, operations: Iterable[Operation], *, stay: bool = True) -> bool:
        """Execute until all of `operations` are done; without `stay`, stop where a wait for a value in memory blocks.

        Return whether they are done.
        """
        unfinished = [o for o in operations if not o.done]
        needed = self._ancestors(unfinished) if self.schedule is Schedule.LATE else None
        if len(unfinished) > 1:
            unfinished.sort(key=lambda o: o.sequence)
        for target in unfinished:
            stalled, limit_s = 0.0, 0.0  # since when, and for how long it may be
            while not self._run_in_order(target):
                signals.check()
                chosen = self._choose(target, needed) or self._late_dependency(target)
                if chosen is not None:
                    self._run(chosen)
                elif not self._until:
                    lock.wait(timeout=_PATIENCE_S)  # another host thread runs what we need; it notifies when done
                elif self._running or stay:
                    lock.wait(timeout=0.001)  # another host thread, or what it runs, may write the value
                else:
                    return False
                if chosen is None and self._until and not self._running:
                    before, limit_s = limit_s, self._longest_stall_s()
                    if not stalled or limit_s != before:  # a thread that has ended may have enqueued the write
                        stalled = time.monotonic()
                    if time.monotonic() - stalled > limit_s:
                        self._give_up(limit_s)
                else:
                    stalled = 0.0
        return True

    def drop(self, operations: Iterable[Operation]) -> None:
        """Let `operations` that are not done never be, and touch no memory from now on.

        For those on memory of the caller, who may free it once the driver's call has returned, as it does when
        Ctrl-C ends the wait for them.
        """
        for operation in operations:
            while not operation.done and not operation.missing and operation.sequence not in self._ready:
                lock.wait(timeout=_PATIENCE_S)  # another host thread runs it; it notifies when done
            operation.run, operation.host_memory = None, ()

    def run_soon(self, operation: Operation) -> None:
        """Let a thread execute `operation` before long, though no call of this process may ever wait for it.

        What other processes wait for, and host functions, which the host can wait for without the driver.
        """
        self._soon.append(operation)
        if not self._has_runner:
            # Not by threading.Thread: its start waits, with the driver's lock held, until the new thread has begun.
            _thread.start_new_thread(_calls.begin_thread, (threading.get_ident(), self._run_what_is_due))
            self._has_runner = True

    def share(self) -> None:
        """From now on other processes see memory of this one: let everything run before long, what is pending too."""
        if not self._is_shared:
            self._is_shared = True
            for operation in list(self._pending.values()):
                self.run_soon(operation)

    def _run_what_is_due(self) -> None:
        while True:
            time.sleep(_SOON_S)
            with lock:
                due, self._soon = [o for o in self._soon if not o.done], []
                if not due:
                    self._has_runner = False
                    return
                if self.watch is not None:
                    self.watch.look(later=True)
                if not self._finish(due, stay=False):
                    self._soon += [o for o in due if not o.done]
                if self.watch is not None:
                    self.watch.blur()
            abi.unlocked()

    def query(self, operations: Iterable[Operation | None]) -> bool:
        """Return whether all of `operations` have completed by the host's clock, and let that clock move on.

        Asking again and again ends: each time, the clock goes half the way to the last one's end, at least 1 us.
        """
        self.host_time += 200
        targets = [o for o in operations if o is not None]
        unfinished = [o for o in targets if not o.done]
        if not unfinished:
            if self.watch is not None:
                self.watch.look()
                self.watch.waited(targets)
            return True
        end = max(o.end for o in unfinished)
        if end > self.host_time:
            self.host_time += max(1000, (end - self.host_time) // 2)
            return False
        if self.watch is not None:
            self.watch.look()
        if not self._finish(unfinished, stay=False):
            return False  # one waits for a value that is not written yet
        self.wait_all(targets)
        return True

    def begin_watch(self, watch: HostWatch) -> None:
        """Let `watch` notice what the host writes to memory that operations use, also those that are pending."""
        self.watch = watch
        for operation in self._pending.values():
            operation.host_memory = _memory_of(operation)

    def may_read_host(self, address: int, size: int) -> bool:
        """Return whether something may still read what this range of pinned memory holds now.

        A pending copy from there, a pending kernel with a pointer to it, a host function; and the host itself, where
        something waits for a value that the host may write later.
        """
        if self._until:
            return True
        pending, reads = self._pending, self._host_reads
        for sequence in reversed(pending):
            if sequence <= self._looked_at:
                break
            operation = pending[sequence]
            if operation.kind == "host":
                reads[sequence] = None
            elif operation.kind == "kernel":
                if ranges := _memory_of(operation):
                    reads[sequence] = list(ranges)
            elif operation.kind != "kernel" and operation.host_source[1]:
                reads[sequence] = [operation.host_source]
        self._looked_at = next(reversed(pending), self._looked_at)
        for sequence in [sequence for sequence in reads if sequence not in pending]:
            del reads[sequence]
        return any(
            ranges is None or any(start < address + size and address < start + length for start, length in ranges)
            for ranges in reads.values()
        )

    def wait_context(self, context: Any) -> None:
        """Execute everything that is pending in `context`."""
        self.wait_all([o for o in list(self._pending.values()) if o.stream.context is context])

    def wait_device(self, device: Any) -> None:
        """Execute everything that is pending on `device`."""
        self.wait_all([o for o in list(self._pending.values()) if o.stream.context.device is device])

    def drain(self) -> None:
        """Execute everything."""
        self.wait_all(list(self._pending.values()))

    # ---- choosing and running ----

    def _choose(self, target: Operation, needed: set[int] | None) -> Operation | None:
        """Return the operation to run next on the way to `target`, None if all that help are running already."""
        ready = self._runnable()
        if self.schedule is Schedule.FIFO:
            first = min(ready, default=None)
            return ready[first] if first is not None and first <= target.sequence else None
        if needed is not None:
            # Latest first among what is needed: work that others would overtake runs last.
            return ready.get(max((s for s in ready if s in needed), default=0))
        if not ready:
            return None
        return ready[self._random.choice(sorted(ready)) if self.schedule is Schedule.RANDOM else max(ready)]

    def _late_dependency(self, target: Operation) -> Operation | None:
        """Return an operation that `target` came to wait for only while others ran: the body of a conditional node.

        Where something waits for a value in memory, it is any: it may be what writes the value.
        """
        ready = self._runnable()
        needed = self._ancestors([target]) & ready.keys()
        if not needed and self._until:
            needed = set(ready)
        if not needed:
            return None
        return ready[max(needed) if self.schedule is Schedule.LATE else min(needed)]

    def _runnable(self) -> dict[int, Operation]:
        """Return what is ready, but for what waits for a value that is not there."""
        if not self._until:
            return self._ready
        return {number: o for number, o in self._ready.items() if o.until is None or o.until()}

    def _longest_stall_s(self) -> float:
        if self.timeout_s:
            return self.timeout_s
        threads = len(sys._current_frames()) - self._has_runner
        return _STALLED_BESIDE_OTHERS_S if threads > 1 or self._is_shared else _STALLED_S

    def _give_up(self, limit_s: float) -> None:
        """Fail what waits for a value that nothing writes, as a kernel fails in which no thread can go on."""
        for operation in [o for number, o in self._until.items() if number in self._ready]:
            operation.until = None
            del self._until[operation.sequence]
            error = DriverError(
                Result.LAUNCH_TIMEOUT,
                f"{operation.name}: nothing has written the value that it waits for in {limit_s:g} s, and no pending "
                "operation writes it; sim:timeout sets another limit",
            )
            if operation.stream.context.error is None:
                operation.stream.context.error = error

    @staticmethod
    def _ancestors(operations: list[Operation]) -> set[int]:
        """Return the sequence numbers of `operations` and of everything that they wait for."""
        found: set[int] = set()
        stack = list(operations)
        while stack:
            operation = stack.pop()
            if not operation.done and operation.sequence not in found:
                found.add(operation.sequence)
                stack.extend(operation.predecessors)
        return found

    def _run_in_turn(self, run: Callable[[Operation], None], operation: Operation) -> None:
        assert self.turn is not None
        with self.turn(operation):
            run(operation)

    def _note_failure(self, operation: Operation, error: BaseException) -> bool:
        """Let what the work of an operation raised end its context; return whether there is no more to it."""
        context, name = operation.stream.context, kernel_name(operation.name)
        if isinstance(error, DriverError):
            text = str(error).removeprefix(f"{name}: ")
            log_message(f"{name}: {error.result.c_name}: {text}")
            if context.error is None:
                context.error = DriverError(error.result, f"{name}: {text}")
                context.error.logged = True
            return True
        if isinstance(error, signals.Interrupted) and context.error is None:
            # What it has done so far must not be taken for its result.
            context.error = DriverError(Result.LAUNCH_FAILED, f"{name}: ended by Ctrl-C")
            context.error.logged = True
        return False

    def check(self, context: Any) -> None:
        """Raise the error that a kernel left in `context`. It stays there: such a context cannot be used again."""
        if context.error is not None:
            raise context.error


_queue.install(vars(abi), lock, lock.acquire, lock.release, signals.interruption)
