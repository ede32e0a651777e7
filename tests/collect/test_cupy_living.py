"""What CuPy holds when a recording begins, against a stand-in that has what CuPy says of its arrays and pools."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from cudatool.collect import cupy_living
from cudatool.trace.events import LIVED, Kind
from cudatool.trace.lifetimes import blocks, segments
from cudatool.trace.model import recorded_from
from cudatool.trace.reader import read
from cudatool.trace.recorder import Recorder

MIB = 1 << 20
_GIVEN = {0: {0x1000_0000: 4 * MIB, 0x2000_0000: 2 * MIB}, 1: {0x1000_0000: 8 * MIB}}
"""By device: begin and size of what the driver gave."""


class _Memory:
    """Memory straight from the driver."""

    def __init__(self, address: int, size: int) -> None:
        self.ptr, self.size = address, size


class _Block(_Memory):
    """A block of a pool."""


class _Pinned(_Memory):
    """Pinned memory, in use or kept by the pool."""


class _PinnedBlock(_Pinned):
    """What the pool hands out: the same memory. It has no address when it was given back."""


class _Array:
    """An array; like CuPy's, it is known to the garbage collector."""

    def __init__(self, device: int, address: int, size: int = 512, kind: type[_Memory] = _Block) -> None:
        self.data = SimpleNamespace(device_id=device, mem=kind(address, size))


class _Cupy:
    """The part of CuPy that is asked. A device that the process does not use must not be made current."""

    ndarray = _Array

    def __init__(self, *used: int) -> None:
        self.current, self.used = 0, used
        memory = SimpleNamespace(PooledMemory=_Block)
        self.cuda = SimpleNamespace(Device=self._device, memory=memory, PinnedMemory=_Pinned)

    def _device(self, number: int) -> _Cupy:
        assert number in self.used
        self.current = number
        return self

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        self.current = 0

    def get_default_memory_pool(self) -> SimpleNamespace:
        return SimpleNamespace(total_bytes=lambda: sum(_GIVEN[self.current].values()))

    def range_of(self, address: int) -> tuple[int, int] | None:
        for begin, size in _GIVEN[self.current].items():
            if begin <= address < begin + size:
                return begin, size
        return None


@pytest.fixture
def arrays() -> list[_Array]:
    return [_Array(0, 0x1000_0000), _Array(0, 0x1000_0400), _Array(1, 0x1000_0800), _Array(0, 0)]


def test_pinned_memory_is_there_once_whether_it_is_in_use_or_kept_by_the_pool() -> None:
    cupy = _Cupy(0)
    used, free = _Pinned(0x7000_0000, 4096), _Pinned(0x6000_0000, 512)
    blocks_of_pool = [_PinnedBlock(used.ptr, used.size), _PinnedBlock(0, 0)]
    found = [event for event in cupy_living.living(cupy, cupy.range_of, ()) if event.kind is Kind.HOST_ALLOC]
    assert [(-1, free.ptr, 512), (-1, used.ptr, 4096)] == [(one.device, one.address, one.size) for one in found]
    assert all(one.flags == LIVED and one.name == "cuMemHostAlloc" for one in found)
    del blocks_of_pool


def test_what_an_array_lies_in_is_known_in_full_and_once(arrays: list[_Array]) -> None:
    cupy = _Cupy(0, 1)
    found = cupy_living.living(cupy, cupy.range_of, ())
    assert [(0, 0x1000_0000, 4 * MIB), (1, 0x1000_0000, 8 * MIB)] == [
        (event.device, event.address, event.size) for event in found if event.kind is Kind.MEM_ALLOC
    ]
    assert [(0, 0x1000_0000, 512), (0, 0x1000_0400, 512), (1, 0x1000_0800, 512)] == [
        (event.device, event.address, event.size) for event in found if event.kind is Kind.POOL_ALLOC
    ]
    assert {LIVED} == {event.flags for event in found}


def test_blocks_of_a_pool_are_in_use_in_their_chunk_and_nothing_else_is_of_the_pool(tmp_path: Path) -> None:
    kept = [_Array(0, 0x1000_0000, 1024), _Array(0, 0x2000_0000, 2 * MIB, _Memory)]
    cupy = _Cupy(0)
    events = cupy_living.living(cupy, cupy.range_of, ())
    with Recorder(tmp_path / "t.ctrace", header={"prior_allocations": len(events)}) as recorder:
        for event in events:
            recorder(event)
    trace = read(tmp_path / "t.ctrace")
    held, taken = blocks(trace), segments(trace)
    assert [(0x1000_0000, 1024), (0x2000_0000, 2 * MIB)] == sorted(
        zip(held.address.tolist(), held.size.tolist(), strict=True)
    )
    assert {4 * MIB: "CuPy", 2 * MIB: ""} == {
        size: trace.names[library] for size, library in zip(taken.size.tolist(), taken.library.tolist(), strict=True)
    }
    assert len(trace.records) == recorded_from(trace, 0)  # nothing of it was recorded
    assert kept


def test_what_no_array_lies_in_is_said_of_the_devices_in_use(arrays: list[_Array]) -> None:
    cupy = _Cupy(0, 1)
    found = cupy_living.living(cupy, cupy.range_of, ())
    assert ["2 MiB that CuPy's pool held on device 0 when the recording began"] == cupy_living.missing(
        cupy, [0, 1], found
    )
    assert ["6 MiB that CuPy's pool held on device 0 when the recording began"] == cupy_living.missing(
        _Cupy(0), [0], ()
    )


def test_arrays_in_memory_that_others_have_named_add_nothing(arrays: list[_Array]) -> None:
    cupy = _Cupy(0, 1)
    assert [1, 1] == [event.device for event in cupy_living.living(cupy, cupy.range_of, [(0x1000_0000, 0x600)])]


def test_an_address_that_the_driver_does_not_know_is_left_out() -> None:
    kept = _Array(0, 0x7000_0000)
    cupy = _Cupy(0)
    assert [] == cupy_living.living(cupy, cupy.range_of, ())
    assert kept.data.mem.ptr
