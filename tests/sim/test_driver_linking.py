"""cuLink*, and fatbins as images."""

from __future__ import annotations

import ctypes
import os
import struct
import subprocess
import sys

import pytest

HEADER = b".version 8.3\n.target sm_90\n.address_size 64\n"
CALLER = HEADER + b".extern .func f();\n.visible .entry kernel() { call f, (); ret; }\n"
CALLEE = HEADER + b".visible .func f() { ret; }\n.visible .entry other() { ret; }\n"


def fatbin(text: bytes, arch: int = 90) -> bytes:
    header = struct.pack("<HHIQIIHHIIIQQQ", 1, 0x101, 72, len(text), 0, 64, 3, 8, arch, 64, 0, 0x11, 0, 0)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, 72 + len(text)) + header.ljust(72, b"\0") + text


@pytest.fixture
def log() -> bytearray:
    return bytearray(256)


@pytest.fixture
def link(driver, ok, log):
    options = driver.CUjit_option
    keys = [options.CU_JIT_ERROR_LOG_BUFFER, options.CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES]
    handle = ok(driver.cuLinkCreate(2, keys, [log, len(log)]))
    yield handle
    ok(driver.cuLinkDestroy(handle))
    assert driver.cuLinkDestroy(handle)[0].name == "CUDA_ERROR_INVALID_HANDLE"


def add(driver, link, kind: str, data: bytes) -> str:
    kind = getattr(driver.CUjitInputType, f"CU_JIT_INPUT_{kind}")
    return driver.cuLinkAddData(link, kind, data, len(data), b"unit", 0, [], [])[0].name


def count_kernels(driver, ok, image) -> int:
    module = ok(driver.cuModuleLoadData(image))
    count = ok(driver.cuModuleGetFunctionCount(module))
    ok(driver.cuModuleUnload(module))
    return count


def test_linked_image_is_loaded(driver, ok, link, tmp_path):
    assert "CUDA_SUCCESS" == add(driver, link, "PTX", CALLER)
    (tmp_path / "callee.ptx").write_bytes(CALLEE)
    ok(
        driver.cuLinkAddFile(
            link, driver.CUjitInputType.CU_JIT_INPUT_PTX, str(tmp_path / "callee.ptx").encode(), 0, [], []
        )
    )
    image, size = ok(driver.cuLinkComplete(link))
    assert size == len(ctypes.string_at(image)) + 1
    assert 2 == count_kernels(driver, ok, image)
    assert "CUDA_ERROR_INVALID_VALUE" == add(driver, link, "PTX", CALLEE)  # it is complete


def test_undefined_symbol_is_named_in_the_error_log(driver, link, log):
    assert "CUDA_SUCCESS" == add(driver, link, "PTX", CALLER)
    assert "CUDA_ERROR_INVALID_PTX" == driver.cuLinkComplete(link)[0].name
    assert b"undefined reference to 'f'" == bytes(log).rstrip(b"\0")


def test_symbol_defined_twice_is_named_in_the_error_log(driver, link, log):
    assert "CUDA_SUCCESS" == add(driver, link, "PTX", CALLEE) == add(driver, link, "PTX", CALLEE)
    assert "CUDA_ERROR_INVALID_PTX" == driver.cuLinkComplete(link)[0].name
    assert b"'f' is defined more than once" == bytes(log).rstrip(b"\0")


def test_inputs_that_are_no_ptx_are_refused(driver, link, log, tmp_path):
    assert "CUDA_ERROR_INVALID_PTX" == add(driver, link, "PTX", b"no PTX")
    assert bytes(log).startswith(b"unit: ")
    assert "CUDA_ERROR_INVALID_VALUE" == add(driver, link, "NVVM", CALLEE)
    missing = str(tmp_path / "missing").encode()
    result = driver.cuLinkAddFile(link, driver.CUjitInputType.CU_JIT_INPUT_PTX, missing, 0, [], [])
    assert "CUDA_ERROR_FILE_NOT_FOUND" == result[0].name


