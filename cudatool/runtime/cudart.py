"""The functions of the CUDA runtime API that torch.cuda offers, by way of the driver, with error codes for results."""

from __future__ import annotations

import ctypes
from enum import IntEnum
from typing import Any, Final

from cudatool.errors import CudaError
from cudatool.runtime import calls
from cudatool.runtime.allocator import mem_get_info
from cudatool.runtime.device import DeviceLike, current_device
from cudatool.runtime.device import device as on_device
from cudatool.runtime.dtypes import require_int

__all__ = ["Cudart", "check_error", "cudaError", "cudaStatus", "cudart"]


class cudaStatus(IntEnum):  # noqa: N801 - torch.cuda's name
    """Results that torch.cuda has names for, with today's numbers: torch has not ready as 34, which is CUDA 9's."""

    SUCCESS = 0
    ERROR_NOT_READY = 600


class cudaError(int):  # noqa: N801 - CUDA's name
    """A result of the runtime API, cudaError_t; 0 is success.

    The driver's results have the same numbers, where both APIs have the same result.
    """

    success: cudaError

    @property
    def name(self) -> str:
        """The driver's name of it, as ``CUDA_ERROR_INVALID_VALUE``."""
        try:
            return str(calls.driver.CUresult(int(self)).name)
        except ValueError:
            return "CUDA_ERROR_UNKNOWN"

    def __repr__(self) -> str:
        return f"cudaError({int(self)}: {self.name})"


cudaError.success = cudaError(0)
_Error = cudaError


class Cudart:
    """What :func:`cudart` returns. Unlike the rest of cudatool, functions return a status and raise nothing."""

    cudaError: Final = cudaError  # noqa: N815 - CUDA's name

    @staticmethod
    def cudaGetErrorString(error: int) -> str:
        """Return what an error means, in words."""
        status, text = calls.driver.cuGetErrorString(calls.driver.CUresult(error)) if _known(error) else (1, b"")
        return text.decode() if not status else "unrecognized error code"

    @staticmethod
    def cudaProfilerStart() -> _Error:
        """Let a profiler collect from now on."""
        return _status(calls.driver.cuProfilerStart)

    @staticmethod
    def cudaProfilerStop() -> _Error:
        """Let a profiler collect no more."""
        return _status(calls.driver.cuProfilerStop)

    @staticmethod
    def cudaHostRegister(ptr: int, size: int, flags: int = 0) -> _Error:
        """Pin `size` bytes of host memory at `ptr`; see :func:`cudatool.host_register`."""
        return _status(calls.driver.cuMemHostRegister, ptr, size, flags)

    @staticmethod
    def cudaHostUnregister(ptr: int) -> _Error:
        """Undo :meth:`cudaHostRegister`."""
        return _status(calls.driver.cuMemHostUnregister, ptr)

    @staticmethod
    def cudaMemGetInfo(device: DeviceLike = None) -> tuple[int, int]:
        """Return free and total bytes of a device; the one function that raises what goes wrong, as torch's does."""
        return mem_get_info(device)

    @staticmethod
    def cudaStreamCreate(ptr: int) -> _Error:
        """Make a stream that waits for the legacy default stream, and write its handle to the host address `ptr`."""
        with on_device(current_device()):
            status, stream = calls.driver.cuStreamCreate(calls.driver.CUstream_flags.CU_STREAM_DEFAULT)
        if not status:
            ctypes.c_void_p.from_address(ptr).value = int(stream)
        return cudaError(int(status))

    @staticmethod
    def cudaStreamDestroy(stream: int) -> _Error:
        """Destroy a stream of :meth:`cudaStreamCreate`."""
        return _status(calls.driver.cuStreamDestroy, stream)


_cudart: Final = Cudart()


def cudart() -> Cudart:
    """Start the driver, and return the functions of the CUDA runtime API that torch.cuda offers."""
    _ = calls.driver
    return _cudart


def check_error(res: int) -> None:
    """Raise what a status means, unless it is success.

    Raises
    ------
    CudaError
        `res` is not 0.
    UsageError
        `res` is no number.
    """
    if number := require_int("res", res):
        raise CudaError(f"{cudart().cudaGetErrorString(res)} ({number})", cudaError(number).name)


def _known(error: int) -> bool:
    try:
        calls.driver.CUresult(error)
    except ValueError:
        return False
    return True


def _status(function: Any, *arguments: int) -> cudaError:
    with on_device(current_device()):
        return cudaError(int(function(*arguments)[0]))
