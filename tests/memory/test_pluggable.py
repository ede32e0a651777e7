"""Allocators that a program brings, in C and in Python, without a device."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import nullcontext

import pytest
from fake_provider import FakeProvider

from cudatool.errors import OutOfMemoryError, UsageError
from cudatool.memory import CachingAllocator, Settings
from cudatool.memory.pluggable import CUDAPluggableAllocator, PluggableProvider, UncachedAllocator
from cudatool.trace import hooks
from cudatool.trace.events import Event, Kind

MIB = 1 << 20
LIBC = "libc.so.6"
ALLOC = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)
FREE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)


class Own:
    """An allocator in Python that counts its calls. It has `room` bytes."""

    def __init__(self, room: int = 1 << 40) -> None:
        self.room = room
        self.next = 0x10_0000_0000
        self.calls: list[tuple[object, ...]] = []
        self.inside: list[int] = []  # operations of ours that the calls belong to

    def alloc(self, size: int, device: int, stream: int) -> int | None:
        self.calls.append(("alloc", size, device, stream))
        self.inside.append(hooks.current_operation())
        if size > self.room:
            return None
        self.room -= size
        address, self.next = self.next, self.next + size
        return address

    def free(self, address: int, size: int, device: int, stream: int) -> None:
        self.calls.append(("free", address, size, device, stream))
        self.room += size


@pytest.fixture
def own() -> Own:
    return Own()


def as_address(function: object) -> int:
    address = ctypes.cast(function, ctypes.c_void_p).value  # type: ignore[arg-type]
    assert address
    return address


@pytest.mark.parametrize("form", ["callable", "ctypes", "address"])
def test_functions_are_called_with_size_device_and_stream(own: Own, form: str) -> None:
    alloc, free = ALLOC(own.alloc), FREE(own.free)
    allocator = CUDAPluggableAllocator.from_functions(
        *{
            "callable": (own.alloc, own.free),
            "ctypes": (alloc, free),
            "address": (as_address(alloc), as_address(free)),
        }[form]
    )
    address = allocator.allocate(1000, 1, 0x77)
    assert (0x10_0000_0000, 1000) == (address, allocator.size_of(address))
    allocator.free(address)
    assert [("alloc", 1000, 1, 0x77), ("free", address, 1000, 1, 0x77)] == own.calls


def test_functions_of_a_library_are_found_by_name() -> None:
    allocator = CUDAPluggableAllocator(LIBC, "malloc", "free")  # C lets them ignore the other arguments
    address = allocator.allocate(100, 0, 0)
    ctypes.memset(address, 7, 100)
    allocator.free(address)
    assert allocator is allocator.allocator()


def test_function_of_a_library_need_not_declare_its_types() -> None:
    library = ctypes.CDLL(LIBC)  # for ctypes, malloc returns an int of 32 bits
    allocator = CUDAPluggableAllocator.from_functions(library.malloc, library.free)
    address = allocator.allocate(64 * MIB, 0, 0)
    ctypes.memset(address, 7, 64 * MIB)
    allocator.free(address)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nowhere.so", "a", "f"), "cannot load the allocator's library nowhere.so"),
        ((LIBC, "no_such_alloc", "free"), "libc.so.6 has no function no_such_alloc"),
        ((LIBC, "malloc", "no_such_free"), "libc.so.6 has no function no_such_free"),
    ],
)
def test_library_that_cannot_be_used_is_refused(arguments: tuple[str, str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        CUDAPluggableAllocator(*arguments)


@pytest.mark.parametrize(
    ("function", "message"),
    [(0, "null pointer"), (ALLOC(0), "null pointer"), ("malloc", "'malloc' is neither a function")],
)
def test_what_is_no_function_is_refused(own: Own, function: object, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        CUDAPluggableAllocator.from_functions(function, own.free)  # type: ignore[arg-type]


def returning(value: object) -> Callable[..., object]:
    return lambda size, device, stream: value


def raising(error: BaseException) -> Callable[..., object]:
    def alloc(size: int, device: int, stream: int) -> int:
        raise error

    return alloc


@pytest.mark.parametrize("alloc", [returning(None), returning(0), raising(MemoryError("no")), ALLOC(lambda *_: 0)])
def test_null_or_memory_error_is_out_of_memory(own: Own, alloc: Callable[..., object]) -> None:
    with pytest.raises(OutOfMemoryError):
        CUDAPluggableAllocator.from_functions(alloc, own.free).allocate(100, 0, 0)


@pytest.mark.parametrize(
    ("alloc", "message"),
    [
        (raising(KeyError("x")), r"alloc\(100, 0, 0x0\) raised KeyError: 'x'"),
        (returning("there"), "returned 'there', which is not an address"),
        (returning(1.5), "returned 1.5, which is not an address"),
    ],
)
def test_broken_alloc_function_is_a_typed_error(own: Own, alloc: Callable[..., object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        CUDAPluggableAllocator.from_functions(alloc, own.free).allocate(100, 0, 0)
    assert 0 == hooks.current_operation()


def test_address_given_out_twice_is_refused(own: Own) -> None:
    allocator = CUDAPluggableAllocator.from_functions(returning(4096), own.free)
    allocator.allocate(100, 0, 0)
    with pytest.raises(UsageError, match="returned 0x1000, which is in use already"):
        allocator.allocate(100, 0, 0)
    allocator.free(4096)
    assert 4096 == allocator.allocate(100, 0, 0)


def test_unknown_or_double_free_is_refused(own: Own) -> None:
    allocator = CUDAPluggableAllocator.from_functions(own.alloc, own.free)
    address = allocator.allocate(100, 0, 0)
    allocator.free(address)
    for wrong in (address, 12):
        with pytest.raises(UsageError, match="was not allocated by alloc, or was freed before"):
            allocator.free(wrong)
    assert 1 == len([call for call in own.calls if call[0] == "free"])


def test_failing_free_function_is_a_typed_error(own: Own) -> None:
    def free(address: int, size: int, device: int, stream: int) -> None:
        raise ValueError("bad heap")

    allocator = CUDAPluggableAllocator.from_functions(own.alloc, free)
    with pytest.raises(UsageError, match=r"free\(0x1000000000, \.\.\.\) raised ValueError: bad heap"):
        allocator.free(allocator.allocate(100, 0, 0))


def test_calls_belong_to_an_operation_of_the_runtime(own: Own) -> None:
    CUDAPluggableAllocator.from_functions(own.alloc, own.free).allocate(100, 0, 0)
    assert [True] == [operation > 0 for operation in own.inside]


@pytest.fixture
def base() -> FakeProvider:
    return FakeProvider()


def pool_of(base: FakeProvider, own: Own, conf: str = "") -> CachingAllocator:
    """Return an allocator that serves stream 5 from a pool over the program's functions."""
    policy = CachingAllocator(base, device=0, settings=Settings.parse(conf))
    allocator = CUDAPluggableAllocator.from_functions(own.alloc, own.free)
    provider = PluggableProvider(allocator, 0, base, guard=nullcontext)
    policy.create_or_incref_pool((0, 1), provider=provider)
    policy.begin_allocate_to_pool((0, 1), lambda stream: stream == 5)
    return policy


