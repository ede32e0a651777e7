"""Calls of several threads on the software device are recorded in an order in which they took effect.

Each test keeps one thread between the effect of its call and the call's end, where it no longer holds the driver's lock.
"""

from __future__ import annotations

import ctypes
import gc
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from warm_process import run_python

import cudatool
from cudatool import _driver, recording, sanitize
from cudatool.sim import abi
from cudatool.sim.signals import Interrupted
from cudatool.trace import hooks
from cudatool.trace.events import Event, Kind
from cudatool.trace.reader import Trace, read

_SIZE = 2 << 20
_PATIENCE_S = 30
_GIVEN = (Kind.MEM_ALLOC, Kind.HOST_ALLOC, Kind.PHYSICAL_ALLOC, Kind.MEM_MAP)
_TAKEN = (Kind.MEM_FREE, Kind.HOST_FREE, Kind.PHYSICAL_FREE, Kind.MEM_UNMAP)


def ok(result: tuple[Any, ...]) -> Any:
    assert 0 == result[0], result
    return result[1] if len(result) == 2 else None


class Watcher:
    """Sees each call's end before the collector does, as the one that subscribed last."""

    def __init__(self, name: str, act: Callable[[], None], *, at_enter: bool = False) -> None:
        self._name, self._act, self._at_enter = name, act, at_enter

    def enter(self, entry: abi.EntryPoint, *rest: Any) -> None:
        self._see(entry, self._at_enter)

    def leave(self, entry: abi.EntryPoint, *rest: Any) -> None:
        self._see(entry, not self._at_enter)

    def gives_back(self, *call: Any) -> None: ...

    def enqueued(self, operation: Any) -> None: ...

    def executed(self, operation: Any) -> None: ...

    def unlocked(self) -> None: ...

    def _see(self, entry: abi.EntryPoint, is_time: bool) -> None:
        if entry.name == self._name and is_time:
            self._name = ""  # once
            self._act()


@contextmanager
def watching(watcher: Watcher) -> Iterator[None]:
    abi.subscribe(watcher)
    try:
        yield
    finally:
        abi.unsubscribe(watcher)


@pytest.fixture
def recorded(tmp_path: Path) -> Any:
    """Return a function that records what a program does with the driver and a context."""

    def record(program: Callable[[Any, Any], None], **options: Any) -> Trace:
        path = tmp_path / "t.ctrace"
        gc.collect()  # what earlier tests dropped is not ours
        gc.freeze()
        with recording.record(path, device="sim", **options):
            from cuda.bindings import driver

            ok(driver.cuInit(0))
            context = ok(driver.cuCtxCreate(None, 0, 0))
            program(driver, context)
            ok(driver.cuCtxDestroy(context))
        return read(path)

    return record


def meanwhile(name: str, context: Any, first: Callable[[], object], then: Callable[[], object]) -> None:
    """Let another thread do `then` when the call `name` in `first` has taken effect, and has yet to return."""
    from cuda.bindings import driver

    ready, failed = threading.Event(), []

    def other() -> None:
        assert ready.wait(_PATIENCE_S)
        try:
            ok(driver.cuCtxSetCurrent(context))
            then()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=other, name="other")
    thread.start()

    def pause() -> None:
        ready.set()
        thread.join(_PATIENCE_S)

    with watching(Watcher(name, pause)):
        first()
    ready.set()
    thread.join()
    assert not failed


# ---- memory: what makes it, what ends it ----


def _properties(driver: Any) -> Any:
    wanted = driver.CUmemAllocationProp()
    wanted.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    wanted.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    return wanted


def _array(driver: Any) -> Any:
    wanted = driver.CUDA_ARRAY3D_DESCRIPTOR()
    wanted.Width, wanted.NumChannels, wanted.Format = 64, 1, driver.CUarray_format.CU_AD_FORMAT_FLOAT
    return wanted


_PAGES = ctypes.create_string_buffer(8192)

