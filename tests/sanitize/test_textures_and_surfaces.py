"""What kernels do by textures and surfaces is checked as what they do by pointers: between streams, and inside."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cudatool.recording import record
from cudatool.sanitize import FindingKind, Report, check
from cudatool.trace import reader

_BODIES = {
    # Thread t of 32 has row t of an array that is 64 floats wide.
    "write_own": "shl.b32 %x, %t, 2; sust.b.1d.b32.trap [%o, {%x}], %t;",
    "write_first": "mov.u32 %x, 0; sust.b.1d.b32.trap [%o, {%x}], %t;",
    "read_own": "shl.b32 %x, %t, 2; suld.b.1d.b32.trap %y, [%o, {%x}];",
    "double_own": "shl.b32 %x, %t, 2; suld.b.1d.b32.trap %y, [%o, {%x}]; shl.b32 %y, %y, 1;"
    " sust.b.1d.b32.trap [%o, {%x}], %y;",
    "exchange": "shl.b32 %x, %t, 2; sust.b.1d.b32.trap [%o, {%x}], %t; bar.sync 0;"
    " xor.b32 %y, %t, 1; shl.b32 %y, %y, 2; suld.b.1d.b32.trap %z, [%o, {%y}];",
    "exchange_early": "shl.b32 %x, %t, 2; sust.b.1d.b32.trap [%o, {%x}], %t;"
    " xor.b32 %y, %t, 1; shl.b32 %y, %y, 2; suld.b.1d.b32.trap %z, [%o, {%y}];",
    "fetch_own": "tex.1d.v4.u32.s32 {%y, %z, %z, %z}, [%o, {%t}];",
}
_SIZE = 64


class Programs:
    """Kernels of one block of 32 threads on an array of 64 32-bit integers."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver
        ok = self.ok
        ok(driver.cuInit(0))
        ok(driver.cuCtxPushCurrent(ok(driver.cuDevicePrimaryCtxRetain(0))))
        text = ".version 8.3\n.target sm_80\n.address_size 64\n"
        for name, body in _BODIES.items():
            text += f"""
            .visible .entry {name}(.param .u64 p) {{ .reg .b64 %o; .reg .b32 %t, %x, %y, %z;
            mov.u32 %t, %tid.x; ld.param.u64 %o, [p]; {body} ret; }}"""
        self.module = ok(driver.cuModuleLoadData(text.encode() + b"\0"))
        self.streams = [ok(driver.cuStreamCreate(1)) for _ in range(2)]
        self.arrays: list[Any] = []
        self.objects: list[Callable[[], Any]] = []

    @staticmethod
    def ok(result: tuple[Any, ...]) -> Any:
        assert 0 == result[0], result
        return result[1] if len(result) == 2 else None

    def array(self, written: str = "in bytes") -> Any:
        d = self.driver
        wanted = d.CUDA_ARRAY3D_DESCRIPTOR()
        wanted.Width, wanted.NumChannels, wanted.Flags = _SIZE, 1, 2  # for surfaces
        wanted.Format = d.CUarray_format.CU_AD_FORMAT_UNSIGNED_INT32
        array = self.ok(d.cuArray3DCreate(wanted))
        self.arrays.append(array)
        zeros = np.zeros(_SIZE, np.uint32)
        if written == "in bytes":
            self.ok(d.cuMemcpyHtoA(array, 0, zeros.ctypes.data, zeros.nbytes))
        elif written == "in boxes":
            copy = d.CUDA_MEMCPY2D()
            copy.srcMemoryType = d.CUmemorytype.CU_MEMORYTYPE_HOST
            copy.dstMemoryType = d.CUmemorytype.CU_MEMORYTYPE_ARRAY
            copy.srcHost, copy.dstArray = zeros.ctypes.data, array
            copy.WidthInBytes, copy.Height = zeros.nbytes, 1
            self.ok(d.cuMemcpy2D(copy))
        return array

    def destroy(self, array: Any) -> None:
        self.arrays.remove(array)
        self.ok(self.driver.cuArrayDestroy(array))

    def launch(self, name: str, array: Any, stream: int = 0) -> int:
        """Launch a kernel on a new texture or surface object, and return that."""
        d = self.driver
        resource = d.CUDA_RESOURCE_DESC()
        resource.resType = d.CUresourcetype.CU_RESOURCE_TYPE_ARRAY
        resource.res.array.hArray = array
        if name.startswith("fetch"):
            wanted = d.CUDA_TEXTURE_DESC()
            wanted.flags = 1  # as integers
            object_ = self.ok(d.cuTexObjectCreate(resource, wanted, None))
            self.objects.append(lambda: d.cuTexObjectDestroy(object_))
        else:
            object_ = self.ok(d.cuSurfObjectCreate(resource))
            self.objects.append(lambda: d.cuSurfObjectDestroy(object_))
        self.launch_with(name, int(object_), stream)
        return int(object_)

    def launch_with(self, name: str, object_: int, stream: int = 0) -> None:
        kernel = self.ok(self.driver.cuModuleGetFunction(self.module, name.encode()))
        parameters = ((object_,), (ctypes.c_uint64,))
        self.ok(self.driver.cuLaunchKernel(kernel, 1, 1, 1, 32, 1, 1, 0, self.streams[stream], parameters, 0))

    def synchronize(self) -> None:
        self.ok(self.driver.cuCtxSynchronize())

    def close(self) -> None:
        for undo in [*self.objects, *(lambda array=array: self.driver.cuArrayDestroy(array) for array in self.arrays)]:
            self.ok(undo())
        for stream in self.streams:
            self.ok(self.driver.cuStreamDestroy(stream))
        self.ok(self.driver.cuModuleUnload(self.module))
        self.ok(self.driver.cuCtxPopCurrent())
        self.ok(self.driver.cuDevicePrimaryCtxRelease(0))


