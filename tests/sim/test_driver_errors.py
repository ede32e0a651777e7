"""Misuse gives the error code that the driver API reference documents."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import pytest

from cudatool.code_cache import CodeCache
from cudatool.sim import abi
from cudatool.sim.addresses import place_of
from cudatool.sim.allocations import Allocation, Allocations
from cudatool.sim.jit import codegen
from cudatool.sim.jit.context import MAX_STACK
from cudatool.sim.jit.table import TABLE


def test_calls_without_a_context_say_so(driver, ok):
    stack = []  # other users of this thread may have contexts below ours
    while int(ok(driver.cuCtxGetCurrent())):
        stack.append(ok(driver.cuCtxPopCurrent()))
    try:
        assert driver.cuMemAlloc(16)[0].name == "CUDA_ERROR_INVALID_CONTEXT"
        assert driver.cuStreamCreate(0)[0].name == "CUDA_ERROR_INVALID_CONTEXT"
    finally:
        for context in reversed(stack):
            ok(driver.cuCtxPushCurrent(context))


def test_destroyed_context_is_recognized(driver, ok):
    context = ok(driver.cuCtxCreate(None, 0, 0))
    ok(driver.cuCtxPushCurrent(context))
    ok(driver.cuCtxDestroy(context))
    assert driver.cuMemAlloc(16)[0].name == "CUDA_ERROR_CONTEXT_IS_DESTROYED"
    ok(driver.cuCtxPopCurrent())
    assert driver.cuCtxSetCurrent(context)[0].name == "CUDA_ERROR_INVALID_CONTEXT"


@pytest.mark.parametrize("ordinal", [-1, 99])
def test_device_that_is_not_there(driver, ordinal):
    assert driver.cuDeviceGet(ordinal)[0].name == "CUDA_ERROR_INVALID_DEVICE"


def test_context_has_no_flags_that_there_are_not(driver, ok):
    assert driver.cuCtxCreate(None, 0x800, 0)[0].name == "CUDA_ERROR_INVALID_VALUE"
    assert driver.cuDevicePrimaryCtxSetFlags(0, 0x800)[0].name == "CUDA_ERROR_INVALID_VALUE"
    assert driver.cuCtxSetFlags(0x800)[0].name == "CUDA_ERROR_INVALID_VALUE"
    for ways_to_wait in (3, 5, 6, 7):
        assert driver.cuCtxCreate(None, ways_to_wait, 0)[0].name == "CUDA_ERROR_INVALID_VALUE"
    for flags in (0, 1, 2, 4, 0xFC):
        ok(driver.cuCtxDestroy(ok(driver.cuCtxCreate(None, flags, 0))))


def test_flags_of_a_primary_context_are_those_of_its_device(driver, ok):
    before, _ = ok(driver.cuDevicePrimaryCtxGetState(0))
    context = ok(driver.cuDevicePrimaryCtxRetain(0))
    ok(driver.cuCtxPushCurrent(context))
    try:
        ok(driver.cuDevicePrimaryCtxSetFlags(0, 4))
        assert ok(driver.cuCtxGetFlags()) == 4
        ok(driver.cuCtxSetFlags(2))
        assert ok(driver.cuDevicePrimaryCtxGetState(0)) == (2, 1)
    finally:
        ok(driver.cuDevicePrimaryCtxSetFlags(0, before))
        ok(driver.cuCtxPopCurrent())
        ok(driver.cuDevicePrimaryCtxRelease(0))


def test_what_is_no_limit_is_told_from_one_that_is_not_supported(driver):
    for name, code in (("MAX", "INVALID_VALUE"), ("CIG_ENABLED", "UNSUPPORTED_LIMIT")):
        limit = getattr(driver.CUlimit, f"CU_LIMIT_{name}")
        assert driver.cuCtxSetLimit(limit, 1)[0].name == driver.cuCtxGetLimit(limit)[0].name == f"CUDA_ERROR_{code}"


def test_the_limit_of_a_stack_is_at_most_what_the_device_has(driver, ok):
    limit = driver.CUlimit.CU_LIMIT_STACK_SIZE
    before = ok(driver.cuCtxGetLimit(limit))
    try:
        ok(driver.cuCtxSetLimit(limit, 4096))
        assert 4096 == ok(driver.cuCtxGetLimit(limit))
        ok(driver.cuCtxSetLimit(limit, 1 << 40))
        assert MAX_STACK == ok(driver.cuCtxGetLimit(limit))
    finally:
        ok(driver.cuCtxSetLimit(limit, before))


def test_destroyed_stream_is_an_invalid_handle(driver, ok):
    stream = ok(driver.cuStreamCreate(0))
    ok(driver.cuStreamDestroy(stream))
    assert driver.cuStreamSynchronize(stream)[0].name == "CUDA_ERROR_INVALID_HANDLE"
    assert driver.cuStreamDestroy(stream)[0].name == "CUDA_ERROR_INVALID_HANDLE"


def test_default_streams_cannot_be_destroyed(driver):
    assert driver.cuStreamDestroy(1)[0].name == "CUDA_ERROR_INVALID_HANDLE"


def test_destroyed_event_is_an_invalid_handle(driver, ok):
    event = ok(driver.cuEventCreate(0))
    ok(driver.cuEventDestroy(event))
    assert driver.cuEventQuery(event)[0].name == "CUDA_ERROR_INVALID_HANDLE"


def test_a_stream_handle_is_no_event(driver, ok):
    stream = ok(driver.cuStreamCreate(0))
    assert driver.cuEventQuery(int(stream))[0].name == "CUDA_ERROR_INVALID_HANDLE"
    ok(driver.cuStreamDestroy(stream))


def test_event_of_another_context_cannot_be_recorded(driver, ok):
    event = ok(driver.cuEventCreate(0))
    other = ok(driver.cuCtxCreate(None, 0, 0))
    stream = ok(driver.cuStreamCreate(0))
    assert driver.cuEventRecord(event, stream)[0].name == "CUDA_ERROR_INVALID_HANDLE"
    ok(driver.cuCtxDestroy(other))
    ok(driver.cuEventDestroy(event))


_WRITES = b"""
.version 8.0
.target sm_80
.address_size 64
.global .align 4 .u32 variable;
.visible .entry write(.param .u64 p) {
    .reg .u64 %a;
    ld.param.u64 %a, [p];
    st.global.u32 [%a], 5;
    ret;
}
"""


@pytest.mark.parametrize("device", [0, 1])
def test_function_of_a_module_runs_in_the_context_of_the_module_only(driver, ok, device):
    if device >= ok(driver.cuDeviceGetCount()):
        pytest.skip("there is one device")
    module, memory = ok(driver.cuModuleLoadData(_WRITES)), ok(driver.cuMemAlloc(4))
    function = ok(driver.cuModuleGetFunction(module, b"write"))
    library = ok(driver.cuLibraryLoadData(_WRITES, [], [], 0, [], [], 0))
    kernel = ok(driver.cuLibraryGetKernel(library, b"write"))
    own = ok(driver.cuStreamCreate(0))

    def launched(what, stream):
        arguments = ((int(memory),), (ctypes.c_void_p,))
        return driver.cuLaunchKernel(what, 1, 1, 1, 1, 1, 1, 0, stream, arguments, 0)[0].name

    assert "CUDA_SUCCESS" == launched(function, own)
    variable, _ = ok(driver.cuModuleGetGlobal(module, b"variable"))
    other = ok(driver.cuCtxCreate(None, 0, device))
    stream = ok(driver.cuStreamCreate(0))
    for _ in range(2):
        assert "CUDA_ERROR_INVALID_HANDLE" == launched(function, stream)  # also after one like it was launched, above
    assert "CUDA_SUCCESS" == launched(driver.CUfunction(int(kernel)), stream)  # a library has no context
    assert "CUDA_SUCCESS" == launched(function, own)  # which context is current does not matter
    assert int(variable) == int(ok(driver.cuModuleGetGlobal(module, b"variable"))[0])
    node = driver.CUDA_KERNEL_NODE_PARAMS()
    node.func, node.kernelParams, node.ctx = function, ((int(memory),), (ctypes.c_void_p,)), other
    node.gridDimX = node.gridDimY = node.gridDimZ = node.blockDimX = node.blockDimY = node.blockDimZ = 1
    ok(driver.cuGraphAddKernelNode(ok(driver.cuGraphCreate(0)), None, 0, node))  # its context is the function's
    ok(driver.cuCtxDestroy(other))
    ok(driver.cuLibraryUnload(library))
    ok(driver.cuModuleUnload(module))
    ok(driver.cuMemFree(memory))


def test_allocating_nothing_is_invalid(driver):
    assert driver.cuMemAlloc(0)[0].name == "CUDA_ERROR_INVALID_VALUE"


def test_allocating_more_than_there_is_runs_out_of_memory_and_takes_nothing(driver, ok):
    free, total = ok(driver.cuMemGetInfo())
    assert driver.cuMemAlloc(total + 1)[0].name == "CUDA_ERROR_OUT_OF_MEMORY"
    assert driver.cuMemAllocAsync(total + 1, 0)[0].name == "CUDA_ERROR_OUT_OF_MEMORY"
    assert ok(driver.cuMemGetInfo())[0] == free


def test_freeing_twice_is_invalid(driver, ok):
    address = ok(driver.cuMemAlloc(16))
    ok(driver.cuMemFree(address))
    assert driver.cuMemFree(address)[0].name == "CUDA_ERROR_INVALID_VALUE"


def test_freeing_the_middle_of_an_allocation_is_invalid(driver, ok):
    address = ok(driver.cuMemAlloc(4096))
    assert driver.cuMemFree(int(address) + 512)[0].name == "CUDA_ERROR_INVALID_VALUE"
    ok(driver.cuMemFree(address))


def test_freeing_null_is_allowed(driver, ok):
    ok(driver.cuMemFree(0))
    ok(driver.cuMemFreeHost(0))


def test_copy_past_the_end_of_an_allocation_is_invalid(driver, ok):
    address = ok(driver.cuMemAlloc(100))
    host = ctypes.create_string_buffer(200)
    assert driver.cuMemcpyDtoH(ctypes.addressof(host), address, 101)[0].name == "CUDA_ERROR_INVALID_VALUE"
    ok(driver.cuMemcpyDtoH(ctypes.addressof(host), address, 100))
    ok(driver.cuMemFree(address))


def test_host_memory_is_not_a_device_address(driver):
    host = ctypes.create_string_buffer(16)
    assert driver.cuMemsetD8(ctypes.addressof(host), 0, 16)[0].name == "CUDA_ERROR_INVALID_VALUE"


def test_memset_wants_an_aligned_address(driver, ok):
    address = ok(driver.cuMemAlloc(16))
    assert driver.cuMemsetD32(int(address) + 2, 0, 1)[0].name == "CUDA_ERROR_INVALID_VALUE"
    ok(driver.cuMemFree(address))


def test_elapsed_time_needs_recorded_and_finished_events(driver, ok):
    start, end = ok(driver.cuEventCreate(0)), ok(driver.cuEventCreate(0))
    untimed, address = ok(driver.cuEventCreate(2)), ok(driver.cuMemAlloc(64 << 20))
    assert driver.cuEventElapsedTime(start, end)[0].name == "CUDA_ERROR_INVALID_HANDLE"
    ok(driver.cuEventRecord(start, 0))
    ok(driver.cuMemsetD8Async(address, 0, 64 << 20, 0))
    for event in (end, untimed):
        ok(driver.cuEventRecord(event, 0))
    assert driver.cuEventElapsedTime(start, end)[0].name == "CUDA_ERROR_NOT_READY"
    ok(driver.cuEventSynchronize(untimed))
    assert ok(driver.cuEventElapsedTime(start, end)) >= 0
    assert driver.cuEventElapsedTime(start, untimed)[0].name == "CUDA_ERROR_INVALID_HANDLE"
    for event in (start, end, untimed):
        ok(driver.cuEventDestroy(event))
    ok(driver.cuMemFree(address))


@pytest.mark.parametrize(
    ("image", "error"),
    [
        (b"\x7fELF" + bytes(60), "CUDA_ERROR_NO_BINARY_FOR_GPU"),
        (b"this is no image", "CUDA_ERROR_INVALID_IMAGE"),
        (b".version 8.0\n.target sm_90\n.address_size 64\n.visible .entry broken(", "CUDA_ERROR_INVALID_PTX"),
    ],
)
def test_images_that_cannot_be_loaded(driver, image, error):
    assert driver.cuModuleLoadData(image + b"\0")[0].name == error


def test_static_shared_memory_has_a_limit_when_the_module_is_loaded(driver, ok):
    """The driver compiles PTX as it loads it, and a kernel with more than 48 KiB does not compile."""

    def ptx(size: int) -> bytes:
        return (
            b"""