MEMORY: dict[str, tuple[Callable[[Any], Any], str]] = {
    "device": (lambda driver: driver.cuMemAlloc(64), "cuMemFree"),
    "managed": (lambda driver: driver.cuMemAllocManaged(64, 1), "cuMemFree"),
    "host": (lambda driver: driver.cuMemHostAlloc(4096, 0), "cuMemFreeHost"),
    "array": (lambda driver: driver.cuArray3DCreate(_array(driver)), "cuArrayDestroy"),
    "mipmapped array": (lambda driver: driver.cuMipmappedArrayCreate(_array(driver), 2), "cuMipmappedArrayDestroy"),
    "physical": (lambda driver: driver.cuMemCreate(_SIZE, _properties(driver), 0), "cuMemRelease"),
}


def of_kinds(trace: Trace, *kinds: Kind) -> list[Any]:
    """Return the events of these kinds, without those that say what there was before, which have no stack."""
    return [row for row in trace.records if row["kind"] in kinds and (row["stack"] or row["kind"] == Kind.EXECUTION)]


def order_of(trace: Trace) -> list[tuple[bool, int]]:
    """Return, of each event that gives or takes memory, which of the two, and the thread."""
    rows = of_kinds(trace, *_GIVEN, *_TAKEN)
    threads = list(dict.fromkeys(int(row["thread"]) for row in rows))
    return [(bool(row["kind"] in _GIVEN), threads.index(int(row["thread"]))) for row in rows]


IN_TURN = [(True, 0), (False, 0), (True, 1), (False, 1)]


@pytest.mark.parametrize("what", MEMORY)
def test_memory_is_recorded_as_freed_before_another_thread_gets_it(recorded: Any, what: str) -> None:
    make, end = MEMORY[what]

    def program(driver: Any, context: Any) -> None:
        one = ok(make(driver))
        free = getattr(driver, end)
        meanwhile(end, context, lambda: ok(free(one)), lambda: ok(free(ok(make(driver)))))

    assert IN_TURN == order_of(recorded(program))


def test_registered_memory_is_recorded_as_unregistered_before_another_thread_registers_it(recorded: Any) -> None:
    def program(driver: Any, context: Any) -> None:
        def register() -> None:
            ok(driver.cuMemHostRegister(_PAGES, 4096, 0))

        def unregister() -> None:
            ok(driver.cuMemHostUnregister(_PAGES))

        register()
        meanwhile("cuMemHostUnregister", context, unregister, lambda: (register(), unregister()))

    assert IN_TURN == order_of(recorded(program))


def test_stream_ordered_memory_is_recorded_as_freed_before_another_thread_gets_it(recorded: Any) -> None:
    """It is free once the stream has come there, which any thread can wait for."""
    addresses = []

    def program(driver: Any, context: Any) -> None:
        stream = ok(driver.cuStreamCreate(1))
        one = ok(driver.cuMemAllocAsync(64, stream))

        def other() -> None:
            ok(driver.cuStreamSynchronize(stream))
            again = ok(driver.cuMemAllocAsync(64, stream))
            addresses.extend([int(one), int(again)])
            ok(driver.cuMemFreeAsync(again, stream))

        meanwhile("cuMemFreeAsync", context, lambda: ok(driver.cuMemFreeAsync(one, stream)), other)
        ok(driver.cuStreamSynchronize(stream))
        ok(driver.cuStreamDestroy(stream))

    trace = recorded(program)
    assert addresses[0] == addresses[1]
    assert IN_TURN == order_of(trace)
    assert [True] * 4 == [bool(row["stream"]) for row in of_kinds(trace, *_GIVEN, *_TAKEN)]


