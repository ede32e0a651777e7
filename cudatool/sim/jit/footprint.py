"""Exact access footprints: which bytes of the device's memory a launch read, wrote and updated atomically.

Instrumented code sets a byte of a shadow map per byte accessed, one map per kind of access so that host threads need
not agree, and marks the page. Maps are reserved, not allocated: they cost what was touched.
"""

from __future__ import annotations

import ctypes
import mmap

from cudatool.sim import _footprint
from cudatool.sim.results import AddressSpaceError

__all__ = ["ATOMIC", "MAP_NORESERVE", "PAGE", "READ", "WRITE", "Footprint"]

READ, WRITE, ATOMIC = 1, 2, 4
PAGE = 4096
MAP_NORESERVE = 0x4000  # on Linux; Python names it from 3.13 on
_GROUP = mmap.PAGESIZE  # marks of pages in one page of the system

_libc = ctypes.CDLL(None)
_libc.mlock2.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint)
_MLOCK_ONFAULT = 1


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
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
        count = -(-(size // PAGE + 2) // _GROUP) * _GROUP  # an access may begin at the last byte
        lengths = (count * PAGE, count * PAGE, count * PAGE, count)
        try:
            self._maps = [mmap.mmap(-1, length, flags=flags) for length in lengths]
        except OSError:
            raise AddressSpaceError(sum(lengths)) from None
        for shadow in self._maps[:-1]:
            shadow.madvise(mmap.MADV_HUGEPAGE)  # dense accesses are the common case
        self._pages = count
        self.addresses = tuple(ctypes.addressof(ctypes.c_char.from_buffer(one)) for one in self._maps)
        # What is swapped out counts as never written: keep it from that, where the limit on locked memory allows.
        _libc.mlock2(self.addresses[-1], count, _MLOCK_ONFAULT)

    def take(self) -> list[tuple[int, int, int]]:
        """Return what :meth:`ranges` does, and forget it."""
        return _footprint.ranges(self.addresses, self._pages, self.base, True)

    def ranges(self) -> list[tuple[int, int, int]]:
        """Return ``(address, size, flags)`` of each maximal run of bytes accessed in the same ways, by address."""
        return _footprint.ranges(self.addresses, self._pages, self.base, False)

    def clear(self) -> None:
        """Forget everything."""
        self.take()
