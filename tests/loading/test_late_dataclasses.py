"""Dataclasses that are made with their first object."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import threading
from typing import Any

import pytest

from cudatool.loading.late_dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class Point:
    x: int
    y: int = 2
    tags: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Named(Point):
    name: str = ""

    def __post_init__(self) -> None:
        assert self.x


def test_it_is_a_dataclass_from_its_first_object_on() -> None:
    one, other = Named(1, name="a"), Named(1, name="a")
    assert (1, 2, [], "a") == (one.x, one.y, one.tags, one.name)
    assert one == other and one.tags is not other.tags
    assert "Named(x=3, y=2, tags=[], name='a')" == repr(replace(one, x=3))
    assert Point(1) != one
    assert dataclasses.is_dataclass(Named) and dataclasses.is_dataclass(Point)
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.x = 3  # type: ignore[misc]


def test_arguments_are_checked_as_a_dataclass_does() -> None:
    @dataclass()
    class One:
        x: int

    for _ in range(2):
        with pytest.raises(TypeError, match="missing 1 required positional argument: 'x'"):
            One()  # type: ignore[call-arg]


def test_a_class_made_of_one_is_initialized_once() -> None:
    @dataclass()
    class One:
        x: int

    class More(One):
        def __init__(self) -> None:
            made.append(self)
            super().__init__(7)

    made: list[More] = []
    assert 7 == More().x
    assert 1 == len(made)


def test_threads_make_it_once() -> None:
    @dataclass(frozen=True)
    class One:
        x: int

    begin, made = threading.Barrier(8), []

    def make(number: int) -> None:
        begin.wait()
        made.append(One(number).x)

    threads = [threading.Thread(target=make, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [*range(8)] == sorted(made)


def test_an_object_that_another_thread_begins_while_it_is_made_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass()
    class One:
        x: int

    def make_another() -> None:
        threads.append(threading.Thread(target=lambda: made.append(One(2).x)))
        threads[-1].start()
        threads[-1].join(0.05)

    def around(function: Any) -> Any:
        def look(cls: type) -> type:
            make_another()
            function(cls)
            make_another()
            return cls

        return look

    original = dataclasses.dataclass
    monkeypatch.setattr(dataclasses, "dataclass", lambda **options: around(original(**options)))
    made, threads = list[int](), list[threading.Thread]()
    made.append(One(1).x)
    for thread in threads:
        thread.join()
    assert [1, *[2] * len(threads)] == sorted(made) and threads


def test_the_software_device_starts_without_dataclasses() -> None:
    """Nor what errors, checkers and other threads need."""
    program = (
        "import sys; from cudatool import _driver; _driver.initialize();"
        "print(*{'concurrent', 'cudatool.ptx.model', 'dataclasses', 'importlib.abc', 'logging', 'shutil'} & {*sys.modules})"
    )
    environment = {**os.environ, "CUDATOOL_DEVICE": "sim"}
    done = subprocess.run(
        [sys.executable, "-I", "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == []


def test_memory_and_copies_of_a_host_in_c_make_none() -> None:
    source = """
import ctypes, sys
from cudatool import _driver
_driver.choose("sim")
_driver.initialize()
cuda = ctypes.CDLL("libcuda.so.1")
device, context, memory = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()
size, data = ctypes.c_size_t(1 << 20), ctypes.create_string_buffer(1 << 20)
for status in (
    cuda.cuInit(0),
    cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device),
    cuda.cuCtxSetCurrent(context),
    cuda.cuMemAlloc_v2(ctypes.byref(memory), size),
    cuda.cuMemsetD8_v2(memory, ctypes.c_ubyte(7), size),
    cuda.cuMemcpyDtoH_v2(data, memory, size),
    cuda.cuMemcpyHtoD_v2(memory, data, size),
    cuda.cuMemFree_v2(memory),
):
    assert status == 0, status
assert data.raw == bytes([7]) * (1 << 20)
print("dataclasses" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=120)
    assert ("False\n", 0) == (done.stdout, done.returncode), done.stderr