def test_addresses_are_recorded_as_unmapped_before_another_thread_maps_there(recorded: Any) -> None:
    def program(driver: Any, context: Any) -> None:
        one, two = (ok(driver.cuMemCreate(_SIZE, _properties(driver), 0)) for _ in range(2))
        address = ok(driver.cuMemAddressReserve(_SIZE, 0, 0, 0))
        ok(driver.cuMemMap(address, _SIZE, 0, one, 0))
        unmap = driver.cuMemUnmap

        def other() -> None:
            ok(driver.cuMemMap(address, _SIZE, 0, two, 0))
            ok(unmap(address, _SIZE))

        meanwhile("cuMemUnmap", context, lambda: ok(unmap(address, _SIZE)), other)
        ok(driver.cuMemAddressFree(address, _SIZE))
        for physical in (one, two):
            ok(driver.cuMemRelease(physical))

    trace = recorded(program)
    assert [Kind.MEM_MAP, Kind.MEM_UNMAP] * 2 == [row["kind"] for row in of_kinds(trace, Kind.MEM_MAP, Kind.MEM_UNMAP)]


def test_each_thread_records_the_physical_memory_that_it_frees(recorded: Any) -> None:
    def program(driver: Any, context: Any) -> None:
        one, two = (ok(driver.cuMemCreate(size, _properties(driver), 0)) for size in (_SIZE, 2 * _SIZE))
        release = driver.cuMemRelease
        meanwhile("cuMemRelease", context, lambda: ok(release(one)), lambda: ok(release(two)))

    freed = of_kinds(recorded(program), Kind.PHYSICAL_FREE)
    assert [_SIZE, 2 * _SIZE] == [row["size"] for row in freed]


_RESET = """
import sys
sys.path.insert(0, sys.argv[1])
from test_calls_of_threads import meanwhile, ok
import cudatool
with cudatool.record("t.ctrace", device="sim"):
    from cuda.bindings import driver
    def allocate():
        ok(driver.cuCtxSetCurrent(ok(driver.cuDevicePrimaryCtxRetain(0))))
        ok(driver.cuMemAlloc(64))
    ok(driver.cuInit(0))
    allocate()
    meanwhile("cuDevicePrimaryCtxReset", 0, lambda: ok(driver.cuDevicePrimaryCtxReset(0)), allocate)
"""


def test_a_reset_is_recorded_before_another_thread_uses_the_device_again(tmp_path: Path) -> None:
    """In a process of its own: the reset takes the context away that other tests use."""
    done = run_python(_RESET, str(Path(__file__).parent), folder=tmp_path)
    assert 0 == done.returncode, done.stderr
    kinds = [Kind(kind) for kind in read(tmp_path / "t.ctrace").records["kind"].tolist()]
    assert [Kind.MEM_ALLOC, Kind.WARNING, Kind.MEM_ALLOC] == kinds[:3]


def test_memory_that_two_threads_free_at_once_is_recorded_as_freed_once(recorded: Any) -> None:
    """The second call comes while the first one is between its event and its effect."""

    def program(driver: Any, context: Any) -> None:
        one = ok(driver.cuMemAlloc(64))
        results: list[str] = []
        thread = threading.Thread(
            target=lambda: (driver.cuCtxSetCurrent(context), results.append(driver.cuMemFree(one)[0].name))
        )

        class Between(Watcher):
            def gives_back(self, *call: Any) -> None:
                if not results:
                    thread.start()
                    thread.join(_PATIENCE_S)

        with watching(Between("", lambda: None)):
            ok(driver.cuMemFree(one))
        assert ["CUDA_ERROR_INVALID_VALUE"] == results

    assert 1 == len(of_kinds(recorded(program), Kind.MEM_FREE))


def test_a_free_that_fails_is_not_recorded(recorded: Any) -> None:
    def program(driver: Any, context: Any) -> None:
        one = ok(driver.cuMemAlloc(64))
        assert driver.cuMemFree(int(one) + 8)[0] and driver.cuMemFreeHost(int(one))[0] and driver.cuMemUnmap(one, 64)[0]
        ok(driver.cuMemFree(one))
        assert driver.cuMemFree(one)[0] and driver.cuMemFreeAsync(one, 0)[0]

    trace = recorded(program)
    assert [(True, 0), (False, 0)] == order_of(trace)


