"""The driver's log: what calls that fail say, asked for by iterators and callbacks."""

from __future__ import annotations

import ctypes

import pytest

from cudatool.sim.driver_log import DriverLog


def fail(driver):
    """Make a call that fails with a message; return the call's name."""
    assert driver.cuMemFree(driver.CUdeviceptr(4711))[0].name == "CUDA_ERROR_INVALID_VALUE"
    return "cuMemFree"


def dump(driver, ok, iterator, size=1000):
    buffer = b" " * size
    return ok(driver.cuLogsDumpToMemory(iterator, buffer, size, 0)), buffer


def test_log_from_an_iterator_has_what_failed_since(driver, ok, tmp_path):
    fail(driver)
    here = ok(driver.cuLogsCurrent(0))
    number = int(here)
    name = fail(driver)
    path = tmp_path / "log.txt"
    after = ok(driver.cuLogsDumpToFile(here, str(path).encode(), 0))
    lines = path.read_text().splitlines()
    assert 1 == len(lines)
    assert lines[0].startswith(f"{name}: CUDA_ERROR_INVALID_VALUE: ")
    assert int(after) == number + 1
    ok(driver.cuLogsDumpToFile(after, str(path).encode(), 0))
    assert "" == path.read_text()


def test_log_in_memory_ends_with_the_latest_message(machine, driver, ok):
    from cudatool.sim import Result, abi

    def into(room, iterator):
        buffer, size = ctypes.create_string_buffer(room), ctypes.c_size_t(room)
        at, entry = ctypes.c_uint(iterator), abi.ENTRIES["cuLogsDumpToMemory"]
        arguments = ctypes.addressof(at), ctypes.addressof(buffer), ctypes.addressof(size), 0
        return Result(abi.invoke(entry, arguments, 1)).name, buffer.value[: size.value].decode(), at.value - iterator

    here = int(ok(driver.cuLogsCurrent(0)))
    assert ("SUCCESS", "", 0) == into(100, here)
    fail(driver)
    driver.cuMemFree(driver.CUdeviceptr(0x9999999))
    status, text, steps = into(1000, here)
    assert ("SUCCESS", 2, 2) == (status, len(text.splitlines()), steps)
    status, text, _ = into(len(text), here)
    assert "SUCCESS" == status
    assert ["older messages are lost", True] == [text.splitlines()[0], "0x9999999" in text.splitlines()[1]]
    assert ("INVALID_VALUE", "", 0) == into(10, here)


def test_callback_hears_of_messages_until_it_is_unregistered(driver, ok):
    heard = []
    kind = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t)

    @kind
    def callback(data, level, message, length):
        heard.append((data, level, message[:length].decode().partition(":")[0]))
        driver.cuCtxGetCurrent()  # the driver can be called

    function = driver.CUlogsCallback(_ptr=ctypes.addressof(ctypes.c_void_p.from_buffer(callback)))
    handle = ok(driver.cuLogsRegisterCallback(function, 5))
    name = fail(driver)
    assert [(5, 0, name)] == heard
    ok(driver.cuLogsUnregisterCallback(handle))
    fail(driver)
    assert 1 == len(heard)
    assert driver.cuLogsUnregisterCallback(handle)[0].name == "CUDA_ERROR_INVALID_VALUE"


@pytest.mark.parametrize("flags", [1])
def test_flags_are_for_the_future(driver, flags, tmp_path):
    assert driver.cuLogsCurrent(flags)[0].name == "CUDA_ERROR_INVALID_VALUE"
    assert driver.cuLogsDumpToFile(None, str(tmp_path / "a").encode(), flags)[0].name == "CUDA_ERROR_INVALID_VALUE"


def test_file_that_cannot_be_written_is_invalid(driver, tmp_path):
    path = str(tmp_path / "missing" / "log.txt").encode()
    assert driver.cuLogsDumpToFile(None, path, 0)[0].name == "CUDA_ERROR_INVALID_VALUE"


def test_oldest_messages_make_room():
    log = DriverLog()
    for number in range(3000):
        log.add(f"message {number:10}")
    lines = log.lines()
    assert "older messages are lost" == lines[0]
    assert f"message {2999:10}" == lines[-1]
    assert sum(len(line) + 1 for line in lines[1:]) <= 25_600
    assert [f"message {2999:10}"] == log.lines(2999)
    assert [] == log.lines(3000)
