"""Driver entry points: error log management, grouped as in the CUDA driver API reference."""

from __future__ import annotations

import ctypes
from ctypes import c_size_t, c_uint
from pathlib import Path
from typing import Final

from cudatool.sim import abi
from cudatool.sim import machine as state
from cudatool.sim.abi import entry, read_name, write
from cudatool.sim.results import DriverError, Result

_LEVEL_ERROR: Final = 0  # CU_LOG_LEVEL_ERROR
_Callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p, c_size_t)


@entry("cuLogsRegisterCallback(CUlogsCallback callbackFunc, void *userData, CUlogsCallbackHandle *callback_out)")
def cuLogsRegisterCallback(callbackFunc: int, userData: int, callback_out: int) -> None:
    if not callbackFunc:
        raise DriverError(Result.INVALID_VALUE)
    function = _Callback(callbackFunc)

    def listener(text: str) -> None:
        message = text.encode()
        abi.after_call(lambda: function(userData, _LEVEL_ERROR, message, len(message)))

    handle = state.machine.new_handle()
    abi.driver_log.listeners[handle] = listener
    if callback_out:
        write(callback_out, c_size_t, handle)


@entry("cuLogsUnregisterCallback(CUlogsCallbackHandle callback)")
def cuLogsUnregisterCallback(callback: int) -> None:
    if abi.driver_log.listeners.pop(callback, None) is None:
        raise DriverError(Result.INVALID_VALUE)


@entry("cuLogsCurrent(CUlogIterator *iterator_out, unsigned int flags)")
def cuLogsCurrent(iterator_out: int, flags: int) -> None:
    if flags:
        raise DriverError(Result.INVALID_VALUE)
    write(iterator_out, c_uint, abi.driver_log.end)


@entry("cuLogsDumpToFile(CUlogIterator *iterator, const char *pathToFile, unsigned int flags)")
def cuLogsDumpToFile(iterator: int, pathToFile: int, flags: int) -> None:
    path = Path(read_name(pathToFile))
    if flags:
        raise DriverError(Result.INVALID_VALUE)
    text = "".join(f"{line}\n" for line in abi.driver_log.lines(_start(iterator)))
    try:
        path.write_text(text)
    except OSError as error:
        raise DriverError(Result.INVALID_VALUE, f"{path}: {error.strerror}") from error
    _advance(iterator)


@entry("cuLogsDumpToMemory(CUlogIterator *iterator, char *buffer, size_t *size, unsigned int flags)")
def cuLogsDumpToMemory(iterator: int, buffer: int, size: int, flags: int) -> None:
    if not buffer or not size or not c_size_t.from_address(size).value or flags:
        raise DriverError(Result.INVALID_VALUE)
    start = _start(iterator)
    lines = abi.driver_log.lines(start, c_size_t.from_address(size).value - 1)
    text = "".join(f"{line}\n" for line in lines).encode()
    write(size, c_size_t, len(text))
    if abi.driver_log.lines(start) and not lines:
        raise DriverError(Result.INVALID_VALUE)
    ctypes.memmove(buffer, text + b"\0", len(text) + 1)
    _advance(iterator)


def _start(iterator: int) -> int:
    """Return the number of the first message that an iterator has not passed; 0 without an iterator."""
    return c_uint.from_address(iterator).value if iterator else 0


def _advance(iterator: int) -> None:
    if iterator:
        write(iterator, c_uint, abi.driver_log.end)