def test_work_that_a_free_waits_for_is_recorded_before_it(recorded: Any) -> None:
    def program(driver: Any, context: Any) -> None:
        one = ok(driver.cuMemAlloc(64))
        ok(driver.cuMemsetD8Async(one, 1, 64, 0))
        ok(driver.cuMemFree(one))

    rows = of_kinds(recorded(program), Kind.MEMSET, Kind.EXECUTION, Kind.MEM_FREE)
    assert [Kind.MEMSET, Kind.EXECUTION, Kind.MEM_FREE] == [row["kind"] for row in rows]


# ---- work ----


def test_work_that_another_thread_executes_is_recorded_after_its_call(recorded: Any) -> None:
    def program(driver: Any, context: Any) -> None:
        stream, one = ok(driver.cuStreamCreate(1)), ok(driver.cuMemAlloc(64))
        enqueue = driver.cuMemsetD8Async
        meanwhile(
            "cuMemsetD8Async",
            context,
            lambda: ok(enqueue(one, 1, 64, stream)),
            lambda: ok(driver.cuStreamSynchronize(stream)),
        )
        ok(driver.cuMemFree(one))
        ok(driver.cuStreamDestroy(stream))

    kinds = recorded(program).records["kind"].tolist()
    assert kinds.index(Kind.MEMSET) < kinds.index(Kind.EXECUTION)


def test_a_wait_does_not_cover_what_another_thread_enqueues_meanwhile(recorded: Any) -> None:
    """The second thread enqueues a write while the first waits for the stream; then the first reads elsewhere."""

    def program(driver: Any, context: Any) -> None:
        first, second = (ok(driver.cuStreamCreate(1)) for _ in range(2))
        one, two = (ok(driver.cuMemAlloc(64)) for _ in range(2))
        waits, goes_on = threading.Event(), threading.Event()

        @ctypes.CFUNCTYPE(None, ctypes.c_void_p)
        def work(_: object) -> None:
            waits.set()
            goes_on.wait(_PATIENCE_S)

        def enqueue() -> None:
            waits.wait(_PATIENCE_S)
            ok(driver.cuCtxSetCurrent(context))
            ok(driver.cuMemsetD8Async(one, 1, 64, first))
            goes_on.set()

        thread = threading.Thread(target=enqueue)
        thread.start()
        ok(driver.cuLaunchHostFunc(first, driver.CUhostFn(ctypes.cast(work, ctypes.c_void_p).value), 0))
        ok(driver.cuStreamSynchronize(first))
        ok(driver.cuMemcpyDtoDAsync(two, one, 64, second))
        thread.join()
        for stream in (first, second):
            ok(driver.cuStreamSynchronize(stream))
            ok(driver.cuStreamDestroy(stream))
        for memory in (one, two):
            ok(driver.cuMemFree(memory))

    (found,) = sanitize.check(recorded(program, measure_accesses=True)).findings
    assert "race-raw" == found.kind


@pytest.mark.parametrize("by", ["a wait", "a thread of the device"])
def test_work_is_reported_without_the_drivers_lock(by: str, tmp_path: Path) -> None:
    """Another thread, which has a subscriber's lock, may need the driver: the collector runs finalizers anywhere."""
    called: list[int] = []
    reported = threading.Event()

    def subscriber(event: Event) -> None:
        if event.kind is Kind.EXECUTION and not reported.is_set():
            thread = threading.Thread(target=lambda: called.append(int(driver.cuDeviceGetCount()[0])))
            thread.start()
            thread.join(5)
            reported.set()

    with recording.record(tmp_path / "t.ctrace", device="sim"):
        from cuda.bindings import driver

        stream = cudatool.Stream()
        with stream:
            array = cudatool.zeros(4)
        hooks.subscribe(subscriber)
        if by == "a thread of the device":
            done = threading.Event()
            function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: done.set())
            pointer = ctypes.cast(function, ctypes.c_void_p).value
            ok(driver.cuLaunchHostFunc(stream.cuda_stream, driver.CUhostFn(pointer), 0))
            assert done.wait(_PATIENCE_S)
        stream.synchronize()
        assert reported.wait(_PATIENCE_S)
        hooks.unsubscribe(subscriber)
        del array
    assert [0] == called


