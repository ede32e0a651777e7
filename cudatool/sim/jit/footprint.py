"""Exact access footprints: which bytes of the device's memory a launch read, wrote and updated atomically.

Instrumented code sets a byte of a shadow map per byte accessed, one map per kind of access so that host threads need
not agree, and marks the page. Maps are reserved, not allocated: they cost what was touched.
"""

from __future__ import annotations

import ctypes
import mmap

import numpy as np

__all__ = ["ATOMIC", "PAGE", "READ", "WRITE", "Footprint"]

READ, WRITE, ATOMIC = 1, 2, 4
PAGE = 4096


class Footprint:
    """What launches access within ``[base, base + size)``.

    Parameters
    ----------
    base, size
        The device's memory, bytes.
    """

    def __init__(self, base: int, size: int) -> None:
        self.base = base
        self.size = size
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_NORESERVE
        # One page more: an access may begin at the last byte.
        self._maps = tuple(mmap.mmap(-1, length, flags=flags) for length in (size + PAGE,) * 3 + (size // PAGE + 2,))
        self._views = [np.frombuffer(m, np.uint8) for m in self._maps]
        self.addresses = tuple(ctypes.addressof(ctypes.c_char.from_buffer(m)) for m in self._maps)

    def _touched(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Return the numbers of pages that were marked, and of those after them: an access may cross over."""
        # The page map is itself sparse: look where the kernel has put memory for it.
        pages = np.flatnonzero(self._views[3])
        return np.union1d(pages, pages + 1)

    def ranges(self) -> list[tuple[int, int, int]]:
        """Return ``(address, size, flags)`` of each maximal run of bytes accessed in the same ways, by address."""
        pages = self._touched()
        found: list[tuple[int, int, int]] = []
        if not len(pages):
            return found
        breaks = np.flatnonzero(np.diff(pages) != 1) + 1
        for run in np.split(pages, breaks):
            first, stop = int(run[0]) * PAGE, min((int(run[-1]) + 1) * PAGE, self.size)
            read, write, atomic = (view[first:stop] for view in self._views[:3])
            flags = read | write << 1 | atomic << 2
            edges = np.flatnonzero(np.diff(flags)) + 1
            starts = np.concatenate(([0], edges))
            sizes = np.diff(np.concatenate((starts, [len(flags)])))
            kinds = flags[starts]
            kept = kinds != 0
            for start, size, kind in zip(
                starts[kept].tolist(), sizes[kept].tolist(), kinds[kept].tolist(), strict=True
            ):
                found.append((self.base + first + start, size, kind))
        return found

    def clear(self) -> None:
        """Forget everything."""
        for page in self._touched().tolist():
            for view in self._views[:3]:
                view[page * PAGE : (page + 1) * PAGE] = 0
            self._views[3][page : page + 1] = 0