def checked(folder: Path, program: Callable[[Programs], None], *checks: str) -> Report:
    path = folder / "t.ctrace"
    with record(path, device="sim", measure_accesses=True, checks=checks):
        from cuda.bindings import driver

        programs = Programs(driver)
        try:
            program(programs)
            programs.synchronize()
        finally:
            programs.close()
    return check(reader.read(path), ["race", *checks])


@pytest.mark.parametrize("reads", ["read_own", "fetch_own"])
@pytest.mark.parametrize("waits", [False, True])
def test_a_race_of_two_streams_on_an_array_is_found(tmp_path: Path, reads: str, waits: bool) -> None:
    def program(programs: Programs) -> None:
        array = programs.array()
        programs.synchronize()
        programs.launch("write_own", array, 0)
        if waits:
            programs.synchronize()
        programs.launch(reads, array, 1)

    report = checked(tmp_path, program)
    assert ([] if waits else [FindingKind.RACE_RAW]) == [one.kind for one in report.findings]
    assert () == report.gaps


@pytest.mark.parametrize(("elements", "kinds"), [(32, []), (31, [FindingKind.OUT_OF_BOUNDS])])
def test_a_fetch_beyond_the_memory_of_a_larger_texture_is_out_of_bounds(
    tmp_path: Path, elements: int, kinds: list[FindingKind]
) -> None:
    def program(programs: Programs) -> None:
        d = programs.driver
        memory = programs.ok(d.cuMemAlloc(4 * elements))
        programs.ok(d.cuMemsetD8(memory, 0, 4 * elements))
        resource, wanted = d.CUDA_RESOURCE_DESC(), d.CUDA_TEXTURE_DESC()
        resource.resType = d.CUresourcetype.CU_RESOURCE_TYPE_LINEAR
        linear, wanted.flags = resource.res.linear, 1
        linear.devPtr, linear.sizeInBytes, linear.numChannels = memory, 4096, 1
        linear.format = d.CUarray_format.CU_AD_FORMAT_UNSIGNED_INT32
        texture = programs.ok(d.cuTexObjectCreate(resource, wanted, None))
        programs.launch_with("fetch_own", int(texture))
        programs.synchronize()
        programs.ok(d.cuTexObjectDestroy(texture))
        programs.ok(d.cuMemFree(memory))

    found = checked(tmp_path, program, "memcheck").on_device
    assert kinds == [one.kind for one in found]
    assert all((31, 0, 0) == one.thread and "read" == one.mode for one in found)


def test_threads_that_write_one_element_of_a_surface_race(tmp_path: Path) -> None:
    def program(programs: Programs) -> None:
        array = programs.array()
        programs.launch("write_own", array)
        programs.launch("write_first", array)

    report = checked(tmp_path, program, "racecheck")
    assert [FindingKind.KERNEL_RACE] == [one.kind for one in report.on_device]
    assert "write_first" in report.on_device[0].operation


def test_a_surface_read_of_what_the_launch_wrote_is_undefined_even_after_a_barrier(tmp_path: Path) -> None:
    def program(programs: Programs) -> None:
        array = programs.array()
        programs.launch("exchange", array)
        programs.launch("exchange_early", array)

    report = checked(tmp_path, program, "racecheck")
    found = {(one.kind, one.operation.split()[1]) for one in report.on_device}
    stale = {(FindingKind.STALE_READ, name) for name in ("exchange", "exchange_early")}
    assert stale | {(FindingKind.KERNEL_RACE, "exchange_early")} == found


def test_a_surface_may_be_written_after_it_was_read_and_read_in_the_next_launch(tmp_path: Path) -> None:
    def program(programs: Programs) -> None:
        array = programs.array()
        programs.launch("write_own", array)
        programs.launch("double_own", array)
        programs.launch("fetch_own", array)

    assert () == checked(tmp_path, program, "racecheck").on_device


@pytest.mark.parametrize("name", ["read_own", "fetch_own"])
@pytest.mark.parametrize("written", ["", "in bytes", "in boxes"])
def test_a_read_of_an_array_that_nothing_was_written_to_is_found(tmp_path: Path, name: str, written: str) -> None:
    report = checked(tmp_path, lambda programs: programs.launch(name, programs.array(written)), "initcheck")
    assert ([] if written else [FindingKind.UNINITIALIZED]) == [one.kind for one in report.on_device]


def test_what_a_kernel_writes_to_a_surface_has_a_value(tmp_path: Path) -> None:
    def program(programs: Programs) -> None:
        array = programs.array("")
        programs.launch("write_own", array)
        programs.launch("fetch_own", array)

    assert () == checked(tmp_path, program, "initcheck").on_device


@pytest.mark.parametrize("name", ["write_own", "read_own", "fetch_own"])
def test_a_kernel_that_uses_a_destroyed_array_is_found(tmp_path: Path, name: str) -> None:
    def program(programs: Programs) -> None:
        array = programs.array()
        object_ = programs.launch(name, array)
        programs.synchronize()
        programs.destroy(array)
        programs.launch_with(name, object_)

    report = checked(tmp_path, program, "memcheck")
    assert report.on_device
    assert {FindingKind.USE_AFTER_FREE} == {one.kind for one in report.on_device}
