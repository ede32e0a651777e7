"""The software CUDA device: a libcuda.so.1 whose entry points are Python.

:func:`load` puts it in the place of NVIDIA's driver, for this process. Of cudatool it imports only
:mod:`cudatool.ptx` and the leaves that every room may import: it is a driver, and knows its users only through the
driver API.
"""

from __future__ import annotations

import atexit
import ctypes
import importlib
import os
import re

from cudatool.loading.shared_libraries import open_nvrtc_builtins, wheel_library
from cudatool.loading.whole_imports import whole_imports
from cudatool.sim import _calls, abi, device_runtime, machine, signals
from cudatool.sim.abi import ENTRIES, EntryPoint, Subscriber, subscribe, unsubscribe
from cudatool.sim.host_library import path_of
from cudatool.sim.machine import Machine, MachineOptions
from cudatool.sim.queue import Operation, Schedule
from cudatool.sim.results import AddressSpaceError, Result
from cudatool.sim.toolchain import nvjitlink, nvrtc, runtime_api

__all__ = [
    "AddressSpaceError",
    "EntryPoint",
    "Machine",
    "MachineOptions",
    "Operation",
    "Result",
    "Schedule",
    "Subscriber",
    "drain",
    "load",
    "subscribe",
    "unsubscribe",
]

# Modules that declare entry points of the driver, by the sections of NVIDIA's reference.
_ENTRY_POINTS = (
    "capture",
    "copy",
    "device",
    "function",
    "graph",
    "graph_exec",
    "graph_nodes",
    "green",
    "ipc",
    "link",
    "logs",
    "managed",
    "memory",
    "module",
    "pointer",
    "pool",
    "profiler",
    "stream",
    "stream_values",
    "texture",
    "vmm",
)
_PER_THREAD = 2  # CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM
_NOT_FOUND, _SUCCESS = 500, 0
# Since which version of CUDA a name stands for another function, the first one still being asked for.
_SECOND_VERSIONS = {"cuCtxGetDevice": 13_000, "cuCtxSynchronize": 13_000, "cuStreamGetCtx": 12_050}
# Exported symbols that are not the function that the name stands for today.
_EXPORTED_AS = {"cuCtxCreate": "cuCtxCreate_v2"}
_loaded: Machine | None = None


def load(options: MachineOptions | None = None) -> Machine:
    """Make the software device this process's CUDA driver. Must come before anything loads libcuda.

    A second call returns the machine that is there.
    """
    global _loaded
    if _loaded is not None:
        return _loaded
    with whole_imports():
        for name in _ENTRY_POINTS:
            importlib.import_module(f"cudatool.sim.api.{name}")
    library = _load_library("cudatool.sim._libcuda")
    prototype = ctypes.CFUNCTYPE(
        ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_uint64, ctypes.c_size_t
    )

    signals.install(library)
    library.cudatool_set_target(ctypes.c_void_p(_calls.TARGET))
    library.cudatool_thunk.argtypes = [ctypes.c_int, ctypes.c_void_p]
    library.cudatool_thunk.restype = ctypes.c_void_p
    atexit.register(library.cudatool_leave)
    ctypes.pythonapi.Py_AtExit(library.cudatool_close)

    def forked() -> None:
        if _loaded is not None and _loaded.initialized:  # CUDA Programming Guide: no use of CUDA in a forked process
            library.cudatool_forked()
            atexit.unregister(drain)  # what is pending is the parent's

    os.register_at_fork(after_in_child=forked)

    def resolve(symbol: bytes, function: int, version: int, flags: int, status: int) -> int:
        try:
            name = _entry_name(symbol.decode(), version)
            address = abi.function_pointer(name, library.cudatool_thunk, per_thread=bool(flags & _PER_THREAD))
            if symbol in (b"cuGetProcAddress", b"cuGetProcAddress_v2"):
                address = ctypes.cast(library.cuGetProcAddress_v2, ctypes.c_void_p).value or 0
            ctypes.c_size_t.from_address(function).value = address
            if status:  # CU_GET_PROC_ADDRESS_SUCCESS or _SYMBOL_NOT_FOUND
                ctypes.c_int.from_address(status).value = 0 if address else 1
            return _SUCCESS if address else _NOT_FOUND
        except BaseException:
            return _NOT_FOUND

    callback = prototype(resolve)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(callback))  # C may call it until the process ends
    library.cudatool_set_resolver(callback)
    _load_compilers()
    runtime_api.install()
    _loaded = machine.create(options or MachineOptions())
    _loaded.scheduler.synchronized = device_runtime.flush_printf
    atexit.register(drain)
    return _loaded


def _entry_name(symbol: str, version: int) -> str:
    """Return which entry point is meant by a name that is looked up for a version of CUDA, or by an exported symbol.

    Those come with version 0, and name the version of the function that they are (``cuMemAlloc_v2``).
    """
    if not version:
        symbol = _EXPORTED_AS.get(symbol, symbol)
        return symbol if symbol in ENTRIES else re.sub(r"_v\d$", "", symbol)
    return f"{symbol}_v2" if version >= _SECOND_VERSIONS.get(symbol, version + 1) else symbol


def _load_library(module: str) -> ctypes.CDLL:
    return ctypes.CDLL(path_of(module), mode=ctypes.RTLD_GLOBAL)


def _load_compilers() -> None:
    """Put the stand-ins for NVRTC and nvJitLink before the real ones, where those are installed.

    The real ones are opened when a program first calls them: most programs' code comes from the cache.
    """
    if real := wheel_library("libnvrtc.so.13"):
        open_nvrtc_builtins(real)
        stand_in = _load_library("cudatool.sim._libnvrtc")
        stand_in.cudatool_nvrtc_path(os.fsencode(real))
        nvrtc.install(stand_in, str(real))
    if real := wheel_library("libnvJitLink.so.13"):
        linker = _load_library("cudatool.sim._libnvjitlink")
        linker.cudatool_nvjitlink_path(os.fsencode(real))
        nvjitlink.install(linker)


def drain() -> None:
    """Execute everything that is still pending, as the end of a process does."""
    found = _loaded
    if found is None:
        return

    def run() -> None:
        with abi.lock:
            found.scheduler.drain()
        abi.unlocked()

    signals.shielded(run)
