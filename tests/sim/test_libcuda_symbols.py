"""libcuda.so.1 for programs that link with it, or look its functions up by name."""

from __future__ import annotations

import ctypes

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
