"""GPUDirect Storage: what is asked of cuFile. A stand-in for cuFile copies on the host, to software device memory."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import cudatool
from cudatool import gds
from cudatool.errors import CudaError, FileFormatError, OutputError, UsageError
from cudatool.gds import _cufile
from cudatool.trace import hooks
from cudatool.trace.events import AccessFlag, Event, Kind


class CuFileError(Exception):
    pass


class CuFile:
    """Does with files what cuFile does, for handles and buffers that it knows."""

    cuFileError = CuFileError  # noqa: N815 - as the bindings have it
    FileHandleType = SimpleNamespace(OPAQUE_FD=1)

    def __init__(self) -> None:
        self.files: dict[int, int] = {}
        self.buffers: dict[int, int] = {}
        self.descriptions: dict[int, SimpleNamespace] = {}
        self.limit = 1 << 40

    def Descr(self) -> SimpleNamespace:
        found = SimpleNamespace(type=0, handle=SimpleNamespace(fd=-1), ptr=len(self.descriptions) + 1)
        self.descriptions[found.ptr] = found
        return found

    def handle_register(self, pointer: int) -> int:
        found = self.descriptions[pointer]
        assert 1 == found.type
        # Without O_DIRECT, which wants everything aligned; that is cuFile's own business.
        self.files[1000 + pointer] = os.open(f"/proc/self/fd/{found.handle.fd}", os.O_RDWR)
        return 1000 + pointer

    def handle_deregister(self, handle: int) -> None:
        os.close(self.files.pop(handle))

    def buf_register(self, address: int, size: int, flags: int) -> None:
        if address in self.buffers:
            raise CuFileError("MEMORY_ALREADY_REGISTERED (5017): device pointer already registered")
        self.buffers[address] = size

    def buf_deregister(self, address: int) -> None:
        del self.buffers[address]

    def read(self, handle: int, address: int, size: int, offset: int, into: int) -> int:
        data = os.pread(self.files[handle], min(size, self.limit), offset)
        ctypes.memmove(address + into, data, len(data))
        return len(data)

    def write(self, handle: int, address: int, size: int, offset: int, into: int) -> int:
        return os.pwrite(self.files[handle], ctypes.string_at(address + into, min(size, self.limit)), offset)


@pytest.fixture
def library(device: str, monkeypatch: pytest.MonkeyPatch) -> CuFile:
    if device != "sim":
        pytest.skip("the stand-in for cuFile cannot reach a GPU's memory")
    found = CuFile()
    monkeypatch.setattr(_cufile, "_opened", lambda: found)
    return found


@pytest.fixture
def file(library: CuFile, tmp_path: Path) -> gds.GdsFile:
    with gds.GdsFile(tmp_path / "arrays", os.O_CREAT | os.O_RDWR) as opened:
        yield opened
    assert {} == library.files


def test_arrays_go_to_a_file_and_come_back(file: gds.GdsFile, tmp_path: Path) -> None:
    """Source: test_cuda.py::test_gds_read_write_tensors"""
    first, second = np.arange(1024, dtype="f4"), np.arange(2048, dtype="f8").reshape(2, -1)
    file.save_storage(cudatool.asarray(first), offset=0)
    file.save_storage(cudatool.asarray(second), offset=first.nbytes)
    one, other = cudatool.empty(first.shape), cudatool.empty(second.shape, "f8")
    file.load_storage(one)
    file.load_storage(other, first.nbytes)
    np.testing.assert_array_equal(first, one.get())
    np.testing.assert_array_equal(second, other.get())
    assert first.tobytes() + second.tobytes() == (tmp_path / "arrays").read_bytes()


def test_transfer_waits_for_the_work_that_makes_the_array(file: gds.GdsFile) -> None:
    stream = cudatool.Stream()
    with cudatool.stream(stream):
        array = cudatool.full(1024, 7)  # not run before somebody waits
        file.save_storage(array)
        array.fill_(8)
        file.load_storage(array)
    stream.synchronize()
    assert [7.0] == np.unique(array.get()).tolist()


def test_file_that_ends_too_early_is_an_error(file: gds.GdsFile) -> None:
    file.save_storage(cudatool.ones(1024))
    with pytest.raises(FileFormatError, match="4096 of the 8192 bytes asked for at 0"):
        file.load_storage(cudatool.empty(2048))


def test_disk_that_is_full_is_an_error(file: gds.GdsFile, library: CuFile) -> None:
    library.limit = 100
    with pytest.raises(OutputError, match="100 of 4096 bytes were written"):
        file.save_storage(cudatool.ones(1024))


def test_file_is_known_to_cufile_until_it_is_deregistered_or_closed(library: CuFile, tmp_path: Path) -> None:
    file = gds.GdsFile(tmp_path / "arrays", os.O_CREAT | os.O_RDWR)
    assert [file.handle] == list(library.files)
    with pytest.raises(UsageError, match="registered already"):
        file.register_handle()
    file.deregister_handle()
    for call in (file.load_storage, file.save_storage):
        with pytest.raises(UsageError, match="register_handle"):
            call(cudatool.ones(1))
    file.register_handle()
    file.close()
    file.close()
    assert file.is_closed
    assert {} == library.files
    with pytest.raises(UsageError, match="is closed"):
        file.register_handle()


def test_file_that_cannot_be_opened_is_an_oserror(library: CuFile, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        gds.GdsFile(tmp_path / "missing", os.O_RDONLY)


def test_buffers_are_registered_once(library: CuFile) -> None:
    array = cudatool.ones(1024)
    gds.gds_register_buffer(array)
    assert {array.data_ptr(): array.nbytes} == library.buffers
    with pytest.raises(CudaError) as caught:
        gds.gds_register_buffer(array)
    assert "CU_FILE_MEMORY_ALREADY_REGISTERED" == caught.value.name
    gds.gds_deregister_buffer(array)
    assert {} == library.buffers


def test_array_with_gaps_is_refused(file: gds.GdsFile) -> None:
    with pytest.raises(UsageError, match="in one piece"):
        file.save_storage(cudatool.ones((8, 8))[:, ::2])
    with pytest.raises(UsageError, match="a file begins at 0"):
        file.load_storage(cudatool.ones(8), -1)


def test_transfers_are_accesses_of_the_host(
    file: gds.GdsFile, events: list[Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    array = cudatool.ones(16)
    monkeypatch.setattr(hooks, "wants_accesses", True)
    file.save_storage(array)
    file.load_storage(array)
    found = [event for event in events if event.kind == Kind.HOST_ACCESS and event.address == array.data_ptr()]
    assert [AccessFlag.READ, AccessFlag.WRITE] == [event.flags for event in found]
    assert {array.nbytes} == {event.size for event in found}