.version 8.0
.target sm_90
.address_size 64
.shared .align 4 .b8 a[%d];
.shared .align 4 .b8 b[32768];
.visible .entry one() { .reg .b32 %%r<2>; mov.u32 %%r1, a; ret; }
.visible .entry other() { .reg .b32 %%r<2>; mov.u32 %%r1, b; ret; }
\0"""
            % size
        )

    ok(driver.cuModuleUnload(ok(driver.cuModuleLoadData(ptx(48 << 10)))))
    option, log = driver.CUjit_option, bytearray(200)
    options = [option.CU_JIT_ERROR_LOG_BUFFER, option.CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES]
    error, _ = driver.cuModuleLoadDataEx(ptx((48 << 10) + 4), 2, options, [log, len(log)])
    assert "CUDA_ERROR_INVALID_PTX" == error.name
    assert b"one declares 49156 bytes of shared memory; a kernel may have 49152" in log


def test_every_code_has_a_name_and_a_text(driver, ok):
    for code in driver.CUresult:
        assert ok(driver.cuGetErrorName(code)) == code.name.encode()
        assert ok(driver.cuGetErrorString(code))


def test_code_that_does_not_exist(machine):
    from cudatool.sim.api.device import cuGetErrorName
    from cudatool.sim.results import DriverError

    target = ctypes.c_size_t(1)
    with pytest.raises(DriverError, match="invalid argument"):
        cuGetErrorName(12345, ctypes.addressof(target))
    assert target.value == 0


def test_missing_entry_point_is_named(driver):
    with pytest.raises(Exception, match="cuImportExternalSemaphore") as error:
        driver.cuImportExternalSemaphore(driver.CUDA_EXTERNAL_SEMAPHORE_HANDLE_DESC())
    assert type(error.value).__name__ == "FunctionNotFoundError"


_STRAY = rb"""
.version 8.0
.target sm_90
.address_size 64
.visible .entry stray(.param .u64 p) {
    .reg .b64 %a;
    ld.param.u64 %a, [p];
    st.global.u32 [%a], 1;
    ret;
}
.visible .entry unknown() {
    wmma.load.a.sync.aligned.row.m16n16k16.f16 {%r1}, [%rd1];
    ret;
}
"""


_POPC = b"""
.version 8.0
.target sm_80
.address_size 64
.visible .entry counts() {
    .reg .b32 %r<2>;
    popc.b32 %r1, 7;
    ret;
}
"""


def test_stray_kernel_ends_its_context_and_not_the_process(driver, ok, machine):
    context = ok(driver.cuCtxCreate(None, 0, 0))
    module = ok(driver.cuModuleLoadData(_STRAY + b"\0"))
    function = ok(driver.cuModuleGetFunction(module, b"stray"))
    argument = ctypes.c_uint64(machine.arena.base + machine.arena.size - 4096)  # reserved, but not allocated
    pointers = (ctypes.c_void_p * 1)(ctypes.addressof(argument))
    ok(driver.cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, 0, ctypes.addressof(pointers), 0))
    for _ in range(2):  # and again: the error stays
        assert driver.cuCtxSynchronize()[0].name == "CUDA_ERROR_ILLEGAL_ADDRESS"
    assert driver.cuMemAlloc(16)[0].name == "CUDA_ERROR_ILLEGAL_ADDRESS"
    ok(driver.cuCtxDestroy(context))
    ok(driver.cuMemFree(ok(driver.cuMemAlloc(16))))  # other contexts go on


def test_asking_for_parameters_until_there_are_no_more_logs_nothing(driver, ok, caplog):
    module = ok(driver.cuModuleLoadData(_STRAY + b"\0"))
    kernel = ok(driver.cuModuleGetFunction(module, b"stray"))
    assert (0, 8) == ok(driver.cuFuncGetParamInfo(kernel, 0))
    assert driver.cuFuncGetParamInfo(kernel, 1)[0].name == "CUDA_ERROR_INVALID_VALUE"
    assert "" == caplog.text
    ok(driver.cuModuleUnload(module))


def test_instruction_that_is_not_there_is_named_with_kernel_and_line(driver, ok, caplog):
    module = ok(driver.cuModuleLoadData(_STRAY + b"\0"))
    function = ok(driver.cuModuleGetFunction(module, b"unknown"))
    refused = driver.cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0)
    assert refused[0].name == "CUDA_ERROR_NOT_SUPPORTED"
    for word in ("wmma.load", "unknown", "12"):
        assert word in caplog.text
    ok(driver.cuModuleUnload(module))


def test_a_failure_inside_the_driver_says_what_it_is(driver, ok, machine, monkeypatch):
    def failing(*_arguments):
        raise KeyError("what is missing")

    monkeypatch.setattr(abi.ENTRIES["cuDeviceGetCount"], "handler", failing)
    assert driver.cuDeviceGetCount()[0].name == "CUDA_ERROR_UNKNOWN"
    assert "cuDeviceGetCount failed inside the software driver: KeyError('what is missing')" == abi.call.message


def test_what_only_a_larger_launch_needs_is_refused_with_its_instruction(driver, ok, monkeypatch, caplog):
    context = ok(driver.cuCtxCreate(None, 0, 0))
    module = ok(driver.cuModuleLoadData(_POPC + b"\0"))
    function = ok(driver.cuModuleGetFunction(module, b"counts"))

    def refusing(e, i):
        raise e.unsupported()

    ok(driver.cuLaunchKernel(function, 2**23, 1, 1, 1024, 1, 1, 0, 0, 0, 0))  # threads that 32 bits do not number
    assert codegen.generate  # fills the table when it is imported: elsewhere, when a kernel is first translated
    monkeypatch.setitem(TABLE, "popc", refusing)
    monkeypatch.setattr(CodeCache, "get", lambda *_: None)  # code of another run, in which popc was not refused
    assert driver.cuCtxSynchronize()[0].name == "CUDA_ERROR_NOT_SUPPORTED"
    assert "popc.b32" in caplog.text
    ok(driver.cuCtxDestroy(context))


def test_launches_out_of_limits(driver, ok):
    module = ok(driver.cuModuleLoadData(_STRAY + b"\0"))
    function = ok(driver.cuModuleGetFunction(module, b"stray"))
    argument = ctypes.c_uint64(0)
    pointers = (ctypes.c_void_p * 1)(ctypes.addressof(argument))

    right = ctypes.addressof(pointers)

    def launch(grid=(1, 1, 1), block=(1, 1, 1), shared=0, parameters=right):
        return driver.cuLaunchKernel(function, *grid, *block, shared, 0, parameters, 0)[0].name

    assert launch(grid=(0, 1, 1)) == "CUDA_ERROR_INVALID_VALUE"
    assert launch(grid=(1, 70_000, 1)) == "CUDA_ERROR_INVALID_VALUE"
    assert launch(block=(1025, 1, 1)) == "CUDA_ERROR_INVALID_VALUE"
    assert launch(block=(1, 1, 65)) == "CUDA_ERROR_INVALID_VALUE"
    assert launch(shared=48 * 1024 + 1) == "CUDA_ERROR_INVALID_VALUE"
    assert launch(parameters=0) == "CUDA_ERROR_INVALID_VALUE"
    assert driver.cuModuleGetFunction(module, b"missing")[0].name == "CUDA_ERROR_NOT_FOUND"
    ok(driver.cuModuleUnload(module))
    assert driver.cuModuleGetFunction(module, b"stray")[0].name == "CUDA_ERROR_INVALID_HANDLE"


def test_handles_that_outlive_the_driver_end_in_silence(tmp_path):
    """Modules lose their globals in reverse order of import, so that an early one can hold handles longer."""
    (tmp_path / "early.py").write_text(
        "import codecs, sys\nkept = []\ncodecs.register(lambda name, this=sys.modules[__name__]: None)\n"
    )
    (tmp_path / "program.py").write_text(
        "import logging, sys, traceback\nimport early\nimport cudatool\ncudatool.init()\n"
        "from cuda.core import Device\ndevice = Device(0)\ndevice.set_current()\n"
        "early.kept += [device.create_stream(), device.create_event(), list(sys.modules.values())]\n"
    )
    command = [sys.executable, "-W", "error", "program.py"]
    environment = {**os.environ, "CUDATOOL_DEVICE": "sim", "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert (0, "") == (done.returncode, done.stdout)
    assert ["cudatool: using the software device"] == [line.partition(" (")[0] for line in done.stderr.splitlines()]


def test_threads_that_end_with_the_program_end_in_silence():
    """cuda.core lets go of a thread's contexts when the system's thread ends, which Python does not wait for."""
    program = (
        "import threading, cudatool\nfrom cuda.core import Device\ncudatool.init()\n"
        "threads = [threading.Thread(target=lambda: Device(0).set_current()) for _ in range(8)]\n"
        "for thread in threads: thread.start()\nfor thread in threads: thread.join()\n"
    )
    for _ in range(3):
        command = [sys.executable, "-c", program]
        done = subprocess.run(command, env={**os.environ, "CUDATOOL_DEVICE": "sim"}, capture_output=True, text=True)
        assert (0, 1) == (done.returncode, len(done.stderr.splitlines())), done.stderr


@pytest.mark.parametrize(
    ("address", "words"),
    [
        (0x1FFFFC, "4 bytes before the start of an allocation of 2 MiB"),
        (0x3FFFFE, "across the end of an allocation of 2 MiB"),
        (0x402000, "8,192 bytes after the end of an allocation of 2 MiB"),
    ],
)
def test_an_address_is_placed_beside_an_allocation_with_its_size(address, words):
    allocations = Allocations()
    allocations.add(Allocation(0x200000, 2 << 20, "device", 0, 0, 1))
    assert words == place_of(address, 4, allocations)


def test_a_name_that_is_no_utf_8_is_not_found(driver, ok, tmp_path):
    module = ok(
        driver.cuModuleLoadData(b".version 8.0\n.target sm_90\n.address_size 64\n.visible .entry k() { ret; }\0")
    )
    try:
        assert driver.cuModuleGetFunction(module, b"\xff")[0].name == "CUDA_ERROR_NOT_FOUND"
        assert driver.cuModuleGetGlobal(module, b"\xff")[0].name == "CUDA_ERROR_NOT_FOUND"
    finally:
        ok(driver.cuModuleUnload(module))
    assert driver.cuModuleLoad(os.fsencode(tmp_path) + b"/\xff")[0].name == "CUDA_ERROR_FILE_NOT_FOUND"
    graph = ok(driver.cuGraphCreate(0))
    ok(driver.cuGraphDebugDotPrint(graph, os.fsencode(tmp_path) + b"/\xff.dot", 0))
    ok(driver.cuGraphDestroy(graph))
    assert [b"\xff.dot"] == os.listdir(os.fsencode(tmp_path))


@pytest.mark.parametrize("number", [(1 << 64) - 1, (1 << 32) - 1, 9999], ids=["-1", "-1 as unsigned", "closed"])
def test_what_is_no_file_descriptor_is_no_memory_to_import(driver, number):
    kind = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    assert driver.cuMemImportFromShareableHandle(number, kind)[0].name == "CUDA_ERROR_INVALID_VALUE"
    assert driver.cuMemPoolImportFromShareableHandle(number, kind, 0)[0].name == "CUDA_ERROR_INVALID_VALUE"


def test_file_that_is_no_pools_is_not_kept_open(driver, ok):
    wanted = driver.CUmemAllocationProp()
    wanted.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    wanted.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    kind = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    wanted.requestedHandleTypes = kind
    physical = ok(driver.cuMemCreate(2 << 20, wanted, 0))
    file = int(ok(driver.cuMemExportToShareableHandle(physical, kind, 0)))
    before = os.listdir("/proc/self/fd")
    try:
        assert driver.cuMemPoolImportFromShareableHandle(file, kind, 0)[0].name == "CUDA_ERROR_INVALID_VALUE"
        assert len(before) == len(os.listdir("/proc/self/fd"))
    finally:
        os.close(file)
        ok(driver.cuMemRelease(physical))
