"""NVIDIA's cuFile, with its errors turned into ours."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from cudatool import _driver
from cudatool.errors import CudaError, DeviceUnavailableError

__all__ = ["cufile"]

_ADVICE: Final = {
    # A container that has no /run/udev of its host's is where this was seen.
    "CU_FILE_HANDLE_NOT_REGISTERED": "cuFile asks udev what file system a file is on; see that /run/udev is there, and "
    "read cufile.log",
}


@contextmanager
def cufile() -> Iterator[Any]:
    """Give :mod:`cuda.bindings.cufile` to the ``with`` block.

    Raises
    ------
    DeviceUnavailableError
        This machine has no cuFile, or it is the software device's.
    CudaError
        cuFile refused; the error's name is cuFile's, as ``CU_FILE_INVALID_VALUE``.
    """
    module = _opened()
    try:
        yield module
    except module.cuFileError as error:
        name = f"CU_FILE_{str(error).partition(' ')[0]}"
        advice = _ADVICE.get(name)
        raise CudaError(f"cuFile: {error}{f'; {advice}' if advice else ''}", name) from error


@functools.cache
def _opened() -> Any:
    if _driver.initialize().kind == "sim":
        raise DeviceUnavailableError(
            "GPUDirect Storage needs an NVIDIA GPU; on the software device, read the file with NumPy and copy it with "
            "cudatool.asarray"
        )
    try:
        from cuda.bindings import cufile as module
        from cuda.pathfinder import DynamicLibNotFoundError
    except ImportError as error:
        raise DeviceUnavailableError(f"GPUDirect Storage needs cuda.bindings with cuFile: {error}") from error
    try:
        # Where the driver for direct transfers is missing, cuFile copies by way of the host, if it may.
        module.set_parameter_bool(module.BoolConfigParameter.PROPERTIES_ALLOW_COMPAT_MODE, True)
        module.driver_open()
    except DynamicLibNotFoundError as error:
        raise DeviceUnavailableError(
            f"GPUDirect Storage needs libcufile: pip install nvidia-cufile ({error})"
        ) from None
    except module.cuFileError as error:
        raise DeviceUnavailableError(f"cuFile does not start on this machine: {error}") from error
    return module