@pytest.mark.parametrize("conf", ["", "expandable_segments:True"])
def test_pool_takes_whole_segments_from_the_functions(base: FakeProvider, own: Own, conf: str) -> None:
    policy = pool_of(base, own, conf)
    first, second = policy.malloc(1000, 5), policy.malloc(1000, 5)
    assert [("alloc", 2 * MIB, 0, 5)] == own.calls
    assert first + 1024 == second
    assert {} == base.segments
    policy.free(first)
    policy.free(second)
    policy.end_allocate_to_pool((0, 1))
    policy.release_pool((0, 1))
    policy.release_pool((0, 1))
    policy.empty_cache((0, 1))
    assert ("free", first, 2 * MIB, 0, 5) == own.calls[-1]


def test_pool_whose_function_has_nothing_is_out_of_memory(base: FakeProvider) -> None:
    own = Own(room=3 * MIB)
    policy = pool_of(base, own)
    kept = policy.malloc(1000, 5)
    with pytest.raises(OutOfMemoryError):
        policy.malloc(4 * MIB, 5)
    policy.free(kept)


def test_uncached_allocator_asks_every_time(own: Own) -> None:
    allocator = UncachedAllocator(CUDAPluggableAllocator.from_functions(own.alloc, own.free), 0, guard=nullcontext)
    addresses = [allocator.malloc(1000, 7) for _ in range(2)]
    allocator.record_stream(addresses[0], 8)
    for address in addresses:
        allocator.free(address)
    assert 0 == allocator.malloc(0, 7)
    allocator.free(0)
    assert ["alloc", "alloc", "free", "free"] == [call[0] for call in own.calls]
    with pytest.raises(UsageError, match="freed before"):
        allocator.free(addresses[0])


def test_uncached_allocations_are_recorded(own: Own, events: list[Event]) -> None:
    allocator = UncachedAllocator(CUDAPluggableAllocator.from_functions(own.alloc, own.free), 1, guard=nullcontext)
    address = allocator.malloc(1000, 7)
    allocator.free(address)
    with pytest.raises(UsageError):
        allocator.free(address)
    assert [
        (Kind.MEM_ALLOC, 1, address, 1000, "alloc"),
        (Kind.MEM_FREE, 1, address, 1000, "free"),
    ] == [(e.kind, e.device, e.address, e.size, e.name) for e in events]


def test_device_is_current_while_the_functions_run(base: FakeProvider, own: Own) -> None:
    current: list[int] = []

    class Guard:
        def __init__(self, device: int) -> None:
            self.device = device

        def __enter__(self) -> None:
            current.append(self.device)

        def __exit__(self, *_: object) -> None:
            own.calls.append(("left", current.pop()))

    allocator = CUDAPluggableAllocator.from_functions(own.alloc, own.free)
    provider = PluggableProvider(allocator, 3, base, guard=Guard)
    address = provider.allocate(512, 5)
    provider.free(address)
    assert [("alloc", 512, 3, 5), ("left", 3), ("free", address, 512, 3, 5), ("left", 3)] == own.calls
