"""libcuda.so.1 for programs that link with it, or look its functions up by name."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from shutil import which

import pytest


@pytest.fixture
def library(driver):
    return ctypes.CDLL("libcuda.so.1")


def test_every_entry_point_is_a_symbol(library):
    from cudatool.sim.abi import ENTRIES

    def names(entry):
        return entry, *(f"{entry}_v{version}" for version in (2, 3, 4))

    assert [] == [entry for entry in ENTRIES if not any(hasattr(library, name) for name in names(entry))]


def test_symbols_are_the_functions_of_their_version(driver, ok, library):
    context, device, address = ctypes.c_void_p(), ctypes.c_int(-1), ctypes.c_uint64()
    for name in ("cuCtxCreate", "cuCtxCreate_v2"):  # three arguments, unlike that of today
        assert 0 == library[name](ctypes.byref(context), 0, 0)
        assert 0 == library["cuCtxGetDevice"](ctypes.byref(device))
        assert 0 == device.value
        assert 0 == library["cuCtxDestroy_v2"](context)
    assert 0 == library["cuMemAlloc_v2"](ctypes.byref(address), ctypes.c_size_t(64))
    assert 0 == library["cuMemsetD8_v2"](address, 3, ctypes.c_size_t(64))
    data = (ctypes.c_ubyte * 64)()
    assert 0 == library["cuMemcpyDtoH_v2"](data, address, ctypes.c_size_t(64))
    assert [3] * 64 == data[:]
    assert 0 == library["cuMemFree_v2"](address)
    assert 1 == library["cuMemFree_v2"](address)  # CUDA_ERROR_INVALID_VALUE


def test_undocumented_tables_are_not_found(library):
    table = ctypes.c_void_p(1)
    assert 500 == library["cuGetExportTable"](ctypes.byref(table), None)
    assert table.value is None


def test_nvidias_runtime_library_sees_a_driver_without_a_device(driver, tmp_path):
    """Its error for tables that are not there makes PyTorch warn, where it is silent without a driver."""
    compiler = which("cc") or which("gcc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    source = tmp_path / "runtime.c"
    source.write_text(
        "int cuGetProcAddress_v2(const char*, void**, int, unsigned long, int*);\n"
        "int started(void) { int (*init)(unsigned) = 0, status = -1;\n"
        '  int result = cuGetProcAddress_v2("cuInit", (void**)&init, 2000, 0, &status);\n'
        "  return result || status ? -1 : init(0); }\n"
    )
    for name, result in (("libcudart.so.13", 100), ("libother.so", 0)):  # CUDA_ERROR_NO_DEVICE
        subprocess.run([compiler, "-shared", "-fPIC", "-o", tmp_path / name, source], check=True, timeout=60)
        assert result == ctypes.CDLL(tmp_path / name).started(), name


_IN_THREADS = r"""
#include <pthread.h>
#include <stddef.h>
int cuInit(unsigned), cuDevicePrimaryCtxRetain(void **, int), cuCtxSetCurrent(void *), cuCtxGetCurrent(void **);
int cuStreamCreate(void **, unsigned), cuCtxGetDevice(int *);
static int result;
static void *work(void *context) {
    void *current = NULL, *stream;
    int device;
    if (cuCtxGetDevice(&device) != 201) result = 1; /* CUDA_ERROR_INVALID_CONTEXT: of no thread before this one */
    if (cuCtxSetCurrent(context) || cuCtxGetCurrent(&current) || current != context) result = 2;
    if (cuStreamCreate(&stream, 0)) result = 3;
    return NULL;
}
int run(int threads) {
    void *context;
    if (cuInit(0) || cuDevicePrimaryCtxRetain(&context, 0)) return -1;
    while (threads--) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, work, context) || pthread_join(thread, NULL)) return -2;
    }
    return result;
}
"""


def test_threads_of_c_keep_their_current_context_from_call_to_call(driver, tmp_path):
    compiler = which("cc") or which("gcc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    source, library = tmp_path / "threads.c", tmp_path / "libthreads.so"
    source.write_text(_IN_THREADS)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source, "-lpthread"], check=True, timeout=60)
    assert 0 == ctypes.CDLL(library).run(50)


_AT_EXIT = """
import ctypes
import subprocess
import sys
from cudatool import _driver
_driver.choose("sim")
_driver.initialize()
library = ctypes.CDLL("libcuda.so.1")
assert library.cuInit(0) == 0
# exit(3) calls them when Python has ended: one that was used before, and one that was not
for function in (library.cuInit, library.cuMemFreeHost):
    ctypes.CDLL(None)["__cxa_atexit"](function, None, None)
"""


def test_symbols_can_be_called_when_python_is_gone():
    found = subprocess.run([sys.executable, "-c", _AT_EXIT], capture_output=True, text=True, timeout=120)
    assert (0, "") == (found.returncode, found.stderr.partition("\n")[2])
