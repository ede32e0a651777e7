"""Files and buffers that cuFile knows."""

from __future__ import annotations

import errno
import os
import sys
from types import TracebackType
from typing import Any, Self

from cudatool import _driver
from cudatool.errors import CudaError, FileFormatError, OutputError, UsageError
from cudatool.gds._cufile import cufile
from cudatool.runtime.array import DeviceArray, check_writeable
from cudatool.runtime.calls import operation
from cudatool.runtime.device import device as on_device
from cudatool.runtime.stream import current_stream
from cudatool.runtime.traced_calls import traced
from cudatool.trace import hooks
from cudatool.trace.events import AccessFlag, Kind

__all__ = ["GdsFile", "gds_deregister_buffer", "gds_register_buffer"]


@traced
def gds_register_buffer(s: DeviceArray) -> None:
    """Let cuFile know an array that many transfers will use, which makes them faster.

    Raises
    ------
    UsageError
        The array has gaps.
    CudaError
        cuFile refused: it was registered before, for one.
    """
    _check_whole(s)
    with cufile() as library, on_device(s.device), operation():
        library.buf_register(s.data_ptr(), s.nbytes, 0)


@traced
def gds_deregister_buffer(s: DeviceArray) -> None:
    """Undo :func:`gds_register_buffer`, before the array is dropped."""
    with cufile() as library, on_device(s.device), operation():
        library.buf_deregister(s.data_ptr())


class GdsFile:
    """A file that arrays are saved to and loaded from.

    Parameters
    ----------
    filename
        Where it is.
    flags
        As for :func:`os.open`: ``os.O_CREAT | os.O_RDWR``. ``os.O_DIRECT`` is added where the file system knows it.

    Raises
    ------
    DeviceUnavailableError
        This machine has no cuFile, or it is the software device's.
    OSError
        The file cannot be opened.
    """

    def __init__(self, filename: str | os.PathLike[str], flags: int) -> None:
        self.filename = os.fspath(filename)
        self.flags = flags
        self.handle: int | None = None
        """cuFile's, None while the file is not registered."""
        self.fd = -1
        with cufile():  # or there would be a file, but nothing to do with it
            self.fd = _open(self.filename, flags)
        self.register_handle()

    @traced
    def register_handle(self) -> None:
        """Let cuFile know the file. It does from the beginning.

        Raises
        ------
        UsageError
            It does already, or the file is closed.
        """
        if self.handle is not None or self.is_closed:
            raise UsageError(f"{self.filename} is {'closed' if self.is_closed else 'registered already'}")
        with cufile() as library, operation():
            description = library.Descr()
            description.type = library.FileHandleType.OPAQUE_FD
            description.handle.fd = self.fd
            self.handle = int(library.handle_register(description.ptr))

    @traced
    def deregister_handle(self) -> None:
        """Let cuFile forget the file, which stays open.

        Raises
        ------
        UsageError
            cuFile does not know it.
        """
        handle, self.handle = self._registered(), None
        with cufile() as library, operation():
            library.handle_deregister(handle)

    @traced
    def load_storage(self, storage: DeviceArray, offset: int = 0) -> None:
        """Fill an array with the bytes of the file from `offset` on.

        Waits for the current stream first, which may still use the array, and then for the transfer.

        Raises
        ------
        FileFormatError
            The file ends before the array does.
        CudaError
            cuFile cannot read it.
        UsageError
            The array has gaps or cannot be written, or the file is not registered.
        """
        check_writeable(storage)
        done = self._transfer("read", storage, offset)
        if done != storage.nbytes:
            raise FileFormatError(self.filename, f"it has {done} of the {storage.nbytes} bytes asked for at {offset}")

    @traced
    def save_storage(self, storage: DeviceArray, offset: int = 0) -> None:
        """Write an array to the file from `offset` on.

        Waits for the current stream first, which may still write the array, and then for the transfer.

        Raises
        ------
        OutputError
            Less was written.
        CudaError
            cuFile cannot write it.
        UsageError
            The array has gaps, or the file is not registered.
        """
        done = self._transfer("write", storage, offset)
        if done != storage.nbytes:
            raise OutputError(f"{self.filename}: {done} of {storage.nbytes} bytes were written; is the disk full?")

    def _transfer(self, direction: str, array: DeviceArray, offset: int) -> int:
        handle = self._registered()
        _check_whole(array)
        if offset < 0:
            raise UsageError(f"offset is {offset}; a file begins at 0")
        if not array.size:
            return 0
        # cuFile knows no streams: it works at once, on the host's behalf.
        current_stream(array.device).synchronize()
        with cufile() as library, on_device(array.device), operation():
            done = int(getattr(library, direction)(handle, array.data_ptr(), array.nbytes, offset, 0))
        if done < 0:
            raise CudaError(f"cuFile: cannot {direction} {self.filename} at {offset}: status {done}")
        if hooks.wants_accesses:
            mode = AccessFlag.WRITE if direction == "read" else AccessFlag.READ
            hooks.emit(Kind.HOST_ACCESS, address=array.data_ptr(), size=array.nbytes, flags=mode)
        return done

    def _registered(self) -> int:
        if self.handle is None:
            raise UsageError(f"cuFile does not know {self.filename} any more; call register_handle")
        return self.handle

    def close(self) -> None:
        """Deregister and close the file. A second time does nothing."""
        if self.is_closed:
            return
        try:
            if self.handle is not None:
                self.deregister_handle()
        finally:
            os.close(self.fd)
            self.fd = -1

    @property
    def is_closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self.fd < 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self, _finalizing: Any = sys.is_finalizing) -> None:
        if getattr(self, "fd", -1) >= 0 and not _finalizing() and _driver.started():
            self.close()

    def __repr__(self) -> str:
        return f"<GdsFile {self.filename} {'closed' if self.is_closed else 'open'}>"


def _open(filename: str, flags: int) -> int:
    try:
        return os.open(filename, flags | os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:  # what a file system without direct transfers says
            raise
    return os.open(filename, flags)


def _check_whole(array: DeviceArray) -> None:
    if not isinstance(array, DeviceArray) or not array.is_contiguous():
        raise UsageError(f"pass an array of cudatool's in one piece, not {array!r}; contiguous() makes one")