def test_calls_of_a_finalizer_in_the_middle_of_another_call_are_recorded_and_so_is_that(recorded: Any) -> None:
    results = []

    def program(driver: Any, context: Any) -> None:
        class Owner:
            def __init__(self) -> None:
                self.cycle = self
                self.physical = ok(driver.cuMemCreate(_SIZE, _properties(driver), 0))

            def __del__(self) -> None:
                results.append(driver.cuMemRelease(self.physical)[0])

        Owner()
        with watching(Watcher("cuMemAlloc", gc.collect, at_enter=True)):
            one = ok(driver.cuMemAlloc(64))
        ok(driver.cuMemFree(one))

    trace = recorded(program)
    assert [0] == results
    assert [Kind.PHYSICAL_ALLOC, Kind.PHYSICAL_FREE, Kind.MEM_ALLOC, Kind.MEM_FREE] == [
        row["kind"] for row in of_kinds(trace, *_GIVEN, *_TAKEN)
    ]


def test_work_that_an_interrupted_call_has_executed_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C ends the wait, and nothing says that the stream has been waited for. It may be the last call."""
    with recording.record(tmp_path / "t.ctrace", device="sim"):
        from cuda.bindings import driver

        ok(driver.cuInit(0))
        context = ok(driver.cuCtxCreate(None, 0, 0))
        machine = _driver.initialize().machine
        assert machine is not None
        wait = machine.scheduler.wait_all

        def wait_and_be_interrupted(operations: Any, **options: Any) -> None:
            wait(operations, **options)
            raise Interrupted

        one = ok(driver.cuMemAlloc(64))
        ok(driver.cuMemsetD8Async(one, 1, 64, 0))
        monkeypatch.setattr(machine.scheduler, "wait_all", wait_and_be_interrupted)
        ok(driver.cuStreamSynchronize(0))
        monkeypatch.setattr(machine.scheduler, "wait_all", wait)
    ok(driver.cuCtxDestroy(context))
    rows = of_kinds(read(tmp_path / "t.ctrace"), Kind.MEMSET, Kind.EXECUTION, Kind.STREAM_SYNCHRONIZE)
    assert [Kind.MEMSET, Kind.EXECUTION] == [row["kind"] for row in rows]


def test_threads_that_take_and_give_memory_at_once_give_no_address_twice(recorded: Any) -> None:
    """Any order of what four threads do: the trace is held against a model of who has which addresses."""
    failed: list[BaseException] = []

    def program(driver: Any, context: Any) -> None:
        def work() -> None:
            try:
                ok(driver.cuCtxSetCurrent(context))
                stream = ok(driver.cuStreamCreate(1))
                for _ in range(25):
                    for make, end in MEMORY.values():
                        ok(getattr(driver, end)(ok(make(driver))))
                    memory = ok(driver.cuMemAllocAsync(64, stream))
                    ok(driver.cuMemsetD8Async(memory, 1, 64, stream))
                    ok(driver.cuMemFreeAsync(memory, stream))
                    ok(driver.cuStreamSynchronize(stream))
                ok(driver.cuStreamDestroy(stream))
            except BaseException as error:
                failed.append(error)

        interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-6)
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        sys.setswitchinterval(interval)

    trace = recorded(program)
    assert not failed
    held: set[tuple[bool, int]] = set()  # whether it is physical memory, and the handle or the address
    enqueued: set[int] = set()
    for row in of_kinds(trace, *_GIVEN, *_TAKEN, Kind.MEMSET, Kind.EXECUTION):
        physical = bool(row["kind"] in (Kind.PHYSICAL_ALLOC, Kind.PHYSICAL_FREE))
        memory = physical, int(row["aux0" if physical else "address"])
        if row["kind"] in _GIVEN:
            assert memory not in held
            held.add(memory)
        elif row["kind"] in _TAKEN:
            held.remove(memory)
        elif row["kind"] == Kind.MEMSET:
            enqueued.add(int(row["correlation"]))
        elif row["kind"] == Kind.EXECUTION:
            assert int(row["correlation"]) in enqueued
    assert not held
