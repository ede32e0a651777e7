"""The event sequences that PyTorch's CUDA sanitizer is tested with (pytorch/pytorch, test/test_cuda_sanitizer.py),
against our engine.

Its tests call a handler with launches, records and waits and expect, or not, an error of the last launch. Here the same
sequences are traces, and every finding is expected by its kind. What PyTorch calls ``read_write`` is a write here, as it
is there. Two things differ, for CUDA's rules or for the reader's sake:

* ``test_multiple_errors`` expects an error for each of ten tensors that the same two launches write. That is one defect
  with one repair, so it is one finding.
* Its other classes are about how operators' arguments are read (which needs torch) and about the words of messages.
"""

from __future__ import annotations

import pytest
from sanitize_program import Program, R, W

from cudatool.sanitize import check
from cudatool.trace.events import Kind

SIZE = 512


def tensor(number: int) -> int:
    return 0x10000 * (number + 1)


class Sequence:
    """A trace in PyTorch's words; streams and events exist from the first use on."""

    def __init__(self) -> None:
        self.program = Program()
        self._streams: dict[int, int] = {}
        self._events: dict[int, int] = {}

    def _stream(self, number: int) -> int:
        if number not in self._streams:
            self._streams[number] = self.program.stream()
        return self._streams[number]

    def launch(self, stream: int, *, reads: tuple[int, ...] = (), writes: tuple[int, ...] = ()) -> None:
        accesses = [(R, tensor(number), SIZE) for number in reads] + [(W, tensor(number), SIZE) for number in writes]
        self.program.kernel(self._stream(stream), *accesses)

    def create(self, event: int) -> None:
        self._events[event] = self.program.event()

    def record(self, event: int, stream: int) -> None:
        if event not in self._events:
            self.create(event)
        self.program.record(self._events[event], self._stream(stream))

    def wait(self, event: int, stream: int) -> None:
        self.program.wait(self._stream(stream), self._events[event])

    def destroy(self, event: int) -> None:
        self.program.emit(Kind.EVENT_DESTROY, aux0=self._events[event])

    def found(self) -> list[str]:
        return [finding.kind.value for finding in check(self.program.trace()).findings]


@pytest.fixture
def sequence() -> Sequence:
    return Sequence()


def test_empty_kernel_launch(sequence: Sequence) -> None:
    sequence.launch(0)
    assert [] == sequence.found()


def test_simple_passing(sequence: Sequence) -> None:
    sequence.launch(1, reads=(1,))
    sequence.launch(2, reads=(1,))
    assert [] == sequence.found()


def test_simple_error(sequence: Sequence) -> None:
    sequence.launch(1, reads=(1,))
    sequence.launch(2, writes=(1,))
    assert ["race-war"] == sequence.found()


def test_simple_sync(sequence: Sequence) -> None:
    sequence.launch(1, reads=(1,))
    sequence.record(0, 1)
    sequence.wait(0, 2)
    sequence.launch(2, writes=(1,))
    assert [] == sequence.found()


def test_reads_check_last_write(sequence: Sequence) -> None:
    sequence.launch(1, writes=(1,))
    sequence.record(0, 1)
    sequence.wait(0, 2)
    sequence.launch(2, reads=(1,))
    assert [] == sequence.found()
    sequence.launch(3, reads=(1,))
    assert ["race-raw"] == sequence.found()


def test_branch_sync(sequence: Sequence) -> None:
    sequence.launch(1, writes=(1,))
    sequence.record(0, 1)
    sequence.wait(0, 2)
    sequence.wait(0, 3)
    sequence.launch(2, reads=(1,))
    sequence.launch(3, reads=(1,))
    assert [] == sequence.found()
    sequence.launch(2, writes=(1,))
    assert ["race-war"] == sequence.found()


