"""NVIDIA's Tools Extension, from wherever this machine has it."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from typing import Any, Final, Protocol

from cudatool.loading.shared_libraries import wheel_folders

__all__ = ["Nvtx", "nvtx"]

_LIBRARIES: Final = ("libnvToolsExt.so.1", "libnvtx3interop.so.1")  # of NVTX 2 and 3, with the same functions


class Nvtx(Protocol):
    """What this package uses of NVTX."""

    def push(self, message: str) -> None:
        """Open a range on this thread."""

    def pop(self) -> None:
        """Close the range that this thread opened last."""

    def start(self, message: str) -> Any:
        """Open a range that any thread may end with what is returned."""

    def end(self, started: Any) -> None:
        """Close a range of :meth:`start`."""

    def mark(self, message: str) -> None:
        """Mark this moment."""


class _Package:
    """The package ``nvtx``."""

    def __init__(self) -> None:
        import nvtx

        self.push, self.pop, self.mark = nvtx.push_range, nvtx.pop_range, nvtx.mark
        self.start, self.end = nvtx.start_range, nvtx.end_range


class _Library:
    """A library with NVTX's C functions."""

    def __init__(self, name: str) -> None:
        library = ctypes.CDLL(name)
        self._push, self.pop, self._mark = library.nvtxRangePushA, library.nvtxRangePop, library.nvtxMarkA
        self._start, self._end = library.nvtxRangeStartA, library.nvtxRangeEnd
        self._push.argtypes = self._mark.argtypes = self._start.argtypes = [ctypes.c_char_p]
        self._start.restype = ctypes.c_uint64
        self._end.argtypes = [ctypes.c_uint64]

    def push(self, message: str) -> None:
        self._push(message.encode())

    def start(self, message: str) -> int:
        return int(self._start(message.encode()))

    def end(self, started: int) -> None:
        self._end(started)

    def mark(self, message: str) -> None:
        self._mark(message.encode())


@functools.cache
def nvtx() -> Nvtx | None:
    """Return NVTX, or None where this machine has none."""
    try:
        return _Package()
    except ImportError:
        pass
    for name in _candidates():
        try:
            return _Library(name)
        except (OSError, AttributeError):  # not there, or something else of that name
            pass
    return None


def _candidates() -> Iterator[str]:
    """Yield where the libraries may be: known to the linker, or in NVIDIA's wheels of CUDA 13 and 12."""
    yield from _LIBRARIES
    for folder in wheel_folders():
        yield from (f"{folder}/{part}/lib/{name}" for part in ("cu13", "nvtx") for name in _LIBRARIES)
