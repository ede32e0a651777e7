"""What a thread's wait covers while others go on: what there is when it begins, and nothing that is enqueued meanwhile."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from generated import some_of
from sanitize_program import BUFFER, SIZE, Program, R, W, kinds, read, write
from test_sanitize_oracle import FLAGS, Oracle, byte_set

from cudatool.sanitize import check
from cudatool.sanitize.engine import Engine
from cudatool.sanitize.findings import GapKind
from cudatool.trace.events import Kind, StreamFlag

NOW = -1


class Waiting(Program):
    """A program of two threads, of which the second goes on while the first waits."""

    def begin(self) -> int:
        """Return the time at which a wait begins now."""
        return len(self) - 1

    def end(self, kind: Kind, began: int, **what: int) -> None:
        self.on_thread(0).emit(kind, aux1=began, **what)


WAITS: dict[str, tuple[Kind, dict[str, int]]] = {
    "stream": (Kind.STREAM_SYNCHRONIZE, {"stream": 1}),
    "event": (Kind.EVENT_SYNCHRONIZE, {"aux0": 1}),
    "device": (Kind.DEVICE_SYNCHRONIZE, {}),
}


def waiting_for(what: str) -> tuple[Waiting, Kind, dict[str, int]]:
    """Return a program with two streams, and an event that is recorded in the first, and what waits for that."""
    program = Waiting()
    for _ in range(2):
        program.stream()
    program.event()
    return program, *WAITS[what]


@pytest.mark.parametrize("what", WAITS)
def test_a_wait_does_not_cover_what_another_thread_enqueues_meanwhile(what: str) -> None:
    program, kind, fields = waiting_for(what)
    program.record(1, 1)
    began = program.begin()
    write(program.on_thread(1), 1)  # type: ignore[arg-type]
    program.record(1, 1)
    program.end(kind, began, **fields)
    read(program, 2)
    assert ["race-raw"] == kinds(program)


@pytest.mark.parametrize("what", WAITS)
def test_a_wait_covers_what_another_thread_has_enqueued_before(what: str) -> None:
    program, kind, fields = waiting_for(what)
    write(program.on_thread(1), 1)
    program.record(1, 1)
    began = program.begin()
    program.kernel(1, (R, BUFFER + SIZE, SIZE))
    program.end(kind, began, **fields)
    read(program, 2)
    assert [] == kinds(program)


def test_a_wait_of_which_the_beginning_is_not_known_covers_all_before_its_record() -> None:
    program, kind, fields = waiting_for("stream")
    write(program.on_thread(1), 1)
    program.end(kind, 0, **fields)
    read(program, 2)
    assert [] == kinds(program)


def test_the_host_is_after_the_work_only_when_the_wait_ends() -> None:
    program, kind, fields = waiting_for("stream")
    write(program, 1)
    began = program.begin()
    program.on_thread(1).host(W, BUFFER, SIZE)
    program.end(kind, began, **fields)
    assert ["race-host"] == kinds(program)


def test_a_wait_for_the_default_stream_does_not_cover_what_a_blocking_stream_gets_meanwhile() -> None:
    program = Waiting()
    legacy, blocking, other = (
        program.stream(flags) for flags in (StreamFlag.LEGACY_DEFAULT, StreamFlag(0), StreamFlag.NON_BLOCKING)
    )
    began = program.begin()
    write(program.on_thread(1), blocking)  # type: ignore[arg-type]
    program.end(Kind.STREAM_SYNCHRONIZE, began, stream=legacy)
    read(program, other)
    assert ["race-raw"] == kinds(program)


def test_a_thread_that_only_waits_orders_no_work_of_another_one() -> None:
    """Nothing tells the other thread that the wait is over: it may be so in order, which no trace shows."""
    program = Program()
    first, second = program.stream(), program.stream()
    write(program, first)
    program.on_thread(1).synchronize(stream=first)
    read(program.on_thread(0), second)
    report = check(program.trace())
    assert not report.findings
    assert [GapKind.THREADS] == [gap.kind for gap in report.gaps if gap.kind is GapKind.THREADS]


# ---- against brute force ----


def random_step(chance: Random) -> Any:
    """Return something that a thread does."""
    stream, event, mode = chance.randint(1, 5), chance.randint(1, 2), chance.choice([R, W])
    waits = ("stream", stream), ("event", event), ("device", 0)
    steps = {
        ("kernel", stream, (mode, chance.randint(0, 12), chance.randint(1, 6))): 8,
        ("record", event, stream): 2,
        ("wait", stream, event): 2,
        ("host", mode, chance.randint(0, 12)): 1,
        ("begin", chance.choice(waits)): 3,
        ("end",): 4,
    }
    return chance.choices(list(steps), list(steps.values()))[0]


class Threads:
    """Plays the steps of several threads, each of which does nothing else from the beginning of a wait to its end.

    If they are `one_host`, each comes after what the others have done.
    """

    def __init__(self, *, one_host: bool) -> None:
        self._one_host = one_host
        self.program, self.oracle = Waiting(), Oracle()
        self._hosts: dict[int, int] = {}
        self._waits: dict[int, tuple[tuple[str, int], int, list[int]]] = {}
        for flags in FLAGS:
            self.program.stream(flags)

    def play(self, thread: int, step: Any) -> None:
        self.program.on_thread(thread)
        host = 0 if self._one_host else thread
        self.oracle.host = self._hosts.get(host, NOW)
        if thread not in self._waits:
            self._act(thread, step)
        elif step == ("end",):
            self._end(*self._waits.pop(thread))
        self._hosts[host] = self.oracle.host

    def _act(self, thread: int, step: Any) -> None:
        program, oracle, record = self.program, self.oracle, len(self.program)
        match step:
            case "kernel", stream, (mode, *where):
                oracle.call()
                program.kernel(stream, (mode, *where))
                oracle.touch(oracle.enqueue(stream), mode, byte_set(*where), record)
            case "record", event, stream:
                oracle.call()
                program.record(event, stream)
                oracle.recorded[event] = oracle.enqueue(stream)
            case "wait", stream, event:
                oracle.call()
                program.wait(stream, event)
                oracle.enqueue(stream, oracle.recorded.get(event, NOW))
            case "host", mode, address:
                program.host(mode, address, 4)
                oracle.call()
                oracle.touch(oracle.host, mode, byte_set(address, 4), record)
            case "begin", wait:
                self._waits[thread] = wait, program.begin(), self._covered(wait)

    def _covered(self, wait: tuple[str, int]) -> list[int]:
        kind, which = wait
        if kind == "event":
            return [self.oracle.recorded[which]] if which in self.oracle.recorded else []
        return self.oracle.tails(which) if kind == "stream" else list(self.oracle.tail.values())

    def _end(self, wait: tuple[str, int], began: int, covered: list[int]) -> None:
        kind, which = wait
        fields = {"stream": {"stream": which}, "event": {"aux0": which}, "device": {"device": 0}}[kind]
        self.program.emit(WAITS[kind][0], aux1=began, **fields)
        if kind == "event" and not covered:  # it was not recorded then: nothing tells what the call has found
            covered = [self.oracle.recorded.get(which, NOW)]
        self.oracle.call(*covered)


@pytest.mark.parametrize("one_host", [False, True], ids=["threads apart", "threads in order"])
def test_waits_cover_what_reachability_says(one_host: bool) -> None:
    for number in some_of(range(400), 150, "waits of threads"):
        chance, threads = Random(number), Threads(one_host=one_host)
        for _ in range(chance.choice([10, 20, 40])):
            threads.play(chance.randrange(3), random_step(chance))
        expected = threads.oracle.races()
        engine = Engine(threads.program.trace(), one_host=one_host)
        engine.run()
        found = {(d.first.operation.record, d.second.operation.record) for d in engine.defects.values() if d.size}
        found.update(engine.by_flags.values())  # what small accesses of the host may have ordered
        # Of several partners the engine may name fewer: never a wrong one, and each access that has one.
        assert found <= expected, number
        assert {later for _, later in found} == {later for _, later in expected}, number