def test_fatbins_are_linked_and_loaded(driver, ok, link):
    assert (
        "CUDA_SUCCESS"
        == add(driver, link, "FATBINARY", fatbin(CALLER))
        == add(driver, link, "FATBINARY", fatbin(CALLEE))
    )
    image, _ = ok(driver.cuLinkComplete(link))
    assert 2 == count_kernels(driver, ok, image)
    assert 1 == count_kernels(driver, ok, fatbin(CALLEE))
    assert "CUDA_ERROR_NO_BINARY_FOR_GPU" == driver.cuModuleLoadData(fatbin(CALLEE, arch=100))[0].name


def test_fatbin_in_its_wrapper_is_loaded(driver, ok):
    data = ctypes.create_string_buffer(fatbin(CALLEE))
    wrapper = ctypes.create_string_buffer(struct.pack("<IIQQ", 0x466243B1, 1, ctypes.addressof(data), 0))
    assert 1 == count_kernels(driver, ok, ctypes.addressof(wrapper))


def test_machine_code_is_refused(driver, link):
    cubin = b"\x7fELF\x02\x01\x01".ljust(18, b"\0") + struct.pack("<H", 190) + bytes(44)
    assert "CUDA_ERROR_NO_BINARY_FOR_GPU" == add(driver, link, "CUBIN", cubin)
    assert "CUDA_ERROR_NO_BINARY_FOR_GPU" == driver.cuModuleLoadData(cubin)[0].name


def test_constant_memory_of_a_module_is_counted(driver, ok):
    text = HEADER + b".const .align 4 .b8 table[40];\n.global .b8 other[4];\n.visible .entry kernel() { ret; }\n"
    module = ok(driver.cuModuleLoadData(text))
    function = ok(driver.cuModuleGetFunction(module, b"kernel"))
    assert 40 == ok(driver.cuFuncGetAttribute(driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_CONST_SIZE_BYTES, function))
    ok(driver.cuModuleUnload(module))


def test_threads_beyond_the_launch_bounds_are_an_invalid_value(driver, ok):
    module = ok(driver.cuModuleLoadData(HEADER + b".visible .entry kernel() .maxntid 64, 2 { ret; }\n"))
    function = ok(driver.cuModuleGetFunction(module, b"kernel"))
    assert "CUDA_SUCCESS" == driver.cuLaunchKernel(function, 1, 1, 1, 128, 1, 1, 0, 0, 0, 0)[0].name
    assert "CUDA_ERROR_INVALID_VALUE" == driver.cuLaunchKernel(function, 1, 1, 1, 129, 1, 1, 0, 0, 0, 0)[0].name
    ok(driver.cuModuleUnload(module))


def test_profiler_calls_need_a_context(driver, ok):
    ok(driver.cuProfilerStart())
    ok(driver.cuProfilerStop())


FORKED = """
import os
from cudatool import _driver
_driver.initialize()
from cuda.bindings import driver
print(driver.cuDeviceGetCount()[0].name if {early} else driver.cuInit(0)[0].name, flush=True)
child = os.fork()
if child == 0:
    print(driver.cuInit(0)[0].name, driver.cuDeviceGetCount()[0].name, flush=True)
    raise SystemExit(0)
assert 0 == os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
print(driver.cuDeviceGetCount()[0].name)
"""


@pytest.mark.parametrize(
    ("early", "child"),
    [(False, "CUDA_ERROR_NOT_INITIALIZED CUDA_ERROR_NOT_INITIALIZED"), (True, "CUDA_SUCCESS CUDA_SUCCESS")],
    ids=["used before", "not used before"],
)
def test_process_forked_from_one_that_uses_cuda_cannot(early, child):
    command = [sys.executable, "-c", FORKED.format(early=early)]
    environment = {**os.environ, "CUDATOOL_DEVICE": "sim"}
    output = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()
    assert [child, "CUDA_ERROR_NOT_INITIALIZED" if early else "CUDA_SUCCESS"] == output[1:]