def test_chain_sync(sequence: Sequence) -> None:
    sequence.launch(0, reads=(1,))
    for number in range(10):
        sequence.record(number, number)
        sequence.wait(number, number + 1)
    sequence.launch(10, writes=(1,))
    assert [] == sequence.found()


def test_expired_record(sequence: Sequence) -> None:
    sequence.launch(1, reads=(1,))
    sequence.record(0, 1)
    sequence.launch(1, reads=(1,))
    sequence.wait(0, 2)
    sequence.launch(2, writes=(1,))
    assert ["race-war"] == sequence.found()


@pytest.mark.parametrize(("destroyed", "created"), [(True, True), (True, False), (False, True)])
def test_deleted_record(sequence: Sequence, destroyed: bool, created: bool) -> None:
    sequence.launch(1, reads=(1,))
    sequence.record(0, 1)
    if destroyed:
        sequence.destroy(0)
    if created:
        sequence.create(0)  # the driver gave the handle to a new event, which was never recorded
    sequence.wait(0, 2)
    sequence.launch(2, writes=(1,))
    assert "race-war" in sequence.found()


@pytest.mark.parametrize(("readers", "expected"), [(10, ["race-war"]), (9, [])])
def test_all_reads_checked(sequence: Sequence, readers: int, expected: list[str]) -> None:
    for number in range(1, readers + 1):
        sequence.launch(number, reads=(1,))
        sequence.record(number, number)
    for number in range(1, 10):
        sequence.wait(number, 0)
    sequence.launch(0, writes=(1,))
    assert expected == sequence.found()


def test_multiple_errors(sequence: Sequence) -> None:
    sequence.launch(0, writes=tuple(range(10)))
    sequence.launch(1, writes=tuple(range(10)))
    assert ["race-waw"] == sequence.found()


def test_correct_state_merging(sequence: Sequence) -> None:
    sequence.launch(1, writes=(1,))
    sequence.launch(2, writes=(2,))
    sequence.record(1, 1)
    sequence.record(2, 2)
    sequence.launch(1, writes=(1,))
    sequence.launch(2, writes=(2,))
    sequence.wait(1, 2)
    sequence.wait(2, 1)
    sequence.record(3, 2)
    sequence.wait(3, 1)
    sequence.launch(1, writes=(1, 2))
    assert [] == sequence.found()


def test_record_override(sequence: Sequence) -> None:
    sequence.launch(1, reads=(1,))
    sequence.launch(2, reads=(2,))
    sequence.record(1, 1)
    sequence.record(1, 2)
    sequence.wait(1, 3)
    sequence.launch(3, writes=(1,))
    assert ["race-war"] == sequence.found()


def test_multiple_wait(sequence: Sequence) -> None:
    sequence.launch(1, writes=(1,))
    sequence.record(1, 1)
    sequence.wait(1, 2)
    sequence.wait(1, 3)
    sequence.launch(2, reads=(1,))
    sequence.launch(3, reads=(1,))
    assert [] == sequence.found()


def test_what_was_made_before_the_trace_began_is_no_error(sequence: Sequence) -> None:
    program = sequence.program
    stream = program.stream()
    program.emit(Kind.EVENT_DESTROY, aux0=77)
    program.emit(Kind.BLOCK_FREE_REQUESTED, address=tensor(1), size=SIZE, aux0=SIZE, stream=stream)
    program.emit(Kind.MEM_FREE, address=tensor(2), size=SIZE)
    assert [] == sequence.found()


def test_being_told_of_an_event_or_stream_twice_is_no_error(sequence: Sequence) -> None:
    program = sequence.program
    stream, event = program.stream(), program.event()
    program.emit(Kind.STREAM_CREATE, stream=stream, flags=1)
    program.emit(Kind.EVENT_CREATE, aux0=event)
    program.kernel(stream, (W, tensor(1), SIZE))
    program.emit(Kind.STREAM_CREATE, stream=stream, flags=1)
    program.kernel(stream, (R, tensor(1), SIZE))
    assert [] == sequence.found()
