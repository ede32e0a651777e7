"""Host memory that operations use is compared: what is reported as the host's, and at what cost."""

from __future__ import annotations

import ctypes
import mmap

import pytest

from cudatool.sim.allocations import Allocation, Allocations
from cudatool.sim.observe import host_pages, host_watch
from cudatool.sim.observe.host_watch import LIMIT, HostWatch
from cudatool.sim.queue import Operation


class _Host:
    """A pinned allocation, and what a watch reports of it."""

    def __init__(self, size: int, *, in_file: bool = False) -> None:
        self.data = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.data))
        allocations = Allocations()
        allocations.add(Allocation(self.address, size, "host", -1, 0, 1, in_file=in_file))
        self.reported: list[tuple[int, int]] = []
        self.read: list[tuple[int, int]] = []
        self.watch = HostWatch(allocations, self._report)
        self.sequence = 0

    def _report(self, written: list[tuple[int, int]], read: list[tuple[int, int]]) -> None:
        self.reported += [(address - self.address, size) for address, size in written]
        self.read += [(address - self.address, size) for address, size in read]

    def enqueue(
        self,
        *ranges: tuple[int, int],
        kind: str = "memcpy",
        stream: object = "stream",
        target: tuple[int, int] | None = None,
    ) -> Operation:
        operation = Operation(stream, kind, kind, 0)  # type: ignore[arg-type]  # any object stands for a stream
        self.sequence += 1
        operation.sequence = self.sequence
        operation.host_memory = [(self.address + start, size) for start, size in ranges]
        if target is not None:
            operation.host_target = [(self.address + target[0], target[1])]
        self.watch.enqueued(operation)
        return operation

    def write(self, start: int, data: bytes) -> None:
        ctypes.memmove(self.address + start, data, len(data))

    def run(self, operation: Operation, start: int = 0, data: bytes = b"") -> None:
        self.watch.before(operation)
        self.write(start, data)
        self.watch.after(operation)


def test_bytes_that_the_host_changed_are_reported_once() -> None:
    host = _Host(64)
    host.enqueue((0, 64))
    host.write(8, b"abc")
    host.watch.look()
    host.watch.look()
    assert host.reported == [(8, 3)]


def test_write_between_two_operations_is_reported_before_the_second() -> None:
    host = _Host(64)
    host.enqueue((0, 64))
    host.write(0, b"a")
    host.enqueue((0, 64))
    assert host.reported == [(0, 1)]


@pytest.mark.parametrize("kind", ["memcpy", "kernel", "host"])
def test_what_an_operation_writes_is_not_the_hosts(kind: str) -> None:
    host = _Host(64)
    operation = host.enqueue((0, 32), kind=kind)
    host.enqueue((0, 64))
    host.run(operation, 4, b"device")
    host.watch.blur()
    host.watch.look()
    assert host.reported == []


def test_nothing_is_concluded_while_a_kernel_runs() -> None:
    host = _Host(64)
    operation = host.enqueue((0, 64), kind="kernel")
    host.watch.before(operation)
    host.write(0, b"either")
    host.watch.look()
    host.watch.after(operation)
    host.watch.look()
    assert host.reported == []


@pytest.mark.parametrize("kind", ["kernel", "host"])
def test_nothing_is_concluded_while_what_began_before_all_that_is_kept_runs(kind: str) -> None:
    host = _Host(64)
    operation = host.enqueue((0, 64), kind=kind)
    host.watch.waited([operation])  # nothing is kept
    host.watch.before(operation)
    host.enqueue((0, 64))
    host.write(0, b"device")
    host.watch.look()
    host.watch.after(operation)
    host.watch.look()
    assert host.reported == []


def test_value_that_is_being_written_is_not_the_hosts() -> None:
    host = _Host(64)
    host.enqueue((0, 64))
    operation = Operation("stream", "write_value", "cuStreamWriteValue32", 0)  # type: ignore[arg-type]  # as above
    operation.value = host.address + 8, 4, 7, 0
    host.watch.before(operation)
    host.write(8, b"four")
    host.watch.look()
    host.watch.after(operation)
    host.watch.look()
    assert host.reported == []


def test_driver_that_fills_a_part_of_a_pending_target_is_no_reader_of_the_rest() -> None:
    page = mmap.PAGESIZE
    host = _Host(2 * page)
    host.enqueue((0, 2 * page), target=(0, 2 * page))
    host.write(0, bytes(page))  # the driver does
    host.watch.wrote([(host.address, page)])
    host.watch.look()
    assert host.reported == host.read == []
    ctypes.string_at(host.address + page, 1)
    host.watch.look()
    assert host.read == ([(page, page)] if host.watch.sees_reads else [])


def test_value_that_a_stream_waits_for_is_read_by_the_driver() -> None:
    page = mmap.PAGESIZE
    host = _Host(page)
    host.enqueue((0, page), target=(0, page))
    wait = Operation("stream", "wait_value", "cuStreamWaitValue32", 0)  # type: ignore[arg-type]  # as above
    wait.value = host.address, 4, 1, 0
    host.watch.enqueued(wait)
    ctypes.string_at(host.address, 4)
    host.watch.look()
    assert host.read == []


def test_pages_of_a_file_are_not_watched() -> None:
    page = mmap.PAGESIZE
    host = _Host(2 * page, in_file=True)
    host.enqueue((0, page), target=(0, page))
    ctypes.string_at(host.address, page)
    host.watch.look()
    assert host.reported == host.read == []


def test_write_that_the_program_declares_is_left_out() -> None:
    host = _Host(64)
    host.enqueue((0, 64))
    host.watch.note(host.address, 8, writes=True)
    host.write(0, b"declared+")
    host.watch.look()
    assert host.reported == [(8, 1)]


def test_memory_is_not_compared_once_the_host_has_waited_for_its_stream() -> None:
    host = _Host(64)
    first, second = host.enqueue((0, 32), stream="a"), host.enqueue((32, 32), stream="b")
    host.watch.waited([first])
    host.write(0, b"x")
    host.write(32, b"y")
    host.watch.look()
    assert host.reported == [(32, 1)]
    host.watch.waited([second])
    assert not host.watch._kept and not host.watch._bytes


def test_what_another_thread_notices_is_reported_at_the_programs_next_call() -> None:
    host = _Host(64)
    host.enqueue((0, 64))
    host.write(1, b"x")
    host.watch.look(later=True)
    assert host.reported == []
    host.watch.look()
    assert host.reported == [(1, 1)]


def test_freed_memory_is_not_read() -> None:
    host = _Host(64)
    host.enqueue((0, 64))
    host.watch.removed(Allocation(host.address, 64, "host", -1, 0, 1))
    host.write(0, b"x")
    host.watch.look()
    assert host.reported == []


def test_bytes_that_are_kept_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_watch, "LIMIT", 1 << 20)
    assert LIMIT > 1 << 20
    size = 16 << 20
    host = _Host(size)
    for start in range(0, size, 1 << 20):
        host.enqueue((start, 1 << 20))
    assert host.watch._bytes <= 2 << 20
    host.write(0, b"x" * size)
    host.watch.look()
    reported = [start for start, _ in host.reported]
    assert {start >> 20 for start in reported} == set(range(16)), "every range is noticed, if not all of its bytes"


def test_reads_are_not_claimed_where_the_system_does_not_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_pages, "_page_table", lambda: None)
    host = _Host(64)
    assert not host.watch.sees_reads
    operation = host.enqueue((0, 64))
    operation.host_target = [(host.address, 64)]
    host.watch.enqueued(operation)
    host.watch.look()
    assert host.reported == host.read == []
